//! From a configuration to what workers share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use riser_scsi::iscsi::login::Auth;
use riser_scsi::lu::LogicalUnit;
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig, RoceFaults};
use riser_transport::verbs::Mtu;

use super::ServerError;
use crate::backend::Store;
use crate::config::{self, Config, HostId, LinkFaults, Lun, Protocol};
use crate::srp::{LoginLimits, Unit, UnitIdx};
use crate::worker::Shared;
use crate::worker::iscsi::{IscsiSessions, IscsiShared};
use crate::worker::registry::{Registry, SessionLimits};
use crate::worker::target::{IscsiDef, PortalDef, TargetDef};

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

/// Opens backends, makes units and targets.
pub(super) fn shared(config: &Config) -> Result<Shared, ServerError> {
    let host = HostId::of(config);
    let mut units = Units {
        config,
        host: &host,
        stores: BTreeMap::new(),
        units: BTreeMap::new(),
        opened: Vec::new(),
        unit_stores: Vec::new(),
    };
    let mut targets = Vec::new();
    for target in &config.targets {
        let portals = target
            .portals
            .iter()
            .enumerate()
            .filter(|(_, portal)| portal.protocol == Protocol::Srp)
            .map(|(i, portal)| PortalDef {
                listen: portal.listen,
                id_ext: portal.id_ext(&host, &target.name).0,
                ioc_guid: portal.ioc_guid(&host, &target.name).0,
                service_id: portal.service_guid(&host, &target.name).0,
                relative_id: i as u16 + 1,
            });
        let portals = portals.collect();
        let mut members = Vec::new();
        for (number, lun) in &target.luns {
            members.push((*number, units.unit(*lun)?));
        }
        targets.push(TargetDef {
            config: target.clone(),
            portals,
            units: members,
            iscsi: iscsi(target)?,
        });
    }
    let limits = &config.limits;
    let login = LoginLimits {
        req_lim: limits.queue_depth,
        max_it_iu_len: limits.max_iu_size,
        max_channels: limits.channels_per_session,
        send_queue: (4 * limits.queue_depth).max(64),
    };
    let registry = Registry::new(SessionLimits {
        sessions: limits.max_sessions,
        per_address: limits.sessions_per_address,
        login,
    });
    Ok(Shared {
        targets,
        unit_stores: units.unit_stores,
        stores: units.opened,
        registry,
        iscsi: IscsiShared {
            sessions: IscsiSessions::default(),
            discovery: auth(config.discovery_chap.as_ref())?,
            commands: limits.queue_depth.min(1024) as u16,
        },
    })
}

/// What a target is for iSCSI initiators.
fn iscsi(target: &config::Target) -> Result<Option<IscsiDef>, ServerError> {
    let Some(name) = &target.iqn else {
        return Ok(None);
    };
    let portals = target.portals.iter().enumerate();
    Ok(Some(IscsiDef {
        name: name.clone(),
        portals: portals
            .filter(|(_, portal)| portal.protocol == Protocol::Iscsi)
            .map(|(i, portal)| (portal.listen, i as u16 + 1))
            .collect(),
        auth: auth(target.chap.as_ref())?,
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

/// Units, made as targets mention them; targets that mention one backend alike share its unit.
struct Units<'a> {
    config: &'a Config,
    host: &'a HostId,
    stores: BTreeMap<usize, usize>,
    units: BTreeMap<(usize, bool), Arc<Unit>>,
    opened: Vec<Arc<Store>>,
    unit_stores: Vec<usize>,
}

impl Units<'_> {
    fn unit(&mut self, lun: Lun) -> Result<Arc<Unit>, ServerError> {
        let key = (lun.backend, lun.read_only);
        if let Some(unit) = self.units.get(&key) {
            return Ok(Arc::clone(unit));
        }
        let store = self.store(lun.backend)?;
        let backend = &self.config.backends[lun.backend];
        let geometry = self.opened[store].geometry();
        let mut unit_config = backend.unit_config(&geometry, lun.read_only, self.host);
        let block = geometry.block_size;
        let limits = &mut unit_config.limits;
        limits.max_transfer = self.config.limits.max_transfer / block * block;
        limits.optimal_transfer = limits.optimal_transfer.min(limits.max_transfer);
        let lu = LogicalUnit::new(unit_config).map_err(|source| ServerError::Unit {
            name: backend.name.clone(),
            source,
        })?;
        let limits = &self.config.limits;
        let tasks = limits.max_sessions.saturating_mul(limits.queue_depth);
        let index = UnitIdx(self.unit_stores.len() as u32);
        let unit = Arc::new(Unit::new(index, Arc::new(lu), tasks.min(MAX_TASKS)));
        self.unit_stores.push(store);
        self.units.insert(key, Arc::clone(&unit));
        Ok(unit)
    }

    fn store(&mut self, backend: usize) -> Result<usize, ServerError> {
        if let Some(store) = self.stores.get(&backend) {
            return Ok(*store);
        }
        let config = &self.config.backends[backend];
        let store = Store::open(&config.spec).map_err(|source| ServerError::Backend {
            name: config.name.clone(),
            source,
        })?;
        let geometry = store.geometry();
        tracing::info!(
            backend = %config.name, bytes = geometry.capacity, block = geometry.block_size,
            direct = geometry.direct, read_only = geometry.read_only, "opened"
        );
        self.opened.push(store);
        self.stores.insert(backend, self.opened.len() - 1);
        Ok(self.opened.len() - 1)
    }
}

/// Opens the devices: by worker, one for each address that a portal has.
pub(super) fn devices(config: &Config, workers: usize) -> Result<Vec<Vec<Roce>>, ServerError> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    let portals = config.targets.iter().flat_map(|t| &t.portals);
    for portal in portals.filter(|p| p.protocol == Protocol::Srp) {
        let ip = portal.listen.ip();
        if !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    let mut devices: Vec<Vec<Roce>> = (0..workers).map(|_| Vec::new()).collect();
    for addr in addresses {
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
            own.push(device);
        }
    }
    Ok(devices)
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
