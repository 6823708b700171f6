//! Memory of a connection besides its data buffers.
//!
//! These are bounds, fixed by the login. What a session occupies of them follows its use: receives
//! are taken newest first, other rings begin again at their front when they are empty, and contexts
//! belong to commands. So a session that has never been deep occupies a few pages.
//!
//! A receive queue that sessions share would be smaller. But a peer that sends more than it may
//! would empty it for all others, and only the device could stop that. A queue of its own makes
//! such a peer wait for itself alone (RNR NAK).

use riser_transport::roce::nic::Nic;
use riser_transport::verbs::QpCap;

use super::MAX_SGE;

/// Incoming READs and atomics that we allow: initiators have no business reading our memory.
pub const RESPONDER_RESOURCES: u8 = 1;

/// Outgoing READs at once, if the initiator allows as many.
pub const INITIATOR_DEPTH: u8 = 16;

/// Memory of one RDMA connection, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionMemory {
    /// Ring that messages are received into, in bytes.
    pub receive_ring: usize,
    /// Ring that messages are sent from, in bytes.
    pub send_ring: usize,
    /// Contexts of its commands and lists of them, in bytes.
    pub contexts: usize,
    /// Its queue pair and its completion queue, in bytes, as our own NIC makes them.
    pub queues: usize,
}

impl ConnectionMemory {
    /// Returns the sum of all parts, in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        self.receive_ring + self.send_ring + self.contexts + self.queues
    }

    /// Returns the memory of a queue pair for this number of requests of both kinds, in bytes.
    #[must_use]
    pub fn of_queues(sends: u32, receives: u32) -> usize {
        let cap = QpCap {
            max_send_sge: MAX_SGE as u32,
            ..QpCap::new(sends, receives)
        };
        let (reads, resources) = (INITIATOR_DEPTH, RESPONDER_RESOURCES);
        Nic::queue_memory(&cap, reads, resources, sends + receives)
    }
}
