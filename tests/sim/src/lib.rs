//! The programs that ship, in one thread under a virtual clock: initiators over SRP, iSER and
//! iSCSI/TCP, the software NIC, a target's workers and their backends, on a simulated network and
//! on simulated disks. One seed gives one run.
//!
//! ```text
//!   workload ─▶ Engine (initiator) ─┬─ loopback::Fabric ─┬─▶ Worker ─▶ Kernel ─▶ Disk
//!      │                            └────── tcp::Network ┘      │
//!      ▼                                                        └─▶ Threads
//!   History: does an order of the writes explain what was read?
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`plan`] | what a seed decides: who takes part, and what goes wrong when |
//! | [`mod@run`] | one run: the schedule, the clock, the verdict |
//! | [`target`] | workers with their rings, disks and threads |
//! | [`admin`] | changes of the configuration |
//! | [`administrator`] | makes them, and tries what must be refused |
//! | `process` | how the target's process starts, changes what it serves, ends and hands over |
//! | [`watcher`] | initiators that look at what is served |
//! | [`disks`], [`nics`] | faults of disks and of RDMA devices; addresses that are cut off |
//! | [`initiator`] | an engine, and what its users do |
//! | [`rival`] | an initiator of iSCSI that does what ours does not |
//! | [`cheat`] | peers that break the rules |
//! | [`model`], [`reservations`] | what it may see of reservations and unit attentions |
//! | [`exchange`] | a user of a unit that becomes another disk |
//! | [`flood`] | a peer that asks for much and takes nothing for a while |
//! | [`hog`] | peers with deep queues for disks that hang, or with data that trickle |
//! | [`foreign`] | a target of another make, for the initiator alone |
//! | [`keeper`] | what the target keeps through a power loss, besides the disk, and fails to keep |
//! | [`memory`] | what the target may allocate |
//! | [`leaks`] | data that leave for a peer that may not read them |
//! | [`tcp`] | connections between the two |
//! | [`text`] | plans as YAML |
//! | [`mod@shrink`] | a plan that fails, made smaller |
//! | [`events`] | what happened in a run |
//! | [`pulse`] | finds a run that is caught in a step |
//! | [`coverage`] | what runs have reached |
//! | [`executor`] | futures whose waits are steps of the schedule |
//!
//! # Verdict
//! A run passes if a history of every block explains each read ([`riser_tests::history`]), also
//! after the target's process or its host's power has gone; if all commands end within
//! [`run::PATIENCE`] of virtual time after the last fault has gone; if buffers and connections, and
//! what the target had for them, are back at the end; if the target has no more memory than its
//! sessions announce ([`memory`]); and if no data of a unit left for an
//! initiator that may not read it ([`leaks`]). Disks that hang and peers that trickle delay no
//! command of another initiator for longer than [`initiator::PROMPT`].
//!
//! # Determinism
//! Actors take turns in an order that the seed chooses. Nothing reads a clock, and nothing draws a
//! random number that is not of the seed. Devices know memory by addresses of the simulation
//! ([`riser_memory::simulated`]). So two runs have the same bytes on both networks, which
//! [`Outcome::trace`] stands for.

pub mod admin;
pub mod administrator;
mod caught;
pub mod cheat;
pub mod coverage;
pub mod disks;
pub mod events;
pub mod exchange;
pub mod executor;
pub mod flood;
pub mod foreign;
pub mod hog;
pub mod initiator;
pub mod keeper;
pub mod leaks;
pub mod memory;
pub mod model;
pub mod nics;
pub mod plan;
mod process;
pub mod pulse;
pub mod reservations;
pub mod rival;
pub mod run;
pub mod shrink;
pub mod target;
pub mod tcp;
pub mod text;
pub mod watcher;

pub use plan::Plan;
pub use run::{Failure, Outcome, run};
