//! Login messages: both formats of SRP_LOGIN_REQ, SRP_LOGIN_RSP, and SRP_LOGIN_REJ.

use bitflags::bitflags;
use num_enum::{FromPrimitive, IntoPrimitive, TryFromPrimitive};

use super::raw::{RawLoginRej, RawLoginReq, RawLoginReqRdma, RawLoginRsp, expect};
use super::{CMD_LEN, InitiatorPortId, Opcode, SrpError, Tag, TargetPortId};

bitflags! {
    /// Data buffer descriptor formats requested or supported by a port (SRP r16a, REQUIRED BUFFER
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
    /// Flags in SRP_LOGIN_REQ, except for the multi-channel action.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct LoginReqFlags: u8 {
        /// LOSOLNT: request solicited notifications for target logouts.
        const LOSOLNT = 0x10;
        /// CRSOLNT: request solicited notifications for credit requests.
        const CRSOLNT = 0x20;
        /// AESOLNT: request solicited notifications for asynchronous events.
        const AESOLNT = 0x40;
    }
}

/// MULTI-CHANNEL ACTION: how to handle existing channels of the same I_T nexus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum MultiChannelAction {
    /// Terminate existing channels of this nexus.
    #[default]
    Single = 0,
    /// Keep existing channels, which are independent of the new one.
    Multi = 1,
}

/// MULTI-CHANNEL RESULT: how existing channels of the same I_T nexus were handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum MultiChannelResult {
    /// No other channels were found.
    #[default]
    NoChannels = 0,
    /// Other channels of this initiator were terminated.
    Terminated = 1,
    /// Other channels of this initiator were kept open.
    Maintained = 2,
}

/// Offset of immediate data from the start of an SRP_CMD, in bytes. This is at least the size of
/// the fixed part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImmediateDataOffset(u16);

impl ImmediateDataOffset {
    /// Creates a new offset. Returns `None` if it's within the fixed part of SRP_CMD.
    #[must_use]
    pub fn new(bytes: u16) -> Option<Self> {
        (usize::from(bytes) >= CMD_LEN).then_some(Self(bytes))
    }

    /// Returns the number of bytes from the start of the SRP_CMD.
    #[must_use]
    pub fn bytes(self) -> usize {
        usize::from(self.0)
    }
}

/// SRP_LOGIN_REQ: requests a new channel (SRP r16a, SRP_LOGIN_REQ request).
///
/// With the IB/CM, the private data contains the 64-byte information unit ([`Self::parse`],
/// [`Self::emit`]). With the RDMA/CM there are only 56 bytes available, so Linux has defined a
/// shorter format with the same fields ([`Self::parse_rdma`], [`Self::emit_rdma`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginReq {
    /// Tag to be returned in the response.
    pub tag: Tag,
    /// Maximum size of an IU to be sent by the initiator, in bytes.
    pub req_it_iu_len: u32,
    /// Formats required by the initiator.
    pub formats: BufferFormats,
    /// Action for other channels of this nexus.
    pub multi_channel: MultiChannelAction,
    /// REQ FLAGS: multi-channel action and notifications.
    pub flags: LoginReqFlags,
    /// Requested offset of immediate data, or `None` if this is not used (SRP-2).
    pub immediate: Option<ImmediateDataOffset>,
    /// The initiator port.
    pub initiator_port: InitiatorPortId,
    /// The target port used for the login.
    pub target_port: TargetPortId,
}

const IMMED_REQUESTED: u8 = 0x80;
const MULTI_CHANNEL_MASK: u8 = 0x03;

impl LoginReq {
    /// Parses a 64-byte IU.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected, the buffer is too short, the multi-channel
    /// action is reserved, or the immediate data offset is within the fixed part of SRP_CMD.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginReq::split(iu)?;
        expect(raw.opcode, Opcode::LoginReq)?;
        // Convert this to the other format with the same fields, so that we only need to check them
        // in a single function.
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
    /// Same as for [`Self::parse`].
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
        // Only use the offset if the flag is set. Otherwise, these bytes are reserved for an SRP
        // initiator without immediate data.
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

    /// Writes the 64-byte IU to `out` and returns the number of bytes.
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
        .write_to(out)
    }

    /// Writes the 56-byte RDMA/CM format to `out` and returns the number of bytes.
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
        .write_to(out)
    }
}

/// SRP_LOGIN_RSP: the login was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRsp {
    /// REQUEST LIMIT DELTA: initial value of the request limit.
    pub req_lim_delta: i32,
    /// Tag from the login request.
    pub tag: Tag,
    /// Maximum size of an IU that the initiator can send, in bytes.
    pub max_it_iu_len: u32,
    /// Maximum size of an IU that the target will send, in bytes.
    pub max_ti_iu_len: u32,
    /// Formats supported by the target.
    pub formats: BufferFormats,
    /// Result for other channels of this nexus.
    pub multi_channel: MultiChannelResult,
    /// SOLNTSUP: the target supports solicited notifications.
    pub solicited_notification: bool,
    /// Set when immediate data can be used with the offset from the request (SRP-2).
    pub immediate: bool,
}

const RSP_SOLNTSUP: u8 = 0x10;
const RSP_IMMED_SUPP: u8 = 0x80;

impl LoginRsp {
    /// Parses an SRP_LOGIN_RSP.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected, the buffer is too short, or the multi-channel
    /// result is reserved.
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

    /// Writes the IU to `out` and returns the number of bytes.
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
        .write_to(out)
    }
}

/// The reason why a login was rejected (SRP r16a, SRP_LOGIN_REJ reason codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u32)]
pub enum LoginRejReason {
    /// Can't establish a channel, without a specific reason.
    UnableToEstablishChannel = 0x0001_0000,
    /// Not enough resources for another channel.
    InsufficientResources = 0x0001_0001,
    /// The requested IU size is too large.
    ReqItIuLengthTooLarge = 0x0001_0002,
    /// The channel cannot be associated with the I_T nexus.
    UnableToAssociateChannel = 0x0001_0003,
    /// A required buffer descriptor format is not supported.
    UnsupportedDescriptorFormat = 0x0001_0004,
    /// Multiple channels per I_T nexus are not supported.
    MultiChannelUnsupported = 0x0001_0005,
    /// This initiator already has the maximum number of open channels.
    ChannelLimitReached = 0x0001_0006,
    /// Unknown code.
    #[num_enum(catch_all)]
    Other(u32),
}

impl LoginRejReason {
    /// Returns the name used for counters.
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
            Self::ReqItIuLengthTooLarge => "the requested information unit size is too large",
            Self::UnableToAssociateChannel => {
                "the channel cannot be associated with this initiator and target port"
            }
            Self::UnsupportedDescriptorFormat => "a required buffer format is not supported",
            Self::MultiChannelUnsupported => "multiple channels are not supported",
            Self::ChannelLimitReached => {
                "this initiator already has the maximum number of channels"
            }
            Self::Other(code) => return write!(f, "reason {code:#010x}"),
        })
    }
}

/// SRP_LOGIN_REJ: the login was rejected. This is sent in the private data of a CM REJ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRej {
    /// The reason for this.
    pub reason: LoginRejReason,
    /// Tag from the login request.
    pub tag: Tag,
    /// Formats supported by the target.
    pub formats: BufferFormats,
}

impl LoginRej {
    /// Parses an SRP_LOGIN_REJ.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected or the buffer is too short.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawLoginRej::split(iu)?;
        expect(raw.opcode, Opcode::LoginRej)?;
        Ok(Self {
            reason: raw.reason.get().into(),
            tag: Tag(raw.tag.get()),
            formats: BufferFormats::from_bits_truncate(raw.buf_fmt.get()),
        })
    }

    /// Writes the IU to `out` and returns the number of bytes.
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
        .write_to(out)
    }
}
