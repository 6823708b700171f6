//! States for both directions of a connection.
//!
//! The state of the QP itself is [`crate::verbs::QpState`]. The states here provide more detail and
//! are only used while the direction is active.

use std::time::Instant;

use riser_state::State;

/// Requester state (IBTA 9.7.2, 9.7.5).
///
/// ```text
///           RNR NAK, retries left
///  Ready ───────────────────────────> RnrWait
///    ↑ └─────── timer expired ──────────┘
///    │
///    └── timeout, sequence NAK, implied NAK: go back and stay Ready
/// ```
///
/// On any other NAK or when running out of retries, the QP enters ERROR and the requester is not
/// used anymore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequesterState {
    /// Sends packets if allowed by window, credits and fences.
    Ready,
    /// No receive was available at the peer, so we must not send until this time.
    RnrWait(Instant),
}

impl State for RequesterState {
    fn may_become(&self, next: &Self) -> bool {
        matches!(
            (self, next),
            (Self::Ready, Self::RnrWait(_)) | (Self::RnrWait(_), Self::Ready)
        )
    }
}

/// Responder state (IBTA 9.7.3, 9.7.4, 9.7.5).
///
/// ```text
///              packet ahead of the expected one; no receive for a SEND
///  Expecting ──────────────────────────────────────────────────────────> NakSent
///      ↑ └──────────── expected packet received ───────────────────────────┘ │
///      │                                                                     │
///      └──── request rejected, from either state ────────────────────────────┴──> Failed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponderState {
    /// All packets were received in order.
    Expecting,
    /// A NAK was sent for the expected packet. Later packets are silently dropped until it is
    /// received.
    NakSent,
    /// A request was rejected permanently. Previous responses and the NAK are still sent, but no
    /// more packets are processed.
    Failed,
}

impl State for ResponderState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Expecting => matches!(next, Self::NakSent | Self::Failed),
            Self::NakSent => matches!(next, Self::Expecting | Self::Failed),
            Self::Failed => false,
        }
    }
}

/// Message currently being received by a responder (IBTA 9.7.4.1.1).
///
/// ```text
///         SEND FIRST, MIDDLE…             SEND LAST
///  None ──────────────────────> Send ───────────────> None
///    │    WRITE FIRST, MIDDLE…            WRITE LAST
///    └────────────────────────> Write ──────────────> None
/// ```
///
/// The state remains `None` for ONLY packets, READs and atomics. Any other packet is an invalid
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// There is no incomplete message.
    None,
    /// SEND with a bound receive.
    Send {
        /// Number of payload bytes received.
        received: u32,
    },
    /// RDMA WRITE.
    Write {
        /// Region key.
        rkey: crate::verbs::RKey,
        /// Address of the next byte.
        addr: u64,
        /// Number of remaining bytes.
        remaining: u32,
        /// Total message size in bytes.
        total: u32,
    },
}
