//! Disk faults, and the outcome of each disk operation.
//!
//! If writeback fails, the data is lost in the same way as on Linux: it can still be read from the
//! cache for some time, and each open file reports the error once. [`Target::begin_loss`] documents
//! how the target must react.
//!
//! [`Target::begin_loss`]: crate::target::Target::begin_loss

use std::time::Duration;

use fastrand::Rng;
use riser_reactor::simulated::{Disk, Operation, Outcome, SECTOR};
use riser_reactor::{Fallocate, Op};
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Trouble};

/// A kind of disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes and changes of the allocation.
    Write,
    /// Flushes.
    Flush,
}

impl Kind {
    fn of(op: Op) -> Option<Self> {
        match op {
            Op::Read { .. } => Some(Self::Read),
            Op::Write { .. } | Op::Fallocate { .. } => Some(Self::Write),
            Op::Sync(_) => Some(Self::Flush),
            Op::Poll { .. } | Op::Accept | Op::Receive(_) | Op::Send => None,
        }
    }
}

/// A disk fault.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskFault {
    /// Operations of this kind fail with this probability.
    FailSome(Kind, f64),
    /// One operation of this kind fails.
    FailOnce(Kind),
    /// Operations are executed but reported as failed, with this probability.
    DoneButFailed(f64),
    /// This share of the cached data is never written back, and it's dropped from the cache when
    /// the fault is over.
    LoseWriteBack(f64),
    /// No space left for unallocated blocks.
    FullDisk,
    /// Operations on one disk don't complete. Disk 0 is shared by all initiators, each of the other
    /// disks belongs to one initiator.
    StallDisk(usize),
    /// Operations don't complete, with this probability.
    StallSome(f64),
    /// A bit of a block of the shared disk is inverted, unless it is written in the meantime. Its
    /// protection information must detect this.
    DamageBlock(u64),
    /// Operations on the disk of a [`Hog`](crate::hog::Hog) don't complete. This must not affect
    /// any other peer.
    HangDisk(usize),
}

impl DiskFault {
    /// Draws the disk troubles for a seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Vec<Trouble> {
        let count = [0, 0, 1, 2][rng.usize(..4)];
        (0..count).map(|_| Self::draw_one(rng)).collect()
    }

    /// Draws troubles which stall a single disk, for this number of initiators.
    pub(crate) fn stalls(rng: &mut Rng, initiators: usize) -> Vec<Trouble> {
        let number = [0, 0, 0, 1, 2][rng.usize(..5)];
        let stall = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            let length = [20_000, 500_000, 8_000_000, 90_000_000][rng.usize(..4)];
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::Disk(Self::StallDisk(rng.usize(..=initiators))),
            }
        };
        (0..number).map(stall).collect()
    }

    /// Draws a trouble where the disk of one initiator stalls for longer than any command timeout,
    /// while everything else works. This must not affect any other initiator.
    pub(crate) fn stall_of_one(rng: &mut Rng, initiators: usize) -> Option<Trouble> {
        let (from, length) = (rng.u64(0..20_000), rng.u64(70_000_000..130_000_000));
        let stall = Self::StallDisk(rng.usize(1..=initiators));
        rng.bool().then(|| Trouble {
            from: Duration::from_micros(from),
            until: Duration::from_micros(from + length),
            fault: Fault::Disk(stall),
        })
    }

    /// Draws a trouble where some operations don't complete in time.
    pub(crate) fn stalls_of_some(rng: &mut Rng) -> Option<Trouble> {
        let from = rng.u64(0..60_000);
        let length = [2_000_000, 8_000_000, 20_000_000][rng.usize(..3)];
        let length = rng.u64(length / 2..=length);
        let share = [0.02, 0.1, 0.3][rng.usize(..3)];
        (rng.u8(..6) == 0).then(|| Trouble {
            from: Duration::from_micros(from),
            until: Duration::from_micros(from + length),
            fault: Fault::Disk(Self::StallSome(share)),
        })
    }

    /// Draws a trouble that damages a block of a protected disk, unless the target is stopped: it
    /// would repair the protection information of this block after a crash.
    pub(crate) fn damages(rng: &mut Rng, troubles: &[Trouble]) -> Option<Trouble> {
        let from = Duration::from_micros(rng.u64(0..20_000));
        let length = Duration::from_micros(rng.u64(1..200_000));
        let fault = Fault::Disk(Self::DamageBlock(rng.u64(..)));
        let is_stopped = troubles.iter().any(|trouble| trouble.fault.ends_target());
        (rng.bool() && !is_stopped).then(|| Trouble {
            from,
            until: from + length,
            fault,
        })
    }

    fn draw_one(rng: &mut Rng) -> Trouble {
        // Most of the work is done at the beginning of a run.
        let latest = [20_000, 60_000, 300_000][rng.usize(..3)];
        let from = Duration::from_micros(rng.u64(0..latest));
        let length = [20_000, 500_000, 8_000_000, 90_000_000, 400_000_000][rng.usize(..5)];
        let until = from + Duration::from_micros(rng.u64(1..length));
        let kind = [Kind::Read, Kind::Write, Kind::Flush][rng.usize(..3)];
        let fault = match rng.u8(..8) {
            0 => Fault::Disk(Self::FailSome(kind, [0.1, 0.5, 1.0][rng.usize(..3)])),
            1 => Fault::Disk(Self::FailOnce(kind)),
            2 => Fault::Disk(Self::DoneButFailed(rng.f64() * 0.3)),
            3..6 => Fault::Disk(Self::LoseWriteBack([0.1, 0.5, 1.0][rng.usize(..3)])),
            6 => Fault::Disk(Self::FullDisk),
            // Longer than all timeouts.
            _ => Fault::StallDisks,
        };
        Trouble { from, until, fault }
    }
}

/// The state of the disks according to the active troubles.
#[derive(Clone, Debug, Default)]
pub struct DiskFaults {
    pub(crate) is_stalled: bool,
    /// Disks that are stalled while the remaining disks work.
    pub(crate) stalled: Vec<Disk>,
    /// Disks of hogs that are stalled.
    pub(crate) hung: Vec<Disk>,
    /// Probability that an operation doesn't complete.
    pub(crate) held: f64,
    pub(crate) failure: f64,
    pub(crate) short: f64,
    failures: Vec<(Kind, f64)>,
    done_but_failed: f64,
    is_full: bool,
    /// Kinds of operations for which a single failure is pending.
    once: Vec<Kind>,
}

impl DiskFaults {
    /// Clears all permanent faults.
    pub(crate) fn reset(&mut self) {
        let once = std::mem::take(&mut self.once);
        *self = Self {
            once,
            ..Self::default()
        };
    }

    /// Adds an active fault.
    pub(crate) fn add(&mut self, fault: DiskFault) {
        match fault {
            DiskFault::FailSome(kind, probability) => self.failures.push((kind, probability)),
            DiskFault::DoneButFailed(probability) => self.done_but_failed = probability,
            DiskFault::FullDisk => self.is_full = true,
            DiskFault::StallSome(share) => self.held = share,
            DiskFault::FailOnce(_)
            | DiskFault::LoseWriteBack(_)
            | DiskFault::StallDisk(_)
            | DiskFault::DamageBlock(_)
            | DiskFault::HangDisk(_) => {}
        }
    }

    /// Returns whether this disk is stalled while other disks may work.
    pub(crate) fn is_stalled_one(&self, disk: &Disk) -> bool {
        self.stalled.iter().any(|one| one.is_same(disk))
    }

    /// Returns whether any disk is stalled.
    pub(crate) fn stall(&self) -> bool {
        self.is_stalled || self.held > 0.0 || !self.stalled.is_empty()
    }

    /// Adds or removes a pending failure of a single operation.
    pub(crate) fn fail_once(&mut self, kind: Kind, is_active: bool) {
        match is_active {
            true => self.once.push(kind),
            false => self.once.retain(|other| *other != kind),
        }
    }

    /// Returns the outcome of an operation.
    pub(crate) fn outcome(&mut self, operation: &Operation, rng: &mut Rng) -> Outcome {
        let kind = Kind::of(operation.op);
        if let Some(at) = self.once.iter().position(|once| Some(*once) == kind) {
            self.once.swap_remove(at);
            return Outcome::Failed(libc::EIO);
        }
        let failures = self.failures.iter();
        let mut failures = failures.filter(|(failing, _)| Some(*failing) == kind);
        match () {
            () if rng.f64() < self.failure => Outcome::Failed(libc::EIO),
            () if failures.any(|(_, probability)| rng.f64() < *probability) => {
                Outcome::Failed(libc::EIO)
            }
            () if rng.f64() < self.done_but_failed => Outcome::DoneButFailed(libc::EIO),
            // Complete sectors, as with direct I/O.
            () if rng.f64() < self.short && operation.len > SECTOR as usize => {
                let sectors = operation.len / SECTOR as usize;
                Outcome::Short(rng.usize(1..=sectors) * SECTOR as usize)
            }
            () => Outcome::Whole,
        }
    }

    /// Returns the final outcome on the disk in its current state.
    pub(crate) fn with_room(&self, operation: &Operation, outcome: Outcome) -> Outcome {
        match (outcome, operation.disk()) {
            (Outcome::Whole | Outcome::Short(_), Some(disk)) if self.is_full => {
                in_allocated(disk, operation).unwrap_or(outcome)
            }
            _ => outcome,
        }
    }
}

/// Returns the outcome of an operation if no space is left, or `None` if it doesn't allocate.
fn in_allocated(disk: &Disk, operation: &Operation) -> Option<Outcome> {
    let (offset, len) = match operation.op {
        Op::Write { offset, .. } => (offset, operation.len as u64),
        Op::Fallocate {
            what: Fallocate::Allocate | Fallocate::ZeroRange,
            offset,
            len,
        } => (offset, len),
        _ => return None,
    };
    let is_write = matches!(operation.op, Op::Write { .. });
    match disk.extent(offset, len) {
        (true, there) if there >= len => None,
        // A write is short if there is not enough space.
        (true, there) if is_write => Some(Outcome::Short(there as usize)),
        _ => Some(Outcome::Failed(libc::ENOSPC)),
    }
}
