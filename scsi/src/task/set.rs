//! The task set itself.

use riser_state::become_state;
use rustc_hash::FxHashMap;

use super::entry::{GATE, MEDIUM, ORDER, QUEUE, Task, TaskState};
use super::list::{List, NIL};
use super::{
    Footprint, NewTask, RegisterError, TaskKey, TaskManagement, TaskTag, TmfOutcome, TmfResponse,
};
use crate::nexus::NexusId;
use crate::step::TaskAttribute;

/// The tasks of one nexus.
#[derive(Clone, Copy, Debug, Default)]
struct NexusTasks {
    tasks: u32,
    /// The tasks that are not in the order yet, oldest first.
    arriving: List,
    /// The ones of them that hold newer tasks.
    holding: List,
}

impl NexusTasks {
    /// Returns whether a command that is newer than these is held by some of them: as
    /// [`TaskSet::settle`] decides.
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
/// Its tables grow to the most tasks that it has held: few units ever hold what they may, and one
/// that is idle takes no memory for it.
#[derive(Debug)]
pub struct TaskSet {
    slots: Vec<Option<Task>>,
    /// Slots that were in use and are not.
    free: Vec<u32>,
    /// Tasks at most.
    capacity: usize,
    /// By numbers of ours, as below: no peer can choose them for their hashes. Tags of one nexus on
    /// several connections may collide, at most one of each connection.
    by_tag: FxHashMap<(NexusId, TaskTag), u32>,
    nexuses: FxHashMap<NexusId, NexusTasks>,
    /// Tasks of one nexus at most.
    share: u32,
    next_id: u64,
    next_age: u64,
    next_pass: u64,
    /// HEAD OF QUEUE tasks in the order, by age.
    heads: List,
    /// All others in the order, by age.
    order: List,
    /// The ORDERED ones among them.
    ordered: List,
    /// Dormant tasks by age, those of HEAD OF QUEUE apart.
    dormant: List,
    dormant_heads: List,
    /// Tasks that the order has let start and that change the medium, in that order.
    writers: List,
    atomics: List,
    /// Blocked tasks whose blocks are free.
    unblocked: List,
    /// Looks at tasks so far: the work that the unit's lock is held for.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl TaskSet {
    /// An empty set for at most `capacity` tasks, `share` of them of one nexus.
    #[must_use]
    pub fn new(capacity: u32, share: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            capacity: capacity as usize,
            by_tag: FxHashMap::default(),
            nexuses: FxHashMap::default(),
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

    /// Number of tasks in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are no tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes in a command that has arrived. It waits until started.
    ///
    /// # Errors
    ///
    /// Its tag is in use by the same nexus, or there is no room.
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

    /// Takes in a command that has arrived, and starts it if it may start; returns whether it did.
    /// The same as [`register`](Self::register) and [`try_start`](Self::try_start), but a command
    /// that starts at once enters no queue.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register).
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

    /// Enters a command. Returns whether it has its place in the order; it is in no queue then.
    fn insert(
        &mut self,
        nexus: NexusId,
        tag: TaskTag,
        new: NewTask,
    ) -> Result<(TaskKey, bool), RegisterError> {
        let own = self.nexuses.get_mut(&nexus);
        // Without a share, one initiator that never lets its commands end could fill the set, and
        // every other one would get TASK SET FULL.
        let has_share = own.as_ref().map_or(0, |own| own.tasks) < self.share;
        let slot = self.free.last().copied();
        let slot = slot.unwrap_or(self.slots.len() as u32);
        let has_room = has_share && (slot as usize) < self.capacity;
        let old = match has_room {
            // One look-up both for the other task and for this one's entry.
            true => self.by_tag.insert((nexus, tag), slot),
            false => self.by_tag.get(&(nexus, tag)).copied(),
        };
        // The tag counts before the share: with TASK SET FULL an initiator would send the command
        // once more, and never learn that it uses a tag twice.
        if let Some(old) = old {
            self.by_tag.insert((nexus, tag), old);
            return Err(RegisterError::Overlapped(self.key(old)));
        }
        if !has_room {
            return Err(RegisterError::Full);
        }
        let own = match own {
            Some(own) => own,
            None => self.nexuses.entry(nexus).or_default(),
        };
        own.tasks += 1;
        let is_held = own.holds(new.attribute);
        if self.free.pop().is_none() {
            self.slots.push(None);
        }
        // Slots are used again and ids are not, so a key that outlives its task names none.
        let id = self.next_id;
        self.next_id += 1;
        self.slots[slot as usize] = Some(Task::new(nexus, tag, new, id));
        // Most commands bring their data and are held by nothing: they never are in the lists of
        // those that are not in the order yet.
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

    /// Returns whether a command of a nexus that comes now could not take its place in the order
    /// before other commands of the nexus, whose data are on their way.
    #[must_use]
    pub fn would_hold(&self, nexus: NexusId, attribute: TaskAttribute) -> bool {
        let own = self.nexuses.get(&nexus);
        own.is_some_and(|own| own.holds(attribute))
    }

    /// The tag of the task in a slot.
    #[must_use]
    pub fn tag_at(&self, slot: usize) -> Option<TaskTag> {
        Some(self.slots.get(slot)?.as_ref()?.tag)
    }

    /// Whether a nexus has tasks in the set.
    #[must_use]
    pub fn has_tasks_of(&self, nexus: NexusId) -> bool {
        self.nexuses.contains_key(&nexus)
    }

    /// The Data-Out of a command has come. Tasks may start now: see
    /// [`poll_start`](Self::poll_start).
    pub fn data_arrived(&mut self, key: TaskKey) {
        let is_arriving = |task: &Task| task.state == TaskState::Arriving;
        if self.task(key).is_some_and(is_arriving) {
            self.settle(key.slot);
        }
    }

    /// The task of a nexus with a tag.
    #[must_use]
    pub fn find(&self, nexus: NexusId, tag: TaskTag) -> Option<TaskKey> {
        let slot = *self.by_tag.get(&(nexus, tag))?;
        let id = self.slots[slot as usize]?.id;
        Some(TaskKey { slot, id })
    }

    /// Starts a task if it may start:
    ///
    /// - HEAD OF QUEUE: at once.
    /// - SIMPLE: when no older HEAD OF QUEUE or ORDERED task is in the set.
    /// - ORDERED: when no older task is in the set.
    /// - Any: when its data are here, and no older task conflicts with it about blocks.
    pub fn try_start(&mut self, key: TaskKey) -> bool {
        let may = self
            .task(key)
            .is_some_and(|task| task.state == TaskState::Dormant && self.is_due(task));
        if may {
            self.leave_queue(key.slot);
        }
        may && self.pass(key.slot)
    }

    /// Starts a task that may start, if there is one. To be asked again after every
    /// [`data_arrived`](Self::data_arrived) and [`remove`](Self::remove) until it has none.
    pub fn poll_start(&mut self) -> Option<TaskKey> {
        // The order has let these start before any that is dormant, and nothing has their blocks.
        if let Some(slot) = self.unblocked.first() {
            self.unlink(QUEUE, slot, |set| &mut set.unblocked);
            become_state(&mut self.at_mut(slot).state, TaskState::Enabled);
            return Some(self.key(slot));
        }
        // The oldest one decides for all: what it waits for is in the way of the newer ones as
        // well, or it is in their way itself.
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

    /// Whether task management has marked a task: its work is to be stopped.
    #[must_use]
    pub fn is_aborted(&self, key: TaskKey) -> bool {
        self.task(key)
            .is_some_and(|task| task.state == TaskState::Aborted)
    }

    /// Whether another nexus has ended a task, so that it is to be answered with TASK
    /// ABORTED. Not if its own has ended it, too, which expects no status.
    #[must_use]
    pub fn is_cleared(&self, key: TaskKey) -> bool {
        self.task(key).is_some_and(|task| task.is_cleared)
    }

    /// Removes a task that has ended, or whose abort is done. `false` when it
    /// was not in the set.
    pub fn remove(&mut self, key: TaskKey) -> bool {
        // A task is large, so only what is needed of it is copied, here and below.
        let Some(task) = self.task(key) else {
            return false;
        };
        let (nexus, tag) = (task.nexus, task.tag);
        let (has_place, has_passed) = (task.age.is_some(), task.pass.is_some());
        // A task can end in any state, so it is taken out of every list that it may be in: the
        // queue in which it waits, what stands for its place in the order, and what changes the
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
        let own = self.nexuses.get_mut(&nexus).expect("it has a task");
        own.tasks -= 1;
        if own.tasks == 0 {
            self.nexuses.remove(&nexus);
        }
        true
    }

    /// Marks every task of some nexuses: those that a reservation was preempted of.
    pub fn abort_nexuses(&mut self, matches: impl Fn(NexusId) -> bool) -> Vec<TaskKey> {
        self.abort(None, |task| matches(task.nexus))
    }

    /// Carries out a task management function for a nexus.
    ///
    /// With [`TaskManagement::LogicalUnitReset`] the caller also calls
    /// [`LogicalUnit::reset`](crate::lu::LogicalUnit::reset).
    pub fn manage(&mut self, nexus: NexusId, function: TaskManagement) -> TmfOutcome {
        match function {
            // Tags belong to a nexus, so the search cannot find a task of another one.
            TaskManagement::AbortTask(tag) => match self.find(nexus, tag) {
                None => TmfOutcome::answer(TmfResponse::TaskDoesNotExist),
                Some(key) => {
                    self.mark(key.slot, false);
                    TmfOutcome {
                        aborted: vec![key],
                        ..TmfOutcome::answer(TmfResponse::Complete)
                    }
                }
            },
            TaskManagement::AbortTaskSet | TaskManagement::NexusReset => {
                self.aborting(nexus, |task| task.nexus == nexus)
            }
            TaskManagement::ClearTaskSet | TaskManagement::LogicalUnitReset => {
                self.aborting(nexus, |_| true)
            }
            // NORMACA is zero: no command can have asked for such an allegiance.
            TaskManagement::ClearAca => TmfOutcome::answer(TmfResponse::Rejected),
            TaskManagement::QueryTask(tag) => {
                TmfOutcome::answer(presence(self.find(nexus, tag).is_some()))
            }
            TaskManagement::QueryTaskSet => {
                TmfOutcome::answer(presence(self.nexuses.contains_key(&nexus)))
            }
        }
    }

    fn aborting(&mut self, by: NexusId, matches: impl Fn(&Task) -> bool) -> TmfOutcome {
        TmfOutcome {
            response: TmfResponse::Complete,
            aborted: self.abort(Some(by), matches),
        }
    }

    /// Marks tasks, oldest first; `by` is the nexus that asks for it, unless it counts as another
    /// one. A task that is marked already is named again, because this function must wait for it,
    /// too.
    fn abort(&mut self, by: Option<NexusId>, matches: impl Fn(&Task) -> bool) -> Vec<TaskKey> {
        let mut keys: Vec<TaskKey> = self
            .tasks()
            .filter(|(_, task)| matches(task))
            .map(|(slot, task)| TaskKey { slot, id: task.id })
            .collect();
        // Slots come in no order; ids are the order of arrival.
        keys.sort_unstable_by_key(|key| key.id);
        for key in &keys {
            // By CLEAR TASK SET a nexus also ends tasks of its own, for which it expects no
            // status.
            let is_other = by != Some(self.at(key.slot).nexus);
            self.mark(key.slot, is_other);
        }
        keys
    }

    fn mark(&mut self, slot: u32, is_other: bool) {
        self.leave_queue(slot);
        let task = self.at_mut(slot);
        // Where both have ended it, its own nexus decides, in either order. That initiator takes
        // the response to its function for the end of the task and may use the tag again: a TASK
        // ABORTED that follows would seem to answer the new command.
        let was_aborted = task.state == TaskState::Aborted;
        let was_ended_by_own = was_aborted && !task.is_cleared;
        task.is_cleared = is_other && !was_ended_by_own;
        if !was_aborted {
            become_state(&mut task.state, TaskState::Aborted);
        }
    }

    /// Whether the order lets a dormant task start now.
    fn is_due(&self, task: &Task) -> bool {
        if task.is_head() {
            return true;
        }
        // The lists are in the order of age, so one look at the first of each is enough: if that
        // is not older, none is.
        let is_older = |slot: u32| self.at(slot).age < task.age;
        let others = if task.is_ordered() {
            self.order
        } else {
            self.ordered
        };
        !self.heads.first().is_some_and(is_older) && !others.first().is_some_and(is_older)
    }

    /// A command whose data are here goes into the order, unless older ones of its nexus are to
    /// come first. Those that it held follow.
    fn settle(&mut self, slot: u32) {
        let task = *self.at(slot);
        let own = self.nexuses[&task.nexus];
        // ACA queues as SIMPLE here. The device server refuses it when its turn comes.
        let is_held = match task.attribute {
            TaskAttribute::HeadOfQueue => false,
            // It waits for all that came before it, whether those hold others or not.
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
        let nexus = self.at(slot).nexus;
        let holds = self.at(slot).holds();
        let own = self.nexuses.get_mut(&nexus).expect("it has a task");
        own.arriving.push(&mut self.slots, GATE, slot);
        if holds {
            own.holding.push(&mut self.slots, QUEUE, slot);
        }
    }

    /// A command waits for its data no longer: they are here and it goes into the order, or it is
    /// going altogether. What it held follows.
    fn leave_arriving(&mut self, slot: u32, enters: bool) {
        let task = *self.at(slot);
        // Read before the removal clears its neighbours: what this one held is behind it.
        let next = task.links[GATE].next;
        let own = self.nexuses.get_mut(&task.nexus).expect("it has a task");
        let was_first = own.arriving.first() == Some(slot);
        own.arriving.remove(&mut self.slots, GATE, slot);
        if task.holds() {
            own.holding.remove(&mut self.slots, QUEUE, slot);
        }
        if enters {
            self.enter(slot);
        }
        // A task that holds others frees all up to the next one that does. A plain one holds only
        // an ORDERED one directly behind it, and only where nothing older is arriving.
        if task.holds() || was_first {
            self.release_held(next, task.holds());
        }
    }

    /// Lets held commands of a nexus into the order, from one on: as far as the next that holds
    /// others, or only the first where `all` are not concerned.
    fn release_held(&mut self, mut slot: u32, mut all: bool) {
        while slot != NIL {
            let task = *self.at(slot);
            let is_first = task.links[GATE].prev == NIL;
            // What is still arriving is passed over and keeps its place. An ORDERED one may go
            // only when nothing older of its nexus is left here.
            let may = task.state == TaskState::Held && (!task.is_ordered() || is_first);
            if may {
                let own = self.nexuses.get_mut(&task.nexus).expect("it has a task");
                own.arriving.remove(&mut self.slots, GATE, slot);
                if task.holds() {
                    own.holding.remove(&mut self.slots, QUEUE, slot);
                }
                self.enter(slot);
                all |= task.holds();
            } else if task.holds() || !all {
                break;
            }
            // From the copy: in the set the link may belong to `ordered` by now.
            slot = task.links[GATE].next;
        }
    }

    /// Gives a task its place in the order, and has it wait for its turn.
    fn enter(&mut self, slot: u32) {
        self.take_place(slot);
        self.push_dormant(slot);
    }

    /// Gives a task its place in the order.
    fn take_place(&mut self, slot: u32) {
        // The age is that of the entry, and not of the arrival: to other nexuses a command is as
        // old as its data, so none can hold them up by withholding its own.
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

    /// Puts a task that has its place in the order into the queue of those that wait for their
    /// turn.
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

    /// Takes a task out of the list of what it waits in.
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
            // Before a task has its place in the order, the link is that of `holding`, which
            // `leave_arriving` serves; a running task waits nowhere, nor does one whose blockers
            // are still to leave.
            _ => {}
        }
    }

    /// The order lets a dormant task start, which is in no queue any more: whether its blocks do,
    /// too.
    fn pass(&mut self, slot: u32) -> bool {
        let pass = self.next_pass;
        self.next_pass += 1;
        // Blockers are counted once. Each of them takes itself off when it leaves, so no pass
        // looks again at tasks that still wait.
        let mut blockers = 0;
        if self.at(slot).footprint != Footprint::None {
            let task = *self.at(slot);
            blockers = self.conflicts(&task, self.atomics);
            // It enters its list although it may be blocked itself: newer commands wait for it
            // then. Otherwise a steady stream of writes would keep it waiting for ever.
            if task.footprint.is_atomic() {
                blockers += self.conflicts(&task, self.writers);
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

    /// Tasks of a list that are in the way of a task.
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

    /// A task that changed the medium goes: those that it was in the way of may start.
    fn leave_medium(&mut self, slot: u32) {
        let task = match self.at(slot).footprint {
            Footprint::None => return,
            Footprint::Writes(_) | Footprint::Atomic(_) => *self.at(slot),
        };
        match task.footprint {
            Footprint::None => {}
            Footprint::Writes(_) => self.unlink(MEDIUM, slot, |set| &mut set.writers),
            Footprint::Atomic(_) => {
                // Plain writes have waited for atomic commands only, so only the end of one of
                // these frees them.
                self.unlink(MEDIUM, slot, |set| &mut set.atomics);
                self.unblock(&task, self.writers);
            }
        }
        self.unblock(&task, self.atomics);
    }

    fn unblock(&mut self, gone: &Task, list: List) {
        // Newest first: nothing that passed before it has waited for it.
        let mut at = list.last();
        while let Some(slot) = at {
            let other = *self.at(slot);
            if other.pass < gone.pass {
                break;
            }
            if other.conflicts(gone) {
                let left = other.blockers - 1;
                self.at_mut(slot).blockers = left;
                // One that was aborted meanwhile counts on, since it is in the list until it is
                // removed, but it never starts.
                if left == 0 && other.state == TaskState::Blocked {
                    self.unblocked.push(&mut self.slots, QUEUE, slot);
                }
            }
            at = other.links[MEDIUM].prev();
        }
    }

    fn unlink(&mut self, link: usize, slot: u32, list: impl Fn(&mut Self) -> &mut List) {
        // The ends of the list go out and in again, since both they and the tasks are parts of the
        // set.
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
            .expect("lists name tasks that are in the set")
    }

    fn at_mut(&mut self, slot: u32) -> &mut Task {
        self.slots[slot as usize]
            .as_mut()
            .expect("lists name tasks that are in the set")
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
