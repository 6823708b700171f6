//! The states of identifiers, between two devices that hand each other their packets.

use std::time::{Duration, Instant};

use riser_state::testing::{assert_all_taken, table};

use super::state::IdState::{
    self, Accepting, AddrResolved, Bound, Closed, Connecting, Disconnecting, Established, Idle,
    Listening, Requested, RouteResolved,
};
use super::*;
use crate::roce::batch::TxBatch;
use crate::roce::nic::{Nic, NicConfig};
use crate::verbs::{CmEventKind, Mtu, QpCap, QpInitAttr, QpType};

const STATES: [IdState; 11] = [
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    Connecting,
    Requested,
    Accepting,
    Established,
    Disconnecting,
    Closed,
];

struct Two {
    a: Nic,
    b: Nic,
    now: Instant,
}

impl Two {
    /// Two devices, of which the second listens on port 4000 and carries less.
    fn new() -> Self {
        let now = Instant::now();
        let nic = |host| Nic::new(NicConfig::new([10, 0, 0, host].into(), [host; 32]), now);
        let mut two = Self {
            a: nic(1),
            b: nic(2),
            now,
        };
        two.b.set_mtu(Mtu::Mtu512);
        let id = two.b.create_id(PortSpace::Tcp).unwrap();
        two.b.bind_addr(id, ([10, 0, 0, 2], 4000).into()).unwrap();
        two.b.listen(id, 8).unwrap();
        two
    }

    /// Hands packets over until there are none.
    fn exchange(&mut self) {
        while hand_over(self.now, &mut self.a, &mut self.b)
            + hand_over(self.now, &mut self.b, &mut self.a)
            > 0
        {}
    }

    /// Begins a connection; the identifiers of both ends.
    fn connect(&mut self) -> (CmId, CmId) {
        let id = resolved(&mut self.a);
        with_qp(&mut self.a, id);
        self.a.connect(id, &ConnParam::default()).unwrap();
        self.exchange();
        let request = std::iter::from_fn(|| self.b.poll_cm_event())
            .find(|e| matches!(e.kind, CmEventKind::ConnectRequest { .. }))
            .expect("a request");
        with_qp(&mut self.b, request.id);
        (id, request.id)
    }
}

fn hand_over(now: Instant, from: &mut Nic, to: &mut Nic) -> usize {
    let mut batch = TxBatch::new(1);
    from.poll_transmit(now, &mut batch, 1 << 20);
    let packets: Vec<_> = batch
        .groups()
        .iter()
        .flat_map(|g| batch.copy_packets(g))
        .collect();
    for packet in &packets {
        to.handle_datagram(now, from.local_addr(), packet.len(), packet);
    }
    packets.len()
}

fn resolved(nic: &mut Nic) -> CmId {
    let id = nic.create_id(PortSpace::Tcp).unwrap();
    let wait = Duration::from_secs(1);
    nic.resolve_addr(id, None, ([10, 0, 0, 2], 4000).into(), wait)
        .unwrap();
    nic.resolve_route(id, wait).unwrap();
    id
}

fn with_qp(nic: &mut Nic, id: CmId) {
    let (pd, send_cq) = (nic.alloc_pd().unwrap(), nic.create_cq(8).unwrap());
    let init = QpInitAttr {
        recv_cq: nic.create_cq(8).unwrap(),
        ..QpInitAttr::new(pd, send_cq, QpType::Rc, QpCap::new(2, 2))
    };
    nic.create_cm_qp(id, &init).unwrap();
}

#[test]
fn the_table_is_the_diagram() {
    let expected = "Idle: Bound AddrResolved Listening\n\
                    Bound: AddrResolved Listening\n\
                    AddrResolved: RouteResolved\n\
                    RouteResolved: Connecting\n\
                    Listening: \n\
                    Connecting: Connecting Established Closed\n\
                    Requested: Accepting Closed\n\
                    Accepting: Established Closed\n\
                    Established: Disconnecting Closed\n\
                    Disconnecting: Closed\n\
                    Closed: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn every_transition_is_taken() {
    assert_all_taken(&STATES, || {
        let two = &mut Two::new();
        // Accepted, after a second request with the smaller path MTU, and ended by the active side.
        let (a, b) = two.connect();
        two.b.accept(b, &ConnParam::default()).unwrap();
        two.exchange();
        two.a.disconnect(a).unwrap();
        two.exchange();
        // Refused.
        let (_, b) = two.connect();
        two.b.reject(b, &[]).unwrap();
        two.exchange();
        // Given up on either side before it is established.
        let (a, b) = two.connect();
        two.b.accept(b, &ConnParam::default()).unwrap();
        two.b.disconnect(b).unwrap();
        two.a.disconnect(a).unwrap();
        two.exchange();
        // Addresses that are bound first, and a service id that needs none.
        let id = two.a.create_id(PortSpace::Tcp).unwrap();
        two.a.bind_addr(id, ([10, 0, 0, 1], 0).into()).unwrap();
        let (to, wait) = (([10, 0, 0, 2], 4000).into(), Duration::from_secs(1));
        two.a.resolve_addr(id, None, to, wait).unwrap();
        let space = PortSpace::Ib {
            service_id: 7,
            mask: u64::MAX,
        };
        let id = two.a.create_id(space).unwrap();
        two.a.listen(id, 1).unwrap();
    });
}

/// The IB CM may give a finished id to another connection, which must not end with this one.
#[test]
fn a_refused_request_that_cannot_be_sent_again_leaves_no_id() {
    let two = &mut Two::new();
    let id = resolved(&mut two.a);
    with_qp(&mut two.a, id);
    two.a.connect(id, &ConnParam::default()).unwrap();
    let qp = two.a.cm.ids.get(id).unwrap().qp.unwrap();
    // Without it there is nothing to ask for again.
    two.a.destroy_qp(qp).unwrap();
    two.exchange();
    let events: Vec<_> = std::iter::from_fn(|| two.a.poll_cm_event()).collect();
    assert!(
        matches!(events.last().unwrap().kind, CmEventKind::Rejected { .. }),
        "{events:?}"
    );
    assert_eq!(two.a.cm.ids.get(id).unwrap().ib, None);
    assert!(two.a.cm.by_ib.is_empty());
}
