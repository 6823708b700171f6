//! The tree by paths, as a shell has it.

use rustix::io::Errno;

use super::{Ino, Kind, NodeId, Tree};
use crate::world::World;

/// A tree and the world around it. Paths begin in `target`, without a slash.
pub(crate) struct Shell<'a, K> {
    pub(crate) tree: &'a mut Tree<K>,
    pub(crate) world: &'a dyn World,
}

impl<K: Kind> Shell<'_, K> {
    fn target(&self) -> Ino {
        let target = self.tree.find("target").expect("it is always there");
        target.ino()
    }

    /// Looks up the inode at a path.
    pub(crate) fn at(&self, path: &str) -> Result<Ino, Errno> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(self.target(), |at, name| self.tree.lookup(at, name))
    }

    /// The directory of a path, and its last name.
    fn place<'p>(&self, path: &'p str) -> Result<(Ino, &'p str), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.at(dir)?, name))
    }

    /// Makes a directory, as `mkdir` does.
    pub(crate) fn mkdir(&mut self, path: &str) -> Result<NodeId, Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.make_dir(dir, name, self.world).map(Ino::node)
    }

    /// `ln -s`, with the target's path as it is written.
    pub(crate) fn link(&mut self, path: &str, target: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.link(dir, name, target, self.world).map(|_| ())
    }

    /// `echo`, with the checks of opening the file.
    pub(crate) fn write(&mut self, path: &str, text: &str) -> Result<(), Errno> {
        let file = self.at(path)?;
        self.tree.open(file, false, true)?;
        self.tree
            .write(file, text.as_bytes(), self.world)
            .map(|_| ())
    }

    /// `cat`, with the checks of opening the file.
    pub(crate) fn read(&self, path: &str) -> Result<String, Errno> {
        let file = self.at(path)?;
        self.tree.open(file, true, false)?;
        self.tree.read(file, self.world)
    }
}

#[cfg(test)]
impl<K: Kind> Shell<'_, K> {
    /// Removes a directory, as `rmdir` does.
    pub(crate) fn rmdir(&mut self, path: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.remove_dir(dir, name)
    }

    /// Removes a link, as `rm` does.
    pub(crate) fn rm(&mut self, path: &str) -> Result<(), Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.unlink(dir, name)
    }

    /// Lists the names in a directory, as `ls` does.
    pub(crate) fn ls(&self, path: &str) -> Vec<String> {
        let entries = self.tree.read_dir(self.at(path).unwrap()).unwrap();
        entries.into_iter().map(|e| e.name).collect()
    }

    /// Reads a link, as `readlink` does.
    pub(crate) fn readlink(&self, path: &str) -> Result<String, Errno> {
        let (dir, name) = self.place(path)?;
        self.tree.read_link(self.tree.lookup(dir, name)?)
    }
}
