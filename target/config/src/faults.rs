//! Errors and delays on purpose.
//!
//! A backend that is opened with a [`Faults`] list consults it once per request, before the
//! request reaches the medium. It may also hold requests, as a device that hangs does, and shorten
//! transfers. Only tests use it: no configuration key leads here.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use riser_scsi::step::{BackendError, BlockOp};

/// The kind of requests that a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultOn {
    /// Requests of every kind.
    Any,
    /// Requests that read data.
    Read,
    /// Requests that write data or zeroes.
    Write,
    /// Requests that make cached data durable.
    Flush,
    /// Requests that free blocks.
    Discard,
}

impl FaultOn {
    fn includes(self, op: &BlockOp) -> bool {
        match self {
            Self::Any => true,
            Self::Read => matches!(op, BlockOp::Read { .. }),
            Self::Write => matches!(op, BlockOp::Write { .. } | BlockOp::WriteZeroes { .. }),
            Self::Flush => matches!(op, BlockOp::Flush { .. }),
            Self::Discard => matches!(op, BlockOp::Discard { .. }),
        }
    }
}

/// One thing that goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kind of request.
    pub on: FaultOn,
    /// First byte of the bad range.
    pub offset: u64,
    /// Length of the bad range in bytes; a request that touches any byte of it is struck.
    pub len: u64,
    /// Number of requests that it strikes before it is gone; `None` is for ever.
    pub times: Option<u32>,
    /// Time that the request waits before it fails or goes on.
    pub delay: Duration,
    /// The error that it fails with; `None` only delays.
    pub error: Option<BackendError>,
}

/// A list of faults; the first that matches a request strikes it.
#[derive(Debug, Default)]
pub struct Faults {
    list: Mutex<Vec<Fault>>,
    hold: Mutex<Option<Range>>,
    /// Bytes of one transfer at most; 0 is no bound.
    short: AtomicUsize,
}

/// The requests that are held: of this kind, where they touch these bytes.
#[derive(Debug, Clone, Copy)]
struct Range {
    on: FaultOn,
    offset: u64,
    len: u64,
}

impl Range {
    fn includes(&self, op: &BlockOp) -> bool {
        let (offset, len) = range(op);
        self.on.includes(op)
            && offset < self.offset.saturating_add(self.len)
            && self.offset < offset.saturating_add(len.max(1))
    }
}

/// The bytes that a request is about: offset and length. What changes reservations is about none.
fn range(op: &BlockOp) -> (u64, u64) {
    match *op {
        BlockOp::Read { offset, len, .. } | BlockOp::Write { offset, len, .. } => {
            (offset, u64::from(len))
        }
        BlockOp::Flush { offset, len }
        | BlockOp::Discard { offset, len }
        | BlockOp::WriteZeroes { offset, len, .. }
        | BlockOp::Status { offset, len } => (offset, len),
        BlockOp::ChangeReservations(_) => (0, 0),
    }
}

impl PartialEq for Faults {
    /// Two lists are one where it is the same list, for their faults change.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Faults {
    /// A list of these faults.
    #[must_use]
    pub fn new(faults: Vec<Fault>) -> Self {
        Self {
            list: Mutex::new(faults),
            ..Self::default()
        }
    }

    /// Replaces the list, also while requests are under way.
    pub fn set(&self, faults: Vec<Fault>) {
        *self.list.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    /// Returns true if every fault has struck as often as it was to.
    pub fn is_spent(&self) -> bool {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.is_empty()
    }

    /// Holds the requests of this kind that touch any of `len` bytes from `offset` on, from now
    /// until [`Self::release`]. As at a device that hangs, they cannot be cancelled meanwhile, and
    /// are carried out then.
    pub fn hold(&self, on: FaultOn, offset: u64, len: u64) {
        *self.hold.lock().unwrap_or_else(PoisonError::into_inner) = Some(Range { on, offset, len });
    }

    /// Lets requests that are held go on.
    pub fn release(&self) {
        *self.hold.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Lets one operation on a file transfer at most `bytes` bytes, as a kernel may; 0 is no
    /// bound. Direct I/O needs a multiple of the device's block.
    pub fn shorten(&self, bytes: usize) {
        self.short.store(bytes, Ordering::Relaxed);
    }

    /// Returns true if a request is held.
    #[must_use]
    pub fn holds(&self, op: &BlockOp) -> bool {
        let hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        hold.is_some_and(|range| range.includes(op))
    }

    /// Bytes that one operation transfers at most.
    #[must_use]
    pub fn most(&self) -> usize {
        match self.short.load(Ordering::Relaxed) {
            0 => usize::MAX,
            most => most,
        }
    }

    /// Takes what strikes this request: a delay, then perhaps an error.
    #[must_use]
    pub fn strike(&self, op: &BlockOp) -> Option<(Duration, Option<BackendError>)> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let strikes = |f: &Fault| {
            let (on, offset, len) = (f.on, f.offset, f.len);
            Range { on, offset, len }.includes(op)
        };
        let index = list.iter().position(strikes)?;
        let fault = &mut list[index];
        let answer = (fault.delay, fault.error);
        if let Some(times) = &mut fault.times {
            *times = times.saturating_sub(1);
            if *times == 0 {
                list.remove(index);
            }
        }
        Some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_its_range_its_kind_and_its_number_of_times() {
        let faults = Faults::new(vec![Fault {
            on: FaultOn::Read,
            offset: 4096,
            len: 4096,
            times: Some(2),
            delay: Duration::ZERO,
            error: Some(BackendError::NoSpace),
        }]);
        let read = |offset, len| BlockOp::Read {
            offset,
            len,
            buffer_offset: 0,
            fua: false,
        };
        assert!(faults.strike(&read(0, 4096)).is_none());
        assert!(faults.strike(&read(8192, 512)).is_none());
        assert!(
            faults
                .strike(&BlockOp::Flush {
                    offset: 0,
                    len: 8192
                })
                .is_none()
        );
        assert!(faults.strike(&read(8191, 1)).is_some());
        assert!(!faults.is_spent());
        assert!(faults.strike(&read(0, 65536)).is_some());
        assert!(faults.is_spent());
        assert!(faults.strike(&read(4096, 512)).is_none());
    }
}
