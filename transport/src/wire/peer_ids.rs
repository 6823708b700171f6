//! Tracks the IPv4 identifications used by a peer, as recovered by [`IcrcFlow::check`]: see
//! [ICRC](super::icrc).

use super::icrc::{IcrcError, IcrcFlow};

/// Pattern of a peer's IPv4 identifications, based on the packets that passed the linear check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdPattern {
    /// Not enough packets received yet. All identifications are accepted.
    Learning,
    /// 0, or the segment number in a segmented send. This is enforced.
    Segments,
    /// Mostly counting up. We try the next number first, which makes the check cheaper, but still
    /// accept all identifications.
    Counting,
    /// No known pattern. All identifications are accepted.
    Arbitrary,
}

/// Number of packets required to determine the pattern.
const LEARN: u16 = 64;
/// Maximum number of segments in a segmented send (`UDP_MAX_SEGMENTS`).
const SEGMENTS: u16 = 128;
/// Maximum distance from the previous packet for the identifications of a counting peer.
const COUNT_WINDOW: u16 = 1024;
/// Number of consecutive packets that must pass the linear check but break the pattern before we
/// learn the pattern again. The probability for random data is 2⁻⁶⁴, and we drop at most this many
/// packets if the peer has really changed.
const BREAKS: u8 = 4;

/// Identifications used by a single peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIds {
    pattern: IdPattern,
    /// Number of packets received while learning.
    seen: u16,
    /// Number of consecutive packets that broke the pattern.
    broken: u8,
    /// Largest identification received while learning.
    largest: u16,
    /// Number of zero identifications received while learning.
    zeroes: u16,
    /// Set while all identifications were close to the previous value.
    steps: bool,
    /// Indexed by position, for the first packet of a train and for a packet following it: set if
    /// the identification of the last such packet was one more than that of its predecessor.
    counted: [bool; 2],
    last: u16,
}

impl Default for PeerIds {
    fn default() -> Self {
        Self::new()
    }
}

impl PeerIds {
    /// Creates the state for a new peer.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            pattern: IdPattern::Learning,
            seen: 0,
            broken: 0,
            largest: 0,
            zeroes: 0,
            steps: true,
            counted: [false; 2],
            last: 0,
        }
    }

    /// Returns the current pattern.
    #[must_use]
    pub fn pattern(&self) -> IdPattern {
        self.pattern
    }

    /// Returns the identification to try first. `follows` must be false for the first packet of a
    /// train and true for the following packets.
    #[must_use]
    pub fn likely(&self, follows: bool) -> u16 {
        match self.pattern {
            IdPattern::Counting => self.last.wrapping_add(1),
            // A train is usually a segmented send, which counts up from 0. But it can also be a
            // part of a segmented send, or contain packets that were sent individually and all use
            // 0.
            IdPattern::Segments if self.counted[usize::from(follows)] => self.last + 1,
            IdPattern::Learning | IdPattern::Segments | IdPattern::Arbitrary => 0,
        }
    }

    /// Updates the state with the identification of a packet that passed the linear check. Returns
    /// true if this peer would use this identification.
    pub fn admit(&mut self, id: u16, follows: bool) -> bool {
        // Segment numbers are always valid: even if a peer has only sent single packets using 0, it
        // can start sending segments at any time.
        if self.pattern == IdPattern::Segments && id >= SEGMENTS {
            // We don't update the last number, because the packet is probably corrupt.
            self.broken += 1;
            if self.broken == BREAKS {
                *self = Self::new();
            }
            return false;
        }
        if self.pattern == IdPattern::Learning {
            self.learn(id);
        }
        self.broken = 0;
        self.counted[usize::from(follows)] = id == self.last.wrapping_add(1);
        self.last = id;
        true
    }

    fn learn(&mut self, id: u16) {
        // Check both directions because packets can be reordered.
        let ahead = id.wrapping_sub(self.last);
        let is_step = ahead <= COUNT_WINDOW || ahead >= COUNT_WINDOW.wrapping_neg();
        // There is no previous identification for the first packet.
        self.steps &= self.seen == 0 || is_step;
        self.largest = self.largest.max(id);
        self.zeroes += u16::from(id == 0);
        self.seen += 1;
        if self.seen < LEARN {
            return;
        }
        self.pattern = match self.largest {
            // Each segmented send starts at 0. A counter can also be small, but will use 0 only
            // once.
            small if small < SEGMENTS && self.zeroes > 1 => IdPattern::Segments,
            _ if self.steps => IdPattern::Counting,
            _ => IdPattern::Arbitrary,
        };
    }
}

/// Verifies the packets of a single flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcrcVerifier {
    flow: IcrcFlow,
    ids: PeerIds,
}

impl IcrcVerifier {
    /// Creates a verifier for a new peer.
    #[must_use]
    pub fn new(flow: IcrcFlow) -> Self {
        Self {
            flow,
            ids: PeerIds::new(),
        }
    }

    /// Returns the identification pattern currently used to verify packets.
    #[must_use]
    pub fn pattern(&self) -> IdPattern {
        self.ids.pattern()
    }

    /// Verifies a received UDP payload. `follows` must be set if this is not the first packet of a
    /// train. Returns the IPv4 identification, or 0 for IPv6.
    ///
    /// # Errors
    /// See [`IcrcError`].
    pub fn verify(&mut self, datagram: &[u8], follows: bool) -> Result<u16, IcrcError> {
        let id = self.flow.check(datagram, self.ids.likely(follows))?;
        if self.flow.is_v6() || self.ids.admit(id, follows) {
            Ok(id)
        } else {
            Err(IcrcError::UnlikelyId { id })
        }
    }

    /// Marks the end of a train. If the next train does not continue its numbers, they are
    /// discarded, so that most trains don't change the verifier.
    pub fn end_train(&mut self) {
        if self.ids.pattern == IdPattern::Segments && !self.ids.counted[0] {
            self.ids.last = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::icrc::tests::{sealed, v4};
    use super::*;

    #[test]
    fn small_identifications_are_enforced() {
        let flow = v4();
        let mut verifier = IcrcVerifier::new(flow);
        for _ in 0..LEARN {
            verifier.verify(&sealed(&flow, 16, 0), false).unwrap();
        }
        assert_eq!(verifier.pattern(), IdPattern::Segments);
        let odd = sealed(&flow, 16, 0x0100);
        assert_eq!(
            verifier.verify(&odd, false),
            Err(IcrcError::UnlikelyId { id: 0x0100 })
        );
        // A segmented send must be accepted even after many single packets.
        for id in 0..44 {
            verifier.verify(&sealed(&flow, 1040, id), id > 0).unwrap();
        }
        // If a peer has changed permanently, we must learn its new pattern.
        for _ in 0..BREAKS {
            verifier.verify(&odd, false).unwrap_err();
        }
        assert_eq!(verifier.pattern(), IdPattern::Learning);
        verifier.verify(&odd, false).unwrap();
    }

    #[test]
    fn identification_patterns_are_distinguished() {
        let learn = |id: &dyn Fn(u16) -> u16| {
            let mut ids = PeerIds::new();
            assert!((0..LEARN).all(|i| ids.admit(id(i), false)));
            ids
        };
        let mut segments = learn(&|i| i % 44);
        assert_eq!(
            (segments.pattern(), segments.likely(false)),
            (IdPattern::Segments, 20)
        );
        let mut admits = |id| segments.admit(id, false);
        assert!(admits(0) && admits(127) && !admits(128));
        // The counter values were small during learning but will continue to increase.
        for first in [0, 1, 64] {
            let mut small = learn(&|i| first + i);
            assert_eq!(small.pattern(), IdPattern::Counting);
            assert!((first + 64..400).all(|id| small.admit(id, false)));
        }
        let mut counting = learn(&|i| 0xffe0_u16.wrapping_add(3 * i));
        assert_eq!(
            (counting.pattern(), counting.likely(false)),
            (IdPattern::Counting, 0x9e)
        );
        // A counter that jumps while its host is idle must still be accepted.
        assert!(counting.admit(0x8000, false) && counting.admit(0x8001, true));
        let mut arbitrary = learn(&|i| i.wrapping_mul(40_503));
        assert_eq!(arbitrary.pattern(), IdPattern::Arbitrary);
        assert!(arbitrary.admit(1, false) && arbitrary.admit(0xff00, false));
    }

    /// Processes trains with these identifications and returns the number of wrong guesses.
    fn misses(ids: &mut PeerIds, trains: &[&[u16]]) -> usize {
        let mut misses = 0;
        for train in trains {
            for (at, &id) in train.iter().enumerate() {
                misses += usize::from(ids.likely(at > 0) != id);
                assert!(ids.admit(id, at > 0));
            }
        }
        misses
    }

    #[test]
    fn identifications_are_guessed_by_train_position() {
        let segmented: &[u16] = &[0, 1, 2, 3];
        let mut ids = PeerIds::new();
        misses(&mut ids, &[segmented; LEARN as usize / 4]);
        assert_eq!(ids.pattern(), IdPattern::Segments);
        // Single responses, and trains of any length.
        let trains: [&[u16]; 5] = [segmented, &[0], &[0], &[0, 1], segmented];
        assert_eq!(misses(&mut ids, &trains), 0);
        // Single packets that were merged by the receiving adapter.
        let single: &[u16] = &[0, 0, 0, 0];
        assert_eq!(misses(&mut ids, &[single; 3]), 1);
        // A segmented send received in parts or packet by packet.
        assert_eq!(misses(&mut ids, &[&[0, 1], &[2, 3], &[4, 5], &[6]]), 2);
    }
}
