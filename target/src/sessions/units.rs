//! The I_T nexus of a session at the logical units that it sees.

use std::sync::Arc;

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::nexus::{Nexus, NexusId};

use crate::fabric::LunMap;

/// Entries of a nexus at its units, which are removed when this is dropped.
#[derive(Debug)]
pub(super) struct UnitEntries {
    nexus: NexusId,
    luns: Arc<LunMap>,
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
        Self { nexus, luns }
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
        // First removed, then added: a unit that both maps have keeps its entry, and what it knows
        // of the nexus.
        let old = std::mem::replace(&mut self.luns, luns);
        for (_, unit) in old.iter().filter(|(_, u)| !self.luns.has(u)) {
            unit.lu.remove_nexus(self.nexus);
        }
        for (_, unit) in self.luns.iter() {
            if unit.lu.nexus(self.nexus).is_none() {
                unit.lu.add_nexus(self.nexus, ports.clone());
            }
            let scope = AttentionScope::One(self.nexus);
            unit.lu.raise(Attention::LunsChanged, scope);
        }
    }
}

impl Drop for UnitEntries {
    fn drop(&mut self) {
        for (_, unit) in self.luns.iter() {
            unit.lu.remove_nexus(self.nexus);
        }
    }
}
