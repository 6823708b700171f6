//! Functions and commands that affect other initiators, or units that do not exist.

use std::sync::Arc;

use riser_scsi::attention::Attention;
use riser_scsi::device_server::Request;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{NexusId, PortName};
use riser_scsi::opcode::Opcode;
use riser_scsi::step::{Expected, Step, TaskAttribute};
use riser_scsi::task::NewTask;

use super::rig::script::{COMPLETE, FOREIGN, GOOD, Outcome, command, read10, scripts, write10};
use super::rig::{Peer, Rig};
use crate::fabric::task_mgmt::{Function, FunctionResponse};
use crate::fabric::{LunMap, Mapping, Unit};
use crate::iscsi::TaskState;
use crate::worker::fabrics::Input;

const NOT_AUTHORIZED: Outcome = Outcome::Function(FunctionResponse::NotAuthorized);

/// INQUIRY with 64 bytes of data.
const STANDARD: [u8; 6] = [0x12, 0, 0, 0, 64, 0];

/// INQUIRY for the unit serial number page.
const SERIAL: [u8; 6] = [0x12, 1, 0x80, 0, 64, 0];

/// Functions that affect the commands of other initiators.
fn shared_functions<P: Peer>() -> impl Iterator<Item = Function> {
    let own = [Function::AbortTask, Function::AbortTaskSet];
    let all = P::FUNCTIONS.iter().copied();
    all.filter(move |function| !own.contains(function))
}

/// Adds a task of another worker and nexus to a unit.
fn register_foreign(unit: &Unit, nexus: NexusId) -> riser_scsi::task::TaskKey {
    let lun = (FOREIGN, LunId::ZERO);
    let entered = unit.register(nexus, NewTask::default(), lun, false, None);
    entered.unwrap().0
}

/// Returns the unit attention of a nexus, if there is one.
fn attention(unit: &Unit, nexus: NexusId) -> Option<riser_scsi::sense::AdditionalSense> {
    let request = Request {
        nexus,
        cdb: &[0; 6],
        opcode: Opcode::of(&[0; 6]),
        expected: Expected::default(),
        attribute: TaskAttribute::Simple,
        luns: &[],
        read_only: false,
    };
    let (_, step) = unit.lu.start(&request);
    let Step::Respond(response) = step else {
        panic!("{step:?}");
    };
    response.parsed_sense().map(|sense| sense.additional)
}

/// A reset affects other nexuses when it aborts their commands. It doesn't matter if the connection
/// which requested it is closed before the commands complete.
fn reset_notifies_others_after_connection_loss<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let other = NexusId(99);
    let port = |name: &str| PortName::Iscsi(name.into());
    let initiator = port("iqn.2026-01.a:other,i,0x000000000001");
    let target = port("iqn.2026-01.a:t0,t,0x0001");
    rig.gate.add_nexus(other, &initiator, &target);
    let unit = Arc::clone(&rig.units[0]);
    assert!(attention(&unit, other).is_some(), "power on");
    let key = register_foreign(&unit, other);
    rig.manage(0, 3, Function::LogicalUnitReset, 0);
    rig.complete_all();
    assert_eq!(rig.responses(), [], "it waits for the other's command");
    rig.pass(0, Input::Disconnected);
    let _ = unit.remove(key);
    assert_eq!(unit.management().resets, 1);
    let reset = Attention::DeviceReset.sense().additional;
    assert_eq!(attention(&unit, other), Some(reset));
    rig.close();
}

/// An initiator without write access must not abort commands of other initiators.
fn read_only_lun_refuses_functions_for_others<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let unit = Arc::clone(&rig.units[0]);
    let mapping = rig.gate.mappings[0].clone();
    let luns = |read_only: &[bool]| {
        let luns = (0..).zip(read_only).map(|(lun, read_only)| {
            let mapping = Mapping {
                read_only: *read_only,
                ..mapping.clone()
            };
            (LunId::new(lun).unwrap(), mapping)
        });
        Input::Luns(LunMap::new(luns).into())
    };
    rig.pass(0, luns(&[true]));
    for function in shared_functions::<P>() {
        assert_eq!(rig.run_function(0, function), NOT_AUTHORIZED);
    }
    assert_eq!(unit.management().resets, 0);
    assert_eq!(rig.run_function(0, Function::AbortTaskSet), COMPLETE);
    rig.pass(0, luns(&[true, false]));
    if P::FUNCTIONS.contains(&Function::TargetWarmReset) {
        // A target reset affects all units with write access.
        assert_eq!(rig.run_function(0, Function::TargetWarmReset), COMPLETE);
    } else {
        rig.manage_lun(0, 1, 5, Function::LogicalUnitReset, 0);
        rig.complete_all();
        assert_eq!(rig.outcome(5), COMPLETE);
    }
    assert_eq!(unit.management().resets, 1);
    rig.close();
}

/// If a LUN was moved to a different unit, an initiator using this LUN still refers to the previous
/// unit. Until it receives a response which reports the change, a function must only abort its own
/// commands there.
fn functions_for_moved_lun_spare_others<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let unit = Arc::clone(&rig.units[0]);
    let (luns, _before) = rig.moved_lun();
    rig.pass(0, Input::Luns(luns.into()));
    let key = register_foreign(&unit, NexusId(77));
    for function in [Function::ClearTaskSet, Function::LogicalUnitReset] {
        assert_eq!(rig.run_function(0, function), COMPLETE);
    }
    let has_target_reset = P::FUNCTIONS.contains(&Function::TargetWarmReset);
    let reset = |rig: &mut Rig<P>, expected| {
        if has_target_reset {
            let response = rig.run_function(0, Function::TargetWarmReset);
            assert_eq!(response, expected);
        }
    };
    reset(&mut rig, NOT_AUTHORIZED);
    assert_eq!((unit.tasks(), unit.management().resets), (1, 0));
    let _ = unit.remove(key);
    let Outcome::Status(2, Some((6, ..))) = rig.run(0, write10(0, &[7; 512]).tag(4)) else {
        panic!("no unit attention");
    };
    assert_eq!(rig.run(0, command(&STANDARD).tag(5).into(64)), GOOD);
    reset(&mut rig, NOT_AUTHORIZED);
    assert_eq!(rig.run(0, command(&SERIAL).tag(7).into(64)), GOOD);
    reset(&mut rig, COMPLETE);
    if !has_target_reset {
        let response = rig.run_function(0, Function::LogicalUnitReset);
        assert_eq!(response, COMPLETE);
    }
    assert_eq!(unit.management().resets, 1);
    rig.close();
}

fn lost_response_does_not_identify_unit<P: Peer>() {
    for was_sent in [true, false] {
        let mut rig = Rig::<P>::start();
        let luns = Arc::new(rig.moved_lun().0);
        rig.pass(0, Input::Luns(Arc::clone(&luns)));
        rig.stalled = true;
        rig.submit(0, command(&SERIAL).tag(7).into(64));
        assert!(P::transmit(&mut rig, was_sent));
        rig.pump();
        assert_eq!(luns.expected(0).is_stale(), !was_sent);
        rig.stalled = false;
        rig.close();
    }
}

/// A function aborts the commands of other initiators, which get a response.
fn cleared_commands_of_others_get_response<P: Peer>() {
    let mut rig = Rig::<P>::start();
    let other = rig.add_session(2);
    rig.submit(other, command(&[0x35]).tag(5));
    rig.manage(0, 6, Function::ClearTaskSet, 0);
    rig.complete_all();
    let mut statuses = rig.statuses();
    statuses.sort_unstable();
    assert_eq!(statuses, [(5, 0x40), (6, 0)], "TAS is one");
    // There is no unit attention as well.
    assert_eq!(rig.run(other, command(&[0; 6]).tag(8)), GOOD);
    rig.close();
}

/// A command aborted by another nexus completes with TASK ABORTED when its block operation has
/// completed.
fn command_aborted_by_other_nexus_gets_response<P: Peer>() {
    for reads in [true, false] {
        let mut rig = Rig::<P>::start();
        let data = [9; 1024];
        rig.submit(
            0,
            if reads {
                read10(0, 2)
            } else {
                write10(0, &data)
            },
        );
        assert_eq!(rig.states(0), [TaskState::Block]);
        let function = riser_scsi::task::TaskManagement::ClearTaskSet;
        let aborted = rig.units[0].manage(NexusId(98), function).aborted;
        assert_eq!(aborted.len(), 1);
        rig.abort(aborted[0]);
        rig.complete_all();
        assert_eq!(rig.statuses(), [(1, 0x40)]);
        assert_eq!(rig.disks[0][..1024], [0; 1024]);
        assert_eq!(
            (rig.units[0].tasks(), rig.pool.free()),
            (0, rig.pool.size())
        );
        assert_eq!(rig.run(0, read10(0, 1)), GOOD);
        rig.close();
    }
}

/// SCST 93: INQUIRY with a zero length for an unknown unit.
fn scst_93_inquiry_to_missing_unit_succeeds<P: Peer>() {
    let mut rig = Rig::<P>::start();
    for (tag, lun, len) in [(1, 77, 36), (2, 9, 0), (3, 77, 0)] {
        let inquiry = command(&[0x12, 0, 0, 0, len, 0]).tag(tag).lun(lun);
        assert_eq!(rig.run(0, inquiry.into(len.into())), GOOD);
    }
    assert_eq!(rig.memory[&1][0], 0x7f);
    rig.close();
}

scripts! {
    scst_93_inquiry_to_missing_unit_succeeds,
    reset_notifies_others_after_connection_loss,
    read_only_lun_refuses_functions_for_others,
    functions_for_moved_lun_spare_others,
    lost_response_does_not_identify_unit,
    cleared_commands_of_others_get_response,
    command_aborted_by_other_nexus_gets_response,
}
