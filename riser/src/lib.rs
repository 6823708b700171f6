//! The program `riser`: discovers, attaches, mounts and benchmarks disks.
//!
//! - [`cli`]: the command line.
//! - [`inquiry`]: human-readable INQUIRY data.
//! - [`rping`]: the first check to run on a new network.
//! - [`vnic`]: virtual Ethernet member.
//!
//! Logical units are accessed by [`riser_initiator`], other disks by [`riser_disks`]. Both are
//! block devices ([`riser_block`]), exported by [`riser_exports`] and measured by [`riser_bench`].

pub mod cli;
pub mod inquiry;
pub mod rping;
pub mod vnic;
