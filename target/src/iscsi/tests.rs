//! The channel over TCP, by script and by chance.

use std::time::Duration;

use proptest::prelude::*;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, FromInitiator, FromTarget, LogoutReason, LogoutRequest, LogoutStatus, RejectReason,
    Snack, SnackKind, TextRequest, TmfFunction, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt};
use riser_scsi::step::Residual;

use super::fixture::{Received, Rig, WINDOW};
use super::{MAX_QUEUED, Phase};

/// Status and sense key of the response in what was received.
fn status(received: &[Received]) -> (u8, Option<u8>) {
    received
        .iter()
        .find_map(|(pdu, _, data)| match pdu {
            FromTarget::ScsiResponse(response) => {
                Some((response.status, data.get(4).map(|key| key & 15)))
            }
            FromTarget::DataIn(data_in) => data_in.status.map(|s| (s.status, None)),
            _ => None,
        })
        .unwrap_or_else(|| panic!("no status in {received:?}"))
}

fn rejected(received: &[Received]) -> RejectReason {
    match received {
        [(FromTarget::Reject(reject), ..)] => reject.reason,
        other => panic!("a reject, not {other:?}"),
    }
}

fn tmf_status(received: &[Received]) -> TmfStatus {
    let found = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::TmfResponse(response) => Some(response.status),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no answer in {received:?}"))
}

#[test]
fn a_read_comes_in_bursts_with_its_status() {
    let mut rig =
        Rig::logged_in("MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0");
    rig.disk[..2048]
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i / 7) as u8);
    let received = rig.read(1, 0, 4);
    let mut data = Vec::new();
    for (number, (pdu, numbers, part)) in received.iter().enumerate() {
        let FromTarget::DataIn(pdu) = pdu else {
            panic!("{pdu:?}");
        };
        assert_eq!(pdu.data_sn as usize, number);
        assert_eq!(pdu.offset as usize, data.len());
        assert_eq!(pdu.is_final, number % 2 == 1, "a burst is two PDUs");
        assert_eq!(pdu.status.is_some(), number == 3);
        assert_eq!(numbers.exp_cmd_sn, CmdSn(rig.cmd_sn));
        data.extend_from_slice(part);
    }
    assert_eq!(data, rig.disk[..2048]);
    assert_eq!(received.len(), 4);
    rig.end();
}

#[test]
fn a_short_read_says_so() {
    let mut rig = Rig::logged_in("");
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    for (len, residual) in [
        (1024, Residual::Underflow(512)),
        (256, Residual::Overflow(256)),
    ] {
        let received = rig.command(len, &cdb, false, len, &[], true);
        let (FromTarget::DataIn(pdu), _, data) = &received[0] else {
            panic!("{received:?}");
        };
        assert_eq!(pdu.status.unwrap().residual, residual);
        assert_eq!(data.len() as u32, len.min(512));
    }
    rig.end();
}

#[test]
fn immediate_unsolicited_and_solicited_data_make_one_write() {
    let mut rig =
        Rig::logged_in("FirstBurstLength=1024\0MaxBurstLength=1024\0MaxOutstandingR2T=2\0");
    let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
    assert!(rig.write(1, 8, &data[..512], false).is_empty());
    let received = rig.data_out(1, Ttt::NONE, 0, 512, &data[512..1024], true);
    let mut r2ts: Vec<_> = received
        .iter()
        .map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => *r2t,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(r2ts.len(), 2, "MaxOutstandingR2T");
    assert_eq!(
        (r2ts[0].offset, r2ts[0].len, r2ts[0].r2t_sn),
        (1024, 1024, 0)
    );
    let mut answer = Vec::new();
    while let Some(r2t) = (!r2ts.is_empty()).then(|| r2ts.remove(0)) {
        let at = r2t.offset as usize;
        assert!(
            rig.data_out(1, r2t.ttt, 0, r2t.offset, &data[at..at + 512], false)
                .is_empty()
        );
        let offset = r2t.offset + 512;
        answer = rig.data_out(1, r2t.ttt, 1, offset, &data[at + 512..at + 1024], true);
        r2ts.extend(answer.iter().filter_map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => Some(*r2t),
            _ => None,
        }));
    }
    assert_eq!(status(&answer), (0, None));
    let FromTarget::ScsiResponse(response) = answer[0].0 else {
        panic!("{answer:?}");
    };
    assert_eq!(response.exp_data_sn, 3);
    assert_eq!(rig.disk[..4096], data);
    rig.end();
}

#[test]
fn data_out_of_order_fail_the_command_and_change_nothing() {
    for (sn, offset, len) in [(1, 512, 512), (0, 0, 512), (0, 512, 1024), (0, 1024, 512)] {
        let mut rig = Rig::logged_in("FirstBurstLength=1024\0");
        rig.write(1, 4, &[1; 512], false);
        let received = rig.data_out(1, Ttt::NONE, sn, offset, &vec![2; len], true);
        assert_eq!(status(&received), (2, Some(0x0b)));
        assert!(rig.disk.iter().all(|b| *b == 0));
        rig.end();
    }
    let mut rig = Rig::logged_in("");
    let received = rig.write(1, 4, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    let received = rig.data_out(1, r2t.ttt, 0, 0, &[1; 4096], true);
    assert_eq!(
        status(&received),
        (2, Some(0x0b)),
        "more than was asked for"
    );
    let late = rig.data_out(1, r2t.ttt, 0, 0, &[1; 512], true);
    assert!(
        late.is_empty(),
        "data of a command that is over are dropped"
    );
    rig.end();
}

/// CVE 2026-74394: an offset near the end of the number range.
#[test]
fn offsets_that_wrap_are_refused() {
    let mut rig = Rig::logged_in("");
    let received = rig.write(1, 4, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    let received = rig.data_out(1, r2t.ttt, 0, u32::MAX - 3, &[1; 512], false);
    assert_eq!(status(&received), (2, Some(0x0b)));
    rig.end();
}

/// CVE 2026-90293: nothing but login before full-feature phase.
#[test]
fn a_command_before_login_ends_the_connection() {
    let mut rig = Rig::new();
    rig.read(1, 0, 1);
    assert!(rig.disconnected && rig.blocks.is_empty());
    assert_eq!(rig.gate.joined, 0);
    rig.end();
}

/// CVE 2026-90413, 2026-90414: a length beyond what we take ends the connection before any byte of
/// it is kept.
#[test]
fn a_length_beyond_our_limit_ends_the_connection() {
    let mut rig = Rig::logged_in("");
    let mut bytes = [0; 48];
    bytes[0] = 0x40;
    bytes[5..8].copy_from_slice(&[1, 0, 1]);
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(rig.disconnected);
    assert_eq!(rig.channel.held(), 0);
    rig.end();
}

/// SCST 93: INQUIRY of no length to a missing unit.
#[test]
fn an_empty_inquiry_to_a_missing_unit_is_answered() {
    let mut rig = Rig::logged_in("");
    let cdb: [u8; 6] = [0x12, 0, 0, 0, 0, 0];
    let bytes = {
        let mut whole = [0; 48];
        whole[0] = 0x01;
        whole[1] = 0x81;
        whole[9] = 9;
        whole[19] = 5;
        whole[24..28].copy_from_slice(&rig.cmd_sn.to_be_bytes());
        whole[32..38].copy_from_slice(&cdb);
        whole
    };
    rig.cmd_sn += 1;
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert_eq!(status(&received), (0, None));
    rig.end();
}

#[test]
fn digests_protect_both_ways() {
    let mut rig = Rig::logged_in("HeaderDigest=CRC32C\0DataDigest=CRC32C\0");
    assert_eq!(status(&rig.write(1, 1, &[7; 512], true)), (0, None));
    let received = rig.read(2, 0, 1);
    assert_eq!(received[0].2, [7; 512]);
    // A broken data digest of solicited data fails the command alone.
    let received = rig.write(3, 1, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    let pdu = FromInitiator::DataOut(riser_scsi::iscsi::pdu::DataOut {
        is_final: true,
        lun: [0; 8],
        itt: Itt(3),
        ttt: r2t.ttt,
        exp_stat_sn: StatSn(0),
        data_sn: 0,
        offset: 0,
    });
    let mut bytes = rig.bytes_of(&pdu, &[9; 512]);
    bytes[60] ^= 1;
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(
        matches!(received[0].0, FromTarget::Reject(r) if r.reason == RejectReason::DataDigestError)
    );
    assert_eq!(status(&received), (2, Some(0x0b)));
    assert_eq!(rig.disk[0], 7);
    // A broken header digest leaves no way to go on.
    let mut bytes = rig.bytes_of(&pdu, &[]);
    bytes[20] ^= 1;
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(rig.disconnected);
    rig.end();
}

#[test]
fn commands_outside_the_window_are_passed_over() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    for tag in 1..=u32::from(WINDOW) {
        rig.read(tag, 0, 1);
    }
    assert_eq!(rig.blocks.len(), usize::from(WINDOW));
    assert!(rig.read(50, 0, 1).is_empty());
    assert_eq!(rig.blocks.len(), usize::from(WINDOW), "beyond MaxCmdSN");
    rig.cmd_sn -= 1;
    let received = rig.finish_all_blocks();
    let (_, last, _) = received.last().unwrap();
    assert_eq!(
        last.max_cmd_sn.since(last.exp_cmd_sn),
        u32::from(WINDOW) - 1
    );
    rig.cmd_sn -= 1;
    assert!(rig.read(51, 0, 1).is_empty(), "a number that was used");
    rig.cmd_sn += 5;
    assert!(rig.read(52, 0, 1).is_empty(), "a gap");
    assert!(rig.blocks.is_empty());
    rig.end();
}

#[test]
fn a_tag_in_use_is_rejected() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.read(1, 0, 1);
    assert_eq!(rejected(&rig.read(1, 0, 1)), RejectReason::TaskInProgress);
    assert_eq!(
        rejected(&rig.read(u32::MAX, 0, 1)),
        RejectReason::InvalidPduField
    );
    rig.finish_all_blocks();
    rig.end();
}

#[test]
fn wrong_pdus_are_rejected_and_the_session_lives() {
    let mut rig = Rig::logged_in("ImmediateData=No\0");
    assert_eq!(
        rejected(&rig.write(1, 1, &[1; 512], true)),
        RejectReason::InvalidPduField
    );
    let snack = Snack {
        kind: SnackKind::Status,
        lun: [0; 8],
        itt: Itt::NONE,
        ttt: Ttt::NONE,
        exp_stat_sn: StatSn(0),
        begin: 0,
        run: 0,
    };
    let received = rig.send(&FromInitiator::Snack(snack), &[]);
    assert_eq!(rejected(&received), RejectReason::SnackReject);
    let mut odd = [0; 48];
    odd[0] = 0x1f;
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &odd));
    assert_eq!(rejected(&received), RejectReason::CommandNotSupported);
    assert_eq!(received[0].2, odd, "the header comes back");
    assert_eq!(status(&rig.read(2, 0, 1)), (0, None));
    rig.end();
}

#[test]
fn functions_end_tasks_and_are_answered_after_them() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::AbortTask, 1)),
        TmfStatus::TaskDoesNotExist
    );
    assert!(rig.write(1, 4, &[], true).len() == 1, "an R2T");
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::QueryTask, 1)),
        TmfStatus::Succeeded
    );
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::AbortTask, 1)),
        TmfStatus::Complete
    );
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::QueryTask, 1)),
        TmfStatus::Complete
    );
    for function in [
        TmfFunction::AbortTaskSet,
        TmfFunction::ClearTaskSet,
        TmfFunction::LogicalUnitReset,
        TmfFunction::TargetWarmReset,
        TmfFunction::NexusReset,
    ] {
        rig.read(2, 0, 1);
        rig.write(3, 4, &[], true);
        let received = rig.tmf(9, function, 0);
        assert_eq!(tmf_status(&received), TmfStatus::Complete, "{function:?}");
        assert_eq!(received.len(), 1, "no answer to what was aborted");
        assert!(rig.blocks.is_empty());
        // The unit attention of a reset.
        rig.prompt = true;
        rig.command(4, &[0; 6], false, 0, &[], true);
        rig.prompt = false;
    }
    for (function, expected) in [
        (TmfFunction::ClearAca, TmfStatus::NotSupported),
        (TmfFunction::TargetColdReset, TmfStatus::NotSupported),
        (
            TmfFunction::TaskReassign,
            TmfStatus::ReassignmentNotSupported,
        ),
        (TmfFunction::QueryTaskSet, TmfStatus::Complete),
        (TmfFunction::Other(99), TmfStatus::NotSupported),
    ] {
        assert_eq!(
            tmf_status(&rig.tmf(9, function, 0)),
            expected,
            "{function:?}"
        );
    }
    rig.end();
}

/// A flood of pings makes nothing pile up: no more is read than can be answered.
#[test]
fn a_flood_of_pings_is_bounded() {
    let mut rig = Rig::logged_in("");
    let answer = rig.nop(5, b"hello");
    assert_eq!(answer[0].2, b"hello");
    rig.stalled = true;
    for _ in 0..MAX_QUEUED {
        assert!(rig.channel.channel().wants_input());
        rig.nop(5, b"");
    }
    assert!(!rig.channel.channel().wants_input());
    rig.stalled = false;
    assert_eq!(rig.nop(5, b"").len(), MAX_QUEUED + 1);
    assert!(rig.channel.channel().wants_input());
    rig.end();
}

#[test]
fn a_silent_initiator_is_asked_and_then_dropped() {
    let mut rig = Rig::logged_in("");
    assert!(rig.wait(Duration::from_secs(14)).is_empty());
    let received = rig.wait(Duration::from_secs(1));
    let FromTarget::NopIn(ping) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!(ping.itt, Itt::NONE);
    assert_ne!(ping.ttt, Ttt::NONE);
    rig.nop(1, b"");
    assert_eq!(rig.wait(Duration::from_secs(15)).len(), 1);
    rig.wait(Duration::from_secs(10));
    assert!(rig.disconnected);
    rig.end();
}

/// One who stalls in login, or sends a byte now and then, is cut off.
#[test]
fn a_login_has_its_time() {
    let mut rig = Rig::new();
    for second in 0..15 {
        assert!(!rig.disconnected, "{second}");
        rig.with(|ch, cx| ch.handle_bytes(cx, &[0x43]));
        rig.wait(Duration::from_secs(1));
    }
    assert!(rig.disconnected);
    rig.end();
}

#[test]
fn discovery_lists_targets_over_several_pdus_and_runs_no_command() {
    let mut rig = Rig::new();
    rig.gate.targets = 300;
    rig.login(
        "InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0MaxRecvDataSegmentLength=512\0",
    );
    let mut text = Vec::new();
    let mut ttt = Ttt::NONE;
    let mut question: &[u8] = b"SendTargets=All\0";
    for tag in 0.. {
        let request = TextRequest {
            immediate: true,
            is_final: true,
            continues: false,
            lun: [0; 8],
            itt: Itt(tag),
            ttt,
            cmd_sn: CmdSn(rig.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        let received = rig.send(&FromInitiator::TextRequest(request), question);
        let (FromTarget::TextResponse(response), _, part) = &received[0] else {
            panic!("{received:?}");
        };
        assert!(part.len() <= 512);
        text.extend_from_slice(part);
        (ttt, question) = (response.ttt, b"");
        if response.is_final {
            break;
        }
        assert!(response.continues);
    }
    let (found, refused) = riser_scsi::iscsi::name::parse_targets(&text).unwrap();
    assert_eq!((found.len(), refused), (300, 0));
    assert_eq!(rejected(&rig.read(1, 0, 1)), RejectReason::ProtocolError);
    rig.end();
}

#[test]
fn a_logout_waits_for_what_can_end_and_closes() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.read(1, 0, 1);
    rig.write(2, 4, &[], true);
    let logout = |reason, cid, itt| {
        FromInitiator::LogoutRequest(LogoutRequest {
            immediate: true,
            reason,
            itt: Itt(itt),
            cid: Cid(cid),
            cmd_sn: CmdSn(0),
            exp_stat_sn: StatSn(0),
        })
    };
    let answer = |received: &[Received]| match received.last() {
        Some((FromTarget::LogoutResponse(response), ..)) => response.status,
        other => panic!("{other:?}"),
    };
    let other = rig.send(&logout(LogoutReason::CloseConnection, 9, 5), &[]);
    assert_eq!(answer(&other), LogoutStatus::CidNotFound);
    let remove = rig.send(&logout(LogoutReason::RemoveConnection, 0, 6), &[]);
    assert_eq!(answer(&remove), LogoutStatus::RecoveryNotSupported);
    assert!(
        rig.send(&logout(LogoutReason::CloseSession, 0, 7), &[])
            .is_empty()
    );
    assert!(matches!(
        rig.channel.channel().phase(),
        Phase::LoggingOut(_)
    ));
    let received = rig.finish_all_blocks();
    assert_eq!(received.len(), 2, "the read's answer, then the logout's");
    assert_eq!(answer(&received), LogoutStatus::Closed);
    assert!(rig.disconnected);
    rig.end();
}

#[test]
fn a_target_that_goes_asks_for_logouts_first() {
    let mut rig = Rig::logged_in("");
    let until = rig.now + Duration::from_secs(5);
    let received = rig.with(|ch, cx| ch.channel_mut().handle_shutdown(cx, until));
    assert!(matches!(
        received[0].0,
        FromTarget::AsyncMessage(m) if m.event == AsyncEvent::LogoutRequested && m.parameters[2] == 5
    ));
    rig.wait(Duration::from_secs(5));
    assert!(rig.disconnected);
    rig.end();
}

#[test]
fn commands_wait_for_buffers_and_lose_nothing() {
    let mut rig = Rig::logged_in("");
    let hog = rig.pool.take(rig.pool.size() as u32).unwrap();
    assert!(rig.write(1, 8, &[5; 4096], true).is_empty());
    assert!(rig.read(2, 0, 8).is_empty());
    assert!(rig.channel.channel().waits_for_pool());
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::AbortTask, 2)),
        TmfStatus::Complete
    );
    rig.pool.release(hog);
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    assert_eq!(status(&received), (0, None));
    assert!(rig.disk[..4096].iter().all(|b| *b == 5));
    rig.end();
}

/// What an initiator of chance does.
#[derive(Clone, Debug)]
enum Act {
    Read(u8, u8),
    Write(u8, u8, u16, bool),
    Data(u8, u8, u8, u16, bool),
    Tmf(u8, u8),
    Nop(u8),
    Bytes(Vec<u8>),
    Block(u8),
    Skip(u8),
    Wait(u8),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
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
        (0..3_u8).prop_map(Act::Skip),
        (0..9_u8).prop_map(Act::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever comes in whatever order, nothing panics, and in the end everything is given back.
    #[test]
    fn nothing_is_lost(acts in proptest::collection::vec(act(), 1..60), digests in any::<bool>()) {
        let keys = if digests { "HeaderDigest=CRC32C\0DataDigest=CRC32C\0" } else { "FirstBurstLength=2048\0" };
        let mut rig = Rig::logged_in(keys);
        rig.prompt = false;
        for act in acts {
            match act {
                Act::Read(tag, blocks) => { rig.read(u32::from(tag), 0, blocks); }
                Act::Write(tag, blocks, len, is_final) => {
                    rig.write(u32::from(tag), blocks, &vec![1; usize::from(len)], is_final);
                }
                Act::Data(tag, ttt, at, len, is_final) => {
                    let ttt = if ttt == 0 { Ttt::NONE } else { Ttt(u32::from(ttt)) };
                    let data = vec![2; usize::from(len)];
                    rig.data_out(u32::from(tag), ttt, u32::from(at), u32::from(at) * 512, &data, is_final);
                }
                Act::Tmf(tag, function) => {
                    let functions = [
                        TmfFunction::AbortTask, TmfFunction::AbortTaskSet, TmfFunction::ClearTaskSet,
                        TmfFunction::LogicalUnitReset, TmfFunction::TargetWarmReset, TmfFunction::QueryTask,
                    ];
                    rig.tmf(100 + u32::from(tag), functions[usize::from(function) % 6], u32::from(tag));
                }
                Act::Nop(tag) => { rig.nop(200 + u32::from(tag), b"x"); }
                Act::Bytes(bytes) => { rig.with(|ch, cx| ch.handle_bytes(cx, &bytes)); }
                Act::Block(at) if !rig.blocks.is_empty() => {
                    let at = usize::from(at) % rig.blocks.len();
                    rig.finish_block(at);
                    rig.with(|_, _| {});
                }
                Act::Block(_) => {}
                Act::Skip(n) => rig.cmd_sn = rig.cmd_sn.wrapping_sub(u32::from(n)),
                Act::Wait(n) => { rig.wait(Duration::from_secs(u64::from(n))); }
            }
            prop_assert!(rig.channel.channel().in_flight() <= 3 * usize::from(WINDOW) + 16);
        }
        rig.end();
    }
}
