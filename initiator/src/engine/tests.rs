use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use riser_block::{Buffer, ZeroOptions};
use riser_transport::loopback::Endpoint;
use riser_transport::roce::fault::FaultConfig;

use self::world::{begin, block_on, eventually};
use super::fake_target::{BLOCK, FakeTarget};
use super::*;
use crate::lun::{Lun, LunError};
use crate::request::RequestError;
use crate::request::{Cdb, DataLen};
use crate::scsi::Command;
use crate::session::{ConnectError, Timing};
use crate::url::SrpUrl;
use crate::url::TargetUrl;

mod hostile_iser;
mod iscsi;
mod iser;
mod liveness;
pub(crate) mod log;
mod protection;
mod services;
pub(super) mod world;

const BLOCKS: usize = 4096;

struct Rig {
    session: Session,
    client: Client,
    target: FakeTarget,
}

fn timing() -> Timing {
    Timing {
        attempt: Duration::from_millis(700),
        tsk_mgmt: Duration::from_millis(700),
        login: Duration::from_secs(20),
        login_max: Duration::from_secs(20),
        backoff_min: Duration::from_millis(20),
        backoff_max: Duration::from_millis(200),
        busy: Duration::from_millis(1),
        settle: Duration::from_secs(15),
    }
}

fn rig(keys: &str) -> Rig {
    let target = FakeTarget::start(BLOCKS);
    let client = client();
    let query = if keys.is_empty() { "" } else { "?" };
    let url: SrpUrl = format!("srp://{}/{query}{keys}", target.addr)
        .parse()
        .unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    Rig {
        target,
        client,
        session,
    }
}

fn client() -> Client {
    let builder = Client::builder().pool(8 << 20).timing(timing());
    world::add_engine(builder.region_segments(1))
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 31 + seed * 7 + (i >> 8)) as u8)
        .collect()
}

fn write_bytes(lun: &Lun, offset: u64, data: &[u8]) {
    let buffer = block_on(lun.buffers().take_buffer(data.len()));
    buffer.slice().write(0, data);
    block_on(lun.write(offset, buffer, false)).unwrap();
}

fn read_bytes(lun: &Lun, offset: u64, len: usize) -> Vec<u8> {
    let buffer = block_on(lun.buffers().take_buffer(len));
    block_on(lun.read(offset, buffer)).unwrap().slice().to_vec()
}

#[test]
fn disk_is_discovered_written_and_read() {
    let rig = rig("channels=2");
    assert_eq!(rig.session.status().link(), LinkState::Live);
    assert_eq!(block_on(rig.session.luns()).unwrap().len(), 1);
    let lun = block_on(rig.session.lun(0)).unwrap();
    let info = lun.info();
    assert_eq!(info.inquiry.vendor, "FAKE");
    assert_eq!(info.identity.serial.as_deref(), Some("S1"));
    assert_eq!(info.identity.naa.as_deref(), Some("61020304"));
    assert_eq!(info.capacity.blocks, BLOCKS as u64);
    assert!(info.caching.write_cache && info.provisioning.write_same);
    for (seed, offset, len) in [(1, 0, 512), (2, 4096, 4096), (3, 65536, 512 << 10)] {
        let data = pattern(seed, len);
        write_bytes(&lun, offset, &data);
        assert_eq!(read_bytes(&lun, offset, len), data);
        let at = offset as usize;
        assert_eq!(rig.target.disk.lock().unwrap()[at..at + len], data);
    }
    assert!(rig.target.knobs.immediate.load(Ordering::SeqCst) >= 2);
    assert_eq!(rig.target.knobs.logins.load(Ordering::SeqCst), 2);
    block_on(lun.flush()).unwrap();
    block_on(lun.write_zeroes(512..8192, Default::default())).unwrap();
    assert_eq!(read_bytes(&lun, 4096, 4096), vec![0; 4096]);
    block_on(lun.discard(0..512)).unwrap();
    let buffer = block_on(lun.buffers().take_buffer(512));
    assert_eq!(
        block_on(lun.read(1, buffer)).unwrap_err(),
        LunError::OutOfRange
    );
    block_on(rig.session.close());
    let logouts = &rig.target.knobs.logouts;
    eventually("a logout", || logouts.load(Ordering::SeqCst) > 0);
    assert_eq!(rig.client.buffers().free(), 8 << 20);
}

#[test]
fn rejected_login_reports_reason() {
    let target = FakeTarget::start(8);
    target.knobs.refuse.store(true, Ordering::SeqCst);
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1", target.addr)
        .parse()
        .unwrap();
    let client = client();
    let error = block_on(client.connect(&url)).unwrap_err();
    assert!(error.to_string().contains("lacks resources"), "{error}");
    let unreachable_port = format!("srp://{}:5556/?ioc_guid=1", target.addr.ip());
    let unreachable_port: SrpUrl = unreachable_port.parse().unwrap();
    let error = block_on(client.connect(&unreachable_port)).unwrap_err();
    assert!(matches!(error, EngineError::Login(_)), "{error}");
}

#[test]
fn redirected_login_uses_other_target() {
    let [first, second] = [FakeTarget::start(BLOCKS), FakeTarget::start(BLOCKS)];
    *first.knobs.redirect.lock().unwrap() = Some(second.addr.ip());
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1&channels=2", first.addr)
        .parse()
        .unwrap();
    let client = client();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    let data = pattern(5, 4096);
    write_bytes(&lun, 8192, &data);
    assert_eq!(second.disk.lock().unwrap()[8192..8192 + 4096], data);
    assert_eq!(first.disk.lock().unwrap()[8192..8192 + 4096], [0; 4096]);
    let count = |counter: &AtomicU32| counter.load(Ordering::SeqCst);
    assert!(session.status().report().is_redirected);
    assert_eq!(count(&first.knobs.refused), 2, "each channel");
    assert_eq!(count(&first.knobs.logins), 0);
    assert_eq!(count(&second.knobs.logins), 2);
}

#[test]
fn login_redirected_in_circle_fails() {
    let [first, second] = [FakeTarget::start(8), FakeTarget::start(8)];
    *first.knobs.redirect.lock().unwrap() = Some(second.addr.ip());
    *second.knobs.redirect.lock().unwrap() = Some(first.addr.ip());
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1", first.addr).parse().unwrap();
    let client = client();
    let error = block_on(client.connect(&url)).unwrap_err();
    assert!(error.to_string().contains("redirected"), "{error}");
}

#[test]
fn segments_use_inline_and_external_tables() {
    let rig = rig("cmd_sg_entries=4&allow_ext_sg=1&immediate=0");
    let lun = block_on(rig.session.lun(0)).unwrap();
    for pieces in [3usize, 9] {
        let buffers: Vec<_> = (0..pieces)
            .map(|i| {
                let buffer = block_on(lun.buffers().take_buffer(4 * BLOCK));
                buffer.slice().write(0, &pattern(i, 4 * BLOCK));
                buffer
            })
            .collect();
        let len = (pieces * 4 * BLOCK) as u32;
        let blocks = crate::scsi::BlockRange {
            lba: 16,
            blocks: len / BLOCK as u32,
        };
        let io = |command, data| ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(5));
        let write = io(Command::write(blocks, len, false), IoData::Many(buffers));
        let end = block_on(rig.session.submit(write));
        assert_eq!(end.result.unwrap().status, 0);
        for buffer in end.data.buffers() {
            buffer.slice().fill(0, buffer.len(), 0xee);
        }
        let read = io(Command::read(blocks, len), end.data);
        let end = block_on(rig.session.submit(read));
        assert_eq!(end.result.unwrap().transferred, len);
        for (i, buffer) in end.data.buffers().iter().enumerate() {
            assert_eq!(buffer.slice().to_vec(), pattern(i, 4 * BLOCK));
        }
    }
    assert_eq!(rig.target.knobs.indirect.load(Ordering::SeqCst), 2);
    assert_eq!(rig.target.knobs.external.load(Ordering::SeqCst), 2);
    let buffers: Vec<_> = (0..17)
        .map(|_| block_on(lun.buffers().take_buffer(BLOCK)))
        .collect();
    let blocks = crate::scsi::BlockRange { lba: 0, blocks: 17 };
    let command = Command::read(blocks, 17 * BLOCK as u32);
    let io = ScsiIo::new(
        lun.info().lun,
        command,
        IoData::Many(buffers),
        Duration::from_secs(5),
    );
    let end = block_on(rig.session.submit(io));
    assert!(matches!(end.result, Err(RequestError::NotStarted(_))));
}

/// The check after a login, which precedes all retries, gets a slot even if commands use all of
/// them.
#[test]
fn full_session_still_checks_unit() {
    let target = FakeTarget::start(BLOCKS);
    let mut builder = Client::builder().pool(8 << 20).timing(timing());
    builder.max_requests = 1;
    let client = world::add_engine(builder.region_segments(1).queue_size(1));
    let url: SrpUrl = format!("srp://{}", target.addr).parse().unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    target.knobs.disconnect.store(true, Ordering::SeqCst);
    let write = |seed: usize| {
        let buffer = block_on(lun.buffers().take_buffer(BLOCK));
        buffer.slice().write(0, &pattern(seed, BLOCK));
        lun.write((seed * BLOCK) as u64, buffer, false)
    };
    let (mut first, second) = (begin(write(0)), write(1));
    block_on(&mut first).unwrap();
    block_on(second).unwrap();
    assert_eq!(read_bytes(&lun, 0, BLOCK), pattern(0, BLOCK));
    assert_eq!(read_bytes(&lun, BLOCK as u64, BLOCK), pattern(1, BLOCK));
    assert!(session.status().reconnects() >= 1);
}

/// When a command completes, its identifier becomes free, even if other completions are still to be
/// delivered.
#[test]
fn simultaneous_timeouts_spare_waiting_commands() {
    let target = FakeTarget::start(BLOCKS);
    let mut builder = Client::builder().pool(8 << 20).timing(timing());
    builder.max_requests = 2;
    let client = world::add_engine(builder.region_segments(1).queue_size(2));
    let url: SrpUrl = format!("srp://{}", target.addr).parse().unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    target.knobs.refuse.store(true, Ordering::SeqCst);
    target.knobs.disconnect.store(true, Ordering::SeqCst);
    let write = |block: u64, patience: u64| {
        let buffer = block_on(lun.buffers().take_buffer(BLOCK));
        buffer.slice().write(0, &pattern(block as usize, BLOCK));
        let blocks = crate::scsi::BlockRange {
            lba: block,
            blocks: 1,
        };
        let command = Command::write(blocks, BLOCK as u32, false);
        let patience = Duration::from_secs(patience);
        session.submit(ScsiIo::new(
            lun.info().lun,
            command,
            IoData::One(buffer),
            patience,
        ))
    };
    let impatient = [write(0, 1), write(1, 1)];
    let patient = [write(2, 60), write(3, 60)];
    for end in impatient {
        assert_eq!(block_on(end).result, Err(RequestError::TimedOut));
    }
    target.knobs.refuse.store(false, Ordering::SeqCst);
    for end in patient {
        assert_eq!(block_on(end).result.unwrap().status, 0);
    }
    for block in [2, 3] {
        assert_eq!(
            read_bytes(&lun, (block * BLOCK) as u64, BLOCK),
            pattern(block, BLOCK)
        );
    }
}

/// A waiting command may complete as soon as it gets a slot.
#[test]
fn unsendable_command_frees_slot_for_waiters() {
    let target = FakeTarget::start(BLOCKS);
    let mut builder = Client::builder().pool(8 << 20).timing(timing());
    builder.max_requests = 1;
    let client = world::add_engine(builder.region_segments(1).queue_size(1));
    let url: SrpUrl = format!("srp://{}/?cmd_sg_entries=4&immediate=0", target.addr)
        .parse()
        .unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    let read = |pieces: usize| {
        let buffers = (0..pieces).map(|_| block_on(lun.buffers().take_buffer(BLOCK)));
        let blocks = crate::scsi::BlockRange {
            lba: 0,
            blocks: pieces as u32,
        };
        let command = Command::read(blocks, (pieces * BLOCK) as u32);
        let data = IoData::Many(buffers.collect());
        ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(5))
    };
    let ends = [1, 64, 1].map(|pieces| session.submit(read(pieces)));
    let [first, second, third] = ends.map(|end| block_on(end).result);
    assert_eq!(first.unwrap().status, 0);
    assert!(matches!(second, Err(RequestError::NotStarted(_))));
    assert_eq!(third.unwrap().status, 0);
}

#[test]
fn busy_is_retried_and_errors_are_returned() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    let knobs = &rig.target.knobs;
    knobs.busy.store(3, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(1, 512));
    knobs.attention.store(1, Ordering::SeqCst);
    assert_eq!(read_bytes(&lun, 0, 512), pattern(1, 512));
    let cdb = Cdb::new(&[0xff, 0, 0, 0, 0, 0]).unwrap();
    let end = block_on(lun.scsi(cdb, DataLen::None, IoData::None));
    let response = end.result.unwrap();
    assert_eq!(
        (response.status, response.sense().unwrap().additional.code),
        (2, 0x20)
    );
    knobs.requests_credits.store(true, Ordering::SeqCst);
    read_bytes(&lun, 0, 512);
    read_bytes(&lun, 0, 512);
    eventually("two responses", || {
        knobs.credit_responses.load(Ordering::SeqCst) >= 2
    });
    assert_eq!(
        knobs.credit_responses.load(Ordering::SeqCst),
        2,
        "responses to credit requests"
    );
}

#[test]
fn silent_command_is_aborted_and_retried() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(5, 16384));
    assert!(rig.target.knobs.aborts.load(Ordering::SeqCst) >= 1);
    assert_eq!(read_bytes(&lun, 0, 16384), pattern(5, 16384));
}

/// A connection has regions for only one of these commands at a time. The first gets no response.
/// When its abort frees the regions, the timeout of the second has expired, too.
#[test]
fn command_never_follows_its_own_abort() {
    let rig = rig("queue_size=2&cmd_sg_entries=16&immediate=0");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    let write = |number: u32| {
        let buffers: Vec<_> = (0..9)
            .map(|i| {
                let buffer = block_on(lun.buffers().take_buffer(BLOCK));
                buffer
                    .slice()
                    .write(0, &pattern(9 * number as usize + i, BLOCK));
                buffer
            })
            .collect();
        let lba = u64::from(9 * number);
        let blocks = crate::scsi::BlockRange { lba, blocks: 9 };
        let command = Command::write(blocks, 9 * BLOCK as u32, false);
        let patience = Duration::from_secs(30);
        ScsiIo::new(lun.info().lun, command, IoData::Many(buffers), patience)
    };
    let ends = [0, 1].map(|number| rig.session.submit(write(number)));
    for end in ends {
        assert_eq!(block_on(end).result.unwrap().status, 0);
    }
    assert_eq!(rig.target.knobs.behind_abort.load(Ordering::SeqCst), 0);
    assert!(rig.target.knobs.aborts.load(Ordering::SeqCst) >= 1);
    for i in 0..18 {
        let at = (i * BLOCK) as u64;
        assert_eq!(read_bytes(&lun, at, BLOCK), pattern(i, BLOCK), "block {i}");
    }
}

#[test]
fn unresponsive_target_causes_reconnect() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    // After the check of a newly found unit.
    read_bytes(&lun, 0, 4096);
    rig.target.knobs.deaf.store(true, Ordering::SeqCst);
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(6, 4096));
    assert_eq!(read_bytes(&lun, 0, 4096), pattern(6, 4096));
    // On a busy machine, it may reconnect more than once.
    assert!(rig.session.status().reconnects() >= 1);
    let tried = rig.target.knobs.aborts.load(Ordering::SeqCst);
    assert!(tried >= 2, "an abort and a reset");
}

#[test]
fn broken_connection_reconnects_and_retries_commands() {
    let rig = rig("channels=2");
    let lun = block_on(rig.session.lun(0)).unwrap();
    for (round, knob) in [&rig.target.knobs.disconnect, &rig.target.knobs.garbage]
        .into_iter()
        .enumerate()
    {
        knob.store(true, Ordering::SeqCst);
        write_bytes(&lun, 0, &pattern(round, 8192));
        write_bytes(&lun, 65536, &pattern(round + 9, 65536));
        assert_eq!(read_bytes(&lun, 0, 8192), pattern(round, 8192));
        assert_eq!(read_bytes(&lun, 65536, 65536), pattern(round + 9, 65536));
    }
    assert!(rig.session.status().reconnects() >= 2);
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    let cdb = Cdb::new(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let end = block_on(lun.scsi(cdb, DataLen::None, IoData::None));
    assert_eq!(end.result.unwrap_err(), RequestError::ConnectionLost);
}

/// A target that is still starting may not report names yet. This does not indicate a different
/// unit.
#[test]
fn unit_without_names_is_checked_again() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.no_pages.store(3, Ordering::SeqCst);
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(1, 8192));
    assert_eq!(read_bytes(&lun, 0, 8192), pattern(1, 8192));
    assert_eq!(rig.target.knobs.no_pages.load(Ordering::SeqCst), 0);
}

#[test]
fn unlisted_pages_identify_unit() {
    let rig = rig("");
    let knobs = &rig.target.knobs;
    knobs.unlisted.store(true, Ordering::SeqCst);
    let lun = block_on(rig.session.lun(0)).unwrap();
    assert_eq!(lun.info().identity.serial.as_deref(), Some("S1"));
    assert!(lun.info().provisioning.write_same, "a page that is listed");
    knobs.disconnect.store(true, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(1, 8192));
    assert_eq!(read_bytes(&lun, 0, 8192), pattern(1, 8192), "the same unit");
    knobs.exchanged.store(true, Ordering::SeqCst);
    knobs.disconnect.store(true, Ordering::SeqCst);
    let buffer = block_on(lun.buffers().take_buffer(8192));
    buffer.slice().fill(0, 8192, 0xee);
    block_on(lun.write(0, buffer, false)).unwrap_err();
    assert_eq!(rig.target.disk.lock().unwrap()[..8192], pattern(1, 8192));
}

/// Without these pages, the unit would have no identity and would be treated as a different unit
/// later.
#[test]
fn discovery_fails_while_pages_are_unreadable() {
    let rig = rig("");
    for page in 0..3 {
        rig.target.knobs.no_pages.store(1 + page, Ordering::SeqCst);
        eventually("every page", || {
            let error = block_on(rig.session.lun(0)).unwrap_err();
            let key = riser_scsi::sense::SenseKey::NotReady;
            assert!(matches!(error, LunError::Check { key: k, .. } if k == key));
            rig.target.knobs.no_pages.load(Ordering::SeqCst) == 0
        });
    }
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(1, 8192));
    assert_eq!(read_bytes(&lun, 0, 8192), pattern(1, 8192));
}

/// Pages from before and after a reconnect would be combined into the identity of a unit that does
/// not exist.
#[test]
fn identity_uses_responses_of_single_login() {
    let rig = rig("");
    rig.target.knobs.vanishes.store(true, Ordering::SeqCst);
    let lun = block_on(rig.session.lun(0)).unwrap();
    assert!(rig.session.status().reconnects() >= 1);
    let again = block_on(rig.session.lun(0)).unwrap();
    assert_eq!(lun.info().identity, again.info().identity);
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    write_bytes(&lun, 0, &pattern(1, 8192));
    assert_eq!(read_bytes(&lun, 0, 8192), pattern(1, 8192), "the same unit");
}

/// Events are not reported for a unit that is not watched yet.
#[test]
fn unit_is_checked_before_first_use() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 512));
    let info = lun.info();
    let mut unit = crate::unit::Snapshot {
        inquiry: Some(info.inquiry.clone()),
        identity: info.identity.clone(),
        capacity: Some(info.capacity),
        ..Default::default()
    };
    let owner = std::sync::Arc::new(crate::unit::Losses::default());
    let watch = |unit| {
        let weak = std::sync::Arc::downgrade(&owner);
        block_on(rig.session.watch_unit(info.lun, unit, info.caching, weak)).unwrap();
    };
    watch(unit.clone());
    write_bytes(&lun, 0, &pattern(2, 512));
    unit.identity.serial = Some("S0".to_owned());
    let buffer = block_on(lun.buffers().take_buffer(512));
    buffer.slice().fill(0, 512, 0xee);
    watch(unit);
    block_on(lun.write(0, buffer, false)).unwrap_err();
    assert_eq!(rig.target.disk.lock().unwrap()[..512], pattern(2, 512));
}

#[test]
fn cacheless_disk_may_lack_flush_command() {
    let rig = rig("");
    let cached = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.cacheless.store(true, Ordering::SeqCst);
    let lun = block_on(rig.session.lun(0)).unwrap();
    block_on(lun.flush()).unwrap();
    block_on(cached.flush()).unwrap_err();
}

/// After a rejection, there are no further events of the connection manager, so only the engine's
/// clock can trigger the next attempt. A Linux target rejects logins while its port is disabled.
#[test]
fn rejected_login_is_retried() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.refuse.store(true, Ordering::SeqCst);
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    let buffer = block_on(lun.buffers().take_buffer(8192));
    buffer.slice().write(0, &pattern(1, 8192));
    let writing = begin(lun.write(0, buffer, false));
    eventually("four refusals", || {
        rig.target.knobs.refused.load(Ordering::SeqCst) >= 4
    });
    rig.target.knobs.refuse.store(false, Ordering::SeqCst);
    block_on(writing).unwrap();
    assert_eq!(read_bytes(&lun, 0, 8192), pattern(1, 8192));
    let why = rig.session.status().last_down();
    let is_refused = matches!(why, Some(Down::Connect(ConnectError::Login(_))));
    assert!(is_refused, "an attempt was stuck: {why:?}");
}

/// The target uses the key of a completed command for a write, but the key is invalid.
#[test]
fn completed_command_memory_is_inaccessible() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 16384));
    let buffer = block_on(lun.buffers().take_buffer(16384));
    let buffer = block_on(lun.read(0, buffer)).unwrap();
    let knobs = &rig.target.knobs;
    knobs.attack.store(true, Ordering::SeqCst);
    eventually("the attack's end", || {
        knobs.attacks.0.load(Ordering::SeqCst) > 0
    });
    assert_eq!(knobs.attacks.1.load(Ordering::SeqCst), 1, "repelled");
    assert_eq!(buffer.slice().to_vec(), pattern(1, 16384));
    assert_eq!(
        read_bytes(&lun, 0, 16384),
        pattern(1, 16384),
        "after a reconnection"
    );
}

/// SRP does not negotiate remote invalidation. If a target uses it anyway, it invalidates the key
/// whose local invalidation would have indicated the completion of the command's SEND.
#[test]
fn unsolicited_invalidation_closes_connection_without_losses() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 16384));
    rig.target.knobs.invalidate.store(true, Ordering::SeqCst);
    let buffer = block_on(lun.buffers().take_buffer(16384));
    let wait = rig
        .client
        .timeout(Duration::from_secs(20), lun.read(0, buffer));
    let buffer = block_on(wait).expect("the command's end").unwrap();
    assert_eq!(buffer.slice().to_vec(), pattern(1, 16384));
    assert!(!rig.target.knobs.invalidate.load(Ordering::SeqCst));
    // The command completes before the outage is reported.
    eventually("an outage", || rig.session.status().reconnects() >= 1);
}

#[test]
fn lossy_network_preserves_data() {
    let target = FakeTarget::start(BLOCKS);
    world::fabric().set_faults(FaultConfig::percent(7, 2.0, 1.0, 1.0, 2.0));
    let client = world::add_engine(Client::builder().pool(8 << 20));
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1&channels=2", target.addr)
        .parse()
        .unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..20 {
        let data = pattern(round, 65536 + 512 * round);
        write_bytes(&lun, 4096 * round as u64, &data);
        assert_eq!(read_bytes(&lun, 4096 * round as u64, data.len()), data);
    }
    drop((lun, session, client));
}

#[test]
fn close_completes_overflow_commands() {
    let target = FakeTarget::start(64);
    target.knobs.deaf.store(true, Ordering::SeqCst);
    let client = client();
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1&queue_size=2", target.addr)
        .parse()
        .unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    target.knobs.swallow.store(u32::MAX, Ordering::SeqCst);
    let lun = riser_scsi::lun::LunId::ZERO;
    let ready = || {
        let command = Command::test_unit_ready();
        ScsiIo::new(lun, command, IoData::None, Duration::from_secs(60))
    };
    let waiting: Vec<_> = (0..3000).map(|_| session.submit(ready())).collect();
    block_on(session.close());
    for end in waiting {
        assert_eq!(block_on(end).result, Err(RequestError::Closed));
    }
    drop((session, client));
}

#[test]
fn missing_partition_key_is_rejected() {
    let url: SrpUrl = "srp://127.0.26.1/?pkey=8001".parse().unwrap();
    let error = block_on(client().connect(&url)).unwrap_err();
    assert!(error.to_string().contains("8001"), "{error}");
}

#[test]
fn unreachable_target_does_not_extend_timeout() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.refuse.store(true, Ordering::SeqCst);
    rig.target.knobs.disconnect.store(true, Ordering::SeqCst);
    let lun = lun.with_timeout(Duration::from_millis(400));
    let began = world::now();
    let buffer = block_on(lun.buffers().take_buffer(512));
    let error = block_on(lun.read(0, buffer)).unwrap_err();
    assert_eq!(error, LunError::Request(RequestError::TimedOut));
    assert_eq!(world::now() - began, Duration::from_millis(400));
    assert_eq!(rig.session.status().link(), LinkState::Reconnecting);
    rig.target.knobs.refuse.store(false, Ordering::SeqCst);
    let lun = lun.with_timeout(Duration::from_secs(60));
    assert_eq!(read_bytes(&lun, 0, 512), vec![0; 512]);
}

#[test]
fn zeroing_needs_no_pool_buffer() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 512 << 10));
    let held: Vec<Buffer> = std::iter::from_fn(|| lun.buffers().try_take(1)).collect();
    assert_eq!(lun.buffers().free(), 0);
    let zero = |range, options| block_on(lun.write_zeroes(range, options));
    assert_eq!(zero(0..65_536, ZeroOptions::default()), Ok(()));
    let fast = ZeroOptions {
        fast: true,
        ..ZeroOptions::default()
    };
    assert_eq!(zero(65_536..131_072, fast), Ok(()));
    rig.target.knobs.no_write_same.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(zero(131_072..262_144, fast), Err(LunError::Unsupported));
    }
    // More than the length of the zeroes.
    assert_eq!(
        zero(131_072..131_072 + 300 * 1024, ZeroOptions::default()),
        Ok(())
    );
    drop(held);
    let end = 131_072 + 300 * 1024;
    assert!(read_bytes(&lun, 0, end) == vec![0; end]);
    assert!(read_bytes(&lun, end as u64, 4096) == pattern(1, 512 << 10)[end..end + 4096]);
}

#[test]
fn abandoned_wait_keeps_memory_until_completion() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    let free = rig.client.buffers().free();
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    let buffer = block_on(lun.buffers().take_buffer(65536));
    let io = lun.write_io(0, buffer, false).unwrap();
    drop(rig.session.submit(io));
    assert!(rig.client.buffers().free() < free);
    eventually("the memory", || rig.client.buffers().free() == free);
    assert!(rig.target.knobs.aborts.load(Ordering::SeqCst) >= 1);
}

struct Loop {
    lun: Lun,
    left: u32,
    depth: u32,
    errors: u32,
    done: mpsc::Sender<(u32, u32)>,
    ended: u32,
}

impl Loop {
    fn next(&mut self, buffer: riser_block::Buffer, queue: &mut WorkQueue) {
        if self.left > 0 {
            self.left -= 1;
            let offset = u64::from(self.left * 97 % 500) * 4096;
            let io = self.lun.read_io(offset, buffer).unwrap();
            queue.submit(offset, io);
        }
    }
}

impl Workload for Loop {
    fn start(&mut self, queue: &mut WorkQueue) {
        for _ in 0..self.depth {
            let buffer = self.lun.buffers().try_take(4096).unwrap();
            self.next(buffer, queue);
        }
    }

    fn complete(&mut self, _token: u64, end: IoCompletion, queue: &mut WorkQueue) {
        self.ended += 1;
        match Lun::completed_buffer(end) {
            Ok(buffer) => self.next(buffer, queue),
            Err(_) => self.errors += 1,
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = self.done.send((self.ended, self.errors));
    }
}

fn work(rig: &Rig, ios: u32, depth: u32) -> (u32, u32) {
    let lun = block_on(rig.session.lun(0)).unwrap();
    let (done, ended) = mpsc::channel();
    let workload = Loop {
        lun,
        left: ios,
        depth,
        errors: 0,
        done,
        ended: 0,
    };
    rig.session.run(Box::new(workload)).unwrap();
    let mut counts = None;
    eventually("the workload's end", || {
        counts = ended.try_recv().ok();
        counts.is_some()
    });
    counts.expect("seen above")
}

#[test]
fn workload_runs_on_engine() {
    let deep = rig("queue_size=16");
    assert_eq!(work(&deep, 2000, 64), (2000, 0), "deeper than the queue");
    let wide = rig("register_always=0&queue_size=16");
    assert_eq!(work(&wide, 2000, 8), (2000, 0));
    wide.target.knobs.disconnect.store(true, Ordering::SeqCst);
    assert_eq!(work(&wide, 500, 8), (500, 0), "across a reconnection");
}

/// Reads once per millisecond.
struct Paced {
    lun: Lun,
    left: u32,
    due: Option<Instant>,
    started: Vec<Instant>,
    done: mpsc::Sender<Vec<Instant>>,
}

impl Workload for Paced {
    fn start(&mut self, _queue: &mut WorkQueue) {
        self.due = Some(world::now() + Duration::from_millis(1));
    }

    fn complete(&mut self, _token: u64, end: IoCompletion, _queue: &mut WorkQueue) {
        Lun::completed_buffer(end).unwrap();
    }

    fn due(&self) -> Option<Instant> {
        self.due
    }

    fn wake(&mut self, queue: &mut WorkQueue) {
        let now = world::now();
        self.started.push(now);
        self.left -= 1;
        self.due = (self.left > 0).then(|| now + Duration::from_millis(1));
        let buffer = self.lun.buffers().try_take(512).unwrap();
        queue.submit(0, self.lun.read_io(0, buffer).unwrap());
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        let _ = self.done.send(std::mem::take(&mut self.started));
    }
}

#[test]
fn workload_is_woken_at_due_times() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    let (done, ended) = mpsc::channel();
    let paced = Paced {
        lun,
        left: 20,
        due: None,
        started: Vec::new(),
        done,
    };
    rig.session.run(Box::new(paced)).unwrap();
    let mut started = None;
    eventually("the workload's end", || {
        started = ended.try_recv().ok();
        started.is_some()
    });
    let started = started.expect("seen above");
    assert_eq!(started.len(), 20);
    let apart = started.windows(2).map(|w| w[1] - w[0]);
    assert!(apart.min() >= Some(Duration::from_millis(1)));
}

#[test]
fn abandoned_login_is_logged_out() {
    let target = FakeTarget::start(8);
    let client = client();
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1", target.addr)
        .parse()
        .unwrap();
    let wait = client.timeout(Duration::ZERO, client.connect(&url));
    assert!(matches!(block_on(wait), Err(Elapsed)));
    eventually("the session's end", || {
        target.knobs.logouts.load(Ordering::SeqCst) > 0
    });
}

#[test]
fn srp_channel_finishes_connecting_before_close() {
    let target = FakeTarget::start(8);
    target.knobs.late.store(true, Ordering::SeqCst);
    let client = client();
    let url: SrpUrl = format!("srp://{}/?ioc_guid=1&channels=4", target.addr)
        .parse()
        .unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    block_on(session.close());
    assert_eq!(target.knobs.logins.load(Ordering::SeqCst), 4);
    assert_eq!(target.knobs.withdrawn.load(Ordering::SeqCst), 0);
}

#[test]
fn iser_connection_finishes_connecting_before_close() {
    use riser_transport::verbs::{
        CmEvent, CmEventKind, ConnParam, PortSpace, Provider, QpCap, QpInitAttr, QpType, RdmaCm,
        Verbs,
    };

    let next = |nic: &mut Endpoint, within: Duration| -> Option<CmEvent> {
        let until = world::now() + within;
        while world::now() < until {
            nic.progress(world::now());
            if let Some(event) = nic.poll_cm_event() {
                return Some(event);
            }
            let next = nic.deadline().map_or(until, |at| at.min(until));
            world::step(Some(next));
        }
        None
    };
    let mut nic = world::fabric().endpoint(world::address());
    let portal = std::net::SocketAddr::new(nic.addr(), 3260);
    let listener = nic.create_id(PortSpace::Tcp).unwrap();
    nic.bind_addr(listener, portal).unwrap();
    nic.listen(listener, 4).unwrap();
    let client = client();
    let url = format!("iser://{portal}/iqn.2026-01.com.example:disk/0");
    let url: crate::url::IscsiUrl = url.parse().unwrap();
    let wait = client.timeout(Duration::ZERO, client.connect(&url));
    assert!(matches!(block_on(wait), Err(Elapsed)));
    let request = next(&mut nic, Duration::from_secs(20)).expect("a request");
    client.shutdown();
    // The target is slow, and must not receive anything in the meantime.
    assert_eq!(next(&mut nic, Duration::from_millis(100)), None);
    let pd = nic.alloc_pd().unwrap();
    let cq = nic.create_cq(8).unwrap();
    let init = QpInitAttr::new(pd, cq, QpType::Rc, QpCap::new(4, 4));
    nic.create_cm_qp(request.id, &init).unwrap();
    nic.accept(request.id, &ConnParam::default()).unwrap();
    let kinds = [(); 2].map(|()| next(&mut nic, Duration::from_secs(20)).map(|e| e.kind));
    assert!(
        matches!(
            kinds,
            [
                Some(CmEventKind::Established { .. }),
                Some(CmEventKind::Disconnected)
            ]
        ),
        "{kinds:?}"
    );
}

#[test]
fn wait_for_buffer_times_out() {
    let rig = rig("");
    let all = block_on(rig.client.buffers().take_buffer(8 << 20));
    let session = rig.session.clone().with_timeout(Duration::from_millis(50));
    assert_eq!(block_on(session.buffer(512)).unwrap_err(), Elapsed);
    let error = block_on(session.lun(0)).unwrap_err();
    assert_eq!(error, LunError::Request(RequestError::TimedOut));
    drop(all);
    assert!(block_on(session.buffer(512)).is_ok());
}

#[test]
fn bare_address_is_completed() {
    let target = FakeTarget::start(8);
    let client = client();
    let url: SrpUrl = format!("srp://{}/", target.addr).parse().unwrap();
    let found = block_on(client.discover(&url)).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].port(), found[0].name.as_str()),
        (Some(5555), "fake")
    );
    let session = block_on(client.connect(&url)).unwrap();
    let TargetUrl::Srp(named) = session.url() else {
        panic!("{}", session.url());
    };
    assert_eq!((named.id_ext, named.ioc_guid), (Some(0x52), Some(0x51)));
    let unused_address: SrpUrl = "srp://127.0.9.9/".parse().unwrap();
    let error = block_on(client.discover(&unused_address)).unwrap_err();
    assert!(error.to_string().contains("no response"), "{error}");
    drop((session, client));
}

#[test]
fn close_completes_outstanding_commands() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    let buffer = block_on(lun.buffers().take_buffer(512));
    let waiting = rig.session.submit(lun.read_io(0, buffer).unwrap());
    block_on(rig.session.close());
    assert_eq!(block_on(waiting).result.unwrap_err(), RequestError::Closed);
    let buffer = block_on(lun.buffers().take_buffer(512));
    let late = block_on(lun.read(0, buffer)).unwrap_err();
    assert_eq!(late, LunError::Request(RequestError::Closed));
    assert_eq!(rig.session.status().link(), LinkState::Closed);
    rig.client.shutdown();
    let buffer = block_on(lun.buffers().take_buffer(512));
    assert!(block_on(lun.read(0, buffer)).is_err());
}

/// The reset occurred during a session, even if its check required another login.
#[test]
fn reset_counts_even_if_check_reconnects() {
    let rig = rig("");
    let lun = block_on(rig.session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 512));
    // The disk was reset and has no names yet.
    rig.target.knobs.no_pages.store(1, Ordering::SeqCst);
    rig.target.knobs.attention.store(1, Ordering::SeqCst);
    read_bytes(&lun, 0, 512);
    assert!(rig.session.status().reconnects() >= 1);
    let error = block_on(lun.flush()).unwrap_err();
    assert_eq!(error, LunError::Request(RequestError::CacheLost));
    block_on(lun.flush()).unwrap();
}
