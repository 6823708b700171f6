//! A tree of directories with attribute files and links, using the rules of configfs.
//!
//! configfs itself handles the same checks as any file system (does it exist, is it empty). For
//! anything else, it calls the owner of a directory: which names can be created, which links are
//! allowed, and how to handle a write. The owner has to implement [`Kind`], so this module doesn't
//! need to know about any specific directory.
//!
//! Attribute files don't have separate storage: the [`Kind`] of a directory has a table of them,
//! and the directory only stores values that are different from the table. Cloning a whole tree is
//! cheap because directories are shared until they are changed. We use this to try a change and
//! then revert it.

mod dir;
mod kind;
mod ops;
mod shell;

use std::collections::BTreeMap;
use std::sync::Arc;

use rustix::io::Errno;

pub use self::dir::{Dir, Entry, EntryKind, Ino, Meta, NodeId};
use self::dir::{Node, Symlink};
pub use self::kind::{Access, Attr, Kind};
pub(crate) use self::kind::{Read, Show, Store, Write, line};
pub(crate) use self::shell::Shell;

/// Maximum number of bytes that a write can pass to an attribute: a page minus the last byte.
pub const MAX_WRITE: usize = 4095;

/// A tree of directories, attributes and links, same as in configfs.
#[derive(Clone, Debug)]
pub struct Tree<K> {
    nodes: BTreeMap<NodeId, Arc<Node<K>>>,
    next: u64,
}

impl<K: Kind> Default for Tree<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Kind> Tree<K> {
    /// Creates the same tree as a kernel that has just loaded `target_core_mod`.
    #[must_use]
    pub fn new() -> Self {
        let mut tree = Self {
            nodes: BTreeMap::new(),
            next: NodeId::ROOT.0 + 1,
        };
        let root = Dir::new(NodeId::ROOT, String::new(), K::ROOT, true);
        tree.nodes.insert(NodeId::ROOT, Arc::new(Node::Dir(root)));
        tree.add_groups(NodeId::ROOT);
        tree
    }

    /// Returns an existing directory.
    ///
    /// # Panics
    /// Panics if the directory doesn't exist. The ID must be from this tree and is only valid until
    /// the tree is changed.
    #[must_use]
    pub fn dir(&self, id: NodeId) -> &Dir<K> {
        self.try_dir(id).expect("a directory of this tree")
    }

    fn try_dir(&self, id: NodeId) -> Option<&Dir<K>> {
        match self.nodes.get(&id).map(AsRef::as_ref) {
            Some(Node::Dir(dir)) => Some(dir),
            _ => None,
        }
    }

    pub(crate) fn dir_mut(&mut self, id: NodeId) -> &mut Dir<K> {
        match self.nodes.get_mut(&id).map(Arc::make_mut) {
            Some(Node::Dir(dir)) => dir,
            _ => panic!("a directory of this tree"),
        }
    }

    /// Returns the parent directory. For the root, this is the root itself.
    #[must_use]
    pub fn parent(&self, id: NodeId) -> NodeId {
        self.dir(id).parent
    }

    /// Returns the names and IDs of all subdirectories.
    pub fn subdirs(&self, id: NodeId) -> impl Iterator<Item = (&str, NodeId)> {
        let children = self.dir(id).children.iter();
        children
            .filter(|(_, child)| matches!(self.nodes[child].as_ref(), Node::Dir(_)))
            .map(|(name, child)| (name.as_str(), *child))
    }

    /// Returns the names of all links in a directory, and their target directories.
    pub fn links(&self, id: NodeId) -> impl Iterator<Item = (&str, NodeId)> {
        let children = self.dir(id).children.iter();
        children.filter_map(|(name, child)| match self.nodes[child].as_ref() {
            Node::Symlink(link) => Some((name.as_str(), link.target)),
            Node::Dir(_) => None,
        })
    }

    /// Returns the subdirectory with this name.
    #[must_use]
    pub fn child(&self, id: NodeId, name: &str) -> Option<NodeId> {
        let child = *self.dir(id).children.get(name)?;
        self.try_dir(child).map(|_| child)
    }

    /// Returns the directory for a path relative to the root, without a leading slash.
    #[must_use]
    pub fn find(&self, path: &str) -> Option<NodeId> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(NodeId::ROOT, |at, name| self.child(at, name))
    }

    /// Returns the first parent directory that matches, starting at this directory.
    #[must_use]
    pub fn above(&self, id: NodeId, is_it: impl Fn(&Dir<K>) -> bool) -> Option<NodeId> {
        let mut at = id;
        loop {
            if is_it(self.dir(at)) {
                return Some(at);
            }
            if at == NodeId::ROOT {
                return None;
            }
            at = self.parent(at);
        }
    }

    /// Returns the path of a directory relative to the root, without a leading slash.
    #[must_use]
    pub fn path(&self, id: NodeId) -> String {
        let mut names = Vec::new();
        let mut at = id;
        while at != NodeId::ROOT {
            names.push(self.dir(at).name.as_str());
            at = self.parent(at);
        }
        names.reverse();
        names.join("/")
    }

    /// Returns the stored value of an attribute: this is either the last value written or the
    /// initial value.
    ///
    /// # Panics
    /// Panics if the directory doesn't have this attribute.
    #[must_use]
    pub fn value(&self, id: NodeId, name: &'static str) -> &str {
        let dir = self.dir(id);
        dir.values.get(name).map_or_else(
            || {
                let attr = dir.kind.attrs().iter().find(|a| a.name == name);
                attr.expect("an attribute of this directory").initial
            },
            String::as_str,
        )
    }

    /// Returns a value that has no file, for example if it was set via `control`.
    #[must_use]
    pub fn hidden(&self, id: NodeId, name: &'static str) -> Option<&str> {
        self.dir(id).values.get(name).map(String::as_str)
    }

    /// Stores a value, which may also be a value without a file.
    pub(crate) fn set(&mut self, id: NodeId, name: &'static str, value: impl Into<String>) {
        self.dir_mut(id).values.insert(name, value.into());
    }

    fn insert(&mut self, node: Node<K>) -> NodeId {
        let id = NodeId(self.next);
        self.next += 1;
        self.nodes.insert(id, Arc::new(node));
        id
    }

    /// Creates a directory and its default groups.
    fn add_dir(&mut self, parent: NodeId, name: &str, kind: K, is_default: bool) -> NodeId {
        let dir = Dir::new(parent, name.to_owned(), kind, is_default);
        let id = self.insert(Node::Dir(dir));
        self.dir_mut(parent).children.insert(name.to_owned(), id);
        self.add_groups(id);
        id
    }

    fn add_groups(&mut self, id: NodeId) {
        for (name, kind) in self.dir(id).kind.groups() {
            self.add_dir(id, name, *kind, true);
        }
    }

    fn add_link(&mut self, parent: NodeId, name: &str, target: NodeId) -> NodeId {
        let id = self.insert(Node::Symlink(Symlink { parent, target }));
        self.dir_mut(parent).children.insert(name.to_owned(), id);
        // We need to count links, so that removing a directory doesn't have to search the whole
        // tree for links to it.
        self.dir_mut(target).links += 1;
        id
    }

    /// Removes a directory and everything in it.
    fn drop_dir(&mut self, id: NodeId) {
        let children: Vec<NodeId> = self.dir(id).children.values().copied().collect();
        for child in children {
            self.drop_dir(child);
        }
        let (parent, name) = (self.parent(id), self.dir(id).name.clone());
        self.dir_mut(parent).children.remove(&name);
        self.nodes.remove(&id);
    }

    /// Removes a directory and everything in it, including all links to it.
    pub(crate) fn prune(&mut self, id: NodeId) {
        let is_below = |tree: &Self, node: NodeId| {
            let mut at = node;
            while at != NodeId::ROOT && at != id {
                at = tree.parent(at);
            }
            at == id
        };
        let links = self
            .nodes
            .iter()
            .filter_map(|(link, node)| match node.as_ref() {
                Node::Symlink(Symlink { parent, target }) => Some((*link, *parent, *target)),
                Node::Dir(_) => None,
            });
        let links: Vec<_> = links.collect();
        for (link, parent, target) in links {
            // This link may have already been removed with another directory.
            if !self.nodes.contains_key(&link) {
                continue;
            }
            match (is_below(self, parent), is_below(self, target)) {
                (true, _) => self.drop_link(link),
                (false, true) => self.prune(parent),
                (false, false) => {}
            }
        }
        self.drop_dir(id);
    }

    /// Removes a directory if it's empty, ignoring its default groups.
    pub(crate) fn prune_if_empty(&mut self, id: NodeId) {
        if self.check_empty(id).is_ok() {
            self.drop_dir(id);
        }
    }

    fn drop_link(&mut self, id: NodeId) {
        let Some(Node::Symlink(Symlink { parent, target })) =
            self.nodes.remove(&id).as_deref().cloned()
        else {
            panic!("a link of this tree");
        };
        self.dir_mut(parent)
            .children
            .retain(|_, child| *child != id);
        self.dir_mut(target).links -= 1;
    }

    /// Checks if a directory can be removed: this includes the directory and everything below its
    /// default groups.
    fn check_empty(&self, id: NodeId) -> Result<(), Errno> {
        // As in configfs, a directory can't be removed if there is a link to it, even if it's
        // empty.
        if self.dir(id).links > 0 {
            return Err(Errno::BUSY);
        }
        for child in self.dir(id).children.values() {
            match self.try_dir(*child) {
                Some(dir) if dir.is_default => self.check_empty(*child)?,
                _ => return Err(Errno::NOTEMPTY),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
