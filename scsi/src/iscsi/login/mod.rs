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
    Answer, Auth, CompletedLogin, Gatekeeper, Identity, Outcome, Refusal, TargetLogin, Terms,
};

use super::frame::Digests;
use super::keys::{Key, Negotiation, Sender};

/// Rounds of a login at most: an honest one takes five.
pub const MAX_ROUNDS: u32 = 32;

/// Parameters of a session that a login agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionParams {
    /// The session is one of discovery.
    pub discovery: bool,
    /// Largest number of connections in the session.
    pub max_connections: u16,
    /// All data but immediate data wait for an R2T.
    pub initial_r2t: bool,
    /// Commands may carry data.
    pub immediate_data: bool,
    /// Longest sequence of data PDUs, in bytes.
    pub max_burst: u32,
    /// Unsolicited data of a command at most, in bytes; `max_burst` at most.
    pub first_burst: u32,
    /// R2Ts of a command outstanding at most.
    pub max_outstanding_r2t: u16,
    /// Seconds to wait before reconnecting.
    pub time2wait: u16,
    /// Seconds that tasks are kept after that.
    pub time2retain: u16,
    /// Error recovery level, from 0 to 2.
    pub error_recovery_level: u8,
    /// Offsets grow within a sequence.
    pub data_pdu_in_order: bool,
    /// Offsets grow from sequence to sequence.
    pub data_sequence_in_order: bool,
    /// The connection is one of iSER.
    pub rdma_extensions: bool,
    /// Answer of the initiator about the buffer that it advertises for a write (RFC 7145 6.9):
    /// whether it begins with the first solicited byte, rather than with the first byte of all.
    pub tagged_solicited_only: Option<bool>,
    /// Whether the initiator begins full-feature phase with a Hello (RFC 7145 6.10); `None` if it
    /// has not said so, as one of RFC 5046, which may or may not.
    pub hello_required: Option<bool>,
    /// iSCSIProtocolLevel: from 2 on, RFC 7144 applies.
    pub protocol_level: u8,
}

/// Parameters of a connection that a login agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionParams {
    /// Digests of this connection.
    pub digests: Digests,
    /// Longest data segment that we send, in bytes.
    pub max_send_segment: u32,
    /// Longest data segment that we take, in bytes.
    pub max_recv_segment: u32,
    /// Unexpected PDUs that the peer takes at once (RFC 7145 6.7); zero where it sets no limit.
    pub max_unexpected_pdus: u32,
}

fn session_params(keys: &Negotiation, discovery: bool) -> SessionParams {
    let agreed = keys.agreed();
    // Both burst lengths are minima of two sides, so each may be legal while the pair is not:
    // FirstBurstLength must not exceed MaxBurstLength (RFC 7143 13.14).
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

/// The parameters of the connection, as `side` sees them.
///
/// Over RDMA the lengths of data segments are negotiated for each direction, and
/// MaxRecvDataSegmentLength means nothing (RFC 7145 6.2). A discovery session has no such keys.
fn connection_params(keys: &Negotiation, side: Sender, discovery: bool) -> ConnectionParams {
    let (max_send_segment, max_recv_segment) = if keys.is_rdma() && !discovery {
        let to_initiator = keys.agreed().of(Key::InitiatorRecvDataSegmentLength);
        let to_target = keys.agreed().of(Key::TargetRecvDataSegmentLength);
        match side {
            Sender::Initiator => (to_target, to_initiator),
            _ => (to_initiator, to_target),
        }
    } else {
        // Each side declares what it takes, so what we may send is the peer's word, and what we
        // take our own (RFC 7143 13.12).
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
