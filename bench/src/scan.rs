//! Reads all blocks known to a ledger, either after a run or to verify a state file.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use riser_block::{BlockDevice, Buffer, Geometry, task};

use super::content::Filler;
use super::error::BenchError;
use super::ledger::Ledger;
use super::prepare::{ClonePlan, Prepared};
use super::setup;
use super::source::Source;
use super::state::{self, Layout, Lock, StateFile};
use super::task::Task;
use super::verify::{Check, Verifier};
use super::worker::RemainingWork;

/// Maximum length of reads in bytes, unless the blocks are larger.
const PIECE: u64 = 128 << 10;

/// Maximum number of reads in flight for each worker.
const DEPTH: u32 = 32;

/// Prepares to verify the writes recorded in a state file, using the parameters stored in this
/// file. All other jobs must be prepared first, because this uses any remaining buffers.
///
/// # Errors
/// Fails if the job is invalid, or the state file can't be used.
pub(super) fn prepare<D: BlockDevice>(task: &Task<D>) -> Result<Prepared, BenchError> {
    setup::check_in_flight(&task.job)?;
    let device = task.devices.first();
    let device = device.ok_or_else(|| BenchError::Config("no device is open".into()))?;
    let (layout, ledger, lock) = open(task, device.geometry())?;
    let verifier = Verifier {
        filler: Filler::new(task.job.content.clone(), ledger.seed()),
        check: Check::Ledger(Arc::new(ledger)),
        checksum: layout.checksum,
        block: layout.block,
        atom: setup::atom(device.geometry()),
        resolves: true,
    };
    Ok(Prepared {
        _lock: Some(lock),
        ..reads(&verifier, &task.devices, task.job.iodepth)
    })
}

fn open<D: BlockDevice>(
    task: &Task<D>,
    geometry: &Geometry,
) -> Result<(Layout, Ledger, Lock), BenchError> {
    let path = task.job.state.as_ref().ok_or_else(|| {
        BenchError::Config(
            "verify_only requires a state file, which records the written blocks".into(),
        )
    })?;
    let (file, lock) = StateFile::open(path, false)?;
    let found = file.header()?;
    let (found, _) = found.ok_or_else(|| file.error("the file is empty".into()))?;
    let Layout { region, block, .. } = &found;
    let is_whole = |n: &u64| n.is_multiple_of(geometry.block_size.into());
    let fits = region.end <= geometry.capacity
        && is_whole(&region.start)
        && is_whole(block)
        && *block <= u64::from(geometry.max_transfer);
    if !fits {
        return Err(file.error(format!(
            "the file belongs to another device: it records bytes {} to {} in blocks of {block}",
            region.start, region.end
        )));
    }
    let layout = Layout {
        disk: state::hash(&task.identity),
        content: state::hash_content(&task.job.content),
        ..found
    };
    let ledger = Ledger::open(file, &layout)?;
    // Without any records, we would report success without verifying any block.
    if ledger.is_blank() {
        let path = path.display().to_string();
        let reason = "the file records no write".into();
        return Err(BenchError::State { path, reason });
    }
    Ok((layout, ledger, lock))
}

/// Prepares reads of all blocks known to the ledger, distributed over all connections.
pub(super) fn reads<D: BlockDevice>(
    verifier: &Verifier,
    devices: &[Arc<D>],
    depth: u32,
) -> Prepared {
    let region = verifier
        .ledger()
        .map_or(0..0, |ledger| ledger.region().clone());
    let piece = piece(verifier.block, devices);
    let next = Arc::new(AtomicU64::new(region.start));
    let buffers = buffers(devices, piece as usize, depth.min(DEPTH));
    let clone = |buffers| ClonePlan {
        source: Source::Scan {
            next: next.clone(),
            piece,
        },
        arrivals: None,
        buffers,
        left: RemainingWork {
            ios: u64::MAX,
            bytes: u64::MAX,
        },
    };
    Prepared {
        clones: buffers.into_iter().map(clone).collect(),
        verifier: verifier.clone(),
        region,
        max_block: piece as usize,
        _lock: None,
    }
}

/// Returns the length of reads in bytes. This is a multiple of the block size, and at least one
/// block.
fn piece<D: BlockDevice>(block: u64, devices: &[Arc<D>]) -> u64 {
    let limits = devices.iter().map(|device| device.geometry().max_transfer);
    let most = u64::from(limits.min().unwrap_or(0)).min(PIECE);
    (most / block * block).max(block)
}

/// Allocates buffers for reads on each connection. We only wait for the first buffer of each
/// connection, and use additional buffers if they are available, as the device may not have enough
/// for all of them. If a connection is listed multiple times, we only wait once.
fn buffers<D: BlockDevice>(devices: &[Arc<D>], len: usize, depth: u32) -> Vec<Vec<Option<Buffer>>> {
    let first = |(index, device): (usize, &Arc<D>)| {
        let known = &devices[..index];
        let buffer = match known.iter().any(|known| Arc::ptr_eq(known, device)) {
            true => device.try_buffer(len),
            false => Some(task::block_on(device.buffer(len))),
        };
        buffer.map(Some).into_iter().collect::<Vec<_>>()
    };
    let mut all: Vec<Vec<Option<Buffer>>> = devices.iter().enumerate().map(first).collect();
    for _ in 1..depth {
        for (buffers, device) in all.iter_mut().zip(devices) {
            buffers.extend(device.try_buffer(len).map(Some));
        }
    }
    all
}
