//! Requests of a process that serves a disk to the kernel, for itself.

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, configure_io_flusher_behavior, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::url::SECRET_ENV;

/// Takes the passwords out of the environment, which every program that is started inherits.
///
/// To be called while the process has one thread.
#[allow(unsafe_code, reason = "the environment, before there are threads")]
pub(super) fn forget_secrets() {
    for name in SECRET_ENV {
        // SAFETY: the caller's process has no other thread that could read the environment.
        unsafe { std::env::remove_var(name) };
    }
}

/// Keeps memory reclaim from waiting for the disk that this process serves: the kernel writes dirty
/// pages of that very disk to have memory for this process, whose help it then needs for the write.
/// Threads that are started later inherit it. Without the privilege it is left out, and logged.
pub(super) fn serve_without_reclaim() {
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::debug!(%error, "memory reclaim may wait for this disk (CAP_SYS_RESOURCE)");
    }
    // Under a limit, memory that is asked for later would be refused.
    let is_limited = getrlimit(Resource::Memlock).current.is_some()
        && !capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if is_limited {
        tracing::debug!("memory is not locked: its limit is not infinite (CAP_IPC_LOCK)");
        return;
    }
    // What is touched stays; what is only mapped (stacks, a disk in memory) takes nothing.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        tracing::debug!(%error, "memory is not locked");
    }
}
