//! Tests a queue using a list instead of the driver ring, and a regular file instead of the device
//! file: descriptors are at the start, and data uses the same offsets as the driver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc;

use riser_block::MemoryDevice;
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use super::super::sys::{DATA_OFFSET, TAG_SHIFT};
use super::*;

const SIZE: u64 = 8 << 20;
const DEPTH: u16 = 16;

/// Commands received by the driver, and their completions.
struct List {
    ends: mpsc::Receiver<(u16, i32)>,
    pushed: Vec<(u32, u16, i32)>,
    submitted: mpsc::Sender<(u32, u16, i32)>,
    breaks: bool,
    /// If set, the next call will not accept any commands.
    is_busy: bool,
    readable: OwnedFd,
}

impl Commands for List {
    fn push(&mut self, op: IoOp, tag: u16, result: i32) {
        self.pushed.push((op as u32, tag, result));
    }

    fn submit(&mut self) -> io::Result<bool> {
        if self.breaks {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if std::mem::take(&mut self.is_busy) {
            return Ok(false);
        }
        for command in self.pushed.drain(..) {
            self.submitted.send(command).unwrap();
        }
        Ok(true)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        self.ends.try_recv().ok()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

struct Bed {
    server: Server<MemoryDevice, List>,
    disk: Arc<MemoryDevice>,
    file: File,
    ends: mpsc::Sender<(u16, i32)>,
    submitted: mpsc::Receiver<(u32, u16, i32)>,
    outcome: Arc<Outcome>,
}

impl Bed {
    fn new(disk: MemoryDevice) -> Self {
        let disk = Arc::new(disk);
        let path = std::env::temp_dir().join(format!(
            "riser-ublk-{}-{:?}",
            std::process::id(),
            thread::current().id()
        ));
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(DATA_OFFSET + (u64::from(DEPTH) << TAG_SHIFT))
            .unwrap();
        let (ends, popped) = mpsc::channel();
        let (pushed, submitted) = mpsc::channel();
        let outcome = Arc::new(Outcome::default());
        let server = Server {
            commands: List {
                ends: popped,
                pushed: Vec::new(),
                submitted: pushed,
                breaks: false,
                is_busy: false,
                readable: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            },
            descs: Descs::map(&file, DEPTH).unwrap(),
            shared: Arc::new(Shared::new(disk.clone(), file.try_clone().unwrap()).unwrap()),
            depth: DEPTH,
            live: None,
            seen: 0,
            results: Vec::new(),
            ending: Ending::new(outcome.clone(), || {}),
        };
        Self {
            server,
            disk,
            file,
            ends,
            submitted,
            outcome,
        }
    }

    /// Runs the first turn, which starts fetching.
    fn fetching() -> Self {
        let mut bed = Self::new(MemoryDevice::new(SIZE, 512).unwrap());
        bed.run();
        let fetches = bed.commands();
        let all = (0..DEPTH).map(|tag| (IoOp::Fetch as u32, tag, -1));
        assert!(fetches.into_iter().eq(all));
        bed
    }

    fn run(&mut self) {
        while self.server.run_once() == ServiceStatus::Worked {}
    }

    fn commands(&self) -> Vec<(u32, u16, i32)> {
        self.submitted.try_iter().collect()
    }

    /// Adds a new request, as done by the driver.
    fn request(&self, tag: u16, op: u32, offset: u64, len: u64) {
        let desc = IoDesc {
            op_flags: op.into(),
            sectors: ((len / 512) as u32).into(),
            start_sector: (offset / 512).into(),
            addr: 0.into(),
        };
        let at = u64::from(tag) * size_of::<IoDesc>() as u64;
        self.file.write_all_at(desc.as_bytes(), at).unwrap();
        self.ends.send((tag, 0)).unwrap();
    }

    fn data_at(tag: u16) -> u64 {
        DATA_OFFSET + (u64::from(tag) << TAG_SHIFT)
    }
}

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 2;

fn commit(tag: u16, result: i32) -> (u32, u16, i32) {
    (IoOp::CommitAndFetch as u32, tag, result)
}

#[test]
fn requests_transfer_data() {
    let mut bed = Bed::fetching();
    for (tag, len) in [(3, 4096), (5, 256 << 10)] {
        let bytes: Vec<u8> = (0..len).map(|at: usize| (at * 7 / 5) as u8).collect();
        bed.file.write_all_at(&bytes, Bed::data_at(tag)).unwrap();
        bed.request(tag, WRITE, 1 << 20, len as u64);
        bed.run();
        assert_eq!(bed.commands(), [commit(tag, len as i32)]);
        let mut on_disk = vec![0; len];
        bed.disk.memory().read(1 << 20, &mut on_disk);
        assert!(on_disk == bytes);
        bed.request(tag + 1, READ, 1 << 20, len as u64);
        bed.run();
        assert_eq!(bed.commands(), [commit(tag + 1, len as i32)]);
        let mut back = vec![0; len];
        bed.file
            .read_exact_at(&mut back, Bed::data_at(tag + 1))
            .unwrap();
        assert!(back == bytes);
    }
    let flushes = bed.disk.flushes();
    bed.request(0, FLUSH, 0, 0);
    bed.run();
    assert_eq!(bed.commands(), [commit(0, 0)]);
    assert_eq!(bed.disk.flushes(), flushes + 1);
}

#[test]
fn failures_are_results_of_their_requests() {
    let mut bed = Bed::fetching();
    bed.disk.spoil(0..512);
    bed.request(1, READ, 0, 4096);
    bed.request(2, READ, SIZE, 512);
    bed.request(3, READ, 0, 4 << 20);
    bed.request(4, 77, 0, 512);
    bed.run();
    let results = [
        commit(1, -libc::EIO),
        commit(2, -libc::EINVAL),
        commit(3, -libc::EINVAL),
        commit(4, -libc::EOPNOTSUPP),
    ];
    assert_eq!(bed.commands(), results);
}

#[test]
fn turn_transfers_bounded_bytes() {
    let mut bed = Bed::fetching();
    let len = 512 << 10;
    for (op, tags) in [(WRITE, 0..DEPTH), (READ, 0..DEPTH)] {
        for tag in tags {
            bed.request(tag, op, u64::from(tag % 8) << 20, len);
        }
        let mut committed = 0;
        while bed.server.run_once() == ServiceStatus::Worked {
            let commits = bed.commands().len();
            assert!(commits <= 2, "{commits} in one turn");
            committed += commits;
        }
        assert_eq!(committed, usize::from(DEPTH));
    }
}

#[test]
fn completion_on_other_thread_ends_sleep() {
    let disk = MemoryDevice::new(SIZE, 512).unwrap();
    let mut bed = Bed::new(disk.with_thread().unwrap());
    bed.run();
    bed.commands();
    bed.request(9, READ, 0, 64 << 10);
    while bed.submitted.try_recv().is_err() {
        if bed.server.run_once() == ServiceStatus::Waiting && bed.server.prepare_sleep() {
            let mut waited = riser_block::poll_fds::PollInterests::new();
            bed.server.add_interests(&mut waited);
            riser_block::poll_fds::wait(waited, None);
        }
        bed.server.end_sleep();
    }
}

#[test]
fn queue_ends_after_all_commands_abort() {
    let mut bed = Bed::fetching();
    for tag in 1..DEPTH {
        bed.ends.send((tag, ABORT)).unwrap();
    }
    bed.request(0, FLUSH, 0, 0);
    bed.run();
    assert_eq!(bed.commands(), [commit(0, 0)]);
    assert!(!bed.outcome.is_over());
    bed.ends.send((0, ABORT)).unwrap();
    assert_eq!(bed.server.run_once(), ServiceStatus::Over);
    let Bed {
        server, outcome, ..
    } = bed;
    drop(server);
    outcome.wait().unwrap();
}

#[test]
fn busy_ring_retries_commands() {
    let mut bed = Bed::fetching();
    bed.request(0, FLUSH, 0, 0);
    bed.server.commands.is_busy = true;
    assert_eq!(bed.server.run_once(), ServiceStatus::Worked);
    assert!(bed.commands().is_empty());
    // The commands should be submitted even if there is nothing else to do in this turn.
    bed.server.commands.is_busy = true;
    assert_eq!(bed.server.run_once(), ServiceStatus::Worked);
    assert_eq!(bed.server.run_once(), ServiceStatus::Waiting);
    assert_eq!(bed.commands(), [commit(0, 0)]);
}

#[test]
fn broken_ring_stops_queue_with_error() {
    let mut bed = Bed::fetching();
    bed.server.commands.breaks = true;
    bed.request(0, FLUSH, 0, 0);
    assert_eq!(bed.server.run_once(), ServiceStatus::Over);
    let Bed {
        server, outcome, ..
    } = bed;
    drop(server);
    let error = outcome.wait().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn recovered_device_may_exceed_optimal_transfer() {
    let disk = MemoryDevice::new(8 << 20, 512).unwrap();
    let disk = disk.with_geometry(|g| g.optimal_transfer = 64 << 10);
    assert_eq!(transfer_len(&disk, 1 << 20), Ok(1 << 20));
    assert_eq!(
        transfer_len(&disk, (1 << 20) + 512),
        Err(BlockError::OutOfRange)
    );
}
