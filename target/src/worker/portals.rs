//! Portals on RDMA devices, and the way from one catalog to the next: everything that can fail is
//! acquired first, and nothing of it is seen from outside.
//!
//! ```text
//! stage → staged → follow: in use
//!       │        └→ unstage: released
//!       └→ an error: released at once
//! ```
//!
//! Devices and sockets are opened by the server, since all workers have theirs in one order. What
//! only the owner of a device can do is done here: to listen on it. A connection that finds a
//! staged listener is refused as one that finds none.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_reactor::{Ring, RingError};
use riser_transport::verbs::{CmId, VerbsError};

use super::WorkerError;
use super::device::{Devices, Opened};
use super::listener::TcpListener;
use super::listeners::{Listener, Listeners, listen};
use crate::sessions::catalog::{Catalog, Entrance};

/// Interval at which portals are tried that were refused as their device came back.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Parts that a worker needs for another catalog.
#[derive(Debug)]
pub struct Stage {
    /// Catalog that will be served.
    pub catalog: Arc<Catalog>,
    /// Devices at new addresses, by place.
    pub devices: Vec<(usize, Opened)>,
    /// Sockets of new TCP portals.
    pub sockets: Vec<TcpListener>,
}

/// A portal that a worker cannot listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// Address and port of the portal.
    pub portal: SocketAddr,
    /// Reason, as text for people.
    pub why: String,
}

impl Unserved {
    fn new(portal: SocketAddr, why: &WorkerError) -> Self {
        let why = why.to_string();
        Self { portal, why }
    }
}

/// Reason for which a worker cannot serve another catalog.
#[derive(Debug)]
pub enum StageError {
    /// These portals, at least one, cannot be listened on; the others can.
    Portals(Vec<Unserved>),
    /// The worker has failed in another way.
    Worker(WorkerError),
}

impl From<WorkerError> for StageError {
    fn from(error: WorkerError) -> Self {
        Self::Worker(error)
    }
}

/// Parts that were acquired for the next catalog.
#[derive(Debug)]
struct Staged {
    catalog: Arc<Catalog>,
    devices: Vec<usize>,
    listeners: Vec<(usize, CmId, Listener)>,
    sockets: Vec<TcpListener>,
}

/// The portals of a worker on RDMA devices, and what was acquired for the next catalog.
#[derive(Debug)]
pub(super) struct Portals {
    /// Whether this is the first worker, which has the devices that cannot be shared, and
    /// discovery.
    is_first: bool,
    pub(super) listeners: Listeners,
    staged: Option<Staged>,
}

impl Portals {
    /// Makes the portals of a worker that listens nowhere.
    pub(super) fn new(is_first: bool) -> Self {
        Self {
            is_first,
            listeners: Listeners::default(),
            staged: None,
        }
    }

    /// Acquires what another catalog takes, while `served` is served.
    ///
    /// # Errors
    /// [`StageError`]; nothing is acquired then.
    pub(super) fn stage(
        &mut self,
        ring: &mut Ring,
        devices: &mut Devices,
        served: &Catalog,
        stage: Stage,
    ) -> Result<(), StageError> {
        // The server stages one thing at a time; what it has forgotten goes.
        self.unstage(ring, devices);
        let mut staged = Staged {
            catalog: stage.catalog,
            devices: Vec::new(),
            listeners: Vec::new(),
            sockets: stage.sockets,
        };
        let result = self.acquire(devices, served, stage.devices, &mut staged);
        self.staged = Some(staged);
        if result.is_err() {
            self.unstage(ring, devices);
        }
        result
    }

    fn acquire(
        &self,
        devices: &mut Devices,
        served: &Catalog,
        opened: Vec<(usize, Opened)>,
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        for (slot, device) in opened {
            let error = |source: VerbsError| WorkerError::Listen {
                portal: "a new device".into(),
                source: source.into(),
            };
            devices.put(slot, device).map_err(error)?;
            staged.devices.push(slot);
            let watched = devices.watch(slot).map_err(RingError::Enter);
            watched.map_err(WorkerError::Ring)?;
        }
        self.check_devices(devices, &staged.catalog)?;
        let mut unserved = Vec::new();
        for device in 0..devices.len() {
            if devices.is_open(device) {
                let (listeners, without) = self.listen_missing(devices, device, &staged.catalog);
                let new = listeners.into_iter().map(|(cm, l)| (device, cm, l));
                staged.listeners.extend(new);
                // Where that was refused as the device came back, it is tried again, also for a new
                // catalog.
                let is_tried = self.listeners.is_refused(device);
                let tried: BTreeSet<_> = served.rdma_portals().filter(|_| is_tried).collect();
                let without = without.into_iter();
                unserved.extend(without.filter(|other| !tried.contains(&other.portal)));
            }
        }
        match unserved.is_empty() {
            true => Ok(()),
            false => Err(StageError::Portals(unserved)),
        }
    }

    /// Releases what was acquired.
    pub(super) fn unstage(&mut self, ring: &mut Ring, devices: &mut Devices) {
        let Some(staged) = self.staged.take() else {
            return;
        };
        // Listeners before the devices that they may be on.
        for (device, cm, _) in staged.listeners {
            if let Some(dev) = devices.get_mut(device) {
                // The device may be gone meanwhile, and its listeners with it.
                let _ = dev.destroy_id(cm);
            }
        }
        for device in staged.devices {
            self.close_device(ring, devices, device);
        }
    }

    /// Serves a new catalog on devices: with what was staged for it, and without what it does not
    /// have any more. Returns the sockets that were staged.
    pub(super) fn follow(
        &mut self,
        devices: &mut Devices,
        catalog: &Arc<Catalog>,
    ) -> Vec<TcpListener> {
        let is_this = |staged: &mut Staged| Arc::ptr_eq(&staged.catalog, catalog);
        let mut sockets = Vec::new();
        if let Some(staged) = self.staged.take_if(is_this) {
            for (device, cm, listener) in staged.listeners {
                if devices.is_open(device) {
                    self.listeners.insert(device, cm, listener);
                }
            }
            for device in staged.devices {
                self.start_discovery(devices, device, catalog);
            }
            sockets = staged.sockets;
        }
        for device in 0..devices.len() {
            if !devices.is_there(device) {
                continue;
            }
            let entrances = catalog.entrances(devices.addr(device), true);
            devices.set_wanted(device, !entrances.is_empty());
            self.listeners.follow(device, &entrances, |cm| {
                // Requests that were not looked at go with it.
                let _ = devices[device].destroy_id(cm);
            });
        }
        devices.follow_discovery(catalog);
        sockets
    }

    /// Whether there is a device for every portal.
    ///
    /// # Errors
    /// [`WorkerError::NoDevice`].
    pub(super) fn check_devices(
        &self,
        devices: &Devices,
        catalog: &Catalog,
    ) -> Result<(), WorkerError> {
        // Devices that cannot be shared are the first worker's.
        let mut portals = catalog.rdma_portals();
        let missing = portals.find(|p| self.is_first && !devices.has_addr(p.ip()));
        missing.map_or(Ok(()), |portal| {
            Err(WorkerError::NoDevice(portal.to_string()))
        })
    }

    /// Listens at a device's entrances that have no listener yet; the portals where that is not
    /// possible.
    fn listen_missing(
        &self,
        devices: &mut Devices,
        device: usize,
        catalog: &Catalog,
    ) -> (Vec<(CmId, Listener)>, Vec<Unserved>) {
        let addr = devices.addr(device);
        let dev = &mut devices[device];
        let (mut made, mut unserved) = (Vec::new(), Vec::new());
        for (entrance, serves) in catalog.entrances(addr, dev.has_services()) {
            if self.listeners.has(device, entrance) {
                continue;
            }
            match listen(dev, addr, entrance) {
                Ok(cm) => made.push((cm, Listener { entrance, serves })),
                // One that cannot be listened on does not keep the others from being tried.
                Err(source) => {
                    let portal = match entrance {
                        Entrance::Port(port) => SocketAddr::new(addr, port).to_string(),
                        Entrance::Service(id) => format!("service id {id:#x} of {addr}"),
                    };
                    let error = WorkerError::Listen { portal, source };
                    let portals = catalog.portals_at(addr, entrance).into_iter();
                    unserved.extend(portals.map(|portal| Unserved::new(portal, &error)));
                }
            }
        }
        (made, unserved)
    }

    /// Serves what is served on a device that has just come: listens, watches, answers discovery.
    /// Returns the portals where it cannot listen.
    ///
    /// # Errors
    /// The device cannot be watched; nothing is served on it then.
    pub(super) fn serve_on(
        &mut self,
        devices: &mut Devices,
        device: usize,
        catalog: &Catalog,
    ) -> Result<Vec<Unserved>, WorkerError> {
        let unserved = self.listen_on(devices, device, catalog);
        if let Err(error) = devices.watch(device) {
            self.listeners.forget(device);
            return Err(RingError::Enter(error).into());
        }
        self.start_discovery(devices, device, catalog);
        Ok(unserved)
    }

    /// Listens on a device where nothing does yet. Returns the portals where it cannot.
    fn listen_on(
        &mut self,
        devices: &mut Devices,
        device: usize,
        catalog: &Catalog,
    ) -> Vec<Unserved> {
        let (made, unserved) = self.listen_missing(devices, device, catalog);
        for (cm, listener) in made {
            self.listeners.insert(device, cm, listener);
        }
        unserved
    }

    /// MADs that are not the CM's come to the first worker, unless each worker's device gets its own.
    fn start_discovery(&self, devices: &mut Devices, device: usize, catalog: &Catalog) {
        let gets_mads = self.is_first || devices[device].has_own_mads();
        if gets_mads && devices[device].has_services() {
            devices.start_discovery(device, catalog);
        }
    }

    /// Closes a device for good.
    pub(super) fn close_device(&mut self, ring: &mut Ring, devices: &mut Devices, device: usize) {
        self.listeners.forget(device);
        devices.remove(ring, device);
    }

    /// Notes a device some of whose portals were refused as it came back.
    pub(super) fn note_refused(&mut self, device: usize, now: Instant) {
        self.listeners.note_refused(device, now + LISTEN_AGAIN);
    }

    /// Returns the time at which portals are tried that were refused as their device came back.
    pub(super) fn deadline(&self) -> Option<Instant> {
        // What is staged may listen there already.
        let at = self.listeners.next_try();
        at.filter(|_| self.staged.is_none())
    }

    /// Listens where that was refused when a device came back. What it serves elsewhere goes on
    /// meanwhile.
    pub(super) fn listen_again(&mut self, devices: &mut Devices, catalog: &Catalog, now: Instant) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        while let Some(device) = self.listeners.take_due(now) {
            let is_refused =
                devices.is_open(device) && !self.listen_on(devices, device, catalog).is_empty();
            if is_refused {
                self.note_refused(device, now);
            }
        }
    }

    /// Stops listening on all devices.
    pub(super) fn stop(&mut self, devices: &mut Devices) {
        for (device, cm) in self.listeners.take_all() {
            let _ = devices[device].destroy_id(cm);
        }
    }
}
