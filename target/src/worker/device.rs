//! What a worker needs of a network device besides the verbs, and its devices as they come and go.

use std::net::IpAddr;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use riser_reactor::{Completion, Handle, Ring, RingError, SubmitError, Token};
use riser_transport::cm::CmCounters;
use riser_transport::loopback::Endpoint;
use riser_transport::rc::RcCounters;
use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::roce::driver::DriverCounters;
use riser_transport::roce::nic::{NicCounters, NicUsage};
use riser_transport::roce::{ForwardedPacket, Roce};
use riser_transport::verbs::{CqId, Provider, VerbsError};

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

    /// Whether it has been taken away. What was in it never completes.
    fn is_gone(&self) -> bool {
        false
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
    /// Objects that it holds at present.
    pub usage: NicUsage,
}

/// A device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// IP address of the device.
    pub addr: IpAddr,
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
    /// A device of a simulation.
    Simulated(Box<Endpoint>),
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Roce(_) => "Roce",
            Self::RdmaCore(_) => "RdmaCore",
            Self::Simulated(_) => "Simulated",
        })
    }
}

impl Opened {
    /// As the worker knows it.
    #[must_use]
    pub fn into_device(self) -> Box<dyn Device> {
        match self {
            Self::Roce(device) => device,
            Self::RdmaCore(device) => device,
            Self::Simulated(device) => device,
        }
    }
}

/// Interval at which a device that was taken away is looked for.
const RETRY: Duration = Duration::from_millis(500);

/// The top byte of the tokens of watched descriptors; the driver has another.
const WATCH: u64 = 2 << 56;

fn watch_token(device: usize) -> Token {
    Token(WATCH | device as u64)
}

/// A worker's devices, by number: their slots, which are the same for all workers. Indexing is for
/// what is known to be there, such as the device of a session; it panics where the device is
/// closed.
#[derive(Default)]
pub(super) struct Devices {
    slots: Vec<Slot>,
    /// Devices whose descriptors are to be watched again.
    unwatched: Vec<usize>,
}

struct Slot {
    addr: IpAddr,
    state: State,
    /// Whether it has portals.
    is_wanted: bool,
}

impl Slot {
    fn open(device: Box<dyn Device>) -> Result<Self, VerbsError> {
        let addr = device.query_port(1)?.addr;
        let state = State::open(device);
        let is_wanted = true;
        Ok(Self {
            addr,
            state,
            is_wanted,
        })
    }

    fn vacant() -> Self {
        Self {
            addr: IpAddr::from([0, 0, 0, 0]),
            state: State::Vacant,
            is_wanted: true,
        }
    }

    fn is_vacant(&self) -> bool {
        matches!(self.state, State::Vacant)
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
    pub(super) fn new(devices: Vec<Box<dyn Device>>) -> Result<Self, VerbsError> {
        let slots = devices.into_iter().map(Slot::open);
        let slots = slots.collect::<Result<_, _>>()?;
        let unwatched = Vec::new();
        Ok(Self { slots, unwatched })
    }

    /// Puts a device into a vacant slot.
    ///
    /// # Errors
    /// It does not report its address.
    pub(super) fn put(&mut self, slot: usize, device: Box<dyn Device>) -> Result<(), VerbsError> {
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

    pub(super) fn has_addr(&self, addr: IpAddr) -> bool {
        let mut slots = self.slots.iter();
        slots.any(|slot| slot.addr == addr && !slot.is_vacant())
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
        matches!(self.slots[device].state, State::Open { is_gone: false, .. })
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
            let addr = slot.addr;
            Some(DeviceInfo { addr, is_open, nic })
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
            let mut report = |peer, found| report(peer, *addr, found);
            agent.poll(device.as_mut(), cq, &mut report);
        }
    }

    /// Watches the descriptors of a device. Where the ring has no slot for that, it is watched as
    /// soon as there is one.
    ///
    /// # Errors
    /// The ring is of no further use.
    pub(super) fn watch(&mut self, ring: &mut Ring, device: usize) -> Result<(), RingError> {
        for fd in self[device].event_fds() {
            // A duplicate, since the ring may hold it for longer than the device lives.
            let fd = fd.try_clone_to_owned().map_err(RingError::Enter)?;
            let handle = Handle::new(fd);
            match ring.submit_poll(&handle, libc::POLLIN, watch_token(device)) {
                Ok(()) => {}
                Err(SubmitError::Full) => {
                    // `renew_watches` begins with the first descriptor once more, and cancels
                    // first what is watched already.
                    self.unwatched.push(device);
                    return Ok(());
                }
                Err(error) => return Err(RingError::Enter(std::io::Error::other(error))),
            }
        }
        Ok(())
    }

    /// Stops watching a device. A process that holds a descriptor of an RDMA device keeps the
    /// kernel from taking it away.
    pub(super) fn unwatch(&mut self, ring: &mut Ring, device: usize) {
        if let Err(error) = ring.cancel(watch_token(device)) {
            tracing::warn!(%error, "a device's descriptors stay open");
        }
    }

    /// Watches devices again whose watch has ended.
    ///
    /// # Errors
    /// As [`Devices::watch`].
    pub(super) fn renew_watches(&mut self, ring: &mut Ring) -> Result<(), RingError> {
        let mut unwatched = std::mem::take(&mut self.unwatched);
        unwatched.dedup();
        for device in unwatched {
            // The descriptors of a device that is gone are always readable.
            if self.is_open(device) {
                self.unwatch(ring, device);
                self.watch(ring, device)?;
            }
        }
        Ok(())
    }

    /// Takes a completion of the ring. It may say that a device has something, which the next round
    /// looks for in any case; the device is watched again where that ended.
    pub(super) fn on_watch(&mut self, completion: &Completion) {
        // A watch that was cancelled was ended by us. Others end where the kernel could not report
        // an event.
        let is_end = !completion.more && completion.result != -libc::ECANCELED;
        if completion.token.0 & (0xff << 56) == WATCH && is_end {
            self.unwatched.push((completion.token.0 & 0xffff) as usize);
        }
    }

    /// Whether every device is watched that is to be.
    pub(super) fn is_watched(&self) -> bool {
        self.unwatched.is_empty()
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
    use riser_transport::loopback::{Fabric, FabricConfig};

    use super::*;

    fn devices(fabric: &Fabric, hosts: &[u8]) -> Devices {
        let open = |host: &u8| -> Box<dyn Device> { Box::new(fabric.endpoint(addr(*host))) };
        Devices::new(hosts.iter().map(open).collect()).unwrap()
    }

    fn addr(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    fn end_of_watch(device: usize, result: i32) -> Completion {
        Completion {
            token: watch_token(device),
            result,
            more: false,
            socket: None,
        }
    }

    #[test]
    fn a_slot_is_vacant_until_a_device_is_put_there() {
        let fabric = Fabric::new(FabricConfig::default());
        let mut devices = devices(&fabric, &[1]);
        devices.put(2, Box::new(fabric.endpoint(addr(3)))).unwrap();
        assert_eq!(devices.len(), 3);
        assert!(devices.is_open(0) && !devices.is_there(1) && devices.is_open(2));
        assert!(devices.has_addr(addr(3)) && !devices.has_addr(addr(2)));
        assert!(
            !devices.has_addr(IpAddr::from([0, 0, 0, 0])),
            "a vacant slot"
        );
        devices.set_wanted(2, false);
        assert!(devices.is_unwanted(2) && devices.has_unwanted());
        devices.put(2, Box::new(fabric.endpoint(addr(4)))).unwrap();
        assert!(!devices.has_unwanted(), "another device");
    }

    #[test]
    fn a_watch_that_has_ended_is_renewed_unless_we_ended_it() {
        let mut devices = devices(&Fabric::new(FabricConfig::default()), &[1, 2]);
        devices.on_watch(&end_of_watch(0, -libc::ECANCELED));
        assert!(devices.is_watched());
        let still = Completion {
            more: true,
            ..end_of_watch(0, 1)
        };
        devices.on_watch(&still);
        assert!(devices.is_watched());
        devices.on_watch(&end_of_watch(1, 1));
        assert_eq!(devices.unwatched, [1]);
    }
}
