//! A member of a virtual Ethernet: an interface of this host whose frames travel as datagrams over the
//! fabric, and perhaps the manager of the whole Ethernet. It may be a member of several Ethernets, with
//! an interface for each: they have queue pairs, group and manager in common.
//!
//! ```text
//!  TAP ⇄ VirtualPort ⇄ queue pair for frames ──────┐
//!             ↑                                     ├─ software NIC ⇄ members, multicast group
//!            Vema ⇄ queue pair for management ──────┤
//!             EthernetManager ⇄ queue pair ─────────┘
//! ```
//!
//! The machines are those of [`riser_fabric::vnic`]; this is the loop that drives them.

mod queue;
mod tap;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

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

use crate::poll_fds::{Waited, WaitedFds, wait};
use queue::{Event, MULTICAST_QPN, Queue, QueueConfig};
pub use tap::{InterfaceState, MAX_NAME, Tap};

/// Frames and packets that are taken in a turn of one kind.
const BATCH: usize = 64;
/// Time between two looks at the interface, which its user may change.
const LOOK: Duration = Duration::from_millis(500);
/// Time after which a member without a manager says so.
const PATIENCE: Duration = Duration::from_secs(5);
/// Address handles that are kept.
const MAX_HANDLES: usize = 1024;
/// Datagrams that may be on their way out and in, of frames and of management.
const DATA_SLOTS: (usize, usize) = (256, 1024);
const MANAGEMENT_SLOTS: (usize, usize) = (64, 512);
/// Longest time that the last datagrams may take to leave.
const FAREWELL: Duration = Duration::from_millis(200);

const DATA: u32 = 0;
const AGENT: u32 = 1;
const MANAGER: u32 = 2;

/// What a member is.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address of the software NIC.
    pub addr: IpAddr,
    /// Multicast group of the Ethernet.
    pub group: IpAddr,
    /// Names of the interfaces, one or more: the first is at the manager's first switch, and so on.
    pub names: Vec<String>,
    /// MAC address of the first interface, if not the one that the manager gives it.
    pub mac: Option<Mac>,
    /// The only manager that this member listens to.
    pub manager: Option<IpAddr>,
    /// This member is the manager, of such switches.
    pub manage: Option<Manage>,
}

/// What a manager gives the members.
#[derive(Clone, Debug)]
pub struct Manage {
    /// The switches, one or more.
    pub vesws: Vec<VeswConfig>,
    /// Time between two searches for members.
    pub interval: Duration,
    /// Time of silence after which a member is forgotten.
    pub dead_after: Duration,
}

/// Reason why a member cannot be, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum VnicError {
    /// The software NIC does not open.
    #[error("no software NIC at {0}")]
    Device(IpAddr, #[source] io::Error),
    /// The NIC refuses what a member needs.
    #[error("{step}")]
    Verbs {
        /// Step that has failed.
        step: &'static str,
        /// Reason of the NIC.
        #[source]
        source: VerbsError,
    },
    /// The interface's packets are too short for management.
    #[error("the network at {0} carries packets of {1} bytes; a member needs {MIN_PATH_MTU}")]
    PathMtu(IpAddr, u32),
    /// The interface cannot be made.
    #[error("no interface {0}")]
    Create(String, #[source] io::Error),
    /// The interface is gone, or does not take what it is given.
    #[error("the interface {0} failed")]
    Interface(String, #[source] io::Error),
}

/// What an interface of a member has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Name of the interface.
    pub interface: String,
    /// Frames of the host that were sent.
    pub sent: u64,
    /// Frames that the host was given.
    pub received: u64,
    /// Frames of the host that were not sent.
    pub send_errors: u64,
    /// Packets that no frame was taken from.
    pub receive_errors: u64,
}

/// A port, as the manager has configured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortStatus {
    /// Number of the switch.
    pub vesw_id: u16,
    /// Address of the port.
    pub lid: Lid,
    /// MAC address of the interface.
    pub mac: Mac,
    /// MTU of the interface.
    pub mtu: u16,
    /// Frames pass.
    pub is_forwarding: bool,
}

fn verbs(step: &'static str) -> impl Fn(VerbsError) -> VnicError {
    move |source| VnicError::Verbs { step, source }
}

/// An interface, at the virtual port of the same index.
struct Interface {
    tap: Tap,
    /// The address that the user wants, and the one that the manager has given last.
    wanted_mac: Option<Mac>,
    given_mac: Option<Mac>,
    status: Option<PortStatus>,
}

impl Interface {
    /// The error of a request about the interface.
    fn failed(&self) -> impl Fn(io::Error) -> VnicError + use<> {
        let name = self.tap.name().to_owned();
        move |e| VnicError::Interface(name.clone(), e)
    }

    /// The interface has a carrier while its port forwards and the NIC's port is up.
    fn set_carrier(&self, is_linked: bool) -> Result<(), VnicError> {
        let is_forwarding = self.status.is_some_and(|status| status.is_forwarding);
        let set = self.tap.set_carrier(is_linked && is_forwarding);
        set.map_err(self.failed())
    }

    /// Gives the interface what the manager has configured. Returns whether something is new.
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
        // An address that the user has set since stays, until the manager gives another one.
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

/// A member of virtual Ethernets.
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
    /// The interface whose frames are taken first.
    first: usize,
    is_linked: bool,
    looked: Option<Instant>,
    /// Time at which a manager is missed.
    missed: Option<Instant>,
    completions: Vec<Completion>,
    packet: Vec<u8>,
    frame: Vec<u8>,
}

impl Node {
    /// Opens the NIC and makes the interfaces.
    ///
    /// # Errors
    /// [`VnicError`].
    ///
    /// # Panics
    /// If there are no names of interfaces or more than 255, or no switches of a manager.
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
            // Nothing leaves the network that the member is on.
            hop_limit: 1,
            ..AhAttr::new(group)
        };
        let group_ah = nic.create_ah(pd, attr).map_err(verbs("way to the group"))?;
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

    /// What the interfaces have done.
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

    /// Does what can be done now, and then sleeps until there is more, or `wake` is readable.
    ///
    /// # Errors
    /// [`VnicError`]: the member cannot go on.
    pub fn turn(&mut self, wake: BorrowedFd<'_>) -> Result<(), VnicError> {
        let now = Instant::now();
        let mut done = self.nic.progress(now);
        done += self.take_completions(now)?;
        done += self.take_frames(now)?;
        self.look(now)?;
        self.manage(now);
        self.apply()?;
        done += self.nic.progress(now);
        if done == 0 {
            self.sleep(wake)?;
        }
        Ok(())
    }

    /// Takes packets and management datagrams in.
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
        let mut read = |queue: &mut Queue| match queue.take(completion) {
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
                        Err(drop) => tracing::trace!(from = %from.gid, %drop, "no frame"),
                    }
                }
            }
            AGENT => {
                if let Some(from) = read(&mut self.agent)
                    && let Some(answer) = self.vema.handle_mad(from, &packet, now)
                    && let Some(ah) = self.handle(from.gid, 0)
                {
                    self.agent
                        .send(&mut self.nic, AGENT, (ah, from.qpn), &answer);
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

    /// Address handle for a port of the fabric and a service class.
    fn handle(&mut self, gid: Gid, sc: u8) -> Option<AhId> {
        if gid == self.group {
            return Some(self.group_ah);
        }
        // The class selectors of DSCP are the classes of the fabric (RFC 2474 4.2.2.1).
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
                tracing::debug!(%gid, %error, "no way to a port");
                None
            }
        }
    }

    /// Sends frames of the host, as long as there is room for their packets. An interface with more frames
    /// than there is room for would keep those behind it waiting, so another one is the first the next time.
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

    /// Whether there is room for the packets of the longest frame over the shortest path.
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
                tracing::trace!(%drop, "a frame is not sent");
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

    /// Looks at the interfaces, which their user may have changed, and at the state of the NIC's port.
    fn look(&mut self, now: Instant) -> Result<(), VnicError> {
        while let Some(event) = self.nic.poll_async_event() {
            match event {
                AsyncEvent::PortActive(_) => self.set_linked(true)?,
                AsyncEvent::PortError(_) => self.set_linked(false)?,
                other => tracing::debug!(?other, "an event of the software NIC"),
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
                "no manager has configured each interface so far; is there one member with --manage \
                 and as many switches, and do datagrams of this group arrive?"
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

    /// Sends what the manager and the agent have to say.
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

    /// Gives the interfaces what the manager has configured.
    fn apply(&mut self) -> Result<(), VnicError> {
        for (vport, interface) in (0..).zip(&mut self.interfaces) {
            let Some(port) = self.vema.port_mut(vport) else {
                continue;
            };
            if let Some(wanted) = port.poll_interface()
                && interface.apply(wanted, &port.info(), self.is_linked)?
            {
                // What the interface is like now, the manager should know soon.
                self.looked = None;
            }
        }
        Ok(())
    }

    /// Sleeps until something comes, or is due.
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
        let mut fds: WaitedFds<'_> = self
            .nic
            .event_fds()
            .into_iter()
            .map(Waited::reading)
            .collect();
        fds.push(Waited::reading(wake));
        if self.has_room() {
            let taps = self.interfaces.iter().map(|i| i.tap.as_fd());
            fds.extend(taps.map(Waited::reading));
        }
        wait(fds, Some(timeout));
        Ok(())
    }

    /// Leaves: the manager is notified that the interfaces go down.
    pub fn leave(&mut self) {
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
