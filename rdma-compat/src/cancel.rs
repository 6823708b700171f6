//! Cancellation of threads (pthread_cancel(3)).
//!
//! In rdma-core, calls that wait for an event are cancellation points. Cancellation unwinds the
//! stack of the thread, which must not happen while a frame holds a lock. Therefore:
//!
//! - A call that waits is `extern "C-unwind"` and sleeps using a function of this module. No frame
//!   between the program and the sleep has anything to drop.
//! - Everything else in such a call is a [`step`], which disables cancellation. The lock of a
//!   device also disables it, because system calls of the C library are cancellation points too.
//! - [`Cleanup`] restores the state of a thread that is cancelled while it sleeps. In glibc, it
//!   also runs if a signal handler leaves the sleep using `siglongjmp`.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{process, ptr};

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// `struct _pthread_cleanup_buffer`, initialized by the C library.
type Buffer = MaybeUninit<[usize; 4]>;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn _pthread_cleanup_push(
        buffer: *mut Buffer,
        routine: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut Buffer, execute: c_int);
}

// Same as in the `libc` crate, but these functions may unwind.
unsafe extern "C-unwind" {
    fn read(fd: c_int, buffer: *mut c_void, length: usize) -> isize;
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// Disables cancellation of this thread until it is dropped.
pub(crate) struct Uncancellable {
    previous: c_int,
    /// The state belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl Uncancellable {
    pub(crate) fn new() -> Self {
        let mut previous = 0;
        // SAFETY: the call writes the previous state.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut previous) };
        Self {
            previous,
            _thread: PhantomData,
        }
    }
}

impl Drop for Uncancellable {
    fn drop(&mut self) {
        // SAFETY: the state was returned by `new`.
        unsafe { pthread_setcancelstate(self.previous, ptr::null_mut()) };
    }
}

/// Executes a part of a call that waits. Cancellation is disabled, and a panic aborts the process
/// like in any other call.
pub(crate) fn step<R>(act: impl FnOnce() -> R) -> R {
    let _uncancellable = Uncancellable::new();
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| process::abort())
}

/// A function, and its argument, that is called if the thread is cancelled while it sleeps.
#[derive(Clone, Copy)]
pub(crate) struct Cleanup {
    pub(crate) routine: extern "C" fn(*mut c_void),
    pub(crate) argument: *mut c_void,
}

/// Reads the counter of an eventfd. Blocks until it is nonzero, unless the descriptor is
/// non-blocking. Returns 0 or an error number.
///
/// # Safety
/// The descriptor must be open. No frame up to the program's may have anything to drop, unless
/// cancellation is disabled.
pub(crate) unsafe fn read_count(fd: c_int) -> c_int {
    let mut count = 0u64;
    // SAFETY: the buffer is large enough for the counter. The thread may be unwound, as guaranteed
    // by the caller.
    match unsafe { read(fd, (&raw mut count).cast(), size_of::<u64>()) } {
        0.. => 0,
        // SAFETY: the C library provides a location for each thread.
        _ => unsafe { *libc::__errno_location() },
    }
}

/// Waits for descriptors. Returns the number of ready descriptors, or a negative error number.
///
/// # Safety
/// Same as for [`read_count`].
pub(crate) unsafe fn wait(
    fds: &mut [libc::pollfd],
    timeout: Option<libc::timespec>,
    cleanup: Option<Cleanup>,
) -> c_int {
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let mut buffer = Buffer::uninit();
    // SAFETY: the buffer stays in this frame from push to pop. The thread may be unwound, as
    // guaranteed by the caller.
    let ready = unsafe {
        if let Some(cleanup) = cleanup {
            _pthread_cleanup_push(&raw mut buffer, cleanup.routine, cleanup.argument);
        }
        let ready = ppoll(
            fds.as_mut_ptr(),
            fds.len() as libc::nfds_t,
            timeout,
            ptr::null(),
        );
        if cleanup.is_some() {
            _pthread_cleanup_pop(&raw mut buffer, 0);
        }
        ready
    };
    match ready {
        0.. => ready,
        // SAFETY: as above.
        _ => unsafe { -*libc::__errno_location() },
    }
}
