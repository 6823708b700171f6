//! Transfer of the data of short writes on RDMA: within the command, or fetched by the target.
//!
//! Data within the command saves the target a round trip. But each such command is a separate
//! message of two or more packets, which lower layers do not batch with the next one. In contrast,
//! the responses to RDMA READs of several writes are consecutive packets of equal length, and the
//! software NIC sends up to 15 of them at once. So with few outstanding writes the round trip is
//! more important, and with many the packets are.

/// Minimum number of outstanding writes, including the new one, for which the target fetches the
/// data.
const MANY: usize = 4;

/// Maximum number of outstanding writes, including the new one, for which they carry their data
/// again. Less than [`MANY`], so that it doesn't alternate for a load in between.
const FEW: usize = 2;

/// Policy for one connection. Its decisions depend only on the numbers of outstanding writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WritePolicy {
    /// The target may have as many concurrent READs as there are writes in a batch. Otherwise they
    /// would wait for each other, each for a round trip.
    may_fetch: bool,
    /// Many writes were outstanding, and the number has not dropped to few since.
    fetches: bool,
}

impl WritePolicy {
    /// Creates the policy for a target that may have this many concurrent RDMA READs.
    pub(crate) fn new(reads: u8) -> Self {
        Self {
            may_fetch: usize::from(reads) >= MANY,
            fetches: false,
        }
    }

    /// Returns whether a new write carries its data. `outstanding` includes the new write.
    pub(crate) fn carries_data(&mut self, outstanding: usize) -> bool {
        self.fetches = match outstanding {
            MANY.. => self.may_fetch,
            ..=FEW => false,
            _ => self.fetches,
        };
        !self.fetches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether each of several writes carries its data, for these numbers of outstanding
    /// writes.
    fn plan_writes(reads: u8, outstanding: &[usize]) -> Vec<bool> {
        let mut policy = WritePolicy::new(reads);
        let all = outstanding.iter();
        all.map(|count| policy.carries_data(*count)).collect()
    }

    #[test]
    fn target_fetches_data_of_many_writes() {
        assert_eq!(
            plan_writes(16, &[1, 2, 3, 4, 5]),
            [true, true, true, false, false]
        );
        assert_eq!(plan_writes(16, &[1, 1, 1, 1]), [true; 4]);
        assert_eq!(plan_writes(16, &[32, 32]), [false; 2]);
    }

    #[test]
    fn policy_changes_with_load_only() {
        // Between the bounds, the decision does not change.
        assert_eq!(plan_writes(16, &[3, 3, 3]), [true; 3]);
        assert_eq!(plan_writes(16, &[4, 3, 3, 4, 3]), [false; 5]);
        assert_eq!(
            plan_writes(16, &[4, 2, 3, 3, 4]),
            [false, true, true, true, false]
        );
    }

    #[test]
    fn serial_reader_receives_data_with_writes() {
        for reads in 0..MANY as u8 {
            assert_eq!(plan_writes(reads, &[1, 4, 32]), [true; 3], "{reads}");
        }
        assert_eq!(plan_writes(MANY as u8, &[1, 4, 32]), [true, false, false]);
    }
}
