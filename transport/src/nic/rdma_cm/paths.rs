//! Alternate paths of connections (IBTA 12.8), set by a request or by LAP and APR messages.
//!
//! ```text
//!   request with a path ──▶ reply: failover accepted ──▶ both queue pairs: loaded, REARM
//!   LAP ──▶ APR: success ──────────────────────────────▶ both queue pairs: loaded, REARM
//! ```
//!
//! The responding side loads the path before it sends its response, and the other side after
//! receiving it. The IB CM retransmits a LAP until there is a response, and responds to duplicates
//! with the same APR. Either side can send a LAP; if both do so at the same time, both will be
//! rejected.
//!
//! A path is rejected unless allowed for this identifier ([`CmOption::AlternatePaths`]). It
//! contains an address chosen by the peer which we will send packets to after a migration, and
//! there is no proof that the address belongs to the peer.
//!
//! Linux doesn't support this for RoCE: it ignores LAP messages, and its RDMA CM does not include
//! an alternate path in requests. Therefore, both devices need to use this implementation.
//!
//! [`CmOption::AlternatePaths`]: crate::verbs::CmOption::AlternatePaths

use super::qp_attr::ACK_TIMEOUTS;
use super::{CmAgent, IdState};
use crate::cm::IbCmId;
use crate::nic::{Device, Wire};
use crate::verbs::{
    AhAttr, AltPath, CmError, CmEventKind, CmId, Gid, PathMigState, QpAttr, QpId, QpType,
    VerbsError,
};
use crate::wire::cm_msg::{
    AdditionalInfo, AprStatus, CmPath, CmTimeout, Failover, LapMsg, PrivateData,
};

/// Creates attributes to load a path and rearm.
fn rearm(path: AltPath) -> QpAttr {
    QpAttr {
        alt_path: Some(path),
        path_mig_state: Some(PathMigState::Rearm),
        ..QpAttr::default()
    }
}

impl CmAgent {
    pub(crate) fn load_alternate_path(
        &mut self,
        device: &mut Device,
        id: CmId,
        path: &AltPath,
    ) -> Result<(), CmError> {
        const CALL: &str = "load_alternate_path";
        let entry = self.cm_id(id, CALL)?;
        // Only connections can be migrated (IBTA 17.2.8), not datagrams.
        if entry.qp_type == QpType::Ud {
            return Err(VerbsError::WrongQpType("alternate path").into());
        }
        match (entry.state, entry.qp, entry.ib) {
            (
                IdState::Idle | IdState::Bound | IdState::AddrResolved | IdState::RouteResolved,
                ..,
            ) => {
                check_path(device, path)?;
                self.cm_id(id, CALL)?.alternate = Some(*path);
                Ok(())
            }
            (IdState::Established, Some(qp), Some(ib)) => {
                device.plan_alternate(qp, &rearm(*path))?;
                let (now, proposed) = (device.now(), cm_path(device, path));
                let data = PrivateData::default();
                self.cm.send_lap(now, ib, proposed, data)?;
                self.cm_id(id, CALL)?.alternate = Some(*path);
                self.pump_cm(device);
                Ok(())
            }
            _ => Err(CmError::InvalidState(CALL)),
        }
    }
}

impl CmAgent {
    /// Returns whether to accept the alternate path of a request that is being accepted.
    pub(super) fn check_offered_path(&mut self, device: &mut Device, id: CmId) -> Failover {
        let Ok(entry) = self.ids.get(id) else {
            return Failover::Rejected;
        };
        let failover = match entry.alternate {
            None => return Failover::Accepted,
            Some(_) if !entry.options.alternate_paths => Failover::Unsupported,
            Some(path) => match check_path(device, &path) {
                Ok(()) => return Failover::Accepted,
                Err(_) => Failover::Rejected,
            },
        };
        if let Ok(entry) = self.ids.get_mut(id) {
            entry.alternate = None;
        }
        failover
    }

    /// Removes the alternate path of our request if it was not accepted by the peer.
    pub(super) fn check_accepted_path(&mut self, id: CmId, failover: Failover) {
        if failover != Failover::Accepted
            && let Ok(entry) = self.ids.get_mut(id)
        {
            entry.alternate = None;
        }
    }

    pub(super) fn on_lap(&mut self, device: &mut Device, id: CmId, ib: IbCmId, lap: &LapMsg) {
        let result = self.take_lap(device, id, lap);
        let status = result.err().unwrap_or(AprStatus::Success);
        let info = AdditionalInfo::default();
        // We don't need to respond if the connection has been closed since.
        let _ = self.cm.send_apr(ib, status, info, PrivateData::default());
        if let Ok(path) = result {
            self.report(id, CmEventKind::AlternatePath { path });
        }
    }

    /// Loads a path proposed by the peer, or returns the reason why it is rejected.
    fn take_lap(
        &mut self,
        device: &mut Device,
        id: CmId,
        lap: &LapMsg,
    ) -> Result<AltPath, AprStatus> {
        let entry = self.ids.get(id).map_err(|_| AprStatus::Reject)?;
        // If the application manages the QP, it would also have to load the path.
        let qp = entry.qp.filter(|_| entry.options.alternate_paths);
        let qp = qp.ok_or(AprStatus::Unsupported)?;
        if entry.state != IdState::Established {
            return Err(AprStatus::Reject);
        }
        let path = offered_path(device, &lap.alternate);
        let path = path.ok_or(AprStatus::InvalidGid)?;
        if is_current(device, qp, &path) {
            return Err(AprStatus::IsCurrent);
        }
        device.modify_qp(qp, &rearm(path)).map_err(|e| match e {
            VerbsError::InvalidParameter("destination address") => AprStatus::InvalidGid,
            VerbsError::Unsupported(_) => AprStatus::Unsupported,
            _ => AprStatus::Reject,
        })?;
        self.ids
            .get_mut(id)
            .map_err(|_| AprStatus::Reject)?
            .alternate = Some(path);
        Ok(path)
    }

    pub(super) fn on_apr(&mut self, device: &mut Device, id: CmId, status: AprStatus) {
        let Ok(entry) = self.ids.get(id) else {
            return;
        };
        let (Some(path), Some(qp)) = (entry.alternate, entry.qp) else {
            return;
        };
        if status != AprStatus::Success {
            return self.on_no_path(id, Some(status));
        }
        // Our QP may have failed since we sent the request.
        match device.modify_qp(qp, &rearm(path)) {
            Ok(()) => self.report(id, CmEventKind::AlternatePath { path }),
            Err(_) => self.on_no_path(id, None),
        }
    }

    /// Called if the peer has not accepted a path.
    pub(super) fn on_no_path(&mut self, id: CmId, status: Option<AprStatus>) {
        if let Ok(entry) = self.ids.get_mut(id) {
            entry.alternate = None;
        }
        let status = status.map(u8::from);
        self.report(id, CmEventKind::AlternatePathError { status });
    }
}

/// Checks a path for a QP that is not connected yet.
fn check_path(device: &Device, path: &AltPath) -> Result<(), VerbsError> {
    if device.config().wire == Wire::Links {
        return Err(VerbsError::Unsupported("alternate paths"));
    }
    if path.pkey_index != 0 {
        return Err(VerbsError::InvalidIndex(path.pkey_index));
    }
    if path.timeout > 31 {
        return Err(VerbsError::InvalidParameter("alternate timeout"));
    }
    device.port.reachable(&path.ah).map(drop)
}

/// Converts a path to the format used in our messages.
pub(super) fn cm_path(device: &Device, path: &AltPath) -> CmPath {
    let local = device.port.addrs()[usize::from(path.ah.sgid_index)].ip();
    CmPath {
        traffic_class: path.ah.traffic_class,
        ..CmPath::roce(local.into(), path.ah.dgid, CmTimeout::new(path.timeout))
    }
}

/// Converts a path from a message of the peer to our perspective. Returns `None` if the remote
/// address is not a local address of this device.
pub(super) fn offered_path(device: &Device, theirs: &CmPath) -> Option<AltPath> {
    let is_ours = |at: &std::net::SocketAddr| Gid::from(at.ip()) == theirs.remote_gid;
    let index = device.port.addrs().iter().position(is_ours)?;
    let timeout = theirs.ack_timeout.exponent();
    Some(AltPath {
        ah: AhAttr {
            // The GID table is smaller than this.
            sgid_index: index as u16,
            traffic_class: theirs.traffic_class,
            ..AhAttr::new(theirs.local_gid)
        },
        pkey_index: 0,
        // Same as for the path of the request.
        timeout: timeout.clamp(*ACK_TIMEOUTS.start(), *ACK_TIMEOUTS.end()),
    })
}

/// Returns whether this is the current path of a QP.
fn is_current(device: &Device, qp: QpId, path: &AltPath) -> bool {
    let now = device.query_qp(qp).ok().and_then(|attr| attr.ah);
    now.is_some_and(|ah| (ah.dgid, ah.sgid_index) == (path.ah.dgid, path.ah.sgid_index))
}
