//! The destination of the log: to standard error, which the service manager keeps.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::audit;
use crate::config::{Log, LogFormat};
use crate::control::events::{Collector, Noteworthy};

/// Sends the log to standard error. The environment's `RUST_LOG` comes before the file's filter;
/// about the audit log the file alone decides.
pub(super) fn start(log: &Log) {
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(&log.filter))
        .expect("checked with the configuration");
    let level = if log.audit { "info" } else { "off" };
    let audit = format!("{}={level}", audit::TARGET);
    let filter = filter.add_directive(audit.parse().expect("a directive"));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    let lines = match log.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let subscriber = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(Collector.with_filter(Noteworthy { audit: log.audit }));
    // A process that already has a subscriber, such as a test, keeps it.
    let _ = subscriber.try_init();
}
