//! An initiator and a worker of the target in one thread, with a man in the middle: each has a
//! separate in-memory wire, and the test forwards the packets between them. So it can change or
//! drop each packet, and the memory of both ends while a packet is in flight.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use riser_initiator::engine::{Client, Engine, Env, Session};
use riser_initiator::lun::Lun;
use riser_initiator::url::TargetUrl;
use riser_memory::MemSlice;
use riser_reactor::simulated::{Disk, Kernel, Outcome, Threads};
use riser_reactor::{Op, Ring, RingConfig, mailbox};
use riser_target::backend::{OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::mail::{MAILBOX, Outbox};
use riser_target::worker::{self, Opened, Report, Worker, WorkerConfig};
use riser_tests::rig::{IQN, Protocol, pattern};
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig};
use riser_transport::wire::IcrcFlow;

const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const INITIATOR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// Number of bytes before and after the memory of a disk operation that belong to the same command.
const AROUND: usize = 128 << 10;

/// Length of a piece that identifies a block, even if the rest is in another packet.
const PIECE: usize = 64;

/// Random numbers of both ends, the same in each run.
struct StageEnv {
    device: Option<Endpoint>,
    seed: u64,
    host: Arc<dyn Host>,
}

impl StageEnv {
    fn fill(&mut self, out: &mut [u8]) {
        self.seed += 1;
        out.copy_from_slice(&pattern(self.seed, out.len()));
    }
}

impl Env for StageEnv {
    type Provider = Endpoint;

    fn open_device(&mut self) -> io::Result<Option<Endpoint>> {
        Ok(self.device.take())
    }

    fn connect_tcp(&mut self, _: Option<SocketAddr>, _: SocketAddr) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()> {
        self.fill(out);
        Ok(())
    }

    fn date(&self) -> Duration {
        Duration::from_secs(1_700_000_000)
    }
}

impl worker::Env for StageEnv {
    fn fill_random(&mut self, out: &mut [u8]) {
        self.fill(out);
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::clone(&self.host)
    }
}

/// RoCEv2 packet between the initiator and the target.
#[derive(Clone)]
pub(super) struct Packet {
    from: SocketAddr,
    to: SocketAddr,
    /// From the BTH to the ICRC.
    bytes: Vec<u8>,
}

impl Packet {
    pub(super) fn is_read_response(&self) -> bool {
        self.to.ip() == TARGET && (0x0d..=0x10).contains(&self.bytes[0])
    }

    pub(super) fn is_write(&self) -> bool {
        self.to.ip() == INITIATOR && (0x06..=0x0b).contains(&self.bytes[0])
    }

    pub(super) fn contains(&self, block: &[u8]) -> bool {
        find(&self.bytes, block).is_some()
    }

    /// Inverts a bit of a block in the payload, and calculates the ICRC again, like a faulty router
    /// or NIC that damages a packet before this calculation.
    pub(super) fn damage(&mut self, block: &[u8]) {
        let at = find(&self.bytes, block).expect("the block is in this packet");
        let flow = IcrcFlow::new(self.from, self.to).unwrap();
        let id = flow.check(&self.bytes, 0).expect("the ICRC is valid");
        self.bytes[at] ^= 0x10;
        assert!(flow.check_exact(&self.bytes, id).is_err());
        let len = self.bytes.len() - 4;
        let icrc = flow.compute(&self.bytes[..len], id);
        self.bytes[len..].copy_from_slice(&icrc.to_le_bytes());
        flow.check_exact(&self.bytes, id).unwrap();
    }
}

/// Returns the offset of a part of a block.
fn find(bytes: &[u8], block: &[u8]) -> Option<usize> {
    let mut pieces = block.chunks_exact(PIECE);
    pieces.find_map(|piece| bytes.windows(PIECE).position(|part| part == piece))
}

/// Inverts a bit of a block in memory, including copies from earlier commands. Returns false if the
/// block is not there.
pub(super) fn damage_memory(memory: &MemSlice, block: &[u8]) -> bool {
    let bytes = memory.to_vec();
    let Some(first) = find(&bytes, block) else {
        return false;
    };
    let piece = &bytes[first..first + PIECE];
    let ends = bytes.windows(PIECE).enumerate();
    for (at, _) in ends.filter(|(_, part)| *part == piece) {
        memory.write(at, &[bytes[at] ^ 0x10]);
    }
    true
}

/// Part of the target's pool, known after the first disk operation.
pub(super) type Pool = Rc<RefCell<Option<MemSlice>>>;

pub(super) enum Fate {
    Forward,
    Drop,
    /// Keep this packet and the following ones until the next step.
    Hold,
}

type OnPacket = Box<dyn FnMut(&mut Packet) -> Fate>;
type OnWrite = Box<dyn FnMut(&MemSlice)>;

pub(super) struct Stage {
    /// Wires of the initiator and of the target.
    wires: [Fabric; 2],
    /// Packets sent by the initiator and by the target.
    sent: [Arc<Mutex<VecDeque<Packet>>>; 2],
    worker: Worker,
    kernel: Kernel,
    threads: Threads,
    _reports: Receiver<Report>,
    engine: Engine<StageEnv>,
    client: Client,
    url: String,
    pub(super) pool: Pool,
    /// Called for each packet before it is forwarded.
    pub(super) on_packet: Option<OnPacket>,
    /// Called with the pool before the disk executes a write.
    pub(super) on_disk_write: Option<OnWrite>,
}

fn wire() -> Fabric {
    Fabric::new(FabricConfig::default())
}

impl Stage {
    pub(super) fn new(protocol: Protocol, protection: &str) -> Self {
        let text = format!(
            "backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true{protection} }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n      \
             - {{ protocol: srp, listen: \"{TARGET}:5555\" }}\n      \
             - {{ protocol: iser, listen: \"{TARGET}:3260\" }}\n    \
             luns: {{ 0: d }}\n    access: open\nworkers: {{ count: 1 }}\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
        let wires = [wire(), wire()];
        let now = wires[1].now();
        wires[0].advance_to(now);
        let sent: [Arc<Mutex<VecDeque<Packet>>>; 2] = Default::default();
        for ((wire, sent), own) in wires.iter().zip(&sent).zip([INITIATOR, TARGET]) {
            let sent = Arc::clone(sent);
            wire.tap(move |from, to, bytes| {
                // Forwarded packets are only received here.
                if from.ip() == own {
                    let bytes = bytes.to_vec();
                    sent.lock().unwrap().push_back(Packet { from, to, bytes });
                }
            });
        }
        let threads = Threads::default();
        let host: Arc<dyn Host> = Arc::new(SimulatedHost::new(threads.clone(), now));
        let disk = Disk::new(0);
        let backend = &config.backends[0];
        let store = Store::on_disk(&backend.spec, &disk, Arc::clone(&host));
        let mut opened = OpenedStores::default();
        opened.insert(&backend.name, &backend.spec, store);
        let shared = build_shared_on(&config, Keepers::default(), opened).unwrap();
        let port = shared.registry.catalog().targets[0].portals[0].target_port();
        let (ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
        let (mail, inbox) = mailbox(MAILBOX, ring.waker());
        let env = |device, seed| StageEnv {
            device,
            seed,
            host: Arc::clone(&host),
        };
        let (sender, reports) = channel();
        let (worker, unserved) = Worker::new(WorkerConfig {
            index: 0,
            now,
            env: Box::new(env(None, 1)),
            pool: 16 << 20,
            shared: Arc::new(shared),
            devices: vec![Opened::Simulated(Box::new(wires[1].endpoint(TARGET)))],
            sockets: Vec::new(),
            ring,
            mailbox: inbox,
            outbox: Outbox::new(vec![mail]),
            reports: sender,
        })
        .unwrap();
        assert!(unserved.is_empty());
        let device = wires[0].endpoint(INITIATOR);
        let builder = Client::builder().pool(4 << 20).port(1);
        let (client, engine) = builder.attach(env(Some(device), 1 << 32)).unwrap();
        let url = match protocol {
            Protocol::Srp => {
                let (extension, guid) = (port.parts().extension, port.parts().guid);
                format!("srp://{TARGET}:5555/0?id_ext={extension:016x}&ioc_guid={guid:016x}")
            }
            Protocol::Iser => format!("iser://{TARGET}:3260/{IQN}/0"),
            Protocol::Tcp => panic!("no RDMA"),
        };
        Self {
            wires,
            sent,
            worker,
            kernel,
            threads,
            _reports: reports,
            engine,
            client,
            url,
            pool: Pool::default(),
            on_packet: None,
            on_disk_write: None,
        }
    }

    pub(super) fn open(&mut self) -> (Session, Lun) {
        let client = self.client.clone();
        let url: TargetUrl = self.url.parse().unwrap();
        self.run(async move {
            let session = client.connect(url).await.unwrap();
            let lun = session.lun(0).await.unwrap();
            (session, lun)
        })
    }

    /// Runs everything until the future is ready.
    pub(super) fn run<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..1_000_000 {
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return result;
            }
            self.step();
        }
        panic!("the command does not complete");
    }

    fn step(&mut self) {
        let now = self.wires[1].now();
        let mut is_busy = self.engine.step(now);
        let worked = self.worker.step(now).unwrap();
        self.worker.park(worked).unwrap();
        is_busy |= worked > 0;
        is_busy |= self.forward(0);
        is_busy |= self.forward(1);
        is_busy |= self.use_disk();
        if let [thread, ..] = self.threads.runnable()[..] {
            is_busy |= self.threads.step(thread);
        }
        let next = now + Duration::from_micros(if is_busy { 10 } else { 500 });
        self.wires.iter().for_each(|wire| wire.advance_to(next));
    }

    /// Forwards packets from a wire to the other wire. Returns whether there were any.
    fn forward(&mut self, from: usize) -> bool {
        let mut is_busy = false;
        loop {
            let packet = self.sent[from].lock().unwrap().pop_front();
            let Some(mut packet) = packet else {
                return is_busy;
            };
            is_busy = true;
            let fate = match &mut self.on_packet {
                Some(on_packet) => on_packet(&mut packet),
                None => Fate::Forward,
            };
            match fate {
                Fate::Forward => self.wires[1 - from].inject(packet.from, packet.to, packet.bytes),
                Fate::Drop => {}
                Fate::Hold => {
                    self.sent[from].lock().unwrap().push_front(packet);
                    return true;
                }
            }
        }
    }

    /// Completes disk operations. Returns whether there were any.
    fn use_disk(&mut self) -> bool {
        for operation in self.kernel.operations() {
            if let [slice, ..] = &self.kernel.memory(operation.id)[..] {
                let (memory, at) = (slice.memory(), slice.offset());
                let end = memory.len().min(at + AROUND);
                let around = memory.slice(at.saturating_sub(AROUND)..end).unwrap();
                if let (Op::Write { .. }, Some(on_write)) = (operation.op, &mut self.on_disk_write)
                {
                    on_write(&around);
                }
                *self.pool.borrow_mut() = Some(around);
            }
            self.kernel.complete(operation.id, Outcome::Whole);
        }
        self.kernel.has_completions()
    }
}
