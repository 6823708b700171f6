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

/// Ends this process if one of its threads panics. Its disk would be broken and still be listed:
/// after an abort, a service manager starts another process, and a ublk device waits for it instead
/// of being removed.
pub(super) fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use rustix::process::Signal;

    use super::*;

    /// The test runs itself again, in a process that panics.
    #[test]
    fn thread_panic_aborts_the_process() {
        const CHILD: &str = "RISER_TEST_PANIC";
        if std::env::var_os(CHILD).is_some() {
            abort_on_panic();
            let _ = std::thread::spawn(|| panic!("a bug")).join();
            return;
        }
        let test = "cli::process::tests::thread_panic_aborts_the_process";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([test, "--exact"]).env(CHILD, "1").output();
        let status = output.unwrap().status;
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()));
    }
}
