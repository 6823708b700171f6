//! Contexts for handling the completions of a queue (see `enum ib_poll_context` in Linux).
//!
//! ```text
//! event → turn → more? → waits for its next turn
//!   ↑       └──→ empty: armed
//!   └──────────────┘
//! ```

use super::{Completion, CqId, Notify, Verbs, VerbsError};

/// Context for handling the completions of a queue. Since there are no interrupts or work queues,
/// this is used by a loop to schedule multiple queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PollContext {
    /// The loop can poll completions at any time, like `ib_process_cq_direct`. There are no events.
    Direct {
        /// Maximum number of completions per turn.
        budget: usize,
    },
    /// After an event, in turns with other queues, so that no queue has to wait for long. Used for
    /// data (`IB_POLL_SOFTIRQ`).
    Softirq,
    /// After an event, all available completions at once. Used if there are few completions that
    /// can take long to handle (`IB_POLL_WORKQUEUE`).
    Workqueue,
}

impl PollContext {
    /// Returns the maximum number of completions per turn.
    #[must_use]
    pub const fn budget(self) -> usize {
        match self {
            Self::Direct { budget } => budget,
            Self::Softirq => 32,
            Self::Workqueue => 1024,
        }
    }

    /// Returns whether the queue uses events.
    #[must_use]
    pub const fn has_events(self) -> bool {
        !matches!(self, Self::Direct { .. })
    }

    /// Polls the completions for a single turn and appends them to `out`. Returns the number of
    /// completions.
    ///
    /// # Errors
    /// Returns an error from [`Verbs::poll_cq`].
    pub fn poll<V: Verbs + ?Sized>(
        self,
        verbs: &mut V,
        cq: CqId,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        verbs.poll_cq(cq, self.budget(), out)
    }

    /// Returns true if the queue needs another turn after `taken` completions were handled.
    /// Otherwise there will be an event for the next completion, if events are used. We only arm an
    /// empty queue, because an event for existing completions would need a system call.
    pub fn has_more<V: Verbs + ?Sized>(self, verbs: &mut V, cq: CqId, taken: usize) -> bool {
        // If the queue can't be armed, it has been destroyed in the meantime.
        let mut arm = || verbs.req_notify_cq(cq, Notify::Next).unwrap_or(false);
        taken == self.budget() || self.has_events() && arm()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::{Endpoint, FabricConfig, Pair};
    use crate::verbs::{QpAttr, QpCap, QpId, QpInitAttr, QpState, QpType, RecvWr, WrId};

    /// Creates a queue and a queue pair to flush receives.
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
    fn queue_is_armed_when_empty() {
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
        // A new completion must not cause an event but another turn.
        complete(nic, qp, 1);
        assert!(context.has_more(nic, cq, 8));
        assert_eq!(context.poll(nic, cq, &mut out), Ok(1));
        assert!(!context.has_more(nic, cq, 1));
        assert_eq!((out.len(), nic.poll_cq_event()), (41, None));
        complete(nic, qp, 1);
        assert_eq!(nic.poll_cq_event(), Some(cq));
    }

    #[test]
    fn workqueue_polls_all_and_direct_never_arms() {
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
