//! The list of blocked initiators in the state directory.

use std::io;
use std::sync::Arc;

use riser_admin_api::view::BlockedView;
use serde::{Deserialize, Serialize};

use super::state::{self, StateDir};
use crate::sessions::blocklist::BlockKeeper;

/// File name in the state directory.
const FILE: &str = "blocked.json";

/// Version of the file format.
const VERSION: u32 = 1;

/// Result of moving the file away.
const WITHOUT: &str = "without the file, no initiator is blocked";

/// Stores the list in a state directory.
#[derive(Debug)]
pub(super) struct BlockFile {
    dir: Arc<StateDir>,
}

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    blocked: Vec<BlockedView>,
}

impl BlockFile {
    /// Creates a list which is stored in `dir`.
    #[must_use]
    pub(super) fn new(dir: Arc<StateDir>) -> Self {
        Self { dir }
    }
}

impl BlockKeeper for BlockFile {
    fn load(&self) -> io::Result<Vec<BlockedView>> {
        let saved = self.dir.load_generation(FILE, VERSION);
        let saved = saved.map_err(|error| state::advise(error, WITHOUT))?;
        let saved: Option<Saved> = saved.into_content();
        Ok(saved.map_or_else(Vec::new, |saved| saved.blocked))
    }

    fn save(&self, blocked: &[BlockedView]) -> io::Result<()> {
        let blocked = blocked.to_vec();
        self.dir.save_generation(FILE, VERSION, &Saved { blocked })
    }
}
