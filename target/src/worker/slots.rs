//! Use of ring slots: block operations, which can take a long time, must not use the slots that are
//! required for connections.

/// Maximum number of block operations in the ring.
const BLOCKS: usize = 1024;

/// Number of slots for listening sockets and device descriptors.
const OTHERS: usize = 512;

/// Number of slots for a connection: receive and send.
const PER_CONNECTION: usize = 2;

/// Returns the maximum number of connections for a worker with this session limit.
pub(super) const fn connections(sessions: u32) -> usize {
    2 * sessions as usize + 64
}

/// Distribution of ring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// Maximum number of block operations.
    pub(super) blocks: usize,
    /// Maximum number of TCP connections, with two slots each.
    pub(super) connections: usize,
}

impl Slots {
    /// Returns the slots for a ring with this capacity.
    pub(super) fn of(capacity: usize) -> Self {
        // Only use half of a small ring, so that there are slots for connections.
        let blocks = BLOCKS.min(capacity.div_ceil(2));
        let rest = capacity - blocks;
        Self {
            blocks,
            connections: (rest - OTHERS.min(rest / 2)) / PER_CONNECTION,
        }
    }
}

/// Returns the ring capacity for a worker with up to `sessions` sessions, rounded up to the size
/// allocated by the kernel.
#[must_use]
pub const fn ring_capacity(sessions: u32) -> u32 {
    let slots = BLOCKS + OTHERS + PER_CONNECTION * connections(sessions);
    // The ring reserves one slot for itself.
    (slots as u32 + 1).next_power_of_two() - 1
}

#[cfg(test)]
mod tests {
    use riser_reactor::RingConfig;

    use super::*;
    use crate::config::MAX_SESSIONS;

    #[test]
    fn ring_has_space_for_its_connections() {
        assert_eq!(ring_capacity(256), 4095);
        for sessions in [1, 256, 1000, MAX_SESSIONS] {
            let capacity = ring_capacity(sessions);
            assert!(capacity <= RingConfig::MAX_CAPACITY, "{sessions} sessions");
            let slots = Slots::of(capacity as usize);
            assert_eq!(slots.blocks, BLOCKS);
            assert!(slots.connections >= connections(sessions), "{sessions}");
        }
    }

    #[test]
    fn small_ring_is_shared() {
        let slots = Slots::of(511);
        assert!(slots.blocks + PER_CONNECTION * slots.connections < 511);
        assert!(slots.blocks > 0 && slots.connections > 0);
    }
}
