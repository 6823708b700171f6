//! The user's calls for connections.

use std::time::Instant;

use super::conn::Conn;
use super::{Cm, CmState, IbCmError, IbCmId, PeerAddr, RepParams, ReqParams, SidrRepParams};
use crate::verbs::QpType;
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmMessage, CmTimeout, DreqMsg, MraMsg, MraOf, PairMsg, PrivateData,
    RejMsg, RejOf, RejReason, RepMsg, ReqMsg, SidrStatus, transport_of,
};
use crate::wire::ids::Qpn;

impl Cm {
    /// Ask `peer` for a connection.
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
        // Room first: nothing leaves for an identifier that cannot be kept.
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
        // The connection is entered before its REQ leaves, so that an answer finds it.
        let mut conn = Conn::new(
            CmState::ReqSent,
            peer.to_canonical(),
            params.service_id,
            transaction,
        );
        conn.qp_type = params.qp_type;
        conn.local_qpn = params.local_qpn;
        // How long, and how often, the peer is asked is what the REQ itself says to it.
        conn.interval = self.interval(params.remote_cm_timeout);
        conn.max_retries = params.max_cm_retries.value() as u8;
        conn.timewait = params
            .primary
            .ack_timeout
            .duration()
            .min(self.config.max_timewait);
        conn.traffic_class = params.primary.traffic_class;
        // The kept request has what our queue pair will need, which is not all for the peer to know.
        conn.req = Some(Box::new(req));
        self.insert(id, conn);
        let req = match params.qp_type {
            // The responder's end sends no requests, and answers none of the initiator's (as Linux:
            // `cm_format_req`).
            QpType::XrcIni => ReqMsg {
                responder_resources: 0,
                retry_count: Bits::default(),
                rnr_retry_count: Bits::default(),
                srq: false,
                ..req
            },
            _ => req,
        };
        self.ask(now, id, transaction, &CmMessage::Req(req));
        Ok(id)
    }

    /// Passive: accept.
    ///
    /// # Errors
    ///
    /// States other than `ReqRcvd` and `MraReqSent`.
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
            // It is named where a reliable datagram service has its context, and has no requests of
            // its own (as Linux: `cm_format_rep`).
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
        let conn = self.known(id);
        conn.local_qpn = params.local_qpn;
        // The REP is kept: a repeated REQ means that it was lost, and is answered with it.
        conn.req = None;
        conn.answer = Some(Box::new(rep.emit(transaction)));
        // Before `ask`, whose first wait is bounded by the life of a half-open connection.
        self.note_rep(now, id);
        self.ask(now, id, transaction, &rep);
        Ok(())
    }

    /// Active: the queue pair is ready, the connection is established.
    ///
    /// # Errors
    ///
    /// States other than `RepRcvd` and `MraRepSent`.
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
        self.answer(id, transaction, &CmMessage::Rtu(rtu));
        Ok(())
    }

    /// Passive: a message arrived on the queue pair, so the RTU was lost or is
    /// late. The connection is established; the RTU will bring no event.
    ///
    /// # Errors
    ///
    /// States other than `RepSent` and `MraRepRcvd`.
    pub fn establish(&mut self, now: Instant, id: IbCmId) -> Result<(), IbCmError> {
        self.in_state(id, &[CmState::RepSent, CmState::MraRepRcvd])?;
        self.answered(id);
        self.become_state(id, CmState::Established);
        self.end_superseded(now, id);
        Ok(())
    }

    /// Notify the peer that the answer to its REQ, REP or LAP will take up to
    /// `service_timeout`.
    ///
    /// # Errors
    ///
    /// States other than `ReqRcvd`, `RepRcvd` and `LapRcvd`.
    pub fn send_mra(
        &mut self,
        id: IbCmId,
        service_timeout: CmTimeout,
        private_data: PrivateData<222>,
    ) -> Result<(), IbCmError> {
        let conn = self.in_state(id, &[CmState::ReqRcvd, CmState::RepRcvd, CmState::LapRcvd])?;
        // An MRA buys time from the message that the peer repeats, so it names that message.
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
        self.answer(id, transaction, &CmMessage::Mra(mra));
        Ok(())
    }

    /// Refuse a REQ or a REP, or take a REP back. For the user the identifier is
    /// gone; the CM keeps it a while to repeat the refusal.
    ///
    /// # Errors
    ///
    /// States without a message to refuse.
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
        // Long enough for the peer to ask once more.
        let asks_again = conn
            .req
            .as_ref()
            .map_or(conn.interval, |req| self.interval(req.remote_cm_timeout));
        let time = (2 * asks_again)
            .max(conn.timewait)
            .min(self.config.max_timewait);
        self.answer(id, transaction, &CmMessage::Rej(rej));
        self.enter_timewait_for(now, id, time);
        self.release(id);
        Ok(())
    }

    /// Ask the peer to end the connection.
    ///
    /// # Errors
    ///
    /// States that are not connected.
    pub fn send_dreq(
        &mut self,
        now: Instant,
        id: IbCmId,
        private_data: PrivateData<220>,
    ) -> Result<(), IbCmError> {
        let conn = self.conn(id)?;
        if !conn.state.is_connected() {
            return Err(IbCmError::State { state: conn.state });
        }
        let dreq = CmMessage::Dreq(DreqMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            remote_qpn: conn.remote_qpn.expect("connected"),
            private_data,
        });
        // A DREQ begins a transaction of its own, whose number the DREP repeats.
        let transaction = self.new_transaction();
        self.become_state(id, CmState::DreqSent);
        self.ask(now, id, transaction, &dreq);
        Ok(())
    }

    /// Agree to the peer's DREQ; timewait begins.
    ///
    /// # Errors
    ///
    /// States other than `DreqRcvd`.
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
        self.answer(id, transaction, &CmMessage::Drep(drep));
        self.enter_timewait(now, id);
        Ok(())
    }

    /// Release an identifier in any state: stop listening, take back or
    /// refuse a request, end a connection. It brings no further events; the CM
    /// keeps it as long as the peer must be notified.
    ///
    /// # Errors
    ///
    /// [`IbCmError::NoSuchId`].
    pub fn destroy(&mut self, now: Instant, id: IbCmId) -> Result<(), IbCmError> {
        // The listener's half-open connections stay the user's, who may still answer them.
        if self.listeners.remove(&id).is_some() {
            return Ok(());
        }
        // Every state ends by the message that the peer understands in it: a REJ before the
        // connection is established, a DREQ after.
        match self.conn(id)?.state {
            // No REP has come, so the peer may not know our REQ, and we know no id of the peer's.
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
            // The peer's DREQ is still unanswered, and would be repeated.
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
        // The CM keeps what it may have to repeat, until timewait ends or the place is needed.
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
