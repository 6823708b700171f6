//! Changes of the protection type by FORMAT UNIT. The type is stored in the file of a backend, which
//! may block, so each change uses a separate thread.
//!
//! A change is not abandoned if its command is aborted: like other block operations, the command
//! waits for it.

use riser_reactor::{Offload, Ring, Token};
use riser_scsi::protection::ProtectionChange;
use riser_scsi::step::{BackendError, StepResult};

use super::PollGroup;
use super::env::Env;
use super::work::Owner;
use crate::fabric::UnitIdx;

/// Pending changes. A FORMAT UNIT executes alone, so there is at most one change for each unit.
#[derive(Debug, Default)]
pub(super) struct Formats(Vec<Format>);

/// A change that is being stored.
#[derive(Debug)]
struct Format {
    owner: Owner,
    thread: Offload<Result<(), BackendError>>,
}

impl PollGroup {
    /// Stores the protection type of a unit.
    pub(super) fn change_protection(
        &mut self,
        owner: Owner,
        unit: UnitIdx,
        change: ProtectionChange,
    ) {
        let unit = self.catalog.unit(unit);
        let store = unit.as_ref().and_then(|unit| self.catalog.store_of(unit));
        let (Some(unit), Some(store)) = (&unit, store) else {
            return self.on_block_done(owner, StepResult::Failed(BackendError::NotReady));
        };
        let (lu, store) = (unit.lu.clone(), store.clone());
        let job = move || lu.save_protection(&change, |new| store.format(new));
        if !self.formats.start(owner, job, &self.ring, &*self.env) {
            self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
        }
    }
}

impl Formats {
    /// Starts a thread for a change. Returns `false` if this is not possible.
    fn start(
        &mut self,
        owner: Owner,
        job: impl FnOnce() -> Result<(), BackendError> + Send + 'static,
        ring: &Ring,
        env: &dyn Env,
    ) -> bool {
        let host = env.host();
        let Ok(mut thread) = Offload::new(1, ring.waker(), host.threads()) else {
            return false;
        };
        let is_started = thread.submit(Token(0), job).is_ok();
        if is_started {
            self.0.push(Format { owner, thread });
        }
        is_started
    }

    /// Returns the next change that has ended, by its command.
    pub(super) fn poll_result(&mut self) -> Option<(Owner, StepResult)> {
        let mut formats = self.0.iter_mut().enumerate();
        let (at, (_, result)) =
            formats.find_map(|(at, format)| Some((at, format.thread.poll_result()?)))?;
        let result = result.map_or_else(StepResult::Failed, |()| StepResult::Done);
        Some((self.0.swap_remove(at).owner, result))
    }
}
