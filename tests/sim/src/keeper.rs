//! What the target's state directory keeps, in memory.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::config::Identity;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_target::server::identities::{Identities, IdentityKeeper};
use riser_target::server::ports::{PortKeeper, WrittenPort};

/// Reservations that persist through power loss, by serial number, numbers of ports and names of
/// units.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    reservations: Arc<Mutex<BTreeMap<String, SavedReservations>>>,
    ports: Arc<Mutex<Vec<WrittenPort>>>,
    identities: Arc<Mutex<Identities>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReservationKeeper for Kept {
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>> {
        Ok(lock(&self.reservations).get(&unit.serial).cloned())
    }

    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()> {
        let mut all = lock(&self.reservations);
        match state {
            Some(state) => all.insert(unit.serial.clone(), state.clone()),
            None => all.remove(&unit.serial),
        };
        Ok(())
    }
}

impl PortKeeper for Kept {
    fn load(&self) -> io::Result<Vec<WrittenPort>> {
        Ok(lock(&self.ports).clone())
    }

    fn save(&self, ports: &[WrittenPort]) -> io::Result<()> {
        *lock(&self.ports) = ports.to_vec();
        Ok(())
    }
}

impl IdentityKeeper for Kept {
    fn load(&self) -> io::Result<Identities> {
        Ok(lock(&self.identities).clone())
    }

    fn save(&self, identities: &Identities) -> io::Result<()> {
        *lock(&self.identities) = identities.clone();
        Ok(())
    }
}
