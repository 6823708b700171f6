//! Benchmarks for `cargo xtask instructions --counting`, which runs them under callgrind.
//!
//! ```text
//! commands reads N      sequential reads of 4 KiB over SRP with a simulated wire
//! commands counting N   only updates the statistics for this number of reads
//! ```
//!
//! The number of instructions is the same in each run, so the difference between two counts is the
//! cost of the additional commands. For reads, only
//! [`Worker::step`](riser_target::worker::Worker::step) is measured.

#[path = "../tests/world/mod.rs"]
mod world;

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::opcode::{Kind, Opcode};
use riser_scsi::step::{DataIn, Residual, Response, Status};
use riser_target::config::Config;
use riser_target::stats::{CommandTimer, LunStats, SessionStats, Stage, TraceKey};
use riser_test_peers::mini::{Mini, config, login_req};
use riser_transport::roce::fault::FaultConfig;
use world::{SERVER, World};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut words = args.iter().filter(|arg| !arg.starts_with('-'));
    let subject = words.next().map_or("reads", String::as_str);
    let commands = words.next().map_or(1000, |n| n.parse().expect("a number"));
    match subject {
        "reads" => reads(commands),
        "counting" => counting(commands),
        other => panic!("neither reads nor counting: {other}"),
    }
}

fn reads(commands: u32) {
    let text = config(SERVER, 1, "");
    let config = Config::parse(&text, "bench.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &config);
    let target = world.shared.registry.catalog().targets[0].portals[0].target_port();
    let dev = world.client(1);
    let dst = SocketAddr::new(SERVER, 5555);
    let req = login_req(1, target);
    let mut mini = Mini::connected(dev, dst, &req, &mut |d| world.pump(d));
    mini.clear_unit_attention(&mut |d| world.pump(d));
    for n in 0..commands {
        let response = mini.read(n % 256 * 8, 8, 0, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
    }
}

fn counting(commands: u32) {
    let account = Arc::new(SessionStats::new(
        Arc::new(LunStats::new("bench", 0, Some(Instant::now))),
        0,
    ));
    let response = Response {
        status: Status::Good,
        sense: [].into_iter().collect(),
        data_in: DataIn::None,
        residual_in: Residual::None,
        residual_out: Residual::None,
    };
    let mut timer = CommandTimer::default();
    let mut now = Instant::now();
    for _ in 0..commands {
        count_one(&mut timer, &account, &response, now);
        now += Duration::from_millis(1);
    }
    assert_eq!(account.class(Kind::Read).commands, u64::from(commands));
}

/// Updates the statistics for a read, using the same calls as
/// [`Execution`](riser_target::fabric::Execution) and a channel.
#[inline(never)]
fn count_one(
    timer: &mut CommandTimer,
    account: &Arc<SessionStats>,
    response: &Response,
    now: Instant,
) {
    const CDB: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let read = now + Duration::from_micros(50);
    let gone = now + Duration::from_micros(80);
    let subject = || TraceKey {
        tag: 1,
        nexus: 1,
        cdb: CDB.into_iter().collect(),
    };
    timer.start(Arc::clone(black_box(account)), subject, now);
    timer.classify(Opcode::of(black_box(&CDB)).kind);
    for stage in [Stage::Scsi, Stage::Scsi, Stage::Backend] {
        timer.enter_stage(black_box(stage), now);
    }
    timer.enter_stage(black_box(Stage::Scsi), read);
    timer.record_response(black_box(response), black_box(4096), read);
    timer.arrive(gone);
    timer.abandon();
}
