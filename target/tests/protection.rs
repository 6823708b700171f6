//! Tests of protection information that is stored in a file, over iSCSI.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riser_scsi::config::ProtectionType;
use riser_scsi::iscsi::pdu::FromTarget;
use riser_target::backend::open_all;
use riser_target::config::Config;
use riser_target::server::reload::ChangeStep;
use riser_target::server::{Keepers, Server};
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::eventually;

const IQN: &str = "iqn.2026-01.org.example:t";

/// Offset of the first frame in the file of a disk with this block size.
fn first_frame(block: u64) -> u64 {
    (64_u64 << 10).next_multiple_of(block + 8)
}

struct Disk {
    server: Option<Server>,
    text: String,
    to: SocketAddr,
    dir: PathBuf,
    block: u64,
}

impl Disk {
    fn new(protection_type: u8, block: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        drop(listener);
        let name = format!("riserd-protection-{}-{}", std::process::id(), to.port());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        let disk = format!(
            "f: {{ kind: file, path: {}/disk, size: 1MiB, create: true, block_size: {block}, \
             protection: {{ type: {protection_type} }} }}",
            dir.display()
        );
        let portals = [("iscsi", to.to_string())];
        let text = open_target(IQN, &portals, &disk, "0: f", "workers: { count: 1 }\n");
        let mut disk = Self {
            server: None,
            text,
            to,
            dir,
            block,
        };
        disk.start();
        disk
    }

    fn start(&mut self) {
        let config = Config::parse(&self.text, "test.yaml").unwrap();
        self.server = Some(Server::start(&config).unwrap());
    }

    fn stop(&mut self) {
        let server = self.server.take().expect("it runs");
        server.shutdown().unwrap();
    }

    /// Replaces the server like an upgrade does.
    fn hand_over(&mut self) {
        let server = self.server.take().expect("it runs");
        let state = server.export_state(Vec::new()).unwrap();
        let config = Config::parse(&self.text, "test.yaml").unwrap();
        let next = Server::start_after(&config, &state, Keepers::default());
        self.server = Some(next.unwrap());
    }

    fn log_in(&self) -> Client {
        Client::ready_at(self.to, IQN, 1)
    }

    /// Inverts a bit of a frame in the file.
    fn damage(&self, lba: u64, at: u64) {
        let file = File::options()
            .read(true)
            .write(true)
            .open(self.dir.join("disk"))
            .unwrap();
        let at = first_frame(self.block) + lba * (self.block + 8) + at;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// READ (10) and WRITE (10) with RDPROTECT or WRPROTECT.
fn cdb(op: u8, protect: u8, lba: u8, blocks: u8) -> [u8; 10] {
    [op, protect << 5, 0, 0, 0, lba, 0, 0, blocks, 0]
}

/// Sends a command, and returns its status, its data, and sense key, INFORMATION, ASC and ASCQ.
fn send(client: &mut Client, cdb: &[u8], len: usize, data: &[u8]) -> (u8, Vec<u8>, [u8; 7]) {
    client.send_command(cdb, !data.is_empty(), len as u32, data);
    let mut read = Vec::new();
    loop {
        let (pdu, _, data) = client.receive().unwrap();
        match pdu {
            FromTarget::DataIn(piece) => {
                read.extend(data);
                if piece.status.is_some() {
                    return (0, read, [0; 7]);
                }
            }
            FromTarget::ScsiResponse(response) => {
                // Sense data is sent after its length.
                let sense = data.get(2..).filter(|sense| sense.len() >= 14);
                let sense = sense.map_or([0; 7], |s| [s[2], s[3], s[4], s[5], s[6], s[12], s[13]]);
                return (response.status, read, sense);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// CRC-16/T10-DIF.
fn guard(block: &[u8]) -> [u8; 2] {
    let mut crc = 0_u16;
    for byte in block {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = match crc & 0x8000 {
                0 => crc << 1,
                _ => crc << 1 ^ 0x8bb7,
            };
        }
    }
    crc.to_be_bytes()
}

/// Returns blocks, each followed by its tuple.
fn frames(block: u64, lba: u8, blocks: u8) -> Vec<u8> {
    let frame = |n: u8| {
        let mut bytes = vec![n ^ 0x5a; block as usize];
        bytes[0] = n;
        let tuple = [guard(&bytes).as_slice(), &[0x12, 0x34, 0, 0, 0, n]].concat();
        [bytes, tuple].concat()
    };
    (lba..lba + blocks).flat_map(frame).collect()
}

#[test]
fn tuples_are_stored_and_checked() {
    for (protection_type, block) in [(1, 512), (1, 4096), (3, 512), (3, 4096)] {
        let mut disk = Disk::new(protection_type, block);
        let mut client = disk.log_in();
        let written = frames(block, 20, 4);
        let write = cdb(0x2a, 1, 20, 4);
        let (status, _, sense) = send(&mut client, &write, written.len(), &written);
        assert_eq!((status, sense), (0, [0; 7]), "{protection_type} {block}");
        let read = |client: &mut Client, protect, lba, blocks: u8| {
            let frame = if protect == 0 { block } else { block + 8 };
            let len = usize::from(blocks) * frame as usize;
            send(client, &cdb(0x28, protect, lba, blocks), len, &[])
        };
        assert_eq!(read(&mut client, 1, 20, 4).1, written);
        // Blocks that were never written have deallocated tuples.
        let (_, empty, _) = read(&mut client, 1, 24, 1);
        assert!(empty[..block as usize].iter().all(|byte| *byte == 0));
        assert_eq!(empty[block as usize..], [0xff; 8]);
        // A write without protection information.
        let plain = vec![7; block as usize];
        let (status, ..) = send(&mut client, &cdb(0x2a, 0, 30, 1), plain.len(), &plain);
        assert_eq!(status, 0);
        drop(client);
        disk.stop();
        disk.start();
        let mut client = disk.log_in();
        assert_eq!(read(&mut client, 1, 20, 4).1, written);
        let (_, stored, _) = read(&mut client, 1, 30, 1);
        assert_eq!(stored[..block as usize], plain);
        assert_eq!(stored[block as usize..][..2], guard(&plain));
        // A damaged block is never returned, with or without RDPROTECT.
        disk.damage(22, 100);
        disk.damage(30, block + 1);
        for protect in [0, 1] {
            let (status, data, sense) = read(&mut client, protect, 20, 4);
            assert_eq!((status, sense), (2, [0x0b, 0, 0, 0, 22, 0x10, 0x01]));
            assert!(data.is_empty(), "{} bytes were sent", data.len());
            let (status, _, sense) = read(&mut client, protect, 30, 1);
            assert_eq!((status, sense), (2, [0x0b, 0, 0, 0, 30, 0x10, 0x01]));
        }
        assert_eq!(
            read(&mut client, 1, 20, 2).1,
            written[..2 * (block as usize + 8)]
        );
        // A damaged reference tag is only checked with type 1.
        disk.damage(23, block + 7);
        let (status, _, sense) = read(&mut client, 0, 23, 1);
        match protection_type {
            1 => assert_eq!((status, sense), (2, [0x0b, 0, 0, 0, 23, 0x10, 0x03])),
            _ => assert_eq!(status, 0),
        }
        // Another write repairs them.
        let (status, ..) = send(&mut client, &write, written.len(), &written);
        assert_eq!(status, 0);
        assert_eq!(read(&mut client, 1, 20, 4).1, written);
        drop(client);
        disk.stop();
    }
}

#[test]
fn protected_disk_refuses_changes_of_protection() {
    let mut disk = Disk::new(1, 512);
    let server = disk.server.as_mut().unwrap();
    for other in [
        "",
        ", protection: { type: 2 }",
        ", protection: { type: 1, owner: client }",
    ] {
        let text = disk.text.replace(", protection: { type: 1 }", other);
        assert_ne!(text, disk.text);
        let config = Config::parse(&text, "test.yaml").unwrap();
        let error = server.change(config).unwrap_err().to_string();
        assert!(error.contains("backend f changed"), "{error}");
    }
    disk.stop();
}

/// FORMAT UNIT with a parameter list. Returns its status.
fn format(client: &mut Client, information: u8, usage: u8) -> u8 {
    let cdb = [0x04, information << 6 | 0x10, 0, 0, 0, 0];
    let (status, _, sense) = send(client, &cdb, 4, &[usage, 0, 0, 0]);
    assert_eq!(sense, [0; 7]);
    status
}

/// Returns PROT_EN and P_TYPE in READ CAPACITY (16).
fn reported_type(client: &mut Client) -> u8 {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x10, 32);
    let (status, data, _) = send(client, &cdb, 32, &[]);
    assert_eq!(status, 0);
    data[12]
}

#[test]
fn format_changes_stored_type() {
    let mut disk = Disk::new(1, 512);
    let written = frames(512, 20, 4);
    for (information, usage, reported) in [(0b11, 1, 0b0101), (0b00, 0, 0), (0b10, 0, 0b0001)] {
        let mut client = disk.log_in();
        let write = |client: &mut Client, protect| match protect {
            0 => send(client, &cdb(0x2a, 0, 20, 4), 2048, &[7; 2048]).0,
            _ => send(client, &cdb(0x2a, protect, 20, 4), written.len(), &written).0,
        };
        assert_eq!(write(&mut client, 0), 0);
        assert_eq!(format(&mut client, information, usage), 0);
        assert_eq!(reported_type(&mut client), reported);
        let read = |client: &mut Client| send(client, &cdb(0x28, 0, 20, 4), 2048, &[]).1;
        assert_eq!(read(&mut client), [0; 2048]);
        // WRPROTECT is refused without protection.
        let status = if reported == 0 { 2 } else { 0 };
        assert_eq!(write(&mut client, 1), status);
        assert_eq!(write(&mut client, 0), 0);
        drop(client);
        // The configuration only has the type of a new file.
        for is_handover in [false, true] {
            match is_handover {
                true => disk.hand_over(),
                false => {
                    disk.stop();
                    disk.start();
                }
            }
            let mut client = disk.log_in();
            assert_eq!(reported_type(&mut client), reported);
            assert_eq!(read(&mut client), [7; 2048]);
            drop(client);
        }
    }
    disk.stop();
}

/// Commands of other sessions use either the previous type with the previous blocks, or the new type
/// with erased blocks.
#[test]
fn format_during_load_fails_no_check() {
    let mut disk = Disk::new(1, 512);
    let is_over = AtomicBool::new(false);
    let to = disk.to;
    let load = &|isid| {
        let mut client = Client::ready_at(to, IQN, isid);
        let mut count = 0;
        while !is_over.load(Ordering::Relaxed) {
            let write = send(&mut client, &cdb(0x2a, 0, 20, 8), 4096, &[isid; 4096]);
            let read = send(&mut client, &cdb(0x28, 0, 16, 16), 8192, &[]);
            for (status, _, sense) in [write, read] {
                let is_changed = status == 2 && sense[0] == 6;
                assert!(status == 0 || is_changed, "{status} {sense:x?}");
                count += 1;
            }
        }
        count
    };
    let server = Mutex::new(disk.server.take().unwrap());
    std::thread::scope(|scope| {
        let loads = [2, 3].map(|isid| scope.spawn(move || load(isid)));
        let mut client = disk.log_in();
        for (information, usage) in [(0b11, 1), (0b10, 0), (0b00, 0), (0b10, 0)].repeat(5) {
            // It may be running.
            let _ = server.lock().unwrap().start_scrub("f", None);
            assert_eq!(format(&mut client, information, usage), 0);
        }
        is_over.store(true, Ordering::Relaxed);
        for load in loads {
            assert!(load.join().unwrap() > 0);
        }
    });
    let mut server = server.into_inner().unwrap();
    let timeout = Duration::from_secs(60);
    eventually("the scrub is complete", timeout, || {
        server.scrubs()[0].state == "completed"
    });
    server.start_scrub("f", None).unwrap();
    eventually("the scrub is complete", timeout, || {
        server.scrubs()[0].state == "completed"
    });
    assert_eq!(server.scrubs()[0].listed.len(), 0);
    disk.server = Some(server);
    disk.stop();
}

/// The unit of a command may be replaced before FORMAT UNIT has stored the type.
#[test]
fn measurement_applies_stored_type() {
    let mut disk = Disk::new(1, 512);
    let mut client = disk.log_in();
    assert_eq!(reported_type(&mut client), 0b0001);
    let server = disk.server.as_ref().unwrap();
    let store = Arc::clone(server.backends().next().unwrap().1);
    store
        .set_protection_type(Some(ProtectionType::Type3))
        .unwrap();
    assert!(server.measurer()());
    let (status, _, sense) = send(&mut client, &[0; 6], 0, &[]);
    // INQUIRY DATA HAS CHANGED or CAPACITY DATA HAS CHANGED.
    assert_eq!((status, sense[0]), (2, 6));
    let (status, _, sense) = send(&mut client, &[0; 6], 0, &[]);
    assert_eq!((status, sense[0]), (2, 6));
    assert_eq!(reported_type(&mut client), 0b0101);
    drop((client, store));
    disk.stop();
}

#[test]
fn replacing_unit_has_stored_type() {
    let mut disk = Disk::new(1, 512);
    disk.stop();
    // Without its file, the unit is not ready, and is replaced when the file is available.
    let (path, elsewhere) = (disk.dir.join("disk"), disk.dir.join("elsewhere"));
    fs::rename(&path, &elsewhere).unwrap();
    disk.text = disk.text.replace("size: 1MiB, create: true, ", "");
    disk.start();
    let server = disk.server.as_mut().unwrap();
    fs::rename(&elsewhere, &path).unwrap();
    let wishes = server.open_requests();
    let spec = wishes[0].spec.clone();
    let mut opened = open_all(wishes);
    let store = opened.take_result("f", &spec).unwrap().unwrap();
    opened.insert("f", &spec, Ok(Arc::clone(&store)));
    let config = server.config().clone();
    let mut change = server.begin_change(config, opened, Instant::now()).unwrap();
    store
        .set_protection_type(Some(ProtectionType::Type3))
        .unwrap();
    drop(store);
    eventually(
        "the change is applied",
        Duration::from_secs(60),
        || match server.poll_change(&mut change, Instant::now()) {
            ChangeStep::Waiting => false,
            ChangeStep::Staged => {
                server.save_numbers(&mut change).unwrap();
                server.commit_change(&mut change, Instant::now());
                false
            }
            ChangeStep::Applied => true,
            ChangeStep::Undone(error) => panic!("{error:?}"),
        },
    );
    let mut client = disk.log_in();
    assert_eq!(reported_type(&mut client), 0b0101);
    drop(client);
    disk.stop();
}

#[test]
fn scrub_finds_damaged_block() {
    let mut disk = Disk::new(1, 512);
    let mut client = disk.log_in();
    let written = frames(512, 20, 4);
    let (status, ..) = send(&mut client, &cdb(0x2a, 1, 20, 4), written.len(), &written);
    assert_eq!(status, 0);
    disk.damage(22, 100);
    let server = disk.server.as_mut().unwrap();
    let error = server.start_scrub("other", None).unwrap_err();
    assert_eq!(error, "backend `other` is not open");
    let error = server.stop_scrub("f").unwrap_err();
    assert_eq!(error, "no scrub of backend `f` is running");
    assert_eq!(server.start_scrub("f", None).unwrap().blocks, 2048);
    eventually("the scrub is complete", Duration::from_secs(60), || {
        server.scrubs()[0].state == "completed"
    });
    let scrub = server.scrubs().remove(0);
    assert_eq!((scrub.checked, scrub.completed), (2048, scrub.ended));
    assert_eq!(
        (scrub.defects["guard"], scrub.defects["reference_tag"]),
        (1, 0)
    );
    assert_eq!(
        (scrub.listed[0].lba, scrub.listed[0].defect.as_str()),
        (22, "guard")
    );
    // Another scrub keeps the time of this scrub, and does not continue after the removal.
    let slow = server.start_scrub("f", Some(512)).unwrap();
    assert_eq!(
        (slow.state.as_str(), slow.completed),
        ("running", scrub.ended)
    );
    let error = server.start_scrub("f", None).unwrap_err();
    assert_eq!(error, "a scrub of backend `f` is already running");
    assert_eq!(server.stop_scrub("f").unwrap().state, "stopped");
    drop(client);
    disk.stop();
}
