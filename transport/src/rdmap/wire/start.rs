//! MPA request and reply frames.
//!
//! ```text
//!  0                   1                   2                   3
//! +---------------------------------------------------------------+
//! | Key: "MPA ID Req Frame" or "MPA ID Rep Frame" (16 bytes)      |
//! +-+-+-+-+-------+---------------+-------------------------------+
//! |M|C|R|S|  Res  |     Rev       |          PD_Length            |
//! +-+-+-+-+-------+---------------+-------------------------------+
//! |A|B|           IRD             |C|D|          ORD              |  revision 2, with S
//! +-+-+---------------------------+-+-+---------------------------+
//! | private data                                                  |
//! ```

use thiserror::Error;

use super::at;

/// Size of a frame without private data, in bytes.
pub const START_LEN: usize = 20;

/// Maximum size of private data in bytes. In revision 2, this includes the resources (RFC 5044
/// 7.1.2, RFC 6581 9).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Size of the resources in a revision 2 frame, in bytes.
pub const ENHANCED_LEN: usize = 4;

/// Resource value that leaves the choice to the ULP (RFC 6581 9.1).
pub const ANY_DEPTH: u16 = 0x3fff;

const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";

const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED: u8 = 0x10;

/// Upper flag in a resource value: A for the IRD, C for the ORD.
const UPPER: u16 = 0x8000;
/// Lower flag in a resource value: B for the IRD, D for the ORD.
const LOWER: u16 = 0x4000;

/// Frame type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartKind {
    /// Request sent by the initiator.
    Request,
    /// Reply sent by the responder.
    Reply,
}

/// Resources and options in a revision 2 frame (RFC 6581 9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enhanced {
    /// Maximum number of incoming RDMA READs supported by the sender of this frame, 14 bits.
    pub ird: u16,
    /// Maximum number of outgoing RDMA READs requested by the sender of this frame, 14 bits.
    pub ord: u16,
    /// Flag A: the responder can send first, after it has received a message from the initiator
    /// that is not a ULP message (ready to receive, RTR).
    pub peer_to_peer: bool,
    /// Flag B: this message can be an empty FPDU.
    pub send_rtr: bool,
    /// Flag C: this message can be a zero-length RDMA WRITE.
    pub write_rtr: bool,
    /// Flag D: this message can be a zero-length RDMA READ.
    pub read_rtr: bool,
}

/// Request or reply frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartFrame {
    /// Frame type.
    pub kind: StartKind,
    /// Set if the sender requests to receive markers.
    pub markers: bool,
    /// Set if the sender requests CRCs for both directions.
    pub crc: bool,
    /// Set if the connection is rejected.
    pub rejected: bool,
    /// MPA revision.
    pub revision: u8,
    /// Resources, used in revision 2.
    pub enhanced: Option<Enhanced>,
    /// ULP private data.
    pub private_data: Vec<u8>,
}

/// Error returned for an invalid request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StartError {
    /// The key does not match the expected frame.
    #[error("not an MPA frame")]
    Key,
    /// The private data exceeds the maximum size.
    #[error("private data too long: {len} bytes, maximum is 512")]
    PrivateData {
        /// Size specified in the frame, in bytes.
        len: usize,
    },
    /// The frame should contain resources, but the private data is too short.
    #[error("private data too short for revision 2 resources")]
    NoResources,
}

impl StartKind {
    const fn key(self) -> &'static [u8; 16] {
        match self {
            Self::Request => REQUEST_KEY,
            Self::Reply => REPLY_KEY,
        }
    }
}

impl Enhanced {
    fn parse(bytes: [u8; ENHANCED_LEN]) -> Self {
        let ird = u16::from_be_bytes(at(&bytes, 0));
        let ord = u16::from_be_bytes(at(&bytes, 2));
        Self {
            ird: ird & ANY_DEPTH,
            ord: ord & ANY_DEPTH,
            peer_to_peer: ird & UPPER != 0,
            send_rtr: ird & LOWER != 0,
            write_rtr: ord & UPPER != 0,
            read_rtr: ord & LOWER != 0,
        }
    }

    fn emit(self) -> [u8; ENHANCED_LEN] {
        let flags = |upper: bool, lower: bool| {
            (if upper { UPPER } else { 0 }) | (if lower { LOWER } else { 0 })
        };
        let ird = self.ird.min(ANY_DEPTH) | flags(self.peer_to_peer, self.send_rtr);
        let ord = self.ord.min(ANY_DEPTH) | flags(self.write_rtr, self.read_rtr);
        let ([a, b], [c, d]) = (ird.to_be_bytes(), ord.to_be_bytes());
        [a, b, c, d]
    }
}

impl StartFrame {
    /// Returns the maximum size of the ULP private data in a frame with or without resources.
    #[must_use]
    pub const fn room(is_enhanced: bool) -> usize {
        match is_enhanced {
            true => MAX_PRIVATE_DATA - ENHANCED_LEN,
            false => MAX_PRIVATE_DATA,
        }
    }

    /// Parses the frame at the start of a stream and returns its size. Returns `None` if more data
    /// is required, or an error as soon as the first invalid byte is received.
    ///
    /// # Errors
    /// Returns [`StartError`] if the frame is invalid.
    pub fn parse(kind: StartKind, bytes: &[u8]) -> Result<Option<(Self, usize)>, StartError> {
        let key = kind.key();
        let known = bytes.len().min(key.len());
        if bytes[..known] != key[..known] {
            return Err(StartError::Key);
        }
        if bytes.len() < START_LEN {
            return Ok(None);
        }
        let (flags, revision) = (bytes[16], bytes[17]);
        let len = usize::from(u16::from_be_bytes(at(bytes, 18)));
        if len > MAX_PRIVATE_DATA {
            return Err(StartError::PrivateData { len });
        }
        let is_enhanced = revision >= 2 && flags & ENHANCED != 0;
        if is_enhanced && len < ENHANCED_LEN {
            return Err(StartError::NoResources);
        }
        let Some(data) = bytes.get(START_LEN..START_LEN + len) else {
            return Ok(None);
        };
        let (enhanced, data) = match is_enhanced {
            true => (Some(Enhanced::parse(at(data, 0))), &data[ENHANCED_LEN..]),
            false => (None, data),
        };
        let frame = Self {
            kind,
            markers: flags & MARKERS != 0,
            crc: flags & CRC != 0,
            // This flag is only valid in a reply.
            rejected: kind == StartKind::Reply && flags & REJECT != 0,
            revision,
            enhanced,
            private_data: data.to_vec(),
        };
        Ok(Some((frame, START_LEN + len)))
    }

    /// Appends the frame to `out`. The caller must check the size of the private data.
    ///
    /// # Panics
    /// Panics if the private data exceeds [`StartFrame::room`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        let room = Self::room(self.enhanced.is_some());
        assert!(self.private_data.len() <= room, "private data that fit");
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let extra = self.enhanced.map_or(0, |_| ENHANCED_LEN);
        #[expect(clippy::cast_possible_truncation, reason = "512 at most")]
        let len = (self.private_data.len() + extra) as u16;
        out.extend_from_slice(self.kind.key());
        out.push(
            flag(self.markers, MARKERS)
                | flag(self.crc, CRC)
                | flag(self.rejected, REJECT)
                | flag(self.enhanced.is_some(), ENHANCED),
        );
        out.push(self.revision);
        out.extend_from_slice(&len.to_be_bytes());
        if let Some(enhanced) = self.enhanced {
            out.extend_from_slice(&enhanced.emit());
        }
        out.extend_from_slice(&self.private_data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Request from a `siw` initiator (Linux 6.12) with 128 READs in both directions and no private
    /// data.
    const SIW_REQUEST: &[u8] = b"MPA ID Req Frame\x10\x02\0\x04\0\x80\0\x80";

    #[test]
    fn linux_request_is_parsed() {
        let (frame, len) = StartFrame::parse(StartKind::Request, SIW_REQUEST)
            .unwrap()
            .unwrap();
        assert_eq!(len, 24);
        let enhanced = Enhanced {
            ird: 128,
            ord: 128,
            ..Enhanced::default()
        };
        let want = StartFrame {
            kind: StartKind::Request,
            markers: false,
            crc: false,
            rejected: false,
            revision: 2,
            enhanced: Some(enhanced),
            private_data: Vec::new(),
        };
        assert_eq!(frame, want);
        let mut out = Vec::new();
        frame.emit(&mut out);
        assert_eq!(out, SIW_REQUEST);
    }

    #[test]
    fn flags_match_frame_layout() {
        let bytes = b"MPA ID Rep Frame\xf0\x02\0\x07\xc0\x05\xc0\x06abc";
        let frame = StartFrame::parse(StartKind::Reply, bytes).unwrap().unwrap();
        let enhanced = Enhanced {
            ird: 5,
            ord: 6,
            peer_to_peer: true,
            send_rtr: true,
            write_rtr: true,
            read_rtr: true,
        };
        assert_eq!(frame.0.enhanced, Some(enhanced));
        assert!(frame.0.markers && frame.0.crc && frame.0.rejected);
        assert_eq!((&frame.0.private_data[..], frame.1), (&b"abc"[..], 27));
        let mut out = Vec::new();
        frame.0.emit(&mut out);
        assert_eq!(out, bytes);
        // Revision 1 supports neither resources nor the flag for them.
        let bytes = b"MPA ID Rep Frame\x50\x01\0\x04\xc0\x05\xc0\x06";
        let (frame, _) = StartFrame::parse(StartKind::Reply, bytes).unwrap().unwrap();
        assert_eq!((frame.enhanced, frame.private_data.len()), (None, 4));
    }

    #[test]
    fn incomplete_frame_waits_but_invalid_fails() {
        for len in 0..SIW_REQUEST.len() {
            let parsed = StartFrame::parse(StartKind::Request, &SIW_REQUEST[..len]);
            assert_eq!(parsed, Ok(None), "{len}");
        }
        for kind in [StartKind::Request, StartKind::Reply] {
            let wrong = StartFrame::parse(kind, b"GET / HTTP/1.1");
            assert_eq!(wrong, Err(StartError::Key));
        }
        let reply = StartFrame::parse(StartKind::Reply, SIW_REQUEST);
        assert_eq!(reply, Err(StartError::Key));
        let long = StartFrame::parse(StartKind::Request, b"MPA ID Req Frame\0\x01\x02\x01");
        assert_eq!(long, Err(StartError::PrivateData { len: 513 }));
        let short = StartFrame::parse(StartKind::Request, b"MPA ID Req Frame\x10\x02\0\x03abc");
        assert_eq!(short, Err(StartError::NoResources));
    }
}
