//! Deterministic simulation of the programs that we ship, in one thread under a virtual clock:
//! initiators over SRP, iSER and iSCSI/TCP, the software NIC, and the workers of a target with
//! their backends, on a simulated network and simulated disks. The run is determined by a seed.
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
//! | [`plan`] | the participants and faults chosen by a seed |
//! | [`mod@run`] | a single run: schedule, clock and verdict |
//! | [`target`] | workers with their rings, disks and threads |
//! | [`admin`] | configuration changes |
//! | [`administrator`] | applies changes, and tries changes that must be rejected |
//! | `process` | process of the target: start, configuration changes, exit and handover |
//! | [`watcher`] | initiators that check the served units |
//! | [`disks`], [`nics`] | faults of disks and RDMA devices, disconnected addresses |
//! | [`initiator`] | an engine and its users |
//! | [`rival`] | an iSCSI initiator that uses features ours does not use |
//! | [`cheat`] | peers that violate the protocol |
//! | [`model`], [`reservations`] | expected reservations and unit attentions |
//! | [`exchange`] | a user of a unit whose disk is replaced |
//! | [`flood`] | a peer that sends many requests but doesn't read responses for some time |
//! | [`hog`] | peers with deep queues for hanging disks, or with trickling data |
//! | [`foreign`] | another target implementation, only for the initiator |
//! | [`keeper`] | target state that is kept across a power loss, and failures to save it |
//! | [`memory`] | memory limit of the target |
//! | [`leaks`] | data sent to a peer that may not read it |
//! | [`tcp`] | connections between initiators and target |
//! | [`text`] | plans as YAML |
//! | [`mod@shrink`] | reduces a failing plan |
//! | [`events`] | events in a run |
//! | [`pulse`] | detects a run that is stuck in a step |
//! | [`coverage`] | coverage of all runs |
//! | [`executor`] | futures that wait for steps of the schedule |
//!
//! # Verdict
//! A run passes if
//! - all reads are consistent with a history of each block ([`riser_tests::history`]), even after
//!   the target process was killed or its host has lost power;
//! - all commands complete within [`run::PATIENCE`] of virtual time after the last fault;
//! - at the end, all buffers and connections are released, including the resources of the target
//!   for them;
//! - the target only uses as much memory as its sessions have announced ([`memory`]);
//! - and no data is sent to an initiator that may not read it ([`leaks`]).
//!
//! Hanging disks and trickling peers must not delay any command from another initiator for longer
//! than [`initiator::PROMPT`].
//!
//! # Determinism
//! The seed determines the order in which actors run. No code reads the real clock, and all random
//! numbers are derived from the seed. Devices use simulated memory addresses
//! ([`riser_memory::simulated`]). Therefore two runs with the same seed send identical bytes on
//! both networks, and [`Outcome::trace`] is a hash of them.

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
mod stream;
pub mod target;
pub mod tcp;
pub mod text;
pub mod watcher;

pub use plan::Plan;
pub use run::{Failure, Outcome, run};
