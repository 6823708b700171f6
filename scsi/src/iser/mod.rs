//! iSER (RFC 7145): iSCSI PDUs over RDMA, without any I/O.
//!
//! A control-type PDU is sent as a single SEND. This contains an iSER header of 28 bytes, the basic
//! header segment, additional header segments, and the data segment. The header contains the
//! initiator's buffers, so that data can be transferred with RDMA READ and WRITE instead of Data-In
//! and R2T PDUs.
//!
//! ```text
//!   iSER header 28 | BHS 48 | AHS 0..1020 | data segment | pad 0..3
//! ```
//!
//! # Modules
//! - `header`: the iSER header for control-type PDUs ([`Buffers`]), [`Hello`], [`HelloReply`].
//! - `message`: a complete SEND ([`Message`]).
//! - `cm`: private data in connection requests and responses ([`CmHeader`]).
//!
//! # Invariants
//! - Never trust a length sent by the peer. Make sure to validate it against the number of received
//!   bytes before we read any data.
//! - No data sent by a peer can cause a panic.
//!
//! # Not implemented
//! The 12-byte header used in RFC 5046 for zero-based buffers. This is only used if both sides set
//! it in their private data, and we never do. RFC 5046 peers which use virtual addresses, as is the
//! case for InfiniBand and RoCE, use the same header as above.

mod cm;
mod header;
mod message;

#[cfg(test)]
mod tests;

pub use cm::{CM_HEADER_LEN, CmHeader};
pub use header::{Buffers, Header, Hello, HelloReply, RemoteBuffer, Stag, VERSION};
pub use message::{Message, put_control};

/// Size of an iSER header, in bytes.
pub const HEADER_LEN: usize = 28;

/// Size of both headers in a control-type PDU, in bytes. This is the minimum size of such a
/// message.
pub const HEADERS_LEN: usize = HEADER_LEN + super::iscsi::BHS_LEN;

/// Default port of an iSER target. RFC 7145 doesn't define a new port, so this is the same as for
/// iSCSI.
pub const DEFAULT_PORT: u16 = 3260;

/// An invalid message. After this, the connection cannot be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IserError {
    /// The message is shorter than the fixed parts.
    #[error("{field} requires {need} bytes, but only {have} were received")]
    Truncated {
        /// Name of the truncated field.
        field: &'static str,
        /// Required number of bytes.
        need: usize,
        /// Available number of bytes.
        have: usize,
    },
    /// Unknown message type.
    #[error("unknown message type {0:#x}")]
    Opcode(u8),
    /// TotalAHSLength is more than needed for any PDU.
    #[error("unsupported additional header segments of {0} bytes")]
    TotalAhsLength(usize),
    /// Unexpected bytes after the PDU and padding.
    #[error("{0} unexpected bytes after the data segment")]
    Trailing(usize),
}
