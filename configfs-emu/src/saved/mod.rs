//! `saveconfig.json`: what `targetcli saveconfig` writes and `targetctl restore` reads.
//!
//! It says what rtslib reads from LIO's tree, so both ways lead over a tree: [`restore`] does to an
//! empty tree what rtslib would do, [`save`] reads from a tree what rtslib would read.
//!
//! # What it cannot say
//! Names of vendors and products, identifiers that are not made of serial numbers, and what the
//! tree does not show of a configuration. What a file says and the tree cannot (pass-through,
//! user-space backstores, other fabrics) is named.

mod restore;
mod save;

pub use self::restore::{Restoration, configuration, restore};
pub use self::save::{SaveFile, save};

use crate::rules::{Fabric, Plugin};

/// Names and secrets: by what the file calls them, and the attribute.
const AUTH: [(&str, &str); 4] = [
    ("userid", "userid"),
    ("password", "password"),
    ("mutual_userid", "userid_mutual"),
    ("mutual_password", "password_mutual"),
];

/// Attributes of a group of target ports, beside its name and number.
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

/// The name of a plugin in the file.
fn plugin_name(plugin: Plugin) -> &'static str {
    match plugin {
        Plugin::Fileio => "fileio",
        Plugin::Iblock => "block",
        Plugin::RamDisk => "ramdisk",
    }
}

/// A name of the tree as the file writes it; `None` where it has no way to.
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

/// A name of the file as the tree has it.
fn name_of(fabric: Fabric, wwn: &str) -> String {
    match (fabric, wwn.strip_prefix("ib.")) {
        (Fabric::Srpt, Some(digits)) => format!("0x{digits}"),
        _ => wwn.to_owned(),
    }
}

#[cfg(test)]
mod tests;
