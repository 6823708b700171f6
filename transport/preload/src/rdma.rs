//! The functions of librdmacm.so.1. It is loaded when the first socket is made, so that a program
//! without sockets is not burdened.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use libc::{iovec, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t};

/// Names of the libraries of RDMA programs.
const LIBRARIES: [&CStr; 2] = [c"librdmacm.so.1", c"libibverbs.so.1"];

/// Handle of the dynamic loader.
struct Library(*mut c_void);

// SAFETY: a handle may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

fn load() -> Option<Library> {
    let open = |name: &CStr, flags| {
        // SAFETY: the name ends with a zero byte.
        unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | flags) }
    };
    // A program that uses RDMA by itself: see the crate's documentation.
    if LIBRARIES
        .iter()
        .any(|name| !open(name, libc::RTLD_NOLOAD).is_null())
    {
        return None;
    }
    let library = open(LIBRARIES[0], libc::RTLD_LOCAL | libc::RTLD_DEEPBIND);
    (!library.is_null()).then_some(Library(library))
}

/// Whether there is a library for rsockets.
pub(crate) fn is_available() -> bool {
    LIBRARY.get_or_init(load).is_some()
}

/// A function of the library by its name, which ends with a zero byte.
fn find(name: &'static str) -> *mut c_void {
    match LIBRARY.get_or_init(load) {
        // SAFETY: the library stays loaded, and the name ends with a zero byte.
        Some(Library(library)) => unsafe { libc::dlsym(*library, name.as_ptr().cast()) },
        None => ptr::null_mut(),
    }
}

super::functions! {
    find:
    fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn rbind(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
    fn rlisten(fd: c_int, backlog: c_int) -> c_int;
    fn raccept(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn rconnect(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
    fn rshutdown(fd: c_int, how: c_int) -> c_int;
    fn rclose(fd: c_int) -> c_int;
    fn rgetpeername(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn rgetsockname(fd: c_int, addr: *mut sockaddr, length: *mut socklen_t) -> c_int;
    fn rsetsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t,
    ) -> c_int;
    fn rgetsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t,
    ) -> c_int;
    fn rfcntl(fd: c_int, command: c_int, argument: c_int) -> c_int;
    fn rrecv(fd: c_int, into: *mut c_void, length: size_t, flags: c_int) -> ssize_t;
    fn rrecvfrom(
        fd: c_int, into: *mut c_void, length: size_t, flags: c_int, addr: *mut sockaddr,
        addr_length: *mut socklen_t,
    ) -> ssize_t;
    fn rrecvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn rread(fd: c_int, into: *mut c_void, length: size_t) -> ssize_t;
    fn rreadv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    fn rsend(fd: c_int, from: *const c_void, length: size_t, flags: c_int) -> ssize_t;
    fn rsendto(
        fd: c_int, from: *const c_void, length: size_t, flags: c_int, addr: *const sockaddr,
        addr_length: socklen_t,
    ) -> ssize_t;
    fn rsendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn rwrite(fd: c_int, from: *const c_void, length: size_t) -> ssize_t;
    fn rwritev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t;
    fn rpoll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
}
