//! Network Block Devices: fixed newstyle negotiation, as a server over a Unix socket and as a
//! client.
//!
//! - [`proto`]: the protocol's numbers, and messages encoded.
//! - [`NbdUri`]: addresses of exports.
//! - [`client`]: the client's side of the protocol; [`crate::disks::nbd`] has its socket.
//! - [`Machine`]: one connection as bytes in, requests and bytes out. It owns no socket.
//! - [`Server`]: listens, runs a machine per connection and its requests on a
//!   [`ByteDevice`](crate::block::ByteDevice).
//!
//! Source: the NBD protocol document (`doc/proto.md` of the reference implementation).
//!
//! The server speaks `NBD_OPT_EXPORT_NAME`, `ABORT`, `LIST`, `INFO`, `GO`, `STRUCTURED_REPLY`,
//! `LIST_META_CONTEXT`, `SET_META_CONTEXT` with `base:allocation`; commands `READ`, `WRITE`,
//! `DISC`, `FLUSH`, `TRIM`, `CACHE` (answered, without effect), `WRITE_ZEROES`, `BLOCK_STATUS`;
//! several connections to one export.
//!
//! Not spoken: TLS, extended headers, oldstyle negotiation, resizing.
//!
//! # Invariants
//! A malformed request costs the client an error, and the connection only where the stream cannot
//! be followed any more. Requests in flight and bytes held per connection are bounded; a client
//! that does not read its replies stops being read.

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

/// Properties of the export, as its clients see them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Name. An empty name asks for the default export, which this one is as well.
    pub name: String,
    /// A line for people; may be empty.
    pub description: String,
    /// Size of the export in bytes.
    pub size: u64,
    /// Best size and alignment of requests in bytes; any byte range is served.
    pub preferred_block: u32,
    /// The export refuses changes.
    pub read_only: bool,
    /// `TRIM` has an effect.
    pub can_trim: bool,
}

impl Export {
    /// The transmission flags, with `NBD_FLAG_SEND_DF` where structured replies were negotiated.
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

    /// Returns whether a name that a client gives means this export.
    #[must_use]
    pub fn is_named(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}
