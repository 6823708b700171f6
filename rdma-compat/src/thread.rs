//! Threads of the library.

use std::mem::zeroed;
use std::{io, ptr, thread};

/// Signals caused by faults of the thread itself, for which the program may have a handler.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// Starts a thread that does not receive signals. Signals are for the program: if it waits for a
/// signal, the signal must not terminate the process here, and its handlers must not run while the
/// thread holds locks.
///
/// # Errors
/// Returns errors of starting a thread.
pub(crate) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: all zeroes are valid sets, which are initialized by the calls.
    unsafe {
        let (mut all, mut old) = (zeroed(), zeroed());
        libc::sigfillset(&raw mut all);
        for fault in FAULTS {
            libc::sigdelset(&raw mut all, fault);
        }
        // A thread inherits the mask of the thread that creates it.
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let made = thread::Builder::new().name(name).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut());
        made.map(drop)
    }
}
