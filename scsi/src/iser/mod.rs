//! iSER (RFC 7145): iSCSI PDUs over RDMA, with no connection in it.
//!
//! A control-type PDU travels as one SEND: an iSER header of 28 bytes, the basic header segment,
//! its additional segments, the data segment. The header names the initiator's buffers, so that
//! data move by RDMA READ and WRITE and no Data-In or R2T PDU exists.
//!
//! ```text
//!   iSER header 28 | BHS 48 | AHS 0..1020 | data segment | pad 0..3
//! ```
//!
//! # Modules
//! - `header`: the iSER header: control-type PDUs ([`Buffers`]), [`Hello`], [`HelloReply`].
//! - `message`: a whole SEND ([`Message`]).
//! - `cm`: the private data of connection requests and answers ([`CmHeader`]).
//!
//! # Invariants
//! - The received length is the only authority: what the PDU declares is compared with it before
//!   anything is read.
//! - Nothing here panics on a peer's bytes.
//!
//! # Not implemented
//! The header of 12 bytes that RFC 5046 has for zero-based buffers. It is used only where both
//! sides offer it in their private data, and we never do. RFC 5046 peers that count from a virtual
//! address, which are those on InfiniBand and RoCE, use the header above.

mod cm;
mod header;
mod message;

#[cfg(test)]
mod tests;

pub use cm::{CM_HEADER_LEN, CmHeader};
pub use header::{Buffers, Header, Hello, HelloReply, RemoteBuffer, Stag, VERSION};
pub use message::{Message, put_control};

/// Length of an iSER header, in bytes.
pub const HEADER_LEN: usize = 28;

/// Length of both headers of a control-type PDU, in bytes: the least that such a message has.
pub const HEADERS_LEN: usize = HEADER_LEN + super::iscsi::BHS_LEN;

/// Port of an iSER target where none is said: that of iSCSI, since RFC 7145 names no other.
pub const DEFAULT_PORT: u16 = 3260;

/// An illegal message. The connection it came on cannot be used any longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IserError {
    /// Shorter than its fixed parts.
    #[error("{field} needs {need} bytes, {have} were received")]
    Truncated {
        /// Name of the incomplete field.
        field: &'static str,
        /// Bytes that it needs.
        need: usize,
        /// Bytes that there are.
        have: usize,
    },
    /// No such type of message.
    #[error("message of type {0:#x}")]
    Opcode(u8),
    /// TotalAHSLength beyond what any PDU needs.
    #[error("additional headers of {0} bytes")]
    TotalAhsLength(usize),
    /// More bytes than the PDU declares and pads.
    #[error("{0} bytes after the data segment")]
    Trailing(usize),
}
