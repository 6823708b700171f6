//! RELATIVE TARGET PORT IDENTIFIERs, which are portal group tags for iSCSI: the numbers of a
//! target's ports.
//!
//! Initiators identify ports by them, so a port keeps its number while it is configured:
//! independent of its place in the file, and over restarts, for which a [`PortKeeper`] saves the
//! numbers. That of the iSCSI portal group is a part of the port's name (RFC 7143 4.4.2), to which
//! persistent reservations are tied: it stays for the day on which the target is configured again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::config::{Listen, Portal, Target};

/// A port of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Port {
    /// A portal of SRP.
    Srp(SocketAddr),
    /// A portal of SRP with a wildcard: one port at all of its addresses.
    SrpWildcard(Listen),
    /// All portals of iSCSI and iSER, whose portal group has the port's number.
    Iscsi,
}

/// The numbers of a target's ports.
pub type PortIds = BTreeMap<Port, u16>;

/// The numbers of ports, by the names of targets.
pub type AllPortIds = BTreeMap<String, PortIds>;

/// A port and its number, written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenPort {
    target: String,
    port: Port,
    id: u16,
}

/// Keeps the numbers of ports over restarts.
pub trait PortKeeper: Debug + Send + Sync {
    /// The numbers that were saved last.
    ///
    /// # Errors
    /// They cannot be read, or are damaged.
    fn load(&self) -> io::Result<Vec<WrittenPort>>;

    /// Saves numbers in the place of those before, durably.
    ///
    /// # Errors
    /// They cannot be saved; the earlier ones are still saved.
    fn save(&self, ports: &[WrittenPort]) -> io::Result<()>;
}

/// Returns numbers in the form in which they are saved.
#[must_use]
pub fn write(all: &AllPortIds) -> Vec<WrittenPort> {
    let written = |(target, ids): (&String, &PortIds)| {
        let target = target.clone();
        let one = move |(port, id): (&Port, &u16)| WrittenPort {
            target: target.clone(),
            port: *port,
            id: *id,
        };
        ids.iter().map(one).collect::<Vec<_>>()
    };
    all.iter().flat_map(written).collect()
}

/// The numbers that were written down.
#[must_use]
pub fn read(written: Vec<WrittenPort>) -> AllPortIds {
    let mut all = AllPortIds::new();
    for WrittenPort { target, port, id } in written {
        all.entry(target).or_default().insert(port, id);
    }
    all
}

/// The numbers to save while a change is made: whether it was made or not, a restart finds the
/// numbers that it needs. Two ports may have one number there, of which no configuration has both.
pub(super) fn during(old: &AllPortIds, new: &AllPortIds) -> AllPortIds {
    let mut all = old.clone();
    for (target, ids) in new {
        all.entry(target.clone()).or_default().extend(ids);
    }
    all
}

/// Whether all of these numbers are kept, perhaps with others.
pub(super) fn has_all(kept: &AllPortIds, all: &AllPortIds) -> bool {
    let is_kept = |(target, ids): (&String, &PortIds)| {
        let kept = kept.get(target);
        ids.iter()
            .all(|(port, id)| kept.is_some_and(|kept| kept.get(port) == Some(id)))
    };
    all.iter().all(is_kept)
}

/// Targets that are not configured, of which a number is kept at most: what is saved is bounded.
const MOST_GONE: usize = 4096;

/// Gives every port of a target a number: the one that it had, else its place in the file where
/// that is free. Those that are not configured any longer lose theirs, but for iSCSI's.
pub(super) fn number(known: &mut PortIds, target: &Target) {
    let ports = || target.portals.iter().map(port_of);
    let mut taken = BTreeSet::new();
    // First those in names, should two ports have the number of one.
    taken.extend(
        known
            .iter()
            .filter(|(port, _)| is_in_names(port))
            .map(|(_, id)| *id),
    );
    let is_configured = |port: &Port| ports().any(|p| p == *port);
    known.retain(|port, id| is_in_names(port) || (is_configured(port) && taken.insert(*id)));
    for (place, port) in ports().enumerate() {
        if known.contains_key(&port) {
            continue;
        }
        let mut ids = std::iter::once(place as u16 + 1).chain(1..=u16::MAX);
        let id = ids.find(|id| !taken.contains(id));
        let id = id.expect("a target has fewer portals");
        taken.insert(id);
        known.insert(port, id);
    }
}

/// Forgets targets that are not configured any longer, but for the numbers that are in names.
pub(super) fn forget_others(known: &mut AllPortIds, is_configured: impl Fn(&str) -> bool) {
    known.retain(|name, ids| {
        let is_there = is_configured(name);
        ids.retain(|port, _| is_there || is_in_names(port));
        !ids.is_empty()
    });
    let gone = known.keys().filter(|name| !is_configured(name));
    let gone: Vec<_> = gone.skip(MOST_GONE).cloned().collect();
    known.retain(|name, _| gone.binary_search(name).is_err());
}

/// Whether the number of a port is a part of its name.
fn is_in_names(port: &Port) -> bool {
    *port == Port::Iscsi
}

/// The port that a portal belongs to.
pub(super) fn port_of(portal: &Portal) -> Port {
    if portal.protocol.is_iscsi() {
        return Port::Iscsi;
    }
    match portal.listen {
        Listen::At(at) => Port::Srp(at),
        wildcard => Port::SrpWildcard(wildcard),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn target(portals: &[u8]) -> Target {
        let portals = portals.iter().map(|host| match host {
            0 => "{ protocol: iscsi, listen: 10.0.0.1 }".to_owned(),
            host => format!("{{ protocol: srp, listen: 10.0.0.{host} }}"),
        });
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\n\
             targets: [{{ name: t, iqn: iqn.2026-01.a:t, portals: [{}], luns: {{ 0: a }}, \
             access: open }}]\n",
            portals.collect::<Vec<_>>().join(", ")
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        config.targets[0].clone()
    }

    /// The numbers that these portals get, in this order, after others.
    fn numbers(known: &PortIds, portals: &[u8]) -> (PortIds, Vec<u16>) {
        let (mut known, target) = (known.clone(), target(portals));
        number(&mut known, &target);
        let of = |portal: &Portal| known[&port_of(portal)];
        let all = target.portals.iter().map(of).collect();
        (known, all)
    }

    #[test]
    fn a_port_keeps_its_number_whatever_comes_before_it() {
        let (first, ids) = numbers(&PortIds::new(), &[2, 0, 3]);
        assert_eq!(ids, [1, 2, 3]);
        let (_, ids) = numbers(&first, &[3, 4, 2, 0]);
        assert_eq!(ids, [3, 4, 1, 2], "4 is not free for 3's place");
        let (fewer, ids) = numbers(&first, &[3]);
        assert_eq!(ids, [3]);
        let (_, ids) = numbers(&fewer, &[2, 3]);
        assert_eq!(ids, [1, 3]);
    }

    #[test]
    fn of_two_ports_with_one_number_that_in_names_keeps_it() {
        let srp = Port::Srp("10.0.0.2:5555".parse().unwrap());
        let known = PortIds::from([(srp, 1), (Port::Iscsi, 1)]);
        assert_eq!(numbers(&known, &[2, 0]).1, [2, 1]);
    }

    #[test]
    fn numbers_of_targets_that_are_gone_are_bounded() {
        let one = |at| (format!("t{at:05}"), PortIds::from([(Port::Iscsi, 1)]));
        let mut all: AllPortIds = (0..2 * MOST_GONE).map(one).collect();
        let is_configured = |name: &str| name >= "t08000";
        forget_others(&mut all, is_configured);
        let there = all.keys().filter(|name| is_configured(name)).count();
        assert_eq!((there, all.len() - there), (192, MOST_GONE));
    }

    #[test]
    fn the_portal_group_of_iscsi_keeps_its_number_while_it_is_away() {
        let (first, ids) = numbers(&PortIds::new(), &[2, 0]);
        assert_eq!(ids, [1, 2]);
        let (without, ids) = numbers(&first, &[2, 3]);
        assert_eq!(ids, [1, 3]);
        let mut all = AllPortIds::from([("t".to_owned(), without), ("u".to_owned(), first)]);
        forget_others(&mut all, |_| false);
        assert_eq!(all["t"], PortIds::from([(Port::Iscsi, 2)]));
        assert_eq!(numbers(&all["t"], &[0]).1, [2]);
        let srp = PortIds::from([(Port::Srp("10.0.0.2:5555".parse().unwrap()), 1)]);
        let mut all = AllPortIds::from([("t".to_owned(), srp)]);
        forget_others(&mut all, |_| false);
        assert!(all.is_empty(), "{all:?}");
    }

    #[test]
    fn what_is_saved_during_a_change_serves_before_and_after() {
        let with = |ids| AllPortIds::from([("t".to_owned(), ids)]);
        let (old, _) = numbers(&PortIds::new(), &[2, 3]);
        let (new, after) = numbers(&old, &[4, 3]);
        assert_eq!(after, [1, 2], "the number of what went");
        let saved = read(write(&during(&with(old), &with(new))));
        assert_eq!(numbers(&saved["t"], &[3, 2]).1, [2, 1]);
        assert_eq!(numbers(&saved["t"], &[3, 4]).1, [2, 1]);
        // Both come back: one of them has the number.
        let (_, mut both) = numbers(&saved["t"], &[2, 3, 4]);
        both.sort_unstable();
        assert_eq!(both, [1, 2, 3]);
    }

    /// Keeps numbers in memory, as long as it has room.
    #[derive(Debug, Default)]
    struct Kept {
        ports: std::sync::Mutex<Vec<WrittenPort>>,
        is_full: std::sync::atomic::AtomicBool,
    }

    impl PortKeeper for Kept {
        fn load(&self) -> io::Result<Vec<WrittenPort>> {
            Ok(self.ports.lock().unwrap().clone())
        }

        fn save(&self, ports: &[WrittenPort]) -> io::Result<()> {
            if self.is_full.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *self.ports.lock().unwrap() = ports.to_vec();
            Ok(())
        }
    }

    /// The numbers of a target's SRP ports, by their hosts, in a process that begins with what is
    /// kept.
    fn start(keeper: &std::sync::Arc<Kept>, portals: &str) -> Vec<(u8, u16)> {
        try_to_start(keeper, portals).unwrap()
    }

    fn try_to_start(
        keeper: &std::sync::Arc<Kept>,
        portals: &str,
    ) -> Result<Vec<(u8, u16)>, super::super::ServerError> {
        use super::super::handover::ServerState;
        use super::super::{Keepers, build::Builder};
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\n\
             targets: [{{ name: t, portals: [{portals}], luns: {{ 0: a }}, access: open }}]\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        let keepers = Keepers {
            ports: Some(keeper.clone()),
            ..Keepers::default()
        };
        let mut builder = Builder::after(&ServerState::default(), keepers).unwrap();
        let catalog = builder
            .catalog(&config, &mut crate::backend::OpenedStores::default())
            .unwrap();
        builder.save_ports(builder.ports())?;
        let host = |at: SocketAddr| match at.ip() {
            std::net::IpAddr::V4(ip) => ip.octets()[3],
            std::net::IpAddr::V6(_) => unreachable!(),
        };
        let portals = catalog.targets[0].portals.iter();
        Ok(portals.map(|p| (host(p.listen), p.relative_id)).collect())
    }

    #[test]
    fn numbers_that_are_kept_already_are_served_where_nothing_can_be_saved() {
        let keeper: std::sync::Arc<Kept> = std::sync::Arc::default();
        let (one, two, three) = (
            "{ protocol: srp, listen: 10.0.0.1 }",
            "{ protocol: srp, listen: 10.0.0.2 }",
            "{ protocol: srp, listen: 10.0.0.3 }",
        );
        start(&keeper, &format!("{one}, {two}"));
        keeper
            .is_full
            .store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(start(&keeper, two), [(2, 2)]);
        let new = try_to_start(&keeper, &format!("{two}, {three}"));
        assert!(new.is_err(), "a restart would not find the number");
    }

    #[test]
    fn a_restart_with_another_order_changes_no_number() {
        let keeper = std::sync::Arc::default();
        let (one, two, three) = (
            "{ protocol: srp, listen: 10.0.0.1 }",
            "{ protocol: srp, listen: 10.0.0.2 }",
            "{ protocol: srp, listen: 10.0.0.3 }",
        );
        let first = start(&keeper, &format!("{one}, {two}"));
        assert_eq!(first, [(1, 1), (2, 2)]);
        let second = start(&keeper, &format!("{three}, {two}, {one}"));
        assert_eq!(second, [(3, 3), (2, 2), (1, 1)]);
        let third = start(&keeper, &format!("{three}, {two}"));
        assert_eq!(third, [(3, 3), (2, 2)]);
    }
}
