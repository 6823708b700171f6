//! Commands: numbering, encoding and completion.

use std::time::Instant;

use riser_scsi::iscsi::pdu::{CdbBytes, ScsiCommand, TaskAttr as IscsiAttr};
use riser_scsi::iscsi::{Itt, Ttt};
use riser_scsi::srp::TaskAttr;

use super::task_table::UnsolicitedData;
use super::types::ConnState;
use super::{CommandPdu, ControlKind, DataOrder, IscsiSession, Output};
use crate::request::table::AttemptOutcome;
use crate::request::{DataLen, RequestId};

impl IscsiSession {
    /// Starts requests while the target's command window allows it.
    pub(super) fn pump(&mut self, now: Instant) {
        if self.conn != ConnState::LoggedIn || !self.core.functions.may_start() {
            return;
        }
        while self.numbers.is_window_open() && !self.tasks.is_full() {
            let Some(index) = self.core.requests.next() else {
                return;
            };
            self.start_request(index, now);
        }
    }

    fn start_request(&mut self, index: u32, now: Instant) {
        let len = self.core.requests.at(index).spec.len;
        let unsolicited = match len {
            DataLen::Out(len) => self.plan_unsolicited(len),
            DataLen::None | DataLen::In(_) => UnsolicitedData::default(),
        };
        let cmd_sn = self.numbers.assign_cmd_sn();
        let itt = self.tasks.insert(index, len, cmd_sn, unsolicited);
        let until = self.core.requests.start_attempt(index, 0, itt, now);
        self.core.arm(until);
        self.core.outputs.push_back(Output::Start(RequestId(index)));
    }

    /// Returns the lengths of the unsolicited data of a write.
    fn plan_unsolicited(&self, len: u32) -> UnsolicitedData {
        let Some((session, connection)) = &self.params else {
            return UnsolicitedData::default();
        };
        let first = len.min(session.first_burst);
        let immediate = match session.immediate_data {
            true => first.min(connection.max_send_segment),
            false => 0,
        };
        let after = if session.initial_r2t {
            0
        } else {
            first - immediate
        };
        UnsolicitedData { immediate, after }
    }

    /// Encodes the command of a started request. Returns `None` if its attempt was aborted in the
    /// meantime, which only happens while the connection is being closed.
    #[must_use]
    pub fn emit_command(&self, request: RequestId) -> Option<CommandPdu> {
        let started = self.core.requests.find(request.0)?;
        let (_, itt) = started.place()?;
        let spec = &started.spec;
        let task = self.tasks.find(itt)?;
        let UnsolicitedData { immediate, after } = task.unsolicited;
        let expected_length = match spec.len {
            DataLen::None => 0,
            DataLen::In(len) | DataLen::Out(len) => len,
        };
        let mut cdb = spec.cdb.as_bytes().iter().copied().collect::<CdbBytes>();
        while cdb.len() < 16 {
            cdb.push(0);
        }
        let command = ScsiCommand {
            immediate: false,
            // F bit: no unsolicited Data-Out follows.
            is_final: after == 0,
            reads: matches!(spec.len, DataLen::In(_)),
            writes: matches!(spec.len, DataLen::Out(_)),
            attribute: match spec.attr {
                TaskAttr::Simple => IscsiAttr::Simple,
                TaskAttr::HeadOfQueue => IscsiAttr::HeadOfQueue,
                TaskAttr::Ordered => IscsiAttr::Ordered,
                TaskAttr::Aca => IscsiAttr::Aca,
            },
            lun: spec.lun,
            itt,
            expected_length,
            cmd_sn: task.cmd_sn,
            exp_stat_sn: self.numbers.exp_stat_sn(),
            cdb,
            bidi_read_length: None,
        };
        let unsolicited = (after > 0).then_some(DataOrder {
            request,
            itt,
            ttt: Ttt::NONE,
            lun: spec.lun,
            offset: immediate,
            len: after,
        });
        Some(CommandPdu {
            bhs: command.header(),
            ahs: command.ahs(),
            immediate,
            unsolicited,
        })
    }

    /// Called when the data of an order was sent.
    pub fn handle_data_sent(&mut self, order: &DataOrder) {
        if order.ttt != Ttt::NONE
            && let Some(task) = self.tasks.find_mut(order.itt)
        {
            task.on_solicited_data_sent();
        }
    }

    /// Called when sent data has arrived at the target's host. Restarts the timeouts of requests
    /// and functions that are still in transit: the requests selected by `is_under_way`, and the
    /// last PDUs of the kinds selected by `is_behind`. A PDU that has arrived gets no further time,
    /// because a host also acknowledges data for a hanging target.
    pub fn handle_progress(
        &mut self,
        is_under_way: impl Fn(RequestId) -> bool,
        is_behind: impl Fn(ControlKind) -> bool,
        now: Instant,
    ) {
        if let Some(ping) = &mut self.pinged
            && is_behind(ControlKind::Ping)
        {
            ping.on_bytes_acknowledged(self.core.last_received, self.core.ping, now);
        }
        if is_behind(ControlKind::Function) {
            self.core.functions.on_progress(0, now);
        }
        self.core.requests.on_progress_where(is_under_way, now);
    }

    /// Called when the memory of a request's last attempt is no longer in use.
    pub fn handle_retired(&mut self, request: RequestId, now: Instant) {
        if let Some(end) = self.core.requests.retiring(request.0) {
            // Free the slot only now: a started command must be sent immediately, so that its abort
            // follows it.
            if let Some((_, itt)) = self.core.requests.retiring_place(request.0) {
                self.tasks.free_slot(itt);
            }
            self.core.finish_attempt(request.0, end, now);
            self.pump(now);
        }
    }

    /// Retires an attempt: removes its task and retires its memory. Its slot is freed after that.
    pub(super) fn retire_attempt(
        &mut self,
        index: u32,
        itt: Itt,
        outcome: AttemptOutcome,
        now: Instant,
    ) {
        self.tasks.remove(itt);
        let until = self.core.requests.retire_attempt(index, 0, outcome, now);
        self.core.arm(until);
        self.core
            .outputs
            .push_back(Output::Retire(RequestId(index)));
    }
}
