//! Connection setup for an RDMA initiator: resolves the address and route and creates a queue pair.

use std::net::SocketAddr;
use std::time::Duration;

use riser_transport::verbs::{
    CmEvent, CmEventKind, CmId, CqId, PdId, PortSpace, Provider, QpCap, QpId, QpInitAttr, QpType,
};

/// Called while the initiator is waiting, to drive the other side.
pub type Pump<'a, P> = &'a mut dyn FnMut(&mut P);

/// A connection that is ready to send a connection request.
pub(crate) struct Dialed {
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) cm: CmId,
    pub(crate) qp: QpId,
}

/// Resolves the route to a target, then creates a queue pair with this number of send and receive
/// work requests and a single completion queue.
pub(crate) fn dial<P: Provider>(
    dev: &mut P,
    space: PortSpace,
    dst: SocketAddr,
    (max_send_wr, max_recv_wr): (u32, u32),
    pump: Pump<'_, P>,
) -> Dialed {
    let pd = dev.alloc_pd().unwrap();
    let cq = dev.create_cq(1024).unwrap();
    let cm = dev.create_id(space).unwrap();
    let second = Duration::from_secs(1);
    dev.resolve_addr(cm, None, dst, second).unwrap();
    assert_eq!(wait_event(dev, pump).kind, CmEventKind::AddrResolved);
    dev.resolve_route(cm, second).unwrap();
    assert_eq!(wait_event(dev, pump).kind, CmEventKind::RouteResolved);
    let cap = QpCap::new(max_send_wr, max_recv_wr);
    let init = QpInitAttr::new(pd, cq, QpType::Rc, cap);
    let qp = dev.create_cm_qp(cm, &init).unwrap();
    Dialed { pd, cq, cm, qp }
}

pub(crate) fn wait_event<P: Provider>(dev: &mut P, pump: Pump<'_, P>) -> CmEvent {
    for _ in 0..2_000_000 {
        if let Some(event) = dev.poll_cm_event() {
            return event;
        }
        pump(dev);
    }
    panic!("no connection event");
}
