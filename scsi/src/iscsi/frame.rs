//! Converts a byte stream to PDUs, and PDUs to bytes.
//!
//! ```text
//!   BHS 48 | AHS 0..1020 | header digest 0/4 | data segment | pad 0..3 | data digest 0/4
//! ```
//!
//! A [`Framer`] can process a stream split at any position. If the input contains a complete PDU,
//! it is returned without a copy. Otherwise we need to buffer it, but only allocate memory for the
//! bytes that have been received, never based on a length in the header.

use crc_fast::{CrcAlgorithm, Digest};

use super::BHS_LEN;
use super::raw::RawBhs;

/// Maximum size of all additional header segments, in bytes. This is more than enough for an
/// extended CDB and an expected length.
pub const MAX_AHS: usize = 320;

/// Digests used for a connection (RFC 7143 11.2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Digests {
    /// CRC-32C of BHS and AHS.
    pub header: bool,
    /// CRC-32C of the data segment with padding.
    pub data: bool,
}

/// A framing error. After this, the connection cannot be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// DataSegmentLength is more than our MaxRecvDataSegmentLength.
    #[error("data segment of {len} bytes exceeds the limit of {limit}")]
    DataSegmentLength {
        /// Length in the header, in bytes.
        len: u32,
        /// Our limit, in bytes.
        limit: u32,
    },
    /// TotalAHSLength is more than needed for any PDU.
    #[error("unsupported additional header segments of {0} bytes")]
    TotalAhsLength(usize),
    /// The header digest does not match.
    #[error("invalid header digest")]
    HeaderDigest,
}

/// A received PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// Basic header segment (RFC 7143 11.2.1).
    pub bhs: &'a [u8; BHS_LEN],
    /// Additional header segments (RFC 7143 11.2.2).
    pub ahs: &'a [u8],
    /// Data segment, without padding.
    pub data: &'a [u8],
    /// Set when there is no data digest or it is valid.
    pub is_intact: bool,
}

/// Splits a stream into PDUs.
#[derive(Debug)]
pub struct Framer {
    limit: u32,
    digests: Digests,
    held: Vec<u8>,
    /// Set when the buffered PDU has been returned and must be removed on the next call.
    is_returned: bool,
}

/// Lengths of the parts of a PDU. These have been checked against the limits.
#[derive(Clone, Copy)]
struct Layout {
    ahs: usize,
    data: usize,
    digests: Digests,
}

impl Layout {
    fn of(bhs: &[u8; BHS_LEN], limit: u32, digests: Digests) -> Result<Self, FrameError> {
        // Check both lengths immediately after receiving the basic header. If a peer sends a length
        // of 16 MiB, we should not wait for the data or buffer it.
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
        // There is no data digest if the PDU has no data (RFC 7143 11.2.3).
        let digest = self.digests.data && self.data > 0;
        self.padded_end() + if digest { 4 } else { 0 }
    }

    /// Creates a new frame for a PDU. The size must be exactly [`Self::total`].
    fn frame(self, pdu: &[u8]) -> Result<Frame<'_>, FrameError> {
        let header = &pdu[..self.header_end()];
        // The length used to find this digest may be invalid, so we can't find the next PDU and
        // have to close the connection (RFC 7143 7.8).
        if self.digests.header && digest(&[header]) != pdu[self.header_end()..][..4] {
            return Err(FrameError::HeaderDigest);
        }
        let padded = &pdu[self.data_start()..self.padded_end()];
        // If the data digest is invalid, this is not a framing error. The length is still valid, so
        // the PDU can be rejected and we can continue with the next one.
        let is_intact =
            self.total() == self.padded_end() || digest(&[padded]) == pdu[self.padded_end()..][..4];
        Ok(Frame {
            bhs: header.first_chunk().expect("basic header segment"),
            ahs: &header[BHS_LEN..],
            data: &padded[..self.data],
            is_intact,
        })
    }
}

impl Framer {
    /// Creates a new framer for data segments up to `limit` bytes, without digests.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            digests: Digests::default(),
            held: Vec::new(),
            is_returned: false,
        }
    }

    /// Updates the limit and digests after the login. This does not change PDUs that have already
    /// been returned.
    pub fn set(&mut self, limit: u32, digests: Digests) {
        self.limit = limit;
        self.digests = digests;
    }

    /// Returns the number of bytes buffered for an incomplete PDU.
    #[must_use]
    pub fn buffered_len(&self) -> usize {
        if self.is_returned { 0 } else { self.held.len() }
    }

    /// Parses the next PDU in `input`. Returns the number of bytes used, and the PDU if it is
    /// complete. If it's not complete, all bytes have been used.
    ///
    /// # Errors
    /// [`FrameError`]: we cannot find the next PDU.
    pub fn next<'a>(
        &'a mut self,
        input: &'a [u8],
    ) -> Result<(usize, Option<Frame<'a>>), FrameError> {
        // These bytes were in use until this call.
        if std::mem::take(&mut self.is_returned) {
            self.held.clear();
        }
        // In most cases, the input contains a complete PDU, so we don't need to copy it.
        if self.held.is_empty()
            && let Some(bhs) = input.first_chunk()
        {
            let layout = Layout::of(bhs, self.limit, self.digests)?;
            if let Some(pdu) = input.get(..layout.total()) {
                return Ok((pdu.len(), Some(layout.frame(pdu)?)));
            }
        }
        // Buffer the header to get the length, then buffer exactly the rest of this PDU. Anything
        // after that is part of the next PDU.
        let mut rest = input;
        if !self.fill(&mut rest, BHS_LEN) {
            return Ok((input.len(), None));
        }
        let bhs = self.held.first_chunk().expect("basic header segment");
        let layout = Layout::of(bhs, self.limit, self.digests)?;
        if !self.fill(&mut rest, layout.total()) {
            return Ok((input.len(), None));
        }
        self.is_returned = true;
        Ok((input.len() - rest.len(), Some(layout.frame(&self.held)?)))
    }

    /// Copies from `input` until we have buffered `len` bytes. Returns whether this was successful.
    fn fill(&mut self, input: &mut &[u8], len: usize) -> bool {
        let want = len.saturating_sub(self.held.len()).min(input.len());
        let (taken, rest) = input.split_at(want);
        self.held.extend_from_slice(taken);
        *input = rest;
        self.held.len() >= len
    }
}

/// Returns the CRC-32C of multiple pieces in wire format, least significant byte first (RFC 7143
/// 13.1).
#[must_use]
pub fn digest(pieces: &[&[u8]]) -> [u8; 4] {
    let mut crc = DataDigest::new();
    for piece in pieces {
        crc.update(piece);
    }
    crc.finish()
}

/// Used to compute a digest for data that is split into pieces.
#[derive(Debug)]
pub struct DataDigest(Digest);

impl DataDigest {
    /// Creates a new digest without any data.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next piece of data.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// Returns the digest in wire format.
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

/// Returns the number of padding bytes for a data segment of `len` bytes.
#[must_use]
pub fn padding(len: usize) -> usize {
    len.next_multiple_of(4) - len
}

/// Writes a header and its digest. The lengths in the header are set here.
///
/// # Panics
/// If the size of the additional headers is not a multiple of 4 or too large, or if there is too
/// much data.
pub fn put_header(
    mut bhs: [u8; BHS_LEN],
    ahs: &[u8],
    data_len: u32,
    digests: Digests,
    out: &mut Vec<u8>,
) {
    assert!(ahs.len().is_multiple_of(4) && ahs.len() <= 255 * 4);
    let [high, len @ ..] = data_len.to_be_bytes();
    assert_eq!(high, 0, "data segment is smaller than 16 MiB");
    // This must not be set anywhere else, so that the header always matches the data that we write.
    bhs[4] = (ahs.len() / 4) as u8;
    bhs[5..8].copy_from_slice(&len);
    out.extend_from_slice(&bhs);
    out.extend_from_slice(ahs);
    if digests.header {
        out.extend(digest(&[&bhs, ahs]));
    }
}

/// Writes an entire PDU.
///
/// # Panics
/// Same as for [`put_header`].
pub fn put_pdu(bhs: [u8; BHS_LEN], ahs: &[u8], data: &[u8], digests: Digests, out: &mut Vec<u8>) {
    let len = u32::try_from(data.len()).expect("data segment is smaller than 16 MiB");
    put_header(bhs, ahs, len, digests, out);
    let pad = &[0; 3][..padding(data.len())];
    out.extend_from_slice(data);
    out.extend_from_slice(pad);
    if digests.data && !data.is_empty() {
        out.extend(digest(&[data, pad]));
    }
}
