//! The addresses of the host, and the portals for a wildcard.
//!
//! A portal for `0.0.0.0`, `[::]` or an interface is expanded to a portal for each address, with a
//! separate socket or device. Therefore, other addresses are not affected when an address is added
//! or removed. The addresses are listed when a configuration is applied, and every few seconds.
//!
//! iSCSI discovery returns portals for literal addresses and interfaces to all initiators. For
//! `0.0.0.0` and `[::]`, it only returns the address used by the initiator, which may not be able
//! to reach the other addresses.
//!
//! A removed address is kept for [`GRACE`], because it may only be removed for a moment, for
//! example if a lease is renewed. IPv6 link-local addresses are ignored: initiators cannot use them
//! without knowing the name of their own interface.
//!
//! # Overlaps
//! If multiple portals of a target include the same address and port, we use the most specific
//! portal: first a literal address, then an interface, then all addresses of the host.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use riser_transport::netif::{self, Interface};
use riser_transport::rdma_core::GidTables;

use crate::config::{Config, Listen, Portal, Protocol, Provider, Target, Wildcard};

/// Time for which a removed address is kept.
pub(super) const GRACE: Duration = Duration::from_secs(15);

/// Maximum number of addresses per wildcard.
const MAX_ADDRESSES: usize = 64;

/// The addresses of the host by interface, and when they were last seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Addresses(BTreeMap<(String, IpAddr), Instant>);

impl Addresses {
    /// Lists the current addresses, if needed by the configuration.
    pub(super) fn refresh(&mut self, config: &Config) {
        let mut portals = config.targets.iter().flat_map(|target| &target.portals);
        // Most configurations do not contain wildcards, so avoid the system calls.
        if portals.all(|portal| portal.listen.at().is_some()) {
            return;
        }
        match netif::interfaces() {
            Ok(interfaces) => self.observe(interfaces, Instant::now()),
            // Keep the known addresses, because a temporary error must not close the sessions of
            // all wildcards.
            Err(error) => tracing::warn!(%error, "cannot list the addresses of this host"),
        }
    }

    /// Updates the list with the current addresses.
    pub(super) fn observe(&mut self, interfaces: Vec<Interface>, now: Instant) {
        for interface in interfaces {
            // The key contains the interface, because an address that moves to another interface
            // belongs to a different wildcard.
            self.0.insert((interface.name, interface.address), now);
        }
        self.0.retain(|_, seen| now.duration_since(*seen) < GRACE);
    }

    /// Returns the addresses included in a wildcard.
    fn of(&self, wildcard: &Wildcard) -> impl Iterator<Item = IpAddr> {
        let all = self.0.keys();
        let all = all.filter(|(interface, address)| wildcard.covers(interface, *address));
        let mut addresses: Vec<_> = all.map(|(_, address)| *address).collect();
        addresses.sort_unstable();
        // Two interfaces may have the same address, for example if a link is configured twice.
        addresses.dedup();
        addresses.into_iter()
    }
}

/// A portal for a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortalAt {
    /// Index in the configuration of the target.
    pub(crate) portal: usize,
    /// Protocol of the configured portal.
    pub(crate) protocol: Protocol,
    /// Address and port.
    pub(crate) at: SocketAddr,
    /// True if it was expanded from a wildcard.
    pub(crate) is_wild: bool,
    /// True if it was expanded from a wildcard for all addresses of the host.
    pub(crate) is_any: bool,
}

/// The portals of a configuration, expanded to single addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expansion {
    /// Portals by target, in file order.
    pub(crate) targets: Vec<Vec<PortalAt>>,
    /// Wildcards that are not fully available, by protocol, with the reason.
    pub(crate) lacking: Vec<(Protocol, Listen, String)>,
}

impl Expansion {
    /// Expands a configuration for the current addresses of the host.
    pub(crate) fn now(config: &Config) -> Self {
        let mut addresses = Addresses::default();
        addresses.refresh(config);
        Self::of(config, &addresses, &Self::default())
    }

    /// Expands a configuration for these addresses. If there are too many, addresses from `before`
    /// are kept.
    pub(super) fn of(config: &Config, addresses: &Addresses, before: &Self) -> Self {
        let gids = LazyCell::new(GidTables::read);
        let has_device = |ip: IpAddr| match config.transport.provider {
            Provider::RdmaCore => gids.has(ip),
            Provider::Roce | Provider::Auto | Provider::Shm | Provider::Iwarp => true,
        };
        Self::new(&config.targets, addresses, &has_device, before)
    }

    /// Same as [`Self::of`]. `has_device` returns whether an address can be used for RDMA portals.
    fn new(
        targets: &[Target],
        addresses: &Addresses,
        has_device: &dyn Fn(IpAddr) -> bool,
        before: &Self,
    ) -> Self {
        let mut expansion = Self::default();
        // Collect these for all targets first. An address in the file is intentional, so it has
        // priority over any wildcard that includes it, regardless of the order in the file.
        let literal: Vec<_> = targets
            .iter()
            .flat_map(|target| &target.portals)
            .filter_map(|portal| Some((portal.protocol, portal.listen.at()?)))
            .collect();
        for target in targets {
            let mut found: Vec<PortalAt> = Vec::new();
            // The most specific portal for an address is added first.
            for rank in [is_literal, is_interface, is_any] {
                let portals = target.portals.iter().enumerate();
                for (number, portal) in portals.filter(|(_, portal)| rank(&portal.listen)) {
                    let (protocol, listen) = (portal.protocol, portal.listen);
                    let wildcard = match listen {
                        Listen::At(at) => {
                            found.push(PortalAt {
                                portal: number,
                                protocol,
                                at,
                                is_wild: false,
                                is_any: false,
                            });
                            continue;
                        }
                        Listen::Wildcard(wildcard, _) => wildcard,
                    };
                    let all =
                        expansion.addresses_of(portal, &wildcard, addresses, has_device, before);
                    for at in all {
                        // A wildcard may include an RDMA CM port that is already used by another
                        // protocol.
                        let is_rival = |(other, there): (Protocol, SocketAddr)| {
                            other != protocol
                                && other.is_rdma()
                                && protocol.is_rdma()
                                && there == at
                        };
                        let others = expansion.targets.iter().flatten().chain(&found);
                        let mut others = others.map(|p| (p.protocol, p.at));
                        if literal.iter().copied().any(is_rival) || others.any(is_rival) {
                            let why =
                                format!("{at} is already a portal for a different RDMA protocol");
                            expansion.lack(protocol, listen, why);
                            continue;
                        }
                        // This target already has a more specific portal, so use its settings.
                        let mut known = found.iter();
                        if !known.any(|p| p.protocol == protocol && p.at == at) {
                            found.push(PortalAt {
                                portal: number,
                                protocol,
                                at,
                                is_wild: true,
                                is_any: !wildcard.is_interface(),
                            });
                        }
                    }
                }
            }
            // Restore file order, because this is the order in which discovery returns the portals.
            found.sort_by_key(|portal| (portal.portal, portal.at));
            expansion.targets.push(found);
        }
        expansion
    }

    /// Returns the addresses for a portal with a wildcard. Addresses from `before` are first, so
    /// that a new address does not close the sessions of another address. If there are no addresses
    /// or too many, this is added to `lacking`.
    fn addresses_of(
        &mut self,
        portal: &Portal,
        wildcard: &Wildcard,
        addresses: &Addresses,
        has_device: &dyn Fn(IpAddr) -> bool,
        before: &Self,
    ) -> impl Iterator<Item = SocketAddr> + use<> {
        let (protocol, listen) = (portal.protocol, portal.listen);
        let may_be = |ip: &IpAddr| !protocol.is_rdma() || has_device(*ip);
        // Count the addresses before checking for devices, so that the message can report which of
        // them is missing.
        let there = addresses.of(wildcard).count();
        let ips = addresses.of(wildcard).filter(may_be);
        let mut all: Vec<_> = ips.map(|ip| SocketAddr::new(ip, listen.port())).collect();
        if let Some(why) = lack(wildcard, there, all.len()) {
            self.lack(protocol, listen, why);
        }
        all.sort_by_key(|at| !before.has(protocol, *at));
        all.into_iter().take(MAX_ADDRESSES)
    }

    fn lack(&mut self, protocol: Protocol, listen: Listen, why: String) {
        let is_this =
            |lacking: &(Protocol, Listen, String)| lacking.0 == protocol && lacking.1 == listen;
        if !self.lacking.iter().any(is_this) {
            self.lacking.push((protocol, listen, why));
        }
    }

    fn has(&self, protocol: Protocol, at: SocketAddr) -> bool {
        let mut all = self.targets.iter().flatten();
        all.any(|portal| portal.protocol == protocol && portal.at == at)
    }

    /// Returns true if an address is only included via wildcards, either for RDMA or for other
    /// portals.
    pub(super) fn is_wild(&self, at: SocketAddr, is_rdma: bool) -> bool {
        let all = self.targets.iter().flatten();
        let mut all = all.filter(|p| p.at == at && p.protocol.is_rdma() == is_rdma);
        all.all(|portal| portal.is_wild)
    }

    /// Logs portals that were added or removed since the previous expansion.
    pub(super) fn log_since(&self, before: &Self) {
        let wild = |expansion: &Self| {
            let all = expansion.targets.iter().flatten();
            let mut all: Vec<_> = all
                .filter(|portal| portal.is_wild)
                .map(|portal| (portal.at, portal.protocol))
                .collect();
            // If a portal is shared by multiple targets, only log it once.
            all.sort_by_key(|(at, protocol)| (*at, protocol.to_string()));
            all.dedup();
            all
        };
        let (old, new) = (wild(before), wild(self));
        for (at, protocol) in new.iter().filter(|portal| !old.contains(portal)) {
            tracing::info!(%protocol, listen = %at, "added an address of a wildcard portal");
        }
        for (at, protocol) in old.iter().filter(|portal| !new.contains(portal)) {
            tracing::info!(%protocol, listen = %at, "removed an address of a wildcard portal");
        }
    }
}

fn is_literal(listen: &Listen) -> bool {
    listen.at().is_some()
}

fn is_interface(listen: &Listen) -> bool {
    matches!(listen, Listen::Wildcard(wildcard, _) if wildcard.is_interface())
}

fn is_any(listen: &Listen) -> bool {
    !is_literal(listen) && !is_interface(listen)
}

/// Returns the addresses of a target that are only included via `0.0.0.0` or `[::]`.
pub(super) fn of_any_only(listens: &[PortalAt]) -> impl Iterator<Item = SocketAddr> + '_ {
    let is_named = |at: SocketAddr| listens.iter().any(|p| p.at == at && !p.is_any);
    let all = listens.iter().filter(move |portal| !is_named(portal.at));
    all.map(|portal| portal.at)
}

/// Returns the reason if a wildcard is not fully available. It includes `there` addresses, and
/// `found` of them can be used by its protocol.
fn lack(wildcard: &Wildcard, there: usize, found: usize) -> Option<String> {
    match (found, wildcard) {
        (0, _) if there > 0 => Some(match there {
            1 => "no RDMA device has its address".to_owned(),
            n => format!("no RDMA device has one of its {n} addresses"),
        }),
        (0, Wildcard::Interface(name)) => Some(format!(
            "{name} is down, has no address, or is not an interface of this host"
        )),
        (0, _) => Some("no such address on this host".to_owned()),
        (n, _) if n > MAX_ADDRESSES => Some(format!(
            "it includes {n} addresses, but only {MAX_ADDRESSES} can be served"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, address: &str) -> Interface {
        Interface {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            mtu: None,
        }
    }

    fn host() -> Vec<Interface> {
        vec![
            interface("lo", "127.0.0.1"),
            interface("lo", "::1"),
            interface("eth0", "192.0.2.1"),
            interface("eth0", "2001:db8::1"),
            interface("eth1", "198.51.100.1"),
        ]
    }

    fn targets(portals: &[&str]) -> Vec<Target> {
        let target = |(n, portals): (usize, &&str)| {
            format!(
                "{{ name: t{n}, iqn: \"iqn.2026-01.a:t{n}\", portals: [{portals}], access: open }}"
            )
        };
        let targets: Vec<_> = portals.iter().enumerate().map(target).collect();
        let text = format!("targets: [{}]", targets.join(", "));
        Config::parse(&text, "test.yaml").unwrap().targets
    }

    fn expand(portals: &[&str], host: Vec<Interface>) -> Expansion {
        let mut addresses = Addresses::default();
        addresses.observe(host, Instant::now());
        Expansion::new(
            &targets(portals),
            &addresses,
            &|_| true,
            &Expansion::default(),
        )
    }

    /// Returns the portals of a target, with their index in the configuration.
    fn at(expansion: &Expansion, target: usize) -> Vec<String> {
        let all = expansion.targets[target].iter();
        all.map(|p| format!("{} {} {}", p.portal, p.protocol, p.at))
            .collect()
    }

    #[test]
    fn wildcard_expands_to_all_addresses() {
        let text = "{ protocol: iscsi, listen: 0.0.0.0 }, { protocol: iser, listen: \"eth0:9\" }, \
                    { protocol: srp, listen: \"[::]\" }";
        let expansion = expand(&[text], host());
        assert_eq!(
            at(&expansion, 0),
            [
                "0 iscsi 127.0.0.1:3260",
                "0 iscsi 192.0.2.1:3260",
                "0 iscsi 198.51.100.1:3260",
                "1 iser 192.0.2.1:9",
                "1 iser [2001:db8::1]:9",
                "2 srp [::1]:5555",
                "2 srp [2001:db8::1]:5555",
            ]
        );
        assert_eq!(expansion.lacking, []);
        let all = expand(&["{ protocol: iscsi, listen: \":7\" }"], host());
        assert_eq!(at(&all, 0).len(), 5);
    }

    #[test]
    fn most_specific_portal_wins() {
        let text = "{ protocol: iscsi, listen: \":3260\" }, { protocol: iscsi, listen: eth0 }, \
                    { protocol: iscsi, listen: 192.0.2.1, redirect: { to: \"192.0.2.9\" } }";
        let expansion = expand(&[text], host());
        assert_eq!(
            at(&expansion, 0),
            [
                "0 iscsi 127.0.0.1:3260",
                "0 iscsi 198.51.100.1:3260",
                "0 iscsi [::1]:3260",
                "1 iscsi [2001:db8::1]:3260",
                "2 iscsi 192.0.2.1:3260",
            ]
        );
        let literal = "192.0.2.1:3260".parse().unwrap();
        let any: Vec<_> = of_any_only(&expansion.targets[0])
            .map(|at| at.to_string())
            .collect();
        assert_eq!(any, ["127.0.0.1:3260", "198.51.100.1:3260", "[::1]:3260"]);
        assert!(!expansion.is_wild(literal, false));
        assert!(expansion.is_wild("127.0.0.1:3260".parse().unwrap(), false));
    }

    #[test]
    fn wildcard_problems_are_reported() {
        let iser = "{ protocol: iser, listen: \"eth0:5555\" }";
        let srp = "{ protocol: srp, listen: 192.0.2.1 }, { protocol: iscsi, listen: eth9 }";
        let expansion = expand(&[iser, srp], host());
        assert_eq!(at(&expansion, 0), ["0 iser [2001:db8::1]:5555"]);
        let lacking: Vec<_> = expansion
            .lacking
            .iter()
            .map(|(protocol, listen, why)| format!("{protocol} {listen}: {why}"))
            .collect();
        assert_eq!(
            lacking,
            [
                "iser eth0:5555: 192.0.2.1:5555 is already a portal for a different RDMA protocol",
                "iscsi eth9:3260: eth9 is down, has no address, or is not an interface of this host",
            ]
        );
        let many = (0..80).map(|n| interface("eth0", &format!("192.0.2.{n}")));
        let expansion = expand(&["{ protocol: iscsi, listen: eth0 }"], many.collect());
        assert_eq!(at(&expansion, 0).len(), MAX_ADDRESSES);
        assert_eq!(expansion.lacking.len(), 1);
    }

    #[test]
    fn new_address_does_not_replace_existing() {
        let targets = targets(&["{ protocol: iscsi, listen: eth0 }"]);
        let mut addresses = Addresses::default();
        let served = (0..MAX_ADDRESSES).map(|n| interface("eth0", &format!("192.0.2.{n}")));
        addresses.observe(served.collect(), Instant::now());
        let has_device = |_: IpAddr| true;
        let none = Expansion::default();
        let before = Expansion::new(&targets, &addresses, &has_device, &none);
        addresses.observe(vec![interface("eth0", "10.0.0.1")], Instant::now());
        let after = Expansion::new(&targets, &addresses, &has_device, &before);
        assert_eq!(after.targets, before.targets);
        assert_eq!(after.lacking.len(), 1);
    }

    #[test]
    fn protocols_do_not_share_rdma_cm_port() {
        let moving = vec![
            interface("eth0", "192.0.2.1"),
            interface("eth1", "192.0.2.1"),
            interface("eth1", "192.0.2.2"),
        ];
        let (srp, iser) = (
            "{ protocol: srp, listen: \"eth0:9\" }",
            "{ protocol: iser, listen: \"eth1:9\" }",
        );
        let expansion = expand(&[srp, iser], moving);
        assert_eq!(at(&expansion, 0), ["0 srp 192.0.2.1:9"]);
        assert_eq!(at(&expansion, 1), ["0 iser 192.0.2.2:9"]);
        let lacking = &expansion.lacking[0];
        assert_eq!((lacking.0, expansion.lacking.len()), (Protocol::Iser, 1));
    }

    #[test]
    fn only_rdma_protocol_lacks_device() {
        let targets =
            targets(&["{ protocol: iscsi, listen: eth0 }, { protocol: iser, listen: eth0 }"]);
        let mut addresses = Addresses::default();
        addresses.observe(host(), Instant::now());
        let expansion = Expansion::new(&targets, &addresses, &|_| false, &Expansion::default());
        let [(protocol, _, why)] = &expansion.lacking[..] else {
            panic!("{:?}", expansion.lacking);
        };
        assert_eq!(*protocol, Protocol::Iser);
        assert_eq!(why, "no RDMA device has one of its 2 addresses");
    }

    #[test]
    fn removed_address_is_kept_for_grace() {
        let targets = targets(&["{ protocol: iscsi, listen: eth0 }"]);
        let start = Instant::now();
        let mut addresses = Addresses::default();
        let mut seen = |at: u64, there: &[&str]| {
            let there = there.iter().map(|ip| interface("eth0", ip)).collect();
            addresses.observe(there, start + Duration::from_secs(at));
            at_of(&Expansion::new(
                &targets,
                &addresses,
                &|_| true,
                &Expansion::default(),
            ))
        };
        assert_eq!(seen(0, &["192.0.2.1"]), ["192.0.2.1:3260"]);
        assert_eq!(seen(10, &[]), ["192.0.2.1:3260"]);
        let both = ["192.0.2.1:3260", "192.0.2.2:3260"];
        assert_eq!(seen(14, &["192.0.2.2"]), both);
        assert_eq!(seen(15, &["192.0.2.2"]), ["192.0.2.2:3260"]);
        assert_eq!(seen(16, &["192.0.2.1", "192.0.2.2"]), both);
    }

    fn at_of(expansion: &Expansion) -> Vec<String> {
        let all = expansion.targets[0].iter();
        all.map(|portal| portal.at.to_string()).collect()
    }
}
