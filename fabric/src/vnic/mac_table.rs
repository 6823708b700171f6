//! The tables by which a port finds the LID of a MAC address.
//!
//! A [`MacTable`] is what the manager has set. [`Learned`] addresses are those that frames came from,
//! as a switch learns them: hosts behind a bridge at another port, which the manager does not know.
//! They are forgotten when they have been silent for [`AGING`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::wire::attr::{MAX_MAC_ENTRIES, MAX_SMAC_ENTRIES, MacTableEntry};
use super::wire::{Lid, Mac};

/// Table that the manager sets.
#[derive(Clone, Debug, Default)]
pub struct MacTable {
    /// By their index, which only says what a request changes.
    entries: BTreeMap<u16, MacTableEntry>,
    dlids: FxHashMap<Mac, Lid>,
    /// Addresses that the port may send from; all where there are none.
    sources: FxHashSet<Mac>,
    digest: u32,
}

impl MacTable {
    /// Returns whether a range of entries is within a table.
    #[must_use]
    pub fn has_range(offset: u16, count: u16) -> bool {
        u32::from(offset) + u32::from(count) <= u32::from(MAX_MAC_ENTRIES)
    }

    /// Sets the entries from `offset` on, and the digest of the whole table. An entry of zeros
    /// empties its place. Returns whether it did: nothing changes where the range is not within a
    /// table, or there would be more source addresses than a table has.
    pub fn set(&mut self, offset: u16, entries: &[MacTableEntry], digest: u32) -> bool {
        let Ok(count) = u16::try_from(entries.len()) else {
            return false;
        };
        if !Self::has_range(offset, count) {
            return false;
        }
        let mut changed = self.entries.clone();
        for (index, entry) in (offset..).zip(entries) {
            match entry.mac_addr.is_zero() {
                true => changed.remove(&index),
                false => changed.insert(index, *entry),
            };
        }
        let (sources, dests): (Vec<&MacTableEntry>, Vec<&MacTableEntry>) =
            changed.values().partition(|entry| entry.is_source());
        if sources.len() > usize::from(MAX_SMAC_ENTRIES) {
            return false;
        }
        self.sources = sources.iter().map(|entry| entry.mac_addr).collect();
        // The lowest index counts where an address has several.
        let dests = dests.iter().rev();
        self.dlids = dests.map(|entry| (entry.mac_addr, entry.dlid())).collect();
        self.entries = changed;
        self.digest = digest;
        true
    }

    /// The entry of an index; one of zeros where it is empty.
    #[must_use]
    pub fn entry(&self, index: u16) -> MacTableEntry {
        self.entries.get(&index).copied().unwrap_or_default()
    }

    /// LID of an address.
    #[must_use]
    pub fn dlid(&self, mac: Mac) -> Option<Lid> {
        self.dlids
            .get(&mac)
            .copied()
            .filter(|lid| *lid != Lid::NONE)
    }

    /// Returns whether the port may send from an address.
    #[must_use]
    pub fn has_source(&self, mac: Mac) -> bool {
        self.sources.is_empty() || self.sources.contains(&mac)
    }

    /// Digest that came with the last change; 0 at first.
    #[must_use]
    pub fn digest(&self) -> u32 {
        self.digest
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Time after which an address that was learned is forgotten, unless a frame has come from it
/// (IEEE 802.1D, the default).
pub const AGING: Duration = Duration::from_secs(300);
/// Most addresses that are learned.
pub const MAX_LEARNED: usize = 1024;
/// Most addresses that are learned of one port, so that it leaves room for others.
pub const MAX_LEARNED_OF_PORT: usize = 256;

/// Addresses that frames came from.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    macs: FxHashMap<Mac, (Lid, Instant)>,
    of_port: FxHashMap<Lid, usize>,
    looked: Option<Instant>,
}

impl Learned {
    /// Notes that a frame came from an address at a port. One that was at another port has moved.
    pub fn note(&mut self, mac: Mac, lid: Lid, now: Instant) {
        if mac.is_multicast() || mac.is_zero() {
            return;
        }
        if let Some((at, seen)) = self.macs.get_mut(&mac)
            && *at == lid
        {
            *seen = now;
            return;
        }
        let of_port = self.of_port.get(&lid).copied().unwrap_or(0);
        if self.macs.len() >= MAX_LEARNED || of_port >= MAX_LEARNED_OF_PORT {
            // Looking through all costs time that a flood of addresses must not take for each frame.
            if self
                .looked
                .is_some_and(|looked| now < looked + Duration::from_secs(1))
            {
                return;
            }
            self.looked = Some(now);
            self.retain(|_, seen| now < seen + AGING);
            let of_port = self.of_port.get(&lid).copied().unwrap_or(0);
            if self.macs.len() >= MAX_LEARNED || of_port >= MAX_LEARNED_OF_PORT {
                return;
            }
        }
        if let Some((old, _)) = self.macs.insert(mac, (lid, now)) {
            self.forget_one(old);
        }
        *self.of_port.entry(lid).or_default() += 1;
    }

    fn forget_one(&mut self, lid: Lid) {
        if let Some(count) = self.of_port.get_mut(&lid) {
            *count -= 1;
            if *count == 0 {
                self.of_port.remove(&lid);
            }
        }
    }

    /// LID of an address, if it is not too old.
    #[must_use]
    pub fn dlid(&self, mac: Mac, now: Instant) -> Option<Lid> {
        let (lid, seen) = self.macs.get(&mac)?;
        (now < *seen + AGING).then_some(*lid)
    }

    /// Forgets addresses at ports that are not `known`.
    pub fn retain_ports(&mut self, known: impl Fn(Lid) -> bool) {
        self.retain(|lid, _| known(lid));
    }

    fn retain(&mut self, keep: impl Fn(Lid, Instant) -> bool) {
        self.macs.retain(|_, (lid, seen)| keep(*lid, *seen));
        self.of_port.clear();
        for (lid, _) in self.macs.values() {
            *self.of_port.entry(*lid).or_default() += 1;
        }
    }

    /// Number of addresses.
    #[must_use]
    pub fn len(&self) -> usize {
        self.macs.len()
    }

    /// Returns whether there are no addresses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.macs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        Mac([2, 1, a, b, c, d])
    }

    #[test]
    fn entries_are_set_and_emptied_by_index() {
        let mut table = MacTable::default();
        assert_eq!(table.digest(), 0);
        let entry = |n, lid| MacTableEntry::new(mac(n), Lid(lid));
        assert!(table.set(5, &[entry(1, 10), entry(2, 20)], 77));
        assert_eq!(table.dlid(mac(2)), Some(Lid(20)));
        assert_eq!(table.entry(6), entry(2, 20));
        // The address moves; the entry before it is emptied.
        assert!(table.set(5, &[MacTableEntry::default(), entry(2, 30)], 78));
        assert_eq!(table.dlid(mac(1)), None);
        assert_eq!(table.dlid(mac(2)), Some(Lid(30)));
        assert_eq!((table.len(), table.digest()), (1, 78));
        // The lowest index counts.
        assert!(table.set(0, &[entry(2, 40)], 79));
        assert_eq!(table.dlid(mac(2)), Some(Lid(40)));
    }

    #[test]
    fn a_range_beyond_the_table_changes_nothing() {
        let mut table = MacTable::default();
        let entry = MacTableEntry::new(mac(1), Lid(1));
        assert!(table.set(2047, &[entry], 1));
        assert!(!table.set(2047, &[entry, entry], 2));
        assert!(!table.set(u16::MAX, &[entry], 3));
        assert_eq!((table.len(), table.digest()), (1, 1));
    }

    #[test]
    fn source_entries_are_no_destinations_and_filter() {
        let mut table = MacTable::default();
        assert!(table.has_source(mac(9)));
        let source = |n| MacTableEntry {
            dlid_sd: MacTableEntry::SOURCE_MAC.into(),
            ..MacTableEntry::new(mac(n), Lid(0))
        };
        assert!(table.set(0, &[source(1), MacTableEntry::new(mac(2), Lid(2))], 1));
        assert!(table.has_source(mac(1)) && !table.has_source(mac(9)));
        assert_eq!(table.dlid(mac(1)), None);
        let many: Vec<_> = (0..257).map(source).collect();
        assert!(!table.set(10, &many, 2), "more than the limit");
        assert!(table.set(10, &many[..255], 2));
    }

    #[test]
    fn addresses_are_learned_move_and_age() {
        let start = Instant::now();
        let mut learned = Learned::default();
        learned.note(mac(1), Lid(1), start);
        learned.note(mac(2), Lid(2), start);
        learned.note(Mac([1, 0, 0, 0, 0, 1]), Lid(3), start);
        learned.note(Mac::default(), Lid(3), start);
        assert_eq!(learned.len(), 2, "groups and zeros are no sources");
        learned.note(mac(1), Lid(2), start);
        assert_eq!(learned.dlid(mac(1), start), Some(Lid(2)));
        let later = start + Duration::from_secs(200);
        learned.note(mac(1), Lid(2), later);
        let end = start + AGING;
        assert_eq!(learned.dlid(mac(1), end), Some(Lid(2)));
        assert_eq!(learned.dlid(mac(2), end), None, "it has aged");
        learned.retain_ports(|lid| lid != Lid(2));
        assert!(learned.is_empty());
    }

    #[test]
    fn a_flood_of_addresses_is_bounded_and_leaves_room() {
        let start = Instant::now();
        let mut learned = Learned::default();
        for n in 0..10_000 {
            learned.note(mac(n), Lid(1), start);
        }
        assert_eq!(learned.len(), MAX_LEARNED_OF_PORT);
        learned.note(mac(99_999), Lid(2), start);
        assert_eq!(learned.dlid(mac(99_999), start), Some(Lid(2)));
        for n in 0..10_000 {
            learned.note(mac(20_000 + n), Lid(3 + n % 7), start);
        }
        assert_eq!(learned.len(), MAX_LEARNED);
        // Old ones make room.
        let later = start + AGING;
        learned.note(mac(5), Lid(50), later);
        assert_eq!(
            (learned.len(), learned.dlid(mac(5), later)),
            (1, Some(Lid(50)))
        );
    }
}
