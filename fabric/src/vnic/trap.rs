//! Rate limit of traps.
//!
//! As in Linux, the first trap opens a window of 1.07 s, in which at most four more traps may be
//! sent. Further traps are dropped; the manager detects the changes when it polls the generation
//! counts of the port.

use std::time::{Duration, Instant};

/// Maximum number of traps after the first trap of a window (`OPA_VNIC_TRAP_BURST_LIMIT`).
pub const BURST: u8 = 4;
/// Length of a window: 4.096 µs × 2^18 (`OPA_VNIC_TRAP_TIMEOUT`).
pub const WINDOW: Duration = Duration::from_micros(4096 * (1 << 18) / 1000);

/// Trap rate limit of a port.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrapLimit {
    ends: Option<Instant>,
    count: u8,
}

impl TrapLimit {
    /// Returns whether a trap may be sent now, and counts it.
    pub fn admit(&mut self, now: Instant) -> bool {
        if self.ends.is_some_and(|ends| now < ends) {
            let is_admitted = self.count < BURST;
            self.count += u8::from(is_admitted);
            return is_admitted;
        }
        self.count = 0;
        self.ends = Some(now + WINDOW);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_allows_five_traps() {
        let start = Instant::now();
        let mut limit = TrapLimit::default();
        for at in [0, 100, 200, 300, 400] {
            assert!(limit.admit(start + Duration::from_millis(at)), "{at}");
        }
        for at in [500, 1000, 1073] {
            assert!(!limit.admit(start + Duration::from_millis(at)), "{at}");
        }
        assert!(limit.admit(start + Duration::from_millis(1074)));
        assert!(limit.admit(start + Duration::from_millis(1075)));
    }
}
