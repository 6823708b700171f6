//! Rate limit of the log's lines about lost connections.

use std::time::{Duration, Instant};

/// Shortest interval between two lines. A target that accepts each login and drops each connection
/// would fill the log otherwise.
const INTERVAL: Duration = Duration::from_secs(10);

/// Outages of a session, as the log reports them.
#[derive(Debug, Default)]
pub(super) struct OutageLog {
    /// Time of the next line at the earliest.
    next: Option<Instant>,
    /// Outages since the last line.
    held: u32,
}

impl OutageLog {
    /// Returns the number of outages that were not reported since the last line, or `None` if this
    /// one is not reported either.
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
    fn frequent_outages_are_counted_in_the_next_line() {
        let start = Instant::now();
        let mut log = OutageLog::default();
        // Ten a second for a minute.
        let ticks = (0..=600).map(|n| start + n * Duration::from_millis(100));
        let lines: Vec<u32> = ticks.filter_map(|now| log.admit(now)).collect();
        assert_eq!(lines, [0, 99, 99, 99, 99, 99, 99]);
    }
}
