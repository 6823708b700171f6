//! The world around the tree, as far as the tree must know it, behind a trait, so that the tree
//! does no I/O.

use std::net::IpAddr;
use std::time::Duration;

use riser_admin_api::live::Live;

/// The file at a path, by its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Nothing, in a directory that exists: a file could be made there.
    Vacant,
    /// A regular file, with its size.
    File {
        /// Its size in bytes.
        size: u64,
    },
    /// A block device, with what the kernel says about it.
    Device(BlockDevice),
    /// A directory, which cannot back a device.
    Directory,
    /// Something else, or nothing in a directory that does not exist either.
    None,
}

/// Properties of a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Its size in bytes.
    pub size: u64,
    /// Its logical block size in bytes.
    pub block_size: u32,
    /// The kernel's name for it.
    pub name: String,
    /// Device number, major part.
    pub major: u32,
    /// Device number, minor part.
    pub minor: u32,
}

/// A session of an initiator, as the daemon reports it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Session {
    /// The target's name in the daemon's configuration.
    pub target: String,
    /// The initiator's name without its ISID.
    pub initiator: String,
    /// Its ISID, 12 hexadecimal digits, where it has one.
    pub isid: String,
    /// A number that no other session has.
    pub id: u64,
    /// Addresses of the initiator, one for each of its connections.
    pub addresses: Vec<String>,
    /// True if it has logged in.
    pub is_live: bool,
    /// Values that the login agreed on, by key.
    pub terms: std::collections::BTreeMap<String, String>,
}

/// The world around the tree.
pub trait World {
    /// Looks at a path of the host.
    fn medium(&self, path: &str) -> Medium;

    /// The addresses at which an SRP target port can be reached, by its GUID
    /// (`0002:c903:00a1:b2c3`) or GID (`0x` and 32 digits). None if the host has no such port.
    fn port_addresses(&self, port: &str) -> Vec<IpAddr>;

    /// The sessions at present.
    fn sessions(&self) -> Vec<Session>;

    /// Counters of the daemon so far.
    fn live(&self) -> Live;

    /// Time for which the host has run.
    fn uptime(&self) -> Duration;

    /// Number of CPUs of the host.
    fn cpus(&self) -> u32;
}
