//! The states of a communication identifier.

use riser_state::State;

/// State of an identifier (IBTA 12.9). The active side asks for the
/// connection, the passive side is asked.
///
/// ```text
///          active                                     passive
///
///           Idle ── listen ──────────────────────────> Listen
///            │ send REQ                                   │ REQ (a new identifier)
///            v                                            v
///         ReqSent ── MRA ──> MraReqRcvd     MraReqSent <── send MRA ── ReqRcvd
///            │ REP               │ REP          │ send REP                │ send REP
///            v                   v              v                         v
///         RepRcvd <──────────────┘              └───────────────────> RepSent ── MRA ──> MraRepRcvd
///            │ send MRA ──> MraRepSent                                    │ RTU, or data      │
///            │ send RTU         │ send RTU                                │ (establish)       │
///            v                  v                                         v                   v
///         Established <─────────┘                                    Established <────────────┘
///            │  ^
///            │  └─ LapSent, LapRcvd, MraLapSent, MraLapRcvd: connected, an
///            │     alternate path under discussion; back with the APR
///            │
///            ├── send DREQ ──> DreqSent ── DREP, DREQ or no answer ──> Timewait
///            ├── DREQ ──> DreqRcvd ── send DREP ──> Timewait
///            └── REJ, or a REQ that shows the peer forgot ──> Timewait
///
///         Timewait ── time ──> Idle
///
///         Idle ── send SIDR_REQ ──> SidrReqSent ── SIDR_REP or no answer ──> Idle
///         Listen ── SIDR_REQ (a new identifier) ──> SidrReqRcvd ── send SIDR_REP ──> Idle
/// ```
///
/// A REJ or an answer that never comes leads from every state before
/// `Established` to `Idle`, or to `Timewait` where the queue pair may already
/// have been used or where the refusal may have to be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CmState {
    /// No identifier: unknown, or finished.
    Idle,
    /// Takes requests for a service id.
    Listen,
    /// Active: REQ sent, no answer yet.
    ReqSent,
    /// Passive: REQ received, the user has not answered.
    ReqRcvd,
    /// Passive: REQ received, the user asked for time.
    MraReqSent,
    /// Active: REQ sent, the peer asked for time.
    MraReqRcvd,
    /// Passive: REP sent, no RTU yet.
    RepSent,
    /// Active: REP received, the user has not answered.
    RepRcvd,
    /// Active: REP received, the user asked for time.
    MraRepSent,
    /// Passive: REP sent, the peer asked for time.
    MraRepRcvd,
    /// The connection is established.
    Established,
    /// Connected: LAP sent, no answer yet.
    LapSent,
    /// Connected: LAP received, the user has not answered.
    LapRcvd,
    /// Connected: LAP received, the user asked for time.
    MraLapSent,
    /// Connected: LAP sent, the peer asked for time.
    MraLapRcvd,
    /// DREQ sent, no DREP yet.
    DreqSent,
    /// DREQ received, the user has not answered.
    DreqRcvd,
    /// Over; late packets and repeated messages die out.
    Timewait,
    /// SIDR_REQ sent, no answer yet.
    SidrReqSent,
    /// SIDR_REQ received, the user has not answered.
    SidrReqRcvd,
}

impl CmState {
    /// Whether both sides have agreed on the connection and neither has ended
    /// it.
    #[must_use]
    pub const fn is_connected(self) -> bool {
        matches!(
            self,
            Self::Established | Self::LapSent | Self::LapRcvd | Self::MraLapSent | Self::MraLapRcvd
        )
    }

    /// Whether a peer's request made this identifier and it is not connected
    /// yet: what the limits on half-open connections count.
    #[must_use]
    pub const fn is_half_open(self) -> bool {
        matches!(
            self,
            Self::ReqRcvd | Self::MraReqSent | Self::RepSent | Self::MraRepRcvd | Self::SidrReqRcvd
        )
    }

    /// Whether a REQ has been answered or sent, so that a peer that asks again
    /// from the same queue pair must have forgotten this connection.
    pub(super) const fn is_live(self) -> bool {
        !matches!(
            self,
            Self::Idle | Self::Listen | Self::Timewait | Self::SidrReqSent | Self::SidrReqRcvd
        )
    }
}

impl State for CmState {
    /// A new identifier starts anywhere.
    fn may_become(&self, next: &Self) -> bool {
        use CmState::{
            DreqRcvd, DreqSent, Established, LapRcvd, LapSent, MraLapRcvd, MraLapSent, MraRepRcvd,
            MraRepSent, MraReqRcvd, MraReqSent, RepRcvd, RepSent, Timewait,
        };
        // Idle is not entered by a change: an identifier that ends is removed from the table.
        match self {
            Self::Idle | Self::Listen | Self::SidrReqSent | Self::SidrReqRcvd | Timewait => false,
            Self::ReqSent => matches!(next, MraReqRcvd | RepRcvd),
            MraReqRcvd => matches!(next, RepRcvd),
            Self::ReqRcvd => matches!(next, MraReqSent | RepSent | Timewait),
            MraReqSent => matches!(next, RepSent | Timewait),
            RepSent => matches!(next, MraRepRcvd | Established | DreqRcvd | Timewait),
            MraRepRcvd => matches!(next, Established | DreqRcvd | Timewait),
            RepRcvd => matches!(next, MraRepSent | Established | Timewait),
            MraRepSent => matches!(next, Established | Timewait),
            Established => matches!(next, LapSent | LapRcvd | DreqSent | DreqRcvd | Timewait),
            LapSent => matches!(
                next,
                MraLapRcvd | Established | DreqSent | DreqRcvd | Timewait
            ),
            LapRcvd => matches!(
                next,
                MraLapSent | Established | DreqSent | DreqRcvd | Timewait
            ),
            MraLapSent | MraLapRcvd => matches!(next, Established | DreqSent | DreqRcvd | Timewait),
            DreqSent | DreqRcvd => matches!(next, Timewait),
        }
    }
}
