//! Where the log goes: to standard error, which the service manager keeps.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::audit;
use crate::config::{Log, LogFormat};

/// Sends the log to standard error. The environment's `RUST_LOG` comes before the file's filter; about the audit log the
/// file alone decides.
pub(super) fn start(log: &Log) {
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(&log.filter))
        .expect("checked with the configuration");
    let level = if log.audit { "info" } else { "off" };
    let audit = format!("{}={level}", audit::TARGET);
    let filter = filter.add_directive(audit.parse().expect("a directive"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // A process that already has a subscriber, such as a test, keeps it.
    let _ = match log.format {
        LogFormat::Text => subscriber.try_init(),
        LogFormat::Json => subscriber.json().try_init(),
    };
}
