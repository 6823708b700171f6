//! Block operations of a worker's connections: the backends that it has attached, what waits for
//! room in the driver, and the flush of all backends.
//!
//! A backend that hangs may have as many operations as the driver gives it. What comes for it then
//! waits in a queue of its own, so it stops none of the others.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use riser_memory::MemSlice;
use riser_reactor::{Completion, Ring};
use riser_scsi::step::{BlockOp, StepResult};

use super::conns::Conns;
use super::fabrics::Fabric;
use super::slots::Slots;
use super::work::Owner;
use crate::backend::{Driver, DriverConfig, StoreId};
use crate::fabric::{Unit, UnitIdx};
use crate::sessions::catalog::Catalog;

/// The driver's name for flushes of the worker itself.
const FLUSH: u64 = u64::MAX;

/// A block operation of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRequest {
    pub(super) owner: Owner,
    pub(super) store: StoreId,
    pub(super) op: BlockOp,
}

/// The end of a block operation.
#[derive(Debug)]
pub(super) enum BlockEnd {
    /// One of a task.
    Task(Owner, StepResult),
    /// One of the flush of all backends ([`Blocks::take_flush_result`]).
    Flush,
}

/// A backend that is no longer served. It stays attached while commands or sessions hold its units.
#[derive(Debug)]
struct Leaving {
    place: usize,
    store: StoreId,
    units: Vec<Weak<Unit>>,
}

/// A flush of all backends under way.
#[derive(Debug)]
struct Flush {
    left: usize,
    failed: Option<String>,
}

/// The block operations of a worker, and its backends.
#[derive(Debug)]
pub(super) struct Blocks {
    driver: Driver,
    /// Backends by their places in the catalog.
    stores: Vec<Option<StoreId>>,
    leaving: Vec<Leaving>,
    waiting: Backlog,
    flush: Option<Flush>,
    /// The data of the operation that is being submitted, kept so that none allocates.
    slices: Vec<MemSlice>,
}

impl Blocks {
    /// Attaches the backends of a catalog.
    ///
    /// # Errors
    /// There is no memory for the driver.
    pub(super) fn new(ring: &mut Ring, now: Instant, catalog: &Catalog) -> io::Result<Self> {
        let config = DriverConfig {
            depth: Slots::of(ring.capacity()).blocks,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(ring, now, config)?;
        let attach = |store: &Option<_>| Some(driver.attach(ring, Arc::clone(store.as_ref()?)));
        let stores = catalog.stores.iter().map(attach).collect();
        Ok(Self {
            driver,
            stores,
            leaving: Vec::new(),
            waiting: Backlog::default(),
            flush: None,
            slices: Vec::new(),
        })
    }

    /// Takes the time of a round.
    pub(super) fn begin_round(&mut self, now: Instant) {
        self.driver.begin_round(now);
    }

    /// Attaches the backends of a new catalog, and notes those that only the one before has.
    pub(super) fn follow(&mut self, ring: &mut Ring, old: &Catalog, new: &Catalog) {
        self.stores.resize(new.stores.len(), None);
        for (place, store) in new.stores.iter().enumerate() {
            match (store, self.stores[place]) {
                (Some(store), None) => {
                    self.stores[place] = Some(self.driver.attach(ring, Arc::clone(store)));
                }
                (None, Some(store)) if !self.leaving.iter().any(|l| l.place == place) => {
                    self.leaving.push(Leaving {
                        place,
                        store,
                        // The units themselves say when the last session and command is gone.
                        units: old.units_on(place).map(Arc::downgrade).collect(),
                    });
                }
                _ => {}
            }
        }
    }

    /// Detaches backends that are no longer served and that no task needs.
    pub(super) fn detach_unused(&mut self) {
        let (driver, stores) = (&mut self.driver, &mut self.stores);
        self.leaving.retain(|leaving| {
            let is_idle = leaving.units.iter().all(|u| u.strong_count() == 0);
            let is_gone = is_idle && driver.detach(leaving.store);
            if is_gone {
                stores[leaving.place] = None;
            }
            !is_gone
        });
    }

    /// Whether backends are attached that are no longer served.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Returns the backend of a unit of a catalog.
    ///
    /// # Panics
    /// If it is not attached: a backend stays attached while a unit has tasks.
    pub(super) fn store_of(&self, catalog: &Catalog, unit: UnitIdx) -> StoreId {
        self.stores[catalog.unit_stores[unit.0 as usize]]
            .expect("a backend stays attached while a unit has tasks")
    }

    /// Hands a block operation to the driver, behind those of its backend that wait for room.
    pub(super) fn submit(&mut self, ring: &mut Ring, conns: &Conns<Fabric>, request: BlockRequest) {
        // One that has room now may not overtake those of its backend that have waited.
        let waits = self.waiting.has(request.store);
        if waits || !submit(&mut self.driver, ring, conns, &mut self.slices, &request) {
            self.waiting.push(request);
        }
    }

    /// Hands over the block operations that waited for room.
    pub(super) fn retry(&mut self, ring: &mut Ring, conns: &Conns<Fabric>) {
        let (driver, slices) = (&mut self.driver, &mut self.slices);
        self.waiting
            .retry(|request| submit(driver, ring, conns, slices, request));
    }

    /// Asks that a task's block operation ends soon; `true` if it had not begun, and is over.
    pub(super) fn abort(&mut self, ring: &mut Ring, owner: Owner) -> bool {
        let is_over = self.waiting.remove(owner);
        if !is_over {
            self.driver.cancel(ring, owner.user());
        }
        is_over
    }

    /// Takes a completion of the ring, if it is of a block operation.
    pub(super) fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) -> bool {
        let is_own = self.driver.owns(completion.token);
        if is_own {
            self.driver.handle_completion(ring, completion);
        }
        is_own
    }

    /// Takes the next block operation that has ended.
    pub(super) fn poll_end(&mut self, ring: &mut Ring) -> Option<BlockEnd> {
        let done = self.driver.poll_done(ring)?;
        if done.user != FLUSH {
            return Some(BlockEnd::Task(Owner::of(done.user), done.result));
        }
        if let Some(flush) = &mut self.flush {
            flush.left -= 1;
            if let StepResult::Failed(error) = done.result {
                flush.failed = Some(format!("{error:?}"));
            }
        }
        Some(BlockEnd::Flush)
    }

    /// Returns the time at which something ends without a completion.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.driver.poll_deadline()
    }

    /// Makes durable what was written, on every backend of a catalog.
    pub(super) fn begin_flush(&mut self, ring: &mut Ring, catalog: &Catalog) {
        let mut flush = Flush {
            left: 0,
            failed: None,
        };
        for (store, id) in catalog.stores.iter().zip(&self.stores) {
            let (Some(store), Some(id)) = (store, *id) else {
                continue;
            };
            // Nothing was written there.
            if store.geometry().read_only {
                continue;
            }
            let op = BlockOp::Flush {
                offset: 0,
                len: store.capacity(),
            };
            match self.driver.submit(ring, id, op, &[], FLUSH) {
                Ok(()) => flush.left += 1,
                Err(error) => flush.failed = Some(error.to_string()),
            }
        }
        self.flush = Some(flush);
    }

    /// Takes the result of the flush, once every backend has ended it.
    pub(super) fn take_flush_result(&mut self) -> Option<Result<(), String>> {
        let flush = self.flush.take_if(|flush| flush.left == 0)?;
        Some(flush.failed.map_or(Ok(()), Err))
    }
}

/// Hands a block operation to the driver; `false` if it has no room. That of a connection which is
/// gone is dropped.
fn submit(
    driver: &mut Driver,
    ring: &mut Ring,
    conns: &Conns<Fabric>,
    slices: &mut Vec<MemSlice>,
    request: &BlockRequest,
) -> bool {
    let BlockRequest { owner, store, op } = *request;
    let Some(conn) = conns.get(owner.conn) else {
        return true;
    };
    slices.clear();
    if let Some(buffer) = conn.fabric.data_buffer(owner.task) {
        buffer.put_slices(slices);
    }
    let is_taken = driver.submit(ring, store, op, slices, owner.user());
    // The driver keeps handles of its own: the buffer goes back to the pool with the last of them.
    slices.clear();
    is_taken.is_ok()
}

/// Block operations that wait for room in the driver, by backend; no queue is empty.
#[derive(Debug, Default)]
struct Backlog(BTreeMap<StoreId, VecDeque<BlockRequest>>);

impl Backlog {
    /// Whether operations of a backend wait.
    fn has(&self, store: StoreId) -> bool {
        self.0.contains_key(&store)
    }

    fn push(&mut self, request: BlockRequest) {
        self.0.entry(request.store).or_default().push_back(request);
    }

    /// Removes the operation of a task; whether there was one.
    fn remove(&mut self, owner: Owner) -> bool {
        let found = self.0.iter_mut().find_map(|(store, queue)| {
            let at = queue.iter().position(|waiting| waiting.owner == owner)?;
            queue.remove(at);
            Some((*store, queue.is_empty()))
        });
        if let Some((store, true)) = found {
            self.0.remove(&store);
        }
        found.is_some()
    }

    /// Submits what waits: of each backend in order, up to the first that finds no room.
    fn retry(&mut self, mut submit: impl FnMut(&BlockRequest) -> bool) {
        self.0.retain(|_, queue| {
            while queue.front().is_some_and(&mut submit) {
                queue.pop_front();
            }
            !queue.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::TaskIdx;
    use crate::worker::conns::ConnKey;

    fn request(task: u16, store: usize) -> BlockRequest {
        BlockRequest {
            owner: owner(task),
            store: StoreId::test(store),
            op: BlockOp::Flush { offset: 0, len: 0 },
        }
    }

    fn owner(task: u16) -> Owner {
        Owner {
            conn: ConnKey(0),
            task: TaskIdx(task),
        }
    }

    fn retry(backlog: &mut Backlog, has_room: impl Fn(&BlockRequest) -> bool) -> Vec<u16> {
        let mut taken = Vec::new();
        backlog.retry(|request| {
            let has_room = has_room(request);
            taken.extend(has_room.then_some(request.owner.task.0));
            has_room
        });
        taken
    }

    #[test]
    fn a_backend_without_room_holds_up_none_of_the_others() {
        let mut backlog = Backlog::default();
        for (task, store) in [(1, 0), (2, 1), (3, 0), (4, 1), (5, 2)] {
            backlog.push(request(task, store));
        }
        let has_room = |request: &BlockRequest| request.store != StoreId::test(0);
        assert_eq!(retry(&mut backlog, has_room), [2, 4, 5]);
        assert!(backlog.has(StoreId::test(0)) && !backlog.has(StoreId::test(1)));
        // Room for one only: the second of the backend stays behind.
        let is_first = |request: &BlockRequest| request.owner.task.0 == 1;
        assert_eq!(retry(&mut backlog, is_first), [1]);
        assert_eq!(retry(&mut backlog, |_| true), [3]);
        assert!(!backlog.has(StoreId::test(0)));
    }

    #[test]
    fn an_operation_that_waits_can_be_taken_out() {
        let mut backlog = Backlog::default();
        for (task, store) in [(1, 0), (2, 0), (3, 1)] {
            backlog.push(request(task, store));
        }
        assert!(backlog.remove(owner(3)) && !backlog.remove(owner(3)));
        assert!(!backlog.has(StoreId::test(1)), "no queue stays empty");
        assert!(backlog.remove(owner(1)));
        assert_eq!(retry(&mut backlog, |_| true), [2]);
    }
}
