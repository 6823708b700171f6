//! Tests for commands larger than the window, which transfer data in pieces using a limited buffer.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, R2t, RejectReason, ScsiCommand, ScsiResponse, TmfFunction, TmfStatus,
};
use riser_scsi::iscsi::{Itt, StatSn, Ttt};
use riser_scsi::lun::LunId;
use riser_scsi::nexus::NexusId;
use riser_scsi::opcode::Opcode;
use riser_scsi::step::{BackendError, BlockOp, Residual, TaskAttribute};
use riser_scsi::task::{NewTask, TaskKey, TaskManagement};

use super::task::TaskState;
use crate::fabric::{TaskIdx, TaskRef};
use crate::pool::{Buffer, Owner};
use crate::stats::SessionEvent;
use crate::tests::rig;
use crate::tests::rig::tcp::{
    Received, TcpPeer, data_ack, data_in, r2t, rdata, rejected, resend_data, sense, status,
    tmf_status,
};
use crate::worker::fabrics::Input;
use riser_test_peers::pdus::scsi_command;

type Rig = rig::Rig<TcpPeer>;

const SYNCHRONIZE_CACHE: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Window size in bytes, which fits in a single pool page.
const WINDOW: u32 = 2048;
const BLOCKS: u8 = 9;
const LEN: usize = BLOCKS as usize * 512;

const KEYS: &str = "MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0";
const LEVEL_1: &str = "MaxRecvDataSegmentLength=512\0MaxBurstLength=1024\0FirstBurstLength=512\0\
     ErrorRecoveryLevel=1\0";

fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| (at % 251) as u8).collect()
}

/// Creates a connection and a disk where each block contains its number, as expected by
/// [`data_in`].
fn rig(keys: &str) -> Rig {
    let mut rig = Rig::with_window(WINDOW, keys);
    for (at, block) in rig.disks[0].chunks_mut(512).enumerate() {
        block.fill((at as u8).wrapping_add(1));
    }
    rig
}

fn r2ts(received: &[Received]) -> Vec<R2t> {
    let found = received.iter().filter_map(|(pdu, ..)| match pdu {
        FromTarget::R2t(r2t) => Some(*r2t),
        _ => None,
    });
    found.collect()
}

fn response_of(received: &[Received]) -> ScsiResponse {
    match received {
        [(FromTarget::ScsiResponse(response), ..)] => *response,
        other => panic!("{other:?}"),
    }
}

/// Responds to an R2T using `data`, which contains all data of the command.
fn send_solicited(rig: &mut Rig, r2t: R2t, data: &[u8]) -> Vec<Received> {
    let at = r2t.offset as usize;
    let data = &data[at..at + r2t.len as usize];
    rig.data_out(r2t.itt.0, r2t.ttt, 0, r2t.offset, data, true)
}

/// Responds to all R2Ts, including new ones. Returns the R2Ts and the last PDUs received.
fn send_all_data(rig: &mut Rig, first: &[Received], data: &[u8]) -> (Vec<R2t>, Vec<Received>) {
    let mut requested = r2ts(first);
    let mut all = Vec::new();
    let mut last = Vec::new();
    while !requested.is_empty() {
        let next = requested.remove(0);
        all.push(next);
        last = send_solicited(rig, next, data);
        requested.extend(r2ts(&last));
    }
    (all, last)
}

/// Checks that a command never used more than one page, based on the minimum free memory of the
/// pool.
fn check_memory(rig: &Rig) {
    assert!(rig.pool.size() - rig.pool.lowest_free() <= 4096);
}

/// ORWRITE (16) for the first blocks, which must not be changed by other commands at the same time.
fn orwrite(rig: &mut Rig, tag: u32) -> Vec<Received> {
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x8b, BLOCKS);
    rig.command(tag, &cdb, true, LEN as u32, &[], true)
}

fn write_at(rig: &mut Rig, tag: u32, lba: u8) -> Vec<Received> {
    let cdb = [0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0];
    rig.command(tag, &cdb, true, 512, &[0x77; 512], true)
}

fn is_protocol_error(received: &[Received]) -> bool {
    matches!(
        received,
        [(FromTarget::Reject(r), ..)] if r.reason == RejectReason::ProtocolError
    )
}

/// Returns the tag if the last PDU requests an acknowledgment for all previous data.
fn requested_ack(received: &[Received]) -> Ttt {
    match received.last() {
        Some((FromTarget::DataIn(pdu), ..)) if pdu.acknowledge => {
            assert!(pdu.is_final && pdu.ttt != Ttt::NONE);
            pdu.ttt
        }
        other => panic!("{other:?}"),
    }
}

/// Logs out of a session that could have more connections.
fn log_out(rig: &mut Rig) -> Vec<Received> {
    let mut received = rig.log_out();
    received.extend(rig.apply(Input::OthersGone));
    received
}

fn is_logged_out(received: &[Received]) -> bool {
    matches!(received, [(FromTarget::LogoutResponse(_), ..)])
}

#[test]
fn long_write_requests_pieces_sequentially() {
    let mut rig = rig(KEYS);
    let data = pattern();
    let first = rig.write(1, BLOCKS, &data[..512], true);
    let (requested, last) = send_all_data(&mut rig, &first, &data);
    let requested: Vec<_> = requested
        .iter()
        .map(|a| (a.r2t_sn, a.offset, a.len))
        .collect();
    assert_eq!(
        requested,
        [
            (0, 512, 1024),
            (1, 1536, 512),
            (2, 2048, 1024),
            (3, 3072, 1024),
            (4, 4096, 512),
        ]
    );
    let response = response_of(&last);
    assert_eq!((response.status, response.exp_data_sn), (0, 5));
    assert_eq!(response.residual, Residual::None);
    assert_eq!(rig.disks[0][..LEN], data);
    assert_eq!(rig.disks[0][LEN], BLOCKS + 1, "nothing behind them");
    check_memory(&rig);
    rig.close();
}

#[test]
fn unsolicited_data_can_exceed_window() {
    let keys = "MaxBurstLength=4096\0FirstBurstLength=3072\0";
    let mut rig = rig(keys);
    let data = pattern();
    assert!(rig.write(1, BLOCKS, &data[..512], false).is_empty());
    let none = rig.data_out(1, Ttt::NONE, 0, 512, &data[512..2560], false);
    assert!(none.is_empty());
    let received = rig.data_out(1, Ttt::NONE, 1, 2560, &data[2560..3072], true);
    let (requested, last) = send_all_data(&mut rig, &received, &data);
    let requested: Vec<_> = requested.iter().map(|a| (a.offset, a.len)).collect();
    assert_eq!(requested, [(3072, 1024), (4096, 512)]);
    assert_eq!(response_of(&last).status, 0);
    assert_eq!(rig.disks[0][..LEN], data);
    rig.close();
}

/// All bytes must be in order, using the maximum sequence length within each piece.
#[test]
fn long_read_has_contiguous_data() {
    let mut rig = rig(KEYS);
    let received = rig.read(1, 0, BLOCKS);
    assert_eq!(data_in(&received).0, (0..9).collect::<Vec<_>>());
    for (at, (pdu, ..)) in received.iter().enumerate() {
        let FromTarget::DataIn(pdu) = pdu else {
            panic!("{pdu:?}");
        };
        assert_eq!(pdu.offset as usize, at * 512);
        assert_eq!(pdu.is_final, at % 2 == 1 || at == 8, "{at}");
        assert_eq!(pdu.status.is_some(), at == 8);
        assert!(!pdu.acknowledge, "not without recovery");
    }
    check_memory(&rig);
    rig.close();
}

/// If data is sent with a read command, it must not be returned as read data.
#[test]
fn long_read_ignores_received_data() {
    let mut rig = rig(KEYS);
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, BLOCKS, 0];
    let command = ScsiCommand {
        is_final: false,
        reads: true,
        bidi_read_length: Some(LEN as u32),
        ..scsi_command(1, rig.cmd_sn, &cdb, true, 512)
    };
    rig.cmd_sn += 1;
    let mut received = rig.send(&FromInitiator::ScsiCommand(command), &[0xee; 512]);
    let response = response_of(&received.split_off(9));
    assert_eq!((response.status, response.exp_data_sn), (0, 9));
    assert_eq!(response.residual, Residual::Underflow(512));
    assert_eq!(data_in(&received).0, (0..9).collect::<Vec<_>>());
    rig.close();
}

/// The next piece can only be read when the previous one was sent.
#[test]
fn read_waits_for_initiator_to_receive() {
    let mut rig = rig(KEYS);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    assert!(rig.blocks().is_empty(), "one piece was read");
    let sent = rig.poll_sent();
    assert_eq!(sent.len(), 4);
    rig.run_actions();
    assert!(
        rig.blocks().is_empty(),
        "and none more while it is being sent"
    );
    rig.prompt = false;
    rig.with(|ch, cx| ch.handle_sent(cx, true));
    assert!(matches!(
        rig.blocks()[..],
        [BlockOp::Read { offset: 2048, .. }]
    ));
    rig.close();
}

/// RFC 7143 7.8: the command must fail, because the initiator is waiting for data that we can't
/// send again.
#[test]
fn unavailable_retransmission_fails_command() {
    let again = rdata(1, 7, 0);
    // All data is requested, but only a single piece is in memory.
    for is_sending in [false, true] {
        let mut rig = rig(LEVEL_1);
        rig.stalled = is_sending;
        rig.read(1, 0, BLOCKS);
        if is_sending {
            assert_eq!(rig.poll_sent().len(), 4);
        }
        let mut received = rig.send(&again, &[]);
        if is_sending {
            rig.stalled = false;
            received = rig.with(|ch, cx| ch.handle_sent(cx, true));
        }
        assert_eq!(rejected(&received[..1]), RejectReason::SnackReject);
        assert_eq!(sense(&received[1..]), (0x0b, 0x11, 0x13));
        assert_eq!(rig.units[0].tasks(), 0);
        rig.close();
    }
}

#[test]
fn error_between_pieces_reports_residual() {
    let mut rig = rig(KEYS);
    let data = pattern();
    let medium = BackendError::Medium {
        offset: Some(6 * 512 + 1),
    };
    let mut requested = r2ts(&rig.write(1, BLOCKS, &[], true));
    rig.prompt = false;
    for _ in 0..3 {
        let next = requested.remove(0);
        requested.extend(r2ts(&send_solicited(&mut rig, next, &data)));
        if !rig.blocks().is_empty() {
            requested.extend(r2ts(&rig.finish_all_blocks()));
        }
    }
    let next = requested.remove(0);
    assert!(send_solicited(&mut rig, next, &data).is_empty());
    rig.fail_block(0, medium);
    let received = rig.run_actions();
    let response = response_of(&received);
    assert_eq!((response.status, response.exp_data_sn), (2, 4));
    assert_eq!(response.residual, Residual::Underflow(512));
    let sense = &received[0].2[2..];
    assert_eq!((sense[2] & 15, sense[12]), (3, 0x0c), "a write error");
    assert_eq!(sense[3..7], [0, 0, 0, 6], "INFORMATION");
    assert_eq!(rig.disks[0][..2048], data[..2048]);
    // Same for a READ after sending the first piece.
    let received = rig.read(2, 0, BLOCKS);
    assert!(received.is_empty());
    let sent = rig.finish_all_blocks();
    assert_eq!(sent.len(), 4);
    rig.fail_block(0, medium);
    let received = rig.run_actions();
    let response = response_of(&received);
    assert_eq!((response.status, response.exp_data_sn), (2, 4));
    assert_eq!(response.residual, Residual::Underflow(LEN as u32 - WINDOW));
    rig.close();
}

/// Data that is received or queued is dropped with its command.
#[test]
fn aborted_command_transfers_no_more_data() {
    let data = pattern();
    // While receiving the second piece.
    let mut rig = rig(KEYS);
    let requested = r2ts(&rig.write(1, BLOCKS, &data[..512], true));
    let requested = r2ts(&send_solicited(&mut rig, requested[0], &data));
    let requested = r2ts(&send_solicited(&mut rig, requested[0], &data));
    assert_eq!(requested[0].offset, 2048);
    assert_eq!(
        tmf_status(&rig.tmf(9, TmfFunction::AbortTask, 1)),
        TmfStatus::Complete
    );
    assert_eq!(rig.pool.free(), rig.pool.size());
    assert!(
        send_solicited(&mut rig, requested[0], &data).is_empty(),
        "too late"
    );
    rig.close();

    // While a piece is still queued.
    let mut rig = self::rig(KEYS);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    rig.stalled = false;
    let received = rig.tmf(9, TmfFunction::AbortTask, 1);
    assert_eq!(received.len(), 1);
    assert_eq!(rig.pool.free(), rig.pool.size());
    rig.close();
}

#[test]
fn aborted_command_has_no_timeout_when_sent() {
    let untagged = 0xffff_ffff;
    // If the piece of an aborted command was sent in time, there is nothing left to wait for.
    let mut rig = rig(KEYS);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    rig.poll_sent();
    rig.tmf(9, TmfFunction::AbortTask, 1);
    rig.wait(Duration::from_secs(14));
    rig.stalled = false;
    let received = rig.with(|ch, cx| ch.handle_sent(cx, true));
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    for _ in 0..8 {
        rig.nop(untagged, b"");
        rig.wait(Duration::from_secs(10));
    }
    assert!(!rig.disconnected);
    rig.close();

    // A timeout isn't possible after the connection was closed.
    let mut rig = self::rig(KEYS);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    rig.poll_sent();
    rig.apply(Input::Disconnected);
    rig.wait(Duration::from_secs(20));
    assert!(!rig.gate.events.contains(&SessionEvent::TimedOut));
    rig.with(|ch, cx| ch.handle_sent(cx, false));
    rig.close();
}

/// If a command is aborted by another nexus in any state, the response must be TASK ABORTED (SPC-4
/// 7.5.8: TAS). If it's aborted by its own nexus, there is no response. The function only waits for
/// devices.
#[test]
fn command_ended_by_other_nexus_gets_response() {
    let own = NexusId(7);
    let end = |rig: &mut Rig, by: NexusId| {
        let function = TaskManagement::LogicalUnitReset;
        let managed = rig.units[0].manage(by, function);
        assert_eq!(managed.aborted.len(), 1);
        let task = managed.aborted[0];
        rig.abort_by_other(task)
    };
    let data = pattern();
    for by in [NexusId(8), own] {
        let check = |received: &[Received], tag: u32| {
            if by == own {
                return assert!(received.is_empty(), "{received:?}");
            }
            let response = response_of(received);
            assert_eq!((response.itt, response.status), (Itt(tag), 0x40));
        };
        let assert_usable = |mut rig: Rig| {
            assert_eq!(rig.units[0].tasks(), 0);
            assert_eq!(rig.pool.free(), rig.pool.size());
            assert!(!rig.disconnected);
            // Unit attention after a reset.
            assert_eq!(response_of(&rig.read(50, 0, 1)).status, 2);
            assert_eq!(data_in(&rig.read(51, 0, 1)).0, [0]);
            rig.close();
        };

        // While at the disk.
        let mut rig = rig(KEYS);
        rig.prompt = false;
        assert!(rig.read(1, 0, 1).is_empty());
        check(&end(&mut rig, by), 1);
        rig.prompt = true;
        assert_usable(rig);

        // While receiving solicited data.
        let mut rig = self::rig(KEYS);
        let requested = r2ts(&rig.write(1, BLOCKS, &data[..512], true));
        check(&end(&mut rig, by), 1);
        assert!(
            send_solicited(&mut rig, requested[0], &data).is_empty(),
            "too late"
        );
        assert_usable(rig);

        // While receiving unsolicited data.
        let mut rig = self::rig("MaxBurstLength=4096\0FirstBurstLength=3072\0");
        rig.write(1, BLOCKS, &data[..512], false);
        assert!(end(&mut rig, by).is_empty());
        assert_eq!(rig.units[0].tasks(), 0, "it does not wait for them");
        let received = rig.data_out(1, Ttt::NONE, 0, 512, &data[512..3072], true);
        check(&received, 1);
        assert_usable(rig);

        // While a piece is being sent, its buffer is used by the socket.
        let mut rig = self::rig(KEYS);
        rig.stalled = true;
        rig.read(1, 0, BLOCKS);
        rig.poll_sent();
        assert!(end(&mut rig, by).is_empty());
        assert_eq!(rig.units[0].tasks(), 1);
        rig.stalled = false;
        let received = rig.with(|ch, cx| ch.handle_sent(cx, true));
        check(&received, 1);
        assert_usable(rig);
    }
}

/// If two other nexuses abort a command at the same time, the second one finds a pending response.
#[test]
fn command_ended_by_two_nexuses_gets_response() {
    let data = pattern();
    let mut rig = rig("MaxBurstLength=4096\0FirstBurstLength=3072\0");
    rig.write(1, BLOCKS, &data[..512], false);
    let tasks = [8, 9].map(|by| {
        let function = TaskManagement::ClearTaskSet;
        rig.units[0].manage(NexusId(by), function).aborted[0]
    });
    for task in tasks {
        let received = rig.abort_by_other(task);
        assert!(received.is_empty(), "{received:?}");
    }
    let received = rig.data_out(1, Ttt::NONE, 0, 512, &data[512..3072], true);
    let response = response_of(&received);
    assert_eq!((response.itt, response.status), (Itt(1), 0x40));
    rig.close();
}

/// A command aborted by its own nexus must not have a response after this, even if it was also
/// aborted by another nexus.
#[test]
fn own_abort_suppresses_task_aborted_status() {
    let mut rig = rig("MaxBurstLength=4096\0FirstBurstLength=3072\0");
    rig.prompt = false;
    // SYNCHRONIZE CACHE (10) doesn't transfer data, but the initiator can still announce some.
    let received = rig.command(1, &SYNCHRONIZE_CACHE, true, 1024, &[0; 512], false);
    assert!(received.is_empty(), "{received:?}");
    let function = TaskManagement::ClearTaskSet;
    let task = rig.units[0].manage(NexusId(8), function).aborted[0];
    let ended = rig.tmf(9, TmfFunction::AbortTask, 1);
    assert_eq!(tmf_status(&ended), TmfStatus::Complete);
    rig.abort_by_other(task);
    let late = rig.data_out(1, Ttt::NONE, 0, 512, &[0; 512], true);
    assert!(late.is_empty(), "{late:?}");
    assert_eq!(rig.channel.channel().executor().in_flight(), 0);
    rig.close();
}

#[test]
fn connection_loss_between_pieces_leaks_nothing() {
    let data = pattern();
    let mut rig = rig(KEYS);
    let requested = r2ts(&rig.write(1, BLOCKS, &data[..512], true));
    let requested = r2ts(&send_solicited(&mut rig, requested[0], &data));
    send_solicited(&mut rig, requested[0], &data);
    rig.close();
    let mut rig = self::rig(KEYS);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    rig.poll_sent();
    rig.apply(Input::Disconnected);
    assert!(!rig.released, "the socket has the buffer");
    rig.with(|ch, cx| ch.handle_sent(cx, false));
    rig.close();
    // After a logout request, we must not request more data.
    let mut rig = self::rig(KEYS);
    let requested = r2ts(&rig.write(1, BLOCKS, &data[..512], true));
    let requested = r2ts(&send_solicited(&mut rig, requested[0], &data));
    rig.prompt = false;
    send_solicited(&mut rig, requested[0], &data);
    assert_eq!(rig.blocks().len(), 1);
    assert!(rig.log_out().is_empty());
    let received = rig.finish_all_blocks();
    assert!(is_logged_out(&received));
    rig.close();
}

#[test]
fn silent_initiator_between_pieces_times_out() {
    let data = vec![1; LEN];
    let mut rig = rig(KEYS);
    let first = orwrite(&mut rig, 1);
    let requested = r2ts(&send_solicited(&mut rig, r2t(&first), &data));
    let requested = r2ts(&send_solicited(&mut rig, requested[0], &data));
    assert_eq!(requested[0].offset, 2048);
    assert!(
        write_at(&mut rig, 3, 0).is_empty(),
        "it waits for the blocks"
    );
    for n in 0..8 {
        rig.wait(Duration::from_secs(2));
        rig.nop(1000 + n, b"");
    }
    assert!(rig.disconnected);
    assert_eq!(rig.units[0].tasks(), 0);
    assert_eq!(rig.pool.free(), rig.pool.size());
}

/// Interval between PDUs that isn't considered idle. Sixteen intervals are shorter than the limit
/// for a command if another initiator is waiting for its memory.
const STEADY: Duration = Duration::from_millis(800);

/// Allocates the remaining pool memory for this connection, and lets another initiator wait for it.
fn let_another_wait(rig: &mut Rig) -> Vec<Buffer> {
    let owner = Owner(rig.channel.channel().config().serial);
    let more = std::iter::from_fn(|| rig.pool.grant(owner, 4096)).collect();
    rig.pool.wait(Owner(owner.0 + 1));
    rig.apply(Input::Pressure);
    more
}

fn end_with(mut rig: Rig, more: Vec<Buffer>) {
    let owner = Owner(rig.channel.channel().config().serial);
    rig.pool.leave_line(Owner(owner.0 + 1));
    more.into_iter().for_each(|buffer| rig.pool.release(buffer));
    rig.stalled = false;
    rig.with(|ch, cx| ch.handle_sent(cx, true));
    rig.close();
}

/// Returns the time until the connection is closed, in seconds. The time is advanced by `step`
/// seconds, and the initiator calls `other` after each step.
fn cut_after(rig: &mut Rig, step: u64, mut other: impl FnMut(&mut Rig)) -> u64 {
    let steps = (1..=400 / step).find(|_| {
        rig.wait(Duration::from_secs(step));
        other(rig);
        rig.disconnected
    });
    steps.map_or(u64::MAX, |steps| steps * step)
}

/// Sends a NOP-Out without a response.
fn unanswered_nop(rig: &mut Rig) {
    rig.nop(Itt::NONE.0, &[]);
}

/// If others are waiting for its memory, an idle initiator must be disconnected earlier than when
/// nobody is affected.
#[test]
fn silent_initiator_with_awaited_memory_fails_sooner() {
    for others_wait in [false, true] {
        let mut rig = Rig::logged_in("");
        assert_eq!(r2ts(&rig.write(1, BLOCKS, &[], true)).len(), 1);
        let owner = Owner(rig.channel.channel().config().serial);
        let more = std::iter::from_fn(|| rig.pool.grant(owner, 4096));
        let more: Vec<_> = more.collect();
        if others_wait {
            rig.pool.wait(Owner(owner.0 + 1));
        }
        rig.apply(Input::Pressure);
        for n in 0..4 {
            rig.wait(Duration::from_secs(2));
            rig.nop(1000 + n, b"");
        }
        assert_eq!(rig.disconnected, others_wait);
        rig.pool.leave_line(Owner(owner.0 + 1));
        more.into_iter().for_each(|buffer| rig.pool.release(buffer));
        rig.close();
    }
}

/// An initiator that sends data at a steady rate isn't idle, even if it's slow: 1 MiB/s in this
/// test.
#[test]
fn slow_initiator_survives_new_memory_waiters() {
    let data = vec![1; 255 * 512];
    let mut rig = rig("");
    let mut requested = r2ts(&rig.write(1, 255, &[], true));
    for _ in 0..25 {
        rig.channel
            .channel_mut()
            .executor
            .timers
            .pace
            .on_moved(3 << 20);
        rig.wait(Duration::from_secs(3));
        let next = requested.pop().unwrap();
        requested = r2ts(&send_solicited(&mut rig, next, &data));
    }
    assert!(!rig.disconnected);
    let more = let_another_wait(&mut rig);
    assert!(!rig.disconnected, "data was just received");
    end_with(rig, more);
}

/// While an initiator is still reading data queued before an R2T, it hasn't received this R2T. It
/// should have the full time to respond after that.
#[test]
fn data_timeout_starts_after_r2t_is_read() {
    for step in [1000, 1250, 1500, 1700, 2000] {
        let step = Duration::from_millis(step);
        let mut rig = Rig::logged_in("MaxRecvDataSegmentLength=512\0");
        rig.stalled = true;
        // This needs several batches. The last one contains the R2T.
        rig.read(1, 0, 255);
        rig.write(2, 1, &[], true);
        let more = let_another_wait(&mut rig);
        let mut batches = 0;
        while {
            batches += 1;
            let is_last = !r2ts(&rig.poll_sent()).is_empty();
            rig.wait(step);
            rig.with(|ch, cx| ch.handle_sent(cx, true));
            !is_last
        } {}
        assert!(batches > 1);
        rig.wait(Duration::from_secs(4));
        assert!(!rig.disconnected, "{step:?}");
        rig.wait(Duration::from_secs(2));
        assert!(rig.disconnected, "{step:?}");
        end_with(rig, more);
    }
}

/// An initiator must respond to its R2T; all other activity must be ignored.
#[test]
fn unanswered_r2t_times_out_despite_other_activity() {
    // Empty Data-Out without a request.
    let mut rig = Rig::logged_in("");
    assert_eq!(r2ts(&rig.write(1, BLOCKS, &[], true)).len(), 1);
    let more = let_another_wait(&mut rig);
    let seconds = cut_after(&mut rig, 4, |rig| {
        rig.data_out(77, Ttt(0x1234), 0, 0, &[], true);
    });
    assert_eq!(seconds, 8);
    end_with(rig, more);
    // Same with data.
    let mut rig = Rig::logged_in("");
    rig.write(1, BLOCKS, &[], true);
    let more = let_another_wait(&mut rig);
    let seconds = cut_after(&mut rig, 4, |rig| {
        rig.data_out(77, Ttt(0x1234), 0, 0, &[0; 4], true);
    });
    assert_eq!(seconds, 8);
    end_with(rig, more);
    // Requesting an R2T again.
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0");
    rig.write(1, BLOCKS, &[], true);
    let more = let_another_wait(&mut rig);
    let seconds = cut_after(&mut rig, 4, |rig| {
        rig.send(&resend_data(1, 0, 0), &[]);
    });
    assert_eq!(seconds, 8);
    end_with(rig, more);
    // Other writes, which also need R2Ts.
    let mut rig = Rig::logged_in("");
    rig.write(1, BLOCKS, &[], true);
    let mut tag = 1;
    let seconds = cut_after(&mut rig, 10, |rig| {
        tag += 1;
        if !rig.disconnected {
            rig.write(tag, 1, &[], true);
        }
    });
    assert_eq!(seconds, 20);
    rig.close();
    // Data that is read but never acknowledged.
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0");
    assert_eq!(r2ts(&rig.write(1, 1, &[], true)).len(), 1);
    rig.nop(50, b"");
    let mut tag = 100;
    let seconds = cut_after(&mut rig, 5, |rig| {
        tag += 1;
        rig.read(tag, 0, 1);
    });
    assert_eq!(seconds, 15);
    rig.close();
}

/// Data for an aborted command is sent first because it was requested first.
#[test]
fn sending_for_aborted_command_counts_as_activity() {
    for others_wait in [false, true] {
        let mut rig = Rig::logged_in("MaxBurstLength=8192\0");
        let requested = r2ts(&rig.write(1, 64, &[], true))[0];
        let received = rig.tmf(60, TmfFunction::LogicalUnitReset, 0);
        assert_eq!(tmf_status(&received), TmfStatus::Complete);
        rig.write(2, BLOCKS, &[], true);
        let more = match others_wait {
            true => let_another_wait(&mut rig),
            false => Vec::new(),
        };
        for at in 0..16 {
            rig.wait(STEADY);
            let offset = requested.offset + at * 512;
            rig.data_out(1, requested.ttt, at, offset, &[1; 512], at == 15);
        }
        assert!(!rig.disconnected);
        end_with(rig, more);
    }
}

/// The same is true if it sends the remaining data of a burst after losing a PDU, or after the
/// command has completed.
#[test]
fn sending_remaining_burst_counts_as_activity() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0MaxBurstLength=32768\0");
    let requested = r2ts(&rig.write(1, 64, &[], true))[0];
    let more = let_another_wait(&mut rig);
    for at in 1..32 {
        rig.wait(STEADY / 2);
        let offset = requested.offset + at * 512;
        rig.data_out(1, requested.ttt, at, offset, &[1; 512], at == 31);
        assert!(!rig.disconnected, "{at}");
    }
    end_with(rig, more);
    let mut rig = Rig::logged_in("FirstBurstLength=8192\0");
    rig.write(1, 16, &[], false);
    let received = rig.tmf(60, TmfFunction::LogicalUnitReset, 0);
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    rig.write(2, BLOCKS, &[], true);
    let more = let_another_wait(&mut rig);
    for at in 0..16 {
        rig.wait(STEADY);
        rig.data_out(1, Ttt::NONE, at, at * 512, &[1; 512], at == 15);
        assert!(!rig.disconnected, "{at}");
    }
    end_with(rig, more);
}

/// Data kept for an acknowledgment must not affect the timeout for new data.
#[test]
fn read_timeout_starts_with_sending() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=1\0");
    rig.read(1, 0, 255);
    rig.prompt = false;
    rig.read(2, 0, 255);
    let more = let_another_wait(&mut rig);
    rig.wait(Duration::from_secs(4));
    rig.wait(Duration::from_secs(4));
    (rig.stalled, rig.prompt) = (true, true);
    rig.finish_all_blocks();
    assert!(!rig.poll_sent().is_empty());
    rig.apply(Input::Pressure);
    assert!(!rig.disconnected);
    end_with(rig, more);
}

/// This applies to completed commands with data, and to commands at the disk when others start
/// waiting.
#[test]
fn unread_data_fails_sooner_with_memory_waiters() {
    let mut rig = Rig::logged_in("");
    rig.stalled = true;
    for tag in 1..5 {
        rig.read(tag, 0, 255);
    }
    assert!(!rig.poll_sent().is_empty());
    let more = let_another_wait(&mut rig);
    assert_eq!(cut_after(&mut rig, 1, unanswered_nop), 5);
    end_with(rig, more);
    let mut rig = self::rig("");
    rig.prompt = false;
    rig.read(1, 0, BLOCKS);
    let more = let_another_wait(&mut rig);
    (rig.stalled, rig.prompt) = (true, true);
    rig.finish_all_blocks();
    assert_eq!(cut_after(&mut rig, 1, unanswered_nop), 5);
    end_with(rig, more);
}

/// The time for pieces that just avoid a timeout must be limited, because other commands may be
/// waiting.
#[test]
fn later_pieces_share_time_limit() {
    let data = vec![1; 255 * 512];
    let mut rig = rig("");
    let first = rig.write(1, 255, &[], true);
    let mut requested = r2ts(&first);
    let mut seconds = 0;
    while !rig.disconnected {
        rig.wait(Duration::from_secs(10));
        seconds += 10;
        if let Some(next) = requested.pop() {
            requested = r2ts(&send_solicited(&mut rig, next, &data));
        }
        assert!(seconds < 400, "64 pieces of ten seconds are not waited for");
    }
    // The first piece, followed by eight timeouts.
    assert!((130..=150).contains(&seconds), "{seconds}");
}

/// Same if the connection transfers other data at the same time. This data extends the limit.
#[test]
fn busy_connection_extends_time_limit() {
    let data = vec![1; 255 * 512];
    // Number of bytes between two pieces. The data of eight commands accounts for two of ten
    // seconds.
    for (moved, most) in [(0, 150), (1 << 20, 155), (8 << 20, 180), (1 << 30, 180)] {
        let mut rig = rig("");
        let first = rig.write(1, 255, &[], true);
        let mut requested = r2ts(&first);
        let mut seconds = 0;
        while !rig.disconnected {
            rig.channel
                .channel_mut()
                .executor
                .timers
                .pace
                .on_moved(moved);
            rig.wait(Duration::from_secs(10));
            seconds += 10;
            if let Some(next) = requested.pop() {
                requested = r2ts(&send_solicited(&mut rig, next, &data));
            }
            assert!(seconds < 400, "64 pieces of ten seconds are not waited for");
        }
        assert!((most - 20..=most).contains(&seconds), "{moved} {seconds}");
    }
}

/// All data transferred on the connection is counted when it was sent or received.
#[test]
fn data_is_counted_when_transferred() {
    for keys in [KEYS, LEVEL_1] {
        let moved = |rig: &Rig| rig.channel.channel().executor().pace().moved();
        let data = pattern();
        let mut rig = rig(keys);
        let first = rig.write(1, BLOCKS, &data[..512], true);
        let before = moved(&rig);
        send_all_data(&mut rig, &first, &data);
        assert_eq!(moved(&rig) - before, LEN as u64 - 512);
        let before = moved(&rig);
        rig.stalled = true;
        rig.read(2, 0, BLOCKS);
        rig.poll_sent();
        assert_eq!(moved(&rig), before, "not yet");
        rig.stalled = false;
        let mut received = rig.with(|ch, cx| ch.handle_sent(cx, true));
        if keys == LEVEL_1 {
            let ttts: Vec<_> = (1..20).map(Ttt).collect();
            for ttt in ttts {
                for begin in [4, 8] {
                    received.extend(rig.send(&data_ack(ttt, begin), &[]));
                }
            }
            let acknowledged = StatSn(1000);
            let _ = rig.with(|ch, cx| {
                ch.channel_mut()
                    .executor
                    .on_acknowledged(cx, Some(acknowledged));
            });
        }
        assert_eq!(moved(&rig) - before, LEN as u64, "{keys:?}");
        rig.close();
    }
}

/// If an initiator never reads, it must not keep response data without limit, even if it's still
/// connected.
#[test]
fn unread_response_is_not_kept_forever() {
    let untagged = 0xffff_ffff;
    for keys in [KEYS, LEVEL_1] {
        let mut rig = rig(keys);
        rig.stalled = true;
        rig.read(1, 0, 1);
        rig.poll_sent();
        // This isn't passed to the socket.
        rig.read(2, 0, 1);
        if keys == LEVEL_1 {
            // All of it is received, but never acknowledged.
            rig.stalled = false;
            rig.with(|ch, cx| ch.handle_sent(cx, true));
        }
        for tag in [1, 2] {
            let state = rig.channel.channel().executor().task_state(Itt(tag));
            assert_eq!(state, Some(TaskState::Sent), "{keys:?}");
        }
        for _ in 0..11 {
            rig.wait(Duration::from_secs(10));
            rig.nop(untagged, b"");
            assert!(!rig.disconnected, "{keys:?}");
        }
        assert!(rig.pool.free() < rig.pool.size());
        rig.wait(Duration::from_secs(10));
        assert!(rig.disconnected, "{keys:?}");
        assert!(rig.gate.events.contains(&SessionEvent::TimedOut));
        if keys == KEYS {
            let rest = rig.pool.size() - rig.pool.free();
            assert!(rest > 0, "the socket has a buffer");
            rig.with(|ch, cx| ch.handle_sent(cx, false));
        }
        rig.close();
    }
}

/// A slow reader is served without a time limit.
#[test]
fn slow_reader_has_no_time_limit() {
    let untagged = 0xffff_ffff;
    let mut rig = rig(KEYS);
    for tag in 1..20 {
        rig.stalled = true;
        rig.read(tag, 0, 1);
        rig.poll_sent();
        for _ in 0..10 {
            rig.wait(Duration::from_secs(10));
            rig.nop(untagged, b"");
        }
        rig.stalled = false;
        rig.with(|ch, cx| ch.handle_sent(cx, true));
        assert!(!rig.disconnected);
    }
    // Nothing is waiting any more.
    for _ in 0..20 {
        rig.nop(untagged, b"");
        rig.wait(Duration::from_secs(10));
    }
    assert!(!rig.disconnected);
    assert_eq!(rig.pool.free(), rig.pool.size());
    rig.close();
}

/// The time used by the disk between two pieces must not be counted for the initiator.
#[test]
fn disk_time_is_not_counted() {
    let data = pattern();
    let mut rig = rig("");
    let first = rig.write(1, BLOCKS, &[], true);
    rig.prompt = false;
    assert!(send_solicited(&mut rig, r2t(&first), &data).is_empty());
    for n in 0..100 {
        rig.wait(Duration::from_secs(10));
        rig.nop(1000 + n, b"");
    }
    let received = rig.finish_all_blocks();
    assert!(!rig.disconnected);
    rig.prompt = true;
    rig.wait(Duration::from_secs(10));
    let (_, last) = send_all_data(&mut rig, &received, &data);
    assert_eq!(response_of(&last).status, 0);
    rig.close();
}

/// RFC 7143 11.7.2: at level 1, a piece is kept until it's acknowledged by the initiator, and can
/// be sent again until then.
#[test]
fn piece_is_kept_until_acknowledged() {
    let mut rig = rig(LEVEL_1);
    let received = rig.read(1, 0, BLOCKS);
    assert_eq!(data_in(&received).0, [0, 1, 2, 3]);
    let ttt = requested_ack(&received);
    let resent = rig.send(&resend_data(1, 2, 2), &[]);
    assert_eq!(data_in(&resent).0, [2, 3]);
    assert_eq!(requested_ack(&resent), ttt);
    for (ttt, begin) in [(ttt, 3), (ttt, 5), (Ttt(ttt.0 + 1), 4)] {
        let refused = rig.send(&data_ack(ttt, begin), &[]);
        assert!(matches!(
            refused[..],
            [(FromTarget::Reject(r), ..)] if r.reason == RejectReason::InvalidDataAck
        ));
    }
    let received = rig.send(&data_ack(ttt, 4), &[]);
    assert_eq!(data_in(&received).0, [4, 5, 6, 7]);
    assert!(rig.send(&data_ack(ttt, 4), &[]).is_empty(), "once more");
    assert!(is_protocol_error(&rig.send(&resend_data(1, 1, 1), &[])));
    let received = rig.send(&data_ack(requested_ack(&received), 8), &[]);
    let (sns, stat_sn) = data_in(&received);
    assert_eq!(sns, [8]);
    assert!(stat_sn.is_some());
    check_memory(&rig);
    // If it's never acknowledged, we must not wait without limit.
    rig.read(2, 0, BLOCKS);
    for n in 0..8 {
        rig.wait(Duration::from_secs(2));
        rig.nop(1000 + n, b"");
    }
    assert!(rig.disconnected);
    rig.close();
    // Abort while waiting for the acknowledgment.
    let mut rig = self::rig(LEVEL_1);
    rig.read(1, 0, BLOCKS);
    let received = rig.tmf(9, TmfFunction::AbortTask, 1);
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    assert_eq!(status(&rig.read(2, 0, 1)).0, 0);
    rig.close();
}

/// After a piece was acknowledged, its buffer is used for the next piece or by another command, so
/// we must not send it again.
#[test]
fn acknowledged_piece_is_not_resent() {
    let mut rig = rig(LEVEL_1);
    let ttt = requested_ack(&rig.read(1, 0, BLOCKS));
    rig.prompt = false;
    assert!(rig.send(&data_ack(ttt, 4), &[]).is_empty());
    assert_eq!(rig.blocks().len(), 1, "the next piece is being read");
    for (begin, run) in [(0, 0), (0, 4), (3, 1), (4, 0)] {
        let received = rig.send(&resend_data(1, begin, run), &[]);
        assert!(is_protocol_error(&received), "{begin} {run}");
    }
    let received = rig.finish_all_blocks();
    assert_eq!(data_in(&received).0, [4, 5, 6, 7]);
    assert!(
        rig.send(&data_ack(requested_ack(&received), 8), &[])
            .is_empty()
    );
    let received = rig.tmf(9, TmfFunction::AbortTask, 1);
    assert_eq!(tmf_status(&received), TmfStatus::Complete);
    assert_eq!(rig.pool.free(), rig.pool.size());
    // First there is no buffer, and after that it's used by another command.
    assert!(is_protocol_error(&rig.send(&resend_data(1, 0, 0), &[])));
    assert!(rig.read(2, 0, 1).is_empty());
    assert!(is_protocol_error(&rig.send(&resend_data(1, 0, 0), &[])));
    assert_eq!(data_in(&rig.finish_all_blocks()).0, [0]);
    rig.close();
}

/// After a logout request, there will be no acknowledgments, so we don't keep pieces and don't send
/// them either.
#[test]
fn logout_does_not_wait_for_acknowledgments() {
    // All of the piece was sent.
    let mut rig = rig(LEVEL_1);
    let ttt = requested_ack(&rig.read(1, 0, BLOCKS));
    assert!(is_logged_out(&log_out(&mut rig)));
    assert!(rig.send(&data_ack(ttt, 4), &[]).is_empty());
    rig.close();

    // Nothing was sent.
    let mut rig = self::rig(LEVEL_1);
    rig.stalled = true;
    rig.read(1, 0, BLOCKS);
    rig.stalled = false;
    assert!(is_logged_out(&log_out(&mut rig)));
    rig.close();

    // A part of it is being sent.
    let mut rig = Rig::with_window(32 << 10, LEVEL_1);
    rig.stalled = true;
    rig.read(1, 0, 255);
    let sent = rig.poll_sent();
    assert!((1..64).contains(&sent.len()), "{}", sent.len());
    assert!(log_out(&mut rig).is_empty());
    assert_eq!(rig.units[0].tasks(), 1, "the socket has its buffer");
    rig.stalled = false;
    let received = rig.with(|ch, cx| ch.handle_sent(cx, true));
    assert!(is_logged_out(&received));
    rig.close();

    // If a piece is read later, it's sent without waiting for an acknowledgment.
    let mut rig = self::rig(LEVEL_1);
    rig.prompt = false;
    rig.read(1, 0, BLOCKS);
    assert!(log_out(&mut rig).is_empty());
    rig.prompt = true;
    let mut received = rig.finish_all_blocks();
    assert!(is_logged_out(&received.split_off(received.len() - 1)));
    assert_eq!(data_in(&received).0, (0..9).collect::<Vec<_>>());
    rig.close();
}

#[test]
fn lost_pdu_keeps_other_command_active() {
    let mut rig = Rig::logged_in("FirstBurstLength=8192\0");
    for tag in [1, 2] {
        rig.write(tag, 16, &[], false);
    }
    for at in 1..16 {
        rig.data_out(1, Ttt::NONE, at, at * 512, &[1; 512], at == 15);
    }
    let more = let_another_wait(&mut rig);
    for at in 0..16 {
        rig.wait(STEADY);
        assert!(
            !rig.disconnected,
            "its data come, and after {at} s it is cut"
        );
        rig.data_out(2, Ttt::NONE, at, at * 512, &[1; 512], at == 15);
    }
    end_with(rig, more);
}

/// Returns the time in seconds until an initiator is disconnected when sending the data of a WRITE
/// at `rate` bytes per second, or `None` if all data is received.
fn trickle(rate: u32, others_wait: bool) -> Option<u64> {
    const SEGMENT: u32 = 8192;
    let mut rig = Rig::logged_in("MaxBurstLength=8192\0");
    let mut requested = r2ts(&rig.write(1, 255, &[], true)).pop();
    let more = match others_wait {
        true => let_another_wait(&mut rig),
        false => Vec::new(),
    };
    let (mut sn, mut at, mut owed) = (0, 0, 0);
    let mut seconds = 0;
    while !rig.disconnected && requested.is_some() && seconds < 600 {
        rig.wait(Duration::from_secs(1));
        seconds += 1;
        owed += rate;
        while let Some(r2t) = requested.filter(|_| owed > 0 && !rig.disconnected) {
            let len = owed.min(SEGMENT).min(r2t.len - at);
            let data = vec![1; len as usize];
            let is_last = at + len == r2t.len;
            let response = rig.data_out(1, r2t.ttt, sn, r2t.offset + at, &data, is_last);
            (sn, at, owed) = (sn + 1, at + len, owed - len);
            if is_last {
                (sn, at) = (0, 0);
                requested = r2ts(&response).pop();
            }
        }
    }
    let is_cut = rig.disconnected;
    end_with(rig, more);
    is_cut.then_some(seconds)
}

/// On Linux, commands fail after 30 s. The limit is based on the rate, regardless of the burst
/// size.
#[test]
fn trickling_initiator_is_cut_while_others_wait() {
    for rate in [0, 1, 2, 16, 256, 1024, 4096] {
        let seconds = trickle(rate, true);
        assert!(seconds.is_some_and(|s| s < 30), "{rate} B/s: {seconds:?}");
    }
    for rate in [32 << 10, 128 << 10, 512 << 10, 1 << 20] {
        assert_eq!(trickle(rate, true), None, "{rate} B/s");
    }
}

/// We must not disconnect an initiator with a slow link if nobody is waiting for its memory.
#[test]
fn slow_initiator_survives_alone() {
    for rate in [2048, 4096, 64 << 10, 1 << 20] {
        assert_eq!(trickle(rate, false), None, "{rate} B/s");
    }
}

/// Initiator of a command that waits for another command in the order of the unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiter {
    Nobody,
    Same,
    Other,
}

/// Adds a WRITE from another initiator to the task set of the unit.
fn enter_foreign_write(rig: &Rig) -> TaskKey {
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let new = NewTask {
        attribute: TaskAttribute::Simple,
        footprint: Opcode::of(&cdb).footprint(&cdb),
        awaits_data: false,
    };
    let name = TaskRef {
        worker: 9,
        channel: 9,
        index: TaskIdx(0),
        generation: 0,
    };
    let entered = rig.units[0].register(NexusId(99), new, (name, LunId::ZERO), false, None);
    let (key, is_started) = entered.unwrap();
    assert!(!is_started, "it waits for blocks");
    key
}

/// Returns the time in seconds until a connection is closed that sends one byte per second for a
/// long WRITE, while another command is waiting for it.
fn hold_order(waiter: Waiter) -> Option<u64> {
    let mut rig = rig("MaxBurstLength=512\0");
    let data = vec![1; LEN];
    let first = orwrite(&mut rig, 1);
    // The first piece is received before the command has a place in the order.
    let mut requested = r2ts(&send_solicited(&mut rig, r2t(&first), &data))
        .pop()
        .unwrap();
    while requested.offset < 2048 {
        requested = r2ts(&send_solicited(&mut rig, requested, &data))
            .pop()
            .unwrap();
    }
    if waiter == Waiter::Same {
        assert!(write_at(&mut rig, 3, 0).is_empty(), "it waits for blocks");
    }
    let foreign = (waiter == Waiter::Other).then(|| enter_foreign_write(&rig));
    let seconds = (1..=60).find(|n| {
        let (sn, offset) = (*n as u32 - 1, requested.offset + *n as u32 - 1);
        rig.wait(Duration::from_secs(1));
        if !rig.disconnected {
            rig.data_out(1, requested.ttt, sn, offset, &[1], false);
        }
        rig.disconnected
    });
    if let Some(key) = foreign {
        let _ = rig.units[0].remove(key);
    }
    rig.close();
    seconds
}

#[test]
fn trickling_write_holds_order_for_seconds() {
    let held = hold_order(Waiter::Other);
    assert!(held.is_some_and(|seconds| seconds <= 12), "{held:?}");
    assert_eq!(hold_order(Waiter::Nobody), None);
}

/// Other initiators wait for the total time of all pieces, even if each piece is short.
#[test]
fn slow_pieces_hold_order_for_seconds() {
    const BLOCKS: u8 = 64;
    let mut rig = rig("MaxBurstLength=512\0");
    let data = vec![1; usize::from(BLOCKS) * 512];
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x8b, BLOCKS);
    let first = rig.command(1, &cdb, true, data.len() as u32, &[], true);
    // The first piece is received before the command has a place in the order.
    let mut requested = r2ts(&send_solicited(&mut rig, r2t(&first), &data)).pop();
    while let Some(r2t) = requested.filter(|r2t| r2t.offset < 2048) {
        requested = r2ts(&send_solicited(&mut rig, r2t, &data)).pop();
    }
    let foreign = enter_foreign_write(&rig);
    let mut seconds = 0;
    while let Some(r2t) = requested.filter(|_| !rig.disconnected) {
        rig.wait(Duration::from_secs(1));
        seconds += 1;
        if !rig.disconnected {
            requested = r2ts(&send_solicited(&mut rig, r2t, &data)).pop();
        }
    }
    assert!(rig.disconnected && seconds <= 12, "{seconds} s");
    let _ = rig.units[0].remove(foreign);
    rig.close();
}

/// An initiator waiting for its own command doesn't delay any other, even if its link is slow.
#[test]
fn own_waiting_command_shortens_no_time() {
    assert_eq!(hold_order(Waiter::Same), None);
}
