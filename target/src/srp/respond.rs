//! Chains of a command context: posting, and their completion.

use riser_scsi::srp::RspCode;
use riser_scsi::step::{BackendError, StepResult, TransferError};

use super::channel::{Channel, Cx};
use super::ioctx::{ChainKind, IoctxState};
use crate::fabric::{CommandFlow as _, End, TaskIdx, Transfer};

impl Channel {
    /// Removes a command from its task set when its response is posted. If the response is still
    /// waiting, it must not be sent after the response to a function of the same nexus, which may
    /// be received on another channel.
    pub(super) fn leave_on_response(&mut self, idx: TaskIdx) {
        let (nexus, name) = (self.config.nexus, self.requests.task_ref(idx));
        let io = &mut self.requests[idx];
        if io.state != IoctxState::CmdRspSent {
            io.exec.note_left(nexus, name);
        }
        self.leave_task_set(idx);
    }

    /// Sends a response with response data, for a request that is not a task or did not become one.
    pub(super) fn respond_code(&mut self, idx: TaskIdx, code: RspCode) {
        let io = &mut self.requests[idx];
        io.code = Some(code);
        self.try_post(idx, ChainKind::Respond);
    }

    /// Posts the next chain of a context, or waits for credit.
    pub(super) fn try_post(&mut self, idx: TaskIdx, then: ChainKind) {
        let (requests, counters) = (&mut self.requests, &mut self.stats.counters);
        if let Some(post) = self.sender.try_post(requests, (idx, then), counters) {
            self.actions.push_back(post);
        }
    }

    /// Called when a chain of a command context has completed.
    pub(super) fn on_chain_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let io = &mut self.requests[idx];
        let moved = io.transfer.as_ref().map_or(0, Transfer::portion_len);
        self.timers.on_chain_done(if ok { moved } else { 0 });
        if matches!(io.state, IoctxState::CmdRspSent | IoctxState::MgmtRspSent) {
            io.exec.arrive(cx.now, ok);
            return self.finish(cx, idx, End::Responded);
        }
        let is_awaited = matches!(
            io.state,
            IoctxState::FetchTable | IoctxState::NeedData | IoctxState::SendData
        );
        if is_awaited {
            self.sender.on_transferred();
        }
        if self.ends_early(cx, idx) {
            return;
        }
        let io = &mut self.requests[idx];
        let state = io.state;
        let transfer = io.transfer.as_mut().expect("a transfer was under way");
        transfer.portion_done();
        let more = !transfer.is_last();
        match state {
            IoctxState::WriteData => self.try_post(idx, ChainKind::Respond),
            IoctxState::FetchTable if more => self.try_post(idx, ChainKind::FetchTable),
            IoctxState::FetchTable => self.on_table_fetched(cx, idx),
            IoctxState::NeedData if more => self.try_post(idx, ChainKind::NeedData),
            IoctxState::SendData if more => self.try_post(idx, ChainKind::SendData),
            IoctxState::NeedData | IoctxState::SendData => {
                io.transfer = None;
                let result = if ok {
                    StepResult::Done
                } else {
                    StepResult::Failed(BackendError::Transfer(TransferError::Failed))
                };
                self.resume_task(cx, idx, result);
            }
            other => unreachable!("no chain is posted in {other:?}"),
        }
    }
}
