//! Two providers and a way to drive them, used by all tests of the suite.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_transport::verbs::{
    Access, AsyncEvent, CmEvent, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PdId,
    PortSpace, Provider, QpCap, QpId, QpInitAttr, QpType, RdmaCm as _, RecvOrder, RecvWr,
    RemoteAddr, SendOp, SendWr, Sge, SrqId, Verbs as _, WrId,
};

/// Selects one of the two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    A,
    B,
}

/// Two devices that can reach each other.
pub(crate) trait World {
    type P: Provider + ?Sized;

    fn provider(&mut self, end: End) -> &mut Self::P;
    fn addr(&self, end: End) -> IpAddr;
    /// Drives both devices, and advances time slightly if they are idle.
    fn step(&mut self);
    /// Returns the time of the devices.
    fn now(&self) -> Instant;

    /// Returns whether a device uses rdma-core's libraries, so that it only supports calls
    /// implemented by `riser_transport::rdma_core`.
    fn is_rdma_core(&mut self, end: End) -> bool {
        self.provider(end).device_attr().provider == "rdma_core"
    }

    /// Returns whether the device is `rdma_rxe`, whose differences are documented in that module.
    /// Our own libraries (`riser-rdma-compat`) have no differences.
    fn is_rxe(&mut self, end: End) -> bool {
        self.is_rdma_core(end) && self.provider(end).device_attr().name.starts_with("rxe")
    }

    /// Returns whether a device uses iWARP, which has no SENDs with immediate data, and completes
    /// SENDs and WRITEs before the peer has received them.
    fn is_iwarp(&mut self, end: End) -> bool {
        let attr = self.provider(end).device_attr();
        attr.provider == "iwarp" || attr.name.starts_with("siw")
    }

    /// Returns whether a device is Linux' iWARP device, used through rdma-core.
    fn is_siw(&mut self, end: End) -> bool {
        self.is_rdma_core(end) && self.is_iwarp(end)
    }

    /// Returns whether both ends support immediate data and atomics. Linux' iWARP device does not.
    fn has_immediate_data(&mut self) -> bool {
        ![End::A, End::B].into_iter().any(|end| self.is_siw(end))
    }

    /// Returns the next RDMA CM event of a device.
    fn poll_cm_event(&mut self, end: End) -> Option<CmEvent> {
        self.provider(end).poll_cm_event()
    }

    /// Timeout for all operations, in the devices' time.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// Drives the devices until `done` returns a value, or panics after the timeout.
    fn until<T>(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T
    where
        Self: Sized,
    {
        let end = self.now() + self.patience();
        loop {
            if let Some(t) = done(self) {
                return t;
            }
            assert!(self.now() < end, "no effect: {what}");
            self.step();
        }
    }

    /// Drives the devices for a period of time.
    fn pass(&mut self, time: Duration)
    where
        Self: Sized,
    {
        let end = self.now() + time;
        while self.now() < end {
            self.step();
        }
    }
}

/// Memory size of each side, in bytes.
pub(crate) const REGION: usize = 1 << 20;

/// Objects of a device for a test: a domain, a queue, a region, and a connected queue pair.
pub(crate) struct Side {
    pub(crate) end: End,
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) memory: Memory,
    pub(crate) mr: Mr,
    pub(crate) qp: QpId,
    pub(crate) id: CmId,
}

/// Parameters of a test's connection.
#[derive(Clone)]
pub(crate) struct Wants {
    pub(crate) cqe: u32,
    pub(crate) cap: QpCap,
    pub(crate) region: usize,
    pub(crate) srq: Option<SrqId>,
    pub(crate) param: ConnParam,
}

impl Default for Wants {
    fn default() -> Self {
        Self {
            cqe: 256,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
            region: REGION,
            srq: None,
            param: ConnParam::default(),
        }
    }
}

impl Side {
    pub(crate) fn sge(&self, offset: usize, length: usize) -> Sge {
        self.mr.sge(offset, length)
    }

    pub(crate) fn remote(&self, offset: usize) -> RemoteAddr {
        self.mr.remote(offset)
    }

    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.slice(offset, length).to_vec()
    }

    pub(crate) fn slice(&self, offset: usize, length: usize) -> MemSlice {
        self.memory.slice(offset..offset + length).unwrap()
    }

    pub(crate) fn send<W: World>(
        &self,
        w: &mut W,
        wr_id: u64,
        op: SendOp,
        offset: usize,
        length: usize,
    ) {
        let sges = [self.sge(offset, length)];
        let sges = if length == 0 { &[][..] } else { &sges };
        let wr = SendWr::new(wr_id, op, sges);
        w.provider(self.end).post_send(self.qp, &[wr]).unwrap();
    }

    pub(crate) fn recv<W: World>(&self, w: &mut W, wr_id: u64, offset: usize, length: usize) {
        let sges = [self.sge(offset, length)];
        let wr = RecvWr {
            wr_id: WrId(wr_id),
            sges: &sges,
        };
        w.provider(self.end).post_recv(self.qp, &[wr]).unwrap();
    }

    /// Returns the next `n` completions.
    pub(crate) fn completions<W: World>(&self, w: &mut W, n: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        w.until("completions", |w| {
            let left = n - out.len();
            w.provider(self.end)
                .poll_cq(self.cq, left, &mut out)
                .unwrap();
            (out.len() == n).then_some(())
        });
        out
    }

    pub(crate) fn completion<W: World>(&self, w: &mut W) -> Completion {
        self.completions(w, 1).remove(0)
    }

    /// Returns the next asynchronous event.
    pub(crate) fn event<W: World>(&self, w: &mut W) -> AsyncEvent {
        w.until("an asynchronous event", |w| {
            w.provider(self.end).poll_async_event()
        })
    }
}

/// Creates all objects except the queue pair.
pub(crate) fn objects<W: World>(w: &mut W, end: End, wants: &Wants) -> (PdId, CqId, Memory, Mr) {
    let p = w.provider(end);
    let pd = p.alloc_pd().unwrap();
    let cq = p.create_cq(wants.cqe).unwrap();
    let memory = Memory::new(wants.region).unwrap();
    let all = Access::LOCAL_WRITE | Access::REMOTE;
    let mr = p.reg_mr(pd, &memory.whole(), all).unwrap();
    (pd, cq, memory, mr)
}

pub(crate) fn init_attr(pd: PdId, cq: CqId, wants: &Wants) -> QpInitAttr {
    QpInitAttr {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: wants.srq,
        qp_type: QpType::Rc,
        cap: wants.cap,
        sq_sig_all: false,
        xrcd: None,
        recv_order: RecvOrder::OldestFirst,
        block_self_mcast: false,
    }
}

/// Creates a queue pair for an identifier.
pub(crate) fn create_cm_qp<W: World>(w: &mut W, end: End, id: CmId) -> QpId {
    let (pd, cq, ..) = objects(w, end, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    w.provider(end).create_cm_qp(id, &init).unwrap()
}

/// Returns the next RDMA CM event.
pub(crate) fn cm_event<W: World>(w: &mut W, end: End) -> CmEvent {
    w.until("an event of the RDMA CM", |w| w.poll_cm_event(end))
}

/// Consumes the events of a connection that was closed by an error, as with iWARP.
pub(crate) fn ended<W: World>(w: &mut W) {
    if w.is_iwarp(End::A) {
        for end in [End::A, End::B] {
            assert_eq!(cm_event(w, end).kind, CmEventKind::Disconnected);
            // Kernels have no second event with iWARP.
            if !w.is_rdma_core(end) {
                assert_eq!(cm_event(w, end).kind, CmEventKind::TimewaitExit);
            }
        }
    }
}

/// Creates a listener at a device.
pub(crate) fn listen<W: World>(w: &mut W, end: End, port: u16) -> CmId {
    listen_in(w, PortSpace::Tcp, end, port)
}

/// Creates a listener at a device, in a port space.
pub(crate) fn listen_in<W: World>(w: &mut W, space: PortSpace, end: End, port: u16) -> CmId {
    let addr = SocketAddr::new(w.addr(end), port);
    let p = w.provider(end);
    let listener = p.create_id(space).unwrap();
    p.bind_addr(listener, addr).unwrap();
    p.listen(listener, 8).unwrap();
    listener
}

/// Creates a listener on port 4000 of B for queue pairs of this type.
pub(crate) fn listen_for<W: World>(w: &mut W, qp_type: QpType) -> CmId {
    let addr = SocketAddr::new(w.addr(End::B), 4000);
    let p = w.provider(End::B);
    let listener = p.create_id_for(PortSpace::IbIp, qp_type).unwrap();
    p.bind_addr(listener, addr).unwrap();
    p.listen(listener, 8).unwrap();
    listener
}

/// Creates an identifier of A for queue pairs of this type, and resolves port 4000 of B.
pub(crate) fn resolve_for<W: World>(w: &mut W, qp_type: QpType) -> CmId {
    let p = w.provider(End::A);
    let id = p.create_id_for(PortSpace::IbIp, qp_type).unwrap();
    resolve_id(w, id, 4000);
    id
}

/// Creates an identifier of A and resolves B's port.
pub(crate) fn resolve<W: World>(w: &mut W, port: u16) -> CmId {
    resolve_in(w, PortSpace::Tcp, port)
}

/// Creates an identifier of A in a port space, and resolves B's port.
pub(crate) fn resolve_in<W: World>(w: &mut W, space: PortSpace, port: u16) -> CmId {
    let id = w.provider(End::A).create_id(space).unwrap();
    resolve_id(w, id, port);
    id
}

/// Resolves B's port for an identifier of A.
fn resolve_id<W: World>(w: &mut W, id: CmId, port: u16) {
    let dst = SocketAddr::new(w.addr(End::B), port);
    let wait = Duration::from_secs(2);
    w.provider(End::A)
        .resolve_addr(id, None, dst, wait)
        .unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::AddrResolved);
    w.provider(End::A).resolve_route(id, wait).unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::RouteResolved);
}

/// Creates a listener and connects A to B on `port`. Afterwards, no events are pending unless there
/// is an error.
pub(crate) fn connect_on<W: World>(w: &mut W, port: u16, a: &Wants, b: &Wants) -> (Side, Side) {
    let listener = listen(w, End::B, port);
    let sides = connect_to(w, port, a, b);
    w.provider(End::B).destroy_id(listener).unwrap();
    sides
}

/// Connects A to an existing listener of B.
pub(crate) fn connect_to<W: World>(w: &mut W, port: u16, a: &Wants, b: &Wants) -> (Side, Side) {
    let id = resolve(w, port);
    let (pd, cq, memory, mr) = objects(w, End::A, a);
    let qp = w
        .provider(End::A)
        .create_cm_qp(id, &init_attr(pd, cq, a))
        .unwrap();
    w.provider(End::A).connect(id, &a.param).unwrap();
    let side_a = Side {
        end: End::A,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    };
    let request = cm_event(w, End::B);
    assert!(
        matches!(request.kind, CmEventKind::ConnectRequest { .. }),
        "{request:?}"
    );
    let (pd, cq, memory, mr) = objects(w, End::B, b);
    let id = request.id;
    let qp = w
        .provider(End::B)
        .create_cm_qp(id, &init_attr(pd, cq, b))
        .unwrap();
    w.provider(End::B).accept(id, &b.param).unwrap();
    let side_b = Side {
        end: End::B,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    };
    for end in [End::A, End::B] {
        let event = cm_event(w, end);
        assert!(
            matches!(event.kind, CmEventKind::Established { .. }),
            "{event:?}"
        );
    }
    (side_a, side_b)
}

/// Establishes a connection with default parameters.
pub(crate) fn connected<W: World>(w: &mut W) -> (Side, Side) {
    connect_on(w, 5000, &Wants::default(), &Wants::default())
}

/// Returns bytes that depend on their position.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}
