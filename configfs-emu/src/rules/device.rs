//! Device options set via `control`, and the device state used by other rules.

use super::kind::{Kind, Plugin, Tree};
use crate::tree::NodeId;

/// Page size of a RAM disk in bytes.
pub const PAGE: u64 = 4096;

/// Names of hidden values that are set via `control`, using the same names.
pub mod option {
    /// A file, or a device used as a file.
    pub const FILE: &str = "fd_dev_name";
    /// Size in bytes.
    pub const SIZE: &str = "fd_dev_size";
    /// Set if writes should be cached.
    pub const BUFFERED: &str = "fd_buffered_io";
    /// Set if I/O should be asynchronous.
    pub const ASYNC: &str = "fd_async_io";
    /// Path of a block device. The name includes the `=`.
    pub const DEVICE: &str = "udev_path=";
    /// Set if the device is read-only.
    pub const READ_ONLY: &str = "readonly";
    /// Size of a RAM disk in pages.
    pub const PAGES: &str = "rd_pages";
    /// Set if a RAM disk should discard all data.
    pub const NULL: &str = "rd_nullio";
    /// Set if a RAM disk is just a dummy device.
    pub const DUMMY: &str = "rd_dummy";
}

/// Returns the device for a directory below it.
pub fn device_of(tree: &Tree, id: NodeId) -> NodeId {
    let device = tree.above(id, |dir| matches!(dir.kind, Kind::Device(_)));
    device.expect("only directories of devices ask")
}

/// Returns true if a device is currently used by a LUN.
pub fn is_exported(tree: &Tree, id: NodeId) -> bool {
    tree.dir(device_of(tree, id)).is_linked()
}

/// Returns true if a device is enabled.
pub fn is_configured(tree: &Tree, device: NodeId) -> bool {
    tree.value(device, "enable") == "1"
}

/// Returns all devices and their plugins.
pub fn devices(tree: &Tree) -> Vec<(NodeId, Plugin)> {
    let core = tree.find("target/core").expect("it is always there");
    let hosts = tree.subdirs(core);
    let devices = hosts.filter_map(|(_, host)| match tree.dir(host).kind {
        Kind::Host(plugin) => Some(tree.subdirs(host).map(move |(_, id)| (id, plugin))),
        _ => None,
    });
    devices.flatten().collect()
}
