//! Unix sockets that don't accept descriptors from their peers.
//!
//! The receiver of a descriptor needs to close it, even if it never reads the message, and the
//! sender can control how long this takes: a TCP socket can linger, and a file can be on a file
//! system that does not respond. In the latter case, not even SIGKILL will terminate the process.
//! Since version 6.16, Linux can reject descriptors when they are sent (`SO_PASSRIGHTS`). This
//! option is inherited by the connections of a listener.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::{setsockopt_impl, sockopt_impl};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Defined in the kernel's `asm-generic/socket.h`, but not in the libc crate.
const SO_PASSRIGHTS: libc::c_int = 83;

sockopt_impl!(
    /// Allows peers to send descriptors, which is the default.
    PassRights, SetOnly, libc::SOL_SOCKET, SO_PASSRIGHTS, bool
);

/// Sets whether a peer can send descriptors to this socket. This will return `false` if the kernel
/// doesn't support this option.
///
/// # Errors
/// Returns the errors of `setsockopt(2)`.
pub(super) fn allow_descriptors(socket: &OwnedFd, passes: bool) -> io::Result<bool> {
    match setsockopt(socket, PassRights, &passes) {
        Ok(()) => Ok(true),
        Err(Errno::ENOPROTOOPT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Creates a socket that does not accept descriptors, if supported by the kernel.
///
/// # Errors
/// Returns the errors of `socket(2)` and `setsockopt(2)`.
pub(super) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    allow_descriptors(&socket, false)?;
    Ok(socket)
}

/// Returns whether the kernel can reject descriptors sent to a socket, as supported by Linux 6.16
/// and later. If not, a local user can send a descriptor that blocks forever on close to any
/// process which shares memory, so that this process cannot exit. This will also return `false` if
/// a test socket could not be created by the first call.
#[must_use]
pub fn refuses_descriptors() -> bool {
    static REFUSES: LazyLock<bool> = LazyLock::new(|| {
        let tried = socket().and_then(|socket| allow_descriptors(&socket, false));
        tried.unwrap_or(false)
    });
    *REFUSES
}
