//! Commands waiting for older commands or for memory.

use std::sync::Arc;
use std::time::Duration;

use super::rig::script::{Command, GOOD, command, read10, scripts, write10};
use super::rig::{Peer, Rig};
use crate::iscsi::TaskState;
use crate::stats::{Record, Stage, Tracer};
use crate::worker::fabrics::Input;

const MIB: usize = 1 << 20;

/// SYNCHRONIZE CACHE (10).
fn flush(tag: u32) -> Command {
    command(&[0x35]).tag(tag)
}

/// Offers the memory that was released to all connections.
fn offer_memory<P: Peer>(rig: &mut Rig<P>) {
    for peer in 0..rig.peers.len() {
        rig.pass(peer, Input::Pool);
    }
}

fn ordered_commands_wait_for_older_commands<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.submit(0, flush(1));
    rig.submit(0, flush(2).ordered());
    rig.submit(0, flush(3));
    let waits = TaskState::AwaitTask;
    assert_eq!(rig.states(0), [TaskState::Block, waits, waits]);
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2, 3]);
    rig.close();
}

fn task_and_memory_waits_are_stages<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let tracer = Arc::new(Tracer::new(None, Duration::ZERO, 8));
    rig.stats[0].trace(Some(Arc::clone(&tracer)));
    let wait = Duration::from_millis(5);
    rig.submit(0, flush(1));
    rig.submit(0, flush(2).ordered());
    rig.advance(wait);
    rig.complete_all();
    let all = rig.pool.allocate(4 << 20).unwrap();
    rig.submit(0, write10(1, &[2; 512]).tag(3));
    rig.advance(wait);
    rig.pool.release(all);
    offer_memory(&mut rig);
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2, 3]);
    let mut records = tracer.take_records();
    records.sort_by_key(|record| record.subject.tag);
    let waited = |record: &Record, stage| {
        let at = record.steps.iter().position(|(of, _)| *of == stage)?;
        let end = record.steps.get(at + 1)?.1;
        Some(end - record.steps[at].1)
    };
    assert_eq!(waited(&records[0], Stage::Backend), Some(wait));
    assert_eq!(waited(&records[1], Stage::Order), Some(wait));
    assert_eq!(waited(&records[1], Stage::Memory), None);
    assert_eq!(waited(&records[2], Stage::Memory), Some(wait));
    assert_eq!(waited(&records[2], Stage::Order), None);
    rig.close();
}

/// COMPARE AND WRITE locks its blocks only after its data was received.
fn command_without_data_blocks_no_others<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.withholds_data = true;
    rig.submit(0, compare_and_write().tag(1));
    rig.submit(0, read10(100, 1).tag(2));
    rig.submit(0, read10(0, 1).tag(3));
    let at_disk = TaskState::Block;
    assert_eq!(rig.states(0), [TaskState::Receive, at_disk, at_disk]);
    rig.complete_blocks();
    rig.submit(0, write10(0, &[2; 512]).tag(4).immediate());
    assert_eq!(rig.task_state(4), Some(at_disk));
    rig.complete_blocks();
    rig.provide_data();
    rig.complete_all();
    // Its comparison fails, because the other data was received first.
    assert_eq!(rig.statuses(), [(2, 0), (3, 0), (4, 0), (1, 2)]);
    assert_eq!(rig.disks[0][..512], [2; 512]);
    rig.close();
}

/// COMPARE AND WRITE of the first block.
pub(super) fn compare_and_write() -> Command {
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x89, 1);
    command(&cdb).out(&[0; 1024])
}

/// An ordered command has no memory yet, and commands that use the memory are waiting for it.
fn ordered_command_gets_memory_of_others<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.submit(0, flush(1));
    rig.submit(0, read10(0, 8).tag(2).ordered());
    let others = rig.pool.allocate(3 << 20).unwrap();
    rig.submit(0, write10(0, &[7; MIB]).tag(3));
    assert_eq!(rig.pool.free(), 0);
    let waits = TaskState::AwaitTask;
    assert_eq!(rig.states(0), [TaskState::Block, waits, waits]);
    for _ in 0..3 {
        rig.complete_all();
        offer_memory(&mut rig);
    }
    assert_eq!(rig.tags(), [1, 2, 3]);
    assert_eq!(rig.memory[&2], [0; 4096], "what was there before");
    assert!(rig.disks[0].iter().all(|byte| *byte == 7));
    rig.pool.release(others);
    rig.close();
}

/// Newer commands of the nexus have to wait for an ORDERED command, so they must not use the memory
/// that it needs.
fn command_waiting_for_memory_is_not_overtaken<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let most = rig.pool.allocate(7 << 19).unwrap();
    rig.submit(0, write10(0, &[7; MIB]).ordered());
    rig.submit(0, write10(0, &[7; 4096]).tag(2));
    assert_eq!(rig.states(0), [TaskState::AwaitBuffer; 2]);
    rig.pool.release(most);
    offer_memory(&mut rig);
    rig.complete_all();
    assert_eq!(rig.tags(), [1, 2]);
    rig.close();
}

/// Commands that have not been ordered yet wait for memory, but do not block any other command.
fn commands_take_turns_with_reserve<P: Peer>() {
    let mut rig = Rig::<P>::start();
    rig.add_session(2);
    let all = rig.pool.allocate(4 << 20).unwrap();
    rig.submit(0, write10(0, &[7; 512]).tag(1));
    for (peer, tag) in [(0, 2), (0, 3), (1, 4), (1, 5)] {
        rig.submit(peer, read10(0, 1).tag(tag));
    }
    let mut tags = Vec::new();
    while tags.len() < 4 {
        offer_memory(&mut rig);
        assert_eq!(rig.blocks().len(), 1, "there is memory for one command");
        rig.complete_blocks();
        tags.append(&mut rig.tags());
    }
    tags.sort_unstable();
    assert_eq!(tags, [2, 3, 4, 5]);
    assert_eq!(rig.states(0), [TaskState::AwaitBuffer]);
    rig.pool.release(all);
    offer_memory(&mut rig);
    rig.complete_all();
    assert_eq!(rig.outcome(1), GOOD);
    rig.close();
}

scripts! {
    ordered_commands_wait_for_older_commands,
    task_and_memory_waits_are_stages,
    command_without_data_blocks_no_others,
    ordered_command_gets_memory_of_others,
    command_waiting_for_memory_is_not_overtaken,
    commands_take_turns_with_reserve,
}
