//! [`Phase`] of a connection.

use riser_scsi::iscsi::Itt;
use riser_state::State;

/// Connection phase.
///
/// ```text
///  Login ──→ (Joining) ──→ FullFeature ──→ LoggingOut ──→ Closing ──→ Closed
///    └───────────┴─────────────┴──── error ───────────────────┘
/// ```
///
/// If the login fails, the response is sent in the Closing phase.
///
/// At error recovery level 2, a connection that is lost during full-feature phase isn't closed
/// immediately (RFC 7143 8.2):
///
/// ```text
///  FullFeature ──lost──→ CleanupWait ──logged out for recovery──→ Retaining ──→ Closed
///    │                      ↑ └────────────── timeout ──────────────────────────┘
///    └── logs itself out for recovery ──→ Closing
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Exchanging login PDUs. If we receive any other PDU, the connection is closed.
    Login,
    /// Login succeeded. Wait until the commands of replaced sessions are no longer at a device, but
    /// at most [`REINSTATEMENT`](super::login::REINSTATEMENT).
    Joining,
    /// Processing commands, or text requests in a discovery session.
    FullFeature,
    /// Waiting for commands to complete before responding to the logout with this tag.
    LoggingOut(Itt),
    /// Sending the remaining PDUs before closing the connection.
    Closing,
    /// The connection was lost. Commands are kept until it's logged out.
    CleanupWait,
    /// The connection is logged out. Commands are kept for a TASK REASSIGN on another connection.
    Retaining,
    /// The connection is closed, but devices might still be using buffers.
    Closed,
}

impl State for Phase {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Login => matches!(next, Self::Joining | Self::Closing | Self::Closed),
            Self::Joining => matches!(next, Self::FullFeature | Self::Closed),
            Self::FullFeature => matches!(
                next,
                Self::LoggingOut(_) | Self::Closing | Self::CleanupWait | Self::Closed
            ),
            Self::LoggingOut(_) => matches!(next, Self::Closing | Self::Closed),
            Self::Closing => matches!(next, Self::CleanupWait | Self::Closed),
            Self::CleanupWait => matches!(next, Self::Retaining | Self::Closed),
            Self::Retaining => matches!(next, Self::Closed),
            Self::Closed => false,
        }
    }
}
