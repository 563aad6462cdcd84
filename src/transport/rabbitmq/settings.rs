//! From what the application says to settings that cannot be wrong.
//!
//! Owns [`Settings`] (as given), [`Valid`] (checked) and [`redact`], the one function through
//! which a URL goes before anybody sees it.

use std::time::Duration;

use lapin::uri::{AMQPScheme, AMQPUri};

/// A setting that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {problem}")]
pub struct InvalidSetting {
    /// Name of the setting: the method of [`RabbitMq`](super::RabbitMq) that sets it.
    pub setting: &'static str,
    /// What is wrong with it, and what would be right. Without credentials.
    pub problem: String,
}

/// The settings as given.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) url: String,
    pub(super) heartbeat: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) operation_timeout: Duration,
    pub(super) confirm_timeout: Duration,
    pub(super) publisher_channels: u16,
    pub(super) parking_channels: u16,
}

impl Settings {
    pub(super) fn new(url: String) -> Self {
        Self {
            url,
            heartbeat: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            operation_timeout: Duration::from_secs(10),
            confirm_timeout: Duration::from_secs(30),
            publisher_channels: 64,
            parking_channels: 4,
        }
    }
}

/// Settings that were checked. Holds credentials, so it has no `Debug`.
pub(super) struct Valid {
    pub(super) uri: AMQPUri,
    pub(super) heartbeat: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) operation_timeout: Duration,
    pub(super) confirm_timeout: Duration,
    pub(super) publisher_channels: u16,
    pub(super) parking_channels: u16,
}

impl Valid {
    pub(super) fn new(given: &Settings) -> Result<Self, Vec<InvalidSetting>> {
        let mut problems = Vec::new();
        let mut invalid = |setting, problem| problems.push(InvalidSetting { setting, problem });

        let seconds = given.heartbeat.as_secs();
        if given.heartbeat.subsec_nanos() != 0 || !(1..=600).contains(&seconds) {
            let given = given.heartbeat;
            invalid(
                "heartbeat",
                format!("{given:?} is not a whole number of seconds from 1 to 600"),
            );
        }
        for (setting, given) in [
            ("connect_timeout", given.connect_timeout),
            ("operation_timeout", given.operation_timeout),
            ("confirm_timeout", given.confirm_timeout),
        ] {
            if !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&given) {
                invalid(
                    setting,
                    format!("{given:?} is not within 100 ms and 10 minutes"),
                );
            }
        }
        for (setting, given) in [
            ("publisher_channels", given.publisher_channels),
            ("parking_channels", given.parking_channels),
        ] {
            if !(1..=1000).contains(&given) {
                invalid(setting, format!("{given} is not within 1 and 1,000"));
            }
        }
        match parse(&given.url) {
            Ok(mut uri) if problems.is_empty() => {
                // Cannot fail because at most 600 was accepted above.
                uri.query.heartbeat = u16::try_from(seconds).ok();
                Ok(Self {
                    uri,
                    heartbeat: given.heartbeat,
                    connect_timeout: given.connect_timeout,
                    operation_timeout: given.operation_timeout,
                    confirm_timeout: given.confirm_timeout,
                    publisher_channels: given.publisher_channels,
                    parking_channels: given.parking_channels,
                })
            }
            Ok(_) => Err(problems),
            Err(problem) => {
                problems.push(InvalidSetting {
                    setting: "url",
                    problem,
                });
                Err(problems)
            }
        }
    }

    /// `host:port`, for errors and logs.
    pub(super) fn address(&self) -> String {
        let authority = &self.uri.authority;
        if authority.host.contains(':') {
            format!("[{}]:{}", authority.host, authority.port)
        } else {
            format!("{}:{}", authority.host, authority.port)
        }
    }
}

/// A URL as it may be shown: user name and password replaced.
///
/// Everything in front of the last `@` goes, so that a password with an unescaped `@` or `/` in it
/// does not show either. Rather too much is hidden than too little.
pub fn redact(url: &str) -> String {
    let scheme = url.find("://").map_or("", |at| &url[..at + 3]);
    match url.rfind('@') {
        Some(at) => {
            // The scheme is shown only if the credentials come after it.
            let scheme = if scheme.len() <= at { scheme } else { "" };
            format!("{scheme}***@{}", &url[at + 1..])
        }
        None => url.to_owned(),
    }
}

fn parse(url: &str) -> Result<AMQPUri, String> {
    let shown = redact(url);
    let mut uri: AMQPUri = url.parse().map_err(|why: String| {
        // The parser quotes the whole text in some of its errors.
        let why = if why.contains(url) {
            "not a URL".to_owned()
        } else {
            why
        };
        format!("`{shown}` cannot be used: {why}; expected amqp://user:password@host:port/vhost")
    })?;
    // The parser takes an IPv6 address for a missing host, and would connect to `localhost`.
    if let Some(address) = ipv6_host(url) {
        uri.authority.host = address.to_owned();
    }
    if uri.authority.host.is_empty() {
        return Err(format!("`{shown}` names no host"));
    }
    if uri.scheme == AMQPScheme::AMQPS && !cfg!(feature = "tls") {
        // Without a TLS back-end lapin speaks plain text on an amqps connection.
        return Err(format!(
            "`{shown}` asks for TLS, and the feature `tls` of the crate `laneway` is not enabled"
        ));
    }
    if uri.query.heartbeat.is_some() {
        return Err(format!(
            "`{shown}` sets a heartbeat; set it with `RabbitMq::heartbeat`"
        ));
    }
    if uri.query.connection_timeout.is_some() {
        return Err(format!(
            "`{shown}` sets a connection time-out; set it with `RabbitMq::connect_timeout`"
        ));
    }
    Ok(uri)
}

/// The address in `scheme://user@[address]:port/`, if the host is written so.
fn ipv6_host(url: &str) -> Option<&str> {
    let rest = &url[url.find("://")? + 3..];
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let host = authority
        .rfind('@')
        .map_or(authority, |at| &authority[at + 1..]);
    host.strip_prefix('[')?.split(']').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem_of(url: &str) -> String {
        let problems = Valid::new(&Settings::new(url.to_owned()))
            .err()
            .unwrap_or_default();
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn credentials_never_show() {
        for url in [
            "amqp://user:secret@host:5672/v",
            "amqp://user:se@secret@host",
            "amqp://user:secret/@host",
            "user:secret@host",
            "http://user:secret@host",
            "amqp://user:secret@host:port",
            "amqp:user:secret@host",
            "amqps://user:secret@host?heartbeat=3",
            "secret@amqp://host",
        ] {
            assert!(!redact(url).contains("secret"), "{url}");
            assert!(!problem_of(url).contains("secret"), "{}", problem_of(url));
        }
    }

    #[test]
    fn a_wrong_url_names_the_setting() {
        for url in [
            "",
            "host",
            "http://host",
            "amqp://host:99999",
            "amqp://host?heartbeat=4",
        ] {
            assert!(problem_of(url).starts_with("url: "), "{url}");
        }
        assert_eq!(problem_of("amqp://host"), "");
    }

    #[test]
    fn an_ipv6_address_is_the_host() {
        let valid = Valid::new(&Settings::new("amqp://a:b@[::1]:5673/x".to_owned()));
        assert_eq!(
            valid.ok().map(|valid| valid.address()).as_deref(),
            Some("[::1]:5673")
        );
    }

    #[test]
    fn every_wrong_setting_is_named() {
        let problems = Valid::new(&Settings {
            heartbeat: Duration::from_millis(1500),
            connect_timeout: Duration::ZERO,
            operation_timeout: Duration::ZERO,
            confirm_timeout: Duration::from_secs(601),
            publisher_channels: 0,
            parking_channels: 1001,
            url: "nonsense".to_owned(),
        })
        .err()
        .unwrap_or_default();
        let named: Vec<_> = problems.iter().map(|problem| problem.setting).collect();
        assert_eq!(
            named,
            [
                "heartbeat",
                "connect_timeout",
                "operation_timeout",
                "confirm_timeout",
                "publisher_channels",
                "parking_channels",
                "url"
            ]
        );
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_without_the_feature_is_refused() {
        assert!(problem_of("amqps://host").contains("feature `tls`"));
    }
}
