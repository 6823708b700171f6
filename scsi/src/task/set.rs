//! Implementation of the task set.

use riser_state::become_state;
use rustc_hash::FxHashMap;
use slab::Slab;

use super::entry::{GATE, MEDIUM, ORDER, QUEUE, Task, TaskState};
use super::list::{List, NIL};
use super::{
    Footprint, NewTask, RegisterError, TaskKey, TaskManagement, TaskTag, TmfOutcome, TmfResponse,
};
use crate::nexus::NexusId;
use crate::step::TaskAttribute;

/// The tasks of a single nexus.
#[derive(Clone, Copy, Debug, Default)]
struct NexusTasks {
    tasks: u32,
    /// Tasks that have not been ordered yet, oldest first.
    arriving: List,
    /// The tasks in `arriving` that hold newer tasks.
    holding: List,
}

impl NexusTasks {
    /// Returns whether a new command has to wait for any of these tasks. This must match
    /// [`TaskSet::order_received`].
    fn holds(&self, attribute: TaskAttribute) -> bool {
        match attribute {
            TaskAttribute::HeadOfQueue => false,
            TaskAttribute::Ordered => self.arriving.first().is_some(),
            TaskAttribute::Simple | TaskAttribute::Aca => self.holding.first().is_some(),
        }
    }
}

/// The tasks of a logical unit.
///
/// The tables grow as needed up to the maximum, because most LUs never use all of it. This saves
/// memory if an LU is idle.
#[derive(Debug)]
pub struct TaskSet {
    slots: Vec<Option<Task>>,
    /// Slots that are not in use.
    free: Vec<u32>,
    /// Maximum number of tasks.
    capacity: usize,
    /// We can use a fast hash here, and below, because IDs are allocated by us, so a peer cannot
    /// cause collisions. If the same tag is used on multiple connections of a nexus, there is at
    /// most one collision per connection.
    by_tag: FxHashMap<(NexusId, TaskTag), u32>,
    /// Index in `nexuses` of each nexus with a task.
    by_nexus: FxHashMap<NexusId, usize>,
    nexuses: Slab<NexusTasks>,
    /// Maximum number of tasks per nexus.
    share: u32,
    next_id: u64,
    next_age: u64,
    next_pass: u64,
    /// HEAD OF QUEUE tasks, ordered by age.
    heads: List,
    /// All other tasks, ordered by age.
    order: List,
    /// The ORDERED tasks in `order`.
    ordered: List,
    /// Dormant tasks ordered by age, except for HEAD OF QUEUE.
    dormant: List,
    dormant_heads: List,
    /// Tasks that have passed the ordering checks and will change the medium.
    writers: List,
    atomics: List,
    /// Tasks which were blocked but can now start.
    unblocked: List,
    /// Number of times a task was accessed, to measure the work done while the LU lock is held.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl TaskSet {
    /// Creates a new empty set for at most `capacity` tasks, and at most `share` tasks per nexus.
    #[must_use]
    pub fn new(capacity: u32, share: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            capacity: capacity as usize,
            by_tag: FxHashMap::default(),
            by_nexus: FxHashMap::default(),
            nexuses: Slab::new(),
            share,
            next_id: 0,
            next_age: 0,
            next_pass: 0,
            heads: List::default(),
            order: List::default(),
            ordered: List::default(),
            dormant: List::default(),
            dormant_heads: List::default(),
            writers: List::default(),
            atomics: List::default(),
            unblocked: List::default(),
            #[cfg(test)]
            looks: std::cell::Cell::new(0),
        }
    }

    /// Returns the number of tasks in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a new command, without starting it.
    ///
    /// # Errors
    ///
    /// If the tag is already used by this nexus, or if the set is full.
    pub fn register(
        &mut self,
        nexus: NexusId,
        tag: TaskTag,
        new: NewTask,
    ) -> Result<TaskKey, RegisterError> {
        let (key, is_dormant) = self.insert(nexus, tag, new)?;
        if is_dormant {
            self.push_dormant(key.slot);
        }
        Ok(key)
    }

    /// Adds a new command and starts it if possible. Returns whether it was started. This is the
    /// same as calling [`register`](Self::register) and then [`try_start`](Self::try_start), but
    /// avoids adding the command to a queue if it can start immediately.
    ///
    /// # Errors
    ///
    /// Same as for [`register`](Self::register).
    pub fn register_and_start(
        &mut self,
        nexus: NexusId,
        tag: TaskTag,
        new: NewTask,
    ) -> Result<(TaskKey, bool), RegisterError> {
        let (key, is_dormant) = self.insert(nexus, tag, new)?;
        let is_due = is_dormant && self.is_due(self.at(key.slot));
        if is_dormant && !is_due {
            self.push_dormant(key.slot);
        }
        Ok((key, is_due && self.pass(key.slot)))
    }

    /// Adds a new command. Returns whether it has been ordered. If so, it is not in any queue yet.
    fn insert(
        &mut self,
        nexus: NexusId,
        tag: TaskTag,
        new: NewTask,
    ) -> Result<(TaskKey, bool), RegisterError> {
        let own = self.by_nexus.get(&nexus).copied();
        // Without this limit, an initiator could fill the set with commands that never complete,
        // and all other initiators would get TASK SET FULL.
        let has_share = own.map_or(0, |own| self.nexuses[own].tasks) < self.share;
        let slot = self.free.last().copied();
        let slot = slot.unwrap_or(self.slots.len() as u32);
        let has_room = has_share && (slot as usize) < self.capacity;
        let old = match has_room {
            // Use a single lookup to check for an existing task and to add the new one.
            true => self.by_tag.insert((nexus, tag), slot),
            false => self.by_tag.get(&(nexus, tag)).copied(),
        };
        // Check the tag before the limit. If we returned TASK SET FULL, the initiator would just
        // send the command again and not find out that it's using a tag twice.
        if let Some(old) = old {
            self.by_tag.insert((nexus, tag), old);
            return Err(RegisterError::Overlapped(self.key(old)));
        }
        if !has_room {
            return Err(RegisterError::Full);
        }
        let own = own.unwrap_or_else(|| {
            let own = self.nexuses.insert(NexusTasks::default());
            self.by_nexus.insert(nexus, own);
            own
        });
        let tasks = &mut self.nexuses[own];
        tasks.tasks += 1;
        let is_held = tasks.holds(new.attribute);
        if self.free.pop().is_none() {
            self.slots.push(None);
        }
        // Slots are reused but IDs are not, so an old key will never match a new task.
        let id = self.next_id;
        self.next_id += 1;
        self.slots[slot as usize] = Some(Task::new((nexus, own), tag, new, id));
        // Most commands don't wait for data or other commands, so we don't need to add them to the
        // list of tasks to be ordered later.
        if new.awaits_data || is_held {
            self.push_arriving(slot);
            if !new.awaits_data {
                become_state(&mut self.at_mut(slot).state, TaskState::Held);
            }
            return Ok((TaskKey { slot, id }, false));
        }
        self.take_place(slot);
        Ok((TaskKey { slot, id }, true))
    }

    /// Returns whether a new command from this nexus would have to wait for other commands which
    /// are still receiving data.
    #[must_use]
    pub fn would_hold(&self, nexus: NexusId, attribute: TaskAttribute) -> bool {
        let own = self.by_nexus.get(&nexus);
        own.is_some_and(|&own| self.nexuses[own].holds(attribute))
    }

    /// Returns the tag of the task in a slot.
    #[must_use]
    pub fn tag_at(&self, slot: usize) -> Option<TaskTag> {
        Some(self.slots.get(slot)?.as_ref()?.tag)
    }

    /// Returns whether a nexus has any tasks.
    #[must_use]
    pub fn has_tasks_of(&self, nexus: NexusId) -> bool {
        self.by_nexus.contains_key(&nexus)
    }

    /// Must be called when the Data-Out of a command has been received. This may allow other tasks
    /// to start, see [`poll_start`](Self::poll_start).
    pub fn data_arrived(&mut self, key: TaskKey) {
        let is_arriving = |task: &Task| task.state == TaskState::Arriving;
        if self.task(key).is_some_and(is_arriving) {
            self.order_received(key.slot);
        }
    }

    /// Returns the task with the given tag, if any.
    #[must_use]
    pub fn find(&self, nexus: NexusId, tag: TaskTag) -> Option<TaskKey> {
        let slot = *self.by_tag.get(&(nexus, tag))?;
        let id = self.slots[slot as usize]?.id;
        Some(TaskKey { slot, id })
    }

    /// Starts a task if possible:
    ///
    /// - HEAD OF QUEUE: immediately.
    /// - SIMPLE: if there is no older HEAD OF QUEUE or ORDERED task in the set.
    /// - ORDERED: if there is no older task in the set.
    /// - All: only if the data has been received, and no older task conflicts with the blocks.
    pub fn try_start(&mut self, key: TaskKey) -> bool {
        let may = self
            .task(key)
            .is_some_and(|task| task.state == TaskState::Dormant && self.is_due(task));
        if may {
            self.leave_queue(key.slot);
        }
        may && self.pass(key.slot)
    }

    /// Starts the next task that can be started. After [`data_arrived`](Self::data_arrived) and
    /// [`remove`](Self::remove), this should be called until it returns `None`.
    pub fn poll_start(&mut self) -> Option<TaskKey> {
        // These have been ordered before any dormant task, and their blocks are no longer in use.
        if let Some(slot) = self.unblocked.first() {
            self.unlink(QUEUE, slot, |set| &mut set.unblocked);
            become_state(&mut self.at_mut(slot).state, TaskState::Enabled);
            return Some(self.key(slot));
        }
        // Only check the oldest task. If it has to wait, the newer tasks will also have to wait,
        // either for the same task or for this one.
        while let Some(slot) = self.dormant_heads.first().or(self.dormant.first()) {
            if !self.is_due(self.at(slot)) {
                break;
            }
            self.leave_queue(slot);
            if self.pass(slot) {
                return Some(self.key(slot));
            }
        }
        None
    }

    /// Returns whether a task has been aborted by task management and should be stopped.
    #[must_use]
    pub fn is_aborted(&self, key: TaskKey) -> bool {
        self.task(key)
            .is_some_and(|task| task.state == TaskState::Aborted)
    }

    /// Returns whether a task has been aborted by another nexus and should be completed with TASK
    /// ABORTED. If it was also aborted by its own nexus, no status is expected.
    #[must_use]
    pub fn is_cleared(&self, key: TaskKey) -> bool {
        self.task(key).is_some_and(|task| task.is_cleared)
    }

    /// Returns whether tasks from other nexuses are waiting for a running task to complete, because
    /// of the order or its blocks. If any task is waiting, this has to check all tasks.
    #[must_use]
    pub fn holds_others(&self, key: TaskKey) -> bool {
        let lists = [self.dormant, self.dormant_heads, self.atomics];
        if lists.into_iter().all(|list| list.first().is_none()) {
            return false;
        }
        let Some(task) = self.task(key).filter(|t| t.state == TaskState::Enabled) else {
            return false;
        };
        let mut foreign = self
            .slots
            .iter()
            .flatten()
            .filter(|t| t.nexus != task.nexus);
        foreign.any(|other| match other.state {
            // Either this or a waiting task is ORDERED, so it has to wait for all older tasks.
            TaskState::Dormant => true,
            TaskState::Blocked => other.conflicts(task),
            _ => false,
        })
    }

    /// Removes a completed or aborted task. Returns `false` if it was not in the set.
    pub fn remove(&mut self, key: TaskKey) -> bool {
        // A task is large, so only copy the fields that we need, both here and below.
        let Some(task) = self.task(key) else {
            return false;
        };
        let (nexus, own, tag) = (task.nexus, task.own, task.tag);
        let (has_place, has_passed) = (task.age.is_some(), task.pass.is_some());
        // We can get here in any state, so we need to remove the task from all lists: the queue in
        // which it is waiting, the list used for ordering, and the list of tasks that change the
        // medium.
        let slot = key.slot;
        self.leave_queue(slot);
        if has_place {
            self.leave_order(slot);
        } else {
            self.leave_arriving(slot, false);
        }
        if has_passed {
            self.leave_medium(slot);
        }
        self.slots[slot as usize] = None;
        self.free.push(slot);
        self.by_tag.remove(&(nexus, tag));
        let tasks = &mut self.nexuses[own];
        tasks.tasks -= 1;
        if tasks.tasks == 0 {
            self.nexuses.remove(own);
            self.by_nexus.remove(&nexus);
        }
        true
    }

    /// Marks all tasks of some nexuses as aborted, used when their reservation was preempted.
    pub fn abort_nexuses(&mut self, matches: impl Fn(NexusId) -> bool) -> Vec<TaskKey> {
        self.abort(None, |task| matches(task.nexus))
    }

    /// Executes a task management function for a nexus.
    ///
    /// For [`TaskManagement::LogicalUnitReset`], the caller must also call
    /// [`LogicalUnit::reset`](crate::lu::LogicalUnit::reset).
    pub fn manage(&mut self, nexus: NexusId, function: TaskManagement) -> TmfOutcome {
        match function {
            // Tags are per nexus, so this will never return a task of some other nexus.
            TaskManagement::AbortTask(tag) => match self.find(nexus, tag) {
                None => TmfOutcome::with_response(TmfResponse::TaskDoesNotExist),
                Some(key) => {
                    self.mark(key.slot, false);
                    TmfOutcome {
                        aborted: vec![key],
                        ..TmfOutcome::with_response(TmfResponse::Complete)
                    }
                }
            },
            TaskManagement::AbortTaskSet | TaskManagement::NexusReset => {
                self.aborting(nexus, |task| task.nexus == nexus)
            }
            TaskManagement::ClearTaskSet | TaskManagement::LogicalUnitReset => {
                self.aborting(nexus, |_| true)
            }
            // NORMACA is zero, so there can't be an auto contingent allegiance.
            TaskManagement::ClearAca => TmfOutcome::with_response(TmfResponse::Rejected),
            TaskManagement::QueryTask(tag) => {
                TmfOutcome::with_response(presence(self.find(nexus, tag).is_some()))
            }
            TaskManagement::QueryTaskSet => {
                TmfOutcome::with_response(presence(self.by_nexus.contains_key(&nexus)))
            }
        }
    }

    fn aborting(&mut self, by: NexusId, matches: impl Fn(&Task) -> bool) -> TmfOutcome {
        TmfOutcome {
            response: TmfResponse::Complete,
            aborted: self.abort(Some(by), matches),
        }
    }

    /// Marks tasks as aborted, oldest first. `by` is the nexus that has requested this, or `None`
    /// if it should be handled as a different nexus. This also returns tasks that were already
    /// marked, because this function needs to wait for them too.
    fn abort(&mut self, by: Option<NexusId>, matches: impl Fn(&Task) -> bool) -> Vec<TaskKey> {
        let mut keys: Vec<TaskKey> = self
            .tasks()
            .filter(|(_, task)| matches(task))
            .map(|(slot, task)| TaskKey { slot, id: task.id })
            .collect();
        // Slots are not in any order, so sort by ID to get the order in which tasks were added.
        keys.sort_unstable_by_key(|key| key.id);
        for key in &keys {
            // With CLEAR TASK SET, a nexus may also abort its own tasks. It doesn't expect a status
            // for these.
            let is_other = by != Some(self.at(key.slot).nexus);
            self.mark(key.slot, is_other);
        }
        keys
    }

    fn mark(&mut self, slot: u32, is_other: bool) {
        self.leave_queue(slot);
        let task = self.at_mut(slot);
        // If a task is aborted by both, don't send a status, whichever was first. The initiator may
        // reuse the tag after it has received the response to its function, so if we still sent
        // TASK ABORTED, this would look like the status for a new command.
        let was_aborted = task.state == TaskState::Aborted;
        let was_ended_by_own = was_aborted && !task.is_cleared;
        task.is_cleared = is_other && !was_ended_by_own;
        if !was_aborted {
            become_state(&mut task.state, TaskState::Aborted);
        }
    }

    /// Returns whether a dormant task can currently start according to the order.
    fn is_due(&self, task: &Task) -> bool {
        if task.is_head() {
            return true;
        }
        // These lists are sorted by age, so it's enough to check the first entry in each of them.
        let is_older = |slot: u32| self.at(slot).age < task.age;
        let others = if task.is_ordered() {
            self.order
        } else {
            self.ordered
        };
        !self.heads.first().is_some_and(is_older) && !others.first().is_some_and(is_older)
    }

    /// Orders a task after its data has been received, unless it has to wait for older tasks of the
    /// same nexus. This may also release tasks that were held by it.
    fn order_received(&mut self, slot: u32) {
        let task = self.at(slot);
        let own = &self.nexuses[task.own];
        // ACA is handled like SIMPLE here, and refused by the device server when the task is
        // started.
        let is_held = match task.attribute {
            TaskAttribute::HeadOfQueue => false,
            // ORDERED has to wait for all older tasks, even if these don't hold any other task.
            TaskAttribute::Ordered => own.arriving.first() != Some(slot),
            TaskAttribute::Simple | TaskAttribute::Aca => own
                .holding
                .first()
                .is_some_and(|older| self.at(older).id < task.id),
        };
        if is_held {
            become_state(&mut self.at_mut(slot).state, TaskState::Held);
            return;
        }
        self.leave_arriving(slot, true);
    }

    fn push_arriving(&mut self, slot: u32) {
        let task = self.at(slot);
        let (own, holds) = (task.own, task.holds());
        let own = &mut self.nexuses[own];
        own.arriving.push(&mut self.slots, GATE, slot);
        if holds {
            own.holding.push(&mut self.slots, QUEUE, slot);
        }
    }

    /// Removes a task from the list of arriving tasks, either to order it or because it's being
    /// removed from the set. This may also release tasks that were held by it.
    fn leave_arriving(&mut self, slot: u32, enters: bool) {
        let task = self.at(slot);
        let (own, holds) = (task.own, task.holds());
        // Read this before the link is cleared. Any task that was held by this one is after it.
        let next = task.links[GATE].next;
        let own = &mut self.nexuses[own];
        let was_first = own.arriving.first() == Some(slot);
        own.arriving.remove(&mut self.slots, GATE, slot);
        if holds {
            own.holding.remove(&mut self.slots, QUEUE, slot);
        }
        if enters {
            self.enqueue_task(slot);
        }
        // If newer tasks were held by this task, release all tasks up to the next holding task.
        // Otherwise, it can only have been holding an ORDERED task directly after it, and only if
        // it was first.
        if holds || was_first {
            self.release_held(next, holds);
        }
    }

    /// Orders tasks that were held, starting at `slot`. This stops at the next holding task, or
    /// after the first task if `all` is not set.
    fn release_held(&mut self, mut slot: u32, mut all: bool) {
        while slot != NIL {
            let task = *self.at(slot);
            let is_first = task.links[GATE].prev == NIL;
            // Skip any task that is still receiving data. An ORDERED task can only be released if
            // there is no older task left in this list.
            let may = task.state == TaskState::Held && (!task.is_ordered() || is_first);
            if may {
                let own = &mut self.nexuses[task.own];
                own.arriving.remove(&mut self.slots, GATE, slot);
                if task.holds() {
                    own.holding.remove(&mut self.slots, QUEUE, slot);
                }
                self.enqueue_task(slot);
                all |= task.holds();
            } else if task.holds() || !all {
                break;
            }
            // Use the copy here, because the link may already have been used for `ordered`.
            slot = task.links[GATE].next;
        }
    }

    /// Orders a task and adds it to a queue.
    fn enqueue_task(&mut self, slot: u32) {
        self.take_place(slot);
        self.push_dormant(slot);
    }

    /// Orders a task.
    fn take_place(&mut self, slot: u32) {
        // The age is based on this point instead of when the command was received, so that an
        // initiator can't block other initiators by not sending data.
        let age = self.next_age;
        self.next_age += 1;
        let task = self.at_mut(slot);
        task.age = Some(age);
        become_state(&mut task.state, TaskState::Dormant);
        let (is_head, is_ordered) = (task.is_head(), task.is_ordered());
        if is_head {
            self.heads.push(&mut self.slots, ORDER, slot);
            return;
        }
        self.order.push(&mut self.slots, ORDER, slot);
        if is_ordered {
            self.ordered.push(&mut self.slots, GATE, slot);
        }
    }

    /// Adds a task that has been ordered to the queue of dormant tasks.
    fn push_dormant(&mut self, slot: u32) {
        let queue = match self.at(slot).is_head() {
            true => &mut self.dormant_heads,
            false => &mut self.dormant,
        };
        queue.push(&mut self.slots, QUEUE, slot);
    }

    fn leave_order(&mut self, slot: u32) {
        let attribute = self.at(slot).attribute;
        if attribute == TaskAttribute::HeadOfQueue {
            self.unlink(ORDER, slot, |set| &mut set.heads);
            return;
        }
        self.unlink(ORDER, slot, |set| &mut set.order);
        if attribute == TaskAttribute::Ordered {
            self.unlink(GATE, slot, |set| &mut set.ordered);
        }
    }

    /// Removes a task from the queue in which it is waiting.
    fn leave_queue(&mut self, slot: u32) {
        let task = self.at(slot);
        match task.state {
            TaskState::Dormant if task.is_head() => {
                self.unlink(QUEUE, slot, |set| &mut set.dormant_heads);
            }
            TaskState::Dormant => self.unlink(QUEUE, slot, |set| &mut set.dormant),
            TaskState::Blocked if task.blockers == 0 => {
                self.unlink(QUEUE, slot, |set| &mut set.unblocked);
            }
            // Before a task is ordered, this link is used for `holding`, which is handled in
            // `leave_arriving`. A running task is not in any queue, and neither is a task that
            // still has blockers.
            _ => {}
        }
    }

    /// Called when a dormant task can start according to the order and has been removed from the
    /// queue. Returns whether it can also start according to its blocks.
    fn pass(&mut self, slot: u32) -> bool {
        let pass = self.next_pass;
        self.next_pass += 1;
        // We only count the blockers once. Each of them will update the count when it's removed, so
        // we never have to check waiting tasks again.
        let mut blockers = 0;
        let task = self.at(slot);
        if task.footprint != Footprint::None {
            blockers = self.conflicts(task, self.atomics);
            // Add this to the list even if it's blocked, so that newer commands will wait for it.
            // Otherwise, it could be blocked forever by a continuous stream of writes.
            if task.footprint.is_atomic() {
                blockers += self.conflicts(task, self.writers);
                self.atomics.push(&mut self.slots, MEDIUM, slot);
            } else {
                self.writers.push(&mut self.slots, MEDIUM, slot);
            }
        }
        let task = self.at_mut(slot);
        task.pass = Some(pass);
        task.blockers = blockers;
        let may = blockers == 0;
        let next = match may {
            true => TaskState::Enabled,
            false => TaskState::Blocked,
        };
        become_state(&mut task.state, next);
        may
    }

    /// Returns the number of tasks in a list that conflict with this task.
    fn conflicts(&self, task: &Task, list: List) -> u32 {
        let mut found = 0;
        let mut at = list.first();
        while let Some(slot) = at {
            let other = self.at(slot);
            found += u32::from(other.conflicts(task));
            at = other.links[MEDIUM].next();
        }
        found
    }

    /// Removes a task that changes the medium. Tasks that were blocked by it may now start.
    fn leave_medium(&mut self, slot: u32) {
        let task = match self.at(slot).footprint {
            Footprint::None => return,
            Footprint::Writes(_) | Footprint::Atomic(_) => *self.at(slot),
        };
        match task.footprint {
            Footprint::None => {}
            Footprint::Writes(_) => self.unlink(MEDIUM, slot, |set| &mut set.writers),
            Footprint::Atomic(_) => {
                // Normal writes are only blocked by atomic commands, so we only need to unblock
                // them here.
                self.unlink(MEDIUM, slot, |set| &mut set.atomics);
                self.unblock(&task, self.writers);
            }
        }
        self.unblock(&task, self.atomics);
    }

    fn unblock(&mut self, gone: &Task, list: List) {
        // Start with the newest task. We can stop at the first task that has passed before this
        // one.
        let mut at = list.last();
        while let Some(slot) = at {
            let other = *self.at(slot);
            if other.pass < gone.pass {
                break;
            }
            if other.conflicts(gone) {
                let left = other.blockers - 1;
                self.at_mut(slot).blockers = left;
                // If the task has been aborted in the meantime, we still update the count because
                // it's in the list until it is removed, but it will never be started.
                if left == 0 && other.state == TaskState::Blocked {
                    self.unblocked.push(&mut self.slots, QUEUE, slot);
                }
            }
            at = other.links[MEDIUM].prev();
        }
    }

    fn unlink(&mut self, link: usize, slot: u32, list: impl Fn(&mut Self) -> &mut List) {
        // Copy the list here and store it again below, because we can't borrow both the list and
        // the tasks from the set.
        let mut taken = *list(self);
        taken.remove(&mut self.slots, link, slot);
        *list(self) = taken;
    }

    fn key(&self, slot: u32) -> TaskKey {
        let id = self.at(slot).id;
        TaskKey { slot, id }
    }

    fn at(&self, slot: u32) -> &Task {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        self.slots[slot as usize]
            .as_ref()
            .expect("listed task is in the set")
    }

    fn at_mut(&mut self, slot: u32) -> &mut Task {
        self.slots[slot as usize]
            .as_mut()
            .expect("listed task is in the set")
    }

    fn task(&self, key: TaskKey) -> Option<&Task> {
        self.slots
            .get(key.slot as usize)?
            .as_ref()
            .filter(|task| task.id == key.id)
    }

    fn tasks(&self) -> impl Iterator<Item = (u32, &Task)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(slot, task)| Some((slot as u32, task.as_ref()?)))
    }
}

fn presence(is_there: bool) -> TmfResponse {
    if is_there {
        TmfResponse::Succeeded
    } else {
        TmfResponse::Complete
    }
}

#[cfg(test)]
mod tests;
