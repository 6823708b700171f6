//! The tree over a daemon: a change takes effect before it is there, or is not there.
//!
//! ```text
//! mkdir, write, … ─→ a copy of the tree ─ export ─→ document ─ Daemon::apply ─→ the copy is the tree
//!                        │ the rules say no    │ riserd cannot     │ riserd says no
//!                        └──────── an error number, and nothing has changed ───┘
//! ```
//!
//! The daemon hears of a change only if the configuration changes with it. So nothing reaches it
//! while a portal group is put together that is not enabled yet.
//!
//! Others configure the daemon as well. A change is made in place of the configuration that the
//! tree shows, or not at all; if the daemon has another one meanwhile, the tree is brought up to
//! date first ([`Engine::refresh`]), and the change is tried on that.

use std::collections::BTreeSet;

use riser_config::{Config, diff};
use rustix::io::Errno;
use serde_json::Value;

use crate::convert::{self, Import, Rest};
use crate::rules::Tree;
use crate::world::World;

/// Attempts at a change, while others change the configuration in between.
const TRIES: usize = 5;

/// A daemon has not taken a configuration. It still has the one before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// It is not possible, now or ever.
    #[error("{why}")]
    Refused {
        /// The daemon's reason, for people.
        why: String,
        /// Error number of the operating system at the daemon, if that is what it failed for.
        errno: Option<Errno>,
    },
    /// Its configuration is not the one that [`Daemon::document`] gave last.
    #[error("the configuration has changed meanwhile")]
    Outdated,
    /// It did not answer.
    #[error("{0}")]
    Unreachable(String),
}

impl ApplyError {
    fn errno(&self) -> Errno {
        match self {
            Self::Refused { errno, .. } => errno.unwrap_or(Errno::INVAL),
            Self::Outdated => Errno::BUSY,
            Self::Unreachable(_) => Errno::IO,
        }
    }
}

/// The daemon that serves what the tree says.
pub trait Daemon: Send {
    /// Its configuration, in its own words.
    ///
    /// # Errors
    /// [`ApplyError::Unreachable`].
    fn document(&mut self) -> Result<Value, ApplyError>;

    /// Makes this its configuration in the place of the one that [`Daemon::document`] gave last.
    /// When it returns, the daemon serves so.
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
    /// The configuration as the tree says it.
    applied: Value,
    /// The same as the daemon says it.
    known: Value,
    notes: BTreeSet<String>,
    /// The daemon did not answer when it was asked last.
    is_lost: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl Engine {
    /// Shows what a daemon serves. What cannot be shown is named in the log and stays as it is.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn new(
        lock_secret: String,
        world: Box<dyn World + Send>,
        mut daemon: Box<dyn Daemon>,
    ) -> Result<Self, ApplyError> {
        let document = daemon.document()?;
        let imported = convert::import(&document, lock_secret, &*world);
        let mut engine = Self {
            tree: Tree::new(),
            rest: Rest::default(),
            world,
            daemon,
            applied: Value::Null,
            known: Value::Null,
            notes: BTreeSet::new(),
            is_lost: false,
        };
        engine.show(imported, document);
        Ok(engine)
    }

    /// The tree as it was after the last change or refresh.
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

    /// Brings the tree up to date with what others have changed in the daemon. While it does not
    /// answer, the tree stays as it is.
    pub fn refresh(&mut self) {
        match self.daemon.document() {
            Ok(document) => {
                self.is_lost = false;
                self.take(document);
            }
            Err(error) if self.is_lost => tracing::debug!(%error, "riserd is not there"),
            Err(error) => {
                self.is_lost = true;
                tracing::warn!(%error, "riserd is not there; the tree is what it was");
            }
        }
    }

    /// Changes the tree, and the daemon with it.
    ///
    /// # Errors
    /// What `change` says; what the operating system said to the daemon, `EINVAL` for what the
    /// daemon cannot do, `EIO` if it does not answer. The reason is in the log, and everything is
    /// as it was.
    pub fn change<T>(
        &mut self,
        change: impl Fn(&mut Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        // Each writer of a file has seen the tree as it was; the change is made again on what
        // others have made of it, so neither is lost. After some tries the writer hears EBUSY.
        for _ in 1..TRIES {
            match self.try_change(&change) {
                Ok(Err(ApplyError::Outdated)) => self.refresh(),
                Ok(done) => return done.map_err(|error| error.errno()),
                Err(errno) => return Err(errno),
            }
        }
        let last = self.try_change(&change)?;
        last.map_err(|error| error.errno())
    }

    /// A change; the outer error is the tree's, the inner one the daemon's.
    fn try_change<T>(
        &mut self,
        change: impl Fn(&mut Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<Result<T, ApplyError>, Errno> {
        // A copy, since most operations change several places before one of them fails. Nodes are
        // shared with it.
        let mut tree = self.tree.clone();
        let result = change(&mut tree, &*self.world)?;
        let exported = convert::export(&tree, &self.rest, &*self.world).map_err(|error| {
            tracing::warn!("refused: {error}");
            Errno::INVAL
        })?;
        // Many steps of a tool, such as making an empty directory, mean nothing to the daemon yet.
        let is_other = exported.document != self.applied;
        if is_other {
            // The daemon first: a file must not show what is not served.
            if let Err(error) = self.apply(&exported.document) {
                tracing::warn!("refused: {error}");
                return Ok(Err(error));
            }
            self.applied = exported.document;
        }
        // The same note comes with each export, and is new only once.
        let notes: BTreeSet<String> = exported.notes.into_iter().collect();
        for note in notes.difference(&self.notes) {
            tracing::info!("{note}");
        }
        self.notes = notes;
        self.tree = tree;
        if is_other {
            // It says it in its own words from now on.
            self.refresh();
        }
        Ok(Ok(result))
    }

    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        // A mistake that can be seen from here is no reason to disturb the daemon.
        Config::parse(&document.to_string(), "configfs").map_err(|mistake| {
            ApplyError::Refused {
                why: mistake.to_string(),
                errno: None,
            }
        })?;
        self.daemon.apply(document)
    }

    /// Shows the daemon's configuration, unless it is what the tree says already.
    fn take(&mut self, document: Value) {
        if document == self.known {
            return;
        }
        // The daemon fills in defaults and sorts in its own way. To rebuild the tree for that
        // would lose what only the tree has, such as attributes without an effect.
        if is_same(&document, &self.applied) {
            self.known = document;
            return;
        }
        // Only what others have changed: directories of the rest keep their values and inodes.
        let shown = convert::update(
            self.tree.clone(),
            self.rest.clone(),
            [&self.known, &document],
            &*self.world,
        );
        self.show(shown, document);
    }

    fn show(&mut self, imported: Import, document: Value) {
        for hidden in &imported.hidden {
            tracing::warn!("not shown: {hidden}");
        }
        self.tree = imported.tree;
        self.rest = imported.rest;
        // What only the tree keeps is no reason to change the daemon's configuration.
        let said = convert::export(&self.tree, &self.rest, &*self.world);
        let said = said.ok().map(|exported| exported.document);
        self.applied = match said {
            Some(said) if is_same(&said, &document) => said,
            _ => document.clone(),
        };
        self.known = document;
    }
}

/// Returns true if two documents mean the same.
fn is_same(one: &Value, other: &Value) -> bool {
    let parse = |document: &Value| Config::parse(&document.to_string(), "configfs");
    match (parse(one), parse(other)) {
        (Ok(one), Ok(other)) => diff(&one, &other).is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
