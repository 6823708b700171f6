//! Alternate paths (LAP, APR) and service ID resolution (SIDR).

use std::time::Instant;

use super::conn::Conn;
use super::event::{SidrRepParams, SidrReqParams};
use super::table::is_message;
use super::{Cm, CmState, IbCmError, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{
    AdditionalInfo, AprMsg, AprStatus, Bits, CmAttribute, CmMessage, CmPath, CmTimeout, LapMsg,
    PrivateData, SidrRepMsg, SidrReqMsg, SidrStatus,
};
use crate::wire::ids::Qpn;
use crate::wire::mad::TransactionId;

impl Cm {
    /// Proposes a new alternate path to the peer.
    ///
    /// Currently not used.
    ///
    /// # Errors
    ///
    /// Returns [`IbCmError::AlternatePaths`] if not enabled, or an error unless the state is
    /// `Established`.
    pub fn send_lap(
        &mut self,
        now: Instant,
        id: IbCmId,
        alternate: CmPath,
        private_data: PrivateData<168>,
    ) -> Result<(), IbCmError> {
        let conn = self.conn(id)?;
        if !self.config.alternate_paths {
            return Err(IbCmError::AlternatePaths);
        }
        if conn.state != CmState::Established {
            return Err(IbCmError::State { state: conn.state });
        }
        let message = CmMessage::Lap(LapMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            remote_qpn: conn.remote_qpn.expect("connected"),
            remote_cm_timeout: CmTimeout::at_least(conn.interval),
            alternate,
            private_data,
        });
        let transaction = self.new_transaction();
        self.become_state(id, CmState::LapSent);
        self.send_request(now, id, transaction, &message);
        Ok(())
    }

    /// Responds to a LAP.
    ///
    /// Currently not used.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `LapRcvd` or `MraLapSent`.
    pub fn send_apr(
        &mut self,
        id: IbCmId,
        status: AprStatus,
        info: AdditionalInfo,
        private_data: PrivateData<148>,
    ) -> Result<(), IbCmError> {
        let conn = self.conn(id)?;
        if !matches!(conn.state, CmState::LapRcvd | CmState::MraLapSent) {
            return Err(IbCmError::State { state: conn.state });
        }
        let apr = AprMsg {
            local_comm_id: id.0,
            remote_comm_id: conn.remote(),
            status,
            info,
            private_data,
        };
        let transaction = conn.transaction;
        self.become_state(id, CmState::Established);
        self.send_response(id, transaction, &CmMessage::Apr(apr));
        Ok(())
    }

    fn refuse_lap(
        &mut self,
        to: PeerAddr,
        transaction: TransactionId,
        lap: &LapMsg,
        status: AprStatus,
    ) {
        self.counters.refused += 1;
        let apr = CmMessage::Apr(AprMsg {
            local_comm_id: lap.remote_comm_id,
            remote_comm_id: lap.local_comm_id,
            status,
            info: AdditionalInfo::default(),
            private_data: PrivateData::default(),
        });
        self.send(to, apr.emit(transaction));
    }

    pub(super) fn handle_lap(&mut self, from: PeerAddr, transaction: TransactionId, lap: &LapMsg) {
        // The connection doesn't exist here. We reject the message so that the peer stops sending
        // it.
        if !self.conns.contains_key(&IbCmId(lap.remote_comm_id)) {
            return self.refuse_lap(from, transaction, lap, AprStatus::InvalidCommId);
        }
        let Some((id, state)) = self.addressed(from, lap.remote_comm_id, lap.local_comm_id) else {
            return;
        };
        if !state.is_connected() {
            return self.illegal();
        }
        if !self.config.alternate_paths {
            return self.refuse_lap(from, transaction, lap, AprStatus::Unsupported);
        }
        if self.conns[&id].local_qpn != lap.remote_qpn {
            return self.refuse_lap(from, transaction, lap, AprStatus::InvalidQpnEecn);
        }
        let conn = &self.conns[&id];
        // Each LAP starts a new transaction, so the ID can be used to detect duplicates.
        let is_repeated = conn.transaction == transaction;
        let has_apr = conn
            .last_response
            .as_deref()
            .is_some_and(|mad| is_message(mad, CmAttribute::Apr));
        match state {
            CmState::Established if is_repeated && has_apr => self.repeat_response(id),
            CmState::Established => {
                self.conn_mut(id).transaction = transaction;
                self.become_state(id, CmState::LapRcvd);
                self.report(
                    id,
                    IbCmEventKind::LapReceived {
                        lap: Box::new(*lap),
                    },
                );
            }
            CmState::MraLapSent if is_repeated => self.repeat_response(id),
            CmState::LapRcvd if is_repeated => self.counters.duplicates += 1,
            // Both sides sent a LAP at the same time, so each will reject it.
            CmState::LapSent | CmState::MraLapRcvd => {
                self.refuse_lap(from, transaction, lap, AprStatus::Reject);
            }
            _ => self.illegal(),
        }
    }

    pub(super) fn handle_apr(&mut self, from: PeerAddr, apr: &AprMsg) {
        let Some((id, state)) = self.addressed(from, apr.remote_comm_id, apr.local_comm_id) else {
            return;
        };
        if !matches!(state, CmState::LapSent | CmState::MraLapRcvd) {
            return self.illegal();
        }
        self.clear_pending(id);
        self.become_state(id, CmState::Established);
        let event = IbCmEventKind::AprReceived {
            status: apr.status,
            info: Box::new(apr.info),
            private_data: Box::new(apr.private_data),
        };
        self.report(id, event);
    }

    /// Requests the QP number for a service ID from a peer.
    ///
    /// # Errors
    ///
    /// [`IbCmError::TooManyIds`].
    pub fn send_sidr_req(
        &mut self,
        now: Instant,
        peer: PeerAddr,
        params: &SidrReqParams,
    ) -> Result<IbCmId, IbCmError> {
        self.make_room()?;
        let id = self.new_id();
        let transaction = self.new_transaction();
        let mut conn = Conn::new(
            CmState::SidrReqSent,
            peer.to_canonical(),
            params.service_id,
            transaction,
        );
        conn.traffic_class = params.traffic_class;
        conn.interval = self.config.interval(params.timeout);
        conn.max_retries = params.max_cm_retries.value() as u8;
        self.insert(id, conn);
        let message = CmMessage::SidrReq(SidrReqMsg {
            request_id: id.0,
            pkey: params.pkey,
            service_id: params.service_id,
            private_data: params.private_data,
        });
        self.send_request(now, id, transaction, &message);
        Ok(id)
    }

    /// Responds to a SIDR_REQ and removes the ID.
    ///
    /// # Errors
    ///
    /// Returns an error unless the state is `SidrReqRcvd`.
    pub fn send_sidr_rep(&mut self, id: IbCmId, params: &SidrRepParams) -> Result<(), IbCmError> {
        let conn = self.conn(id)?;
        if conn.state != CmState::SidrReqRcvd {
            return Err(IbCmError::State { state: conn.state });
        }
        let message = CmMessage::SidrRep(SidrRepMsg {
            request_id: conn.remote(),
            status: params.status,
            info: params.info,
            vendor_id: Bits::default(),
            qpn: params.qpn,
            service_id: conn.service_id,
            qkey: params.qkey,
            private_data: params.private_data,
        });
        let (peer, transaction) = (conn.peer, conn.transaction);
        // We don't store the response: a duplicate SIDR_REQ will create a new event and a new
        // response.
        self.send(peer, message.emit(transaction));
        self.free_sidr(id);
        Ok(())
    }

    fn free_sidr(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        self.peers.by_sidr.remove(&(conn.peer, conn.remote()));
        self.free(id);
    }

    pub(super) fn handle_sidr_req(
        &mut self,
        from: PeerAddr,
        transaction: TransactionId,
        req: &SidrReqMsg,
    ) {
        if self.peers.by_sidr.contains_key(&(from, req.request_id)) {
            // The user has not responded yet.
            self.counters.duplicates += 1;
            return;
        }
        let Some(listener) = self.listeners.find(req.service_id) else {
            self.counters.refused += 1;
            let message = CmMessage::SidrRep(SidrRepMsg {
                request_id: req.request_id,
                status: SidrStatus::Unsupported,
                info: AdditionalInfo::default(),
                vendor_id: Bits::default(),
                qpn: Qpn::default(),
                service_id: req.service_id,
                qkey: 0,
                private_data: PrivateData::default(),
            });
            return self.send(from, message.emit(transaction));
        };
        // The same as for a REQ, but without displacing any connections, since a dropped request
        // will be sent again.
        if !self.listeners.has_room_for(listener, from)
            || self.events.len() >= self.config.max_events
            || self.make_room().is_err()
        {
            self.counters.dropped += 1;
            return;
        }
        let id = self.new_id();
        let mut conn = Conn::new(CmState::SidrReqRcvd, from, req.service_id, transaction);
        conn.listener = Some(listener);
        conn.remote_id = Some(req.request_id);
        self.peers.by_sidr.insert((from, req.request_id), id);
        self.insert(id, conn);
        self.report(
            id,
            IbCmEventKind::SidrReqReceived {
                listener,
                peer: from,
                req: Box::new(*req),
            },
        );
    }

    pub(super) fn handle_sidr_rep(&mut self, from: PeerAddr, rep: &SidrRepMsg) {
        let id = IbCmId(rep.request_id);
        match self.conns.get(&id) {
            Some(conn) if conn.peer == from && conn.state == CmState::SidrReqSent => {
                self.report(
                    id,
                    IbCmEventKind::SidrRepReceived {
                        rep: Box::new(*rep),
                    },
                );
                self.free(id);
            }
            Some(_) => self.illegal(),
            // We sent the request twice, so there can be two responses.
            None => self.counters.duplicates += 1,
        }
    }
}
