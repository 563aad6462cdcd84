//! Brokers to test against: the shared one, and private ones that may be killed.
//!
//! Owns [`PrivateBroker`]: a RabbitMQ node in a folder of its own, on free ports, with its own port
//! mapper (epmd) and cookie, so that it meets nobody else's. Promises that node, port mapper and
//! folder are gone when it is dropped, also after a panic. Needs the server's scripts
//! (`LANEWAY_RABBITMQ_BIN` names their folder; by default the usual places are tried) and the
//! commands `epmd` and `kill`. Works as root and as any other user.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// The URL of the broker that tests share; `LANEWAY_AMQP_URL` names another than the local one.
pub fn shared_url() -> String {
    std::env::var("LANEWAY_AMQP_URL")
        .unwrap_or_else(|_| "amqp://guest:guest@127.0.0.1:5672".to_owned())
}

/// A name that no other test and no other run uses.
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("laneway-{name}-{}-{number}", std::process::id())
}

/// A node of one's own.
pub struct PrivateBroker {
    folder: PathBuf,
    node: String,
    port: u16,
    distribution_port: u16,
    epmd_port: u16,
    epmd: Child,
    server: Option<Child>,
}

impl PrivateBroker {
    /// Starts a node with the consistent-hash exchange, and waits until it takes connections.
    pub fn start() -> Self {
        Self::with_plugins("[rabbitmq_consistent_hash_exchange].\n")
    }

    /// Starts a node without any plugin.
    pub fn plain() -> Self {
        Self::with_plugins("[].\n")
    }

    fn with_plugins(plugins: &str) -> Self {
        let name = unique("broker");
        let folder = std::env::temp_dir().join(&name);
        fs::create_dir_all(&folder).expect("the temporary folder is writable");
        write_secret(&folder.join(".erlang.cookie"), "laneway-private-broker");
        for (file, content) in [("env.conf", ""), ("enabled_plugins", plugins)] {
            fs::write(folder.join(file), content).expect("writable");
        }
        let [port, distribution_port, epmd_port] = free_ports();
        // The node would start a port mapper by itself, but as a daemon that outlives it.
        let epmd = Command::new("epmd")
            .args(["-port", &epmd_port.to_string(), "-address", "127.0.0.1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the command epmd is there");
        let mut broker = Self {
            node: format!("{name}@localhost"),
            folder,
            port,
            distribution_port,
            epmd_port,
            epmd,
            server: None,
        };
        broker.boot();
        broker
    }

    /// The URL of the node.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}", self.port)
    }

    /// Kills the node as a power failure would, and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            // It may be stopped by a signal; SIGKILL works on that too.
            let _ = server.kill();
            let _ = server.wait();
        }
    }

    /// Starts the node again after [`kill`](Self::kill), with what it has on disk.
    pub fn restart(&mut self) {
        self.kill();
        self.boot();
    }

    /// Stops the node's process without ending it (SIGSTOP): it keeps its connections and is silent.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets a frozen node go on.
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Stops the broker inside its node, in order.
    pub fn stop_app(&self) {
        self.ctl(&["stop_app"]);
    }

    /// Starts the broker inside its node again.
    pub fn start_app(&self) {
        self.ctl(&["start_app"]);
    }

    /// Lets the broker close every connection.
    pub fn close_all_connections(&self) {
        self.ctl(&["close_all_connections", "closed by the test"]);
    }

    /// Raises the memory alarm: publishers are blocked.
    pub fn raise_memory_alarm(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.00001"]);
    }

    /// Ends the memory alarm.
    pub fn end_memory_alarm(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.6"]);
    }

    /// Runs `rabbitmqctl` on the node and returns what it prints.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = self
            .command("rabbitmqctl")
            .args(["--node", &self.node, "--quiet"])
            .args(arguments)
            .output()
            .expect("rabbitmqctl is there");
        assert!(
            output.status.success(),
            "rabbitmqctl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn boot(&mut self) {
        let mut server = self
            .command("rabbitmq-server")
            // Lets the script become the node instead of starting it as a child that would have to
            // be found.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("rabbitmq-server is there");
        let output = server.stdout.take().expect("it was piped");
        self.server = Some(server);
        let (started, starting) = mpsc::channel();
        // Reads on after the start, so that the node never waits for a reader.
        std::thread::spawn(move || {
            let mut printed = String::new();
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                printed.push_str(&line);
                printed.push('\n');
                if line.contains("completed with") {
                    let _ = started.send(Ok(()));
                }
            }
            let _ = started.send(Err(printed));
        });
        match starting.recv_timeout(Duration::from_secs(120)) {
            Ok(Ok(())) => {}
            Ok(Err(printed)) => panic!("the private broker did not start:\n{printed}"),
            Err(_) => panic!("the private broker did not start within two minutes"),
        }
    }

    fn command(&self, script: &str) -> Command {
        let mut command = Command::new(scripts().join(script));
        command
            .current_dir(&self.folder)
            .env("HOME", &self.folder)
            .env("RABBITMQ_NODENAME", &self.node)
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.distribution_port.to_string())
            .env("RABBITMQ_MNESIA_BASE", self.folder.join("mnesia"))
            .env("RABBITMQ_LOG_BASE", self.folder.join("log"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", self.folder.join("config"))
            .env("RABBITMQ_CONFIG_FILE", self.folder.join("none"))
            .env("RABBITMQ_CONF_ENV_FILE", self.folder.join("env.conf"))
            .env(
                "RABBITMQ_ENABLED_PLUGINS_FILE",
                self.folder.join("enabled_plugins"),
            )
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            // Two cores are shared with the test itself: schedulers that spin would take them.
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none",
            )
            .env_remove("ERL_FLAGS")
            .env_remove("NOTIFY_SOCKET");
        command
    }

    fn signal(&self, signal: &str) {
        let server = self.server.as_ref().expect("the node runs");
        let status = Command::new("kill")
            .args([format!("-{signal}"), server.id().to_string()])
            .status()
            .expect("the command kill is there");
        assert!(status.success());
    }
}

impl Drop for PrivateBroker {
    fn drop(&mut self) {
        self.kill();
        let _ = self.epmd.kill();
        let _ = self.epmd.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The folder of the server's own scripts. The ones in the path change to another user and folder.
fn scripts() -> PathBuf {
    if let Ok(folder) = std::env::var("LANEWAY_RABBITMQ_BIN") {
        return folder.into();
    }
    [
        "/usr/lib/rabbitmq/bin",
        "/opt/rabbitmq/sbin",
        "/opt/homebrew/opt/rabbitmq/sbin",
        "/usr/local/opt/rabbitmq/sbin",
    ]
    .into_iter()
    .map(PathBuf::from)
    .find(|folder| folder.join("rabbitmq-server").exists())
    .expect("LANEWAY_RABBITMQ_BIN names the folder of rabbitmq-server")
}

/// Ports that are free now. Held until all are chosen, so that they differ.
fn free_ports<const N: usize>() -> [u16; N] {
    let listeners: [TcpListener; N] =
        std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("it is bound").port())
}

fn write_secret(path: &Path, secret: &str) {
    fs::write(path, secret).expect("writable");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o400)).expect("it is ours");
    }
}
