//! Test setup for the iSCSI initiator: a server with a single disk, and a client connected to it.

use std::net::TcpStream;
use std::process::{Output, Stdio};
use std::time::Duration;

use riser_block::Buffer;
use riser_block::task::block_on;
use riser_initiator::engine::{Client, ClientBuilder, EngineError, IoData, ScsiIo, Session};
use riser_initiator::lun::Lun;
use riser_initiator::scsi::{BlockRange, Command};
use riser_initiator::session::Timing;
use riser_initiator::url::IscsiUrl;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_testkit::eventually_ok;
use riser_testkit::programs::Pair;
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig};

pub const IQN: &str = "iqn.2026-01.com.example:disk";
pub const SECRET: &str = "initiator-secret";
pub const TARGET_SECRET: &str = "target-secret-1";
pub const CHAP: &str = "chap:\n  users: [{ name: me, secret: initiator-secret }]\n  \
                    mutual: { name: you, secret: target-secret-1 }";

/// A client, and a server on 127.0.`number`.1.
pub struct Rig {
    pub client: Client,
    pub config: Config,
    pub server: Option<Server>,
    scheme: &'static str,
    number: u8,
}

pub fn start(config: &Config) -> Server {
    // The port may not be available immediately after its last use.
    eventually_ok("a server", Duration::from_secs(10), || {
        Server::start(config)
    })
}

pub fn builder() -> ClientBuilder {
    let timing = Timing {
        login: Duration::from_secs(3),
        ..Timing::default()
    };
    Client::builder().pool(32 << 20).timing(timing)
}

impl Rig {
    /// Creates a client for TCP, which doesn't need a device.
    pub fn tcp(number: u8, backend: &str, more: &str) -> Self {
        Self::new(
            number,
            backend,
            more,
            "iscsi",
            builder().without_device().unwrap(),
        )
    }

    /// Creates a client for iSER with a software NIC on 127.0.`number`.2.
    pub fn iser(number: u8, backend: &str, more: &str, faults: Option<FaultConfig>) -> Self {
        let client = builder().build(move || {
            let mut config = RoceConfig::new(std::net::Ipv4Addr::new(127, 0, number, 2).into());
            config.faults.transmit = faults;
            config.faults.receive = faults;
            Roce::open(&config)
        });
        Self::new(number, backend, more, "iser", client.unwrap())
    }

    fn new(number: u8, backend: &str, more: &str, scheme: &'static str, client: Client) -> Self {
        let text = format!(
            "identity: test\n\
             backends:\n  disk: {backend}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    \
             portals: [{{ protocol: {scheme}, listen: 127.0.{number}.1 }}]\n    \
             luns: {{ 0: disk, 7: disk }}\n    access: open\n{}",
            more.lines()
                .map(|line| format!("    {line}\n"))
                .collect::<String>()
        );
        let config = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
        Self {
            client,
            scheme,
            server: Some(start(&config)),
            config,
            number,
        }
    }

    pub fn url(&self, user: &str, keys: &str) -> IscsiUrl {
        let url = format!(
            "{}://{user}127.0.{}.1/{IQN}/0{keys}",
            self.scheme, self.number
        );
        url.parse().unwrap()
    }

    pub fn try_connect(&self, user: &str, keys: &str) -> Result<Session, EngineError> {
        block_on(self.client.connect(&self.url(user, keys)))
    }

    pub fn connect(&self, keys: &str) -> Session {
        self.try_connect("", keys)
            .unwrap_or_else(|e| panic!("{keys}: {e}"))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.client.shutdown();
        if let Some(server) = self.server.take() {
            server.shutdown().unwrap();
        }
    }
}

pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

pub fn buffer_of(lun: &Lun, data: &[u8]) -> Buffer {
    let buffer = block_on(lun.buffers().take_buffer(data.len()));
    buffer.slice().write(0, data);
    buffer
}

pub fn put(lun: &Lun, offset: u64, data: &[u8]) {
    block_on(lun.write(offset, buffer_of(lun, data), false)).unwrap();
}

pub fn get(lun: &Lun, offset: u64, len: usize) -> Vec<u8> {
    let buffer = block_on(lun.buffers().take_buffer(len));
    block_on(lun.read(offset, buffer)).unwrap().slice().to_vec()
}

/// Reads and writes with sizes that are not aligned to blocks or PDUs.
pub fn scattered(lun: &Lun, keys: &str) {
    let io = |command, data| ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(30));
    let lens = [1, 511, 1023, 1025, 4096, 3, 8189, 100_000, 51_552];
    let pieces: Vec<Vec<u8>> = lens.iter().map(|len| pattern(*len as u64, *len)).collect();
    let len: usize = lens.iter().sum::<usize>();
    assert_eq!(len % 512, 0);
    let range = BlockRange {
        lba: 100,
        blocks: (len / 512) as u32,
    };
    let buffers = pieces.iter().map(|p| buffer_of(lun, p)).collect();
    let write = io(
        Command::write(range, len as u32, false),
        IoData::Many(buffers),
    );
    let end = block_on(lun.session().submit(write));
    assert_eq!(end.result.unwrap().status, 0, "{keys}");
    for buffer in end.data.buffers() {
        buffer.slice().fill(0, buffer.len(), 0xee);
    }
    let end = block_on(
        lun.session()
            .submit(io(Command::read(range, len as u32), end.data)),
    );
    assert_eq!(end.result.unwrap().transferred, len as u32, "{keys}");
    for (buffer, piece) in end.data.buffers().iter().zip(&pieces) {
        assert!(&buffer.slice().to_vec() == piece, "{keys}");
    }
}

pub fn pair(network: u8, scheme: &str, more: &str) -> Pair {
    let target = format!(
        "iqn: {IQN}\nportals: [{{ protocol: {scheme}, listen: 127.0.{network}.1 }}]\n{more}"
    );
    let backend = "{ kind: file, path: DIR/disk.img, size: 64MiB, create: true }";
    let pair = Pair::with_target(network, backend, &target);
    if scheme != "iscsi" {
        return pair;
    }
    // The server was just started.
    eventually("riserd listens", || {
        TcpStream::connect((format!("127.0.{network}.1"), 3260)).is_ok()
    });
    pair
}

/// Waits until a condition is true, using a timeout that is enough for a slow machine.
#[track_caller]
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    riser_testkit::eventually(what, Duration::from_secs(60), holds);
}

/// Waits until the file used for the disk of [`pair`] contains data, so that we know the writes
/// have started.
pub fn wait_for_writes(pair: &Pair) {
    use std::os::unix::fs::MetadataExt;
    let disk = pair.path("disk.img");
    eventually("writes to the disk", || {
        std::fs::metadata(&disk).is_ok_and(|m| m.blocks() * 512 >= 1 << 20)
    });
}

pub fn run(pair: &Pair, args: &[&str], password: &str) -> Output {
    let mut command = pair.command(args);
    command
        .env("RISER_CHAP_PASSWORD", password)
        .stdin(Stdio::null());
    command.output().unwrap()
}

/// Returns arguments to run random writes and verify them.
pub fn fio(uri: &str) -> Vec<String> {
    [
        "--name=verify",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randwrite",
        "--bsrange=512-256k",
        "--blockalign=512",
        "--size=32M",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--verify_state_save=0",
    ]
    .map(str::to_owned)
    .to_vec()
}
