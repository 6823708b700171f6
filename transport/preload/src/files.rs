//! Closing, copying and setting descriptors.

use std::ffi::{c_int, c_long, c_ulong, c_void};

use libc::stat;

use crate::release::release;
use crate::sockets::for_data;
use crate::table::{Kind, MAX, is_own, kind, rsocket, set};
use crate::{epoll, fail, rdma, real};

/// `close(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if epoll::is_bell(fd) {
        return fail(libc::EBADF);
    }
    let was = match kind(fd) {
        // Another thread may have closed it meanwhile.
        Kind::Rsocket(_) | Kind::Forking(_) if is_own() => {
            set(fd, Kind::File).unwrap_or(Kind::File)
        }
        _ => Kind::File,
    };
    // SAFETY: closing has no preconditions.
    let result = epoll::closing(fd, fd, || unsafe { real::close(fd) });
    match was {
        Kind::Rsocket(_) => release(was),
        Kind::File | Kind::Forking(_) => result,
    }
}

/// `close_range(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
    // SAFETY: the call takes any numbers.
    let call = || unsafe { real::close_range(first, last, flags) };
    // With a flag for later, it closes nothing now, nor with one that the kernel refuses.
    if flags as u32 & !libc::CLOSE_RANGE_UNSHARE != 0 || !is_own() {
        return call();
    }
    let [low, high] = [first, last].map(|fd| fd.min(MAX as u32) as c_int);
    for fd in low..=high {
        if kind(fd) != Kind::File {
            release(set(fd, Kind::File).unwrap_or(Kind::File));
        }
    }
    epoll::closing(low, high, call)
}

/// `closefrom(3)`
#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the calls take any numbers.
    unsafe {
        if close_range(first.max(0) as u32, u32::MAX, 0) < 0 {
            // A kernel without that call.
            real::closefrom(first);
        }
    }
}

/// Has no thread make an rsocket of a number that becomes a copy of a descriptor: it would take the copy's place.
fn take(fd: c_int, new: c_int) {
    // SAFETY: the call takes any number.
    let is_open = || unsafe { real::fcntl(fd, libc::F_GETFD, 0) } >= 0;
    if matches!(kind(new), Kind::Forking(_)) && is_own() && is_open() {
        release(set(new, Kind::File).unwrap_or(Kind::File));
    }
}

/// Makes `new`, which was made from a descriptor, one of the same rsocket. What had the number before was
/// closed.
fn share(fd: c_int, new: c_int) -> c_int {
    let now = match rsocket(fd) {
        Some(n) if new >= 0 => Kind::Rsocket(n),
        _ => Kind::File,
    };
    if new >= 0 && (now != Kind::File || kind(new) != Kind::File) && is_own() {
        release(set(new, now).unwrap_or(Kind::File));
    }
    if new >= 0 {
        epoll::share(fd, new);
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
    let call = || unsafe { real::dup2(fd, new) };
    if fd == new {
        return call();
    }
    take(fd, new);
    share(fd, epoll::closing(new, new, call))
}

/// `dup3(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int {
    for_data(fd);
    // SAFETY: the call takes any numbers.
    let call = || unsafe { real::dup3(fd, new, flags) };
    if fd != new && flags & !libc::O_CLOEXEC == 0 {
        take(fd, new);
    }
    share(fd, epoll::closing(new, new, call))
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
            (libc::F_DUPFD | libc::F_DUPFD_CLOEXEC, _) => {
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
