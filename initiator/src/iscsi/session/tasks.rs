//! Commands: numbering, encoding and completion.

use std::time::Instant;

use riser_scsi::iscsi::pdu::{CdbBytes, ScsiCommand, TaskAttr as IscsiAttr};
use riser_scsi::iscsi::{Itt, Ttt};
use riser_scsi::srp::TaskAttr;

use super::types::{ConnState, Task};
use super::{CommandPdu, ControlKind, DataOrder, IscsiSession, MAX_SILENCE, Output};
use crate::request::table::AttemptOutcome;
use crate::request::{DataLen, RequestId};

impl IscsiSession {
    /// Starts requests while the target's command window allows it.
    pub(super) fn pump(&mut self, now: Instant) {
        if self.conn != ConnState::LoggedIn || !self.core.functions.may_start() {
            return;
        }
        while !self.max_cmd_sn.is_before(self.cmd_sn) {
            let (Some(index), Some(&slot)) = (self.core.requests.next(), self.free.last()) else {
                return;
            };
            self.free.pop();
            self.start(index, slot, now);
        }
    }

    fn start(&mut self, index: u32, slot: u16, now: Instant) {
        let len = self.core.requests.at(index).spec.len;
        let place = &mut self.slots[usize::from(slot)];
        // Uses half of the numbers, so that no tag equals the reserved value.
        place.generation = (place.generation + 1) & 0x7fff;
        let itt = Itt(u32::from(place.generation) << 16 | u32::from(slot));
        place.task = Some(Task {
            request: index,
            len,
            cmd_sn: self.cmd_sn,
            received: 0,
            data_sn: 0,
            solicited: 0,
            unsolicited: (0, 0),
            open_r2t: 0,
        });
        if let DataLen::Out(len) = len {
            self.outstanding_writes += 1;
            // Decide this only once, because the number of outstanding writes may change before the
            // command is encoded.
            let unsolicited = match self.writes.carries_data(self.outstanding_writes) {
                true => self.plan_unsolicited(len),
                false => (0, 0),
            };
            let task = self.slots[usize::from(slot)].task.as_mut();
            let task = task.expect("just made");
            task.solicited = unsolicited.0 + unsolicited.1;
            task.unsolicited = unsolicited;
        }
        self.cmd_sn = self.cmd_sn.next();
        let until = self.core.requests.start(index, 0, itt, now);
        self.core.arm(until);
        self.core.outputs.push_back(Output::Start(RequestId(index)));
    }

    /// Returns the lengths of a write's immediate data and of the unsolicited data after it, in
    /// bytes.
    fn plan_unsolicited(&self, len: u32) -> (u32, u32) {
        let Some((session, connection)) = &self.params else {
            return (0, 0);
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
        (immediate, after)
    }

    /// Encodes the command of a started request. Returns `None` if its attempt was aborted in the
    /// meantime, which only happens while the connection is being closed.
    #[must_use]
    pub fn emit_command(&self, request: RequestId) -> Option<CommandPdu> {
        let started = self.core.requests.find(request.0)?;
        let (_, itt) = started.place()?;
        let spec = &started.spec;
        let task = self.task(itt)?;
        let (expected_length, immediate, after) = match spec.len {
            DataLen::None => (0, 0, 0),
            DataLen::In(len) => (len, 0, 0),
            DataLen::Out(len) => (len, task.unsolicited.0, task.unsolicited.1),
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
            exp_stat_sn: self.exp_stat_sn,
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

    /// Returns an outstanding task.
    pub(super) fn task(&self, itt: Itt) -> Option<&Task> {
        let slot = self.slots.get((itt.0 & 0xffff) as usize)?;
        let task = slot.task.as_ref()?;
        (u32::from(slot.generation) == itt.0 >> 16).then_some(task)
    }

    pub(super) fn task_mut(&mut self, itt: Itt) -> Option<&mut Task> {
        let slot = self.slots.get_mut((itt.0 & 0xffff) as usize)?;
        let task = slot.task.as_mut()?;
        (u32::from(slot.generation) == itt.0 >> 16).then_some(task)
    }

    /// Returns whether a tag may belong to an aborted task.
    pub(super) fn is_stale(&self, itt: Itt) -> bool {
        itt.0 >> 31 == 0 && ((itt.0 & 0xffff) as usize) < self.slots.len()
    }

    /// Called when the data of an order was sent.
    pub fn handle_data_sent(&mut self, order: &DataOrder) {
        if order.ttt != Ttt::NONE
            && let Some(task) = self.task_mut(order.itt)
        {
            task.open_r2t = task.open_r2t.saturating_sub(1);
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
            // Data received after the ping was sent also counts, because the response may be behind
            // it.
            let limit = self.core.last_heard + self.core.ping * MAX_SILENCE;
            ping.limit = ping.limit.max(limit);
            ping.until = (now + self.core.ping).min(ping.limit);
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
            let place = self.core.requests.retiring_place(request.0);
            self.free
                .extend(place.map(|(_, itt)| (itt.0 & 0xffff) as u16));
            self.core.finish_attempt(request.0, end, now);
            self.pump(now);
        }
    }

    /// Ends an attempt: removes its task and retires its memory. Its slot is freed after that.
    pub(super) fn end_attempt(&mut self, index: u32, itt: Itt, end: AttemptOutcome, now: Instant) {
        let task = self.slots[(itt.0 & 0xffff) as usize].task.take();
        if task.is_some_and(|task| matches!(task.len, DataLen::Out(_))) {
            self.outstanding_writes -= 1;
        }
        let until = self.core.requests.end_attempt(index, 0, end, now);
        self.core.arm(until);
        self.core
            .outputs
            .push_back(Output::Retire(RequestId(index)));
    }
}
