//! Tests portals whose addresses are removed from the host while they are served.

#![allow(unsafe_code, reason = "a network namespace of the test's thread")]

use std::process::Command;
use std::thread;
use std::time::Duration;

use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::server::problems::Subject;
use riser_testkit::eventually;
use riser_testkit::skip::skip;

const PATIENCE: Duration = Duration::from_secs(60);

fn ip(words: &str) -> bool {
    let status = Command::new("ip").args(words.split(' ')).status();
    status.is_ok_and(|status| status.success())
}

/// Moves this thread, including any threads and processes started by it, to a network namespace.
fn enter_namespace() -> bool {
    // SAFETY: this only changes the network namespace of this thread.
    let entered = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    entered
        && ip("link set lo up")
        && ip("link add there type veth peer name peer")
        && ip("link set there up")
        && ip("link set peer up")
        && ip("addr add 10.99.0.1/24 dev there")
        && ip("addr add 10.99.1.1/32 dev lo")
}

fn config() -> Config {
    let text = "\
backends: { a: { kind: ram, size: 1MiB } }
targets:
- name: t
  iqn: iqn.2026-01.com.example:t
  portals:
  - { protocol: iscsi, listen: 10.99.0.1 }
  - { protocol: srp, listen: 10.99.0.1 }
  - { protocol: iscsi, listen: 10.99.1.1 }
  - { protocol: iscsi, listen: 127.0.0.9 }
  - { protocol: iscsi, listen: 'there:3261' }
  luns: { 0: a }
  access: open
workers: { count: 1 }
strict: true
";
    Config::parse(text, "test.yaml").unwrap()
}

/// Returns subjects that are not served, with the reasons.
fn lost(server: &mut Server) -> Vec<(Subject, String)> {
    server.check_resources();
    let problems = server.problems();
    let all = problems.unready().map(|(s, p)| (s.clone(), p.why.clone()));
    all.collect()
}

fn subjects(server: &mut Server) -> Vec<Subject> {
    lost(server)
        .into_iter()
        .map(|(subject, _)| subject)
        .collect()
}

#[test]
fn lost_portal_address_is_reported() {
    let test = thread::spawn(|| {
        if !enter_namespace() {
            return skip("lost_portal_address_is_reported", "no network namespace");
        }
        let mut server = Server::start(&config()).unwrap();
        assert_eq!(lost(&mut server), []);
        let at = |text: &str| text.parse().unwrap();
        let named = &config().targets[0].portals[4];
        let named = Subject::Wildcard(named.listen, named.protocol);
        let there = [
            Subject::RdmaPortal(at("10.99.0.1:5555")),
            Subject::TcpPortal(at("10.99.0.1:3260")),
        ];

        assert!(ip("link set peer down"));
        let with_named = [&there[..], &[named]].concat();
        eventually("the link is down", PATIENCE, || {
            subjects(&mut server) == with_named
        });
        assert!(lost(&mut server)[0].1.contains("link"));
        assert!(ip("link set peer up"));
        eventually("the link is up", PATIENCE, || {
            subjects(&mut server).is_empty()
        });

        assert!(ip("addr del 10.99.1.1/32 dev lo"));
        let lo = [Subject::TcpPortal(at("10.99.1.1:3260"))];
        eventually("the address is gone", PATIENCE, || {
            subjects(&mut server) == lo
        });
        assert!(lost(&mut server)[0].1.contains("removed from this host"));
        let error = server.check_successor().unwrap_err().to_string();
        assert!(error.contains("10.99.1.1:3260"), "{error}");
        // A retry for another object doesn't change this.
        server
            .retry(riser_target::backend::OpenedStores::default())
            .unwrap();
        assert_eq!(subjects(&mut server), lo);
        assert!(ip("addr add 10.99.1.1/32 dev lo"));
        eventually("it is back", PATIENCE, || subjects(&mut server).is_empty());
        std::net::TcpStream::connect("10.99.1.1:3260").unwrap();

        assert!(ip("link del there"));
        eventually("the interface is gone", PATIENCE, || {
            subjects(&mut server) == there
        });
        assert!(lost(&mut server)[0].1.contains("removed"));
        server.shutdown().unwrap();
    });
    test.join().unwrap();
}
