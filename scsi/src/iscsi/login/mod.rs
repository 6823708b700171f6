//! Login state machines for both sides.
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
//! There's no clock in these state machines, so the caller must provide a timeout. The number of
//! requests and the amount of text received and sent are limited. The caller must also provide a
//! source of random data.

mod initiator;
mod target;

pub use initiator::{InitiatorConfig, InitiatorLogin, LoginError, LoginStep};
pub use target::{
    Auth, CompletedLogin, Gatekeeper, Identity, LoginFault, LoginReply, Outcome, Refusal,
    TargetLogin, Terms,
};

use super::frame::Digests;
use super::keys::{Key, Negotiation, Sender};

/// Maximum number of requests in a login. A normal login only needs five.
pub const MAX_ROUNDS: u32 = 32;

/// Session parameters that were negotiated in a login.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionParams {
    /// Set for a discovery session.
    pub discovery: bool,
    /// Maximum number of connections in this session.
    pub max_connections: u16,
    /// If set, an R2T is required for all data except for immediate data.
    pub initial_r2t: bool,
    /// If set, commands can contain immediate data.
    pub immediate_data: bool,
    /// Maximum size of a data sequence, in bytes.
    pub max_burst: u32,
    /// Maximum size of unsolicited data per command, in bytes. This is never more than `max_burst`.
    pub first_burst: u32,
    /// Maximum number of outstanding R2Ts per command.
    pub max_outstanding_r2t: u16,
    /// Delay before reconnecting, in seconds.
    pub time2wait: u16,
    /// Time for which tasks are kept after that, in seconds.
    pub time2retain: u16,
    /// Error recovery level, from 0 to 2.
    pub error_recovery_level: u8,
    /// Offsets must be increasing in a sequence.
    pub data_pdu_in_order: bool,
    /// Offsets must be increasing between sequences.
    pub data_sequence_in_order: bool,
    /// Set for an iSER connection.
    pub rdma_extensions: bool,
    /// Value declared by the initiator for write buffers (RFC 7145 6.9). If true, a buffer starts
    /// with the first solicited byte instead of the first byte.
    pub tagged_solicited_only: Option<bool>,
    /// Set when the initiator will send a Hello at the start of the full-feature phase (RFC 7145
    /// 6.10). This is `None` if it wasn't declared, in which case an RFC 5046 initiator may or may
    /// not send it.
    pub hello_required: Option<bool>,
    /// iSCSIProtocolLevel. RFC 7144 can be used when this is at least 2.
    pub protocol_level: u8,
}

/// Connection parameters that were negotiated in a login.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionParams {
    /// Digests for this connection.
    pub digests: Digests,
    /// Maximum size of a data segment that we can send, in bytes.
    pub max_send_segment: u32,
    /// Maximum size of a data segment that we can receive, in bytes.
    pub max_recv_segment: u32,
    /// Maximum number of unexpected PDUs that the peer can receive (RFC 7145 6.7), or zero if there
    /// is no limit.
    pub max_unexpected_pdus: u32,
}

fn session_params(keys: &Negotiation, discovery: bool) -> SessionParams {
    let agreed = keys.agreed();
    // Each burst length is the minimum of two values, so both can be valid even if the combination
    // is not: FirstBurstLength must not be more than MaxBurstLength (RFC 7143 13.14).
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
        tagged_solicited_only: keys
            .has_seen(Key::TaggedBufferForSolicitedDataOnly)
            .then(|| keys.peer().is(Key::TaggedBufferForSolicitedDataOnly)),
        hello_required: keys
            .has_seen(Key::IserHelloRequired)
            .then(|| keys.peer().is(Key::IserHelloRequired)),
        protocol_level: agreed.of(Key::IscsiProtocolLevel) as u8,
    }
}

/// Returns the connection parameters for the given `side`.
///
/// With RDMA, the data segment length is negotiated for each direction, and
/// MaxRecvDataSegmentLength is not used (RFC 7145 6.2). The new keys are not used in a discovery
/// session.
fn connection_params(keys: &Negotiation, side: Sender, discovery: bool) -> ConnectionParams {
    let (max_send_segment, max_recv_segment) = if keys.is_rdma() && !discovery {
        let to_initiator = keys.agreed().of(Key::InitiatorRecvDataSegmentLength);
        let to_target = keys.agreed().of(Key::TargetRecvDataSegmentLength);
        match side {
            Sender::Initiator => (to_target, to_initiator),
            _ => (to_initiator, to_target),
        }
    } else {
        // Each side declares its receive limit, so we need to use the value of the peer for sending
        // and our own value for receiving (RFC 7143 13.12).
        (
            keys.peer().of(Key::MaxRecvDataSegmentLength),
            keys.offer().values.of(Key::MaxRecvDataSegmentLength),
        )
    };
    ConnectionParams {
        digests: keys.digests(),
        max_send_segment,
        max_recv_segment,
        max_unexpected_pdus: keys.peer().of(Key::MaxOutstandingUnexpectedPdus),
    }
}
