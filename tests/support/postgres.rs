//! A PostgreSQL server of one's own, which may go away and come back.
//!
//! Promises that the server and its folder are gone when it is dropped, also after a panic. Needs the server's programs
//! (`LANEWAY_POSTGRES_BIN` names their folder; by default the usual places are tried) and the commands `kill`, and as root
//! `runuser`, `chown` and a user `postgres`: the server refuses to run as root.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sqlx::{Connection as _, PgConnection};

const PATIENCE: Duration = Duration::from_secs(60);

pub struct PrivatePostgres {
    folder: tempfile::TempDir,
    programs: PathBuf,
    is_root: bool,
    port: u16,
    server: Option<Child>,
}

impl PrivatePostgres {
    /// Starts a server with an empty database, and waits until it takes connections.
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let id = Command::new("id")
            .arg("-u")
            .output()
            .expect("the command id is there");
        let mut postgres = Self {
            programs: programs(),
            is_root: id.stdout.trim_ascii() == b"0",
            folder,
            port,
            server: None,
        };
        if postgres.is_root {
            let open = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(postgres.folder.path(), open).expect("it is ours");
            let mut chown = Command::new("chown");
            run(chown.arg("postgres").arg(postgres.folder.path()));
        }
        let mut init = postgres.command("initdb");
        run(init
            .args(["--no-sync", "-A", "trust", "-U", "postgres", "-D"])
            .arg(postgres.data()));
        drop(listener);
        postgres.boot().await;
        postgres
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Stops the server at once, as a crash would, and waits until it is gone.
    pub fn crash(&mut self) {
        if let Some(mut server) = self.server.take() {
            // Its own id: the child may be `runuser`, which passes not every signal on.
            let file = std::fs::read_to_string(self.data().join("postmaster.pid"));
            match file
                .ok()
                .and_then(|text| text.lines().next().map(str::to_owned))
            {
                Some(id) => run(Command::new("kill").args(["-QUIT", &id])),
                None => drop(server.kill()),
            }
            let _ = server.wait();
        }
    }

    /// Starts it again, and waits until it takes connections.
    pub async fn boot(&mut self) {
        let server = self
            .command("postgres")
            .args(["-c", "listen_addresses=127.0.0.1", "-p"])
            .arg(self.port.to_string())
            .arg("-k")
            .arg(self.folder.path())
            .arg("-D")
            .arg(self.data())
            .spawn()
            .expect("the server can be started");
        self.server = Some(server);
        let began = Instant::now();
        while PgConnection::connect(&self.url()).await.is_err() {
            assert!(began.elapsed() < PATIENCE, "PostgreSQL does not answer");
            // It tells nobody when it is ready.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let program = self.programs.join(program);
        let mut command = if self.is_root {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        self.crash();
    }
}

fn programs() -> PathBuf {
    if let Some(folder) = std::env::var_os("LANEWAY_POSTGRES_BIN") {
        return folder.into();
    }
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten();
    let mut folders: Vec<_> = versions
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .collect();
    folders.sort();
    folders.extend(["/usr/local/pgsql/bin", "/usr/local/bin", "/usr/bin"].map(PathBuf::from));
    let has = |folder: &PathBuf| {
        let there = |program: &str| Path::new(folder).join(program).exists();
        there("initdb") && there("postgres")
    };
    let found = folders.into_iter().rev().find(has);
    found.expect("the programs of PostgreSQL are there; see LANEWAY_POSTGRES_BIN")
}

fn run(command: &mut Command) {
    let status = command.status().expect("the command is there");
    assert!(status.success(), "{command:?}: {status}");
}
