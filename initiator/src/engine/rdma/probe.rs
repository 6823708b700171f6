//! Probes of a connection whose peer is silent.
//!
//! A target that vanishes after it has acknowledged every command leaves nothing that its device
//! could fail to acknowledge. So a connection on which nothing has completed for [`SILENCE`] carries
//! an RDMA WRITE of no bytes, which needs no key (IBTA C9-88), no receive of the peer and none of
//! its request limit. The peer's device acknowledges it, also if a disk of the target hangs;
//! otherwise the WRITE fails after the retries of ours, and with it the connection.

use std::time::{Duration, Instant};

use riser_state::{State, become_state};

/// Silence of a connection after which it is probed.
const SILENCE: Duration = Duration::from_millis(1250);

/// Exponent of the ACK timeout of a connection that is probed: 134 ms. With seven retries of three
/// timeouts each the software NIC gives a peer up after 3.2 seconds in which nothing has arrived
/// from it. Together with [`SILENCE`] that is less than five seconds.
pub(super) const ACK_TIMEOUT: u8 = 15;

/// State of a connection's probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeState {
    /// The silence is checked at the given time.
    Armed(Instant),
    /// Posted. Its completion ends the connection or arms the next probe.
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

/// The probe of an established connection.
#[derive(Debug)]
pub(super) struct Probe {
    state: ProbeState,
    /// Time of the last completion.
    heard: Instant,
}

impl Probe {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: ProbeState::Armed(now + SILENCE),
            heard: now,
        }
    }

    /// A work request has completed.
    #[inline]
    pub(super) fn on_completion(&mut self, now: Instant) {
        self.heard = now;
    }

    /// The probe has completed.
    pub(super) fn on_acknowledged(&mut self, now: Instant) {
        become_state(&mut self.state, ProbeState::Armed(now + SILENCE));
    }

    /// The time of the next [`Self::begin_due`]. It lags behind the completions, so that they do
    /// not have to move a timer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            ProbeState::Armed(at) => Some(at),
            ProbeState::Posted => None,
        }
    }

    /// Returns whether the probe is to be posted now.
    pub(super) fn begin_due(&mut self, now: Instant) -> bool {
        if self.deadline().is_none_or(|at| at > now) {
            return false;
        }
        let due = self.heard + SILENCE;
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
    fn transitions_match_the_table() {
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
