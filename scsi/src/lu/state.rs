//! Used to pass the state of an LU on to its replacement, when another process continues to serve
//! the disk.
//!
//! The nexuses are removed with the old process, so initiators will get POWER ON after the next
//! login. But registrations and persistent reservations are based on port names, which don't
//! change. If an initiator has disabled the write cache or enabled write protection, it also relies
//! on this.

use std::sync::PoisonError;

use riser_sync::atomic::Ordering;
use serde::{Deserialize, Serialize};

use super::{Flags, LogicalUnit};
use crate::reservation::Reservations;

/// State that is independent of the nexuses.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnitState {
    modes: Modes,
    /// `None` if the reservations are unknown.
    reservations: Option<Reservations>,
}

/// Modes set via MODE SELECT and START STOP UNIT.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Modes {
    d_sense: bool,
    software_write_protect: bool,
    write_cache: bool,
    stopped: bool,
    #[serde(default)]
    ignore_unrequested_checks: bool,
    /// Set when a flush is still required after the write cache was disabled.
    #[serde(default)]
    owes_flush: bool,
}

impl LogicalUnit {
    /// Returns the state for a new LU that will replace this one in the same process, while
    /// initiators can still send commands to this one. After this, we refuse any change to
    /// reservations and modes with NOT READY, because the new LU would not see it.
    ///
    /// This blocks while a reservation change is being saved.
    #[must_use]
    pub fn retire(&self) -> UnitState {
        let _turn = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let nexuses = self.lock_nexuses();
        self.retired.store(true, Ordering::Relaxed);
        drop(nexuses);
        // We never call `end_saving` here. Any other change has to wait for the mutex, and will
        // then see that this LU is retired.
        self.update_reservations(|all| drop(all.begin_saving()));
        self.export_state()
    }

    /// Returns whether this LU is being replaced. This is only exact while holding the nexus mutex,
    /// and in the critical section of a save.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Returns the state for the new LU.
    #[must_use]
    pub fn export_state(&self) -> UnitState {
        let flags = self.flags();
        UnitState {
            modes: Modes {
                d_sense: flags.contains(Flags::D_SENSE),
                software_write_protect: flags.contains(Flags::SOFTWARE_WRITE_PROTECT),
                write_cache: flags.contains(Flags::WRITE_CACHE),
                stopped: flags.contains(Flags::STOPPED),
                ignore_unrequested_checks: self.ignores_unrequested_checks(),
                owes_flush: self.cache_flushes().owed().is_some(),
            },
            reservations: self
                .knows_reservations()
                .then(|| self.with_reservations(Reservations::lasting)),
        }
    }

    /// Restores the state of the previous LU. This must be called before the first nexus is added.
    /// The state is newer than the state from the keeper, and is saved again because the previous
    /// process may have used a different keeper or none at all. If this fails, the keeper will log
    /// an error, but we can still use the LU.
    ///
    /// This blocks until the keeper returns.
    pub fn import_state(&self, state: &UnitState) {
        let modes = state.modes;
        let mut flags = Flags::empty();
        flags.set(Flags::D_SENSE, modes.d_sense);
        flags.set(Flags::SOFTWARE_WRITE_PROTECT, modes.software_write_protect);
        flags.set(Flags::WRITE_CACHE, modes.write_cache);
        flags.set(Flags::STOPPED, modes.stopped);
        flags.set(
            Flags::IGNORE_UNREQUESTED_CHECKS,
            modes.ignore_unrequested_checks,
        );
        self.restore_flags(flags);
        if modes.owes_flush {
            self.cache_flushes().disable();
        }
        let Some(reservations) = &state.reservations else {
            return;
        };
        let can_persist = self.can_persist();
        let (kept, new) = self.update_reservations(|all| {
            let kept = all.saved();
            *all = reservations.clone();
            // We can't persist this, so PTPL_A must not be set.
            if !can_persist {
                all.stop_persisting();
            }
            (kept, all.saved())
        });
        // The keeper may be using a file, so avoid writing the same state again.
        if kept != new {
            self.save(new.as_ref());
        }
    }
}
