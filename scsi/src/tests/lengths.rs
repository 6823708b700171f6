//! Tests for Data-Out buffers that don't match the CDB (SAM-5 5.4.3, SPC-4 4.2.5.6, RFC 7143
//! 11.4.5).
//!
//! A command is refused if it cannot be executed with less data. If there is too much data, the
//! remaining bytes are ignored and reported as a residual, unless the length shows that the
//! initiator wanted to do something else.

use super::{Outcome, Rig};
use crate::step::Residual;

/// INVALID FIELD IN COMMAND INFORMATION UNIT.
const REFUSED: (u8, u8, u8) = (5, 0x0e, 0x03);

/// Send zeros, which is a valid list without any requests.
fn send(cdb: &[u8], len: usize) -> Outcome {
    let mut rig = Rig::new();
    // Set the same data on the medium, so that a compare is successful.
    rig.disk.fill(0);
    rig.send_out(cdb, &vec![0; len])
}

const fn cdb16(opcode: u8, flags: u8, blocks: u8) -> [u8; 16] {
    [opcode, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, blocks, 0, 0]
}

/// Lists and single blocks, which cannot be processed partially.
const WHOLE: [(&str, &[u8], u32); 6] = [
    ("MODE SELECT (6)", &[0x15, 0x10, 0, 0, 4, 0], 4),
    ("MODE SELECT (10)", &[0x55, 0x10, 0, 0, 0, 0, 0, 0, 8, 0], 8),
    ("UNMAP", &[0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0], 8),
    (
        "PERSISTENT RESERVE OUT",
        &[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0],
        24,
    ),
    ("WRITE SAME (16)", &cdb16(0x93, 0, 4), 512),
    ("COMPARE AND WRITE", &cdb16(0x89, 0, 1), 1024),
];

#[test]
fn truncated_lists_are_refused() {
    for (name, cdb, len) in WHOLE {
        let exact = send(cdb, len as usize).good();
        assert_eq!(exact.response.residual_out, Residual::None, "{name}");
        for short in [0, len / 2, len - 1] {
            let refused = send(cdb, short as usize);
            assert_eq!(refused.check(), REFUSED, "{name} with {short} bytes");
            assert!(refused.ops.is_empty(), "{name}");
            let residual = Residual::Overflow(len - short);
            assert_eq!(refused.response.residual_out, residual, "{name}");
        }
    }
}

#[test]
fn data_after_list_is_residual() {
    for (name, cdb, len) in WHOLE {
        let long = send(cdb, len as usize + 512);
        let residual = Residual::Underflow(512);
        assert_eq!(long.response.residual_out, residual, "{name}");
        if matches!(name, "WRITE SAME (16)" | "COMPARE AND WRITE") {
            // The initiator has sent data for different blocks than specified in the CDB.
            assert_eq!(long.check(), REFUSED, "{name}");
            assert!(long.ops.is_empty(), "{name}");
        } else {
            long.good();
        }
    }
}

/// Required by FCP-4 9.4.2.9, and by the Residuals tests in libiscsi.
#[test]
fn whole_blocks_are_processed_partial_refused() {
    let commands: [(&str, [u8; 16]); 4] = [
        ("WRITE (16)", cdb16(0x8a, 0, 4)),
        ("ORWRITE (16)", cdb16(0x8b, 0, 4)),
        ("WRITE AND VERIFY (16)", cdb16(0x8e, 2, 4)),
        ("VERIFY (16)", cdb16(0x8f, 2, 4)),
    ];
    for (name, cdb) in commands {
        for (len, residual) in [
            (0, Residual::Overflow(2048)),
            (1024, Residual::Overflow(1024)),
            (2048, Residual::None),
            (3000, Residual::Underflow(952)),
        ] {
            let outcome = send(&cdb, len).good();
            assert_eq!(outcome.response.residual_out, residual, "{name} with {len}");
        }
        let refused = send(&cdb, 1000);
        assert_eq!(refused.check(), REFUSED, "{name}");
        assert!(refused.ops.is_empty(), "{name}");
    }
}

#[test]
fn unneeded_data_is_ignored() {
    // WRITE SAME with NDOB, VERIFY without BYTCHK, UNMAP and MODE SELECT without any list.
    let commands: [&[u8]; 4] = [
        &cdb16(0x93, 1, 4),
        &cdb16(0x8f, 0, 4),
        &[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x15, 0x10, 0, 0, 0, 0],
    ];
    for cdb in commands {
        let outcome = send(cdb, 512).good();
        let residual = Residual::Underflow(512);
        assert_eq!(outcome.response.residual_out, residual, "{:#x}", cdb[0]);
    }
}

/// In SBC-4, BYTCHK 11b is a single block for VERIFY, but reserved for WRITE AND VERIFY.
#[test]
fn single_block_compare_requires_verify() {
    send(&cdb16(0x8f, 6, 4), 512).good();
    let refused = send(&cdb16(0x8e, 6, 4), 512);
    assert_eq!(refused.cdb_pointer(), (1, Some(2)));
}
