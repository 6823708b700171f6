//! Commands with more data than the window, which is transferred in pieces.

use std::time::Duration;

use super::rig::script::{COMPLETE, Command, command, read10, scripts, write10};
use super::rig::{Peer, Rig, Work, windowed};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::task_mgmt::Function;
use crate::iscsi::TaskState;

const SECOND: Duration = Duration::from_secs(1);
const BLOCKS: u16 = 9;
const LEN: usize = BLOCKS as usize * 512;

/// Tag of the long command.
const TAG: u32 = 3;

/// Returns a connection that does not progress until this is requested.
fn stalled<P: Peer>() -> Rig<P> {
    let mut rig = Rig::start_with(&windowed(2048));
    rig.stalled = true;
    rig
}

fn long(writes: bool) -> Command {
    let command = if writes {
        write10(0, &[0x11; LEN])
    } else {
        read10(0, BLOCKS)
    };
    command.tag(TAG)
}

/// ORWRITE (16) for the first blocks, which must not be changed by other commands at the same time.
fn orwrite() -> Command {
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x8b, BLOCKS as u8);
    command(&cdb).out(&[0x11; LEN]).tag(TAG)
}

/// Completes the oldest block operation, chain or message.
fn step<P: Peer>(rig: &mut Rig<P>) {
    if rig.work.is_empty() {
        P::transmit(rig, true);
        rig.pump();
    } else {
        rig.complete();
    }
}

/// Reads until a piece waits for the initiator to receive it.
fn read_first_piece<P: Peer>() -> Rig<P> {
    let mut rig = stalled::<P>();
    rig.submit(0, long(false));
    rig.complete_blocks();
    P::hold(&mut rig);
    assert_eq!(rig.task_state(TAG), Some(TaskState::Send));
    rig
}

/// When a command is aborted between pieces, its blocks and buffer must be released, but not before
/// the disk, device or socket has finished using them.
fn abort_between_pieces_works_in_all_states<P: Peer>() {
    let mut seen = Vec::new();
    let functions = [Function::AbortTask, Function::LogicalUnitReset];
    let kinds = functions.map(|function| [true, false].map(|writes| (function, writes)));
    for (function, writes) in kinds.concat() {
        for steps in 0.. {
            let mut rig = stalled::<P>();
            rig.submit(0, long(writes));
            (0..steps).for_each(|_| step(&mut rig));
            let state = rig.task_state(TAG);
            let is_used = match state {
                Some(TaskState::Receive) => rig.work.iter().any(Work::is_chain),
                Some(TaskState::Send) => P::hold(&mut rig),
                // An aborted operation is cancelled.
                Some(TaskState::Block) => !P::CANCELS,
                _ => {
                    rig.close();
                    break;
                }
            };
            seen.push((writes, state));
            rig.manage(0, 9, function, TAG);
            assert_eq!(rig.pool.free() < rig.pool.size(), is_used, "{state:?}");
            assert_eq!(rig.units[0].tasks(), usize::from(is_used), "{state:?}");
            rig.stalled = false;
            rig.complete_all();
            assert_eq!(rig.outcome(9), COMPLETE);
            assert_eq!(rig.pool.free(), rig.pool.size());
            assert_eq!(rig.units[0].tasks(), 0);
            rig.close();
        }
    }
    // There are three pieces, and two functions.
    let count = |of| seen.iter().filter(|seen| **seen == of).count();
    assert!(count((true, Some(TaskState::Receive))) >= 6);
    assert_eq!(count((true, Some(TaskState::Block))), 6);
    assert_eq!(count((false, Some(TaskState::Block))), 6);
    assert!(count((false, Some(TaskState::Send))) >= 4);
}

/// Other commands wait for an aborted command to complete, so an abort must not disable the timeout
/// for its current piece.
fn aborted_command_cannot_linger<P: Peer>() {
    for writes in [true, false] {
        let mut rig = if writes {
            let mut rig = stalled::<P>();
            rig.submit(0, long(true));
            rig
        } else {
            read_first_piece()
        };
        rig.manage(0, 9, Function::AbortTask, TAG);
        // Over TCP, a write does not use its buffer while it waits for data.
        if rig.units[0].tasks() == 0 {
            assert!(writes);
            continue;
        }
        for _ in 0..16 {
            rig.advance(SECOND);
            P::keep_alive(&mut rig, 0);
        }
        rig.check_timed_out();
        rig.close();
    }
}

/// The connection is also closed if the initiator stops receiving data in the middle of a READ.
fn unreceived_data_times_out<P: Peer>() {
    let mut rig = read_first_piece::<P>();
    for _ in 1..DATA_OUT_TIMEOUT.as_secs() {
        rig.advance(SECOND);
        P::keep_alive(&mut rig, 0);
        assert!(!rig.in_error());
    }
    rig.advance(SECOND);
    rig.check_timed_out();
    rig.close();
}

/// A command that reads and writes must lock its blocks, and only those, from the first to the last
/// piece, including the time between pieces. If the initiator does not send the next piece, its
/// connection is closed.
fn atomic_command_locks_blocks_between_pieces<P: Peer>() {
    for has_data in [true, false] {
        let mut rig = stalled::<P>();
        rig.submit(0, orwrite());
        let short = |lba| write10(lba, &[0x77; 512]).immediate();
        // Blocks aren't locked before the first piece is received.
        rig.submit(0, short(0).tag(4));
        assert_eq!(rig.task_state(4), Some(TaskState::Block));
        rig.complete_blocks();
        while rig.disks[0][512] != 0x11 || rig.task_state(TAG) != Some(TaskState::Receive) {
            step(&mut rig);
        }
        assert_eq!(rig.disks[0][..512], [0x77; 512]);
        for (lba, tag, state) in [
            (0, 5, TaskState::AwaitTask),
            (BLOCKS - 1, 6, TaskState::AwaitTask),
            (BLOCKS, 7, TaskState::Block),
        ] {
            rig.submit(0, short(lba.into()).tag(tag));
            assert_eq!(rig.task_state(tag), Some(state), "block {lba}");
        }
        if !has_data {
            rig.complete_blocks();
            rig.withholds_data = true;
            rig.stalled = false;
            for _ in 0..16 {
                rig.advance(SECOND);
                P::keep_alive(&mut rig, 0);
            }
            rig.check_timed_out();
            rig.close();
            assert_eq!(rig.disks[0][512..2048], [0x11; 1536]);
            continue;
        }
        rig.disks[0][8 * 512..LEN].fill(0x22);
        rig.stalled = false;
        rig.complete_all();
        let statuses = rig.statuses();
        assert!(statuses.iter().all(|(_, status)| *status == 0));
        let at = |tag| statuses.iter().position(|(of, _)| *of == tag).unwrap();
        assert!(at(TAG) < at(5) && at(TAG) < at(6));
        assert_eq!(rig.disks[0][512..2048], [0x11; 1536]);
        assert_eq!(rig.disks[0][7 * 512], 0x11);
        assert_eq!(rig.disks[0][8 * 512], 0x77, "the later one");
        rig.close();
    }
}

/// An ORDERED command holds its place in the order from its first piece: older commands are
/// executed before it, and newer commands after its last piece.
fn ordered_command_keeps_order_between_pieces<P: Peer>() {
    let mut rig = Rig::<P>::start_with(&windowed(2048));
    rig.submit(0, long(true).ordered());
    rig.submit(0, read10(0, 1).tag(4));
    assert_eq!(rig.task_state(4), Some(TaskState::AwaitTask));
    rig.complete_all();
    assert_eq!(rig.statuses(), [(TAG, 0), (4, 0)]);
    assert_eq!(rig.memory[&4], [0x11; 512]);
    rig.close();
}

scripts! {
    abort_between_pieces_works_in_all_states,
    aborted_command_cannot_linger,
    unreceived_data_times_out,
    atomic_command_locks_blocks_between_pieces,
    ordered_command_keeps_order_between_pieces,
}
