//! Tests for commands waiting for the rate limits of a unit or initiator.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LogoutReason, LogoutRequest, TmfFunction};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt};

use super::fixture::{Received, Rig};
use super::task::TaskState;
use crate::qos::IoLimits;

const TENTH: Duration = Duration::from_millis(100);

/// Creates a connection with a unit limited to ten commands per second. The first one is already
/// used.
fn limited() -> Rig {
    let mut rig = Rig::logged_in("");
    rig.gate.unit.limits.set(&IoLimits {
        iops: Some(10),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    assert_eq!(rig.read(1, 0, 1).len(), 1);
    rig
}

fn state(rig: &Rig, tag: u32) -> Option<TaskState> {
    rig.channel.channel().executor().task_state(Itt(tag))
}

fn is_good(received: &[Received], tag: u32) -> bool {
    received.iter().any(|(pdu, ..)| match pdu {
        FromTarget::ScsiResponse(response) => response.itt == Itt(tag) && response.status == 0,
        _ => false,
    })
}

#[test]
fn limited_command_receives_unsolicited_data() {
    let mut rig = limited();
    let data = [9; 1024];
    assert!(rig.write(2, 2, &data[..512], false).is_empty());
    assert_eq!(state(&rig, 2), Some(TaskState::AwaitLimit));
    rig.data_out(2, Ttt::NONE, 0, 512, &data[512..], true);
    assert_eq!(state(&rig, 2), Some(TaskState::AwaitLimit));
    assert_eq!(rig.pool.free(), rig.pool.size());
    // Commands that don't access blocks must not wait.
    assert_eq!(rig.command(3, &[0; 6], false, 0, &[], true).len(), 1);
    assert!(rig.wait(TENTH - Duration::from_nanos(1)).is_empty());
    assert_eq!(rig.disk[..1024], [0; 1024]);
    let received = rig.wait(Duration::from_nanos(1));
    assert!(is_good(&received, 2), "{received:?}");
    assert_eq!(rig.disk[..1024], data);
    rig.close();
}

#[test]
fn limited_command_solicits_data_when_resumed() {
    let mut rig = limited();
    assert!(rig.write(2, 8, &[], true).is_empty());
    let received = rig.wait(TENTH);
    let [(FromTarget::R2t(r2t), ..)] = &received[..] else {
        panic!("{received:?}");
    };
    let received = rig.data_out(2, r2t.ttt, 0, 0, &[5; 4096], true);
    assert!(is_good(&received, 2), "{received:?}");
    rig.close();
}

#[test]
fn functions_abort_limited_commands() {
    use TmfFunction as Function;
    for function in [
        Function::AbortTask,
        Function::AbortTaskSet,
        Function::ClearTaskSet,
        Function::LogicalUnitReset,
        Function::TargetWarmReset,
        Function::NexusReset,
    ] {
        let mut rig = limited();
        for tag in [2, 3] {
            assert!(rig.write(tag, 1, &[tag as u8; 512], true).is_empty());
        }
        let answers = rig.tmf(9, function, 2);
        let answered = |(pdu, ..): &Received| matches!(pdu, FromTarget::TmfResponse(_));
        assert!(answers.iter().any(answered), "{function:?} does not wait");
        assert_eq!(state(&rig, 2), None);
        let is_one = function == Function::AbortTask;
        let received = rig.wait(TENTH);
        assert_eq!(is_good(&received, 3), is_one, "{function:?}");
        rig.wait(Duration::from_secs(5));
        let expected = if is_one { 3 } else { 0 };
        assert_eq!(rig.disk[..512], [expected; 512], "{function:?}");
        if function == Function::NexusReset {
            // The session was closed with its nexus.
            rig.close();
            continue;
        }
        rig.command(5, &[0; 6], false, 0, &[], true);
        assert!(
            is_good(&rig.write(6, 1, &[6; 512], true), 6),
            "{function:?}"
        );
        rig.close();
    }
}

#[test]
fn limited_commands_do_not_delay_logout() {
    let mut rig = limited();
    rig.write(2, 1, &[2; 512], true);
    rig.close();
    let mut rig = limited();
    rig.write(2, 1, &[2; 512], true);
    let request = LogoutRequest {
        immediate: true,
        reason: LogoutReason::CloseSession,
        itt: Itt(7),
        cid: Cid(0),
        cmd_sn: CmdSn(rig.cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    let received = rig.send(&FromInitiator::LogoutRequest(request), &[]);
    let answered = |(pdu, ..): &Received| matches!(pdu, FromTarget::LogoutResponse(_));
    assert!(received.iter().any(answered), "{received:?}");
    rig.wait(TENTH);
    assert_eq!(rig.disk[..512], [0; 512]);
    assert!(rig.released);
    assert_eq!(rig.gate.unit.tasks(), 0);
}

/// At error recovery level 2, a command continues to wait after its connection is lost.
#[test]
fn limited_command_survives_connection_loss() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=2\0");
    rig.gate.unit.limits.set(&IoLimits {
        write_iops: Some(10),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    rig.write(1, 1, &[1; 512], true);
    rig.write(2, 1, &[2; 512], true);
    assert_eq!(state(&rig, 2), Some(TaskState::AwaitLimit));
    rig.with(|ch, cx| ch.channel_mut().handle_disconnected(cx));
    rig.wait(TENTH);
    assert_eq!(
        state(&rig, 2),
        Some(TaskState::Sent),
        "it waits for another one"
    );
    assert_eq!(rig.disk[..512], [2; 512]);
    rig.wait(Duration::from_secs(60));
    assert!(rig.released);
    assert_eq!(rig.gate.unit.tasks(), 0);
}

#[test]
fn changed_limits_apply_to_waiting_commands() {
    let mut rig = limited();
    for tag in 2..5 {
        assert!(rig.read(tag, 0, 1).is_empty());
    }
    rig.gate.unit.limits.set(&IoLimits::default());
    let received = rig.with(|ch, cx| ch.channel_mut().handle_limits(cx));
    assert_eq!(received.len(), 3);
    rig.close();
}

/// Unsolicited data isn't stored in the pool, so only a few commands can wait while holding such
/// data.
#[test]
fn unsolicited_data_of_waiting_commands_is_bounded() {
    let mut rig = limited();
    let before = rig.channel.channel().memory();
    let burst: usize = 64 << 10;
    let blocks = (burst / 512) as u8;
    for tag in 2..6 {
        assert!(rig.write(tag, blocks, &[9; 512], false).is_empty());
        assert_eq!(state(&rig, tag), Some(TaskState::AwaitLimit));
    }
    // Data that hasn't been received yet must be included. We use VERIFY (10) because it doesn't
    // wait for other writes.
    let verify = [0x2f, 2, 0, 0, 0, 0, 0, 0, blocks, 0];
    let verified = rig.command(6, &verify, true, burst as u32, &[9; 512], false);
    assert!(verified.is_empty());
    assert_eq!(state(&rig, 6), Some(TaskState::AwaitUnsolicited));
    assert!(rig.read(7, 0, 1).is_empty());
    assert_eq!(state(&rig, 7), Some(TaskState::AwaitLimit));
    assert!(rig.channel.channel().memory() >= before + 4 * 512);
    for tag in 2..7 {
        rig.data_out(tag, Ttt::NONE, 0, 512, &vec![9; burst - 512], true);
    }
    assert!(rig.channel.channel().memory() >= before + 4 * burst);
    rig.wait(TENTH);
    rig.wait(TENTH);
    assert!(rig.write(8, blocks, &[9; 512], false).is_empty());
    assert_eq!(state(&rig, 8), Some(TaskState::AwaitLimit));
    rig.close();
}
