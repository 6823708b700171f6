//! Tests for damaged and lost PDUs: data and status that are sent again.

use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, NopOut, RejectReason};
use riser_scsi::iscsi::{Itt, StatSn, Ttt};
use riser_test_peers::pdus::{data_out, nop_out, scsi_command};

use crate::tests::rig;
use crate::tests::rig::tcp::{
    Received, TcpPeer, data_in, r2t, rdata, rejected, resend_data, resend_status, sense, status,
};
use crate::worker::fabrics::Input;

type Rig = rig::Rig<TcpPeer>;

/// Returns an acknowledgment for each status before `exp`.
fn acknowledgment(exp: u32) -> FromInitiator {
    FromInitiator::NopOut(NopOut {
        exp_stat_sn: StatSn(exp),
        ..nop_out(Itt::NONE.0, 0)
    })
}

#[test]
fn sent_data_can_be_retransmitted() {
    let mut rig = Rig::logged_in(
        "MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0ErrorRecoveryLevel=1\0",
    );
    for (at, block) in rig.disks[0].chunks_mut(512).enumerate() {
        block.fill((at as u8).wrapping_add(1));
    }
    let (sns, status_sn) = data_in(&rig.read(1, 0, 5));
    let status_sn = status_sn.expect("a status");
    assert_eq!(sns, [0, 1, 2, 3, 4]);
    let again = rig.send(&resend_data(1, 1, 2), &[]);
    assert_eq!(data_in(&again), (vec![1, 2], None));
    let again = rig.send(&resend_data(1, 3, 0), &[]);
    assert_eq!(data_in(&again), (vec![3, 4], Some(status_sn)));
    let again = rig.send(&resend_status(status_sn, 1), &[]);
    assert_eq!(data_in(&again), (vec![4], Some(status_sn)));
    // Status without data, but with sense data.
    let cdb = [0xff; 6];
    let first = rig.command(2, &cdb, false, 0, &[], true);
    let sn = first[0].1.stat_sn.0;
    assert_eq!(sn, status_sn + 1);
    let again = rig.send(&resend_status(status_sn, 0), &[]);
    assert_eq!(again.len(), 2);
    assert_eq!((&again[1].0, &again[1].2), (&first[0].0, &first[0].2));
    assert_eq!(again[1].1.stat_sn.0, sn);
    // If both values are zero, all unacknowledged PDUs are requested.
    let all = rig.send(&resend_status(0, 0), &[]);
    assert_eq!(all.last().map(|last| last.1.stat_sn.0), Some(sn));
    // Acknowledged PDUs must be discarded.
    assert_eq!(rig.channel.channel().executor().in_flight(), 3);
    rig.send(&acknowledgment(sn), &[]);
    assert_eq!(rig.channel.channel().executor().in_flight(), 1);
    let gone = rig.send(&resend_data(1, 0, 0), &[]);
    assert_eq!(rejected(&gone), RejectReason::ProtocolError);
    let gone = rig.send(&resend_status(status_sn, 1), &[]);
    assert_eq!(rejected(&gone), RejectReason::ProtocolError);
    rig.send(&acknowledgment(sn + 1), &[]);
    assert_eq!(rig.channel.channel().executor().in_flight(), 0);
    // After a logout request, the initiator doesn't have to acknowledge the last PDUs.
    rig.read(3, 0, 1);
    rig.log_out();
    rig.apply(Input::OthersGone);
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
        for (at, block) in rig.disks[0].chunks_mut(512).enumerate() {
            block.fill((at as u8).wrapping_add(1));
        }
        rig.stalled = !was_sent;
        let first = rig.read(1, 0, 5);
        assert_eq!(first.len(), if was_sent { 2 } else { 0 });
        rig.text(7, b"MaxRecvDataSegmentLength=512\0");
        rig.stalled = false;
        let mut received = rig.send(&rdata(1, 77, 0), &[]);
        received.retain(|(pdu, ..)| !matches!(pdu, FromTarget::TextResponse(_)));
        let (reply, numbers, _) = received.pop().expect("response");
        assert_eq!(data_in(&received), (vec![0, 1, 2, 3, 4], None));
        let FromTarget::ScsiResponse(response) = reply else {
            panic!("{reply:?}");
        };
        assert_eq!((response.status, response.exp_data_sn), (0, 5));
        assert_eq!(response.snack_tag, 77);
        if was_sent {
            assert_eq!(numbers.stat_sn, first[1].1.stat_sn, "the same number");
        }
        let again = rig.send(&resend_data(1, 2, 1), &[]);
        assert_eq!(data_in(&again), (vec![2], None));
        let sn = numbers.stat_sn.0;
        let again = rig.send(&resend_status(sn, 1), &[]);
        assert_eq!(again[0].0, reply, "the last one");
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
    let sent = rig.run_actions();
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
    rig.send(&resend_data(1, 0, 0), &[]);
    rig.log_out();
    rig.stalled = false;
    let sent = rig.apply(Input::OthersGone);
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
    let pdu = data_out(tag, ttt, sn, sn * data.len() as u32, is_final);
    let pdu = FromInitiator::DataOut(pdu);
    let mut bytes = rig.bytes_of(&pdu, data);
    *bytes.last_mut().unwrap() ^= 1;
    rig.with(|ch, cx| ch.handle_bytes(cx, &bytes))
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
    let requested = received.iter().find(is_r2t).cloned().expect("an R2T");
    let requested = r2t(&[requested]);
    assert_eq!((requested.offset, requested.len), (512, 512));
    let received = rig.data_out(12, requested.ttt, 0, 512, &[4; 512], true);
    assert_eq!(status(&received).0, 0);
    assert_eq!(rig.disks[0][512..1024], [4; 512]);
    rig.close();
}

#[test]
fn damaged_data_is_requested_again() {
    let mut rig = Rig::logged_in("DataDigest=CRC32C\0ErrorRecoveryLevel=1\0");
    let requested = r2t(&rig.write(1, 4, &[], true));
    assert_eq!(
        (requested.r2t_sn, requested.offset, requested.len),
        (0, 0, 2048)
    );
    rig.data_out(1, requested.ttt, 0, 0, &[1; 512], false);
    let received = spoilt(&mut rig, 1, requested.ttt, 1, &[2; 512], false);
    assert!(
        matches!(received[0].0, FromTarget::Reject(r) if r.reason == RejectReason::DataDigestError)
    );
    let again = r2t(&received);
    assert_eq!((again.r2t_sn, again.offset, again.len), (1, 512, 1536));
    // Any more data for the previous R2T is ignored.
    assert!(
        rig.data_out(1, requested.ttt, 2, 1024, &[9; 512], false)
            .is_empty()
    );
    // A lost R2T is sent again.
    let lost = rig.send(&resend_data(1, 1, 1), &[]);
    assert_eq!(r2t(&lost), again);
    let received = rig.data_out(1, again.ttt, 0, 512, &[3; 1536], true);
    let FromTarget::ScsiResponse(response) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!((response.status, response.exp_data_sn), (0, 2));
    assert_eq!(rig.disks[0][..512], [1; 512]);
    assert_eq!(rig.disks[0][512..2048], [3; 1536]);
    // Same for unsolicited data: the remaining data is requested after the last PDU.
    rig.write(2, 3, &[4; 512], false);
    let received = spoilt(&mut rig, 2, Ttt::NONE, 0, &[5; 512], false);
    assert_eq!(received.len(), 1, "a reject");
    let requested = r2t(&rig.data_out(2, Ttt::NONE, 1, 1024, &[6; 512], true));
    assert_eq!((requested.offset, requested.len), (512, 1024));
    let received = rig.data_out(2, requested.ttt, 0, 512, &[7; 1024], true);
    assert_eq!(status(&received).0, 0);
    assert_eq!(rig.disks[0][512..1536], [7; 1024]);
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
        assert_eq!(received.len(), 1, "no response yet");
    };
    let r2ts = |received: &[Received]| -> Vec<Ttt> {
        let r2ts = received.iter().filter_map(|(pdu, ..)| match pdu {
            FromTarget::R2t(r2t) => Some(r2t.ttt),
            _ => None,
        });
        r2ts.collect()
    };
    // Digest error while two R2Ts are outstanding and more data must be requested.
    let requested = r2ts(&rig.write(1, 8, &[], true));
    assert_eq!(requested.len(), 2);
    reject(&spoilt(&mut rig, 1, requested[0], 0, &[2; 512], false));
    assert!(
        rig.data_out(1, requested[1], 0, 1024, &[2; 1024], true)
            .is_empty()
    );
    let received = rig.data_out(1, requested[0], 1, 512, &[2; 512], true);
    assert_eq!(sense(&received), (0x0b, 0x47, 5));
    // Missing PDU, for example after a header error.
    let requested = r2ts(&rig.write(2, 2, &[], true));
    let received = rig.data_out(2, requested[0], 1, 512, &[2; 512], true);
    assert_eq!(sense(&received), (0x0b, 0x47, 5));
    // Less and more data than requested.
    for len in [512, 1536] {
        let requested = r2ts(&rig.write(3, 2, &[], true));
        let received = rig.data_out(3, requested[0], 0, 0, &vec![2; len], true);
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
    assert_eq!(rig.disks[0][..512], [first as u8 + 1; 512]);
    rig.close();
}
