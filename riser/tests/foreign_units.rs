//! Logical units of targets that conform to the standards but behave differently from those of
//! `riserd`.

#![allow(missing_docs, reason = "a test")]

mod foreign_target;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use foreign_target::{
    Attached, Disk, FILL, ForeignTarget, Nbd, Reply, check_condition, illegal_request, read, write,
};
use riser_block::task::block_on;
use riser_block::{BlockDevice, ByteDevice, ZeroOptions};
use riser_exports::fuse::{Caching, FuseMount, FuseOptions};
use riser_initiator::engine::LinkState;
use riser_initiator::session::Timing;
use riser_testkit::skip::skip;

const WRITE_10: u8 = 0x2a;
const READ_10: u8 = 0x28;
const SYNCHRONIZE_CACHE_10: u8 = 0x35;
const READ_16: u8 = 0x88;
const WRITE_16: u8 = 0x8a;
const SYNCHRONIZE_CACHE_16: u8 = 0x91;
const WRITE_SAME_16: u8 = 0x93;
const READ_CAPACITY_16: u8 = 0x9e;

/// SBC-3 clause 5.32: a unit that does not report DPOFUA may reject the FUA bit. Linux's target
/// does so for all devices without a write cache; its initiator flushes after the write instead.
#[test]
fn stable_write_flushes_units_without_fua() {
    for write_cache in [false, true] {
        let disk = Disk {
            dpofua: false,
            write_cache,
            ..Disk::default()
        };
        let commands = Arc::new(Mutex::new(Vec::new()));
        let seen = commands.clone();
        let script = move |cdb: &[u8], _: &[u8]| {
            seen.lock().unwrap().push(cdb[0]);
            let has_fua = cdb[0] == WRITE_16 && cdb[1] & 8 != 0;
            has_fua.then(|| illegal_request(0x24))
        };
        let target = ForeignTarget::start(disk, Box::new(script));
        let (_session, lun) = target.connect();
        assert_eq!(write(&lun, false), Ok(()));
        commands.lock().unwrap().clear();
        assert_eq!(write(&lun, true), Ok(()));
        let expected = [WRITE_16, SYNCHRONIZE_CACHE_10];
        assert_eq!(*commands.lock().unwrap(), expected, "WCE={write_cache}");
    }
}

/// SPC-4 table 48: the command completed successfully.
#[test]
fn recovered_errors_are_successful() {
    for key in [0, 1] {
        let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
            WRITE_16 => Some(check_condition(0x70, key, 0x0c, 0x01)),
            READ_16 if cdb[13] > 0 => Some(Reply {
                data: vec![FILL; 4096],
                ..check_condition(0x70, key, 0x17, 0x01)
            }),
            _ => None,
        };
        let target = ForeignTarget::start(Disk::default(), Box::new(script));
        let (_session, lun) = target.connect();
        assert_eq!(read(&lun, 0), Ok(vec![FILL; 4096]));
        assert_eq!(write(&lun, false), Ok(()));
    }
}

/// The write may be in the volatile cache, which the target then loses.
#[test]
fn recovered_write_is_covered_by_flush() {
    let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
        WRITE_16 => Some(Reply {
            // POWER ON OCCURRED
            event: Some([6, 0x29, 0x01]),
            ..check_condition(0x70, 1, 0x0c, 0x01)
        }),
        _ => None,
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    assert_eq!(write(&lun, false), Ok(()));
    thread::sleep(Duration::from_millis(300));
    assert!(block_on(lun.flush()).is_err());
}

/// SPC-4 clause 4.5: a deferred error belongs to an earlier command that returned GOOD. If this was
/// a write to the cache, its data is lost.
#[test]
fn flush_reports_deferred_error_of_read() {
    let mut is_written = false;
    let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
        WRITE_16 => {
            is_written = true;
            None
        }
        READ_16 if std::mem::take(&mut is_written) => Some(check_condition(0x71, 3, 0x0c, 0)),
        _ => None,
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    assert_eq!(write(&lun, false), Ok(()));
    assert_eq!(read(&lun, 1 << 20), Ok(vec![FILL; 4096]), "repeated");
    assert!(block_on(lun.flush()).is_err(), "the write is lost");
    assert!(block_on(lun.flush()).is_ok(), "reported once");
}

/// The command is part of the unit's identity check, whose result is not visible to users.
#[test]
fn flush_reports_deferred_error_of_check() {
    let mut step = 0;
    let script = move |cdb: &[u8], _: &[u8]| match (cdb[0], step) {
        (WRITE_16, 0) => {
            step = 1;
            // CAPACITY DATA HAS CHANGED
            Some(Reply {
                event: Some([6, 0x2a, 0x09]),
                ..Reply::default()
            })
        }
        (READ_CAPACITY_16, 1) => {
            step = 2;
            Some(check_condition(0x71, 3, 0x0c, 0))
        }
        _ => None,
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    assert_eq!(write(&lun, false), Ok(()));
    thread::sleep(Duration::from_millis(300));
    assert!(block_on(lun.flush()).is_err(), "the write is lost");
}

/// The flush and a read are in flight while the unit loses its cache. The read reports this, and
/// the flush returns GOOD.
#[test]
fn flush_fails_while_unit_is_checked() {
    let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
        READ_16 if cdb[13] > 0 => {
            // Wait until the flush is in flight.
            thread::sleep(Duration::from_millis(300));
            // POWER ON OCCURRED
            Some(check_condition(0x70, 6, 0x29, 1))
        }
        _ => None,
    };
    let mut is_reported = false;
    let script = move |cdb: &[u8], data: &[u8]| {
        let reply = script(cdb, data).filter(|_| !is_reported);
        is_reported |= reply.is_some();
        reply
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    assert_eq!(write(&lun, false), Ok(()));
    let reader = lun.clone();
    let reading = thread::spawn(move || read(&reader, 0));
    thread::sleep(Duration::from_millis(100));
    let flushed = block_on(lun.flush());
    assert_eq!(reading.join().unwrap(), Ok(vec![FILL; 4096]));
    assert!(flushed.is_err(), "the write is lost");
    assert!(block_on(lun.flush()).is_ok(), "reported once");
}

/// SBC-3 clause 4.7.3.7: a write to blocks that temporarily could not be mapped should be retried.
/// Linux's initiator waits until these conditions are cleared (`scsi_io_completion_action`).
#[test]
fn transient_not_ready_conditions_are_retried() {
    let qualifiers = [
        0x01, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x11, 0x14, 0x1a, 0x1b, 0x1d, 0x24, 0x25,
    ];
    let fails = |ascq: &u8| {
        let (ascq, mut times) = (*ascq, 0);
        let script = move |cdb: &[u8], _: &[u8]| {
            times += usize::from(cdb[0] == WRITE_16);
            (cdb[0] == WRITE_16 && times <= 2).then(|| check_condition(0x70, 2, 0x04, ascq))
        };
        let target = ForeignTarget::start(Disk::default(), Box::new(script));
        let (_session, lun) = target.connect();
        write(&lun, false).is_err()
    };
    let failed: Vec<_> = qualifiers.into_iter().filter(fails).collect();
    assert!(failed.is_empty(), "04h with qualifiers {failed:02x?}");
}

/// A target that does not report a MAXIMUM WRITE SAME LENGTH needs time for a long run of zeroes.
/// All times are scaled by 1/100: 4 GiB at 100 MB/s take 43 s, and the timeout of an attempt is 30
/// s.
#[test]
fn long_write_zeroes_takes_several_commands() {
    let script = |cdb: &[u8], _: &[u8]| {
        let blocks = u32::from_be_bytes(cdb[10..14].try_into().unwrap());
        let delay = Duration::from_nanos(u64::from(blocks) * 512 / 10);
        (cdb[0] == WRITE_SAME_16).then(|| Reply {
            delay,
            ..Reply::default()
        })
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let timing = Timing {
        attempt: Duration::from_millis(300),
        tsk_mgmt: Duration::from_millis(50),
        ..Timing::default()
    };
    let (_session, lun) = target.connect_with(timing);
    let lun = lun.with_timeout(Duration::from_millis(600));
    let zeroed = block_on(lun.write_zeroes(0..4 << 30, ZeroOptions::default()));
    assert_eq!(zeroed.map_err(|error| error.to_string()), Ok(()));
}

/// LBA OUT OF RANGE does not affect later WRITE SAME commands.
#[test]
fn write_same_survives_other_illegal_requests() {
    let refusals = Arc::new(Mutex::new(vec![0x20, 0x21]));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (script_seen, left) = (seen.clone(), refusals);
    let script = move |cdb: &[u8], _: &[u8]| {
        if [WRITE_16, WRITE_SAME_16].contains(&cdb[0]) {
            script_seen.lock().unwrap().push(cdb[0]);
        }
        let is_same = cdb[0] == WRITE_SAME_16;
        is_same.then(|| left.lock().unwrap().pop().map(illegal_request))?
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    let zero = || {
        seen.lock().unwrap().clear();
        let is_ok = block_on(lun.write_zeroes(0..4096, ZeroOptions::default())).is_ok();
        (is_ok, seen.lock().unwrap().clone())
    };
    assert_eq!(zero(), (false, vec![WRITE_SAME_16]));
    // INVALID COMMAND OPERATION CODE: zeroes are written as data.
    assert_eq!(zero(), (true, vec![WRITE_SAME_16, WRITE_16]));
    assert_eq!(zero(), (true, vec![WRITE_16]));
}

/// Old and simple targets; Linux's initiator uses short CDBs for them.
#[test]
fn units_without_long_cdbs_are_used() {
    const REPORT_LUNS: u8 = 0xa0;
    let long = [
        READ_CAPACITY_16,
        READ_16,
        WRITE_16,
        SYNCHRONIZE_CACHE_16,
        REPORT_LUNS,
    ];
    for missing in [&long[..], &long[1..], &long[3..]] {
        let refused = missing.to_vec();
        let commands = Arc::new(Mutex::new(Vec::new()));
        let seen = commands.clone();
        let script = move |cdb: &[u8], _: &[u8]| {
            seen.lock().unwrap().push(cdb[0]);
            refused.contains(&cdb[0]).then(|| illegal_request(0x20))
        };
        let target = ForeignTarget::start(Disk::default(), Box::new(script));
        let (session, lun) = target.connect();
        assert_eq!(lun.info().capacity.blocks, Disk::default().blocks);
        let luns = block_on(session.luns()).unwrap();
        assert_eq!(luns, [riser_scsi::lun::LunId::ZERO]);
        commands.lock().unwrap().clear();
        assert_eq!(write(&lun, true), Ok(()));
        assert_eq!(read(&lun, 0), Ok(vec![FILL; 4096]));
        assert!(block_on(lun.flush()).is_ok());
        let (write, read) = match missing.contains(&READ_16) {
            true => (WRITE_10, READ_10),
            false => (WRITE_16, READ_16),
        };
        assert_eq!(
            *commands.lock().unwrap(),
            [write, read, SYNCHRONIZE_CACHE_10]
        );
    }
}

/// Commands for a unit without a limit transfer at most 512 KiB.
#[test]
fn long_transfers_are_split() {
    let blocks = Arc::new(Mutex::new(Vec::new()));
    let seen = blocks.clone();
    let script = move |cdb: &[u8], _: &[u8]| {
        if cdb[0] == READ_16 && cdb[13] + cdb[12] > 0 {
            let count = u32::from_be_bytes(cdb[10..14].try_into().unwrap());
            seen.lock().unwrap().push(count);
        }
        None
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    let len = 1 << 20;
    assert!(lun.geometry().max_transfer >= len);
    let buffer = block_on(lun.buffers().take_buffer(len as usize));
    let buffer = block_on(lun.read(0, buffer)).unwrap();
    assert_eq!(buffer.slice().to_vec(), vec![FILL; len as usize]);
    assert_eq!(*blocks.lock().unwrap(), [1024, 1024]);
}

/// Offsets of files and NBD exports have 63 bits.
#[test]
fn capacity_of_63_bits_is_refused() {
    let disk = Disk {
        blocks: 1 << 54,
        ..Disk::default()
    };
    let target = ForeignTarget::start(disk, foreign_target::unscripted());
    let session = block_on(target.client(Timing::default()).connect(&target.url)).unwrap();
    let error = block_on(session.lun(0)).unwrap_err().to_string();
    assert!(error.contains("2^63"), "{error}");
}

/// All clients have written, and each must be notified that its writes are lost, as Linux does for
/// each open file after a page cache error (fsync(2)).
#[test]
fn lost_cache_reaches_all_nbd_clients() {
    let mut writes = 0;
    let script = move |cdb: &[u8], _: &[u8]| {
        writes += usize::from(cdb[0] == WRITE_16);
        // POWER ON OCCURRED, once.
        let is_reset = writes == 2 && cdb[0] == SYNCHRONIZE_CACHE_10;
        writes += usize::from(is_reset);
        is_reset.then(|| check_condition(0x70, 6, 0x29, 1))
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let attached = Attached::start(&target.url.to_string(), "losses", Stdio::null());
    let mut clients = [(); 2].map(|()| attached.nbd());
    for nbd in &mut clients {
        assert_eq!(nbd.execute(Nbd::WRITE, 0, 0, &[7; 4096]), 0);
    }
    let mut flush = || {
        clients
            .each_mut()
            .map(|nbd| nbd.execute(Nbd::FLUSH, 0, 0, &[]) != 0)
    };
    assert_eq!(flush(), [true, true]);
    assert_eq!(flush(), [false, false], "reported once");
    assert_eq!(
        attached.nbd().execute(Nbd::FLUSH, 0, 0, &[]),
        0,
        "a new client"
    );
}

/// Same as [`lost_cache_reaches_all_nbd_clients`], for programs with an open FUSE file.
#[test]
fn lost_cache_reaches_all_open_files() {
    if !Path::new("/dev/fuse").exists() {
        return skip("FUSE", "there is no /dev/fuse");
    }
    let mut is_reset = false;
    let script = move |cdb: &[u8], _: &[u8]| {
        // POWER ON OCCURRED, once.
        let is_flush = cdb[0] == SYNCHRONIZE_CACHE_10;
        (is_flush && !std::mem::replace(&mut is_reset, true))
            .then(|| check_condition(0x70, 6, 0x29, 1))
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (_session, lun) = target.connect();
    let path = std::env::temp_dir().join(format!("riser-files-{}", std::process::id()));
    File::create(&path).unwrap();
    let options = FuseOptions {
        path: path.clone(),
        name: "lun0".into(),
        source: "riser:test".into(),
        caching: Caching::Direct,
        allow_other: false,
    };
    let device = Arc::new(ByteDevice::new(Arc::new(lun)));
    let Ok(mount) = FuseMount::new(device, options, || ()) else {
        return skip("FUSE", "this host cannot mount");
    };
    let files = [(); 2].map(|()| File::options().write(true).open(mount.file()).unwrap());
    for file in &files {
        file.write_all_at(&[7; 4096], 0).unwrap();
    }
    let is_lost = files.each_ref().map(|file| file.sync_all().is_err());
    assert_eq!(is_lost, [true, true]);
    let is_lost = files.each_ref().map(|file| file.sync_all().is_err());
    assert_eq!(is_lost, [false, false], "reported once");
    drop(files);
    mount.try_unmount().unwrap();
    std::fs::remove_file(path).unwrap();
}

/// A client of the export may use FUA even if the unit does not support it.
#[test]
fn nbd_fua_write_succeeds_without_dpofua() {
    const FUA: u16 = 1;
    let disk = Disk {
        dpofua: false,
        ..Disk::default()
    };
    let script = move |cdb: &[u8], _: &[u8]| {
        let has_fua = cdb[0] == WRITE_16 && cdb[1] & 8 != 0;
        has_fua.then(|| illegal_request(0x24))
    };
    let target = ForeignTarget::start(disk, Box::new(script));
    let attached = Attached::start(&target.url.to_string(), "fua", Stdio::null());
    let written = attached.nbd().execute(Nbd::WRITE, FUA, 0, &[7; 4096]);
    assert_eq!(written, 0);
}

/// The workload's thread writes, flushes and splits like the asynchronous calls.
#[test]
fn bench_uses_fua_and_long_transfers() {
    let disk = Disk {
        dpofua: false,
        ..Disk::default()
    };
    let commands = Arc::new(Mutex::new(Vec::new()));
    let seen = commands.clone();
    let script = move |cdb: &[u8], _: &[u8]| {
        if [WRITE_16, SYNCHRONIZE_CACHE_10].contains(&cdb[0]) {
            assert_eq!(cdb[1] & 8, 0, "FUA");
            seen.lock().unwrap().push(cdb[0]);
        }
        None
    };
    let target = ForeignTarget::start(disk, Box::new(script));
    let bench = std::process::Command::new(env!("CARGO_BIN_EXE_riser"))
        .args([
            "bench",
            &target.url.to_string(),
            "--rw",
            "write",
            "--bs",
            "1m",
            "--fua",
        ])
        .args(["--number-ios", "2", "--depth", "1"])
        .output()
        .unwrap();
    assert!(
        bench.status.success(),
        "{}",
        String::from_utf8_lossy(&bench.stderr)
    );
    let commands = commands.lock().unwrap();
    let expected = [WRITE_16, WRITE_16, SYNCHRONIZE_CACHE_10];
    assert!(commands.len() >= 6, "{commands:x?}");
    assert!(
        commands.chunks(3).all(|chunk| chunk == expected),
        "{commands:x?}"
    );
}

/// Waits for a condition.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < patience, "timed out: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A unit hidden by an access rule: the session is down, instead of failing all commands.
#[test]
fn missing_unit_is_reported_and_awaited() {
    let is_missing = Arc::new(AtomicBool::new(false));
    let hidden = is_missing.clone();
    let script = move |_: &[u8], _: &[u8]| {
        let is_hidden = hidden.load(Ordering::Relaxed);
        is_hidden.then(|| illegal_request(0x25))
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (session, lun) = target.connect();
    assert_eq!(write(&lun, false), Ok(()));
    is_missing.store(true, Ordering::Relaxed);
    let writing = thread::spawn(move || write(&lun, false));
    wait_until("the session is down", || {
        session.status().link() == LinkState::Reconnecting
    });
    let report = session.status().report();
    let why = report.link.last_error.unwrap();
    assert!(why.contains("does not present the logical unit"), "{why}");
    is_missing.store(false, Ordering::Relaxed);
    assert_eq!(writing.join().unwrap(), Ok(()));
}

#[test]
fn grown_unit_is_reported() {
    let mut is_grown = false;
    let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
        WRITE_16 => {
            is_grown = true;
            // CAPACITY DATA HAS CHANGED
            Some(Reply {
                event: Some([6, 0x2a, 0x09]),
                ..Reply::default()
            })
        }
        READ_CAPACITY_16 if is_grown => {
            let mut capacity = vec![0; 32];
            capacity[..8].copy_from_slice(&(16_u64 << 21).to_be_bytes());
            capacity[10] = 2;
            Some(foreign_target::good(capacity))
        }
        _ => None,
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let (session, lun) = target.connect();
    assert_eq!(session.status().report().link.grown, None);
    assert_eq!(write(&lun, false), Ok(()));
    let grown = Some(((16 << 21) + 1) * 512);
    wait_until("the growth is reported", || {
        session.status().report().link.grown == grown
    });
    assert_eq!(lun.geometry().capacity, Disk::default().blocks * 512);
}
