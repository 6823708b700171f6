//! An RDMA device and the connections on it, as SRP and iSER use them.
//!
//! [`Device`] is the provider with the owners of identifiers and queue pairs, and with what waits to
//! be posted ([`Device::flush`]). [`Resources`] are
//! what a session has of a device, [`RdmaConn`] is one reliable connection of it: from the address
//! to the disconnect, with its own memory, its receives, and the keys of the commands on it.
//! [`ConnSlot`] makes and ends connections, one after another, for a protocol's [`RdmaProtocol`].

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

/// Local segments of a SEND at most: the header, and immediate data.
pub(super) const MAX_SEND_SGE: usize = 4;

/// Fast registrations of one command at most.
pub(super) const MAX_REGIONS: usize = 16;
