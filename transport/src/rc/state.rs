//! The states of the two directions of a connection.
//!
//! The queue pair's own state is [`crate::verbs::QpState`]; these are finer and hold only while it
//! lets the direction run.

use std::time::Instant;

use riser_state::State;

/// State of a requester (IBTA 9.7.2, 9.7.5).
///
/// ```text
///           RNR NAK, retries left
///  Ready ───────────────────────────> RnrWait
///    ↑ └─────── time is up ─────────────┘
///    │
///    └── timeout, sequence NAK, implied NAK: go back and stay Ready
/// ```
///
/// A NAK of another kind or retries used up take the queue pair to ERROR, where there is no
/// requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequesterState {
    /// Sends as window, credits and fences allow.
    Ready,
    /// The peer had no receive: sends nothing until the time it asked for has passed.
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

/// State of a responder (IBTA 9.7.3, 9.7.4, 9.7.5).
///
/// ```text
///              a packet ahead of the expected one; no receive for a SEND
///  Expecting ──────────────────────────────────────────────────────────> NakSent
///      ↑ └──────────── the expected packet arrives ────────────────────────┘ │
///      │                                                                     │
///      └──── a request that must be refused, from either ────────────────────┴──> Failed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponderState {
    /// All packets so far came in order.
    Expecting,
    /// A NAK for the expected packet is out; later packets are dropped silently until it arrives.
    NakSent,
    /// A request was refused for good: what was answered before and the NAK still go out, and
    /// nothing is taken in.
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

/// The message that a responder is in the middle of (IBTA 9.7.4.1.1).
///
/// ```text
///         SEND FIRST, MIDDLE…             SEND LAST
///  None ──────────────────────> Send ───────────────> None
///    │    WRITE FIRST, MIDDLE…            WRITE LAST
///    └────────────────────────> Write ──────────────> None
/// ```
///
/// ONLY packets, READs and atomics leave it at `None`. Any other packet is an invalid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// No message is incomplete.
    None,
    /// In a SEND, whose receive is bound.
    Send {
        /// Payload bytes so far.
        received: u32,
    },
    /// In an RDMA WRITE.
    Write {
        /// Key of the region.
        rkey: crate::verbs::RKey,
        /// Address of the next byte.
        addr: u64,
        /// Bytes still to come.
        remaining: u32,
        /// Bytes of the whole message.
        total: u32,
    },
}
