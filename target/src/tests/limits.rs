//! Commands waiting for the limits of their unit or initiator.

use std::sync::Arc;
use std::time::Duration;

use riser_scsi::opcode::Kind;

use super::rig::script::{Command, GOOD, Outcome, command, read10, scripts, write10};
use super::rig::{Peer, Rig};
use crate::fabric::task_mgmt::Function;
use crate::iscsi::TaskState;
use crate::qos::{IoLimits, Limiter};
use crate::stats::Throttle;
use crate::worker::fabrics::Input;

const TENTH: Duration = Duration::from_millis(100);

fn iops(rate: u64) -> IoLimits {
    IoLimits {
        iops: Some(rate),
        burst: Duration::ZERO,
        ..IoLimits::default()
    }
}

fn bandwidth(rate: u64) -> IoLimits {
    IoLimits {
        bandwidth: Some(rate),
        burst: Duration::ZERO,
        ..IoLimits::default()
    }
}

/// Returns a connection whose first unit is limited to ten commands per second.
fn limited<P: Peer>() -> Rig<P> {
    let rig = Rig::start();
    rig.units[0].limits.set(&iops(10));
    rig
}

fn write(tag: u32) -> Command {
    write10(tag, &[7; 512]).tag(tag)
}

fn read(tag: u32) -> Command {
    read10(tag, 1).tag(tag)
}

fn waiting<P: Peer>(rig: &Rig<P>) -> usize {
    let peers = 0..rig.peers.len();
    let states = peers.flat_map(|peer| rig.states(peer));
    states
        .filter(|state| *state == TaskState::AwaitLimit)
        .count()
}

/// Returns the number of throttled commands of the first unit, by kind and reason.
fn throttled<P: Peer>(rig: &Rig<P>) -> Vec<(Kind, Throttle, u64)> {
    let faults = rig.stats[0].faults();
    let all = faults
        .iter()
        .filter_map(|(f, n)| Some((f.class, f.throttle?, n)));
    all.collect()
}

/// Advances the time, and completes the commands that may start then.
fn advance<P: Peer>(rig: &mut Rig<P>, by: Duration) -> Vec<u32> {
    rig.advance(by);
    rig.complete_all();
    rig.tags()
}

/// A context is reused from a command of a different kind.
fn throttled_command_is_counted_by_its_kind<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.units[0].limits.set(&bandwidth(512));
    // All contexts were used for a write.
    for tag in 1..17 {
        rig.run(0, write(tag).lun(1));
    }
    for tag in 21..24 {
        rig.submit(0, read10(0, 8).tag(tag));
    }
    rig.complete_all();
    assert_eq!(throttled(&rig), [(Kind::Read, Throttle::Limit, 1)]);
    advance(&mut rig, Duration::from_secs(8));
    rig.close();
}

fn limited_commands_wait_without_memory<P: Peer>() {
    let mut rig = limited::<P>();
    for tag in 1..4 {
        rig.submit(0, write(tag));
    }
    rig.complete_all();
    assert_eq!((rig.tags(), waiting(&rig)), (vec![1], 2));
    assert_eq!(rig.units[0].limit_waits(), 2);
    assert_eq!(rig.pool.free(), rig.pool.size());
    // Commands without block access do not have to wait, and neither do commands for another unit.
    rig.run(0, command(&[0; 6]).tag(4));
    rig.run(0, write(5).lun(1));
    for tag in 2..4 {
        assert_eq!(rig.deadline(), Some(rig.now + TENTH));
        rig.advance(TENTH - Duration::from_nanos(1));
        assert!(rig.work.is_empty());
        assert_eq!(advance(&mut rig, Duration::from_nanos(1)), [tag]);
    }
    for tag in 1..4 {
        assert_eq!(rig.disks[0][tag * 512..][..512], [7; 512]);
    }
    let waits = rig.units[0].limits.waits();
    assert_eq!((waits.commands, waits.time), (2, 3 * TENTH));
    rig.close();
}

fn aborted_waiting_commands_never_execute<P: Peer>() {
    for &function in P::FUNCTIONS {
        let mut rig = limited::<P>();
        for tag in 1..4 {
            rig.submit(0, write(tag));
        }
        rig.complete_all();
        assert_eq!(rig.tags(), [1]);
        rig.manage(0, 9, function, 2);
        rig.complete_all();
        assert_eq!(rig.tags(), [9], "{function:?} does not wait");
        let left = usize::from(function == Function::AbortTask);
        assert_eq!(waiting(&rig), left);
        let expected: &[u32] = if left == 1 { &[3] } else { &[] };
        assert_eq!(advance(&mut rig, TENTH), expected, "{function:?}");
        rig.advance(Duration::from_secs(10));
        assert_eq!(rig.disks[0][2 * 512..][..512], [0; 512], "{function:?}");
        // After the unit attention of a reset, new commands are executed.
        rig.run(0, command(&[0; 6]).tag(6));
        assert_eq!(rig.run(0, write(7)), GOOD);
        rig.close();
    }
}

fn foreign_reset_completes_waiting_commands<P: Peer>() {
    let mut rig = limited::<P>();
    let other = rig.add_session(2);
    for tag in 1..3 {
        rig.submit(0, write(tag));
    }
    rig.complete_all();
    rig.tags();
    rig.manage(other, 9, Function::LogicalUnitReset, 0);
    rig.complete_all();
    assert_eq!(rig.statuses(), [(2, 0x40), (9, 0)]);
    rig.advance(Duration::from_secs(1));
    assert!(rig.work.is_empty());
    rig.close();
}

fn waiting_commands_end_with_connection<P: Peer>() {
    for ends in 0..3 {
        let mut rig = limited::<P>();
        for tag in 1..4 {
            rig.submit(0, write(tag));
        }
        rig.complete_all();
        assert_eq!(waiting(&rig), 2);
        let until = rig.now + Duration::from_secs(5);
        match ends {
            0 => rig.pass(0, Input::Disconnected),
            1 => rig.pass(0, Input::Terminate),
            // After a shutdown, they can complete, but within the same deadline as other commands.
            _ => {
                rig.pass(0, Input::Shutdown(until));
                assert!(!rig.in_error());
                assert_eq!(rig.tags(), [1]);
                for tag in [2, 3] {
                    assert_eq!(advance(&mut rig, TENTH), [tag]);
                }
            }
        }
        rig.complete_all();
        assert_eq!(waiting(&rig), 0);
        assert_eq!(rig.disks[0][3 * 512], if ends == 2 { 7 } else { 0 });
        rig.advance(Duration::from_secs(5));
        rig.complete_all();
        assert_eq!(rig.disks[0][3 * 512], if ends == 2 { 7 } else { 0 });
        assert!(rig.in_error());
        rig.check_gone();
    }
}

fn waiting_commands_keep_nexus_order<P: Peer>() {
    let mut rig = limited::<P>();
    rig.run(0, write(1));
    rig.submit(0, read(2));
    // This has to wait for the read, which is waiting for its limit.
    rig.submit(0, command(&[0x35]).tag(3).ordered());
    rig.submit(0, command(&[0; 6]).tag(4));
    rig.complete_all();
    assert!(rig.tags().is_empty());
    assert_eq!(advance(&mut rig, TENTH), [2, 3, 4]);
    rig.close();
}

/// A command that waits for older tasks keeps its data in memory, so it must not wait behind a
/// command that is waiting for a limit.
fn limited_commands_block_no_data_buffers<P: Peer>() {
    let mut rig = limited::<P>();
    rig.run(0, write(1));
    rig.submit(0, read(2).ordered());
    rig.submit(0, write(3));
    // MODE SELECT (6).
    rig.submit(0, command(&[0x15, 0x10, 0, 0, 4, 0]).out(&[0; 4]).tag(4));
    rig.complete_all();
    assert_eq!(rig.statuses(), [(3, 0x28), (4, 0x28)], "TASK SET FULL");
    let limit = |kind| (kind, Throttle::Limit, 1);
    assert_eq!(throttled(&rig), [limit(Kind::Write), limit(Kind::Other)]);
    assert_eq!(rig.pool.free(), rig.pool.size());
    assert_eq!(advance(&mut rig, TENTH), [2]);
    rig.close();
}

fn new_limits_apply_to_waiting_commands<P: Peer>() {
    let mut rig = limited::<P>();
    for tag in 1..5 {
        rig.submit(0, read(tag));
    }
    rig.complete_all();
    assert_eq!((rig.tags(), waiting(&rig)), (vec![1], 3));
    rig.units[0].limits.set(&iops(1000));
    rig.pass(0, Input::Limits);
    assert_eq!(advance(&mut rig, Duration::from_millis(1)), [2, 3]);
    assert_eq!(waiting(&rig), 1);
    rig.units[0].limits.set(&IoLimits::default());
    rig.pass(0, Input::Limits);
    rig.complete_all();
    assert_eq!(rig.tags(), [4]);
    rig.close();
}

/// All connections of an initiator share its limits, but not with another initiator.
fn initiator_connections_share_limits<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.add_session(P::SIBLING);
    rig.add_session(2);
    let own = Arc::new(Limiter::new(&iops(10)));
    let luns = rig.gate.luns(false).with_limiter(Some(own));
    let luns = Arc::new(luns);
    for peer in [0, 1] {
        rig.pass(peer, Input::Luns(Arc::clone(&luns)));
    }
    assert!(rig.work.is_empty(), "its units are the same");
    rig.submit(0, read(1));
    rig.submit(0, write(2).lun(1));
    rig.submit(1, write(3));
    rig.submit(2, write(4));
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 4]);
    assert_eq!(advance(&mut rig, TENTH), [2]);
    assert_eq!(advance(&mut rig, TENTH), [3]);
    rig.close();
}

/// The cost of a command depends on the data transferred, not on the expected length.
fn command_cost_is_transferred_data<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.units[0].limits.set(&bandwidth(512));
    // Each of these transfers one block, even if the initiator's buffer is larger or missing.
    rig.run(0, write(1).out(&[7; 1 << 19]));
    rig.submit(0, read(2).into(0));
    rig.submit(0, read(3).into(1 << 19));
    // This exceeds the maximum transfer size, so it is rejected without any cost.
    let long = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0];
    rig.run(0, command(&long).tag(4));
    assert_eq!(waiting(&rig), 2);
    let second = Duration::from_secs(1);
    for tag in [2, 3] {
        assert_eq!(advance(&mut rig, second), [tag]);
    }
    // WRITE SAME (10) writes the block multiple times.
    rig.advance(second);
    let same = command(&[0x41, 0, 0, 0, 0, 0, 0, 0, 8, 0]).tag(5);
    rig.run(0, same.out(&[7; 512]));
    rig.submit(0, read(6));
    for number in 1..=8 {
        let tags = advance(&mut rig, second);
        assert_eq!(tags, &[6][usize::from(number < 8)..]);
    }
    rig.close();
}

/// An initiator without access to a unit must not use up the limit of other initiators.
fn rejected_command_costs_nothing<P: Peer>() {
    let mut rig = limited::<P>();
    let other = rig.add_session(2);
    let status = |rig: &mut Rig<P>, peer, command: Command| match rig.run(peer, command) {
        Outcome::Status(status, _) => status,
        other => panic!("{other:?}"),
    };
    // Beyond the end of the medium.
    for tag in 1..4 {
        let beyond = read10(u32::MAX, 1).tag(tag);
        assert_eq!(status(&mut rig, 0, beyond), 2);
    }
    // RESERVE (6) by another nexus.
    let reserve = |opcode| command(&[opcode, 0, 0, 0, 0, 0]).tag(4);
    assert_eq!(status(&mut rig, other, reserve(0x16)), 0);
    for tag in 5..8 {
        assert_eq!(status(&mut rig, 0, write(tag)), 0x18);
    }
    assert_eq!(status(&mut rig, other, reserve(0x17)), 0);
    // Through a read-only LUN.
    rig.pass(0, Input::Luns(rig.gate.luns(true).into()));
    for tag in 9..12 {
        assert_eq!(status(&mut rig, 0, write(tag)), 2);
    }
    // Through a stale LUN.
    let (stale, _) = rig.moved_lun();
    rig.pass(0, Input::Luns(stale.into()));
    for tag in 20..23 {
        assert_eq!(status(&mut rig, 0, read(tag)), 2);
    }
    rig.pass(0, Input::Luns(rig.gate.luns(true).into()));
    assert!(!rig.units[0].limits.owes(rig.now));
    assert_eq!(status(&mut rig, 0, read(12)), 0);
    assert!(rig.units[0].limits.owes(rig.now));
    rig.close();
}

/// Commands waiting for the limits of a unit must not use up the contexts for other units.
fn long_wait_returns_task_set_full<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.units[0].limits.set(&bandwidth(512));
    // Each takes eight seconds.
    for tag in 1..4 {
        rig.submit(0, read10(0, 8).tag(tag));
    }
    rig.complete_all();
    assert_eq!(rig.statuses(), [(3, 0x28), (1, 0)]);
    assert_eq!(throttled(&rig), [(Kind::Read, Throttle::Limit, 1)]);
    rig.run(0, write(4).lun(1));
    assert_eq!(advance(&mut rig, Duration::from_secs(8)), [2]);
    rig.close();
}

scripts! {
    throttled_command_is_counted_by_its_kind,
    limited_commands_wait_without_memory,
    aborted_waiting_commands_never_execute,
    foreign_reset_completes_waiting_commands,
    waiting_commands_end_with_connection,
    waiting_commands_keep_nexus_order,
    limited_commands_block_no_data_buffers,
    new_limits_apply_to_waiting_commands,
    initiator_connections_share_limits,
    command_cost_is_transferred_data,
    rejected_command_costs_nothing,
    long_wait_returns_task_set_full,
}
