//! Packets that a valid peer would never send.

use proptest::prelude::*;
use riser_testkit::{fuzz, one_of};

use super::*;

/// Generates header bytes that are mostly valid, so that packets pass the first checks.
fn arbitrary_packet(rkey: RKey) -> impl Strategy<Value = Vec<u8>> {
    let opcode = one_of![0u8..0x18, Just(0x64)];
    let psn = one_of![
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
    let payload = one_of![Just(0usize), Just(256), 0usize..300];
    (opcode, psn, any::<bool>(), ext, payload).prop_map(
        |(opcode, psn, ack_request, (ext, syndrome), len)| {
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
                ack_request,
                &words,
                &bytes(if has_payload { len } else { 0 }),
            )
        },
    )
}

/// Operations on a QP.
#[derive(Clone, Debug)]
enum Step {
    Post(prop::sample::Index, usize),
    PostRecv,
    Expire,
    Packet(Vec<u8>),
}

fn step(rkey: RKey) -> impl Strategy<Value = Step> {
    one_of![
        (any::<prop::sample::Index>(), 0..2000_usize).prop_map(|(op, len)| Step::Post(op, len)),
        Just(Step::PostRecv),
        Just(Step::Expire),
        arbitrary_packet(rkey).prop_map(Step::Packet),
    ]
}

/// Returns the number of work requests completed.
fn completed(rig: &mut Rig) -> usize {
    let events = rig.events();
    let is_completion = |e: &&RcEvent| !matches!(e, RcEvent::Async(_));
    events.iter().filter(is_completion).count()
}

/// No sequence of packets should panic, and each request should complete exactly once.
fn run(steps: Vec<Step>) {
    let mut rig = Rig::new();
    let (mut posted, mut done) = (0, 0);
    for step in steps {
        match step {
            Step::Post(op, len) if rig.qp.sends_outstanding() < 16 => {
                let ops = [SendOp::Send, SendOp::Read(PEER), SendOp::Write(PEER)];
                rig.post(posted, ops[op.index(3)], len);
                posted += 1;
            }
            Step::PostRecv if rig.rq.len() < 4 => {
                rig.post_recv(posted, 4096);
                posted += 1;
            }
            Step::Expire if rig.qp.poll_timeout().is_some() => {
                rig.expire();
            }
            Step::Packet(mut datagram) => {
                datagram.extend_from_slice(&[0; 4]);
                if let Ok(packet) = Packet::parse(&datagram) {
                    let now = rig.now;
                    rig.run(|qp, env| qp.handle_packet(now, &packet, env));
                }
            }
            _ => {}
        }
        rig.sent();
        done += completed(&mut rig) as u64;
        assert!(done <= posted, "a request completes once");
    }
    rig.run(RcQp::to_error);
    done += completed(&mut rig) as u64;
    assert_eq!(done, posted);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn hostile_packets_lose_no_completion(
        steps in proptest::collection::vec(step(Rig::new().mr.rkey), 1..60),
    ) {
        run(steps);
    }
}

#[test]
fn queue_pair() {
    let rkey = Rig::new().mr.rkey;
    bolero::check!(name = "queue_pair").for_each(|bytes: &[u8]| {
        if let Some(((), steps)) = fuzz::history(&Just(()), &step(rkey), bytes) {
            run(steps);
        }
    });
}
