//! System calls of the daemon fail, one kind and one number at a time.
//!
//! In each round the daemon starts with two workers, serves a session that writes, flushes, reads and
//! changes reservations, reloads its configuration, serves another session and ends; one system call
//! fails: the N-th of its kind, whichever thread makes it, for each N that a run without failures has
//! reached ([`crate::inject`]). Then:
//!
//! - nothing panics, nothing hangs, and the end is not by a signal: the daemon does not start, and
//!   says why, or it serves until it is asked to end;
//! - a daemon that goes on carries a session through after the failure: the failure may cost one
//!   connection, but not the next ones;
//! - a command that fails does so with sense data to which that failure leads ([`may`]), and what was
//!   read is what was written;
//! - a daemon that goes on has no more descriptors, threads and memory than without the failure;
//! - the daemon starts without failures, and what was written and flushed is there, as are the
//!   reservations that were acknowledged.
//!
//! Exceptions: any command may be answered with BUSY or TASK SET FULL. Threads of pools are not
//! counted, and memory may differ by [`SWAY`]. Before Rust's run time has a stack for signals, a
//! failure may end the daemon by a signal.
//!
//! Calls that interrupts cut short (`EINTR`) are among the failures. One that is carried out in part
//! is not: a filter can refuse a call, not change its length.
//!
//! `RISER_CRASH_ERRORS` sets how many rounds there are for each protocol (default 30, at most all;
//! they are an even sample of each kind of call), `RISER_CRASH_CALLS` names the kinds.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
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

/// Blocks that are written, and their size in bytes.
const BLOCKS: u8 = 8;
const BLOCK: usize = 512;

const SYNCHRONIZE: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CHECK_CONDITION: u8 = 2;
const BUSY: u8 = 8;
const TASK_SET_FULL: u8 = 0x28;

/// Calls at which failures are met.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Any files, sockets and memory.
    Anything,
    /// The files of the daemon's folder only: calls of the same name on other things cannot fail
    /// so, as writing to an event counter.
    Files,
}

/// Sense keys and additional sense codes, with qualifiers.
type May = &'static [(SenseKey, u8, u8)];

/// A kind of system call, and an error that it may end with.
struct Fault {
    call: Call,
    error: &'static str,
    errno: i32,
    at: At,
}

/// How a command may end after a call of this name on the file that is named has failed, or on none.
/// Others than these succeed.
fn may(command: &str, call: &str, named: &str) -> May {
    // A unit is not ready while its disk, or what is kept of its reservations, cannot be opened
    // (LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED).
    const NOT_READY: (SenseKey, u8, u8) = (SenseKey::NotReady, 4, 3);
    // Or memory and threads, with which it is opened or saved.
    let is_kept = named.contains("/state") || ["mmap", "clone3"].contains(&call);
    let is_disk = ["/disk", "/other"].iter().any(|name| named.ends_with(name));
    match command {
        // What cannot be saved is not granted: INSUFFICIENT REGISTRATION RESOURCES and RESERVATION
        // RESOURCES (SPC-4 5.12.7), and INTERNAL TARGET FAILURE where nothing is taken up.
        "REGISTER" if is_kept => &[NOT_READY, (SenseKey::IllegalRequest, 0x55, 4)],
        "RESERVE" if is_kept => &[NOT_READY, (SenseKey::IllegalRequest, 0x55, 2)],
        "RELEASE" if is_kept => &[NOT_READY, (SenseKey::HardwareError, 0x44, 0)],
        // A failure of a flush that is kept and cannot be read is taken for one (WRITE ERROR).
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
    // Not `recvfrom`: what has arrived at a Unix or TCP socket is read without memory.
    Anything "sendto" SYS_sendto Nothing: ENOBUFS, EINTR;
};

/// The first call of Rust's run time. Before it only the dynamic linker makes mappings, and it cannot
/// survive a failure there.
const FIRST: Call = Call {
    name: "poll",
    number: libc::SYS_poll,
    names: Names::Nothing,
};

/// What is on the disk and kept of reservations, as far as it is known.
struct Known {
    /// Values that a block may have: the one that was flushed, and later ones.
    blocks: [BTreeSet<u8>; BLOCKS as usize],
    keys: BTreeSet<u64>,
    reserved: BTreeSet<bool>,
    /// Commands that have failed in this round, and their sense data.
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
    /// The daemon's network, 127.0.N.0.
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

/// Whether a process runs. It has no program when it has ended and was not waited for.
fn is_there(process: u32) -> bool {
    fs::read_link(format!("/proc/{process}/exe")).is_ok()
}

/// Drives a device in real time, as long as a daemon lives: over RDMA, its end is not seen.
fn beside(process: u32) -> impl FnMut(&mut Roce) {
    move |device| {
        assert!(is_there(process), "the connection ended");
        real(device);
    }
}

impl Peer {
    /// A session, if it can be had at once.
    fn log_in(protocol: Protocol, process: u32) -> Option<Self> {
        if protocol == Protocol::Iscsi {
            let at = SocketAddr::new(protocol.address(1), 3260);
            let client = try_log_in(&at.to_string())?;
            client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
            return Some(Self::Iscsi(client));
        }
        let device = Roce::open(&RoceConfig::new(protocol.address(2))).unwrap();
        let mut pump = beside(process);
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

    /// Sends a command, with data or for `len` bytes, and waits for its answer: a status, and data
    /// or sense data.
    ///
    /// # Panics
    /// If the connection ends.
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
                let answer = mini.command(cdb, to, from, &mut beside(*process));
                if answer.status != GOOD {
                    return (answer.status, answer.sense);
                }
                let mut data = vec![0; len as usize];
                mini.data.read(0, &mut data);
                (GOOD, data)
            }
            Self::Iser(iser, process) => {
                let len = if out.is_empty() { len } else { 0 };
                iser.command(cdb, out, len, &mut beside(*process))
            }
        }
    }

    /// Ends the session, so that the daemon has nothing of it.
    fn leave(self) {
        match self {
            Self::Iscsi(_) => {}
            Self::Srp(mini, process) => drop(mini.disconnect(&mut beside(process))),
            Self::Iser(iser, process) => iser.disconnect(&mut beside(process)),
        }
    }
}

/// Sends a command over iSCSI and waits for its answer; panics where the connection ends.
fn command(client: &mut Tcp, cdb: &[u8], len: u32, out: &[u8]) -> (u8, Vec<u8>) {
    client.send_command(cdb, !out.is_empty(), len, out);
    let mut data = Vec::new();
    let begun = Instant::now();
    loop {
        let Some((pdu, _, bytes)) = client.receive() else {
            // The socket gives up reading after this time, too.
            assert!(begun.elapsed() < PATIENCE, "a command is not answered");
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
            // The length of the sense data comes before them (RFC 7143 11.4.7.2).
            FromTarget::ScsiResponse(response) => {
                return (response.status, bytes.get(2..).unwrap_or_default().to_vec());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a command to its end; its data if it succeeds. A failure is noted with its sense data.
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

/// Writes and flushes a block, reads it back, and changes the reservations.
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

/// Reads a block; what it has is what it may have.
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

/// Logs in and runs `session`, once; returns whether it came to its end. A panic about a connection
/// that ends is the client's; others are of assertions, and go on.
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
            "an answer",
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

/// How far the daemon came in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Came {
    /// It did not start to serve.
    NotUp,
    /// It served until it was asked to end.
    Through,
}

/// What a daemon holds between sessions.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    descriptors: usize,
    /// Excluding pool threads, whose number varies: the kernel's for a ring, and ours for calls that
    /// block, which rest for seconds before they end.
    threads: usize,
    /// Resident memory in bytes, but for that of files.
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

    /// Whether it is no more than that of another daemon, after the same sessions.
    fn is_within(&self, most: &Self) -> bool {
        self.descriptors <= most.descriptors
            && self.threads <= most.threads
            && self.memory <= most.memory + SWAY
    }
}

/// Memory that one run has more than another by the order of what its threads do: a device touches
/// more of its buffers where more packets come at once.
const SWAY: u64 = 4 << 20;

/// What a round came to.
#[derive(Debug)]
struct Life {
    came: Came,
    held: Option<Held>,
    seen: Seen,
}

/// The daemon's life in one round: a session, another configuration, a session, the end. It may hold
/// no more than `most` then. Fails with a text that says what was wrong.
fn live(
    daemon: &mut Daemon,
    protocol: Protocol,
    watch: Watch,
    known: &mut Known,
    (value, most): (u8, Option<Held>),
) -> Result<Life, String> {
    let log = daemon.folder.join("log");
    File::create(&log).unwrap();
    known.failures.clear();
    configure(daemon, protocol, false);
    let watcher = daemon.start_watched(watch);
    let is_up = !daemon.has_ended();
    let process = daemon.process();
    let (mut held, mut is_through) = (None, false);
    if is_up {
        // The failure may end this one, or be met by the next.
        is_carried_through((protocol, process), |client| exchange(client, known, value));
        configure(daemon, protocol, true);
        daemon.riserd(&["reload"]);
        is_through = eventually_some("a session after the failure", PATIENCE, || {
            let session = |client: &mut Peer| exchange(client, known, value + 1);
            let is_through = is_carried_through((protocol, process), session);
            (is_through || !is_there(process)).then_some(is_through)
        });
        // It learns of the end of a connection a moment later, and gives threads up when they have
        // rested.
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
    let life = |came| Life { came, held, seen };
    match status.signal() {
        // The run time of Rust gives each thread a stack for signals, and bears no refusal.
        Some(_) if log.contains("failed to allocate an alternative stack") => Ok(life(Came::NotUp)),
        Some(signal) => Err(format!("it ended by signal {signal}\n{log}")),
        None if log.contains("panicked") => Err(format!("it panicked\n{log}")),
        // Its socket is there and a session may begin before it has opened all that it serves. The
        // call that fails may be the one that writes either line.
        None if !["configuration served", "shutting down"]
            .iter()
            .any(|line| log.contains(line)) =>
        {
            // It, or the dynamic linker in its name, says why.
            let says_why = log.lines().any(|line| line.contains("riserd: "));
            match !status.success() && says_why {
                true => Ok(life(Came::NotUp)),
                false => Err(format!("it did not start, with {status}\n{log}")),
            }
        }
        None if has_ended => Err(format!("it ended by itself\n{log}")),
        None if !is_through => Err(format!("it carried no session through\n{log}")),
        None => match (held, most) {
            (Some(held), Some(most)) if !held.is_within(&most) => Err(format!(
                "it holds {held:?}, and without the failure {most:?}\n{log}"
            )),
            _ => Ok(life(Came::Through)),
        },
    }
}

/// How long a daemon may take until it holds no more than it needs.
const REST: Duration = Duration::from_secs(20);

/// One configuration or another.
fn configure(daemon: &Daemon, protocol: Protocol, more: bool) {
    let folder = daemon.folder.display();
    let disk =
        |name| format!("{name}: {{ kind: file, path: {folder}/{name}, size: 1MiB, create: true }}");
    let (disk, other) = (disk("disk"), disk("other"));
    let portal = protocol.portal();
    let (backends, luns) = match more {
        false => (format!("{{ {disk} }}"), "{ 0: disk }"),
        true => (format!("{{ {disk}, {other} }}"), "{ 0: disk, 1: other }"),
    };
    daemon.configure_at(&portal, &backends, luns, 2);
}

/// Starts it without failures, and compares what is there with what is known; what is there is
/// known then.
fn settle(daemon: &mut Daemon, protocol: Protocol, known: &mut Known) {
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
        // The data after the header, of the length it gives (SPC-4 6.15.2.1).
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

/// Numbers below `count`, `most` of them at most, evenly.
fn sample(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |at| (at as u128 * count as u128 / taken as u128) as usize)
}

/// Runs a round with the daemon of a folder, and ends the test where it takes too long.
fn within_patience<T: Send>(what: &str, folder: &Path, run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (done, is_done) = channel();
        let runner = scope.spawn(move || {
            let result = run();
            let _ = done.send(());
            result
        });
        if is_done.recv_timeout(5 * PATIENCE).is_err() && !runner.is_finished() {
            // The scope would wait for the thread, and a panic for the scope.
            let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
            println!("a round hangs: {what}\n{log}");
            let _ = Command::new("kill")
                .arg("-KILL")
                .args(children_in(folder))
                .status();
            std::process::abort();
        }
        runner
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Numbers of child processes with a folder in their command lines.
fn children_in(folder: &Path) -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let children =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let children: Vec<_> = children.collect();
    let numbers = children.iter().flat_map(|list| list.split_whitespace());
    let is_of_folder = |number: &&str| {
        let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&*folder.to_string_lossy())
    };
    numbers.filter(is_of_folder).map(str::to_owned).collect()
}

/// What can fail: kinds of calls and their numbers.
struct Points {
    all: Vec<(&'static Fault, u64)>,
    /// What the daemon holds without failures.
    held: Held,
}

impl Points {
    /// Finds them in two runs without failures. What is done by the clock differs; the lesser
    /// numbers are reached in each run.
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
            let folder = daemon.folder.clone();
            let run = || live(daemon, protocol, watch, known, (value, None));
            let life = within_patience(&what, &folder, run);
            let life = life.unwrap_or_else(|why| panic!("a run without failures: {why}"));
            assert_eq!((life.came, &known.failures[..]), (Came::Through, &[][..]));
            settle(daemon, protocol, known);
            life
        });
        // How much it holds is seen at its usual pace.
        let none = Watch {
            calls: Vec::new(),
            fails: None,
        };
        let folder = daemon.folder.clone();
        let run = || live(daemon, protocol, none, known, (5, None));
        let usual = within_patience(&what, &folder, run);
        let held = usual.map(|life| life.held.expect("it has served"));
        let held = held.unwrap_or_else(|why| panic!("a run without failures: {why}"));
        settle(daemon, protocol, known);
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
            At::Files => Some(daemon.folder.clone()),
        };
        Watched {
            call: self.call,
            below,
        }
    }
}

/// Fails one call after the other over a protocol.
fn each_call_fails_once(protocol: Protocol) {
    let most = setting("RISER_CRASH_ERRORS", 30) as usize;
    let calls = std::env::var("RISER_CRASH_CALLS").unwrap_or_default();
    let test = format!("each_call_that_fails_once_loses_nothing_over_{protocol:?}").to_lowercase();
    println!(
        "RISER_CRASH_ERRORS={most} RISER_CRASH_CALLS={calls} cargo test -p riser-tests --test crash {test}"
    );
    let mut daemon = Daemon::new(&format!("errors-{protocol:?}").to_lowercase());
    let folder = daemon.folder.clone();
    let mut known = Known::new();
    let points = Points::of(&mut daemon, protocol, &mut known);
    let mut failures = Vec::new();
    let (mut rounds, mut missed, mut ends) = (0_usize, 0, BTreeMap::new());
    for at in sample(points.all.len(), most) {
        let (fault, number) = points.all[at];
        // Other values than those of the rounds before.
        let value = 7 + (rounds % 120) as u8 * 2;
        let round = || {
            let watch = Watch {
                calls: vec![fault.watched(&daemon)],
                fails: Some((number, fault.errno)),
            };
            let mut held = points.held;
            // A thread of a pool that has got no name counts.
            held.threads += usize::from(fault.call.name == "prctl");
            let bounds = (value, Some(held));
            let life = catch_unwind(AssertUnwindSafe(|| {
                live(&mut daemon, protocol, watch, &mut known, bounds)
            }));
            life.unwrap_or_else(|panic| {
                let log = fs::read_to_string(daemon.folder.join("log")).unwrap_or_default();
                Err(format!("{}\n{log}", text_of(&*panic).unwrap_or("?")))
            })
        };
        let what = format!("{} of {} number {number}", fault.error, fault.call.name);
        match within_patience(&format!("{what}, over {protocol:?}"), &folder, round) {
            Ok(Life { came, seen, .. }) => {
                let named = seen.failed.as_deref();
                println!(
                    "{what}: {came:?}, {:?} {}",
                    known.failures,
                    named.unwrap_or("not reached")
                );
                // Threads do not do as much in each run.
                missed += usize::from(named.is_none());
                *ends.entry(came).or_insert(0) += 1;
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
        settle(&mut daemon, protocol, &mut known);
        rounds += 1;
    }
    let all = points.all.len();
    println!("figure: {rounds} of {all} failures, {missed} not reached; it came {ends:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(missed <= rounds / 4, "few calls fail");
}

#[test]
fn each_call_that_fails_once_loses_nothing_over_iscsi() {
    each_call_fails_once(Protocol::Iscsi);
}

#[test]
fn each_call_that_fails_once_loses_nothing_over_srp() {
    each_call_fails_once(Protocol::Srp);
}

#[test]
fn each_call_that_fails_once_loses_nothing_over_iser() {
    each_call_fails_once(Protocol::Iser);
}
