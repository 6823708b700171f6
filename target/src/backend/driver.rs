//! [`Driver`]: a worker's engine for block operations.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_reactor::{
    Completion, Durability, Fallocate, Handle, Offload, Ring, SubmitError, SyncKind, Token,
};
use riser_scsi::step::{Allocation, BackendError, BlockOp, StepResult};
use slab::Slab;

use super::errno::from_errno;
use super::medium::Medium;
use super::plan::{self, Bounds, Lacks, Stage};
use super::request::{
    BlockCommand, Bounce, DriverConfig, MAX_OPERATION, State, StoreId, buffer_range, cut_transfer,
    fill_window, uncut,
};
use super::store::Store;
use super::sys;
use super::turns::Turn;
use crate::log::RateLimit;
use crate::warn_limited;

/// The driver has as many requests as it takes, or as many of this store; nothing was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the backend driver has as many requests as it takes")]
pub struct DriverFull;

/// A request that has ended, for the worker to answer its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The caller's name for it.
    pub user: u64,
    /// Result, in the logical unit's terms.
    pub result: StepResult,
}

struct Attached {
    store: Arc<Store>,
    handle: Option<Handle>,
    /// A descriptor for flushes alone: see [`super::flush`].
    sync: Option<Handle>,
    /// Failures of flushes that were cleared before that was opened.
    clears: u64,
    /// The descriptor for flushes is that of writes: the system had no other one.
    is_sync_shared: bool,
    /// How often that descriptor was replaced.
    renewals: u32,
    /// Requests that the flush under way serves, the first of which names it.
    flushing: Vec<usize>,
    /// Requests that the next flush serves.
    to_flush: Vec<usize>,
    lacks: Lacks,
    requests: usize,
    /// Its own bounce buffer: one that hangs may have all that are shared.
    bounce: OwnBounce,
    /// Lines about its failures.
    complaints: RateLimit,
    /// A helper thread for its blocking calls, once it was needed. Those of one that hangs do not
    /// return.
    helper: Option<Offload<io::Result<(bool, u64)>>>,
}

/// A store's own bounce buffer.
enum OwnBounce {
    /// It was not needed yet.
    None,
    Idle(MemSlice),
    InUse,
}

/// A worker's engine: takes block operations, works them through the ring, and gives results.
///
/// Every accepted request gives exactly one [`Done`]. Calls, in the worker's loop:
/// [`begin_round`](Driver::begin_round) with the time, [`submit`](Driver::submit) for new requests,
/// [`handle_completion`](Driver::handle_completion) for every completion whose token has the
/// driver's tag, then [`poll_done`](Driver::poll_done) until it gives nothing.
pub struct Driver {
    config: DriverConfig,
    stores: Slab<Attached>,
    requests: Slab<BlockCommand>,
    /// At most `depth`, as all the following.
    done: VecDeque<Done>,
    stalled: VecDeque<usize>,
    delayed: Vec<usize>,
    /// A flush found no room in the ring.
    flush_stalled: bool,
    /// Those that are shared.
    idle_bounces: Vec<MemSlice>,
    zeroes: MemSlice,
    /// Stores with a helper.
    helped: Vec<usize>,
    /// Empty lists with their memory, two per request that ended; at most twice `depth`.
    spare: Vec<Vec<MemSlice>>,
    /// Time of the worker's round.
    now: Instant,
    /// Bytes that may still be moved in calls of this round.
    at_once: u64,
}

impl OwnBounce {
    /// An idle bounce buffer: one of those that are shared, or this one.
    fn take_or(&mut self, shared: &mut Vec<MemSlice>, bytes: usize) -> Option<Bounce> {
        if let Some(memory) = shared.pop() {
            let is_shared = true;
            return Some(Bounce { memory, is_shared });
        }
        // Only where all shared ones are taken: this one bounds what a store needs to go on at
        // all, however long the requests of another store keep theirs.
        let memory = match std::mem::replace(self, Self::InUse) {
            Self::Idle(memory) => Some(memory),
            Self::InUse => return None,
            Self::None => Memory::new(bytes).ok().map(|memory| memory.whole()),
        };
        if memory.is_none() {
            // Perhaps later.
            *self = Self::None;
        }
        let is_shared = false;
        memory.map(|memory| Bounce { memory, is_shared })
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("stores", &self.stores.len())
            .field("requests", &self.requests.len())
            .finish_non_exhaustive()
    }
}

/// Opens a descriptor for flushes; returns whether it is that of writes. Without `/proc`, or where
/// the process may open no more, there is one for all.
fn open_sync(medium: &Medium) -> (Option<Handle>, bool) {
    match medium {
        Medium::File { file, .. } => match sys::reopen(file) {
            Ok(own) => (Some(own), false),
            Err(_) => (Some(file.clone()), true),
        },
        Medium::Ram(_) | Medium::Null | Medium::Absent => (None, false),
    }
}

/// Time between two lines about failures of one backend. A command of several operations, such as a
/// write to a full file system, would otherwise have a line for each.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// Notes that an operation of a store has succeeded; returns true if the store had failed.
fn note_success(store: &Store, now: Instant, op: &BlockOp) -> bool {
    store.note_success(now, matches!(op, BlockOp::Write { .. }))
}

/// Zeroes kept at hand for media that cannot zero by themselves.
const ZEROES: usize = 64 << 10;

/// Interval at which requests are tried again that a fault on purpose holds.
const HELD: Duration = Duration::from_millis(2);

/// Bytes of a round that are read or written in the calls that begin this, on files in memory.
/// The worker serves no other client in that time.
const AT_ONCE: u64 = 1 << 20;

/// Length of the longest such read or write, in bytes.
const LONGEST_AT_ONCE: u64 = 128 << 10;

/// Bytes that one ring operation fills with zeroes.
fn fill_piece(config: &DriverConfig) -> u64 {
    (ZEROES * config.pieces.min(16)).min(MAX_OPERATION) as u64
}

/// Bytes of memory that one request zeroes or frees before others are served.
const RAM_PIECE: u64 = 4 << 20;

impl Driver {
    /// Makes a driver for the worker that owns the ring.
    ///
    /// # Errors
    /// Where bounce memory cannot be mapped.
    ///
    /// # Panics
    /// If a size in the configuration is zero or not a multiple as stated.
    pub fn new(ring: &mut Ring, now: Instant, mut config: DriverConfig) -> io::Result<Self> {
        // A longer list would be refused by the ring, which a request here takes for a ring that
        // has failed.
        config.pieces = config.pieces.min(ring.max_slices());
        assert!(config.depth > 0 && config.pieces > 0 && config.bounces > 0);
        assert!(config.bounce > 0 && config.bounce.is_multiple_of(4096));
        let bounce_memory = Memory::new(config.bounce * config.bounces)?;
        let zeroes = Memory::new(ZEROES)?;
        // Without registration the same operations are only slower.
        let _ = ring.register_memory(&bounce_memory);
        let _ = ring.register_memory(&zeroes);
        Ok(Self {
            config,
            stores: Slab::new(),
            requests: Slab::with_capacity(config.depth),
            done: VecDeque::with_capacity(config.depth),
            stalled: VecDeque::with_capacity(config.depth),
            delayed: Vec::new(),
            flush_stalled: false,
            idle_bounces: (0..config.bounces)
                .filter_map(|n| bounce_memory.slice(n * config.bounce..(n + 1) * config.bounce))
                .collect(),
            zeroes: zeroes.whole(),
            helped: Vec::new(),
            spare: Vec::new(),
            now,
            at_once: AT_ONCE,
        })
    }

    /// Takes the time of the worker's round, which counts for all calls until the next one.
    pub fn begin_round(&mut self, now: Instant) {
        self.now = now;
        self.at_once = AT_ONCE;
    }

    /// Attaches a store, registering its file with the ring where there is room.
    pub fn attach(&mut self, ring: &mut Ring, store: Arc<Store>) -> StoreId {
        let handle = match &store.medium {
            Medium::File { file, .. } => {
                Some(ring.register_file(file).unwrap_or_else(|_| file.clone()))
            }
            Medium::Ram(_) | Medium::Null | Medium::Absent => None,
        };
        // Before the descriptor: a failure that is cleared in between only makes the next flush
        // open another one. The other way round, the number would be that of a newer descriptor
        // than this one is, which may still have an old error to report.
        let clears = store.flush_clears();
        let (sync, is_sync_shared) = open_sync(&store.medium);
        let lacks = match store.medium {
            Medium::File { can_zero, .. } => Lacks {
                punch: !can_zero,
                zero: !can_zero,
            },
            Medium::Ram(_) | Medium::Null | Medium::Absent => Lacks::default(),
        };
        StoreId(self.stores.insert(Attached {
            store,
            handle,
            sync,
            clears,
            is_sync_shared,
            renewals: 0,
            flushing: Vec::new(),
            to_flush: Vec::new(),
            lacks,
            requests: 0,
            bounce: OwnBounce::None,
            complaints: RateLimit::new(1, COMPLAINT_INTERVAL),
            helper: None,
        }))
    }

    /// Detaches a store that has no requests; false where it still has some.
    ///
    /// # Panics
    /// If the store is not attached.
    pub fn detach(&mut self, id: StoreId) -> bool {
        let idle = self.stores[id.0].requests == 0;
        if idle {
            self.stores.remove(id.0);
            // Its number is free from here on: results would be looked for at no store, or at
            // another one.
            self.helped.retain(|store| *store != id.0);
        }
        idle
    }

    /// The attached store.
    ///
    /// # Panics
    /// If the store is not attached.
    #[must_use]
    pub fn store(&self, id: StoreId) -> &Arc<Store> {
        &self.stores[id.0].store
    }

    /// Requests accepted whose results have not been taken.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len() + self.done.len()
    }

    /// Returns the store of each request in flight, and the time of its submission or its last progress.
    pub fn progress(&self) -> impl Iterator<Item = (StoreId, Instant)> + '_ {
        self.requests.iter().map(|(_, r)| (r.store, r.since))
    }

    /// Returns true if a completion's token is one of this driver's.
    #[must_use]
    pub fn owns(&self, token: Token) -> bool {
        (token.0 >> 56) as u8 == self.config.tag
    }

    /// Accepts a block operation. `data` is the command's whole buffer, of which the operation says
    /// what part it moves; it is kept alive until the result. `user` comes back in [`Done`].
    ///
    /// Memory and null backends finish at once, and files in memory as a rule; the result still
    /// comes from [`poll_done`](Driver::poll_done).
    ///
    /// # Errors
    /// [`DriverFull`] at the bound on requests, or on those of the store; the caller keeps the
    /// operation.
    ///
    /// # Panics
    /// If the store is not attached, the range is not in whole blocks, or the buffer is shorter
    /// than the operation: the logical unit checks all this.
    pub fn submit(
        &mut self,
        ring: &mut Ring,
        store: StoreId,
        op: BlockOp,
        data: &[MemSlice],
        user: u64,
    ) -> Result<(), DriverFull> {
        if !self.has_room(store) {
            return Err(DriverFull);
        }
        let block = u64::from(self.stores[store.0].store.geometry().block_size);
        let (offset, len) = plan::range(&op);
        // A block is a power of two: see `Store::open`.
        assert!(
            (offset | len) & (block - 1) == 0,
            "{op:?} is not in whole blocks"
        );
        match self.move_at_once(store, &op, data) {
            Ok(()) => {
                let result = StepResult::Done;
                self.done.push_back(Done { user, result });
            }
            Err(turn) => self.accept(ring, store, op, data, (user, turn)),
        }
        Ok(())
    }

    /// Makes a request of an operation, with the turn that it may have already, and begins it.
    fn accept(
        &mut self,
        ring: &mut Ring,
        store: StoreId,
        op: BlockOp,
        data: &[MemSlice],
        (user, turn): (u64, Option<Turn>),
    ) {
        let offset = plan::range(&op).0;
        // From here on the request is accepted, and each way out goes through `finish`, which
        // counts it back.
        let attached = &mut self.stores[store.0];
        attached.requests += 1;
        // Taken before anything else can end the request, so that faults with a number of times
        // strike the same requests in each run.
        let strike = attached.store.faults.as_ref().and_then(|f| f.strike(&op));
        let mut kept = self.spare.pop().unwrap_or_default();
        // The slices keep the memory mapped: the command may be aborted, and its connection
        // closed, while the kernel still reads or writes here.
        kept.extend_from_slice(data);
        let index = self.requests.insert(BlockCommand {
            user,
            store,
            since: self.now,
            op,
            data: kept,
            stage: plan::first_stage(&op, attached.lacks),
            done: 0,
            state: State::Stalled,
            cancelled: false,
            failed: None,
            renewals: attached.renewals,
            bounce: None,
            is_changing: false,
            turn,
            window: self.spare.pop().unwrap_or_default(),
        });
        // A flush that has failed is not tried again: the kernel reports a lost page once, and the
        // next `fsync` would succeed without the data. Faults on purpose come later, so they do not
        // hide it.
        let failure = match op {
            BlockOp::Flush { .. } => self.stores[store.0].store.flush_failure(),
            _ => None,
        };
        if let Some(failure) = failure {
            let error = from_errno(failure.errno, offset);
            return self.finish(index, StepResult::Failed(error));
        }
        match strike {
            _ if self.is_held(index) => {
                self.requests[index].state = State::Held;
                self.delayed.push(index);
            }
            Some((delay, error)) if !delay.is_zero() => {
                let until = self.now + delay;
                self.requests[index].state = State::Delayed { until, error };
                self.delayed.push(index);
            }
            Some((_, Some(error))) => self.fail_on_purpose(index, error),
            _ => self.begin(ring, index),
        }
    }

    /// Reads or writes in this call, without making a request, where that is all there is to do: a
    /// file in memory, and no other request for the same bytes.
    ///
    /// # Errors
    /// It has not moved all of the data, and a request is to be made that begins from the start.
    /// That request then has the turn for these bytes, if this call took it.
    fn move_at_once(
        &mut self,
        store: StoreId,
        op: &BlockOp,
        data: &[MemSlice],
    ) -> Result<(), Option<Turn>> {
        let id = store;
        let store = &self.stores[id.0].store;
        let Medium::File {
            file,
            align,
            in_memory: true,
            mapped,
            ..
        } = &store.medium
        else {
            return Err(None);
        };
        let is_write = matches!(op, BlockOp::Write { .. });
        // What is to be durable has further steps, or errors that say more.
        match op {
            BlockOp::Read { fua: false, .. } => {}
            BlockOp::Write { .. } if !plan::is_durable(op, store.geometry().write_cache) => {}
            _ => return Err(None),
        }
        let (at, len) = plan::range(op);
        // A write would wait for long changes that are under way, and the worker with it. Faults on
        // purpose strike requests.
        let is_held_up = is_write && store.changing.load(Ordering::Relaxed) > 0;
        if len > LONGEST_AT_ONCE.min(self.at_once) || is_held_up || store.faults.is_some() {
            return Err(None);
        }
        let mut part = None;
        let list = uncut(op, data, *align, &mut part).ok_or(None)?;
        let turn = store.turns.enter(at..at + len, is_write).ok_or(None)?;
        let moved = match is_write {
            true => sys::write_now(file, at, list, false),
            false => sys::read_now(file, mapped.as_ref(), at, list),
        };
        if moved != Some(Ok(len as usize)) {
            // The request does it once more in the same turn, and deals with what is wrong.
            return Err(Some(turn.into_turn()));
        }
        drop(turn);
        self.at_once -= len;
        if note_success(store, self.now, op) {
            self.report_recovery(id);
        }
        Ok(())
    }

    /// Returns true if a store may have one more request. All stores share half of the depth as
    /// they come; of the other half each has a part for itself, so one that hangs leaves room for
    /// the others.
    fn has_room(&self, store: StoreId) -> bool {
        let (depth, stores) = (self.config.depth, self.stores.len());
        let in_flight = self.in_flight();
        // The last bound counts only this store's requests, and the parts of all stores together
        // are at most the half that is not shared.
        let own = (depth / (2 * stores)).max(1);
        in_flight < depth
            && (stores == 1 || in_flight < depth / 2 || self.stores[store.0].requests < own)
    }

    /// Asks that every request of this name end soon. Each still gives its [`Done`]: what waits
    /// ends as aborted, what the disk already does ends as it may.
    pub fn cancel(&mut self, ring: &mut Ring, user: u64) {
        let named: Vec<usize> = self
            .requests
            .iter()
            .filter_map(|(i, r)| (r.user == user).then_some(i))
            .collect();
        for index in named {
            let request = &mut self.requests[index];
            // Kept for those that go on: their next stage, or the rest of a short transfer, is not
            // begun.
            request.cancelled = true;
            match request.state {
                // A ring that takes no cancellation lets the operation run to its end.
                State::Ring => drop(ring.cancel(self.token(index))),
                // A thread in a system call cannot be called back, and a fault holds aborted
                // requests as a disk that hangs would.
                State::Helper | State::Held => {}
                // The kernel does not report again what the flush is to find.
                State::Flush if request.failed.is_some() => {}
                // A flush under way serves others too.
                State::Flush if self.stores[request.store.0].flushing.contains(&index) => {}
                State::Flush | State::Stalled | State::Delayed { .. } | State::Turn => {
                    let store = self.requests[index].store.0;
                    self.stores[store].to_flush.retain(|&i| i != index);
                    self.stalled.retain(|&i| i != index);
                    self.delayed.retain(|&i| i != index);
                    self.finish(index, StepResult::Failed(BackendError::Aborted));
                }
            }
        }
    }

    /// Takes a completion of one of the driver's ring operations.
    ///
    /// # Panics
    /// If the token is not of this driver: the worker routes by [`owns`](Driver::owns).
    pub fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) {
        assert!(self.owns(completion.token), "a completion of another's");
        // The slab's number names the request without a generation: it is free only after
        // `finish`, and that is after the one ring operation that the request has at a time.
        let index = (completion.token.0 & !(0xff << 56)) as usize;
        let result = match u32::try_from(completion.result) {
            Ok(n) => Ok(n as usize),
            Err(_) => Err(-completion.result),
        };
        self.on_result(ring, index, result);
    }

    /// The next finished request. Also moves on what waited for room, for the helper thread, or
    /// for a delay to pass, so call it after every park.
    pub fn poll_done(&mut self, ring: &mut Ring) -> Option<Done> {
        self.move_on(ring);
        self.done.pop_front()
    }

    /// Returns the time at which [`poll_done`](Driver::poll_done) is due even though nothing
    /// completed.
    #[must_use]
    pub fn poll_deadline(&self) -> Option<Instant> {
        self.delayed
            .iter()
            .filter_map(|&i| match self.requests[i].state {
                State::Delayed { until, .. } => Some(until),
                State::Held => Some(self.now + HELD),
                // Its worker is woken.
                State::Turn => None,
                State::Ring | State::Helper | State::Flush | State::Stalled => None,
            })
            .min()
    }

    fn token(&self, index: usize) -> Token {
        Token((u64::from(self.config.tag) << 56) | index as u64)
    }

    /// Goes on with requests that waited for something else than the ring.
    ///
    /// Results of helpers come first, since they end requests; what is delayed comes before what is
    /// stalled, which it may join. Flushes are last: one call covers every request of its store
    /// that has come this far.
    fn move_on(&mut self, ring: &mut Ring) {
        for at in 0..self.helped.len() {
            let store = self.helped[at];
            let poll = |stores: &mut Slab<Attached>| {
                let helper = stores[store].helper.as_mut();
                helper.and_then(Offload::poll_result)
            };
            while let Some((token, result)) = poll(&mut self.stores) {
                self.on_extent(token.0 as usize, result);
            }
        }
        if !self.delayed.is_empty() {
            let now = self.now;
            // Taken as a whole: `begin` may delay a request again, which would otherwise be looked
            // at in this very round, and a long operation in memory would never let others be
            // served.
            for index in std::mem::take(&mut self.delayed) {
                let state = self.requests[index].state;
                match state {
                    State::Delayed { until, .. } if until > now => self.delayed.push(index),
                    State::Held if self.is_held(index) => self.delayed.push(index),
                    State::Turn if !self.takes_turn(ring, index) => self.delayed.push(index),
                    State::Delayed {
                        error: Some(error), ..
                    } => self.fail_on_purpose(index, error),
                    _ => self.begin(ring, index),
                }
            }
        }
        // As often as there are requests now: one that finds no room is put aside again.
        for _ in 0..self.stalled.len() {
            if let Some(index) = self.stalled.pop_front() {
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
    fn begin(&mut self, ring: &mut Ring, index: usize) {
        let request = &self.requests[index];
        let store = &self.stores[request.store.0].store;
        // A file's operations end with a completion; all others are done below, in this call.
        if let Medium::File { .. } = store.medium {
            self.follow_renewals(index);
            return self.issue(ring, index);
        }
        let (op, done, store) = (request.op, request.done, Arc::clone(store));
        let result = match &store.medium {
            Medium::File { .. } => unreachable!("a file's operations are put into the ring"),
            Medium::Ram(ram) => {
                let (offset, len) = plan::range(&op);
                match op {
                    BlockOp::Read { .. } => ram.read(offset, self.cut_all(index)),
                    BlockOp::Write { .. } => ram.write(offset, self.cut_all(index)),
                    BlockOp::Discard { .. } | BlockOp::WriteZeroes { .. } => {
                        // One UNMAP or WRITE SAME may name the whole disk, and the worker serves
                        // all its sessions with this thread.
                        let piece = (len - done).min(RAM_PIECE);
                        match op {
                            // Without UNMAP the initiator wants the space to stay allocated, so
                            // chunks are kept and filled.
                            BlockOp::WriteZeroes { unmap: false, .. } => {
                                ram.zero(offset + done, piece);
                            }
                            _ => ram.discard(offset + done, piece),
                        }
                        if done + piece < len {
                            return self.yield_to_others(index, done + piece);
                        }
                    }
                    BlockOp::Flush { .. }
                    | BlockOp::Status { .. }
                    | BlockOp::ChangeReservations(_) => {}
                }
                match op {
                    BlockOp::Status { .. } => {
                        let (allocation, len) = ram.status(offset, len);
                        StepResult::Status { allocation, len }
                    }
                    _ => StepResult::Done,
                }
            }
            Medium::Absent => match op {
                // Nothing has been written.
                BlockOp::Flush { .. } => StepResult::Done,
                _ => StepResult::Failed(BackendError::NotReady),
            },
            Medium::Null => match op {
                // Old bytes of the buffer may be another initiator's.
                BlockOp::Read { .. } => {
                    for piece in self.cut_all(index) {
                        piece.fill(0, piece.len(), 0);
                    }
                    StepResult::Done
                }
                BlockOp::Status { len, .. } => StepResult::Status {
                    allocation: Allocation::Deallocated,
                    len,
                },
                _ => StepResult::Done,
            },
        };
        let writes = matches!(
            op,
            BlockOp::Write { .. } | BlockOp::Discard { .. } | BlockOp::WriteZeroes { .. }
        );
        debug_assert!(
            !(writes && store.geometry().read_only),
            "the unit refuses these"
        );
        self.finish(index, result);
    }

    /// Returns whether no older request of the same bytes is in the way, of one that reads or changes
    /// the medium.
    fn takes_turn(&mut self, ring: &Ring, index: usize) -> bool {
        let request = &mut self.requests[index];
        let store = &self.stores[request.store.0].store;
        if store.keeps_blocks_whole() {
            return true;
        }
        let changes = !matches!(request.op, BlockOp::Read { .. });
        let turns = &store.turns;
        let bytes = match request.stage {
            Stage::Fill => plan::fill_piece(&request.op, request.done, fill_piece(&self.config)),
            _ => {
                let (offset, len) = plan::range(&request.op);
                offset..offset + len
            }
        };
        let join = || turns.join(bytes, changes, || ring.waker());
        request.turn.get_or_insert_with(join).has_come()
    }

    /// Ends the turn of a piece that is filled with zeroes. Reads of the others are older than the next
    /// one.
    fn leave_filled_piece(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if request.stage == Stage::Fill && request.done.is_multiple_of(fill_piece(&self.config)) {
            request.turn = None;
        }
    }

    /// Puts a long operation in memory aside after a piece of it, for other commands to be served.
    fn yield_to_others(&mut self, index: usize, done: u64) {
        let request = &mut self.requests[index];
        request.done = done;
        request.since = self.now;
        request.state = State::Delayed {
            until: self.now,
            error: None,
        };
        self.delayed.push(index);
    }

    fn is_held(&self, index: usize) -> bool {
        let request = &self.requests[index];
        let faults = &self.stores[request.store.0].store.faults;
        faults.as_ref().is_some_and(|f| f.holds(&request.op))
    }

    /// Whether a request was made that has ended: each leaves lists for the next one.
    #[cfg(test)]
    pub(super) fn has_ended_requests(&self) -> bool {
        !self.spare.is_empty()
    }

    /// As if requests of a store that hangs had all shared bounce buffers, and its own, and its
    /// helper.
    #[cfg(test)]
    pub(super) fn hang(&mut self, ring: &Ring, id: StoreId) -> std::sync::mpsc::Sender<()> {
        self.idle_bounces.clear();
        let store = &mut self.stores[id.0];
        store.bounce = OwnBounce::InUse;
        let (release, hangs) = std::sync::mpsc::channel();
        let mut helper = Offload::new(1, ring.waker(), &riser_reactor::SystemThreads).unwrap();
        let job = move || {
            let _ = hangs.recv();
            Ok((true, 0))
        };
        helper.submit(Token(0), job).unwrap();
        store.helper = Some(helper);
        release
    }

    fn fail_on_purpose(&mut self, index: usize, error: BackendError) {
        let request = &self.requests[index];
        if let BlockOp::Flush { .. } = request.op {
            self.stores[request.store.0]
                .store
                .on_flush_failed(libc::EIO, self.now);
        }
        self.fail(index, error, &"a fault on purpose");
    }

    /// The part of the buffer that a read or write moves.
    fn cut_all(&mut self, index: usize) -> &[MemSlice] {
        let request = &mut self.requests[index];
        let (start, len) = buffer_range(&request.op);
        let bounds = Bounds {
            pieces: usize::MAX,
            bytes: len,
        };
        if len > 0 {
            plan::cut_window(&request.data, start, len, None, bounds, &mut request.window);
        }
        &request.window
    }

    /// Puts the next ring operation of a request into the ring, or the request aside.
    fn issue(&mut self, ring: &mut Ring, index: usize) {
        self.leave_unsupported_stage(index);
        let moves = matches!(
            self.requests[index].stage,
            Stage::Transfer | Stage::Punch | Stage::Zero | Stage::Fill | Stage::Edges
        );
        if moves && !self.takes_turn(ring, index) {
            self.requests[index].state = State::Turn;
            return self.delayed.push(index);
        }
        let token = self.token(index);
        let request = &mut self.requests[index];
        let attached = &mut self.stores[request.store.0];
        let Medium::File {
            file,
            align,
            device,
            unit,
            in_memory,
            mapped,
            ..
        } = &attached.store.medium
        else {
            unreachable!("only files reach the ring");
        };
        let handle = attached.handle.as_ref().expect("files have handles");
        let (offset, len) = plan::range(&request.op);
        let (at, left) = plan::piece(&request.op, request.stage, *unit, request.done);
        // A range inside one of the device's blocks has nothing to punch or zero, and an operation
        // of length zero is an error to fallocate(2). Nor is a hole requested that the medium is
        // known to refuse: a discard leaves its blocks as they are then.
        let is_refused = request.stage == Stage::Punch && attached.lacks.punch;
        if (left == 0 && moves) || is_refused {
            return self.after_stage(ring, index);
        }
        let durable = match plan::is_durable(&request.op, attached.store.geometry().write_cache) {
            true => Durability::Durable,
            false => Durability::Cached,
        };
        let queued = match request.stage {
            // Not put into the ring by itself: one flush serves all requests of the store that
            // wait for one.
            Stage::SyncLast => {
                let store = request.store;
                // A flush copies nothing, and may take its time.
                request.turn = None;
                request.state = State::Flush;
                self.stores[store.0].to_flush.push(index);
                return self.flush(ring, store);
            }
            Stage::Punch => ring.submit_fallocate(handle, Fallocate::PunchHole, at, left, token),
            Stage::Zero => ring.submit_fallocate(handle, Fallocate::ZeroRange, at, left, token),
            Stage::Fill | Stage::Edges => {
                // The same zeroes stand several times in one list, so that a long range takes
                // fewer operations. Not durable each: the flush behind the stage makes all of them
                // so at once.
                let most = fill_piece(&self.config);
                let left = match request.stage {
                    Stage::Fill => plan::fill_piece(&request.op, request.done, most).end - at,
                    _ => left.min(most),
                };
                fill_window(&self.zeroes, left, &mut request.window);
                ring.submit_write(handle, at, &request.window, Durability::Cached, token)
            }
            Stage::Transfer => {
                let faults = attached.store.faults.as_ref();
                let config = (self.config, faults.map_or(usize::MAX, |f| f.most()));
                let (shared, own) = (&mut self.idle_bounces, &mut attached.bounce);
                // Only asked for where the memory is not aligned for direct I/O: most requests
                // need none.
                let idle = || own.take_or(shared, self.config.bounce);
                let Some(memory) = cut_transfer(request, *align, config, idle) else {
                    request.state = State::Stalled;
                    self.stalled.push_back(index);
                    return;
                };
                let list = memory
                    .as_ref()
                    .map_or(&request.window[..], std::slice::from_ref);
                // A copy that takes no longer than its way through the ring, where the kernel
                // has a thread of its own do a write. A write would wait for long changes
                // that are under way, and the worker with it.
                let is_read = matches!(request.op, BlockOp::Read { .. });
                let waits = || !is_read && attached.store.changing.load(Ordering::Relaxed) > 0;
                if *in_memory && len <= LONGEST_AT_ONCE.min(self.at_once) && !waits() {
                    let is_durable = durable == Durability::Durable;
                    let moved = match is_read {
                        true => sys::read_now(file, mapped.as_ref(), at, list),
                        false => sys::write_now(file, at, list, is_durable),
                    };
                    if let Some(moved) = moved {
                        self.at_once -= len;
                        return self.on_result(ring, index, moved);
                    }
                }
                match request.op {
                    BlockOp::Read { .. } => ring.submit_read(handle, at, list, token),
                    _ => ring.submit_write(handle, at, list, durable, token),
                }
            }
            // A block device does not say which of its blocks are in use, so all of them count as
            // mapped.
            Stage::Extent if *device => {
                let result = StepResult::Status {
                    allocation: Allocation::Mapped,
                    len,
                };
                return self.finish(index, result);
            }
            Stage::Extent => {
                let file = file.clone();
                // io_uring has no lseek(2), and the call may wait for the file system.
                return self.ask_helper(ring, index, file, offset, len);
            }
        };
        match queued {
            Ok(()) => {
                request.state = State::Ring;
                let is_long = request.stage != Stage::Transfer || len > LONGEST_AT_ONCE;
                let changes = moves && is_long && !matches!(request.op, BlockOp::Read { .. });
                if *in_memory && changes && !std::mem::replace(&mut request.is_changing, true) {
                    attached.store.changing.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(SubmitError::Full) => {
                // Others of the store can go on with it, while this request waits for a place in
                // the ring.
                self.free_bounce(index);
                self.requests[index].state = State::Stalled;
                self.stalled.push_back(index);
            }
            // Lists and lengths keep the ring's bounds, so this is a ring that has failed.
            Err(_) => self.finish(index, StepResult::Failed(BackendError::Internal)),
        }
    }

    /// The medium may have refused an operation of another request since this one was accepted.
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
        if std::mem::take(&mut request.is_changing) {
            attached.store.changing.fetch_sub(1, Ordering::Relaxed);
        }
        // No read of these bytes takes place before the request has ended.
        if let Medium::File {
            unit,
            mapped: Some(mapped),
            ..
        } = &attached.store.medium
            && matches!(request.stage, Stage::Punch | Stage::Zero)
        {
            let (at, left) = plan::piece(&request.op, request.stage, *unit, request.done);
            mapped.forget(at..at + left);
        }
        let at = plan::range(&request.op).0 + request.done;
        match (request.stage, result) {
            (Stage::Transfer | Stage::Fill | Stage::Edges, Ok(moved)) => {
                let align = match &attached.store.medium {
                    Medium::File { align, .. } => align.map_or(1, |a| a.offset as usize),
                    Medium::Ram(_) | Medium::Null | Medium::Absent => 1,
                };
                // It goes on at a whole block, which no other write divides then, and direct I/O at
                // one of the device's. What was moved beyond it is moved once more, with the same
                // bytes.
                let block = attached.store.geometry().block_size as usize;
                let unit = if moved < block { align } else { block };
                let moved = moved - moved % unit;
                if moved == 0 {
                    // The end of a file that became shorter.
                    let error = BackendError::Medium { offset: Some(at) };
                    return self.fail(index, error, &"the file is shorter");
                }
                self.settle_bounce(index, moved);
                self.requests[index].done += moved as u64;
                self.leave_filled_piece(index);
                self.requests[index].since = self.now;
                if self.requests[index].cancelled {
                    self.finish(index, StepResult::Failed(BackendError::Aborted));
                } else {
                    self.issue(ring, index);
                }
            }
            (Stage::SyncLast, result) => {
                let store = request.store;
                self.on_flushed(ring, store, result.err());
            }
            (Stage::Punch | Stage::Zero, Ok(_)) => self.after_stage(ring, index),
            (Stage::Punch, Err(libc::EOPNOTSUPP)) => {
                // For this attachment: asking again with each command would cost a system call
                // that is known to fail.
                attached.lacks.punch = true;
                self.issue(ring, index);
            }
            (Stage::Zero, Err(libc::EOPNOTSUPP)) => {
                attached.lacks.zero = true;
                self.issue(ring, index);
            }
            (Stage::Transfer, Err(errno)) if is_suspect => {
                if attached.is_sync_shared || attached.renewals != request.renewals {
                    // No flush would report it once more.
                    attached.store.on_flush_failed(errno, self.now);
                }
                (request.failed, request.stage) = (Some(errno), Stage::SyncLast);
                self.free_bounce(index);
                self.issue(ring, index);
            }
            // Also a ring operation that was cancelled, as ECANCELED: it is aborted, not failed.
            (_, Err(errno)) => {
                let error = io::Error::from_raw_os_error(errno);
                self.fail(index, from_errno(errno, at), &error);
            }
            (Stage::Extent, Ok(_)) => unreachable!("extents are the helper's"),
        }
    }

    /// Whether the error of an operation may be that of data which others have written: a durable
    /// write ends with a sync of its descriptor. The kernel takes it for reported then, also to
    /// the process that opens the file after this one. A flush by the descriptor for flushes reports
    /// it once more, and it is remembered.
    fn may_report_a_loss(&self, index: usize, errno: i32) -> bool {
        let request = &self.requests[index];
        let store = &self.stores[request.store.0].store;
        plan::is_durable_write(&request.op, store.geometry().write_cache)
            && errno != libc::ECANCELED
            && store.flush_failure().is_none()
    }

    /// Opens another descriptor for flushes once a failure was cleared: the old one may still carry
    /// the error of that time, which the administrator has dealt with already. And while it is that
    /// of writes. Durable writes under way may have reported a loss of which the new one knows
    /// nothing, so their errors count as such.
    fn renew_sync(&mut self, store: StoreId) {
        let attached = &mut self.stores[store.0];
        let clears = attached.store.flush_clears();
        let is_cleared = attached.clears != clears;
        if !is_cleared && !attached.is_sync_shared {
            return;
        }
        let (sync, is_shared) = open_sync(&attached.store.medium);
        if is_cleared || !is_shared {
            (attached.sync, attached.is_sync_shared) = (sync, is_shared);
            attached.clears = clears;
            attached.renewals = attached.renewals.wrapping_add(1);
        }
    }

    /// Before a request's first operation in the ring, which may be long after it was submitted.
    fn follow_renewals(&mut self, index: usize) {
        let request = &self.requests[index];
        let store = request.store;
        let volatile = self.stores[store.0].store.geometry().write_cache;
        if plan::is_durable_write(&request.op, volatile) {
            self.renew_sync(store);
        }
        self.requests[index].renewals = self.stores[store.0].renewals;
    }

    /// Starts a flush for all that wait for one, unless one is under way.
    fn flush(&mut self, ring: &mut Ring, store: StoreId) {
        let Some(&first) = self.stores[store.0].to_flush.first() else {
            return;
        };
        let token = self.token(first);
        let attached = &mut self.stores[store.0];
        // Those that came after its start must not be answered by it: the kernel may have passed
        // their pages already.
        if !attached.flushing.is_empty() {
            return;
        }
        self.renew_sync(store);
        let attached = &mut self.stores[store.0];
        let sync = attached.sync.as_ref().expect("files have descriptors");
        match ring.submit_sync(sync, SyncKind::Data, token) {
            Ok(()) => std::mem::swap(&mut attached.flushing, &mut attached.to_flush),
            Err(SubmitError::Full) => self.flush_stalled = true,
            // As for any other operation: a ring that has failed.
            Err(_) => {
                for index in std::mem::take(&mut attached.to_flush) {
                    self.finish(index, StepResult::Failed(BackendError::Internal));
                }
            }
        }
    }

    /// A flush is done; its success counts only where none has failed.
    fn on_flushed(&mut self, ring: &mut Ring, store: StoreId, errno: Option<i32>) {
        let attached = &mut self.stores[store.0];
        let mut served = std::mem::take(&mut attached.flushing);
        // The failure is stored before any request is answered, so that no flush of another worker
        // that ends meanwhile is taken for a success.
        if let Some(errno) = errno {
            let why = std::io::Error::from_raw_os_error(errno);
            attached
                .store
                .count_error(self.now, from_errno(errno, 0), &why);
            attached.store.on_flush_failed(errno, self.now);
        }
        // Asked for even after a success: another worker's descriptor may have reported what this
        // one's did not.
        let failure = attached.store.flush_failure();
        for index in served.drain(..) {
            let request = &self.requests[index];
            let at = plan::range(&request.op).0;
            match (request.failed, failure) {
                (Some(errno), _) => {
                    let why = io::Error::from_raw_os_error(errno);
                    self.fail(index, from_errno(errno, at + request.done), &why);
                }
                (None, None) => self.after_stage(ring, index),
                (None, Some(failure)) => {
                    let error = from_errno(failure.errno, at);
                    self.finish(index, StepResult::Failed(error));
                }
            }
        }
        let attached = &mut self.stores[store.0];
        // The list keeps its memory for the next flush. `after_stage` may have begun one, whose
        // list must stay.
        if attached.flushing.is_empty() {
            attached.flushing = served;
        }
        self.flush(ring, store);
    }

    /// Moves a request whose stage is wholly done to the next, or to its end.
    fn after_stage(&mut self, ring: &mut Ring, index: usize) {
        let request = &mut self.requests[index];
        let volatile = self.stores[request.store.0].store.geometry().write_cache;
        match plan::next_stage(&request.op, request.stage, volatile) {
            None => self.finish(index, StepResult::Done),
            Some(_) if request.cancelled => {
                self.finish(index, StepResult::Failed(BackendError::Aborted));
            }
            Some(stage) => {
                request.stage = stage;
                request.done = 0;
                self.issue(ring, index);
            }
        }
    }

    fn ask_helper(&mut self, ring: &Ring, index: usize, file: Handle, offset: u64, len: u64) {
        let store = self.requests[index].store.0;
        let attached = &mut self.stores[store];
        let helper = &mut attached.helper;
        if helper.is_none() {
            // One for each store, with room for all requests: a file system that hangs holds up
            // its own thread alone.
            let threads = attached.store.host().threads();
            *helper = Offload::new(self.config.depth, ring.waker(), threads).ok();
            self.helped.extend(helper.is_some().then_some(store));
        }
        let job = move || sys::extent(&file, offset, len);
        let asked = helper
            .as_mut()
            .is_some_and(|h| h.submit(Token(index as u64), job).is_ok());
        if asked {
            self.requests[index].state = State::Helper;
        } else {
            // No helper can be had: a backend may always report that it does not know.
            self.on_extent(index, Ok((true, len)));
        }
    }

    fn on_extent(&mut self, index: usize, result: io::Result<(bool, u64)>) {
        let request = &self.requests[index];
        let (offset, len) = plan::range(&request.op);
        let block = u64::from(self.stores[request.store.0].store.geometry().block_size);
        let answer = match result {
            _ if request.cancelled => StepResult::Failed(BackendError::Aborted),
            Ok((true, extent)) => StepResult::Status {
                allocation: Allocation::Mapped,
                len: extent.next_multiple_of(block).min(len),
            },
            // A block of which a part is data is mapped.
            Ok((false, extent)) if extent < block => StepResult::Status {
                allocation: Allocation::Mapped,
                len: block.min(len),
            },
            Ok((false, extent)) => StepResult::Status {
                allocation: Allocation::Deallocated,
                len: extent - extent % block,
            },
            // Some file systems do not know.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                StepResult::Status {
                    allocation: Allocation::Mapped,
                    len,
                }
            }
            Err(e) => StepResult::Failed(from_errno(e.raw_os_error().unwrap_or(libc::EIO), offset)),
        };
        self.finish(index, answer);
    }

    /// Copies what a bounced read brought to where it belongs, and frees the bounce buffer.
    fn settle_bounce(&mut self, index: usize, moved: usize) {
        let request = &mut self.requests[index];
        if let (Some(bounce), BlockOp::Read { .. }) = (&request.bounce, request.op) {
            let mut left = moved;
            // A short read fills only the beginning of the window; the rest of the buffer keeps
            // what it has until the next operation brings it.
            let mut pieces = Vec::new();
            for piece in &request.window {
                let take = piece.len().min(left);
                pieces.extend(piece.slice(0..take));
                left -= take;
            }
            plan::copy_pieces(&pieces, &bounce.first(moved), false);
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

    /// Ends a request that the medium has failed, and says so.
    fn fail(&mut self, index: usize, error: BackendError, why: &dyn std::fmt::Display) {
        let request = &self.requests[index];
        let attached = &mut self.stores[request.store.0];
        if attached.store.count_error(self.now, error, why) {
            let (offset, len) = plan::range(&request.op);
            let (backend, op) = (attached.store.name(), plan::name(&request.op));
            let now = self.now;
            warn_limited!(attached.complaints, now, backend, op, offset, len, %why, "a backend fails");
        }
        self.finish(index, StepResult::Failed(error));
    }

    /// Logs that a store works again, at most once in ten seconds, with the number of its failures
    /// that were not logged.
    fn report_recovery(&mut self, id: StoreId) {
        let attached = &mut self.stores[id.0];
        let suppressed = attached.complaints.take_suppressed();
        let suppressed = (suppressed > 0).then_some(suppressed);
        let backend = attached.store.name();
        tracing::info!(backend, suppressed, "a backend works again");
    }

    fn finish(&mut self, index: usize, result: StepResult) {
        self.free_bounce(index);
        let request = self.requests.remove(index);
        if !matches!(result, StepResult::Failed(_)) {
            let store = &self.stores[request.store.0].store;
            if note_success(store, self.now, &request.op) {
                self.report_recovery(request.store);
            }
        }
        for mut list in [request.data, request.window] {
            // Drops the references to the command's memory here, not when the list is used again,
            // or a session's buffers would outlive the session.
            list.clear();
            self.spare.push(list);
        }
        self.stores[request.store.0].requests -= 1;
        self.done.push_back(Done {
            user: request.user,
            result,
        });
    }
}
