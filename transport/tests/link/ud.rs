//! All headers of an unreliable datagram, starting at the link layer, as sent by queue pair 0 or 1
//! without an underlying network stack or as stored in a packet capture (IBTA 7.7, 8.3, 9.2;
//! annexes A16 and A17).
//!
//! ```text
//! InfiniBand   LRH [GRH]               BTH DETH [ImmDt]
//! RoCE         Ethernet [VLAN] GRH     BTH DETH [ImmDt]
//! RoCEv2       Ethernet [VLAN] IP UDP  BTH DETH [ImmDt]
//! ```
//!
//! [`UdHeader::pack`] sets lengths, types and checksums based on the available headers and the
//! payload size. [`UdHeader::unpack`] returns an error if these fields don't match each other or
//! the received size. The headers up to UDP of the software NIC's packets are created by its
//! socket: this module is the model with which the frames on a link are compared.

use std::net::{Ipv4Addr, Ipv6Addr};

use arrayvec::ArrayVec;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use riser_transport::wire::{Bth, Deth, ICRC_LEN, ImmDt, Opcode, ROCE_PORT, pad_len};

const LRH_LEN: usize = 8;
const ETHERNET_LEN: usize = 14;
const VLAN_LEN: usize = 4;
const GRH_LEN: usize = 40;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const DETH_LEN: usize = 8;
const IMM_LEN: usize = 4;

/// Maximum size of the datagram headers in bytes.
pub(super) const MAX_UD_HEADER_LEN: usize =
    ETHERNET_LEN + VLAN_LEN + GRH_LEN + UDP_LEN + Bth::LEN + DETH_LEN + IMM_LEN;

/// Buffer for the headers of a datagram.
pub(super) type UdHeaderBuf = ArrayVec<u8, MAX_UD_HEADER_LEN>;

/// LRH next header value for a BTH, optionally after a GRH (IBTA 7.7.5).
const LNH_BTH: u8 = 2;
const LNH_GRH: u8 = 3;
/// GRH next header value for a BTH (IBTA 8.3.4).
const NEXT_BTH: u8 = 0x1b;
const NEXT_UDP: u8 = 17;
const TYPE_IPV4: u16 = 0x0800;
const TYPE_VLAN: u16 = 0x8100;
const TYPE_IPV6: u16 = 0x86dd;
/// EtherType for RoCE version 1 (annex A16).
const TYPE_ROCE: u16 = 0x8915;
const IPV4_PLAIN: u8 = 0x45;
const DO_NOT_FRAGMENT: u16 = 0x4000;
const LID_LENGTH_MASK: u16 = 0x07ff;

/// Error returned if datagram headers can't be parsed or created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum UdHeaderError {
    /// The data is truncated within a header or before the ICRC.
    #[error("datagram truncated at {len} bytes")]
    Short {
        /// Number of bytes received.
        len: usize,
    },
    /// Unsupported next header value.
    #[error("{header}: unexpected next header {value:#06x}")]
    Next {
        /// Header name.
        header: &'static str,
        /// Field value.
        value: u16,
    },
    /// A field has an invalid value for a datagram.
    #[error("{header}: unexpected {field}")]
    Field {
        /// Header name.
        header: &'static str,
        /// Field name.
        field: &'static str,
    },
    /// A length field does not match the available data.
    #[error("{header}: invalid length {said}, {len} bytes available")]
    Length {
        /// Header name.
        header: &'static str,
        /// Length in bytes according to the field.
        said: usize,
        /// Expected length in bytes.
        len: usize,
    },
    /// The payload exceeds a length field, or the layers are incompatible.
    #[error("{0}")]
    Unwritable(&'static str),
}

/// InfiniBand local route header, without fields that depend on the rest of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lrh {
    /// Virtual lane, 4 bits.
    pub(super) virtual_lane: u8,
    /// Service level, 4 bits.
    pub(super) service_level: u8,
    /// Destination LID.
    pub(super) destination: u16,
    /// Source LID.
    pub(super) source: u16,
}

/// Ethernet header, without the EtherType.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ethernet {
    /// Destination address.
    pub(super) destination: [u8; 6],
    /// Source address.
    pub(super) source: [u8; 6],
    /// VLAN tag control information: priority, drop eligibility and VLAN ID.
    pub(super) vlan: Option<u16>,
}

/// Link layer header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkHeader {
    /// InfiniBand.
    Lrh(Lrh),
    /// RoCE.
    Ethernet(Ethernet),
}

/// Link type, which determines how the first header is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkKind {
    /// InfiniBand: the data starts with an LRH.
    InfiniBand,
    /// Ethernet.
    Ethernet,
}

/// Fields in a GRH or IPv6 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GlobalRoute {
    /// Traffic class.
    pub(super) traffic_class: u8,
    /// Flow label, 20 bits.
    pub(super) flow_label: u32,
    /// Hop limit.
    pub(super) hop_limit: u8,
    /// Source GID.
    pub(super) source: Ipv6Addr,
    /// Destination GID.
    pub(super) destination: Ipv6Addr,
}

/// Fields in an IPv4 header without options. The packet must not be fragmented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ipv4Route {
    /// Type of service.
    pub(super) tos: u8,
    /// Identification.
    pub(super) identification: u16,
    /// Time to live.
    pub(super) ttl: u8,
    /// Source address.
    pub(super) source: Ipv4Addr,
    /// Destination address.
    pub(super) destination: Ipv4Addr,
}

/// Network layer header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetworkLayer {
    /// No network header, used within an InfiniBand subnet.
    Local,
    /// GRH, used by InfiniBand and by RoCE version 1.
    Grh(GlobalRoute),
    /// IPv4 and UDP, with the UDP source port. The UDP checksum is set to 0, which disables it.
    Ipv4(Ipv4Route, u16),
    /// IPv6 and UDP, with the UDP source port.
    Ipv6(GlobalRoute, u16),
}

/// All headers of an unreliable datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UdHeader {
    /// Link header.
    pub(super) link: LinkHeader,
    /// Network headers.
    pub(super) network: NetworkLayer,
    /// Base transport header. The opcode and pad count are updated as required.
    pub(super) bth: Bth,
    /// Datagram extended transport header.
    pub(super) deth: Deth,
    /// Immediate data.
    pub(super) imm: Option<ImmDt>,
}

fn append(out: &mut UdHeaderBuf, bytes: &[u8]) {
    out.try_extend_from_slice(bytes)
        .expect("the longest header fits");
}

fn read_header<T: FromBytes + Immutable + KnownLayout>(rest: &mut &[u8]) -> Option<T> {
    let (value, after) = T::read_from_prefix(rest).ok()?;
    *rest = after;
    Some(value)
}

/// Returns the checksum to use for an IPv4 header with the checksum field set to zero, or 0 if the
/// header already contains a valid checksum.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let [_, _, high, low] = ((sum & 0xffff) + (sum >> 16)).to_be_bytes();
    !u16::from_be_bytes([high, low])
}

impl UdHeader {
    /// Returns the number of bytes from the BTH to the end of the ICRC.
    fn transport_len(&self, payload_len: usize) -> usize {
        let imm = self.imm.map_or(0, |_| IMM_LEN);
        Bth::LEN + DETH_LEN + imm + payload_len + pad_len(payload_len) + ICRC_LEN
    }

    /// Writes the headers for a datagram with `payload_len` bytes of payload. The caller must
    /// append the payload, its padding and the ICRC.
    ///
    /// # Errors
    /// Returns [`UdHeaderError::Unwritable`] if the payload exceeds a length field, if a value
    /// exceeds its field, or if the link does not support these layers.
    pub(super) fn pack(&self, payload_len: usize) -> Result<UdHeaderBuf, UdHeaderError> {
        use UdHeaderError::Unwritable;
        let transport = self.transport_len(payload_len);
        let transport =
            u16::try_from(transport).map_err(|_| Unwritable("the payload is too long"))?;
        let mut out = UdHeaderBuf::new();
        self.put_link(&mut out, transport)?;
        match &self.network {
            NetworkLayer::Local => {}
            NetworkLayer::Grh(route) => put_global(&mut out, route, NEXT_BTH, transport)?,
            NetworkLayer::Ipv6(route, port) => {
                let len = checked(transport, UDP_LEN)?;
                put_global(&mut out, route, NEXT_UDP, len)?;
                put_udp(&mut out, *port, len);
            }
            NetworkLayer::Ipv4(route, port) => {
                let len = checked(transport, UDP_LEN)?;
                put_ipv4(&mut out, route, checked(len, IPV4_LEN)?);
                put_udp(&mut out, *port, len);
            }
        }
        let opcode = match self.imm {
            Some(_) => Opcode::UdSendOnlyImm,
            None => Opcode::UdSendOnly,
        };
        let bth = self.bth.with_opcode(opcode).with_pad_for(payload_len);
        append(&mut out, bth.as_bytes());
        append(&mut out, self.deth.as_bytes());
        if let Some(imm) = &self.imm {
            append(&mut out, imm.as_bytes());
        }
        Ok(out)
    }

    fn put_link(&self, out: &mut UdHeaderBuf, transport: u16) -> Result<(), UdHeaderError> {
        use UdHeaderError::Unwritable;
        match &self.link {
            LinkHeader::Lrh(lrh) => {
                let (next, grh) = match self.network {
                    NetworkLayer::Local => (LNH_BTH, 0),
                    NetworkLayer::Grh(_) => (LNH_GRH, GRH_LEN),
                    _ => return Err(Unwritable("InfiniBand carries no IP header")),
                };
                if lrh.virtual_lane > 15 || lrh.service_level > 15 {
                    return Err(Unwritable(
                        "virtual lane or service level of more than 4 bits",
                    ));
                }
                // Number of four-byte words from the LRH up to the ICRC.
                let words = checked(transport, LRH_LEN + grh)? / 4;
                if words > LID_LENGTH_MASK {
                    return Err(Unwritable("the payload is too long"));
                }
                append(out, &[lrh.virtual_lane << 4, lrh.service_level << 4 | next]);
                append(out, &lrh.destination.to_be_bytes());
                append(out, &words.to_be_bytes());
                append(out, &lrh.source.to_be_bytes());
            }
            LinkHeader::Ethernet(ethernet) => {
                let kind = match self.network {
                    NetworkLayer::Local => return Err(Unwritable("Ethernet carries no bare BTH")),
                    NetworkLayer::Grh(_) => TYPE_ROCE,
                    NetworkLayer::Ipv4(..) => TYPE_IPV4,
                    NetworkLayer::Ipv6(..) => TYPE_IPV6,
                };
                append(out, &ethernet.destination);
                append(out, &ethernet.source);
                if let Some(vlan) = ethernet.vlan {
                    append(out, &TYPE_VLAN.to_be_bytes());
                    append(out, &vlan.to_be_bytes());
                }
                append(out, &kind.to_be_bytes());
            }
        }
        Ok(())
    }

    /// Parses a packet from the link header to the ICRC, and returns the headers and the payload.
    /// Any data beyond the packet length, such as the padding of a short Ethernet frame, is
    /// ignored.
    ///
    /// # Errors
    /// See [`UdHeaderError`].
    pub(super) fn unpack(kind: LinkKind, bytes: &[u8]) -> Result<(Self, &[u8]), UdHeaderError> {
        let short = UdHeaderError::Short { len: bytes.len() };
        let mut rest = bytes;
        let (link, network) = match kind {
            LinkKind::InfiniBand => take_infiniband(&mut rest, short)?,
            LinkKind::Ethernet => take_ethernet(&mut rest, short)?,
        };
        let bth: Bth = read_header(&mut rest).ok_or(short)?;
        let has_imm = match bth.raw_opcode() {
            code if code == Opcode::UdSendOnly as u8 => false,
            code if code == Opcode::UdSendOnlyImm as u8 => true,
            code => {
                return Err(UdHeaderError::Next {
                    header: "BTH",
                    value: code.into(),
                });
            }
        };
        if bth.version() != 0 {
            return Err(UdHeaderError::Field {
                header: "BTH",
                field: "version",
            });
        }
        let deth = read_header(&mut rest).ok_or(short)?;
        let imm = match has_imm {
            true => Some(read_header(&mut rest).ok_or(short)?),
            false => None,
        };
        // The pad count is provided by the sender and can exceed the available data.
        let payload_len = rest.len().checked_sub(ICRC_LEN + bth.pad()).ok_or(short)?;
        let header = Self {
            link,
            network,
            bth,
            deth,
            imm,
        };
        Ok((header, &rest[..payload_len]))
    }
}

fn checked(len: u16, more: usize) -> Result<u16, UdHeaderError> {
    u16::try_from(usize::from(len) + more)
        .map_err(|_| UdHeaderError::Unwritable("the payload is too long"))
}

fn put_global(
    out: &mut UdHeaderBuf,
    route: &GlobalRoute,
    next: u8,
    len: u16,
) -> Result<(), UdHeaderError> {
    if route.flow_label > 0x000f_ffff {
        return Err(UdHeaderError::Unwritable("flow label of more than 20 bits"));
    }
    let first = 6 << 28 | u32::from(route.traffic_class) << 20 | route.flow_label;
    append(out, &first.to_be_bytes());
    append(out, &len.to_be_bytes());
    append(out, &[next, route.hop_limit]);
    append(out, &route.source.octets());
    append(out, &route.destination.octets());
    Ok(())
}

fn put_ipv4(out: &mut UdHeaderBuf, route: &Ipv4Route, total: u16) {
    let mut h = [0; IPV4_LEN];
    h[0] = IPV4_PLAIN;
    h[1] = route.tos;
    h[2..4].copy_from_slice(&total.to_be_bytes());
    h[4..6].copy_from_slice(&route.identification.to_be_bytes());
    h[6..8].copy_from_slice(&DO_NOT_FRAGMENT.to_be_bytes());
    h[8] = route.ttl;
    h[9] = NEXT_UDP;
    h[12..16].copy_from_slice(&route.source.octets());
    h[16..].copy_from_slice(&route.destination.octets());
    let sum = checksum(&h);
    h[10..12].copy_from_slice(&sum.to_be_bytes());
    append(out, &h);
}

fn put_udp(out: &mut UdHeaderBuf, port: u16, len: u16) {
    for field in [port, ROCE_PORT, len, 0] {
        append(out, &field.to_be_bytes());
    }
}

type Layers = (LinkHeader, NetworkLayer);

/// Truncates the data to the value of a length field. The data can be longer because links pad
/// short packets.
fn cut(rest: &mut &[u8], header: &'static str, said: usize) -> Result<(), UdHeaderError> {
    let whole = *rest;
    *rest = whole.get(..said).ok_or(UdHeaderError::Length {
        header,
        said,
        len: whole.len(),
    })?;
    Ok(())
}

fn word(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn take_infiniband(rest: &mut &[u8], short: UdHeaderError) -> Result<Layers, UdHeaderError> {
    let h: [u8; LRH_LEN] = read_header(rest).ok_or(short)?;
    if h[0] & 0x0f != 0 {
        return Err(UdHeaderError::Field {
            header: "LRH",
            field: "link version",
        });
    }
    let said = usize::from(word(&h[4..]) & LID_LENGTH_MASK) * 4;
    let after = said.checked_sub(LRH_LEN).ok_or(short)?;
    cut(rest, "LRH", after)?;
    let network = match h[1] & 0b11 {
        LNH_BTH => NetworkLayer::Local,
        LNH_GRH => NetworkLayer::Grh(take_global(rest, "GRH", NEXT_BTH, short)?),
        next => {
            return Err(UdHeaderError::Next {
                header: "LRH",
                value: next.into(),
            });
        }
    };
    let lrh = Lrh {
        virtual_lane: h[0] >> 4,
        service_level: h[1] >> 4,
        destination: word(&h[2..]),
        source: word(&h[6..]),
    };
    Ok((LinkHeader::Lrh(lrh), network))
}

fn take_ethernet(rest: &mut &[u8], short: UdHeaderError) -> Result<Layers, UdHeaderError> {
    let destination = read_header(rest).ok_or(short)?;
    let source = read_header(rest).ok_or(short)?;
    let next = |rest: &mut &[u8]| Some(word(&read_header::<[u8; 2]>(rest)?));
    let mut kind = next(rest).ok_or(short)?;
    let mut vlan = None;
    if kind == TYPE_VLAN {
        vlan = Some(next(rest).ok_or(short)?);
        kind = next(rest).ok_or(short)?;
    }
    let network = match kind {
        TYPE_ROCE => NetworkLayer::Grh(take_global(rest, "GRH", NEXT_BTH, short)?),
        TYPE_IPV6 => {
            let route = take_global(rest, "IPv6", NEXT_UDP, short)?;
            NetworkLayer::Ipv6(route, take_udp(rest, short)?)
        }
        TYPE_IPV4 => {
            let route = take_ipv4(rest, short)?;
            NetworkLayer::Ipv4(route, take_udp(rest, short)?)
        }
        value => {
            return Err(UdHeaderError::Next {
                header: "Ethernet",
                value,
            });
        }
    };
    let ethernet = Ethernet {
        destination,
        source,
        vlan,
    };
    Ok((LinkHeader::Ethernet(ethernet), network))
}

fn take_global(
    rest: &mut &[u8],
    header: &'static str,
    next: u8,
    short: UdHeaderError,
) -> Result<GlobalRoute, UdHeaderError> {
    let h: [u8; GRH_LEN] = read_header(rest).ok_or(short)?;
    let first = u32::from_be_bytes([h[0], h[1], h[2], h[3]]);
    if first >> 28 != 6 {
        return Err(UdHeaderError::Field {
            header,
            field: "version",
        });
    }
    if h[6] != next {
        return Err(UdHeaderError::Next {
            header,
            value: h[6].into(),
        });
    }
    cut(rest, header, word(&h[4..]).into())?;
    let address = |at: usize| {
        let bytes: [u8; 16] = h[at..at + 16].try_into().expect("sixteen bytes");
        Ipv6Addr::from(bytes)
    };
    let [_, class, ..] = (first << 4 >> 8).to_be_bytes();
    Ok(GlobalRoute {
        traffic_class: class,
        flow_label: first & 0x000f_ffff,
        hop_limit: h[7],
        source: address(8),
        destination: address(24),
    })
}

fn take_ipv4(rest: &mut &[u8], short: UdHeaderError) -> Result<Ipv4Route, UdHeaderError> {
    let h: [u8; IPV4_LEN] = read_header(rest).ok_or(short)?;
    let wrong = |field| {
        Err(UdHeaderError::Field {
            header: "IPv4",
            field,
        })
    };
    if h[0] != IPV4_PLAIN {
        return wrong("version or options");
    }
    if checksum(&h) != 0 {
        return wrong("checksum");
    }
    // A packet without the "don't fragment" bit is still complete if the offset is zero and no more
    // fragments follow.
    if word(&h[6..]) & !DO_NOT_FRAGMENT != 0 {
        return wrong("fragment");
    }
    if h[9] != NEXT_UDP {
        return Err(UdHeaderError::Next {
            header: "IPv4",
            value: h[9].into(),
        });
    }
    let after = usize::from(word(&h[2..])).checked_sub(IPV4_LEN);
    cut(rest, "IPv4", after.ok_or(short)?)?;
    let address = |at: usize| Ipv4Addr::new(h[at], h[at + 1], h[at + 2], h[at + 3]);
    Ok(Ipv4Route {
        tos: h[1],
        identification: word(&h[4..]),
        ttl: h[8],
        source: address(12),
        destination: address(16),
    })
}

/// Returns the source port. The checksum is not verified, as the ICRC covers more data.
fn take_udp(rest: &mut &[u8], short: UdHeaderError) -> Result<u16, UdHeaderError> {
    let h: [u8; UDP_LEN] = read_header(rest).ok_or(short)?;
    if word(&h[2..]) != ROCE_PORT {
        return Err(UdHeaderError::Next {
            header: "UDP",
            value: word(&h[2..]),
        });
    }
    let said = usize::from(word(&h[4..])).checked_sub(UDP_LEN);
    let said = said.ok_or(short)?;
    if said != rest.len() {
        return Err(UdHeaderError::Length {
            header: "UDP",
            said,
            len: rest.len(),
        });
    }
    Ok(word(&h))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use riser_transport::wire::{Psn, Qpn};

    use super::*;

    /// Headers of a MAD sent by a Linux 6.12 kernel (`rdma_rxe`), from a packet capture.
    const OF_LINUX: [u8; 62] = [
        0x52, 0x54, 0x00, 0x00, 0x00, 0x01, 0x52, 0x54, 0x00, 0x00, 0x00, 0x02, 0x08, 0x00, 0x45,
        0x00, 0x01, 0x34, 0x06, 0xd5, 0x40, 0x00, 0x40, 0x11, 0x1c, 0x1c, 0x0a, 0x63, 0x01, 0x02,
        0x0a, 0x63, 0x01, 0x01, 0xd8, 0x72, 0x12, 0xb7, 0x01, 0x20, 0x00, 0x00, 0x64, 0x00, 0xff,
        0xff, 0x00, 0x00, 0x00, 0x01, 0x80, 0x00, 0x00, 0x00, 0x80, 0x01, 0x00, 0x00, 0x00, 0x00,
        0x00, 0x01,
    ];

    fn ethernet(vlan: Option<u16>) -> LinkHeader {
        LinkHeader::Ethernet(Ethernet {
            destination: [0x52, 0x54, 0, 0, 0, 1],
            source: [0x52, 0x54, 0, 0, 0, 2],
            vlan,
        })
    }

    fn global() -> GlobalRoute {
        GlobalRoute {
            traffic_class: 0xb8,
            flow_label: 0xabcde,
            hop_limit: 63,
            source: "fd99::1".parse().unwrap(),
            destination: "fd99::2".parse().unwrap(),
        }
    }

    fn header(link: LinkHeader, network: NetworkLayer) -> UdHeader {
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
        UdHeader {
            link,
            network,
            bth: bth.with_migrated(false).with_ack_request(true),
            deth: Deth::new(0x8001_0000, Qpn::GSI),
            imm: None,
        }
    }

    fn of_linux() -> UdHeader {
        let route = Ipv4Route {
            tos: 0,
            identification: 0x06d5,
            ttl: 64,
            source: Ipv4Addr::new(10, 99, 1, 2),
            destination: Ipv4Addr::new(10, 99, 1, 1),
        };
        header(ethernet(None), NetworkLayer::Ipv4(route, 0xd872))
    }

    fn lrh() -> LinkHeader {
        LinkHeader::Lrh(Lrh {
            virtual_lane: 1,
            service_level: 2,
            destination: 0x0003,
            source: 0x0004,
        })
    }

    /// Creates a complete packet with `len` bytes of payload.
    fn packet(header: &UdHeader, len: usize) -> Vec<u8> {
        let mut bytes = header.pack(len).unwrap().to_vec();
        bytes.extend((0..len).map(|n| n as u8));
        bytes.resize(bytes.len() + pad_len(len) + ICRC_LEN, 0);
        bytes
    }

    #[test]
    fn ud_headers_match_linux_mad() {
        assert_eq!(of_linux().pack(256).unwrap()[..], OF_LINUX);
        let mut bytes = OF_LINUX.to_vec();
        bytes.resize(OF_LINUX.len() + 256 + ICRC_LEN, 7);
        let (read, payload) = UdHeader::unpack(LinkKind::Ethernet, &bytes).unwrap();
        assert_eq!((read, payload), (of_linux(), &[7; 256][..]));
    }

    #[test]
    fn infiniband_length_includes_lrh() {
        let local = header(lrh(), NetworkLayer::Local).pack(256).unwrap();
        // IBTA 7.7: lane and version, level and next header, LIDs, 72 words.
        assert_eq!(local[..8], [0x10, 0x22, 0, 3, 0, 72, 0, 4]);
        assert_eq!(local[8..12], [0x64, 0, 0xff, 0xff]);
        let grh = header(lrh(), NetworkLayer::Grh(global()))
            .pack(256)
            .unwrap();
        assert_eq!(grh[..8], [0x10, 0x23, 0, 3, 0, 82, 0, 4]);
        // IBTA 8.3: version, class and label, 280 bytes of payload, BTH as next header, hop limit.
        assert_eq!(grh[8..16], [0x6b, 0x8a, 0xbc, 0xde, 0x01, 0x18, 0x1b, 63]);
        assert_eq!((grh[16], grh[31], grh[32], grh[47]), (0xfd, 1, 0xfd, 2));
    }

    #[test]
    fn ethertype_follows_vlan_tag() {
        let tagged = header(ethernet(Some(0x6005)), NetworkLayer::Grh(global()));
        let tagged = tagged.pack(0).unwrap();
        assert_eq!(tagged[12..18], [0x81, 0x00, 0x60, 0x05, 0x89, 0x15]);
        let v6 = header(ethernet(None), NetworkLayer::Ipv6(global(), 0xc000));
        let v6 = v6.pack(1).unwrap();
        assert_eq!(v6[12..14], [0x86, 0xdd]);
        // 28 bytes for BTH, DETH, padded payload and ICRC, plus 8 bytes for UDP.
        assert_eq!(v6[18..22], [0, 36, 17, 63]);
        assert_eq!(v6[54..62], [0xc0, 0, 0x12, 0xb7, 0, 36, 0, 0]);
        assert_eq!(v6[63] & 0x30, 0x30, "three bytes of padding");
    }

    fn all() -> Vec<(LinkKind, UdHeader)> {
        let mut imm = header(ethernet(Some(7)), NetworkLayer::Ipv6(global(), 0xc001));
        imm.bth = imm.bth.with_opcode(Opcode::UdSendOnlyImm);
        imm.imm = Some(ImmDt::new(0x0102_0304));
        vec![
            (LinkKind::Ethernet, of_linux()),
            (LinkKind::Ethernet, imm),
            (
                LinkKind::Ethernet,
                header(ethernet(None), NetworkLayer::Grh(global())),
            ),
            (LinkKind::InfiniBand, header(lrh(), NetworkLayer::Local)),
            (
                LinkKind::InfiniBand,
                header(lrh(), NetworkLayer::Grh(global())),
            ),
        ]
    }

    #[test]
    fn packed_headers_unpack_unless_truncated() {
        for (kind, mut header) in all() {
            for len in [0, 1, 2, 3, 4, 255, 4096] {
                header.bth = header.bth.with_pad_for(len);
                let mut bytes = packet(&header, len);
                for short in 0..bytes.len() {
                    UdHeader::unpack(kind, &bytes[..short]).unwrap_err();
                }
                let want: Vec<u8> = (0..len).map(|n| n as u8).collect();
                let read = UdHeader::unpack(kind, &bytes).unwrap();
                assert_eq!(read, (header, &want[..]));
                // The frame was padded by its link.
                bytes.extend_from_slice(&[9; 10]);
                let read = UdHeader::unpack(kind, &bytes).unwrap();
                assert_eq!(read, (header, &want[..]));
            }
        }
    }

    #[test]
    fn unsupported_layers_are_not_packed() {
        let wrong = [
            header(ethernet(None), NetworkLayer::Local),
            header(lrh(), NetworkLayer::Ipv6(global(), 1)),
        ];
        for header in wrong {
            let refused = header.pack(0).unwrap_err();
            assert!(matches!(refused, UdHeaderError::Unwritable(_)));
        }
        for (_, header) in all() {
            assert!(header.pack(usize::from(u16::MAX)).is_err());
        }
    }

    #[test]
    fn unexpected_header_values_are_rejected() {
        // Type, version, fragment, checksum, protocol, port, length, opcode and transport version.
        let at = [12, 14, 20, 24, 23, 36, 38, 42, 43];
        for at in at {
            let mut bytes = packet(&of_linux(), 8);
            bytes[at] ^= 0x02;
            let read = UdHeader::unpack(LinkKind::Ethernet, &bytes);
            assert!(read.is_err(), "byte {at}: {read:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..160),
            of in 0usize..5,
            keep in 0usize..90,
        ) {
            let (kind, header) = all()[of];
            let mut mixed = packet(&header, 20);
            let at = keep.min(mixed.len());
            mixed.truncate(at);
            mixed.extend_from_slice(&bytes);
            for bytes in [&bytes, &mixed] {
                if let Ok((read, payload)) = UdHeader::unpack(kind, bytes) {
                    let again = read.pack(payload.len()).unwrap();
                    prop_assert!(again.len() + payload.len() <= bytes.len());
                }
            }
        }
    }
}
