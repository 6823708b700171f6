//! Tests for connection recovery: a session with two connections, where the first one is lost.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, FromInitiator, FromTarget, LogoutReason, LogoutResponse, LogoutStatus, R2t,
    TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Ttt};
use riser_scsi::nexus::NexusId;
use riser_scsi::task::TaskManagement;
use riser_testkit::{fuzz, one_of};

use super::{Action, Phase, TaskState};
use crate::fabric::TaskAction;
use crate::tests::rig;
use crate::tests::rig::iscsi::logout;
use crate::tests::rig::tcp::{
    Received, TcpPeer, WINDOW, data_ack, data_in, r2t, status, tmf_status,
};
use crate::worker::fabrics::Input;
use riser_test_peers::pdus::tmf_request;

type Rig = rig::Rig<TcpPeer>;

pub(super) const LEVEL_2: &str = "ErrorRecoveryLevel=2\0MaxConnections=4\0MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0\
     FirstBurstLength=1024\0MaxOutstandingR2T=2\0";

/// Default values of DefaultTime2Wait and DefaultTime2Retain, because the keys aren't sent.
pub(super) const RETENTION: Duration = Duration::from_secs(22);

pub(super) struct Duo {
    pub(super) first: Rig,
    pub(super) second: Rig,
}

fn logout_response(received: &[Received]) -> LogoutResponse {
    match received {
        [(FromTarget::LogoutResponse(response), ..)] => *response,
        other => panic!("{other:?}"),
    }
}

impl Duo {
    pub(super) fn new() -> Self {
        Self::with_keys(LEVEL_2)
    }

    fn with_keys(keys: &str) -> Self {
        Self::of_window(1 << 20, keys)
    }

    pub(super) fn of_window(window: u32, keys: &str) -> Self {
        let mut first = Rig::with_window(window, keys);
        for (at, block) in first.disks[0].chunks_mut(512).enumerate() {
            block.fill((at as u8).wrapping_add(1));
        }
        let second = Rig::joined(&first, 2, keys);
        Self { first, second }
    }

    /// Drops the first connection and logs it out for recovery.
    pub(super) fn cut(&mut self) {
        self.lose();
        self.detach();
    }

    fn lose(&mut self) {
        self.first.apply(Input::Disconnected);
        assert_eq!(self.first.channel.channel().phase(), Phase::CleanupWait);
        assert!(self.first.elsewhere.contains(&Action::Lost));
    }

    fn detach(&mut self) {
        self.first.with(|ch, cx| ch.channel_mut().handle_detach(cx));
        assert!(self.first.elsewhere.contains(&Action::Detached));
    }

    /// Delivers messages between the connections. Returns the PDUs sent by the second one.
    fn route(&mut self) -> Vec<Received> {
        let mut received = Vec::new();
        loop {
            let mut actions = std::mem::take(&mut self.first.elsewhere);
            actions.append(&mut self.second.elsewhere);
            let mut reassigned = std::mem::take(&mut self.first.reassigned);
            reassigned.append(&mut self.second.reassigned);
            if actions.is_empty() && reassigned.is_empty() {
                return received;
            }
            for (to, moved) in reassigned {
                let rig = self.rig(to.channel);
                let sent = rig.with(|ch, cx| ch.channel_mut().handle_reassigned(cx, to, moved));
                received.extend(sent);
            }
            for action in actions {
                received.extend(self.tell(action));
            }
        }
    }

    fn rig(&mut self, channel: u64) -> &mut Rig {
        if channel == 1 {
            &mut self.first
        } else {
            &mut self.second
        }
    }

    fn tell(&mut self, action: Action) -> Vec<Received> {
        let (channel, input) = match action {
            Action::Reassign(reassign) => {
                let rig = self.rig(reassign.task.channel);
                return rig.with(|ch, cx| ch.channel_mut().handle_reassign(cx, reassign));
            }
            Action::Task(TaskAction::AbortTask { task, watcher }) => {
                (task.channel, Input::AbortTask { task, watcher })
            }
            Action::Task(TaskAction::TaskGone(task)) => (task.channel, Input::TaskGone(task)),
            Action::Task(TaskAction::StartTask(task)) => (task.channel, Input::StartTask(task)),
            Action::TakeTurn(conn) => (conn.serial, Input::Turn),
            _ => return Vec::new(),
        };
        self.rig(channel).apply(input)
    }

    pub(super) fn reassign(&mut self, tag: u32, exp_data_sn: u32) -> Vec<Received> {
        let request = TmfRequest {
            exp_data_sn,
            ..tmf_request(900, self.second.cmd_sn, TmfFunction::TaskReassign, tag)
        };
        let mut received = self.second.send(&FromInitiator::TmfRequest(request), &[]);
        received.extend(self.route());
        received
    }

    /// Responds to the R2Ts for task 1 on the second connection until there are no more. Returns
    /// the R2Ts and the last PDUs received.
    fn send_requested_data(
        &mut self,
        mut received: Vec<Received>,
        data: &[u8],
    ) -> (Vec<R2t>, Vec<Received>) {
        let mut all = Vec::new();
        loop {
            let requested = received.iter().filter_map(|(pdu, ..)| match pdu {
                FromTarget::R2t(r2t) => Some(*r2t),
                _ => None,
            });
            let requested: Vec<R2t> = requested.collect();
            if requested.is_empty() {
                return (all, received);
            }
            received.clear();
            for r2t in &requested {
                let part = &data[r2t.offset as usize..(r2t.offset + r2t.len) as usize];
                received.extend(self.second.data_out(1, r2t.ttt, 0, r2t.offset, part, true));
            }
            all.extend(requested);
        }
    }

    /// Same as [`Duo::reassign`] for an existing command. Returns the PDUs after the response.
    pub(super) fn reassigned(&mut self, tag: u32, exp_data_sn: u32) -> Vec<Received> {
        let mut received = self.reassign(tag, exp_data_sn);
        let response = received.remove(0);
        assert_eq!(tmf_status(&[response]), TmfStatus::Complete);
        received
    }

    /// Aborts all commands of the unit with CLEAR TASK SET from another nexus.
    fn clear_by_another(&mut self) {
        let unit = Arc::clone(&self.first.units[0]);
        let ended = unit.manage(NexusId(8), TaskManagement::ClearTaskSet);
        for task in ended.aborted {
            self.rig(task.channel).abort_by_other(task);
        }
    }

    fn refusal(&mut self, tag: u32) -> TmfStatus {
        let received = self.reassign(tag, 0);
        assert_eq!(received.len(), 1);
        tmf_status(&received)
    }

    pub(super) fn close(mut self) {
        self.first.apply(Input::Terminate);
        self.first.finish_all_blocks();
        self.route();
        self.second.apply(Input::Terminate);
        self.second.finish_all_blocks();
        self.route();
        for rig in [&mut self.first, &mut self.second] {
            rig.apply(Input::Disconnected);
            assert!(rig.released);
            assert_eq!(rig.pool.free(), rig.pool.size());
            assert_eq!(rig.units[0].tasks(), 0);
        }
        let window = self.second.gate.window.take().unwrap();
        let (exp, max) = window.bounds();
        assert_eq!(max.since(exp), u32::from(WINDOW) - 1);
    }
}

/// RFC 7143 7.2.2: unacknowledged data and status must be sent again, after the response to the
/// function.
#[test]
fn read_is_resent_on_new_connection() {
    for (exp, expected) in [
        (0, vec![0, 1, 2, 3, 4]),
        (3, vec![3, 4]),
        // If the value is too large, it must be ignored (RFC 7143 11.5.6).
        (6, vec![0, 1, 2, 3, 4]),
    ] {
        let mut duo = Duo::new();
        duo.first.read(1, 0, 5);
        duo.cut();
        let received = duo.reassigned(1, exp);
        let (sns, status_sn) = data_in(&received);
        assert_eq!(sns, expected);
        assert!(status_sn.is_some());
        let left = duo.first.channel.channel().executor().in_flight();
        assert_eq!(left, 1, "what was before it");
        duo.close();
    }
    // If all data is acknowledged, only the status is sent.
    let mut duo = Duo::new();
    duo.first.read(1, 0, 5);
    duo.cut();
    let received = duo.reassigned(1, 5);
    let FromTarget::ScsiResponse(response) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!((received.len(), response.exp_data_sn), (1, 5));
    duo.close();
}

/// RFC 7143 7.2.2: if the new connection has a different PDU size, it's used starting with the next
/// byte.
#[test]
fn read_continues_with_new_pdu_size() {
    let mut duo = Duo::new();
    duo.first.read(1, 0, 5);
    duo.cut();
    let keys = LEVEL_2.replace("SegmentLength=512", "SegmentLength=4096");
    duo.second = Rig::joined(&duo.first, 2, &keys);
    let received = duo.reassigned(1, 3);
    let FromTarget::DataIn(pdu) = received[0].0 else {
        panic!("{received:?}");
    };
    assert_eq!((pdu.data_sn, pdu.offset), (3, 1536));
    assert_eq!(received[0].2, [4; 512], "up to the end of the burst");
    assert_eq!(received[1].2, [5; 512]);
    assert_eq!(status(&received).0, 0);
    duo.close();
}

/// RFC 7143 7.2.2: missing data is requested with new R2Ts, starting at the number expected by the
/// initiator.
#[test]
fn write_requests_missing_data() {
    let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
    for (exp, first_sn) in [(2, 2), (1, 1), (0, 0), (9, 2)] {
        let mut duo = Duo::new();
        let requested = duo.first.write(1, 8, &data[..512], true);
        let requested: Vec<R2t> = requested
            .iter()
            .map(|one| r2t(std::slice::from_ref(one)))
            .collect();
        assert_eq!(requested.len(), 2);
        // Half of the first R2T was received, and all of the second one after a gap.
        let part = |from: u32, len: u32| &data[from as usize..(from + len) as usize];
        let (a, b) = (requested[0], requested[1]);
        duo.first
            .data_out(1, a.ttt, 0, a.offset, part(a.offset, 512), false);
        duo.first
            .data_out(1, b.ttt, 0, b.offset, part(b.offset, 512), false);
        duo.cut();
        let received = duo.reassigned(1, exp);
        let (requested, received) = duo.send_requested_data(received, &data);
        assert_eq!(
            requested[0].offset, 1024,
            "after the received contiguous data"
        );
        let sns: Vec<_> = requested.iter().map(|r2t| r2t.r2t_sn).collect();
        assert_eq!(sns, [first_sn, first_sn + 1, first_sn + 2]);
        let FromTarget::ScsiResponse(response) = received[0].0 else {
            panic!("{received:?}");
        };
        assert_eq!((response.status, response.exp_data_sn), (0, first_sn + 3));
        assert_eq!(duo.second.disks[0][..4096], data);
        duo.close();
    }
}

/// Data after an error is dropped even if the R2T is complete, so it isn't in the buffer.
#[test]
fn data_dropped_after_error_is_requested_again() {
    let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
    for is_whole in [false, true] {
        let mut duo = Duo::new();
        let requested = duo.first.write(1, 8, &data[..512], true);
        let [a, b] = [0, 1].map(|i| r2t(&requested[i..=i]));
        duo.first
            .data_out(1, b.ttt, 0, b.offset + 512, &[9; 512], false);
        let len = if is_whole { a.len } else { 512 };
        let part = &data[a.offset as usize..(a.offset + len) as usize];
        duo.first.data_out(1, a.ttt, 0, a.offset, part, is_whole);
        duo.cut();
        let received = duo.reassigned(1, 0);
        let (requested, received) = duo.send_requested_data(received, &data);
        assert_eq!(requested[0].offset, 512);
        assert_eq!(status(&received).0, 0);
        assert_eq!(duo.second.disks[0][..4096], data);
        duo.close();
    }
}

/// If a piece of a long read isn't acknowledged, it must be sent again before the remaining data.
/// The same applies if the connection is lost again with the last piece.
#[test]
fn split_read_resends_missing_data() {
    // ExpDataSN and the expected PDUs. Acknowledging the previous piece means that all of it was
    // received.
    for (exp, piece) in [(0, vec![4, 5, 6, 7]), (6, vec![6, 7]), (8, vec![])] {
        let mut duo = Duo::of_window(2048, LEVEL_2);
        let first = duo.first.read(1, 0, 9);
        let sent = duo.first.send(&ack(&first, 4), &[]);
        assert_eq!(data_in(&sent).0, [4, 5, 6, 7]);
        duo.cut();
        let mut received = duo.reassigned(1, exp);
        let mut sns = data_in(&received).0;
        if !piece.is_empty() {
            assert_eq!(sns, piece);
            let last = duo.second.send(&ack(&received, 8), &[]);
            sns = data_in(&last).0;
            received = last;
        }
        assert_eq!(sns, [8]);
        assert_eq!(status(&received).0, 0);
        duo.close();
    }
    // Last piece and its status.
    let mut duo = Duo::of_window(2048, LEVEL_2);
    let first = duo.first.read(1, 0, 6);
    let last = duo.first.send(&ack(&first, 4), &[]);
    assert_eq!(data_in(&last).0, [4, 5]);
    duo.cut();
    let received = duo.reassigned(1, 0);
    assert_eq!(data_in(&received).0, [4, 5]);
    assert_eq!(status(&received).0, 0);
    duo.close();
}

/// Acknowledges the Data-In PDUs before `begin`, as requested by the last one.
fn ack(received: &[Received], begin: u32) -> FromInitiator {
    let Some((FromTarget::DataIn(pdu), ..)) = received.last() else {
        panic!("{received:?}");
    };
    assert!(pdu.acknowledge);
    data_ack(pdu.ttt, begin)
}

#[test]
fn split_write_requests_missing_data() {
    write_in_pieces(false);
}

/// The command keeps its place in the order, so commands that use the memory may be waiting for it.
#[test]
fn split_write_continues_under_memory_pressure() {
    write_in_pieces(true);
}

fn write_in_pieces(starved: bool) {
    let data: Vec<u8> = (0..4608).map(|i| (i % 251) as u8).collect();
    let part = |from: u32, len: u32| &data[from as usize..(from + len) as usize];
    let mut duo = Duo::of_window(2048, LEVEL_2);
    let mut received = duo.first.write(1, 9, &data[..512], true);
    // The first piece, and half a burst of the second piece.
    for expected in [512, 1536] {
        let requested = r2t(&received);
        assert_eq!(requested.offset, expected);
        received.remove(0);
        let data = part(requested.offset, requested.len);
        received.extend(
            duo.first
                .data_out(1, requested.ttt, 0, requested.offset, data, true),
        );
    }
    let requested = r2t(&received);
    assert_eq!((requested.r2t_sn, requested.offset), (2, 2048));
    let sent = duo
        .first
        .data_out(1, requested.ttt, 0, 2048, part(2048, 512), false);
    assert!(sent.is_empty());
    let first_disk = duo.first.disks[0].clone();
    duo.cut();
    duo.second.disks[0] = first_disk;
    let hog = starved.then(|| duo.second.pool.allocate(4 << 20).unwrap());
    let mut received = duo.reassigned(1, 4);
    if let Some(hog) = hog {
        assert!(received.is_empty());
        received = duo.second.apply(Input::Pool);
        duo.second.pool.release(hog);
    }
    let mut offsets = Vec::new();
    while let Some(at) = received
        .iter()
        .position(|(pdu, ..)| matches!(pdu, FromTarget::R2t(_)))
    {
        let requested = r2t(&[received.remove(at)]);
        offsets.push((requested.r2t_sn, requested.offset));
        let data = part(requested.offset, requested.len);
        received.extend(
            duo.second
                .data_out(1, requested.ttt, 0, requested.offset, data, true),
        );
    }
    assert_eq!(offsets, [(4, 2560), (5, 3584), (6, 4096)]);
    assert_eq!(status(&received).0, 0);
    assert_eq!(duo.second.disks[0][..4608], data);
    duo.close();
}

/// Other initiators may be waiting for a command that is split into pieces. When it's reassigned,
/// we must keep the time it has already used, including the time without a connection.
#[test]
fn reassigned_command_keeps_its_time_limit() {
    let step = Duration::from_secs(10);
    let send_data = |rig: &mut Rig, requested: &[Received]| {
        let mut received = Vec::new();
        for (pdu, ..) in requested {
            let FromTarget::R2t(r2t) = pdu else {
                panic!("{pdu:?}");
            };
            let data = vec![1; r2t.len as usize];
            received.extend(rig.data_out(1, r2t.ttt, 0, r2t.offset, &data, true));
        }
        received
    };
    let mut duo = Duo::of_window(2048, LEVEL_2);
    let requested = duo.first.write(1, 255, &[], true);
    let mut requested = send_data(&mut duo.first, &requested);
    // The limit is 120 seconds starting with the second piece. We use 60 here, and 40 before it's
    // reassigned.
    for _ in 0..6 {
        duo.first.wait(step);
        requested = send_data(&mut duo.first, &requested);
    }
    duo.lose();
    duo.first.wait(2 * step);
    duo.detach();
    duo.first.wait(2 * step);
    duo.second.now = duo.first.now;
    let mut requested = duo.reassigned(1, 0);
    duo.second.wait(step);
    requested = send_data(&mut duo.second, &requested);
    assert!(!requested.is_empty() && !duo.second.disconnected);
    // The transferred data adds a few milliseconds.
    duo.second.wait(step + Duration::from_secs(1));
    assert!(duo.second.disconnected);
    duo.close();
}

/// Unsolicited data that wasn't received must be requested.
#[test]
fn lost_unsolicited_data_is_requested() {
    let mut duo = Duo::new();
    assert!(duo.first.write(1, 2, &[7; 512], false).is_empty());
    duo.cut();
    let requested = r2t(&duo.reassigned(1, 0));
    assert_eq!(
        (requested.r2t_sn, requested.offset, requested.len),
        (0, 512, 512)
    );
    let received = duo
        .second
        .data_out(1, requested.ttt, 0, 512, &[8; 512], true);
    assert_eq!(status(&received).0, 0);
    assert_eq!(duo.second.disks[0][..512], [7; 512]);
    assert_eq!(duo.second.disks[0][512..1024], [8; 512]);
    duo.close();
}

/// Sense data must not be lost with the connection, and must not be created again.
#[test]
fn status_without_data_is_resent() {
    let mut duo = Duo::new();
    let before = duo.first.command(1, &[0xff; 6], false, 0, &[], true);
    duo.cut();
    let again = duo.reassigned(1, 0);
    assert_eq!((&before[0].0, &before[0].2), (&again[0].0, &again[0].2));
    duo.close();
}

/// A command at a device continues, and is handed over when it's complete.
#[test]
fn active_command_is_handed_over_on_completion() {
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 2);
    duo.first.write(2, 1, &[9; 512], true);
    duo.cut();
    assert!(duo.reassigned(1, 0).is_empty());
    assert!(duo.reassigned(2, 0).is_empty());
    assert!(duo.first.finish_all_blocks().is_empty(), "nobody is there");
    let received = duo.route();
    assert_eq!(received.len(), 3);
    let (sns, _) = data_in(&received[..2]);
    assert_eq!(sns, [0, 1]);
    assert_eq!(status(&received[2..]).0, 0);
    assert_eq!(duo.first.disks[0][..512], [9; 512]);
    duo.close();
}

/// RFC 7143 11.6.1.
#[test]
fn refusals_say_why() {
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 1);
    duo.first.write(2, 4, &[], true);
    assert_eq!(duo.refusal(77), TmfStatus::TaskDoesNotExist);
    assert_eq!(duo.refusal(1), TmfStatus::TaskStillAllegiant, "alive");
    duo.lose();
    assert_eq!(duo.refusal(1), TmfStatus::TaskStillAllegiant, "no logout");
    duo.detach();
    assert_eq!(r2t(&duo.reassigned(2, 0)).len, 1024);
    assert_eq!(duo.refusal(2), TmfStatus::TaskStillAllegiant, "it is ours");
    duo.reassigned(1, 0);
    assert_eq!(duo.refusal(1), TmfStatus::TaskStillAllegiant, "on its way");
    duo.close();
    let mut duo = Duo::with_keys("ErrorRecoveryLevel=1\0MaxConnections=4\0");
    duo.first.write(2, 4, &[], true);
    assert_eq!(duo.refusal(2), TmfStatus::ReassignmentNotSupported);
    duo.close();
}

/// RFC 7143 7.6: if a command isn't reassigned, it's aborted after Time2Retain.
#[test]
fn unclaimed_commands_are_aborted_after_time2retain() {
    // The time starts when the connection is lost, or with the logout if there is one.
    for logs_out in [false, true] {
        let mut duo = Duo::new();
        duo.first.write(1, 4, &[], true);
        duo.first.read(2, 0, 1);
        duo.lose();
        if logs_out {
            duo.first.wait(Duration::from_secs(10));
            duo.detach();
        }
        duo.first.wait(RETENTION - Duration::from_secs(1));
        assert!(!duo.first.released);
        duo.first.wait(Duration::from_secs(1));
        assert!(duo.first.released);
        assert_eq!(duo.refusal(1), TmfStatus::TaskDoesNotExist);
        assert_eq!(duo.refusal(2), TmfStatus::TaskDoesNotExist);
        duo.close();
    }
    // A command that was claimed in time must be handed over.
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 1);
    duo.cut();
    assert!(duo.reassigned(1, 0).is_empty());
    duo.first.wait(RETENTION);
    duo.first.finish_all_blocks();
    assert_eq!(data_in(&duo.route()).0, [0]);
    duo.first.wait(Duration::from_secs(1));
    assert!(duo.first.released);
    duo.close();
}

/// With DefaultTime2Retain=0, no commands are kept.
#[test]
fn zero_time2retain_keeps_no_commands() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=2\0DefaultTime2Retain=0\0");
    rig.write(1, 4, &[], true);
    rig.apply(Input::Disconnected);
    assert!(rig.released);
    rig.close();
}

/// Kept commands must not delay commands that are waiting for pool memory.
#[test]
fn kept_commands_are_dropped_for_memory_waiters() {
    let mut duo = Duo::new();
    duo.first.read(1, 0, 4);
    duo.first.write(2, 4, &[], true);
    duo.first.command(3, &[0; 6], false, 0, &[], true);
    duo.cut();
    assert!(duo.first.pool.free() < duo.first.pool.size());
    duo.first.apply(Input::Pressure);
    assert_eq!(duo.first.pool.free(), duo.first.pool.size());
    assert_eq!(duo.refusal(1), TmfStatus::TaskDoesNotExist);
    assert_eq!(duo.refusal(2), TmfStatus::TaskDoesNotExist);
    // Commands without memory are kept.
    assert_eq!(status(&duo.reassigned(3, 0)).0, 0);
    duo.close();
}

/// If a connection closes while it has the next function in its queue, the requests after it must
/// continue.
#[test]
fn closing_connection_passes_its_turn() {
    type End = fn(&mut Rig);
    let ends: [End; 2] = [
        |rig| {
            rig.with(|ch, cx| ch.channel_mut().close(cx.now));
        },
        |rig| {
            rig.apply(Input::Terminate);
        },
    ];
    for end in ends {
        let mut duo = Duo::with_keys("MaxConnections=4\0");
        let first = duo.second.cmd_sn;
        duo.first.cmd_sn = first + 1;
        let kept = duo.first.tmf(50, TmfFunction::AbortTaskSet, u32::MAX);
        assert!(kept.is_empty());
        duo.second.read(1, 0, 1);
        assert!(duo.second.read(2, 0, 1).is_empty(), "behind the function");
        // The first connection is closed before it is notified.
        duo.second.elsewhere.clear();
        end(&mut duo.first);
        let received = duo.route();
        assert_eq!(status(&received).0, 0);
        duo.close();
    }
}

/// A function must find a command while it's kept, while it's being handed over, and after that.
#[test]
fn functions_reach_reassigned_commands() {
    let abort = |duo: &mut Duo, tag| {
        let mut received = duo.second.tmf(50, TmfFunction::AbortTask, tag);
        received.extend(duo.route());
        received
    };
    let mut duo = Duo::new();
    duo.first.write(1, 4, &[], true);
    duo.cut();
    assert_eq!(tmf_status(&abort(&mut duo, 1)), TmfStatus::Complete);
    assert_eq!(duo.refusal(1), TmfStatus::TaskDoesNotExist);
    // While it's being handed over, the response must wait.
    duo.first.prompt = false;
    duo.close();
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 1);
    duo.cut();
    duo.reassigned(1, 0);
    assert!(abort(&mut duo, 1).is_empty(), "the device has it still");
    duo.first.finish_all_blocks();
    assert_eq!(tmf_status(&duo.route()), TmfStatus::Complete);
    duo.close();
    // Using its previous name, if this was read before the command moved.
    let mut duo = Duo::new();
    duo.first.write(1, 4, &[], true);
    duo.cut();
    let stale = duo.second.gate.window.as_ref().unwrap().tagged(Itt(1));
    duo.reassigned(1, 0);
    let watcher = stale.unwrap();
    let task = stale.unwrap();
    duo.first.apply(Input::AbortTask { task, watcher });
    assert!(matches!(
        duo.first.elsewhere[..],
        [Action::Task(TaskAction::AbortTask { task, .. })] if task.channel == 2
    ));
    duo.close();
    // Using its unit.
    let mut duo = Duo::new();
    duo.first.write(1, 4, &[], true);
    duo.cut();
    duo.reassigned(1, 0);
    let mut received = duo.second.tmf(50, TmfFunction::LogicalUnitReset, 0);
    received.extend(duo.route());
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    assert_eq!(duo.second.units[0].tasks(), 0);
    duo.close();
}

/// If a command was aborted by another nexus, and the initiator then aborts it on another
/// connection, we must not send a response.
#[test]
fn abort_on_other_connection_suppresses_response() {
    for is_first in [true, false] {
        let mut duo = Duo::new();
        assert!(duo.first.write(1, 4, &[7; 512], false).is_empty());
        let function = TaskManagement::ClearTaskSet;
        let unit = Arc::clone(&duo.first.units[0]);
        let task = unit.manage(NexusId(8), function).aborted[0];
        let clear = |duo: &mut Duo| {
            let received = duo.first.abort_by_other(task);
            assert!(received.is_empty(), "{received:?}");
        };
        if is_first {
            clear(&mut duo);
        }
        let mut ended = duo.second.tmf(50, TmfFunction::AbortTask, 1);
        if !is_first {
            clear(&mut duo);
        }
        ended.extend(duo.route());
        assert_eq!(tmf_status(&ended), TmfStatus::Complete);
        let late = duo.first.data_out(1, Ttt::NONE, 0, 512, &[7; 512], true);
        assert!(late.is_empty(), "{late:?}");
        assert_eq!(
            duo.first.channel.channel().executor().task_state(Itt(1)),
            None
        );
        duo.close();
    }
}

#[test]
fn query_task_set_includes_other_connections() {
    let mut duo = Duo::new();
    let query = |duo: &mut Duo| {
        let received = duo.second.tmf(50, TmfFunction::QueryTaskSet, 0);
        tmf_status(&received)
    };
    assert_eq!(query(&mut duo), TmfStatus::Complete);
    assert!(duo.first.write(1, 4, &[7; 512], false).is_empty());
    assert_eq!(query(&mut duo), TmfStatus::Succeeded);
    duo.close();
}

/// Same for a function of this nexus on another connection, while the response is waiting for
/// unsolicited data.
#[test]
fn function_on_other_connection_suppresses_response() {
    for function in [
        TmfFunction::AbortTaskSet,
        TmfFunction::ClearTaskSet,
        TmfFunction::LogicalUnitReset,
        TmfFunction::NexusReset,
    ] {
        for is_cleared in [true, false] {
            let mut duo = Duo::new();
            let first = &mut duo.first;
            if is_cleared {
                assert!(first.write(1, 4, &[7; 512], false).is_empty());
                let by = TaskManagement::ClearTaskSet;
                let task = first.units[0].manage(NexusId(8), by).aborted[0];
                first.abort_by_other(task);
            } else {
                first.command(1, &[0xc0; 6], true, 1024, &[7; 512], false);
            }
            let waits = first.channel.channel().executor().task_state(Itt(1));
            assert_eq!(waits, Some(TaskState::AwaitUnsolicited));
            let mut ended = duo.second.tmf(50, function, 0);
            ended.extend(duo.route());
            assert_eq!(tmf_status(&ended), TmfStatus::Complete);
            let late = duo.first.data_out(1, Ttt::NONE, 0, 512, &[7; 512], true);
            assert!(late.is_empty(), "{function:?}: {late:?}");
            assert_eq!(
                duo.first.channel.channel().executor().task_state(Itt(1)),
                None
            );
            duo.close();
        }
    }
}

/// If another nexus aborts a command while the connection is lost, the response is sent after the
/// command is reassigned.
#[test]
fn kept_command_reports_abort_after_reassignment() {
    for is_claimed in [false, true] {
        let mut duo = Duo::new();
        duo.first.prompt = !is_claimed;
        duo.first.read(1, 0, 1);
        duo.first.write(2, 4, &[], true);
        duo.cut();
        // The first command is still executing, and is handed over when it's complete.
        let tag = if is_claimed { 1 } else { 2 };
        if is_claimed {
            assert!(duo.reassigned(tag, 0).is_empty());
        }
        duo.clear_by_another();
        assert_eq!(duo.first.units[0].tasks(), 0);
        let received = if is_claimed {
            duo.route()
        } else {
            duo.reassigned(tag, 0)
        };
        let [(FromTarget::ScsiResponse(response), ..)] = &received[..] else {
            panic!("{received:?}");
        };
        assert_eq!((response.itt, response.status), (Itt(tag), 0x40));
        duo.close();
    }
}

/// A command that is still at a device when the retention time expires may complete with TASK
/// ABORTED, and this response isn't claimed.
#[test]
fn claimed_command_survives_time2retain() {
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 1);
    duo.first.write(2, 1, &[9; 512], true);
    duo.cut();
    assert!(duo.reassigned(1, 0).is_empty());
    duo.first.wait(RETENTION);
    let refused = duo.refusal(2);
    assert_eq!(refused, TmfStatus::TaskDoesNotExist);
    duo.clear_by_another();
    duo.first.finish_all_blocks();
    duo.route();
    for _ in 0..3 {
        duo.first.wait(Duration::from_secs(1));
    }
    assert!(duo.first.released);
    duo.close();
}

/// The second connection can be lost as well.
#[test]
fn command_can_be_reassigned_twice() {
    let mut duo = Duo::new();
    duo.first.read(1, 0, 5);
    duo.first.write(2, 4, &[3; 512], true);
    duo.cut();
    duo.reassigned(1, 2);
    duo.reassigned(2, 1);
    let Duo { first, second } = duo;
    let mut third = Rig::joined(&second, 1, LEVEL_2);
    third.cmd_sn = second.cmd_sn;
    let mut duo = Duo {
        first: second,
        second: third,
    };
    // Names contain the channel number, so we must forward messages for the second channel
    // manually.
    duo.first.apply(Input::Disconnected);
    duo.first.with(|ch, cx| ch.channel_mut().handle_detach(cx));
    std::mem::swap(&mut duo.first, &mut duo.second);
    let request = |duo: &Duo, tag, exp_data_sn| TmfRequest {
        exp_data_sn,
        ..tmf_request(900, duo.first.cmd_sn, TmfFunction::TaskReassign, tag)
    };
    let reassign = FromInitiator::TmfRequest(request(&duo, 1, 0));
    duo.first.send(&reassign, &[]);
    let received = duo.route();
    assert_eq!(data_in(&received).0, [2, 3, 4], "zero: nothing is new");
    let reassign = FromInitiator::TmfRequest(request(&duo, 2, 1));
    duo.first.send(&reassign, &[]);
    let requested = r2t(&duo.route());
    assert_eq!((requested.r2t_sn, requested.offset), (1, 512));
    duo.close();
    drop(first);
}

/// RFC 7143 11.14, 11.15.
#[test]
fn recovery_logout_responds_when_commands_are_available() {
    let mut duo = Duo::new();
    duo.second.gate.others = vec![Cid(1)];
    let unknown = duo
        .second
        .send(&logout(LogoutReason::RemoveConnection, 5, 9), &[]);
    assert_eq!(logout_response(&unknown).status, LogoutStatus::CidNotFound);
    let request = logout(LogoutReason::RemoveConnection, 1, 9);
    assert!(duo.second.send(&request, &[]).is_empty());
    duo.cut();
    let received = duo.second.with(super::TcpChannel::handle_others_gone);
    let response = logout_response(&received);
    assert_eq!(response.status, LogoutStatus::Closed);
    assert_eq!((response.time2wait, response.time2retain), (2, 20));
    duo.close();
    // This isn't supported below level 2.
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0");
    let received = rig.send(&logout(LogoutReason::RemoveConnection, 0, 9), &[]);
    let refused = logout_response(&received).status;
    assert_eq!(refused, LogoutStatus::RecoveryNotSupported);
    rig.close();
}

/// RFC 7143 11.14: after a connection has logged itself out for recovery, it must not send
/// anything.
#[test]
fn connection_can_log_itself_out_for_recovery() {
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(1, 0, 1);
    let requested = r2t(&duo.first.write(2, 4, &[], true));
    let request = logout(LogoutReason::RemoveConnection, 0, 9);
    let received = duo.first.send(&request, &[]);
    assert_eq!(logout_response(&received).status, LogoutStatus::Closed);
    assert!(duo.first.disconnected);
    assert!(duo.first.elsewhere.contains(&Action::Detached));
    assert!(!duo.first.elsewhere.contains(&Action::Lost));
    assert!(duo.first.finish_all_blocks().is_empty());
    assert_eq!(data_in(&duo.reassigned(1, 0)).0, [0]);
    let again = r2t(&duo.reassigned(2, 1));
    assert_eq!((again.offset, again.len), (requested.offset, requested.len));
    // This may be the last connection of the session, so we wait for a new one.
    assert!(!duo.first.released);
    duo.first.wait(RETENTION);
    assert!(duo.first.released);
    duo.close();
}

/// RFC 7143 11.9.1.
#[test]
fn initiator_is_notified_of_lost_connection() {
    let mut duo = Duo::new();
    duo.lose();
    let received = duo
        .second
        .with(|ch, cx| ch.channel_mut().handle_lost(cx, Cid(7)));
    assert!(matches!(
        received[0].0,
        FromTarget::AsyncMessage(m)
            if m.event == AsyncEvent::ConnectionDropped && m.parameters == [7, 2, 20]
    ));
    duo.close();
}

/// If an initiator reuses a tag, it must have received the response for the previous command.
#[test]
fn reused_tag_refers_to_new_command() {
    let mut duo = Duo::new();
    duo.first.read(1, 0, 1);
    duo.second.cmd_sn = duo.first.cmd_sn;
    duo.cut();
    assert_eq!(status(&duo.second.read(1, 0, 1)).0, 0);
    assert_eq!(duo.refusal(1), TmfStatus::TaskStillAllegiant);
    duo.close();
}

/// Random action of an initiator with two connections.
#[derive(Clone, Debug)]
enum Act {
    Read(bool, u8, u8),
    Write(bool, u8, u8, u16),
    Data(bool, u8, u8, u16),
    Abort(u8),
    Reset,
    Reassign(u8, u8),
    Block(bool, u8),
    Lose,
    Detach,
    Pressure,
    Receive,
    Wait(u8),
}

fn act() -> impl Strategy<Value = Act> {
    let tag = 1..7_u8;
    one_of![
        4 => (any::<bool>(), tag.clone(), 0..9_u8).prop_map(|(s, t, n)| Act::Read(s, t, n)),
        4 => (any::<bool>(), tag.clone(), 0..9_u8, 0..1024_u16)
            .prop_map(|(s, t, n, d)| Act::Write(s, t, n, d)),
        4 => (any::<bool>(), tag.clone(), 1..9_u8, 0..1024_u16)
            .prop_map(|(s, t, ttt, d)| Act::Data(s, t, ttt, d)),
        1 => tag.clone().prop_map(Act::Abort),
        1 => Just(Act::Reset),
        8 => (tag, 0..6_u8).prop_map(|(t, exp)| Act::Reassign(t, exp)),
        6 => (any::<bool>(), any::<u8>()).prop_map(|(s, at)| Act::Block(s, at)),
        2 => Just(Act::Lose),
        2 => Just(Act::Detach),
        1 => Just(Act::Pressure),
        6 => Just(Act::Receive),
        1 => (0..12_u8).prop_map(Act::Wait),
    ]
}

/// Verifies that for any connection loss and any reassignment, there is no panic, no command is
/// executed twice, and all resources are released at the end.
fn run(acts: Vec<Act>) {
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.second.prompt = false;
    for act in acts {
        // CmdSN is shared by all connections of the session.
        let (exp, _) = duo.second.gate.window.as_ref().unwrap().bounds();
        duo.first.cmd_sn = exp.0;
        duo.second.cmd_sn = exp.0;
        match act {
            Act::Read(second, tag, blocks) => {
                duo.rig(1 + u64::from(second))
                    .read(u32::from(tag), 0, blocks);
            }
            Act::Write(second, tag, blocks, len) => {
                let data = vec![1; usize::from(len)];
                duo.rig(1 + u64::from(second))
                    .write(u32::from(tag), blocks, &data, true);
            }
            Act::Data(second, tag, ttt, len) => {
                let data = vec![2; usize::from(len)];
                let rig = duo.rig(1 + u64::from(second));
                rig.data_out(u32::from(tag), Ttt(u32::from(ttt)), 0, 0, &data, false);
            }
            Act::Abort(tag) => {
                duo.second.tmf(50, TmfFunction::AbortTask, u32::from(tag));
            }
            Act::Reset => {
                duo.second.tmf(51, TmfFunction::LogicalUnitReset, 0);
            }
            Act::Reassign(tag, exp) => {
                let function = TmfFunction::TaskReassign;
                let request = TmfRequest {
                    exp_data_sn: u32::from(exp),
                    ..tmf_request(900, exp_cmd(&duo).0, function, u32::from(tag))
                };
                duo.second.send(&FromInitiator::TmfRequest(request), &[]);
            }
            Act::Block(second, at) => {
                let rig = duo.rig(1 + u64::from(second));
                if !rig.blocks().is_empty() {
                    let at = usize::from(at) % rig.blocks().len();
                    rig.finish_block(at);
                    rig.run_actions();
                }
            }
            Act::Lose => {
                duo.first.apply(Input::Disconnected);
            }
            Act::Detach => {
                duo.first.with(|ch, cx| ch.channel_mut().handle_detach(cx));
            }
            Act::Pressure => {
                duo.first.apply(Input::Pressure);
            }
            Act::Receive => {
                duo.route();
            }
            Act::Wait(seconds) => {
                let time = Duration::from_secs(u64::from(seconds));
                duo.first.wait(time);
                duo.second.apply(Input::Pool);
            }
        }
        for rig in [&duo.first, &duo.second] {
            let contexts = usize::from(rig.channel.channel().config().contexts());
            assert!(rig.channel.channel().executor().in_flight() <= contexts);
        }
    }
    duo.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn reassignment_loses_nothing(acts in proptest::collection::vec(act(), 1..60)) {
        run(acts);
    }
}

#[test]
fn reassignment() {
    bolero::check!(name = "reassignment").for_each(|bytes: &[u8]| {
        if let Some(((), acts)) = fuzz::history(&Just(()), &act(), bytes) {
            run(acts);
        }
    });
}

fn exp_cmd(duo: &Duo) -> CmdSn {
    CmdSn(duo.second.cmd_sn)
}

/// DefaultTime2Wait is the larger value of both sides, so the initiator could choose any value.
/// This must not determine how long we keep commands of a lost connection.
#[test]
fn time2wait_cannot_extend_command_retention() {
    let keys = "ErrorRecoveryLevel=2\0DefaultTime2Wait=3600\0DefaultTime2Retain=20\0";
    let mut rig = Rig::logged_in(keys);
    rig.write(1, 8, &[], true);
    rig.apply(Input::Disconnected);
    rig.wait(RETENTION);
    assert_eq!(rig.units[0].tasks(), 0);
    assert_eq!(rig.pool.free(), rig.pool.size());
    assert!(rig.released);
}
