//! Measures the software NIC against itself over the loopback interface: bandwidth of WRITE, READ
//! and SEND, and the round trip of a SEND ping-pong, with one thread for each side.
//!
//! ```text
//! cargo run --release -p riser-transport --example roce_perf [-- SECONDS [MESSAGE_BYTES [TEST]]]
//! ```
//!
//! TEST is `write`, `read`, `send`, `small-write`, `small-read` or `ping`; without it all run.

#![allow(clippy::print_stdout, reason = "prints its results")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, Completion, ConnParam, CqId, Mr, PdId, PortSpace, Provider, QpCap,
    QpId, QpInitAttr, QpType, RKey, RdmaCm, RecvWr, RemoteAddr, SendOp, SendWr, Sge, Verbs, WrId,
};

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const PORT: u16 = 7174;
const DEPTH: usize = 32;
const REGION: usize = 64 << 20;

struct Side {
    nic: Roce,
    id: CmId,
    cq: CqId,
    qp: QpId,
    mr: Mr,
    _memory: Memory,
    done: Vec<Completion>,
}

impl Side {
    fn poll(&mut self) -> usize {
        self.nic.progress(Instant::now());
        self.done.clear();
        let n = self
            .nic
            .poll_cq(self.cq, 256, &mut self.done)
            .expect("poll");
        for c in &self.done {
            assert!(
                c.status.is_ok() || c.status == riser_transport::verbs::WcStatus::WrFlushErr,
                "{c:?}"
            );
        }
        n
    }

    fn sge(&self, slot: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + (slot * len % (REGION - len + 1)) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    fn post_recv(&mut self, slot: usize, len: usize) {
        let sges = [self.sge(slot, len)];
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &sges,
        };
        self.nic.post_recv(self.qp, &[wr]).expect("receive");
    }

    fn post_send(&mut self, slot: usize, op: SendOp, len: usize) {
        let sges = [self.sge(slot, len)];
        let wr = SendWr::new(slot as u64, op, &sges);
        self.nic.post_send(self.qp, &[wr]).expect("send");
    }
}

fn open(addr: IpAddr) -> Roce {
    let mut config = RoceConfig::new(addr);
    if let Some(kib) = std::env::var("INFLIGHT_KIB")
        .ok()
        .and_then(|v| v.parse::<u32>().ok())
    {
        config.max_inflight_bytes = Some(kib << 10);
    }
    Roce::open(&config).expect("a device at the address")
}

fn event(nic: &mut Roce) -> (CmId, CmEventKind) {
    loop {
        nic.progress(Instant::now());
        if let Some(e) = nic.poll_cm_event() {
            return (e.id, e.kind);
        }
    }
}

fn resources(nic: &mut Roce) -> (PdId, CqId, Memory, Mr) {
    let pd = nic.alloc_pd().expect("domain");
    let cq = nic.create_cq(1024).expect("queue");
    let memory = Memory::new(REGION).expect("memory");
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let mr = nic.reg_mr(pd, &memory.whole(), all).expect("region");
    (pd, cq, memory, mr)
}

fn init(pd: PdId, cq: CqId) -> QpInitAttr {
    let cap = QpCap {
        max_send_wr: 256,
        max_recv_wr: 256,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 64,
    };
    QpInitAttr::new(pd, cq, QpType::Rc, cap)
}

fn param(mr: &Mr) -> ConnParam {
    let mut private_data = mr.addr.to_be_bytes().to_vec();
    private_data.extend_from_slice(&mr.rkey.0.to_be_bytes());
    ConnParam {
        private_data,
        ..ConnParam::default()
    }
}

fn remote(param: &ConnParam) -> RemoteAddr {
    let d = &param.private_data;
    RemoteAddr {
        addr: u64::from_be_bytes(d[..8].try_into().expect("eight bytes")),
        rkey: RKey(u32::from_be_bytes(d[8..12].try_into().expect("four bytes"))),
    }
}

fn serve(ready: &Barrier, stop: &AtomicBool, len: usize) -> Roce {
    let mut nic = open(SERVER);
    let listener = nic.create_id(PortSpace::Tcp).expect("id");
    nic.bind_addr(listener, SocketAddr::new(SERVER, PORT))
        .expect("bind");
    nic.listen(listener, 4).expect("listen");
    ready.wait();
    let (id, kind) = event(&mut nic);
    assert!(matches!(kind, CmEventKind::ConnectRequest { .. }));
    let (pd, cq, memory, mr) = resources(&mut nic);
    let qp = nic.create_cm_qp(id, &init(pd, cq)).expect("queue pair");
    let mut side = Side {
        nic,
        id,
        cq,
        qp,
        mr,
        _memory: memory,
        done: Vec::new(),
    };
    for slot in 0..2 * DEPTH {
        side.post_recv(slot, len);
    }
    side.nic.accept(side.id, &param(&mr)).expect("accept");
    while !stop.load(Ordering::Relaxed) {
        side.poll();
        for c in std::mem::take(&mut side.done) {
            if c.opcode.is_recv() && c.status.is_ok() {
                side.post_recv(c.wr_id.0 as usize, len);
                // A message of eight bytes is a ping.
                if c.byte_len == 8 {
                    side.post_send(0, SendOp::Send, 8);
                }
            }
        }
    }
    side.nic
}

fn connect() -> (Side, RemoteAddr) {
    let mut nic = open(CLIENT);
    let id = nic.create_id(PortSpace::Tcp).expect("id");
    let wait = Duration::from_secs(1);
    nic.resolve_addr(id, None, SocketAddr::new(SERVER, PORT), wait)
        .expect("address");
    nic.resolve_route(id, wait).expect("route");
    let (pd, cq, memory, mr) = resources(&mut nic);
    let qp = nic.create_cm_qp(id, &init(pd, cq)).expect("queue pair");
    nic.connect(id, &param(&mr)).expect("connect");
    let peer = loop {
        match event(&mut nic).1 {
            CmEventKind::Established { param } => break remote(&param),
            CmEventKind::AddrResolved | CmEventKind::RouteResolved => {}
            other => panic!("{other:?}"),
        }
    };
    (
        Side {
            nic,
            id,
            cq,
            qp,
            mr,
            _memory: memory,
            done: Vec::new(),
        },
        peer,
    )
}

/// Keeps `DEPTH` requests under way for a while; prints the bandwidth.
fn bandwidth(
    side: &mut Side,
    name: &str,
    time: Duration,
    len: usize,
    op: impl Fn(usize) -> SendOp,
) {
    let start = Instant::now();
    let (mut posted, mut completed) = (0usize, 0usize);
    while completed < posted || start.elapsed() < time {
        while posted - completed < DEPTH && start.elapsed() < time {
            side.post_send(posted, op(posted), len);
            posted += 1;
        }
        completed += side.poll();
    }
    let seconds = start.elapsed().as_secs_f64();
    let rate = (completed * len) as f64 / seconds;
    println!(
        "{name:<10} {len:>8} B: {:>7.2} GB/s, {:>9.0} messages/s",
        rate / 1e9,
        completed as f64 / seconds
    );
}

fn ping_pong(side: &mut Side, time: Duration) {
    let mut times = Vec::new();
    let start = Instant::now();
    while start.elapsed() < time {
        side.post_recv(1, 64);
        let begin = Instant::now();
        side.post_send(0, SendOp::Send, 8);
        let mut left = 2;
        while left > 0 {
            left -= side.poll();
        }
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    println!(
        "ping-pong         8 B: {:?} median, {:?} at 99 %, {} rounds",
        times[times.len() / 2],
        times[times.len() * 99 / 100],
        times.len()
    );
}

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .filter_map(|a| a.parse::<u64>().ok());
    let time = Duration::from_secs(args.next().unwrap_or(2));
    let len = args.next().unwrap_or(128 << 10) as usize;
    let ready = Arc::new(Barrier::new(2));
    let stop = Arc::new(AtomicBool::new(false));
    let server = {
        let (ready, stop) = (ready.clone(), stop.clone());
        std::thread::spawn(move || serve(&ready, &stop, len.max(64)))
    };
    ready.wait();
    let (mut side, peer) = connect();
    let at = move |slot: usize| RemoteAddr {
        addr: peer.addr + (slot * len % (REGION - len + 1)) as u64,
        ..peer
    };
    let only = std::env::args().nth(3);
    let wanted = |test: &str| only.as_deref().is_none_or(|o| o == test);
    if wanted("write") {
        bandwidth(&mut side, "WRITE", time, len, |n| SendOp::Write(at(n)));
    }
    if wanted("read") {
        bandwidth(&mut side, "READ", time, len, |n| SendOp::Read(at(n)));
    }
    if wanted("send") {
        bandwidth(&mut side, "SEND", time, len, |_| SendOp::Send);
    }
    if wanted("small-write") {
        bandwidth(&mut side, "WRITE", time, 4096, |n| SendOp::Write(at(n)));
    }
    if wanted("small-read") {
        bandwidth(&mut side, "READ", time, 4096, |n| SendOp::Read(at(n)));
    }
    if wanted("ping") {
        ping_pong(&mut side, time);
    }
    let counters = side.nic.qp_counters(side.qp).expect("counters").rc;
    println!(
        "retransmits {}, timeouts {}, sequence NAKs {}",
        counters.retransmits, counters.timeouts, counters.rx_nak_sequence
    );
    println!(
        "client {:?}\n       {:?}",
        side.nic.counters(),
        side.nic.driver_counters()
    );
    side.nic.disconnect(side.id).expect("disconnect");
    for _ in 0..1000 {
        side.nic.progress(Instant::now());
    }
    stop.store(true, Ordering::Relaxed);
    let server = server.join().expect("the server's thread");
    println!(
        "server {:?}\n       {:?}",
        server.counters(),
        server.driver_counters()
    );
}
