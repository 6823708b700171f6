//! Virtual Ethernet member: a host interface which sends its frames as datagrams over the fabric.
//! This host can also be the manager of the Ethernet. If it is a member of multiple Ethernets,
//! there is an interface for each, but they all use the same queue pairs, multicast group and
//! manager.
//!
//! ```text
//!  TAP ⇄ VirtualPort ⇄ queue pair for frames ──────┐
//!             ↑                                     ├─ software NIC ⇄ members, multicast group
//!            Vema ⇄ queue pair for management ──────┤
//!             EthernetManager ⇄ queue pair ─────────┘
//! ```
//!
//! The state machines are in [`riser_fabric::vnic`]; this is the event loop.

mod queue;
mod tap;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use queue::{Event, MULTICAST_QPN, Queue, QueueConfig};
use riser_block::poll_fds::{PollInterest, PollInterests, wait};
use riser_fabric::vnic::manager::MadDestination;
use riser_fabric::vnic::port::{Destination, Encapsulated, InterfaceConfig};
use riser_fabric::vnic::stats::Stats;
use riser_fabric::vnic::wire::attr::{VeswPortInfo, link};
use riser_fabric::vnic::wire::{Lid, Mac};
use riser_fabric::vnic::{
    DATA_QKEY, EthernetManager, MANAGEMENT_QKEY, MIN_PATH_MTU, ManagerConfig, QpAddress, Vema,
    VemaConfig, VeswConfig, VirtualPort, frame,
};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    AhAttr, AhId, AsyncEvent, Completion, CqId, Gid, Notify, PdId, Provider, Verbs, VerbsError,
};
pub use tap::{InterfaceState, MAX_NAME, Tap};

/// Max frames and packets of each type processed per poll.
const BATCH: usize = 64;
/// Interval for checking the interface, because the user can change it.
const LOOK: Duration = Duration::from_millis(500);
/// If no manager is found in this time, we log a message.
const PATIENCE: Duration = Duration::from_secs(5);
/// Max number of cached address handles.
const MAX_HANDLES: usize = 1024;
/// Max datagrams in flight (send and receive), for data frames and for management.
const DATA_SLOTS: (usize, usize) = (256, 1024);
const MANAGEMENT_SLOTS: (usize, usize) = (64, 512);
/// Max time to wait until the last datagrams are sent.
const FAREWELL: Duration = Duration::from_millis(200);

const DATA: u32 = 0;
const AGENT: u32 = 1;
const MANAGER: u32 = 2;

/// Member configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Software NIC address.
    pub addr: IpAddr,
    /// Multicast group used by the Ethernet.
    pub group: IpAddr,
    /// Interface names, at least one: the first name is used for the first switch, and so on.
    pub names: Vec<String>,
    /// MAC address for the first interface; if not set, it is assigned by the manager.
    pub mac: Option<Mac>,
    /// If set, only accept this manager.
    pub manager: Option<IpAddr>,
    /// If set, act as manager for these switches.
    pub manage: Option<Manage>,
}

/// Manager configuration.
#[derive(Clone, Debug)]
pub struct Manage {
    /// Switches, at least one.
    pub vesws: Vec<VeswConfig>,
    /// Discovery interval.
    pub interval: Duration,
    /// Members will be removed if they don't respond for this time.
    pub dead_after: Duration,
}

/// Error which prevents the member from starting or running.
#[derive(Debug, thiserror::Error)]
pub enum VnicError {
    /// The software NIC can't be opened.
    #[error("cannot open a software NIC at {0}")]
    Device(IpAddr, #[source] io::Error),
    /// Verbs error from the NIC.
    #[error("{step}")]
    Verbs {
        /// Failed step.
        step: &'static str,
        /// Underlying error.
        #[source]
        source: VerbsError,
    },
    /// The interface MTU is too small for management packets.
    #[error("the path MTU of {1} bytes at {0} is too small; a member requires {MIN_PATH_MTU}")]
    PathMtu(IpAddr, u32),
    /// The interface can't be created.
    #[error("cannot create the interface {0}")]
    Create(String, #[source] io::Error),
    /// The interface was removed, or a setting was rejected.
    #[error("the interface {0} failed")]
    Interface(String, #[source] io::Error),
}

/// Interface statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Interface name.
    pub interface: String,
    /// Frames sent by the host.
    pub sent: u64,
    /// Frames received by the host.
    pub received: u64,
    /// Frames from the host which could not be sent.
    pub send_errors: u64,
    /// Received packets without a valid frame.
    pub receive_errors: u64,
}

/// Port configuration received from the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortStatus {
    /// Switch number.
    pub vesw_id: u16,
    /// Port address.
    pub lid: Lid,
    /// Interface MAC address.
    pub mac: Mac,
    /// Interface MTU.
    pub mtu: u16,
    /// Set if the port is forwarding frames.
    pub is_forwarding: bool,
}

fn verbs(step: &'static str) -> impl Fn(VerbsError) -> VnicError {
    move |source| VnicError::Verbs { step, source }
}

/// Interface. It uses the virtual port with the same index.
struct Interface {
    tap: Tap,
    /// MAC address configured by the user, and the last MAC address assigned by the manager.
    wanted_mac: Option<Mac>,
    given_mac: Option<Mac>,
    status: Option<PortStatus>,
}

impl Interface {
    /// Creates an error for this interface.
    fn failed(&self) -> impl Fn(io::Error) -> VnicError + use<> {
        let name = self.tap.name().to_owned();
        move |e| VnicError::Interface(name.clone(), e)
    }

    /// The carrier is only set when the port is forwarding and the NIC port is up.
    fn set_carrier(&self, is_linked: bool) -> Result<(), VnicError> {
        let is_forwarding = self.status.is_some_and(|status| status.is_forwarding);
        let set = self.tap.set_carrier(is_linked && is_forwarding);
        set.map_err(self.failed())
    }

    /// Applies the manager's configuration to this interface. Returns whether there was a change.
    fn apply(
        &mut self,
        wanted: InterfaceConfig,
        info: &VeswPortInfo,
        is_linked: bool,
    ) -> Result<bool, VnicError> {
        let named = self.tap.find_name();
        let failed = self.failed();
        named.map_err(&failed)?;
        if let Some(mtu) = wanted.mtu {
            self.tap.set_mtu(mtu).map_err(&failed)?;
        }
        // If the user has changed this address, keep it until the manager assigns a new address.
        let mac = self.wanted_mac.or(wanted.mac);
        if let Some(mac) = mac
            && self.given_mac != Some(mac)
        {
            self.tap.set_mac(mac).map_err(&failed)?;
            self.given_mac = Some(mac);
        }
        if self.status.is_none() {
            self.tap.set_up().map_err(&failed)?;
        }
        let status = PortStatus {
            vesw_id: info.vesw.vesw_id.get(),
            lid: Lid(info.vport.encap_slid.get()),
            mac: self.given_mac.unwrap_or_default(),
            mtu: info.vesw.eth_mtu.get(),
            is_forwarding: wanted.carrier,
        };
        if self.status == Some(status) {
            return Ok(false);
        }
        tracing::info!(
            interface = self.tap.name(),
            switch = status.vesw_id,
            port = status.lid.0,
            mac = %status.mac,
            mtu = status.mtu,
            forwarding = status.is_forwarding,
            "the port is configured"
        );
        self.status = Some(status);
        self.set_carrier(is_linked)?;
        Ok(true)
    }
}

/// Virtual Ethernet member.
pub struct Node {
    nic: Roce,
    pd: PdId,
    cq: CqId,
    group: Gid,
    group_ah: AhId,
    handles: HashMap<(Gid, u8), AhId>,
    data: Queue,
    agent: Queue,
    vema: Vema,
    manager: Option<(Queue, EthernetManager)>,
    interfaces: Vec<Interface>,
    /// Interface to process first.
    first: usize,
    is_linked: bool,
    looked: Option<Instant>,
    /// Time when we will log that there is no manager.
    missed: Option<Instant>,
    completions: Vec<Completion>,
    packet: Vec<u8>,
    frame: Vec<u8>,
}

impl Node {
    /// Opens the NIC and creates the interfaces.
    ///
    /// # Errors
    /// Returns [`VnicError`] if the NIC or an interface can't be set up.
    ///
    /// # Panics
    /// If there are no interface names or more than 255, or if there are no switches to manage.
    pub fn open(config: &Config) -> Result<Self, VnicError> {
        let roce = RoceConfig::new(config.addr);
        let mut nic = Roce::open(&roce).map_err(|e| VnicError::Device(config.addr, e))?;
        let port = nic.query_port(1).map_err(verbs("query of the port"))?;
        let mtu = port.active_mtu.bytes();
        if (mtu as usize) < MIN_PATH_MTU {
            return Err(VnicError::PathMtu(config.addr, mtu));
        }
        let create = |(index, name): (usize, &String)| {
            let tap = Tap::create(name).map_err(|e| VnicError::Create(name.clone(), e))?;
            Ok(Interface {
                tap,
                wanted_mac: config.mac.filter(|_| index == 0),
                given_mac: None,
                status: None,
            })
        };
        let interfaces = config.names.iter().enumerate().map(create);
        let interfaces = interfaces.collect::<Result<Vec<_>, VnicError>>()?;
        let max_vports = u8::try_from(interfaces.len()).expect("at most 255 interfaces");
        let pd = nic.alloc_pd().map_err(verbs("protection domain"))?;
        let slots = |(sends, receives): (usize, usize)| sends + receives;
        let entries = slots(DATA_SLOTS) + 2 * slots(MANAGEMENT_SLOTS);
        let cq = nic
            .create_cq(entries as u32)
            .map_err(verbs("completion queue"))?;
        let group = Gid::from(config.group);
        let open = |nic: &mut Roce, number, qkey, (sends, receives)| {
            let config = QueueConfig {
                number,
                qkey,
                mtu: mtu as usize,
                receives,
                sends,
            };
            Queue::open(nic, pd, cq, &config, group).map_err(verbs("queue pair of the group"))
        };
        let data = open(&mut nic, DATA, DATA_QKEY, DATA_SLOTS)?;
        let agent = open(&mut nic, AGENT, MANAGEMENT_QKEY, MANAGEMENT_SLOTS)?;
        let own = Gid::from(config.addr);
        let manager = match &config.manage {
            None => None,
            Some(manage) => {
                let queue = open(&mut nic, MANAGER, MANAGEMENT_QKEY, MANAGEMENT_SLOTS)?;
                let manager = EthernetManager::new(ManagerConfig {
                    address: QpAddress {
                        gid: own,
                        qpn: queue.qpn,
                    },
                    max_mad: mtu as usize,
                    vesws: manage.vesws.clone(),
                    interval: manage.interval,
                    dead_after: manage.dead_after,
                    first_tid: getrandom::u64().unwrap_or_default(),
                });
                Some((queue, manager))
            }
        };
        let vema = Vema::new(VemaConfig {
            qpn: data.qpn,
            mtu: mtu as u16,
            max_vports,
            manager: config.manager.map(Gid::from),
        });
        let attr = AhAttr {
            // Don't send anything outside of the local network.
            hop_limit: 1,
            ..AhAttr::new(group)
        };
        let group_ah = nic
            .create_ah(pd, attr)
            .map_err(verbs("address handle of the group"))?;
        Ok(Self {
            nic,
            pd,
            cq,
            group,
            group_ah,
            handles: HashMap::new(),
            data,
            agent,
            vema,
            manager,
            interfaces,
            first: 0,
            is_linked: true,
            looked: None,
            missed: Some(Instant::now() + PATIENCE),
            completions: Vec::new(),
            packet: Vec::new(),
            frame: vec![0; 1 << 16],
        })
    }

    /// Returns interface statistics.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        let report = |(vport, interface): (u8, &Interface)| {
            let stats = self.vema.port(vport).map(VirtualPort::stats);
            let count = |of: fn(&Stats) -> u64| stats.map_or(0, of);
            Report {
                interface: interface.tap.name().to_owned(),
                sent: count(Stats::tx_packets),
                received: count(Stats::rx_packets),
                send_errors: count(Stats::tx_errors),
                receive_errors: count(Stats::rx_errors),
            }
        };
        (0..).zip(&self.interfaces).map(report).collect()
    }

    /// Processes available work, then sleeps until there are new events or `wake` is readable.
    ///
    /// # Errors
    /// Returns [`VnicError`] if the member can't continue.
    pub fn run_once(&mut self, wake: BorrowedFd<'_>) -> Result<(), VnicError> {
        let now = Instant::now();
        let mut done = self.nic.progress(now);
        done += self.take_completions(now)?;
        done += self.take_frames(now)?;
        self.check_interfaces(now)?;
        self.manage(now);
        self.apply()?;
        done += self.nic.progress(now);
        if done == 0 {
            self.sleep(wake)?;
        }
        Ok(())
    }

    /// Processes received packets and management datagrams.
    fn take_completions(&mut self, now: Instant) -> Result<usize, VnicError> {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.nic.poll_cq(self.cq, BATCH, &mut completions);
        polled.map_err(verbs("completions"))?;
        for completion in &completions {
            self.take_completion(completion, now);
        }
        let count = completions.len();
        self.completions = completions;
        let queues = [(DATA, &mut self.data), (AGENT, &mut self.agent)];
        let manager = self.manager.as_mut().map(|(queue, _)| (MANAGER, queue));
        for (number, queue) in queues.into_iter().chain(manager) {
            queue
                .post_again(&mut self.nic, number)
                .map_err(verbs("receives"))?;
        }
        Ok(count)
    }

    fn take_completion(&mut self, completion: &Completion, now: Instant) {
        let number = (completion.wr_id.0 >> 32) as u32;
        let mut packet = std::mem::take(&mut self.packet);
        let mut read = |queue: &mut Queue| match queue.handle_completion(completion) {
            Event::Received { slot, len, qpn } => queue.read(slot, len, qpn, &mut packet),
            Event::Nothing => None,
        };
        match number {
            DATA => {
                if let Some(from) = read(&mut self.data) {
                    match self.vema.decapsulate(from, &packet, now) {
                        Ok(Some((vport, frame))) => {
                            self.interfaces[usize::from(vport)].tap.write(frame);
                        }
                        Ok(None) => {}
                        Err(drop) => {
                            tracing::trace!(
                                from = %from.gid,
                                %drop,
                                "discarded a packet without a valid frame"
                            );
                        }
                    }
                }
            }
            AGENT => {
                if let Some(from) = read(&mut self.agent)
                    && let Some(response) = self.vema.handle_mad(from, &packet, now)
                    && let Some(ah) = self.handle(from.gid, 0)
                {
                    self.agent
                        .send(&mut self.nic, AGENT, (ah, from.qpn), &response);
                }
            }
            _ => {
                if let Some((queue, manager)) = &mut self.manager
                    && let Some(from) = read(queue)
                {
                    manager.handle_mad(from, &packet, now);
                }
            }
        }
        self.packet = packet;
    }

    /// Returns the address handle for a fabric port and service class.
    fn handle(&mut self, gid: Gid, sc: u8) -> Option<AhId> {
        if gid == self.group {
            return Some(self.group_ah);
        }
        // We use the DSCP class selectors as fabric classes (RFC 2474 4.2.2.1).
        let traffic_class = sc.min(7) << 5;
        if let Some(ah) = self.handles.get(&(gid, traffic_class)) {
            return Some(*ah);
        }
        if self.handles.len() >= MAX_HANDLES {
            for (_, ah) in self.handles.drain() {
                let _ = self.nic.destroy_ah(ah);
            }
        }
        let attr = AhAttr {
            traffic_class,
            ..AhAttr::new(gid)
        };
        match self.nic.create_ah(self.pd, attr) {
            Ok(ah) => {
                self.handles.insert((gid, traffic_class), ah);
                Some(ah)
            }
            Err(error) => {
                tracing::debug!(%gid, %error, "cannot create an address handle for a port");
                None
            }
        }
    }

    /// Sends frames from the host, if there is enough room for the packets. A busy interface can
    /// use all of the room, so we start with a different interface next time.
    fn take_frames(&mut self, now: Instant) -> Result<usize, VnicError> {
        let mut bytes = std::mem::take(&mut self.frame);
        let mut count = 0;
        let interfaces = self.interfaces.len();
        for vport in (self.first..interfaces).chain(0..self.first) {
            for _ in 0..BATCH {
                if !self.has_room() {
                    break;
                }
                let interface = &self.interfaces[vport];
                let read = interface.tap.read(&mut bytes);
                let Some(len) = read.map_err(interface.failed())? else {
                    break;
                };
                self.send_frame(vport as u8, &mut bytes, len, now);
                count += 1;
            }
        }
        if count > 0 {
            self.first = (self.first + 1) % interfaces;
        }
        self.frame = bytes;
        Ok(count)
    }

    /// Returns whether the packets for a max-size frame fit, with the smallest path MTU.
    fn has_room(&self) -> bool {
        self.data.room() > riser_fabric::vnic::MAX_FRAME / (MIN_PATH_MTU - 28)
    }

    fn send_frame(&mut self, vport: u8, bytes: &mut [u8], len: usize, now: Instant) {
        let Some(port) = self.vema.port_mut(vport) else {
            return;
        };
        let sent: Encapsulated = match port.encapsulate(&bytes[..len], now) {
            Ok(sent) => sent,
            Err(drop) => {
                tracing::trace!(%drop, "frame not sent");
                return;
            }
        };
        let padded = len.max(frame::MIN);
        bytes[len..padded].fill(0);
        let frame = &bytes[..padded];
        let to = match sent.to {
            Destination::Group => Some((self.group_ah, MULTICAST_QPN)),
            Destination::Port(to) => {
                let ah = self.handle(to.gid, sent.header.sc);
                ah.map(|ah| (ah, to.qpn))
            }
        };
        let Some(to) = to else { return };
        self.packet.resize(sent.mtu, 0);
        for index in 0..sent.packets(frame.len()) {
            let len = sent.emit(frame, index, &mut self.packet);
            self.data.send(&mut self.nic, DATA, to, &self.packet[..len]);
        }
    }

    /// Checks the interfaces, because the user can change them, and the state of the NIC port.
    fn check_interfaces(&mut self, now: Instant) -> Result<(), VnicError> {
        while let Some(event) = self.nic.poll_async_event() {
            match event {
                AsyncEvent::PortActive(_) => self.set_linked(true)?,
                AsyncEvent::PortError(_) => self.set_linked(false)?,
                other => tracing::debug!(?other, "software NIC event"),
            }
        }
        if self.looked.is_some_and(|looked| now < looked + LOOK) {
            return Ok(());
        }
        self.looked = Some(now);
        if self.interfaces.iter().any(|i| i.status.is_none())
            && self.missed.is_some_and(|missed| missed <= now)
        {
            self.missed = None;
            tracing::warn!(
                group = %self.group.ip(),
                "some interfaces are not configured by a manager yet: check that one member uses \
                 --manage with as many switches, and that datagrams of this group arrive"
            );
        }
        for (vport, interface) in (0..).zip(&mut self.interfaces) {
            let state = interface.tap.state().map_err(interface.failed())?;
            let groups = interface.tap.multicast_macs();
            let groups = groups.map_err(interface.failed())?;
            if let Some(port) = self.vema.port_mut(vport) {
                port.set_link(state.is_up);
                port.set_macs(&[state.mac], &groups);
            }
        }
        Ok(())
    }

    fn set_linked(&mut self, is_linked: bool) -> Result<(), VnicError> {
        self.is_linked = is_linked;
        self.interfaces
            .iter()
            .try_for_each(|interface| interface.set_carrier(is_linked))
    }

    /// Sends pending management datagrams.
    fn manage(&mut self, now: Instant) {
        while self
            .manager
            .as_ref()
            .is_some_and(|(queue, _)| queue.room() > 0)
        {
            let next = self
                .manager
                .as_mut()
                .and_then(|(_, m)| m.poll_transmit(now));
            let Some((to, mad)) = next else { break };
            let to = match to {
                MadDestination::Group => Some((self.group_ah, MULTICAST_QPN)),
                MadDestination::Member(to) => self.handle(to.gid, 0).map(|ah| (ah, to.qpn)),
            };
            if let Some(to) = to
                && let Some((queue, _)) = &mut self.manager
            {
                queue.send(&mut self.nic, MANAGER, to, &mad);
            }
        }
        while self.agent.room() > 0 {
            let Some((to, mad)) = self.vema.poll_trap(now) else {
                break;
            };
            if let Some(ah) = self.handle(to.gid, 0) {
                self.agent.send(&mut self.nic, AGENT, (ah, to.qpn), &mad);
            }
        }
    }

    /// Applies the manager's configuration to the interfaces.
    fn apply(&mut self) -> Result<(), VnicError> {
        for (vport, interface) in (0..).zip(&mut self.interfaces) {
            let Some(port) = self.vema.port_mut(vport) else {
                continue;
            };
            if let Some(wanted) = port.poll_interface()
                && interface.apply(wanted, &port.info(), self.is_linked)?
            {
                // The manager should know about the new state soon.
                self.looked = None;
            }
        }
        Ok(())
    }

    /// Sleeps until there is an event or a timer expires.
    fn sleep(&mut self, wake: BorrowedFd<'_>) -> Result<(), VnicError> {
        while self.nic.poll_cq_event().is_some() {}
        let armed = self.nic.req_notify_cq(self.cq, Notify::Next);
        if armed.map_err(verbs("completions"))? || self.nic.arm_fds() {
            return Ok(());
        }
        let now = Instant::now();
        let look = self.looked.map(|looked| looked + LOOK);
        let manager = self.manager.as_ref().and_then(|(_, m)| m.deadline());
        let due = [look, manager, self.nic.deadline()].into_iter().flatten();
        let until = due.min().unwrap_or(now);
        let timeout = until.saturating_duration_since(now) + Duration::from_millis(1);
        let mut fds: PollInterests<'_> = self
            .nic
            .event_fds()
            .into_iter()
            .map(PollInterest::reading)
            .collect();
        fds.push(PollInterest::reading(wake));
        if self.has_room() {
            let taps = self.interfaces.iter().map(|i| i.tap.as_fd());
            fds.extend(taps.map(PollInterest::reading));
        }
        wait(fds, Some(timeout));
        Ok(())
    }

    /// Notifies the manager that the interfaces will go down.
    pub fn notify_leaving(&mut self) {
        let mut has_left = false;
        for vport in 0..self.interfaces.len() as u8 {
            if let Some(port) = self.vema.port_mut(vport) {
                has_left |= port.info().vport.eth_link_status == link::UP;
                port.set_link(false);
            }
        }
        if !has_left {
            return;
        }
        let end = Instant::now() + FAREWELL;
        self.manage(Instant::now());
        while self.agent.room() < MANAGEMENT_SLOTS.0 && Instant::now() < end {
            let now = Instant::now();
            self.nic.progress(now);
            if self.take_completions(now).is_err() {
                return;
            }
        }
    }
}
