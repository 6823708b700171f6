//! The names of logical units, in the state directory.

use std::io;
use std::sync::Arc;

use super::state::StateDir;
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

impl IdentityKeeper for IdentityFile {
    fn load(&self) -> io::Result<Identities> {
        Ok(self.dir.load(FILE, VERSION)?.unwrap_or_default())
    }

    fn save(&self, identities: &Identities) -> io::Result<()> {
        self.dir.save(FILE, VERSION, identities)
    }
}
