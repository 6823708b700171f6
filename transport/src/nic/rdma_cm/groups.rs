//! Multicast groups for datagram identifiers.
//!
//! RoCE does not use a subnet manager to keep track of group members: the MGID is derived from the
//! address, and the host only needs to join the group on its network (IGMP, MLD), which is done
//! when a queue pair is attached. As a result, a join only checks its parameters, and is complete
//! when its event is polled.

use std::net::IpAddr;

use super::qp_attr::way_to;
use super::{CmAgent, IdState};
use crate::nic::Device;
use crate::verbs::{
    CmError, CmEventKind, CmId, ConnParam, DATAGRAM_QKEY, Gid, MAX_GROUPS_PER_ID, MULTICAST_QPN,
    QpType, VerbsError, mgid,
};

impl CmAgent {
    pub(crate) fn join_multicast(
        &mut self,
        device: &mut Device,
        id: CmId,
        group: IpAddr,
        _send_only: bool,
    ) -> Result<(), CmError> {
        let own = device.port.addr().ip();
        let entry = self.cm_id(id, "join_multicast")?;
        // Same conditions as in Linux: the datagram id must be assigned to a device, and it must
        // not be connected.
        let may = matches!(
            entry.state,
            IdState::Bound | IdState::AddrResolved | IdState::RouteResolved
        );
        if !may || entry.qp_type != QpType::Ud {
            return Err(CmError::InvalidState("join_multicast"));
        }
        let group = group.to_canonical();
        mgid(group).ok_or(VerbsError::InvalidParameter("multicast group"))?;
        if group.is_ipv4() != own.is_ipv4() {
            return Err(CmError::Unreachable);
        }
        if entry.groups.contains(&group) {
            return Err(CmError::AddressInUse);
        }
        if entry.groups.len() >= MAX_GROUPS_PER_ID {
            return Err(VerbsError::InsufficientResources("multicast groups").into());
        }
        entry.groups.push(group);
        let class = entry.options.traffic_class.unwrap_or(0);
        let param = ConnParam {
            qp_num: MULTICAST_QPN,
            qkey: Some(DATAGRAM_QKEY),
            ah: Some(way_to(group, class)),
            ..ConnParam::default()
        };
        self.report(id, CmEventKind::MulticastJoin { param });
        Ok(())
    }

    pub(crate) fn leave_multicast(&mut self, id: CmId, group: IpAddr) -> Result<(), CmError> {
        let entry = self.cm_id(id, "leave_multicast")?;
        let group = group.to_canonical();
        let at = entry.groups.iter().position(|joined| *joined == group);
        let at = at.ok_or(CmError::AddressNotAvailable)?;
        entry.groups.swap_remove(at);
        // Remove unread events, because the id has left this group.
        let mgid = Gid::from(group);
        self.events.retain(|event| {
            !matches!(&event.kind, CmEventKind::MulticastJoin { param }
                if event.id == id && param.ah.is_some_and(|way| way.dgid == mgid))
        });
        Ok(())
    }
}
