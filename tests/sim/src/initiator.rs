//! Initiators, and what their users do.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use riser_initiator::engine::{Client, Engine, Env};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::url::TargetUrl;
use riser_scsi::srp::TargetPortId;
use riser_tests::history::{BLOCK, History, Port};
use riser_transport::loopback::{Endpoint, Fabric};

use crate::plan::{Plan, Protocol};
use crate::target;

/// Streams that initiators have opened and the network has not seen.
pub type Dialed = Rc<RefCell<Vec<(IpAddr, UnixStream)>>>;

/// Memory of an initiator for data.
const POOL: usize = 4 << 20;

/// Time that a command may take.
const TIMEOUT: Duration = Duration::from_secs(60);

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
        let env = SimulatedEnv {
            address: address(index),
            device: Some(fabric.endpoint(address(index))),
            dialed: Rc::clone(dialed),
            random: Rng::with_seed(rng.u64(..)),
        };
        let builder = Client::builder().pool(POOL).queue_size(rng.u16(1..=32));
        let (client, engine) = builder.attach(env).expect("an engine");
        let at = target::address(rng.usize(..plan.workers));
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

    /// Reads, writes and flushes at random.
    pub async fn work(self, lun: Lun, plan: Plan, mut rng: Rng) {
        for _ in 0..plan.commands {
            let len = rng.u64(1..=plan.longest.min(plan.blocks));
            let first = rng.u64(..=plan.blocks - len);
            match rng.u8(..10) {
                0 => drop(lun.flush().await),
                1..6 => self.write(&lun, first..first + len, rng.u8(..8) == 0).await,
                _ => {
                    self.read(&lun, first..first + len).await;
                }
            }
        }
    }

    async fn write(&self, lun: &Lun, blocks: std::ops::Range<u64>, fua: bool) {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take(len).await;
        let mut bytes = vec![0; len];
        let offset = blocks.start * BLOCK as u64;
        let id = self.history.begin_write(self.port, blocks, &mut bytes);
        buffer.slice().write(0, &bytes);
        match lun.write(offset, buffer, fua).await {
            Ok(_) => self.judge(self.history.acknowledge(id)),
            Err(LunError::Check { .. } | LunError::Status(_)) => self.history.refuse(id),
            Err(_) => self.history.lose(id),
        }
    }

    /// Reads blocks; returns whether that was possible.
    pub async fn read(&self, lun: &Lun, blocks: std::ops::Range<u64>) -> bool {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = lun.buffers().take(len).await;
        let offset = blocks.start * BLOCK as u64;
        let id = self.history.begin_read(self.port, blocks);
        match lun.read(offset, buffer).await {
            Ok(buffer) => {
                let mut bytes = vec![0; len];
                buffer.slice().read(0, &mut bytes);
                self.judge(self.history.end_read(id, &bytes));
                true
            }
            Err(_) => {
                self.history.abandon_read(id);
                false
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
