//! The flush protocol of a file, without I/O.
//!
//! Linux reports a write-back error once per open file description and then considers the pages
//! clean, so the next `fdatasync` succeeds even though the data was lost. These values ensure that
//! a flush never succeeds in this case:
//!
//! - [`FlushQueue`]: executes one flush at a time, so that two flushes cannot compete for an error.
//!   A flush serves all requests that joined before it was started. Requests that join later wait
//!   for the next one, because the kernel may already have skipped their pages.
//! - [`FlushRecord`]: remembers a failure. Every subsequent flush will fail until it is cleared.
//! - [`FlushDescriptor`]: the descriptor provided for flushes. A durable write syncs the descriptor
//!   for writes, and its error may be the only report of data lost by other writes (a *deferred
//!   error*). A flush with a separate descriptor will receive this error as well, unless the
//!   descriptor was opened after the error. The error must be recorded if this happens while it is
//!   [checked](FlushChecks).
//!
//! ```text
//! flush:          join ─→ due ─→ start ─→ fdatasync ─→ complete ─→ record: failed or successful
//! durable write:  error ─→ may the descriptor report it again? ─ yes ─→ join (as above)
//!                                                              └ no ──→ record: failed
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};

use riser_state::{State, become_state};

/// State of a flush queue.
///
/// ```text
///          join                start
///  Idle ─────────→ Queued ─────────────→ Running
///   ↑ ↑              │ ↑                   │ │
///   │ └── removed ───┘ └── completed, ─────┘ │
///   │                      requests waiting  │
///   └────────── completed, none waiting ─────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushState {
    /// There are no requests.
    Idle,
    /// Requests are waiting for a flush to be started.
    Queued,
    /// A flush is in flight. Other requests may be waiting for the next one.
    Running,
}

impl State for FlushState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Idle => matches!(next, Self::Queued),
            Self::Queued => matches!(next, Self::Idle | Self::Running),
            Self::Running => matches!(next, Self::Idle | Self::Queued),
        }
    }
}

/// Requests waiting for a flush, and the flush in flight. The owner must ensure that the number of
/// requests is bounded.
#[derive(Debug)]
pub struct FlushQueue<T> {
    state: FlushState,
    /// Requests served by the current flush.
    running: Vec<T>,
    /// Requests served by the next flush.
    waiting: Vec<T>,
}

impl<T> Default for FlushQueue<T> {
    fn default() -> Self {
        Self {
            state: FlushState::Idle,
            running: Vec::new(),
            waiting: Vec::new(),
        }
    }
}

impl<T> FlushQueue<T> {
    /// Adds a request, which will be served by the next flush.
    pub fn join(&mut self, request: T) {
        self.waiting.push(request);
        if self.state == FlushState::Idle {
            become_state(&mut self.state, FlushState::Queued);
        }
    }

    /// Returns the first request of the next flush, if it should be started now.
    #[must_use]
    pub fn due(&self) -> Option<&T> {
        match self.state {
            FlushState::Queued => self.waiting.first(),
            FlushState::Idle | FlushState::Running => None,
        }
    }

    /// Called when a flush was started. It serves all waiting requests.
    ///
    /// # Panics
    /// Panics if no flush is [due](Self::due).
    pub fn start(&mut self) {
        become_state(&mut self.state, FlushState::Running);
        std::mem::swap(&mut self.running, &mut self.waiting);
    }

    /// Called when the current flush has completed. Returns the requests served by it.
    ///
    /// # Panics
    /// Panics if no flush is in flight.
    pub fn complete(&mut self) -> Vec<T> {
        let next = match self.waiting.is_empty() {
            true => FlushState::Idle,
            false => FlushState::Queued,
        };
        become_state(&mut self.state, next);
        std::mem::take(&mut self.running)
    }

    /// Reuses the memory of a list returned by [`FlushQueue::complete`], unless the next flush was
    /// already started.
    pub fn recycle(&mut self, mut served: Vec<T>) {
        served.clear();
        if self.running.is_empty() {
            self.running = served;
        }
    }

    /// Removes all requests that are waiting for the next flush, because it cannot be started.
    pub fn take_waiting(&mut self) -> Vec<T> {
        if self.state == FlushState::Queued {
            become_state(&mut self.state, FlushState::Idle);
        }
        std::mem::take(&mut self.waiting)
    }

    /// Removes all requests, because we will not receive the result of the current flush.
    pub fn clear(&mut self) -> Vec<T> {
        if self.state != FlushState::Idle {
            become_state(&mut self.state, FlushState::Idle);
        }
        self.running.append(&mut self.waiting);
        std::mem::take(&mut self.running)
    }

    /// Returns true if a flush is in flight.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state == FlushState::Running
    }
}

impl<T: PartialEq> FlushQueue<T> {
    /// Removes a request that is waiting for the next flush. Returns false if it is not: a request
    /// that is served by the current flush cannot be removed.
    pub fn remove(&mut self, request: &T) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting != request);
        if self.waiting.is_empty() && self.state == FlushState::Queued {
            become_state(&mut self.state, FlushState::Idle);
        }
        self.waiting.len() < before
    }
}

/// The first failed flush of a file, until it is cleared.
#[derive(Clone, Debug)]
pub struct FlushRecord<E> {
    failure: Option<E>,
    clears: u64,
}

impl<E> Default for FlushRecord<E> {
    fn default() -> Self {
        Self {
            failure: None,
            clears: 0,
        }
    }
}

impl<E> FlushRecord<E> {
    /// Records a failure. Returns false if there already is one. We keep the initial one, because
    /// it is the cause of subsequent failures.
    pub fn record(&mut self, failure: E) -> bool {
        let is_first = self.failure.is_none();
        self.failure.get_or_insert(failure);
        is_first
    }

    /// Returns the failure that was not cleared, if any. Every flush must fail with it, even if the
    /// kernel reports success.
    #[must_use]
    pub fn failure(&self) -> Option<&E> {
        self.failure.as_ref()
    }

    /// Clears the failure, so that flushes can succeed again.
    pub fn clear(&mut self) -> Option<E> {
        let cleared = self.failure.take();
        self.clears += u64::from(cleared.is_some());
        cleared
    }

    /// Returns the number of failures that were cleared. After each of them, we need to create a
    /// different descriptor for flushes: see [`FlushDescriptor::is_outdated`].
    #[must_use]
    pub fn clears(&self) -> u64 {
        self.clears
    }
}

/// Deferred errors of an open file that are not known to be reported again yet.
#[derive(Debug, Default)]
pub struct FlushChecks {
    active: AtomicUsize,
}

impl FlushChecks {
    /// Called when a durable write has failed, and the next flush will [report its error
    /// again](FlushDescriptor::reports_again).
    pub fn start_check(&self) {
        self.active.fetch_add(1, Ordering::AcqRel);
    }

    /// Called when this flush has completed and its result was recorded.
    pub fn finish_check(&self) {
        self.active.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns whether an error is being checked. A descriptor opened before this call may not
    /// report it, so a failure must be recorded.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire) > 0
    }
}

/// Descriptor used for flushes, or `None` for a medium that is not a file.
#[derive(Debug)]
pub struct FlushDescriptor<H> {
    handle: Option<H>,
    /// This is the descriptor for writes, because a different one was not available.
    is_shared: bool,
    /// Number of cleared failures when it was opened.
    clears: u64,
    /// Number of times that it was replaced.
    renewals: u32,
}

impl<H> FlushDescriptor<H> {
    /// Creates the state for a descriptor, which was opened after `clears` was read from the
    /// [record](FlushRecord::clears). If we did this in reverse order, the count might be newer
    /// than the descriptor, which may still report an old error.
    #[must_use]
    pub fn new(handle: Option<H>, is_shared: bool, clears: u64) -> Self {
        Self {
            handle,
            is_shared,
            clears,
            renewals: 0,
        }
    }

    /// Returns the descriptor.
    #[must_use]
    pub fn handle(&self) -> Option<&H> {
        self.handle.as_ref()
    }

    /// Returns the descriptor, to be closed.
    #[must_use]
    pub fn into_handle(self) -> Option<H> {
        self.handle
    }

    /// Returns the number of times that the descriptor was replaced.
    #[must_use]
    pub fn renewals(&self) -> u32 {
        self.renewals
    }

    /// Returns true if we need to open a different descriptor before a flush or durable write.
    /// After a failure was cleared, the old descriptor may still report an error that we have
    /// already handled.
    #[must_use]
    pub fn is_outdated(&self, clears: u64) -> bool {
        self.is_shared || self.clears != clears
    }

    /// Replaces the descriptor. This has no effect if the new descriptor is the one for writes and
    /// there was no other reason. Returns the previous descriptor, to be closed, unless it is the
    /// one for writes.
    pub fn renew(&mut self, handle: Option<H>, is_shared: bool, clears: u64) -> Option<H> {
        if self.clears == clears && is_shared {
            return None;
        }
        self.clears = clears;
        self.renewals = self.renewals.wrapping_add(1);
        let previous = std::mem::replace(&mut self.handle, handle);
        let was_shared = std::mem::replace(&mut self.is_shared, is_shared);
        previous.filter(|_| !was_shared)
    }

    /// Returns true if the next flush will report the error of a durable write again, given the
    /// number of [renewals](Self::renewals) when the write was submitted. Otherwise the error must
    /// be recorded as a failed flush. An [outdated](Self::is_outdated) descriptor reports nothing,
    /// because it will be replaced before the flush.
    #[must_use]
    pub fn reports_again(&self, renewals: u32, clears: u64) -> bool {
        !self.is_outdated(clears) && self.renewals == renewals
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_state::testing::{assert_all_taken, table};

    use super::*;

    const STATES: [FlushState; 3] = [FlushState::Idle, FlushState::Queued, FlushState::Running];

    #[test]
    fn transition_table_matches_diagram() {
        let expected = "Idle: Queued\n\
                        Queued: Idle Running\n\
                        Running: Idle Queued\n";
        assert_eq!(table(&STATES), expected);
    }

    #[test]
    fn transition_coverage_is_complete() {
        assert_all_taken(&STATES, || {
            let mut queue = FlushQueue::default();
            queue.join(1);
            assert!(queue.remove(&1));
            queue.join(2);
            queue.start();
            queue.join(3);
            assert_eq!(queue.complete(), [2]);
            queue.start();
            assert_eq!(queue.complete(), [3]);
            assert_eq!(queue.due(), None);
        });
    }

    #[test]
    fn late_requests_wait_for_next_flush() {
        let mut queue = FlushQueue::default();
        assert_eq!(queue.due(), None);
        queue.join(1);
        queue.join(2);
        assert_eq!(queue.due(), Some(&1));
        queue.start();
        queue.join(3);
        assert_eq!(queue.due(), None, "one flush at a time");
        assert!(!queue.remove(&1), "it is served by the current flush");
        assert_eq!(queue.complete(), [1, 2]);
        assert_eq!(queue.due(), Some(&3));
        assert_eq!(queue.take_waiting(), [3]);
        assert_eq!(queue.due(), None);
    }

    #[test]
    fn removed_request_starts_no_flush() {
        let mut queue = FlushQueue::default();
        queue.join(1);
        queue.join(2);
        assert!(queue.remove(&1) && !queue.remove(&1));
        assert_eq!(queue.due(), Some(&2));
        assert!(queue.remove(&2));
        assert_eq!(queue.due(), None);
    }

    #[test]
    fn clear_removes_all_requests() {
        let mut queue = FlushQueue::default();
        queue.join(1);
        queue.start();
        queue.join(2);
        assert_eq!(queue.clear(), [1, 2]);
        assert!(!queue.is_running() && queue.due().is_none());
        assert!(queue.clear().is_empty());
    }

    #[test]
    fn served_list_is_reused() {
        let mut queue = FlushQueue::default();
        queue.join(1);
        queue.start();
        let served = queue.complete();
        let memory = served.as_ptr();
        queue.recycle(served);
        queue.join(2);
        queue.start();
        queue.join(3);
        assert_eq!(queue.waiting.as_ptr(), memory);
        // We must not replace the list while a flush is active.
        queue.recycle(vec![4]);
        assert_eq!(queue.complete(), [2]);
    }

    #[test]
    fn first_failure_is_kept_until_cleared() {
        let mut record = FlushRecord::default();
        assert!(record.record("first") && !record.record("second"));
        assert_eq!(record.failure(), Some(&"first"));
        assert_eq!((record.clear(), record.clears()), (Some("first"), 1));
        assert_eq!((record.clear(), record.clears()), (None, 1));
        assert_eq!(record.failure(), None);
    }

    #[test]
    fn descriptor_is_renewed_after_clear() {
        let mut own = FlushDescriptor::new(Some("own"), false, 0);
        assert!(!own.is_outdated(0) && own.reports_again(0, 0));
        assert!(own.is_outdated(1));
        assert!(
            !own.reports_again(0, 1),
            "it is replaced before the next flush"
        );
        assert_eq!(own.renew(Some("new"), false, 1), Some("own"));
        assert!(!own.is_outdated(1));
        assert_eq!(own.handle(), Some(&"new"));
        assert!(!own.reports_again(0, 1), "the write preceded the renewal");
        assert!(own.reports_again(own.renewals(), 1));
        // A different descriptor is not available.
        assert_eq!(own.renew(Some("writes"), true, 2), Some("new"));
        assert!(own.is_outdated(2) && !own.reports_again(own.renewals(), 2));
        let renewals = own.renewals();
        assert_eq!(own.renew(Some("writes"), true, 2), None);
        assert_eq!(own.renewals(), renewals);
        assert_eq!(own.renew(Some("again"), false, 2), None);
        assert!(own.reports_again(own.renewals(), 2));
    }

    /// A file with the error reporting of Linux: an error is reported once to each open descriptor,
    /// and also to a descriptor opened later unless another one has already received it.
    #[derive(Default)]
    struct File {
        /// Number of write-back errors.
        errors: u64,
        /// Number of errors that were reported to any descriptor.
        reported: u64,
        /// Number of errors that each descriptor has reported.
        seen: Vec<u64>,
    }

    impl File {
        fn open(&mut self) -> usize {
            self.seen.push(self.reported);
            self.seen.len() - 1
        }

        fn sync(&mut self, descriptor: usize) -> Result<(), ()> {
            self.reported = self.errors;
            match std::mem::replace(&mut self.seen[descriptor], self.errors) == self.errors {
                true => Ok(()),
                false => Err(()),
            }
        }
    }

    /// A request for a flush, or a durable write that has failed.
    #[derive(Debug)]
    struct Request {
        /// Set if data acknowledged before the request was lost, and the loss was not cleared.
        must_fail: bool,
        is_write: bool,
        /// The write has failed, and other descriptors may not report its error.
        is_check: bool,
    }

    struct Worker {
        queue: FlushQueue<Request>,
        descriptor: FlushDescriptor<usize>,
        writes: usize,
        /// A durable write in flight: the renewals at its start, and its result so far.
        write: Option<(u32, Result<(), ()>)>,
    }

    /// A file used by two workers, as in the target. A worker will always process completions in
    /// order, and the error of a durable write is processed before another worker opens a
    /// descriptor.
    struct Model {
        file: File,
        record: FlushRecord<()>,
        checks: FlushChecks,
        workers: [Worker; 2],
        /// Acknowledged data was lost since the last clear.
        is_lost: bool,
    }

    impl Worker {
        /// Returns true if a durable write has failed, and this was not processed yet.
        fn has_failed_write(&self) -> bool {
            matches!(self.write, Some((_, Err(()))))
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        LoseData,
        Join,
        Start,
        Complete,
        SubmitWrite,
        SyncWrite,
        CompleteWrite,
        Clear,
    }

    impl Model {
        fn new(is_shared: bool) -> Self {
            let mut file = File::default();
            let workers = [(); 2].map(|()| {
                let writes = file.open();
                let handle = if is_shared { writes } else { file.open() };
                Worker {
                    queue: FlushQueue::default(),
                    descriptor: FlushDescriptor::new(Some(handle), is_shared, 0),
                    writes,
                    write: None,
                }
            });
            Self {
                file,
                record: FlushRecord::default(),
                checks: FlushChecks::default(),
                workers,
                is_lost: false,
            }
        }

        /// Creates a file with separate descriptors, and lets the first worker record a failure.
        fn with_failure() -> Self {
            let mut model = Self::new(false);
            for step in [Step::LoseData, Step::Join, Step::Start, Step::Complete] {
                model.step(0, step, true);
            }
            model
        }

        /// Opens another descriptor if required. Returns false if this is not possible now.
        fn renew(&mut self, worker: usize, can_open: bool) -> bool {
            let clears = self.record.clears();
            if !self.workers[worker].descriptor.is_outdated(clears) {
                return true;
            }
            if self.workers[1 - worker].has_failed_write() {
                return false;
            }
            let worker = &mut self.workers[worker];
            let handle = match can_open {
                true => self.file.open(),
                false => worker.writes,
            };
            let _ = worker.descriptor.renew(Some(handle), !can_open, clears);
            if self.checks.is_active() {
                self.record.record(());
            }
            true
        }

        fn join(&mut self, worker: usize, is_write: bool, is_check: bool) {
            let must_fail = self.is_lost;
            self.workers[worker].queue.join(Request {
                must_fail,
                is_write,
                is_check,
            });
        }

        fn step(&mut self, worker: usize, step: Step, can_open: bool) {
            match step {
                Step::LoseData => {
                    self.file.errors += 1;
                    self.is_lost = true;
                }
                Step::Join if self.record.failure().is_none() => self.join(worker, false, false),
                Step::Join => {}
                Step::Start => {
                    let is_due = self.workers[worker].queue.due().is_some();
                    if is_due && self.renew(worker, can_open) {
                        self.workers[worker].queue.start();
                    }
                }
                Step::Complete => {
                    if !self.workers[worker].queue.is_running() {
                        return;
                    }
                    if self.workers[worker].has_failed_write() {
                        self.step(worker, Step::CompleteWrite, can_open);
                    }
                    let worker = &mut self.workers[worker];
                    let handle = *worker.descriptor.handle().unwrap();
                    if self.file.sync(handle).is_err() {
                        self.record.record(());
                    }
                    let served = worker.queue.complete();
                    for request in &served {
                        let succeeds = !request.is_write && self.record.failure().is_none();
                        assert!(!(succeeds && request.must_fail), "lost data was flushed");
                        if request.is_check {
                            self.checks.finish_check();
                        }
                    }
                    worker.queue.recycle(served);
                }
                Step::SubmitWrite => {
                    if self.workers[worker].write.is_none() && self.renew(worker, can_open) {
                        let renewals = self.workers[worker].descriptor.renewals();
                        self.workers[worker].write = Some((renewals, Ok(())));
                    }
                }
                Step::SyncWrite => {
                    let worker = &mut self.workers[worker];
                    if let Some((_, result)) = &mut worker.write {
                        *result = result.and(self.file.sync(worker.writes));
                    }
                }
                Step::CompleteWrite => {
                    let Some((renewals, result)) = self.workers[worker].write.take() else {
                        return;
                    };
                    // An error is not suspect if a failure was already recorded.
                    if result.is_err() && self.record.failure().is_none() {
                        let is_check = self.workers[worker]
                            .descriptor
                            .reports_again(renewals, self.record.clears());
                        if is_check {
                            self.checks.start_check();
                        } else {
                            self.record.record(());
                        }
                        self.join(worker, true, is_check);
                    }
                }
                // An administrator will first handle the loss, and then clear the failure.
                Step::Clear => {
                    let is_unreported = self.file.errors > self.file.reported;
                    if self.record.clear().is_some() && !is_unreported {
                        self.is_lost = false;
                        for worker in &mut self.workers {
                            let requests = worker.queue.running.iter_mut();
                            let requests = requests.chain(&mut worker.queue.waiting);
                            requests.for_each(|request| request.must_fail = false);
                        }
                    }
                }
            }
        }
    }

    fn steps() -> impl Strategy<Value = Vec<(usize, Step, bool)>> {
        let step = prop_oneof![
            1 => Just(Step::LoseData),
            4 => Just(Step::Join),
            4 => Just(Step::Start),
            4 => Just(Step::Complete),
            2 => Just(Step::SubmitWrite),
            2 => Just(Step::SyncWrite),
            2 => Just(Step::CompleteWrite),
            1 => Just(Step::Clear),
        ];
        prop::collection::vec((0..2_usize, step, prop::bool::weighted(0.8)), 0..60)
    }

    #[test]
    fn durable_write_error_after_clear_is_recorded() {
        let mut model = Model::with_failure();
        let mut step = |worker, step| model.step(worker, step, true);
        step(1, Step::SubmitWrite);
        step(0, Step::LoseData);
        step(0, Step::Clear);
        step(1, Step::SyncWrite);
        step(1, Step::CompleteWrite);
        assert_eq!(model.record.failure(), Some(&()));
        // The model checks the result.
        model.step(1, Step::Start, true);
        model.step(1, Step::Complete, true);
    }

    #[test]
    fn renewal_during_error_check_is_recorded() {
        let mut model = Model::with_failure();
        let mut step = |worker, step| model.step(worker, step, true);
        step(0, Step::Clear);
        step(1, Step::SubmitWrite);
        step(1, Step::LoseData);
        step(1, Step::SyncWrite);
        step(1, Step::CompleteWrite);
        step(0, Step::Join);
        step(0, Step::Start);
        assert_eq!(model.record.failure(), Some(&()));
        model.step(0, Step::Complete, true);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Verify that no flush succeeds after acknowledged data was lost, until the loss is
        /// cleared.
        #[test]
        fn lost_data_fails_next_flush(is_shared in any::<bool>(), steps in steps()) {
            let mut model = Model::new(is_shared);
            for (worker, step, can_open) in steps {
                model.step(worker, step, can_open);
            }
        }
    }
}
