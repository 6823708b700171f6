//! What `cargo xtask instructions` runs under callgrind.
//!
//! ```text
//! commands reads N      reads of 4 KiB, one after another, over SRP and the wire in memory
//! commands tcp N        reads of 4 KiB, one after another, over iSCSI and a real socket
//! commands counting N   what is done to count as many, and nothing else
//! ```
//!
//! The instructions are the same in every run; the difference between two numbers belongs to that
//! many commands alone. In the first two, only [`Worker::step`](riser_target::worker::Worker::step)
//! is looked at.

#[path = "../tests/world/mod.rs"]
mod world;

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_reactor::RingConfig;
use riser_scsi::opcode::{Kind, Opcode};
use riser_scsi::step::{DataIn, Residual, Response, Status};
use riser_target::config::Config;
use riser_target::server::build_shared;
use riser_target::stats::{CommandTimer, LunStats, SessionStats, Stage, TraceKey};
use riser_target::worker::{TcpListener, Worker};
use riser_test_peers::mini::{Mini, config, login_req};
use riser_test_peers::tcp;
use riser_transport::roce::fault::FaultConfig;
use world::{SERVER, World};

const IQN: &str = "iqn.2026-01.org.example:disk";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut words = args.iter().filter(|arg| !arg.starts_with('-'));
    let subject = words.next().map_or("reads", String::as_str);
    let commands = words.next().map_or(1000, |n| n.parse().expect("a number"));
    match subject {
        "reads" => reads(commands),
        "tcp" => tcp_reads(commands),
        "counting" => counting(commands),
        other => panic!("neither reads nor tcp nor counting: {other}"),
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
    let mut mini = Mini::connect(dev, dst, &req, &mut |d| world.pump(d))
        .map_err(|(_, e)| e)
        .unwrap();
    mini.settle(&mut |d| world.pump(d));
    for n in 0..commands {
        let answer = mini.read(n % 256 * 8, 8, 0, &mut |d| world.pump(d));
        assert_eq!(answer.status, 0);
    }
}

/// A step of the worker that is counted. A login is not: its thread is not ready after the same
/// number of steps every time.
#[inline(never)]
fn counted_step(worker: &mut Worker) {
    worker.step(Instant::now()).unwrap();
}

/// Nothing waits here but the initiator's login: the kernel completes what the worker asks of a
/// socket of the same host while the other end sends or receives, so a read takes the same steps
/// every time.
fn tcp_reads(commands: u32) {
    let at = SocketAddr::from(([127, 80, 3, 1], 3260));
    let text = format!(
        "backends: {{ d: {{ kind: ram, size: 16MiB }} }}\n\
         targets:\n  - name: t\n    iqn: {IQN}\n    \
         portals: [{{ protocol: iscsi, listen: \"{at}\" }}]\n    \
         luns: {{ 0: d }}\n    access: open\nworkers: {{ count: 1 }}\n"
    );
    let config = Config::parse(&text, "bench.yaml").unwrap();
    let socket = TcpListener::bind(at).unwrap();
    socket.listen().unwrap();
    let shared = build_shared(&config, None).unwrap();
    let (faults, ring) = (FaultConfig::default(), RingConfig::default());
    let mut world = World::with(faults, shared, ring, vec![socket]);
    let login = std::thread::spawn(move || tcp::Client::login_at(at, IQN, 1, None).unwrap());
    while !login.is_finished() {
        world.worker.step(Instant::now()).unwrap();
    }
    let mut client = login.join().unwrap();
    client.socket.set_nonblocking(true).unwrap();
    // An answer is a response, or Data-In with the status in it: a header and what follows at once.
    let mut answer = |client: &mut tcp::Client, data: usize| {
        let mut bytes = [0; 48 + 4096];
        while client.socket.peek(&mut bytes).unwrap_or(0) < 48 + data {
            counted_step(&mut world.worker);
        }
        client.answer()
    };
    // The first command reports the unit attention of a new nexus.
    client.send_command(&[0; 6], false, 0, &[]);
    answer(&mut client, 0);
    for n in 0..commands {
        let lba = (n % 32 * 8) as u8;
        client.send_command(&[0x28, 0, 0, 0, 0, lba, 0, 0, 8, 0], false, 4096, &[]);
        let (status, data) = answer(&mut client, 4096);
        assert!(status == 0 && data.len() == 4096);
    }
}

fn counting(commands: u32) {
    let account = Arc::new(SessionStats::new(
        Arc::new(LunStats::new("bench", 0, Some(Instant::now))),
        0,
    ));
    let answer = Response {
        status: Status::Good,
        sense: [].into_iter().collect(),
        data_in: DataIn::None,
        residual_in: Residual::None,
        residual_out: Residual::None,
    };
    let mut timer = CommandTimer::default();
    let mut now = Instant::now();
    for _ in 0..commands {
        count_one(&mut timer, &account, &answer, now);
        now += Duration::from_millis(1);
    }
    assert_eq!(account.class(Kind::Read).commands, u64::from(commands));
}

/// Counts a read, by the calls that [`Execution`](riser_target::fabric::Execution) and a channel
/// make while it runs.
#[inline(never)]
fn count_one(
    timer: &mut CommandTimer,
    account: &Arc<SessionStats>,
    answer: &Response,
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
    timer.begin(Arc::clone(black_box(account)), subject, now);
    timer.classify(Opcode::of(black_box(&CDB)).kind);
    for stage in [Stage::Scsi, Stage::Scsi, Stage::Backend] {
        timer.enter(black_box(stage), now);
    }
    timer.enter(black_box(Stage::Scsi), read);
    timer.answer(black_box(answer), black_box(4096), read);
    timer.arrive(gone);
    timer.abandon();
}
