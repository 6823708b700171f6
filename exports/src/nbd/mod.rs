//! Network Block Device, fixed newstyle negotiation: server on a Unix socket, and client.
//!
//! - [`proto`]: protocol constants and message encoding.
//! - [`NbdUri`]: export addresses.
//! - [`client`]: client protocol. It has no socket: the owner sends and receives its bytes.
//! - [`Machine`]: sans-I/O server connection: bytes in, requests and bytes out.
//! - [`Server`]: accepts clients, runs a machine for each connection and executes the requests on a
//!   [`ByteDevice`](riser_block::ByteDevice).
//!
//! Source: NBD protocol specification (`doc/proto.md` in the reference implementation).
//!
//! The server supports `NBD_OPT_EXPORT_NAME`, `ABORT`, `LIST`, `INFO`, `GO`, `STRUCTURED_REPLY`,
//! `LIST_META_CONTEXT` and `SET_META_CONTEXT` with `base:allocation`; commands `READ`, `WRITE`,
//! `DISC`, `FLUSH`, `TRIM`, `CACHE` (accepted, but does nothing), `WRITE_ZEROES`, `BLOCK_STATUS`;
//! and multiple connections to the same export.
//!
//! Not supported: TLS, extended headers, oldstyle negotiation, resizing.
//!
//! # Invariants
//! If a request is malformed, the client will get an error. We only close the connection if the
//! stream can no longer be parsed. The number of requests in flight and bytes held per connection
//! are limited: if a client doesn't read its replies, we stop reading its requests.

mod budget;
pub mod client;
mod connection;
mod cursor;
mod fault;
mod handshake;
mod machine;
mod outgoing;
pub mod proto;
mod reply;
mod server;
mod transmission;
mod uri;

pub use fault::NbdFault;
pub use machine::{Event, Machine, Progress};
pub use server::{Server, ServerHandle};
pub use transmission::{Command, NbdRequest};
pub use uri::{NbdServer, NbdUri, UriError};

/// Export properties, as seen by clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Name. Clients can also use an empty name to request this export, because it's the default.
    pub name: String,
    /// Human-readable description; can be empty.
    pub description: String,
    /// Export size in bytes.
    pub size: u64,
    /// Preferred request size and alignment in bytes; other byte ranges are also supported.
    pub preferred_block: u32,
    /// Reject write access.
    pub read_only: bool,
    /// Set if `TRIM` is supported.
    pub can_trim: bool,
}

impl Export {
    /// Returns the transmission flags. `NBD_FLAG_SEND_DF` is set if structured replies were
    /// negotiated.
    #[must_use]
    pub fn transmission_flags(&self, structured: bool) -> u16 {
        use proto::flag;
        let mut flags =
            flag::HAS_FLAGS | flag::SEND_FLUSH | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
        if structured {
            flags |= flag::SEND_DF;
        }
        if self.read_only {
            return flags | flag::READ_ONLY;
        }
        if self.can_trim {
            flags |= flag::SEND_TRIM;
        }
        flags | flag::SEND_FUA | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO
    }

    /// Returns whether a name sent by the client matches this export.
    #[must_use]
    pub fn is_named(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}
