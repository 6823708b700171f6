//! Probes for connections with a silent peer.
//!
//! If a target vanishes after acknowledging all commands, the device has no unacknowledged packets
//! and cannot detect this. So if nothing has completed on a connection for [`SILENCE`], we post an
//! RDMA WRITE of length 0. It requires no key (IBTA C9-88), no receive of the peer and no credit.
//! The peer's device acknowledges it even if a disk of the target hangs. Otherwise the WRITE fails
//! after our retries, and the connection breaks.

use std::time::{Duration, Instant};

use riser_state::{State, become_state};

/// Time without a completion before a connection is probed.
const SILENCE: Duration = Duration::from_millis(1250);

/// Exponent of the ACK timeout for probed connections: 134 ms. With seven retries of three timeouts
/// each, the software NIC fails if nothing arrives from the peer for 3.2 seconds. Together with
/// [`SILENCE`], this is less than five seconds.
pub(super) const ACK_TIMEOUT: u8 = 15;

/// State of the probe of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeState {
    /// Check for silence at this time.
    Armed(Instant),
    /// Posted. Its completion either breaks the connection or arms the next probe.
    Posted,
}

impl State for ProbeState {
    fn may_become(&self, next: &Self) -> bool {
        use ProbeState::{Armed, Posted};
        match self {
            Armed(_) => true,
            Posted => matches!(next, Armed(_)),
        }
    }
}

/// Probe for an established connection.
#[derive(Debug)]
pub(super) struct Probe {
    state: ProbeState,
    /// Time of the last completion.
    last_received: Instant,
}

impl Probe {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: ProbeState::Armed(now + SILENCE),
            last_received: now,
        }
    }

    /// Called when a work request completed.
    #[inline]
    pub(super) fn on_completion(&mut self, now: Instant) {
        self.last_received = now;
    }

    /// Called when the probe completed.
    pub(super) fn on_acknowledged(&mut self, now: Instant) {
        become_state(&mut self.state, ProbeState::Armed(now + SILENCE));
    }

    /// Returns the time of the next [`Self::begin_due`]. This is not updated for each completion,
    /// to avoid moving a timer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            ProbeState::Armed(at) => Some(at),
            ProbeState::Posted => None,
        }
    }

    /// Returns whether to post the probe now.
    pub(super) fn begin_due(&mut self, now: Instant) -> bool {
        if self.deadline().is_none_or(|at| at > now) {
            return false;
        }
        let due = self.last_received + SILENCE;
        let next = match due > now {
            true => ProbeState::Armed(due),
            false => ProbeState::Posted,
        };
        become_state(&mut self.state, next);
        next == ProbeState::Posted
    }
}

#[cfg(test)]
mod tests {
    use riser_state::testing::{assert_all_taken, table};

    use super::*;

    #[test]
    fn transitions_match_table() {
        let now = Instant::now();
        let states = [ProbeState::Armed(now), ProbeState::Posted];
        let expected = "Armed: Armed Posted\n\
                        Posted: Armed\n";
        assert_eq!(table(&states), expected);
        assert_all_taken(&states, || {
            let mut probe = Probe::new(now);
            probe.on_completion(now + SILENCE / 2);
            assert!(!probe.begin_due(now + SILENCE));
            assert_eq!(probe.deadline(), Some(now + SILENCE * 3 / 2));
            assert!(probe.begin_due(now + SILENCE * 3 / 2));
            assert_eq!(probe.deadline(), None);
            probe.on_acknowledged(now + SILENCE * 2);
            assert_eq!(probe.deadline(), Some(now + SILENCE * 3));
        });
    }
}
