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
    /// Maximum number of outstanding commands.
    pub queue_size: u16,
    /// Maximum length of an information unit to request, in bytes; at least 64.
    pub max_it_iu_len: u32,
    /// Maximum number of memory descriptors in a command.
    pub inline_descriptors: u8,
    /// Maximum number of memory descriptors in an external table; 0 disables external tables.
    pub external_descriptors: u32,
    /// Maximum length of immediate data in bytes; 0 disables immediate data.
    pub max_immediate: u32,
    /// Initiator port for the login.
    pub initiator_port: InitiatorPortId,
    /// Target port to log in to.
    pub target_port: TargetPortId,
    /// Action for other channels of this nexus.
    pub multi_channel: MultiChannelAction,
}

/// State of a channel.
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
    /// Resolving the path to the target.
    Connecting,
    /// The connect request, which contains the login, was sent.
    LoggingIn,
    /// The login was accepted; ready for requests.
    Live,
    /// Closing the connection; no new requests.
    Disconnecting,
    /// The connection is closed.
    Disconnected,
}

impl ChannelState {
    /// Returns the name of the state for errors.
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

/// Parameters negotiated in the login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelParameters {
    /// Maximum length of an information unit to send, in bytes.
    pub max_it_iu_len: u32,
    /// Maximum number of descriptors in a command and in a table.
    pub descriptors: DescriptorLimits,
    /// Offset and maximum length of immediate data; `None` if not negotiated.
    pub immediate: Option<Immediate>,
    /// Result for other channels of this nexus.
    pub multi_channel: MultiChannelResult,
}

/// Negotiated parameters of immediate data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Offset in a command, in bytes.
    pub offset: ImmediateDataOffset,
    /// Maximum length in bytes.
    pub max_len: u32,
}

/// Data of a command in an information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData<'a> {
    /// No data.
    None,
    /// In the information unit, after its header.
    Immediate,
    /// In memory, with one descriptor.
    Direct(MemDesc),
    /// In memory, with several descriptors, all of them in the command, or also in a table.
    Indirect(IndirectTable<'a>),
}

/// A command to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandIu<'a> {
    /// Logical unit, in wire format.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Command descriptor block to send.
    pub cdb: &'a Cdb,
    /// Direction and length of the data.
    pub len: DataLen,
    /// Descriptors of the data, or the data itself.
    pub data: CommandData<'a>,
}

/// Result of a received information unit for the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// Response to a command; its slot is freed when it is retired.
    Response {
        /// Value passed when the tag was allocated.
        owner: u32,
        /// The parsed response.
        rsp: Rsp<'a>,
    },
    /// Response to the task-management request.
    TskMgmt(RspCode),
    /// A response must be sent. The receive should not be posted again before this.
    Reply([u8; SHORT_IU_LEN]),
    /// An event of a logical unit, and the response to send.
    Event {
        /// Logical unit that reported it.
        lun: WireLun,
        /// The event, as sense data.
        sense: &'a [u8],
        /// SRP_AER_RSP to send.
        response: [u8; SHORT_IU_LEN],
    },
    /// The target logged us out and will disconnect.
    Logout(riser_scsi::srp::TLogoutReason),
    /// A response to an abandoned request.
    Stale,
}
