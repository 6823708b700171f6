//! Measures how almost valid messages affect the sessions of other hosts. We run rounds of the load
//! without an attack, with the same attack on another daemon, and with the attack. This way, any
//! change in the speed of this machine affects all of them, and we can compare the ratios. The
//! attacker, the honest hosts and the daemon share the same CPUs, so an attack has a high cost for
//! the honest hosts even if it's for a different daemon. To find the cost caused by their own
//! daemon, we need to compare with the round that uses another daemon.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_testkit::programs::{Pair, skip};
use riser_tests::load::setting;

use super::forge::Sniffer;
use super::hostile::{self, Tally, Wire};
use super::net::World;
use super::{
    GROWTH, PATIENCE, SCHEMES, Scene, kernel_counter, metric, others_log_in, serve,
    visit_other_target,
};

/// Delay between two operations of an honest host. This is needed to leave enough CPU time for the
/// attacker to send its messages.
const PAUSE_BETWEEN: Duration = Duration::from_millis(2);
/// Minimum time to measure the honest hosts without an attack.
const ALONE: Duration = Duration::from_secs(2);
/// Number of rounds per protocol, and for the short test. To have a median, the number must be odd.
const ROUNDS: u64 = 9;
const FEW_ROUNDS: u64 = 3;
/// Maximum factor by which an attack may increase the 99th percentile of another session, compared
/// to the same attack on another daemon.
const MOST: f64 = 2.0;
/// Maximum increase of the daemon's memory from the first round to the last, in bytes.
const GROWTH_AGAIN: u64 = 64 << 20;
/// Maximum increase of memory per message.
const GROWTH_OF_MESSAGE: u64 = 64;
/// Maximum time for each message of an attack on a slow machine, in addition to [`PATIENCE`] for
/// the whole attack.
const LONGEST: Duration = Duration::from_millis(20);

/// Lowers the priority of the current thread. A real attacker would have its own machine, and we
/// only want to measure the cost on the target.
fn yield_to_others() {
    // SAFETY: the arguments are integers. In Linux, this applies to a thread and not to the
    // process.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 5) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Starts an attack with `count` messages.
fn begin_attack(
    world: &Arc<World>,
    wire: Wire,
    count: u64,
    seed: u64,
    requests: &[Vec<u8>],
) -> JoinHandle<Tally> {
    let (world, requests) = (world.clone(), requests.to_vec());
    let rate = setting("RISER_HOSTILE_RATE", 0);
    thread::spawn(move || {
        let sniffer = world.switch.run(Sniffer::new);
        world.stranger.run(move || {
            yield_to_others();
            hostile::attack(wire, (count, rate), seed, &requests, sniffer)
        })
    })
}

/// Returns the number of datagrams that the daemon has counted as errors (these are rare or don't
/// occur in normal sessions) or has responded to, and the number of datagrams that were dropped
/// before processing, either by the kernel or because the queue was full.
fn datagrams(world: &World) -> (u64, u64) {
    let by_kernel = world.target.run(|| kernel_counter("Udp:", "RcvbufErrors"));
    let by_daemon = metric(world, "riser_device_dropped_packets_total", "unwanted_mad");
    let counted = [
        ("riser_device_cm_messages_total", "received"),
        ("riser_device_dropped_packets_total", ""),
        ("riser_device_icrc_errors_total", ""),
        ("riser_device_odd_packets_total", ""),
        ("riser_device_naks_sent_total", ""),
    ];
    let counted = counted.map(|(name, label)| metric(world, name, label));
    // There is no counter for device management. Because the attacker has no socket for the
    // responses, we can use its kernel counter.
    let closed_ports = world.stranger.run(|| kernel_counter("Udp:", "NoPorts"));
    (
        counted.iter().sum::<u64>() + closed_ports,
        by_kernel + by_daemon,
    )
}

/// Returns the median for an odd number of values.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_unstable_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Rounds for a protocol.
#[derive(Default)]
pub(crate) struct Rounds {
    sum: Tally,
    lost: u64,
    took: Duration,
    /// 99th percentiles for the parts of each round in microseconds, for each of [`SCHEMES`].
    alone: Vec<[u64; 3]>,
    other_daemon: Vec<[u64; 3]>,
    attacked: Vec<[u64; 3]>,
}

impl Rounds {
    /// Returns the medians of the ratios for each of [`SCHEMES`]: compared to the load without an
    /// attack, and compared to the load during an attack on another daemon.
    fn ratios(&self) -> ([f64; 3], [f64; 3]) {
        let to = |quiet: &[[u64; 3]]| {
            [0, 1, 2].map(|at| {
                let pairs = self.attacked.iter().zip(quiet);
                median(pairs.map(|(a, q)| a[at] as f64 / q[at] as f64).collect())
            })
        };
        (to(&self.alone), to(&self.other_daemon))
    }

    fn report(&self, wire: Wire) -> String {
        let (alone, other_daemon) = self.ratios();
        let Tally {
            messages,
            connections,
            ended,
            unproven,
        } = self.sum;
        format!(
            "result: {wire:?}: {messages} messages have arrived ({unproven} may not have been read, {} were \
             dropped), {connections} connections ({ended} ended by the target), {:.0}/s; p99 of {SCHEMES:?} \
             {alone:.2?} times that alone, {other_daemon:.2?} times that beside the same attack at another daemon\n",
            self.lost,
            messages as f64 / self.took.as_secs_f64(),
        )
    }
}

impl Scene {
    /// Waits until an attack with `count` messages has completed. Returns the number of messages
    /// sent and the time it took.
    ///
    /// # Panics
    /// Panics if the attack doesn't complete: if the daemon does not respond to the attacker, it
    /// would wait forever.
    fn while_attacked(
        &mut self,
        wire: Wire,
        (attack, count): (JoinHandle<Tally>, u64),
    ) -> (Tally, Duration) {
        let begun = Instant::now();
        let most = PATIENCE + LONGEST * u32::try_from(count).unwrap_or(u32::MAX);
        while !attack.is_finished() {
            assert!(
                begun.elapsed() < most,
                "{wire:?}: {count} messages took more than {most:?}"
            );
            // All honest threads must make progress during this time, even if they are slow.
            self.wait_progress(&format!("{wire:?}"), 1, Duration::from_millis(100));
        }
        let tally = attack.join().expect("the stranger does not fail");
        (tally, begun.elapsed())
    }

    /// Runs a round: the load without an attack, for the same duration as the previous attack, then
    /// with an attack on another daemon, which only affects the honest hosts because of the shared
    /// machine, and then with the attack.
    fn round(
        &mut self,
        rounds: &mut Rounds,
        wire: Wire,
        count: u64,
        elsewhere: &Arc<World>,
        (seed, requests): (u64, &[Vec<u8>]),
    ) {
        let done = rounds.attacked.len() as u32;
        let span = (rounds.took / done.max(1)).max(ALONE);
        self.wait_progress("alone", 20, span);
        rounds
            .alone
            .push(self.print_results(&format!("{wire:?}, alone"), span).1);
        let attack = begin_attack(elsewhere, wire, count, !seed, requests);
        let (_, took) = self.while_attacked(wire, (attack, count));
        let other_daemon = self.print_results(&format!("{wire:?}, at another daemon"), took);
        rounds.other_daemon.push(other_daemon.1);
        let world = self.world.clone();
        let (counted, dropped) = datagrams(&world);
        let attack = begin_attack(&world, wire, count, seed, requests);
        let (mut tally, took) = self.while_attacked(wire, (attack, count));
        rounds
            .attacked
            .push(self.print_results(&format!("{wire:?}"), took).1);
        if wire.is_of_datagrams() {
            let (counted_now, dropped_now) = datagrams(&world);
            let lost = dropped_now - dropped;
            assert!(
                lost <= tally.messages / 20,
                "{wire:?}: {lost} of {} datagrams did not arrive",
                tally.messages
            );
            tally.messages -= lost;
            rounds.lost += lost;
            let counted = counted_now - counted;
            println!(
                "result: {wire:?}: the daemon has counted or acknowledged {counted} of {}",
                tally.messages
            );
            // About a third of these messages get a response, and errors in the rest are not
            // counted.
            let share = if wire == Wire::DeviceManagement { 8 } else { 2 };
            assert!(
                counted >= tally.messages / share,
                "{wire:?}: the daemon has counted or acknowledged {counted} of {} packets",
                tally.messages
            );
        }
        assert_eq!(self.reconnects(), [0; 3], "{wire:?}: {:?}", self.downs());
        rounds.took += took;
        rounds.sum += tally;
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.messages += more.messages;
        self.connections += more.connections;
        self.ended += more.ended;
        self.unproven += more.unproven;
    }
}

#[test]
#[ignore = "keeps the machine busy, and is run by itself"]
fn almost_valid_messages_spare_other_sessions() {
    let seed = setting("RISER_ADVERSARY_SEED", 0xadd);
    let count = setting("RISER_HOSTILE_MESSAGES", 2_000);
    let rate = setting("RISER_HOSTILE_RATE", 0);
    let is_timed = setting("RISER_HOSTILE_IS_TIMED", 0) != 0;
    let only = std::env::var("RISER_HOSTILE_PROTOCOL").unwrap_or_default();
    let protocol = match only.is_empty() {
        true => String::new(),
        false => format!(" --protocol {only}"),
    };
    println!("cargo xtask hostile --messages {count} --rate {rate} --seed {seed}{protocol}");
    let world = match World::new() {
        Ok(world) => world,
        Err(why) => return skip("almost_valid_messages_spare_other_sessions", &why),
    };
    let mut scene = Scene::new(world, seed, PAUSE_BETWEEN);
    let world = scene.world.clone();
    let mut sniffer = world.switch.run(Sniffer::new);
    world.hosts.run(visit_other_target);
    let requests: Vec<_> = sniffer.logins().into_iter().map(|l| l.req).collect();
    drop(sniffer);
    let elsewhere = Arc::new(World::new().unwrap());
    let mut other: Pair = serve(&elsewhere, 2);
    scene.wait_progress("before", 20, ALONE);
    scene.print_results("before", ALONE);
    let is_wanted = |w: &Wire| only.is_empty() || format!("{w:?}").eq_ignore_ascii_case(&only);
    let wires: Vec<_> = Wire::ALL.into_iter().filter(is_wanted).collect();
    assert!(!wires.is_empty(), "there is no protocol {only}");
    let number = if is_timed { ROUNDS } else { FEW_ROUNDS };
    let (mut report, mut too_slow) = (String::new(), Vec::new());
    for wire in wires {
        let mut rounds = Rounds::default();
        // Any memory allocated in the first round will be used again in later rounds.
        let (before, mut memory) = (scene.memory(), None);
        for round in 0..number {
            let of_round = (seed ^ round << 32, &requests[..]);
            scene.round(
                &mut rounds,
                wire,
                count.div_ceil(number),
                &elsewhere,
                of_round,
            );
            let now = scene.memory();
            if memory.is_none() {
                let grown = now.saturating_sub(before);
                assert!(
                    grown < GROWTH + GROWTH_OF_MESSAGE * rounds.sum.messages,
                    "{wire:?}: the daemon has grown by {grown} bytes in the first round"
                );
                println!("result: {wire:?}: grown by {grown} bytes in the first round");
            }
            memory.get_or_insert(now);
        }
        let grown = scene.memory().saturating_sub(memory.unwrap_or_default());
        assert!(
            grown < GROWTH_AGAIN + GROWTH_OF_MESSAGE * rounds.sum.messages,
            "{wire:?}: the daemon has grown by {grown} bytes since the first round"
        );
        let line = rounds.report(wire);
        println!("{line}");
        if rounds.ratios().1.iter().any(|ratio| *ratio > MOST) {
            too_slow.push(wire);
        }
        report += &line;
    }
    scene.wait_progress("afterwards", 20, ALONE);
    scene.print_results("afterwards", ALONE);
    print!("{report}");
    println!("result: after it, logins took {:?} at most", {
        let shared = scene.shared.clone();
        world.hosts.run(move || others_log_in(shared))
    });
    scene.shared.stop.store(true, Ordering::Relaxed);
    for (_, worker) in scene.workers.drain(..) {
        worker.join().unwrap();
    }
    // If no buffer or lock was leaked, the daemon must be able to exit.
    scene.pair.terminate();
    other.terminate();
    assert!(
        !is_timed || too_slow.is_empty(),
        "{too_slow:?} made the 99th percentile of other sessions more than {MOST} times as long as at \
         another daemon"
    );
}

mod tests {
    use super::*;

    fn rounds(alone: [u64; 3], attacked: [u64; 3]) -> Rounds {
        let of = |p99s: [u64; 3]| p99s.map(|p99| [100, p99, 100]).to_vec();
        Rounds {
            alone: of(alone),
            other_daemon: of(alone),
            attacked: of(attacked),
            ..Rounds::default()
        }
    }

    #[test]
    fn machine_slowdown_is_ignored() {
        let (alone, _) = rounds([100, 100, 900], [150, 900, 900]).ratios();
        assert_eq!(alone, [1.0, 1.5, 1.0]);
    }

    #[test]
    fn slowed_protocol_is_detected() {
        let (alone, _) = rounds([100, 200, 100], [300, 600, 100]).ratios();
        assert_eq!(alone, [1.0, 3.0, 1.0]);
    }
}
