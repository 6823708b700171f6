//! Inverts a bit at each place on the way between the initiator's memory and the medium. Each test
//! does the same with protection information, which must detect the damage, and without, where the
//! damaged block must be stored or returned as good data.

mod file;
mod stage;

use std::cell::Cell;
use std::rc::Rc;

use riser_initiator::lun::{Lun, LunError};
use riser_initiator::protection::PiError;
use riser_scsi::protection::ProtectionError;
use riser_tests::rig::{Protocol, buffer_of, pattern};

use self::stage::{Fate, Packet, Stage, damage_memory};

/// First block of all commands.
const FIRST: u64 = 9;

/// Number of blocks of all commands.
const BLOCKS: u64 = 64;

/// LBA of the damaged block.
const DAMAGED: u64 = 50;

const BLOCK: usize = 512;

/// Contents of a block in a write.
fn block(write: u64, lba: u64) -> Vec<u8> {
    pattern(write << 32 | lba, BLOCK)
}

/// Data of a write.
fn data(write: u64) -> Vec<u8> {
    let lbas = FIRST..FIRST + BLOCKS;
    lbas.flat_map(|lba| block(write, lba)).collect()
}

/// Who has detected the damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detector {
    /// The target, while it executes the command of the damaged data.
    Target,
    /// The target, when the block is read later.
    NextRead,
    Initiator,
    Scrub,
}

fn print_result(place: &str, protocol: &str, detector: Detector, lba: u64) {
    let by = match detector {
        Detector::Target => "target",
        Detector::NextRead => "target, at the next read",
        Detector::Initiator => "initiator",
        Detector::Scrub => "target, by a scrub",
    };
    println!(
        "result: {place}, {protocol}: detected by the {by}: guard check, LBA {lba}; without \
         protection: not detected"
    );
}

/// The data of the command, compared with the last write: the LBA of the damaged block.
#[track_caller]
fn damaged_lba(read: &[u8], write: u64) -> u64 {
    let expected = data(write);
    let pairs = read.chunks(BLOCK).zip(expected.chunks(BLOCK));
    let mut differ = pairs.enumerate().filter(|(_, (read, good))| read != good);
    let (at, (read, good)) = differ.next().expect("a block is damaged");
    let changed = read.iter().zip(good).map(|(read, good)| read ^ good);
    let changed: Vec<_> = changed.filter(|bits| *bits != 0).collect();
    assert_eq!(changed, [0x10], "one bit is inverted");
    assert_eq!(differ.count(), 0);
    FIRST + at as u64
}

async fn write(lun: &Lun, write: u64) -> Result<(), LunError> {
    let buffer = buffer_of(lun, &data(write));
    let written = lun.write(FIRST * BLOCK as u64, buffer, false).await;
    written.map(drop)
}

async fn read(lun: &Lun) -> Result<Vec<u8>, LunError> {
    let buffer = buffer_of(lun, &data(0));
    let read = lun.read(FIRST * BLOCK as u64, buffer).await?;
    Ok(read.slice().to_vec())
}

/// Place of the damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the NIC of the initiator reads the data of a write.
    InitiatorBeforeSend,
    /// After the NIC of the initiator has written the data of a read.
    InitiatorAfterReceive,
    WireToTarget,
    WireToInitiator,
    PoolBeforeCheck,
    PoolBeforeDisk,
    PoolBeforeSend,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Self::InitiatorBeforeSend => "initiator's memory, write after generation",
            Self::InitiatorAfterReceive => "initiator's memory, read before verification",
            Self::WireToTarget => "network behind the ICRC, write",
            Self::WireToInitiator => "network behind the ICRC, read",
            Self::PoolBeforeCheck => "target's memory, write before the check",
            Self::PoolBeforeDisk => "target's memory, write after the check",
            Self::PoolBeforeSend => "target's memory, read after the check",
        }
    }

    fn detector(self) -> Detector {
        match self {
            Self::InitiatorBeforeSend | Self::WireToTarget | Self::PoolBeforeCheck => {
                Detector::Target
            }
            Self::PoolBeforeDisk => Detector::NextRead,
            Self::InitiatorAfterReceive | Self::WireToInitiator | Self::PoolBeforeSend => {
                Detector::Initiator
            }
        }
    }
}

/// Sends commands and damages their data. Returns the result of the first command that fails, or
/// the data of the last read. The damaged data is that of write 2.
fn run_damaged(stage: &mut Stage, lun: &Lun, place: Place) -> Result<Vec<u8>, LunError> {
    let target = block(2, DAMAGED);
    let hits = Rc::new(Cell::new(0));
    let count = Rc::clone(&hits);
    let hit = move || count.set(count.get() + 1);
    let is_write = !matches!(
        place,
        Place::InitiatorAfterReceive | Place::WireToInitiator | Place::PoolBeforeSend
    );
    stage.run(write(lun, 1)).unwrap();
    if !is_write {
        stage.run(write(lun, 2)).unwrap();
    }
    // The target's memory is known now, and the next command uses the same memory.
    let pool = Rc::clone(&stage.pool);
    let offset = FIRST * BLOCK as u64;
    let result = match place {
        Place::InitiatorBeforeSend => {
            let io = lun
                .write_io(offset, buffer_of(lun, &data(2)), false)
                .unwrap();
            assert!(damage_memory(io.data.buffers()[0].slice(), &target));
            hit();
            let end = stage.run(lun.session().submit(io));
            Lun::completed_buffer(end).map(drop)
        }
        Place::InitiatorAfterReceive => {
            let io = lun.read_io(offset, buffer_of(lun, &data(0))).unwrap();
            let end = stage.run(lun.session().submit(io));
            assert!(damage_memory(end.data.buffers()[0].slice(), &target));
            hit();
            return Lun::completed_buffer(end).map(|buffer| buffer.slice().to_vec());
        }
        Place::WireToTarget | Place::WireToInitiator => {
            let is_damaged = if is_write {
                Packet::is_read_response
            } else {
                Packet::is_write
            };
            stage.on_packet = Some(Box::new(move |packet| {
                if is_damaged(packet) && packet.contains(&target) {
                    packet.damage(&target);
                    hit();
                }
                Fate::Forward
            }));
            Ok(())
        }
        Place::PoolBeforeCheck => {
            // The last packet is held until the bit is inverted, because the target checks the data
            // when it is complete.
            let (last, mut steps) = (block(2, FIRST + BLOCKS - 1), 0);
            stage.on_packet = Some(Box::new(move |packet| {
                if !packet.is_read_response() || !packet.contains(&last) {
                    return Fate::Forward;
                }
                assert!(!packet.contains(&target), "several packets are required");
                steps += 1;
                if steps < 100 {
                    return Fate::Hold;
                }
                let pool = pool.borrow();
                assert!(damage_memory(pool.as_ref().unwrap(), &target));
                hit();
                Fate::Forward
            }));
            Ok(())
        }
        Place::PoolBeforeDisk => {
            let mut is_damaged = false;
            stage.on_disk_write = Some(Box::new(move |pool| {
                if !is_damaged && damage_memory(pool, &target) {
                    is_damaged = true;
                    hit();
                }
            }));
            Ok(())
        }
        Place::PoolBeforeSend => {
            // The first packet is lost, and the NIC reads the memory again for the next one.
            let mut lost = 0;
            stage.on_packet = Some(Box::new(move |packet| {
                if !packet.is_write() || !packet.contains(&target) || lost > 0 {
                    return Fate::Forward;
                }
                lost += 1;
                let pool = pool.borrow();
                assert!(damage_memory(pool.as_ref().unwrap(), &target));
                hit();
                Fate::Drop
            }));
            Ok(())
        }
    };
    let result = match is_write && place != Place::InitiatorBeforeSend {
        true => stage.run(write(lun, 2)),
        false => result,
    };
    if is_write {
        (stage.on_packet, stage.on_disk_write) = (None, None);
    }
    let read = result.and_then(|()| stage.run(read(lun)));
    (stage.on_packet, stage.on_disk_write) = (None, None);
    assert_eq!(hits.get(), 1, "{place:?}");
    read
}

fn damage_is_detected_over(protocol: Protocol, place: Place) {
    let mut stage = Stage::new(protocol, ", protection: { type: 1 }");
    let (session, lun) = stage.open();
    assert!(lun.protection().is_some());
    let error = run_damaged(&mut stage, &lun, place).unwrap_err();
    let expected = PiError {
        check: ProtectionError::Guard,
        lba: Some(DAMAGED),
        is_by_target: place.detector() != Detector::Initiator,
    };
    assert_eq!(error, LunError::Protection(expected), "{place:?}");
    if place.detector() == Detector::Target {
        let stored = stage.run(read(&lun)).unwrap();
        let at = (DAMAGED - FIRST) as usize * BLOCK;
        assert_eq!(
            stored[at..at + BLOCK],
            block(1, DAMAGED),
            "it was not written"
        );
    }
    // Another write repairs the block.
    stage.run(write(&lun, 3)).unwrap();
    assert!(stage.run(read(&lun)).unwrap() == data(3));
    stage.run(session.close());

    let mut plain = Stage::new(protocol, "");
    let (session, lun) = plain.open();
    assert!(lun.protection().is_none());
    let read = run_damaged(&mut plain, &lun, place).unwrap();
    assert_eq!(damaged_lba(&read, 2), DAMAGED);
    plain.run(session.close());
    print_result(place.name(), protocol.scheme(), place.detector(), DAMAGED);
}

macro_rules! places {
    ($($name:ident: $place:ident,)*) => {
        $(mod $name {
            use super::{Place, Protocol, damage_is_detected_over};

            #[test]
            fn srp() {
                damage_is_detected_over(Protocol::Srp, Place::$place);
            }

            #[test]
            fn iser() {
                damage_is_detected_over(Protocol::Iser, Place::$place);
            }
        })*
    };
}

places! {
    sent_data_is_checked: InitiatorBeforeSend,
    received_data_is_checked: InitiatorAfterReceive,
    packets_to_target_are_checked: WireToTarget,
    packets_to_initiator_are_checked: WireToInitiator,
    pool_is_checked_before_write: PoolBeforeCheck,
    pool_is_checked_after_write: PoolBeforeDisk,
    pool_is_checked_after_read: PoolBeforeSend,
}
