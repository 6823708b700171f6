//! Injected errors and delays.
//!
//! When a backend is opened with a [`Faults`] list, it checks the list once per request, before the
//! request reaches the medium. The list can also hold requests, to simulate a device that hangs,
//! and shorten transfers. This is only used by tests, so there is no configuration key for it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use riser_scsi::step::BackendError;

/// Request types affected by a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultOn {
    /// All requests.
    Any,
    /// Requests that read data.
    Read,
    /// Requests that write data or zeroes.
    Write,
    /// Requests that flush cached data.
    Flush,
    /// Requests that free blocks.
    Discard,
}

/// An injected fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Request type.
    pub on: FaultOn,
    /// First byte of the affected range.
    pub offset: u64,
    /// Range length in bytes. The fault affects requests that overlap this range.
    pub len: u64,
    /// Number of requests to affect before the fault is removed. `None` means no limit.
    pub times: Option<u32>,
    /// Delay before the request fails or continues.
    pub delay: Duration,
    /// The error to return. `None` only delays the request.
    pub error: Option<BackendError>,
}

/// A list of faults. The first match is used for each request.
#[derive(Debug, Default)]
pub struct Faults {
    list: Mutex<Vec<Fault>>,
    /// Held requests: type, offset and length.
    hold: Mutex<Option<(FaultOn, u64, u64)>>,
    /// Maximum bytes per transfer; 0 for no limit.
    short: AtomicUsize,
}

/// Returns true if a fault on this type and byte range affects a request.
fn affects((on, start, most): (FaultOn, u64, u64), kind: FaultOn, offset: u64, len: u64) -> bool {
    (on == FaultOn::Any || on == kind)
        && offset < start.saturating_add(most)
        && start < offset.saturating_add(len.max(1))
}

impl PartialEq for Faults {
    /// Two lists are equal only if they are the same object, because their faults can change.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Faults {
    /// Creates a list with these faults.
    #[must_use]
    pub fn new(faults: Vec<Fault>) -> Self {
        Self {
            list: Mutex::new(faults),
            ..Self::default()
        }
    }

    /// Replaces the list. This can be used while requests are in flight.
    pub fn set(&self, faults: Vec<Fault>) {
        *self.list.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    /// Returns true if all faults have been used up.
    pub fn is_spent(&self) -> bool {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.is_empty()
    }

    /// Holds all requests of this type that overlap the `len` bytes at `offset`, until
    /// [`Self::release`] is called. As with a device that hangs, held requests cannot be canceled,
    /// and will be executed on release.
    pub fn hold(&self, on: FaultOn, offset: u64, len: u64) {
        *self.hold.lock().unwrap_or_else(PoisonError::into_inner) = Some((on, offset, len));
    }

    /// Resumes held requests.
    pub fn release(&self) {
        *self.hold.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Limits file operations to `bytes` bytes per transfer, as the kernel may do; 0 for no limit.
    /// Direct I/O requires a multiple of the device's block size.
    pub fn shorten(&self, bytes: usize) {
        self.short.store(bytes, Ordering::Relaxed);
    }

    /// Returns true if a request should be held. `kind` is [`FaultOn::Any`] if there is no other
    /// type for it.
    #[must_use]
    pub fn holds(&self, kind: FaultOn, offset: u64, len: u64) -> bool {
        let hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        hold.is_some_and(|held| affects(held, kind, offset, len))
    }

    /// Returns the maximum number of bytes per transfer.
    #[must_use]
    pub fn most(&self) -> usize {
        match self.short.load(Ordering::Relaxed) {
            0 => usize::MAX,
            most => most,
        }
    }

    /// Returns the fault for a request, as in [`Self::holds`]: a delay, and optionally an error.
    #[must_use]
    pub fn strike(
        &self,
        kind: FaultOn,
        offset: u64,
        len: u64,
    ) -> Option<(Duration, Option<BackendError>)> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let strikes = |f: &Fault| affects((f.on, f.offset, f.len), kind, offset, len);
        let index = list.iter().position(strikes)?;
        let fault = &mut list[index];
        let outcome = (fault.delay, fault.error);
        if let Some(times) = &mut fault.times {
            *times = times.saturating_sub(1);
            if *times == 0 {
                list.remove(index);
            }
        }
        Some(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_matches_range_type_and_count() {
        let faults = Faults::new(vec![Fault {
            on: FaultOn::Read,
            offset: 4096,
            len: 4096,
            times: Some(2),
            delay: Duration::ZERO,
            error: Some(BackendError::NoSpace),
        }]);
        let strike = |kind, offset, len| faults.strike(kind, offset, len).is_some();
        assert!(!strike(FaultOn::Read, 0, 4096));
        assert!(!strike(FaultOn::Read, 8192, 512));
        assert!(!strike(FaultOn::Flush, 0, 8192));
        assert!(strike(FaultOn::Read, 8191, 1));
        assert!(!faults.is_spent());
        assert!(strike(FaultOn::Read, 0, 65536));
        assert!(faults.is_spent());
        assert!(!strike(FaultOn::Read, 4096, 512));
    }
}
