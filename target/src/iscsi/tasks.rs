//! Requests of a connection that use a context, by number and by tag, and their slots in the
//! command window.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use riser_scsi::iscsi::Itt;
use riser_state::become_state;
use rustc_hash::FxHashMap;

use super::config::{ChannelConfig, IMMEDIATE_TASKS};
use super::task::{SpareTasks, Task, TaskState};
use super::window::Window;
use crate::fabric::{ConnRef, Contexts, TaskIdx, TaskRef, Unit, Wait};

/// Requests of a connection that use a context.
#[derive(Debug)]
pub(super) struct TaskTable {
    contexts: Contexts<Task>,
    /// Pending requests by tag. There is at most one for each context, and the capacity is
    /// allocated for this. The tags are chosen by the initiator, which could cause hash collisions,
    /// but lookups are still limited by the number of contexts.
    by_tag: FxHashMap<Itt, TaskIdx>,
    /// The request currently being processed has a slot in the command window but no context.
    has_slot: bool,
    /// Number of tasks that use a slot in the command window.
    counted: u16,
    /// Number of completed tasks that used a slot, but the response hasn't been sent yet.
    lingering: u16,
    /// Number of tasks that will be handed over by another connection, and use a slot there.
    expected: u16,
    connection: ConnRef,
}

impl Deref for TaskTable {
    type Target = Contexts<Task>;

    fn deref(&self) -> &Contexts<Task> {
        &self.contexts
    }
}

impl DerefMut for TaskTable {
    fn deref_mut(&mut self) -> &mut Contexts<Task> {
        &mut self.contexts
    }
}

impl TaskTable {
    /// Creates a table without contexts. They are allocated in full-feature phase, so that an
    /// unauthenticated peer can't use memory.
    pub(super) fn new(config: &ChannelConfig) -> Self {
        Self {
            contexts: Contexts::default(),
            by_tag: FxHashMap::default(),
            has_slot: false,
            counted: 0,
            lingering: 0,
            expected: 0,
            connection: ConnRef {
                worker: config.worker,
                serial: config.serial,
            },
        }
    }

    /// Allocates contexts for requests. They are not needed before login or in a discovery session.
    pub(super) fn allocate(&mut self, tasks: u16) {
        self.contexts = Contexts::new(tasks);
        self.by_tag.reserve(usize::from(tasks));
    }

    /// Returns the name of this connection, which other channels can use.
    pub(super) fn connection(&self) -> ConnRef {
        self.connection
    }

    /// Returns the name of the task in a context, which other channels can use.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.connection.worker,
            channel: self.connection.serial,
            index: idx,
            generation: self.contexts.generation(idx),
        }
    }

    /// Returns the pending request with this tag.
    pub(super) fn find(&self, itt: Itt) -> Option<TaskIdx> {
        self.by_tag.get(&itt).copied()
    }

    /// Returns whether a new request can use this tag.
    pub(super) fn is_tag_free(&self, itt: Itt) -> bool {
        itt != Itt::NONE && self.find(itt).is_none()
    }

    /// Returns the command with this tag if it is for one of these units.
    pub(super) fn find_command(&self, itt: Itt, units: &[Arc<Unit>]) -> Option<TaskIdx> {
        self.find(itt).filter(|&idx| {
            let task = &self.contexts[idx];
            task.exec.is_of_any(units) && task.is_command()
        })
    }

    /// Returns the state of the request with this tag, if it exists.
    #[cfg(test)]
    pub(super) fn state(&self, itt: Itt) -> Option<TaskState> {
        let mut tasks = self.contexts.iter();
        let found = tasks.find(|(_, task)| task.itt == itt);
        found.map(|(_, task)| task.state)
    }

    /// Returns true if a command can't make progress without the initiator.
    pub(super) fn is_at_rest(&self, idx: TaskIdx) -> bool {
        use TaskState::{AwaitUnsolicited, Receive, Send, Sent};

        let task = self.contexts.get(idx);
        task.is_some_and(|task| matches!(task.state, Receive | Send | AwaitUnsolicited | Sent))
    }

    /// Returns true if other initiators are waiting for commands that wait for this initiator and
    /// hold their place in the order. The second value is true if there are any such commands.
    pub(super) fn held_commands(&self) -> (bool, bool) {
        let is_meant = |task: &Task| {
            matches!(task.state, TaskState::Receive | TaskState::Send) && !task.exec.is_gathering()
        };
        let (mut held, mut is_in_order) = (false, false);
        for (_, task) in self.contexts.iter().filter(|(_, task)| is_meant(task)) {
            is_in_order = true;
            held = held || task.exec.holds_others();
        }
        (held, is_in_order)
    }

    /// Returns the memory in bytes used by unsolicited data without a buffer, up to `most` for each
    /// command.
    pub(super) fn staged_memory(&self, most: usize) -> usize {
        let lists = self.contexts.iter().map(|(_, task)| &task.incoming.staged);
        lists.map(|list| list.capacity().min(most)).sum()
    }

    /// Returns the maximum number of bytes of unsolicited data without a buffer for a command.
    pub(super) fn most_staged(&self, idx: TaskIdx, first_burst: u32) -> usize {
        let task = &self.contexts[idx];
        match task.incoming.open {
            true => first_burst.min(task.exec.expected.data_out) as usize,
            false => task.incoming.staged.len(),
        }
    }

    /// Returns true if a context is available for a request.
    pub(super) fn has_context(&self, immediate: bool) -> bool {
        let slots = self.counted + self.lingering + self.expected;
        let others = self.contexts.len().saturating_sub(usize::from(slots));
        // Immediate requests aren't counted in the window. Without a separate limit, an initiator
        // could use all contexts that are reserved for the window.
        let is_bounded = !immediate || others < usize::from(IMMEDIATE_TASKS);
        is_bounded && !self.contexts.is_full()
    }

    /// Allocates a context. Returns `None` if too many contexts have no slot in the window, or if
    /// none are available.
    pub(super) fn allocate_context(
        &mut self,
        spare: &mut SpareTasks,
        (itt, immediate): (Itt, bool),
        state: TaskState,
        wait: Wait,
    ) -> Option<TaskIdx> {
        if !self.has_context(immediate) {
            return None;
        }
        let context = spare.0.take_context(|| Task::new(wait));
        let (idx, task) = self.contexts.insert(context);
        become_state(&mut task.state, state);
        task.itt = itt;
        (task.wait, task.requested_at) = (wait, wait.since);
        (task.first_wait, task.ordered) = (wait, None);
        self.by_tag.insert(itt, idx);
        Some(idx)
    }

    /// Stores a request in an unused context. Returns `None` if there is no context.
    pub(super) fn accept_request(
        &mut self,
        spare: &mut SpareTasks,
        (itt, immediate): (Itt, bool),
        state: TaskState,
        wait: Wait,
    ) -> Option<TaskIdx> {
        let idx = self.allocate_context(spare, (itt, immediate), state, wait)?;
        if !immediate {
            // The slot now belongs to the context.
            self.has_slot = false;
            self.counted += 1;
        }
        self.contexts[idx].counted = !immediate;
        Some(idx)
    }

    /// Called before an admitted request is processed, which has a slot in the window.
    pub(super) fn assign_slot(&mut self) {
        self.has_slot = true;
    }

    /// Called after a request was processed. Returns true if it wasn't stored in a context, so its
    /// slot must be released.
    pub(super) fn release_slot(&mut self) -> bool {
        std::mem::take(&mut self.has_slot)
    }

    /// Marks a context for a command that another connection will hand over.
    pub(super) fn expect_task(&mut self, idx: TaskIdx, immediate: bool) {
        self.contexts[idx].expected = !immediate;
        self.expected += u16::from(!immediate);
    }

    /// Called when an expected command was handed over, or has completed.
    pub(super) fn on_expected(&mut self, idx: TaskIdx) {
        let task = &mut self.contexts[idx];
        self.expected -= u16::from(std::mem::take(&mut task.expected));
    }

    /// Adds the slot of a command that was handed over by another connection.
    pub(super) fn add_slot(&mut self, idx: TaskIdx, counted: bool, lingers: bool) {
        let task = &mut self.contexts[idx];
        (task.counted, task.lingers) = (counted, lingers);
        self.counted += u16::from(counted);
        self.lingering += u16::from(lingers);
    }

    /// Removes the slot of a command to be handed over to another connection. Returns whether it
    /// was counted, and whether it lingers.
    pub(super) fn remove_slot(&mut self, idx: TaskIdx) -> (bool, bool) {
        let task = &mut self.contexts[idx];
        let counted = std::mem::take(&mut task.counted);
        let lingers = std::mem::take(&mut task.lingers);
        self.counted -= u16::from(counted);
        self.lingering -= u16::from(lingers);
        (counted, lingers)
    }

    /// Called when a response is passed to the datamover, which frees a slot in the window.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx, window: &Window) {
        let task = &mut self.contexts[idx];
        become_state(&mut task.state, TaskState::Sent);
        if std::mem::take(&mut task.counted) {
            task.lingers = true;
            self.counted -= 1;
            self.lingering += 1;
            window.on_response();
        }
        let itt = task.itt;
        self.release_tag(itt, idx);
    }

    /// Releases the context of a request. All its resources must already be released.
    pub(super) fn release_context(&mut self, idx: TaskIdx, window: &Window) -> Box<Task> {
        let task = &self.contexts[idx];
        // If the response was sent, the tag has already been released.
        if task.state != TaskState::Sent {
            self.release_tag(task.itt, idx);
        }
        self.on_expected(idx);
        let (counted, lingers) = self.remove_slot(idx);
        let mut task = self.contexts.remove(idx);
        become_state(&mut task.state, TaskState::Idle);
        task.clear();
        if counted || lingers {
            window.on_gone(lingers);
        }
        task
    }

    /// Releases the tag of a request that is complete, so that it can be used for the next request.
    fn release_tag(&mut self, itt: Itt, idx: TaskIdx) {
        // After the response, the tag may already be used for another request.
        if let Some(named) = self.by_tag.remove(&itt)
            && named != idx
        {
            self.by_tag.insert(itt, named);
        }
    }
}
