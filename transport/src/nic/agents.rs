//! Management agents of the NIC, which handle MADs on the device itself.
//!
//! | class | requests accepted from |
//! | --- | --- |
//! | subnet management (IBTA 14.2) | the local program: RoCE has no queue pair 0 (annex A16) |
//! | performance management (IBTA 16.1) | the local program, and any host using queue pair 1 |
//!
//! For all other classes, requests are handled by the program. A program can register a class
//! ([`Nic::register_agent`]) to send and receive datagrams on queue pair 1 without creating this
//! queue pair. It also receives the responses to its own requests. For performance management, it
//! only receives responses.
//!
//! The class requires that any host with access to the port counters can also reset them. Therefore
//! we store a separate base value for each counter, so that a reset does not affect the values
//! returned to the device owner ([`Device::counters`]).
//!
//! Bounds: up to [`MAX_RESPONSES`] responses and [`MAX_RECEIVED`] datagrams for the program are
//! queued. When a queue is full, further datagrams are dropped.

use std::collections::VecDeque;
use std::net::IpAddr;

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::config::PORT;
use super::tables::check_port;
use super::{Device, Nic, NicCounters};
use crate::verbs::{Gid, PKey, PortState, VerbsError};
use crate::wire::mad::{
    BASE_VERSION, ClassPortInfo, Mad, MadClass, MadHeader, MadMethod, MadStatus, RESPONSE,
};
use crate::wire::{perf, smp};

/// Max number of queued responses to other hosts.
const MAX_RESPONSES: usize = 16;

/// Max number of queued datagrams for registered classes, both received and to be sent.
const MAX_RECEIVED: usize = 256;
const MAX_SENT: usize = 256;

/// The response time is 4.096 µs × 2^18, about a second, since the device owner may be busy.
const RESPONSE_TIME: u8 = 18;

/// A single lane of 2.5 Gbit/s, which is the minimum value: a socket doesn't have a link speed.
const SLOWEST: u8 = 1;

/// Port counter.
#[derive(Clone, Copy)]
enum Counter {
    RcvErrors,
    Qp1Dropped,
    XmitData,
    RcvData,
    XmitPackets,
    RcvPackets,
    UnicastXmitPackets,
    UnicastRcvPackets,
    MulticastXmitPackets,
    MulticastRcvPackets,
}

const COUNTERS: usize = Counter::MulticastRcvPackets as usize + 1;

/// Counter values, indexed by [`Counter`].
type Counters = [u64; COUNTERS];

/// PortCounters fields that can be selected.
const SELECT: [(u32, Counter); 6] = [
    (perf::select::RCV_ERRORS, Counter::RcvErrors),
    (perf::select::XMIT_DATA, Counter::XmitData),
    (perf::select::RCV_DATA, Counter::RcvData),
    (perf::select::XMIT_PKTS, Counter::XmitPackets),
    (perf::select::RCV_PKTS, Counter::RcvPackets),
    (perf::select::QP1_DROPPED, Counter::Qp1Dropped),
];

/// PortCountersExtended fields, starting at bit 0.
const EXTENDED: [Counter; 8] = [
    Counter::XmitData,
    Counter::RcvData,
    Counter::XmitPackets,
    Counter::RcvPackets,
    Counter::UnicastXmitPackets,
    Counter::UnicastRcvPackets,
    Counter::MulticastXmitPackets,
    Counter::MulticastRcvPackets,
];

/// Management agents of a device.
#[derive(Debug, Default)]
pub(super) struct Agents {
    /// Counter values at the time of the last reset.
    base: Counters,
    /// Responses to be sent, with their destination.
    responses: VecDeque<(IpAddr, Mad)>,
    /// Datagrams sent by the program, with their destination.
    sent: VecDeque<(IpAddr, Mad)>,
    /// Bit mask of the classes registered by the program.
    registered: [u128; 2],
    /// Received datagrams for registered classes, with their source.
    received: VecDeque<(IpAddr, Mad)>,
}

impl Agents {
    /// Returns whether there are datagrams to be sent.
    pub(super) fn has_responses(&self) -> bool {
        !self.responses.is_empty() || !self.sent.is_empty()
    }

    fn register(&mut self, class: u8) {
        self.registered[usize::from(class >> 7)] |= 1 << (class & 0x7f);
    }

    pub(super) fn poll_response(&mut self) -> Option<(IpAddr, Mad)> {
        self.responses.pop_front().or_else(|| self.sent.pop_front())
    }

    fn is_registered(&self, class: u8) -> bool {
        self.registered[usize::from(class >> 7)] >> (class & 0x7f) & 1 == 1
    }
}

/// Returns the device counters in the format used by this class.
fn count(c: &NicCounters) -> Counters {
    let mut counters = Counters::default();
    let mut set = |counter, value| counters[counter as usize] = value;
    set(Counter::RcvErrors, c.rx_malformed + c.rx_icrc_errors);
    set(Counter::Qp1Dropped, c.rx_dropped_mads);
    // The unit is 4-byte words.
    set(Counter::XmitData, c.tx_bytes / 4);
    set(Counter::RcvData, c.rx_bytes / 4);
    set(Counter::XmitPackets, c.tx_packets);
    set(Counter::RcvPackets, c.rx_packets);
    set(Counter::UnicastXmitPackets, c.tx_packets - c.tx_multicast);
    set(Counter::UnicastRcvPackets, c.rx_packets - c.rx_multicast);
    set(Counter::MulticastXmitPackets, c.tx_multicast);
    set(Counter::MulticastRcvPackets, c.rx_multicast);
    counters
}

/// A counter must saturate if the value does not fit (IBTA 16.1.3.5).
fn saturate<T: TryFrom<u64>>(value: u64, largest: T) -> T {
    T::try_from(value).unwrap_or(largest)
}

/// Writes an attribute to a MAD and sets the remaining bytes to zero.
fn write_attribute(mad: &mut Mad, data: usize, len: usize, attribute: &[u8]) {
    mad[data..data + len].fill(0);
    mad[data..data + attribute.len()].copy_from_slice(attribute);
}

impl Nic {
    /// Sets the NodeDescription of the device, at most 64 bytes (`ib_modify_device`). Other
    /// attributes of a device are fixed.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if it is too long.
    pub fn modify_device(&mut self, description: &str) -> Result<(), VerbsError> {
        if description.len() > smp::DATA_LEN {
            return Err(VerbsError::InvalidParameter("node description"));
        }
        description.clone_into(&mut self.device.description);
        Ok(())
    }

    /// Registers a management class. Datagrams of this class will be returned by [`Self::poll_mad`]
    /// instead of being passed to a user's QP1. For performance management, this only includes
    /// responses, because the device handles requests itself.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the class is handled by the device.
    pub fn register_agent(&mut self, class: MadClass) -> Result<(), VerbsError> {
        match class {
            MadClass::SubnetAdm | MadClass::DeviceMgmt | MadClass::Performance => {
                self.agents.register(class as u8);
                Ok(())
            }
            MadClass::SubnLid | MadClass::SubnDirected | MadClass::ComMgt => {
                Err(VerbsError::InvalidParameter("management class"))
            }
        }
    }

    /// Queues a datagram to be sent from QP1 to QP1 of another host. It can be lost.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the queue is full.
    pub fn send_mad(&mut self, to: IpAddr, mad: &Mad) -> Result<(), VerbsError> {
        if self.agents.sent.len() == MAX_SENT {
            return Err(VerbsError::InsufficientResources("management datagrams"));
        }
        self.agents.sent.push_back((to, *mad));
        Ok(())
    }

    /// Returns the next received datagram of a registered class and its source address.
    pub fn poll_mad(&mut self) -> Option<(IpAddr, Mad)> {
        self.agents.received.pop_front()
    }
}

impl Agents {
    /// Processes a MAD of the local program. See [`Verbs::local_mad`](crate::verbs::Verbs::local_mad).
    pub(super) fn process_local(
        &mut self,
        device: &Device,
        port: u8,
        mad: &Mad,
    ) -> Result<Option<Mad>, VerbsError> {
        device.config.check_packets("local management datagrams")?;
        check_port(port)?;
        Ok(self.process(device, mad, true))
    }

    /// Handles a MAD received from QP1 of another host. This will return `false` if there is no
    /// agent for it.
    pub(super) fn handle_mad(&mut self, device: &mut Device, from: IpAddr, mad: &Mad) -> bool {
        let header = MadHeader::of(mad);
        let is_request = header.method() & RESPONSE == 0;
        let is_own = is_request && header.class() == MadClass::Performance as u8;
        if !is_own && self.is_registered(header.class()) {
            if self.received.len() == MAX_RECEIVED {
                device.counters.rx_dropped_mads += 1;
            } else {
                self.received.push_back((from, *mad));
            }
            return true;
        }
        if !is_own {
            return false;
        }
        if self.responses.len() == MAX_RESPONSES {
            device.counters.rx_dropped_mads += 1;
        } else if let Some(response) = self.process(device, mad, false) {
            self.responses.push_back((from, response));
        }
        true
    }

    /// Returns the response to a MAD, which is a copy with a new header and attribute.
    fn process(&mut self, device: &Device, mad: &Mad, is_local: bool) -> Option<Mad> {
        const SUBNET: [u8; 2] = [MadClass::SubnLid as u8, MadClass::SubnDirected as u8];
        const NO_RESPONSE: [u8; 3] = [
            MadMethod::Send as u8,
            MadMethod::Trap as u8,
            MadMethod::TrapRepress as u8,
        ];
        let header = MadHeader::of(mad);
        if header.method() & RESPONSE != 0 || NO_RESPONSE.contains(&header.method()) {
            return None;
        }
        let is_directed = header.class() == MadClass::SubnDirected as u8;
        // If there are hops, the MAD is for a node behind a different port (IBTA 14.2.2).
        let hops = header.class_specific() & 0xff;
        if is_directed && hops != 0 {
            return None;
        }
        let mut reply = *mad;
        let status = match (header.class(), header.class_version()) {
            _ if header.base_version() != BASE_VERSION => MadStatus::BadVersion,
            (class, perf::CLASS_VERSION) if class == MadClass::Performance as u8 => {
                self.handle_performance(device.counters(), &header, &mut reply)
            }
            (class, smp::CLASS_VERSION) if is_local && SUBNET.contains(&class) => {
                handle_subnet(device, &header, &mut reply)
            }
            _ => MadStatus::BadVersion,
        };
        let mut response = header.response(status);
        if is_directed {
            response = response.with_status(status as u16 | smp::DIRECTION);
        }
        reply[..size_of::<MadHeader>()].copy_from_slice(response.as_bytes());
        Some(reply)
    }

    fn handle_performance(
        &mut self,
        now: &NicCounters,
        header: &MadHeader,
        mad: &mut Mad,
    ) -> MadStatus {
        use perf::attribute::*;
        let is_set = header.method() == MadMethod::Set as u8;
        if !is_set && header.method() != MadMethod::Get as u8 {
            return MadStatus::UnsupportedMethod;
        }
        let len = mad.len() - perf::DATA;
        match (header.attribute(), is_set) {
            (CLASS_PORT_INFO, false) => {
                let can = perf::ALL_PORT_SELECT | perf::EXTENDED_WIDTH | perf::COUNTS_QP1_DROPPED;
                let info = ClassPortInfo::new(perf::CLASS_VERSION, can, RESPONSE_TIME);
                write_attribute(mad, perf::DATA, len, info.as_bytes());
                MadStatus::Success
            }
            (PORT_COUNTERS, _) => self.handle_counters(now, is_set, mad),
            (PORT_COUNTERS_EXTENDED, _) => self.handle_extended(now, is_set, mad),
            // This includes PortSamplesControl, because we don't support sampling.
            _ => MadStatus::UnsupportedAttribute,
        }
    }

    /// Returns the counters since they were last reset.
    fn counted(&self, now: &NicCounters) -> Counters {
        let now = count(now);
        std::array::from_fn(|at| now[at] - self.base[at])
    }

    fn reset(&mut self, now: &NicCounters, which: impl Iterator<Item = Counter>) {
        let now = count(now);
        for counter in which {
            self.base[counter as usize] = now[counter as usize];
        }
    }

    fn handle_counters(&mut self, now: &NicCounters, is_set: bool, mad: &mut Mad) -> MadStatus {
        let (request, _) = perf::PortCounters::read_from_prefix(&mad[perf::DATA..])
            .expect("a MAD has room for the attribute");
        if !is_port(request.port_select) {
            return MadStatus::InvalidField;
        }
        if is_set {
            let select = request.selected();
            let chosen = SELECT.iter().filter(|(bit, _)| select & bit != 0);
            self.reset(now, chosen.map(|(_, counter)| *counter));
        }
        let counted = self.counted(now);
        let wide = |counter| U32::new(saturate(counted[counter as usize], u32::MAX));
        let narrow = |counter| U16::new(saturate(counted[counter as usize], u16::MAX));
        let counters = perf::PortCounters {
            rcv_errors: narrow(Counter::RcvErrors),
            qp1_dropped: narrow(Counter::Qp1Dropped),
            xmit_data: wide(Counter::XmitData),
            rcv_data: wide(Counter::RcvData),
            xmit_packets: wide(Counter::XmitPackets),
            rcv_packets: wide(Counter::RcvPackets),
            ..perf::PortCounters::of(request.port_select, request.selected())
        };
        write_attribute(mad, perf::DATA, mad.len() - perf::DATA, counters.as_bytes());
        MadStatus::Success
    }

    fn handle_extended(&mut self, now: &NicCounters, is_set: bool, mad: &mut Mad) -> MadStatus {
        let (request, _) = perf::PortCountersExtended::read_from_prefix(&mad[perf::DATA..])
            .expect("a MAD has room for the attribute");
        if !is_port(request.port_select) {
            return MadStatus::InvalidField;
        }
        let select = request.counter_select;
        if is_set {
            let chosen = (0..EXTENDED.len()).filter(|bit| select.get() >> bit & 1 != 0);
            self.reset(now, chosen.map(|bit| EXTENDED[bit]));
        }
        let counted = self.counted(now);
        let value = |counter| U64::new(counted[counter as usize]);
        let counters = perf::PortCountersExtended {
            port_select: request.port_select,
            counter_select: select,
            xmit_data: value(Counter::XmitData),
            rcv_data: value(Counter::RcvData),
            xmit_packets: value(Counter::XmitPackets),
            rcv_packets: value(Counter::RcvPackets),
            unicast_xmit_packets: value(Counter::UnicastXmitPackets),
            unicast_rcv_packets: value(Counter::UnicastRcvPackets),
            multicast_xmit_packets: value(Counter::MulticastXmitPackets),
            multicast_rcv_packets: value(Counter::MulticastRcvPackets),
            ..perf::PortCountersExtended::default()
        };
        write_attribute(mad, perf::DATA, mad.len() - perf::DATA, counters.as_bytes());
        MadStatus::Success
    }
}

/// Subnet management is read-only, since there is no subnet manager that could set attributes.
fn handle_subnet(device: &Device, header: &MadHeader, mad: &mut Mad) -> MadStatus {
    use smp::attribute::*;
    if header.method() == MadMethod::Set as u8 {
        return MadStatus::UnsupportedAttribute;
    }
    if header.method() != MadMethod::Get as u8 {
        return MadStatus::UnsupportedMethod;
    }
    // The modifier selects a block of a table, or a port. Port 0 is the port which received the
    // MAD.
    let modifier = header.modifier();
    let mut write = |attribute: &[u8]| write_attribute(mad, smp::DATA, smp::DATA_LEN, attribute);
    match (header.attribute(), modifier) {
        (NODE_DESCRIPTION, _) => {
            let name = device.description.as_bytes();
            write(&name[..name.len().min(smp::DATA_LEN)]);
        }
        (NODE_INFO, _) => write(node_info(device).as_bytes()),
        (PORT_INFO, 0 | 1) => write(port_info(device).as_bytes()),
        (GUID_INFO, 0) => write(&port_guid(device).to_be_bytes()),
        (PKEY_TABLE, 0) => write(&PKey::DEFAULT.0.to_be_bytes()),
        (PORT_INFO | GUID_INFO | PKEY_TABLE, _) => return MadStatus::InvalidField,
        _ => return MadStatus::UnsupportedAttribute,
    }
    MadStatus::Success
}

/// Returns the GID prefix and the GUID of the port (IBTA 4.1.1).
fn gid_halves(device: &Device) -> (u64, u64) {
    let gid = u128::from_be_bytes(Gid::from(device.config.addr).0);
    ((gid >> 64) as u64, gid as u64)
}

fn port_guid(device: &Device) -> u64 {
    gid_halves(device).1
}

fn node_info(device: &Device) -> smp::NodeInfo {
    const CHANNEL_ADAPTER: u8 = 1;
    let guid = U64::new(device.device_attr().node_guid);
    smp::NodeInfo {
        base_version: BASE_VERSION,
        class_version: smp::CLASS_VERSION,
        node_type: CHANNEL_ADAPTER,
        ports: device.device_attr().ports,
        system_image_guid: guid,
        node_guid: guid,
        port_guid: U64::new(port_guid(device)),
        partition_cap: U16::new(1),
        device_id: U16::ZERO,
        revision: U32::ZERO,
        port_and_vendor: U32::new(u32::from(PORT) << 24),
    }
}

fn port_info(device: &Device) -> smp::PortInfo {
    let (mtu, is_active) = (
        device.config.mtu.code(),
        device.port.state() == PortState::Active,
    );
    // Active and link up, or down and polling.
    let (state, physical) = if is_active { (4, 5) } else { (1, 2) };
    smp::PortInfo {
        gid_prefix: U64::new(gid_halves(device).0),
        capabilities: U32::new(device.port.capabilities().bits()),
        local_port: PORT,
        link_width_enabled: SLOWEST,
        link_width_supported: SLOWEST,
        link_width_active: SLOWEST,
        speed_supported_and_state: SLOWEST << 4 | state,
        // The link goes to polling when it is down.
        physical_state: physical << 4 | 2,
        speed_active_and_enabled: SLOWEST << 4 | SLOWEST,
        neighbor_mtu: mtu << 4,
        vl_cap: 1 << 4,
        mtu_cap: mtu,
        operational_vls: 1 << 4,
        p_key_violations: U16::new(saturate(device.counters.rx_wrong_pkey, u16::MAX)),
        guid_cap: 1,
        response_time: RESPONSE_TIME,
        ..smp::PortInfo::default()
    }
}

/// Returns whether a PortSelect value matches our only port.
fn is_port(select: u8) -> bool {
    select == PORT || select == perf::ALL_PORTS
}
