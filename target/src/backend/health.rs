//! Failures of a backend, and the room that it has.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use riser_scsi::step::BackendError;

use super::cause::Cause;

/// Causes of failed operations, which are counted in this order.
const KINDS: [Cause; 5] = [
    Cause::Medium,
    Cause::NoSpace,
    Cause::ReadOnly,
    Cause::NotReady,
    Cause::Internal,
];

/// The cause of a failed operation; `None` for failures that the initiator caused itself.
fn cause_of(error: BackendError) -> Option<Cause> {
    match error {
        BackendError::Medium { .. } => Some(Cause::Medium),
        BackendError::NoSpace => Some(Cause::NoSpace),
        BackendError::ReadOnly => Some(Cause::ReadOnly),
        BackendError::NotReady => Some(Cause::NotReady),
        BackendError::Internal => Some(Cause::Internal),
        // An initiator that aborts its commands, or a connection that is lost, must not make a
        // backend look broken.
        BackendError::Aborted | BackendError::Transfer(_) => None,
    }
}

/// Operations that a medium failed, by kind, and whether it still fails them.
#[derive(Debug)]
pub(super) struct Errors {
    counts: [AtomicU64; KINDS.len()],
    /// Zero of the milliseconds in `clears`: the first failure.
    start: OnceLock<Instant>,
    /// The [`Clears`] of the failure at present: read for each operation that succeeds, without
    /// the lock.
    clears: AtomicU64,
    /// True once an operation that could have failed has succeeded since the last failure.
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

/// The time from which a success ends a failure, in one word: twice the milliseconds since the
/// start, and one more if only a write does.
#[derive(Clone, Copy)]
struct Clears(u64);

impl Clears {
    /// There is nothing to end.
    const NEVER: u64 = 0;

    fn new(cause: Cause, since_start: Duration) -> Self {
        let at = since_start + time_of(cause);
        // Reads succeed on a full or read-only file system as well, so they prove nothing.
        let takes_write = matches!(cause, Cause::NoSpace | Cause::ReadOnly);
        // One word, so that every successful operation asks with one load. It is never `NEVER`,
        // since `at` is at least the quiet time after the start.
        Self((at.as_millis() as u64) << 1 | u64::from(takes_write))
    }

    /// Returns true if a success of this kind can end the failure, now or later.
    fn counts(self, is_write: bool) -> bool {
        self.0 != Self::NEVER && (is_write || self.0 & 1 == 0)
    }

    /// Returns true if a success ends the failure now; the clock is only read if it matters.
    fn is_due(self, is_write: bool, since_start: impl FnOnce() -> Duration) -> bool {
        self.counts(is_write) && since_start().as_millis() as u64 >= self.0 >> 1
    }
}

/// A backend that is open and fails operations, or whose medium is at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failing {
    /// Date of the first failure of this series.
    pub since: SystemTime,
    /// The last failure, for people.
    pub why: String,
    /// Cause of the last failure.
    pub cause: Cause,
}

impl Failing {
    /// Returns true if the device is gone: it may be there again as another one.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.cause == Cause::NotReady
    }

    /// A failure of this moment.
    #[cfg(test)]
    pub(crate) fn of(error: BackendError) -> Self {
        Self {
            since: SystemTime::now(),
            why: format!("{error:?}"),
            cause: cause_of(error).expect("a failure"),
        }
    }
}

/// A failure as workers note it: they have no date.
#[derive(Debug)]
struct Failure {
    since: Instant,
    /// The date of that, from the first report on: it stays, though the date is set in between.
    date: Option<SystemTime>,
    why: String,
    cause: Cause,
    last: Instant,
}

/// Time for which a medium error counts: other blocks may work meanwhile.
const MEDIUM_ERROR: Duration = Duration::from_secs(60);

/// Time after the last failure in which a success does not count yet. A file system that is full
/// still takes what overwrites allocated blocks, and such a success between two failures ends
/// nothing.
const QUIET: Duration = Duration::from_secs(10);

/// Returns the time for which a failure of a kind counts at least.
const fn time_of(cause: Cause) -> Duration {
    match cause {
        Cause::Medium => MEDIUM_ERROR,
        _ => QUIET,
    }
}

impl Errors {
    /// An operation failed; whether that is a failure of the medium.
    pub(super) fn count(&self, now: Instant, error: BackendError, why: &dyn Display) -> bool {
        let Some(cause) = cause_of(error) else {
            return false;
        };
        self.counts[cause as usize].fetch_add(1, Ordering::Relaxed);
        let mut failing = self.lock();
        self.start.get_or_init(|| now);
        // A series of failures keeps its beginning, and the date that was first reported for it.
        // After one that has ended with time, a new series begins.
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

    /// An operation succeeded; whether the backend works again by that, which is so once in
    /// [`QUIET`] at most.
    pub(super) fn clear(&self, now: Instant, is_write: bool) -> bool {
        let is_due = |clears: Clears| clears.is_due(is_write, || self.since_start(now));
        let clears = Clears(self.clears.load(Ordering::Relaxed));
        if !is_due(clears) {
            if clears.counts(is_write) {
                // Perhaps the last one for long, if the backend is not used.
                self.worked.store(true, Ordering::Relaxed);
            }
            return false;
        }
        let mut failing = self.lock();
        let works = |failing: &Failure| is_due(self.clears_of(failing));
        // Asked once more under the lock: another worker may have noted a newer failure since the
        // load above.
        let works = failing.take_if(|failing| works(failing)).is_some();
        self.store_clears(failing.as_ref());
        works
    }

    fn clears_of(&self, failing: &Failure) -> Clears {
        Clears::new(failing.cause, self.since_start(failing.last))
    }

    /// Time between the first failure and `at`.
    fn since_start(&self, at: Instant) -> Duration {
        let start = self.start.get().copied().unwrap_or(at);
        at.saturating_duration_since(start)
    }

    fn store_clears(&self, failing: Option<&Failure>) {
        let clears = failing.map_or(Clears::NEVER, |failing| self.clears_of(failing).0);
        self.clears.store(clears, Ordering::Relaxed);
    }

    /// Returns the failure at present, whose date is `date`.
    pub(super) fn failing(&self, now: Instant, date: SystemTime) -> Option<Failing> {
        let mut failing = self.lock();
        let failure = failing
            .as_mut()
            .filter(|failing| self.lasts(failing, now))?;
        // Workers have no date. The first report makes one from the time that has passed, and
        // keeps it: a clock that is set later must not move the beginning of the failure.
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

    /// Returns true if a failure still counts without another operation: for ever, unless it ends
    /// with time.
    fn lasts(&self, failing: &Failure, now: Instant) -> bool {
        // A bad block need not be touched again, so its error ends with time. A file system that
        // is full or gone stays so until it was seen to work.
        let ends = failing.cause == Cause::Medium || self.worked.load(Ordering::Relaxed);
        !ends || now.saturating_duration_since(failing.last) < time_of(failing.cause)
    }

    /// Counts by kind, including kinds that have not occurred.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.counts.iter();
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        KINDS.map(Cause::label).into_iter().zip(counts)
    }

    /// Every change is whole, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The room of a backend in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that the file has been allocated; a sparse file has fewer than its size.
    pub allocated: u64,
    /// Bytes that its file system still has for this user.
    pub free: u64,
}

impl Space {
    /// Bytes in use, and bytes in all that a file of `size` can have: as many as it is long, or
    /// what it has been allocated and what its file system has left, if that is less.
    #[must_use]
    pub fn of(self, size: u64) -> (u64, u64) {
        let all = size.min(self.allocated.saturating_add(self.free));
        (self.allocated.min(all), all)
    }
}

/// The last measurement, shared between the thread that measures and those that report.
#[derive(Debug, Default)]
pub(super) struct Measured {
    allocated: AtomicU64,
    /// One more than the bytes; 0 if nothing was measured.
    free: AtomicU64,
}

impl Measured {
    pub(super) fn get(&self) -> Option<Space> {
        let free = self.free.load(Ordering::Acquire).checked_sub(1)?;
        let allocated = self.allocated.load(Ordering::Relaxed);
        Some(Space { allocated, free })
    }

    /// Forgets the last measurement.
    pub(super) fn forget(&self) {
        self.free.store(0, Ordering::Release);
    }

    /// Takes a measurement.
    pub(super) fn set(&self, Space { allocated, free }: Space) {
        // `free` last, and with release order: a reader that sees it sees the number that belongs
        // to it, or a newer one.
        self.allocated.store(allocated, Ordering::Relaxed);
        self.free.store(free.saturating_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;

    #[test]
    fn failures_of_the_medium_are_counted_by_kind() {
        let errors = Errors::default();
        let now = Instant::now();
        assert!(
            errors.count(now, BackendError::NoSpace, &"why")
                && errors.count(now, BackendError::NoSpace, &"why")
        );
        assert!(errors.count(now, BackendError::Medium { offset: None }, &"why"));
        assert!(
            !errors.count(now, BackendError::Aborted, &"why"),
            "the initiator asked for it"
        );
        let counts: Vec<_> = errors.counts().filter(|(_, n)| *n > 0).collect();
        assert_eq!(counts, [("medium", 1), ("no_space", 2)]);
    }

    #[test]
    fn space_is_what_the_file_system_can_give() {
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
    fn a_sparse_file_has_less_than_its_size() {
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
    fn a_backend_fails_until_what_failed_succeeds_and_has_not_failed_for_a_while() {
        let errors = Errors::default();
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let date = |secs| SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + secs);
        let failing = |secs| errors.failing(at(secs), date(secs));
        let clear = |is_write, secs| errors.clear(at(secs), is_write);
        let count = |error, why: &str, secs| assert!(errors.count(at(secs), error, &why));
        assert!(!clear(true, 0) && failing(0).is_none());
        count(BackendError::NoSpace, "first", 1);
        // What overwrites blocks that it has succeeds, and what needs new ones fails.
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
    fn a_failure_ends_with_time_once_it_has_worked_again() {
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
    fn a_medium_error_counts_while_other_blocks_work() {
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
