//! Tests sessions of initiators that are no longer allowed to log in.

use std::time::Duration;

use riser_scsi::iscsi::pdu::{AsyncEvent, FromTarget};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::tcp::{Client, free_port};

const IQN: &str = "iqn.2026-01.org.example:users";

const ALICE: &str = "{ name: alice, secret: twelve-bytes-or-more }";
const BOB: &str = "{ name: bob, secret: bob-has-another-one }";

/// Creates a target with these CHAP users. An empty list disables authentication.
fn config(port: u16, users: &[&str]) -> Config {
    let chap = match users {
        [] => String::new(),
        users => format!("\x20 chap: {{ users: [{}] }}\n", users.join(", ")),
    };
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let rest = "limits: { connections_per_session: 2 }\nworkers: { count: 2 }\n";
    let rest = format!("{chap}{rest}");
    let text = open_target(
        IQN,
        &portals,
        "ram: { kind: ram, size: 1MiB }",
        "0: ram",
        &rest,
    );
    Config::parse(&text, "test.yaml").unwrap()
}

fn log_in(port: u16, isid: u8, credentials: Option<&str>) -> Client {
    let mut session = Client::login(port, IQN, isid, credentials).unwrap();
    assert_eq!(session.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    let limit = Some(Duration::from_secs(5));
    session.socket.set_read_timeout(limit).unwrap();
    session
}

/// Checks that the session is requested to log out, or that its connection is closed.
fn assert_logged_out(mut session: Client) {
    if let Some((pdu, ..)) = session.receive() {
        let FromTarget::AsyncMessage(message) = pdu else {
            panic!("{pdu:?}");
        };
        assert_eq!(message.event, AsyncEvent::LogoutRequested);
    }
}

/// Checks that a WRITE is successful.
fn assert_served(session: &mut Client) {
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!(session.command(&write, true, 512, &[7; 512]).0, 0);
}

/// Changes the configuration during a session of user bob. `ends` is set if this must close the
/// session.
fn change(before: &[&str], after: &[&str], proof: Option<&str>, ends: bool) {
    let port = free_port();
    let mut server = Server::start(&config(port, before)).unwrap();
    let mut session = log_in(port, 1, proof);
    assert_served(&mut session);
    server.change(config(port, after)).unwrap();
    if ends {
        assert!(Client::login(port, IQN, 2, proof).is_err(), "bob is out");
        assert_logged_out(session);
    } else {
        assert_served(&mut session);
    }
    server.shutdown().unwrap();
}

const BOBS: Option<&str> = Some("bob:bob-has-another-one");

#[test]
fn revoked_chap_user_is_logged_out() {
    change(&[ALICE, BOB], &[ALICE], BOBS, true);
}

#[test]
fn changed_secret_ends_session() {
    let changed = "{ name: bob, secret: bob-has-a-new-one }";
    change(&[BOB], &[ALICE, changed], BOBS, true);
}

#[test]
fn newly_required_chap_ends_session() {
    change(&[], &[ALICE], None, true);
}

#[test]
fn session_survives_unrelated_chap_changes() {
    change(&[BOB], &[ALICE, BOB], BOBS, false);
    change(&[BOB], &[], BOBS, false);
}
