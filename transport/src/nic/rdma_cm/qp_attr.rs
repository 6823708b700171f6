//! Attributes used to change the state of an identifier's queue pair, no matter if it is managed by
//! the device or by the application.

use std::net::IpAddr;

use chacha20::rand_core::Rng;

use super::{CmAgent, Id, IdState};
use crate::nic::{Device, NicLimits};
use crate::verbs::{
    Access, AhAttr, CmError, CmId, DATAGRAM_QKEY, Gid, PathMigState, QpAttr, QpId, QpState, QpType,
    VerbsError,
};
use crate::wire::Psn;

/// Valid range for the ACK timeout proposed by a peer.
pub(super) const ACK_TIMEOUTS: std::ops::RangeInclusive<u8> = 14..=21;
/// Delay used in our RNR NAKs: 0.64 ms (IBTA table 45).
const MIN_RNR_TIMER: u8 = 12;

/// Returns the address vector for the QPs of a peer.
pub(super) fn way_to(peer: IpAddr, traffic_class: u8) -> AhAttr {
    AhAttr {
        traffic_class,
        ..AhAttr::new(Gid::from(peer))
    }
}

impl Id {
    fn to_init(&self) -> QpAttr {
        let is_datagram = self.qp_type == QpType::Ud;
        QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            // Access rights are set per region, so there are no restrictions for the connection.
            access: (!is_datagram).then_some(Access::REMOTE),
            qkey: is_datagram.then_some(DATAGRAM_QKEY),
            ..QpAttr::default()
        }
    }

    /// Returns the maximum number of incoming and outgoing READs and atomics.
    fn depths(&self, limits: &NicLimits) -> Option<(u8, u8)> {
        let said = self.said.as_deref()?;
        let (holds, sends) = self
            .depths
            .unwrap_or((said.initiator_depth, said.responder_resources));
        Some((
            holds.min(limits.max_qp_rd_atom),
            // This must not exceed the limit of the peer, which would treat an additional request
            // as invalid.
            sends
                .min(limits.max_qp_init_rd_atom)
                .min(said.responder_resources),
        ))
    }

    fn to_rtr(&self, limits: &NicLimits) -> Option<QpAttr> {
        let to_rtr = QpAttr::to(QpState::Rtr);
        if self.qp_type == QpType::Ud {
            return Some(to_rtr);
        }
        let (said, (holds, _)) = (self.said.as_deref()?, self.depths(limits)?);
        let is_responder = matches!(self.qp_type, QpType::Rc | QpType::XrcTgt);
        // By default, both sides use the value from the active side's request.
        let class = self
            .options
            .traffic_class
            .unwrap_or(said.path.traffic_class);
        Some(QpAttr {
            ah: Some(way_to(self.peer?.ip(), class)),
            path_mtu: Some(said.path_mtu),
            dest_qp: Some(said.dest_qpn.value()),
            rq_psn: Some(self.rq_psn.value()),
            max_dest_rd_atomic: is_responder.then_some(holds),
            min_rnr_timer: is_responder.then_some(MIN_RNR_TIMER),
            ..to_rtr
        })
    }

    fn to_rts(&self, limits: &NicLimits) -> Option<QpAttr> {
        let to_rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(0),
            ..QpAttr::default()
        };
        if self.qp_type == QpType::Ud {
            return Some(to_rts);
        }
        let (said, (_, sends)) = (self.said.as_deref()?, self.depths(limits)?);
        // The path from a peer's request is only used if alternate paths are allowed.
        let is_allowed = self.state != IdState::Requested || self.options.alternate_paths;
        let alternate = self.alternate.filter(|_| is_allowed);
        let to_rts = QpAttr {
            sq_psn: Some(said.sq_psn.value()),
            alt_path: alternate,
            path_mig_state: alternate.map(|_| PathMigState::Rearm),
            ..to_rts
        };
        // An unreliable connection doesn't use responses, and an extended connection's target only
        // sends responses.
        let is_requester = match self.qp_type {
            QpType::Uc => return Some(to_rts),
            kind => kind != QpType::XrcTgt,
        };
        // Limit the value proposed by the peer: if it is too short, a busy peer would be considered
        // dead; if it is too long, it takes too long to detect a dead peer. The application can
        // override this.
        let proposed = said.path.ack_timeout.exponent();
        let proposed = proposed.clamp(*ACK_TIMEOUTS.start(), *ACK_TIMEOUTS.end());
        Some(QpAttr {
            max_rd_atomic: is_requester.then_some(sends),
            timeout: Some(self.options.ack_timeout.unwrap_or(proposed)),
            retry_cnt: is_requester.then_some(said.retry_count.value() as u8),
            rnr_retry: is_requester.then_some(said.rnr_retry_count.value() as u8),
            ..to_rts
        })
    }
}

impl CmAgent {
    pub(crate) fn init_qp_attr(
        &self,
        device: &Device,
        id: CmId,
        state: QpState,
    ) -> Result<QpAttr, CmError> {
        let unknown = CmError::InvalidState("init_qp_attr");
        let entry = self.ids.get(id).map_err(|_| unknown)?;
        // Before this, the id is not assigned to a device.
        if entry.local.is_none() {
            return Err(unknown);
        }
        let limits = &device.config().limits;
        match state {
            QpState::Init => Ok(entry.to_init()),
            QpState::Rtr => entry.to_rtr(limits).ok_or(unknown),
            QpState::Rts => entry.to_rts(limits).ok_or(unknown),
            _ => Err(VerbsError::InvalidParameter("queue pair state").into()),
        }
    }

    /// Changes the state of a QP using the attributes of its id.
    pub(super) fn move_qp(
        &mut self,
        device: &mut Device,
        id: CmId,
        qp: QpId,
        state: QpState,
    ) -> Result<(), CmError> {
        let attr = self.init_qp_attr(device, id, state)?;
        Ok(device.modify_qp(qp, &attr)?)
    }

    /// Moves a QP from INIT to RTS. The peer's message contains the attributes for both steps.
    pub(super) fn connect_qp(
        &mut self,
        device: &mut Device,
        id: CmId,
        qp: QpId,
    ) -> Result<(), CmError> {
        self.move_qp(device, id, qp, QpState::Rtr)?;
        self.move_qp(device, id, qp, QpState::Rts)
    }
}

/// Returns a random PSN, so that strangers can't guess which PSNs are currently valid.
pub(super) fn new_psn(device: &mut Device) -> Psn {
    Psn::new(device.random.next_u32())
}
