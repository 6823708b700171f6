//! Drops privileges before the daemon opens any file or socket: capabilities, the ability to obtain
//! new ones, and system calls that it never needs.
//!
//! - No new privileges (`PR_SET_NO_NEW_PRIVS`), for this process and all its children.
//! - Drops all capabilities except [`NEEDED`]. The packaged service starts without any.
//! - A seccomp filter with a list of allowed system calls ([`calls`]). Namespaces, mounts, kernel
//!   modules, BPF, tracing of other processes, raw sockets and keys are unavailable, even with the
//!   required capabilities.
//!
//! # Limitations
//! Access to files is not restricted. Disks can be added at run time, so the files that can be
//! opened depend on the user, the systemd unit and its device rules. `execve` is allowed, because
//! it is required for upgrades and seccomp cannot inspect the path. The new program inherits the
//! filter. `io_uring` operations are not system calls, so the filter cannot see them: they can
//! still open files and sockets, if the user and capabilities permit this.
//!
//! # Refused calls
//! A refused call fails with `ENOSYS` and is logged by the kernel. If we killed the process
//! instead, a new system call in a library update would result in lost acknowledgements and RAM
//! disks. Libraries can handle `ENOSYS`, because older kernels return it. Calls that libraries try
//! frequently are refused by a second filter without logging, because these lines would hide all
//! others.
//!
//! # Upgrades
//! After an upgrade, the new program does not enter the sandbox again, because the sandbox survives
//! `execve`. This ensures that no failure is possible here while RAM disks are at stake. The new
//! program may require calls that the filter refuses, so we request its list of calls before the
//! upgrade.

mod calls;

use std::collections::BTreeMap;
use std::io;

use rustix::process::{getegid, getgroups};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch};

/// Environment variable that disables the sandbox if set to `off`.
const VARIABLE: &str = "RISERD_SANDBOX";

/// Capabilities to keep, if available: opening files of other users, listening on ports below 1024,
/// large receive buffers (`SO_RCVBUFFORCE`), and locking memory.
const NEEDED: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::IPC_LOCK);

/// An error when entering the sandbox, which is then incomplete or not active.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Capabilities or their inheritance cannot be changed.
    #[error("cannot drop capabilities: {0}")]
    Capabilities(#[source] io::Error),
    /// There is no list of system calls for this architecture.
    #[error(
        "unsupported architecture for the system call filter: {}",
        std::env::consts::ARCH
    )]
    Architecture,
    /// The filter cannot be compiled.
    #[error("cannot compile the system call filter: {0}")]
    Compile(#[from] seccompiler::BackendError),
    /// The kernel rejected the filter.
    #[error("the kernel rejected the system call filter: {0}")]
    Filter(#[source] io::Error),
}

/// Enters the sandbox when the daemon starts. This is skipped if it is disabled by the environment,
/// or if this program takes over from another one. Must be called while the process has only one
/// thread.
///
/// If this fails, we only log an error and continue to serve.
pub fn confine(takes_over: bool) {
    outlive_file_limits();
    if takes_over {
        if !is_confined() {
            tracing::warn!(
                "the previous program had no sandbox; it will be entered by the next restart"
            );
        }
    } else if std::env::var_os(VARIABLE).is_some_and(|value| value == "off") {
        tracing::warn!("{VARIABLE}=off: serving without a sandbox");
    } else {
        match drop_privileges() {
            Ok(()) => tracing::debug!("entered the sandbox"),
            Err(error) => {
                tracing::error!(%error, "cannot enter the full sandbox; serving with reduced protection");
            }
        }
    }
}

/// Ensures that a write exceeding the maximum file size of the process (`ulimit -f`) fails with
/// `EFBIG`, which affects a single command of one disk, instead of terminating the daemon with a
/// signal.
#[allow(unsafe_code, reason = "signal(2)")]
fn outlive_file_limits() {
    // SAFETY: this doesn't install a signal handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Drops all unnecessary privileges, for this process and all programs it executes.
///
/// # Errors
/// Returns [`SandboxError`] if a step fails. Privileges dropped by the previous steps are not
/// restored.
pub fn drop_privileges() -> Result<(), SandboxError> {
    let failed = |error: rustix::io::Errno| SandboxError::Capabilities(error.into());
    // Required by the kernel before an unprivileged process can install a filter.
    set_no_new_privs(true).map_err(failed)?;
    drop_capabilities().map_err(failed)?;
    install(&filter()?, libc::SECCOMP_FILTER_FLAG_LOG).map_err(SandboxError::Filter)?;
    install(&quiet_filter()?, 0).map_err(SandboxError::Filter)
}

/// Returns true if the filters of [`drop_privileges`] are active in this process, including filters inherited
/// during an upgrade. Ignores other filters, such as filters of a service manager or container.
#[must_use]
#[allow(unsafe_code, reason = "prctl(2) with an option that has no wrapper")]
pub fn is_confined() -> bool {
    // SAFETY: this option doesn't exist in the kernel, so the call has no effect.
    let result = unsafe { libc::prctl(calls::PROBE) };
    result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)
}

/// Returns the names of the system calls used by this program.
#[must_use]
pub fn system_calls() -> Vec<&'static str> {
    let conditional = calls::conditional().into_iter().flatten();
    let conditional = conditional.map(|(name, ..)| name);
    calls::allowed()
        .map(|(name, _)| name)
        .chain(conditional)
        .collect()
}

/// Drops all capabilities of the calling thread except [`NEEDED`]. This subset of inherited
/// capabilities of an unprivileged process (`AmbientCapabilities=` in a unit) is kept as well,
/// because it would be lost in an upgrade otherwise.
fn drop_capabilities() -> rustix::io::Result<()> {
    let mut needed = NEEDED;
    let old = capabilities(None)?;
    if old.permitted.contains(CapabilitySet::SYS_ADMIN) && rings_are_privileged() {
        tracing::warn!(
            "kernel.io_uring_disabled is 1, so CAP_SYS_ADMIN is kept to create rings; allow them \
             for the daemon's group instead: kernel.io_uring_group"
        );
        needed |= CapabilitySet::SYS_ADMIN;
    }
    let mut new = old;
    new.effective &= needed;
    new.permitted &= needed;
    new.inheritable &= needed;
    // Avoid an unnecessary call, because it may be refused by a filter of the service manager.
    if new == old {
        return Ok(());
    }
    set_capabilities(None, new)
}

/// Returns true if `io_uring` is restricted to privileged processes and a group, and this process
/// is not in the group.
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

/// Result of a refused call.
const REFUSED: SeccompAction = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());

fn architecture() -> Result<TargetArch, SandboxError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH);
    arch.map_err(|_| SandboxError::Architecture)
}

/// Compiles the filter with the list of allowed calls.
fn filter() -> Result<BpfProgram, SandboxError> {
    let arch = architecture()?;
    // Calls without rules are always allowed.
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

/// Compiles the filter that refuses calls without logging. If several filters refuse a call, the
/// most recent filter decides whether it is logged.
fn quiet_filter() -> Result<BpfProgram, SandboxError> {
    let rules = calls::quietly_refused()?.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, REFUSED, architecture()?)?;
    Ok(filter.try_into()?)
}

/// Installs a filter on all threads of the process, or on none if this fails.
#[allow(unsafe_code, reason = "seccomp(2) with flags has no safe wrapper")]
fn install(program: &BpfProgram, log: libc::c_ulong) -> io::Result<()> {
    // Don't let the filter enable the mitigation for speculative store bypass, because this is more
    // expensive than the filter.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW | log;
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: the kernel copies the program. The instructions have the same layout as
    // `sock_filter`, and remain valid during the call.
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
