//! Initiators with all protocols and clients of an NBD export read and write the same blocks of a
//! running `riserd`. Each of them uses a separate network, which can fail in many ways.
//!
//! A history checks every block that is read ([`riser_tests::history`]): there must be an order of
//! all acknowledged writes that is consistent with all responses. Reads and writes must never fail,
//! and must continue to work after each fault, because an initiator retries any command without a
//! response. It doesn't retry COMPARE AND WRITE, which is a raw command. If there is no response,
//! it may or may not have been executed, and the history allows both. Some of them must be
//! successful.
//!
//! | fault | effect |
//! | --- | --- |
//! | frames lost in one or both directions | lost commands, data, responses and acknowledgements; sessions that were only closed on one side |
//! | frames delayed and delivered later | data of an old session is received at the same time as data of a new session |
//! | a storm | loss, duplication, reordering and corruption of many frames at the same time |
//! | a link down, an address removed | sockets and devices that fail on either side |
//! | a session replaced during a fault | a login for a session with outstanding commands |
//! | the daemon killed and restarted | acknowledged data must be present, and other commands are retried |
//!
//! The load also uses WRITE SAME with zeroes and COMPARE AND WRITE.
//!
//! Some frames are always lost, delayed, duplicated or corrupted. `RISER_LINEAR_OPERATIONS` sets
//! the number of operations (default 3,000), and `RISER_LINEAR_SEED` sets the random seed. `cargo
//! xtask linear` runs a million operations.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]
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

/// Protocols used by the initiators, with a host for each of them.
const SCHEMES: [&str; 4] = ["srp", "iser", "iscsi", "iscsi"];
/// Host on which `riser` exports the unit via NBD, using this protocol.
const EXPORTER: usize = SCHEMES.len() + 1;
const EXPORTED: &str = "iser";

const TARGET: usize = 0;
const HOSTS: usize = EXPORTER + 1;

/// Number of threads per initiator, and of clients for the export.
const THREADS: u64 = 6;

/// Interval for printing the progress.
const REPORT: Duration = Duration::from_secs(10);

/// Starts the daemon on host 0.
fn serve(wire: &Wire) -> Pair {
    wire.hosts[TARGET].run(|| {
        let backend = format!(
            "{{ kind: file, path: DIR/disk, size: {SIZE}, create: true, write_cache: true }}\n\
             workers: {{ count: 2 }}"
        );
        Pair::with_target(0, &backend, &portals_at(address(TARGET)))
    })
}

/// Logs in with all initiators and starts the load.
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

/// Runs a command on a host. Arguments are separated by spaces.
fn on(wire: &Wire, host: usize, command: String) {
    wire.hosts[host].run(move || sh(&command)).unwrap();
}

/// Number of fault types.
const KINDS: u64 = 9;

/// Fault type that kills the daemon. This is less frequent, because all initiators have to log in
/// again.
const KILL: u64 = 8;

/// Kills the daemon and starts it again after a short time.
fn kill(wire: &Wire, pair: Pair, chance: &mut Chance) -> Pair {
    let rest = chance.between(Duration::ZERO, Duration::from_millis(300));
    // This must use the network of its host.
    wire.hosts[TARGET].run(move || {
        let mut pair = pair;
        assert!(pair.kill(), "it has ended by itself");
        thread::sleep(rest);
        pair.serve();
        pair
    })
}

/// Runs a single fault of this type from start to end. Returns its name.
fn trouble(wire: &Wire, contest: &Contest, chance: &mut Chance, kind: u64) -> &'static str {
    // This is either longer than the timeout for an attempt, or just long enough to lose some
    // frames.
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
fn failing_networks_keep_blocks_linearizable() {
    let seed = setting("RISER_LINEAR_SEED", 0x11ea);
    let operations = setting("RISER_LINEAR_OPERATIONS", 3_000);
    println!(
        "RISER_LINEAR_SEED={seed} RISER_LINEAR_OPERATIONS={operations} cargo test -p riser-tests \
         --test linear"
    );
    let wire = match Wire::new(HOSTS, seed) {
        Ok(wire) => Arc::new(wire),
        Err(why) => {
            return skip("failing_networks_keep_blocks_linearizable", &why);
        }
    };
    let mut pair = serve(&wire);
    let mut contest = begin(&wire, &pair, seed);
    let mut chance = Chance::new(seed, 0);
    let (started, mut reported) = (Instant::now(), Instant::now());
    let (mut troubles, mut kills, mut versions) = (0, 0, 0);
    let mut last = "none";
    while contest.done() < operations || troubles < KINDS {
        // If the delay is short, some hosts have not yet recovered from the previous fault.
        let calm = [1, 10, 50][chance.below(3) as usize];
        contest.wait_progress(&format!("after trouble {troubles}, {last}"), calm);
        versions = versions.max(contest.versions());
        if reported.elapsed() > REPORT {
            let (done, seconds) = (contest.done(), started.elapsed().as_secs());
            println!("{done} operations, {troubles} troubles in {seconds} s");
            reported = Instant::now();
        }
        // Use each type once, then a random type.
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
    contest.wait_progress("at the end", 8);
    let (done, took) = (contest.done(), started.elapsed().as_secs_f64());
    let swapped = contest.swapped();
    assert!(swapped > 0, "no COMPARE AND WRITE has succeeded");
    println!(
        "result: {done} operations in {took:.0} s, {swapped} successful COMPARE AND WRITEs, {troubles} troubles, \
         {kills} of them kills, at most {versions} versions kept: {}",
        contest.end()
    );
    // If no command or lock was leaked, the daemon must be able to exit.
    pair.riser(&["detach", "0"]);
    pair.terminate();
}
