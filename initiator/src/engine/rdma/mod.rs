//! An RDMA device and its connections, for SRP and iSER.
//!
//! [`Device`] is the provider with the owners of identifiers and queue pairs, and with the queued
//! requests ([`Device::flush`]). [`Resources`] are the resources of a session on a device.
//! [`RdmaConn`] is a reliable connection of a session, from address resolution to disconnect, with
//! its own memory, its receives, and the keys of its commands. [`ConnSlot`] opens and closes
//! successive connections for the [`RdmaProtocol`] of a session.

mod conn;
mod device;
mod posts;
mod probe;
mod slot;
mod task;
mod work;

pub(super) use self::conn::{Completed, RdmaConn, RdmaLimits, Retire, new_memory};
pub(super) use self::device::{Device, Owner, Resources};
pub(super) use self::slot::{ConnEvent, ConnSlot, RdmaProtocol};
use self::work::WorkRequest;

/// Maximum number of local segments in a SEND: the header and immediate data.
pub(super) const MAX_SEND_SGE: usize = 4;

/// Maximum number of fast registrations per command.
pub(super) const MAX_REGIONS: usize = 16;
