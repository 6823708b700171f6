//! The logical units that an initiator may address, and by which numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use riser_scsi::config::{BlockSize, Identity};
use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_sync::atomic::{AtomicBool, Ordering};

use super::Unit;
use crate::qos::Limiter;
use crate::stats::LunStats;

/// One entry of a [`LunMap`].
#[derive(Clone, Debug)]
pub struct Mapping {
    /// Unit that the LUN leads to.
    pub unit: Arc<Unit>,
    /// Statistics of the commands to it.
    pub stats: Arc<LunStats>,
    /// Writes through this LUN are refused, even if the unit allows them.
    pub read_only: bool,
}

/// Maximum number of units that earlier maps than the last one led to.
const MAX_FORMER: usize = 64;

/// Maximum number of LUNs that lead nowhere and whose units are remembered.
const MAX_GONE: usize = 256;

/// A flag that is set while a LUN leads to another unit than its initiator takes it for. The maps
/// of a session that lead the LUN to one unit share it.
#[derive(Clone, Debug, Default)]
pub struct StaleLun(Arc<AtomicBool>);

impl StaleLun {
    fn new(is_stale: bool) -> Self {
        Self(Arc::new(AtomicBool::new(is_stale)))
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the flag: the initiator knows which unit it is.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A unit as initiators know it. One that was without a medium is made again when its disk is
/// there, so the unit itself does not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownUnit {
    names: Identity,
    /// An initiator counts in these blocks until it reads the capacity again.
    block_size: BlockSize,
}

/// The units that an initiator takes its LUNs for.
#[derive(Clone, Debug, Default)]
pub struct KnownUnits {
    units: BTreeMap<LunId, KnownUnit>,
    /// Some were dropped at the limit. A LUN that is not among `units` may be taken for any unit.
    is_partial: bool,
}

impl KnownUnits {
    /// Returns the number of LUNs whose units are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.units.len()
    }

    /// Whether nothing is known, and nothing was dropped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty() && !self.is_partial
    }
}

/// The logical units that one initiator may see at one target port. Several LUNs may lead to one.
///
/// # A LUN that comes to lead to another unit
/// The initiator may send commands for the unit before until it has learned of the change. So all
/// of them are answered with REPORTED LUNS DATA HAS CHANGED, and not only the first one, until the
/// initiator has an INQUIRY page with the unit's names: the LUN is *stale*. That it led nowhere in
/// between makes no difference; if it leads back to the unit before, nothing has changed. Commands
/// under way at the unit before go on, and functions for the LUN find them.
#[derive(Debug, Default)]
pub struct LunMap {
    luns: Vec<LunId>,
    mappings: Vec<Mapping>,
    /// By place, as `mappings`.
    stale: Vec<StaleLun>,
    /// The units that the initiator takes stale LUNs for, and LUNs that lead nowhere.
    known: KnownUnits,
    /// Units that LUNs led to before.
    former: Vec<(LunId, Weak<Unit>)>,
    /// Limits of the initiator at this target.
    limiter: Option<Arc<Limiter>>,
}

impl LunMap {
    /// A map of these, in ascending order of their LUNs. Of two with one LUN the first counts.
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

    /// Takes the place of another map in the same session.
    pub fn follow(&mut self, old: &Self) {
        self.set_known_units(old.known_units());
        for (place, lun) in self.luns.iter().enumerate() {
            if let Ok(before) = old.luns.binary_search(lun)
                && self.is_stale_at(place)
                && self.known_unit(place) == old.known_unit(before)
            {
                self.stale[place] = old.stale[before].clone();
            }
        }
        let is_there = |lun: &LunId, unit: &Weak<Unit>| {
            let place = self.luns.binary_search(lun);
            place.is_ok_and(|place| {
                let present = Arc::as_ptr(&self.mappings[place].unit);
                std::ptr::eq(present, unit.as_ptr())
            })
        };
        // Workers use the old map for a moment more, so a unit that is idle now may get commands
        // through it.
        let last = old.luns.iter().zip(&old.mappings);
        let last = last.map(|(lun, mapping)| (*lun, Arc::downgrade(&mapping.unit)));
        let mut former: Vec<_> = last.filter(|(lun, unit)| !is_there(lun, unit)).collect();
        // Those of the last map are all kept, since they may have commands; the bound is on older
        // ones.
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

    /// Compares the map with the units that the session's initiator takes LUNs for: those that lead
    /// to another one are stale.
    pub fn set_known_units(&mut self, mut known: KnownUnits) {
        for (place, lun) in self.luns.iter().enumerate() {
            let taken_for = known.units.get(lun);
            let Some(unit) = self.known_unit(place) else {
                // It may be the unit that the initiator takes it for, and nothing gets there yet.
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

    /// Returns the units that the initiator takes LUNs for at present.
    #[must_use]
    pub fn known_units(&self) -> KnownUnits {
        let mut known = self.known.clone();
        for (place, lun) in self.luns.iter().enumerate() {
            if !self.is_stale_at(place) {
                let unit = self.known_unit(place);
                known.units.extend(unit.map(|unit| (*lun, unit)));
            }
        }
        known
    }

    /// Returns the unit at a place as initiators know it, unless its names are not known yet.
    fn known_unit(&self, place: usize) -> Option<KnownUnit> {
        let lu = &self.mappings[place].unit.lu;
        lu.has_names().then(|| KnownUnit {
            names: lu.config().identity.clone(),
            block_size: lu.config().block_size,
        })
    }

    /// Returns the units that may have commands for a LUN: the one that it leads to, then those
    /// that it led to before.
    #[must_use]
    pub fn with_former(&self, lun: WireLun) -> Vec<Arc<Unit>> {
        self.addressed(lun)
            .into_iter()
            .chain(self.former(lun))
            .collect()
    }

    /// Returns the units that a LUN led to before, which may have commands for it.
    pub fn former(&self, lun: WireLun) -> impl Iterator<Item = Arc<Unit>> {
        let wanted = LunId::addressed(lun);
        let former = self.former.iter();
        let former = former.filter(move |(lun, _)| Some(*lun) == wanted);
        former.filter_map(|(_, unit)| unit.upgrade())
    }

    fn is_stale_at(&self, place: usize) -> bool {
        self.stale[place].is_set()
    }

    /// Returns the flag of the LUN at a place, if it is stale.
    #[must_use]
    pub fn stale(&self, place: usize) -> Option<&StaleLun> {
        Some(&self.stale[place]).filter(|stale| stale.is_set())
    }

    /// Whether a LUN is stale. Functions for such a LUN end no commands of others: the initiator
    /// means those at the unit before.
    #[must_use]
    pub fn is_stale(&self, lun: WireLun) -> bool {
        self.find(lun).is_some_and(|place| self.is_stale_at(place))
    }

    /// Sets the initiator's limits.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Option<Arc<Limiter>>) -> Self {
        self.limiter = limiter;
        self
    }

    /// Returns the initiator's limits.
    #[must_use]
    pub fn limiter(&self) -> Option<&Arc<Limiter>> {
        self.limiter.as_ref()
    }

    /// Whether the limits and the accounts of the initiator are the same too, where
    /// [`LunMap::is_same`] holds.
    #[must_use]
    pub fn is_accounted_alike(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        let is_as_fast = match (&self.limiter, &other.limiter) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        is_as_fast && pairs.all(|(a, b)| Arc::ptr_eq(&a.stats, &b.stats))
    }

    /// Returns the LUNs, for REPORT LUNS.
    #[must_use]
    pub fn luns(&self) -> &[LunId] {
        &self.luns
    }

    /// Returns the place of an addressed unit in the map.
    #[must_use]
    pub fn find(&self, lun: WireLun) -> Option<usize> {
        self.luns.binary_search(&LunId::addressed(lun)?).ok()
    }

    /// Returns the entry at a place of the map.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn mapping(&self, place: usize) -> &Mapping {
        &self.mappings[place]
    }

    /// Returns an addressed unit.
    #[must_use]
    pub fn addressed(&self, lun: WireLun) -> Option<Arc<Unit>> {
        let place = self.find(lun)?;
        Some(Arc::clone(&self.mappings[place].unit))
    }

    /// Whether the LUN that addresses a unit is read-only. Functions for such a LUN end no commands
    /// of others: an initiator that may not write must not stop others.
    #[must_use]
    pub fn is_read_only(&self, lun: WireLun) -> bool {
        let place = self.find(lun);
        place.is_some_and(|place| self.mappings[place].read_only)
    }

    /// Whether the same LUNs lead to the same units, with the same rights.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        self.luns == other.luns
            && pairs.all(|(a, b)| Arc::ptr_eq(&a.unit, &b.unit) && a.read_only == b.read_only)
    }

    /// Whether some LUN leads to a unit.
    #[must_use]
    pub fn has(&self, unit: &Arc<Unit>) -> bool {
        self.mappings.iter().any(|m| Arc::ptr_eq(&m.unit, unit))
    }

    /// Returns the units that a LUN leads to which is neither read-only nor stale, each once.
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

    /// Returns every LUN and its unit.
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
    fn numbers_that_went_away_are_remembered_within_a_bound() {
        let (one, other) = (mapping(1), mapping(2));
        let most = MAX_GONE as u32;
        let mut luns = LunMap::default();
        luns.follow(&map(0..most + 9, &one));
        assert_eq!(luns.known_units().len(), MAX_GONE);
        let mut back = map([0, most, most + 100], &one);
        back.follow(&luns);
        let stale = |luns: &LunMap| luns.stale.iter().map(StaleLun::is_set).collect::<Vec<_>>();
        // One that is not known any more may have been another unit, and so may one that never was
        // there.
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

    #[test]
    fn a_unit_whose_names_are_not_known_yet_is_not_another_one() {
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
    fn functions_find_units_whose_commands_come_after_the_change() {
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

    /// Its initiator counts in the previous blocks, so it would write to other places.
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
