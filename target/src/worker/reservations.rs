//! Changes of reservations that persist through power loss, or that abort commands: a helper thread
//! saves them, so that the worker goes on meanwhile, and then the worker waits for the aborted
//! commands.
//!
//! ```text
//! waits ─ its turn ─→ being saved ─ saved ─→ preempted commands end ─ the last is gone ─→ done
//!                          └─ refused, or nothing to abort ────────────────────────────────↑
//! ```
//!
//! One change is saved at a time, and the nexuses with changes take turns: however many one of them
//! has, the first of another waits for at most one of each nexus. Each change belongs to a command,
//! so their number is bounded.
//!
//! A change whose own command was aborted while it was being saved takes effect all the same, and
//! aborts what it preempts; only nothing waits for that. So nexuses that preempt each other do not
//! wait for each other. One that was still waiting is dropped.

use std::collections::VecDeque;
use std::sync::Arc;

use riser_reactor::{Offload, Token};
use riser_scsi::nexus::NexusId;
use riser_scsi::reservation::{Preemption, ReservationChange, ReservationError};
use riser_scsi::step::{BackendError, StepResult};

use super::Worker;
use super::mail::Mail;
use super::work::Owner;
use crate::fabric::{TaskIdx, TaskRef, Unit, UnitIdx};

/// A number that no channel has: a change of reservations waits for the task.
pub(super) const NO_CHANNEL: u64 = u64::MAX;

/// Result of a change: the nexuses that it preempts, if any.
type Outcome = Result<Option<Preemption>, ReservationError>;

/// The helper, and whose the changes are.
#[derive(Debug, Default)]
pub(super) struct Saver {
    /// The helper, once it was needed.
    helper: Option<Offload<Outcome>>,
    /// Changes that are being saved, or were.
    changes: Vec<Change>,
    waiting: Line<Waiting>,
    /// The last name. None is used twice while a change has it.
    last: u32,
}

/// A change under way.
#[derive(Debug)]
struct Change {
    /// The helper's token, and what watchers of preempted commands are known by.
    name: u32,
    /// The command that waits for it. One that was aborted does not: the change runs to its end,
    /// and its owner's name may be another command's by then.
    owner: Option<Owner>,
    unit: Arc<Unit>,
    /// Preempted commands that are not gone yet; none while it is being saved.
    left: usize,
}

/// A change that was not begun.
#[derive(Debug)]
struct Waiting {
    owner: Owner,
    unit: Arc<Unit>,
    change: ReservationChange,
}

/// Queue of several nexuses, which take turns.
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

    /// The oldest of the nexus whose turn it is.
    fn pop(&mut self) -> Option<T> {
        let (nexus, mut own) = self.0.pop_front()?;
        let one = own.pop_front();
        if !own.is_empty() {
            self.0.push_back((nexus, own));
        }
        one
    }

    /// Drops those that are meant; whether there were any.
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

impl Worker {
    /// Has a change saved when it is its nexus's turn.
    pub(super) fn change_reservations(
        &mut self,
        owner: Owner,
        unit: UnitIdx,
        change: ReservationChange,
    ) {
        let Some(unit) = self.catalog.unit(unit) else {
            return self.refuse_change(owner);
        };
        let nexus = change.nexus();
        let waiting = Waiting {
            owner,
            unit,
            change,
        };
        self.saver.waiting.push(nexus, waiting);
        self.save_next();
    }

    /// Begins the next change, unless one is being saved.
    fn save_next(&mut self) {
        let saver = &mut self.saver;
        // Made with the first change, which most servers never see, and tried again with the next
        // one if there was no thread to be had.
        if saver.helper.is_none() {
            let host = self.env.host();
            saver.helper = Offload::new(1, self.ring.waker(), host.threads()).ok();
        }
        let is_busy = |helper: &Offload<Outcome>| helper.outstanding() > 0;
        if saver.helper.as_ref().is_some_and(is_busy) {
            return;
        }
        let Some(Waiting {
            owner,
            unit,
            change,
        }) = saver.waiting.pop()
        else {
            return;
        };
        saver.last = saver.last.wrapping_add(1);
        let name = saver.last;
        let submitted = saver.helper.as_mut().is_some_and(|helper| {
            let lu = Arc::clone(&unit.lu);
            let job = move || lu.save_reservations(&change);
            helper.submit(Token(name.into()), job).is_ok()
        });
        if !submitted {
            // There is no thread for it.
            return self.refuse_change(owner);
        }
        saver.changes.push(Change {
            name,
            owner: Some(owner),
            unit,
            left: 0,
        });
    }

    fn refuse_change(&mut self, owner: Owner) {
        let refused = StepResult::Reservations(Err(ReservationError::NotSaved));
        self.on_block_done(owner, refused);
    }

    /// A command does not wait for its change any longer; `false` if it did not. It ends at once: a
    /// state directory that hangs must hold up neither task management nor the next login. The
    /// change may take effect all the same, as with every command that is aborted.
    pub(super) fn abandon_change(&mut self, owner: Owner) -> bool {
        let saver = &mut self.saver;
        let is_meant = |waiting: &Waiting| waiting.owner == owner;
        if !saver.waiting.drop_all(is_meant) {
            let changes = &mut saver.changes;
            let Some(at) = changes.iter().position(|c| c.owner == Some(owner)) else {
                return false;
            };
            changes[at].owner = None;
            if changes[at].left > 0 {
                // It is saved, and only the ends of preempted commands are missing.
                // `on_preempted_gone` finds no change for these then.
                changes.swap_remove(at);
            }
        }
        self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
        true
    }

    /// Takes the results of changes; how many there were.
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

    /// A change was saved, or refused. Commands that it preempts are aborted.
    fn on_change_saved(&mut self, name: u32, outcome: Outcome) {
        let at = self.saver.find(name).expect("the change is under way");
        let change = &mut self.saver.changes[at];
        let (result, preempted) = match outcome {
            Ok(preempted) => (Ok(()), preempted),
            Err(refused) => (Err(refused), None),
        };
        let tasks = preempted.map_or_else(Vec::new, |who| change.unit.preempt(&who));
        change.left = tasks.len();
        if tasks.is_empty() || change.owner.is_none() {
            self.end_change(at, result);
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

    /// A command that a change preempts is gone. With the last one the change is done.
    pub(super) fn on_preempted_gone(&mut self, watcher: TaskRef) {
        let Some(at) = self.saver.find(watcher.generation) else {
            return;
        };
        let change = &mut self.saver.changes[at];
        change.left -= 1;
        if change.left == 0 {
            self.end_change(at, Ok(()));
        }
    }

    fn end_change(&mut self, at: usize, result: Result<(), ReservationError>) {
        let change = self.saver.changes.swap_remove(at);
        if let Some(owner) = change.owner {
            self.on_block_done(owner, StepResult::Reservations(result));
        }
    }
}

impl Saver {
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
    fn nexuses_take_turns_however_much_one_of_them_has() {
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
