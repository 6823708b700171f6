//! Queue pairs of datagrams, queue pair 1 among them.

use super::{QKey, QpAttr, QpId, QpState, Verbs, VerbsError};

/// Takes a queue pair 1 from RESET to RTS, with the attributes that are the same for every one
/// (IBTA 11.2.4.2): those of [`make_datagrams_ready`] and the well-known Q_Key.
///
/// # Errors
/// The errors of [`Verbs::modify_qp`].
pub fn make_gsi_ready<V: Verbs + ?Sized>(verbs: &mut V, qp: QpId) -> Result<(), VerbsError> {
    make_datagrams_ready(verbs, qp, QKey::GSI)
}

/// Takes a queue pair of datagrams from RESET to RTS: the first partition, port 1, a Q_Key, and no
/// destination and PSN of a peer, as it talks to all of them.
///
/// # Errors
/// The errors of [`Verbs::modify_qp`].
pub fn make_datagrams_ready<V: Verbs + ?Sized>(
    verbs: &mut V,
    qp: QpId,
    qkey: QKey,
) -> Result<(), VerbsError> {
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(qkey),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr::to(QpState::Rtr),
        QpAttr {
            sq_psn: Some(0),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    steps.iter().try_for_each(|attr| verbs.modify_qp(qp, attr))
}
