//! Posting to a connected QP, for both reliable and unreliable connections.

use super::RecvQueue;
use crate::verbs::{PostError, PostReason, QpState, RecvWr, SendWr};

const fn refused(reason: PostReason) -> PostError {
    PostError { index: 0, reason }
}

/// Posts a chain of send requests using `post`. This fails in RESET, INIT and RTR. It is allowed in
/// ERROR because the owner may not have processed the first flushed completion yet. In this case
/// the caller must flush all requests, including requests posted before an error. If we returned an
/// error instead, the owner would never get a completion for them.
///
/// # Errors
/// Returns the index of the first request that could not be posted, and the reason.
pub(crate) fn post_sends(
    state: QpState,
    wrs: &[SendWr<'_>],
    mut post: impl FnMut(&SendWr<'_>) -> Result<(), PostReason>,
) -> Result<(), PostError> {
    if matches!(state, QpState::Reset | QpState::Init | QpState::Rtr) {
        return Err(refused(PostReason::InvalidState(state)));
    }
    let mut wrs = wrs.iter().enumerate();
    wrs.try_for_each(|(index, wr)| post(wr).map_err(|reason| PostError { index, reason }))
}

/// Posts receives to the QP's own receive queue. The caller must flush them in ERROR.
///
/// # Errors
/// Returns the index of the first request that could not be posted, and the reason. This fails in
/// RESET, and if the QP uses an SRQ. In the latter case, receives must be posted to the shared
/// queue because they cannot be flushed by a single QP.
pub(crate) fn post_receives(
    state: QpState,
    has_srq: bool,
    wrs: &[RecvWr<'_>],
    rq: &mut RecvQueue,
) -> Result<(), PostError> {
    if has_srq {
        return Err(refused(PostReason::InvalidOpcode));
    }
    if state == QpState::Reset {
        return Err(refused(PostReason::InvalidState(state)));
    }
    rq.post(wrs)
}
