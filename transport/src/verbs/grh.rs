//! The 40 bytes preceding a received datagram, used to determine the address of its sender (IBTA
//! 11.4.2.1, annex A17.4.5).
//!
//! ```text
//!            0        20        40
//! IPv6       [ IPv6 header      ]
//! IPv4       [ zero  ][ IPv4 h. ]
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{AhAttr, Gid, VerbsError};

/// Number of bytes preceding the payload of a received datagram.
pub const GRH_LEN: usize = 40;

/// Offset of the IPv4 header, which is stored at the end.
const IPV4_AT: usize = 20;

const PROTOCOL_UDP: u8 = 17;
/// IP version 4, and a header of five words.
const IPV4_PLAIN: u8 = 0x45;
const DO_NOT_FRAGMENT: u8 = 0x40;

/// Type of the header preceding a received datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetworkHeader {
    /// RoCEv2 IPv4 header, stored in the last 20 bytes.
    Ipv4,
    /// RoCEv2 IPv6 header.
    Ipv6,
}

/// Fields from the IP header of a received datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteHeader {
    /// Sender address.
    pub source: IpAddr,
    /// Destination address of the same family: either our address or a multicast group.
    pub destination: IpAddr,
    /// Traffic class or type of service: DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label, 20 bits. Set to 0 for IPv4.
    pub flow_label: u32,
    /// Hop limit or time to live, as received.
    pub hop_limit: u8,
    /// Identification. Set to 0 for IPv6.
    pub identification: u16,
    /// Number of bytes following the IP header: UDP header, transport headers, payload, padding and
    /// ICRC.
    pub payload_len: u16,
}

impl RouteHeader {
    /// Returns the header type.
    #[must_use]
    pub fn network(&self) -> NetworkHeader {
        match self.source {
            IpAddr::V4(_) => NetworkHeader::Ipv4,
            IpAddr::V6(_) => NetworkHeader::Ipv6,
        }
    }

    /// Returns the header as stored before the payload. An adapter or `rdma_rxe` copies this from
    /// the packet. The checksum is set for an IPv4 header.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; GRH_LEN] {
        let mut h = [0; GRH_LEN];
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip = &mut h[IPV4_AT..];
                let total = self.payload_len.saturating_add(20);
                ip[0] = IPV4_PLAIN;
                ip[1] = self.traffic_class;
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
                ip[6] = DO_NOT_FRAGMENT;
                ip[8] = self.hop_limit;
                ip[9] = PROTOCOL_UDP;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..].copy_from_slice(&destination.octets());
                let sum = ipv4_checksum(ip);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            (source, destination) => {
                let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label;
                h[..4].copy_from_slice(&first.to_be_bytes());
                h[4..6].copy_from_slice(&self.payload_len.to_be_bytes());
                h[6] = PROTOCOL_UDP;
                h[7] = self.hop_limit;
                h[8..24].copy_from_slice(&Gid::from(source).0);
                h[24..].copy_from_slice(&Gid::from(destination).0);
            }
        }
        h
    }

    /// Parses the bytes preceding a received datagram.
    ///
    /// # Errors
    /// Returns [`VerbsError::InvalidParameter`] if this is not an IP header or the protocol is not
    /// UDP.
    pub fn parse(grh: &[u8; GRH_LEN]) -> Result<Self, VerbsError> {
        let ip = &grh[IPV4_AT..];
        // If the adapter doesn't write the bytes before an IPv4 header, they contain old data from
        // the receive buffer. We therefore accept any IPv4 header with a valid checksum (same as
        // rdma-core).
        let is_v6 = grh[0] >> 4 == 6 && !(ip[0] == IPV4_PLAIN && ipv4_checksum(ip) == 0);
        let header = if is_v6 {
            let first = u32::from_be_bytes([grh[0], grh[1], grh[2], grh[3]]);
            let address =
                |at| Ipv6Addr::from(<[u8; 16]>::try_from(&grh[at..at + 16]).unwrap_or_default());
            (grh[6] == PROTOCOL_UDP).then(|| Self {
                source: address(8).into(),
                destination: address(24).into(),
                traffic_class: (first >> 20) as u8,
                flow_label: first & 0x000f_ffff,
                hop_limit: grh[7],
                identification: 0,
                payload_len: u16::from_be_bytes([grh[4], grh[5]]),
            })
        } else {
            let address = |at| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
            (ip[0] == IPV4_PLAIN && ip[9] == PROTOCOL_UDP).then(|| Self {
                source: address(12).into(),
                destination: address(16).into(),
                traffic_class: ip[1],
                flow_label: 0,
                hop_limit: ip[8],
                identification: u16::from_be_bytes([ip[4], ip[5]]),
                payload_len: u16::from_be_bytes([ip[2], ip[3]]).saturating_sub(20),
            })
        };
        header.ok_or(VerbsError::InvalidParameter("route header"))
    }
}

/// Returns the checksum to use for an IPv4 header with the checksum field set to zero, or 0 if the
/// header already contains a valid checksum.
fn ipv4_checksum(header: &[u8]) -> u16 {
    let words = header
        .chunks_exact(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// Creates address handle attributes for sending to the source of a datagram, using the same
/// traffic class, flow label and hop limit. `gid_index` is used to look up the destination address
/// of the datagram in the GID table of `port`.
///
/// # Errors
/// Returns [`VerbsError::InvalidParameter`] if the header is invalid, or if the datagram was sent
/// to a multicast group or a different address that is not ours.
pub(super) fn way_back(
    port: u8,
    grh: &[u8; GRH_LEN],
    gid_index: impl FnOnce(Gid) -> Option<u16>,
) -> Result<AhAttr, VerbsError> {
    let header = RouteHeader::parse(grh)?;
    let sgid_index = gid_index(header.destination.into()).ok_or(VerbsError::InvalidParameter(
        "destination address of the datagram",
    ))?;
    Ok(AhAttr {
        sgid_index,
        hop_limit: header.hop_limit,
        traffic_class: header.traffic_class,
        flow_label: header.flow_label,
        port,
        ..AhAttr::new(header.source.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10.0.0.1 to 10.0.0.2, identification 0x1c46, time to live 64 (RFC 791 3.1).
    const IPV4: [u8; 20] = [
        0x45, 0x02, 0x01, 0x30, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x11, 0x09, 0x73, 0x0a, 0x00, 0x00,
        0x01, 0x0a, 0x00, 0x00, 0x02,
    ];

    fn v4() -> RouteHeader {
        RouteHeader {
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            traffic_class: 2,
            flow_label: 0,
            hop_limit: 64,
            identification: 0x1c46,
            payload_len: 0x130 - 20,
        }
    }

    fn v6() -> RouteHeader {
        RouteHeader {
            source: "2001:db8::1".parse().unwrap(),
            destination: "2001:db8::2".parse().unwrap(),
            traffic_class: 0xb8,
            flow_label: 0xabcde,
            hop_limit: 63,
            identification: 0,
            payload_len: 0x11c,
        }
    }

    const IPV6: [u8; 40] = [
        0x6b, 0x8a, 0xbc, 0xde, 0x01, 0x1c, 0x11, 0x3f, 0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 1, 0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
    ];

    #[test]
    fn ipv4_header_uses_last_20_bytes() {
        let bytes = v4().to_bytes();
        assert_eq!(bytes[..20], [0; 20]);
        assert_eq!(bytes[20..], IPV4);
        assert_eq!(RouteHeader::parse(&bytes), Ok(v4()));
        assert_eq!(v4().network(), NetworkHeader::Ipv4);
    }

    #[test]
    fn ipv6_header_uses_40_bytes() {
        assert_eq!(v6().to_bytes(), IPV6);
        assert_eq!(RouteHeader::parse(&IPV6), Ok(v6()));
        assert_eq!(v6().network(), NetworkHeader::Ipv6);
    }

    #[test]
    fn ipv4_header_is_detected_by_checksum() {
        let mut bytes = [0x60; 40];
        bytes[20..].copy_from_slice(&IPV4);
        assert_eq!(RouteHeader::parse(&bytes), Ok(v4()));
        bytes[28] ^= 1;
        assert!(RouteHeader::parse(&bytes).is_err());
    }

    #[test]
    fn invalid_route_headers_are_rejected() {
        assert!(RouteHeader::parse(&[0; 40]).is_err());
        let mut tcp = IPV6;
        tcp[6] = 6;
        assert!(RouteHeader::parse(&tcp).is_err());
    }

    #[test]
    fn return_path_swaps_addresses() {
        let (a, b) = (v6().source, v6().destination);
        let own = |gid| (gid == Gid::from(b)).then_some(3);
        let attr = way_back(1, &IPV6, own).unwrap();
        assert_eq!((attr.dgid, attr.sgid_index, attr.port), (a.into(), 3, 1));
        assert_eq!(
            (attr.traffic_class, attr.flow_label, attr.hop_limit),
            (0xb8, 0xabcde, 63)
        );
        assert!(way_back(1, &IPV6, |_| None).is_err());
    }
}
