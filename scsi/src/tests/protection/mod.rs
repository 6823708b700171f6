//! Tests for protection information. We construct the expected tuples here, without calling any
//! public functions of the crate.

mod format;
mod model;

use super::{A, B, Outcome, Rig, config};
use crate::config::{BlockSize, Config, ConfigError, Protection, ProtectionType};
use crate::step::{BlockOp, Residual, Status};

const TYPES: [ProtectionType; 3] = [
    ProtectionType::Type1,
    ProtectionType::Type2,
    ProtectionType::Type3,
];

const GUARD: (u8, u8, u8) = (0xb, 0x10, 1);
const APPLICATION: (u8, u8, u8) = (0xb, 0x10, 2);
const REFERENCE: (u8, u8, u8) = (0xb, 0x10, 3);
const INVALID_FIELD: (u8, u8, u8) = (5, 0x24, 0);
const INVALID_OPCODE: (u8, u8, u8) = (5, 0x20, 0);
const SHORT_DATA: (u8, u8, u8) = (5, 0x0e, 3);

/// CRC-16/T10-DIF of each byte, one bit at a time.
static CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x8bb7 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc(block: &[u8]) -> u16 {
    block.iter().fold(0, |crc: u16, byte| {
        crc << 8 ^ CRC[usize::from(crc >> 8) ^ usize::from(*byte)]
    })
}

fn tuple(guard: u16, application: u16, reference: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..2].copy_from_slice(&guard.to_be_bytes());
    bytes[2..4].copy_from_slice(&application.to_be_bytes());
    bytes[4..].copy_from_slice(&reference.to_be_bytes());
    bytes
}

/// Adds a tuple after every block.
fn join(data: &[u8], tuples: &[[u8; 8]]) -> Vec<u8> {
    let size = data.len() / tuples.len().max(1);
    let blocks = data.chunks(size.max(1)).zip(tuples);
    blocks
        .flat_map(|(block, tuple)| [block, tuple].concat())
        .collect()
}

/// Valid tuples for contiguous blocks of 512 bytes.
fn valid(data: &[u8], application: u16, reference: u32) -> Vec<[u8; 8]> {
    (0..)
        .zip(data.chunks(512))
        .map(|(i, block)| tuple(crc(block), application, reference + i))
        .collect()
}

fn protection(protection_type: ProtectionType, client_owns_tag: bool) -> Protection {
    Protection {
        protection_type,
        client_owns_tag,
    }
}

/// 128 blocks of 512 bytes, with an application tag owned by the application client.
fn unit(protection_type: ProtectionType) -> Config {
    Config {
        protection: Some(Protection::new(protection_type)),
        ..config(BlockSize::B512, 128)
    }
}

/// A rig with valid protection information for all blocks: application tag 1234h, and the LBA as
/// the reference tag.
fn filled(config: Config) -> Rig {
    let mut rig = Rig::with(config);
    let size = rig.block();
    for (lba, block) in (0..).zip(rig.disk.chunks(size)) {
        rig.tags[lba as usize] = tuple(crc(block), 0x1234, lba);
    }
    rig
}

fn ten(code: u8, protect: u8, flags: u8, lba: u8, blocks: u8) -> [u8; 10] {
    let flags = protect << 5 | flags;
    [code, flags, 0, 0, 0, lba, 0, 0, blocks, 0]
}

fn sixteen(code: u8, protect: u8, flags: u8, lba: u8, blocks: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[9], cdb[13]) = (code, protect << 5 | flags, lba, blocks);
    cdb
}

const READ: u8 = 0x09;
const VERIFY: u8 = 0x0a;
const WRITE: u8 = 0x0b;
const WRITE_AND_VERIFY: u8 = 0x0c;
const WRITE_SAME: u8 = 0x0d;

/// Expected reference tag, application tag and mask.
type Tags = (u32, u16, u16);

/// A 32-byte CDB.
fn long(action: u8, protect: u8, flags: u8, lba: u8, blocks: u8, tags: Tags) -> [u8; 32] {
    let mut cdb = [0; 32];
    (cdb[0], cdb[7], cdb[9]) = (0x7f, 0x18, action);
    cdb[10] = protect << 5 | flags;
    (cdb[19], cdb[31]) = (lba, blocks);
    cdb[20..24].copy_from_slice(&tags.0.to_be_bytes());
    cdb[24..26].copy_from_slice(&tags.1.to_be_bytes());
    cdb[26..28].copy_from_slice(&tags.2.to_be_bytes());
    cdb
}

/// Checks the sense data and the failing LBA.
#[track_caller]
fn assert_failed(outcome: &Outcome, sense: (u8, u8, u8), lba: u64) {
    assert_eq!(outcome.check(), sense);
    assert_eq!(outcome.sense().information, Some(lba));
}

#[test]
fn units_report_protection() {
    let rows = [
        // READ CAPACITY (16) byte 12, Extended INQUIRY byte 4.
        (ProtectionType::Type1, 0b0001, 0b000_101),
        (ProtectionType::Type2, 0b0011, 0b010_111),
        (ProtectionType::Type3, 0b0101, 0b100_100),
    ];
    for (protection_type, capacity, checks) in rows {
        let mut rig = Rig::with(unit(protection_type));
        assert_eq!(rig.send(&[0x12, 0, 0, 0, 96, 0]).good().data[5] & 1, 1);
        let read_capacity = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
        let data = rig.send(&read_capacity).good().data;
        assert_eq!(data[12..14], [capacity, 3], "{protection_type:?}");
        let page = rig.send(&[0x12, 1, 0x86, 0, 64, 0]).good().data;
        assert_eq!(page[4], checks, "{protection_type:?}");
        let control = rig.send(&[0x1a, 8, 0x0a, 0, 255, 0]).good().data;
        assert_eq!(control[4 + 5], 0xc0, "ATO and TAS");
        let changeable = rig.send(&[0x1a, 8, 0x4a, 0, 255, 0]).good().data;
        assert_eq!(changeable[4 + 2], 0x0c, "DPICZ and D_SENSE");
    }
    let mut rig = Rig::new();
    assert_eq!(rig.send(&[0x12, 0, 0, 0, 96, 0]).good().data[5] & 1, 0);
    assert_eq!(rig.send(&[0x12, 1, 0x86, 0, 64, 0]).good().data[4], 0);
    let mut device_owned = unit(ProtectionType::Type1);
    device_owned.protection = Some(protection(ProtectionType::Type1, false));
    let control = Rig::with(device_owned).send(&[0x1a, 8, 0x0a, 0, 255, 0]);
    assert_eq!(control.good().data[4 + 5], 0x40, "only TAS");
}

#[test]
fn supported_opcodes_follow_protection_type() {
    let usage = |rig: &mut Rig, option: u8, code: u8, action: u8| {
        let cdb = [0xa3, 0x0c, option, code, 0, action, 0, 0, 0xff, 0xff, 0, 0];
        rig.send(&cdb).good().data
    };
    let listed = |rig: &mut Rig| {
        let data = usage(rig, 0, 0, 0);
        data[4..].chunks(8).filter(|row| row[0] == 0x7f).count()
    };
    for protection_type in [ProtectionType::Type1, ProtectionType::Type3] {
        let mut rig = Rig::with(unit(protection_type));
        for (code, byte) in [(0x28, 0xfa), (0x93, 0xe9), (0x8b, 0xf8), (0xaf, 0xf6)] {
            assert_eq!(usage(&mut rig, 1, code, 0)[5], byte, "{code:#x}");
        }
        assert_eq!(usage(&mut rig, 1, 0x08, 0)[5], 0x1f, "READ (6)");
        assert_eq!(usage(&mut rig, 2, 0x7f, 9), [0, 1, 0, 0]);
        assert_eq!(listed(&mut rig), 0);
    }
    let mut rig = Rig::with(unit(ProtectionType::Type2));
    assert_eq!(usage(&mut rig, 1, 0x28, 0)[5], 0x1a);
    assert_eq!(listed(&mut rig), 5);
    for (action, byte) in [(9, 0xfa), (10, 0xf6), (11, 0xfa), (12, 0xf6), (13, 0xe9)] {
        let data = usage(&mut rig, 2, 0x7f, action);
        assert_eq!(data[..5], [0, 3, 0, 32, 0x7f]);
        assert_eq!(data[4 + 7..4 + 11], [0x18, 0, action, byte]);
    }
    assert_eq!(usage(&mut rig, 2, 0x7f, 14), [0, 1, 0, 0]);
    let mut rig = Rig::new();
    assert_eq!(usage(&mut rig, 1, 0x7f, 0), [0, 1, 0, 0]);
    assert_eq!(usage(&mut rig, 1, 0x28, 0)[5], 0x1a);
}

/// The operation code of 32-byte CDBs is only known by units with type 2 protection.
#[test]
fn long_cdbs_require_type_2() {
    let read = long(READ, 0, 0, 5, 1, (5, 0, 0));
    let unknown = long(0x1f, 0, 0, 5, 1, (5, 0, 0));
    for config in [
        config(BlockSize::B512, 128),
        unit(ProtectionType::Type1),
        unit(ProtectionType::Type3),
    ] {
        let mut rig = Rig::with(config);
        assert_eq!(rig.send(&read).check(), INVALID_OPCODE);
        assert_eq!(rig.send(&unknown).check(), INVALID_OPCODE);
    }
    let mut rig = filled(unit(ProtectionType::Type2));
    assert_eq!(rig.send(&read).good().data, rig.disk[5 * 512..6 * 512]);
    assert_eq!(rig.send(&unknown).cdb_pointer(), (8, Some(7)));
    assert_eq!(rig.send(&read[..16]).cdb_pointer(), (16, None));
    let mut cdb = read;
    cdb[7] = 0x10;
    assert_eq!(rig.send(&cdb).cdb_pointer(), (7, Some(7)));
    cdb[7] = 0x58;
    assert_eq!(rig.send(&cdb).cdb_pointer(), (7, Some(6)));
}

/// The target should not receive any data for a command that we will refuse.
#[test]
fn unsupported_commands_receive_no_data() {
    use crate::config::Provisioning;
    use crate::device_server::Request;
    use crate::opcode::Opcode;
    use crate::step::{DataOut, Expected, TaskAttribute};
    let data_out = |rig: &Rig, cdb: &[u8]| {
        rig.lu.data_out(&Request {
            nexus: A,
            cdb,
            opcode: Opcode::of(cdb),
            expected: Expected {
                data_out: 512,
                data_in: 0,
            },
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        })
    };
    let long = |(action, flags)| long(action, 0, flags, 4, 1, (4, 0, 0));
    let commands = [
        (WRITE, 0),
        (WRITE_AND_VERIFY, 2),
        (VERIFY, 2),
        (WRITE_SAME, 0),
    ];
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    for config in [
        config(BlockSize::B512, 128),
        unit(ProtectionType::Type1),
        unit(ProtectionType::Type3),
    ] {
        let rig = Rig::with(config);
        for command in commands {
            assert_eq!(data_out(&rig, &long(command)), None, "{command:?}");
        }
        assert!(data_out(&rig, &unmap).is_some());
    }
    let mut config = unit(ProtectionType::Type2);
    config.provisioning = Provisioning::Thick;
    let rig = Rig::with(config);
    for command in commands {
        let len = data_out(&rig, &long(command)).map(|DataOut { len, .. }| len);
        assert_eq!(len, Some(512), "{command:?}");
    }
    assert_eq!(data_out(&rig, &unmap), None);
}

/// Ensure that an unknown operation code is refused before we check reservations.
#[test]
fn unknown_long_cdbs_ignore_reservations() {
    let write = long(WRITE, 0, 0, 4, 1, (4, 0, 0));
    let unknown = long(0x1f, 0, 0, 4, 1, (4, 0, 0));
    for protection_type in TYPES {
        let mut rig = filled(unit(protection_type));
        // RESERVE (6).
        rig.run(B, &[0x16, 0, 0, 0, 0, 0], &[], 0).good();
        for action in [READ, VERIFY, WRITE, WRITE_AND_VERIFY, WRITE_SAME] {
            let outcome = rig.send(&long(action, 0, 0, 4, 1, (4, 0, 0)));
            match protection_type {
                ProtectionType::Type2 => {
                    assert_eq!(outcome.response.status, Status::ReservationConflict);
                }
                _ => assert_eq!(outcome.check(), INVALID_OPCODE),
            }
        }
        assert_eq!(rig.send(&unknown).response.status, Status::CheckCondition);
        let outcome = rig.run(B, &write, &[0; 512], 0);
        match protection_type {
            ProtectionType::Type2 => drop(outcome.good()),
            _ => assert_eq!(outcome.check(), INVALID_OPCODE),
        }
    }
}

#[test]
fn type_2_refuses_protect_in_short_cdbs() {
    let mut rig = filled(unit(ProtectionType::Type2));
    let data = [rig.disk[..512].to_vec(), vec![0; 8]].concat();
    for protect in 1..8 {
        for code in [0x28, 0x2a, 0x2e, 0x2f, 0x41] {
            let outcome = rig.send_out(&ten(code, protect, 0, 0, 1), &data);
            assert_eq!(outcome.check(), INVALID_OPCODE, "{code:#x}");
        }
        for code in [0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x93] {
            let outcome = rig.send_out(&sixteen(code, protect, 0, 0, 1), &data);
            assert_eq!(outcome.check(), INVALID_OPCODE, "{code:#x}");
        }
        for code in [0xa8, 0xaa, 0xae, 0xaf] {
            let cdb = [code, protect << 5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
            assert_eq!(rig.send_out(&cdb, &data).check(), INVALID_OPCODE);
        }
    }
    rig.send(&ten(0x28, 0, 0, 0, 1)).good();
}

#[test]
fn reserved_protect_values_are_refused() {
    let mut rig = filled(unit(ProtectionType::Type1));
    for protect in [6, 7] {
        let outcome = rig.send(&ten(0x28, protect, 0, 0, 1));
        assert_eq!(outcome.check(), INVALID_FIELD);
        assert_eq!(outcome.cdb_pointer(), (1, Some(7)));
    }
    rig.send(&ten(0x28, 5, 0, 0, 1)).good();
    let mut rig = filled(unit(ProtectionType::Type2));
    let outcome = rig.send(&long(READ, 6, 0, 0, 1, (0, 0, 0)));
    assert_eq!(outcome.cdb_pointer(), (10, Some(7)));
}

#[test]
fn limits_must_fit_one_block() {
    let mut small = unit(ProtectionType::Type1);
    small.limits.window = 512;
    assert_eq!(small.validate(), Err(ConfigError::Limit("window")));
    small.limits.window = 1024;
    assert_eq!(small.validate(), Ok(()));
    let mut small = Config {
        block_size: BlockSize::B4096,
        ..unit(ProtectionType::Type1)
    };
    small.limits.segment = 4096;
    assert_eq!(small.validate(), Err(ConfigError::Limit("segment")));
    small.protection = None;
    assert_eq!(small.validate(), Ok(()));
}

#[test]
fn read_adds_or_strips_protection_information() {
    for big in [false, true] {
        for window in [2048, 12_288, 64 << 10] {
            let size = if big {
                BlockSize::B4096
            } else {
                BlockSize::B512
            };
            let block = size.bytes() as usize;
            let mut unit = unit(ProtectionType::Type1);
            unit.block_size = size;
            unit.limits.window = window.max(8192 * u32::from(big));
            let mut rig = filled(unit);
            let data = rig.disk[3 * block..14 * block].to_vec();
            let joined = join(&data, &rig.tags[3..14]);
            assert_eq!(rig.send(&ten(0x28, 0, 0, 3, 11)).good().data, data);
            let len = joined.len() as u32;
            for protect in 1..6 {
                let cdb = sixteen(0x88, protect, 0, 3, 11);
                let outcome = rig.run(A, &cdb, &[], len).good();
                assert_eq!(outcome.data, joined, "{protect}");
                assert_eq!(outcome.response.residual_in, Residual::None);
            }
            // Enough space for two blocks, and for part of a third one.
            let room = 2 * (block as u32 + 8) + 100;
            let outcome = rig.run(A, &ten(0x28, 1, 0, 3, 11), &[], room).good();
            assert_eq!(outcome.data, joined[..room as usize]);
            let residual = Residual::Overflow(len - room);
            assert_eq!(outcome.response.residual_in, residual);
        }
    }
}

#[test]
fn six_byte_commands_check_blocks() {
    for protection_type in TYPES {
        let mut rig = filled(unit(protection_type));
        rig.send_out(&[0x0a, 0, 0, 4, 1, 0], &[7; 512]).good();
        let reference = match protection_type {
            ProtectionType::Type1 => 4,
            _ => u32::MAX,
        };
        assert_eq!(rig.tags[4], tuple(crc(&[7; 512]), 0xffff, reference));
        rig.send(&[0x08, 0, 0, 4, 1, 0]).good();
        rig.disk[5 * 512] ^= 1;
        assert_failed(&rig.send(&[0x08, 0, 0, 4, 2, 0]), GUARD, 5);
    }
}

/// Returns which of the three checks are enabled by a value of RDPROTECT or WRPROTECT.
fn checks(protect: u8) -> [bool; 3] {
    match protect {
        1 | 5 => [true, true, true],
        2 => [false, true, true],
        4 => [true, false, false],
        _ => [false, false, false],
    }
}

#[test]
fn read_checks_follow_field() {
    // The guard, the application tag, and the reference tag.
    let wrong = [0, 2, 7];
    let senses = [GUARD, APPLICATION, REFERENCE];
    for protection_type in TYPES {
        let is_long = protection_type == ProtectionType::Type2;
        for protect in 0..6 {
            for field in 0..3 {
                let mut rig = filled(unit(protection_type));
                rig.tags[9][wrong[field]] ^= 1;
                let outcome = match is_long {
                    true => rig.send(&long(READ, protect, 0, 4, 8, (4, 0x1234, 0xffff))),
                    false => rig.send(&ten(0x28, protect, 0, 4, 8)),
                };
                let selected = match protect {
                    0 => [true, true, true],
                    _ => checks(protect),
                };
                let is_known = match field {
                    0 => true,
                    1 => is_long,
                    _ => protection_type != ProtectionType::Type3,
                };
                if selected[field] && is_known {
                    assert_failed(&outcome, senses[field], 9);
                    assert!(outcome.data.is_empty());
                } else {
                    outcome.good();
                }
            }
        }
    }
}

#[test]
fn write_checks_follow_field() {
    let wrong = [0, 2, 7];
    let senses = [GUARD, APPLICATION, REFERENCE];
    for protection_type in TYPES {
        let is_long = protection_type == ProtectionType::Type2;
        for protect in 1..6 {
            for field in 0..3 {
                let mut rig = filled(unit(protection_type));
                let before = rig.disk.clone();
                let data = [0x5a; 8 * 512];
                let mut tuples = valid(&data, 0x1234, 4);
                tuples[5][wrong[field]] ^= 1;
                let joined = join(&data, &tuples);
                let outcome = match is_long {
                    true => {
                        let cdb = long(WRITE, protect, 0, 4, 8, (4, 0x1234, 0xffff));
                        rig.send_out(&cdb, &joined)
                    }
                    false => rig.send_out(&ten(0x2a, protect, 0, 4, 8), &joined),
                };
                let is_known = match field {
                    0 => true,
                    1 => is_long,
                    _ => protection_type != ProtectionType::Type3,
                };
                if checks(protect)[field] && is_known {
                    assert_failed(&outcome, senses[field], 9);
                    assert!(rig.disk == before, "nothing is written");
                    assert!(outcome.ops.is_empty());
                } else {
                    let outcome = outcome.good();
                    assert_eq!(outcome.response.residual_out, Residual::None);
                    assert_eq!(rig.disk[4 * 512..12 * 512], data);
                    assert_eq!(rig.tags[4..12], tuples, "stored as received");
                }
            }
        }
    }
}

#[test]
fn application_tag_is_masked() {
    let mut rig = filled(unit(ProtectionType::Type2));
    let read = |tag, mask| long(READ, 1, 0, 4, 2, (4, tag, mask));
    rig.send(&read(0xf230, 0x0ff0)).good();
    assert_failed(&rig.send(&read(0xf230, 0x8000)), APPLICATION, 4);
    // If the device server owns the tag, we should ignore the expected tag.
    let mut unit = unit(ProtectionType::Type2);
    unit.protection = Some(protection(ProtectionType::Type2, false));
    filled(unit).send(&read(0xf230, 0x8000)).good();
}

/// A transfer that wraps the 32-bit reference tag.
#[test]
fn expected_reference_tag_wraps() {
    let mut rig = Rig::with(unit(ProtectionType::Type2));
    let data = [1; 3 * 512];
    let tuples = [u32::MAX - 1, u32::MAX, 0].map(|tag| tuple(crc(&data[..512]), 0, tag));
    let first = (u32::MAX - 1, 0, 0);
    let joined = join(&data, &tuples);
    rig.send_out(&long(WRITE, 1, 0, 7, 3, first), &joined)
        .good();
    assert_eq!(rig.send(&long(READ, 1, 0, 7, 3, first)).good().data, joined);
    let outcome = rig.send(&long(READ, 1, 0, 8, 2, first));
    assert_failed(&outcome, REFERENCE, 8);
}

#[test]
fn escapes_disable_checks_of_reads() {
    for protection_type in TYPES {
        for protect in [0, 1] {
            let read = |rig: &mut Rig| match protection_type {
                ProtectionType::Type2 => rig.send(&long(READ, protect, 0, 4, 2, (4, 1, 0xffff))),
                _ => rig.send(&ten(0x28, protect, 0, 4, 2)),
            };
            let mut rig = Rig::with(unit(protection_type));
            read(&mut rig).good();
            // The escape of type 3 includes the reference tag.
            rig.tags[5] = tuple(1, 0xffff, 3);
            match protection_type {
                ProtectionType::Type3 => assert_failed(&read(&mut rig), GUARD, 5),
                _ => drop(read(&mut rig).good()),
            }
            rig.tags[5] = tuple(1, 0xfffe, u32::MAX);
            assert_failed(&read(&mut rig), GUARD, 5);
        }
    }
    // A write is always checked.
    let mut rig = Rig::with(unit(ProtectionType::Type1));
    let joined = join(&[1; 512], &[[0xff; 8]]);
    assert_failed(&rig.send_out(&ten(0x2a, 1, 0, 4, 1), &joined), GUARD, 4);
    rig.send_out(&ten(0x2a, 3, 0, 4, 1), &joined).good();
    assert_eq!(rig.tags[4], [0xff; 8]);
}

#[test]
fn unprotected_writes_generate_tags() {
    for protection_type in TYPES {
        for owned in [true, false] {
            let mut unit = unit(protection_type);
            unit.protection = Some(protection(protection_type, owned));
            unit.limits.window = 2048;
            let mut rig = Rig::with(unit);
            let data: Vec<u8> = (0..9 * 512).map(|at| (at / 3) as u8).collect();
            let outcome = rig.send_out(&ten(0x2a, 0, 0, 4, 9), &data).good();
            assert_eq!(outcome.response.residual_out, Residual::None);
            assert_eq!(rig.disk[4 * 512..13 * 512], data);
            let is_escape = owned || protection_type == ProtectionType::Type2;
            for (i, block) in (0..9).zip(data.chunks(512)) {
                let application = if is_escape { 0xffff } else { 0 };
                let reference = match protection_type {
                    ProtectionType::Type1 => 4 + i,
                    _ => u32::MAX,
                };
                let expected = tuple(crc(block), application, reference);
                assert_eq!(rig.tags[4 + i as usize], expected);
            }
            rig.send(&ten(0x28, 0, 0, 4, 9)).good();
            // We should only detect this without an escape.
            rig.disk[6 * 512 + 17] ^= 0x10;
            let outcome = rig.send(&ten(0x28, 0, 0, 4, 9));
            match is_escape {
                true => drop(outcome.good()),
                false => assert_failed(&outcome, GUARD, 6),
            }
        }
    }
}

/// The client might use any reference tag to read blocks that it has written without tuples.
#[test]
fn type_2_writes_generate_escapes() {
    for owned in [true, false] {
        let mut unit = unit(ProtectionType::Type2);
        unit.protection = Some(protection(ProtectionType::Type2, owned));
        let data = [6; 2 * 512];
        let commands: [(&[u8], &[u8]); 5] = [
            (&ten(0x2a, 0, 0, 4, 2), &data),
            (&long(WRITE, 0, 0, 4, 2, (77, 0, 0)), &data),
            (&long(WRITE_AND_VERIFY, 0, 0, 4, 2, (77, 0, 0)), &data),
            (&long(WRITE_AND_VERIFY, 0, 2, 4, 2, (77, 0, 0)), &data),
            (&long(WRITE_SAME, 0, 0, 4, 2, (77, 0, 0)), &data[..512]),
        ];
        for (cdb, out) in commands {
            let mut rig = Rig::with(unit.clone());
            rig.send_out(cdb, out).good();
            let expected = tuple(crc(&data[..512]), 0xffff, u32::MAX);
            assert_eq!(rig.tags[4..6], [expected; 2], "{cdb:02x?}");
            for first in [77, 4] {
                let read = long(READ, 1, 0, 4, 2, (first, 0, 0));
                assert_eq!(rig.send(&read).good().data, join(&data, &[expected; 2]));
            }
        }
    }
}

#[test]
fn unprotected_field_can_disable_checks() {
    let mut rig = filled(unit(ProtectionType::Type1));
    rig.disk[5 * 512] ^= 1;
    assert_failed(&rig.send(&ten(0x28, 0, 0, 4, 2)), GUARD, 5);
    // MODE SELECT with DPICZ.
    let control = [0x0a, 0x0a, 0x0a, 0x10, 0, 0xc0, 0, 0, 0xff, 0xff, 0, 0];
    let list = [&[0; 4][..], &control].concat();
    rig.send_out(&[0x15, 0x10, 0, 0, 16, 0], &list).good();
    rig.send(&ten(0x28, 0, 0, 4, 2)).good();
    assert_failed(&rig.send(&ten(0x28, 1, 0, 4, 2)), GUARD, 5);
    let state = serde_json::to_string(&rig.lu.export_state()).unwrap();
    let next = Rig::with(unit(ProtectionType::Type1));
    next.lu.import_state(&serde_json::from_str(&state).unwrap());
    assert!(next.lu.ignores_unrequested_checks());
    rig.lu.reset();
    assert!(!rig.lu.ignores_unrequested_checks());
}

#[test]
fn failed_piece_is_not_sent_or_written() {
    let mut unit = unit(ProtectionType::Type1);
    // Three blocks.
    unit.limits.window = 2048;
    let mut rig = filled(unit);
    rig.disk[9 * 512] ^= 1;
    let outcome = rig.send(&ten(0x28, 0, 0, 4, 8));
    assert_failed(&outcome, GUARD, 9);
    assert_eq!(outcome.data, rig.disk[4 * 512..7 * 512], "previous piece");
    let data = [3; 8 * 512];
    let mut tuples = valid(&data, 0, 4);
    tuples[5][7] ^= 1;
    let before = rig.disk.clone();
    let outcome = rig.send_out(&ten(0x2a, 1, 0, 4, 8), &join(&data, &tuples));
    assert_failed(&outcome, REFERENCE, 9);
    let residual = Residual::Underflow(2 * 520);
    assert_eq!(outcome.response.residual_out, residual);
    assert_eq!(rig.disk[4 * 512..7 * 512], data[..3 * 512]);
    assert_eq!(rig.disk[7 * 512..], before[7 * 512..]);
}

#[test]
fn data_length_includes_protection_information() {
    let mut rig = filled(unit(ProtectionType::Type1));
    let data = [3; 2 * 512];
    let joined = join(&data, &valid(&data, 0, 4));
    let write = ten(0x2a, 1, 0, 4, 2);
    let outcome = rig.send_out(&write, &data);
    assert_eq!(outcome.check(), SHORT_DATA, "no protection information");
    assert_eq!(outcome.response.residual_out, Residual::Overflow(16));
    let outcome = rig.send_out(&write, &joined[..520]).good();
    assert_eq!(outcome.response.residual_out, Residual::Overflow(520));
    let more = [&joined[..], &[0; 7]].concat();
    let outcome = rig.send_out(&write, &more).good();
    assert_eq!(outcome.response.residual_out, Residual::Underflow(7));
    let commands: [&[u8]; 3] = [
        &ten(0x41, 1, 0, 4, 2),
        &sixteen(0x89, 1, 0, 4, 1),
        &sixteen(0x8b, 1, 0, 4, 2),
    ];
    for cdb in commands {
        for len in [512, 1024, 519] {
            let outcome = rig.send_out(cdb, &joined[..len]);
            assert_eq!(outcome.check(), SHORT_DATA, "{cdb:02x?} {len}");
        }
    }
}

#[test]
fn verify_without_data_checks_medium() {
    for protect in 0..6 {
        for (field, byte) in [(0, 0), (2, 7)] {
            let mut rig = filled(unit(ProtectionType::Type1));
            rig.send(&ten(0x2f, protect, 0, 0, 60)).good();
            rig.tags[40][byte] ^= 1;
            let outcome = rig.send(&ten(0x2f, protect, 0, 0, 60));
            if protect == 0 || checks(protect)[field] {
                assert_failed(&outcome, if field == 0 { GUARD } else { REFERENCE }, 40);
            } else {
                outcome.good();
            }
        }
    }
}

#[test]
fn verify_compares_protection_information() {
    let miscompare = |(_, code, qualifier)| (0xe, code, qualifier);
    for window in [2048, 64 << 10] {
        for code in [0x2f, 0x2e] {
            let mut unit = unit(ProtectionType::Type1);
            unit.limits.window = window;
            let mut rig = filled(unit);
            let data = rig.disk[4 * 512..24 * 512].to_vec();
            let joined = join(&data, &rig.tags[4..24]);
            let cdb = ten(code, 1, 2, 4, 20);
            rig.send_out(&cdb, &joined).good();
            if code == 0x2e {
                continue;
            }
            // The medium is different.
            rig.tags[20][3] ^= 1;
            let outcome = rig.send_out(&cdb, &joined);
            assert_failed(&outcome, miscompare(APPLICATION), 20);
            rig.tags[20][3] ^= 1;
            rig.tags[21][0] ^= 1;
            let outcome = rig.send_out(&cdb, &joined);
            assert_failed(&outcome, miscompare(GUARD), 21);
            rig.send_out(&ten(code, 2, 2, 4, 20), &joined).good();
            // Without received tuples, those on the medium are checked.
            let outcome = rig.send_out(&ten(code, 0, 2, 4, 20), &data);
            assert_failed(&outcome, GUARD, 21);
            rig.tags[21][0] ^= 1;
            // The received data isn't valid, or doesn't match the medium.
            let mut wrong = joined.clone();
            wrong[18 * 520 + 5] ^= 1;
            assert_failed(&rig.send_out(&cdb, &wrong), GUARD, 22);
            rig.disk[22 * 512 + 5] ^= 1;
            let outcome = rig.send_out(&cdb, &joined);
            assert_failed(&outcome, (0xe, 0x1d, 0), 18 * 520 + 5);
        }
    }
}

#[test]
fn verify_repeats_received_tuple() {
    let mut rig = Rig::with(unit(ProtectionType::Type1));
    rig.disk[4 * 512..40 * 512].fill(8);
    let guard = crc(&[8; 512]);
    for lba in 4..40 {
        rig.tags[lba as usize] = tuple(guard, 5, lba);
    }
    let cdb = ten(0x2f, 1, 6, 4, 36);
    let one = join(&[8; 512], &[tuple(guard, 5, 4)]);
    rig.send_out(&cdb, &one).good();
    rig.tags[39] = tuple(guard, 5, 4);
    assert_failed(&rig.send_out(&cdb, &one), (0xe, 0x10, 3), 39);
    rig.tags[39] = tuple(guard, 6, 39);
    assert_failed(&rig.send_out(&cdb, &one), (0xe, 0x10, 2), 39);
    let wrong = join(&[8; 512], &[tuple(guard, 5, 5)]);
    assert_failed(&rig.send_out(&cdb, &wrong), REFERENCE, 4);
    assert_eq!(rig.send_out(&cdb, &[8; 512]).check(), SHORT_DATA);
}

/// Escapes should only have an effect on tuples, not on data.
#[test]
fn verify_does_not_compare_escapes() {
    for protection_type in [ProtectionType::Type1, ProtectionType::Type3] {
        let mut rig = filled(unit(protection_type));
        let data = rig.disk[4 * 512..6 * 512].to_vec();
        let guard = crc(&data[..512]);
        rig.send_out(&ten(0x2a, 0, 0, 4, 1), &data[..512]).good();
        let sent = [tuple(guard, 0x1234, 4), rig.tags[5]];
        let cdb = ten(0x2f, 1, 2, 4, 2);
        rig.send_out(&cdb, &join(&data, &sent)).good();
        // Send the escape, instead of storing it.
        rig.tags[5] = tuple(1, 0, 9);
        let sent = [sent[0], tuple(crc(&data[512..]), 0xffff, 5)];
        let outcome = rig.send_out(&cdb, &join(&data, &sent));
        match protection_type {
            ProtectionType::Type3 => assert_failed(&outcome, (0xe, 0x10, 1), 5),
            _ => drop(outcome.good()),
        }
        // BYTCHK 11b.
        let cdb = ten(0x2f, 1, 6, 4, 1);
        rig.tags[4] = [0xff; 8];
        let one = join(&data[..512], &[tuple(guard, 0x1234, 4)]);
        rig.send_out(&cdb, &one).good();
        rig.tags[4] = tuple(guard, 0xfffe, u32::MAX);
        assert_failed(&rig.send_out(&cdb, &one), (0xe, 0x10, 2), 4);
        rig.tags[4] = [0xff; 8];
        rig.disk[4 * 512 + 9] ^= 1;
        assert_failed(&rig.send_out(&cdb, &one), (0xe, 0x1d, 0), 9);
    }
}

#[test]
fn verify_compare_follows_field() {
    for (field, byte) in [(0, 0), (1, 2), (2, 7)] {
        for protect in 1..6 {
            for flags in [2, 6] {
                let mut rig = filled(unit(ProtectionType::Type1));
                let one = join(&rig.disk[4 * 512..5 * 512], &rig.tags[4..5]);
                rig.tags[4][byte] ^= 1;
                let is_compared = match field {
                    0 => protect != 2,
                    1 => true,
                    _ => protect != 5,
                };
                let outcome = rig.send_out(&ten(0x2f, protect, flags, 4, 1), &one);
                if is_compared {
                    assert_failed(&outcome, (0xe, 0x10, field + 1), 4);
                } else {
                    outcome.good();
                }
            }
        }
    }
}

#[test]
fn long_verify_uses_expected_tags() {
    let mut rig = filled(unit(ProtectionType::Type2));
    let joined = join(&rig.disk[4 * 512..6 * 512], &rig.tags[4..6]);
    for (cdb, out) in [
        (long(VERIFY, 1, 0, 4, 2, (4, 0x1234, 0xffff)), &[][..]),
        (long(VERIFY, 1, 2, 4, 2, (4, 0x1234, 0xffff)), &joined),
        (
            long(VERIFY, 1, 6, 4, 1, (4, 0x1234, 0xffff)),
            &joined[..520],
        ),
        (
            long(WRITE_AND_VERIFY, 1, 0, 4, 2, (4, 0x1234, 0xffff)),
            &joined,
        ),
        (
            long(WRITE_AND_VERIFY, 1, 2, 4, 2, (4, 0x1234, 0xffff)),
            &joined,
        ),
    ] {
        rig.send_out(&cdb, out).good();
        let mut wrong = cdb;
        wrong[23] ^= 1;
        assert_failed(&rig.send_out(&wrong, out), REFERENCE, 4);
        wrong = cdb;
        wrong[25] ^= 1;
        assert_failed(&rig.send_out(&wrong, out), APPLICATION, 4);
    }
    let reserved = long(VERIFY, 0, 4, 4, 2, (4, 0, 0));
    assert_eq!(rig.send(&reserved).cdb_pointer(), (10, Some(2)));
}

#[test]
fn write_and_verify_detects_unwritten_tags() {
    use crate::device_server::Request;
    use crate::opcode::Opcode;
    use crate::step::{Expected, Step, StepResult, TaskAttribute};
    // A backend that does not write anything, for both values of BYTCHK.
    for (flags, sense) in [(0, (0xb, 0x10, 1)), (2, (0xe, 0x10, 1))] {
        let rig = filled(unit(ProtectionType::Type1));
        let data = [9; 512];
        let joined = join(&data, &valid(&data, 0, 4));
        let cdb = ten(0x2e, 1, flags, 4, 1);
        let (mut command, mut step) = rig.lu.start(&Request {
            nexus: A,
            cdb: &cdb,
            opcode: Opcode::of(&cdb),
            expected: Expected {
                data_out: 520,
                data_in: 0,
            },
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        });
        let mut buffer = vec![0; command.buffer_len() as usize];
        let response = loop {
            match &step {
                Step::ReceiveData { .. } => buffer[..520].copy_from_slice(&joined),
                Step::Block(BlockOp::Read {
                    buffer_offset,
                    tags,
                    ..
                }) => {
                    buffer[*buffer_offset as usize..][..512].copy_from_slice(&data);
                    buffer[tags.unwrap() as usize..][..8].copy_from_slice(&rig.tags[4]);
                }
                Step::Respond(response) => break response.clone(),
                _ => {}
            }
            step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
        };
        let parsed = response.parsed_sense().unwrap();
        let code = parsed.additional;
        assert_eq!((parsed.key as u8, code.code, code.qualifier), sense);
        assert_eq!(parsed.information, Some(4));
    }
}

#[test]
fn write_same_repeats_tuple() {
    for protection_type in TYPES {
        let mut rig = Rig::with(unit(protection_type));
        let pattern: Vec<u8> = (0..512).map(|at| (at % 250) as u8).collect();
        let guard = crc(&pattern);
        let one = join(&pattern, &[tuple(guard, 5, 4)]);
        let outcome = match protection_type {
            ProtectionType::Type2 => {
                rig.send_out(&long(WRITE_SAME, 1, 0, 4, 40, (4, 5, 0xffff)), &one)
            }
            _ => rig.send_out(&ten(0x41, 1, 0, 4, 40), &one),
        };
        assert_eq!(outcome.good().ops.len(), 5, "8 blocks in each segment");
        for lba in 4..44 {
            let reference = match protection_type {
                ProtectionType::Type3 => 4,
                _ => lba,
            };
            assert_eq!(rig.tags[lba as usize], tuple(guard, 5, reference));
            assert_eq!(rig.disk[lba as usize * 512..][..512], pattern);
        }
        assert_eq!(rig.tags[44], [0xff; 8]);
        // Generated tuples.
        rig.send_out(&ten(0x41, 0, 0, 4, 40), &pattern).good();
        for lba in 4..44 {
            let reference = match protection_type {
                ProtectionType::Type1 => lba,
                _ => u32::MAX,
            };
            assert_eq!(rig.tags[lba as usize], tuple(guard, 0xffff, reference));
        }
    }
    let mut rig = Rig::with(unit(ProtectionType::Type1));
    let wrong = join(&[1; 512], &[tuple(crc(&[1; 512]), 5, 5)]);
    let outcome = rig.send_out(&ten(0x41, 1, 0, 4, 40), &wrong);
    assert_failed(&outcome, REFERENCE, 4);
    assert!(outcome.ops.is_empty());
}

#[test]
fn write_same_repeats_all_ones() {
    for protection_type in TYPES {
        for unmap in [0, 8] {
            let mut rig = filled(unit(protection_type));
            let one = join(&[7; 512], &[[0xff; 8]]);
            let outcome = match protection_type {
                ProtectionType::Type2 => {
                    rig.send_out(&long(WRITE_SAME, 3, unmap, 4, 20, (4, 0, 0)), &one)
                }
                _ => rig.send_out(&ten(0x41, 3, unmap, 4, 20), &one),
            };
            assert!(matches!(outcome.good().ops[0], BlockOp::Write { .. }));
            assert_eq!(rig.disk[4 * 512..24 * 512], [7; 20 * 512]);
            assert_eq!(rig.tags[4..24], [[0xff; 8]; 20]);
            rig.send(&ten(0x28, 0, 0, 4, 20)).good();
        }
    }
}

#[test]
fn write_same_zeros_keep_protection_information() {
    let mut rig = filled(unit(ProtectionType::Type1));
    let zeros = join(&[0; 512], &[tuple(0, 5, 4)]);
    let all_ones = join(&[0; 512], &[[0xff; 8]]);
    let is_zeroed =
        |outcome: Outcome| matches!(outcome.good().ops[..], [BlockOp::WriteZeroes { .. }]);
    // The backend would not write the tuples.
    assert!(!is_zeroed(rig.send_out(&ten(0x41, 1, 0, 4, 2), &zeros)));
    assert_eq!(rig.tags[4..6], [tuple(0, 5, 4), tuple(0, 5, 5)]);
    assert!(!is_zeroed(rig.send_out(&ten(0x41, 1, 8, 4, 2), &zeros)));
    assert!(!is_zeroed(rig.send_out(&ten(0x41, 0, 0, 4, 2), &[0; 512])));
    assert_eq!(rig.tags[4..6], [tuple(0, 0xffff, 4), tuple(0, 0xffff, 5)]);
    // Unmapped, or written as requested.
    assert!(is_zeroed(rig.send_out(&ten(0x41, 0, 8, 4, 2), &[0; 512])));
    assert_eq!(rig.tags[4..6], [[0xff; 8]; 2]);
    rig.tags[4] = [1; 8];
    assert!(is_zeroed(rig.send_out(&ten(0x41, 3, 8, 4, 2), &all_ones)));
    assert_eq!(rig.tags[4], [0xff; 8]);
    // NDOB.
    rig.tags[4] = [1; 8];
    assert!(is_zeroed(rig.send_out(&sixteen(0x93, 1, 1, 4, 2), &[])));
    assert_eq!(rig.tags[4], [0xff; 8]);
    rig.send(&ten(0x28, 1, 0, 4, 2)).good();
}

#[test]
fn unmap_resets_tags() {
    for protection_type in TYPES {
        let mut rig = filled(unit(protection_type));
        let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 2];
        list.extend([0; 4]);
        let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
        rig.send_out(&unmap, &list).good();
        assert_eq!(rig.tags[4..6], [[0xff; 8]; 2]);
        assert_eq!(rig.send(&ten(0x28, 0, 0, 4, 2)).good().data, [0; 1024]);
        let read = match protection_type {
            ProtectionType::Type2 => rig.send(&long(READ, 1, 0, 4, 2, (4, 1, 0xffff))),
            _ => rig.send(&ten(0x28, 1, 0, 4, 2)),
        };
        assert_eq!(read.good().data, join(&[0; 1024], &[[0xff; 8]; 2]));
    }
}

/// We should ignore the tuples provided with the original data, and only check the
/// new tuples on success of the compare.
#[test]
fn compare_and_write_checks_new_data() {
    let cdb = sixteen(0x89, 1, 0, 4, 3);
    let new = [0x77; 3 * 512];
    let fresh = join(&new, &valid(&new, 9, 4));
    for byte in [512, 519] {
        let mut rig = filled(unit(ProtectionType::Type1));
        let before = rig.disk.clone();
        let expected = join(&rig.disk[4 * 512..7 * 512], &rig.tags[4..7]);
        let mut bad_compare = expected.clone();
        bad_compare[520 + byte] ^= 1;
        let mut bad_write = fresh.clone();
        bad_write[2 * 520 + byte] ^= 1;
        // Send different data as well.
        let mut other = expected.clone();
        other[2 * 520 + 6] ^= 1;
        let outcome = rig.send_out(&cdb, &[&other[..], &bad_write].concat());
        assert_failed(&outcome, (0xe, 0x1d, 0), 2 * 520 + 6);
        let sense = if byte == 512 { GUARD } else { REFERENCE };
        let outcome = rig.send_out(&cdb, &[&expected[..], &bad_write].concat());
        assert_failed(&outcome, sense, 6);
        assert!(rig.disk == before, "nothing is written");
        rig.send_out(&cdb, &[&bad_compare[..], &fresh].concat())
            .good();
        assert_eq!(rig.disk[4 * 512..7 * 512], new);
        assert_eq!(rig.tags[4..7], valid(&new, 9, 4));
    }
}

#[test]
fn compare_and_write_checks_medium() {
    let mut rig = filled(unit(ProtectionType::Type1));
    let new = [0x77; 3 * 512];
    let expected = join(&rig.disk[4 * 512..7 * 512], &rig.tags[4..7]);
    let fresh = join(&new, &valid(&new, 9, 4));
    let cdb = sixteen(0x89, 1, 0, 4, 3);
    let both = [&expected[..], &fresh].concat();
    // The medium.
    rig.tags[6][1] ^= 1;
    assert_failed(&rig.send_out(&cdb, &both), GUARD, 6);
    rig.tags[6][1] ^= 1;
    // A difference in the last block, where the received data is valid.
    let mut other = rig.disk[4 * 512..7 * 512].to_vec();
    other[1030] ^= 1;
    let other = join(&other, &valid(&other, 9, 4));
    let outcome = rig.send_out(&cdb, &[&other[..], &fresh].concat());
    assert_failed(&outcome, (0xe, 0x1d, 0), 2 * 520 + 6);
    let outcome = rig.send_out(&cdb, &both).good();
    assert_eq!(outcome.response.residual_out, Residual::None);
    assert_eq!(rig.disk[4 * 512..7 * 512], new);
    assert_eq!(rig.tags[4..7], valid(&new, 9, 4));
    // Without protection information.
    let last = [0x11; 3 * 512];
    let cdb = sixteen(0x89, 0, 0, 4, 3);
    rig.send_out(&cdb, &[new, last].concat()).good();
    assert_eq!(rig.disk[4 * 512..7 * 512], last);
    assert_eq!(rig.tags[4..7], valid(&last, 0xffff, 4));
}

#[test]
fn compare_and_write_fits_into_window() {
    for protect in [0, 1] {
        let mut unit = unit(ProtectionType::Type1);
        unit.limits.window = 20 * 512;
        let mut rig = filled(unit);
        let most = rig.send(&[0x12, 1, 0xb0, 0, 64, 0]).good().data[5];
        assert_eq!(most, 8, "19 blocks with two tuples each, aligned");
        let data = rig.disk[..8 * 512].to_vec();
        let half = match protect {
            0 => data,
            _ => join(&data, &rig.tags[..8]),
        };
        let cdb = sixteen(0x89, protect, 0, 0, most);
        rig.send_out(&cdb, &half.repeat(2)).good();
        let cdb = sixteen(0x89, protect, 0, 0, most + 1);
        assert_eq!(rig.send_out(&cdb, &half).check(), INVALID_FIELD);
    }
}

#[test]
fn or_write_updates_guard() {
    for window in [2048, 64 << 10] {
        for protect in [0, 1, 3] {
            let mut unit = unit(ProtectionType::Type1);
            unit.limits.window = window;
            let mut rig = filled(unit);
            let data: Vec<u8> = (0..20 * 512).map(|at| (at * 3) as u8 & 0x55).collect();
            let out = match protect {
                0 => data.clone(),
                _ => join(&data, &valid(&data, 6, 4)),
            };
            let before = rig.disk[4 * 512..24 * 512].to_vec();
            let result: Vec<u8> = before.iter().zip(&data).map(|(a, b)| a | b).collect();
            let cdb = sixteen(0x8b, protect, 0, 4, 20);
            let outcome = rig.send_out(&cdb, &out).good();
            assert_eq!(outcome.response.residual_out, Residual::None);
            assert_eq!(rig.disk[4 * 512..24 * 512], result);
            let application = if protect == 0 { 0xffff } else { 6 };
            assert_eq!(rig.tags[4..24], valid(&result, application, 4));
        }
    }
    let mut rig = filled(unit(ProtectionType::Type1));
    let data = [1; 2 * 512];
    let joined = join(&data, &valid(&data, 6, 4));
    rig.disk[5 * 512] ^= 1;
    let before = rig.disk.clone();
    for (protect, out) in [(0, &data[..]), (1, &joined)] {
        let outcome = rig.send_out(&sixteen(0x8b, protect, 0, 4, 2), out);
        assert_failed(&outcome, GUARD, 5);
    }
    let wrong = join(&data, &valid(&data, 6, 3));
    let outcome = rig.send_out(&sixteen(0x8b, 1, 0, 4, 2), &wrong);
    assert_failed(&outcome, REFERENCE, 4);
    assert!(rig.disk == before);
}
