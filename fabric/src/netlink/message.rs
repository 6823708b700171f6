//! Messages of netlink: `struct nlmsghdr` and what follows it.

use super::{Malformed, attribute, split};

/// Bytes of a header.
pub const HEADER: usize = 16;

/// Type of a message that says how a request ended (`NLMSG_ERROR`).
const ERROR: u16 = 2;

/// Type of the message behind the last of several (`NLMSG_DONE`).
const DONE: u16 = 3;

/// Types below this are netlink's own (`NLMSG_MIN_TYPE`).
const MIN_TYPE: u16 = 16;

/// Flag of a message that asks for something (`NLM_F_REQUEST`).
pub const REQUEST: u16 = 1;

/// Flag of one message of several, which `NLMSG_DONE` ends (`NLM_F_MULTI`).
pub const MULTI: u16 = 2;

/// Flag of a message whose end the receiver is to tell (`NLM_F_ACK`).
pub const ACK: u16 = 4;

/// Type of a message of the RDMA subsystem: a client of its, and an operation of that client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Number of the client, below 64 (`RDMA_NL_IWCM`, `RDMA_NL_LS`, …).
    pub client: u8,
    /// Number of the operation, below 1024.
    pub operation: u16,
}

impl Kind {
    /// The type of a header in its two parts.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self {
            client: (bits >> 10) as u8,
            operation: bits & 0x3FF,
        }
    }

    /// The type as a header has it.
    #[must_use]
    pub const fn bits(self) -> u16 {
        (self.client as u16) << 10 | self.operation & 0x3FF
    }
}

/// Header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the message.
    pub kind: Kind,
    /// Flags: [`REQUEST`], [`MULTI`], and those of an operation.
    pub flags: u16,
    /// Number by which an answer is found to its request.
    pub sequence: u32,
    /// Port of the socket that sends the message; zero is the kernel's.
    pub port: u32,
}

impl Header {
    /// The header at the beginning of `bytes`, and the length that it gives the message.
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

/// One message that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A message of a client.
    Client {
        /// Its header.
        header: Header,
        /// What follows the header.
        payload: &'a [u8],
    },
    /// The end of a request: `NLMSG_ERROR`.
    Error {
        /// Zero, or the number of an error (`errno(3)`).
        errno: i32,
        /// Header of the request.
        request: Header,
    },
    /// `NLMSG_DONE`, which the kernel also sends behind each request to `RDMA_NL_IWCM`.
    Done,
    /// `NLMSG_NOOP` or `NLMSG_OVERRUN`.
    Control,
}

/// Messages of a datagram, in their order. The iterator ends behind the first that is malformed.
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Messages<'a> {
    /// The messages in a datagram.
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
                    // The kernel has it negated.
                    errno: i32::from_ne_bytes(*errno).wrapping_neg(),
                    // Its length is not that of what is repeated of it.
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

/// A message that is being written.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Begins a message.
    #[must_use]
    pub fn new(header: Header) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&header.kind.bits().to_ne_bytes());
        bytes.extend_from_slice(&header.flags.to_ne_bytes());
        bytes.extend_from_slice(&header.sequence.to_ne_bytes());
        bytes.extend_from_slice(&header.port.to_ne_bytes());
        Self { bytes }
    }

    /// Appends bytes of the operation's own header. They must be aligned, or the last.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends an attribute.
    ///
    /// # Panics
    /// If the value is longer than an attribute can be, 65,531 bytes.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        attribute::put(&mut self.bytes, kind, value);
        self
    }

    /// Appends an attribute with text, which a NUL ends.
    ///
    /// # Panics
    /// If the text is longer than an attribute can be, 65,530 bytes.
    #[must_use]
    pub fn text(self, kind: u16, text: &str) -> Self {
        let value: Vec<u8> = text.bytes().chain([0]).collect();
        self.attribute(kind, &value)
    }

    /// The bytes of the message.
    ///
    /// # Panics
    /// If there are 4 GiB of them.
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

    // Bytes of a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn messages_have_the_layout_of_the_kernel() {
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

    // Bytes of a little-endian host.
    #[cfg(target_endian = "little")]
    #[test]
    fn ends_of_requests_are_read() {
        // ENODEV for a HELLO whose length is more than what is repeated of it, and the end of a
        // dump that an error ended.
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
    fn a_wrong_length_ends_the_datagram() {
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
