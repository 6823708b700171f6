//! Entries of a session's I_T nexus at its logical units.

use std::sync::{Arc, Weak};

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::nexus::{Nexus, NexusId};

use crate::fabric::{LunMap, Unit};

/// Entries of a nexus at its units, which are removed on drop.
#[derive(Debug)]
pub(super) struct UnitEntries {
    nexus: NexusId,
    luns: Arc<LunMap>,
    /// Nexuses replaced by this nexus.
    predecessors: Vec<NexusId>,
    /// Units removed from the nexus. It keeps its entries there for commands in flight.
    former: Vec<Weak<Unit>>,
}

impl UnitEntries {
    /// Adds a nexus to its units. Without ports, there is neither a nexus nor any units.
    ///
    /// `is_loss` is set if there was a session with the same ports before. The units then establish
    /// I_T NEXUS LOSS OCCURRED (SAM-5 6.4).
    pub(super) fn add_nexus(
        nexus: NexusId,
        ports: Option<&Nexus>,
        luns: Arc<LunMap>,
        is_loss: bool,
    ) -> Self {
        for (_, unit) in luns.iter() {
            let Some(ports) = ports.cloned() else {
                continue;
            };
            if is_loss {
                unit.lu.add_nexus_after_loss(nexus, ports);
            } else {
                unit.lu.add_nexus(nexus, ports);
            }
        }
        Self {
            nexus,
            luns,
            predecessors: Vec::new(),
            former: Vec::new(),
        }
    }

    /// Marks this nexus as the successor of older nexuses with the same ports, whose tasks may
    /// still be at a device. Units with such tasks reject tasks of this nexus.
    pub(super) fn succeed(&mut self, predecessors: impl IntoIterator<Item = NexusId>) {
        self.predecessors.extend(predecessors);
        for (_, unit) in self.luns.iter() {
            for old in &self.predecessors {
                unit.succeed(*old, self.nexus);
            }
        }
    }

    /// Returns the nexus number.
    pub(super) fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// Returns the units of this nexus.
    pub(super) fn luns(&self) -> &Arc<LunMap> {
        &self.luns
    }

    /// Changes the units of the nexus. If they are different, the units report it (SPC-5: REPORTED
    /// LUNS DATA HAS CHANGED). `luns` must have been created for this nexus, and not be shared.
    pub(super) fn change(&mut self, mut luns: Arc<LunMap>, ports: &Nexus) {
        Arc::get_mut(&mut luns)
            .expect("made for this nexus")
            .follow(&self.luns);
        if self.luns.is_same(&luns) {
            // Commands with the current map use its statistics, so don't replace it with an equal
            // map.
            if !self.luns.is_accounted_alike(&luns) {
                self.luns = luns;
            }
            return;
        }
        // Units in both maps keep their entries and their state for this nexus. For now, removed
        // units keep their entries too: if a nexus is not registered, its commands in flight would
        // conflict with any reservation. They are removed by
        // `remove_former_units`.
        let old = std::mem::replace(&mut self.luns, luns);
        self.former
            .extend(old.iter().map(|(_, unit)| Arc::downgrade(unit)));
        let luns = &self.luns;
        let is_gone = |unit: &Weak<Unit>| unit.upgrade().is_some_and(|unit| !luns.has(&unit));
        self.former.retain(is_gone);
        for (_, unit) in luns.iter() {
            unit.admit(self.nexus, ports);
            for old in &self.predecessors {
                unit.succeed(*old, self.nexus);
            }
            let scope = AttentionScope::One(self.nexus);
            unit.lu.raise(Attention::LunsChanged, scope);
        }
    }

    /// Called when all workers use the current map, so there are no new commands for older maps.
    /// The nexus leaves its removed units, each as soon as its last command there has completed.
    pub(super) fn remove_former_units(&mut self) {
        let former = std::mem::take(&mut self.former);
        for unit in former.iter().filter_map(Weak::upgrade) {
            unit.dismiss(self.nexus);
        }
    }
}

impl Drop for UnitEntries {
    fn drop(&mut self) {
        for (_, unit) in self.luns.iter() {
            unit.end_nexus(self.nexus);
        }
        // A session that was logged out may be closed before all workers have switched.
        self.remove_former_units();
    }
}
