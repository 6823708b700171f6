//! Limits on the commands of a logical unit or of an initiator: commands a second, and bytes a
//! second.
//!
//! # Modules
//! - `bucket`: [`Bucket`], one rate. `limiter`: [`Limiter`], the rates of one unit or initiator,
//!   shared by workers without a lock.
//! - `table`: [`Initiators`], the limiters of a target's initiators.
//!
//! The commands that wait are kept by their connection, in a [`Throttle`](crate::fabric::Throttle).
//!
//! # Where a command waits
//! ```text
//!   taken in → Throttle::enter ──────────────────────→ memory, data, task set's order, …
//!                    └→ waits ── Throttle::poll ──────────┘
//! ```
//! A command that waits is in its unit's task set as one whose data have yet to come: functions
//! find it, newer commands of its nexus wait for it as far as attributes ask for that, and those of
//! others do not. It holds no data memory but unsolicited data of iSCSI, which are bounded for each
//! connection.
//!
//! It waits for its initiator's limits first, and is booked with the unit when those let it go: an
//! initiator that its own limit holds back does not delay others at the unit.
//!
//! A quarter of a channel's commands may wait, and the first for each unit and direction; any other
//! that would be behind those for more than [`MAX_WAIT`](crate::fabric::MAX_WAIT) is answered with
//! TASK SET FULL, too. So commands for units without limits have contexts, and initiators send
//! fewer before they time out.
//!
//! # Order and fairness
//! The commands of a channel for one unit wait in line, reads apart from writes. Only the first of
//! a line has booked its turn with a limiter, so channels take turns at a rate that they share,
//! however many commands each has. Turns go by commands, not bytes or initiators: only limits of
//! initiators keep one from using most of what a unit may do. A booking is exact: a rate loses
//! nothing where a worker comes late.
//!
//! # What counts
//! Commands that read, write, compare, verify or unmap blocks. A read and WRITE SAME count the
//! blocks that they name, everything else the data that it takes: UNMAP its descriptors, since it
//! writes nothing, even on media that cannot free blocks. WRITE SAME must leave zeroes, which those
//! media write. All others pass, and so does what is going to be refused,
//! by a reservation, by write protection or as it is out of range. A command that costs more than
//! there is passes when the one before it is paid for, and those behind it wait until it is, too.

mod bucket;
mod limiter;
mod table;

pub use bucket::Bucket;
pub use limiter::{Cost, Limiter, Waits};
pub use riser_config::{BURST, IoLimits};
pub use table::{Initiators, LimiterKey, MAX_IDLE};

#[cfg(test)]
pub(crate) mod fixture {
    //! Limits for tests that choose them at random.

    use std::time::Duration;

    use super::IoLimits;

    /// None, or some that are felt within seconds.
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
