//! Login, as a machine for each side.
//!
//! ```text
//!             ┌─────────────────────────────┐
//!   first ──→ │ SecurityNegotiation         │ AuthMethod, CHAP_*
//!    │        └──────────────┬──────────────┘
//!    │ no authentication     │ T, NSG=1          T, NSG=3
//!    └──────→ ┌──────────────▼──────────────┐       │
//!             │ LoginOperationalNegotiation │ keys  │
//!             └──────────────┬──────────────┘       │
//!                            │ T, NSG=3             │
//!             ┌──────────────▼──────────────┐       │
//!             │ FullFeaturePhase            │ ←─────┘
//!             └─────────────────────────────┘
//! ```
//!
//! Neither side has a clock: who runs a machine limits its time. Both limit the rounds, the text
//! taken and the text given. Randomness comes from outside.

mod initiator;
mod target;

pub use initiator::{InitiatorConfig, InitiatorLogin, LoginError, LoginStep};
pub use target::{
    Answer, Auth, Gatekeeper, Identity, Joined, Outcome, Refusal, TargetLogin, Terms,
};

use super::frame::Digests;
use super::keys::{Key, Negotiation};

/// Rounds of a login at most: an honest one takes five.
pub const MAX_ROUNDS: u32 = 32;

/// What a login agreed on, for the session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionParams {
    /// Whether the session is one of discovery.
    pub discovery: bool,
    /// Connections at most.
    pub max_connections: u16,
    /// Whether all data but immediate data wait for an R2T.
    pub initial_r2t: bool,
    /// Whether commands may carry data.
    pub immediate_data: bool,
    /// Longest sequence of data PDUs, in bytes.
    pub max_burst: u32,
    /// Unsolicited data of a command at most, in bytes; no more than `max_burst`.
    pub first_burst: u32,
    /// R2Ts of a command outstanding at most.
    pub max_outstanding_r2t: u16,
    /// Seconds to wait before reconnecting.
    pub time2wait: u16,
    /// Seconds that tasks are kept after that.
    pub time2retain: u16,
    /// Error recovery level.
    pub error_recovery_level: u8,
    /// Whether offsets grow within a sequence.
    pub data_pdu_in_order: bool,
    /// Whether offsets grow from sequence to sequence.
    pub data_sequence_in_order: bool,
    /// Whether the connection is one of iSER.
    pub rdma_extensions: bool,
    /// iSCSIProtocolLevel: from 2 on, RFC 7144 applies.
    pub protocol_level: u8,
}

/// What a login agreed on, for the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionParams {
    /// Digests.
    pub digests: Digests,
    /// Longest data segment that we send, in bytes.
    pub max_send_segment: u32,
    /// Longest data segment that we take, in bytes.
    pub max_recv_segment: u32,
}

fn session_params(keys: &Negotiation, discovery: bool) -> SessionParams {
    let agreed = keys.agreed();
    let max_burst = agreed.of(Key::MaxBurstLength);
    SessionParams {
        discovery,
        max_connections: agreed.of(Key::MaxConnections) as u16,
        initial_r2t: agreed.is(Key::InitialR2T),
        immediate_data: agreed.is(Key::ImmediateData),
        max_burst,
        first_burst: agreed.of(Key::FirstBurstLength).min(max_burst),
        max_outstanding_r2t: agreed.of(Key::MaxOutstandingR2T) as u16,
        time2wait: agreed.of(Key::DefaultTime2Wait) as u16,
        time2retain: agreed.of(Key::DefaultTime2Retain) as u16,
        error_recovery_level: agreed.of(Key::ErrorRecoveryLevel) as u8,
        data_pdu_in_order: agreed.is(Key::DataPduInOrder),
        data_sequence_in_order: agreed.is(Key::DataSequenceInOrder),
        rdma_extensions: agreed.is(Key::RdmaExtensions),
        protocol_level: agreed.of(Key::IscsiProtocolLevel) as u8,
    }
}

fn connection_params(keys: &Negotiation) -> ConnectionParams {
    ConnectionParams {
        digests: keys.digests(),
        max_send_segment: keys.peer().of(Key::MaxRecvDataSegmentLength),
        max_recv_segment: keys.offer().values.of(Key::MaxRecvDataSegmentLength),
    }
}
