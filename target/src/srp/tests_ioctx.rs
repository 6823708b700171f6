//! Tests for contexts: the state table, and all of its transitions.

use std::time::Duration;

use riser_scsi::config::{Config, Provisioning};
use riser_scsi::nexus::NexusId;
use riser_scsi::srp::{MemDesc, TaskAttr, TskMgmtFunction};
use riser_scsi::task::TaskManagement;
use riser_state::State as _;
use riser_state::testing::{assert_all_taken, table};

use super::channel::Channel;
use super::ioctx::{ChainKind, IoctxState};
use super::login::ChannelParams;

use crate::pool::{Buffer, MIN_BLOCK, Owner};
use crate::qos::IoLimits;
use crate::tests::rig::srp::*;
use crate::tests::rig::{self, DISK, Work, windowed};

type Rig = rig::Rig<SrpPeer>;

const STATES: [IoctxState; 17] = [
    IoctxState::Done,
    IoctxState::New,
    IoctxState::AwaitLimit,
    IoctxState::AwaitTask,
    IoctxState::FetchTable,
    IoctxState::AwaitBuffer,
    IoctxState::NeedData,
    IoctxState::SendData,
    IoctxState::DataIn,
    IoctxState::WriteData,
    IoctxState::AwaitCredit(ChainKind::FetchTable),
    IoctxState::AwaitCredit(ChainKind::NeedData),
    IoctxState::AwaitCredit(ChainKind::SendData),
    IoctxState::AwaitCredit(ChainKind::Respond),
    IoctxState::CmdRspSent,
    IoctxState::Mgmt,
    IoctxState::MgmtRspSent,
];

/// Send queue of a channel that can post two work requests at a time, and one for a transfer.
const NARROW: u32 = 7;

/// Send queue of a channel that can post fifteen work requests at a time, and seven for a transfer.
const WIDE: u32 = 20;

/// Bytes of a command's data in memory at a time.
const WINDOW: u32 = 1024;

/// Interval for a limit of ten commands per second.
const TENTH: Duration = Duration::from_millis(100);

/// Tag of the command under test.
const TAG: u64 = 1;

/// Two channels of different nexuses, and the pool memory allocated by the test.
struct Bench {
    rig: Rig,
    hog: Option<Buffer>,
    tables: Vec<Buffer>,
}

impl Bench {
    fn new(send_queue: u32) -> Self {
        // GET LBA STATUS requires a thin unit.
        let granularity = 1;
        let mut rig = Rig::of(&Config {
            provisioning: Provisioning::Thin { granularity },
            ..windowed(WINDOW)
        });
        let first = ChannelParams {
            req_lim: 8,
            send_queue,
            ..params()
        };
        rig.add_live_channel(first, 1);
        rig.add_live_channel(params(), 2);
        rig.memory.insert(KEY, vec![7; 1 << 16]);
        Self {
            rig,
            hog: None,
            tables: Vec::new(),
        }
    }

    fn send(&mut self, command: &CmdBuilder) {
        self.rig.send(0, &command.bytes());
    }

    /// Returns the state of the command's context.
    fn state(&self) -> IoctxState {
        let contexts = &self.rig.channel.requests;
        let mut contexts = contexts.iter();
        let found = contexts.find(|(_, io)| io.tag.0 == TAG);
        found.map_or(IoctxState::Done, |(_, io)| io.state)
    }

    #[track_caller]
    fn expect(&self, state: IoctxState) {
        assert_eq!(self.state(), state);
    }

    /// Completes work, oldest first, until the command is in this state.
    #[track_caller]
    fn complete_until(&mut self, state: IoctxState) {
        while self.state() != state {
            assert!(!self.rig.work.is_empty(), "never {state:?}");
            self.rig.complete();
        }
    }

    /// Completes the running block operation.
    fn complete_block(&mut self) {
        let at = self.rig.work.iter().position(Work::is_block);
        self.rig.complete_nth(at.expect("an operation runs"), true);
    }

    /// Uses up the credit with commands for another unit, some of which have to wait for more.
    fn take_credit(&mut self) {
        for tag in [8, 9, 10] {
            self.send(&cmd(&[0; 6]).lun(1).tag(tag));
        }
    }

    /// Leaves one of fifteen credits: two transfers for another unit have portions of seven.
    fn leave_one_credit(&mut self) {
        let descs: Vec<_> = (0..16).map(|i| MemDesc::new(i, KEY, 1)).collect();
        for tag in [8, 9] {
            let inquiry = cmd(&[0x12, 0, 0, 0, 16, 0]).lun(1).tag(tag);
            self.send(&inquiry.into(indirect(&descs, 16)));
        }
        assert_eq!(self.rig.channel.sender().queue.free(), 1);
    }

    fn take_memory(&mut self) {
        let all = self.rig.pool.free() as u32;
        self.hog = Some(self.rig.pool.allocate(all).expect("all of it"));
    }

    fn provide_memory(&mut self) {
        if let Some(hog) = self.hog.take() {
            self.rig.pool.release(hog);
        }
        self.rig.pump();
    }

    /// Fragments the memory for tables, so that a long table needs several work requests.
    fn cut_table_memory(&mut self) {
        let pool = &mut self.rig.pool;
        let mut taken: Vec<_> = (100..)
            .map_while(|owner| pool.take_table(Owner(owner), MIN_BLOCK as u32))
            .collect();
        let mut is_kept = false;
        while let Some(buffer) = taken.pop() {
            is_kept = !is_kept;
            match is_kept {
                true => self.tables.push(buffer),
                false => pool.release(buffer),
            }
        }
    }

    /// Starts a command on a limited unit, so that the next command has to wait for a tenth of a
    /// second.
    fn limit(&mut self) {
        self.rig.units[0].limits.set(&IoLimits {
            iops: Some(10),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        self.rig.send(1, &read(1).bytes());
        self.rig.complete_all();
    }

    /// Sends a command that has to wait for another command of its nexus.
    fn send_behind(&mut self, command: CmdBuilder) {
        self.send(&cmd(&[0x35]).tag(7));
        self.send(&command.attr(TaskAttr::Ordered));
    }

    /// Sends a write for blocks that will exist when the command starts.
    fn send_before_growth(&mut self) {
        let blocks = DISK as u32 / 512;
        let data = Data::direct(512);
        self.send_behind(write10(blocks, 1).tag(TAG).out(data));
        self.rig.disks[0].resize(2 * DISK, 0);
        let unit = &self.rig.units[0].lu;
        unit.set_capacity(u64::from(2 * blocks)).unwrap();
        // This clears the unit attention.
        self.send(&plain().tag(6).attr(TaskAttr::HeadOfQueue));
        self.rig.complete_nth(1, true);
    }

    /// Clears the task set from another nexus.
    fn clear(&mut self) {
        let clear = tmf(99, 0, TskMgmtFunction::ClearTaskSet, 0);
        self.rig.send(1, &clear);
    }

    /// Closes the channel while the command is in its current state.
    fn close(mut self) {
        self.rig.with(0, Channel::handle_disconnected);
        self.provide_memory();
        for table in self.tables.drain(..) {
            self.rig.pool.release(table);
        }
        self.rig.close();
    }

    /// Completes the command.
    fn finish(mut self) {
        self.provide_memory();
        self.rig.complete_all();
        self.expect(IoctxState::Done);
        self.close();
    }
}

/// Returns descriptors of 256 bytes for `count` blocks.
fn quarters(count: u32) -> Vec<MemDesc> {
    (0..2 * u64::from(count))
        .map(|i| MemDesc::new(i * 256, KEY, 256))
        .collect()
}

fn read(count: u16) -> CmdBuilder {
    let descs = quarters(count.into());
    let inline = descs.len();
    read10(0, count).tag(TAG).into(indirect(&descs, inline))
}

fn write(count: u16) -> CmdBuilder {
    let descs = quarters(count.into());
    let inline = descs.len();
    write10(0, count).tag(TAG).out(indirect(&descs, inline))
}

/// Returns a write with an external table.
fn external(bench: &mut Bench) -> CmdBuilder {
    let descs = quarters(1);
    bench.rig.memory.insert(TABLE, table_bytes(&descs));
    write10(0, 1).tag(TAG).out(indirect(&descs, 0))
}

/// Returns a write with an external table that needs two work requests.
fn long_external(bench: &mut Bench) -> CmdBuilder {
    bench.cut_table_memory();
    let descs: Vec<_> = (0..1100).map(|i| MemDesc::new(i, KEY, 1)).collect();
    bench.rig.memory.insert(TABLE, table_bytes(&descs));
    write10(0, 1).tag(TAG).out(indirect(&descs, 0))
}

fn immediate() -> CmdBuilder {
    write10(0, 1).tag(TAG).out(Data::Immediate(vec![1; 512]))
}

/// Returns a command without data.
fn plain() -> CmdBuilder {
    cmd(&[0; 6]).tag(TAG)
}

/// Returns READ CAPACITY (10) with this number of ranges.
fn capacity(ranges: u32) -> CmdBuilder {
    let len = 8 / ranges;
    let descs: Vec<_> = (0..ranges)
        .map(|i| MemDesc::new(u64::from(i * len), KEY, len))
        .collect();
    let data = indirect(&descs, ranges as usize);
    cmd(&[0x25]).tag(TAG).into(data)
}

/// Returns a bench with the command in a state where it can be aborted.
fn reach(state: IoctxState) -> Bench {
    let mut bench = Bench::new(NARROW);
    match state {
        IoctxState::AwaitLimit => {
            bench.limit();
            bench.send(&write(1));
        }
        IoctxState::AwaitTask => bench.send_behind(plain()),
        IoctxState::FetchTable => {
            let command = external(&mut bench);
            bench.send(&command);
        }
        IoctxState::AwaitBuffer => {
            bench.take_memory();
            bench.send(&write(1));
        }
        IoctxState::NeedData => bench.send(&write(4)),
        IoctxState::SendData | IoctxState::DataIn | IoctxState::WriteData => {
            bench.send(&read(4));
            bench.complete_until(state);
        }
        IoctxState::AwaitCredit(ChainKind::FetchTable) => {
            bench.take_credit();
            let command = external(&mut bench);
            bench.send(&command);
        }
        IoctxState::AwaitCredit(ChainKind::NeedData) => {
            bench.take_credit();
            bench.send(&write(1));
        }
        IoctxState::AwaitCredit(ChainKind::SendData) => {
            bench.send(&read(4));
            bench.take_credit();
            bench.complete_block();
        }
        IoctxState::AwaitCredit(ChainKind::Respond) => {
            bench.take_credit();
            bench.send(&plain());
        }
        other => unreachable!("nothing ends a command in {other:?}"),
    }
    bench.expect(state);
    bench
}

/// Commands can be aborted in any state: with their channel, or by another nexus, with or without
/// credit for the response.
fn commands_end_everywhere() {
    for state in STATES {
        let may_end = state.may_become(&IoctxState::Done)
            && state.may_become(&IoctxState::AwaitCredit(ChainKind::Respond))
            && state != IoctxState::Mgmt;
        if !may_end {
            continue;
        }
        reach(state).close();
        let mut bench = reach(state);
        bench.clear();
        bench.finish();
        let mut bench = reach(state);
        bench.take_credit();
        bench.clear();
        bench.finish();
    }
}

/// A command that waits for too much credit is aborted by another nexus. The response needs less
/// credit.
fn responses_overtake_transfers() {
    let mut bench = Bench::new(WIDE);
    let command = long_external(&mut bench);
    bench.leave_one_credit();
    bench.send(&command);
    bench.expect(IoctxState::AwaitCredit(ChainKind::FetchTable));
    bench.clear();
    bench.expect(IoctxState::CmdRspSent);
    bench.finish();
    let mut bench = Bench::new(WIDE);
    bench.leave_one_credit();
    bench.send(&write(2));
    bench.expect(IoctxState::AwaitCredit(ChainKind::NeedData));
    bench.clear();
    bench.expect(IoctxState::CmdRspSent);
    bench.finish();
    let mut bench = Bench::new(WIDE);
    bench.send(&read(4));
    bench.leave_one_credit();
    bench.complete_block();
    bench.expect(IoctxState::AwaitCredit(ChainKind::SendData));
    bench.clear();
    bench.expect(IoctxState::CmdRspSent);
    bench.finish();
}

/// A command was aborted by another nexus, but its response is posted before the channel is
/// notified.
fn an_abort_comes_late() {
    let mut bench = Bench::new(NARROW);
    bench.send(&read(1));
    bench.expect(IoctxState::DataIn);
    let function = TaskManagement::ClearTaskSet;
    let aborted = bench.rig.units[0].manage(NexusId(2), function).aborted;
    bench.take_credit();
    bench.complete_block();
    bench.expect(IoctxState::AwaitCredit(ChainKind::Respond));
    aborted.into_iter().for_each(|task| bench.rig.abort(task));
    bench.expect(IoctxState::AwaitCredit(ChainKind::Respond));
    bench.finish();
}

/// Commands can continue from any state in which they wait, and wait again for the next resource.
fn commands_continue() {
    let ways: [fn(&mut Bench); 10] = [
        |b| b.send(&write(4)),
        |b| {
            let data = Data::direct(512);
            let write_and_verify = cmd(&[0x2e, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            b.send(&write_and_verify.tag(TAG).out(data));
        },
        |b| b.send(&read(4)),
        |b| b.send(&immediate()),
        |b| b.send(&plain()),
        |b| b.send(&capacity(4)),
        |b| {
            let command = external(b);
            b.send(&command);
        },
        |b| {
            let command = long_external(b);
            b.send(&command);
        },
        |b| {
            let descs = quarters(1);
            b.rig.memory.insert(TABLE, table_bytes(&descs));
            b.send(&read10(0, 1).tag(TAG).into(indirect(&descs, 0)));
        },
        |b| {
            let mut status = [0; 16];
            (status[0], status[1], status[13]) = (0x9e, 0x12, 24);
            let data = Data::direct(24);
            b.send(&cmd(&status).tag(TAG).into(data));
            b.take_memory();
            b.complete_block();
            b.expect(IoctxState::AwaitBuffer);
        },
    ];
    for way in ways {
        let mut bench = Bench::new(NARROW);
        way(&mut bench);
        bench.finish();
        // Without credit from the start.
        let mut bench = Bench::new(NARROW);
        bench.take_credit();
        way(&mut bench);
        bench.finish();
        // Without credit after the first post.
        let mut bench = Bench::new(NARROW);
        way(&mut bench);
        bench.take_credit();
        bench.finish();
    }
    // Between two pieces.
    let mut bench = reach(IoctxState::SendData);
    bench.take_credit();
    bench.finish();
    let mut bench = reach(IoctxState::NeedData);
    bench.complete_until(IoctxState::DataIn);
    bench.take_credit();
    bench.finish();
}

/// Commands waiting for memory, followed by enough credit or not.
fn commands_get_memory() {
    let ways: [fn(&mut Bench) -> CmdBuilder; 6] = [
        |_| write(1),
        |_| read(1),
        |_| immediate(),
        external,
        |_| capacity(1),
        |_| capacity(4),
    ];
    for (way, has_credit) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let mut bench = Bench::new(NARROW);
        bench.take_memory();
        let command = way(&mut bench);
        bench.send(&command);
        if !has_credit {
            bench.take_credit();
        }
        bench.finish();
    }
}

/// Commands waiting for rate limits.
fn commands_get_past_limits() {
    let ways: [fn(&mut Bench) -> CmdBuilder; 3] = [|_| write(1), |_| read(1), external];
    for (way, has_credit) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let mut bench = Bench::new(NARROW);
        bench.limit();
        let command = way(&mut bench);
        bench.send(&command);
        bench.expect(IoctxState::AwaitLimit);
        if !has_credit {
            bench.take_credit();
        }
        bench.rig.advance(TENTH);
        bench.finish();
    }
    let mut bench = reach(IoctxState::AwaitLimit);
    bench.take_memory();
    bench.rig.advance(TENTH);
    bench.expect(IoctxState::AwaitBuffer);
    bench.finish();
}

/// Commands waiting for older tasks.
fn commands_get_their_turn() {
    let ways: [fn(&mut Bench); 4] = [
        |b| b.send_behind(plain()),
        |b| b.send_behind(read(1)),
        |b| b.send_behind(capacity(4)),
        Bench::send_before_growth,
    ];
    for (way, has_credit) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let mut bench = Bench::new(NARROW);
        way(&mut bench);
        bench.expect(IoctxState::AwaitTask);
        if !has_credit {
            bench.take_credit();
        }
        bench.finish();
    }
    let mut bench = Bench::new(NARROW);
    bench.send_behind(read(1));
    bench.take_memory();
    bench.complete_block();
    bench.finish();
}

/// Functions, and a command with a duplicate tag.
fn functions_get_responses() {
    for has_credit in [true, false] {
        let mut bench = reach(IoctxState::DataIn);
        if !has_credit {
            bench.take_credit();
        }
        let abort = tmf(5, 0, TskMgmtFunction::AbortTask, TAG);
        bench.rig.send(0, &abort);
        bench.finish();
    }
    let mut bench = reach(IoctxState::DataIn);
    let abort = tmf(5, 0, TskMgmtFunction::AbortTask, TAG);
    bench.rig.send(0, &abort);
    bench.close();
    let mut bench = reach(IoctxState::DataIn);
    bench.send(&plain());
    bench.finish();
}

#[test]
fn context_table_matches_diagram() {
    let expected = "Done: New Mgmt\n\
        New: AwaitLimit AwaitTask FetchTable AwaitBuffer NeedData DataIn WriteData \
        AwaitCredit(FetchTable) AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent Mgmt\n\
        AwaitLimit: Done AwaitTask FetchTable AwaitBuffer NeedData \
        AwaitCredit(FetchTable) AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent\n\
        AwaitTask: Done AwaitBuffer NeedData DataIn WriteData \
        AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent\n\
        FetchTable: Done AwaitTask FetchTable NeedData \
        AwaitCredit(FetchTable) AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent\n\
        AwaitBuffer: Done AwaitTask FetchTable AwaitBuffer NeedData DataIn WriteData \
        AwaitCredit(FetchTable) AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent\n\
        NeedData: Done AwaitTask NeedData DataIn \
        AwaitCredit(NeedData) AwaitCredit(Respond) CmdRspSent\n\
        SendData: Done SendData DataIn AwaitCredit(SendData) AwaitCredit(Respond) CmdRspSent\n\
        DataIn: Done AwaitBuffer NeedData SendData DataIn WriteData \
        AwaitCredit(NeedData) AwaitCredit(SendData) AwaitCredit(Respond) CmdRspSent\n\
        WriteData: Done WriteData AwaitCredit(Respond) CmdRspSent\n\
        AwaitCredit(FetchTable): Done FetchTable AwaitCredit(Respond) CmdRspSent\n\
        AwaitCredit(NeedData): Done NeedData AwaitCredit(Respond) CmdRspSent\n\
        AwaitCredit(SendData): Done SendData AwaitCredit(Respond) CmdRspSent\n\
        AwaitCredit(Respond): Done WriteData AwaitCredit(Respond) CmdRspSent MgmtRspSent\n\
        CmdRspSent: Done\n\
        Mgmt: Done New AwaitCredit(Respond) MgmtRspSent\n\
        MgmtRspSent: Done\n";
    assert_eq!(table(&STATES), expected);
    // The number of a state is its index in the table.
    let of = |state: IoctxState| super::ioctx::STATES[state.number()];
    assert!(STATES.into_iter().all(|state| of(state) == Some(state)));
}

#[test]
fn context_transition_coverage_is_complete() {
    assert_all_taken(&STATES, || {
        commands_continue();
        commands_get_memory();
        commands_get_past_limits();
        commands_get_their_turn();
        functions_get_responses();
        commands_end_everywhere();
        responses_overtake_transfers();
        an_abort_comes_late();
    });
}
