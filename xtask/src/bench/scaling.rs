//! `cargo xtask bench --scaling`: throughput by depth, sessions, units, block size and loss.

use std::path::PathBuf;
use std::thread;

use super::clients::{NbdClient, Run};
use super::curves::{CURVES, Curve, DEPTH_OF_BLOCKS, DEPTH_OF_MANY, Vary};
use super::machine;
use super::results::{Point, Scaling};
use super::rig::Rig;
use super::systems::{self, Client, System};
use super::workloads::Load;
use crate::{Failure, sh};

/// Seconds for which many clients run before they measure: until all are there.
const GATHERING: u32 = 3;

/// Systems of all curves.
pub(super) fn all_systems() -> Vec<&'static System> {
    let is_wanted = |system: &&System| {
        CURVES
            .iter()
            .any(|curve| curve.systems.contains(&system.id))
    };
    systems::SYSTEMS.iter().filter(is_wanted).collect()
}

/// Measures the curves whose names contain one of the words, or all; `keep` gets the results after
/// each round.
pub(super) fn measure(
    rig: &Rig,
    words: &[String],
    rounds: usize,
    keep: impl Fn(&Scaling) -> Result<(), Failure>,
) -> Result<Scaling, Failure> {
    let curves = CURVES.iter().filter(|curve| {
        words.is_empty() || words.iter().any(|word| curve.id.contains(word.as_str()))
    });
    let curves: Vec<_> = curves.collect();
    if curves.is_empty() {
        let names: Vec<_> = CURVES.iter().map(|curve| curve.id).collect();
        return Err(format!("no curve is named so; there are {}", names.join(", ")).into());
    }
    let mut scaling = Scaling {
        measured: machine::provenance(rig, rounds)?,
        points: Vec::new(),
    };
    for round in 1..=rounds {
        for curve in &curves {
            scaling.points.extend(points(rig, curve, round)?);
        }
        println!("round {round} of {rounds} is done");
        keep(&scaling)?;
    }
    Ok(scaling)
}

/// Measures a curve once. Systems are innermost, so that those of one place follow each other.
fn points(rig: &Rig, curve: &Curve, round: usize) -> Result<Vec<Point>, Failure> {
    let mut points = Vec::new();
    let places = curve.xs.iter();
    for (x, id) in places.flat_map(|x| curve.systems.iter().map(move |id| (*x, id))) {
        let system = systems::named(id).ok_or_else(|| format!("no system {id}"))?;
        let at = format!("{} {}: {}", curve.id, curve.label(x), system.label);
        let y = throughput(rig, curve, system, x).map_err(|error| format!("{at}: {error}"))?;
        println!("round {round}: {at}: {y:.0} per second");
        points.push(Point {
            curve: curve.id.to_owned(),
            system: system.id.to_owned(),
            x,
            round,
            y: y.round(),
        });
    }
    Ok(points)
}

/// Operations per second, or bytes, at a place of a curve.
fn throughput(rig: &Rig, curve: &Curve, system: &System, x: f64) -> Result<f64, Failure> {
    let load = load(curve.vary, x);
    let run = rig.run(&load);
    let single = |run: &Run<'_>| {
        rig.measure_run(system, run)
            .map(|measured| measured.reading)
    };
    match curve.vary {
        Vary::Depth => Ok(single(&run)?.iops),
        Vary::BlockSize => Ok(single(&run)?.bytes_per_second),
        Vary::Loss => Ok(single(&Run { loss: x, ..run })?.iops),
        Vary::Sessions | Vary::Units => {
            let run = Run {
                warm_up: GATHERING,
                ..run
            };
            many(rig, system, run, (curve.vary, x as usize))
        }
    }
}

fn load(vary: Vary, x: f64) -> Load {
    let (block_size, depth) = match vary {
        Vary::Depth => (4 << 10, x as u32),
        Vary::BlockSize => (x as u32, DEPTH_OF_BLOCKS),
        Vary::Sessions | Vary::Units => (4 << 10, DEPTH_OF_MANY),
        Vary::Loss => (4 << 10, 32),
    };
    Load {
        rw: "randread",
        block_size,
        depth,
    }
}

/// Operations per second of clients at once: processes of `riser`, or jobs of one fio.
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
    let is_jobs = system.client == Client::Nbd && run.nbd_client != NbdClient::Riser;
    let (processes, run) = if is_jobs {
        let jobs = clients as u32;
        (1, Run { jobs, ..run })
    } else {
        (clients, run)
    };
    let one = |client: usize| -> Result<f64, Failure> {
        let disk = &served.disks[client % served.disks.len()];
        let output = sh::output(&mut run.command(system.client, disk)?)?;
        // One of many may have got nothing, which is no reason to stop.
        Ok(run.reading(system.client, &output)?.iops)
    };
    let one = &|client| one(client).map_err(|error| error.to_string());
    // A process has one session, so there are as many as sessions, and a thread waits for each.
    let total = thread::scope(|scope| {
        let start = |client| scope.spawn(move || one(client));
        let clients: Vec<_> = (0..processes).map(start).collect();
        let ended = clients.into_iter().map(thread::ScopedJoinHandle::join);
        ended
            .map(|joined| joined.unwrap_or_else(|_| Err("a thread ended badly".to_owned())))
            .sum::<Result<f64, String>>()
    });
    served.stop()?;
    Ok(total?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_on_the_axis_is_in_the_load() {
        let of = |vary, x| {
            let load = load(vary, x);
            (load.block_size, load.depth)
        };
        assert_eq!(of(Vary::Depth, 256.0), (4096, 256));
        assert_eq!(of(Vary::BlockSize, 512.0), (512, DEPTH_OF_BLOCKS));
        assert_eq!(of(Vary::Sessions, 64.0), (4096, DEPTH_OF_MANY));
        assert_eq!(of(Vary::Loss, 5.0), (4096, 32));
    }

    #[test]
    fn the_systems_of_all_curves_are_prepared() {
        let systems = all_systems();
        for curve in CURVES {
            for id in curve.systems {
                assert!(systems.iter().any(|system| system.id == *id), "{id}");
            }
        }
        assert!(systems.len() < systems::SYSTEMS.len());
    }
}
