//! Lines of the log that other processes can cause as often as they like.

use std::time::{Duration, Instant};

/// Shortest time from one line to the next.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets one line of the log through in an interval.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    until: Option<Instant>,
    held_back: u64,
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
