//! Reads and writes of 4 KiB using a real socket. callgrind is used to count the instructions in
//! `riserd`.
//!
//! # Repeatability
//! Instruction counts don't depend on the load of the machine, but the work done by a worker in
//! each loop round depends on the data received so far. We do the following to get the same results
//! for every run:
//!
//! - With callgrind, `riserd` is 20 to 50 times slower, but the client is not. This means that the
//!   client is always waiting for the worker, and the number of messages that are handled together
//!   depends only on the order of the worker's own work.
//! - Rounds without any messages are counted separately, based on function names ([`super::dump`]).
//! - The number of operations is fixed, all measurements use the same seed for offsets, and we
//!   subtract a shorter measurement, so that the cost doesn't include login and logout.
//! - The first run is used to warm up lists and caches, and is not counted.
//! - We use the minimum of several measurements. If it has increased, we add more measurements
//!   before we decide.
//!
//! This still leaves the number of messages that are handled in the same round. With depth 32, the
//! cost per round (without polling) is 10 % of the cost of a command (`Worker::drain_dirty`, packet
//! trains, work request chains). If a round has 20 % more or fewer commands, the cost of the path
//! will change by 2 %. We print this as the spread, which is the difference between the maximum and
//! the minimum of all measurements. The accepted counts also include the spread of their
//! measurements, so that we know how repeatable each path is. The spread should be well below the
//! limit; otherwise we can't compare anything.

use std::fmt;
use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::dump::Dump;
use crate::daemon::{self, Daemon};
use crate::{Failure, root, sh};

/// Listen address, which is not used by any other command or example.
const LISTEN: &str = "127.44.0.2";
/// RoCEv2 port.
const ROCE: u16 = 4791;
const IQN: &str = "iqn.2026-01.com.example:instructions";
const BLOCK: u64 = 4096;
const DISK: u64 = 64 << 20;

/// Name of callgrind's dumps, which have a number as a suffix.
const DUMP: &str = "callgrind.out";

/// Number of operations in the shorter measurement. For each difference, the longer measurement
/// adds the same number again.
const FEW: u64 = 256;
const MORE: u64 = 2048;

/// Data path through the target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Path4k {
    protocol: &'static str,
    direction: &'static str,
    depth: u32,
}

pub(super) fn all() -> impl Iterator<Item = Path4k> {
    let protocols = ["srp", "iser", "iscsi"].into_iter();
    protocols.flat_map(|protocol| {
        ["read", "write"].into_iter().flat_map(move |direction| {
            [1, 32].into_iter().map(move |depth| Path4k {
                protocol,
                direction,
                depth,
            })
        })
    })
}

/// Name of the path, used in the file and on the command line.
impl fmt::Display for Path4k {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.protocol, self.direction, self.depth)
    }
}

impl Path4k {
    pub(super) fn is_named(&self, words: &[String]) -> bool {
        let name = self.to_string();
        words
            .iter()
            .all(|word| name.split(' ').any(|own| own == word))
    }

    fn url(&self) -> String {
        match self.protocol {
            "srp" => format!("srp://{LISTEN}/0"),
            protocol => format!("{protocol}://{LISTEN}/{IQN}/0"),
        }
    }
}

/// A `riserd` with a single worker that is run with callgrind. It exports an in-memory file.
pub(super) struct Rig {
    programs: PathBuf,
    // The daemon must be dropped before its files are removed.
    daemon: Daemon,
    directory: sh::Scratch,
    dumps: u32,
}

impl Rig {
    /// Builds the programs in the same way as the demo and other test steps, but with the same line
    /// tables as a release, then starts the target.
    pub(super) fn start() -> Result<Self, Failure> {
        println!("building riserd and riser");
        let programs = daemon::build()?;
        let directory = sh::Scratch::in_memory("instructions")?;
        fs::write(directory.join("disk"), vec![0x5a; DISK as usize])?;
        let config = directory.join("riserd.yaml");
        fs::write(&config, configuration(directory.path()))?;
        let mut callgrind = sh::cmd("valgrind", ["--tool=callgrind", "--fair-sched=yes"]);
        callgrind.arg(format!(
            "--callgrind-out-file={}",
            directory.join(DUMP).display()
        ));
        let (program, log) = (programs.join("riserd"), directory.join("log"));
        let pulse = Pulse::start()?;
        let daemon = Daemon::start_behind(callgrind, &program, &config, &log)?;
        drop(pulse);
        Ok(Self {
            programs,
            daemon,
            directory,
            dumps: 0,
        })
    }

    /// Returns the cost per operation for this path, using the given number of measurements.
    pub(super) fn measure(&mut self, path: Path4k, runs: usize) -> Result<Vec<Dump>, Failure> {
        self.run(path, FEW)?;
        let few = self.run(path, FEW)?;
        let more = (0..runs).map(|_| self.run(path, FEW + MORE));
        let more: Vec<_> = more.collect::<Result<_, _>>()?;
        Ok(more.iter().map(|run| run.difference(&few, MORE)).collect())
    }

    /// Stops the target. Returns an error if it doesn't exit with success.
    pub(super) fn stop(self) -> Result<(), Failure> {
        let _pulse = Pulse::start()?;
        self.daemon.stop()
    }

    /// Measures the given number of operations.
    fn run(&mut self, path: Path4k, operations: u64) -> Result<Dump, Failure> {
        let output = sh::output(&mut self.client(path, operations))?;
        let done = operations_of(&output, path.direction)?;
        if done != operations {
            return Err(format!("{path}: {done} operations instead of {operations}").into());
        }
        self.dump()
    }

    fn client(&self, path: Path4k, operations: u64) -> std::process::Command {
        let options = "--provider roce --bs 4k --warm-up 0s --overwrite";
        let mut command = sh::cmd(
            self.programs.join("riser"),
            ["--timeout", "60s", "-o", "json", "bench", &path.url()],
        );
        command.args(options.split(' '));
        for (option, value) in [
            ("--rw", format!("rand{}", path.direction)),
            ("--depth", path.depth.to_string()),
            ("--total", (operations * BLOCK).to_string()),
        ] {
            command.args([option, &value]);
        }
        command.env("XDG_RUNTIME_DIR", self.directory.path());
        command.env("RISER_STATE_DIR", self.directory.join("riser"));
        command
    }

    /// Requests a callgrind dump of everything counted since the last dump.
    fn dump(&mut self) -> Result<Dump, Failure> {
        let pid = self.daemon.pid().to_string();
        let said = sh::output(&mut sh::cmd("callgrind_control", ["-d", &pid]))?;
        // We need to check the output, because the exit status is always 0.
        if !said.contains("OK.") {
            return Err(format!("callgrind_control -d {pid}: {}", said.trim_end()).into());
        }
        self.dumps += 1;
        let mut file = self.directory.join(DUMP).into_os_string();
        file.push(format!(".{}", self.dumps));
        let bytes = fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        fs::remove_file(&file)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(Dump::parse(&text, &root().to_string_lossy())?)
    }
}

/// Wakes the worker every millisecond using empty datagrams, until this value is dropped.
///
/// Valgrind only runs one thread at a time and doesn't know that `io_uring_enter(2)` can block. If
/// the worker sleeps in this call, no other thread in `riserd` can run, so it would never start or
/// stop.
struct Pulse(Arc<AtomicBool>);

impl Pulse {
    fn start() -> Result<Self, Failure> {
        let socket = UdpSocket::bind((LISTEN, 0))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let pulse = Self(is_over.clone());
        let beat = move || {
            while !is_over.load(Ordering::Relaxed) {
                // This returns an error if the socket has not been created yet or is already
                // closed.
                let _ = socket.send_to(&[], (LISTEN, ROCE));
                thread::sleep(Duration::from_millis(1));
            }
        };
        thread::Builder::new().spawn(beat)?;
        Ok(pulse)
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn configuration(directory: &Path) -> String {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: {LISTEN} }}"));
    format!(
        "backends:\n  disk: {{ kind: file, path: {} }}\ntargets:\n  - name: instructions\n    \
         iqn: {IQN}\n    portals: [{}]\n    luns: {{ 0: disk }}\n    access: open\n\
         workers: {{ count: 1 }}\nadmin: {{ socket: none }}\nstate: {{ directory: {} }}\n",
        directory.join("disk").display(),
        portals.join(", "),
        directory.join("state").display()
    )
}

fn operations_of(output: &str, direction: &str) -> Result<u64, Failure> {
    let done = sh::json(output)?["jobs"][0][direction]["total_ios"].as_u64();
    done.ok_or_else(|| "missing number of operations in riser's result".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(words: &[&str]) -> Vec<String> {
        let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
        let paths = all().filter(|path| path.is_named(&words));
        paths.map(|path| path.to_string()).collect()
    }

    #[test]
    fn paths_are_selected_by_name() {
        assert_eq!(named(&[]).len(), 12);
        assert_eq!(named(&["srp", "32"]), ["srp read 32", "srp write 32"]);
        assert_eq!(named(&["iscsi"]).len(), 4);
        assert!(named(&["3"]).is_empty() && named(&["srp", "iser"]).is_empty());
    }

    #[test]
    fn operations_are_parsed_from_result() {
        let output =
            "warning\n{\"jobs\":[{\"read\":{\"total_ios\":7},\"write\":{\"total_ios\":0}}]}";
        assert_eq!(operations_of(output, "read").unwrap(), 7);
        assert_eq!(operations_of(output, "write").unwrap(), 0);
        assert!(operations_of("{}", "read").is_err() && operations_of("", "read").is_err());
    }
}
