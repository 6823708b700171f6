//! Closing, copying and setting descriptors.

use std::ffi::{c_int, c_long, c_ulong, c_void};

use libc::stat;

use crate::release::release;
use crate::sockets::for_data;
use crate::table::{Kind, is_own, kind, rsocket, set};
use crate::{fail, rdma, real};

/// `close(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    let was = match kind(fd) {
        // Another thread may have closed it meanwhile.
        Kind::Rsocket(_) | Kind::Forking(_) if is_own() => {
            set(fd, Kind::File).unwrap_or(Kind::File)
        }
        _ => Kind::File,
    };
    crate::epoll::forget_set(fd);
    // SAFETY: closing has no preconditions.
    let result = unsafe { real::close(fd) };
    match was {
        Kind::Rsocket(_) => release(was),
        Kind::File | Kind::Forking(_) => result,
    }
}

/// `close_range(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
    // With a flag for later, it closes nothing now.
    if flags as u32 & libc::CLOSE_RANGE_CLOEXEC == 0 && is_own() {
        for fd in first..=last.min(c_int::MAX as u32) {
            let fd = fd as c_int;
            match kind(fd) {
                Kind::File if fd >= crate::table::MAX as c_int => break,
                Kind::File => {}
                _ => {
                    release(set(fd, Kind::File).unwrap_or(Kind::File));
                }
            }
        }
    }
    // SAFETY: the call takes any numbers.
    unsafe { real::close_range(first, last, flags) }
}

/// Makes `new`, which was made from a descriptor, one of the same rsocket.
fn share(fd: c_int, new: c_int) -> c_int {
    let now = match rsocket(fd) {
        Some(n) if new >= 0 => Kind::Rsocket(n),
        _ => Kind::File,
    };
    if new >= 0 && (now != Kind::File || kind(new) != Kind::File) && is_own() {
        // What had the number was closed by the call.
        release(set(new, now).unwrap_or(Kind::File));
    }
    new
}

/// `dup(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    for_data(fd);
    // SAFETY: the call takes any number.
    share(fd, unsafe { real::dup(fd) })
}

/// `dup2(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(fd: c_int, new: c_int) -> c_int {
    for_data(fd);
    // SAFETY: the call takes any numbers.
    let result = unsafe { real::dup2(fd, new) };
    if fd == new { result } else { share(fd, result) }
}

/// `dup3(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int {
    for_data(fd);
    // SAFETY: the call takes any numbers.
    share(fd, unsafe { real::dup3(fd, new, flags) })
}

/// `fcntl(2)`: the argument is where a variadic call has it on the targets of this workspace.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the program passes what the command demands.
    unsafe {
        match (command, kind(fd)) {
            (libc::F_GETFL | libc::F_SETFL, Kind::Rsocket(n)) => {
                rdma::rfcntl(n, command, argument as c_int)
            }
            (libc::F_DUPFD | libc::F_DUPFD_CLOEXEC, Kind::Rsocket(_) | Kind::Forking(_)) => {
                for_data(fd);
                share(fd, real::fcntl(fd, command, argument))
            }
            // Those of the descriptor, which the placeholder has.
            _ => real::fcntl(fd, command, argument),
        }
    }
}

/// `fcntl(2)` of programs with 64-bit offsets, as all are here.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: as for `fcntl`.
    unsafe { fcntl(fd, command, argument) }
}

/// `ioctl(2)`: an rsocket has `FIONBIO`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the program passes what the request demands.
    unsafe {
        match rsocket(fd) {
            Some(n) if request == libc::FIONBIO => {
                let Some(value) = argument.cast::<c_int>().as_ref() else {
                    return fail(libc::EFAULT);
                };
                let on = if *value != 0 { libc::O_NONBLOCK } else { 0 };
                let flags = rdma::rfcntl(n, libc::F_GETFL, 0);
                rdma::rfcntl(n, libc::F_SETFL, flags & !libc::O_NONBLOCK | on)
            }
            _ => real::ioctl(fd, request, argument),
        }
    }
}

/// `fstat(2)`: an rsocket is a socket.
#[unsafe(no_mangle)]
unsafe extern "C" fn fstat(fd: c_int, into: *mut stat) -> c_int {
    // SAFETY: the program's place.
    unsafe {
        let result = real::fstat(fd, into);
        if result == 0 && rsocket(fd).is_some() {
            (*into).st_mode = (*into).st_mode & !libc::S_IFMT | libc::S_IFSOCK;
        }
        result
    }
}

/// `fstat(2)` of programs with 64-bit offsets, as all are here.
#[unsafe(no_mangle)]
unsafe extern "C" fn fstat64(fd: c_int, into: *mut stat) -> c_int {
    // SAFETY: as for `fstat`.
    unsafe { fstat(fd, into) }
}
