//! Packets that no correct peer would send.

use proptest::prelude::*;

use super::*;

/// Header bytes: mostly plausible, so that packets get past the first checks.
fn arbitrary_packet(rkey: RKey) -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![0u8..0x18, Just(0x64)];
    let psn = prop_oneof![
        RQ_PSN - 4..RQ_PSN + 40,
        SQ_PSN - 4..SQ_PSN + 40,
        0u32..0x100_0000
    ];
    let ext = (
        any::<bool>(),
        any::<u64>(),
        any::<u32>(),
        0u32..2000,
        any::<u8>(),
    )
        .prop_map(move |(near, a, k, len, syndrome)| {
            let key = if near { rkey } else { RKey(k) };
            let at = if near { (a % 65_536) & !7 } else { a };
            let mut ext = reth(at, key, len);
            ext.extend_from_slice(&a.to_be_bytes());
            (ext, syndrome)
        });
    let payload = prop_oneof![Just(0usize), Just(256), 0usize..300];
    (opcode, psn, any::<bool>(), ext, payload).prop_map(
        |(opcode, psn, asks, (ext, syndrome), len)| {
            let words = match opcode {
                0x06 | 0x0a | 0x0c => ext[..16].to_vec(),
                0x0b => ext[..20].to_vec(),
                0x03 | 0x05 | 0x09 | 0x16 | 0x17 => ext[8..12].to_vec(),
                0x0d | 0x0f | 0x10 | 0x11 => vec![syndrome, 0, 0, 9],
                0x12 => vec![syndrome, 0, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8],
                0x13 | 0x14 => [&ext[..12], &ext[..16]].concat(),
                0x64 => ext[..8].to_vec(),
                _ => Vec::new(),
            };
            let has_payload = !matches!(opcode, 0x0c | 0x11..=0x14);
            packet(
                opcode,
                psn,
                asks,
                &words,
                &bytes(if has_payload { len } else { 0 }),
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// In any order of any packets nothing panics, and each request completes once.
    #[test]
    fn no_packet_panics_and_no_completion_is_lost(
        picks in proptest::collection::vec((0u8..4, any::<prop::sample::Index>()), 1..60),
        packets in {
            let rig = Rig::new();
            proptest::collection::vec(arbitrary_packet(rig.mr.rkey), 1..40)
        },
    ) {
        let mut rig = Rig::new();
        let (mut posted, mut done) = (0u64, 0u64);
        for (action, pick) in picks {
            match action {
                0 if rig.qp.sends_outstanding() < 16 => {
                    let ops = [SendOp::Send, SendOp::Read(PEER), SendOp::Write(PEER)];
                    rig.post(posted, ops[pick.index(3)], pick.index(2000));
                    posted += 1;
                }
                1 if rig.rq.len() < 4 => {
                    rig.post_recv(posted, 4096);
                    posted += 1;
                }
                2 if rig.qp.poll_timeout().is_some() => {
                    rig.expire();
                }
                _ => {
                    let mut datagram = packets[pick.index(packets.len())].clone();
                    datagram.extend_from_slice(&[0; 4]);
                    if let Ok(packet) = Packet::parse(&datagram) {
                        let now = rig.now;
                        rig.run(|qp, env| qp.handle_packet(now, &packet, env));
                    }
                }
            }
            rig.sent();
            done += rig.events().iter().filter(|e| !matches!(e, RcEvent::Async(_))).count() as u64;
        }
        rig.run(RcQp::to_error);
        done += rig.events().iter().filter(|e| !matches!(e, RcEvent::Async(_))).count() as u64;
        prop_assert_eq!(done, posted);
    }
}
