//! Queue pair state table (IBTA 11.2.5.2, table 91), and validation of modify requests.
//!
//! Each row defines a transition with its required and optional attributes per queue pair type. If
//! something is not in the table, it is not allowed: [`plan_modify`] returns an error if there is
//! no row for the transition, if a required attribute is missing, or if an attribute is not listed
//! in the row. A request without a state is treated as a transition from the current state to
//! itself.

use bitflags::bitflags;
use riser_state::State;

use super::{QpAttr, QpState, QpType, VerbsError};

bitflags! {
    /// Set of attributes in a [`QpAttr`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Attrs: u32 {
        /// `pkey_index`: P_Key index.
        const PKEY_INDEX = 1;
        /// `port`: port number.
        const PORT = 1 << 1;
        /// `access`: remote access rights.
        const ACCESS = 1 << 2;
        /// `qkey`: Q_Key for datagrams.
        const QKEY = 1 << 3;
        /// `ah`: path to the peer.
        const AH = 1 << 4;
        /// `path_mtu`: path MTU.
        const PATH_MTU = 1 << 5;
        /// `dest_qp`: queue pair number of the peer.
        const DEST_QP = 1 << 6;
        /// `rq_psn`: first PSN expected.
        const RQ_PSN = 1 << 7;
        /// `sq_psn`: first PSN sent.
        const SQ_PSN = 1 << 8;
        /// `max_dest_rd_atomic`: maximum number of incoming READs and atomics.
        const MAX_DEST_RD_ATOMIC = 1 << 9;
        /// `max_rd_atomic`: maximum number of outgoing READs and atomics.
        const MAX_RD_ATOMIC = 1 << 10;
        /// `min_rnr_timer`: RNR NAK timer code.
        const MIN_RNR_TIMER = 1 << 11;
        /// `timeout`: local ACK timeout code.
        const TIMEOUT = 1 << 12;
        /// `retry_cnt`: retry count for timeouts.
        const RETRY_CNT = 1 << 13;
        /// `rnr_retry`: retry count for RNR NAKs.
        const RNR_RETRY = 1 << 14;
        /// `pkey`: only returned, never set.
        const PKEY = 1 << 15;
        /// `alt_path`: alternate path.
        const ALT_PATH = 1 << 16;
        /// `path_mig_state`: path migration state.
        const PATH_MIG_STATE = 1 << 17;
        /// `en_sqd_async_notify`: event when the send queue is drained.
        const EN_SQD_ASYNC_NOTIFY = 1 << 18;
        /// `sq_draining`: only returned, never set.
        const SQ_DRAINING = 1 << 19;
    }
}

impl Attrs {
    /// Returns the attributes set in `attr`, without the state.
    #[must_use]
    pub fn of(attr: &QpAttr) -> Self {
        let mut set = Self::empty();
        set.set(Self::PKEY_INDEX, attr.pkey_index.is_some());
        set.set(Self::PORT, attr.port.is_some());
        set.set(Self::ACCESS, attr.access.is_some());
        set.set(Self::QKEY, attr.qkey.is_some());
        set.set(Self::AH, attr.ah.is_some());
        set.set(Self::PATH_MTU, attr.path_mtu.is_some());
        set.set(Self::DEST_QP, attr.dest_qp.is_some());
        set.set(Self::RQ_PSN, attr.rq_psn.is_some());
        set.set(Self::SQ_PSN, attr.sq_psn.is_some());
        set.set(Self::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic.is_some());
        set.set(Self::MAX_RD_ATOMIC, attr.max_rd_atomic.is_some());
        set.set(Self::MIN_RNR_TIMER, attr.min_rnr_timer.is_some());
        set.set(Self::TIMEOUT, attr.timeout.is_some());
        set.set(Self::RETRY_CNT, attr.retry_cnt.is_some());
        set.set(Self::RNR_RETRY, attr.rnr_retry.is_some());
        set.set(Self::PKEY, attr.pkey.is_some());
        set.set(Self::ALT_PATH, attr.alt_path.is_some());
        set.set(Self::PATH_MIG_STATE, attr.path_mig_state.is_some());
        set.set(
            Self::EN_SQD_ASYNC_NOTIFY,
            attr.en_sqd_async_notify.is_some(),
        );
        set.set(Self::SQ_DRAINING, attr.sq_draining.is_some());
        set
    }

    /// Returns the name of the first attribute in the set, used for errors.
    fn first_name(self) -> &'static str {
        match self.iter().next() {
            Some(Self::PKEY_INDEX) => "pkey_index",
            Some(Self::PORT) => "port",
            Some(Self::ACCESS) => "access",
            Some(Self::QKEY) => "qkey",
            Some(Self::AH) => "ah",
            Some(Self::PATH_MTU) => "path_mtu",
            Some(Self::DEST_QP) => "dest_qp",
            Some(Self::RQ_PSN) => "rq_psn",
            Some(Self::SQ_PSN) => "sq_psn",
            Some(Self::MAX_DEST_RD_ATOMIC) => "max_dest_rd_atomic",
            Some(Self::MAX_RD_ATOMIC) => "max_rd_atomic",
            Some(Self::MIN_RNR_TIMER) => "min_rnr_timer",
            Some(Self::TIMEOUT) => "timeout",
            Some(Self::RETRY_CNT) => "retry_cnt",
            Some(Self::RNR_RETRY) => "rnr_retry",
            Some(Self::PKEY) => "pkey",
            Some(Self::ALT_PATH) => "alt_path",
            Some(Self::PATH_MIG_STATE) => "path_mig_state",
            Some(Self::EN_SQD_ASYNC_NOTIFY) => "en_sqd_async_notify",
            Some(Self::SQ_DRAINING) => "sq_draining",
            _ => "nothing",
        }
    }
}

/// Attributes for a transition and queue pair type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Required attributes.
    pub required: Attrs,
    /// Optional attributes.
    pub optional: Attrs,
}

/// Transition in the table. There is no rule for a queue pair type that doesn't support it.
#[derive(Debug)]
pub struct Transition {
    /// Previous state.
    pub from: QpState,
    /// New state.
    pub to: QpState,
    /// Rule for reliable connections.
    pub rc: Option<Rule>,
    /// Rule for unreliable connections.
    pub uc: Option<Rule>,
    /// Rule for initiators of extended reliable connections.
    pub xrc_ini: Option<Rule>,
    /// Rule for targets of extended reliable connections.
    pub xrc_tgt: Option<Rule>,
    /// Rule for datagram queue pairs.
    pub ud: Option<Rule>,
    /// Rule for queue pair 1.
    pub gsi: Option<Rule>,
}

macro_rules! attrs {
    ($($name:ident)*) => { Attrs::empty()$(.union(Attrs::$name))* };
}

macro_rules! rule {
    (-) => { None };
    ([$($required:ident)*] [$($optional:ident)*]) => {
        Some(Rule { required: attrs!($($required)*), optional: attrs!($($optional)*) })
    };
}

macro_rules! transitions {
    ($($from:ident => $to:ident { rc: $rc:tt; uc: $uc:tt; xrc_ini: $ini:tt; xrc_tgt: $tgt:tt; ud: $ud:tt; gsi: $gsi:tt; })*) => {
        /// All transitions except for those to RESET and ERROR, which are valid in all states and
        /// don't allow any attributes.
        pub static TRANSITIONS: &[Transition] = &[$(Transition {
            from: QpState::$from,
            to: QpState::$to,
            rc: transitions!(@ $rc),
            uc: transitions!(@ $uc),
            xrc_ini: transitions!(@ $ini),
            xrc_tgt: transitions!(@ $tgt),
            ud: transitions!(@ $ud),
            gsi: transitions!(@ $gsi),
        }),*];
    };
    (@ (- )) => { rule!(-) };
    (@ ([$($required:ident)*] [$($optional:ident)*])) => { rule!([$($required)*] [$($optional)*]) };
}

transitions! {
    Reset => Init {
        rc: ([PKEY_INDEX PORT ACCESS] []);
        uc: ([PKEY_INDEX PORT ACCESS] []);
        xrc_ini: ([PKEY_INDEX PORT ACCESS] []);
        xrc_tgt: ([PKEY_INDEX PORT ACCESS] []);
        ud: ([PKEY_INDEX PORT QKEY] []);
        gsi: ([PKEY_INDEX QKEY] [PORT]);
    }
    Init => Init {
        rc: ([] [PKEY_INDEX PORT ACCESS]);
        uc: ([] [PKEY_INDEX PORT ACCESS]);
        xrc_ini: ([] [PKEY_INDEX PORT ACCESS]);
        xrc_tgt: ([] [PKEY_INDEX PORT ACCESS]);
        ud: ([] [PKEY_INDEX PORT QKEY]);
        gsi: ([] [PKEY_INDEX QKEY]);
    }
    Init => Rtr {
        rc: ([AH PATH_MTU DEST_QP RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER] [PKEY_INDEX ACCESS ALT_PATH]);
        uc: ([AH PATH_MTU DEST_QP RQ_PSN] [PKEY_INDEX ACCESS ALT_PATH]);
        xrc_ini: ([AH PATH_MTU DEST_QP RQ_PSN] [PKEY_INDEX ACCESS ALT_PATH]);
        xrc_tgt: ([AH PATH_MTU DEST_QP RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER] [PKEY_INDEX ACCESS ALT_PATH]);
        ud: ([] [PKEY_INDEX QKEY]);
        gsi: ([] [PKEY_INDEX QKEY]);
    }
    Rtr => Rts {
        rc: ([SQ_PSN MAX_RD_ATOMIC TIMEOUT RETRY_CNT RNR_RETRY] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        uc: ([SQ_PSN] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_ini: ([SQ_PSN MAX_RD_ATOMIC TIMEOUT RETRY_CNT RNR_RETRY] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_tgt: ([SQ_PSN TIMEOUT] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        ud: ([SQ_PSN] [QKEY]);
        gsi: ([SQ_PSN] [QKEY]);
    }
    Rts => Rts {
        rc: ([] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        uc: ([] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_ini: ([] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_tgt: ([] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        ud: ([] [QKEY]);
        gsi: ([] [QKEY]);
    }
    Rts => Sqd {
        rc: ([] [EN_SQD_ASYNC_NOTIFY]);
        uc: ([] [EN_SQD_ASYNC_NOTIFY]);
        xrc_ini: ([] [EN_SQD_ASYNC_NOTIFY]);
        xrc_tgt: ([] [EN_SQD_ASYNC_NOTIFY]);
        ud: ([] [EN_SQD_ASYNC_NOTIFY]);
        gsi: ([] [EN_SQD_ASYNC_NOTIFY]);
    }
    Sqd => Rts {
        rc: ([] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        uc: ([] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_ini: ([] [ACCESS ALT_PATH PATH_MIG_STATE]);
        xrc_tgt: ([] [ACCESS MIN_RNR_TIMER ALT_PATH PATH_MIG_STATE]);
        ud: ([] [QKEY]);
        gsi: ([] [QKEY]);
    }
    Sqd => Sqd {
        rc: ([] [PKEY_INDEX PORT ACCESS AH MAX_DEST_RD_ATOMIC MAX_RD_ATOMIC MIN_RNR_TIMER TIMEOUT RETRY_CNT RNR_RETRY ALT_PATH PATH_MIG_STATE]);
        uc: ([] [PKEY_INDEX ACCESS AH ALT_PATH PATH_MIG_STATE]);
        xrc_ini: ([] [PKEY_INDEX PORT ACCESS AH MAX_RD_ATOMIC TIMEOUT RETRY_CNT RNR_RETRY ALT_PATH PATH_MIG_STATE]);
        xrc_tgt: ([] [PKEY_INDEX PORT ACCESS AH MAX_DEST_RD_ATOMIC MIN_RNR_TIMER TIMEOUT ALT_PATH PATH_MIG_STATE]);
        ud: ([] [PKEY_INDEX QKEY]);
        gsi: ([] [PKEY_INDEX QKEY]);
    }
    Sqe => Rts {
        rc: (-);
        uc: ([] [ACCESS]);
        xrc_ini: (-);
        xrc_tgt: (-);
        ud: ([] [QKEY]);
        gsi: ([] [QKEY]);
    }
}

/// Returns the rule for a transition, or `None` if the transition is not in the table.
#[must_use]
pub fn rule(qp_type: QpType, from: QpState, to: QpState) -> Option<Rule> {
    // These are valid in any state, including ERROR, as they are the only way to recover a failed
    // queue pair.
    if matches!(to, QpState::Reset | QpState::Error) {
        return Some(Rule {
            required: Attrs::empty(),
            optional: Attrs::empty(),
        });
    }
    let row = TRANSITIONS.iter().find(|t| t.from == from && t.to == to)?;
    match qp_type {
        QpType::Rc => row.rc,
        QpType::Uc => row.uc,
        QpType::XrcIni => row.xrc_ini,
        QpType::XrcTgt => row.xrc_tgt,
        QpType::Ud => row.ud,
        QpType::Gsi => row.gsi,
        QpType::Smi | QpType::RawPacket => None,
    }
}

/// State of a queue pair with its type, used by the state machines. In addition to requested
/// transitions, an unreliable queue pair enters SQE if a request fails (IBTA 10.3.1.6): from RTS,
/// and for a connection also from SQD while completing a current message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct OfType(pub(crate) QpType, pub(crate) QpState);

impl std::fmt::Debug for OfType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.1.fmt(f)
    }
}

impl State for OfType {
    fn may_become(&self, next: &Self) -> bool {
        let Self(qp_type, from) = *self;
        // Without acknowledgements, the queue pair stops sending instead of entering ERROR like a
        // reliable connection.
        let fails = match (qp_type, from) {
            (QpType::Rc | QpType::XrcIni | QpType::XrcTgt, _) => false,
            (QpType::Uc, QpState::Sqd) | (_, QpState::Rts) => next.1 == QpState::Sqe,
            _ => false,
        };
        fails || rule(qp_type, from, next.1).is_some()
    }
}

/// Changes the state of a queue pair.
///
/// # Panics
/// Panics if the transition is not in the table.
pub(crate) fn become_state(state: &mut QpState, qp_type: QpType, next: QpState) {
    riser_state::become_state(&mut OfType(qp_type, *state), OfType(qp_type, next));
    *state = next;
}

/// Validates a modify request and returns the new state.
///
/// # Errors
/// [`VerbsError::InvalidTransition`], [`VerbsError::MissingAttribute`],
/// [`VerbsError::ForbiddenAttribute`].
pub fn plan_modify(qp_type: QpType, from: QpState, attr: &QpAttr) -> Result<QpState, VerbsError> {
    // Without a state, this only changes attributes. In the table, this is a transition to the same
    // state.
    let to = attr.state.unwrap_or(from);
    let rule = rule(qp_type, from, to).ok_or(VerbsError::InvalidTransition { from, to })?;
    let given = Attrs::of(attr);
    let missing = rule.required - given;
    if !missing.is_empty() {
        return Err(VerbsError::MissingAttribute {
            to,
            attribute: missing.first_name(),
        });
    }
    let forbidden = given - rule.required - rule.optional;
    if !forbidden.is_empty() {
        return Err(VerbsError::ForbiddenAttribute {
            to,
            attribute: forbidden.first_name(),
        });
    }
    Ok(to)
}

/// All queue pair states.
#[cfg(test)]
pub(crate) const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];

#[cfg(test)]
mod tests {
    use riser_state::testing::table;

    use super::*;
    use crate::verbs::{Access, AhAttr, AltPath, Gid, Mtu, PKey, PathMigState, QKey};

    const TYPES: [QpType; 6] = [
        QpType::Rc,
        QpType::Uc,
        QpType::XrcIni,
        QpType::XrcTgt,
        QpType::Ud,
        QpType::Gsi,
    ];

    fn is_reliable(qp_type: QpType) -> bool {
        matches!(qp_type, QpType::Rc | QpType::XrcIni | QpType::XrcTgt)
    }

    /// Creates a request that only contains `set`.
    fn request(to: QpState, set: Attrs) -> QpAttr {
        let ah = AhAttr::new(Gid::default());
        let has = |a| set.contains(a);
        QpAttr {
            state: Some(to),
            pkey_index: has(Attrs::PKEY_INDEX).then_some(0),
            port: has(Attrs::PORT).then_some(1),
            access: has(Attrs::ACCESS).then_some(Access::empty()),
            qkey: has(Attrs::QKEY).then_some(QKey(1)),
            ah: has(Attrs::AH).then_some(ah),
            path_mtu: has(Attrs::PATH_MTU).then_some(Mtu::Mtu1024),
            dest_qp: has(Attrs::DEST_QP).then_some(2),
            rq_psn: has(Attrs::RQ_PSN).then_some(3),
            sq_psn: has(Attrs::SQ_PSN).then_some(4),
            max_dest_rd_atomic: has(Attrs::MAX_DEST_RD_ATOMIC).then_some(1),
            max_rd_atomic: has(Attrs::MAX_RD_ATOMIC).then_some(1),
            min_rnr_timer: has(Attrs::MIN_RNR_TIMER).then_some(1),
            timeout: has(Attrs::TIMEOUT).then_some(1),
            retry_cnt: has(Attrs::RETRY_CNT).then_some(1),
            rnr_retry: has(Attrs::RNR_RETRY).then_some(1),
            pkey: has(Attrs::PKEY).then_some(PKey::DEFAULT),
            alt_path: has(Attrs::ALT_PATH).then_some(AltPath {
                ah,
                pkey_index: 0,
                timeout: 1,
            }),
            path_mig_state: has(Attrs::PATH_MIG_STATE).then_some(PathMigState::Rearm),
            en_sqd_async_notify: has(Attrs::EN_SQD_ASYNC_NOTIFY).then_some(true),
            sq_draining: has(Attrs::SQ_DRAINING).then_some(false),
        }
    }

    /// State pairs connected in the specification, in addition to transitions to RESET and ERROR.
    const LEGAL: [(u8, u8); 9] = [
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 3),
        (3, 3),
        (3, 4),
        (4, 3),
        (4, 4),
        (5, 3),
    ];

    #[test]
    fn state_pairs_match_specification() {
        for qp_type in TYPES {
            for (i, from) in STATES.into_iter().enumerate() {
                for (j, to) in STATES.into_iter().enumerate() {
                    let legal = j == 0
                        || j == 6
                        || LEGAL.contains(&(i as u8, j as u8))
                            && !(is_reliable(qp_type) && from == QpState::Sqe);
                    let found = rule(qp_type, from, to);
                    assert_eq!(found.is_some(), legal, "{qp_type:?} {from:?} → {to:?}");
                    let result = plan_modify(
                        qp_type,
                        from,
                        &request(to, found.map_or(Attrs::empty(), |r| r.required)),
                    );
                    let want = if legal {
                        Ok(to)
                    } else {
                        Err(VerbsError::InvalidTransition { from, to })
                    };
                    assert_eq!(result, want);
                }
            }
        }
    }

    #[test]
    fn unreliable_qps_enter_sqe_without_request() {
        let of = |qp_type| table(&STATES.map(|state| OfType(qp_type, state)));
        let connections = "Reset: Reset Init Error\n\
             Init: Reset Init Rtr Error\n\
             Rtr: Reset Rts Error\n\
             Rts: Reset Rts Sqd Error\n\
             Sqd: Reset Rts Sqd Error\n\
             Sqe: Reset Error\n\
             Error: Reset Error\n";
        for reliable in TYPES.into_iter().filter(|t| is_reliable(*t)) {
            assert_eq!(of(reliable), connections);
        }
        let datagrams = connections
            .replace("Rts: Reset Rts Sqd Error", "Rts: Reset Rts Sqd Sqe Error")
            .replace("Sqe: Reset Error", "Sqe: Reset Rts Error");
        assert_eq!(of(QpType::Ud), datagrams);
        assert_eq!(of(QpType::Gsi), datagrams);
        let unreliable =
            datagrams.replace("Sqd: Reset Rts Sqd Error", "Sqd: Reset Rts Sqd Sqe Error");
        assert_eq!(of(QpType::Uc), unreliable);
    }

    #[test]
    fn attributes_are_required_optional_or_forbidden() {
        for qp_type in TYPES {
            for from in STATES {
                for to in STATES {
                    let Some(rule) = rule(qp_type, from, to) else {
                        continue;
                    };
                    for a in Attrs::all().iter() {
                        let with = plan_modify(qp_type, from, &request(to, rule.required | a));
                        if (rule.required | rule.optional).contains(a) {
                            assert_eq!(with, Ok(to), "{qp_type:?} {from:?} → {to:?} {a:?}");
                        } else {
                            let attribute = a.first_name();
                            assert_eq!(with, Err(VerbsError::ForbiddenAttribute { to, attribute }));
                        }
                        if rule.required.contains(a) {
                            let attribute = a.first_name();
                            assert_eq!(
                                plan_modify(qp_type, from, &request(to, rule.required - a)),
                                Err(VerbsError::MissingAttribute { to, attribute })
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn transition_attributes_match_specification() {
        let names = |set: Attrs| set.iter().map(Attrs::first_name).collect::<Vec<_>>();
        let r = |from, to| names(rule(QpType::Rc, from, to).unwrap().required);
        assert_eq!(
            r(QpState::Reset, QpState::Init),
            ["pkey_index", "port", "access"]
        );
        assert_eq!(
            r(QpState::Init, QpState::Rtr),
            [
                "ah",
                "path_mtu",
                "dest_qp",
                "rq_psn",
                "max_dest_rd_atomic",
                "min_rnr_timer"
            ]
        );
        assert_eq!(
            r(QpState::Rtr, QpState::Rts),
            [
                "sq_psn",
                "max_rd_atomic",
                "timeout",
                "retry_cnt",
                "rnr_retry"
            ]
        );
        // Attributes for READs, atomics and acknowledgements are not required.
        let r = |from, to| names(rule(QpType::Uc, from, to).unwrap().required);
        assert_eq!(
            r(QpState::Reset, QpState::Init),
            ["pkey_index", "port", "access"]
        );
        assert_eq!(
            r(QpState::Init, QpState::Rtr),
            ["ah", "path_mtu", "dest_qp", "rq_psn"]
        );
        assert_eq!(r(QpState::Rtr, QpState::Rts), ["sq_psn"]);
        // Each side of an extended connection only needs the attributes for its direction (same as
        // the table in Linux).
        let r = |from, to| {
            [QpType::XrcIni, QpType::XrcTgt].map(|t| names(rule(t, from, to).unwrap().required))
        };
        assert_eq!(
            r(QpState::Init, QpState::Rtr),
            [
                vec!["ah", "path_mtu", "dest_qp", "rq_psn"],
                vec![
                    "ah",
                    "path_mtu",
                    "dest_qp",
                    "rq_psn",
                    "max_dest_rd_atomic",
                    "min_rnr_timer"
                ],
            ]
        );
        assert_eq!(
            r(QpState::Rtr, QpState::Rts),
            [
                vec![
                    "sq_psn",
                    "max_rd_atomic",
                    "timeout",
                    "retry_cnt",
                    "rnr_retry"
                ],
                vec!["sq_psn", "timeout"],
            ]
        );
    }

    #[test]
    fn request_without_state_changes_attributes() {
        let attr = QpAttr {
            min_rnr_timer: Some(3),
            ..QpAttr::default()
        };
        assert_eq!(
            plan_modify(QpType::Rc, QpState::Rts, &attr),
            Ok(QpState::Rts)
        );
        assert_eq!(
            plan_modify(QpType::Rc, QpState::Rtr, &attr),
            Err(VerbsError::InvalidTransition {
                from: QpState::Rtr,
                to: QpState::Rtr
            })
        );
        assert_eq!(
            plan_modify(QpType::Ud, QpState::Rts, &attr),
            Err(VerbsError::ForbiddenAttribute {
                to: QpState::Rts,
                attribute: "min_rnr_timer"
            })
        );
    }
}
