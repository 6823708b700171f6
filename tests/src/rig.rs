//! Test setup for the initiator library: a client and a server with a single disk, for any protocol.

use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use riser_block::Buffer;
use riser_block::task::block_on;
use riser_initiator::engine::{Client, ClientBuilder, EngineError, IoData, ScsiIo, Session};
use riser_initiator::lun::Lun;
use riser_initiator::scsi::{BlockRange, Command};
use riser_initiator::session::Timing;
use riser_initiator::url::{IscsiUrl, TargetUrl};
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

/// Protocol of a portal. The value is the second byte of the addresses in its tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Srp = 71,
    Iser = 72,
    Tcp = 73,
}

impl Protocol {
    /// Returns the protocol of a test.
    pub fn of(name: &str) -> Self {
        match name {
            "srp" => Self::Srp,
            "iser" => Self::Iser,
            "tcp" => Self::Tcp,
            other => panic!("unknown protocol {other}"),
        }
    }

    /// Returns the scheme of an address, which is also the name in the configuration.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Srp => "srp",
            Self::Iser => "iser",
            Self::Tcp => "iscsi",
        }
    }
}

/// A client, and a server on host 1 of a network.
pub struct Rig {
    pub client: Client,
    pub server: Option<Server>,
    protocol: Protocol,
    number: u8,
    backend: String,
    more: String,
    /// File to remove.
    file: Option<PathBuf>,
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

fn client(protocol: Protocol, number: u8, faults: Option<FaultConfig>) -> Client {
    let builder = match protocol {
        Protocol::Tcp => return builder().without_device().unwrap(),
        Protocol::Srp => builder().region_segments(2),
        Protocol::Iser => builder(),
    };
    let client = builder.build(move || {
        let address = Ipv4Addr::new(127, protocol as u8, number, 2);
        let mut config = RoceConfig::new(address.into());
        config.faults.transmit = faults;
        config.faults.receive = faults;
        Roce::open(&config)
    });
    client.unwrap()
}

impl Rig {
    /// Serves a backend. Each test uses another network number.
    pub fn new(protocol: Protocol, number: u8, backend: &str) -> Self {
        Self::with(protocol, number, backend, "", None)
    }

    /// Same as [`Rig::new`], with more settings of the target, and a software NIC of the client with
    /// these faults.
    pub fn with(
        protocol: Protocol,
        number: u8,
        backend: &str,
        more: &str,
        faults: Option<FaultConfig>,
    ) -> Self {
        let mut rig = Self {
            client: client(protocol, number, faults),
            server: None,
            protocol,
            number,
            backend: backend.to_owned(),
            more: more.to_owned(),
            file: None,
        };
        rig.serve(&[1]);
        rig
    }

    /// Serves a new file.
    pub fn with_file(protocol: Protocol, number: u8, size: &str) -> Self {
        let id = std::process::id();
        let name = format!("riser-{}-{number}-{id}.img", protocol.scheme());
        let path = std::env::temp_dir().join(name);
        let shown = path.display();
        let backend = format!("{{ kind: file, path: {shown}, size: {size}, create: true }}");
        let mut rig = Self::new(protocol, number, &backend);
        rig.file = Some(path);
        rig
    }

    /// Returns an address of the network.
    pub fn address(&self, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, self.protocol as u8, self.number, host)
    }

    /// Stops the server.
    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown().unwrap();
        }
    }

    /// Restarts the server with portals on these hosts.
    pub fn serve(&mut self, hosts: &[u8]) {
        let portals: Vec<_> = hosts.iter().map(|host| (*host, "")).collect();
        self.serve_portals(&portals);
    }

    /// Same as [`Rig::serve`], with more settings of each portal.
    pub fn serve_portals(&mut self, portals: &[(u8, &str)]) {
        self.stop();
        let scheme = self.protocol.scheme();
        let portal = |(host, more): &(u8, &str)| {
            let listen = self.address(*host);
            format!("{{ protocol: {scheme}, listen: {listen}{more} }}")
        };
        let portals: Vec<_> = portals.iter().map(portal).collect();
        let iqn = match self.protocol {
            Protocol::Srp => String::new(),
            _ => format!("iqn: {IQN}\n    "),
        };
        let more = self.more.lines().map(|line| format!("    {line}\n"));
        let text = format!(
            "identity: test\n\
             backends:\n  disk: {}\n\
             targets:\n  - name: t\n    {iqn}portals: [{}]\n    \
             luns: {{ 0: disk, 7: disk }}\n    access: open\n{}",
            self.backend,
            portals.join(", "),
            more.collect::<String>()
        );
        let config = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
        self.server = Some(start(&config));
    }

    /// Returns the address of LUN 0 on a host.
    pub fn url_on(&self, host: u8, user: &str, keys: &str) -> TargetUrl {
        let (scheme, address) = (self.protocol.scheme(), self.address(host));
        let target = match self.protocol {
            Protocol::Srp => "0".to_owned(),
            _ => format!("{IQN}/0"),
        };
        let url = format!("{scheme}://{user}{address}/{target}{keys}");
        url.parse().unwrap()
    }

    /// Returns the iSCSI address of LUN 0.
    pub fn iscsi_url(&self, user: &str) -> IscsiUrl {
        match self.url_on(1, user, "") {
            TargetUrl::Iscsi(url) => url,
            TargetUrl::Srp(url) => panic!("{url:?}"),
        }
    }

    pub fn try_connect(&self, user: &str, keys: &str) -> Result<Session, EngineError> {
        block_on(self.client.connect(self.url_on(1, user, keys)))
    }

    pub fn connect(&self, keys: &str) -> Session {
        self.try_connect("", keys)
            .unwrap_or_else(|e| panic!("{keys}: {e}"))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.client.shutdown();
        self.stop();
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
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

/// Writes and reads a buffer with pieces of these lengths, which are a multiple of a block in total.
pub fn scattered(lun: &Lun, lens: &[usize], keys: &str) {
    let io = |command, data| ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(30));
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
