//! The audit log of a running daemon: every kind of event, once, over real connections of every
//! protocol.

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

/// The target port that the portals' GUID makes.
fn port() -> TargetPortId {
    let guid = 0x0200_c0ff_ee00_0001_u64.to_be_bytes();
    TargetPortId([guid, guid].concat().try_into().unwrap())
}

fn host(n: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 83, 0, n))
}

/// A daemon that serves a disk over all protocols at an address, and logs nothing but what it must.
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

/// The audit lines so far.
fn lines(daemon: &Daemon) -> Vec<Value> {
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    // The last one may be on its way.
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| line["target"] == "riserd::audit")
        .map(|line| line["fields"].clone())
        .collect()
}

/// Waits until there are `count` lines of an event, and returns them.
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

/// What every line about an initiator says.
fn check(line: &Value, protocol: &str, portal: &str, target: Option<&str>) {
    assert_eq!(line["protocol"], protocol, "{line}");
    assert_eq!(line["portal"], portal, "{line}");
    assert_eq!(line.get("target").and_then(Value::as_str), target, "{line}");
    assert!(line["peer"].as_str().unwrap().starts_with("127."), "{line}");
}

#[test]
fn iscsi_logins_their_ends_and_denials_are_reported_once() {
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
    // A new login takes the old one's place.
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
}

/// Users of one rule can use each other's initiator names, and the log has both users; a rule for a
/// name with a user of its own always refuses the others.
#[test]
fn a_name_that_another_user_has_is_refused_with_both_identities() {
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
        let expected = "proved CHAP name \"carol\", and the session of this initiator port has proved \
                        CHAP name \"bob\"";
        assert_eq!(detail, expected);
    }
    let own = "chap: { users: [{ name: alice, secret: twelve-bytes-or-more }] }";
    let bound = format!("\n      - {{ iqn: {NAME}, {own} }}\n    chap: {{ users: [{users}] }}");
    let daemon = daemon("audit-bound", 7, &bound);
    // No session has this name, and still other users cannot log in with it.
    for other in [bob, carol] {
        let refused = Client::login_at(to, IQN, 1, Some(other)).err();
        let status = LoginStatus::AUTHENTICATION_FAILURE;
        assert_eq!(refused, Some(LoginError::Refused(status)));
    }
    Client::login_at(to, IQN, 1, Some("twelve-bytes-or-more")).unwrap();
    wait_for(&daemon, "login", 1);
}

#[test]
fn iser_logins_discovery_and_logouts_are_reported_once() {
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
fn srp_logins_their_ends_and_denials_are_reported_once() {
    let daemon = daemon("audit-srp", 3, "[{ address: 127.83.0.103 }]");
    let to = SocketAddr::new(host(3), 5555);
    let portal = to.to_string();
    let dev = Roce::open(&RoceConfig::new(host(103))).unwrap();
    let mini = Mini::connect(dev, to, &login_req(7, port()), &mut real);
    let mut mini = mini.map_err(|(_, why)| why).unwrap();
    mini.settle(&mut real);
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
    // Who asks an address for its targets begins with this.
    let mut gsi = Gsi::open(host(105));
    let (status, _) = gsi.ask(host(3), Method::Get, Attribute::IoUnitInfo);
    assert_eq!(status, Status::Success);
    let discovery = &wait_for(&daemon, "discovery", 1)[0];
    check(discovery, "srp", "127.83.0.3", None);
    assert_eq!(
        (&discovery["peer"], &discovery["found"]),
        (&"127.83.0.105".into(), &1.into())
    );
    // Changes of the configuration: who, how, and which it is now.
    assert_eq!(wait_for(&daemon, "config_changed", 1)[0]["how"], "start");
    let set = ["set", "/limits", "max_sessions=9"];
    assert!(daemon.ask(&set).status.success());
    let changed = &wait_for(&daemon, "config_changed", 2)[1];
    assert!(
        changed["who"].as_str().unwrap().starts_with("uid "),
        "{changed}"
    );
    assert_eq!(
        (&changed["how"], &changed["paths"]),
        (&"apply".into(), &"/limits".into())
    );
    assert!(daemon.ask(&["rollback"]).status.success());
    let back = &wait_for(&daemon, "config_rolled_back", 1)[0];
    let first = &wait_for(&daemon, "config_changed", 2)[0]["revision"];
    assert_eq!(
        (&back["how"], &back["revision"]),
        (&"rollback 1".into(), first)
    );
    assert!(!daemon.ask(&["set", "/workers", "count=2"]).status.success());
    let rejected = &wait_for(&daemon, "config_rejected", 1)[0];
    assert_eq!(&rejected["revision"], first);
    assert!(
        rejected["reason"]
            .as_str()
            .unwrap()
            .contains("takes a restart"),
        "{rejected}"
    );
    // Another program.
    let refused = daemon.ask(&["upgrade", "--binary", "/bin/true"]);
    assert!(!refused.status.success());
    let rejected = &wait_for(&daemon, "upgrade_rejected", 1)[0];
    assert_eq!(rejected["program"], "/bin/true", "{rejected}");
    assert!(rejected["reason"].is_string(), "{rejected}");
    assert!(daemon.ask(&["upgrade"]).status.success());
    let upgrade = &wait_for(&daemon, "upgrade", 1)[0];
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        (&upgrade["from"], &upgrade["to"]),
        (&version.into(), &version.into())
    );
}

#[test]
fn a_flood_of_denials_is_bounded_and_counted() {
    const ATTEMPTS: usize = 300;
    let daemon = daemon("audit-flood", 5, "open");
    let to = SocketAddr::new(host(5), 3260);
    let began = Instant::now();
    for _ in 0..ATTEMPTS {
        assert!(Client::login_at(to, "iqn.2026-01.com.example:none", 1, None).is_err());
    }
    // A burst, and a line a second.
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
    // A login that succeeds has its line all the same.
    let _client = Client::login_at(to, IQN, 1, None).unwrap();
    wait_for(&daemon, "login", 1);
}

#[test]
fn it_can_be_left_out() {
    let daemon = Daemon::start_logging(
        "audit-off",
        "targets: []\nlog: { audit: off, format: json }\n",
    );
    assert!(
        daemon
            .ask(&["set", "/limits", "max_sessions=9"])
            .status
            .success()
    );
    assert_eq!(lines(&daemon), Vec::<Value>::new());
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(log.contains("\"changed\""), "{log}");
    // Nor does the status page have it, which every local user may read.
    assert!(
        !daemon
            .ask(&["set", "/limits", "max_sessions=0"])
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
