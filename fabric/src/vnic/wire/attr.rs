//! Attributes of the Ethernet management class. All fields are big-endian.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Lid, Mac, fnv1a};

/// Attribute identifiers (`OPA_EM_ATTR_*`).
pub mod id {
    /// [`ClassPortInfo`](super::super::mad::ClassPortInfo) of the agent.
    pub const CLASS_PORT_INFO: u16 = 0x0001;
    /// [`NoticeAttr`](super::super::mad::NoticeAttr) of a trap.
    pub const NOTICE: u16 = 0x0002;
    /// [`VeswPortInfo`](super::VeswPortInfo).
    pub const VESWPORT_INFO: u16 = 0x0011;
    /// [`MacTableHeader`](super::MacTableHeader) and [`MacTableEntry`](super::MacTableEntry)s.
    pub const VESWPORT_MAC_ENTRIES: u16 = 0x0012;
    /// [`IfaceMacsHeader`](super::IfaceMacsHeader) and addresses: unicast.
    pub const IFACE_UCAST_MACS: u16 = 0x0013;
    /// [`IfaceMacsHeader`](super::IfaceMacsHeader) and addresses: multicast.
    pub const IFACE_MCAST_MACS: u16 = 0x0014;
    /// Resets a port to its unconfigured state.
    pub const DELETE_VESW: u16 = 0x0015;
    /// [`SummaryCounters`](super::SummaryCounters).
    pub const VESWPORT_SUMMARY_COUNTERS: u16 = 0x0020;
    /// [`ErrorCounters`](super::ErrorCounters).
    pub const VESWPORT_ERROR_COUNTERS: u16 = 0x0022;
    /// [`EndPoint`](super::EndPoint). Extension, not defined by Omni-Path.
    pub const END_POINT: u16 = 0xff11;
    /// [`PathsHeader`](super::PathsHeader) and [`Path`](super::Path)s. Extension, not defined by
    /// Omni-Path.
    pub const PATHS: u16 = 0xff12;
}

/// Number of default ports of a switch (`OPA_VESW_MAX_NUM_DEF_PORT`).
pub const DEF_PORTS: usize = 16;
/// Number of VLAN priorities (`OPA_VNIC_MAX_NUM_PCP`).
pub const PCPS: usize = 8;

/// Configured or operational state of a port (`OPA_VNIC_STATE_*`).
pub mod state {
    /// All frames are dropped.
    pub const DROP_ALL: u8 = 1;
    /// Frames are forwarded.
    pub const FORWARDING: u8 = 3;
}

/// Link state of an interface (`OPA_VNIC_ETH_LINK_*`).
pub mod link {
    /// The interface is up.
    pub const UP: u8 = 1;
    /// The interface is down.
    pub const DOWN: u8 = 2;
}

/// Bit positions of routing control in [`VeswInfo::rc`] (`OPA_VNIC_ENCAP_RC_*`); each field has 3
/// bits.
pub mod rc {
    /// Non-IP frames.
    pub const DEFAULT: u32 = 0;
    /// IPv4 except TCP and UDP.
    pub const IPV4: u32 = 4;
    /// IPv4 with UDP.
    pub const IPV4_UDP: u32 = 8;
    /// IPv4 with TCP.
    pub const IPV4_TCP: u32 = 12;
    /// IPv6 except TCP and UDP.
    pub const IPV6: u32 = 16;
    /// IPv6 with TCP.
    pub const IPV6_TCP: u32 = 20;
    /// IPv6 with UDP.
    pub const IPV6_UDP: u32 = 24;
}

/// Configuration shared by all ports of a virtual switch (`struct opa_vesw_info`).
///
/// There have been two layouts in Linux: one with an MTU per VLAN priority, and one with routing
/// control and a single MTU. The fields of each are reserved in the other, so this structure
/// contains both. A priority with an MTU of 0 uses the MTU of untagged frames.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VeswInfo {
    /// Fabric, 10 bits.
    pub fabric_id: U16,
    /// Virtual switch, 12 bits.
    pub vesw_id: U16,
    /// Reserved.
    pub rsvd0: [u8; 6],
    /// Default ports: bit *n* enables [`VeswInfo::u_ucast_dlid`]`[n]`.
    pub def_port_mask: U16,
    /// Reserved.
    pub rsvd1: [u8; 2],
    /// Partition of its packets.
    pub pkey: U16,
    /// Reserved.
    pub rsvd2: [u8; 4],
    /// LID for multicast frames.
    pub u_mcast_dlid: U32,
    /// LIDs for unicast frames to unknown addresses.
    pub u_ucast_dlid: [U32; DEF_PORTS],
    /// Routing control, indexed by [`rc`].
    pub rc: U32,
    /// Reserved.
    pub rsvd3: [u8; 40],
    /// MTU of tagged frames by VLAN priority, in bytes; 0 selects [`VeswInfo::eth_mtu`].
    pub eth_mtu_pcp: [U16; PCPS],
    /// MTU of the interface in bytes, without Ethernet header and VLAN tag.
    pub eth_mtu: U16,
    /// Reserved.
    pub rsvd4: [u8; 2],
}

/// Configuration of a single port (`struct opa_per_veswport_info`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PerVeswPortInfo {
    /// Port number within its switch.
    pub port_num: U32,
    /// One of [`link`]; read-only.
    pub eth_link_status: u8,
    /// Reserved.
    pub rsvd0: [u8; 3],
    /// MAC address assigned to the interface.
    pub base_mac_addr: Mac,
    /// Desired state, one of [`state`].
    pub config_state: u8,
    /// Operational state; read-only.
    pub oper_state: u8,
    /// Maximum number of MAC table entries; read-only.
    pub max_mac_tbl_ent: U16,
    /// Maximum number of source address entries; read-only.
    pub max_smac_ent: U16,
    /// Digest of the current MAC table, initially 0; read-only.
    pub mac_tbl_digest: U32,
    /// Reserved.
    pub rsvd1: [u8; 4],
    /// LID of the port.
    pub encap_slid: U32,
    /// Service class of unicast frames, by priority.
    pub pcp_to_sc_uc: [u8; PCPS],
    /// Virtual lane of unicast frames, by priority.
    pub pcp_to_vl_uc: [u8; PCPS],
    /// Service class of multicast frames, by priority.
    pub pcp_to_sc_mc: [u8; PCPS],
    /// Virtual lane of multicast frames, by priority.
    pub pcp_to_vl_mc: [u8; PCPS],
    /// Service class of untagged unicast frames.
    pub non_vlan_sc_uc: u8,
    /// Virtual lane of untagged unicast frames.
    pub non_vlan_vl_uc: u8,
    /// Service class of untagged multicast frames.
    pub non_vlan_sc_mc: u8,
    /// Virtual lane of untagged multicast frames.
    pub non_vlan_vl_mc: u8,
    /// Reserved.
    pub rsvd2: [u8; 48],
    /// Generation of the interface's unicast addresses; read-only.
    pub uc_macs_gen_count: U16,
    /// Generation of the interface's multicast addresses; read-only.
    pub mc_macs_gen_count: U16,
    /// Reserved.
    pub rsvd3: [u8; 8],
}

/// Configuration of a port (`struct opa_veswport_info`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct VeswPortInfo {
    /// Configuration of the switch.
    pub vesw: VeswInfo,
    /// Configuration of the port.
    pub vport: PerVeswPortInfo,
}

impl VeswPortInfo {
    /// Returns the values of an unconfigured port.
    #[must_use]
    pub fn power_on() -> Self {
        let mut info = Self::new_zeroed();
        info.vport.max_mac_tbl_ent = MAX_MAC_ENTRIES.into();
        info.vport.max_smac_ent = MAX_SMAC_ENTRIES.into();
        info.vport.config_state = state::DROP_ALL;
        info.vport.oper_state = state::DROP_ALL;
        info
    }
}

/// Maximum number of MAC table entries (`OPA_VNIC_MAC_TBL_MAX_ENTRIES`).
pub const MAX_MAC_ENTRIES: u16 = 2048;
/// Maximum number of source address entries (`OPA_VNIC_MAX_SMAC_LIMIT`).
pub const MAX_SMAC_ENTRIES: u16 = 256;

/// Header of MAC table entries (`struct opa_veswport_mactable`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct MacTableHeader {
    /// Index of the first entry.
    pub offset: U16,
    /// Number of entries in the message, or to read.
    pub num_entries: U16,
    /// Digest of the whole table.
    pub mac_tbl_digest: U32,
}

/// MAC table entry (`struct opa_veswport_mactable_entry`).
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
pub struct MacTableEntry {
    /// MAC address; a zero entry is empty.
    pub mac_addr: Mac,
    /// Significant bits of the address. Stored and returned only: like Linux, ports compare all
    /// bits.
    pub mac_addr_mask: Mac,
    /// LID in the high 24 bits, side data in the low byte.
    pub dlid_sd: U32,
}

impl MacTableEntry {
    /// Side data: the port may use this source address.
    pub const SOURCE_MAC: u32 = 0x20;

    /// Creates an entry that forwards frames for `mac` to `lid`.
    #[must_use]
    pub fn new(mac: Mac, lid: Lid) -> Self {
        Self {
            mac_addr: mac,
            mac_addr_mask: Mac([0xff; 6]),
            dlid_sd: (lid.0 << 8).into(),
        }
    }

    /// Returns the LID for the address.
    #[must_use]
    pub fn dlid(&self) -> Lid {
        Lid(self.dlid_sd.get() >> 8)
    }

    /// Returns whether this is a source address of the port.
    #[must_use]
    pub fn is_source(&self) -> bool {
        self.dlid_sd.get() & Self::SOURCE_MAC != 0
    }
}

/// Computes the digest of a table. It is never 0, the digest of an empty port. Only the manager
/// computes digests; ports store the received value.
#[must_use]
pub fn digest(table: &[u8]) -> u32 {
    fnv1a(table).max(1)
}

/// Header of interface addresses (`struct opa_veswport_iface_macs`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IfaceMacsHeader {
    /// Index of the first address.
    pub start_idx: U16,
    /// Number of addresses in the message, or the maximum to return; 0 means as many as fit.
    pub num_macs_in_msg: U16,
    /// Total number of addresses.
    pub tot_macs_in_lst: U16,
    /// Generation of the list.
    pub gen_count: U16,
}

/// Counters of one direction in the summary counters or statistics (`struct opa_vnic_grp_stats`).
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
pub struct GroupCounters {
    /// Unicast frames.
    pub unicast: U64,
    /// Multicast and broadcast frames.
    pub mcastbcast: U64,
    /// Untagged frames.
    pub untagged: U64,
    /// Tagged frames.
    pub vlan: U64,
    /// Frames by length including FCS: 64 bytes, 65 to 127, 128 to 255, 256 to 511, 512 to 1023,
    /// 1024 to 1518, longer.
    pub sizes: [U64; 7],
}

/// Summary counters (`struct opa_veswport_summary_counters`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SummaryCounters {
    /// Index of the virtual port.
    pub vp_instance: U16,
    /// Virtual switch.
    pub vesw_id: U16,
    /// Port number within the switch.
    pub vesw_port_num: U32,
    /// Frames of the interface that were dropped.
    pub tx_errors: U64,
    /// Packets that yielded no frame.
    pub rx_errors: U64,
    /// Transmitted frames.
    pub tx_packets: U64,
    /// Received frames.
    pub rx_packets: U64,
    /// Transmitted bytes, including FCS.
    pub tx_bytes: U64,
    /// Received bytes, including FCS.
    pub rx_bytes: U64,
    /// Transmitted frames, by kind and length.
    pub tx: GroupCounters,
    /// Received frames, by kind and length.
    pub rx: GroupCounters,
    /// Reserved.
    pub reserved: [U64; 16],
}

/// Error counters (`struct opa_veswport_error_counters`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ErrorCounters {
    /// Index of the virtual port.
    pub vp_instance: U16,
    /// Virtual switch.
    pub vesw_id: U16,
    /// Port number within the switch.
    pub vesw_port_num: U32,
    /// Total transmit errors.
    pub tx_errors: U64,
    /// Total receive errors.
    pub rx_errors: U64,
    /// Reserved.
    pub rsvd0: U64,
    /// Frames from a source address that the port must not use.
    pub tx_smac_filt: U64,
    /// Reserved.
    pub rsvd1: [U64; 3],
    /// Frames to an address without a LID.
    pub tx_dlid_zero: U64,
    /// Reserved.
    pub rsvd4: U64,
    /// Other transmit errors.
    pub tx_logic: U64,
    /// Reserved.
    pub rsvd5: U64,
    /// Frames of the interface while the port was not forwarding.
    pub tx_drop_state: U64,
    /// Packets of another virtual switch.
    pub rx_bad_veswid: U64,
    /// Reserved.
    pub rsvd6: U64,
    /// Frames shorter than 64 bytes including FCS.
    pub rx_runt: U64,
    /// Frames longer than the MTU.
    pub rx_oversize: U64,
    /// Reserved.
    pub rsvd7: U64,
    /// Frames received while the interface was down.
    pub rx_eth_down: U64,
    /// Packets received while the port was not forwarding.
    pub rx_drop_state: U64,
    /// Other receive errors.
    pub rx_logic: U64,
    /// Reserved.
    pub rsvd8: U64,
    /// Reserved.
    pub rsvd9: [U64; 16],
}

/// Queue pair that receives a port's packets. Extension: not needed by Omni-Path hardware.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct EndPoint {
    /// Queue pair number, 24 bits.
    pub qpn: U32,
    /// Maximum packet length in bytes, which is the path MTU.
    pub mtu: U16,
    /// Reserved.
    pub reserved: U16,
}

/// Header of paths. Extension: Omni-Path only routes packets by LID.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PathsHeader {
    /// Index of the first path.
    pub offset: U16,
    /// Number of paths in the message.
    pub num_entries: U16,
    /// Total number of paths; a port removes any paths beyond.
    pub total: U16,
    /// Reserved.
    pub reserved: U16,
}

/// Location of a LID. Extension, not defined by Omni-Path.
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
pub struct Path {
    /// LID of the port.
    pub dlid: U32,
    /// Queue pair number of the port, 24 bits.
    pub qpn: U32,
    /// Maximum packet length, in bytes.
    pub mtu: U16,
    /// Reserved.
    pub reserved: U16,
    /// Address of the fabric port.
    pub gid: [u8; 16],
}

const _: () = {
    assert!(size_of::<VeswInfo>() == 152);
    assert!(size_of::<PerVeswPortInfo>() == 128);
    assert!(size_of::<MacTableHeader>() == 8);
    assert!(size_of::<MacTableEntry>() == 16);
    assert!(size_of::<IfaceMacsHeader>() == 8);
    assert!(size_of::<SummaryCounters>() == 360);
    assert!(size_of::<ErrorCounters>() == 304);
    assert!(size_of::<EndPoint>() == 8);
    assert!(size_of::<PathsHeader>() == 8);
    assert!(size_of::<Path>() == 28);
};

/// Returns the entries after a header, using the count in the header. Returns no entries if there
/// are fewer bytes.
pub(in crate::vnic) fn entries<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    data: &[u8],
    count: u16,
) -> Option<&[T]> {
    let entries = <[T]>::ref_from_prefix_with_elems(data, count.into()).ok()?;
    Some(entries.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offset of a field, which is found as the only nonzero bytes.
    fn at<T: FromZeros + IntoBytes + Immutable>(set: impl FnOnce(&mut T)) -> (usize, Vec<u8>) {
        let mut value = T::new_zeroed();
        set(&mut value);
        let bytes = value.as_bytes();
        let first = bytes.iter().position(|byte| *byte != 0).unwrap();
        let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        (first, bytes[first..=last].to_vec())
    }

    /// Offsets in Linux' `opa_vnic_encap.h`, added up by hand.
    #[test]
    fn port_info_matches_linux_layout() {
        let vesw = |set: fn(&mut VeswInfo)| at::<VeswInfo>(set);
        assert_eq!(vesw(|v| v.fabric_id = 0x0102.into()), (0, vec![1, 2]));
        assert_eq!(vesw(|v| v.vesw_id = 0x0102.into()), (2, vec![1, 2]));
        assert_eq!(vesw(|v| v.def_port_mask = 0x0102.into()), (10, vec![1, 2]));
        assert_eq!(vesw(|v| v.pkey = 0x0102.into()), (14, vec![1, 2]));
        assert_eq!(
            vesw(|v| v.u_mcast_dlid = 0x0102_0304.into()),
            (20, vec![1, 2, 3, 4])
        );
        assert_eq!(vesw(|v| v.u_ucast_dlid[0] = 0x0100_0001.into()).0, 24);
        assert_eq!(vesw(|v| v.u_ucast_dlid[15] = 0x0100_0001.into()).0, 84);
        assert_eq!(vesw(|v| v.rc = 0x0100_0001.into()).0, 88);
        // The older layout has 44 reserved bytes, followed by an MTU per priority.
        assert_eq!(vesw(|v| v.eth_mtu_pcp[0] = 0x0102.into()).0, 132);
        assert_eq!(vesw(|v| v.eth_mtu = 0x2328.into()), (148, vec![0x23, 0x28]));
        let port = |set: fn(&mut PerVeswPortInfo)| at::<PerVeswPortInfo>(set).0;
        assert_eq!(port(|p| p.port_num = 0x0100_0001.into()), 0);
        assert_eq!(port(|p| p.eth_link_status = 1), 4);
        assert_eq!(port(|p| p.base_mac_addr = Mac([1; 6])), 8);
        assert_eq!(port(|p| p.config_state = 3), 14);
        assert_eq!(port(|p| p.oper_state = 3), 15);
        assert_eq!(port(|p| p.max_mac_tbl_ent = 0x0101.into()), 16);
        assert_eq!(port(|p| p.max_smac_ent = 0x0101.into()), 18);
        assert_eq!(port(|p| p.mac_tbl_digest = 0x0100_0001.into()), 20);
        assert_eq!(port(|p| p.encap_slid = 0x0100_0001.into()), 28);
        assert_eq!(port(|p| p.pcp_to_sc_uc[0] = 1), 32);
        assert_eq!(port(|p| p.pcp_to_vl_uc[0] = 1), 40);
        assert_eq!(port(|p| p.pcp_to_sc_mc[0] = 1), 48);
        assert_eq!(port(|p| p.pcp_to_vl_mc[0] = 1), 56);
        assert_eq!(port(|p| p.non_vlan_sc_uc = 1), 64);
        assert_eq!(port(|p| p.non_vlan_vl_mc = 1), 67);
        assert_eq!(port(|p| p.uc_macs_gen_count = 0x0101.into()), 116);
        assert_eq!(port(|p| p.mc_macs_gen_count = 0x0101.into()), 118);
    }

    #[test]
    fn counters_match_linux_layout() {
        let summary = |set: fn(&mut SummaryCounters)| at::<SummaryCounters>(set).0;
        // The last byte of an 8-byte counter.
        assert_eq!(summary(|c| c.vesw_port_num = 1.into()), 7);
        assert_eq!(summary(|c| c.tx_errors = 1.into()), 15);
        assert_eq!(summary(|c| c.rx_bytes = 1.into()), 55);
        assert_eq!(summary(|c| c.tx.unicast = 1.into()), 63);
        assert_eq!(summary(|c| c.tx.sizes[6] = 1.into()), 143);
        assert_eq!(summary(|c| c.rx.unicast = 1.into()), 151);
        assert_eq!(summary(|c| c.rx.sizes[6] = 1.into()), 231);
        let errors = |set: fn(&mut ErrorCounters)| at::<ErrorCounters>(set).0;
        assert_eq!(errors(|c| c.tx_smac_filt = 1.into()), 39);
        assert_eq!(errors(|c| c.tx_dlid_zero = 1.into()), 71);
        assert_eq!(errors(|c| c.tx_logic = 1.into()), 87);
        assert_eq!(errors(|c| c.tx_drop_state = 1.into()), 103);
        assert_eq!(errors(|c| c.rx_bad_veswid = 1.into()), 111);
        assert_eq!(errors(|c| c.rx_runt = 1.into()), 127);
        assert_eq!(errors(|c| c.rx_oversize = 1.into()), 135);
        assert_eq!(errors(|c| c.rx_eth_down = 1.into()), 151);
        assert_eq!(errors(|c| c.rx_drop_state = 1.into()), 159);
        assert_eq!(errors(|c| c.rx_logic = 1.into()), 167);
    }

    #[test]
    fn mac_table_entry_matches_linux_bytes() {
        let entry = MacTableEntry::new(Mac([2, 0, 0, 1, 2, 3]), Lid(0x0a_0b0c));
        assert_eq!(
            entry.as_bytes(),
            [
                2, 0, 0, 1, 2, 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0a, 0x0b, 0x0c, 0
            ]
        );
        assert_eq!(entry.dlid(), Lid(0x0a_0b0c));
        assert!(!entry.is_source());
        let source = MacTableEntry {
            dlid_sd: 0x0a0b_0c20.into(),
            ..entry
        };
        assert!(source.is_source());
        let header = MacTableHeader {
            offset: 1.into(),
            num_entries: 2.into(),
            mac_tbl_digest: 3.into(),
        };
        assert_eq!(header.as_bytes(), [0, 1, 0, 2, 0, 0, 0, 3]);
        let macs = IfaceMacsHeader {
            start_idx: 1.into(),
            num_macs_in_msg: 2.into(),
            tot_macs_in_lst: 3.into(),
            gen_count: 4.into(),
        };
        assert_eq!(macs.as_bytes(), [0, 1, 0, 2, 0, 3, 0, 4]);
    }

    #[test]
    fn invalid_count_yields_no_entries() {
        let data = [0; 40];
        assert_eq!(entries::<MacTableEntry>(&data, 2).unwrap().len(), 2);
        assert!(entries::<MacTableEntry>(&data, 3).is_none());
        assert!(entries::<Mac>(&data, u16::MAX).is_none());
        assert_ne!(digest(&[]), 0);
    }
}
