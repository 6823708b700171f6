//! A stream of bytes into PDUs, and PDUs into bytes.
//!
//! ```text
//!   BHS 48 | AHS 0..1020 | header digest 0/4 | data segment | pad 0..3 | data digest 0/4
//! ```
//!
//! A [`Framer`] takes bytes that arrive split anyhow. A PDU that lies whole in the bytes given is
//! looked at in place; one that does not is collected, and the memory for that grows with the bytes
//! that came, never with the length that was declared.

use crc_fast::{CrcAlgorithm, Digest};

use super::BHS_LEN;
use super::raw::RawBhs;

/// Longest sequence of additional header segments that is taken, in bytes: an extended CDB and an
/// expected length with room to spare.
pub const MAX_AHS: usize = 320;

/// Digests that a connection uses (RFC 7143 11.2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Digests {
    /// CRC-32C over BHS and AHS.
    pub header: bool,
    /// CRC-32C over the data segment and its padding.
    pub data: bool,
}

/// An error of framing, after which the connection cannot be used any longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// DataSegmentLength is beyond our MaxRecvDataSegmentLength.
    #[error("a data segment of {len} bytes where {limit} are allowed")]
    DataSegmentLength {
        /// Length in bytes, as declared.
        len: u32,
        /// Our limit in bytes.
        limit: u32,
    },
    /// TotalAHSLength beyond what any PDU needs.
    #[error("additional headers of {0} bytes")]
    TotalAhsLength(usize),
    /// The header digest does not match.
    #[error("the header digest is wrong")]
    HeaderDigest,
}

/// One PDU as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// Basic header segment (RFC 7143 11.2.1).
    pub bhs: &'a [u8; BHS_LEN],
    /// Additional header segments (RFC 7143 11.2.2).
    pub ahs: &'a [u8],
    /// Data segment, without padding.
    pub data: &'a [u8],
    /// Whether the data digest matched, where there is one.
    pub is_intact: bool,
}

/// Cuts a stream into PDUs.
#[derive(Debug)]
pub struct Framer {
    limit: u32,
    digests: Digests,
    held: Vec<u8>,
    /// The frame was given out, and goes with the next call.
    given: bool,
}

/// Lengths of a PDU's parts, checked against the limits.
#[derive(Clone, Copy)]
struct Layout {
    ahs: usize,
    data: usize,
    digests: Digests,
}

impl Layout {
    fn of(bhs: &[u8; BHS_LEN], limit: u32, digests: Digests) -> Result<Self, FrameError> {
        // Both lengths are judged as soon as the basic header is here. A peer that declares 16 MiB
        // must not have us wait for them, or keep them.
        let raw = RawBhs::of(bhs);
        let ahs = usize::from(raw.total_ahs_length) * 4;
        if ahs > MAX_AHS {
            return Err(FrameError::TotalAhsLength(ahs));
        }
        let [a, b, c] = raw.data_segment_length;
        let len = u32::from_be_bytes([0, a, b, c]);
        if len > limit {
            return Err(FrameError::DataSegmentLength { len, limit });
        }
        Ok(Self {
            ahs,
            data: len as usize,
            digests,
        })
    }

    fn header_end(self) -> usize {
        BHS_LEN + self.ahs
    }

    fn data_start(self) -> usize {
        self.header_end() + if self.digests.header { 4 } else { 0 }
    }

    fn padded_end(self) -> usize {
        self.data_start() + self.data.next_multiple_of(4)
    }

    fn total(self) -> usize {
        // A PDU without data has no data digest (RFC 7143 11.2.3).
        let digest = self.digests.data && self.data > 0;
        self.padded_end() + if digest { 4 } else { 0 }
    }

    /// Lays the layout over a PDU's bytes, of which there are exactly [`Self::total`].
    fn frame(self, pdu: &[u8]) -> Result<Frame<'_>, FrameError> {
        let header = &pdu[..self.header_end()];
        // The lengths by which the digest was found may themselves be wrong then, so the next PDU
        // cannot be found: the connection is closed (RFC 7143 7.8).
        if self.digests.header && digest(&[header]) != pdu[self.header_end()..][..4] {
            return Err(FrameError::HeaderDigest);
        }
        let padded = &pdu[self.data_start()..self.padded_end()];
        // Wrong data are no error of framing: the lengths hold, so the PDU can be rejected, and
        // the next one found.
        let is_intact =
            self.total() == self.padded_end() || digest(&[padded]) == pdu[self.padded_end()..][..4];
        Ok(Frame {
            bhs: header.first_chunk().expect("a header is 48 bytes"),
            ahs: &header[BHS_LEN..],
            data: &padded[..self.data],
            is_intact,
        })
    }
}

impl Framer {
    /// A framer that takes data segments of up to `limit` bytes, without digests.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            digests: Digests::default(),
            held: Vec::new(),
            given: false,
        }
    }

    /// Changes limit and digests, as a login ends. PDUs already given out are not concerned.
    pub fn set(&mut self, limit: u32, digests: Digests) {
        self.limit = limit;
        self.digests = digests;
    }

    /// Bytes kept for a PDU that is not yet whole.
    #[must_use]
    pub fn held(&self) -> usize {
        if self.given { 0 } else { self.held.len() }
    }

    /// The next PDU at the front of `input`, and how many bytes of it were used; no PDU when all of
    /// it was used and the PDU is not whole yet.
    ///
    /// # Errors
    /// [`FrameError`]: there is no way to find the next PDU.
    pub fn next<'a>(
        &'a mut self,
        input: &'a [u8],
    ) -> Result<(usize, Option<Frame<'a>>), FrameError> {
        // The frame borrowed these bytes until this call.
        if std::mem::take(&mut self.given) {
            self.held.clear();
        }
        // The usual case: the PDU is whole in what was received, and nothing is copied.
        if self.held.is_empty()
            && let Some(bhs) = input.first_chunk()
        {
            let layout = Layout::of(bhs, self.limit, self.digests)?;
            if let Some(pdu) = input.get(..layout.total()) {
                return Ok((pdu.len(), Some(layout.frame(pdu)?)));
            }
        }
        // First the header, which says how long the rest is, then exactly the rest: what follows
        // belongs to the next PDU.
        let mut rest = input;
        if !self.fill(&mut rest, BHS_LEN) {
            return Ok((input.len(), None));
        }
        let bhs = self.held.first_chunk().expect("filled so far");
        let layout = Layout::of(bhs, self.limit, self.digests)?;
        if !self.fill(&mut rest, layout.total()) {
            return Ok((input.len(), None));
        }
        self.given = true;
        Ok((input.len() - rest.len(), Some(layout.frame(&self.held)?)))
    }

    /// Takes from `input` until `len` bytes are held; whether they are.
    fn fill(&mut self, input: &mut &[u8], len: usize) -> bool {
        let want = len.saturating_sub(self.held.len()).min(input.len());
        let (taken, rest) = input.split_at(want);
        self.held.extend_from_slice(taken);
        *input = rest;
        self.held.len() >= len
    }
}

/// CRC-32C over several pieces, as it is sent: least significant byte first (RFC 7143 13.1).
#[must_use]
pub fn digest(pieces: &[&[u8]]) -> [u8; 4] {
    let mut crc = DataDigest::new();
    for piece in pieces {
        crc.update(piece);
    }
    crc.finish()
}

/// A digest over data that lies in pieces.
#[derive(Debug)]
pub struct DataDigest(Digest);

impl DataDigest {
    /// Digest of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The digest as it is sent.
    #[must_use]
    pub fn finish(self) -> [u8; 4] {
        (self.0.finalize() as u32).to_le_bytes()
    }
}

impl Default for DataDigest {
    fn default() -> Self {
        Self::new()
    }
}

/// Bytes of padding after a data segment of `len` bytes.
#[must_use]
pub fn padding(len: usize) -> usize {
    len.next_multiple_of(4) - len
}

/// Writes a header, whose lengths are set here, and its digest.
///
/// # Panics
/// If the additional headers are no whole words or too long, or the data too long for its field.
pub fn put_header(
    mut bhs: [u8; BHS_LEN],
    ahs: &[u8],
    data_len: u32,
    digests: Digests,
    out: &mut Vec<u8>,
) {
    assert!(ahs.len().is_multiple_of(4) && ahs.len() <= 255 * 4);
    let [high, len @ ..] = data_len.to_be_bytes();
    assert_eq!(high, 0, "a data segment is shorter than 16 MiB");
    // Set here and nowhere else, so that a header cannot disagree with what is written behind it.
    bhs[4] = (ahs.len() / 4) as u8;
    bhs[5..8].copy_from_slice(&len);
    out.extend_from_slice(&bhs);
    out.extend_from_slice(ahs);
    if digests.header {
        out.extend(digest(&[&bhs, ahs]));
    }
}

/// Writes a whole PDU.
///
/// # Panics
/// As [`put_header`].
pub fn put(bhs: [u8; BHS_LEN], ahs: &[u8], data: &[u8], digests: Digests, out: &mut Vec<u8>) {
    let len = u32::try_from(data.len()).expect("a data segment is shorter than 16 MiB");
    put_header(bhs, ahs, len, digests, out);
    let pad = &[0; 3][..padding(data.len())];
    out.extend_from_slice(data);
    out.extend_from_slice(pad);
    if digests.data && !data.is_empty() {
        out.extend(digest(&[data, pad]));
    }
}
