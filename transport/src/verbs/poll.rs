//! Contexts in which the completions of a queue are handled (Linux's `enum ib_poll_context`).
//!
//! ```text
//! event → turn → more? → waits for its next turn
//!   ↑       └──→ empty: armed
//!   └──────────────┘
//! ```

use super::{Completion, CqId, Notify, Verbs, VerbsError};

/// Context in which the completions of a queue are handled. There are no interrupts here and no
/// work queues: a loop gives each queue its turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PollContext {
    /// The loop takes completions whenever it likes, as `ib_process_cq_direct` does. There are no
    /// events.
    Direct {
        /// Completions of a turn, at most.
        budget: usize,
    },
    /// After an event, in turns with other queues, none of which waits for long. For data
    /// (`IB_POLL_SOFTIRQ`).
    Softirq,
    /// After an event, all that there are, at once. For a few completions whose handling may take
    /// long (`IB_POLL_WORKQUEUE`).
    Workqueue,
}

impl PollContext {
    /// Completions of a turn, at most.
    #[must_use]
    pub const fn budget(self) -> usize {
        match self {
            Self::Direct { budget } => budget,
            Self::Softirq => 32,
            Self::Workqueue => 1024,
        }
    }

    /// Whether the queue has events.
    #[must_use]
    pub const fn has_events(self) -> bool {
        !matches!(self, Self::Direct { .. })
    }

    /// Takes the completions of a turn, appending them to `out`; answers how many.
    ///
    /// # Errors
    /// Those of [`Verbs::poll_cq`].
    pub fn poll<V: Verbs + ?Sized>(
        self,
        verbs: &mut V,
        cq: CqId,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        verbs.poll_cq(cq, self.budget(), out)
    }

    /// Whether a queue needs another turn after one that took `taken` completions, which have been
    /// handled. Otherwise it has an event when there are more, if it has events at all. It is armed
    /// only once it is empty, since an event for what is there already would cost a system call.
    pub fn has_more<V: Verbs + ?Sized>(self, verbs: &mut V, cq: CqId, taken: usize) -> bool {
        // A queue that cannot be armed is one that was destroyed meanwhile.
        let mut arm = || verbs.req_notify_cq(cq, Notify::Next).unwrap_or(false);
        taken == self.budget() || self.has_events() && arm()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Endpoint, FabricConfig, Pair};
    use crate::verbs::{QpAttr, QpCap, QpId, QpInitAttr, QpState, QpType, RecvWr, WrId};

    /// A queue whose completions are receives that are flushed.
    fn queue(nic: &mut Endpoint) -> (CqId, QpId) {
        let pd = nic.alloc_pd().unwrap();
        let cq = nic.create_cq(256).unwrap();
        let cap = QpCap::new(1, 128);
        let init = QpInitAttr::new(pd, cq, QpType::Uc, cap);
        let qp = nic.create_qp(&init).unwrap();
        let error = QpAttr::to(QpState::Error);
        nic.modify_qp(qp, &error).unwrap();
        (cq, qp)
    }

    fn complete(nic: &mut Endpoint, qp: QpId, n: u64) {
        for n in 0..n {
            let wr_id = WrId(n);
            nic.post_recv(qp, &[RecvWr { wr_id, sges: &[] }]).unwrap();
        }
    }

    #[test]
    fn a_queue_has_turns_until_it_is_empty_and_then_an_event() {
        let nic = &mut Pair::new(FabricConfig::default()).a;
        let (cq, qp) = queue(nic);
        let context = PollContext::Softirq;
        let mut out = Vec::new();
        assert!(!context.has_more(nic, cq, 0), "armed");
        complete(nic, qp, 40);
        assert_eq!(nic.poll_cq_event(), Some(cq));
        assert_eq!(context.poll(nic, cq, &mut out), Ok(32));
        assert!(context.has_more(nic, cq, 32));
        assert_eq!(context.poll(nic, cq, &mut out), Ok(8));
        // What has come meanwhile is no event, but another turn.
        complete(nic, qp, 1);
        assert!(context.has_more(nic, cq, 8));
        assert_eq!(context.poll(nic, cq, &mut out), Ok(1));
        assert!(!context.has_more(nic, cq, 1));
        assert_eq!((out.len(), nic.poll_cq_event()), (41, None));
        complete(nic, qp, 1);
        assert_eq!(nic.poll_cq_event(), Some(cq));
    }

    #[test]
    fn work_is_taken_at_once_and_a_queue_without_events_has_none() {
        let nic = &mut Pair::new(FabricConfig::default()).a;
        let (cq, qp) = queue(nic);
        let mut out = Vec::new();
        complete(nic, qp, 100);
        assert_eq!(PollContext::Workqueue.poll(nic, cq, &mut out), Ok(100));
        let direct = PollContext::Direct { budget: 4 };
        complete(nic, qp, 5);
        assert_eq!(direct.poll(nic, cq, &mut out), Ok(4));
        assert!(direct.has_more(nic, cq, 4));
        assert_eq!(direct.poll(nic, cq, &mut out), Ok(1));
        assert!(!direct.has_more(nic, cq, 1));
        complete(nic, qp, 1);
        assert_eq!(nic.poll_cq_event(), None);
        nic.destroy_qp(qp).unwrap();
        nic.destroy_cq(cq).unwrap();
        assert!(!PollContext::Softirq.has_more(nic, cq, 0));
    }
}
