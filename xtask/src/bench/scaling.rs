//! `cargo xtask bench --scaling`: measures throughput by depth, sessions, units, block size and
//! loss, tail latency by load, and the cost of idle sessions.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::clients::Run;
use super::curves::{CURVES, Curve, DEPTH_OF_BLOCKS, DEPTH_OF_MANY, Vary};
use super::reading::Reading;
use super::results::{Point, Scaling};
use super::rig::Rig;
use super::systems::{self, Client, SYSTEMS, System};
use super::workloads::Load;
use super::{cpu, machine};
use crate::cases::select;
use crate::{Failure, sh};

/// Warm-up time for many clients, in seconds, to ensure that all are running when we start to
/// measure.
const GATHERING: u32 = 3;

/// Number of operations in flight at peak load, and for a single session under loss.
const PEAK_DEPTH: u32 = 32;

/// Maximum number of operations in flight for an open loop. Any further operations have to wait
/// when they are due, and this time is counted.
const OPEN_DEPTH: u32 = 256;

/// Minimum fraction of arrivals that must be completed, ignoring random variation. Below this, the
/// target can't keep up.
const SERVED: f64 = 0.95;

/// Minimum time to observe idle sessions, because each session checks its target every few seconds.
const IDLE_SECONDS: u32 = 10;

/// Number of attempts to measure a tail latency if the target can't keep up.
const TRIES: usize = 3;

/// Number of standard deviations by which the number of random arrivals may be below its mean.
const DEVIATIONS: f64 = 3.0;

pub(super) fn all_systems() -> Vec<&'static System> {
    let is_wanted = |system: &&System| {
        CURVES
            .iter()
            .any(|curve| curve.systems.contains(&system.id))
    };
    SYSTEMS.iter().filter(is_wanted).collect()
}

/// Measures all curves, or just the curves whose name contains one of the words.
pub(super) fn measure(rig: &Rig, words: &[String], rounds: usize) -> Result<Scaling, Failure> {
    let curves = select(CURVES.iter(), words, "curve", |curve, word| {
        curve.id.contains(word)
    })?;
    let mut scaling = Scaling {
        measured: machine::provenance(rig, rounds)?,
        points: Vec::new(),
    };
    for round in 1..=rounds {
        for curve in &curves {
            scaling.points.extend(points(rig, curve, round)?);
        }
        println!("round {round} of {rounds} is done");
    }
    Ok(scaling)
}

/// Measures a curve once. The loop over systems is innermost, so that all systems for a given point
/// run in sequence.
fn points(rig: &Rig, curve: &Curve, round: usize) -> Result<Vec<Point>, Failure> {
    let mut points = Vec::new();
    let places = curve.xs.iter();
    for (x, id) in places.flat_map(|x| curve.systems.iter().map(move |id| (*x, id))) {
        let system = systems::named(id).ok_or_else(|| format!("no system {id}"))?;
        let at = format!("{} {}: {}", curve.id, curve.label(x), system.label);
        let y = measure_point(rig, curve, system, x).map_err(|error| format!("{at}: {error}"))?;
        // Round to significant digits to keep the results file small.
        let y = (y * 100.0).round() / 100.0;
        println!("round {round}: {at}: {y} ({})", curve.measure);
        points.push(Point {
            curve: curve.id.to_owned(),
            system: system.id.to_owned(),
            x,
            round,
            y,
        });
    }
    Ok(points)
}

/// Measures a point of a curve and returns the value for its vertical axis.
fn measure_point(rig: &Rig, curve: &Curve, system: &System, x: f64) -> Result<f64, Failure> {
    let load = load(curve.vary, x);
    let run = rig.run(&load);
    let single = |run: &Run<'_>| {
        rig.measure_run(system, run)
            .map(|measured| measured.reading)
    };
    match curve.vary {
        Vary::Depth => Ok(single(&run)?.iops),
        Vary::BlockSize => Ok(single(&run)?.bytes_per_second),
        // The first point uses an injector without loss. If there is no injector, the NIC sends
        // packet trains, so the curve would start with a different NIC.
        Vary::Loss => Ok(single(&Run {
            loss: Some(x),
            ..run
        })?
        .iops),
        Vary::Share => tail(&run, x / 100.0, single),
        Vary::IdleSessions => idle(rig, system, x as usize),
        Vary::Sessions | Vary::Units => {
            let run = Run {
                warm_up: GATHERING,
                ..run
            };
            many(rig, system, run, (curve.vary, x as usize))
        }
    }
}

/// Returns the ratio of the 99.9th percentile to the median latency when operations arrive at a
/// fraction of the maximum rate of a closed loop. Returns an error if the target can't keep up in
/// any of [`TRIES`], because then all latencies, including the median, will grow for as long as the
/// test runs.
fn tail<'a>(
    run: &Run<'a>,
    share: f64,
    measure: impl Fn(&Run<'a>) -> Result<Reading, Failure>,
) -> Result<f64, Failure> {
    // If the CPUs are also used by other processes, they may have slowed down since the closed
    // loop.
    let mut why = String::new();
    for _ in 0..TRIES {
        match tail_once(run, share, &measure)? {
            Ok(tail) => return Ok(tail),
            Err(short) => {
                println!("{short} in each of {TRIES} attempts");
                why = short;
            }
        }
    }
    Err(why.into())
}

/// The inner error describes by how much the target can't keep up.
fn tail_once<'a>(
    run: &Run<'a>,
    share: f64,
    measure: impl Fn(&Run<'a>) -> Result<Reading, Failure>,
) -> Result<Result<f64, String>, Failure> {
    let peak = measure(run)?;
    let wanted = (peak.iops * share).max(1.0) as u64;
    let open = Run {
        place: run.place,
        load: Load {
            depth: OPEN_DEPTH,
            ..run.load
        },
        rate: Some(wanted),
        ..*run
    };
    let read = measure(&open)?;
    // The standard deviation of a Poisson process is the square root of the number of arrivals.
    let deviation = (wanted as f64 / f64::from(run.seconds)).sqrt();
    if read.iops < SERVED * wanted as f64 - DEVIATIONS * deviation {
        let why = format!(
            "only {:.0} of {wanted} arrivals per second were served",
            read.iops
        );
        return Ok(Err(why));
    }
    let (Some(busy), Some(median), Some(tail)) = (peak.p50_ns, read.p50_ns, read.p99_9_ns) else {
        return Err("the client reports no percentiles".into());
    };
    // If the queue never drains, its median is as large as the tail.
    if median > busy {
        let why = format!(
            "half of the operations wait for {median:.0} ns, and for {busy:.0} ns at the peak"
        );
        return Ok(Err(why));
    }
    Ok(Ok(tail / median.max(1.0)))
}

fn idle(rig: &Rig, system: &System, sessions: usize) -> Result<f64, Failure> {
    let served = rig.served(system)?;
    let attached = rig.place.idle_sessions(&served.disks[0], sessions)?;
    // Wait until the initial work of all sessions has completed.
    thread::sleep(Duration::from_secs(GATHERING.into()));
    let (began, before) = (Instant::now(), cpu::on_processor(&served.processes())?);
    thread::sleep(Duration::from_secs(rig.seconds.max(IDLE_SECONDS).into()));
    let spent = cpu::on_processor(&served.processes())?.saturating_sub(before);
    let each_second = spent as f64 / began.elapsed().as_secs_f64();
    drop(attached);
    served.stop()?;
    // We can't show zero on a logarithmic axis.
    Ok(each_second.max(1.0))
}

fn load(vary: Vary, x: f64) -> Load {
    let (block_size, depth) = match vary {
        Vary::Depth => (4 << 10, x as u32),
        Vary::BlockSize => (x as u32, DEPTH_OF_BLOCKS),
        Vary::Sessions | Vary::Units => (4 << 10, DEPTH_OF_MANY),
        Vary::Loss | Vary::Share | Vary::IdleSessions => (4 << 10, PEAK_DEPTH),
    };
    Load {
        rw: "randread",
        block_size,
        depth,
    }
}

/// Returns the total operations per second of parallel clients, using either several `riser`
/// processes or several jobs of one fio process.
fn many(
    rig: &Rig,
    system: &System,
    run: Run<'_>,
    (vary, clients): (Vary, usize),
) -> Result<f64, Failure> {
    let images: Vec<PathBuf> = match vary {
        Vary::Units => rig.unit_images()?.into_iter().take(clients).collect(),
        _ => vec![rig.image.clone()],
    };
    let served = rig.place.serve(system.server, &images)?;
    let (processes, run) = if system.client == Client::Nbd {
        let jobs = clients as u32;
        (1, Run { jobs, ..run })
    } else {
        (clients, run)
    };
    let one = |client: usize| -> Result<f64, Failure> {
        let disk = &served.disks[client % served.disks.len()];
        let output = sh::output(&mut run.command(system.client, disk)?)?;
        // With many clients, some may have completed no operations, but this is not an error.
        Ok(run.reading(system.client, &output)?.iops)
    };
    let one = &|client| one(client).map_err(|error| error.to_string());
    // We need one process per session, because each process has only a single session, and a thread
    // to wait for it.
    let total = thread::scope(|scope| {
        let start = |client| scope.spawn(move || one(client));
        let clients: Vec<_> = (0..processes).map(start).collect();
        let ended = clients.into_iter().map(thread::ScopedJoinHandle::join);
        ended
            .map(|joined| joined.unwrap_or_else(|_| Err("a thread panicked".to_owned())))
            .sum::<Result<f64, String>>()
    });
    served.stop()?;
    Ok(total?)
}

#[cfg(test)]
mod tests {
    use super::super::servers::Place;
    use super::*;

    #[test]
    fn axis_value_sets_load() {
        let of = |vary, x| {
            let load = load(vary, x);
            (load.block_size, load.depth)
        };
        assert_eq!(of(Vary::Depth, 256.0), (4096, 256));
        assert_eq!(of(Vary::BlockSize, 512.0), (512, DEPTH_OF_BLOCKS));
        assert_eq!(of(Vary::Sessions, 64.0), (4096, DEPTH_OF_MANY));
        assert_eq!(of(Vary::Loss, 5.0), (4096, 32));
        assert_eq!(of(Vary::Share, 70.0), (4096, 32));
    }

    fn place() -> Place {
        Place {
            scratch: PathBuf::from("/scratch"),
            programs: PathBuf::from("/programs"),
        }
    }

    fn closed(place: &Place) -> Run<'_> {
        Run {
            place,
            load: load(Vary::Share, 70.0),
            jobs: 1,
            seconds: 1,
            warm_up: 0,
            loss: None,
            rate: None,
        }
    }

    fn reading(iops: f64, p99_9_ns: Option<f64>) -> Reading {
        Reading {
            operations: 1.0,
            iops,
            bytes_per_second: 1.0,
            p50_ns: Some(50.0),
            p99_9_ns,
        }
    }

    #[test]
    fn tail_uses_share_of_peak() {
        let place = place();
        let run = closed(&place);
        let measured = |run: &Run<'_>| -> Result<Reading, Failure> {
            match (run.rate, run.load.depth) {
                (None, PEAK_DEPTH) => Ok(reading(1000.0, None)),
                (Some(700), OPEN_DEPTH) => Ok(reading(690.0, Some(200.0))),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(tail(&run, 0.7, measured).unwrap(), 4.0);
        let silent = |run: &Run<'_>| -> Result<Reading, Failure> {
            let read = measured(run)?;
            Ok(Reading {
                p99_9_ns: None,
                ..read
            })
        };
        assert!(tail(&run, 0.7, silent).is_err());
        let slow = |run: &Run<'_>| -> Result<Reading, Failure> {
            let read = measured(run)?;
            let iops = if run.rate.is_some() { 400.0 } else { read.iops };
            Ok(Reading { iops, ..read })
        };
        let queued = |run: &Run<'_>| -> Result<Reading, Failure> {
            let read = measured(run)?;
            let wait = run.rate.map(|_| 190.0).or(read.p50_ns);
            Ok(Reading {
                p50_ns: wait,
                ..read
            })
        };
        let why = tail(&run, 0.7, queued).unwrap_err().to_string();
        assert!(why.contains("wait for 190 ns, and for 50 ns"), "{why}");
        let why = tail(&run, 0.7, slow).unwrap_err().to_string();
        assert!(why.contains("400 of 700 arrivals"), "{why}");
        let tries = std::cell::Cell::new(0);
        let slow_at_first = |run: &Run<'_>| -> Result<Reading, Failure> {
            tries.set(tries.get() + 1);
            if tries.get() <= 2 {
                slow(run)
            } else {
                measured(run)
            }
        };
        assert_eq!(tail(&run, 0.7, slow_at_first).unwrap(), 4.0);
    }

    #[test]
    fn few_arrivals_may_be_fewer_by_chance() {
        let place = place();
        let served = |iops: f64| {
            let measured = move |run: &Run<'_>| -> Result<Reading, Failure> {
                let iops = if run.rate.is_some() { iops } else { 100.0 };
                Ok(reading(iops, Some(200.0)))
            };
            tail(&closed(&place), 0.7, measured)
        };
        assert_eq!(served(63.0).unwrap(), 4.0, "less than a deviation");
        let why = served(40.0).unwrap_err().to_string();
        assert!(why.contains("40 of 70 arrivals"), "{why}");
    }

    #[test]
    fn curve_systems_are_prepared() {
        let systems = all_systems();
        for curve in CURVES.iter() {
            for id in &curve.systems {
                assert!(systems.iter().any(|system| system.id == *id), "{id}");
            }
        }
        assert!(systems.len() < SYSTEMS.len());
    }
}
