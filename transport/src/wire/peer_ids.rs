//! A receiver's knowledge of the IPv4 identifications of a peer, which
//! [`IcrcFlow::check`] recovers: see the [ICRC](super::icrc).

use super::icrc::{IcrcError, IcrcFlow};

/// Pattern by which a peer numbers its IPv4 packets, learned from those that passed the
/// linear test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdPattern {
    /// Too few packets seen; every identification is admitted.
    Learning,
    /// 0, or the segment's number in a segmented send; demanded.
    Segments,
    /// Counting up, more or less. The next number is guessed first, which makes
    /// the check cheaper, and every identification is admitted.
    Counting,
    /// None of these; every identification is admitted.
    Arbitrary,
}

/// Packets after which a pattern is believed.
const LEARN: u16 = 64;
/// A segmented send has at most this many segments (`UDP_MAX_SEGMENTS`).
const SEGMENTS: u16 = 128;
/// Distance by which a counting peer may be ahead of or behind the last packet.
const COUNT_WINDOW: u16 = 1024;
/// Packets in a row that break the pattern, each of which passed the linear
/// test, after which the peer has changed and is learned again. Chance does that
/// once in 2⁶⁴ tries, and a peer that changes loses at most this many packets.
const BREAKS: u8 = 4;

/// The memory of one peer's identifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIds {
    pattern: IdPattern,
    /// Packets seen while learning.
    seen: u16,
    /// Packets in a row that broke the pattern.
    broken: u8,
    /// The largest identification seen while learning.
    largest: u16,
    /// Number of zeros while learning.
    zeroes: u16,
    /// All identifications seen while learning stepped by little.
    steps: bool,
    /// Whether the last packet that began a train, and the last that followed another in one, had
    /// the number after the one before it.
    counted: [bool; 2],
    last: u16,
}

impl Default for PeerIds {
    fn default() -> Self {
        Self::new()
    }
}

impl PeerIds {
    /// Peer of whom no packet was seen.
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

    /// The pattern believed so far.
    #[must_use]
    pub fn pattern(&self) -> IdPattern {
        self.pattern
    }

    /// The identification to try first, for a packet that begins a train (`follows` is false), or
    /// that follows another one in it.
    #[must_use]
    pub fn likely(&self, follows: bool) -> u16 {
        match self.pattern {
            IdPattern::Counting => self.last.wrapping_add(1),
            // A train is a segmented send as a rule, which counts from 0. It may also be a part of
            // one, or packets that were sent one by one, which are all numbered 0.
            IdPattern::Segments if self.counted[usize::from(follows)] => self.last + 1,
            IdPattern::Learning | IdPattern::Segments | IdPattern::Arbitrary => 0,
        }
    }

    /// Takes in the identification of a packet that passed the linear test; returns whether this
    /// peer would use it.
    pub fn admit(&mut self, id: u16, follows: bool) -> bool {
        // Also one that has sent single packets only, all numbered 0, may begin with segments at
        // any time: their numbers are always possible.
        if self.pattern == IdPattern::Segments && id >= SEGMENTS {
            // The last number stays: a corrupt packet says nothing about the peer.
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
        // Forward or back, since packets may be reordered.
        let ahead = id.wrapping_sub(self.last);
        let is_step = ahead <= COUNT_WINDOW || ahead >= COUNT_WINDOW.wrapping_neg();
        // The first packet has none before it to step from.
        self.steps &= self.seen == 0 || is_step;
        self.largest = self.largest.max(id);
        self.zeroes += u16::from(id == 0);
        self.seen += 1;
        if self.seen < LEARN {
            return;
        }
        self.pattern = match self.largest {
            // Each segmented send begins at 0. A counter may be as small by chance, and passes 0
            // once.
            small if small < SEGMENTS && self.zeroes > 1 => IdPattern::Segments,
            _ if self.steps => IdPattern::Counting,
            _ => IdPattern::Arbitrary,
        };
    }
}

/// Verifies the packets of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcrcVerifier {
    flow: IcrcFlow,
    ids: PeerIds,
}

impl IcrcVerifier {
    /// A verifier that knows nothing of the peer yet.
    #[must_use]
    pub fn new(flow: IcrcFlow) -> Self {
        Self {
            flow,
            ids: PeerIds::new(),
        }
    }

    /// The pattern of identifications that is demanded of the peer.
    #[must_use]
    pub fn pattern(&self) -> IdPattern {
        self.ids.pattern()
    }

    /// Checks a received UDP payload, which follows another one in a train of the peer's or begins
    /// one. Returns its IPv4 identification, which is 0 on IPv6.
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

    /// The end of a train: where the next one does not go on with its numbers, they are forgotten.
    /// Most trains then leave the verifier as it was.
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
    fn a_peer_that_sends_small_numbers_is_held_to_them() {
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
        // A first segmented send after many single packets is no surprise.
        for id in 0..44 {
            verifier.verify(&sealed(&flow, 1040, id), id > 0).unwrap();
        }
        // A peer that changed for good is learned again.
        for _ in 0..BREAKS {
            verifier.verify(&odd, false).unwrap_err();
        }
        assert_eq!(verifier.pattern(), IdPattern::Learning);
        verifier.verify(&odd, false).unwrap();
    }

    #[test]
    fn patterns_are_told_apart() {
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
        // A counter that was small while it was learned goes on.
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
        // A counter that jumps while its host is idle stays welcome.
        assert!(counting.admit(0x8000, false) && counting.admit(0x8001, true));
        let mut arbitrary = learn(&|i| i.wrapping_mul(40_503));
        assert_eq!(arbitrary.pattern(), IdPattern::Arbitrary);
        assert!(arbitrary.admit(1, false) && arbitrary.admit(0xff00, false));
    }

    /// Takes in trains of these numbers, and returns how many of them were guessed wrongly.
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
    fn numbers_are_guessed_by_their_place_in_a_train() {
        let segmented: &[u16] = &[0, 1, 2, 3];
        let mut ids = PeerIds::new();
        misses(&mut ids, &[segmented; LEARN as usize / 4]);
        assert_eq!(ids.pattern(), IdPattern::Segments);
        // Answers alone, and trains of every length.
        let trains: [&[u16]; 5] = [segmented, &[0], &[0], &[0, 1], segmented];
        assert_eq!(misses(&mut ids, &trains), 0);
        // Single packets that a receiving adapter has put together.
        let single: &[u16] = &[0, 0, 0, 0];
        assert_eq!(misses(&mut ids, &[single; 3]), 1);
        // A segmented send that comes in parts, or one by one.
        assert_eq!(misses(&mut ids, &[&[0, 1], &[2, 3], &[4, 5], &[6]]), 2);
    }
}
