//! [`IntentLog`]: the regions of a protected file that may be torn by a crash.
//!
//! A frame is not written atomically, so a crash may preserve its block without its tuple. Before
//! the first change of a region, its bit is therefore set in the header, durably. When the file is
//! opened again, the frames of these regions are [checked](super::recover). A bit is cleared after a
//! flush of the file if its region had no changes for some time before the flush, and none since.
//!
//! ```text
//!   change ─→ begin ─┬─ recorded ─────────────────────────────→ started ─→ end
//!                    └─ waits ─→ next attempt ─┬─ success ────────┘
//!                         (one thread)         └─ failure ─→ the change fails
//! ```
//!
//! The log performs no I/O: a thread writes the pages returned by [`IntentLog::next_attempt`], and
//! flushes the file. All changes that arrive during an attempt share the next attempt. The flush of an
//! attempt also permits clearing bits, and if only bits have to be cleared, an attempt has no pages.
//!
//! ```text
//!   recorded ─→ resting ─→ clearing ─→ cleared, and written without a flush
//!      ↑   begin_clear  attempt │ success
//!      └────────────────────────┘ change, or failure
//! ```
//!
//! After a failed flush, the bits of all regions are kept until the next recovery, because frames in
//! the page cache may differ from the medium.
//!
//! Bits are reused for regions beyond the end of the bitmap, so a file can grow to any size.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use riser_block::FlushDescriptor;
use riser_reactor::{Handle, Waker};

use super::header::{HEADER_LEN, PAGE};

/// Size of the bitmap in bytes: all pages of the header except the first page.
pub(super) const BITMAP: usize = HEADER_LEN as usize - PAGE;

/// Number of bits in the bitmap.
pub(super) const BITS: u64 = BITMAP as u64 * 8;

/// Time without changes of any region before all bits are cleared.
const IDLE: Duration = Duration::from_secs(5);

/// Time without changes of a region before its bit is cleared while other regions are changed. This
/// is longer, because a random load would otherwise wait for a flush with most of its changes.
const REGION_IDLE: Duration = Duration::from_secs(30);

/// Write-intent log of an open file.
#[derive(Debug)]
pub(in crate::backend) struct Intents {
    pub(in crate::backend) log: IntentLog,
    /// Separate descriptor, because the kernel reports a lost write once for each descriptor. It is
    /// only used by the thread that performs attempts.
    pub(in crate::backend) file: Mutex<FlushDescriptor<Handle>>,
}

impl Intents {
    /// Performs attempts until no change is waiting, and no bit has to be cleared. `attempt` writes
    /// and flushes pages as described at [`IntentLog::complete_attempt`], and `clear` only writes
    /// pages.
    pub(in crate::backend) fn perform_attempts(
        &self,
        attempt: impl Fn(&[BitmapPage]) -> Result<bool, i32>,
        clear: impl Fn(&[BitmapPage]),
    ) {
        while let Some(pages) = self.log.next_attempt() {
            // Write these before the pages of the next attempt.
            clear(&self.log.complete_attempt(attempt(&pages)));
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
    /// Recorded regions whose bits are only cleared by a recovery: some of their frames cannot be
    /// read, or may differ from the medium since a flush has failed.
    kept: Bitmap,
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
    /// Recorded regions without recent changes. The next attempt clears them.
    resting: Bitmap,
    /// Regions that the current attempt clears.
    clearing: Bitmap,
    /// Number of active changes.
    active: usize,
    /// Number of active changes of each region, up to the last region with a change.
    active_by_bit: Vec<u32>,
    /// Time when the last change was completed.
    last: Option<Instant>,
    /// Regions with completed changes in the current period, and its start.
    recent: Bitmap,
    period: Option<Instant>,
}

impl State {
    fn start_change(&mut self, bit: u64) {
        let at = bit as usize;
        if self.active_by_bit.len() <= at {
            self.active_by_bit.resize(at + 1, 0);
        }
        self.active_by_bit[at] += 1;
        self.resting.unset(bit);
        self.clearing.unset(bit);
    }

    fn end_change(&mut self, bit: u64) {
        self.active_by_bit[bit as usize] -= 1;
        self.recent.set(bit);
    }
}

/// A bit for each region.
#[derive(Clone, Debug)]
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

    fn unset(&mut self, bit: u64) {
        self.0[(bit / 8) as usize] &= !(1 << (bit % 8));
    }

    fn is_empty(&self) -> bool {
        // Without an exit in the middle, the compiler processes many bytes at once.
        self.0.iter().fold(0, |all, byte| all | byte) == 0
    }

    /// Clears all bits that are set in another bitmap.
    fn subtract(&mut self, other: &Self) {
        for (byte, other) in self.0.iter_mut().zip(&other.0) {
            *byte &= !other;
        }
    }

    /// Sets all bits that are set in another bitmap.
    fn add(&mut self, other: &Self) {
        for (byte, other) in self.0.iter_mut().zip(&other.0) {
            *byte |= other;
        }
    }

    /// Moves all bits to another bitmap.
    fn move_to(&mut self, other: &mut Self) {
        other.add(self);
        self.0.fill(0);
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
        /// No thread is performing attempts, so the caller must start a thread.
        needs_thread: bool,
    },
    /// The attempt has failed with this error number.
    Failed(i32),
}

/// A page of the bitmap, to be written to the file.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::backend) struct BitmapPage {
    /// Offset in the file.
    pub(in crate::backend) offset: u64,
    /// Content of the page.
    pub(in crate::backend) bytes: Vec<u8>,
}

impl IntentLog {
    /// Creates the log of a file after its recovery, with the bitmap of the regions that could not be
    /// [recovered](super::recovery::Recovered::kept).
    pub(in crate::backend) fn new(region_size: u64, unrecovered: &[u8]) -> Self {
        let mut kept = Bitmap::new();
        kept.0[..unrecovered.len()].copy_from_slice(unrecovered);
        Self {
            region_size,
            state: Mutex::new(State {
                recorded: kept.clone(),
                attempted: Bitmap::new(),
                wanted: Bitmap::new(),
                is_busy: false,
                started: 0,
                completed: 0,
                failure: None,
                waiting: Vec::new(),
                resting: Bitmap::new(),
                clearing: Bitmap::new(),
                active: 0,
                active_by_bit: Vec::new(),
                last: None,
                recent: Bitmap::new(),
                period: None,
                kept,
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
            self.bits(bytes).for_each(|bit| state.start_change(bit));
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

    /// Completes a change of these bytes that was started.
    pub(in crate::backend) fn end(&self, bytes: &Range<u64>, now: Instant) {
        let state = &mut *self.lock();
        state.active -= 1;
        self.bits(bytes).for_each(|bit| state.end_change(bit));
        state.last = Some(now);
    }

    /// Starts the next attempt. Returns the pages to be written before a flush, or `None` if no
    /// change is waiting and no bit has to be cleared, so that the thread can exit.
    pub(in crate::backend) fn next_attempt(&self) -> Option<Vec<BitmapPage>> {
        let state = &mut *self.lock();
        let pages = state.wanted.pages();
        if pages.is_empty() && state.resting.is_empty() {
            state.is_busy = false;
            return None;
        }
        state.started += 1;
        state.wanted.move_to(&mut state.attempted);
        state.resting.move_to(&mut state.clearing);
        let (recorded, attempted) = (&state.recorded, &state.attempted);
        let pages = pages.into_iter().map(|number| BitmapPage {
            offset: ((number + 1) * PAGE) as u64,
            bytes: std::iter::zip(recorded.page(number), attempted.page(number))
                .map(|(recorded, attempted)| recorded | attempted)
                .collect(),
        });
        Some(pages.collect())
    }

    /// Completes an attempt, and wakes all changes that were waiting for it. The result is the error
    /// number if the pages may not be durable. Otherwise, it is true if all changes that were
    /// completed before the attempt are durable as well. Returns the pages with cleared bits, to be
    /// written before the next attempt. A flush is not required.
    pub(in crate::backend) fn complete_attempt(
        &self,
        result: Result<bool, i32>,
    ) -> Vec<BitmapPage> {
        let state = &mut *self.lock();
        let mut cleared = Vec::new();
        if result == Ok(true) {
            cleared = state.clearing.pages();
            state.recorded.subtract(&state.clearing);
        }
        state.clearing.0.fill(0);
        match result {
            Ok(_) => state.attempted.move_to(&mut state.recorded),
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
        let pages = cleared.into_iter().map(|number| BitmapPage {
            offset: ((number + 1) * PAGE) as u64,
            bytes: state.recorded.page(number).to_vec(),
        });
        pages.collect()
    }

    /// Selects the regions to be cleared by the next attempt: all regions without active changes if
    /// the last change was completed some time before `now`, and otherwise, from time to time, all
    /// regions without recent changes. `None` for `now` does not require any time. Returns whether
    /// the caller must perform attempts, like a thread started by [`IntentLog::begin`].
    pub(in crate::backend) fn begin_clear(&self, now: Option<Instant>) -> bool {
        let state = &mut *self.lock();
        if state.recorded.is_empty() {
            return false;
        }
        // If the first change was cancelled, the time starts now.
        let has_passed = |start: &mut Option<Instant>, time| {
            now.is_none_or(|now| now.saturating_duration_since(*start.get_or_insert(now)) >= time)
        };
        let is_period_over = has_passed(&mut state.period, REGION_IDLE);
        let is_idle = (state.active == 0 || now.is_none()) && has_passed(&mut state.last, IDLE);
        if !is_idle && !is_period_over {
            return false;
        }
        let mut resting = state.recorded.clone();
        resting.subtract(&state.kept);
        if !is_idle {
            resting.subtract(&state.recent);
        }
        for (bit, active) in (0..).zip(&state.active_by_bit) {
            if *active > 0 {
                resting.unset(bit);
            }
        }
        if is_period_over {
            state.recent.0.fill(0);
            state.period = now;
        }
        state.resting = resting;
        !state.resting.is_empty() && !std::mem::replace(&mut state.is_busy, true)
    }

    /// Keeps all current bits until a recovery. Called when a flush has failed, and when this was
    /// cleared: data in these regions may be lost, and no later flush reports this.
    pub(in crate::backend) fn keep_all(&self) {
        let state = &mut *self.lock();
        state.kept.add(&state.recorded);
        state.resting.0.fill(0);
        state.clearing.0.fill(0);
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
    use proptest::prelude::*;

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

    /// Returns the offset of each page with its bits.
    fn bits(pages: &[BitmapPage]) -> Vec<(u64, Vec<usize>)> {
        let set = |bytes: &[u8]| {
            let bits = (0..bytes.len() * 8).filter(|bit| bytes[bit / 8] & 1 << (bit % 8) != 0);
            bits.collect()
        };
        pages.iter().map(|p| (p.offset, set(&p.bytes))).collect()
    }

    /// Performs the next attempt, which clears no bits.
    fn attempt(log: &IntentLog, result: Result<bool, i32>) -> Vec<(u64, Vec<usize>)> {
        let pages = log.next_attempt().expect("changes are waiting");
        assert_eq!(log.complete_attempt(result), []);
        bits(&pages)
    }

    /// Performs an attempt that only clears bits. Returns the pages with their remaining bits.
    fn clear(log: &IntentLog, result: Result<bool, i32>) -> Vec<(u64, Vec<usize>)> {
        assert_eq!(log.next_attempt(), Some(Vec::new()));
        let pages = log.complete_attempt(result);
        assert_eq!(log.next_attempt(), None);
        bits(&pages)
    }

    /// Records and changes the first byte of a region.
    fn change(log: &IntentLog, region: u64, now: Instant) {
        let bytes = region * REGION..region * REGION + 1;
        if begin(log, bytes.clone(), None) != Begin::Started {
            attempt(log, Ok(true));
            assert_eq!(log.next_attempt(), None);
            assert_eq!(begin(log, bytes.clone(), None), Begin::Started);
        }
        log.end(&bytes, now);
    }

    #[test]
    fn change_waits_until_its_region_is_recorded() {
        let log = IntentLog::new(REGION, &[]);
        assert_eq!(begin(&log, 0..520, None), waiting(1, true));
        assert_eq!(begin(&log, 0..520, Some(1)), waiting(1, false));
        let pages = log.next_attempt().unwrap();
        assert_eq!((pages.len(), pages[0].offset), (1, 4096));
        assert_eq!(pages[0].bytes[..2], [1, 0]);
        // Changes during an attempt share the next attempt.
        assert_eq!(begin(&log, 0..520, None), waiting(2, false));
        assert_eq!(begin(&log, REGION..REGION + 1, None), waiting(2, false));
        log.complete_attempt(Ok(true));
        assert_eq!(begin(&log, 0..520, Some(1)), Begin::Started);
        let last = REGION - 10..REGION + 10;
        assert_eq!(begin(&log, last.clone(), None), waiting(2, false));
        assert_eq!(attempt(&log, Ok(true)), [(4096, vec![0, 1])]);
        assert_eq!(begin(&log, last, Some(2)), Begin::Started);
        assert_eq!(log.next_attempt(), None);
        assert_eq!(begin(&log, 0..1, None), Begin::Started);
        assert_eq!(begin(&log, 2 * REGION..3 * REGION, None), waiting(3, true));
    }

    #[test]
    fn waiting_changes_are_woken_by_their_attempt() {
        let log = IntentLog::new(REGION, &[]);
        let wakers = [(); 2].map(|()| Waker::simulated());
        for (region, waker) in wakers.iter().enumerate() {
            let at = region as u64 * REGION;
            log.begin(&(at..at + 1), None, || waker.clone());
            if region == 0 {
                log.next_attempt().unwrap();
            }
        }
        log.complete_attempt(Ok(true));
        assert!(wakers[0].is_pending() && !wakers[1].is_pending());
        assert_eq!(attempt(&log, Ok(true)), [(4096, vec![0, 1])]);
        assert!(wakers[1].is_pending());
    }

    /// A peer can submit and abort any number of writes during an attempt.
    #[test]
    fn repeated_changes_share_entry_of_thread() {
        let log = IntentLog::new(REGION, &[]);
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
        log.complete_attempt(Ok(true));
        assert_eq!(log.lock().waiting.len(), 2);
        log.next_attempt();
        log.complete_attempt(Ok(true));
        assert!(log.lock().waiting.is_empty() && waker.is_pending());
    }

    #[test]
    fn failed_attempt_fails_its_changes_only() {
        let log = IntentLog::new(REGION, &[]);
        begin(&log, 0..1, None);
        attempt(&log, Err(28));
        // A new change retries, and the failed change does not wait for this attempt.
        assert_eq!(begin(&log, REGION..REGION + 1, None), waiting(2, false));
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Failed(28));
        assert_eq!(attempt(&log, Ok(true)), [(4096, vec![1])]);
        let other = REGION..REGION + 1;
        assert_eq!(begin(&log, other, Some(2)), Begin::Started);
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Failed(28));
    }

    #[test]
    fn regions_are_cleared_after_idle_time() {
        let log = IntentLog::new(REGION, &[]);
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        begin(&log, 0..1, None);
        attempt(&log, Ok(true));
        assert_eq!(begin(&log, 0..1, Some(1)), Begin::Started);
        assert_eq!(log.next_attempt(), None);
        assert!(!log.begin_clear(None), "the change is active");
        log.end(&(0..1), start);
        assert!(!log.begin_clear(Some(start + 4 * second)));
        assert!(log.begin_clear(Some(start + 5 * second)));
        // A change during the flush may not be durable.
        assert_eq!(log.next_attempt(), Some(Vec::new()));
        assert_eq!(begin(&log, 0..1, None), Begin::Started);
        log.end(&(0..1), start);
        assert_eq!(log.complete_attempt(Ok(true)), []);
        assert_eq!(log.next_attempt(), None);
        assert!(log.begin_clear(None));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![])]);
        assert_eq!(begin(&log, 0..1, None), waiting(4, true));
        assert_eq!(attempt(&log, Ok(true)), [(4096, vec![0])]);
    }

    #[test]
    fn failed_flush_clears_no_bits() {
        let log = IntentLog::new(REGION, &[]);
        change(&log, 0, Instant::now());
        for result in [Err(5), Ok(false)] {
            assert!(log.begin_clear(None));
            assert_eq!(clear(&log, result), []);
            assert_eq!(begin(&log, 0..1, None), Begin::Started);
            log.end(&(0..1), Instant::now());
        }
    }

    #[test]
    fn quiet_regions_are_cleared_during_changes() {
        let log = IntentLog::new(REGION, &[]);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        change(&log, 1, start);
        assert!(!log.begin_clear(Some(start)));
        for seconds in 2..60 {
            change(&log, 0, at(seconds));
            assert!(!log.begin_clear(Some(at(seconds))), "{seconds}");
        }
        // It was quiet for a whole period.
        assert!(log.begin_clear(Some(at(60))));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![0])]);
        change(&log, 0, at(61));
        // An active change is never cleared, regardless of its age.
        assert_eq!(begin(&log, 0..1, None), Begin::Started);
        change(&log, 1, at(62));
        assert!(!log.begin_clear(Some(at(90))));
        assert!(log.begin_clear(Some(at(120))));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![0])]);
        log.end(&(0..1), at(121));
        assert!(!log.begin_clear(Some(at(125))));
        assert!(log.begin_clear(Some(at(126))));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![])]);
    }

    #[test]
    fn bits_are_cleared_by_next_attempt() {
        let log = IntentLog::new(REGION, &[]);
        let now = Instant::now();
        change(&log, 0, now);
        let far = 8 * 4096 * REGION;
        // The flush of the current attempt may have started before the last change.
        assert_eq!(begin(&log, far..far + 1, None), waiting(2, true));
        log.next_attempt().unwrap();
        assert!(!log.begin_clear(None), "the thread is active");
        assert_eq!(log.complete_attempt(Ok(true)), []);
        // The next attempt records another region in the same page.
        assert_eq!(begin(&log, REGION..REGION + 1, None), waiting(3, false));
        assert_eq!(bits(&log.next_attempt().unwrap()), [(4096, vec![0, 1])]);
        let pages = log.complete_attempt(Ok(true));
        assert_eq!(bits(&pages), [(4096, vec![1])]);
        assert_eq!(log.next_attempt(), None);
        assert_eq!(begin(&log, 0..1, None), waiting(4, true));
    }

    #[test]
    fn unrecovered_region_keeps_its_bit() {
        let log = IntentLog::new(REGION, &[0b100]);
        change(&log, 2, Instant::now());
        assert!(!log.begin_clear(None), "the bit must not be cleared");
        begin(&log, 0..1, None);
        assert_eq!(attempt(&log, Ok(true)), [(4096, vec![0, 2])]);
        assert_eq!(log.next_attempt(), None);
        assert!(log.begin_clear(None));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![2])]);
    }

    #[test]
    fn kept_bits_remain_after_successful_flush() {
        let log = IntentLog::new(REGION, &[]);
        change(&log, 0, Instant::now());
        change(&log, 1, Instant::now());
        assert!(log.begin_clear(None));
        // An attempt may have started before the failure.
        assert_eq!(log.next_attempt(), Some(Vec::new()));
        log.keep_all();
        assert_eq!(log.complete_attempt(Ok(true)), []);
        assert_eq!(log.next_attempt(), None);
        assert!(!log.begin_clear(None), "all bits are kept");
        change(&log, 2, Instant::now());
        assert!(log.begin_clear(None));
        assert_eq!(clear(&log, Ok(true)), [(4096, vec![0, 1])]);
    }

    #[test]
    fn bits_are_reused_beyond_bitmap() {
        let log = IntentLog::new(4096, &[]);
        let bits = |range: Range<u64>| log.bits(&range).collect::<Vec<_>>();
        assert_eq!(bits(4095..4097), [0, 1]);
        assert!(bits(4096..4096).is_empty());
        let end = 491_520 * 4096;
        assert_eq!(bits(end - 1..end + 1), [491_519, 0]);
        assert_eq!(bits(0..3 * end).len(), 491_520);
    }

    /// Pairs of bits in two sectors of the first page, and in another page.
    const BITS_OF_MODEL: [u64; 6] = [0, 1, 5000, 5001, 40_000, 40_001];

    #[derive(Clone, Debug)]
    enum Action {
        /// Start or retry a change of the region with this bit, and of the next region if it is set.
        Begin(u64, bool),
        /// Complete the oldest change.
        End,
        /// Continue the thread.
        Thread,
        Rest,
        /// Clear the failure of a flush.
        ClearFailure,
    }

    /// Position of the thread.
    enum Step {
        Idle,
        Write(Vec<BitmapPage>),
        Flush,
        Clear(Vec<BitmapPage>),
    }

    /// Bits that may be lost in a power failure, and changes that may be torn.
    struct Model {
        log: IntentLog,
        /// Versions of each bit, starting with its value at the last flush.
        versions: std::collections::HashMap<u64, Vec<bool>>,
        active: std::collections::VecDeque<Range<u64>>,
        /// Completed changes that are not durable.
        cached: Vec<Range<u64>>,
        /// Completed changes that may be lost. No flush makes them durable.
        lost: Vec<Range<u64>>,
        step: Step,
        /// Changes covered by the current flush.
        covered: usize,
        has_failed: bool,
        now: Instant,
    }

    impl Model {
        fn write(&mut self, pages: &[BitmapPage]) {
            for page in pages {
                for bit in BITS_OF_MODEL {
                    let byte = bit / 8 + PAGE as u64;
                    if byte / PAGE as u64 * PAGE as u64 == page.offset {
                        let is_set = page.bytes[byte as usize % PAGE] & 1 << (bit % 8) != 0;
                        self.versions.entry(bit).or_insert(vec![false]).push(is_set);
                    }
                }
            }
        }

        /// Continues the thread. `is_failed` fails a flush.
        fn continue_thread(&mut self, is_failed: bool) {
            self.step = match std::mem::replace(&mut self.step, Step::Idle) {
                Step::Idle => match self.log.next_attempt() {
                    Some(pages) => Step::Write(pages),
                    None => Step::Idle,
                },
                Step::Write(pages) => {
                    self.write(&pages);
                    self.covered = self.cached.len();
                    Step::Flush
                }
                Step::Flush if is_failed => {
                    self.has_failed = true;
                    self.log.keep_all();
                    Step::Clear(self.log.complete_attempt(Err(5)))
                }
                Step::Flush => {
                    for versions in self.versions.values_mut() {
                        versions.drain(..versions.len() - 1);
                    }
                    // After a failure, it is unknown which data is durable.
                    if !self.has_failed {
                        self.cached.drain(..self.covered);
                    }
                    Step::Clear(self.log.complete_attempt(Ok(!self.has_failed)))
                }
                Step::Clear(pages) => {
                    self.write(&pages);
                    Step::Idle
                }
            };
        }

        fn clear_failure(&mut self) {
            if std::mem::take(&mut self.has_failed) {
                self.log.keep_all();
                self.lost.append(&mut self.cached);
                self.covered = 0;
            }
        }

        fn check(&self) {
            for bytes in self.active.iter().chain(&self.cached).chain(&self.lost) {
                for bit in self.log.bits(bytes) {
                    let versions = &self.versions[&bit];
                    assert!(versions.iter().all(|is_set| *is_set), "{bit}: {versions:?}");
                }
            }
        }
    }

    fn actions() -> impl Strategy<Value = Vec<(Action, bool)>> {
        let action = prop_oneof![
            2 => (0..3_usize, any::<bool>())
                .prop_map(|(pair, crosses)| Action::Begin(BITS_OF_MODEL[2 * pair], crosses)),
            2 => Just(Action::End),
            4 => Just(Action::Thread),
            1 => Just(Action::Rest),
            1 => Just(Action::ClearFailure),
        ];
        prop::collection::vec((action, prop::bool::weighted(0.03)), 1..100)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn torn_frames_are_always_recorded(actions in actions()) {
            let mut model = Model {
                log: IntentLog::new(REGION, &[]),
                versions: std::collections::HashMap::new(),
                active: std::collections::VecDeque::new(),
                cached: Vec::new(),
                lost: Vec::new(),
                step: Step::Idle,
                covered: 0,
                has_failed: false,
                now: Instant::now(),
            };
            for (action, is_failed) in actions {
                match action {
                    Action::Begin(bit, crosses_border) => {
                        let end = (bit + 1) * REGION;
                        let bytes = end - 10..end + u64::from(crosses_border);
                        if begin(&model.log, bytes.clone(), None) == Begin::Started {
                            model.active.push_back(bytes);
                        }
                    }
                    Action::End => {
                        if let Some(bytes) = model.active.pop_front() {
                            model.log.end(&bytes, model.now);
                            model.cached.push(bytes);
                        }
                    }
                    Action::Thread => model.continue_thread(is_failed),
                    Action::ClearFailure => model.clear_failure(),
                    Action::Rest => {
                        model.now += Duration::from_secs(20);
                        model.log.begin_clear((!is_failed).then_some(model.now));
                    }
                }
                model.check();
            }
        }
    }
}
