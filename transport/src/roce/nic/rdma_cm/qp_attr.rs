//! Attributes of an identifier's queue pair, by which it goes through its states: for the queue pairs
//! that the device moves itself, and for those that their owners move.

use std::net::IpAddr;

use chacha20::rand_core::Rng;

use super::{Id, IdState};
use crate::roce::nic::{Nic, NicLimits};
use crate::verbs::{
    Access, AhAttr, CmError, CmId, DATAGRAM_QKEY, Gid, PathMigState, QpAttr, QpId, QpState, QpType,
    VerbsError,
};
use crate::wire::Psn;

/// Bounds for the ACK timeout that a peer proposes.
pub(super) const ACK_TIMEOUTS: std::ops::RangeInclusive<u8> = 14..=21;
/// Delay that our RNR NAKs ask for: 0.64 ms (IBTA table 45).
const MIN_RNR_TIMER: u8 = 12;

/// Address of a peer's queue pairs.
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
            // What a peer may do with a region, the region says; the connection forbids nothing.
            access: (!is_datagram).then_some(Access::REMOTE),
            qkey: is_datagram.then_some(DATAGRAM_QKEY),
            ..QpAttr::default()
        }
    }

    /// READs and atomics that the queue pair holds, and sends, at once.
    fn depths(&self, limits: &NicLimits) -> Option<(u8, u8)> {
        let said = self.said.as_deref()?;
        let (holds, sends) = self
            .depths
            .unwrap_or((said.initiator_depth, said.responder_resources));
        Some((
            holds.min(limits.max_qp_rd_atom),
            // Never more than the peer holds: it would take one more for an invalid request.
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
        let answers = matches!(self.qp_type, QpType::Rc | QpType::XrcTgt);
        // The peer has chosen by its request what both sides use, unless we were asked otherwise.
        let class = self
            .options
            .traffic_class
            .unwrap_or(said.path.traffic_class);
        Some(QpAttr {
            ah: Some(way_to(self.peer?.ip(), class)),
            path_mtu: Some(said.path_mtu),
            dest_qp: Some(said.dest_qpn.value()),
            rq_psn: Some(self.rq_psn.value()),
            max_dest_rd_atomic: answers.then_some(holds),
            min_rnr_timer: answers.then_some(MIN_RNR_TIMER),
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
        // What a peer offers in its request counts only where such paths are allowed.
        let is_allowed = self.state != IdState::Requested || self.options.alternate_paths;
        let alternate = self.alternate.filter(|_| is_allowed);
        let to_rts = QpAttr {
            sq_psn: Some(said.sq_psn.value()),
            alt_path: alternate,
            path_mig_state: alternate.map(|_| PathMigState::Rearm),
            ..to_rts
        };
        // Nothing comes back to an unreliable connection, and what an extended one's receiving end
        // sends are answers.
        let asks = match self.qp_type {
            QpType::Uc => return Some(to_rts),
            kind => kind != QpType::XrcTgt,
        };
        // The peer's proposal in bounds: too short, and a busy peer would be taken for a dead one;
        // too long, and a dead one for a busy one. Its owner may know better.
        let proposed = said.path.ack_timeout.exponent();
        let proposed = proposed.clamp(*ACK_TIMEOUTS.start(), *ACK_TIMEOUTS.end());
        Some(QpAttr {
            max_rd_atomic: asks.then_some(sends),
            timeout: Some(self.options.ack_timeout.unwrap_or(proposed)),
            retry_cnt: asks.then_some(said.retry_count.value() as u8),
            rnr_retry: asks.then_some(said.rnr_retry_count.value() as u8),
            ..to_rts
        })
    }
}

#[allow(missing_docs, reason = "a call of the RDMA CM trait, documented there")]
impl Nic {
    pub fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError> {
        let unknown = CmError::InvalidState("init_qp_attr");
        let entry = self.cm.ids.get(id).map_err(|_| unknown)?;
        // It has no device before.
        if entry.local.is_none() {
            return Err(unknown);
        }
        let limits = &self.config().limits;
        match state {
            QpState::Init => Ok(entry.to_init()),
            QpState::Rtr => entry.to_rtr(limits).ok_or(unknown),
            QpState::Rts => entry.to_rts(limits).ok_or(unknown),
            _ => Err(VerbsError::InvalidParameter("queue pair state").into()),
        }
    }

    /// Takes a queue pair to a state as its identifier says.
    pub(super) fn move_qp(&mut self, id: CmId, qp: QpId, state: QpState) -> Result<(), CmError> {
        let attr = self.init_qp_attr(id, state)?;
        Ok(self.modify_qp(qp, &attr)?)
    }

    /// Takes a queue pair from INIT to RTS. Both steps at once, since the peer's message has the
    /// attributes of both.
    pub(super) fn connect_qp(&mut self, id: CmId, qp: QpId) -> Result<(), CmError> {
        self.move_qp(id, qp, QpState::Rtr)?;
        self.move_qp(id, qp, QpState::Rts)
    }

    /// A random PSN, so that a stranger cannot guess one in the window.
    pub(super) fn new_psn(&mut self) -> Psn {
        Psn::new(self.random().next_u32())
    }
}
