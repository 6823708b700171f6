//! The invariant CRC of RoCEv2 (IBTA 9.8.1 and annex A17.3.3): made by senders,
//! verified by receivers, over fields that no router may change.
//!
//! It covers the IPv4 identification, which a UDP socket neither chooses nor
//! sees. Sending, the kernel's choice is known: 0 for an unconnected socket
//! with path MTU discovery on, *i* for segment *i* of a segmented send.
//! Receiving, [`IcrcFlow::check`] finds the identification for which the ICRC
//! would be right. The CRC is linear, so every identification changes it by a
//! fixed pattern, and those 2¹⁶ patterns are a 16-dimensional subspace of the
//! 2³² values. Running the CRC register backwards over the bytes after the
//! field turns that subspace into "the upper half of the register is zero, and
//! the lower half is the identification": one multiplication by a constant
//! that depends on the length alone.
//!
//! That test lets one corruption in 65,536 through. [`PeerIds`] therefore
//! learns how a peer numbers its packets. One that sends 0, or 0 to 127 within a
//! segmented send, is held to that, which leaves one corruption in 2²⁵. One that
//! counts is not: an idle Linux host steps its counter by any amount, and a
//! genuine packet must never be dropped for its number. IPv6 has no such field
//! and is always exact.

use std::net::{IpAddr, SocketAddr};

use crc32fast::Hasher;
use thiserror::Error;

use super::bth::Bth;

/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;

/// Longest UDP payload that is checked: headers, 4096 bytes of payload and the
/// ICRC fit with room to spare.
pub const MAX_DATAGRAM: usize = 4096 + 256;

const MASKED_LRH: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
const PROTOCOL_UDP: u8 = 17;

/// Offset of the bits a router may change inside the BTH.
const BTH_CONGESTION: usize = 4;

/// Why a packet's ICRC is not accepted; such packets are dropped silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IcrcError {
    /// Too short for a BTH and an ICRC, too long for any path MTU, or not a
    /// multiple of four.
    #[error("packet length {len} is not that of a RoCEv2 packet")]
    Length {
        /// Bytes received.
        len: usize,
    },
    /// ICRC: no identification makes it right.
    #[error("ICRC mismatch")]
    Corrupt,
    /// ICRC: right only for an identification that this peer would not use.
    #[error("ICRC implies IPv4 identification {id:#06x}, which this peer does not use")]
    UnlikelyId {
        /// The identification implied.
        id: u16,
    },
}

/// The addresses and ports of one direction of traffic between two NICs, as a
/// template of the pseudo header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcrcFlow {
    pseudo: [u8; MASKED_LRH + IPV6_LEN + UDP_LEN],
    is_v6: bool,
}

impl IcrcFlow {
    /// The flow from `src` to `dst`; `None` if one is IPv4 and the other IPv6.
    /// IPv4-mapped IPv6 addresses are IPv4, as on the wire.
    #[must_use]
    pub fn new(src: SocketAddr, dst: SocketAddr) -> Option<Self> {
        let mut pseudo = [0xff; MASKED_LRH + IPV6_LEN + UDP_LEN];
        let ip = &mut pseudo[MASKED_LRH..];
        let (is_v6, ip_len) = match (src.ip().to_canonical(), dst.ip().to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                ip[0] = 0x45;
                // Bytes 1 (TOS), 8 (TTL) and 10-11 (checksum) stay masked; 2-3
                // (length) and 4-5 (identification) vary; do not fragment.
                ip[6..8].copy_from_slice(&[0x40, 0x00]);
                ip[9] = PROTOCOL_UDP;
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                (false, IPV4_LEN)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                // Traffic class, flow label and byte 7 (hop limit) stay masked.
                ip[0] = 0x6f;
                ip[6] = PROTOCOL_UDP;
                ip[8..24].copy_from_slice(&src.octets());
                ip[24..40].copy_from_slice(&dst.octets());
                (true, IPV6_LEN)
            }
            _ => return None,
        };
        let udp = &mut ip[ip_len..][..UDP_LEN];
        udp[0..2].copy_from_slice(&src.port().to_be_bytes());
        udp[2..4].copy_from_slice(&dst.port().to_be_bytes());
        Some(Self { pseudo, is_v6 })
    }

    /// Whether the flow is IPv6, where there is no identification.
    #[must_use]
    pub fn is_v6(&self) -> bool {
        self.is_v6
    }

    /// Begin the ICRC of a packet whose UDP payload, ICRC included, has
    /// `datagram_len` bytes. `ip_id` is ignored on IPv6.
    #[must_use]
    pub fn start(&self, datagram_len: u16, ip_id: u16) -> Icrc {
        let mut pseudo = self.pseudo;
        let udp_len = datagram_len.wrapping_add(UDP_LEN as u16);
        let (ip, rest) =
            pseudo[MASKED_LRH..].split_at_mut(if self.is_v6 { IPV6_LEN } else { IPV4_LEN });
        if self.is_v6 {
            ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
        } else {
            ip[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_LEN as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&ip_id.to_be_bytes());
        }
        rest[4..6].copy_from_slice(&udp_len.to_be_bytes());
        let used = MASKED_LRH + ip.len() + UDP_LEN;
        let mut hasher = Hasher::new();
        hasher.update(&pseudo[..used]);
        Icrc { hasher }
    }

    /// The ICRC of a whole packet in one piece: `body` is everything from the
    /// BTH to before the ICRC, at least a BTH long.
    #[must_use]
    pub fn compute(&self, body: &[u8], ip_id: u16) -> u32 {
        let mut icrc = self.start((body.len() + ICRC_LEN) as u16, ip_id);
        icrc.update_headers(body);
        icrc.finish()
    }

    /// Check a received UDP payload. `likely_id` is the identification that the
    /// peer probably used, for which the check is cheapest. Returns the
    /// identification for which the ICRC is right; 0 on IPv6.
    pub fn check(&self, datagram: &[u8], likely_id: u16) -> Result<u16, IcrcError> {
        let len = datagram.len();
        if !(Bth::LEN + ICRC_LEN..=MAX_DATAGRAM).contains(&len) || !len.is_multiple_of(4) {
            return Err(IcrcError::Length { len });
        }
        let (body, icrc) = datagram
            .split_last_chunk::<ICRC_LEN>()
            .ok_or(IcrcError::Length { len })?;
        let difference = self.compute(body, likely_id) ^ u32::from_le_bytes(*icrc);
        match (difference, self.is_v6) {
            (0, true) => Ok(0),
            (0, false) => Ok(likely_id),
            (_, true) => Err(IcrcError::Corrupt),
            (_, false) => implied_id(difference, body.len())
                .map(|change| change ^ likely_id)
                .ok_or(IcrcError::Corrupt),
        }
    }

    /// Check a received UDP payload whose identification is known, as behind a
    /// raw socket.
    pub fn check_exact(&self, datagram: &[u8], ip_id: u16) -> Result<(), IcrcError> {
        match self.check(datagram, ip_id)? {
            id if id == ip_id || self.is_v6 => Ok(()),
            _ => Err(IcrcError::Corrupt),
        }
    }
}

/// An ICRC in the making. Feed the headers first, then the payload in pieces
/// of any size, then the padding.
#[derive(Clone, Debug)]
pub struct Icrc {
    hasher: Hasher,
}

impl Icrc {
    /// The first piece, which begins with the whole BTH.
    ///
    /// # Panics
    ///
    /// If the piece is shorter than a BTH.
    pub fn update_headers(&mut self, headers: &[u8]) {
        let (bth, rest) = headers
            .split_first_chunk::<{ Bth::LEN }>()
            .expect("a whole BTH first");
        let mut bth = *bth;
        bth[BTH_CONGESTION] = 0xff;
        self.hasher.update(&bth);
        self.hasher.update(rest);
    }

    /// A further piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
    }

    /// The `count` zero bytes of padding, `0..=3`.
    pub fn update_pad(&mut self, count: usize) {
        self.hasher.update(&[0; 3][..count]);
    }

    /// The ICRC as a number; on the wire it is little-endian.
    #[must_use]
    pub fn finish(self) -> u32 {
        self.hasher.finalize()
    }

    /// The four bytes as they lie on the wire.
    #[must_use]
    pub fn finish_bytes(self) -> [u8; ICRC_LEN] {
        self.finish().to_le_bytes()
    }
}

/// The CRC polynomial, reflected: bit 31 is the coefficient of x⁰.
const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;

/// `a / x` modulo the polynomial.
const fn divide_by_x(a: u32) -> u32 {
    if a & ONE != 0 {
        ((a ^ POLYNOMIAL) << 1) | 1
    } else {
        a << 1
    }
}

/// `a * b` modulo the polynomial.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        // Branch-free: whether a bit is set is as good as random.
        product ^= b & 0u32.wrapping_sub((a >> bit) & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
    }
    product
}

/// Four-byte words from the end of the identification field to the end of the
/// UDP header, the two bytes of the field itself counted in.
const WORDS_AFTER_ID: usize = (IPV4_LEN - 4 + UDP_LEN) / 4;

/// `BACKWARDS[n]` undoes what *n* four-byte words do to a difference in the CRC
/// register: it is x to the power of −32*n*.
static BACKWARDS: [u32; WORDS_AFTER_ID + MAX_DATAGRAM / 4 + 1] = {
    let mut table = [ONE; WORDS_AFTER_ID + MAX_DATAGRAM / 4 + 1];
    let mut word = 1;
    while word < table.len() {
        let mut value = table[word - 1];
        let mut bit = 0;
        while bit < 32 {
            value = divide_by_x(value);
            bit += 1;
        }
        table[word] = value;
        word += 1;
    }
    table
};

/// The identification bits whose change accounts for `difference` in the ICRC
/// of a packet with `body_len` bytes after the UDP header, if any do.
fn implied_id(difference: u32, body_len: usize) -> Option<u16> {
    let register = multiply(BACKWARDS[WORDS_AFTER_ID + body_len / 4], difference);
    // The register takes bytes in at its low end: first byte lowest.
    (register >> 16 == 0).then(|| (register as u16).swap_bytes())
}

/// How a peer numbers its IPv4 packets, learned from those that passed the
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
/// How far a counting peer may be ahead of or behind the last packet.
const COUNT_WINDOW: u16 = 1024;
/// Packets in a row that break the pattern, each of which passed the linear
/// test, after which the peer has changed and is learned anew. Chance does that
/// once in 2⁶⁴ tries, and a peer that changes loses no more packets than this.
const BREAKS: u8 = 4;

/// The memory of one peer's identifications.
#[derive(Clone, Copy, Debug)]
pub struct PeerIds {
    pattern: IdPattern,
    /// Packets seen while learning.
    seen: u16,
    /// Packets in a row that broke the pattern.
    broken: u8,
    /// The largest identification seen while learning.
    largest: u16,
    /// Whether all identifications seen while learning stepped by little.
    steps: bool,
    last: u16,
}

impl Default for PeerIds {
    fn default() -> Self {
        Self::new()
    }
}

impl PeerIds {
    /// Nothing known.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            pattern: IdPattern::Learning,
            seen: 0,
            broken: 0,
            largest: 0,
            steps: true,
            last: 0,
        }
    }

    /// The pattern believed so far.
    #[must_use]
    pub fn pattern(&self) -> IdPattern {
        self.pattern
    }

    /// The identification to try first.
    #[must_use]
    pub fn likely(&self) -> u16 {
        match self.pattern {
            IdPattern::Counting => self.last.wrapping_add(1),
            // A burst counts from 0; single packets repeat it.
            IdPattern::Segments if self.last != 0 => self.last + 1,
            IdPattern::Learning | IdPattern::Segments | IdPattern::Arbitrary => 0,
        }
    }

    /// Take in the identification of a packet that passed the linear test and
    /// say whether this peer would use it.
    pub fn admit(&mut self, id: u16) -> bool {
        if self.pattern == IdPattern::Segments && id >= SEGMENTS {
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
        self.last = id;
        true
    }

    fn learn(&mut self, id: u16) {
        let ahead = id.wrapping_sub(self.last);
        let is_step = ahead <= COUNT_WINDOW || ahead >= COUNT_WINDOW.wrapping_neg();
        self.steps &= self.seen == 0 || is_step;
        self.largest = self.largest.max(id);
        self.seen += 1;
        if self.seen < LEARN {
            return;
        }
        self.pattern = match self.largest {
            small if small < SEGMENTS => IdPattern::Segments,
            _ if self.steps => IdPattern::Counting,
            _ => IdPattern::Arbitrary,
        };
    }
}

/// Verifies the packets of one flow.
#[derive(Clone, Copy, Debug)]
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

    /// Check a received UDP payload.
    pub fn verify(&mut self, datagram: &[u8]) -> Result<(), IcrcError> {
        let id = self.flow.check(datagram, self.ids.likely())?;
        if self.flow.is_v6() || self.ids.admit(id) {
            Ok(())
        } else {
            Err(IcrcError::UnlikelyId { id })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flow(src: &str, dst: &str) -> IcrcFlow {
        IcrcFlow::new(src.parse().unwrap(), dst.parse().unwrap()).unwrap()
    }

    fn v4() -> IcrcFlow {
        flow("10.0.0.1:49152", "10.0.0.2:4791")
    }

    fn sealed(flow: &IcrcFlow, len: usize, id: u16) -> Vec<u8> {
        let mut body: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        let icrc = flow.compute(&body, id);
        body.extend_from_slice(&icrc.to_le_bytes());
        body
    }

    /// The plain bit-by-bit CRC over an explicit pseudo header.
    fn reference(pieces: &[&[u8]]) -> u32 {
        let mut register = !0u32;
        for &byte in pieces.iter().copied().flatten() {
            register ^= u32::from(byte);
            for _ in 0..8 {
                register = (register >> 1) ^ (if register & 1 == 1 { 0xedb8_8320 } else { 0 });
            }
        }
        !register
    }

    #[test]
    fn the_pseudo_headers_are_those_of_the_annex() {
        let body: Vec<u8> = (0..16).collect();
        let masked: Vec<u8> = [&[0, 1, 2, 3, 0xff][..], &body[5..]].concat();
        let ip4 = [
            0x45, 0xff, 0x00, 0x30, 0x12, 0x34, 0x40, 0x00, 0xff, 0x11, 0xff, 0xff, 10, 0, 0, 1,
            10, 0, 0, 2,
        ];
        let udp = [0xc0, 0x00, 0x12, 0xb7, 0x00, 0x1c, 0xff, 0xff];
        let want = reference(&[&[0xff; 8], &ip4, &udp, &masked]);
        assert_eq!(v4().compute(&body, 0x1234), want);

        let ip6_head = [0x6f, 0xff, 0xff, 0xff, 0x00, 0x1c, 0x11, 0xff];
        let mut src = [0u8; 16];
        src[..2].copy_from_slice(&[0xfd, 0x00]);
        let mut dst = src;
        (src[15], dst[15]) = (1, 2);
        let want = reference(&[&[0xff; 8], &ip6_head, &src, &dst, &udp, &masked]);
        assert_eq!(
            flow("[fd00::1]:49152", "[fd00::2]:4791").compute(&body, 9),
            want
        );
    }

    #[test]
    fn mixed_families_have_no_flow() {
        let (v4, v6) = ("1.2.3.4:1".parse().unwrap(), "[::1]:1".parse().unwrap());
        assert_eq!(IcrcFlow::new(v4, v6), None);
        let mapped = flow("[::ffff:10.0.0.1]:49152", "[::ffff:10.0.0.2]:4791");
        assert_eq!(mapped, self::v4());
    }

    #[test]
    fn ipv6_is_exact() {
        let flow = flow("[fd00::1]:49152", "[fd00::2]:4791");
        let good = sealed(&flow, 40, 0);
        assert_eq!(flow.check(&good, 77), Ok(0));
        let mut bad = good;
        bad[20] ^= 1;
        assert_eq!(flow.check(&bad, 0), Err(IcrcError::Corrupt));
    }

    #[test]
    fn lengths_are_bounded() {
        let flow = v4();
        for len in [0, 4, 12, 15, 18, MAX_DATAGRAM + 4] {
            assert_eq!(flow.check(&vec![0; len], 0), Err(IcrcError::Length { len }));
        }
        let longest = sealed(&flow, MAX_DATAGRAM - 4, 0xfedc);
        assert_eq!(flow.check(&longest, 0), Ok(0xfedc));
    }

    #[test]
    fn a_peer_that_sends_small_numbers_is_held_to_them() {
        let flow = v4();
        let mut verifier = IcrcVerifier::new(flow);
        for _ in 0..LEARN {
            verifier.verify(&sealed(&flow, 16, 0)).unwrap();
        }
        assert_eq!(verifier.pattern(), IdPattern::Segments);
        let odd = sealed(&flow, 16, 0x0100);
        assert_eq!(
            verifier.verify(&odd),
            Err(IcrcError::UnlikelyId { id: 0x0100 })
        );
        // A first segmented send after many single packets is no surprise.
        for id in 0..44 {
            verifier.verify(&sealed(&flow, 1040, id)).unwrap();
        }
        // A peer that changed for good is learned again.
        for _ in 0..BREAKS {
            verifier.verify(&odd).unwrap_err();
        }
        assert_eq!(verifier.pattern(), IdPattern::Learning);
        verifier.verify(&odd).unwrap();
    }

    #[test]
    fn patterns_are_told_apart() {
        let learn = |id: &dyn Fn(u16) -> u16| {
            let mut ids = PeerIds::new();
            assert!((0..LEARN).all(|i| ids.admit(id(i))));
            ids
        };
        let mut segments = learn(&|i| i % 44);
        assert_eq!(
            (segments.pattern(), segments.likely()),
            (IdPattern::Segments, 20)
        );
        assert!(segments.admit(0) && segments.admit(127) && !segments.admit(128));
        let mut counting = learn(&|i| 0xffe0_u16.wrapping_add(3 * i));
        assert_eq!(
            (counting.pattern(), counting.likely()),
            (IdPattern::Counting, 0x9e)
        );
        // A counter that jumps while its host is idle stays welcome.
        assert!(counting.admit(0x8000) && counting.admit(0x8001));
        let mut arbitrary = learn(&|i| i.wrapping_mul(40_503));
        assert_eq!(arbitrary.pattern(), IdPattern::Arbitrary);
        assert!(arbitrary.admit(1) && arbitrary.admit(0xff00));
    }

    #[test]
    fn single_bit_errors_are_found() {
        let flow = v4();
        let good = sealed(&flow, 60, 0x1234);
        for bit in (0..good.len() * 8).filter(|bit| bit / 8 != 4) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(flow.check(&bad, 0), Err(IcrcError::Corrupt), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn the_identification_is_recovered(id: u16, likely: u16, words in 3usize..1050) {
            let flow = v4();
            let datagram = sealed(&flow, words * 4, id);
            prop_assert_eq!(flow.check(&datagram, likely), Ok(id));
            prop_assert_eq!(flow.check_exact(&datagram, id), Ok(()));
            prop_assert_eq!(flow.check_exact(&datagram, id ^ 1), Err(IcrcError::Corrupt));
        }

        #[test]
        fn pieces_make_the_same_crc(split in 12usize..100, pad in 0usize..4) {
            let flow = v4();
            let body: Vec<u8> = (0..100u8).chain(std::iter::repeat_n(0, pad)).collect();
            let mut icrc = flow.start((body.len() + ICRC_LEN) as u16, 3);
            icrc.update_headers(&body[..split]);
            icrc.update(&body[split..100]);
            icrc.update_pad(pad);
            prop_assert_eq!(icrc.finish(), flow.compute(&body, 3));
        }
    }
}
