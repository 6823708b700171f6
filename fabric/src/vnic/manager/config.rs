//! Configuration of a manager.

use std::time::Duration;

use zerocopy::FromZeros;

use crate::vnic::QpAddress;
use crate::vnic::wire::attr::{PCPS, VeswPortInfo, state};
use crate::vnic::wire::{Lid, Mac};

/// Configuration of a virtual Ethernet switch.
#[derive(Clone, Copy, Debug)]
pub struct VeswConfig {
    /// Number of the switch, 12 bits, not 0.
    pub vesw_id: u16,
    /// Partition.
    pub pkey: u16,
    /// MTU in bytes, [`MIN_ETH_MTU`](crate::vnic::MIN_ETH_MTU) to
    /// [`MAX_ETH_MTU`](crate::vnic::MAX_ETH_MTU).
    pub eth_mtu: u16,
    /// MTU by VLAN priority; 0 selects `eth_mtu`.
    pub eth_mtu_pcp: [u16; PCPS],
    /// Service class by VLAN priority. Untagged frames use priority 0.
    pub pcp_to_sc: [u8; PCPS],
    /// Virtual lane by VLAN priority. Untagged frames use priority 0.
    pub pcp_to_vl: [u8; PCPS],
}

impl VeswConfig {
    /// Creates a switch in the default partition, with a separate class and lane for each priority.
    #[must_use]
    pub fn new(vesw_id: u16, eth_mtu: u16) -> Self {
        Self {
            vesw_id,
            pkey: 0xffff,
            eth_mtu,
            eth_mtu_pcp: [0; PCPS],
            pcp_to_sc: [0, 1, 2, 3, 4, 5, 6, 7],
            pcp_to_vl: [0, 1, 2, 3, 4, 5, 6, 7],
        }
    }

    /// Returns the multicast LID of the switch.
    #[must_use]
    pub fn group(&self) -> Lid {
        Lid(Lid::MULTICAST.0 | u32::from(self.vesw_id))
    }

    /// Returns the configuration of the port with this LID.
    pub(super) fn port(&self, lid: Lid) -> VeswPortInfo {
        let mut info = VeswPortInfo::new_zeroed();
        let vesw = &mut info.vesw;
        vesw.vesw_id = self.vesw_id.into();
        vesw.pkey = self.pkey.into();
        vesw.u_mcast_dlid = self.group().0.into();
        // Frames to unknown addresses are flooded, as in a switch.
        vesw.def_port_mask = 1.into();
        vesw.u_ucast_dlid[0] = self.group().0.into();
        vesw.eth_mtu = self.eth_mtu.into();
        vesw.eth_mtu_pcp = self.eth_mtu_pcp.map(Into::into);
        let port = &mut info.vport;
        port.port_num = lid.0.into();
        port.encap_slid = lid.0.into();
        port.base_mac_addr = Mac::of_lid(lid);
        port.config_state = state::FORWARDING;
        port.pcp_to_sc_uc = self.pcp_to_sc;
        port.pcp_to_vl_uc = self.pcp_to_vl;
        port.pcp_to_sc_mc = self.pcp_to_sc;
        port.pcp_to_vl_mc = self.pcp_to_vl;
        port.non_vlan_sc_uc = self.pcp_to_sc[0];
        port.non_vlan_vl_uc = self.pcp_to_vl[0];
        port.non_vlan_sc_mc = self.pcp_to_sc[0];
        port.non_vlan_vl_mc = self.pcp_to_vl[0];
        info
    }
}

/// Configuration of a manager.
#[derive(Clone, Debug)]
pub struct ManagerConfig {
    /// Destination of traps and responses.
    pub address: QpAddress,
    /// Maximum datagram length, in bytes: the path MTU, at least
    /// [`MIN_PATH_MTU`](crate::vnic::MIN_PATH_MTU).
    pub max_mad: usize,
    /// Switches. Each member gets one port of each switch, in this order.
    pub vesws: Vec<VeswConfig>,
    /// Interval between discoveries, and between polls of a port.
    pub interval: Duration,
    /// Time of silence after which a member is removed.
    pub dead_after: Duration,
    /// First transaction identifier, which should be random to make responses unpredictable.
    pub first_tid: u64,
}
