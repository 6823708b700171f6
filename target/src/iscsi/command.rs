//! SCSI commands: receiving a command, and the callbacks used by the command executor.

use std::time::Instant;

use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromTarget, RejectReason, ScsiCommand, ScsiResponse, TaskAttr};
use riser_scsi::step::{
    DataIn, Expected, Residual, Response, Status, Step, StepResult, TaskAttribute,
};
use riser_state::become_state;

use super::action::Action;
use super::context::Cx;
use super::datamover::{Control, Datamover, PutData};
use super::executor::Executor;
use super::phase::Phase;
use super::task::{Incoming, Piece, TaskState};
use super::tcp::good;
use crate::fabric::{
    Backlog, CommandFlow, Descriptors, Execution, Hold, MAX_STAGED, TaskAction, TaskIdx,
};
use crate::stats::Stage;

impl<D: Datamover> Executor<D> {
    pub(super) fn on_command(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, command: &ScsiCommand) {
        if let Err((reason, why)) = self.check_command(command, frame.data.len()) {
            return self.reject(cx, frame, reason, &why);
        }
        let state = TaskState::New;
        let wait = self.timers.pace.start_wait(cx.now);
        let key = (command.itt, command.immediate);
        let Some(idx) = self.tasks.accept_request(cx.spare, key, state, wait) else {
            if command.immediate {
                let reason = RejectReason::TooManyImmediate;
                return self.reject(cx, frame, reason, &"immediate commands");
            }
            return self.refuse_command(command);
        };
        // The datamover couldn't know until now which context the RDMA buffers of this PDU are for.
        self.mover.on_context_allocated(idx);
        self.stats.counters.commands += 1;
        self.stats.counters.bytes_out += frame.data.len() as u64;
        let session = self.session.as_ref().expect("full-feature phase");
        let (worker, nexus) = (self.config.worker, session.nexus);
        let luns = &session.luns;
        let addressed = self
            .stats
            .accounts
            .addressed(luns, command.lun, &command.cdb, worker);
        let first_burst = session.params.first_burst.min(command.expected_length);
        let bidirectional = command.reads && command.writes;
        // Copy the data, because the receive buffer will be overwritten and we don't have a pool
        // buffer yet.
        let staged = self.staging.stage(frame.data);
        let task = &mut self.tasks[idx];
        task.lun = command.lun;
        task.exec.attribute = match command.attribute {
            TaskAttr::Untagged | TaskAttr::Simple => TaskAttribute::Simple,
            TaskAttr::Ordered => TaskAttribute::Ordered,
            TaskAttr::HeadOfQueue => TaskAttribute::HeadOfQueue,
            TaskAttr::Aca => TaskAttribute::Aca,
        };
        task.exec.expected = Expected {
            data_out: if command.writes {
                command.expected_length
            } else {
                0
            },
            data_in: match (command.reads, bidirectional) {
                (false, _) => 0,
                (true, false) => command.expected_length,
                (true, true) => command.bidi_read_length.unwrap_or(0),
            },
        };
        task.exec.set_cdb(&command.cdb, &[]);
        task.exec
            .take_in(addressed, nexus, command.itt.0.into(), cx.now);
        task.incoming = Incoming {
            got: frame.data.len() as u32,
            // If immediate data already reaches the limit for unsolicited data, nothing will
            // follow, regardless of the F bit.
            open: command.writes && !command.is_final && (frame.data.len() as u32) < first_burst,
            staged,
            ..Incoming::default()
        };
        if task.incoming.open {
            let most = first_burst.min(task.exec.expected.data_out);
            task.incoming.announced = most.saturating_sub(task.incoming.got);
            self.unsolicited += u64::from(task.incoming.announced);
        }
        self.window()
            .insert_tag(command.itt, self.tasks.task_ref(idx), command.immediate);
        let name = (idx, self.tasks.task_ref(idx));
        self.enter_task_set(cx, name, nexus, Descriptors::default());
    }

    /// Refuses a command because there is no context, which should have been prevented by the
    /// command window.
    fn refuse_command(&mut self, command: &ScsiCommand) {
        let pdu = ScsiResponse {
            itt: command.itt,
            response: 0,
            status: Status::TaskSetFull as u8,
            residual: match command.expected_length {
                0 => Residual::None,
                len => Residual::Underflow(len),
            },
            bidi_residual: Residual::None,
            exp_data_sn: 0,
            snack_tag: 0,
        };
        self.send(FromTarget::ScsiResponse(pdu), Vec::new(), true);
    }

    fn check_command(
        &self,
        command: &ScsiCommand,
        immediate: usize,
    ) -> Result<(), (RejectReason, &'static str)> {
        let params = &self.session.as_ref().expect("full-feature phase").params;
        if command.itt == Itt::NONE {
            return Err((RejectReason::InvalidPduField, "the reserved tag"));
        }
        // A tag must be unique for the whole session, because another connection can use it to
        // abort or claim the command.
        if self.tasks.find(command.itt).is_some() || self.window().tagged(command.itt).is_some() {
            return Err((RejectReason::TaskInProgress, "the tag is in use"));
        }
        let may = command.expected_length.min(params.first_burst) as usize;
        if immediate > 0 && (!params.immediate_data || !command.writes || immediate > may) {
            return Err((RejectReason::InvalidPduField, "immediate data"));
        }
        // With InitialR2T, only immediate data can be unsolicited.
        if command.writes && !command.is_final && params.initial_r2t {
            return Err((RejectReason::ProtocolError, "unsolicited data"));
        }
        Ok(())
    }

    /// Returns true if the unsolicited data of commands waiting for rate limits would exceed
    /// [`MAX_STAGED`]. A single command is always accepted.
    fn is_staging_full(&self, idx: TaskIdx) -> bool {
        let others = self.backlog.limits.waiting().filter(|other| *other != idx);
        let first_burst = self.first_burst();
        let others = others.map(|other| self.tasks.most_staged(other, first_burst));
        let others: usize = others.sum();
        let own = self.tasks.most_staged(idx, first_burst);
        own > 0 && others > 0 && others + own > MAX_STAGED
    }

    pub(super) fn on_block_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, result: StepResult) {
        let task = &self.tasks[idx];
        assert_eq!(
            task.state,
            TaskState::Block,
            "an operation runs for {idx:?}"
        );
        if task.exec.aborted {
            return self.end_aborted(cx, idx);
        }
        self.resume_task(cx, idx, result);
    }

    /// The response is delayed. Functions should find that the command is no longer in the task
    /// set.
    fn note_left(&mut self, idx: TaskIdx) {
        let name = self.tasks.task_ref(idx);
        let nexus = self.session.as_ref().expect("full-feature phase").nexus;
        let exec = &mut self.tasks[idx].exec;
        exec.note_left(nexus, name);
    }

    /// Passes data and status to the datamover. The task completes when they were sent.
    fn send_response(&mut self, now: Instant, idx: TaskIdx, response: Response, len: u32) {
        let itt = self.tasks[idx].itt;
        self.window()
            .mark_tag_responded(itt, self.tasks.task_ref(idx));
        self.mark_sent(idx);
        self.timers.watch_data(now);
        let task = &mut self.tasks[idx];
        task.wait = self.timers.pace.start_wait(now);
        let response = task.response.insert(response);
        let base = match response.data_in {
            // This could be the last piece of a command that was reassigned.
            DataIn::Inline(_) => task.piece.from,
            DataIn::Buffer { from, .. } => from,
            DataIn::None => 0,
        };
        // The data is in the buffer.
        response.data_in = DataIn::Buffer { from: base, len };
        // The response is kept in the context until another connection claims the command.
        if self.allegiance.is_silent() {
            return;
        }
        self.stats.counters.bytes_in += u64::from(len);
        let (residual, bidi_residual) = residuals(task.exec.expected, response);
        // A Data-In PDU contains a status and a single residual count, but no sense data.
        let is_plain = response.status == Status::Good
            && response.sense.is_empty()
            && bidi_residual == Residual::None
            && task.exec.expected.data_out == 0;
        let mut exp_data_sn = task.r2ts + task.data_start.data_sn;
        let end = base + len;
        if len > 0 && end > task.data_start.offset {
            let status = (is_plain && self.mover.carries_status()).then(|| good(residual));
            let put = PutData {
                task: idx,
                itt: task.itt,
                lun: task.lun,
                r2ts: task.r2ts,
                base,
                start: task.data_start,
                end,
                more: false,
                status,
            };
            exp_data_sn = task.r2ts + self.mover.put_data(put);
            if status.is_some() {
                return;
            }
        }
        let pdu = ScsiResponse {
            itt: task.itt,
            response: 0,
            status: response.status as u8,
            residual,
            bidi_residual,
            exp_data_sn,
            snack_tag: 0,
        };
        self.mover.send_control(Control {
            pdu: FromTarget::ScsiResponse(pdu),
            data: ScsiResponse::sense_segment(&response.sense),
            counts: true,
            ends: Some(idx),
        });
    }
}

impl<D: Datamover> CommandFlow for Executor<D> {
    type Cx<'a> = Cx<'a>;

    fn backlog(&mut self) -> &mut Backlog {
        &mut self.backlog
    }

    fn exec(&mut self, idx: TaskIdx) -> &mut Execution {
        &mut self.tasks[idx].exec
    }

    fn request_action(&mut self, action: TaskAction) {
        self.actions.push_back(Action::Task(action));
    }

    fn hold(&mut self, idx: TaskIdx, hold: Hold) {
        let next = match hold {
            Hold::Limits => TaskState::AwaitLimit,
            Hold::Order => TaskState::AwaitTask,
            Hold::Memory => TaskState::AwaitBuffer,
            Hold::Backend => TaskState::Block,
        };
        let task = &mut self.tasks[idx];
        become_state(&mut task.state, next);
        // The memory of longer data of an earlier command is counted nowhere.
        if matches!(hold, Hold::Limits | Hold::Memory) {
            task.incoming.staged.shrink_to_fit();
        }
        self.stats.counters.buffer_waits += u64::from(hold == Hold::Memory);
    }

    fn first_step(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) -> Step {
        let session = self.session.as_ref().expect("full-feature phase");
        let exec = &mut self.tasks[idx].exec;
        exec.start(session.nexus, session.luns.luns(), cx.pool, cx.now)
    }

    /// Copies unsolicited data to the buffer and requests the remaining data.
    fn receive_data(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult> {
        let task = &mut self.tasks[idx];
        task.exec.timer.enter_stage(Stage::FabricIn, cx.now);
        task.exec.timer.carry(len);
        let staged = &mut task.incoming.staged;
        // The remaining data belongs to the next pieces.
        let useful = staged.len().min(len as usize);
        if let Some(buffer) = &task.exec.buffer
            && useful > 0
        {
            buffer.write(0, &staged[..useful]);
        }
        staged.drain(..useful);
        if staged.is_empty() {
            let emptied = std::mem::take(staged);
            self.staging.keep(emptied, self.first_burst());
        }
        let task = &mut self.tasks[idx];
        task.incoming.from = from;
        task.incoming.wanted = Some(from + len);
        become_state(&mut task.state, TaskState::Receive);
        if from > 0 && matches!(self.phase, Phase::LoggingOut(_)) {
            // The initiator is logging out and will not send any more data.
            self.abort(cx, idx, None);
            return None;
        }
        self.check_received(cx.now, idx)
    }

    fn send_data(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult> {
        self.timers.watch_data(cx.now);
        let task = &mut self.tasks[idx];
        task.exec.timer.enter_stage(Stage::FabricOut, cx.now);
        // An initiator might send data with a command that doesn't transfer any.
        let staged = std::mem::take(&mut task.incoming.staged);
        if let Some(buffer) = &task.exec.buffer
            && std::mem::take(&mut task.incoming.is_moved)
        {
            buffer.write(0, &staged);
        }
        become_state(&mut task.state, TaskState::Send);
        task.wait = self.timers.pace.start_wait(cx.now);
        task.ordered.get_or_insert(task.wait);
        let end = from + len;
        task.piece = Piece {
            from,
            len,
            next_sn: task.data_start.data_sn,
        };
        if task.data_start.offset >= end {
            // The initiator received all data on the connection that was lost.
            self.timers.last_taken = cx.now;
            task.pass_piece();
            return Some(StepResult::Done);
        }
        if self.allegiance.is_silent() {
            return None;
        }
        task.exec.timer.carry(len);
        self.stats.counters.bytes_in += u64::from(len);
        let put = PutData {
            task: idx,
            itt: task.itt,
            lun: task.lun,
            r2ts: task.r2ts,
            base: from,
            start: task.data_start,
            end,
            more: true,
            status: None,
        };
        task.piece.next_sn = self.mover.put_data(put);
        None
    }

    fn end_wait(&mut self, now: Instant, idx: TaskIdx) {
        let task = &mut self.tasks[idx];
        task.waited = task.waited_by(now, &self.timers.pace);
        if matches!(task.state, TaskState::Receive | TaskState::Send) {
            task.incoming.solicited = false;
        }
    }

    fn respond(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, response: Response) {
        let owner = self.backlog.owner();
        let task = &mut self.tasks[idx];
        // We must not respond before the F bit is received (RFC 7143 11.4.2), because data that
        // arrives later could be used for the next command with the same tag.
        if task.incoming.open {
            self.note_left(idx);
            self.leave_task_set(idx);
            let task = &mut self.tasks[idx];
            let unwanted = std::mem::take(&mut task.incoming.staged);
            task.response = Some(response);
            become_state(&mut task.state, TaskState::AwaitUnsolicited);
            task.wait = self.timers.pace.start_wait(cx.now);
            self.staging.keep(unwanted, self.first_burst());
            return self.timers.watch_data(cx.now);
        }
        let len = task.exec.gather(cx.pool, owner, &response, cx.now);
        if len.is_none() {
            self.note_left(idx);
        }
        self.leave_task_set(idx);
        let Some(len) = len else {
            return self.await_memory(cx, idx, Step::Respond(response));
        };
        self.send_response(cx.now, idx, response, len);
    }

    fn staged(&mut self, idx: TaskIdx) -> usize {
        self.tasks.most_staged(idx, self.first_burst())
    }

    /// Limits the unsolicited data for commands waiting for rate limits, because it's not in a pool
    /// buffer.
    fn check_held(&mut self, _: &mut Cx<'_>, idx: TaskIdx, _: Descriptors) -> Result<(), Status> {
        match self.is_staging_full(idx) {
            true => Err(Status::TaskSetFull),
            false => Ok(()),
        }
    }
}

/// Returns the residual count of a response, and the read residual count of a bidirectional command
/// (RFC 7143 11.4.5).
fn residuals(expected: Expected, response: &Response) -> (Residual, Residual) {
    let (read, write) = (response.residual_in, response.residual_out);
    match (expected.data_in > 0, expected.data_out > 0) {
        (true, true) => (write, read),
        (true, false) => (read, Residual::None),
        (false, true) => (write, Residual::None),
        // The command transfers data even if none is expected, so this is an overflow.
        (false, false) if read != Residual::None => (read, Residual::None),
        (false, false) => (write, Residual::None),
    }
}
