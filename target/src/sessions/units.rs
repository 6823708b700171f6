//! The I_T nexus of a session at the logical units that it sees.

use std::sync::{Arc, Weak};

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::nexus::{Nexus, NexusId};

use crate::fabric::{LunMap, Unit};

/// Entries of a nexus at its units, which are removed when this is dropped.
#[derive(Debug)]
pub(super) struct UnitEntries {
    nexus: NexusId,
    luns: Arc<LunMap>,
    /// Nexuses that this one has replaced.
    predecessors: Vec<NexusId>,
    /// Units that the nexus no longer sees, and where it is entered still, for the commands that it
    /// has there.
    former: Vec<Weak<Unit>>,
}

impl UnitEntries {
    /// Enters a nexus at the units that it sees. Without ports there is no nexus to enter, and
    /// there are no units.
    ///
    /// `is_loss` if a session of the same ports was there before: the units establish I_T NEXUS
    /// LOSS OCCURRED then (SAM-5 6.4).
    pub(super) fn enter(
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

    /// The nexus replaces older ones of the same ports, whose tasks may still be at a device. Units with
    /// such tasks refuse tasks of this nexus.
    pub(super) fn succeed(&mut self, predecessors: impl IntoIterator<Item = NexusId>) {
        self.predecessors.extend(predecessors);
        for (_, unit) in self.luns.iter() {
            for old in &self.predecessors {
                unit.succeed(*old, self.nexus);
            }
        }
    }

    /// Number of the nexus.
    pub(super) fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// The units that it sees.
    pub(super) fn luns(&self) -> &Arc<LunMap> {
        &self.luns
    }

    /// Gives the nexus other units, which report that the LUNs have changed if they have
    /// (SPC-5: REPORTED LUNS DATA HAS CHANGED). `luns` was made for this nexus and has no other
    /// owner.
    pub(super) fn change(&mut self, mut luns: Arc<LunMap>, ports: &Nexus) {
        Arc::get_mut(&mut luns)
            .expect("made for this nexus")
            .follow(&self.luns);
        if self.luns.is_same(&luns) {
            // Commands that keep the map keep their accounts, so it is not exchanged for an equal
            // one.
            if !self.luns.is_accounted_alike(&luns) {
                self.luns = luns;
            }
            return;
        }
        // A unit that both maps have keeps its entry, and what it knows of the nexus. So do the
        // others for the moment: to a unit that does not know their nexus, commands under way are
        // a stranger's, who conflicts with every reservation. `settle` follows.
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

    /// All workers use the present map, so no command comes by earlier ones any more: the nexus
    /// leaves the units that it does not see, each with its last command there.
    pub(super) fn settle(&mut self) {
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
        // A session that was logged out may be over before all workers have followed.
        self.settle();
    }
}
