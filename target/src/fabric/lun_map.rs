//! The logical units available to an initiator, by LUN.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Weak};

use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_sync::atomic::{AtomicU64, Ordering};

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

/// A unit that an initiator expects at a LUN, as a number for an atomic variable.
///
/// A number other than [`NO_UNIT`] and [`ANY_UNIT`] is a hash of the names and block size. The unit
/// itself cannot be used, because it is replaced when a missing disk becomes available.
type Expectation = u64;

/// No unit with known names has been mapped to the LUN yet.
const NO_UNIT: Expectation = 0;

/// It is not known which unit the initiator expects.
const ANY_UNIT: Expectation = 1;

/// Returns the expectation for this unit, or `None` if its names are not available yet.
fn expectation_of(lu: &LogicalUnit) -> Option<Expectation> {
    let config = lu.config();
    let mut hasher = DefaultHasher::new();
    config.identity.hash(&mut hasher);
    // The initiator uses this block size and this protection information until it reads the
    // capacity again.
    config.block_size.hash(&mut hasher);
    config.protection.hash(&mut hasher);
    lu.has_names().then(|| hasher.finish().max(ANY_UNIT + 1))
}

/// The unit that an initiator expects at a LUN, and the unit of a map. All maps of a session share
/// the former, because workers may still execute commands that use an older map.
#[derive(Clone, Debug)]
pub struct ExpectedUnit {
    expected: Arc<AtomicU64>,
    own: Option<Expectation>,
}

impl ExpectedUnit {
    fn new(expected: Expectation, own: Option<Expectation>) -> Self {
        let unit = Self {
            expected: Arc::new(AtomicU64::new(expected)),
            own,
        };
        unit.expect_first_unit();
        unit
    }

    /// Replaces the expectation by that of an older map.
    fn share(&mut self, expected: Arc<AtomicU64>) {
        self.expected = expected;
        self.expect_first_unit();
    }

    fn expect_first_unit(&self) {
        let Some(own) = self.own else { return };
        // If this fails, the LUN has been used before.
        let _ = self
            .expected
            .compare_exchange(NO_UNIT, own, Ordering::AcqRel, Ordering::Acquire);
    }

    fn expectation(&self) -> Expectation {
        self.expected.load(Ordering::Acquire)
    }

    /// Returns whether the initiator may expect a different unit.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        // A unit without names may be the expected unit, and cannot execute any commands yet.
        self.own.is_some_and(|own| own != self.expectation())
    }

    /// Called when a response is sent that identifies the unit of this map. Until it has arrived,
    /// the initiator may expect this unit or the previous one.
    pub fn begin_identification(&self) {
        if self.is_stale() {
            self.expected.store(ANY_UNIT, Ordering::Release);
        }
    }

    /// Called when the response has arrived at the initiator.
    pub fn complete_identification(&self) {
        if let Some(own) = self.own {
            self.expected.store(own, Ordering::Release);
        }
    }
}

/// Units that the initiator expects at its LUNs.
#[derive(Clone, Debug, Default)]
pub struct KnownUnits {
    units: BTreeMap<LunId, Expectation>,
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
/// the new unit: the LUN is *stale*. This also applies if the LUN was unmapped in between, and to
/// commands that use an older map after the initiator has identified the new unit. If the expected
/// unit is mapped again, nothing has changed. Active commands on the previous unit
/// continue, and task management functions for the LUN include them.
#[derive(Debug, Default)]
pub struct LunMap {
    luns: Vec<LunId>,
    mappings: Vec<Mapping>,
    /// In the same order as `mappings`.
    expected: Vec<ExpectedUnit>,
    /// Units that the initiator expects at unmapped LUNs.
    unmapped: BTreeMap<LunId, Arc<AtomicU64>>,
    /// Some unmapped LUNs were dropped due to the limit.
    is_partial: bool,
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
        let own = mappings.iter().map(|m| expectation_of(&m.unit.lu));
        Self {
            expected: own.map(|own| ExpectedUnit::new(NO_UNIT, own)).collect(),
            unmapped: BTreeMap::new(),
            is_partial: false,
            former: Vec::new(),
            luns,
            mappings,
            limiter: None,
        }
    }

    /// Updates this map, which is going to replace another map of the same session.
    pub fn follow(&mut self, old: &Self) {
        let mut known = old.unmapped.clone();
        let mapped = old.luns.iter().zip(&old.expected);
        known.extend(mapped.map(|(lun, unit)| (*lun, Arc::clone(&unit.expected))));
        self.set_expected_units(known, old.is_partial);
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

    /// Sets the units expected by the initiator of this session. LUNs with a different unit become
    /// stale.
    pub fn set_known_units(&mut self, known: KnownUnits) {
        let units = known.units.into_iter();
        let units = units.map(|(lun, unit)| (lun, Arc::new(AtomicU64::new(unit))));
        self.set_expected_units(units.collect(), known.is_partial);
    }

    fn set_expected_units(&mut self, mut known: BTreeMap<LunId, Arc<AtomicU64>>, is_partial: bool) {
        for (lun, unit) in self.luns.iter().zip(&mut self.expected) {
            match known.remove(lun) {
                Some(expected) => unit.share(expected),
                None if is_partial => *unit = ExpectedUnit::new(ANY_UNIT, unit.own),
                None => {}
            }
        }
        known.retain(|_, unit| unit.load(Ordering::Acquire) != NO_UNIT);
        self.is_partial = is_partial || known.len() > MAX_GONE;
        while known.len() > MAX_GONE {
            known.pop_last();
        }
        self.unmapped = known;
    }

    /// Returns the units that the initiator currently expects at its LUNs.
    #[must_use]
    pub fn known_units(&self) -> KnownUnits {
        let mapped = self.luns.iter().zip(&self.expected);
        let mapped = mapped.map(|(lun, unit)| (*lun, unit.expectation()));
        let unmapped = self.unmapped.iter();
        let unmapped = unmapped.map(|(lun, unit)| (*lun, unit.load(Ordering::Acquire)));
        let used = mapped.chain(unmapped).filter(|(_, unit)| *unit != NO_UNIT);
        KnownUnits {
            units: used.collect(),
            is_partial: self.is_partial,
        }
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

    /// Returns the unit that the initiator expects at the LUN at this position.
    ///
    /// # Panics
    /// Panics if the position is out of range.
    #[must_use]
    pub fn expected(&self, place: usize) -> &ExpectedUnit {
        &self.expected[place]
    }

    /// Returns whether a LUN is stale. Functions for a stale LUN do not abort commands of other
    /// initiators, because they refer to commands on the previous unit.
    #[must_use]
    pub fn is_stale(&self, lun: WireLun) -> bool {
        self.find(lun)
            .is_some_and(|place| self.expected[place].is_stale())
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
        let known = known
            .filter(|(place, mapping)| !mapping.read_only && !self.expected[*place].is_stale());
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
        let stale = |luns: &LunMap| {
            luns.expected
                .iter()
                .map(ExpectedUnit::is_stale)
                .collect::<Vec<_>>()
        };
        // A LUN that was dropped may have had a different unit. This also applies to a LUN that
        // never existed.
        assert_eq!(stale(&back), [false, true, true]);
        let mut once_more = map([0, most, most + 100], &one);
        once_more.follow(&back);
        identify(&back, 1);
        assert_eq!(stale(&once_more), [false, false, true]);
        let mut elsewhere = map([0, most], &other);
        elsewhere.follow(&once_more);
        assert_eq!(stale(&elsewhere), [true, true]);
    }

    /// Sends a response that identifies the unit at this position.
    fn identify(luns: &LunMap, place: usize) {
        luns.expected(place).begin_identification();
        luns.expected(place).complete_identification();
    }

    /// Returns maps with LUN 5, each of which replaces the map before it. A unit number of zero is
    /// an empty map.
    fn history<const N: usize>(numbers: [u32; N]) -> [LunMap; N] {
        let mut maps: Vec<LunMap> = Vec::new();
        let mappings: BTreeMap<u32, Mapping> = numbers.map(|n| (n, mapping(n))).into();
        for number in numbers {
            let mut luns = match number {
                0 => LunMap::default(),
                n => map([5], &mappings[&n]),
            };
            if let Some(last) = maps.last() {
                luns.follow(last);
            }
            maps.push(luns);
        }
        maps.try_into().expect("a map per number")
    }

    fn is_stale(luns: &LunMap) -> bool {
        luns.expected(0).is_stale()
    }

    /// A worker may execute commands using an old map after several changes.
    #[test]
    fn old_map_identification_makes_newer_maps_stale() {
        let [_, second, third] = history([1, 2, 1]);
        assert!(!is_stale(&third), "it is the unit of the first map");
        identify(&second, 0);
        assert!(!is_stale(&second) && is_stale(&third));
        let mut fourth = map([5], &mapping(2));
        fourth.follow(&third);
        let mut fifth = map([5], &mapping(1));
        fifth.follow(&fourth);
        assert!(!is_stale(&fourth) && is_stale(&fifth));
        identify(&fifth, 0);
        assert!(!is_stale(&fifth) && is_stale(&fourth));
    }

    #[test]
    fn old_map_identification_makes_later_units_stale() {
        for between in [3, 0] {
            let [_, second, _, last] = history([1, 2, between, 1]);
            identify(&second, 0);
            assert!(is_stale(&last), "unit {between} in between");
            let mut back = map([5], &mapping(1));
            back.follow(&last);
            assert!(is_stale(&back));
        }
        let [_, second, third] = history([1, 2, 3]);
        identify(&second, 0);
        let mut back = map([5], &mapping(1));
        back.follow(&third);
        assert!(is_stale(&back), "the initiator expects the second unit");
    }

    #[test]
    fn repeated_identification_keeps_current_unit() {
        let [_, second, third] = history([1, 2, 2]);
        identify(&second, 0);
        let mut fourth = map([5, 6], &mapping(2));
        fourth.follow(&third);
        identify(&second, 0);
        assert!(!is_stale(&third) && !is_stale(&fourth));
    }

    #[test]
    fn lost_identification_makes_all_units_stale() {
        let [_, second, third] = history([1, 2, 1]);
        second.expected(0).begin_identification();
        assert!(is_stale(&second) && is_stale(&third));
        let mut next_session = map([5], &mapping(2));
        next_session.set_known_units(third.known_units());
        assert!(is_stale(&next_session));
        identify(&next_session, 0);
        assert!(!is_stale(&next_session));
    }

    #[test]
    fn unit_without_names_is_not_stale() {
        let (one, other) = (mapping(1), mapping(2));
        let mut nameless = mapping(9);
        let mut config = unit_config(2048);
        config.identity.serial = "unknown".to_owned();
        let lu = LogicalUnit::new(config).unwrap().without_names();
        nameless.unit = Arc::new(Unit::new(UnitIdx(9), Arc::new(lu), 3));
        for (before, after, expected) in [
            (&one, &one, false),
            (&one, &other, true),
            (&nameless, &one, false),
        ] {
            let mut between = map([5], &nameless);
            between.follow(&map([5], before));
            assert!(!is_stale(&between));
            let mut last = map([5], after);
            last.follow(&between);
            assert_eq!(last.expected(0).is_stale(), expected);
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
        assert!(is_stale(&back));
    }
}
