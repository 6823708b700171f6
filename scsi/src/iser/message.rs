//! A complete message: an iSER header, followed by a PDU.

use super::header::{Buffers, Header, Hello, HelloReply};
use super::{HEADER_LEN, IserError};
use crate::iscsi::BHS_LEN;
use crate::iscsi::frame::{self, Digests, Frame, MAX_AHS};

/// The opcode bits in the first byte of a PDU, and the opcode of a SCSI command.
const OPCODE: u8 = 0x3f;
const SCSI_COMMAND: u8 = 0x01;

/// A received message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// A control-type PDU with its buffers.
    Control {
        /// Buffers from the header.
        buffers: Buffers,
        /// The PDU. There is no digest, because RDMA already checks the data.
        frame: Frame<'a>,
    },
    /// Hello message from the initiator.
    Hello(Hello),
    /// HelloReply message from the target.
    HelloReply(HelloReply),
}

impl<'a> Message<'a> {
    /// Parses a received message.
    ///
    /// # Errors
    /// [`IserError`]: the connection cannot be used any more.
    pub fn parse(message: &'a [u8]) -> Result<Self, IserError> {
        let (header, rest) = Header::parse(message)?;
        match header {
            Header::Control(buffers) => Ok(Self::Control {
                buffers,
                frame: pdu(buffers, rest)?,
            }),
            Header::Hello(hello) => Ok(Self::Hello(hello)),
            Header::HelloReply(reply) => Ok(Self::HelloReply(reply)),
        }
    }
}

/// Parses the PDU after the header.
///
/// If immediate data was negotiated, libiscsi sets a data length for it, but all of the data is
/// still in the remote buffer. For a SCSI command with such a buffer, we therefore allow that the
/// entire data segment is missing.
fn pdu(buffers: Buffers, bytes: &[u8]) -> Result<Frame<'_>, IserError> {
    // Use the offset from the start of the message in errors, including the iSER header.
    let have = bytes.len() + HEADER_LEN;
    let truncated = |field, need| IserError::Truncated {
        field,
        need: need + HEADER_LEN,
        have,
    };
    let (bhs, rest) = bytes
        .split_first_chunk::<BHS_LEN>()
        .ok_or(truncated("the basic header segment", BHS_LEN))?;
    // There are no header digests and no data padding here, but the header still contains lengths.
    let ahs_len = usize::from(bhs[4]) * 4;
    if ahs_len > MAX_AHS {
        return Err(IserError::TotalAhsLength(ahs_len));
    }
    let data_len = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]) as usize;
    let (ahs, rest) = rest.split_at_checked(ahs_len).ok_or(truncated(
        "the additional header segments",
        BHS_LEN + ahs_len,
    ))?;
    let is_command = bhs[0] & OPCODE == SCSI_COMMAND;
    // Either all or nothing: if only some of the data is missing, the message was truncated.
    let is_tagged = is_command && buffers.write.is_some() && rest.is_empty();
    let data_len = if is_tagged { 0 } else { data_len };
    let (data, pad) = rest
        .split_at_checked(data_len)
        .ok_or(truncated("the data segment", BHS_LEN + ahs_len + data_len))?;
    // Padding is optional. If there are more bytes than this, they don't belong to any field, so
    // one of the lengths must be wrong.
    if pad.len() > frame::padding(data_len) {
        return Err(IserError::Trailing(pad.len()));
    }
    Ok(Frame {
        bhs,
        ahs,
        data,
        is_intact: true,
    })
}

/// Appends a control-type PDU as a message. The lengths in `bhs` are set here.
///
/// # Panics
/// Same as for [`frame::put_pdu`].
pub fn put_control(
    buffers: Buffers,
    bhs: [u8; BHS_LEN],
    ahs: &[u8],
    data: &[u8],
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(&Header::Control(buffers).bytes());
    frame::put_pdu(bhs, ahs, data, Digests::default(), out);
}
