//! The reservations of an LU: which nexus may send a command, and how changes are saved.

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
    /// Loads the reservations for this LU from `keeper`, which is also used to save any change if
    /// an initiator requests this. APTPL is refused without a keeper.
    ///
    /// # Errors
    /// If the keeper is unable to read the saved reservations.
    pub fn with_keeper(mut self, keeper: Arc<dyn ReservationKeeper>) -> io::Result<Self> {
        if let Some(saved) = keeper.load(&self.config.identity)? {
            self.update_reservations(|all| *all = Reservations::restored(saved));
        }
        self.keeper = Some(keeper);
        Ok(self)
    }

    /// Returns the current registrations and reservations.
    #[must_use]
    pub fn registrations(&self) -> Registrations {
        self.with_reservations(Reservations::shown)
    }

    /// Returns whether the reservations set by initiators are known.
    pub(crate) fn knows_reservations(&self) -> bool {
        self.knows_reservations
    }

    /// Returns whether a reservation may restrict any nexus.
    pub(crate) fn is_restricted(&self) -> bool {
        self.restricted.load(Ordering::Acquire)
    }

    /// Returns whether a command with the given flags conflicts with the reservation of another
    /// nexus.
    pub(crate) fn conflicts(&self, id: NexusId, flags: CommandFlags) -> bool {
        // Do this before locking the reservations, because we never hold this mutex and the nexus
        // mutex at the same time. This avoids any problem with the lock order.
        let nexus = self.nexus(id);
        self.with_reservations(|all| all.conflicts(id, nexus.as_ref(), flags))
    }

    pub(crate) fn with_reservations<T>(&self, look: impl FnOnce(&Reservations) -> T) -> T {
        look(&self.lock_reservations())
    }

    pub(crate) fn update_reservations<T>(&self, change: impl FnOnce(&mut Reservations) -> T) -> T {
        let mut all = self.lock_reservations();
        let result = change(&mut all);
        // Update this while holding the mutex, so that we can't overwrite it with an older value.
        // If a READ or WRITE has just read this flag as clear, it is older than the reservation.
        self.restricted.store(all.restricts(), Ordering::Release);
        result
    }

    /// Returns whether reservations can persist through power loss (PTPL_C).
    pub(crate) fn can_persist(&self) -> bool {
        self.keeper.is_some()
    }

    /// Executes a PERSISTENT RESERVE OUT. Returns `None` if the change needs to be saved first, or
    /// if it aborts commands. In this case, [`LogicalUnit::save_reservations`] must be used.
    pub(crate) fn change_reservations(
        &self,
        change: &ReservationChange,
    ) -> Option<Result<(), ReservationError>> {
        let nexus = self.nexus(change.nexus);
        // We need to check and make the change in the same critical section. If a save were started
        // in between, it would then overwrite our change with an older copy.
        let outcome = self.update_reservations(|all| {
            if all.is_step(change) {
                return None;
            }
            // The nexus may have logged out while the command was waiting. We don't know the ports
            // any more, so it can't be registered.
            let nexus = nexus.ok_or(ReservationError::Conflict);
            Some(nexus.and_then(|nexus| all.change(&nexus, change)))
        })?;
        Some(outcome.map(|notices| self.notify(&notices)))
    }

    /// Executes a reservation change as a separate step. If persistence through power loss is
    /// enabled, the change is saved first and only used once it is durable. This then notifies the
    /// affected nexuses. Changes are saved in order. Once started, a change will be completed even
    /// if the command is aborted.
    ///
    /// Returns the nexuses for which commands should be aborted. The caller must do this before it
    /// sends the response, because commands currently in the task set may have been checked before
    /// the change. Commands received after this don't need to be aborted.
    ///
    /// This blocks until the [`ReservationKeeper`] returns.
    ///
    /// # Errors
    /// [`ReservationError`], in which case nothing has been changed.
    pub fn save_reservations(
        &self,
        change: &ReservationChange,
    ) -> Result<Option<Preemption>, ReservationError> {
        // We use two mutexes: this one serializes the changes while a save is blocking. The one for
        // the reservations is only held for a short time, so that we can continue to check commands
        // against the previous state.
        let _turn = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_retired() {
            return Err(ReservationError::Retired);
        }
        let nexus = self.nexus(change.nexus).ok_or(ReservationError::Conflict)?;
        // We only change a copy until it is durable. Otherwise, we might report a reservation that
        // is then lost after a power failure.
        let mut after = self.update_reservations(Reservations::begin_saving);
        let before = after.saved();
        let outcome = after.change(&nexus, change).and_then(|notices| {
            // We also get here for a PREEMPT AND ABORT without persistence, in which case there is
            // no need to save anything.
            let is_new = after.saved() != before;
            let saved = !is_new || self.replace_saved(&before, &after);
            saved.then_some(notices).ok_or(ReservationError::NotSaved)
        });
        let saved = outcome.is_ok().then_some(after);
        // Also do this after an error, because other changes have to wait until the save is done.
        self.update_reservations(|all| all.end_saving(saved));
        let notices = outcome?;
        // Do this after the change, because an initiator will read the reservations when it's
        // notified, and must get the new state.
        self.notify(&notices);
        Ok(change.aborts().then_some(Preemption {
            by: change.nexus,
            ports: notices.registrations_preempted,
        }))
    }

    /// Returns whether a PREEMPT AND ABORT should abort the commands from a nexus. This includes
    /// closed sessions, because a preempted nexus may have logged out while a device was still
    /// executing its commands.
    #[must_use]
    pub fn is_preempted(&self, preempted: &Preemption, id: NexusId) -> bool {
        let is_meant = |nexus: Arc<Nexus>| preempted.ports.iter().any(|ports| ports.is_of(&nexus));
        id != preempted.by && self.nexus(id).is_none_or(is_meant)
    }

    /// Replaces the saved state. Returns `false` on error.
    fn replace_saved(&self, before: &Option<SavedReservations>, after: &Reservations) -> bool {
        let saved = self.save(after.saved().as_ref());
        if !saved {
            // The new state may still have been written, but must not be restored after a power
            // loss.
            self.save(before.as_ref());
        }
        saved
    }

    /// Saves a state via the keeper. Returns `false` on error.
    pub(crate) fn save(&self, state: Option<&SavedReservations>) -> bool {
        let keeper = self.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.save(&self.config.identity, state).is_ok())
    }

    /// Raises the unit attentions for a reservation change.
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

    /// Handles RESERVE. Returns `false` if there is a conflict, or if the nexus has been removed,
    /// because the LU would then never be released.
    pub(crate) fn reserve_unit(&self, id: NexusId) -> bool {
        let is_reserved = self.update_reservations(|all| all.reserve_unit(id));
        // Check this after the update. If a nexus is removed after this point, that will release
        // the LU.
        let is_known = self.nexus(id).is_some();
        if is_reserved && !is_known {
            self.release_unit(id);
        }
        is_reserved && is_known
    }

    /// Handles RELEASE, or the removal of a nexus.
    pub fn release_unit(&self, id: NexusId) {
        self.update_reservations(|all| all.release_unit(id));
    }

    fn lock_reservations(&self) -> MutexGuard<'_, Reservations> {
        self.reservations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
