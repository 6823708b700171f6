//! Checks for jobs that run concurrently.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use riser_block::BlockDevice;

use super::error::BenchError;
use super::task::{RunOptions, Task};
use super::{setup, usage};

/// Checks whether jobs can run concurrently on their devices, using the information available
/// before they start.
///
/// # Errors
/// Returns the reason and the name of the job.
pub fn check<D: BlockDevice>(tasks: &[Task<D>], run: RunOptions) -> Result<(), BenchError> {
    options(run)?;
    buffers(tasks)?;
    overlaps(tasks, |index| region(&tasks[index]))
}

/// Fails if an option is out of range, or the server process can't be measured.
fn options(options: RunOptions) -> Result<(), BenchError> {
    let fail = |what| Err(BenchError::Config(what));
    if options.interval < Duration::from_millis(1) {
        return fail("invalid interval: the minimum is 1 ms".into());
    }
    match options.server_pid.map(|pid| (pid, usage::of(pid))) {
        Some((pid, Err(error))) => fail(format!("cannot measure process {pid}: {error}")),
        _ => Ok(()),
    }
}

/// Fails if the jobs on a device need more buffers than it has. A job would then wait forever for
/// buffers held by another job.
fn buffers<D: BlockDevice>(tasks: &[Task<D>]) -> Result<(), BenchError> {
    let mut needs: Vec<(&Arc<D>, u64)> = Vec::new();
    for task in tasks {
        for device in &task.devices {
            let bytes = need_of(task, device).map_err(|error| error.of_job(&task.job))?;
            match needs
                .iter_mut()
                .find(|(known, _)| Arc::ptr_eq(known, device))
            {
                Some((_, need)) => *need = need.saturating_add(bytes),
                None => needs.push((device, bytes)),
            }
        }
    }
    for (device, need) in needs {
        let available = device.buffer_bytes();
        if need > available {
            let uses = |task: &&Task<D>| task.devices.iter().any(|own| Arc::ptr_eq(own, device));
            let users = tasks.iter().filter(uses);
            let names: Vec<_> = users.map(|task| format!("`{}`", task.job.name)).collect();
            return Err(BenchError::Config(format!(
                "the operations in flight of {} need {need} bytes of buffers, but the device has \
                 {available}: use smaller blocks, fewer operations or more sessions",
                names.join(", ")
            )));
        }
    }
    Ok(())
}

/// Returns the number of buffer bytes that a job needs on one of its devices.
fn need_of<D: BlockDevice>(task: &Task<D>, device: &Arc<D>) -> Result<u64, BenchError> {
    let geometry = device.geometry();
    if task.job.verify_only {
        setup::check_in_flight(&task.job)?;
        // Only a single operation is required. A second one is started only if there are unused
        // buffers.
        return Ok(device.buffer_bytes().min(geometry.max_transfer.into()));
    }
    // Check the rest of the job first, because this may be the reason why it needs so many buffers.
    setup::shares(&task.job, geometry)?;
    let connections = task.devices.len() as u32;
    Ok(setup::buffer_bytes(&task.job, connections))
}

/// Returns the region of the device that is used according to the options of a job. This is empty
/// if it only checks blocks that are recorded in a state file.
fn region<D: BlockDevice>(task: &Task<D>) -> Result<Range<u64>, BenchError> {
    match task.devices.first() {
        Some(device) if !task.job.verify_only => {
            let shares = setup::shares(&task.job, device.geometry())?;
            Ok(setup::region(&shares))
        }
        _ => Ok(0..0),
    }
}

/// Fails if a job changes blocks while another job verifies them.
pub(super) fn overlaps<D>(
    tasks: &[Task<D>],
    region: impl Fn(usize) -> Result<Range<u64>, BenchError>,
) -> Result<(), BenchError> {
    let regions = (0..tasks.len()).map(region);
    let regions = regions.collect::<Result<Vec<_>, _>>()?;
    let all: Vec<_> = tasks.iter().zip(&regions).collect();
    for (index, (one, region)) in all.iter().enumerate() {
        for (two, other) in &all[index + 1..] {
            let is_verified = one.job.verify.is_some() || two.job.verify.is_some();
            let is_changed = one.job.is_destructive() || two.job.is_destructive();
            let overlaps = region.start < other.end && other.start < region.end;
            if one.identity == two.identity && is_verified && is_changed && overlaps {
                return Err(BenchError::Config(format!(
                    "jobs `{}` and `{}` use the same blocks concurrently, and one of them verifies",
                    one.job.name, two.job.name
                )));
            }
        }
    }
    Ok(())
}
