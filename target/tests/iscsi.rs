//! Tests a server with an iSCSI portal, and an initiator that uses our login state machine on a
//! socket.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use riser_scsi::iscsi::frame;
use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, DataOut, FromTarget, LoginStatus, LogoutReason, LogoutRequest, LogoutStatus,
    NopOut, TaskAttr, TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::tcp::{Client, free_port};
use riser_testkit::eventually;

fn start() -> (Server, u16) {
    let port = free_port();
    let config = Config::parse(&text(port), "test.yaml").unwrap();
    (Server::start(&config).unwrap(), port)
}

fn text(port: u16) -> String {
    format!(
        "backends: {{ ram: {{ kind: ram, size: 1MiB }}, more: {{ kind: ram, size: 1MiB }} }}\n\
         targets:\n\
         - name: open\n\
         \x20 iqn: iqn.2026-01.org.example:open\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {{ 0: ram }}\n\
         \x20 access: open\n\
         - name: iqn.2026-01.org.example:chap\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {{ 0: ram }}\n\
         \x20 access: [{{ iqn: 'iqn.2026-01.org.example:client' }}]\n\
         \x20 chap: {{ users: [{{ name: alice, secret: twelve-bytes-or-more }}] }}\n\
         - name: iqn.2026-01.org.example:each\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {{ 0: ram }}\n\
         \x20 access:\n\
         \x20   - iqn: iqn.2026-01.org.example:client\n\
         \x20     chap: {{ users: [{{ name: alice, secret: a-secret-of-her-own }}] }}\n\
         \x20   - address: 127.0.0.1\n\
         \x20 chap: {{ users: [{{ name: alice, secret: twelve-bytes-or-more }}] }}\n\
         - name: iqn.2026-01.org.example:other\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {{ 0: ram }}\n\
         \x20 access:\n\
         \x20   - iqn: iqn.2026-01.org.example:another\n\
         \x20     chap: {{ users: [{{ name: alice, secret: a-secret-of-her-own }}] }}\n\
         \x20   - address: 127.0.0.1\n\
         workers: {{ count: 2 }}\n"
    )
}

/// Multiple connections per session and connection recovery must be enabled.
const RECOVERABLE: &str = "limits: { connections_per_session: 8, error_recovery_level: 2 }\n";

#[test]
fn sessions_share_written_data() {
    let (server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let mut writer = Client::login(port, open, 1, None).unwrap();
    assert!(writer.digests.header && writer.digests.data);
    assert_eq!(writer.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    let write = [0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    assert_eq!(writer.command(&write, true, 512, &[5; 512]).0, 0);
    let target = "iqn.2026-01.org.example:chap";
    let mut reader = Client::login(port, target, 1, Some("twelve-bytes-or-more")).unwrap();
    assert_eq!(reader.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    let read = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    assert_eq!(reader.command(&read, false, 512, &[]), (0, vec![5; 512]));
    assert_eq!(server.sessions(), 2);
    let sessions: usize = server
        .snapshot()
        .iter()
        .map(|s| s.iscsi_sessions.len())
        .sum();
    assert_eq!(sessions, 2);
    drop((writer, reader));
    server.shutdown().unwrap();
}

/// CVE-2024-45751: CHAP challenges were the same after each start.
#[test]
fn cve_2024_45751_challenges_differ_per_run() {
    let mut seen = HashSet::new();
    for _ in 0..3 {
        let (server, port) = start();
        for _ in 0..3 {
            for challenge in challenges(port) {
                assert_eq!(challenge.len(), 2 + 64, "{challenge}");
                assert!(seen.insert(challenge.clone()), "{challenge} twice");
            }
        }
        drop(server);
    }
    // No byte of the challenges may be constant.
    for at in 0..32 {
        let bytes: HashSet<_> = seen.iter().map(|c| &c[2 + 2 * at..4 + 2 * at]).collect();
        assert!(bytes.len() > 1, "byte {at} is always {bytes:?}");
    }
}

/// Returns the challenges of two simultaneous logins.
fn challenges(port: u16) -> [String; 2] {
    let send = |text: &str, flags: u8, socket: &mut TcpStream| {
        let mut bhs = [0; 48];
        (bhs[0], bhs[1]) = (0x43, flags);
        bhs[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        let mut pdu = Vec::new();
        frame::put_pdu(
            bhs,
            &[],
            text.as_bytes(),
            frame::Digests::default(),
            &mut pdu,
        );
        socket.write_all(&pdu).unwrap();
        let mut bhs = [0; 48];
        socket.read_exact(&mut bhs).unwrap();
        let len = usize::from(u16::from_be_bytes([bhs[6], bhs[7]]));
        let mut data = vec![0; len.next_multiple_of(4)];
        socket.read_exact(&mut data).unwrap();
        String::from_utf8(data).unwrap()
    };
    let names = "InitiatorName=iqn.2026-01.org.example:client\0SessionType=Normal\0\
                 TargetName=iqn.2026-01.org.example:chap\0AuthMethod=CHAP\0";
    let mut both = [(); 2].map(|()| TcpStream::connect(("127.0.0.1", port)).unwrap());
    for socket in &mut both {
        assert!(send(names, 0, socket).contains("AuthMethod=CHAP"));
    }
    both.map(|mut socket| {
        let text = send("CHAP_A=7\0", 0, &mut socket);
        let value = text
            .split('\0')
            .find_map(|pair| pair.strip_prefix("CHAP_C="));
        value.expect("a challenge").to_owned()
    })
}

#[test]
fn wrong_secret_and_target_are_rejected() {
    let (server, port) = start();
    let refused = |target: &str, secret| match Client::login(port, target, 1, secret) {
        Err(LoginError::Refused(status)) => status,
        other => panic!("refused, not {}", other.is_ok()),
    };
    let chap = "iqn.2026-01.org.example:chap";
    let failed = LoginStatus::AUTHENTICATION_FAILURE;
    assert_eq!(refused(chap, Some("another-secret-here")), failed);
    assert_eq!(refused(chap, None), failed);
    let unknown = "iqn.2026-01.org.example:none";
    assert_eq!(refused(unknown, None), LoginStatus::NOT_FOUND);
    server.shutdown().unwrap();
}

#[test]
fn rule_secrets_replace_target_secrets() {
    let (server, port) = start();
    let each = "iqn.2026-01.org.example:each";
    for wrong in [Some("twelve-bytes-or-more"), None] {
        match Client::login(port, each, 1, wrong) {
            Err(LoginError::Refused(status)) => {
                assert_eq!(status, LoginStatus::AUTHENTICATION_FAILURE);
            }
            other => panic!("refused, not {}", other.is_ok()),
        }
    }
    Client::login(port, each, 1, Some("a-secret-of-her-own")).unwrap();
    // If there is another rule for the initiator, this uses the setting of the target, which has no
    // authentication.
    Client::login(port, "iqn.2026-01.org.example:other", 1, None).unwrap();
    server.shutdown().unwrap();
}

/// A login with the same initiator port and target reinstates the session. Another ISID is a
/// separate session.
#[test]
fn second_login_reinstates_session() {
    let (server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let mut first = Client::login(port, open, 1, None).unwrap();
    let mut other = Client::login(port, open, 2, None).unwrap();
    let mut second = Client::login(port, open, 1, None).unwrap();
    assert!(first.receive().is_none(), "it was cut off");
    for client in [&mut other, &mut second] {
        client.command(&[0; 6], false, 0, &[]);
        assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 0);
    }
    drop((other, second));
    server.shutdown().unwrap();
}

#[test]
fn portal_redirects_initiators() {
    for permanent in [false, true] {
        let port = free_port();
        let listen = format!("listen: '127.0.0.1:{port}'");
        let redirect =
            format!("{listen}, redirect: {{ to: '192.0.2.20:3262', permanent: {permanent} }}");
        let text = text(port).replacen(&listen, &redirect, 1);
        let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
        let sent = Client::redirected(port, "iqn.2026-01.org.example:open");
        assert_eq!(sent, ("192.0.2.20:3262".to_owned(), permanent));
        // The other target on this portal is not redirected.
        let chap = "iqn.2026-01.org.example:chap";
        Client::login(port, chap, 1, Some("twelve-bytes-or-more")).unwrap();
        server.shutdown().unwrap();
    }
}

/// Two connections form one session: commands are executed in order of their CmdSN, even on
/// different connections, and completed on their own connection.
#[test]
fn two_connections_share_session() {
    let port = free_port();
    let text = format!("{}{RECOVERABLE}", text(port));
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut first = Client::ready(port, open, 1);
    let tsih = first.tsih.0;
    // The kernel distributes connections among workers, so some of these use different workers.
    for round in 1..9_u8 {
        let mut second = Client::join(port, open, 1, (tsih, 1), None).unwrap();
        let full = Client::join(port, open, 1, (tsih, 2), None);
        assert!(matches!(
            full.err(),
            Some(LoginError::Refused(LoginStatus::TOO_MANY_CONNECTIONS))
        ));
        let write = [0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0];
        let read = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
        let next = first.cmd_sn;
        second.cmd_sn = next + 1;
        // Two SIMPLE commands could be reordered.
        let ordered = TaskAttr::Ordered;
        second.send_with(ordered, &read, false, 512, &[]);
        second.send_with(ordered, &write, true, 512, &[round + 100; 512]);
        first.command(&write, true, 512, &[round; 512]);
        assert_eq!(second.receive_response(), (0, vec![round; 512]));
        assert_eq!(second.receive_response().0, 0);
        first.cmd_sn = next + 3;
        assert_eq!(
            first.command(&read, false, 512, &[]),
            (0, vec![round + 100; 512])
        );
        // Another login with the same CID closes the old connection.
        let again = Client::join(port, open, 1, (tsih, 1), None).unwrap();
        assert!(second.receive().is_none());
        let logout = LogoutRequest {
            immediate: true,
            reason: LogoutReason::CloseConnection,
            itt: Itt(0x1000),
            cid: Cid(1),
            cmd_sn: CmdSn(first.cmd_sn),
            exp_stat_sn: StatSn(0),
        };
        let mut again = again;
        again.send(logout.header(), &[]);
        let (response, ..) = again.receive().expect("response");
        assert!(
            matches!(response, FromTarget::LogoutResponse(r) if r.status == LogoutStatus::Closed)
        );
        assert!(again.receive().is_none());
    }
    let stranger = Client::join(port, open, 2, (tsih, 1), None);
    assert!(matches!(
        stranger.err(),
        Some(LoginError::Refused(LoginStatus::NO_SUCH_SESSION))
    ));
    // The loss of a connection closes the session.
    let second = Client::join(port, open, 1, (tsih, 1), None).unwrap();
    drop(second);
    assert!(first.receive().is_none());
    server.shutdown().unwrap();
}

/// If one address needs authentication and another doesn't, the second one must not access the
/// session of the first one by using its name.
#[test]
fn different_rights_prevent_session_takeover() {
    let port = free_port();
    let text = format!(
        "backends: {{ ram: {{ kind: ram, size: 1MiB }} }}\n\
         targets:\n\
         - name: iqn.2026-01.org.example:split\n\
         \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
         \x20 luns: {{ 0: ram }}\n\
         \x20 access:\n\
         \x20   - address: 127.0.0.1\n\
         \x20     chap: {{ users: [{{ name: alice, secret: twelve-bytes-or-more }}] }}\n\
         \x20   - address: 127.0.0.2\n\
         workers: {{ count: 2 }}\n{RECOVERABLE}"
    );
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let target = "iqn.2026-01.org.example:split";
    let secret = Some("twelve-bytes-or-more");
    let mut first = Client::login(port, target, 1, secret).unwrap();
    first.command(&[0; 6], false, 0, &[]);
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    for tsih in [first.tsih.0, 0] {
        let there = SocketAddr::from(([127, 0, 0, 2], 0));
        let tried = Client::attempt_from(there, to, target, 1, (tsih, 1), None);
        assert!(matches!(
            tried.err(),
            Some(LoginError::Refused(LoginStatus::AUTHORIZATION_FAILURE))
        ));
    }
    Client::join(port, target, 1, (first.tsih.0, 1), secret).unwrap();
    server.shutdown().unwrap();
}

/// A user with a secret can use any name for the initiator port, but this must not close the
/// session of another user.
#[test]
fn other_user_cannot_take_over_session() {
    let port = free_port();
    let text = |users: &str| {
        format!(
            "backends: {{ ram: {{ kind: ram, size: 1MiB }} }}\n\
             targets:\n\
             - name: iqn.2026-01.org.example:users\n\
             \x20 portals: [{{ protocol: iscsi, listen: '127.0.0.1:{port}' }}]\n\
             \x20 luns: {{ 0: ram }}\n\
             \x20 access: open\n\
             \x20 chap: {{ users: [{users}] }}\n\
             workers: {{ count: 2 }}\n"
        )
    };
    let alice = "{ name: alice, secret: twelve-bytes-or-more }";
    let bob = "{ name: bob, secret: bob-has-another-one }";
    let carol = "{ name: carol, secret: carol-has-a-third-one }";
    let config = |users: &str| Config::parse(&text(users), "test.yaml").unwrap();
    let mut server = Server::start(&config(&format!("{alice}, {bob}"))).unwrap();
    let target = "iqn.2026-01.org.example:users";
    let mut first = Client::login(port, target, 1, Some("twelve-bytes-or-more")).unwrap();
    assert_eq!(first.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    let as_bob = || Client::login(port, target, 1, Some("bob:bob-has-another-one"));
    let refused = Some(LoginError::Refused(LoginStatus::AUTHORIZATION_FAILURE));
    assert_eq!(as_bob().err(), refused);
    assert_eq!(first.command(&[0; 6], false, 0, &[]).0, 0);
    // The same user can reinstate its own session from any address.
    let there = SocketAddr::from(([127, 0, 0, 2], 0));
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let secret = Some("twelve-bytes-or-more");
    let mut second = Client::attempt_from(there, to, target, 1, (0, 0), secret)
        .unwrap()
        .0;
    assert!(first.receive().is_none());
    assert_eq!(second.command(&[0; 6], false, 0, &[]).0, 2, "nexus loss");
    assert_eq!(as_bob().err(), refused);
    // If a user is not accepted any more, its sessions are not protected.
    server.change(config(&format!("{bob}, {carol}"))).unwrap();
    let mut third = as_bob().unwrap();
    assert_eq!(third.command(&[0; 6], false, 0, &[]).0, 2, "nexus loss");
    let (FromTarget::AsyncMessage(message), ..) = second.receive().unwrap() else {
        panic!("a request to log out");
    };
    assert_eq!(message.event, AsyncEvent::LogoutRequested);
    assert!(second.receive().is_none());
    server.shutdown().unwrap();
}

/// There is no authentication for discovery sessions, so they must not be closed by a login from
/// another address.
#[test]
fn discovery_sessions_may_share_name() {
    let (server, port) = start();
    let mut first = Client::discovery(port, 1).unwrap();
    let there = SocketAddr::from(([127, 0, 0, 2], 0));
    let _second =
        Client::discovery_from(there, SocketAddr::from(([127, 0, 0, 1], port)), 1, 0).unwrap();
    let ping = NopOut {
        immediate: true,
        lun: [0; 8],
        itt: Itt(9),
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(1),
        exp_stat_sn: StatSn(0),
    };
    first.send(ping.header(), &[]);
    assert!(matches!(first.receive().unwrap().0, FromTarget::NopIn(_)));
    server.shutdown().unwrap();
}

/// Units are added and removed while a session is active.
#[test]
fn session_follows_configuration() {
    let (mut server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 0);
    let luns = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    assert_eq!(client.command(&luns, false, 64, &[]).1.len(), 16);
    let more = text(port).replacen("luns: { 0: ram }", "luns: { 0: ram, 3: more }", 1);
    server
        .change(Config::parse(&more, "test.yaml").unwrap())
        .unwrap();
    assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "luns changed");
    assert_eq!(client.command(&luns, false, 64, &[]).1.len(), 24);
    assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 0);
    server
        .change(Config::parse(&text(port), "test.yaml").unwrap())
        .unwrap();
    assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "luns changed");
    assert_eq!(client.command(&luns, false, 64, &[]).1.len(), 16);
    // An initiator that is no longer allowed to log in is requested to log out.
    let closed = text(port).replacen("access: open", "access: []", 1);
    server
        .change(Config::parse(&closed, "test.yaml").unwrap())
        .unwrap();
    let (FromTarget::AsyncMessage(message), ..) = client.receive().unwrap() else {
        panic!("a request to log out");
    };
    assert_eq!(message.event, AsyncEvent::LogoutRequested);
    assert!(client.receive().is_none());
    server.shutdown().unwrap();
}

/// Access must be checked with the configuration at the end of a login, which may have changed
/// since its start.
#[test]
fn pending_login_checks_changed_access() {
    let login = |socket: &mut TcpStream, flags: u8, exp_stat_sn: u8, text: &[u8]| -> [u8; 2] {
        let mut bhs = [0; 48];
        (bhs[0], bhs[1], bhs[7]) = (0x43, flags, text.len() as u8);
        (bhs[8], bhs[13], bhs[31]) = (0x80, 1, exp_stat_sn);
        let padded = text.len().next_multiple_of(4);
        let mut pdu = bhs.to_vec();
        pdu.extend(text);
        pdu.resize(48 + padded, 0);
        socket.write_all(&pdu).unwrap();
        let mut response = [0; 48];
        socket.read_exact(&mut response).unwrap();
        assert_eq!(response[0], 0x23);
        let mut data = vec![0; usize::from(response[7]).next_multiple_of(4)];
        socket.read_exact(&mut data).unwrap();
        [response[36], response[37]]
    };
    let names =
        b"InitiatorName=iqn.2026-01.org.example:client\0TargetName=iqn.2026-01.org.example:open\0";
    let chap = "access: [{ address: 127.0.0.1, chap: { users: [{ name: a, secret: twelve-bytes-or-more }] } }]";
    let elsewhere = "access: [{ address: 127.0.0.9 }]";
    for (access, expected) in [
        ("access: open", [0, 0]),
        ("access: []", [2, 2]),
        (elsewhere, [2, 2]),
        (chap, [2, 2]),
    ] {
        let (mut server, port) = start();
        let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let timeout = Some(Duration::from_secs(20));
        socket.set_read_timeout(timeout).unwrap();
        // Operational negotiation, first without and then with a transition to full feature phase.
        assert_eq!(login(&mut socket, 0x04, 0, names), [0, 0]);
        let other = text(port).replacen("access: open", access, 1);
        server
            .change(Config::parse(&other, "test.yaml").unwrap())
            .unwrap();
        assert_eq!(login(&mut socket, 0x87, 1, b""), expected, "{access}");
        let accepted = usize::from(expected == [0, 0]);
        let sessions = server.snapshot();
        let sessions = sessions.iter().map(|s| s.iscsi_sessions.len());
        assert_eq!(sessions.sum::<usize>(), accepted, "{access}");
        server.shutdown().unwrap();
    }
}

/// If a LUN is mapped to another unit, it can't be used until the initiator has identified the
/// unit. This is also required if the initiator logs in again or has lost its session, but not
/// after a logout.
#[test]
fn login_does_not_replace_lun_identification() {
    const NAMES: [u8; 6] = [0x12, 1, 0x83, 0, 64, 0];
    let (mut server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let config = |unit: &str| {
        let text = text(port).replacen("luns: { 0: ram }", &format!("luns: {{ 0: {unit} }}"), 1);
        Config::parse(&text, "test.yaml").unwrap()
    };
    let log_in = || Client::login(port, open, 1, None).unwrap();
    let assert_held_back = |client: &mut Client| {
        for _ in 0..4 {
            assert_eq!(client.command(&WRITE, true, 512, &[7; 512]).0, 2);
        }
    };
    let until_ready = |client: &mut Client| {
        let until = Instant::now() + Duration::from_secs(10);
        while client.command(&[0; 6], false, 0, &[]).0 != 0 {
            assert!(Instant::now() < until);
        }
    };
    let mut first = log_in();
    until_ready(&mut first);
    server.change(config("more")).unwrap();
    assert_held_back(&mut first);
    let mut second = log_in();
    assert_held_back(&mut second);
    drop((first, second));
    eventually("the sessions to end", WAIT, || server.sessions() == 0);
    let mut third = log_in();
    assert_held_back(&mut third);
    assert_eq!(third.command(&NAMES, false, 64, &[]).0, 0);
    until_ready(&mut third);
    server.change(config("ram")).unwrap();
    assert_held_back(&mut third);
    // The second session has identified the other unit.
    server.change(config("more")).unwrap();
    until_ready(&mut third);
    let logout = LogoutRequest {
        immediate: true,
        reason: LogoutReason::CloseSession,
        itt: Itt(77),
        cid: Cid(0),
        cmd_sn: CmdSn(third.cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    third.send(logout.header(), &[]);
    while third.receive().is_some() {}
    let mut fourth = log_in();
    until_ready(&mut fourth);
    assert_eq!(fourth.command(&WRITE, true, 512, &[7; 512]).0, 0);
    server.shutdown().unwrap();
}

/// Returns the number of connections that are open on the server.
fn held(peers: &mut Vec<TcpStream>) -> usize {
    peers.retain_mut(|peer| {
        peer.set_nonblocking(true).unwrap();
        let mut byte = [0];
        // A closed connection returns either no data or an error.
        matches!(peer.read(&mut byte), Err(e) if e.kind() == ErrorKind::WouldBlock)
    });
    peers.len()
}

/// A peer that opens thousands of connections without completing a login must only get a limited
/// number. Existing sessions must continue, and other hosts must be able to log in.
#[test]
fn connections_without_login_are_limited() {
    let port = free_port();
    let text = format!("{}limits: {{ max_sessions: 8 }}\n", text(port));
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    let read = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    let mut peers = Vec::new();
    for number in 0..5000_u32 {
        let mut peer = TcpStream::connect(("127.0.0.1", port)).unwrap();
        if number.is_multiple_of(2) {
            // It may already be closed.
            let _ = peer.write_all(&[0x43, 0x87, 0, 0, 0, 0, 1, 0]);
        }
        peers.push(peer);
        if number.is_multiple_of(250) {
            assert_eq!(client.command(&read, false, 512, &[]).0, 0);
            held(&mut peers);
        }
    }
    // Each of two workers allows twice the number of sessions plus 64 connections. Half of these
    // may be from unknown hosts, and half of those from a single address.
    eventually("few of them are held", WAIT, || held(&mut peers) <= 2 * 20);
    assert_eq!(client.command(&read, false, 512, &[]).0, 0);
    // New connections replace the oldest ones, even from the same address.
    let _same = Client::ready(port, open, 3);
    let elsewhere = SocketAddr::from(([127, 0, 0, 2], 0));
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let mut other = Client::attempt_from(elsewhere, to, open, 2, (0, 0), None)
        .unwrap()
        .0;
    assert_eq!(other.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    server.shutdown().unwrap();
}

/// A session that floods pings without reading the responses must only block itself.
#[test]
fn ping_flood_blocks_only_its_session() {
    let (server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    let mut floods: Vec<_> = (2..6)
        .map(|isid| Client::login(port, open, isid, None).unwrap())
        .collect();
    let mut sent = [0_usize; 4];
    let ping = NopOut {
        immediate: true,
        lun: [0; 8],
        itt: Itt(1),
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(1),
        exp_stat_sn: StatSn(0),
    };
    let mut bytes = Vec::new();
    frame::put_pdu(
        ping.header(),
        &[],
        &[7; 4096],
        floods[0].digests,
        &mut bytes,
    );
    for flood in &floods {
        flood.socket.set_nonblocking(true).unwrap();
    }
    let started = Instant::now();
    let read = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    let mut progress = 0;
    while started.elapsed() < Duration::from_secs(3) {
        for (flood, sent) in floods.iter_mut().zip(&mut sent) {
            for _ in 0..64 {
                let at = *sent % bytes.len();
                match flood.socket.write(&bytes[at..]) {
                    Ok(n) => *sent += n,
                    Err(_) => break,
                }
            }
        }
        assert_eq!(client.command(&read, false, 512, &[]).0, 0);
        progress += 1;
    }
    assert!(progress > 10, "{progress} commands");
    // The sent data is limited to the socket buffers on both sides and our queue, which is much
    // less than everything.
    assert!(
        sent.iter().all(|sent| *sent < 64 << 20),
        "{sent:?} bytes taken"
    );
    drop(floods);
    assert_eq!(client.command(&read, false, 512, &[]).0, 0);
    drop(client);
    server.shutdown().unwrap();
}

/// Creates a configuration where backend `ram` delays a single write.
fn slow(text: &str, faults: &Arc<Faults>) -> Config {
    let mut config = Config::parse(text, "test.yaml").unwrap();
    let mut backends = config.backends.iter_mut();
    let ram = backends.find(|backend| backend.name == "ram").unwrap();
    ram.spec.faults = Some(Arc::clone(faults));
    config
}

/// Duration of a slow write.
const SLOW: Duration = Duration::from_millis(700);

/// Timeout for events that don't depend on the test.
const WAIT: Duration = Duration::from_secs(60);

fn one_slow_write() -> Arc<Faults> {
    Arc::new(Faults::new(vec![Fault {
        on: FaultOn::Write,
        offset: 0,
        len: u64::MAX,
        times: Some(1),
        delay: SLOW,
        error: None,
    }]))
}

/// Waits until the slow write was started by the disk.
fn has_begun(faults: &Faults) {
    eventually("the write has begun", WAIT, || faults.is_spent());
}

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 1, 0, 0, 1, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];

/// Commands of the previous session must not be written to the medium after commands of the session
/// that reinstates it.
#[test]
fn reinstated_session_has_no_late_writes() {
    let port = free_port();
    let faults = one_slow_write();
    let server = Server::start(&slow(&text(port), &faults)).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut first = Client::ready(port, open, 1);
    first.send_command(&WRITE, true, 512, &[1; 512]);
    has_begun(&faults);
    let delay_ends = Instant::now() + SLOW;
    let mut second = Client::ready(port, open, 1);
    assert_eq!(second.command(&WRITE, true, 512, &[2; 512]).0, 0);
    // If the first write had not completed before the second one was started, it would now be
    // written to the disk.
    eventually("the end of the delay", WAIT, || Instant::now() > delay_ends);
    assert_eq!(second.command(&[0; 6], false, 0, &[]).0, 0);
    assert_eq!(second.command(&READ, false, 512, &[]), (0, vec![2; 512]));
    assert!(first.receive().is_none());
    server.shutdown().unwrap();
}

/// If a server is dropped while a disk is busy, it closes its connections, and no worker may fail
/// because of this.
#[test]
fn dropped_server_closes_connections() {
    let port = free_port();
    let faults = one_slow_write();
    let server = Server::start(&slow(&text(port), &faults)).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    client.send_command(&WRITE, true, 512, &[1; 512]);
    has_begun(&faults);
    let failure = server.failure();
    drop(server);
    assert!(client.receive().is_none());
    let failed = pin!(failure.notified()).poll(&mut Context::from_waker(Waker::noop()));
    assert!(failed.is_pending(), "a worker failed");
}

/// A removed unit only completes commands that it has already started.
#[test]
fn removed_unit_completes_commands() {
    let port = free_port();
    let faults = one_slow_write();
    let mut server = Server::start(&slow(&text(port), &faults)).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    client.send_command(&WRITE, true, 512, &[1; 512]);
    has_begun(&faults);
    let without = text(port).replacen("luns: { 0: ram }", "luns: { 3: more }", 1);
    server.change(slow(&without, &faults)).unwrap();
    assert_eq!(client.receive_response().0, 0, "the write continues");
    assert_eq!(client.command(&READ, false, 512, &[]).0, 2, "no such unit");
    server.shutdown().unwrap();
}

/// An access rule maps a LUN to another unit: commands in flight complete or can be aborted using
/// this LUN, and no command for the previous unit may be executed by the other one.
#[test]
fn remapped_lun_keeps_commands_separate() {
    let port = free_port();
    let faults = one_slow_write();
    let mapped = |number: &str| {
        let rule = format!("access: [{{ address: 127.0.0.1, luns: {{ 0: {number} }} }}]");
        let text = text(port).replacen("access: open", &rule, 1);
        let both = text.replacen("luns: { 0: ram }", "luns: { 0: ram, 1: more }", 1);
        slow(&both, &faults)
    };
    let mut server = Server::start(&mapped("ram")).unwrap();
    let open = "iqn.2026-01.org.example:open";
    let mut client = Client::ready(port, open, 1);
    let tag = client.cmd_sn;
    client.send_command(&WRITE, true, 512, &[1; 512]);
    has_begun(&faults);
    server.change(mapped("more")).unwrap();
    for function in [TmfFunction::QueryTask, TmfFunction::AbortTask] {
        let request = TmfRequest {
            immediate: true,
            function,
            lun: [0; 8],
            itt: Itt(0x3000),
            referenced: Itt(tag),
            cmd_sn: CmdSn(client.cmd_sn),
            exp_stat_sn: StatSn(0),
            ref_cmd_sn: CmdSn(tag),
            exp_data_sn: 0,
        };
        client.send(request.header(), &[]);
        let FromTarget::TmfResponse(response) = next(&mut client) else {
            panic!("response to the function");
        };
        let expected = match function {
            TmfFunction::QueryTask => TmfStatus::Succeeded,
            _ => TmfStatus::Complete,
        };
        assert_eq!(response.status, expected);
    }
    for _ in 0..3 {
        let (status, _) = client.command(&WRITE, true, 512, &[2; 512]);
        assert_eq!(status, 2, "reported LUNs data has changed");
    }
    let names = [0x12, 1, 0x83, 0, 64, 0];
    assert_eq!(client.command(&names, false, 64, &[]).0, 0);
    let until = Instant::now() + Duration::from_secs(10);
    while client.command(&[0; 6], false, 0, &[]).0 != 0 {
        assert!(Instant::now() < until);
    }
    assert_eq!(client.command(&READ, false, 512, &[]), (0, vec![0; 512]));
    server.shutdown().unwrap();
}

/// Returns the next PDU that is not an asynchronous message.
fn next(client: &mut Client) -> FromTarget {
    loop {
        match client.receive().expect("a PDU").0 {
            FromTarget::AsyncMessage(_) => {}
            pdu => return pdu,
        }
    }
}

fn reassign(client: &mut Client, tag: u32) -> TmfStatus {
    let request = TmfRequest {
        immediate: true,
        function: TmfFunction::TaskReassign,
        lun: [0; 8],
        itt: Itt(0x2000),
        referenced: Itt(tag),
        cmd_sn: CmdSn(client.cmd_sn),
        exp_stat_sn: StatSn(0),
        ref_cmd_sn: CmdSn(0),
        exp_data_sn: 0,
    };
    client.send(request.header(), &[]);
    match next(client) {
        FromTarget::TmfResponse(response) => response.status,
        other => panic!("{other:?}"),
    }
}

/// Connection recovery: a connection is closed while reads and writes are in flight. They continue
/// on another connection: either an existing one, which logs out the lost connection, or a new one
/// that reinstates it.
#[test]
fn commands_survive_lost_connection() {
    let port = free_port();
    let open = "iqn.2026-01.org.example:open";
    let cdb = |opcode: u8, lba: u8, blocks: u8| [opcode, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
    // The kernel distributes connections among workers, so some of these use different workers.
    for round in 1..7_u8 {
        let faults = one_slow_write();
        let text = format!("{}{RECOVERABLE}", text(port));
        let server = Server::start(&slow(&text, &faults)).unwrap();
        let mut first = Client::recoverable(port, open, 1, (0, 0));
        assert_eq!(first.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        let tsih = first.tsih.0;
        let is_there = round.is_multiple_of(2);
        let second = is_there.then(|| Client::recoverable(port, open, 1, (tsih, 1)));
        let tag = first.cmd_sn;
        // One write is delayed by the disk, a read is completed but not acknowledged, and another
        // write is waiting for solicited data.
        first.send_command(&cdb(0x2a, 1, 1), true, 512, &[round; 512]);
        first.send_command(&cdb(0x28, 8, 8), false, 4096, &[]);
        first.send_command(&cdb(0x2a, 16, 4), true, 2048, &[]);
        has_begun(&faults);
        // The Data-In PDU of the read, and the header of the R2T.
        let mut arrived = [0; 48 + 4096 + 48];
        let whole = arrived.len();
        eventually("the read's data and the R2T", WAIT, || {
            first.socket.peek(&mut arrived).unwrap() == whole
        });
        let next_cmd_sn = first.cmd_sn;
        drop(first);
        let mut second = match second {
            Some(mut second) => {
                let logout = LogoutRequest {
                    immediate: true,
                    reason: LogoutReason::RemoveConnection,
                    itt: Itt(0x1000),
                    cid: Cid(0),
                    cmd_sn: CmdSn(next_cmd_sn),
                    exp_stat_sn: StatSn(0),
                };
                second.send(logout.header(), &[]);
                let response = next(&mut second);
                assert!(matches!(
                    response,
                    FromTarget::LogoutResponse(r)
                        if r.status == LogoutStatus::Closed && r.time2retain == 20
                ));
                second
            }
            None => Client::recoverable(port, open, 1, (tsih, 0)),
        };
        second.cmd_sn = next_cmd_sn;
        assert_eq!(reassign(&mut second, tag + 1), TmfStatus::Complete);
        assert_eq!(second.receive_response(), (0, vec![0; 4096]));
        assert_eq!(reassign(&mut second, tag + 2), TmfStatus::Complete);
        let FromTarget::R2t(r2t) = next(&mut second) else {
            panic!("an R2T");
        };
        assert_eq!((r2t.offset, r2t.len), (0, 2048));
        let data = DataOut {
            is_final: true,
            lun: [0; 8],
            itt: Itt(tag + 2),
            ttt: r2t.ttt,
            exp_stat_sn: StatSn(0),
            data_sn: 0,
            offset: 0,
        };
        second.send(data.header(), &[round + 100; 2048]);
        assert_eq!(second.receive_response().0, 0);
        assert_eq!(reassign(&mut second, tag), TmfStatus::Complete);
        assert_eq!(second.receive_response().0, 0);
        assert_eq!(reassign(&mut second, tag + 77), TmfStatus::TaskDoesNotExist);
        let read = second.command(&cdb(0x28, 16, 4), false, 2048, &[]);
        assert_eq!(read, (0, vec![round + 100; 2048]));
        let read = second.command(&cdb(0x28, 1, 1), false, 512, &[]);
        assert_eq!(read, (0, vec![round; 512]));
        // A new session closes this one, and drops everything that was kept for recovery.
        let mut third = Client::recoverable(port, open, 1, (0, 0));
        assert!(second.receive().is_none());
        assert_eq!(third.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        assert_eq!(server.sessions(), 1);
        drop(third);
        server.shutdown().unwrap();
    }
}

/// Features that are rarely used by initiators are not offered by default.
#[test]
fn recovery_is_disabled_by_default() {
    let (server, port) = start();
    let open = "iqn.2026-01.org.example:open";
    let client = Client::recoverable(port, open, 1, (0, 0));
    let second = Client::join(port, open, 1, (client.tsih.0, 1), None);
    assert!(matches!(
        second.err(),
        Some(LoginError::Refused(LoginStatus::TOO_MANY_CONNECTIONS))
    ));
    let snapshots = server.snapshot();
    let mut sessions = snapshots.iter().flat_map(|s| &s.iscsi_sessions);
    let params = sessions.next().unwrap().info.params;
    assert_eq!(
        (params.max_connections, params.error_recovery_level),
        (1, 0)
    );
    drop(client);
    server.shutdown().unwrap();
}

/// Discovery sessions must not use the session limits of hosts, from any address.
#[test]
fn discovery_sessions_block_no_host() {
    let port = free_port();
    let text = format!(
        "{}limits: {{ max_sessions: 1, sessions_per_address: 1 }}\n",
        text(port)
    );
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let finders: Vec<_> = (0..3)
        .map(|isid| Client::discovery(port, isid).unwrap())
        .collect();
    let open = "iqn.2026-01.org.example:open";
    let client = Client::ready(port, open, 9);
    assert_eq!(server.sessions(), 1);
    // They can't have a second connection.
    let second = Client::rediscovery(port, 0, finders[0].tsih.0);
    assert!(matches!(
        second.err(),
        Some(LoginError::Refused(LoginStatus::TOO_MANY_CONNECTIONS))
    ));
    drop((finders, client));
    server.shutdown().unwrap();
}

/// The same secret in two different places must also be rejected.
#[test]
fn same_secret_for_both_directions_is_rejected() {
    let port = free_port();
    let file = std::env::temp_dir().join(format!("riser-secret-{}", std::process::id()));
    std::fs::write(&file, "twelve-bytes-or-more\n").unwrap();
    let mutual = format!("mutual: {{ name: t, secret_file: {} }}", file.display());
    // A secret of another target's user.
    let text = text(port).replace(
        "secret: a-secret-of-her-own }]",
        &format!("secret: a-secret-of-her-own }}], {mutual}"),
    );
    let error = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("have the same secret"),
        "{error}"
    );
    std::fs::remove_file(&file).unwrap();
}
