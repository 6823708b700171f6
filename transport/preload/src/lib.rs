//! librspreload.so: the sockets of unmodified programs as rsockets (`rsocket(7)`).
//!
//! With `LD_PRELOAD` it is the first library in which the dynamic loader looks for `socket`, `read`,
//! `poll` and the other calls that take descriptors. A call that is about an rsocket goes to
//! librdmacm.so.1, every other one to the C library. `riser run --sockets` starts programs with it.
//!
//! | module | what it has |
//! | --- | --- |
//! | `real` | the functions of the C library that this one hides |
//! | `rdma` | the functions of librdmacm.so.1, loaded when the first socket is made |
//! | `table` | which descriptors are rsockets |
//! | `config` | which sockets of which programs are to be rsockets |
//! | `sockets` | making and accepting sockets |
//! | `connect` | connecting them, by RDMA or else by TCP |
//! | `data` | calls that go to one library or the other as they are; `sendfile` |
//! | `release` | the end of rsockets |
//! | `files` | closing, copying and setting descriptors |
//! | `wait` | `poll` and `select` |
//! | `epoll` | `epoll` |
//! | `fork` | servers that fork for each connection |
//! | `fork_lock` | locks that `fork` takes |
//! | `private` | descriptors that no child has |
//! | `watch` | time that goes by while processes run |
//! | `turn` | whose turn it is to listen, of the processes of such servers |
//!
//! # Descriptors
//! A program gets a descriptor of `/dev/null` for an rsocket, which keeps the number in use, survives
//! `dup2`, and is replaced by an ordinary socket where the peer cannot be reached by RDMA.
//!
//! # librdmacm's own calls
//! librdmacm is loaded with `RTLD_DEEPBIND`: it finds the C library's functions before ours, also in
//! threads of its own. Where a program has loaded librdmacm itself, that would come too late, so the
//! sockets of programs that use RDMA by themselves stay as they are.

#![allow(
    unsafe_code,
    reason = "this crate stands in for functions of the C library"
)]

mod config;
mod connect;
mod data;
mod epoll;
mod files;
mod fork;
mod fork_lock;
mod private;
mod rdma;
mod real;
mod release;
mod sockets;
mod table;
mod turn;
mod wait;
mod watch;

use std::ffi::c_int;

/// Sets `errno`; answers -1, for calls that return an `int`.
fn fail(errno: c_int) -> c_int {
    // SAFETY: the place belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// `errno` of the last call.
fn errno() -> c_int {
    // SAFETY: the place belongs to this thread.
    unsafe { *libc::__errno_location() }
}

/// Functions that are looked up by name at their first call. One that does not exist ends the process:
/// its caller has no error for that.
macro_rules! functions {
    ($find:path: $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        pub(crate) unsafe fn $name($($arg: $ty),*) -> $ret {
            use std::sync::atomic::{AtomicPtr, Ordering};
            static FOUND: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());
            let mut at = FOUND.load(Ordering::Relaxed);
            if at.is_null() {
                at = $find(concat!(stringify!($name), "\0"));
                if at.is_null() {
                    std::process::abort();
                }
                FOUND.store(at, Ordering::Relaxed);
            }
            // SAFETY: the function has this signature, and the caller passes what it demands.
            unsafe {
                let f: unsafe extern "C" fn($($ty),*) -> $ret = std::mem::transmute(at);
                f($($arg),*)
            }
        }
    )*};
}
use functions;
