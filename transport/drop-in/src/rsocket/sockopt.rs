//! `rsetsockopt`, `rgetsockopt` and `rfcntl`.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use super::options::{RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_RQSIZE, RDMA_SQSIZE, SOL_RDMA};
use super::socket::{Inner, Kind};
use crate::errno::Errno;

/// What a program gives for an option: an integer, as all options but `SO_LINGER` are, whose first
/// member is one.
///
/// # Errors
/// `EFAULT` without a value, `EINVAL` for one that is too short.
///
/// # Safety
/// The pointer is null, or the value is alive and has that length.
pub(super) unsafe fn value(at: *const c_void, length: libc::socklen_t) -> Result<c_int, Errno> {
    if at.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    if (length as usize) < size_of::<c_int>() {
        return Err(Errno::INVALID);
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { at.cast::<c_int>().read_unaligned() })
}

/// Sets an option of a socket. Sizes have no effect once there is a queue pair that has them.
///
/// # Errors
/// `ENOTSUP` for an unknown option, `EINVAL` for a value that is none of its values.
pub(super) fn set(inner: &mut Inner, level: c_int, name: c_int, value: c_int) -> Result<(), Errno> {
    let (options, is_open) = inner.kind.options();
    let is_on = value != 0;
    let size = u32::try_from(value);
    // The kernel doubles a buffer's size, for its own needs; so does rdma-core.
    let doubled = value.max(0).unsigned_abs().saturating_mul(2);
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => options.reuses_address = is_on,
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => options.oob_inline = is_on,
        (libc::SOL_SOCKET, libc::SO_LINGER) => options.lingers = is_on,
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keeps_alive = is_on,
        (libc::SOL_SOCKET, libc::SO_RCVBUF) if is_open => options.set_recv_buffer(doubled),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) if is_open => options.set_send_buffer(doubled),
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => {}
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => options.no_delay = is_on,
        // The queue pair tries again by its own rules, and has its own segments.
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL | libc::TCP_MAXSEG) => {}
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) if value > 0 => {
            options.keep_idle = value.unsigned_abs();
        }
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => return Err(Errno::INVALID),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => options.v6_only = is_on,
        (SOL_RDMA, RDMA_SQSIZE..=RDMA_IOMAPSIZE) if !is_open => return Err(Errno::INVALID),
        (SOL_RDMA, RDMA_SQSIZE..=RDMA_IOMAPSIZE) => {
            let size = size.map_err(|_| Errno::INVALID)?;
            match name {
                RDMA_SQSIZE => options.set_send_queue(size),
                RDMA_RQSIZE => options.set_recv_queue(size),
                RDMA_INLINE => options.set_inline(size),
                _ => options.set_iomaps(size),
            }
        }
        _ => return Err(Errno(libc::ENOTSUP)),
    }
    Ok(())
}

/// Interval at which an idle connection is to be tried, if it is.
pub(super) fn keep_alive(inner: &mut Inner) -> Option<Duration> {
    let options = &inner.kind.stream().ok()?.options;
    let interval = Duration::from_secs(options.keep_idle.into());
    options.keeps_alive.then_some(interval)
}

/// Value of an option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    /// An integer.
    Int(c_int),
    /// `struct linger`.
    Linger(bool),
}

/// An option of a socket.
///
/// # Errors
/// `ENOTSUP` for an unknown option.
pub(super) fn get(inner: &mut Inner, level: c_int, name: c_int) -> Result<Value, Errno> {
    match (level, name, &mut inner.kind) {
        (libc::SOL_SOCKET, libc::SO_TYPE, Kind::Stream(_)) => {
            return Ok(Value::Int(libc::SOCK_STREAM));
        }
        (libc::SOL_SOCKET, libc::SO_TYPE, Kind::Datagram(_)) => {
            return Ok(Value::Int(libc::SOCK_DGRAM));
        }
        (libc::SOL_SOCKET, libc::SO_ERROR, Kind::Stream(connection)) => {
            return Ok(Value::Int(std::mem::take(&mut connection.error)));
        }
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG, Kind::Stream(connection)) => {
            return Ok(Value::Int(connection.ident.mtu()));
        }
        _ => {}
    }
    let (options, _) = inner.kind.options();
    let sizes = options.sizes();
    Ok(Value::Int(match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => options.reuses_address.into(),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => options.oob_inline.into(),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => options.keeps_alive.into(),
        (libc::SOL_SOCKET, libc::SO_LINGER) => return Ok(Value::Linger(options.lingers)),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => sizes.recv_buffer as c_int,
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => sizes.send_buffer as c_int,
        // Errors of datagrams that were sent before are not kept.
        (libc::SOL_SOCKET, libc::SO_ERROR) => 0,
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => 1,
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => options.keep_idle as c_int,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => options.no_delay.into(),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => options.v6_only.into(),
        (SOL_RDMA, RDMA_SQSIZE) => sizes.send_queue.into(),
        (SOL_RDMA, RDMA_RQSIZE) => sizes.recv_queue.into(),
        (SOL_RDMA, RDMA_INLINE) => sizes.inline as c_int,
        (SOL_RDMA, RDMA_IOMAPSIZE) => sizes.iomaps.into(),
        _ => return Err(Errno(libc::ENOTSUP)),
    }))
}
