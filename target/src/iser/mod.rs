//! iSER target (RFC 7145): a connection over RDMA.
//!
//! An [`IserChannel`] is a [`Channel`](crate::iscsi::Channel) using the datamover [`Iser`],
//! together with the descriptor rings. It receives completions, and returns receives to post and
//! chains of work requests ([`Post`]). All other actions are those of the channel. Layers above the
//! datamover do not depend on RDMA.
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
//! - `mover`: [`Iser`]: send queue, send-queue credits, and transfers.
//! - `ring`: transmit descriptors. `params`: sizes, fixed before the connection is accepted.
//! - `channel`: [`IserChannel`]: receives, states ([`ConnState`]), termination.
//!
//! # Flow control
//! There is a posted receive for every message that a well-behaved initiator may send: for all
//! commands in the window, the unsolicited data of each command, immediate requests and ping
//! responses. A receive is posted again as soon as its message was processed, so such a peer never
//! receives an RNR NAK. A peer that sends too many messages may receive RNR NAKs, but does not slow
//! down other peers. The same applies to a peer that does not negotiate FirstBurstLength and sends
//! unsolicited data up to its default value, which exceeds ours.
//!
//! # Invariants
//! - Responses are sent in StatSN order, because there is a single FIFO queue.
//! - A buffer is not returned to the pool until all chains using it have completed.
//! - [`IserAction::Release`] follows the last completion, including all receives, chains, and the
//!   drain marker.
//!
//! # Not implemented
//! Digests, markers and SNACK, which are excluded by RFC 7145. Zero-based buffers with the short
//! header of RFC 5046. Protection information.

mod channel;
mod mover;
mod params;
mod ring;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_messages;
#[cfg(test)]
mod tests_random;

pub use channel::{ConnState, IserAction, IserChannel, IserConfig};
pub use mover::{ChainIdx, Iser, Post, SendMessage};
pub use params::{FIRST_BURST, IserParams, RECV_SEGMENT};

/// Index of a receive descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RxIdx(pub u16);
