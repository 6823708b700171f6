//! The way of a SCSI command: taken in, its task ordered, its data brought, its steps carried out,
//! answered.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{
    DataOut, FromTarget, RejectReason, ScsiCommand, ScsiResponse, Snack, TaskAttr,
};
use riser_scsi::step::{
    BackendError, DataIn, Expected, Residual, Response, Status, Step, StepResult, TaskAttribute,
};

use super::channel::{Action, Channel, Cx, MAX_STAGED, Phase, SILENCE};
use super::datamover::{Control, Datamover, GetData, PutData, Start, Taken};
use super::task::{Incoming, Piece, Task, TaskState};
use super::tcp::good;
use crate::audit::Parting;
use crate::fabric::{
    Backlog, CommandFlow, Descriptors, End, Execution, Hold, MAX_CDB, MAX_DATA_TIMEOUTS,
    TaskAction, TaskIdx, TaskRef,
};
use crate::pool::Pool;
use crate::stats::{SessionEvent, Stage};
use crate::warn_limited;

impl<D: Datamover> Channel<D> {
    pub(super) fn on_command(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, command: ScsiCommand) {
        if let Err((reason, why)) = self.check_command(&command, frame.data.len()) {
            return self.reject(cx, frame, reason, &why);
        }
        let state = TaskState::AwaitTask;
        let Some(idx) = self.take_in(command.itt, command.immediate, state) else {
            if command.immediate {
                let reason = RejectReason::TooManyImmediate;
                return self.reject(cx, frame, reason, &"immediate commands");
            }
            return self.refuse_command(&command);
        };
        self.mover.begin(idx);
        self.counters.commands += 1;
        self.counters.bytes_out += frame.data.len() as u64;
        let session = self.session.as_ref().expect("full-feature phase");
        let (worker, nexus) = (self.config.worker, session.nexus);
        let luns = &session.luns;
        let addressed = self.accounts.addressed(luns, command.lun, worker);
        let first_burst = session.params.first_burst.min(command.expected_length);
        let bidirectional = command.reads && command.writes;
        let staged = self.stage(frame.data);
        let task = &mut self.tasks[usize::from(idx.0)];
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
        task.exec.cdb = command.cdb.iter().copied().take(MAX_CDB).collect();
        task.exec
            .take_in(addressed, nexus, command.itt.0.into(), cx.now);
        task.incoming = Incoming {
            got: frame.data.len() as u32,
            // Where the immediate data are all that may come unsolicited, nothing follows whatever
            // the F bit says.
            open: command.writes && !command.is_final && (frame.data.len() as u32) < first_burst,
            staged,
            ..Incoming::default()
        };
        self.window()
            .enter_tag(command.itt, self.task_ref(idx), command.immediate);
        let name = (idx, self.task_ref(idx));
        self.enter_task_set(cx, name, nexus, Descriptors::default());
    }

    /// There is no context for a command, which the window should have seen to.
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
        if self.find(command.itt).is_some() || self.window().tagged(command.itt).is_some() {
            return Err((RejectReason::TaskInProgress, "the tag is in use"));
        }
        let may = command.expected_length.min(params.first_burst) as usize;
        if immediate > 0 && (!params.immediate_data || !command.writes || immediate > may) {
            return Err((RejectReason::InvalidPduField, "immediate data"));
        }
        if command.writes && !command.is_final && params.initial_r2t {
            return Err((RejectReason::ProtocolError, "unsolicited data"));
        }
        Ok(())
    }

    /// Whether a command would wait for limits with unsolicited data beyond [`MAX_STAGED`] of those that do. The only
    /// one never does.
    fn is_staging_full(&self, idx: TaskIdx) -> bool {
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        let most = |idx: TaskIdx| {
            let task = &self.tasks[usize::from(idx.0)];
            match task.incoming.open {
                true => first_burst.min(task.exec.expected.data_out) as usize,
                false => task.incoming.staged.len(),
            }
        };
        let others = self.backlog.limits.waiting().filter(|other| *other != idx);
        let others: usize = others.map(most).sum();
        let own = most(idx);
        own > 0 && others > 0 && others + own > MAX_STAGED
    }

    /// A copy of data that come with a command.
    fn stage(&mut self, data: &[u8]) -> Vec<u8> {
        if data.is_empty() {
            return Vec::new();
        }
        let mut staged = std::mem::take(&mut self.staging);
        staged.reserve_exact(data.len());
        staged.extend_from_slice(data);
        staged
    }

    /// Keeps the memory of data that were taken, for the next command's: most commands start at once, so
    /// one such piece of memory is all that they need. What a burst cannot fill is given back.
    fn keep_staging(&mut self, mut list: Vec<u8>) {
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        list.clear();
        if list.capacity() > self.staging.capacity() && list.capacity() <= first_burst as usize {
            self.staging = list;
        }
    }

    /// A piece has left the buffer for the initiator, or will not be sent.
    pub(super) fn on_piece_sent(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        self.last_taken = cx.now;
        let task = &mut self.tasks[usize::from(idx.0)];
        assert_eq!(task.state, TaskState::Send, "a piece was sent for {idx:?}");
        let end = task.piece.from + task.piece.len;
        let start = task.data_start.offset.clamp(task.piece.from, end);
        self.pace.on_moved(end - start);
        if task.exec.aborted {
            return self.end_aborted(cx, idx);
        }
        task.pass_piece();
        self.go_on(cx, idx, StepResult::Done);
    }

    /// The initiator acknowledges data.
    pub(super) fn on_data_ack(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, snack: &Snack) {
        match self.mover.acknowledge_data(snack) {
            Ok(Some(task)) => self.on_piece_sent(cx, task),
            Ok(None) => {}
            Err(reason) => self.reject(cx, frame, reason, &"an acknowledgment of data"),
        }
    }

    /// Returns the result of a command's wait for data if they are here. Asks for what is missing when
    /// no more comes by itself.
    fn check_received(&mut self, now: Instant, idx: TaskIdx) -> Option<StepResult> {
        self.watch_data(now);
        let task = &mut self.tasks[usize::from(idx.0)];
        task.wait = self.pace.begin(now);
        let incoming = &mut task.incoming;
        let wanted = incoming.wanted.expect("the command waits for data");
        if incoming.open {
            return None;
        }
        if incoming.faulty {
            return Some(StepResult::Failed(BackendError::Transfer));
        }
        if incoming.got >= wanted {
            return Some(StepResult::Done);
        }
        if self.allegiance.is_silent() {
            return None;
        }
        incoming.solicited = true;
        let offset = incoming.got.max(incoming.from);
        let get = GetData {
            task: idx,
            itt: task.itt,
            lun: task.lun,
            r2t_sn: task.r2ts,
            base: incoming.from,
            offset,
            len: wanted - offset,
        };
        task.r2ts = self.mover.get_data(get);
        None
    }

    pub(super) fn on_data_out(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &DataOut) {
        self.last_data = cx.now;
        if !frame.is_intact {
            self.on_digest_error(cx);
            self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
        }
        if pdu.ttt == Ttt::NONE {
            return self.on_unsolicited(cx, frame, pdu);
        }
        let len = frame.data.len() as u32;
        match self.mover.take_solicited(pdu, len, frame.is_intact) {
            // Of a command that has ended meanwhile.
            Taken::Stale => {}
            Taken::Data {
                task,
                offset,
                complete,
            } => {
                self.counters.bytes_out += frame.data.len() as u64;
                self.pace.on_moved(frame.data.len() as u32);
                let context = &self.tasks[usize::from(task.0)];
                if let Some(buffer) = &context.exec.buffer {
                    buffer.write(offset - context.incoming.from, frame.data);
                }
                if complete {
                    self.go_on(cx, task, StepResult::Done);
                }
            }
            Taken::Again(task) => self.tasks[usize::from(task.0)].r2ts += 1,
            Taken::Failed(task) => {
                let failed = StepResult::Failed(BackendError::Transfer);
                self.go_on(cx, task, failed);
            }
        }
    }

    fn on_unsolicited(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &DataOut) {
        let Some(idx) = self.find(pdu.itt) else {
            return;
        };
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        let task = &mut self.tasks[usize::from(idx.0)];
        let incoming = &mut task.incoming;
        if !incoming.open {
            return self.reject(cx, frame, RejectReason::ProtocolError, &"unexpected data");
        }
        let len = frame.data.len() as u32;
        let limit = first_burst.min(task.exec.expected.data_out);
        let fits = incoming
            .got
            .checked_add(len)
            .is_some_and(|got| got <= limit);
        let in_order = pdu.data_sn == incoming.next_sn && pdu.offset == incoming.got;
        // What is missing is asked for when no more comes by itself.
        let is_lost = !frame.is_intact || (fits && pdu.data_sn > incoming.next_sn);
        incoming.lost |= is_lost && self.mover.recovers();
        incoming.faulty |= !incoming.lost && (!fits || !in_order || !frame.is_intact);
        if !incoming.faulty && !incoming.lost {
            self.counters.bytes_out += u64::from(len);
            match (incoming.wanted, &task.exec.buffer) {
                // All of them come before the first piece is complete.
                (Some(wanted), Some(buffer)) => {
                    let useful = wanted.saturating_sub(incoming.got).min(len) as usize;
                    buffer.write(pdu.offset.min(wanted), &frame.data[..useful]);
                    incoming.staged.extend_from_slice(&frame.data[useful..]);
                }
                // The answer is known, and the data are not wanted any more.
                _ if task.state == TaskState::AwaitUnsolicited => {}
                _ => incoming.staged.extend_from_slice(frame.data),
            }
            incoming.got += len;
            // A peer may send any number of PDUs without data.
            incoming.next_sn = incoming.next_sn.wrapping_add(1);
        }
        if pdu.is_final {
            incoming.open = false;
            match task.state {
                TaskState::Receive => {
                    if let Some(result) = self.check_received(cx.now, idx) {
                        self.go_on(cx, idx, result);
                    }
                }
                TaskState::AwaitUnsolicited => {
                    let response = task.response.take().expect("an answer waits");
                    self.respond(cx, idx, response);
                }
                _ => {}
            }
        }
    }

    pub(super) fn on_block_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, result: StepResult) {
        let task = &self.tasks[usize::from(idx.0)];
        assert_eq!(
            task.state,
            TaskState::Block,
            "an operation runs for {idx:?}"
        );
        if task.exec.aborted {
            return self.end_aborted(cx, idx);
        }
        self.go_on(cx, idx, result);
    }

    /// The answer waits: functions are to find the command once it has left the task set.
    fn note_left(&mut self, idx: TaskIdx) {
        let name = self.task_ref(idx);
        let nexus = self.session.as_ref().expect("full-feature phase").nexus;
        let exec = &mut self.tasks[usize::from(idx.0)].exec;
        exec.note_left(nexus, name);
    }

    /// Hands data and status to the datamover; the task ends when they are sent.
    fn send_response(&mut self, now: Instant, idx: TaskIdx, response: Response, len: u32) {
        let itt = self.tasks[usize::from(idx.0)].itt;
        self.window().answer_tag(itt, self.task_ref(idx));
        self.mark_sent(idx);
        self.watch_data(now);
        let task = &mut self.tasks[usize::from(idx.0)];
        task.wait = self.pace.begin(now);
        let response = task.response.insert(response);
        let base = match response.data_in {
            // It may be a last piece that comes from another connection.
            DataIn::Inline(_) => task.piece.from,
            DataIn::Buffer { from, .. } => from,
            DataIn::None => 0,
        };
        // The bytes are in the buffer.
        response.data_in = DataIn::Buffer { from: base, len };
        if self.allegiance.is_silent() {
            return;
        }
        self.counters.bytes_in += u64::from(len);
        let (residual, bidi_residual) = residuals(task.exec.expected, response);
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

    /// Other connections of the session cannot name the task any more.
    fn forget_tag(&self, idx: TaskIdx) {
        if let Some(session) = &self.session {
            let itt = self.tasks[usize::from(idx.0)].itt;
            session.window.remove_tag(itt, self.task_ref(idx));
        }
    }

    /// The answer to a command has gone, and the command is kept until that is acknowledged.
    pub(super) fn note_answered(&mut self, cx: &Cx<'_>, idx: TaskIdx) {
        let task = &mut self.tasks[usize::from(idx.0)];
        // It may have been acknowledged before we heard that it was sent.
        if task.state == TaskState::Sent {
            task.exec.timer.arrive(cx.now);
        }
    }

    /// The answer to a request has gone.
    pub(super) fn finish_answered(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        self.tasks[usize::from(idx.0)].exec.arrive(cx.now);
        let answer = self.tasks[usize::from(idx.0)].response.as_ref();
        self.pace
            .on_moved(answer.map_or(0, |answer| answer.data_in.len()));
        self.finish(cx.pool, idx, End::Answered);
    }

    /// Ends a request: releases its resources and notifies its watchers.
    pub(super) fn finish(&mut self, pool: &mut Pool, idx: TaskIdx, end: End) {
        self.leave_task_set(idx);
        self.forget_tag(idx);
        self.disinherit(idx);
        let task = &mut self.tasks[usize::from(idx.0)];
        match end {
            End::Answered => {}
            End::Aborted => self.counters.aborted += 1,
            End::TornDown => self.counters.torn_down += 1,
        }
        let watchers = task.exec.finish(pool);
        task.incoming = Incoming::default();
        task.response = None;
        task.mgmt = None;
        task.r2ts = 0;
        task.waited = 0;
        task.data_start = Start::default();
        task.piece = Piece::default();
        self.report_gone(watchers);
        self.give_back(idx);
    }

    /// Ends a command without an answer, at once or as soon as no device uses its buffer.
    pub(super) fn abort(&mut self, pool: &mut Pool, idx: TaskIdx, watcher: Option<TaskRef>) {
        let task = &mut self.tasks[usize::from(idx.0)];
        if !task.is_command() {
            // Its answer is on its way before ours: the task is gone for the initiator.
            if let Some(watcher) = watcher {
                self.ask(TaskAction::TaskGone(watcher));
            }
            return;
        }
        task.exec.watchers.extend(watcher);
        task.exec.renounce();
        self.cut_short(pool, idx, End::Aborted);
    }

    /// Ends a command that task management has ended, here or on another channel, at once or as soon as no
    /// device uses its buffer.
    pub(super) fn end_managed(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        let task = &mut self.tasks[usize::from(idx.0)];
        if !task.is_command() {
            return self.abort(cx.pool, idx, Some(watcher));
        }
        task.exec.watchers.push(watcher);
        if task.exec.aborted {
            return;
        }
        if self.stop(cx.pool, idx) {
            self.tasks[usize::from(idx.0)].exec.aborted = true;
        } else {
            self.end_aborted(cx, idx);
        }
    }

    /// Ends an aborted command that no device uses any more. One that another nexus has ended is answered
    /// with TASK ABORTED (SPC-4 7.5.8: TAS), since its initiator waits for it.
    pub(super) fn end_aborted(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let task = &self.tasks[usize::from(idx.0)];
        let is_over = matches!(self.phase, Phase::Closing | Phase::Closed);
        let is_awaited = !is_over && task.exec.is_cleared();
        // Its own nexus may have ended it from another connection.
        if !is_awaited || self.window().is_aborted(task.itt, self.task_ref(idx)) {
            return self.finish(cx.pool, idx, End::Aborted);
        }
        let exec = &mut self.tasks[usize::from(idx.0)].exec;
        let watchers = exec.interrupt(cx.pool);
        self.report_gone(watchers);
        self.answer_status(cx, idx, Status::TaskAborted);
    }

    /// Ends a request that is not answered, at once or as soon as no device uses its buffer.
    pub(super) fn cut_short(&mut self, pool: &mut Pool, idx: TaskIdx, end: End) {
        if self.tasks[usize::from(idx.0)].exec.aborted {
            return;
        }
        if self.stop(pool, idx) {
            self.tasks[usize::from(idx.0)].exec.aborted = true;
        } else {
            self.finish(pool, idx, end);
        }
    }

    /// Stops what a request does; whether a device or a socket still has its buffer, or it is another
    /// connection's.
    fn stop(&mut self, pool: &mut Pool, idx: TaskIdx) -> bool {
        match self.tasks[usize::from(idx.0)].state {
            TaskState::AwaitBuffer => {
                self.backlog.leave_memory(pool, idx);
                false
            }
            TaskState::AwaitLimit => {
                self.backlog.limits.remove(idx);
                false
            }
            TaskState::Receive | TaskState::Send => self.mover.forget(idx),
            TaskState::Expected => true,
            TaskState::Block => {
                self.ask(TaskAction::AbortBlock(idx));
                true
            }
            _ => false,
        }
    }

    /// The datamover has no data of a task under way any more: all that it was asked for have come,
    /// or they will not.
    ///
    /// # Panics
    /// If it was not asked for any.
    pub fn handle_arrived(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let task = &self.tasks[usize::from(idx.0)];
        let is_sent = task.state == TaskState::Send;
        assert!(
            is_sent || task.state == TaskState::Receive,
            "data come for {idx:?}"
        );
        if !is_sent {
            self.last_data = cx.now;
        }
        if task.exec.aborted {
            self.end_aborted(cx, idx);
        } else if ok && is_sent {
            self.on_piece_sent(cx, idx);
        } else if ok {
            let incoming = &task.incoming;
            let asked = incoming.got.max(incoming.from);
            let len = incoming.wanted.unwrap_or(asked) - asked;
            self.counters.bytes_out += u64::from(len);
            self.pace.on_moved(len);
            self.go_on(cx, idx, StepResult::Done);
        } else {
            let failed = StepResult::Failed(BackendError::Transfer);
            self.go_on(cx, idx, failed);
        }
        self.settle(cx);
    }

    /// Makes sure that the time is limited in which data come.
    fn watch_data(&mut self, now: Instant) {
        self.data_deadline
            .get_or_insert(now + self.config.data_out_timeout);
    }

    /// Data that were asked for may be overdue: none at all came for the timeout, or those of one
    /// command have taken [`MAX_DATA_TIMEOUTS`] of them. Data of one command may well wait behind those
    /// of others on a slow link, so as long as something comes, no command is given up early. The same is
    /// true of data that the initiator does not take, while others follow that need the buffer.
    ///
    /// A command that goes in pieces has its place in the order from the second one on, and others may
    /// wait for its end: all later pieces together have that time, also where it moves to another
    /// connection. Nothing waits for an answered command, but it keeps its buffer until its answer
    /// is sent, at error recovery level 1 until that is acknowledged: it has what is left of that
    /// time, but always as long as an initiator may be silent. Data that were moved meanwhile
    /// extend it: see [`crate::fabric::pace`].
    ///
    /// The commands concerned are aborted, and the connection is lost: at this point it is not known
    /// what the initiator will still send. So no command waits without limit or keeps its buffer.
    pub(super) fn check_data(&mut self, cx: &mut Cx<'_>) {
        self.data_deadline = None;
        let timeout = self.config.data_out_timeout;
        let due = |task: &Task| {
            let waited = Duration::from_millis(task.waited.into());
            let left = (timeout * MAX_DATA_TIMEOUTS).saturating_sub(waited);
            let last = match task.state {
                TaskState::Sent => return self.pace.due(task.wait, left.max(SILENCE)),
                TaskState::Send => self.last_taken,
                _ => self.last_data,
            };
            let silent = last.max(task.wait.since) + timeout;
            silent.min(self.pace.due(task.wait, left))
        };
        let waiting = self.tasks.iter().filter(|task| task.waits_for_initiator());
        let Some(at) = waiting
            .map(due)
            .min()
            .filter(|_| !self.allegiance.is_silent() && self.phase != Phase::Closed)
        else {
            return;
        };
        if at > cx.now {
            self.data_deadline = Some(at);
            return;
        }
        cx.gate.count(SessionEvent::TimedOut);
        warn_limited!(
            self.complaints,
            cx.now,
            "the initiator does not send its data, or does not take them"
        );
        self.ended.get_or_insert(Parting::Silent);
        for idx in self.all() {
            // What is answered ends when it has left the socket or the device.
            let task = &self.tasks[usize::from(idx.0)];
            if task.waits_for_initiator() && task.state != TaskState::Sent {
                self.cut_short(cx.pool, idx, End::TornDown);
            }
        }
        self.lose_connection(cx.now);
    }

    /// Aborts what waits for the initiator, who is logging out, or for limits, which would delay that.
    pub(super) fn abort_waiting(&mut self, cx: &mut Cx<'_>) {
        for idx in self.all() {
            let task = &self.tasks[usize::from(idx.0)];
            let waits = match task.state {
                TaskState::Receive | TaskState::AwaitUnsolicited | TaskState::AwaitLimit => true,
                // For an acknowledgment.
                TaskState::Send => self.mover.recovers(),
                _ => false,
            };
            if waits {
                self.abort(cx.pool, idx, None);
            }
        }
    }

    /// Ends everything that no device and no socket holds any more.
    pub(super) fn tear_down(&mut self, pool: &mut Pool, is_sending: bool) {
        for idx in self.all() {
            let task = &mut self.tasks[usize::from(idx.0)];
            match task.state {
                TaskState::Idle => {}
                TaskState::Sent if is_sending => {}
                _ => self.cut_short(pool, idx, End::TornDown),
            }
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = TaskIdx> + use<D> {
        (0..self.tasks.len() as u16).map(TaskIdx)
    }
}

impl<D: Datamover> CommandFlow for Channel<D> {
    type Cx<'a> = Cx<'a>;

    fn backlog(&mut self) -> &mut Backlog {
        &mut self.backlog
    }

    fn exec(&mut self, idx: TaskIdx) -> &mut Execution {
        &mut self.tasks[usize::from(idx.0)].exec
    }

    fn ask(&mut self, action: TaskAction) {
        self.actions.push_back(Action::Task(action));
    }

    fn hold(&mut self, idx: TaskIdx, hold: Hold) {
        self.tasks[usize::from(idx.0)].state = match hold {
            Hold::Limits => TaskState::AwaitLimit,
            Hold::Order => TaskState::AwaitTask,
            Hold::Memory => TaskState::AwaitBuffer,
            Hold::Backend => TaskState::Block,
        };
        self.counters.buffer_waits += u64::from(hold == Hold::Memory);
    }

    fn first_step(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) -> Step {
        let session = self.session.as_ref().expect("full-feature phase");
        let exec = &mut self.tasks[usize::from(idx.0)].exec;
        exec.start(session.nexus, session.luns.luns(), cx.pool, cx.now)
    }

    /// Takes what came unsolicited, and asks for the rest.
    fn receive_data(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult> {
        let task = &mut self.tasks[usize::from(idx.0)];
        task.exec.timer.enter(Stage::FabricIn, cx.now);
        task.exec.timer.carry(len);
        let staged = &mut task.incoming.staged;
        let useful = staged.len().min(len as usize);
        if let Some(buffer) = &task.exec.buffer
            && useful > 0
        {
            buffer.write(0, &staged[..useful]);
        }
        staged.drain(..useful);
        if staged.is_empty() {
            let emptied = std::mem::take(staged);
            self.keep_staging(emptied);
        }
        let task = &mut self.tasks[usize::from(idx.0)];
        task.incoming.from = from;
        task.incoming.wanted = Some(from + len);
        task.state = TaskState::Receive;
        if from > 0 && matches!(self.phase, Phase::LoggingOut(_)) {
            // The initiator is logging out, and sends no further data.
            self.abort(cx.pool, idx, None);
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
        self.watch_data(cx.now);
        let task = &mut self.tasks[usize::from(idx.0)];
        task.exec.timer.enter(Stage::FabricOut, cx.now);
        // An initiator may send data with a command that takes none.
        let staged = std::mem::take(&mut task.incoming.staged);
        if let Some(buffer) = &task.exec.buffer
            && std::mem::take(&mut task.incoming.is_moved)
        {
            buffer.write(0, &staged);
        }
        task.state = TaskState::Send;
        task.wait = self.pace.begin(cx.now);
        let end = from + len;
        task.piece = Piece {
            from,
            len,
            next_sn: task.data_start.data_sn,
        };
        if task.data_start.offset >= end {
            // The initiator had it all from the connection that was lost.
            self.last_taken = cx.now;
            task.pass_piece();
            return Some(StepResult::Done);
        }
        if self.allegiance.is_silent() {
            return None;
        }
        task.exec.timer.carry(len);
        self.counters.bytes_in += u64::from(len);
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
        let task = &mut self.tasks[usize::from(idx.0)];
        task.waited = task.waited_by(now, &self.pace);
        if matches!(task.state, TaskState::Receive | TaskState::Send) {
            task.incoming.solicited = false;
        }
    }

    fn respond(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, response: Response) {
        let owner = self.backlog.owner();
        let task = &mut self.tasks[usize::from(idx.0)];
        if task.incoming.open {
            self.note_left(idx);
            self.leave_task_set(idx);
            let task = &mut self.tasks[usize::from(idx.0)];
            let unwanted = std::mem::take(&mut task.incoming.staged);
            task.response = Some(response);
            task.state = TaskState::AwaitUnsolicited;
            task.wait = self.pace.begin(cx.now);
            self.keep_staging(unwanted);
            return self.watch_data(cx.now);
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

    /// Unsolicited data of commands that wait for limits are bounded: they lie in no buffer.
    fn check_held(&mut self, _: &mut Cx<'_>, idx: TaskIdx, _: Descriptors) -> Result<(), Status> {
        match self.is_staging_full(idx) {
            true => Err(Status::TaskSetFull),
            false => Ok(()),
        }
    }
}

/// The residual of a response, and that of the read of a bidirectional command (RFC 7143 11.4.5).
fn residuals(expected: Expected, response: &Response) -> (Residual, Residual) {
    let (read, write) = (response.residual_in, response.residual_out);
    match (expected.data_in > 0, expected.data_out > 0) {
        (true, true) => (write, read),
        (true, false) => (read, Residual::None),
        (false, true) => (write, Residual::None),
        // A command that moves data nobody expects: what it would have moved has overflown.
        (false, false) if read != Residual::None => (read, Residual::None),
        (false, false) => (write, Residual::None),
    }
}
