//! Upgrades within the daemon's process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Upgrade history of the daemon's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeRecord {
    /// Number of previous programs in this process.
    #[serde(default)]
    pub upgrades: u32,
    /// Version of the previous program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgraded_from: Option<String>,
    /// Error of the last upgrade, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade_error: Option<String>,
}

/// An upgrade in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// Path of the new program.
    pub program: PathBuf,
    /// Current version.
    pub from: String,
    /// Version of the new program.
    pub to: String,
    /// Value of [`UpgradeRecord::upgrades`] after the upgrade.
    pub upgrades: u32,
}
