//! The `rdma_core` provider: libibverbs and librdmacm, loaded at run time.
//!
//! One [`RdmaCoreDevice`] is the RDMA device that a local address belongs to. It offers what the
//! hardware interface has, under the same traits as the software NIC:
//!
//! - Memory, completion queues, queue pairs, shared receive queues, XRC domains, address handles: one to
//!   one. What a device lacks it refuses itself, with [`VerbsError::Unsupported`].
//! - A memory window of type 1 is bound by a call of its own, which gives it its next key: another one
//!   is refused ([`SendOp::BindMw`](crate::verbs::SendOp::BindMw)).
//! - Any region may get windows in the library; that the user has not allowed them is checked here.
//! - Fast registration: user space has no `REG_MR`, so a fast-registration region is a **memory
//!   window of type 2**. It takes one segment, which must lie within a region registered with
//!   [`Verbs::reg_mr`](crate::verbs::Verbs::reg_mr); [`SendOp::RegMr`](crate::verbs::SendOp::RegMr)
//!   binds it, `LocalInv` and the peer's send-with-invalidate unbind it.
//! - [`Notify::Count`](crate::verbs::Notify::Count) fires at the next completion; the hardware
//!   counts no further.
//! - A queue with a notification is polled while its user is awake, and armed in the device only
//!   before a sleep (`notify`), or where its events are to wait for further completions.
//! - Connections: librdmacm. Its own queue pair 1 stays in the kernel, so there is no GSI queue
//!   pair here, and [`PortSpace::Ib`](crate::verbs::PortSpace::Ib) is refused, since the kernel has
//!   no InfiniBand service ids on RoCE. Identifiers of other queue pairs than a port space usually has
//!   are of [`PortSpace::IbIp`](crate::verbs::PortSpace::IbIp), and share no ports.
//! - Alternate paths are attributes of queue pairs; the kernel's connection manager has none on RoCE.
//! - A listener's backlog bounds the requests that the kernel has not reported yet, not those that
//!   wait for an answer.
//! - The GID of our side is the one of the address that the device was opened at, for any
//!   [`AhAttr::sgid_index`](crate::verbs::AhAttr::sgid_index).
//! - A device that was unplugged must be closed by its user: `rdma_rxe` waits for that. So it does
//!   for an RDMA device whose users in this process have all closed it *before* it is unplugged,
//!   since librdmacm keeps it open; only the end of the process helps there.
//!
//! # What `rdma_rxe` does otherwise
//! Nothing here hides it; a program that must know asks the attributes or expects either.
//!
//! - User space does not learn which key a send-with-invalidate invalidated
//!   ([`DeviceAttr::reports_invalidation`](crate::verbs::DeviceAttr::reports_invalidation)).
//! - A refused local request flushes all that is in the queue, those before it too, and itself.
//! - A message longer than its receive is a "remote operation" error for the sender and a "queue
//!   pair operation" error for the receiver.
//! - A peer's violation of a key raises no asynchronous event, and an overrun completion queue does
//!   not end its queue pairs.
//! - It takes 7 retries after a timeout for "without end".
//! - After a drain of the send queue, work goes on only when something more is posted.
//! - The depths of READs and atomics are powers of two, and queues are deeper than asked for.
//!
//! | module | what it is |
//! | --- | --- |
//! | `objects` | what the handles stand for, and the order in which it is torn down |
//! | `device` | the verbs that make and destroy objects |
//! | `qp` | queue pairs from their attributes to their table, and back |
//! | `provider` | how a loop drives the device: rounds, descriptors, asynchronous events |
//! | `work` | post and poll |
//! | `notices` | which queues are to notify, and how far each has come |
//! | `notify` | when to arm a completion queue, and to look at descriptors |
//! | `cm` | connections |
//! | `shared` | what devices of one process at one RDMA device share |
//! | `convert` | types, one into the other |
//!
//! # Invariants
//! - A raw pointer lives in exactly one table entry and is freed with it.
//! - A region keeps its memory alive; queue pairs keep their queues and domain busy.
//! - The libraries see a request's number in our tables, never the caller's own value, so a
//!   completion that outlives its queue pair names nothing.

#![allow(
    unsafe_code,
    reason = "this module is the boundary to libibverbs and librdmacm"
)]

mod cm;
pub mod convert;
mod device;
#[cfg(test)]
mod fake;
mod notices;
mod notify;
mod objects;
mod provider;
mod qp;
mod shared;
mod work;

use std::collections::HashSet;
use std::ffi::CStr;
use std::net::IpAddr;
use std::path::Path;

pub use objects::RdmaCoreDevice;
use riser_rdma_core_sys::bindings::{ibv_gid, ibv_port_attr};
use riser_rdma_core_sys::{LoadError, RdmaCore, Verbs as Functions};
use thiserror::Error;

use crate::verbs::{CmError, Gid, VerbsError};

/// Reason why no rdma-core device could be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The libraries are missing.
    #[error("rdma-core is not installed: {0}")]
    Load(#[from] LoadError),
    /// librdmacm found no device behind the address.
    #[error("no RDMA device has the address {addr}: {source}")]
    NoDevice {
        /// The address that was asked for.
        addr: IpAddr,
        /// The error of librdmacm.
        source: CmError,
    },
    /// The device did not let itself be used.
    #[error("{call}: {source}")]
    Call {
        /// The function that failed.
        call: &'static str,
        /// Error of the device.
        source: VerbsError,
    },
}

/// A device of this host, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// The device's name, such as `rxe0` or `mlx5_0`.
    pub name: String,
    /// GUID of the node.
    pub guid: u64,
    /// Its first port is active.
    pub active: bool,
    /// The addresses of its first port's GID table.
    pub addrs: Vec<IpAddr>,
}

/// Returns whether an RDMA device has the local address at this moment: a cheap question, for
/// waiting until a device that was unplugged is back.
///
/// A host without rdma-core or without RDMA has no device. As [`GidTables::read`].
#[must_use]
pub fn has_device(addr: IpAddr) -> bool {
    GidTables::read().has(addr)
}

/// The GID tables of all RDMA devices, for those who ask about several addresses: a table has
/// hundreds of entries.
#[derive(Clone, Debug, Default)]
pub struct GidTables(HashSet<String>);

impl GidTables {
    /// Reads them. Those of the kernel's devices are files, and none of these devices is opened, since
    /// one that is open may not go. Other devices of libibverbs, which software has made in its place,
    /// are asked by its functions.
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

    /// Reads those of the kernel's devices, which have a folder each in this one.
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

    /// As [`has_device`], when they were read.
    #[must_use]
    pub fn has(&self, addr: IpAddr) -> bool {
        // Empty entries of the tables are zeros, which is the unspecified address.
        !addr.is_unspecified() && self.0.contains(&gid_text(Gid::from(addr)))
    }
}

/// Folder of the kernel's RDMA devices, by their names.
const KERNEL_DEVICES: &str = "/sys/class/infiniband";

/// A GID as the kernel writes it: eight groups of four digits.
fn gid_text(gid: Gid) -> String {
    let groups: Vec<String> = gid
        .0
        .chunks(2)
        .map(|g| format!("{:02x}{:02x}", g[0], g[1]))
        .collect();
    groups.join(":")
}

/// The RDMA devices of this host.
///
/// # Errors
/// [`LoadError`] where rdma-core is not installed.
pub fn devices() -> Result<Vec<DeviceSummary>, LoadError> {
    Ok(list(&RdmaCore::load()?.verbs, |_| true))
}

/// Those of the devices whose names are wanted, each of which is opened for a moment.
fn list(verbs: &Functions, is_wanted: impl Fn(&str) -> bool) -> Vec<DeviceSummary> {
    let mut count = 0;
    // SAFETY: the function fills the count and answers a list of that length, or null.
    let list = unsafe { (verbs.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `i` is below the list's length; a listed device has a NUL-terminated name.
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
        // SAFETY: the device comes from the list, which is freed only below.
        let context = unsafe { (verbs.ibv_open_device)(device) };
        let (mut active, mut addrs) = (false, Vec::new());
        if !context.is_null() {
            let mut port = ibv_port_attr::default();
            // SAFETY: the context is open, and the structure is the larger of the two that the
            // function knows.
            let r = unsafe { (verbs.ibv_query_port)(context, 1, (&raw mut port).cast()) };
            active = r == 0 && port.state == riser_rdma_core_sys::bindings::IBV_PORT_ACTIVE;
            for index in 0..port.gid_tbl_len {
                let mut gid = ibv_gid::default();
                // SAFETY: the context is open.
                if unsafe { (verbs.ibv_query_gid)(context, 1, index, &raw mut gid) } == 0 {
                    // SAFETY: every bit pattern of a GID is 16 bytes.
                    let addr = Gid(unsafe { gid.raw }).ip();
                    if !addr.is_unspecified() && !addrs.contains(&addr) {
                        addrs.push(addr);
                    }
                }
            }
            // SAFETY: opened above, with nothing made on it.
            unsafe { (verbs.ibv_close_device)(context) };
        }
        found.push(DeviceSummary {
            name,
            guid,
            active,
            addrs,
        });
    }
    // SAFETY: the list came from `ibv_get_device_list`.
    unsafe { (verbs.ibv_free_device_list)(list) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_as_the_kernel_does() {
        let text = |addr: &str| gid_text(Gid::from(addr.parse::<IpAddr>().unwrap()));
        assert_eq!(text("10.99.0.1"), "0000:0000:0000:0000:0000:ffff:0a63:0001");
        assert_eq!(text("fd99::1"), "fd99:0000:0000:0000:0000:0000:0000:0001");
    }

    #[test]
    fn tables_have_the_addresses_of_their_gids() {
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
    fn nobody_has_the_unspecified_address() {
        assert!(!has_device("0.0.0.0".parse().unwrap()));
        assert!(!has_device("::".parse().unwrap()));
    }
}
