//! System calls allowed by the filter.
//!
//! This list covers all calls that are useful for serving files over sockets, rather than only the
//! calls of a specific libc version. This ensures compatibility with other libc versions and with
//! rdma-core libraries.

use libc::c_long;
use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Names, identical to the constants, and numbers.
type Calls = &'static [(&'static str, c_long)];

/// Name, number, and rules. The call is allowed if any rule matches.
pub(super) type Conditional = (&'static str, c_long, Vec<SeccompRule>);

macro_rules! calls {
    ($($name:ident)*) => { &[$((stringify!($name), libc::$name)),*] };
}

/// Calls available on all supported architectures.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const COMMON: Calls = calls![
    // Files and directories.
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
    SYS_preadv2 SYS_pwritev2 SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_lseek SYS_fstat
    SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_fsync SYS_fdatasync SYS_syncfs
    SYS_sync_file_range SYS_truncate SYS_ftruncate SYS_fallocate SYS_fadvise64 SYS_readahead
    SYS_copy_file_range SYS_sendfile SYS_splice SYS_fcntl SYS_flock SYS_dup SYS_dup3 SYS_pipe2
    SYS_getdents64 SYS_getcwd SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_mkdirat
    SYS_unlinkat SYS_renameat SYS_renameat2 SYS_linkat SYS_symlinkat SYS_fchmod SYS_fchmodat
    SYS_umask SYS_utimensat SYS_memfd_create
    // Waiting for I/O and events.
    SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_epoll_create1 SYS_epoll_ctl
    SYS_epoll_pwait SYS_epoll_pwait2 SYS_ppoll SYS_pselect6 SYS_eventfd2 SYS_timerfd_create
    SYS_timerfd_settime SYS_timerfd_gettime SYS_signalfd4
    // Sockets. Creating a socket is restricted in `conditional`.
    SYS_socketpair SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_getsockname
    SYS_getpeername SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg
    SYS_setsockopt SYS_getsockopt SYS_shutdown
    // Memory.
    SYS_brk SYS_mmap SYS_mremap SYS_munmap SYS_mprotect SYS_madvise SYS_msync SYS_mincore SYS_mlock
    SYS_mlock2 SYS_munlock SYS_mlockall SYS_munlockall SYS_membarrier SYS_mbind SYS_get_mempolicy
    SYS_set_mempolicy
    // Threads, signals, and executing the new program in an upgrade.
    SYS_execve SYS_wait4 SYS_waitid SYS_exit SYS_exit_group SYS_futex SYS_set_robust_list
    SYS_get_robust_list SYS_set_tid_address SYS_rseq SYS_sched_yield SYS_sched_getaffinity
    SYS_sched_setaffinity SYS_sched_getparam SYS_sched_getscheduler SYS_getcpu SYS_kill SYS_tkill
    SYS_tgkill SYS_pidfd_open SYS_pidfd_send_signal SYS_rt_sigaction SYS_rt_sigprocmask
    SYS_rt_sigreturn SYS_rt_sigsuspend SYS_rt_sigpending SYS_rt_sigtimedwait SYS_sigaltstack
    SYS_restart_syscall
    // Process information and settings. Additional seccomp filters can only refuse more calls.
    SYS_prctl SYS_seccomp SYS_capget SYS_getpid SYS_getppid SYS_gettid SYS_getpgid SYS_getsid SYS_getuid
    SYS_geteuid SYS_getresuid SYS_getgid SYS_getegid SYS_getresgid SYS_getgroups SYS_getpriority
    SYS_getrlimit SYS_setrlimit SYS_prlimit64 SYS_getrusage SYS_times SYS_sysinfo SYS_uname
    SYS_getrandom
    // Time.
    SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
    SYS_getitimer SYS_setitimer
];

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const COMMON: Calls = &[];

/// Legacy versions of the same calls, unavailable on newer architectures.
#[cfg(target_arch = "x86_64")]
const OLDER: Calls = calls![
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_readlink SYS_getdents SYS_mkdir SYS_rmdir
    SYS_unlink SYS_rename SYS_link SYS_symlink SYS_chmod SYS_dup2 SYS_pipe SYS_poll SYS_select
    SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd SYS_fork SYS_vfork SYS_getpgrp SYS_time
    SYS_alarm SYS_pause SYS_arch_prctl
];

#[cfg(not(target_arch = "x86_64"))]
const OLDER: Calls = &[];

/// clone(2) flags for namespaces, because a process has all capabilities in a new user namespace.
/// (`CLONE_NEWTIME` is not supported by clone(2).)
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Mask for a socket type without flags: `SOCK_TYPE_MASK` in the kernel.
const SOCKET_TYPE: u64 = 0xf;

/// Returns the calls allowed with any arguments. Empty for an unsupported architecture.
pub(super) fn allowed() -> impl Iterator<Item = (&'static str, c_long)> {
    let calls = COMMON.iter().chain(OLDER).copied();
    calls.map(|(name, number)| (name.trim_start_matches("SYS_"), number))
}

/// Returns the calls allowed with specific arguments.
pub(super) fn conditional() -> Result<[Conditional; 3], BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let socket = |family: i32, kind: i32| {
        rule(&[
            (0, Eq, family as u64),
            (1, MaskedEq(SOCKET_TYPE), kind as u64),
        ])
    };
    let netlink =
        |protocol: i32| rule(&[(0, Eq, libc::AF_NETLINK as u64), (2, Eq, protocol as u64)]);
    Ok([
        // Threads and processes. The flags of clone3(2) are in memory, so a filter can't check
        // them. libc falls back to clone(2) if clone3(2) is unavailable.
        (
            "clone",
            libc::SYS_clone,
            vec![rule(&[(0, MaskedEq(NAMESPACES), 0)])?],
        ),
        // Prevents injecting input into the terminal of the user who started the daemon.
        (
            "ioctl",
            libc::SYS_ioctl,
            vec![rule(&[(1, Ne, libc::TIOCSTI), (1, Ne, libc::TIOCLINUX)])?],
        ),
        // No raw sockets and no other address families. Netlink is used to query network interfaces
        // and RDMA devices. Its other protocols are used to configure the kernel.
        (
            "socket",
            libc::SYS_socket,
            vec![
                socket(libc::AF_INET, libc::SOCK_STREAM)?,
                socket(libc::AF_INET, libc::SOCK_DGRAM)?,
                socket(libc::AF_INET6, libc::SOCK_STREAM)?,
                socket(libc::AF_INET6, libc::SOCK_DGRAM)?,
                rule(&[(0, Eq, libc::AF_UNIX as u64)])?,
                netlink(libc::NETLINK_ROUTE)?,
                netlink(libc::NETLINK_RDMA)?,
            ],
        ),
    ])
}

/// A prctl(2) option that does not exist. The call fails with `EINVAL` unless our filters are
/// active. Other filters allow prctl(2), so it is safe to try.
pub(super) const PROBE: i32 = 0x5269_7365;

/// Returns the calls refused without logging. clone3(2) is included because libc tries it for each
/// thread.
pub(super) fn quietly_refused() -> Result<[(i64, Vec<SeccompRule>); 2], BackendError> {
    let probe = rule(&[(0, SeccompCmpOp::Eq, PROBE.cast_unsigned().into())])?;
    Ok([
        (libc::SYS_clone3, Vec::new()),
        (libc::SYS_prctl, vec![probe]),
    ])
}

/// Creates a rule that matches if all conditions apply. Each condition has an argument index, an
/// operator, and a value, which is compared with the lower 32 bits of the argument.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Result<SeccompRule, BackendError> {
    let conditions = conditions.iter().map(|(at, op, value)| {
        SeccompCondition::new(*at, SeccompCmpArgLen::Dword, op.clone(), *value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}
