//! Tests the operations available to the daemon in its sandbox, and the permissions of the service
//! as calculated by systemd from the unit file. The package test checks the running service.
//!
//! To verify that the daemon has all permissions it needs, we rely on all other tests that start a
//! daemon.

#![allow(missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "system calls that are to be refused")]

use std::fs;
use std::process::Command;

use riser_target::sandbox;
use riser_testkit::daemon::{Daemon, RISERD};
use riser_testkit::programs::{WITHOUT_RIGHTS, directory, missing, succeeded};
use riser_testkit::skip::skip;

/// Services, and the maximum exposure level (up to 100) in `systemd-analyze security`. The current
/// values are 20 and 17. Without the empty capability set, the first service would have a value of
/// 40. Fabric services have one capability.
const SERVICES: [(&str, u32, &[&str]); 3] = [
    ("riserd", 25, &[]),
    ("riser-sa", 20, &["CAP_NET_ADMIN"]),
    ("riser-iwpmd", 20, &["CAP_NET_ADMIN"]),
];

/// Returns the path of a unit file.
fn unit(name: &str) -> String {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/systemd");
    format!("{directory}/{name}")
}

/// By default, systemd would stop the service until the next boot after five failures in ten
/// seconds.
#[test]
fn services_are_started_until_they_serve() {
    for (name, ..) in SERVICES {
        let text = fs::read_to_string(unit(&format!("{name}.service"))).unwrap();
        let (unit, service) = text.split_once("[Service]").unwrap();
        assert!(unit.lines().any(|line| line == "StartLimitIntervalSec=0"));
        assert!(service.lines().any(|line| line == "Restart=on-failure"));
    }
}

#[test]
fn services_are_confined() {
    if let Some(tool) = missing(&["systemd-analyze"]) {
        return skip("what services may do", &format!("no {tool}"));
    }
    for (name, exposure, capabilities) in SERVICES {
        let output = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            .arg(format!("--threshold={exposure}"))
            .arg(unit(&format!("{name}.service")))
            // The output only contains cross symbols in this locale.
            .env("LC_ALL", "C.UTF-8")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Overall exposure level"), "{output:?}");
        assert!(output.status.success(), "{text}");
        // Lines that start with a cross are allowed operations.
        let may: Vec<_> = text.lines().filter(|line| line.starts_with('✗')).collect();
        assert!(
            may.iter().any(|line| line.contains("PrivateNetwork=")),
            "no crosses in {text}"
        );
        for line in may {
            let keeps = |capability: &&str| line.contains(&format!("=~{capability}"));
            assert!(
                !line.contains("NoNewPrivileges=")
                    && !line.contains("SystemCallFilter=~@mount")
                    && (!line.contains("CapabilityBoundingSet=") || capabilities.iter().any(keeps)),
                "{name}: {line}"
            );
        }
    }
}

/// System calls with arguments for which they fail or don't change anything if allowed.
const REFUSED: [(&str, libc::c_long, [libc::c_long; 4]); 27] = [
    // Namespaces. For clone(2), we use a conflicting combination of flags.
    ("unshare", libc::SYS_unshare, [0; 4]),
    ("setns", libc::SYS_setns, [-1, 0, 0, 0]),
    (
        "clone of a user",
        libc::SYS_clone,
        [NEWUSER_AND_FS, 0, 0, 0],
    ),
    ("clone3", libc::SYS_clone3, [0; 4]),
    // Mounts and root directories.
    ("mount", libc::SYS_mount, [0; 4]),
    ("umount2", libc::SYS_umount2, [0; 4]),
    ("move_mount", libc::SYS_move_mount, [-1, 0, -1, 0]),
    ("fsopen", libc::SYS_fsopen, [0; 4]),
    ("chroot", libc::SYS_chroot, [0; 4]),
    ("pivot_root", libc::SYS_pivot_root, [0; 4]),
    ("mknodat", libc::SYS_mknodat, [-1, 0, 0, 0]),
    (
        "open_by_handle_at",
        libc::SYS_open_by_handle_at,
        [-1, 0, 0, 0],
    ),
    // Kernel.
    ("init_module", libc::SYS_init_module, [0; 4]),
    ("finit_module", libc::SYS_finit_module, [-1, 0, 0, 0]),
    ("bpf", libc::SYS_bpf, [-1, 0, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, [0, 0, -1, -1]),
    ("clock_settime", libc::SYS_clock_settime, [-1, 0, 0, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0, 0]),
    // Other processes and users.
    ("ptrace", libc::SYS_ptrace, [-1, 0, 0, 0]),
    (
        "process_vm_readv",
        libc::SYS_process_vm_readv,
        [-1, 0, 0, 0],
    ),
    ("setuid", libc::SYS_setuid, [-1, 0, 0, 0]),
    ("setgroups", libc::SYS_setgroups, [-1, 0, 0, 0]),
    // Sockets. All of these families and types would normally be allowed.
    (
        "a raw socket",
        libc::SYS_socket,
        [libc::AF_INET as _, libc::SOCK_RAW as _, 255, 0],
    ),
    (
        "a packet socket",
        libc::SYS_socket,
        [libc::AF_PACKET as _, libc::SOCK_DGRAM as _, 0, 0],
    ),
    (
        "a key socket",
        libc::SYS_socket,
        [libc::AF_KEY as _, libc::SOCK_STREAM as _, 0, 0],
    ),
    (
        "a netfilter socket",
        libc::SYS_socket,
        [
            libc::AF_NETLINK as _,
            libc::SOCK_RAW as _,
            libc::NETLINK_NETFILTER as _,
            0,
        ],
    ),
    ("typing", libc::SYS_ioctl, [-1, libc::TIOCSTI as _, 0, 0]),
];

/// A user namespace is not allowed in combination with the parent's `fs_struct` (clone(2)).
const NEWUSER_AND_FS: libc::c_long = (libc::CLONE_NEWUSER | libc::CLONE_FS) as _;

/// Returns the error of a system call, or zero.
fn errno((_, number, args): &(&str, libc::c_long, [libc::c_long; 4])) -> i32 {
    let [a, b, c, d] = *args;
    // SAFETY: with these arguments the calls have no effect, except for creating sockets that are
    // not used.
    match unsafe { libc::syscall(*number, a, b, c, d) } {
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap(),
        _ => 0,
    }
}

/// Returns the value in `/proc/PID/status` for every thread of a process, using the given key and
/// number base.
fn of_threads(pid: u32, key: &str, base: u32) -> Vec<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let value = |status: String| {
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        u64::from_str_radix(line.unwrap().trim(), base).unwrap()
    };
    // The thread may have exited in the meantime.
    let statuses =
        threads.filter_map(|t| fs::read_to_string(t.unwrap().path().join("status")).ok());
    statuses.map(value).collect()
}

#[test]
fn confined_process_is_restricted() {
    // A filter can't be removed, so we need a separate process.
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--ignored", "--nocapture", "inside"]);
    let said = succeeded(&mut child);
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "a process of its own, for the test above"]
fn inside() {
    let before: Vec<_> = REFUSED.iter().map(errno).collect();
    assert!(!sandbox::is_confined());
    sandbox::drop_privileges().unwrap();
    assert!(sandbox::is_confined());
    for call in &REFUSED {
        assert_eq!(errno(call), libc::ENOSYS, "{}", call.0);
    }
    // The kernel may not support all of them, so these are not checked.
    let there = before
        .iter()
        .filter(|error| **error != libc::ENOSYS)
        .count();
    assert!(there > REFUSED.len() / 2, "{before:?}");
    // Threads, programs and normal sockets must still work.
    std::thread::spawn(|| ()).join().unwrap();
    succeeded(&mut Command::new("true"));
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    std::net::TcpListener::bind("[::1]:0").unwrap();
    // A program that is executed must have the same restrictions.
    let unshare = Command::new("unshare").args(["--user", "true"]).status();
    assert!(!unshare.unwrap().success());
}

/// Start the daemon as root first, and then without privileges, same as the service.
#[test]
fn daemon_stays_confined_after_upgrade() {
    assert!(directory().join("riserd").exists());
    let mut daemon = Daemon::start("confined", "127.0.118.1");
    daemon.kill();
    let mut of_root = Command::new(&*RISERD);
    of_root.args(["run", "--config"]).arg(daemon.config());
    daemon.spawn(of_root);
    let own = of_threads(std::process::id(), "CapPrm", 16)[0];
    stays_confined(&daemon, own);
    daemon.restart(&[]);
    let is_root = !WITHOUT_RIGHTS.is_empty();
    stays_confined(&daemon, if is_root { 0 } else { own });
}

/// Upgrades a daemon that was started with these capabilities.
fn stays_confined(daemon: &Daemon, had: u64) {
    for upgrades in 0..3 {
        let pid = daemon.process.id();
        assert!(
            of_threads(pid, "NoNewPrivs", 10)
                .iter()
                .all(|flag| *flag == 1)
        );
        assert!(of_threads(pid, "Seccomp", 10).iter().all(|mode| *mode == 2));
        // We must not add filters, because each would make every system call slower.
        let filters = of_threads(pid, "Seccomp_filters", 10);
        let started_with = of_threads(std::process::id(), "Seccomp_filters", 10)[0];
        assert!(
            filters.iter().all(|n| *n == started_with + 2),
            "{filters:?}"
        );
        // DAC_OVERRIDE, NET_BIND_SERVICE, NET_ADMIN, IPC_LOCK.
        let needed = 1 << 1 | 1 << 10 | 1 << 12 | 1 << 14;
        for set in ["CapPrm", "CapEff"] {
            let sets = of_threads(pid, set, 16);
            assert!(
                sets.iter().all(|caps| *caps == had & needed),
                "{set}: {sets:x?}"
            );
        }
        assert_eq!(daemon.json("status")["upgrades"], upgrades);
        let upgraded = daemon.run_command(&["upgrade"]);
        assert!(upgraded.status.success(), "{upgraded:?}");
    }
}

#[test]
fn sandbox_can_be_disabled() {
    assert!(directory().join("riserd").exists());
    let mut daemon = Daemon::start("unconfined", "127.0.118.2");
    daemon.kill();
    let mut command = daemon.command(&daemon.config());
    command.env("RISERD_SANDBOX", "off");
    daemon.spawn(command);
    let own = of_threads(std::process::id(), "Seccomp_filters", 10)[0];
    let filters = of_threads(daemon.process.id(), "Seccomp_filters", 10);
    assert!(filters.iter().all(|n| *n == own), "{filters:?}");
}
