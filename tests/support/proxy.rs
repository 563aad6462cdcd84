//! A TCP proxy that can cut its connections: a network that fails, for one client only.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// Forwards to one address until it is dropped.
pub struct Proxy {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    /// Listens on a free local port and forwards to `target` (`host:port`).
    pub fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (target, kept) = (target.to_owned(), Arc::downgrade(&connections));
        std::thread::spawn(move || {
            for accepted in listener.incoming() {
                let Some(kept) = kept.upgrade() else { return };
                let (Ok(client), Ok(server)) = (accepted, TcpStream::connect(&target)) else {
                    continue;
                };
                // Small frames are answered at once on loopback, unless Nagle holds them back.
                let _ = client.set_nodelay(true).and(server.set_nodelay(true));
                pump(&client, &server);
                pump(&server, &client);
                kept.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend([client, server]);
            }
        });
        Self {
            address,
            connections,
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts every connection. New ones are accepted.
    pub fn cut(&self) {
        let mut connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for socket in connections.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.connections = Arc::default();
        // Wakes the listening thread, which then finds that it is not needed any more.
        let _ = TcpStream::connect(self.address);
    }
}

/// Copies from one socket to the other until either ends, then ends both.
fn pump(from: &TcpStream, to: &TcpStream) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else {
        return;
    };
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
