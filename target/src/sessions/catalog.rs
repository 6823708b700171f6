//! Targets as workers see them: ports, units, and who may use them.
//!
//! All of it together is a [`Catalog`]. It never changes; a new configuration makes a new one,
//! which keeps the numbers of units and backends that it has in common with the old one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use riser_scsi::iscsi::chap::Credentials;
use riser_scsi::iscsi::login::Auth;
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::lun::LunId;
use riser_scsi::srp::{InitiatorPortId, PortIdParts, TargetPortId};

use super::blocklist::Blocklist;
use super::budget::SessionLimits;
use crate::backend::Store;
use crate::config::{self, Protocol};
use crate::fabric::{LunMap, Mapping, Unit, UnitIdx};
use crate::qos::{Initiators, IoLimits, Limiter, LimiterKey};
use crate::stats::{LunStats, TargetStats};

/// Everything that is served, to whom, and with which limits.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// Bounds on sessions that log in from now on.
    pub limits: SessionLimits,
    /// Commands of an iSCSI session at once, likewise.
    pub commands: u16,
    /// Time limit for data that an initiator was asked to send, likewise.
    pub data_out_timeout: Duration,
    /// Connections of an iSCSI session over TCP, likewise.
    pub connections: u32,
    /// Error recovery level of an iSCSI session over TCP, likewise.
    pub recovery_level: u32,
    /// Authentication of initiators before they discover targets.
    pub discovery: Auth,
    /// Targets, with their units and portals.
    pub targets: Vec<TargetDef>,
    /// The backend of each unit, by the unit's number: an index into `stores`.
    pub unit_stores: Vec<usize>,
    /// The units, by their numbers. One that is no longer served stays as long as it has commands.
    pub units: Vec<Weak<Unit>>,
    /// The limits of the units, by their numbers.
    pub unit_limits: Vec<IoLimits>,
    /// Opened backends. Places of those that are no longer served stay empty.
    pub stores: Vec<Option<Arc<Store>>>,
}

impl Catalog {
    /// The target with a port.
    #[must_use]
    pub fn target_of(&self, port: &TargetPortId) -> Option<&TargetDef> {
        self.targets.iter().find(|t| t.has_port(port))
    }

    /// The target with an iSCSI name.
    #[must_use]
    pub fn target_named(&self, name: &IscsiName) -> Option<&TargetDef> {
        let named = |t: &&TargetDef| t.iscsi.as_ref().is_some_and(|i| i.name == *name);
        self.targets.iter().find(named)
    }

    /// Whether a target port is served at an address, by one of the device's ways in.
    #[must_use]
    pub fn has_entrance(&self, port: &TargetPortId, addr: IpAddr, entrance: Entrance) -> bool {
        let mut portals = self.targets.iter().flat_map(|t| &t.portals);
        portals.any(|p| {
            let is_same = match entrance {
                Entrance::Port(port) => p.listen.port() == port,
                Entrance::Service(id) => p.service_id == id,
            };
            p.listen.ip() == addr && is_same && p.target_port() == *port
        })
    }

    /// Returns the entrances at which a device is to listen, and what each serves.
    #[must_use]
    pub fn entrances(&self, addr: IpAddr, has_services: bool) -> BTreeMap<Entrance, Serves> {
        let mut entrances = BTreeMap::new();
        // Targets may share a portal: a login names the one it wants.
        let srp = self.targets.iter().flat_map(|t| &t.portals);
        for portal in srp.filter(|p| p.listen.ip() == addr) {
            entrances.insert(Entrance::Port(portal.listen.port()), Serves::Srp);
            if has_services {
                entrances.insert(Entrance::Service(portal.service_id), Serves::Srp);
            }
        }
        let iscsi = self.targets.iter().filter_map(|t| t.iscsi.as_ref());
        let iser = iscsi.flat_map(|iscsi| &iscsi.iser);
        for listen in iser.filter(|listen| listen.ip() == addr) {
            entrances.insert(Entrance::Port(listen.port()), Serves::Iser(*listen));
        }
        entrances
    }

    /// The portals behind an entrance of the device at an address.
    #[must_use]
    pub fn portals_at(&self, addr: IpAddr, entrance: Entrance) -> BTreeSet<SocketAddr> {
        match entrance {
            Entrance::Port(port) => [SocketAddr::new(addr, port)].into(),
            Entrance::Service(id) => {
                let srp = self.targets.iter().flat_map(|t| &t.portals);
                let here = srp.filter(|p| p.listen.ip() == addr && p.service_id == id);
                here.map(|portal| portal.listen).collect()
            }
        }
    }

    /// Returns the TCP portals of all targets; an address may be there more than once.
    pub fn tcp_portals(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let iscsi = self.targets.iter().filter_map(|t| t.iscsi.as_ref());
        iscsi.flat_map(|iscsi| &iscsi.portals).copied()
    }

    /// Returns the portals of all targets on RDMA devices.
    pub fn rdma_portals(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let srp = self.targets.iter().flat_map(|t| &t.portals);
        let srp = srp.map(|portal| portal.listen);
        let iscsi = self.targets.iter().filter_map(|t| t.iscsi.as_ref());
        let iser = iscsi.flat_map(|iscsi| &iscsi.iser).copied();
        srp.chain(iser)
    }

    /// Removes the portals that `is_meant` chooses, of every protocol.
    pub fn remove_portals(&mut self, is_meant: impl Fn(Protocol, SocketAddr) -> bool) {
        for target in &mut self.targets {
            let portals = &mut target.portals;
            portals.retain(|portal| !is_meant(Protocol::Srp, portal.listen));
            if let Some(iscsi) = &mut target.iscsi {
                iscsi.portals.retain(|at| !is_meant(Protocol::Iscsi, *at));
                iscsi.iser.retain(|at| !is_meant(Protocol::Iser, *at));
            }
        }
    }

    /// Gives the units their limits. What waits at workers books once more when these follow.
    pub fn set_limits(&self) {
        for (unit, limits) in self.units.iter().zip(&self.unit_limits) {
            if let Some(unit) = unit.upgrade() {
                unit.limits.set(limits);
            }
        }
    }

    /// A unit, by its number.
    #[must_use]
    pub fn unit(&self, index: UnitIdx) -> Option<Arc<Unit>> {
        self.units.get(index.0 as usize)?.upgrade()
    }

    /// Returns the number of units that are served, or still have commands.
    #[must_use]
    pub fn live_units(&self) -> usize {
        let live = self.units.iter().filter(|unit| unit.strong_count() > 0);
        live.count()
    }

    /// The backend of a unit.
    #[must_use]
    pub fn store_of(&self, unit: &Unit) -> Option<&Arc<Store>> {
        let place = self.unit_stores.get(unit.index.0 as usize)?;
        self.stores.get(*place)?.as_ref()
    }

    /// The units on a backend, each once for each of its numbers.
    pub fn units_on(&self, store: usize) -> impl Iterator<Item = &Arc<Unit>> {
        self.targets
            .iter()
            .flat_map(|t| &t.units)
            .map(|(_, unit)| unit)
            .filter(move |unit| self.unit_stores[unit.index.0 as usize] == store)
    }
}

/// A way into a device that one listener can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entrance {
    /// A port of the RDMA CM.
    Port(u16),
    /// A bare InfiniBand service id.
    Service(u64),
}

/// Protocol that is served at an entrance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// Logins of SRP, each for the target that it names.
    Srp,
    /// Connections of iSER, on the portal at this address.
    Iser(SocketAddr),
}

/// A portal of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortalDef {
    /// Address and RDMA CM port.
    pub listen: SocketAddr,
    /// First half of the target port identifier.
    pub id_ext: u64,
    /// Second half of it: the GUID of the I/O controller.
    pub ioc_guid: u64,
    /// The InfiniBand service id on which it listens besides.
    pub service_id: u64,
    /// RELATIVE TARGET PORT IDENTIFIER.
    pub relative_id: u16,
}

impl PortalDef {
    /// The target port identifier.
    #[must_use]
    pub fn target_port(&self) -> TargetPortId {
        TargetPortId::from_parts(PortIdParts {
            extension: self.id_ext,
            guid: self.ioc_guid,
        })
    }
}

/// A target, as sessions and workers see it.
#[derive(Clone, Debug)]
pub struct TargetDef {
    /// Its configuration: name, units by number, access.
    pub config: config::Target,
    /// Portals of the configuration; those that cannot be listened on are among these only.
    pub listens: Vec<(Protocol, SocketAddr)>,
    /// Portals at which it listens for SRP.
    pub portals: Vec<PortalDef>,
    /// Its units, in ascending order of their numbers.
    pub units: Vec<(u16, Arc<Unit>)>,
    /// Statistics of each of the units, in the same order.
    pub stats: Vec<Arc<LunStats>>,
    /// Counters of logins, refusals and events of sessions.
    pub counts: Arc<TargetStats>,
    /// Limits of its initiators, by rule and initiator.
    pub initiators: Arc<Initiators>,
    /// Names and portals for iSCSI initiators, if it has any.
    pub iscsi: Option<IscsiDef>,
    /// Initiators that may not log in, whatever the configuration says.
    pub blocklist: Arc<Blocklist>,
}

/// A target for iSCSI initiators.
#[derive(Clone, Debug)]
pub struct IscsiDef {
    /// iSCSI name, by which initiators log in.
    pub name: IscsiName,
    /// The tag of its one portal group, and the relative target port identifier.
    pub group: u16,
    /// Addresses and ports where it listens on TCP.
    pub portals: Vec<SocketAddr>,
    /// Addresses and RDMA CM ports where it listens for iSER.
    pub iser: Vec<SocketAddr>,
    /// Authentication of initiators whose rule has none of its own.
    pub auth: Auth,
    /// Authentication of the others, by the numbers of their rules.
    pub rule_auths: BTreeMap<usize, Auth>,
    /// Portals at all addresses of the host: discovery shows each only to those who came by it.
    pub unlisted: Vec<SocketAddr>,
    /// Portals that send initiators elsewhere.
    pub redirects: Vec<(SocketAddr, config::Redirect)>,
}

impl IscsiDef {
    /// The addresses of all portals, each once. Initiators choose the transport themselves.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let is_new = |portal: &&SocketAddr| !self.portals.contains(portal);
        self.portals
            .iter()
            .chain(self.iser.iter().filter(is_new))
            .copied()
    }

    /// Where an initiator that came by an address finds the target, that address first.
    ///
    /// Loopback addresses are those of the initiator's own host, and only of use there. A portal at
    /// all addresses has some that this initiator cannot reach, such as those of bridges for
    /// containers or of networks of its own, and it would try each of them for a long time.
    pub fn shown_to(&self, by: SocketAddr) -> impl Iterator<Item = SocketAddr> + '_ {
        let is_useful = move |at: &SocketAddr| by.ip().is_loopback() || !at.ip().is_loopback();
        let is_listed = move |at: &SocketAddr| at.ip() == by.ip() || !self.unlisted.contains(at);
        let others = self.addresses().filter(move |at| *at != by);
        std::iter::once(by).chain(others.filter(is_useful).filter(is_listed))
    }
}

/// Whether an initiator that has proved these credentials, or nothing, could log in where this
/// authentication is required.
#[must_use]
pub fn is_proof(auth: &Auth, proved: Option<&Credentials>) -> bool {
    match (auth, proved) {
        (Auth::Chap { accepted, .. }, Some(proved)) => accepted.contains(proved),
        (Auth::None, None) => true,
        _ => false,
    }
}

impl TargetDef {
    /// The units that an initiator at an address may see; `None` if it may not log in.
    #[must_use]
    pub fn luns_of(&self, initiator: &InitiatorPortId, address: IpAddr) -> Option<Arc<LunMap>> {
        if self.blocklist.has_port(&initiator.0) {
            return None;
        }
        let allowed = self.config.allowed_luns(&initiator.0, address)?;
        let rule = self.config.rule_of_port(&initiator.0, address);
        // The identifier's extension is another one for each of an initiator's paths.
        let limiter = self.limiter(rule, address, || {
            let guid = initiator.0.last_chunk().expect("it has 16 bytes");
            config::Guid(u64::from_be_bytes(*guid)).to_string()
        });
        Some(self.map_of(&allowed, limiter))
    }

    /// As [`TargetDef::luns_of`], for an iSCSI initiator.
    #[must_use]
    pub fn luns_of_name(&self, initiator: &IscsiName, address: IpAddr) -> Option<Arc<LunMap>> {
        if self.blocklist.has_name(initiator) {
            return None;
        }
        let allowed = self.config.allowed_luns_of(initiator, address)?;
        let rule = self.config.rule_of(initiator, address);
        let limiter = self.limiter(rule, address, || initiator.to_string());
        Some(self.map_of(&allowed, limiter))
    }

    /// The limits of an initiator whose rule has this number. One that the rule does not name is
    /// known by its address: it could have any number of names.
    fn limiter(
        &self,
        rule: Option<usize>,
        address: IpAddr,
        name: impl FnOnce() -> String,
    ) -> Option<Arc<Limiter>> {
        let rule = self.config.rule(rule?)?;
        let limits = rule.limits.as_ref()?;
        let initiator = match rule.names_initiators() {
            true => name(),
            false => address.to_canonical().to_string(),
        };
        let key = LimiterKey {
            rule: rule.subject(),
            initiator,
            limits: *limits,
        };
        Some(self.initiators.limiter(key))
    }

    /// The number of the access rule that decides about an iSCSI initiator at an address, if one
    /// does.
    #[must_use]
    pub fn rule_of(&self, initiator: &IscsiName, address: IpAddr) -> Option<usize> {
        self.config.rule_of(initiator, address)
    }

    /// How an iSCSI initiator at an address proves who it is; `None` if the target is none of
    /// iSCSI.
    #[must_use]
    pub fn auth_of_name(&self, initiator: &IscsiName, address: IpAddr) -> Option<&Auth> {
        let iscsi = self.iscsi.as_ref()?;
        let rule = self.rule_of(initiator, address);
        let own = rule.and_then(|rule| iscsi.rule_auths.get(&rule));
        Some(own.unwrap_or(&iscsi.auth))
    }

    /// Whether an iSCSI initiator at an address could log in now with the credentials that it has
    /// proved.
    #[must_use]
    pub fn is_accepted(
        &self,
        initiator: &IscsiName,
        address: IpAddr,
        proved: Option<&Credentials>,
    ) -> bool {
        let auth = self.auth_of_name(initiator, address);
        auth.is_some_and(|auth| is_proof(auth, proved))
    }

    /// Whether a session of an iSCSI initiator may continue: its credentials are accepted now, or no
    /// credentials are required.
    #[must_use]
    pub fn keeps_session(
        &self,
        initiator: &IscsiName,
        address: IpAddr,
        proved: Option<&Credentials>,
    ) -> bool {
        let auth = self.auth_of_name(initiator, address);
        auth.is_some_and(|auth| *auth == Auth::None || is_proof(auth, proved))
    }

    fn map_of(
        &self,
        allowed: &BTreeMap<u16, config::SeenLun>,
        limiter: Option<Arc<Limiter>>,
    ) -> Arc<LunMap> {
        let entry = |(number, seen): (&u16, &config::SeenLun)| {
            let units = &self.units;
            let place = units.binary_search_by_key(&seen.number, |(n, _)| *n).ok()?;
            let mapping = Mapping {
                unit: Arc::clone(&units[place].1),
                stats: Arc::clone(&self.stats[place]),
                read_only: seen.read_only,
            };
            Some((LunId::new(u32::from(*number))?, mapping))
        };
        let luns = LunMap::new(allowed.iter().filter_map(entry));
        Arc::new(luns.with_limiter(limiter))
    }

    /// Whether one of its units refuses writes: the unit itself, or by this number.
    #[must_use]
    pub fn is_read_only(&self, number: u16) -> bool {
        let mut units = self.units.iter();
        let unit = units.find(|(n, _)| *n == number);
        unit.is_some_and(|(_, unit)| unit.lu.config().read_only)
            || self
                .config
                .luns
                .get(&number)
                .is_some_and(|lun| lun.read_only)
    }

    /// Whether a target port is one of this target.
    #[must_use]
    pub fn has_port(&self, port: &TargetPortId) -> bool {
        self.portals.iter().any(|p| p.target_port() == *port)
    }

    /// RELATIVE TARGET PORT IDENTIFIER of one of its ports.
    #[must_use]
    pub fn relative_port(&self, port: &TargetPortId) -> u16 {
        self.portals
            .iter()
            .find(|p| p.target_port() == *port)
            .map_or(1, |p| p.relative_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discovery_shows_of_a_portal_at_all_addresses_the_one_that_was_used() {
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 3260);
        let all = ["127.0.0.1", "172.17.0.1", "192.0.2.1", "192.0.2.2"].map(at);
        let mut target = IscsiDef {
            name: IscsiName::new("iqn.2026-01.com.example:t").unwrap(),
            group: 1,
            portals: all.to_vec(),
            iser: vec![at("192.0.2.9")],
            auth: Auth::None,
            rule_auths: BTreeMap::new(),
            unlisted: all[..3].to_vec(),
            redirects: Vec::new(),
        };
        let shown = |target: &IscsiDef, by| -> Vec<_> { target.shown_to(at(by)).collect() };
        let named = ["192.0.2.2", "192.0.2.9"].map(at);
        assert_eq!(
            shown(&target, "192.0.2.1"),
            [at("192.0.2.1"), named[0], named[1]]
        );
        assert_eq!(shown(&target, "192.0.2.9"), [named[1], named[0]]);
        assert_eq!(
            shown(&target, "127.0.0.1"),
            [at("127.0.0.1"), named[0], named[1]]
        );
        // The same address by another protocol, at another port.
        let iser = SocketAddr::new(at("192.0.2.1").ip(), 3261);
        target.iser.push(iser);
        target.unlisted.push(iser);
        assert_eq!(
            shown(&target, "192.0.2.1"),
            [at("192.0.2.1"), named[0], named[1], iser]
        );
        assert!(!shown(&target, "192.0.2.2").contains(&iser));
        target.iser.pop();
        target.unlisted.clear();
        assert_eq!(shown(&target, "192.0.2.1").len(), 4);
        assert_eq!(shown(&target, "127.0.0.1").len(), 5);
    }
}
