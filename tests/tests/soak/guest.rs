//! A host that connects and disconnects sessions, using all ways in which a session can be started
//! or closed.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::pdu::{FromInitiator, FromTarget, LogoutReason, LogoutRequest};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn};
use riser_scsi::srp::{
    DataBuffer, ILogout, MultiChannelAction, MultiChannelResult, Tag, TargetPortId,
};
use riser_test_peers::iser_client::Client as Iser;
use riser_test_peers::mini::{Mini, Refused, login_req, real};
use riser_test_peers::pdus;
use riser_test_peers::tcp::Client as Tcp;
use riser_tests::load::Chance;
use riser_transport::roce::{Roce, RoceConfig};

use super::{IOC_GUID, IQN, SECRET, TARGET, WITH_CHAP};

/// A target that doesn't exist.
const NOBODY: &str = "iqn.2026-01.com.example:nobody";

/// Maximum number of memory regions for a guest. This must be larger than the number of commands
/// per session.
const REGIONS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Protocol {
    Srp,
    Iser,
    Tcp,
}

impl Protocol {
    pub(crate) const ALL: [Self; 3] = [Self::Srp, Self::Iser, Self::Tcp];
}

/// Type of a session. Each port only uses sessions of a single type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Plain,
    /// Two iSCSI connections or SRP channels.
    Several,
    /// Uses CHAP for login.
    Chap,
    Discovery,
}

impl Kind {
    /// Returns the session types to use for a protocol.
    fn of(protocol: Protocol) -> &'static [Self] {
        match protocol {
            Protocol::Srp => &[Self::Plain, Self::Several],
            Protocol::Iser => &[Self::Plain, Self::Discovery],
            Protocol::Tcp => &[Self::Plain, Self::Several, Self::Chap, Self::Discovery],
        }
    }

    /// Returns all protocols and session types.
    pub(crate) fn all() -> impl Iterator<Item = (Protocol, Self)> {
        let of = |protocol| Self::of(protocol).iter().map(move |kind| (protocol, *kind));
        Protocol::ALL.into_iter().flat_map(of)
    }
}

/// State reached by a session, and how it's closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// Uses a logout.
    Logout,
    /// The connection is closed without a logout.
    Closed,
    /// The host disappears, and its next login will replace this session.
    Vanished,
    /// The login is rejected.
    Refused,
    /// The host disappears during the login.
    Half,
}

impl End {
    const ALL: [Self; 5] = [
        Self::Logout,
        Self::Closed,
        Self::Vanished,
        Self::Refused,
        Self::Half,
    ];
}

/// A host with an initiator port for each protocol.
pub(crate) struct Guest {
    number: u8,
    chance: Chance,
    /// Number of sessions and total time for each type.
    pub(crate) counts: BTreeMap<(Protocol, Kind, End), (u64, Duration)>,
}

impl Guest {
    pub(crate) fn new(number: u8, seed: u64) -> Self {
        Self {
            number,
            chance: Chance::new(seed, u64::from(number)),
            counts: BTreeMap::new(),
        }
    }

    /// Runs a random session from start to end.
    pub(crate) fn visit(&mut self) {
        let protocol = Protocol::ALL[self.chance.below(3) as usize];
        let end = End::ALL[self.chance.below(End::ALL.len() as u64) as usize];
        let kinds = Kind::of(protocol);
        let kind = kinds[self.chance.below(kinds.len() as u64) as usize];
        self.visit_so(protocol, kind, end);
    }

    pub(crate) fn visit_so(&mut self, protocol: Protocol, kind: Kind, end: End) {
        let begun = Instant::now();
        match protocol {
            Protocol::Srp => self.srp(kind, end),
            Protocol::Iser => self.iser(kind, end),
            Protocol::Tcp => self.tcp(kind, end),
        }
        let (count, took) = self.counts.entry((protocol, kind, end)).or_default();
        *count += 1;
        *took += begun.elapsed();
    }

    /// Creates a device, like a host that was just started. When it's dropped, it doesn't send any
    /// more packets.
    fn device(&self) -> Roce {
        self.device_at(200 + self.number)
    }

    fn device_at(&self, host: u8) -> Roce {
        let [a, b, c, _] = TARGET.octets();
        let address = Ipv4Addr::new(a, b, c, host);
        let mut config = RoceConfig::new(IpAddr::V4(address));
        // Use a small table, because this is created for every session.
        config.limits.max_mr = REGIONS;
        Roce::open(&config).unwrap()
    }

    /// Returns the port number for a session type.
    fn port(&self, kind: Kind) -> u8 {
        self.number + 50 * kind as u8
    }

    fn srp(&self, kind: Kind, end: End) {
        let to = SocketAddr::from((TARGET, 5555));
        let guid = IOC_GUID.to_be_bytes();
        let mut port = [guid, guid].concat();
        port[15] ^= u8::from(end == End::Refused);
        let port = TargetPortId(port.try_into().expect("16 bytes"));
        let mut request = login_req(self.port(kind), port);
        let mut device = self.device();
        if end == End::Half {
            let mut private_data = vec![0; 56];
            request.emit_rdma(&mut private_data);
            return Mini::request(&mut device, to, private_data, &mut real);
        }
        let mini = Mini::connect(device, to, &request, &mut real);
        if end == End::Refused {
            let why = mini.err().expect("a target port that there is not").1;
            assert!(matches!(why, Refused::Login(_)), "{why:?}");
            return;
        }
        let mut mini = mini.map_err(|(_, why)| why).expect("a login");
        mini.clear_unit_attention(&mut real);
        let mut second = (kind == Kind::Several).then(|| {
            request.multi_channel = MultiChannelAction::Multi;
            let device = self.device_at(100 + self.number);
            let second = Mini::connect(device, to, &request, &mut real);
            let second = second.map_err(|(_, why)| why).expect("a second channel");
            assert_eq!(second.rsp.multi_channel, MultiChannelResult::Maintained);
            second
        });
        if let Some(second) = &mut second {
            let response = second.command(&[0; 6], DataBuffer::None, DataBuffer::None, &mut real);
            assert_eq!(response.status, 0);
        }
        match end {
            End::Logout => {
                let mut logout = [0; 16];
                ILogout { tag: Tag(2) }.emit(&mut logout);
                for mut channel in second.into_iter().chain([mini]) {
                    channel.send(&logout);
                    channel.wait_closed(&mut real);
                    channel.disconnect(&mut real);
                }
            }
            End::Closed => {
                for channel in second.into_iter().chain([mini]) {
                    channel.disconnect(&mut real);
                }
            }
            _ => {}
        }
    }

    fn iser(&self, kind: Kind, end: End) {
        let to = SocketAddr::from((TARGET, 3260));
        let mut client = Iser::connect(self.device(), to, true, &mut real).expect("a connection");
        let target = match (end, kind) {
            (End::Refused, _) => Some(NOBODY),
            (_, Kind::Discovery) => None,
            _ => Some(IQN),
        };
        if end == End::Half {
            return client.begin_login(&self.first_of_login("RDMAExtensions=Yes\0"), &mut real);
        }
        let login = client.login(target, self.port(kind), &[], &mut real);
        if end == End::Refused {
            assert!(matches!(login, Err(LoginError::Refused(_))), "{login:?}");
            return client.disconnect(&mut real);
        }
        login.expect("a login");
        match kind {
            Kind::Discovery => assert_names_target(&client.send_targets(&mut real)),
            _ => client.clear_unit_attention(&mut real),
        }
        match end {
            End::Logout => {
                client.begin_logout(&mut real);
                client.disconnect(&mut real);
            }
            End::Closed => client.disconnect(&mut real),
            _ => {}
        }
    }

    /// Creates a Login Request that must be followed by another request.
    fn first_of_login(&self, more: &str) -> Vec<u8> {
        let isid = [0x80, 0, 0, 0, 0, self.number];
        let mut pdu = pdus::login(isid, "iqn.2026-01.com.example:half", IQN, more);
        // Operational stage, without a transition to the next stage.
        pdu[1] = 0x04;
        pdu
    }

    fn tcp(&mut self, kind: Kind, end: End) {
        let to = SocketAddr::from((TARGET, 3260));
        if end == End::Half {
            let mut socket = TcpStream::connect(to).unwrap();
            let pdu = self.first_of_login("");
            // Send either a part of it, or all of it and wait for the response.
            let len = match self.chance.below(2) {
                0 => self.chance.below(pdu.len() as u64) as usize,
                _ => pdu.len(),
            };
            socket.write_all(&pdu[..len]).unwrap();
            if len == pdu.len() {
                socket.read_exact(&mut [0; 48]).unwrap();
            }
            return;
        }
        // Use many addresses, because there are not enough ports for a single address: closed
        // connections stay in TIME_WAIT for a minute.
        let host = 1 + self.chance.below(250) as u8;
        let [a, b] = if kind == Kind::Chap {
            WITH_CHAP
        } else {
            [127, 1]
        };
        let here = SocketAddr::from(([a, b, self.number, host], 0));
        let isid = self.port(kind);
        // Each type is rejected for a different reason.
        let is_refused = end == End::Refused;
        let (target, secret) = match kind {
            Kind::Chap if is_refused => (IQN, Some("not-the-secret-of-alice")),
            Kind::Chap => (IQN, Some(SECRET)),
            _ if is_refused => (NOBODY, None),
            _ => (IQN, None),
        };
        let login = match (kind, end) {
            // A connection for a session that doesn't exist.
            (Kind::Several, End::Refused) => {
                Tcp::attempt_from(here, to, IQN, isid, (u16::MAX, 1), None)
            }
            (Kind::Discovery, End::Refused) | (Kind::Plain | Kind::Several | Kind::Chap, _) => {
                Tcp::attempt_from(here, to, target, isid, (0, 0), secret)
            }
            (Kind::Discovery, _) => {
                Tcp::discovery_from(here, to, isid, 0).map(|client| (client, None))
            }
        };
        if is_refused {
            let why = login.err().expect("a login that is refused");
            assert!(matches!(why, LoginError::Refused(_)), "{why:?}");
            return;
        }
        let (mut client, _) = login.expect("a login");
        match kind {
            Kind::Discovery => assert_names_target(&client.send_targets()),
            _ => {
                for status in [2, 0] {
                    assert_eq!(client.command(&[0; 6], false, 0, &[]).0, status);
                }
            }
        }
        let second = (kind == Kind::Several).then(|| {
            let numbers = (client.tsih.0, 1);
            let login = Tcp::attempt_from(here, to, IQN, isid, numbers, None);
            login.expect("a second connection").0
        });
        match end {
            End::Logout => log_out(&mut client),
            End::Vanished => {
                for client in second.iter().chain([&client]) {
                    vanish(&client.socket).unwrap();
                }
            }
            _ => {}
        }
    }
}

/// Checks that a SendTargets response contains the target.
fn assert_names_target(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    assert!(text.contains(IQN), "{text}");
}

fn log_out(client: &mut Tcp) {
    let request = LogoutRequest {
        immediate: true,
        reason: LogoutReason::CloseSession,
        itt: Itt(81),
        cid: Cid(0),
        cmd_sn: CmdSn(client.cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    client.send(FromInitiator::LogoutRequest(request).header(), &[]);
    let response = client.receive();
    let is_response = matches!(response, Some((FromTarget::LogoutResponse(_), ..)));
    assert!(is_response, "expected a logout response");
}

/// Closes a socket without sending any packets.
fn vanish(socket: &TcpStream) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the value is an integer with the given length, and is valid during this call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
