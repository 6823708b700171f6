//! What the target's state directory keeps, in memory.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use riser_scsi::config::Identity;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};

/// Reservations that persist through power loss, by serial number.
#[derive(Clone, Debug, Default)]
pub struct KeptReservations(Arc<Mutex<BTreeMap<String, SavedReservations>>>);

impl ReservationKeeper for KeptReservations {
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.get(&unit.serial).cloned())
    }

    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match state {
            Some(state) => all.insert(unit.serial.clone(), state.clone()),
            None => all.remove(&unit.serial),
        };
        Ok(())
    }
}
