//! Keeps the tree in sync with a daemon: a change must take effect in the daemon before we update
//! the tree. If it fails, the tree is not changed.
//!
//! ```text
//! mkdir, write, … ─→ a copy of the tree ─ export ─→ document ─ Daemon::apply ─→ the copy is the tree
//!                        │ rejected by rules   │ unsupported       │ rejected by riserd
//!                        └──────── an error number, and nothing has changed ───┘
//! ```
//!
//! There is an exception when a portal group is enabled. LIO always accepts this, and tools that
//! restore a file will stop if there is an error. So we enable the group, but leave out any parts
//! not supported by `riserd` and log them: this can be some of its initiators or LUNs, or the whole
//! group.
//!
//! The daemon is only updated if the configuration has changed. This means that it doesn't see any
//! of the steps used to create a portal group until the group is enabled.
//!
//! The daemon's configuration can also be changed by other users. Our change must replace exactly
//! the configuration shown by the tree. If the daemon returns that its configuration is different,
//! we first update the tree ([`Engine::refresh`]) and then try the change again.

mod lun;

use std::collections::BTreeSet;

use riser_config::{Config, diff};
use rustix::io::Errno;
use serde_json::Value;

use self::lun::ChangedLun;
use crate::convert::{self, Export, Import, Omission, RefusedTarget, Rest};
use crate::rules::{self, Tree};
use crate::world::World;

/// Maximum number of attempts for a change if other users change the configuration at the same
/// time.
const TRIES: usize = 5;

/// Returned if the daemon did not apply a configuration. The previous configuration is still in
/// use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The configuration was rejected and should not be retried.
    #[error("{why}")]
    Refused {
        /// Reason returned by the daemon, to be shown to the user.
        why: String,
        /// Error number, if the daemon received an error from the operating system.
        errno: Option<Errno>,
    },
    /// The daemon's configuration is not the same as last returned by [`Daemon::document`].
    #[error("the configuration was changed in the meantime")]
    Outdated,
    /// The daemon did not respond.
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

/// The daemon that serves the configuration of this tree.
pub trait Daemon: Send {
    /// Returns the current configuration, in the daemon's own format.
    ///
    /// # Errors
    /// Returns [`ApplyError::Unreachable`] if there is no response.
    fn document(&mut self) -> Result<Value, ApplyError>;

    /// Replaces the configuration last returned by [`Daemon::document`]. When this returns, the
    /// daemon is using the new configuration.
    ///
    /// # Errors
    /// Returns an [`ApplyError`] if the daemon still uses the previous configuration.
    fn apply(&mut self, document: &Value) -> Result<(), ApplyError>;
}

/// The tree, the daemon, and the state used to keep them in sync.
pub struct Engine {
    tree: Tree,
    rest: Rest,
    world: Box<dyn World + Send>,
    daemon: Box<dyn Daemon>,
    /// Current configuration, as exported from the tree.
    applied: Value,
    /// Current configuration, as returned by the daemon.
    known: Value,
    notes: BTreeSet<String>,
    /// Parts of the tree that are not served.
    omitted: BTreeSet<Omission>,
    /// Set if the daemon did not respond to the last request.
    is_lost: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl Engine {
    /// Creates a tree that shows the daemon's configuration. If a part of it can't be shown, this
    /// is logged and the part is not changed.
    ///
    /// # Errors
    /// Returns an error if the daemon does not respond.
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
            omitted: BTreeSet::new(),
            is_lost: false,
        };
        engine.show(imported, document);
        Ok(engine)
    }

    /// Returns the tree after the last change or refresh.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Calls a function to read the tree and the world.
    ///
    /// # Errors
    /// Returns any error from `look`.
    pub fn read_tree<T>(
        &self,
        look: impl FnOnce(&Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        look(&self.tree, &*self.world)
    }

    /// Updates the tree with any changes made by other users. If the daemon does not respond, the
    /// tree is not changed.
    pub fn refresh(&mut self) {
        match self.daemon.document() {
            Ok(document) => {
                self.is_lost = false;
                self.adopt_document(document);
            }
            Err(error) if self.is_lost => tracing::debug!(%error, "cannot connect to riserd"),
            Err(error) => {
                self.is_lost = true;
                tracing::warn!(%error, "cannot connect to riserd; the tree is not updated");
            }
        }
    }

    /// Applies a change to both the tree and the daemon.
    ///
    /// # Errors
    /// Returns any error from `change`. If the daemon rejects the change, we return the error
    /// number received from the operating system, or `EINVAL` if the configuration is not
    /// supported, or `EIO` if there is no response. In this case, the reason is logged and nothing
    /// has changed.
    pub fn change<T>(
        &mut self,
        change: impl Fn(&mut Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        // The user has seen the previous tree, but we retry the change with the updates made by
        // other users, so that both are kept. If this fails too often, we return EBUSY.
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

    /// Tries a change once. The outer error is from the tree, and the inner error is from the
    /// daemon.
    fn try_change<T>(
        &mut self,
        change: impl Fn(&mut Tree, &dyn World) -> Result<T, Errno>,
    ) -> Result<Result<T, ApplyError>, Errno> {
        // We need a copy because most operations make several changes before one of them can fail.
        // The nodes are shared.
        let mut tree = self.tree.clone();
        let result = change(&mut tree, &*self.world)?;
        let enabled = self.newly_enabled(&tree);
        let groups = rules::enabled_groups(&tree);
        self.rest.refused.retain(|path, _| groups.contains(path));
        let mut exported = convert::export(&tree, &self.rest, &*self.world);
        self.check_omissions(&exported, &enabled)?;
        // Many of the steps done by a tool, such as creating an empty directory, don't change the
        // daemon's configuration.
        let is_other = exported.document != self.applied;
        if is_other {
            // Update the daemon first, because the tree must not show anything that is not served.
            let applied = match self.apply(&exported.document) {
                Err(ApplyError::Refused {
                    errno: Some(Errno::BUSY),
                    why,
                }) => self.replace_luns(&exported.document, why),
                Err(ApplyError::Refused { why, .. }) if !enabled.groups.is_empty() => {
                    exported = self.leave_out(&tree, &enabled.groups, &why);
                    match exported.document == self.applied {
                        true => Ok(()),
                        false => self.apply(&exported.document),
                    }
                }
                applied => applied,
            };
            if let Err(error) = applied {
                tracing::warn!("refused: {error}");
                return Ok(Err(error));
            }
            self.applied = exported.document;
        }
        self.log(exported.notes, exported.omitted);
        self.tree = tree;
        if is_other {
            // Read the configuration again, because the daemon returns it in its own format.
            self.refresh();
        }
        Ok(Ok(result))
    }

    /// Returns the directories that are enabled in this tree but not served yet.
    fn newly_enabled(&self, tree: &Tree) -> Enabled {
        let was = |path: &String| !self.rest.refused.contains_key(path);
        let groups = rules::enabled_groups(&self.tree).into_iter().filter(was);
        let groups: BTreeSet<String> = groups.collect();
        let devices = rules::enabled_devices(&self.tree);
        Enabled {
            groups: &rules::enabled_groups(tree) - &groups,
            devices: &rules::enabled_devices(tree) - &devices,
        }
    }

    /// Rejects a change if this would remove access from initiators of a directory that is already
    /// enabled.
    fn check_omissions(&self, exported: &Export, enabled: &Enabled) -> Result<(), Errno> {
        let known = |omission: &&Omission| !self.omitted.contains(omission);
        let mut new = exported.omitted.iter().filter(known);
        match new.find(|omission| !enabled.contains(omission)) {
            None => Ok(()),
            Some(omission) => {
                tracing::warn!("refused: {omission}");
                Err(Errno::INVAL)
            }
        }
    }

    /// Applies a document with different backends for some LUNs. Because the daemon rejects this as
    /// a single step, we remove the LUNs and then add them again, but only if they are not used by
    /// a session.
    fn replace_luns(&mut self, document: &Value, why: String) -> Result<(), ApplyError> {
        let busy = Err(ApplyError::Refused {
            why,
            errno: Some(Errno::BUSY),
        });
        let before = self.applied.clone();
        let mut without = document.clone();
        let removed = lun::remove_changed(&before, &mut without);
        if removed.is_empty() || lun::is_used(&removed, &*self.world) {
            return busy;
        }
        self.apply(&without)?;
        let applied = self.add_luns(&removed, &without, document);
        match &applied {
            Ok(()) => {
                let removed: Vec<String> = removed.iter().map(ToString::to_string).collect();
                tracing::info!("removed and added again: {}", removed.join(", "));
            }
            Err(_) => {
                if let Err(error) = self.add_luns(&removed, &without, &before) {
                    tracing::error!(%error, "cannot restore LUNs; they are not served");
                }
            }
        }
        applied
    }

    /// Adds the LUNs that were just removed. We need to keep any other changes made to the
    /// configuration in the meantime.
    fn add_luns(
        &mut self,
        removed: &[ChangedLun],
        without: &Value,
        document: &Value,
    ) -> Result<(), ApplyError> {
        for _ in 0..TRIES {
            let mut current = self.daemon.document()?;
            if !lun::add(removed, without, document, &mut current) {
                break;
            }
            match self.daemon.apply(&current) {
                Err(ApplyError::Outdated) => {}
                applied => return applied,
            }
        }
        Err(ApplyError::Outdated)
    }

    /// Exports a tree without the portal groups that were rejected by the daemon.
    fn leave_out(&mut self, tree: &Tree, groups: &BTreeSet<String>, why: &str) -> Export {
        let whole = convert::export(tree, &self.rest, &*self.world);
        for path in groups {
            let name = tree.find(path).map(|tpg| rules::target_name(tree, tpg));
            let targets = whole.document["targets"].as_array();
            let mut targets = targets.into_iter().flatten();
            let document = targets.find(|doc| doc["name"].as_str() == name.as_deref());
            if let Some(document) = document {
                let refused = RefusedTarget {
                    document: document.clone(),
                    reason: why.to_owned(),
                };
                self.rest.refused.insert(path.clone(), refused);
            }
        }
        convert::export(tree, &self.rest, &*self.world)
    }

    /// Logs any new notes and omissions. We have to check for new ones because each export returns
    /// all of them.
    fn log(&mut self, notes: Vec<String>, omitted: Vec<Omission>) {
        let notes: BTreeSet<String> = notes.into_iter().collect();
        for note in notes.difference(&self.notes) {
            tracing::info!("{note}");
        }
        self.notes = notes;
        let omitted: BTreeSet<Omission> = omitted.into_iter().collect();
        for omission in omitted.difference(&self.omitted) {
            tracing::warn!("not served: {omission}");
        }
        self.omitted = omitted;
    }

    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        // If we can find an error here, there is no need to send this to the daemon.
        Config::parse(&document.to_string(), "configfs").map_err(|mistake| {
            ApplyError::Refused {
                why: mistake.to_string(),
                errno: None,
            }
        })?;
        self.daemon.apply(document)
    }

    /// Updates the tree to show the daemon's configuration, unless they are already the same.
    fn adopt_document(&mut self, document: Value) {
        if document == self.known {
            return;
        }
        // The daemon adds defaults and uses a different order. We should not update the tree
        // because of this: it would lose data that is only in the tree, such as attributes without
        // an effect.
        if is_same(&document, &self.applied) {
            self.known = document;
            return;
        }
        // Only update parts changed by other users, so that all other directories keep
        // their values and inodes.
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
        // If a setting only exists in the tree, this should not change the daemon's configuration.
        let said = convert::export(&self.tree, &self.rest, &*self.world);
        self.applied = match is_same(&said.document, &document) {
            true => said.document,
            false => document.clone(),
        };
        self.omitted = said.omitted.into_iter().collect();
        self.known = document;
    }
}

/// Paths of the directories that are enabled by a change.
#[derive(Debug)]
struct Enabled {
    groups: BTreeSet<String>,
    devices: BTreeSet<String>,
}

impl Enabled {
    fn contains(&self, omission: &Omission) -> bool {
        let mut paths = self.groups.iter().chain(&self.devices);
        paths.any(|path| omission.is_within(path))
    }
}

/// Returns true if two documents are equivalent.
fn is_same(one: &Value, other: &Value) -> bool {
    let parse = |document: &Value| Config::parse(&document.to_string(), "configfs");
    match (parse(one), parse(other)) {
        (Ok(one), Ok(other)) => diff(&one, &other).is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
