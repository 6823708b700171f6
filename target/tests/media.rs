//! Tests files that change while they are served, using the interfaces for operators.

use std::fs::{self, File};
use std::time::Duration;

use riser_testkit::daemon::Daemon;
use riser_testkit::eventually;
use serde_json::Value;

/// Timeout for detecting a change.
const NOTICED: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;

fn start(name: &str, address: &str) -> Daemon {
    let dir = std::env::temp_dir().join(format!("riserd-admin-{}-{name}", std::process::id()));
    let file = |disk: &str| {
        let path = dir.join(disk);
        format!(
            "  {disk}: {{ kind: file, path: {}, size: 1MiB, create: true }}\n",
            path.display()
        )
    };
    let files: String = ["deleted", "replaced", "short", "sound"].map(file).concat();
    let text = format!(
        "backends:\n{files}  absent: {{ kind: device, path: {0}/nothing }}\n\
         targets:\n  - name: t\n    iqn: iqn.2026-01.com.example:t\n    portals:\n      \
         - {{ protocol: iscsi, listen: \"{address}:3290\" }}\n      \
         - {{ protocol: iscsi, listen: \"203.0.113.7:3290\" }}\n    \
         luns: {{ 0: deleted, 1: replaced, 2: short, 3: sound, 4: absent }}\n    access: open\n",
        dir.display()
    );
    Daemon::start_logging(name, &text)
}

/// Returns the problems of all backends as `state name cause`.
fn problems(daemon: &Daemon) -> Vec<String> {
    let status = daemon.json("status");
    let problems = status["problems"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let backends = problems.iter().filter(|p| p["kind"] == "backend");
    backends
        .map(|p| {
            format!(
                "{} {} {}",
                text(&p["state"]),
                text(&p["name"]),
                text(&p["cause"])
            )
        })
        .collect()
}

fn text(daemon: &Daemon, args: &[&str]) -> String {
    let output = daemon.run_command(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn changed_files_are_reported_until_restored() {
    let daemon = start("media", "127.81.4.1");
    let absent = "NOT SERVED absent -";
    assert_eq!(problems(&daemon), [absent]);
    let path = |name: &str| daemon.dir.join(name);
    fs::remove_file(path("deleted")).unwrap();
    fs::rename(path("replaced"), path("old")).unwrap();
    File::create(path("replaced"))
        .unwrap()
        .set_len(4 * MIB)
        .unwrap();
    let short = File::options().write(true).open(path("short")).unwrap();
    short.set_len(4096).unwrap();
    let expected = [
        absent,
        "FAILING deleted deleted",
        "REPLACED replaced replaced",
        "FAILING short truncated",
    ];
    eventually("the changes are noticed", NOTICED, || {
        problems(&daemon) == expected
    });

    // In the text output, readiness check, metrics and log.
    let status = text(&daemon, &["status"]);
    for line in [
        "FAILING: backend deleted: ",
        "REPLACED: backend replaced: ",
        "has 4096 bytes instead of 1048576",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    let ready = daemon.http("GET /readyz");
    assert!(ready.starts_with("HTTP/1.1 503 "), "{ready}");
    assert!(ready.contains("backend deleted: "), "{ready}");
    let metrics = daemon.http("GET /metrics");
    for line in [
        "riser_backend_fault{backend=\"deleted\",cause=\"deleted\"} 1\n",
        "riser_backend_fault{backend=\"replaced\",cause=\"replaced\"} 1\n",
        "riser_backend_fault{backend=\"short\",cause=\"truncated\"} 1\n",
        "riser_backend_failing{backend=\"deleted\"} 1\n",
        "riser_backend_failing{backend=\"sound\"} 0\n",
        "riser_ready 0\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    let errors = |name: &str| {
        let log = fs::read_to_string(daemon.log()).unwrap();
        let name = format!(" name={name}");
        let errors = log
            .lines()
            .filter(|line| line.contains("ERROR") && line.contains(&name));
        errors.count()
    };
    let names = ["deleted", "replaced", "short"];
    eventually("the log has a line for each", NOTICED, || {
        names.map(errors) == [1; 3]
    });

    // The message contains a command to save the data, which only root and the daemon's user can
    // run.
    let (_, command) = status.split_once("run: cp ").unwrap();
    let source = command.split(' ').next().unwrap();
    assert_eq!(fs::copy(source, path("saved")).unwrap(), MIB);

    // The problems are resolved when the files are back in place and the new size was accepted.
    fs::rename(path("old"), path("replaced")).unwrap();
    short.set_len(MIB).unwrap();
    text(&daemon, &["rescan"]);
    assert_eq!(problems(&daemon), [absent, "FAILING deleted deleted"]);
    let log = fs::read_to_string(daemon.log()).unwrap();
    assert_eq!(log.matches("no longer needs attention").count(), 2, "{log}");
}

#[test]
fn rescan_of_truncated_file_reports_lost_data() {
    let daemon = start("shrunk", "127.81.4.2");
    let file = File::options()
        .write(true)
        .open(daemon.dir.join("short"))
        .unwrap();
    file.set_len(4096).unwrap();
    text(&daemon, &["rescan"]);
    let failing = "FAILING short truncated";
    assert!(
        problems(&daemon).contains(&failing.to_owned()),
        "{:?}",
        problems(&daemon)
    );
    let log = fs::read_to_string(daemon.log()).unwrap();
    let line = log.lines().find(|line| line.contains("backend has shrunk"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    for word in ["ERROR", "short", "1048576", "4096"] {
        assert!(line.contains(word), "{line}");
    }
    // The next start extends the file again, with a warning.
    let mut daemon = daemon;
    daemon.restart(&[]);
    let log = fs::read_to_string(daemon.log()).unwrap();
    let line = log
        .lines()
        .find(|line| line.contains("was extended with zeroes"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    for word in ["WARN", "short", "1048576", "4096"] {
        assert!(line.contains(word), "{line}");
    }
}

#[test]
fn unserved_units_have_no_size() {
    let daemon = start("unserved", "127.81.4.3");
    let targets = text(&daemon, &["targets"]);
    let line = targets
        .lines()
        .find(|line| line.contains("lun 4:"))
        .unwrap();
    assert!(line.contains("NOT SERVED (backend absent)"), "{targets}");
    assert!(!line.contains("512 B"), "{targets}");
    let portal = targets
        .lines()
        .find(|line| line.contains("203.0.113.7"))
        .unwrap();
    assert!(portal.contains("NOT SERVED"), "{targets}");
    assert!(targets.contains("lun 3: 1.0 MiB"), "{targets}");
    let tree = text(&daemon, &["ls"]);
    let marked = tree
        .lines()
        .filter(|line| line.contains("NOT SERVED"))
        .count();
    // The backend, its unit, and the portal.
    assert_eq!(marked, 3, "{tree}");
    for path in [
        "/backends/absent",
        "/targets/t/luns/4",
        "/targets/t/portals/iscsi:203.0.113.7:3290",
    ] {
        let info = text(&daemon, &["info", path]);
        assert!(info.contains("NOT SERVED"), "{info}");
    }
    let live: Value = serde_json::from_str(body(&daemon.http("GET /v1/live"))).unwrap();
    assert_eq!(live["luns"][4]["state"], "NOT SERVED", "{live}");
    assert_eq!(live["luns"][4]["size"], Value::Null, "{live}");
    assert_eq!(live["luns"][3]["backend"], "sound", "{live}");
    assert_eq!(live["luns"][3]["size"], MIB, "{live}");
    let metrics = daemon.http("GET /metrics");
    for line in [
        "riser_backend_failing{backend=\"absent\"} 1\n",
        "riser_not_served{kind=\"backend\",name=\"absent\"} 1\n",
        "riser_lun_size_bytes{target=\"t\",lun=\"3\"} 1048576\n",
        "riser_commands_throttled_total{target=\"t\",lun=\"3\",reason=\"limit\"} 0\n",
        "riser_backend_errors_total{backend=\"sound\",kind=\"medium\"} 0\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    assert!(
        metrics.contains("riser_lun_info{target=\"t\",lun=\"3\",backend=\"sound\",serial="),
        "{metrics}"
    );
    for line in [
        "riser_lun_size_bytes{target=\"t\",lun=\"4\"}",
        "riser_backend_size_bytes{backend=\"absent\"}",
    ] {
        assert!(!metrics.contains(line), "{line}{metrics}");
    }
}

#[test]
fn growth_beyond_file_system_warns() {
    let daemon = start("beyond", "127.81.4.4");
    let set = |size: &str, dry: &[&str]| {
        let size = format!("size={size}");
        text(
            &daemon,
            &[&["set", "/backends/sound", &size][..], dry].concat(),
        )
    };
    let warning =
        "warning: backend sound: its size is 4.0 TiB, but its file system only has space for";
    assert!(set("4TiB", &["--dry-run"]).contains(warning));
    assert!(!set("2MiB", &[]).contains("warning: "));
    let said = set("4TiB", &[]);
    assert!(said.contains(warning), "{said}");
    let log = fs::read_to_string(daemon.log()).unwrap();
    assert!(
        log.contains("WARN") && log.contains("backend sound: its size is"),
        "{log}"
    );
}

/// A log that is never read, or is on a full file system.
#[test]
fn daemon_serves_without_its_log() {
    use std::process::Stdio;

    let mut daemon = start("unlogged", "127.81.4.5");
    for is_pipe in [true, false] {
        daemon.kill();
        let mut command = daemon.command(&daemon.config());
        let full = || File::options().write(true).open("/dev/full").unwrap();
        match is_pipe {
            true => command.stderr(Stdio::piped()),
            false => command.stderr(full()),
        };
        daemon.spawn(command);
        drop(daemon.process.stderr.take());
        let absent = "NOT SERVED absent -".to_owned();
        assert!(problems(&daemon).contains(&absent));
        fs::remove_file(daemon.dir.join("deleted")).unwrap();
        text(&daemon, &["rescan"]);
        assert!(problems(&daemon).contains(&"FAILING deleted deleted".to_owned()));
        text(&daemon, &["reload"]);
        assert!(daemon.process.try_wait().unwrap().is_none());
        // The next start needs an existing file, because it would not be created again.
        File::create(daemon.dir.join("deleted"))
            .unwrap()
            .set_len(MIB)
            .unwrap();
    }
}
