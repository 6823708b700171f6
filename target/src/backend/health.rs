//! Failures of a backend, and its available space.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use riser_scsi::step::BackendError;

use super::cause::Cause;

/// Failure causes, in the order of their counters.
const KINDS: [Cause; 5] = [
    Cause::Medium,
    Cause::NoSpace,
    Cause::ReadOnly,
    Cause::NotReady,
    Cause::Internal,
];

/// Returns the cause of a failed operation, or `None` for failures caused by the initiator.
fn cause_of(error: BackendError) -> Option<Cause> {
    match error {
        BackendError::Medium { .. } => Some(Cause::Medium),
        BackendError::NoSpace => Some(Cause::NoSpace),
        BackendError::ReadOnly => Some(Cause::ReadOnly),
        BackendError::NotReady => Some(Cause::NotReady),
        BackendError::Internal => Some(Cause::Internal),
        // A backend must not appear to fail if an initiator aborts commands or a connection is
        // lost.
        BackendError::Aborted | BackendError::Transfer(_) => None,
    }
}

/// Counts failed operations of a medium by cause, and detects whether it is still failing.
#[derive(Debug)]
pub(super) struct Errors {
    counts: [AtomicU64; KINDS.len()],
    /// Base for the milliseconds in `clears`: the time of the first failure.
    start: OnceLock<Instant>,
    /// [`Clears`] for the current failure, which is read without locking after each successful
    /// operation.
    clears: AtomicU64,
    /// True if an operation that could have failed was successful after the last failure.
    worked: AtomicBool,
    failing: Mutex<Option<Failure>>,
}

impl Default for Errors {
    fn default() -> Self {
        Self {
            counts: Default::default(),
            start: OnceLock::new(),
            clears: AtomicU64::new(Clears::NEVER),
            worked: AtomicBool::new(false),
            failing: Mutex::default(),
        }
    }
}

/// Time when a success clears a failure, in a single word: milliseconds since the start in the
/// upper 63 bits. The lowest bit is set if only a write can clear it.
#[derive(Clone, Copy)]
struct Clears(u64);

impl Clears {
    /// There is no failure.
    const NEVER: u64 = 0;

    fn new(cause: Cause, since_start: Duration) -> Self {
        let at = since_start + time_of(cause);
        // Reads can succeed on a full or read-only file system, so they don't indicate that it
        // works again.
        let takes_write = matches!(cause, Cause::NoSpace | Cause::ReadOnly);
        // A single word, so that each successful operation only has to load this value. It's never
        // `NEVER`, because `at` is at least the quiet time.
        Self((at.as_millis() as u64) << 1 | u64::from(takes_write))
    }

    /// Returns true if a successful operation of this kind can clear the failure, now or later.
    fn counts(self, is_write: bool) -> bool {
        self.0 != Self::NEVER && (is_write || self.0 & 1 == 0)
    }

    /// Returns true if a successful operation clears the failure now. Only computes the time if
    /// required.
    fn is_due(self, is_write: bool, since_start: impl FnOnce() -> Duration) -> bool {
        self.counts(is_write) && since_start().as_millis() as u64 >= self.0 >> 1
    }
}

/// An open backend with failing operations or a faulty medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failing {
    /// Time of the first failure in this series.
    pub since: SystemTime,
    /// Text for the last failure.
    pub why: String,
    /// Cause of the last failure.
    pub cause: Cause,
}

impl Failing {
    /// Returns true if the device was removed. It may be available again as another device.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.cause == Cause::NotReady
    }

    /// Creates a failure at the current time.
    #[cfg(test)]
    pub(crate) fn of(error: BackendError) -> Self {
        Self {
            since: SystemTime::now(),
            why: format!("{error:?}"),
            cause: cause_of(error).expect("a failure"),
        }
    }
}

/// A failure as recorded by workers, without a date.
#[derive(Debug)]
struct Failure {
    since: Instant,
    /// Date for `since`, set by the first report. It does not change if the clock is adjusted
    /// later.
    date: Option<SystemTime>,
    why: String,
    cause: Cause,
    last: Instant,
}

/// Duration of a medium error, because other blocks may be readable in the meantime.
const MEDIUM_ERROR: Duration = Duration::from_secs(60);

/// Time after the last failure during which a successful operation does not clear it. If a file
/// system is full, writes to allocated blocks still succeed, and such a success between two
/// failures must not clear them.
const QUIET: Duration = Duration::from_secs(10);

/// Returns the minimum duration of a failure with this cause.
const fn time_of(cause: Cause) -> Duration {
    match cause {
        Cause::Medium => MEDIUM_ERROR,
        _ => QUIET,
    }
}

impl Errors {
    /// Counts a failed operation. Returns true if the medium has failed.
    pub(super) fn count(&self, now: Instant, error: BackendError, why: &dyn Display) -> bool {
        let Some(cause) = cause_of(error) else {
            return false;
        };
        self.counts[cause as usize].fetch_add(1, Ordering::Relaxed);
        let mut failing = self.lock();
        self.start.get_or_init(|| now);
        // Keep the start of a series of failures, and the date that was first reported for it. If
        // the previous failure has expired, start a new series.
        let before = failing.as_ref().filter(|failing| self.lasts(failing, now));
        let (since, date) = before.map_or((now, None), |failing| (failing.since, failing.date));
        *failing = Some(Failure {
            since,
            date,
            why: why.to_string(),
            cause,
            last: now,
        });
        self.worked.store(false, Ordering::Relaxed);
        self.store_clears(failing.as_ref());
        true
    }

    /// Called for a successful operation. Returns true if this clears the failure, at most once per
    /// [`QUIET`].
    pub(super) fn clear(&self, now: Instant, is_write: bool) -> bool {
        let is_due = |clears: Clears| clears.is_due(is_write, || self.since_start(now));
        let clears = Clears(self.clears.load(Ordering::Relaxed));
        if !is_due(clears) {
            if clears.counts(is_write) {
                // If the backend isn't used, this may be the last operation for a long time.
                self.worked.store(true, Ordering::Relaxed);
            }
            return false;
        }
        let mut failing = self.lock();
        let works = |failing: &Failure| is_due(self.clears_of(failing));
        // Check again while locked, because another worker may have recorded a newer failure after
        // the load above.
        let works = failing.take_if(|failing| works(failing)).is_some();
        self.store_clears(failing.as_ref());
        works
    }

    fn clears_of(&self, failing: &Failure) -> Clears {
        Clears::new(failing.cause, self.since_start(failing.last))
    }

    /// Returns the time between the first failure and `at`.
    fn since_start(&self, at: Instant) -> Duration {
        let start = self.start.get().copied().unwrap_or(at);
        at.saturating_duration_since(start)
    }

    fn store_clears(&self, failing: Option<&Failure>) {
        let clears = failing.map_or(Clears::NEVER, |failing| self.clears_of(failing).0);
        self.clears.store(clears, Ordering::Relaxed);
    }

    /// Returns the current failure. `date` is the current date.
    pub(super) fn failing(&self, now: Instant, date: SystemTime) -> Option<Failing> {
        let mut failing = self.lock();
        let failure = failing
            .as_mut()
            .filter(|failing| self.lasts(failing, now))?;
        // Workers don't have a date. The first report computes it from the elapsed time. It doesn't
        // change afterwards, even if the clock is adjusted.
        let since = *failure.date.get_or_insert_with(|| {
            let ago = now.saturating_duration_since(failure.since);
            date.checked_sub(ago).unwrap_or(date)
        });
        Some(Failing {
            since,
            why: failure.why.clone(),
            cause: failure.cause,
        })
    }

    /// Returns true if a failure is still active without another operation. Failures that do not
    /// expire are active until they are cleared.
    fn lasts(&self, failing: &Failure, now: Instant) -> bool {
        // A bad block might not be accessed again, so this error expires. A file system that is
        // full or unavailable is assumed to remain so until an operation succeeds.
        let ends = failing.cause == Cause::Medium || self.worked.load(Ordering::Relaxed);
        !ends || now.saturating_duration_since(failing.last) < time_of(failing.cause)
    }

    /// Returns the counts by cause, including zero counts.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.counts.iter();
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        KINDS.map(Cause::label).into_iter().zip(counts)
    }

    /// Updates cannot be partial, so ignore poisoning.
    fn lock(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Space of a backend in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Number of bytes allocated to the file. This is less than its size for a sparse file.
    pub allocated: u64,
    /// Number of bytes available to this user on the file system.
    pub free: u64,
}

impl Space {
    /// Returns the number of used bytes, and the total number of bytes available to a file of
    /// `size`. The latter is limited to the allocated bytes plus the available bytes on the file
    /// system.
    #[must_use]
    pub fn of(self, size: u64) -> (u64, u64) {
        let all = size.min(self.allocated.saturating_add(self.free));
        (self.allocated.min(all), all)
    }
}

/// Last measurement, written by one thread and read by others.
#[derive(Debug, Default)]
pub(super) struct Measured {
    allocated: AtomicU64,
    /// Number of bytes plus one, or 0 before the first measurement.
    free: AtomicU64,
}

impl Measured {
    pub(super) fn get(&self) -> Option<Space> {
        let free = self.free.load(Ordering::Acquire).checked_sub(1)?;
        let allocated = self.allocated.load(Ordering::Relaxed);
        Some(Space { allocated, free })
    }

    /// Discards the last measurement.
    pub(super) fn clear(&self) {
        self.free.store(0, Ordering::Release);
    }

    /// Stores a measurement.
    pub(super) fn set(&self, Space { allocated, free }: Space) {
        // Store `free` last with release order. When a reader loads it, `allocated` has the
        // corresponding value or a newer one.
        self.allocated.store(allocated, Ordering::Relaxed);
        self.free.store(free.saturating_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;

    #[test]
    fn medium_failures_are_counted_by_kind() {
        let errors = Errors::default();
        let now = Instant::now();
        assert!(
            errors.count(now, BackendError::NoSpace, &"why")
                && errors.count(now, BackendError::NoSpace, &"why")
        );
        assert!(errors.count(now, BackendError::Medium { offset: None }, &"why"));
        assert!(
            !errors.count(now, BackendError::Aborted, &"why"),
            "requested by the initiator"
        );
        let counts: Vec<_> = errors.counts().filter(|(_, n)| *n > 0).collect();
        assert_eq!(counts, [("medium", 1), ("no_space", 2)]);
    }

    #[test]
    fn space_is_limited_by_file_system() {
        let space = |allocated, free| Space { allocated, free }.of(100);
        assert_eq!(space(40, 1000), (40, 100));
        assert_eq!(space(40, 10), (40, 50));
        assert_eq!(
            space(101, 10),
            (100, 100),
            "with the file system's own blocks"
        );
        assert_eq!(space(u64::MAX, u64::MAX), (100, 100));
    }

    #[test]
    fn sparse_file_allocates_less_than_size() {
        let name = format!("riserd-space-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        let measured = Measured::default();
        assert_eq!(measured.get(), None);
        measured.set(sys::space(&std::os::fd::OwnedFd::from(file).into()).unwrap());
        let space = measured.get().unwrap();
        assert!(space.allocated < 1 << 20 && space.free > 0, "{space:?}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn failure_lasts_until_success_after_quiet_time() {
        let errors = Errors::default();
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let date = |secs| SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + secs);
        let failing = |secs| errors.failing(at(secs), date(secs));
        let clear = |is_write, secs| errors.clear(at(secs), is_write);
        let count = |error, why: &str, secs| assert!(errors.count(at(secs), error, &why));
        assert!(!clear(true, 0) && failing(0).is_none());
        count(BackendError::NoSpace, "first", 1);
        // Overwriting allocated blocks succeeds, but allocating new blocks fails.
        for secs in 2..20 {
            count(BackendError::NoSpace, "it is full", secs);
            assert!(!clear(true, secs), "it is still full");
        }
        let full = failing(20).unwrap();
        assert_eq!((full.why.as_str(), full.since), ("it is full", date(1)));
        let later = errors.failing(at(21), date(5000)).unwrap();
        assert_eq!(later.since, date(1), "though the date was set");
        assert!(!clear(true, 28));
        assert!(!clear(false, 30), "reads need no space");
        assert!(failing(28).is_some());
        assert!(clear(true, 30) && failing(30).is_none());
        assert!(!clear(true, 31), "it works already");
        count(BackendError::NotReady, "gone", 31);
        assert!(!clear(false, 40) && clear(false, 41) && !clear(false, 42));
    }

    #[test]
    fn failure_expires_after_success() {
        let errors = Errors::default();
        let start = Instant::now();
        let failing = |now| errors.failing(now, SystemTime::now());
        errors.count(start, BackendError::NotReady, &"gone");
        let later = start + 2 * QUIET;
        assert!(failing(later).is_some(), "it was not tried since");
        assert!(!errors.clear(start + Duration::from_secs(1), false));
        assert_eq!(failing(later), None, "it is not used any longer");
        let since = errors.lock().as_ref().unwrap().since;
        errors.count(later, BackendError::NotReady, &"gone");
        assert!(failing(later).is_some());
        let another = errors.lock().as_ref().unwrap().since;
        assert!(another > since, "another failure");
    }

    #[test]
    fn medium_error_survives_success_elsewhere() {
        let errors = Errors::default();
        let start = Instant::now();
        let failing = |now| errors.failing(now, SystemTime::now());
        errors.count(start, BackendError::Medium { offset: None }, &"a bad block");
        assert!(!errors.clear(start, false) && failing(start).is_some());
        let later = start + MEDIUM_ERROR;
        assert!(failing(later).is_none());
        assert!(errors.clear(later + Duration::from_millis(1), false));
    }
}
