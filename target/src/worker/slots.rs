//! How the slots of a worker's ring are shared: block operations, which may take as long as they
//! like, never take those that connections need.

/// Block operations in the ring at once.
const BLOCKS: usize = 1024;

/// Slots for sockets that listen, and for descriptors of devices that are watched.
const OTHERS: usize = 512;

/// Slots of a connection: it receives, and it sends.
const PER_CONNECTION: usize = 2;

/// Connections of a worker that serves this many sessions at most.
pub(super) const fn connections(sessions: u32) -> usize {
    2 * sessions as usize + 64
}

/// Shares of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// Block operations at once.
    pub(super) blocks: usize,
    /// TCP connections at once, with two operations each.
    pub(super) connections: usize,
}

impl Slots {
    /// The slots of a ring of `capacity` operations.
    pub(super) fn of(capacity: usize) -> Self {
        // Half of a small ring, so that connections have some of it too.
        let blocks = BLOCKS.min(capacity.div_ceil(2));
        let rest = capacity - blocks;
        Self {
            blocks,
            connections: (rest - OTHERS.min(rest / 2)) / PER_CONNECTION,
        }
    }
}

/// Operations that the ring of a worker must take to serve up to `sessions` sessions, rounded up
/// to what the kernel allocates for them.
#[must_use]
pub const fn ring_capacity(sessions: u32) -> u32 {
    let slots = BLOCKS + OTHERS + PER_CONNECTION * connections(sessions);
    // The ring has one more of its own.
    (slots as u32 + 1).next_power_of_two() - 1
}

#[cfg(test)]
mod tests {
    use riser_reactor::RingConfig;

    use super::*;
    use crate::config::MAX_SESSIONS;

    #[test]
    fn a_ring_has_room_for_the_connections_that_it_is_made_for() {
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
    fn a_small_ring_is_shared_as_well() {
        let slots = Slots::of(511);
        assert!(slots.blocks + PER_CONNECTION * slots.connections < 511);
        assert!(slots.blocks > 0 && slots.connections > 0);
    }
}
