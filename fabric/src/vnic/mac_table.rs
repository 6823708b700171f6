//! Tables that map MAC addresses to LIDs.
//!
//! A [`MacTable`] is configured by the manager. [`Learned`] addresses are learned from received
//! frames, as in a switch: they belong to hosts behind a bridge at another port, which the manager
//! does not know. They expire after [`AGING`] without a frame.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::wire::attr::{MAX_MAC_ENTRIES, MAX_SMAC_ENTRIES, MacTableEntry};
use super::wire::{Lid, Mac};

/// Table configured by the manager.
#[derive(Clone, Debug, Default)]
pub struct MacTable {
    /// Entries by index. The index only identifies the entry to update.
    entries: BTreeMap<u16, MacTableEntry>,
    dlids: FxHashMap<Mac, Lid>,
    /// Source addresses that the port may use; any address if empty.
    sources: FxHashSet<Mac>,
    digest: u32,
}

impl MacTable {
    /// Returns whether a range of entries fits into a table.
    #[must_use]
    pub fn has_range(offset: u16, count: u16) -> bool {
        u32::from(offset) + u32::from(count) <= u32::from(MAX_MAC_ENTRIES)
    }

    /// Updates the entries starting at `offset`, and the digest of the whole table. A zero entry
    /// clears its slot. Returns `false` and changes nothing if the range does not fit, or if the
    /// table would contain too many source addresses.
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
        // If an address has several entries, the lowest index takes precedence.
        let dests = dests.iter().rev();
        self.dlids = dests.map(|entry| (entry.mac_addr, entry.dlid())).collect();
        self.entries = changed;
        self.digest = digest;
        true
    }

    /// Returns the entry at an index, which is zero if the slot is empty.
    #[must_use]
    pub fn entry(&self, index: u16) -> MacTableEntry {
        self.entries.get(&index).copied().unwrap_or_default()
    }

    /// Returns the LID of an address.
    #[must_use]
    pub fn dlid(&self, mac: Mac) -> Option<Lid> {
        self.dlids
            .get(&mac)
            .copied()
            .filter(|lid| *lid != Lid::NONE)
    }

    /// Returns whether the port may use a source address.
    #[must_use]
    pub fn has_source(&self, mac: Mac) -> bool {
        self.sources.is_empty() || self.sources.contains(&mac)
    }

    /// Returns the digest of the last update; initially 0.
    #[must_use]
    pub fn digest(&self) -> u32 {
        self.digest
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Time after which a learned address expires unless another frame arrives from it (IEEE 802.1D
/// default).
pub const AGING: Duration = Duration::from_secs(300);
/// Maximum number of learned addresses.
pub const MAX_LEARNED: usize = 1024;
/// Maximum number of learned addresses per port, so that a port cannot exhaust the table.
pub const MAX_LEARNED_OF_PORT: usize = 256;

/// Addresses learned from received frames.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    macs: FxHashMap<Mac, (Lid, Instant)>,
    of_port: FxHashMap<Lid, usize>,
    looked: Option<Instant>,
}

impl Learned {
    /// Records the source address and port of a frame. An address known at another port has moved.
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
            // Sweeping the whole table is too expensive to do for every frame of an address flood.
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

    /// Returns the LID of an address that has not expired.
    #[must_use]
    pub fn dlid(&self, mac: Mac, now: Instant) -> Option<Lid> {
        let (lid, seen) = self.macs.get(&mac)?;
        (now < *seen + AGING).then_some(*lid)
    }

    /// Removes addresses at ports that are not `known`.
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

    /// Returns the number of addresses.
    #[must_use]
    pub fn len(&self) -> usize {
        self.macs.len()
    }

    /// Returns whether the table is empty.
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
        // The address moves; its previous entry is cleared.
        assert!(table.set(5, &[MacTableEntry::default(), entry(2, 30)], 78));
        assert_eq!(table.dlid(mac(1)), None);
        assert_eq!(table.dlid(mac(2)), Some(Lid(30)));
        assert_eq!((table.len(), table.digest()), (1, 78));
        // The lowest index takes precedence.
        assert!(table.set(0, &[entry(2, 40)], 79));
        assert_eq!(table.dlid(mac(2)), Some(Lid(40)));
    }

    #[test]
    fn out_of_range_update_is_ignored() {
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
    fn address_flood_is_bounded() {
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
        // Expired entries are evicted.
        let later = start + AGING;
        learned.note(mac(5), Lid(50), later);
        assert_eq!(
            (learned.len(), learned.dlid(mac(5), later)),
            (1, Some(Lid(50)))
        );
    }
}
