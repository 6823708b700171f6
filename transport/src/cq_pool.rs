//! Pool of CQs shared by multiple users (see `ib_cq_pool_get` in Linux).
//!
//! Each user allocates as many entries as it has requests, so a queue can never overrun. Queues are
//! created when needed for a specific vector and poll context, and not destroyed before the pool.
//! The QP in a completion identifies its user.
//!
//! `riserd` and `riser` use a separate queue per connection instead, so that an overrun only
//! affects that connection.
//!
//! The number of queues is limited by the number of allocated entries, plus less than one queue per
//! combination of vector and context.
//!
//! Currently not used.

use crate::verbs::{CqId, CqInitAttr, PollContext, Verbs, VerbsError};

/// Number of entries per queue, unless a user needs more (`IB_MAX_SHARED_CQ_SZ`).
const SHARED_ENTRIES: u32 = 4096;

/// Entries allocated by a user.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "entries must be put back"]
pub struct CqShare {
    /// Completion queue to be used for the user's QPs.
    pub cq: CqId,
    /// Context for handling the completions.
    pub context: PollContext,
    entries: u32,
}

#[derive(Debug)]
struct Queue {
    cq: CqId,
    vector: u32,
    context: PollContext,
    entries: u32,
    taken: u32,
}

/// Completion queues of a device.
#[derive(Debug, Default)]
pub struct CqPool {
    queues: Vec<Queue>,
    /// Vector for the next user without a hint.
    next_vector: u32,
}

impl CqPool {
    /// Creates an empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates `entries` in a queue for this poll context. `vector_hint` is used to select the
    /// completion vector, modulo the number of vectors. Without a hint, users are distributed over
    /// all vectors.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for direct polling, since this can't be used with a shared
    /// queue, and if `entries` is zero or exceeds [`max_cqe`](crate::verbs::DeviceAttr::max_cqe).
    /// Otherwise the errors of [`Verbs::create_cq_with`].
    pub fn get<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        entries: u32,
        vector_hint: Option<u32>,
        context: PollContext,
    ) -> Result<CqShare, VerbsError> {
        let attr = verbs.device_attr();
        let (max, vectors) = (attr.max_cqe, attr.comp_vectors.max(1));
        if !context.has_events() {
            return Err(VerbsError::InvalidParameter("shared queue context"));
        }
        if entries == 0 || entries > max {
            return Err(VerbsError::InvalidParameter("completion queue entries"));
        }
        let vector = vector_hint.unwrap_or(self.next_vector) % vectors;
        let has_room = |queue: &Queue| {
            let is_of = (queue.vector, queue.context) == (vector, context);
            is_of && queue.entries - queue.taken >= entries
        };
        let at = match self.queues.iter().position(has_room) {
            Some(at) => at,
            None => {
                let size = entries.max(SHARED_ENTRIES.min(max));
                let init = CqInitAttr {
                    vector,
                    ..CqInitAttr::new(size)
                };
                let cq = verbs.create_cq_with(&init)?;
                self.queues.push(Queue {
                    cq,
                    vector,
                    context,
                    entries: size,
                    taken: 0,
                });
                self.queues.len() - 1
            }
        };
        if vector_hint.is_none() {
            self.next_vector = (vector + 1) % vectors;
        }
        let queue = &mut self.queues[at];
        queue.taken += entries;
        Ok(CqShare {
            cq: queue.cq,
            context,
            entries,
        })
    }

    /// Releases entries. The user must not have any QPs using this queue.
    ///
    /// # Panics
    /// Panics if the entries were not allocated from this pool.
    pub fn release(&mut self, share: CqShare) {
        let mut queues = self.queues.iter_mut();
        let queue = queues.find(|queue| queue.cq == share.cq);
        queue.expect("queue belongs to this pool").taken -= share.entries;
    }

    /// Iterates over all queues with their contexts, used by the loop that polls them.
    pub fn queues(&self) -> impl Iterator<Item = (CqId, PollContext)> {
        self.queues.iter().map(|queue| (queue.cq, queue.context))
    }

    /// Destroys all queues, except if they are still used by QPs.
    pub fn destroy<V: Verbs + ?Sized>(&mut self, verbs: &mut V) {
        let mut is_busy =
            |queue: &Queue| matches!(verbs.destroy_cq(queue.cq), Err(VerbsError::ResourceBusy(_)));
        self.queues.retain(&mut is_busy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{FabricConfig, Pair};
    use crate::verbs::{QpCap, QpInitAttr, QpType};

    #[test]
    fn users_share_queues_with_free_entries() {
        let nic = &mut Pair::new(FabricConfig::default()).a;
        let mut pool = CqPool::new();
        let (soft, work) = (PollContext::Softirq, PollContext::Workqueue);
        let a = pool.get(nic, 3000, Some(1), soft).unwrap();
        let b = pool.get(nic, 1096, Some(9), soft).unwrap();
        assert_eq!(a.cq, b.cq, "the vectors are eight");
        assert_eq!(nic.query_cq(a.cq).unwrap().vector, 1);
        let full = pool.get(nic, 1, Some(1), soft).unwrap();
        assert_ne!(full.cq, a.cq);
        let other = pool.get(nic, 1, Some(1), work).unwrap();
        assert!(other.cq != full.cq && other.context == work);
        let long = pool.get(nic, 5000, Some(1), soft).unwrap();
        assert_eq!(nic.query_cq(long.cq).unwrap().entries, 5000);
        // Released entries can be allocated again.
        pool.release(b);
        assert_eq!(pool.get(nic, 1000, Some(1), soft).unwrap().cq, a.cq);
        assert_eq!(pool.queues().count(), 4);
        // Without a hint, users are distributed.
        let spread: Vec<_> = (0..9)
            .map(|_| pool.get(nic, 1, None, work).unwrap())
            .collect();
        assert_eq!(spread[0].cq, spread[8].cq);
        assert_ne!(spread[0].cq, spread[1].cq);
        assert_eq!(spread[1].cq, other.cq);
    }

    #[test]
    fn unshareable_requests_fail_and_used_queues_remain() {
        let nic = &mut Pair::new(FabricConfig::default()).a;
        let mut pool = CqPool::new();
        let direct = PollContext::Direct { budget: 1 };
        let soft = PollContext::Softirq;
        let max = nic.device_attr().max_cqe;
        for (entries, context) in [(1, direct), (0, soft), (max + 1, soft)] {
            assert!(pool.get(nic, entries, None, context).is_err());
        }
        assert_eq!(pool.queues().count(), 0);
        let share = pool.get(nic, 1, None, soft).unwrap();
        let pd = nic.alloc_pd().unwrap();
        let init = QpInitAttr::new(pd, share.cq, QpType::Rc, QpCap::new(1, 1));
        let qp = nic.create_qp(&init).unwrap();
        pool.destroy(nic);
        assert_eq!(pool.queues().count(), 1);
        nic.destroy_qp(qp).unwrap();
        pool.release(share);
        pool.destroy(nic);
        assert_eq!(pool.queues().count(), 0);
    }
}
