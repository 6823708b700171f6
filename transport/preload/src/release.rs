//! The end of rsockets.

use std::ffi::c_int;

use crate::table::{Kind, give_up};
use crate::{epoll, rdma};

/// Gives up a descriptor's part in what it was. Closes an rsocket that has no other descriptor; answers
/// as `close`.
pub(crate) fn release(kind: Kind) -> c_int {
    let Some(n) = give_up(kind) else { return 0 };
    epoll::forget(n);
    // SAFETY: closing an rsocket has no preconditions.
    unsafe { rdma::rclose(n) }
}
