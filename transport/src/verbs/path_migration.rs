//! Path migration state of a connection.

use riser_state::State;

/// Path migration state of a connection (IBTA 17.2.8).
///
/// ```text
///              modify                  packet without MigReq
///  MIGRATED ────────────> REARM ─────────────────────────────> ARMED
///    ↑  ↑                  │ ↑                                  │ │
///    │  └───── modify ─────┘ └───────────── modify ─────────────┘ │
///    └── modify, out of retries, packet with MigReq on the other path: use that path
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PathMigState {
    /// There is a single path and no migration. Packets have the MigReq bit set.
    Migrated,
    /// The alternate path is loaded, but we don't know yet if it is also loaded by the peer.
    /// Packets don't have the MigReq bit set.
    Rearm,
    /// Both sides are ready to migrate. Packets don't have the MigReq bit set.
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
