//! Tests for commands with more data than the window, which is transferred through a bounded
//! buffer.

use std::time::Duration;

use riser_scsi::srp::{MemDesc, Residual};
use riser_scsi::step::BlockOp;

use super::channel::{ChState, Channel};
use super::ioctx::{ChainKind, IoctxState};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::{Direction, MAX_DATA_TIMEOUTS, RdmaRequest, TaskIdx};
use crate::pool::Owner;
use crate::tests::rig::srp::{
    Data, KEY, SrpPeer, SrpResponse, TABLE, cmd, indirect, read10, table_bytes, write10,
};
use crate::tests::rig::{self, Work};

type Rig = rig::Rig<SrpPeer>;

/// Not a multiple of the length of a descriptor.
const WINDOW: u32 = 2048;
const LEN: usize = 9 * 512;

fn pattern() -> Vec<u8> {
    (0..LEN).map(|i| (i * 7 % 251) as u8).collect()
}

/// Returns six descriptors of 768 bytes in reverse order, as an inline or external table.
fn last_first(rig: &mut Rig, inline: bool) -> Data {
    let descs: Vec<_> = (0..6)
        .map(|i| MemDesc::new(u64::from(5 - i as u32) * 1000, KEY, 768))
        .collect();
    rig.memory.insert(TABLE, table_bytes(&descs));
    indirect(&descs, if inline { 6 } else { 0 })
}

/// Returns the bytes referenced by the descriptors, in order.
fn described(rig: &Rig) -> Vec<u8> {
    let memory = &rig.memory[&KEY];
    (0..6)
        .flat_map(|i| &memory[(5 - i) * 1000..][..768])
        .copied()
        .collect()
}

fn describe(rig: &mut Rig, data: &[u8]) {
    let mut memory = vec![0; 6000];
    for (i, part) in data.chunks(768).enumerate() {
        memory[(5 - i) * 1000..][..part.len()].copy_from_slice(part);
    }
    rig.memory.insert(KEY, memory);
}

fn state(rig: &Rig) -> IoctxState {
    rig.channel.requests().state(TaskIdx(0))
}

fn check_memory(rig: &Rig) {
    assert!(rig.pool.size() - rig.pool.lowest_free() <= 4096);
}

fn is_good(response: &SrpResponse) -> bool {
    (response.status, response.code) == (0, None)
}

#[test]
fn long_write_fetches_pieces_in_sequence() {
    for inline in [true, false] {
        let mut rig = Rig::with_window(WINDOW);
        describe(&mut rig, &pattern());
        let data = last_first(&mut rig, inline);
        rig.send(0, &write10(3, 9).out(data).bytes());
        if !inline {
            assert_eq!(state(&rig), IoctxState::FetchTable);
            rig.complete();
        }
        let mut writes = Vec::new();
        while let Some(pending) = rig.work.first() {
            match pending {
                Work::Block { op, .. } => writes.push(*op),
                Work::Chain {
                    message: Some(_), ..
                } => {}
                Work::Chain { requests, .. } => {
                    let mut all = requests.iter();
                    assert!(!requests.is_empty());
                    assert!(all.all(|r| r.direction == Direction::FromInitiator));
                }
                other => panic!("{other:?}"),
            }
            rig.complete();
        }
        let at: Vec<_> = writes
            .iter()
            .map(|op| match *op {
                BlockOp::Write { offset, len, .. } => (offset, len),
                other => panic!("{other:?}"),
            })
            .collect();
        let start = 3 * 512;
        assert_eq!(
            at,
            [(start, 2048), (start + 2048, 2048), (start + 4096, 512)]
        );
        assert!(is_good(&rig.rsp()));
        assert_eq!(rig.disks[0][3 * 512..][..LEN], pattern());
        check_memory(&rig);
        rig.close();
    }
}

#[test]
fn long_read_responds_with_last_piece() {
    for inline in [true, false] {
        let mut rig = Rig::with_window(WINDOW);
        rig.disks[0][..LEN].copy_from_slice(&pattern());
        rig.memory.insert(KEY, vec![0; 6000]);
        let data = last_first(&mut rig, inline);
        rig.send(0, &read10(0, 9).into(data).bytes());
        let mut chains = Vec::new();
        while let Some(pending) = rig.work.first() {
            if let Work::Chain {
                message, requests, ..
            } = pending
                && state(&rig) != IoctxState::FetchTable
            {
                let bytes: u32 = requests.iter().map(RdmaRequest::bytes).sum();
                chains.push((bytes, message.is_some()));
            }
            rig.complete();
        }
        assert_eq!(chains, [(2048, false), (2048, false), (512, true)]);
        assert!(is_good(&rig.rsp()));
        assert_eq!(described(&rig), pattern());
        check_memory(&rig);
        rig.close();
    }
}

#[test]
fn immediate_data_can_exceed_window() {
    let mut rig = Rig::with_window(WINDOW);
    let before = rig.receives.len();
    rig.send(0, &write10(0, 9).out(Data::Immediate(pattern())).bytes());
    assert_eq!(rig.receives.len(), before - 1, "some of it is left there");
    rig.complete_all();
    assert!(is_good(&rig.rsp()));
    assert_eq!(rig.receives.len(), before);
    assert_eq!(rig.disks[0][..LEN], pattern());
    rig.close();
}

#[test]
fn error_between_pieces_has_residual() {
    for (write, steps) in [(true, 3), (false, 2)] {
        let mut rig = Rig::with_window(WINDOW);
        describe(&mut rig, &pattern());
        let data = last_first(&mut rig, true);
        let command = if write {
            write10(0, 9).out(data)
        } else {
            read10(0, 9).into(data)
        };
        rig.send(0, &command.bytes());
        for _ in 0..steps {
            rig.complete();
        }
        rig.complete_nth(0, false);
        rig.complete_all();
        let response = rig.rsp();
        assert_eq!((response.status, response.key), (2, Some(3)));
        let (residual, left) = if write {
            (response.data_out, 512)
        } else {
            (response.data_in, LEN as u32 - 2048)
        };
        assert_eq!(residual, Residual::Under(left));
        rig.close();
    }
}

/// Each piece is received in time, but other commands wait for the command to complete.
#[test]
fn later_pieces_share_time_limit() {
    let mut rig = Rig::with_window(WINDOW);
    const BLOCKS: u8 = 40;
    rig.memory.insert(KEY, vec![1; usize::from(BLOCKS) * 512]);
    let mut orwrite = [0; 16];
    (orwrite[0], orwrite[13]) = (0x8b, BLOCKS);
    let data = Data::Direct(MemDesc::new(0, KEY, u32::from(BLOCKS) * 512));
    rig.send(0, &cmd(&orwrite).out(data).bytes());
    let late = DATA_OUT_TIMEOUT - Duration::from_secs(1);
    // The first piece is received before the command is ordered.
    for _ in 0..=MAX_DATA_TIMEOUTS {
        assert_eq!(state(&rig), IoctxState::NeedData);
        rig.advance(late);
        assert_eq!(rig.channel.state(), ChState::Live);
        rig.complete();
        while state(&rig) == IoctxState::DataIn {
            rig.complete();
        }
    }
    assert_eq!(state(&rig), IoctxState::NeedData);
    rig.advance(late);
    assert_eq!(rig.channel.state(), ChState::Draining);
    rig.close();
}

/// The same if the connection transfers other data in the meantime, but only for the time required
/// for this data.
#[test]
fn busy_connection_has_more_time() {
    const BLOCKS: u8 = 240;
    let late = DATA_OUT_TIMEOUT - Duration::from_secs(1);
    let pieces_with = |moved: u32| {
        let mut rig = Rig::with_window(WINDOW);
        rig.memory.insert(KEY, vec![1; usize::from(BLOCKS) * 512]);
        let mut orwrite = [0; 16];
        (orwrite[0], orwrite[13]) = (0x8b, BLOCKS);
        let data = Data::Direct(MemDesc::new(0, KEY, u32::from(BLOCKS) * 512));
        rig.send(0, &cmd(&orwrite).out(data).bytes());
        let before = rig.channel.timers.pace.moved();
        let mut pieces = 0;
        while rig.channel.state() == ChState::Live {
            assert_eq!(state(&rig), IoctxState::NeedData);
            rig.channel.timers.pace.on_moved(moved);
            rig.advance(late);
            if rig.channel.state() != ChState::Live {
                break;
            }
            rig.complete();
            pieces += 1;
            let counted = rig.channel.timers.pace.moved() - before;
            let own = u64::from(WINDOW);
            assert_eq!(counted, pieces * (own + u64::from(moved)));
            while state(&rig) == IoctxState::DataIn {
                rig.complete();
            }
        }
        rig.close();
        pieces
    };
    let alone = pieces_with(0);
    assert_eq!(alone, u64::from(MAX_DATA_TIMEOUTS) + 1);
    let busy = pieces_with(1 << 30);
    assert!(busy > alone && busy < 3 * alone, "{busy}");
}

/// The send queue is filled with responses that the initiator does not receive.
#[test]
fn credit_wait_times_out() {
    let mut rig = Rig::with_window(WINDOW);
    describe(&mut rig, &pattern());
    let data = last_first(&mut rig, true);
    let mut orwrite = [0; 16];
    (orwrite[0], orwrite[13]) = (0x8b, 9);
    rig.send(0, &cmd(&orwrite).tag(1).out(data).bytes());
    rig.complete();
    assert_eq!(state(&rig), IoctxState::DataIn);
    let descs: Vec<_> = (0..16).map(|i| MemDesc::new(i * 128, KEY, 128)).collect();
    let scattered = indirect(&descs, 16);
    for tag in [2, 3] {
        let read = read10(0, 4).tag(tag).into(scattered.clone());
        rig.send(0, &read.bytes());
    }
    while let Some(at) = rig.work.iter().position(Work::is_block) {
        rig.complete_nth(at, true);
    }
    let states = [0, 1, 2].map(|i| rig.channel.requests().state(TaskIdx(i)));
    assert_eq!(states[0], IoctxState::AwaitCredit(ChainKind::NeedData));
    assert_eq!(states[1..], [IoctxState::WriteData; 2]);
    rig.advance(DATA_OUT_TIMEOUT);
    assert_eq!(rig.channel.state(), ChState::Draining);
    rig.close();
}

/// Neither are responses waiting behind other responses, which are received one by one.
#[test]
fn slowly_received_responses_time_out() {
    let mut rig = Rig::with_window(WINDOW);
    rig.memory.insert(KEY, vec![0; 512]);
    for tag in [1, 2, 3] {
        let data = Data::direct(512);
        rig.send(0, &read10(0, 1).tag(tag).into(data).bytes());
    }
    while let Some(at) = rig.work.iter().position(Work::is_block) {
        rig.complete_nth(at, true);
    }
    for n in [0, 1, 2] {
        let state = rig.channel.requests().state(TaskIdx(n));
        assert_eq!(state, IoctxState::CmdRspSent);
    }
    for _ in 0..2 {
        rig.advance(DATA_OUT_TIMEOUT * 3);
        rig.complete();
    }
    rig.advance(DATA_OUT_TIMEOUT * 2 - Duration::from_secs(1));
    assert_eq!(rig.channel.state(), ChState::Live);
    // The transferred data only extends the deadline by a millisecond.
    rig.advance(Duration::from_secs(2));
    assert_eq!(rig.channel.state(), ChState::Draining);
    rig.close();
}

/// Returns the number of seconds until the channel is closed. The data of a short WRITE is
/// transferred every few seconds if `trickles` is set, and another initiator is waiting for memory
/// if `others_wait` is set. If `early` is set, the channel is notified before this initiator uses
/// more than its share.
fn hold_memory(others_wait: bool, early: bool, trickles: bool) -> Option<u32> {
    let mut rig = Rig::with_window(WINDOW);
    rig.memory.insert(KEY, vec![0; 512]);
    let data = Data::direct(512);
    for tag in 1..=8 {
        let write = write10(tag as u32, 1).tag(tag).out(data.clone());
        rig.send(0, &write.bytes());
    }
    let owner = Owner(rig.channel.config().serial);
    let other = Owner(owner.0 + 100);
    if early {
        rig.with(0, Channel::handle_pressure);
    }
    let more: Vec<_> = std::iter::from_fn(|| rig.pool.grant(owner, 4096)).collect();
    if others_wait {
        rig.pool.wait(other);
    }
    if !early {
        rig.with(0, Channel::handle_pressure);
    }
    // Transfer less often, so that data is left when the channel is closed.
    let interval = if early { 2 } else { 1 };
    let ended = (1..=7).find(|step| {
        rig.advance(Duration::from_secs(4));
        let is_moving = trickles && step % interval == 0;
        let chain = rig
            .work
            .iter()
            .position(Work::is_chain)
            .filter(|_| is_moving);
        if let Some(at) = chain.filter(|_| rig.channel.state() == ChState::Live) {
            rig.complete_nth(at, true);
        }
        rig.channel.state() != ChState::Live
    });
    rig.pool.leave_line(other);
    more.into_iter().for_each(|buffer| rig.pool.release(buffer));
    rig.close();
    ended.map(|steps| steps * 4)
}

#[test]
fn silent_or_trickling_initiator_returns_memory_early() {
    assert_eq!(hold_memory(true, false, false), Some(8));
    assert_eq!(hold_memory(true, false, true), Some(16));
    // The channel detects this when it checks its use of memory.
    assert_eq!(hold_memory(true, true, true), Some(24));
    // No other initiator is waiting.
    assert_eq!(hold_memory(false, false, false), Some(16));
    assert_eq!(hold_memory(false, false, true), None);
}
