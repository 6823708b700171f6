//! The reservations of a unit: who may send a command, and changes that are saved.

use std::io;
use std::sync::{Arc, PoisonError};

use riser_sync::MutexGuard;
use riser_sync::atomic::Ordering;

use super::LogicalUnit;
use crate::attention::Attention;
use crate::flags::CommandFlags;
use crate::nexus::{Nexus, NexusId};
use crate::reservation::{
    Notices, Preemption, Registrations, ReservationChange, ReservationError, ReservationKeeper,
    Reservations, SavedReservations,
};

impl LogicalUnit {
    /// The same unit with the reservations that `keeper` has of it, which also keeps those to come
    /// if initiators ask for it. Without a keeper, APTPL is refused.
    ///
    /// # Errors
    /// The keeper cannot read the saved reservations.
    pub fn with_keeper(mut self, keeper: Arc<dyn ReservationKeeper>) -> io::Result<Self> {
        if let Some(saved) = keeper.load(&self.config.identity)? {
            self.update_reservations(|all| *all = Reservations::restored(saved));
        }
        self.keeper = Some(keeper);
        Ok(self)
    }

    /// The registrations and reservations of the unit.
    #[must_use]
    pub fn registrations(&self) -> Registrations {
        self.with_reservations(Reservations::shown)
    }

    /// Returns whether its reservations are what initiators have made them.
    pub(crate) fn knows_reservations(&self) -> bool {
        self.knows_reservations
    }

    /// Whether reservations may restrict any nexus.
    pub(crate) fn is_restricted(&self) -> bool {
        self.restricted.load(Ordering::Acquire)
    }

    /// Returns whether the reservation of another nexus forbids a command with these flags.
    pub(crate) fn conflicts(&self, id: NexusId, flags: CommandFlags) -> bool {
        // Looked up before the reservations are locked: their mutex and that of the nexuses are
        // never held together, so their order can never be wrong.
        let nexus = self.nexus(id);
        self.with_reservations(|all| all.conflicts(id, nexus.as_ref(), flags))
    }

    pub(crate) fn with_reservations<T>(&self, look: impl FnOnce(&Reservations) -> T) -> T {
        look(&self.lock_reservations())
    }

    pub(crate) fn update_reservations<T>(&self, change: impl FnOnce(&mut Reservations) -> T) -> T {
        let mut all = self.lock_reservations();
        let result = change(&mut all);
        // Under the mutex, so that the flag cannot fall behind a later change. A READ or WRITE
        // that has seen it clear a moment before counts as older than the reservation.
        self.restricted.store(all.restricts(), Ordering::Release);
        result
    }

    /// Returns whether reservations can persist through power loss (PTPL_C).
    pub(crate) fn can_persist(&self) -> bool {
        self.keeper.is_some()
    }

    /// Carries out a PERSISTENT RESERVE OUT. `None` if the change has to be saved first or aborts
    /// commands, which begins with [`LogicalUnit::save_reservations`].
    pub(crate) fn change_reservations(
        &self,
        change: &ReservationChange,
    ) -> Option<Result<(), ReservationError>> {
        let nexus = self.nexus(change.nexus);
        // The question and the change are one critical section: a save that began between them
        // would replace what is changed here by its older copy.
        let outcome = self.update_reservations(|all| {
            if all.is_step(change) {
                return None;
            }
            // The nexus may have logged out while its command waited. It must not register any
            // more: its ports are not known.
            let nexus = nexus.ok_or(ReservationError::Conflict);
            Some(nexus.and_then(|nexus| all.change(&nexus, change)))
        })?;
        Some(outcome.map(|notices| self.notify(&notices)))
    }

    /// Carries out a change of reservations that is a step of its own: saves it where it must
    /// persist through power loss, lets it take effect when it is durable, and notifies the nexuses
    /// concerned. Changes are saved one after another. What was begun so takes effect although its
    /// command is aborted meanwhile.
    ///
    /// Returns whose commands are to be aborted, which the caller does before the command is
    /// answered: those in the task set now may have been let through before, and later ones are
    /// not.
    ///
    /// Blocks as long as the [`ReservationKeeper`] does.
    ///
    /// # Errors
    /// [`ReservationError`]; nothing has changed.
    pub fn save_reservations(
        &self,
        change: &ReservationChange,
    ) -> Result<Option<Preemption>, ReservationError> {
        // Two mutexes: this one makes changes wait for each other as long as a save blocks; that
        // of the reservations is held for moments, so that commands go on being checked against
        // the state before.
        let _turn = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_retired() {
            return Err(ReservationError::Retired);
        }
        let nexus = self.nexus(change.nexus).ok_or(ReservationError::Conflict)?;
        // Only a copy is changed until it is durable. The other order would report a reservation
        // that a power loss takes back.
        let mut after = self.update_reservations(Reservations::begin_saving);
        let before = after.saved();
        let outcome = after.change(&nexus, change).and_then(|notices| {
            // PREEMPT AND ABORT comes here also where nothing persists; then there is nothing to
            // save.
            let is_new = after.saved() != before;
            let saved = !is_new || self.keep(&before, &after);
            saved.then_some(notices).ok_or(ReservationError::NotSaved)
        });
        let saved = outcome.is_ok().then_some(after);
        // Also after a failure: every other change waits until the save is over.
        self.update_reservations(|all| all.end_saving(saved));
        let notices = outcome?;
        // After the change: an initiator that is notified asks for the reservations and must see
        // the new ones.
        self.notify(&notices);
        Ok(change.aborts().then_some(Preemption {
            by: change.nexus,
            ports: notices.registrations_preempted,
        }))
    }

    /// Whether a PREEMPT AND ABORT aborts the commands of a nexus. Those of sessions that have
    /// ended are among them: a preempted nexus may have logged out while a device held its
    /// commands.
    #[must_use]
    pub fn is_preempted(&self, preempted: &Preemption, id: NexusId) -> bool {
        let is_meant = |nexus: Arc<Nexus>| preempted.ports.iter().any(|ports| ports.is_of(&nexus));
        id != preempted.by && self.nexus(id).is_none_or(is_meant)
    }

    /// Saves a state in the place of another one; `false` if it could not.
    fn keep(&self, before: &Option<SavedReservations>, after: &Reservations) -> bool {
        let saved = self.save(after.saved().as_ref());
        if !saved {
            // The new state may be there all the same, and must not come back after a power loss.
            self.save(before.as_ref());
        }
        saved
    }

    /// Makes the keeper keep a state; `false` if it could not.
    pub(crate) fn save(&self, state: Option<&SavedReservations>) -> bool {
        let keeper = self.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.save(&self.config.identity, state).is_ok())
    }

    /// Raises the unit attentions of a change of reservations.
    fn notify(&self, notices: &Notices) {
        let mut nexuses = self.lock_nexuses();
        for (attention, concerned) in [
            (
                Attention::ReservationsPreempted,
                &notices.reservations_preempted,
            ),
            (
                Attention::ReservationsReleased,
                &notices.reservations_released,
            ),
            (
                Attention::RegistrationsPreempted,
                &notices.registrations_preempted,
            ),
        ] {
            nexuses.raise_where(attention, |_, nexus| {
                concerned.iter().any(|ports| ports.is_of(nexus))
            });
        }
    }

    /// RESERVE. `false` where it conflicts, or the nexus is not known any more: its end would not
    /// release the unit.
    pub(crate) fn reserve_unit(&self, id: NexusId) -> bool {
        let is_reserved = self.update_reservations(|all| all.reserve_unit(id));
        // Afterwards: a nexus that leaves later releases it.
        let is_known = self.nexus(id).is_some();
        if is_reserved && !is_known {
            self.release_unit(id);
        }
        is_reserved && is_known
    }

    /// RELEASE, or the end of a nexus.
    pub(crate) fn release_unit(&self, id: NexusId) {
        self.update_reservations(|all| all.release_unit(id));
    }

    fn lock_reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
