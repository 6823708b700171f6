//! Rate limit for log lines about lost connections.

use std::time::{Duration, Instant};

/// Minimum interval between two lines. Otherwise, a target that accepts each login and drops each
/// connection would fill the log.
const INTERVAL: Duration = Duration::from_secs(10);

/// Outages of a session, for the log.
#[derive(Debug, Default)]
pub(super) struct OutageLog {
    /// Earliest time of the next line.
    next: Option<Instant>,
    /// Outages not logged since the last line.
    held: u32,
}

impl OutageLog {
    /// Returns the number of unlogged outages since the last line, or `None` if this outage must
    /// not be logged either.
    pub(super) fn admit(&mut self, now: Instant) -> Option<u32> {
        if self.next.is_some_and(|next| now < next) {
            self.held = self.held.saturating_add(1);
            return None;
        }
        self.next = Some(now + INTERVAL);
        Some(std::mem::take(&mut self.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_outages_are_counted_in_next_line() {
        let start = Instant::now();
        let mut log = OutageLog::default();
        // Ten outages per second for a minute.
        let ticks = (0..=600).map(|n| start + n * Duration::from_millis(100));
        let lines: Vec<u32> = ticks.filter_map(|now| log.admit(now)).collect();
        assert_eq!(lines, [0, 99, 99, 99, 99, 99, 99]);
    }
}
