//! Protection information between the initiator and the file of the server.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use riser_block::task::block_on;
use riser_block::{BlockDevice, Buffer, Completion, Operation, Submissions, Workload, ZeroOptions};
use riser_initiator::engine::{Client, IoData, Session};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::protection::{PiError, PiFormat, ProtectionMode};
use riser_initiator::request::{Cdb, DataLen};
use riser_scsi::protection::ProtectionError;
use riser_tests::rig::{
    IQN, Protocol, Rig, buffer_of, builder, eventually, get, pair, pattern, put, run,
};

/// Length of a tuple.
const TUPLE: usize = 8;

fn backend(protection_type: u8, block: usize) -> String {
    format!(
        "{{ kind: ram, size: 16MiB, block_size: {block}, \
         protection: {{ type: {protection_type} }} }}"
    )
}

/// A server with a protected file.
struct FileRig {
    rig: Rig,
    path: PathBuf,
    block: usize,
}

impl FileRig {
    fn new(protocol: Protocol, number: u8, protection_type: u8, block: usize) -> Self {
        let id = std::process::id();
        let name = format!("riser-protected-{}-{number}-{id}.img", protocol.scheme());
        let path = std::env::temp_dir().join(name);
        let backend = format!(
            "{{ kind: file, path: {}, size: 16MiB, create: true, block_size: {block}, \
             protection: {{ type: {protection_type} }} }}",
            path.display()
        );
        Self {
            rig: Rig::new(protocol, number, &backend),
            path,
            block,
        }
    }

    /// Inverts a bit of a block, or of the tuple after it.
    fn damage_file(&self, lba: usize, at: usize) {
        let frame = self.block + TUPLE;
        let first = (64_usize << 10).next_multiple_of(frame);
        let at = (first + lba * frame + at) as u64;
        let mut options = File::options();
        let file = options.read(true).write(true).open(&self.path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

impl Drop for FileRig {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Inverts a bit of a buffer.
fn damage(buffer: &Buffer, at: usize) {
    let mut byte = [0];
    let slice = buffer.slice();
    slice.slice(at..at + 1).unwrap().read(0, &mut byte);
    slice.slice(at..at + 1).unwrap().write(0, &[byte[0] ^ 0x10]);
}

#[track_caller]
fn assert_failed<T: std::fmt::Debug>(
    result: Result<T, LunError>,
    check: ProtectionError,
    lba: u64,
    is_by_target: bool,
) {
    let error = PiError {
        check,
        lba: Some(lba),
        is_by_target,
    };
    assert_eq!(result.map(drop).unwrap_err(), LunError::Protection(error));
}

/// Reads a block with its tuple by another command.
fn read_raw(lun: &Lun, protection_type: u8, lba: u8, block: usize) -> Vec<u8> {
    let short = [0x88, 0x20, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, 1, 0, 0];
    let mut long = [0; 32];
    (long[0], long[7], long[9], long[10]) = (0x7f, 0x18, 0x09, 0x20);
    (long[19], long[23], long[31]) = (lba, lba, 1);
    let cdb: &[u8] = if protection_type == 2 { &long } else { &short };
    let len = block + TUPLE;
    let data = IoData::One(block_on(lun.buffers().take_buffer(len)));
    let end = block_on(lun.scsi(Cdb::new(cdb).unwrap(), DataLen::In(len as u32), data));
    let response = end.result.unwrap();
    assert_eq!((response.status, response.transferred), (0, len as u32));
    end.data.buffers()[0].slice().to_vec()
}

pub(super) fn protected_data_round_trips(protocol: Protocol, number: u8) {
    for (protection_type, block) in [
        (1, 512),
        (1, 4096),
        (2, 512),
        (2, 4096),
        (3, 512),
        (3, 4096),
    ] {
        let rig = Rig::new(protocol, number, &backend(protection_type, block));
        let session = rig.connect("");
        let lun = block_on(session.lun(0)).unwrap();
        let found = lun.info().protection.unwrap();
        assert_eq!(found.protection_type, protection_type);
        assert!(found.guard_check && !found.application_tag_owner);
        assert_eq!(
            lun.protection().map(PiFormat::type_number),
            Some(protection_type)
        );
        let capacity = 16 << 20;
        assert_eq!(lun.geometry().capacity, capacity);
        let sizes = [
            (1, 5 * block as u64, block),
            (2, 512 << 10, 2 * block),
            (3, 1 << 20, 1 << 20),
            // Several commands.
            (4, 4 << 20, 3 << 20),
            (5, capacity - block as u64, block),
        ];
        for (seed, offset, len) in sizes {
            put(&lun, offset, &pattern(seed, len));
        }
        for (seed, offset, len) in sizes {
            assert!(get(&lun, offset, len) == pattern(seed, len), "{len} bytes");
        }
        block_on(lun.write(0, buffer_of(&lun, &vec![0; block]), true)).unwrap();
        let tag = if protection_type == 3 { 0 } else { 5 };
        let raw = read_raw(&lun, protection_type, 5, block);
        assert_eq!(raw[..block], pattern(1, block));
        assert_eq!(raw[block + 2..], [0, 0, 0, 0, 0, tag]);
        let zeroes = read_raw(&lun, protection_type, 0, block);
        assert_eq!(
            zeroes[..block + 4],
            vec![0; block + 4],
            "the CRC of zeroes is 0"
        );
        // Zeroed and discarded blocks are read without their old tags.
        let zero = ZeroOptions {
            may_unmap: false,
            ..ZeroOptions::default()
        };
        let zeroed = (4 << 20)..(5 << 20);
        block_on(lun.write_zeroes(zeroed.clone(), zero)).unwrap();
        assert_eq!(get(&lun, zeroed.start, 1 << 20), vec![0; 1 << 20]);
        if lun.geometry().max_discard > 0 {
            block_on(lun.discard((5 << 20)..(6 << 20))).unwrap();
            get(&lun, 5 << 20, 1 << 20);
        }
        assert_eq!(get(&lun, 6 << 20, 1 << 20), pattern(4, 3 << 20)[2 << 20..]);
        assert!(session.status().protection_errors().is_empty());
        block_on(session.close());
    }
}

pub(super) fn damage_is_detected_with_its_block(protocol: Protocol, number: u8) {
    let rig = FileRig::new(protocol, number, 1, 512);
    let session = rig.rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 0, &[3; 8 * 512]);
    let submit = |io| block_on(session.submit(io));
    // In our memory, after the tuples were generated: a block, or a reference tag.
    for (at, check) in [
        (2 * 520 + 9, ProtectionError::Guard),
        (3 * 520 - 1, ProtectionError::ReferenceTag),
    ] {
        let io = lun
            .write_io(512, buffer_of(&lun, &[4; 4 * 512]), false)
            .unwrap();
        damage(&io.data.buffers()[0], at);
        assert_failed(Lun::completed_buffer(submit(io)), check, 3, true);
        assert_eq!(get(&lun, 3 * 512, 512), [3; 512], "it was not written");
        put(&lun, 0, &[3; 8 * 512]);
    }
    // In our memory, before they are verified.
    for (at, check) in [
        (520, ProtectionError::Guard),
        (519, ProtectionError::ReferenceTag),
    ] {
        let io = lun.read_io(4 * 512, buffer_of(&lun, &[0; 1024])).unwrap();
        let end = submit(io);
        damage(&end.data.buffers()[0], at);
        let lba = 4 + at as u64 / 520;
        assert_failed(Lun::completed_buffer(end), check, lba, false);
    }
    // In the file.
    rig.damage_file(6, 100);
    let read = |at: u64| {
        let buffer = block_on(lun.buffers().take_buffer(512));
        block_on(lun.read(at * 512, buffer))
    };
    assert_failed(read(6), ProtectionError::Guard, 6, true);
    assert!(read(5).is_ok() && read(7).is_ok());
    rig.damage_file(7, 519);
    assert_failed(read(7), ProtectionError::ReferenceTag, 7, true);
    let errors = session.status().protection_errors();
    assert_eq!(
        (errors.guard, errors.application_tag, errors.reference_tag),
        (1, 0, 1)
    );
    assert_eq!(session.status().report().link.protection_errors, errors);
    // Another write repairs the blocks.
    put(&lun, 6 * 512, &[5; 1024]);
    assert_eq!(get(&lun, 6 * 512, 1024), [5; 1024]);
    block_on(session.close());
}

/// Forwards connections to a server, and inverts a bit in data of equal bytes on demand.
struct Damager {
    to_target: AtomicBool,
    to_initiator: AtomicBool,
}

impl Damager {
    const DATA: u8 = 0xa7;

    fn start(listen: Ipv4Addr, target: Ipv4Addr) -> Arc<Self> {
        let damager = Arc::new(Self {
            to_target: AtomicBool::new(false),
            to_initiator: AtomicBool::new(false),
        });
        let listener = TcpListener::bind((listen, 3260)).unwrap();
        let own = damager.clone();
        thread::spawn(move || {
            // The threads end with the connections, and this one with the process.
            while let Ok((initiator, _)) = listener.accept() {
                let target = TcpStream::connect((target, 3260)).unwrap();
                for is_write in [true, false] {
                    let (a, b) = (initiator.try_clone().unwrap(), target.try_clone().unwrap());
                    let (from, to) = if is_write { (a, b) } else { (b, a) };
                    let own = own.clone();
                    thread::spawn(move || own.forward(from, to, is_write));
                }
            }
        });
        damager
    }

    fn forward(&self, mut from: TcpStream, mut to: TcpStream, is_write: bool) {
        let wanted = if is_write {
            &self.to_target
        } else {
            &self.to_initiator
        };
        let mut chunk = vec![0; 1 << 20];
        while let Ok(len @ 1..) = from.read(&mut chunk) {
            let found = chunk[..len].windows(32).position(|w| w == [Self::DATA; 32]);
            if let Some(at) = found
                && wanted.swap(false, Ordering::SeqCst)
            {
                chunk[at] ^= 0x10;
            }
            if to.write_all(&chunk[..len]).is_err() {
                break;
            }
        }
    }
}

#[test]
fn damage_on_network_is_detected() {
    let rig = Rig::new(Protocol::Tcp, 43, &backend(1, 512));
    let damager = Damager::start(rig.address(9), rig.address(1));
    let session = block_on(rig.client.connect(rig.url_on(9, "", ""))).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    let data = [Damager::DATA; 1024];
    put(&lun, 9 * 512, &data);
    damager.to_target.store(true, Ordering::SeqCst);
    let write = block_on(lun.write(9 * 512, buffer_of(&lun, &data), false));
    assert_failed(write, ProtectionError::Guard, 9, true);
    damager.to_initiator.store(true, Ordering::SeqCst);
    let read = block_on(lun.read(9 * 512, buffer_of(&lun, &[0; 1024])));
    assert_failed(read, ProtectionError::Guard, 9, false);
    assert_eq!(get(&lun, 9 * 512, 1024), data);
    assert_eq!(session.status().protection_errors().guard, 2);
    block_on(session.close());
}

#[test]
fn damage_on_network_is_undetected_without_protection() {
    let rig = Rig::new(Protocol::Tcp, 51, "{ kind: ram, size: 1MiB }");
    let damager = Damager::start(rig.address(9), rig.address(1));
    let session = block_on(rig.client.connect(rig.url_on(9, "", ""))).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    let data = [Damager::DATA; 1024];
    put(&lun, 0, &data);
    damager.to_initiator.store(true, Ordering::SeqCst);
    assert_ne!(get(&lun, 0, 1024), data);
    assert_eq!(get(&lun, 0, 1024), data);
    damager.to_target.store(true, Ordering::SeqCst);
    put(&lun, 0, &data);
    assert_ne!(get(&lun, 0, 1024), data, "it was written");
    block_on(session.close());
}

#[test]
fn remaining_path_transfers_protected_data() {
    let mut file = FileRig::new(Protocol::Tcp, 44, 1, 4096);
    file.rig.serve(&[1, 3]);
    let keys = format!("?portal={}", file.rig.address(3));
    let session = file.rig.connect(&keys);
    let lun = block_on(session.lun(0)).unwrap();
    assert_eq!(session.status().report().paths.len(), 2);
    for round in 0..3 {
        let data = pattern(round, 64 << 10);
        put(&lun, round << 20, &data);
        // The command is retried with the same tuples.
        file.rig.serve(if round % 2 == 0 { &[3] } else { &[1] });
        assert!(get(&lun, round << 20, data.len()) == data);
    }
    assert!(session.status().protection_errors().is_empty());
    file.damage_file(256, 1);
    let read = block_on(lun.read(1 << 20, buffer_of(&lun, &[0; 4096])));
    assert_failed(read, ProtectionError::Guard, 256, true);
    assert_eq!(session.status().protection_errors().total(), 1);
    block_on(session.close());
}

fn client(pool: usize, mode: ProtectionMode) -> Client {
    let builder = builder().pool(pool).protection(mode);
    builder.without_device().unwrap()
}

fn open(client: &Client, rig: &Rig) -> (Session, Result<Lun, LunError>) {
    let session = block_on(client.connect(rig.url_on(1, "", ""))).unwrap();
    let lun = block_on(session.lun(0));
    (session, lun)
}

#[test]
fn protection_mode_is_respected() {
    let rig = Rig::new(Protocol::Tcp, 45, &backend(2, 512));
    let off = client(1 << 20, ProtectionMode::Off);
    let (_off, lun) = open(&off, &rig);
    let lun = lun.unwrap();
    assert!(lun.info().protection.is_some() && lun.protection().is_none());
    assert_eq!(lun.buffer_bytes(), 1 << 20);
    put(&lun, 512, &[1; 1024]);
    assert_eq!(get(&lun, 512, 1024), [1; 1024]);
    let required = client(1 << 20, ProtectionMode::Require);
    let (_required, lun) = open(&required, &rig);
    let lun = lun.unwrap();
    assert_eq!(lun.buffer_bytes(), 768 << 10, "a quarter is reserved");
    assert_eq!(get(&lun, 512, 1024), [1; 1024], "written without tags");
    put(&lun, 512, &[2; 1024]);
    assert_eq!(get(&lun, 512, 1024), [2; 1024]);
    let plain = Rig::new(Protocol::Tcp, 46, "{ kind: ram, size: 1MiB }");
    let (session, lun) = open(&required, &plain);
    let error = lun.unwrap_err();
    assert!(
        error.to_string().contains("the medium is not protected"),
        "{error}"
    );
    block_on(session.close());
}

/// Writes pieces of a disk once, and then reads and compares them.
struct Load {
    device: Arc<Lun>,
    is_written: bool,
    is_started: bool,
    left: usize,
    failed: Vec<String>,
    over: mpsc::Sender<Vec<String>>,
}

const PIECES: usize = 40;
const PIECE: usize = 14 << 10;

impl Load {
    fn start_all(&mut self, queue: &mut Submissions) {
        self.left = PIECES;
        for tag in 0..PIECES {
            let offset = (tag * PIECE) as u64;
            let buffer = self.device.try_buffer(PIECE).expect("a buffer for each");
            queue.push(
                tag as u32,
                match self.is_written {
                    true => Operation::Read { offset, buffer },
                    false => {
                        buffer.slice().write(0, &pattern(tag as u64, PIECE));
                        Operation::Write {
                            offset,
                            buffer,
                            fua: false,
                        }
                    }
                },
            );
        }
    }
}

impl Workload for Load {
    fn submit(&mut self, queue: &mut Submissions) {
        if !std::mem::replace(&mut self.is_started, true) {
            self.start_all(queue);
        }
    }

    fn complete(&mut self, tag: u32, completion: Completion, queue: &mut Submissions) {
        self.left -= 1;
        match completion {
            Ok(Some(buffer)) if self.is_written => {
                if buffer.slice().to_vec() != pattern(tag.into(), PIECE) {
                    self.failed.push(format!("piece {tag} differs"));
                }
            }
            Ok(_) => {}
            Err(error) => self.failed.push(error.to_string()),
        }
        if self.left == 0 && !std::mem::replace(&mut self.is_written, true) {
            self.start_all(queue);
        }
    }

    fn due(&self) -> Option<Instant> {
        None
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.over.send(std::mem::take(&mut self.failed));
    }
}

#[test]
fn transfers_wait_for_protection_buffers() {
    let rig = Rig::new(Protocol::Tcp, 47, &backend(1, 512));
    let client = client(1 << 20, ProtectionMode::Auto);
    let (_session, lun) = open(&client, &rig);
    let lun = Arc::new(lun.unwrap());
    // All pieces need 640 KiB of buffers, and more memory for their tuples than there is.
    let (over, ended) = mpsc::channel();
    let loads: Vec<_> = (0..2)
        .map(|_| {
            let load = Load {
                device: lun.clone(),
                is_written: false,
                is_started: false,
                left: 0,
                failed: Vec::new(),
                over: over.clone(),
            };
            // One after the other, so that there are buffers.
            lun.drive(Box::new(load))
                .unwrap_or_else(|_| panic!("no thread"));
            ended.recv().unwrap()
        })
        .collect();
    assert_eq!(loads, [Vec::<String>::new(), Vec::new()]);
    // Operations of several commands, on other threads.
    let threads: Vec<_> = (0..4u64)
        .map(|number| {
            let lun = lun.clone();
            thread::spawn(move || {
                for round in 0..4 {
                    let data = pattern(number << 8 | round, 128 << 10);
                    put(&lun, number << 20, &data);
                    assert!(get(&lun, number << 20, data.len()) == data);
                }
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn commands_report_protection() {
    let backend = backend(1, 4096);
    let target = format!("iqn: {IQN}\nportals: [{{ protocol: iscsi, listen: 127.0.63.1 }}]\n");
    let pair = riser_testkit::programs::Pair::with_target(63, &backend, &target);
    eventually("riserd listens", || {
        TcpStream::connect("127.0.63.1:3260").is_ok()
    });
    let url = format!("iscsi://127.0.63.1/{IQN}/0");
    let output = |args: &[&str]| {
        let output = run(&pair, args, "");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    };
    let json =
        |args: &[&str]| -> serde_json::Value { serde_json::from_str(&output(args)).unwrap() };
    let found = json(&["discover", &url, "-o", "json"]);
    assert_eq!(found[0]["luns"][0]["protection"]["protection_type"], 1);
    let found = json(&["inquiry", &url, "-o", "json"]);
    assert_eq!(found["protection"]["guard_check"], true);
    assert!(output(&["inquiry", &url]).contains("protection_type: 1"));
    let bench = [
        "bench",
        &url,
        "--runtime=300ms",
        "--warm-up=0s",
        "--rw=randrw",
        "--verify",
        "-o",
        "json",
    ];
    let found = json(&bench);
    let job = &found["jobs"][0];
    assert_eq!(job["riser"]["protection"], 1);
    assert!(job["riser"]["verified_blocks"].as_u64() > Some(0), "{job}");
    assert!(output(&bench[..6]).contains("with protection type 1"));
    let without = [&bench[..], &["--protection=off"]].concat();
    assert!(json(&without)["jobs"][0]["riser"]["protection"].is_null());
    let plain = pair_without_protection();
    let refused = run(
        &plain.0,
        &[
            "read",
            &plain.1,
            &plain.0.path("out"),
            "--protection=require",
        ],
        "",
    );
    assert_eq!(refused.status.code(), Some(5));
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("cannot use protection information"), "{why}");
}

fn pair_without_protection() -> (riser_testkit::programs::Pair, String) {
    let url = format!("iscsi://127.0.64.1/{IQN}/0");
    (pair(64, "iscsi", ""), url)
}
