//! In-memory implementation of the target's state directory.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::config::Identity;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_target::server::identities::{Identities, IdentityKeeper};
use riser_target::server::ports::{PortKeeper, WrittenPort};
use serde::{Deserialize, Serialize};

use crate::coverage;

/// A failure mode of the state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveFailure {
    /// No space left: the previous state is kept.
    Full,
    /// The device fails after writing the new state, which may be lost later.
    Broken,
}

/// File system of the state directory. All clones refer to the same file system.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saves(Arc<Mutex<Option<SaveFailure>>>);

impl Saves {
    /// Sets or clears the failure mode.
    pub(crate) fn set(&self, failure: Option<SaveFailure>) {
        *lock(&self.0) = failure;
    }

    /// Saves a change if possible.
    pub(crate) fn save(&self, write: impl FnOnce()) -> io::Result<()> {
        let errno = match *lock(&self.0) {
            None => {
                write();
                return Ok(());
            }
            Some(SaveFailure::Full) => libc::ENOSPC,
            Some(SaveFailure::Broken) => {
                write();
                libc::EIO
            }
        };
        coverage::note("save", "state directory", "failed");
        Err(io::Error::from_raw_os_error(errno))
    }
}

/// Reservations that persist through power loss, identified by serial number, port numbers and unit
/// names.
#[derive(Clone, Debug, Default)]
pub struct SavedState {
    reservations: Arc<Mutex<BTreeMap<String, SavedReservations>>>,
    ports: Arc<Mutex<Vec<WrittenPort>>>,
    identities: Arc<Mutex<Identities>>,
    pub(crate) saves: Saves,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReservationKeeper for SavedState {
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>> {
        Ok(lock(&self.reservations).get(&unit.serial).cloned())
    }

    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()> {
        self.saves.save(|| {
            let mut all = lock(&self.reservations);
            match state {
                Some(state) => all.insert(unit.serial.clone(), state.clone()),
                None => all.remove(&unit.serial),
            };
        })
    }
}

impl PortKeeper for SavedState {
    fn load(&self) -> io::Result<Vec<WrittenPort>> {
        Ok(lock(&self.ports).clone())
    }

    fn save(&self, ports: &[WrittenPort]) -> io::Result<()> {
        self.saves.save(|| *lock(&self.ports) = ports.to_vec())
    }
}

impl IdentityKeeper for SavedState {
    fn load(&self) -> io::Result<Identities> {
        Ok(lock(&self.identities).clone())
    }

    fn save(&self, identities: &Identities) -> io::Result<()> {
        let saved = || *lock(&self.identities) = identities.clone();
        self.saves.save(saved)
    }
}
