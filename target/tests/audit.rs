//! Tests the audit log of a running daemon: each kind of event once, with real connections over all
//! protocols.

#![allow(missing_docs, reason = "a test")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::srp::TargetPortId;
use riser_test_peers::gsi::Gsi;
use riser_test_peers::iser_client;
use riser_test_peers::mini::{Mini, login_req, real};
use riser_test_peers::tcp::Client;
use riser_testkit::daemon::Daemon;
use riser_testkit::eventually;
use riser_testkit::eventually_some;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::wire::dm::{Attribute, Method, Status};
use serde_json::Value;

const IQN: &str = "iqn.2026-01.com.example:demo";

/// Returns the target port for the GUID of the portals.
fn port() -> TargetPortId {
    let guid = 0x0200_c0ff_ee00_0001_u64.to_be_bytes();
    TargetPortId([guid, guid].concat().try_into().unwrap())
}

fn host(n: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 83, 0, n))
}

/// Starts a daemon that serves a disk over all protocols on one address, with minimal logging.
fn daemon(name: &str, n: u8, access: &str) -> Daemon {
    let address = host(n);
    let text = format!(
        "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\n\
         targets:\n  - name: demo\n    iqn: {IQN}\n    portals:\n      \
         - {{ protocol: srp, listen: {address}, ioc_guid: 0x0200c0ffee000001 }}\n      \
         - {{ protocol: iser, listen: {address} }}\n      \
         - {{ protocol: iscsi, listen: {address} }}\n    \
         luns: {{ 0: a }}\n    access: {access}\n\
         log: {{ filter: error, format: json }}\n"
    );
    Daemon::start_logging(name, &text)
}

/// Returns all audit lines so far.
fn lines(daemon: &Daemon) -> Vec<Value> {
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    // The last line may be incomplete.
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line["target"] == "riserd::audit")
        .map(|line| line["fields"].clone())
        .collect()
}

/// Waits until there are `count` lines for an event, and returns them.
#[track_caller]
fn wait_for(daemon: &Daemon, event: &str, count: usize) -> Vec<Value> {
    let what = format!("{count} of {event} in {}", daemon.log().display());
    let found = eventually_some(&what, Duration::from_secs(60), || {
        let mut found = lines(daemon);
        found.retain(|line| line["event"] == event);
        (found.len() >= count).then_some(found)
    });
    assert_eq!(found.len(), count, "{found:?}");
    found
}

/// Checks the fields that are required in any line about an initiator.
fn check(line: &Value, protocol: &str, portal: &str, target: Option<&str>) {
    assert_eq!(line["protocol"], protocol, "{line}");
    assert_eq!(line["portal"], portal, "{line}");
    assert_eq!(line.get("target").and_then(Value::as_str), target, "{line}");
    assert!(line["peer"].as_str().unwrap().starts_with("127."), "{line}");
}

#[test]
fn iscsi_sessions_and_denials_are_reported_once() {
    let daemon = daemon("audit-iscsi", 1, "open");
    let to = SocketAddr::new(host(1), 3260);
    let portal = to.to_string();
    let mut client = Client::login_at(to, IQN, 1, None).unwrap();
    client.command(&[0; 6], false, 0, &[]);
    let login = &wait_for(&daemon, "login", 1)[0];
    check(login, "iscsi", &portal, Some("demo"));
    let initiator = login["initiator"].as_str().unwrap().to_owned();
    assert!(
        initiator.starts_with("iqn.") && initiator.contains(','),
        "{initiator}"
    );
    let nexus = login["nexus"].as_u64().unwrap();
    drop(client);
    let end = &wait_for(&daemon, "end", 1)[0];
    check(end, "iscsi", &portal, Some("demo"));
    assert_eq!(
        (end["reason"].as_str(), end["nexus"].as_u64()),
        (Some("closed"), Some(nexus))
    );
    assert_eq!(end["initiator"], initiator.as_str());
    // A new login replaces the old session.
    let _first = Client::login_at(to, IQN, 2, None).unwrap();
    let _second = Client::login_at(to, IQN, 2, None).unwrap();
    wait_for(&daemon, "login", 3);
    assert_eq!(wait_for(&daemon, "end", 2)[1]["reason"], "terminated");

    assert!(Client::login_at(to, "iqn.2026-01.com.example:none", 1, None).is_err());
    let denied = &wait_for(&daemon, "denied", 1)[0];
    check(
        denied,
        "iscsi",
        &portal,
        Some("iqn.2026-01.com.example:none"),
    );
    assert_eq!(denied["reason"], "not_found");
    assert!(denied["initiator"].is_string(), "{denied}");
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    let is_denial = |line: &&str| line.contains("login denied");
    let line = log.lines().find(is_denial).unwrap();
    assert!(line.contains("\"level\":\"WARN\""), "{line}");
}

#[test]
fn disconnected_initiator_may_log_in_again() {
    let daemon = daemon("audit-disconnect", 8, "open");
    let to = SocketAddr::new(host(8), 3260);
    const NAME: &str = "iqn.2026-01.org.example:client";
    let _first = Client::login_at(to, IQN, 1, None).unwrap();
    let nexus = wait_for(&daemon, "login", 1)[0]["nexus"].to_string();
    let unknown = daemon.run_command(&["disconnect", "iqn.2026-01.org.example:other"]);
    assert_eq!(unknown.status.code(), Some(1));
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert!(said.contains("no session of"), "{said}");

    let done = daemon.run_command(&["disconnect", &nexus]);
    assert!(done.status.success(), "{done:?}");
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(said.contains(NAME), "{said}");
    let event = &wait_for(&daemon, "disconnect", 1)[0];
    assert_eq!(event["initiator"], nexus.as_str());
    assert_eq!(event["connections"], 1);
    assert!(
        event["who"].as_str().unwrap().starts_with("uid "),
        "{event}"
    );
    // The client doesn't log out, so its connection is closed.
    assert_eq!(wait_for(&daemon, "end", 1)[0]["reason"], "shutdown");

    let _again = Client::login_at(to, IQN, 1, None).unwrap();
    assert!(daemon.run_command(&["disconnect", NAME]).status.success());
    wait_for(&daemon, "end", 2);
}

#[test]
fn blocked_initiator_stays_out() {
    const NAME: &str = "iqn.2026-01.org.example:client";
    let daemon = daemon("audit-block", 9, "open");
    let to = SocketAddr::new(host(9), 3260);
    let run = |args: &[&str]| {
        let done = daemon.run_command(args);
        let text = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8(text).unwrap())
    };
    let log_in = || Client::login_at(to, IQN, 1, None);
    let is_refused = || {
        let status = LoginStatus::AUTHORIZATION_FAILURE;
        log_in().err() == Some(LoginError::Refused(status))
    };
    let _session = log_in().unwrap();
    let nexus = wait_for(&daemon, "login", 1)[0]["nexus"].to_string();
    let (code, said) = run(&["disconnect", &nexus, "--block"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(NAME) && said.contains("blocked"), "{said}");
    wait_for(&daemon, "end", 1);
    assert!(is_refused());
    let denied = &wait_for(&daemon, "denied", 1)[0];
    assert_eq!(denied["detail"], "blocked by an administrator");
    assert_eq!(wait_for(&daemon, "blocked", 1)[0]["initiator"], NAME);
    // Reloading the configuration doesn't change this.
    assert_eq!(run(&["reload"]).0, Some(0));
    assert!(is_refused());
    let (_, status) = run(&["status"]);
    assert!(
        status.contains(&format!("BLOCKED: initiator {NAME}")),
        "{status}"
    );
    assert_eq!(run(&["unblock", NAME]).0, Some(0));
    assert_eq!(wait_for(&daemon, "unblocked", 1)[0]["initiator"], NAME);
    assert_eq!(run(&["unblock", NAME]).0, Some(1));
    drop(log_in().unwrap());
    // The same without a session, and for a limited time.
    let (code, said) = run(&["disconnect", NAME, "--block", "--for", "2s"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(is_refused());
    let start = Instant::now();
    eventually("the block ends", Duration::from_secs(30), || {
        log_in().is_ok()
    });
    assert!(start.elapsed() >= Duration::from_millis(500));
    assert_eq!(run(&["disconnect", "host-1", "--block"]).0, Some(1));
    assert_eq!(run(&["disconnect", NAME, "--for", "2s"]).0, Some(2));
}

/// Users with the same rule can use each other's initiator names, and the log contains both users.
/// If a rule for a name has its own user, it always rejects other users.
#[test]
fn rejected_name_reports_both_users() {
    const NAME: &str = "iqn.2026-01.org.example:client";
    let users = "{ name: bob, secret: bob-has-another-one }, \
                 { name: carol, secret: carol-has-a-third-one }";
    let shared = format!("open\n    chap: {{ users: [{users}] }}");
    let to = SocketAddr::new(host(7), 3260);
    let [bob, carol] = ["bob:bob-has-another-one", "carol:carol-has-a-third-one"];
    {
        let daemon = daemon("audit-squatter", 7, &shared);
        let _squatter = Client::login_at(to, IQN, 1, Some(bob)).unwrap();
        let refused = Client::login_at(to, IQN, 1, Some(carol)).err();
        let status = LoginStatus::AUTHORIZATION_FAILURE;
        assert_eq!(refused, Some(LoginError::Refused(status)));
        let denied = &wait_for(&daemon, "denied", 1)[0];
        assert_eq!(denied["reason"], "authorization_failure");
        assert!(denied["initiator"].as_str().unwrap().starts_with(NAME));
        let detail = denied["detail"].as_str().unwrap();
        let expected = "authenticated with CHAP name \"carol\", but the existing session of this initiator port has \
                        CHAP name \"bob\"";
        assert_eq!(detail, expected);
    }
    let own = "chap: { users: [{ name: alice, secret: twelve-bytes-or-more }] }";
    let bound = format!("\n      - {{ iqn: {NAME}, {own} }}\n    chap: {{ users: [{users}] }}");
    let daemon = daemon("audit-bound", 7, &bound);
    // There is no session with this name, but other users still cannot log in with it.
    for other in [bob, carol] {
        let refused = Client::login_at(to, IQN, 1, Some(other)).err();
        let status = LoginStatus::AUTHENTICATION_FAILURE;
        assert_eq!(refused, Some(LoginError::Refused(status)));
    }
    let denied = wait_for(&daemon, "denied", 2);
    assert_eq!(
        (&denied[0]["user"], &denied[1]["user"]),
        (&"bob".into(), &"carol".into())
    );
    Client::login_at(to, IQN, 1, Some("twelve-bytes-or-more")).unwrap();
    assert!(wait_for(&daemon, "login", 1)[0]["user"].is_string());
}

#[test]
fn iser_sessions_and_discovery_are_reported_once() {
    let daemon = daemon("audit-iser", 2, "open");
    let to = SocketAddr::new(host(2), 3260);
    let portal = to.to_string();
    let dev = Roce::open(&RoceConfig::new(host(102))).unwrap();
    let mut client = iser_client::Client::connect(dev, to, true, &mut real).unwrap();
    client.login(None, 1, &[], &mut real).unwrap();
    client.send_targets(&mut real);
    let login = &wait_for(&daemon, "login", 1)[0];
    check(login, "iser", &portal, None);
    let discovery = &wait_for(&daemon, "discovery", 1)[0];
    check(discovery, "iser", &portal, None);
    assert_eq!(discovery["found"], 1);
    client.logout(&mut real);
    let end = &wait_for(&daemon, "end", 1)[0];
    check(end, "iser", &portal, None);
    assert_eq!(end["reason"], "logout");
    client.disconnect(&mut real);
}

#[test]
fn srp_sessions_and_denials_are_reported_once() {
    let daemon = daemon("audit-srp", 3, "[{ address: 127.83.0.103 }]");
    let to = SocketAddr::new(host(3), 5555);
    let portal = to.to_string();
    let dev = Roce::open(&RoceConfig::new(host(103))).unwrap();
    let mini = Mini::connect(dev, to, &login_req(7, port()), &mut real);
    let mut mini = mini.map_err(|(_, why)| why).unwrap();
    mini.clear_unit_attention(&mut real);
    let login = &wait_for(&daemon, "login", 1)[0];
    check(login, "srp", &portal, Some("demo"));
    let dev = mini.disconnect(&mut real);
    let end = &wait_for(&daemon, "end", 1)[0];
    check(end, "srp", &portal, Some("demo"));
    assert_eq!(
        (&end["reason"], &end["nexus"]),
        (&"closed".into(), &login["nexus"])
    );
    drop(dev);

    let stranger = Roce::open(&RoceConfig::new(host(104))).unwrap();
    assert!(Mini::connect(stranger, to, &login_req(8, port()), &mut real).is_err());
    let denied = &wait_for(&daemon, "denied", 1)[0];
    check(denied, "srp", &portal, Some("demo"));
    assert_eq!(denied["reason"], "authorization_failure");
    // Discovery on an address starts with this request.
    let mut gsi = Gsi::open(host(105));
    let (status, _) = gsi.query(host(3), Method::Get, Attribute::IoUnitInfo);
    assert_eq!(status, Status::Success);
    let discovery = &wait_for(&daemon, "discovery", 1)[0];
    check(discovery, "srp", "127.83.0.3", None);
    assert_eq!(
        (&discovery["peer"], &discovery["found"]),
        (&"127.83.0.105".into(), &1.into())
    );
    // Configuration changes: the user, the method, and the new configuration.
    assert_eq!(wait_for(&daemon, "config_changed", 1)[0]["how"], "start");
    let set = ["set", "/limits", "max_sessions=9"];
    assert!(daemon.run_command(&set).status.success());
    let changed = &wait_for(&daemon, "config_changed", 2)[1];
    assert!(
        changed["who"].as_str().unwrap().starts_with("uid "),
        "{changed}"
    );
    assert_eq!(
        (&changed["how"], &changed["paths"]),
        (&"set".into(), &"/limits".into())
    );
    assert!(daemon.run_command(&["rollback"]).status.success());
    let back = &wait_for(&daemon, "config_rolled_back", 1)[0];
    let first = &wait_for(&daemon, "config_changed", 2)[0]["revision"];
    assert_eq!(
        (&back["how"], &back["revision"]),
        (&"rollback 1".into(), first)
    );
    assert!(
        !daemon
            .run_command(&["set", "/workers", "count=2"])
            .status
            .success()
    );
    let rejected = &wait_for(&daemon, "config_rejected", 1)[0];
    assert_eq!(&rejected["revision"], first);
    assert!(
        rejected["reason"]
            .as_str()
            .unwrap()
            .contains("requires a restart"),
        "{rejected}"
    );
    // Upgrade to another program.
    let refused = daemon.run_command(&["upgrade", "--binary", "/bin/true"]);
    assert!(!refused.status.success());
    let rejected = &wait_for(&daemon, "upgrade_rejected", 1)[0];
    assert_eq!(rejected["program"], "/bin/true", "{rejected}");
    assert!(rejected["reason"].is_string(), "{rejected}");
    assert!(daemon.run_command(&["upgrade"]).status.success());
    let upgrade = &wait_for(&daemon, "upgrade", 1)[0];
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        (&upgrade["from"], &upgrade["to"]),
        (&version.into(), &version.into())
    );
}

#[test]
fn flood_of_denials_is_limited_and_counted() {
    const ATTEMPTS: usize = 300;
    let daemon = daemon("audit-flood", 5, "open");
    let to = SocketAddr::new(host(5), 3260);
    let began = Instant::now();
    for _ in 0..ATTEMPTS {
        assert!(Client::login_at(to, "iqn.2026-01.com.example:none", 1, None).is_err());
    }
    // A burst, and then one line per second.
    let reported = |lines: &[Value]| {
        let denied = lines
            .iter()
            .filter(|line| line["event"] == "denied")
            .count();
        let held = lines
            .iter()
            .filter(|line| line["of"].is_null() || line["of"] == "denied");
        denied
            + held
                .filter_map(|line| line["suppressed"].as_u64())
                .sum::<u64>() as usize
    };
    eventually("every attempt in the log", Duration::from_secs(60), || {
        reported(&lines(&daemon)) >= ATTEMPTS
    });
    let all = lines(&daemon);
    assert_eq!(reported(&all), ATTEMPTS, "each has a line or is counted");
    let seconds = began.elapsed().as_secs() as usize;
    let about = all
        .iter()
        .filter(|line| line["event"] == "denied" || line["event"] == "suppressed");
    assert!(about.count() <= 10 + seconds + 1, "{all:?}");
    // A successful login is still logged.
    let _client = Client::login_at(to, IQN, 1, None).unwrap();
    wait_for(&daemon, "login", 1);
}

#[test]
fn audit_log_can_be_disabled() {
    let daemon = Daemon::start_logging(
        "audit-off",
        "targets: []\nlog: { audit: off, format: json }\n",
    );
    assert!(
        daemon
            .run_command(&["set", "/limits", "max_sessions=9"])
            .status
            .success()
    );
    assert_eq!(lines(&daemon), Vec::<Value>::new());
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(log.contains("\"changed\""), "{log}");
    // The status page must not contain it either, because any local user can read it.
    assert!(
        !daemon
            .run_command(&["set", "/limits", "max_sessions=0"])
            .status
            .success()
    );
    let recent = daemon.http("GET /v1/recent");
    let (_, body) = recent.split_once("\r\n\r\n").unwrap();
    let recent: Value = serde_json::from_str(body).unwrap();
    let events = recent["events"].as_array().unwrap().iter();
    let texts: Vec<_> = events.map(|e| e["text"].as_str().unwrap()).collect();
    assert!(
        !texts.iter().any(|text| text.contains("configuration")),
        "{texts:?}"
    );
}
