//! Initiators of all protocols, and clients of an NBD export, that write and read the same blocks
//! of one running `riserd`, each over a network of its own that fails in every way it can.
//!
//! A history judges each block that is read ([`riser_tests::history`]): there is one order of all
//! acknowledged writes that explains every answer. No read and no write fails, and after each trouble
//! all of them go on, because an initiator repeats what was not answered. It does not repeat a
//! COMPARE AND WRITE, which is a raw command: one that is not answered may have been carried out or
//! not, so the history allows both. Some of them must succeed.
//!
//! | trouble | what it makes happen |
//! | --- | --- |
//! | frames lost, one way or both | lost commands, data, answers and acknowledgements; sessions that only one end has given up |
//! | frames held back, and delivered afterwards | what an old session has sent arrives beside its successor |
//! | a storm | loss, repetition, disorder and wrong bytes in many frames at once |
//! | a link down, an address gone | sockets and devices that fail, at either end |
//! | a session replaced meanwhile | a login over a session with commands outstanding |
//! | the daemon killed, and started again | what it has acknowledged is there, and what it has not comes again |
//!
//! Writes of zeroes (WRITE SAME) and COMPARE AND WRITE are among the operations.
//!
//! Some frames are lost, late, repeated or spoiled all the time. `RISER_LINEAR_OPERATIONS` sets how
//! many operations are judged (default 3,000), `RISER_LINEAR_SEED` what happens to them. `cargo
//! xtask linear` runs a million.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and figures")]
#![allow(unsafe_code, reason = "network namespaces and devices of its own")]

#[path = "../adversary/net.rs"]
#[allow(dead_code, reason = "shared with another test")]
mod net;
mod wire;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use net::sh;
use riser_testkit::programs::{Pair, skip};
use riser_tests::contest::{Contest, Initiator, SIZE, portals_at, url};
use riser_tests::load::{Chance, setting};
use wire::{Block, Weather, Wire, address};

/// Protocols of the initiators; a host has one each.
const SCHEMES: [&str; 4] = ["srp", "iser", "iscsi", "iscsi"];
/// The host on which `riser` exports the unit by NBD, over this protocol.
const EXPORTER: usize = SCHEMES.len() + 1;
const EXPORTED: &str = "iser";

const TARGET: usize = 0;
const HOSTS: usize = EXPORTER + 1;

/// Threads of each initiator, and clients of the export.
const THREADS: u64 = 6;

/// How often progress is printed.
const REPORT: Duration = Duration::from_secs(10);

/// The daemon, at host 0.
fn serve(wire: &Wire) -> Pair {
    wire.hosts[TARGET].run(|| {
        let backend = format!(
            "{{ kind: file, path: DIR/disk, size: {SIZE}, create: true, write_cache: true }}\n\
             workers: {{ count: 2 }}"
        );
        Pair::with_target(0, &backend, &portals_at(address(TARGET)))
    })
}

/// Logs everyone in, and sets them to work.
fn begin(wire: &Wire, pair: &Pair, seed: u64) -> Contest {
    let initiators = SCHEMES.iter().zip(1..).map(|(&scheme, host)| {
        let log_in = move || Initiator::new(scheme, address(TARGET), address(host), host as u16);
        wire.hosts[host].run(log_in)
    });
    let mut contest = Contest::of(initiators.collect(), THREADS, seed);
    let socket = pair.path("nbd");
    let mut attach = pair.command(&["attach", &url(EXPORTED, address(TARGET)), "--nbd", &socket]);
    let attached = wire.hosts[EXPORTER].run(move || attach.status());
    assert!(attached.unwrap().success(), "riser attach");
    contest.add_nbd(socket.as_ref());
    contest
}

/// Runs commands on a host, whose words are separated by spaces.
fn on(wire: &Wire, host: usize, command: String) {
    wire.hosts[host].run(move || sh(&command)).unwrap();
}

/// Kinds of trouble.
const KINDS: u64 = 9;

/// The kind that ends the daemon. It is rarer than the others: after it all log in again.
const KILL: u64 = 8;

/// Kills the daemon, and starts it again after a moment.
fn kill(wire: &Wire, pair: Pair, chance: &mut Chance) -> Pair {
    let rest = chance.between(Duration::ZERO, Duration::from_millis(300));
    // It must have the network of its host.
    wire.hosts[TARGET].run(move || {
        let mut pair = pair;
        assert!(pair.kill(), "it has ended by itself");
        thread::sleep(rest);
        pair.serve();
        pair
    })
}

/// One trouble of a kind, from its begin to its end. Returns its name.
fn trouble(wire: &Wire, contest: &Contest, chance: &mut Chance, kind: u64) -> &'static str {
    // Longer than it takes to give up an attempt, or just long enough to lose a few frames.
    let most = [30, 300, 1500][chance.below(3) as usize];
    let span = chance.between(Duration::from_millis(1), Duration::from_millis(most));
    let host = 1 + chance.below(HOSTS as u64 - 1) as usize;
    let block = [Block::Lost, Block::Held][chance.below(2) as usize];
    let blocked = [[block, block], [block, Block::None], [Block::None, block]];
    let storm = Weather {
        lost: chance.below(3000),
        repeated: chance.below(3000),
        spoiled: chance.below(1000),
        late: chance.below(5000),
        by: Duration::from_millis(1 + chance.below(40)),
        blocked: [Block::None; 2],
    };
    let apart = |blocked| Weather {
        blocked,
        ..Weather::FAIR
    };
    let during = |hosts: &[usize], weather| {
        hosts.iter().for_each(|&host| wire.change(host, weather));
        thread::sleep(span);
        hosts
            .iter()
            .for_each(|&host| wire.change(host, Weather::FAIR));
    };
    let everyone: Vec<usize> = (1..HOSTS).collect();
    match kind {
        0 => {
            during(&[host], apart(blocked[0]));
            "a host apart"
        }
        1 => {
            during(&[host], apart(blocked[1 + chance.below(2) as usize]));
            "a host apart one way"
        }
        2 => {
            during(&everyone, apart(blocked[chance.below(3) as usize]));
            "the target apart"
        }
        3 => {
            during(&[host], storm);
            "a storm at a host"
        }
        4 => {
            during(&everyone, storm);
            "a storm at all"
        }
        5 => {
            let host = chance.below(HOSTS as u64) as usize;
            on(wire, host, "ip link set eth0 down".to_owned());
            thread::sleep(span);
            on(wire, host, "ip link set eth0 up".to_owned());
            "a link down"
        }
        6 => {
            let host = chance.below(HOSTS as u64) as usize;
            let change = |verb| format!("ip addr {verb} {}/24 dev eth0", address(host));
            on(wire, host, change("del"));
            thread::sleep(span);
            on(wire, host, change("add"));
            "an address gone"
        }
        _ => {
            let initiator = &contest.initiators[chance.below(SCHEMES.len() as u64) as usize];
            thread::scope(|scope| {
                let replaced = scope.spawn(|| initiator.replace());
                during(&everyone, storm);
                replaced.join().unwrap();
            });
            "a session replaced in a storm"
        }
    }
}

#[test]
fn initiators_on_networks_that_fail_agree_about_every_block() {
    let seed = setting("RISER_LINEAR_SEED", 0x11ea);
    let operations = setting("RISER_LINEAR_OPERATIONS", 3_000);
    println!(
        "RISER_LINEAR_SEED={seed} RISER_LINEAR_OPERATIONS={operations} cargo test -p riser-tests \
         --test linear"
    );
    let wire = match Wire::new(HOSTS, seed) {
        Ok(wire) => Arc::new(wire),
        Err(why) => {
            return skip(
                "initiators_on_networks_that_fail_agree_about_every_block",
                &why,
            );
        }
    };
    let mut pair = serve(&wire);
    let mut contest = begin(&wire, &pair, seed);
    let mut chance = Chance::new(seed, 0);
    let (started, mut reported) = (Instant::now(), Instant::now());
    let (mut troubles, mut kills, mut versions) = (0, 0, 0);
    let mut last = "none";
    while contest.done() < operations || troubles < KINDS {
        // Some follow so soon that the one before is not over for everyone.
        let calm = [1, 10, 50][chance.below(3) as usize];
        contest.go_on(&format!("after trouble {troubles}, {last}"), calm);
        versions = versions.max(contest.versions());
        if reported.elapsed() > REPORT {
            let (done, seconds) = (contest.done(), started.elapsed().as_secs());
            println!("{done} operations, {troubles} troubles in {seconds} s");
            reported = Instant::now();
        }
        // Each kind once, and then any.
        let kind = match troubles < KINDS {
            true => troubles,
            false if chance.below(50) == 0 => KILL,
            false => chance.below(KILL),
        };
        last = match kind {
            KILL => {
                pair = kill(&wire, pair, &mut chance);
                kills += 1;
                "a kill of the daemon"
            }
            _ => trouble(&wire, &contest, &mut chance, kind),
        };
        troubles += 1;
    }
    contest.go_on("at the end", 8);
    let (done, took) = (contest.done(), started.elapsed().as_secs_f64());
    let swapped = contest.swapped();
    assert!(swapped > 0, "no COMPARE AND WRITE has succeeded");
    println!(
        "figure: {done} operations in {took:.0} s, {swapped} successful COMPARE AND WRITEs, {troubles} troubles, \
         {kills} of them kills, at most {versions} versions kept: {}",
        contest.end()
    );
    // A daemon that has lost no command and no lock ends by itself.
    pair.riser(&["detach", "0"]);
    pair.terminate();
}
