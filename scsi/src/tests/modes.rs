//! Tests for MODE SENSE and MODE SELECT.

use super::{A, B, Rig, config};
use crate::config::BlockSize;
use crate::opcode::Opcode;
use crate::sense::SenseFormat;
use crate::step::BlockOp;

/// Sends MODE SENSE (6) without block descriptors and returns the pages.
fn sense6(rig: &mut Rig, page: u8) -> Vec<u8> {
    let data = rig.send(&[0x1a, 0x08, page, 0, 0xff, 0]).good().data;
    assert_eq!(usize::from(data[0]) + 1, data.len());
    assert_eq!(data[3], 0);
    data[4..].to_vec()
}

const CACHING: [u8; 20] = [
    0x08, 0x12, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];
const CONTROL: [u8; 12] = [0x0a, 0x0a, 2, 0x10, 0, 0x40, 0, 0, 0xff, 0xff, 0, 0];

#[test]
fn mode_sense_formats_return_same_pages() {
    let mut rig = Rig::new();
    let all = sense6(&mut rig, 0x3f);
    assert_eq!(all.len(), 12 + 20 + 12 + 12);
    assert_eq!(all[12..32], CACHING);
    assert_eq!(all[32..44], CONTROL);
    // MODE SENSE (10) with a short block descriptor: header, descriptor, pages.
    let ten = rig.send(&[0x5a, 0, 0x3f, 0, 0, 0, 0, 1, 0, 0]).good().data;
    let head = [0, 70, 0, 0x10, 0, 0, 0, 8, 0, 0, 0, 128, 0, 0, 2, 0];
    assert_eq!(ten[..16], head);
    assert_eq!(ten[16..], all);
    // LLBAA: long descriptor.
    let long = rig
        .send(&[0x5a, 0x10, 0x08, 0, 0, 0, 0, 1, 0, 0])
        .good()
        .data;
    assert_eq!(long[..8], [0, 42, 0, 0x10, 1, 0, 0, 16]);
    assert_eq!(
        long[8..24],
        [0, 0, 0, 0, 0, 0, 0, 128, 0, 0, 0, 0, 0, 0, 2, 0]
    );
    // MODE SENSE (6) with a short descriptor and all subpages.
    let six = rig.send(&[0x1a, 0, 0x3f, 0xff, 0xff, 0]).good().data;
    assert_eq!(six[..12], [67, 0, 0x10, 8, 0, 0, 0, 128, 0, 0, 2, 0]);
}

#[test]
fn page_control_selects_values() {
    let mut rig = Rig::new();
    let mut mask = vec![0; 20];
    mask[..3].copy_from_slice(&[0x08, 0x12, 0x04]);
    assert_eq!(sense6(&mut rig, 0x48), mask, "changeable: WCE");
    let control = [0x0a, 0x0a, 0x04, 0, 0x08, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(sense6(&mut rig, 0x4a), control, "changeable: D_SENSE, SWP");
    assert_eq!(sense6(&mut rig, 0x88), CACHING, "default");
    assert_eq!(
        rig.send(&[0x1a, 8, 0xc8, 0, 255, 0]).check(),
        (5, 0x39, 0),
        "saved"
    );
    assert_eq!(
        rig.send(&[0x1a, 8, 0x02, 0, 255, 0]).cdb_pointer(),
        (2, Some(5))
    );
    assert_eq!(
        rig.send(&[0x1a, 8, 0x08, 1, 255, 0]).cdb_pointer(),
        (3, Some(7))
    );
}

#[test]
fn mode_header_reports_write_protection() {
    let mut config = config(BlockSize::B4096, 8);
    config.read_only = true;
    let data = Rig::with(config)
        .send(&[0x1a, 8, 0x08, 0, 4, 0])
        .good()
        .data;
    assert_eq!(data, [23, 0, 0x90, 0]);
}

fn select6(rig: &mut Rig, pages: &[u8]) -> super::Outcome {
    let list = [&[0, 0, 0, 0], pages].concat();
    rig.send_out(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list)
}

#[test]
fn disabling_cache_flushes_and_notifies() {
    let mut rig = Rig::new();
    let mut off = CACHING;
    off[2] = 0;
    let outcome = select6(&mut rig, &off).good();
    assert_eq!(
        outcome.ops,
        [BlockOp::Flush {
            offset: 0,
            len: 128 * 512
        }]
    );
    assert!(!rig.lu.is_write_cache_enabled());
    assert_eq!(sense6(&mut rig, 0x08), off);
    rig.run(A, &[0; 6], &[], 0).good();
    assert_eq!(rig.run(B, &[0; 6], &[], 0).check(), (6, 0x2a, 1));
    rig.run(B, &[0; 6], &[], 0).good();
    // Sending the same values again is not a change, so no other nexus should be notified.
    assert!(select6(&mut rig, &off).good().ops.is_empty());
    rig.run(B, &[0; 6], &[], 0).good();
    // This should not be changed by a reset, because any initiator can request a reset.
    rig.lu.reset();
    assert!(!rig.lu.is_write_cache_enabled());
    assert!(select6(&mut rig, &off).check().0 == 6, "the reset");
    assert!(select6(&mut rig, &off).good().ops.is_empty());
}

#[test]
fn d_sense_selects_sense_format() {
    let mut rig = Rig::new();
    let mut control = CONTROL;
    control[2] |= 4;
    select6(&mut rig, &control).good();
    assert_eq!(rig.lu.sense_format(), SenseFormat::Descriptor);
    let outcome = rig.send(&[0xff]);
    assert_eq!(outcome.response.sense[0], 0x72);
    assert_eq!(outcome.check(), (5, 0x20, 0));
}

#[test]
fn software_write_protection() {
    let mut rig = Rig::new();
    let mut control = CONTROL;
    control[4] = 8;
    select6(&mut rig, &control).good();
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(rig.send_out(&write, &[0; 512]).check(), (7, 0x27, 2));
    rig.send(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
    select6(&mut rig, &CONTROL).good();
    rig.send_out(&write, &[0; 512]).good();
}

#[test]
fn mode_select_10_accepts_multiple_pages() {
    let mut rig = Rig::new();
    let mut control = CONTROL;
    control[2] |= 4;
    for (header, descriptor) in [
        (vec![0, 0, 0, 0, 0, 0, 0, 8], vec![0, 0, 0, 128, 0, 0, 2, 0]),
        (vec![0, 0, 0, 0, 0, 0, 0, 8], vec![0, 0, 0, 0, 0, 0, 2, 0]),
        (
            vec![0, 0, 0, 0, 0, 0, 0, 8],
            vec![255, 255, 255, 255, 0, 0, 2, 0],
        ),
        (
            vec![0, 0, 0, 0, 1, 0, 0, 16],
            vec![0, 0, 0, 0, 0, 0, 0, 128, 0, 0, 0, 0, 0, 0, 2, 0],
        ),
    ] {
        let list = [&header[..], &descriptor, &CACHING, &control].concat();
        let cdb = [0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
        rig.send_out(&cdb, &list).good();
    }
    assert_eq!(sense6(&mut rig, 0x0a), control);
    let list = [&[0, 0, 0, 0, 0, 0, 0, 8][..], &[0, 0, 0, 128, 0, 0, 4, 0]].concat();
    let outcome = rig.send_out(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 16, 0], &list);
    assert_eq!(outcome.check(), (5, 0x26, 0), "different block size");
}

#[test]
fn mode_select_validates_before_changes() {
    let mut rig = Rig::new();
    let mut off = CACHING;
    off[2] = 0;
    let mut wrong = CONTROL;
    wrong[3] = 0;
    // The second page is invalid because it has a different value for a bit that can't be changed.
    let outcome = select6(&mut rig, &[&off[..], &wrong].concat());
    assert_eq!(outcome.check(), (5, 0x26, 0));
    let field = outcome.sense().field.unwrap();
    assert_eq!(
        (field.in_cdb, field.byte, field.bit),
        (false, 4 + 20 + 3, Some(4))
    );
    assert!(rig.lu.is_write_cache_enabled());

    assert_eq!(
        select6(&mut rig, &off[..19]).check(),
        (5, 0x1a, 0),
        "truncated"
    );
    assert_eq!(select6(&mut rig, &off[..1]).check(), (5, 0x1a, 0));
    assert_eq!(
        select6(&mut rig, &[0x02, 0]).check(),
        (5, 0x26, 0),
        "unknown page"
    );
    let outcome = select6(&mut rig, &[0x88, 0x12]);
    assert_eq!(outcome.sense().field.unwrap().bit, Some(7), "PS");
    let outcome = select6(&mut rig, &[0x48, 0x12]);
    assert_eq!(outcome.sense().field.unwrap().bit, Some(6), "SPF");
    assert_eq!(
        select6(&mut rig, &[0x08, 0x11]).check(),
        (5, 0x26, 0),
        "page length"
    );
    // First with SP, then without PF, then with less data than specified in the list.
    assert_eq!(
        rig.send_out(&[0x15, 0x11, 0, 0, 4, 0], &[0; 4])
            .cdb_pointer(),
        (1, Some(0))
    );
    assert_eq!(
        rig.send_out(&[0x15, 0x00, 0, 0, 4, 0], &[0; 4])
            .cdb_pointer(),
        (1, Some(4))
    );
    assert_eq!(
        rig.send_out(&[0x15, 0x10, 0, 0, 9, 0], &[0; 4]).check(),
        (5, 0x0e, 3)
    );
    assert_eq!(
        rig.send_out(&[0x15, 0x10, 0, 0, 3, 0], &[0; 3]).check(),
        (5, 0x1a, 0)
    );
    rig.send_out(&[0x15, 0x10, 0, 0, 0, 0], &[]).good();
}

/// Mode pages are not saved. If an initiator tries to save them, it must not assume that the cache
/// will still be disabled after the next start (SPC-4 6.11: SP). Linux only sets SP if PS is set.
#[test]
fn saved_pages_are_not_supported() {
    let mut rig = Rig::new();
    let mut pages = &sense6(&mut rig, 0x3f)[..];
    while let [first, len, ..] = pages {
        assert_eq!(first & 0x80, 0, "PS of page {first:#x}");
        pages = &pages[2 + usize::from(*len)..];
    }
    let mut off = CACHING;
    off[2] = 0;
    let six = [&[0; 4], &off[..]].concat();
    let ten = [&[0; 8], &off[..]].concat();
    let select_six = [0x15, 0x11, 0, 0, six.len() as u8, 0];
    let select_ten = [0x55, 0x11, 0, 0, 0, 0, 0, 0, ten.len() as u8, 0];
    for (cdb, list) in [(&select_six[..], six), (&select_ten[..], ten)] {
        let outcome = rig.send_out(cdb, &list);
        assert_eq!(outcome.check(), (5, 0x24, 0), "INVALID FIELD IN CDB");
        assert_eq!(outcome.cdb_pointer(), (1, Some(0)), "SP");
        assert!(rig.lu.is_write_cache_enabled());
    }
}

/// Returns the step after the only block operation of a command, if the cache was disabled while
/// this was in flight.
fn after_cache_off(cdb: &[u8], out: &[u8]) -> crate::step::Step {
    use crate::device_server::Request;
    use crate::step::{Expected, Step, StepResult, TaskAttribute};
    let mut rig = Rig::new();
    let expected = Expected {
        data_out: out.len() as u32,
        data_in: 0,
    };
    let (mut command, step) = rig.lu.start(&Request {
        nexus: B,
        cdb,
        opcode: Opcode::of(cdb),
        expected,
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    });
    let mut buffer = out.to_vec();
    assert!(matches!(step, Step::ReceiveData { .. }));
    let step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
    assert!(matches!(step, Step::Block(_)));
    let mut off = CACHING;
    off[2] = 0;
    select6(&mut rig, &off).good();
    let step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
    let last = command.advance(&rig.lu, StepResult::Done, &mut buffer);
    assert!(matches!(last, Step::Respond(_)));
    step
}

#[test]
fn disabling_cache_flushes_writes_in_flight() {
    use crate::step::Step;
    let flush = |offset, len| Step::Block(BlockOp::Flush { offset, len });
    // WRITE (10), WRITE SAME (10) with a pattern and with zeros, UNMAP.
    let write = [0x2a, 0, 0, 0, 0, 2, 0, 0, 1, 0];
    assert_eq!(after_cache_off(&write, &[1; 512]), flush(1024, 512));
    let same = [0x41, 0, 0, 0, 0, 2, 0, 0, 1, 0];
    assert_eq!(after_cache_off(&same, &[1; 512]), flush(1024, 512));
    assert_eq!(after_cache_off(&same, &[0; 512]), flush(1024, 512));
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    list.resize(24, 0);
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(after_cache_off(&unmap, &list), flush(0, 128 * 512));
}

/// An initiator that has disabled the cache will not send any other flush, so GOOD must always mean
/// that the cache is empty, even for a retry.
#[test]
fn repeated_mode_select_retries_failed_flush() {
    use crate::step::BackendError;
    let mut rig = Rig::new();
    let mut off = CACHING;
    off[2] = 0;
    rig.fail = Some(BackendError::Medium { offset: None });
    let first = select6(&mut rig, &off);
    assert_eq!(first.ops.len(), 1, "failed flush");
    assert_eq!(first.check().0, 3, "MEDIUM ERROR");
    let again = select6(&mut rig, &off).good();
    assert_eq!(again.ops.len(), 1, "GOOD without a flush");
    assert!(select6(&mut rig, &off).good().ops.is_empty());
}

/// If a flush was started before the cache was enabled and then disabled again, it doesn't include
/// writes after that.
#[test]
fn older_flush_completes_no_newer_epoch() {
    use crate::lu::Flags;
    let rig = Rig::new();
    let set = |values| rig.lu.change_mode(Flags::WRITE_CACHE, values, A).unwrap();
    set(Flags::empty());
    let older = rig.lu.cache_flushes().owed().unwrap();
    set(Flags::WRITE_CACHE);
    set(Flags::empty());
    rig.lu.cache_flushes().complete(older);
    let newer = rig.lu.cache_flushes().owed().unwrap();
    rig.lu.cache_flushes().complete(newer);
    assert_eq!(rig.lu.cache_flushes().owed(), None);
}

#[test]
fn owed_flush_moves_to_next_unit() {
    use crate::lu::{Flags, LogicalUnit};
    let rig = Rig::new();
    rig.lu
        .change_mode(Flags::WRITE_CACHE, Flags::empty(), A)
        .unwrap();
    let next = LogicalUnit::new(config(BlockSize::B512, 128)).unwrap();
    next.import_state(&rig.lu.retire());
    assert!(next.cache_flushes().owed().is_some());
    assert!(rig.lu.set_stopped(true).is_err(), "retired");
}

/// Same as above, but two initiators disable the cache at the same time.
#[test]
fn concurrent_mode_select_waits_for_flush() {
    use crate::device_server::Request;
    use crate::step::{Expected, Step, StepResult, TaskAttribute};
    let mut rig = Rig::new();
    let mut off = CACHING;
    off[2] = 0;
    let mut list = [&[0, 0, 0, 0], &off[..]].concat();
    let cdb = [0x15, 0x10, 0, 0, list.len() as u8, 0];
    let expected = Expected {
        data_out: list.len() as u32,
        data_in: 0,
    };
    let (mut first, step) = rig.lu.start(&Request {
        nexus: B,
        cdb: &cdb,
        opcode: Opcode::of(&cdb),
        expected,
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    });
    assert!(matches!(step, Step::ReceiveData { .. }));
    let step = first.advance(&rig.lu, StepResult::Done, &mut list);
    assert!(matches!(step, Step::Block(BlockOp::Flush { .. })));
    // The flush is in flight. `A` first gets a unit attention and then sends the same command.
    rig.run(A, &[0; 6], &[], 0);
    let second = select6(&mut rig, &off).good();
    assert_eq!(second.ops.len(), 1, "GOOD while the flush is in flight");
}
