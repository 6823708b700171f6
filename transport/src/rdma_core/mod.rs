//! The `rdma_core` provider, which uses libibverbs and librdmacm. Both libraries are loaded at
//! runtime.
//!
//! An [`RdmaCoreDevice`] is the RDMA device with a given local address. It provides the hardware
//! functions using the same traits as the software NIC:
//!
//! - Memory, completion queues, queue pairs, shared receive queues, XRC domains and address handles
//!   are mapped directly. If a feature is not supported by the device, it returns
//!   [`VerbsError::Unsupported`].
//! - Type 1 memory windows are bound using a separate call, which always sets the next key. Any
//!   other key is rejected ([`SendOp::BindMw`](crate::verbs::SendOp::BindMw)).
//! - In the library, windows are allowed for every region. We check here whether the application
//!   has allowed them.
//! - Fast registration: `REG_MR` is not available in user space, so a fast-registration region is a
//!   **type 2 memory window**. It supports a single segment, which must be inside a region
//!   registered with [`Verbs::reg_mr`](crate::verbs::Verbs::reg_mr). It is bound by
//!   [`SendOp::RegMr`](crate::verbs::SendOp::RegMr), and unbound by `LocalInv` or a
//!   send-with-invalidate from the peer.
//! - Integrity regions are not supported, even by adapters with signature offload: libibverbs has no
//!   signature attributes, and the call of the adapter's own library (`mlx5dv_create_mkey`) only
//!   exists for one vendor, with its own queue pairs.
//! - [`Notify::Count`](crate::verbs::Notify::Count) fires on the next completion, since the
//!   hardware cannot count more than one.
//! - If notification is requested for a queue, it is polled while the application is awake. It is
//!   only armed in the device before the application sleeps (`notify`), or if its events should be
//!   delayed to wait for more completions.
//! - Connections use librdmacm. Its queue pair 1 is managed by the kernel, so GSI queue pairs are
//!   not supported. [`PortSpace::Ib`](crate::verbs::PortSpace::Ib) is rejected since the kernel
//!   does not support InfiniBand service ids on RoCE. If the queue pair type does not match the
//!   default of the port space, identifiers must use
//!   [`PortSpace::IbIp`](crate::verbs::PortSpace::IbIp), and they don't share ports.
//! - Alternate paths can be set as queue pair attributes, but they are not supported by the
//!   kernel's connection manager on RoCE.
//! - The backlog of a listener limits the number of requests not yet reported by the kernel. It
//!   doesn't include requests waiting for a response.
//! - For any [`AhAttr::sgid_index`](crate::verbs::AhAttr::sgid_index), we use the local GID of the
//!   address that the device was opened with.
//! - Unbinding a type 1 window requires a valid region, because several libraries read its key.
//! - On iWARP adapters, unsignaled SENDs and WRITEs of 4 KiB or more are signaled in the device, and
//!   their completions are not reported. A completion queue needs an entry for each of them. This
//!   ensures that `siw` doesn't send memory that was changed after a subsequent completion.
//! - If a device is unplugged, the application must close it, because `rdma_rxe` waits for this. It
//!   also waits if all users in this process have closed the device *before* it is unplugged,
//!   because librdmacm keeps it open. In this case, the only solution is to exit the process.
//!
//! # Differences when using `rdma_rxe`
//! We don't hide these differences. Programs should check the attributes, or be prepared for both
//! cases.
//!
//! - User space isn't told which key was invalidated by a send-with-invalidate
//!   ([`DeviceAttr::reports_invalidation`](crate::verbs::DeviceAttr::reports_invalidation)).
//! - If a local request is rejected, everything in the queue is flushed, including this request and
//!   any previous requests.
//! - If a message does not fit into the receive, the sender gets a "remote operation" error and the
//!   receiver gets a "queue pair operation" error.
//! - There is no asynchronous event if a peer uses an invalid key. If a completion queue overruns,
//!   its queue pairs don't fail.
//! - If the retry count after a timeout is set to 7, it retries indefinitely.
//! - After the send queue has been drained, it is not resumed until the next post.
//! - The number of READs and atomics is rounded up to a power of two, and queues can be larger than
//!   requested.
//!
//! | module | description |
//! | --- | --- |
//! | `context` | the opened device, and the order in which its objects are destroyed |
//! | `objects` | objects used by handles |
//! | `device` | the verbs traits |
//! | `cqs` | completion queues |
//! | `regions` | protection domains, regions and windows |
//! | `qp` | creating and destroying queue pairs |
//! | `provider` | driving the device: rounds, descriptors, asynchronous events |
//! | `work` | post and poll |
//! | `notices` | queues with a pending notification and their state |
//! | `notify` | when to arm a completion queue and when to check descriptors |
//! | `cm` | connections |
//! | `shared` | state shared by all devices in a process that use the same RDMA device |
//! | `convert` | type conversion |
//!
//! # Invariants
//! - A raw pointer is stored in a single table entry, and is freed together with it.
//! - A region keeps its memory mapped. Queue pairs prevent their queues and domain from being
//!   destroyed.
//! - Requests are passed to the library using a number from our tables instead of the caller's
//!   value, so a completion for a destroyed queue pair can never match a valid request.

#![allow(
    unsafe_code,
    reason = "this module is the boundary to libibverbs and librdmacm"
)]

mod cm;
mod context;
pub mod convert;
mod cqs;
mod device;
#[cfg(test)]
mod fake;
mod notices;
mod notify;
mod objects;
mod provider;
mod qp;
mod regions;
mod shared;
mod work;

use std::collections::HashSet;
use std::ffi::CStr;
use std::net::IpAddr;
use std::path::Path;

pub use context::RdmaCoreDevice;
use riser_rdma_core_sys::bindings::{ibv_gid, ibv_port_attr};
use riser_rdma_core_sys::{LoadError, RdmaCore, Verbs as Functions};
use serde::Serialize;
use thiserror::Error;

use crate::verbs::{CmError, Gid, VerbsError};

/// Error when opening an rdma-core device.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The libraries could not be loaded.
    #[error("rdma-core is not installed: {0}")]
    Load(#[from] LoadError),
    /// librdmacm didn't find a device for this address.
    #[error("no RDMA device has the address {addr}: {source}")]
    NoDevice {
        /// Requested address.
        addr: IpAddr,
        /// Error from librdmacm.
        source: CmError,
    },
    /// A device function has failed.
    #[error("{call}: {source}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Error from the device.
        source: VerbsError,
    },
}

/// Device information to display to the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceSummary {
    /// Device name, e.g. `rxe0` or `mlx5_0`.
    pub name: String,
    /// Node GUID.
    #[serde(skip)]
    pub guid: u64,
    /// Set if the first port is active.
    pub active: bool,
    /// Addresses in the GID table of the first port.
    #[serde(rename = "addresses")]
    pub addrs: Vec<IpAddr>,
}

/// Returns whether an RDMA device currently has this local address. This is cheap, so it can be
/// used to wait until an unplugged device is available again.
///
/// If rdma-core or RDMA is not available on this host, this always returns `false`. See
/// [`GidTables::read`].
#[must_use]
pub fn has_device(addr: IpAddr) -> bool {
    GidTables::read().has(addr)
}

/// GID tables of all RDMA devices. Use this to check multiple addresses, since a table contains
/// hundreds of entries.
#[derive(Clone, Debug, Default)]
pub struct GidTables(HashSet<String>);

impl GidTables {
    /// Reads all tables. For kernel devices, we read them from files without opening the device,
    /// since a device can't be removed while it is open. For software devices that replace a
    /// libibverbs device, we call its functions instead.
    #[must_use]
    pub fn read() -> Self {
        let kernels = Path::new(KERNEL_DEVICES);
        let mut gids = Self::read_files(kernels);
        if let Ok(core) = RdmaCore::load() {
            let others = list(&core.verbs, |name| !kernels.join(name).exists());
            let addrs = others.into_iter().flat_map(|device| device.addrs);
            gids.0.extend(addrs.map(|addr| gid_text(Gid::from(addr))));
        }
        gids
    }

    /// Reads the tables of all kernel devices, which are subdirectories of `devices`.
    fn read_files(devices: &Path) -> Self {
        let entries = |path: &Path| {
            let dir = std::fs::read_dir(path).into_iter().flatten();
            dir.filter_map(Result::ok).map(|e| e.path())
        };
        let gids = entries(devices)
            .flat_map(|device| entries(&device.join("ports")))
            .flat_map(|port| entries(&port.join("gids")))
            .filter_map(|gid| std::fs::read_to_string(gid).ok());
        Self(gids.map(|text| text.trim().to_owned()).collect())
    }

    /// Same as [`has_device`], based on the tables when they were read.
    #[must_use]
    pub fn has(&self, addr: IpAddr) -> bool {
        // Unused table entries are all zeros, which is the unspecified address.
        !addr.is_unspecified() && self.0.contains(&gid_text(Gid::from(addr)))
    }
}

/// Directory containing the kernel's RDMA devices by name.
const KERNEL_DEVICES: &str = "/sys/class/infiniband";

/// Formats a GID like the kernel: eight groups of four digits.
fn gid_text(gid: Gid) -> String {
    let groups: Vec<String> = gid
        .0
        .chunks(2)
        .map(|g| format!("{:02x}{:02x}", g[0], g[1]))
        .collect();
    groups.join(":")
}

/// Returns all RDMA devices of this host.
///
/// # Errors
/// [`LoadError`] if rdma-core is not installed.
pub fn devices() -> Result<Vec<DeviceSummary>, LoadError> {
    Ok(list(&RdmaCore::load()?.verbs, |_| true))
}

/// Returns all devices accepted by `is_wanted`. Each of them is opened temporarily.
fn list(verbs: &Functions, is_wanted: impl Fn(&str) -> bool) -> Vec<DeviceSummary> {
    let mut count = 0;
    // SAFETY: the function sets the count and returns a list of this length, or null.
    let list = unsafe { (verbs.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `i` is less than the list length. All devices in the list have a NUL-terminated
        // name.
        let (device, name, guid) = unsafe {
            let device = *list.add(i);
            let name = CStr::from_ptr((verbs.ibv_get_device_name)(device));
            (
                device,
                name.to_string_lossy().into_owned(),
                u64::from_be((verbs.ibv_get_device_guid)(device)),
            )
        };
        if !is_wanted(&name) {
            continue;
        }
        // SAFETY: this device is in the list, which is not freed until the end of the function.
        let context = unsafe { (verbs.ibv_open_device)(device) };
        let (mut active, mut addrs) = (false, Vec::new());
        if !context.is_null() {
            let mut port = ibv_port_attr::default();
            // SAFETY: the context is open. The function supports two versions of this structure,
            // and we use the larger one.
            let r = unsafe { (verbs.ibv_query_port)(context, 1, (&raw mut port).cast()) };
            active = r == 0 && port.state == riser_rdma_core_sys::bindings::IBV_PORT_ACTIVE;
            for index in 0..port.gid_tbl_len {
                let mut gid = ibv_gid::default();
                // SAFETY: the context is open.
                if unsafe { (verbs.ibv_query_gid)(context, 1, index, &raw mut gid) } == 0 {
                    // SAFETY: a GID is 16 bytes, and any value is valid.
                    let addr = Gid(unsafe { gid.raw }).ip();
                    if !addr.is_unspecified() && !addrs.contains(&addr) {
                        addrs.push(addr);
                    }
                }
            }
            // SAFETY: it was opened above, and we haven't created any objects.
            unsafe { (verbs.ibv_close_device)(context) };
        }
        found.push(DeviceSummary {
            name,
            guid,
            active,
            addrs,
        });
    }
    // SAFETY: the list was returned by `ibv_get_device_list`.
    unsafe { (verbs.ibv_free_device_list)(list) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_text_matches_kernel_format() {
        let text = |addr: &str| gid_text(Gid::from(addr.parse::<IpAddr>().unwrap()));
        assert_eq!(text("10.99.0.1"), "0000:0000:0000:0000:0000:ffff:0a63:0001");
        assert_eq!(text("fd99::1"), "fd99:0000:0000:0000:0000:0000:0000:0001");
    }

    #[test]
    fn gid_tables_contain_addresses() {
        let gids = [
            "0000:0000:0000:0000:0000:ffff:0a63:0001",
            &gid_text(Gid([0; 16])),
        ];
        let tables = GidTables(gids.map(str::to_owned).into());
        let has = |addr: &str| tables.has(addr.parse().unwrap());
        assert!(has("10.99.0.1") && !has("10.99.0.2"));
        assert!(!has("0.0.0.0") && !has("::"));
    }

    #[test]
    fn unspecified_address_has_no_device() {
        assert!(!has_device("0.0.0.0".parse().unwrap()));
        assert!(!has_device("::".parse().unwrap()));
    }
}
