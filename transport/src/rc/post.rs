//! Posting to a connected queue pair, reliable or not.

use super::RecvQueue;
use crate::verbs::{PostError, PostReason, QpState, RecvWr, SendWr};

const fn refused(reason: PostReason) -> PostError {
    PostError { index: 0, reason }
}

/// Posts a chain of send requests by `post`. RESET, INIT and RTR take none. ERROR does, since the
/// owner may post before it has seen the first flushed completion; the caller then flushes each, also
/// those before one that was refused. Refusing them would leave the owner with requests that have no
/// completion.
///
/// # Errors
/// The index of the first request that was not posted, and why.
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

/// Posts receives to a queue pair's own receive queue, which the caller flushes in ERROR.
///
/// # Errors
/// The index of the first request that was not posted, and why. RESET takes none, nor does a queue
/// pair with a shared receive queue: its receives are posted to the shared queue itself, where no
/// single queue pair could flush them.
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
