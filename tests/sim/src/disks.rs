//! What goes wrong at disks, and the end of each of their operations.
//!
//! A write-back that fails is lost as on Linux: its data are read from the cache for a while and
//! then no more, and each open file reports the error once. [`Target::begin_loss`] says what the
//! target must make of that.
//!
//! [`Target::begin_loss`]: crate::target::Target::begin_loss

use std::time::Duration;

use fastrand::Rng;
use riser_reactor::simulated::{Disk, Operation, Outcome, SECTOR};
use riser_reactor::{Fallocate, Op};
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Trouble};

/// A kind of operation on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes, and changes of what is allocated.
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

/// A fault of disks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskFault {
    /// Operations of one kind fail, each with this probability.
    FailSome(Kind, f64),
    /// One operation of a kind fails.
    FailOnce(Kind),
    /// Operations are carried out and reported as failed, each with this probability.
    DoneButFailed(f64),
    /// This share of what is in the cache is never written back. It goes from the cache when the
    /// fault does.
    LoseWriteBack(f64),
    /// There is no room for blocks that are not allocated.
    FullDisk,
    /// Operations on one disk do not end: 0 is that of all initiators, the next are those of one
    /// initiator each.
    StallDisk(usize),
    /// Operations do not end, each with this probability.
    StallSome(f64),
    /// Operations on the disk of a [`Hog`](crate::hog::Hog) do not end. No other peer may notice.
    HangDisk(usize),
}

impl DiskFault {
    /// The troubles of a seed with disks.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Vec<Trouble> {
        let count = [0, 0, 1, 2][rng.usize(..4)];
        (0..count).map(|_| Self::draw_one(rng)).collect()
    }

    /// Draws disks of a seed that stall while others do not, given the number of initiators.
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

    /// The disk of one initiator stalls on a day on which nothing else goes wrong, for longer than
    /// any command may take. Others must not notice.
    pub(crate) fn stall_of_one(rng: &mut Rng, initiators: usize) -> Option<Trouble> {
        let (from, length) = (rng.u64(0..20_000), rng.u64(70_000_000..130_000_000));
        let stall = Self::StallDisk(rng.usize(1..=initiators));
        rng.bool().then(|| Trouble {
            from: Duration::from_micros(from),
            until: Duration::from_micros(from + length),
            fault: Fault::Disk(stall),
        })
    }

    /// Draws an operation here and there that does not end in time, while others do.
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

    fn draw_one(rng: &mut Rng) -> Trouble {
        // Most of the work is done early.
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
            // Longer than the patience of all.
            _ => Fault::StallDisks,
        };
        Trouble { from, until, fault }
    }
}

/// The state of the disks, as troubles have it.
#[derive(Clone, Debug, Default)]
pub struct DiskFaults {
    pub(crate) is_stalled: bool,
    /// Those that do nothing while others work.
    pub(crate) stalled: Vec<Disk>,
    /// Those of hogs that do nothing.
    pub(crate) hung: Vec<Disk>,
    /// Share of operations that do not end.
    pub(crate) held: f64,
    pub(crate) failure: f64,
    pub(crate) short: f64,
    failures: Vec<(Kind, f64)>,
    done_but_failed: f64,
    is_full: bool,
    /// Kinds of which one operation is yet to fail.
    once: Vec<Kind>,
}

impl DiskFaults {
    /// Nothing that lasts is wrong any more.
    pub(crate) fn reset(&mut self) {
        let once = std::mem::take(&mut self.once);
        *self = Self {
            once,
            ..Self::default()
        };
    }

    /// A fault is there, among others.
    pub(crate) fn add(&mut self, fault: DiskFault) {
        match fault {
            DiskFault::FailSome(kind, probability) => self.failures.push((kind, probability)),
            DiskFault::DoneButFailed(probability) => self.done_but_failed = probability,
            DiskFault::FullDisk => self.is_full = true,
            DiskFault::StallSome(share) => self.held = share,
            DiskFault::FailOnce(_)
            | DiskFault::LoseWriteBack(_)
            | DiskFault::StallDisk(_)
            | DiskFault::HangDisk(_) => {}
        }
    }

    /// Whether a disk does nothing while others may work.
    pub(crate) fn is_stalled_one(&self, disk: &Disk) -> bool {
        self.stalled.iter().any(|one| one.is_same(disk))
    }

    /// Whether there is a disk that does nothing.
    pub(crate) fn stall(&self) -> bool {
        self.is_stalled || self.held > 0.0 || !self.stalled.is_empty()
    }

    /// One operation of a kind is to fail, or is not any more.
    pub(crate) fn fail_once(&mut self, kind: Kind, is_active: bool) {
        match is_active {
            true => self.once.push(kind),
            false => self.once.retain(|other| *other != kind),
        }
    }

    /// The way in which an operation ends.
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
            // Whole sectors, as with direct I/O.
            () if rng.f64() < self.short && operation.len > SECTOR as usize => {
                let sectors = operation.len / SECTOR as usize;
                Outcome::Short(rng.usize(1..=sectors) * SECTOR as usize)
            }
            () => Outcome::Whole,
        }
    }

    /// The way in which it ends after all, on the disk as it is by now.
    pub(crate) fn with_room(&self, operation: &Operation, outcome: Outcome) -> Outcome {
        match (outcome, operation.disk()) {
            (Outcome::Whole | Outcome::Short(_), Some(disk)) if self.is_full => {
                in_allocated(disk, operation).unwrap_or(outcome)
            }
            _ => outcome,
        }
    }
}

/// The end of an operation where nothing more can be allocated; `None` if it needs nothing.
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
        // A write ends where the room does.
        (true, there) if is_write => Some(Outcome::Short(there as usize)),
        _ => Some(Outcome::Failed(libc::ENOSPC)),
    }
}
