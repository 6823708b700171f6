//! Datagrams between two port mappers: UDP, port 3935.
//!
//! A connecting peer (CP) queries an accepting peer (AP) for the mapping of an address. The
//! response is an accept or a reject; an accept is acknowledged. All numbers are in network byte
//! order. The layout matches rdma-core's `iwpmd`:
//!
//! | byte | contents |
//! | --- | --- |
//! | 0 | protocol version, 2 bits; type, 2 bits; IP version, 4 bits |
//! | 1 | time, zero |
//! | 2 | in a request, the mapped port of the CP; otherwise zero |
//! | 4 | port of the AP; in an accept and its acknowledgment, the mapped port |
//! | 6 | port of the CP |
//! | 8 | association handle, 8 bytes, chosen by the CP |
//! | 16 | IP address of the CP, 16 bytes |
//! | 32 | IP address of the AP, 16 bytes |
//! | 48 | only in a request: mapped IP address of the CP, 16 bytes |
//!
//! An IPv4 address occupies the first four bytes. The remaining bytes are zero here; `iwpmd` leaves
//! them uninitialized.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Protocol version.
const VERSION: u8 = 0;

/// Length of all messages except requests, in bytes.
pub const SHORT: usize = 48;

/// Length of a request, in bytes.
pub const LONG: usize = 64;

/// Message types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// The CP requests a mapping (`PMReq`), and includes its own mapped address, which the AP will
    /// see as the source of the connection.
    Request {
        /// Mapped address of the CP.
        mapped_cp: SocketAddr,
    },
    /// The AP has the mapping (`PMAccept`).
    Accept,
    /// The CP received the accept (`PMAck`).
    Ack,
    /// The AP has no mapping of the address (`PMReject`).
    Reject,
}

/// Message of the port mapper protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireMessage {
    /// Type of the message.
    pub message_type: MessageType,
    /// Association handle.
    pub assoc_handle: u64,
    /// Address of the connecting peer, as known to its program.
    pub cp: SocketAddr,
    /// Address of the accepting peer. It is mapped in an accept and its acknowledgment, and as
    /// known to the programs in a request and a reject. Both peers have the same IP version.
    pub ap: SocketAddr,
}

/// Invalid datagram: truncated, or with an unknown protocol or IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid port mapper datagram")]
pub struct Malformed;

impl WireMessage {
    /// Parses a datagram. Trailing bytes are ignored.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn read(datagram: &[u8]) -> Result<Self, Malformed> {
        let (head, rest) = datagram.split_first_chunk::<SHORT>().ok_or(Malformed)?;
        if head[0] >> 6 != VERSION {
            return Err(Malformed);
        }
        let is_v4 = match head[0] & 0x0F {
            4 => true,
            6 => false,
            _ => return Err(Malformed),
        };
        let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let address = |bytes: &[u8], port| {
            let (bytes, _) = bytes.split_first_chunk::<16>().ok_or(Malformed)?;
            let [a, b, c, d, ..] = *bytes;
            let ip: IpAddr = match is_v4 {
                true => Ipv4Addr::new(a, b, c, d).into(),
                false => Ipv6Addr::from(*bytes).into(),
            };
            Ok(SocketAddr::new(ip, port))
        };
        let message_type = match head[0] >> 4 & 3 {
            0 => MessageType::Request {
                mapped_cp: address(rest, port(2))?,
            },
            1 => MessageType::Accept,
            2 => MessageType::Ack,
            _ => MessageType::Reject,
        };
        let (handle, _) = head[8..].split_first_chunk().ok_or(Malformed)?;
        Ok(Self {
            message_type,
            assoc_handle: u64::from_be_bytes(*handle),
            cp: address(&head[16..], port(6))?,
            ap: address(&head[32..], port(4))?,
        })
    }

    /// Encodes the message: [`LONG`] bytes for a request, otherwise [`SHORT`] bytes.
    ///
    /// # Panics
    /// If the IP versions of its addresses differ.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let (number, mapped_cp) = match self.message_type {
            MessageType::Request { mapped_cp } => (0, Some(mapped_cp)),
            MessageType::Accept => (1, None),
            MessageType::Ack => (2, None),
            MessageType::Reject => (3, None),
        };
        let is_v4 = self.ap.is_ipv4();
        let addresses = [Some(self.cp), Some(self.ap), mapped_cp];
        assert!(
            addresses.iter().flatten().all(|a| a.is_ipv4() == is_v4),
            "addresses of one IP version"
        );
        let version = if is_v4 { 4 } else { 6 };
        let mut bytes = vec![VERSION << 6 | number << 4 | version, 0];
        let ports = [mapped_cp, Some(self.ap), Some(self.cp)];
        for port in ports.map(|addr| addr.map_or(0, |addr| addr.port())) {
            bytes.extend_from_slice(&port.to_be_bytes());
        }
        bytes.extend_from_slice(&self.assoc_handle.to_be_bytes());
        for addr in addresses.into_iter().flatten() {
            match addr.ip() {
                IpAddr::V4(ip) => {
                    bytes.extend_from_slice(&ip.octets());
                    bytes.extend_from_slice(&[0; 12]);
                }
                IpAddr::V6(ip) => bytes.extend_from_slice(&ip.octets()),
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: [u8; LONG] = [
        0x04, 0, 0xC0, 0x01, 0x0C, 0xBC, 0x9C, 0x40, 1, 2, 3, 4, 5, 6, 7, 8, // header
        10, 99, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // CP
        10, 99, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // AP
        10, 99, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // mapped CP
    ];

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn request() -> WireMessage {
        WireMessage {
            message_type: MessageType::Request {
                mapped_cp: addr("10.99.0.1:49153"),
            },
            assoc_handle: 0x0102_0304_0506_0708,
            cp: addr("10.99.0.1:40000"),
            ap: addr("10.99.0.2:3260"),
        }
    }

    #[test]
    fn messages_match_iwpmd_layout() {
        assert_eq!(request().write(), V4);
        assert_eq!(WireMessage::read(&V4), Ok(request()));
        for (number, message_type) in [
            (0x14, MessageType::Accept),
            (0x24, MessageType::Ack),
            (0x34, MessageType::Reject),
        ] {
            let mut golden = V4[..SHORT].to_vec();
            golden[0] = number;
            golden[2..4].fill(0);
            let message = WireMessage {
                message_type,
                ..request()
            };
            assert_eq!(message.write(), golden);
            assert_eq!(WireMessage::read(&golden), Ok(message));
        }
    }

    #[test]
    fn ipv6_addresses_fill_their_fields() {
        let mut golden = [0; LONG];
        golden[..16].copy_from_slice(&[
            0x06, 0, 0xC0, 0x01, 0x0C, 0xBC, 0x9C, 0x40, 0, 0, 0, 0, 0, 0, 0, 1,
        ]);
        for (at, last) in [(16, 1), (32, 2), (48, 1)] {
            golden[at..at + 2].copy_from_slice(&[0xFD, 0x99]);
            golden[at + 15] = last;
        }
        let message = WireMessage {
            message_type: MessageType::Request {
                mapped_cp: addr("[fd99::1]:49153"),
            },
            assoc_handle: 1,
            cp: addr("[fd99::1]:40000"),
            ap: addr("[fd99::2]:3260"),
        };
        assert_eq!(message.write(), golden);
        assert_eq!(WireMessage::read(&golden), Ok(message));
    }

    #[test]
    fn bytes_after_ipv4_address_are_ignored() {
        let mut bytes = V4;
        for at in [20, 36, 52] {
            bytes[at..at + 12].fill(0xA5);
        }
        bytes[1] = 9;
        assert_eq!(WireMessage::read(&bytes), Ok(request()));
    }

    #[test]
    fn other_datagrams_are_malformed() {
        // A truncated request, and unknown protocol and IP versions.
        assert_eq!(WireMessage::read(&V4[..LONG - 1]), Err(Malformed));
        assert_eq!(WireMessage::read(&[]), Err(Malformed));
        for first in [0x44, 0x84, 0xC4, 0x00, 0x05, 0x0F] {
            let mut bytes = V4;
            bytes[0] = first;
            assert_eq!(WireMessage::read(&bytes), Err(Malformed), "{first:#x}");
        }
    }

    #[test]
    fn parsed_messages_round_trip() {
        bolero::check!().with_type::<Vec<u8>>().for_each(|bytes| {
            if let Ok(message) = WireMessage::read(bytes) {
                assert_eq!(WireMessage::read(&message.write()), Ok(message));
            }
        });
    }
}
