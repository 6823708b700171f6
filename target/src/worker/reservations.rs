//! Persistent reservation changes that have to be saved, or that abort commands. They are saved by
//! a helper thread, so that the worker can continue, and then the worker waits for aborted
//! commands.
//!
//! ```text
//! waiting ─ next ─→ being saved ─ saved ─→ waiting for preempted commands ─ all complete ─→ done
//!                       └─ refused, or nothing to abort ─────────────────────────────────────↑
//! ```
//!
//! Only one change is saved at a time, and we alternate between nexuses: the first change of a
//! nexus only has to wait for a single change of each other nexus, regardless of how many there
//! are. Each change belongs to a command, so their number is limited.
//!
//! If the command of a change is aborted while it is being saved, the change is still applied and
//! aborts the preempted commands, but nothing is waiting for it. This ensures that nexuses which
//! preempt each other don't deadlock. If the change was not started yet, it is dropped.

use std::collections::VecDeque;
use std::sync::Arc;

use riser_reactor::{Offload, Ring, Token};
use riser_scsi::nexus::NexusId;
use riser_scsi::reservation::{Preemption, ReservationChange, ReservationError};
use riser_scsi::step::StepResult;

use super::PollGroup;
use super::env::Env;
use super::mail::Mail;
use super::work::Owner;
use crate::fabric::{TaskIdx, TaskRef, Unit, UnitIdx};

/// Invalid channel number, used if a change of reservations is waiting for a task.
pub(super) const NO_CHANNEL: u64 = u64::MAX;

/// Result of a change: the preempted nexuses, if any.
type Outcome = Result<Option<Preemption>, ReservationError>;

/// Helper thread and pending changes.
#[derive(Debug, Default)]
pub(super) struct Saver {
    /// Helper thread, started on first use.
    helper: Option<Offload<Outcome>>,
    /// Changes being saved, or waiting for preempted commands.
    changes: Vec<Change>,
    waiting: Line<Waiting>,
    /// Last identifier. It can only be reused if there is no change with this identifier.
    last: u32,
}

/// Pending change.
#[derive(Debug)]
struct Change {
    /// Token for the helper thread. It is also used as the watcher of preempted commands.
    name: u32,
    /// Command waiting for this change, or `None` if it was aborted. In this case, the change
    /// continues but the identifier of the command can be reused.
    owner: Option<Owner>,
    unit: Arc<Unit>,
    /// Number of preempted commands that have not completed. Zero while it is being saved.
    left: usize,
}

/// Change that was not started.
#[derive(Debug)]
struct Waiting {
    owner: Owner,
    unit: Arc<Unit>,
    change: ReservationChange,
}

/// Fair queue for several nexuses.
#[derive(Debug)]
struct Line<T>(VecDeque<(NexusId, VecDeque<T>)>);

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Line<T> {
    fn push(&mut self, nexus: NexusId, one: T) {
        match self.0.iter_mut().find(|(own, _)| *own == nexus) {
            Some((_, own)) => own.push_back(one),
            None => self.0.push_back((nexus, VecDeque::from([one]))),
        }
    }

    /// Returns the oldest entry of the next nexus.
    fn pop(&mut self) -> Option<T> {
        let (nexus, mut own) = self.0.pop_front()?;
        let one = own.pop_front();
        if !own.is_empty() {
            self.0.push_back((nexus, own));
        }
        one
    }

    /// Removes all matching entries. Returns false if there are no such entries.
    fn drop_all(&mut self, is_meant: impl Fn(&T) -> bool) -> bool {
        let count = |line: &Self| line.0.iter().map(|(_, own)| own.len()).sum::<usize>();
        let before = count(self);
        for (_, own) in &mut self.0 {
            own.retain(|one| !is_meant(one));
        }
        self.0.retain(|(_, own)| !own.is_empty());
        count(self) < before
    }
}

impl PollGroup {
    /// Saves a change when it is next in the queue.
    pub(super) fn change_reservations(
        &mut self,
        owner: Owner,
        unit: UnitIdx,
        change: ReservationChange,
    ) {
        let Some(unit) = self.catalog.unit(unit) else {
            return self.on_block_done(owner, refused());
        };
        self.saver.push(owner, unit, change);
        self.save_next();
    }

    /// Starts the next change, unless a change is currently being saved.
    fn save_next(&mut self) {
        if let Err(owner) = self.saver.save_next(&self.ring, &*self.env) {
            self.on_block_done(owner, refused());
        }
    }

    /// Processes the results of changes. Returns the number of results.
    pub(super) fn poll_reservations(&mut self) -> usize {
        let mut work = 0;
        while let Some((token, outcome)) = self.saver.next_result() {
            work += 1;
            self.on_change_saved(token.0 as u32, outcome);
            self.save_next();
            self.drain_dirty();
        }
        work
    }

    /// Called when a change was saved or refused. This aborts preempted commands.
    fn on_change_saved(&mut self, name: u32, outcome: Outcome) {
        let (result, preempted) = match outcome {
            Ok(preempted) => (Ok(()), preempted),
            Err(refused) => (Err(refused), None),
        };
        let (owner, tasks) = self.saver.on_saved(name, preempted);
        if let Some(owner) = owner {
            self.on_block_done(owner, StepResult::Reservations(result));
        }
        let watcher = TaskRef {
            worker: self.index,
            channel: NO_CHANNEL,
            index: TaskIdx(0),
            generation: name,
        };
        for task in tasks {
            self.post_mail(task.worker, Mail::AbortTask { task, watcher });
        }
    }
}

/// Result of a change that cannot be saved.
fn refused() -> StepResult {
    StepResult::Reservations(Err(ReservationError::NotSaved))
}

impl Saver {
    /// Adds a change for a command.
    fn push(&mut self, owner: Owner, unit: Arc<Unit>, change: ReservationChange) {
        let nexus = change.nexus();
        let waiting = Waiting {
            owner,
            unit,
            change,
        };
        self.waiting.push(nexus, waiting);
    }

    /// Starts the next change, unless a change is currently being saved.
    ///
    /// # Errors
    /// Returns the command of the change if the helper thread could not be started.
    fn save_next(&mut self, ring: &Ring, env: &dyn Env) -> Result<(), Owner> {
        // The thread is created for the first change, because most servers never need it. If this
        // fails, we try again for the next change.
        if self.helper.is_none() {
            let host = env.host();
            self.helper = Offload::new(1, ring.waker(), host.threads()).ok();
        }
        let is_busy = |helper: &Offload<Outcome>| helper.outstanding() > 0;
        if self.helper.as_ref().is_some_and(is_busy) {
            return Ok(());
        }
        let Some(Waiting {
            owner,
            unit,
            change,
        }) = self.waiting.pop()
        else {
            return Ok(());
        };
        self.last = self.last.wrapping_add(1);
        let name = self.last;
        let submitted = self.helper.as_mut().is_some_and(|helper| {
            let lu = Arc::clone(&unit.lu);
            let job = move || lu.save_reservations(&change);
            helper.submit(Token(name.into()), job).is_ok()
        });
        if !submitted {
            return Err(owner);
        }
        self.changes.push(Change {
            name,
            owner: Some(owner),
            unit,
            left: 0,
        });
        Ok(())
    }

    /// Called if a command no longer waits for its change. Returns false if it was not waiting. The
    /// command completes immediately, because a blocked state directory must not delay task
    /// management or the next login. The change may still be applied, like any command that was
    /// aborted.
    pub(super) fn abandon(&mut self, owner: Owner) -> bool {
        let is_meant = |waiting: &Waiting| waiting.owner == owner;
        if !self.waiting.drop_all(is_meant) {
            let changes = &mut self.changes;
            let Some(at) = changes.iter().position(|c| c.owner == Some(owner)) else {
                return false;
            };
            changes[at].owner = None;
            if changes[at].left > 0 {
                // It is already saved and only waiting for preempted commands. `on_preempted_gone`
                // will ignore these if there is no change.
                changes.swap_remove(at);
            }
        }
        true
    }

    /// Called when a change was saved or refused. Returns its command if the change is complete,
    /// and the preempted commands to abort.
    fn on_saved(
        &mut self,
        name: u32,
        preempted: Option<Preemption>,
    ) -> (Option<Owner>, Vec<TaskRef>) {
        let at = self.find(name).expect("the change is under way");
        let change = &mut self.changes[at];
        let tasks = preempted.map_or_else(Vec::new, |who| change.unit.preempt(&who));
        change.left = tasks.len();
        if tasks.is_empty() || change.owner.is_none() {
            return (self.changes.swap_remove(at).owner, tasks);
        }
        (None, tasks)
    }

    /// Called when a preempted command has completed. After the last one, the change is complete
    /// and its command is returned.
    pub(super) fn on_preempted_gone(&mut self, watcher: TaskRef) -> Option<Owner> {
        let at = self.find(watcher.generation)?;
        let change = &mut self.changes[at];
        change.left -= 1;
        if change.left > 0 {
            return None;
        }
        self.changes.swap_remove(at).owner
    }

    fn next_result(&mut self) -> Option<(Token, Outcome)> {
        self.helper.as_mut().and_then(Offload::poll_result)
    }

    fn find(&self, name: u32) -> Option<usize> {
        self.changes.iter().position(|c| c.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nexuses_alternate_at_any_queue_length() {
        let mut line = Line::default();
        for n in 0..1000 {
            line.push(NexusId(1), n);
        }
        line.push(NexusId(2), 5000);
        line.push(NexusId(3), 6000);
        line.push(NexusId(2), 5001);
        let first: Vec<_> = std::iter::from_fn(|| line.pop()).take(7).collect();
        assert_eq!(first, [0, 5000, 6000, 1, 5001, 2, 3]);
        assert!(line.drop_all(|n| *n != 999) && !line.drop_all(|n| *n == 4));
        assert_eq!((line.pop(), line.pop()), (Some(999), None));
    }
}
