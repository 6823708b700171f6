//! How the data of short writes travel on RDMA: within the command, or fetched by the target.
//!
//! Data within the command save the target a round trip. But each such command is a message of its
//! own of two packets or more, which no layer below groups with the next; the responses to RDMA
//! READs of several writes are packets of one length in a row, of which the software NIC sends up
//! to 15 at once. So where few writes are outstanding the round trip counts, and where many are, the
//! packets do.

/// Writes outstanding, the new one included, from which on the target fetches the data.
const MANY: usize = 4;

/// Writes outstanding, the new one included, up to which they travel within the command again. Less
/// than [`MANY`], so that a load around it does not alternate.
const FEW: usize = 2;

/// The policy of one connection. What it decides follows from the numbers of outstanding writes
/// alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WritePolicy {
    /// The target may have as many READs outstanding as there are writes in a batch. With fewer they
    /// would wait for each other, a round trip each.
    may_fetch: bool,
    /// Many writes were outstanding, and not few since.
    fetches: bool,
}

impl WritePolicy {
    /// For a target that may have that many RDMA READs outstanding.
    pub(crate) fn new(reads: u8) -> Self {
        Self {
            may_fetch: usize::from(reads) >= MANY,
            fetches: false,
        }
    }

    /// Returns whether a new write carries its data; `outstanding` counts it and the others.
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

    /// Whether each of several writes carries its data, by the numbers outstanding.
    fn carry(reads: u8, outstanding: &[usize]) -> Vec<bool> {
        let mut policy = WritePolicy::new(reads);
        let all = outstanding.iter();
        all.map(|count| policy.carries_data(*count)).collect()
    }

    #[test]
    fn the_target_fetches_the_data_of_many_writes() {
        assert_eq!(
            carry(16, &[1, 2, 3, 4, 5]),
            [true, true, true, false, false]
        );
        assert_eq!(carry(16, &[1, 1, 1, 1]), [true; 4]);
        assert_eq!(carry(16, &[32, 32]), [false; 2]);
    }

    #[test]
    fn the_way_changes_only_when_the_load_has() {
        // Between the bounds it stays what it was.
        assert_eq!(carry(16, &[3, 3, 3]), [true; 3]);
        assert_eq!(carry(16, &[4, 3, 3, 4, 3]), [false; 5]);
        assert_eq!(
            carry(16, &[4, 2, 3, 3, 4]),
            [false, true, true, true, false]
        );
    }

    #[test]
    fn a_target_that_reads_one_after_the_other_is_sent_the_data() {
        for reads in 0..MANY as u8 {
            assert_eq!(carry(reads, &[1, 4, 32]), [true; 3], "{reads}");
        }
        assert_eq!(carry(MANY as u8, &[1, 4, 32]), [true, false, false]);
    }
}
