//! Unix sockets that take no descriptors from their peers.
//!
//! A descriptor that is sent is closed by its receiver, even one that is never taken, and its sender
//! decides how long that takes: a TCP socket may linger, and a file be of a file system that does not
//! answer. Not even SIGKILL ends the wait for the latter. Linux 6.16 can refuse descriptors before they
//! are sent (`SO_PASSRIGHTS`). A listener's connections inherit that from it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::{setsockopt_impl, sockopt_impl};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// As in the kernel's `asm-generic/socket.h`; the C library binding does not have it.
const SO_PASSRIGHTS: libc::c_int = 83;

sockopt_impl!(
    /// Lets peers send descriptors, as they can by default.
    PassRights, SetOnly, libc::SOL_SOCKET, SO_PASSRIGHTS, bool
);

/// Sets whether peers can send descriptors to a socket; false if the kernel cannot refuse them.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub(super) fn pass(socket: &OwnedFd, passes: bool) -> io::Result<bool> {
    match setsockopt(socket, PassRights, &passes) {
        Ok(()) => Ok(true),
        Err(Errno::ENOPROTOOPT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A new socket that takes no descriptors, where the kernel can refuse them.
///
/// # Errors
/// Those of `socket(2)` and `setsockopt(2)`.
pub(super) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    pass(&socket, false)?;
    Ok(socket)
}

/// Whether the kernel can refuse descriptors that are sent to a socket, as Linux can since 6.16. On
/// others, any local user can send one whose closing never ends to a process that shares memory, which
/// then cannot end either. False as well if no socket was left to try it with, at the first call.
#[must_use]
pub fn refuses_descriptors() -> bool {
    static REFUSES: LazyLock<bool> = LazyLock::new(|| {
        let tried = socket().and_then(|socket| pass(&socket, false));
        tried.unwrap_or(false)
    });
    *REFUSES
}
