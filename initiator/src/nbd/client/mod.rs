//! The client's side of the protocol.
//!
//! - [`negotiate`]: the handshake, on a stream that waits.
//! - [`Negotiated`]: its outcome.
//! - [`Requests`]: the transmission phase as a machine: requests and bytes in, bytes and ends out.
//!
//! Of the options it uses `STRUCTURED_REPLY`, `SET_META_CONTEXT` with `base:allocation`, and `GO`
//! with the block sizes; `EXPORT_NAME` at servers that do not know `GO`.
//!
//! # Invariants
//! A server's bytes never panic. What is held of them is bounded: replies to options by
//! [`MAX_OPTION`](super::proto::MAX_OPTION) bytes each and a number of them, a read's chunks by
//! [`MAX_PIECES`](requests::MAX_PIECES) ranges, a status by
//! [`MAX_EXTENTS`](requests::MAX_EXTENTS) extents.

mod coverage;
mod handshake;
mod requests;
#[cfg(test)]
mod tests;

pub use handshake::{HandshakeError, Negotiated, negotiate};
pub use requests::{End, Event, MAX_IN_FLIGHT, Progress, ReplyFault, Request, Requests};
