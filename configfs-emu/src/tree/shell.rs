//! Accesses the tree by path, like a shell.

use rustix::io::Errno;

use super::{Ino, Kind, NodeId, Tree};
use crate::world::World;

/// A tree and its world. Paths start in `target` and have no leading slash.
pub(crate) struct Shell<'a, K> {
    pub(crate) tree: &'a mut Tree<K>,
    pub(crate) world: &'a dyn World,
}

impl<K: Kind> Shell<'_, K> {
    fn target(&self) -> Ino {
        let target = self.tree.find("target").expect("it is always there");
        target.ino()
    }

    /// Returns the inode for a path.
    pub(crate) fn at(&self, path: &str) -> Result<Ino, Errno> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(self.target(), |at, name| self.tree.lookup(at, name))
    }

    /// Returns the parent directory of a path and the last name.
    fn place<'p>(&self, path: &'p str) -> Result<(Ino, &'p str), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.at(dir)?, name))
    }

    /// Creates a directory, like `mkdir`.
    pub(crate) fn mkdir(&mut self, path: &str) -> Result<NodeId, Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.make_dir(dir, name, self.world).map(Ino::node)
    }

    /// Creates a link, like `ln -s`. The target path is not changed.
    pub(crate) fn link(&mut self, path: &str, target: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.link(dir, name, target, self.world).map(|_| ())
    }

    /// Writes to a file, like `echo`. This also checks if the file can be opened.
    pub(crate) fn write(&mut self, path: &str, text: &str) -> Result<(), Errno> {
        let file = self.at(path)?;
        self.tree.open(file, false, true)?;
        self.tree
            .write(file, text.as_bytes(), self.world)
            .map(|_| ())
    }

    /// Reads a file, like `cat`. This also checks if the file can be opened.
    pub(crate) fn read(&self, path: &str) -> Result<String, Errno> {
        let file = self.at(path)?;
        self.tree.open(file, true, false)?;
        self.tree.read(file, self.world)
    }
}

#[cfg(test)]
impl<K: Kind> Shell<'_, K> {
    /// Removes a directory, like `rmdir`.
    pub(crate) fn rmdir(&mut self, path: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.remove_dir(dir, name)
    }

    /// Removes a link, like `rm`.
    pub(crate) fn rm(&mut self, path: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.unlink(dir, name)
    }

    /// Returns the names in a directory, like `ls`.
    pub(crate) fn ls(&self, path: &str) -> Vec<String> {
        let entries = self.tree.read_dir(self.at(path).unwrap()).unwrap();
        entries.into_iter().map(|e| e.name).collect()
    }

    /// Reads a link, like `readlink`.
    pub(crate) fn readlink(&self, path: &str) -> Result<String, Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.read_link(self.tree.lookup(dir, name)?)
    }
}
