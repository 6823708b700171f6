//! `saveconfig.json`, which is written by `targetcli saveconfig` and read by `targetctl restore`.
//!
//! The file contains the values that rtslib reads from LIO's tree, so both directions use a tree:
//! [`restore`] does the same as rtslib for an empty tree, and [`save`] reads the same values from a
//! tree as rtslib.
//!
//! # Unsupported settings
//! The file can't contain vendor and product names, identifiers that are not based on the serial
//! number, and any configuration not shown in the tree. If the file contains something not
//! supported by the tree (pass-through, user-space backstores, other fabrics), it's reported.

mod remove;
mod restore;
mod save;

pub use self::restore::{Imported, Restoration, configuration, restore};
pub use self::save::{SaveFile, save};

use crate::rules::{Fabric, Plugin};

/// Keys used in the file for names and secrets, and the attributes.
const AUTH: [(&str, &str); 4] = [
    ("userid", "userid"),
    ("password", "password"),
    ("mutual_userid", "userid_mutual"),
    ("mutual_password", "password_mutual"),
];

/// Target port group attributes, in addition to name and ID.
const PORT_GROUP: [&str; 14] = [
    "alua_access_state",
    "alua_access_status",
    "alua_access_type",
    "alua_support_active_nonoptimized",
    "alua_support_active_optimized",
    "alua_support_offline",
    "alua_support_standby",
    "alua_support_transitioning",
    "alua_support_unavailable",
    "alua_write_metadata",
    "implicit_trans_secs",
    "nonop_delay_msecs",
    "preferred",
    "trans_delay_msecs",
];

/// Returns the plugin name used in the file.
fn plugin_name(plugin: Plugin) -> &'static str {
    match plugin {
        Plugin::Fileio => "fileio",
        Plugin::Iblock => "block",
        Plugin::RamDisk => "ramdisk",
    }
}

/// Converts a name in the tree to the format used in the file. Returns `None` if this is not
/// possible.
fn wwn_of(fabric: Fabric, name: &str) -> Option<String> {
    match fabric {
        Fabric::Iscsi => Some(name.to_owned()),
        Fabric::Srpt => {
            let digits = name.strip_prefix("0x").unwrap_or(name);
            let is_id = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
            is_id.then(|| format!("ib.{digits}"))
        }
    }
}

/// Converts a name in the file to the format used in the tree.
fn name_of(fabric: Fabric, wwn: &str) -> String {
    match (fabric, wwn.strip_prefix("ib.")) {
        (Fabric::Srpt, Some(digits)) => format!("0x{digits}"),
        _ => wwn.to_owned(),
    }
}

#[cfg(test)]
mod tests;
