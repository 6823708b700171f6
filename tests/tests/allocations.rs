//! Checks that after warm-up, neither program allocates memory for a 4 KiB read or write. This
//! covers the worker in `riserd` and the engine in `riser` for each protocol, using real sockets
//! and a load that runs on the engine thread, same as in `riser bench`.
//!
//! See `target/tests/allocations.rs` for tests of the target with other sizes and data paths.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riser_block::task::block_on;
use riser_block::{Buffer, Completion, Operation, Submissions, Workload, drive};
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::{IscsiUrl, SrpUrl, TargetUrl};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_testkit::alloc::Counting;
use riser_testkit::allocations::{self, allocates_nothing};
use riser_testkit::eventually;
use riser_transport::roce::{Roce, RoceConfig};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new(allocations::record);

const IQN: &str = "iqn.2026-01.org.example:disk";
const TARGET: Ipv4Addr = Ipv4Addr::new(127, 80, 2, 1);
const INITIATOR: Ipv4Addr = Ipv4Addr::new(127, 80, 2, 2);
const BLOCK: usize = 4096;
/// Number of operations per call. This must be larger than the number in flight.
const OPERATIONS: u64 = 40;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Read,
    Write,
}

/// State shared between the load and the test.
#[derive(Default)]
struct Progress {
    done: AtomicU64,
    stops: AtomicBool,
    is_over: AtomicBool,
    failure: Mutex<Option<String>>,
}

/// Alternates between reads and writes of the same blocks until it's stopped. Each operation uses a
/// separate buffer.
struct Load {
    kind: Kind,
    /// Buffers that are currently not in flight.
    buffers: Vec<Buffer>,
    offset: u64,
    progress: Arc<Progress>,
}

impl Load {
    /// Returns an operation for the next of 64 blocks.
    fn operation(&mut self, buffer: Buffer) -> Operation {
        let offset = self.offset;
        self.offset = (offset + BLOCK as u64) % (64 * BLOCK as u64);
        match self.kind {
            Kind::Read => Operation::Read { offset, buffer },
            Kind::Write => Operation::Write {
                offset,
                buffer,
                fua: false,
            },
        }
    }
}

impl Workload for Load {
    fn submit(&mut self, queue: &mut Submissions) {
        while let Some(buffer) = self.buffers.pop() {
            let operation = self.operation(buffer);
            queue.push(0, operation);
        }
    }

    fn complete(&mut self, _tag: u32, completion: Completion, queue: &mut Submissions) {
        match completion {
            Ok(Some(buffer)) => {
                self.progress.done.fetch_add(1, Ordering::Relaxed);
                if !self.progress.stops.load(Ordering::Relaxed) {
                    let operation = self.operation(buffer);
                    queue.push(0, operation);
                }
            }
            other => *self.progress.failure.lock().unwrap() = Some(format!("{other:?}")),
        }
    }

    fn due(&self) -> Option<Instant> {
        None
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.progress.is_over.store(true, Ordering::Relaxed);
    }
}

/// Runs a load and counts the allocations made during many of its operations.
fn check(name: &str, lun: &Arc<Lun>, kind: Kind, depth: usize) {
    let buffer = || block_on(lun.buffers().take_buffer(BLOCK));
    let progress = Arc::new(Progress::default());
    let load = Load {
        kind,
        buffers: (0..depth).map(|_| buffer()).collect(),
        offset: 0,
        progress: progress.clone(),
    };
    drive(lun, Box::new(load)).unwrap();
    let done = || progress.done.load(Ordering::Relaxed);
    let failure = || progress.failure.lock().unwrap().clone();
    allocates_nothing(&format!("{name}, {kind:?} at depth {depth}"), |_| {
        let until = done() + OPERATIONS;
        eventually("operations complete", PATIENCE, || {
            done() >= until || failure().is_some()
        });
        assert_eq!(failure(), None, "{name}");
    });
    progress.stops.store(true, Ordering::Relaxed);
    eventually("the load ends", PATIENCE, || {
        progress.is_over.load(Ordering::Relaxed)
    });
}

/// Serves a file, which is stored in memory if there is a directory for this.
fn serve(image: &Path) -> Server {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: {TARGET} }}"));
    let text = format!(
        "identity: test\nbackends:\n  d: {{ kind: file, path: {}, size: 16MiB, create: true }}\n\
         targets:\n  - name: t\n    iqn: {IQN}\n    portals: [{}]\n    luns: {{ 0: d }}\n    \
         access: open\nworkers: {{ count: 1 }}\n",
        image.display(),
        portals.join(", ")
    );
    Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap()
}

fn addresses() -> [(&'static str, TargetUrl); 3] {
    let srp: SrpUrl = format!("srp://{TARGET}/0").parse().unwrap();
    let iscsi = |scheme: &str| -> IscsiUrl {
        let url = format!("{scheme}://{TARGET}/{IQN}/0");
        url.parse().unwrap()
    };
    [
        ("SRP", TargetUrl::Srp(srp)),
        ("iSER", TargetUrl::Iscsi(iscsi("iser"))),
        ("iSCSI over TCP", TargetUrl::Iscsi(iscsi("iscsi"))),
    ]
}

#[test]
fn small_io_allocates_nothing() {
    let shm = Path::new("/dev/shm");
    let directory = match shm.is_dir() {
        true => shm.to_owned(),
        false => std::env::temp_dir(),
    };
    let image = directory.join(format!("riser-both-allocations-{}", std::process::id()));
    let server = serve(&image);
    let config = RoceConfig::new(IpAddr::V4(INITIATOR));
    let client = Client::builder()
        .pool(8 << 20)
        .build(move || Roce::open(&config));
    let client = client.unwrap();
    // We must find the threads of both programs; otherwise one of them could allocate without being
    // noticed.
    let threads = allocations::threads();
    for name in ["riser-worker-0", "riser-engine"] {
        assert!(threads.iter().any(|thread| thread == name), "{threads:?}");
    }
    for (name, url) in addresses() {
        let session = block_on(client.connect(url)).unwrap();
        let lun = Arc::new(block_on(session.lun(0)).unwrap());
        for kind in [Kind::Write, Kind::Read] {
            for depth in [1, 16] {
                check(name, &lun, kind, depth);
            }
        }
        drop(lun);
        block_on(session.close());
    }
    client.shutdown();
    server.shutdown().unwrap();
    std::fs::remove_file(image).unwrap();
}
