//! Upgrades of the daemon in its process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Record of the upgrades in the daemon's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeRecord {
    /// Programs that served before.
    #[serde(default)]
    pub upgrades: u32,
    /// The version of the last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_from: Option<String>,
    /// Error of the last upgrade that was begun, if it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade_error: Option<String>,
}

/// An upgrade that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The program that takes over.
    pub program: PathBuf,
    /// The version that serves now.
    pub from: String,
    /// The version of the program.
    pub to: String,
    /// Value of [`UpgradeRecord::upgrades`] once it serves.
    pub upgrades: u32,
}
