//! Adds and removes targets, portals and backends of a running server on loopback addresses, using
//! SRP on our software NIC and iSCSI on TCP. If a resource is not available, nothing must change.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::pdu::{AsyncEvent, FromTarget, LoginStatus};
use riser_scsi::srp::{DataBuffer, TargetPortId};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_target::server::reload::ChangeError;
use riser_test_peers::mini::{Mini, Said, login_req, real};
use riser_test_peers::tcp::Client;
use riser_testkit::eventually;
use riser_transport::roce::{Roce, RoceConfig};

const GOOD: (u8, Option<[u8; 2]>) = (0, None);

fn addr(net: u8, host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 78, net, host))
}

/// Creates the configuration for a test: a disk `d` for target `t`, which is not affected by any
/// change, and additional objects.
fn config(net: u8, backends: &str, targets: &str, rest: &str) -> Config {
    let text = format!(
        "backends:\n  d: {{ kind: ram, size: 16MiB }}\n{backends}\
         targets:\n  - name: t\n    iqn: iqn.2026-01.org.example:t\n    portals:\n      \
         - {{ protocol: srp, listen: {0} }}\n      - {{ protocol: iscsi, listen: {0} }}\n    \
         luns: {{ 0: d }}\n    access: open\n{targets}workers: {{ count: 2 }}\n{rest}",
        addr(net, 1),
    );
    Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Creates a second target with portals on these hosts of its network.
fn second(net: u8, srp: &[u8], tcp: &[u8]) -> String {
    let portal = |protocol: &str, host: u8| {
        let listen = addr(net, host);
        format!("      - {{ protocol: {protocol}, listen: {listen} }}\n")
    };
    let srp = srp.iter().map(|host| portal("srp", *host));
    let portals: String = srp.chain(tcp.iter().map(|h| portal("iscsi", *h))).collect();
    format!(
        "  - name: u\n    iqn: iqn.2026-01.org.example:u\n    portals:\n{portals}    \
         luns: {{ 0: d }}\n    access: open\n"
    )
}

fn port_of(server: &Server, target: &str) -> TargetPortId {
    let catalog = server.shared().registry.catalog();
    let mut targets = catalog.targets.iter();
    let target = targets.find(|t| t.config.name == target).unwrap();
    target.portals[0].target_port()
}

fn srp(server: &Server, target: &str, to: IpAddr, from: IpAddr) -> Result<Mini<Roce>, String> {
    let dev = Roce::open(&RoceConfig::new(from)).unwrap();
    let port = port_of(server, target);
    let IpAddr::V4(v4) = from else {
        panic!("{from}")
    };
    let req = login_req(v4.octets()[3], port);
    let mini = Mini::connect(dev, SocketAddr::new(to, 5555), &req, &mut real);
    let mut mini = mini.map_err(|(_, refused)| format!("{refused:?}"))?;
    mini.clear_unit_attention(&mut real);
    Ok(mini)
}

fn iscsi(to: IpAddr, target: &str, isid: u8) -> Result<Client, LoginError> {
    let name = format!("iqn.2026-01.org.example:{target}");
    let mut client = Client::login_at(SocketAddr::new(to, 3260), &name, isid, None)?;
    assert_eq!(tcp_ready(&mut client), 2, "power on");
    assert_eq!(tcp_ready(&mut client), 0);
    Ok(client)
}

/// Sends TEST UNIT READY. Returns the status, and ASC and ASCQ if there is sense data.
fn ready(mini: &mut Mini<Roce>) -> (u8, Option<[u8; 2]>) {
    mini.send_cmd(7, 0, &[0; 6], DataBuffer::None, DataBuffer::None);
    let response = mini.receive_response(&mut real);
    let sense = response.sense.get(12..14).map(|s| [s[0], s[1]]);
    (response.status, sense.filter(|_| response.status == 2))
}

fn tcp_ready(client: &mut Client) -> u8 {
    client.command(&[0; 6], false, 0, &[]).0
}

/// Checks that the target requests a logout and then closes the connection.
fn is_logged_out(client: &mut Client) {
    let (pdu, ..) = client.receive().expect("a message before the end");
    let FromTarget::AsyncMessage(message) = pdu else {
        panic!("{pdu:?}");
    };
    assert_eq!(message.event, AsyncEvent::LogoutRequested);
    assert!(client.receive().is_none());
}

#[test]
fn target_adds_and_removes_its_device() {
    let net = 1;
    let alone = config(net, "", "", "");
    let both = config(net, "", &second(net, &[9], &[9]), "");
    let mut server = Server::start(&alone).unwrap();
    let mut stays = srp(&server, "t", addr(net, 1), addr(net, 2)).unwrap();
    let mut stays_too = iscsi(addr(net, 1), "t", 1).unwrap();
    for round in 0..3 {
        server.change(both.clone()).unwrap();
        let mut goes = srp(&server, "u", addr(net, 9), addr(net, 3)).unwrap();
        let mut goes_too = iscsi(addr(net, 9), "u", 2).unwrap();
        assert_eq!(ready(&mut goes), GOOD);
        server.change(alone.clone()).unwrap();
        assert_eq!(goes.next(&mut real), Said::Logout(0), "round {round}");
        goes.wait_closed(&mut real);
        is_logged_out(&mut goes_too);
        drop(goes);
        // In one round, the device may still be open when it's added again. The other rounds wait
        // until it's closed.
        if round > 0 {
            eventually("the device is closed", Duration::from_secs(30), || {
                server.shared().device_slots.addresses() == [addr(net, 1)]
            });
        }
        assert_eq!(ready(&mut stays), GOOD);
        assert_eq!(tcp_ready(&mut stays_too), 0);
    }
    server.shutdown().unwrap();
}

#[test]
fn removed_portal_keeps_other_sessions() {
    let net = 2;
    let two = config(net, "", &second(net, &[8, 9], &[8, 9]), "");
    let one = config(net, "", &second(net, &[9], &[9]), "");
    let mut server = Server::start(&two).unwrap();
    let mut goes = srp(&server, "u", addr(net, 8), addr(net, 2)).unwrap();
    let mut stays = srp(&server, "u", addr(net, 9), addr(net, 3)).unwrap();
    let mut goes_too = iscsi(addr(net, 8), "u", 1).unwrap();
    let mut stays_too = iscsi(addr(net, 9), "u", 2).unwrap();
    let group = |server: &Server| {
        let catalog = server.shared().registry.catalog();
        let target = &catalog.targets[1];
        let port = target
            .portals
            .iter()
            .find(|p| p.listen.ip() == addr(net, 9));
        (
            target.iscsi.as_ref().unwrap().group,
            port.unwrap().relative_id,
        )
    };
    let before = group(&server);
    server.change(one).unwrap();
    assert_eq!(goes.next(&mut real), Said::Logout(0));
    is_logged_out(&mut goes_too);
    assert_eq!(ready(&mut stays), GOOD);
    assert_eq!(tcp_ready(&mut stays_too), 0);
    assert_eq!(group(&server), before, "a port keeps its number");
    assert!(std::net::TcpStream::connect((addr(net, 8), 3260)).is_err());
    server.shutdown().unwrap();
}

#[test]
fn named_target_needs_no_iscsi_portal() {
    let net = 6;
    let server = Server::start(&config(net, "", &second(net, &[9], &[]), "")).unwrap();
    srp(&server, "u", addr(net, 9), addr(net, 2)).unwrap();
    server.shutdown().unwrap();
}

/// A file used in this test, which is removed on drop.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let name = format!("riser-apply-{}-{name}.img", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn backend(&self, size: &str) -> String {
        let path = self.0.display();
        format!("  f: {{ kind: file, path: {path}, size: {size}, create: true }}\n")
    }

    fn len(&self) -> Option<u64> {
        Some(std::fs::metadata(&self.0).ok()?.len())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Creates a target `v` with LUN `f` on the TCP address of `t`.
fn third(net: u8) -> String {
    format!(
        "  - name: v\n    iqn: iqn.2026-01.org.example:v\n    \
         portals: [{{ protocol: iscsi, listen: {} }}]\n    luns: {{ 0: f }}\n    access: open\n",
        addr(net, 1)
    )
}

#[test]
fn failed_change_leaves_no_trace() {
    let net = 3;
    let image = Image::new("trace");
    let mut server = Server::start(&config(net, "", "", "")).unwrap();
    let mut stays = srp(&server, "t", addr(net, 1), addr(net, 2)).unwrap();
    // Everything is available except for the last socket.
    let taken = TcpListener::bind((addr(net, 9), 3260)).unwrap();
    let backend = image.backend("1MiB");
    let wanted = format!("{}{}", third(net), second(net, &[8], &[7, 9]));
    let wanted = config(net, &backend, &wanted, "");
    let error = server.change(wanted.clone()).unwrap_err();
    assert!(matches!(error, ChangeError::Server(_)), "{error}");
    assert!(error.to_string().contains("cannot listen on"), "{error}");
    assert_eq!(image.len(), None, "the file was created and is removed");
    assert_eq!(server.shared().device_slots.addresses(), [addr(net, 1)]);
    assert!(
        TcpListener::bind((addr(net, 7), 3260)).is_ok(),
        "it is free"
    );
    assert_eq!(server.config().targets.len(), 1);
    assert_eq!(ready(&mut stays), GOOD);
    // The failure must not affect the next attempt.
    drop(taken);
    server.change(wanted).unwrap();
    assert_eq!(image.len(), Some(1 << 20));
    srp(&server, "u", addr(net, 8), addr(net, 3)).unwrap();
    iscsi(addr(net, 9), "u", 1).unwrap();
    assert_eq!(ready(&mut stays), GOOD);
    server.shutdown().unwrap();
}

#[test]
fn initiators_are_notified_of_grown_backend() {
    let net = 4;
    let image = Image::new("grows");
    let sized = |size: &str, targets: &str| config(net, &image.backend(size), targets, "");
    let v = third(net);
    let mut server = Server::start(&sized("1MiB", &v)).unwrap();
    let mut client = iscsi(addr(net, 1), "v", 1).unwrap();
    // The file would grow, but another resource is not available.
    let taken = TcpListener::bind((addr(net, 9), 3260)).unwrap();
    let both = format!("{v}{}", second(net, &[], &[9]));
    server.change(sized("2MiB", &both)).unwrap_err();
    assert_eq!(image.len(), Some(1 << 20));
    assert_eq!(tcp_ready(&mut client), 0);
    drop(taken);
    server.change(sized("2MiB", &both)).unwrap();
    assert_eq!(image.len(), Some(2 << 20));
    assert_eq!(tcp_ready(&mut client), 2, "CAPACITY DATA HAS CHANGED");
    assert_eq!(tcp_ready(&mut client), 0);
    let (status, capacity) = client.command(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], false, 8, &[]);
    assert_eq!((status, &capacity[..4]), (0, &4095u32.to_be_bytes()[..]));
    // A file never shrinks.
    server.change(sized("1MiB", &both)).unwrap();
    assert_eq!(image.len(), Some(2 << 20));
    assert_eq!(tcp_ready(&mut client), 0);
    let (status, capacity) = client.command(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], false, 8, &[]);
    assert_eq!((status, &capacity[..4]), (0, &4095u32.to_be_bytes()[..]));
    server.shutdown().unwrap();
}

#[test]
fn limits_and_secrets_apply_to_new_logins() {
    let net = 5;
    let mut server = Server::start(&config(net, "", "", "")).unwrap();
    let mut first = iscsi(addr(net, 1), "t", 1).unwrap();
    let mut srp_too = srp(&server, "t", addr(net, 1), addr(net, 2)).unwrap();
    let limits = "limits: { max_sessions: 2, sessions_per_address: 2, queue_depth: 16 }\n";
    server.change(config(net, "", "", limits)).unwrap();
    let refused = |result: Result<Client, LoginError>| match result {
        Err(LoginError::Refused(status)) => status,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it is let in"),
    };
    let out = LoginStatus::OUT_OF_RESOURCES;
    assert_eq!(refused(iscsi(addr(net, 1), "t", 2)), out);
    assert_eq!(tcp_ready(&mut first), 0);
    // A session without the credentials that are now required is logged out (see `revoked_users`).
    let mut closed = config(net, "", "", "");
    let chap = config(
        net,
        "",
        "",
        "discovery_chap: { users: [{ name: alice, secret: twelve-bytes-or-more }] }\n",
    );
    closed.targets[0].chap = chap.discovery_chap;
    server.change(closed).unwrap();
    let failed = LoginStatus::AUTHENTICATION_FAILURE;
    assert_eq!(refused(iscsi(addr(net, 1), "t", 2)), failed);
    let to = SocketAddr::new(addr(net, 1), 3260);
    let name = "iqn.2026-01.org.example:t";
    let secret = Some("twelve-bytes-or-more");
    assert!(Client::login_at(to, name, 2, secret).is_ok());
    assert_eq!(ready(&mut srp_too), GOOD);
    server.shutdown().unwrap();
}
