//! Datagram queue pairs, including queue pair 1.

use super::{QKey, QpAttr, QpId, QpState, Verbs, VerbsError};

/// Sets the state of queue pair 1 from RESET to RTS using the well-known Q_Key and the attributes
/// of [`make_datagrams_ready`] (IBTA 11.2.4.2).
///
/// # Errors
/// Returns an error from [`Verbs::modify_qp`].
pub fn make_gsi_ready<V: Verbs + ?Sized>(verbs: &mut V, qp: QpId) -> Result<(), VerbsError> {
    make_datagrams_ready(verbs, qp, QKey::GSI)
}

/// Sets the state of a datagram queue pair from RESET to RTS using the first partition, port 1 and
/// a Q_Key. No destination or PSN is required since the queue pair can communicate with any peer.
///
/// # Errors
/// Returns an error from [`Verbs::modify_qp`].
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
