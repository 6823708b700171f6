//! Initiators, and what their users do.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use riser_initiator::block::ZeroOptions;
use riser_initiator::engine::{Client, Engine, Env, IoData};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::request::{Cdb, DataLen};
use riser_initiator::url::TargetUrl;
use riser_scsi::sense::SenseKey;
use riser_scsi::srp::TargetPortId;
use riser_tests::history::{BLOCK, History, Port, WriteId};
use riser_transport::loopback::{Endpoint, Fabric};

use crate::plan::{Plan, Protocol};
use crate::target;

/// Streams that initiators have opened and the network has not seen.
pub type Dialed = Rc<RefCell<Vec<(IpAddr, UnixStream)>>>;

/// Memory of an initiator for data.
const POOL: usize = 4 << 20;

/// Time that a command may take which must succeed.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Address of an initiator.
#[must_use]
pub fn address(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 100 + index as u8))
}

/// Surroundings of an engine.
pub struct SimulatedEnv {
    address: IpAddr,
    device: Option<Endpoint>,
    dialed: Dialed,
    random: Rng,
}

impl Env for SimulatedEnv {
    type Provider = Endpoint;

    fn open_device(&mut self) -> io::Result<Option<Endpoint>> {
        Ok(self.device.take())
    }

    fn connect_tcp(&mut self, _: Option<SocketAddr>, _: SocketAddr) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        self.dialed.borrow_mut().push((self.address, theirs));
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

/// An initiator: its engine, and the handle that users have.
#[derive(Debug)]
pub struct Initiator {
    /// The engine.
    pub engine: Engine<SimulatedEnv>,
    /// The users' handle.
    pub client: Client,
    /// Address of the target.
    pub url: TargetUrl,
}

impl Initiator {
    /// An initiator on the network.
    #[must_use]
    pub fn new(
        (index, protocol): (usize, Protocol),
        port: TargetPortId,
        fabric: &Fabric,
        dialed: &Dialed,
        (plan, rng): (&Plan, &mut Rng),
    ) -> Self {
        let mut device = fabric.endpoint(address(index));
        device.set_mtu(plan.mtus[1]);
        let env = SimulatedEnv {
            address: address(index),
            device: Some(device),
            dialed: Rc::clone(dialed),
            random: Rng::with_seed(rng.u64(..)),
        };
        let builder = Client::builder().pool(POOL).queue_size(rng.u16(1..=32));
        let (client, engine) = builder.attach(env).expect("an engine");
        let at = target::ADDRESS;
        let (extension, guid) = (port.parts().extension, port.parts().guid);
        let url = match protocol {
            Protocol::Srp => {
                format!("srp://{at}:5555/?id_ext={extension:016x}&ioc_guid={guid:016x}")
            }
            Protocol::Iser => format!("iser://{at}:3260/{}", target::IQN),
            Protocol::Iscsi => format!("iscsi://10.0.1.1:3260/{}", target::IQN),
        };
        Self {
            engine,
            client,
            url: url.parse().expect("an address"),
        }
    }
}

/// What went wrong in a run, first of all.
pub type Verdict = Rc<RefCell<Option<String>>>;

/// What a user needs.
#[derive(Clone, Debug)]
pub struct User {
    /// The initiator's port in the history.
    pub port: Port,
    /// What is known of the blocks.
    pub history: Rc<History>,
    /// The disk has a volatile cache.
    pub is_cached: bool,
    /// Where mistakes go.
    pub verdict: Verdict,
}

impl User {
    fn judge<T, E: std::fmt::Display>(&self, result: Result<T, E>) {
        if let Err(error) = result {
            self.verdict
                .borrow_mut()
                .get_or_insert_with(|| error.to_string());
        }
    }

    /// Uses the disk at random.
    pub async fn work(self, lun: Lun, plan: Plan, mut rng: Rng) {
        let lun = lun.with_timeout(plan.timeout);
        for _ in 0..plan.commands {
            let len = rng.u64(1..=plan.longest.min(plan.blocks));
            let first = rng.u64(..=plan.blocks - len);
            let blocks = first..first + len;
            let fua = rng.u8(..6) == 0;
            match rng.u8(..32) {
                0..4 => self.flush(&lun).await,
                4..17 => self.write(&lun, blocks, fua).await,
                17 => self.zero(&lun, blocks, fua, rng.bool()).await,
                18 => self.unmap(&lun, blocks).await,
                19..21 => self.swap(&lun, first, fua).await,
                21 => self.reserve(&lun, &plan, &mut rng).await,
                _ => {
                    self.read(&lun, blocks).await;
                }
            }
        }
    }

    /// The end of a command that writes; `Ok` says whether it is on the medium.
    fn end(&self, id: WriteId, result: Result<bool, LunError>) {
        match result {
            Ok(true) => self.judge(self.history.acknowledge_durable(id)),
            Ok(false) => self.judge(self.history.acknowledge(id)),
            Err(LunError::Check { .. } | LunError::Status(_)) => self.history.refuse(id),
            Err(_) => self.history.lose(id),
        }
    }

    async fn flush(&self, lun: &Lun) {
        let id = self.history.begin_flush(self.port);
        match lun.flush().await {
            Ok(()) => self.judge(self.history.end_flush(id)),
            Err(_) => self.history.fail_flush(id),
        }
    }

    async fn write(&self, lun: &Lun, blocks: std::ops::Range<u64>, fua: bool) {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take(len).await;
        let mut bytes = vec![0; len];
        let offset = blocks.start * BLOCK as u64;
        let id = self.history.begin_write(self.port, blocks, &mut bytes);
        buffer.slice().write(0, &bytes);
        let result = lun.write(offset, buffer, fua).await;
        self.end(id, result.map(|_| fua || !self.is_cached));
    }

    async fn zero(&self, lun: &Lun, blocks: std::ops::Range<u64>, fua: bool, may_unmap: bool) {
        let bytes = blocks.start * BLOCK as u64..blocks.end * BLOCK as u64;
        let id = self.history.begin_zero(self.port, blocks);
        // With FUA it ends with a flush, which may be the one that reports a loss.
        let flush = fua.then(|| self.history.begin_flush(self.port));
        let options = ZeroOptions { may_unmap, fua };
        let result = lun.write_zeroes(bytes, options).await;
        if let Some(flush) = flush {
            match result {
                Ok(()) => self.judge(self.history.end_flush(flush)),
                Err(_) => self.history.fail_flush(flush),
            }
        }
        self.end(id, result.map(|()| fua || !self.is_cached));
    }

    async fn unmap(&self, lun: &Lun, blocks: std::ops::Range<u64>) {
        let bytes = blocks.start * BLOCK as u64..blocks.end * BLOCK as u64;
        let id = self.history.begin_zero(self.port, blocks);
        match lun.discard(bytes).await {
            // A unit may keep blocks that it was asked to unmap (SBC-4 clause 4.7.4.4).
            Ok(()) | Err(LunError::Unsupported) => self.history.refuse(id),
            result => self.end(id, result.map(|()| false)),
        }
    }

    /// COMPARE AND WRITE of a block with what was read of it before.
    async fn swap(&self, lun: &Lun, block: u64, fua: bool) {
        let Some(expected) = self.content(lun, block..block + 1).await else {
            return;
        };
        let buffer = lun.buffers().take(2 * BLOCK).await;
        let mut bytes = vec![0; BLOCK];
        let id = self.history.begin_swap(self.port, block, &mut bytes);
        buffer.slice().write(0, &expected);
        buffer.slice().write(BLOCK, &bytes);
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[13]) = (0x89, u8::from(fua) << 3, 1);
        cdb[2..10].copy_from_slice(&block.to_be_bytes());
        let cdb = Cdb::new(&cdb).expect("sixteen bytes");
        let len = DataLen::Out(2 * BLOCK as u32);
        let end = lun.scsi(cdb, len, IoData::One(buffer)).await;
        match end.result {
            Ok(answer) if answer.status == 0 => {
                let is_durable = fua || !self.is_cached;
                self.judge(self.history.acknowledge_swap(id, &expected, is_durable));
            }
            Ok(answer) => match answer.sense().map(|sense| sense.key) {
                Some(SenseKey::Miscompare) => self.judge(self.history.refute(id)),
                _ => self.history.refuse(id),
            },
            Err(_) => self.history.lose(id),
        }
    }

    /// Registers, and changes the reservation of the unit: one under which all may read. Its answer
    /// matters to nothing; what others write may meet a reservation conflict, or be aborted.
    async fn reserve(&self, lun: &Lun, plan: &Plan, rng: &mut Rng) {
        const REGISTER_AND_IGNORE: u8 = 6;
        let (reserve, release, clear, preempt_and_abort) = (1, 2, 3, 5);
        let action = [reserve, release, release, clear, preempt_and_abort][rng.usize(..5)];
        let other = rng.u64(1..=plan.initiators.len() as u64);
        // Write exclusive: of the holder, of registrants, of all registrants.
        let scope = [1, 5, 7][rng.usize(..3)];
        for (action, keys) in [
            (REGISTER_AND_IGNORE, [0, u64::from(self.port.0)]),
            (action, [u64::from(self.port.0), other]),
        ] {
            let buffer = lun.buffers().take(24).await;
            let mut list = [0; 24];
            list[..8].copy_from_slice(&keys[0].to_be_bytes());
            list[8..16].copy_from_slice(&keys[1].to_be_bytes());
            buffer.slice().write(0, &list);
            let cdb = Cdb::new(&[0x5f, action, scope, 0, 0, 0, 0, 0, 24, 0]).expect("ten bytes");
            drop(lun.scsi(cdb, DataLen::Out(24), IoData::One(buffer)).await);
        }
    }

    /// Reads blocks; returns whether that was possible.
    pub async fn read(&self, lun: &Lun, blocks: std::ops::Range<u64>) -> bool {
        self.content(lun, blocks).await.is_some()
    }

    async fn content(&self, lun: &Lun, blocks: std::ops::Range<u64>) -> Option<Vec<u8>> {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take(len).await;
        let offset = blocks.start * BLOCK as u64;
        let id = self.history.begin_read(self.port, blocks);
        match lun.read(offset, buffer).await {
            Ok(buffer) => {
                let mut bytes = vec![0; len];
                buffer.slice().read(0, &mut bytes);
                self.judge(self.history.end_read(id, &bytes));
                Some(bytes)
            }
            Err(_) => {
                self.history.abandon_read(id);
                None
            }
        }
    }
}

/// Opens the disk, however often that fails.
pub async fn open(client: &Client, url: &TargetUrl) -> Lun {
    loop {
        let Ok(session) = client.connect(url.clone()).await else {
            pause(client).await;
            continue;
        };
        match session.lun(0).await {
            Ok(lun) => return lun.with_timeout(TIMEOUT),
            Err(_) => session.close().await,
        }
        pause(client).await;
    }
}

async fn pause(client: &Client) {
    let never = std::future::pending::<()>();
    let _ = client.timeout(Duration::from_millis(500), never).await;
}
