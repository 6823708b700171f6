//! Administrative changes and exits of the target process, one at a time.

use std::time::Duration;

use riser_sim::admin::{AdminFault, Refusal};
use riser_sim::plan::{Fault, Plan, ProcessFault, Protocol, Trouble};
use riser_sim::rival::RivalPlan;
use riser_sim::run;

const ALL: [Protocol; 3] = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];

fn pass(plan: &Plan) {
    if let Err(failure) = run(plan) {
        panic!("{failure}");
    }
}

/// Creates a plan with all protocols and a fault that occurs twice, for a few milliseconds each.
fn during(seed: u64, length: u64, fault: Fault) -> Plan {
    let trouble = |from| Trouble {
        from: Duration::from_millis(from),
        until: Duration::from_millis(from + length),
        fault,
    };
    Plan {
        seed,
        workers: 2,
        initiators: ALL.to_vec(),
        tasks: 2,
        commands: 60,
        troubles: vec![trouble(5), trouble(12 + length)],
        ..Plan::default()
    }
}

#[test]
fn unit_changes_are_harmless_without_faults() {
    for (seed, change) in (1..).zip([
        AdminFault::AddLun,
        AdminFault::RemoveLun,
        AdminFault::ReplaceLun,
        AdminFault::GrowDisk,
        AdminFault::GrowLun,
        AdminFault::ReadOnly,
        AdminFault::Limit(2000),
    ]) {
        let plan = during(seed, 20, Fault::Admin(change));
        assert!(plan.is_quiet(), "nothing may fail: {change:?}");
        pass(&plan);
    }
}

#[test]
fn rejected_change_is_not_noticed() {
    for (seed, refusal) in (1..).zip([
        Refusal::NoFile,
        Refusal::Shrinks,
        Refusal::Restart,
        Refusal::OtherFile,
        Refusal::TcpPortal,
        Refusal::RdmaPortal,
        Refusal::NotKept,
    ]) {
        let plan = during(seed, 20, Fault::Admin(AdminFault::Refuse(refusal)));
        assert!(plan.is_quiet(), "nothing may fail: {refusal:?}");
        pass(&plan);
    }
}

#[test]
fn denied_initiator_has_no_session() {
    for (index, protocol) in ALL.into_iter().enumerate() {
        // Longer than the target waits for the logout.
        let plan = during(1, 8_000, Fault::Admin(AdminFault::Deny(index)));
        pass(&Plan {
            private_units: protocol == Protocol::Iscsi,
            ..plan
        });
    }
}

#[test]
fn portals_and_target_may_be_removed() {
    let portals = ALL.map(|protocol| AdminFault::RemovePortal(0, protocol));
    let changes = portals.into_iter().chain([AdminFault::RemoveTarget]);
    for (seed, change) in (1..).zip(changes) {
        for length in [3, 7_000] {
            pass(&during(seed, length, Fault::Admin(change)));
        }
    }
}

/// Checks reservations: a restart must keep persistent reservations, an upgrade must keep all
/// reservations.
#[test]
fn restart_and_upgrade_lose_nothing() {
    let rival = RivalPlan {
        depth: 4,
        commands: 120,
        reservations: 12,
        ..RivalPlan::default()
    };
    for fault in [
        ProcessFault::Restart,
        ProcessFault::Upgrade,
        ProcessFault::FailedUpgrade,
    ] {
        for seed in 1..=3 {
            pass(&Plan {
                rivals: vec![rival; 2],
                ..during(seed, 1, Fault::Process(fault))
            });
        }
    }
}

/// Data that was acknowledged before the process has exited must survive a power loss.
#[test]
fn restart_survives_power_loss() {
    for seed in 1..=3 {
        let mut plan = during(seed, 4, Fault::Process(ProcessFault::Restart));
        plan.troubles[1] = Trouble {
            from: Duration::from_millis(8),
            until: Duration::from_millis(9),
            fault: Fault::PowerCut,
        };
        pass(&plan);
    }
}

#[test]
fn worker_may_fail_or_stall() {
    for (seed, fault) in (1..).zip([
        ProcessFault::FailWorker(0),
        ProcessFault::FailWorker(1),
        ProcessFault::StallWorker(0),
        ProcessFault::StallWorker(1),
    ]) {
        for length in [2, 3_000] {
            pass(&during(seed, length, Fault::Process(fault)));
        }
    }
}

/// A sequence in which each operation starts in the middle of the other.
#[test]
fn upgrade_may_overlap_change() {
    let change = |fault| Fault::Admin(fault);
    let trouble = |from, until, fault| Trouble {
        from: Duration::from_micros(from),
        until: Duration::from_micros(until),
        fault,
    };
    for seed in 1..=3 {
        let plan = during(seed, 1, Fault::Process(ProcessFault::Upgrade));
        pass(&Plan {
            troubles: vec![
                trouble(4_990, 30_000, change(AdminFault::AddLun)),
                trouble(5_000, 5_100, Fault::Process(ProcessFault::Upgrade)),
                trouble(5_010, 40_000, change(AdminFault::GrowLun)),
                trouble(5_020, 60_000, change(AdminFault::ReplaceLun)),
            ],
            ..plan
        });
    }
}
