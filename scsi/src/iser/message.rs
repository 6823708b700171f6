//! A whole message: an iSER header, and the PDU that follows it.

use super::header::{Buffers, Header, Hello, HelloReply};
use super::{HEADER_LEN, IserError};
use crate::iscsi::BHS_LEN;
use crate::iscsi::frame::{self, Digests, Frame, MAX_AHS};

/// The bits of a PDU's first byte that are its opcode, and the opcode of a SCSI command.
const OPCODE: u8 = 0x3f;
const SCSI_COMMAND: u8 = 0x01;

/// A message as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// A control-type PDU, and the buffers that go with it.
    Control {
        /// Buffers of the initiator that the header advertises.
        buffers: Buffers,
        /// The PDU. It has no digests: it is as whole as RDMA delivers it.
        frame: Frame<'a>,
    },
    /// The initiator introduces itself.
    Hello(Hello),
    /// The target's answer to that.
    HelloReply(HelloReply),
}

impl<'a> Message<'a> {
    /// Reads the message that was received.
    ///
    /// # Errors
    /// [`IserError`]: the connection cannot be used any longer.
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

/// Reads the PDU that fills the rest of a message.
///
/// libiscsi announces immediate data where they were agreed on, but leaves all data in the buffer
/// that it advertises. So a SCSI command with such a buffer may end where its announced data would
/// begin: it has none then.
fn pdu(buffers: Buffers, bytes: &[u8]) -> Result<Frame<'_>, IserError> {
    // Errors count from the start of the message, the iSER header included.
    let have = bytes.len() + HEADER_LEN;
    let truncated = |field, need| IserError::Truncated {
        field,
        need: need + HEADER_LEN,
        have,
    };
    let (bhs, rest) = bytes
        .split_first_chunk::<BHS_LEN>()
        .ok_or(truncated("the basic header segment", BHS_LEN))?;
    // Headers have no digests and no padding of data here, but declare lengths all the same.
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
    // All or nothing: a part of the announced data is a message that was cut.
    let is_tagged = is_command && buffers.write.is_some() && rest.is_empty();
    let data_len = if is_tagged { 0 } else { data_len };
    let (data, pad) = rest
        .split_at_checked(data_len)
        .ok_or(truncated("the data segment", BHS_LEN + ahs_len + data_len))?;
    // Padding may be missing. What is more than it belongs to no field, so one of the lengths is
    // wrong.
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
/// As [`frame::put`].
pub fn put_control(
    buffers: Buffers,
    bhs: [u8; BHS_LEN],
    ahs: &[u8],
    data: &[u8],
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(&Header::Control(buffers).bytes());
    frame::put(bhs, ahs, data, Digests::default(), out);
}
