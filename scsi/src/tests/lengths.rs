//! Data-Out buffers that do not fit what the CDB says (SAM-5 5.4.3, SPC-4 4.2.5.6, RFC 7143
//! 11.4.5).
//!
//! What cannot be done with fewer data is refused. More than a command wants stays where it is, and
//! the residual says so; unless the length itself says that the initiator means something else.

use super::{Outcome, Rig};
use crate::step::Residual;

/// INVALID FIELD IN COMMAND INFORMATION UNIT.
const REFUSED: (u8, u8, u8) = (5, 0x0e, 0x03);

/// Zeroes: in a list, they ask for nothing.
fn send(cdb: &[u8], len: usize) -> Outcome {
    let mut rig = Rig::new();
    // What is compared is there.
    rig.disk.fill(0);
    rig.send_out(cdb, &vec![0; len])
}

const fn cdb16(opcode: u8, flags: u8, blocks: u8) -> [u8; 16] {
    [opcode, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, blocks, 0, 0]
}

/// Lists and single blocks: nothing can be done with a part.
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
fn lists_that_do_not_arrive_whole_are_refused() {
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
fn data_beyond_a_list_are_left_and_counted() {
    for (name, cdb, len) in WHOLE {
        let long = send(cdb, len as usize + 512);
        let residual = Residual::Underflow(512);
        assert_eq!(long.response.residual_out, residual, "{name}");
        if matches!(name, "WRITE SAME (16)" | "COMPARE AND WRITE") {
            // The initiator means other blocks than the CDB names.
            assert_eq!(long.check(), REFUSED, "{name}");
            assert!(long.ops.is_empty(), "{name}");
        } else {
            long.good();
        }
    }
}

/// As FCP-4 9.4.2.9, and as libiscsi's Residuals tests demand.
#[test]
fn blocks_that_arrive_are_processed_and_a_part_of_one_is_refused() {
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
fn data_for_a_command_that_takes_none_are_left() {
    // WRITE SAME with NDOB, VERIFY without BYTCHK, UNMAP and MODE SELECT without a list.
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

/// SBC-4: BYTCHK 11b is reserved in WRITE AND VERIFY, and means one block in VERIFY.
#[test]
fn one_block_for_all_is_for_verify_alone() {
    send(&cdb16(0x8f, 6, 4), 512).good();
    let refused = send(&cdb16(0x8e, 6, 4), 512);
    assert_eq!(refused.cdb_pointer(), (1, Some(2)));
}
