//! Tests for descriptor tables of commands waiting for limits.

use std::time::Duration;

use riser_scsi::srp::TaskAttr;

use super::ioctx::IoctxState;
use crate::fabric::TaskIdx;
use crate::qos::IoLimits;
use crate::tests::rig;
use crate::tests::rig::srp::*;

type Rig = rig::Rig<SrpPeer>;

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
    rig.memory.insert(KEY, vec![7; 1 << 20]);
    rig.units[0].limits.set(&iops(10));
    rig
}

fn write(tag: u64) -> CmdBuilder {
    let data = Data::direct(512);
    write10(tag as u32, 1).tag(tag).out(data)
}

fn read(tag: u64) -> CmdBuilder {
    let data = Data::direct(512);
    read10(tag as u32, 1).tag(tag).into(data)
}

fn waiting(rig: &Rig) -> usize {
    let waits = IoctxState::AwaitLimit;
    let channels = rig.peers.iter().map(|peer| &peer.channel);
    let states = channels.flat_map(|ch| (0..4).map(|n| ch.requests().state(TaskIdx(n))));
    states.filter(|state| *state == waits).count()
}

#[test]
fn limit_delays_fetch_of_external_table() {
    let mut rig = limited();
    rig.memory.insert(TABLE, table_bytes(&blocks(2)));
    let external = || write10(0, 2).out(indirect(&blocks(2), 0));
    for tag in [1, 2] {
        rig.send(0, &external().tag(tag).bytes());
    }
    let external = read10(0, 2).tag(3).into(indirect(&blocks(2), 0));
    rig.send(0, &external.bytes());
    rig.complete_all();
    assert_eq!(rig.tags(), [1]);
    rig.advance(TENTH);
    rig.complete_all();
    rig.advance(TENTH);
    rig.complete_all();
    assert_eq!(rig.tags(), [2, 3]);
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
    rig.complete_all();
    assert_eq!(rig.statuses(), [(3, 8), (1, 0)], "BUSY");
    rig.pool.release(most);
    rig.advance(TENTH);
    rig.complete_all();
    assert_eq!(rig.tags(), [2]);
    rig.advance(TENTH);
    rig.complete_all();
    assert_eq!(rig.tags(), [4]);
    rig.close();
}

/// A command that waits for older tasks also keeps its table.
#[test]
fn limited_commands_block_no_tables() {
    let mut rig = limited();
    rig.memory.insert(TABLE, table_bytes(&blocks(20)));
    rig.send(0, &write(1).bytes());
    rig.complete_all();
    rig.tags();
    rig.send(0, &write(2).attr(TaskAttr::Ordered).bytes());
    for (tag, inline) in [(3, 20), (4, 0)] {
        // INQUIRY.
        let data = indirect(&blocks(20), inline);
        rig.send(0, &cmd(&[0x12, 0, 0, 0, 96, 0]).tag(tag).into(data).bytes());
    }
    rig.complete_all();
    assert_eq!(rig.statuses(), [(3, 0x28), (4, 0x28)], "TASK SET FULL");
    rig.advance(TENTH);
    rig.complete_all();
    assert_eq!(rig.tags(), [2]);
    rig.close();
}
