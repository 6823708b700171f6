//! Sends captured messages between Linux kernels to our connection manager: requests must be
//! accepted, duplicates must be detected, and connections must be closed.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Instant;

use pcap_file::pcap::PcapReader;
use riser_transport::cm::{Cm, CmConfig, CmState, IbCmEventKind};
use riser_transport::wire::cm_msg::{CaGuid, CmMessage, RejReason, ServiceId};
use riser_transport::wire::{GSI_QKEY, Packet};

/// Returns the source and data of all CM MADs in a capture.
fn mads(name: &str) -> Vec<(IpAddr, Vec<u8>)> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name);
    let mut reader = PcapReader::new(std::fs::File::open(path).unwrap()).unwrap();
    let mut mads = Vec::new();
    while let Some(frame) = reader.next_packet() {
        let frame = frame.unwrap().data;
        let ip = &frame[14..];
        let packet =
            Packet::parse(&ip[28..usize::from(u16::from_be_bytes([ip[2], ip[3]]))]).unwrap();
        if packet.ext.deth.is_some_and(|deth| deth.qkey() == GSI_QKEY) {
            mads.push((
                [ip[12], ip[13], ip[14], ip[15]].into(),
                packet.payload.to_vec(),
            ));
        }
    }
    mads
}

fn passive() -> Cm {
    let mut cm = Cm::new(CmConfig::new(CaGuid(0x1234)), 0, 0, [7; 32]);
    // All ports of RDMA_PS_TCP.
    cm.listen(ServiceId(0x0106_0000), 0xffff_ffff_ffff_0000, 64)
        .unwrap();
    cm
}

#[test]
fn kernel_requests_have_queue_pair_parameters() {
    // Capture, queue pair, first PSN, MTU, retries, RNR retries, responder resources and initiator
    // depth, as shown by another dissector.
    let cases = [
        ("rej.pcap", 0x11, 0x42_677b, 4096, 7, 7, 1, 1),
        ("golden_srp.pcap", 0x13, 0x28_9669, 4096, 7, 7, 4, 0),
        ("golden_iser.pcap", 0x11, 0x4e_2985, 4096, 7, 6, 128, 1),
    ];
    for (name, qpn, psn, mtu, retries, rnr, resources, depth) in cases {
        let (from, mad) = mads(name).remove(0);
        let now = Instant::now();
        let mut cm = passive();
        cm.handle_mad(now, from, &mad).unwrap();
        let event = cm.poll_event().unwrap();
        let IbCmEventKind::ReqReceived { peer, qp, .. } = event.kind else {
            panic!("{name}")
        };
        assert_eq!((peer, qp.path.remote_gid.ip()), (from, from), "{name}");
        assert_eq!(
            (qp.retry_count.value(), qp.rnr_retry_count.value()),
            (retries, rnr),
            "{name}"
        );
        assert_eq!(
            (qp.dest_qpn.value(), qp.sq_psn.value(), qp.path_mtu.bytes()),
            (qpn, psn, mtu),
            "{name}"
        );
        assert_eq!(
            (qp.responder_resources, qp.initiator_depth),
            (resources, depth),
            "{name}"
        );
        // If the kernel sends a request again, this must not create another connection.
        cm.handle_mad(now, from, &mad).unwrap();
        assert_eq!((cm.poll_event(), cm.id_count()), (None, 2), "{name}");
        assert_eq!(cm.state(event.id), CmState::ReqRcvd);
    }
}

#[test]
fn channels_of_initiator_are_separate_connections() {
    let mut cm = passive();
    let now = Instant::now();
    let mut requests = 0;
    for (from, mad) in mads("golden_srp.pcap") {
        let (_, message) = CmMessage::parse(&mad).unwrap();
        if matches!(message, CmMessage::Req(_)) {
            cm.handle_mad(now, from, &mad).unwrap();
            assert!(matches!(
                cm.poll_event().unwrap().kind,
                IbCmEventKind::ReqReceived { .. }
            ));
            requests += 1;
        }
    }
    assert_eq!((requests, cm.id_count()), (2, 3));
}

#[test]
fn unknown_disconnect_gets_kernel_like_reply() {
    let mads = mads("golden_srp.pcap");
    let dreq = &mads[6];
    let kernel_drep = CmMessage::parse(&mads[8].1).unwrap();
    let mut cm = passive();
    cm.handle_mad(Instant::now(), dreq.0, &dreq.1).unwrap();
    let (to, mad) = cm.poll_transmit().unwrap();
    assert_eq!(to, dreq.0);
    assert_eq!(CmMessage::parse(&mad).unwrap(), kernel_drep);
}

#[test]
fn unknown_service_is_rejected_with_transaction() {
    let (from, mad) = mads("golden_iser.pcap").remove(0);
    let mut cm = Cm::new(CmConfig::new(CaGuid(1)), 0, 0, [1; 32]);
    cm.handle_mad(Instant::now(), from, &mad).unwrap();
    let (request_transaction, CmMessage::Req(req)) = CmMessage::parse(&mad).unwrap() else {
        panic!()
    };
    let (_, response) = cm.poll_transmit().unwrap();
    let (response_transaction, CmMessage::Rej(rej)) = CmMessage::parse(&response).unwrap() else {
        panic!()
    };
    assert_eq!(
        (response_transaction, rej.remote_comm_id, rej.reason),
        (
            request_transaction,
            req.local_comm_id,
            RejReason::InvalidServiceId
        )
    );
}
