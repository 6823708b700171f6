//! The names of logical units, in the state directory.

use std::io;
use std::sync::Arc;

use super::state::{self, StateDir};
use crate::config::Location;
use crate::server::identities::{Identities, IdentityKeeper};

/// The file in the state directory.
const FILE: &str = "identities.json";

/// The version of the file's form.
const VERSION: u32 = 1;

/// Keeps names in a state directory.
#[derive(Debug)]
pub struct IdentityFile {
    dir: Arc<StateDir>,
}

impl IdentityFile {
    /// Keeps them in `dir`.
    #[must_use]
    pub fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

/// The names that are kept where a configuration says; none if nothing is kept there. The daemon
/// may be running.
///
/// # Errors
/// Those of the file system; or the file is not one of ours. All name the file.
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
