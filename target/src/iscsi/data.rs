//! Data of commands: unsolicited, asked for and sent, and the time that they may take.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{DataOut, RejectReason, Snack, SnackKind};
use riser_scsi::step::{BackendError, StepResult, TransferError};

use super::channel::{Channel, Cx, Phase, SILENCE};
use super::datamover::{Datamover, GetData, SolicitedData};
use super::task::{Task, TaskState};
use crate::audit::Parting;
use crate::fabric::{CommandFlow as _, End, MAX_DATA_TIMEOUTS, TaskIdx};
use crate::stats::SessionEvent;
use crate::warn_limited;

/// Silence after which an initiator has the memory of others no longer.
const OWED: Duration = Duration::from_secs(5);

impl<D: Datamover> Channel<D> {
    /// A copy of data that come with a command.
    pub(super) fn stage(&mut self, data: &[u8]) -> Vec<u8> {
        if data.is_empty() {
            return Vec::new();
        }
        let mut staged = std::mem::take(&mut self.staging);
        staged.reserve_exact(data.len());
        staged.extend_from_slice(data);
        staged
    }

    /// Keeps the memory of data that were taken, for the next command's: most commands start at
    /// once, so one such piece of memory is all that they need. What a burst cannot fill is given
    /// back.
    pub(super) fn keep_staging(&mut self, mut list: Vec<u8>) {
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
        if std::mem::take(&mut task.is_lacking) {
            let failed = BackendError::Transfer(TransferError::SnackRejected);
            return self.go_on(cx, idx, StepResult::Failed(failed));
        }
        task.pass_piece();
        self.go_on(cx, idx, StepResult::Done);
    }

    /// The initiator asks for PDUs once more. Where it does not get data of a command that is not
    /// answered yet, the command fails (RFC 7143 7.8): it must not succeed while the initiator
    /// waits for them.
    pub(super) fn on_snack(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, snack: &Snack) {
        let Err(reason) = self.mover.resend(snack) else {
            return;
        };
        self.reject(cx, frame, reason, &"SNACK");
        let is_for_data = matches!(snack.kind, SnackKind::DataOrR2t | SnackKind::RData);
        let Some(idx) = self.find(snack.itt).filter(|_| is_for_data) else {
            return;
        };
        let task = &mut self.tasks[usize::from(idx.0)];
        // A SNACK for what the initiator has acknowledged is its own mistake: it lacks nothing.
        if task.state != TaskState::Send
            || task.exec.aborted
            || !self.mover.recovers()
            || reason != RejectReason::SnackReject
        {
            return;
        }
        task.is_lacking = true;
        // Otherwise the socket has the buffer, and the task comes back when it is sent.
        if !self.mover.forget(idx) {
            self.on_piece_sent(cx, idx);
        }
    }

    /// The initiator acknowledges data.
    pub(super) fn on_data_ack(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, snack: &Snack) {
        match self.mover.acknowledge_data(snack) {
            Ok(Some(task)) => self.on_piece_sent(cx, task),
            Ok(None) => {}
            Err(reason) => self.reject(cx, frame, reason, &"an acknowledgment of data"),
        }
    }

    /// Returns the result of a command's wait for data if they are here. Asks for what is missing
    /// when nothing else comes by itself.
    pub(super) fn check_received(&mut self, now: Instant, idx: TaskIdx) -> Option<StepResult> {
        self.watch_data(now);
        let task = &mut self.tasks[usize::from(idx.0)];
        task.wait = self.pace.begin(now);
        let incoming = &mut task.incoming;
        let wanted = incoming.wanted.expect("the command waits for data");
        // What is missing is known when unsolicited data have ended; an error, too, is answered
        // only then (RFC 7143 11.4.2).
        if incoming.open {
            return None;
        }
        if let Some(error) = incoming.fault {
            return Some(StepResult::Failed(BackendError::Transfer(error)));
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
        if !frame.is_intact {
            self.on_digest_error(cx);
            self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
        }
        if pdu.ttt == Ttt::NONE {
            return self.on_unsolicited(cx, frame, pdu);
        }
        let len = frame.data.len() as u32;
        let taken = self.mover.take_solicited(pdu, len, frame.is_intact);
        // Data that were not requested do not show that the initiator responds.
        if len > 0 && !matches!(taken, SolicitedData::Stale { was_asked: false }) {
            self.last_data = cx.now;
        }
        match taken {
            // Of a command that has ended meanwhile.
            SolicitedData::Stale { .. } => {}
            SolicitedData::Data {
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
            SolicitedData::Again(task) => self.tasks[usize::from(task.0)].r2ts += 1,
            SolicitedData::Failed(task, error) => {
                let failed = StepResult::Failed(BackendError::Transfer(error));
                self.go_on(cx, task, failed);
            }
        }
    }

    fn on_unsolicited(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &DataOut) {
        let len = frame.data.len() as u32;
        let idx = self.find(pdu.itt);
        // Of a command that ended meanwhile it is not known how much was still to come.
        let announced = match idx.map(|idx| &self.tasks[usize::from(idx.0)].incoming) {
            Some(incoming) if incoming.open => incoming.announced.into(),
            _ => self.unasked,
        };
        let counted = announced.min(len.into());
        if counted > 0 {
            self.last_data = cx.now;
        }
        self.unasked = self.unasked.saturating_sub(counted);
        // Data may follow a command that was refused or aborted meanwhile, so this is no error.
        let Some(idx) = idx else {
            return;
        };
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        let task = &mut self.tasks[usize::from(idx.0)];
        let incoming = &mut task.incoming;
        if !incoming.open {
            return self.reject(cx, frame, RejectReason::ProtocolError, &"unexpected data");
        }
        incoming.announced -= counted as u32;
        let limit = first_burst.min(task.exec.expected.data_out);
        let fits = incoming
            .got
            .checked_add(len)
            .is_some_and(|got| got <= limit);
        let in_order = pdu.data_sn == incoming.next_sn && pdu.offset == incoming.got;
        // What is missing is asked for when nothing else comes by itself.
        let is_lost = !frame.is_intact || (fits && pdu.data_sn > incoming.next_sn);
        incoming.lost |= is_lost && self.mover.recovers();
        // Only noted: the command is answered when the F bit has come.
        if !incoming.lost && incoming.fault.is_none() {
            incoming.fault = match () {
                () if !frame.is_intact || pdu.data_sn > incoming.next_sn => {
                    Some(TransferError::Crc)
                }
                () if !fits => Some(TransferError::Unsolicited),
                () if !in_order => Some(TransferError::Failed),
                () => None,
            };
        }
        if incoming.fault.is_none() && !incoming.lost {
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
            let rest = std::mem::take(&mut incoming.announced);
            self.unasked = self.unasked.saturating_sub(rest.into());
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
        // Data that the initiator has taken are noted by `on_piece_sent`.
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
            let failed = BackendError::Transfer(TransferError::Failed);
            self.go_on(cx, idx, StepResult::Failed(failed));
        }
        self.settle(cx);
    }

    /// Requests for data of some tasks have been sent: the initiator's time to answer begins.
    pub(crate) fn note_asked(&mut self, now: Instant, tasks: impl FnOnce(&D) -> &[TaskIdx]) {
        for task in tasks(&self.mover) {
            // It may have ended since.
            if let Some(task) = self.tasks.get_mut(*task) {
                task.asked = now;
            }
        }
    }

    /// Makes sure that the time is limited in which data come: the first look is early enough for
    /// an initiator that has more memory than its share by then.
    pub(super) fn watch_data(&mut self, now: Instant) {
        let look = now + self.config.data_out_timeout.min(OWED);
        let deadline = self.data_deadline.get_or_insert(look);
        *deadline = look.min(*deadline);
    }

    /// Data that were asked for may be overdue: none at all came for the timeout, or those of one
    /// command have taken [`MAX_DATA_TIMEOUTS`] of them. Data of one command may well wait behind
    /// those of others on a slow link, so as long as something comes, no command is given up early.
    /// The same is true of data that the initiator does not take, while others follow that need the
    /// buffer.
    ///
    /// A command that goes in pieces has its place in the order from the second one on, and others
    /// may wait for its end: all later pieces together have that time, also where it moves to
    /// another connection. Nothing waits for an answered command, but it keeps its buffer until its
    /// answer is sent, at error recovery level 1 until that is acknowledged: it has what is left of
    /// that time, but always as long as an initiator may be silent. Data that were moved meanwhile
    /// extend it: see [`Pace`](crate::fabric::Pace).
    ///
    /// An initiator that has more than its share of the memory that others wait for may be silent for
    /// [`OWED`] only, in which a lost segment of TCP is sent again several times.
    ///
    /// The commands concerned are aborted, and the connection is lost: at this point it is not
    /// known what the initiator will still send. So no command waits without limit or keeps its
    /// buffer.
    pub(super) fn check_data(&mut self, cx: &mut Cx<'_>) {
        self.data_deadline = None;
        let timeout = self.config.data_out_timeout;
        let is_owed = cx.pool.is_owed_by(self.backlog.owner());
        let patience = match is_owed {
            true => timeout.min(OWED),
            false => timeout,
        };
        let due = |(idx, task): (TaskIdx, &Task)| {
            let waited = Duration::from_millis(task.waited.into());
            let left = (timeout * MAX_DATA_TIMEOUTS).saturating_sub(waited);
            let is_answered = task.state == TaskState::Sent;
            let left = if is_answered { left.max(SILENCE) } else { left };
            let due = self.pace.due(task.wait, left);
            // Nothing waits for it but, where there is little, for its memory.
            if is_answered && !(is_owed && self.mover.is_sending_data(idx)) {
                return due;
            }
            let last = match task.state {
                TaskState::Send | TaskState::Sent => self.last_taken,
                // What asks for data goes behind what is queued: until then, taking that is progress.
                _ if self.mover.is_asking(idx) => self.last_data.max(self.last_taken),
                _ => self.last_data.max(task.asked),
            };
            due.min(last.max(task.wait.since) + patience)
        };
        let waiting = self
            .tasks
            .iter()
            .filter(|(_, task)| task.waits_for_initiator());
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
        for idx in self.tasks.numbers() {
            // What is answered ends when it has left the socket or the device.
            let meant = |task: &Task| task.waits_for_initiator() && task.state != TaskState::Sent;
            if self.tasks.get(idx).is_some_and(meant) {
                self.cut_short(cx, idx, End::TornDown);
            }
        }
        self.lose_connection(cx.now);
    }
}
