//! `cargo xtask path-cost`: uses kernel tracepoints to count packet buffers, system calls, copies
//! and context switches per operation.
//!
//! - Packet buffers (skbs) queued to a device: `net:net_dev_queue`. If a packet is sent by the
//!   kernel, such as a TCP acknowledgement, it's counted for the current process.
//! - System calls: `raw_syscalls:sys_enter`, and by name.
//! - Copies from packet buffers to a process: `skb:skb_copy_datagram_iovec`. There is no tracepoint
//!   for copies to packet buffers.
//! - Context switches: `sched:sched_switch` from a thread of the process, either because it sleeps
//!   or because its core is used for another thread.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::rig::{Rig, Setup};
use super::select;
use super::systems::{Server, System};
use super::workloads::Workload;
use crate::packages::{ensure, needs};
use crate::{Failure, sh};

/// Tracepoint directory.
const EVENTS: &str = "/sys/kernel/tracing/events";

/// Skbs, total system calls, copies and context switches.
const TOTALS: [&str; 4] = [
    "net:net_dev_queue",
    "raw_syscalls:sys_enter",
    "skb:skb_copy_datagram_iovec",
    "sched:sched_switch",
];

/// System calls to count by name, if they are supported by the kernel.
const CALLS: &[&str] = &[
    "io_uring_enter",
    "read",
    "write",
    "pread64",
    "pwrite64",
    "readv",
    "writev",
    "sendto",
    "recvfrom",
    "sendmsg",
    "recvmsg",
    "sendmmsg",
    "recvmmsg",
    "poll",
    "ppoll",
    "epoll_wait",
    "epoll_pwait2",
    "futex",
];

/// Maximum number of names to show for each side.
const MOST: usize = 3;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only systems and workloads whose names contain WORD; may be repeated.
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    #[command(flatten)]
    setup: Setup,
}

/// Counts of one side, with the event name for each.
#[derive(Debug, PartialEq)]
struct Counts(Vec<(String, f64)>);

/// Runs the measurement and prints a table.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !sh::is_root() {
        return Err("tracepoints need root".into());
    }
    if !ensure(needs("path-cost")).is_empty() {
        return Err("perf is missing".into());
    }
    if !Path::new(EVENTS).is_dir() {
        return Err("tracefs is not mounted: `mount -t tracefs nodev /sys/kernel/tracing`".into());
    }
    let selection = select::of(&options.only)?;
    // Without a server, there is no data path.
    let systems = selection.systems.into_iter();
    let systems: Vec<_> = systems
        .filter(|system| system.server != Server::None)
        .collect();
    let rig = Rig::prepare(&options.setup, &systems)?;
    println!(
        "| | | skbs | system calls | copies out of skbs | context switches | calls of the server | \
         calls of the client |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for workload in &selection.workloads {
        for system in systems.iter().filter(|system| system.runs(&workload.load)) {
            match rig.lacks(system) {
                Some(why) => println!("| {} | {} | {why} | | | | | |", system.label, workload.name),
                None => println!("{}", row(&rig, system, workload)?),
            }
        }
    }
    println!(
        "\nServer + client, for each operation; the start and the end of the client are included."
    );
    Ok(())
}

/// Measures a table cell and returns its row.
fn row(rig: &Rig, system: &System, workload: &Workload) -> Result<String, Failure> {
    let served = rig.served(system)?;
    let run = rig.run(&workload.load);
    let client = run.command(system.client, &served.disks[0])?;
    let scratch = &rig.place.scratch;
    let logs = ["server.csv", "client.csv"].map(|name| scratch.join(name));
    // The inner `perf` runs the client, so that its children are also counted. The outer one counts
    // the server processes during this time.
    let inner = sh::behind(stat(&logs[1], &[]), &client);
    let mut outer = sh::behind(stat(&logs[0], &served.processes()), &inner);
    let output = sh::output(&mut outer)?;
    served.stop()?;
    let operations = run.reading(system.client, &output)?.some()?.operations;
    let [server, client] = logs.map(|log| -> Result<Counts, Failure> {
        let text = fs::read_to_string(&log)?;
        counts(&text, operations).map_err(Failure::from)
    });
    let (server, client) = (server?, client?);
    let both = |event| format!("{:.2} + {:.2}", server.of(event), client.of(event));
    let totals = TOTALS.map(both).join(" | ");
    let (name, most) = (workload.name, [server.most(), client.most()].join(" | "));
    Ok(format!("| {} | {name} | {totals} | {most} |", system.label))
}

/// Returns a `perf stat` command to measure these processes, or the command passed to it.
fn stat(log: &Path, processes: &[u32]) -> Command {
    let calls = CALLS.iter().filter(|call| {
        let folder = format!("{EVENTS}/syscalls/sys_enter_{call}");
        Path::new(&folder).is_dir()
    });
    let calls = calls.map(|call| format!("syscalls:sys_enter_{call}"));
    let events: Vec<_> = TOTALS.map(str::to_owned).into_iter().chain(calls).collect();
    let mut command = sh::cmd("perf", ["stat", "-x", ",", "-e", &events.join(","), "-o"]);
    command.arg(log);
    if !processes.is_empty() {
        let processes: Vec<_> = processes.iter().map(u32::to_string).collect();
        command.args(["-p", &processes.join(",")]);
    }
    command.arg("--");
    command
}

/// Parses the output of `perf stat -x ,` and returns the counts per operation.
fn counts(text: &str, operations: f64) -> Result<Counts, String> {
    let mut counts = Vec::new();
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    for line in lines {
        let mut fields = line.split(',');
        let (count, event) = (fields.next().unwrap_or_default(), fields.nth(1));
        let event = event.ok_or_else(|| format!("perf printed `{line}`"))?;
        let count: f64 = count
            .parse()
            .map_err(|_| format!("perf cannot count {event}: {count}"))?;
        counts.push((event.to_owned(), count / operations));
    }
    for event in TOTALS {
        if counts.iter().all(|(name, _)| name != event) {
            return Err(format!("perf printed no count of {event}"));
        }
    }
    Ok(Counts(counts))
}

impl Counts {
    fn of(&self, event: &str) -> f64 {
        let found = self.0.iter().find(|(name, _)| name == event);
        found.map_or(0.0, |(_, count)| *count)
    }

    /// Returns the most frequent system calls by name.
    fn most(&self) -> String {
        let call = |(name, count): &(String, f64)| {
            let name = name.strip_prefix("syscalls:sys_enter_")?;
            (*count >= 0.005).then(|| (name.to_owned(), *count))
        };
        let mut calls: Vec<_> = self.0.iter().filter_map(call).collect();
        calls.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let most = calls.iter().take(MOST);
        let most = most.map(|(name, count)| format!("{name} {count:.2}"));
        most.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# started on Thu\n\n\
        200,,net:net_dev_queue,740525,100.00,,\n300,,raw_syscalls:sys_enter,740525,100.00,,\n\
        0,,skb:skb_copy_datagram_iovec,740525,100.00,,\n25,,sched:sched_switch,740525,100.00,,\n\
        50,,syscalls:sys_enter_sendmmsg,7,100.00,,\n\
        150,,syscalls:sys_enter_recvmmsg,7,100.00,,\n0,,syscalls:sys_enter_read,7,100.00,,\n";

    #[test]
    fn counts_are_for_each_operation() {
        let counts = counts(TEXT, 100.0).unwrap();
        assert_eq!(TOTALS.map(|event| counts.of(event)), [2.0, 3.0, 0.0, 0.25]);
        assert_eq!(counts.most(), "recvmmsg 1.50, sendmmsg 0.50");
    }

    #[test]
    fn uncounted_event_is_error() {
        let why = |text: &str| counts(text, 1.0).unwrap_err();
        let not = TEXT.replace("200,,net", "<not counted>,,net");
        assert!(why(&not).contains("net:net_dev_queue: <not counted>"));
        assert!(why("1,,net:net_dev_queue,1,1,,").contains("raw_syscalls:sys_enter"));
        let without = TEXT.replace("sched:sched_switch", "sched:sched_wakeup");
        assert!(why(&without).contains("sched:sched_switch"));
        assert!(why("nonsense").contains("nonsense"));
    }
}
