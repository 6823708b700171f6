//! Calls that go to one library or the other as they are, and `sendfile`.

use std::ffi::{c_int, c_void};

use libc::{iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

use crate::sockets::for_data;
use crate::table::rsocket;
use crate::{epoll, errno, rdma, real};

/// Bytes of a file that `sendfile` reads at a time.
const PIECE: usize = 1 << 16;

/// Calls that are librdmacm's for an rsocket, and the C library's for another descriptor.
macro_rules! either {
    ($($name:ident, $of_rsocket:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        #[doc = concat!("`", stringify!($name), "(2)`")]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, $($arg: $ty),*) -> $ret {
            // SAFETY: the program passes what the call demands.
            unsafe {
                match rsocket(fd) {
                    Some(n) => rdma::$of_rsocket(n, $($arg),*),
                    None => real::$name(fd, $($arg),*),
                }
            }
        }
    )*};
}

either! {
    bind, rbind(addr: *const sockaddr, length: socklen_t) -> c_int;
    shutdown, rshutdown(how: c_int) -> c_int;
    getpeername, rgetpeername(addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    getsockname, rgetsockname(addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    setsockopt, rsetsockopt(
        level: c_int, name: c_int, value: *const c_void, length: socklen_t
    ) -> c_int;
    getsockopt, rgetsockopt(
        level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t
    ) -> c_int;
}

/// The same for calls that move data. What `epoll` has reported may be reported again.
macro_rules! moving {
    ($($event:ident $name:ident, $of_rsocket:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        #[doc = concat!("`", stringify!($name), "(2)`")]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, $($arg: $ty),*) -> $ret {
            // SAFETY: the program passes what the call demands.
            unsafe {
                match for_data(fd) {
                    Some(n) => {
                        epoll::touch(n, libc::$event);
                        rdma::$of_rsocket(n, $($arg),*)
                    }
                    None => real::$name(fd, $($arg),*),
                }
            }
        }
    )*};
}

moving! {
    EPOLLIN read, rread(into: *mut c_void, length: size_t) -> ssize_t;
    EPOLLIN readv, rreadv(vector: *const iovec, count: c_int) -> ssize_t;
    EPOLLIN recv, rrecv(into: *mut c_void, length: size_t, flags: c_int) -> ssize_t;
    EPOLLIN recvfrom, rrecvfrom(
        into: *mut c_void, length: size_t, flags: c_int, addr: *mut sockaddr,
        addr_length: *mut socklen_t
    ) -> ssize_t;
    EPOLLIN recvmsg, rrecvmsg(message: *mut msghdr, flags: c_int) -> ssize_t;
    EPOLLOUT write, rwrite(from: *const c_void, length: size_t) -> ssize_t;
    EPOLLOUT writev, rwritev(vector: *const iovec, count: c_int) -> ssize_t;
    EPOLLOUT send, rsend(from: *const c_void, length: size_t, flags: c_int) -> ssize_t;
    EPOLLOUT sendto, rsendto(
        from: *const c_void, length: size_t, flags: c_int, addr: *const sockaddr,
        addr_length: socklen_t
    ) -> ssize_t;
    EPOLLOUT sendmsg, rsendmsg(message: *const msghdr, flags: c_int) -> ssize_t;
}

/// `read` of a program that was built with checks of its buffers.
#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(
    fd: c_int,
    into: *mut c_void,
    length: size_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the program passes what the call demands; the C library ends one whose buffer is short.
    unsafe {
        if length > room {
            return real::__read_chk(fd, into, length, room);
        }
        read(fd, into, length)
    }
}

/// `recv` of such a program.
#[unsafe(no_mangle)]
unsafe extern "C" fn __recv_chk(
    fd: c_int,
    into: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: as above.
    unsafe {
        if length > room {
            return real::__recv_chk(fd, into, length, room, flags);
        }
        recv(fd, into, length, flags)
    }
}

/// `recvfrom` of such a program.
#[unsafe(no_mangle)]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    into: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addr_length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: as above.
    unsafe {
        if length > room {
            return real::__recvfrom_chk(fd, into, length, room, flags, addr, addr_length);
        }
        recvfrom(fd, into, length, flags, addr, addr_length)
    }
}

/// `sendfile(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(
    out: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    let Some(n) = for_data(out) else {
        // SAFETY: the program passes what the call demands.
        return unsafe { real::sendfile(out, file, offset, count) };
    };
    epoll::touch(n, libc::EPOLLOUT);
    // SAFETY: the program's place for the offset, or none.
    unsafe {
        let start = match offset.as_ref() {
            Some(offset) => *offset,
            None => libc::lseek(file, 0, libc::SEEK_CUR),
        };
        if start < 0 {
            return crate::fail(libc::EINVAL) as ssize_t;
        }
        let result = copy(n, file, start, count);
        if result > 0 {
            match offset.as_mut() {
                Some(offset) => *offset = start + result as off_t,
                None => {
                    libc::lseek(file, start + result as off_t, libc::SEEK_SET);
                }
            }
        }
        result
    }
}

/// `sendfile(2)` of programs with 64-bit offsets, as all are here.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(
    out: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: as for `sendfile`.
    unsafe { sendfile(out, file, offset, count) }
}

/// Sends bytes of a file from an offset. Answers as `sendfile`.
fn copy(n: c_int, file: c_int, start: off_t, count: size_t) -> ssize_t {
    let mut buffer = vec![0_u8; PIECE.min(count)];
    let mut done = 0;
    while done < count {
        let piece = buffer.len().min(count - done);
        // SAFETY: the buffer has room for the piece.
        let sent = unsafe {
            match libc::pread(
                file,
                buffer.as_mut_ptr().cast(),
                piece,
                start + done as off_t,
            ) {
                0 => break,
                read if read < 0 => read,
                read => rdma::rwrite(n, buffer.as_ptr().cast(), read as size_t),
            }
        };
        if sent < 0 {
            // What was sent counts more than why there is no more.
            if done > 0 {
                break;
            }
            return crate::fail(errno()) as ssize_t;
        }
        done += sent as size_t;
        if (sent as size_t) < piece {
            // The end of the file, or no room.
            break;
        }
    }
    done as ssize_t
}
