//! Random actions of an initiator: no order of messages causes a panic, and all resources are
//! released at the end.

use std::time::Duration;

use proptest::prelude::*;
use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::pdu::TmfFunction;
use riser_testkit::{fuzz, one_of};

use crate::tests::rig;
use crate::tests::rig::tcp::{TcpPeer, WINDOW, data_ack};
use crate::worker::fabrics::Input;

type Rig = rig::Rig<TcpPeer>;

/// Random action of an initiator.
#[derive(Clone, Debug)]
enum Act {
    Read(u8, u8),
    Write(u8, u8, u16, bool),
    Data(u8, u8, u8, u16, bool),
    Tmf(u8, u8),
    Nop(u8),
    Bytes(Vec<u8>),
    Block(u8),
    Ack(u8, u8),
    Skip(u8),
    Wait(u8),
    Limit(u8),
}

fn act() -> impl Strategy<Value = Act> {
    one_of![
        (any::<u8>(), 0..20_u8).prop_map(|(t, n)| Act::Read(t % 6, n)),
        (any::<u8>(), 0..20_u8, 0..3000_u16, any::<bool>()).prop_map(|(t, n, d, f)| Act::Write(
            t % 6,
            n,
            d,
            f
        )),
        (
            any::<u8>(),
            any::<u8>(),
            any::<u8>(),
            0..3000_u16,
            any::<bool>()
        )
            .prop_map(|(t, ttt, at, d, f)| Act::Data(t % 6, ttt % 12, at % 4, d, f)),
        (any::<u8>(), 0..14_u8).prop_map(|(t, f)| Act::Tmf(t % 6, f)),
        any::<u8>().prop_map(Act::Nop),
        proptest::collection::vec(any::<u8>(), 0..60).prop_map(Act::Bytes),
        any::<u8>().prop_map(Act::Block),
        (any::<u8>(), any::<u8>()).prop_map(|(ttt, sn)| Act::Ack(ttt % 6, sn % 6 * 4)),
        (0..3_u8).prop_map(Act::Skip),
        (0..9_u8).prop_map(Act::Wait),
        any::<u8>().prop_map(Act::Limit),
    ]
}

/// Login keys by index, and the window of the unit.
fn heads() -> impl Strategy<Value = (usize, u32)> {
    let window = one_of![Just(512_u32), Just(2048), Just(1 << 20)];
    (0..4_usize, window)
}

/// Verifies that no message order causes a panic, and that all resources are released at the end.
fn run_acts(acts: Vec<Act>, (kind, window): (usize, u32)) {
    let keys = [
        "HeaderDigest=CRC32C\0DataDigest=CRC32C\0",
        "FirstBurstLength=2048\0",
        "FirstBurstLength=2048\0MaxConnections=4\0",
        "FirstBurstLength=2048\0DataDigest=CRC32C\0ErrorRecoveryLevel=1\0",
    ][kind];
    let mut rig = Rig::with_window(window, keys);
    rig.prompt = false;
    for act in acts {
        match act {
            Act::Ack(ttt, begin) => {
                rig.send(&data_ack(Ttt(ttt.into()), begin.into()), &[]);
            }
            Act::Read(tag, blocks) => {
                rig.read(u32::from(tag), 0, blocks);
            }
            Act::Write(tag, blocks, len, is_final) => {
                rig.write(u32::from(tag), blocks, &vec![1; usize::from(len)], is_final);
            }
            Act::Data(tag, ttt, at, len, is_final) => {
                let ttt = if ttt == 0 {
                    Ttt::NONE
                } else {
                    Ttt(u32::from(ttt))
                };
                let data = vec![2; usize::from(len)];
                rig.data_out(
                    u32::from(tag),
                    ttt,
                    u32::from(at),
                    u32::from(at) * 512,
                    &data,
                    is_final,
                );
            }
            Act::Tmf(tag, function) => {
                let functions = [
                    TmfFunction::AbortTask,
                    TmfFunction::AbortTaskSet,
                    TmfFunction::ClearTaskSet,
                    TmfFunction::LogicalUnitReset,
                    TmfFunction::TargetWarmReset,
                    TmfFunction::QueryTask,
                ];
                rig.tmf(
                    100 + u32::from(tag),
                    functions[usize::from(function) % 6],
                    u32::from(tag),
                );
            }
            Act::Nop(tag) => {
                rig.nop(200 + u32::from(tag), b"x");
            }
            Act::Bytes(bytes) => {
                rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
            }
            Act::Block(at) if !rig.blocks().is_empty() => {
                let at = usize::from(at) % rig.blocks().len();
                rig.finish_block(at);
                rig.run_actions();
            }
            Act::Block(_) => {}
            // Go back, where requests are ignored. In the last case, skip ahead as well.
            Act::Skip(n) if kind == 2 && n > 1 => rig.cmd_sn = rig.cmd_sn.wrapping_add(1),
            Act::Skip(n) => rig.cmd_sn = rig.cmd_sn.wrapping_sub(u32::from(n)),
            Act::Wait(n) => {
                rig.wait(Duration::from_secs(u64::from(n)));
            }
            Act::Limit(n) => {
                rig.units[0].limits.set(&crate::qos::fixture::limits(n));
                rig.apply(Input::Limits);
            }
        }
        assert!(rig.channel.channel().executor().in_flight() <= 3 * usize::from(WINDOW) + 16);
    }
    rig.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn nothing_is_lost(acts in proptest::collection::vec(act(), 1..60), head in heads()) {
        run_acts(acts, head);
    }
}

#[test]
fn full_feature() {
    bolero::check!(name = "full_feature").for_each(|bytes: &[u8]| {
        if let Some((head, acts)) = fuzz::history(&heads(), &act(), bytes) {
            run_acts(acts, head);
        }
    });
}
