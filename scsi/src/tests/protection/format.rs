//! Tests for FORMAT UNIT.

use proptest::prelude::*;

use super::{INVALID_FIELD, TYPES, filled, long, protection, sixteen, ten, unit};
use crate::config::{BlockSize, Config, ProtectionFormat, ProtectionType};
use crate::opcode::Opcode;
use crate::protection::ProtectionChange;
use crate::step::{BackendError, BlockOp, Status, TaskAttribute};
use crate::task::{Blocks, Footprint};
use crate::tests::{A, B, Outcome, Rig, config};

const INVALID_LIST: (u8, u8, u8) = (5, 0x26, 0);
const CAPACITY_CHANGED: (u8, u8, u8) = (6, 0x2a, 9);
const INQUIRY_CHANGED: (u8, u8, u8) = (6, 0x3f, 3);

/// FMTPINFO and PROTECTION FIELD USAGE for types 0 to 3.
const SELECTORS: [(u8, u8); 4] = [(0b00, 0), (0b10, 0), (0b11, 0), (0b11, 1)];

/// A unit that can be formatted with any type, and is currently formatted with this one.
fn changeable(current: Option<ProtectionType>) -> Config {
    Config {
        protection_format: ProtectionFormat::Changeable(current),
        ..unit(ProtectionType::Type1)
    }
}

/// A CDB without a parameter list.
fn format(information: u8) -> [u8; 6] {
    [0x04, information << 6, 0, 0, 0, 0]
}

/// A CDB with a parameter list that has a short header.
fn format_data(information: u8) -> [u8; 6] {
    [0x04, information << 6 | 0x10, 0, 0, 0, 0]
}

/// A CDB with a parameter list that has a long header.
fn format_long(information: u8) -> [u8; 6] {
    [0x04, information << 6 | 0x30, 0, 0, 0, 0]
}

/// Returns the protection type in READ CAPACITY (16), from 0 to 3.
fn reported_type(rig: &mut Rig) -> u8 {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x10, 32);
    let byte = rig.send(&cdb).good().data[12];
    match byte & 1 {
        0 => 0,
        _ => (byte >> 1 & 7) + 1,
    }
}

/// Returns SPT in the Extended INQUIRY page, and the three bits for supported checks.
fn reported_checks(rig: &mut Rig) -> (u8, u8) {
    let byte = rig.send(&[0x12, 1, 0x86, 0, 64, 0]).good().data[4];
    (byte >> 3 & 7, byte & 7)
}

#[track_caller]
fn parameter_pointer(outcome: &Outcome) -> (u16, Option<u8>) {
    assert_eq!(outcome.check(), INVALID_LIST);
    let field = outcome.sense().field.expect("field pointer");
    assert!(!field.in_cdb);
    (field.byte, field.bit)
}

#[track_caller]
fn assert_erased(rig: &Rig) {
    assert!(rig.disk.iter().all(|byte| *byte == 0));
    assert!(rig.tags.iter().all(|tuple| *tuple == [0xff; 8]));
}

#[test]
fn format_selects_type_and_erases_blocks() {
    for (number, (information, usage)) in (0..).zip(SELECTORS) {
        for before in [
            None,
            Some(ProtectionType::Type1),
            Some(ProtectionType::Type3),
        ] {
            for is_long in [false, true] {
                let mut rig = filled(changeable(before));
                let outcome = match is_long {
                    true => rig.send_out(&format_long(information), &[usage, 0, 0, 0, 0, 0, 0, 0]),
                    false => rig.send_out(&format_data(information), &[usage, 0, 0, 0]),
                };
                outcome.good();
                assert_erased(&rig);
                assert!(rig.mapped.iter().all(|is_mapped| !is_mapped));
                assert_eq!(reported_type(&mut rig), number);
                let checks = [0b000, 0b101, 0b111, 0b100][usize::from(number)];
                assert_eq!(reported_checks(&mut rig), (0b111, checks));
            }
        }
    }
}

#[test]
fn format_without_list_uses_first_type() {
    for (information, number) in [(0b00, 0), (0b10, 1), (0b11, 2)] {
        let mut rig = filled(changeable(Some(ProtectionType::Type3)));
        rig.send(&format(information)).good();
        assert_erased(&rig);
        assert_eq!(reported_type(&mut rig), number);
    }
}

#[test]
fn format_notifies_other_nexuses_of_change() {
    let mut rig = Rig::with(changeable(None));
    rig.send(&format(0b10)).good();
    let mut ready = |nexus| rig.run(nexus, &[0; 6], &[], 0);
    assert_eq!(ready(B).check(), INQUIRY_CHANGED);
    assert_eq!(ready(B).check(), CAPACITY_CHANGED);
    ready(B).good();
    ready(A).good();
    // The second one does not change the type.
    rig.send(&format(0b10)).good();
    rig.run(B, &[0; 6], &[], 0).good();
}

/// A failed format may have left another type on the medium.
#[test]
fn format_stores_same_type_again() {
    let current = Some(ProtectionType::Type1);
    let outcome = Rig::with(changeable(current)).send(&format(0b10)).good();
    let stored = outcome.ops.last().map(|op| match op {
        BlockOp::ChangeProtection(change) => change.protection_type,
        other => panic!("{other:?}"),
    });
    assert_eq!(stored, Some(current));
}

#[test]
fn commands_follow_current_type() {
    let mut rig = Rig::with(changeable(Some(ProtectionType::Type1)));
    let (read, write) = (ten(0x28, 1, 0, 0, 1), ten(0x2a, 0, 0, 0, 1));
    let long_read = long(super::READ, 1, 0, 0, 1, (0, 0, 0));
    assert_eq!(rig.send(&read).good().data.len(), 520);
    rig.send(&format(0b00)).good();
    assert_eq!(rig.send(&read).check(), INVALID_FIELD);
    assert_eq!(rig.send(&read).cdb_pointer(), (1, Some(5)));
    assert_eq!(rig.send(&long_read).check(), super::INVALID_OPCODE);
    // All checks are disabled, with any type.
    rig.send_out(&write, &[7; 512]).good();
    assert_eq!(rig.tags[0][2..], [0xff; 6]);
    rig.send(&format(0b11)).good();
    assert_eq!(rig.send(&read).check(), super::INVALID_OPCODE);
    assert_eq!(rig.send(&long_read).good().data.len(), 520);
    rig.send_out(&write, &[7; 512]).good();
    assert_eq!(
        rig.tags[0],
        super::tuple(super::crc(&[7; 512]), 0xffff, u32::MAX)
    );
}

#[test]
fn mode_pages_do_not_depend_on_type() {
    let mut rig = Rig::with(changeable(None));
    let pages = [0x1a, 8, 0x3f, 0, 255, 0];
    let before = rig.send(&pages).good().data;
    for information in [0b10, 0b11] {
        rig.send(&format(information)).good();
        assert_eq!(rig.send(&pages).good().data, before);
    }
}

#[test]
fn invalid_cdbs_point_to_field() {
    let mut rig = filled(changeable(None));
    let mut pointer = |flags: u8| rig.send(&[0x04, flags, 0, 0, 0, 0]).cdb_pointer();
    // FMTPINFO 01b, and each DEFECT LIST FORMAT.
    assert_eq!(pointer(0x40), (1, Some(7)));
    for defects in 1..8 {
        assert_eq!(pointer(0x80 | defects), (1, Some(2)));
    }
    // A vendor-specific byte and a reserved field.
    assert_eq!(rig.send(&[0x04, 0, 9, 0, 0, 0]).cdb_pointer().0, 2);
    assert_eq!(rig.send(&[0x04, 0, 0, 0, 3, 0]).cdb_pointer().0, 4);
    assert_eq!(rig.tags, filled(changeable(None)).tags);
}

#[test]
fn invalid_lists_point_to_field() {
    let mut rig = filled(changeable(None));
    let before = (rig.disk.clone(), rig.tags.clone());
    for (information, list, pointer) in [
        (0b00, [1, 0, 0, 0], (0, Some(2))),
        (0b10, [1, 0, 0, 0], (0, Some(2))),
        (0b11, [2, 0, 0, 0], (0, Some(2))),
        (0b11, [7, 0, 0, 0], (0, Some(2))),
        // DPRY, DCRT and STPF without FOV, then IP.
        (0b10, [0, 0x40, 0, 0], (1, Some(6))),
        (0b10, [0, 0x20, 0, 0], (1, Some(5))),
        (0b10, [0, 0x10, 0, 0], (1, Some(4))),
        (0b10, [0, 0x08, 0, 0], (1, Some(3))),
        (0b10, [0, 0x88, 0, 0], (1, Some(3))),
        // DEFECT LIST LENGTH.
        (0b10, [0, 0, 0, 8], (2, None)),
    ] {
        let outcome = rig.send_out(&format_data(information), &list);
        assert_eq!(parameter_pointer(&outcome), pointer, "{list:?}");
    }
    for (list, pointer) in [
        ([0, 0, 0, 0x10, 0, 0, 0, 0], (3, Some(7))),
        ([0, 0, 0, 0x01, 0, 0, 0, 0], (3, Some(3))),
        ([0, 0, 0, 0, 0, 0, 1, 0], (4, None)),
    ] {
        let outcome = rig.send_out(&format_long(0b10), &list);
        assert_eq!(parameter_pointer(&outcome), pointer, "{list:?}");
    }
    assert_eq!((rig.disk.clone(), rig.tags.clone()), before);
    // IMMED, and all options with FOV.
    for flags in [0x02, 0x80, 0xf0, 0xf2] {
        rig.send_out(&format_data(0b10), &[0, flags, 0, 0]).good();
    }
    // CMPLST with an empty list.
    rig.send_out(&[0x04, 0x98, 0, 0, 0, 0], &[0; 4]).good();
}

#[test]
fn short_list_is_refused() {
    let mut rig = filled(changeable(None));
    assert_eq!(
        rig.send_out(&format_data(0b10), &[0; 3]).check(),
        super::SHORT_DATA
    );
    assert_eq!(
        rig.send_out(&format_long(0b10), &[0; 7]).check(),
        super::SHORT_DATA
    );
    assert_eq!(reported_type(&mut rig), 0);
}

#[test]
fn fixed_type_is_only_formatted_again() {
    for (number, protection_type) in (1..).zip(TYPES) {
        for (selected, (information, usage)) in (0..).zip(SELECTORS) {
            let mut rig = filled(unit(protection_type));
            let outcome = rig.send_out(&format_data(information), &[usage, 0, 0, 0]);
            if selected == number {
                assert_eq!(outcome.good().ops.len(), 1);
                assert_erased(&rig);
            } else if information == SELECTORS[usize::from(number)].0 {
                assert_eq!(parameter_pointer(&outcome), (0, Some(2)));
            } else {
                assert_eq!(outcome.cdb_pointer(), (1, Some(7)));
            }
            assert_eq!(reported_type(&mut rig), number);
        }
    }
    // FMTPINFO alone selects type 2.
    let mut rig = filled(unit(ProtectionType::Type3));
    assert_eq!(rig.send(&format(0b11)).cdb_pointer(), (1, Some(7)));
}

#[test]
fn unprotected_unit_refuses_protection() {
    let mut rig = Rig::new();
    for information in [0b01, 0b10, 0b11] {
        let outcome = rig.send_out(&format_data(information), &[0; 4]);
        assert_eq!(outcome.check(), INVALID_FIELD);
        assert_eq!(outcome.cdb_pointer(), (1, Some(7)));
    }
    assert!(rig.disk.iter().any(|byte| *byte != 0));
    rig.send(&format(0)).good();
    assert!(rig.disk.iter().all(|byte| *byte == 0));
}

#[test]
fn format_requires_write_access() {
    let mut rig = filled(changeable(None));
    rig.read_only = true;
    assert_eq!(rig.send(&format(0b10)).check(), (7, 0x27, 0));
    rig.read_only = false;
    // RESERVE (6).
    rig.run(B, &[0x16, 0, 0, 0, 0, 0], &[], 0).good();
    let outcome = rig.send(&format(0b10));
    assert_eq!(outcome.response.status, Status::ReservationConflict);
    let mut rig = filled(Config {
        read_only: true,
        ..changeable(None)
    });
    assert_eq!(rig.send(&format(0b10)).check(), (7, 0x27, 0));
    assert_eq!(reported_type(&mut rig), 0);
}

#[test]
fn failed_format_keeps_type() {
    for passes in [0, 1] {
        let mut rig = filled(changeable(Some(ProtectionType::Type1)));
        rig.passes = passes;
        rig.fail = Some(BackendError::Medium { offset: None });
        assert_eq!(
            rig.send(&format(0b00)).check().0,
            if passes == 0 { 3 } else { 4 }
        );
        assert_eq!(reported_type(&mut rig), 1);
        rig.run(B, &[0; 6], &[], 0).good();
    }
}

#[test]
fn replaced_unit_refuses_change() {
    let rig = Rig::with(changeable(None));
    let _state = rig.lu.retire();
    let change = ProtectionChange {
        protection_type: Some(ProtectionType::Type1),
        nexus: A,
    };
    let saved = rig
        .lu
        .save_protection(&change, |_| panic!("the type was stored"));
    assert_eq!(saved, Err(BackendError::NotReady));
    let new = Rig::raw(changeable(None));
    new.lu.restore_protection(|| Some(ProtectionType::Type3));
    let current = new.lu.protection().map(|current| current.protection_type);
    assert_eq!(current, Some(ProtectionType::Type3));
}

#[test]
fn blocked_change_does_not_delay_retirement() {
    let lu = &Rig::with(changeable(None)).lu;
    let change = ProtectionChange {
        protection_type: Some(ProtectionType::Type1),
        nexus: A,
    };
    let (resume, blocked) = std::sync::mpsc::channel();
    let (start, started) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let saved = scope.spawn(move || {
            lu.save_protection(&change, |_| {
                start.send(()).unwrap();
                blocked.recv().unwrap();
                Ok(())
            })
        });
        started.recv().unwrap();
        let (retire, retired) = std::sync::mpsc::channel();
        scope.spawn(move || {
            drop(lu.retire());
            retire.send(())
        });
        let timeout = std::time::Duration::from_secs(10);
        let is_retired = retired.recv_timeout(timeout).is_ok();
        resume.send(()).unwrap();
        assert!(is_retired);
        assert_eq!(saved.join().unwrap(), Err(BackendError::NotReady));
    });
    assert_eq!(lu.protection(), None);
}

#[test]
fn format_executes_alone() {
    let cdb = format(0b10);
    let row = Opcode::of(&cdb);
    assert_eq!(row.footprint(&cdb), Footprint::Atomic(Blocks::ALL));
    for received in [
        TaskAttribute::Simple,
        TaskAttribute::HeadOfQueue,
        TaskAttribute::Ordered,
    ] {
        assert_eq!(row.task_attribute(received), TaskAttribute::Ordered);
        assert_eq!(Opcode::of(&[0x28]).task_attribute(received), received);
    }
}

/// A WRITE may have received its data before a FORMAT UNIT is executed.
#[test]
fn buffers_do_not_depend_on_type() {
    let block_size = BlockSize::B512;
    let lens = [None, Some(TYPES[0]), Some(TYPES[1]), Some(TYPES[2])].map(|current| {
        let mut config = Config {
            protection: Some(protection(TYPES[0], true)),
            protection_format: ProtectionFormat::Changeable(current),
            ..config(block_size, 128)
        };
        config.limits.window = 8192;
        let rig = Rig::with(config);
        [0x2a, 0x2e, 0x41].map(|code| {
            let blocks = 4;
            let len = if code == 0x41 { 512 } else { 2048 };
            buffer_len(&rig, &ten(code, 0, 0, 0, blocks), len)
        })
    });
    for len in &lens[1..] {
        assert_eq!(*len, lens[0]);
    }
}

fn buffer_len(rig: &Rig, cdb: &[u8], data_out: u32) -> u32 {
    use crate::device_server::Request;
    use crate::step::Expected;
    let request = Request {
        nexus: A,
        cdb,
        opcode: Opcode::of(cdb),
        expected: Expected {
            data_out,
            data_in: 0,
        },
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    };
    let early = rig.lu.data_out(&request).expect("data");
    let (command, _) = rig.lu.start(&request);
    assert_eq!(command.buffer_len(), early.buffer_len);
    early.buffer_len
}

proptest! {
    /// After any format, blocks are zero until they are written, and can be written and read with
    /// any type.
    #[test]
    fn random_formats_keep_blocks_consistent(
        steps in proptest::collection::vec((0..6_usize, any::<u8>(), 0..120_u8, 1..8_u8), 1..24),
    ) {
        let mut rig = filled(changeable(Some(ProtectionType::Type1)));
        rig.send(&format(0b00)).good();
        let mut model = vec![0; rig.disk.len()];
        let mut number = 0;
        for (action, fill, lba, blocks) in steps {
            let range = usize::from(lba) * 512..(usize::from(lba) + usize::from(blocks)) * 512;
            match action {
                0 => {
                    number = fill % 4;
                    let (information, usage) = SELECTORS[usize::from(number)];
                    rig.send_out(&format_data(information), &[usage, 2, 0, 0]).good();
                    model.fill(0);
                }
                1 | 2 => {
                    let data = vec![fill; range.len()];
                    rig.send_out(&sixteen(0x8a, 0, 0, lba, blocks), &data).good();
                    model[range].copy_from_slice(&data);
                }
                _ => {
                    let data = rig.send(&sixteen(0x88, 0, 0, lba, blocks)).good().data;
                    prop_assert_eq!(&data, &model[range]);
                }
            }
            prop_assert_eq!(reported_type(&mut rig), number);
        }
    }
}
