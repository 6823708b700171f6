//! Tests the initiator engine with the real server in the same process, using UDP on loopback.

use std::path::PathBuf;
use std::time::Duration;

use riser_block::task::block_on;
use riser_block::{Buffer, ExtentKind, ZeroOptions};
use riser_initiator::engine::{Client, IoData, LinkState, ScsiIo, Session};
use riser_initiator::lun::Lun;
use riser_initiator::request::{Cdb, DataLen};
use riser_initiator::scsi::{BlockRange, Command};
use riser_initiator::url::SrpUrl;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_testkit::eventually;
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig};

/// A server on 127.0.`number`.1 that uses the given backend, and a client on 127.0.`number`.2.
struct Rig {
    client: Client,
    config: Config,
    server: Option<Server>,
    number: u8,
}

impl Rig {
    fn new(number: u8, backend: &str) -> Self {
        let text = format!(
            "identity: test\n\
             backends:\n  disk: {backend}\n\
             targets:\n  - name: t\n    portals: [{{ protocol: srp, listen: 127.0.{number}.1 }}]\n    \
             luns: {{ 0: disk, 7: disk }}\n    access: open\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
        let server = Server::start(&config).unwrap();
        Self {
            client: Self::client(number, None),
            config,
            server: Some(server),
            number,
        }
    }

    fn client(number: u8, faults: Option<FaultConfig>) -> Client {
        Client::builder()
            .pool(32 << 20)
            .region_segments(2)
            .build(move || {
                let mut config = RoceConfig::new(std::net::Ipv4Addr::new(127, 0, number, 2).into());
                config.faults.transmit = faults;
                config.faults.receive = faults;
                Roce::open(&config)
            })
            .unwrap()
    }

    fn connect(&self, keys: &str) -> Session {
        let url = format!("srp://127.0.{}.1/0{keys}", self.number);
        let url: SrpUrl = url.parse().unwrap();
        block_on(self.client.connect(&url)).unwrap()
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

fn pattern(seed: u64, len: usize) -> Vec<u8> {
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

fn buffer_of(lun: &Lun, data: &[u8]) -> Buffer {
    let buffer = block_on(lun.buffers().take_buffer(data.len()));
    buffer.slice().write(0, data);
    buffer
}

fn put(lun: &Lun, offset: u64, data: &[u8]) {
    block_on(lun.write(offset, buffer_of(lun, data), false)).unwrap();
}

fn get(lun: &Lun, offset: u64, len: usize) -> Vec<u8> {
    let buffer = block_on(lun.buffers().take_buffer(len));
    block_on(lun.read(offset, buffer)).unwrap().slice().to_vec()
}

#[test]
fn disk_works_over_srp() {
    let rig = Rig::new(61, "{ kind: ram, size: 64MiB, thin: true }");
    let session = rig.connect("?channels=2");
    let luns = block_on(session.luns()).unwrap();
    let numbers: Vec<u32> = luns.iter().map(|l| l.number()).collect();
    assert_eq!(numbers, [0, 7]);
    let lun = block_on(session.lun(0)).unwrap();
    let info = lun.info();
    assert_eq!(
        info.capacity.blocks * u64::from(info.capacity.block_size),
        64 << 20
    );
    assert!(info.identity.naa.is_some() && info.identity.serial.is_some());
    for (seed, offset, len) in [
        (1, 0, 512),
        (2, 512, 8192),
        (3, 1 << 20, 1 << 20),
        (4, 8 << 20, 300 * 512),
    ] {
        let data = pattern(seed, len);
        put(&lun, offset, &data);
        assert_eq!(get(&lun, offset, len), data);
    }
    block_on(lun.flush()).unwrap();
    assert_eq!(get(&lun, 1 << 20, 1 << 20), pattern(3, 1 << 20));
    let zero = ZeroOptions {
        may_unmap: true,
        fua: true,
        fast: false,
    };
    block_on(lun.write_zeroes((1 << 20)..(1 << 20) + 65536, zero)).unwrap();
    assert_eq!(get(&lun, 1 << 20, 65536), vec![0; 65536]);
    block_on(lun.discard((8 << 20)..(9 << 20))).unwrap();
    let status = block_on(lun.status((8 << 20)..(10 << 20))).unwrap();
    assert_eq!(status[0].kind, ExtentKind::Hole);
    let missing = block_on(session.lun(3)).unwrap_err();
    assert!(missing.to_string().contains("not a disk"), "{missing}");
    block_on(session.close());
    assert_eq!(session.status().link(), LinkState::Closed);
    assert_eq!(rig.client.buffers().free(), 32 << 20);
}

#[test]
fn scattered_buffers_travel_in_tables() {
    let rig = Rig::new(62, "{ kind: ram, size: 16MiB }");
    for keys in [
        "?immediate=0",
        "?immediate=0&cmd_sg_entries=2&allow_ext_sg=1",
        "?immediate=0&register_always=0&cmd_sg_entries=2&allow_ext_sg=1",
    ] {
        let session = rig.connect(keys);
        let lun = block_on(session.lun(0)).unwrap();
        let io =
            |command, data| ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(30));
        let pieces: Vec<Vec<u8>> = (0..12)
            .map(|i| pattern(i, 1024 + 512 * i as usize))
            .collect();
        let len: usize = pieces.iter().map(Vec::len).sum();
        let range = BlockRange {
            lba: 100,
            blocks: (len / 512) as u32,
        };
        let buffers = pieces.iter().map(|p| buffer_of(&lun, p)).collect();
        let write = io(
            Command::write(range, len as u32, false),
            IoData::Many(buffers),
        );
        let end = block_on(session.submit(write));
        assert_eq!(end.result.unwrap().status, 0, "{keys}");
        for buffer in end.data.buffers() {
            buffer.slice().fill(0, buffer.len(), 0xee);
        }
        let end = block_on(session.submit(io(Command::read(range, len as u32), end.data)));
        assert_eq!(end.result.unwrap().transferred, len as u32, "{keys}");
        for (buffer, piece) in end.data.buffers().iter().zip(&pieces) {
            assert_eq!(&buffer.slice().to_vec(), piece, "{keys}");
        }
        block_on(session.close());
    }
}

#[test]
fn errors_come_with_their_sense() {
    let rig = Rig::new(63, "{ kind: ram, size: 1MiB, read_only: true }");
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    assert!(lun.info().caching.write_protected);
    let error = block_on(lun.write(0, buffer_of(&lun, &[1; 512]), false)).unwrap_err();
    assert!(
        error.to_string().contains("data protect: WRITE PROTECTED"),
        "{error}"
    );
    let beyond = Cdb::new(&[0x88, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]).unwrap();
    let data = IoData::One(block_on(lun.buffers().take_buffer(512)));
    let answer = block_on(lun.scsi(beyond, DataLen::In(512), data))
        .result
        .unwrap();
    assert_eq!(answer.status, 2);
    assert_eq!(answer.sense().unwrap().additional.code, 0x21);
    assert_eq!(answer.transferred, 0);
}

#[test]
fn lossy_wire_loses_nothing() {
    let rig = Rig::new(64, "{ kind: ram, size: 32MiB }");
    let client = Rig::client(65, Some(FaultConfig::percent(3, 2.0, 1.0, 1.0, 2.0)));
    let url: SrpUrl = "srp://127.0.64.1/0?channels=2".parse().unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..24 {
        let data = pattern(round, 32768 * (1 + round as usize % 5));
        put(&lun, (round % 7) << 20, &data);
        assert_eq!(get(&lun, (round % 7) << 20, data.len()), data);
    }
    drop((lun, session));
    client.shutdown();
    drop(rig);
}

#[test]
fn session_reconnects_after_server_restart() {
    let path: PathBuf = std::env::temp_dir().join(format!("riser-e2e-{}.img", std::process::id()));
    let backend = format!(
        "{{ kind: file, path: {}, size: 16MiB, create: true }}",
        path.display()
    );
    let mut rig = Rig::new(66, &backend);
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 0, &pattern(1, 65536));
    for round in 2..4 {
        rig.server.take().unwrap().shutdown().unwrap();
        let waiting = session.submit(
            lun.write_io(65536, buffer_of(&lun, &pattern(round, 4096)), true)
                .unwrap(),
        );
        // The session is waiting with the write, because its server is not running.
        eventually("the session is down", Duration::from_secs(60), || {
            session.status().link() != LinkState::Live
        });
        rig.server = Some(Server::start(&rig.config).unwrap());
        Lun::completed_buffer(block_on(waiting)).unwrap();
        assert_eq!(get(&lun, 0, 65536), pattern(1, 65536));
        assert_eq!(get(&lun, 65536, 4096), pattern(round, 4096));
    }
    assert!(session.status().reconnects() >= 2);
    drop((lun, session, rig));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn many_sessions_share_server() {
    let rig = Rig::new(67, "{ kind: ram, size: 64MiB }");
    let sessions: Vec<Session> = (1..=32)
        .map(|i| rig.connect(&format!("?initiator_ext={i:x}&queue_size=8")))
        .collect();
    let luns: Vec<Lun> = sessions
        .iter()
        .map(|s| block_on(s.lun(0)).unwrap())
        .collect();
    // A session is counted when the server knows that its connection has been established.
    assert_eq!(rig.server.as_ref().unwrap().sessions(), 32);
    for round in 0..4 {
        let writes: Vec<_> = luns
            .iter()
            .enumerate()
            .map(|(i, lun)| {
                let data = buffer_of(lun, &pattern(round * 100 + i as u64, 65536));
                lun.session()
                    .submit(lun.write_io((i as u64) << 20, data, false).unwrap())
            })
            .collect();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        for (i, lun) in luns.iter().enumerate() {
            let at = ((i + 1) % luns.len()) as u64;
            assert_eq!(get(lun, at << 20, 65536), pattern(round * 100 + at, 65536));
        }
    }
    drop(luns);
    drop(sessions);
    eventually("the sessions end", Duration::from_secs(30), || {
        rig.server.as_ref().unwrap().sessions() == 0
    });
}
