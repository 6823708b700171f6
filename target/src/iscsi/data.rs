//! Command data: unsolicited and solicited data, Data-In, and data timeouts.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{DataOut, RejectReason, Snack, SnackKind};
use riser_scsi::step::{BackendError, StepResult, TransferError};

use super::channel::{Channel, Cx, Phase, SILENCE};
use super::datamover::{Datamover, GetData, SolicitedData};
use super::task::{Task, TaskState};
use crate::audit::CloseReason;
use crate::fabric::{
    CommandFlow as _, End, MAX_DATA_TIMEOUTS, ORDER_CHECK_INTERVAL, OWED, TaskIdx, Wait,
};
use crate::stats::SessionEvent;
use crate::warn_limited;

impl<D: Datamover> Channel<D> {
    /// Returns a copy of immediate data.
    pub(super) fn stage(&mut self, data: &[u8]) -> Vec<u8> {
        if data.is_empty() {
            return Vec::new();
        }
        let mut staged = std::mem::take(&mut self.staging);
        staged.reserve_exact(data.len());
        staged.extend_from_slice(data);
        staged
    }

    /// Keeps a buffer for the next command with immediate data. A single buffer is usually enough
    /// because most commands start immediately. We release memory that exceeds the first burst.
    pub(super) fn keep_staging(&mut self, mut list: Vec<u8>) {
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        list.clear();
        if list.capacity() > self.staging.capacity() && list.capacity() <= first_burst as usize {
            self.staging = list;
        }
    }

    /// Called when a piece of Data-In was sent, or can't be sent.
    pub(super) fn on_piece_sent(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        self.last_taken = cx.now;
        let task = &mut self.tasks[idx];
        assert_eq!(task.state, TaskState::Send, "a piece was sent for {idx:?}");
        let end = task.piece.from + task.piece.len;
        let start = task.data_start.offset.clamp(task.piece.from, end);
        self.pace.on_moved(end - start);
        if task.exec.aborted {
            return self.end_aborted(cx, idx);
        }
        if std::mem::take(&mut task.is_lacking) {
            let failed = BackendError::Transfer(TransferError::SnackRejected);
            return self.resume_task(cx, idx, StepResult::Failed(failed));
        }
        task.pass_piece();
        self.resume_task(cx, idx, StepResult::Done);
    }

    /// Handles a SNACK. If we can't retransmit the data of a command before sending the status, the
    /// command must fail (RFC 7143 7.8), because the initiator is waiting for this data.
    pub(super) fn on_snack(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, snack: &Snack) {
        let Err(reason) = self.mover.resend(snack) else {
            return;
        };
        self.reject(cx, frame, reason, &"SNACK");
        let is_for_data = matches!(snack.kind, SnackKind::DataOrR2t | SnackKind::RData);
        let Some(idx) = self.find(snack.itt).filter(|_| is_for_data) else {
            return;
        };
        let task = &mut self.tasks[idx];
        // A SNACK for data that was already acknowledged is an initiator error, but it isn't
        // missing any data.
        if task.state != TaskState::Send
            || task.exec.aborted
            || !self.mover.recovers()
            || reason != RejectReason::SnackReject
        {
            return;
        }
        task.is_lacking = true;
        // Otherwise the socket is using the buffer, and we'll be called when it was sent.
        if !self.mover.forget(idx) {
            self.on_piece_sent(cx, idx);
        }
    }

    /// Handles a DataACK.
    pub(super) fn on_data_ack(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, snack: &Snack) {
        match self.mover.acknowledge_data(snack) {
            Ok(Some(task)) => self.on_piece_sent(cx, task),
            Ok(None) => {}
            Err(reason) => self.reject(cx, frame, reason, &"an acknowledgment of data"),
        }
    }

    /// Returns the result if a command has received all its data. If no more data is in flight,
    /// this requests the missing data.
    pub(super) fn check_received(&mut self, now: Instant, idx: TaskIdx) -> Option<StepResult> {
        self.watch_data(now);
        let task = &mut self.tasks[idx];
        task.wait = self.pace.begin(now);
        if !task.exec.is_gathering() {
            task.ordered.get_or_insert(task.wait);
        }
        let incoming = &mut task.incoming;
        let wanted = incoming.wanted.expect("the command waits for data");
        // We don't know which data is missing until the end of unsolicited data. An error response
        // must be delayed until then as well (RFC 7143 11.4.2).
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
            // The command has already completed.
            SolicitedData::Stale { .. } => {}
            SolicitedData::Data {
                task,
                offset,
                complete,
            } => {
                self.counters.bytes_out += frame.data.len() as u64;
                self.pace.on_moved(frame.data.len() as u32);
                let context = &self.tasks[task];
                if let Some(buffer) = &context.exec.buffer {
                    buffer.write(offset - context.incoming.from, frame.data);
                }
                if complete {
                    self.resume_task(cx, task, StepResult::Done);
                }
            }
            SolicitedData::Again(task) => self.tasks[task].r2ts += 1,
            SolicitedData::Failed(task, error) => {
                let failed = StepResult::Failed(BackendError::Transfer(error));
                self.resume_task(cx, task, failed);
            }
        }
    }

    fn on_unsolicited(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &DataOut) {
        let len = frame.data.len() as u32;
        let idx = self.find(pdu.itt);
        // If the command has completed, we don't know how much data is left.
        let announced = match idx.map(|idx| &self.tasks[idx].incoming) {
            Some(incoming) if incoming.open => incoming.announced.into(),
            _ => self.unasked,
        };
        let counted = announced.min(len.into());
        if counted > 0 {
            self.last_data = cx.now;
        }
        self.unasked = self.unasked.saturating_sub(counted);
        // This isn't an error, because the initiator can send data for a command that was refused
        // or aborted.
        let Some(idx) = idx else {
            return;
        };
        let first_burst = self.session.as_ref().map_or(0, |s| s.params.first_burst);
        let task = &mut self.tasks[idx];
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
        // Missing data is requested when no more data is in flight.
        let is_lost = !frame.is_intact || (fits && pdu.data_sn > incoming.next_sn);
        incoming.lost |= is_lost && self.mover.recovers();
        // Only record the error. The response is sent after the F bit is received.
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
                // This is complete before the first piece starts.
                (Some(wanted), Some(buffer)) => {
                    let useful = wanted.saturating_sub(incoming.got).min(len) as usize;
                    buffer.write(pdu.offset.min(wanted), &frame.data[..useful]);
                    incoming.staged.extend_from_slice(&frame.data[useful..]);
                }
                // The response is already known, so we don't need the data.
                _ if task.state == TaskState::AwaitUnsolicited => {}
                _ => incoming.staged.extend_from_slice(frame.data),
            }
            incoming.got += len;
            // A peer can send any number of PDUs without data.
            incoming.next_sn = incoming.next_sn.wrapping_add(1);
        }
        if pdu.is_final {
            incoming.open = false;
            let rest = std::mem::take(&mut incoming.announced);
            self.unasked = self.unasked.saturating_sub(rest.into());
            match task.state {
                TaskState::Receive => {
                    if let Some(result) = self.check_received(cx.now, idx) {
                        self.resume_task(cx, idx, result);
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

    /// Called when the datamover has completed or canceled the data transfer for a task.
    ///
    /// # Panics
    /// Panics if there is no transfer.
    pub fn handle_arrived(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let task = &self.tasks[idx];
        let is_sent = task.state == TaskState::Send;
        assert!(
            is_sent || task.state == TaskState::Receive,
            "data come for {idx:?}"
        );
        // If the initiator has received data, `on_piece_sent` handles this.
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
            self.resume_task(cx, idx, StepResult::Done);
        } else {
            let failed = BackendError::Transfer(TransferError::Failed);
            self.resume_task(cx, idx, StepResult::Failed(failed));
        }
        self.settle(cx);
    }

    /// Called when data requests were sent for some tasks. This starts the data timeout for the
    /// initiator.
    pub(crate) fn note_asked(&mut self, now: Instant, tasks: impl FnOnce(&D) -> &[TaskIdx]) {
        for task in tasks(&self.mover) {
            // It may have completed in the meantime.
            if let Some(task) = self.tasks.get_mut(*task) {
                task.asked = now;
                // The timeout for each piece starts with its first request.
                if task.first_asked.since <= task.wait.since {
                    task.first_asked = self.pace.begin(now);
                }
            }
        }
    }

    /// Schedules the next check for data timeouts. The first check must be early enough to handle
    /// an initiator that exceeds its share of memory or delays other initiators.
    pub(super) fn watch_data(&mut self, now: Instant) {
        let look = now + self.config.data_out_timeout.min(ORDER_CHECK_INTERVAL);
        let deadline = self.data_deadline.get_or_insert(look);
        *deadline = look.min(*deadline);
    }

    /// Returns true if other initiators are waiting for commands that wait for this initiator and
    /// hold their place in the order. The second value is true if there are any such commands.
    fn held_commands(&self) -> (bool, bool) {
        let is_meant = |task: &Task| {
            matches!(task.state, TaskState::Receive | TaskState::Send) && !task.exec.is_gathering()
        };
        let (mut held, mut is_in_order) = (false, false);
        for (_, task) in self.tasks.iter().filter(|(_, task)| is_meant(task)) {
            is_in_order = true;
            held = held || task.exec.holds_others();
        }
        (held, is_in_order)
    }

    /// Checks for data timeouts. A timeout occurs if we have received no data at all for this time,
    /// or if the data for a single command takes longer than [`MAX_DATA_TIMEOUTS`]. On a slow link,
    /// the data for a command can be queued behind other data, so we don't abort a command early if
    /// any data is received. The same rules apply to data that the initiator doesn't read while
    /// other commands need the buffer.
    ///
    /// When a command is split into pieces, it holds its place in the order from the second piece,
    /// and other commands may be waiting for it. The limit therefore applies to the total time for
    /// all subsequent pieces, even if the command moves to another connection. When a response is
    /// ready, other commands no longer have to wait, but the buffer is in use until the response is
    /// sent, or acknowledged at error recovery level 1. This can take the remaining time, but never
    /// less than the initiator's idle timeout. Time is added for data transferred since then: see
    /// [`Pace`](crate::fabric::Pace).
    ///
    /// If other initiators are waiting for memory, an initiator that uses more than its share can
    /// only be idle for [`OWED`], which allows for several retransmissions of a TCP segment. It
    /// must not be too slow either: each command has a single data timeout plus the time required
    /// for the data at [`SLOWEST_AWAITED`](crate::fabric::SLOWEST_AWAITED). If other initiators are
    /// waiting for a command in the order of its unit, the limit is [`OWED`] plus this time for all
    /// its pieces.
    ///
    /// On a timeout, we abort the command and close the connection, because we don't know which
    /// data the initiator will send next. This ensures that a command can't wait, or keep its
    /// buffer, without limit.
    pub(super) fn check_data(&mut self, cx: &mut Cx<'_>) {
        self.data_deadline = None;
        let timeout = self.config.data_out_timeout;
        let is_owed = cx.pool.is_owed_by(self.backlog.owner());
        let now = self.pace.begin(cx.now);
        self.owed = is_owed.then(|| self.owed.unwrap_or(now));
        let (held, is_in_order) = self.held_commands();
        self.held = held.then(|| self.held.unwrap_or(now));
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
            // No other command is waiting for this one, except for its memory if the pool is low.
            if is_answered && !(is_owed && self.mover.is_sending_data(idx)) {
                return due;
            }
            let last = match task.state {
                TaskState::Send | TaskState::Sent => self.last_taken,
                // A data request is queued behind other PDUs. Until it's sent, reading those is
                // progress.
                _ if self.mover.is_asking(idx) => self.last_data.max(self.last_taken),
                _ => self.last_data.max(task.asked),
            };
            let due = due.min(last.max(task.wait.since) + patience);
            let asked = match task.state {
                TaskState::Receive => task.wait.later(task.first_asked),
                _ => task.wait,
            };
            // Other initiators wait for the total time of all pieces.
            let ordered = task.ordered.filter(|_| !is_answered).unwrap_or(asked);
            let awaited = |begun: Wait, since: Option<Wait>, left| {
                since.map(|since| self.pace.due_awaited(begun.later(since), left))
            };
            let held = self.held.filter(|_| !task.exec.is_gathering());
            let awaited = [
                awaited(asked, self.owed, timeout),
                awaited(ordered, held, timeout.min(OWED)),
            ];
            awaited.into_iter().flatten().fold(due, Instant::min)
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
            // This function isn't called when a command of another initiator starts to wait.
            let interval = match is_in_order {
                true => ORDER_CHECK_INTERVAL,
                false => OWED,
            };
            self.data_deadline = Some(at.min(cx.now + interval));
            return;
        }
        cx.gate.count(SessionEvent::TimedOut);
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.session.as_ref().map(|session| session.nexus.0),
            "timed out waiting for the initiator to send or receive data"
        );
        self.ended.get_or_insert(CloseReason::Silent);
        for idx in self.tasks.numbers() {
            // After the response, the task completes when it's no longer in use by the socket or
            // device.
            let meant = |task: &Task| task.waits_for_initiator() && task.state != TaskState::Sent;
            if self.tasks.get(idx).is_some_and(meant) {
                self.cut_short(cx, idx, End::TornDown);
            }
        }
        self.lose_connection(cx.now);
    }
}
