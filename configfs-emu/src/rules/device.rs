//! Devices: what `control` sets, and their states, which all rules ask for.

use super::kind::{Kind, Plugin, Tree};
use crate::tree::NodeId;

/// A page of a RAM disk, in bytes.
pub const PAGE: u64 = 4096;

/// Names of hidden values that come through `control`, as they are written there.
pub mod option {
    /// A file, or a device as a file.
    pub const FILE: &str = "fd_dev_name";
    /// Its size in bytes.
    pub const SIZE: &str = "fd_dev_size";
    /// Set where its writes are cached.
    pub const BUFFERED: &str = "fd_buffered_io";
    /// Set where it is used asynchronously.
    pub const ASYNC: &str = "fd_async_io";
    /// Path of a block device; the sign belongs to the name.
    pub const DEVICE: &str = "udev_path=";
    /// Set where the device is only read.
    pub const READ_ONLY: &str = "readonly";
    /// The size of a RAM disk, in pages.
    pub const PAGES: &str = "rd_pages";
    /// Set where a RAM disk keeps nothing.
    pub const NULL: &str = "rd_nullio";
    /// Set where a RAM disk is no disk.
    pub const DUMMY: &str = "rd_dummy";
}

/// The device that a directory below it belongs to.
pub fn device_of(tree: &Tree, id: NodeId) -> NodeId {
    let device = tree.above(id, |dir| matches!(dir.kind, Kind::Device(_)));
    device.expect("only directories of devices ask")
}

/// Returns true if a device is a LUN of something.
pub fn is_exported(tree: &Tree, id: NodeId) -> bool {
    tree.dir(device_of(tree, id)).is_linked()
}

/// Returns true if a device was enabled.
pub fn is_configured(tree: &Tree, device: NodeId) -> bool {
    tree.value(device, "enable") == "1"
}

/// All devices, with their plugins.
pub fn devices(tree: &Tree) -> Vec<(NodeId, Plugin)> {
    let core = tree.find("target/core").expect("it is always there");
    let hosts = tree.subdirs(core);
    let devices = hosts.filter_map(|(_, host)| match tree.dir(host).kind {
        Kind::Host(plugin) => Some(tree.subdirs(host).map(move |(_, id)| (id, plugin))),
        _ => None,
    });
    devices.flatten().collect()
}
