//! Two initiators with different protocols read and write the same few blocks of a unit while
//! sessions are replaced, commands are reset and the disk hangs.
//!
//! A history verifies every block that is read: acknowledged data must be present, and data that
//! was overwritten must never be returned. Initiators retry commands if there is no response, so a
//! write can be applied more than once until it completes ([`History::with_repeats`]).
//!
//! `RISER_CONFLICT_STEPS` sets the number of steps for each test (default 12), and
//! `RISER_CONFLICT_SEED` sets the random seed.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use riser_scsi::iscsi::pdu::{FromTarget, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt, StatSn};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::tcp;
use riser_tests::contest::{Contest, DISK, IQN, SIZE, portals};
use riser_tests::history::BLOCK;
use riser_tests::load::{Chance, setting};

fn seed(test: &str) -> (u64, u64) {
    let seed = setting("RISER_CONFLICT_SEED", 0x0c0f);
    let steps = setting("RISER_CONFLICT_STEPS", 12);
    println!(
        "RISER_CONFLICT_SEED={seed} RISER_CONFLICT_STEPS={steps} cargo test -p riser-tests --test \
         conflicting_writers {test}"
    );
    (seed, steps)
}

/// A file used in this test, which is removed on drop.
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A third initiator, used to reset the unit.
struct Resetter(tcp::Client);

impl Resetter {
    fn new(network: u8) -> Self {
        let to = format!("127.0.{network}.1:3260").parse().unwrap();
        Self(tcp::Client::login_at(to, IQN, 9, None).unwrap())
    }

    /// Sends a LOGICAL UNIT RESET and waits for the response.
    fn reset(&mut self) {
        let client = &mut self.0;
        let request = TmfRequest {
            immediate: true,
            function: TmfFunction::LogicalUnitReset,
            lun: [0; 8],
            itt: Itt(client.cmd_sn | 1 << 31),
            referenced: Itt(u32::MAX),
            cmd_sn: CmdSn(client.cmd_sn),
            exp_stat_sn: StatSn(0),
            ref_cmd_sn: CmdSn(0),
            exp_data_sn: 0,
        };
        client.send(request.header(), &[]);
        match client.receive().expect("response").0 {
            FromTarget::TmfResponse(response) => {
                assert_eq!(response.status as u8, 0, "function complete");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Makes the disk slow or hang at random times.
fn trouble(faults: &Faults, chance: &mut Chance) {
    let offset = chance.below(DISK.end) * BLOCK as u64;
    match chance.below(3) {
        0 => faults.set(Vec::new()),
        1 => faults.set(vec![Fault {
            on: FaultOn::Write,
            offset,
            len: 8 * BLOCK as u64,
            times: Some(20),
            delay: chance.between(Duration::from_millis(2), Duration::from_millis(600)),
            error: None,
        }]),
        _ => faults.hold(FaultOn::Write, offset, 8 * BLOCK as u64),
    }
}

fn sessions_are_replaced_and_commands_reset(schemes: [&'static str; 2], network: u8) {
    let (seed, steps) = seed("replaced");
    let name = format!("riser-contended-{}-{network}", std::process::id());
    let image = Image(std::env::temp_dir().join(name));
    let text = format!(
        "backends:\n  disk: {{ kind: file, path: {}, size: {}, create: true }}\n\
         targets:\n  - name: t\n    {}\n    luns: {{ 0: disk }}\n    access: open\n\
         workers: {{ count: 2 }}\n",
        image.0.display(),
        SIZE,
        portals(network).replace('\n', "\n    "),
    );
    let mut config = Config::parse(&text, "contended.yaml").unwrap_or_else(|e| panic!("{e}"));
    let faults = Arc::new(Faults::default());
    config.backends[0].spec.faults = Some(faults.clone());
    let server = Server::start(&config).unwrap();
    let mut resetter = Resetter::new(network);
    let mut contest = Contest::new(&schemes, network, seed);
    let mut chance = Chance::new(seed, 0);
    for step in 0..steps {
        contest.wait_progress(&format!("before step {step}"), 8);
        trouble(&faults, &mut chance);
        // This means that there are commands waiting for the disk in the next step.
        thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(20)));
        let held = thread::spawn({
            let (faults, hold) = (faults.clone(), chance.below(300));
            move || {
                thread::sleep(Duration::from_millis(hold));
                faults.release();
            }
        });
        match (step + chance.below(2)) % 4 {
            0 => contest.initiators[0].replace(),
            1 => contest.initiators[1].replace(),
            2 => resetter.reset(),
            // Do both at the same time, with a reset in the middle.
            _ => thread::scope(|scope| {
                for initiator in &contest.initiators {
                    scope.spawn(|| initiator.replace());
                }
                resetter.reset();
            }),
        }
        held.join().unwrap();
        faults.set(Vec::new());
    }
    contest.wait_progress("at the end", 8);
    println!(
        "result: {steps} replaced sessions and resets during {}",
        contest.end()
    );
    server.shutdown().unwrap();
}

#[test]
fn replaced_and_reset_over_srp_and_iser() {
    sessions_are_replaced_and_commands_reset(["srp", "iser"], 164);
}

#[test]
fn replaced_and_reset_over_iser_and_iscsi() {
    sessions_are_replaced_and_commands_reset(["iser", "iscsi"], 165);
}

#[test]
fn replaced_and_reset_over_iscsi_and_srp() {
    sessions_are_replaced_and_commands_reset(["iscsi", "srp"], 166);
}
