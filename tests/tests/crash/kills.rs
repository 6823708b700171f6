//! Kills or stops the daemon and restarts it under load.
//!
//! A file keeps its data if the daemon is killed, so all acknowledged writes must be present.
//!
//! `RISER_CRASH_ROUNDS` sets the number of times to use SIGKILL (default 3), and `RISER_CRASH_SEED`
//! selects the times. If the daemon was stopped and has already exited when we send the signal,
//! this is not counted.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use riser_target::backend::Layout;
use riser_testkit::programs::Pair;
use riser_tests::contest::{Contest, SIZE, portals, url};
use riser_tests::history::BLOCK;
use riser_tests::load::{Chance, setting};

struct Case {
    name: &'static str,
    schemes: [&'static str; 2],
    network: u8,
    write_cache: bool,
    /// Store protection information of type 1.
    protection: bool,
    /// Also run clients using `riser attach --nbd` for each of these protocols.
    exports: &'static [&'static str],
}

fn killed(case: &Case) {
    let &Case {
        name,
        schemes,
        network,
        write_cache,
        protection,
        exports,
    } = case;
    let seed = setting("RISER_CRASH_SEED", 0x0c0f);
    let rounds = setting("RISER_CRASH_ROUNDS", 3);
    println!(
        "RISER_CRASH_SEED={seed} RISER_CRASH_ROUNDS={rounds} cargo test -p riser-tests --test \
         crash {name}"
    );
    let keys = match protection {
        true => ", protection: { type: 1 }",
        false => "",
    };
    let backend = format!(
        "{{ kind: file, path: DIR/disk, size: {SIZE}, create: true, write_cache: {write_cache}{keys} }}"
    );
    let mut pair = Pair::with_target(network, &backend, &portals(network));
    let mut contest = Contest::new(&schemes, network, seed);
    for scheme in exports {
        let socket = pair.path(&format!("nbd-{scheme}"));
        let at = url(scheme, Ipv4Addr::new(127, 0, network, 1));
        pair.riser(&["attach", &at, "--nbd", &socket, "--shared"]);
        contest.add_nbd(socket.as_ref());
    }
    let mut chance = Chance::new(seed, 0);
    let (mut round, mut kills) = (0, 0);
    while kills < rounds {
        contest.wait_progress(&format!("before restart {round}"), 8);
        thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(10)));
        // A kill can also happen while the daemon is starting, or while it's stopping.
        match chance.below(4) {
            0 => pair.terminate(),
            1 => {
                pair.send_sigterm();
                thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(20)));
                kills += u64::from(pair.kill());
            }
            2 => {
                kills += u64::from(pair.kill());
                if protection {
                    note_torn_blocks(&pair, &contest);
                }
                pair.serve();
                thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(60)));
                kills += u64::from(pair.kill());
            }
            _ => kills += u64::from(pair.kill()),
        }
        if protection {
            note_torn_blocks(&pair, &contest);
        }
        pair.serve();
        round += 1;
        if chance.below(3) == 0 {
            contest.wait_progress(&format!("after restart {round}"), 2);
            contest.initiators[chance.below(2) as usize].replace();
        }
    }
    contest.wait_progress("at the end", 8);
    let work = contest.end();
    println!("result: {kills} kills in {round} rounds, during {work}");
}

/// The kernel may interrupt a write between two pages, which can be within a block. The daemon must
/// then repair the protection information of this block.
fn note_torn_blocks(pair: &Pair, contest: &Contest) {
    let frames = Layout::new(BLOCK as u32);
    let file = File::open(pair.path("disk")).unwrap();
    let mut bytes = [0; BLOCK];
    for block in 0..SIZE / BLOCK as u64 {
        let at = frames.medium_offset(block * BLOCK as u64);
        file.read_exact_at(&mut bytes, at).unwrap();
        contest.history().tear(block, &bytes).unwrap();
    }
}

#[test]
fn killed_over_srp_and_iser() {
    killed(&Case {
        name: "killed_over_srp_and_iser",
        schemes: ["srp", "iser"],
        network: 167,
        write_cache: true,
        protection: false,
        exports: &[],
    });
}

#[test]
fn killed_over_iser_and_iscsi() {
    killed(&Case {
        name: "killed_over_iser_and_iscsi",
        schemes: ["iser", "iscsi"],
        network: 168,
        write_cache: true,
        protection: false,
        exports: &[],
    });
}

#[test]
fn killed_over_iscsi_and_srp_uncached() {
    killed(&Case {
        name: "killed_over_iscsi_and_srp_uncached",
        schemes: ["iscsi", "srp"],
        network: 169,
        write_cache: false,
        protection: false,
        exports: &[],
    });
}

#[test]
fn killed_through_nbd() {
    killed(&Case {
        name: "killed_through_nbd",
        schemes: ["iscsi", "iser"],
        network: 170,
        write_cache: true,
        protection: false,
        exports: &["srp", "iser", "iscsi"],
    });
}

#[test]
fn killed_with_protected_disk() {
    killed(&Case {
        name: "killed_with_protected_disk",
        schemes: ["iscsi", "srp"],
        network: 178,
        write_cache: true,
        protection: true,
        exports: &[],
    });
}
