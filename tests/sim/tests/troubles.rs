//! Peers that cheat, devices that fail, and initiators with the same names, each by itself.

use std::time::Duration;

use riser_sim::cheat::CheatPlan;
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
        });
        pass(&Plan {
            cheats: cheats.to_vec(),
            ..busy(seed)
        });
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
