//! Tests a daemon where one of the workers hangs: it must stop notifying the service manager, so
//! that it's restarted.

#![allow(unsafe_code, reason = "a single thread is stopped by ptrace(2)")]

use std::io;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::ptr;
use std::time::Duration;

use riser_testkit::daemon::Daemon;

/// Watchdog timeout of the service manager.
const LIMIT: Duration = Duration::from_millis(400);

fn check(result: libc::c_long) {
    assert_ne!(result, -1, "{}", io::Error::last_os_error());
}

/// Stops a single thread of a child process. It continues on drop.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new(thread: libc::pid_t) -> Self {
        let null = ptr::null_mut::<libc::c_void>();
        // SAFETY: except for the status, these calls don't access any memory.
        unsafe {
            check(libc::ptrace(libc::PTRACE_SEIZE, thread, null, null));
            check(libc::ptrace(libc::PTRACE_INTERRUPT, thread, null, null));
            let mut status = 0;
            let waited = libc::waitpid(thread, &mut status, libc::__WALL);
            assert!(waited == thread && libc::WIFSTOPPED(status), "{status:#x}");
        }
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let null = ptr::null_mut::<libc::c_void>();
        // SAFETY: see above.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, null, null) };
    }
}

/// Returns the ID of the thread with this name.
fn thread(process: u32, name: &str) -> libc::pid_t {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let is_it = |task: &std::path::Path| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    let task = tasks
        .map(|task| task.unwrap().path())
        .find(|task| is_it(task))
        .unwrap_or_else(|| panic!("no thread {name}"));
    task.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn hung_worker_stops_watchdog_notifications() {
    let mut daemon = Daemon::start("hung", "127.81.0.29");
    daemon.kill();
    let file = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("count: 1", "count: 2")).unwrap();
    let path = daemon.dir.join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let receive = |patience: Duration| {
        manager.set_read_timeout(Some(patience)).unwrap();
        let mut message = [0; 256];
        let len = manager.recv(&mut message).ok()?;
        Some(String::from_utf8_lossy(&message[..len]).trim().to_owned())
    };
    let mut command = daemon.command(&file);
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", LIMIT.as_micros().to_string())
        .stderr(Stdio::null());
    daemon.spawn(command);
    let patience = Duration::from_secs(20);
    let alive = || assert_eq!(receive(patience).as_deref(), Some("WATCHDOG=1"));
    assert_eq!(receive(patience).as_deref(), Some("READY=1"));
    for name in ["riser-worker-0", "riser-worker-1"] {
        alive();
        let hung = Stopped::new(thread(daemon.process.id(), name));
        // Discard earlier notifications, and any that were in flight.
        while receive(LIMIT / 20).is_some() {}
        let _ = receive(LIMIT);
        assert_eq!(receive(3 * LIMIT), None, "{name} hangs");
        drop(hung);
        alive();
    }
}
