//! RELATIVE TARGET PORT IDENTIFIERs, which are also the portal group tags for iSCSI: the numbers of
//! a target's ports.
//!
//! Initiators use these to identify ports, so a port keeps its number while it is configured. The
//! number does not depend on the position in the file, and is stored by a [`PortKeeper`] so that it
//! survives a restart. The number of the iSCSI portal group is part of the port name (RFC 7143
//! 4.4.2), which is used by persistent reservations, so we keep it in case a removed target is
//! added again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::config::{Listen, Portal, Target};

/// A port of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Port {
    /// An SRP portal.
    Srp(SocketAddr),
    /// An SRP portal with a wildcard, which is the same port for all of its addresses.
    SrpWildcard(Listen),
    /// All iSCSI and iSER portals. The number is used for their portal group.
    Iscsi,
}

/// Port numbers of a target.
pub type PortIds = BTreeMap<Port, u16>;

/// Port numbers by target name.
pub type AllPortIds = BTreeMap<String, PortIds>;

/// A serialized port with its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenPort {
    target: String,
    port: Port,
    id: u16,
}

/// Stores port numbers so that they survive a restart.
pub trait PortKeeper: Debug + Send + Sync {
    /// Loads the stored numbers.
    ///
    /// # Errors
    /// If they cannot be read or are invalid.
    fn load(&self) -> io::Result<Vec<WrittenPort>>;

    /// Stores numbers persistently, replacing the old numbers.
    ///
    /// # Errors
    /// If they cannot be written. The old numbers are kept in this case.
    fn save(&self, ports: &[WrittenPort]) -> io::Result<()>;
}

/// Converts numbers to their stored format.
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

/// Converts numbers from their stored format.
#[must_use]
pub fn read(written: Vec<WrittenPort>) -> AllPortIds {
    let mut all = AllPortIds::new();
    for WrittenPort { target, port, id } in written {
        all.entry(target).or_default().insert(port, id);
    }
    all
}

/// Returns the numbers to store while a change is in progress. After a restart, they are valid
/// whether or not the change was applied. Two ports may have the same number, but only if they are
/// never configured at the same time.
pub(super) fn during(old: &AllPortIds, new: &AllPortIds) -> AllPortIds {
    let mut all = old.clone();
    for (target, ids) in new {
        all.entry(target.clone()).or_default().extend(ids);
    }
    all
}

/// Returns whether all of these numbers are stored.
pub(super) fn has_all(kept: &AllPortIds, all: &AllPortIds) -> bool {
    let is_kept = |(target, ids): (&String, &PortIds)| {
        let kept = kept.get(target);
        ids.iter()
            .all(|(port, id)| kept.is_some_and(|kept| kept.get(port) == Some(id)))
    };
    all.iter().all(is_kept)
}

/// Maximum number of removed targets with stored numbers, to bound the size of the stored data.
const MOST_GONE: usize = 4096;

/// Assigns a number to each port of a target: its previous number, or else its position in the file
/// if that number is free. Removed ports lose their numbers, except for iSCSI.
pub(super) fn number(known: &mut PortIds, target: &Target) {
    let ports = || target.portals.iter().map(port_of);
    let mut taken = BTreeSet::new();
    // If two ports have the same number, the number in a port name has priority.
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

/// Drops removed targets, except for numbers in port names.
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

/// Returns whether the number of a port is part of its name.
fn is_in_names(port: &Port) -> bool {
    *port == Port::Iscsi
}

/// Returns the port of a portal.
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

    /// Returns the numbers for these portals in order, using known numbers.
    fn numbers(known: &PortIds, portals: &[u8]) -> (PortIds, Vec<u16>) {
        let (mut known, target) = (known.clone(), target(portals));
        number(&mut known, &target);
        let of = |portal: &Portal| known[&port_of(portal)];
        let all = target.portals.iter().map(of).collect();
        (known, all)
    }

    #[test]
    fn port_number_does_not_depend_on_order() {
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
    fn duplicate_number_is_kept_by_iscsi() {
        let srp = Port::Srp("10.0.0.2:5555".parse().unwrap());
        let known = PortIds::from([(srp, 1), (Port::Iscsi, 1)]);
        assert_eq!(numbers(&known, &[2, 0]).1, [2, 1]);
    }

    #[test]
    fn removed_targets_with_numbers_are_limited() {
        let one = |at| (format!("t{at:05}"), PortIds::from([(Port::Iscsi, 1)]));
        let mut all: AllPortIds = (0..2 * MOST_GONE).map(one).collect();
        let is_configured = |name: &str| name >= "t08000";
        forget_others(&mut all, is_configured);
        let there = all.keys().filter(|name| is_configured(name)).count();
        assert_eq!((there, all.len() - there), (192, MOST_GONE));
    }

    #[test]
    fn removed_iscsi_group_keeps_its_number() {
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
    fn saved_numbers_are_valid_during_change() {
        let with = |ids| AllPortIds::from([("t".to_owned(), ids)]);
        let (old, _) = numbers(&PortIds::new(), &[2, 3]);
        let (new, after) = numbers(&old, &[4, 3]);
        assert_eq!(after, [1, 2], "the number of what went");
        let saved = read(write(&during(&with(old), &with(new))));
        assert_eq!(numbers(&saved["t"], &[3, 2]).1, [2, 1]);
        assert_eq!(numbers(&saved["t"], &[3, 4]).1, [2, 1]);
        // If both are added again, only one of them gets its number.
        let (_, mut both) = numbers(&saved["t"], &[2, 3, 4]);
        both.sort_unstable();
        assert_eq!(both, [1, 2, 3]);
    }

    /// Stores numbers in memory, unless it is full.
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

    /// Starts a builder with the stored numbers, and returns the numbers of SRP ports by host.
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
    fn known_numbers_work_without_saving() {
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
    fn restart_with_new_order_keeps_numbers() {
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
