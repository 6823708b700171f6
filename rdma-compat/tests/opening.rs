//! Devices that cannot be opened, and state left behind by processes. Each device is opened by a
//! separate process.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{CStr, c_int, c_void};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::mem::zeroed;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::time::Duration;

use library::{call, errno};
use riser_rdma_core_sys::bindings::*;
use riser_testkit::eventually;
use riser_testkit::skip::skip;

/// Port of RoCEv2.
const PORT: u16 = 4791;

/// Timeout for actions of a process.
const PATIENCE: Duration = Duration::from_secs(20);

/// Creates a process that opens `riser0` with these devices, after running shell commands.
fn process(devices: &str, before: &str) -> Command {
    process_of("open_device", devices, before)
}

/// Same as [`process`], but runs the given test.
fn process_of(test: &str, devices: &str, before: &str) -> Command {
    let mut command = Command::new("sh");
    let own = std::env::current_exe().unwrap();
    command
        .args(["-c", &format!("{before}\nexec \"$@\"")])
        .arg("sh")
        .arg(own)
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env("RISER_TEST_DEVICES", devices)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for name in ["RISER_INJECT", "RISER_PCAP", "RISER_LOG"] {
        command.env_remove(name);
    }
    command
}

/// A process that holds a device until it is killed.
struct Holder(Child);

impl Holder {
    fn start(devices: &str) -> Self {
        Self::run(process(devices, ""))
    }

    fn run(mut process: Command) -> Self {
        let mut child = process.stdin(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let is_open = lines.any(|line| line.unwrap().ends_with("opened: 0"));
        assert!(is_open, "{process:?}");
        Self(child)
    }

    fn signal(&self, signal: c_int) {
        // SAFETY: the child has not been waited for.
        unsafe { libc::kill(self.0.id().cast_signed(), signal) };
    }

    /// Stops the process, and waits until all its threads are stopped.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: this is a child of this process, and this call does not reap it.
        unsafe { libc::waitpid(self.0.id().cast_signed(), &raw mut status, libc::WUNTRACED) };
        assert!(libc::WIFSTOPPED(status), "{status}");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the error of the process when it opened its device, or 0, and its log.
fn outcome(mut process: Command) -> (c_int, String) {
    let output = process.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let error = text.lines().find_map(|line| line.split_once("opened: "));
    let Some((_, error)) = error else {
        panic!("{:?}: {text}{log}", output.status);
    };
    (error.parse().unwrap(), log)
}

#[expect(clippy::print_stdout, reason = "the process of the test reads it")]
fn report(error: c_int) {
    println!("opened: {error}");
}

/// Executed by the other tests.
#[test]
#[ignore = "a process of the other tests"]
fn open_device() {
    let mut count = 0;
    let list = call!(ibv_get_device_list(&raw mut count => *mut c_int) -> *mut *mut ibv_device);
    let mut is_child = false;
    if std::env::var_os("RISER_TEST_FORK").is_some() {
        // SAFETY: the child continues in the same way as this process.
        let child = unsafe { libc::fork() };
        is_child = child == 0;
        if !is_child {
            // SAFETY: this is a child of this process.
            unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
        }
    }
    if let Some(user) = std::env::var_os("RISER_TEST_USER") {
        // SAFETY: this only affects this process.
        unsafe { libc::setuid(user.to_str().unwrap().parse().unwrap()) };
    }
    if std::env::var_os("RISER_TEST_SUBREAPER").is_some() {
        // SAFETY: this only affects this process.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    }
    if count == 0 {
        report(libc::ENODEV);
        return;
    }
    // SAFETY: the list contains a device.
    let device = unsafe { *list };
    // SAFETY: devices have names.
    let name = unsafe { CStr::from_ptr((*device).name.as_ptr()) };
    assert_eq!(name, c"riser0");
    let context = call!(ibv_open_device(device => *mut ibv_device) -> *mut ibv_context);
    report(if context.is_null() { errno() } else { 0 });
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    if is_child {
        // The thread that would terminate the process does not exist in the child.
        // SAFETY: no other thread uses anything that is destroyed by this.
        unsafe { libc::exit(0) };
    }
}

#[test]
fn foreign_program_on_port_is_reported() {
    let _other = UdpSocket::bind(("127.0.42.1", PORT)).unwrap();
    let (error, log) = outcome(process("riser0=127.0.42.1", ""));
    assert_eq!(error, libc::EADDRINUSE);
    assert!(
        log.contains("it belongs to a process without this library"),
        "{log}"
    );
}

#[test]
fn used_additional_address_is_skipped() {
    let devices = "riser0=127.0.42.9,127.0.42.10,127.0.42.11";
    let holder = Holder::start(devices);
    let (error, log) = outcome(process(devices, ""));
    assert_eq!(error, 0, "{log}");
    assert!(
        log.contains("opened riser0 with only its first address 127.0.42.9"),
        "{log}"
    );
    assert!(log.contains("127.0.42.10:4791: Address already"), "{log}");
    let (error, log) = outcome(process("riser0=127.0.42.10", ""));
    assert_eq!(error, libc::EADDRINUSE);
    assert!(
        log.contains("to a device that has it as a further address"),
        "{log}"
    );
    // If a child opens the device itself, it is a separate process.
    drop(holder);
    let mut forking = process(devices, "");
    forking.env("RISER_TEST_FORK", "1");
    let (error, log) = outcome(forking);
    assert_eq!(error, 0, "{log}");
    // Other errors of an additional address are reported.
    let (error, log) = outcome(process("riser0=127.0.42.9,192.0.2.1", ""));
    assert_eq!(error, libc::EADDRNOTAVAIL);
    assert!(log.contains("192.0.2.1:4791: "), "{log}");
}

#[test]
fn stopped_process_does_not_affect_others() {
    let holder = Holder::start("riser0=127.0.42.2");
    holder.stop();
    assert_eq!(outcome(process("riser0=127.0.42.2", "")).0, 0);
}

/// Returns the process ID of the broker of an address.
fn broker(addr: &str) -> c_int {
    let arguments = |pid: &str| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_broker = |pid: &str| {
        let arguments = arguments(pid);
        let arguments: Vec<_> = arguments.split(|byte| *byte == 0).collect();
        arguments[0] == b"riser-broker" && arguments.contains(&addr.as_bytes())
    };
    let all = fs::read_dir("/proc")
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut all = all.filter_map(|name| name.into_string().ok());
    all.find(|pid| is_broker(pid)).unwrap().parse().unwrap()
}

#[test]
fn stopped_broker_is_reported() {
    let holder = Holder::start("riser0=127.0.42.14");
    let broker = broker("127.0.42.14");
    // SAFETY: the broker runs as long as the holder.
    unsafe { libc::kill(broker, libc::SIGSTOP) };
    let (error, log) = outcome(process("riser0=127.0.42.14", ""));
    assert_eq!(error, libc::EADDRINUSE);
    assert!(
        log.contains("the broker of its processes does not respond"),
        "{log}"
    );
    // SAFETY: as above.
    unsafe { libc::kill(broker, libc::SIGCONT) };
    assert_eq!(outcome(process("riser0=127.0.42.14", "")).0, 0);
    drop(holder);
}

#[test]
fn killed_broker_releases_address() {
    let _holder = Holder::start("riser0=127.0.42.12");
    // SAFETY: the broker runs as long as the holder.
    unsafe { libc::kill(broker("127.0.42.12"), libc::SIGKILL) };
    // The device of the holder is removed.
    eventually("the address", PATIENCE, || {
        outcome(process("riser0=127.0.42.12", "")).0 == 0
    });
}

#[test]
fn broker_uses_runtime_directory() {
    let dir = Dir::new("runtime");
    fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o700)).unwrap();
    let devices = "riser0=127.0.42.16";
    let in_dir = || {
        let mut process = process(devices, "");
        process.env("XDG_RUNTIME_DIR", &dir.0);
        process
    };
    let holder = Holder::run(in_dir());
    assert_eq!(outcome(in_dir()).0, 0);
    // SAFETY: the broker runs as long as the holder. It ignores the signal.
    unsafe { libc::kill(broker("127.0.42.16"), libc::SIGTERM) };
    assert_eq!(outcome(process(devices, "")).0, libc::EADDRINUSE);
    assert_eq!(outcome(in_dir()).0, 0);
    drop(holder);
    eventually("the end of the broker", PATIENCE, || {
        let user = fs::read_dir(&dir.0).unwrap().next().unwrap().unwrap();
        let files = fs::read_dir(user.path()).unwrap();
        let mut names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.all(|name| name.ends_with(".lock"))
    });
}

#[test]
fn subreaper_does_not_adopt_broker() {
    let mut process = process("riser0=127.0.42.17", "");
    process.env("RISER_TEST_SUBREAPER", "1");
    let holder = Holder::run(process);
    let status = fs::read_to_string(format!("/proc/{}/status", broker("127.0.42.17"))).unwrap();
    let parent = format!("PPid:\t{}\n", holder.0.id());
    assert!(!status.contains(&parent), "{status}");
}

#[test]
fn broker_inherits_nothing_from_program() {
    let before = "exec 9</dev/zero; taskset -p 1 $$; chrt -f -p 1 $$";
    let holder = Holder::run(process("riser0=127.0.42.15", before));
    let broker = broker("127.0.42.15");
    // SAFETY: all zeroes is valid, and the size is correct.
    unsafe {
        assert_eq!(libc::sched_getscheduler(broker), libc::SCHED_OTHER);
        let (mut own, mut all): (libc::cpu_set_t, libc::cpu_set_t) = (zeroed(), zeroed());
        libc::sched_getaffinity(0, size_of_val(&own), &raw mut own);
        libc::sched_getaffinity(broker, size_of_val(&all), &raw mut all);
        assert!(libc::CPU_COUNT(&all) >= libc::CPU_COUNT(&own));
    }
    let links = fs::read_dir(format!("/proc/{broker}/fd")).unwrap();
    let links: Vec<_> = links
        .map(|link| fs::read_link(link.unwrap().path()).unwrap())
        .collect();
    let is_own = |link: &PathBuf| {
        let link = link.to_str().unwrap();
        link.starts_with("socket:") || link == "/dev/null" || link.contains("/riser-brokers-")
    };
    assert!(links.iter().all(is_own), "{links:?}");
    drop(holder);
}

/// Binds an identifier to an address and a port, or any free port if it is 0. Returns the error, or
/// 0.
fn bind(addr: Ipv4Addr, port: u16) -> c_int {
    // SAFETY: all zeroes is a valid address, and there is memory for the identifier.
    unsafe {
        let mut to: libc::sockaddr_in = zeroed();
        to.sin_family = libc::AF_INET as _;
        to.sin_addr.s_addr = u32::from(addr).to_be();
        to.sin_port = port.to_be();
        let mut id: *mut rdma_cm_id = ptr::null_mut();
        let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
        let mut result = call!(rdma_create_id(channel => *mut rdma_event_channel,
            &raw mut id => *mut *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
            RDMA_PS_TCP => rdma_port_space) -> c_int);
        if result == 0 {
            let to = (&raw const to).cast();
            result = call!(rdma_bind_addr(id => *mut rdma_cm_id, to => *const c_void) -> c_int);
        }
        if result == 0 { 0 } else { errno() }
    }
}

/// Executed by `killed_parent_frees_port`: binds to a port.
/// If it has to wait until its input is closed, it first binds to a free port.
#[test]
#[ignore = "a process of another test"]
fn bind_port() {
    let wait = || std::io::stdin().read_to_end(&mut Vec::new());
    let bind = |port| bind(Ipv4Addr::new(127, 0, 42, 13), port);
    if std::env::var_os("RISER_TEST_LATE").is_some() {
        report(bind(0));
        let _ = wait();
    }
    let result = bind(7471);
    if std::env::var_os("RISER_TEST_FORK").is_none() {
        report(result);
        return;
    }
    // SAFETY: the child continues in the same way as this process, and exits.
    let is_child = unsafe { libc::fork() } == 0;
    if is_child {
        report(result);
    }
    let _ = wait();
    // SAFETY: it terminates this process.
    unsafe { libc::_exit(0) };
}

#[test]
fn killed_parent_frees_port() {
    let devices = "riser0=127.0.42.13";
    let binds = |variable| {
        let mut process = process_of("bind_port", devices, "");
        process.env(variable, "1");
        process
    };
    let mut other = Holder::run(binds("RISER_TEST_LATE"));
    let mut killed = Holder::run(binds("RISER_TEST_FORK"));
    assert_eq!(outcome(binds("NONE")).0, libc::EADDRINUSE);
    // The child exits when this is closed.
    let _input = killed.0.stdin.take();
    drop(killed);
    drop(other.0.stdin.take());
    let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "opened: 0"));
}

#[test]
fn descriptor_limit_is_reported() {
    let (error, log) = outcome(process("riser0=127.0.42.3", "ulimit -n 30"));
    assert_eq!(error, libc::EMFILE, "{log}");
    assert!(log.contains("Too many open files"), "{log}");
}

#[test]
fn killed_processes_release_slots() {
    let mut holders: Vec<_> = (0..31)
        .map(|_| Holder::start("riser0=127.0.42.4"))
        .collect();
    let (error, log) = outcome(process("riser0=127.0.42.4", ""));
    assert_eq!(error, libc::EUSERS);
    assert!(
        log.contains("too many processes use the address: the limit is 31"),
        "{log}"
    );
    drop(holders.swap_remove(7));
    assert_eq!(outcome(process("riser0=127.0.42.4", "")).0, 0);
    drop(holders);
    assert_eq!(outcome(process("riser0=127.0.42.4", "")).0, 0);
}

#[test]
fn process_of_other_user_is_reported() {
    // SAFETY: it has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return skip(
            "an address of another user",
            "only root can be another user",
        );
    }
    let _holder = Holder::start("riser0=127.0.42.5");
    let mut other = process("riser0=127.0.42.5", "");
    other.env("RISER_TEST_USER", "65534");
    let (error, log) = outcome(other);
    assert_eq!(error, libc::EADDRINUSE);
    assert!(log.contains("to a process of another user"), "{log}");
}

#[test]
fn environment_errors_are_logged_without_colors() {
    let (error, log) = outcome(process("riser0", ""));
    assert_eq!(error, libc::ENODEV);
    assert!(log.contains("RISER_DEVICES: "), "{log}");
    assert!(!log.contains('\x1b'), "{log}");
    let mut faults = process("riser0=127.0.42.6", "");
    faults.env("RISER_INJECT", "lost=1");
    let (error, log) = outcome(faults);
    assert_eq!(error, libc::ENODEV);
    assert!(log.contains("RISER_INJECT: "), "{log}");
    // An invalid log filter does not hide other errors.
    let mut filter = process("riser0=192.0.2.1", "");
    filter.env("RISER_LOG", "loud===");
    let (error, log) = outcome(filter);
    assert_eq!(error, libc::EADDRNOTAVAIL);
    assert!(log.contains("RISER_LOG: "), "{log}");
    assert!(log.contains("cannot open riser0 at 192.0.2.1"), "{log}");
}

#[test]
fn unwritable_log_does_not_stop_program() {
    let mut full = process("riser0", "");
    full.stderr(fs::File::create("/dev/full").unwrap());
    assert_eq!(outcome(full).0, libc::ENODEV);
}

/// A directory for one test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("riser-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn sizes(&self) -> Vec<u64> {
        let files = fs::read_dir(&self.0).unwrap();
        files
            .map(|f| f.unwrap().metadata().unwrap().len())
            .collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn processes_write_separate_complete_captures() {
    let dir = Dir::new("captures");
    let mut capturing = process("riser0=127.0.42.7", "");
    capturing
        .env("RISER_PCAP", dir.0.join("a"))
        .env("RISER_TEST_FORK", "1");
    assert_eq!(outcome(capturing).0, 0);
    // A capture without packets only contains the file header.
    assert_eq!(dir.sizes(), [24, 24]);

    let mut refused = process("riser0=127.0.42.7", "");
    refused.env("RISER_PCAP", dir.0.join("gone/a"));
    let (error, log) = outcome(refused);
    assert_eq!(error, libc::ENOENT);
    assert!(log.contains("gone/a."), "{log}");
}

#[test]
fn killed_process_leaves_capture() {
    let dir = Dir::new("killed");
    let mut child = process("riser0=127.0.42.8", "");
    child
        .env("RISER_PCAP", dir.0.join("a"))
        .stdin(Stdio::piped());
    let child = Holder(child.spawn().unwrap());
    eventually("the header", PATIENCE, || dir.sizes() == [24]);
    drop(child);
}
