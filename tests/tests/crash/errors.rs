//! Tests failed system calls in the daemon, using a single failure at a time.
//!
//! In each round, we start the daemon with two workers, then open a session that writes, flushes,
//! reads and changes reservations. We reload the configuration, open another session and stop the
//! daemon. During this time a single system call fails. We test every N for which the N-th call of
//! this type, in any thread, was reached in a run without failures ([`crate::inject`]). We then
//! verify the following:
//!
//! - The daemon must not panic, hang or be killed by a signal: either it fails to start and reports
//!   the reason, or it runs until it's stopped.
//! - If the daemon continues, another session after the failure must be successful: a failure may
//!   close a single connection, but must not affect any later connections.
//! - If a command fails, its sense data must match the failure ([`may`]), and all data read must be
//!   the data that was written.
//! - If the daemon continues, it must not use more descriptors, threads or memory than without a
//!   failure.
//! - The daemon must then start without a failure, and must still have all flushed data and
//!   acknowledged reservations.
//!
//! There are some exceptions: any command may return BUSY or TASK SET FULL. Pool threads are not
//! counted, and memory use may change by up to [`SWAY`]. Before the Rust runtime has a signal
//! stack, a failure may cause the daemon to be killed by a signal.
//!
//! We also test calls interrupted by a signal (`EINTR`). We can't test partial results, because a
//! filter can only reject a call but not change its length.
//!
//! `RISER_CRASH_ERRORS` sets the maximum number of rounds per protocol (default 12, using an even
//! sample of all calls), and `RISER_CRASH_CALLS` selects the calls.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::pdu::FromTarget;
use riser_scsi::sense::{Sense, SenseKey};
use riser_scsi::srp::{DataBuffer, TargetPortId};
use riser_test_peers::iser_client::Client as Iser;
use riser_test_peers::mini::{Mini, login_req, real};
use riser_test_peers::tcp::Client as Tcp;
use riser_testkit::eventually_some;
use riser_tests::contest::IQN;
use riser_tests::load::setting;
use riser_transport::roce::{Roce, RoceConfig};

use crate::daemon::{
    Daemon, GOOD, PATIENCE, REGISTER_AND_IGNORE, RELEASE, RESERVE, reserve_list, try_log_in,
};
use crate::inject::{Call, Names, Seen, Watch, Watched};

/// Number of blocks to write, and block size in bytes.
const BLOCKS: u8 = 8;
const BLOCK: usize = 512;

const SYNCHRONIZE: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CHECK_CONDITION: u8 = 2;
const BUSY: u8 = 8;
const TASK_SET_FULL: u8 = 0x28;

/// Selects the calls that should fail.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Any file, socket or memory.
    Anything,
    /// Only files in the daemon's directory. For other descriptors the same call can't fail with
    /// this error, for example a write to an event counter.
    Files,
}

/// Sense keys, and additional sense codes with qualifiers.
type May = &'static [(SenseKey, u8, u8)];

/// A system call and an error that it can return.
struct Fault {
    call: Call,
    error: &'static str,
    errno: i32,
    at: At,
}

/// Returns the possible errors of a command if this call has failed, either for the given file or
/// without a file. All other commands must be successful.
fn may(command: &str, call: &str, named: &str) -> May {
    // A unit is not ready if its disk or saved reservations can't be opened (LOGICAL UNIT NOT
    // READY, MANUAL INTERVENTION REQUIRED).
    const NOT_READY: (SenseKey, u8, u8) = (SenseKey::NotReady, 4, 3);
    // Also includes memory and threads used to open or save them.
    let is_kept = named.contains("/state") || ["mmap", "clone3"].contains(&call);
    let is_disk = ["/disk", "/other"].iter().any(|name| named.ends_with(name));
    match command {
        // If it can't be saved, the command must fail: INSUFFICIENT REGISTRATION RESOURCES and
        // RESERVATION RESOURCES (SPC-4 5.12.7), and INTERNAL TARGET FAILURE if there is nothing to
        // reserve.
        "REGISTER" if is_kept => &[NOT_READY, (SenseKey::IllegalRequest, 0x55, 4)],
        "RESERVE" if is_kept => &[NOT_READY, (SenseKey::IllegalRequest, 0x55, 2)],
        "RELEASE" if is_kept => &[NOT_READY, (SenseKey::HardwareError, 0x44, 0)],
        // If a saved flush failure can't be read, we must assume that there was a failure (WRITE
        // ERROR).
        "SYNCHRONIZE CACHE" if named.contains("/flush-failure-") => {
            &[NOT_READY, (SenseKey::MediumError, 0x0c, 0)]
        }
        _ if is_kept || is_disk => &[NOT_READY],
        _ => &[],
    }
}

macro_rules! faults {
    ($($at:ident $name:literal $number:ident $names:ident: $($error:ident),+;)*) => {
        &[$($(Fault {
            call: Call {
                name: $name,
                number: libc::$number,
                names: Names::$names,
            },
            error: stringify!($error),
            errno: libc::$error,
            at: At::$at,
        }),+),*]
    };
}

const FAULTS: &[Fault] = faults! {
    Anything "openat" SYS_openat At: EMFILE, EINTR;
    Files "openat" SYS_openat At: EIO;
    Files "read" SYS_read Descriptor: EIO, EINTR;
    Files "pread64" SYS_pread64 Descriptor: EIO;
    Files "preadv" SYS_preadv Descriptor: EIO;
    Files "preadv2" SYS_preadv2 Descriptor: EIO;
    Files "write" SYS_write Descriptor: ENOSPC, EINTR;
    Files "pwrite64" SYS_pwrite64 Descriptor: ENOSPC;
    Files "pwritev" SYS_pwritev Descriptor: ENOSPC;
    Files "pwritev2" SYS_pwritev2 Descriptor: ENOSPC;
    Files "fsync" SYS_fsync Descriptor: EIO;
    Files "fdatasync" SYS_fdatasync Descriptor: EIO;
    Files "ftruncate" SYS_ftruncate Descriptor: ENOSPC, EINTR;
    Files "fallocate" SYS_fallocate Descriptor: ENOSPC, EINTR;
    Files "lseek" SYS_lseek Descriptor: EIO;
    Files "statx" SYS_statx At: EIO;
    Files "fstat" SYS_fstat Descriptor: EIO;
    Files "statfs" SYS_statfs Path: EIO;
    Files "fstatfs" SYS_fstatfs Descriptor: EIO;
    Files "newfstatat" SYS_newfstatat At: EIO;
    Files "getdents64" SYS_getdents64 Descriptor: EIO;
    Files "flock" SYS_flock Descriptor: ENOLCK;
    Files "fcntl" SYS_fcntl Descriptor: ENOLCK;
    Files "rename" SYS_rename Path: EIO;
    Files "renameat" SYS_renameat At: EIO;
    Files "renameat2" SYS_renameat2 At: EIO;
    Files "linkat" SYS_linkat At: ENOSPC;
    Anything "readlink" SYS_readlink Path: EACCES;
    Anything "prctl" SYS_prctl Nothing: EINVAL;
    Anything "sched_getaffinity" SYS_sched_getaffinity Nothing: EINVAL;
    Anything "getrandom" SYS_getrandom Nothing: EINTR;
    Files "unlink" SYS_unlink Path: EIO;
    Files "unlinkat" SYS_unlinkat At: EIO;
    Files "mkdir" SYS_mkdir Path: ENOSPC;
    Files "mkdirat" SYS_mkdirat At: ENOSPC;
    Files "chmod" SYS_chmod Path: EPERM;
    Files "fchmod" SYS_fchmod Descriptor: EPERM;
    Files "fchmodat" SYS_fchmodat At: EPERM;
    Anything "io_uring_setup" SYS_io_uring_setup Nothing: ENOMEM;
    Anything "io_uring_register" SYS_io_uring_register Nothing: ENOMEM;
    Anything "io_uring_enter" SYS_io_uring_enter Nothing: ENOMEM, EAGAIN, EINTR;
    Anything "mmap" SYS_mmap Nothing: ENOMEM;
    Anything "madvise" SYS_madvise Nothing: ENOMEM;
    Anything "epoll_create1" SYS_epoll_create1 Nothing: EMFILE;
    Anything "epoll_ctl" SYS_epoll_ctl Nothing: ENOMEM;
    Anything "epoll_wait" SYS_epoll_wait Nothing: EINTR;
    Anything "eventfd2" SYS_eventfd2 Nothing: EMFILE;
    Anything "clone3" SYS_clone3 Nothing: EAGAIN;
    Anything "socket" SYS_socket Nothing: EMFILE;
    Anything "socketpair" SYS_socketpair Nothing: EMFILE;
    Anything "bind" SYS_bind Nothing: EADDRINUSE;
    Anything "listen" SYS_listen Nothing: EADDRINUSE;
    Anything "connect" SYS_connect Nothing: ECONNREFUSED, EINTR;
    Anything "accept4" SYS_accept4 Nothing: EMFILE, EINTR;
    Anything "setsockopt" SYS_setsockopt Nothing: ENOBUFS;
    Anything "getsockopt" SYS_getsockopt Nothing: ENOBUFS;
    Anything "getsockname" SYS_getsockname Nothing: ENOBUFS;
    Anything "sendmsg" SYS_sendmsg Nothing: ENOBUFS, EINTR;
    Anything "sendmmsg" SYS_sendmmsg Nothing: ENOBUFS, EINTR;
    Anything "recvmsg" SYS_recvmsg Nothing: ENOMEM, EINTR;
    Anything "recvmmsg" SYS_recvmmsg Nothing: ENOMEM, EINTR;
    // We don't test `recvfrom`, because data received on a Unix or TCP socket can be read without
    // allocating memory.
    Anything "sendto" SYS_sendto Nothing: ENOBUFS, EINTR;
};

/// First call in the Rust runtime. Before this call, only the dynamic linker maps memory, and it
/// can't handle a failure.
const FIRST: Call = Call {
    name: "poll",
    number: libc::SYS_poll,
    names: Names::Nothing,
};

/// Current state of the disk and the reservations, if known.
struct Known {
    /// Possible values of each block: the last flushed value and any later values.
    blocks: [BTreeSet<u8>; BLOCKS as usize],
    keys: BTreeSet<u64>,
    reserved: BTreeSet<bool>,
    /// Commands that failed in this round, and their sense data.
    failures: Vec<(String, (SenseKey, u8, u8))>,
}

impl Known {
    fn new() -> Self {
        Self {
            blocks: std::array::from_fn(|_| BTreeSet::from([0])),
            keys: BTreeSet::from([0]),
            reserved: BTreeSet::from([false]),
            failures: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Iscsi,
    Srp,
    Iser,
}

impl Protocol {
    /// Network used for the daemon, 127.0.N.0.
    fn network(self) -> u8 {
        match self {
            Self::Iscsi => 175,
            Self::Srp => 176,
            Self::Iser => 177,
        }
    }

    fn address(self, host: u8) -> IpAddr {
        Ipv4Addr::new(127, 0, self.network(), host).into()
    }

    fn portal(self) -> String {
        let at = self.address(1);
        match self {
            Self::Iscsi => format!("{{ protocol: iscsi, listen: \"{at}:3260\" }}"),
            Self::Srp => format!("{{ protocol: srp, listen: {at}, ioc_guid: {IOC_GUID:#018x} }}"),
            Self::Iser => format!("{{ protocol: iser, listen: {at} }}"),
        }
    }
}

const IOC_GUID: u64 = 0x0200_c0ff_ee00_0176;

/// An initiator with a session.
enum Peer {
    Iscsi(Tcp),
    Srp(Box<Mini<Roce>>, u32),
    Iser(Box<Iser<Roce>>, u32),
}

/// Returns true if a process is running. After it has exited, the executable is not available, even
/// if it has not been reaped yet.
fn is_there(process: u32) -> bool {
    fs::read_link(format!("/proc/{process}/exe")).is_ok()
}

/// Drives a device in real time until the daemon exits. With RDMA, we would not notice this
/// otherwise.
fn pump_process(process: u32) -> impl FnMut(&mut Roce) {
    move |device| {
        assert!(is_there(process), "the connection ended");
        real(device);
    }
}

impl Peer {
    /// Tries to open a session without waiting.
    fn log_in(protocol: Protocol, process: u32) -> Option<Self> {
        if protocol == Protocol::Iscsi {
            let at = SocketAddr::new(protocol.address(1), 3260);
            let client = try_log_in(&at.to_string())?;
            client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
            return Some(Self::Iscsi(client));
        }
        let device = match Roce::open(&RoceConfig::new(protocol.address(2))) {
            // A process started by another test has copies of our sockets until it executes its
            // program.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return None,
            device => device.unwrap(),
        };
        let mut pump = pump_process(process);
        let attempt = move || match protocol {
            Protocol::Srp => {
                let guid = IOC_GUID.to_be_bytes();
                let port = [guid, guid].concat();
                let request = login_req(1, TargetPortId(port.try_into().expect("16 bytes")));
                let to = SocketAddr::new(protocol.address(1), 5555);
                let mini = Mini::connect(device, to, &request, &mut pump).ok()?;
                Some(Self::Srp(Box::new(mini), process))
            }
            _ => {
                let to = SocketAddr::new(protocol.address(1), 3260);
                let mut iser = Iser::connect(device, to, true, &mut pump).ok()?;
                iser.login(Some(IQN), 1, &[], &mut pump).ok()?;
                Some(Self::Iser(Box::new(iser), process))
            }
        };
        catch_unwind(AssertUnwindSafe(attempt)).ok()?
    }

    /// Sends a command, either with data or with a buffer of `len` bytes, and waits for the
    /// response. Returns the status, and the data or sense data.
    ///
    /// # Panics
    /// Panics if the connection is closed.
    fn command(&mut self, cdb: &[u8], len: u32, out: &[u8]) -> (u8, Vec<u8>) {
        match self {
            Self::Iscsi(client) => command(client, cdb, len, out),
            Self::Srp(mini, process) => {
                mini.data.write(0, out);
                let all = mini.desc(0, len);
                let (to, from) = match (len, out.is_empty()) {
                    (0, _) => (DataBuffer::None, DataBuffer::None),
                    (_, true) => (DataBuffer::None, DataBuffer::Direct(all)),
                    (_, false) => (DataBuffer::Direct(all), DataBuffer::None),
                };
                let response = mini.command(cdb, to, from, &mut pump_process(*process));
                if response.status != GOOD {
                    return (response.status, response.sense);
                }
                let mut data = vec![0; len as usize];
                mini.data.read(0, &mut data);
                (GOOD, data)
            }
            Self::Iser(iser, process) => {
                let len = if out.is_empty() { len } else { 0 };
                iser.command(cdb, out, len, &mut pump_process(*process))
            }
        }
    }

    /// Closes the session, so that the daemon will release its resources.
    fn leave(self) {
        match self {
            Self::Iscsi(_) => {}
            Self::Srp(mini, process) => drop(mini.disconnect(&mut pump_process(process))),
            Self::Iser(iser, process) => iser.disconnect(&mut pump_process(process)),
        }
    }
}

/// Sends an iSCSI command and waits for the response. Panics if the connection is closed.
fn command(client: &mut Tcp, cdb: &[u8], len: u32, out: &[u8]) -> (u8, Vec<u8>) {
    client.send_command(cdb, !out.is_empty(), len, out);
    let mut data = Vec::new();
    let begun = Instant::now();
    loop {
        let Some((pdu, _, bytes)) = client.receive() else {
            // The socket uses the same timeout for reads.
            assert!(begun.elapsed() < PATIENCE, "a command has no response");
            panic!("the connection ended");
        };
        match pdu {
            FromTarget::DataIn(pdu) => {
                data.extend(bytes);
                if let Some(with) = pdu.status {
                    return (with.status, data);
                }
            }
            FromTarget::ScsiResponse(response) if response.status == GOOD => return (GOOD, data),
            // Sense data is sent after its length (RFC 7143 11.4.7.2).
            FromTarget::ScsiResponse(response) => {
                return (response.status, bytes.get(2..).unwrap_or_default().to_vec());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a command. Returns its data if it was successful. Otherwise, the failure and sense data are
/// recorded.
fn succeeds(
    client: &mut Peer,
    known: &mut Known,
    what: &str,
    (cdb, len, out): (&[u8], u32, &[u8]),
) -> Option<Vec<u8>> {
    for _ in 0..100 {
        let (status, data) = client.command(cdb, len, out);
        let sense = Sense::parse(&data);
        match (status, sense) {
            (GOOD, _) => return Some(data),
            (BUSY | TASK_SET_FULL, _) => return None,
            (CHECK_CONDITION, Some(sense)) if sense.key == SenseKey::UnitAttention => {}
            (
                CHECK_CONDITION,
                Some(Sense {
                    key, additional, ..
                }),
            ) => {
                let sense = (key, additional.code, additional.qualifier);
                known.failures.push((what.to_owned(), sense));
                return None;
            }
            (status, sense) => panic!("{what} ends with status {status:#x} and {sense:?}"),
        }
    }
    panic!("{what} meets attentions without end");
}

/// Writes and flushes a block, reads it again and changes the reservations.
fn exchange(client: &mut Peer, known: &mut Known, value: u8) {
    let block = value % BLOCKS;
    let bytes = [value; BLOCK];
    let cdb = [0x2a, 0, 0, 0, 0, block, 0, 0, 1, 0];
    known.blocks[usize::from(block)].insert(value);
    let write = (&cdb[..], BLOCK as u32, &bytes[..]);
    let is_written = succeeds(client, known, "WRITE", write).is_some();
    let flush = (&SYNCHRONIZE[..], 0, &[][..]);
    let is_flushed = succeeds(client, known, "SYNCHRONIZE CACHE", flush).is_some();
    if is_written && is_flushed {
        known.blocks[usize::from(block)] = BTreeSet::from([value]);
    }
    check_block(client, known, block);
    let old = known.keys.last().copied().unwrap_or_default();
    let key = old + 1;
    known.keys.insert(key);
    let (cdb, list) = reserve_list(REGISTER_AND_IGNORE, (0, key));
    if succeeds(client, known, "REGISTER", (&cdb, 24, &list)).is_none() {
        return;
    }
    known.keys = BTreeSet::from([key]);
    let wanted = !known.reserved.contains(&true);
    known.reserved.insert(wanted);
    let (action, what) = match wanted {
        true => (RESERVE, "RESERVE"),
        false => (RELEASE, "RELEASE"),
    };
    let (cdb, list) = reserve_list(action, (key, 0));
    if succeeds(client, known, what, (&cdb, 24, &list)).is_some() {
        known.reserved = BTreeSet::from([wanted]);
    }
}

/// Reads a block and checks that its value is possible.
fn check_block(client: &mut Peer, known: &mut Known, block: u8) -> Option<u8> {
    let cdb = [0x28, 0, 0, 0, 0, block, 0, 0, 1, 0];
    let data = succeeds(client, known, "READ", (&cdb, BLOCK as u32, &[]))?;
    let may = &known.blocks[usize::from(block)];
    assert!(
        data.len() == BLOCK && data.iter().all(|byte| *byte == data[0]) && may.contains(&data[0]),
        "block {block} has {:?}, and may have {may:?}",
        data.first()
    );
    Some(data[0])
}

/// Logs in and runs `session` once. Returns true if it was completed. If the connection was closed,
/// this causes a panic in the client, which is ignored. Any other panic is an assertion failure and
/// must be forwarded.
fn is_carried_through(
    (protocol, process): (Protocol, u32),
    session: impl FnOnce(&mut Peer),
) -> bool {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let client = Peer::log_in(protocol, process);
        client.is_some_and(|mut client| {
            session(&mut client);
            client.leave();
            true
        })
    }));
    result.unwrap_or_else(|panic| {
        let text = text_of(&*panic);
        let ends = [
            "response",
            "the connection ended",
            "Broken pipe",
            "Connection reset",
            "BrokenPipe",
            "ConnectionReset",
        ];
        let is_end = text.is_some_and(|text| ends.iter().any(|end| text.contains(end)));
        if !is_end {
            std::panic::resume_unwind(panic);
        }
        false
    })
}

fn text_of(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
}

/// State reached by the daemon in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    /// It failed to start.
    NotUp,
    /// It was running until it was stopped.
    Through,
}

/// Resources used by a daemon between sessions.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    descriptors: usize,
    /// Number of threads, not including pool threads, because their number can change: the kernel
    /// uses them for a ring, and we use them for blocking calls and keep idle threads for several
    /// seconds.
    threads: usize,
    /// Resident memory in bytes, not including file mappings.
    memory: u64,
}

impl Held {
    fn by(process: u32) -> Option<Self> {
        let list = |name| fs::read_dir(format!("/proc/{process}/{name}")).ok();
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
        let names = list("task")?.filter_map(|task| name(task.ok()?));
        let pools = ["iou-wrk-", "riser-offload"];
        let is_own = |name: &String| !pools.iter().any(|pool| name.starts_with(pool));
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let is_resident = |line: &&str| {
            ["RssAnon:", "RssShmem:"]
                .iter()
                .any(|name| line.starts_with(name))
        };
        let kib = status.lines().filter(is_resident);
        let kib = kib.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        Some(Self {
            descriptors: list("fd")?.count(),
            threads: names.filter(is_own).count(),
            memory: kib.sum::<u64>() << 10,
        })
    }

    fn or_more(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            memory: self.memory.max(other.memory),
        }
    }

    /// Returns true if this doesn't exceed the resources used by another daemon after the same
    /// sessions.
    fn is_within(&self, most: &Self) -> bool {
        self.descriptors <= most.descriptors
            && self.threads <= most.threads
            && self.memory <= most.memory + SWAY
    }
}

/// Memory use can be different between two runs because of thread scheduling: if more packets are
/// received at the same time, a device will use more of its buffers.
const SWAY: u64 = 4 << 20;

/// Result of a round.
#[derive(Debug)]
struct Life {
    reached: Reached,
    held: Option<Held>,
    seen: Seen,
}

/// Runs a round: a session, a new configuration, another session, and a stop. The resources must
/// not exceed `most`. Returns an error message on failure.
fn live(
    daemon: &mut Daemon,
    protocol: Protocol,
    watch: Watch,
    known: &mut Known,
    (value, most): (u8, Option<Held>),
) -> Result<Life, String> {
    let log = daemon.directory.join("log");
    File::create(&log).unwrap();
    known.failures.clear();
    configure(daemon, protocol, false);
    let watcher = daemon.start_watched(watch);
    let is_up = !daemon.has_ended();
    let process = daemon.process();
    let (mut held, mut is_through) = (None, false);
    if is_up {
        // This session may be closed by the failure, or the failure may happen in the next session.
        is_carried_through((protocol, process), |client| exchange(client, known, value));
        configure(daemon, protocol, true);
        daemon.riserd(&["reload"]);
        is_through = eventually_some("a session after the failure", PATIENCE, || {
            let session = |client: &mut Peer| exchange(client, known, value + 1);
            let is_through = is_carried_through((protocol, process), session);
            (is_through || !is_there(process)).then_some(is_through)
        });
        // The daemon is notified later that a connection was closed, and idle threads take some
        // time to exit.
        let until = Instant::now() + most.map_or(Duration::from_millis(300), |_| REST);
        while let Some(now) = Held::by(daemon.process()) {
            held = Some(match (held, most) {
                (Some(before), None) => now.or_more(before),
                _ => now,
            });
            if most.is_some_and(|most| now.is_within(&most)) || Instant::now() > until {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    let has_ended = daemon.has_ended();
    let Some(status) = daemon.terminate(PATIENCE) else {
        return Err("it does not end".into());
    };
    let seen = watcher.seen();
    let log = fs::read_to_string(log).unwrap();
    let life = |reached| Life {
        reached,
        held,
        seen,
    };
    match status.signal() {
        // The Rust runtime allocates a signal stack for each thread and can't handle a failure.
        Some(_) if log.contains("failed to allocate an alternative stack") => {
            Ok(life(Reached::NotUp))
        }
        Some(signal) => Err(format!("it ended by signal {signal}\n{log}")),
        None if log.contains("panicked") => Err(format!("it panicked\n{log}")),
        // The socket already exists before everything has been opened, so a session may start
        // earlier. Note that the call that fails could be a write of one of these lines.
        None if !["configuration served", "shutting down"]
            .iter()
            .any(|line| log.contains(line)) =>
        {
            // The reason must be logged, either by the daemon or by the dynamic linker on its
            // behalf.
            let says_why = log.lines().any(|line| line.contains("riserd: "));
            match !status.success() && says_why {
                true => Ok(life(Reached::NotUp)),
                false => Err(format!("it did not start, with {status}\n{log}")),
            }
        }
        None if has_ended => Err(format!("it ended by itself\n{log}")),
        None if !is_through => Err(format!("it carried no session through\n{log}")),
        None => match (held, most) {
            (Some(held), Some(most)) if !held.is_within(&most) => Err(format!(
                "it holds {held:?}, and without the failure {most:?}\n{log}"
            )),
            _ => Ok(life(Reached::Through)),
        },
    }
}

/// Maximum time for the daemon to release resources it does not need.
const REST: Duration = Duration::from_secs(20);

/// Writes one of two configurations.
fn configure(daemon: &Daemon, protocol: Protocol, more: bool) {
    let directory = daemon.directory.display();
    let disk = |name| {
        format!("{name}: {{ kind: file, path: {directory}/{name}, size: 1MiB, create: true }}")
    };
    let (disk, other) = (disk("disk"), disk("other"));
    let portal = protocol.portal();
    let (backends, luns) = match more {
        false => (format!("{{ {disk} }}"), "{ 0: disk }"),
        true => (format!("{{ {disk}, {other} }}"), "{ 0: disk, 1: other }"),
    };
    daemon.configure_at(&portal, &backends, luns, 2);
}

/// Starts the daemon without failures and checks that its state is possible. This is then used as
/// the known state.
fn clear_failures(daemon: &mut Daemon, protocol: Protocol, known: &mut Known) {
    configure(daemon, protocol, false);
    daemon.start(None);
    assert!(!daemon.has_ended(), "it starts without failures");
    let process = daemon.process();
    let log_in = || Peer::log_in(protocol, process);
    let mut client = eventually_some("a login", PATIENCE, log_in);
    let reserve_in = |client: &mut Peer, known: &mut Known, action| {
        let cdb = [0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0];
        let data = succeeds(client, known, "PERSISTENT RESERVE IN", (&cdb, 256, &[]));
        let data = data.expect("a disk that works");
        // Data after the header, using the length in the header (SPC-4 6.15.2.1).
        let len = u32::from_be_bytes(data[4..8].try_into().expect("4 bytes"));
        data[8..8 + len as usize].to_vec()
    };
    for block in 0..BLOCKS {
        let value = check_block(&mut client, known, block).expect("a disk that works");
        known.blocks[usize::from(block)] = BTreeSet::from([value]);
    }
    let keys = reserve_in(&mut client, known, 0);
    let key = keys.first_chunk().map_or(0, |key| u64::from_be_bytes(*key));
    assert!(known.keys.contains(&key), "key {key}, of {:?}", known.keys);
    known.keys = BTreeSet::from([key]);
    let is_reserved = !reserve_in(&mut client, known, 1).is_empty();
    let may = &known.reserved;
    assert!(
        may.contains(&is_reserved),
        "reserved: {is_reserved}, of {may:?}"
    );
    known.reserved = BTreeSet::from([is_reserved]);
    client.leave();
    let status = daemon.terminate(PATIENCE).expect("it ends");
    assert!(status.success(), "{status}");
}

/// Returns an even sample of up to `most` numbers below `count`.
fn sample(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |at| (at as u128 * count as u128 / taken as u128) as usize)
}

/// Runs a round with the daemon in this directory. If this times out, the test process exits.
fn within_patience<T: Send>(what: &str, directory: &Path, run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (done, is_done) = channel();
        let runner = scope.spawn(move || {
            let result = run();
            let _ = done.send(());
            result
        });
        if is_done.recv_timeout(5 * PATIENCE).is_err() && !runner.is_finished() {
            // We can't panic here, because the scope would have to wait for the thread.
            let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
            println!("a round hangs: {what}\n{log}");
            let _ = Command::new("kill")
                .arg("-KILL")
                .args(children_in(directory))
                .status();
            std::process::abort();
        }
        runner
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Returns the IDs of child processes with this directory in their command line.
fn children_in(directory: &Path) -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let children =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let children: Vec<_> = children.collect();
    let numbers = children.iter().flat_map(|list| list.split_whitespace());
    let is_in_directory = |number: &&str| {
        let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&*directory.to_string_lossy())
    };
    numbers.filter(is_in_directory).map(str::to_owned).collect()
}

/// Calls that can fail, and the number of times they are used.
struct Points {
    all: Vec<(&'static Fault, u64)>,
    /// Resources used by a daemon without failures.
    held: Held,
}

impl Points {
    /// Counts the calls in two runs without failures. Some of them depend on timing, so we use the
    /// minimum, which will be reached in every run.
    fn of(daemon: &mut Daemon, protocol: Protocol, known: &mut Known) -> Self {
        let mut calls: Vec<Watched> = FAULTS.iter().map(|fault| fault.watched(daemon)).collect();
        calls.push(Watched {
            call: FIRST,
            below: None,
        });
        let what = format!("without failures, over {protocol:?}");
        let mut lives = [1, 3].map(|value| {
            let watch = Watch {
                calls: calls.clone(),
                fails: None,
            };
            let directory = daemon.directory.clone();
            let run = || live(daemon, protocol, watch, known, (value, None));
            let life = within_patience(&what, &directory, run);
            let life = life.unwrap_or_else(|why| panic!("a run without failures: {why}"));
            assert_eq!(
                (life.reached, &known.failures[..]),
                (Reached::Through, &[][..])
            );
            clear_failures(daemon, protocol, known);
            life
        });
        // To measure its resources, the daemon must run at normal speed.
        let none = Watch {
            calls: Vec::new(),
            fails: None,
        };
        let directory = daemon.directory.clone();
        let run = || live(daemon, protocol, none, known, (5, None));
        let usual = within_patience(&what, &directory, run);
        let held = usual.map(|life| life.held.expect("it has served"));
        let held = held.unwrap_or_else(|why| panic!("a run without failures: {why}"));
        clear_failures(daemon, protocol, known);
        let [first, life] = &mut lives;
        for (count, other) in life.seen.counts.iter_mut().zip(&first.seen.counts) {
            *count = (*count).min(*other);
        }
        let calls = std::env::var("RISER_CRASH_CALLS").unwrap_or_default();
        let is_wanted = |call| calls.is_empty() || calls.split(',').any(|name| name == call);
        let mut all = Vec::new();
        for (at, fault) in FAULTS.iter().enumerate() {
            if !is_wanted(fault.call.name) {
                continue;
            }
            let first = match fault.call.name {
                "mmap" => 1 + life.seen.before_last[at],
                _ => 1,
            };
            all.extend((first..=life.seen.counts[at]).map(|number| (fault, number)));
        }
        Self { all, held }
    }
}

impl Fault {
    fn watched(&self, daemon: &Daemon) -> Watched {
        let below = match self.at {
            At::Anything => None,
            At::Files => Some(daemon.directory.clone()),
        };
        Watched {
            call: self.call,
            below,
        }
    }
}

/// Tests each call in sequence, using this protocol.
fn each_call_fails_once(protocol: Protocol) {
    let most = setting("RISER_CRASH_ERRORS", 12) as usize;
    let calls = std::env::var("RISER_CRASH_CALLS").unwrap_or_default();
    let test = format!("failed_calls_lose_nothing_over_{protocol:?}").to_lowercase();
    println!(
        "RISER_CRASH_ERRORS={most} RISER_CRASH_CALLS={calls} cargo test -p riser-tests --test crash {test}"
    );
    let mut daemon = Daemon::new(&format!("errors-{protocol:?}").to_lowercase());
    let directory = daemon.directory.clone();
    let mut known = Known::new();
    let points = Points::of(&mut daemon, protocol, &mut known);
    let mut failures = Vec::new();
    let (mut rounds, mut missed, mut ends) = (0_usize, 0, BTreeMap::new());
    for at in sample(points.all.len(), most) {
        let (fault, number) = points.all[at];
        // Use a different value than in previous rounds.
        let value = 7 + (rounds % 120) as u8 * 2;
        let round = || {
            let watch = Watch {
                calls: vec![fault.watched(&daemon)],
                fails: Some((number, fault.errno)),
            };
            let mut held = points.held;
            // If a pool thread has no name, it's counted as well.
            held.threads += usize::from(fault.call.name == "prctl");
            let bounds = (value, Some(held));
            let life = catch_unwind(AssertUnwindSafe(|| {
                live(&mut daemon, protocol, watch, &mut known, bounds)
            }));
            life.unwrap_or_else(|panic| {
                let log = fs::read_to_string(daemon.directory.join("log")).unwrap_or_default();
                Err(format!("{}\n{log}", text_of(&*panic).unwrap_or("?")))
            })
        };
        let what = format!("{} of {} number {number}", fault.error, fault.call.name);
        match within_patience(&format!("{what}, over {protocol:?}"), &directory, round) {
            Ok(Life { reached, seen, .. }) => {
                let named = seen.failed.as_deref();
                println!(
                    "{what}: {reached:?}, {:?} {}",
                    known.failures,
                    named.unwrap_or("not reached")
                );
                // Threads may use fewer calls in some of the runs.
                missed += usize::from(named.is_none());
                *ends.entry(reached).or_insert(0) += 1;
                let named = named.unwrap_or_default();
                for (command, sense) in &known.failures {
                    if may(command, fault.call.name, named).contains(sense) {
                        continue;
                    }
                    failures.push(format!("{what}, {named}: {command} ends with {sense:x?}"));
                }
            }
            Err(why) => {
                let why = format!("{what}: {why}");
                println!("{why}");
                failures.push(why);
                daemon.kill();
            }
        }
        clear_failures(&mut daemon, protocol, &mut known);
        rounds += 1;
    }
    let all = points.all.len();
    println!("result: {rounds} of {all} failures, {missed} not reached; outcomes {ends:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(missed <= rounds / 4, "few calls fail");
}

#[test]
fn failed_calls_lose_nothing_over_iscsi() {
    each_call_fails_once(Protocol::Iscsi);
}

#[test]
fn failed_calls_lose_nothing_over_srp() {
    each_call_fails_once(Protocol::Srp);
}

#[test]
fn failed_calls_lose_nothing_over_iser() {
    each_call_fails_once(Protocol::Iser);
}
