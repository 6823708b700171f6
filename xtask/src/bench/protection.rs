//! Cost of T10 protection information: the same loads on two units of one target, with and without
//! it, in turns. Both units are in memory, because a disk would hide the cost.

use super::clients::Run;
use super::reading::Reading;
use super::rig::Setup;
use super::servers::{Address, Place, Served};
use super::stats::{Summary, ratios};
use super::systems::{Client, Protocol};
use super::workloads::Load;
use crate::{Failure, daemon, sh};

/// Protection types, which have different commands and checks.
const TYPES: [u8; 2] = [1, 2];

const PROTOCOLS: [(&str, Protocol); 3] = [
    ("srp", Protocol::Srp),
    ("iser", Protocol::Iser),
    ("iscsi", Protocol::Iscsi),
];

/// Loads with their names.
const LOADS: [(&str, Load); 4] = [
    ("randread-4k-32", load("randread", 4 << 10, 32)),
    ("randwrite-4k-32", load("randwrite", 4 << 10, 32)),
    ("read-128k-8", load("read", 128 << 10, 8)),
    ("write-128k-8", load("write", 128 << 10, 8)),
];

const fn load(rw: &'static str, block_size: u32, depth: u32) -> Load {
    Load {
        rw,
        block_size,
        depth,
    }
}

/// Results of a load: operations per second by round, for each unit. The first unit is not
/// protected.
struct Row {
    name: String,
    iops: Vec<Vec<(usize, f64)>>,
}

/// Measures all loads whose names contain a word of `only`, and prints the results.
pub(super) fn measure(setup: &Setup, only: &[String], rounds: usize) -> Result<(), Failure> {
    let programs = match &setup.programs {
        Some(directory) => directory.clone(),
        None => {
            println!("building riserd and riser");
            daemon::build_dist()?
        }
    };
    let scratch = sh::Scratch::new("bench-protection")?;
    let place = Place {
        scratch: scratch.path().to_owned(),
        programs,
    };
    let mut rows = Vec::new();
    for (protocol, served_by) in PROTOCOLS {
        let name = |load: &str| format!("{protocol} {load}");
        let is_wanted =
            |name: &str| only.is_empty() || only.iter().any(|w| name.contains(w.as_str()));
        let loads = LOADS.iter().filter(|(load, _)| is_wanted(&name(load)));
        let loads: Vec<_> = loads.collect();
        if loads.is_empty() {
            continue;
        }
        let served = place.serve_memory(served_by, &units(setup.size_mb / 4))?;
        for disk in &served.disks {
            fill(&place, disk)?;
        }
        let first = rows.len();
        rows.extend(loads.iter().map(|(load, _)| Row {
            name: name(load),
            iops: vec![Vec::new(); served.disks.len()],
        }));
        for round in 0..rounds {
            for ((_, load), row) in loads.iter().zip(&mut rows[first..]) {
                let run = run(&place, *load, setup.seconds);
                add_round(&run, &served, round, row)?;
            }
            println!("{protocol}: round {} of {rounds}", round + 1);
        }
        served.stop()?;
    }
    print!("\n{}", table(&rows));
    Ok(())
}

/// Settings of the units.
fn units(mib: u64) -> Vec<String> {
    let plain = format!("size: {mib}MiB, block_size: 4096");
    let protected = TYPES.map(|kind| format!("{plain}, protection: {{ type: {kind} }}"));
    [plain].into_iter().chain(protected).collect()
}

fn run(place: &Place, load: Load, seconds: u32) -> Run<'_> {
    Run {
        place,
        load,
        jobs: 1,
        seconds,
        warm_up: 1,
        loss: None,
        rate: None,
    }
}

/// Writes all blocks, because the tags of other blocks are not checked.
fn fill(place: &Place, disk: &Address) -> Result<(), Failure> {
    let Address::Url(url) = disk else {
        return Err(format!("{disk:?} is not a unit").into());
    };
    let mut command = place.riser(["bench", url, "--overwrite", "--rw", "write", "--bs", "1M"]);
    command.args(["--depth", "4", "--warm-up", "0s", "--io-size", "100%"]);
    sh::output(&mut command).map(drop)
}

/// Runs a load on each unit, in an order that depends on the round.
fn add_round(run: &Run<'_>, served: &Served, round: usize, row: &mut Row) -> Result<(), Failure> {
    let count = served.disks.len();
    for index in (0..count).map(|index| (index + round) % count) {
        let mut command = run.command(Client::Riser, &served.disks[index])?;
        let output = sh::output(&mut command)?;
        let Reading { iops, .. } = run.reading(Client::Riser, &output)?.some()?;
        row.iops[index].push((round, iops));
    }
    Ok(())
}

/// Formats medians, and the median, minimum and maximum of the ratios within the rounds.
fn table(rows: &[Row]) -> String {
    let mut text = format!("{:<24}{:>14}", "load", "IOPS");
    for kind in TYPES {
        text += &format!("{:>14}{:>24}", format!("type {kind}"), "ratio");
    }
    text.push('\n');
    for row in rows {
        let (plain, protected) = row.iops.split_first().expect("a unit without protection");
        text += &format!("{:<24}{:>14}", row.name, median(plain));
        for iops in protected {
            let ratio = Summary::of(&ratios(iops, plain)).map_or_else(String::new, |ratio| {
                format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.min, ratio.max)
            });
            text += &format!("{:>14}{ratio:>24}", median(iops));
        }
        text.push('\n');
    }
    text
}

fn median(iops: &[(usize, f64)]) -> String {
    let values: Vec<f64> = iops.iter().map(|(_, value)| *value).collect();
    Summary::of(&values).map_or_else(String::new, |values| format!("{:.0}", values.median))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_medians_of_rounds() {
        let row = Row {
            name: "srp read".into(),
            iops: vec![
                vec![(0, 100.0), (1, 200.0), (2, 100.0)],
                vec![(0, 80.0), (1, 180.0), (2, 50.0)],
                vec![(0, 50.0), (1, 50.0), (2, 50.0)],
            ],
        };
        let text = table(&[row]);
        let words: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = "srp read 100 80 0.80 (0.50 to 0.90) 50 0.50 (0.25 to 0.50)";
        assert_eq!(words.join(" "), expected);
    }

    #[test]
    fn units_differ_in_protection_only() {
        let [plain, first, second] = &units(64)[..] else {
            panic!("three units");
        };
        assert_eq!(plain, "size: 64MiB, block_size: 4096");
        assert_eq!(first, &format!("{plain}, protection: {{ type: 1 }}"));
        assert_eq!(second, &format!("{plain}, protection: {{ type: 2 }}"));
    }
}
