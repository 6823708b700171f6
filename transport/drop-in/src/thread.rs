//! Threads of the library.

use std::mem::zeroed;
use std::{io, ptr, thread};

/// Signals of a thread's own faults, which a handler of the program may be for.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

/// Makes a thread that takes no signals. They are the program's: one that it waits for must not end
/// the process here, nor run its handler while the thread has locks.
///
/// # Errors
/// Those of making a thread.
pub(crate) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: all-zero bytes are valid sets, which the calls fill.
    unsafe {
        let (mut all, mut old) = (zeroed(), zeroed());
        libc::sigfillset(&raw mut all);
        for fault in FAULTS {
            libc::sigdelset(&raw mut all, fault);
        }
        // A thread begins with the mask of its maker.
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let made = thread::Builder::new().name(name).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut());
        made.map(drop)
    }
}
