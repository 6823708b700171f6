//! A minimal iSCSI initiator for tests that uses a socket or another stream. It uses our own login
//! state machine and can send one command at a time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::pdus::reserve_out_list;
use riser_scsi::iscsi::frame::{self, Digests, Framer};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{InitiatorConfig, InitiatorLogin, LoginError, LoginStep};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, ScsiCommand, TaskAttr, TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, StatSn, Tsih, Ttt, chap};
use socket2::{Domain, Socket, Type};

/// Returns a port of 127.0.0.1 that is not in use.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A connection to a target.
pub struct Client<S = TcpStream> {
    pub socket: S,
    framer: Framer,
    buffer: Vec<u8>,
    pub digests: Digests,
    pub cmd_sn: u32,
    pub tsih: Tsih,
}

impl Client {
    pub fn login(
        port: u16,
        target: &str,
        isid: u8,
        secret: Option<&str>,
    ) -> Result<Self, LoginError> {
        Self::join(port, target, isid, (0, 0), secret)
    }

    pub fn login_at(
        to: SocketAddr,
        target: &str,
        isid: u8,
        secret: Option<&str>,
    ) -> Result<Self, LoginError> {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        match Self::attempt_from(here, to, target, isid, (0, 0), secret)? {
            (client, None) => Ok(client),
            (_, Some(elsewhere)) => panic!("sent to {elsewhere:?}"),
        }
    }

    /// Logs in on 127.0.0.1 without a secret, and clears the unit attention.
    pub fn ready(port: u16, target: &str, isid: u8) -> Self {
        Self::ready_at(SocketAddr::from(([127, 0, 0, 1], port)), target, isid)
    }

    /// Same as [`Client::ready`] for any address.
    pub fn ready_at(to: SocketAddr, target: &str, isid: u8) -> Self {
        let mut client = Self::login_at(to, target, isid, None).unwrap();
        assert_eq!(client.command(&[0; 6], false, 0, &[]).0, 2, "power on");
        client
    }

    /// Sends PERSISTENT RESERVE OUT without APTPL. Returns the status.
    pub fn reserve_out(&mut self, action: u8, kind: u8, own: u64, key: u64) -> u8 {
        let list = reserve_out_list(own, key);
        let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
        self.command(&cdb, true, 24, &list).0
    }

    /// Opens a connection with this connection ID for a new or existing session.
    pub fn join(
        port: u16,
        target: &str,
        isid: u8,
        numbers: (u16, u16),
        secret: Option<&str>,
    ) -> Result<Self, LoginError> {
        match Self::attempt(port, target, isid, numbers, secret)? {
            (client, None) => Ok(client),
            (_, Some(elsewhere)) => panic!("sent to {elsewhere:?}"),
        }
    }

    /// Returns the address used to redirect a login, and whether this is permanent.
    pub fn redirected(port: u16, target: &str) -> (String, bool) {
        let (_, elsewhere) = Self::attempt(port, target, 1, (0, 0), None).unwrap();
        elsewhere.expect("sent elsewhere")
    }

    pub fn attempt(
        port: u16,
        target: &str,
        isid: u8,
        numbers: (u16, u16),
        secret: Option<&str>,
    ) -> Result<(Self, Option<(String, bool)>), LoginError> {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        Self::attempt_from(here, to, target, isid, numbers, secret)
    }

    pub fn attempt_from(
        here: SocketAddr,
        to: SocketAddr,
        target: &str,
        isid: u8,
        numbers: (u16, u16),
        secret: Option<&str>,
    ) -> Result<(Self, Option<(String, bool)>), LoginError> {
        Self::attempt_at_level(here, to, (Some(target), secret), isid, numbers, 0)
    }

    /// Opens a discovery session.
    pub fn discovery(port: u16, isid: u8) -> Result<Self, LoginError> {
        Self::rediscovery(port, isid, 0)
    }

    /// Opens a connection for a discovery session, which may already exist.
    pub fn rediscovery(port: u16, isid: u8, tsih: u16) -> Result<Self, LoginError> {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        Self::discovery_from(here, to, isid, tsih)
    }

    pub fn discovery_from(
        here: SocketAddr,
        to: SocketAddr,
        isid: u8,
        tsih: u16,
    ) -> Result<Self, LoginError> {
        let attempt = Self::attempt_at_level(here, to, (None, None), isid, (tsih, 0), 0)?;
        Ok(attempt.0)
    }

    /// Opens a connection with error recovery level 2 for a new or existing session.
    pub fn recoverable(port: u16, target: &str, isid: u8, numbers: (u16, u16)) -> Self {
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let attempt = Self::attempt_at_level(here, to, (Some(target), None), isid, numbers, 2);
        attempt.unwrap().0
    }

    fn attempt_at_level(
        here: SocketAddr,
        to: SocketAddr,
        (target, secret): (Option<&str>, Option<&str>),
        isid: u8,
        (tsih, cid): (u16, u16),
        level: u32,
    ) -> Result<(Self, Option<(String, bool)>), LoginError> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&here.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        let socket = TcpStream::from(socket);
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self::attempt_on(socket, (target, secret), isid, (tsih, cid), level)
    }
}

impl<S: Read + Write> Client<S> {
    /// Opens a connection for a new session, using a stream that is already connected to the
    /// portal.
    pub fn login_on(socket: S, target: &str, isid: u8) -> Result<Self, LoginError> {
        let attempt = Self::attempt_on(socket, (Some(target), None), isid, (0, 0), 0)?;
        Ok(attempt.0)
    }

    fn attempt_on(
        socket: S,
        (target, secret): (Option<&str>, Option<&str>),
        isid: u8,
        (tsih, cid): (u16, u16),
        level: u32,
    ) -> Result<(Self, Option<(String, bool)>), LoginError> {
        let mut client = Self {
            socket,
            framer: Framer::new(1 << 20),
            buffer: Vec::new(),
            digests: Digests::default(),
            cmd_sn: 1,
            tsih: Tsih(0),
        };
        let config = InitiatorConfig {
            name: IscsiName::new("iqn.2026-01.org.example:client").unwrap(),
            target: target.map(|target| IscsiName::new(target).unwrap()),
            isid: Isid([0x80, 0, 0, 0, 0, isid]),
            tsih: Tsih(tsih),
            cid: Cid(cid),
            cmd_sn: CmdSn(1),
            // The user name is Alice, unless the secret has a different name as its prefix.
            credentials: secret.map(|secret| {
                let (name, secret) = secret.split_once(':').unwrap_or(("alice", secret));
                let (name, secret) = (name.into(), secret.into());
                chap::Credentials { name, secret }
            }),
            target_credentials: None,
            offer: Offer::default()
                .with(Key::MaxConnections, 2)
                .with(Key::ErrorRecoveryLevel, level)
                .with_list(Key::HeaderDigest, 2)
                .with_list(Key::DataDigest, 2),
            keys: if tsih == 0 && target.is_some() {
                vec![
                    Key::MaxConnections,
                    Key::ErrorRecoveryLevel,
                    Key::HeaderDigest,
                    Key::DataDigest,
                ]
            } else {
                vec![Key::HeaderDigest, Key::DataDigest]
            },
        };
        let mut login = InitiatorLogin::new(config, [9; 33]);
        loop {
            if let Some((request, text)) = login.poll_request() {
                client.send(request.header(), &text);
            }
            let (pdu, _, data) = client.receive().expect("response");
            let FromTarget::LoginResponse(response) = pdu else {
                panic!("{pdu:?}");
            };
            match login.handle_response(&response, &data)? {
                LoginStep::Send => {}
                LoginStep::FullFeature { connection, .. } => {
                    client.tsih = response.tsih;
                    client.digests = connection.digests;
                    client.framer.set(1 << 20, connection.digests);
                    return Ok((client, None));
                }
                LoginStep::Redirect { to, permanent } => {
                    return Ok((client, Some((to.to_string(), permanent))));
                }
            }
        }
    }

    pub fn send(&mut self, bhs: [u8; 48], data: &[u8]) {
        let mut bytes = Vec::new();
        frame::put_pdu(bhs, &[], data, self.digests, &mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    /// Receives the next PDU. Returns `None` if the connection was closed. If the target sends a
    /// ping, we first send the response.
    pub fn receive(&mut self) -> Option<(FromTarget, Numbers, Vec<u8>)> {
        loop {
            match self.receive_any()? {
                (FromTarget::NopIn(ping), ..) if ping.ttt != Ttt::NONE => {
                    let response = crate::pdus::pong(&ping, self.cmd_sn);
                    self.send(response.header(), &[]);
                }
                other => return Some(other),
            }
        }
    }

    fn receive_any(&mut self) -> Option<(FromTarget, Numbers, Vec<u8>)> {
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

    /// Sends a command and returns its status and data.
    pub fn command(&mut self, cdb: &[u8], writes: bool, len: u32, data: &[u8]) -> (u8, Vec<u8>) {
        self.send_command(cdb, writes, len, data);
        self.receive_response()
    }

    pub fn send_command(&mut self, cdb: &[u8], writes: bool, len: u32, data: &[u8]) {
        self.send_with(TaskAttr::Simple, cdb, writes, len, data);
    }

    /// Sends a command to a logical unit. It either writes `data` or reads up to `read` bytes.
    pub fn send_to(&mut self, lun: u8, cdb: &[u8], data: &[u8], read: u32) {
        let (sn, writes) = (self.cmd_sn, !data.is_empty());
        let len = read.max(data.len() as u32);
        let mut command = crate::pdus::scsi_command(sn, sn, cdb, writes, len);
        command.lun[1] = lun;
        self.cmd_sn += 1;
        self.send(command.header(), data);
    }

    pub fn send_with(
        &mut self,
        attribute: TaskAttr,
        cdb: &[u8],
        writes: bool,
        len: u32,
        data: &[u8],
    ) {
        let mut whole = [0; 16];
        whole[..cdb.len()].copy_from_slice(cdb);
        let command = ScsiCommand {
            immediate: false,
            is_final: true,
            reads: !writes && len > 0,
            writes,
            attribute,
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
    }

    /// Requests a list of all targets in a discovery session.
    pub fn send_targets(&mut self) -> Vec<u8> {
        let (request, out) = crate::pdus::send_targets(self.cmd_sn);
        self.send(FromInitiator::TextRequest(request).header(), &out);
        match self.receive() {
            Some((FromTarget::TextResponse(_), _, text)) => text,
            other => panic!("{other:?}"),
        }
    }

    /// Resets LUN 0.
    pub fn reset_unit(&mut self) -> TmfStatus {
        let request = TmfRequest {
            immediate: true,
            function: TmfFunction::LogicalUnitReset,
            lun: [0; 8],
            itt: Itt(0x7000),
            referenced: Itt::NONE,
            cmd_sn: CmdSn(self.cmd_sn),
            exp_stat_sn: StatSn(0),
            ref_cmd_sn: CmdSn(0),
            exp_data_sn: 0,
        };
        self.send(FromInitiator::TmfRequest(request).header(), &[]);
        match self.receive() {
            Some((FromTarget::TmfResponse(response), ..)) => response.status,
            other => panic!("expected a function response, not {other:?}"),
        }
    }

    pub fn receive_response(&mut self) -> (u8, Vec<u8>) {
        let mut read = Vec::new();
        loop {
            let (pdu, _, data) = self.receive().expect("response");
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

#[cfg(test)]
mod tests {
    use std::io::{self, Cursor};

    use riser_scsi::iscsi::pdu::NopIn;

    use super::*;

    /// Bytes to be received from a target, and the bytes that were sent to it.
    struct Script(Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Script {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn target_pings_get_response() {
        let nop_in = |itt, ttt| {
            let lun = [0; 8];
            let mut bytes = Vec::new();
            let header = NopIn { lun, itt, ttt }.header(Numbers::default());
            frame::put_pdu(header, &[], &[], Digests::default(), &mut bytes);
            bytes
        };
        let said = [nop_in(Itt::NONE, Ttt(5)), nop_in(Itt(9), Ttt::NONE)].concat();
        let mut client = Client {
            socket: Script(Cursor::new(said), Vec::new()),
            framer: Framer::new(1 << 20),
            buffer: Vec::new(),
            digests: Digests::default(),
            cmd_sn: 7,
            tsih: Tsih(1),
        };
        let Some((FromTarget::NopIn(response), ..)) = client.receive() else {
            panic!("response to the client's ping");
        };
        assert_eq!(response.itt, Itt(9));
        assert!(client.receive().is_none(), "the end");
        // RFC 7143 11.18: this must be immediate, use the target transfer tag of the ping, and not
        // have its own task tag.
        let sent = client.socket.1;
        assert_eq!((sent.len(), sent[0], sent[1]), (48, 0x40, 0x80));
        assert_eq!(
            sent[16..28],
            [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 5, 0, 0, 0, 7]
        );
    }
}
