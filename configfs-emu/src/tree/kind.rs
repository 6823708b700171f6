//! Directory types, which must be implemented by the owner of a directory, and attribute files.

use std::fmt::Debug;
use std::ops::RangeInclusive;

use rustix::io::Errno;

use super::{NodeId, Tree};
use crate::number;
use crate::world::World;

/// A directory type, including the rules of its owner.
pub trait Kind: Copy + Debug + 'static {
    /// Parent directory of `target`.
    const ROOT: Self;

    /// Returns the files in this directory.
    #[must_use]
    fn attrs(self) -> &'static [Attr<Self>];

    /// Returns the names and types of subdirectories that are created with this directory.
    #[must_use]
    fn groups(self) -> &'static [(&'static str, Self)];

    /// Returns the type to use for a new subdirectory.
    ///
    /// # Errors
    /// Returns an error if a directory with this name can't be created here.
    fn make(
        self,
        tree: &Tree<Self>,
        id: NodeId,
        name: &str,
        world: &dyn World,
    ) -> Result<Self, Errno>;

    /// Sets initial values for a new directory, in addition to the table.
    fn on_made(self, tree: &mut Tree<Self>, id: NodeId);

    /// Returns true if this directory can contain links.
    #[must_use]
    fn takes_links(self) -> bool;

    /// Checks if a link from this directory to another directory is allowed.
    ///
    /// # Errors
    /// Returns an error if a link to the target is not allowed.
    fn allow_link(self, tree: &Tree<Self>, id: NodeId, target: NodeId) -> Result<(), Errno>;

    /// Updates values after a link was created.
    fn on_linked(self, tree: &mut Tree<Self>, id: NodeId, target: NodeId, world: &dyn World);

    /// Resets values after a link was removed.
    fn on_unlinked(self, tree: &mut Tree<Self>, id: NodeId);

    /// Returns true if the device for this directory is currently exported. In this case, files
    /// with [`Attr::is_locked`] can't be changed.
    #[must_use]
    fn is_exported(tree: &Tree<Self>, id: NodeId) -> bool;
}

/// File permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Mode 0644: readable for all users, writable for root.
    ReadWrite,
    /// Mode 0444: can't be opened for writing by any user.
    ReadOnly,
    /// Mode 0200: can't be opened for reading by any user.
    WriteOnly,
}

impl Access {
    /// Returns the permission bits of the file mode.
    #[must_use]
    pub fn mode(self) -> u16 {
        match self {
            Self::ReadWrite => 0o644,
            Self::ReadOnly => 0o444,
            Self::WriteOnly => 0o200,
        }
    }
}

/// How to create the content of a file.
#[derive(Clone, Copy)]
pub(crate) enum Show<K: 'static> {
    /// Value followed by a newline.
    Line,
    /// Value followed by a newline, or an empty file if there is no value.
    LineIfAny,
    /// Call this function, which can use the tree and the world.
    With(fn(&Read<'_, K>) -> Result<String, Errno>),
}

/// How to handle a write to a file.
#[derive(Clone)]
pub(crate) enum Store<K: 'static> {
    /// The file is not writable.
    Never,
    /// Accept and ignore the value.
    Ignored,
    /// Boolean, stored as `1` or `0`.
    Bool,
    /// Number in this range, stored in decimal.
    Number(RangeInclusive<u32>),
    /// Same, but LIO parses 64 bits: a value larger than 32 bits is out of range instead of
    /// invalid.
    Long(RangeInclusive<u32>),
    /// Text shorter than this number of bytes, without the newline. Otherwise, return this error.
    Text(usize, Errno),
    /// Call this function, which can change the tree.
    With(fn(&mut Write<'_, K>) -> Result<(), Errno>),
}

/// A file in a directory.
pub struct Attr<K: 'static> {
    /// File name.
    pub name: &'static str,
    /// Access for all users.
    pub access: Access,
    /// Value before the first write.
    pub initial: &'static str,
    pub(crate) show: Show<K>,
    pub(crate) store: Store<K>,
    /// Set if this file can't be changed while the device is exported.
    pub(crate) is_locked: bool,
}

impl<K> std::fmt::Debug for Attr<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Attr").field(&self.name).finish()
    }
}

/// A read request for a file.
#[derive(Clone, Copy)]
pub(crate) struct Read<'a, K: 'static> {
    pub(crate) tree: &'a Tree<K>,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr<K>,
    pub(crate) world: &'a dyn World,
}

/// A write request for a file.
pub(crate) struct Write<'a, K: 'static> {
    pub(crate) tree: &'a mut Tree<K>,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr<K>,
    pub(crate) text: &'a str,
    pub(crate) world: &'a dyn World,
}

impl<K: Kind> Write<'_, K> {
    /// Stores the value of this file.
    pub(crate) fn keep(&mut self, value: impl Into<String>) {
        self.tree.set(self.dir, self.attr.name, value);
    }
}

impl<K: 'static> Attr<K> {
    /// Creates a file that can be read and written.
    pub(crate) const fn rw(name: &'static str, initial: &'static str, store: Store<K>) -> Self {
        Self {
            name,
            access: Access::ReadWrite,
            initial,
            show: Show::Line,
            store,
            is_locked: false,
        }
    }

    /// Creates a file that can only be read.
    pub(crate) const fn ro(name: &'static str, show: Show<K>) -> Self {
        Self {
            name,
            access: Access::ReadOnly,
            initial: "",
            show,
            store: Store::Never,
            is_locked: false,
        }
    }

    /// Creates a file that can only be read and always has the same value.
    pub(crate) const fn fixed(name: &'static str, value: &'static str) -> Self {
        let mut attr = Self::ro(name, Show::Line);
        attr.initial = value;
        attr
    }

    /// Sets how to show the content.
    pub(crate) const fn shown(self, show: Show<K>) -> Self {
        // We need to set all fields because this is used at compile time.
        Self {
            name: self.name,
            access: self.access,
            initial: self.initial,
            show,
            store: match self.store {
                Store::Never => Store::Never,
                Store::Ignored => Store::Ignored,
                Store::Bool => Store::Bool,
                Store::Number(ref range) => Store::Number(*range.start()..=*range.end()),
                Store::Long(ref range) => Store::Long(*range.start()..=*range.end()),
                Store::Text(max, errno) => Store::Text(max, errno),
                Store::With(with) => Store::With(with),
            },
            is_locked: self.is_locked,
        }
    }

    /// Same as `rw`, but the file can't be changed while the device is exported.
    pub(crate) const fn locked(name: &'static str, initial: &'static str, store: Store<K>) -> Self {
        let mut attr = Self::rw(name, initial, store);
        attr.is_locked = true;
        attr
    }
}

impl<K: Kind> Attr<K> {
    pub(crate) fn read(&self, read: &Read<'_, K>) -> Result<String, Errno> {
        let value = || read.tree.value(read.dir, self.name);
        Ok(match self.show {
            Show::Line => format!("{}\n", value()),
            Show::LineIfAny if value().is_empty() => String::new(),
            Show::LineIfAny => format!("{}\n", value()),
            Show::With(show) => show(read)?,
        })
    }

    pub(crate) fn write(&self, write: &mut Write<'_, K>) -> Result<(), Errno> {
        let is_exported = self.is_locked && K::is_exported(write.tree, write.dir);
        // As in the kernel, the text is checked before the state: an invalid value must return
        // EINVAL or ERANGE even if the device is exported.
        let check = || {
            if is_exported {
                Err(Errno::INVAL)
            } else {
                Ok(())
            }
        };
        match &self.store {
            Store::Never => Err(Errno::ACCESS),
            Store::Ignored => Ok(()),
            Store::Bool => {
                let value = number::boolean(write.text)?;
                check()?;
                write.keep(if value { "1" } else { "0" });
                Ok(())
            }
            Store::Number(range) | Store::Long(range) => {
                let is_long = matches!(self.store, Store::Long(_));
                let value = match number::within(write.text, range) {
                    Err(Errno::RANGE) if is_long => return Err(Errno::INVAL),
                    value => value?,
                };
                check()?;
                write.keep(value.to_string());
                Ok(())
            }
            Store::Text(max, errno) => {
                let text = line(write.text);
                if text.len() >= *max {
                    return Err(*errno);
                }
                check()?;
                write.keep(text);
                Ok(())
            }
            Store::With(store) => {
                check()?;
                store(write)
            }
        }
    }
}

/// Removes the newline.
pub(crate) fn line(text: &str) -> &str {
    text.strip_suffix('\n').unwrap_or(text)
}
