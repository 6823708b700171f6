//! Scripted tests for a channel with TCP.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{
    AsyncEvent, FromInitiator, FromTarget, LoginStatus, LogoutReason, LogoutStatus, NopOut, R2t,
    RejectReason, ScsiCommand, TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Ttt};
use riser_scsi::opcode::Kind;
use riser_scsi::step::Residual;

use super::{Action, Datamover as _, MAX_QUEUED, MAX_QUEUED_BYTES, Phase};
use crate::pool::{Claim, Owner, Pool};
use crate::stats::SessionEvent;
use crate::tests::rig;
use crate::tests::rig::iscsi::{NAMES, logout, text_request};
use crate::tests::rig::tcp::{
    Received, TcpPeer, WINDOW, r2t, rejected, resend_status, sense, status, tmf_status,
};
use crate::worker::fabrics::Input;
use riser_test_peers::pdus::{data_out, nop_out, scsi_command, tmf_request};

type Rig = rig::Rig<TcpPeer>;

#[test]
fn read_is_sent_in_bursts_with_status() {
    let mut rig =
        Rig::logged_in("MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0");
    rig.disks[0][..2048]
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
    assert_eq!(data, rig.disks[0][..2048]);
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
    let mut reply = Vec::new();
    while let Some(r2t) = (!r2ts.is_empty()).then(|| r2ts.remove(0)) {
        let at = r2t.offset as usize;
        assert!(
            rig.data_out(1, r2t.ttt, 0, r2t.offset, &data[at..at + 512], false)
                .is_empty()
        );
        let offset = r2t.offset + 512;
        reply = rig.data_out(1, r2t.ttt, 1, offset, &data[at + 512..at + 1024], true);
        r2ts.extend(reply.iter().filter_map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => Some(*r2t),
            _ => None,
        }));
    }
    assert_eq!(status(&reply), (0, None));
    let FromTarget::ScsiResponse(response) = reply[0].0 else {
        panic!("{reply:?}");
    };
    assert_eq!(response.exp_data_sn, 3);
    assert_eq!(rig.disks[0][..4096], data);
    rig.close();
}

#[test]
fn data_out_of_order_fails_command() {
    for (sn, offset, len) in [(1, 512, 512), (0, 0, 512), (0, 512, 1024), (0, 1024, 512)] {
        let mut rig = Rig::logged_in("FirstBurstLength=1024\0");
        rig.write(1, 4, &[1; 512], false);
        let received = rig.data_out(1, Ttt::NONE, sn, offset, &vec![2; len], true);
        assert_eq!(status(&received), (2, Some(0x0b)));
        assert!(rig.disks[0].iter().all(|b| *b == 0));
        rig.close();
    }
    let mut rig = Rig::logged_in("");
    let received = rig.write(1, 4, &[], true);
    let FromTarget::R2t(r2t) = received[0].0 else {
        panic!("{received:?}");
    };
    let received = rig.data_out(1, r2t.ttt, 0, 0, &[1; 4096], true);
    assert_eq!(status(&received), (2, Some(0x0b)), "more than requested");
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
    assert!(rig.disconnected && rig.blocks().is_empty());
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
    assert!(rig.disks[0].iter().all(|b| *b == 0));
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
    let pdu = FromInitiator::DataOut(data_out(3, r2t.ttt, 0, 0, true));
    let mut bytes = rig.bytes_of(&pdu, &[9; 512]);
    bytes[60] ^= 1;
    let received = rig.with(|ch, cx| ch.handle_bytes(cx, &bytes));
    assert!(
        matches!(received[0].0, FromTarget::Reject(r) if r.reason == RejectReason::DataDigestError)
    );
    assert_eq!(status(&received), (2, Some(0x0b)));
    assert_eq!(rig.disks[0][0], 7);
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
    assert_eq!(rig.blocks().len(), usize::from(WINDOW));
    assert!(rig.read(50, 0, 1).is_empty());
    assert_eq!(rig.blocks().len(), usize::from(WINDOW), "beyond MaxCmdSN");
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
    assert!(rig.blocks().is_empty());
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
    assert_eq!(rig.disks[0][..512], [3; 512]);
    assert_eq!(rig.disks[0][512..1024], [4; 512]);
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
    let has_response = |tag: u32| {
        received.iter().any(|(pdu, ..)| match pdu {
            FromTarget::ScsiResponse(r) => r.itt.0 == tag,
            FromTarget::DataIn(d) => d.itt.0 == tag && d.status.is_some(),
            FromTarget::TmfResponse(r) => r.itt.0 == tag,
            _ => false,
        })
    };
    assert!(
        has_response(12) && has_response(13) && has_response(14),
        "{received:?}"
    );
    rig.cmd_sn = lost;
    assert!(rig.read(11, 0, 1).is_empty(), "it is over");
    rig.close();
}

#[test]
fn replacing_login_waits_for_old_session() {
    let mut rig = Rig::new();
    rig.gate.waits = true;
    assert!(rig.login(NAMES).is_empty());
    assert_eq!(rig.channel.channel().phase(), Phase::Joining);
    let received = rig.apply(Input::OthersGone);
    assert!(matches!(received[0].0, FromTarget::LoginResponse(_)));
    assert_eq!(status(&rig.read(1, 0, 1)).0, 2, "power on");
    assert_eq!(status(&rig.read(2, 0, 1)).0, 0);
    rig.close();
    // Sending a PDU before the login response is a protocol error.
    let mut rig = Rig::new();
    rig.gate.waits = true;
    rig.login(NAMES);
    rig.nop(1, &[]);
    assert!(rig.disconnected);
    rig.close();
    let mut rig = Rig::new();
    rig.gate.waits = true;
    rig.login(NAMES);
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
    let unknown = rig.send(&logout(LogoutReason::CloseConnection, 3, 9), &[]);
    assert_eq!(status(&unknown), LogoutStatus::CidNotFound);
    // We must not respond before the connection is closed: one of its writes could still be at a
    // device, and would overwrite data that the initiator writes after the response (RFC 7143
    // 11.15).
    rig.gate.others.push(Cid(3));
    let early = rig.send(&logout(LogoutReason::CloseConnection, 3, 9), &[]);
    assert!(early.is_empty(), "{early:?}");
    let gone = rig.apply(Input::OthersGone);
    assert_eq!(status(&gone), LogoutStatus::Closed);
    assert!(rig.log_out().is_empty());
    assert_eq!(rig.elsewhere, [Action::EndOthers]);
    let received = rig.apply(Input::OthersGone);
    assert!(matches!(received[0].0, FromTarget::LogoutResponse(_)));
    assert!(rig.channel.channel().has_logged_out());
    rig.close();
}

#[test]
fn logout_waits_for_pending_connection_logout() {
    let mut rig = Rig::logged_in("MaxConnections=4\0");
    let logout = |tag, cid| logout(LogoutReason::CloseConnection, cid, tag);
    rig.gate.others.push(Cid(3));
    assert!(rig.send(&logout(9, 3), &[]).is_empty());
    let early = rig.send(&logout(10, 0), &[]);
    assert!(early.is_empty(), "{early:?}");
    let received = rig.apply(Input::OthersGone);
    let tag = |one: &Received| match &one.0 {
        FromTarget::LogoutResponse(response) => Some(response.itt),
        _ => None,
    };
    let tags: Vec<_> = received.iter().filter_map(tag).collect();
    assert_eq!(tags, [Itt(9), Itt(10)]);
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
    let received = rig.send(&resend_status(0, 0), &[]);
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
        assert_eq!(received.len(), 1, "no response to an aborted command");
        assert!(rig.blocks().is_empty());
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
        assert_eq!(received.len(), 1, "no response to an aborted command");
        assert!(rig.disconnected, "level {level}");
        assert_eq!(rig.elsewhere, [Action::EndOthers]);
        assert_eq!(rig.units[0].tasks(), 0);
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
    let response = rig.nop(5, b"hello");
    assert_eq!(response[0].2, b"hello");
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
    let bytes = rig.login_bytes(NAMES.as_bytes());
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
        let received = rig.send(&text_request(tag, ttt, rig.cmd_sn), question);
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
    let status_of = |received: &[Received]| match received.last() {
        Some((FromTarget::LogoutResponse(response), ..)) => response.status,
        other => panic!("{other:?}"),
    };
    let other = rig.send(&logout(LogoutReason::CloseConnection, 9, 5), &[]);
    assert_eq!(status_of(&other), LogoutStatus::CidNotFound);
    let remove = rig.send(&logout(LogoutReason::RemoveConnection, 0, 6), &[]);
    assert_eq!(status_of(&remove), LogoutStatus::RecoveryNotSupported);
    assert!(rig.log_out().is_empty());
    assert!(matches!(
        rig.channel.channel().phase(),
        Phase::LoggingOut(_)
    ));
    let received = rig.finish_all_blocks();
    assert_eq!(received.len(), 2, "the read's response, then the logout's");
    assert_eq!(status_of(&received), LogoutStatus::Closed);
    assert!(rig.disconnected);
    let in_part = SessionEvent::LoggedOutInPart;
    assert_eq!(rig.gate.events, [in_part, in_part, SessionEvent::LoggedOut]);
    rig.close();
}

#[test]
fn shutdown_requests_logout_first() {
    let mut rig = Rig::logged_in("");
    let until = rig.now + Duration::from_secs(5);
    let received = rig.apply(Input::Shutdown(until));
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
    let received = rig.apply(Input::Pool);
    assert_eq!(status(&received), (0, None));
    assert!(rig.disks[0][..4096].iter().all(|b| *b == 5));
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
            let received = rig.apply(Input::Pool);
            assert_eq!(status(&received), (0, None));
        }
        assert_eq!(status(&rig.write(50, 128, &data, true)), (0, None));
        std::mem::swap(&mut rig.pool, &mut pool);
    }
    assert_eq!(pool.staged(), 0);
    assert!(pool.is_whole());
    rigs.iter_mut().for_each(Rig::close);
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
    rig.apply(Input::Pool);
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
    let received = rig.apply(Input::Pool);
    let (last, ..) = received.last().expect("the READ completes");
    assert!(matches!(last, FromTarget::DataIn(pdu) if pdu.status.is_some()));
    assert_eq!(
        rig.channel.channel().executor().pool_waits(),
        1,
        "the WRITE waits"
    );
    let rest = hogs.into_iter().chain(reserve);
    rest.for_each(|buffer| rig.pool.release(buffer));
    let received = rig.apply(Input::Pool);
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
    let received = rig.apply(Input::Pool);
    assert_eq!(r2t(&received[..1]).offset, 0);
    rig.close();
}

/// The command time is measured until the response is sent, even if it's kept for an initiator that
/// doesn't acknowledge it.
#[test]
fn command_is_counted_when_response_is_sent() {
    for keys in ["", "ErrorRecoveryLevel=1\0"] {
        let mut rig = Rig::logged_in(keys);
        rig.read(1, 0, 1);
        let counts = rig.stats[0].class(Kind::Read);
        assert_eq!((counts.total.count(), counts.bytes), (1, 512), "{keys:?}");
        assert_eq!(rig.stats[0].queue_depth(), 0);
        rig.close();
    }
}

#[test]
fn slow_link_gets_time_while_data_arrives() {
    let mut rig = Rig::logged_in("");
    let mut requested = rig.write(1, 2, &[], true);
    requested.extend(rig.write(2, 2, &[], true));
    let r2ts: Vec<R2t> = requested
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
    let responses = rig.nop(1001, b"");
    assert_eq!(responses.len(), sent + 1);
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
    let mut responses = rig.run_actions();
    responses.extend(rig.bytes(&[]));
    let tags = responses.iter().map(|(pdu, ..)| match pdu {
        FromTarget::NopIn(nop) => nop.itt.0,
        other => panic!("{other:?}"),
    });
    assert!(tags.eq(0..100), "each gets a response, in order");
    rig.close();
}

/// There are many contexts, and they are not needed before login or in discovery sessions.
#[test]
fn contexts_are_created_for_normal_sessions() {
    let mut rig = Rig::new();
    assert_eq!(rig.channel.channel().memory(), 0);
    rig.close();
    let mut rig = Rig::new();
    rig.login("InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0");
    assert_eq!(rig.channel.channel().phase(), Phase::FullFeature);
    assert_eq!(rig.channel.channel().memory(), 0);
    rig.close();
    let mut rig = Rig::logged_in("");
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

/// RFC 7143 Appendix C: a request can only contain a single SendTargets key. Otherwise, a small
/// request could cause a response of any size.
#[test]
fn targets_are_listed_once_per_request() {
    let mut rig = Rig::new();
    rig.gate.targets = 100;
    rig.login("InitiatorName=iqn.2026-01.a:i\0SessionType=Discovery\0");
    let once = rig.text(1, b"SendTargets=All\0");
    assert!(matches!(once[..], [(FromTarget::TextResponse(_), ..)]));
    let many = "SendTargets=All\0".repeat(500);
    let response = rig.text(2, many.as_bytes());
    assert_eq!(rejected(&response), RejectReason::ProtocolError);
    rig.close();
}

/// RFC 7143 Appendix C: in a normal session, `SendTargets=` refers to the target of the session,
/// and `All` isn't supported. Each request has a single response.
#[test]
fn normal_session_lists_only_its_target() {
    let mut rig = Rig::logged_in("");
    rig.gate.targets = 3;
    for text in ["SendTargets=", "SendTargets=iqn.2026-01.a:t0"] {
        let reply = rig.text(1, text.as_bytes());
        let [(FromTarget::TextResponse(response), _, data)] = &reply[..] else {
            panic!("{reply:?}");
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
        let reply = rig.text(1, text.as_bytes());
        assert_eq!(rejected(&reply), RejectReason::ProtocolError, "{text}");
    }
    // RFC 7143 6.2: we must respond to an unknown key as well.
    let reply = rig.text(1, b"SendTargetsPlease=All\0");
    let [(FromTarget::TextResponse(_), _, data)] = &reply[..] else {
        panic!("{reply:?}");
    };
    assert_eq!(data, b"SendTargetsPlease=NotUnderstood\0");
    assert_eq!(status(&rig.read(1, 0, 1)).0, 0, "the session continues");
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
    rig.text(2, b"MaxRecvDataSegmentLength=512\0");
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
