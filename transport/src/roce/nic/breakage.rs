//! Failures of hardware that a simulation asks for.

use super::{Machine, Nic, Qp};
use crate::roce::cq::Cq;
use crate::verbs::{AsyncEvent, CqId, QpId, QpState};

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breakage {
    /// A queue pair, as if the device had lost its state: no completion says why.
    Qp,
    /// A completion queue, as if a completion had found no room.
    Cq,
}

impl Qp {
    fn is_connected(&self) -> bool {
        matches!(self.machine, Machine::Rc(_)) && self.state() == QpState::Rts
    }
}

impl Nic {
    /// Whether a queue pair is that of a connection.
    pub fn is_connection(&self, qp: QpId) -> bool {
        let qp = self.qps.get(qp);
        qp.is_ok_and(|qp| matches!(qp.machine, Machine::Rc(_)))
    }

    /// Reports that the device is gone, with everything on it, as if it had been pulled out: nothing
    /// on it completes.
    pub fn pull_out(&mut self) {
        self.raise(AsyncEvent::DeviceFatal);
    }

    /// Breaks the `nth` of the connected queue pairs, counted around, or the queue of its receives.
    /// Returns whether there is one.
    pub fn break_one(&mut self, what: Breakage, nth: usize) -> bool {
        let connected = self.qps.iter().filter(|(_, qp)| qp.is_connected());
        let connected: Vec<(QpId, CqId)> = connected.map(|(id, qp)| (id, qp.recv_cq)).collect();
        let Some((qp, cq)) = connected.get(nth % connected.len().max(1)).copied() else {
            return false;
        };
        match what {
            Breakage::Qp => {
                self.fail_qp(qp);
                self.raise(AsyncEvent::QpFatal(qp));
            }
            Breakage::Cq => {
                if self.cqs.get_mut(cq).is_ok_and(Cq::overrun) {
                    self.on_overrun(cq);
                    self.fail_users(cq);
                }
            }
        }
        true
    }
}
