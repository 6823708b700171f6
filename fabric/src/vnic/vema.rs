//! Management agent of a host (VEMA), which executes the manager's requests.
//!
//! A host belongs to the first manager that sets its class port information, until that manager has
//! been silent for [`OWNER_TIMEOUT`]. Without this rule two managers would keep taking over each
//! other's ports. Requests from any other manager are rejected as "busy", except for reads of the
//! class port information, which names the current manager: paths and tables would help to forge
//! frames, and responses longer than their requests could be used to amplify traffic to a third
//! host. Ports keep their configuration if their manager fails.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::QpAddress;
use super::port::VirtualPort;
use super::stats::RxDrop;
use super::wire::attr::{
    EndPoint, IfaceMacsHeader, MacTableEntry, MacTableHeader, Path, PathsHeader, VeswPortInfo,
    entries, id,
};
use super::wire::mad::{
    BASE_VERSION, CLASS_VERSION, ClassPortInfo, HEADER, MAX_DATA, VemaHeader, method, status,
};
use super::wire::packet::Header;
use super::wire::{Lid, Mac};

/// Time of silence after which another manager may take over a host.
pub const OWNER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of responses per second to hosts other than the manager, except for a request
/// that establishes the manager. The source addresses may be forged, and a response to a
/// nonexistent address blocks the socket's queue for seconds, which delays frames. Discovery
/// requests of a manager count towards the limit before its first configuration request: during a
/// flood, a host without a configured [`VemaConfig::manager`] may not be discovered.
pub const STRANGER_RESPONSES: u32 = 64;

/// Status of a response to another manager (IBTA 13.4.7, busy).
pub const BUSY: u16 = 1;

/// Configuration of an agent.
#[derive(Clone, Copy, Debug)]
pub struct VemaConfig {
    /// Queue pair for the frames of all virtual ports.
    pub qpn: u32,
    /// Path MTU, in bytes: at least [`MIN_PATH_MTU`](super::MIN_PATH_MTU).
    pub mtu: u16,
    /// Maximum number of virtual ports, which the manager creates; at least 1.
    pub max_vports: u8,
    /// The only accepted manager; if `None`, the first manager is accepted.
    pub manager: Option<Gid>,
}

/// Agent of a host and its virtual ports.
#[derive(Clone, Debug)]
pub struct Vema {
    config: VemaConfig,
    class_port_info: ClassPortInfo,
    ports: BTreeMap<u8, VirtualPort>,
    owner: Option<(Gid, Instant)>,
    /// Number of responses to unknown hosts in the current second, and the start of that second.
    strangers: Option<(u32, Instant)>,
    tid: u64,
}

/// Attribute of a response, or the error status.
type AttributeResult = Result<Vec<u8>, u16>;

const INVALID: u16 = status::INVALID_ATTRIB_VALUE;
const UNSUPPORTED: u16 = status::UNSUPPORTED_METHOD_ATTRIB;

fn read<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    data: &[u8],
) -> Result<(T, &[u8]), u16> {
    T::read_from_prefix(data).map_err(|_| INVALID)
}

impl Vema {
    /// Creates an agent without ports.
    #[must_use]
    pub fn new(config: VemaConfig) -> Self {
        Self {
            config,
            class_port_info: ClassPortInfo::new_zeroed(),
            ports: BTreeMap::new(),
            owner: None,
            strangers: None,
            tid: 0,
        }
    }

    /// Returns a virtual port that the manager has created.
    #[must_use]
    pub fn port(&self, vport: u8) -> Option<&VirtualPort> {
        self.ports.get(&vport)
    }

    /// Returns a virtual port, to send frames and to report interface changes.
    pub fn port_mut(&mut self, vport: u8) -> Option<&mut VirtualPort> {
        self.ports.get_mut(&vport)
    }

    /// Decapsulates a packet; returns the index of its port, and a frame once it is complete.
    ///
    /// # Errors
    /// [`RxDrop`], which is counted at a port.
    pub fn decapsulate<'a>(
        &'a mut self,
        from: QpAddress,
        packet: &'a [u8],
        now: Instant,
    ) -> Result<Option<(u8, &'a [u8])>, RxDrop> {
        let vesw_id = Header::parse(packet).map(|(header, _)| header.vesw_id);
        let is_of = |port: &VirtualPort| vesw_id == Ok(port.info().vesw.vesw_id.get());
        let vport = self.ports.values().find(|port| is_of(port));
        let Some(vport) = vport.map(VirtualPort::vport) else {
            if let Some(first) = self.ports.values_mut().next() {
                first.count_stranger();
            }
            return Err(RxDrop::BadVeswId);
        };
        let port = self.ports.get_mut(&vport).ok_or(RxDrop::BadVeswId)?;
        let frame = port.decapsulate(from, packet, now)?;
        Ok(frame.map(|frame| (vport, frame)))
    }

    /// Handles a management datagram and returns the response. There is no response to anything but
    /// a request of this class, nor beyond [`STRANGER_RESPONSES`] per second to hosts other than the
    /// manager.
    pub fn handle_mad(&mut self, from: QpAddress, mad: &[u8], now: Instant) -> Option<Vec<u8>> {
        let (request, data) = VemaHeader::parse(mad)?;
        if self.config.manager.is_some_and(|gid| gid != from.gid) {
            tracing::debug!(from = %from.gid, "ignored a request of another manager");
            return None;
        }
        let is_request = matches!(request.method, method::GET | method::SET);
        let is_taken = self.is_taken(from.gid, now);
        let is_class = request.attr_id.get() == id::CLASS_PORT_INFO;
        // The sender becomes the manager, so every other host is unknown.
        let is_claim = is_class && request.method == method::SET && !is_taken;
        let is_manager = self.config.manager.is_some() || self.is_owner(from.gid);
        if is_request && !is_manager && !is_claim && !self.admits_stranger(now) {
            return None;
        }
        let is_public = is_class && request.method == method::GET;
        let is_refused = !is_public && is_taken;
        let response = match request.method {
            method::GET | method::SET if is_refused => Err(BUSY),
            method::GET => {
                self.refresh_owner(from.gid, now);
                self.get(&request, data)
            }
            method::SET => {
                self.owner = Some((from.gid, now));
                self.set(&request, data)
            }
            _ => return None,
        };
        Some(match response {
            Ok(data) => request.to_response(status::OK).with(&data),
            Err(status) => request.to_response(status).with(&[]),
        })
    }

    fn is_owner(&self, gid: Gid) -> bool {
        self.owner.is_some_and(|(owner, _)| owner == gid)
    }

    fn admits_stranger(&mut self, now: Instant) -> bool {
        let (responses, since) = self.strangers.get_or_insert((0, now));
        if now >= *since + Duration::from_secs(1) {
            (*responses, *since) = (0, now);
        }
        *responses += 1;
        *responses <= STRANGER_RESPONSES
    }

    fn is_taken(&self, by: Gid, now: Instant) -> bool {
        self.owner
            .is_some_and(|(owner, last_seen)| owner != by && now < last_seen + OWNER_TIMEOUT)
    }

    fn refresh_owner(&mut self, from: Gid, now: Instant) {
        if let Some((owner, last_seen)) = &mut self.owner
            && *owner == from
        {
            *last_seen = now;
        }
    }

    /// Returns the maximum attribute length of a response, in bytes.
    fn room(&self) -> usize {
        MAX_DATA.min(usize::from(self.config.mtu).saturating_sub(HEADER))
    }

    fn get(&self, request: &VemaHeader, data: &[u8]) -> AttributeResult {
        let vport = request.vport();
        let port = || self.ports.get(&vport).ok_or(INVALID);
        match request.attr_id.get() {
            id::CLASS_PORT_INFO => Ok(self.class_port_info()),
            id::VESWPORT_INFO => {
                let info = self.port(vport).map(VirtualPort::info);
                let info = info.unwrap_or_else(VeswPortInfo::power_on);
                Ok(info.as_bytes().to_vec())
            }
            id::VESWPORT_MAC_ENTRIES => self.mac_entries(port()?, data),
            id::IFACE_UCAST_MACS => {
                let port = port()?;
                let count = port.info().vport.uc_macs_gen_count.get();
                self.iface_macs(&port.ucast_macs(), count, data)
            }
            id::IFACE_MCAST_MACS => {
                let port = port()?;
                let count = port.info().vport.mc_macs_gen_count.get();
                self.iface_macs(port.mcast_macs(), count, data)
            }
            id::VESWPORT_SUMMARY_COUNTERS => {
                let port = port()?;
                let counters = port.stats().summary(vport, &port.info());
                Ok(counters.as_bytes().to_vec())
            }
            id::VESWPORT_ERROR_COUNTERS => {
                let port = port()?;
                let counters = port.stats().errors(vport, &port.info());
                Ok(counters.as_bytes().to_vec())
            }
            id::END_POINT => {
                let end = EndPoint {
                    qpn: self.config.qpn.into(),
                    mtu: self.config.mtu.into(),
                    reserved: 0.into(),
                };
                Ok(end.as_bytes().to_vec())
            }
            id::PATHS => self.paths(port()?, data),
            _ => Err(UNSUPPORTED),
        }
    }

    fn set(&mut self, request: &VemaHeader, data: &[u8]) -> AttributeResult {
        let vport = request.vport();
        match request.attr_id.get() {
            id::CLASS_PORT_INFO => {
                self.class_port_info = read(data)?.0;
            }
            id::VESWPORT_INFO => {
                let info = read::<VeswPortInfo>(data)?.0;
                if vport >= self.config.max_vports {
                    return Err(INVALID);
                }
                let mtu = usize::from(self.config.mtu);
                let port = self.ports.entry(vport);
                let port = port.or_insert_with(|| VirtualPort::new(vport, mtu));
                if !port.configure(&info) {
                    return Err(INVALID);
                }
            }
            id::VESWPORT_MAC_ENTRIES => {
                let port = self.ports.get_mut(&vport).ok_or(INVALID)?;
                let (header, rest) = read::<MacTableHeader>(data)?;
                let entries = entries::<MacTableEntry>(rest, header.num_entries.get());
                let table = port.mac_table_mut();
                let digest = header.mac_tbl_digest.get();
                if !table.set(header.offset.get(), entries.ok_or(INVALID)?, digest) {
                    return Err(INVALID);
                }
            }
            id::DELETE_VESW => {
                self.ports.get_mut(&vport).ok_or(INVALID)?.reset();
                let info = self.port(vport).map(VirtualPort::info).ok_or(INVALID)?;
                return Ok(info.as_bytes().to_vec());
            }
            id::PATHS => {
                let port = self.ports.get_mut(&vport).ok_or(INVALID)?;
                let (header, rest) = read::<PathsHeader>(data)?;
                let paths = entries::<Path>(rest, header.num_entries.get()).ok_or(INVALID)?;
                if !port.set_paths(header.offset.get(), header.total.get(), paths) {
                    return Err(INVALID);
                }
                return Ok(header.as_bytes().to_vec());
            }
            _ => return Err(UNSUPPORTED),
        }
        self.get(request, data)
    }

    fn class_port_info(&self) -> Vec<u8> {
        let ports = u16::from(self.config.max_vports);
        let info = ClassPortInfo {
            base_version: BASE_VERSION,
            class_version: CLASS_VERSION,
            cap_mask: (ClassPortInfo::CAP_TRAP | ports << 8).into(),
            cap_mask2_resp_time: ClassPortInfo::RESP_TIME.into(),
            ..self.class_port_info
        };
        info.as_bytes().to_vec()
    }

    fn mac_entries(&self, port: &VirtualPort, data: &[u8]) -> AttributeResult {
        let (request, _) = read::<MacTableHeader>(data)?;
        let (offset, count) = (request.offset.get(), request.num_entries.get());
        let room = self.room().saturating_sub(size_of::<MacTableHeader>());
        let table = port.mac_table();
        let fits = usize::from(count) <= room / size_of::<MacTableEntry>();
        if !fits || !super::mac_table::MacTable::has_range(offset, count) {
            return Err(INVALID);
        }
        let header = MacTableHeader {
            mac_tbl_digest: table.digest().into(),
            ..request
        };
        let entries: Vec<_> = (offset..offset + count).map(|n| table.entry(n)).collect();
        Ok([header.as_bytes(), entries.as_bytes()].concat())
    }

    fn iface_macs(&self, macs: &[Mac], gen_count: u16, data: &[u8]) -> AttributeResult {
        let (request, _) = read::<IfaceMacsHeader>(data)?;
        let room = self.room().saturating_sub(size_of::<IfaceMacsHeader>());
        let most = match request.num_macs_in_msg.get() {
            0 => usize::MAX,
            most => most.into(),
        };
        let first = usize::from(request.start_idx.get()).min(macs.len());
        let count = (macs.len() - first).min(most).min(room / size_of::<Mac>());
        let header = IfaceMacsHeader {
            start_idx: request.start_idx,
            num_macs_in_msg: (count as u16).into(),
            tot_macs_in_lst: (macs.len() as u16).into(),
            gen_count: gen_count.into(),
        };
        let macs = &macs[first..first + count];
        Ok([header.as_bytes(), macs.as_bytes()].concat())
    }

    fn paths(&self, port: &VirtualPort, data: &[u8]) -> AttributeResult {
        let (request, _) = read::<PathsHeader>(data)?;
        let paths = port.paths();
        let room = self.room().saturating_sub(size_of::<PathsHeader>());
        let first = usize::from(request.offset.get()).min(paths.len());
        let most = usize::from(request.num_entries.get()).min(room / size_of::<Path>());
        let part = &paths[first..(first + most).min(paths.len())];
        let header = PathsHeader {
            offset: request.offset,
            num_entries: (part.len() as u16).into(),
            total: (paths.len() as u16).into(),
            reserved: 0.into(),
        };
        Ok([header.as_bytes(), part.as_bytes()].concat())
    }

    /// Returns the next trap and its destination, subject to the rate limit of each port. No trap
    /// is sent before a manager has configured a destination.
    pub fn poll_trap(&mut self, now: Instant) -> Option<(QpAddress, Vec<u8>)> {
        let info = &self.class_port_info;
        if info.trap_lid.get() == 0 {
            return None;
        }
        let sink = QpAddress {
            gid: Gid(info.trap_gid),
            qpn: info.trap_hl_qp.get() & 0xff_ffff,
        };
        let notice = self.ports.values_mut().find_map(|p| p.poll_notice(now))?;
        self.tid += 1;
        let header = VemaHeader::new(method::TRAP, id::NOTICE, 0, self.tid);
        Some((sink, header.with(notice.as_bytes())))
    }

    /// Returns the LID that the manager assigned to a virtual port.
    #[must_use]
    pub fn lid(&self, vport: u8) -> Option<Lid> {
        let lid = Lid(self.port(vport)?.info().vport.encap_slid.get());
        (lid != Lid::NONE).then_some(lid)
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_FRAME;
    use super::super::mac_table::MacTable;
    use super::super::wire::attr::{ErrorCounters, MAX_MAC_ENTRIES, SummaryCounters, state};
    use super::super::wire::mad::{MAX, NoticeAttr};
    use super::*;

    fn address(n: u8) -> QpAddress {
        QpAddress {
            gid: Gid::from(std::net::IpAddr::from([10, 0, 0, n])),
            qpn: 77,
        }
    }

    fn vema() -> Vema {
        Vema::new(VemaConfig {
            qpn: 0x1234,
            mtu: 1024,
            max_vports: 2,
            manager: None,
        })
    }

    fn send_request(
        vema: &mut Vema,
        from: u8,
        (method, attr, modifier): (u8, u16, u32),
        data: &[u8],
        now: Instant,
    ) -> (u16, Vec<u8>) {
        let mad = VemaHeader::new(method, attr, modifier, 9).with(data);
        let response = vema.handle_mad(address(from), &mad, now).unwrap();
        let (header, data) = VemaHeader::parse(&response).unwrap();
        assert_eq!((header.method, header.tid.get()), (method::GET_RESP, 9));
        assert_eq!(header.attr_id.get(), attr);
        assert!(response.len() <= 1024);
        (header.status.get(), data.to_vec())
    }

    fn forwarding() -> VeswPortInfo {
        let mut info = VeswPortInfo::power_on();
        info.vesw.vesw_id = 100.into();
        info.vesw.eth_mtu = 1500.into();
        info.vport.encap_slid = 5.into();
        info.vport.config_state = state::FORWARDING;
        info
    }

    const GET: u8 = method::GET;
    const SET: u8 = method::SET;

    #[test]
    fn attributes_are_readable_and_some_writable() {
        let now = Instant::now();
        let agent = &mut vema();
        let (status, data) = send_request(agent, 1, (GET, id::CLASS_PORT_INFO, 0), &[], now);
        let info = ClassPortInfo::read_from_bytes(&data).unwrap();
        assert_eq!((status, info.cap_mask.get()), (0, 0x0201));
        assert_eq!(info.cap_mask2_resp_time.get(), 18);
        // A nonexistent port reports the values of an unconfigured port.
        let (status, data) = send_request(agent, 1, (GET, id::VESWPORT_INFO, 1), &[], now);
        assert_eq!(
            (status, &data[..]),
            (0, VeswPortInfo::power_on().as_bytes())
        );
        let wanted = forwarding();
        let (status, data) = send_request(
            agent,
            1,
            (SET, id::VESWPORT_INFO, 1),
            wanted.as_bytes(),
            now,
        );
        let read = VeswPortInfo::read_from_bytes(&data).unwrap();
        assert_eq!((status, read.vport.oper_state), (0, state::FORWARDING));
        assert!(agent.port(0).is_none() && agent.lid(1) == Some(Lid(5)));
        let full = (SET, id::VESWPORT_INFO, 2);
        assert_eq!(
            send_request(agent, 1, full, wanted.as_bytes(), now).0,
            INVALID
        );

        let header = |offset: u16, count: u16, digest: u32| MacTableHeader {
            offset: offset.into(),
            num_entries: count.into(),
            mac_tbl_digest: digest.into(),
        };
        let entry = MacTableEntry::new(Mac([2; 6]), Lid(7));
        let set = [header(3, 1, 0xabcd).as_bytes(), entry.as_bytes()].concat();
        let table = id::VESWPORT_MAC_ENTRIES;
        assert_eq!(
            send_request(agent, 1, (SET, table, 1), &set, now),
            (0, set.clone())
        );
        let get = header(3, 2, 0);
        let (status, data) = send_request(agent, 1, (GET, table, 1), get.as_bytes(), now);
        let both = [entry, MacTableEntry::default()];
        let expected = [header(3, 2, 0xabcd).as_bytes(), both.as_bytes()].concat();
        assert_eq!((status, data), (0, expected));
        for wrong in [
            header(2048, 1, 0),
            header(0, 62, 0),
            header(u16::MAX, u16::MAX, 0),
        ] {
            let get = send_request(agent, 1, (GET, table, 1), wrong.as_bytes(), now);
            let set = send_request(agent, 1, (SET, table, 1), wrong.as_bytes(), now);
            assert_eq!((get.0, set.0), (INVALID, INVALID));
        }

        let port = agent.port_mut(1).unwrap();
        port.set_macs(&[Mac([2; 6]), Mac([4; 6])], &[Mac([1; 6])]);
        let macs = |start: u16, most: u16, total: u16| IfaceMacsHeader {
            start_idx: start.into(),
            num_macs_in_msg: most.into(),
            tot_macs_in_lst: total.into(),
            gen_count: 1.into(),
        };
        let query_macs = |agent: &mut Vema, attr, start, most| {
            send_request(
                agent,
                1,
                (GET, attr, 1),
                macs(start, most, 0).as_bytes(),
                now,
            )
        };
        let unicast = id::IFACE_UCAST_MACS;
        let all = [macs(0, 2, 2).as_bytes(), &[2; 6], &[4; 6]].concat();
        assert_eq!(query_macs(agent, unicast, 0, 0), (0, all));
        let second = [macs(1, 1, 2).as_bytes(), &[4; 6]].concat();
        assert_eq!(query_macs(agent, unicast, 1, 5), (0, second));
        let none = macs(9, 0, 2).as_bytes().to_vec();
        assert_eq!(query_macs(agent, unicast, 9, 0), (0, none));
        let group = [macs(0, 1, 1).as_bytes(), &[1; 6]].concat();
        assert_eq!(query_macs(agent, id::IFACE_MCAST_MACS, 0, 0), (0, group));

        let counters = (GET, id::VESWPORT_SUMMARY_COUNTERS, 1);
        let (_, data) = send_request(agent, 1, counters, &[], now);
        let summary = SummaryCounters::read_from_bytes(&data).unwrap();
        assert_eq!(summary.vesw_id.get(), 100);
        let counters = (GET, id::VESWPORT_ERROR_COUNTERS, 1);
        let (_, data) = send_request(agent, 1, counters, &[], now);
        assert!(ErrorCounters::read_from_bytes(&data).is_ok());
        let (_, data) = send_request(agent, 1, (GET, id::END_POINT, 1), &[], now);
        assert_eq!(data, [0, 0, 0x12, 0x34, 4, 0, 0, 0]);

        let path = Path {
            dlid: 9.into(),
            qpn: 8.into(),
            mtu: 1024.into(),
            ..Path::default()
        };
        let paths = PathsHeader {
            offset: 0.into(),
            num_entries: 1.into(),
            total: 1.into(),
            reserved: 0.into(),
        };
        let set = [paths.as_bytes(), path.as_bytes()].concat();
        assert_eq!(send_request(agent, 1, (SET, id::PATHS, 1), &set, now).0, 0);
        let (status, data) = send_request(agent, 1, (GET, id::PATHS, 1), paths.as_bytes(), now);
        assert_eq!((status, data), (0, set.clone()));
        assert_eq!(
            send_request(agent, 1, (SET, id::PATHS, 1), &set[..30], now).0,
            INVALID
        );

        let (status, data) = send_request(agent, 1, (SET, id::DELETE_VESW, 1), &[], now);
        let read = VeswPortInfo::read_from_bytes(&data).unwrap();
        assert_eq!((status, read.vport.oper_state), (0, state::DROP_ALL));
        assert_eq!(read.vport.mac_tbl_digest.get(), 0);
        assert!(agent.port(1).unwrap().paths().is_empty());
    }

    #[test]
    fn invalid_requests_are_rejected_or_ignored() {
        let now = Instant::now();
        let agent = &mut vema();
        let unsupported = [
            (GET, id::DELETE_VESW),
            (GET, id::NOTICE),
            (SET, id::VESWPORT_SUMMARY_COUNTERS),
            (SET, id::IFACE_UCAST_MACS),
            (SET, id::END_POINT),
            (GET, 0x7777),
        ];
        for (method, attr) in unsupported {
            let response = send_request(agent, 1, (method, attr, 0), &[0; 600], now);
            assert_eq!(response, (UNSUPPORTED, vec![]), "{attr:#x}");
        }
        let invalid = [
            (GET, id::VESWPORT_MAC_ENTRIES),
            (GET, id::VESWPORT_ERROR_COUNTERS),
            (GET, id::IFACE_MCAST_MACS),
            (GET, id::PATHS),
            (SET, id::DELETE_VESW),
            (SET, id::VESWPORT_MAC_ENTRIES),
            (SET, id::PATHS),
            (SET, id::CLASS_PORT_INFO),
            (SET, id::VESWPORT_INFO),
        ];
        for (method, attr) in invalid {
            // Without the port, or with a truncated attribute.
            let response = send_request(agent, 1, (method, attr, 0), &[], now);
            assert_eq!(response, (INVALID, vec![]), "{attr:#x}");
        }
        for other in [method::TRAP, method::GET_RESP, 0x03, 0x82] {
            let mad = VemaHeader::new(other, id::CLASS_PORT_INFO, 0, 1).with(&[]);
            assert_eq!(agent.handle_mad(address(1), &mad, now), None);
        }
        assert_eq!(agent.handle_mad(address(1), &[0; 2000], now), None);
    }

    #[test]
    fn host_keeps_manager_until_silent() {
        let mut now = Instant::now();
        let agent = &mut vema();
        let info = ClassPortInfo::new_zeroed();
        let claim = (SET, id::CLASS_PORT_INFO, 0);
        assert_eq!(send_request(agent, 1, claim, info.as_bytes(), now).0, 0);
        assert_eq!(send_request(agent, 2, claim, info.as_bytes(), now).0, BUSY);
        assert_eq!(
            send_request(agent, 2, (GET, id::CLASS_PORT_INFO, 0), &[], now).0,
            0
        );
        now += OWNER_TIMEOUT - Duration::from_millis(1);
        assert_eq!(
            send_request(agent, 1, (GET, id::VESWPORT_INFO, 0), &[], now).0,
            0
        );
        now += OWNER_TIMEOUT - Duration::from_millis(1);
        assert_eq!(send_request(agent, 2, claim, info.as_bytes(), now).0, BUSY);
        now += Duration::from_millis(1);
        assert_eq!(send_request(agent, 2, claim, info.as_bytes(), now).0, 0);
        assert_eq!(send_request(agent, 1, claim, info.as_bytes(), now).0, BUSY);

        // Only its manager may read a host's knowledge of other hosts.
        for attr in [id::VESWPORT_INFO, id::PATHS, id::END_POINT, 0x7777] {
            let get = (GET, attr, 0);
            assert_eq!(
                send_request(agent, 1, get, &[0; 8], now),
                (BUSY, vec![]),
                "{attr:#x}"
            );
        }

        let mut named = Vema::new(VemaConfig {
            manager: Some(address(1).gid),
            ..agent.config
        });
        let mad = VemaHeader::new(GET, id::CLASS_PORT_INFO, 0, 1).with(&[]);
        assert!(named.handle_mad(address(2), &mad, now).is_none());
        assert!(named.handle_mad(address(1), &mad, now).is_some());
    }

    #[test]
    fn stranger_flood_does_not_affect_manager() {
        let mut now = Instant::now();
        let agent = &mut vema();
        let claim = (SET, id::CLASS_PORT_INFO, 0);
        send_request(agent, 1, claim, ClassPortInfo::new_zeroed().as_bytes(), now);
        let mad = VemaHeader::new(GET, id::CLASS_PORT_INFO, 0, 1).with(&[]);
        for _ in 0..2 {
            let flood = (0..100_000_u32).filter(|n| {
                let gid = Gid::from(std::net::IpAddr::from((n | 0xc000_0000).to_be_bytes()));
                agent
                    .handle_mad(QpAddress { gid, qpn: 5 }, &mad, now)
                    .is_some()
            });
            assert_eq!(flood.count(), STRANGER_RESPONSES as usize);
            for _ in 0..1000 {
                assert_eq!(
                    send_request(agent, 1, (GET, id::CLASS_PORT_INFO, 0), &[], now).0,
                    0
                );
            }
            now += Duration::from_secs(1);
        }
    }

    #[test]
    fn stranger_flood_allows_claim_and_configured_manager() {
        let now = Instant::now();
        let get = VemaHeader::new(GET, id::CLASS_PORT_INFO, 0, 1).with(&[]);
        let claim = (SET, id::CLASS_PORT_INFO, 0);
        let flood = |agent: &mut Vema| {
            let from = |n: u8| address(n + 10);
            let responses = (0..100).filter_map(|n| agent.handle_mad(from(n), &get, now));
            responses.count()
        };
        let agent = &mut vema();
        assert_eq!(flood(agent), STRANGER_RESPONSES as usize);
        let info = ClassPortInfo::new_zeroed();
        assert_eq!(send_request(agent, 1, claim, info.as_bytes(), now).0, 0);
        // Now it is the manager, and any other manager is unknown.
        let other = VemaHeader::new(SET, id::CLASS_PORT_INFO, 0, 1).with(info.as_bytes());
        assert!(agent.handle_mad(address(2), &other, now).is_none());

        // If a manager is configured, only that manager gets responses, and it may send requests
        // immediately.
        let agent = &mut Vema::new(VemaConfig {
            manager: Some(address(1).gid),
            ..agent.config
        });
        assert_eq!(flood(agent), 0);
        let responses = (0..100).filter_map(|_| agent.handle_mad(address(1), &get, now));
        assert_eq!(responses.count(), 100);
    }

    #[test]
    fn traps_are_sent_to_configured_address() {
        let now = Instant::now();
        let agent = &mut vema();
        send_request(
            agent,
            1,
            (SET, id::VESWPORT_INFO, 0),
            forwarding().as_bytes(),
            now,
        );
        agent.port_mut(0).unwrap().set_link(true);
        assert_eq!(agent.poll_trap(now), None, "there is no place yet");
        let info = ClassPortInfo {
            trap_gid: address(1).gid.0,
            trap_lid: 1.into(),
            trap_hl_qp: 0x4000_0055.into(),
            ..FromZeros::new_zeroed()
        };
        send_request(
            agent,
            1,
            (SET, id::CLASS_PORT_INFO, 0),
            info.as_bytes(),
            now,
        );
        let (to, mad) = agent.poll_trap(now).unwrap();
        assert_eq!((to.gid, to.qpn), (address(1).gid, 0x55));
        let (header, data) = VemaHeader::parse(&mad).unwrap();
        assert_eq!(
            (header.method, header.attr_id.get()),
            (method::TRAP, id::NOTICE)
        );
        let notice = NoticeAttr::read_from_bytes(data).unwrap();
        assert_eq!(
            (notice.issuer_lid.get(), notice.trap().unwrap().opcode),
            (5, 3)
        );
        assert_eq!(agent.poll_trap(now), None);
    }

    #[test]
    fn packets_are_dispatched_by_switch() {
        let now = Instant::now();
        let agent = &mut vema();
        for vport in 0..2_u8 {
            let mut info = forwarding();
            info.vesw.vesw_id = (100 + u16::from(vport)).into();
            send_request(
                agent,
                1,
                (SET, id::VESWPORT_INFO, vport.into()),
                info.as_bytes(),
                now,
            );
            let path = Path {
                dlid: 9.into(),
                qpn: 77.into(),
                mtu: 1024.into(),
                reserved: 0.into(),
                gid: address(2).gid.0,
            };
            let port = agent.port_mut(vport).unwrap();
            port.set_link(true);
            assert!(port.set_paths(0, 1, &[path]));
        }
        let mut header = Header {
            slid: Lid(9),
            dlid: Lid(5),
            pkey: 0,
            entropy: 0,
            sc: 0,
            rc: 0,
            fecn: false,
            becn: false,
            age: 0,
            vesw_id: 101,
            fragment: None,
        };
        let mut packet = [0; 80];
        header.emit(60, &mut packet);
        let from = address(2);
        assert_eq!(
            agent.decapsulate(from, &packet, now),
            Ok(Some((1, &[0; 60][..])))
        );
        header.vesw_id = 102;
        header.emit(60, &mut packet);
        assert_eq!(
            agent.decapsulate(from, &packet, now),
            Err(RxDrop::BadVeswId)
        );
        assert_eq!(agent.port(0).unwrap().stats().rx_errors(), 1);
    }

    #[test]
    fn vnic_mads() {
        bolero::check!().for_each(|bytes: &[u8]| {
            let now = Instant::now();
            let agent = &mut vema();
            let mut rest = bytes;
            // Interprets parts of the input as datagrams, and as attributes of valid datagrams:
            // method, attribute, port, length, data.
            while let [kind, attr, vport, len, tail @ ..] = rest {
                let (data, tail) = tail.split_at((usize::from(*len) * 4).min(tail.len()));
                rest = tail;
                let attr = match attr {
                    0x80.. => 0xff00 | u16::from(attr & 0x7f),
                    attr => u16::from(*attr),
                };
                let mad = VemaHeader::new(kind & 3, attr, u32::from(*vport & 3), 1).with(data);
                for mad in [&mad[..], data] {
                    if let Some(response) = agent.handle_mad(address(1), mad, now) {
                        assert!(response.len() <= 1024.min(MAX));
                        assert!(VemaHeader::parse(&response).is_some());
                    }
                }
                let _ = agent.decapsulate(address(2), data, now);
                let _ = agent.poll_trap(now);
                for port in agent.ports.values_mut() {
                    if let Ok(out) = port.encapsulate(data, now) {
                        let mut packet = [0; MAX_FRAME];
                        for n in 0..out.packets(data.len()) {
                            assert!(out.emit(data, n, &mut packet) <= out.mtu);
                        }
                    }
                    assert!(port.mac_table().len() <= MAX_MAC_ENTRIES.into());
                    assert!(MacTable::has_range(0, port.mac_table().len() as u16));
                }
            }
            assert!(agent.ports.len() <= 2);
        });
    }
}
