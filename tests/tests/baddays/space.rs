//! Fills the file system used for a sparse file. This should be reported before writes start to
//! fail.

use std::fs;
use std::process::Command;

use riser_testkit::programs::skip;
use serde_json::Value;

use crate::target::Daemon;
use crate::{ended, eventually};

const THIN: &str = "
backends:
  thin: { kind: file, path: DIR/small/image, size: 64MiB, create: true, threshold: 50% }
  other: { kind: ram, size: 16MiB }
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals:
      - { protocol: srp, listen: 127.0.206.1 }
      - { protocol: iscsi, listen: 127.0.206.1 }
    luns: { 0: thin, 1: other }
    access: open
metrics: { listen: 127.0.206.1:9909 }";

const URL: &str = "srp://127.0.206.1/0";

fn run(tool: &str, args: &[&str]) -> bool {
    let ended = Command::new(tool).args(args).status();
    ended.is_ok_and(|status| status.success())
}

/// A small file system, which is removed on drop.
struct Small(String);

impl Small {
    fn new(at: &str) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=16m", "none", at];
        run("mount", &options).then(|| Self(at.to_owned()))
    }

    fn grow(&self) {
        assert!(run("mount", &["-o", "remount,size=128m", &self.0]));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run("umount", &["-l", &self.0]);
    }
}

fn get(path: &str) -> String {
    ended(Command::new("curl").args(["-s", &format!("127.0.206.1:9909{path}")])).1
}

fn metric(name: &str) -> Option<f64> {
    let metrics = get("/metrics");
    let mut lines = metrics.lines();
    lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

impl Daemon {
    /// Writes `mib` MiB at the start of the disk. Returns the exit status and error output.
    fn fill(&self, mib: usize) -> (i32, String) {
        let data = self.path("data");
        fs::write(&data, vec![7; mib << 20]).unwrap();
        let args = ["write", URL, data.to_str().unwrap(), "-q", "--overwrite"];
        let (code, _, errors) = ended(&mut self.riser(&args));
        (code, errors)
    }
}

#[test]
fn filling_disk_is_reported_before_failure() {
    let mut daemon = Daemon::new(THIN);
    let Some(small) = Small::new(daemon.path("small").to_str().unwrap()) else {
        let name = "filling_disk_is_reported_before_failure";
        return skip(name, "nothing may be mounted");
    };
    daemon.serve();
    let reached = || metric("riser_backend_threshold_reached{backend=\"thin\"}");
    eventually("the threshold is known", || reached() == Some(0.0));
    assert_eq!(daemon.fill(4), (0, String::new()));
    assert_eq!(daemon.fill(12), (0, String::new()));
    eventually("the threshold is reached", || reached() == Some(1.0));
    assert_eq!(
        daemon
            .log()
            .matches("backend has reached its threshold")
            .count(),
        1
    );
    let backend = || -> Value {
        let live: Value = serde_json::from_str(&get("/v1/live")).unwrap();
        live["backends"][0].clone()
    };
    assert_eq!(backend()["is_filling"], true);
    assert_eq!(backend()["threshold"], 50);

    // When the file system is full, the write must fail with the correct error, everything else
    // must still work, and the error must be counted and logged.
    let (code, errors) = daemon.fill(24);
    assert_ne!(code, 0);
    assert!(errors.contains("no space left"), "{errors}");
    let failed = metric("riser_backend_errors_total{backend=\"thin\",kind=\"no_space\"}");
    assert!(failed.is_some_and(|n| n > 0.0), "{failed:?}");
    // DATA PROTECT (SBC-3 4.7.3.6.3).
    let protect = "riser_command_errors_total{target=\"t\",lun=\"0\",op=\"write\",status=\"0x02\",sense_key=\"0x07\"}";
    assert!(metric(protect).is_some(), "{}", get("/metrics"));
    assert!(!backend()["errors"]["no_space"].is_null(), "{}", backend());
    let recent: Value = serde_json::from_str(&get("/v1/recent")).unwrap();
    let texts = recent["events"].as_array().unwrap().iter();
    let texts: Vec<_> = texts.map(|event| event["text"].as_str().unwrap()).collect();
    assert!(
        texts
            .iter()
            .any(|text| text.starts_with("backend has reached its threshold")),
        "{texts:?}"
    );
    daemon.write_block("srp://127.0.206.1/1", 3);

    // If there is more space, writes must work again without any changes to the daemon.
    small.grow();
    assert_eq!(daemon.fill(24), (0, String::new()));
    eventually("there is room again", || reached() == Some(0.0));
}
