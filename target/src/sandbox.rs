//! What the daemon gives up before it opens anything: capabilities, the way to new ones, and system
//! calls that it never makes.
//!
//! - No new privileges (`PR_SET_NO_NEW_PRIVS`), for this process and all that it starts.
//! - Capabilities but [`NEEDED`]. The service of the package has none to begin with.
//! - A seccomp filter with a list of what is allowed ([`calls`]). No namespaces, mounts, modules,
//!   BPF, tracing of other processes, raw sockets or keys, even with the capabilities for them.
//!
//! # What it does not do
//! Files are not restricted: disks are added while the daemon serves, so it is the user, the
//! service's unit and its device rules that say what can be opened. `execve` is allowed, since an
//! upgrade is one and seccomp cannot read its path; what is executed keeps the filter. Operations
//! that `io_uring` carries out are no system calls, so the filter does not see those: it could open
//! files and sockets in that way, as far as user and capabilities let it.
//!
//! # Refusals
//! A refused call fails with `ENOSYS`, and the kernel's log has it. The alternative, to kill the
//! process, would turn a call that a library makes in a new version into lost acknowledgements and
//! RAM disks. `ENOSYS` is what libraries are prepared for, since older kernels answer so. What
//! libraries try all the time is refused by a second filter, which does not log, or its lines would
//! hide the others.
//!
//! # Upgrades
//! A program that takes over from another one enters nothing: the sandbox of a process outlives
//! `execve`. So nothing can fail here when RAM disks are at stake.
//! But the next program may make calls that the filter refuses; it is asked for its list before.

mod calls;

use std::collections::BTreeMap;
use std::io;

use rustix::process::{getegid, getgroups};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch};

/// Variable of the environment that leaves the sandbox out if it is `off`.
const VARIABLE: &str = "RISERD_SANDBOX";

/// Capabilities that are kept where the daemon has them: to open files of other users, to listen at
/// ports below 1024, to have long receive buffers (`SO_RCVBUFFORCE`), and to lock memory.
const NEEDED: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::IPC_LOCK);

/// Reason why the sandbox was not entered as a whole.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Capabilities or their inheritance cannot be changed.
    #[error("capabilities cannot be given up: {0}")]
    Capabilities(#[source] io::Error),
    /// There is no list of system calls for this kind of processor.
    #[error("no system call filter is known for {}", std::env::consts::ARCH)]
    Architecture,
    /// The filter cannot be made.
    #[error("the system call filter cannot be made: {0}")]
    Compile(#[from] seccompiler::BackendError),
    /// The kernel does not take the filter.
    #[error("the kernel does not take the system call filter: {0}")]
    Filter(#[source] io::Error),
}

/// Enters the sandbox at the start of the daemon, unless the environment says otherwise, or the
/// program takes over from another one. To be called before the process has more than one thread.
///
/// What cannot be given up is an error in the log, and no reason not to serve.
pub fn confine(takes_over: bool) {
    outlive_file_limits();
    if takes_over {
        if !is_confined() {
            tracing::warn!("the program before had no sandbox; the next restart enters it");
        }
    } else if std::env::var_os(VARIABLE).is_some_and(|value| value == "off") {
        tracing::warn!("{VARIABLE}=off: serving without a sandbox of our own");
    } else {
        match enter() {
            Ok(()) => tracing::debug!("entered the sandbox"),
            Err(error) => tracing::error!(%error, "serving with less of a sandbox"),
        }
    }
}

/// Has a write beyond the largest file that the process may have (`ulimit -f`) fail with `EFBIG`,
/// as one command of one disk, instead of ending the daemon by a signal.
#[allow(unsafe_code, reason = "signal(2)")]
fn outlive_file_limits() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Gives up what is not needed, for this process and all that it executes.
///
/// # Errors
/// [`SandboxError`]. As much is given up as was possible until then.
pub fn enter() -> Result<(), SandboxError> {
    let failed = |error: rustix::io::Errno| SandboxError::Capabilities(error.into());
    // The kernel takes a filter of an unprivileged process only after that.
    set_no_new_privs(true).map_err(failed)?;
    drop_capabilities().map_err(failed)?;
    install(&filter()?, libc::SECCOMP_FILTER_FLAG_LOG).map_err(SandboxError::Filter)?;
    install(&quiet_filter()?, 0).map_err(SandboxError::Filter)
}

/// Returns true if this process has the filters that [`enter`] installs, by itself or by a program
/// that it took over from. Those of a service manager or a container are others.
#[must_use]
#[allow(unsafe_code, reason = "prctl(2) with an option that has no wrapper")]
pub fn is_confined() -> bool {
    // SAFETY: the kernel has no such option, so nothing happens.
    let result = unsafe { libc::prctl(calls::PROBE) };
    result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)
}

/// Names of the system calls that this program makes.
#[must_use]
pub fn system_calls() -> Vec<&'static str> {
    let conditional = calls::conditional().into_iter().flatten();
    let conditional = conditional.map(|(name, ..)| name);
    calls::allowed()
        .map(|(name, _)| name)
        .chain(conditional)
        .collect()
}

/// Leaves [`NEEDED`] of the calling thread's capabilities. Those that an unprivileged process
/// inherits (`AmbientCapabilities=` of a unit) are kept as far, or an upgrade would lose them.
fn drop_capabilities() -> rustix::io::Result<()> {
    let mut needed = NEEDED;
    let old = capabilities(None)?;
    if old.permitted.contains(CapabilitySet::SYS_ADMIN) && rings_are_privileged() {
        tracing::warn!(
            "kernel.io_uring_disabled is 1, so CAP_SYS_ADMIN is kept, which rings need; \
             let the daemon's group have them instead: kernel.io_uring_group"
        );
        needed |= CapabilitySet::SYS_ADMIN;
    }
    let mut new = old;
    new.effective &= needed;
    new.permitted &= needed;
    new.inheritable &= needed;
    // Not called for nothing: a filter of the service manager may not allow it.
    if new == old {
        return Ok(());
    }
    set_capabilities(None, new)
}

/// Returns true if the kernel lets only privileged processes and one group have an `io_uring`, and
/// this process is not in the group.
fn rings_are_privileged() -> bool {
    let setting = |name: &str| {
        let value = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
        value.trim().parse::<i64>().ok()
    };
    if setting("io_uring_disabled") != Some(1) {
        return false;
    }
    let mut own = getgroups().unwrap_or_default();
    own.push(getegid());
    let group = setting("io_uring_group");
    !own.iter().any(|gid| Some(gid.as_raw().into()) == group)
}

/// How a refused call fails.
const REFUSED: SeccompAction = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());

fn architecture() -> Result<TargetArch, SandboxError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH);
    arch.map_err(|_| SandboxError::Architecture)
}

/// The program of the filter with the list.
fn filter() -> Result<BpfProgram, SandboxError> {
    let arch = architecture()?;
    // A call without rules is allowed.
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls::allowed()
        .map(|(_, number)| (number, Vec::new()))
        .collect();
    if rules.is_empty() {
        return Err(SandboxError::Architecture);
    }
    rules.extend(calls::conditional()?.map(|(_, number, chain)| (number, chain)));
    let filter = SeccompFilter::new(rules, REFUSED, SeccompAction::Allow, arch)?;
    Ok(filter.try_into()?)
}

/// The program of the filter that refuses without a line in the log. The last filter of those that
/// refuse a call decides about that.
fn quiet_filter() -> Result<BpfProgram, SandboxError> {
    let rules = calls::quietly_refused()?.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, REFUSED, architecture()?)?;
    Ok(filter.try_into()?)
}

/// Installs a filter on all threads of the process, or on none.
#[allow(unsafe_code, reason = "seccomp(2) with flags has no safe wrapper")]
fn install(program: &BpfProgram, log: libc::c_ulong) -> io::Result<()> {
    // A filter must not turn off speculation past stores, which costs more than the filter does.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW | log;
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: the kernel copies the program, whose instructions have the layout of `sock_filter`
    // and outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        thread => Err(io::Error::other(format!("thread {thread} has another one"))),
    }
}
