//! Device interface of a worker in addition to verbs, and the list of its devices, which can be
//! added and removed.

use std::net::IpAddr;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use riser_reactor::{Completion, Handle, Ring, RingError, SubmitError, Token};
use riser_transport::cm::CmCounters;
use riser_transport::iwarp::Iwarp;
use riser_transport::loopback::Endpoint;
use riser_transport::nic::{NicCounters, NicUsage};
use riser_transport::rc::RcCounters;
use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::roce::driver::DriverCounters;
use riser_transport::roce::{ForwardedPacket, Roce};
use riser_transport::shm::{LinkCounters, Shm};
use riser_transport::verbs::{CqId, Provider, VerbsError};

use super::device_slots::DeviceKind;
use super::discovery::{DiscoveryAgent, IoUnit};
use crate::sessions::catalog::Catalog;

/// Provider used by a worker. If several workers share an address, a packet can be received by the
/// wrong worker and has to be forwarded.
pub trait Device: Provider {
    /// Returns the next packet for a different worker.
    fn poll_forwarded(&mut self) -> Option<ForwardedPacket> {
        None
    }

    /// Handles a packet that was received by a different worker.
    fn handle_forwarded(&mut self, _now: Instant, _packet: &ForwardedPacket) {}

    /// Returns true if the device supports InfiniBand service IDs, and MADs on queue pair 1.
    fn has_services(&self) -> bool {
        true
    }

    /// Returns true if this worker receives the MADs of its own peers on queue pair 1. Otherwise
    /// they are received by the first worker.
    fn has_own_mads(&self) -> bool {
        false
    }

    /// Returns true if the device was removed. Pending operations will not complete.
    fn is_gone(&self) -> bool {
        false
    }

    /// Returns the IP address of a peer for display, given the source address of its packets.
    fn peer_of(&self, source: IpAddr) -> IpAddr {
        source
    }

    /// Returns the counters of a software NIC, or `None` for other devices.
    fn nic(&self) -> Option<NicInfo> {
        None
    }

    /// Returns a function to open the device again, if this is possible.
    fn reopen(&self) -> Option<Reopen> {
        None
    }
}

/// Opens a removed device again. Returns `None` if it is not available.
pub type Reopen = Box<dyn Fn() -> Option<Box<dyn Device>>>;

/// Counters of a software NIC for a single worker, and the number of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicInfo {
    /// Packets sent and received.
    pub nic: NicCounters,
    /// Packets and bytes for reliable connections.
    pub rc: RcCounters,
    /// Connection manager messages.
    pub cm: CmCounters,
    /// System calls for the socket.
    pub socket: DriverCounters,
    /// Links to other processes, if the device uses shared memory.
    pub links: Option<LinkCounters>,
    /// Current number of objects.
    pub usage: NicUsage,
}

/// Device information for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// IP address. A shared-memory device has the same address as the device it was added to.
    pub addr: IpAddr,
    /// Provider name, for example `roce`.
    pub provider: &'static str,
    /// Set if the device is open and was not removed.
    pub is_open: bool,
    /// Counters of a software NIC, or `None` for other devices.
    pub nic: Option<NicInfo>,
}

impl Device for Roce {
    fn nic(&self) -> Option<NicInfo> {
        Some(NicInfo {
            nic: *self.counters(),
            rc: self.rc_counters(),
            cm: self.cm_counters(),
            socket: self.driver_counters(),
            links: None,
            usage: self.usage(),
        })
    }

    fn poll_forwarded(&mut self) -> Option<ForwardedPacket> {
        Roce::poll_forwarded(self)
    }

    fn handle_forwarded(&mut self, now: Instant, packet: &ForwardedPacket) {
        Roce::handle_forwarded(self, now, packet);
    }
}

impl Device for Endpoint {
    fn nic(&self) -> Option<NicInfo> {
        Some(NicInfo {
            nic: *self.counters(),
            rc: self.rc_counters(),
            usage: self.usage(),
            ..NicInfo::default()
        })
    }

    fn is_gone(&self) -> bool {
        Endpoint::is_gone(self)
    }

    fn reopen(&self) -> Option<Reopen> {
        let (fabric, addr) = (self.fabric().clone(), self.addr());
        let (worker, bits) = self.worker();
        Some(Box::new(move || {
            let is_there = !fabric.is_unplugged(addr);
            is_there.then(|| Box::new(fabric.endpoint_of(addr, worker, bits)) as Box<dyn Device>)
        }))
    }
}

impl Device for Shm {
    fn has_own_mads(&self) -> bool {
        true
    }

    fn peer_of(&self, source: IpAddr) -> IpAddr {
        Self::peer_of(self, source)
    }

    fn nic(&self) -> Option<NicInfo> {
        Some(NicInfo {
            nic: *self.counters(),
            rc: self.rc_counters(),
            cm: self.cm_counters(),
            links: Some(self.link_counters()),
            usage: self.usage(),
            ..NicInfo::default()
        })
    }
}

impl Device for Iwarp {
    fn has_services(&self) -> bool {
        false
    }

    fn nic(&self) -> Option<NicInfo> {
        Some(NicInfo {
            nic: *self.counters(),
            usage: self.usage(),
            ..NicInfo::default()
        })
    }
}

impl Device for RdmaCoreDevice {
    fn has_services(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        RdmaCoreDevice::is_gone(self)
    }

    fn reopen(&self) -> Option<Reopen> {
        let addr = self.addr();
        Some(Box::new(move || {
            if !has_device(addr) {
                return None;
            }
            let opened = Self::open(addr).inspect_err(
                |error| tracing::debug!(%addr, %error, "the device is not usable yet"),
            );
            Some(Box::new(opened.ok()?))
        }))
    }
}

/// New device to be sent to a worker thread.
pub enum Opened {
    /// Software NIC: user-space RoCE.
    Roce(Box<Roce>),
    /// Host device using rdma-core.
    RdmaCore(Box<RdmaCoreDevice>),
    /// Shared-memory device for processes on this host.
    Shm {
        /// Device.
        device: Box<Shm>,
        /// Set to [`DeviceKind::Shared`] if there is also another device for this address.
        kind: DeviceKind,
    },
    /// iWARP device.
    Iwarp(Box<Iwarp>),
    /// Device for a simulation.
    Simulated(Box<Endpoint>),
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Roce(_) => "Roce",
            Self::RdmaCore(_) => "RdmaCore",
            Self::Shm { .. } => "Shm",
            Self::Iwarp(_) => "Iwarp",
            Self::Simulated(_) => "Simulated",
        })
    }
}

impl Opened {
    fn kind(&self) -> DeviceKind {
        match self {
            Self::Shm { kind, .. } => *kind,
            Self::Roce(_) | Self::RdmaCore(_) | Self::Iwarp(_) | Self::Simulated(_) => {
                DeviceKind::Portal
            }
        }
    }

    /// Returns the device interface used by the worker.
    fn into_device(self) -> Box<dyn Device> {
        match self {
            Self::Roce(device) => device,
            Self::RdmaCore(device) => device,
            Self::Shm { device, .. } => device,
            Self::Iwarp(device) => device,
            Self::Simulated(device) => device,
        }
    }
}

/// Interval to check if a removed device is available again.
const RETRY: Duration = Duration::from_millis(500);

/// Token prefix for watched descriptors. The driver uses a different top byte.
const WATCH: u64 = 2 << 56;

/// Watched device descriptor, which will wake the worker when it is readable.
struct Watch {
    /// Unique number, so that a late completion can't be confused with a new watch.
    number: u64,
    device: usize,
    handle: Handle,
    is_armed: bool,
}

impl Watch {
    fn token(&self) -> Token {
        Token(WATCH | self.number)
    }
}

/// Devices of a worker by slot number. All workers use the same slots. Indexing panics if the
/// device is closed, so it should only be used if the device is known to be open, for example
/// because it has a session.
#[derive(Default)]
pub(super) struct Devices {
    slots: Vec<Slot>,
    watches: Vec<Watch>,
    /// Total number of watches.
    watched: u64,
}

struct Slot {
    addr: IpAddr,
    kind: DeviceKind,
    /// Provider name.
    provider: &'static str,
    state: State,
    /// Set if there are portals on this device.
    is_wanted: bool,
}

impl Slot {
    fn open(opened: Opened) -> Result<Self, VerbsError> {
        let kind = opened.kind();
        let device = opened.into_device();
        Ok(Self {
            addr: device.query_port(1)?.addr,
            kind,
            provider: device.device_attr().provider,
            state: State::open(device),
            is_wanted: true,
        })
    }

    fn vacant() -> Self {
        Self {
            addr: IpAddr::from([0, 0, 0, 0]),
            kind: DeviceKind::Portal,
            provider: "",
            state: State::Vacant,
            is_wanted: true,
        }
    }

    fn is_vacant(&self) -> bool {
        matches!(self.state, State::Vacant)
    }

    fn is_open(&self) -> bool {
        matches!(self.state, State::Open { is_gone: false, .. })
    }
}

/// Device slot state.
///
/// ```text
/// Vacant → Open → Open, but removed → Closed → Open
///             └→ Vacant ←────────────────┘
/// ```
enum State {
    /// No device on this worker. It may be in use on other workers.
    Vacant,
    /// Open, or was removed while open.
    Open {
        device: Box<dyn Device>,
        /// Discovery agent, if this worker should respond to device-management MADs.
        discovery: Option<DiscoveryAgent>,
        /// The device was removed, but there are still sessions using its objects.
        is_gone: bool,
    },
    /// The device was removed and is no longer in use.
    Closed {
        /// Function to open it again, if supported.
        reopen: Option<Reopen>,
        /// Time of the next attempt.
        look_at: Instant,
    },
}

impl State {
    fn open(device: Box<dyn Device>) -> Self {
        Self::Open {
            device,
            discovery: None,
            is_gone: false,
        }
    }
}

impl Devices {
    /// Creates the list from open devices.
    ///
    /// # Errors
    /// Returns an error if a device address is not available.
    pub(super) fn new(devices: Vec<Opened>) -> Result<Self, VerbsError> {
        let slots = devices.into_iter().map(Slot::open);
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self {
            slots,
            watches: Vec::new(),
            watched: 0,
        })
    }

    /// Adds a device to a vacant slot.
    ///
    /// # Errors
    /// Returns an error if its address is not available.
    pub(super) fn insert_device(&mut self, slot: usize, device: Opened) -> Result<(), VerbsError> {
        // The slots are shared by all workers, so the ones in between may be used by other workers.
        while self.slots.len() <= slot {
            self.slots.push(Slot::vacant());
        }
        self.slots[slot] = Slot::open(device)?;
        Ok(())
    }

    /// Removes a device.
    pub(super) fn remove(&mut self, ring: &mut Ring, device: usize) {
        self.unwatch(ring, device);
        self.slots[device] = Slot::vacant();
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn addr(&self, device: usize) -> IpAddr {
        self.slots[device].addr
    }

    /// Returns the provider name of a device.
    pub(super) fn provider(&self, device: usize) -> &'static str {
        self.slots[device].provider
    }

    /// Returns true if there is a device for this address, not including additional shared-memory
    /// devices.
    pub(super) fn has_addr(&self, addr: IpAddr) -> bool {
        let mut slots = self.slots.iter();
        slots.any(|slot| slot.addr == addr && slot.kind == DeviceKind::Portal && !slot.is_vacant())
    }

    /// Returns true if this is the device for its address and not an additional shared-memory
    /// device.
    pub(super) fn is_portal_device(&self, device: usize) -> bool {
        self.slots[device].kind == DeviceKind::Portal
    }

    /// Returns a device if it is open.
    pub(super) fn get_mut(&mut self, device: usize) -> Option<&mut (dyn Device + 'static)> {
        match &mut self.slots.get_mut(device)?.state {
            State::Open { device, .. } => Some(device.as_mut()),
            State::Closed { .. } | State::Vacant => None,
        }
    }

    /// Returns true if the slot is in use, even if the device is closed.
    pub(super) fn is_there(&self, slot: usize) -> bool {
        !self.slots[slot].is_vacant()
    }

    /// Returns true if the device is open and was not removed.
    pub(super) fn is_open(&self, device: usize) -> bool {
        self.slots[device].is_open()
    }

    /// Returns true if the device was removed, but not closed yet.
    pub(super) fn is_gone(&self, device: usize) -> bool {
        matches!(self.slots[device].state, State::Open { is_gone: true, .. })
    }

    /// Returns all devices that are open and were not removed.
    pub(super) fn open_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn Device>> {
        self.slots
            .iter_mut()
            .filter_map(|slot| match &mut slot.state {
                State::Open {
                    device, is_gone, ..
                } => (!*is_gone).then_some(device),
                State::Closed { .. } | State::Vacant => None,
            })
    }

    /// Returns device information for display.
    pub(super) fn info(&self) -> Vec<DeviceInfo> {
        let info = |slot: &Slot| {
            let (is_open, nic) = match &slot.state {
                State::Vacant => return None,
                State::Open {
                    device, is_gone, ..
                } => (!is_gone, device.nic()),
                State::Closed { .. } => (false, None),
            };
            Some(DeviceInfo {
                addr: slot.addr,
                provider: slot.provider,
                is_open,
                nic,
            })
        };
        self.slots.iter().filter_map(info).collect()
    }

    /// Returns the next time to poll a device or, if `looks` is set, to check for a removed device.
    pub(super) fn deadline(&self, looks: bool) -> Option<Instant> {
        let due = |slot: &Slot| match &slot.state {
            // A removed device is not polled. Otherwise, its deadline would stay in the past and
            // the worker could not sleep.
            State::Open { is_gone: true, .. } | State::Vacant => None,
            State::Open {
                device, discovery, ..
            } => {
                let registration = discovery.as_ref().and_then(DiscoveryAgent::deadline);
                device.deadline().into_iter().chain(registration).min()
            }
            State::Closed { reopen, look_at } => {
                reopen.as_ref().filter(|_| looks).map(|_| *look_at)
            }
        };
        self.slots.iter().filter_map(due).min()
    }

    /// Sets if there are portals on this device.
    pub(super) fn set_wanted(&mut self, device: usize, is_wanted: bool) {
        self.slots[device].is_wanted = is_wanted;
    }

    /// Returns true if there are no more portals on this device.
    pub(super) fn is_unwanted(&self, device: usize) -> bool {
        !self.slots[device].is_wanted
    }

    /// Returns true if there is a device without portals.
    pub(super) fn has_unwanted(&self) -> bool {
        self.slots.iter().any(|slot| !slot.is_wanted)
    }

    /// Checks if the device was removed. Returns true only once.
    pub(super) fn note_gone(&mut self, device: usize) -> bool {
        match &mut self.slots[device].state {
            State::Open {
                device,
                discovery,
                is_gone,
            } => {
                let before = std::mem::replace(is_gone, *is_gone || device.is_gone());
                if *is_gone {
                    // Its queue pair was on the removed device. A new agent will be created when
                    // the device is available again.
                    *discovery = None;
                }
                *is_gone && !before
            }
            State::Closed { .. } | State::Vacant => false,
        }
    }

    /// Closes a removed device that is no longer in use.
    pub(super) fn close(&mut self, device: usize, now: Instant) {
        let state = &mut self.slots[device].state;
        if let State::Open { device, .. } = state {
            let reopen = device.reopen();
            let look_at = now + RETRY;
            *state = State::Closed { reopen, look_at };
        }
    }

    /// Tries to open a closed device if it is time to do so. Returns true on success.
    pub(super) fn look_for(&mut self, device: usize, now: Instant) -> bool {
        let state = &mut self.slots[device].state;
        let State::Closed { reopen, look_at } = state else {
            return false;
        };
        if *look_at > now {
            return false;
        }
        *look_at = now + RETRY;
        let Some(device) = reopen.as_ref().and_then(|reopen| reopen()) else {
            return false;
        };
        *state = State::open(device);
        true
    }

    /// Closes all devices.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
    }

    /// Starts the discovery agent on a device. If this fails, the device can still be used, but not
    /// discovered.
    pub(super) fn start_discovery(&mut self, device: usize, catalog: &Catalog) {
        let Slot { addr, state, .. } = &mut self.slots[device];
        let State::Open {
            device, discovery, ..
        } = state
        else {
            return;
        };
        let unit = IoUnit::new(&catalog.targets, *addr, catalog.limits.login);
        *discovery = DiscoveryAgent::start(device.as_mut(), unit)
            .inspect_err(|error| {
                tracing::warn!(%error, ip = %addr, "cannot start discovery; hosts cannot discover targets");
            })
            .ok();
        if let Some(agent) = discovery {
            agent.register(
                device.as_ref(),
                administrator(device.as_ref(), *addr, catalog),
            );
        }
    }

    /// Updates the discovery agents with a new catalog.
    pub(super) fn follow_discovery(&mut self, catalog: &Catalog) {
        for Slot { addr, state, .. } in &mut self.slots {
            if let State::Open {
                device,
                discovery: Some(agent),
                ..
            } = state
            {
                agent.follow(IoUnit::new(&catalog.targets, *addr, catalog.limits.login));
                agent.register(
                    device.as_ref(),
                    administrator(device.as_ref(), *addr, catalog),
                );
            }
        }
    }

    /// Sends pending requests to subnet administrators. Returns the number of requests. This must
    /// be called in each round after discovery could have been started.
    pub(super) fn poll_registrations(&mut self, now: Instant) -> usize {
        let mut sent = 0;
        for slot in &mut self.slots {
            if let State::Open {
                device,
                discovery: Some(agent),
                is_gone: false,
            } = &mut slot.state
            {
                sent += usize::from(agent.poll_registration(device.as_mut(), now));
            }
        }
        sent
    }

    /// Responds to discovery requests, if this completion queue belongs to an agent. Calls `report`
    /// for each new initiator, with the portal and the number of controllers.
    pub(super) fn poll_discovery(
        &mut self,
        device: usize,
        cq: CqId,
        now: Instant,
        mut report: impl FnMut(IpAddr, IpAddr, usize),
    ) {
        let Slot { addr, state, .. } = &mut self.slots[device];
        if let State::Open {
            device,
            discovery: Some(agent),
            ..
        } = state
        {
            let mut begun = Vec::new();
            agent.poll(device.as_mut(), cq, now, &mut |peer, found| {
                begun.push((peer, found));
            });
            for (peer, found) in begun {
                report(device.peer_of(peer), *addr, found);
            }
        }
    }

    /// Starts watching the descriptors of a device when the worker sleeps.
    ///
    /// # Errors
    /// Returns an error if the process can't open more descriptors.
    pub(super) fn watch(&mut self, device: usize) -> std::io::Result<()> {
        let mut watches = Vec::new();
        for fd in self[device].event_fds() {
            // Use a duplicate, because the ring may need it after the device was closed.
            watches.push(Watch {
                number: self.watched + watches.len() as u64,
                device,
                handle: Handle::new(fd.try_clone_to_owned()?),
                is_armed: false,
            });
        }
        self.watched += watches.len() as u64;
        self.watches.extend(watches);
        Ok(())
    }

    /// Stops watching a device. The kernel can't remove an RDMA device while a process has a
    /// descriptor open.
    pub(super) fn unwatch(&mut self, ring: &mut Ring, device: usize) {
        for watch in self.watches.extract_if(.., |watch| watch.device == device) {
            if watch.is_armed
                && let Err(error) = ring.cancel(watch.token())
            {
                tracing::warn!(%error, "a device's descriptor stays open");
            }
        }
    }

    /// Submits the descriptors of all devices, so that they can wake the worker. Returns false if
    /// the worker should not sleep, because a device already has events or there is no room in the
    /// ring.
    ///
    /// This should only be called before sleeping, and only once: while a descriptor is watched,
    /// the sender of each packet has to wake this worker, but a worker that is not sleeping polls
    /// for packets anyway.
    ///
    /// # Errors
    /// Returns an error if the ring has failed.
    pub(super) fn arm_watches(&mut self, ring: &mut Ring) -> Result<bool, RingError> {
        let (slots, watches) = (&mut self.slots, &mut self.watches);
        let mut has_something = false;
        for slot in slots.iter_mut() {
            // The descriptors of a removed device are always readable.
            if let State::Open {
                device,
                is_gone: false,
                ..
            } = &mut slot.state
            {
                has_something |= device.arm_fds();
            }
        }
        if has_something {
            return Ok(false);
        }
        let is_open = |device: usize| slots[device].is_open();
        for watch in watches
            .iter_mut()
            .filter(|w| !w.is_armed && is_open(w.device))
        {
            match ring.submit_poll_once(&watch.handle, libc::POLLIN, watch.token()) {
                Ok(()) => watch.is_armed = true,
                Err(SubmitError::Full) => return Ok(false),
                Err(error) => return Err(RingError::Enter(std::io::Error::other(error))),
            }
        }
        Ok(true)
    }

    /// Handles a completion of the ring. The device will be polled in the next round in any case.
    pub(super) fn on_watch(&mut self, completion: &Completion) {
        let ended = |watch: &&mut Watch| watch.token() == completion.token;
        if let Some(watch) = self.watches.iter_mut().find(ended) {
            watch.is_armed = false;
        }
    }
}

/// Returns the subnet administrator where a device at this address should be registered. Hosts can't
/// reach a device that shares memory by its address.
fn administrator(device: &dyn Device, addr: IpAddr, catalog: &Catalog) -> Option<IpAddr> {
    let is_reachable = |to: &IpAddr| !device.has_own_mads() && to.is_ipv4() == addr.is_ipv4();
    catalog.administrator.filter(is_reachable)
}

impl Index<usize> for Devices {
    type Output = dyn Device;

    fn index(&self, device: usize) -> &Self::Output {
        match &self.slots[device].state {
            State::Open { device, .. } => device.as_ref(),
            State::Closed { .. } | State::Vacant => panic!("nothing uses a device that is closed"),
        }
    }
}

impl IndexMut<usize> for Devices {
    fn index_mut(&mut self, device: usize) -> &mut Self::Output {
        self.get_mut(device)
            .expect("nothing uses a device that is closed")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use riser_reactor::RingConfig;
    use riser_transport::loopback::{Fabric, FabricConfig};
    use riser_transport::shm::ShmConfig;

    use super::*;

    fn devices(fabric: &Fabric, hosts: &[u8]) -> Devices {
        let open = |host: &u8| endpoint(fabric, addr(*host));
        Devices::new(hosts.iter().map(open).collect()).unwrap()
    }

    fn endpoint(fabric: &Fabric, addr: IpAddr) -> Opened {
        Opened::Simulated(Box::new(fabric.endpoint(addr)))
    }

    fn addr(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    #[test]
    fn slot_starts_vacant() {
        let fabric = Fabric::new(FabricConfig::default());
        let mut devices = devices(&fabric, &[1]);
        devices
            .insert_device(2, endpoint(&fabric, addr(3)))
            .unwrap();
        assert_eq!(devices.len(), 3);
        assert!(devices.is_open(0) && !devices.is_there(1) && devices.is_open(2));
        assert!(devices.has_addr(addr(3)) && !devices.has_addr(addr(2)));
        assert!(
            !devices.has_addr(IpAddr::from([0, 0, 0, 0])),
            "a vacant slot"
        );
        devices.set_wanted(2, false);
        assert!(devices.is_unwanted(2) && devices.has_unwanted());
        devices
            .insert_device(2, endpoint(&fabric, addr(4)))
            .unwrap();
        assert!(!devices.has_unwanted(), "another device");
    }

    #[test]
    fn shared_memory_does_not_replace_device() {
        let fabric = Fabric::new(FabricConfig::default());
        let at = IpAddr::from([127, 3, 0, 1]);
        let shm = |kind| Opened::Shm {
            device: Box::new(Shm::open(ShmConfig::new(at)).unwrap()),
            kind,
        };
        let both = vec![endpoint(&fabric, at), shm(DeviceKind::Shared)];
        let mut devices = Devices::new(both).unwrap();
        assert!(devices.has_addr(at));
        assert!(devices.is_portal_device(0) && !devices.is_portal_device(1));
        // Fields which are different for two devices with the same address.
        let info = devices.info();
        let names: Vec<_> = info.iter().map(|d| (d.addr, d.provider)).collect();
        assert_eq!(names, [(at, "loopback"), (at, "shm")]);
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        devices.remove(&mut ring, 0);
        assert!(devices.is_open(1) && !devices.has_addr(at));
        devices.insert_device(0, shm(DeviceKind::Portal)).unwrap();
        assert!(devices.has_addr(at), "in place of the network");
    }

    #[test]
    fn watch_ends_sleep_and_is_rearmed() {
        let mut devices = devices(&Fabric::new(FabricConfig::default()), &[1]);
        let (mut peer, watched) = UnixStream::pair().unwrap();
        devices.watches.push(Watch {
            number: 0,
            device: 0,
            handle: Handle::new(watched.into()),
            is_armed: false,
        });
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        // Repeated calls should return the same result.
        for _ in 0..2 {
            assert!(devices.arm_watches(&mut ring).unwrap());
        }
        assert_eq!(ring.in_flight(), 1);
        let mut completions = Vec::new();
        for written in 1..3 {
            peer.write_all(&[0]).unwrap();
            ring.park(None).unwrap();
            ring.reap(&mut completions).unwrap();
            assert_eq!((completions.len(), ring.in_flight()), (written, 0));
            devices.on_watch(&completions[written - 1]);
            assert!(devices.arm_watches(&mut ring).unwrap());
        }
        assert_eq!(ring.in_flight(), 1);
        devices.unwatch(&mut ring, 0);
        ring.park(None).unwrap();
        ring.reap(&mut completions).unwrap();
        assert_eq!((ring.in_flight(), devices.watches.len()), (0, 0));
    }
}
