//! PDUs sent by targets. The sequence numbers ([`Numbers`]) are only passed when the header is
//! created, because we need to use the current values when it is sent.

use num_enum::{IntoPrimitive, TryFromPrimitive};

use super::super::frame::Frame;
use super::super::raw::{RawAsyncMessage, RawScsiResponse, RawTargetCommon};
use super::super::{BHS_LEN, CmdSn, Itt, NO_TAG, Numbers, StatSn, Ttt};
use super::{
    CONTINUE, FINAL, LoginResponse, LogoutResponse, Opcode, PduError, TmfResponse, coded,
    with_numbers,
};
use crate::lun::WireLun;
use crate::step::Residual;

const OVERFLOW: u8 = 0x04;
const UNDERFLOW: u8 = 0x02;
const BIDI_OVERFLOW: u8 = 0x10;
const BIDI_UNDERFLOW: u8 = 0x08;

fn residual_flags(residual: Residual, over: u8, under: u8) -> (u8, u32) {
    match residual {
        Residual::None => (0, 0),
        Residual::Underflow(n) => (under, n),
        Residual::Overflow(n) => (over, n),
    }
}

fn residual_of(flags: u8, over: u8, under: u8, n: u32) -> Result<Residual, PduError> {
    match (flags & over != 0, flags & under != 0) {
        (false, false) => Ok(Residual::None),
        (true, false) => Ok(Residual::Overflow(n)),
        (false, true) => Ok(Residual::Underflow(n)),
        (true, true) => Err(PduError::Field {
            field: "residual flags",
            value: u32::from(flags),
        }),
    }
}

fn numbers_of(raw: &RawTargetCommon) -> Numbers {
    Numbers {
        stat_sn: StatSn(raw.stat_sn.get()),
        exp_cmd_sn: CmdSn(raw.exp_cmd_sn.get()),
        max_cmd_sn: CmdSn(raw.max_cmd_sn.get()),
    }
}

/// A SCSI response. The data segment is created with [`ScsiResponse::sense_segment`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiResponse {
    /// Initiator Task Tag used for the command.
    pub itt: Itt,
    /// Response code, which is zero if the command was completed by the target.
    pub response: u8,
    /// SCSI status of the command (RFC 7143 11.4.2).
    pub status: u8,
    /// Residual of the write, or of the read for a command without a write.
    pub residual: Residual,
    /// Residual of the read for a bidirectional command.
    pub bidi_residual: Residual,
    /// Number of Data-In and R2T PDUs sent for this command.
    pub exp_data_sn: u32,
    /// Tag from the R-Data SNACK, or zero if there wasn't any.
    pub snack_tag: u32,
}

impl ScsiResponse {
    /// Returns the data segment, which is the sense data with a length field (RFC 7143 11.4.7).
    #[must_use]
    pub fn sense_segment(sense: &[u8]) -> Vec<u8> {
        // Don't send an empty segment, just omit it.
        if sense.is_empty() {
            return Vec::new();
        }
        let mut out = Vec::with_capacity(2 + sense.len());
        out.extend((sense.len() as u16).to_be_bytes());
        out.extend(sense);
        out
    }

    /// Returns the sense data in a data segment. This is never more than we have received.
    ///
    /// # Errors
    /// If the length field is larger than the segment.
    pub fn sense_of(data: &[u8]) -> Result<&[u8], PduError> {
        // If there is no length field, there is no sense data. A response with GOOD status doesn't
        // have a data segment.
        let Some((len, rest)) = data.split_first_chunk() else {
            return Ok(&[]);
        };
        let need = usize::from(u16::from_be_bytes(*len));
        rest.get(..need).ok_or(PduError::Data {
            field: "sense data",
            need,
            have: rest.len(),
        })
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        let (flags, residual) = residual_flags(self.residual, OVERFLOW, UNDERFLOW);
        let (bidi, bidi_residual) =
            residual_flags(self.bidi_residual, BIDI_OVERFLOW, BIDI_UNDERFLOW);
        RawScsiResponse {
            opcode: Opcode::ScsiResponse.into(),
            flags: FINAL | flags | bidi,
            byte2: self.response,
            byte3: self.status,
            itt: self.itt.0.into(),
            stat_sn: numbers.stat_sn.0.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.0.into(),
            max_cmd_sn: numbers.max_cmd_sn.0.into(),
            exp_data_sn: self.exp_data_sn.into(),
            snack_tag: self.snack_tag.into(),
            bidi_residual: bidi_residual.into(),
            residual: residual.into(),
            ..RawScsiResponse::default()
        }
        .bytes()
    }

    fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawScsiResponse::of(frame.bhs);
        Ok(Self {
            itt: Itt(raw.itt.get()),
            response: raw.byte2,
            status: raw.byte3,
            residual: residual_of(raw.flags, OVERFLOW, UNDERFLOW, raw.residual.get())?,
            bidi_residual: residual_of(
                raw.flags,
                BIDI_OVERFLOW,
                BIDI_UNDERFLOW,
                raw.bidi_residual.get(),
            )?,
            exp_data_sn: raw.exp_data_sn.get(),
            snack_tag: raw.snack_tag.get(),
        })
    }
}

/// Status sent in the last Data-In PDU (S bit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataInStatus {
    /// SCSI status, without any sense data.
    pub status: u8,
    /// Residual of the read.
    pub residual: Residual,
}

/// Data that was read, sent to the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataIn {
    /// F bit: this is the last PDU in a sequence.
    pub is_final: bool,
    /// A bit: request an acknowledgment.
    pub acknowledge: bool,
    /// S bit: this PDU also contains the status.
    pub status: Option<DataInStatus>,
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag used for the command.
    pub itt: Itt,
    /// Target Transfer Tag for the acknowledgment.
    pub ttt: Ttt,
    /// Sequence number for this command.
    pub data_sn: u32,
    /// Offset in the data of the command, in bytes.
    pub offset: u32,
}

impl DataIn {
    /// Returns the basic header segment. StatSN is only set if there is a status.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        let (flags, status, residual) = match self.status {
            None => (0, 0, 0),
            Some(with) => {
                let (flags, n) = residual_flags(with.residual, OVERFLOW, UNDERFLOW);
                (flags | 0x01, with.status, n)
            }
        };
        // Only a status uses a sequence number. For any other Data-In PDU, this field is reserved
        // (RFC 7143 11.7.3).
        let stat_sn = match self.status {
            None => 0,
            Some(_) => numbers.stat_sn.0,
        };
        RawTargetCommon {
            flags: flags
                | if self.is_final { FINAL } else { 0 }
                | if self.acknowledge { 0x40 } else { 0 },
            byte3: status,
            lun: self.lun,
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            stat_sn: stat_sn.into(),
            word36: self.data_sn.into(),
            word40: self.offset.into(),
            word44: residual.into(),
            ..with_numbers(Opcode::DataIn, numbers)
        }
        .bytes()
    }

    fn parse(raw: &RawTargetCommon) -> Result<Self, PduError> {
        let status = match raw.flags & 0x01 {
            0 => None,
            _ => Some(DataInStatus {
                status: raw.byte3,
                residual: residual_of(raw.flags, OVERFLOW, UNDERFLOW, raw.word44.get())?,
            }),
        };
        Ok(Self {
            is_final: raw.flags & FINAL != 0,
            acknowledge: raw.flags & 0x40 != 0,
            status,
            lun: raw.lun,
            itt: Itt(raw.itt.get()),
            ttt: Ttt(raw.ttt.get()),
            data_sn: raw.word36.get(),
            offset: raw.word40.get(),
        })
    }
}

/// Ready to transfer: requests data from the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct R2t {
    /// Logical unit number, in the 8-byte SAM-5 format.
    pub lun: WireLun,
    /// Initiator Task Tag used for the command.
    pub itt: Itt,
    /// Target Transfer Tag, to be used in Data-Out PDUs.
    pub ttt: Ttt,
    /// Sequence number for this command.
    pub r2t_sn: u32,
    /// Offset in the data of the command, in bytes.
    pub offset: u32,
    /// Number of bytes, up to MaxBurstLength.
    pub len: u32,
}

impl R2t {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: FINAL,
            lun: self.lun,
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            word36: self.r2t_sn.into(),
            word40: self.offset.into(),
            word44: self.len.into(),
            ..with_numbers(Opcode::R2t, numbers)
        }
        .bytes()
    }
}

/// A ping, or the response to a ping from the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NopIn {
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag from the NOP-Out, if this is a response.
    pub itt: Itt,
    /// Target Transfer Tag, or none if no response should be sent.
    pub ttt: Ttt,
}

impl NopIn {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: FINAL,
            lun: self.lun,
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            ..with_numbers(Opcode::NopIn, numbers)
        }
        .bytes()
    }
}

/// A text response. The text is in the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextResponse {
    /// F bit: this is the end of the text sent by the target.
    pub is_final: bool,
    /// C bit: the text continues in the next PDU.
    pub continues: bool,
    /// Initiator Task Tag from the request.
    pub itt: Itt,
    /// Target Transfer Tag for the next request, or none if this is complete.
    pub ttt: Ttt,
}

impl TextResponse {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: if self.is_final { FINAL } else { 0 }
                | if self.continues { CONTINUE } else { 0 },
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            ..with_numbers(Opcode::TextResponse, numbers)
        }
        .bytes()
    }
}

/// AsyncEvent (RFC 7143 11.9.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum AsyncEvent {
    /// Sense data for a logical unit.
    Scsi = 0,
    /// The initiator should log out within `parameter3` seconds.
    LogoutRequested = 1,
    /// Connection `parameter1` will be dropped.
    ConnectionDropped = 2,
    /// All connections of the session will be dropped.
    SessionDropped = 3,
    /// The initiator should negotiate again.
    Negotiate = 4,
    /// All tasks of a logical unit have been terminated.
    TasksTerminated = 5,
}

/// An asynchronous message. The data segment has the same format as in a SCSI response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncMessage {
    /// AsyncEvent: kind of the event (RFC 7143 11.9.1).
    pub event: AsyncEvent,
    /// Logical unit number, if the event is for a logical unit.
    pub lun: WireLun,
    /// Parameter1, Parameter2 and Parameter3, which depend on the event.
    pub parameters: [u16; 3],
}

impl AsyncMessage {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        let [parameter1, parameter2, parameter3] = self.parameters.map(Into::into);
        RawAsyncMessage {
            opcode: Opcode::AsyncMessage.into(),
            flags: FINAL,
            lun: self.lun,
            itt: NO_TAG.into(),
            stat_sn: numbers.stat_sn.0.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.0.into(),
            max_cmd_sn: numbers.max_cmd_sn.0.into(),
            async_event: self.event.into(),
            parameter1,
            parameter2,
            parameter3,
            ..RawAsyncMessage::default()
        }
        .bytes()
    }

    fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawAsyncMessage::of(frame.bhs);
        Ok(Self {
            event: coded("AsyncEvent", raw.async_event)?,
            lun: raw.lun,
            parameters: [
                raw.parameter1.get(),
                raw.parameter2.get(),
                raw.parameter3.get(),
            ],
        })
    }
}

/// Reason of a reject (RFC 7143 11.17.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum RejectReason {
    /// Data (payload) digest error.
    DataDigestError = 0x02,
    /// SNACK Reject: the PDU cannot be sent again.
    SnackReject = 0x03,
    /// Protocol Error: the PDU is not allowed here.
    ProtocolError = 0x04,
    /// Command not supported: the opcode is unknown.
    CommandNotSupported = 0x05,
    /// Immediate command reject: too many immediate commands.
    TooManyImmediate = 0x06,
    /// Task in progress: the tag is already in use.
    TaskInProgress = 0x07,
    /// Invalid data ack: a DataACK for data that was not sent.
    InvalidDataAck = 0x08,
    /// Invalid PDU field: a field has an invalid value.
    InvalidPduField = 0x09,
    /// Long op reject: a target transfer tag cannot be generated.
    LongOperation = 0x0a,
    /// Waiting for logout: any other request is rejected.
    WaitingForLogout = 0x0c,
}

/// A reject. The data segment contains the header of the rejected PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reject {
    /// Reason of the reject.
    pub reason: RejectReason,
}

impl Reject {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: FINAL,
            byte2: self.reason.into(),
            itt: NO_TAG.into(),
            ..with_numbers(Opcode::Reject, numbers)
        }
        .bytes()
    }
}

/// A PDU received by an initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FromTarget {
    /// NOP-In (RFC 7143 11.19).
    NopIn(NopIn),
    /// SCSI Response (RFC 7143 11.4).
    ScsiResponse(ScsiResponse),
    /// Task Management Function Response (RFC 7143 11.6).
    TmfResponse(TmfResponse),
    /// Login Response (RFC 7143 11.13).
    LoginResponse(LoginResponse),
    /// Text Response (RFC 7143 11.11).
    TextResponse(TextResponse),
    /// SCSI Data-In (RFC 7143 11.7).
    DataIn(DataIn),
    /// Logout Response (RFC 7143 11.15).
    LogoutResponse(LogoutResponse),
    /// Ready To Transfer (RFC 7143 11.8).
    R2t(R2t),
    /// Asynchronous Message (RFC 7143 11.9).
    AsyncMessage(AsyncMessage),
    /// Reject (RFC 7143 11.17).
    Reject(Reject),
}

impl FromTarget {
    /// Parses a PDU and the sequence numbers.
    ///
    /// # Errors
    /// [`PduError`].
    pub fn parse(frame: &Frame<'_>) -> Result<(Self, Numbers), PduError> {
        if !frame.ahs.is_empty() {
            return Err(PduError::Ahs);
        }
        // StatSN, ExpCmdSN and MaxCmdSN use the same offsets in all PDUs sent by a target, so we
        // can use this header for any type of PDU.
        let raw = RawTargetCommon::of(frame.bhs);
        let numbers = numbers_of(raw);
        let (itt, ttt) = (Itt(raw.itt.get()), Ttt(raw.ttt.get()));
        let pdu = match Opcode::of(frame.bhs)? {
            Opcode::NopIn => Self::NopIn(NopIn {
                lun: raw.lun,
                itt,
                ttt,
            }),
            Opcode::ScsiResponse => Self::ScsiResponse(ScsiResponse::parse(frame)?),
            Opcode::TmfResponse => Self::TmfResponse(TmfResponse::parse(raw)?),
            Opcode::LoginResponse => Self::LoginResponse(LoginResponse::parse(frame)?),
            Opcode::TextResponse => Self::TextResponse(TextResponse {
                is_final: raw.flags & FINAL != 0,
                continues: raw.flags & CONTINUE != 0,
                itt,
                ttt,
            }),
            Opcode::DataIn => Self::DataIn(DataIn::parse(raw)?),
            Opcode::LogoutResponse => Self::LogoutResponse(LogoutResponse::parse(raw)?),
            Opcode::R2t => Self::R2t(R2t {
                lun: raw.lun,
                itt,
                ttt,
                r2t_sn: raw.word36.get(),
                offset: raw.word40.get(),
                len: raw.word44.get(),
            }),
            Opcode::AsyncMessage => Self::AsyncMessage(AsyncMessage::parse(frame)?),
            Opcode::Reject => Self::Reject(Reject {
                reason: coded("reject reason", raw.byte2)?,
            }),
            other => return Err(PduError::Opcode(other.into())),
        };
        Ok((pdu, numbers))
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        match self {
            Self::NopIn(pdu) => pdu.header(numbers),
            Self::ScsiResponse(pdu) => pdu.header(numbers),
            Self::TmfResponse(pdu) => pdu.header(numbers),
            Self::LoginResponse(pdu) => pdu.header(numbers),
            Self::TextResponse(pdu) => pdu.header(numbers),
            Self::DataIn(pdu) => pdu.header(numbers),
            Self::LogoutResponse(pdu) => pdu.header(numbers),
            Self::R2t(pdu) => pdu.header(numbers),
            Self::AsyncMessage(pdu) => pdu.header(numbers),
            Self::Reject(pdu) => pdu.header(numbers),
        }
    }
}
