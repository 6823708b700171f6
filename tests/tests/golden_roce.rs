//! Tests using data that was not created by us: captures of two Linux kernels that use `rdma_rxe`,
//! and headers written by hand based on the specification. The expected values never use our own
//! constants.
//!
//! `golden_srp.pcap`: `ib_srp` and `ib_srpt`; `golden_iser.pcap`: `ib_iser` and LIO; `rej.pcap`:
//! `rping`, rejected by a user-space peer.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use pcap_file::pcap::PcapReader;
use riser_transport::wire::cm_msg::{CmMessage, MraOf, RejOf, TransportType};
use riser_transport::wire::{
    Aeth, AethSyndrome, AtomicAckEth, AtomicEth, Bth, CmaHeader, CommId, Credit, Deth, ExtHeaders,
    IcrcError, IcrcFlow, IcrcVerifier, Ieth, ImmDt, Msn, NakCode, Opcode, Packet, Psn, Qpn,
    RdmaPortSpace, RejReason, Reth, RnrTimer, ServiceId, emit_headers, pad_len,
};

/// A captured RoCEv2 packet.
struct Captured {
    flow: IcrcFlow,
    src: SocketAddr,
    ip_id: u16,
    datagram: Vec<u8>,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Returns all packets in a capture. Panics if a frame is not RoCEv2 over IPv4.
fn capture(name: &str) -> Vec<Captured> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name);
    let file = std::fs::File::open(path).unwrap();
    let mut reader = PcapReader::new(file).unwrap();
    let mut packets = Vec::new();
    while let Some(frame) = reader.next_packet() {
        let frame = frame.unwrap().data;
        assert_eq!(u16_at(&frame, 12), 0x0800, "IPv4");
        let ip = &frame[14..];
        assert_eq!((ip[0], ip[9]), (0x45, 17), "UDP with a plain IPv4 header");
        let total = usize::from(u16_at(ip, 2));
        let udp = &ip[20..total];
        assert_eq!(u16_at(udp, 2), 4791);
        assert_eq!(usize::from(u16_at(udp, 4)), udp.len());
        let addr = |at: usize, port: usize| {
            SocketAddr::from((
                [ip[at], ip[at + 1], ip[at + 2], ip[at + 3]],
                u16_at(udp, port),
            ))
        };
        let (src, dst) = (addr(12, 0), addr(16, 2));
        packets.push(Captured {
            flow: IcrcFlow::new(src, dst).unwrap(),
            src,
            ip_id: u16_at(ip, 4),
            datagram: udp[8..].to_vec(),
        });
    }
    packets
}

const CAPTURES: [(&str, usize); 3] = [
    ("golden_srp.pcap", 505),
    ("golden_iser.pcap", 430),
    ("rej.pcap", 3),
];

/// Creates the same extended headers again from the decoded values.
fn rebuilt(ext: &ExtHeaders, opcode: u8) -> ExtHeaders {
    ExtHeaders {
        deth: ext.deth.map(|h| Deth::new(h.qkey(), h.src_qpn())),
        reth: ext.reth.map(|h| Reth::new(h.va(), h.rkey(), h.dma_len())),
        atomic_eth: ext.atomic_eth.map(|h| match opcode {
            0x13 => AtomicEth::compare_swap(h.va(), h.rkey(), h.compare(), h.swap_or_add()),
            _ => AtomicEth::fetch_add(h.va(), h.rkey(), h.swap_or_add()),
        }),
        aeth: ext.aeth.map(|h| Aeth::new(h.syndrome(), h.msn())),
        atomic_ack: ext.atomic_ack.map(|h| AtomicAckEth::new(h.original())),
        imm: ext.imm.map(|h| ImmDt::new(h.data())),
        ieth: ext.ieth.map(|h| Ieth::new(h.rkey())),
        // The kernels in these captures don't use XRC.
        xrc: None,
    }
}

#[test]
fn captured_packets_round_trip() {
    for (name, count) in CAPTURES {
        let packets = capture(name);
        assert_eq!(packets.len(), count, "{name}");
        for (i, captured) in packets.iter().enumerate() {
            let bytes = &captured.datagram;
            let packet =
                Packet::parse(bytes).unwrap_or_else(|e| panic!("{name} packet {}: {e}", i + 1));
            let bth = Bth::new(packet.op.opcode, packet.bth.dest_qpn(), packet.bth.psn())
                .with_solicited(packet.bth.is_solicited())
                .with_migrated(packet.bth.is_migrated())
                .with_ack_request(packet.bth.is_ack_requested())
                .with_pkey(packet.bth.pkey())
                .with_pad_for(packet.payload.len());
            let mut again = emit_headers(&bth, &rebuilt(&packet.ext, bytes[0])).to_vec();
            let headers = again.len();
            again.extend_from_slice(packet.payload);
            again.resize(again.len() + pad_len(packet.payload.len()), 0);
            // Calculate the ICRC in several pieces, like a sender with a gather list.
            let mut icrc = captured.flow.start(bytes.len() as u16, captured.ip_id);
            icrc.update_headers(&again[..headers]);
            for piece in again[headers..].chunks(700) {
                icrc.update(piece);
            }
            again.extend_from_slice(&icrc.finish_bytes());
            assert_eq!(again, *bytes, "{name} packet {}", i + 1);
        }
    }
}

#[test]
fn captured_icrcs_match() {
    for (name, _) in CAPTURES {
        for (i, captured) in capture(name).iter().enumerate() {
            let at = format!("{name} packet {}", i + 1);
            let id = captured.ip_id;
            assert_eq!(
                captured.flow.check_exact(&captured.datagram, id),
                Ok(()),
                "{at}"
            );
            // The identification must be recovered using just the ICRC.
            assert_eq!(captured.flow.check(&captured.datagram, 0), Ok(id), "{at}");
            let mut bad = captured.datagram.clone();
            let last = bad.len() - 5;
            bad[last] ^= 0x40;
            assert_eq!(
                captured.flow.check_exact(&bad, id),
                Err(IcrcError::Corrupt),
                "{at}"
            );
        }
    }
}

#[test]
fn verifier_per_sender_accepts_capture() {
    for (name, _) in CAPTURES {
        let mut verifiers: Vec<(SocketAddr, IcrcVerifier)> = Vec::new();
        for captured in capture(name) {
            let known = verifiers.iter().position(|(src, _)| *src == captured.src);
            let index = known.unwrap_or_else(|| {
                verifiers.push((captured.src, IcrcVerifier::new(captured.flow)));
                verifiers.len() - 1
            });
            verifiers[index]
                .1
                .verify(&captured.datagram, false)
                .unwrap();
        }
    }
}

fn cm_messages(name: &str) -> Vec<(CmMessage, Vec<u8>)> {
    let mut messages = Vec::new();
    for captured in capture(name) {
        let packet = Packet::parse(&captured.datagram).unwrap();
        let Some(deth) = packet.ext.deth else {
            continue;
        };
        assert_eq!((deth.qkey(), deth.src_qpn().value()), (0x8001_0000, 1));
        assert_eq!(packet.payload.len(), 256);
        let (transaction, message) = CmMessage::parse(packet.payload).unwrap();
        assert_eq!(
            message.emit(transaction)[..],
            *packet.payload,
            "{name} {message:?}"
        );
        messages.push((message, packet.payload.to_vec()));
    }
    messages
}

#[test]
fn captured_cm_mads_round_trip() {
    let counts: Vec<usize> = CAPTURES
        .iter()
        .map(|(name, _)| cm_messages(name).len())
        .collect();
    assert_eq!(counts, [10, 3, 3]);
}

/// Expected values as shown by tshark's dissector for the first packet in `rej.pcap`.
#[test]
fn kernel_req_fields_match_other_dissector() {
    let messages = cm_messages("rej.pcap");
    let CmMessage::Req(req) = messages[0].0 else {
        panic!("{:?}", messages[0])
    };
    assert_eq!(req.local_comm_id, CommId(0x5c96_bae3));
    assert_eq!(req.service_id, ServiceId(0x0000_0000_0106_1c06));
    assert_eq!(
        RdmaPortSpace::of(req.service_id),
        Some((RdmaPortSpace::Tcp, 0x1c06))
    );
    assert_eq!(req.ca_guid.0, 0x6c26_c9ff_fe92_cbc6);
    assert_eq!((req.qkey, req.qpn), (0, Qpn::new(0x11)));
    assert_eq!((req.responder_resources, req.initiator_depth), (1, 1));
    assert_eq!(
        (
            req.remote_cm_timeout.exponent(),
            req.local_cm_timeout.exponent()
        ),
        (0x14, 0x14)
    );
    assert_eq!(
        (req.transport, req.flow_control),
        (TransportType::Rc, false)
    );
    assert_eq!(req.starting_psn, Psn::new(0x42_677b));
    assert_eq!(
        (
            req.retry_count.value(),
            req.rnr_retry_count.value(),
            req.max_cm_retries.value()
        ),
        (7, 7, 15)
    );
    assert_eq!(req.path_mtu.unwrap().bytes(), 4096);
    assert_eq!(
        (req.pkey.0, req.rdc_exists, req.srq),
        (0xffff, false, false)
    );
    let path = req.primary;
    assert_eq!((path.local_lid, path.remote_lid), (65535, 65535));
    assert_eq!(path.local_gid.to_string(), "::ffff:10.99.0.1");
    assert_eq!(path.remote_gid.to_string(), "::ffff:10.99.0.2");
    // Bytes 13 1e e0 00: 20 bits for the label, 6 reserved bits, and 6 bits for the rate.
    assert_eq!(
        (path.flow_label.value(), path.packet_rate.value()),
        (0x131ee, 0)
    );
    assert_eq!(
        (
            path.traffic_class,
            path.hop_limit,
            path.ack_timeout.exponent()
        ),
        (0, 0x40, 0x11)
    );
    assert_eq!((path.service_level.value(), path.subnet_local), (0, false));
    assert_eq!(req.alternate, Default::default());
    let (cma, rest) = CmaHeader::parse(&req.private_data[..]).unwrap();
    assert_eq!(cma.src_port, 0x8d18);
    assert_eq!(
        (cma.addrs.src(), cma.addrs.dst()),
        (path.local_gid.ip(), path.remote_gid.ip())
    );
    assert_eq!(cma.emit(), req.private_data[..36]);
    assert_eq!(rest, [0; 56]);

    let CmMessage::Rej(rej) = messages[2].0 else {
        panic!("{:?}", messages[2])
    };
    assert_eq!(
        (rej.message, rej.reason),
        (RejOf::Req, RejReason::ConsumerDefined)
    );
    assert_eq!(rej.remote_comm_id, req.local_comm_id);
}

#[test]
fn kernel_handshake_is_consistent() {
    let messages: Vec<CmMessage> = cm_messages("golden_srp.pcap")
        .into_iter()
        .map(|(m, _)| m)
        .collect();
    let (CmMessage::Req(req), CmMessage::Rep(rep), CmMessage::Rtu(rtu)) =
        (messages[0], messages[1], messages[2])
    else {
        panic!("{messages:?}")
    };
    assert_eq!(rep.remote_comm_id, req.local_comm_id);
    assert_eq!(
        (rtu.local_comm_id, rtu.remote_comm_id),
        (req.local_comm_id, rep.local_comm_id)
    );
    let (CmMessage::Dreq(dreq), CmMessage::Drep(drep)) = (messages[6], messages[8]) else {
        panic!("{messages:?}")
    };
    assert_eq!(
        (drep.local_comm_id, drep.remote_comm_id),
        (dreq.remote_comm_id, dreq.local_comm_id)
    );

    // The starting PSN in a message is used for the first packet sent by its receiver.
    let packets = capture("golden_srp.pcap");
    let (active, passive) = (packets[0].src.ip(), packets[1].src.ip());
    let first = |from: IpAddr, to: Qpn| {
        packets
            .iter()
            .filter(|c| c.src.ip() == from)
            .map(|c| Packet::parse(&c.datagram).unwrap().bth)
            .find(|bth| bth.dest_qpn() == to && bth.opcode().is_some_and(|o| o.info().is_request()))
            .unwrap()
            .psn()
    };
    assert_eq!(first(passive, req.qpn), req.starting_psn);
    assert_eq!(first(active, rep.qpn), rep.starting_psn);

    // This is an SRP login: the address header is followed by 56 bytes for the consumer.
    let (_, login) = CmaHeader::parse(&req.private_data[..]).unwrap();
    assert_eq!(login.len(), 56);
    assert_eq!((&login[8..10], login[10]), (&[0x00, 0x06][..], 0x80));
    assert_eq!(rep.private_data[0], 0xc0);
}

#[test]
fn mra_layout_matches_specification() {
    // Written by hand: MAD header, IDs, "REQ acknowledged" in the top bits, service timeout 21 in
    // the top five bits, and private data.
    let mut mad = [0u8; 256];
    mad[..4].copy_from_slice(&[0x01, 0x07, 0x02, 0x03]);
    mad[8..16].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x12, 0x34]);
    mad[16..18].copy_from_slice(&[0x00, 0x11]);
    mad[24..32].copy_from_slice(&[0xaa, 0xbb, 0xcc, 0xdd, 0x11, 0x22, 0x33, 0x44]);
    mad[33] = 0xa8;
    mad[34] = 0x5a;
    let (transaction, message) = CmMessage::parse(&mad).unwrap();
    let CmMessage::Mra(mra) = message else {
        panic!("{message:?}")
    };
    assert_eq!(
        (transaction.0, mra.message, mra.service_timeout.exponent()),
        (0x1234, MraOf::Req, 21)
    );
    assert_eq!(
        (mra.local_comm_id, mra.remote_comm_id),
        (CommId(0xaabb_ccdd), CommId(0x1122_3344))
    );
    assert_eq!(mra.private_data[0], 0x5a);
    assert_eq!(message.emit(transaction), mad);
}

/// Headers of a single opcode with the expected bytes. Each field is on a separate line.
#[test]
fn headers_match_specification() {
    let bth = |opcode: Opcode| {
        Bth::new(opcode, Qpn::new(0x00_0102), Psn::new(0x0a_0b0c)).with_migrated(false)
    };
    let none = ExtHeaders::default();
    let cases: &[(Opcode, ExtHeaders, &[u8])] = &[
        (Opcode::RcSendOnly, none, &[0x04]),
        (
            Opcode::RcSendOnlyImm,
            ExtHeaders {
                imm: Some(ImmDt::new(0x1122_3344)),
                ..none
            },
            &[0x05, /* immediate */ 0x11, 0x22, 0x33, 0x44],
        ),
        (
            Opcode::RcSendLastInvalidate,
            ExtHeaders {
                ieth: Some(Ieth::new(0x0000_8a01)),
                ..none
            },
            &[0x16, /* rkey */ 0x00, 0x00, 0x8a, 0x01],
        ),
        (
            Opcode::RcWriteOnlyImm,
            ExtHeaders {
                reth: Some(Reth::new(0x7f00_1122_3344_5566, 0x0000_1234, 0x0001_0000)),
                imm: Some(ImmDt::new(7)),
                ..none
            },
            &[
                0x0b, // address
                0x7f, 0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, // key
                0x00, 0x00, 0x12, 0x34, // length
                0x00, 0x01, 0x00, 0x00, // immediate
                0x00, 0x00, 0x00, 0x07,
            ],
        ),
        (
            Opcode::RcReadRequest,
            ExtHeaders {
                reth: Some(Reth::new(0x1000, 0xffff_0001, 4096)),
                ..none
            },
            &[
                0x0c, // address
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00, // key
                0xff, 0xff, 0x00, 0x01, // length
                0x00, 0x00, 0x10, 0x00,
            ],
        ),
        (
            Opcode::RcAcknowledge,
            ExtHeaders {
                aeth: Some(Aeth::new(
                    AethSyndrome::Ack(Credit::UNLIMITED),
                    Msn::new(0x01_0203),
                )),
                ..none
            },
            &[
                0x11, /* syndrome */ 0x1f, /* MSN */ 0x01, 0x02, 0x03,
            ],
        ),
        (
            Opcode::RcAcknowledge,
            ExtHeaders {
                aeth: Some(Aeth::new(
                    AethSyndrome::Nak(NakCode::RemoteAccess),
                    Msn::new(5),
                )),
                ..none
            },
            &[0x11, 0x62, 0x00, 0x00, 0x05],
        ),
        (
            Opcode::RcAcknowledge,
            ExtHeaders {
                aeth: Some(Aeth::new(
                    AethSyndrome::RnrNak(RnrTimer::new(12)),
                    Msn::new(5),
                )),
                ..none
            },
            &[0x11, 0x2c, 0x00, 0x00, 0x05],
        ),
        (
            Opcode::RcAtomicAcknowledge,
            ExtHeaders {
                aeth: Some(Aeth::new(
                    AethSyndrome::Ack(Credit::at_most(1)),
                    Msn::new(1),
                )),
                atomic_ack: Some(AtomicAckEth::new(0x0102_0304_0506_0708)),
                ..none
            },
            &[
                0x12, 0x01, 0x00, 0x00, 0x01, // the value before
                0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08,
            ],
        ),
        (
            Opcode::RcCmpSwap,
            ExtHeaders {
                atomic_eth: Some(AtomicEth::compare_swap(0x2008, 0x55, 0xc0, 0x5a)),
                ..none
            },
            &[
                0x13, // address
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x20, 0x08, // key
                0x00, 0x00, 0x00, 0x55, // swap
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x5a, // compare
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xc0,
            ],
        ),
        (
            Opcode::RcFetchAdd,
            ExtHeaders {
                atomic_eth: Some(AtomicEth::fetch_add(0x2008, 0x55, 3)),
                ..none
            },
            &[
                0x14, // address
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x20, 0x08, // key
                0x00, 0x00, 0x00, 0x55, // add
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, // unused
                0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
            ],
        ),
        (
            Opcode::UdSendOnlyImm,
            ExtHeaders {
                deth: Some(Deth::new(0x8001_0000, Qpn::new(1))),
                imm: Some(ImmDt::new(0xffff_fffe)),
                ..none
            },
            &[
                0x65, // queue key
                0x80, 0x01, 0x00, 0x00, // reserved, source queue pair
                0x00, 0x00, 0x00, 0x01, // immediate
                0xff, 0xff, 0xff, 0xfe,
            ],
        ),
    ];
    for (opcode, ext, bytes) in cases {
        let mut expected = vec![
            bytes[0], // opcode
            0x00,     // solicited, migrated, pad, version
            0xff, 0xff, // partition key
            0x00, // congestion
            0x00, 0x01, 0x02, // destination queue pair
            0x00, // acknowledge request
            0x0a, 0x0b, 0x0c, // PSN
        ];
        expected.extend_from_slice(&bytes[1..]);
        assert_eq!(emit_headers(&bth(*opcode), ext)[..], expected, "{opcode:?}");
        if opcode.info().payload.allows(4, 4) {
            expected.extend_from_slice(&[1, 2, 3, 4]);
        }
        expected.extend_from_slice(&[0; 4]);
        let packet = Packet::parse(&expected).unwrap();
        assert_eq!((&packet.ext, packet.op.opcode), (ext, *opcode));
    }
}
