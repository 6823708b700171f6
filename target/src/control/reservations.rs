//! Reservations that persist through power loss, in the state directory. There is one file per
//! logical unit with reservations, with the unit's world-wide name in its file name.

use std::io;
use std::sync::Arc;

use riser_scsi::config::Identity;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use serde::{Deserialize, Serialize};

use super::state::{self, StateDir};

/// Version of the file format.
const VERSION: u32 = 1;

/// Result of moving a file away.
const WITHOUT: &str = "without the file, the unit has no reservation, and hosts without access can \
                       write until other hosts register";

/// Stores reservations in a state directory.
#[derive(Debug)]
pub struct ReservationFiles {
    dir: Arc<StateDir>,
}

/// Contents of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    /// Unit serial number. If it is different, then this is a different unit, even with the same
    /// world-wide name.
    serial: String,
    reservations: SavedReservations,
}

impl ReservationFiles {
    /// Creates a store in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

/// Returns the file name for a unit.
fn file_of(unit: &Identity) -> String {
    state::file_of_unit("reservations", unit)
}

impl ReservationKeeper for ReservationFiles {
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>> {
        let saved = self.dir.load(&file_of(unit), VERSION);
        let saved: Option<Saved> = saved.map_err(|error| state::advise(error, WITHOUT))?;
        let saved = saved.filter(|saved| saved.serial == unit.serial);
        Ok(saved.map(|saved| saved.reservations))
    }

    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()> {
        let file = file_of(unit);
        let done = match state {
            None => self.dir.remove(&file),
            Some(state) => {
                let saved = Saved {
                    serial: unit.serial.clone(),
                    reservations: state.clone(),
                };
                self.dir.save(&file, VERSION, &saved)
            }
        };
        done.inspect_err(|error| {
            let path = self.dir.path().join(&file);
            tracing::error!(path = %path.display(), %error, "cannot save reservations");
        })
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::config::Config;
    use riser_scsi::lu::LogicalUnit;

    use super::*;
    use crate::fixture::unit_config;

    fn unit(serial: &str) -> Config {
        let mut config = unit_config(8);
        config.identity.serial = serial.into();
        config
    }

    #[test]
    fn file_belongs_to_unit_with_same_names() {
        let name = format!("riserd-reservations-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        let dir = Arc::new(StateDir::lock(&path).unwrap());
        let keeper = Arc::new(ReservationFiles::new(Arc::clone(&dir)));
        let identity = unit("one").identity;
        assert_eq!(keeper.load(&identity).unwrap(), None);
        let text = r#"{ "version": 1, "serial": "one", "reservations": {
            "registrants": [{ "key": 10, "ports": { "relative_id": 1,
                "initiator": { "Iscsi": "a,i,0x1" }, "target": { "Iscsi": "b,t,0x1" } } }],
            "held": null } }"#;
        let file = file_of(&identity);
        dir.replace(&file, text.as_bytes()).unwrap();
        let saved = keeper.load(&identity).unwrap().unwrap();
        let registrants = |serial| {
            let lu = LogicalUnit::new(unit(serial)).unwrap();
            let lu = lu.with_keeper(keeper.clone()).unwrap();
            lu.registrations().registrants.len()
        };
        assert_eq!((registrants("one"), registrants("two")), (1, 0));
        keeper.save(&identity, None).unwrap();
        assert_eq!(keeper.load(&identity).unwrap(), None);
        keeper.save(&identity, Some(&saved)).unwrap();
        assert_eq!(keeper.load(&identity).unwrap(), Some(saved));
        for damaged in ["{", &text.replace("\"version\": 1", "\"version\": 2")] {
            dir.replace(&file, damaged.as_bytes()).unwrap();
            let error = keeper.load(&identity).unwrap_err().to_string();
            assert!(error.contains(&file), "{error}");
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}
