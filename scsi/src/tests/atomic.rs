//! Tests for commands that read data and then write based on it.

use super::{A, Rig, config};
use crate::config::BlockSize;
use crate::opcode::Opcode;
use crate::step::{BackendError, BlockOp, Residual};
use crate::task::{Blocks, Footprint};

const MISCOMPARE: (u8, u8, u8) = (0xe, 0x1d, 0);
const INVALID_FIELD: (u8, u8, u8) = (5, 0x24, 0);
const OUT_OF_RANGE: (u8, u8, u8) = (5, 0x21, 0);
const SHORT_DATA: (u8, u8, u8) = (5, 0x0e, 3);

fn compare_and_write(lba: u8, blocks: u8) -> [u8; 16] {
    [0x89, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0]
}

fn or_write(lba: u8, blocks: u8) -> [u8; 16] {
    [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0]
}

#[test]
fn compare_and_write_writes_if_equal() {
    for blocks in [1_u8, 2, 15, 17, 64] {
        let mut rig = Rig::with(config(BlockSize::B512, 128));
        let len = usize::from(blocks) * 512;
        let before = rig.disk.clone();
        let data = [&before[512 * 3..512 * 3 + len], &vec![0x5a; len]].concat();
        let outcome = rig.send_out(&compare_and_write(3, blocks), &data).good();
        assert_eq!(outcome.response.residual_out, Residual::None);
        let reads = outcome.ops.len() - 1;
        assert_eq!(reads, len.div_ceil(8192), "one per segment");
        assert!(matches!(
            outcome.ops[reads],
            BlockOp::Write {
                offset: 1536,
                fua: false,
                ..
            }
        ));
        assert_eq!(rig.disk[..1536], before[..1536]);
        assert_eq!(rig.disk[1536..1536 + len], vec![0x5a; len]);
        assert_eq!(rig.disk[1536 + len..], before[1536 + len..]);
    }
}

#[test]
fn compare_and_write_reports_first_difference() {
    for at in [0_usize, 511, 512, 8191, 8192, 20 * 512 - 1] {
        let mut rig = Rig::new();
        let before = rig.disk.clone();
        let mut expected = before[..20 * 512].to_vec();
        expected[at] ^= 1;
        if at + 1 < expected.len() {
            expected[at + 1] ^= 1;
        }
        let data = [expected, vec![0x5a; 20 * 512]].concat();
        let outcome = rig.send_out(&compare_and_write(0, 20), &data);
        assert_eq!(outcome.check(), MISCOMPARE);
        assert_eq!(outcome.sense().information, Some(at as u64));
        assert_eq!(rig.disk, before, "nothing was written");
    }
}

#[test]
fn compare_and_write_refuses_partial_data() {
    let mut rig = Rig::new();
    let before = rig.disk.clone();
    // VPD page B0h, MAXIMUM COMPARE AND WRITE LENGTH: two times 64 blocks is the maximum transfer
    // size of 64 KiB.
    let page = rig.send(&[0x12, 1, 0xb0, 0, 255, 0]).good().data;
    assert_eq!(page[5], 64);
    let outcome = rig.send_out(&compare_and_write(0, 65), &[0; 130 * 512]);
    assert_eq!(outcome.check(), INVALID_FIELD);
    assert_eq!(outcome.cdb_pointer(), (13, None));
    let outcome = rig.send_out(&compare_and_write(127, 2), &[0; 4 * 512]);
    assert_eq!(outcome.check(), OUT_OF_RANGE);
    for offered in [0, 512, 1023, 1025, 1536, 2048] {
        let outcome = rig.send_out(&compare_and_write(0, 1), &vec![0; offered]);
        assert_eq!(outcome.check(), SHORT_DATA, "{offered} bytes");
        assert!(outcome.ops.is_empty());
    }
    let outcome = rig.send_out(&compare_and_write(0, 0), &[0; 1024]);
    assert_eq!(outcome.check(), INVALID_FIELD);
    // Without any blocks, there is nothing to compare.
    rig.send_out(&compare_and_write(5, 0), &[]).good();
    assert_eq!(rig.disk, before);
}

#[test]
fn compare_and_write_respects_fua_and_errors() {
    let mut rig = Rig::new();
    let same = [&rig.disk[..512], &rig.disk[..512]].concat();
    let mut cdb = compare_and_write(0, 1);
    cdb[1] = 0x08;
    let ops = rig.send_out(&cdb, &same).good().ops;
    assert!(matches!(ops[1], BlockOp::Write { fua: true, .. }));
    rig.fail = Some(BackendError::Medium { offset: None });
    let outcome = rig.send_out(&compare_and_write(0, 1), &same);
    assert_eq!(outcome.check(), (3, 0x11, 0), "the read failed");
}

#[test]
fn or_write_sets_bits() {
    for blocks in [1_u8, 16, 17, 40] {
        let mut rig = Rig::new();
        let before = rig.disk.clone();
        let len = usize::from(blocks) * 512;
        let data: Vec<u8> = (0..len).map(|at| (at * 7 % 256) as u8).collect();
        rig.send_out(&or_write(9, blocks), &data).good();
        let start = 9 * 512;
        for (at, bits) in data.iter().enumerate() {
            assert_eq!(rig.disk[start + at], before[start + at] | bits);
        }
        assert_eq!(rig.disk[..start], before[..start]);
        assert_eq!(rig.disk[start + len..], before[start + len..]);
    }
    let mut rig = Rig::new();
    rig.send_out(&or_write(0, 0), &[]).good();
    let outcome = rig.send_out(&or_write(127, 2), &[0; 1024]);
    assert_eq!(outcome.check(), OUT_OF_RANGE);
}

#[test]
fn footprint_matches_cdb() {
    let footprint = |cdb: &[u8]| Opcode::of(cdb).footprint(cdb);
    let blocks = |first, end| Blocks { first, end };
    assert_eq!(
        footprint(&compare_and_write(7, 2)),
        Footprint::Atomic(blocks(7, 9))
    );
    assert_eq!(footprint(&or_write(3, 1)), Footprint::Atomic(blocks(3, 4)));
    let write = [0x2a, 0, 0, 0, 1, 0, 0, 0, 8, 0];
    assert_eq!(footprint(&write), Footprint::Writes(blocks(256, 264)));
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(footprint(&unmap), Footprint::Writes(Blocks::ALL));
    let read = [0x28, 0, 0, 0, 1, 0, 0, 0, 8, 0];
    for nothing in [&read[..], &[0x2a], &[], &[0x5f, 5], &[0x16]] {
        assert_eq!(footprint(nothing), Footprint::None);
    }
}

#[test]
fn prefetch_checks_its_range() {
    let mut rig = Rig::new();
    rig.send(&[0x34, 0x02, 0, 0, 0, 0, 0x03, 0, 128, 0]).good();
    rig.send(&[0x90, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        .good();
    let outcome = rig.run(A, &[0x34, 0, 0, 0, 0, 1, 0, 0, 128, 0], &[], 0);
    assert_eq!(outcome.check(), OUT_OF_RANGE);
}

#[test]
fn defect_lists_are_empty() {
    let mut rig = Rig::new();
    let ten = rig.send(&[0x37, 0, 0x1d, 0, 0, 0, 0, 0, 32, 0]).good();
    assert_eq!(ten.data, [0, 0x1d, 0, 0]);
    let twelve = rig
        .send(&[0xb7, 0x08, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0])
        .good();
    assert_eq!(twelve.data, [0, 0x08, 0, 0, 0, 0, 0, 0]);
    let outcome = rig.send(&[0xb7, 0, 0, 0, 0, 1, 0, 0, 0, 32, 0, 0]);
    assert_eq!(outcome.check(), INVALID_FIELD);
}
