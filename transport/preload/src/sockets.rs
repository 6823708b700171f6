//! Making, connecting and accepting sockets.

use std::ffi::c_int;

use libc::{sockaddr, socklen_t};

use crate::table::{Kind, Stage, insert, kind, set};
use crate::{config, errno, fork, rdma, real};

/// Flags that `socket` and `accept4` take beside a type.
const FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

/// `socket(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let bare = kind & !FLAGS;
    // SAFETY: the calls take any numbers.
    unsafe {
        if !config::wants(domain, bare, protocol) || !rdma::is_available() {
            return real::socket(domain, kind, protocol);
        }
        if config::is_fork_safe() && bare == libc::SOCK_STREAM {
            let fd = real::socket(domain, kind, protocol);
            if fd >= 0 {
                set(fd, Kind::Forking(Stage::New));
            }
            return fd;
        }
        let n = rdma::rsocket(domain, bare, protocol);
        if n < 0 {
            return real::socket(domain, kind, protocol);
        }
        config::apply(n);
        give(n, kind)
    }
}

/// Gives a program a new rsocket, with flags.
fn give(n: c_int, flags: c_int) -> c_int {
    if flags & libc::SOCK_NONBLOCK != 0 {
        // SAFETY: the call takes any numbers.
        unsafe { rdma::rfcntl(n, libc::F_SETFL, libc::O_NONBLOCK) };
    }
    insert(n, flags & libc::SOCK_CLOEXEC != 0)
}

/// `listen(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the calls take any numbers.
    unsafe {
        match kind(fd) {
            Kind::Rsocket(n) => rdma::rlisten(n, backlog),
            Kind::File => real::listen(fd, backlog),
            Kind::Forking(stage) => {
                let result = real::listen(fd, backlog);
                if result == 0 && stage == Stage::New {
                    set(fd, Kind::Forking(Stage::Listening));
                }
                result
            }
        }
    }
}

/// `accept(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the program's pointers.
    unsafe { accept4(fd, addr, length, 0) }
}

/// `accept4(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's pointers.
    unsafe {
        match kind(fd) {
            Kind::Rsocket(_) if flags & !FLAGS != 0 => crate::fail(libc::EINVAL),
            Kind::Rsocket(n) => {
                crate::epoll::touch(n, libc::EPOLLIN);
                match rdma::raccept(n, addr, length) {
                    n if n < 0 => n,
                    n => give(n, flags),
                }
            }
            Kind::File => real::accept4(fd, addr, length, flags),
            Kind::Forking(stage) => {
                let new = real::accept4(fd, addr, length, flags);
                if new >= 0 && stage == Stage::Listening {
                    set(new, Kind::Forking(Stage::Passive));
                }
                new
            }
        }
    }
}

/// `connect(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the program's pointers.
    unsafe {
        match kind(fd) {
            Kind::Rsocket(n) => {
                crate::epoll::touch(n, libc::EPOLLOUT);
                crate::connect::connect(fd, n, addr, length)
            }
            Kind::File => real::connect(fd, addr, length),
            Kind::Forking(stage) => {
                let result = real::connect(fd, addr, length);
                if stage == Stage::New && (result == 0 || errno() == libc::EINPROGRESS) {
                    set(fd, Kind::Forking(Stage::Active));
                }
                result
            }
        }
    }
}

/// The rsocket that data calls of a descriptor go to. A TCP socket that has waited for its process
/// becomes one now.
pub(crate) fn for_data(fd: c_int) -> Option<c_int> {
    match kind(fd) {
        Kind::File => None,
        Kind::Rsocket(n) => Some(n),
        Kind::Forking(_) => fork::settle(fd),
    }
}
