//! The state of a connection's path migration.

use riser_state::State;

/// State of a connection's path migration (IBTA 17.2.8).
///
/// ```text
///              modify                  packet without MigReq
///  MIGRATED ────────────> REARM ─────────────────────────────> ARMED
///    ↑  ↑                  │ ↑                                  │ │
///    │  └───── modify ─────┘ └───────────── modify ─────────────┘ │
///    └── modify, retries used up, packet with MigReq on the other path: to that path
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathMigState {
    /// There is one path, and nothing migrates. Packets have the MigReq bit.
    Migrated,
    /// The alternate path is loaded here; the peer has not shown yet that it is there as well.
    /// Packets do not have the bit.
    Rearm,
    /// Both sides are ready to migrate. Packets do not have the bit.
    Armed,
}

impl State for PathMigState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Migrated => matches!(next, Self::Rearm),
            Self::Rearm => matches!(next, Self::Armed | Self::Migrated),
            Self::Armed => matches!(next, Self::Migrated | Self::Rearm),
        }
    }
}
