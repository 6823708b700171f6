//! Sessions: which channels an I_T nexus has, on which workers. Shared by all workers, and touched at
//! login and logout only.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::srp::{InitiatorPortId, LoginRejReason, LoginReq, TargetPortId};

use super::target::{Catalog, TargetDef};
use crate::srp::{Admission, LoginLimits, LoginOutcome, LoginView, LunMap, plan_login};

/// A channel, by its worker and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelRef {
    /// The worker.
    pub worker: u16,
    /// The number, never used twice.
    pub serial: u32,
}

/// What makes an I_T nexus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusKey {
    /// The initiator port.
    pub initiator: InitiatorPortId,
    /// The target port.
    pub target: TargetPortId,
}

/// Bounds on sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// I_T nexuses at once.
    pub sessions: u32,
    /// I_T nexuses at once from one address.
    pub per_address: u32,
    /// Limits of a login.
    pub login: LoginLimits,
}

#[derive(Debug)]
struct Entry {
    id: NexusId,
    address: IpAddr,
    channels: Vec<ChannelRef>,
    luns: Arc<LunMap>,
}

#[derive(Debug)]
struct Table {
    nexuses: HashMap<NexusKey, Entry>,
    addresses: HashMap<IpAddr, u32>,
    next_id: u32,
    stopping: bool,
    catalog: Arc<Catalog>,
}

impl Table {
    /// One nexus less from an address.
    fn forget_address(&mut self, address: IpAddr) {
        if let Some(n) = self.addresses.get_mut(&address) {
            *n -= 1;
            if *n == 0 {
                self.addresses.remove(&address);
            }
        }
    }
}

/// All sessions of a server.
#[derive(Debug)]
pub struct Registry {
    table: Mutex<Table>,
}

/// A login that was entered.
#[derive(Debug)]
pub struct Entered {
    /// The nexus.
    pub nexus: NexusId,
    /// What was decided.
    pub outcome: LoginOutcome,
    /// Channels to terminate.
    pub terminate: Vec<ChannelRef>,
}

impl Registry {
    /// No session yet.
    #[must_use]
    pub fn new(catalog: Catalog) -> Self {
        Self {
            table: Mutex::new(Table {
                nexuses: HashMap::new(),
                addresses: HashMap::new(),
                next_id: 1,
                stopping: false,
                catalog: Arc::new(catalog),
            }),
        }
    }

    /// What is served at present.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.lock().catalog)
    }

    /// What a nexus sees at present; `None` without such a nexus.
    #[must_use]
    pub fn luns(&self, key: &NexusKey) -> Option<Arc<LunMap>> {
        self.lock().nexuses.get(key).map(|e| Arc::clone(&e.luns))
    }

    /// Serves something else from now on: nexuses whose units are others now are told so. Returns
    /// the channels to log out, those of initiators that may not log in any more.
    pub fn change(&self, catalog: Arc<Catalog>) -> Vec<ChannelRef> {
        let mut table = self.lock();
        let mut ended = Vec::new();
        for (key, entry) in &mut table.nexuses {
            let target = catalog.target_of(&key.target);
            let luns = target.and_then(|t| t.luns_of(&key.initiator, entry.address));
            if luns.is_none() {
                ended.extend(&entry.channels);
            }
            entry.change(*key, target, luns.unwrap_or_default());
        }
        table.catalog = catalog;
        ended
    }

    /// Refuses every login from now on.
    pub fn stop(&self) {
        self.lock().stopping = true;
    }

    /// Sessions at present.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.lock().addresses.values().sum::<u32>() as usize
    }

    /// Decides on a login and enters its channel.
    ///
    /// # Errors
    /// The reason for the reject; nothing was entered.
    pub fn login(
        &self,
        req: &LoginReq,
        peer: SocketAddr,
        channel: ChannelRef,
    ) -> Result<Entered, LoginRejReason> {
        let key = NexusKey {
            initiator: req.initiator_port,
            target: req.target_port,
        };
        let address = peer.ip().to_canonical();
        let mut table = self.lock();
        let catalog = Arc::clone(&table.catalog);
        let target = catalog.target_of(&key.target);
        let admission = match target {
            None => Admission::UnknownTarget,
            Some(target) => target
                .luns_of(&key.initiator, address)
                .map_or(Admission::Denied, Admission::Allowed),
        };
        let channels = table
            .nexuses
            .get(&key)
            .map_or(0, |e| e.channels.len() as u32);
        let from_there = table.addresses.get(&address).copied().unwrap_or(0);
        let view = LoginView {
            channels,
            exhausted: channels == 0
                && (table.nexuses.len() as u32 >= catalog.limits.sessions
                    || from_there >= catalog.limits.per_address),
            stopping: table.stopping,
        };
        let mut outcome = plan_login(req, &catalog.limits.login, &admission, view)?;
        if let Some(entry) = table.nexuses.get_mut(&key) {
            let terminate = if outcome.terminates_others {
                entry.channels.clone()
            } else {
                Vec::new()
            };
            entry.channels.push(channel);
            outcome.luns = Arc::clone(&entry.luns);
            return Ok(Entered {
                nexus: entry.id,
                outcome,
                terminate,
            });
        }
        let id = NexusId(table.next_id);
        table.next_id += 1;
        *table.addresses.entry(address).or_default() += 1;
        for (_, unit) in outcome.luns.iter() {
            unit.lu.add_nexus(id, ports(key, target));
        }
        table.nexuses.insert(
            key,
            Entry {
                id,
                address,
                channels: vec![channel],
                luns: Arc::clone(&outcome.luns),
            },
        );
        Ok(Entered {
            nexus: id,
            outcome,
            terminate: Vec::new(),
        })
    }

    /// Makes an I_T nexus of another protocol, within the same bounds; `None` where they are
    /// reached, or the server is stopping.
    pub fn open_nexus(&self, address: IpAddr) -> Option<NexusId> {
        let mut table = self.lock();
        let from_there = table.addresses.get(&address).copied().unwrap_or(0);
        let total: u32 = table.addresses.values().sum();
        let limits = table.catalog.limits;
        if table.stopping || total >= limits.sessions || from_there >= limits.per_address {
            return None;
        }
        let id = NexusId(table.next_id);
        table.next_id += 1;
        *table.addresses.entry(address).or_default() += 1;
        Some(id)
    }

    /// A nexus of another protocol has ended.
    pub fn close_nexus(&self, address: IpAddr) {
        self.lock().forget_address(address);
    }

    /// A channel is gone; with the last one the nexus ends.
    pub fn logout(&self, key: NexusKey, channel: ChannelRef) {
        let mut table = self.lock();
        let Some(entry) = table.nexuses.get_mut(&key) else {
            return;
        };
        entry.channels.retain(|c| *c != channel);
        if !entry.channels.is_empty() {
            return;
        }
        let entry = table.nexuses.remove(&key).expect("just found");
        for (_, unit) in entry.luns.iter() {
            unit.lu.remove_nexus(entry.id);
        }
        table.forget_address(entry.address);
    }

    /// A panic elsewhere cannot have left the table half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Gives the nexus other units.
    fn change(&mut self, key: NexusKey, target: Option<&TargetDef>, luns: Arc<LunMap>) {
        if self.luns.is_same(&luns) {
            return;
        }
        let old = std::mem::replace(&mut self.luns, luns);
        for (_, unit) in old.iter().filter(|(_, u)| !self.luns.has(u)) {
            unit.lu.remove_nexus(self.id);
        }
        for (_, unit) in self.luns.iter() {
            if unit.lu.nexus(self.id).is_none() {
                unit.lu.add_nexus(self.id, ports(key, target));
            }
            let scope = AttentionScope::One(self.id);
            unit.lu.raise(Attention::LunsChanged, scope);
        }
    }
}

fn ports(key: NexusKey, target: Option<&TargetDef>) -> Nexus {
    Nexus {
        initiator: PortName::Srp(key.initiator.0),
        target: TargetPort {
            name: PortName::Srp(key.target.0),
            relative_id: target.map_or(1, |t| t.relative_port(&key.target)),
            group: 0,
        },
    }
}
