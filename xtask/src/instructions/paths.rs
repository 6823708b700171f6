//! Reads and writes of 4 KiB through a real socket, counted in `riserd` by callgrind.
//!
//! # How repeatable it is
//! Instructions do not depend on the load of the machine, but what a worker does in one round of
//! its loop depends on what has arrived by then. The following makes that the same in each run:
//!
//! - `riserd` is twenty to fifty times slower under callgrind, and the client is not. The client is
//!   always the one that waits, and the order of the worker's own work decides how much comes
//!   together.
//! - Rounds in which nothing has come are kept apart, by the names of their functions
//!   ([`super::dump`]).
//! - The number of operations is fixed, offsets have the same seed in each run, and a shorter run
//!   is subtracted, so login and logout are no part of the cost.
//! - The first run warms lists and caches up, and is not counted.
//! - The least of some runs is compared; where it has grown, more runs decide.
//!
//! What is left is how many messages come together in a round: the cost of a round that is not
//! polling is a tenth of a command's at depth 32 (`Worker::drain_dirty`, trains of packets, chains
//! of work requests), so a round of a fifth more or fewer commands changes the path by 2 %. It is
//! printed as the spread: the difference between the largest and the smallest of the runs. The
//! accepted counts have that of their own runs beside them, which says how repeatable each path
//! is. It has to stay well below the limit, or a comparison says nothing.

use std::fmt;
use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::dump::Dump;
use crate::daemon::{self, Daemon};
use crate::{Failure, root, sh};

/// An address that no other command and no example uses.
const LISTEN: &str = "127.44.0.2";
/// Port of RoCEv2.
const ROCE: u16 = 4791;
const IQN: &str = "iqn.2026-01.com.example:instructions";
const BLOCK: u64 = 4096;
const DISK: u64 = 64 << 20;

/// Operations of the shorter run, and of the longer ones, that many for each of their differences.
const FEW: u64 = 256;
const MORE: u64 = 2048;

/// A way of data through the target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Path4k {
    protocol: &'static str,
    direction: &'static str,
    depth: u32,
}

/// All that are measured.
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

/// Its name in the file and on the command line.
impl fmt::Display for Path4k {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.protocol, self.direction, self.depth)
    }
}

impl Path4k {
    /// Returns whether all of these words are words of its name.
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

/// A `riserd` under callgrind with one worker, which serves a file in memory.
pub(super) struct Rig {
    programs: PathBuf,
    // It ends before its files go.
    daemon: Daemon,
    folder: Folder,
    dumps: u32,
}

impl Rig {
    /// Builds the programs as the demo and the other steps of the tests do, with the lines of a
    /// release's debug information, and starts the target.
    pub(super) fn start() -> Result<Self, Failure> {
        println!("building riserd and riser");
        let programs = daemon::build()?;
        let folder = Folder::new()?;
        fs::write(folder.0.join("disk"), vec![0x5a; DISK as usize])?;
        let config = folder.0.join("riserd.yaml");
        fs::write(&config, configuration(&folder.0))?;
        let mut callgrind = sh::cmd("valgrind", ["--tool=callgrind", "--fair-sched=yes"]);
        callgrind.arg(format!("--callgrind-out-file={}", folder.dump().display()));
        let (program, log) = (programs.join("riserd"), folder.0.join("log"));
        let pulse = Pulse::start()?;
        let daemon = Daemon::start_behind(callgrind, &program, &config, &log)?;
        drop(pulse);
        Ok(Self {
            programs,
            daemon,
            folder,
            dumps: 0,
        })
    }

    /// Costs of an operation of a path, by this number of runs.
    pub(super) fn measure(&mut self, path: Path4k, runs: usize) -> Result<Vec<Dump>, Failure> {
        self.run(path, FEW)?;
        let few = self.run(path, FEW)?;
        let more = (0..runs).map(|_| self.run(path, FEW + MORE));
        let more: Vec<_> = more.collect::<Result<_, _>>()?;
        Ok(more.iter().map(|run| run.difference(&few, MORE)).collect())
    }

    /// Ends the target; fails where it does not end well.
    pub(super) fn stop(self) -> Result<(), Failure> {
        let _pulse = Pulse::start()?;
        self.daemon.stop()
    }

    /// What these operations take.
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
        command.env("XDG_RUNTIME_DIR", &self.folder.0);
        command.env("RISER_STATE_DIR", self.folder.0.join("riser"));
        command
    }

    /// Has callgrind write what was counted since the last dump.
    fn dump(&mut self) -> Result<Dump, Failure> {
        let pid = self.daemon.pid().to_string();
        let said = sh::output(&mut sh::cmd("callgrind_control", ["-d", &pid]))?;
        // Its exit status is 0 in any case.
        if !said.contains("OK.") {
            return Err(format!("callgrind_control -d {pid}: {}", said.trim_end()).into());
        }
        self.dumps += 1;
        let mut file = self.folder.dump().into_os_string();
        file.push(format!(".{}", self.dumps));
        let bytes = fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        fs::remove_file(&file)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(Dump::parse(&text, &root().to_string_lossy())?)
    }
}

/// Wakes the worker once a millisecond, by empty datagrams, until the value goes.
///
/// Valgrind runs one thread at a time, and does not know that `io_uring_enter(2)` waits: while the
/// worker sleeps there, no other thread of `riserd` runs, so it neither starts nor ends.
struct Pulse(Arc<AtomicBool>);

impl Pulse {
    fn start() -> Result<Self, Failure> {
        let socket = UdpSocket::bind((LISTEN, 0))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let pulse = Self(is_over.clone());
        let beat = move || {
            while !is_over.load(Ordering::Relaxed) {
                // Before there is a socket at the port, and after, this is an error.
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

/// Files of a run, in memory where there is a folder for that.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failure> {
        let shm = PathBuf::from("/dev/shm");
        let parent = if shm.is_dir() {
            shm
        } else {
            std::env::temp_dir()
        };
        sh::remove_abandoned(&parent, "riser-instructions-");
        let folder = parent.join(format!("riser-instructions-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }

    fn dump(&self) -> PathBuf {
        self.0.join("callgrind.out")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn configuration(folder: &Path) -> String {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: {LISTEN} }}"));
    format!(
        "backends:\n  disk: {{ kind: file, path: {} }}\ntargets:\n  - name: instructions\n    \
         iqn: {IQN}\n    portals: [{}]\n    luns: {{ 0: disk }}\n    access: open\n\
         workers: {{ count: 1 }}\nadmin: {{ socket: none }}\nstate: {{ directory: {} }}\n",
        folder.join("disk").display(),
        portals.join(", "),
        folder.join("state").display()
    )
}

/// Number of operations in the JSON of `riser bench`.
fn operations_of(output: &str, direction: &str) -> Result<u64, Failure> {
    let start = output.find('{').ok_or("riser printed no JSON")?;
    let document: Value = serde_json::from_str(&output[start..])?;
    let done = document["jobs"][0][direction]["total_ios"].as_u64();
    done.ok_or_else(|| "the result of riser has no number of operations".into())
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
    fn paths_are_chosen_by_words_of_their_names() {
        assert_eq!(named(&[]).len(), 12);
        assert_eq!(named(&["srp", "32"]), ["srp read 32", "srp write 32"]);
        assert_eq!(named(&["iscsi"]).len(), 4);
        assert!(named(&["3"]).is_empty() && named(&["srp", "iser"]).is_empty());
    }

    #[test]
    fn operations_are_read_from_the_result() {
        let output =
            "warning\n{\"jobs\":[{\"read\":{\"total_ios\":7},\"write\":{\"total_ios\":0}}]}";
        assert_eq!(operations_of(output, "read").unwrap(), 7);
        assert_eq!(operations_of(output, "write").unwrap(), 0);
        assert!(operations_of("{}", "read").is_err() && operations_of("", "read").is_err());
    }
}
