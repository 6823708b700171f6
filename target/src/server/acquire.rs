//! Acquires the network resources for a catalog: devices and listening sockets, for each worker.

use std::cell::LazyCell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use riser_transport::iwarp::{Iwarp, IwarpConfig};
use riser_transport::loopback::Endpoint;
use riser_transport::rdma_core::{GidTables, RdmaCoreDevice};
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
use riser_transport::shm::{Shm, ShmConfig, ShmListener};
use riser_transport::verbs::{Mtu, Verbs};
use riser_transport::wire::ROCE_PORT;
use socket2::{Domain, Socket};

use super::ServerError;
use super::handover::ServerState;
use super::problems::Subject;
use crate::config::{Config, LinkFaults, Percent, Provider};
use crate::holder::{self, HeldBy, Transport};
use crate::sessions::catalog::Catalog;
use crate::worker::Opened;
use crate::worker::TcpListener;
use crate::worker::device_slots::{DeviceKind, DeviceSlot, DeviceSlots};

/// Timeout for workers to close an unused device.
const CLOSING: Duration = Duration::from_secs(5);

/// Opens devices and listening sockets for a simulation, instead of using the host.
pub trait SimulatedNetwork: Debug + Send + Sync {
    /// Opens the device with this address for a worker. `worker` is its index out of `workers`.
    ///
    /// # Errors
    /// If the device does not exist, or if it is in use.
    fn open(&self, addr: IpAddr, worker: usize, workers: usize) -> io::Result<Endpoint>;

    /// Listens on a TCP portal, once per worker.
    ///
    /// # Errors
    /// If the address is in use.
    fn listen(&self, portal: SocketAddr) -> io::Result<TcpListener>;
}

/// Devices and sockets of a single worker.
#[derive(Debug, Default)]
pub struct Part {
    /// Devices by slot number.
    pub devices: Vec<(usize, Opened)>,
    /// Sockets of TCP portals.
    pub sockets: Vec<TcpListener>,
}

/// Acquired devices and sockets. The device slots are released on drop, unless `keep` was called.
/// Any worker using these must have closed its devices before that.
#[derive(Debug)]
pub(super) struct Acquired {
    slots: Arc<DeviceSlots>,
    taken: Vec<DeviceSlot>,
    parts: Vec<Part>,
    missing: Vec<(Subject, ServerError)>,
}

impl Acquired {
    /// Returns the devices and sockets of each worker.
    pub(super) fn take_parts(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }

    /// Keeps all resources, which are now in use. Returns the parts that were not passed to
    /// workers.
    pub(super) fn keep(&mut self) -> Vec<Part> {
        self.taken.clear();
        self.take_parts()
    }

    /// Releases all resources, which must not be used by any worker.
    pub(super) fn release_all(&mut self) {
        // Close the sockets before releasing their slots.
        self.parts.clear();
        for slot in self.taken.drain(..) {
            self.slots.release(slot);
        }
    }

    /// Returns the resources that could not be acquired, with the error.
    pub(super) fn missing(&self) -> &[(Subject, ServerError)] {
        &self.missing
    }

    /// Returns whether portals at this address are missing.
    fn lacks(&self, addr: IpAddr) -> bool {
        let mut missing = self.missing.iter();
        missing.any(|(subject, _)| matches!(subject, Subject::RdmaPortal(at) if at.ip() == addr))
    }

    /// If no portal of the catalog could be opened, returns an error for an address in use.
    pub(super) fn take_in_use_of_all(&mut self, catalog: &Catalog) -> Option<ServerError> {
        let is_missing = |subject: &Subject| self.missing.iter().any(|(other, _)| other == subject);
        let mut rdma = catalog.rdma_portals().map(Subject::RdmaPortal);
        let mut tcp = catalog.tcp_portals().map(Subject::TcpPortal);
        // If another daemon uses all of the addresses, we should exit instead of running a second
        // daemon without any portals, which would look healthy to the service manager.
        let serves_nothing = rdma.all(|s| is_missing(&s)) && tcp.all(|s| is_missing(&s));
        let mut errors = self.missing.iter();
        let place = errors.position(|(_, error)| serves_nothing && error.is_in_use())?;
        Some(self.missing.swap_remove(place).1)
    }

    /// Allocates a slot for the device with this address. Returns the slot number if the device
    /// must be opened.
    fn slot(
        &mut self,
        addr: IpAddr,
        kind: DeviceKind,
        patience: Duration,
    ) -> Result<Option<usize>, ServerError> {
        // A worker may not have closed the device of an earlier configuration yet, and we cannot
        // open the address twice.
        let taken = self.slots.take_slot(addr, kind, patience);
        let slot = taken.ok_or(ServerError::Closing(addr))?;
        // Add this before opening the device, so that it will be released on any error.
        self.taken.push(slot);
        Ok(match slot {
            DeviceSlot::New(slot) => Some(slot),
            DeviceSlot::Open { .. } => None,
        })
    }

    /// Releases the slot that was allocated last, and its devices.
    fn release(&mut self, addr: IpAddr) {
        let taken = self.taken.pop().expect("just taken");
        if let DeviceSlot::New(slot) = taken {
            tracing::debug!(%addr, slot, "its device is given back");
            for part in &mut self.parts {
                // If we failed for a later worker, this closes the devices of the previous workers,
                // so that the address can be used again.
                part.devices.retain(|(other, _)| *other != slot);
            }
        }
        self.slots.release(taken);
    }

    fn drop_sockets(&mut self, portal: SocketAddr) {
        for part in &mut self.parts {
            part.sockets.retain(|socket| socket.address() != portal);
        }
    }
}

impl Drop for Acquired {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// The catalog to acquire resources for, and the existing resources.
pub(super) struct Wanted<'a> {
    pub(super) config: &'a Config,
    pub(super) catalog: &'a Catalog,
    /// Sockets inherited from the previous process.
    pub(super) server_state: &'a ServerState,
    /// The previous catalog, whose sockets are already open.
    pub(super) old: Option<&'a Catalog>,
    pub(super) workers: usize,
    /// The simulated network, if any.
    pub(super) simulated: Option<&'a dyn SimulatedNetwork>,
    /// Returns true if a resource is not required and can be skipped after this error.
    pub(super) tolerates: &'a dyn Fn(&Subject, &ServerError) -> bool,
}

impl Wanted<'_> {
    /// If the address of a TCP portal is in use, returns the program that uses it. A simulated
    /// network has no other programs.
    fn holder_of(&self, error: &io::Error, portal: SocketAddr) -> HeldBy {
        match self.simulated {
            Some(_) => HeldBy::default(),
            None => holder_of(error, portal, Transport::Tcp),
        }
    }
}

/// Opens the resources that are used by a catalog, but not by the previous one. Inherited sockets
/// are already open.
///
/// # Errors
/// Returns a [`ServerError`]. No resources are open in this case.
pub(super) fn acquire(
    wanted: &Wanted<'_>,
    slots: &Arc<DeviceSlots>,
) -> Result<Acquired, ServerError> {
    let mut acquired = Acquired {
        slots: Arc::clone(slots),
        taken: Vec::new(),
        parts: (0..wanted.workers).map(|_| Part::default()).collect(),
        missing: Vec::new(),
    };
    // On an error, all resources are closed when `acquired` is dropped. If addresses are still in
    // use by another process, this is called repeatedly, so start with sockets, which cost the
    // least.
    let bound = bind_all(wanted, &mut acquired)?;
    check_streams(wanted, &mut acquired)?;
    devices(wanted, &mut acquired)?;
    // Only listen when everything else is open, so that no initiator can connect if the start
    // fails.
    listen(wanted, &mut acquired, bound)?;
    Ok(acquired)
}

/// Checks that the TCP ports of new iWARP portals are not used by another program. Workers share
/// these ports when they bind them, and would also share them with that program.
fn check_streams(wanted: &Wanted<'_>, acquired: &mut Acquired) -> Result<(), ServerError> {
    let provider = wanted.config.transport.provider;
    if wanted.simulated.is_some() || provider != Provider::Iwarp {
        return Ok(());
    }
    let old = wanted.old.into_iter().flat_map(Catalog::rdma_portals);
    let old: BTreeSet<_> = old.collect();
    let new: BTreeSet<_> = wanted.catalog.rdma_portals().collect();
    for &portal in new.difference(&old) {
        let checked = check_free(portal, Transport::Tcp);
        // If the address does not belong to this host, the device reports a better error.
        let in_use = checked
            .err()
            .filter(|e| e.kind() == io::ErrorKind::AddrInUse);
        let Some(source) = in_use else {
            continue;
        };
        let error = ServerError::Listen {
            portal,
            holder: holder_of(&source, portal, Transport::Tcp),
            source,
        };
        let subject = Subject::RdmaPortal(portal);
        if !(wanted.tolerates)(&subject, &error) {
            return Err(error);
        }
        acquired.missing.push((subject, error));
    }
    Ok(())
}

/// Opens a device for each portal address, on every worker. The RDMA devices of the host are only
/// opened by the first worker. At startup, they are opened after the software NICs.
fn devices(wanted: &Wanted<'_>, acquired: &mut Acquired) -> Result<(), ServerError> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for portal in wanted.catalog.rdma_portals() {
        if !addresses.contains(&portal.ip()) {
            addresses.push(portal.ip());
        }
    }
    // Only read this if needed by a provider, and only once, because a host may have many devices
    // and ports.
    let gids = LazyCell::new(GidTables::read);
    let on_host = |addr: &IpAddr| match wanted.config.transport.provider {
        _ if wanted.simulated.is_some() => false,
        Provider::Roce | Provider::Shm | Provider::Iwarp => false,
        Provider::RdmaCore => true,
        Provider::Auto => gids.has(*addr),
    };
    let (on_host, ours): (Vec<IpAddr>, Vec<IpAddr>) = addresses.into_iter().partition(on_host);
    // A worker numbers its initial devices by order, and only the first worker opens the devices of
    // the host. If they were not last, the other workers would use different slots for the same
    // device.
    let (portal, shared) = (DeviceKind::Portal, DeviceKind::Shared);
    let is_shared = wanted.simulated.is_none()
        && wanted.config.transport.shm
        && wanted.config.transport.provider != Provider::Shm;
    let all = ours.iter().chain(&on_host).filter(|_| is_shared);
    let all: Vec<_> = all.map(|addr| (*addr, shared, false)).collect();
    let addresses = ours.into_iter().map(|addr| (addr, portal, false));
    let addresses = addresses.chain(all);
    let addresses = addresses.chain(on_host.into_iter().map(|addr| (addr, portal, true)));
    // In a simulation, workers cannot run while we wait.
    let patience = wanted.simulated.map_or(CLOSING, |_| Duration::ZERO);
    for (addr, kind, is_on_host) in addresses {
        // Without the portal, initiators could connect but not log in. RDMA devices of the host are
        // opened later. If that fails, `riser --provider auto` does not find a portal here and
        // disconnects.
        if kind == DeviceKind::Shared && acquired.lacks(addr) {
            continue;
        }
        let slot = match acquired.slot(addr, kind, patience) {
            Ok(Some(slot)) => slot,
            // Already open, either for another portal or from the previous catalog.
            Ok(None) => continue,
            Err(error) => {
                do_without(wanted, acquired, (addr, kind), error)?;
                continue;
            }
        };
        let opened = match (kind, is_on_host) {
            (DeviceKind::Shared, _) => open_shm(addr, kind, slot, acquired),
            (DeviceKind::Portal, true) => open_on_host(addr, slot, acquired),
            (DeviceKind::Portal, false) => open_ours(wanted, addr, slot, acquired),
        };
        if let Err(error) = opened {
            acquired.release(addr);
            do_without(wanted, acquired, (addr, kind), error)?;
        }
    }
    Ok(())
}

/// Adds portals without a device, or shared memory that could not be opened, to the missing
/// resources. Fails if they are required.
fn do_without(
    wanted: &Wanted<'_>,
    acquired: &mut Acquired,
    (addr, kind): (IpAddr, DeviceKind),
    error: ServerError,
) -> Result<(), ServerError> {
    let subjects: Vec<_> = match kind {
        DeviceKind::Portal => {
            let portals = wanted.catalog.rdma_portals();
            let portals: BTreeSet<_> = portals.filter(|portal| portal.ip() == addr).collect();
            portals.into_iter().map(Subject::RdmaPortal).collect()
        }
        // Its portals still have their own device.
        DeviceKind::Shared => vec![Subject::SharedMemory(addr)],
    };
    if !subjects
        .iter()
        .all(|subject| (wanted.tolerates)(subject, &error))
    {
        return Err(error);
    }
    let error = Arc::new(error);
    let missing = subjects.into_iter().map(|subject| {
        let error = ServerError::Shared(Arc::clone(&error));
        (subject, error)
    });
    acquired.missing.extend(missing);
    Ok(())
}

/// Opens a device for each worker, in order: sockets that share a port are numbered when they are
/// bound.
fn open_ours(
    wanted: &Wanted<'_>,
    addr: IpAddr,
    slot: usize,
    acquired: &mut Acquired,
) -> Result<(), ServerError> {
    let workers = acquired.parts.len();
    let failed = |source, holder| ServerError::Device {
        addr,
        holder,
        source,
    };
    if wanted.simulated.is_none() && wanted.config.transport.provider == Provider::Shm {
        return open_shm(addr, DeviceKind::Portal, slot, acquired);
    }
    if wanted.simulated.is_none() && wanted.config.transport.provider == Provider::Iwarp {
        return open_iwarp(addr, slot, acquired).map_err(|e| failed(e, HeldBy::default()));
    }
    let socket = SocketAddr::new(addr, ROCE_PORT);
    if wanted.simulated.is_none() {
        // The sockets below share the port with each other, and would also share it with another
        // program.
        check_free(socket, Transport::Udp).map_err(|source| {
            let holder = holder_of(&source, socket, Transport::Udp);
            failed(source, holder)
        })?;
    }
    for (index, part) in acquired.parts.iter_mut().enumerate() {
        let device = match wanted.simulated {
            Some(network) => network
                .open(addr, index, workers)
                .map(|device| Opened::Simulated(Box::new(device))),
            None => open_roce(wanted.config, addr, index, workers),
        };
        let device = device.map_err(|source| failed(source, HeldBy::default()))?;
        part.devices.push((slot, device));
    }
    // The slot is in use until all of these have closed the device.
    acquired.slots.fill(slot, workers as u16);
    Ok(())
}

fn open_roce(config: &Config, addr: IpAddr, index: usize, workers: usize) -> io::Result<Opened> {
    let device = Roce::open(&RoceConfig {
        mtu: config.transport.mtu.and_then(mtu),
        on_link: config.transport.on_link,
        // The worker index is part of a queue pair number, which is used to deliver packets to the
        // socket of the right worker.
        worker_index: index as u32,
        worker_bits: workers.ilog2() as u8,
        faults: RoceFaults {
            transmit: config.transport.faults.map(|f| faults(f, index as u64)),
            receive: None,
        },
        ..RoceConfig::new(addr)
    })?;
    Ok(Opened::Roce(Box::new(device)))
}

/// Opens a device for each worker. Their listeners share ports, and the kernel distributes
/// connections between them.
fn open_iwarp(addr: IpAddr, slot: usize, acquired: &mut Acquired) -> io::Result<()> {
    let workers = acquired.parts.len();
    for part in &mut acquired.parts {
        let device = Iwarp::open(IwarpConfig {
            shares_ports: workers > 1,
            ..IwarpConfig::new(addr)
        })?;
        part.devices.push((slot, Opened::Iwarp(Box::new(device))));
    }
    acquired.slots.fill(slot, workers as u16);
    Ok(())
}

/// Opens a device for each worker. They share a listener, but each has the links that it has
/// accepted.
fn open_shm(
    addr: IpAddr,
    kind: DeviceKind,
    slot: usize,
    acquired: &mut Acquired,
) -> Result<(), ServerError> {
    let failed = |source| ServerError::SharedMemory { addr, source };
    let listener = ShmListener::bind(addr).map_err(failed)?;
    for part in &mut acquired.parts {
        let device = Shm::open(ShmConfig {
            listener: Some(listener.clone()),
            ..ShmConfig::new(addr)
        });
        let device = Box::new(device.map_err(failed)?);
        part.devices.push((slot, Opened::Shm { device, kind }));
    }
    acquired.slots.fill(slot, acquired.parts.len() as u16);
    Ok(())
}

fn open_on_host(addr: IpAddr, slot: usize, acquired: &mut Acquired) -> Result<(), ServerError> {
    let device = RdmaCoreDevice::open(addr)?;
    // This does not mean that we can listen on it. That is checked later, and retried every few
    // seconds.
    tracing::debug!(%addr, device = %device.device_attr().name, "opened an RDMA device");
    let device = Opened::RdmaCore(Box::new(device));
    acquired.parts[0].devices.push((slot, device));
    acquired.slots.fill(slot, 1);
    Ok(())
}

/// Binds a socket per worker for each new TCP portal, without listening yet.
fn bind_all(wanted: &Wanted<'_>, acquired: &mut Acquired) -> Result<Vec<SocketAddr>, ServerError> {
    let mut done: Vec<_> = wanted
        .old
        .map_or_else(Vec::new, |old| old.tcp_portals().collect());
    let mut bound = Vec::new();
    for portal in wanted.catalog.tcp_portals() {
        if done.contains(&portal) {
            continue;
        }
        done.push(portal);
        match bind(portal, wanted, acquired) {
            Ok(()) => bound.push(portal),
            Err(error) => go_without(wanted, acquired, portal, error)?,
        }
    }
    Ok(bound)
}

/// Starts to listen on the sockets of portals.
fn listen(
    wanted: &Wanted<'_>,
    acquired: &mut Acquired,
    portals: Vec<SocketAddr>,
) -> Result<(), ServerError> {
    for portal in portals {
        let sockets = acquired.parts.iter().flat_map(|part| &part.sockets);
        let mut sockets = sockets.filter(|socket| socket.address() == portal);
        if let Err(source) = sockets.try_for_each(TcpListener::listen) {
            go_without(
                wanted,
                acquired,
                portal,
                ServerError::Listen {
                    portal,
                    holder: wanted.holder_of(&source, portal),
                    source,
                },
            )?;
        }
    }
    Ok(())
}

/// Checks that an address is not used by another program. Workers share their sockets
/// (`SO_REUSEPORT`), and two daemons would also share them, so that each gets some of the
/// connections.
pub(super) fn check_free(address: SocketAddr, transport: Transport) -> io::Result<()> {
    let kind = match transport {
        Transport::Tcp => socket2::Type::STREAM,
        Transport::Udp => socket2::Type::DGRAM,
    };
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    if transport == Transport::Tcp {
        // Ignore closed connections.
        socket.set_reuse_address(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// If an address is in use, returns the program that uses it.
pub(super) fn holder_of(error: &io::Error, address: SocketAddr, transport: Transport) -> HeldBy {
    let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
    HeldBy(
        is_in_use
            .then(|| holder::of_address(address, transport))
            .flatten(),
    )
}

fn bind(
    portal: SocketAddr,
    wanted: &Wanted<'_>,
    acquired: &mut Acquired,
) -> Result<(), ServerError> {
    for (n, part) in acquired.parts.iter_mut().enumerate() {
        let socket = match (wanted.server_state.socket(portal, n), wanted.simulated) {
            (Ok(None), Some(network)) => network.listen(portal),
            (socket, _) => socket.and_then(|socket| match socket {
                Some(socket) => Ok(socket),
                None if n > 0 => TcpListener::bind(portal),
                None => check_free(portal, Transport::Tcp).and_then(|()| TcpListener::bind(portal)),
            }),
        };
        let socket = socket.map_err(|source| ServerError::Listen {
            portal,
            holder: wanted.holder_of(&source, portal),
            source,
        })?;
        part.sockets.push(socket);
    }
    Ok(())
}

/// Adds a TCP portal to the missing resources. Fails if it is required.
fn go_without(
    wanted: &Wanted<'_>,
    acquired: &mut Acquired,
    portal: SocketAddr,
    error: ServerError,
) -> Result<(), ServerError> {
    let subject = Subject::TcpPortal(portal);
    if !(wanted.tolerates)(&subject, &error) {
        return Err(error);
    }
    acquired.drop_sockets(portal);
    acquired.missing.push((subject, error));
    Ok(())
}

fn mtu(bytes: u16) -> Option<Mtu> {
    Mtu::ALL.into_iter().find(|m| m.bytes() == u32::from(bytes))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::OpenedStores;
    use crate::server::{Keepers, build, first_catalog};

    /// Acquires the resources for a configuration with a target and a portal.
    fn acquire_for(
        portal: &str,
        transport: &str,
        slots: &Arc<DeviceSlots>,
        tolerates: &dyn Fn(&Subject, &ServerError) -> bool,
    ) -> Result<Acquired, ServerError> {
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\ntargets:\n- name: t\n  \
             iqn: iqn.2026-01.org.example:t\n  portals: [{{ {portal} }}]\n  luns: {{ 0: a }}\n  \
             access: open\ntransport: {{ {transport} }}\nstate: {{ directory: none }}\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        let state = ServerState::default();
        let mut builder = build::Builder::after(&state, Keepers::default()).unwrap();
        let built = first_catalog(&mut builder, &config, &state, OpenedStores::default());
        let (catalog, _files) = built.unwrap();
        let wanted = Wanted {
            config: &config,
            catalog: &catalog,
            server_state: &state,
            old: None,
            workers: 1,
            simulated: None,
            tolerates,
        };
        acquire(&wanted, slots)
    }

    #[test]
    fn closing_shared_memory_keeps_portal_available() {
        let addr = IpAddr::from([127, 97, 9, 3]);
        let slots = Arc::new(DeviceSlots::default());
        slots.take_slot(addr, DeviceKind::Shared, Duration::ZERO);
        slots.fill(0, 1);
        slots.want(|_, _| false);
        assert!(slots.is_over(0, 0));
        let portal = format!("protocol: srp, listen: {addr}");
        let optional = |subject: &Subject, _: &ServerError| subject.is_optional();
        let acquired = acquire_for(&portal, "shm: true", &slots, &optional).unwrap();
        let missing: Vec<_> = acquired.missing().iter().map(|(s, _)| s.clone()).collect();
        assert_eq!(missing, [Subject::SharedMemory(addr)]);
        assert_eq!(acquired.parts[0].devices.len(), 1);
    }

    #[test]
    fn iwarp_portal_does_not_share_used_port() {
        let at: SocketAddr = "127.97.9.4:3260".parse().unwrap();
        let theirs = TcpListener::bind(at).unwrap();
        theirs.listen().unwrap();
        let slots = Arc::new(DeviceSlots::default());
        let portal = format!("protocol: iser, listen: {}", at.ip());
        let acquired =
            |tolerates| acquire_for(&portal, "provider: iwarp", &slots, &|_, _| tolerates);
        let error = acquired(false).map(drop).unwrap_err();
        assert!(error.is_in_use());
        assert!(
            error
                .to_string()
                .starts_with("cannot listen on 127.97.9.4:3260: ")
        );
        let missing: Vec<_> = acquired(true)
            .unwrap()
            .missing()
            .iter()
            .map(|(s, _)| s.clone())
            .collect();
        assert_eq!(missing, [Subject::RdmaPortal(at)]);
        drop(theirs);
        assert!(acquired(false).unwrap().missing().is_empty());
    }
}
