//! Stream framing: FPDUs with length, padding, CRC and markers.
//!
//! ```text
//! | ULPDU length (2) | ULPDU | padding to a multiple of 4 | CRC32C (4) |
//! ```
//!
//! If markers are used, there are four bytes at each multiple of 512 bytes in the stream, starting
//! at the first FPDU: two zero bytes, followed by the distance back to the length field of the
//! current FPDU, or 0 if a new FPDU starts after the marker. CRCs include markers, but the padding
//! is computed without them. Each direction is counted separately.

use crc_fast::CrcAlgorithm;
use thiserror::Error;

use super::at;

/// Distance between markers in bytes.
pub const MARKER_INTERVAL: usize = 512;

const MARKER_LEN: usize = 4;
const LENGTH_LEN: usize = 2;
const CRC_LEN: usize = 4;

/// Maximum ULPDU size for sending, in bytes. This ensures that markers can point back to the start
/// of the FPDU (RFC 5044 4.1).
pub const MAX_ULPDU: usize = 64_768;

/// Maximum size of a received FPDU including markers, in bytes.
pub const MAX_FPDU: usize = {
    let plain = LENGTH_LEN + u16::MAX as usize + 3 + CRC_LEN;
    plain + (plain / (MARKER_INTERVAL - MARKER_LEN) + 2) * MARKER_LEN
};

/// Reason why the stream can't be processed anymore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FramingError {
    /// The CRC is invalid.
    #[error("invalid CRC")]
    Crc,
    /// A marker does not point to the current FPDU.
    #[error("marker does not match the FPDU length")]
    Marker,
}

/// Options for one direction of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Framing {
    /// Set if markers are used.
    pub markers: bool,
    /// Set if CRCs are generated and verified. If not set, they are zero.
    pub crc: bool,
}

fn crc_of(bytes: &[u8]) -> [u8; CRC_LEN] {
    #[expect(clippy::cast_possible_truncation, reason = "a CRC of 32 bits")]
    let crc = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    // Same byte order as used by iSCSI.
    crc.to_le_bytes()
}

/// Returns the size of an FPDU without markers and CRC.
const fn body_len(ulpdu: usize) -> usize {
    (LENGTH_LEN + ulpdu).next_multiple_of(4)
}

/// Creates FPDUs.
#[derive(Clone, Debug)]
pub struct Framer {
    framing: Framing,
    /// Number of bytes since the last marker.
    position: usize,
    /// Buffer used to create FPDUs with markers.
    plain: Vec<u8>,
}

impl Framer {
    /// Creates a framer at the start of a stream.
    #[must_use]
    pub fn new(framing: Framing) -> Self {
        Self {
            framing,
            position: 0,
            plain: Vec::new(),
        }
    }

    /// Starts an FPDU at the end of `out`. The ULPDU must be appended after this. Returns the start
    /// offset to be passed to [`Framer::end_fpdu`].
    pub fn begin_fpdu(out: &mut Vec<u8>) -> usize {
        let start = out.len();
        out.extend_from_slice(&[0; LENGTH_LEN]);
        start
    }

    /// Completes the FPDU at `start`, which must be the last FPDU in `out`.
    ///
    /// # Panics
    /// Panics if the ULPDU exceeds [`MAX_ULPDU`] bytes.
    pub fn end_fpdu(&mut self, out: &mut Vec<u8>, start: usize) {
        let len = out.len() - start - LENGTH_LEN;
        assert!(len <= MAX_ULPDU, "no longer than MULPDU");
        #[expect(clippy::cast_possible_truncation, reason = "just checked")]
        let len = len as u16;
        out[start..start + LENGTH_LEN].copy_from_slice(&len.to_be_bytes());
        out.resize(start + body_len(len.into()), 0);
        if self.framing.markers {
            self.insert_markers(out, start);
        }
        let crc = match self.framing.crc {
            true => crc_of(&out[start..]),
            false => [0; CRC_LEN],
        };
        out.extend_from_slice(&crc);
        self.position = (self.position + CRC_LEN) % MARKER_INTERVAL;
    }

    fn insert_markers(&mut self, out: &mut Vec<u8>, start: usize) {
        let mut plain = std::mem::take(&mut self.plain);
        plain.clear();
        plain.extend_from_slice(&out[start..]);
        out.truncate(start);
        // Offset of the length field, after a marker if there is one.
        let begin = start + if self.position == 0 { MARKER_LEN } else { 0 };
        let mut rest = &plain[..];
        loop {
            // This includes the end of the data, where a marker is inserted before the CRC.
            if self.position == 0 {
                let back = out.len().saturating_sub(begin);
                let back = u16::try_from(back).expect("FPDU length is limited");
                out.extend_from_slice(&[0, 0]);
                out.extend_from_slice(&back.to_be_bytes());
                self.position = MARKER_LEN;
            }
            if rest.is_empty() {
                break;
            }
            let take = rest.len().min(MARKER_INTERVAL - self.position);
            out.extend_from_slice(&rest[..take]);
            rest = &rest[take..];
            self.position = (self.position + take) % MARKER_INTERVAL;
        }
        self.plain = plain;
    }
}

/// Extracts FPDUs from a stream that can be split at any position. Stores at most one partial FPDU.
#[derive(Debug)]
pub struct Deframer {
    framing: Framing,
    /// Number of bytes since the last marker, at the start of the FPDU.
    position: usize,
    /// Received part of an FPDU.
    part: Vec<u8>,
    /// Set if it is complete and was returned to the caller.
    is_taken: bool,
    /// Last FPDU without markers.
    plain: Vec<u8>,
}

/// Returns the size of the marker before the length field of an FPDU at this position, if any.
fn first_marker(framing: Framing, position: usize) -> usize {
    match framing.markers && position == 0 {
        true => MARKER_LEN,
        false => 0,
    }
}

/// Verifies an FPDU and returns its ULPDU.
fn unpack<'a>(
    framing: Framing,
    position: &mut usize,
    plain: &'a mut Vec<u8>,
    fpdu: &'a [u8],
) -> Result<&'a [u8], FramingError> {
    let (covered, crc) = fpdu.split_at(fpdu.len() - CRC_LEN);
    if framing.crc && crc_of(covered) != crc {
        return Err(FramingError::Crc);
    }
    let begin = first_marker(framing, *position);
    let len = usize::from(u16::from_be_bytes(at(covered, begin)));
    let (mut offset, mut here) = (0, *position);
    *position = (*position + fpdu.len()) % MARKER_INTERVAL;
    if !framing.markers {
        return Ok(&covered[LENGTH_LEN..LENGTH_LEN + len]);
    }
    plain.clear();
    while offset < covered.len() {
        if here == 0 {
            let back = usize::from(u16::from_be_bytes(at(covered, offset + 2)));
            if back != offset.saturating_sub(begin) {
                return Err(FramingError::Marker);
            }
            (offset, here) = (offset + MARKER_LEN, MARKER_LEN);
            continue;
        }
        let take = (covered.len() - offset).min(MARKER_INTERVAL - here);
        plain.extend_from_slice(&covered[offset..offset + take]);
        offset += take;
        here = (here + take) % MARKER_INTERVAL;
    }
    Ok(&plain[LENGTH_LEN..LENGTH_LEN + len])
}

impl Deframer {
    /// Creates a deframer at the start of a stream.
    #[must_use]
    pub fn new(framing: Framing) -> Self {
        Self {
            framing,
            position: 0,
            part: Vec::new(),
            is_taken: false,
            plain: Vec::new(),
        }
    }

    /// Returns the FPDU size based on its first bytes, or `None` if the length field is not
    /// available yet.
    fn fpdu_len(&self, bytes: &[u8]) -> Option<usize> {
        let skip = first_marker(self.framing, self.position);
        let len = bytes.get(skip..skip + LENGTH_LEN)?;
        let plain = body_len(u16::from_be_bytes(at(len, 0)).into()) + CRC_LEN;
        if !self.framing.markers {
            return Some(plain);
        }
        // Markers increase the size of the FPDU, which can require one more marker.
        let (mut markers, mut end) = (0, 0);
        loop {
            let next = self.position + plain + markers * MARKER_LEN;
            if next == end {
                return Some(next - self.position);
            }
            end = next;
            let before = self.position.div_ceil(MARKER_INTERVAL);
            markers = end.div_ceil(MARKER_INTERVAL) - before;
        }
    }

    /// Returns the next ULPDU and consumes the data from `input`, which continues the data from
    /// previous calls. Returns `None` if all data was consumed without a complete FPDU.
    ///
    /// # Errors
    /// Returns [`FramingError`]. The stream cannot be used after this.
    pub fn poll<'a, 'b: 'a>(
        &'a mut self,
        input: &mut &'b [u8],
    ) -> Result<Option<&'a [u8]>, FramingError> {
        if std::mem::take(&mut self.is_taken) {
            self.part.clear();
        }
        let (framing, position) = (self.framing, self.position);
        if self.part.is_empty() {
            // Usually the complete FPDU is available.
            if let Some(len) = self.fpdu_len(input)
                && let Some(fpdu) = input.get(..len)
            {
                *input = &input[len..];
                return unpack(framing, &mut self.position, &mut self.plain, fpdu).map(Some);
            }
        }
        loop {
            let known = self.fpdu_len(&self.part);
            // Up to the length field first, including a marker that may precede it.
            let want = known.unwrap_or(first_marker(framing, position) + LENGTH_LEN);
            let take = (want - self.part.len()).min(input.len());
            self.part.extend_from_slice(&input[..take]);
            *input = &input[take..];
            if self.part.len() < want {
                return Ok(None);
            }
            if known.is_some() {
                break;
            }
        }
        self.is_taken = true;
        unpack(framing, &mut self.position, &mut self.plain, &self.part).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Framing = Framing {
        markers: false,
        crc: true,
    };
    const MARKED: Framing = Framing {
        markers: true,
        crc: true,
    };

    fn framed(framer: &mut Framer, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let start = Framer::begin_fpdu(&mut out);
        out.extend_from_slice(ulpdu);
        framer.end_fpdu(&mut out, start);
        out
    }

    #[test]
    fn fpdu_matches_test_vector() {
        // Test vector from RFC 3720 B.4: the CRC of 32 zero bytes is aa 36 91 8a. This FPDU has 32
        // bytes, starting with the two-byte length.
        assert_eq!(crc_of(&[0; 32]), *b"\xaa\x36\x91\x8a");
        let out = framed(&mut Framer::new(PLAIN), b"abcde");
        assert_eq!(out[..8], *b"\0\x05abcde\0");
        assert_eq!(out[8..], crc_of(b"\0\x05abcde\0"));
        let no_crc = Framing {
            crc: false,
            ..PLAIN
        };
        let out = framed(&mut Framer::new(no_crc), b"ab");
        assert_eq!(out, b"\0\x02ab\0\0\0\0");
    }

    #[test]
    fn markers_are_inserted_every_512_bytes() {
        let mut framer = Framer::new(MARKED);
        let mut stream = framed(&mut framer, &[1; 498]);
        // Marker, 500 bytes, CRC: the next marker is before the next FPDU.
        assert_eq!(stream[..6], *b"\0\0\0\0\x01\xf2");
        assert_eq!(stream.len(), 508);
        stream.extend(framed(&mut framer, &[2; 2]));
        // In this case it is between the padding and the CRC.
        assert_eq!(stream[508..516], *b"\0\x02\x02\x02\0\0\0\x04");
        assert_eq!(stream.len(), 520);
        assert_eq!(stream[516..], crc_of(&stream[508..516]));
        stream.extend(framed(&mut framer, &[3; 1100]));
        for at in [1024, 1536] {
            let back = (at - 520) as u16;
            assert_eq!(stream[at..at + 2], [0, 0]);
            assert_eq!(stream[at + 2..at + 4], back.to_be_bytes());
        }
        let mut deframer = Deframer::new(MARKED);
        let mut input = &stream[..];
        for want in [&[1; 498][..], &[2; 2], &[3; 1100]] {
            assert_eq!(deframer.poll(&mut input), Ok(Some(want)));
        }
        assert_eq!(deframer.poll(&mut input), Ok(None));
    }

    /// Streams of random FPDUs split at any position must be received as they were sent.
    #[test]
    fn split_streams_are_reassembled() {
        let mut random = fastrand::Rng::with_seed(5);
        for round in 0..400 {
            let framing = Framing {
                markers: round % 2 == 0,
                crc: round % 3 > 0,
            };
            let mut framer = Framer::new(framing);
            let mut stream = Vec::new();
            let ulpdus: Vec<Vec<u8>> = (0..random.usize(1..12))
                .map(|_| {
                    let most = [4, 40, 520, 3000, MAX_ULPDU + 1][random.usize(..5)];
                    let len = random.usize(..most);
                    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
                })
                .collect();
            for ulpdu in &ulpdus {
                stream.extend(framed(&mut framer, ulpdu));
            }
            let mut deframer = Deframer::new(framing);
            let (mut rest, mut got) = (&stream[..], Vec::new());
            while !rest.is_empty() {
                let most = [2, 9, 600, 200_000][random.usize(..4)];
                let take = random.usize(1..=most).min(rest.len());
                let mut input = &rest[..take];
                rest = &rest[take..];
                while let Some(ulpdu) = deframer.poll(&mut input).unwrap() {
                    got.push(ulpdu.to_vec());
                }
                assert!(input.is_empty() && deframer.part.len() < MAX_FPDU);
            }
            assert!(got == ulpdus, "round {round}");
            assert!(deframer.is_taken || deframer.part.is_empty());
        }
    }

    #[test]
    fn corrupt_bytes_are_detected() {
        let mut framer = Framer::new(MARKED);
        let stream = framed(&mut framer, &[7; 1500]);
        for at in 0..stream.len() {
            let mut spoilt = stream.clone();
            spoilt[at] ^= 0x10;
            let mut deframer = Deframer::new(MARKED);
            // An invalid length can result in incomplete data but must never return a different
            // ULPDU.
            let polled = deframer.poll(&mut &spoilt[..]);
            assert!(matches!(polled, Err(_) | Ok(None)), "{at}");
        }
        let unchecked = Framing {
            crc: false,
            ..MARKED
        };
        let mut spoilt = stream;
        spoilt[515] ^= 1;
        let polled = Deframer::new(unchecked).poll(&mut &spoilt[..]).map(|_| ());
        assert_eq!(polled, Err(FramingError::Marker));
    }
}
