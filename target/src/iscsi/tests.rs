//! Tests for a channel with TCP: scripts and random input.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use riser_scsi::attention::Attention;
use riser_scsi::device_server::Request;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, DataOut, FromInitiator, FromTarget, LoginStatus, LogoutReason, LogoutRequest,
    LogoutStatus, NopOut, R2t, RejectReason, ScsiCommand, Snack, SnackKind, TextRequest,
    TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::opcode::{Kind, Opcode};
use riser_scsi::step::{Expected, Residual, Step, TaskAttribute};
use riser_scsi::task::NewTask;
use riser_testkit::{fuzz, one_of};

use super::fixture::{Received, Rig, WINDOW};
use super::{Action, Datamover as _, MAX_QUEUED, MAX_QUEUED_BYTES, Phase, TcpChannel};
use crate::fabric::{LunMap, Mapping, TaskIdx, TaskRef, Unit, UnitIdx};
use crate::pool::{Claim, Owner, Pool};
use crate::stats::SessionEvent;
use riser_test_peers::pdus::{nop_out, scsi_command, tmf_request};

/// Returns status and sense key of the response.
pub(super) fn status(received: &[Received]) -> (u8, Option<u8>) {
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

/// Returns the sense key, additional sense code and qualifier.
pub(super) fn sense(received: &[Received]) -> (u8, u8, u8) {
    let found = received.iter().find_map(|(pdu, _, data)| match pdu {
        FromTarget::ScsiResponse(_) => data.get(2..),
        _ => None,
    });
    let sense = found.unwrap_or_else(|| panic!("no answer in {received:?}"));
    (sense[2] & 15, sense[12], sense[13])
}

pub(super) fn rejected(received: &[Received]) -> RejectReason {
    match received {
        [(FromTarget::Reject(reject), ..)] => reject.reason,
        other => panic!("a reject, not {other:?}"),
    }
}

pub(super) fn tmf_status(received: &[Received]) -> TmfStatus {
    let found = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::TmfResponse(response) => Some(response.status),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no answer in {received:?}"))
}

#[test]
fn read_is_sent_in_bursts_with_status() {
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
    rig.close();
}

#[test]
fn short_read_reports_residual() {
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
    rig.close();
}

#[test]
fn write_combines_all_kinds_of_data() {
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
    rig.close();
}

#[test]
fn data_out_of_order_fails_command() {
    for (sn, offset, len) in [(1, 512, 512), (0, 0, 512), (0, 512, 1024), (0, 1024, 512)] {
        let mut rig = Rig::logged_in("FirstBurstLength=1024\0");
        rig.write(1, 4, &[1; 512], false);
        let received = rig.data_out(1, Ttt::NONE, sn, offset, &vec![2; len], true);
        assert_eq!(status(&received), (2, Some(0x0b)));
        assert!(rig.disk.iter().all(|b| *b == 0));
        rig.close();
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
    rig.close();
}

/// CVE-2026-74394: offset close to the integer limit.
#[test]
fn cve_2026_74394_wrapping_offsets_are_refused() {
    let mut rig = Rig::logged_in("");
    let received = rig.write(1, 4, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    let received = rig.data_out(1, r2t.ttt, 0, u32::MAX - 3, &[1; 512], false);
    assert!(received.is_empty(), "more comes");
    let received = rig.data_out(1, r2t.ttt, 1, 512, &[1; 1536], true);
    assert_eq!(sense(&received), (0x0b, 0x4b, 0));
    rig.close();
}

/// CVE-2026-90293: only login is allowed before full-feature phase.
#[test]
fn cve_2026_90293_early_command_closes_connection() {
    let mut rig = Rig::new();
    rig.read(1, 0, 1);
    assert!(rig.disconnected && rig.blocks.is_empty());
    assert_eq!(rig.gate.joined, 0);
    rig.close();
}

/// CVE-2026-90413, CVE-2026-90414: if the length exceeds our limit, the connection must be closed
/// before any data is stored.
#[test]
fn cve_2026_90413_and_2026_90414_length_over_limit() {
    let mut rig = Rig::logged_in("");
    let mut bytes = [0; 48];
    bytes[0] = 0x40;
    bytes[5..8].copy_from_slice(&[1, 0, 1]);
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(rig.disconnected);
    assert_eq!(rig.channel.held(), 0);
    rig.close();
}

/// CVE-2021-28361: PDUs without a data segment where data is expected.
#[test]
fn cve_2021_28361_pdus_without_data() {
    // First PDU on a connection, without keys or a name.
    let mut rig = Rig::new();
    let bytes = rig.login_bytes(b"");
    let received = rig.bytes(&bytes);
    assert!(matches!(
        received[..],
        [(FromTarget::LoginResponse(r), ..)] if r.status == LoginStatus::MISSING_PARAMETER
    ));
    assert_eq!(rig.gate.joined, 0);
    rig.close();
    // Empty Data-Out for unsolicited and for solicited data: the target must request all data
    // again, or abort the command.
    let mut rig = Rig::logged_in("FirstBurstLength=1024\0");
    assert!(rig.write(1, 2, &[], false).is_empty());
    let received = rig.data_out(1, Ttt::NONE, 0, 0, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!((r2t.offset, r2t.len), (0, 1024));
    let received = rig.data_out(1, r2t.ttt, 0, 0, &[], true);
    match received[0].0 {
        FromTarget::R2t(r2t) => assert_eq!((r2t.offset, r2t.len), (0, 1024)),
        _ => assert_eq!(status(&received), (2, Some(0x0b))),
    }
    assert!(rig.disk.iter().all(|b| *b == 0));
    rig.close();
    let mut rig = Rig::logged_in("");
    // An empty write is valid, and we must respond to an empty ping.
    assert_eq!(status(&rig.write(3, 0, &[], true)), (0, None));
    assert!(matches!(rig.nop(4, &[])[..], [(FromTarget::NopIn(_), ..)]));
    rig.close();
    // Try every opcode, with a header where all other fields are zero.
    for first in 0..=0xff {
        for flags in [0, 0x80] {
            let mut rig = Rig::logged_in("");
            let mut bytes = [0; 48];
            (bytes[0], bytes[1]) = (first, flags);
            bytes[24..28].copy_from_slice(&rig.cmd_sn.to_be_bytes());
            rig.bytes(&bytes);
            rig.close();
        }
    }
}

/// SCST 93: INQUIRY with a zero length for an unknown unit.
#[test]
fn scst_93_empty_inquiry_to_missing_unit() {
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
    rig.close();
}

#[test]
fn digests_protect_both_ways() {
    let mut rig = Rig::logged_in("HeaderDigest=CRC32C\0DataDigest=CRC32C\0");
    assert_eq!(status(&rig.write(1, 1, &[7; 512], true)), (0, None));
    let received = rig.read(2, 0, 1);
    assert_eq!(received[0].2, [7; 512]);
    // A data digest error in solicited data must only fail this command.
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
    // We can't continue after a header digest error.
    let mut bytes = rig.bytes_of(&pdu, &[]);
    bytes[20] ^= 1;
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(rig.disconnected);
    assert_eq!(rig.gate.events, [SessionEvent::DigestError; 2]);
    rig.close();
}

#[test]
fn commands_outside_window_are_ignored() {
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
    rig.close();
}

/// In a session that allows several connections, requests can be received out of order.
#[test]
fn early_commands_wait_for_their_turn() {
    let mut rig = Rig::logged_in("MaxConnections=4\0FirstBurstLength=4096\0");
    let first = rig.cmd_sn;
    rig.cmd_sn = first + 2;
    assert!(rig.write(13, 2, &[3; 512], false).is_empty());
    // Unsolicited data is queued with its command, up to the limit.
    let rest = rig.data_out(13, Ttt::NONE, 0, 512, &[4; 512], true);
    assert!(rest.is_empty());
    rig.cmd_sn = first + 1;
    assert!(rig.read(12, 0, 1).is_empty());
    rig.cmd_sn = first + 1;
    assert!(rig.read(12, 0, 1).is_empty(), "sent twice");
    rig.cmd_sn = first;
    let received = rig.write(11, 1, &[1; 512], true);
    let tags: Vec<u32> = received
        .iter()
        .map(|(pdu, ..)| match pdu {
            FromTarget::ScsiResponse(response) => response.itt.0,
            FromTarget::DataIn(data) => data.itt.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tags, [11, 12, 13]);
    let (_, numbers, _) = received.last().unwrap();
    assert_eq!(numbers.exp_cmd_sn, CmdSn(first + 3));
    assert_eq!(rig.disk[..512], [3; 512]);
    assert_eq!(rig.disk[512..1024], [4; 512]);
    rig.close();
}

#[test]
fn function_waits_for_affected_commands() {
    let mut rig = Rig::logged_in("MaxConnections=4\0");
    let first = rig.cmd_sn;
    rig.cmd_sn = first + 1;
    assert!(
        rig.tmf(50, TmfFunction::LogicalUnitReset, u32::MAX)
            .is_empty()
    );
    rig.cmd_sn = first;
    let received = rig.read(11, 0, 1);
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    rig.close();
}

#[test]
fn abort_of_missing_command_uses_its_number() {
    let mut rig = Rig::logged_in("MaxConnections=4\0");
    let lost = rig.cmd_sn;
    rig.cmd_sn = lost + 1;
    assert!(rig.read(12, 0, 1).is_empty());
    rig.cmd_sn = lost + 2;
    let request = TmfRequest {
        immediate: false,
        ref_cmd_sn: CmdSn(lost),
        ..tmf_request(13, lost + 2, TmfFunction::AbortTask, 11)
    };
    // This one has its own CmdSN, so it waits for the missing command.
    assert!(
        rig.send(&FromInitiator::TmfRequest(request), &[])
            .is_empty()
    );
    let request = TmfRequest {
        immediate: true,
        ref_cmd_sn: CmdSn(lost),
        ..tmf_request(14, lost + 3, TmfFunction::AbortTask, 11)
    };
    // If this is refused, the CmdSN must not change.
    let elsewhere = TmfRequest {
        lun: [0, 9, 0, 0, 0, 0, 0, 0],
        ..request
    };
    let refused = rig.send(&FromInitiator::TmfRequest(elsewhere), &[]);
    assert_eq!(tmf_status(&refused), TmfStatus::LunDoesNotExist);
    assert_eq!(refused.len(), 1, "{refused:?}");
    let received = rig.send(&FromInitiator::TmfRequest(request), &[]);
    // The commands queued after it are executed, and the function above, for which the command no
    // longer exists.
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    let answered = |tag: u32| {
        received.iter().any(|(pdu, ..)| match pdu {
            FromTarget::ScsiResponse(r) => r.itt.0 == tag,
            FromTarget::DataIn(d) => d.itt.0 == tag && d.status.is_some(),
            FromTarget::TmfResponse(r) => r.itt.0 == tag,
            _ => false,
        })
    };
    assert!(answered(12) && answered(13) && answered(14), "{received:?}");
    rig.cmd_sn = lost;
    assert!(rig.read(11, 0, 1).is_empty(), "it is over");
    rig.close();
}

#[test]
fn replacing_login_waits_for_old_session() {
    let mut rig = Rig::new();
    rig.gate.waits = true;
    let text = "InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t0\0";
    assert!(rig.login(text).is_empty());
    assert_eq!(rig.channel.channel().phase(), Phase::Joining);
    let received = rig.with(TcpChannel::handle_others_gone);
    assert!(matches!(received[0].0, FromTarget::LoginResponse(_)));
    assert_eq!(status(&rig.read(1, 0, 1)).0, 2, "power on");
    assert_eq!(status(&rig.read(2, 0, 1)).0, 0);
    rig.close();
    // Sending a PDU before the login response is a protocol error.
    let mut rig = Rig::new();
    rig.gate.waits = true;
    rig.login(text);
    rig.nop(1, &[]);
    assert!(rig.disconnected);
    rig.close();
    let mut rig = Rig::new();
    rig.gate.waits = true;
    rig.login(text);
    let received = rig.wait(Duration::from_secs(3));
    assert!(matches!(received[0].0, FromTarget::LoginResponse(_)));
    assert_eq!(rig.channel.channel().phase(), Phase::FullFeature);
    assert!(!rig.gate.waits, "it waits no longer");
    rig.close();
}

#[test]
fn session_logout_waits_for_other_connections() {
    let mut rig = Rig::logged_in("MaxConnections=4\0");
    let status = |received: &[Received]| match received {
        [(FromTarget::LogoutResponse(response), ..)] => response.status,
        other => panic!("{other:?}"),
    };
    let unknown = rig.send(&logout(LogoutReason::CloseConnection, 3), &[]);
    assert_eq!(status(&unknown), LogoutStatus::CidNotFound);
    // We must not respond before the connection is closed: one of its writes could still be at a
    // device, and would overwrite data that the initiator writes after the response (RFC 7143
    // 11.15).
    rig.gate.others.push(Cid(3));
    let early = rig.send(&logout(LogoutReason::CloseConnection, 3), &[]);
    assert!(early.is_empty(), "{early:?}");
    let gone = rig.with(TcpChannel::handle_others_gone);
    assert_eq!(status(&gone), LogoutStatus::Closed);
    assert!(
        rig.send(&logout(LogoutReason::CloseSession, 0), &[])
            .is_empty()
    );
    assert_eq!(rig.elsewhere, [Action::EndOthers]);
    let received = rig.with(TcpChannel::handle_others_gone);
    assert!(matches!(received[0].0, FromTarget::LogoutResponse(_)));
    assert!(rig.channel.channel().has_logged_out());
    rig.close();
}

#[test]
fn logout_waits_for_pending_connection_logout() {
    let mut rig = Rig::logged_in("MaxConnections=4\0");
    let logout = |tag, cid| {
        FromInitiator::LogoutRequest(LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseConnection,
            itt: Itt(tag),
            cid: Cid(cid),
            cmd_sn: CmdSn(0),
            exp_stat_sn: StatSn(0),
        })
    };
    rig.gate.others.push(Cid(3));
    assert!(rig.send(&logout(9, 3), &[]).is_empty());
    let early = rig.send(&logout(10, 0), &[]);
    assert!(early.is_empty(), "{early:?}");
    let received = rig.with(TcpChannel::handle_others_gone);
    let tag = |one: &Received| match &one.0 {
        FromTarget::LogoutResponse(response) => Some(response.itt),
        _ => None,
    };
    let tags: Vec<_> = received.iter().filter_map(tag).collect();
    assert_eq!(tags, [Itt(9), Itt(10)]);
    rig.close();
}

pub(super) fn logout(reason: LogoutReason, cid: u16) -> FromInitiator {
    FromInitiator::LogoutRequest(LogoutRequest {
        immediate: true,
        reason,
        itt: Itt(9),
        cid: Cid(cid),
        cmd_sn: CmdSn(0),
        exp_stat_sn: StatSn(0),
    })
}

/// Returns an R-Data SNACK for all data of a command starting at `begin`.
pub(super) fn rdata(tag: u32, ttt: u32, begin: u32) -> FromInitiator {
    FromInitiator::Snack(Snack {
        kind: SnackKind::RData,
        lun: [0; 8],
        itt: Itt(tag),
        ttt: Ttt(ttt),
        exp_stat_sn: StatSn(0),
        begin,
        run: 0,
    })
}

/// Returns an acknowledgment for each status before `exp`.
fn acknowledgment(exp: u32) -> FromInitiator {
    FromInitiator::NopOut(NopOut {
        immediate: true,
        lun: [0; 8],
        itt: Itt::NONE,
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(0),
        exp_stat_sn: StatSn(exp),
    })
}

fn snack(kind: SnackKind, tag: u32, begin: u32, run: u32) -> FromInitiator {
    FromInitiator::Snack(Snack {
        kind,
        lun: [0; 8],
        itt: Itt(tag),
        ttt: Ttt::NONE,
        exp_stat_sn: StatSn(0),
        begin,
        run,
    })
}

/// Returns the DataSN of each Data-In PDU, and the StatSN of the last PDU if it contains the
/// status.
pub(super) fn data_in(received: &[Received]) -> (Vec<u32>, Option<u32>) {
    let mut status = None;
    let sns = received.iter().map(|(pdu, numbers, data)| match pdu {
        FromTarget::DataIn(pdu) => {
            assert_eq!(data.len(), 512);
            assert!(data.iter().all(|byte| *byte == pdu.data_sn as u8 + 1));
            if pdu.status.is_some() {
                status = Some(numbers.stat_sn.0);
            }
            pdu.data_sn
        }
        other => panic!("{other:?}"),
    });
    (sns.collect(), status)
}

#[test]
fn sent_data_can_be_retransmitted() {
    let mut rig = Rig::logged_in(
        "MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0ErrorRecoveryLevel=1\0",
    );
    for (at, block) in rig.disk.chunks_mut(512).enumerate() {
        block.fill((at as u8).wrapping_add(1));
    }
    let (sns, status_sn) = data_in(&rig.read(1, 0, 5));
    let status_sn = status_sn.expect("a status");
    assert_eq!(sns, [0, 1, 2, 3, 4]);
    let again = rig.send(&snack(SnackKind::DataOrR2t, 1, 1, 2), &[]);
    assert_eq!(data_in(&again), (vec![1, 2], None));
    let again = rig.send(&snack(SnackKind::DataOrR2t, 1, 3, 0), &[]);
    assert_eq!(data_in(&again), (vec![3, 4], Some(status_sn)));
    let again = rig.send(&snack(SnackKind::Status, u32::MAX, status_sn, 1), &[]);
    assert_eq!(data_in(&again), (vec![4], Some(status_sn)));
    // Status without data, but with sense data.
    let cdb = [0xff; 6];
    let first = rig.command(2, &cdb, false, 0, &[], true);
    let sn = first[0].1.stat_sn.0;
    assert_eq!(sn, status_sn + 1);
    let again = rig.send(&snack(SnackKind::Status, u32::MAX, status_sn, 0), &[]);
    assert_eq!(again.len(), 2);
    assert_eq!((&again[1].0, &again[1].2), (&first[0].0, &first[0].2));
    assert_eq!(again[1].1.stat_sn.0, sn);
    // If both values are zero, all unacknowledged PDUs are requested.
    let all = rig.send(&snack(SnackKind::Status, u32::MAX, 0, 0), &[]);
    assert_eq!(all.last().map(|last| last.1.stat_sn.0), Some(sn));
    // Acknowledged PDUs must be discarded.
    assert_eq!(rig.channel.channel().executor().in_flight(), 3);
    rig.send(&acknowledgment(sn), &[]);
    assert_eq!(rig.channel.channel().executor().in_flight(), 1);
    let gone = rig.send(&snack(SnackKind::DataOrR2t, 1, 0, 0), &[]);
    assert_eq!(rejected(&gone), RejectReason::ProtocolError);
    let gone = rig.send(&snack(SnackKind::Status, u32::MAX, status_sn, 1), &[]);
    assert_eq!(rejected(&gone), RejectReason::ProtocolError);
    rig.send(&acknowledgment(sn + 1), &[]);
    assert_eq!(rig.channel.channel().executor().in_flight(), 0);
    // After a logout request, the initiator doesn't have to acknowledge the last PDUs.
    rig.read(3, 0, 1);
    rig.send(&logout(LogoutReason::CloseSession, 0), &[]);
    rig.with(TcpChannel::handle_others_gone);
    assert!(rig.disconnected);
    rig.close();
}

/// RFC 7143 11.16.3: if MaxRecvDataSegmentLength has changed, data is retransmitted with the new
/// PDU size and the response contains the tag from the SNACK.
#[test]
fn retransmission_uses_changed_pdu_size() {
    for was_sent in [true, false] {
        let mut rig = Rig::logged_in(
            "MaxRecvDataSegmentLength=2048\0MaxBurstLength=4096\0ErrorRecoveryLevel=1\0",
        );
        for (at, block) in rig.disk.chunks_mut(512).enumerate() {
            block.fill((at as u8).wrapping_add(1));
        }
        rig.stalled = !was_sent;
        let first = rig.read(1, 0, 5);
        assert_eq!(first.len(), if was_sent { 2 } else { 0 });
        let text = TextRequest {
            immediate: true,
            is_final: true,
            continues: false,
            lun: [0; 8],
            itt: Itt(7),
            ttt: Ttt::NONE,
            cmd_sn: CmdSn(rig.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        let text = FromInitiator::TextRequest(text);
        rig.send(&text, b"MaxRecvDataSegmentLength=512\0");
        rig.stalled = false;
        let mut received = rig.send(&rdata(1, 77, 0), &[]);
        received.retain(|(pdu, ..)| !matches!(pdu, FromTarget::TextResponse(_)));
        let (answer, numbers, _) = received.pop().expect("an answer");
        assert_eq!(data_in(&received), (vec![0, 1, 2, 3, 4], None));
        let FromTarget::ScsiResponse(response) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!((response.status, response.exp_data_sn), (0, 5));
        assert_eq!(response.snack_tag, 77);
        if was_sent {
            assert_eq!(numbers.stat_sn, first[1].1.stat_sn, "the same number");
        }
        let again = rig.send(&snack(SnackKind::DataOrR2t, 1, 2, 1), &[]);
        assert_eq!(data_in(&again), (vec![2], None));
        let sn = numbers.stat_sn.0;
        let again = rig.send(&snack(SnackKind::Status, u32::MAX, sn, 1), &[]);
        assert_eq!(again[0].0, answer, "the last one");
        for illegal in [
            rdata(1, 0, 0),
            rdata(1, u32::MAX, 0),
            rdata(1, 5, 1),
            rdata(2, 5, 0),
        ] {
            let refused = rig.send(&illegal, &[]);
            assert_eq!(rejected(&refused), RejectReason::ProtocolError);
        }
        let once_more = rig.send(&rdata(1, 78, 0), &[]);
        assert!(matches!(
            once_more.last().unwrap().0,
            FromTarget::ScsiResponse(r) if r.snack_tag == 78
        ));
        rig.close();
    }
}

/// The initiator requests data again, and acknowledges the response before it is sent.
#[test]
fn acknowledged_response_cancels_retransmission() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0");
    let first = rig.read(1, 0, 5);
    let sn = first.last().unwrap().1.stat_sn.0;
    // Both are received before anything is sent.
    rig.stalled = true;
    rig.send(&rdata(1, 77, 0), &[]);
    rig.send(&acknowledgment(sn + 1), &[]);
    rig.stalled = false;
    let sent = rig.with(|_, _| {});
    let is_data = |(pdu, ..): &(FromTarget, _, _)| matches!(pdu, FromTarget::DataIn(_));
    assert!(!sent.iter().any(is_data));
    assert_eq!(rig.channel.channel().executor().in_flight(), 0);
    rig.close();
}

/// The initiator requests data again before it's sent, and then logs out: in this case the command
/// completes with its response.
#[test]
fn logout_cancels_retransmission_after_response() {
    let mut rig = Rig::logged_in("MaxRecvDataSegmentLength=512\0ErrorRecoveryLevel=1\0");
    // Nothing was sent before this. The data and some of the retransmissions fill a batch.
    rig.stalled = true;
    rig.read(1, 0, 40);
    rig.send(&snack(SnackKind::DataOrR2t, 1, 0, 0), &[]);
    rig.send(&logout(LogoutReason::CloseSession, 0), &[]);
    rig.stalled = false;
    let sent = rig.with(TcpChannel::handle_others_gone);
    let is_data = |(pdu, ..): &&Received| matches!(pdu, FromTarget::DataIn(_));
    assert_eq!(sent.iter().filter(is_data).count(), 40);
    assert!(rig.disconnected);
    rig.close();
}

/// Sends data with an invalid digest.
fn spoilt(
    rig: &mut Rig,
    tag: u32,
    ttt: Ttt,
    sn: u32,
    data: &[u8],
    is_final: bool,
) -> Vec<Received> {
    let pdu = FromInitiator::DataOut(DataOut {
        is_final,
        lun: [0; 8],
        itt: Itt(tag),
        ttt,
        exp_stat_sn: StatSn(0),
        data_sn: sn,
        offset: sn * data.len() as u32,
    });
    let mut bytes = rig.bytes_of(&pdu, data);
    *bytes.last_mut().unwrap() ^= 1;
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes))
}

pub(super) fn r2t(received: &[Received]) -> R2t {
    let found = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::R2t(r2t) => Some(*r2t),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no R2T in {received:?}"))
}

/// The last PDU also ends unsolicited data for a command received out of order.
#[test]
fn damaged_data_of_queued_command_is_requested() {
    let mut rig = Rig::logged_in("DataDigest=CRC32C\0ErrorRecoveryLevel=1\0");
    let first = rig.cmd_sn;
    rig.cmd_sn = first + 1;
    let kept = rig.write(12, 2, &[2; 512], false);
    assert!(kept.is_empty(), "{kept:?}");
    spoilt(&mut rig, 12, Ttt::NONE, 0, &[3; 512], true);
    rig.cmd_sn = first;
    let received = rig.read(11, 0, 1);
    let is_r2t = |one: &&Received| matches!(one.0, FromTarget::R2t(_));
    let asked = received.iter().find(is_r2t).cloned().expect("an R2T");
    let asked = r2t(&[asked]);
    assert_eq!((asked.offset, asked.len), (512, 512));
    let received = rig.data_out(12, asked.ttt, 0, 512, &[4; 512], true);
    assert_eq!(status(&received).0, 0);
    assert_eq!(rig.disk[512..1024], [4; 512]);
    rig.close();
}

#[test]
fn damaged_data_is_requested_again() {
    let mut rig = Rig::logged_in("DataDigest=CRC32C\0ErrorRecoveryLevel=1\0");
    let asked = r2t(&rig.write(1, 4, &[], true));
    assert_eq!((asked.r2t_sn, asked.offset, asked.len), (0, 0, 2048));
    rig.data_out(1, asked.ttt, 0, 0, &[1; 512], false);
    let received = spoilt(&mut rig, 1, asked.ttt, 1, &[2; 512], false);
    assert!(
        matches!(received[0].0, FromTarget::Reject(r) if r.reason == RejectReason::DataDigestError)
    );
    let again = r2t(&received);
    assert_eq!((again.r2t_sn, again.offset, again.len), (1, 512, 1536));
    // Any more data for the previous R2T is ignored.
    assert!(
        rig.data_out(1, asked.ttt, 2, 1024, &[9; 512], false)
            .is_empty()
    );
    // A lost R2T is sent again.
    let lost = rig.send(&snack(SnackKind::DataOrR2t, 1, 1, 1), &[]);
    assert_eq!(r2t(&lost), again);
    let received = rig.data_out(1, again.ttt, 0, 512, &[3; 1536], true);
    let FromTarget::ScsiResponse(response) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!((response.status, response.exp_data_sn), (0, 2));
    assert_eq!(rig.disk[..512], [1; 512]);
    assert_eq!(rig.disk[512..2048], [3; 1536]);
    // Same for unsolicited data: the remaining data is requested after the last PDU.
    rig.write(2, 3, &[4; 512], false);
    let received = spoilt(&mut rig, 2, Ttt::NONE, 0, &[5; 512], false);
    assert_eq!(received.len(), 1, "a reject");
    let asked = r2t(&rig.data_out(2, Ttt::NONE, 1, 1024, &[6; 512], true));
    assert_eq!((asked.offset, asked.len), (512, 1024));
    let received = rig.data_out(2, asked.ttt, 0, 512, &[7; 1024], true);
    assert_eq!(status(&received).0, 0);
    assert_eq!(rig.disk[512..1536], [7; 1024]);
    rig.close();
}

/// RFC 7143 7.8, 11.4.7.2: without recovery, a command with damaged data must fail after receiving
/// all of its data.
#[test]
fn damaged_data_fails_command_when_complete() {
    let mut rig = Rig::logged_in(
        "DataDigest=CRC32C\0FirstBurstLength=1024\0MaxOutstandingR2T=2\0MaxBurstLength=1024\0",
    );
    let reject = |received: &[Received]| {
        assert_eq!(rejected(received), RejectReason::DataDigestError);
        assert_eq!(received.len(), 1, "no answer yet");
    };
    let r2ts = |received: &[Received]| -> Vec<Ttt> {
        let r2ts = received.iter().filter_map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => Some(r2t.ttt),
            _ => None,
        });
        r2ts.collect()
    };
    // Digest error while two R2Ts are outstanding and more data must be requested.
    let asked = r2ts(&rig.write(1, 8, &[], true));
    assert_eq!(asked.len(), 2);
    reject(&spoilt(&mut rig, 1, asked[0], 0, &[2; 512], false));
    assert!(
        rig.data_out(1, asked[1], 0, 1024, &[2; 1024], true)
            .is_empty()
    );
    let received = rig.data_out(1, asked[0], 1, 512, &[2; 512], true);
    assert_eq!(sense(&received), (0x0b, 0x47, 5));
    // Missing PDU, for example after a header error.
    let asked = r2ts(&rig.write(2, 2, &[], true));
    let received = rig.data_out(2, asked[0], 1, 512, &[2; 512], true);
    assert_eq!(sense(&received), (0x0b, 0x47, 5));
    // Less and more data than requested.
    for len in [512, 1536] {
        let asked = r2ts(&rig.write(3, 2, &[], true));
        let received = rig.data_out(3, asked[0], 0, 0, &vec![2; len], true);
        assert_eq!(sense(&received), (0x0b, 0x0c, 0x0d), "{len} bytes");
    }
    // Unsolicited data: digest error, and more data than the first burst.
    rig.write(4, 4, &[2; 512], false);
    reject(&spoilt(&mut rig, 4, Ttt::NONE, 0, &[2; 256], false));
    let received = rig.data_out(4, Ttt::NONE, 1, 768, &[2; 256], true);
    assert_eq!(sense(&received), (0x0b, 0x47, 5));
    rig.write(5, 4, &[2; 512], false);
    let received = rig.data_out(5, Ttt::NONE, 0, 512, &[2; 1024], true);
    assert_eq!(sense(&received), (0x0b, 0x0c, 0x0c));
    assert_eq!(status(&rig.read(6, 0, 1)), (0, None));
    rig.close();
}

/// A command with damaged immediate data is sent again using the same CmdSN. The next commands must
/// wait.
#[test]
fn damaged_command_can_be_resent() {
    let mut rig = Rig::logged_in("DataDigest=CRC32C\0ErrorRecoveryLevel=1\0");
    let first = rig.cmd_sn;
    let command = |rig: &Rig, sn| {
        let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let command = scsi_command(sn, sn, &cdb, true, 512);
        rig.bytes_of(&FromInitiator::ScsiCommand(command), &[sn as u8; 512])
    };
    let mut bytes = command(&rig, first);
    *bytes.last_mut().unwrap() ^= 1;
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert_eq!(rejected(&received), RejectReason::DataDigestError);
    let next = command(&rig, first + 1);
    assert!(rig.with(|ch, cx| ch.handle_bytes(cx, &next)).is_empty());
    let again = command(&rig, first);
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &again));
    assert_eq!(received.len(), 2);
    assert_eq!(rig.disk[..512], [first as u8 + 1; 512]);
    rig.close();
}

#[test]
fn tag_in_use_is_rejected() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.read(1, 0, 1);
    assert_eq!(rejected(&rig.read(1, 0, 1)), RejectReason::TaskInProgress);
    assert_eq!(
        rejected(&rig.read(u32::MAX, 0, 1)),
        RejectReason::InvalidPduField
    );
    rig.finish_all_blocks();
    rig.close();
}

#[test]
fn invalid_pdus_are_rejected_within_session() {
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
    rig.close();
}

#[test]
fn functions_respond_after_aborted_tasks() {
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
    ] {
        rig.read(2, 0, 1);
        rig.write(3, 4, &[], true);
        let received = rig.tmf(9, function, 0);
        assert_eq!(tmf_status(&received), TmfStatus::Complete, "{function:?}");
        assert_eq!(received.len(), 1, "no answer to what was aborted");
        assert!(rig.blocks.is_empty());
        // Unit attention after a reset.
        rig.prompt = true;
        rig.command(4, &[0; 6], false, 0, &[], true);
        rig.prompt = false;
    }
    for (function, expected) in [
        (TmfFunction::ClearAca, TmfStatus::NotSupported),
        (
            TmfFunction::TaskReassign,
            TmfStatus::ReassignmentNotSupported,
        ),
        (TmfFunction::QueryTaskSet, TmfStatus::Complete),
        (TmfFunction::TargetColdReset, TmfStatus::NotSupported),
        (TmfFunction::Other(99), TmfStatus::NotSupported),
    ] {
        assert_eq!(
            tmf_status(&rig.tmf(9, function, 0)),
            expected,
            "{function:?}"
        );
    }
    rig.close();
}

/// RFC 7144 6.3: the session is closed with its nexus, after the response and without retention
/// time.
#[test]
fn nexus_reset_closes_session() {
    for level in [0, 2] {
        let mut rig = Rig::logged_in(&format!("ErrorRecoveryLevel={level}\0"));
        rig.prompt = false;
        rig.read(2, 0, 1);
        rig.write(3, 4, &[], true);
        rig.prompt = true;
        let received = rig.tmf(9, TmfFunction::NexusReset, 0);
        assert_eq!(tmf_status(&received), TmfStatus::Complete);
        assert_eq!(received.len(), 1, "no answer to what was aborted");
        assert!(rig.disconnected, "level {level}");
        assert_eq!(rig.elsewhere, [Action::EndOthers]);
        assert_eq!(rig.gate.unit.tasks(), 0);
        rig.close();
    }
}

/// A command waiting for unsolicited data before its response is no longer in the task set.
#[test]
fn aborted_command_has_no_later_response() {
    for function in [
        TmfFunction::AbortTaskSet,
        TmfFunction::ClearTaskSet,
        TmfFunction::LogicalUnitReset,
        TmfFunction::NexusReset,
    ] {
        let mut rig = Rig::logged_in("");
        let unknown = rig.command(5, &[0xc0; 6], true, 1024, &[0; 512], false);
        assert!(unknown.is_empty(), "{unknown:?}");
        assert_eq!(tmf_status(&rig.tmf(9, function, 0)), TmfStatus::Complete);
        let late = rig.data_out(5, Ttt::NONE, 0, 512, &[0; 512], true);
        assert!(late.is_empty(), "{function:?}: {late:?}");
        // We must not wait for data that might never be received.
        assert_eq!(rig.channel.channel().executor().in_flight(), 0);
        rig.close();
    }
}

/// If we receive too many pings, we must stop reading instead of queueing more responses.
#[test]
fn ping_flood_is_bounded() {
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
    rig.close();
}

#[test]
fn silent_initiator_is_pinged_then_dropped() {
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
    assert_eq!(rig.gate.events, [SessionEvent::TimedOut]);
    rig.close();
}

/// A peer that stops during login, or only sends a byte from time to time, must be disconnected.
#[test]
fn login_times_out() {
    let mut rig = Rig::new();
    for second in 0..15 {
        assert!(!rig.disconnected, "{second}");
        rig.with(|ch, cx| ch.handle_bytes(cx, &[0x43]));
        rig.wait(Duration::from_secs(1));
    }
    assert!(rig.disconnected);
    rig.close();
}

/// Sending a byte per second must not keep a connection open without login.
#[test]
fn trickling_login_times_out() {
    let mut rig = Rig::new();
    let text = b"InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t0\0";
    let bytes = rig.login_bytes(text);
    let mut seconds = 0;
    for byte in bytes {
        rig.with(|ch, cx| ch.handle_bytes(cx, &[byte]));
        rig.wait(Duration::from_secs(1));
        if rig.disconnected {
            break;
        }
        seconds += 1;
    }
    assert!((10..20).contains(&seconds), "{seconds} seconds");
    rig.close();
}

#[test]
fn discovery_spans_pdus_and_rejects_commands() {
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
    rig.close();
}

#[test]
fn logout_waits_for_active_commands() {
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
    let in_part = SessionEvent::LoggedOutInPart;
    assert_eq!(rig.gate.events, [in_part, in_part, SessionEvent::LoggedOut]);
    rig.close();
}

#[test]
fn shutdown_requests_logout_first() {
    let mut rig = Rig::logged_in("");
    let until = rig.now + Duration::from_secs(5);
    let received = rig.with(|ch, cx| ch.channel_mut().handle_shutdown(cx, until));
    assert!(matches!(
        received[0].0,
        FromTarget::AsyncMessage(m) if m.event == AsyncEvent::LogoutRequested && m.parameters[2] == 5
    ));
    rig.wait(Duration::from_secs(5));
    assert!(rig.disconnected);
    rig.close();
}

#[test]
fn commands_wait_for_buffers_and_lose_nothing() {
    let mut rig = Rig::logged_in("");
    let hog = rig.pool.allocate(rig.pool.size() as u32).unwrap();
    assert!(rig.write(1, 8, &[5; 4096], true).is_empty());
    assert!(rig.read(2, 0, 8).is_empty());
    assert!(rig.channel.channel().executor().pool_waits() > 0);
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::AbortTask, 2)),
        TmfStatus::Complete
    );
    rig.pool.release(hog);
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    assert_eq!(status(&received), (0, None));
    assert!(rig.disk[..4096].iter().all(|b| *b == 5));
    rig.close();
}

/// While commands are waiting for pool memory, their immediate data is stored outside the pool.
#[test]
fn unsolicited_data_of_waiting_commands_is_bounded() {
    const SESSIONS: usize = 16;
    let mut pool = Pool::new(4 << 20).unwrap();
    let hog = pool.allocate(pool.size() as u32).unwrap();
    let data = vec![5; 64 << 10];
    let mut refused = 0;
    let mut rigs: Vec<_> = (1..=SESSIONS as u64)
        .map(|serial| {
            let mut rig = Rig::numbered(serial);
            rig.log_in("FirstBurstLength=65536\0");
            rig.command(100, &[0; 6], false, 0, &[], true);
            std::mem::swap(&mut rig.pool, &mut pool);
            for tag in 1..=u32::from(WINDOW) {
                let received = rig.write(tag, 128, &data, true);
                let is_full = |(pdu, ..): &Received| {
                    matches!(pdu, FromTarget::ScsiResponse(r) if r.status == 0x28)
                };
                refused += received.iter().filter(|r| is_full(r)).count();
            }
            std::mem::swap(&mut rig.pool, &mut pool);
            rig
        })
        .collect();
    let staged = |rigs: &[Rig]| -> usize {
        let channels = rigs.iter().map(|rig| rig.channel.channel());
        channels
            .map(|channel| channel.executor().staged_memory())
            .sum()
    };
    let most = (4 << 20) + SESSIONS / 2 * (256 << 10);
    let got = staged(&rigs);
    // Each connection keeps the memory for a single burst.
    assert!(got <= most + SESSIONS * data.len(), "{got} bytes");
    assert_eq!(
        pool.staged() + refused * data.len(),
        SESSIONS * 8 * data.len()
    );
    assert!(pool.staged() <= most && refused > 0);
    // Waiting commands are executed, followed by new ones.
    pool.release(hog);
    for rig in &mut rigs {
        std::mem::swap(&mut rig.pool, &mut pool);
        while rig.channel.channel().executor().pool_waits() > 0 {
            let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
            assert_eq!(status(&received), (0, None));
        }
        assert_eq!(status(&rig.write(50, 128, &data, true)), (0, None));
        std::mem::swap(&mut rig.pool, &mut pool);
    }
    assert_eq!(pool.staged(), 0);
    assert!(pool.is_whole());
    rigs.into_iter().for_each(Rig::close);
}

/// Each waiting command could otherwise keep the memory of the longest burst, counted as one block.
#[test]
fn waiting_commands_keep_only_their_data() {
    let mut rig = Rig::new();
    rig.log_in("FirstBurstLength=65536\0");
    rig.command(100, &[0; 6], false, 0, &[], true);
    let burst = vec![5; 64 << 10];
    let hog = rig.pool.allocate(rig.pool.size() as u32).unwrap();
    for tag in 1..=4 {
        // It requires no memory of the pool.
        let most = burst.len() - 1;
        let long = rig.command(50, &[0; 6], true, 64 << 10, &burst[..most], false);
        assert!(long.is_empty());
        let received = rig.data_out(50, Ttt::NONE, 0, most as u32, &[5], true);
        assert_eq!(status(&received).0, 0);
        assert!(rig.write(tag, 1, &burst[..512], true).is_empty());
    }
    let staged = rig.channel.channel().executor().staged_memory();
    assert!(staged <= burst.len() + 4 * 512, "{staged} bytes");
    rig.pool.release(hog);
    rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    rig.close();
}

/// Commands that use all of the memory might be waiting for this one.
#[test]
fn started_command_gets_reserve() {
    let mut rig = Rig::logged_in("");
    let hog = rig.pool.allocate(rig.pool.size() as u32).unwrap();
    assert!(rig.write(1, 8, &[5; 4096], true).is_empty());
    assert!(rig.read(2, 0, 8).is_empty());
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    let (last, ..) = received.last().unwrap();
    assert!(matches!(last, FromTarget::DataIn(pdu) if pdu.status.is_some()));
    assert!(
        rig.channel.channel().executor().pool_waits() > 0,
        "the WRITE"
    );
    rig.pool.release(hog);
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    assert_eq!(status(&received), (0, None));
    rig.close();
}

/// A blocked unit could use the whole reserve, so this can't be the only way to bypass a waiting
/// WRITE.
#[test]
fn started_command_gets_memory_behind_waiting_write() {
    let mut rig = Rig::logged_in("");
    let mut hogs: Vec<_> = std::iter::from_fn(|| rig.pool.allocate(64 << 10)).collect();
    let hung = |unit| Claim {
        owner: Owner(99),
        unit: Some(unit),
    };
    let reserve = (100..).map_while(|unit| rig.pool.grant_reserve(hung(unit), 4096));
    let reserve: Vec<_> = reserve.collect();
    assert!(rig.write(1, 200, &[], true).is_empty());
    assert!(rig.read(2, 0, 8).is_empty());
    rig.pool.release(hogs.pop().unwrap());
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    let (last, ..) = received.last().expect("the READ completes");
    assert!(matches!(last, FromTarget::DataIn(pdu) if pdu.status.is_some()));
    assert_eq!(
        rig.channel.channel().executor().pool_waits(),
        1,
        "the WRITE waits"
    );
    let rest = hogs.into_iter().chain(reserve);
    rest.for_each(|buffer| rig.pool.release(buffer));
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    assert!(matches!(received[..], [(FromTarget::R2t(_), ..)]));
    rig.close();
}

/// Newer commands of the same nexus would wait for this command while using the memory it needs.
#[test]
fn commands_queue_behind_memory_wait() {
    let mut rig = Rig::logged_in("");
    let mut held: Vec<_> = std::iter::from_fn(|| rig.pool.allocate(4096)).collect();
    let page = held.pop().unwrap();
    rig.pool.release(page);
    assert!(rig.write(1, 16, &[], true).is_empty());
    assert!(rig.write(2, 8, &[5; 4096], true).is_empty());
    assert_eq!(rig.pool.free(), 4096, "what is left is for the first one");
    held.into_iter().for_each(|buffer| rig.pool.release(buffer));
    let received = rig.with(|ch, cx| ch.channel_mut().handle_pool(cx));
    assert_eq!(r2t(&received[..1]).offset, 0);
    rig.close();
}

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
                let ack = Snack {
                    kind: SnackKind::DataAck,
                    lun: [0; 8],
                    itt: Itt::NONE,
                    ttt: Ttt(u32::from(ttt)),
                    exp_stat_sn: StatSn(0),
                    begin: u32::from(begin),
                    run: 0,
                };
                rig.send(&FromInitiator::Snack(ack), &[]);
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
            Act::Block(at) if !rig.blocks.is_empty() => {
                let at = usize::from(at) % rig.blocks.len();
                rig.finish_block(at);
                rig.with(|_, _| {});
            }
            Act::Block(_) => {}
            // Go back, where requests are ignored. In the last case, skip ahead as well.
            Act::Skip(n) if kind == 2 && n > 1 => rig.cmd_sn = rig.cmd_sn.wrapping_add(1),
            Act::Skip(n) => rig.cmd_sn = rig.cmd_sn.wrapping_sub(u32::from(n)),
            Act::Wait(n) => {
                rig.wait(Duration::from_secs(u64::from(n)));
            }
            Act::Limit(n) => {
                rig.gate.unit.limits.set(&crate::qos::fixture::limits(n));
                rig.with(|ch, cx| ch.channel_mut().handle_limits(cx));
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

/// The command time is measured until the response is sent, even if it's kept for an initiator that
/// doesn't acknowledge it.
#[test]
fn command_is_counted_when_response_is_sent() {
    for keys in ["", "ErrorRecoveryLevel=1\0"] {
        let mut rig = Rig::logged_in(keys);
        rig.read(1, 0, 1);
        let counts = rig.gate.stats.class(Kind::Read);
        assert_eq!((counts.total.count(), counts.bytes), (1, 512), "{keys:?}");
        assert_eq!(rig.gate.stats.queue_depth(), 0);
        rig.close();
    }
}

/// COMPARE AND WRITE locks its blocks only after its data was received.
#[test]
fn command_awaiting_data_does_not_block_unit() {
    let mut rig = Rig::logged_in("");
    let mut caw = [0; 16];
    caw[0] = 0x89;
    caw[13] = 1;
    // Without immediate data we send an R2T, and there is no response.
    let asked = rig.command(1, &caw, true, 1024, &[], true);
    assert!(matches!(asked[..], [(FromTarget::R2t(_), ..)]));
    for (itt, lba) in [(2, 100), (3, 0)] {
        let received = rig.read(itt, lba, 1);
        assert!(matches!(received[0].0, FromTarget::DataIn(_)));
    }
    let received = rig.write(4, 1, &[7; 512], true);
    assert!(matches!(received[..], [(FromTarget::ScsiResponse(_), ..)]));
    rig.close();
}

#[test]
fn command_without_data_times_out_connection() {
    let mut rig = Rig::logged_in("");
    let asked = rig.write(1, 128, &[], true);
    assert!(matches!(asked[..], [(FromTarget::R2t(_), ..)]));
    assert!(rig.pool.free() < rig.pool.size());
    // This initiator is still connected: it responds to pings.
    for n in 0..10 {
        rig.wait(Duration::from_secs(2));
        rig.nop(1000 + n, b"");
    }
    assert_eq!(rig.pool.free(), rig.pool.size());
    assert!(rig.disconnected);
    assert_eq!(rig.gate.unit.tasks(), 0);
    assert_eq!(rig.gate.events, [SessionEvent::TimedOut]);
}

#[test]
fn slow_link_gets_time_while_data_arrives() {
    let mut rig = Rig::logged_in("");
    let mut asked = rig.write(1, 2, &[], true);
    asked.extend(rig.write(2, 2, &[], true));
    let r2ts: Vec<R2t> = asked
        .into_iter()
        .map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => r2t,
            other => panic!("{other:?}"),
        })
        .collect();
    // The data for the second command is sent after the data for the first one.
    let half = |rig: &mut Rig, r2t: &R2t, sn: u32| {
        rig.wait(Duration::from_secs(10));
        rig.data_out(r2t.itt.0, r2t.ttt, sn, sn * 512, &[1; 512], sn == 1)
    };
    for r2t in &r2ts {
        assert!(half(&mut rig, r2t, 0).is_empty());
        let received = half(&mut rig, r2t, 1);
        assert!(matches!(received[..], [(FromTarget::ScsiResponse(_), ..)]));
    }
    rig.close();
}

/// A reset affects other nexuses when it aborts their commands. It doesn't matter if the connection
/// which requested it is closed before the commands complete.
#[test]
fn reset_notifies_others_after_connection_loss() {
    let mut rig = Rig::logged_in("");
    let port = |name: &str| PortName::Iscsi(name.into());
    let other = NexusId(8);
    let nexus = Nexus {
        initiator: port("iqn.2026-01.a:other,i,0x000000000001"),
        target: TargetPort {
            name: port("iqn.2026-01.a:t0,t,0x0001"),
            relative_id: 1,
            group: 0,
        },
    };
    let unit = Arc::clone(&rig.gate.unit);
    unit.lu.add_nexus(other, nexus);
    let tur = |unit: &Unit| {
        let request = Request {
            nexus: other,
            cdb: &[0; 6],
            opcode: Opcode::of(&[0; 6]),
            expected: Expected::default(),
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        };
        let (_, step) = unit.lu.start(&request);
        let Step::Respond(response) = step else {
            panic!("{step:?}");
        };
        response.parsed_sense().map(|sense| sense.additional)
    };
    assert!(tur(&unit).is_some(), "power on");
    // The other nexus has a command in flight on another channel and worker.
    let foreign = TaskRef {
        worker: 9,
        channel: 9,
        index: TaskIdx(0),
        generation: 1,
    };
    let (key, _) = unit
        .register(
            other,
            NewTask::default(),
            (foreign, LunId::ZERO),
            false,
            None,
        )
        .unwrap();
    let answers = rig.tmf(3, TmfFunction::LogicalUnitReset, 0);
    assert!(answers.is_empty(), "it waits for the other's command");
    rig.with(|ch, cx| ch.channel_mut().handle_disconnected(cx));
    let _ = unit.remove(key);
    assert_eq!(unit.management().resets, 1);
    assert_eq!(tur(&unit), Some(Attention::DeviceReset.sense().additional));
}

/// An initiator without write access must not abort commands of other initiators.
#[test]
fn read_only_lun_refuses_functions_for_others() {
    let mut rig = Rig::logged_in("");
    let unit = Arc::clone(&rig.gate.unit);
    let by = |numbers: &[(u16, bool)]| {
        let mapping = |read_only| Mapping {
            unit: Arc::clone(&rig.gate.unit),
            stats: Arc::clone(&rig.gate.stats),
            read_only,
        };
        let lun = |number: u16| LunId::new(number.into()).unwrap();
        let all = numbers.iter().map(|(n, ro)| (lun(*n), mapping(*ro)));
        Arc::new(LunMap::new(all))
    };
    let (reader, both) = (by(&[(0, true)]), by(&[(0, true), (1, false)]));
    rig.with(|ch, _| ch.channel_mut().handle_luns(reader));
    use TmfFunction::{AbortTaskSet, ClearTaskSet, LogicalUnitReset, TargetWarmReset};
    for (tag, function) in (1..).zip([ClearTaskSet, LogicalUnitReset, TargetWarmReset]) {
        let answers = rig.tmf(tag, function, 0);
        assert_eq!(tmf_status(&answers), TmfStatus::AuthorizationFailed);
    }
    assert_eq!(unit.management().resets, 0);
    let answers = rig.tmf(7, AbortTaskSet, 0);
    assert_eq!(tmf_status(&answers), TmfStatus::Complete);
    // A target reset affects all units with write access.
    rig.with(|ch, _| ch.channel_mut().handle_luns(both));
    let answers = rig.tmf(8, TargetWarmReset, 0);
    assert_eq!(tmf_status(&answers), TmfStatus::Complete);
    assert_eq!(unit.management().resets, 1);
}

/// If a LUN was moved to a different unit, an initiator using this LUN still refers to the previous
/// unit. Until it receives a response which reports the change, a function must only abort its own
/// commands there.
#[test]
fn functions_for_moved_lun_spare_others() {
    let mut rig = Rig::logged_in("");
    let mut config = crate::fixture::unit_config(2048);
    config.identity.serial = "another".into();
    let lu = LogicalUnit::new(config).unwrap();
    let before = Arc::new(Unit::new(UnitIdx(9), Arc::new(lu), 4));
    let unit = Arc::clone(&rig.gate.unit);
    let mapping = |unit: &Arc<Unit>| Mapping {
        unit: Arc::clone(unit),
        stats: Arc::clone(&rig.gate.stats),
        read_only: false,
    };
    let old = LunMap::new([(LunId::ZERO, mapping(&before))]);
    let mut luns = LunMap::new([(LunId::ZERO, mapping(&unit))]);
    luns.follow(&old);
    rig.with(|ch, _| ch.channel_mut().handle_luns(Arc::new(luns)));
    use TmfFunction::{ClearTaskSet, LogicalUnitReset, TargetWarmReset};
    let foreign = TaskRef {
        worker: 9,
        channel: 9,
        index: TaskIdx(0),
        generation: 1,
    };
    let other = NexusId(77);
    let (key, _) = unit
        .register(
            other,
            NewTask::default(),
            (foreign, LunId::ZERO),
            false,
            None,
        )
        .unwrap();
    for (tag, function) in (1..).zip([ClearTaskSet, LogicalUnitReset]) {
        let answers = rig.tmf(tag, function, 0);
        assert_eq!(tmf_status(&answers), TmfStatus::Complete);
    }
    let answers = rig.tmf(3, TargetWarmReset, 0);
    assert_eq!(tmf_status(&answers), TmfStatus::AuthorizationFailed);
    assert_eq!((unit.tasks(), unit.management().resets), (1, 0));
    let _ = unit.remove(key);
    assert_eq!(status(&rig.write(4, 1, &[7; 512], true)), (2, Some(6)));
    let standard = [0x12, 0, 0, 0, 64, 0];
    assert_eq!(
        status(&rig.command(5, &standard, false, 64, &[], true)),
        (0, None)
    );
    let answers = rig.tmf(6, TargetWarmReset, 0);
    assert_eq!(tmf_status(&answers), TmfStatus::AuthorizationFailed);
    let names = [0x12, 1, 0x80, 0, 64, 0];
    assert_eq!(
        status(&rig.command(7, &names, false, 64, &[], true)),
        (0, None)
    );
    let answers = rig.tmf(8, TargetWarmReset, 0);
    assert_eq!(tmf_status(&answers), TmfStatus::Complete);
    assert_eq!(unit.management().resets, 1);
    rig.close();
}

#[test]
fn lost_response_does_not_identify_unit() {
    for was_sent in [true, false] {
        let mut rig = Rig::logged_in("");
        let mut config = crate::fixture::unit_config(2048);
        config.identity.serial = "another".into();
        let lu = Arc::new(LogicalUnit::new(config).unwrap());
        let mapping = |unit: &Arc<Unit>| Mapping {
            unit: Arc::clone(unit),
            stats: Arc::clone(&rig.gate.stats),
            read_only: false,
        };
        let before = mapping(&Arc::new(Unit::new(UnitIdx(9), lu, 4)));
        let mut luns = LunMap::new([(LunId::ZERO, mapping(&rig.gate.unit))]);
        luns.follow(&LunMap::new([(LunId::ZERO, before)]));
        let luns = Arc::new(luns);
        rig.with(|ch, _| ch.channel_mut().handle_luns(Arc::clone(&luns)));
        rig.stalled = true;
        let names = [0x12, 1, 0x80, 0, 64, 0];
        rig.command(7, &names, false, 64, &[], true);
        rig.poll_sent();
        rig.with(|ch, cx| ch.handle_sent(cx, was_sent));
        assert_eq!(luns.expected(0).is_stale(), !was_sent);
        rig.stalled = false;
        rig.close();
    }
}

/// The send queue is also limited in bytes, because the initiator sets the response size.
#[test]
fn large_ping_flood_is_bounded_in_bytes() {
    let mut rig = Rig::logged_in("MaxRecvDataSegmentLength=262144\0");
    rig.stalled = true;
    let data = vec![7; 65536];
    let mut sent = 0;
    while rig.channel.channel().wants_input() {
        rig.nop(1000, &data);
        sent += 1;
    }
    let queued = rig.channel.channel().mover().queued_bytes();
    assert!(queued < MAX_QUEUED_BYTES + data.len(), "{queued} bytes");
    rig.stalled = false;
    let answers = rig.nop(1001, b"");
    assert_eq!(answers.len(), sent + 1);
    rig.close();
}

/// A single receive can contain more requests than the send queue has room for. They must be
/// processed as responses are sent.
#[test]
fn requests_wait_for_response_queue_space() {
    let mut rig = Rig::logged_in("MaxRecvDataSegmentLength=262144\0");
    rig.stalled = true;
    let ping = |rig: &Rig, tag| {
        let nop = nop_out(tag, rig.cmd_sn);
        rig.bytes_of(&FromInitiator::NopOut(nop), &[5; 8192])
    };
    let all: Vec<u8> = (0..100).flat_map(|tag| ping(&rig, tag)).collect();
    assert!(rig.bytes(&all).is_empty());
    assert!(rig.channel.channel().mover().queued_bytes() < MAX_QUEUED_BYTES + 8192);
    assert!(!rig.unread.is_empty());
    rig.stalled = false;
    let mut answers = rig.with(|_, _| {});
    answers.extend(rig.bytes(&[]));
    let tags = answers.iter().map(|(pdu, ..)| match pdu {
        FromTarget::NopIn(nop) => nop.itt.0,
        other => panic!("{other:?}"),
    });
    assert!(tags.eq(0..100), "each is answered, in order");
    rig.close();
}

/// There are many contexts, and they are not needed before login or in discovery sessions.
#[test]
fn contexts_are_created_for_normal_sessions() {
    let rig = Rig::new();
    assert_eq!(rig.channel.channel().memory(), 0);
    rig.close();
    let mut rig = Rig::new();
    rig.login("InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0");
    assert_eq!(rig.channel.channel().phase(), Phase::FullFeature);
    assert_eq!(rig.channel.channel().memory(), 0);
    rig.close();
    let rig = Rig::logged_in("");
    let channel = rig.channel.channel();
    assert_eq!(channel.memory(), channel.config().memory());
    rig.close();
}

#[test]
fn discovery_session_has_idle_and_total_timeouts() {
    for talks in [false, true] {
        let mut rig = Rig::new();
        rig.login("InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0");
        let mut seconds = 0;
        while !rig.disconnected {
            seconds += 1;
            assert!(rig.wait(Duration::from_secs(1)).is_empty(), "no ping");
            if talks && !rig.disconnected {
                rig.nop(1, b"");
            }
        }
        assert_eq!(seconds, if talks { 60 } else { 15 });
        rig.close();
    }
}

/// A request with a CmdSN but without a context only uses a slot in the window while it's
/// processed.
#[test]
fn numbered_text_requests_keep_window_open() {
    let mut rig = Rig::logged_in("");
    for _ in 0..5 * WINDOW {
        let nop = NopOut {
            immediate: false,
            ..nop_out(9, rig.cmd_sn)
        };
        rig.cmd_sn += 1;
        let received = rig.send(&FromInitiator::NopOut(nop), b"ping");
        let numbers = received[0].1;
        assert_eq!(numbers.exp_cmd_sn, CmdSn(rig.cmd_sn));
        let room = numbers.max_cmd_sn.since(numbers.exp_cmd_sn) + 1;
        assert!(room + 1 >= u32::from(WINDOW), "{room} places are left");
    }
    let received = rig.read(1, 0, 1);
    assert_eq!(status(&received).0, 0);
    rig.close();
}

fn send_text(rig: &mut Rig, tag: u32, text: &[u8]) -> Vec<Received> {
    let request = TextRequest {
        immediate: true,
        is_final: true,
        continues: false,
        lun: [0; 8],
        itt: Itt(tag),
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(rig.cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    rig.send(&FromInitiator::TextRequest(request), text)
}

/// RFC 7143 Appendix C: a request can only contain a single SendTargets key. Otherwise, a small
/// request could cause a response of any size.
#[test]
fn targets_are_listed_once_per_request() {
    let mut rig = Rig::new();
    rig.gate.targets = 100;
    rig.login("InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0");
    let once = send_text(&mut rig, 1, b"SendTargets=All\0");
    assert!(matches!(once[..], [(FromTarget::TextResponse(_), ..)]));
    let many = "SendTargets=All\0".repeat(500);
    let answer = send_text(&mut rig, 2, many.as_bytes());
    assert_eq!(rejected(&answer), RejectReason::ProtocolError);
    rig.close();
}

/// RFC 7143 Appendix C: in a normal session, `SendTargets=` refers to the target of the session,
/// and `All` isn't supported. Each request has a single response.
#[test]
fn normal_session_lists_only_its_target() {
    let mut rig = Rig::logged_in("");
    rig.gate.targets = 3;
    for text in ["SendTargets=", "SendTargets=iqn.2026-01.a:t0"] {
        let answer = send_text(&mut rig, 1, text.as_bytes());
        let [(FromTarget::TextResponse(response), _, data)] = &answer[..] else {
            panic!("{answer:?}");
        };
        assert!(response.is_final);
        let (found, _) = riser_scsi::iscsi::name::parse_targets(data).unwrap();
        let names: Vec<_> = found.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["iqn.2026-01.a:t0"]);
    }
    for text in [
        "SendTargets=All",
        "SendTargets=Alle",
        "SendTargets=A",
        "SendTargets=iqn.2026-01.a:t1",
        "SendTargets",
    ] {
        let answer = send_text(&mut rig, 1, text.as_bytes());
        assert_eq!(rejected(&answer), RejectReason::ProtocolError, "{text}");
    }
    // RFC 7143 6.2: we must respond to an unknown key as well.
    let answer = send_text(&mut rig, 1, b"SendTargetsPlease=All\0");
    let [(FromTarget::TextResponse(_), _, data)] = &answer[..] else {
        panic!("{answer:?}");
    };
    assert_eq!(data, b"SendTargetsPlease=NotUnderstood\0");
    assert_eq!(status(&rig.read(1, 0, 1)).0, 0, "the session goes on");
    rig.close();
}

/// RFC 7143 11.4.8, 13.12: ExpDataSN is the number of Data-In PDUs sent, so data already in the
/// queue must not be split differently if the initiator declares a new length.
#[test]
fn new_segment_length_applies_to_later_data() {
    let mut rig = Rig::logged_in("MaxRecvDataSegmentLength=2048\0");
    rig.stalled = true;
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    // This command also sets the W bit, so its status is sent in a separate PDU.
    let command = ScsiCommand {
        reads: true,
        bidi_read_length: Some(2048),
        ..scsi_command(1, rig.cmd_sn, &cdb, true, 512)
    };
    rig.cmd_sn += 1;
    rig.send(&FromInitiator::ScsiCommand(command), &[]);
    send_text(&mut rig, 2, b"MaxRecvDataSegmentLength=512\0");
    rig.stalled = false;
    let received = rig.nop(3, b"");
    let is_data = |(pdu, ..): &&Received| matches!(pdu, FromTarget::DataIn(_));
    let pdus = received.iter().filter(is_data).count();
    let response = received.iter().find_map(|(pdu, ..)| match pdu {
        FromTarget::ScsiResponse(response) => Some(response),
        _ => None,
    });
    assert_eq!(response.unwrap().exp_data_sn as usize, pdus);
    assert_eq!(pdus, 1);
    let pdus = rig.read(4, 0, 4).iter().filter(is_data).count();
    assert_eq!(pdus, 4, "from here on in pieces of 512 bytes");
    rig.close();
}
