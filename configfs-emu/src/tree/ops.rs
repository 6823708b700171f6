//! File system operations for the tree.

use rustix::io::Errno;

use super::dir::{Entry, EntryKind, Ino, Meta, Node, NodeId};
use super::kind::{Access, Attr, Kind, Read, Write};
use super::{MAX_WRITE, Tree};
use crate::world::World;

/// File size of all attributes in configfs, which is a page.
const FILE_SIZE: u64 = 4096;

/// Maximum length of a directory or link name in bytes. This is `NAME_MAX`, which the kernel uses
/// for configfs, but for FUSE it would allow 1024.
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

    /// Returns the file type, mode and size of an inode.
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

    /// Returns the entries of a directory, not including `.` and `..`.
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

    /// Returns the parent directory of a directory or link.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn parent_of(&self, ino: Ino) -> Result<Ino, Errno> {
        Ok(match self.node(ino.node())? {
            Node::Dir(dir) => dir.parent.ino(),
            Node::Symlink(link) => link.parent.ino(),
        })
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// `ENAMETOOLONG`; `EEXIST`; `EPERM` if directories can't be created here; any error returned
    /// by the owner of the directory.
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
    /// `EPERM` if it was created together with its parent; `EBUSY` if there is a link to it;
    /// `ENOTEMPTY`.
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

    /// Creates a symbolic link. The target must exist.
    ///
    /// # Errors
    /// `ENAMETOOLONG`; `EEXIST`; `ENOENT` if the target doesn't exist; `EPERM` if the target is not
    /// in this tree or if links can't be created here; any error returned by the owner of the
    /// directory.
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

    /// Returns the text of a link. As in configfs, this path goes up to the root and then down to
    /// the target.
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

    /// Checks if a file can be opened with these permissions.
    ///
    /// # Errors
    /// `EACCES`, also for root; `EISDIR`.
    pub fn open(&self, ino: Ino, reads: bool, writes: bool) -> Result<(), Errno> {
        if ino.attr().is_none() {
            return Err(Errno::ISDIR);
        }
        let (_, attr) = self.as_attr(ino)?;
        // We need to check this here because root ignores the mode, but configfs also rejects this
        // for root.
        let refused = match attr.access {
            Access::ReadWrite => false,
            Access::ReadOnly => writes,
            Access::WriteOnly => reads,
        };
        if refused { Err(Errno::ACCESS) } else { Ok(()) }
    }

    /// Returns the full content of a file.
    ///
    /// # Errors
    /// Any error returned by the owner of the attribute.
    pub fn read(&self, ino: Ino, world: &dyn World) -> Result<String, Errno> {
        let (dir, attr) = self.as_attr(ino)?;
        let mut text = attr.read(&Read {
            tree: self,
            dir,
            attr,
            world,
        })?;
        // The content is limited to a page.
        let mut end = text.len().min(FILE_SIZE as usize);
        // Don't split a character, because this would panic when we truncate the text.
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        Ok(text)
    }

    /// Writes to a file. All of the data is used as a single value, and the offset is ignored.
    /// Returns the number of bytes used.
    ///
    /// # Errors
    /// Any error returned by the owner of the attribute. In this case, nothing has changed.
    pub fn write(&mut self, ino: Ino, data: &[u8], world: &dyn World) -> Result<usize, Errno> {
        let (dir, attr) = self.as_attr(ino)?;
        let data = &data[..data.len().min(MAX_WRITE)];
        // The kernel uses C strings for attributes, so they stop at the first null byte.
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

    /// Returns the target directory for the text of a link. A relative path starts at the link. For
    /// an absolute path, we only use the part after `target`, because the tree could be mounted at
    /// any path.
    fn resolve(&self, from: NodeId, text: &str) -> Result<NodeId, Errno> {
        if !text.starts_with('/') {
            return self.walk(from, text.split('/'));
        }
        let names: Vec<&str> = text.split('/').filter(|n| !n.is_empty()).collect();
        // The path of the mount point might also contain this name, so we have to try all of them.
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
                // This path leads out of the tree, so there is nothing to link to.
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
