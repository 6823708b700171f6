//! Targets that vanish without a message, and targets that only appear to be dead.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use riser_scsi::lun::LunId;
use riser_transport::loopback::Blocked;

use super::*;

/// Maximum time from the last packet of a target until its session is abandoned.
const BOUND: Duration = Duration::from_secs(5);

const GONE: Blocked = Blocked {
    inbound: true,
    outbound: true,
};

/// Creates a session with default timeouts.
fn session(queue_size: u16) -> Rig {
    let target = FakeTarget::start(BLOCKS);
    let builder = Client::builder().pool(8 << 20).queue_size(queue_size);
    let client = world::add_engine(builder.region_segments(1));
    let url: SrpUrl = format!("srp://{}", target.addr).parse().unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    Rig {
        target,
        client,
        session,
    }
}

fn run_world(time: Duration) {
    let until = world::now() + time;
    while world::now() < until {
        world::step(Some(until));
    }
}

/// Submits a command with a timeout of a minute.
fn submit(session: &Session) -> Pin<Box<impl Future<Output = IoCompletion> + use<>>> {
    let lun = LunId::new(0).unwrap();
    let command = Command::test_unit_ready();
    let io = ScsiIo::new(lun, command, IoData::None, Duration::from_secs(60));
    begin(session.submit(io))
}

/// Drops all packets from and to a target, and returns the time until its session is abandoned.
fn time_until_left(session: &Session, target: IpAddr) -> Duration {
    let begun = world::now();
    world::fabric().partition(target, GONE);
    let status = session.status();
    eventually("the end of the connection", || {
        status.link() != LinkState::Live
    });
    world::now() - begun
}

#[test]
fn vanished_target_is_detected_while_idle() {
    let rig = session(64);
    run_world(Duration::from_secs(60));
    let took = time_until_left(&rig.session, rig.target.addr.ip());
    assert!(took < BOUND, "{took:?}");
    rig.client.shutdown();
}

#[test]
fn vanished_target_is_detected_by_unacknowledged_commands() {
    let rig = session(64);
    rig.target.knobs.swallow.store(1, Ordering::SeqCst);
    world::fabric().partition(rig.target.addr.ip(), GONE);
    let command = submit(&rig.session);
    let took = time_until_left(&rig.session, rig.target.addr.ip());
    assert!(took < BOUND, "{took:?}");
    drop(command);
    rig.client.shutdown();
}

/// The commands use the whole request limit, so no further command can detect that the target has
/// vanished.
#[test]
fn vanished_target_is_detected_after_acknowledged_commands() {
    let rig = session(2);
    rig.target.knobs.swallow.store(64, Ordering::SeqCst);
    let commands: Vec<_> = (0..64).map(|_| submit(&rig.session)).collect();
    run_world(Duration::from_secs(1));
    let took = time_until_left(&rig.session, rig.target.addr.ip());
    assert!(took < BOUND, "{took:?}");
    drop(commands);
    rig.client.shutdown();
}

/// This simulates a hanging disk: the target acknowledges the command and responds much later.
#[test]
fn acknowledging_target_stays_live() {
    let rig = session(2);
    rig.target.knobs.swallow.store(2, Ordering::SeqCst);
    let commands = [submit(&rig.session), submit(&rig.session)];
    run_world(Duration::from_secs(20));
    assert_eq!(rig.session.status().link(), LinkState::Live);
    assert_eq!(rig.target.knobs.logins.load(Ordering::SeqCst), 1);
    assert_eq!(rig.target.knobs.aborts.load(Ordering::SeqCst), 0);
    drop(commands);
    rig.client.shutdown();
}
