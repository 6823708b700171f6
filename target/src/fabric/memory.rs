//! Memory used by a connection, excluding data buffers.
//!
//! These are upper limits, determined by the login. The actual memory usage of a session depends on
//! its activity: receives are reused in LIFO order, other rings restart at the beginning when they
//! are empty, and contexts are allocated for commands. A session that never had a deep queue only
//! uses a few pages.
//!
//! A shared receive queue would be smaller. However, a peer that sends too many messages would
//! exhaust it for all other peers, and only the device could prevent this. With separate queues,
//! such a peer only delays itself (RNR NAK).

use riser_transport::nic::Device;
use riser_transport::verbs::QpCap;

use super::MAX_SGE;

/// Number of incoming READs and atomics to permit. Initiators have no reason to read our memory.
pub const RESPONDER_RESOURCES: u8 = 1;

/// Maximum number of concurrent outgoing READs, if permitted by the initiator.
pub const INITIATOR_DEPTH: u8 = 16;

/// Memory of an RDMA connection, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionMemory {
    /// Receive ring, in bytes.
    pub receive_ring: usize,
    /// Send ring, in bytes.
    pub send_ring: usize,
    /// Command contexts and lists of contexts, in bytes.
    pub contexts: usize,
    /// Queue pair and completion queue of our software NIC, in bytes.
    pub queues: usize,
}

impl ConnectionMemory {
    /// Returns the total in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        self.receive_ring + self.send_ring + self.contexts + self.queues
    }

    /// Returns the memory of a queue pair with this number of send and receive requests, in bytes.
    #[must_use]
    pub fn of_queues(sends: u32, receives: u32) -> usize {
        let cap = QpCap {
            max_send_sge: MAX_SGE as u32,
            ..QpCap::new(sends, receives)
        };
        let (reads, resources) = (INITIATOR_DEPTH, RESPONDER_RESOURCES);
        Device::queue_memory(&cap, reads, resources, sends + receives)
    }
}
