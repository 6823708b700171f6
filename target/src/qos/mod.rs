//! Limits for commands and bytes per second, for a logical unit or an initiator.
//!
//! # Modules
//! - `bucket`: [`Bucket`], a single rate. `limiter`: [`Limiter`], the rates for a unit or an
//!   initiator, shared by workers without locking.
//! - `table`: [`Initiators`], the limiters for all initiators of a target.
//!
//! Delayed commands are queued by their connection in a [`Throttle`](crate::fabric::Throttle).
//!
//! # Delayed commands
//! ```text
//!   received → Throttle::admit_command ──────────────→ memory, data, task set's order, …
//!                    └→ waits ── Throttle::poll ──────────┘
//! ```
//! A delayed command is in the task set of its unit, like a command that is waiting for data. Task
//! management functions include it. Newer commands of the same nexus wait for it if required by the
//! task attributes, but commands of other nexuses do not. It does not use data memory, except for
//! unsolicited iSCSI data, which is limited per connection.
//!
//! A command waits for its initiator's limits first. It is booked with the unit only when these
//! allow it to start, so an initiator delayed by its own limit does not delay other initiators of
//! the unit.
//!
//! A quarter of the commands of a channel can be delayed, as well as the first command for each
//! unit and direction. Any other command that would be delayed by these is completed with TASK SET
//! FULL. The same applies if the delay would be longer than [`MAX_WAIT`](crate::fabric::MAX_WAIT).
//! This ensures that contexts are available for units without limits, and that initiators reduce
//! their queue depth before commands time out.
//!
//! # Order and fairness
//! Each channel has separate FIFO queues for each unit, for reads and for writes. Only the first
//! command of a queue is booked with a limiter, so channels alternate at a shared rate, regardless
//! of their number of commands. Fairness is based on commands rather than bytes or initiators, so
//! initiator limits are required to prevent an initiator from using most of a unit's rate. Bookings
//! are exact: no capacity is lost if a worker is late.
//!
//! # Cost of a command
//! Limits apply to commands that read, write, compare, verify or unmap blocks. Reads and WRITE SAME
//! are charged for the blocks in their range, and all other commands for the data they receive.
//! UNMAP is charged only for its parameter list, because it does not write, even to media that
//! cannot deallocate blocks. WRITE SAME must write zeroes to such media. All other commands are not
//! limited. Neither are commands that will fail, due to a reservation, write protection or an LBA
//! out of range. A command that exceeds the burst can start as soon as the previous command is paid
//! for, and subsequent commands wait until it is paid for as well.

mod bucket;
mod limiter;
mod table;

pub use bucket::Bucket;
pub use limiter::{Cost, Limiter, Waits};
pub use riser_config::{BURST, IoLimits};
pub use table::{Initiators, LimiterKey, MAX_IDLE};

#[cfg(test)]
pub(crate) mod fixture {
    //! Limits for randomized tests.

    use std::time::Duration;

    use super::IoLimits;

    /// Returns the limits selected by the bits of `n`, if any, with a noticeable effect within
    /// seconds.
    pub(crate) fn limits(n: u8) -> IoLimits {
        let one_of = |bit: u8, rate: u64| (n & 1 << bit != 0).then_some(rate);
        IoLimits {
            iops: one_of(0, 5),
            read_iops: one_of(1, 3),
            write_iops: one_of(2, 2),
            bandwidth: one_of(3, 8192),
            write_bandwidth: one_of(4, 512),
            burst: Duration::from_millis(u64::from(n >> 5) * 200),
            ..IoLimits::default()
        }
    }
}
