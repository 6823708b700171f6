//! The workers of a job: their plans, buffers, ledger and clock.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use fastrand::Rng;

use super::content::Filler;
use super::error::BenchError;
use super::job::{Access, Checksum, Job};
use super::ledger::{Layout, Ledger};
use super::plan::{Arrivals, Plan};
use super::setup;
use super::stats::Recorder;
use super::verify::{Check, Verifier};
use super::worker::{Clock, Left, Parts, Report, Shared, Source, Worker};
use crate::block::{BlockDevice, Buffer, task};

/// Length of the reads that look for what was written, in bytes.
const PIECE: u64 = 128 << 10;

/// Reads of a worker that looks for what was written, in flight.
const SCAN_DEPTH: u32 = 32;

/// What a worker does.
struct Clone {
    source: Source,
    arrivals: Option<Arrivals>,
    buffers: Vec<Option<Buffer>>,
    left: Left,
}

/// A job that is ready to start.
pub(super) struct Prepared {
    clones: Vec<Clone>,
    pub(super) verifier: Verifier,
    /// Bytes of the device that it uses.
    pub(super) region: Range<u64>,
    /// Largest operation, in bytes.
    max_block: usize,
}

impl Prepared {
    /// Bytes that the workers move, if these are limited.
    pub(super) fn bytes(&self) -> Option<u64> {
        let bytes = self.clones.iter().map(|clone| clone.left.bytes);
        bytes
            .reduce(u64::saturating_add)
            .filter(|bytes| *bytes < u64::MAX)
    }
}

/// What the workers of all jobs of a group have in common.
pub(super) struct Context {
    pub(super) clock: Clock,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) interval: Duration,
    pub(super) reports: mpsc::Sender<(usize, Report)>,
}

/// Prepares a job on a device that is open at least once.
///
/// # Errors
/// The job is not possible, or its state file cannot be used.
pub(super) fn prepare<D: BlockDevice>(
    job: &Job,
    devices: &[Arc<D>],
) -> Result<Prepared, BenchError> {
    let device = devices.first();
    let device = device.ok_or_else(|| BenchError::Config("no device is open".into()))?;
    if job.verify_only {
        setup::check_in_flight(job)?;
        return prepare_scan(job, devices);
    }
    let geometry = device.geometry();
    let shares = setup::shares(job, geometry)?;
    let start = shares.iter().map(|share| share.region.start).min();
    let end = shares.iter().map(|share| share.region.end).max();
    let region = start.unwrap_or(0)..end.unwrap_or(0);
    let block = u64::from(job.min_block());
    let check = match job.verify {
        None => Check::Nothing,
        Some(_) if !job.access.is_destructive() => Check::Own,
        Some(checksum) => {
            let apart =
                |share: &setup::Share| !(share.region.start - region.start).is_multiple_of(block);
            if shares.iter().any(apart) {
                return Err(BenchError::Config(format!(
                    "the regions of the jobs are no multiple of the block size {block} apart, as \
                     verify needs it"
                )));
            }
            Check::Ledger(Arc::new(open_ledger(job, &region, block, checksum)?))
        }
    };
    let mut random = Rng::with_seed(job.randseed);
    let count = f64::from(job.numjobs);
    let mut clones = Vec::new();
    for (index, (share, device)) in shares.iter().zip(devices.iter().cycle()).enumerate() {
        clones.push(Clone {
            source: Source::Plan(Plan::new(job, &share.region, random.fork())),
            arrivals: Arrivals::new(job, index as f64 / count, random.fork()),
            buffers: buffers(job, device),
            left: Left {
                ios: share.ios,
                bytes: share.bytes,
            },
        });
    }
    let verifier = Verifier {
        filler: Filler::new(job.content.clone(), job.randseed),
        check,
        checksum: job.verify.unwrap_or(Checksum::Crc32c),
        block,
        resolves: false,
    };
    Ok(Prepared {
        clones,
        verifier,
        region,
        max_block: job.max_block() as usize,
    })
}

fn open_ledger(
    job: &Job,
    region: &Range<u64>,
    block: u64,
    checksum: Checksum,
) -> Result<Ledger, BenchError> {
    let whole = (region.end - region.start) / block * block;
    let layout = Layout {
        region: region.start..region.start + whole,
        block,
        seed: job.randseed,
        checksum,
    };
    let Some(path) = &job.state else {
        return Ledger::new(&layout);
    };
    let ledger = Ledger::open(path, &layout, false)?;
    match ledger.unresolved() {
        0 => Ok(ledger),
        count => Err(BenchError::State {
            path: path.display().to_string(),
            reason: format!(
                "{count} blocks were being written when it was left; --verify-only settles them"
            ),
        }),
    }
}

fn buffers<D: BlockDevice>(job: &Job, device: &Arc<D>) -> Vec<Option<Buffer>> {
    let len = job.max_block() as usize;
    let has_buffers = setup::has_buffers(job);
    // There are enough, as was checked for all jobs, so the wait is for others that end.
    let buffer = |_| has_buffers.then(|| task::block_on(device.buffer(len)));
    (0..job.iodepth).map(buffer).collect()
}

/// Reads of what a state file says was written, with the properties that it has.
fn prepare_scan<D: BlockDevice>(job: &Job, devices: &[Arc<D>]) -> Result<Prepared, BenchError> {
    let path = job.state.as_ref().ok_or_else(|| {
        BenchError::Config("verify_only needs a state file, which says what was written".into())
    })?;
    let layout = Layout::of(path)?;
    let geometry = devices[0].geometry();
    let fits = layout.region.end <= geometry.capacity
        && layout
            .region
            .start
            .is_multiple_of(geometry.block_size.into())
        && layout.block.is_multiple_of(geometry.block_size.into());
    if !fits {
        return Err(BenchError::State {
            path: path.display().to_string(),
            reason: format!(
                "it is of another device: it has bytes {} to {} in blocks of {}",
                layout.region.start, layout.region.end, layout.block
            ),
        });
    }
    let ledger = Arc::new(Ledger::open(path, &layout, true)?);
    let verifier = Verifier {
        filler: Filler::new(job.content.clone(), layout.seed),
        check: Check::Ledger(ledger),
        checksum: layout.checksum,
        block: layout.block,
        resolves: true,
    };
    Ok(scan(&verifier, devices, job.iodepth))
}

/// Reads of every block that the ledger knows, on all connections.
pub(super) fn scan<D: BlockDevice>(
    verifier: &Verifier,
    devices: &[Arc<D>],
    depth: u32,
) -> Prepared {
    let block = verifier.block;
    let region = verifier
        .ledger()
        .map_or(0..0, |ledger| ledger.region().clone());
    let most = devices
        .iter()
        .map(|device| device.geometry().max_transfer)
        .min();
    let piece = u64::from(most.unwrap_or(0)).min(PIECE) / block * block;
    let piece = piece.max(block);
    let next = Arc::new(AtomicU64::new(region.start));
    let clone = |device: &Arc<D>| Clone {
        source: Source::Scan {
            next: next.clone(),
            piece,
        },
        arrivals: None,
        buffers: (0..depth.min(SCAN_DEPTH))
            .map(|_| Some(task::block_on(device.buffer(piece as usize))))
            .collect(),
        left: Left {
            ios: u64::MAX,
            bytes: u64::MAX,
        },
    };
    Prepared {
        clones: devices.iter().map(clone).collect(),
        verifier: verifier.clone(),
        region,
        max_block: piece as usize,
    }
}

/// The workers of a job, in the order of its connections.
pub(super) fn workers(
    task: usize,
    job: &Job,
    prepared: &mut Prepared,
    context: &Context,
) -> Vec<Worker> {
    let shared = Arc::new(Shared {
        verifier: prepared.verifier.clone(),
        refill: job.content.refill,
        fua: job.fua,
        end_fsync: job.end_fsync && job.is_destructive(),
        trim_write: job.access == Access::TrimWrite,
        clock: context.clock,
        stop: context.stop.clone(),
    });
    let max_block = prepared.max_block;
    let worker = |clone: Clone| {
        let is_open_loop = clone.arrivals.is_some();
        let parts = Parts {
            source: clone.source,
            arrivals: clone.arrivals,
            buffers: clone.buffers,
            left: clone.left,
            recorder: Recorder::new(context.interval, is_open_loop),
            max_block,
            task,
            reports: context.reports.clone(),
        };
        Worker::new(shared.clone(), parts)
    };
    prepared.clones.drain(..).map(worker).collect()
}
