//! Received PDUs and their data.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, AsyncMessage, DataIn, FromTarget, NopIn, Opcode, R2t, Reject, RejectReason,
    ScsiResponse, TmfStatus,
};
use riser_scsi::iscsi::{BHS_LEN, Itt, Numbers, Ttt};
use riser_scsi::sense::Sense;
use riser_scsi::step::Residual;

use super::types::ConnState;
use super::{DataOrder, IscsiSession, LOGOUT_TAG, Output, PING_TAG, Placement};
use crate::request::table::AttemptOutcome;
use crate::request::{CommandResponse, GOOD, RequestError, RequestId};
use crate::session::{Down, FunctionOutcome, IscsiFault, TaskManager};

/// Maximum length of ping data to return, in bytes.
const MAX_ECHO: usize = 8192;

/// Status of a command without its sense data.
struct Status {
    code: u8,
    residual: Residual,
}

impl IscsiSession {
    /// Called when bytes were received, possibly a part of a PDU, which proves that the target is
    /// alive. If they are a part of a Data-In, `arriving` is its tag, and the timeout of this
    /// command restarts.
    ///
    /// Timeouts of task-management functions do not restart: a target that hangs on one command may
    /// continue to complete other commands.
    pub fn handle_bytes(&mut self, arriving: Option<Itt>, now: Instant) {
        if !self.conn.is_open() {
            return;
        }
        self.core.last_received = now;
        if let Some(ping) = &mut self.pinged {
            ping.on_bytes_received(self.core.ping, now);
        }
        if let Some(task) = arriving.and_then(|itt| self.tasks.find(itt)) {
            let request = task.request;
            self.core.requests.on_progress(request, now);
        }
    }

    /// Handles a PDU other than a Data-In with data.
    pub fn handle_pdu(&mut self, frame: &Frame<'_>, now: Instant) {
        if !self.conn.is_open() {
            return;
        }
        self.core.last_received = now;
        if let Err(fault) = self.process_pdu(frame, now) {
            self.handle_fault(fault);
        }
        self.pump(now);
    }

    fn process_pdu(&mut self, frame: &Frame<'_>, now: Instant) -> Result<(), IscsiFault> {
        if !frame.is_intact {
            return Err(IscsiFault::DataDigest);
        }
        let (pdu, numbers) = FromTarget::parse(frame)?;
        if let FromTarget::LoginResponse(response) = &pdu {
            // A login response starts the numbering, so there are no previous numbers to compare
            // with.
            if !matches!(self.conn, ConnState::InLogin(_)) {
                return Err(IscsiFault::Unexpected("Login Response"));
            }
            self.on_login_response(response, frame.data, numbers, now);
            return Ok(());
        }
        if matches!(self.conn, ConnState::InLogin(_)) {
            return Err(IscsiFault::Unexpected("expected a Login Response"));
        }
        self.numbers.update(&pdu, numbers);
        match pdu {
            FromTarget::NopIn(nop) => self.on_nop(&nop, frame.data),
            FromTarget::ScsiResponse(response) => self.on_response(&response, frame.data, now)?,
            FromTarget::TmfResponse(response) => {
                if self.is_tmf_pending(response.itt) {
                    let end = match response.status {
                        TmfStatus::Complete => FunctionOutcome::Complete,
                        TmfStatus::TaskDoesNotExist => FunctionOutcome::NoTask,
                        _ => FunctionOutcome::Failed,
                    };
                    self.on_function_completed(0, end, now);
                }
            }
            FromTarget::TextResponse(response) => self.on_text(&response, frame.data, now)?,
            FromTarget::DataIn(data) => self.on_data_in(&data, 0, now)?,
            FromTarget::LogoutResponse(response) if response.itt == LOGOUT_TAG => {
                self.on_logout_response(&response);
            }
            FromTarget::R2t(r2t) => self.on_r2t(&r2t, now)?,
            FromTarget::AsyncMessage(message) => self.on_async(&message, frame.data, now)?,
            FromTarget::Reject(reject) => self.on_reject(reject, frame.data, now)?,
            FromTarget::LoginResponse(_) | FromTarget::LogoutResponse(_) => {
                return Err(IscsiFault::Unexpected("response to an unknown request"));
            }
        }
        Ok(())
    }

    /// Returns the placement for the data of a Data-In whose header was received.
    ///
    /// # Errors
    /// [`IscsiFault`]: the connection must be closed; [`Self::handle_fault`] does this.
    pub fn place_data(&self, bhs: &[u8; BHS_LEN], len: u32) -> Result<Placement, IscsiFault> {
        if !matches!(self.conn, ConnState::LoggedIn | ConnState::InLogout(_)) {
            return Err(IscsiFault::Unexpected("Data-In"));
        }
        let data = parse_data_in(bhs)?.0;
        let Some(task) = self.tasks.find(data.itt) else {
            return if self.tasks.is_stale(data.itt) {
                Ok(Placement::Discard)
            } else {
                Err(IscsiFault::UnknownTask(data.itt))
            };
        };
        task.check_data_in(&data, len)?;
        Ok(Placement::Into(RequestId(task.request), data.offset))
    }

    /// Called when the data of a Data-In was placed according to [`Self::place_data`].
    pub fn handle_data_in(&mut self, bhs: &[u8; BHS_LEN], len: u32, is_intact: bool, now: Instant) {
        if !matches!(self.conn, ConnState::LoggedIn | ConnState::InLogout(_)) {
            return;
        }
        self.core.last_received = now;
        let result = match parse_data_in(bhs) {
            Ok(_) if !is_intact => Err(IscsiFault::DataDigest),
            Ok((data, numbers)) => {
                self.numbers.update(&FromTarget::DataIn(data), numbers);
                self.on_data_in(&data, len, now)
            }
            Err(fault) => Err(fault),
        };
        if let Err(fault) = result {
            self.handle_fault(fault);
        }
        self.pump(now);
    }

    fn on_data_in(&mut self, data: &DataIn, len: u32, now: Instant) -> Result<(), IscsiFault> {
        let Some(task) = self.tasks.find_mut(data.itt) else {
            return self.on_stale(data.itt);
        };
        task.on_data_in(len);
        let request = task.request;
        match data.status {
            None => {
                self.core.requests.on_progress(request, now);
                Ok(())
            }
            Some(with) => {
                let status = Status {
                    code: with.status,
                    residual: with.residual,
                };
                self.complete_task(data.itt, &status, &[], now)
            }
        }
    }

    /// Handles a PDU for a task that is not outstanding.
    fn on_stale(&mut self, itt: Itt) -> Result<(), IscsiFault> {
        if !self.tasks.is_stale(itt) {
            return Err(IscsiFault::UnknownTask(itt));
        }
        self.core.on_stale();
        Ok(())
    }

    fn on_response(
        &mut self,
        response: &ScsiResponse,
        data: &[u8],
        now: Instant,
    ) -> Result<(), IscsiFault> {
        let Some(task) = self.tasks.find(response.itt) else {
            return self.on_stale(response.itt);
        };
        let request = task.request;
        if response.response != 0 {
            let error = RequestError::TargetFailure(response.response);
            self.retire_attempt(request, response.itt, AttemptOutcome::Failed(error), now);
            return Ok(());
        }
        let sense = ScsiResponse::sense_of(data)?;
        let status = Status {
            code: response.status,
            residual: response.residual,
        };
        self.complete_task(response.itt, &status, sense, now)
    }

    /// Called when a command has completed.
    fn complete_task(
        &mut self,
        itt: Itt,
        status: &Status,
        sense: &[u8],
        now: Instant,
    ) -> Result<(), IscsiFault> {
        let task = self.tasks.find(itt).expect("checked by the caller");
        let request = task.request;
        let (transferred, overflow) = task.transferred(status.residual, self.is_rdma())?;
        let response = CommandResponse {
            status: status.code,
            sense: (!sense.is_empty() && status.code != GOOD).then(|| Box::from(sense)),
            transferred,
            overflow,
        };
        self.on_attention(request, &response);
        self.retire_attempt(request, itt, AttemptOutcome::Responded(response), now);
        self.pump_functions(0, now);
        Ok(())
    }

    fn is_rdma(&self) -> bool {
        self.params
            .as_ref()
            .is_some_and(|(session, _)| session.rdma_extensions)
    }

    fn on_r2t(&mut self, r2t: &R2t, now: Instant) -> Result<(), IscsiFault> {
        let Some((session, _)) = &self.params else {
            return Err(IscsiFault::Unexpected("R2T"));
        };
        let Some(task) = self.tasks.find_mut(r2t.itt) else {
            return self.on_stale(r2t.itt);
        };
        task.handle_r2t(r2t, session)?;
        let request = RequestId(task.request);
        let order = DataOrder {
            request,
            itt: r2t.itt,
            ttt: r2t.ttt,
            lun: self.core.requests.at(request.0).spec.lun,
            offset: r2t.offset,
            len: r2t.len,
        };
        self.core.requests.on_progress(request.0, now);
        self.core.outputs.push_back(Output::SendData(order));
        Ok(())
    }

    fn on_nop(&mut self, nop: &NopIn, data: &[u8]) {
        if nop.itt == PING_TAG {
            self.pinged = None;
        }
        if nop.ttt != Ttt::NONE && self.conn == ConnState::LoggedIn {
            let limit = match &self.params {
                Some((_, connection)) => connection.max_send_segment as usize,
                None => 0,
            };
            let echo = &data[..data.len().min(limit).min(MAX_ECHO)];
            self.send_nop(Itt::NONE, nop.ttt, nop.lun, echo.to_vec());
        }
    }

    fn on_async(
        &mut self,
        message: &AsyncMessage,
        data: &[u8],
        now: Instant,
    ) -> Result<(), IscsiFault> {
        match message.event {
            AsyncEvent::Scsi => {
                let sense: Box<[u8]> = Box::from(ScsiResponse::sense_of(data)?);
                let lun = message.lun;
                self.hold_if(Sense::parse(sense.as_ref()));
                self.core.report_unit_event(lun, sense);
            }
            // A target that requests a renegotiation gets a new login instead.
            AsyncEvent::LogoutRequested | AsyncEvent::Negotiate => {
                self.log_out(Down::LogoutRequested, false, now);
            }
            // Only a new session can determine reliably which tasks had completed.
            AsyncEvent::ConnectionDropped | AsyncEvent::SessionDropped => {
                let [_, time2wait, _] = message.parameters;
                let time2wait = Duration::from_secs(time2wait.into());
                self.core.life.set_time2wait(time2wait);
                self.tear_down(Down::LogoutRequested, false);
            }
            AsyncEvent::TasksTerminated => self.tear_down(Down::LogoutRequested, false),
        }
        Ok(())
    }

    fn on_reject(&mut self, reject: Reject, data: &[u8], now: Instant) -> Result<(), IscsiFault> {
        let reason = reject.reason;
        let Some(bhs) = data.first_chunk::<BHS_LEN>() else {
            return Err(IscsiFault::Rejected(reason));
        };
        let itt = Itt(u32::from_be_bytes([bhs[16], bhs[17], bhs[18], bhs[19]]));
        match Opcode::of(bhs) {
            Ok(Opcode::NopOut) if itt == PING_TAG || itt == Itt::NONE => {
                // The target is alive, even if it rejects pings.
                self.pinged = None;
                Ok(())
            }
            // The target discarded the PDU, and a new session retries the command.
            _ if matches!(
                reason,
                RejectReason::DataDigestError | RejectReason::WaitingForLogout
            ) =>
            {
                Err(IscsiFault::Rejected(reason))
            }
            Ok(Opcode::ScsiCommand) => {
                if let Some(task) = self.tasks.find(itt) {
                    let request = task.request;
                    let error = RequestError::Rejected(reason);
                    self.retire_attempt(request, itt, AttemptOutcome::Refused(error), now);
                }
                Ok(())
            }
            Ok(Opcode::TmfRequest) if self.is_tmf_pending(itt) => {
                self.on_function_completed(0, FunctionOutcome::Failed, now);
                Ok(())
            }
            _ => Err(IscsiFault::Rejected(reason)),
        }
    }
}

fn parse_data_in(bhs: &[u8; BHS_LEN]) -> Result<(DataIn, Numbers), IscsiFault> {
    let frame = Frame {
        bhs,
        ahs: &[],
        data: &[],
        is_intact: true,
    };
    match FromTarget::parse(&frame)? {
        (FromTarget::DataIn(data), numbers) => Ok((data, numbers)),
        _ => Err(IscsiFault::Unexpected("expected Data-In")),
    }
}
