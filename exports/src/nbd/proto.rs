//! NBD protocol constants, and replies for the transmission phase. All values are big-endian on the
//! wire.

/// First field in the server greeting, `NBDMAGIC`.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second field in the greeting, and first field in each option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First field in each option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First field in each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First field in a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First field in a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Second field in the greeting if the server doesn't support negotiation (oldstyle).
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Port assigned by IANA.
pub const NBD_PORT: u16 = 10809;

/// Server greeting length in bytes.
pub const GREETING_LEN: usize = 18;
/// Option reply header length in bytes.
pub const OPTION_REPLY_LEN: usize = 20;
/// Simple reply length in bytes.
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Structured reply chunk header length in bytes.
pub const CHUNK_LEN: usize = 20;
/// Request header length in bytes.
pub const REQUEST_LEN: usize = 28;
/// Option header length in bytes.
pub const OPTION_LEN: usize = 16;

/// Max length for a name or query sent by the client, in bytes.
pub const MAX_STRING: usize = 4096;
/// Max supported option length in bytes. Larger options are rejected.
pub const MAX_OPTION: usize = 32 * 1024;
/// Max option length which can be skipped after rejection; above this we close the connection.
pub const MAX_SKIPPED_OPTION: u32 = 1 << 20;
/// Max read or write size in bytes; this is also the client's default without negotiation.
pub const MAX_REQUEST: u32 = 32 << 20;

/// The only metadata context.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Our ID for [`BASE_ALLOCATION`].
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Handshake flags.
pub mod handshake_flag {
    /// Fixed newstyle, used by both sides.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// Don't send 124 zero bytes after the `EXPORT_NAME` reply, used by both sides.
    pub const NO_ZEROES: u16 = 2;
}

/// Transmission flags, indicating supported export features.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Negotiation options.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod opt {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Option reply types.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod rep {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    pub const ERR_PLATFORM: u32 = (1 << 31) + 4;
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    pub const ERR_BLOCK_SIZE_REQD: u32 = (1 << 31) + 8;
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// Export information types.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Command numbers.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod cmd {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod cmd_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Structured reply chunk types and flags, and `base:allocation` extent flags.
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub mod chunk {
    pub const FLAG_DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
    pub const STATE_HOLE: u32 = 1;
    pub const STATE_ZERO: u32 = 2;
}

/// Error codes used in replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are the protocol document's")]
pub enum Errno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    NoSpc = 28,
    NotSup = 95,
}

impl Errno {
    /// Converts an error code received from a server to a block error. Unknown codes are treated as
    /// I/O errors.
    #[must_use]
    pub fn block_error(number: u32, message: &str) -> riser_block::BlockError {
        use riser_block::BlockError as E;
        match number {
            n if n == Self::Perm as u32 => E::ReadOnly,
            n if n == Self::NoSpc as u32 => E::NoSpace,
            n if n == Self::Inval as u32 => E::OutOfRange,
            n if n == Self::NotSup as u32 => E::Unsupported,
            n if message.is_empty() => E::Io(format!("the NBD server reported error {n}")),
            n => E::Io(format!("the NBD server reported error {n}: {message}")),
        }
    }
}

impl From<&riser_block::BlockError> for Errno {
    fn from(error: &riser_block::BlockError) -> Self {
        use riser_block::BlockError as E;
        match error {
            E::ReadOnly | E::ReservationConflict => Self::Perm,
            E::NoSpace => Self::NoSpc,
            E::Unsupported => Self::NotSup,
            E::OutOfRange => Self::Inval,
            E::Io(_)
            | E::Medium(_)
            | E::Protection(_)
            | E::WritesLost
            | E::TimedOut
            | E::Disconnected(_) => Self::Io,
        }
    }
}

/// Request ID set by the client, and returned in replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cookie(pub u64);

/// Creates a request header.
#[must_use]
pub fn request_header(
    command: u16,
    flags: u16,
    cookie: Cookie,
    offset: u64,
    len: u32,
) -> [u8; REQUEST_LEN] {
    let mut out = [0; REQUEST_LEN];
    out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&command.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.0.to_be_bytes());
    out[16..24].copy_from_slice(&offset.to_be_bytes());
    out[24..].copy_from_slice(&len.to_be_bytes());
    out
}

/// Creates a negotiation option with data.
#[must_use]
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(OPTION_LEN + data.len());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(number.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

/// Creates a simple reply; for a successful read, data must be appended.
#[must_use]
pub fn simple_reply(cookie: Cookie, error: Option<Errno>) -> [u8; SIMPLE_REPLY_LEN] {
    let mut out = [0; SIMPLE_REPLY_LEN];
    out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.map_or(0, |e| e as u32).to_be_bytes());
    out[8..].copy_from_slice(&cookie.0.to_be_bytes());
    out
}

/// Creates a structured reply chunk header for `len` bytes of payload.
#[must_use]
pub fn chunk_header(cookie: Cookie, kind: u16, flags: u16, len: u32) -> [u8; CHUNK_LEN] {
    let mut out = [0; CHUNK_LEN];
    out[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.0.to_be_bytes());
    out[16..].copy_from_slice(&len.to_be_bytes());
    out
}

/// Creates a data chunk for `offset`, not including the `len` bytes of data.
#[must_use]
pub fn data_chunk(cookie: Cookie, offset: u64, len: u32, done: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(28);
    out.extend(chunk_header(
        cookie,
        chunk::OFFSET_DATA,
        u16::from(done) * chunk::FLAG_DONE,
        len + 8,
    ));
    out.extend(offset.to_be_bytes());
    out
}

/// Creates an empty chunk, used to complete a reply.
#[must_use]
pub fn done_chunk(cookie: Cookie) -> Vec<u8> {
    chunk_header(cookie, chunk::NONE, chunk::FLAG_DONE, 0).to_vec()
}

/// Creates an error chunk for a failed request, with the error offset if known.
#[must_use]
pub fn error_chunk(cookie: Cookie, error: Errno, offset: Option<u64>, done: bool) -> Vec<u8> {
    let flags = u16::from(done) * chunk::FLAG_DONE;
    let (kind, len) = match offset {
        Some(_) => (chunk::ERROR_OFFSET, 14),
        None => (chunk::ERROR, 6),
    };
    let mut out = Vec::with_capacity(34);
    out.extend(chunk_header(cookie, kind, flags, len));
    out.extend((error as u32).to_be_bytes());
    // No message: the error code is enough.
    out.extend(0u16.to_be_bytes());
    if let Some(offset) = offset {
        out.extend(offset.to_be_bytes());
    }
    out
}

/// Creates a `BLOCK_STATUS` reply chunk with lengths and state flags.
#[must_use]
pub fn status_chunk(cookie: Cookie, extents: &[(u32, u32)]) -> Vec<u8> {
    let len = 4 + 8 * extents.len();
    let mut out = Vec::with_capacity(20 + len);
    out.extend(chunk_header(
        cookie,
        chunk::BLOCK_STATUS,
        chunk::FLAG_DONE,
        len as u32,
    ));
    out.extend(BASE_ALLOCATION_ID.to_be_bytes());
    for (len, flags) in extents {
        out.extend(len.to_be_bytes());
        out.extend(flags.to_be_bytes());
    }
    out
}
