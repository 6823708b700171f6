//! Peers that cheat, devices that fail, and initiators with the same names, each by itself.

use std::time::Duration;

use riser_sim::cheat::{Aim, CheatPlan};
use riser_sim::nics::{NicFault, Place};
use riser_sim::plan::{Fault, Protocol, Trouble};
use riser_sim::{Plan, run};
use riser_transport::verbs::Mtu;

const ALL: [Protocol; 3] = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];

fn pass(plan: &Plan) {
    if let Err(failure) = run(plan) {
        panic!("{failure}");
    }
}

fn busy(seed: u64) -> Plan {
    Plan {
        seed,
        workers: 2,
        initiators: ALL.to_vec(),
        tasks: 3,
        commands: 40,
        ..Plan::default()
    }
}

#[test]
fn honest_initiators_go_on_beside_peers_that_cheat() {
    for seed in 1..=4 {
        let cheats = ALL.map(|protocol| CheatPlan {
            protocol,
            messages: 80,
            silences: 2,
            departures: 2,
            ..CheatPlan::default()
        });
        pass(&Plan {
            cheats: cheats.to_vec(),
            ..busy(seed)
        });
    }
}

#[test]
fn honest_initiators_go_on_beside_peers_that_want_their_data_or_hold_up_their_commands() {
    let aims = [
        Aim::Steal(0),
        Aim::StealBeside(1),
        Aim::Trespass,
        Aim::Withhold,
        Aim::Forge(1),
    ];
    for (seed, aim) in (1..).zip(aims) {
        let cheats = ALL.map(|protocol| CheatPlan {
            protocol,
            // Others have no portal by which they could trespass.
            aim: match protocol {
                Protocol::Srp => aim,
                _ if aim == Aim::Trespass => Aim::Withhold,
                _ => aim,
            },
            lasts: true,
            messages: 80,
            ..CheatPlan::default()
        });
        let plan = Plan {
            cheats: cheats.to_vec(),
            connections: 4,
            private_units: seed % 2 == 0,
            ..busy(seed)
        };
        assert!(plan.is_prompt(), "no command may take long");
        pass(&plan);
    }
}

#[test]
fn connections_survive_what_fails_at_a_device() {
    let faults = [
        NicFault::LateReceives(500),
        NicFault::BreakQp(0),
        NicFault::OverrunCq(1),
        NicFault::Narrow(Mtu::Mtu256),
    ];
    for (seed, fault) in (1..).zip(faults) {
        for place in [Place::Path(0), Place::Initiator(0)] {
            let troubles = (1..=3).map(|n| Trouble {
                from: Duration::from_millis(10 * n),
                until: Duration::from_millis(10 * n + 8),
                fault: Fault::Nic(place, fault),
            });
            pass(&Plan {
                troubles: troubles.collect(),
                ..busy(seed)
            });
        }
    }
}

#[test]
fn an_initiator_may_move_or_meet_another_of_its_names() {
    for (seed, protocol) in (1..).zip(ALL) {
        for fault in [Fault::MoveInitiator(0), Fault::Twin(0)] {
            let trouble = Trouble {
                from: Duration::from_millis(10),
                until: Duration::from_millis(200),
                fault,
            };
            pass(&Plan {
                initiators: vec![protocol],
                troubles: vec![trouble],
                ..busy(seed)
            });
        }
    }
}
