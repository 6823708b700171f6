//! Tests for commands that access the medium.

use super::{A, Rig, config};
use crate::config::{BlockSize, Provisioning};
use crate::flags::CommandFlags;
use crate::opcode::Opcode;
use crate::step::{BackendError, BlockOp, Residual, TransferError};

const OUT_OF_RANGE: (u8, u8, u8) = (5, 0x21, 0);
const INVALID_FIELD: (u8, u8, u8) = (5, 0x24, 0);

#[test]
fn reads_with_all_cdb_lengths() {
    let mut rig = Rig::new();
    let expected = rig.disk[512 * 5..512 * 7].to_vec();
    let cdbs: [&[u8]; 4] = [
        &[0x08, 0, 0, 5, 2, 0],
        &[0x28, 0, 0, 0, 0, 5, 0, 0, 2, 0],
        &[0xa8, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
        &[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
    ];
    for cdb in cdbs {
        let outcome = rig.run(A, cdb, &[], 1024).good();
        assert_eq!(outcome.data, expected);
        assert_eq!(outcome.response.residual_in, Residual::None);
        let op = BlockOp::Read {
            offset: 2560,
            len: 1024,
            buffer_offset: 0,
            tags: None,
            fua: false,
        };
        assert_eq!(outcome.ops, [op]);
    }
}

#[test]
fn writes_with_all_cdb_lengths() {
    let cdbs: [&[u8]; 4] = [
        &[0x0a, 0, 0, 5, 2, 0],
        &[0x2a, 0, 0, 0, 0, 5, 0, 0, 2, 0],
        &[0xaa, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
        &[0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
    ];
    for cdb in cdbs {
        let mut rig = Rig::new();
        let before = rig.disk.clone();
        let outcome = rig.send_out(cdb, &[0x5a; 1024]).good();
        assert_eq!(outcome.response.residual_out, Residual::None);
        assert_eq!(rig.disk[2560..3584], [0x5a; 1024]);
        assert_eq!(rig.disk[..2560], before[..2560]);
        assert_eq!(rig.disk[3584..], before[3584..]);
    }
}

#[test]
fn six_byte_length_zero_is_256_blocks() {
    let mut rig = Rig::with(config(BlockSize::B512, 300));
    let mut limits = config(BlockSize::B512, 300);
    limits.limits.max_transfer = 256 * 512;
    let outcome = rig.send(&[0x08, 0, 0, 0, 0, 0]);
    assert_eq!(outcome.check(), INVALID_FIELD, "more than 64 KiB");
    assert_eq!(outcome.cdb_pointer(), (4, None));
    let mut rig = Rig::with(limits);
    assert_eq!(
        rig.send(&[0x08, 0, 0, 0, 0, 0]).good().data.len(),
        256 * 512
    );
}

#[test]
fn fua_respects_write_cache() {
    let fua_of = |rig: &mut Rig, cdb: &[u8]| match rig.send_out(cdb, &[1; 512]).good().ops[..] {
        [BlockOp::Write { fua, .. }] => fua,
        ref ops => panic!("{ops:?}"),
    };
    let mut rig = Rig::new();
    assert!(!fua_of(&mut rig, &[0x2a, 0x00, 0, 0, 0, 0, 0, 0, 1, 0]));
    assert!(
        !fua_of(&mut rig, &[0x2a, 0x10, 0, 0, 0, 0, 0, 0, 1, 0]),
        "DPO"
    );
    assert!(
        fua_of(&mut rig, &[0x2a, 0x08, 0, 0, 0, 0, 0, 0, 1, 0]),
        "FUA"
    );
    assert!(
        fua_of(&mut rig, &[0x2a, 0x1a, 0, 0, 0, 0, 0, 0, 1, 0]),
        "DPO, FUA, FUA_NV"
    );
    // For a 6-byte CDB, bit 3 in byte 1 is used for the LBA.
    let cdb = [0x08, 0x08, 0, 0, 1, 0];
    assert_eq!(rig.send(&cdb).check(), OUT_OF_RANGE);
    let mut through = config(BlockSize::B512, 8);
    through.write_cache = false;
    assert!(fua_of(
        &mut Rig::with(through),
        &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    ));
}

#[test]
fn protection_fields_are_refused() {
    let mut rig = Rig::new();
    for protect in 1..8_u8 {
        for opcode in [0x28, 0x2a, 0x2e, 0x2f, 0x41] {
            let cdb = [opcode, protect << 5, 0, 0, 0, 0, 0, 0, 1, 0];
            let outcome = rig.send_out(&cdb, &[0; 512]);
            assert_eq!(outcome.check(), INVALID_FIELD);
            assert_eq!(outcome.cdb_pointer().0, 1);
        }
    }
    // GROUP NUMBER, then NACA in the CONTROL byte.
    let group = [0x28, 0, 0, 0, 0, 0, 0x01, 0, 1, 0];
    assert_eq!(rig.send(&group).cdb_pointer(), (6, Some(0)));
    let naca = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0x04];
    assert_eq!(rig.send(&naca).cdb_pointer(), (9, Some(2)));
}

#[test]
fn ranges_must_end_within_capacity() {
    let mut rig = Rig::new();
    let send = |rig: &mut Rig, lba: u32, blocks: u8| {
        let [a, b, c, d] = lba.to_be_bytes();
        rig.send(&[0x28, 0, a, b, c, d, 0, 0, blocks, 0])
    };
    send(&mut rig, 127, 1).good();
    send(&mut rig, 0, 128).good();
    send(&mut rig, 0, 0).good();
    send(&mut rig, 128, 0).good();
    for (lba, blocks) in [
        (128, 1),
        (127, 2),
        (0, 129),
        (129, 0),
        (u32::MAX, 0),
        (u32::MAX, 1),
    ] {
        assert_eq!(
            send(&mut rig, lba, blocks).check(),
            OUT_OF_RANGE,
            "{lba} {blocks}"
        );
    }
    // The sum of LBA and length is more than 64 bits.
    let wraps = [
        0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 2, 0, 0,
    ];
    assert_eq!(rig.send(&wraps).check(), OUT_OF_RANGE);
    // This is within the capacity, but larger than the transfer limit.
    let mut rig = Rig::with(config(BlockSize::B512, 1024));
    let outcome = rig.send(&[0x28, 0, 0, 0, 0, 0, 0, 0, 129, 0]);
    assert_eq!(outcome.check(), INVALID_FIELD);
    assert_eq!(outcome.cdb_pointer(), (7, None));
}

#[test]
fn residuals_of_reads() {
    let mut rig = Rig::new();
    let one = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let two = [0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let cases: [(&[u8], u32, Residual); 5] = [
        (&one, 0, Residual::Overflow(512)),
        (&one, 200, Residual::Overflow(312)),
        (&one, 512, Residual::None),
        (&one, 10_000, Residual::Underflow(9488)),
        (&two, 512, Residual::Overflow(512)),
    ];
    for (cdb, expected, residual) in cases {
        let outcome = rig.run(A, cdb, &[], expected).good();
        assert_eq!(outcome.response.residual_in, residual);
        assert_eq!(outcome.data, rig.disk[..outcome.data.len()]);
        assert_eq!(outcome.response.residual_out, Residual::None);
    }
    // Data-Out that is not needed for a READ.
    let outcome = rig.run(A, &one, &[0; 512], 0).good();
    assert_eq!(outcome.response.residual_in, Residual::Overflow(512));
    assert_eq!(outcome.response.residual_out, Residual::Underflow(512));
}

#[test]
fn residuals_of_writes() {
    for verify in [0x2a, 0x2e] {
        let mut rig = Rig::new();
        let one = [verify, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let two = [verify, 0, 0, 0, 0, 0, 0, 0, 2, 0];
        let before = rig.disk.clone();
        let outcome = rig.send_out(&one, &[]).good();
        assert_eq!(outcome.response.residual_out, Residual::Overflow(512));
        // An incomplete block is refused, and nothing should be written.
        let outcome = rig.send_out(&one, &[9; 200]);
        assert_eq!(outcome.check(), (5, 0x0e, 0x03));
        assert_eq!(outcome.response.residual_out, Residual::Overflow(312));
        assert_eq!(rig.disk, before);
        // If there are only complete blocks, these should be written.
        let outcome = rig.send_out(&two, &[9; 512]).good();
        assert_eq!(outcome.response.residual_out, Residual::Overflow(512));
        assert_eq!(rig.disk[..512], [9; 512]);
        assert_eq!(rig.disk[512..], before[512..]);
        let outcome = rig.send_out(&one, &[7; 10_000]).good();
        assert_eq!(outcome.response.residual_out, Residual::Underflow(9488));
        assert_eq!(rig.disk[..512], [7; 512]);
        assert_eq!(rig.disk[512..], before[512..]);
    }
}

#[test]
fn verify_compares_with_data_out() {
    let mut rig = Rig::new();
    // VERIFY (10), BYTCHK 01b, 40 blocks at LBA 3, which is more than two segments.
    let cdb = [0x2f, 0x02, 0, 0, 0, 3, 0, 0, 40, 0];
    let mut data = rig.disk[3 * 512..43 * 512].to_vec();
    let outcome = rig.send_out(&cdb, &data).good();
    assert_eq!(outcome.ops.len(), 3);
    for at in [0, 511, 8192, 20_479] {
        data[at] ^= 0x40;
        let outcome = rig.send_out(&cdb, &data);
        assert_eq!(outcome.check(), (0xe, 0x1d, 0));
        assert_eq!(outcome.sense().information, Some(at as u64));
        data[at] ^= 0x40;
    }
}

#[test]
fn verify_without_data_only_reads() {
    let mut rig = Rig::new();
    let cdb = [0x8f, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128, 0, 0];
    let outcome = rig.send(&cdb).good();
    assert_eq!(outcome.ops.len(), 8, "64 KiB in segments of 8 KiB");
    let through = |op: &BlockOp| matches!(op, BlockOp::Read { fua: true, .. });
    assert!(through(&outcome.ops[0]) && !outcome.ops[1..].iter().any(through));
    rig.fail = Some(BackendError::Medium {
        offset: Some(512 * 9 + 3),
    });
    let outcome = rig.send(&cdb);
    assert_eq!(outcome.check(), (3, 0x11, 0));
    assert_eq!(outcome.sense().information, Some(9));
    // BYTCHK 10b is reserved.
    assert_eq!(
        rig.send(&[0x2f, 4, 0, 0, 0, 0, 0, 0, 1, 0]).cdb_pointer(),
        (1, Some(2))
    );
}

#[test]
fn verify_respects_maximum_transfer() {
    let mut unit = config(BlockSize::B512, 1024);
    unit.limits.max_transfer = 128 * 512;
    for byte_check in [0, 1, 3] {
        let mut rig = Rig::with(unit.clone());
        let cdb = [0x2f, byte_check << 1, 0, 0, 0, 0, 0, 0, 129, 0];
        assert_eq!(rig.send_out(&cdb, &[0; 129 * 512]).cdb_pointer(), (7, None));
    }
}

#[test]
fn verify_compares_one_block_with_many() {
    let mut rig = Rig::new();
    rig.disk[512..512 * 60].fill(0x77);
    // VERIFY (12), BYTCHK 11b, 59 blocks at LBA 1.
    let cdb = [0xaf, 0x06, 0, 0, 0, 1, 0, 0, 0, 59, 0, 0];
    let outcome = rig.send_out(&cdb, &[0x77; 512]).good();
    assert_eq!(outcome.response.residual_out, Residual::None);
    rig.disk[512 * 50 + 7] = 0;
    let outcome = rig.send_out(&cdb, &[0x77; 512]);
    assert_eq!(outcome.check(), (0xe, 0x1d, 0));
    assert_eq!(outcome.sense().information, Some(49 * 512 + 7));
    // We can't compare with an incomplete block.
    assert_eq!(rig.send_out(&cdb, &[0x77; 100]).check(), (5, 0x0e, 3));
}

#[test]
fn write_and_verify_reads_back_data() {
    let mut rig = Rig::new();
    let cdb = [0x2e, 0x02, 0, 0, 0, 0, 0, 0, 20, 0];
    let outcome = rig.send_out(&cdb, &[3; 20 * 512]).good();
    assert!(matches!(outcome.ops[0], BlockOp::Write { fua: true, .. }));
    assert!(matches!(
        outcome.ops[1],
        BlockOp::Read {
            fua: true,
            len: 8192,
            ..
        }
    ));
    assert_eq!(outcome.ops.len(), 3);
    assert_eq!(rig.disk[..20 * 512], [3; 20 * 512]);
    assert_eq!(
        rig.send_out(&[0x2e, 6, 0, 0, 0, 0, 0, 0, 1, 0], &[3; 512])
            .check(),
        INVALID_FIELD
    );
}

#[test]
fn synchronize_cache_flushes_range() {
    let mut rig = Rig::new();
    let whole = rig.send(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good().ops;
    assert_eq!(
        whole,
        [BlockOp::Flush {
            offset: 0,
            len: 128 * 512
        }]
    );
    let cdb = [0x91, 0x02, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 5, 0, 0];
    let part = rig.send(&cdb).good().ops;
    assert_eq!(
        part,
        [BlockOp::Flush {
            offset: 51_200,
            len: 2560
        }]
    );
    let rest = rig.send(&[0x35, 0, 0, 0, 0, 100, 0, 0, 0, 0]).good().ops;
    assert_eq!(
        rest,
        [BlockOp::Flush {
            offset: 51_200,
            len: 28 * 512
        }]
    );
    assert_eq!(
        rig.send(&[0x35, 0, 0, 0, 0, 100, 0, 0, 29, 0]).check(),
        OUT_OF_RANGE
    );
}

/// Creates UNMAP parameter data with the given descriptors.
fn unmap_list(descriptors: &[(u64, u32)]) -> Vec<u8> {
    let len = 16 * descriptors.len() as u16;
    let mut list = vec![];
    list.extend((len + 6).to_be_bytes());
    list.extend(len.to_be_bytes());
    list.extend([0; 4]);
    for (lba, blocks) in descriptors {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

fn unmap(rig: &mut Rig, descriptors: &[(u64, u32)]) -> super::Outcome {
    let list = unmap_list(descriptors);
    let cdb = [0x42, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
    rig.send_out(&cdb, &list)
}

#[test]
fn unmap_discards_each_descriptor() {
    let mut rig = Rig::new();
    let ops = unmap(&mut rig, &[(1, 2), (5, 0), (10, 1)]).good().ops;
    let discard = |lba: u64, blocks: u64| BlockOp::Discard {
        offset: lba * 512,
        len: blocks * 512,
    };
    assert_eq!(ops, [discard(1, 2), discard(10, 1)]);
    assert_eq!(rig.disk[512..1536], [0; 1024]);
    unmap(&mut rig, &[]).good();
    unmap(&mut rig, &[(128, 0)]).good();
    rig.send_out(&[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]).good();
}

#[test]
fn unmap_checks_everything_first() {
    let mut rig = Rig::new();
    let before = rig.disk.clone();
    assert_eq!(unmap(&mut rig, &[(0, 1), (128, 1)]).check(), OUT_OF_RANGE);
    assert_eq!(
        unmap(&mut rig, &[(0, 1), (u64::MAX, 2)]).check(),
        OUT_OF_RANGE
    );
    assert_eq!(
        unmap(&mut rig, &[(0, 1); 5]).check(),
        (5, 0x26, 0),
        "too many descriptors"
    );
    assert_eq!(
        unmap(&mut rig, &[(0, 60), (60, 60)]).check(),
        (5, 0x26, 0),
        "too many blocks"
    );
    let cdb = [0x42, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    assert_eq!(rig.send_out(&cdb, &[0; 4]).check(), (5, 0x1a, 0));
    // ANCHOR is not supported.
    assert_eq!(
        rig.send(&[0x42, 1, 0, 0, 0, 0, 0, 0, 0, 0]).cdb_pointer(),
        (1, Some(0))
    );
    assert_eq!(rig.disk, before);
}

#[test]
fn write_same_repeats_block() {
    let mut rig = Rig::new();
    let before = rig.disk.clone();
    // WRITE SAME (10), 40 blocks at LBA 2.
    let cdb = [0x41, 0, 0, 0, 0, 2, 0, 0, 40, 0];
    let pattern: Vec<u8> = (0..512).map(|at| (at % 255) as u8).collect();
    let outcome = rig.send_out(&cdb, &pattern).good();
    assert_eq!(outcome.ops.len(), 3);
    for block in rig.disk[1024..21_504].chunks(512) {
        assert_eq!(block, pattern);
    }
    assert_eq!(rig.disk[21_504..], before[21_504..]);
    // The backend should write a block of zeros. If UNMAP is set, it can also deallocate.
    let ops = rig.send_out(&cdb, &[0; 512]).good().ops;
    let zero = |unmap| BlockOp::WriteZeroes {
        offset: 1024,
        len: 20_480,
        unmap,
        fua: false,
    };
    assert_eq!(ops, [zero(false)]);
    let ops = rig
        .send_out(&[0x41, 8, 0, 0, 0, 2, 0, 0, 40, 0], &[0; 512])
        .good()
        .ops;
    assert_eq!(ops, [zero(true)]);
    // NDOB: write zeros without receiving a block.
    let cdb = [0x93, 0x09, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 40, 0, 0];
    assert_eq!(rig.send_out(&cdb, &[]).good().ops, [zero(true)]);
}

#[test]
fn write_same_refusals() {
    let mut rig = Rig::new();
    let mut send = |cdb: &[u8], len: usize| rig.send_out(cdb, &vec![1; len]).check();
    assert_eq!(
        send(&[0x41, 0, 0, 0, 0, 0, 0, 0, 0, 0], 512),
        INVALID_FIELD,
        "WSNZ"
    );
    assert_eq!(
        send(&[0x41, 0, 0, 0, 0, 0, 0, 0, 65, 0], 512),
        INVALID_FIELD,
        "the limit"
    );
    assert_eq!(
        send(&[0x41, 0, 0, 0, 0, 129, 0, 0, 0, 0], 512),
        OUT_OF_RANGE
    );
    assert_eq!(
        send(&[0x41, 0, 0, 0, 0, 127, 0, 0, 2, 0], 512),
        OUT_OF_RANGE
    );
    assert_eq!(
        send(&[0x41, 0x10, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        INVALID_FIELD,
        "ANCHOR"
    );
    assert_eq!(send(&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], 256), (5, 0x0e, 3));
    assert_eq!(send(&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], 1024), (5, 0x0e, 3));
    let mut thick = config(BlockSize::B512, 8);
    thick.provisioning = Provisioning::Thick;
    let mut rig = Rig::with(thick);
    let outcome = rig.send_out(&[0x41, 8, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512]);
    assert_eq!(outcome.cdb_pointer(), (1, Some(3)));
    rig.send_out(&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512])
        .good();
    assert_eq!(unmap(&mut rig, &[(0, 1)]).check(), (5, 0x20, 0));
    let status = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0];
    assert_eq!(rig.send(&status).cdb_pointer(), (1, Some(4)));
}

#[test]
fn lba_status_reports_extents() {
    let mut rig = Rig::new();
    unmap(&mut rig, &[(4, 2)]).good();
    // GET LBA STATUS at LBA 1, with space for three descriptors.
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 56, 0, 0];
    let data = rig.send(&cdb).good().data;
    let mut expected = vec![0, 0, 0, 52, 0, 0, 0, 0];
    expected.extend([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0]);
    expected.extend([0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 2, 1, 0, 0, 0]);
    expected.extend([0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 122, 0, 0, 0, 0]);
    assert_eq!(data, expected);
    // With space for a single descriptor.
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 24, 0, 0];
    let data = rig.send(&cdb).good().data;
    assert_eq!(data[8..], [0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 1, 0, 0, 0]);
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 128, 0, 0, 0, 24, 0, 0];
    assert_eq!(rig.send(&cdb).check(), OUT_OF_RANGE);
}

#[test]
fn backend_errors_become_sense() {
    let read = [0x28, 0, 0, 0, 0, 4, 0, 0, 2, 0];
    let write = [0x2a, 0, 0, 0, 0, 4, 0, 0, 2, 0];
    let transfer = BackendError::Transfer;
    let cases = [
        (
            BackendError::Medium { offset: None },
            (3, 0x11, 0),
            (3, 0x0c, 0),
        ),
        (BackendError::NoSpace, (7, 0x27, 7), (7, 0x27, 7)),
        (BackendError::ReadOnly, (7, 0x27, 0), (7, 0x27, 0)),
        (BackendError::NotReady, (2, 0x04, 0), (2, 0x04, 0)),
        (BackendError::Aborted, (0xb, 0, 0), (0xb, 0, 0)),
        (
            transfer(TransferError::Failed),
            (0xb, 0x4b, 0),
            (0xb, 0x4b, 0),
        ),
        (transfer(TransferError::Crc), (0xb, 0x47, 5), (0xb, 0x47, 5)),
        (
            transfer(TransferError::Unsolicited),
            (0xb, 0x0c, 0x0c),
            (0xb, 0x0c, 0x0c),
        ),
        (
            transfer(TransferError::Amount),
            (0xb, 0x0c, 0x0d),
            (0xb, 0x0c, 0x0d),
        ),
        (
            transfer(TransferError::SnackRejected),
            (0xb, 0x11, 0x13),
            (0xb, 0x11, 0x13),
        ),
        (BackendError::Internal, (4, 0x44, 0), (4, 0x44, 0)),
    ];
    let mut rig = Rig::new();
    for (error, on_read, on_write) in cases {
        rig.fail = Some(error);
        let outcome = rig.run(A, &read, &[], 1024);
        assert_eq!(outcome.check(), on_read);
        assert_eq!(outcome.response.residual_in, Residual::Underflow(1024));
        if matches!(error, BackendError::Medium { .. }) {
            assert_eq!(outcome.sense().information, Some(4));
        }
        rig.fail = Some(error);
        let outcome = rig.send_out(&write, &[0; 1024]);
        assert_eq!(outcome.check(), on_write);
        assert_eq!(
            outcome.response.residual_out,
            Residual::None,
            "data was received"
        );
    }
}

#[test]
fn read_only_unit_refuses_writes() {
    let mut config = config(BlockSize::B512, 8);
    config.read_only = true;
    let mut rig = Rig::with(config);
    for entry in Opcode::all() {
        if !entry.flags.contains(CommandFlags::WRITES) || !entry.is_supported(&rig.lu) {
            continue;
        }
        let mut cdb = vec![0; entry.usage().len()];
        cdb[0] = entry.code;
        let outcome = rig.send_out(&cdb, &[0; 512]);
        assert_eq!(outcome.check(), (7, 0x27, 0), "{}", entry.name);
    }
    rig.send(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
}

#[test]
fn read_only_lun_refuses_changes() {
    let mut rig = Rig::with(config(BlockSize::B512, 8));
    rig.read_only = true;
    for entry in Opcode::all() {
        let changes = CommandFlags::WRITES | CommandFlags::SETTINGS;
        if !entry.flags.intersects(changes) || !entry.is_supported(&rig.lu) {
            continue;
        }
        let mut cdb = vec![0; entry.usage().len()];
        cdb[0] = entry.code;
        let outcome = rig.send_out(&cdb, &[0; 512]);
        assert_eq!(outcome.check(), (7, 0x27, 0), "{}", entry.name);
    }
    rig.send(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
    let header = rig.send(&[0x1a, 8, 0x08, 0, 4, 0]).good().data;
    assert_eq!(header[2] & 0x80, 0x80, "WP");
    // Writes to the same LU should work if a different LUN is used.
    rig.read_only = false;
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    rig.send_out(&write, &[0; 512]).good();
    let header = rig.send(&[0x1a, 8, 0x08, 0, 4, 0]).good().data;
    assert_eq!(header[2] & 0x80, 0);
}

#[test]
fn six_byte_commands_have_no_fua() {
    use crate::device_server::Request;
    use crate::step::{Expected, Step, StepResult, TaskAttribute};
    let mut big = config(BlockSize::B512, 8);
    big.blocks = 1 << 21;
    let lu = crate::lu::LogicalUnit::new(big).unwrap();
    let expected = Expected {
        data_out: 512,
        data_in: 512,
    };
    // READ (6) and WRITE (6) at LBA 080001h. The FUA bit of other CDBs is part of this address.
    for opcode in [0x08, 0x0a] {
        let cdb = [opcode, 0x08, 0x00, 0x01, 1, 0];
        let (mut command, mut step) = lu.start(&Request {
            nexus: A,
            cdb: &cdb,
            opcode: Opcode::of(&cdb),
            expected,
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        });
        if matches!(step, Step::ReceiveData { .. }) {
            step = command.advance(&lu, StepResult::Done, &mut vec![0; 512]);
        }
        match step {
            Step::Block(BlockOp::Read { offset, fua, .. } | BlockOp::Write { offset, fua, .. }) => {
                assert_eq!((offset, fua), (0x08_0001 * 512, false));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn unmap_at_its_limits() {
    let mut rig = Rig::new();
    unmap(&mut rig, &[(0, 25); 4]).good();
    // The length field of the list includes a second descriptor, which is missing.
    let mut list = unmap_list(&[(3, 1)]);
    list[3] = 32;
    let outcome = rig
        .send_out(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list)
        .good();
    assert_eq!(outcome.ops.len(), 1);
}

#[test]
fn lba_status_is_rounded_to_blocks() {
    use crate::device_server::Request;
    use crate::step::{Allocation, DataIn, Expected, Step, StepResult, TaskAttribute};
    let rig = Rig::new();
    let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 24, 0, 0];
    let status_of = |allocation, len| {
        let (mut command, step) = rig.lu.start(&Request {
            nexus: A,
            cdb: &cdb,
            opcode: Opcode::of(&cdb),
            expected: Expected {
                data_out: 0,
                data_in: 24,
            },
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        });
        let operation = BlockOp::Status {
            offset: 51_200,
            len: 28 * 512,
        };
        assert_eq!(step, Step::Block(operation));
        let result = StepResult::Status { allocation, len };
        match command.advance(&rig.lu, result, &mut crate::access::NoData) {
            Step::Respond(response) => match response.data_in {
                DataIn::Inline(data) => (data[19], data[20]),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(status_of(Allocation::Mapped, 513), (2, 0));
    assert_eq!(status_of(Allocation::Deallocated, 1535), (2, 1));
    assert_eq!(
        status_of(Allocation::Deallocated, 100),
        (1, 0),
        "partially mapped"
    );
    assert_eq!(status_of(Allocation::Deallocated, u64::MAX), (28, 1));
    assert_eq!(status_of(Allocation::Mapped, u64::MAX), (28, 0));
}
