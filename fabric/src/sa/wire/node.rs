//! NodeRecord, PortInfoRecord (IBTA 15.2.5.2, 15.2.5.3) and ClassPortInfo (13.4.8.1).

use bitflags::bitflags;
use riser_transport::wire::mad::ClassPortInfo;
use riser_transport::wire::smp::{NodeInfo, PortInfo};
use zerocopy::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Record, all_match, attribute};

/// Node, identified by one of its ports.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NodeRecord {
    /// LID of the port, assigned by the administrator.
    pub lid: U16,
    /// Zero on the wire.
    pub reserved: U16,
    /// GUIDs, type and number of ports.
    pub info: NodeInfo,
    /// Human-readable name, padded with zeros.
    pub description: [u8; 64],
}

const _: () = assert!(size_of::<NodeRecord>() == 108);

/// Port of a node.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PortInfoRecord {
    /// LID of the port, assigned by the administrator.
    pub lid: U16,
    /// Port number.
    pub port: u8,
    /// Options of the query.
    pub options: u8,
    /// State and limits.
    pub info: PortInfo,
}

const _: () = assert!(size_of::<PortInfoRecord>() == 68);

bitflags! {
    /// Components of a NodeRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct NodeMask: u64 {
        /// LID.
        const LID = 1 << 0;
        /// NodeType.
        const NODE_TYPE = 1 << 4;
        /// SystemImageGUID.
        const SYSTEM_IMAGE_GUID = 1 << 6;
        /// NodeGUID.
        const NODE_GUID = 1 << 7;
        /// PortGUID.
        const PORT_GUID = 1 << 8;
        /// NodeDescription.
        const DESCRIPTION = 1 << 14;
        /// Remaining fields.
        const _ = !0;
    }

    /// Components of a PortInfoRecord.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PortInfoMask: u64 {
        /// EndportLID.
        const LID = 1 << 0;
        /// PortNum.
        const PORT = 1 << 1;
        /// CapabilityMask.
        const CAPABILITIES = 1 << 7;
        /// Remaining fields.
        const _ = !0;
    }
}

impl Record for NodeRecord {
    const ATTRIBUTE: u16 = attribute::NODE_RECORD;
}

impl Record for PortInfoRecord {
    const ATTRIBUTE: u16 = attribute::PORT_INFO_RECORD;
}

impl Record for ClassPortInfo {
    const ATTRIBUTE: u16 = attribute::CLASS_PORT_INFO;
}

impl NodeRecord {
    /// Returns whether all fields selected by a request match.
    #[must_use]
    pub fn matches(&self, mask: NodeMask, wanted: &Self) -> bool {
        let (ours, theirs) = (&self.info, &wanted.info);
        let fields = [
            (NodeMask::LID, self.lid == wanted.lid),
            (NodeMask::NODE_TYPE, ours.node_type == theirs.node_type),
            (
                NodeMask::SYSTEM_IMAGE_GUID,
                ours.system_image_guid == theirs.system_image_guid,
            ),
            (NodeMask::NODE_GUID, ours.node_guid == theirs.node_guid),
            (NodeMask::PORT_GUID, ours.port_guid == theirs.port_guid),
            (
                NodeMask::DESCRIPTION,
                self.description == wanted.description,
            ),
        ];
        all_match(mask, &fields)
    }
}

/// Bit of the attribute modifier of a PortInfoRecord query: a port matches if it has at least all
/// requested capabilities (IBTA 15.2.5.3).
pub const MATCH_CAPABILITIES: u32 = 1 << 31;

impl PortInfoRecord {
    /// Returns whether all fields selected by a request with this attribute modifier match.
    #[must_use]
    pub fn matches(&self, mask: PortInfoMask, wanted: &Self, modifier: u32) -> bool {
        let [has, requested] = [self, wanted].map(|port| port.info.capabilities.get());
        let can = match modifier & MATCH_CAPABILITIES {
            0 => has == requested,
            _ => has & requested == requested,
        };
        let fields = [
            (PortInfoMask::LID, self.lid == wanted.lid),
            (PortInfoMask::PORT, self.port == wanted.port),
            (PortInfoMask::CAPABILITIES, can),
        ];
        all_match(mask, &fields)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros as _;

    use super::*;

    #[test]
    fn record_layouts_match_opensm() {
        // ib_node_record_t and ib_portinfo_record_t of opensm's <iba/ib_types.h>.
        let mut node = NodeRecord::new_zeroed();
        node.lid = U16::new(0x0102);
        node.info.node_type = 1;
        node.description[0] = b'r';
        let mut expected = [0; 112];
        expected[..2].copy_from_slice(&[1, 2]);
        expected[4 + 2] = 1;
        expected[44] = b'r';
        let mut data = Vec::new();
        node.append(&mut data);
        assert_eq!(data, expected);
        let mut port = PortInfoRecord::new_zeroed();
        port.lid = U16::new(0x0304);
        port.port = 5;
        port.info.local_port = 6;
        let mut expected = [0; 72];
        expected[..3].copy_from_slice(&[3, 4, 5]);
        expected[4 + 28] = 6;
        let mut data = Vec::new();
        port.append(&mut data);
        assert_eq!(data, expected);
    }

    #[test]
    fn components_are_compared() {
        let node = NodeRecord::new_zeroed();
        let mut wanted = node;
        wanted.info.node_type = 2;
        wanted.description[0] = 1;
        assert!(node.matches(NodeMask::LID | NodeMask::NODE_GUID, &wanted));
        assert!(!node.matches(NodeMask::from_bits_retain(1 << 4), &wanted));
        assert!(!node.matches(NodeMask::from_bits_retain(1 << 14), &wanted));
        let port = PortInfoRecord::new_zeroed();
        let mut wanted = port;
        wanted.port = 1;
        assert!(port.matches(PortInfoMask::LID, &wanted, 0));
        assert!(!port.matches(PortInfoMask::from_bits_retain(1 << 1), &wanted, 0));
    }
}
