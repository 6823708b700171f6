//! The logical units available to an initiator, by LUN.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use riser_scsi::config::{BlockSize, Identity};
use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Unit;
use crate::qos::Limiter;
use crate::stats::LunStats;

/// Entry of a [`LunMap`].
#[derive(Clone, Debug)]
pub struct Mapping {
    /// Unit mapped to the LUN.
    pub unit: Arc<Unit>,
    /// Statistics for commands to this unit.
    pub stats: Arc<LunStats>,
    /// Writes are refused for this LUN, even if the unit is writable.
    pub read_only: bool,
}

/// Maximum number of former units kept from maps before the previous one.
const MAX_FORMER: usize = 64;

/// Maximum number of unmapped LUNs with a known unit.
const MAX_GONE: usize = 256;

/// A flag that is set while a LUN is mapped to a different unit than its initiator expects. It is
/// shared by all maps of a session with the same unit at this LUN.
///
/// A command may use an older map, and identify another unit after this flag was initialized. In
/// this case, the flag is set as well.
#[derive(Clone, Debug, Default)]
pub struct StaleLun(Arc<Staleness>);

#[derive(Debug, Default)]
struct Staleness {
    is_stale: AtomicBool,
    /// Value of `identifications` for which `is_stale` is valid.
    valid_for: AtomicU64,
    /// Number of times that the initiator has identified a stale unit at this LUN. It is shared by
    /// all maps of the session.
    identifications: Arc<AtomicU64>,
}

impl StaleLun {
    fn new(is_stale: bool) -> Self {
        Self(Arc::new(Staleness {
            is_stale: AtomicBool::new(is_stale),
            ..Staleness::default()
        }))
    }

    /// Returns a flag for the next map of the session, which is valid for this number of
    /// identifications.
    fn next(&self, is_stale: bool, identifications: u64) -> Self {
        Self(Arc::new(Staleness {
            is_stale: AtomicBool::new(is_stale),
            valid_for: AtomicU64::new(identifications),
            identifications: Arc::clone(&self.0.identifications),
        }))
    }

    fn identifications(&self) -> u64 {
        self.0.identifications.load(Ordering::Relaxed)
    }

    fn is_set(&self) -> bool {
        self.0.is_stale.load(Ordering::Relaxed)
            || self.0.valid_for.load(Ordering::Relaxed) != self.identifications()
    }

    /// Clears the flag, because the initiator has identified the unit.
    pub fn clear(&self) {
        let earlier = self.0.identifications.fetch_add(1, Ordering::Relaxed);
        // Connections of a session may identify the unit at the same time.
        self.0.valid_for.fetch_max(earlier + 1, Ordering::Relaxed);
        self.0.is_stale.store(false, Ordering::Relaxed);
    }
}

/// Identity of a unit for initiators. The unit itself cannot be used, because it is replaced when a
/// missing disk becomes available.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownUnit {
    names: Identity,
    /// The initiator uses this block size until it reads the capacity again.
    block_size: BlockSize,
}

/// Units that the initiator expects at its LUNs.
#[derive(Clone, Debug, Default)]
pub struct KnownUnits {
    units: BTreeMap<LunId, KnownUnit>,
    /// Some units were dropped due to the limit. Any unit may be expected at a LUN that is not in
    /// `units`.
    is_partial: bool,
}

impl KnownUnits {
    /// Returns the number of LUNs with a known unit.
    #[must_use]
    pub fn len(&self) -> usize {
        self.units.len()
    }

    /// Returns whether there are no known units and none were dropped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty() && !self.is_partial
    }
}

/// The logical units available to an initiator on a target port. A unit can have several LUNs.
///
/// # Stale LUNs
/// If a LUN is mapped to a different unit, the initiator may still send commands for the previous
/// unit until it detects the change. Therefore all commands, and not only the first one, fail with
/// REPORTED LUNS DATA HAS CHANGED until the initiator has received an INQUIRY page that identifies
/// the new unit: the LUN is *stale*. This also applies if the LUN was unmapped in between. If the
/// previous unit is mapped again, nothing has changed. Active commands on the previous unit
/// continue, and task management functions for the LUN include them.
#[derive(Debug, Default)]
pub struct LunMap {
    luns: Vec<LunId>,
    mappings: Vec<Mapping>,
    /// In the same order as `mappings`.
    stale: Vec<StaleLun>,
    /// Units expected by the initiator at stale LUNs and at unmapped LUNs.
    known: KnownUnits,
    /// Former units of LUNs.
    former: Vec<(LunId, Weak<Unit>)>,
    /// Limits of the initiator on this target.
    limiter: Option<Arc<Limiter>>,
}

impl LunMap {
    /// Creates a map of these entries, sorted by LUN. If there are duplicate LUNs, the first entry
    /// is used.
    #[must_use]
    pub fn new(entries: impl IntoIterator<Item = (LunId, Mapping)>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_by_key(|(lun, _)| *lun);
        entries.dedup_by_key(|(lun, _)| *lun);
        let (luns, mappings): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        Self {
            stale: luns.iter().map(|_| StaleLun::default()).collect(),
            known: KnownUnits::default(),
            former: Vec::new(),
            luns,
            mappings,
            limiter: None,
        }
    }

    /// Updates this map, which is going to replace another map of the same session.
    pub fn follow(&mut self, old: &Self) {
        // Get these first: workers still use the old map, and a later identification is not
        // included in the known units.
        let identified: Vec<_> = old.stale.iter().map(StaleLun::identifications).collect();
        self.set_known_units(old.known_units());
        for (place, lun) in self.luns.iter().enumerate() {
            let Ok(before) = old.luns.binary_search(lun) else {
                continue;
            };
            let is_stale = self.is_stale_at(place);
            let is_same_unit = self.known_unit(place) == old.known_unit(before);
            self.stale[place] = match is_stale && is_same_unit {
                true => old.stale[before].clone(),
                false => old.stale[before].next(is_stale, identified[before]),
            };
        }
        let is_there = |lun: &LunId, unit: &Weak<Unit>| {
            let place = self.luns.binary_search(lun);
            place.is_ok_and(|place| {
                let present = Arc::as_ptr(&self.mappings[place].unit);
                std::ptr::eq(present, unit.as_ptr())
            })
        };
        // Workers continue to use the old map for a moment, so an idle unit may still receive
        // commands.
        let last = old.luns.iter().zip(&old.mappings);
        let last = last.map(|(lun, mapping)| (*lun, Arc::downgrade(&mapping.unit)));
        let mut former: Vec<_> = last.filter(|(lun, unit)| !is_there(lun, unit)).collect();
        // All units of the previous map are kept, because they may have commands. The limit applies
        // to older maps.
        let most = former.len() + MAX_FORMER;
        for (lun, unit) in &old.former {
            let mut known = former.iter();
            let is_known = known.any(|(other, known)| other == lun && known.ptr_eq(unit));
            let is_idle = unit.upgrade().is_none_or(|unit| unit.tasks() == 0);
            if !is_there(lun, unit) && !is_known && !is_idle && former.len() < most {
                former.push((*lun, unit.clone()));
            }
        }
        self.former = former;
    }

    /// Compares the map with the units expected by the initiator of this session. LUNs with a
    /// different unit become stale.
    pub fn set_known_units(&mut self, mut known: KnownUnits) {
        for (place, lun) in self.luns.iter().enumerate() {
            let taken_for = known.units.get(lun);
            let Some(unit) = self.known_unit(place) else {
                // It may be the expected unit, and no commands can be executed on it yet.
                continue;
            };
            let is_other = taken_for.map_or(known.is_partial, |other| *other != unit);
            if !is_other {
                known.units.remove(lun);
            }
            self.stale[place] = StaleLun::new(is_other);
        }
        let is_gone = |lun: &&LunId| self.luns.binary_search(lun).is_err();
        let surplus = known.units.keys().filter(is_gone).skip(MAX_GONE);
        for lun in surplus.copied().collect::<Vec<_>>() {
            known.units.remove(&lun);
            known.is_partial = true;
        }
        self.known = known;
    }

    /// Returns the units that the initiator currently expects at its LUNs.
    #[must_use]
    pub fn known_units(&self) -> KnownUnits {
        let mut known = self.known.clone();
        for (place, lun) in self.luns.iter().enumerate() {
            if !self.is_stale_at(place) {
                let unit = self.known_unit(place);
                known.units.extend(unit.map(|unit| (*lun, unit)));
            } else if !known.units.contains_key(lun) {
                // The unit was identified using an older map.
                known.is_partial = true;
            }
        }
        known
    }

    /// Returns the identity of the unit at this position, or `None` if its names are not available
    /// yet.
    fn known_unit(&self, place: usize) -> Option<KnownUnit> {
        let lu = &self.mappings[place].unit.lu;
        lu.has_names().then(|| KnownUnit {
            names: lu.config().identity.clone(),
            block_size: lu.config().block_size,
        })
    }

    /// Returns the units that may have commands for a LUN: its current unit, followed by former
    /// units.
    #[must_use]
    pub fn with_former(&self, lun: WireLun) -> Vec<Arc<Unit>> {
        self.addressed(lun)
            .into_iter()
            .chain(self.former(lun))
            .collect()
    }

    /// Returns former units of a LUN that may still have commands for it.
    pub fn former(&self, lun: WireLun) -> impl Iterator<Item = Arc<Unit>> {
        let wanted = LunId::addressed(lun);
        let former = self.former.iter();
        let former = former.filter(move |(lun, _)| Some(*lun) == wanted);
        former.filter_map(|(_, unit)| unit.upgrade())
    }

    fn is_stale_at(&self, place: usize) -> bool {
        self.stale[place].is_set()
    }

    /// Returns the flag for the LUN at this position if it is stale.
    #[must_use]
    pub fn stale(&self, place: usize) -> Option<&StaleLun> {
        Some(&self.stale[place]).filter(|stale| stale.is_set())
    }

    /// Returns whether a LUN is stale. Functions for a stale LUN do not abort commands of other
    /// initiators, because they refer to commands on the previous unit.
    #[must_use]
    pub fn is_stale(&self, lun: WireLun) -> bool {
        self.find(lun).is_some_and(|place| self.is_stale_at(place))
    }

    /// Sets the limits of the initiator.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Option<Arc<Limiter>>) -> Self {
        self.limiter = limiter;
        self
    }

    /// Returns the limits of the initiator.
    #[must_use]
    pub fn limiter(&self) -> Option<&Arc<Limiter>> {
        self.limiter.as_ref()
    }

    /// Returns whether the limits and accounts of the initiator are the same as well, if
    /// [`LunMap::is_same`] is true.
    #[must_use]
    pub fn is_accounted_alike(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        let is_as_fast = match (&self.limiter, &other.limiter) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        is_as_fast && pairs.all(|(a, b)| Arc::ptr_eq(&a.stats, &b.stats))
    }

    /// Returns all LUNs, for REPORT LUNS.
    #[must_use]
    pub fn luns(&self) -> &[LunId] {
        &self.luns
    }

    /// Returns the position of an addressed unit in the map.
    #[must_use]
    pub fn find(&self, lun: WireLun) -> Option<usize> {
        self.luns.binary_search(&LunId::addressed(lun)?).ok()
    }

    /// Returns the entry at this position.
    ///
    /// # Panics
    /// Panics if the position is out of range.
    #[must_use]
    pub fn mapping(&self, place: usize) -> &Mapping {
        &self.mappings[place]
    }

    /// Returns the addressed unit.
    #[must_use]
    pub fn addressed(&self, lun: WireLun) -> Option<Arc<Unit>> {
        let place = self.find(lun)?;
        Some(Arc::clone(&self.mappings[place].unit))
    }

    /// Returns whether the LUN is read-only. Functions for such a LUN do not abort commands of
    /// other initiators, because this requires write access.
    #[must_use]
    pub fn is_read_only(&self, lun: WireLun) -> bool {
        let place = self.find(lun);
        place.is_some_and(|place| self.mappings[place].read_only)
    }

    /// Returns whether the map has the same units at the same LUNs, with the same access rights.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        self.luns == other.luns
            && pairs.all(|(a, b)| Arc::ptr_eq(&a.unit, &b.unit) && a.read_only == b.read_only)
    }

    /// Returns whether any LUN is mapped to this unit.
    #[must_use]
    pub fn has(&self, unit: &Arc<Unit>) -> bool {
        self.mappings.iter().any(|m| Arc::ptr_eq(&m.unit, unit))
    }

    /// Returns all units with a LUN that is neither read-only nor stale, without duplicates.
    #[must_use]
    pub fn resettable(&self) -> Vec<Arc<Unit>> {
        let mut units: Vec<Arc<Unit>> = Vec::new();
        let known = self.mappings.iter().enumerate();
        let known =
            known.filter(|(place, mapping)| !mapping.read_only && !self.is_stale_at(*place));
        for (_, mapping) in known {
            if !units.iter().any(|unit| Arc::ptr_eq(unit, &mapping.unit)) {
                units.push(Arc::clone(&mapping.unit));
            }
        }
        units
    }

    /// Returns all LUNs with their units.
    pub fn iter(&self) -> impl Iterator<Item = (LunId, &Arc<Unit>)> {
        let units = self.mappings.iter().map(|mapping| &mapping.unit);
        self.luns.iter().copied().zip(units)
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::lu::LogicalUnit;

    use super::super::UnitIdx;
    use super::*;
    use crate::fixture::unit_config;

    fn mapping(serial: u32) -> Mapping {
        let mut config = unit_config(2048);
        config.identity.serial = serial.to_string();
        let lu = Arc::new(LogicalUnit::new(config).unwrap());
        Mapping {
            unit: Arc::new(Unit::new(UnitIdx(serial), lu, 3)),
            stats: Arc::new(LunStats::new("demo", 3, None)),
            read_only: false,
        }
    }

    fn map(numbers: impl IntoIterator<Item = u32>, mapping: &Mapping) -> LunMap {
        let number = |n| (LunId::new(n).unwrap(), mapping.clone());
        LunMap::new(numbers.into_iter().map(number))
    }

    #[test]
    fn unmapped_luns_are_remembered_up_to_limit() {
        let (one, other) = (mapping(1), mapping(2));
        let most = MAX_GONE as u32;
        let mut luns = LunMap::default();
        luns.follow(&map(0..most + 9, &one));
        assert_eq!(luns.known_units().len(), MAX_GONE);
        let mut back = map([0, most, most + 100], &one);
        back.follow(&luns);
        let stale = |luns: &LunMap| luns.stale.iter().map(StaleLun::is_set).collect::<Vec<_>>();
        // A LUN that was dropped may have had a different unit. This also applies to a LUN that
        // never existed.
        assert_eq!(stale(&back), [false, true, true]);
        let mut once_more = map([0, most, most + 100], &one);
        once_more.follow(&back);
        back.stale(1).unwrap().clear();
        assert_eq!(
            stale(&once_more),
            [false, false, true],
            "an answer was on its way"
        );
        let mut elsewhere = map([0, most], &other);
        elsewhere.follow(&once_more);
        assert_eq!(stale(&elsewhere), [true, true]);
    }

    /// A worker may execute commands using an old map after several changes.
    #[test]
    fn identification_by_old_map_outdates_newer_maps() {
        let (one, other) = (mapping(1), mapping(2));
        let first = map([5], &one);
        let mut second = map([5], &other);
        second.follow(&first);
        let mut third = map([5], &one);
        third.follow(&second);
        let is_stale = |map: &LunMap| map.stale[0].is_set();
        assert!(!is_stale(&third), "it is the unit of the first map");
        second.stale(0).unwrap().clear();
        assert!(!is_stale(&second) && is_stale(&third));
        let mut fourth = map([5], &other);
        fourth.follow(&third);
        let mut fifth = map([5], &one);
        fifth.follow(&fourth);
        assert!(
            is_stale(&fourth) && is_stale(&fifth),
            "the expected unit is not known"
        );
        fifth.stale(0).unwrap().clear();
        assert!(!is_stale(&fifth) && is_stale(&fourth));
    }

    #[test]
    fn unit_without_names_is_not_stale() {
        let (one, other) = (mapping(1), mapping(2));
        let mut nameless = mapping(9);
        let mut config = unit_config(2048);
        config.identity.serial = "unknown".to_owned();
        let lu = LogicalUnit::new(config).unwrap().without_names();
        nameless.unit = Arc::new(Unit::new(UnitIdx(9), Arc::new(lu), 3));
        for (before, after, is_stale) in [
            (&one, &one, false),
            (&one, &other, true),
            (&nameless, &one, false),
        ] {
            let mut between = map([5], &nameless);
            between.follow(&map([5], before));
            assert!(!between.stale[0].is_set());
            let mut last = map([5], after);
            last.follow(&between);
            assert_eq!(last.stale[0].is_set(), is_stale);
        }
    }

    #[test]
    fn functions_find_former_units() {
        let (one, other) = (mapping(1), mapping(2));
        let lun = [0, 5, 0, 0, 0, 0, 0, 0];
        let mut second = map([5], &other);
        second.follow(&map([5], &one));
        assert_eq!(one.unit.tasks(), 0);
        let found = |luns: &LunMap, unit: &Arc<Unit>| {
            let units = luns.with_former(lun);
            units.iter().any(|known| Arc::ptr_eq(known, unit))
        };
        assert!(found(&second, &one.unit) && found(&second, &other.unit));
        let mut third = LunMap::default();
        third.follow(&second);
        assert!(found(&third, &other.unit));
        assert!(!found(&third, &one.unit), "it is idle still");
    }

    /// The initiator uses the previous block size, so it would write to the wrong blocks.
    #[test]
    fn unit_with_other_block_size_is_stale() {
        let with_blocks = |block_size| {
            let mut config = unit_config(2048);
            config.block_size = block_size;
            let lu = Arc::new(LogicalUnit::new(config).unwrap());
            Mapping {
                unit: Arc::new(Unit::new(UnitIdx(1), lu, 3)),
                ..mapping(1)
            }
        };
        use riser_scsi::config::BlockSize;
        let mut none = LunMap::default();
        none.follow(&map([5], &with_blocks(BlockSize::B512)));
        let mut back = map([5], &with_blocks(BlockSize::B4096));
        back.follow(&none);
        assert!(back.stale[0].is_set());
    }
}
