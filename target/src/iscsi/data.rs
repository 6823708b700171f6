//! Command data: unsolicited and solicited data, Data-In, and data timeouts.

use std::time::Instant;

use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{DataOut, RejectReason, Snack, SnackKind};
use riser_scsi::step::{BackendError, StepResult, TransferError};

use super::context::Cx;
use super::datamover::{Datamover, GetData, SolicitedData};
use super::executor::Executor;
use super::phase::Phase;
use super::task::{Task, TaskState};
use crate::audit::CloseReason;
use crate::fabric::{CommandFlow as _, End, TaskIdx};
use crate::stats::SessionEvent;
use crate::warn_limited;

impl<D: Datamover> Executor<D> {
    /// Called when a piece of Data-In was sent, or can't be sent.
    pub(super) fn on_piece_sent(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        self.timers.last_taken = cx.now;
        let task = &mut self.tasks[idx];
        assert_eq!(task.state, TaskState::Send, "a piece was sent for {idx:?}");
        let end = task.piece.from + task.piece.len;
        let start = task.data_start.offset.clamp(task.piece.from, end);
        self.timers.pace.on_moved(end - start);
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
        let Some(idx) = self.tasks.find(snack.itt).filter(|_| is_for_data) else {
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
        if !self.mover.cancel_transfers(idx) {
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
        self.timers.watch_data(now);
        let task = &mut self.tasks[idx];
        task.wait = self.timers.pace.start_wait(now);
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
        let taken = self.mover.on_solicited(pdu, len, frame.is_intact);
        // Data that were not requested do not show that the initiator responds.
        if len > 0
            && !matches!(
                taken,
                SolicitedData::Stale {
                    was_solicited: false
                }
            )
        {
            self.timers.last_data = cx.now;
        }
        match taken {
            // The command has already completed.
            SolicitedData::Stale { .. } => {}
            SolicitedData::Data {
                task,
                offset,
                complete,
            } => {
                self.stats.counters.bytes_out += frame.data.len() as u64;
                self.timers.pace.on_moved(frame.data.len() as u32);
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
        let idx = self.tasks.find(pdu.itt);
        // If the command has completed, we don't know how much data is left.
        let announced = match idx.map(|idx| &self.tasks[idx].incoming) {
            Some(incoming) if incoming.open => incoming.announced.into(),
            _ => self.unsolicited,
        };
        let counted = announced.min(len.into());
        if counted > 0 {
            self.timers.last_data = cx.now;
        }
        self.unsolicited = self.unsolicited.saturating_sub(counted);
        // This isn't an error, because the initiator can send data for a command that was refused
        // or aborted.
        let Some(idx) = idx else {
            return;
        };
        let first_burst = self.first_burst();
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
            self.stats.counters.bytes_out += u64::from(len);
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
            self.unsolicited = self.unsolicited.saturating_sub(rest.into());
            match task.state {
                TaskState::Receive => {
                    if let Some(result) = self.check_received(cx.now, idx) {
                        self.resume_task(cx, idx, result);
                    }
                }
                TaskState::AwaitUnsolicited => {
                    let response = task.response.take().expect("a response is pending");
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
    pub(super) fn on_arrived(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let task = &self.tasks[idx];
        let is_sent = task.state == TaskState::Send;
        assert!(
            is_sent || task.state == TaskState::Receive,
            "data come for {idx:?}"
        );
        // If the initiator has received data, `on_piece_sent` handles this.
        if !is_sent {
            self.timers.last_data = cx.now;
        }
        if task.exec.aborted {
            self.end_aborted(cx, idx);
        } else if ok && is_sent {
            self.on_piece_sent(cx, idx);
        } else if ok {
            let incoming = &task.incoming;
            let received = incoming.got.max(incoming.from);
            let len = incoming.wanted.unwrap_or(received) - received;
            self.stats.counters.bytes_out += u64::from(len);
            self.timers.pace.on_moved(len);
            self.resume_task(cx, idx, StepResult::Done);
        } else {
            let failed = BackendError::Transfer(TransferError::Failed);
            self.resume_task(cx, idx, StepResult::Failed(failed));
        }
    }

    /// Called when data requests were sent for some tasks. This starts the data timeout for the
    /// initiator.
    pub(crate) fn note_requested(&mut self, now: Instant, tasks: impl FnOnce(&D) -> &[TaskIdx]) {
        for task in tasks(&self.mover) {
            // It may have completed in the meantime.
            if let Some(task) = self.tasks.get_mut(*task) {
                self.timers.note_requested(now, task);
            }
        }
    }

    /// Checks for data timeouts: see [`Timers::check_data`](super::timers::Timers::check_data).
    /// Returns true if the connection must be closed.
    ///
    /// On a timeout, we abort the command and close the connection, because we don't know which
    /// data the initiator will send next. This ensures that a command can't wait, or keep its
    /// buffer, without limit.
    pub(super) fn check_data(&mut self, cx: &mut Cx<'_>) -> bool {
        let is_owed = cx.pool.is_owed_by(self.backlog.owner());
        let (tasks, mover) = (&self.tasks, &self.mover);
        let is_late = self.timers.check_data(cx.now, is_owed, tasks, mover);
        if self.allegiance.is_silent() || self.phase == Phase::Closed {
            self.timers.stop_data();
            return false;
        }
        if !is_late {
            return false;
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
        true
    }
}
