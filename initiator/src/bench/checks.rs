//! Checks of jobs that are to run side by side.

use std::sync::Arc;
use std::time::Duration;

use super::error::BenchError;
use super::prepare::Prepared;
use super::task::{RunOptions, Task};
use super::{setup, usage};
use crate::block::BlockDevice;

/// Fails for options that are not possible.
pub(super) fn options(options: RunOptions) -> Result<(), BenchError> {
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
pub(super) fn buffers<D: BlockDevice>(tasks: &[Task<D>]) -> Result<(), BenchError> {
    let mut needs: Vec<(&Arc<D>, u64)> = Vec::new();
    for task in tasks {
        for device in &task.devices {
            let bytes = match task.job.verify_only {
                // It takes more than one only where they are left over.
                true => device
                    .buffer_bytes()
                    .min(device.geometry().max_transfer.into()),
                false => {
                    // What else is wrong with it comes first: its buffers may only be too many for
                    // that.
                    setup::shares(&task.job, device.geometry())?;
                    setup::buffer_bytes(&task.job, task.devices.len() as u32)
                }
            };
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
            return Err(BenchError::Config(format!(
                "the operations in flight need {need} bytes of buffers, and the device has \
                 {available}: smaller blocks, fewer operations or more sessions will do"
            )));
        }
    }
    Ok(())
}

/// Fails if a job would change blocks that another one verifies at the same time.
pub(super) fn overlaps<D>(tasks: &[Task<D>], all: &[Prepared]) -> Result<(), BenchError> {
    let regions = all.iter().map(|prepared| &prepared.region);
    let all: Vec<_> = tasks.iter().zip(regions).collect();
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
