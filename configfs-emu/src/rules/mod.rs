//! What LIO says about its directories: their attributes, what can be made in them, what they link to.
//!
//! - `kind`: [`Kind`], the directories, with their tables and their rules for making and linking.
//! - `core`: backstores: hosts and devices. `attrib`: a device's attributes and names. `pr`: who has
//!   reserved it.
//! - `alua`: groups of logical units and of target ports.
//! - `iscsi`: targets, portals, initiators. `param`: the keys that iSCSI negotiates.
//! - `srpt`: target ports of SRP.
//! - `session`: what an initiator's files say while it is logged in.
//! - `statistics`: what is counted of units and ports. `iscsi_statistics`: of targets and sessions.

mod alua;
mod attrib;
pub mod core;
mod iscsi;
mod iscsi_statistics;
mod kind;
mod param;
mod pr;
mod session;
mod srpt;
mod statistics;

use std::ops::RangeInclusive;

use rustix::io::Errno;

pub(crate) use self::alua::{alua_words, tpgs};
pub(crate) use self::attrib::COMPANY;
pub use self::kind::{Fabric, Kind, Plugin};
pub(crate) use self::kind::{lun_number, portal_address};
pub(crate) use self::srpt::{Initiator, guid as port_guid};
use crate::number;
use crate::tree::{NodeId, Tree};
use crate::world::World;

/// Who may do what with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// 0644.
    ReadWrite,
    /// 0444; nobody can open it for writing.
    ReadOnly,
    /// 0200; nobody can open it for reading.
    WriteOnly,
}

impl Access {
    /// Permission bits.
    #[must_use]
    pub fn mode(self) -> u16 {
        match self {
            Self::ReadWrite => 0o644,
            Self::ReadOnly => 0o444,
            Self::WriteOnly => 0o200,
        }
    }
}

/// What a file says.
#[derive(Clone, Copy)]
pub(crate) enum Show {
    /// Its value and a line end.
    Line,
    /// Its value and a line end, or nothing at all while there is no value.
    LineIfAny,
    /// What this makes of the tree.
    With(fn(&Read<'_>) -> Result<String, Errno>),
}

/// What a write to a file means.
#[derive(Clone)]
pub(crate) enum Store {
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
    /// What this does.
    With(fn(&mut Write<'_>) -> Result<(), Errno>),
}

/// A file of a directory.
pub struct Attr {
    /// Its name.
    pub name: &'static str,
    /// Who may do what with it.
    pub access: Access,
    /// What it holds before the first write.
    pub initial: &'static str,
    pub(crate) show: Show,
    pub(crate) store: Store,
    /// It cannot change while the device is exported.
    pub(crate) is_locked: bool,
}

impl std::fmt::Debug for Attr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Attr").field(&self.name).finish()
    }
}

/// A file being read.
#[derive(Clone, Copy)]
pub(crate) struct Read<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr,
    pub(crate) world: &'a dyn World,
}

/// A file being written.
pub(crate) struct Write<'a> {
    pub(crate) tree: &'a mut Tree,
    pub(crate) dir: NodeId,
    pub(crate) attr: &'static Attr,
    pub(crate) text: &'a str,
    pub(crate) world: &'a dyn World,
}

impl Write<'_> {
    /// Keeps a value in the file that is written.
    pub(crate) fn keep(&mut self, value: impl Into<String>) {
        self.tree.set(self.dir, self.attr.name, value);
    }
}

impl Attr {
    /// A file to read and write.
    pub(crate) const fn rw(name: &'static str, initial: &'static str, store: Store) -> Self {
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
    pub(crate) const fn ro(name: &'static str, show: Show) -> Self {
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
    pub(crate) const fn shown(self, show: Show) -> Self {
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
    pub(crate) const fn locked(name: &'static str, initial: &'static str, store: Store) -> Self {
        let mut attr = Self::rw(name, initial, store);
        attr.is_locked = true;
        attr
    }

    pub(crate) fn read(&self, read: &Read<'_>) -> Result<String, Errno> {
        let value = || read.tree.value(read.dir, self.name);
        Ok(match self.show {
            Show::Line => format!("{}\n", value()),
            Show::LineIfAny if value().is_empty() => String::new(),
            Show::LineIfAny => format!("{}\n", value()),
            Show::With(show) => show(read)?,
        })
    }

    pub(crate) fn write(&self, write: &mut Write<'_>) -> Result<(), Errno> {
        let is_exported = self.is_locked && core::is_exported(write.tree, write.dir);
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

// --- Names by which the daemon knows what is in a tree -------------------------------------------

/// Hidden value of a directory that came from a configuration: the name that it has there.
pub(crate) const NAME: &str = ".name";

/// The longest name of a target.
const MAX_NAME: usize = 64;

/// Fabrics of the tree, with their directories.
pub(crate) fn fabrics(tree: &Tree) -> Vec<(Fabric, NodeId)> {
    let target = tree.find("target").expect("it is always there");
    let dirs = tree.subdirs(target);
    dirs.filter_map(|(_, id)| match tree.dir(id).kind {
        Kind::Fabric(fabric) => Some((fabric, id)),
        _ => None,
    })
    .collect()
}

/// The name of a device's backend.
#[must_use]
pub fn backend_name(tree: &Tree, device: NodeId) -> String {
    if let Some(name) = tree.hidden(device, NAME) {
        return name.to_owned();
    }
    let host = tree.parent(device);
    format!("{}:{}", tree.dir(host).name, tree.dir(device).name)
}

/// The name of a portal group's target.
#[must_use]
pub fn target_name(tree: &Tree, tpg: NodeId) -> String {
    if let Some(name) = tree.hidden(tpg, NAME) {
        return name.to_owned();
    }
    let wwn = &tree.dir(tree.parent(tpg)).name;
    let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':');
    if wwn.len() <= MAX_NAME && wwn.bytes().all(is_good) {
        return wwn.clone();
    }
    // The end distinguishes names of one authority; a sum does so for certain.
    let good: String = wwn.chars().filter(|c| is_good(*c as u8)).collect();
    let sum = wwn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let end = &good[good.len().saturating_sub(MAX_NAME - 17)..];
    format!("{end}-{sum:016x}")
}

#[cfg(test)]
mod tests;
