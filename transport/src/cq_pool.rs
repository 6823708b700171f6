//! A pool of completion queues that several users share (Linux's `ib_cq_pool_get`).
//!
//! A user takes as many entries of a queue as it has requests, so that it never overruns. Queues
//! are made as they are needed, each on a vector and for a context of polling, and stay until the
//! pool is destroyed. Whose a completion is, its queue pair says.
//!
//! `riserd` and `riser` have a queue for each connection instead: what overruns one ends that
//! connection alone.
//!
//! Bound: the entries that are taken, and for each pair of vector and context less than one queue
//! more.
//!
//! No user yet.

use crate::verbs::{CqId, CqInitAttr, PollContext, Verbs, VerbsError};

/// Entries of a queue, unless a user takes more at once (`IB_MAX_SHARED_CQ_SZ`).
const SHARED_ENTRIES: u32 = 4096;

/// Entries that a user has taken.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "entries must be put back"]
pub struct CqShare {
    /// The queue, for the queue pairs of the user.
    pub cq: CqId,
    /// Context in which its completions are handled.
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

/// The queues of a device.
#[derive(Debug, Default)]
pub struct CqPool {
    queues: Vec<Queue>,
    /// Vector of the next user that has no wish.
    next_vector: u32,
}

impl CqPool {
    /// A pool without queues.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `entries` of a queue that is polled in a context. `vector_hint` picks its completion
    /// vector, counted around; without it users are spread over all.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for a queue that is polled directly, since its user takes
    /// all that it has, for no entries, and for more than the device's
    /// [`max_cqe`](crate::verbs::DeviceAttr::max_cqe); those of [`Verbs::create_cq_with`].
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
            return Err(VerbsError::InvalidParameter("context of a shared queue"));
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

    /// Puts entries back, whose user has no queue pair on the queue any more.
    ///
    /// # Panics
    /// If they are of another pool.
    pub fn put(&mut self, share: CqShare) {
        let mut queues = self.queues.iter_mut();
        let queue = queues.find(|queue| queue.cq == share.cq);
        queue.expect("a queue of this pool").taken -= share.entries;
    }

    /// The queues, with their contexts, for the loop that gives them their turns.
    pub fn queues(&self) -> impl Iterator<Item = (CqId, PollContext)> {
        self.queues.iter().map(|queue| (queue.cq, queue.context))
    }

    /// Destroys all queues. One that still has queue pairs stays.
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
    fn users_share_queues_of_their_vector_and_context_as_long_as_there_is_room() {
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
        // What was put back is taken again.
        pool.put(b);
        assert_eq!(pool.get(nic, 1000, Some(1), soft).unwrap().cq, a.cq);
        assert_eq!(pool.queues().count(), 4);
        // Without a wish they are spread.
        let spread: Vec<_> = (0..9)
            .map(|_| pool.get(nic, 1, None, work).unwrap())
            .collect();
        assert_eq!(spread[0].cq, spread[8].cq);
        assert_ne!(spread[0].cq, spread[1].cq);
        assert_eq!(spread[1].cq, other.cq);
    }

    #[test]
    fn what_cannot_be_shared_is_refused_and_queues_in_use_stay() {
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
        pool.put(share);
        pool.destroy(nic);
        assert_eq!(pool.queues().count(), 0);
    }
}
