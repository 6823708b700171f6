//! Rules for LIO directories: their attributes, the directories that can be created, and the
//! allowed links.
//!
//! - `kind`: directory types ([`Kind`]) and the [`Tree`] based on them. `directories`: the tables
//!   for all types, and the rules to create directories and links, which use all other modules.
//! - `device`: device options and state. `initiator`: initiator names. Both are used by the other
//!   modules.
//! - `core`: backstores (hosts and devices). `attrib`: attributes and names of a device. `pr`:
//!   reservations.
//! - `alua`: logical unit groups and target port groups.
//! - `iscsi`: targets, portals and initiators. `param`: iSCSI negotiation keys.
//! - `srpt`: SRP target ports.
//! - `session`: files of an initiator that is logged in.
//! - `statistics`: counters for units and ports. `iscsi_statistics`: counters for targets and
//!   sessions.

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
use std::collections::BTreeSet;

use crate::tree::NodeId;

// --- Names used by the daemon for objects in the tree --------------------------------------------

/// Hidden value with the name of this object in the configuration, if it was imported.
pub(crate) const NAME: &str = ".name";

/// Maximum length of a target or backend name.
const MAX_NAME: usize = 64;

/// Returns the fabrics in the tree and their directories.
pub(crate) fn fabrics(tree: &Tree) -> Vec<(Fabric, NodeId)> {
    let target = tree.find("target").expect("it is always there");
    let dirs = tree.subdirs(target);
    dirs.filter_map(|(_, id)| match tree.dir(id).kind {
        Kind::Fabric(fabric) => Some((fabric, id)),
        _ => None,
    })
    .collect()
}

/// Returns the paths of all enabled portal groups.
pub(crate) fn enabled_groups(tree: &Tree) -> BTreeSet<String> {
    let groups = fabrics(tree)
        .into_iter()
        .flat_map(|(_, dir)| tpgs(tree, dir));
    let groups = groups.filter(|(_, _, tpg)| tree.value(*tpg, "enable") == "1");
    groups.map(|(_, _, tpg)| tree.path(tpg)).collect()
}

/// Returns the paths of all enabled devices.
pub(crate) fn enabled_devices(tree: &Tree) -> BTreeSet<String> {
    let devices = device::devices(tree).into_iter().map(|(id, _)| id);
    let enabled = devices.filter(|id| device::is_configured(tree, *id));
    enabled.map(|id| tree.path(id)).collect()
}

/// Returns the backend name for a device.
#[must_use]
pub fn backend_name(tree: &Tree, device: NodeId) -> String {
    if let Some(name) = tree.hidden(device, NAME) {
        return name.to_owned();
    }
    let host = tree.parent(device);
    config_name(&format!(
        "{}:{}",
        tree.dir(host).name,
        tree.dir(device).name
    ))
}

/// Returns the target name for a portal group.
#[must_use]
pub fn target_name(tree: &Tree, tpg: NodeId) -> String {
    if let Some(name) = tree.hidden(tpg, NAME) {
        return name.to_owned();
    }
    config_name(&tree.dir(tree.parent(tpg)).name)
}

/// Converts a name from the tree to a name in the configuration, which must be shorter and use
/// fewer characters.
fn config_name(wwn: &str) -> String {
    let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':');
    if wwn.len() <= MAX_NAME && wwn.bytes().all(is_good) {
        return wwn.to_owned();
    }
    // Names of the same authority are different at the end, and the checksum ensures that the name
    // is unique.
    let good: String = wwn.chars().filter(|c| is_good(*c as u8)).collect();
    let sum = wwn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let end = &good[good.len().saturating_sub(MAX_NAME - 17)..];
    format!("{end}-{sum:016x}")
}

#[cfg(test)]
mod tests;
