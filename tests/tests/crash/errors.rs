//! System calls of the daemon fail, one kind and one number at a time.
//!
//! In each round the daemon starts, serves a session that writes, flushes, reads and changes
//! reservations, reloads its configuration and ends, and strace lets one system call fail: the N-th
//! of its kind in a thread, for each N that a run without failures has reached. Then:
//!
//! - nothing panics, nothing hangs, and the end is not by a signal: the daemon does not start, or
//!   serves until it is asked to end;
//! - a command that fails does so with the sense data of a failure, and what was read is what was
//!   written;
//! - the daemon starts without failures, and what was written and flushed is there, as are the
//!   reservations that were acknowledged.
//!
//! `RISER_CRASH_ERRORS` sets how many rounds there are (default 100, at most all; they are an even
//! sample of each kind of call), `RISER_CRASH_CALLS` names the kinds.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;

use riser_scsi::iscsi::pdu::FromTarget;
use riser_scsi::sense::{Sense, SenseKey};
use riser_test_peers::tcp::Client;
use riser_testkit::eventually_some;
use riser_testkit::programs::{missing, skip};
use riser_tests::load::setting;

use crate::daemon::{
    Daemon, GOOD, PATIENCE, REGISTER_AND_IGNORE, RELEASE, RESERVE, paths_in, reserve_in,
    reserve_list, try_log_in,
};

const ADDRESS: &str = "127.0.175.1:3260";

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

/// A kind of system call, and an error that it may end with.
struct Fault {
    call: &'static str,
    error: &'static str,
    at: At,
}

const fn fault(call: &'static str, error: &'static str) -> Fault {
    let at = At::Anything;
    Fault { call, error, at }
}

const fn of_files(call: &'static str, error: &'static str) -> Fault {
    let at = At::Files;
    Fault { call, error, at }
}

const FAULTS: &[Fault] = &[
    fault("openat", "EMFILE"),
    of_files("openat", "EIO"),
    of_files("read", "EIO"),
    of_files("pread64", "EIO"),
    of_files("write", "ENOSPC"),
    of_files("pwrite64", "ENOSPC"),
    of_files("fsync", "EIO"),
    of_files("fdatasync", "EIO"),
    of_files("ftruncate", "ENOSPC"),
    of_files("fallocate", "ENOSPC"),
    of_files("lseek", "EIO"),
    of_files("statx", "EIO"),
    of_files("fstat", "EIO"),
    of_files("fstatfs", "EIO"),
    of_files("newfstatat", "EIO"),
    of_files("getdents64", "EIO"),
    of_files("flock", "ENOLCK"),
    of_files("fcntl", "ENOLCK"),
    of_files("rename", "EIO"),
    of_files("renameat", "EIO"),
    of_files("linkat", "ENOSPC"),
    fault("readlink", "EACCES"),
    fault("prctl", "EINVAL"),
    fault("sched_getaffinity", "EINVAL"),
    of_files("renameat2", "EIO"),
    of_files("unlink", "EIO"),
    of_files("unlinkat", "EIO"),
    of_files("mkdir", "ENOSPC"),
    of_files("mkdirat", "ENOSPC"),
    of_files("chmod", "EPERM"),
    of_files("fchmod", "EPERM"),
    of_files("fchmodat", "EPERM"),
    fault("io_uring_setup", "ENOMEM"),
    fault("io_uring_register", "ENOMEM"),
    fault("io_uring_enter", "ENOMEM"),
    fault("io_uring_enter", "EAGAIN"),
    fault("mmap", "ENOMEM"),
    fault("madvise", "ENOMEM"),
    fault("epoll_create1", "EMFILE"),
    fault("epoll_ctl", "ENOMEM"),
    fault("eventfd2", "EMFILE"),
    fault("clone3", "EAGAIN"),
    fault("socket", "EMFILE"),
    fault("socketpair", "EMFILE"),
    fault("bind", "EADDRINUSE"),
    fault("listen", "EADDRINUSE"),
    fault("accept4", "EMFILE"),
    fault("setsockopt", "ENOBUFS"),
    fault("getsockopt", "ENOBUFS"),
    fault("getsockname", "ENOBUFS"),
    fault("sendmsg", "ENOBUFS"),
    fault("recvmsg", "ENOMEM"),
    // Not `recvfrom`: what has arrived at a Unix or TCP socket is read without memory.
    fault("sendto", "ENOBUFS"),
];

/// What is on the disk and kept of reservations, as far as it is known.
struct Known {
    /// Values that a block may have: the one that was flushed, and later ones.
    blocks: [BTreeSet<u8>; BLOCKS as usize],
    keys: BTreeSet<u64>,
    reserved: BTreeSet<bool>,
}

impl Known {
    fn new() -> Self {
        Self {
            blocks: std::array::from_fn(|_| BTreeSet::from([0])),
            keys: BTreeSet::from([0]),
            reserved: BTreeSet::from([false]),
        }
    }
}

/// An answer: status, data, and the sense data of a CHECK CONDITION.
struct Answer {
    status: u8,
    data: Vec<u8>,
    sense: Option<Sense>,
}

/// Sends a command and waits for its answer; panics where the connection ends.
fn command(client: &mut Client, cdb: &[u8], len: u32, out: &[u8]) -> Answer {
    client.send_command(cdb, !out.is_empty(), len, out);
    let mut data = Vec::new();
    loop {
        let (pdu, _, bytes) = client.receive().expect("an answer");
        let status = match pdu {
            FromTarget::DataIn(pdu) => {
                data.extend(bytes);
                match pdu.status {
                    Some(with) => with.status,
                    None => continue,
                }
            }
            FromTarget::ScsiResponse(response) => {
                // The length of the sense data comes before them (RFC 7143 11.4.7.2).
                let sense = bytes.get(2..).and_then(Sense::parse);
                let status = response.status;
                return Answer {
                    status,
                    data,
                    sense,
                };
            }
            other => panic!("{other:?}"),
        };
        return Answer {
            status,
            data,
            sense: None,
        };
    }
}

/// Runs a command to its end, whether it succeeds; a failure must be reported as one.
fn succeeds(client: &mut Client, what: &str, cdb: &[u8], len: u32, out: &[u8]) -> Option<Vec<u8>> {
    for _ in 0..100 {
        let Answer {
            status,
            data,
            sense,
        } = command(client, cdb, len, out);
        match (status, sense.map(|sense| sense.key)) {
            (GOOD, _) => return Some(data),
            (BUSY | TASK_SET_FULL, _) => return None,
            (CHECK_CONDITION, Some(SenseKey::UnitAttention)) => {}
            (CHECK_CONDITION, Some(SenseKey::MediumError | SenseKey::HardwareError)) => {
                return None;
            }
            (CHECK_CONDITION, Some(SenseKey::AbortedCommand | SenseKey::NotReady)) => return None,
            // Room is missing: for what thin provisioning allocates, or for reservations
            // (SPC-4 5.12.7: INSUFFICIENT REGISTRATION RESOURCES).
            (CHECK_CONDITION, Some(SenseKey::DataProtect | SenseKey::IllegalRequest)) => {
                return None;
            }
            (status, key) => panic!("{what} ends with status {status:#x} and {key:?}"),
        }
    }
    panic!("{what} meets attentions without end");
}

/// Writes and flushes a block, reads it back, and changes the reservations.
fn exchange(client: &mut Client, known: &mut Known, value: u8) {
    let block = value % BLOCKS;
    let bytes = [value; BLOCK];
    let cdb = [0x2a, 0, 0, 0, 0, block, 0, 0, 1, 0];
    known.blocks[usize::from(block)].insert(value);
    let is_written = succeeds(client, "WRITE", &cdb, BLOCK as u32, &bytes).is_some();
    let is_flushed = succeeds(client, "SYNCHRONIZE CACHE", &SYNCHRONIZE, 0, &[]).is_some();
    if is_written && is_flushed {
        known.blocks[usize::from(block)] = BTreeSet::from([value]);
    }
    check_block(client, known, block);
    let old = known.keys.last().copied().unwrap_or_default();
    let key = old + 1;
    known.keys.insert(key);
    let (cdb, list) = reserve_list(REGISTER_AND_IGNORE, (0, key));
    if succeeds(client, "REGISTER", &cdb, 24, &list).is_none() {
        return;
    }
    known.keys = BTreeSet::from([key]);
    let wanted = !known.reserved.contains(&true);
    known.reserved.insert(wanted);
    let (cdb, list) = reserve_list(if wanted { RESERVE } else { RELEASE }, (key, 0));
    if succeeds(client, "RESERVE or RELEASE", &cdb, 24, &list).is_some() {
        known.reserved = BTreeSet::from([wanted]);
    }
}

/// Reads a block; what it has is what it may have.
fn check_block(client: &mut Client, known: &Known, block: u8) -> Option<u8> {
    let cdb = [0x28, 0, 0, 0, 0, block, 0, 0, 1, 0];
    let data = succeeds(client, "READ", &cdb, BLOCK as u32, &[])?;
    let may = &known.blocks[usize::from(block)];
    assert!(
        data.len() == BLOCK && data.iter().all(|byte| *byte == data[0]) && may.contains(&data[0]),
        "block {block} has {:?}, and may have {may:?}",
        data.first()
    );
    Some(data[0])
}

/// Runs `session` with a client, as far as the daemon lives. A panic about a connection that ends
/// is the client's; others are of assertions, and go on.
fn as_far_as_it_lives(session: impl FnOnce(&mut Client)) {
    let result = catch_unwind(AssertUnwindSafe(|| {
        if let Some(mut client) = try_log_in(ADDRESS) {
            client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
            session(&mut client);
        }
    }));
    if let Err(panic) = result {
        let text = text_of(&*panic);
        let ends = [
            "an answer",
            "Broken pipe",
            "Connection reset",
            "BrokenPipe",
            "ConnectionReset",
        ];
        let is_end = text.is_some_and(|text| ends.iter().any(|end| text.contains(end)));
        if !is_end {
            std::panic::resume_unwind(panic);
        }
    }
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

/// The daemon's life in one round: a session, another configuration, a session, the end. Fails with
/// a text that says what was wrong.
fn live(
    daemon: &mut Daemon,
    strace: &[String],
    known: &mut Known,
    value: u8,
) -> Result<Came, String> {
    let log = daemon.folder.join("log");
    File::create(&log).unwrap();
    configure(daemon, false);
    daemon.start(Some(strace));
    let is_up = !daemon.has_ended();
    if is_up {
        as_far_as_it_lives(|client| exchange(client, known, value));
        configure(daemon, true);
        daemon.riserd(&["reload"]);
        as_far_as_it_lives(|client| exchange(client, known, value + 1));
    }
    let has_ended = daemon.has_ended();
    let Some(status) = daemon.terminate(PATIENCE) else {
        return Err("it does not end".into());
    };
    let log = fs::read_to_string(log).unwrap();
    match status.signal() {
        // The run time of Rust gives each thread a stack for signals, and bears no refusal.
        Some(_) if log.contains("failed to allocate an alternative stack") => Ok(Came::NotUp),
        Some(signal) => Err(format!("it ended by signal {signal}\n{log}")),
        None if log.contains("panicked") => Err(format!("it panicked\n{log}")),
        // Its socket is there and a session may begin before it has opened all that it serves.
        None if !log.contains("configuration served") => Ok(Came::NotUp),
        None if has_ended => Err(format!("it ended by itself\n{log}")),
        None => Ok(Came::Through),
    }
}

/// One configuration or another.
fn configure(daemon: &Daemon, more: bool) {
    let folder = daemon.folder.display();
    let disk =
        |name| format!("{name}: {{ kind: file, path: {folder}/{name}, size: 1MiB, create: true }}");
    let (disk, other) = (disk("disk"), disk("other"));
    match more {
        false => daemon.configure(ADDRESS, &format!("{{ {disk} }}"), "{ 0: disk }"),
        true => {
            let backends = format!("{{ {disk}, {other} }}");
            daemon.configure(ADDRESS, &backends, "{ 0: disk, 1: other }");
        }
    }
}

/// Starts it without failures, and compares what is there with what is known; what is there is
/// known then.
fn settle(daemon: &mut Daemon, known: &mut Known) {
    configure(daemon, false);
    daemon.start(None);
    assert!(!daemon.has_ended(), "it starts without failures");
    let mut client = eventually_some("a login", PATIENCE, || try_log_in(ADDRESS));
    for block in 0..BLOCKS {
        let value = check_block(&mut client, known, block).expect("a disk that works");
        known.blocks[usize::from(block)] = BTreeSet::from([value]);
    }
    let keys = reserve_in(&mut client, 0);
    let key = keys.first_chunk().map_or(0, |key| u64::from_be_bytes(*key));
    assert!(known.keys.contains(&key), "key {key}, of {:?}", known.keys);
    known.keys = BTreeSet::from([key]);
    let is_reserved = !reserve_in(&mut client, 1).is_empty();
    let may = &known.reserved;
    assert!(
        may.contains(&is_reserved),
        "reserved: {is_reserved}, of {may:?}"
    );
    known.reserved = BTreeSet::from([is_reserved]);
    drop(client);
    let status = daemon.terminate(PATIENCE).expect("it ends");
    assert!(status.success(), "{status}");
}

/// Most calls of each kind that a thread has made, by a trace of strace's.
fn counted(trace: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for line in trace.lines() {
        // A number of a process, a name, and what the call was given.
        let mut words = line.split_ascii_whitespace();
        let (Some(thread), Some(call)) = (words.next(), words.next()) else {
            continue;
        };
        if let Some((name, _)) = call.split_once('(') {
            *counts.entry((name, thread)).or_insert(0) += 1;
        }
    }
    let mut most = BTreeMap::new();
    for ((name, _), count) in counts {
        let of_name = most.entry(name.to_owned()).or_insert(0);
        *of_name = count.max(*of_name);
    }
    most
}

/// Mappings that the dynamic linker makes, which does not bear that one fails: all before the first
/// call of Rust's run time.
fn mappings_of_the_linker(trace: &str) -> u64 {
    let before = trace.lines().take_while(|line| !line.contains(" poll("));
    before.filter(|line| line.contains(" mmap(")).count() as u64
}

/// Numbers below `count`, `most` of them at most, evenly.
fn sample(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |at| (at as u128 * count as u128 / taken as u128) as usize)
}

/// Runs a closure, and fails where it takes too long.
fn within_patience<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (done, is_done) = channel();
        let runner = scope.spawn(move || {
            let result = run();
            let _ = done.send(());
            result
        });
        if is_done.recv_timeout(5 * PATIENCE).is_err() && !runner.is_finished() {
            // The scope would wait for the thread.
            println!("a round hangs");
            std::process::abort();
        }
        runner
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What can fail: kinds of calls and their numbers.
struct Points {
    all: Vec<(&'static Fault, u64)>,
    /// Arguments that limit strace to the daemon's files.
    only_files: Vec<String>,
}

impl Points {
    /// Finds them in two runs without failures: one with all calls, where files are named, and one
    /// with those on files.
    fn of(daemon: &mut Daemon, known: &mut Known) -> Self {
        let trace = daemon.folder.join("trace");
        let mut observe = |more: &[String], value| {
            let to = ["-y", "-o", trace.to_str().unwrap()].map(str::to_owned);
            let args = [&to, more].concat();
            let came = within_patience(|| live(daemon, &args, known, value));
            assert_eq!(came, Ok(Came::Through), "a run without failures");
            settle(daemon, known);
            fs::read_to_string(&trace).unwrap()
        };
        let of_all = observe(&[], 1);
        let folder = trace.parent().expect("it is in the daemon's folder");
        let files = paths_in(&of_all, folder);
        let only_files: Vec<_> = files
            .iter()
            .flat_map(|path| ["-P", path])
            .map(str::to_owned)
            .collect();
        let (anything, of_files) = (counted(&of_all), counted(&observe(&only_files, 3)));
        let calls = std::env::var("RISER_CRASH_CALLS").unwrap_or_default();
        let is_wanted = |call| calls.is_empty() || calls.split(',').any(|name| name == call);
        let mut all = Vec::new();
        for fault in FAULTS.iter().filter(|fault| is_wanted(fault.call)) {
            let counts = match fault.at {
                At::Anything => &anything,
                At::Files => &of_files,
            };
            let count = counts.get(fault.call).copied().unwrap_or_default();
            let first = match fault.call {
                "mmap" => 1 + mappings_of_the_linker(&of_all),
                _ => 1,
            };
            all.extend((first..=count).map(|number| (fault, number)));
        }
        Self { all, only_files }
    }

    /// Arguments by which strace lets one of them fail.
    fn strace(&self, (fault, number): (&Fault, u64)) -> Vec<String> {
        let Fault { call, error, at } = fault;
        let mut args = match at {
            At::Anything => Vec::new(),
            At::Files => self.only_files.clone(),
        };
        let inject = format!("inject={call}:error={error}:when={number}");
        args.extend(["-e", &inject, "-o", "/dev/null"].map(str::to_owned));
        args
    }
}

#[test]
fn each_call_that_fails_once_loses_nothing_and_stops_nothing_for_good() {
    if let Some(tool) = missing(&["strace"]) {
        return skip("crash errors", &format!("{tool} is not installed"));
    }
    let most = setting("RISER_CRASH_ERRORS", 100) as usize;
    let mut daemon = Daemon::new("errors");
    let mut known = Known::new();
    let points = Points::of(&mut daemon, &mut known);
    let mut failures = Vec::new();
    let (mut rounds, mut ends) = (0_usize, BTreeMap::new());
    for at in sample(points.all.len(), most) {
        let (fault, number) = points.all[at];
        let args = points.strace(points.all[at]);
        // Other values than those of the rounds before.
        let value = 5 + (rounds % 120) as u8 * 2;
        let round = || {
            let life = catch_unwind(AssertUnwindSafe(|| {
                live(&mut daemon, &args, &mut known, value)
            }));
            life.unwrap_or_else(|panic| Err(text_of(&*panic).unwrap_or("?").to_owned()))
        };
        let what = format!("{} of {} number {number}", fault.error, fault.call);
        match within_patience(round) {
            Ok(came) => {
                println!("{what}: {came:?}");
                *ends.entry(came).or_insert(0) += 1;
            }
            Err(why) => {
                daemon.kill();
                failures.push(format!("{what}: {why}"));
            }
        }
        settle(&mut daemon, &mut known);
        rounds += 1;
    }
    let all = points.all.len();
    println!("figure: {rounds} of {all} failures; it came {ends:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(rounds > 0, "no call fails");
}
