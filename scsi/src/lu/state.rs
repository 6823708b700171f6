//! The state that a unit hands over to the one that takes its place, when another program goes on
//! serving the disk.
//!
//! The nexuses end with the old program, and initiators that log in again meet POWER ON. But
//! registrations and persistent reservations belong to the names of ports, which stay; and an
//! initiator that has switched the write cache off or protected the unit counts on it.

use std::sync::PoisonError;

use riser_sync::atomic::Ordering;
use serde::{Deserialize, Serialize};

use super::{Flags, LogicalUnit};
use crate::reservation::Reservations;

/// The state of a unit that outlives its nexuses.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnitState {
    modes: Modes,
    /// `None` if they are not known.
    reservations: Option<Reservations>,
}

/// Modes, as MODE SELECT and START STOP UNIT have made them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Modes {
    d_sense: bool,
    software_write_protect: bool,
    write_cache: bool,
    stopped: bool,
}

impl LogicalUnit {
    /// The state for the unit that takes its place in the same process, while initiators may still
    /// reach this one: from here on it refuses changes of its reservations and modes as NOT READY,
    /// as none may succeed that the other unit does not know.
    ///
    /// Blocks as long as a change of reservations is saved.
    #[must_use]
    pub fn retire(&self) -> UnitState {
        let _turn = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let nexuses = self.lock_nexuses();
        self.retired.store(true, Ordering::Relaxed);
        drop(nexuses);
        // Without an end: each change waits for its turn, and finds that the unit is retired.
        self.update_reservations(|all| drop(all.begin_saving()));
        self.export_state()
    }

    /// Returns whether another unit takes its place. Exact under the mutex of the nexuses, and in
    /// turn for a save.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// The state for the unit that takes its place.
    #[must_use]
    pub fn export_state(&self) -> UnitState {
        let flags = self.flags();
        UnitState {
            modes: Modes {
                d_sense: flags.contains(Flags::D_SENSE),
                software_write_protect: flags.contains(Flags::SOFTWARE_WRITE_PROTECT),
                write_cache: flags.contains(Flags::WRITE_CACHE),
                stopped: flags.contains(Flags::STOPPED),
            },
            reservations: self
                .knows_reservations()
                .then(|| self.with_reservations(Reservations::lasting)),
        }
    }

    /// Takes over the state of the unit before, before there is any nexus. It is newer than what
    /// the keeper had, and is saved in its place: the program before may have had another keeper,
    /// or none. Where saving fails, which the keeper reports, the unit serves all the same.
    ///
    /// Blocks as long as the keeper does.
    pub fn import_state(&self, state: &UnitState) {
        let modes = state.modes;
        let mut flags = Flags::empty();
        flags.set(Flags::D_SENSE, modes.d_sense);
        flags.set(Flags::SOFTWARE_WRITE_PROTECT, modes.software_write_protect);
        flags.set(Flags::WRITE_CACHE, modes.write_cache);
        flags.set(Flags::STOPPED, modes.stopped);
        self.restore_flags(flags);
        let Some(reservations) = &state.reservations else {
            return;
        };
        let can_persist = self.can_persist();
        let (kept, new) = self.update_reservations(|all| {
            let kept = all.saved();
            *all = reservations.clone();
            // PTPL_A would promise what this unit cannot keep.
            if !can_persist {
                all.stop_persisting();
            }
            (kept, all.saved())
        });
        // The keeper may be a disk, so what it has already is not written again.
        if kept != new {
            self.save(new.as_ref());
        }
    }
}
