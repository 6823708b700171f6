//! Tests of scrubs.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use riser_scsi::protection::{ProtectionError, guard};

use super::*;
use crate::backend::{Defect, Scrub, ScrubState};

const BLOCKS: u64 = 128;
const DEADLINE: Duration = Duration::from_secs(60);

/// Offset of a frame with a block of 512 bytes.
fn frame_offset(lba: u64) -> u64 {
    (127 + lba) * 520
}

/// A block and the tuple as it is stored in the file, for type 1.
fn frame(lba: u64, fill: u8) -> Vec<u8> {
    with_tuple(lba, vec![fill; 512])
}

fn with_tuple(lba: u64, mut frame: Vec<u8>) -> Vec<u8> {
    let tuple = [
        &guard(&frame).to_be_bytes()[..],
        &[0, 0],
        &(lba as u32).to_be_bytes(),
    ];
    frame.extend(tuple.concat().iter().map(|byte| !byte));
    frame
}

/// Opens a store with valid protection information for all blocks, and its file.
fn open(dir: &Dir) -> (Arc<Store>, File) {
    let spec = Spec {
        protection: Some(Protection::new(ProtectionType::Type1)),
        ..spec(file(dir.file("lun"), BLOCKS * 512))
    };
    let store = Store::open(&spec).unwrap();
    let file = File::options().write(true).open(dir.file("lun")).unwrap();
    for lba in 0..BLOCKS {
        file.write_all_at(&frame(lba, lba as u8), frame_offset(lba))
            .unwrap();
    }
    (store, file)
}

fn wait_for(scrub: &Scrub, state: &ScrubState) {
    eventually("the scrub ends", DEADLINE, || {
        scrub.progress().state == *state
    });
}

#[test]
fn scrub_lists_defective_blocks() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub");
    let (store, file) = open(&dir);
    let scrub = Scrub::start(&store, None).unwrap();
    wait_for(&scrub, &ScrubState::Completed);
    let progress = scrub.progress();
    assert_eq!((progress.blocks, progress.checked), (BLOCKS, BLOCKS));
    assert_eq!(progress.defects.total(), 0);
    // Damage a block, a guard, and write a block to another LBA.
    file.write_all_at(&[0xff], frame_offset(5) + 100).unwrap();
    file.write_all_at(&[0], frame_offset(9) + 512).unwrap();
    file.write_all_at(&frame(78, 1), frame_offset(77)).unwrap();
    for rate in [None, Some(1 << 20)] {
        let scrub = Scrub::start(&store, rate).unwrap();
        wait_for(&scrub, &ScrubState::Completed);
        let progress = scrub.progress();
        let (guard, tag) = (ProtectionError::Guard, ProtectionError::ReferenceTag);
        let expected = [(5, guard), (9, guard), (77, tag)];
        let expected = expected.map(|(lba, check)| (lba, Defect::Check(check)));
        assert_eq!(progress.listed, expected);
        assert_eq!((progress.checked, progress.defects.total()), (BLOCKS, 3));
        assert!(progress.ended.is_some());
    }
}

#[test]
fn scrub_skips_unprotected_blocks() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-types");
    let (store, file) = open(&dir);
    file.write_all_at(&frame(78, 1), frame_offset(77)).unwrap();
    let defects = |protection_type| {
        store.set_protection_type(protection_type).unwrap();
        let scrub = Scrub::start(&store, None).unwrap();
        wait_for(&scrub, &ScrubState::Completed);
        scrub.progress().defects.total()
    };
    assert_eq!(defects(Some(ProtectionType::Type1)), 1);
    assert_eq!(defects(Some(ProtectionType::Type3)), 0);
    store.set_protection_type(None).unwrap();
    let error = Scrub::start(&store, None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    for source in [
        Source::Ram { size: 1 << 20 },
        Source::Null { size: 1 << 20 },
    ] {
        let protected = Spec {
            protection: Some(Protection::new(ProtectionType::Type1)),
            ..spec(source)
        };
        let error = Scrub::start(&Store::open(&protected).unwrap(), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    }
}

#[test]
fn stopped_scrub_does_not_continue() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-stop");
    let (store, _) = open(&dir);
    let scrub = Scrub::start(&store, Some(512)).unwrap();
    assert!(scrub.is_running());
    eventually("a block is read", DEADLINE, || scrub.progress().checked > 0);
    scrub.stop();
    let progress = scrub.progress();
    assert_eq!(progress.state, ScrubState::Stopped);
    assert!(progress.checked < BLOCKS && progress.ended.is_some());
    check_threads(DEADLINE).unwrap();
}

/// Each block is then read separately.
#[test]
fn stopped_scrub_ends_during_medium_errors() {
    let spec = Spec {
        protection: Some(Protection::new(ProtectionType::Type1)),
        ..spec(file("/in/memory".into(), 64 << 20))
    };
    let (disk, threads) = (Disk::new(0), simulated::Threads::default());
    let host = SimulatedHost::new(threads.clone(), Instant::now());
    let store = Store::on_disk(&spec, &disk, Arc::new(host)).unwrap();
    disk.set_unreadable(std::iter::once(frame_offset(0)..u64::MAX).collect());
    let scrub = Scrub::start(&store, None).unwrap();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| threads.step(threads.runnable()[0]));
        eventually("a block is read", DEADLINE, || scrub.progress().checked > 0);
        let stopped = Instant::now();
        scrub.stop();
        assert!(ended.join().unwrap());
        assert!(stopped.elapsed() < Duration::from_secs(3));
    });
    let progress = scrub.progress();
    assert_eq!(progress.state, ScrubState::Stopped);
    assert!(progress.checked < progress.blocks, "{progress:?}");
    assert!(!scrub.is_reading(&store));
}

#[test]
fn removed_backend_ends_scrub() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-removed");
    let (store, _) = open(&dir);
    let scrub = Scrub::start(&store, Some(5120)).unwrap();
    eventually("a block is read", DEADLINE, || scrub.progress().checked > 0);
    drop(store);
    wait_for(&scrub, &ScrubState::Removed);
    assert!(scrub.progress().checked < BLOCKS);
}

/// A write is not atomic for a reader, so the block does not match its tuple in between.
#[test]
fn changing_block_is_not_reported() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-write");
    let (store, file) = open(&dir);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for count in 0_u32.. {
                let frame = with_tuple(40, count.to_be_bytes().repeat(128));
                file.write_all_at(&frame[..512], frame_offset(40)).unwrap();
                std::thread::sleep(Duration::from_millis(5));
                file.write_all_at(&frame[512..], frame_offset(40) + 512)
                    .unwrap();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let scrub = Scrub::start(&store, None).unwrap();
        wait_for(&scrub, &ScrubState::Completed);
        assert_eq!(scrub.progress().listed, []);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn slow_write_is_not_reported() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-slow");
    let (store, file) = open(&dir);
    let frame = frame(40, 0xee);
    file.write_all_at(&frame[..512], frame_offset(40)).unwrap();
    let scrub = Scrub::start(&store, None).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(scrub.is_running());
    file.write_all_at(&frame[512..], frame_offset(40) + 512)
        .unwrap();
    wait_for(&scrub, &ScrubState::Completed);
    assert_eq!(scrub.progress().listed, []);
}

#[test]
fn suspect_block_does_not_hold_store() {
    let dir = Dir::new(&std::env::temp_dir(), "scrub-suspect");
    let (store, file) = open(&dir);
    file.write_all_at(&[0xff], frame_offset(5) + 100).unwrap();
    let scrub = Scrub::start(&store, None).unwrap();
    eventually("all blocks are read", DEADLINE, || {
        scrub.progress().checked == BLOCKS
    });
    assert!(scrub.is_running());
    let other = Arc::downgrade(&store);
    drop(store);
    eventually("the store is closed", Duration::from_secs(2), || {
        other.strong_count() == 0
    });
    scrub.stop();
    check_threads(Duration::from_secs(2)).unwrap();
}
