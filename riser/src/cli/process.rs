//! Configures the process that serves a disk.

use riser_initiator::url::SECRET_ENV;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, configure_io_flusher_behavior, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Removes passwords from the environment, because it is inherited by all child processes.
///
/// This must be called while the process is single-threaded.
#[allow(unsafe_code, reason = "the environment, before there are threads")]
pub(super) fn forget_secrets() {
    for name in SECRET_ENV {
        // SAFETY: the caller guarantees that there are no other threads that could read the
        // environment.
        unsafe { std::env::remove_var(name) };
    }
}

/// Aborts this process if any thread panics. Otherwise its disk would remain in the list without
/// working correctly. After an abort, the service manager can restart the process, and a ublk
/// device is not removed but waits for this process.
pub(super) fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Prevents memory reclaim from waiting for the disk served by this process. To allocate memory for
/// this process, the kernel could otherwise write back dirty pages to the same disk, which requires
/// this process to handle the write. This is inherited by threads started later. If the required
/// privileges are missing, this is only logged.
pub(super) fn serve_without_reclaim() {
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::debug!(%error, "memory reclaim may wait for this disk (CAP_SYS_RESOURCE)");
    }
    // If there is a limit, later allocations could fail.
    let is_limited = getrlimit(Resource::Memlock).current.is_some()
        && !capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if is_limited {
        tracing::debug!("memory is not locked: its limit is not infinite (CAP_IPC_LOCK)");
        return;
    }
    // Only lock pages after they are accessed. This avoids allocating memory for mappings such as
    // stacks and disks in memory.
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

    /// The test runs itself in another process, which panics.
    #[test]
    fn thread_panic_aborts_process() {
        const CHILD: &str = "RISER_TEST_PANIC";
        if std::env::var_os(CHILD).is_some() {
            abort_on_panic();
            let _ = std::thread::spawn(|| panic!("a bug")).join();
            return;
        }
        let test = "cli::process::tests::thread_panic_aborts_process";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([test, "--exact"]).env(CHILD, "1").output();
        let status = output.unwrap().status;
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()));
    }
}
