//! Initiators and their users.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use riser_block::ZeroOptions;
use riser_initiator::engine::{Client, Engine, Env, IoData, Session};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::request::{Cdb, CommandResponse, DataLen, RequestError, RequestResult};
use riser_initiator::url::TargetUrl;
use riser_scsi::sense::{Sense, SenseKey};
use riser_scsi::srp::TargetPortId;
use riser_tests::history::{BLOCK, History, Port, WriteId};
use riser_transport::loopback::{Endpoint, Fabric};
use tracing::debug;

use crate::executor::Executor;
use crate::model::Model;
use crate::plan::{Plan, Protocol};
use crate::stream::Stream;
use crate::{coverage, events, target};

/// Streams that were opened by initiators but not yet added to the network.
pub type Dialed = Rc<RefCell<Vec<Dial>>>;

/// A stream opened by an initiator.
#[derive(Debug)]
pub struct Dial {
    /// Address of the initiator.
    pub from: IpAddr,
    /// Destination address.
    pub to: SocketAddr,
    /// The network's end of the stream.
    pub stream: Stream,
}

/// BUSY: the unit may still be executing commands of an older session.
const BUSY: u8 = 0x08;

/// RESERVATION CONFLICT.
const CONFLICT: u8 = 0x18;

/// Size of an initiator's pool for data.
const POOL: usize = 4 << 20;

/// Timeout for a command that must succeed.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Delay before opening the unit again.
const AGAIN: Duration = Duration::from_millis(500);

/// Maximum latency of a command without any faults. Other initiators must not increase this: an
/// initiator that doesn't send its data is only disconnected after more than this time.
pub const PROMPT: Duration = Duration::from_secs(10);

/// Maximum time by which trickling data of commands in the order of a unit delays other commands.
/// The target checks every second if initiators are waiting, and disconnects the offender five
/// seconds later, or at most ten for the rates of [`Load`](crate::hog::Load) that are too slow.
pub const ORDER_DELAY: Duration = Duration::from_secs(12);

/// Returns the initial address of an initiator.
#[must_use]
pub fn address(index: usize) -> IpAddr {
    address_after(index, 0)
}

/// Returns the address of an initiator that has moved this number of times.
#[must_use]
pub fn address_after(index: usize, moves: u8) -> IpAddr {
    // 10.0.2.0/24 is used by cheating peers.
    let net = [0, 3, 4, 5][usize::from(moves) % ADDRESSES];
    IpAddr::V4(Ipv4Addr::new(10, 0, net, 100 + index as u8))
}

/// Number of addresses per initiator.
pub const ADDRESSES: usize = 4;

/// Environment of an engine.
pub struct SimulatedEnv {
    address: IpAddr,
    device: Option<Endpoint>,
    dialed: Dialed,
    random: Rng,
}

impl SimulatedEnv {
    /// Creates the environment of an engine, with or without an RDMA device.
    pub(crate) fn new(
        address: IpAddr,
        device: Option<Endpoint>,
        dialed: &Dialed,
        random: Rng,
    ) -> Self {
        Self {
            address,
            device,
            dialed: Rc::clone(dialed),
            random,
        }
    }
}

impl Env for SimulatedEnv {
    type Provider = Endpoint;

    fn open_device(&mut self) -> io::Result<Option<Endpoint>> {
        Ok(self.device.take())
    }

    fn connect_tcp(&mut self, _: Option<SocketAddr>, to: SocketAddr) -> io::Result<OwnedFd> {
        let (ours, theirs) = Stream::with_plain_socket()?;
        self.dialed.borrow_mut().push(Dial {
            from: self.address,
            to,
            stream: theirs,
        });
        Ok(ours.into())
    }

    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()> {
        self.random.fill(out);
        Ok(())
    }

    fn date(&self) -> Duration {
        Duration::from_secs(1_700_000_000)
    }
}

/// State that the process of an initiator inherits from its predecessor.
#[derive(Clone, Copy, Debug)]
pub struct Heritage {
    /// Seed of the port.
    pub port: u64,
    /// Set if there was a predecessor that did not close its sessions.
    pub recovers: bool,
    /// GUID of the port.
    pub guid: Option<u64>,
    /// The generation of the unit's cache that was recorded by the predecessor.
    pub cache: Option<[u8; 16]>,
    /// Number of times the host has moved.
    pub moves: u8,
}

/// An initiator with its engine and the handle for users.
#[derive(Debug)]
pub struct Initiator {
    /// Address of the initiator.
    pub address: IpAddr,
    /// The engine, or `None` after the process was killed.
    pub engine: Option<Engine<SimulatedEnv>>,
    /// Handle for users.
    pub client: Client,
    /// URL of the target.
    pub url: TargetUrl,
    /// Tells users whether the process was killed or is exiting.
    pub is_dead: Rc<Cell<bool>>,
    /// Set while the process is exiting normally.
    pub is_leaving: bool,
    /// Opened units, each with a user.
    pub opened: Rc<RefCell<Vec<(User, Lun)>>>,
    /// State for the next process.
    pub heritage: Heritage,
}

impl Initiator {
    /// Creates an initiator on the network.
    #[must_use]
    pub fn new(
        (index, protocol): (usize, Protocol),
        port: TargetPortId,
        fabric: &Fabric,
        dialed: &Dialed,
        heritage: Heritage,
        (plan, rng): (&Plan, &mut Rng),
    ) -> Self {
        let address = address_after(index, heritage.moves);
        // There is no device while it is unplugged.
        let mut device = (!fabric.is_unplugged(address)).then(|| fabric.endpoint(address));
        if let Some(device) = &mut device {
            device.set_mtu(plan.mtus[1]);
        }
        let random = Rng::with_seed(rng.u64(..));
        let env = SimulatedEnv::new(address, device, dialed, random);
        let builder = Client::builder()
            .pool(POOL)
            .queue_size(rng.u16(1..=32))
            .port(heritage.port)
            .guid(heritage.guid)
            .recovers(heritage.recovers)
            .noted_cache(heritage.cache);
        let (client, engine) = builder.attach(env).expect("an engine");
        let at = target::ADDRESS;
        let (extension, guid) = (port.parts().extension, port.parts().guid);
        let (base, keys) = match protocol {
            Protocol::Srp => {
                let channels = rng.u8(1..=3);
                let port = format!("id_ext={extension:016x}&ioc_guid={guid:016x}");
                let keys = vec![port, format!("channels={channels}")];
                (format!("srp://{at}:5555/0"), keys)
            }
            Protocol::Iser => (format!("iser://{at}:3260/{}/0", target::IQN), vec![]),
            Protocol::Iscsi => {
                let at = target::tcp_address(0);
                (format!("iscsi://{at}/{}/0", target::IQN), vec![])
            }
        };
        let others = (1..plan.paths).map(|path| match protocol {
            Protocol::Srp => format!("portal={}:5555", target::rdma_address(path)),
            Protocol::Iser => format!("portal={}:3260", target::rdma_address(path)),
            Protocol::Iscsi => format!("portal={}", target::tcp_address(path)),
        });
        let keys: Vec<_> = keys.into_iter().chain(others).collect();
        let url = match keys.is_empty() {
            true => base,
            false => format!("{base}?{}", keys.join("&")),
        };
        Self {
            address,
            engine: Some(engine),
            client,
            url: url.parse().expect("an address"),
            is_dead: Rc::default(),
            is_leaving: false,
            opened: Rc::default(),
            heritage,
        }
    }

    /// Counts objects in the engine that belong to sessions.
    #[must_use]
    pub fn leftovers(&self) -> Vec<(&'static str, usize)> {
        let Some(engine) = &self.engine else {
            return Vec::new();
        };
        let usage = engine.device().map(Endpoint::usage).unwrap_or_default();
        let all = [
            ("queue pairs", usage.qps),
            ("completion queues", usage.cqs),
            ("memory regions", usage.mrs),
            ("protection domains", usage.pds),
            ("identifiers of connections", usage.cm_ids),
        ];
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// Kills the process.
    pub fn die(&mut self) {
        self.note();
        self.heritage.recovers = true;
        self.is_dead.set(true);
        self.engine = None;
        self.is_leaving = false;
    }

    /// Starts to exit normally.
    pub fn leave(&mut self) {
        if self.engine.is_none() || self.is_leaving {
            return;
        }
        self.note();
        self.is_dead.set(true);
        self.client.shutdown();
        self.is_leaving = true;
    }

    /// Saves the state for the next process.
    fn note(&mut self) {
        if let Some((_, lun)) = self.opened.take().first() {
            self.heritage.cache = lun.session().status().report().cache;
            self.heritage.guid = Some(lun.session().port_guid());
        }
    }

    /// Opens the disk, and the private unit if there is one, then spawns tasks for random commands.
    pub fn start(
        &self,
        users: Vec<(User, Rng)>,
        private: Option<(User, Rng)>,
        plan: &Plan,
    ) -> impl Future<Output = ()> + use<> {
        let (client, url) = (self.client.clone(), self.url.clone());
        let (is_dead, opened) = (Rc::clone(&self.is_dead), Rc::clone(&self.opened));
        let plan = plan.clone();
        async move {
            let Some(lun) = open(&client, &url, &is_dead).await else {
                return;
            };
            opened.borrow_mut().push((users[0].0.clone(), lun.clone()));
            let mut all = Executor::default();
            for (user, rng) in users {
                let (client, lun) = (client.clone(), lun.clone());
                all.spawn(user.run_workload(client, lun, plan.clone(), rng, Rc::clone(&is_dead)));
            }
            if let Some((user, rng)) = private {
                all.spawn(async move {
                    let own = private_unit(&client, lun.session(), &is_dead).await;
                    if let Some(own) = own {
                        opened.borrow_mut().push((user.clone(), own.clone()));
                        user.run_workload(client, own, plan, rng, is_dead).await;
                    }
                });
            }
            all.finish().await;
        }
    }
}

/// The first failure of a run.
pub type Verdict = Rc<RefCell<Option<String>>>;

/// Context of a user.
#[derive(Clone, Debug)]
pub struct User {
    /// The initiator's port in the history.
    pub port: Port,
    /// Contents of the blocks.
    pub history: Rc<History>,
    /// Set if the disk has a volatile cache.
    pub is_cached: bool,
    /// Set if there are no faults, so requests cannot fail.
    pub is_quiet: bool,
    /// Model of the unit's reservations, if any.
    pub model: Option<Rc<Model>>,
    /// Set if there are also no faults that could delay requests.
    pub is_prompt: bool,
    /// Maximum latency of requests in this case.
    pub max_latency: Duration,
    /// Set if there are no other initiators which could cause failures.
    pub is_alone: bool,
    /// Set if no check of protection information may fail.
    pub keeps_protection: bool,
    /// Start time of its only command.
    pub begun: Cell<Duration>,
    /// Where failures are reported.
    pub verdict: Verdict,
}

impl User {
    /// Records the first failure.
    pub(crate) fn check_result<T, E: std::fmt::Display>(&self, result: Result<T, E>) {
        if let Err(error) = result {
            self.verdict
                .borrow_mut()
                .get_or_insert_with(|| error.to_string());
        }
    }

    /// Called when a command starts, possibly for these blocks.
    fn on_begin(&self, command: &'static str, blocks: &Range<u64>) {
        self.begun.set(events::now());
        debug!(port = self.port.0, ?blocks, "{command} begins");
    }

    /// Called when a command has completed.
    fn on_end<T, E: Display>(
        &self,
        command: &'static str,
        blocks: &Range<u64>,
        result: &Result<T, E>,
    ) {
        let outcome = match result {
            Ok(_) => "GOOD".to_owned(),
            Err(error) => error.to_string(),
        };
        coverage::note("command", command, &outcome);
        let time = events::now() - self.begun.get();
        if self.is_prompt && time > self.max_latency {
            let why = format!("a quiet day, and a {command} takes {time:?}: {outcome}");
            self.check_result::<(), _>(Err(why));
        }
        debug!(port = self.port.0, ?blocks, "{command} ends: {outcome}");
    }

    /// Returns the time in the model at which a command starts.
    fn instant(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| model.begin())
    }

    /// Called when a command for blocks has completed, with its start time: the result must be
    /// consistent with the reservations. The model only exists if it knows all reservations, and
    /// this nexus never registers.
    fn check_access<T>(&self, begin: u64, writes: bool, result: &Result<T, LunError>) {
        let conflicts = match result {
            Ok(_) => false,
            Err(LunError::Status(CONFLICT)) => true,
            Err(_) => return,
        };
        if let Some(model) = &self.model {
            self.check_result(model.check_access(self.port, begin, writes, conflicts));
        }
    }

    /// Called when a command has failed.
    fn on_failure(&self, error: &LunError) {
        const CHECKS: u8 = 0x10;
        if let LunError::Check { additional, .. } = error
            && self.keeps_protection
            && additional.code == CHECKS
        {
            self.check_result::<(), _>(Err(format!("protection information is wrong: {error}")));
        }
        if self.is_quiet && (self.is_alone || !is_of_another(error)) {
            self.check_result::<(), _>(Err(format!("a quiet day, and a request fails: {error}")));
        }
    }

    /// Sends random commands to the disk until the process is killed.
    pub async fn run_workload(
        self,
        client: Client,
        lun: Lun,
        plan: Plan,
        mut rng: Rng,
        is_dead: Rc<Cell<bool>>,
    ) {
        let lun = lun.with_timeout(plan.timeout);
        for _ in 0..plan.commands {
            if is_dead.get() {
                return;
            }
            if !plan.pause.is_zero() {
                pause(&client, plan.pause.mul_f64(rng.f64())).await;
            }
            let len = rng.u64(1..=plan.longest.min(plan.blocks));
            let first = rng.u64(..=plan.blocks - len);
            let blocks = first..first + len;
            let fua = rng.u8(..6) == 0;
            match rng.u8(..32) {
                0..4 => drop(self.flush(&lun).await),
                4..17 => drop(self.write(&lun, blocks, fua).await),
                17 => self.zero(&lun, blocks, fua, rng.bool()).await,
                18 => self.unmap(&lun, blocks).await,
                19..21 => self.swap(&lun, first, fua).await,
                21 if plan.knowledge().reservations => {}
                21 => self.reserve(&lun, &plan, &mut rng).await,
                _ => {
                    self.read(&lun, blocks).await;
                }
            }
        }
    }

    /// Called when a command that writes has completed. `Ok` is true if the data is on the medium.
    fn end_write(&self, id: WriteId, result: Result<bool, LunError>) {
        match result {
            Ok(true) => self.check_result(self.history.acknowledge_durable(id)),
            Ok(false) => self.check_result(self.history.acknowledge(id)),
            Err(error) => {
                self.on_failure(&error);
                match error {
                    LunError::Status(BUSY) => self.history.lose(id),
                    LunError::Check { .. } | LunError::Status(_) => self.history.refuse(id),
                    _ => self.history.lose(id),
                }
            }
        }
    }

    /// Writes a block and flushes after all faults are over. Returns an error if this fails, except
    /// because of another initiator. The first attempt may report an earlier loss. It is retried
    /// after a timeout, because a peer using the same initiator name may prevent a login.
    pub async fn write_at_last(&self, lun: &Lun, block: u64) -> Result<(), LunError> {
        let mut failures = 0;
        loop {
            let mut result = self.write(lun, block..block + 1, false).await;
            if result.is_ok() {
                result = self.flush(lun).await;
            }
            match result {
                Ok(()) => return Ok(()),
                Err(LunError::Request(RequestError::TimedOut)) => {}
                Err(_) if failures < 2 => failures += 1,
                Err(error) if is_of_another(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) async fn flush(&self, lun: &Lun) -> Result<(), LunError> {
        let id = self.history.begin_flush(self.port);
        self.on_begin("flush", &(0..0));
        let result = lun.flush().await;
        self.on_end("flush", &(0..0), &result);
        match &result {
            Ok(()) => self.check_result(self.history.end_flush(id)),
            Err(error) => {
                self.on_failure(error);
                self.history.fail_flush(id);
            }
        }
        result
    }

    pub(crate) async fn write(
        &self,
        lun: &Lun,
        blocks: Range<u64>,
        fua: bool,
    ) -> Result<(), LunError> {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take_buffer(len).await;
        let mut bytes = vec![0; len];
        let offset = blocks.start * BLOCK as u64;
        let id = self
            .history
            .begin_write(self.port, blocks.clone(), &mut bytes);
        buffer.slice().write(0, &bytes);
        self.on_begin("write", &blocks);
        let begin = self.instant();
        let result = lun.write(offset, buffer, fua).await.map(drop);
        self.on_end("write", &blocks, &result);
        self.check_access(begin, true, &result);
        self.end_write(id, result.clone().map(|()| fua || !self.is_cached));
        result
    }

    async fn zero(&self, lun: &Lun, blocks: Range<u64>, fua: bool, may_unmap: bool) {
        let bytes = blocks.start * BLOCK as u64..blocks.end * BLOCK as u64;
        let id = self.history.begin_zero(self.port, blocks.clone());
        self.on_begin("zero", &blocks);
        // With FUA, the command also flushes, and this may be the flush that reports a loss.
        let flush = fua.then(|| self.history.begin_flush(self.port));
        let options = ZeroOptions {
            may_unmap,
            fua,
            fast: false,
        };
        let begin = self.instant();
        let result = lun.write_zeroes(bytes, options).await;
        self.on_end("zero", &blocks, &result);
        self.check_access(begin, true, &result);
        if let Some(flush) = flush {
            match result {
                Ok(()) => self.check_result(self.history.end_flush(flush)),
                Err(_) => self.history.fail_flush(flush),
            }
        }
        self.end_write(id, result.map(|()| fua || !self.is_cached));
    }

    async fn unmap(&self, lun: &Lun, blocks: Range<u64>) {
        let bytes = blocks.start * BLOCK as u64..blocks.end * BLOCK as u64;
        let id = self.history.begin_zero(self.port, blocks.clone());
        self.on_begin("unmap", &blocks);
        let result = lun.discard(bytes).await;
        self.on_end("unmap", &blocks, &result);
        match result {
            // UNMAP is only a hint, so the unit may keep the blocks (SBC-4 4.7.4.4).
            Ok(()) | Err(LunError::Unsupported) => self.history.refuse(id),
            result => self.end_write(id, result.map(|()| false)),
        }
    }

    /// COMPARE AND WRITE of a block with its current data.
    async fn swap(&self, lun: &Lun, block: u64, fua: bool) {
        let Some(expected) = self.content(lun, block..block + 1).await else {
            return;
        };
        let buffer = lun.buffers().take_buffer(2 * BLOCK).await;
        let mut bytes = vec![0; BLOCK];
        let id = self.history.begin_swap(self.port, block, &mut bytes);
        buffer.slice().write(0, &expected);
        buffer.slice().write(BLOCK, &bytes);
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[13]) = (0x89, u8::from(fua) << 3, 1);
        cdb[2..10].copy_from_slice(&block.to_be_bytes());
        let cdb = Cdb::new(&cdb).expect("sixteen bytes");
        let len = DataLen::Out(2 * BLOCK as u32);
        self.on_begin("swap", &(block..block + 1));
        let begin = self.instant();
        let end = lun.scsi(cdb, len, IoData::One(buffer)).await;
        self.on_end("swap", &(block..block + 1), &outcome(&end.result));
        if let Ok(response) = &end.result {
            let is_good = response.status == 0;
            let result = is_good.then_some(()).ok_or_else(|| failure(response));
            self.check_access(begin, true, &result);
        }
        match end.result {
            Ok(response) if response.status == 0 => {
                let is_durable = fua || !self.is_cached;
                self.check_result(self.history.acknowledge_swap(id, &expected, is_durable));
            }
            Ok(response) => match response.sense().map(|sense| sense.key) {
                Some(SenseKey::Miscompare) => self.check_result(self.history.refute(id)),
                _ => self.end_write(id, Err(failure(&response))),
            },
            // A raw command is not retried after another initiator has reset the unit.
            Err(_) => self.history.lose(id),
        }
    }

    /// Registers and changes the reservation of the unit, using types that allow all initiators to
    /// read. The response is ignored. Writes from other initiators may fail with RESERVATION
    /// CONFLICT or be aborted.
    async fn reserve(&self, lun: &Lun, plan: &Plan, rng: &mut Rng) {
        const REGISTER_AND_IGNORE: u8 = 6;
        let (reserve, release, clear, preempt_and_abort) = (1, 2, 3, 5);
        let action = [reserve, release, release, clear, preempt_and_abort][rng.usize(..5)];
        let other = rng.u64(1..=plan.initiators.len() as u64);
        // Each initiator uses its port as key, and these only differ in the lower bits.
        let other = u64::from(self.port.0) & !0xff | other;
        // Write Exclusive, and the variants Registrants Only and All Registrants.
        let scope = [1, 5, 7][rng.usize(..3)];
        for (action, keys) in [
            (REGISTER_AND_IGNORE, [0, u64::from(self.port.0)]),
            (action, [u64::from(self.port.0), other]),
        ] {
            let buffer = lun.buffers().take_buffer(24).await;
            let mut list = [0; 24];
            list[..8].copy_from_slice(&keys[0].to_be_bytes());
            list[8..16].copy_from_slice(&keys[1].to_be_bytes());
            buffer.slice().write(0, &list);
            let cdb = Cdb::new(&[0x5f, action, scope, 0, 0, 0, 0, 0, 24, 0]).expect("ten bytes");
            self.on_begin("reserve", &(0..0));
            let end = lun.scsi(cdb, DataLen::Out(24), IoData::One(buffer)).await;
            self.on_end("reserve", &(0..0), &outcome(&end.result));
        }
    }

    /// Reads blocks. Returns whether this was successful.
    pub async fn read(&self, lun: &Lun, blocks: Range<u64>) -> bool {
        self.content(lun, blocks).await.is_some()
    }

    async fn content(&self, lun: &Lun, blocks: Range<u64>) -> Option<Vec<u8>> {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take_buffer(len).await;
        let offset = blocks.start * BLOCK as u64;
        let id = self.history.begin_read(self.port, blocks.clone());
        self.on_begin("read", &blocks);
        let begin = self.instant();
        let result = lun.read(offset, buffer).await;
        self.on_end("read", &blocks, &result);
        self.check_access(begin, false, &result);
        match result {
            Ok(buffer) => {
                let mut bytes = vec![0; len];
                buffer.slice().read(0, &mut bytes);
                self.check_result(self.history.end_read(id, &bytes));
                Some(bytes)
            }
            Err(error) => {
                self.on_failure(&error);
                self.history.abandon_read(id);
                None
            }
        }
    }
}

/// Converts an unsuccessful response to an error.
fn failure(response: &CommandResponse) -> LunError {
    match response.sense() {
        Some(Sense {
            key, additional, ..
        }) => LunError::Check { key, additional },
        None => LunError::Status(response.status),
    }
}

/// Returns whether a failure was caused by another initiator: either a reservation, or commands
/// that were cleared.
fn is_of_another(error: &LunError) -> bool {
    const TASK_ABORTED: u8 = 0x40;
    match error {
        LunError::Status(CONFLICT | TASK_ABORTED) => true,
        LunError::Check { key, .. } => {
            matches!(key, SenseKey::AbortedCommand | SenseKey::UnitAttention)
        }
        _ => false,
    }
}

/// Describes the result of a command.
fn outcome(result: &RequestResult) -> Result<(), String> {
    let response = result.as_ref().map_err(ToString::to_string)?;
    match (response.status, response.sense()) {
        (0, _) => Ok(()),
        (_, Some(sense)) => Err(format!("{}: {}", sense.key, sense.additional)),
        (status, None) => Err(format!("status {status:#04x}")),
    }
}

/// Opens the disk, retrying as often as needed. Returns `None` if the process was killed.
async fn open(client: &Client, url: &TargetUrl, is_dead: &Cell<bool>) -> Option<Lun> {
    while !is_dead.get() {
        let Ok(session) = client.connect(url.clone()).await else {
            pause(client, AGAIN).await;
            continue;
        };
        match session.lun(0).await {
            Ok(lun) => return Some(lun.with_timeout(TIMEOUT)),
            Err(_) => session.close().await,
        }
        pause(client, AGAIN).await;
    }
    None
}

/// Opens the private unit of this initiator, retrying until the process is killed.
async fn private_unit(client: &Client, session: &Session, is_dead: &Cell<bool>) -> Option<Lun> {
    while !is_dead.get() {
        match session.lun(1).await {
            Ok(lun) => return Some(lun.with_timeout(TIMEOUT)),
            Err(_) => pause(client, AGAIN).await,
        }
    }
    None
}

/// Waits, using the clock of an initiator.
pub(crate) async fn pause(client: &Client, time: Duration) {
    let never = std::future::pending::<()>();
    let _ = client.timeout(time, never).await;
}
