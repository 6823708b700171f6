//! Client protocol.
//!
//! - [`negotiate`]: handshake on a blocking stream.
//! - [`Negotiated`]: handshake result.
//! - [`Requests`]: state machine for the transmission phase: requests and bytes in, bytes and
//!   completions out.
//!
//! The client uses the options `STRUCTURED_REPLY`, `SET_META_CONTEXT` with `base:allocation`, and
//! `GO` with block sizes; if `GO` is not supported, `EXPORT_NAME` is used instead.
//!
//! # Invariants
//! Data from the server never causes a panic, and we limit the memory used for it: option replies
//! to [`MAX_OPTION`](super::proto::MAX_OPTION) bytes each and a max number, read chunks to
//! [`MAX_PIECES`](requests::MAX_PIECES) ranges, status to [`MAX_EXTENTS`](requests::MAX_EXTENTS)
//! extents.

mod coverage;
mod handshake;
mod requests;
#[cfg(test)]
mod tests;

pub use handshake::{HandshakeError, Negotiated, negotiate};
pub use requests::{Event, MAX_IN_FLIGHT, Progress, ReplyFault, Request, RequestOutcome, Requests};
