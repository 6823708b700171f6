//! Servers that fork for each connection.
//!
//! An RDMA connection belongs to the process that has made it. So with `RDMAV_FORK_SAFE=1` at both ends
//! sockets connect by TCP first. The process of the server that first uses an accepted socket listens
//! for an rsocket at the same port, and says so by four zero bytes; the client then connects. This is how
//! rdma-core does it, with which it works together. An end that meets none of that stays with TCP.

use std::ffi::{c_int, c_void};
use std::fs::OpenOptions;
use std::mem::zeroed;
use std::net::Ipv6Addr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::time::Duration;

use libc::{pollfd, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::release::release;
use crate::table::{Kind, Stage, begin_settling, kind, placeholder, set};
use crate::{config, rdma, real};

/// What a server says when it listens.
const READY: [u8; 4] = [0; 4];

/// Longest wait for a client that was asked to connect, in milliseconds.
const PATIENCE_MS: c_int = 10_000;

/// Time between two looks at what another thread does.
const LOOK: Duration = Duration::from_millis(1);

/// Makes an rsocket of a TCP socket that waits for its use; answers it, or `None` where the socket stays.
pub(crate) fn settle(fd: c_int) -> Option<c_int> {
    let made = loop {
        match kind(fd) {
            Kind::Rsocket(n) => return Some(n),
            Kind::File | Kind::Forking(Stage::New | Stage::Listening) => return None,
            // Another thread of the program uses it as well.
            Kind::Forking(Stage::Settling) => std::thread::sleep(LOOK),
            Kind::Forking(stage) if !begin_settling(fd, stage) => {}
            Kind::Forking(Stage::Active) => break connect(fd),
            Kind::Forking(Stage::Passive) => break accept(fd),
        }
    };
    let Some(n) = made else {
        set(fd, Kind::File);
        return None;
    };
    config::apply(n);
    // SAFETY: the calls take any numbers.
    unsafe {
        let flags = real::fcntl(fd, libc::F_GETFL, 0) & libc::O_NONBLOCK;
        let at_exec = real::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC != 0;
        rdma::rfcntl(n, libc::F_SETFL, flags);
        real::shutdown(fd, libc::SHUT_RDWR);
        let place = placeholder(at_exec);
        real::dup3(place, fd, if at_exec { libc::O_CLOEXEC } else { 0 });
        real::close(place);
    }
    if set(fd, Kind::Rsocket(n)).is_none() {
        // Beyond the table: it has no socket any more.
        release(Kind::Rsocket(n));
        return None;
    }
    Some(n)
}

/// An address of a socket, by one of the calls that answer one.
fn address(
    fd: c_int,
    call: unsafe fn(c_int, *mut libc::sockaddr, *mut socklen_t) -> c_int,
) -> Option<(sockaddr_storage, socklen_t)> {
    // SAFETY: all-zero bytes are a valid address, and the place has that size.
    unsafe {
        let mut addr: sockaddr_storage = zeroed();
        let mut length = size_of_val(&addr) as socklen_t;
        let result = call(fd, (&raw mut addr).cast(), &raw mut length);
        (result == 0).then_some((addr, length))
    }
}

/// The client: waits until the server is ready, and connects.
fn connect(fd: c_int) -> Option<c_int> {
    let mut said = [1_u8; READY.len()];
    // SAFETY: the places are alive, and have the sizes that are given.
    unsafe {
        let flags = real::fcntl(fd, libc::F_GETFL, 0);
        real::fcntl(fd, libc::F_SETFL, (flags & !libc::O_NONBLOCK).into());
        let into: *mut c_void = said.as_mut_ptr().cast();
        let n = real::recv(fd, into, said.len(), libc::MSG_PEEK | libc::MSG_WAITALL);
        real::fcntl(fd, libc::F_SETFL, flags.into());
        if n != said.len() as isize || said != READY {
            return None;
        }
        let (peer, length) = address(fd, real::getpeername)?;
        let rsocket = rdma::rsocket(peer.ss_family.into(), libc::SOCK_STREAM, 0);
        if rsocket < 0 {
            return None;
        }
        if rdma::rconnect(rsocket, (&raw const peer).cast(), length) < 0 {
            rdma::rclose(rsocket);
            return None;
        }
        Some(rsocket)
    }
}

/// The server: listens at the port of the TCP socket, says so, and accepts.
fn accept(fd: c_int) -> Option<c_int> {
    let (addr, length) = address(fd, real::getsockname)?;
    // One process at a time has the port. The kernel releases the lock of one that is killed.
    let lock = format!("/dev/shm/riser-rsocket-fork.{}", own_uid());
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(lock)
        .ok()?;
    // SAFETY: the places are alive, and have the sizes that are given.
    unsafe {
        if libc::flock(lock.as_raw_fd(), libc::LOCK_EX) < 0 {
            return None;
        }
        let listener = rdma::rsocket(addr.ss_family.into(), libc::SOCK_STREAM, 0);
        if listener < 0 {
            return None;
        }
        let accepted = accept_at(listener, fd, any(addr), length);
        rdma::rclose(listener);
        accepted
    }
}

fn own_uid() -> u32 {
    // SAFETY: the call cannot fail.
    unsafe { libc::geteuid() }
}

/// The same port of any address.
fn any(mut addr: sockaddr_storage) -> sockaddr_storage {
    let at = &raw mut addr;
    // SAFETY: the storage has room for an address of each family.
    unsafe {
        if c_int::from((*at).ss_family) == libc::AF_INET6 {
            let v6: *mut sockaddr_in6 = at.cast();
            (*v6).sin6_addr.s6_addr = Ipv6Addr::UNSPECIFIED.octets();
            (*v6).sin6_flowinfo = 0;
            (*v6).sin6_scope_id = 0;
        } else {
            (*at.cast::<sockaddr_in>()).sin_addr.s_addr = 0;
        }
    }
    addr
}

/// Listens with an rsocket for the peer of a TCP socket.
///
/// # Safety
/// The address has that length.
unsafe fn accept_at(
    listener: c_int,
    tcp: c_int,
    addr: sockaddr_storage,
    length: socklen_t,
) -> Option<c_int> {
    let reuse: c_int = 1;
    let value = ptr::from_ref(&reuse).cast();
    let mut entry = pollfd {
        fd: listener,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the places are alive, and have the sizes that are given.
    unsafe {
        let size = size_of_val(&reuse) as socklen_t;
        rdma::rsetsockopt(listener, libc::SOL_SOCKET, libc::SO_REUSEADDR, value, size);
        if rdma::rbind(listener, (&raw const addr).cast(), length) < 0
            || rdma::rlisten(listener, 1) < 0
            || real::write(tcp, READY.as_ptr().cast(), READY.len()) != READY.len() as isize
            || rdma::rpoll(&raw mut entry, 1, PATIENCE_MS) != 1
        {
            return None;
        }
        let accepted = rdma::raccept(listener, ptr::null_mut(), ptr::null_mut());
        (accepted >= 0).then_some(accepted)
    }
}
