//! Describes the machine used for measurements and checks if it's busy.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::results::Provenance;
use super::rig::Rig;
use crate::{Failure, root, sh};

/// Maximum CPU usage by other processes during a run, in percent.
const BUSY: f64 = 5.0;

/// Time to sample CPU usage before a run.
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

/// Returns true if the CPU reports a hypervisor.
fn is_virtual(cpus: &str) -> bool {
    field(cpus, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}

/// Returns the first value with this name in lines such as `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        (found.trim() == name).then(|| value.trim())
    })
}

/// Returns the versions of all available programs.
fn programs(ours: &Path) -> Vec<String> {
    let riser = ours.join("riser");
    let version = |program: &Path, option| {
        let text = line(&mut sh::cmd(program, [option])).ok()?;
        let name = program.file_name()?.to_string_lossy().into_owned();
        // Some programs don't print their name.
        let is_named = text.to_lowercase().contains(&name);
        Some(if is_named {
            text
        } else {
            format!("{name} {text}")
        })
    };
    let all = [
        (riser.as_path(), "--version"),
        (Path::new("fio"), "--version"),
        (Path::new("nbdkit"), "--version"),
        (Path::new("qemu-nbd"), "--version"),
        (Path::new("/usr/sbin/tgtd"), "--version"),
    ];
    let versions = all.into_iter();
    versions
        .filter_map(|(program, option)| version(program, option))
        .collect()
}

fn line(command: &mut std::process::Command) -> Result<String, Failure> {
    let text = sh::output(command)?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Returns the current idle time of all CPUs, in percent.
fn idle_percent() -> Result<f64, Failure> {
    let look = || -> Result<_, Failure> {
        let text = fs::read_to_string("/proc/stat")?;
        idle_of_all(&text).ok_or_else(|| "/proc/stat has no line for all processors".into())
    };
    let (idle_before, all_before) = look()?;
    std::thread::sleep(LOOK);
    let (idle, all) = look()?;
    let all = all.saturating_sub(all_before).max(1);
    Ok(100.0 * idle.saturating_sub(idle_before) as f64 / all as f64)
}

/// Returns idle and total ticks from the `/proc/stat` line for all CPUs (proc(5)).
fn idle_of_all(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Option<Vec<u64>> = line.split_whitespace().map(|t| t.parse().ok()).collect();
    let ticks = ticks?;
    // The fields are user, nice, system, idle, iowait, irq, softirq and steal. Guest time is
    // already included in user time.
    let all = ticks.iter().take(8).sum();
    Some((ticks.get(3)? + ticks.get(4)?, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_guests_are_not_counted_twice() {
        let text = "cpu  10 1 5 70 4 3 2 5 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(idle_of_all(text), Some((74, 100)));
        assert_eq!(idle_of_all("intr 5\n"), None);
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
