//! Lines of the log that other processes can cause as often as they like.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// Shortest time from one line to the next.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets one line of the log through in an interval.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    until: Option<Instant>,
    held_back: u64,
}

/// The lines of a device, by what they are about: one kind must not hide another.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Users who are not let in.
    pub(super) denials: Quiet,
    /// Processes of those who are, without a proper first message.
    pub(super) greetings: Quiet,
    /// Peers that break the rules of the rings.
    pub(super) broken: Quiet,
    /// Rests of the listener.
    pub(super) rests: Quiet,
    /// Devices that this one has not reached.
    unreached: Quiet,
}

impl Lines {
    /// The device at `peer` was not reached.
    pub(super) fn unreached(&mut self, now: Instant, peer: IpAddr, error: &io::Error) {
        let Some(held_back) = self.unreached.pass(now) else {
            return;
        };
        // An address that has left this host does not come back by waiting, as a daemon does.
        match error.kind() {
            io::ErrorKind::AddrNotAvailable => warn!(
                %peer, %error, held_back,
                "no memory can be shared: a device of shared memory reaches addresses of this host only"
            ),
            _ => info!(%peer, %error, held_back, "no memory can be shared"),
        }
    }
}

impl Quiet {
    /// The number of lines that were held back since the last one, if another may be written now.
    pub(super) fn pass(&mut self, now: Instant) -> Option<u64> {
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
    fn lines_are_held_back_for_an_interval_and_counted() {
        let begin = Instant::now();
        let mut quiet = Quiet::default();
        assert_eq!(quiet.pass(begin), Some(0));
        for _ in 0..1000 {
            assert_eq!(quiet.pass(begin + INTERVAL - Duration::from_nanos(1)), None);
        }
        assert_eq!(quiet.pass(begin + INTERVAL), Some(1000));
        assert_eq!(quiet.pass(begin + INTERVAL), None);
    }
}
