//! Failed flushes in the state directory which have not been cleared by an administrator. There is
//! one file per affected logical unit, with the unit's world-wide name in its file name.

use std::io;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use riser_scsi::config::Identity;
use serde::{Deserialize, Serialize};

use super::state::{self, StateDir};
use crate::backend::{FlushFailure, FlushKeeper};

/// Version of the file format.
const VERSION: u32 = 1;

/// Stores failed flushes in a state directory.
#[derive(Debug)]
pub struct FlushFiles {
    dir: Arc<StateDir>,
}

/// Contents of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    /// Unit serial number. If it is different, then this is a different unit, even with the same
    /// world-wide name.
    serial: String,
    errno: i32,
    /// Time of the failure in milliseconds since 1970.
    at: u64,
}

impl FlushFiles {
    /// Creates a store in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

fn file_of(unit: &Identity) -> String {
    state::file_of_unit("flush-failure", unit)
}

impl FlushKeeper for FlushFiles {
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>> {
        let saved: Option<Saved> = self.dir.load(&file_of(unit), VERSION)?;
        let saved = saved.filter(|saved| saved.serial == unit.serial);
        Ok(saved.map(|saved| FlushFailure {
            errno: saved.errno,
            at: UNIX_EPOCH + Duration::from_millis(saved.at),
        }))
    }

    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        let file = file_of(unit);
        let Some(failure) = failure else {
            return self.dir.remove(&file);
        };
        let at = failure.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let saved = Saved {
            serial: unit.serial.clone(),
            errno: failure.errno,
            at: at.as_millis() as u64,
        };
        self.dir.save(&file, VERSION, &saved)
    }
}
