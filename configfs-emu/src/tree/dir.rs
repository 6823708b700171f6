//! Nodes of a tree: directories, attributes, links and their inodes.

use std::collections::BTreeMap;

/// A directory or a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u64);

impl NodeId {
    /// The directory in which `target` is.
    pub const ROOT: Self = Self(1);

    /// The inode of the directory or link itself.
    #[must_use]
    pub fn ino(self) -> Ino {
        Ino(self.0 << 8)
    }
}

/// An inode number: a node's, or that of an attribute of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

impl Ino {
    /// The node that it belongs to.
    #[must_use]
    pub fn node(self) -> NodeId {
        NodeId(self.0 >> 8)
    }

    /// Number of the attribute in its directory; `None` is the node itself.
    #[must_use]
    pub fn attr(self) -> Option<usize> {
        ((self.0 & 0xff) as usize).checked_sub(1)
    }

    /// An attribute of a directory by its place in the table.
    #[must_use]
    pub fn of_attr(dir: NodeId, index: usize) -> Self {
        // A table is much shorter than 255.
        Self(dir.ino().0 | (index as u64 + 1))
    }
}

#[derive(Clone, Debug)]
pub(super) enum Node<K> {
    Dir(Dir<K>),
    Symlink(Symlink),
}

/// A directory with its values and children.
#[derive(Clone, Debug)]
pub struct Dir<K> {
    /// The directory above; the root is above itself.
    pub parent: NodeId,
    /// Name in the directory above; empty for the root.
    pub name: String,
    /// The kind, which gives its attributes and rules.
    pub kind: K,
    /// It came with the directory above and goes with it.
    pub is_default: bool,
    /// Directories and links in it.
    pub(super) children: BTreeMap<String, NodeId>,
    /// Values that differ from the table's.
    pub(super) values: BTreeMap<&'static str, String>,
    /// Number of links that lead here.
    pub(super) links: usize,
}

impl<K> Dir<K> {
    pub(super) fn new(parent: NodeId, name: String, kind: K, is_default: bool) -> Self {
        Self {
            parent,
            name,
            kind,
            is_default,
            children: BTreeMap::new(),
            values: BTreeMap::new(),
            links: 0,
        }
    }

    /// Puts every file back to what it began with.
    pub(crate) fn clear_values(&mut self) {
        self.values.clear();
    }

    /// Returns the number of links that lead here.
    #[must_use]
    pub fn link_count(&self) -> usize {
        self.links
    }

    /// Returns true if a link leads here: a device that a LUN serves, a LUN that is mapped.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.links > 0
    }
}

/// A symbolic link to a directory of the tree.
#[derive(Clone, Debug)]
pub(super) struct Symlink {
    pub(super) parent: NodeId,
    pub(super) target: NodeId,
}

/// The file type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory, made by a user or with another one.
    Dir,
    /// An attribute, which is a regular file.
    File,
    /// A symbolic link to a directory.
    Symlink,
}

/// The answer to `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Directory, regular file or link.
    pub kind: EntryKind,
    /// Permission bits, without the file type.
    pub mode: u16,
    /// Size in bytes, as configfs states it.
    pub size: u64,
    /// Links: for a directory two and its subdirectories.
    pub nlink: u32,
}

/// A line of a directory listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in its directory.
    pub name: String,
    /// Number of its inode.
    pub ino: Ino,
    /// Directory, regular file or link.
    pub kind: EntryKind,
}
