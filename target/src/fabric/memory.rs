//! Memory of connections.

/// Memory of one RDMA connection, in bytes, its queue pair aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionMemory {
    /// Receive ring.
    pub receive_ring: usize,
    /// Send ring.
    pub send_ring: usize,
    /// Contexts of commands.
    pub contexts: usize,
}

impl ConnectionMemory {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> usize {
        self.receive_ring + self.send_ring + self.contexts
    }
}
