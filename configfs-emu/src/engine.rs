//! The tree over a daemon: a change takes effect before it is there, or is not there.
//!
//! ```text
//! mkdir, write, … ─→ a copy of the tree ─ export ─→ document ─ Daemon::apply ─→ the copy is the tree
//!                        │ the rules say no    │ riserd cannot     │ riserd says no
//!                        └──────── an error number, and nothing has changed ───┘
//! ```
//!
//! The daemon hears of a change only if the configuration changes with it. So nothing reaches it while a
//! portal group is put together that is not enabled yet.

use std::collections::BTreeSet;

use riser_target::config::Config;
use rustix::io::Errno;
use serde_json::Value;

use crate::convert::{self, Rest};
use crate::tree::Tree;
use crate::world::World;

/// Why a daemon did not take a configuration. It still has the one before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// It is not possible, now or ever.
    #[error("{0}")]
    Refused(String),
    /// It did not answer.
    #[error("{0}")]
    Unreachable(String),
}

/// The daemon that serves what the tree says.
pub trait Daemon: Send {
    /// Makes this its configuration. When it returns, the daemon serves so.
    ///
    /// # Errors
    /// [`ApplyError`]; the daemon serves as before.
    fn apply(&mut self, document: &Value) -> Result<(), ApplyError>;
}

/// The tree, the daemon, and what lies between them.
pub struct Engine {
    tree: Tree,
    rest: Rest,
    world: Box<dyn World + Send>,
    daemon: Box<dyn Daemon>,
    applied: Value,
    notes: BTreeSet<String>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl Engine {
    /// Shows what a daemon serves, which is `document`. What cannot be shown is named in the log and
    /// stays as it is.
    #[must_use]
    pub fn new(
        document: &Value,
        nobody: String,
        world: Box<dyn World + Send>,
        daemon: Box<dyn Daemon>,
    ) -> Self {
        let imported = convert::import(document, nobody, &*world);
        for hidden in &imported.hidden {
            tracing::warn!("not shown: {hidden}");
        }
        Self {
            tree: imported.tree,
            rest: imported.rest,
            world,
            daemon,
            applied: document.clone(),
            notes: BTreeSet::new(),
        }
    }

    /// The tree.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Looks at the tree and at the world.
    ///
    /// # Errors
    /// What `look` says.
    pub fn look<T>(
        &self,
        look: impl FnOnce(&Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        look(&self.tree, &*self.world)
    }

    /// Changes the tree, and the daemon with it.
    ///
    /// # Errors
    /// What `change` says; `EINVAL` for what the daemon cannot do, `EIO` if it does not answer. The
    /// reason is in the log, and everything is as it was.
    pub fn change<T>(
        &mut self,
        change: impl FnOnce(&mut Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut tree = self.tree.clone();
        let result = change(&mut tree, &*self.world)?;
        let exported = convert::export(&tree, &self.rest, &*self.world).map_err(|unsaid| {
            tracing::warn!("refused: {unsaid}");
            Errno::INVAL
        })?;
        if exported.document != self.applied {
            self.apply(&exported.document)?;
            self.applied = exported.document;
        }
        let notes: BTreeSet<String> = exported.notes.into_iter().collect();
        for note in notes.difference(&self.notes) {
            tracing::info!("{note}");
        }
        self.notes = notes;
        self.tree = tree;
        Ok(result)
    }

    fn apply(&mut self, document: &Value) -> Result<(), Errno> {
        // A mistake that can be seen from here is no reason to disturb the daemon.
        if let Err(error) = Config::parse(&document.to_string(), "configfs") {
            tracing::warn!("refused: {}: {}", error.path, error.message);
            return Err(Errno::INVAL);
        }
        self.daemon.apply(document).map_err(|error| {
            tracing::warn!("refused by riserd: {error}");
            match error {
                ApplyError::Refused(_) => Errno::INVAL,
                ApplyError::Unreachable(_) => Errno::IO,
            }
        })
    }
}
