//! [`IntentLog`]: the regions of a protected file that may be torn by a crash.
//!
//! A frame is not written atomically, so a crash may preserve its block without its tuple. Before
//! the first change of a region, its bit is therefore set in the header, durably. When the file is
//! opened again, the frames of these regions are [checked](super::recover). The bits are cleared
//! when all changes are complete and flushed, after some time without changes.
//!
//! ```text
//!   change ─→ begin ─┬─ recorded ─────────────────────────────→ started ─→ end
//!                    └─ waits ─→ next attempt ─┬─ success ────────┘
//!                         (one thread)         └─ failure ─→ the change fails
//! ```
//!
//! The log performs no I/O: a thread writes the pages returned by [`IntentLog::next_attempt`]. All
//! changes that arrive during an attempt share the next one.
//!
//! Bits are reused for regions beyond the end of the bitmap, so a file can grow to any size.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riser_reactor::{Handle, Waker};

use super::header::{HEADER_LEN, PAGE};

/// Size of the bitmap in bytes: all pages of the header except the first one.
pub(super) const BITMAP: usize = HEADER_LEN as usize - PAGE;

/// Number of bits in the bitmap.
pub(super) const BITS: u64 = BITMAP as u64 * 8;

/// Time without changes before bits are cleared.
const IDLE: Duration = Duration::from_secs(5);

/// Write-intent log of an open file.
#[derive(Debug)]
pub(in crate::backend) struct Intents {
    pub(in crate::backend) log: IntentLog,
    /// Separate descriptor, because the kernel reports a lost write once for each descriptor.
    pub(in crate::backend) file: Handle,
}

impl Intents {
    /// Performs attempts until no change is waiting.
    pub(in crate::backend) fn perform_attempts(
        &self,
        attempt: impl Fn(&[BitmapPage]) -> Result<(), i32>,
    ) {
        while let Some(pages) = self.log.next_attempt() {
            self.log.complete_attempt(attempt(&pages));
        }
    }
}

/// The regions of a file with their state.
#[derive(Debug)]
pub(in crate::backend) struct IntentLog {
    region_size: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Regions that may be changed, because their bits are durable.
    recorded: Bitmap,
    /// Regions of the current attempt.
    attempted: Bitmap,
    /// Regions of the next attempt.
    wanted: Bitmap,
    /// Set while a thread performs attempts.
    is_busy: bool,
    /// Number of attempts that were started and completed.
    started: u64,
    completed: u64,
    /// The last failed attempt, and its error number.
    failure: Option<(u64, i32)>,
    /// Threads with requests waiting for an attempt, at most once for each attempt. Cancelled
    /// requests remain until it is complete.
    waiting: Vec<(u64, Waker)>,
    /// Number of active changes.
    active: usize,
    /// Number of changes that were started.
    changes: u64,
    /// Time when the last change was completed.
    last: Option<Instant>,
}

/// A bit for each region.
#[derive(Debug)]
struct Bitmap(Box<[u8]>);

impl Bitmap {
    fn new() -> Self {
        Self(vec![0; BITMAP].into_boxed_slice())
    }

    fn has(&self, bit: u64) -> bool {
        self.0[(bit / 8) as usize] & 1 << (bit % 8) != 0
    }

    fn set(&mut self, bit: u64) {
        self.0[(bit / 8) as usize] |= 1 << (bit % 8);
    }

    /// Moves all bits to another bitmap.
    fn move_to(&mut self, other: &mut Self) {
        for (from, to) in self.0.iter_mut().zip(&mut other.0) {
            *to |= std::mem::take(from);
        }
    }

    /// Returns the numbers of the pages with bits.
    fn pages(&self) -> Vec<usize> {
        let pages = self.0.chunks(PAGE).enumerate();
        let used = pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0));
        used.map(|(number, _)| number).collect()
    }

    fn page(&self, number: usize) -> &[u8] {
        &self.0[number * PAGE..(number + 1) * PAGE]
    }
}

/// Result of [`IntentLog::begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) enum Begin {
    /// The change is active until [`IntentLog::end`].
    Started,
    /// The change waits for the attempt with this number.
    Waiting {
        /// Number of the attempt.
        attempt: u64,
        /// No thread is performing attempts, so the caller must start one.
        needs_thread: bool,
    },
    /// The attempt has failed with this error number.
    Failed(i32),
}

/// A page to be written to the file.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::backend) struct BitmapPage {
    /// Offset in the file.
    pub(in crate::backend) offset: u64,
    /// Content of the page.
    pub(in crate::backend) bytes: Vec<u8>,
}

impl IntentLog {
    /// Creates the log of a file without torn regions.
    pub(in crate::backend) fn new(region_size: u64) -> Self {
        Self {
            region_size,
            state: Mutex::new(State {
                recorded: Bitmap::new(),
                attempted: Bitmap::new(),
                wanted: Bitmap::new(),
                is_busy: false,
                started: 0,
                completed: 0,
                failure: None,
                waiting: Vec::new(),
                active: 0,
                changes: 0,
                last: None,
            }),
        }
    }

    /// Starts a change of these bytes of the file, unless it has to wait for an attempt. In this
    /// case, `waker` is called, and woken afterwards. `attempt` is the number that the change has
    /// waited for.
    pub(in crate::backend) fn begin(
        &self,
        bytes: &Range<u64>,
        attempt: Option<u64>,
        waker: impl FnOnce() -> Waker,
    ) -> Begin {
        let state = &mut *self.lock();
        if self.bits(bytes).all(|bit| state.recorded.has(bit)) {
            state.active += 1;
            state.changes += 1;
            return Begin::Started;
        }
        if let Some(attempt) = attempt {
            match state.failure {
                _ if state.completed < attempt => {
                    let needs_thread = false;
                    return Begin::Waiting {
                        attempt,
                        needs_thread,
                    };
                }
                Some((failed, errno)) if failed >= attempt => return Begin::Failed(errno),
                // The bits were cleared before the change has continued.
                _ => {}
            }
        }
        for bit in self.bits(bytes) {
            if !state.recorded.has(bit) {
                state.wanted.set(bit);
            }
        }
        let (attempt, waker) = (state.started + 1, waker());
        let is_waiting = |(n, other): &(u64, Waker)| *n == attempt && other.will_wake(&waker);
        if !state.waiting.iter().any(is_waiting) {
            state.waiting.push((attempt, waker));
        }
        Begin::Waiting {
            attempt,
            needs_thread: !std::mem::replace(&mut state.is_busy, true),
        }
    }

    /// Completes a change that was started.
    pub(in crate::backend) fn end(&self, now: Instant) {
        let state = &mut *self.lock();
        state.active -= 1;
        state.last = Some(now);
    }

    /// Starts the next attempt. Returns the pages to be written and flushed, or `None` if nothing is
    /// waiting, so that the thread can exit.
    pub(in crate::backend) fn next_attempt(&self) -> Option<Vec<BitmapPage>> {
        let state = &mut *self.lock();
        let pages = state.wanted.pages();
        if pages.is_empty() {
            state.is_busy = false;
            return None;
        }
        state.started += 1;
        state.wanted.move_to(&mut state.attempted);
        let (recorded, attempted) = (&state.recorded, &state.attempted);
        let pages = pages.into_iter().map(|number| BitmapPage {
            offset: ((number + 1) * PAGE) as u64,
            bytes: std::iter::zip(recorded.page(number), attempted.page(number))
                .map(|(recorded, attempted)| recorded | attempted)
                .collect(),
        });
        Some(pages.collect())
    }

    /// Completes an attempt, and wakes all changes that were waiting for it.
    pub(in crate::backend) fn complete_attempt(&self, result: Result<(), i32>) {
        let state = &mut *self.lock();
        match result {
            Ok(()) => state.attempted.move_to(&mut state.recorded),
            Err(errno) => {
                state.attempted.0.fill(0);
                state.failure = Some((state.started, errno));
            }
        }
        state.completed = state.started;
        let completed = state.completed;
        for (_, waker) in state.waiting.extract_if(.., |(n, _)| *n <= completed) {
            waker.wake();
        }
    }

    /// Returns the number of changes if there are recorded regions, no active changes, and no thread,
    /// and the last change was completed some time before `now`. `None` for `now` does not require
    /// this time. After flushing the file, the caller must call [`IntentLog::clear`], and then
    /// perform attempts like a thread started by [`IntentLog::begin`].
    pub(in crate::backend) fn begin_clear(&self, now: Option<Instant>) -> Option<u64> {
        let state = &mut *self.lock();
        // If the first change was cancelled, the time starts now.
        let is_idle = now.is_none_or(|now| {
            now.saturating_duration_since(*state.last.get_or_insert(now)) >= IDLE
        });
        let is_possible =
            !state.is_busy && state.active == 0 && is_idle && !state.recorded.pages().is_empty();
        is_possible.then(|| {
            state.is_busy = true;
            state.changes
        })
    }

    /// Clears all regions unless there were changes after [`IntentLog::begin_clear`]. Returns the
    /// pages to be written. It is sufficient that they precede the pages of the next attempt.
    pub(in crate::backend) fn clear(&self, changes: u64) -> Vec<BitmapPage> {
        let state = &mut *self.lock();
        if state.active > 0 || state.changes != changes {
            return Vec::new();
        }
        let pages = state.recorded.pages();
        state.recorded.0.fill(0);
        let cleared = pages.into_iter().map(|number| BitmapPage {
            offset: ((number + 1) * PAGE) as u64,
            bytes: vec![0; PAGE],
        });
        cleared.collect()
    }

    /// Returns the bits of the regions that contain these bytes.
    fn bits(&self, bytes: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
        let regions = bytes.start / self.region_size..bytes.end.div_ceil(self.region_size);
        regions.take(BITS as usize).map(|region| region % BITS)
    }

    /// Updates cannot be partial, so ignore poisoning.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: u64 = 4 << 20;

    fn begin(log: &IntentLog, bytes: Range<u64>, attempt: Option<u64>) -> Begin {
        log.begin(&bytes, attempt, Waker::simulated)
    }

    fn waiting(attempt: u64, needs_thread: bool) -> Begin {
        Begin::Waiting {
            attempt,
            needs_thread,
        }
    }

    /// Performs the next attempt.
    fn attempt(log: &IntentLog, result: Result<(), i32>) -> Vec<(u64, Vec<usize>)> {
        let pages = log.next_attempt().expect("changes are waiting");
        log.complete_attempt(result);
        let set = |bytes: &[u8]| {
            let bits = (0..bytes.len() * 8).filter(|bit| bytes[bit / 8] & 1 << (bit % 8) != 0);
            bits.collect()
        };
        pages.iter().map(|p| (p.offset, set(&p.bytes))).collect()
    }

    #[test]
    fn change_waits_until_its_region_is_recorded() {
        let log = IntentLog::new(REGION);
        assert_eq!(begin(&log, 0..520, None), waiting(1, true));
        assert_eq!(begin(&log, 0..520, Some(1)), waiting(1, false));
        let pages = log.next_attempt().unwrap();
        assert_eq!((pages.len(), pages[0].offset), (1, 4096));
        assert_eq!(pages[0].bytes[..2], [1, 0]);
        // Changes during an attempt share the next one.
        assert_eq!(begin(&log, 0..520, None), waiting(2, false));
        assert_eq!(begin(&log, REGION..REGION + 1, None), waiting(2, false));
        log.complete_attempt(Ok(()));
        assert_eq!(begin(&log, 0..520, Some(1)), Begin::Started);
        let last = REGION - 10..REGION + 10;
        assert_eq!(begin(&log, last.clone(), None), waiting(2, false));
        assert_eq!(attempt(&log, Ok(())), [(4096, vec![0, 1])]);
        assert_eq!(begin(&log, last, Some(2)), Begin::Started);
        assert_eq!(log.next_attempt(), None);
        assert_eq!(begin(&log, 0..1, None), Begin::Started);
        assert_eq!(begin(&log, 2 * REGION..3 * REGION, None), waiting(3, true));
    }

    #[test]
    fn waiting_changes_are_woken_by_their_attempt() {
        let log = IntentLog::new(REGION);
        let wakers = [(); 2].map(|()| Waker::simulated());
        for (region, waker) in wakers.iter().enumerate() {
            let at = region as u64 * REGION;
            log.begin(&(at..at + 1), None, || waker.clone());
            if region == 0 {
                log.next_attempt().unwrap();
            }
        }
        log.complete_attempt(Ok(()));
        assert!(wakers[0].is_pending() && !wakers[1].is_pending());
        assert_eq!(attempt(&log, Ok(())), [(4096, vec![0, 1])]);
        assert!(wakers[1].is_pending());
    }

    /// A peer can submit and abort any number of writes during an attempt.
    #[test]
    fn repeated_changes_share_entry_of_thread() {
        let log = IntentLog::new(REGION);
        let waker = Waker::simulated();
        let begin = || log.begin(&(0..1), None, || waker.clone());
        begin();
        log.next_attempt().unwrap();
        for _ in 0..10_000 {
            assert_eq!(begin(), waiting(2, false));
        }
        assert_eq!(log.lock().waiting.len(), 2);
        log.begin(&(0..1), None, Waker::simulated);
        assert_eq!(log.lock().waiting.len(), 3, "another thread");
        log.complete_attempt(Ok(()));
        assert_eq!(log.lock().waiting.len(), 2);
        log.next_attempt();
        log.complete_attempt(Ok(()));
        assert!(log.lock().waiting.is_empty() && waker.is_pending());
    }

    #[test]
    fn failed_attempt_fails_its_changes_only() {
        let log = IntentLog::new(REGION);
        begin(&log, 0..1, None);
        attempt(&log, Err(28));
        // A new change retries, and the failed one does not wait for it.
        assert_eq!(begin(&log, REGION..REGION + 1, None), waiting(2, false));
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Failed(28));
        assert_eq!(attempt(&log, Ok(())), [(4096, vec![1])]);
        let other = REGION..REGION + 1;
        assert_eq!(begin(&log, other, Some(2)), Begin::Started);
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Failed(28));
    }

    #[test]
    fn regions_are_cleared_after_idle_time() {
        let log = IntentLog::new(REGION);
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        begin(&log, 0..1, None);
        attempt(&log, Ok(()));
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Started);
        assert_eq!(log.next_attempt(), None);
        assert_eq!(log.begin_clear(None), None, "the change is active");
        log.end(start);
        assert_eq!(log.begin_clear(Some(start + 4 * second)), None);
        let changes = log.begin_clear(Some(start + 5 * second)).unwrap();
        // A change during the flush may not be durable.
        assert_eq!(begin(&log, 0..1, None), Begin::Started);
        log.end(start);
        assert_eq!(log.clear(changes), []);
        assert_eq!(log.next_attempt(), None);
        let changes = log.begin_clear(None).unwrap();
        let cleared = log.clear(changes);
        assert_eq!((cleared.len(), cleared[0].offset), (1, 4096));
        assert!(cleared[0].bytes.iter().all(|byte| *byte == 0));
        // The thread that clears the bits performs the next attempt.
        assert_eq!(begin(&log, 0..1, None), waiting(2, false));
        assert_eq!(attempt(&log, Ok(())), [(4096, vec![0])]);
    }

    #[test]
    fn bits_are_reused_beyond_bitmap() {
        let log = IntentLog::new(4096);
        let bits = |range: Range<u64>| log.bits(&range).collect::<Vec<_>>();
        assert_eq!(bits(4095..4097), [0, 1]);
        assert!(bits(4096..4096).is_empty());
        let end = 491_520 * 4096;
        assert_eq!(bits(end - 1..end + 1), [491_519, 0]);
        assert_eq!(bits(0..3 * end).len(), 491_520);
    }
}
