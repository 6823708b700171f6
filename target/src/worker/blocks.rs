//! Block operations for all connections of a worker: attached backends, operations waiting for the
//! driver, and flushing all backends.
//!
//! If a backend is blocked, it can only use the number of operations allowed by the driver. Any
//! more are added to a separate queue, so that other backends are not affected.

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
use crate::worker::mail::OldestRequest;

/// User value for flush operations of the worker.
const FLUSH: u64 = u64::MAX;

/// Block operation for a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRequest {
    pub(super) owner: Owner,
    pub(super) store: StoreId,
    pub(super) op: BlockOp,
}

/// Completed block operation.
#[derive(Debug)]
pub(super) enum BlockEnd {
    /// Operation of a task.
    Task(Owner, StepResult),
    /// Part of a flush of all backends (see [`Blocks::take_flush_result`]).
    Flush,
}

/// Backend that was removed from the configuration. We can only detach it when its units are no
/// longer used by commands or sessions.
#[derive(Debug)]
struct Leaving {
    place: usize,
    store: StoreId,
    units: Vec<Weak<Unit>>,
}

/// Current flush of all backends.
#[derive(Debug)]
struct Flush {
    /// Number set by the server.
    number: u64,
    left: usize,
    failed: Option<String>,
}

/// Block operations and backends of a worker.
#[derive(Debug)]
pub(super) struct Blocks {
    driver: Driver,
    /// Backends by catalog index.
    stores: Vec<Option<StoreId>>,
    leaving: Vec<Leaving>,
    waiting: Backlog,
    flush: Option<Flush>,
    /// Data of the operation being submitted, used to avoid allocations.
    slices: Vec<MemSlice>,
}

impl Blocks {
    /// Attaches the backends of a catalog.
    ///
    /// # Errors
    /// Returns an error if the driver can't allocate memory.
    pub(super) fn new(ring: &mut Ring, now: Instant, catalog: &Catalog) -> io::Result<Self> {
        let config = DriverConfig {
            depth: Slots::of(ring.capacity()).blocks,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(ring.waker(), ring, now, config)?;
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

    /// Sets the current time.
    pub(super) fn begin_round(&mut self, now: Instant) {
        self.driver.begin_round(now);
    }

    /// Attaches the backends of a new catalog, and marks previous backends that should be detached.
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
                        // We can check the units to see if there is still a session or command.
                        units: old.units_on(place).map(Arc::downgrade).collect(),
                    });
                }
                _ => {}
            }
        }
    }

    /// Detaches removed backends that are not used by any task.
    pub(super) fn detach_unused(&mut self, ring: &mut Ring) {
        let (driver, stores) = (&mut self.driver, &mut self.stores);
        self.leaving.retain(|leaving| {
            let is_idle = leaving.units.iter().all(|u| u.strong_count() == 0);
            let is_gone = is_idle && driver.detach(ring, leaving.store);
            if is_gone {
                stores[leaving.place] = None;
            }
            !is_gone
        });
    }

    /// Returns true if there are removed backends that are still attached.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Returns the backend of a unit.
    ///
    /// # Panics
    /// Panics if it is not attached. A backend stays attached while its unit has tasks.
    pub(super) fn store_of(&self, catalog: &Catalog, unit: UnitIdx) -> StoreId {
        self.stores[catalog.unit_stores[unit.0 as usize]]
            .expect("a backend stays attached while a unit has tasks")
    }

    /// Submits a block operation to the driver. If there are other operations waiting for this
    /// backend, it is added to the queue.
    #[inline]
    pub(super) fn submit(&mut self, ring: &mut Ring, conns: &Conns<Fabric>, request: BlockRequest) {
        // Even if there is room now, we should keep the order of operations for this backend.
        let waits = self.waiting.has(request.store);
        if waits || !submit(&mut self.driver, ring, conns, &mut self.slices, &request) {
            self.waiting.push(request);
        }
    }

    /// Submits operations that were waiting for room in the driver.
    pub(super) fn retry(&mut self, ring: &mut Ring, conns: &Conns<Fabric>) {
        let (driver, slices) = (&mut self.driver, &mut self.slices);
        self.waiting
            .retry(|request| submit(driver, ring, conns, slices, request));
    }

    /// Aborts the block operation of a task. Returns true if it was not started, so it is already
    /// complete.
    pub(super) fn abort(&mut self, ring: &mut Ring, owner: Owner) -> bool {
        let is_over = self.waiting.remove(owner);
        if !is_over {
            self.driver.cancel(ring, owner.user());
        }
        is_over
    }

    /// Handles a completion if it belongs to a block operation.
    pub(super) fn handle_completion(&mut self, ring: &mut Ring, completion: &Completion) -> bool {
        let is_own = self.driver.owns(completion.token);
        if is_own {
            self.driver.handle_completion(ring, completion);
        }
        is_own
    }

    /// Returns the next completed block operation.
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

    /// Returns the next timeout.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.driver.poll_deadline()
    }

    /// Returns whether there are any pending requests.
    pub(super) fn has_requests(&self) -> bool {
        self.driver.progress().next().is_some()
    }

    /// Returns the oldest pending request of each backend.
    pub(super) fn oldest_requests(&self) -> Vec<OldestRequest> {
        let mut oldest = BTreeMap::new();
        for (store, since) in self.driver.progress() {
            let known = oldest.entry(store).or_insert(since);
            *known = since.min(*known);
        }
        let requests = oldest.into_iter().map(|(store, since)| OldestRequest {
            store: Arc::downgrade(&self.driver.store(store).store),
            backend: self.driver.store(store).store.label().to_owned(),
            since,
        });
        requests.collect()
    }

    /// Starts to flush all backends of a catalog to stable storage.
    ///
    /// A previous flush may still be in flight if the server stopped waiting for the result. The
    /// requests it is still waiting for are added to this flush. Results of its other requests are
    /// ignored.
    pub(super) fn begin_flush(&mut self, ring: &mut Ring, catalog: &Catalog, number: u64) {
        let mut flush = Flush {
            number,
            left: self.flush.take().map_or(0, |previous| previous.left),
            failed: None,
        };
        for (store, id) in catalog.stores.iter().zip(&self.stores) {
            let (Some(store), Some(id)) = (store, *id) else {
                continue;
            };
            // Read-only backends don't need a flush.
            if store.geometry().read_only {
                continue;
            }
            let op = BlockOp::Flush {
                offset: 0,
                len: store.capacity(),
            };
            let op = self.driver.store(id).command(op);
            match self.driver.submit(ring, id, op, &[], FLUSH) {
                Ok(()) => flush.left += 1,
                Err(error) => flush.failed = Some(error.to_string()),
            }
        }
        self.flush = Some(flush);
    }

    /// Returns the number and result of the flush if all backends have completed it.
    pub(super) fn take_flush_result(&mut self) -> Option<(u64, Result<(), String>)> {
        let flush = self.flush.take_if(|flush| flush.left == 0)?;
        Some((flush.number, flush.failed.map_or(Ok(()), Err)))
    }
}

/// Submits a block operation to the driver. Returns false if there is no room. If the connection
/// was closed, the operation is dropped.
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
        match driver.store(store).layout() {
            None => buffer.put_slices(slices),
            Some(layout) => {
                let parts = layout.parts(&op);
                parts.for_each(|part| slices.extend(buffer.slices(part)));
            }
        }
    }
    let op = driver.store(store).command(op);
    let is_taken = driver.submit(ring, store, op, slices, owner.user());
    // The driver has its own handles: the buffer is returned to the pool when they are dropped.
    slices.clear();
    is_taken.is_ok()
}

/// Block operations waiting for room in the driver, by backend. Must not contain empty queues.
#[derive(Debug, Default)]
struct Backlog(BTreeMap<StoreId, VecDeque<BlockRequest>>);

impl Backlog {
    /// Returns true if there are operations waiting for this backend.
    fn has(&self, store: StoreId) -> bool {
        self.0.contains_key(&store)
    }

    fn push(&mut self, request: BlockRequest) {
        self.0.entry(request.store).or_default().push_back(request);
    }

    /// Removes the operation of a task. Returns false if there is none.
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

    /// Submits pending operations in order for each backend, until there is no room.
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
    fn full_backend_delays_no_other_backend() {
        let mut backlog = Backlog::default();
        for (task, store) in [(1, 0), (2, 1), (3, 0), (4, 1), (5, 2)] {
            backlog.push(request(task, store));
        }
        let has_room = |request: &BlockRequest| request.store != StoreId::test(0);
        assert_eq!(retry(&mut backlog, has_room), [2, 4, 5]);
        assert!(backlog.has(StoreId::test(0)) && !backlog.has(StoreId::test(1)));
        // There is only room for a single operation, so the second one for this backend has to
        // wait.
        let is_first = |request: &BlockRequest| request.owner.task.0 == 1;
        assert_eq!(retry(&mut backlog, is_first), [1]);
        assert_eq!(retry(&mut backlog, |_| true), [3]);
        assert!(!backlog.has(StoreId::test(0)));
    }

    #[test]
    fn waiting_operation_can_be_removed() {
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
