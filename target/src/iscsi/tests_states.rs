//! Tests for the state tables of connections and contexts, covering all transitions.

use std::time::Duration;

use riser_scsi::config::Provisioning;
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, LogoutReason, RejectReason, ScsiCommand, TaskAttr, TmfFunction,
};
use riser_scsi::iscsi::{CmdSn, Itt, Ttt};
use riser_scsi::nexus::NexusId;
use riser_scsi::task::TaskManagement;
use riser_state::testing::{assert_all_taken, table};

use super::tests_allegiance::{Duo, LEVEL_2, RETENTION};
use super::{Phase, TaskState};
use crate::fabric::TaskRef;
use crate::pool::Buffer;
use crate::qos::IoLimits;
use crate::tests::rig::iscsi::{NAMES, logout};
use crate::tests::rig::tcp::{Received, TcpPeer, r2t, rejected};
use crate::tests::rig::{self, DISK, windowed};
use crate::worker::fabrics::Input;
use riser_test_peers::pdus::scsi_command;

type Rig = rig::Rig<TcpPeer>;

const PHASES: [Phase; 8] = [
    Phase::Login,
    Phase::Joining,
    Phase::FullFeature,
    Phase::LoggingOut(Itt(0)),
    Phase::Closing,
    Phase::CleanupWait,
    Phase::Retaining,
    Phase::Closed,
];

const STATES: [TaskState; 12] = [
    TaskState::Idle,
    TaskState::New,
    TaskState::AwaitLimit,
    TaskState::AwaitTask,
    TaskState::AwaitBuffer,
    TaskState::Receive,
    TaskState::Send,
    TaskState::Block,
    TaskState::AwaitUnsolicited,
    TaskState::Mgmt,
    TaskState::Sent,
    TaskState::Expected,
];

/// Maximum number of bytes in memory for a command.
const WINDOW: u32 = 1024;

/// Interval between commands with a limit of ten commands per second.
const TENTH: Duration = Duration::from_millis(100);

/// Tag of the command used in a script.
const TAG: u32 = 1;

fn phase(rig: &Rig) -> Phase {
    rig.channel.channel().phase()
}

fn terminate(mut rig: Rig) {
    rig.apply(Input::Terminate);
    rig.close();
}

#[test]
fn phase_table_matches_diagram() {
    let expected = "Login: Joining Closing Closed\n\
                    Joining: FullFeature Closed\n\
                    FullFeature: LoggingOut Closing CleanupWait Closed\n\
                    LoggingOut: Closing Closed\n\
                    Closing: CleanupWait Closed\n\
                    CleanupWait: Retaining Closed\n\
                    Retaining: Closed\n\
                    Closed: \n";
    assert_eq!(table(&PHASES), expected);
}

/// Logins that fail, that are disconnected, and that wait for a replaced session.
fn logins() {
    let mut rig = Rig::new();
    rig.login("TargetName=iqn.2026-01.a:t0\0");
    assert_eq!(phase(&rig), Phase::Closed);
    rig.close();
    Rig::new().close();
    let mut rig = Rig::new();
    rig.gate.waits = true;
    rig.login(NAMES);
    assert_eq!(phase(&rig), Phase::Joining);
    rig.close();
}

/// Successful logouts, and a logout waiting for a command when the connection is closed.
fn logouts() {
    let close = logout(LogoutReason::CloseSession, 0, 9);
    let mut rig = Rig::logged_in("");
    rig.send(&close, &[]);
    assert_eq!(phase(&rig), Phase::Closed);
    rig.close();
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.read(TAG, 0, 1);
    rig.send(&close, &[]);
    assert_eq!(phase(&rig), Phase::LoggingOut(Itt(9)));
    rig.close();
}

/// Connection loss at error recovery level 2, and a connection that logs itself out for recovery.
fn losses() {
    let lost = || {
        let mut rig = Rig::logged_in(LEVEL_2);
        rig.apply(Input::Disconnected);
        assert_eq!(phase(&rig), Phase::CleanupWait);
        rig
    };
    terminate(lost());
    let mut rig = lost();
    rig.with(|ch, cx| ch.channel_mut().handle_detach(cx));
    assert_eq!(phase(&rig), Phase::Retaining);
    rig.wait(RETENTION);
    rig.close();
    terminate(Rig::logged_in(LEVEL_2));
    let mut rig = Rig::logged_in(LEVEL_2);
    rig.send(&logout(LogoutReason::RemoveConnection, 0, 9), &[]);
    assert_eq!(phase(&rig), Phase::Retaining);
    rig.wait(RETENTION);
    rig.close();
}

#[test]
fn phase_transition_coverage_is_complete() {
    assert_all_taken(&PHASES, || {
        logins();
        logouts();
        losses();
    });
}

/// RFC 7143 11.14: nothing else can be received after a logout on its connection. The second logout
/// would otherwise replace the first one.
#[test]
fn second_logout_is_rejected() {
    let mut rig = Rig::logged_in("");
    rig.prompt = false;
    rig.read(TAG, 0, 1);
    let close = logout(LogoutReason::CloseSession, 0, 9);
    assert!(rig.send(&close, &[]).is_empty());
    for reason in [
        LogoutReason::CloseSession,
        LogoutReason::CloseConnection,
        LogoutReason::RemoveConnection,
    ] {
        let received = rig.send(&logout(reason, 0, 10), &[]);
        assert_eq!(rejected(&received), RejectReason::ProtocolError);
    }
    assert_eq!(rig.gate.events.len(), 1, "one logout is counted");
    let received = rig.finish_all_blocks();
    let responses = received.iter().filter_map(|(pdu, ..)| match pdu {
        FromTarget::LogoutResponse(response) => Some(response.itt),
        _ => None,
    });
    assert_eq!(responses.collect::<Vec<_>>(), [Itt(9)]);
    rig.close();
}

/// Connection and allocated pool buffers.
struct Bench {
    rig: Rig,
    hog: Option<Buffer>,
}

impl Bench {
    fn new() -> Self {
        let mut config = windowed(WINDOW);
        // GET LBA STATUS requires a thin-provisioned unit.
        config.provisioning = Provisioning::Thin { granularity: 1 };
        let mut rig = Rig::of(1, &config);
        rig.log_in("FirstBurstLength=1024\0");
        rig.command(100, &[0; 6], false, 0, &[], true);
        rig.prompt = false;
        Self { rig, hog: None }
    }

    fn state(&self) -> TaskState {
        let state = self.rig.channel.channel().executor().task_state(Itt(TAG));
        state.unwrap_or(TaskState::Idle)
    }

    #[track_caller]
    fn expect(&self, state: TaskState) {
        assert_eq!(self.state(), state);
    }

    fn send(&mut self, command: ScsiCommand, data: &[u8]) -> Vec<Received> {
        let command = ScsiCommand {
            cmd_sn: CmdSn(self.rig.cmd_sn),
            ..command
        };
        self.rig.cmd_sn += 1;
        self.rig.send(&FromInitiator::ScsiCommand(command), data)
    }

    /// Sends a command that must wait for another command of the same nexus.
    fn send_behind(&mut self, command: ScsiCommand) {
        self.rig.command(7, &[0x35], false, 0, &[], true);
        let attribute = TaskAttr::Ordered;
        self.send(
            ScsiCommand {
                attribute,
                ..command
            },
            &[],
        );
        self.expect(TaskState::AwaitTask);
    }

    fn complete_block(&mut self) -> Vec<Received> {
        self.rig.finish_block(0);
        self.rig.run_actions()
    }

    fn take_memory(&mut self) {
        let all = self.rig.pool.free() as u32;
        self.hog = Some(self.rig.pool.allocate(all).expect("all of it"));
    }

    fn offer_memory(&mut self) {
        self.rig.apply(Input::Pool);
    }

    fn provide_memory(&mut self) {
        if let Some(hog) = self.hog.take() {
            self.rig.pool.release(hog);
        }
        self.offer_memory();
    }

    /// Uses the rate limit, so that the next command must wait for 100 ms.
    fn limit(&mut self) {
        self.rig.units[0].limits.set(&IoLimits {
            iops: Some(10),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        self.rig.prompt = true;
        self.rig.read(7, 0, 1);
        self.rig.prompt = false;
    }

    /// Clears the task set from another nexus. Returns the tasks that the worker must abort.
    fn clear_set(&mut self) -> Vec<TaskRef> {
        let unit = &self.rig.units[0];
        unit.manage(NexusId(8), TaskManagement::ClearTaskSet)
            .aborted
    }

    fn abort(&mut self, tasks: Vec<TaskRef>) {
        for task in tasks {
            self.rig.abort_by_other(task);
        }
    }

    fn clear(&mut self) {
        let tasks = self.clear_set();
        self.abort(tasks);
    }

    /// Closes the connection while the command is in its current state.
    fn close(mut self) {
        self.rig.apply(Input::Terminate);
        if let Some(hog) = self.hog.take() {
            self.rig.pool.release(hog);
        }
        self.rig.close();
    }

    /// Completes the command.
    fn finish(mut self) {
        self.provide_memory();
        self.rig.stalled = false;
        self.rig.prompt = true;
        self.rig.run_actions();
        self.expect(TaskState::Idle);
        self.close();
    }
}

/// READ (10) from the first block.
fn read(blocks: u8) -> ScsiCommand {
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, blocks, 0];
    scsi_command(TAG, 0, &cdb, false, u32::from(blocks) * 512)
}

/// WRITE (10) to the first block.
fn write(blocks: u8) -> ScsiCommand {
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, blocks, 0];
    scsi_command(TAG, 0, &cdb, true, u32::from(blocks) * 512)
}

/// Command without data.
fn plain() -> ScsiCommand {
    scsi_command(TAG, 0, &[0; 6], false, 0)
}

/// Returns the same command followed by unsolicited data, even if it doesn't transfer any data.
fn open(command: ScsiCommand) -> ScsiCommand {
    let reads = command.expected_length;
    ScsiCommand {
        writes: true,
        is_final: false,
        expected_length: command.expected_length.max(512),
        bidi_read_length: command.reads.then_some(reads),
        ..command
    }
}

/// READ CAPACITY (10).
fn capacity() -> ScsiCommand {
    scsi_command(TAG, 0, &[0x25], false, 8)
}

/// Creates a command in a state, with more unsolicited data to be sent if `is_open` is set.
fn reach(state: TaskState, is_open: bool) -> Bench {
    let mut bench = Bench::new();
    let shape = |command| if is_open { open(command) } else { command };
    match state {
        TaskState::AwaitLimit => {
            bench.limit();
            bench.send(shape(write(1)), &[]);
        }
        TaskState::AwaitTask => bench.send_behind(shape(plain())),
        TaskState::AwaitBuffer => {
            bench.take_memory();
            bench.send(shape(write(1)), &[]);
        }
        TaskState::Receive => {
            bench.send(shape(write(4)), &[]);
        }
        TaskState::Block => {
            bench.send(shape(read(4)), &[]);
        }
        TaskState::Send => {
            bench.send(shape(read(4)), &[]);
            bench.rig.stalled = true;
            bench.complete_block();
        }
        other => unreachable!("{other:?} is reached otherwise"),
    }
    bench.expect(state);
    bench
}

/// Sends the last PDU of unsolicited data.
fn close(bench: &mut Bench) {
    bench.rig.data_out(TAG, Ttt::NONE, 0, 0, &[3; 512], true);
}

/// Aborts commands in each waiting state, either by closing the connection or from another nexus,
/// with and without pending unsolicited data.
fn commands_end_everywhere() {
    for state in [
        TaskState::AwaitLimit,
        TaskState::AwaitTask,
        TaskState::AwaitBuffer,
        TaskState::Receive,
        TaskState::Block,
        TaskState::Send,
    ] {
        reach(state, false).close();
        let mut bench = reach(state, false);
        bench.clear();
        bench.finish();
        let mut bench = reach(state, true);
        bench.clear();
        bench.expect(TaskState::AwaitUnsolicited);
        close(&mut bench);
        bench.finish();
    }
}

/// Responses waiting for the end of unsolicited data: it's received, the connection is closed,
/// another nexus has aborted the command, or no memory is available.
fn responses_wait_for_data() {
    let waiting = || {
        let mut bench = Bench::new();
        bench.send(open(plain()), &[]);
        bench.expect(TaskState::AwaitUnsolicited);
        bench
    };
    let mut bench = waiting();
    close(&mut bench);
    bench.finish();
    waiting().close();
    let mut bench = Bench::new();
    bench.send(open(read(1)), &[]);
    let tasks = bench.clear_set();
    bench.complete_block();
    bench.expect(TaskState::AwaitUnsolicited);
    bench.abort(tasks);
    bench.expect(TaskState::AwaitUnsolicited);
    bench.close();
    let mut bench = Bench::new();
    bench.send(open(capacity()), &[]);
    bench.take_memory();
    close(&mut bench);
    bench.expect(TaskState::AwaitBuffer);
    bench.finish();
}

/// All types of commands, and commands waiting for memory, rate limits, or older tasks.
fn commands_continue() {
    let mut bench = Bench::new();
    bench.send(plain(), &[]);
    bench.finish();
    let mut bench = Bench::new();
    bench.send(write(2), &[5; 1024]);
    bench.finish();
    let mut bench = Bench::new();
    let requested = bench.send(write(4), &[5; 1024]);
    assert!(requested.is_empty());
    let requested = r2t(&bench.complete_block());
    bench.expect(TaskState::Receive);
    let data = [5; 1024];
    bench.rig.data_out(TAG, requested.ttt, 0, 1024, &data, true);
    bench.finish();
    let mut bench = Bench::new();
    bench.send(read(4), &[]);
    bench.finish();
    // WRITE AND VERIFY (10) needs two operations.
    let mut bench = Bench::new();
    let cdb = [0x2e, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    bench.send(scsi_command(TAG, 0, &cdb, true, 512), &[5; 512]);
    bench.finish();
    // GET LBA STATUS without memory for the result.
    let mut bench = Bench::new();
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x12, 24);
    bench.send(scsi_command(TAG, 0, &cdb, false, 24), &[]);
    bench.take_memory();
    bench.complete_block();
    bench.expect(TaskState::AwaitBuffer);
    bench.finish();
    for command in [read(1), write(1), capacity()] {
        let mut bench = Bench::new();
        bench.take_memory();
        bench.send(command, &[]);
        bench.expect(TaskState::AwaitBuffer);
        bench.offer_memory();
        bench.provide_memory();
        bench.close();
    }
    for command in [read(1), write(1)] {
        let mut bench = Bench::new();
        bench.limit();
        bench.send(command, &[]);
        bench.expect(TaskState::AwaitLimit);
        bench.rig.wait(TENTH);
        bench.close();
    }
    let mut bench = reach(TaskState::AwaitLimit, false);
    bench.take_memory();
    bench.rig.wait(TENTH);
    bench.expect(TaskState::AwaitBuffer);
    bench.close();
    for command in [plain(), read(1)] {
        let mut bench = Bench::new();
        bench.send_behind(command);
        bench.finish();
    }
    let mut bench = Bench::new();
    bench.send_behind(read(1));
    bench.take_memory();
    bench.complete_block();
    bench.expect(TaskState::AwaitBuffer);
    bench.finish();
    // Write to blocks that are only added while the command is waiting.
    let mut bench = Bench::new();
    let blocks = (DISK / 512) as u32;
    let [a, b, c, d] = blocks.to_be_bytes();
    let cdb = [0x2a, 0, a, b, c, d, 0, 0, 1, 0];
    bench.send_behind(scsi_command(TAG, 0, &cdb, true, 512));
    let unit = std::sync::Arc::clone(&bench.rig.units[0]);
    unit.lu.set_capacity(u64::from(2 * blocks)).unwrap();
    // This reports the unit attention.
    let attribute = TaskAttr::HeadOfQueue;
    let other = scsi_command(6, 0, &[0; 6], false, 0);
    bench.send(ScsiCommand { attribute, ..other }, &[]);
    bench.complete_block();
    bench.expect(TaskState::Receive);
    bench.close();
}

/// Functions that complete, and a function whose connection is closed first.
fn functions_end() {
    let mut bench = reach(TaskState::Block, false);
    bench.rig.tmf(5, TmfFunction::AbortTask, TAG);
    bench.finish();
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(TAG, 0, 1);
    duo.second.tmf(5, TmfFunction::AbortTask, TAG);
    let state = duo.second.channel.channel().executor().task_state(Itt(5));
    assert_eq!(state, Some(TaskState::Mgmt));
    duo.second.apply(Input::Terminate);
    duo.close();
}

/// Commands that are reassigned: complete, in the middle of a data transfer, without available
/// memory, or aborted before that.
fn commands_move() {
    let state = |duo: &Duo| duo.second.channel.channel().executor().task_state(Itt(TAG));
    let mut duo = Duo::new();
    duo.first.read(TAG, 0, 1);
    duo.cut();
    duo.reassigned(TAG, 0);
    duo.close();
    let mut duo = Duo::new();
    duo.first.write(TAG, 8, &[], true);
    duo.cut();
    duo.reassigned(TAG, 0);
    assert_eq!(state(&duo), Some(TaskState::Receive));
    duo.close();
    for has_memory in [true, false] {
        let mut duo = Duo::of_window(WINDOW, LEVEL_2);
        duo.first.read(TAG, 0, 4);
        duo.cut();
        let free = duo.second.pool.free() as u32;
        let hog = (!has_memory).then(|| duo.second.pool.allocate(free).unwrap());
        duo.second.stalled = true;
        duo.reassign(TAG, 0);
        let expected = match has_memory {
            true => TaskState::Send,
            false => TaskState::AwaitBuffer,
        };
        assert_eq!(state(&duo), Some(expected));
        if let Some(hog) = hog {
            duo.second.pool.release(hog);
            duo.second.apply(Input::Pool);
            assert_eq!(state(&duo), Some(TaskState::Send));
        }
        duo.close();
    }
    let mut duo = Duo::new();
    duo.first.prompt = false;
    duo.first.read(TAG, 0, 1);
    duo.cut();
    duo.reassigned(TAG, 0);
    assert_eq!(state(&duo), Some(TaskState::Expected));
    duo.close();
}

#[test]
fn context_table_matches_diagram() {
    let expected = "Idle: New Mgmt Expected\n\
        New: AwaitLimit AwaitTask AwaitBuffer Receive Block AwaitUnsolicited Sent\n\
        AwaitLimit: Idle AwaitTask AwaitBuffer Receive AwaitUnsolicited Sent\n\
        AwaitTask: Idle AwaitBuffer Receive Block AwaitUnsolicited Sent\n\
        AwaitBuffer: Idle AwaitBuffer Receive Send Block AwaitUnsolicited Sent\n\
        Receive: Idle AwaitTask Block AwaitUnsolicited Sent\n\
        Send: Idle Block AwaitUnsolicited Sent\n\
        Block: Idle AwaitBuffer Receive Send Block AwaitUnsolicited Sent\n\
        AwaitUnsolicited: Idle AwaitBuffer AwaitUnsolicited Sent\n\
        Mgmt: Idle Sent\n\
        Sent: Idle\n\
        Expected: Idle AwaitBuffer Receive Send Sent\n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn context_transition_coverage_is_complete() {
    assert_all_taken(&STATES, || {
        commands_continue();
        commands_end_everywhere();
        responses_wait_for_data();
        functions_end();
        commands_move();
    });
}
