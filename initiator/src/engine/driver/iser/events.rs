//! Connection events and completions.

use std::time::Instant;

use riser_scsi::iser::Message;
use riser_transport::verbs::{CmEventKind, Completion};

use super::IserMover;
use crate::engine::driver::context::{Context, MoverError, log_in};
use crate::engine::env::Env;
use crate::engine::rdma::{Completed, ConnEvent};
use crate::iscsi::session::IscsiSession;
use crate::session::{ConnectError, IscsiFault, SrpLoginError};

impl IserMover {
    pub(in crate::engine::driver) fn handle_cm_event<E: Env>(
        &mut self,
        event: CmEventKind,
        machine: &mut IscsiSession,
        cx: &mut Context<'_, E>,
    ) {
        let (now, config) = (cx.now, self.config);
        let login = || config.offer().bytes().to_vec();
        let (device, resources) = (cx.device(), &self.resources);
        let event = self
            .slot
            .handle_cm_event(device, resources, event, login, now);
        if self.slot.is_empty() {
            self.receiving = None;
        }
        match event {
            None => {}
            Some(ConnEvent::Established(param)) => {
                machine.set_reads(cx.device().fetches(&param));
                log_in(machine, cx.env, now);
            }
            Some(ConnEvent::Rejected { reason, .. }) => {
                let error = ConnectError::Login(SrpLoginError::Refused(reason));
                machine.handle_connect_failed(error, now);
            }
            Some(ConnEvent::Failed(error)) => machine.handle_connect_failed(error, now),
            Some(ConnEvent::Lost) => machine.handle_broken(now),
            Some(ConnEvent::Closed) => machine.handle_disconnected(now),
        }
    }

    /// Closes the connection immediately.
    pub(in crate::engine::driver) fn close_now<E: Env>(
        &mut self,
        machine: &mut IscsiSession,
        cx: &mut Context<'_, E>,
    ) {
        let now = cx.now;
        self.receiving = None;
        self.slot.release(cx.device(), true, now);
        machine.handle_disconnected(now);
    }

    pub(in crate::engine::driver) fn handle_completion<E: Env>(
        &mut self,
        completion: &Completion,
        machine: &mut IscsiSession,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let Some(conn) = self.slot.conn() else {
            return Ok(());
        };
        let now = cx.now;
        match conn.rdma.handle_completion(cx.device(), completion, now) {
            Completed::Nothing => Ok(()),
            Completed::Failed => Err(MoverError::Broken),
            Completed::Message(slot) => self.receive(slot, completion.byte_len, machine, cx.now),
            Completed::Retired(request) => {
                machine.handle_retired(request, cx.now);
                Ok(())
            }
            Completed::Sent(slot) => {
                let is_fed = conn.on_control_sent(cx.device(), slot);
                is_fed.then_some(()).ok_or(MoverError::Broken)
            }
        }
    }

    fn receive(
        &mut self,
        slot: u16,
        len: u32,
        machine: &mut IscsiSession,
        now: Instant,
    ) -> Result<(), MoverError> {
        let Some(conn) = self.slot.conn() else {
            return Ok(());
        };
        self.receiving = Some(slot);
        conn.received(slot, len, &mut self.message);
        match Message::parse(&self.message) {
            Ok(Message::Control { frame, .. }) => {
                machine.handle_pdu(&frame, now);
                Ok(())
            }
            Ok(Message::Hello(_) | Message::HelloReply(_)) => {
                Err(MoverError::Fault(IscsiFault::Unexpected("Hello")))
            }
            Err(error) => Err(MoverError::Fault(IscsiFault::Iser(error))),
        }
    }
}
