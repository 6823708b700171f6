//! Protocol errors caused by the client.

use thiserror::Error;

/// Error in the stream from the client. The connection will be closed without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NbdFault {
    /// Unknown bit set in the client flags.
    #[error("unknown bit in client flags {0:#x}")]
    ClientFlags(u32),
    /// Option with an invalid magic number.
    #[error("invalid magic {0:#x} of an option")]
    OptionMagic(u64),
    /// Option which is larger than any valid option.
    #[error("invalid length of {len} bytes of option {option}")]
    OptionLength {
        /// Option number.
        option: u32,
        /// Data length in bytes.
        len: u32,
    },
    /// Unknown export requested via `EXPORT_NAME`, which has no error reply.
    #[error("unknown export requested")]
    UnknownExport,
    /// Request with an invalid magic number.
    #[error("invalid magic {0:#x} of a request")]
    RequestMagic(u32),
    /// Data received after the stream was closed.
    #[error("the connection is closed")]
    Closed,
}
