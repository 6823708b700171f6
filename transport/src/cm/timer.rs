//! Timers: repetitions, time-outs and the end of timewait.

use std::time::Instant;

use super::{Cm, CmState, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{AdditionalInfo, CmMessage, PrivateData, RejMsg, RejOf, RejReason};

impl Cm {
    /// Next time at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(deadline, _)| *deadline)
    }

    /// Do all that is due at `now`: repeat messages, give up, leave timewait.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(deadline, id)) = self.timers.first()
            && deadline <= now
        {
            // Before the step, which may arm it again or free the identifier.
            self.arm(id, None);
            self.on_timeout(now, id);
        }
    }

    fn on_timeout(&mut self, now: Instant, id: IbCmId) {
        let conn = self.known(id);
        if conn.state == CmState::Timewait {
            // Reported before it is freed, since the report looks up whether the user has
            // released it.
            self.report(id, IbCmEventKind::TimewaitExit);
            return self.free(id);
        }
        let (peer, longest) = (conn.route().peer, conn.interval);
        let until = conn.unconfirmed.map(|rep| rep.until);
        let pending = conn
            .pending
            .as_deref_mut()
            .expect("timers run for timewait and for pending messages");
        // The life of a half-open connection is over, with repetitions left or not.
        if until.is_some_and(|until| until <= now) {
            return self.give_up(now, id);
        }
        if pending.retries_left == 0 {
            // A REP that must not be repeated any more may still be confirmed.
            return match until {
                None => self.give_up(now, id),
                until => self.arm(id, until),
            };
        }
        pending.retries_left -= 1;
        // DREQs and REPs begin sooner than the peer's time for an answer, and approach it.
        pending.interval = (pending.interval * 2).min(longest);
        let (mad, interval) = (pending.mad, pending.interval);
        self.counters.retries += 1;
        self.send(peer, mad);
        self.wait_until(id, now + interval);
    }

    /// The message under way was not answered.
    pub(super) fn give_up(&mut self, now: Instant, id: IbCmId) {
        match self.conns[&id].state {
            CmState::ReqSent | CmState::MraReqRcvd => {
                // The peer may have begun a connection for this REQ, so it is taken back. No
                // queue pair has been in use that would have to be waited out.
                self.send_timeout_rej(id);
                self.report(id, IbCmEventKind::ReqTimeout);
                self.free(id);
            }
            CmState::RepSent | CmState::MraRepRcvd => {
                // The peer may have had the REP and used the queue pair, so packets of it may be
                // under way.
                self.send_timeout_rej(id);
                self.enter_timewait(now, id);
                self.report(id, IbCmEventKind::RepTimeout);
            }
            CmState::LapSent | CmState::MraLapRcvd => {
                // An alternate path that is not agreed on leaves the connection as it was.
                self.answered(id);
                self.become_state(id, CmState::Established);
                self.report(id, IbCmEventKind::LapTimeout);
            }
            CmState::DreqSent => {
                // The peer is gone, or its DREPs were lost: the connection is over in either
                // case.
                self.enter_timewait(now, id);
                self.report(id, IbCmEventKind::DreqTimeout);
            }
            CmState::SidrReqSent => {
                self.report(id, IbCmEventKind::SidrReqTimeout);
                self.free(id);
            }
            state => unreachable!("no message is under way in {state:?}"),
        }
    }

    /// `peer` is gone for certain. Ends everything with it as time-outs would, but at once and
    /// without a message to it.
    pub fn lose_peer(&mut self, now: Instant, peer: PeerAddr) {
        let peer = peer.to_canonical();
        let with_peer = self.conns.iter().filter(|(_, conn)| conn.peer == peer);
        let lost: Vec<IbCmId> = with_peer.map(|(id, _)| *id).collect();
        for id in lost {
            self.on_lost(now, id);
        }
    }

    fn on_lost(&mut self, now: Instant, id: IbCmId) {
        let event = match self.conns[&id].state {
            CmState::ReqSent | CmState::MraReqRcvd => IbCmEventKind::ReqTimeout,
            CmState::SidrReqSent => IbCmEventKind::SidrReqTimeout,
            // As if the peer had taken its request back.
            CmState::ReqRcvd | CmState::MraReqSent => IbCmEventKind::RejReceived {
                message: RejOf::NoMessage,
                reason: RejReason::Timeout,
                info: Box::default(),
                private_data: Box::default(),
                timewait: false,
            },
            CmState::RepSent | CmState::MraRepRcvd => IbCmEventKind::RepTimeout,
            CmState::DreqSent => IbCmEventKind::DreqTimeout,
            // It ends by itself, and has no message under way.
            CmState::Timewait | CmState::SidrReqRcvd => return,
            _ => IbCmEventKind::StaleConnection,
        };
        let was_used = !matches!(
            event,
            IbCmEventKind::ReqTimeout
                | IbCmEventKind::SidrReqTimeout
                | IbCmEventKind::RejReceived { .. }
        );
        if was_used {
            self.enter_timewait(now, id);
            self.report(id, event);
        } else {
            // Reported before it is freed, since the report looks up whether the user has
            // released it.
            self.report(id, event);
            self.free(id);
        }
    }

    /// Notify the peer that we wait no longer. It may not know our id, so the
    /// additional information names our channel adapter (IBTA 12.6.7.2).
    pub(super) fn send_timeout_rej(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        let guid = self.config.ca_guid.0.to_be_bytes();
        let rej = CmMessage::Rej(RejMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            message: RejOf::NoMessage,
            reason: RejReason::Timeout,
            info: AdditionalInfo::new(&guid).expect("eight bytes fit"),
            private_data: PrivateData::default(),
        });
        let transaction = conn.transaction;
        self.answer(id, transaction, &rej);
    }
}
