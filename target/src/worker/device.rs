//! What a worker needs of a network device besides the verbs, and its devices as they come and go.

use std::net::IpAddr;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use riser_reactor::{Completion, Handle, Ring, RingError, SubmitError, Token};
use riser_transport::cm::CmCounters;
use riser_transport::iwarp::Iwarp;
use riser_transport::loopback::Endpoint;
use riser_transport::rc::RcCounters;
use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::roce::driver::DriverCounters;
use riser_transport::roce::nic::{NicCounters, NicUsage};
use riser_transport::roce::{ForwardedPacket, Roce};
use riser_transport::shm::{LinkCounters, Shm};
use riser_transport::verbs::{CqId, Provider, VerbsError};

use super::device_slots::DeviceKind;
use super::discovery::{DiscoveryAgent, IoUnit};
use crate::sessions::catalog::Catalog;

/// A provider that a worker drives. Where several workers share one address, packets may reach the
/// wrong one; it hands them on.
pub trait Device: Provider {
    /// The next packet that is another worker's.
    fn poll_forwarded(&mut self) -> Option<ForwardedPacket> {
        None
    }

    /// A packet that another worker received for this one.
    fn handle_forwarded(&mut self, _now: Instant, _packet: &ForwardedPacket) {}

    /// Whether it has InfiniBand service ids to listen on, and datagrams to answer on queue pair 1.
    fn has_services(&self) -> bool {
        true
    }

    /// Whether datagrams of its peers to queue pair 1 come to this worker, and not to the first one.
    fn has_own_mads(&self) -> bool {
        false
    }

    /// Whether it has been taken away. What was in it never completes.
    fn is_gone(&self) -> bool {
        false
    }

    /// The IP address of a peer, for people, by the one that its packets come from.
    fn peer_of(&self, source: IpAddr) -> IpAddr {
        source
    }

    /// Counters of a software NIC; none of other devices.
    fn nic(&self) -> Option<NicInfo> {
        None
    }

    /// Returns a way to open it once more, where it can come back.
    fn reopen(&self) -> Option<Reopen> {
        None
    }
}

/// Opens a device that was taken away; `None` where it is not there.
pub type Reopen = Box<dyn Fn() -> Option<Box<dyn Device>>>;

/// Counters of a software NIC at one worker, and the objects that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicInfo {
    /// Packets that it sent and received.
    pub nic: NicCounters,
    /// Packets and bytes of its reliable connections.
    pub rc: RcCounters,
    /// Messages of its connection manager.
    pub cm: CmCounters,
    /// System calls of its socket.
    pub socket: DriverCounters,
    /// Links to other processes, where memory is shared with these.
    pub links: Option<LinkCounters>,
    /// Objects that it holds at present.
    pub usage: NicUsage,
}

/// A device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// IP address of the device. Memory that is shared beside a device has the same one.
    pub addr: IpAddr,
    /// Name of its provider, such as `roce`.
    pub provider: &'static str,
    /// Whether it works: it was neither taken away nor closed.
    pub is_open: bool,
    /// Counters of a software NIC; none of other devices.
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

/// A device on its way to its worker's thread.
pub enum Opened {
    /// A software NIC: RoCE in user space.
    Roce(Box<Roce>),
    /// A device of the host, by rdma-core.
    RdmaCore(Box<RdmaCoreDevice>),
    /// A device for processes of this host, in shared memory.
    Shm {
        /// The device.
        device: Box<Shm>,
        /// Whether it is the device of its address, or beside that.
        kind: DeviceKind,
    },
    /// A device for iWARP.
    Iwarp(Box<Iwarp>),
    /// A device of a simulation.
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

    /// As the worker knows it.
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

/// Interval at which a device that was taken away is looked for.
const RETRY: Duration = Duration::from_millis(500);

/// The top byte of the tokens of watched descriptors; the driver has another.
const WATCH: u64 = 2 << 56;

/// A descriptor of a device, which ends the worker's sleep when it becomes readable.
struct Watch {
    /// Never used twice, so that the end of one is not taken for that of another.
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

/// A worker's devices, by number: their slots, which are the same for all workers. Indexing is for
/// what is known to be there, such as the device of a session; it panics where the device is
/// closed.
#[derive(Default)]
pub(super) struct Devices {
    slots: Vec<Slot>,
    watches: Vec<Watch>,
    /// Watches that there ever were.
    watched: u64,
}

struct Slot {
    addr: IpAddr,
    kind: DeviceKind,
    /// Name of the device's provider.
    provider: &'static str,
    state: State,
    /// Whether it has portals.
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

/// State of a slot for a device.
///
/// ```text
/// Vacant → Open → Open, but gone → Closed → Open
///             └→ Vacant ←─────────────┘
/// ```
enum State {
    /// There is none: the slot is free, or another worker has a device there.
    Vacant,
    /// The device is open, though perhaps taken away.
    Open {
        device: Box<dyn Device>,
        /// Answers device-management MADs, if they come to this worker.
        discovery: Option<DiscoveryAgent>,
        /// Or was taken away, and sessions still hold objects of it.
        is_gone: bool,
    },
    /// Nothing holds it any more.
    Closed {
        /// Opens it, where it can come back.
        reopen: Option<Reopen>,
        /// Time of the next look for it.
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
    /// All of them open.
    ///
    /// # Errors
    /// A device does not report its address.
    pub(super) fn new(devices: Vec<Opened>) -> Result<Self, VerbsError> {
        let slots = devices.into_iter().map(Slot::open);
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self {
            slots,
            watches: Vec::new(),
            watched: 0,
        })
    }

    /// Puts a device into a vacant slot.
    ///
    /// # Errors
    /// It does not report its address.
    pub(super) fn put(&mut self, slot: usize, device: Opened) -> Result<(), VerbsError> {
        // Slots are numbered for all workers together; those in between may be others'.
        while self.slots.len() <= slot {
            self.slots.push(Slot::vacant());
        }
        self.slots[slot] = Slot::open(device)?;
        Ok(())
    }

    /// Closes a device for good.
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

    /// Name of the provider of the device in a slot.
    pub(super) fn provider(&self, device: usize) -> &'static str {
        self.slots[device].provider
    }

    /// Whether an address has its device. Memory shared beside it does not stand for it.
    pub(super) fn has_addr(&self, addr: IpAddr) -> bool {
        let mut slots = self.slots.iter();
        slots.any(|slot| slot.addr == addr && slot.kind == DeviceKind::Portal && !slot.is_vacant())
    }

    /// Whether a device is the one that its address has, and not memory shared beside that.
    pub(super) fn is_portal_device(&self, device: usize) -> bool {
        self.slots[device].kind == DeviceKind::Portal
    }

    /// A device, unless it is closed.
    pub(super) fn get_mut(&mut self, device: usize) -> Option<&mut (dyn Device + 'static)> {
        match &mut self.slots.get_mut(device)?.state {
            State::Open { device, .. } => Some(device.as_mut()),
            State::Closed { .. } | State::Vacant => None,
        }
    }

    /// Whether there is a device in a slot, be it closed.
    pub(super) fn is_there(&self, slot: usize) -> bool {
        !self.slots[slot].is_vacant()
    }

    /// Whether a device works.
    pub(super) fn is_open(&self, device: usize) -> bool {
        self.slots[device].is_open()
    }

    /// Whether a device was taken away and is not closed yet.
    pub(super) fn is_gone(&self, device: usize) -> bool {
        matches!(self.slots[device].state, State::Open { is_gone: true, .. })
    }

    /// Devices that are open and were not taken away.
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

    /// All that are there, for people.
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

    /// When one of them wants to be driven or, where devices are looked for at all, looked for.
    pub(super) fn deadline(&self, looks: bool) -> Option<Instant> {
        let due = |slot: &Slot| match &slot.state {
            // A device that is gone is not driven: its deadline would stay due, and the worker
            // would never sleep.
            State::Open { is_gone: true, .. } | State::Vacant => None,
            State::Open { device, .. } => device.deadline(),
            State::Closed { reopen, look_at } => {
                reopen.as_ref().filter(|_| looks).map(|_| *look_at)
            }
        };
        self.slots.iter().filter_map(due).min()
    }

    /// Notes whether a device has portals.
    pub(super) fn set_wanted(&mut self, device: usize, is_wanted: bool) {
        self.slots[device].is_wanted = is_wanted;
    }

    /// Whether a device has lost its last portal.
    pub(super) fn is_unwanted(&self, device: usize) -> bool {
        !self.slots[device].is_wanted
    }

    /// Whether one of them has.
    pub(super) fn has_unwanted(&self) -> bool {
        self.slots.iter().any(|slot| !slot.is_wanted)
    }

    /// Whether a device has been taken away; answers so once.
    pub(super) fn note_gone(&mut self, device: usize) -> bool {
        match &mut self.slots[device].state {
            State::Open {
                device,
                discovery,
                is_gone,
            } => {
                let before = std::mem::replace(is_gone, *is_gone || device.is_gone());
                if *is_gone {
                    // Its queue pair is one of the device that is gone. Another agent is made when
                    // it is back.
                    *discovery = None;
                }
                *is_gone && !before
            }
            State::Closed { .. } | State::Vacant => false,
        }
    }

    /// Closes a device that nothing holds.
    pub(super) fn close(&mut self, device: usize, now: Instant) {
        let state = &mut self.slots[device].state;
        if let State::Open { device, .. } = state {
            let reopen = device.reopen();
            let look_at = now + RETRY;
            *state = State::Closed { reopen, look_at };
        }
    }

    /// Looks for a device that is closed, where that is due; whether it is back.
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

    /// Closes all of them for good.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
    }

    /// Sets discovery up on a device; without it the device works, but is not found.
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
            .inspect_err(|error| tracing::warn!(%error, ip = %addr, "targets cannot be discovered"))
            .ok();
    }

    /// Has discovery answer from now on with what a catalog serves.
    pub(super) fn follow_discovery(&mut self, catalog: &Catalog) {
        for Slot { addr, state, .. } in &mut self.slots {
            if let State::Open {
                discovery: Some(agent),
                ..
            } = state
            {
                agent.follow(IoUnit::new(&catalog.targets, *addr, catalog.limits.login));
            }
        }
    }

    /// Answers what has arrived for discovery, if a completion queue is its. `report` is given each
    /// initiator that begins to look for targets, the portal, and the number of controllers.
    pub(super) fn poll_discovery(
        &mut self,
        device: usize,
        cq: CqId,
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
            agent.poll(device.as_mut(), cq, &mut |peer, found| {
                begun.push((peer, found));
            });
            for (peer, found) in begun {
                report(device.peer_of(peer), *addr, found);
            }
        }
    }

    /// Has the descriptors of a device watched from the next sleep on.
    ///
    /// # Errors
    /// The process may open no more descriptors.
    pub(super) fn watch(&mut self, device: usize) -> std::io::Result<()> {
        let mut watches = Vec::new();
        for fd in self[device].event_fds() {
            // A duplicate, since the ring may hold it for longer than the device lives.
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

    /// Stops watching a device. A process that holds a descriptor of an RDMA device keeps the
    /// kernel from taking it away.
    pub(super) fn unwatch(&mut self, ring: &mut Ring, device: usize) {
        for watch in self.watches.extract_if(.., |watch| watch.device == device) {
            if watch.is_armed
                && let Err(error) = ring.cancel(watch.token())
            {
                tracing::warn!(%error, "a device's descriptor stays open");
            }
        }
    }

    /// Has the descriptors of all devices end the sleep that follows; false where there is to be
    /// none: a device has something already, or the ring has no room.
    ///
    /// Only before a sleep, and once: while it is watched, each packet that arrives costs its
    /// sender a wake-up, although a worker that is awake looks for packets in any case.
    ///
    /// # Errors
    /// The ring is of no further use.
    pub(super) fn arm_watches(&mut self, ring: &mut Ring) -> Result<bool, RingError> {
        let (slots, watches) = (&mut self.slots, &mut self.watches);
        let mut has_something = false;
        for slot in slots.iter_mut() {
            // The descriptors of a device that is gone are always readable.
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

    /// Takes a completion of the ring. It may say that a device has something, which the next round
    /// looks for in any case.
    pub(super) fn on_watch(&mut self, completion: &Completion) {
        let ended = |watch: &&mut Watch| watch.token() == completion.token;
        if let Some(watch) = self.watches.iter_mut().find(ended) {
            watch.is_armed = false;
        }
    }
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
    fn a_slot_is_vacant_until_a_device_is_put_there() {
        let fabric = Fabric::new(FabricConfig::default());
        let mut devices = devices(&fabric, &[1]);
        devices.put(2, endpoint(&fabric, addr(3))).unwrap();
        assert_eq!(devices.len(), 3);
        assert!(devices.is_open(0) && !devices.is_there(1) && devices.is_open(2));
        assert!(devices.has_addr(addr(3)) && !devices.has_addr(addr(2)));
        assert!(
            !devices.has_addr(IpAddr::from([0, 0, 0, 0])),
            "a vacant slot"
        );
        devices.set_wanted(2, false);
        assert!(devices.is_unwanted(2) && devices.has_unwanted());
        devices.put(2, endpoint(&fabric, addr(4))).unwrap();
        assert!(!devices.has_unwanted(), "another device");
    }

    #[test]
    fn memory_shared_beside_a_device_does_not_stand_for_it() {
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
        // Part that distinguishes two devices of one address.
        let info = devices.info();
        let names: Vec<_> = info.iter().map(|d| (d.addr, d.provider)).collect();
        assert_eq!(names, [(at, "loopback"), (at, "shm")]);
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        devices.remove(&mut ring, 0);
        assert!(devices.is_open(1) && !devices.has_addr(at));
        devices.put(0, shm(DeviceKind::Portal)).unwrap();
        assert!(devices.has_addr(at), "in place of the network");
    }

    #[test]
    fn a_watch_ends_one_sleep_and_is_armed_for_the_next() {
        let mut devices = devices(&Fabric::new(FabricConfig::default()), &[1]);
        let (mut peer, watched) = UnixStream::pair().unwrap();
        devices.watches.push(Watch {
            number: 0,
            device: 0,
            handle: Handle::new(watched.into()),
            is_armed: false,
        });
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        // As often as it is asked for.
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
