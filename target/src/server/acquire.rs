//! What a catalog takes of the network: devices and listening sockets, for every worker.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use riser_transport::rdma_core::{self, RdmaCoreDevice};
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
use riser_transport::verbs::{Mtu, Verbs};

use super::ServerError;
use super::legacy::Legacy;
use crate::config::{Config, LinkFaults, Percent, Provider};
use crate::worker::iscsi::TcpListener;
use crate::worker::places::Place;
use crate::worker::target::Catalog;
use crate::worker::{Opened, Shared};

/// What one worker gets.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// Devices, by place.
    pub(super) devices: Vec<(usize, Opened)>,
    /// Sockets of TCP portals.
    pub(super) sockets: Vec<TcpListener>,
}

/// What was acquired. Unless it is kept, the places of devices are given back when it is dropped,
/// which must not be before workers have closed theirs.
#[derive(Debug)]
pub(super) struct Acquired {
    shared: Arc<Shared>,
    places: Vec<Place>,
    parts: Vec<Part>,
}

impl Acquired {
    /// The workers' parts, by number.
    pub(super) fn take_parts(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }

    /// It is in use from now on; the parts that nobody has taken.
    pub(super) fn keep(mut self) -> Vec<Part> {
        self.places.clear();
        self.take_parts()
    }

    /// A place for the device at an address; the number of a new one.
    fn place(&mut self, addr: IpAddr) -> Result<Option<usize>, ServerError> {
        let taken = self.shared.places.take(addr);
        let place = taken.ok_or(ServerError::Closing(addr))?;
        self.places.push(place);
        Ok(match place {
            Place::New(place) => Some(place),
            Place::Open { .. } => None,
        })
    }
}

impl Drop for Acquired {
    fn drop(&mut self) {
        // Sockets are closed before their places are free.
        self.parts.clear();
        for place in self.places.drain(..) {
            self.shared.places.give_back(place);
        }
    }
}

/// Opens what a catalog takes and the one before it did not; sockets that were left to us are open.
///
/// # Errors
/// [`ServerError`]; nothing is open then.
pub(super) fn acquire(
    config: &Config,
    shared: &Arc<Shared>,
    catalog: &Catalog,
    old: Option<&Catalog>,
    legacy: &Legacy,
    workers: usize,
) -> Result<Acquired, ServerError> {
    let mut acquired = Acquired {
        shared: Arc::clone(shared),
        places: Vec::new(),
        parts: (0..workers).map(|_| Part::default()).collect(),
    };
    devices(config, catalog, &mut acquired)?;
    let known: Vec<_> = old.map_or_else(Vec::new, |old| old.tcp_portals().collect());
    sockets(catalog, &known, legacy, &mut acquired)?;
    Ok(acquired)
}

/// One device for each address that a portal has: on every worker, but an RDMA device of the host,
/// which is the first worker's alone. At the start those come after the software NICs.
fn devices(config: &Config, catalog: &Catalog, acquired: &mut Acquired) -> Result<(), ServerError> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for portal in catalog.rdma_portals() {
        if !addresses.contains(&portal.ip()) {
            addresses.push(portal.ip());
        }
    }
    let on_host = |addr: &IpAddr| match config.transport.provider {
        Provider::Roce => false,
        Provider::RdmaCore => true,
        Provider::Auto => rdma_core::has_device(*addr),
    };
    let (on_host, ours): (Vec<IpAddr>, Vec<IpAddr>) = addresses.into_iter().partition(on_host);
    let workers = acquired.parts.len();
    for addr in ours {
        let Some(place) = acquired.place(addr)? else {
            continue;
        };
        // In the workers' order: the sockets of one port are numbered as they are bound.
        for index in 0..workers {
            let roce = RoceConfig {
                mtu: config.transport.mtu.and_then(mtu),
                on_link: config.transport.on_link,
                worker_index: index as u32,
                worker_bits: workers.ilog2() as u8,
                faults: RoceFaults {
                    transmit: config.transport.faults.map(|f| faults(f, index as u64)),
                    receive: None,
                },
                ..RoceConfig::new(addr)
            };
            let device =
                Roce::open(&roce).map_err(|source| ServerError::Device { addr, source })?;
            let device = Opened::Roce(Box::new(device));
            acquired.parts[index].devices.push((place, device));
        }
        acquired.shared.places.fill(place, workers as u16);
    }
    for addr in on_host {
        let Some(place) = acquired.place(addr)? else {
            continue;
        };
        let device = RdmaCoreDevice::open(addr)?;
        tracing::info!(%addr, device = %device.device_attr().name, "serves on an RDMA device");
        let device = Opened::RdmaCore(Box::new(device));
        acquired.parts[0].devices.push((place, device));
        acquired.shared.places.fill(place, 1);
    }
    Ok(())
}

/// A listening socket per worker for each TCP portal. All are bound before the first one listens.
fn sockets(
    catalog: &Catalog,
    known: &[SocketAddr],
    legacy: &Legacy,
    acquired: &mut Acquired,
) -> Result<(), ServerError> {
    let mut done = known.to_vec();
    for portal in catalog.tcp_portals() {
        if done.contains(&portal) {
            continue;
        }
        done.push(portal);
        for (n, part) in acquired.parts.iter_mut().enumerate() {
            let socket = match legacy.socket(portal, n) {
                Ok(Some(socket)) => Ok(socket),
                Ok(None) => TcpListener::bind(portal),
                Err(error) => Err(error),
            };
            let socket = socket.map_err(|source| ServerError::Listen { portal, source })?;
            part.sockets.push(socket);
        }
    }
    for socket in acquired.parts.iter().flat_map(|part| &part.sockets) {
        let portal = socket.address();
        socket
            .listen()
            .map_err(|source| ServerError::Listen { portal, source })?;
    }
    Ok(())
}

fn mtu(bytes: u16) -> Option<Mtu> {
    Mtu::ALL
        .into_iter()
        .find(|m| m.bytes() == usize::from(bytes))
}

fn faults(link: LinkFaults, worker: u64) -> FaultConfig {
    let parts = |p: Percent| (p.probability() * 1e6).round() as u32;
    FaultConfig {
        seed: link.seed.wrapping_add(worker),
        loss: parts(link.loss),
        duplication: parts(link.duplicate),
        corruption: parts(link.corrupt),
        reorder: parts(link.reorder),
        reorder_depth: link.reorder_window,
        reorder_time: Duration::from_millis(1),
    }
}
