//! Runs some seeds, and repeats one of them.

use std::io::Write as _;
use std::process::Command;
use std::time::Duration;

use riser_sim::nics::{NicFault, Place};
use riser_sim::plan::{Fault, Protocol, Trouble};
use riser_sim::rival::RivalPlan;
use riser_sim::{Plan, run};

/// Seeds for which we compare all bytes.
const COMPARED: [u64; 6] = [1, 2, 3, 7, 10, 12];

/// Set to the seed for another process, which must run it and print the outcome.
const SEED: &str = "RISER_SIM_TRACE_OF";

#[test]
fn same_seed_repeats_run() {
    let outcome = |seed| run(&Plan::of(seed)).unwrap();
    for seed in COMPARED {
        assert_eq!(outcome(seed), outcome(seed), "seed {seed}");
    }
    assert_ne!(outcome(1).trace, outcome(2).trace);
}

#[test]
fn processes_send_same_bytes() {
    if let Ok(seed) = std::env::var(SEED) {
        let outcome = run(&Plan::of(seed.parse().unwrap())).unwrap();
        let text = format!("\n{outcome:?}\n");
        std::io::stdout().write_all(text.as_bytes()).unwrap();
        return;
    }
    for seed in COMPARED {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes_send_same_bytes", "--nocapture"])
            .env(SEED, seed.to_string())
            .output()
            .unwrap();
        let expected = format!("\n{:?}\n", run(&Plan::of(seed)).unwrap());
        let output = String::from_utf8(child.stdout).unwrap();
        assert!(output.contains(&expected), "{expected}{output}");
    }
}

/// Uses `RISER_SIM_SEEDS` to set the number of seeds.
#[test]
fn first_seeds_pass() {
    let seeds = std::env::var("RISER_SIM_SEEDS").map_or(8, |seeds| seeds.parse().unwrap());
    for seed in 1..=seeds {
        if let Err(failure) = run(&Plan::of(seed)) {
            panic!("{failure}");
        }
    }
}

/// Creates a plan where the target is stopped repeatedly while all protocols are active.
fn restarts(seed: u64, fault: Fault) -> Plan {
    let troubles = (1..=4).map(|n| Trouble {
        from: Duration::from_millis(20 * n),
        until: Duration::from_millis(20 * n + 10),
        fault,
    });
    Plan {
        workers: 2,
        initiators: vec![Protocol::Srp, Protocol::Iser, Protocol::Iscsi],
        tasks: 3,
        commands: 60,
        blocks: 64,
        longest: 8,
        troubles: troubles.collect(),
        ..Plan::of(seed)
    }
}

#[test]
fn initiators_recover_after_target_loss() {
    let unplug = Fault::Nic(Place::Path(0), NicFault::Unplug);
    for fault in [Fault::CrashTarget, Fault::PowerCut, unplug] {
        for seed in 1..=5 {
            if let Err(failure) = run(&restarts(seed, fault)) {
                panic!("{failure}");
            }
        }
    }
}

/// Rivals that abort, reset, reserve and leave at random, together with our initiators.
#[test]
fn rivals_pass() {
    let rival = RivalPlan {
        connections: 2,
        depth: 8,
        commands: 60,
        functions: 4,
        ..RivalPlan::default()
    };
    for seed in 1..=10 {
        let reservations = [0, 12][seed as usize % 2];
        let rivals = [0, 8].map(|departures| RivalPlan {
            reservations,
            departures,
            ..rival
        });
        let plan = Plan {
            rivals: rivals.to_vec(),
            troubles: Vec::new(),
            timeout: Duration::from_secs(60),
            ..Plan::of(seed)
        };
        if let Err(failure) = run(&plan) {
            panic!("{failure}");
        }
    }
}

/// Connections are closed repeatedly. Their commands continue on other connections or are aborted.
#[test]
fn rivals_recover_commands_of_lost_connections() {
    for (seed, recovery_level) in (1..).zip([0, 1, 2, 2, 2, 2]) {
        let rival = RivalPlan {
            connections: 4,
            depth: 16,
            commands: 120,
            functions: 2,
            swaps: 4,
            recovery_level,
            breaks: 16,
            spoils: 8,
            ..RivalPlan::default()
        };
        // Ensures that there are commands to recover.
        let stalls = (0..6).map(|n| Trouble {
            from: Duration::from_millis(10 + 40 * n),
            until: Duration::from_millis(30 + 40 * n),
            fault: Fault::StallDisks,
        });
        let plan = Plan {
            seed,
            workers: 4,
            rivals: vec![rival; 2],
            connections: 4,
            recovery_level: 2,
            blocks: 512,
            longest: [8, 64, 300][seed as usize % 3],
            troubles: stalls.collect(),
            ..Plan::default()
        };
        assert!(plan.keeps_connections());
        if let Err(failure) = run(&plan) {
            panic!("{failure}");
        }
    }
}

/// A full window of commands is waiting for a disk with a small ring.
#[test]
fn stalled_disk_closes_no_connection() {
    for (seed, queue_depth) in (1..).zip([8, 128]) {
        let rival = RivalPlan {
            connections: 2,
            depth: 128,
            commands: 400,
            ..RivalPlan::default()
        };
        let stall = Trouble {
            from: Duration::from_millis(5),
            until: Duration::from_secs(4),
            fault: Fault::StallDisks,
        };
        let plan = Plan {
            seed,
            rivals: vec![rival; 2],
            connections: 2,
            queue_depth,
            ring: 64,
            troubles: vec![stall],
            ..Plan::default()
        };
        assert!(plan.keeps_connections() && !plan.is_quiet());
        if let Err(failure) = run(&plan) {
            panic!("{failure}");
        }
    }
}
