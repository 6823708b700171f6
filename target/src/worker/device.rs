//! What a worker needs of a network device besides the verbs, and its devices as they come and go.

use std::net::IpAddr;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use riser_transport::cm::CmCounters;
use riser_transport::loopback::Endpoint;
use riser_transport::rc::RcCounters;
use riser_transport::rdma_core::{RdmaCoreDevice, has_device};
use riser_transport::roce::driver::DriverCounters;
use riser_transport::roce::nic::{NicCounters, NicUsage};
use riser_transport::roce::{Misdirected, Roce};
use riser_transport::verbs::{Provider, VerbsError};

/// A provider that a worker drives. Where several workers share one address, packets may reach the
/// wrong one; it hands them on.
pub trait Device: Provider {
    /// The next packet that is another worker's.
    fn poll_misdirected(&mut self) -> Option<Misdirected> {
        None
    }

    /// A packet that another worker received for this one.
    fn handle_forwarded(&mut self, _now: Instant, _packet: &Misdirected) {}

    /// Whether it has InfiniBand service ids to listen on, and datagrams to answer on queue pair 1.
    fn has_services(&self) -> bool {
        true
    }

    /// Whether it has been taken away. What was in it never completes.
    fn is_gone(&self) -> bool {
        false
    }

    /// What it has counted, if it is one of our own.
    fn nic(&self) -> Option<NicInfo> {
        None
    }

    /// How to open it once more, where it can come back.
    fn reopen(&self) -> Option<Reopen> {
        None
    }
}

/// Opens a device that was taken away; `None` where it is not there.
pub type Reopen = Box<dyn Fn() -> Option<Box<dyn Device>>>;

/// What a software NIC has counted at one worker, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicInfo {
    /// Packets.
    pub nic: NicCounters,
    /// Connections.
    pub rc: RcCounters,
    /// The connection manager.
    pub cm: CmCounters,
    /// The socket.
    pub socket: DriverCounters,
    /// Objects.
    pub usage: NicUsage,
}

/// A device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its address.
    pub addr: IpAddr,
    /// Whether it works.
    pub is_open: bool,
    /// What it has counted, if it is one of our own.
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

    fn poll_misdirected(&mut self) -> Option<Misdirected> {
        Roce::poll_misdirected(self)
    }

    fn handle_forwarded(&mut self, now: Instant, packet: &Misdirected) {
        Roce::handle_forwarded(self, now, packet);
    }
}

impl Device for Endpoint {
    fn is_gone(&self) -> bool {
        Endpoint::is_gone(self)
    }

    fn reopen(&self) -> Option<Reopen> {
        let (fabric, addr) = (self.fabric().clone(), self.addr());
        Some(Box::new(move || {
            let is_there = !fabric.is_unplugged(addr);
            is_there.then(|| Box::new(fabric.endpoint(addr)) as Box<dyn Device>)
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
    /// The software NIC's.
    Roce(Box<Roce>),
    /// The host's.
    RdmaCore(Box<RdmaCoreDevice>),
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Roce(_) => "Roce",
            Self::RdmaCore(_) => "RdmaCore",
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
        }
    }
}

/// How often a device that was taken away is looked for.
const RETRY: Duration = Duration::from_millis(500);

/// A worker's devices, by number: their places, which are the same for all workers. Indexing is for what is known to be there, such as the device of a
/// session; it panics where the device is closed.
pub(super) struct Devices(Vec<Place>);

struct Place {
    addr: IpAddr,
    state: State,
}

impl Place {
    fn open(device: Box<dyn Device>) -> Result<Self, VerbsError> {
        let addr = device.query_port(1)?.addr;
        let is_gone = false;
        let state = State::Open { device, is_gone };
        Ok(Self { addr, state })
    }

    fn vacant() -> Self {
        Self {
            addr: IpAddr::from([0, 0, 0, 0]),
            state: State::Vacant,
        }
    }
}

/// What has become of a device.
///
/// ```text
/// Vacant → Open → Open, but gone → Closed → Open
///             └→ Vacant ←─────────────┘
/// ```
enum State {
    /// There is none: another worker's is at this place, or nobody's.
    Vacant,
    /// It is there.
    Open {
        device: Box<dyn Device>,
        /// Or was taken away, and sessions still hold objects of it.
        is_gone: bool,
    },
    /// Nothing holds it any more.
    Closed {
        /// How it is opened.
        reopen: Option<Reopen>,
        /// When to look for it.
        look_at: Instant,
    },
}

impl Devices {
    /// All of them open.
    ///
    /// # Errors
    /// A device does not tell its address.
    pub(super) fn new(devices: Vec<Box<dyn Device>>) -> Result<Self, VerbsError> {
        let places = devices.into_iter().map(Place::open);
        places.collect::<Result<_, _>>().map(Self)
    }

    /// Puts a device at a vacant place.
    ///
    /// # Errors
    /// It does not tell its address.
    pub(super) fn put(&mut self, place: usize, device: Box<dyn Device>) -> Result<(), VerbsError> {
        while self.0.len() <= place {
            self.0.push(Place::vacant());
        }
        self.0[place] = Place::open(device)?;
        Ok(())
    }

    /// Closes a device for good.
    pub(super) fn remove(&mut self, place: usize) {
        self.0[place] = Place::vacant();
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn addr(&self, device: usize) -> IpAddr {
        self.0[device].addr
    }

    pub(super) fn has_addr(&self, addr: IpAddr) -> bool {
        let is_there = |p: &Place| p.addr == addr && !matches!(p.state, State::Vacant);
        self.0.iter().any(is_there)
    }

    /// A device, unless it is closed.
    pub(super) fn get_mut(&mut self, device: usize) -> Option<&mut (dyn Device + 'static)> {
        match &mut self.0.get_mut(device)?.state {
            State::Open { device, .. } => Some(device.as_mut()),
            State::Closed { .. } | State::Vacant => None,
        }
    }

    /// Whether there is a device at a place, be it closed.
    pub(super) fn is_there(&self, place: usize) -> bool {
        !matches!(self.0[place].state, State::Vacant)
    }

    /// Whether a device works.
    pub(super) fn is_open(&self, device: usize) -> bool {
        matches!(self.0[device].state, State::Open { is_gone: false, .. })
    }

    /// Whether a device was taken away and is not closed yet.
    pub(super) fn is_gone(&self, device: usize) -> bool {
        matches!(self.0[device].state, State::Open { is_gone: true, .. })
    }

    /// Those that work.
    pub(super) fn open_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn Device>> {
        self.0.iter_mut().filter_map(|p| match &mut p.state {
            State::Open { device, is_gone } => (!*is_gone).then_some(device),
            State::Closed { .. } | State::Vacant => None,
        })
    }

    /// All that are there, for people.
    pub(super) fn info(&self) -> Vec<DeviceInfo> {
        let info = |place: &Place| {
            let (is_open, nic) = match &place.state {
                State::Vacant => return None,
                State::Open { device, is_gone } => (!is_gone, device.nic()),
                State::Closed { .. } => (false, None),
            };
            let addr = place.addr;
            Some(DeviceInfo { addr, is_open, nic })
        };
        self.0.iter().filter_map(info).collect()
    }

    /// When one of them wants to be driven or, where devices are looked for at all, looked for.
    pub(super) fn deadline(&self, looks: bool) -> Option<Instant> {
        let due = |p: &Place| match &p.state {
            State::Open { is_gone: true, .. } | State::Vacant => None,
            State::Open { device, .. } => device.deadline(),
            State::Closed { reopen, look_at } => {
                reopen.as_ref().filter(|_| looks).map(|_| *look_at)
            }
        };
        self.0.iter().filter_map(due).min()
    }

    /// Whether a device has been taken away; answers so once.
    pub(super) fn note_gone(&mut self, device: usize) -> bool {
        match &mut self.0[device].state {
            State::Open { device, is_gone } => {
                let before = std::mem::replace(is_gone, *is_gone || device.is_gone());
                *is_gone && !before
            }
            State::Closed { .. } | State::Vacant => false,
        }
    }

    /// Closes a device that nothing holds.
    pub(super) fn close(&mut self, device: usize, now: Instant) {
        let state = &mut self.0[device].state;
        if let State::Open { device, .. } = state {
            let reopen = device.reopen();
            let look_at = now + RETRY;
            *state = State::Closed { reopen, look_at };
        }
    }

    /// Looks for a device that is closed, where that is due; whether it is back.
    pub(super) fn look_for(&mut self, device: usize, now: Instant) -> bool {
        let state = &mut self.0[device].state;
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
        let is_gone = false;
        *state = State::Open { device, is_gone };
        true
    }

    /// Closes all of them for good.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Index<usize> for Devices {
    type Output = dyn Device;

    fn index(&self, device: usize) -> &Self::Output {
        match &self.0[device].state {
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
