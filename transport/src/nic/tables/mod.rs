//! Object tables of a device, which don't depend on the type of wire.
//!
//! | module | description |
//! | --- | --- |
//! | `ahs` | address handles |
//! | `cqs` | completion queues and their events |
//! | `events` | asynchronous events |
//! | `groups` | multicast groups |
//! | `memory` | protection domains, and their memory regions and windows |
//! | `peers` | hosts with connected queue pairs |
//! | `port` | addresses and state of the port |
//! | `qps` | queue pairs and their numbers |
//! | `schedule` | queue pairs waiting to send, and their timers |
//! | `srqs` | shared receive queues and XRC domains |

mod ahs;
mod cqs;
mod events;
mod groups;
mod memory;
mod peers;
mod port;
mod qps;
mod schedule;
mod srqs;

pub(super) use ahs::AddressHandles;
pub(super) use cqs::CompletionQueues;
pub(super) use events::AsyncEvents;
pub(super) use groups::Groups;
pub(super) use memory::MemoryTables;
#[cfg(test)]
pub(super) use peers::PORTS_PER_QP;
pub(super) use peers::{FlowPort, Peers};
pub(super) use port::{Port, check_port};
pub(super) use qps::QueuePairs;
pub(super) use schedule::Schedule;
pub(super) use srqs::SharedQueues;
