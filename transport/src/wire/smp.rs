//! Subnet management attributes (IBTA 14.2.5), used to query a port.
//!
//! A MAD consists of the common 24-byte header, the M_Key, 32 bytes that are either zero or used by
//! a directed route, and 64 bytes of attribute data. RoCE does not support subnet management, so
//! these MADs are never sent on the wire: they are only used by a program to query the local NIC.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Supported class version.
pub const CLASS_VERSION: u8 = 1;

/// Offset of the attribute data in bytes.
pub const DATA: usize = 64;

/// Attribute size in bytes.
pub const DATA_LEN: usize = 64;

/// Status bit used for directed routes, set while the MAD is being returned (IBTA 14.2.1.2).
pub const DIRECTION: u16 = 0x8000;

/// Number of P_Keys in a single block of the P_Key table.
pub const PKEYS_PER_BLOCK: usize = 32;

/// Attribute IDs (IBTA table 140).
pub mod attribute {
    /// NodeDescription: display name.
    pub const NODE_DESCRIPTION: u16 = 0x0010;
    /// NodeInfo: the node and its GUIDs.
    pub const NODE_INFO: u16 = 0x0011;
    /// SwitchInfo: forwarding tables.
    pub const SWITCH_INFO: u16 = 0x0012;
    /// GUIDInfo: block of port GUIDs.
    pub const GUID_INFO: u16 = 0x0014;
    /// PortInfo: port state and limits.
    pub const PORT_INFO: u16 = 0x0015;
    /// P_KeyTable: block of port P_Keys.
    pub const PKEY_TABLE: u16 = 0x0016;
}

/// NodeInfo (IBTA 14.2.5.3) for a channel adapter.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NodeInfo {
    /// Highest supported MAD base version.
    pub base_version: u8,
    /// Class version.
    pub class_version: u8,
    /// Node type: 1 is a channel adapter.
    pub node_type: u8,
    /// Number of ports.
    pub ports: u8,
    /// GUID of the system containing the node.
    pub system_image_guid: U64,
    /// Node GUID.
    pub node_guid: U64,
    /// GUID of the port receiving the request.
    pub port_guid: U64,
    /// Number of entries in the P_Key table of each port.
    pub partition_cap: U16,
    /// Vendor-specific device ID.
    pub device_id: U16,
    /// Device revision.
    pub revision: U32,
    /// Port number in the high 8 bits, and vendor OUI in the low 24 bits.
    pub port_and_vendor: U32,
}

const _: () = assert!(size_of::<NodeInfo>() == 40);

/// PortInfo (IBTA 14.2.5.6). Half-byte fields are stored in pairs, with the first field in the high
/// bits.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct PortInfo {
    pub(crate) m_key: U64,
    /// High half of the port GIDs.
    pub gid_prefix: U64,
    /// Base LID of the port; 0 on RoCE.
    pub lid: U16,
    /// LID of the subnet manager; 0 on RoCE.
    pub master_sm_lid: U16,
    /// Port capabilities ([`PortCapabilities`](crate::verbs::PortCapabilities)).
    pub capabilities: U32,
    pub(crate) diag_code: U16,
    pub(crate) m_key_lease_period: U16,
    /// Number of the port receiving the request.
    pub local_port: u8,
    /// Enabled link widths. In this and the next two fields, bit 0 means one lane.
    pub link_width_enabled: u8,
    /// Supported link widths.
    pub link_width_supported: u8,
    /// Current link width.
    pub link_width_active: u8,
    /// LinkSpeedSupported, where 1 is 2.5 Gbit/s, and PortState, where 1 is down and 4 is active.
    pub speed_supported_and_state: u8,
    /// PortPhysicalState, where 2 is polling and 5 is linked, and LinkDownDefaultState.
    pub physical_state: u8,
    pub(crate) m_key_protection_and_lmc: u8,
    /// LinkSpeedActive and LinkSpeedEnabled.
    pub speed_active_and_enabled: u8,
    /// NeighborMTU, with values from 1 (256 bytes) to 5 (4096), and the service level for the
    /// subnet manager.
    pub neighbor_mtu: u8,
    /// VLCap, where 1 means only VL 0, and InitType.
    pub vl_cap: u8,
    pub(crate) vl_high_limit: u8,
    pub(crate) vl_arbitration_high_cap: u8,
    pub(crate) vl_arbitration_low_cap: u8,
    /// InitTypeReply and MTUCap.
    pub mtu_cap: u8,
    pub(crate) vl_stall_and_hoq_life: u8,
    /// OperationalVLs and partition enforcement, which is only used by switches.
    pub operational_vls: u8,
    pub(crate) m_key_violations: U16,
    /// Number of packets received with an invalid P_Key.
    pub p_key_violations: U16,
    pub(crate) q_key_violations: U16,
    /// Number of entries in the GUID table.
    pub guid_cap: u8,
    pub(crate) subnet_timeout: u8,
    /// RespTimeValue: the maximum response time is 4.096 µs × 2^n.
    pub response_time: u8,
    pub(crate) error_thresholds: u8,
    pub(crate) max_credit_hint: U16,
    pub(crate) round_trip_latency: U32,
    pub(crate) capabilities2: U16,
    pub(crate) extended_speeds: U16,
}

const _: () = assert!(size_of::<PortInfo>() == DATA_LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_info_matches_specification_layout() {
        let info = NodeInfo {
            base_version: 1,
            class_version: 1,
            node_type: 1,
            ports: 2,
            system_image_guid: U64::new(0x0102_0304_0506_0708),
            node_guid: U64::new(0x1112_1314_1516_1718),
            port_guid: U64::new(0x2122_2324_2526_2728),
            partition_cap: U16::new(0x3132),
            device_id: U16::new(0x4142),
            revision: U32::new(0x5152_5354),
            port_and_vendor: U32::new(0x0161_6263),
        };
        let expected = [
            1, 1, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x41, 0x42, 0x51, 0x52,
            0x53, 0x54, 1, 0x61, 0x62, 0x63,
        ];
        assert_eq!(info.as_bytes(), expected);
    }

    #[test]
    fn port_info_matches_specification_layout() {
        let info = PortInfo {
            gid_prefix: U64::new(0xfe80_0000_0000_0000),
            capabilities: U32::new(0x0001_0000),
            local_port: 1,
            link_width_enabled: 1,
            link_width_supported: 1,
            link_width_active: 1,
            speed_supported_and_state: 0x14,
            physical_state: 0x52,
            speed_active_and_enabled: 0x11,
            neighbor_mtu: 0x50,
            vl_cap: 0x10,
            mtu_cap: 5,
            operational_vls: 0x10,
            p_key_violations: U16::new(0x0102),
            guid_cap: 1,
            response_time: 18,
            ..PortInfo::default()
        };
        let mut expected = [0; 64];
        expected[8] = 0xfe;
        expected[9] = 0x80;
        expected[20..24].copy_from_slice(&[0, 1, 0, 0]);
        expected[28..34].copy_from_slice(&[1, 1, 1, 1, 0x14, 0x52]);
        expected[35..38].copy_from_slice(&[0x11, 0x50, 0x10]);
        expected[41] = 5;
        expected[43] = 0x10;
        expected[46..48].copy_from_slice(&[1, 2]);
        expected[50] = 1;
        expected[52] = 18;
        assert_eq!(info.as_bytes(), expected);
    }
}
