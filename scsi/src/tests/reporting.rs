//! Tests for REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.

use super::{Rig, config};
use crate::config::{BlockSize, Provisioning};

/// Sends the command with these reporting options, opcode and service action.
fn report(rig: &mut Rig, options: u8, opcode: u8, action: u8) -> super::Outcome {
    rig.send(&[
        0xa3, 0x0c, options, opcode, 0, action, 0, 0, 0xff, 0xff, 0, 0,
    ])
}

#[test]
fn reported_commands_have_descriptors() {
    let mut rig = Rig::new();
    let data = report(&mut rig, 0, 0, 0).good().data;
    let listed = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(listed, data.len() - 4);
    let rows: Vec<&[u8]> = data[4..].chunks(8).collect();
    assert_eq!(rows[0], [0x00, 0, 0, 0, 0, 0, 0, 6], "TEST UNIT READY");
    assert!(rows.contains(&&[0x28, 0, 0, 0, 0, 0, 0, 10][..]));
    assert!(
        rows.contains(&&[0x9e, 0, 0, 0x10, 0, 1, 0, 16][..]),
        "SERVACTV"
    );
    assert!(rows.contains(&&[0xa3, 0, 0, 0x0c, 0, 1, 0, 12][..]));
    // With timeouts: CTDP is set and there are 12 more bytes for each command.
    let timed = report(&mut rig, 0x80, 0, 0).good().data;
    assert_eq!(timed.len() - 4, rows.len() * 20);
    for row in timed[4..].chunks(20) {
        assert_eq!(row[5] & 2, 2);
        assert_eq!(row[8..10], [0, 0x0a]);
    }
}

#[test]
fn reported_commands_can_be_queried() {
    let mut rig = Rig::new();
    let data = report(&mut rig, 0, 0, 0).good().data;
    for row in data[4..].chunks(8) {
        let (opcode, action, has_actions) = (row[0], row[3], row[5] & 1 == 1);
        let (right, wrong) = if has_actions { (2, 1) } else { (1, 2) };
        assert_eq!(
            report(&mut rig, wrong, opcode, action).check(),
            (5, 0x24, 0)
        );
        for option in [right, 3] {
            let one = report(&mut rig, option, opcode, action).good().data;
            assert_eq!(one[1], 3, "supported as in the standard");
            let len = usize::from(u16::from_be_bytes([one[2], one[3]]));
            assert_eq!(one.len(), 4 + len);
            assert_eq!(len, usize::from(row[7]));
            assert_eq!(one[4], opcode);
            if has_actions {
                assert_eq!(one[5] & 0x1f, action);
            }
        }
    }
}

#[test]
fn single_command_reports_bitmap_and_timeout() {
    let mut rig = Rig::new();
    let read = report(&mut rig, 0x81, 0x28, 0).good().data;
    assert_eq!(read[..4], [0, 0x83, 0, 10]);
    assert_eq!(
        read[4..14],
        [0x28, 0x1a, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]
    );
    assert_eq!(read[14..16], [0, 0x0a]);
    assert_eq!(read.len(), 26);
    assert_eq!(report(&mut rig, 1, 0xee, 0).good().data, [0, 1, 0, 0]);
    assert_eq!(report(&mut rig, 2, 0x9e, 0x11).good().data, [0, 1, 0, 0]);
    assert_eq!(report(&mut rig, 3, 0x28, 1).good().data, [0, 1, 0, 0]);
    assert_eq!(report(&mut rig, 4, 0x28, 0).cdb_pointer(), (2, Some(2)));
}

#[test]
fn thick_units_do_not_report_unmap() {
    let mut thick = config(BlockSize::B512, 8);
    thick.provisioning = Provisioning::Thick;
    let mut rig = Rig::with(thick);
    let data = report(&mut rig, 0, 0, 0).good().data;
    assert!(data[4..].chunks(8).all(|row| row[0] != 0x42));
    // UNMAP is unknown to this unit, so we should accept any option.
    for option in 1..4 {
        assert_eq!(report(&mut rig, option, 0x42, 0).good().data, [0, 1, 0, 0]);
    }
}

/// CVE-2020-28374, CVE-2021-3139: an LU must not copy data for an initiator that cannot read this
/// data. We don't support third-party copy at all, and don't report it anywhere.
#[test]
fn cve_2020_28374_and_2021_3139_copy_is_unsupported() {
    let mut rig = Rig::new();
    let inquiry = rig.send(&[0x12, 0, 0, 0, 96, 0]).good().data;
    assert_eq!(inquiry[5] & 0x08, 0, "3PC");
    // Third-party Copy.
    assert_eq!(rig.send(&[0x12, 1, 0x8f, 0, 0xff, 0]).check(), (5, 0x24, 0));
    let listed = report(&mut rig, 0, 0, 0).good().data;
    for row in listed[4..].chunks(8) {
        assert!(
            !matches!(row[0], 0x18 | 0x39 | 0x3a | 0x83 | 0x84),
            "{row:x?}"
        );
    }
    for opcode in [0x18, 0x39, 0x3a, 0x83, 0x84] {
        for action in 0..0x20 {
            let mut cdb = [0; 16];
            (cdb[0], cdb[1], cdb[13]) = (opcode, action, 255);
            let outcome = rig.run(super::A, &cdb, &[0xff; 255], 0);
            assert!(outcome.ops.is_empty(), "{opcode:#x}");
            assert_eq!(outcome.check(), (5, 0x20, 0), "{opcode:#x}/{action:#x}");
        }
    }
}

#[test]
fn task_management_functions() {
    let mut rig = Rig::new();
    let short = rig
        .send(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0])
        .good()
        .data;
    // ATS, ATSS, CTSS, LURS, QTS; QTSS, ITNRS.
    assert_eq!(short, [0xdc, 0x03, 0, 0]);
    let long = rig
        .send(&[0xa3, 0x0d, 0x80, 0, 0, 0, 0, 0, 0, 64, 0, 0])
        .good()
        .data;
    assert_eq!(long[..4], [0xdc, 0x03, 0, 0x0c]);
    assert_eq!(long.len(), 16);
}
