//! Frames as they are on the link, seen at its other end.

use std::io::Read;
use std::net::IpAddr;

use riser_transport::roce::batch::HOP_LIMIT;
use riser_transport::wire::mad::{MadClass, MadHeader};
use riser_transport::wire::ud::{LinkKind, NetworkLayer, UdHeader};
use riser_transport::wire::{DEFAULT_PKEY, GSI_QKEY, Qpn};
use socket2::{Domain, Protocol, Socket, Type};

use super::{Link, V4, V6, on_a_link};
use crate::suite::world::connected;

/// A socket that has a copy of every frame.
pub(super) fn sniffer() -> Socket {
    let every_protocol = Protocol::from(i32::from(3u16.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(every_protocol)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.set_recv_buffer_size(1 << 20).unwrap();
    socket
}

/// Source and destination of a datagram, its hop limit, and where its UDP header is.
fn route(header: &UdHeader) -> (IpAddr, IpAddr, u8, usize) {
    const ETHERNET: usize = 14;
    match &header.network {
        NetworkLayer::Ipv4(ip, _) => {
            let (from, to) = (ip.source.into(), ip.destination.into());
            (from, to, ip.ttl, ETHERNET + 20)
        }
        NetworkLayer::Ipv6(ip, _) => {
            let (from, to) = (ip.source.into(), ip.destination.into());
            (from, to, ip.hop_limit, ETHERNET + 40)
        }
        other => panic!("{other:?}"),
    }
}

/// The kernel's headers and the NIC's are together what [`UdHeader`] packs.
fn datagrams_have_packed_headers(test: &'static str, addrs: [&'static str; 3]) {
    on_a_link(
        test,
        addrs,
        |_| {},
        move |w: &mut Link| {
            let mut sniffer = w.at_b.run(sniffer);
            let (a, b): (IpAddr, IpAddr) = (addrs[0].parse().unwrap(), addrs[1].parse().unwrap());
            connected(w);
            let mut frame = [0; 1 << 14];
            let (mut from_a, mut from_b) = (0, 0);
            while let Ok(len) = sniffer.read(&mut frame) {
                let frame = &frame[..len];
                // Frames of neighbour discovery and of other queue pairs are among them.
                let Ok((header, payload)) = UdHeader::unpack(LinkKind::Ethernet, frame) else {
                    continue;
                };
                let (from, to, hop_limit, udp) = route(&header);
                match (from, to) {
                    _ if (from, to) == (a, b) => from_a += 1,
                    _ if (from, to) == (b, a) => from_b += 1,
                    other => panic!("{other:?}"),
                }
                assert_eq!(hop_limit, HOP_LIMIT);
                assert_eq!(
                    (header.bth.dest_qpn(), header.bth.pkey()),
                    (Qpn::GSI, DEFAULT_PKEY)
                );
                assert_eq!(
                    (header.deth.src_qpn(), header.deth.qkey()),
                    (Qpn::GSI, GSI_QKEY)
                );
                let (mad, _) = MadHeader::parse(payload).unwrap();
                assert_eq!(mad.class(), MadClass::ComMgt as u8);
                let packed = header.pack(payload.len()).unwrap();
                let mut seen = frame[..packed.len()].to_vec();
                // Where the kernel has made a checksum of UDP: what is packed has none.
                seen[udp + 6..udp + 8].fill(0);
                assert_eq!(seen, packed[..]);
            }
            // REQ and RTU, and REP between them.
            assert!(from_a >= 2 && from_b >= 1, "{from_a} and {from_b} messages");
        },
    );
}

#[test]
fn datagram_on_link_has_packed_headers() {
    let test = "datagram_on_link_has_packed_headers";
    datagrams_have_packed_headers(test, V4);
}

#[test]
fn ipv6_datagram_has_packed_headers() {
    let test = "ipv6_datagram_has_packed_headers";
    datagrams_have_packed_headers(test, V6);
}
