//! Tree nodes (directories, attributes and links) and their inodes.

use std::collections::BTreeMap;

/// A directory or link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u64);

impl NodeId {
    /// Directory that contains `target`.
    pub const ROOT: Self = Self(1);

    /// Returns the inode of the directory or link itself.
    #[must_use]
    pub fn ino(self) -> Ino {
        Ino(self.0 << 8)
    }
}

/// An inode number, for a node or for an attribute of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

impl Ino {
    /// Returns the node for this inode.
    #[must_use]
    pub fn node(self) -> NodeId {
        NodeId(self.0 >> 8)
    }

    /// Returns the index of an attribute in its directory, or `None` for the node itself.
    #[must_use]
    pub fn attr(self) -> Option<usize> {
        ((self.0 & 0xff) as usize).checked_sub(1)
    }

    /// Returns the inode for an attribute, based on the index in the table.
    #[must_use]
    pub fn of_attr(dir: NodeId, index: usize) -> Self {
        // A table always has fewer than 255 entries.
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
    /// Parent directory. For the root, this is the root itself.
    pub parent: NodeId,
    /// Name in the parent directory, or empty for the root.
    pub name: String,
    /// Type of this directory, which defines its attributes and rules.
    pub kind: K,
    /// Set if this directory is created and removed together with its parent.
    pub is_default: bool,
    /// Directories and links in this directory.
    pub(super) children: BTreeMap<String, NodeId>,
    /// Values that are different from the table.
    pub(super) values: BTreeMap<&'static str, String>,
    /// Number of links to this directory.
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

    /// Resets all files to their initial values.
    pub(crate) fn clear_values(&mut self) {
        self.values.clear();
    }

    /// Returns the number of links to this directory.
    #[must_use]
    pub fn link_count(&self) -> usize {
        self.links
    }

    /// Returns true if there is a link to this directory: for example, if a device is used by a
    /// LUN, or if a LUN is mapped.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.links > 0
    }
}

/// A symbolic link to a directory in the tree.
#[derive(Clone, Debug)]
pub(super) struct Symlink {
    pub(super) parent: NodeId,
    pub(super) target: NodeId,
}

/// File type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory, created either by a user or together with its parent.
    Dir,
    /// An attribute, which is a regular file.
    File,
    /// A symbolic link to a directory.
    Symlink,
}

/// Result of `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Directory, regular file or link.
    pub kind: EntryKind,
    /// Permission bits, not including the file type.
    pub mode: u16,
    /// Size in bytes as reported by configfs.
    pub size: u64,
    /// Number of links, which for a directory is two plus the number of subdirectories.
    pub nlink: u32,
}

/// An entry in a directory listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in the directory.
    pub name: String,
    /// Inode number.
    pub ino: Ino,
    /// Directory, regular file or link.
    pub kind: EntryKind,
}
