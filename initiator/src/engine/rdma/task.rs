//! Commands on a connection.

use arrayvec::ArrayVec;
use riser_transport::mr_pool::{MrState, PooledMr};
use riser_transport::verbs::RKey;

use crate::request::RequestId;

/// A command on the wire, with at most `R` regions.
pub(super) struct Task<const R: usize> {
    pub(super) request: RequestId,
    pub(super) regions: ArrayVec<PooledMr, R>,
    /// Send-queue entries reserved until it completes.
    entries: u32,
    /// The SEND has completed.
    is_sent: bool,
    is_retiring: bool,
}

impl<const R: usize> Task<R> {
    fn is_over(&self) -> bool {
        let is_idle = |r: &PooledMr| r.state() == MrState::Idle;
        self.is_retiring && self.is_sent && self.regions.iter().all(is_idle)
    }

    /// Starts to retire the memory; returns the regions with valid keys.
    pub(super) fn retire(&mut self) -> impl Iterator<Item = &mut PooledMr> {
        self.is_retiring = true;
        let works = |r: &&mut PooledMr| r.state() == MrState::Registered;
        self.regions.iter_mut().filter(works)
    }
}

/// A command that will be posted or abandoned.
pub(in crate::engine) struct NewTask<const R: usize> {
    pub(in crate::engine) slot: u16,
    pub(super) task: Task<R>,
}

impl<const R: usize> NewTask<R> {
    pub(in crate::engine) fn regions(&self) -> &[PooledMr] {
        &self.task.regions
    }
}

/// The commands on a connection, in slots.
pub(super) struct Tasks<const R: usize> {
    tasks: Vec<Option<Task<R>>>,
    /// Slot of each request's task, indexed by request. Bound: the requests of the session.
    slots: Vec<Option<u16>>,
    free: Vec<u16>,
    /// Available send-queue entries for commands.
    entries: u32,
}

impl<const R: usize> Tasks<R> {
    pub(super) fn new(commands: u16, entries: u32) -> Self {
        Self {
            tasks: (0..commands).map(|_| None).collect(),
            slots: Vec::new(),
            free: (0..commands).rev().collect(),
            entries,
        }
    }

    /// Allocates a slot and send-queue entries for a command with this number of regions. Returns
    /// `None` if not available.
    pub(super) fn allocate_task(
        &mut self,
        request: RequestId,
        regions: usize,
    ) -> Option<NewTask<R>> {
        let entries = 2 * regions as u32 + 1;
        if self.entries < entries {
            return None;
        }
        let slot = self.free.pop()?;
        self.entries -= entries;
        let task = Task {
            request,
            regions: ArrayVec::new(),
            entries,
            is_sent: false,
            is_retiring: false,
        };
        Some(NewTask { slot, task })
    }

    /// Stores a posted command.
    pub(super) fn insert(&mut self, new: NewTask<R>) {
        let NewTask { slot, task } = new;
        let request = task.request.0 as usize;
        if request >= self.slots.len() {
            self.slots.resize(request + 1, None);
        }
        self.slots[request] = Some(slot);
        self.tasks[usize::from(slot)] = Some(task);
    }

    /// Frees the slot and entries of a command that was not posted; returns its regions.
    pub(super) fn abandon(&mut self, new: NewTask<R>) -> ArrayVec<PooledMr, R> {
        self.entries += new.task.entries;
        self.free.push(new.slot);
        new.task.regions
    }

    /// Returns the slot of a request's command.
    pub(super) fn slot(&self, request: RequestId) -> Option<u16> {
        *self.slots.get(request.0 as usize)?
    }

    pub(super) fn get_mut(&mut self, slot: u16) -> Option<&mut Task<R>> {
        self.tasks.get_mut(usize::from(slot))?.as_mut()
    }

    /// Called when the SEND of a slot's command completed.
    pub(super) fn on_sent(&mut self, slot: u16) {
        if let Some(task) = self.get_mut(slot) {
            task.is_sent = true;
        }
    }

    /// Called when the invalidation of a slot's key completed, which implies that the SEND before
    /// it has completed, too. If the target had already invalidated the key, another command with a
    /// valid key may be using the slot now.
    pub(super) fn on_invalidated(&mut self, slot: u16, key: RKey) {
        if let Some(task) = self.get_mut(slot)
            && task.regions.iter_mut().any(|r| r.on_invalidated(key))
        {
            task.is_sent = true;
        }
    }

    /// Called when the target invalidated a key with a response; returns false if this is not a key
    /// of ours.
    pub(super) fn on_remote_invalidated(&mut self, key: RKey) -> bool {
        let tasks = self.tasks.iter_mut().flatten();
        let mut regions = tasks.flat_map(|task| &mut task.regions);
        regions.any(|region| region.on_invalidated(key))
    }

    /// Frees a slot if its command is retired, its SEND has completed, and all keys are invalid.
    pub(super) fn finish(&mut self, slot: u16) -> Option<Task<R>> {
        let task = self.tasks.get_mut(usize::from(slot))?;
        let task = task.take_if(|task| task.is_over())?;
        self.slots[task.request.0 as usize] = None;
        self.entries += task.entries;
        self.free.push(slot);
        Some(task)
    }

    /// Returns the regions of all commands when the connection is released.
    pub(super) fn into_regions(self) -> impl Iterator<Item = PooledMr> {
        self.tasks.into_iter().flatten().flat_map(|t| t.regions)
    }

    /// Returns the key and state of a slot's first region.
    #[cfg(test)]
    pub(super) fn key(&self, slot: u16) -> (RKey, MrState) {
        let task = self.tasks[usize::from(slot)].as_ref();
        let region = &task.expect("a command").regions[0];
        (region.rkey(), region.state())
    }
}
