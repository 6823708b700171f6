//! Portals with addresses that are not known in advance and can change at any time.

use std::process::Command;

use riser_testkit::programs::{missing, skip, succeeded};
use serde_json::Value;

use crate::target::Daemon;
use crate::{ended, eventually};

/// A network namespace, which is removed on drop.
struct Netns(String);

impl Netns {
    fn new(test: &str) -> Option<Self> {
        if let Some(tool) = missing(&["ip"]) {
            skip(test, &format!("{tool} is not installed"));
            return None;
        }
        let name = format!("riser-{test}-{}", std::process::id());
        let (code, _, errors) = ended(Command::new("ip").args(["netns", "add", &name]));
        if code != 0 {
            skip(test, &format!("no network namespace: {errors}"));
            return None;
        }
        let netns = Self(name);
        netns.ip("link set lo up");
        Some(netns)
    }

    fn ip(&self, words: &str) {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.0]).args(words.split(' '));
        succeeded(&mut ip);
    }

    /// Adds an interface with these addresses.
    fn interface(&self, name: &str, addresses: &[&str]) {
        self.ip(&format!("link add {name} type veth peer name {name}p"));
        for end in [name, &format!("{name}p")] {
            self.ip(&format!("link set {end} up"));
        }
        for address in addresses {
            self.ip(&format!("addr add {address} dev {name} nodad"));
        }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn config(portals: &str) -> String {
    format!(
        "
backends: {{ a: {{ kind: ram, size: 16MiB }} }}
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals: [{portals}]
    luns: {{ 0: a }}
    access: open"
    )
}

const IQN: &str = "iqn.2026-01.com.example:t";

/// Returns the addresses of the target as reported by `riserd`.
fn portals(daemon: &Daemon) -> Vec<String> {
    let targets = daemon.json(&["targets"]);
    let portals = targets[0]["portals"].as_array().unwrap().iter();
    portals
        .map(|p| {
            format!(
                "{} {}",
                p["protocol"].as_str().unwrap(),
                p["listen"].as_str().unwrap()
            )
        })
        .collect()
}

fn problems(daemon: &Daemon) -> Vec<Value> {
    let status = daemon.json(&["status"]);
    status["problems"].as_array().cloned().unwrap_or_default()
}

/// Returns the target found by an initiator for this address.
fn found(daemon: &Daemon, url: &str) -> Option<String> {
    let (code, out, _) = ended(&mut daemon.riser(&["discover", url, "--timeout=5s"]));
    (code == 0).then_some(out)
}

/// A loopback address that doesn't belong to an interface, so wildcard portals don't include it.
const HOST: &str = "--addr=127.0.0.9";

fn write(daemon: &Daemon, url: &str, byte: u8) {
    let data = daemon.path("data");
    std::fs::write(&data, [byte; 4096]).unwrap();
    let file = data.to_str().unwrap();
    succeeded(&mut daemon.riser(&["write", url, file, "-q", HOST]));
}

/// Reads the first byte of the unit with this address.
fn read(daemon: &Daemon, url: &str) -> u8 {
    let data = daemon.path("data");
    let to = data.to_str().unwrap();
    let mut args = vec!["read", url, to, "--length=4096", "-q"];
    if !url.contains("://[") {
        args.push(HOST);
    }
    succeeded(&mut daemon.riser(&args));
    std::fs::read(&data).unwrap()[0]
}

#[test]
fn wildcard_portals_follow_host_addresses() {
    let Some(netns) = Netns::new("wildcard") else {
        return;
    };
    netns.interface("wild0", &["10.0.201.1/24", "2001:db8:201::1/64"]);
    netns.interface("wild1", &["10.0.202.1/24"]);
    let all = "{ protocol: iscsi, listen: 0.0.0.0 }, { protocol: iscsi, listen: \"[::]\" }, \
               { protocol: srp, listen: 0.0.0.0 }, { protocol: iser, listen: wild1:3261 }";
    let mut daemon = Daemon::in_netns(&config(all), &netns.0);
    daemon.serve();
    assert_eq!(
        portals(&daemon),
        [
            "iscsi 10.0.201.1:3260",
            "iscsi 10.0.202.1:3260",
            "iscsi 127.0.0.1:3260",
            "iscsi [::1]:3260",
            "iscsi [2001:db8:201::1]:3260",
            "srp 10.0.201.1:5555",
            "srp 10.0.202.1:5555",
            "srp 127.0.0.1:5555",
            "iser 10.0.202.1:3261",
        ]
    );
    assert_eq!(problems(&daemon), [Value::Null; 0]);
    write(&daemon, "srp://10.0.202.1/0", 1);
    for url in [
        format!("iscsi://10.0.201.1/{IQN}/0"),
        format!("iscsi://[2001:db8:201::1]/{IQN}/0"),
        format!("iser://10.0.202.1:3261/{IQN}/0"),
        "srp://127.0.0.1/0".to_owned(),
    ] {
        assert_eq!(read(&daemon, &url), 1, "{url}");
    }

    // The configuration must contain the wildcard, and must not be different from the file.
    let written = daemon.json(&["get", "/targets/t/portals"]);
    let listens = written.as_array().unwrap().iter().map(|p| &p["listen"]);
    let listens: Vec<_> = listens.map(|listen| listen.as_str().unwrap()).collect();
    let expected = ["0.0.0.0:3260", "[::]:3260", "0.0.0.0:5555", "wild1:3261"];
    assert_eq!(listens, expected);
    let file = daemon.path("riserd.yaml");
    let (code, out, errors) = daemon.run_command(&["diff", file.to_str().unwrap(), "-o", "json"]);
    assert_eq!(code, 0, "{errors}");
    let difference: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(difference["changes"], serde_json::json!([]));

    // Addresses are added and removed while other sessions stay active.
    netns.ip("addr add 10.0.202.7/24 dev wild1");
    netns.ip("addr del 10.0.201.1/24 dev wild0");
    eventually("the new address is served, and the old one is not", || {
        let portals = portals(&daemon);
        let has = |portal: &str| portals.iter().any(|p| p == portal);
        let has_new = [
            "iscsi 10.0.202.7:3260",
            "srp 10.0.202.7:5555",
            "iser 10.0.202.7:3261",
        ];
        has_new.into_iter().all(has) && !has("iscsi 10.0.201.1:3260") && !has("srp 10.0.201.1:5555")
    });
    let (code, _, missing) = daemon.run_command(&["status"]);
    assert_eq!(code, 0, "{missing}");
    for url in [
        format!("iscsi://10.0.202.7/{IQN}/0"),
        format!("iser://10.0.202.7:3261/{IQN}/0"),
        "srp://10.0.202.7/0".to_owned(),
    ] {
        assert_eq!(read(&daemon, &url), 1, "{url}");
    }

    // The listeners are passed to another process.
    let before = portals(&daemon);
    let (code, _, errors) = daemon.run_command(&["upgrade"]);
    assert_eq!(code, 0, "{errors}");
    eventually("the successor responds", || {
        daemon.run_command(&["status"]).0 == 0
    });
    assert_eq!(portals(&daemon), before);
    assert_eq!(read(&daemon, &format!("iscsi://10.0.202.7/{IQN}/0")), 1);
}

#[test]
fn wildcard_discovery_lists_reachable_addresses() {
    let Some(netns) = Netns::new("sendtargets") else {
        return;
    };
    netns.interface("wild0", &["10.0.203.1/24", "10.0.203.2/24"]);
    netns.interface("wild1", &["10.0.205.1/24"]);
    let portals = "{ protocol: iscsi, listen: 0.0.0.0 }, { protocol: iscsi, listen: wild1 }";
    let mut daemon = Daemon::in_netns(&config(portals), &netns.0);
    daemon.serve();
    let by = |address: &str| {
        let out = found(&daemon, &format!("iscsi://{address}")).unwrap();
        let all = [
            "0.0.0.0",
            "127.0.0.1",
            "10.0.203.1",
            "10.0.203.2",
            "10.0.205.1",
        ];
        let named = all
            .into_iter()
            .filter(|ip| out.contains(&format!("portal {ip}:")));
        named.collect::<Vec<_>>()
    };
    assert_eq!(by("10.0.203.2"), ["10.0.203.2", "10.0.205.1"]);
    assert_eq!(by("10.0.205.1"), ["10.0.205.1"]);
    assert_eq!(by("127.0.0.1"), ["127.0.0.1", "10.0.205.1"]);
}

#[test]
fn interface_may_appear_after_start() {
    let Some(netns) = Netns::new("late") else {
        return;
    };
    let all = "{ protocol: iscsi, listen: 127.0.0.1 }, { protocol: iscsi, listen: late0 }, \
               { protocol: srp, listen: late0 }";
    let mut daemon = Daemon::in_netns(&config(all), &netns.0);
    daemon.serve();
    let named: Vec<_> = problems(&daemon)
        .iter()
        .map(|p| {
            format!(
                "{} {}",
                p["kind"].as_str().unwrap(),
                p["name"].as_str().unwrap()
            )
        })
        .collect();
    assert_eq!(named, ["portal late0:3260", "portal late0:5555"]);
    write(&daemon, &format!("iscsi://127.0.0.1/{IQN}/0"), 2);
    netns.interface("late0", &["10.0.204.1/24"]);
    eventually("the interface is served", || problems(&daemon).is_empty());
    for url in [
        format!("iscsi://10.0.204.1/{IQN}/0"),
        "srp://10.0.204.1/0".to_owned(),
    ] {
        assert_eq!(read(&daemon, &url), 2, "{url}");
    }

    // A typo in a new portal is rejected at run time, and a strict start fails if an address is
    // missing.
    let wrong = config(&format!("{all}, {{ protocol: iscsi, listen: lat0 }}"));
    daemon.write(&wrong);
    let (code, _, errors) = daemon.run_command(&["reload"]);
    assert!(
        code != 0 && errors.contains("cannot listen on lat0:3260"),
        "{errors}"
    );
    let strict = Daemon::in_netns(&format!("strict: true{wrong}"), &netns.0);
    let (code, ..) = ended(&mut strict.command());
    assert_eq!(code, 1);
    assert!(
        strict.log().contains("cannot listen on lat0:3260"),
        "{}",
        strict.log()
    );
}

#[test]
fn second_wildcard_daemon_is_rejected() {
    let Some(netns) = Netns::new("second") else {
        return;
    };
    for portal in [
        "{ protocol: iscsi, listen: 0.0.0.0 }",
        "{ protocol: srp, listen: 0.0.0.0 }",
    ] {
        let mut first = Daemon::in_netns(&config(portal), &netns.0);
        first.serve();
        let second = Daemon::in_netns(&config(portal), &netns.0);
        let (code, ..) = ended(&mut second.command());
        assert_eq!(code, 1, "{portal}");
        assert!(second.log().contains("in use"), "{}", second.log());
        let url = match portal.contains("srp") {
            true => "srp://127.0.0.1/0".to_owned(),
            false => format!("iscsi://127.0.0.1/{IQN}/0"),
        };
        write(&first, &url, 3);
    }
}
