//! Trait for the information required by the tree, so that the tree itself doesn't do any I/O.

use std::net::IpAddr;
use std::time::Duration;

use riser_admin_api::live::Live;

/// Type of the file at a given path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The file doesn't exist, but the directory does, so the file can be created.
    Vacant,
    /// A regular file.
    File {
        /// Size in bytes.
        size: u64,
    },
    /// A block device and its properties in the kernel.
    Device(BlockDevice),
    /// A directory, which can't be used for a device.
    Directory,
    /// Any other type, or the directory doesn't exist either.
    None,
}

/// Block device properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Device name used by the kernel.
    pub name: String,
    /// Major device number.
    pub major: u32,
    /// Minor device number.
    pub minor: u32,
}

/// An initiator session reported by the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Session {
    /// Target name in the daemon's configuration.
    pub target: String,
    /// Initiator name, not including the ISID.
    pub initiator: String,
    /// ISID (12 hexadecimal digits), or empty if there is no ISID.
    pub isid: String,
    /// Unique session number.
    pub id: u64,
    /// Initiator addresses, with one entry for each connection.
    pub addresses: Vec<String>,
    /// Set after the login has completed.
    pub is_live: bool,
    /// Negotiated values by key.
    pub terms: std::collections::BTreeMap<String, String>,
}

/// Provides information about the host and the daemon.
pub trait World {
    /// Checks the type of a file on this host.
    fn medium(&self, path: &str) -> Medium;

    /// Returns the addresses that can be used to connect to an SRP target port, based on its GUID
    /// (`0002:c903:00a1:b2c3`) or GID (`0x` and 32 digits). If the host doesn't have this port,
    /// this is empty.
    fn port_addresses(&self, port: &str) -> Vec<IpAddr>;

    /// Returns the current sessions.
    fn sessions(&self) -> Vec<Session>;

    /// Returns the current counters of the daemon.
    fn live(&self) -> Live;

    /// Returns the uptime of this host.
    fn uptime(&self) -> Duration;

    /// Returns the number of CPUs on this host.
    fn cpus(&self) -> u32;
}
