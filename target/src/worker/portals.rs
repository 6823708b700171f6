//! Portals on RDMA devices, and the transition to a new catalog: all operations that can fail are
//! done first, without any effect that can be observed by a peer.
//!
//! ```text
//! stage → staged → follow: in use
//!       │        └→ unstage: released
//!       └→ error: released immediately
//! ```
//!
//! Devices and sockets are opened by the server, because their order must be the same on all
//! workers. Only listening on a device has to be done by its owner, which is implemented here. If a
//! connection request is received by a staged listener, it is rejected in the same way as without a
//! listener.

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

/// Interval to retry failed portals on a device that is available again.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Resources for a new catalog.
#[derive(Debug)]
pub struct Stage {
    /// New catalog.
    pub catalog: Arc<Catalog>,
    /// Devices for new addresses, by slot.
    pub devices: Vec<(usize, Opened)>,
    /// Sockets for new TCP portals.
    pub sockets: Vec<TcpListener>,
}

/// Portal that can't be used by a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// Portal address and port.
    pub portal: SocketAddr,
    /// Error message.
    pub why: String,
}

impl Unserved {
    fn new(portal: SocketAddr, why: &WorkerError) -> Self {
        let why = why.to_string();
        Self { portal, why }
    }
}

/// Error when preparing a new catalog.
#[derive(Debug)]
pub enum StageError {
    /// Can't listen on these portals, but all other portals can be used. Must not be empty.
    Portals(Vec<Unserved>),
    /// Any other worker error.
    Worker(WorkerError),
}

impl From<WorkerError> for StageError {
    fn from(error: WorkerError) -> Self {
        Self::Worker(error)
    }
}

/// Resources acquired for a new catalog.
#[derive(Debug)]
struct Staged {
    catalog: Arc<Catalog>,
    devices: Vec<usize>,
    listeners: Vec<(usize, CmId, Listener)>,
    sockets: Vec<TcpListener>,
}

/// RDMA portals of a worker, and the resources acquired for a new catalog.
#[derive(Debug)]
pub(super) struct Portals {
    /// Set for the first worker, which owns all devices that can't be shared and the discovery
    /// agents.
    is_first: bool,
    pub(super) listeners: Listeners,
    staged: Option<Staged>,
}

impl Portals {
    /// Creates the state for a worker without listeners.
    pub(super) fn new(is_first: bool) -> Self {
        Self {
            is_first,
            listeners: Listeners::default(),
            staged: None,
        }
    }

    /// Acquires the resources for a new catalog while `served` is still in use.
    ///
    /// # Errors
    /// Returns a [`StageError`]. In this case, all resources are released.
    pub(super) fn stage(
        &mut self,
        ring: &mut Ring,
        devices: &mut Devices,
        served: &Catalog,
        stage: Stage,
    ) -> Result<(), StageError> {
        // The server only stages a single catalog at a time, so it no longer needs the previous
        // one.
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
            devices.insert_device(slot, device).map_err(error)?;
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
                // If this failed when the device was added, it will be tried again for the new
                // catalog as well.
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

    /// Releases all staged resources.
    pub(super) fn unstage(&mut self, ring: &mut Ring, devices: &mut Devices) {
        let Some(staged) = self.staged.take() else {
            return;
        };
        // Remove listeners before their devices.
        for (device, cm, _) in staged.listeners {
            if let Some(dev) = devices.get_mut(device) {
                // The device may have been removed, including its listeners.
                let _ = dev.destroy_id(cm);
            }
        }
        for device in staged.devices {
            self.close_device(ring, devices, device);
        }
    }

    /// Changes to a new catalog on all devices: uses the staged resources, and releases the ones
    /// that are no longer needed. Returns the staged sockets.
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
                // This also removes pending connection requests.
                let _ = devices[device].destroy_id(cm);
            });
        }
        devices.follow_discovery(catalog);
        sockets
    }

    /// Checks if there is a device for each portal.
    ///
    /// # Errors
    /// Returns [`WorkerError::NoDevice`].
    pub(super) fn check_devices(
        &self,
        devices: &Devices,
        catalog: &Catalog,
    ) -> Result<(), WorkerError> {
        // Devices that can't be shared are owned by the first worker.
        let mut portals = catalog.rdma_portals();
        let missing = portals.find(|p| self.is_first && !devices.has_addr(p.ip()));
        missing.map_or(Ok(()), |portal| {
            Err(WorkerError::NoDevice(portal.to_string()))
        })
    }

    /// Adds missing listeners for the ports and services of a device. Returns the portals where
    /// this is not possible.
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
                // On error, continue with the next portal.
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

    /// Starts using a new device: adds listeners, watches the device, and starts the discovery
    /// agent. Returns the portals where this is not possible.
    ///
    /// # Errors
    /// Returns an error if the device can't be watched. In this case, it is not used.
    pub(super) fn serve_on(
        &mut self,
        devices: &mut Devices,
        device: usize,
        catalog: &Catalog,
    ) -> Result<Vec<Unserved>, WorkerError> {
        let unserved = self.listen_on(devices, device, catalog);
        if let Err(error) = devices.watch(device) {
            self.listeners.remove_device(device);
            return Err(RingError::Enter(error).into());
        }
        self.start_discovery(devices, device, catalog);
        Ok(unserved)
    }

    /// Adds listeners to a device that has none. Returns the portals where this is not possible.
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

    /// MADs for other agents than the CM are received by the first worker, unless each worker
    /// receives its own.
    fn start_discovery(&self, devices: &mut Devices, device: usize, catalog: &Catalog) {
        let gets_mads = self.is_first || devices[device].has_own_mads();
        if gets_mads && devices[device].has_services() {
            devices.start_discovery(device, catalog);
        }
    }

    /// Removes a device.
    pub(super) fn close_device(&mut self, ring: &mut Ring, devices: &mut Devices, device: usize) {
        self.listeners.remove_device(device);
        devices.remove(ring, device);
    }

    /// Schedules a retry for failed portals of a device that is available again.
    pub(super) fn note_refused(&mut self, device: usize, now: Instant) {
        self.listeners.note_refused(device, now + LISTEN_AGAIN);
    }

    /// Returns the time of the next retry for failed portals.
    pub(super) fn deadline(&self) -> Option<Instant> {
        // There may already be a staged listener for this port.
        let at = self.listeners.next_try();
        at.filter(|_| self.staged.is_none())
    }

    /// Retries failed portals of a device that is available again. Other portals on this device are
    /// not affected.
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
