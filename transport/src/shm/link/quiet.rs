//! Rate limiting for log messages that can be triggered by other processes.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// Minimum time between two messages.
const INTERVAL: Duration = Duration::from_secs(10);

/// Allows a single log message per interval.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    until: Option<Instant>,
    held_back: u64,
}

/// Log messages of a device. Each type has a separate rate limit, so that they cannot hide each
/// other.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Users that are not allowed.
    pub(super) denials: Quiet,
    /// Allowed users that don't send a valid first message.
    pub(super) greetings: Quiet,
    /// Peers that write invalid ring data.
    pub(super) broken: Quiet,
    /// Errors when accepting connections.
    pub(super) rests: Quiet,
    /// Connection errors.
    unreached: Quiet,
}

impl Lines {
    /// Logs an error when connecting to the device at `peer`.
    pub(super) fn unreached(&mut self, now: Instant, peer: IpAddr, error: &io::Error) {
        let Some(held_back) = self.unreached.allow_message(now) else {
            return;
        };
        // If an address is no longer local, waiting does not help. This is different from a daemon
        // that is being restarted.
        match error.kind() {
            io::ErrorKind::AddrNotAvailable => warn!(
                %peer, %error, held_back,
                "cannot share memory: the peer is not on this host"
            ),
            _ => info!(%peer, %error, held_back, "cannot share memory"),
        }
    }
}

impl Quiet {
    /// Returns the number of messages suppressed since the last one, if another can be logged now.
    pub(super) fn allow_message(&mut self, now: Instant) -> Option<u64> {
        if self.until.is_some_and(|until| now < until) {
            self.held_back += 1;
            return None;
        }
        self.until = Some(now + INTERVAL);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_messages_are_rate_limited() {
        let begin = Instant::now();
        let mut quiet = Quiet::default();
        assert_eq!(quiet.allow_message(begin), Some(0));
        for _ in 0..1000 {
            assert_eq!(
                quiet.allow_message(begin + INTERVAL - Duration::from_nanos(1)),
                None
            );
        }
        assert_eq!(quiet.allow_message(begin + INTERVAL), Some(1000));
        assert_eq!(quiet.allow_message(begin + INTERVAL), None);
    }
}
