//! From one catalog to the next: everything that can fail is acquired first, without anybody noticing.
//!
//! ```text
//! stage → staged → follow_catalog: in use
//!       │        └→ unstage: let go of
//!       └→ an error: let go of at once
//! ```
//!
//! Devices and sockets are opened by the server, since all workers have theirs in one order. What only
//! the owner of a device can do is done here: to listen on it. A connection that finds a staged
//! listener is refused as one that finds none.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use riser_transport::verbs::{CmId, PortSpace};

use super::device::Opened;
use super::listener::TcpListener;
use super::{BACKLOG, Listener, Worker, WorkerError};
use crate::sessions::catalog::{Catalog, Entrance};

/// What a worker needs for another catalog.
#[derive(Debug)]
pub struct Stage {
    /// What will be served.
    pub catalog: Arc<Catalog>,
    /// Devices at new addresses, by place.
    pub devices: Vec<(usize, Opened)>,
    /// Sockets of new TCP portals.
    pub sockets: Vec<TcpListener>,
}

/// A portal that a worker cannot listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// Where it is.
    pub portal: SocketAddr,
    /// Why.
    pub why: String,
}

impl Unserved {
    fn new(portal: SocketAddr, why: &WorkerError) -> Self {
        let why = why.to_string();
        Self { portal, why }
    }
}

/// Why a worker cannot serve another catalog.
#[derive(Debug)]
pub enum StageError {
    /// These portals, at least one, cannot be listened on; the others can.
    Portals(Vec<Unserved>),
    /// Something else.
    Worker(WorkerError),
}

impl From<WorkerError> for StageError {
    fn from(error: WorkerError) -> Self {
        Self::Worker(error)
    }
}

/// What a worker has acquired.
#[derive(Debug)]
pub(super) struct Staged {
    catalog: Arc<Catalog>,
    devices: Vec<usize>,
    listeners: Vec<(usize, CmId, Listener)>,
    sockets: Vec<TcpListener>,
}

impl Worker {
    /// Acquires what another catalog takes.
    ///
    /// # Errors
    /// [`StageError`]; nothing is acquired then.
    pub(super) fn stage(&mut self, stage: Stage) -> Result<(), StageError> {
        // The server stages one thing at a time; what it has forgotten goes.
        self.unstage();
        let Stage {
            catalog,
            devices,
            sockets,
        } = stage;
        self.staged = Some(Staged {
            catalog: Arc::clone(&catalog),
            devices: Vec::new(),
            listeners: Vec::new(),
            sockets,
        });
        let result = self.stage_devices(devices, &catalog);
        if result.is_err() {
            self.unstage();
        }
        result
    }

    fn stage_devices(
        &mut self,
        devices: Vec<(usize, Opened)>,
        catalog: &Catalog,
    ) -> Result<(), StageError> {
        for (place, device) in devices {
            let error = |source: riser_transport::verbs::VerbsError| WorkerError::Listen {
                portal: "a new device".into(),
                source: source.into(),
            };
            self.devices
                .put(place, device.into_device())
                .map_err(error)?;
            if self.discovery.len() <= place {
                self.discovery.resize_with(place + 1, || None);
            }
            let staged = self.staged.as_mut().expect("being staged");
            staged.devices.push(place);
            self.watch(place)?;
        }
        self.check_devices(catalog)?;
        let mut unserved = Vec::new();
        for device in 0..self.devices.len() {
            if self.devices.is_open(device) {
                let (listeners, without) = self.listen_missing(device, catalog);
                let staged = self.staged.as_mut().expect("being staged");
                let new = listeners.into_iter().map(|(cm, l)| (device, cm, l));
                staged.listeners.extend(new);
                // Where that was refused as the device came back, it is tried again whatever is served.
                let is_tried = self.refused.iter().any(|(d, _)| *d == device);
                let served = self.catalog.rdma_portals().filter(|_| is_tried);
                let served: BTreeSet<_> = served.collect();
                let without = without.into_iter();
                unserved.extend(without.filter(|other| !served.contains(&other.portal)));
            }
        }
        match unserved.is_empty() {
            true => Ok(()),
            false => Err(StageError::Portals(unserved)),
        }
    }

    /// Whether there is a device for every portal.
    pub(super) fn check_devices(&self, catalog: &Catalog) -> Result<(), WorkerError> {
        // Devices that cannot be shared are the first worker's.
        let mut portals = catalog.rdma_portals();
        let missing = portals.find(|p| self.index == 0 && !self.devices.has_addr(p.ip()));
        missing.map_or(Ok(()), |portal| {
            Err(WorkerError::NoDevice(portal.to_string()))
        })
    }

    /// Listens at a device's entrances that have no listener yet; the portals where that is not possible.
    fn listen_missing(
        &mut self,
        device: usize,
        catalog: &Catalog,
    ) -> (Vec<(CmId, Listener)>, Vec<Unserved>) {
        let addr = self.devices.addr(device);
        let has_services = self.devices[device].has_services();
        let (mut made, mut unserved) = (Vec::new(), Vec::new());
        for (entrance, serves) in catalog.entrances(addr, has_services) {
            let mut known = self.listeners.iter();
            if known.any(|((d, _), l)| *d == device && l.entrance == entrance) {
                continue;
            }
            match self.listen_at(device, entrance) {
                Ok(cm) => made.push((cm, Listener { entrance, serves })),
                Err(error) => {
                    let portals = catalog.portals_at(addr, entrance);
                    let portals = portals.into_iter();
                    unserved.extend(portals.map(|portal| Unserved::new(portal, &error)));
                }
            }
        }
        (made, unserved)
    }

    fn listen_at(&mut self, device: usize, entrance: Entrance) -> Result<CmId, WorkerError> {
        let addr = self.devices.addr(device);
        let dev = &mut self.devices[device];
        let space = match entrance {
            Entrance::Port(_) => PortSpace::Tcp,
            Entrance::Service(service_id) => PortSpace::Ib {
                service_id,
                mask: u64::MAX,
            },
        };
        let error = |source| WorkerError::Listen {
            portal: match entrance {
                Entrance::Port(port) => SocketAddr::new(addr, port).to_string(),
                Entrance::Service(id) => format!("service id {id:#x} of {addr}"),
            },
            source,
        };
        let id = dev.create_id(space).map_err(error)?;
        let bound = match entrance {
            Entrance::Port(port) => dev.bind_addr(id, (addr, port).into()),
            Entrance::Service(_) => Ok(()),
        };
        if let Err(source) = bound.and_then(|()| dev.listen(id, BACKLOG)) {
            // It never listened.
            let _ = dev.destroy_id(id);
            return Err(error(source));
        }
        Ok(id)
    }

    /// Serves what is served on a device that has just come: listens, watches, answers discovery. The portals
    /// where it cannot listen.
    pub(super) fn serve_on(&mut self, device: usize) -> Result<Vec<Unserved>, WorkerError> {
        let unserved = self.listen_on(device);
        if let Err(error) = self.watch(device) {
            self.unwatch(device);
            self.listeners.retain(|(d, _), _| *d != device);
            return Err(error);
        }
        self.start_discovery_on(device);
        Ok(unserved)
    }

    /// Listens on a device where nothing does yet. The portals where it cannot.
    pub(super) fn listen_on(&mut self, device: usize) -> Vec<Unserved> {
        let catalog = Arc::clone(&self.catalog);
        let (made, unserved) = self.listen_missing(device, &catalog);
        for (cm, listener) in made {
            self.listeners.insert((device, cm), listener);
        }
        unserved
    }

    /// Takes back [`Worker::serve_on`].
    pub(super) fn stop_serving_on(&mut self, device: usize) {
        self.unwatch(device);
        self.listeners.retain(|(d, _), _| *d != device);
        self.refused.retain(|(d, _)| *d != device);
        self.discovery[device] = None;
    }

    /// MADs that are not the CM's come to the first worker.
    fn start_discovery_on(&mut self, device: usize) {
        if self.index == 0 && self.devices[device].has_services() {
            self.discovery[device] = self.start_discovery(device);
        }
    }

    /// Lets go of what was acquired.
    pub(super) fn unstage(&mut self) {
        let Some(staged) = self.staged.take() else {
            return;
        };
        for (device, cm, _) in staged.listeners {
            if let Some(dev) = self.devices.get_mut(device) {
                // The device may be gone meanwhile, and its listeners with it.
                let _ = dev.destroy_id(cm);
            }
        }
        for device in staged.devices {
            self.close_device(device);
        }
    }

    /// Serves the worker's catalog, which is a new one, on devices and sockets: with what was staged
    /// for it, and without what it does not have any more.
    pub(super) fn follow_portals(&mut self) {
        let catalog = Arc::clone(&self.catalog);
        let is_this = |staged: &mut Staged| Arc::ptr_eq(&staged.catalog, &catalog);
        if let Some(staged) = self.staged.take_if(is_this) {
            for (device, cm, listener) in staged.listeners {
                if self.devices.is_open(device) {
                    self.listeners.insert((device, cm), listener);
                }
            }
            for device in staged.devices {
                self.start_discovery_on(device);
            }
            self.add_sockets(staged.sockets);
        }
        self.unwanted.clear();
        for device in 0..self.devices.len() {
            if !self.devices.is_there(device) {
                continue;
            }
            let addr = self.devices.addr(device);
            let entrances = catalog.entrances(addr, true);
            if entrances.is_empty() {
                self.unwanted.push(device);
            }
            let devices = &mut self.devices;
            self.listeners.retain(|(d, cm), listener| {
                if *d != device {
                    return true;
                }
                let Some(serves) = entrances.get(&listener.entrance) else {
                    // Requests that nobody has seen go with it.
                    let _ = devices[device].destroy_id(*cm);
                    return false;
                };
                listener.serves = *serves;
                true
            });
        }
        let tcp: Vec<_> = catalog.tcp_portals().collect();
        self.stop_listening(|address| !tcp.contains(&address));
        self.follow_discovery();
    }
}
