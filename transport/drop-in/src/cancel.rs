//! Cancellation of threads (pthread_cancel(3)).
//!
//! In rdma-core, the calls that wait for an event are cancellation points. Cancellation unwinds the
//! stack of the thread, which must not happen while a frame holds a lock. Therefore:
//!
//! - A call that waits is `extern "C-unwind"` and sleeps by a function of this module. No frame
//!   between the program and the sleep has anything to drop.
//! - Everything else of such a call is a [`step`], which holds cancellation back. So does the lock of
//!   a device, because the C library's system calls are cancellation points too.
//! - [`Cleanup`] undoes the state of a thread that is cancelled in its sleep. In glibc, it also runs
//!   when a signal handler leaves the sleep by `siglongjmp`.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{process, ptr};

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// `struct _pthread_cleanup_buffer`, which the C library fills.
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

// As in the crate `libc`, but a thread may be unwound here.
unsafe extern "C-unwind" {
    fn read(fd: c_int, buffer: *mut c_void, length: usize) -> isize;
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// Holds back the cancellation of this thread until it is dropped.
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
        // SAFETY: the state is that of `new`.
        unsafe { pthread_setcancelstate(self.previous, ptr::null_mut()) };
    }
}

/// Executes a part of a call that waits. The thread is not cancelled during it, and a panic aborts
/// the process as in any other call.
pub(crate) fn step<R>(act: impl FnOnce() -> R) -> R {
    let _uncancellable = Uncancellable::new();
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| process::abort())
}

/// Function that runs if the thread is cancelled in its sleep, with its argument.
#[derive(Clone, Copy)]
pub(crate) struct Cleanup {
    pub(crate) routine: extern "C" fn(*mut c_void),
    pub(crate) argument: *mut c_void,
}

/// Reads the count of an eventfd, and sleeps for it unless the descriptor is non-blocking. Returns 0
/// or an error number.
///
/// # Safety
/// The descriptor is open. No frame up to the program's has anything to drop, or cancellation is
/// held back.
pub(crate) unsafe fn read_count(fd: c_int) -> c_int {
    let mut count = 0u64;
    // SAFETY: there is room for the count; the thread may be unwound, as the caller promises.
    match unsafe { read(fd, (&raw mut count).cast(), size_of::<u64>()) } {
        0.. => 0,
        // SAFETY: the C library gives each thread a place for its error.
        _ => unsafe { *libc::__errno_location() },
    }
}

/// Waits for descriptors. Returns the number of ready descriptors, or a negative error number.
///
/// # Safety
/// As [`read_count`].
pub(crate) unsafe fn wait(
    fds: &mut [libc::pollfd],
    timeout: Option<libc::timespec>,
    cleanup: Option<Cleanup>,
) -> c_int {
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let mut buffer = Buffer::uninit();
    // SAFETY: the buffer stays in this frame from push to pop; the thread may be unwound, as the
    // caller promises.
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
