//! What a channel is made with, what it writes, and what it makes of what arrives.

use riser_scsi::srp::{
    ImmediateDataOffset, IndirectTable, InitiatorPortId, LoginRejReason, MemDesc,
    MultiChannelAction, MultiChannelResult, Opcode, Rsp, RspCode, SHORT_IU_LEN, SrpError, Tag,
    TargetPortId, TaskAttr, WireLun,
};

use crate::request::{Cdb, DataLen};
use crate::srp::descriptor::DescriptorLimits;

/// What a channel is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Commands outstanding at most.
    pub queue_size: u16,
    /// The longest information unit to ask for, in bytes; at least 64.
    pub max_it_iu_len: u32,
    /// Memory descriptors in a command at most.
    pub inline_descriptors: u8,
    /// Memory descriptors in an external table; 0: none are used.
    pub external_descriptors: u32,
    /// The longest immediate data, in bytes; 0: none is asked for.
    pub max_immediate: u32,
    /// Who logs in.
    pub initiator_port: InitiatorPortId,
    /// Where.
    pub target_port: TargetPortId,
    /// What becomes of other channels of this nexus.
    pub multi_channel: MultiChannelAction,
}

/// Where a channel is in its life.
///
/// ```text
/// Connecting → LoggingIn → Live → Disconnecting → Disconnected
///      └───────────┴─────────────────────────────────↑
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChannelState {
    /// The path to the target is being found.
    Connecting,
    /// The connection request, with the login in it, is out.
    LoggingIn,
    /// The login was accepted; requests flow.
    Live,
    /// No new requests; the connection is being closed.
    Disconnecting,
    /// The connection is gone.
    Disconnected,
}

/// What the login agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The longest information unit that we may send, in bytes.
    pub max_it_iu_len: u32,
    /// Descriptors that a command or a table may hold.
    pub descriptors: DescriptorLimits,
    /// Where immediate data begins and how long it may be; `None`: not agreed.
    pub immediate: Option<Immediate>,
    /// What became of other channels of this nexus.
    pub multi_channel: MultiChannelResult,
}

/// Immediate data as agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Where it begins in a command.
    pub offset: ImmediateDataOffset,
    /// Its longest, in bytes.
    pub max_len: u32,
}

/// The target did what SRP does not allow. The channel is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelFault {
    /// An information unit is malformed.
    #[error("malformed information unit: {0}")]
    Malformed(#[from] SrpError),
    /// An information unit came that this state does not allow.
    #[error("{opcode:?} while {state:?}")]
    Unexpected {
        /// The information unit's type.
        opcode: Opcode,
        /// The channel's state.
        state: ChannelState,
    },
    /// An answer names a request that is not outstanding.
    #[error("answer with tag {0}, which is not outstanding")]
    UnknownTag(Tag),
    /// A request-limit delta takes the limit out of all bounds.
    #[error("request limit delta {0} is absurd")]
    RequestLimit(i32),
    /// A residual is larger than the buffer it is about.
    #[error("residual of {residual} bytes for a buffer of {len}")]
    Residual {
        /// The residual.
        residual: u32,
        /// The buffer's length.
        len: u32,
    },
    /// The login's answer cannot be worked with.
    #[error("login response: {0}")]
    Login(&'static str),
}

/// Why a login failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginError {
    /// The target refused, and said why.
    #[error("login refused: {0}")]
    Rejected(LoginRejReason),
    /// The connection was refused without an SRP reason; the value is the CM's.
    #[error("connection refused (CM reason {0})")]
    Refused(u16),
    /// The target's answer is not legal.
    #[error(transparent)]
    Fault(#[from] ChannelFault),
}

/// A command's data as it goes into the information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData<'a> {
    /// None.
    None,
    /// In the information unit, behind its header.
    Immediate,
    /// In the memory of one descriptor.
    Direct(MemDesc),
    /// In the memory of several, all in the command or also in a table.
    Indirect(IndirectTable<'a>),
}

/// A command to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandIu<'a> {
    /// Logical unit.
    pub lun: WireLun,
    /// Task attribute.
    pub attr: TaskAttr,
    /// Command descriptor block.
    pub cdb: &'a Cdb,
    /// Direction and length of the data.
    pub len: DataLen,
    /// Where the data is.
    pub data: CommandData<'a>,
}

/// What an arrived information unit means to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// A command was answered; its slot is free when it is retired.
    Response {
        /// The value given when the tag was taken.
        owner: u32,
        /// The answer.
        rsp: Rsp<'a>,
    },
    /// The task-management request was answered.
    TskMgmt(RspCode),
    /// An answer must be sent. Until it has been, the receive should not be posted again.
    Answer([u8; SHORT_IU_LEN]),
    /// An event of a logical unit, and the answer to send.
    Event {
        /// Logical unit.
        lun: WireLun,
        /// What happened.
        sense: &'a [u8],
        /// To send.
        answer: [u8; SHORT_IU_LEN],
    },
    /// The target logged us out and will disconnect.
    Logout(riser_scsi::srp::TLogoutReason),
    /// An answer to a request that was given up before.
    Stale,
}
