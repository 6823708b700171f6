//! Configuration, states and information units of a channel.

use riser_scsi::lun::WireLun;
use riser_scsi::srp::{
    ImmediateDataOffset, IndirectTable, InitiatorPortId, MemDesc, MultiChannelAction,
    MultiChannelResult, Rsp, RspCode, SHORT_IU_LEN, TargetPortId, TaskAttr,
};
use riser_state::State;

use crate::request::{Cdb, DataLen};
use crate::srp::descriptor::DescriptorLimits;

/// Configuration of a channel.
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
    /// Initiator port that logs in.
    pub initiator_port: InitiatorPortId,
    /// Target port to log in to.
    pub target_port: TargetPortId,
    /// Action of the target on other channels of this nexus.
    pub multi_channel: MultiChannelAction,
}

/// A channel's state.
///
/// ```text
/// Connecting → LoggingIn → Live
///    │  │         │  │      ↓
///    │  └─────────│──┴→ Disconnecting
///    ↓            ↓         │
/// Disconnected ←──┴─────────┘
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

impl ChannelState {
    /// The state's name, for errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Connecting => "Connecting",
            Self::LoggingIn => "LoggingIn",
            Self::Live => "Live",
            Self::Disconnecting => "Disconnecting",
            Self::Disconnected => "Disconnected",
        }
    }
}

impl State for ChannelState {
    fn may_become(&self, next: &Self) -> bool {
        use ChannelState::{Connecting, Disconnected, Disconnecting, Live, LoggingIn};
        match self {
            Connecting => matches!(next, LoggingIn | Disconnecting | Disconnected),
            LoggingIn => matches!(next, Live | Disconnecting | Disconnected),
            Live => matches!(next, Disconnecting),
            Disconnecting => matches!(next, Disconnected),
            Disconnected => false,
        }
    }
}

/// Outcome of the login's negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The longest information unit that we may send, in bytes.
    pub max_it_iu_len: u32,
    /// Descriptors that a command or a table may hold.
    pub descriptors: DescriptorLimits,
    /// Offset and longest length of immediate data; `None`: not agreed.
    pub immediate: Option<Immediate>,
    /// Result for other channels of this nexus.
    pub multi_channel: MultiChannelResult,
}

/// Immediate data as agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Offset in a command, in bytes.
    pub offset: ImmediateDataOffset,
    /// Its longest, in bytes.
    pub max_len: u32,
}

/// A command's data as it goes into the information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData<'a> {
    /// The command has no data.
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
    /// Logical unit, as on the wire.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Command descriptor block to send.
    pub cdb: &'a Cdb,
    /// Direction and length of the data.
    pub len: DataLen,
    /// Descriptors of the data, or the data themselves.
    pub data: CommandData<'a>,
}

/// Meaning of an arrived information unit for the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// A command was answered; its slot is free when it is retired.
    Response {
        /// The value given when the tag was taken.
        owner: u32,
        /// The answer, as parsed.
        rsp: Rsp<'a>,
    },
    /// The task-management request was answered.
    TskMgmt(RspCode),
    /// An answer must be sent. Until it has been, the receive should not be posted again.
    Answer([u8; SHORT_IU_LEN]),
    /// An event of a logical unit, and the answer to send.
    Event {
        /// Logical unit that reports it.
        lun: WireLun,
        /// The event, as sense data.
        sense: &'a [u8],
        /// SRP_AER_RSP to send back.
        answer: [u8; SHORT_IU_LEN],
    },
    /// The target logged us out and will disconnect.
    Logout(riser_scsi::srp::TLogoutReason),
    /// An answer to a request that was given up before.
    Stale,
}
