//! Login: SRP_LOGIN_REQ in both of its forms, SRP_LOGIN_RSP, SRP_LOGIN_REJ.

use bitflags::bitflags;
use num_enum::{FromPrimitive, IntoPrimitive, TryFromPrimitive};

use super::raw::{RawLoginRej, RawLoginReq, RawLoginReqRdma, RawLoginRsp, expect};
use super::{CMD_LEN, InitiatorPortId, Opcode, SrpError, Tag, TargetPortId};

bitflags! {
    /// Data-buffer descriptor formats a port asks for, or supports (SRP r16a, REQUIRED BUFFER
    /// FORMATS and SUPPORTED BUFFER FORMATS).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct BufferFormats: u16 {
        /// A single memory descriptor.
        const DIRECT = 1 << 1;
        /// A table of memory descriptors.
        const INDIRECT = 1 << 2;
    }
}

bitflags! {
    /// Flags of SRP_LOGIN_REQ besides the multi-channel action.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct LoginReqFlags: u8 {
        /// LOSOLNT: solicited notification of target logouts is wanted.
        const LOSOLNT = 0x10;
        /// CRSOLNT: solicited notification of credit requests is wanted.
        const CRSOLNT = 0x20;
        /// AESOLNT: solicited notification of asynchronous events is wanted.
        const AESOLNT = 0x40;
    }
}

/// MULTI-CHANNEL ACTION: what a login does to existing channels of the same I_T nexus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum MultiChannelAction {
    /// Existing channels of this nexus are to be terminated.
    #[default]
    Single = 0,
    /// Existing channels are to stay; this one is independent of them.
    Multi = 1,
}

/// MULTI-CHANNEL RESULT: what the login did to existing channels of the same I_T nexus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum MultiChannelResult {
    /// The initiator had no other channel.
    #[default]
    NoChannels = 0,
    /// Other channels of the initiator were terminated.
    Terminated = 1,
    /// Other channels of the initiator were kept.
    Maintained = 2,
}

/// Offset of immediate data, in bytes from the start of an SRP_CMD; at least the length of its
/// fixed part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImmediateDataOffset(u16);

impl ImmediateDataOffset {
    /// The offset, or `None` where it would lie within the fixed part of SRP_CMD.
    #[must_use]
    pub fn new(bytes: u16) -> Option<Self> {
        (usize::from(bytes) >= CMD_LEN).then_some(Self(bytes))
    }

    /// Bytes from the start of the SRP_CMD.
    #[must_use]
    pub fn bytes(self) -> usize {
        usize::from(self.0)
    }
}

/// SRP_LOGIN_REQ: asks for a channel (SRP r16a, SRP_LOGIN_REQ request).
///
/// IB/CM private data carries the 64-byte information unit ([`Self::parse`], [`Self::emit`]);
/// RDMA/CM leaves 56 bytes only, for which Linux defined a shorter arrangement of the same fields
/// ([`Self::parse_rdma`], [`Self::emit_rdma`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginReq {
    /// Returned in the answer.
    pub tag: Tag,
    /// The longest information unit that the initiator wants to send, in bytes.
    pub req_it_iu_len: u32,
    /// Formats the initiator needs.
    pub formats: BufferFormats,
    /// Action on other channels of this nexus.
    pub multi_channel: MultiChannelAction,
    /// Bits of REQ FLAGS: multichannel action and notifications.
    pub flags: LoginReqFlags,
    /// Immediate data is wanted, and would begin here (SRP-2). `None`: not wanted.
    pub immediate: Option<ImmediateDataOffset>,
    /// The initiator port that logs in.
    pub initiator_port: InitiatorPortId,
    /// The target port that it logs in to.
    pub target_port: TargetPortId,
}

const IMMED_REQUESTED: u8 = 0x80;
const MULTI_CHANNEL_MASK: u8 = 0x03;

impl LoginReq {
    /// Parses the 64-byte information unit.
    ///
    /// # Errors
    /// A wrong type, too few bytes, a reserved multi-channel action, or an immediate-data offset
    /// within the fixed part of SRP_CMD.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginReq::split(iu)?;
        expect(raw.opcode, Opcode::LoginReq)?;
        // The same fields in another arrangement. One place judges them for both.
        Self::from_fields(&RawLoginReqRdma {
            tag: raw.tag,
            req_buf_fmt: raw.req_buf_fmt,
            req_flags: raw.req_flags,
            opcode: raw.opcode,
            req_it_iu_len: raw.req_it_iu_len,
            initiator_port_id: raw.initiator_port_id,
            target_port_id: raw.target_port_id,
            imm_data_offset: raw.imm_data_offset,
            reserved: [0; 6],
        })
    }

    /// Parses the 56-byte RDMA/CM private data.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_rdma(private_data: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginReqRdma::split(private_data)?;
        expect(raw.opcode, Opcode::LoginReq)?;
        Self::from_fields(raw)
    }

    fn from_fields(raw: &RawLoginReqRdma) -> Result<Self, SrpError> {
        let code = raw.req_flags & MULTI_CHANNEL_MASK;
        let multi_channel = MultiChannelAction::try_from(code).map_err(|_| SrpError::Illegal {
            field: "MULTI-CHANNEL ACTION",
            value: code.into(),
        })?;
        // The offset counts only with its flag. An initiator of SRP without immediate data has
        // reserved bytes there.
        let immediate = if raw.req_flags & IMMED_REQUESTED == 0 {
            None
        } else {
            let offset = raw.imm_data_offset.get();
            Some(ImmediateDataOffset::new(offset).ok_or(SrpError::Illegal {
                field: "immediate data offset",
                value: offset.into(),
            })?)
        };
        Ok(Self {
            tag: Tag(raw.tag.get()),
            req_it_iu_len: raw.req_it_iu_len.get(),
            formats: BufferFormats::from_bits_truncate(raw.req_buf_fmt.get()),
            multi_channel,
            flags: LoginReqFlags::from_bits_truncate(raw.req_flags),
            immediate,
            initiator_port: InitiatorPortId(raw.initiator_port_id),
            target_port: TargetPortId(raw.target_port_id),
        })
    }

    fn req_flags(&self) -> u8 {
        let immediate = if self.immediate.is_some() {
            IMMED_REQUESTED
        } else {
            0
        };
        self.flags.bits() | self.multi_channel as u8 | immediate
    }

    fn imm_data_offset(&self) -> u16 {
        self.immediate.map_or(0, |offset| offset.0)
    }

    /// Writes the 64-byte information unit and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        RawLoginReq {
            opcode: Opcode::LoginReq as u8,
            tag: self.tag.0.into(),
            req_it_iu_len: self.req_it_iu_len.into(),
            req_buf_fmt: self.formats.bits().into(),
            req_flags: self.req_flags(),
            imm_data_offset: self.imm_data_offset().into(),
            initiator_port_id: self.initiator_port.0,
            target_port_id: self.target_port.0,
            ..RawLoginReq::default()
        }
        .put(out)
    }

    /// Writes the 56-byte RDMA/CM form and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit_rdma(&self, out: &mut [u8]) -> usize {
        RawLoginReqRdma {
            tag: self.tag.0.into(),
            req_buf_fmt: self.formats.bits().into(),
            req_flags: self.req_flags(),
            opcode: Opcode::LoginReq as u8,
            req_it_iu_len: self.req_it_iu_len.into(),
            initiator_port_id: self.initiator_port.0,
            target_port_id: self.target_port.0,
            imm_data_offset: self.imm_data_offset().into(),
            reserved: [0; 6],
        }
        .put(out)
    }
}

/// SRP_LOGIN_RSP: the login is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRsp {
    /// REQUEST LIMIT DELTA: the initial request limit.
    pub req_lim_delta: i32,
    /// Tag of the login request.
    pub tag: Tag,
    /// The longest information unit the initiator may send, in bytes.
    pub max_it_iu_len: u32,
    /// The longest information unit the target will send, in bytes.
    pub max_ti_iu_len: u32,
    /// Formats the target supports.
    pub formats: BufferFormats,
    /// Result for other channels of this nexus.
    pub multi_channel: MultiChannelResult,
    /// SOLNTSUP: the target honours solicited-notification wishes.
    pub solicited_notification: bool,
    /// Immediate data is accepted, at the offset that the request named (SRP-2).
    pub immediate: bool,
}

const RSP_SOLNTSUP: u8 = 0x10;
const RSP_IMMED_SUPP: u8 = 0x80;

impl LoginRsp {
    /// Parses an SRP_LOGIN_RSP.
    ///
    /// # Errors
    /// A wrong type, too few bytes, or a reserved multi-channel result.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginRsp::split(iu)?;
        expect(raw.opcode, Opcode::LoginRsp)?;
        let code = raw.rsp_flags & MULTI_CHANNEL_MASK;
        let multi_channel = MultiChannelResult::try_from(code).map_err(|_| SrpError::Illegal {
            field: "MULTI-CHANNEL RESULT",
            value: code.into(),
        })?;
        Ok(Self {
            req_lim_delta: raw.req_lim_delta.get(),
            tag: Tag(raw.tag.get()),
            max_it_iu_len: raw.max_it_iu_len.get(),
            max_ti_iu_len: raw.max_ti_iu_len.get(),
            formats: BufferFormats::from_bits_truncate(raw.buf_fmt.get()),
            multi_channel,
            solicited_notification: raw.rsp_flags & RSP_SOLNTSUP != 0,
            immediate: raw.rsp_flags & RSP_IMMED_SUPP != 0,
        })
    }

    /// Writes the information unit and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let solicited = u8::from(self.solicited_notification) * RSP_SOLNTSUP;
        let immediate = u8::from(self.immediate) * RSP_IMMED_SUPP;
        RawLoginRsp {
            opcode: Opcode::LoginRsp as u8,
            req_lim_delta: self.req_lim_delta.into(),
            tag: self.tag.0.into(),
            max_it_iu_len: self.max_it_iu_len.into(),
            max_ti_iu_len: self.max_ti_iu_len.into(),
            buf_fmt: self.formats.bits().into(),
            rsp_flags: self.multi_channel as u8 | solicited | immediate,
            ..RawLoginRsp::default()
        }
        .put(out)
    }
}

/// Reason of a refused login (SRP r16a, SRP_LOGIN_REJ reason codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u32)]
pub enum LoginRejReason {
    /// No channel can be established, no reason given.
    UnableToEstablishChannel = 0x0001_0000,
    /// The target lacks resources for another channel.
    InsufficientResources = 0x0001_0001,
    /// The requested information-unit length is too large.
    ReqItIuLengthTooLarge = 0x0001_0002,
    /// The channel cannot be associated with the I_T nexus.
    UnableToAssociateChannel = 0x0001_0003,
    /// A required buffer descriptor format is not supported.
    UnsupportedDescriptorFormat = 0x0001_0004,
    /// Several channels per I_T nexus are not supported.
    MultiChannelUnsupported = 0x0001_0005,
    /// This initiator has as many channels as it may have.
    ChannelLimitReached = 0x0001_0006,
    /// A code that the standard does not define.
    #[num_enum(catch_all)]
    Other(u32),
}

impl LoginRejReason {
    /// Its name, for counters.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::UnableToEstablishChannel => "unable_to_establish_channel",
            Self::InsufficientResources => "insufficient_resources",
            Self::ReqItIuLengthTooLarge => "req_it_iu_length_too_large",
            Self::UnableToAssociateChannel => "unable_to_associate_channel",
            Self::UnsupportedDescriptorFormat => "unsupported_descriptor_format",
            Self::MultiChannelUnsupported => "multi_channel_unsupported",
            Self::ChannelLimitReached => "channel_limit_reached",
            Self::Other(_) => "other",
        }
    }
}

impl std::fmt::Display for LoginRejReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::UnableToEstablishChannel => "the target cannot establish a channel",
            Self::InsufficientResources => "the target lacks resources for another channel",
            Self::ReqItIuLengthTooLarge => "the requested information unit length is too large",
            Self::UnableToAssociateChannel => {
                "the channel cannot be associated with this initiator and target port"
            }
            Self::UnsupportedDescriptorFormat => "a required buffer format is not supported",
            Self::MultiChannelUnsupported => "several channels are not supported",
            Self::ChannelLimitReached => "this initiator has as many channels as it may have",
            Self::Other(code) => return write!(f, "reason {code:#010x}"),
        })
    }
}

/// SRP_LOGIN_REJ: the login is refused. Travels in the private data of a CM REJ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRej {
    /// Reason of the refusal.
    pub reason: LoginRejReason,
    /// Tag of the login request.
    pub tag: Tag,
    /// Formats the target supports.
    pub formats: BufferFormats,
}

impl LoginRej {
    /// Parses an SRP_LOGIN_REJ.
    ///
    /// # Errors
    /// A wrong type or too few bytes.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginRej::split(iu)?;
        expect(raw.opcode, Opcode::LoginRej)?;
        Ok(Self {
            reason: raw.reason.get().into(),
            tag: Tag(raw.tag.get()),
            formats: BufferFormats::from_bits_truncate(raw.buf_fmt.get()),
        })
    }

    /// Writes the information unit and returns its length.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        RawLoginRej {
            opcode: Opcode::LoginRej as u8,
            reason: u32::from(self.reason).into(),
            tag: self.tag.0.into(),
            buf_fmt: self.formats.bits().into(),
            ..RawLoginRej::default()
        }
        .put(out)
    }
}
