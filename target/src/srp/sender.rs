//! The send side of a channel: chains of RDMA requests and responses are planned, posted when there
//! is enough credit, and completed.

use riser_scsi::sense::SENSE_MAX;
use riser_scsi::srp::{RSP_LEN, Residual, Rsp, RspCode};
use riser_scsi::step::{self, Status};
use riser_state::become_state;

use super::action::{Action, Counters, SendIu};
use super::config::ChannelConfig;
use super::credit::{ReqLim, SendQueue};
use super::ioctx::{ChainKind, IoctxState};
use super::login::{MAX_TI_IU, OWN_MESSAGES};
use super::requests::RequestTable;
use super::rings::SendRing;
use crate::fabric::{PortionLimits, TaskIdx};

/// Maximum size of a response in bytes, with response data and sense data.
const MAX_RSP: usize = RSP_LEN + 4 + SENSE_MAX;

// This must fit into the context's slot in the send ring.
const _: () = assert!(MAX_RSP <= MAX_TI_IU as usize);

/// Work requests that are not part of the credit for commands: messages initiated by the target,
/// the probe, and the drain marker.
const RESERVED: u32 = OWN_MESSAGES + 2;

/// Credits, the send ring, and the chains in flight.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) queue: SendQueue,
    pub(super) req_lim: ReqLim,
    pub(super) ring: SendRing,
    /// Limits for a single chain.
    portions: PortionLimits,
    /// Chains in flight that commands are waiting for, not including chains of a response and its
    /// data.
    transfers: u32,
}

impl Sender {
    /// Creates the state of a new channel.
    ///
    /// # Panics
    /// If the send ring is too small.
    pub(super) fn new(config: &ChannelConfig) -> Self {
        let params = &config.params;
        let credits = params.send_queue - RESERVED;
        assert!(credits >= 2, "a send queue for a transfer and a response");
        Self {
            queue: SendQueue::new(credits, params.req_lim as usize),
            req_lim: ReqLim::new(params.req_lim),
            ring: SendRing::new(params, config.send_ring.clone()),
            // Use half of the queue, so that a long and a short transfer can run at the same time,
            // and reserve an entry for the response.
            portions: PortionLimits {
                wrs: (credits / 2).max(1).min(credits - 1),
                sges: config.max_sge,
            },
            transfers: 0,
        }
    }

    /// Returns the send ring.
    pub(crate) fn ring(&self) -> &SendRing {
        &self.ring
    }

    /// Returns whether commands wait for chains in flight or for credit.
    pub(super) fn delays_commands(&self) -> bool {
        self.transfers > 0 || self.queue.front().is_some()
    }

    /// Called when a chain has completed that a command was waiting for.
    pub(super) fn on_transferred(&mut self) {
        self.transfers -= 1;
    }

    /// Posts the next chain of a context, or waits for credit.
    pub(super) fn try_post(
        &mut self,
        requests: &mut RequestTable,
        (idx, then): (TaskIdx, ChainKind),
        counters: &mut Counters,
    ) -> Option<Action> {
        let wrs = self.plan_chain(requests, idx, then);
        if self.queue.reserve(wrs) {
            return Some(self.post(requests, (idx, then), wrs, counters));
        }
        counters.credit_waits += 1;
        become_state(&mut requests[idx].state, IoctxState::AwaitCredit(then));
        self.queue.wait(idx);
        None
    }

    /// Posts the next waiting chain if there is enough credit.
    pub(super) fn retry_post(
        &mut self,
        requests: &mut RequestTable,
        counters: &mut Counters,
    ) -> Option<Action> {
        let idx = self.queue.front()?;
        let IoctxState::AwaitCredit(then) = requests.state(idx) else {
            unreachable!("{idx:?} waits for credit");
        };
        let wrs = self.plan_chain(requests, idx, then);
        let is_granted = self.queue.take_front(wrs);
        is_granted.then(|| self.post(requests, (idx, then), wrs, counters))
    }

    /// Plans the next chain of a context. Returns the number of work requests.
    fn plan_chain(&self, requests: &mut RequestTable, idx: TaskIdx, then: ChainKind) -> u32 {
        let io = &mut requests[idx];
        let wrs = io.plan_portion(self.portions);
        wrs + u32::from(then == ChainKind::Respond && io.is_last_portion())
    }

    fn post(
        &mut self,
        requests: &mut RequestTable,
        (idx, then): (TaskIdx, ChainKind),
        wrs: u32,
        counters: &mut Counters,
    ) -> Action {
        let io = &mut requests[idx];
        io.wrs = wrs;
        let last = io.is_last_portion();
        let responses = then == ChainKind::Respond && last;
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
        counters.responded += u64::from(responses);
        let send = responses.then(|| self.emit_rsp(requests, idx));
        Action::Post { task: idx, send }
    }

    /// Writes the response to the send ring. After this, the request is complete.
    fn emit_rsp(&mut self, requests: &mut RequestTable, idx: TaskIdx) -> SendIu {
        let req_lim_delta = self.req_lim.on_response();
        // The initiator may now reuse the tag, possibly before we receive the completion of this
        // response.
        let tag = requests[idx].tag;
        requests.remove_tag(tag, idx);
        let io = &mut requests[idx];
        io.token.take().expect("a single response").responded();
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
        self.ring.write(idx, &bytes[..len]);
        io.response = None;
        SendIu {
            len: len as u32,
            solicited,
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
