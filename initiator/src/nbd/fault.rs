//! Protocol errors caused by the client.

use thiserror::Error;

/// Error in the stream from the client. The connection will be closed without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NbdFault {
    /// Unknown bit set in the client flags.
    #[error("client flags {0:#x} have an unknown bit")]
    ClientFlags(u32),
    /// Option with an invalid magic number.
    #[error("option begins with {0:#x}")]
    OptionMagic(u64),
    /// Option which is larger than any valid option.
    #[error("option {option} is {len} bytes long")]
    OptionLength {
        /// Option number.
        option: u32,
        /// Data length in bytes.
        len: u32,
    },
    /// Unknown export requested via `EXPORT_NAME`, which has no error reply.
    #[error("the client asks for an export that does not exist")]
    UnknownExport,
    /// Request with an invalid magic number.
    #[error("request begins with {0:#x}")]
    RequestMagic(u32),
    /// Data received after the stream was closed.
    #[error("the connection is closed")]
    Closed,
}
