//! Signals and processors: the few system calls that the standard library lacks.

#![allow(
    unsafe_code,
    reason = "signal masks and processor affinity have no safe wrapper"
)]

use std::io;
use std::mem::{MaybeUninit, size_of};

/// A signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// SIGHUP: read the configuration again.
    Reload,
    /// One that ends the server: its name.
    End(&'static str),
}

/// SIGHUP, SIGTERM and SIGINT, held back from every thread that is started afterwards.
#[derive(Debug)]
pub(super) struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Holds the signals back, in this thread and those that it starts.
    pub(super) fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set before anything reads it; the other calls get
        // a pointer to it, valid signal numbers, and no place for the old mask.
        let (set, result) = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGHUP);
            let set = set.assume_init();
            let result =
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            (set, result)
        };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        Ok(Self { set })
    }

    /// Waits for one of them.
    pub(super) fn wait(&self) -> io::Result<Signal> {
        let mut signal = 0;
        // SAFETY: both pointers are to live values of the right types.
        let result = unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
        match (result, signal) {
            (0, libc::SIGHUP) => Ok(Signal::Reload),
            (0, libc::SIGINT) => Ok(Signal::End("SIGINT")),
            (0, _) => Ok(Signal::End("SIGTERM")),
            (error, _) => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Ends [`Signals::wait`], if this process waits: a worker has failed.
pub(super) fn wake() {
    // SAFETY: reading the present mask changes nothing, and the set is initialised by the call.
    let blocked = unsafe {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), libc::SIGTERM) == 1
    };
    // Where nobody waits for it, as in a program that has a server in its process, the signal would
    // end the program.
    if blocked {
        // SAFETY: a plain system call about our own process.
        unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
    }
}

/// Ties the calling thread to a processor.
pub(super) fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: the set is plain data for which zero is a valid value, `CPU_SET` writes within it as
    // long as the number is below its size, which is checked, and the call reads it.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if cpu >= 8 * size_of::<libc::cpu_set_t>() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
