//! Connecting an rsocket, or a TCP socket in its place.
//!
//! A peer without rsockets says by TCP only that it is there: its device, if it has one, is silent, and a
//! connection manager waits for it for seconds, or for a minute. So a client that waits for its connection
//! asks by TCP as well, a while after it has asked by RDMA, and takes what answers. A server with
//! rsockets has no TCP socket at its port: it may take its time.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr;
use std::time::{Duration, Instant};

use libc::{pollfd, sockaddr, socklen_t};

use crate::release::release;
use crate::table::{Kind, set};
use crate::{errno, rdma, real};

/// Time that a peer has for its answer by RDMA before it is asked by TCP, in milliseconds.
const HEAD_START_MS: c_int = 1000;

/// The socket that has a connection, or none.
enum Connected {
    /// The rsocket, or the reason for which it has none.
    Rsocket(Result<(), c_int>),
    /// A TCP socket that does not block.
    Tcp(c_int),
}

/// `connect(2)` of a descriptor that is an rsocket.
///
/// # Safety
/// The address has that length.
pub(crate) unsafe fn connect(
    fd: c_int,
    n: c_int,
    addr: *const sockaddr,
    length: socklen_t,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        let flags = rdma::rfcntl(n, libc::F_GETFL, 0);
        let waits = flags & libc::O_NONBLOCK == 0 && socket_type(n) == libc::SOCK_STREAM;
        let connected = if waits {
            rdma::rfcntl(n, libc::F_SETFL, flags | libc::O_NONBLOCK);
            let connected = race(n, addr, length);
            rdma::rfcntl(n, libc::F_SETFL, flags);
            connected
        } else {
            Connected::Rsocket(match rdma::rconnect(n, addr, length) {
                0 => Ok(()),
                _ => Err(errno()),
            })
        };
        match connected {
            Connected::Rsocket(Ok(())) => 0,
            Connected::Rsocket(Err(errno)) => {
                if is_under_way(errno) {
                    return crate::fail(errno);
                }
                match tcp_socket(n, flags) {
                    Some(tcp) if replace(fd, tcp) => real::connect(fd, addr, length),
                    _ => crate::fail(errno),
                }
            }
            Connected::Tcp(tcp) => {
                real::fcntl(tcp, libc::F_SETFL, (flags & libc::O_NONBLOCK).into());
                if replace(fd, tcp) { 0 } else { -1 }
            }
        }
    }
}

/// Connects by RDMA, and after a while by TCP as well.
///
/// # Safety
/// As for [`connect`]; the rsocket does not block.
unsafe fn race(n: c_int, addr: *const sockaddr, length: socklen_t) -> Connected {
    // SAFETY: as the caller promises.
    unsafe {
        if rdma::rconnect(n, addr, length) == 0 {
            return Connected::Rsocket(Ok(()));
        }
        if errno() != libc::EINPROGRESS {
            return Connected::Rsocket(Err(errno()));
        }
        if let Some(outcome) = outcome(n, HEAD_START_MS) {
            return Connected::Rsocket(outcome);
        }
        let tcp = tcp_socket(n, libc::O_NONBLOCK).filter(|tcp| {
            let is_asked = real::connect(*tcp, addr, length) == 0 || errno() == libc::EINPROGRESS;
            if !is_asked {
                real::close(*tcp);
            }
            is_asked
        });
        let Some(tcp) = tcp else {
            return Connected::Rsocket(outcome(n, -1).unwrap_or(Err(libc::ETIMEDOUT)));
        };
        let mut entries = [writable(n), writable(tcp)];
        let result = wait(&mut entries, -1);
        let why = errno();
        if result > 0 && entries[0].revents == 0 && socket_error(tcp) == 0 {
            return Connected::Tcp(tcp);
        }
        real::close(tcp);
        Connected::Rsocket(match result {
            // By TCP nothing is there either, or not yet.
            1.. => outcome(n, -1).unwrap_or(Err(libc::ETIMEDOUT)),
            _ => Err(why),
        })
    }
}

fn writable(fd: c_int) -> pollfd {
    pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    }
}

/// The outcome of connecting an rsocket, or `None` if there is none in that many milliseconds; -1 waits
/// for it.
pub(crate) fn outcome(n: c_int, ms: c_int) -> Option<Result<(), c_int>> {
    let mut entries = [writable(n)];
    let result = wait(&mut entries, ms);
    let [entry] = entries;
    match result {
        0 => None,
        1.. if entry.revents & libc::POLLERR == 0 => Some(Ok(())),
        1.. => Some(Err(match option(n, libc::SO_ERROR) {
            0 => libc::ECONNREFUSED,
            errno => errno,
        })),
        _ => Some(Err(errno())),
    }
}

/// Polls sockets for at most that many milliseconds, or without end for -1. A signal ends it as it ends
/// `connect(2)`, which goes on after handlers with `SA_RESTART`; `poll(2)` does not.
fn wait(entries: &mut [pollfd], ms: c_int) -> c_int {
    let time = u64::try_from(ms).ok().map(Duration::from_millis);
    let deadline = time.map(|time| Instant::now() + time);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |left| left.as_millis() as c_int);
        // SAFETY: the entries are alive.
        let result = unsafe { rdma::rpoll(entries.as_mut_ptr(), entries.len() as u64, ms) };
        if result >= 0 || errno() != libc::EINTR {
            return result;
        }
        if !restarts() {
            return crate::fail(libc::EINTR);
        }
    }
}

/// Whether all handlers of signals have calls go on. Which of them has run is not known.
fn restarts() -> bool {
    (1..=libc::SIGRTMAX()).all(|signal| {
        // SAFETY: all-zero bytes are valid, and the place is alive; nothing is changed.
        let action = unsafe {
            let mut action: libc::sigaction = zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            action
        };
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        !is_handled || action.sa_flags & libc::SA_RESTART != 0
    })
}

/// An option of an rsocket that is a number; 0 where it has none.
fn option(n: c_int, name: c_int) -> c_int {
    let mut value: c_int = 0;
    let mut size = size_of_val(&value) as socklen_t;
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the place is alive and has that size.
    unsafe { rdma::rgetsockopt(n, libc::SOL_SOCKET, name, place, &raw mut size) };
    value
}

/// The type of an rsocket. rdma-core does not say; its datagram sockets connect at once.
fn socket_type(n: c_int) -> c_int {
    match option(n, libc::SO_TYPE) {
        0 => libc::SOCK_STREAM,
        kind => kind,
    }
}

/// Why a TCP socket has no connection; 0 where it has one.
fn socket_error(tcp: c_int) -> c_int {
    let mut value: c_int = 0;
    let mut size = size_of_val(&value) as socklen_t;
    let place: *mut c_void = (&raw mut value).cast();
    // SAFETY: the place is alive and has that size.
    unsafe { real::getsockopt(tcp, libc::SOL_SOCKET, libc::SO_ERROR, place, &raw mut size) };
    value
}

/// Whether an error of `connect` says that there is a connection, or may be one.
fn is_under_way(errno: c_int) -> bool {
    matches!(
        errno,
        libc::EINPROGRESS | libc::EALREADY | libc::EISCONN | libc::EINTR
    )
}

/// An ordinary socket that is like an rsocket.
fn tcp_socket(n: c_int, flags: c_int) -> Option<c_int> {
    // SAFETY: the places are alive, and have the sizes that are given.
    unsafe {
        let mut addr: libc::sockaddr_storage = zeroed();
        let mut length = size_of_val(&addr) as socklen_t;
        rdma::rgetsockname(n, (&raw mut addr).cast(), &raw mut length);
        let kind = socket_type(n) | libc::SOCK_CLOEXEC;
        let new = real::socket(c_int::from(addr.ss_family), kind, 0);
        if new < 0 {
            return None;
        }
        copy_options((n, rdma::rgetsockopt), (new, real::setsockopt));
        real::fcntl(new, libc::F_SETFL, (flags & libc::O_NONBLOCK).into());
        Some(new)
    }
}

/// Puts an ordinary socket in the place of a descriptor's rsocket. Answers whether that was done; the
/// socket has no other descriptor then, and is closed otherwise.
fn replace(fd: c_int, new: c_int) -> bool {
    // SAFETY: the calls take any numbers.
    unsafe {
        let at_exec = real::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC != 0;
        let at_exec = if at_exec { libc::O_CLOEXEC } else { 0 };
        let result = real::dup3(new, fd, at_exec);
        real::close(new);
        if result < 0 {
            return false;
        }
    }
    if let Some(old) = set(fd, Kind::File) {
        release(old);
    }
    true
}

/// `getsockopt(2)` and `setsockopt(2)` of a library.
type Get = unsafe fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
type Set = unsafe fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;

/// Copies the options that programs set from one socket to another, each of a library.
pub(crate) fn copy_options((from, get): (c_int, Get), (to, set): (c_int, Set)) {
    let options = [
        (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    ];
    for (level, name) in options {
        let mut value: c_int = 0;
        let mut size = size_of_val(&value) as socklen_t;
        let place: *mut c_void = (&raw mut value).cast();
        // SAFETY: the place is alive and has that size.
        unsafe {
            if get(from, level, name, place, &raw mut size) == 0 && value != 0 {
                set(to, level, name, ptr::from_ref(&value).cast(), size);
            }
        }
    }
}
