//! Commands that are moved from or to another connection: see [`allegiance`](super::allegiance).

use std::sync::Arc;
use std::time::Duration;

use riser_scsi::iscsi::pdu::TmfRequest;
use riser_scsi::step::{DataIn, Step};

use super::action::Action;
use super::allegiance::TIME2WAIT;
use super::context::Cx;
use super::datamover::{Datamover, Progress, Start};
use super::executor::Executor;
use super::reassigned::{ReassignRequest, ReassignedTask, ResumePoint};
use super::task::{Incoming, Piece, TaskState};
use crate::fabric::task_mgmt::FunctionResponse;
use crate::fabric::{CommandFlow as _, End, TaskIdx, TaskRef};
use crate::pool::Buffer;

impl<D: Datamover> Executor<D> {
    /// Returns the error recovery level of the session, or zero before login.
    pub(super) fn recovery_level(&self) -> u8 {
        let session = self.session.as_ref();
        let session = session.filter(|s| D::RECOVERS && !s.params.discovery);
        session.map_or(0, |s| s.params.error_recovery_level)
    }

    /// Returns how long commands are kept after the connection is lost.
    pub(super) fn retention(&self) -> Option<Duration> {
        let params = self.session.as_ref()?.params;
        let seconds = u32::from(params.time2wait).min(TIME2WAIT) + u32::from(params.time2retain);
        let retains = self.recovery_level() > 1 && params.time2retain > 0;
        retains.then(|| Duration::from_secs(seconds.into()))
    }

    /// Aborts unclaimed commands that use memory and are only waiting for another connection.
    pub(super) fn release_memory(&mut self, cx: &mut Cx<'_>) {
        for idx in self.tasks.numbers() {
            let task = self.tasks.get(idx);
            let has_buffer = task.is_some_and(|task| task.exec.buffer.is_some());
            let is_claimed = self.allegiance.is_claimed(self.tasks.task_ref(idx));
            if has_buffer && self.tasks.is_at_rest(idx) && !is_claimed {
                self.cut_short(cx, idx, End::TornDown);
            }
        }
    }

    /// Aborts commands that were not claimed, because they can't be claimed any more.
    pub(super) fn end_unclaimed(&mut self, cx: &mut Cx<'_>, is_flushed: bool) {
        let window = Arc::clone(self.window());
        for idx in self.tasks.numbers() {
            let Some(task) = self.tasks.get(idx) else {
                continue;
            };
            let name = self.tasks.task_ref(idx);
            let may_end = task.state != TaskState::Sent || is_flushed;
            if may_end && !self.allegiance.is_claimed(name) {
                // Do this now, because a command at a device will complete later.
                window.remove_tag(task.itt, name);
                self.cut_short(cx, idx, End::TornDown);
            }
        }
    }

    /// Handles TASK REASSIGN. The response must be sent before any data or status of the reassigned
    /// command.
    pub(super) fn on_task_reassign(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, request: &TmfRequest) {
        match self.claim(cx, idx, request) {
            Ok(reassign) => {
                self.respond_function(idx, FunctionResponse::Complete);
                self.actions.push_back(Action::Reassign(reassign));
            }
            Err(status) => self.respond_function(idx, status),
        }
    }

    fn claim(
        &mut self,
        cx: &mut Cx<'_>,
        function: TaskIdx,
        request: &TmfRequest,
    ) -> Result<ReassignRequest, FunctionResponse> {
        if self.recovery_level() < 2 {
            return Err(FunctionResponse::ReassignmentNotSupported);
        }
        let window = Arc::clone(self.window());
        let tag = window.tag(request.referenced);
        let tag = tag.ok_or(FunctionResponse::NoSuchTask)?;
        if !tag.is_free {
            return Err(FunctionResponse::StillAllegiant);
        }
        // Another function might be using the tag here, even if this is not allowed.
        let found = self.tasks.find(request.referenced);
        if found.is_some_and(|found| found != function) {
            return Err(FunctionResponse::Rejected);
        }
        let key = (request.referenced, tag.immediate);
        let wait = self.timers.pace.start_wait(cx.now);
        let state = TaskState::Expected;
        let idx = self.tasks.allocate_context(cx.spare, key, state, wait);
        let idx = idx.ok_or(FunctionResponse::Rejected)?;
        let to = self.tasks.task_ref(idx);
        // Another connection may have claimed it since we checked the tag.
        if !window.claim_tag(request.referenced, tag.task, to) {
            let context = self.tasks.release_context(idx, &window);
            cx.spare.0.return_context(context);
            return Err(FunctionResponse::StillAllegiant);
        }
        self.tasks.expect_task(idx, tag.immediate);
        Ok(ReassignRequest {
            task: tag.task,
            to,
            exp_data_sn: request.exp_data_sn,
        })
    }

    /// Responds to a claim for a task that has completed, so there is nothing to reassign.
    pub(super) fn drop_claim(&mut self, idx: TaskIdx) {
        let name = self.tasks.task_ref(idx);
        let mut claims = self.allegiance.claims.iter();
        if let Some(at) = claims.position(|claim| claim.task == name) {
            let claim = self.allegiance.claims.swap_remove(at);
            self.deliver(claim.to, None);
        }
    }

    pub(super) fn deliver(&mut self, to: TaskRef, moved: Option<Box<ReassignedTask>>) {
        self.allegiance.reassigned.push_back((to, moved));
        self.actions.push_back(Action::DeliverTask);
    }

    /// Hands over a command to the connection that has claimed it.
    pub(super) fn reassign(&mut self, cx: &mut Cx<'_>, claim: ReassignRequest) {
        let idx = claim.task.index;
        let task = &mut self.tasks[idx];
        let waited = task.waited_by(cx.now, &self.timers.pace);
        task.waited = 0;
        let mut exec = std::mem::take(&mut task.exec);
        let incoming = std::mem::take(&mut task.incoming);
        let exp = claim.exp_data_sn;
        let mut r2ts = std::mem::take(&mut task.r2ts);
        let start = std::mem::take(&mut task.data_start);
        // ExpDataSN in the TASK REASSIGN (RFC 7143 11.5.6) indicates which Data-In PDUs or R2Ts the
        // initiator has received. We use this to find where the other connection should start.
        let point = if let Some(mut response) = task.response.take() {
            let len = response.data_in.len().min(exec.expected.data_in);
            let end = response.data_in.from() + len;
            let base = response.data_in.from();
            if let DataIn::Buffer { .. } = response.data_in {
                response.data_in = DataIn::Inline(bytes_of(exec.buffer.as_ref(), len));
            }
            ResumePoint::Respond {
                response,
                base,
                start: acknowledged(&self.mover, start, end, exp),
            }
        } else if task.state == TaskState::Send {
            let Piece { from, len, .. } = task.piece;
            self.mover.cancel_transfers(idx);
            ResumePoint::Send {
                from,
                data: bytes_of(exec.buffer.as_ref(), len),
                start: acknowledged(&self.mover, start, from + len, exp),
            }
        } else {
            let progress = if incoming.solicited {
                self.mover.progress(idx)
            } else {
                let got = incoming.got;
                Progress { got, r2ts }
            };
            self.mover.cancel_transfers(idx);
            r2ts = if exp <= progress.r2ts {
                exp
            } else {
                progress.r2ts
            };
            let (from, end) = (incoming.from, incoming.wanted);
            let end = end.expect("the command waits for data");
            let got = progress.got.clamp(from, end) - from;
            let mut received = bytes_of(exec.buffer.as_ref(), got);
            received.extend(incoming.staged);
            ResumePoint::Receive {
                from,
                len: end - from,
                received,
            }
        };
        if let Some(buffer) = exec.buffer.take() {
            cx.pool.release(buffer);
        }
        // New mail will be sent to the new connection. For mail that is already in flight, we keep
        // the name in `moved`.
        exec.rename(claim.to);
        exec.timer.stop_counting();
        let lun = task.lun;
        let (counted, lingers) = self.tasks.remove_slot(idx);
        let moved = ReassignedTask {
            exec,
            lun,
            counted,
            lingers,
            waited,
            r2ts,
            point,
        };
        let session = self.session.as_ref().expect("full-feature phase");
        let context = self.tasks.release_context(idx, &session.window);
        cx.spare.0.return_context(context);
        self.allegiance.moved.push((claim.task, claim.to));
        self.deliver(claim.to, Some(Box::new(moved)));
    }

    /// Handles a command that was handed over by another connection, or that has completed there.
    pub(super) fn on_reassigned(
        &mut self,
        cx: &mut Cx<'_>,
        to: TaskRef,
        moved: Option<Box<ReassignedTask>>,
    ) {
        let idx = to.index;
        assert_eq!(
            self.tasks.task_ref(idx),
            to,
            "a context waits until its task comes"
        );
        let state = self.tasks[idx].state;
        assert_eq!(state, TaskState::Expected, "a task comes once");
        self.tasks.on_expected(idx);
        match moved {
            Some(moved) => self.resume_reassigned(cx, idx, *moved),
            None => self.finish(cx, idx, End::Aborted),
        }
    }

    fn resume_reassigned(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, moved: ReassignedTask) {
        let task = &mut self.tasks[idx];
        // Functions may have used this context's name while the command was being handed over. We
        // must keep their list of watchers, and apply an abort to the new command.
        let before = std::mem::replace(&mut task.exec, moved.exec);
        task.exec.watchers.extend(before.watchers);
        let addressed = self.session.as_ref().and_then(|session| {
            let worker = self.config.worker;
            let luns = &session.luns;
            self.stats.accounts.addressed(luns, moved.lun, &[], worker)
        });
        let account = addressed.map(|addressed| addressed.account);
        task.exec.timer.join(account);
        task.lun = moved.lun;
        task.waited = moved.waited;
        task.r2ts = moved.r2ts;
        self.tasks.add_slot(idx, moved.counted, moved.lingers);
        if before.aborted {
            return self.end_aborted(cx, idx);
        }
        let task = &mut self.tasks[idx];
        match moved.point {
            ResumePoint::Respond {
                response,
                base,
                start,
            } => {
                task.data_start = start;
                task.piece.from = base;
                self.respond(cx, idx, response);
            }
            ResumePoint::Receive {
                from,
                len,
                received,
            } => {
                task.incoming = Incoming {
                    got: from + received.len() as u32,
                    staged: received,
                    ..Incoming::default()
                };
                self.run(cx, idx, Step::ReceiveData { from, len });
            }
            ResumePoint::Send { from, data, start } => {
                let len = data.len() as u32;
                task.data_start = start;
                task.incoming.staged = data;
                task.incoming.is_moved = true;
                self.run(cx, idx, Step::SendData { from, len });
            }
        }
    }
}

/// Returns the offset of the first byte that the initiator hasn't received, up to `end`, given that
/// it has acknowledged all Data-In PDUs before `exp`. Zero means that nothing was acknowledged.
/// Invalid values are ignored.
fn acknowledged(mover: &impl Datamover, start: Start, end: u32, exp: u32) -> Start {
    let found = mover.start_of(start, end, exp).filter(|_| exp > 0);
    found.unwrap_or(start)
}

/// Returns the first `len` bytes of a command's buffer.
fn bytes_of(buffer: Option<&Buffer>, len: u32) -> Vec<u8> {
    let slices = buffer.into_iter().flat_map(|buffer| buffer.slices(0..len));
    slices.flat_map(|slice| slice.to_vec()).collect()
}
