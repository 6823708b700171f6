//! Address handles.

use std::net::SocketAddr;

use super::{MemoryTables, Port};
use crate::nic::batch::{ECN_MASK, TxPath};
use crate::table::Table;
use crate::verbs::{AhAttr, AhId, PdId, VerbsError};
use crate::wire::ROCE_PORT;

#[derive(Debug)]
struct Ah {
    pd: PdId,
    attr: AhAttr,
}

/// Address handles of datagram QPs.
#[derive(Debug)]
pub(crate) struct AddressHandles(Table<AhId, Ah>);

impl AddressHandles {
    /// Creates an empty table.
    pub(in crate::nic) fn new(limit: u32) -> Self {
        Self(Table::new("address handle", limit))
    }

    pub(in crate::nic) fn create(
        &mut self,
        pd: PdId,
        attr: AhAttr,
        port: &Port,
        memory: &mut MemoryTables,
    ) -> Result<AhId, VerbsError> {
        port.check_ah(&attr)?;
        memory.check_pd(pd)?;
        let id = self.0.insert(Ah { pd, attr })?;
        memory.hold_pd(pd)?;
        Ok(id)
    }

    pub(crate) fn query(&self, ah: AhId) -> Result<AhAttr, VerbsError> {
        Ok(self.0.get(ah)?.attr)
    }

    pub(in crate::nic) fn modify(
        &mut self,
        ah: AhId,
        attr: AhAttr,
        port: &Port,
    ) -> Result<(), VerbsError> {
        let entry = self.0.get_mut(ah)?;
        port.check_ah(&attr)?;
        entry.attr = attr;
        Ok(())
    }

    pub(in crate::nic) fn destroy(
        &mut self,
        ah: AhId,
        memory: &mut MemoryTables,
    ) -> Result<(), VerbsError> {
        let pd = self.0.remove(ah)?.pd;
        memory.release_pd(pd);
        Ok(())
    }

    /// Returns the path for datagrams of a QP in this protection domain. An address handle must be
    /// in the same protection domain, because it was created for QPs of a different owner
    /// otherwise.
    #[inline]
    pub(in crate::nic) fn path(&self, ah: AhId, pd: PdId) -> Option<TxPath> {
        let ah = self.0.get(ah).ok()?;
        (ah.pd == pd).then(|| datagram_path(&ah.attr))
    }
}

/// Returns the path for an address vector. For multicast groups, the scope is limited by the hop
/// limit.
fn datagram_path(ah: &AhAttr) -> TxPath {
    let ip = ah.dgid.ip();
    let way = TxPath::to(SocketAddr::new(ip, ROCE_PORT));
    TxPath {
        from: ah.sgid_index as u8,
        tos: ah.traffic_class & !ECN_MASK,
        hop_limit: if ip.is_multicast() {
            ah.hop_limit
        } else {
            way.hop_limit
        },
        ..way
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::{NicConfig, NicLimits};
    use crate::verbs::Gid;

    #[test]
    fn ah_is_only_valid_in_its_pd() {
        let config = NicConfig::new([10, 0, 0, 1].into(), [7; 32]);
        let port = Port::new(&config);
        let mut memory = MemoryTables::new(&NicLimits::default(), [7; 16]);
        let [pd, other] = [(); 2].map(|()| memory.alloc_pd().unwrap());
        let mut ahs = AddressHandles::new(1);
        let attr = AhAttr::new(Gid::from(std::net::IpAddr::from([10, 0, 0, 2])));
        let ah = ahs.create(pd, attr, &port, &mut memory).unwrap();
        assert!(ahs.create(pd, attr, &port, &mut memory).is_err(), "full");
        let path = ahs.path(ah, pd).unwrap();
        assert_eq!(path.dst, "10.0.0.2:4791".parse().unwrap());
        assert!(ahs.path(ah, other).is_none());
        let invalid = AhAttr::new(Gid::from(std::net::IpAddr::from([0; 4])));
        assert!(ahs.modify(ah, invalid, &port).is_err());
        assert_eq!(ahs.query(ah), Ok(attr));
        ahs.destroy(ah, &mut memory).unwrap();
        assert!(ahs.path(ah, pd).is_none());
        memory.dealloc_pd(pd).unwrap();
    }
}
