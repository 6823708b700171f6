//! [`Driver`]: executes the operations of a thread.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use riser_block::{Command, CommandKind, FlushDescriptor, FlushQueue};
use riser_memory::{MemSlice, Memory};
use riser_reactor::{
    Completion, Durability, Fallocate, Handle, Offload, Ring, SubmitError, SyncKind, Token, Waker,
};
use slab::Slab;

use super::plan::{self, Lacks, Stage};
use super::request::{
    Bounce, DriverConfig, Intent, MAX_OPERATION, Outcome, Request, RequestState, StoreId,
    cut_transfer, fill_window, uncut,
};
use super::requests::Requests;
use super::storage::{Failure, Fault, Storage};
use super::sys;
use super::turns::Turn;

/// The driver has reached its maximum number of requests in total or for this store. The request
/// was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request queue of the backend driver is full")]
pub struct DriverFull;

/// A completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done<R> {
    /// Identifier provided by the caller.
    pub user: u64,
    /// Result for the user.
    pub result: R,
}

/// Result of a call on the helper thread.
type Called<S> = Result<<S as Storage>::Extents, <S as Storage>::Error>;

struct Attached<S: Storage> {
    storage: S,
    handle: Option<Handle>,
    sync: FlushDescriptor<Handle>,
    /// The reason why no other descriptor for flushes could be opened.
    sync_errno: Option<i32>,
    /// Descriptor of the current flush, if it was replaced.
    replaced: Option<Handle>,
    /// Requests waiting for a flush. The first request of a flush determines its token.
    flushes: FlushQueue<usize>,
    lacks: Lacks,
    requests: usize,
    /// A separate bounce buffer, because a hanging store may be using all shared ones.
    bounce: OwnBounce,
    /// Helper thread for blocking calls, if it was required before. These calls may never return if
    /// the store is hanging.
    helper: Option<Offload<Called<S>>>,
}

/// Separate bounce buffer of a store.
enum OwnBounce {
    /// Not allocated yet.
    None,
    Idle(MemSlice),
    InUse,
}

/// Executes operations of attached stores using the ring of the calling thread, and returns the
/// results.
///
/// Every accepted request results in exactly one [`Done`]. In its loop, the thread must call
/// [`begin_round`](Driver::begin_round) with the current time, [`submit`](Driver::submit) for new
/// requests, [`handle_completion`](Driver::handle_completion) for every completion with the
/// driver's tag, and then [`poll_done`](Driver::poll_done) until it returns `None`.
pub struct Driver<S: Storage> {
    config: DriverConfig,
    /// Wakes the thread when a request can continue.
    waker: Waker,
    stores: Slab<Attached<S>>,
    requests: Requests<S::Error>,
    /// Limited to `depth`.
    done: VecDeque<Done<S::Result>>,
    /// The ring was full when submitting a flush.
    flush_stalled: bool,
    /// Shared bounce buffers.
    idle_bounces: Vec<MemSlice>,
    zeroes: MemSlice,
    /// Stores with a helper thread.
    helped: Vec<usize>,
    /// Start time of the current round.
    now: Instant,
    /// Remaining number of bytes to transfer synchronously in this round.
    at_once: u64,
}

impl OwnBounce {
    /// Allocates a bounce buffer: either a shared one, or this one.
    fn take_or(&mut self, shared: &mut Vec<MemSlice>, bytes: usize) -> Option<Bounce> {
        if let Some(memory) = shared.pop() {
            let is_shared = true;
            return Some(Bounce { memory, is_shared });
        }
        // Use this only if all shared buffers are in use. It ensures that a store can always
        // continue, regardless of how long requests of other stores use the shared buffers.
        let memory = match std::mem::replace(self, Self::InUse) {
            Self::Idle(memory) => Some(memory),
            Self::InUse => return None,
            Self::None => Memory::new(bytes).ok().map(|memory| memory.whole()),
        };
        if memory.is_none() {
            // Try again later.
            *self = Self::None;
        }
        let is_shared = false;
        memory.map(|memory| Bounce { memory, is_shared })
    }
}

impl<S: Storage> std::fmt::Debug for Driver<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("stores", &self.stores.len())
            .field("requests", &self.requests.len())
            .finish_non_exhaustive()
    }
}

/// Descriptor for flushes that was opened, or is the same as for writes.
struct OpenedSync {
    handle: Option<Handle>,
    is_shared: bool,
    /// The reason why it could not be opened, for example because `/proc` is not available or the
    /// process has reached its limit.
    errno: Option<i32>,
}

/// Opens a descriptor for flushes, unless the file system requires the descriptor for writes.
fn open_sync<S: Storage>(storage: &mut S, now: Instant) -> OpenedSync {
    let Some(file) = storage.file() else {
        return OpenedSync {
            handle: None,
            is_shared: false,
            errno: None,
        };
    };
    let shared = |errno| OpenedSync {
        handle: Some(file.handle.clone()),
        is_shared: true,
        errno,
    };
    let opened = match storage.keeps_write_errors() {
        true => shared(None),
        false => match file.reopen() {
            Ok(own) => OpenedSync {
                handle: Some(own),
                is_shared: false,
                errno: None,
            },
            Err(error) => shared(error.raw_os_error().or(Some(libc::EMFILE))),
        },
    };
    // If another thread is checking an error, the kernel may not report it to this descriptor, so
    // treat it as lost data.
    if file.flush_checks.is_active() {
        storage.on_flush_failed(libc::EIO, now);
    }
    opened
}

/// Size of a buffer with zeroes, for media that do not support zeroing.
const ZEROES: usize = 64 << 10;

/// Maximum number of bytes to read or write synchronously in a round, on files in memory. The
/// thread cannot serve other clients during this time.
const AT_ONCE: u64 = 1 << 20;

/// Maximum length of a synchronous read or write in bytes.
const LONGEST_AT_ONCE: u64 = 128 << 10;

/// Only their requests are put into the ring, and use it.
const ONLY_FILES: &str = "only files reach the ring";

/// Returns the maximum number of bytes to fill with zeroes in a single ring operation. Reads can be
/// executed between these operations, so each consists of whole blocks.
fn fill_piece(config: &DriverConfig, block_size: u32) -> u64 {
    let most = (ZEROES * config.pieces.min(16)).min(MAX_OPERATION) as u64;
    most - most % u64::from(block_size)
}

impl<S: Storage> Driver<S> {
    /// Creates a driver for the thread that owns the ring. `waker` wakes this thread.
    ///
    /// # Errors
    /// Fails if bounce memory cannot be mapped.
    ///
    /// # Panics
    /// Panics if a configured size is zero or not a multiple as specified.
    pub fn new(
        waker: Waker,
        ring: &mut Ring,
        now: Instant,
        mut config: DriverConfig,
    ) -> io::Result<Self> {
        // The ring would reject a longer list, which is handled like a failure of the ring below.
        config.pieces = config.pieces.min(ring.max_slices());
        assert!(config.depth > 0 && config.pieces > 0 && config.bounces > 0);
        assert!(config.bounce > 0 && config.bounce.is_multiple_of(4096));
        let bounce_memory = Memory::new(config.bounce * config.bounces)?;
        let zeroes = Memory::new(ZEROES)?;
        // Operations are only slower if this isn't registered.
        let _ = ring.register_memory(&bounce_memory);
        let _ = ring.register_memory(&zeroes);
        Ok(Self {
            config,
            waker,
            stores: Slab::new(),
            requests: Requests::new(config.depth),
            done: VecDeque::with_capacity(config.depth),
            flush_stalled: false,
            idle_bounces: (0..config.bounces)
                .filter_map(|n| bounce_memory.slice(n * config.bounce..(n + 1) * config.bounce))
                .collect(),
            zeroes: zeroes.whole(),
            helped: Vec::new(),
            now,
            at_once: AT_ONCE,
        })
    }

    /// Sets the start time of a round, to be used until the next call.
    pub fn begin_round(&mut self, now: Instant) {
        self.now = now;
        self.at_once = AT_ONCE;
    }

    /// Attaches a store, and registers its file with the ring if possible.
    pub fn attach(&mut self, ring: &mut Ring, store: impl Into<S>) -> StoreId {
        let mut storage = store.into();
        let handle = storage.file().map(|file| &file.handle);
        let handle = handle.map(|file| ring.register_file(file).unwrap_or_else(|_| file.clone()));
        // Read this before opening the descriptor. If a failure is cleared in between, the next
        // flush opens a descriptor unnecessarily.
        let clears = storage.flush_clears();
        let opened = open_sync(&mut storage, self.now);
        let device = storage.file().and_then(|file| file.device.as_ref());
        let is_refused = device.is_some_and(|device| !device.can_zero);
        StoreId(self.stores.insert(Attached {
            handle,
            sync: FlushDescriptor::new(opened.handle, opened.is_shared, clears),
            sync_errno: opened.errno,
            replaced: None,
            flushes: FlushQueue::default(),
            lacks: Lacks {
                punch: is_refused,
                zero: is_refused,
            },
            requests: 0,
            bounce: OwnBounce::None,
            helper: None,
            storage,
        }))
    }

    /// Detaches a store without requests, and [releases](Storage::release) it. Returns false if it
    /// still has requests.
    ///
    /// # Panics
    /// Panics if the store is not attached.
    pub fn detach(&mut self, ring: &mut Ring, id: StoreId) -> bool {
        if self.stores[id.0].requests > 0 {
            return false;
        }
        let attached = self.stores.remove(id.0);
        // Its number can be reused after this, so results would be polled from a missing store, or
        // from another one.
        self.helped.retain(|store| *store != id.0);
        // If the ring had the last reference to the file, this thread would close it.
        drop(attached.handle);
        ring.remove_unused_files();
        attached.storage.release(attached.sync.into_handle());
        true
    }

    /// Returns an attached store.
    ///
    /// # Panics
    /// Panics if the store is not attached.
    #[must_use]
    pub fn store(&self, id: StoreId) -> &S {
        &self.stores[id.0].storage
    }

    /// Returns the number of accepted requests with results that were not returned yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len() + self.done.len()
    }

    /// Returns the store of each request in flight, and the time of its submission or last
    /// progress.
    pub fn progress(&self) -> impl Iterator<Item = (StoreId, Instant)> + '_ {
        self.requests.iter().map(|(_, r)| (r.store, r.since))
    }

    /// Returns true if this driver created the token of a completion.
    #[must_use]
    pub fn owns(&self, token: Token) -> bool {
        (token.0 >> 56) as u8 == self.config.tag
    }

    /// Submits an operation. `data` is the whole buffer of the caller, which is kept alive until the
    /// operation completes. The operation determines the part to be transferred. `user` is returned
    /// in [`Done`].
    ///
    /// Requests complete immediately on media that are not files, and usually on files in memory.
    /// In this case the result is also returned by [`poll_done`](Driver::poll_done).
    ///
    /// # Errors
    /// Returns [`DriverFull`] if the number of requests in total or for this store is at its limit.
    /// The operation is not submitted.
    ///
    /// # Panics
    /// Panics if the store is not attached, if the range does not consist of whole blocks, or if
    /// the buffer is too short for the operation. The caller must ensure all this.
    pub fn submit(
        &mut self,
        ring: &mut Ring,
        store: StoreId,
        op: Command,
        data: &[MemSlice],
        user: u64,
    ) -> Result<(), DriverFull> {
        if !self.has_room(store) {
            return Err(DriverFull);
        }
        let storage = &self.stores[store.0].storage;
        let block = u64::from(storage.block_size());
        assert!(
            op.offset.is_multiple_of(block) && op.len.is_multiple_of(block),
            "{op:?} is not in whole blocks"
        );
        storage.encode(&op, data);
        // Do this before the request can complete in any other way, so that faults with a limited
        // count affect the same requests in each run.
        let fault = storage.fault(&op);
        let moved = match fault {
            None => self.move_at_once(store, &op, data),
            Some(_) => Err(None),
        };
        match moved {
            Ok(()) => {
                let storage = &self.stores[store.0].storage;
                storage.decode(&op, data);
                let result = storage.result(Ok(None));
                self.done.push_back(Done { user, result });
            }
            Err(turn) => {
                let index = self.accept(store, op, data, (user, turn));
                self.begin_request(ring, index, fault);
            }
        }
        Ok(())
    }

    /// Creates a request for an operation, with its turn if it already has one. Every exit from
    /// this point must use `finish`, which updates the count.
    fn accept(
        &mut self,
        store: StoreId,
        op: Command,
        data: &[MemSlice],
        (user, turn): (u64, Option<Turn>),
    ) -> usize {
        let attached = &mut self.stores[store.0];
        attached.requests += 1;
        let mut kept = self.requests.spare_list();
        // These slices keep the memory mapped, because the operation may be aborted and its
        // connection closed while the kernel is still accessing the memory.
        kept.extend_from_slice(data);
        let lists = (kept, self.requests.spare_list());
        let stage = plan::first_stage(&op, attached.lacks);
        self.requests.insert(Request {
            renewals: attached.sync.renewals(),
            turn,
            ..Request::new(user, store, self.now, op, lists, stage)
        })
    }

    /// Starts or delays an accepted request.
    fn begin_request(&mut self, ring: &mut Ring, index: usize, fault: Option<Fault<S::Error>>) {
        let request = &mut self.requests[index];
        let storage = &self.stores[request.store.0].storage;
        // Don't retry after a failed flush. The kernel reports a lost page only once, so the next
        // `fsync` would succeed without the data. This is checked before injected faults, so that
        // they can't hide it.
        if request.op.kind == CommandKind::Flush
            && let Some(errno) = storage.flush_failure()
        {
            let error = S::error(Failure::Errno(errno), request.op.offset);
            return self.finish(index, Err(error));
        }
        let Some(Fault { delay, error, most }) = fault else {
            return self.start(ring, index);
        };
        request.most = most.min(MAX_OPERATION);
        if storage.holds(&request.op) {
            return self.requests.change_state(index, RequestState::Held);
        }
        request.injected = error;
        if delay.is_zero() {
            return self.start(ring, index);
        }
        let until = self.now + delay;
        self.requests
            .change_state(index, RequestState::Delayed { until });
    }

    /// Reads or writes synchronously without creating a request, if possible: for a file in memory,
    /// if there are no other requests for the same bytes.
    ///
    /// # Errors
    /// Fails if not all of the data was transferred. In this case, a request must be created, which
    /// starts from the beginning. It inherits the turn for these bytes, if this function entered
    /// one.
    fn move_at_once(
        &mut self,
        store: StoreId,
        op: &Command,
        data: &[MemSlice],
    ) -> Result<(), Option<Turn>> {
        let storage = &mut self.stores[store.0].storage;
        let file = storage.file().filter(|file| file.is_in_memory);
        let file = file.ok_or(None)?;
        let is_write = op.kind == CommandKind::Write;
        // Durable operations require additional steps, or their errors require special handling.
        match op.kind {
            CommandKind::Read if !op.fua => {}
            CommandKind::Write if !plan::is_durable(op, storage.has_write_cache()) => {}
            _ => return Err(None),
        }
        // A write would block the thread if there are active long changes, and may have to be recorded
        // first.
        let is_held_up =
            is_write && (file.changing.load(Ordering::Relaxed) > 0 || storage.records_changes());
        if op.len > LONGEST_AT_ONCE.min(self.at_once) || is_held_up {
            return Err(None);
        }
        let mut part = None;
        let list = uncut(op, data, file.align, &mut part).ok_or(None)?;
        let bytes = op.offset..op.offset + op.len;
        let turn = file.turns.try_join(bytes, is_write).ok_or(None)?;
        let moved = match is_write {
            true => sys::write_now(&file.handle, op.offset, list, false),
            false => sys::read_now(&file.handle, file.mapped.as_ref(), op.offset, list),
        };
        if moved != Some(Ok(op.len as usize)) {
            // The request will do this again in the same turn, and handles any errors.
            return Err(Some(turn.into_turn()));
        }
        drop(turn);
        self.at_once -= op.len;
        storage.on_success(op, self.now);
        Ok(())
    }

    /// Returns true if a store may have another request. Half of the depth is shared by all stores
    /// on a first-come basis. Each store has its own share of the other half, so a hanging store
    /// cannot block other stores.
    fn has_room(&self, store: StoreId) -> bool {
        let (depth, stores) = (self.config.depth, self.stores.len());
        let in_flight = self.in_flight();
        // The last condition only uses the number of requests for this store. The total for all
        // stores is at most the half that isn't shared.
        let own = (depth / (2 * stores)).max(1);
        in_flight < depth
            && (stores == 1 || in_flight < depth / 2 || self.stores[store.0].requests < own)
    }

    /// Cancels all requests with this identifier. Each still results in a [`Done`]: waiting
    /// requests are aborted, and requests that the disk is executing complete with any result.
    pub fn cancel(&mut self, ring: &mut Ring, user: u64) {
        let named: Vec<usize> = self
            .requests
            .iter()
            .filter_map(|(i, r)| (r.user == user).then_some(i))
            .collect();
        for index in named {
            let is_within_block = self.is_within_block(index);
            let request = &mut self.requests[index];
            // Set this for requests that continue, to prevent their next stage or the remainder of
            // a short transfer.
            request.cancelled = true;
            let store = request.store.0;
            match request.state {
                // It is cancelled at the end of the block.
                RequestState::Ring | RequestState::Stalled if is_within_block => {}
                // If the ring doesn't support cancellation, the operation continues until it
                // completes.
                RequestState::Ring => drop(ring.cancel(self.token(index))),
                // A thread can't be canceled during a system call, and a fault holds aborted
                // requests in the same way as a hanging disk.
                RequestState::Helper | RequestState::Held => {}
                // The kernel doesn't report an error again if this flush is going to detect it.
                RequestState::Flush if request.failed.is_some() => {}
                RequestState::Flush => {
                    // Other requests are also waiting for a flush in flight.
                    if self.stores[store].flushes.remove(&index) {
                        self.cancel_request(index);
                    }
                }
                RequestState::Stalled | RequestState::Delayed { .. } | RequestState::Turn => {
                    self.requests.unlist(index);
                    self.cancel_request(index);
                }
                RequestState::New | RequestState::Done => {
                    unreachable!("a request in flight waits for something")
                }
            }
        }
    }

    /// Returns whether a change was interrupted within a block. If it was cancelled now, the block
    /// would be a mix of two versions.
    fn is_within_block(&self, index: usize) -> bool {
        let request = &self.requests[index];
        let block = u64::from(self.stores[request.store.0].storage.block_size());
        request.op.kind != CommandKind::Read && !request.done.is_multiple_of(block)
    }

    fn cancel_request(&mut self, index: usize) {
        let request = &self.requests[index];
        let at = request.op.offset + request.done;
        self.finish(index, Err(S::error(Failure::Cancelled, at)));
    }

    /// Handles a completion of a ring operation of this driver.
    ///
    /// # Panics
    /// Panics if the token is not from this driver, see [`owns`](Driver::owns).
    pub fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) {
        assert!(self.owns(completion.token), "a completion of another's");
        // The slab index identifies the request without a generation, because it isn't reused until
        // `finish`. At this time the request's only ring operation has completed.
        let index = (completion.token.0 & !(0xff << 56)) as usize;
        let result = match u32::try_from(completion.result) {
            Ok(n) => Ok(n as usize),
            Err(_) => Err(-completion.result),
        };
        self.on_result(ring, index, result);
    }

    /// Returns the next completed request. If there is no other, this resumes requests that were
    /// waiting for space, for the helper thread or for a delay, so this must be called after every
    /// park, until it returns `None`.
    pub fn poll_done(&mut self, ring: &mut Ring) -> Option<Done<S::Result>> {
        // Callers process all completions before the next park, so this is done at least once in each
        // of these loops. Requests submitted in the loop may use released space first.
        if self.done.is_empty() {
            self.resume_waiting(ring);
        }
        self.done.pop_front()
    }

    /// Returns the time when [`poll_done`](Driver::poll_done) must be called even if there are no
    /// completions.
    #[must_use]
    pub fn poll_deadline(&self) -> Option<Instant> {
        self.requests.deadline(self.now)
    }

    fn token(&self, index: usize) -> Token {
        Token((u64::from(self.config.tag) << 56) | index as u64)
    }

    /// Resumes requests that were waiting for anything except the ring.
    ///
    /// Results of helpers are processed first, because they complete requests. Delayed requests are
    /// next, because they may become stalled. Flushes are last, because a single call includes all
    /// requests of the store at this point.
    fn resume_waiting(&mut self, ring: &mut Ring) {
        for at in 0..self.helped.len() {
            let store = self.helped[at];
            let poll = |stores: &mut Slab<Attached<S>>| {
                let helper = stores[store].helper.as_mut();
                helper.and_then(Offload::poll_result)
            };
            while let Some((token, result)) = poll(&mut self.stores) {
                self.on_called(token.0 as usize, result);
            }
        }
        if self.requests.has_delayed() {
            let now = self.now;
            // Take the whole list, because `start` may delay a request again. It would be processed
            // again in this round, so a long operation in memory would block all other requests.
            for index in self.requests.take_delayed() {
                let request = &self.requests[index];
                let storage = &self.stores[request.store.0].storage;
                let waits = match request.state {
                    RequestState::Delayed { until } => until > now,
                    RequestState::Held => storage.holds(&request.op),
                    _ => !self.takes_turn(index),
                };
                match waits {
                    true => self.requests.keep_delayed(index),
                    false => self.start(ring, index),
                }
            }
        }
        // Process each request once. It's added again if there's no space.
        for _ in 0..self.requests.stalled() {
            if let Some(index) = self.requests.next_stalled() {
                self.issue(ring, index);
            }
        }
        if std::mem::take(&mut self.flush_stalled) {
            let stores: Vec<_> = self.stores.iter().map(|(i, _)| StoreId(i)).collect();
            for store in stores {
                self.flush(ring, store);
            }
        }
    }

    /// Starts a request on its medium.
    fn start(&mut self, ring: &mut Ring, index: usize) {
        let request = &mut self.requests[index];
        if let Some(error) = request.injected {
            return self.fail_on_purpose(index, error);
        }
        let storage = &self.stores[request.store.0].storage;
        // Operations on a file complete asynchronously. All others are executed below.
        if storage.file().is_some() {
            self.follow_renewals(index);
            return self.issue(ring, index);
        }
        let (done, window) = (&mut request.done, &mut request.window);
        match storage.execute(&request.op, done, &request.data, window) {
            None => self.yield_to_others(index),
            Some(result) => self.finish(index, result),
        }
    }

    /// Returns whether a request that reads or changes the medium does not have to wait for older
    /// requests for the same bytes.
    fn takes_turn(&mut self, index: usize) -> bool {
        let request = &mut self.requests[index];
        let storage = &self.stores[request.store.0].storage;
        let file = storage.file().expect(ONLY_FILES);
        if file.keeps_blocks_whole(storage.block_size()) {
            return true;
        }
        let op = &request.op;
        let changes = op.kind != CommandKind::Read;
        let bytes = match request.stage {
            Stage::Fill => {
                let most = fill_piece(&self.config, storage.block_size());
                plan::fill_piece(op, request.done, most)
            }
            _ => op.offset..op.offset + op.len,
        };
        let join = || file.turns.join(bytes, changes, || self.waker.clone());
        request.turn.get_or_insert_with(join).may_continue()
    }

    /// Returns whether a request has been recorded, unless it does not change the medium.
    ///
    /// # Errors
    /// Returns the error number of the store.
    fn record_change(&mut self, index: usize) -> Result<bool, i32> {
        let request = &mut self.requests[index];
        let op = &request.op;
        let waited = match request.intent {
            _ if op.kind == CommandKind::Read => return Ok(true),
            Intent::Recorded => return Ok(true),
            Intent::Waiting(number) => Some(number),
            Intent::Unrecorded => None,
        };
        let storage = &self.stores[request.store.0].storage;
        let (bytes, waker) = (op.offset..op.offset + op.len, || self.waker.clone());
        request.intent = Intent::Unrecorded;
        request.intent = match storage.begin_change(bytes, waited, waker, self.now)? {
            None => Intent::Recorded,
            Some(number) => Intent::Waiting(number),
        };
        Ok(request.intent == Intent::Recorded)
    }

    /// Releases the turn of a piece after it was filled with zeroes. Reads by other requests will
    /// precede the next piece.
    fn leave_filled_piece(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let block_size = self.stores[request.store.0].storage.block_size();
        if request.stage == Stage::Fill
            && (request.done).is_multiple_of(fill_piece(&self.config, block_size))
        {
            request.turn = None;
        }
    }

    /// Delays a long operation in memory after each piece, in order to serve other commands.
    fn yield_to_others(&mut self, index: usize) {
        self.requests[index].since = self.now;
        let until = self.now;
        self.requests
            .change_state(index, RequestState::Delayed { until });
    }

    /// Returns whether a request was created and completed, because this keeps its lists for the
    /// next request.
    #[cfg(feature = "testing")]
    pub fn has_ended_requests(&self) -> bool {
        self.requests.has_spare_lists()
    }

    /// Simulates a hanging store with requests that use all shared bounce buffers, the store's own
    /// buffer, and its helper.
    ///
    /// # Panics
    /// Panics if there are no threads.
    #[cfg(feature = "testing")]
    pub fn hang(&mut self, id: StoreId) -> std::sync::mpsc::Sender<()> {
        self.idle_bounces.clear();
        let store = &mut self.stores[id.0];
        store.bounce = OwnBounce::InUse;
        let (release, hangs) = std::sync::mpsc::channel();
        let threads = store.storage.threads();
        let mut helper = Offload::new(1, self.waker.clone(), threads).unwrap();
        let job = move || {
            let _ = hangs.recv();
            Err(S::error(Failure::Cancelled, 0))
        };
        helper.submit(Token(0), job).unwrap();
        store.helper = Some(helper);
        release
    }

    fn fail_on_purpose(&mut self, index: usize, error: S::Error) {
        let request = &self.requests[index];
        if request.op.kind == CommandKind::Flush {
            let storage = &mut self.stores[request.store.0].storage;
            storage.on_flush_failed(libc::EIO, self.now);
        }
        self.fail(index, error, &"a fault on purpose");
    }

    /// Submits the next ring operation of a request, or delays the request.
    fn issue(&mut self, ring: &mut Ring, index: usize) {
        self.leave_unsupported_stage(index);
        let moves = matches!(
            self.requests[index].stage,
            Stage::Transfer | Stage::Punch | Stage::Zero | Stage::Fill | Stage::Edges
        );
        if moves && !self.takes_turn(index) {
            return self.requests.change_state(index, RequestState::Turn);
        }
        if moves
            && self.stores[self.requests[index].store.0]
                .storage
                .records_changes()
        {
            match self.record_change(index) {
                Ok(true) => {}
                Ok(false) => return self.requests.change_state(index, RequestState::Turn),
                Err(errno) => return self.fail_with(index, errno),
            }
        }
        let token = self.token(index);
        let request = &mut self.requests[index];
        let attached = &mut self.stores[request.store.0];
        let file = attached.storage.file().expect(ONLY_FILES);
        let handle = attached.handle.as_ref().expect("files have handles");
        let op = &request.op;
        let (at, left) = plan::piece(op, request.stage, file.unit(), request.done);
        // If the range is within a device block, there is nothing to punch or zero, and
        // fallocate(2) fails for a length of zero. If the medium is known not to support holes, a
        // discard leaves the blocks unchanged.
        let is_refused = request.stage == Stage::Punch && attached.lacks.punch;
        if (left == 0 && moves) || is_refused {
            return self.after_stage(ring, index);
        }
        let durable = match plan::is_durable(op, attached.storage.has_write_cache()) {
            true => Durability::Durable,
            false => Durability::Cached,
        };
        let (len, is_read) = (op.len, op.kind == CommandKind::Read);
        let queued = match request.stage {
            // Don't submit this separately, because a single flush serves all waiting requests of
            // the store.
            Stage::SyncLast => {
                let store = request.store;
                // A flush doesn't access any data, and may take a long time.
                request.turn = None;
                self.requests.change_state(index, RequestState::Flush);
                self.stores[store.0].flushes.join(index);
                return self.flush(ring, store);
            }
            Stage::Punch => ring.submit_fallocate(handle, Fallocate::PunchHole, at, left, token),
            // If a device refuses to zero a range, the kernel writes zeroes without reporting this.
            Stage::Fill | Stage::Zero
                if matches!(op.kind, CommandKind::WriteZeroes { fast: true, .. })
                    && (request.stage == Stage::Fill || file.device.is_some()) =>
            {
                let error = S::error(Failure::Errno(libc::EOPNOTSUPP), op.offset);
                return self.finish(index, Err(error));
            }
            Stage::Zero => ring.submit_fallocate(handle, Fallocate::ZeroRange, at, left, token),
            Stage::Fill | Stage::Edges => {
                // The list contains the same zeroes several times, to reduce the number of
                // operations for a long range. Durability isn't required for each one, because the
                // flush after this stage includes all of them.
                let most = fill_piece(&self.config, attached.storage.block_size());
                let left = match request.stage {
                    Stage::Fill => plan::fill_piece(op, request.done, most).end - at,
                    _ => left.min(most),
                };
                fill_window(&self.zeroes, left, &mut request.window);
                ring.submit_write(handle, at, &request.window, Durability::Cached, token)
            }
            Stage::Transfer => {
                let block_size = attached.storage.block_size();
                let (shared, own) = (&mut self.idle_bounces, &mut attached.bounce);
                // Most requests don't require a bounce buffer. It's only allocated if the memory
                // isn't suitable for direct I/O.
                let idle = || own.take_or(shared, self.config.bounce);
                let cut = cut_transfer(request, file.align, block_size, self.config, idle);
                let Some(memory) = cut else {
                    return self.requests.change_state(index, RequestState::Stalled);
                };
                let list = memory
                    .as_ref()
                    .map_or(&request.window[..], std::slice::from_ref);
                // Copy the data synchronously if this takes no longer than using the ring, because
                // the kernel uses a separate thread for writes. However, a write would block the
                // thread if there are active long changes.
                let waits = || !is_read && file.changing.load(Ordering::Relaxed) > 0;
                if file.is_in_memory && len <= LONGEST_AT_ONCE.min(self.at_once) && !waits() {
                    let is_durable = durable == Durability::Durable;
                    let moved = match is_read {
                        true => sys::read_now(&file.handle, file.mapped.as_ref(), at, list),
                        false => sys::write_now(&file.handle, at, list, is_durable),
                    };
                    if let Some(moved) = moved {
                        self.at_once -= len;
                        return self.on_result(ring, index, moved);
                    }
                }
                match is_read {
                    true => ring.submit_read(handle, at, list, token),
                    false => ring.submit_write(handle, at, list, durable, token),
                }
            }
            // A block device doesn't report which blocks are in use, so all of them are considered
            // mapped.
            Stage::Call if file.device.is_some() && op.kind == CommandKind::Status => {
                let extents = S::unknown_extents(op);
                return self.finish(index, Ok(Some(extents)));
            }
            // io_uring doesn't support these calls, and they may block on the file system.
            Stage::Call => return self.submit_to_helper(index),
        };
        match queued {
            Ok(()) => {
                let is_long = request.stage != Stage::Transfer || len > LONGEST_AT_ONCE;
                let changes = moves && is_long && !is_read;
                if file.is_in_memory
                    && changes
                    && !std::mem::replace(&mut request.is_changing, true)
                {
                    file.changing.fetch_add(1, Ordering::Relaxed);
                }
                self.requests.change_state(index, RequestState::Ring);
            }
            Err(SubmitError::Full) => {
                // Release the buffer for other requests of the store, because this request is
                // waiting for space in the ring.
                self.free_bounce(index);
                self.requests.change_state(index, RequestState::Stalled);
            }
            // Lists and lengths are within the limits of the ring, so the ring itself has failed.
            Err(_) => self.finish(index, Err(S::error(Failure::Ring, at))),
        }
    }

    /// Handles an operation that was refused by the medium for another request, after this request
    /// was accepted.
    fn leave_unsupported_stage(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if !matches!(request.stage, Stage::Punch | Stage::Zero) {
            return;
        }
        let lacks = self.stores[request.store.0].lacks;
        let stage = plan::first_stage(&request.op, lacks);
        if std::mem::replace(&mut request.stage, stage) != stage {
            request.turn = None;
        }
    }

    fn on_result(&mut self, ring: &mut Ring, index: usize, result: Result<usize, i32>) {
        let is_suspect = result.is_err_and(|errno| self.may_report_a_loss(index, errno));
        let request = &mut self.requests[index];
        let attached = &mut self.stores[request.store.0];
        let file = attached.storage.file().expect(ONLY_FILES);
        if std::mem::take(&mut request.is_changing) {
            file.changing.fetch_sub(1, Ordering::Relaxed);
        }
        // These bytes can't be read until the request completes.
        if let Some(mapped) = &file.mapped
            && matches!(request.stage, Stage::Punch | Stage::Zero)
        {
            let (at, left) = plan::piece(&request.op, request.stage, file.unit(), request.done);
            mapped.forget(at..at + left);
        }
        let least = file.align.map_or(1, |align| align.offset as usize);
        let is_exclusive =
            file.turns.has_exclusive_changes() && request.op.kind != CommandKind::Read;
        // No other change can interleave with an exclusive one. It may have been interrupted within a
        // block, where it must not be cancelled.
        let block = match is_exclusive {
            true => least,
            false => attached.storage.block_size() as usize,
        };
        match request.outcome(result, (block, least), is_suspect) {
            Outcome::Moved(moved) => {
                self.finish_bounce(index, moved);
                self.requests[index].done += moved as u64;
                self.leave_filled_piece(index);
                self.requests[index].since = self.now;
                if self.requests[index].cancelled && !self.is_within_block(index) {
                    self.cancel_request(index);
                } else {
                    self.issue(ring, index);
                }
            }
            Outcome::Truncated(at) => {
                let error = S::error(Failure::Truncated, at);
                self.fail(index, error, &"the file is shorter");
            }
            Outcome::Flushed(errno) => {
                let store = request.store;
                self.on_flushed(ring, store, errno);
            }
            Outcome::StageDone => self.after_stage(ring, index),
            Outcome::Unsupported => {
                // Remember this while the store is attached, to avoid repeating a system call that
                // is known to fail for each command.
                match request.stage {
                    Stage::Punch => {
                        attached.lacks.punch = true;
                        // The kernel only refuses a hole if the device can't zero ranges, but for
                        // zeroing it would write to the whole range.
                        attached.lacks.zero |= file.device.is_some();
                    }
                    _ => attached.lacks.zero = true,
                }
                match request.cancelled {
                    true => self.cancel_request(index),
                    false => self.issue(ring, index),
                }
            }
            Outcome::Suspect(errno) => {
                let clears = attached.storage.flush_clears();
                let file = attached.storage.file().expect(ONLY_FILES);
                request.is_checking = attached.sync.reports_again(request.renewals, clears);
                match request.is_checking {
                    true => file.flush_checks.start_check(),
                    false => attached.storage.on_flush_failed(errno, self.now),
                }
                (request.failed, request.stage) = (Some(errno), Stage::SyncLast);
                self.free_bounce(index);
                self.issue(ring, index);
            }
            Outcome::Failed(errno) => self.fail_with(index, errno),
        }
    }

    /// Returns whether the error of an operation may be due to data written by other requests,
    /// because a durable write syncs its descriptor. The kernel then considers the error as
    /// reported, also for a process that opens the file later. A flush using the descriptor for
    /// flushes will report it again, so it is remembered.
    fn may_report_a_loss(&self, index: usize, errno: i32) -> bool {
        let request = &self.requests[index];
        let storage = &self.stores[request.store.0].storage;
        plan::is_durable_write(&request.op, storage.has_write_cache())
            && errno != libc::ECANCELED
            && storage.flush_failure().is_none()
    }

    /// Opens another descriptor for flushes if a failure was cleared, or if the descriptor is the
    /// same as for writes. Active durable writes may have received an error that the new descriptor
    /// does not report, so their errors are treated as lost data.
    fn renew_sync(&mut self, store: StoreId) {
        let attached = &mut self.stores[store.0];
        let clears = attached.storage.flush_clears();
        if attached.sync.is_outdated(clears) {
            let opened = open_sync(&mut attached.storage, self.now);
            attached.sync_errno = opened.errno;
            let mut previous = attached.sync.renew(opened.handle, opened.is_shared, clears);
            // The current flush still uses its descriptor, so the ring would close it.
            if attached.flushes.is_running() && attached.replaced.is_none() {
                attached.replaced = previous.take();
            }
            if let Some(previous) = previous {
                attached.storage.close(previous);
            }
        }
    }

    /// Called before the first ring operation of a request, which may be long after its submission.
    fn follow_renewals(&mut self, index: usize) {
        let request = &self.requests[index];
        let store = request.store;
        let volatile = self.stores[store.0].storage.has_write_cache();
        if plan::is_durable_write(&request.op, volatile) {
            self.renew_sync(store);
        }
        self.requests[index].renewals = self.stores[store.0].sync.renewals();
    }

    /// Starts a flush for all waiting requests, unless a flush is in progress.
    fn flush(&mut self, ring: &mut Ring, store: StoreId) {
        let Some(&first) = self.stores[store.0].flushes.due() else {
            return;
        };
        let token = self.token(first);
        self.renew_sync(store);
        let attached = &mut self.stores[store.0];
        if let Some(errno) = attached.sync_errno
            && attached.storage.has_other_drivers()
        {
            let error = S::error(Failure::Errno(errno), 0);
            let why = io::Error::from_raw_os_error(errno);
            attached.storage.on_failure(None, error, &why, self.now);
            return self.fail_flushes(store, Failure::Errno(errno));
        }
        let sync = attached.sync.handle().expect("files have descriptors");
        match ring.submit_sync(sync, SyncKind::Data, token) {
            Ok(()) => attached.flushes.start(),
            Err(SubmitError::Full) => self.flush_stalled = true,
            // As for all other operations, the ring has failed.
            Err(_) => self.fail_flushes(store, Failure::Ring),
        }
    }

    /// Fails all requests that wait for a flush.
    fn fail_flushes(&mut self, store: StoreId, failure: Failure) {
        let attached = &mut self.stores[store.0];
        for index in attached.flushes.take_waiting() {
            let request = &self.requests[index];
            let Some(errno) = request.failed else {
                let error = S::error(failure, request.op.offset);
                self.finish(index, Err(error));
                continue;
            };
            // We don't know if other data was lost.
            if request.is_checking {
                let storage = &mut self.stores[store.0].storage;
                storage.on_flush_failed(errno, self.now);
            }
            self.fail_with(index, errno);
        }
    }

    /// Called when a flush has completed. A success is only used if no flush has failed.
    fn on_flushed(&mut self, ring: &mut Ring, store: StoreId, errno: Option<i32>) {
        let attached = &mut self.stores[store.0];
        let mut served = attached.flushes.complete();
        // Store the failure before completing any requests, so that a concurrent flush by another
        // worker isn't considered successful.
        if let Some(errno) = errno {
            let why = io::Error::from_raw_os_error(errno);
            let error = S::error(Failure::Errno(errno), 0);
            attached.storage.on_failure(None, error, &why, self.now);
            attached.storage.on_flush_failed(errno, self.now);
        }
        if let Some(replaced) = attached.replaced.take() {
            attached.storage.close(replaced);
        }
        // Check this even after a success, because the error may have been reported to the
        // descriptor of another worker.
        let failure = attached.storage.flush_failure();
        for index in served.drain(..) {
            let request = &self.requests[index];
            match (request.failed, failure) {
                (Some(errno), _) => self.fail_with(index, errno),
                (None, None) => self.after_stage(ring, index),
                (None, Some(errno)) => {
                    let error = S::error(Failure::Errno(errno), request.op.offset);
                    self.finish(index, Err(error));
                }
            }
        }
        self.stores[store.0].flushes.recycle(served);
        self.flush(ring, store);
    }

    /// Continues with the next stage of a request, or completes it.
    fn after_stage(&mut self, ring: &mut Ring, index: usize) {
        let request = &mut self.requests[index];
        let volatile = self.stores[request.store.0].storage.has_write_cache();
        match plan::next_stage(&request.op, request.stage, volatile) {
            None => self.finish(index, Ok(None)),
            Some(_) if request.cancelled => self.cancel_request(index),
            Some(stage) => {
                request.stage = stage;
                request.done = 0;
                self.issue(ring, index);
            }
        }
    }

    fn submit_to_helper(&mut self, index: usize) {
        let request = &self.requests[index];
        let (op, store) = (request.op, request.store.0);
        let attached = &mut self.stores[store];
        let helper = &mut attached.helper;
        if helper.is_none() {
            // Use a separate helper for each store, with a queue for all requests, so that a
            // hanging file system only blocks its own thread.
            let threads = attached.storage.threads();
            *helper = Offload::new(self.config.depth, self.waker.clone(), threads).ok();
            self.helped.extend(helper.is_some().then_some(store));
        }
        let file = attached.storage.file().expect(ONLY_FILES).handle.clone();
        let block_size = attached.storage.block_size();
        let job = move || S::call(&file, &op, block_size);
        let submitted = helper
            .as_mut()
            .is_some_and(|h| h.submit(Token(index as u64), job).is_ok());
        if submitted {
            self.requests.change_state(index, RequestState::Helper);
        } else {
            // No helper is available.
            self.on_called(index, Ok(S::unknown_extents(&op)));
        }
    }

    fn on_called(&mut self, index: usize, result: Called<S>) {
        match self.requests[index].cancelled {
            true => self.cancel_request(index),
            false => self.finish(index, result.map(Some)),
        }
    }

    /// Copies data from the bounce buffer for a read, and releases the bounce buffer.
    fn finish_bounce(&mut self, index: usize, moved: usize) {
        let request = &mut self.requests[index];
        if let (Some(bounce), CommandKind::Read) = (&request.bounce, request.op.kind) {
            // A short read only fills the beginning of the window. The remaining part of the buffer
            // is unchanged until the next operation.
            plan::copy_pieces(&request.window, &bounce.first(moved), false);
        }
        self.free_bounce(index);
    }

    fn free_bounce(&mut self, index: usize) {
        let request = &mut self.requests[index];
        match request.bounce.take() {
            None => {}
            Some(bounce) if bounce.is_shared => self.idle_bounces.push(bounce.memory),
            Some(bounce) => self.stores[request.store.0].bounce = OwnBounce::Idle(bounce.memory),
        }
    }

    /// Completes a request that has failed on the medium with this error number.
    fn fail_with(&mut self, index: usize, errno: i32) {
        let request = &self.requests[index];
        let at = request.op.offset + request.done;
        let why = io::Error::from_raw_os_error(errno);
        self.fail(index, S::error(Failure::Errno(errno), at), &why);
    }

    /// Completes a request that has failed on the medium.
    fn fail(&mut self, index: usize, error: S::Error, why: &dyn std::fmt::Display) {
        let request = &self.requests[index];
        let storage = &mut self.stores[request.store.0].storage;
        storage.on_failure(Some(&request.op), error, why, self.now);
        self.finish(index, Err(error));
    }

    fn finish(&mut self, index: usize, result: Result<Option<S::Extents>, S::Error>) {
        self.free_bounce(index);
        let request = &self.requests[index];
        let attached = &mut self.stores[request.store.0];
        attached.storage.decode(&request.op, &request.data);
        let request = self.requests.complete(index);
        if request.is_checking {
            let file = attached.storage.file().expect(ONLY_FILES);
            file.flush_checks.finish_check();
        }
        if request.intent == Intent::Recorded {
            let bytes = request.op.offset..request.op.offset + request.op.len;
            attached.storage.end_change(bytes, self.now);
        }
        if result.is_ok() {
            attached.storage.on_success(&request.op, self.now);
        }
        attached.requests -= 1;
        self.done.push_back(Done {
            user: request.user,
            result: attached.storage.result(result),
        });
    }
}
