//! Timers: retransmissions, timeouts and timewait.

use std::time::Instant;

use super::{Cm, CmState, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{AdditionalInfo, CmMessage, PrivateData, RejMsg, RejOf, RejReason};

impl Cm {
    /// Returns the next time [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(deadline, _)| *deadline)
    }

    /// Processes expired timers: resends messages, handles timeouts and the end of timewait.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(deadline, id)) = self.timers.first()
            && deadline <= now
        {
            // This must be called first, since the next step may set the timer again or remove the
            // ID.
            self.arm(id, None);
            self.on_timeout(now, id);
        }
    }

    fn on_timeout(&mut self, now: Instant, id: IbCmId) {
        let conn = self.conn_mut(id);
        if conn.state == CmState::Timewait {
            // This must be reported before the ID is removed, since `report` needs to check if it
            // was released by the user.
            self.report(id, IbCmEventKind::TimewaitExit);
            return self.free(id);
        }
        let (peer, longest) = (conn.route().peer, conn.interval);
        let until = conn.unconfirmed.map(|rep| rep.until);
        let pending = conn
            .pending
            .as_deref_mut()
            .expect("timers are only used for timewait and pending messages");
        // The lifetime of a half-open connection is over, regardless of remaining retries.
        if until.is_some_and(|until| until <= now) {
            return self.fail_pending(now, id);
        }
        if pending.retries_left == 0 {
            // A REP without any retries left can still be confirmed.
            return match until {
                None => self.fail_pending(now, id),
                until => self.arm(id, until),
            };
        }
        pending.retries_left -= 1;
        // DREQs and REPs start with an interval shorter than the peer's response time, which is
        // then increased.
        pending.interval = (pending.interval * 2).min(longest);
        let (mad, interval) = (pending.mad, pending.interval);
        self.counters.retries += 1;
        self.send(peer, mad);
        self.wait_until(id, now + interval);
    }

    /// Called when there was no response to the pending message.
    pub(super) fn fail_pending(&mut self, now: Instant, id: IbCmId) {
        match self.conns[&id].state {
            CmState::ReqSent | CmState::MraReqRcvd => {
                // The peer may have created a connection for this REQ, so we need to cancel it.
                // Since the QP was not used, we don't need timewait.
                self.send_timeout_rej(id);
                self.report(id, IbCmEventKind::ReqTimeout);
                self.free(id);
            }
            CmState::RepSent | CmState::MraRepRcvd => {
                // The peer may have received the REP and used the QP, so there can still be packets
                // in the network.
                self.send_timeout_rej(id);
                self.enter_timewait(now, id);
                self.report(id, IbCmEventKind::RepTimeout);
            }
            CmState::LapSent | CmState::MraLapRcvd => {
                // If the alternate path is not accepted, the connection is not affected.
                self.clear_pending(id);
                self.become_state(id, CmState::Established);
                self.report(id, IbCmEventKind::LapTimeout);
            }
            CmState::DreqSent => {
                // The peer is down or its DREPs were lost. The connection is closed in both cases.
                self.enter_timewait(now, id);
                self.report(id, IbCmEventKind::DreqTimeout);
            }
            CmState::SidrReqSent => {
                self.report(id, IbCmEventKind::SidrReqTimeout);
                self.free(id);
            }
            state => unreachable!("no pending message in {state:?}"),
        }
    }

    /// Called when `peer` is known to be down. Closes all of its connections as for a timeout, but
    /// immediately and without sending any messages.
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
            // The same as if the peer had canceled its request.
            CmState::ReqRcvd | CmState::MraReqSent => IbCmEventKind::RejReceived {
                message: RejOf::NoMessage,
                reason: RejReason::Timeout,
                info: Box::default(),
                private_data: Box::default(),
                timewait: false,
            },
            CmState::RepSent | CmState::MraRepRcvd => IbCmEventKind::RepTimeout,
            CmState::DreqSent => IbCmEventKind::DreqTimeout,
            // This has its own timer and no pending message.
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
            // This must be reported before the ID is removed, since `report` needs to check if it
            // was released by the user.
            self.report(id, event);
            self.free(id);
        }
    }

    /// Notifies the peer about a timeout. It may not know our ID, so we add our channel adapter
    /// GUID in the additional information (IBTA 12.6.7.2).
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
        self.send_response(id, transaction, &rej);
    }
}
