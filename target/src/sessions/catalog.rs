//! Targets as seen by workers: ports, units, and access rules.
//!
//! These are all contained in a [`Catalog`], which never changes. When the configuration changes,
//! we create a new catalog. It uses the same numbers for all units and backends that are also in
//! the old catalog.

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

/// All targets, with access rules and limits.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// Session limits for new logins.
    pub limits: SessionLimits,
    /// Maximum number of commands in flight per new iSCSI session.
    pub commands: u16,
    /// Data-Out timeout for new sessions.
    pub data_out_timeout: Duration,
    /// Maximum number of connections per new iSCSI session over TCP.
    pub connections: u32,
    /// Error recovery level for new iSCSI sessions over TCP.
    pub recovery_level: u32,
    /// Authentication required for discovery.
    pub discovery: Auth,
    /// Subnet administrator where the ports of the software NIC are registered.
    pub administrator: Option<IpAddr>,
    /// Targets with their units and portals.
    pub targets: Vec<TargetDef>,
    /// The backend of each unit, by unit number. This is an index in `stores`.
    pub unit_stores: Vec<usize>,
    /// Units by number. A removed unit remains valid while it has commands.
    pub units: Vec<Weak<Unit>>,
    /// Limits of the units, by unit number.
    pub unit_limits: Vec<IoLimits>,
    /// Open backends. Entries of removed backends are not reused.
    pub stores: Vec<Option<Arc<Store>>>,
}

impl Catalog {
    /// Returns the target with this port.
    #[must_use]
    pub fn target_of(&self, port: &TargetPortId) -> Option<&TargetDef> {
        self.targets.iter().find(|t| t.has_port(port))
    }

    /// Returns the target with this iSCSI name.
    #[must_use]
    pub fn target_named(&self, name: &IscsiName) -> Option<&TargetDef> {
        let named = |t: &&TargetDef| t.iscsi.as_ref().is_some_and(|i| i.name == *name);
        self.targets.iter().find(named)
    }

    /// Returns the portal of a target port at this address and entrance of a device.
    #[must_use]
    pub fn portal_at(
        &self,
        port: &TargetPortId,
        addr: IpAddr,
        entrance: Entrance,
    ) -> Option<&PortalDef> {
        let mut portals = self.targets.iter().flat_map(|t| &t.portals);
        portals.find(|p| {
            let is_same = match entrance {
                Entrance::Port(port) => p.listen.port() == port,
                Entrance::Service(id) => p.service_id == id,
            };
            p.listen.ip() == addr && is_same && p.target_port() == *port
        })
    }

    /// Returns all entrances that a device should listen on, with their protocols.
    #[must_use]
    pub fn entrances(&self, addr: IpAddr, has_services: bool) -> BTreeMap<Entrance, Serves> {
        let mut entrances = BTreeMap::new();
        // Multiple targets can share a portal, because the login contains the target.
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

    /// Returns the portals for an entrance of the device with this address.
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

    /// Returns the TCP portals of all targets. The same address may be returned more than once.
    pub fn tcp_portals(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let iscsi = self.targets.iter().filter_map(|t| t.iscsi.as_ref());
        iscsi.flat_map(|iscsi| &iscsi.portals).copied()
    }

    /// Returns the RDMA portals of all targets.
    pub fn rdma_portals(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let srp = self.targets.iter().flat_map(|t| &t.portals);
        let srp = srp.map(|portal| portal.listen);
        let iscsi = self.targets.iter().filter_map(|t| t.iscsi.as_ref());
        let iser = iscsi.flat_map(|iscsi| &iscsi.iser).copied();
        srp.chain(iser)
    }

    /// Removes all portals for which `is_meant` returns true, for any protocol.
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

    /// Updates the limits of all units. Waiting commands are booked again when workers switch to
    /// this catalog.
    pub fn set_limits(&self) {
        for (unit, limits) in self.units.iter().zip(&self.unit_limits) {
            if let Some(unit) = unit.upgrade() {
                unit.limits.set(limits);
            }
        }
    }

    /// Returns the unit with this number.
    #[must_use]
    pub fn unit(&self, index: UnitIdx) -> Option<Arc<Unit>> {
        self.units.get(index.0 as usize)?.upgrade()
    }

    /// Returns the number of units that are either configured or still have commands.
    #[must_use]
    pub fn live_units(&self) -> usize {
        let live = self.units.iter().filter(|unit| unit.strong_count() > 0);
        live.count()
    }

    /// Returns the backend of a unit.
    #[must_use]
    pub fn store_of(&self, unit: &Unit) -> Option<&Arc<Store>> {
        let place = self.unit_stores.get(unit.index.0 as usize)?;
        self.stores.get(*place)?.as_ref()
    }

    /// Returns the units for a backend. A unit is returned once per LUN.
    pub fn units_on(&self, store: usize) -> impl Iterator<Item = &Arc<Unit>> {
        self.targets
            .iter()
            .flat_map(|t| &t.units)
            .map(|(_, unit)| unit)
            .filter(move |unit| self.unit_stores[unit.index.0 as usize] == store)
    }
}

/// An endpoint of a device that a listener can be bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entrance {
    /// An RDMA CM port.
    Port(u16),
    /// An InfiniBand service ID.
    Service(u64),
}

/// The protocol used at an entrance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// SRP logins, for any target.
    Srp,
    /// iSER connections, for the portal with this address.
    Iser(SocketAddr),
}

/// A portal of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortalDef {
    /// Address and RDMA CM port.
    pub listen: SocketAddr,
    /// First half of the target port identifier.
    pub id_ext: u64,
    /// Second half of the target port identifier: the I/O controller GUID.
    pub ioc_guid: u64,
    /// InfiniBand service ID to listen on in addition to the port.
    pub service_id: u64,
    /// RELATIVE TARGET PORT IDENTIFIER.
    pub relative_id: u16,
    /// Address to which initiators are redirected.
    pub redirect: Option<IpAddr>,
}

impl PortalDef {
    /// Returns the target port identifier.
    #[must_use]
    pub fn target_port(&self) -> TargetPortId {
        TargetPortId::from_parts(PortIdParts {
            extension: self.id_ext,
            guid: self.ioc_guid,
        })
    }
}

/// A target as seen by sessions and workers.
#[derive(Clone, Debug)]
pub struct TargetDef {
    /// Configuration: name, units by LUN, and access rules.
    pub config: config::Target,
    /// All configured portals, even if we could not listen on them.
    pub listens: Vec<(Protocol, SocketAddr)>,
    /// SRP portals.
    pub portals: Vec<PortalDef>,
    /// Units in ascending order by LUN.
    pub units: Vec<(u16, Arc<Unit>)>,
    /// Statistics for each unit, in the same order.
    pub stats: Vec<Arc<LunStats>>,
    /// Counters for logins, rejections and session events.
    pub counts: Arc<TargetStats>,
    /// Limits per initiator, by rule and initiator.
    pub initiators: Arc<Initiators>,
    /// Name and portals for iSCSI initiators, if available.
    pub iscsi: Option<IscsiDef>,
    /// Initiators that cannot log in, regardless of the configuration.
    pub blocklist: Arc<Blocklist>,
}

/// A target for iSCSI initiators.
#[derive(Clone, Debug)]
pub struct IscsiDef {
    /// The iSCSI name used for login.
    pub name: IscsiName,
    /// Tag of the only portal group, also used as the relative target port identifier.
    pub group: u16,
    /// TCP addresses and ports.
    pub portals: Vec<SocketAddr>,
    /// Addresses and RDMA CM ports for iSER.
    pub iser: Vec<SocketAddr>,
    /// Authentication for rules without their own settings.
    pub auth: Auth,
    /// Authentication for rules with their own settings, by rule number.
    pub rule_auths: BTreeMap<usize, Auth>,
    /// Portals for all addresses of the host. Discovery only returns them to initiators using the
    /// same address.
    pub unlisted: Vec<SocketAddr>,
    /// Portals that redirect initiators.
    pub redirects: Vec<(SocketAddr, config::Redirect)>,
}

impl IscsiDef {
    /// Returns the addresses of all portals without duplicates. Initiators choose the transport.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let is_new = |portal: &&SocketAddr| !self.portals.contains(portal);
        self.portals
            .iter()
            .chain(self.iser.iter().filter(is_new))
            .copied()
    }

    /// Returns the portals for an initiator that is connected to the given address, starting with
    /// this address.
    ///
    /// Loopback addresses are only useful to an initiator on the same host. Wildcard portals
    /// include addresses that this initiator may not be able to reach, such as addresses of
    /// container bridges or separate networks, and it would spend a long time trying them.
    pub fn shown_to(&self, by: SocketAddr) -> impl Iterator<Item = SocketAddr> + '_ {
        let is_useful = move |at: &SocketAddr| by.ip().is_loopback() || !at.ip().is_loopback();
        let is_listed = move |at: &SocketAddr| at.ip() == by.ip() || !self.unlisted.contains(at);
        let others = self.addresses().filter(move |at| *at != by);
        std::iter::once(by).chain(others.filter(is_useful).filter(is_listed))
    }
}

/// Returns whether an initiator with these proven credentials, or without any, could log in with
/// this authentication setting.
#[must_use]
pub fn is_proof(auth: &Auth, proved: Option<&Credentials>) -> bool {
    match (auth, proved) {
        (Auth::Chap { accepted, .. }, Some(proved)) => accepted.contains(proved),
        (Auth::None, None) => true,
        _ => false,
    }
}

impl TargetDef {
    /// Returns the units for an initiator at this address, or `None` if it cannot log in.
    #[must_use]
    pub fn luns_of(&self, initiator: &InitiatorPortId, address: IpAddr) -> Option<Arc<LunMap>> {
        if self.blocklist.has_port(&initiator.0) {
            return None;
        }
        let allowed = self.config.allowed_luns(&initiator.0, address)?;
        let rule = self.config.rule_of_port(&initiator.0, address);
        // The extension of the port identifier is different for each path of an initiator.
        let limiter = self.limiter(rule, address, || {
            let guid = initiator.0.last_chunk().expect("it has 16 bytes");
            config::Guid(u64::from_be_bytes(*guid)).to_string()
        });
        Some(self.map_of(&allowed, limiter))
    }

    /// Same as [`TargetDef::luns_of`], for an iSCSI initiator.
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

    /// Returns the limits of an initiator with this rule. If the rule does not contain initiator
    /// names, we use the address instead, because a host can use any number of names.
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

    /// Returns the number of the access rule that matches an iSCSI initiator at this address, if
    /// any.
    #[must_use]
    pub fn rule_of(&self, initiator: &IscsiName, address: IpAddr) -> Option<usize> {
        self.config.rule_of(initiator, address)
    }

    /// Returns the authentication required for an iSCSI initiator at this address, or `None` if
    /// this is not an iSCSI target.
    #[must_use]
    pub fn auth_of_name(&self, initiator: &IscsiName, address: IpAddr) -> Option<&Auth> {
        let iscsi = self.iscsi.as_ref()?;
        let rule = self.rule_of(initiator, address);
        let own = rule.and_then(|rule| iscsi.rule_auths.get(&rule));
        Some(own.unwrap_or(&iscsi.auth))
    }

    /// Returns whether an iSCSI initiator at this address could currently log in with its proven
    /// credentials.
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

    /// Returns whether a session of an iSCSI initiator can continue: either its credentials are
    /// still accepted, or no credentials are required.
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

    /// Returns whether a unit rejects writes through this LUN, because either the unit or the LUN
    /// is read-only.
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

    /// Returns whether a target port belongs to this target.
    #[must_use]
    pub fn has_port(&self, port: &TargetPortId) -> bool {
        self.portals.iter().any(|p| p.target_port() == *port)
    }

    /// Returns the RELATIVE TARGET PORT IDENTIFIER of a port.
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
    fn discovery_shows_used_address_of_wildcard() {
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
        // The same address with a different protocol and port.
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
