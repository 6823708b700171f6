//! A server with an iSCSI portal, and an initiator of our own login machine on a socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use riser_scsi::iscsi::frame::{self, Digests, Framer};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{InitiatorConfig, InitiatorLogin, LoginError, LoginStep};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{FromTarget, LoginStatus, ScsiCommand, TaskAttr};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih, chap};
use riser_target::config::Config;
use riser_target::server::Server;

/// A connection of an initiator.
struct Client {
    socket: TcpStream,
    framer: Framer,
    buffer: Vec<u8>,
    digests: Digests,
    cmd_sn: u32,
}

impl Client {
    fn login(port: u16, target: &str, isid: u8, secret: Option<&str>) -> Result<Self, LoginError> {
        let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut client = Self {
            socket,
            framer: Framer::new(1 << 20),
            buffer: Vec::new(),
            digests: Digests::default(),
            cmd_sn: 1,
        };
        let config = InitiatorConfig {
            name: IscsiName::new("iqn.2026-01.org.example:client").unwrap(),
            target: Some(IscsiName::new(target).unwrap()),
            isid: Isid([0x80, 0, 0, 0, 0, isid]),
            tsih: Tsih(0),
            cid: Cid(0),
            cmd_sn: CmdSn(1),
            credentials: secret.map(|secret| chap::Credentials {
                name: "alice".into(),
                secret: secret.into(),
            }),
            target_credentials: None,
            offer: Offer::default()
                .with_list(Key::HeaderDigest, 2)
                .with_list(Key::DataDigest, 2),
            keys: vec![Key::HeaderDigest, Key::DataDigest],
        };
        let mut login = InitiatorLogin::new(config, [9; 33]);
        loop {
            if let Some((request, text)) = login.poll_request() {
                client.send(request.header(), &text);
            }
            let (pdu, _, data) = client.receive().expect("an answer");
            let FromTarget::LoginResponse(response) = pdu else {
                panic!("{pdu:?}");
            };
            match login.handle_response(&response, &data)? {
                LoginStep::Send => {}
                LoginStep::FullFeature { connection, .. } => {
                    client.digests = connection.digests;
                    client.framer.set(1 << 20, connection.digests);
                    return Ok(client);
                }
                LoginStep::Redirect { .. } => panic!("nowhere to go"),
            }
        }
    }

    fn send(&mut self, bhs: [u8; 48], data: &[u8]) {
        let mut bytes = Vec::new();
        frame::put(bhs, &[], data, self.digests, &mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    /// The next PDU; `None` at the end of the connection.
    fn receive(&mut self) -> Option<(FromTarget, Numbers, Vec<u8>)> {
        loop {
            let (used, frame) = self.framer.next(&self.buffer).unwrap();
            let got = frame.map(|frame| {
                assert!(frame.is_intact);
                let (pdu, numbers) = FromTarget::parse(&frame).unwrap();
                (pdu, numbers, frame.data.to_vec())
            });
            self.buffer.drain(..used);
            if got.is_some() {
                return got;
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes) {
                Ok(n) if n > 0 => self.buffer.extend_from_slice(&bytes[..n]),
                _ => return None,
            }
        }
    }

    /// A command; its status and data. A unit attention is passed over.
    fn command(&mut self, cdb: &[u8], writes: bool, len: u32, data: &[u8]) -> (u8, Vec<u8>) {
        let mut whole = [0; 16];
        whole[..cdb.len()].copy_from_slice(cdb);
        let command = ScsiCommand {
            immediate: false,
            is_final: true,
            reads: !writes && len > 0,
            writes,
            attribute: TaskAttr::Simple,
            lun: [0; 8],
            itt: Itt(self.cmd_sn),
            expected_length: len,
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
            cdb: whole.into_iter().collect(),
            bidi_read_length: None,
        };
        self.cmd_sn += 1;
        self.send(command.header(), data);
        let mut read = Vec::new();
        loop {
            let (pdu, _, data) = self.receive().expect("an answer");
            match pdu {
                FromTarget::DataIn(pdu) => {
                    read.extend(data);
                    if let Some(with) = pdu.status {
                        return (with.status, read);
                    }
                }
                FromTarget::ScsiResponse(response) => return (response.status, read),
                other => panic!("{other:?}"),
            }
        }
    }
}

fn start() -> (Server, u16) {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let text = format!(
        "backends: {{ ram: {{ kind: ram, size: 1MiB }} }}\n\
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
         workers: {{ count: 2 }}\n"
    );
    let config = Config::parse(&text, "test.yaml").unwrap();
    (Server::start(&config).unwrap(), port)
}

#[test]
fn what_is_written_in_one_session_is_read_in_another() {
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
    assert_eq!(server.sessions(), 0, "none of SRP");
    let sessions: usize = server
        .snapshot()
        .iter()
        .map(|s| s.iscsi_sessions.len())
        .sum();
    assert_eq!(sessions, 2);
    drop((writer, reader));
    server.shutdown().unwrap();
}

#[test]
fn a_wrong_secret_and_an_unknown_target_are_refused() {
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

/// The same initiator port at the same target takes its session over; another ISID is another
/// session.
#[test]
fn a_second_login_takes_the_session_over() {
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
