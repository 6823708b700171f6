//! Tests for unit attentions, REQUEST SENSE, START STOP UNIT, task attributes and capacity.

use std::sync::Arc;

use super::{A, B, Outcome, Rig, config, srp_nexus};
use crate::attention::{Attention, AttentionScope};
use crate::config::{BlockSize, ConfigError};
use crate::device_server::Request;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::NexusId;
use crate::opcode::Opcode;
use crate::step::{BlockOp, Expected, Step, StepResult, TaskAttribute};

const READY: [u8; 6] = [0; 6];

#[test]
fn new_nexus_gets_power_on_once() {
    let mut rig = Rig::raw(config(BlockSize::B512, 8));
    // INQUIRY and REPORT LUNS should be executed, without clearing it.
    rig.send(&[0x12, 0, 0, 0, 36, 0]).good();
    rig.send(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), (6, 0x29, 0));
    rig.run(A, &READY, &[], 0).good();
    // It should be reported before the CDB is checked.
    assert_eq!(rig.run(B, &[0xff], &[], 0).check(), (6, 0x29, 0));
    assert_eq!(rig.run(B, &[0xff], &[], 0).check(), (5, 0x20, 0));
}

#[test]
fn request_sense_clears_attention() {
    let mut rig = Rig::raw(config(BlockSize::B512, 8));
    let sense = rig.send(&[0x03, 0, 0, 0, 252, 0]).good().data;
    assert_eq!(sense[..3], [0x70, 0, 6]);
    assert_eq!(sense[12..14], [0x29, 0]);
    let none = rig.send(&[0x03, 0, 0, 0, 252, 0]).good().data;
    assert_eq!((none[2], none.len()), (0, 18));
    // DESC: use descriptor format, truncated to the allocation length.
    assert_eq!(
        rig.send(&[0x03, 1, 0, 0, 252, 0]).good().data,
        [0x72, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(rig.send(&[0x03, 0, 0, 0, 4, 0]).good().data.len(), 4);
    rig.send(&READY).good();
}

#[test]
fn attention_scope_selects_nexuses() {
    let mut rig = Rig::new();
    rig.lu
        .raise(Attention::CommandsCleared, AttentionScope::AllBut(A));
    rig.run(A, &READY, &[], 0).good();
    assert_eq!(rig.run(B, &READY, &[], 0).check(), (6, 0x2f, 0));
    rig.lu.raise(Attention::NexusLoss, AttentionScope::One(A));
    rig.run(B, &READY, &[], 0).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), (6, 0x29, 7));
    rig.lu.reset();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), (6, 0x29, 3));
    assert_eq!(rig.run(B, &READY, &[], 0).check(), (6, 0x29, 3));
}

#[test]
fn report_luns_acknowledges_its_attention() {
    let mut rig = Rig::new();
    rig.lu.raise(Attention::LunsChanged, AttentionScope::All);
    rig.luns.push(LunId::new(1).unwrap());
    rig.send(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
    rig.send(&READY).good();
    assert_eq!(rig.run(B, &READY, &[], 0).check(), (6, 0x3f, 0x0e));
}

#[test]
fn shared_hint_keeps_attentions_separate() {
    let mut rig = Rig::new();
    let twin = NexusId(A.0 + 1024);
    rig.lu.add_nexus(twin, srp_nexus(1));
    rig.run(A, &READY, &[], 0).good();
    assert_eq!(rig.run(twin, &READY, &[], 0).check(), (6, 0x29, 0));
    rig.lu.raise(Attention::ModeChanged, AttentionScope::One(A));
    rig.lu.remove_nexus(twin);
    rig.run(twin, &READY, &[], 0).good();
    assert_eq!(rig.run(A, &READY, &[], 0).check(), (6, 0x2a, 1));
    assert!(rig.lu.nexus(twin).is_none());
}

#[test]
fn capacity_change_notifies_and_applies() {
    let mut rig = Rig::new();
    rig.lu.set_capacity(64).unwrap();
    assert_eq!(rig.send(&READY).check(), (6, 0x2a, 9));
    assert_eq!(
        rig.send(&[0x28, 0, 0, 0, 0, 64, 0, 0, 1, 0]).check(),
        (5, 0x21, 0)
    );
    assert_eq!(rig.lu.set_capacity(0), Err(ConfigError::Capacity));
    assert_eq!(rig.lu.capacity_blocks(), 64);
}

#[test]
fn stop_only_flushes_by_default() {
    let mut rig = Rig::new();
    let flush = BlockOp::Flush {
        offset: 0,
        len: 128 * 512,
    };
    assert_eq!(rig.send(&[0x1b, 0, 0, 0, 0x00, 0]).good().ops, [flush]);
    assert!(rig.send(&[0x1b, 0, 0, 0, 0x04, 0]).good().ops.is_empty());
    assert!(!rig.lu.is_stopped());
    rig.run(B, &READY, &[], 0).good();
}

fn stoppable() -> Rig {
    Rig::with(crate::config::Config {
        stoppable: true,
        ..config(BlockSize::B512, 128)
    })
}

#[test]
fn reset_or_last_logout_starts_unit() {
    let mut rig = stoppable();
    rig.send(&[0x1b, 0, 0, 0, 0x00, 0]).good();
    assert_eq!(rig.run(B, &READY, &[], 0).check(), (2, 0x04, 2));
    rig.lu.reset();
    assert!(!rig.lu.is_stopped());
    assert_eq!(rig.send(&READY).check(), (6, 0x29, 3));
    rig.send(&[0x1b, 0, 0, 0, 0x00, 0]).good();
    rig.lu.remove_nexus(A);
    assert!(rig.lu.is_stopped(), "B is still there");
    rig.lu.remove_nexus(B);
    assert!(!rig.lu.is_stopped());
}

/// Creates an LU with nexuses for which the initial unit attention has already been cleared.
fn absent(change: impl FnOnce(LogicalUnit) -> LogicalUnit) -> Rig {
    let lu = LogicalUnit::new(config(BlockSize::B512, 128)).unwrap();
    let rig = Rig::of(change(lu));
    for id in [A, B] {
        assert!(rig.lu.take_attention(id).is_some());
    }
    rig
}

const MANUAL_INTERVENTION: (u8, u8, u8) = (2, 0x04, 3);

/// Sends PERSISTENT RESERVE OUT with REGISTER.
fn register(rig: &mut Rig) -> Outcome {
    let mut list = [0; 24];
    list[15] = 0xa;
    rig.run(A, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0)
}

#[test]
fn unit_without_medium_handles_unit_commands() {
    let mut rig = absent(LogicalUnit::without_medium);
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let capacity = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let start = [0x1b, 0, 0, 0, 1, 0];
    for cdb in [&READY[..], &read, &capacity, &start] {
        assert_eq!(rig.send(cdb).check(), MANUAL_INTERVENTION, "{cdb:x?}");
    }
    let written = rig.send_out(&write, &[0; 512]);
    assert_eq!(written.check(), MANUAL_INTERVENTION);
    let sense = rig.send(&[0x03, 0, 0, 0, 252, 0]).good().data;
    assert_eq!((sense[2], sense[12], sense[13]), MANUAL_INTERVENTION);
    rig.send(&[0x12, 0, 0, 0, 36, 0]).good();
    rig.send(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
    register(&mut rig).good();
}

#[test]
fn unit_awaiting_medium_is_becoming_ready() {
    let mut rig = absent(LogicalUnit::awaiting_medium);
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let start = [0x1b, 0, 0, 0, 1, 0];
    for cdb in [&READY[..], &read, &start] {
        assert_eq!(rig.send(cdb).check(), (2, 0x04, 1), "{cdb:x?}");
    }
    rig.lu.stop_awaiting_medium();
    for cdb in [&READY[..], &read, &start] {
        assert_eq!(rig.send(cdb).check(), MANUAL_INTERVENTION, "{cdb:x?}");
    }
}

#[test]
fn unknown_reservations_refuse_changes() {
    let mut rig = absent(LogicalUnit::without_reservations);
    assert_eq!(rig.send(&READY).check(), MANUAL_INTERVENTION);
    assert_eq!(register(&mut rig).check(), MANUAL_INTERVENTION);
    for cdb in [
        &[0x5e, 0, 0, 0, 0, 0, 0, 2, 0, 0][..],
        &[0x16, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(rig.send(cdb).check(), MANUAL_INTERVENTION, "{cdb:x?}");
    }
    rig.send(&[0x12, 0, 0, 0, 36, 0]).good();
    // The reservations of the new LU should be kept if it imports this state.
    let mut next = Rig::new();
    register(&mut next).good();
    next.lu.import_state(&rig.lu.export_state());
    let keys = next.send(&[0x5e, 0, 0, 0, 0, 0, 0, 2, 0, 0]).good().data;
    assert_eq!(keys[8..], 0xa_u64.to_be_bytes());
}

#[test]
fn unknown_names_are_not_reported() {
    let mut rig = absent(LogicalUnit::without_names);
    assert_eq!(rig.send(&READY).check(), MANUAL_INTERVENTION);
    assert_eq!(register(&mut rig).check(), MANUAL_INTERVENTION);
    for page in [0x80, 0x83, 0xc0] {
        let notices = rig.send(&[0x12, 1, page, 1, 0, 0]);
        assert_eq!(notices.check(), MANUAL_INTERVENTION, "{page:x}");
    }
    for page in [0x00, 0xb0, 0xb1] {
        rig.send(&[0x12, 1, page, 1, 0, 0]).good();
    }
    rig.send(&[0x12, 0, 0, 0, 36, 0]).good();
}

#[test]
fn stopped_unit_is_not_ready() {
    let mut rig = stoppable();
    // START STOP UNIT with START set to zero: flush, then stop.
    let ops = rig.send(&[0x1b, 0, 0, 0, 0x00, 0]).good().ops;
    assert_eq!(
        ops,
        [BlockOp::Flush {
            offset: 0,
            len: 128 * 512
        }]
    );
    assert!(rig.lu.is_stopped());
    assert_eq!(rig.send(&READY).check(), (2, 0x04, 2));
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(rig.send(&read).check(), (2, 0x04, 2));
    rig.send(&[0x12, 0, 0, 0, 36, 0]).good();
    let sense = rig.send(&[0x03, 0, 0, 0, 252, 0]).good().data;
    assert_eq!((sense[2], sense[12], sense[13]), (2, 4, 2));
    assert!(rig.send(&[0x1b, 1, 0, 0, 0x01, 0]).good().ops.is_empty());
    rig.send(&read).good();
    // NO_FLUSH, then start it again with ACTIVE.
    assert!(rig.send(&[0x1b, 0, 0, 0, 0x04, 0]).good().ops.is_empty());
    assert!(rig.lu.is_stopped());
    rig.send(&[0x1b, 0, 0, 0, 0x10, 0]).good();
    assert!(!rig.lu.is_stopped());
    // STANDBY and LOEJ are not supported.
    assert_eq!(
        rig.send(&[0x1b, 0, 0, 0, 0x30, 0]).cdb_pointer(),
        (4, Some(7))
    );
    assert_eq!(
        rig.send(&[0x1b, 0, 0, 0, 0x02, 0]).cdb_pointer(),
        (4, Some(1))
    );
}

#[test]
fn unknown_commands_are_refused() {
    let mut rig = Rig::new();
    // PREVENT ALLOW, SEND DIAGNOSTIC, LOG SENSE, WRITE ATOMIC.
    for opcode in [0x1e, 0x1d, 0x4d, 0x9c] {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        assert_eq!(rig.send(&cdb).check(), (5, 0x20, 0));
    }
    assert_eq!(rig.send(&[]).check(), (5, 0x20, 0));
    assert_eq!(rig.send(&[0x28, 0, 0]).cdb_pointer(), (3, None));
}

#[test]
fn aca_attribute_is_refused() {
    let mut rig = Rig::new();
    rig.attribute = TaskAttribute::Aca;
    assert_eq!(rig.send(&READY).check(), (5, 0x49, 0));
    for attribute in [TaskAttribute::Ordered, TaskAttribute::HeadOfQueue] {
        rig.attribute = attribute;
        rig.send(&READY).good();
    }
}

#[test]
fn unit_is_shared_between_threads() {
    fn shareable<T: Send + Sync + 'static>(_: &T) {}
    let rig = Rig::new();
    shareable(&rig.lu);
    let lu = Arc::new(rig.lu);
    let threads: Vec<_> = (0..4)
        .map(|n| {
            let lu = Arc::clone(&lu);
            std::thread::spawn(move || {
                let id = NexusId(100 + n);
                let mut taken = 0;
                lu.add_nexus(id, srp_nexus(n as u8));
                for _ in 0..1000 {
                    lu.raise(Attention::ModeChanged, AttentionScope::One(id));
                    taken += u32::from(lu.take_attention(id).is_some());
                }
                taken
            })
        })
        .collect();
    for thread in threads {
        // We should never lose a unit attention because of a concurrent change to the table.
        assert_eq!(thread.join().unwrap(), 1000);
    }
}

#[test]
fn invalid_configurations_are_refused() {
    let good = || config(BlockSize::B4096, 8);
    let check = |config: crate::config::Config| config.validate();
    assert_eq!(check(good()), Ok(()));
    let mut c = good();
    c.blocks = u64::MAX;
    assert_eq!(check(c), Err(ConfigError::Capacity));
    let mut c = good();
    c.identity.vendor = "NINECHARS".into();
    assert_eq!(check(c), Err(ConfigError::Text("vendor")));
    let mut c = good();
    c.identity.serial = "\u{e4}".into();
    assert_eq!(check(c), Err(ConfigError::Text("serial")));
    let mut c = good();
    c.limits.max_transfer = 512;
    assert_eq!(check(c), Err(ConfigError::Limit("max_transfer")));
    let mut c = good();
    c.physical_exponent = 16;
    assert_eq!(check(c), Err(ConfigError::PhysicalExponent));
    let mut c = good();
    c.identity.naa = crate::data::designator::Naa::LocallyAssigned(1 << 60);
    assert_eq!(check(c), Err(ConfigError::Naa));
}

/// The lock is held during this test, so the command would hang if it needed the lock.
#[test]
fn reads_and_writes_are_lock_free() {
    let rig = Rig::with(config(BlockSize::B512, 64));
    let _held = rig.lu.lock_nexuses();
    let expected = Expected {
        data_out: 512,
        data_in: 512,
    };
    for opcode in [0x28, 0x2a] {
        let cdb = [opcode, 0, 0, 0, 0, 1, 0, 0, 1, 0];
        let (mut command, mut step) = rig.lu.start(&Request {
            nexus: A,
            cdb: &cdb,
            opcode: Opcode::of(&cdb),
            expected,
            attribute: TaskAttribute::Simple,
            luns: &[],
            read_only: false,
        });
        let mut buffer = vec![0; 512];
        let mut moved = 0;
        while !matches!(step, Step::Respond(_)) {
            moved += u32::from(matches!(
                step,
                Step::Block(BlockOp::Read { .. } | BlockOp::Write { .. })
            ));
            step = command.advance(&rig.lu, StepResult::Done, &mut buffer);
        }
        assert_eq!(moved, 1);
    }
}
