//! Netlink messages: `struct nlmsghdr` and its payload.

use super::{Malformed, attribute, split};

/// Length of the header, in bytes.
pub const HEADER: usize = 16;

/// Message type of the result of a request (`NLMSG_ERROR`).
const ERROR: u16 = 2;

/// Message type that terminates a multipart message (`NLMSG_DONE`).
const DONE: u16 = 3;

/// Smallest message type not reserved for netlink (`NLMSG_MIN_TYPE`).
const MIN_TYPE: u16 = 16;

/// Flag of a request (`NLM_F_REQUEST`).
pub const REQUEST: u16 = 1;

/// Flag of a part of a multipart message, which `NLMSG_DONE` terminates (`NLM_F_MULTI`).
pub const MULTI: u16 = 2;

/// Flag that requests an acknowledgment (`NLM_F_ACK`).
pub const ACK: u16 = 4;

/// Message type of the RDMA subsystem: a client and one of its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Client number, below 64 (`RDMA_NL_IWCM`, `RDMA_NL_LS`, …).
    pub client: u8,
    /// Operation number, below 1024.
    pub operation: u16,
}

impl Kind {
    /// Splits the type field of a header.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self {
            client: (bits >> 10) as u8,
            operation: bits & 0x3FF,
        }
    }

    /// Returns the type field of a header.
    #[must_use]
    pub const fn bits(self) -> u16 {
        (self.client as u16) << 10 | self.operation & 0x3FF
    }
}

/// Message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Message type.
    pub kind: Kind,
    /// Flags: [`REQUEST`], [`MULTI`] and operation-specific flags.
    pub flags: u16,
    /// Sequence number that matches a response to its request.
    pub sequence: u32,
    /// Port of the sending socket; zero is the kernel.
    pub port: u32,
}

impl Header {
    /// Parses the header at the start of `bytes`; also returns the message length.
    fn read(bytes: &[u8]) -> Result<(Self, usize), Malformed> {
        let (header, _) = bytes.split_first_chunk::<HEADER>().ok_or(Malformed)?;
        let long = |at: usize| {
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let short = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let read = Self {
            kind: Kind::from_bits(short(4)),
            flags: short(6),
            sequence: long(8),
            port: long(12),
        };
        Ok((read, usize::try_from(long(0)).map_err(|_error| Malformed)?))
    }
}

/// A received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Message of a client.
    Client {
        /// Message header.
        header: Header,
        /// Bytes after the header.
        payload: &'a [u8],
    },
    /// Result of a request: `NLMSG_ERROR`.
    Error {
        /// Zero on success, or an error number (`errno(3)`).
        errno: i32,
        /// Header of the request.
        request: Header,
    },
    /// `NLMSG_DONE`, which the kernel also sends after each request to `RDMA_NL_IWCM`.
    Done,
    /// `NLMSG_NOOP` or `NLMSG_OVERRUN`.
    Control,
}

/// Iterator over the messages of a datagram. It stops after the first malformed message.
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Messages<'a> {
    /// Creates an iterator over the messages of a datagram.
    #[must_use]
    pub fn new(datagram: &'a [u8]) -> Self {
        Self { rest: datagram }
    }

    fn read(&mut self) -> Result<Message<'a>, Malformed> {
        let (header, len) = Header::read(self.rest)?;
        let payload = &split(&mut self.rest, HEADER, len)?[HEADER..];
        match header.kind.bits() {
            ERROR => {
                let (errno, request) = payload.split_first_chunk().ok_or(Malformed)?;
                Ok(Message::Error {
                    // The kernel negates it.
                    errno: i32::from_ne_bytes(*errno).wrapping_neg(),
                    // The length field refers to the original request, which may be truncated here.
                    request: Header::read(request)?.0,
                })
            }
            DONE => Ok(Message::Done),
            0..MIN_TYPE => Ok(Message::Control),
            _ => Ok(Message::Client { header, payload }),
        }
    }
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let message = self.read();
        if message.is_err() {
            self.rest = &[];
        }
        Some(message)
    }
}

/// Builder of a message.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts a message.
    #[must_use]
    pub fn new(header: Header) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&header.kind.bits().to_ne_bytes());
        bytes.extend_from_slice(&header.flags.to_ne_bytes());
        bytes.extend_from_slice(&header.sequence.to_ne_bytes());
        bytes.extend_from_slice(&header.port.to_ne_bytes());
        Self { bytes }
    }

    /// Appends the operation's own header. Its length must be aligned unless it is the last item.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends an attribute.
    ///
    /// # Panics
    /// If the value is longer than 65,531 bytes.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        attribute::append_attribute(&mut self.bytes, kind, value);
        self
    }

    /// Appends an attribute with NUL-terminated text.
    ///
    /// # Panics
    /// If the text is longer than 65,530 bytes.
    #[must_use]
    pub fn text(self, kind: u16, text: &str) -> Self {
        let value: Vec<u8> = text.bytes().chain([0]).collect();
        self.attribute(kind, &value)
    }

    /// Returns the bytes of the message.
    ///
    /// # Panics
    /// If the message exceeds 4 GiB.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.bytes.len()).expect("a message is shorter");
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Header = Header {
        kind: Kind {
            client: 2,
            operation: 8,
        },
        flags: REQUEST,
        sequence: 0x0102_0304,
        port: 77,
    };

    // As on a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn messages_match_kernel_layout() {
        let bytes = Writer::new(HELLO).attribute(1, &[4, 0]).finish();
        let golden = [
            24, 0, 0, 0, 8, 8, 1, 0, 4, 3, 2, 1, 77, 0, 0, 0, 6, 0, 1, 0, 4, 0, 0, 0,
        ];
        assert_eq!(bytes, golden);
        let read: Vec<_> = Messages::new(&bytes).collect();
        let header = HELLO;
        let payload = &golden[16..];
        assert_eq!(read, [Ok(Message::Client { header, payload })]);
    }

    // As on a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn ends_of_requests_are_read() {
        // ENODEV for a HELLO whose length field exceeds the repeated part, and a dump that ended
        // with an error.
        let datagram = [
            36, 0, 0, 0, 2, 0, 0, 0, 4, 3, 2, 1, 77, 0, 0, 0, 0xED, 0xFF, 0xFF, 0xFF, 24, 0, 0, 0,
            8, 8, 1, 0, 4, 3, 2, 1, 77, 0, 0, 0, 20, 0, 0, 0, 3, 0, 2, 0, 4, 3, 2, 1, 77, 0, 0, 0,
            0, 0, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        let read: Vec<_> = Messages::new(&datagram).map(Result::unwrap).collect();
        let error = Message::Error {
            errno: 19,
            request: HELLO,
        };
        assert_eq!(read, [error, Message::Done, Message::Control]);
    }

    #[test]
    fn invalid_length_stops_messages() {
        let bytes = Writer::new(HELLO).finish();
        for len in [0_u32, 15, 17, u32::MAX] {
            let mut datagram = [bytes.clone(), bytes.clone()].concat();
            datagram[16..20].copy_from_slice(&len.to_ne_bytes());
            let read: Vec<_> = Messages::new(&datagram).collect();
            assert_eq!((read.len(), read[1]), (2, Err(Malformed)), "{len}");
        }
        assert_eq!(Messages::new(&bytes[..7]).next(), Some(Err(Malformed)));
    }
}
