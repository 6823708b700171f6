//! Describes the machine used for measurements and checks if it's busy.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::results::Provenance;
use super::rig::Rig;
use crate::{Failure, root, sh};

/// Maximum CPU usage by other processes during a measurement, in percent.
const BUSY: f64 = 5.0;

/// Time to sample CPU usage before a measurement.
const LOOK: Duration = Duration::from_secs(2);

/// Describes the machine, the programs and the current run. Prints a warning if other processes are
/// using the CPUs.
pub(super) fn provenance(rig: &Rig, rounds: usize) -> Result<Provenance, Failure> {
    let idle_percent = idle_percent()?;
    if idle_percent < 100.0 - BUSY {
        println!("the processors are only {idle_percent:.0} % idle: results will be too low");
    }
    let scratch = &rig.place.scratch;
    let mut stat = sh::cmd("stat", ["-f", "-c", "%T"]);
    Ok(Provenance {
        command: std::env::args()
            .skip(1)
            .fold("cargo xtask".to_owned(), |all, word| all + " " + &word),
        date: line(&mut sh::cmd("date", ["-u", "+%F"]))?,
        // Other programs may be from any commit.
        commit: rig
            .is_built
            .then(commit_of_sources)
            .and_then(Result::ok)
            .unwrap_or_else(|| "unknown".to_owned()),
        machine: machine()?,
        idle_percent: (idle_percent * 10.0).round() / 10.0,
        programs: programs(&rig.place.programs),
        size_mib: rig.size_mib,
        file_system: line(stat.arg(scratch))?,
        rounds,
        seconds: rig.seconds,
    })
}

/// Returns the commit of our sources, with a plus sign if there are local changes.
fn commit_of_sources() -> Result<String, Failure> {
    let git = |args: &[&str]| sh::output(sh::cmd("git", args).current_dir(root()));
    let mut commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    // Changes to documents and results don't affect the measurement.
    let changes = git(&[
        "status",
        "--porcelain",
        "--",
        "*.rs",
        "*.toml",
        "Cargo.lock",
    ])?;
    if !changes.trim().is_empty() {
        commit.push('+');
    }
    Ok(commit)
}

fn machine() -> Result<String, Failure> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let memory = fs::read_to_string("/proc/meminfo")?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let cores = std::thread::available_parallelism()?;
    let kind = if is_virtual(&cpus) {
        "virtual machine"
    } else {
        "machine"
    };
    let model = field(&cpus, "model name").unwrap_or("unknown processor");
    let kib = field(&memory, "MemTotal").and_then(|size| size.split(' ').next()?.parse().ok());
    let gib = kib.map_or(0.0, |kib: f64| kib / f64::from(1 << 20));
    Ok(format!(
        "{kind} with {cores} cores ({model}), {gib:.0} GiB of memory, Linux {}",
        kernel.trim()
    ))
}

fn is_virtual(cpus: &str) -> bool {
    field(cpus, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        (found.trim() == name).then(|| value.trim())
    })
}

fn programs(ours: &Path) -> Vec<String> {
    let version = |program: PathBuf| {
        let text = line(&mut sh::cmd(&program, ["--version"])).ok()?;
        let name = program.file_name()?.to_string_lossy().into_owned();
        // Some programs don't print their name.
        Some(match text.to_lowercase().contains(&name) {
            true => text,
            false => format!("{name} {text}"),
        })
    };
    let others = ["fio", "nbdkit", "qemu-nbd", "/usr/sbin/tgtd"].map(PathBuf::from);
    let all = [ours.join("riser")].into_iter().chain(others);
    all.filter_map(version).collect()
}

fn line(command: &mut std::process::Command) -> Result<String, Failure> {
    let text = sh::output(command)?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

fn idle_percent() -> Result<f64, Failure> {
    let look = || -> Result<_, Failure> { idle_of_all(&fs::read_to_string("/proc/uptime")?) };
    let (all_before, idle_before) = look()?;
    std::thread::sleep(LOOK);
    let (all, idle) = look()?;
    let cores = std::thread::available_parallelism()?.get() as f64;
    Ok((100.0 * (idle - idle_before) / (all - all_before) / cores).clamp(0.0, 100.0))
}

/// Parses `/proc/uptime`: the uptime, and the sum of the idle times of all CPUs (proc(5)).
fn idle_of_all(text: &str) -> Result<(f64, f64), Failure> {
    let (uptime, idle) = text.trim().split_once(' ').ok_or("invalid /proc/uptime")?;
    Ok((uptime.parse()?, idle.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_parsed() {
        assert_eq!(
            idle_of_all("350735.47 234388.90\n").unwrap(),
            (350_735.47, 234_388.9)
        );
        assert!(idle_of_all("5\n").is_err());
        assert!((0.0..=100.0).contains(&idle_percent().unwrap()));
    }

    #[test]
    fn machine_uses_first_processor() {
        let cpus = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: fpu hypervisor sse\n\n\
                    processor\t: 1\nmodel name\t: B\n";
        assert_eq!(field(cpus, "model name"), Some("A CPU @ 2 GHz"));
        assert!(is_virtual(cpus) && !is_virtual("flags : fpu hypervisors\n"));
        assert_eq!(field(cpus, "flag"), None);
    }
}
