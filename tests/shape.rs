//! The shape of the tree: who may know whom. Reads the sources as text, because the compiler
//! allows what these rules forbid.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file without its comments, which may name what the code must not. What stands
/// in a string counts as code: nothing here needs such a string.
fn code(path: &Path) -> String {
    let text =
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    without_comments(&text)
}

fn without_comments(text: &str) -> String {
    let mut code = String::new();
    let mut depth = 0_u32;
    for line in text.lines() {
        let mut rest = line;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix("/*") {
                depth += 1;
                rest = after;
            } else if depth > 0 && rest.starts_with("*/") {
                depth -= 1;
                rest = &rest[2..];
            } else if depth == 0 && rest.starts_with("//") {
                break;
            } else {
                let first = rest.chars().next().map_or(0, char::len_utf8);
                if depth == 0 {
                    code.push_str(&rest[..first]);
                }
                rest = &rest[first..];
            }
        }
        code.push('\n');
    }
    code
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty())
}

/// Every Rust file under a folder; none if the folder does not exist (yet).
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry of the folder").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    files
}

/// Names of all crates that a manifest depends on, in whatever section, also under another name.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut in_dependencies = false;
    for line in manifest.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_matches(['[', ']']);
            let (table, name) = match section.rsplit_once("dependencies.") {
                Some((_, name)) => (true, Some(name)),
                None => (section.ends_with("dependencies"), None),
            };
            in_dependencies = table;
            names.extend(name.map(str::to_owned));
        } else if in_dependencies && let Some((name, value)) = line.split_once('=') {
            names.push(name.trim().trim_end_matches(".workspace").to_owned());
            // `other = { package = "real" }`, or `package = "real"` in a table of its own.
            let renamed = if name.trim() == "package" {
                Some(value)
            } else {
                value.split_once("package").map(|(_, real)| real)
            };
            names.extend(renamed.and_then(|real| real.split('"').nth(1).map(str::to_owned)));
        }
    }
    names
}

/// Crates of brokers, SQL databases, HTTP and command lines: their names contain one of these.
const OUTSIDE: &[&str] = &[
    // Brokers.
    "lapin",
    "amq",
    "rabbit",
    "kafka",
    "nats",
    "redis",
    "pulsar",
    "mqtt",
    "zmq",
    "sqs",
    // SQL, and the other databases.
    "sql",
    "diesel",
    "postgres",
    "sea-orm",
    "rbatis",
    "duckdb",
    "mongo",
    "sled",
    "rocksdb",
    // HTTP.
    "http",
    "hyper",
    "axum",
    "reqwest",
    "actix-web",
    "awc",
    "warp",
    "rocket",
    "tonic",
    "ureq",
    "tower",
    "tungstenite",
    "h2",
    "curl",
    "isahc",
    "poem",
    "salvo",
    // Command lines.
    "clap",
    "structopt",
    "argh",
    "pico-args",
    "lexopt",
    "bpaf",
    "gumdrop",
    "getopts",
    "dialoguer",
];

#[test]
fn the_runtime_depends_on_no_broker_sql_http_or_command_line_crate() {
    let path = root().join("actors/Cargo.toml");
    let manifest = fs::read_to_string(&path).expect("the manifest of the runtime");
    let names = dependencies(&manifest);
    assert!(names.iter().any(|name| name == "actix"), "read {names:?}");
    for name in names {
        let outside = OUTSIDE.iter().find(|word| name.contains(**word));
        assert_eq!(outside, None, "{} depends on {name}", path.display());
    }
}

#[test]
fn a_manifest_hides_no_dependency_from_these_rules() {
    let manifest = r#"
        [package]
        name = "sql-like"
        [dependencies]
        actix.workspace = true   # lapin
        plain = "1"
        renamed = { version = "1", package = "lapin" }
        [target.'cfg(unix)'.dependencies]
        unix = "1"
        [dev-dependencies.table]
        package = "sqlx"
        version = "1"
        [features]
        clap = []
    "#;
    let names = dependencies(manifest);
    let expected = [
        "actix", "plain", "renamed", "lapin", "unix", "table", "package", "sqlx", "version",
    ];
    assert_eq!(names, expected);
}

/// Whether code names the module `name` of this crate: by a path from the crate's root or from a
/// parent, or within the braces of a `use`.
fn imports(code: &str, name: &str) -> bool {
    let dense: String = code.split_whitespace().collect::<Vec<_>>().join(" ");
    let by_path = ["crate", "super", "laneway"].iter().any(|from| {
        dense
            .match_indices(&format!("{from}::{name}"))
            .any(|(at, found)| {
                let next = dense[at + found.len()..].chars().next();
                !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
            })
    });
    let by_use = dense.split(';').any(|statement| {
        let Some((_, tree)) = statement.split_once("use crate::{") else {
            return false;
        };
        words(tree).any(|word| word == name)
    });
    by_path || by_use
}

#[test]
fn transports_and_stores_do_not_know_each_other() {
    let transport = root().join("src/transport");
    assert!(!rust_files(&transport).is_empty(), "the transports moved");
    // Before there is a store, its half of the rule has nothing to look at.
    for (folder, other) in [
        (transport, "store"),
        (root().join("src/store"), "transport"),
    ] {
        for file in rust_files(&folder) {
            assert!(
                !imports(&code(&file), other),
                "{} names {other}",
                file.display()
            );
        }
    }
}

#[test]
fn an_import_is_found_in_whatever_form() {
    for (code, expected) in [
        ("use crate::store::Lease;", true),
        ("use crate::{durable,\n    store::{self, Lease}};", true),
        ("fn f() { super::super::store::open() }", true),
        ("use laneway::store;", true),
        ("use crate::storehouse;", false),
        ("flag.store(true, Ordering::Release);", false),
        ("// use crate::store;", false),
        ("/* use crate::store; */ fn f() {}", false),
    ] {
        assert_eq!(
            imports(&without_comments(code), "store"),
            expected,
            "{code}"
        );
    }
}

#[test]
fn what_decides_names_no_runtime_and_no_clock() {
    let parts = rust_files(&root().join("actors/src/lane/machine"));
    assert!(!parts.is_empty(), "the parts of the machine moved");
    let files =
        ["actors/src/policy.rs", "actors/src/lane/machine.rs"].map(|file| root().join(file));
    for file in files.into_iter().chain(parts) {
        let code = code(&file);
        let found = words(&code).find(|word| {
            // `Duration` is a length of time, not a clock.
            let runtime = ["actix", "tokio", "async_std", "smol"]
                .iter()
                .any(|name| *word == *name || word.starts_with(&format!("{name}_")));
            runtime || ["Instant", "SystemTime", "sleep"].contains(word)
        });
        assert_eq!(found, None, "in {}", file.display());
    }
}
