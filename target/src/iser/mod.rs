//! iSER at the target (RFC 7145): a connection with RDMA beneath it.
//!
//! An [`IserChannel`] is a [`Channel`](crate::iscsi::Channel) over the datamover [`Iser`], with the
//! descriptor rings around both. It takes completions, and gives receives to post and chains of
//! work requests ([`Post`]); everything else it wants is what the channel wants. Nothing above the
//! datamover knows that there is RDMA.
//!
//! ```text
//!   receive completion ──→ IserChannel ── frame ──→ Channel ── Action ──→ worker
//!                              │ ↑                     │ control PDUs, Put_Data, Get_Data
//!             PostRecv ←───────┘ │                     v
//!   Post: RDMA READs │ RDMA WRITEs, then a SEND ←──── Iser (Datamover)
//!                    └─ send completion ──→ IserChannel
//! ```
//!
//! # Modules
//! - `mover`: [`Iser`]: the queue of what is to be sent, send-queue credit, transfers.
//! - `ring`: the transmit descriptors. `params`: sizes, fixed before the connection is accepted.
//! - `channel`: [`IserChannel`]: receives, states ([`ConnState`]), termination.
//!
//! # Flow control
//! There is a posted receive for every message that a well-behaved initiator may send: the commands
//! of the window, the unsolicited data of each, immediate requests and answers to pings. A receive
//! is posted again as soon as its message has been looked at, so a peer never meets an RNR NAK. One
//! that sends more than it may meets them, and slows down no other; so does one that does not
//! negotiate FirstBurstLength and then sends unsolicited data up to its default, which is longer
//! than ours.
//!
//! # Invariants
//! - Answers leave in the order of their status sequence numbers: there is one queue, and nothing
//!   overtakes.
//! - A buffer goes back to the pool no earlier than every chain that touches it has completed.
//! - [`IserAction::Release`] comes after the last completion: receives, chains, and drain marker.
//!
//! # Not implemented
//! Digests, markers and SNACK, which RFC 7145 excludes. Buffers addressed from zero with the short
//! header of RFC 5046. Protection information.

mod channel;
mod mover;
mod params;
mod ring;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_random;

pub use channel::{ConnState, IserAction, IserChannel, IserConfig};
pub use mover::{ChainIdx, Iser, Post, SendMessage};
pub use params::{FIRST_BURST, IserParams, RECV_SEGMENT};

/// Number of a receive descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RxIdx(pub u16);
