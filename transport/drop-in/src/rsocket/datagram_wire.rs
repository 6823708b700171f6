//! What datagram sockets send each other, as rdma-core's do.
//!
//! A sender that does not know the receiver's queue pair sends its datagram to the receiver's UDP
//! port, behind a [`UdpHeader`]. The receiver answers with such a header, and from then on both
//! send from queue pair to queue pair, each datagram behind a [`Header`]. All is in network byte
//! order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use arrayvec::ArrayVec;
use riser_transport::verbs::{GRH_LEN, RouteHeader};

/// Marks a datagram of this protocol.
const TAG: u32 = 0x5555_5555;

/// Most bytes of a header.
pub(super) const MAX_HEADER: usize = 28;

/// Bytes of a header.
pub(super) type Bytes = ArrayVec<u8, MAX_HEADER>;

/// Meaning of a datagram that came by UDP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// A program's data follow.
    Data,
    /// The answer to data.
    Control,
}

/// Header of a datagram that goes by UDP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct UdpHeader {
    pub(super) op: Op,
    /// The sender's queue pair.
    pub(super) qpn: u32,
    /// The sender's address.
    pub(super) addr: IpAddr,
}

impl UdpHeader {
    /// The bytes that are sent.
    pub(super) fn encode(&self) -> Bytes {
        let mut bytes = Bytes::new();
        bytes.extend(TAG.to_be_bytes());
        let (version, length) = match self.addr {
            IpAddr::V4(_) => (4, 16),
            IpAddr::V6(_) => (6, 28),
        };
        let op = match self.op {
            Op::Data => 0,
            Op::Control => 7,
        };
        bytes.extend([version, op, length, 0]);
        bytes.extend(self.qpn.to_be_bytes());
        match self.addr {
            IpAddr::V4(addr) => bytes.extend(addr.octets()),
            IpAddr::V6(addr) => bytes.extend(addr.octets()),
        }
        bytes
    }

    /// The header of a datagram, and the data behind it. `None` for another protocol's.
    pub(super) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (tag, rest) = bytes.split_first_chunk()?;
        let ([version, op, length, _], rest) = rest.split_first_chunk()?;
        let (qpn, rest) = rest.split_first_chunk()?;
        let (addr, data) = match (version, length) {
            (4, 16) => v4(rest)?,
            (6, 28) => v6(rest)?,
            _ => return None,
        };
        let op = match op {
            0 => Op::Data,
            7 => Op::Control,
            _ => return None,
        };
        if u32::from_be_bytes(*tag) != TAG {
            return None;
        }
        let qpn = u32::from_be_bytes(*qpn) & 0xff_ffff;
        Some((Self { op, qpn, addr }, data))
    }
}

fn v4(bytes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (addr, rest) = bytes.split_first_chunk::<4>()?;
    Some((Ipv4Addr::from(*addr).into(), rest))
}

fn v6(bytes: &[u8]) -> Option<(IpAddr, &[u8])> {
    let (addr, rest) = bytes.split_first_chunk::<16>()?;
    Some((Ipv6Addr::from(*addr).into(), rest))
}

/// Header of a datagram that goes from queue pair to queue pair: its sender.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Header(pub(super) SocketAddr);

impl Header {
    /// The bytes that are sent.
    pub(super) fn encode(&self) -> Bytes {
        let mut bytes = Bytes::new();
        let port = self.0.port().to_be_bytes();
        match self.0 {
            SocketAddr::V4(addr) => {
                bytes.extend([4, 8]);
                bytes.extend(port);
                bytes.extend(addr.ip().octets());
            }
            SocketAddr::V6(addr) => {
                bytes.extend([6, 24]);
                bytes.extend(port);
                bytes.extend(addr.flowinfo().to_be_bytes());
                bytes.extend(addr.ip().octets());
            }
        }
        bytes
    }

    /// The header of a received datagram, which is behind its route header, and the data behind it.
    /// `None` for another protocol's, and where it names another host than the one that has sent it:
    /// our program would take a stranger for that host, and answer there.
    pub(super) fn decode_received(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (route, datagram) = bytes.split_first_chunk::<GRH_LEN>()?;
        let source = RouteHeader::parse(route).ok()?.source;
        let (header, data) = Self::decode(datagram)?;
        let said = header.0.ip();
        (said.to_canonical() == source.to_canonical()).then_some((header, data))
    }

    /// The header of a datagram, and the data behind it. `None` for another protocol's.
    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let ([version, length], rest) = bytes.split_first_chunk()?;
        let (port, rest) = rest.split_first_chunk()?;
        let (addr, data) = match (version, length) {
            (4, 8) => v4(rest)?,
            (6, 24) => v6(rest.get(4..)?)?,
            _ => return None,
        };
        Some((Self((addr, u16::from_be_bytes(*port)).into()), data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_headers_are_those_of_rdma_core() {
        let header = UdpHeader {
            op: Op::Data,
            qpn: 0x12_3456,
            addr: IpAddr::from([10, 0, 0, 7]),
        };
        let bytes = [
            0x55, 0x55, 0x55, 0x55, 4, 0, 16, 0, 0, 0x12, 0x34, 0x56, 10, 0, 0, 7,
        ];
        assert_eq!(header.encode()[..], bytes);
        let mut longer = bytes.to_vec();
        longer.extend(b"data");
        assert_eq!(UdpHeader::decode(&longer), Some((header, &b"data"[..])));
        let v6 = UdpHeader {
            op: Op::Control,
            addr: Ipv6Addr::LOCALHOST.into(),
            ..header
        };
        let encoded = v6.encode();
        assert_eq!((encoded.len(), encoded[5], encoded[6]), (28, 7, 28));
        assert_eq!(UdpHeader::decode(&encoded), Some((v6, &[][..])));
    }

    #[test]
    fn headers_are_those_of_rdma_core() {
        let header = Header(([10, 0, 0, 7], 0x1234).into());
        assert_eq!(header.encode()[..], [4, 8, 0x12, 0x34, 10, 0, 0, 7]);
        let v6 = Header((Ipv6Addr::LOCALHOST, 5).into());
        assert_eq!(v6.encode().len(), 24);
        for header in [header, v6] {
            let encoded = header.encode();
            assert_eq!(Header::decode(&encoded), Some((header, &[][..])));
        }
    }

    #[test]
    fn a_datagram_is_from_the_host_that_has_sent_it() {
        let received = |source: IpAddr, said: SocketAddr| {
            let route = RouteHeader {
                source,
                destination: source,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                identification: 0,
                payload_len: 64,
            };
            let mut bytes = route.to_bytes().to_vec();
            bytes.extend(Header(said).encode());
            bytes.extend(b"data");
            Header::decode_received(&bytes).map(|(header, data)| {
                assert_eq!(data, b"data");
                header
            })
        };
        let hosts = [
            IpAddr::from([10, 0, 0, 7]),
            IpAddr::from([10, 0, 0, 8]),
            Ipv6Addr::LOCALHOST.into(),
        ];
        for source in hosts {
            for said in hosts.map(|host| SocketAddr::new(host, 5)) {
                let is_true = source == said.ip();
                assert_eq!(received(source, said), is_true.then_some(Header(said)));
            }
        }
        assert_eq!(Header::decode_received(&[0; GRH_LEN + 8]), None);
        assert_eq!(Header::decode_received(&[0; GRH_LEN - 1]), None);
    }

    #[test]
    fn headers_that_are_cut_or_altered_are_refused() {
        let udp = UdpHeader {
            op: Op::Data,
            qpn: 1,
            addr: Ipv6Addr::LOCALHOST.into(),
        };
        let bytes = udp.encode();
        for length in 0..bytes.len() {
            assert_eq!(UdpHeader::decode(&bytes[..length]), None);
        }
        for at in [0, 4, 5, 6] {
            let mut altered = bytes.clone();
            altered[at] ^= 0x10;
            assert_eq!(UdpHeader::decode(&altered), None);
        }
        let bytes = Header((Ipv6Addr::LOCALHOST, 5).into()).encode();
        for length in 0..bytes.len() {
            assert_eq!(Header::decode(&bytes[..length]), None);
        }
    }
}
