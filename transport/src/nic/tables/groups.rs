//! Multicast groups and the datagram queue pairs attached to them (IBTA 10.5.2).

use std::net::IpAddr;

use crate::nic::NicLimits;
use crate::verbs::{QpId, VerbsError};

/// QPs attached to a group, in the order they were attached.
#[derive(Debug)]
struct Group {
    addr: IpAddr,
    qps: Vec<QpId>,
}

/// Multicast groups with attached QPs.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: Vec<Group>,
    /// Groups that the device owner needs to leave.
    left: Vec<IpAddr>,
}

impl Groups {
    /// Attaches a QP. If it is the first in its group, returns the group that should be joined.
    pub(in crate::nic) fn attach(
        &mut self,
        qp: QpId,
        addr: IpAddr,
        limits: &NicLimits,
    ) -> Result<Option<IpAddr>, VerbsError> {
        if let Some(group) = self.groups.iter_mut().find(|group| group.addr == addr) {
            // A QP is only attached once (IBTA 11.3.1).
            if group.qps.contains(&qp) {
                return Ok(None);
            }
            if group.qps.len() >= limits.max_mcast_qp_attach as usize {
                return Err(VerbsError::InsufficientResources("queue pairs of a group"));
            }
            group.qps.push(qp);
            return Ok(None);
        }
        if self.groups.len() >= limits.max_mcast_grp as usize {
            return Err(VerbsError::InsufficientResources("multicast groups"));
        }
        // Don't leave the group if it has just been left.
        self.left.retain(|left| *left != addr);
        self.groups.push(Group {
            addr,
            qps: vec![qp],
        });
        Ok(Some(addr))
    }

    pub(in crate::nic) fn detach(&mut self, qp: QpId, addr: IpAddr) -> Result<(), VerbsError> {
        let mut groups = self.groups.iter();
        if !groups.any(|group| group.addr == addr && group.qps.contains(&qp)) {
            return Err(VerbsError::InvalidParameter("multicast group"));
        }
        self.detach_from(qp, |group| group == addr);
        Ok(())
    }

    /// Detaches a QP from all groups before it is destroyed.
    pub(in crate::nic) fn detach_all(&mut self, qp: QpId) {
        self.detach_from(qp, |_| true);
    }

    fn detach_from(&mut self, qp: QpId, from: impl Fn(IpAddr) -> bool) {
        let left = &mut self.left;
        self.groups.retain_mut(|group| {
            if from(group.addr) {
                group.qps.retain(|other| *other != qp);
            }
            if group.qps.is_empty() {
                left.push(group.addr);
            }
            !group.qps.is_empty()
        });
    }

    /// Returns the next group without any attached QPs.
    pub(crate) fn poll_left(&mut self) -> Option<IpAddr> {
        self.left.pop()
    }

    /// Returns the index of a group.
    pub(in crate::nic) fn position(&self, addr: IpAddr) -> Option<usize> {
        self.groups.iter().position(|known| known.addr == addr)
    }

    /// Returns the QPs attached to the group at this index.
    pub(in crate::nic) fn members(&self, index: usize) -> &[QpId] {
        &self.groups[index].qps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Handle;

    #[test]
    fn first_qp_joins_and_last_qp_leaves() {
        let limits = NicLimits {
            max_mcast_grp: 1,
            max_mcast_qp_attach: 2,
            ..NicLimits::default()
        };
        let [first, second, third] = [1, 2, 3].map(|index| QpId(Handle::new(index, 1)));
        let [group, other] = [3, 4].map(|last| IpAddr::from([239, 1, 2, last]));
        let mut groups = Groups::default();
        assert_eq!(groups.attach(first, group, &limits), Ok(Some(group)));
        assert_eq!(groups.attach(second, group, &limits), Ok(None));
        assert!(groups.attach(third, group, &limits).is_err());
        assert!(groups.attach(first, other, &limits).is_err());
        let index = groups.position(group).unwrap();
        assert_eq!(groups.members(index), [first, second]);
        groups.detach(first, group).unwrap();
        assert!(groups.detach(first, group).is_err());
        assert_eq!(groups.poll_left(), None);
        groups.detach_all(second);
        assert_eq!(groups.position(group), None);
        // A group that is joined again must not be left.
        assert_eq!(groups.attach(third, group, &limits), Ok(Some(group)));
        assert_eq!(groups.poll_left(), None);
        groups.detach_all(third);
        assert_eq!(groups.poll_left(), Some(group));
    }
}
