//! Text requests in full-feature phase: SendTargets and MaxRecvDataSegmentLength.

use riser_scsi::iscsi::Ttt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::keys::{Key, KeyContext, Negotiation, Offer, Sender};
use riser_scsi::iscsi::name::{self, IscsiName};
use riser_scsi::iscsi::pdu::{FromTarget, RejectReason, Stage, TextRequest, TextResponse};
use riser_scsi::iscsi::text::{self, Collector, Outgoing};

use super::channel::Channel;
use super::context::Cx;
use super::datamover::Datamover;
use super::pending::TextState;

/// Maximum size of a response PDU in bytes, even if the initiator supports larger PDUs.
const MAX_PART: u32 = 8192;

impl<D: Datamover> Channel<D> {
    pub(super) fn on_text(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, request: &TextRequest) {
        let continues = request.ttt != Ttt::NONE;
        if continues && self.text.ttt != Some(request.ttt) {
            self.text = TextState::default();
            return self.executor.reject(
                cx,
                frame,
                RejectReason::ProtocolError,
                &"no such text exchange",
            );
        }
        // A request without a transfer tag starts a new exchange and discards the remaining part of
        // a previous one (RFC 7143 11.10.4).
        if !continues {
            self.text.collector = Collector::default();
            self.text.outgoing = Outgoing::default();
        }
        if continues && !self.text.outgoing.is_done() {
            return self.send_part(request);
        }
        match self.text.collector.add_part(frame.data, request.continues) {
            Ok(None) => self.send_part(request),
            Ok(Some(text)) => match self.respond_to_text(cx, &text) {
                Some(response) => {
                    self.text.outgoing = Outgoing::new(response);
                    self.send_part(request);
                }
                None => self
                    .executor
                    .reject(cx, frame, RejectReason::ProtocolError, &"text"),
            },
            Err(error) => self
                .executor
                .reject(cx, frame, RejectReason::ProtocolError, &error),
        }
    }

    /// Returns the response for a complete text request, or `None` if it's invalid.
    fn respond_to_text(&mut self, cx: &mut Cx<'_>, text: &[u8]) -> Option<Vec<u8>> {
        let session = self.executor.session.as_ref()?;
        let context = KeyContext {
            from: Sender::Initiator,
            stage: Stage::FullFeature,
            leading: false,
            discovery: session.params.discovery,
        };
        let mut keys = Negotiation::new(Offer::default());
        let mut out = Vec::new();
        let mut is_sought = false;
        for pair in text::pairs(text) {
            let (key, value) = pair.ok()?;
            match keys.handle_key(key, value, context, &mut out).ok()? {
                // Only one such key is allowed per request (RFC 7143 Appendix C), so a target can
                // only be returned once.
                Some(Key::SendTargets) if std::mem::replace(&mut is_sought, true) => return None,
                Some(Key::SendTargets) => {
                    let own = session.identity.target.as_ref();
                    let named = IscsiName::new(value).ok();
                    let wanted = match value {
                        "All" if session.params.discovery => None,
                        "" => Some(own?),
                        // Listing all targets is only supported in a discovery session, so `All` is
                        // rejected in a normal session (RFC 7143 Appendix C).
                        _ if session.params.discovery || named.as_ref() == own => {
                            Some(named.as_ref()?)
                        }
                        _ => return None,
                    };
                    for found in cx.gate.targets(&session.identity.initiator, wanted) {
                        name::put_target(&mut out, &found.name, &found.addresses);
                    }
                }
                Some(Key::MaxRecvDataSegmentLength) => {
                    let declared = keys.peer().of(Key::MaxRecvDataSegmentLength);
                    self.executor.mover.set_max_send_segment(declared);
                }
                _ => {}
            }
        }
        Some(out)
    }

    fn send_part(&mut self, request: &TextRequest) {
        let limit = self.executor.mover.max_send_segment().min(MAX_PART);
        let state = &mut self.text;
        let (part, continues) = state.outgoing.next_part(limit);
        let data = part.to_vec();
        let is_final = request.is_final && !continues;
        let ttt = if is_final {
            Ttt::NONE
        } else {
            state.next_ttt = (state.next_ttt + 1) & 0x7fff_ffff;
            Ttt(state.next_ttt)
        };
        state.ttt = (!is_final).then_some(ttt);
        let response = TextResponse {
            is_final,
            continues,
            itt: request.itt,
            ttt,
        };
        self.executor
            .send(FromTarget::TextResponse(response), data, true);
    }
}
