//! Messages initiated by the target: T_LOGOUT, CRED_REQ, AER_REQ.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::sense::SenseData;
use riser_scsi::srp::{AerReq, CredReq, FromTarget, LoginReqFlags, TLogout, TLogoutReason, Tag};

use super::action::{Action, SendIu};
use super::credit::ReqLim;
use super::login::{ChannelParams, MAX_TI_IU};
use super::rings::SendRing;
use crate::fabric::TaskIdx;

/// Maximum number of events waiting for AER_REQ. Any further event is only reported as a unit
/// attention.
const MAX_EVENTS: usize = 16;

/// The type of a message. At most one message of each type is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    CredReq,
    AerReq,
    Logout,
}

/// State of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot {
    /// Set until the send has completed.
    sending: bool,
    /// Tag of the message until the response is received.
    unanswered: Option<Tag>,
}

impl Slot {
    fn is_idle(self) -> bool {
        !self.sending && self.unanswered.is_none()
    }
}

/// Messages initiated by the target.
#[derive(Debug)]
pub(super) struct OwnMessages {
    slots: [Slot; 3],
    next_tag: u64,
    events: VecDeque<(WireLun, SenseData)>,
    /// If set, commands in flight can complete until then, followed by a logout.
    pub(super) stopping: Option<Instant>,
    /// The messages to send as solicited events.
    flags: LoginReqFlags,
    /// The initiator has requested asynchronous events.
    wants_events: bool,
    /// The first context for these messages.
    first: u16,
}

impl OwnMessages {
    /// Creates the state of a new channel.
    pub(super) fn new(params: &ChannelParams) -> Self {
        Self {
            slots: [Slot::default(); 3],
            next_tag: 0,
            events: VecDeque::new(),
            stopping: None,
            flags: params.flags,
            wants_events: params.wants_events,
            first: params.req_lim as u16,
        }
    }

    /// Queues an event for AER_REQ, if the initiator has requested events.
    pub(super) fn queue_event(&mut self, lun: WireLun, sense: SenseData) {
        let event = (lun, sense);
        // If the initiator does not respond, a single event must not fill the queue.
        let is_new = !self.events.contains(&event);
        if self.wants_events && self.events.len() < MAX_EVENTS && is_new {
            self.events.push_back(event);
        }
    }

    /// Discards pending messages, because the channel is being drained.
    pub(super) fn discard_pending(&mut self) {
        self.events.clear();
        self.stopping = None;
    }

    /// Returns T_LOGOUT for this reason, written to the send ring.
    pub(super) fn logout(&mut self, reason: TLogoutReason, ring: &SendRing) -> Action {
        let solicited = self.wants(LoginReqFlags::LOSOLNT);
        let tag = self.new_tag();
        let iu = FromTarget::TLogout(TLogout {
            solicited,
            reason,
            tag,
        });
        self.send(Kind::Logout, &iu, solicited, ring)
    }

    /// Returns CRED_REQ, written to the send ring, if credits must be returned.
    ///
    /// Credits are returned with responses. Only send a request if there is no response to return
    /// them, because the initiator would then wait forever.
    pub(super) fn poll_credits(&mut self, req_lim: &mut ReqLim, ring: &SendRing) -> Option<Action> {
        if !req_lim.is_stuck() || !self.slot(Kind::CredReq).is_idle() {
            return None;
        }
        let tag = self.new_tag();
        let solicited = self.wants(LoginReqFlags::CRSOLNT);
        let iu = FromTarget::CredReq(CredReq {
            solicited,
            req_lim_delta: req_lim.grant(),
            tag,
        });
        self.slot(Kind::CredReq).unanswered = Some(tag);
        Some(self.send(Kind::CredReq, &iu, solicited, ring))
    }

    /// Returns AER_REQ for the next event, written to the send ring.
    pub(super) fn poll_event(&mut self, req_lim: &mut ReqLim, ring: &SendRing) -> Option<Action> {
        if !self.slot(Kind::AerReq).is_idle() {
            return None;
        }
        let (lun, sense) = self.events.pop_front()?;
        let tag = self.new_tag();
        let solicited = self.wants(LoginReqFlags::AESOLNT);
        let iu = FromTarget::AerReq(AerReq {
            solicited,
            req_lim_delta: req_lim.grant(),
            tag,
            lun,
            sense: &sense,
        });
        self.slot(Kind::AerReq).unanswered = Some(tag);
        Some(self.send(Kind::AerReq, &iu, solicited, ring))
    }

    /// Handles a response. Returns false if there is no message with this tag.
    pub(super) fn on_response(&mut self, kind: Kind, tag: Tag) -> bool {
        let slot = self.slot(kind);
        let is_known = slot.unanswered == Some(tag);
        if is_known {
            slot.unanswered = None;
        }
        is_known
    }

    /// Called when the message in this context was sent, or has failed.
    pub(super) fn on_sent(&mut self, idx: TaskIdx) -> Kind {
        let kind = match idx.0 - self.first {
            0 => Kind::CredReq,
            1 => Kind::AerReq,
            _ => Kind::Logout,
        };
        let slot = self.slot(kind);
        assert!(slot.sending, "{kind:?} was being sent");
        slot.sending = false;
        kind
    }

    /// Marks all sends as completed, because their completions will never arrive.
    pub(super) fn forget_sends(&mut self) {
        for slot in &mut self.slots {
            slot.sending = false;
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.slots.iter().any(|s| s.sending)
    }

    /// Returns true if a completion in this context is for one of these messages.
    pub(super) fn owns(&self, idx: TaskIdx) -> bool {
        idx.0 >= self.first
    }

    fn send(
        &mut self,
        kind: Kind,
        iu: &FromTarget<'_>,
        solicited: bool,
        ring: &SendRing,
    ) -> Action {
        let task = TaskIdx(self.first + kind as u16);
        let mut bytes = [0; MAX_TI_IU as usize];
        let len = iu.emit(&mut bytes);
        ring.write(task, &bytes[..len]);
        let slot = self.slot(kind);
        debug_assert!(!slot.sending);
        slot.sending = true;
        let len = len as u32;
        let send = Some(SendIu { len, solicited });
        Action::Post { task, send }
    }

    fn wants(&self, flag: LoginReqFlags) -> bool {
        self.flags.contains(flag)
    }

    fn new_tag(&mut self) -> Tag {
        self.next_tag += 1;
        Tag(self.next_tag)
    }

    fn slot(&mut self, kind: Kind) -> &mut Slot {
        &mut self.slots[kind as usize]
    }
}
