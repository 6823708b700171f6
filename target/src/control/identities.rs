//! The names of logical units in the state directory.

use std::io;
use std::sync::Arc;

use super::state::{self, StateDir};
use crate::config::Location;
use crate::server::identities::{Identities, IdentityKeeper};

/// File name in the state directory.
const FILE: &str = "identities.json";

/// Version of the file format.
const VERSION: u32 = 1;

/// Stores names in a state directory.
#[derive(Debug)]
pub struct IdentityFile {
    dir: Arc<StateDir>,
}

impl IdentityFile {
    /// Creates a store in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

/// Returns the stored names for the configured location, or an empty list if there is no file. This
/// can be used while the daemon is running.
///
/// # Errors
/// Fails on file system errors, or if the file is not valid. All errors contain the file name.
pub fn kept(location: &Location) -> io::Result<Identities> {
    let directory = match location {
        Location::Off => None,
        Location::At(path) => Some(path.clone()),
        Location::Default => state::default_path(),
    };
    let kept = directory.map(|directory| state::load(&directory.join(FILE), VERSION));
    Ok(kept.transpose()?.flatten().unwrap_or_default())
}

impl IdentityKeeper for IdentityFile {
    fn load(&self) -> io::Result<Identities> {
        Ok(self.dir.load(FILE, VERSION)?.unwrap_or_default())
    }

    fn save(&self, identities: &Identities) -> io::Result<()> {
        self.dir.save(FILE, VERSION, identities)
    }
}
