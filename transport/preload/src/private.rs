//! Descriptors that a process has for itself.

use std::ffi::c_int;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::sync::Once;

use crate::fork_lock::ForkLock;
use crate::real;

/// The descriptors, which a child closes: another thread than that which has one may fork.
static ALL: ForkLock<Vec<c_int>> = ForkLock::new(Vec::new());

extern "C" fn before_fork() {
    ALL.hold();
}

extern "C" fn after_fork() {
    ALL.release(|_| {});
}

extern "C" fn in_child() {
    ALL.release(|all| {
        for fd in all.drain(..) {
            // SAFETY: no thread of the child uses it.
            unsafe { real::close(fd) };
        }
    });
}

/// A file or a socket that no child has.
pub(crate) struct Private(ManuallyDrop<File>);

impl Private {
    /// What a call opens; `None` where it opens none.
    pub(crate) fn open(call: impl FnOnce() -> Option<File>) -> Option<Self> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            // SAFETY: the handlers may be called at any time.
            unsafe {
                libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
            }
        });
        // No child begins between the two steps.
        let mut all = ALL.lock();
        let file = call()?;
        all.push(file.as_raw_fd());
        Some(Self(ManuallyDrop::new(file)))
    }

    /// A copy of a descriptor; `None` where there is no other left.
    pub(crate) fn copy(fd: c_int) -> Option<Self> {
        Self::open(|| {
            // SAFETY: the call takes any number, and the new one is the file's.
            unsafe {
                let copy = real::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0);
                (copy >= 0).then(|| File::from_raw_fd(copy))
            }
        })
    }
}

impl Deref for Private {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let mut all = ALL.lock();
        // A child has closed it.
        let Some(at) = all.iter().position(|fd| *fd == self.as_raw_fd()) else {
            return;
        };
        all.swap_remove(at);
        // Under the lock: a child that is forked in between would have it.
        // SAFETY: the descriptor is this file's, which does not close it.
        unsafe { real::close(self.as_raw_fd()) };
    }
}
