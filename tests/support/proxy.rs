//! A TCP proxy that can cut its connections, or let them hang: a network that fails, for one client only.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Forwards to one address until it is dropped.
pub struct Proxy {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<Pair>>>,
    valve: Arc<Valve>,
    refusing: Arc<AtomicBool>,
}

/// A connection, and the one that stands for it at the target.
struct Pair {
    client: TcpStream,
    server: TcpStream,
    forgotten: Arc<AtomicBool>,
}

/// Lets bytes through, or holds them back.
#[derive(Default)]
struct Valve {
    shut: Mutex<bool>,
    changed: Condvar,
}

impl Valve {
    fn set(&self, shut: bool) {
        *self.shut.lock().unwrap_or_else(PoisonError::into_inner) = shut;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut shut = self.shut.lock().unwrap_or_else(PoisonError::into_inner);
        while *shut {
            shut = self
                .changed
                .wait(shut)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Proxy {
    /// Listens on a free local port and forwards to `target` (`host:port`).
    pub fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (target, kept) = (target.to_owned(), Arc::downgrade(&connections));
        let valve = Arc::new(Valve::default());
        let passing = Arc::clone(&valve);
        let refusing = Arc::new(AtomicBool::new(false));
        let refuses = Arc::clone(&refusing);
        std::thread::spawn(move || {
            for accepted in listener.incoming() {
                let Some(kept) = kept.upgrade() else { return };
                if refuses.load(Ordering::SeqCst) {
                    // Dropping the connection ends it.
                    continue;
                }
                let (Ok(client), Ok(server)) = (accepted, TcpStream::connect(&target)) else {
                    continue;
                };
                // Small frames are answered at once on loopback, unless Nagle holds them back.
                let _ = client.set_nodelay(true).and(server.set_nodelay(true));
                let forgotten = Arc::new(AtomicBool::new(false));
                pump(&client, &server, &passing, &forgotten);
                pump(&server, &client, &passing, &forgotten);
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.push(Pair {
                    client,
                    server,
                    forgotten,
                });
            }
        });
        Self {
            address,
            connections,
            valve,
            refusing,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections it has accepted since it began, or since the last cut.
    pub fn accepted(&self) -> usize {
        self.lock().len()
    }

    /// Holds everything back, in both directions, also what new connections send. Nothing is lost.
    pub fn stall(&self) {
        self.valve.set(true);
    }

    /// Lets everything through again, what was held back first.
    pub fn resume(&self) {
        self.valve.set(false);
    }

    /// Lets nothing through any more on the connections that are open, and ends none of them; new ones work.
    pub fn forget(&self) {
        for pair in self.lock().iter() {
            pair.forgotten.store(true, Ordering::SeqCst);
        }
    }

    /// The ports from which the open connections come, as the server sees them.
    pub fn ports(&self) -> Vec<u16> {
        let pairs = self.lock();
        let addresses = pairs
            .iter()
            .filter_map(|pair| pair.server.local_addr().ok());
        addresses.map(|address| address.port()).collect()
    }

    /// Whether new connections end at once.
    pub fn refuse(&self, refuse: bool) {
        self.refusing.store(refuse, Ordering::SeqCst);
    }

    /// Cuts every connection. New ones are accepted, unless [refused](Self::refuse).
    pub fn cut(&self) {
        for pair in self.lock().drain(..) {
            let _ = pair.client.shutdown(Shutdown::Both);
            let _ = pair.server.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Pair>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.resume();
        self.cut();
        self.connections = Arc::default();
        // Wakes the listening thread, which then finds that it is not needed any more.
        let _ = TcpStream::connect(self.address);
    }
}

/// Copies from one socket to the other until either ends, then ends both.
fn pump(from: &TcpStream, to: &TcpStream, valve: &Arc<Valve>, forgotten: &Arc<AtomicBool>) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else {
        return;
    };
    let (valve, forgotten) = (Arc::clone(valve), Arc::clone(forgotten));
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            valve.pass();
            if forgotten.load(Ordering::SeqCst) {
                continue;
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
