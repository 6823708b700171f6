//! Tables shared by all ports of a switch, and the rate at which they are rebuilt.

use std::collections::BTreeSet;
use std::time::Instant;

use zerocopy::IntoBytes;

use super::{EthernetManager, MIN_SPACING};
use crate::vnic::wire::attr::{MAX_MAC_ENTRIES, MacTableEntry, Path, digest};
use crate::vnic::wire::{Lid, Mac};

/// Tables shared by all ports of a switch.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    pub(super) entries: Vec<MacTableEntry>,
    pub(super) digest: u32,
    pub(super) paths: Vec<Path>,
    pub(super) paths_digest: u32,
}

impl EthernetManager {
    /// Rebuilds the tables after changes. The interval doubles with each consecutive rebuild.
    pub(super) fn rebuild_tables(&mut self, now: Instant) {
        let interval = self.config.interval;
        let is_calm = self
            .rebuild_at
            .is_none_or(|rebuild_at| rebuild_at + interval <= now);
        let before = self.digests();
        self.is_changed = false;
        self.make_tables();
        if is_calm {
            self.spacing = MIN_SPACING;
        } else if self.digests() != before {
            self.spacing = (self.spacing * 2).min(interval.max(MIN_SPACING));
        }
        self.rebuild_at = Some(now + self.spacing);
    }

    fn digests(&self) -> Vec<(u32, u32)> {
        let of = |tables: &Tables| (tables.digest, tables.paths_digest);
        self.tables.iter().map(of).collect()
    }

    /// Rebuilds the tables of all switches, in LID order.
    pub(super) fn make_tables(&mut self) {
        self.tables = (0..self.tables.len()).map(|n| self.make_table(n)).collect();
    }

    fn make_table(&self, vport: usize) -> Tables {
        let mut members: Vec<_> = self.members.iter().filter(|m| m.lid.is_some()).collect();
        members.sort_by_key(|member| member.lid);
        let before = self.tables[vport].entries.iter();
        let before: BTreeSet<_> = before.map(|e| (e.mac_addr, e.dlid())).collect();
        let mut tables = Tables::default();
        // Claims: rank, position in the table, address.
        let mut claims = Vec::new();
        for member in members {
            let lid = member.lid.unwrap_or(Lid::NONE);
            let port = member.ports.get(vport);
            let Some((port, end)) = port.and_then(|port| Some((port, port.end?))) else {
                continue;
            };
            tables.paths.push(Path {
                dlid: lid.0.into(),
                qpn: end.qpn,
                mtu: end.mtu,
                reserved: 0.into(),
                gid: member.address.gid.0,
            });
            claims.push((0, (lid, 0), Mac::of_lid(lid)));
            for (place, mac) in (1..).zip(&port.macs) {
                let rank = if before.contains(&(*mac, lid)) { 1 } else { 2 };
                claims.push((rank, (lid, place), *mac));
            }
        }
        // A contested address belongs to the member whose LID it encodes, or else to its current
        // owner, or else to the first member. This order also decides if the table is full.
        claims.sort_by_key(|(rank, place, _)| (*rank, *place));
        let mut seen = BTreeSet::new();
        claims.retain(|(_, (lid, _), mac)| {
            let is_one = !mac.is_zero() && !mac.is_multicast();
            let is_first = is_one && seen.insert(*mac);
            if is_one && !is_first {
                tracing::debug!(%mac, ?lid, "ignored an address of another member");
            }
            is_first
        });
        claims.truncate(MAX_MAC_ENTRIES.into());
        claims.sort_by_key(|(_, place, _)| *place);
        let entry = |(_, (lid, _), mac)| MacTableEntry::new(mac, lid);
        tables.entries = claims.into_iter().map(entry).collect();
        tables.digest = digest(tables.entries.as_bytes());
        tables.paths_digest = digest(tables.paths.as_bytes());
        tables
    }
}
