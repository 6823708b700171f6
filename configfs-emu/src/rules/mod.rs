//! LIO's rules for its directories: their attributes, what can be made in them, what they link to.
//!
//! - `kind`: [`Kind`], the kinds of directories, and the [`Tree`] of them. `directories`: their
//!   tables and their rules for making and linking, which name all others.
//! - `device`: a device's options and states. `initiator`: names of initiators. Below the others,
//!   which share them.
//! - `core`: backstores: hosts and devices. `attrib`: a device's attributes and names. `pr`: who
//!   has reserved it.
//! - `alua`: groups of logical units and of target ports.
//! - `iscsi`: targets, portals, initiators. `param`: the keys that iSCSI negotiates.
//! - `srpt`: target ports of SRP.
//! - `session`: what an initiator's files say while it is logged in.
//! - `statistics`: what is counted of units and ports. `iscsi_statistics`: of targets and sessions.

mod alua;
mod attrib;
mod core;
pub mod device;
mod directories;
mod initiator;
mod iscsi;
mod iscsi_statistics;
mod kind;
mod param;
mod pr;
mod session;
mod srpt;
mod statistics;

pub(crate) use self::alua::{alua_words, tpgs};
pub(crate) use self::attrib::COMPANY;
pub(crate) use self::initiator::{Initiator, guid as port_guid};
pub use self::kind::{Attr, Fabric, Kind, Plugin, Tree};
pub(crate) use self::kind::{Read, Shell, Show, Store, Write, lun_number, portal_address};
use crate::tree::NodeId;

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
