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
//! That test lets one corruption in 65,536 through. [`PeerIds`](super::PeerIds) therefore
//! learns how a peer numbers its packets. One that sends 0, or 0 to 127 within a
//! segmented send, is held to that, which leaves one corruption in 2²⁵. One that
//! counts is not: an idle Linux host steps its counter by any amount, and a
//! genuine packet must never be dropped for its number. IPv6 has no such field
//! and is always exact.

use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;

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

/// Longest packet that is copied whole to be masked: a short message and its
/// headers are then one piece.
const SHORT_COPIED: usize = 128;

/// Bytes of a longer one that are copied: the longest headers there are, and
/// some payload to fill whole blocks.
const HEADERS_COPIED: usize = 64;

/// A hasher of nothing. Each new one asks what the processor can do; a copy of
/// this one knows.
static HASHER: LazyLock<Hasher> = LazyLock::new(Hasher::new);

/// Reason why a packet's ICRC is not accepted; such packets are dropped silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IcrcError {
    /// Too short for a BTH and an ICRC, too long for any path MTU, or not a
    /// multiple of four.
    #[error("packet length {len} is not that of a RoCEv2 packet")]
    Length {
        /// Number of bytes received.
        len: usize,
    },
    /// ICRC: no identification makes it right.
    #[error("ICRC mismatch")]
    Corrupt,
    /// ICRC: right only for an identification that this peer would not use.
    #[error("ICRC implies IPv4 identification {id:#06x}, which this peer does not use")]
    UnlikelyId {
        /// IPv4 identification that the ICRC implies.
        id: u16,
    },
}

/// The addresses and ports of one direction of traffic between two NICs.
///
/// Small and cheap to start from: it is the CRC of the pseudo header with zero
/// lengths and identification, and what those contribute is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcrcFlow {
    base: u32,
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
                ip[2..8].copy_from_slice(&[0, 0, 0, 0, 0x40, 0x00]);
                ip[9] = PROTOCOL_UDP;
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                (false, IPV4_LEN)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                // Traffic class, flow label and byte 7 (hop limit) stay masked;
                // 4-5 (length) vary.
                ip[0] = 0x6f;
                ip[4..7].copy_from_slice(&[0, 0, PROTOCOL_UDP]);
                ip[8..24].copy_from_slice(&src.octets());
                ip[24..40].copy_from_slice(&dst.octets());
                (true, IPV6_LEN)
            }
            _ => return None,
        };
        let udp = &mut ip[ip_len..][..UDP_LEN];
        udp[0..2].copy_from_slice(&src.port().to_be_bytes());
        udp[2..4].copy_from_slice(&dst.port().to_be_bytes());
        // The length varies, the checksum stays masked.
        udp[4..6].copy_from_slice(&[0, 0]);
        let base = crc32fast::hash(&pseudo[..MASKED_LRH + ip_len + UDP_LEN]);
        Some(Self { base, is_v6 })
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
        Icrc {
            hasher: HASHER.clone(),
            pseudo: self.pseudo_header(datagram_len, ip_id),
        }
    }

    /// The CRC of the pseudo header.
    #[expect(clippy::cast_possible_truncation, reason = "lengths of headers")]
    fn pseudo_header(&self, datagram_len: u16, ip_id: u16) -> u32 {
        let udp_len = datagram_len.wrapping_add(UDP_LEN as u16);
        let ip = if self.is_v6 {
            IPV6_LENGTH.of(udp_len)
        } else {
            IPV4_LENGTH.of(udp_len.wrapping_add(IPV4_LEN as u16)) ^ IPV4_ID.of(ip_id)
        };
        self.base ^ ip ^ UDP_LENGTH.of(udp_len)
    }

    /// The ICRC of a whole packet in one piece: `body` is everything from the
    /// BTH to before the ICRC, at least a BTH long.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a datagram has less than 64 KiB"
    )]
    pub fn compute(&self, body: &[u8], ip_id: u16) -> u32 {
        let mut icrc = self.start((body.len() + ICRC_LEN) as u16, ip_id);
        icrc.update_headers(body);
        icrc.finish()
    }

    /// As [`IcrcFlow::compute`], of a packet that the caller may change, so that
    /// nothing has to be copied; it is as before when the call returns.
    ///
    /// # Panics
    ///
    /// If the packet is shorter than a BTH.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a datagram has less than 64 KiB"
    )]
    pub fn compute_in_place(&self, body: &mut [u8], ip_id: u16) -> u32 {
        let pseudo = self.pseudo_header((body.len() + ICRC_LEN) as u16, ip_id);
        let head = body.first_chunk_mut::<{ Bth::LEN }>();
        let head = head.expect("a whole BTH");
        let sent = *head;
        mask(head, pseudo);
        let mut hasher = HASHER.clone();
        hasher.update(body);
        body[..Bth::LEN].copy_from_slice(&sent);
        hasher.finalize()
    }

    /// Check a received UDP payload. `likely_id` is the identification that the
    /// peer probably used, for which the check is cheapest. Returns the
    /// identification for which the ICRC is right; 0 on IPv6.
    pub fn check(&self, datagram: &[u8], likely_id: u16) -> Result<u16, IcrcError> {
        let len = datagram.len();
        // The length bounds the table of `implied_id`, which is indexed by it.
        if !(Bth::LEN + ICRC_LEN..=MAX_DATAGRAM).contains(&len) || !len.is_multiple_of(4) {
            return Err(IcrcError::Length { len });
        }
        let (body, icrc) = datagram
            .split_last_chunk::<ICRC_LEN>()
            .ok_or(IcrcError::Length { len })?;
        // With the right guess the difference is 0, and the search for another identification is
        // saved.
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
    /// The CRC of the pseudo header, until the headers follow it.
    pseudo: u32,
}

impl Icrc {
    /// The first piece, which begins with the whole BTH.
    ///
    /// # Panics
    ///
    /// If the piece is shorter than a BTH.
    pub fn update_headers(&mut self, headers: &[u8]) {
        // A copy with the masked byte, so that short packets are one piece.
        let mut copy = [0; SHORT_COPIED];
        let copied = if headers.len() > SHORT_COPIED {
            HEADERS_COPIED
        } else {
            headers.len()
        };
        let (first, rest) = headers.split_at(copied);
        let copy = &mut copy[..copied];
        copy.copy_from_slice(first);
        let head = copy.first_chunk_mut().expect("a whole BTH first");
        mask(head, self.pseudo);
        self.hasher.update(copy);
        if !rest.is_empty() {
            self.hasher.update(rest);
        }
    }

    /// Adds a further piece of the packet.
    pub fn update(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
    }

    /// The `count` zero bytes of padding, `0..=3`.
    pub fn update_pad(&mut self, count: usize) {
        if count > 0 {
            self.hasher.update(&[0; 3][..count]);
        }
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

/// Makes a BTH what the ICRC covers of it, behind a pseudo header whose CRC is
/// `pseudo`: a CRC adds the register before a piece to the first four bytes of
/// that piece.
fn mask(head: &mut [u8; Bth::LEN], pseudo: u32) {
    for (byte, register) in head.iter_mut().zip(pseudo.to_le_bytes()) {
        *byte ^= register;
    }
    head[BTH_CONGESTION] = 0xff;
}

/// The CRC polynomial, reflected: bit 31 is the coefficient of x⁰.
const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;

/// Contribution of a two-byte big-endian field of the pseudo header to its CRC, by
/// the value of each byte.
struct FieldCrc {
    high: [u32; 256],
    low: [u32; 256],
}

impl FieldCrc {
    /// A field after whose second byte the pseudo header has `after` more.
    const fn new(after: usize) -> Self {
        Self {
            high: byte_crc(after + 1),
            low: byte_crc(after),
        }
    }

    fn of(&self, value: u16) -> u32 {
        let [high, low] = value.to_be_bytes();
        self.high[usize::from(high)] ^ self.low[usize::from(low)]
    }
}

/// The contribution of each byte value that `after` more bytes follow.
const fn byte_crc(after: usize) -> [u32; 256] {
    let mut table = [0; 256];
    let mut value = 0;
    while value < table.len() {
        #[expect(clippy::cast_possible_truncation, reason = "less than 256")]
        let mut register = value as u32;
        let mut bit = 0;
        while bit < 8 * (after + 1) {
            register = (register >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(register & 1));
            bit += 1;
        }
        table[value] = register;
        value += 1;
    }
    table
}

static IPV4_LENGTH: FieldCrc = FieldCrc::new(IPV4_LEN - 4 + UDP_LEN);
static IPV4_ID: FieldCrc = FieldCrc::new(IPV4_LEN - 6 + UDP_LEN);
static IPV6_LENGTH: FieldCrc = FieldCrc::new(IPV6_LEN - 6 + UDP_LEN);
static UDP_LENGTH: FieldCrc = FieldCrc::new(UDP_LEN - 6);

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
    u16::try_from(register).ok().map(u16::swap_bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flow(src: &str, dst: &str) -> IcrcFlow {
        IcrcFlow::new(src.parse().unwrap(), dst.parse().unwrap()).unwrap()
    }

    pub(in super::super) fn v4() -> IcrcFlow {
        flow("10.0.0.1:49152", "10.0.0.2:4791")
    }

    pub(in super::super) fn sealed(flow: &IcrcFlow, len: usize, id: u16) -> Vec<u8> {
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
        assert!(IcrcFlow::new(v4, v6).is_none());
        let mapped = flow("[::ffff:10.0.0.1]:49152", "[::ffff:10.0.0.2]:4791");
        assert_eq!(mapped.compute(&[0; 16], 1), self::v4().compute(&[0; 16], 1));
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

        #[test]
        fn a_packet_that_may_be_changed_has_the_same_crc_and_comes_back(
            body in proptest::collection::vec(any::<u8>(), 12..400),
            id: u16,
        ) {
            let flow = v4();
            let mut copy = body.clone();
            prop_assert_eq!(flow.compute_in_place(&mut copy, id), flow.compute(&body, id));
            prop_assert_eq!(copy, body);
        }
    }
}
