//! Counters of the daemon in Prometheus format.
//!
//! Workers update the counters ([`crate::stats`]), and we collect them for each response. Families
//! without data are omitted, for example the commands of a unit that was never used.
//!
//! # Labels
//! `target`, `lun`, `initiator`, `protocol`, `worker` and `device` are bounded by the
//! configuration: targets and their units, sessions, workers, portals. `op` is a command type, and
//! `stage` is where it spends its time. The series of a session are removed when the session is
//! closed.
//!
//! # Modules
//! - `family`: a metric with its help text and series.
//! - `commands`: targets, units, sessions. `backends`: their files. `limits`: delays due to rate
//!   limits. `host`: workers, logins. `nic`: devices. `process`: the process.

mod backends;
mod commands;
mod family;
mod host;
mod limits;
mod nic;
mod process;

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus::TextEncoder;

use self::family::Family;
use super::view::Inventory;

/// Media type of the text format.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// State of the configuration and its file.
#[derive(Clone, Copy, Debug)]
pub struct ConfigState {
    /// True if the current configuration is different from its file.
    pub is_unsaved: bool,
    /// Last attempt to load the file.
    pub reload: Reload,
}

/// Attempts to load the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Reload {
    /// True if the last attempt was successful.
    pub is_successful: bool,
    /// Time of the last successful attempt.
    pub succeeded_at: SystemTime,
}

impl Reload {
    /// Returns the state after startup, where the file was loaded.
    #[must_use]
    pub fn at_start() -> Self {
        Self {
            is_successful: true,
            succeeded_at: SystemTime::now(),
        }
    }

    /// Records an attempt.
    pub fn record(&mut self, is_successful: bool) {
        self.is_successful = is_successful;
        if is_successful {
            self.succeeded_at = SystemTime::now();
        }
    }
}

/// Returns all metrics in Prometheus text format.
///
/// # Errors
/// Fails if a name or value is not valid, which would be a bug.
pub fn text(
    inventory: &Inventory<'_>,
    config: ConfigState,
    uptime: Duration,
) -> Result<String, prometheus::Error> {
    let mut families = general(inventory, uptime);
    families.extend(configuration(config));
    families.extend(commands::families(inventory));
    families.extend(backends::families(inventory));
    families.extend(limits::families(inventory.server));
    families.extend(host::families(inventory));
    families.extend(nic::families(inventory.snapshots()));
    families.extend(process::families());
    let families: Vec<_> = families.into_iter().filter_map(Family::finish).collect();
    TextEncoder::new().encode_to_string(&families)
}

fn general(inventory: &Inventory<'_>, uptime: Duration) -> Vec<Family> {
    let server = inventory.server;
    let mut build = Family::gauge(
        "riser_build_info",
        "Version of riserd; the value is always 1.",
    );
    build.add(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    let mut up = Family::gauge(
        "riser_uptime_seconds",
        "Time since the daemon was started, in seconds.",
    );
    up.add(&[], uptime.as_secs_f64());
    let mut ready = Family::gauge(
        "riser_ready",
        "1 if all portals listen, all backends are open and would be served again by the next start, and all \
         workers respond, else 0.",
    );
    ready.add(&[], f64::from(inventory.ready().is_ok()));
    let mut problems = Family::gauge(
        "riser_not_served",
        "1 for each backend, portal or other part of the configuration that cannot be served.",
    );
    // The portals of several protocols can have the same address, but label sets must be unique.
    let views = inventory.problem_views().into_iter();
    let missing = views.filter(|problem| !problem.failing);
    let missing: BTreeSet<_> = missing
        .map(|problem| (problem.kind, problem.name))
        .collect();
    for (kind, name) in &missing {
        problems.add(&[("kind", kind), ("name", name)], 1.0);
    }
    let mut sessions = Family::gauge("riser_sessions", "Current number of I_T nexuses.");
    sessions.add(&[], server.sessions() as f64);
    let mut most = Family::gauge(
        "riser_sessions_limit",
        "Maximum number of I_T nexuses (limits.max_sessions).",
    );
    most.add(&[], f64::from(server.config().limits.max_sessions));
    let mut of_address = Family::gauge(
        "riser_sessions_per_address",
        "Largest current number of I_T nexuses from a single address.",
    );
    let registry = &server.shared().registry;
    of_address.add(&[], registry.most_per_address().into());
    let mut address_limit = Family::gauge(
        "riser_sessions_per_address_limit",
        "Maximum number of I_T nexuses from a single address (limits.sessions_per_address).",
    );
    address_limit.add(&[], server.config().limits.sessions_per_address.into());
    vec![
        build,
        up,
        ready,
        problems,
        sessions,
        most,
        of_address,
        address_limit,
    ]
}

fn configuration(config: ConfigState) -> Vec<Family> {
    let mut unsaved = Family::gauge(
        "riser_config_unsaved",
        "1 if the configuration file differs from the running configuration, else 0.",
    );
    unsaved.add(&[], f64::from(u8::from(config.is_unsaved)));
    let Reload {
        is_successful,
        succeeded_at,
    } = config.reload;
    let mut successful = Family::gauge(
        "riser_config_last_reload_successful",
        "1 if the last requested load of the configuration file succeeded, else 0.",
    );
    successful.add(&[], f64::from(u8::from(is_successful)));
    let mut at = Family::gauge(
        "riser_config_last_reload_success_timestamp_seconds",
        "Time of the last successful load of the configuration file, in seconds since the Unix epoch.",
    );
    let seconds = succeeded_at.duration_since(UNIX_EPOCH).unwrap_or_default();
    at.add(&[], seconds.as_secs_f64());
    vec![unsaved, successful, at]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server::Server;

    /// The portals of two protocols can have the same kind and address.
    #[test]
    fn unavailable_address_has_single_series() {
        let config = Config::parse(
            "backends: { a: { kind: ram, size: 1MiB } }\n\
             targets:\n\
             - name: t\n\
             \x20 iqn: iqn.2026-01.com.example:t\n\
             \x20 portals:\n\
             \x20 - { protocol: iscsi, listen: \"127.97.8.9:3290\" }\n\
             \x20 - { protocol: iscsi, listen: \"none0:3290\" }\n\
             \x20 - { protocol: iser, listen: \"none0:3290\" }\n\
             \x20 luns: { 0: a }\n\
             \x20 access: open\n\
             workers: { count: 1 }\n",
            "test.yaml",
        );
        let server = Server::start(&config.unwrap()).unwrap();
        let inventory = Inventory::new(&server);
        assert_eq!(inventory.problem_views().len(), 2);
        let families = general(&inventory, Duration::ZERO);
        let families: Vec<_> = families.into_iter().filter_map(Family::finish).collect();
        let text = TextEncoder::new().encode_to_string(&families).unwrap();
        let series = text.matches("\nriser_not_served{").count();
        drop(inventory);
        server.shutdown().unwrap();
        assert_eq!(series, 1, "{text}");
    }
}
