//! RDMA CM extensions to the IB CM (IBTA annex A11): service IDs that encode a port space and port,
//! and a 36-byte header with the IP addresses at the start of the private data in REQ and SIDR_REQ.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thiserror::Error;
use zerocopy::byteorder::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::cm_msg::ServiceId;

/// Header length in bytes.
pub const CMA_HEADER_LEN: usize = 36;

/// Port spaces of the RDMA CM. The value is used for bits 16 to 31 of the service ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RdmaPortSpace {
    /// Multicast and datagrams for IP over InfiniBand.
    IpoIb = 0x0002,
    /// RDMA_PS_TCP: port space for reliable connections.
    Tcp = 0x0106,
    /// RDMA_PS_UDP: port space for datagrams.
    Udp = 0x0111,
    /// InfiniBand service IDs, scoped to an address.
    Ib = 0x013f,
}

impl RdmaPortSpace {
    const ALL: [Self; 4] = [Self::IpoIb, Self::Tcp, Self::Udp, Self::Ib];

    /// Returns the service ID for a port.
    #[must_use]
    pub const fn service_id(self, port: u16) -> ServiceId {
        ServiceId((self as u64) << 16 | port as u64)
    }

    /// Returns the port space and port encoded in a service ID, if it is an RDMA CM service ID.
    #[must_use]
    pub fn of(service_id: ServiceId) -> Option<(Self, u16)> {
        let space = u16::try_from(service_id.0 >> 16).ok()?;
        let space = Self::ALL.into_iter().find(|known| *known as u16 == space)?;
        Some((space, (service_id.0 & 0xffff) as u16))
    }
}

/// Error returned when private data does not start with a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CmaError {
    /// The data is shorter than the header.
    #[error("private data too short for the address header: {len} bytes")]
    Length {
        /// Number of bytes available.
        len: usize,
    },
    /// The header version is not 0.
    #[error("unsupported address header version {version:#04x}")]
    Version {
        /// Version received, with the major version in the high nibble.
        version: u8,
    },
    /// The IP version is neither 4 nor 6.
    #[error("unsupported IP version {version} in the address header")]
    IpVersion {
        /// Version received.
        version: u8,
    },
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct CmaRaw {
    version: u8,
    ip_version: u8,
    port: U16,
    src: [u8; 16],
    dst: [u8; 16],
}

const _: () = assert!(size_of::<CmaRaw>() == CMA_HEADER_LEN);

/// Addresses and source port of a connection request. Both addresses always use the same address
/// family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmaHeader {
    /// Source port used by the requester.
    pub src_port: u16,
    /// Source and destination address.
    pub addrs: CmaAddrs,
}

/// Source and destination address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmaAddrs {
    /// IPv4 addresses.
    V4 {
        /// Requester address.
        src: Ipv4Addr,
        /// Address the request is sent to.
        dst: Ipv4Addr,
    },
    /// IPv6 addresses.
    V6 {
        /// Requester address.
        src: Ipv6Addr,
        /// Address the request is sent to.
        dst: Ipv6Addr,
    },
}

impl CmaAddrs {
    /// Creates an address pair, or returns `None` if the address families differ.
    #[must_use]
    pub fn new(src: IpAddr, dst: IpAddr) -> Option<Self> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(Self::V4 { src, dst }),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(Self::V6 { src, dst }),
            _ => None,
        }
    }

    /// Returns the requester address.
    #[must_use]
    pub fn src(&self) -> IpAddr {
        match *self {
            Self::V4 { src, .. } => src.into(),
            Self::V6 { src, .. } => src.into(),
        }
    }

    /// Returns the address the request is sent to.
    #[must_use]
    pub fn dst(&self) -> IpAddr {
        match *self {
            Self::V4 { dst, .. } => dst.into(),
            Self::V6 { dst, .. } => dst.into(),
        }
    }
}

/// Returns the IPv4 address stored in the last four bytes.
fn right_aligned(bytes: [u8; 16]) -> Ipv4Addr {
    let [.., a, b, c, d] = bytes;
    Ipv4Addr::new(a, b, c, d)
}

fn align_right(addr: Ipv4Addr) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[12..].copy_from_slice(&addr.octets());
    bytes
}

impl CmaHeader {
    /// Parses the header and returns it with the remaining private data, which belongs to the user.
    pub fn parse(private_data: &[u8]) -> Result<(Self, &[u8]), CmaError> {
        let error = CmaError::Length {
            len: private_data.len(),
        };
        let (raw, rest) = CmaRaw::read_from_prefix(private_data).map_err(|_| error)?;
        if raw.version != 0 {
            return Err(CmaError::Version {
                version: raw.version,
            });
        }
        // The low nibble is reserved and must be ignored.
        let addrs = match raw.ip_version >> 4 {
            4 => CmaAddrs::V4 {
                src: right_aligned(raw.src),
                dst: right_aligned(raw.dst),
            },
            6 => CmaAddrs::V6 {
                src: raw.src.into(),
                dst: raw.dst.into(),
            },
            version => return Err(CmaError::IpVersion { version }),
        };
        Ok((
            Self {
                src_port: raw.port.get(),
                addrs,
            },
            rest,
        ))
    }

    /// Returns the header in wire format.
    #[must_use]
    pub fn emit(&self) -> [u8; CMA_HEADER_LEN] {
        let (ip_version, src, dst) = match self.addrs {
            CmaAddrs::V4 { src, dst } => (0x40, align_right(src), align_right(dst)),
            CmaAddrs::V6 { src, dst } => (0x60, src.octets(), dst.octets()),
        };
        let raw = CmaRaw {
            version: 0,
            ip_version,
            port: U16::new(self.src_port),
            src,
            dst,
        };
        zerocopy::transmute!(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_ids_encode_port_space_and_port() {
        assert_eq!(
            RdmaPortSpace::Tcp.service_id(3260),
            ServiceId(0x0000_0000_0106_0cbc)
        );
        assert_eq!(
            RdmaPortSpace::of(ServiceId(0x0106_1c06)),
            Some((RdmaPortSpace::Tcp, 0x1c06))
        );
        assert_eq!(
            RdmaPortSpace::of(ServiceId(0x0111_0001)),
            Some((RdmaPortSpace::Udp, 1))
        );
        assert_eq!(RdmaPortSpace::of(ServiceId(0x0107_0001)), None);
        assert_eq!(RdmaPortSpace::of(ServiceId(0x1_0106_0001)), None);
    }

    #[test]
    fn address_header_matches_linux_layout() {
        let header = CmaHeader {
            src_port: 0x8d18,
            addrs: CmaAddrs::V4 {
                src: Ipv4Addr::new(10, 99, 0, 1),
                dst: Ipv4Addr::new(10, 99, 0, 2),
            },
        };
        let mut expected = [0u8; 36];
        expected[..4].copy_from_slice(&[0x00, 0x40, 0x8d, 0x18]);
        expected[16..20].copy_from_slice(&[10, 99, 0, 1]);
        expected[32..36].copy_from_slice(&[10, 99, 0, 2]);
        assert_eq!(header.emit(), expected);
        let mut data = expected.to_vec();
        data.push(9);
        assert_eq!(CmaHeader::parse(&data), Ok((header, &[9u8][..])));

        let addrs = CmaAddrs::new("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()).unwrap();
        let header = CmaHeader { src_port: 1, addrs };
        let bytes = header.emit();
        assert_eq!(
            (bytes[1], bytes[4], bytes[19], bytes[35]),
            (0x60, 0xfd, 1, 2)
        );
        assert_eq!(CmaHeader::parse(&bytes), Ok((header, &[][..])));
    }

    #[test]
    fn invalid_cma_headers_are_rejected() {
        assert_eq!(
            CmaHeader::parse(&[0; 35]),
            Err(CmaError::Length { len: 35 })
        );
        assert_eq!(
            CmaHeader::parse(&[0; 36]),
            Err(CmaError::IpVersion { version: 0 })
        );
        let mut bytes = [0; 36];
        bytes[0] = 0x10;
        assert_eq!(
            CmaHeader::parse(&bytes),
            Err(CmaError::Version { version: 0x10 })
        );
        assert_eq!(
            CmaAddrs::new("::1".parse().unwrap(), "1.1.1.1".parse().unwrap()),
            None
        );
    }
}
