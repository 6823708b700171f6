//! Prepares the workers of a job, including their plans, buffers, ledger and clock.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fastrand::Rng;
use riser_block::{BlockDevice, Buffer, task};

use super::content::{Filler, mix};
use super::error::BenchError;
use super::job::{Access, Checksum, Job};
use super::ledger::Ledger;
use super::plan::{Arrivals, Plan};
use super::reports::Reporter;
use super::setup;
use super::source::{ScanPosition, Source};
use super::state::{self, Layout, Lock, StateFile};
use super::stats::Recorder;
use super::task::Task;
use super::verify::{Check, Verifier};
use super::worker::{Clock, Parts, RemainingWork, Shared, Think, Worker};

/// Parameters of a clone before its worker is created.
pub(super) struct ClonePlan {
    pub(super) source: Source,
    pub(super) arrivals: Option<Arrivals>,
    pub(super) buffers: Vec<Option<Buffer>>,
    pub(super) left: RemainingWork,
}

/// A job that is ready to start.
pub(super) struct Prepared {
    pub(super) clones: Vec<ClonePlan>,
    pub(super) verifier: Verifier,
    /// Region of the device that is used by the job.
    pub(super) region: Range<u64>,
    /// Size of the largest operation in bytes.
    pub(super) max_block: usize,
    /// Prevents other runs from using the same state file.
    pub(super) _lock: Option<Lock>,
}

impl Prepared {
    /// Returns the total amount of work for all clones.
    pub(super) fn remaining_work(&self) -> RemainingWork {
        let sum = |of: fn(&RemainingWork) -> u64| {
            let amounts = self.clones.iter().map(|clone| of(&clone.left));
            amounts.fold(0, u64::saturating_add)
        };
        RemainingWork {
            ios: sum(|left| left.ios),
            bytes: sum(|left| left.bytes),
        }
    }

    /// Returns the position if this reads all blocks known to a ledger.
    pub(super) fn scan_place(&self) -> Option<ScanPosition> {
        self.clones.first()?.source.scan_place(&self.region)
    }
}

/// State shared by the workers of all jobs in a group.
pub(super) struct Context {
    pub(super) clock: Clock,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) interval: Duration,
    pub(super) reporter: Reporter,
}

/// Prepares a job, which may run concurrently with other jobs. The device must be open.
///
/// # Errors
/// Fails if the job is invalid, or the state file can't be used.
pub(super) fn prepare<D: BlockDevice>(
    run: u64,
    index: usize,
    task: &Task<D>,
) -> Result<Prepared, BenchError> {
    let Task { job, devices, .. } = task;
    let device = devices.first();
    let device = device.ok_or_else(|| BenchError::Config("no device is open".into()))?;
    let shares = setup::shares(job, device.geometry())?;
    let region = setup::region(&shares);
    let (check, lock) = check(task, &shares, &region)?;
    // If the same job runs multiple times, either concurrently or in different runs, each must use
    // different operations.
    let mut random = Rng::with_seed(job.randseed ^ mix(run << 32 | index as u64));
    let count = f64::from(job.numjobs);
    let mut clones = Vec::new();
    for (index, (share, device)) in shares.iter().zip(devices.iter().cycle()).enumerate() {
        clones.push(ClonePlan {
            source: Source::Plan(Plan::new(job, &share.region, random.fork())),
            arrivals: Arrivals::new(job, index as f64 / count, random.fork()),
            buffers: buffers(job, device),
            left: RemainingWork {
                ios: share.ios,
                bytes: share.bytes,
            },
        });
    }
    let seed = match &check {
        Check::Ledger(ledger) => ledger.seed(),
        // With deduplication, the storage could already contain blocks from previous runs, so these
        // must differ. The number is mixed separately to avoid combining it directly with the
        // number of a clone.
        Check::Nothing | Check::Own => mix(job.randseed ^ mix(run)),
    };
    let verifier = Verifier {
        filler: Filler::new(job.content.clone(), seed),
        check,
        checksum: job.verify.unwrap_or(Checksum::Crc32c),
        block: u64::from(job.min_block()),
        atom: setup::atom(device.geometry()),
        resolves: false,
    };
    Ok(Prepared {
        clones,
        verifier,
        region,
        max_block: job.max_block() as usize,
        _lock: lock,
    })
}

/// Returns how the blocks of a job are verified, including the lock on its state file.
fn check<D>(
    task: &Task<D>,
    shares: &[setup::Share],
    region: &Range<u64>,
) -> Result<(Check, Option<Lock>), BenchError> {
    let job = &task.job;
    let Some(checksum) = job.verify else {
        return Ok((Check::Nothing, None));
    };
    if !job.access.is_destructive() {
        return Ok((Check::Own, None));
    }
    let block = u64::from(job.min_block());
    let apart = |share: &setup::Share| !(share.region.start - region.start).is_multiple_of(block);
    if shares.iter().any(apart) {
        return Err(BenchError::Config(format!(
            "the distance between the regions of the jobs is not a multiple of the block size \
             {block}, as required by verify"
        )));
    }
    let whole = (region.end - region.start) / block * block;
    let layout = Layout {
        region: region.start..region.start + whole,
        block,
        checksum,
        disk: state::hash(&task.identity),
        content: state::hash_content(&job.content),
    };
    let (ledger, lock) = open_ledger(job, &layout)?;
    Ok((Check::Ledger(Arc::new(ledger)), lock))
}

fn open_ledger(job: &Job, layout: &Layout) -> Result<(Ledger, Option<Lock>), BenchError> {
    let Some(path) = &job.state else {
        return Ok((Ledger::new(layout)?, None));
    };
    let (file, lock) = StateFile::open(path, true)?;
    let ledger = Ledger::open(file, layout)?;
    match ledger.unresolved() {
        0 => Ok((ledger, Some(lock))),
        count => Err(BenchError::State {
            path: path.display().to_string(),
            reason: format!(
                "{count} blocks were being written when the previous run stopped; run with \
                 --verify-only first"
            ),
        }),
    }
}

fn buffers<D: BlockDevice>(job: &Job, device: &Arc<D>) -> Vec<Option<Buffer>> {
    let len = job.max_block() as usize;
    let has_buffers = setup::has_buffers(job);
    // We have already checked that there are enough buffers for all jobs, so this only waits for
    // buffers that are being released.
    let buffer = |_| has_buffers.then(|| task::block_on(device.buffer(len)));
    (0..job.iodepth).map(buffer).collect()
}

/// Creates the workers of a job, in the order of its connections.
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
        flushes_count: job.access == Access::Flush,
        think: (!job.thinktime.is_zero()).then_some(Think {
            blocks: job.thinktime_blocks,
            time: job.thinktime,
        }),
        clock: context.clock,
        stop: context.stop.clone(),
    });
    let max_block = prepared.max_block;
    let worker = |(number, clone): (usize, ClonePlan)| {
        let is_open_loop = clone.arrivals.is_some();
        let parts = Parts {
            source: clone.source,
            arrivals: clone.arrivals,
            buffers: clone.buffers,
            left: clone.left,
            recorder: Recorder::new(context.interval, is_open_loop),
            max_block,
            salt: mix((task as u64) << 32 | number as u64),
            reporter: context.reporter.of_task(task),
        };
        Worker::new(shared.clone(), parts)
    };
    prepared.clones.drain(..).enumerate().map(worker).collect()
}
