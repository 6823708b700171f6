//! What the service may do, by systemd's own measure, from the unit alone; the package's test looks
//! at the running one.

use std::process::Command;

use riser_testkit::programs::missing;
use riser_testkit::skip::skip;

/// Most that the service may be exposed, of 100, by `systemd-analyze security`. It is 20; without
/// the empty set of capabilities it would be 40.
const EXPOSURE: u32 = 25;

const UNIT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../deploy/systemd/riserd.service"
);

/// With systemd's default, five failures in ten seconds would be the end of it until the next boot.
#[test]
fn the_service_is_started_until_it_serves() {
    let text = std::fs::read_to_string(UNIT).unwrap();
    let (unit, service) = text.split_once("[Service]").unwrap();
    assert!(unit.lines().any(|line| line == "StartLimitIntervalSec=0"));
    assert!(service.lines().any(|line| line == "Restart=on-failure"));
}

#[test]
fn the_service_is_confined() {
    if let Some(tool) = missing(&["systemd-analyze"]) {
        return skip("the service's exposure", &format!("no {tool}"));
    }
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(format!("--threshold={EXPOSURE}"))
        .arg(UNIT)
        // Only there are crosses crosses.
        .env("LC_ALL", "C.UTF-8")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("Overall exposure level"), "{output:?}");
    assert!(output.status.success(), "{text}");
    // Each line that begins with a cross is a thing that it may do.
    let may = |what: &str| {
        let is_it = |line: &&str| line.contains(what) && line.starts_with('✗');
        text.lines().find(is_it).map(str::to_owned)
    };
    assert!(
        may("SupplementaryGroups=").is_some(),
        "no crosses in {text}"
    );
    for what in [
        "CapabilityBoundingSet=",
        "NoNewPrivileges=",
        "SystemCallFilter=~@mount",
    ] {
        assert_eq!(may(what), None);
    }
}
