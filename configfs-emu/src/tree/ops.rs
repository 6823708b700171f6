//! The operations of a file system on the tree.

use rustix::io::Errno;

use super::dir::{Entry, EntryKind, Ino, Meta, Node, NodeId};
use super::kind::{Access, Attr, Kind, Read, Write};
use super::{MAX_WRITE, Tree};
use crate::world::World;

/// The size that configfs gives each attribute: a page.
const FILE_SIZE: u64 = 4096;

/// The longest name of a directory or a link, in bytes: `NAME_MAX`, which the kernel holds configfs
/// to, but for FUSE allows 1024.
const MAX_NAME: usize = 255;

fn check_name(name: &str) -> Result<(), Errno> {
    if name.len() > MAX_NAME {
        return Err(Errno::NAMETOOLONG);
    }
    Ok(())
}

impl<K: Kind> Tree<K> {
    /// Finds a name in a directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    pub fn lookup(&self, parent: Ino, name: &str) -> Result<Ino, Errno> {
        let id = self.as_dir(parent)?;
        if let Some(child) = self.dir(id).children.get(name) {
            return Ok(child.ino());
        }
        let attrs = self.dir(id).kind.attrs();
        let index = attrs.iter().position(|a| a.name == name);
        index.map(|i| Ino::of_attr(id, i)).ok_or(Errno::NOENT)
    }

    /// File type, mode and size of an inode.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn meta(&self, ino: Ino) -> Result<Meta, Errno> {
        if ino.attr().is_some() {
            let (_, attr) = self.as_attr(ino)?;
            return Ok(Meta {
                kind: EntryKind::File,
                mode: attr.access.mode(),
                size: FILE_SIZE,
                nlink: 1,
            });
        }
        Ok(match self.node(ino.node())? {
            Node::Dir(_) => Meta {
                kind: EntryKind::Dir,
                mode: 0o755,
                size: 0,
                nlink: 2 + self.subdirs(ino.node()).count() as u32,
            },
            Node::Symlink(_) => Meta {
                kind: EntryKind::Symlink,
                mode: 0o777,
                size: self.read_link(ino)?.len() as u64,
                nlink: 1,
            },
        })
    }

    /// Lists a directory, without `.` and `..`.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    pub fn read_dir(&self, ino: Ino) -> Result<Vec<Entry>, Errno> {
        let id = self.as_dir(ino)?;
        let attrs = self.dir(id).kind.attrs().iter().enumerate();
        let files = attrs.map(|(i, attr)| Entry {
            name: attr.name.to_owned(),
            ino: Ino::of_attr(id, i),
            kind: EntryKind::File,
        });
        let children = self.dir(id).children.iter().map(|(name, child)| Entry {
            name: name.clone(),
            ino: child.ino(),
            kind: match self.nodes[child].as_ref() {
                Node::Dir(_) => EntryKind::Dir,
                Node::Symlink(_) => EntryKind::Symlink,
            },
        });
        Ok(files.chain(children).collect())
    }

    /// The directory in which a directory or link is.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn parent_of(&self, ino: Ino) -> Result<Ino, Errno> {
        Ok(match self.node(ino.node())? {
            Node::Dir(dir) => dir.parent.ino(),
            Node::Symlink(link) => link.parent.ino(),
        })
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `ENAMETOOLONG`; `EEXIST`; `EPERM` where no directory can be made; what the directory's owner
    /// says.
    pub fn make_dir(&mut self, parent: Ino, name: &str, world: &dyn World) -> Result<Ino, Errno> {
        let id = self.as_dir(parent)?;
        check_name(name)?;
        if self.lookup(parent, name).is_ok() {
            return Err(Errno::EXIST);
        }
        let kind = self.dir(id).kind.make(self, id, name, world)?;
        let made = self.add_dir(id, name, kind, false);
        kind.on_made(self, made);
        Ok(made.ino())
    }

    /// Removes a directory.
    ///
    /// # Errors
    /// `EPERM` for one that came with another; `EBUSY` where a link leads to it; `ENOTEMPTY`.
    pub fn remove_dir(&mut self, parent: Ino, name: &str) -> Result<(), Errno> {
        let ino = self.lookup(parent, name)?;
        let id = self.as_dir(ino)?;
        if self.dir(id).is_default {
            return Err(Errno::PERM);
        }
        self.check_empty(id)?;
        self.drop_dir(id);
        Ok(())
    }

    /// Makes a symbolic link. Its target must exist.
    ///
    /// # Errors
    /// `ENAMETOOLONG`; `EEXIST`; `ENOENT` for a target that does not exist; `EPERM` for one outside of
    /// the tree, and where no link can be made; what the directory's owner says.
    pub fn link(
        &mut self,
        parent: Ino,
        name: &str,
        target: &str,
        world: &dyn World,
    ) -> Result<Ino, Errno> {
        let id = self.as_dir(parent)?;
        check_name(name)?;
        if self.lookup(parent, name).is_ok() {
            return Err(Errno::EXIST);
        }
        let kind = self.dir(id).kind;
        if !kind.takes_links() {
            return Err(Errno::PERM);
        }
        let target = self.resolve(id, target)?;
        kind.allow_link(self, id, target)?;
        let made = self.add_link(id, name, target);
        kind.on_linked(self, id, target, world);
        Ok(made.ino())
    }

    /// Removes a link.
    ///
    /// # Errors
    /// `EPERM` for an attribute, `EISDIR` for a directory.
    pub fn unlink(&mut self, parent: Ino, name: &str) -> Result<(), Errno> {
        let ino = self.lookup(parent, name)?;
        if ino.attr().is_some() {
            return Err(Errno::PERM);
        }
        let dir = match self.node(ino.node())? {
            Node::Dir(_) => return Err(Errno::ISDIR),
            Node::Symlink(link) => link.parent,
        };
        self.drop_link(ino.node());
        self.dir(dir).kind.on_unlinked(self, dir);
        Ok(())
    }

    /// The text of a link: up from where it is to the root, and down from there, as configfs says
    /// it.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn read_link(&self, ino: Ino) -> Result<String, Errno> {
        let Node::Symlink(link) = self.node(ino.node())? else {
            return Err(Errno::INVAL);
        };
        let depth = self.path(link.parent).split('/').count();
        Ok("../".repeat(depth) + &self.path(link.target))
    }

    /// Checks that a file can be opened for this.
    ///
    /// # Errors
    /// `EACCES`, also for root; `EISDIR`.
    pub fn open(&self, ino: Ino, reads: bool, writes: bool) -> Result<(), Errno> {
        if ino.attr().is_none() {
            return Err(Errno::ISDIR);
        }
        let (_, attr) = self.as_attr(ino)?;
        // Checked here and not by the mode, which root may ignore: configfs refuses root as well.
        let refused = match attr.access {
            Access::ReadWrite => false,
            Access::ReadOnly => writes,
            Access::WriteOnly => reads,
        };
        if refused { Err(Errno::ACCESS) } else { Ok(()) }
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// What the attribute's owner says.
    pub fn read(&self, ino: Ino, world: &dyn World) -> Result<String, Errno> {
        let (dir, attr) = self.as_attr(ino)?;
        let mut text = attr.read(&Read {
            tree: self,
            dir,
            attr,
            world,
        })?;
        // A page is all that there is.
        let mut end = text.len().min(FILE_SIZE as usize);
        // A cut inside of a character would panic below.
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        Ok(text)
    }

    /// Writes to a file: all of the data is one value, wherever in the file it is written. Gives
    /// the number of bytes taken.
    ///
    /// # Errors
    /// What the attribute's owner says; everything is as it was then.
    pub fn write(&mut self, ino: Ino, data: &[u8], world: &dyn World) -> Result<usize, Errno> {
        let (dir, attr) = self.as_attr(ino)?;
        let data = &data[..data.len().min(MAX_WRITE)];
        // The kernel's attributes take strings of C, which end with a zero byte.
        let end = data.iter().position(|b| *b == 0).unwrap_or(data.len());
        let text = std::str::from_utf8(&data[..end]).map_err(|_| Errno::INVAL)?;
        attr.write(&mut Write {
            tree: self,
            dir,
            attr,
            text,
            world,
        })?;
        Ok(data.len())
    }

    fn node(&self, id: NodeId) -> Result<&Node<K>, Errno> {
        let node = self.nodes.get(&id);
        node.map(AsRef::as_ref).ok_or(Errno::NOENT)
    }

    fn as_dir(&self, ino: Ino) -> Result<NodeId, Errno> {
        match (ino.attr(), self.node(ino.node())?) {
            (None, Node::Dir(_)) => Ok(ino.node()),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn as_attr(&self, ino: Ino) -> Result<(NodeId, &'static Attr<K>), Errno> {
        let dir = self.try_dir(ino.node()).ok_or(Errno::NOENT)?;
        let index = ino.attr().ok_or(Errno::ISDIR)?;
        let attr = dir.kind.attrs().get(index).ok_or(Errno::NOENT)?;
        Ok((ino.node(), attr))
    }

    /// The directory that a link's text names. Relative text begins where the link is. Of an
    /// absolute path the part from some `target` on counts, since the tree can be mounted anywhere.
    fn resolve(&self, from: NodeId, text: &str) -> Result<NodeId, Errno> {
        if !text.starts_with('/') {
            return self.walk(from, text.split('/'));
        }
        let names: Vec<&str> = text.split('/').filter(|n| !n.is_empty()).collect();
        // The mount point may have a directory of this name as well, so each of them is tried.
        let starts = (0..names.len()).filter(|i| names[*i] == "target");
        let mut found = Err(Errno::PERM);
        for start in starts {
            found = self.walk(NodeId::ROOT, names[start..].iter().copied());
            if found.is_ok() {
                break;
            }
        }
        found
    }

    fn walk<'a>(
        &self,
        from: NodeId,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<NodeId, Errno> {
        let mut at = from;
        for name in names.filter(|n| !matches!(*n, "" | ".")) {
            at = match (name, at) {
                // Out of the tree, where there is nothing that could be linked.
                ("..", NodeId::ROOT) => return Err(Errno::PERM),
                ("..", at) => self.parent(at),
                (name, at) => match self.node(self.lookup(at.ino(), name)?.node())? {
                    Node::Dir(_) => self.child(at, name).ok_or(Errno::PERM)?,
                    Node::Symlink(link) => link.target,
                },
            };
        }
        Ok(at)
    }
}
