//! Extended reliable connections (IBTA annex A14).
//!
//! An XRC domain contains shared receive queues and the receiving side of connections, called
//! targets. Each request specifies the number of a queue: a receive from this queue will be used,
//! it is completed in the completion queue assigned to this queue, and keys are checked against its
//! protection domain. As a result, a peer only needs a single connection per host instead of one
//! for each process, since each process can have its own shared receive queue.
//!
//! XRC is not supported by Linux `rdma_rxe`.

use super::qp::Machine;
use super::rx::RxOutcome;
use super::{Nic, with_env};
use crate::rc::Env;
use crate::verbs::{QpId, QpType};
use crate::wire::Packet;

impl Nic {
    /// Passes a verified packet to an extended connection. This will return `None` if it is not
    /// accepted.
    pub(super) fn hand_over_xrc(&mut self, id: QpId, packet: &Packet<'_>) -> Option<RxOutcome> {
        let now = self.device.now();
        let qp = self.device.qps.get(id).ok()?;
        // Requests must be sent to a target, and responses to an initiator.
        if packet.op.is_request() != (qp.qp_type == QpType::XrcTgt) {
            self.device.counters.rx_unknown_qp += 1;
            return None;
        }
        let number = packet.ext.xrc.map(|eth| eth.srqn());
        let named = number.zip(qp.xrcd);
        let named = named.and_then(|(number, xrcd)| self.device.srqs.find_xrc(xrcd, number));
        let qp = self.device.qps.get_mut(id).ok()?;
        let Machine::Xrc(rc) = &mut qp.machine else {
            return None;
        };
        // A message always uses the queue that its receive was taken from. We only need to check
        // the next expected request: if it has already been received, the response is sent again
        // regardless of the queue number.
        let mut is_refused = false;
        match named {
            Some((srq, pd)) if !rc.has_receive() || qp.srq == Some(srq) => {
                qp.srq = Some(srq);
                rc.set_domain(pd);
            }
            _ => is_refused = packet.op.is_request() && rc.expects(packet.bth.psn()),
        }
        with_env!(self.device, qp, env);
        let mut is_first = qp.awaits_first_packet;
        if let Machine::Xrc(rc) = &mut qp.machine {
            if is_refused {
                rc.refuse_expected(now, &mut env);
            } else {
                rc.handle_packet(now, packet, &mut env);
            }
            is_first &= rc.has_received();
        }
        qp.awaits_first_packet &= !is_first;
        // Its events must be assigned to the queue specified by this packet.
        self.device.finish_turn(id);
        Some(RxOutcome {
            is_peer: true,
            is_first,
        })
    }
}
