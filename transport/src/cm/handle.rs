//! Handling of messages to establish, reject and close connections.

use std::time::Instant;

use super::conn::{Conn, ReqIdentity, reversed};
use super::event::QpPeer;
use super::table::is_message;
use super::{Cm, CmState, IbCmEventKind, IbCmId, PeerAddr};
use crate::verbs::{Mtu, QpType};
use crate::wire::cm_msg::{
    CaGuid, CmAttribute, CmMessage, CmMsgError, CommId, DreqMsg, MraMsg, MraOf, PairMsg,
    PrivateData, RejMsg, RejOf, RejReason, RepMsg, ReqMsg,
};
use crate::wire::ids::Qpn;
use crate::wire::mad::TransactionId;

/// Returns true for QPs that cannot be connected: SMI and GSI.
fn is_special(qpn: Qpn) -> bool {
    qpn == Qpn::SMI || qpn == Qpn::GSI || qpn == Qpn::MULTICAST
}

impl Cm {
    /// Processes a MAD of the CM class received from `from`.
    ///
    /// # Errors
    ///
    /// Returns an error if the MAD can't be parsed. In this case the state is not changed. Messages
    /// that are invalid in the current state of their connection are counted and ignored.
    pub fn handle_mad(
        &mut self,
        now: Instant,
        from: PeerAddr,
        mad: &[u8],
    ) -> Result<(), CmMsgError> {
        // IPv4 addresses must be in canonical form to be found in the indexes.
        let from = from.to_canonical();
        self.counters.received += 1;
        let parsed = CmMessage::parse(mad);
        let (transaction, message) = parsed.inspect_err(|_| self.counters.malformed += 1)?;
        match message {
            CmMessage::Req(req) => self.handle_req(now, from, transaction, &req),
            CmMessage::Mra(mra) => self.handle_mra(now, from, &mra),
            CmMessage::Rej(rej) => self.handle_rej(now, from, &rej),
            CmMessage::Rep(rep) => self.handle_rep(now, from, transaction, &rep),
            CmMessage::Rtu(rtu) => self.handle_rtu(now, from, &rtu),
            CmMessage::Dreq(dreq) => self.handle_dreq(now, from, transaction, &dreq),
            CmMessage::Drep(drep) => self.handle_drep(now, from, &drep),
            CmMessage::SidrReq(req) => self.handle_sidr_req(from, transaction, &req),
            CmMessage::SidrRep(rep) => self.handle_sidr_rep(from, &rep),
            CmMessage::Lap(lap) => self.handle_lap(from, transaction, &lap),
            CmMessage::Apr(apr) => self.handle_apr(from, &apr),
        }
        Ok(())
    }

    /// Returns the ID specified in a message if this is valid for the peer: the source address must
    /// match, and the message must contain the peer's ID if it is already known.
    pub(super) fn addressed(
        &mut self,
        from: PeerAddr,
        ours: CommId,
        theirs: CommId,
    ) -> Option<(IbCmId, CmState)> {
        let id = IbCmId(ours);
        let Some(conn) = self.conns.get(&id) else {
            self.counters.unknown += 1;
            return None;
        };
        // The active side doesn't know the peer's ID before it receives the REP, so it must accept
        // any.
        if !conn.is_with(from) || conn.remote_id.is_some_and(|known| known != theirs) {
            self.counters.illegal += 1;
            return None;
        }
        Some((id, conn.state))
    }

    pub(super) fn illegal(&mut self) {
        self.counters.illegal += 1;
    }

    /// Handles a connection not known by the peer anymore.
    pub(super) fn on_stale(&mut self, now: Instant, id: IbCmId) {
        self.enter_timewait(now, id);
        self.report(id, IbCmEventKind::StaleConnection);
    }

    /// Checks if a REQ can be passed to a listener.
    fn check_req(&self, from: PeerAddr, req: &ReqMsg) -> Result<(QpType, Mtu), RejReason> {
        let qp_type = req.qp_type().ok_or(RejReason::InvalidTransportType)?;
        // On RoCE, a GID is an IP address. If it doesn't match the source address, it belongs to a
        // host that has not sent this request.
        if self.config.checks_gids && req.primary.local_gid.ip() != from {
            return Err(RejReason::InvalidGid);
        }
        // ID 0 means "unknown" in a response, and special QPs cannot be connected.
        if is_special(req.qpn) || req.local_comm_id == CommId(0) {
            return Err(RejReason::Unsupported);
        }
        let path_mtu = req.path_mtu.ok_or(RejReason::InvalidMtu)?;
        Ok((qp_type, path_mtu))
    }

    fn handle_req(
        &mut self,
        now: Instant,
        from: PeerAddr,
        transaction: TransactionId,
        req: &ReqMsg,
    ) {
        let refuse = |cm: &mut Self, reason| {
            cm.refuse(
                from,
                transaction,
                (CommId(0), req.local_comm_id),
                RejOf::Req,
                reason,
            );
        };
        // If the peer's adapter was restarted, the old connection is closed when the new one is
        // established. We must not close it here, since this REQ may be forged.
        let (qp_type, path_mtu) = match self.check_req(from, req) {
            Ok(accepted) => accepted,
            Err(reason) => return refuse(self, reason),
        };
        let identity = ReqIdentity::new(transaction, req);
        // A duplicate was already counted, so this must be checked before any limits.
        if let Some(&id) = self.peers.by_req.get(&(from, identity)) {
            return self.on_duplicate_req(now, id);
        }
        let Some(listener) = self.listeners.find(req.service_id) else {
            return refuse(self, RejReason::InvalidServiceId);
        };
        // Without a response, the peer will retry later when there may be space. We must not close
        // anything for a request that can't be passed to the user.
        let is_free = self.listeners.has_room_for(listener, from);
        let grace = self.config.half_open_grace;
        let oldest = self.listeners.oldest_unconfirmed(listener, from);
        let in_its_way = oldest.filter(|id| self.conns[id].is_displaceable(now, grace));
        let is_full = self.events.len() >= self.config.max_events;
        if is_full || (!is_free && in_its_way.is_none()) {
            self.counters.dropped += 1;
            return;
        }
        // Check this before closing the displaced connection, so that it's not closed for nothing.
        if self.make_room().is_err() {
            return refuse(self, RejReason::NoResources);
        }
        if let Some(oldest) = in_its_way {
            self.counters.displaced += 1;
            self.fail_pending(now, oldest);
        }

        let id = self.new_id();
        let mut conn = Conn::new(CmState::ReqRcvd, from, req.service_id, transaction);
        conn.listener = Some(listener);
        conn.qp_type = qp_type;
        conn.remote_id = Some(req.local_comm_id);
        conn.remote_qpn = Some(req.qpn);
        conn.remote_guid = Some(req.ca_guid);
        conn.identity = Some(identity);
        // The timeout is chosen by the peer, within limits.
        conn.interval = self.config.interval(req.local_cm_timeout);
        conn.max_retries = req.max_cm_retries.value() as u8;
        conn.timewait = req
            .primary
            .ack_timeout
            .duration()
            .min(self.config.max_timewait);
        conn.traffic_class = req.primary.traffic_class;
        // Keep the request until there is a response, since its timeout is used to decide how long
        // to keep a REJ.
        conn.req = Some(Box::new(*req));
        // Add the connection before reporting the event, so that duplicates of this REQ will be
        // found.
        self.insert(id, conn);
        self.peers.insert(id, &self.conns[&id]);
        let qp = QpPeer {
            qp_type,
            dest_qpn: req.qpn,
            sq_psn: req.starting_psn,
            path_mtu,
            pkey: req.pkey,
            path: reversed(&req.primary),
            responder_resources: req.responder_resources,
            initiator_depth: req.initiator_depth,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            flow_control: req.flow_control,
            srq: req.srq,
        };
        self.report(
            id,
            IbCmEventKind::ReqReceived {
                listener,
                peer: from,
                qp,
                req: Box::new(*req),
            },
        );
    }

    fn on_duplicate_req(&mut self, now: Instant, id: IbCmId) {
        let conn = &self.conns[&id];
        match conn.state {
            // MRA or REP: it was lost or hasn't been received by the peer yet.
            CmState::MraReqSent => self.repeat_response(id),
            CmState::RepSent => {
                // Linux sends a duplicate REQ every four seconds, for more than a minute. We
                // respond to each of them, which cannot be used for amplification since there is
                // only one response per request.
                self.conn_mut(id).renew_rep(now);
                self.repeat_response(id);
            }
            // The REJ was lost, so we send it again while it is available.
            CmState::Timewait
                if conn
                    .last_response
                    .as_deref()
                    .is_some_and(|a| is_message(a, CmAttribute::Rej)) =>
            {
                self.repeat_response(id);
            }
            _ => self.counters.duplicates += 1,
        }
    }

    fn handle_rep(
        &mut self,
        now: Instant,
        from: PeerAddr,
        transaction: TransactionId,
        rep: &RepMsg,
    ) {
        // Without a REJ, the peer would keep sending its REP and not release the QP until it times
        // out.
        if !self.conns.contains_key(&IbCmId(rep.remote_comm_id)) {
            let ids = (rep.remote_comm_id, rep.local_comm_id);
            return self.refuse(from, transaction, ids, RejOf::Rep, RejReason::InvalidCommId);
        }
        let Some((id, state)) = self.addressed(from, rep.remote_comm_id, rep.local_comm_id) else {
            return;
        };
        match state {
            CmState::ReqSent | CmState::MraReqRcvd => self.on_rep(now, id, transaction, rep),
            // The RTU or MRA was lost. Only the active side sends an RTU: the passive side has an
            // `identity`.
            CmState::MraRepSent | CmState::Established if self.conns[&id].identity.is_none() => {
                self.repeat_response(id);
            }
            CmState::Timewait => {
                let last_response = self.conns[&id].last_response.as_deref();
                if last_response.is_some_and(|mad| is_message(mad, CmAttribute::Rej)) {
                    self.repeat_response(id);
                }
            }
            CmState::RepRcvd => self.counters.duplicates += 1,
            _ => self.illegal(),
        }
    }

    fn on_rep(&mut self, now: Instant, id: IbCmId, transaction: TransactionId, rep: &RepMsg) {
        let conn = self.conn_mut(id);
        let dest_qpn = match conn.qp_type {
            QpType::XrcIni => Qpn::new(rep.eecn.value()),
            _ => rep.qpn,
        };
        // A connection using these values could neither be used nor closed.
        if is_special(dest_qpn) || rep.local_comm_id == CommId(0) {
            return self.illegal();
        }
        self.clear_pending(id);
        let conn = self.conn_mut(id);
        conn.remote_id = Some(rep.local_comm_id);
        conn.remote_qpn = Some(dest_qpn);
        conn.remote_guid = Some(rep.ca_guid);
        conn.transaction = transaction;
        let qp_type = conn.qp_type;
        let req = conn
            .req
            .take()
            .expect("the active side keeps its REQ until the REP");
        // We need to know the peer's QP first, so that `end_superseded` can close the older
        // connection using it.
        self.peers.insert(id, &self.conns[&id]);
        self.become_state(id, CmState::RepRcvd);
        self.end_superseded(now, id);
        let qp = QpPeer {
            qp_type,
            dest_qpn,
            sq_psn: rep.starting_psn,
            path_mtu: req.path_mtu.expect("our REQ contains an MTU"),
            pkey: req.pkey,
            path: req.primary,
            responder_resources: rep.responder_resources,
            initiator_depth: rep.initiator_depth,
            retry_count: req.retry_count,
            rnr_retry_count: rep.rnr_retry_count,
            flow_control: rep.flow_control,
            srq: rep.srq,
        };
        self.report(
            id,
            IbCmEventKind::RepReceived {
                qp,
                rep: Box::new(*rep),
            },
        );
    }

    fn handle_rtu(&mut self, now: Instant, from: PeerAddr, rtu: &PairMsg) {
        let Some((id, state)) = self.addressed(from, rtu.remote_comm_id, rtu.local_comm_id) else {
            return;
        };
        match state {
            CmState::RepSent | CmState::MraRepRcvd => {
                // The RTU contains our random ID, so the REP must have been received at the peer's
                // address.
                self.clear_pending(id);
                self.become_state(id, CmState::Established);
                // We can't do this earlier, since the request might have been forged.
                self.end_superseded(now, id);
                self.report(
                    id,
                    IbCmEventKind::RtuReceived {
                        private_data: Box::new(rtu.private_data),
                    },
                );
            }
            CmState::Established => self.counters.duplicates += 1,
            _ => self.illegal(),
        }
    }

    fn handle_mra(&mut self, now: Instant, from: PeerAddr, mra: &MraMsg) {
        let Some((id, state)) = self.addressed(from, mra.remote_comm_id, mra.local_comm_id) else {
            return;
        };
        // We accept one MRA for each of our messages, which limits the time a peer can request.
        let next = match (state, mra.message) {
            (CmState::ReqSent, MraOf::Req) => CmState::MraReqRcvd,
            (CmState::RepSent, MraOf::Rep) => CmState::MraRepRcvd,
            (CmState::LapSent, MraOf::Lap) => CmState::MraLapRcvd,
            (CmState::MraReqRcvd, MraOf::Req)
            | (CmState::MraRepRcvd, MraOf::Rep)
            | (CmState::MraLapRcvd, MraOf::Lap) => {
                self.counters.duplicates += 1;
                return;
            }
            _ => return self.illegal(),
        };
        self.become_state(id, next);
        let service = mra
            .service_timeout
            .duration()
            .min(self.config.max_service_timeout);
        // By sending an MRA, the peer has proved that it can receive messages, so we allow the
        // maximum lifetime of a half-open connection. But this must not be extended again.
        let longest = self.config.max_half_open;
        let conn = self.conn_mut(id);
        let interval = conn.interval;
        if let Some(rep) = &mut conn.unconfirmed {
            // A duplicate REQ may already have extended this.
            rep.until = rep.until.max(rep.sent + longest);
        }
        // The time requested by the MRA, followed by the normal time for a response.
        self.wait_until(id, now + service + interval);
        self.report(
            id,
            IbCmEventKind::MraReceived {
                message: mra.message,
                service_timeout: mra.service_timeout,
                private_data: Box::new(mra.private_data),
            },
        );
    }

    /// Returns the connection for a REJ. If the sender timed out without receiving a response, it
    /// doesn't know our ID and identifies itself instead (IBTA 12.6.7.2, reason 4).
    fn rejected(&mut self, from: PeerAddr, rej: &RejMsg) -> Option<(IbCmId, CmState)> {
        if rej.remote_comm_id != CommId(0) {
            return self.addressed(from, rej.remote_comm_id, rej.local_comm_id);
        }
        let guid = rej.info.first_chunk().map(|guid| u64::from_be_bytes(*guid));
        // Only a timeout can be reported without our ID. A REJ for any other reason could be for
        // any connection.
        let guid = CaGuid(guid.filter(|_| rej.reason == RejReason::Timeout)?);
        let all = ReqIdentity::all_of(guid, rej.local_comm_id);
        let requests = self
            .peers
            .by_req
            .range((from, *all.start())..=(from, *all.end()));
        // A REJ without our ID can easily be forged, so it must not close an established
        // connection.
        let mut half_open = requests
            .map(|(_, id)| (*id, self.conns[id].state))
            .filter(|(_, state)| state.is_half_open());
        half_open.next()
    }

    fn handle_rej(&mut self, now: Instant, from: PeerAddr, rej: &RejMsg) {
        let Some((id, state)) = self.rejected(from, rej) else {
            return;
        };
        // If the QP may have been used, there can still be packets in the network, so we need to
        // enter timewait.
        let timewait = match state {
            CmState::ReqSent | CmState::MraReqRcvd | CmState::ReqRcvd | CmState::MraReqSent => {
                false
            }
            CmState::RepSent
            | CmState::RepRcvd
            | CmState::MraRepSent
            | CmState::MraRepRcvd
            | CmState::DreqSent => true,
            state if state.is_connected() => true,
            _ => return self.illegal(),
        };
        let event = IbCmEventKind::RejReceived {
            message: rej.message,
            reason: rej.reason,
            info: Box::new(rej.info),
            private_data: Box::new(rej.private_data),
            timewait,
        };
        if timewait {
            self.enter_timewait(now, id);
            self.report(id, event);
        } else {
            // This must be reported before the connection is removed, since `report` needs to check
            // if it was released by the user.
            self.report(id, event);
            self.free(id);
        }
    }

    fn handle_dreq(
        &mut self,
        now: Instant,
        from: PeerAddr,
        transaction: TransactionId,
        dreq: &DreqMsg,
    ) {
        let drep = CmMessage::Drep(PairMsg {
            local_comm_id: dreq.remote_comm_id,
            remote_comm_id: dreq.local_comm_id,
            private_data: PrivateData::default(),
        });
        if !self.conns.contains_key(&IbCmId(dreq.remote_comm_id)) {
            // The connection is already closed or never existed, so the peer doesn't need to wait.
            self.counters.unknown += 1;
            return self.send(from, drep.emit(transaction));
        }
        let Some((id, state)) = self.addressed(from, dreq.remote_comm_id, dreq.local_comm_id)
        else {
            return;
        };
        // A DREQ contains our QP number as well as our ID, so a stale DREQ is unlikely to match.
        if self.conns[&id].remote_id.is_none() || self.conns[&id].local_qpn != dreq.remote_qpn {
            return self.illegal();
        }
        match state {
            // The peer can close the connection immediately, and its RTU may be lost or reordered.
            CmState::RepSent | CmState::MraRepRcvd => self.on_dreq(now, id, transaction, dreq),
            state if state.is_connected() => self.on_dreq(now, id, transaction, dreq),
            CmState::DreqSent => {
                // Both sides are closing the connection at the same time.
                self.send_response(id, transaction, &drep);
                self.enter_timewait(now, id);
                self.report(
                    id,
                    IbCmEventKind::DrepReceived {
                        private_data: Box::default(),
                    },
                );
            }
            CmState::Timewait => {
                self.counters.duplicates += 1;
                // Send the previous response again, or create it now if the connection was closed
                // by our own DREQ.
                let kept = self.conns[&id]
                    .last_response
                    .as_deref()
                    .filter(|mad| is_message(mad, CmAttribute::Drep));
                let mad = kept.copied().unwrap_or_else(|| drep.emit(transaction));
                self.send(from, mad);
            }
            CmState::DreqRcvd => self.counters.duplicates += 1,
            _ => self.illegal(),
        }
    }

    fn on_dreq(&mut self, now: Instant, id: IbCmId, transaction: TransactionId, dreq: &DreqMsg) {
        self.clear_pending(id);
        self.become_state(id, CmState::DreqRcvd);
        // Like an RTU, a DREQ proves that the peer has received the REP.
        self.end_superseded(now, id);
        self.conn_mut(id).transaction = transaction;
        assert!(
            !self.conns[&id].is_orphan,
            "the side that releases a connection sends a DREQ"
        );
        self.report(
            id,
            IbCmEventKind::DreqReceived {
                private_data: Box::new(dreq.private_data),
            },
        );
    }

    fn handle_drep(&mut self, now: Instant, from: PeerAddr, drep: &PairMsg) {
        let Some((id, state)) = self.addressed(from, drep.remote_comm_id, drep.local_comm_id)
        else {
            return;
        };
        match state {
            CmState::DreqSent => {
                self.enter_timewait(now, id);
                self.report(
                    id,
                    IbCmEventKind::DrepReceived {
                        private_data: Box::new(drep.private_data),
                    },
                );
            }
            CmState::Timewait => self.counters.duplicates += 1,
            _ => self.illegal(),
        }
    }
}
