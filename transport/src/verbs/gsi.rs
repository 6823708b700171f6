//! Queue pair 1.

use super::{QKey, QpAttr, QpId, QpState, Verbs, VerbsError};

/// Takes a queue pair 1 from RESET to RTS, with the attributes that are the same for every one
/// (IBTA 11.2.4.2): the first partition, port 1 and the well-known Q_Key.
///
/// # Errors
/// The errors of [`Verbs::modify_qp`].
pub fn make_gsi_ready<V: Verbs + ?Sized>(verbs: &mut V, qp: QpId) -> Result<(), VerbsError> {
    let to = |state| QpAttr {
        state: Some(state),
        ..QpAttr::default()
    };
    // Without destination and PSN of a peer: queue pair 1 talks to all of them.
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(QKey::GSI),
            ..to(QpState::Init)
        },
        to(QpState::Rtr),
        QpAttr {
            sq_psn: Some(0),
            ..to(QpState::Rts)
        },
    ];
    steps.iter().try_for_each(|attr| verbs.modify_qp(qp, attr))
}
