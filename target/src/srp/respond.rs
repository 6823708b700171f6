//! Chains of RDMA requests and responses: these are planned, posted when there is enough credit,
//! and completed.

use riser_scsi::sense::SENSE_MAX;
use riser_scsi::srp::{RSP_LEN, Residual, Rsp, RspCode};
use riser_scsi::step::{self, BackendError, Status, StepResult, TransferError};
use riser_state::become_state;

use super::action::{Action, SendIu};
use super::channel::{Channel, Cx};
use super::ioctx::{ChainKind, IoctxState};
use super::login::MAX_TI_IU;
use crate::fabric::{CommandFlow as _, End, TaskIdx, Transfer};

/// Maximum size of a response in bytes, with response data and sense data.
const MAX_RSP: usize = RSP_LEN + 4 + SENSE_MAX;

// This must fit into the context's slot in the send ring.
const _: () = assert!(MAX_RSP <= MAX_TI_IU as usize);

impl Channel {
    /// Removes a command from its task set when its response is posted. If the response is still
    /// waiting, it must not be sent after the response to a function of the same nexus, which may
    /// be received on another channel.
    pub(super) fn leave_answering(&mut self, idx: TaskIdx) {
        let (nexus, name) = (self.config.nexus, self.task_ref(idx));
        let io = &mut self.ioctx[idx];
        if io.state != IoctxState::CmdRspSent {
            io.exec.note_left(nexus, name);
        }
        self.leave_task_set(idx);
    }

    /// Sends a response with response data, for a request that is not a task or did not become one.
    pub(super) fn answer_code(&mut self, _cx: &mut Cx<'_>, idx: TaskIdx, code: RspCode) {
        let io = &mut self.ioctx[idx];
        io.code = Some(code);
        self.try_post(idx, ChainKind::Respond);
    }

    /// Posts the next chain of a context, or waits for credit.
    pub(super) fn try_post(&mut self, idx: TaskIdx, then: ChainKind) {
        let wrs = self.plan_chain(idx, then);
        if self.send_queue.reserve(wrs) {
            self.post(idx, then, wrs);
        } else {
            self.counters.credit_waits += 1;
            let io = &mut self.ioctx[idx];
            become_state(&mut io.state, IoctxState::AwaitCredit(then));
            self.send_queue.wait(idx);
        }
    }

    /// Posts waiting chains while there is enough credit.
    pub(super) fn retry_posts(&mut self, _cx: &mut Cx<'_>) {
        while let Some(idx) = self.send_queue.front() {
            let IoctxState::AwaitCredit(then) = self.ioctx_state(idx) else {
                unreachable!("{idx:?} waits for credit");
            };
            let wrs = self.plan_chain(idx, then);
            if !self.send_queue.take_front(wrs) {
                break;
            }
            self.post(idx, then, wrs);
        }
    }

    /// Plans the next chain of a context. Returns the number of work requests.
    fn plan_chain(&mut self, idx: TaskIdx, then: ChainKind) -> u32 {
        let limits = self.portion_limits();
        let io = &mut self.ioctx[idx];
        let wrs = io.plan_portion(limits);
        wrs + u32::from(then == ChainKind::Respond && io.is_last_portion())
    }

    fn post(&mut self, idx: TaskIdx, then: ChainKind, wrs: u32) {
        let io = &mut self.ioctx[idx];
        io.wrs = wrs;
        let last = io.is_last_portion();
        let answers = then == ChainKind::Respond && last;
        let next = match then {
            ChainKind::FetchTable => IoctxState::FetchTable,
            ChainKind::NeedData => IoctxState::NeedData,
            ChainKind::SendData => IoctxState::SendData,
            ChainKind::Respond if !last => IoctxState::WriteData,
            ChainKind::Respond if io.mgmt.is_some() => IoctxState::MgmtRspSent,
            ChainKind::Respond => IoctxState::CmdRspSent,
        };
        become_state(&mut io.state, next);
        self.transfers += u32::from(then != ChainKind::Respond);
        let send = answers.then(|| self.emit_rsp(idx));
        self.actions.push_back(Action::Post { task: idx, send });
    }

    /// Writes the response to the send ring. After this, the request is complete.
    fn emit_rsp(&mut self, idx: TaskIdx) -> SendIu {
        let req_lim_delta = self.req_lim.on_answer();
        // The initiator may now reuse the tag, possibly before we receive the completion of this
        // response.
        self.forget_tag(self.ioctx[idx].tag, idx);
        self.counters.answered += 1;
        let offset = self.send_offset(idx);
        let io = &mut self.ioctx[idx];
        io.token.take().expect("answered once").answered();
        let (status, sense, data_out, data_in) = match &io.response {
            Some(r) => (
                r.status,
                &r.sense[..],
                residual(r.residual_out),
                residual(r.residual_in),
            ),
            None => (Status::Good, &[][..], Residual::None, Residual::None),
        };
        let good = status == Status::Good && io.code.is_none_or(|c| c == RspCode::Complete);
        let solicited = if good {
            io.notify_success
        } else {
            io.notify_failure
        };
        let rsp = Rsp {
            solicited,
            req_lim_delta,
            tag: io.tag,
            status: status as u8,
            data_out,
            data_in,
            response: io.code,
            sense: (!sense.is_empty()).then_some(sense),
        };
        let mut bytes = [0; MAX_RSP];
        let len = rsp.emit(&mut bytes);
        self.config.send_ring.write(offset, &bytes[..len]);
        io.response = None;
        SendIu {
            len: len as u32,
            solicited,
        }
    }

    /// Called when a chain of a command context has completed.
    pub(super) fn on_chain_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        // The queue is making progress, so restart the timer for the next chain. It is set by
        // `watch_chains`.
        self.data_deadline = None;
        let io = &mut self.ioctx[idx];
        let moved = io.transfer.as_ref().map_or(0, Transfer::portion_len);
        self.pace.on_moved(if ok { moved } else { 0 });
        if matches!(io.state, IoctxState::CmdRspSent | IoctxState::MgmtRspSent) {
            io.exec.arrive(cx.now, ok);
            return self.finish(cx, idx, End::Answered);
        }
        let is_awaited = matches!(
            io.state,
            IoctxState::FetchTable | IoctxState::NeedData | IoctxState::SendData
        );
        if is_awaited {
            self.transfers -= 1;
        }
        if self.ends_early(cx, idx) {
            return;
        }
        let io = &mut self.ioctx[idx];
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

fn residual(residual: step::Residual) -> Residual {
    match residual {
        step::Residual::None => Residual::None,
        step::Residual::Underflow(n) => Residual::Under(n),
        step::Residual::Overflow(n) => Residual::Over(n),
    }
}
