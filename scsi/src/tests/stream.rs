//! Tests for commands that are larger than the window.

use super::{A, Rig, config};
use crate::config::{BlockSize, Config};
use crate::device_server::Request;
use crate::opcode::Opcode;
use crate::step::{
    BackendError, BlockOp, DataIn, Expected, Residual, Step, StepResult, TaskAttribute,
    TransferError,
};
use crate::task::{NewTask, TaskSet, TaskTag};

/// 128 blocks of 512 bytes, with a window of four blocks and a segment of two blocks.
fn narrow() -> Config {
    let mut config = config(BlockSize::B512, 128);
    config.limits.window = 2048;
    config.limits.segment = 4096;
    config
}

fn ten(opcode: u8, flags: u8, lba: u8, blocks: u8) -> [u8; 10] {
    [opcode, flags, 0, 0, 0, lba, 0, 0, blocks, 0]
}

fn orwrite(lba: u8, blocks: u8) -> [u8; 16] {
    [0x8b, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0]
}

fn write(at: u64, len: u32, fua: bool) -> BlockOp {
    BlockOp::Write {
        offset: at * 512,
        len,
        buffer_offset: 0,
        tags: None,
        fua,
    }
}

fn read(at: u64, len: u32, buffer_offset: u32, fua: bool) -> BlockOp {
    BlockOp::Read {
        offset: at * 512,
        len,
        buffer_offset,
        tags: None,
        fua,
    }
}

/// Returns the steps of a successful command. The last step is the response.
fn steps_of(rig: &Rig, cdb: &[u8], data_out: u32, data_in: u32) -> Vec<Step> {
    let (mut command, mut step) = rig.lu.start(&Request {
        nexus: A,
        cdb,
        opcode: Opcode::of(cdb),
        expected: Expected { data_out, data_in },
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    });
    let mut buffer = vec![0; command.buffer_len() as usize];
    let mut steps = Vec::new();
    loop {
        let is_over = matches!(step, Step::Respond(_));
        steps.push(step);
        if is_over {
            return steps;
        }
        step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
    }
}

#[test]
fn write_alternates_receive_and_block() {
    let rig = Rig::with(narrow());
    let steps = steps_of(&rig, &ten(0x2a, 0x08, 7, 9), 9 * 512, 0);
    let receive = |from, len| Step::ReceiveData { from, len };
    assert_eq!(
        steps[..6],
        [
            receive(0, 2048),
            Step::Block(write(7, 2048, true)),
            receive(2048, 2048),
            Step::Block(write(11, 2048, true)),
            receive(4096, 512),
            Step::Block(write(15, 512, true)),
        ]
    );
    assert!(matches!(&steps[6..], [Step::Respond(r)] if r.residual_out == Residual::None));
}

#[test]
fn read_sends_last_piece_with_response() {
    let rig = Rig::with(narrow());
    // The initiator only has space for half of the last block.
    let steps = steps_of(&rig, &ten(0x28, 0, 7, 9), 0, 8 * 512 + 256);
    let send = |from, len| Step::SendData { from, len };
    assert_eq!(
        steps[..5],
        [
            Step::Block(read(7, 2048, 0, false)),
            send(0, 2048),
            Step::Block(read(11, 2048, 0, false)),
            send(2048, 2048),
            Step::Block(read(15, 512, 0, false)),
        ]
    );
    let [Step::Respond(response)] = &steps[5..] else {
        panic!("{:?}", &steps[5..]);
    };
    let last = DataIn::Buffer {
        from: 4096,
        len: 256,
    };
    assert_eq!(response.data_in, last);
    assert_eq!(response.residual_in, Residual::Overflow(256));
}

#[test]
fn window_sized_transfer_is_single_piece() {
    let mut rig = Rig::with(narrow());
    let data = vec![0x5a; 2048];
    let outcome = rig.send_out(&ten(0x2a, 0, 3, 4), &data).good();
    assert_eq!(outcome.ops, [write(3, 2048, false)]);
    let outcome = rig.send(&ten(0x28, 0, 3, 4)).good();
    assert_eq!(outcome.data, data);
    assert_eq!(
        outcome.response.data_in,
        DataIn::Buffer { from: 0, len: 2048 }
    );
}

#[test]
fn pieces_are_verified_before_next_write() {
    let mut rig = Rig::with(narrow());
    let data: Vec<u8> = (0..9 * 512).map(|at| (at * 3) as u8).collect();
    // WRITE AND VERIFY (10), BYTCHK 01b.
    let outcome = rig.send_out(&ten(0x2e, 0x02, 7, 9), &data).good();
    let expected = [
        write(7, 2048, true),
        read(7, 2048, 2048, true),
        write(11, 2048, true),
        read(11, 2048, 2048, false),
        write(15, 512, true),
        read(15, 512, 2048, false),
    ];
    assert_eq!(outcome.ops, expected);
    assert_eq!(rig.disk[7 * 512..16 * 512], data);
}

/// A command should have the same result for the initiator, with or without a window.
#[test]
fn window_is_invisible_to_initiator() {
    let wide = config(BlockSize::B512, 128);
    let length = 13 * 512;
    let fresh: Vec<u8> = (0..length + 512)
        .map(|at| (at * 7 + at / 512) as u8)
        .collect();
    let (before, there) = {
        let disk = Rig::with(wide.clone()).disk;
        (disk.clone(), disk[5 * 512..19 * 512].to_vec())
    };
    let mut wrong = there.clone();
    wrong[12 * 512 + 17] ^= 4;
    let cdbs: [(&[u8], &[u8]); 9] = [
        (&ten(0x28, 0, 5, 13), &[]),
        (&ten(0x2a, 0, 5, 13), &fresh),
        (&ten(0x2e, 0x00, 5, 13), &fresh),
        (&ten(0x2e, 0x02, 5, 13), &fresh),
        (&ten(0x2f, 0x00, 5, 13), &[]),
        (&ten(0x2f, 0x02, 5, 13), &there),
        (&ten(0x2f, 0x02, 5, 13), &wrong),
        (&ten(0x2f, 0x06, 5, 13), &there),
        (&orwrite(5, 13), &fresh),
    ];
    for (cdb, out) in cdbs {
        // The exact size, too much data, fewer blocks, an incomplete block, and no data.
        for offered in [length, length + 100, length - 1024, length - 100, 0] {
            let out = &out[..out.len().min(offered)];
            let data_in = if out.is_empty() { offered as u32 } else { 0 };
            let mut outcomes = [wide.clone(), narrow()].map(|config| {
                let mut rig = Rig::with(config);
                let outcome = rig.run(A, cdb, out, data_in);
                (outcome, rig.disk)
            });
            let [(whole, whole_disk), (pieces, pieces_disk)] = &mut outcomes;
            // Ignore the location of the last piece.
            pieces.response.data_in = DataIn::None;
            whole.response.data_in = DataIn::None;
            assert_eq!(pieces.response, whole.response, "{cdb:02x?} {offered}");
            assert_eq!(pieces.data, whole.data, "{cdb:02x?} {offered}");
            assert!(pieces_disk == whole_disk, "{cdb:02x?} {offered}");
        }
    }
    assert_eq!(Rig::with(narrow()).disk, before);
}

#[test]
fn failed_write_reports_block_and_residual() {
    let medium = |offset| Some(BackendError::Medium { offset });
    let cdb = ten(0x2a, 0, 7, 9);
    for (fail, block) in [(medium(None), 11), (medium(Some(13 * 512 + 9)), 13)] {
        let mut rig = Rig::with(narrow());
        let before = rig.disk.clone();
        (rig.fail, rig.passes) = (fail, 1);
        let outcome = rig.send_out(&cdb, &[0x5a; 9 * 512]);
        assert_eq!(outcome.check(), (3, 0x0c, 0));
        assert_eq!(outcome.sense().information, Some(block));
        // Only two of the three pieces were requested.
        assert_eq!(outcome.response.residual_out, Residual::Underflow(512));
        assert_eq!(rig.disk[7 * 512..11 * 512], [0x5a; 2048]);
        assert_eq!(rig.disk[11 * 512..], before[11 * 512..], "nothing after it");
    }
    let mut rig = Rig::with(narrow());
    (rig.fail, rig.passes) = (Some(BackendError::NoSpace), 2);
    let outcome = rig.send_out(&cdb, &[0x5a; 9 * 512]);
    assert_eq!(outcome.check(), (7, 0x27, 7));
    assert_eq!(
        outcome.response.residual_out,
        Residual::None,
        "all data was received"
    );
}

#[test]
fn failed_read_reports_block_and_residual() {
    let mut rig = Rig::with(narrow());
    let offset = Some(16 * 512 + 1);
    (rig.fail, rig.passes) = (Some(BackendError::Medium { offset }), 2);
    let outcome = rig.run(A, &ten(0x28, 0, 7, 13), &[], 13 * 512);
    assert_eq!(outcome.check(), (3, 0x11, 0));
    assert_eq!(outcome.sense().information, Some(16));
    assert_eq!(
        outcome.data,
        rig.disk[7 * 512..15 * 512],
        "data sent before the error"
    );
    assert_eq!(
        outcome.response.residual_in,
        Residual::Underflow(13 * 512 - 4096)
    );
}

#[test]
fn missing_piece_fails_command() {
    let rig = Rig::with(narrow());
    let cdb = ten(0x2a, 0, 0, 9);
    let (mut command, _) = rig.lu.start(&Request {
        nexus: A,
        cdb: &cdb,
        opcode: Opcode::of(&cdb),
        expected: Expected {
            data_out: 9 * 512,
            data_in: 0,
        },
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    });
    let mut buffer = vec![0; command.buffer_len() as usize];
    let mut advance = |result| command.advance(&rig.lu, result, &mut buffer);
    assert!(matches!(advance(StepResult::Done), Step::Block(_)));
    let receive = Step::ReceiveData {
        from: 2048,
        len: 2048,
    };
    assert_eq!(advance(StepResult::Done), receive);
    let Step::Respond(response) = advance(StepResult::Failed(BackendError::Transfer(
        TransferError::Failed,
    ))) else {
        panic!("expected a response");
    };
    let sense = response.parsed_sense().expect("sense data");
    assert_eq!((sense.key as u8, sense.additional.code), (0xb, 0x4b));
}

/// If a piece is now past the end of the medium, it must not be read or written.
#[test]
fn shrunk_medium_fails_running_command() {
    let cdbs: [(&[u8], u32); 3] = [
        (&ten(0x28, 0, 120, 8), 0),
        (&ten(0x2a, 0, 120, 8), 8 * 512),
        (&orwrite(120, 8), 8 * 512),
    ];
    for (cdb, data_out) in cdbs {
        let rig = Rig::with(narrow());
        let (mut command, mut step) = rig.lu.start(&Request {
            nexus: A,
            cdb,
            opcode: Opcode::of(cdb),
            expected: Expected {
                data_out,
                data_in: 8 * 512 - data_out,
            },
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        });
        let mut buffer = vec![0; command.buffer_len() as usize];
        let mut ends = Vec::new();
        let response = loop {
            if let Step::Block(op) = &step {
                ends.push(op.end().expect("read or write"));
                rig.lu.set_capacity(125).expect("valid capacity");
            }
            match step {
                Step::Respond(response) => break response,
                _ => step = command.advance(&rig.lu, StepResult::Done, &mut buffer),
            }
        };
        assert!(
            ends.iter().all(|end| *end <= 124 * 512),
            "{cdb:02x?} {ends:?}"
        );
        let sense = response.parsed_sense().expect("sense data");
        assert_eq!((sense.key as u8, sense.additional.code), (5, 0x21));
    }
}

/// If the medium has been truncated, we must not extend it again by writing zeros or deallocating
/// past the end.
#[test]
fn shrunk_medium_is_not_extended() {
    let mut write_same = [0; 16];
    write_same[0] = 0x93;
    write_same[9] = 120;
    write_same[13] = 8;
    let rig = Rig::with(narrow());
    let (mut command, step) = rig.lu.start(&Request {
        nexus: A,
        cdb: &write_same,
        opcode: Opcode::of(&write_same),
        expected: Expected {
            data_out: 512,
            data_in: 0,
        },
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    });
    assert!(matches!(step, Step::ReceiveData { .. }), "{step:?}");
    rig.lu.set_capacity(125).expect("valid capacity");
    let mut buffer = vec![0; command.buffer_len() as usize];
    let step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
    let Step::Respond(response) = step else {
        panic!("{step:?}");
    };
    let sense = response.parsed_sense().expect("sense data");
    assert_eq!((sense.key as u8, sense.additional.code), (5, 0x21));
}

/// The blocks of an ORWRITE are reserved until the last piece has been written. A WRITE to the
/// blocks in the first piece has to wait for it, but a WRITE to other blocks can continue.
#[test]
fn or_write_keeps_blocks_between_pieces() {
    let mut rig = Rig::with(narrow());
    rig.disk.fill(0);
    let mut tasks = TaskSet::new(8, 8);
    let mut register = |tag, cdb: &[u8]| {
        let new = NewTask {
            footprint: Opcode::of(cdb).footprint(cdb),
            ..NewTask::default()
        };
        tasks
            .register(A, TaskTag(tag), new)
            .expect("task set is not full")
    };
    let long = register(1, &orwrite(8, 12));
    let inside = register(2, &ten(0x2a, 0, 9, 1));
    let beyond = register(3, &ten(0x2a, 0, 20, 1));
    assert!(tasks.try_start(long));
    let steps = steps_of(&rig, &orwrite(8, 12), 12 * 512, 0);
    let pieces = steps
        .iter()
        .filter(|s| matches!(s, Step::ReceiveData { .. }));
    assert_eq!(pieces.count(), 3);
    assert!(!tasks.try_start(inside));
    assert!(tasks.try_start(beyond));
    assert!(tasks.remove(long));
    assert_eq!(tasks.poll_start(), Some(inside));
}
