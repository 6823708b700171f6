//! Connection calls for the user.

use std::time::Instant;

use super::conn::Conn;
use super::{Cm, CmState, IbCmError, IbCmId, PeerAddr, RepParams, ReqParams, SidrRepParams};
use crate::verbs::QpType;
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmMessage, CmTimeout, CommId, DreqMsg, MraMsg, MraOf, PairMsg,
    PrivateData, RejMsg, RejOf, RejReason, RepMsg, ReqMsg, SidrStatus, transport_of,
};
use crate::wire::ids::Qpn;
use crate::wire::mad::Mad;

impl Cm {
    /// Sends a connection request to `peer`.
    ///
    /// # Errors
    ///
    /// [`IbCmError::TooManyIds`].
    pub fn send_req(
        &mut self,
        now: Instant,
        peer: PeerAddr,
        params: &ReqParams,
    ) -> Result<IbCmId, IbCmError> {
        // Check this first, so that we don't send a request for an ID that cannot be stored.
        self.make_room()?;
        let id = self.new_id();
        let transaction = self.new_transaction();
        let (transport, extended_transport) = transport_of(params.qp_type);
        let req = ReqMsg {
            local_comm_id: id.0,
            vendor_id: Bits::truncate(params.ece.vendor_id),
            service_id: params.service_id,
            ca_guid: self.config.ca_guid,
            qkey: 0,
            qpn: params.local_qpn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            local_eecn: Bits::default(),
            remote_eecn: Bits::default(),
            remote_cm_timeout: params.remote_cm_timeout,
            transport,
            flow_control: params.flow_control,
            starting_psn: params.starting_psn,
            local_cm_timeout: params.local_cm_timeout,
            retry_count: params.retry_count,
            pkey: params.pkey,
            path_mtu: Some(params.path_mtu),
            rdc_exists: false,
            rnr_retry_count: params.rnr_retry_count,
            max_cm_retries: params.max_cm_retries,
            srq: params.srq,
            extended_transport,
            vendor_options: params.ece.options,
            primary: params.primary,
            alternate: params.alternate,
            private_data: params.private_data,
        };
        // Add the connection before sending the REQ, so that it can be found when we receive the
        // reply.
        let mut conn = Conn::new(
            CmState::ReqSent,
            peer.to_canonical(),
            params.service_id,
            transaction,
        );
        conn.qp_type = params.qp_type;
        conn.local_qpn = params.local_qpn;
        // Use the same interval and retry count for the peer as specified in the REQ.
        conn.interval = self.config.interval(params.remote_cm_timeout);
        conn.max_retries = params.max_cm_retries.value() as u8;
        conn.timewait = params
            .primary
            .ack_timeout
            .duration()
            .min(self.config.max_timewait);
        conn.traffic_class = params.primary.traffic_class;
        // The stored request also contains values for our QP that should not be sent to the peer.
        conn.req = Some(Box::new(req));
        self.insert(id, conn);
        let req = match params.qp_type {
            // The responder will not send any requests, so the initiator doesn't need resources for
            // them (same as `cm_format_req` in Linux).
            QpType::XrcIni => ReqMsg {
                responder_resources: 0,
                retry_count: Bits::default(),
                rnr_retry_count: Bits::default(),
                srq: false,
                ..req
            },
            _ => req,
        };
        self.send_request(now, id, transaction, &CmMessage::Req(req));
        Ok(id)
    }

    /// Passive side: accepts the connection.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `ReqRcvd` or `MraReqSent`.
    pub fn send_rep(
        &mut self,
        now: Instant,
        id: IbCmId,
        params: &RepParams,
    ) -> Result<(), IbCmError> {
        let conn = self.in_state(id, &[CmState::ReqRcvd, CmState::MraReqSent])?;
        let rep = RepMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            qkey: 0,
            qpn: params.local_qpn,
            vendor_id: Bits::truncate(params.ece.vendor_id),
            eecn: Bits::default(),
            vendor_options: params.ece.options,
            starting_psn: params.starting_psn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            target_ack_delay: params.target_ack_delay,
            failover: params.failover,
            flow_control: params.flow_control,
            rnr_retry_count: params.rnr_retry_count,
            srq: params.srq,
            ca_guid: self.config.ca_guid,
            private_data: params.private_data,
        };
        let rep = CmMessage::Rep(match conn.qp_type {
            // The number is sent in the field used for the context of a reliable datagram service,
            // and this side will not send any requests (same as `cm_format_rep` in Linux).
            QpType::XrcTgt => RepMsg {
                qpn: Qpn::default(),
                eecn: Bits::truncate(params.local_qpn.value()),
                initiator_depth: 0,
                flow_control: false,
                srq: true,
                ..rep
            },
            _ => rep,
        });
        let transaction = conn.transaction;
        self.become_state(id, CmState::RepSent);
        let conn = self.conns.get_mut(&id).expect("identifier exists");
        conn.local_qpn = params.local_qpn;
        // Keep the REP: if we receive a duplicate REQ, the REP was lost and must be sent again.
        conn.req = None;
        conn.last_response = Some(Box::new(rep.emit(transaction)));
        // This must be called first, since the first interval is limited by the lifetime of
        // a half-open connection.
        let longest = self.config.max_half_open;
        self.listeners.add_rep(now, id, conn, longest);
        self.send_request(now, id, transaction, &rep);
        Ok(())
    }

    /// Active side: the QP is ready and the connection is established.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `RepRcvd` or `MraRepSent`.
    pub fn send_rtu(
        &mut self,
        id: IbCmId,
        private_data: PrivateData<224>,
    ) -> Result<(), IbCmError> {
        let conn = self.in_state(id, &[CmState::RepRcvd, CmState::MraRepSent])?;
        let rtu = PairMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            private_data,
        };
        let transaction = conn.transaction;
        self.become_state(id, CmState::Established);
        self.send_response(id, transaction, &CmMessage::Rtu(rtu));
        Ok(())
    }

    /// Passive side: a message was received by the QP, so the RTU was either lost or delayed. The
    /// connection is now established, and the RTU will not generate an event.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `RepSent` or `MraRepRcvd`.
    pub fn establish(&mut self, now: Instant, id: IbCmId) -> Result<(), IbCmError> {
        self.in_state(id, &[CmState::RepSent, CmState::MraRepRcvd])?;
        self.clear_pending(id);
        self.become_state(id, CmState::Established);
        self.end_superseded(now, id);
        Ok(())
    }

    /// Notifies the peer that the response to its REQ, REP or LAP can take up to `service_timeout`.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `ReqRcvd`, `RepRcvd` or `LapRcvd`.
    pub fn send_mra(
        &mut self,
        id: IbCmId,
        service_timeout: CmTimeout,
        private_data: PrivateData<222>,
    ) -> Result<(), IbCmError> {
        let conn = self.in_state(id, &[CmState::ReqRcvd, CmState::RepRcvd, CmState::LapRcvd])?;
        // An MRA extends the timeout of the message being resent by the peer, so it must specify
        // this message.
        let (next, message) = match conn.state {
            CmState::ReqRcvd => (CmState::MraReqSent, MraOf::Req),
            CmState::RepRcvd => (CmState::MraRepSent, MraOf::Rep),
            _ => (CmState::MraLapSent, MraOf::Lap),
        };
        let remote_comm_id = conn.remote();
        let mra = MraMsg {
            local_comm_id: id.0,
            remote_comm_id,
            message,
            service_timeout,
            private_data,
        };
        let transaction = conn.transaction;
        self.become_state(id, next);
        self.send_response(id, transaction, &CmMessage::Mra(mra));
        Ok(())
    }

    /// Rejects a REQ or REP, or cancels a REP. The ID is no longer valid for the user, but the CM
    /// keeps it for a while to be able to send the REJ again.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no message to reject.
    pub fn send_rej(
        &mut self,
        now: Instant,
        id: IbCmId,
        reason: RejReason,
        info: AdditionalInfo,
        private_data: PrivateData<148>,
    ) -> Result<(), IbCmError> {
        let conn = self.conn(id)?;
        let message = match conn.state {
            CmState::ReqRcvd | CmState::MraReqSent => RejOf::Req,
            CmState::RepRcvd | CmState::MraRepSent => RejOf::Rep,
            CmState::RepSent | CmState::MraRepRcvd => RejOf::NoMessage,
            state => return Err(IbCmError::State { state }),
        };
        let remote_comm_id = conn.remote();
        let rej = RejMsg {
            local_comm_id: id.0,
            remote_comm_id,
            message,
            reason,
            info,
            private_data,
        };
        let transaction = conn.transaction;
        // Long enough for the peer to send its message once more.
        let repeat_interval = conn.req.as_ref().map_or(conn.interval, |req| {
            self.config.interval(req.remote_cm_timeout)
        });
        let time = (2 * repeat_interval)
            .max(conn.timewait)
            .min(self.config.max_timewait);
        self.send_response(id, transaction, &CmMessage::Rej(rej));
        self.enter_timewait_for(now, id, time);
        self.release(id);
        Ok(())
    }

    /// Requests the peer to close the connection.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection is not established.
    pub fn send_dreq(
        &mut self,
        now: Instant,
        id: IbCmId,
        private_data: PrivateData<220>,
    ) -> Result<(), IbCmError> {
        let dreq = self.dreq(id, private_data)?;
        // A DREQ starts a new transaction. The DREP uses the same transaction ID.
        let transaction = self.new_transaction();
        self.become_state(id, CmState::DreqSent);
        self.send_request(now, id, transaction, &dreq);
        Ok(())
    }

    fn dreq(&self, id: IbCmId, private_data: PrivateData<220>) -> Result<CmMessage, IbCmError> {
        let conn = self.conn(id)?;
        if !conn.state.is_connected() {
            return Err(IbCmError::State { state: conn.state });
        }
        Ok(CmMessage::Dreq(DreqMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            remote_qpn: conn.remote_qpn.expect("connected"),
            private_data,
        }))
    }

    /// Starts to record connections for [`Cm::poll_connection`].
    pub fn watch_connections(&mut self) {
        self.changed.get_or_insert_default();
    }

    /// Returns the local ID of the next connection that was established or closed. If it is
    /// established, also returns the DREQ that closes it, and its destination. Another process can
    /// send the DREQ when this one is killed.
    pub fn poll_connection(&mut self) -> Option<(CommId, Option<(PeerAddr, Mad)>)> {
        let id = self.changed.as_mut()?.pop_front()?;
        let dreq = self.dreq(id, PrivateData::default()).ok();
        let dreq = dreq.map(|dreq| {
            let mad = dreq.emit(self.new_transaction());
            (self.conns[&id].route().peer, mad)
        });
        Some((id.0, dreq))
    }

    /// Responds to a DREQ from the peer and enters timewait.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `DreqRcvd`.
    pub fn send_drep(
        &mut self,
        now: Instant,
        id: IbCmId,
        private_data: PrivateData<224>,
    ) -> Result<(), IbCmError> {
        let conn = self.in_state(id, &[CmState::DreqRcvd])?;
        let drep = PairMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            private_data,
        };
        let transaction = conn.transaction;
        self.send_response(id, transaction, &CmMessage::Drep(drep));
        self.enter_timewait(now, id);
        Ok(())
    }

    /// Releases an ID in any state: stops listening, cancels or rejects a request, or closes a
    /// connection. There will be no more events, but the CM keeps the ID until the peer has been
    /// notified.
    ///
    /// # Errors
    ///
    /// [`IbCmError::NoSuchId`].
    pub fn destroy(&mut self, now: Instant, id: IbCmId) -> Result<(), IbCmError> {
        // Half-open connections of this listener still belong to the user, who may respond to them
        // later.
        if self.listeners.by_id.remove(&id).is_some() {
            return Ok(());
        }
        // Use the message that the peer expects in this state: a REJ before the connection is
        // established, and a DREQ after that.
        match self.conn(id)?.state {
            // We haven't received a REP, so the peer may not have received our REQ and we don't
            // know its ID.
            CmState::ReqSent | CmState::MraReqRcvd => {
                self.send_timeout_rej(id);
                self.free(id);
                return Ok(());
            }
            CmState::ReqRcvd
            | CmState::MraReqSent
            | CmState::RepRcvd
            | CmState::MraRepSent
            | CmState::RepSent
            | CmState::MraRepRcvd => {
                let (info, data) = (AdditionalInfo::default(), PrivateData::default());
                self.send_rej(now, id, RejReason::ConsumerDefined, info, data)?;
            }
            // We still need to respond to the peer's DREQ, or it would be sent again.
            CmState::DreqRcvd => self.send_drep(now, id, PrivateData::default())?,
            CmState::SidrReqSent => {
                self.free(id);
                return Ok(());
            }
            CmState::SidrReqRcvd => {
                let status = SidrStatus::Reject;
                let (info, private_data) = (AdditionalInfo::default(), PrivateData::default());
                let params = SidrRepParams {
                    status,
                    qpn: Qpn::default(),
                    qkey: 0,
                    info,
                    private_data,
                };
                return self.send_sidr_rep(id, &params);
            }
            state if state.is_connected() => self.send_dreq(now, id, PrivateData::default())?,
            _ => {}
        }
        // The CM keeps this for retransmissions until timewait is over or the space is needed.
        self.release(id);
        Ok(())
    }

    fn in_state(&self, id: IbCmId, states: &[CmState]) -> Result<&Conn, IbCmError> {
        let conn = self.conn(id)?;
        if states.contains(&conn.state) {
            Ok(conn)
        } else {
            Err(IbCmError::State { state: conn.state })
        }
    }
}
