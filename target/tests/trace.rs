//! Tests the traces of single commands in a running daemon, as shown by `riserd trace`.

#![allow(missing_docs, reason = "a test")]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use riser_test_peers::tcp::Client;
use riser_testkit::daemon::{Daemon, RISERD};
use riser_testkit::eventually;
use serde_json::Value;

/// Timeout for starting and stopping a trace.
const PATIENCE: Duration = Duration::from_secs(60);

const IQN: &str = "iqn.2026-01.com.example:demo";

fn trace(daemon: &Daemon, args: &[&str]) -> Child {
    let mut command = Command::new(&*RISERD);
    command
        .arg("trace")
        .args(args)
        .arg("--socket")
        .arg(daemon.socket());
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns whether a trace is currently running.
fn is_busy(daemon: &Daemon) -> bool {
    let output = daemon.run_command(&["trace", "--for", "10ms"]);
    String::from_utf8(output.stderr)
        .unwrap()
        .contains("another client is tracing")
}

/// Starts a trace and waits until it's running.
fn trace_under_way(daemon: &Daemon, args: &[&str]) -> Child {
    let mut child = trace(daemon, args);
    eventually("the trace is under way", PATIENCE, || {
        if child.try_wait().unwrap().is_some() {
            // It conflicted with one of our own checks.
            child = trace(daemon, args);
        }
        is_busy(daemon)
    });
    child
}

/// Reads blocks until the trace is complete.
fn until_found(mut trace: Child, client: &mut Client, mut lba: impl FnMut() -> u32) -> String {
    let until = Instant::now() + PATIENCE;
    while trace.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "the trace does not end");
        let [a, b, c, d] = lba().to_be_bytes();
        let read = [0x28, 0, a, b, c, d, 0, 0, 2, 0];
        assert_eq!(client.command(&read, false, 1024, &[]).0, 0);
    }
    let output = trace.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn trace_reports_tags_and_stages() {
    let daemon = Daemon::start("trace", "127.81.0.20");
    let to = "127.81.0.20:3290".parse().unwrap();
    let mut client = Client::login_at(to, IQN, 1, None).unwrap();
    client.command(&[0; 6], false, 0, &[]);

    let args = [
        "--target", "demo", "--lun", "0", "--count", "3", "--for", "60s", "-o", "json",
    ];
    let text = until_found(trace(&daemon, &args), &mut client, || 77);
    let traced: Value = serde_json::from_str(&text).unwrap();
    let commands = traced["commands"].as_array().unwrap();
    assert_eq!(commands.len(), 3);
    let sessions = daemon.json("sessions");
    for command in commands {
        assert_eq!(
            (&command["target"], &command["lun"]),
            (&"demo".into(), &0.into())
        );
        assert_eq!(
            (&command["opcode"], &command["lba"]),
            (&0x28.into(), &77.into())
        );
        assert_eq!(
            (&command["blocks"], &command["bytes"]),
            (&2.into(), &1024.into())
        );
        assert_eq!(command["name"], "READ (10)");
        assert_eq!(
            (&command["protocol"], &command["status"]),
            (&"iscsi".into(), &0.into())
        );
        assert_eq!(command["initiator"], sessions[0]["initiator"]);
        assert_eq!(command["nexus"], sessions[0]["nexus"]);
        let steps = command["steps"].as_array().unwrap();
        let names: Vec<_> = steps
            .iter()
            .map(|step| step["stage"].as_str().unwrap())
            .collect();
        assert_eq!(
            names,
            ["fabric_in", "scsi", "backend", "scsi", "fabric_out"]
        );
        let at: Vec<_> = steps
            .iter()
            .map(|step| step["at"].as_f64().unwrap())
            .collect();
        // The clock is read at each stage, so every duration is larger than zero.
        let end = command["seconds"].as_f64().unwrap();
        let ends = at.iter().skip(1).chain([&end]);
        assert!(
            at.iter().zip(ends).all(|(begin, end)| begin < end),
            "{command}"
        );
    }

    // A command with this tag, in text format.
    let tag = (client.cmd_sn + 5).to_string();
    let args = ["--tag", &tag, "--count", "1", "--for", "60s"];
    let text = until_found(trace_under_way(&daemon, &args), &mut client, || 78);
    assert!(
        text.contains("READ (10) lba 78 blocks 2: 1024 bytes"),
        "{text}"
    );
    assert!(
        text.contains("    fabric_in +0.0, scsi +") && !text.contains("scsi +0.0"),
        "{text}"
    );

    // There is no command that is this slow, or from this initiator.
    for args in [
        &["--slower-than", "60s"][..],
        &["--initiator", "iqn.2026-01.com.example:no"],
    ] {
        let args = [args, &["--for", "300ms"]].concat();
        let text = until_found(trace(&daemon, &args), &mut client, || 79);
        assert_eq!(text, "no command matched\n");
    }
    for (args, code) in [
        (&["--lun", "9"][..], 1),
        (&["--count", "0"], 2),
        (&["--for", "1d"], 2),
    ] {
        let output = trace(&daemon, args).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
}

#[test]
fn trace_stops_when_client_exits() {
    let daemon = Daemon::start("traces", "127.81.0.21");
    let mut first = trace_under_way(&daemon, &["--for", "60s"]);
    first.kill().unwrap();
    first.wait().unwrap();
    while is_busy(&daemon) {}
}
