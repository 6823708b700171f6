//! Commands sent by Linux when it attaches a disk. The CDBs are from a capture between two kernels,
//! in the same order and padded to 16 bytes as for SRP, with the Data-In buffer size used by the
//! initiator.

use super::{A, B, Rig, config};
use crate::config::{BlockSize, Limits};
use crate::step::Residual;

/// CDB, Data-In buffer size, number of bytes that we return.
type Row = (&'static [u8], u32, usize);

const ATTACH: [Row; 16] = [
    // INQUIRY, first with 36 bytes, then with the length returned in these.
    (&[0x12, 0, 0, 0, 0x24, 0], 36, 36),
    (&[0x12, 0, 0, 0, 0x60, 0], 96, 96),
    // VPD page 00h, first the header, then the entire page.
    (&[0x12, 1, 0, 0, 0x04, 0], 4, 4),
    (&[0x12, 1, 0, 0, 0x24, 0], 36, 11),
    (&[0x12, 1, 0, 0, 0xfc, 0], 252, 11),
    // REPORT LUNS, allocation length 4096.
    (&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0], 4096, 16),
    // TEST UNIT READY.
    (&[0x00, 0, 0, 0, 0, 0], 0, 0),
    // READ CAPACITY (16), allocation length 32.
    (
        &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0],
        32,
        32,
    ),
    // MODE SENSE (6) for all pages, then for the caching page, each with the header first.
    (&[0x1a, 0, 0x3f, 0, 0x04, 0], 4, 4),
    (&[0x1a, 0, 0x08, 0, 0x04, 0], 4, 4),
    (&[0x1a, 0, 0x08, 0, 0x20, 0], 32, 32),
    // REPORT SUPPORTED OPERATION CODES for INQUIRY, WRITE SAME (16), (10).
    (&[0xa3, 0x0c, 1, 0x12, 0, 0, 0, 0, 0, 0x0a, 0, 0], 10, 10),
    (&[0xa3, 0x0c, 1, 0x93, 0, 0, 0, 0, 0, 0x14, 0, 0], 20, 20),
    (&[0xa3, 0x0c, 1, 0x41, 0, 0, 0, 0, 0, 0x0e, 0, 0], 14, 14),
    // READ (10) for the partition table and the blocks after it.
    (&[0x28, 0, 0, 0, 0, 0, 0, 0, 0x08, 0], 4096, 4096),
    (&[0x28, 0, 0, 0, 0x01, 0x80, 0, 0, 0x60, 0], 0xc000, 0xc000),
];

fn padded(cdb: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    out[..cdb.len()].copy_from_slice(cdb);
    out
}

#[test]
fn linux_attach_sequence_succeeds() {
    let mut config = config(BlockSize::B512, 1024);
    config.limits = Limits::default();
    let mut rig = Rig::with(config);
    for (cdb, room, len) in ATTACH {
        let outcome = rig.run(A, &padded(cdb), &[], room).good();
        assert_eq!(outcome.data.len(), len, "{cdb:02x?}");
        let residual = Residual::between(len as u32, room);
        assert_eq!(outcome.response.residual_in, residual);
    }
    // WRITE (10) with 96 blocks.
    let write = padded(&[0x2a, 0, 0, 0, 0x01, 0x20, 0, 0, 0x60, 0]);
    rig.run(A, &write, &[1; 0xc000], 0).good();
}

#[test]
fn unsupported_linux_commands_are_refused() {
    let mut rig = Rig::new();
    // MODE SENSE (10) for I/O advice hints grouping, which is an unknown subpage.
    let hints = padded(&[0x5a, 0x08, 0x0a, 0x05, 0, 0, 0, 2, 0, 0]);
    assert_eq!(rig.run(B, &hints, &[], 512).check(), (5, 0x24, 0));
    // LOG SENSE.
    let log = padded(&[0x4d, 0, 0x40, 0, 0, 0, 0, 0, 4, 0]);
    assert_eq!(rig.run(B, &log, &[], 4).check(), (5, 0x20, 0));
}
