//! Checks of jobs that are to run side by side.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::error::BenchError;
use super::task::{RunOptions, Task};
use super::{setup, usage};
use crate::block::BlockDevice;

/// Checks whether jobs can run side by side on their devices, as far as that is known before they
/// start.
///
/// # Errors
/// Says what is not possible, and which job it is.
pub fn check<D: BlockDevice>(tasks: &[Task<D>], run: RunOptions) -> Result<(), BenchError> {
    options(run)?;
    buffers(tasks)?;
    overlaps(tasks, |index| region(&tasks[index]))
}

/// Fails for options that are not possible.
fn options(options: RunOptions) -> Result<(), BenchError> {
    let fail = |what| Err(BenchError::Config(what));
    if options.interval < Duration::from_millis(1) {
        return fail("an interval is at least a millisecond".into());
    }
    match options.server_pid.map(|pid| (pid, usage::of(pid))) {
        Some((pid, Err(error))) => fail(format!("process {pid} cannot be measured: {error}")),
        _ => Ok(()),
    }
}

/// Fails if the buffers of all jobs do not fit into those of their devices: a job would wait for
/// another's without end.
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
                "the operations in flight of {} need {need} bytes of buffers, and the device has \
                 {available}: smaller blocks, fewer operations or more sessions will do",
                names.join(", ")
            )));
        }
    }
    Ok(())
}

/// Bytes of buffers that a job needs on one of its devices.
fn need_of<D: BlockDevice>(task: &Task<D>, device: &Arc<D>) -> Result<u64, BenchError> {
    let geometry = device.geometry();
    if task.job.verify_only {
        setup::check_in_flight(&task.job)?;
        // It takes more than one only where they are left over.
        return Ok(device.buffer_bytes().min(geometry.max_transfer.into()));
    }
    // What else is wrong with it comes first: its buffers may only be too many for that.
    setup::shares(&task.job, geometry)?;
    let connections = task.devices.len() as u32;
    Ok(setup::buffer_bytes(&task.job, connections))
}

/// Bytes of the device that a job uses, as far as its options say: one that only checks what a
/// state file records has none.
fn region<D: BlockDevice>(task: &Task<D>) -> Result<Range<u64>, BenchError> {
    match task.devices.first() {
        Some(device) if !task.job.verify_only => {
            let shares = setup::shares(&task.job, device.geometry())?;
            Ok(setup::region(&shares))
        }
        _ => Ok(0..0),
    }
}

/// Fails if a job would change blocks that another one verifies at the same time.
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
                    "jobs `{}` and `{}` use the same blocks at the same time, and one verifies them",
                    one.job.name, two.job.name
                )));
            }
        }
    }
    Ok(())
}
