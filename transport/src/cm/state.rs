//! Communication ID states.

use riser_state::State;

/// State of a communication ID (IBTA 12.9). The active side sends the connection request, the
/// passive side receives it.
///
/// ```text
///          active                                     passive
///
///           Idle ── listen ──────────────────────────> Listen
///            │ send REQ                                   │ REQ (new ID)
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
///            │  └─ LapSent, LapRcvd, MraLapSent, MraLapRcvd: connected, while an
///            │     alternate path is being negotiated; returns with the APR
///            │
///            ├── send DREQ ──> DreqSent ── DREP, DREQ or timeout ──> Timewait
///            ├── DREQ ──> DreqRcvd ── send DREP ──> Timewait
///            └── REJ, or a REQ that shows a stale connection ──> Timewait
///
///         Timewait ── timer ──> Idle
///
///         Idle ── send SIDR_REQ ──> SidrReqSent ── SIDR_REP or timeout ──> Idle
///         Listen ── SIDR_REQ (new ID) ──> SidrReqRcvd ── send SIDR_REP ──> Idle
/// ```
///
/// A REJ or timeout in any state before `Established` enters `Idle`, or `Timewait` if the QP may
/// have been used or if we may have to send the REJ again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CmState {
    /// ID is unknown or was removed.
    Idle,
    /// Accepts requests for a service ID.
    Listen,
    /// Active side: REQ sent, waiting for a response.
    ReqSent,
    /// Passive side: REQ received, waiting for the user.
    ReqRcvd,
    /// Passive side: REQ received, the user requested more time.
    MraReqSent,
    /// Active side: REQ sent, the peer requested more time.
    MraReqRcvd,
    /// Passive side: REP sent, waiting for the RTU.
    RepSent,
    /// Active side: REP received, waiting for the user.
    RepRcvd,
    /// Active side: REP received, the user requested more time.
    MraRepSent,
    /// Passive side: REP sent, the peer requested more time.
    MraRepRcvd,
    /// The connection is established.
    Established,
    /// Connected: LAP sent, waiting for a response.
    LapSent,
    /// Connected: LAP received, waiting for the user.
    LapRcvd,
    /// Connected: LAP received, the user requested more time.
    MraLapSent,
    /// Connected: LAP sent, the peer requested more time.
    MraLapRcvd,
    /// DREQ sent, waiting for the DREP.
    DreqSent,
    /// DREQ received, waiting for the user.
    DreqRcvd,
    /// Closed, waiting until delayed packets and duplicate messages have left the network.
    Timewait,
    /// SIDR_REQ sent, waiting for a response.
    SidrReqSent,
    /// SIDR_REQ received, waiting for the user.
    SidrReqRcvd,
}

impl CmState {
    /// Returns whether the connection was established and has not been closed by either side.
    #[must_use]
    pub const fn is_connected(self) -> bool {
        matches!(
            self,
            Self::Established | Self::LapSent | Self::LapRcvd | Self::MraLapSent | Self::MraLapRcvd
        )
    }

    /// Returns true if this was created by a request from a peer and is not yet established, so
    /// that it must be counted for the limits on half-open connections.
    #[must_use]
    pub const fn is_half_open(self) -> bool {
        matches!(
            self,
            Self::ReqRcvd | Self::MraReqSent | Self::RepSent | Self::MraRepRcvd | Self::SidrReqRcvd
        )
    }

    /// Returns whether a REQ was sent or responded to. In this case, a new request from the same QP
    /// means that the peer doesn't know this connection anymore.
    pub(super) const fn is_live(self) -> bool {
        !matches!(
            self,
            Self::Idle | Self::Listen | Self::Timewait | Self::SidrReqSent | Self::SidrReqRcvd
        )
    }
}

impl State for CmState {
    /// A new ID can start in any state.
    fn may_become(&self, next: &Self) -> bool {
        use CmState::{
            DreqRcvd, DreqSent, Established, LapRcvd, LapSent, MraLapRcvd, MraLapSent, MraRepRcvd,
            MraRepSent, MraReqRcvd, MraReqSent, RepRcvd, RepSent, Timewait,
        };
        // There is no transition to Idle: the ID is removed from the table instead.
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
