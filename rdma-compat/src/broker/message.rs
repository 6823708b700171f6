//! Protocol between a broker and its processes.
//!
//! Each message is a packet of a Unix socket of type SEQPACKET, so every incoming message is
//! complete, and messages arrive in order.

use std::ffi::OsStr;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use riser_transport::nic::IpFields;
use riser_transport::roce::ForwardedPacket;
use riser_transport::wire::cma::RdmaPortSpace;
use riser_transport::wire::{CommId, Mad, ServiceId};
use rustix::io::Errno as Os;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::ports::Port;

/// Maximum size of a message, based on a message with a packet as its payload.
pub(super) const MESSAGE: usize = 8 << 10;

/// Protocol version. It is the first field of the initial message in each direction, so its
/// position must not change.
pub(super) const VERSION: u8 = 1;

/// Maximum number of descriptors in a message.
const MAX_DESCRIPTORS: usize = 64;

const START: u8 = 1;
const WELCOME: u8 = 2;
const FULL: u8 = 3;
const REQUEST: u8 = 4;
const REPLY: u8 = 5;
const PACKET: u8 = 6;
const CONNECTION: u8 = 7;

/// A message between a broker and a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Initial message to a new broker, with its directory, its listener, the lock of the address
    /// and the sockets of all slots. It contains the path of the listener, because the broker has
    /// no environment.
    Start {
        version: u8,
        addr: IpAddr,
        listener: PathBuf,
    },
    /// Initial message to each process, with the socket of its slot.
    Welcome { version: u8, slot: u8 },
    /// First and last message to a process for which there is no slot.
    Full,
    /// A request of a process for a port of the RDMA CM.
    Request {
        id: u32,
        action: PortAction,
        port: Port,
    },
    /// Response to the request with this ID: an error number, or 0, and the port.
    Reply { id: u32, errno: i32, port: u16 },
    /// A packet that was received by a socket of another process, or by the broker.
    Packet(ForwardedPacket),
    /// A connection with this local ID that was established, with the DREQ that closes it, or a
    /// connection that was closed.
    Connection {
        id: CommId,
        dreq: Option<(IpAddr, Mad)>,
    },
}

/// Requests for ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum PortAction {
    /// Allocates a port, or any free port if it is 0.
    Allocate = 1,
    /// Starts to deliver incoming connection requests to the process.
    Listen = 2,
    /// Stops the delivery of connection requests.
    StopListening = 3,
    /// Frees a port.
    Release = 4,
}

impl PortAction {
    const ALL: [Self; 4] = [
        Self::Allocate,
        Self::Listen,
        Self::StopListening,
        Self::Release,
    ];
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        match self {
            Self::Start {
                version,
                addr,
                listener,
            } => {
                bytes.extend([START, *version]);
                bytes.extend(octets(*addr));
                bytes.extend(listener.as_os_str().as_bytes());
            }
            Self::Welcome { version, slot } => bytes.extend([WELCOME, *version, *slot]),
            Self::Full => bytes.push(FULL),
            Self::Request {
                id,
                action,
                port: (space, port),
            } => {
                bytes.push(REQUEST);
                bytes.extend(id.to_be_bytes());
                bytes.push(*action as u8);
                bytes.extend(space.service_id(*port).0.to_be_bytes());
            }
            Self::Reply { id, errno, port } => {
                bytes.push(REPLY);
                bytes.extend(id.to_be_bytes());
                bytes.extend(errno.to_be_bytes());
                bytes.extend(port.to_be_bytes());
            }
            Self::Packet(packet) => {
                bytes.extend([PACKET, packet.ip.traffic_class, packet.ip.hop_limit]);
                bytes.extend(packet.src.port().to_be_bytes());
                bytes.extend(octets(packet.src.ip()));
                bytes.extend(&packet.bytes);
            }
            Self::Connection { id, dreq } => {
                bytes.push(CONNECTION);
                bytes.extend(id.0.to_be_bytes());
                if let Some((to, mad)) = dreq {
                    bytes.extend(octets(*to));
                    bytes.extend(mad);
                }
            }
        }
        bytes
    }

    /// Returns `None` for a message of an unknown kind or an invalid length.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, body) = bytes.split_first()?;
        Some(match *kind {
            START => {
                let (version, body) = body.split_first()?;
                let (addr, listener) = body.split_first_chunk()?;
                Self::Start {
                    version: *version,
                    addr: address(*addr),
                    listener: OsStr::from_bytes(listener).into(),
                }
            }
            WELCOME => match body {
                // The remaining fields might be different in other versions.
                [version, rest @ ..] => Self::Welcome {
                    version: *version,
                    slot: *rest.first()?,
                },
                [] => return None,
            },
            FULL => Self::Full,
            REQUEST => {
                let (id, body) = body.split_first_chunk()?;
                let (action, service) = body.split_first()?;
                let service = ServiceId(u64::from_be_bytes(service.try_into().ok()?));
                let mut actions = PortAction::ALL.into_iter();
                Self::Request {
                    id: u32::from_be_bytes(*id),
                    action: actions.find(|known| *known as u8 == *action)?,
                    port: RdmaPortSpace::of(service)?,
                }
            }
            REPLY => {
                let (id, body) = body.split_first_chunk()?;
                let (errno, port) = body.split_first_chunk()?;
                Self::Reply {
                    id: u32::from_be_bytes(*id),
                    errno: i32::from_be_bytes(*errno),
                    port: u16::from_be_bytes(port.try_into().ok()?),
                }
            }
            PACKET => {
                let (head, body) = body.split_first_chunk::<4>()?;
                let (ip, bytes) = body.split_first_chunk()?;
                let port = u16::from_be_bytes([head[2], head[3]]);
                Self::Packet(ForwardedPacket {
                    worker: 0,
                    src: SocketAddr::new(address(*ip), port),
                    ip: IpFields {
                        traffic_class: head[0],
                        hop_limit: head[1],
                        // Sockets of additional addresses are not shared.
                        gid_index: 0,
                    },
                    bytes: bytes.to_vec(),
                })
            }
            CONNECTION => {
                let (id, body) = body.split_first_chunk()?;
                let dreq = match body.split_first_chunk() {
                    Some((to, mad)) => Some((address(*to), mad.try_into().ok()?)),
                    None => None,
                };
                Self::Connection {
                    id: CommId(u32::from_be_bytes(*id)),
                    dreq,
                }
            }
            _ => return None,
        })
    }
}

fn octets(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    }
}

fn address(octets: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
}

/// Sends a message with descriptors.
///
/// # Errors
/// Returns `EAGAIN` if the peer has too many unread messages, and `EPIPE` if it has exited.
pub(super) fn send(
    socket: impl AsFd,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Os> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(
        socket,
        &[IoSlice::new(&message.encode())],
        &mut control,
        flags,
    )
    .map(drop)
}

/// Result of [`receive`].
#[derive(Debug)]
pub(super) enum Received {
    Message(Message),
    /// Currently, there is no message.
    Nothing,
    /// The peer has exited.
    Closed,
}

/// Receives the next message with its descriptors. Invalid messages are ignored.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8; MESSAGE],
    descriptors: &mut Vec<OwnedFd>,
) -> Received {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(buffer)];
        let len = match recvmsg(&socket, parts, &mut control, flags) {
            Ok(got) => got.bytes,
            // The peer has exited without reading all messages, but its own messages follow.
            Err(Os::INTR | Os::CONNRESET) => continue,
            Err(Os::AGAIN) => return Received::Nothing,
            Err(_) => 0,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if len == 0 {
            return Received::Closed;
        }
        if let Some(message) = Message::decode(&buffer[..len]) {
            return Received::Message(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn messages_are_received_as_sent() {
        let packet = |src: &str| {
            Message::Packet(ForwardedPacket {
                worker: 0,
                src: src.parse().unwrap(),
                ip: IpFields {
                    traffic_class: 3,
                    hop_limit: 64,
                    gid_index: 0,
                },
                bytes: vec![1, 2, 3],
            })
        };
        let request = |action| Message::Request {
            id: 0x0102_0304,
            action,
            port: (RdmaPortSpace::Udp, 7471),
        };
        let start = |addr: &str| Message::Start {
            version: VERSION,
            addr: addr.parse().unwrap(),
            listener: "/run/user/1000/x".into(),
        };
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        for message in [
            start("127.0.0.1"),
            start("2001:db8::1"),
            Message::Welcome {
                version: VERSION,
                slot: 31,
            },
            Message::Full,
            request(PortAction::Allocate),
            request(PortAction::Release),
            Message::Reply {
                id: 7,
                errno: libc::EADDRINUSE,
                port: 7471,
            },
            packet("127.0.0.1:9000"),
            packet("[2001:db8::1]:9000"),
            Message::Connection {
                id: CommId(9),
                dreq: Some(([127, 0, 0, 1].into(), [7; 256])),
            },
            Message::Connection {
                id: CommId(9),
                dreq: None,
            },
        ] {
            send(&ours, &message, &[ours.as_fd()]).unwrap();
            let mut descriptors = Vec::new();
            match receive(&theirs, &mut [0; MESSAGE], &mut descriptors) {
                Received::Message(received) => assert_eq!(received, message),
                other => panic!("{other:?}"),
            }
            assert_eq!(descriptors.len(), 1);
        }
    }

    #[test]
    fn messages_of_exited_peer_are_received() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        send(&theirs, &Message::Full, &[]).unwrap();
        send(&ours, &Message::Full, &[]).unwrap();
        drop(ours);
        let get = || receive(&theirs, &mut [0; MESSAGE], &mut Vec::new());
        assert!(matches!(get(), Received::Message(Message::Full)));
        assert!(matches!(get(), Received::Closed));
    }

    #[test]
    fn invalid_messages_are_ignored() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let get = || receive(&theirs, &mut [0; MESSAGE], &mut Vec::new());
        assert!(matches!(get(), Received::Nothing));
        for bytes in [&[99][..], &[REQUEST], &[REPLY, 1, 2], &[PACKET; 20]] {
            rustix::net::send(&ours, bytes, SendFlags::empty()).unwrap();
        }
        assert!(matches!(get(), Received::Nothing));
        drop(ours);
        assert!(matches!(get(), Received::Closed));
        assert_eq!(send(&theirs, &Message::Full, &[]), Err(Os::PIPE));
    }
}
