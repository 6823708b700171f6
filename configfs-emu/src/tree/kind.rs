//! Kinds of directories: what the owner of a directory answers for it, and its attribute files.

use std::fmt::Debug;
use std::ops::RangeInclusive;

use rustix::io::Errno;

use super::{NodeId, Tree};
use crate::number;
use crate::world::World;

/// A kind of directory, with the rules of its owner.
pub trait Kind: Copy + Debug + 'static {
    /// The directory above `target`.
    const ROOT: Self;

    /// The files in it.
    #[must_use]
    fn attrs(self) -> &'static [Attr<Self>];

    /// The directories that come with it, by their names.
    #[must_use]
    fn groups(self) -> &'static [(&'static str, Self)];

    /// The kind of a directory that is made in it.
    ///
    /// # Errors
    /// No directory of this name can be made there.
    fn make(
        self,
        tree: &Tree<Self>,
        id: NodeId,
        name: &str,
        world: &dyn World,
    ) -> Result<Self, Errno>;

    /// Sets what a new directory begins with beside its table.
    fn on_made(self, tree: &mut Tree<Self>, id: NodeId);

    /// Returns true if links can be made in it.
    #[must_use]
    fn takes_links(self) -> bool;

    /// Checks a link from it to another directory.
    ///
    /// # Errors
    /// It takes no link to this directory.
    fn allow_link(self, tree: &Tree<Self>, id: NodeId, target: NodeId) -> Result<(), Errno>;

    /// Sets what a link brings with it.
    fn on_linked(self, tree: &mut Tree<Self>, id: NodeId, target: NodeId, world: &dyn World);

    /// Forgets what a link brought with it.
    fn on_unlinked(self, tree: &mut Tree<Self>, id: NodeId);

    /// Returns true if the device that a directory belongs to is served, so that files which are
    /// [`Attr::is_locked`] cannot change.
    #[must_use]
    fn is_exported(tree: &Tree<Self>, id: NodeId) -> bool;
}

/// Permissions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Mode 0644: all read, root writes.
    ReadWrite,
    /// 0444; no user can open it for writing.
    ReadOnly,
    /// 0200; no user can open it for reading.
    WriteOnly,
}

impl Access {
    /// Permission bits of the file's mode.
    #[must_use]
    pub fn mode(self) -> u16 {
        match self {
            Self::ReadWrite => 0o644,
            Self::ReadOnly => 0o444,
            Self::WriteOnly => 0o200,
        }
    }
}

/// Content of a file.
#[derive(Clone, Copy)]
pub(crate) enum Show<K: 'static> {
    /// Its value and a line end.
    Line,
    /// Its value and a line end, or nothing at all while there is no value.
    LineIfAny,
    /// Made of the tree and the world by this.
    With(fn(&Read<'_, K>) -> Result<String, Errno>),
}

/// Effect of a write to a file.
#[derive(Clone)]
pub(crate) enum Store<K: 'static> {
    /// It cannot be written.
    Never,
    /// It is taken and forgotten.
    Ignored,
    /// A truth value, kept as `1` or `0`.
    Bool,
    /// A number in a range, kept in decimal.
    Number(RangeInclusive<u32>),
    /// Likewise, where LIO reads 64 bits: what is longer than 32 is only out of range.
    Long(RangeInclusive<u32>),
    /// Text of fewer bytes than this, without its line end; else this error.
    Text(usize, Errno),
    /// Taken by this, which may change the tree.
    With(fn(&mut Write<'_, K>) -> Result<(), Errno>),
}

/// A file of a directory.
pub struct Attr<K: 'static> {
    /// Name of the file.
    pub name: &'static str,
    /// Access to the file, for all users.
    pub access: Access,
    /// Value before the first write.
    pub initial: &'static str,
    pub(crate) show: Show<K>,
    pub(crate) store: Store<K>,
    /// It cannot change while the device is exported.
    pub(crate) is_locked: bool,
}

impl<K> std::fmt::Debug for Attr<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Attr").field(&self.name).finish()
    }
}

/// A file being read.
#[derive(Clone, Copy)]
pub(crate) struct Read<'a, K: 'static> {
    pub(crate) tree: &'a Tree<K>,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr<K>,
    pub(crate) world: &'a dyn World,
}

/// A file being written.
pub(crate) struct Write<'a, K: 'static> {
    pub(crate) tree: &'a mut Tree<K>,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr<K>,
    pub(crate) text: &'a str,
    pub(crate) world: &'a dyn World,
}

impl<K: Kind> Write<'_, K> {
    /// Keeps a value in the file that is written.
    pub(crate) fn keep(&mut self, value: impl Into<String>) {
        self.tree.set(self.dir, self.attr.name, value);
    }
}

impl<K: 'static> Attr<K> {
    /// A file to read and write.
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

    /// A file to read.
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

    /// A file to read that always says the same.
    pub(crate) const fn fixed(name: &'static str, value: &'static str) -> Self {
        let mut attr = Self::ro(name, Show::Line);
        attr.initial = value;
        attr
    }

    /// The same, shown so.
    pub(crate) const fn shown(self, show: Show<K>) -> Self {
        // Written out, since a table is made at compile time.
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

    /// The same, which cannot change while the device is exported.
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
        // The text is judged before the state, as the kernel does: a wrong value is EINVAL or
        // ERANGE even while the device is exported.
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

/// Text without its line end.
pub(crate) fn line(text: &str) -> &str {
    text.strip_suffix('\n').unwrap_or(text)
}
