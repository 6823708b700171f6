//! Hardware failures for use by the simulator.

use super::Device;
use crate::nic::qp::{Machine, Qp};
use crate::verbs::{AsyncEvent, CqId, QpId, QpState};

/// Type of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breakage {
    /// QP error, as if the device had lost its state. No completion reports the reason.
    Qp,
    /// CQ error, as if the queue had been full.
    Cq,
}

impl Qp {
    fn is_connected(&self) -> bool {
        matches!(self.machine, Machine::Rc(_)) && self.state() == QpState::Rts
    }
}

impl Device {
    /// Returns whether this is a connected QP.
    pub fn is_connection(&self, qp: QpId) -> bool {
        let qp = self.qps.get(qp);
        qp.is_ok_and(|qp| matches!(qp.machine, Machine::Rc(_)))
    }

    /// Reports that the device and all its objects have been lost, as if the device had been
    /// unplugged. Pending work will not complete.
    pub fn pull_out(&mut self) {
        self.events.raise(AsyncEvent::DeviceFatal);
    }

    /// Breaks connected QP number `nth` (modulo the number of QPs), or the receive CQ. This will
    /// return `false` if there is no connected QP.
    pub fn break_one(&mut self, what: Breakage, nth: usize) -> bool {
        let connected = self.qps.iter().filter(|(_, qp)| qp.is_connected());
        let connected: Vec<(QpId, CqId)> = connected.map(|(id, qp)| (id, qp.recv_cq)).collect();
        let Some((qp, cq)) = connected.get(nth % connected.len().max(1)).copied() else {
            return false;
        };
        match what {
            Breakage::Qp => {
                self.fail_qp(qp);
                self.events.raise(AsyncEvent::QpFatal(qp));
            }
            Breakage::Cq => {
                if self.cqs.overrun(cq) {
                    self.on_overrun(cq);
                    self.fail_users(cq);
                }
            }
        }
        true
    }
}
