//! The management agents of the NIC: what it answers to MADs itself.
//!
//! | class | who may ask |
//! | --- | --- |
//! | subnet management (IBTA 14.2) | its own program: RoCE has no queue pair 0 (annex A16) |
//! | performance management (IBTA 16.1) | its own program, and every host by queue pair 1 |
//!
//! A program answers other classes itself, and gets the answers to what it has asked: it registers
//! them ([`Nic::register_agent`]), and takes and sends datagrams of queue pair 1 without having one. Of
//! performance management it gets the answers only.
//!
//! The counters of a port can be reset, as the class demands, by each host that can ask for them.
//! So they count from a base of their own, and what the device's owner reads
//! ([`Nic::counters`]) is not touched.
//!
//! Bounds: [`MAX_ANSWERS`] wait to be sent; questions beyond are lost like any datagram. So are those
//! that a program does not take ([`MAX_RECEIVED`]).

use std::collections::VecDeque;
use std::net::IpAddr;

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::objects::{PORT, check_port};
use super::{Nic, NicCounters, Wire};
use crate::verbs::{Gid, PKey, PortState, VerbsError};
use crate::wire::mad::{
    BASE_VERSION, ClassPortInfo, Mad, MadClass, MadHeader, MadMethod, MadStatus, RESPONSE,
};
use crate::wire::{perf, smp};

/// Answers to other hosts that wait to be sent.
const MAX_ANSWERS: usize = 16;

/// Datagrams of registered classes that wait for the program, and for being sent.
const MAX_RECEIVED: usize = 256;
const MAX_SENT: usize = 256;

/// Answers come within 4.096 µs × 2^18, about a second: the owner of the device may be busy.
const RESPONSE_TIME: u8 = 18;

/// CapabilityMask of a port: communication management (IBTA table 146).
const HAS_CM: u32 = 1 << 16;

/// One lane of 2.5 Gbit/s, the least that can be said: a socket has no speed.
const SLOWEST: u8 = 1;

/// A counter of the port.
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

/// Values by [`Counter`].
type Counters = [u64; COUNTERS];

/// Counters of PortCounters that can be selected.
const SELECT: [(u32, Counter); 6] = [
    (perf::select::RCV_ERRORS, Counter::RcvErrors),
    (perf::select::XMIT_DATA, Counter::XmitData),
    (perf::select::RCV_DATA, Counter::RcvData),
    (perf::select::XMIT_PKTS, Counter::XmitPackets),
    (perf::select::RCV_PKTS, Counter::RcvPackets),
    (perf::select::QP1_DROPPED, Counter::Qp1Dropped),
];

/// Those of PortCountersExtended, from bit 0 on.
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

/// Agents of a device.
#[derive(Debug, Default)]
pub(super) struct Agents {
    /// What the counters had when they were reset.
    base: Counters,
    /// Answers to be sent, with the hosts that asked.
    answers: VecDeque<(IpAddr, Mad)>,
    /// Datagrams of the program, with the hosts that get them.
    sent: VecDeque<(IpAddr, Mad)>,
    /// Classes that the program has registered, by the bits of their numbers.
    registered: [u128; 2],
    /// What has come of these, with the hosts that sent it.
    received: VecDeque<(IpAddr, Mad)>,
}

impl Agents {
    /// Whether datagrams wait to be sent.
    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty() || !self.sent.is_empty()
    }

    pub(super) fn poll_answer(&mut self) -> Option<(IpAddr, Mad)> {
        self.answers.pop_front().or_else(|| self.sent.pop_front())
    }

    fn is_registered(&self, class: u8) -> bool {
        self.registered[usize::from(class >> 7)] >> (class & 0x7f) & 1 == 1
    }
}

/// What the device has counted, in the words of the class.
fn count(c: &NicCounters) -> Counters {
    let mut counters = Counters::default();
    let mut set = |counter, value| counters[counter as usize] = value;
    set(Counter::RcvErrors, c.rx_malformed + c.rx_icrc_errors);
    set(Counter::Qp1Dropped, c.rx_dropped_mads);
    // In words of four bytes.
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

/// Narrow counters stay at their largest value (IBTA 16.1.3.5).
fn saturate<T: TryFrom<u64>>(value: u64, largest: T) -> T {
    T::try_from(value).unwrap_or(largest)
}

/// Puts an attribute into a MAD; the rest of its place becomes zero.
fn put(mad: &mut Mad, data: usize, len: usize, attribute: &[u8]) {
    mad[data..data + len].fill(0);
    mad[data..data + attribute.len()].copy_from_slice(attribute);
}

impl Nic {
    /// See [`Verbs::local_mad`](crate::verbs::Verbs::local_mad).
    pub fn local_mad(&mut self, port: u8, mad: &Mad) -> Result<Option<Mad>, VerbsError> {
        self.config.check_packets("local management datagrams")?;
        check_port(port)?;
        Ok(self.process_mad(mad, true))
    }

    /// Has datagrams of a management class come to [`Self::poll_mad`] instead of a queue pair 1; of
    /// performance management those that are answers, since the device answers questions itself.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for classes that the device handles itself.
    pub fn register_agent(&mut self, class: MadClass) -> Result<(), VerbsError> {
        match class {
            MadClass::SubnetAdm | MadClass::DeviceMgmt | MadClass::Performance => {
                let class = class as u8;
                self.agents.registered[usize::from(class >> 7)] |= 1 << (class & 0x7f);
                Ok(())
            }
            MadClass::SubnLid | MadClass::SubnDirected | MadClass::ComMgt => {
                Err(VerbsError::InvalidParameter("management class"))
            }
        }
    }

    /// Sends a datagram from queue pair 1 to that of a host, soon. It may be lost.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] while too many wait.
    pub fn send_mad(&mut self, to: IpAddr, mad: &Mad) -> Result<(), VerbsError> {
        if self.agents.sent.len() == MAX_SENT {
            return Err(VerbsError::InsufficientResources("management datagrams"));
        }
        self.agents.sent.push_back((to, *mad));
        Ok(())
    }

    /// The next datagram of a registered class, and the host whose queue pair 1 has sent it.
    pub fn poll_mad(&mut self) -> Option<(IpAddr, Mad)> {
        self.agents.received.pop_front()
    }

    /// Takes in a MAD of another host, from queue pair 1 to queue pair 1; returns whether it was for
    /// an agent.
    pub(super) fn handle_agent_mad(&mut self, from: IpAddr, mad: &Mad) -> bool {
        let header = MadHeader::of(mad);
        let is_request = header.method() & RESPONSE == 0;
        let is_own = is_request && header.class() == MadClass::Performance as u8;
        if !is_own && self.agents.is_registered(header.class()) {
            if self.agents.received.len() == MAX_RECEIVED {
                self.counters.rx_dropped_mads += 1;
            } else {
                self.agents.received.push_back((from, *mad));
            }
            return true;
        }
        if !is_own {
            return false;
        }
        if self.agents.answers.len() == MAX_ANSWERS {
            self.counters.rx_dropped_mads += 1;
        } else if let Some(answer) = self.process_mad(mad, false) {
            self.agents.answers.push_back((from, answer));
        }
        true
    }

    /// The answer to a MAD, which has its bytes but for the header and the attribute.
    fn process_mad(&mut self, mad: &Mad, is_local: bool) -> Option<Mad> {
        const SUBNET: [u8; 2] = [MadClass::SubnLid as u8, MadClass::SubnDirected as u8];
        const NO_ANSWER: [u8; 3] = [
            MadMethod::Send as u8,
            MadMethod::Trap as u8,
            MadMethod::TrapRepress as u8,
        ];
        let header = MadHeader::of(mad);
        if header.method() & RESPONSE != 0 || NO_ANSWER.contains(&header.method()) {
            return None;
        }
        let is_directed = header.class() == MadClass::SubnDirected as u8;
        // With hops it is for a node behind other ports (IBTA 14.2.2).
        let hops = header.class_specific() & 0xff;
        if is_directed && hops != 0 {
            return None;
        }
        let mut answer = *mad;
        let status = match (header.class(), header.class_version()) {
            _ if header.base_version() != BASE_VERSION => MadStatus::BadVersion,
            (class, perf::CLASS_VERSION) if class == MadClass::Performance as u8 => {
                self.answer_performance(&header, &mut answer)
            }
            (class, smp::CLASS_VERSION) if is_local && SUBNET.contains(&class) => {
                self.answer_subnet(&header, &mut answer)
            }
            _ => MadStatus::BadVersion,
        };
        let mut response = header.response(status);
        if is_directed {
            response = response.with_status(status as u16 | smp::DIRECTION);
        }
        answer[..size_of::<MadHeader>()].copy_from_slice(response.as_bytes());
        Some(answer)
    }

    /// Subnet management: reads only, since there is no subnet manager that could set something.
    fn answer_subnet(&self, header: &MadHeader, mad: &mut Mad) -> MadStatus {
        use smp::attribute::*;
        if header.method() == MadMethod::Set as u8 {
            return MadStatus::UnsupportedAttribute;
        }
        if header.method() != MadMethod::Get as u8 {
            return MadStatus::UnsupportedMethod;
        }
        // It selects a block of a table, or a port, of which 0 means the one that is asked.
        let modifier = header.modifier();
        let mut put = |attribute: &[u8]| put(mad, smp::DATA, smp::DATA_LEN, attribute);
        match (header.attribute(), modifier) {
            (NODE_DESCRIPTION, _) => {
                let name = self.attr.name.as_bytes();
                put(&name[..name.len().min(smp::DATA_LEN)]);
            }
            (NODE_INFO, _) => put(self.node_info().as_bytes()),
            (PORT_INFO, 0 | 1) => put(self.port_info().as_bytes()),
            (GUID_INFO, 0) => put(&self.port_guid().to_be_bytes()),
            (PKEY_TABLE, 0) => put(&PKey::DEFAULT.0.to_be_bytes()),
            (PORT_INFO | GUID_INFO | PKEY_TABLE, _) => return MadStatus::InvalidField,
            _ => return MadStatus::UnsupportedAttribute,
        }
        MadStatus::Success
    }

    /// High and low half of the port's GID: its prefix and its GUID (IBTA 4.1.1).
    fn gid_halves(&self) -> (u64, u64) {
        let gid = u128::from_be_bytes(Gid::from(self.config.addr).0);
        ((gid >> 64) as u64, gid as u64)
    }

    fn port_guid(&self) -> u64 {
        self.gid_halves().1
    }

    fn node_info(&self) -> smp::NodeInfo {
        const CHANNEL_ADAPTER: u8 = 1;
        let guid = U64::new(self.attr.node_guid);
        smp::NodeInfo {
            base_version: BASE_VERSION,
            class_version: smp::CLASS_VERSION,
            node_type: CHANNEL_ADAPTER,
            ports: self.attr.ports,
            system_image_guid: guid,
            node_guid: guid,
            port_guid: U64::new(self.port_guid()),
            partition_cap: U16::new(1),
            device_id: U16::ZERO,
            revision: U32::ZERO,
            port_and_vendor: U32::new(u32::from(PORT) << 24),
        }
    }

    fn port_info(&self) -> smp::PortInfo {
        let (mtu, is_active) = (self.config.mtu.code(), self.port_state == PortState::Active);
        // Active and linked, or down and polling.
        let (state, physical) = if is_active { (4, 5) } else { (1, 2) };
        smp::PortInfo {
            gid_prefix: U64::new(self.gid_halves().0),
            capabilities: U32::new(if self.config.wire == Wire::Network {
                HAS_CM
            } else {
                0
            }),
            local_port: PORT,
            link_width_enabled: SLOWEST,
            link_width_supported: SLOWEST,
            link_width_active: SLOWEST,
            speed_supported_and_state: SLOWEST << 4 | state,
            // It polls when it goes down.
            physical_state: physical << 4 | 2,
            speed_active_and_enabled: SLOWEST << 4 | SLOWEST,
            neighbor_mtu: mtu << 4,
            vl_cap: 1 << 4,
            mtu_cap: mtu,
            operational_vls: 1 << 4,
            p_key_violations: U16::new(saturate(self.counters.rx_wrong_pkey, u16::MAX)),
            guid_cap: 1,
            response_time: RESPONSE_TIME,
            ..smp::PortInfo::default()
        }
    }

    fn answer_performance(&mut self, header: &MadHeader, mad: &mut Mad) -> MadStatus {
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
                put(mad, perf::DATA, len, info.as_bytes());
                MadStatus::Success
            }
            (PORT_COUNTERS, _) => self.answer_counters(is_set, mad),
            (PORT_COUNTERS_EXTENDED, _) => self.answer_extended(is_set, mad),
            // PortSamplesControl among them: the counters are not sampled.
            _ => MadStatus::UnsupportedAttribute,
        }
    }

    /// Counters since they were reset.
    fn counted(&self) -> Counters {
        let now = count(&self.counters);
        std::array::from_fn(|at| now[at] - self.agents.base[at])
    }

    fn reset(&mut self, which: impl Iterator<Item = Counter>) {
        let now = count(&self.counters);
        for counter in which {
            self.agents.base[counter as usize] = now[counter as usize];
        }
    }

    fn answer_counters(&mut self, is_set: bool, mad: &mut Mad) -> MadStatus {
        let (asked, _) = perf::PortCounters::read_from_prefix(&mad[perf::DATA..])
            .expect("a MAD has room for the attribute");
        if !is_port(asked.port_select) {
            return MadStatus::InvalidField;
        }
        if is_set {
            let select = asked.selected();
            let chosen = SELECT.iter().filter(|(bit, _)| select & bit != 0);
            self.reset(chosen.map(|(_, counter)| *counter));
        }
        let counted = self.counted();
        let wide = |counter| U32::new(saturate(counted[counter as usize], u32::MAX));
        let narrow = |counter| U16::new(saturate(counted[counter as usize], u16::MAX));
        let counters = perf::PortCounters {
            rcv_errors: narrow(Counter::RcvErrors),
            qp1_dropped: narrow(Counter::Qp1Dropped),
            xmit_data: wide(Counter::XmitData),
            rcv_data: wide(Counter::RcvData),
            xmit_packets: wide(Counter::XmitPackets),
            rcv_packets: wide(Counter::RcvPackets),
            ..perf::PortCounters::of(asked.port_select, asked.selected())
        };
        put(mad, perf::DATA, mad.len() - perf::DATA, counters.as_bytes());
        MadStatus::Success
    }

    fn answer_extended(&mut self, is_set: bool, mad: &mut Mad) -> MadStatus {
        let (asked, _) = perf::PortCountersExtended::read_from_prefix(&mad[perf::DATA..])
            .expect("a MAD has room for the attribute");
        if !is_port(asked.port_select) {
            return MadStatus::InvalidField;
        }
        let select = asked.counter_select;
        if is_set {
            let chosen = (0..EXTENDED.len()).filter(|bit| select.get() >> bit & 1 != 0);
            self.reset(chosen.map(|bit| EXTENDED[bit]));
        }
        let counted = self.counted();
        let value = |counter| U64::new(counted[counter as usize]);
        let counters = perf::PortCountersExtended {
            port_select: asked.port_select,
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
        put(mad, perf::DATA, mad.len() - perf::DATA, counters.as_bytes());
        MadStatus::Success
    }
}

/// Whether a PortSelect means the only port.
fn is_port(select: u8) -> bool {
    select == PORT || select == perf::ALL_PORTS
}
