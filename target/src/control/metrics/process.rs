//! Process metrics, with the standard names.

use std::fs;

use super::family::Family;

pub(super) fn families() -> Vec<Family> {
    let mut families = Vec::new();
    let mut gauge = |name, help, value: Option<f64>| {
        if let Some(value) = value {
            let mut family = Family::gauge(name, help);
            family.add(&[], value);
            families.push(family);
        }
    };
    // `/proc` may be hidden by a sandbox. If a value cannot be read, we omit it instead of
    // exporting a 0 that looks like a measurement.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    gauge(
        "process_resident_memory_bytes",
        "Resident memory, in bytes, including data read from disks on tmpfs.",
        field(&status, "VmRSS:").map(|kib| kib * 1024.0),
    );
    gauge(
        "process_virtual_memory_bytes",
        "Virtual memory, in bytes.",
        field(&status, "VmSize:").map(|kib| kib * 1024.0),
    );
    gauge("process_threads", "Threads.", field(&status, "Threads:"));
    gauge(
        "process_open_fds",
        "Open file descriptors.",
        fs::read_dir("/proc/self/fd")
            .ok()
            .map(|dir| dir.count() as f64),
    );
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    gauge(
        "process_max_fds",
        "Maximum number of open file descriptors.",
        limit.current.map(|n| n as f64),
    );
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    gauge(
        "process_start_time_seconds",
        "Start time of the process, in seconds since the Unix epoch.",
        start_time(&stat),
    );
    if let Some(seconds) = cpu_time(&stat) {
        let mut family = Family::counter("process_cpu_seconds_total", "CPU time used, in seconds.");
        family.add(&[], seconds);
        families.push(family);
    }
    families
}

/// Parses a number in `/proc/self/status`.
fn field(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Parses a number in `/proc/self/stat`, using the numbering of proc(5), starting at 3.
fn place(stat: &str, number: usize) -> Option<f64> {
    // The second field is the name in parentheses, which can contain any characters.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number - 3)?.parse().ok()
}

fn ticks() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

fn cpu_time(stat: &str) -> Option<f64> {
    Some((place(stat, 14)? + place(stat, 15)?) / ticks())
}

fn start_time(stat: &str) -> Option<f64> {
    let system = fs::read_to_string("/proc/stat").ok()?;
    Some(field(&system, "btime")? + place(stat, 22)? / ticks())
}
