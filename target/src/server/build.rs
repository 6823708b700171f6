//! From a configuration to what workers share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use riser_scsi::iscsi::login::Auth;
use riser_scsi::lu::LogicalUnit;
use riser_transport::rdma_core::{self, RdmaCoreDevice};
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
use riser_transport::verbs::{Mtu, Verbs};

use super::ServerError;
use crate::backend::Store;
use crate::config::{
    self, Backend, Config, HostId, LinkFaults, Lun, Portal, Protocol, Provider, Target,
};
use crate::srp::{LoginLimits, Unit, UnitIdx};
use crate::worker::Device;
use crate::worker::iscsi::{IscsiSessions, IscsiShared};
use crate::worker::registry::SessionLimits;
use crate::worker::target::{Catalog, IscsiDef, PortalDef, TargetDef};

/// Tasks of one unit at most, of all initiators together.
const MAX_TASKS: u32 = 1 << 16;

/// Number of workers: a power of two, since queue-pair numbers name their worker in low bits.
pub(super) fn workers(config: &Config) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let wanted = config.workers.number(cores).clamp(1, 64);
    let number = 1 << wanted.ilog2();
    if number != wanted {
        tracing::info!(wanted, number, "the number of workers is a power of two");
    }
    number
}

/// The CPU of a worker, if it is to be pinned.
pub(super) fn cpu(config: &Config, worker: usize) -> Option<usize> {
    let cpus = &config.workers.cpus;
    (!cpus.is_empty()).then(|| cpus[worker % cpus.len()])
}

/// The registry's limits.
pub(super) fn session_limits(config: &Config) -> SessionLimits {
    let limits = &config.limits;
    SessionLimits {
        sessions: limits.max_sessions,
        per_address: limits.sessions_per_address,
        login: LoginLimits {
            req_lim: limits.queue_depth,
            max_it_iu_len: limits.max_iu_size,
            max_channels: limits.channels_per_session,
            send_queue: (4 * limits.queue_depth).max(64),
        },
    }
}

/// What iSCSI needs of all targets together.
pub(super) fn iscsi_shared(config: &Config) -> Result<IscsiShared, ServerError> {
    Ok(IscsiShared {
        sessions: IscsiSessions::default(),
        discovery: auth(config.discovery_chap.as_ref())?,
        commands: config.limits.queue_depth.min(1024) as u16,
    })
}

/// What a target is for iSCSI initiators.
fn iscsi(target: &config::Target) -> Result<Option<IscsiDef>, ServerError> {
    let Some(name) = &target.iqn else {
        return Ok(None);
    };
    // All portals lead to the same sessions, whatever carries them: they are one portal group, and so
    // one port for initiators. Relative port identifiers are unique among all portals of the target.
    let first = target.portals.iter().position(|p| p.protocol.is_iscsi());
    let group = first.expect("only a target with such portals has a name") as u16 + 1;
    let portals = |protocol| {
        let all = target
            .portals
            .iter()
            .filter(move |p| p.protocol == protocol);
        all.map(|p| p.listen).collect()
    };
    Ok(Some(IscsiDef {
        name: name.clone(),
        group,
        portals: portals(Protocol::Iscsi),
        iser: portals(Protocol::Iser),
        auth: auth(target.chap.as_ref())?,
        redirects: target
            .portals
            .iter()
            .filter_map(|portal| Some((portal.listen, portal.redirect.clone()?)))
            .collect(),
    }))
}

/// Reads the secrets.
fn auth(chap: Option<&config::Chap>) -> Result<Auth, ServerError> {
    let Some(chap) = chap else {
        return Ok(Auth::None);
    };
    let read = |user: &config::ChapUser| {
        user.credentials().map_err(|source| ServerError::Secret {
            name: user.name.clone(),
            source,
        })
    };
    Ok(Auth::Chap {
        accepted: chap.users.iter().map(read).collect::<Result<_, _>>()?,
        own: chap.mutual.as_ref().map(read).transpose()?,
    })
}

/// Makes catalogs, one after another; what they have in common is made once and keeps its number.
///
/// Backends are known by their names. Units are made as targets mention them, and targets that
/// mention one backend alike share its unit.
#[derive(Clone, Debug, Default)]
pub(super) struct Builder {
    stores: BTreeMap<String, usize>,
    units: BTreeMap<(String, bool), Arc<Unit>>,
    opened: Vec<Option<Arc<Store>>>,
    unit_stores: Vec<usize>,
}

impl Builder {
    /// Opens backends, makes units and targets. Backends that the configuration does not serve are
    /// left out, and close when the last of their requests has ended.
    pub(super) fn catalog(&mut self, config: &Config) -> Result<Catalog, ServerError> {
        let host = HostId::of(config);
        let mut targets = Vec::new();
        for target in &config.targets {
            let portals = target.portals.iter().enumerate();
            let portals = portals.filter(|(_, portal)| portal.protocol == Protocol::Srp);
            let portals = portals.map(|(i, portal)| portal_def(&host, target, i, portal));
            let mut members = Vec::new();
            for (number, lun) in &target.luns {
                members.push((*number, self.unit(config, &host, *lun)?));
            }
            targets.push(TargetDef {
                config: target.clone(),
                portals: portals.collect(),
                units: members,
                iscsi: iscsi(target)?,
            });
        }
        self.forget_others(&targets);
        Ok(Catalog {
            targets,
            unit_stores: self.unit_stores.clone(),
            stores: self.opened.clone(),
        })
    }

    fn forget_others(&mut self, targets: &[TargetDef]) {
        let served = |unit: &Arc<Unit>| {
            let mut all = targets.iter().flat_map(|t| &t.units);
            all.any(|(_, u)| Arc::ptr_eq(u, unit))
        };
        self.units.retain(|_, unit| served(unit));
        let (units, unit_stores) = (&self.units, &self.unit_stores);
        let in_use = |place: usize| {
            let mut all = units.values();
            all.any(|u| unit_stores[u.index.0 as usize] == place)
        };
        self.stores.retain(|_, place| in_use(*place));
        for (place, store) in self.opened.iter_mut().enumerate() {
            if !in_use(place) {
                *store = None;
            }
        }
    }

    fn unit(&mut self, config: &Config, host: &HostId, lun: Lun) -> Result<Arc<Unit>, ServerError> {
        let backend = &config.backends[lun.backend];
        let key = (backend.name.clone(), lun.read_only);
        if let Some(unit) = self.units.get(&key) {
            return Ok(Arc::clone(unit));
        }
        let place = self.store(backend)?;
        let geometry = self.opened[place].as_ref().expect("just opened").geometry();
        let mut unit_config = backend.unit_config(&geometry, lun.read_only, host);
        let block = geometry.block_size;
        let limits = &mut unit_config.limits;
        limits.max_transfer = config.limits.max_transfer / block * block;
        limits.optimal_transfer = limits.optimal_transfer.min(limits.max_transfer);
        let lu = LogicalUnit::new(unit_config).map_err(|source| ServerError::Unit {
            name: backend.name.clone(),
            source,
        })?;
        let limits = &config.limits;
        let tasks = limits.max_sessions.saturating_mul(limits.queue_depth);
        let index = UnitIdx(self.unit_stores.len() as u32);
        let unit = Arc::new(Unit::new(index, Arc::new(lu), tasks.min(MAX_TASKS)));
        self.unit_stores.push(place);
        self.units.insert(key, Arc::clone(&unit));
        Ok(unit)
    }

    fn store(&mut self, backend: &Backend) -> Result<usize, ServerError> {
        if let Some(place) = self.stores.get(&backend.name) {
            return Ok(*place);
        }
        let store = Store::open(&backend.spec).map_err(|source| ServerError::Backend {
            name: backend.name.clone(),
            source,
        })?;
        let geometry = store.geometry();
        tracing::info!(
            backend = %backend.name, bytes = geometry.capacity, block = geometry.block_size,
            direct = geometry.direct, read_only = geometry.read_only, "opened"
        );
        let place = self.opened.len();
        self.opened.push(Some(store));
        self.stores.insert(backend.name.clone(), place);
        Ok(place)
    }
}

fn portal_def(host: &HostId, target: &Target, place: usize, portal: &Portal) -> PortalDef {
    PortalDef {
        listen: portal.listen,
        id_ext: portal.id_ext(host, &target.name).0,
        ioc_guid: portal.ioc_guid(host, &target.name).0,
        service_id: portal.service_guid(host, &target.name).0,
        relative_id: place as u16 + 1,
    }
}

/// Opens the devices: by worker, one for each address that a portal has.
///
/// An RDMA device of the host is the first worker's alone. It comes after the software NICs, whose
/// places are the same for all workers.
pub(super) fn devices(config: &Config, workers: usize) -> Result<Vec<Vec<Nic>>, ServerError> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    let portals = config.targets.iter().flat_map(|t| &t.portals);
    for portal in portals.filter(|p| p.protocol.is_rdma()) {
        let ip = portal.listen.ip();
        if !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    let on_host = |addr: &IpAddr| match config.transport.provider {
        Provider::Roce => false,
        Provider::RdmaCore => true,
        Provider::Auto => rdma_core::has_device(*addr),
    };
    let (on_host, ours): (Vec<IpAddr>, Vec<IpAddr>) = addresses.into_iter().partition(on_host);
    let mut devices: Vec<Vec<Nic>> = (0..workers).map(|_| Vec::new()).collect();
    for addr in ours {
        // In the workers' order: the sockets of one port are numbered as they are bound.
        for (index, own) in devices.iter_mut().enumerate() {
            let roce = RoceConfig {
                mtu: config.transport.mtu.and_then(mtu),
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
            own.push(Nic::Roce(device));
        }
    }
    for addr in on_host {
        let device = RdmaCoreDevice::open(addr)?;
        tracing::info!(%addr, device = %device.device_attr().name, "serves on an RDMA device");
        devices[0].push(Nic::RdmaCore(device));
    }
    Ok(devices)
}

/// A device on its way to its worker's thread.
pub(super) enum Nic {
    /// The software NIC's.
    Roce(Roce),
    /// The host's.
    RdmaCore(RdmaCoreDevice),
}

impl Nic {
    /// As the worker knows it.
    pub(super) fn into_device(self) -> Box<dyn Device> {
        match self {
            Self::Roce(device) => Box::new(device),
            Self::RdmaCore(device) => Box::new(device),
        }
    }
}

fn mtu(bytes: u16) -> Option<Mtu> {
    Mtu::ALL
        .into_iter()
        .find(|m| m.bytes() == usize::from(bytes))
}

fn faults(link: LinkFaults, worker: u64) -> FaultConfig {
    let parts = |p: crate::config::Percent| (p.probability() * 1e6).round() as u32;
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
