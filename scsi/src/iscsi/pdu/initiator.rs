//! PDUs sent by initiators.

use nom::bytes::complete::take;
use nom::number::complete::{be_u8, be_u16};
use nom::{IResult, Parser};
use num_enum::{IntoPrimitive, TryFromPrimitive};
use smallvec::SmallVec;
use zerocopy::big_endian::U32;

use super::super::frame::Frame;
use super::super::raw::{RawInitiatorCommon, RawScsiCommand};
use super::super::{BHS_LEN, CmdSn, Itt, StatSn, Ttt};
use super::{
    CONTINUE, FINAL, IMMEDIATE, LoginRequest, LogoutRequest, Opcode, PduError, TmfRequest, coded,
    flag, immediate,
};
use crate::lun::WireLun;

/// Maximum length of a CDB in a command, in bytes (SPC-4 4.2.3).
pub const MAX_CDB: usize = 260;

/// A CDB with up to [`MAX_CDB`] bytes. We use inline storage which is large enough for disk
/// commands, so that these don't need an allocation. If we had space for the maximum length, this
/// would be expensive to move.
pub type CdbBytes = SmallVec<[u8; 32]>;

/// Task attribute (RFC 7143 11.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TaskAttr {
    /// No attribute, handled as SIMPLE.
    Untagged = 0,
    /// SIMPLE: can be reordered with other simple tasks.
    Simple = 1,
    /// ORDERED: executed after all older tasks and before newer tasks.
    Ordered = 2,
    /// HEAD OF QUEUE: executed before all other tasks.
    HeadOfQueue = 3,
    /// ACA, which is not supported.
    Aca = 4,
}

/// SCSI Command (RFC 7143 11.3).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScsiCommand {
    /// I bit: can be sent outside of the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// F bit: there is no unsolicited Data-Out after this.
    pub is_final: bool,
    /// R bit: the initiator will receive data.
    pub reads: bool,
    /// W bit: the initiator will send data.
    pub writes: bool,
    /// Task attribute of the command.
    pub attribute: TaskAttr,
    /// Logical unit number, in the 8-byte SAM-5 format.
    pub lun: WireLun,
    /// Initiator Task Tag for this request (RFC 7143 11.2.1.8).
    pub itt: Itt,
    /// Expected Data Transfer Length in bytes. For a bidirectional command, this is the length of
    /// the write.
    pub expected_length: u32,
    /// CmdSN for this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
    /// The CDB. This is at least 16 bytes, or more if included in the PDU.
    pub cdb: CdbBytes,
    /// Expected read length of a bidirectional command, in bytes.
    pub bidi_read_length: Option<u32>,
}

const AHS_EXTENDED_CDB: u8 = 1;
const AHS_BIDI_READ: u8 = 2;

/// Returns the type and contents of an additional header segment.
fn segment(ahs: &[u8]) -> IResult<&[u8], (u8, &[u8]), ()> {
    let (ahs, (len, kind, _)) = (be_u16, be_u8, be_u8).parse(ahs)?;
    // The byte after the type is included in AHSLength.
    let len = usize::from(len).checked_sub(1).ok_or(nom::Err::Error(()))?;
    let (ahs, padded) = take(len.next_multiple_of(4))(ahs)?;
    Ok((ahs, (kind & 0x3f, &padded[..len])))
}

impl ScsiCommand {
    fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawScsiCommand::of(frame.bhs);
        let mut command = Self {
            immediate: raw.opcode & IMMEDIATE != 0,
            is_final: raw.flags & FINAL != 0,
            reads: raw.flags & 0x40 != 0,
            writes: raw.flags & 0x20 != 0,
            attribute: coded("ATTR", raw.flags & 7)?,
            lun: raw.lun,
            itt: Itt(raw.itt.get()),
            expected_length: raw.expected_length.get(),
            cmd_sn: CmdSn(raw.cmd_sn.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
            // Use all 16 bytes including padding, because the length of the CDB depends on the
            // operation code.
            cdb: CdbBytes::from_slice(&raw.cdb),
            bidi_read_length: None,
        };
        command.parse_ahs(frame.ahs)?;
        Ok(command)
    }

    /// Parses the additional header segments (RFC 7143 11.2.2). There can only be one of each type.
    fn parse_ahs(&mut self, mut ahs: &[u8]) -> Result<(), PduError> {
        while !ahs.is_empty() {
            let (rest, (kind, content)) = segment(ahs).map_err(|_| PduError::Ahs)?;
            ahs = rest;
            let is_legal = match kind {
                AHS_EXTENDED_CDB => {
                    // The CDB can only be extended once. With a second segment, we would create a
                    // CDB that was never sent by the initiator.
                    let is_first = self.cdb.len() == 16;
                    let fits = self.cdb.len() + content.len() <= MAX_CDB;
                    if is_first && fits {
                        self.cdb.extend_from_slice(content);
                    }
                    is_first && fits
                }
                AHS_BIDI_READ => {
                    // If this is not exactly four bytes, we can't guess the length, because we
                    // would then transfer the wrong amount of data.
                    let len = content.try_into().map(u32::from_be_bytes);
                    let is_first = self.bidi_read_length.is_none();
                    self.bidi_read_length = len.ok();
                    is_first && len.is_ok()
                }
                _ => false,
            };
            if !is_legal {
                return Err(PduError::Ahs);
            }
        }
        Ok(())
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        let mut cdb = [0; 16];
        // The remaining bytes are sent in an additional header segment, see `ahs`.
        let short = self.cdb.len().min(16);
        cdb[..short].copy_from_slice(&self.cdb[..short]);
        RawScsiCommand {
            opcode: u8::from(Opcode::ScsiCommand) | immediate(self.immediate),
            flags: flag(self.is_final, FINAL)
                | flag(self.reads, 0x40)
                | flag(self.writes, 0x20)
                | u8::from(self.attribute),
            lun: self.lun,
            itt: self.itt.0.into(),
            expected_length: self.expected_length.into(),
            cmd_sn: self.cmd_sn.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            cdb,
            ..RawScsiCommand::default()
        }
        .bytes()
    }

    /// Returns the additional header segments.
    #[must_use]
    pub fn ahs(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |kind: u8, content: &[u8]| {
            out.extend((content.len() as u16 + 1).to_be_bytes());
            out.extend([kind, 0]);
            out.extend(content);
            out.resize(out.len().next_multiple_of(4), 0);
        };
        if let Some(rest) = self.cdb.get(16..).filter(|rest| !rest.is_empty()) {
            put(AHS_EXTENDED_CDB, rest);
        }
        if let Some(len) = self.bidi_read_length {
            put(AHS_BIDI_READ, &len.to_be_bytes());
        }
        out
    }
}

/// Data to be written, sent to the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataOut {
    /// F bit: this is the last PDU in a sequence.
    pub is_final: bool,
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag used for the command.
    pub itt: Itt,
    /// Tag from the R2T, or none for unsolicited data.
    pub ttt: Ttt,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
    /// Sequence number in this data sequence.
    pub data_sn: u32,
    /// Offset in the data of the command, in bytes.
    pub offset: u32,
}

impl DataOut {
    fn parse(frame: &Frame<'_>) -> Self {
        let raw = RawInitiatorCommon::of(frame.bhs);
        Self {
            is_final: raw.flags & FINAL != 0,
            lun: raw.lun,
            itt: Itt(raw.itt.get()),
            ttt: Ttt(raw.ttt.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
            data_sn: raw.word36.get(),
            offset: raw.word40.get(),
        }
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawInitiatorCommon {
            opcode: Opcode::DataOut.into(),
            flags: flag(self.is_final, FINAL),
            lun: self.lun,
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            word36: self.data_sn.into(),
            word40: self.offset.into(),
            ..RawInitiatorCommon::default()
        }
        .bytes()
    }
}

/// A ping, or the response to a ping from the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NopOut {
    /// I bit: can be sent outside of the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag, or none if no response should be sent.
    pub itt: Itt,
    /// Target Transfer Tag from the NOP-In, if this is a response.
    pub ttt: Ttt,
    /// CmdSN for this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
}

/// A text request. The text is in the data segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextRequest {
    /// I bit: can be sent outside of the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// F bit: this is the end of the text sent by the initiator.
    pub is_final: bool,
    /// C bit: the text continues in the next PDU.
    pub continues: bool,
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag for this request (RFC 7143 11.2.1.8).
    pub itt: Itt,
    /// Target Transfer Tag from the previous response.
    pub ttt: Ttt,
    /// CmdSN for this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
}

macro_rules! common {
    ($name:ident, $self:ident, $raw:ident, $flags:expr, { $($field:ident: $value:expr),* }) => {
        impl $name {
            fn parse(frame: &Frame<'_>) -> Self {
                let $raw = RawInitiatorCommon::of(frame.bhs);
                Self {
                    immediate: $raw.opcode & IMMEDIATE != 0,
                    lun: $raw.lun,
                    itt: Itt($raw.itt.get()),
                    ttt: Ttt($raw.ttt.get()),
                    cmd_sn: CmdSn($raw.cmd_sn.get()),
                    exp_stat_sn: StatSn($raw.exp_stat_sn.get()),
                    $($field: $value),*
                }
            }

            /// Returns the basic header segment.
            #[must_use]
            pub fn header(&$self) -> [u8; BHS_LEN] {
                RawInitiatorCommon {
                    opcode: u8::from(Opcode::$name) | immediate($self.immediate),
                    flags: $flags,
                    lun: $self.lun,
                    itt: $self.itt.0.into(),
                    ttt: $self.ttt.0.into(),
                    cmd_sn: $self.cmd_sn.0.into(),
                    exp_stat_sn: $self.exp_stat_sn.0.into(),
                    ..RawInitiatorCommon::default()
                }
                .bytes()
            }
        }
    };
}

common!(NopOut, self, raw, FINAL, {});
common!(TextRequest, self, raw,
    flag(self.is_final, FINAL) | flag(self.continues, CONTINUE),
    { is_final: raw.flags & FINAL != 0, continues: raw.flags & CONTINUE != 0 });

/// Type of a SNACK (RFC 7143 11.16.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum SnackKind {
    /// Retransmit Data-In or R2T.
    DataOrR2t = 0,
    /// Retransmit a status.
    Status = 1,
    /// DataACK: acknowledge Data-In PDUs.
    DataAck = 2,
    /// Retransmit Data-In with a different PDU size.
    RData = 3,
}

/// A selective negative or sequence acknowledgment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snack {
    /// Type of the SNACK.
    pub kind: SnackKind,
    /// Logical unit number, if `ttt` is set.
    pub lun: WireLun,
    /// Initiator Task Tag of the command, used for data.
    pub itt: Itt,
    /// Target Transfer Tag of a DataACK, SNACK Tag of an R-Data SNACK (RFC 7143 11.16.5).
    pub ttt: Ttt,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
    /// BegRun: the first DataSN, R2TSN or StatSN (RFC 7143 11.16.6).
    pub begin: u32,
    /// RunLength: number of PDUs. If this is zero, all PDUs after BegRun are included (RFC 7143
    /// 11.16.7).
    pub run: u32,
}

impl Snack {
    fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawInitiatorCommon::of(frame.bhs);
        Ok(Self {
            kind: coded("SNACK type", raw.flags & 0x0f)?,
            lun: raw.lun,
            itt: Itt(raw.itt.get()),
            ttt: Ttt(raw.ttt.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
            begin: raw.word40.get(),
            run: raw.word44.get(),
        })
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawInitiatorCommon {
            opcode: Opcode::Snack.into(),
            flags: FINAL | u8::from(self.kind),
            lun: self.lun,
            itt: self.itt.0.into(),
            ttt: self.ttt.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            word40: self.begin.into(),
            word44: U32::new(self.run),
            ..RawInitiatorCommon::default()
        }
        .bytes()
    }
}

/// A PDU received by a target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromInitiator {
    /// NOP-Out (RFC 7143 11.18).
    NopOut(NopOut),
    /// SCSI Command (RFC 7143 11.3).
    ScsiCommand(ScsiCommand),
    /// Task Management Function Request (RFC 7143 11.5).
    TmfRequest(TmfRequest),
    /// Login Request (RFC 7143 11.12).
    LoginRequest(LoginRequest),
    /// Text Request (RFC 7143 11.10).
    TextRequest(TextRequest),
    /// SCSI Data-Out (RFC 7143 11.7).
    DataOut(DataOut),
    /// Logout Request (RFC 7143 11.14).
    LogoutRequest(LogoutRequest),
    /// SNACK Request (RFC 7143 11.16).
    Snack(Snack),
}

impl FromInitiator {
    /// Parses a PDU.
    ///
    /// # Errors
    /// [`PduError`].
    pub fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let opcode = Opcode::of(frame.bhs);
        // Both types of additional header segments can only be used for SCSI commands (RFC 7143
        // 11.2.2.1).
        if !frame.ahs.is_empty() && opcode != Ok(Opcode::ScsiCommand) {
            return Err(PduError::Ahs);
        }
        Ok(match opcode? {
            Opcode::NopOut => Self::NopOut(NopOut::parse(frame)),
            Opcode::ScsiCommand => Self::ScsiCommand(ScsiCommand::parse(frame)?),
            Opcode::TmfRequest => Self::TmfRequest(TmfRequest::parse(frame)),
            Opcode::LoginRequest => Self::LoginRequest(LoginRequest::parse(frame)?),
            Opcode::TextRequest => Self::TextRequest(TextRequest::parse(frame)),
            Opcode::DataOut => Self::DataOut(DataOut::parse(frame)),
            Opcode::LogoutRequest => Self::LogoutRequest(LogoutRequest::parse(frame)?),
            Opcode::Snack => Self::Snack(Snack::parse(frame)?),
            other => return Err(PduError::Opcode(other.into())),
        })
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        match self {
            Self::NopOut(pdu) => pdu.header(),
            Self::ScsiCommand(pdu) => pdu.header(),
            Self::TmfRequest(pdu) => pdu.header(),
            Self::LoginRequest(pdu) => pdu.header(),
            Self::TextRequest(pdu) => pdu.header(),
            Self::DataOut(pdu) => pdu.header(),
            Self::LogoutRequest(pdu) => pdu.header(),
            Self::Snack(pdu) => pdu.header(),
        }
    }

    /// Returns the additional header segments.
    #[must_use]
    pub fn ahs(&self) -> Vec<u8> {
        match self {
            Self::ScsiCommand(pdu) => pdu.ahs(),
            _ => Vec::new(),
        }
    }
}
