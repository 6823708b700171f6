//! Tests that initiators receive a warning when a thin-provisioned backend is almost full.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;

const IQN: &str = "iqn.2026-01.org.example:t";
const MIB: u32 = 2048;

/// An 8 MiB sparse file with a threshold of 50 %.
struct Bench {
    server: Server,
    to: SocketAddr,
    dir: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        drop(listener);
        let name = format!("riserd-threshold-{}-{}", std::process::id(), to.port());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let disk = format!(
            "f: {{ kind: file, path: {}/disk, size: 8MiB, create: true, threshold: 50% }}",
            dir.display()
        );
        let portals = [("iscsi", to.to_string())];
        let text = open_target(IQN, &portals, &disk, "0: f", "workers: { count: 1 }\n");
        let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
        Self { server, to, dir }
    }

    fn login(&self, isid: u8) -> Client {
        Client::ready_at(self.to, IQN, isid)
    }

    fn measure(&self) {
        assert!(self.server.measurer()());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Writes `count` blocks.
fn write(client: &mut Client, mut lba: u32, mut count: u32) {
    while count > 0 {
        let blocks = count.min(16) as u16;
        let ([a, b, c, d], [high, low]) = (lba.to_be_bytes(), blocks.to_be_bytes());
        let data = vec![7; usize::from(blocks) * 512];
        let cdb = [0x2a, 0, a, b, c, d, 0, high, low, 0];
        assert_eq!(client.command(&cdb, true, data.len() as u32, &data).0, 0);
        lba += u32::from(blocks);
        count -= u32::from(blocks);
    }
}

/// Unmaps all blocks of the disk.
fn unmap(client: &mut Client) {
    let mut list = [0; 24];
    (list[1], list[3]) = (22, 16);
    list[16..20].copy_from_slice(&(8 * MIB).to_be_bytes());
    let cdb = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(client.command(&cdb, true, 24, &list).0, 0);
}

/// Sends TEST UNIT READY. Returns the status, and sense key, ASC and ASCQ if there is sense data.
fn ready(client: &mut Client) -> (u8, Option<[u8; 3]>) {
    client.send_command(&[0; 6], false, 0, &[]);
    let (pdu, _, data) = client.receive().unwrap();
    let riser_scsi::iscsi::pdu::FromTarget::ScsiResponse(response) = pdu else {
        panic!("{pdu:?}");
    };
    // Sense data is sent after its length.
    let sense = data.get(2..16);
    (
        response.status,
        sense.map(|sense| [sense[2], sense[12], sense[13]]),
    )
}

const FILLING: (u8, Option<[u8; 3]>) = (2, Some([6, 0x38, 0x07]));

#[test]
fn initiators_are_warned_once_per_threshold() {
    let bench = Bench::new();
    let (mut one, mut other) = (bench.login(1), bench.login(2));
    bench.measure();
    write(&mut one, 0, 3 * MIB);
    bench.measure();
    assert_eq!((ready(&mut one), ready(&mut other)), ((0, None), (0, None)));
    write(&mut one, 3 * MIB, 2 * MIB);
    bench.measure();
    assert_eq!((ready(&mut one), ready(&mut other)), (FILLING, FILLING));
    write(&mut one, 5 * MIB, MIB);
    bench.measure();
    assert_eq!((ready(&mut one), ready(&mut other)), ((0, None), (0, None)));
    unmap(&mut one);
    bench.measure();
    assert_eq!((ready(&mut one), ready(&mut other)), ((0, None), (0, None)));
    write(&mut one, 0, 5 * MIB);
    bench.measure();
    assert_eq!((ready(&mut one), ready(&mut other)), (FILLING, FILLING));
    drop((one, other));
}

/// After a restart, the daemon checks the usage of a disk before initiators log in again.
#[test]
fn later_initiator_is_warned() {
    let bench = Bench::new();
    let mut one = bench.login(1);
    write(&mut one, 0, 5 * MIB);
    bench.measure();
    let mut other = bench.login(2);
    assert_eq!(ready(&mut other), FILLING);
    assert_eq!(ready(&mut other), (0, None));
    assert_eq!(ready(&mut one), FILLING);
    unmap(&mut one);
    bench.measure();
    let mut third = bench.login(3);
    assert_eq!(ready(&mut third), (0, None));
    drop((one, other, third));
}
