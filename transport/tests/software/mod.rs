//! Worlds of the software NIC: an in-memory wire, sockets, and shared memory.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use riser_transport::iwarp::{Iwarp, IwarpConfig};
use riser_transport::loopback::{Endpoint, FabricConfig, Pair};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::shm::{Shm, ShmConfig};
use riser_transport::verbs::{
    Access, AhAttr, CmEvent, CmEventKind, CmId, Mtu, Provider, QpAttr, QpState, RdmaCm as _,
};

use crate::suite::world::{End, World};

/// In memory, under a virtual clock.
pub(crate) struct Virtual(pub(crate) Pair);

impl Virtual {
    pub(crate) fn new(config: FabricConfig) -> Self {
        Self(Pair::new(config))
    }
}

impl World for Virtual {
    type P = Endpoint;

    fn provider(&mut self, end: End) -> &mut Endpoint {
        match end {
            End::A => &mut self.0.a,
            End::B => &mut self.0.b,
        }
    }

    fn addr(&self, end: End) -> IpAddr {
        match end {
            End::A => self.0.a.addr(),
            End::B => self.0.b.addr(),
        }
    }

    fn step(&mut self) {
        let limit = self.0.fabric.now() + Duration::from_millis(1);
        if self.0.step() == 0 && !self.0.step_to_next(limit) {
            self.0.fabric.advance_to(limit);
        }
    }

    fn now(&self) -> Instant {
        self.0.fabric.now()
    }
}

/// Two devices of the same kind on this host. The second may be in the namespace `at_b`.
pub(crate) struct Two<D, N = ()> {
    pub(crate) a: D,
    pub(crate) b: D,
    pub(crate) at_b: N,
}

/// Over real sockets on the loopback interface, or on an interface in a namespace.
pub(crate) type Real<N = ()> = Two<Roce, N>;

/// Over shared memory: two devices of this process, which are nevertheless peers.
pub(crate) type Shared = Two<Shm>;

/// Over TCP: two iWARP devices.
pub(crate) type Streams = Two<Iwarp>;

/// A device that may exist twice on a host.
pub(crate) trait OnHost: Provider {
    /// Timeout for all operations.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn ip(&self) -> IpAddr;
}

impl OnHost for Roce {
    fn ip(&self) -> IpAddr {
        self.socket_addr().ip()
    }
}

impl OnHost for Shm {
    fn ip(&self) -> IpAddr {
        self.addr()
    }
}

impl OnHost for Iwarp {
    const PATIENCE: Duration = Duration::from_secs(10);

    fn ip(&self) -> IpAddr {
        self.addr()
    }
}

impl<D: OnHost, N> World for Two<D, N> {
    type P = D;

    fn provider(&mut self, end: End) -> &mut D {
        match end {
            End::A => &mut self.a,
            End::B => &mut self.b,
        }
    }

    fn addr(&self, end: End) -> IpAddr {
        match end {
            End::A => self.a.ip(),
            End::B => self.b.ip(),
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        if self.a.progress(now) + self.b.progress(now) == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn patience(&self) -> Duration {
        D::PATIENCE
    }
}

/// Returns two loopback addresses that are not used by other tests of this process, nor by other
/// processes unless their process IDs collide.
pub(crate) fn addresses() -> (IpAddr, IpAddr) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let base = 0x7f10_0000 + (std::process::id() % 0x6fff) * 0x100 + n * 2;
    (
        Ipv4Addr::from(base + 1).into(),
        Ipv4Addr::from(base + 2).into(),
    )
}

/// Opens a device on the loopback interface, configured by `change`.
pub(crate) fn device(change: impl Fn(&mut RoceConfig)) -> Roce {
    let mut config = RoceConfig::new(addresses().0);
    change(&mut config);
    Roce::open(&config).expect("a device on the loopback interface")
}

impl Real {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// Opens devices configured by `change`.
    pub(crate) fn with(change: impl Fn(&mut RoceConfig)) -> Self {
        let (a, b) = addresses();
        Self::at(a, b, change).expect("devices on the loopback interface")
    }

    pub(crate) fn at(
        a: IpAddr,
        b: IpAddr,
        change: impl Fn(&mut RoceConfig),
    ) -> std::io::Result<Self> {
        let open = |addr| {
            let mut config = RoceConfig::new(addr);
            change(&mut config);
            Roce::open(&config)
        };
        Ok(Self {
            a: open(a)?,
            b: open(b)?,
            at_b: (),
        })
    }
}

/// A device that can be its own peer, and a function to drive it.
pub(crate) trait Alone {
    type Device: Provider;

    fn device(&mut self) -> &mut Self::Device;
    fn addr(&self) -> IpAddr;
    fn step(&mut self);
    fn now(&self) -> Instant;
}

impl Alone for Roce {
    type Device = Self;

    fn device(&mut self) -> &mut Self {
        self
    }

    fn addr(&self) -> IpAddr {
        self.socket_addr().ip()
    }

    fn step(&mut self) {
        if self.progress(Instant::now()) == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// Uses only one device of a pair.
impl Alone for Pair {
    type Device = Endpoint;

    fn device(&mut self) -> &mut Endpoint {
        &mut self.a
    }

    fn addr(&self) -> IpAddr {
        self.a.addr()
    }

    fn step(&mut self) {
        let limit = self.fabric.now() + Duration::from_millis(1);
        if Pair::step(self) == 0 && !self.step_to_next(limit) {
            self.fabric.advance_to(limit);
        }
    }

    fn now(&self) -> Instant {
        self.fabric.now()
    }
}

/// A single device as both ends.
pub(crate) struct Itself<D> {
    device: D,
    /// Identifiers created by connection requests. They belong to end B, which listens.
    requested: HashSet<CmId>,
    /// Events that belong to the other end.
    events: VecDeque<CmEvent>,
}

impl<D: Alone> Itself<D> {
    pub(crate) fn new(device: D) -> Self {
        Self {
            device,
            requested: HashSet::new(),
            events: VecDeque::new(),
        }
    }
}

impl<D: Alone> World for Itself<D> {
    type P = D::Device;

    fn provider(&mut self, _: End) -> &mut D::Device {
        self.device.device()
    }

    fn addr(&self, _: End) -> IpAddr {
        self.device.addr()
    }

    fn step(&mut self) {
        self.device.step();
    }

    fn now(&self) -> Instant {
        self.device.now()
    }

    fn poll_cm_event(&mut self, end: End) -> Option<CmEvent> {
        while let Some(event) = self.device.device().poll_cm_event() {
            if matches!(event.kind, CmEventKind::ConnectRequest { .. }) {
                self.requested.insert(event.id);
            }
            self.events.push_back(event);
        }
        let is_wanted = |e: &CmEvent| self.requested.contains(&e.id) == (end == End::B);
        let at = self.events.iter().position(is_wanted)?;
        self.events.remove(at)
    }
}

/// Returns the attributes to move a queue pair to RTS, with queue pair `number` at an address as
/// its peer.
pub(crate) fn connected_steps(peer: IpAddr, number: u32) -> [QpAttr; 3] {
    [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr::new(peer.into())),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(number),
            rq_psn: Some(5),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(5),
            max_rd_atomic: Some(4),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..QpAttr::to(QpState::Rts)
        },
    ]
}

impl Shared {
    pub(crate) fn new() -> Self {
        let (a, b) = addresses();
        Self::at(a, b)
    }

    pub(crate) fn at(a: IpAddr, b: IpAddr) -> Self {
        let open = |addr| Shm::open(ShmConfig::listening(addr)?);
        let [a, b] = [a, b].map(|addr| open(addr).expect("a device at a loopback address"));
        Self { a, b, at_b: () }
    }
}

impl Streams {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// Opens devices configured by `change`.
    pub(crate) fn with(change: impl Fn(&mut IwarpConfig)) -> Self {
        let (a, b) = addresses();
        let open = |addr| {
            let mut config = IwarpConfig::new(addr);
            change(&mut config);
            Iwarp::open(config).expect("a device at a loopback address")
        };
        Self {
            a: open(a),
            b: open(b),
            at_b: (),
        }
    }
}
