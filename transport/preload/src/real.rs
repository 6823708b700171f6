//! The functions of the C library that this one hides: those that come next in the loader's order.

use std::ffi::{c_int, c_long, c_ulong, c_void};

use libc::{
    epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sigset_t, size_t, sockaddr,
    socklen_t, ssize_t, stat, timespec, timeval,
};

/// The next function of this name, which ends with a zero byte.
fn next(name: &'static str) -> *mut c_void {
    // SAFETY: the name ends with a zero byte.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) }
}

super::functions! {
    next:
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn accept4(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    fn connect(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn getpeername(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn getsockname(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t,
    ) -> c_int;
    fn getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t,
    ) -> c_int;
    fn recv(fd: c_int, into: *mut c_void, length: size_t, flags: c_int) -> ssize_t;
    fn __recv_chk(
        fd: c_int, into: *mut c_void, length: size_t, room: size_t, flags: c_int,
    ) -> ssize_t;
    fn recvfrom(
        fd: c_int, into: *mut c_void, length: size_t, flags: c_int, addr: *mut sockaddr,
        addr_length: *mut socklen_t,
    ) -> ssize_t;
    fn __recvfrom_chk(
        fd: c_int, into: *mut c_void, length: size_t, room: size_t, flags: c_int,
        addr: *mut sockaddr, addr_length: *mut socklen_t,
    ) -> ssize_t;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn read(fd: c_int, into: *mut c_void, length: size_t) -> ssize_t;
    fn __read_chk(fd: c_int, into: *mut c_void, length: size_t, room: size_t) -> ssize_t;
    fn readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    fn send(fd: c_int, from: *const c_void, length: size_t, flags: c_int) -> ssize_t;
    fn sendto(
        fd: c_int, from: *const c_void, length: size_t, flags: c_int, addr: *const sockaddr,
        addr_length: socklen_t,
    ) -> ssize_t;
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t;
    fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    fn sendfile(out: c_int, file: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int;
    fn ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int;
    fn __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        room: size_t,
    ) -> c_int;
    fn select(
        count: c_int, reads: *mut fd_set, writes: *mut fd_set, exceptions: *mut fd_set,
        timeout: *mut timeval,
    ) -> c_int;
    fn pselect(
        count: c_int, reads: *mut fd_set, writes: *mut fd_set, exceptions: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int;
    fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    fn epoll_pwait(
        set: c_int, events: *mut epoll_event, room: c_int, timeout: c_int, mask: *const sigset_t,
    ) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn closefrom(first: c_int) -> ();
    fn close_range(first: u32, last: u32, flags: c_int) -> c_int;
    fn dup(fd: c_int) -> c_int;
    fn dup2(fd: c_int, new: c_int) -> c_int;
    fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
    fn fstat(fd: c_int, into: *mut stat) -> c_int;
}
