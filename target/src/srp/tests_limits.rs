//! Tests for commands waiting for the limits of their unit or initiator.

use std::sync::Arc;
use std::time::Duration;

use riser_scsi::lu::LogicalUnit;
use riser_scsi::opcode::Kind;
use riser_scsi::srp::{MemDesc, TaskAttr, TskMgmtFunction};

use super::fixture::*;
use super::ioctx::IoctxState;
use super::*;
use crate::fabric::{LunMap, Mapping, TaskIdx, Unit, UnitIdx};
use crate::qos::{IoLimits, Limiter};
use crate::stats::Throttle;

const TENTH: Duration = Duration::from_millis(100);

fn iops(rate: u64) -> IoLimits {
    IoLimits {
        iops: Some(rate),
        burst: Duration::ZERO,
        ..IoLimits::default()
    }
}

/// Returns a channel whose first unit is limited to ten commands per second.
fn limited() -> Rig {
    let mut rig = Rig::live();
    rig.remote.insert(KEY, vec![7; 1 << 20]);
    rig.units[0].limits.set(&iops(10));
    rig
}

fn write(tag: u64) -> CmdBuilder {
    let data = Data::Direct(MemDesc::new(0, KEY, 512));
    write10(tag as u32, 1).tag(tag).out(data)
}

fn read(tag: u64) -> CmdBuilder {
    let data = Data::Direct(MemDesc::new(0, KEY, 512));
    read10(tag as u32, 1).tag(tag).into(data)
}

fn waiting(rig: &Rig) -> usize {
    let waits = IoctxState::AwaitLimit;
    let channels = rig.channels.iter();
    let states = channels.flat_map(|ch| (0..4).map(|n| ch.requests().state(TaskIdx(n))));
    states.filter(|state| *state == waits).count()
}

fn tags(rig: &mut Rig) -> Vec<u64> {
    rig.answers().iter().map(|answer| answer.tag).collect()
}

/// Returns the number of throttled commands of the first unit, by kind and reason.
fn throttled(rig: &Rig) -> Vec<(Kind, Throttle, u64)> {
    let faults = rig.stats[0].faults();
    let all = faults
        .iter()
        .filter_map(|(f, n)| Some((f.class, f.throttle?, n)));
    all.collect()
}

/// A context is reused from a command of a different kind.
#[test]
fn throttled_command_is_counted_by_its_kind() {
    let mut rig = limited();
    rig.units[0].limits.set(&IoLimits {
        bandwidth: Some(512),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    // All contexts were used for a write.
    for tag in 1..9 {
        rig.send(0, &write(tag).lun(1).bytes());
        rig.run_actions();
    }
    tags(&mut rig);
    let long = |tag| {
        let data = Data::Direct(MemDesc::new(0, KEY, 4096));
        read10(0, 8).tag(tag).into(data).bytes()
    };
    for tag in 11..14 {
        rig.send(0, &long(tag));
    }
    rig.run_actions();
    assert_eq!(throttled(&rig), [(Kind::Read, Throttle::Limit, 1)]);
    rig.advance(Duration::from_secs(8));
    rig.run_actions();
    rig.close();
}

#[test]
fn limited_commands_wait_without_memory() {
    let mut rig = limited();
    for tag in 1..4 {
        rig.send(0, &write(tag).bytes());
    }
    rig.run_actions();
    assert_eq!((tags(&mut rig), waiting(&rig)), (vec![1], 2));
    assert_eq!(rig.units[0].limit_waits(), 2);
    assert_eq!(rig.pool.free(), rig.pool.size());
    // Commands without block access do not have to wait, and neither do commands for another unit.
    rig.send(0, &cmd(&[0; 6]).tag(4).bytes());
    rig.run_actions();
    rig.send(0, &write(5).lun(1).bytes());
    rig.run_actions();
    assert_eq!(tags(&mut rig), [4, 5]);
    for tag in 2..4 {
        assert_eq!(rig.channels[0].deadline(), Some(rig.now + TENTH));
        rig.advance(TENTH - Duration::from_nanos(1));
        assert!(rig.pending.is_empty());
        rig.advance(Duration::from_nanos(1));
        rig.run_actions();
        assert_eq!(tags(&mut rig), [tag]);
    }
    for tag in 1..4 {
        assert_eq!(rig.disks[0][tag * 512..][..512], [7; 512]);
    }
    let waits = rig.units[0].limits.waits();
    assert_eq!((waits.commands, waits.time), (2, 3 * TENTH));
    rig.close();
}

#[test]
fn limit_delays_fetch_of_external_table() {
    let mut rig = limited();
    rig.remote.insert(TABLE, table_bytes(&blocks(2)));
    let external = || write10(0, 2).out(indirect(&blocks(2), 0));
    for tag in [1, 2] {
        rig.send(0, &external().tag(tag).bytes());
    }
    let external = read10(0, 2).tag(3).into(indirect(&blocks(2), 0));
    rig.send(0, &external.bytes());
    rig.run_actions();
    assert_eq!(tags(&mut rig), [1]);
    rig.advance(TENTH);
    rig.run_actions();
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2, 3]);
    rig.close();
}

/// Tables of waiting commands leave half of the table memory for other commands.
#[test]
fn tables_of_waiting_commands_leave_room() {
    let mut rig = limited();
    let long = |tag| write10(0, 20).tag(tag).out(indirect(&blocks(20), 20));
    rig.send(0, &long(1).bytes());
    rig.send(0, &long(2).bytes());
    assert_eq!(waiting(&rig), 1);
    let most = rig.pool.take_table(crate::pool::Owner(9), 1 << 19).unwrap();
    rig.send(0, &long(3).bytes());
    let short = read(4).bytes();
    rig.send(0, &short);
    rig.run_actions();
    let answers: Vec<_> = rig.answers().iter().map(|a| (a.tag, a.status)).collect();
    assert_eq!(answers, [(3, 8), (1, 0)], "BUSY");
    rig.pool.release(most);
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2]);
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [4]);
    rig.close();
}

#[test]
fn aborted_waiting_commands_never_execute() {
    use TskMgmtFunction as Function;
    for function in [
        Function::AbortTask,
        Function::AbortTaskSet,
        Function::ClearTaskSet,
        Function::LogicalUnitReset,
    ] {
        let mut rig = limited();
        for tag in 1..4 {
            rig.send(0, &write(tag).bytes());
        }
        rig.run_actions();
        assert_eq!(tags(&mut rig), [1]);
        rig.send(0, &tmf(9, 0, function, 2));
        rig.run_actions();
        assert_eq!(tags(&mut rig), [9], "{function:?} does not wait");
        let left = usize::from(function == Function::AbortTask);
        assert_eq!(waiting(&rig), left);
        rig.advance(TENTH);
        rig.run_actions();
        let expected: &[u64] = if left == 1 { &[3] } else { &[] };
        assert_eq!(tags(&mut rig), expected, "{function:?}");
        rig.advance(Duration::from_secs(10));
        assert_eq!(rig.disks[0][2 * 512..][..512], [0; 512], "{function:?}");
        // After the unit attention of a reset, new commands are executed.
        rig.send(0, &cmd(&[0; 6]).tag(6).bytes());
        rig.run_actions();
        rig.send(0, &write(7).bytes());
        rig.run_actions();
        assert_eq!(tags(&mut rig), [6, 7]);
        rig.close();
    }
}

#[test]
fn foreign_reset_completes_waiting_commands() {
    let mut rig = limited();
    rig.add_channel(params(), 2);
    rig.establish(1);
    for tag in 1..3 {
        rig.send(0, &write(tag).bytes());
    }
    rig.run_actions();
    tags(&mut rig);
    rig.send(1, &tmf(9, 0, TskMgmtFunction::LogicalUnitReset, 0));
    rig.run_actions();
    let answers: Vec<_> = rig.answers().iter().map(|a| (a.tag, a.status)).collect();
    assert_eq!(answers, [(2, 0x40), (9, 0)]);
    rig.advance(Duration::from_secs(1));
    assert!(rig.pending.is_empty());
    rig.close();
}

#[test]
fn waiting_commands_end_with_connection() {
    for ends in 0..3 {
        let mut rig = limited();
        for tag in 1..4 {
            rig.send(0, &write(tag).bytes());
        }
        rig.run_actions();
        assert_eq!(waiting(&rig), 2);
        let until = rig.now + Duration::from_secs(5);
        match ends {
            0 => rig.with(0, Channel::handle_disconnected),
            1 => rig.with(0, Channel::handle_terminate),
            // After a shutdown, they can complete, but within the same deadline as other commands.
            _ => {
                rig.with(0, |ch, cx| ch.handle_shutdown(cx, until));
                assert_eq!(rig.channels[0].state(), ChState::Live);
                rig.advance(TENTH);
                rig.run_actions();
                rig.advance(TENTH);
                rig.run_actions();
                assert_eq!(tags(&mut rig), [1, 2, 3]);
                assert_ne!(rig.channels[0].state(), ChState::Live);
            }
        }
        rig.run_actions();
        assert_eq!(waiting(&rig), 0);
        rig.close();
        assert_eq!(rig.disks[0][3 * 512], if ends == 2 { 7 } else { 0 });
    }
}

#[test]
fn waiting_commands_keep_nexus_order() {
    let mut rig = limited();
    rig.send(0, &write(1).bytes());
    rig.run_actions();
    rig.send(0, &read(2).bytes());
    // This has to wait for the read, which is waiting for its limit.
    rig.send(0, &cmd(&[0x35]).tag(3).attr(TaskAttr::Ordered).bytes());
    rig.send(0, &cmd(&[0; 6]).tag(4).bytes());
    rig.run_actions();
    assert_eq!(tags(&mut rig), [1]);
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2, 3, 4]);
    rig.close();
}

/// A command that waits for older tasks keeps its data in memory, so it must not wait behind a
/// command that is waiting for a limit.
#[test]
fn limited_commands_block_no_data_buffers() {
    let mut rig = limited();
    rig.send(0, &write(1).bytes());
    rig.run_actions();
    tags(&mut rig);
    rig.send(0, &read(2).attr(TaskAttr::Ordered).bytes());
    rig.send(0, &write(3).bytes());
    // MODE SELECT (6).
    let select = cmd(&[0x15, 0x10, 0, 0, 4, 0]).tag(4);
    let data = Data::Direct(MemDesc::new(0, KEY, 4));
    rig.send(0, &select.out(data).bytes());
    rig.run_actions();
    let answers: Vec<_> = rig.answers().iter().map(|a| (a.tag, a.status)).collect();
    assert_eq!(answers, [(3, 0x28), (4, 0x28)], "TASK SET FULL");
    let limit = |kind| (kind, Throttle::Limit, 1);
    assert_eq!(throttled(&rig), [limit(Kind::Write), limit(Kind::Other)]);
    assert_eq!(rig.pool.free(), rig.pool.size());
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2]);
    rig.close();
}

#[test]
fn new_limits_apply_to_waiting_commands() {
    let mut rig = limited();
    for tag in 1..5 {
        rig.send(0, &read(tag).bytes());
    }
    rig.run_actions();
    assert_eq!(waiting(&rig), 3);
    rig.units[0].limits.set(&iops(1000));
    rig.with(0, Channel::handle_limits);
    rig.advance(Duration::from_millis(1));
    rig.run_actions();
    assert_eq!(waiting(&rig), 1);
    rig.units[0].limits.set(&IoLimits::default());
    rig.with(0, Channel::handle_limits);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [1, 2, 3, 4]);
    rig.close();
}

/// All channels of an initiator share its limits, but not with another initiator.
#[test]
fn initiator_channels_share_limits() {
    let mut rig = Rig::live();
    rig.remote.insert(KEY, vec![7; 1 << 20]);
    for nexus in [1, 2] {
        let chan = rig.add_channel(params(), nexus);
        rig.establish(chan);
        rig.send(chan, &cmd(&[0; 6]).bytes());
        rig.run_actions();
    }
    let own = Arc::new(Limiter::new(&iops(10)));
    let map = |rig: &Rig| {
        let luns = rig.channels[0].config().luns.iter();
        let luns = luns.map(|(lun, unit)| {
            let mapping = Mapping {
                unit: Arc::clone(unit),
                stats: rig.stats[unit.index.0 as usize].clone(),
                read_only: false,
            };
            (lun, mapping)
        });
        LunMap::new(luns).with_limiter(Some(Arc::clone(&own)))
    };
    let map = Arc::new(map(&rig));
    rig.sent.clear();
    for chan in [0, 1] {
        rig.with(chan, |ch, cx| ch.handle_luns(cx, Arc::clone(&map)));
    }
    assert!(rig.pending.is_empty(), "its units are the same");
    rig.send(0, &read(1).bytes());
    rig.send(0, &write(2).lun(1).bytes());
    rig.send(1, &write(3).bytes());
    rig.send(2, &write(4).bytes());
    rig.run_actions();
    assert_eq!(tags(&mut rig), [1, 4]);
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2]);
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [3]);
    rig.close();
}

/// The cost of a command depends on the data transferred, not on the expected length.
#[test]
fn command_cost_is_transferred_data() {
    let mut rig = Rig::live();
    rig.remote.insert(KEY, vec![7; 1 << 20]);
    rig.units[0].limits.set(&IoLimits {
        bandwidth: Some(512),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    // Each of these transfers one block, even if the initiator's buffer is larger or missing.
    let data = || Data::Direct(MemDesc::new(0, KEY, 1 << 19));
    rig.send(0, &write10(0, 1).tag(1).out(data()).bytes());
    rig.run_actions();
    rig.send(0, &read10(0, 1).tag(2).bytes());
    rig.run_actions();
    rig.send(0, &read10(0, 1).tag(3).into(data()).bytes());
    // This exceeds the maximum transfer size, so it is rejected without any cost.
    let long = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0];
    rig.send(0, &cmd(&long).tag(4).bytes());
    rig.run_actions();
    assert_eq!((tags(&mut rig), waiting(&rig)), (vec![1, 4], 2));
    for tag in [2, 3] {
        rig.advance(Duration::from_secs(1));
        rig.run_actions();
        assert_eq!(tags(&mut rig), [tag]);
    }
    // WRITE SAME (10) writes the block multiple times.
    rig.advance(Duration::from_secs(1));
    let same = cmd(&[0x41, 0, 0, 0, 0, 0, 0, 0, 8, 0]).tag(5);
    rig.send(
        0,
        &same.out(Data::Direct(MemDesc::new(0, KEY, 512))).bytes(),
    );
    rig.run_actions();
    assert_eq!(tags(&mut rig), [5]);
    rig.send(0, &read(6).bytes());
    for second in 1..=8 {
        rig.advance(Duration::from_secs(1));
        rig.run_actions();
        assert_eq!(tags(&mut rig), &[6][usize::from(second < 8)..]);
    }
    rig.close();
}

/// An initiator without access to a unit must not use up the limit of other initiators.
#[test]
fn rejected_command_costs_nothing() {
    let mut rig = limited();
    let chan = rig.add_channel(params(), 2);
    rig.establish(chan);
    rig.send(chan, &cmd(&[0; 6]).bytes());
    rig.run_actions();
    rig.answers();
    let statuses = |rig: &mut Rig| -> Vec<u8> {
        rig.run_actions();
        rig.answers().iter().map(|answer| answer.status).collect()
    };
    // Beyond the end of the medium.
    for tag in 1..4 {
        let data = Data::Direct(MemDesc::new(0, KEY, 512));
        rig.send(0, &read10(u32::MAX, 1).tag(tag).into(data).bytes());
        assert_eq!(statuses(&mut rig), [2]);
    }
    // RESERVE (6) by another nexus.
    rig.send(chan, &cmd(&[0x16, 0, 0, 0, 0, 0]).tag(4).bytes());
    assert_eq!(statuses(&mut rig), [0]);
    for tag in 5..8 {
        rig.send(0, &write(tag).bytes());
        assert_eq!(statuses(&mut rig), [0x18]);
    }
    rig.send(chan, &cmd(&[0x17, 0, 0, 0, 0, 0]).tag(8).bytes());
    assert_eq!(statuses(&mut rig), [0]);
    // Through a read-only LUN.
    let luns = rig.channels[0].config().luns.iter();
    let luns = luns.map(|(lun, unit)| {
        let mapping = Mapping {
            unit: Arc::clone(unit),
            stats: rig.stats[unit.index.0 as usize].clone(),
            read_only: true,
        };
        (lun, mapping)
    });
    let map = Arc::new(LunMap::new(luns));
    rig.with(0, |ch, cx| ch.handle_luns(cx, Arc::clone(&map)));
    for tag in 9..12 {
        rig.send(0, &write(tag).bytes());
        assert_eq!(statuses(&mut rig), [2]);
    }
    // Through a stale LUN.
    let mut config = crate::fixture::unit_config(2048);
    config.identity.serial = "another".into();
    let lu = Arc::new(LogicalUnit::new(config).unwrap());
    let before = Mapping {
        unit: Arc::new(Unit::new(UnitIdx(9), lu, 4)),
        ..map.mapping(0).clone()
    };
    let mut stale = LunMap::new([(map.luns()[0], map.mapping(0).clone())]);
    stale.follow(&LunMap::new([(map.luns()[0], before)]));
    rig.with(0, |ch, cx| ch.handle_luns(cx, Arc::new(stale)));
    for tag in 20..23 {
        rig.send(0, &read(tag).bytes());
        assert_eq!(statuses(&mut rig), [2]);
    }
    rig.with(0, |ch, cx| ch.handle_luns(cx, Arc::clone(&map)));
    assert!(!rig.units[0].limits.owes(rig.now));
    rig.send(0, &read(12).bytes());
    assert_eq!(statuses(&mut rig), [0]);
    assert!(rig.units[0].limits.owes(rig.now));
    rig.close();
}

/// Commands waiting for the limits of a unit must not use up the contexts for other units.
#[test]
fn long_wait_returns_task_set_full() {
    let mut rig = Rig::live();
    rig.remote.insert(KEY, vec![7; 1 << 20]);
    rig.units[0].limits.set(&IoLimits {
        bandwidth: Some(512),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    // Each takes eight seconds.
    let long = |tag| {
        let data = Data::Direct(MemDesc::new(0, KEY, 4096));
        read10(0, 8).tag(tag).into(data).bytes()
    };
    for tag in 1..4 {
        rig.send(0, &long(tag));
    }
    rig.run_actions();
    let answers: Vec<_> = rig.answers().iter().map(|a| (a.tag, a.status)).collect();
    assert_eq!(answers, [(3, 0x28), (1, 0)]);
    assert_eq!(throttled(&rig), [(Kind::Read, Throttle::Limit, 1)]);
    rig.send(0, &write(4).lun(1).bytes());
    rig.run_actions();
    assert_eq!(tags(&mut rig), [4]);
    rig.advance(Duration::from_secs(8));
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2]);
    rig.close();
}

/// A command that waits for older tasks also keeps its table.
#[test]
fn limited_commands_block_no_tables() {
    let mut rig = limited();
    rig.remote.insert(TABLE, table_bytes(&blocks(20)));
    rig.send(0, &write(1).bytes());
    rig.run_actions();
    tags(&mut rig);
    rig.send(0, &write(2).attr(TaskAttr::Ordered).bytes());
    for (tag, inline) in [(3, 20), (4, 0)] {
        // INQUIRY.
        let data = indirect(&blocks(20), inline);
        rig.send(0, &cmd(&[0x12, 0, 0, 0, 96, 0]).tag(tag).into(data).bytes());
    }
    rig.run_actions();
    let answers: Vec<_> = rig.answers().iter().map(|a| (a.tag, a.status)).collect();
    assert_eq!(answers, [(3, 0x28), (4, 0x28)], "TASK SET FULL");
    rig.advance(TENTH);
    rig.run_actions();
    assert_eq!(tags(&mut rig), [2]);
    rig.close();
}
