//! Virtual port: encapsulates frames of an interface and decapsulates packets.

mod encapsulated;

use std::collections::BTreeSet;
use std::time::Instant;

use riser_transport::verbs::Gid;
use rustc_hash::FxHashMap;

pub use encapsulated::{Destination, Encapsulated};

use super::frame::{self, Frame, Protocol};
use super::mac_table::{Learned, MacTable};
use super::reassembly::Reassembly;
use super::stats::{RxDrop, Stats, TxDrop};
use super::trap::TrapLimit;
use super::wire::attr::{DEF_PORTS, Path, VeswInfo, VeswPortInfo, link, rc, state};
use super::wire::mad::{NoticeAttr, TrapOpcode, VeswPortTrap};
use super::wire::packet::Header;
use super::wire::{Lid, Mac};
use super::{MAX_ETH_MTU, MAX_VESW_ID, MIN_ETH_MTU, MIN_PATH_MTU, QpAddress};

/// Size of the table that distributes flows to default ports (`OPA_VNIC_FLOW_TBL_SIZE`).
const FLOW_TBL: usize = 32;
/// Maximum number of reported interface addresses of each type.
pub const MAX_IFACE_MACS: usize = 256;
/// Maximum number of paths of a port, equal to the maximum number of members.
pub const MAX_PATHS: usize = 254;

/// Desired configuration of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceConfig {
    /// MAC address assigned by the manager, if any.
    pub mac: Option<Mac>,
    /// MTU in bytes, if configured.
    pub mtu: Option<u16>,
    /// The interface has a carrier, because the port forwards frames.
    pub carrier: bool,
}

/// Returns the maximum frame length for a VLAN priority, in bytes.
fn max_frame(vesw: &VeswInfo, priority: Option<usize>) -> usize {
    let of_priority = priority.map(|pcp| vesw.eth_mtu_pcp[pcp]);
    let mtu = of_priority
        .filter(|mtu| mtu.get() != 0)
        .unwrap_or(vesw.eth_mtu);
    let tag = priority.map_or(0, |_| frame::VLAN_TAG);
    usize::from(mtu.get()) + frame::HEADER + tag
}

#[derive(Clone, Copy, Debug)]
struct Route {
    to: QpAddress,
    mtu: u16,
}

/// Virtual port of a virtual Ethernet switch.
#[derive(Clone, Debug)]
pub struct VirtualPort {
    /// Index of the port on its host.
    vport: u8,
    /// Maximum packet length of this host, in bytes.
    mtu: usize,
    info: VeswPortInfo,
    flow_tbl: [Option<u8>; FLOW_TBL],
    mac_table: MacTable,
    learned: Learned,
    paths: Vec<Path>,
    routes: FxHashMap<Lid, Route>,
    /// Maximum packet length accepted by all other ports, in bytes.
    group_mtu: usize,
    ident: u32,
    reassembly: Reassembly,
    stats: Stats,
    ucast_macs: Vec<Mac>,
    mcast_macs: Vec<Mac>,
    traps: BTreeSet<TrapOpcode>,
    limit: TrapLimit,
    interface: Option<InterfaceConfig>,
}

impl VirtualPort {
    /// Creates an unconfigured port. `mtu` is the local path MTU in bytes.
    #[must_use]
    pub fn new(vport: u8, mtu: usize) -> Self {
        Self {
            vport,
            mtu,
            info: VeswPortInfo::power_on(),
            flow_tbl: [None; FLOW_TBL],
            mac_table: MacTable::default(),
            learned: Learned::default(),
            paths: Vec::new(),
            routes: FxHashMap::default(),
            group_mtu: mtu,
            ident: 0,
            reassembly: Reassembly::default(),
            stats: Stats::default(),
            ucast_macs: Vec::new(),
            mcast_macs: Vec::new(),
            traps: BTreeSet::new(),
            limit: TrapLimit::default(),
            interface: None,
        }
    }

    /// Returns the configuration and state for the manager.
    #[must_use]
    pub fn info(&self) -> VeswPortInfo {
        let mut info = self.info;
        info.vport.mac_tbl_digest = self.mac_table.digest().into();
        info
    }

    /// Sets the configuration. Read-only fields of `info` are ignored; reserved fields are stored
    /// for the manager. Returns `false` and changes nothing if an MTU is out of range, or if
    /// forwarding is enabled without a switch or port address.
    pub fn configure(&mut self, info: &VeswPortInfo) -> bool {
        let mtus = info.vesw.eth_mtu_pcp.iter().chain([&info.vesw.eth_mtu]);
        let is_mtu = |mtu: u16| mtu == 0 || (MIN_ETH_MTU..=MAX_ETH_MTU).contains(&mtu);
        let lid = Lid(info.vport.encap_slid.get());
        let is_port = (1..=MAX_VESW_ID).contains(&info.vesw.vesw_id.get())
            && lid != Lid::NONE
            && !lid.is_multicast();
        let is_state = match info.vport.config_state {
            state::DROP_ALL => true,
            state::FORWARDING => is_port,
            _ => false,
        };
        if !mtus.map(|mtu| mtu.get()).all(is_mtu) || !is_state {
            return false;
        }
        let own = self.info.vport;
        self.info = *info;
        let vport = &mut self.info.vport;
        vport.eth_link_status = own.eth_link_status;
        vport.max_mac_tbl_ent = own.max_mac_tbl_ent;
        vport.max_smac_ent = own.max_smac_ent;
        vport.uc_macs_gen_count = own.uc_macs_gen_count;
        vport.mc_macs_gen_count = own.mc_macs_gen_count;
        vport.oper_state = vport.config_state;
        self.distribute_flows();
        self.set_interface();
        true
    }

    /// Resets the port to its unconfigured state and clears its tables. Counters and interface
    /// addresses are preserved.
    pub fn reset(&mut self) {
        self.configure(&VeswPortInfo::power_on());
        self.mac_table = MacTable::default();
        self.learned = Learned::default();
        self.set_paths(0, 0, &[]);
    }

    /// Assigns the default ports to the slots of the flow table, in round-robin order.
    fn distribute_flows(&mut self) {
        let mask = self.info.vesw.def_port_mask.get();
        let ports: Vec<u8> = (0..DEF_PORTS as u8)
            .filter(|n| mask >> n & 1 == 1)
            .collect();
        for (n, slot) in self.flow_tbl.iter_mut().enumerate() {
            *slot = ports.get(n % ports.len().max(1)).copied();
        }
    }

    fn set_interface(&mut self) {
        let mac = self.info.vport.base_mac_addr;
        let mtu = self.info.vesw.eth_mtu.get();
        self.interface = Some(InterfaceConfig {
            mac: (!mac.is_zero() && !mac.is_multicast()).then_some(mac),
            mtu: (mtu != 0).then_some(mtu),
            carrier: self.is_forwarding(),
        });
    }

    /// Returns the desired interface configuration after each change.
    pub fn poll_interface(&mut self) -> Option<InterfaceConfig> {
        self.interface.take()
    }

    /// Returns the table configured by the manager.
    #[must_use]
    pub fn mac_table(&self) -> &MacTable {
        &self.mac_table
    }

    /// Returns the table configured by the manager for updates with [`MacTable::set`].
    pub(super) fn mac_table_mut(&mut self) -> &mut MacTable {
        &mut self.mac_table
    }

    /// Returns the paths to other ports.
    #[must_use]
    pub fn paths(&self) -> &[Path] {
        &self.paths
    }

    /// Updates the paths starting at `offset`. Paths beyond `total` are removed, including
    /// addresses learned from their ports. Returns `false` and changes nothing if there would be a
    /// gap or too many paths, or if a path is not a unicast path.
    pub fn set_paths(&mut self, offset: u16, total: u16, paths: &[Path]) -> bool {
        let (offset, total) = (usize::from(offset), usize::from(total));
        let is_path = |path: &Path| {
            let (lid, mtu) = (Lid(path.dlid.get()), usize::from(path.mtu.get()));
            lid != Lid::NONE && !lid.is_multicast() && mtu >= MIN_PATH_MTU
        };
        let fits = offset <= self.paths.len() && offset + paths.len() <= total;
        if !fits || total > MAX_PATHS || !paths.iter().all(is_path) {
            return false;
        }
        self.paths.truncate(total);
        for (index, path) in (offset..).zip(paths) {
            match self.paths.get_mut(index) {
                Some(place) => *place = *path,
                None => self.paths.push(*path),
            }
        }
        let route = |path: &Path| {
            let to = QpAddress {
                gid: Gid(path.gid),
                qpn: path.qpn.get(),
            };
            let mtu = path.mtu.get();
            (Lid(path.dlid.get()), Route { to, mtu })
        };
        self.routes = self.paths.iter().map(route).collect();
        let shortest = self
            .routes
            .values()
            .map(|route| usize::from(route.mtu))
            .min();
        self.group_mtu = shortest.map_or(self.mtu, |mtu| mtu.min(self.mtu));
        let routes = &self.routes;
        self.learned.retain_ports(|lid| routes.contains_key(&lid));
        self.reassembly.retain(|lid| routes.contains_key(&lid));
        true
    }

    /// Returns the statistics.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns the index of the port on its host.
    #[must_use]
    pub fn vport(&self) -> u8 {
        self.vport
    }

    fn is_forwarding(&self) -> bool {
        self.info.vport.oper_state == state::FORWARDING
    }

    fn slid(&self) -> Lid {
        Lid(self.info.vport.encap_slid.get())
    }

    /// Determines the destination of a frame from the interface. `bytes` may be padded to
    /// [`frame::MIN`] afterwards, which receivers require.
    ///
    /// # Errors
    /// [`TxDrop`], which is counted.
    pub fn encapsulate(&mut self, bytes: &[u8], now: Instant) -> Result<Encapsulated, TxDrop> {
        let outcome = self.plan(bytes, now);
        let frame = outcome.as_ref().map_err(|e| *e);
        let counted = frame.and_then(|_| Frame::new(bytes).ok_or(TxDrop::Logic));
        self.stats.count_tx(counted);
        outcome
    }

    fn plan(&mut self, bytes: &[u8], now: Instant) -> Result<Encapsulated, TxDrop> {
        let frame = Frame::new(bytes).ok_or(TxDrop::Logic)?;
        if !self.is_forwarding() {
            return Err(TxDrop::DropState);
        }
        let priority = frame.priority();
        if bytes.len() > max_frame(&self.info.vesw, priority) {
            return Err(TxDrop::Logic);
        }
        if !self.mac_table.has_source(frame.source()) {
            return Err(TxDrop::SmacFilter);
        }
        let entropy = frame.entropy();
        let dlid = self.dlid(frame.dest(), entropy, now)?;
        let (to, mtu) = if dlid.is_multicast() {
            (Destination::Group, self.group_mtu)
        } else {
            // A MAC table may arrive before the paths of its ports.
            let route = self.routes.get(&dlid).ok_or(TxDrop::DlidZero)?;
            (Destination::Port(route.to), self.mtu.min(route.mtu.into()))
        };
        let (sc, vl) = self.class(frame.dest().is_multicast(), priority);
        self.ident = self.ident.wrapping_add(1);
        let header = Header {
            slid: self.slid(),
            dlid,
            pkey: self.info.vesw.pkey.get(),
            entropy: entropy.into(),
            sc,
            rc: self.routing_control(frame.protocol()),
            fecn: false,
            becn: false,
            age: 0,
            vesw_id: self.info.vesw.vesw_id.get(),
            fragment: None,
        };
        Ok(Encapsulated {
            header,
            to,
            vl,
            mtu,
            ident: self.ident,
        })
    }

    /// Returns the LID for an address. In order of precedence: the manager's table; the switch's
    /// multicast LID for a multicast address; a learned address; the LID encoded in a locally
    /// administered address, if it belongs to a port; a default port.
    fn dlid(&self, dest: Mac, entropy: u8, now: Instant) -> Result<Lid, TxDrop> {
        let own = self.slid();
        let not_back = |lid: Lid| match lid {
            Lid::NONE => Err(TxDrop::DlidZero),
            lid if lid == own => Err(TxDrop::Logic),
            lid => Ok(lid),
        };
        if let Some(lid) = self.mac_table.dlid(dest) {
            return not_back(lid);
        }
        if dest.is_multicast() {
            return not_back(Lid(self.info.vesw.u_mcast_dlid.get()));
        }
        if let Some(lid) = self.learned.dlid(dest, now) {
            return not_back(lid);
        }
        // Linux assumes that the manager assigned every such address, but virtual machines use them
        // too.
        if dest.is_local() && self.routes.contains_key(&dest.lid()) {
            return not_back(dest.lid());
        }
        let flow = usize::from(entropy & 0xf) + usize::from(entropy >> 4);
        let port = self.flow_tbl[flow % FLOW_TBL];
        let lid = port.map(|port| Lid(self.info.vesw.u_ucast_dlid[usize::from(port)].get()));
        not_back(lid.unwrap_or(Lid::NONE))
    }

    /// Returns the service class and virtual lane of a frame.
    fn class(&self, is_multicast: bool, priority: Option<usize>) -> (u8, u8) {
        let port = &self.info.vport;
        match (priority, is_multicast) {
            (Some(pcp), false) => (port.pcp_to_sc_uc[pcp], port.pcp_to_vl_uc[pcp]),
            (Some(pcp), true) => (port.pcp_to_sc_mc[pcp], port.pcp_to_vl_mc[pcp]),
            (None, false) => (port.non_vlan_sc_uc, port.non_vlan_vl_uc),
            (None, true) => (port.non_vlan_sc_mc, port.non_vlan_vl_mc),
        }
    }

    fn routing_control(&self, protocol: Protocol) -> u8 {
        let shift = match protocol {
            Protocol::Ipv4Tcp => rc::IPV4_TCP,
            Protocol::Ipv4Udp => rc::IPV4_UDP,
            Protocol::Ipv4 => rc::IPV4,
            Protocol::Ipv6Tcp => rc::IPV6_TCP,
            Protocol::Ipv6Udp => rc::IPV6_UDP,
            Protocol::Ipv6 => rc::IPV6,
            Protocol::Other => rc::DEFAULT,
        };
        (self.info.vesw.rc.get() >> shift & 7) as u8
    }

    /// Decapsulates a packet and returns a frame once it is complete. `from` is the source of the
    /// packet in the fabric: packets are only accepted from the queue pairs of members, whose
    /// numbers are unknown to any host that cannot capture their packets.
    ///
    /// # Errors
    /// [`RxDrop`], which is counted.
    pub fn decapsulate<'a>(
        &'a mut self,
        from: QpAddress,
        packet: &'a [u8],
        now: Instant,
    ) -> Result<Option<&'a [u8]>, RxDrop> {
        let checked = self.check(from, packet);
        let (header, data) = match checked {
            Ok(checked) => checked,
            Err(drop) => return self.drop_rx(drop),
        };
        let is_group = header.dlid.is_multicast();
        let frame = match header.fragment {
            None => Ok(Some(data)),
            Some(fragment) => {
                let taken = self
                    .reassembly
                    .add_fragment(header.slid, is_group, fragment, data);
                taken.map_err(|_| RxDrop::Logic)
            }
        };
        let is_up = self.info.vport.eth_link_status == link::UP;
        let outcome = match frame {
            Ok(None) => return Ok(None),
            Ok(Some(bytes)) if bytes.len() < frame::MIN => Err(RxDrop::Runt),
            Ok(Some(bytes)) => {
                // The minimum frame length includes a header.
                Frame::new(bytes).ok_or(RxDrop::Runt)
            }
            Err(drop) => Err(drop),
        };
        let outcome = outcome.and_then(|frame| {
            if frame.len() > max_frame(&self.info.vesw, frame.priority()) {
                return Err(RxDrop::Oversize);
            }
            if !is_up {
                return Err(RxDrop::EthDown);
            }
            Ok(frame)
        });
        self.stats.count_rx(outcome);
        let frame = outcome?;
        if self.mac_table.dlid(frame.source()).is_none() {
            self.learned.note(frame.source(), header.slid, now);
        }
        Ok(Some(frame.bytes()))
    }

    fn drop_rx<T>(&mut self, drop: RxDrop) -> Result<T, RxDrop> {
        self.stats.count_rx(Err(drop));
        Err(drop)
    }

    /// Validates the headers of a packet.
    fn check<'a>(&self, from: QpAddress, packet: &'a [u8]) -> Result<(Header, &'a [u8]), RxDrop> {
        let (header, data) = Header::parse(packet).map_err(|_| RxDrop::Logic)?;
        if header.vesw_id != self.info.vesw.vesw_id.get() {
            return Err(RxDrop::BadVeswId);
        }
        if !self.is_forwarding() {
            return Err(RxDrop::DropState);
        }
        let is_ours = header.dlid == self.slid()
            || header.dlid.0 == self.info.vesw.u_mcast_dlid.get() && header.dlid != Lid::NONE;
        let is_partition = header.pkey & 0x7fff == self.info.vesw.pkey.get() & 0x7fff;
        // Without a path, such as before the path of a new member arrives, any host could be the
        // sender.
        let route = self.routes.get(&header.slid);
        let is_source = header.slid != self.slid() && route.is_some_and(|route| route.to == from);
        if !is_ours || !is_partition || !is_source {
            return Err(RxDrop::Logic);
        }
        Ok((header, data))
    }

    /// Updates the link state of the interface. A trap reports a change.
    pub fn set_link(&mut self, is_up: bool) {
        let status = if is_up { link::UP } else { link::DOWN };
        if self.info.vport.eth_link_status != status {
            self.info.vport.eth_link_status = status;
            self.traps.insert(TrapOpcode::EthLinkStatusChange);
        }
    }

    /// Updates the addresses of the interface, limited to [`MAX_IFACE_MACS`] of each type. Traps
    /// report changes.
    pub fn set_macs(&mut self, unicast: &[Mac], multicast: &[Mac]) {
        let most = |macs: &[Mac]| macs[..macs.len().min(MAX_IFACE_MACS)].to_vec();
        let bump = |count: u16| count.wrapping_add(1).into();
        let (unicast, multicast) = (most(unicast), most(multicast));
        let port = &mut self.info.vport;
        if unicast != self.ucast_macs {
            self.ucast_macs = unicast;
            port.uc_macs_gen_count = bump(port.uc_macs_gen_count.get());
            self.traps.insert(TrapOpcode::IfaceUcastMacChange);
        }
        if multicast != self.mcast_macs {
            self.mcast_macs = multicast;
            port.mc_macs_gen_count = bump(port.mc_macs_gen_count.get());
            self.traps.insert(TrapOpcode::IfaceMcastMacChange);
        }
    }

    /// Returns the unicast addresses of the interface, except the address assigned by the manager.
    #[must_use]
    pub fn ucast_macs(&self) -> Vec<Mac> {
        let base = self.info.vport.base_mac_addr;
        let macs = self.ucast_macs.iter().copied();
        macs.filter(|mac| *mac != base).collect()
    }

    /// Returns the multicast addresses that the interface receives.
    #[must_use]
    pub fn mcast_macs(&self) -> &[Mac] {
        &self.mcast_macs
    }

    /// Returns the notice of the next event for the manager, subject to the trap rate limit.
    pub(super) fn poll_notice(&mut self, now: Instant) -> Option<NoticeAttr> {
        let opcode = self.traps.pop_first()?;
        if !self.limit.admit(now) {
            tracing::debug!(?opcode, "trap rate limit exceeded");
            return None;
        }
        let trap = VeswPortTrap {
            fabric_id: self.info.vesw.fabric_id,
            vesw_id: self.info.vesw.vesw_id,
            vesw_port_num: self.info.vport.port_num,
            opa_port_num: 1.into(),
            vesw_port_index: self.vport,
            opcode: opcode as u8,
            reserved: 0.into(),
        };
        Some(NoticeAttr::new(self.slid().0, &trap))
    }

    /// Counts a packet for a switch without a port on this host.
    pub(super) fn count_stranger(&mut self) {
        self.stats.count_rx(Err(RxDrop::BadVeswId));
    }
}

#[cfg(test)]
mod tests;
