//! Queue pairs and their numbers.

use chacha20::ChaCha20Rng;

use crate::nic::NicConfig;
use crate::nic::qp::Qp;
use crate::nic::qpn::{QpnAllocator, QpnMap};
use crate::table::Table;
use crate::verbs::{QpId, QpType, VerbsError};
use crate::wire::Qpn;

/// Queue pairs and their numbers.
#[derive(Debug)]
pub(in crate::nic) struct QueuePairs {
    table: Table<QpId, Qp>,
    by_number: QpnMap<QpId>,
    numbers: QpnAllocator,
    /// QP1 of the application, if created.
    gsi: Option<QpId>,
}

impl QueuePairs {
    /// Creates an empty table.
    pub(in crate::nic) fn new(config: &NicConfig) -> Self {
        Self {
            table: Table::new("queue pair", config.limits.max_qp),
            by_number: QpnMap::default(),
            numbers: QpnAllocator::new(config.worker_index, config.worker_bits),
            gsi: None,
        }
    }

    /// Returns the number of QPs.
    pub(in crate::nic) fn len(&self) -> usize {
        self.table.len()
    }

    /// Allocates the number of a new QP.
    pub(in crate::nic) fn allocate_number(
        &mut self,
        qp_type: QpType,
        random: &mut ChaCha20Rng,
    ) -> Result<u32, VerbsError> {
        // There is only one QP1. It does not receive CM messages, because these are handled by the
        // device.
        if qp_type == QpType::Gsi && self.gsi.is_some() {
            return Err(VerbsError::ResourceBusy("queue pair 1"));
        }
        // Check this before allocating a number, which would be leaked if the insertion fails.
        self.table.check_room()?;
        Ok(match qp_type {
            QpType::Gsi => Qpn::GSI.value(),
            _ => self.numbers.allocate(random),
        })
    }

    /// Inserts a QP. It can't be found by its number until [`QueuePairs::publish`] is called.
    pub(in crate::nic) fn insert(&mut self, qp: Qp) -> Result<QpId, VerbsError> {
        self.table.insert(qp)
    }

    /// Allows a QP to be found by its number.
    pub(in crate::nic) fn publish(&mut self, id: QpId, qp_type: QpType, number: u32) {
        if qp_type == QpType::Gsi {
            self.gsi = Some(id);
        } else {
            self.by_number.insert(number, id);
        }
    }

    /// Removes a QP and releases its number.
    pub(in crate::nic) fn remove(&mut self, id: QpId) -> Result<Qp, VerbsError> {
        let qp = self.table.remove(id)?;
        if self.gsi == Some(id) {
            self.gsi = None;
        } else {
            self.by_number.remove(&qp.qpn);
            self.numbers.release(qp.qpn);
        }
        Ok(qp)
    }

    #[inline]
    pub(in crate::nic) fn get(&self, id: QpId) -> Result<&Qp, VerbsError> {
        self.table.get(id)
    }

    #[inline]
    pub(in crate::nic) fn get_mut(&mut self, id: QpId) -> Result<&mut Qp, VerbsError> {
        self.table.get_mut(id)
    }

    /// Returns the QP with this number, except for QP1.
    #[inline]
    pub(in crate::nic) fn find(&self, number: Qpn) -> Option<QpId> {
        self.by_number.get(&number.value()).copied()
    }

    /// Returns QP1 of the application, if created.
    pub(in crate::nic) fn gsi(&self) -> Option<QpId> {
        self.gsi
    }

    /// Iterates over all QPs.
    pub(in crate::nic) fn iter(&self) -> impl Iterator<Item = (QpId, &Qp)> {
        self.table.iter()
    }

    /// Returns the ids of all QPs that satisfy a condition.
    pub(in crate::nic) fn ids(&self, is_included: impl Fn(&Qp) -> bool) -> Vec<QpId> {
        let included = self.iter().filter(|(_, qp)| is_included(qp));
        included.map(|(id, _)| id).collect()
    }
}
