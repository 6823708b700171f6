//! Full-feature phase: parses PDUs, and passes requests to the executor.

use std::sync::Arc;

use riser_scsi::iscsi::StatSn;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromInitiator, PduError, RejectReason, SnackKind};

use super::channel::Channel;
use super::context::Cx;
use super::datamover::Datamover;
use super::phase::Phase;
use crate::stats::SessionEvent;
use crate::warn_limited;

impl<D: Datamover> Channel<D> {
    /// Handles a complete PDU. Its data digest may be invalid.
    pub fn handle_frame(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>) {
        self.executor.timers.on_input(cx.now);
        // Use a reference, because moving a command is expensive.
        match &FromInitiator::parse(frame) {
            Ok(FromInitiator::LoginRequest(request)) if self.executor.phase == Phase::Login => {
                self.on_login(cx, request, frame.data);
            }
            _ if self.executor.phase == Phase::Login => {
                warn_limited!(
                    self.executor.complaints,
                    cx.now,
                    "something else than a login"
                );
                self.drop_connection();
            }
            // Data-Out is handled by the command: the header is valid, so we know which data is
            // missing.
            Ok(pdu) if !frame.is_intact && !matches!(pdu, FromInitiator::DataOut(_)) => {
                self.executor.on_digest_error(cx);
                self.executor
                    .reject(cx, frame, RejectReason::DataDigestError, &"data digest");
                if !self.executor.mover.recovers() {
                    // The PDU can't be recovered in any other way.
                    self.close(cx.now);
                }
            }
            Ok(pdu) => {
                if self.executor.mover.recovers() {
                    let exp = StatSn(u32::from_be_bytes(
                        *frame.bhs[28..].first_chunk().expect("a header is 48 bytes"),
                    ));
                    self.executor.on_acknowledged(cx, Some(exp));
                }
                self.on_pdu(cx, frame, pdu);
            }
            Err(error) => {
                cx.gate.count(SessionEvent::FormatError);
                let reason = match error {
                    PduError::Opcode(_) => RejectReason::CommandNotSupported,
                    _ => RejectReason::InvalidPduField,
                };
                self.executor.reject(cx, frame, reason, error);
            }
        }
        self.finish_input(cx);
    }

    /// Processes a PDU when it's next in order.
    pub(super) fn process_pdu(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &FromInitiator) {
        let is_discovery = self
            .executor
            .session
            .as_ref()
            .is_none_or(|s| s.params.discovery);
        match pdu {
            FromInitiator::TextRequest(request) => self.on_text(cx, frame, request),
            // Nothing else can be received after a logout on this connection (RFC 7143 11.14). A
            // queued PDU may also be processed after the connection has started to close.
            FromInitiator::LogoutRequest(_) if self.executor.phase != Phase::FullFeature => {
                self.executor
                    .reject(cx, frame, RejectReason::ProtocolError, &"a second logout");
            }
            FromInitiator::LogoutRequest(request) => self.on_logout(cx, request),
            FromInitiator::NopOut(nop) => self.executor.on_nop(cx, frame, nop),
            FromInitiator::DataOut(data) => self.executor.on_data_out(cx, frame, data),
            FromInitiator::LoginRequest(_) => {
                self.executor
                    .reject(cx, frame, RejectReason::ProtocolError, &"a second login");
            }
            FromInitiator::Snack(snack) if snack.kind == SnackKind::DataAck => {
                self.executor.on_data_ack(cx, frame, snack);
            }
            FromInitiator::Snack(snack) => self.executor.on_snack(cx, frame, snack),
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_) if is_discovery => {
                self.executor
                    .reject(cx, frame, RejectReason::ProtocolError, &"discovery session");
            }
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_)
                if self.executor.phase != Phase::FullFeature =>
            {
                self.executor
                    .reject(cx, frame, RejectReason::WaitingForLogout, &"logout");
            }
            FromInitiator::ScsiCommand(command) => self.executor.on_command(cx, frame, command),
            FromInitiator::TmfRequest(request) => self.executor.on_tmf(cx, frame, request),
        }
    }

    /// Processes a request that was admitted and therefore has a slot in the window. The slot is
    /// released unless the request is stored in a context.
    pub(super) fn process_admitted(
        &mut self,
        cx: &mut Cx<'_>,
        frame: &Frame<'_>,
        pdu: &FromInitiator,
    ) {
        self.executor.tasks.assign_slot();
        let window = Arc::clone(self.executor.window());
        self.process_pdu(cx, frame, pdu);
        window.on_carried_out();
        if self.executor.tasks.release_slot() {
            window.on_gone(false);
        }
    }
}
