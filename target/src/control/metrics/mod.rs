//! Counters of the daemon, as Prometheus reads them.
//!
//! Numbers are counted by workers ([`crate::stats`]) and gathered for each answer. A family that
//! has nothing to say is left out: the commands of a unit that was never used, for example.
//!
//! # Labels
//! `target`, `lun`, `initiator`, `protocol`, `worker` and `device` name what the configuration
//! bounds: targets and their units, sessions, workers, portals. `op` is a kind of command, `stage`
//! where it spends its time. A series of a session ends with the session.
//!
//! # Modules
//! - `family`: a metric, its help and its series.
//! - `commands`: targets, units, sessions. `backends`: their files. `limits`: what commands wait
//!   for. `host`: workers, logins. `nic`: devices. `process`: the process.

mod backends;
mod commands;
mod family;
mod host;
mod limits;
mod nic;
mod process;

use std::time::Duration;

use prometheus::TextEncoder;

use self::family::Family;
use crate::server::Server;
use crate::worker::mail::Snapshot;

/// The media type of the exposition format.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Everything that was counted, in the text format of Prometheus.
///
/// # Errors
/// A mistake of ours in a name or a value.
pub fn text(server: &Server, uptime: Duration) -> Result<String, prometheus::Error> {
    let snapshots = server.snapshot();
    let mut families = general(server, &snapshots, uptime);
    families.extend(commands::families(server, &snapshots));
    families.extend(backends::families(server));
    families.extend(limits::families(server));
    families.extend(host::families(&snapshots));
    families.extend(nic::families(&snapshots));
    families.extend(process::families());
    let families: Vec<_> = families.into_iter().filter_map(Family::finish).collect();
    TextEncoder::new().encode_to_string(&families)
}

fn general(server: &Server, snapshots: &[Snapshot], uptime: Duration) -> Vec<Family> {
    let mut build = Family::gauge("riser_build_info", "The version of riserd; the value is 1.");
    build.add(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    let mut up = Family::gauge(
        "riser_uptime_seconds",
        "Time that the daemon has served, in seconds.",
    );
    up.add(&[], uptime.as_secs_f64());
    let mut ready = Family::gauge(
        "riser_ready",
        "1 if all portals listen, all backends are open and all workers answer, else 0.",
    );
    ready.add(
        &[],
        f64::from(super::health::ready(server, snapshots).is_ok()),
    );
    let mut problems = Family::gauge(
        "riser_not_served",
        "1 for each backend, portal or other part of the configuration that cannot be served.",
    );
    for (subject, _) in server.problems().not_served() {
        problems.add(&[("kind", subject.kind()), ("name", &subject.name())], 1.0);
    }
    let mut sessions = Family::gauge("riser_sessions", "I_T nexuses at present.");
    sessions.add(&[], server.sessions() as f64);
    vec![build, up, ready, problems, sessions]
}
