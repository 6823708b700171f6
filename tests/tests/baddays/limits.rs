//! A host tries to use all of a disk's performance, but is limited. This is tested for all
//! protocols, and the limit is also changed while there are open sessions.
//!
//! A limit is the maximum amount of work in a given time. Even if this machine is slow, it must
//! never be exceeded, because we use the run time of the whole program. To check that other hosts
//! are not limited, their load must be higher than the limit, which is set to a few commands per
//! second.

use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use riser_testkit::programs::succeeded;
use serde_json::Value;

use crate::eventually;
use crate::target::Daemon;

/// Default burst time of a limit, in seconds.
const BURST: f64 = 0.1;

/// Run time of a load.
const RUNTIME: &[&str] = &["--runtime=3s"];

/// A running load. Returns the number of completed commands, and the maximum time in seconds.
pub(crate) type Load = JoinHandle<(f64, f64)>;

/// Starts a random read or write load with 4 KiB blocks, a queue depth of four and additional
/// options.
pub(crate) fn load(daemon: &Daemon, url: &str, rw: &str, options: &[&str]) -> Load {
    let mut command = daemon.riser(&["bench", url, "--rw", rw, "--warm-up=0s", "--overwrite"]);
    command
        .args(["--depth=4", "-o", "json"])
        .args(options)
        .stderr(Stdio::inherit());
    thread::spawn(move || {
        let since = Instant::now();
        let report: Value = serde_json::from_str(&succeeded(&mut command)).unwrap();
        let seconds = since.elapsed().as_secs_f64();
        let done = |way: &str| report["jobs"][0][way]["total_ios"].as_f64().unwrap();
        let done = done("read") + done("write");
        assert!(done > 0.0, "{report}");
        (done, seconds)
    })
}

fn assert_limited(iops: f64, (done, seconds): (f64, f64)) {
    assert!(done <= most(iops, seconds), "{done} in {seconds} s");
}

fn assert_free(iops: f64, (done, seconds): (f64, f64)) {
    assert!(done > most(iops, seconds), "{done} in {seconds} s");
}

/// Returns the maximum number of commands that are allowed by a limit in this time.
fn most(iops: f64, seconds: f64) -> f64 {
    iops * (seconds + BURST) + 1.0
}

const IQN: &str = "iqn.2026-01.com.example:t";

fn urls(address: &str, lun: u32) -> [String; 3] {
    [
        format!("srp://{address}/{lun}"),
        format!("iser://{address}/{IQN}/{lun}"),
        format!("iscsi://{address}/{IQN}/{lun}"),
    ]
}

fn config(network: u8, limits: &str, access: &str) -> String {
    let listen = format!("127.0.{network}.1");
    format!(
        "
backends:
  d: {{ kind: ram, size: 16MiB{limits} }}
  free: {{ kind: ram, size: 16MiB }}
targets:
  - name: t
    iqn: {IQN}
    portals:
      - {{ protocol: srp, listen: {listen} }}
      - {{ protocol: iser, listen: {listen} }}
      - {{ protocol: iscsi, listen: {listen} }}
    luns: {{ 0: d, 1: free }}
    access: {access}
metrics: {{ listen: {listen}:9909 }}"
    )
}

/// Returns the number of logins.
fn logins(daemon: &Daemon) -> u64 {
    let status = daemon.json(&["status"]);
    let workers = status["workers"].as_array().unwrap().iter();
    workers
        .map(|worker| worker["logins"].as_u64().unwrap())
        .sum()
}

fn set(daemon: &Daemon, path: &str, key: &str) {
    let (code, _, errors) = daemon.run_command(&["set", path, key]);
    assert_eq!(code, 0, "{errors}");
}

/// Checks that a changed limit is applied immediately, both to an active session and to waiting
/// commands. `slow` should allow one command per second.
fn check_live(daemon: &Daemon, url: &str, options: &[&str], path: &str, slow: &str, fast: &str) {
    set(daemon, path, &format!("limits/{slow}"));
    // With this limit, the load would take minutes.
    let options = [options, &["--total=1600K"]].concat();
    let load = load(daemon, url, "randread", &options);
    eventually("commands wait", || {
        let session = &daemon.json(&["sessions"])[0];
        session["in_flight"].as_u64() > Some(3)
    });
    let before = logins(daemon);
    set(daemon, path, &format!("limits/{fast}"));
    assert_free(1.0, load.join().unwrap());
    assert_eq!(logins(daemon), before, "{url}: the session continues");
}

#[test]
fn disk_limit_applies_to_all_protocols() {
    let mut daemon = Daemon::new(&config(196, ", limits: { iops: 4 }", "open"));
    daemon.serve();
    let (limited, free) = (urls("127.0.196.1", 0), urls("127.0.196.1", 1));
    // Use all protocols with reads and writes at the same time.
    let since = Instant::now();
    let ways = ["randread", "randwrite", "randread"];
    let loads = limited.iter().zip(ways);
    let loads: Vec<_> = loads
        .map(|(url, rw)| load(&daemon, url, rw, RUNTIME))
        .collect();
    let other = load(&daemon, &free[0], "randread", RUNTIME);
    assert_free(4.0, other.join().unwrap());
    let done: f64 = loads.into_iter().map(|load| load.join().unwrap().0).sum();
    assert_limited(4.0, (done, since.elapsed().as_secs_f64()));
    let page = succeeded(Command::new("curl").args(["-s", "127.0.196.1:9909/metrics"]));
    let waits = page.lines().find_map(|line| {
        let count = line.strip_prefix("riser_backend_limit_waits_total{backend=\"d\"} ")?;
        count.parse::<f64>().ok()
    });
    assert!(waits.is_some_and(|n| n > 0.0), "{page}");

    for url in &limited {
        check_live(&daemon, url, &[], "/backends/d", "iops=1", "iops=100000");
    }
    let targets = daemon.json(&["targets"]);
    let limits = &targets[0]["luns"]["0"]["limits"];
    assert_eq!(limits["rates"]["iops"], 100_000, "{limits}");
}

#[test]
fn host_limit_spares_other_hosts() {
    let rules = "
      - { iqn: iqn.2026-01.com.example:noisy, limits: { bandwidth: 16KiB } }
      - { address: 127.0.197.2, limits: { bandwidth: 16KiB } }
      - { address: 127.0.0.0/8 }";
    let mut daemon = Daemon::new(&config(197, "", rules));
    daemon.serve();
    let [srp, iser, iscsi] = urls("127.0.197.1", 0);
    let as_noisy = |url: &str| format!("{url}?initiator=iqn.2026-01.com.example:noisy");
    // Four commands of 4 KiB per second. This limit is for the name, so it includes both of its
    // protocols.
    let since = Instant::now();
    let named = [
        load(&daemon, &as_noisy(&iser), "randread", RUNTIME),
        load(&daemon, &as_noisy(&iscsi), "randwrite", RUNTIME),
    ];
    let others = [&srp, &iser, &iscsi].map(|url| load(&daemon, url, "randread", RUNTIME));
    eventually("both sessions are limited", || {
        let sessions = daemon.json(&["sessions"]);
        let all = sessions.as_array().unwrap().iter();
        let limited = all.filter(|session| session["limits"]["rates"]["bandwidth"] == 16_384);
        limited.count() == 2
    });
    for load in others {
        assert_free(4.0, load.join().unwrap());
    }
    let done: f64 = named.into_iter().map(|load| load.join().unwrap().0).sum();
    assert_limited(4.0, (done, since.elapsed().as_secs_f64()));
    // For the host, using SRP.
    let from_there = ["--addr=127.0.197.2"];
    let options = [RUNTIME, &from_there].concat();
    assert_limited(
        4.0,
        load(&daemon, &srp, "randread", &options).join().unwrap(),
    );
    for (url, rule, options) in [
        (srp, 1, &from_there[..]),
        (as_noisy(&iser), 0, &[]),
        (as_noisy(&iscsi), 0, &[]),
    ] {
        let rule = format!("/targets/t/access/{rule}");
        check_live(
            &daemon,
            &url,
            options,
            &rule,
            "bandwidth=4KiB",
            "bandwidth=1GiB",
        );
    }
}
