//! Tests for commands waiting for the rate limits of a unit or initiator.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{FromTarget, TmfFunction};
use riser_scsi::iscsi::{Itt, Ttt};

use super::task::TaskState;
use crate::qos::IoLimits;
use crate::tests::rig;
use crate::tests::rig::tcp::{Received, TcpPeer};
use crate::worker::fabrics::Input;

type Rig = rig::Rig<TcpPeer>;

const TENTH: Duration = Duration::from_millis(100);

/// Creates a connection with a unit limited to ten commands per second. The first one is already
/// used.
fn limited() -> Rig {
    let mut rig = Rig::logged_in("");
    rig.units[0].limits.set(&IoLimits {
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
    assert_eq!(rig.disks[0][..1024], [0; 1024]);
    let received = rig.wait(Duration::from_nanos(1));
    assert!(is_good(&received, 2), "{received:?}");
    assert_eq!(rig.disks[0][..1024], data);
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
fn nexus_reset_aborts_limited_commands() {
    let mut rig = limited();
    for tag in [2, 3] {
        assert!(rig.write(tag, 1, &[tag as u8; 512], true).is_empty());
    }
    let responses = rig.tmf(9, TmfFunction::NexusReset, 2);
    let is_response = |(pdu, ..): &Received| matches!(pdu, FromTarget::TmfResponse(_));
    assert!(responses.iter().any(is_response), "it does not wait");
    assert_eq!(state(&rig, 2), None);
    assert!(!is_good(&rig.wait(TENTH), 3));
    rig.wait(Duration::from_secs(5));
    assert_eq!(rig.disks[0][..512], [0; 512]);
    // The session was closed with its nexus.
    rig.close();
}

#[test]
fn limited_commands_do_not_delay_logout() {
    let mut rig = limited();
    rig.write(2, 1, &[2; 512], true);
    rig.close();
    let mut rig = limited();
    rig.write(2, 1, &[2; 512], true);
    let received = rig.log_out();
    let is_response = |(pdu, ..): &Received| matches!(pdu, FromTarget::LogoutResponse(_));
    assert!(received.iter().any(is_response), "{received:?}");
    rig.wait(TENTH);
    assert_eq!(rig.disks[0][..512], [0; 512]);
    assert!(rig.released);
    assert_eq!(rig.units[0].tasks(), 0);
}

/// At error recovery level 2, a command continues to wait after its connection is lost.
#[test]
fn limited_command_survives_connection_loss() {
    let mut rig = Rig::logged_in("ErrorRecoveryLevel=2\0");
    rig.units[0].limits.set(&IoLimits {
        write_iops: Some(10),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    rig.write(1, 1, &[1; 512], true);
    rig.write(2, 1, &[2; 512], true);
    assert_eq!(state(&rig, 2), Some(TaskState::AwaitLimit));
    rig.apply(Input::Disconnected);
    rig.wait(TENTH);
    assert_eq!(
        state(&rig, 2),
        Some(TaskState::Sent),
        "it waits for another one"
    );
    assert_eq!(rig.disks[0][..512], [2; 512]);
    rig.wait(Duration::from_secs(60));
    assert!(rig.released);
    assert_eq!(rig.units[0].tasks(), 0);
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
