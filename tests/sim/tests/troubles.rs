//! Cheating peers, failing devices and networks, and initiators that return or use the same names,
//! one at a time.

use std::time::Duration;

use riser_sim::cheat::{Aim, CheatPlan};
use riser_sim::disks::DiskFault;
use riser_sim::hog::{HogPlan, Load};
use riser_sim::keeper::SaveFailure;
use riser_sim::nics::{NicFault, Place};
use riser_sim::plan::{Fault, ProcessFault, Protocol, Trouble};
use riser_sim::rival::RivalPlan;
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
fn cheating_peers_do_not_affect_initiators() {
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
fn thieves_and_withholders_do_not_affect_initiators() {
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
            // Other protocols have no portal where they could trespass.
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
fn connections_survive_device_faults() {
    let faults = [
        NicFault::LateReceives(500),
        NicFault::BreakQp(0),
        NicFault::OverrunCq(1),
        NicFault::Narrow(Mtu::Mtu256),
        NicFault::FullSocket,
        NicFault::Unsegmentable,
        NicFault::Unplug,
    ];
    for (seed, fault) in (1..).zip(faults) {
        for place in [Place::Path(0), Place::Path(1), Place::Initiator(0)] {
            let troubles = (1..=3).map(|n| Trouble {
                from: Duration::from_millis(10 * n),
                until: Duration::from_millis(10 * n + 8),
                fault: Fault::Nic(place, fault),
            });
            pass(&Plan {
                paths: 2,
                // Segmented sends of the initiator are longer than the socket buffers.
                segments: 64,
                socket_room: 16,
                troubles: troubles.collect(),
                ..busy(seed)
            });
        }
    }
}

/// A trouble that starts at 10 ms, with this duration in milliseconds.
fn trouble(length: u64, fault: Fault) -> Trouble {
    Trouble {
        from: Duration::from_millis(10),
        until: Duration::from_millis(10 + length),
        fault,
    }
}

#[test]
fn place_may_be_deaf_or_mute() {
    let places = (0..3).map(Place::Initiator).chain([Place::Path(0)]);
    for (seed, place) in (1..).zip(places) {
        for fault in [Fault::Deaf(place), Fault::Mute(place)] {
            for length in [8, 3_000, 90_000] {
                pass(&Plan {
                    troubles: vec![trouble(length, fault)],
                    ..busy(seed)
                });
            }
        }
    }
}

#[test]
fn any_initiator_may_be_disconnected() {
    for index in 0..3 {
        for length in [8, 3_000, 90_000] {
            pass(&Plan {
                troubles: vec![trouble(length, Fault::Partition(index))],
                ..busy(1)
            });
        }
    }
}

/// Data of old connections arrives when there are new connections, even from a previous process.
#[test]
fn networks_may_delay_beyond_connection() {
    for seed in 1..=6 {
        let fault = Fault::Delay {
            share: 0.1,
            most: Duration::from_secs(5),
        };
        let kill = Fault::KillInitiator {
            index: seed as usize % 3,
            vanishes: false,
        };
        pass(&Plan {
            timeout: Duration::from_secs(1),
            troubles: vec![trouble(3_000, fault), trouble(40, kill)],
            ..busy(seed)
        });
    }
}

#[test]
fn initiator_may_restart_normally() {
    for (seed, index) in (1..).zip([0, 1, 2]) {
        for length in [1, 500] {
            pass(&Plan {
                troubles: vec![trouble(length, Fault::RestartInitiator(index))],
                ..busy(seed)
            });
        }
    }
}

/// Longer than the command timeout, so a command that waits for this disk would fail.
#[test]
fn stalled_private_disk_affects_only_owner() {
    for index in 0..3 {
        let plan = Plan {
            private_units: true,
            troubles: vec![trouble(
                100_000,
                Fault::Disk(DiskFault::StallDisk(1 + index)),
            )],
            ..busy(1)
        };
        let others = (0..3).filter(|one| *one != index);
        assert!(others.into_iter().all(|one| plan.is_quiet_for(one)));
        assert!(!plan.is_quiet_for(index));
        pass(&plan);
    }
}

/// After a power loss, all persistent reservations that were acknowledged must exist, but none that
/// were rejected.
#[test]
fn state_directory_may_fail() {
    let rival = RivalPlan {
        depth: 4,
        commands: 120,
        reservations: 12,
        ..RivalPlan::default()
    };
    for failure in [SaveFailure::Full, SaveFailure::Broken] {
        for seed in 1..=3 {
            let cut = Trouble {
                from: Duration::from_millis(30),
                until: Duration::from_millis(31),
                fault: Fault::PowerCut,
            };
            pass(&Plan {
                rivals: vec![rival; 2],
                troubles: vec![trouble(60, Fault::FailSaves(failure)), cut],
                ..busy(seed)
            });
        }
    }
}

#[test]
fn initiator_may_move_or_meet_twin() {
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

/// Creates a plan with hogs, and initiators over all protocols without short timeouts.
fn hogs(seed: u64, hogs: Vec<HogPlan>) -> Plan {
    Plan {
        hogs,
        private_units: true,
        pause: Duration::from_secs(1),
        commands: 20,
        pool: 64 << 20,
        ring: 2047,
        workers: 1,
        ..busy(seed)
    }
}

/// A disk hangs while its commands occupy memory, ring entries and threads.
#[test]
fn hung_disk_delays_no_other_initiator() {
    let loads = [Load::Reads, Load::Writes, Load::Zeroes, Load::Mixed];
    for (seed, load) in (1..).zip(loads) {
        let hog = HogPlan {
            blocks_threads: seed % 2 == 0,
            depth: 127,
            blocks: if load == Load::Reads { 2048 } else { 8 },
            load,
            ..HogPlan::default()
        };
        let hang = trouble(30_000, Fault::Disk(DiskFault::HangDisk(0)));
        let upgrade = Trouble {
            from: Duration::from_secs(10),
            until: Duration::from_secs(11),
            fault: Fault::Process(ProcessFault::Upgrade),
        };
        let plan = Plan {
            troubles: vec![hang, upgrade],
            ..hogs(seed, vec![hog; 2])
        };
        assert!(plan.is_prompt() && plan.is_refused_upgrade(&upgrade));
        pass(&plan);
    }
}

#[test]
fn trickling_data_delay_no_other_initiator() {
    for (seed, rate) in (1..).zip([0, 2, 64 << 10, 1 << 20]) {
        let hog = |disk, load| HogPlan {
            disk,
            blocks: 2048,
            load,
            returns: true,
            ..HogPlan::default()
        };
        let deep = HogPlan {
            depth: 127,
            ..hog(Some(0), Load::Trickle(rate))
        };
        let ordered = HogPlan {
            blocks: 4096,
            ..hog(None, Load::OrderedTrickle(rate))
        };
        let plan = Plan {
            window: 64 << 10,
            ..hogs(seed, vec![deep, ordered])
        };
        assert!(plan.is_prompt());
        pass(&plan);
    }
}

/// If a disk has just started to hang, an upgrade is reverted, and only closes the sessions.
#[test]
fn upgrade_is_undone_if_disk_hangs() {
    let hog = HogPlan {
        depth: 16,
        ..HogPlan::default()
    };
    let upgrade = Trouble {
        from: Duration::from_secs(2),
        until: Duration::from_secs(3),
        fault: Fault::Process(ProcessFault::Upgrade),
    };
    let hang = trouble(40_000, Fault::Disk(DiskFault::HangDisk(0)));
    let plan = Plan {
        troubles: vec![hang, upgrade],
        ..hogs(1, vec![hog])
    };
    assert!(!plan.is_quiet() && plan.may_only_hang());
    pass(&plan);
}
