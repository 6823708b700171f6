//! Memory of a connection besides its data buffers.

/// Memory of one RDMA connection, in bytes, its queue pair aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionMemory {
    /// Ring that messages are received into, in bytes.
    pub receive_ring: usize,
    /// Ring that messages are sent from, in bytes.
    pub send_ring: usize,
    /// Contexts of its commands, in bytes.
    pub contexts: usize,
}

impl ConnectionMemory {
    /// Returns the sum of all parts, in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        self.receive_ring + self.send_ring + self.contexts
    }
}
