//! Changes of reservations that persist through power loss, or that abort commands: a helper thread
//! saves them, so that the worker goes on meanwhile, and then the worker waits for the aborted commands.
//!
//! ```text
//!   being saved ── saved ──→ preempted commands end ── the last is gone ──→ done
//!        └─ refused, or nothing to abort ─────────────────────────────────────↑
//! ```
//!
//! A change whose own command was aborted takes effect all the same, and aborts what it preempts; only
//! nothing waits for that. So nexuses that preempt each other do not wait for each other.

use std::sync::Arc;

use riser_reactor::{Offload, Token};
use riser_scsi::reservation::{Preempted, Refused, ReservationChange};
use riser_scsi::step::{BackendError, StepResult};

use super::Worker;
use super::exec::Owner;
use super::mail::Mail;
use crate::srp::{SendIdx, TaskRef, Unit, UnitIdx};

/// Changes that wait or are being saved at once, of all units.
const MAX_CHANGES: usize = 256;

/// A number that no channel has: a change of reservations waits for the task.
pub(super) const NO_CHANNEL: u64 = u64::MAX;

/// Who is preempted by a change that was saved.
type Outcome = Result<Option<Preempted>, Refused>;

/// The helper, and whose the changes are.
#[derive(Debug, Default)]
pub(super) struct Saver {
    /// The helper, once it was needed.
    helper: Option<Offload<Outcome>>,
    changes: Vec<Change>,
    /// The last name. None is used twice while a change has it.
    last: u32,
}

/// A change under way.
#[derive(Debug)]
struct Change {
    /// The helper's token, and what watchers of preempted commands are known by.
    name: u32,
    /// The command that waits for it. One that was aborted does not: the change runs to its end, and
    /// its owner's name may be another command's by then.
    owner: Option<Owner>,
    unit: Arc<Unit>,
    /// Preempted commands that are not gone yet; none while it is being saved.
    left: usize,
}

impl Worker {
    /// Has a change saved. What finds no room is refused rather than made to wait, since block
    /// operations would wait behind it.
    pub(super) fn change_reservations(
        &mut self,
        owner: Owner,
        unit: UnitIdx,
        change: ReservationChange,
    ) {
        let saver = &mut self.saver;
        if saver.helper.is_none() {
            saver.helper = Offload::new(MAX_CHANGES, self.ring.waker()).ok();
        }
        saver.last = saver.last.wrapping_add(1);
        let name = saver.last;
        let unit = self.catalog.unit(unit);
        let submitted = unit.zip(saver.helper.as_mut()).and_then(|(unit, helper)| {
            let lu = Arc::clone(&unit.lu);
            let job = move || lu.save_reservations(&change);
            helper.submit(Token(name.into()), job).ok()?;
            Some(unit)
        });
        let Some(unit) = submitted else {
            let refused = StepResult::Reservations(Err(Refused::NotSaved));
            return self.on_block_done(owner, refused);
        };
        saver.changes.push(Change {
            name,
            owner: Some(owner),
            unit,
            left: 0,
        });
    }

    /// A command does not wait for its change any longer; `false` if it did not. It ends at once: a
    /// state directory that hangs must hold up neither task management nor the next login. The change
    /// may take effect all the same, as with every command that is aborted.
    pub(super) fn abandon_change(&mut self, owner: Owner) -> bool {
        let changes = &mut self.saver.changes;
        let Some(at) = changes.iter().position(|c| c.owner == Some(owner)) else {
            return false;
        };
        changes[at].owner = None;
        if changes[at].left > 0 {
            changes.swap_remove(at);
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
            ioctx: SendIdx(0),
            generation: name,
        };
        for task in tasks {
            self.tell(task, Mail::AbortTask { task, watcher });
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

    fn end_change(&mut self, at: usize, result: Result<(), Refused>) {
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
