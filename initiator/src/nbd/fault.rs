//! Violations of the protocol by a client.

use thiserror::Error;

/// Reason why the stream cannot be used any longer. The connection ends without a further reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NbdFault {
    /// The client's flags have a bit that we do not know.
    #[error("client flags {0:#x} have an unknown bit")]
    ClientFlags(u32),
    /// An option does not begin with its magic number.
    #[error("option begins with {0:#x}")]
    OptionMagic(u64),
    /// An option is longer than any that exists.
    #[error("option {option} is {len} bytes long")]
    OptionLength {
        /// Number of the option.
        option: u32,
        /// Length of its data, in bytes.
        len: u32,
    },
    /// `EXPORT_NAME`, which knows no error, named an export that does not exist.
    #[error("the client asks for an export that does not exist")]
    UnknownExport,
    /// A request does not begin with its magic number.
    #[error("request begins with {0:#x}")]
    RequestMagic(u32),
    /// Bytes after the end.
    #[error("the connection is closed")]
    Closed,
}
