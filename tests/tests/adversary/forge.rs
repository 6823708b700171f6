//! Packets that pretend, from what a stranger can guess or has seen.

use std::collections::VecDeque;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::process::Command;

use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, Deth, ExtHeaders, IcrcFlow, Msn, Opcode, Psn, Qpn, ROCE_PORT, Reth,
    emit_headers,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::net::{HONEST, LATER, SECOND, STRANGER, TARGET};
use riser_tests::load::Chance;

const UDP: u8 = 17;
const ICMP: u8 = 1;
/// Ethernet, IPv4 and UDP headers of a frame that was seen.
const ETHERNET: usize = 14;
const HEADERS: usize = ETHERNET + 20 + 8;
/// Where a MAD begins in a datagram: behind BTH and DETH.
const MAD: usize = 12 + 8;
/// Bytes that the stranger READs, a number that honest hosts and the target never use.
const READ_LEN: usize = 61;

/// What a stranger does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trick {
    /// Fragmentation needed, and unreachable.
    Icmp,
    /// REQs in the name of hosts, of all kinds of logins.
    Requests,
    /// REJ, DREQ, RTU, SIDR_REQ and others, about connections with guessed or known ids.
    ConnectionManagement,
    /// ACKs and NAKs.
    Acknowledgements,
    /// SENDs, WRITEs and READs with guessed keys, and packets that were seen before.
    Memory,
}

impl Trick {
    pub(crate) const ALL: [Self; 5] = [
        Self::Icmp,
        Self::Requests,
        Self::ConnectionManagement,
        Self::Acknowledgements,
        Self::Memory,
    ];
}

/// What a stranger knows, and what it can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It knows addresses, ports and formats.
    OffPath,
    /// It sees every packet, and each of its own is right but for one number: an address that it
    /// does not have, an id of a connection, a queue pair, or a sequence number that is far away.
    OneNumberOff,
    /// It sees every packet, and sends what it likes, but for commands in a host's name.
    OnPath,
}

impl Reach {
    pub(crate) const ALL: [Self; 3] = [Self::OffPath, Self::OneNumberOff, Self::OnPath];
}

/// How a host has made a connection: its REQ, and the REP that answered it, as MADs.
#[derive(Clone)]
pub(crate) struct Login {
    host: Ipv4Addr,
    pub(crate) req: Vec<u8>,
    rep: Vec<u8>,
}

/// One end of a connection, as messages of the connection manager name it.
struct End {
    host: Ipv4Addr,
    id: [u8; 4],
    qpn: [u8; 3],
}

impl Login {
    /// The host and the target, in either order.
    fn ends(&self, chance: &mut Chance) -> (End, End) {
        let host = End {
            host: self.host,
            id: self.req[24..28].try_into().unwrap(),
            qpn: self.req[56..59].try_into().unwrap(),
        };
        let target = End {
            host: TARGET,
            id: self.rep[24..28].try_into().unwrap(),
            qpn: self.rep[36..39].try_into().unwrap(),
        };
        match chance.below(2) {
            0 => (host, target),
            _ => (target, host),
        }
    }
}

/// A packet that was seen on the wire.
struct Seen {
    from: SocketAddr,
    to: SocketAddr,
    /// Behind the UDP header.
    body: Vec<u8>,
    is_whole: bool,
}

impl Seen {
    fn is_cm(&self) -> bool {
        self.body[0] == 0x64 && self.body.len() >= MAD + 256 && self.body[MAD + 1] == 7
    }

    fn qpn(&self) -> u32 {
        u32::from_be_bytes([0, self.body[5], self.body[6], self.body[7]])
    }

    /// The remote address and key of a WRITE or a READ request.
    fn reth(&self) -> Option<(u64, u32)> {
        let has_one = matches!(self.body[0], 0x06 | 0x0a | 0x0b | 0x0c) && self.body.len() >= 28;
        has_one.then(|| {
            let va = u64::from_be_bytes(self.body[12..20].try_into().unwrap());
            let key = u32::from_be_bytes(self.body[20..24].try_into().unwrap());
            (va, key)
        })
    }

    /// A whole READ response of [`READ_LEN`] bytes.
    fn answers_stranger(&self) -> bool {
        let padded = READ_LEN.next_multiple_of(4);
        let pad = usize::from(self.body[1] >> 4 & 3);
        // BTH, AETH and ICRC beside the data.
        self.body[0] == 0x10 && self.body.len() == 12 + 4 + padded + 4 && pad == padded - READ_LEN
    }

    /// A SEND, WRITE or READ request, with or without immediate data.
    fn is_request(&self) -> bool {
        matches!(self.body[0], 0..=0x0c | 0x16 | 0x17) && !self.is_cm()
    }

    fn psn(&self) -> u32 {
        u32::from_be_bytes([0, self.body[9], self.body[10], self.body[11]])
    }
}

/// Forges packets.
pub(crate) struct Forger {
    reach: Reach,
    raw: Socket,
    icmp: Socket,
    chance: Chance,
    /// The latest packets, at most [`Self::KEPT`].
    seen: VecDeque<Seen>,
    /// REQs of its own making: those of a login that anyone could try.
    requests: Vec<Vec<u8>>,
    /// How the hosts that are at work have logged in.
    logins: Vec<Login>,
    pub(crate) sent: u64,
    /// READs of its own that were answered with data.
    pub(crate) answered: u64,
}

impl Forger {
    const KEPT: usize = 512;
    /// Of these, those whose numbers are still in use.
    const RECENT: usize = 32;

    /// Call it in the stranger's namespace.
    pub(crate) fn new(seed: u64, reach: Reach, requests: Vec<Vec<u8>>, logins: Vec<Login>) -> Self {
        let raw = |protocol| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        Self {
            reach,
            // IPPROTO_RAW: headers are ours, source addresses too.
            raw: raw(255).unwrap(),
            icmp: raw(i32::from(ICMP)).unwrap(),
            chance: Chance::new(seed, 0xadd),
            seen: VecDeque::new(),
            requests,
            logins,
            sent: 0,
            answered: 0,
        }
    }

    /// A forger without prior knowledge, for packets the caller builds. Call it in the stranger's
    /// namespace.
    pub(crate) fn from_here() -> Self {
        Self::new(1, Reach::OffPath, Vec::new(), Vec::new())
    }

    /// Learns how hosts that are at work have logged in.
    pub(crate) fn know(&mut self, logins: Vec<Login>) {
        self.logins = logins;
    }

    /// A message to queue pair 1, in the stranger's own name.
    pub(crate) fn send_own_mad(&mut self, mad: &[u8]) {
        self.send_mad(STRANGER, TARGET, mad);
    }

    /// A packet in the stranger's own name: all behind the UDP header, whose last bytes are to be
    /// the ICRC.
    pub(crate) fn send_own_packet(&mut self, body: Vec<u8>, is_sealed: bool) {
        self.send_body(roce(STRANGER), roce(TARGET), body, is_sealed);
    }

    pub(crate) fn send_body(
        &mut self,
        from: SocketAddr,
        to: SocketAddr,
        mut body: Vec<u8>,
        is_sealed: bool,
    ) {
        // An Ethernet frame has no more.
        body.truncate(1400);
        // A packet without a whole BTH has none.
        if is_sealed && body.len() >= 16 {
            body.truncate(body.len() - 4);
            let flow = IcrcFlow::new(from, to).expect("two addresses of IPv4");
            let icrc = flow.compute(&body, IP_ID).to_le_bytes();
            body.extend_from_slice(&icrc);
        }
        let _ = self.raw.send_to(&datagram(from, to, &body), &to.into());
    }

    /// What the sniffer has seen since.
    pub(crate) fn learn(&mut self, sniffer: &mut Sniffer) {
        while let Some(seen) = sniffer.next() {
            self.answered += u64::from(seen.answers_stranger());
            if self.seen.len() == Self::KEPT {
                self.seen.pop_front();
            }
            self.seen.push_back(seen);
        }
    }

    /// The target and an honest host, in either order.
    fn ends(&mut self) -> (Ipv4Addr, Ipv4Addr) {
        let host = [HONEST, SECOND][self.chance.below(2) as usize];
        match self.chance.below(2) {
            0 => (host, TARGET),
            _ => (TARGET, host),
        }
    }

    /// One forged packet.
    pub(crate) fn play(&mut self, trick: Trick) {
        match (trick, self.reach) {
            (Trick::Icmp, _) => self.send_icmp(),
            // Seldom, since the host refuses each REP to such a REQ, so that the next one is taken
            // at once.
            (Trick::Requests, Reach::OneNumberOff) if self.sent.is_multiple_of(64) => {
                self.request_again();
            }
            (Trick::Requests, _) => self.send_request(),
            (Trick::ConnectionManagement, Reach::OneNumberOff) => {
                self.manage_known();
            }
            (Trick::ConnectionManagement, _) => self.manage(),
            (Trick::Acknowledgements, _) => self.acknowledge(),
            (Trick::Memory, Reach::OnPath) if self.chance.below(4) == 0 => self.replay(),
            (Trick::Memory, _) => self.access(),
        }
        self.sent += 1;
    }

    fn any_login(&mut self) -> Login {
        let at = self.chance.below(self.logins.len() as u64) as usize;
        self.logins[at].clone()
    }

    /// An address that is not that of `host`.
    fn other_host(&mut self, host: Ipv4Addr) -> Ipv4Addr {
        let others = [HONEST, SECOND, STRANGER].map(|h| if h == host { LATER } else { h });
        others[self.chance.below(3) as usize]
    }

    pub(crate) fn send_icmp(&mut self) {
        let (about_from, about_to) = self.ends();
        let (protocol, port) = match self.chance.below(3) {
            0 => (6, 3260u16),
            _ => (UDP, ROCE_PORT),
        };
        // Fragmentation needed with some MTU; net, host, protocol and port unreachable.
        let code = [4, 4, 0, 1, 2, 3][self.chance.below(6) as usize];
        let mtu = [68u16, 600, 1280][self.chance.below(3) as usize];
        let mut m = vec![3, code, 0, 0, 0, 0];
        m.extend(mtu.to_be_bytes());
        m.extend([0x45, 0, 4, 64, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
        m.extend(about_from.octets());
        m.extend(about_to.octets());
        m.extend(port.to_be_bytes());
        m.extend(port.to_be_bytes());
        m.extend([4, 44, 0, 0]);
        let words = m.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
        let sum = words.sum::<u32>();
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        m[2..4].copy_from_slice(&sum.to_be_bytes());
        let to = SocketAddr::new(about_from.into(), 0);
        let _ = self.icmp.send_to(&m, &to.into());
    }

    /// A REQ as in an ordinary login, with the address, ids and queue pair of another host.
    fn send_request(&mut self) {
        let template = self.chance.below(self.requests.len() as u64) as usize;
        let mut mad = self.requests[template].clone();
        let host = match self.chance.below(3) {
            0 => HONEST,
            1 => Ipv4Addr::new(10, 11, 0, 100 + self.chance.below(100) as u8),
            _ => STRANGER,
        };
        // The transaction, the requester's id, queue pair and first PSN; the addresses stand in the
        // path and in the RDMA CM's header too.
        for range in [8..16, 24..28, 56..59, 68..71] {
            for byte in &mut mad[range] {
                *byte = self.chance.below(256) as u8;
            }
        }
        for at in 0..mad.len() - 4 {
            if mad[at..at + 4] == LATER.octets() {
                mad[at..at + 4].copy_from_slice(&host.octets());
            }
        }
        self.send_mad(host, TARGET, &mad);
    }

    /// The REQ of a host that is at work, with its queue pair, as if the host had forgotten its
    /// connection.
    pub(crate) fn request_again(&mut self) {
        let login = self.any_login();
        let mut mad = login.req;
        for range in [8..16, 24..28] {
            for byte in &mut mad[range] {
                *byte = self.chance.below(256) as u8;
            }
        }
        self.send_mad(login.host, TARGET, &mad);
    }

    /// A message about a connection of a host that is at work, which is right but for one number.
    /// Returns where it goes.
    pub(crate) fn manage_known(&mut self) -> Ipv4Addr {
        let (mut from, mut to) = self.any_login().ends(&mut self.chance);
        // MRA, REJ, RTU, DREQ, DREP.
        let kinds = [0x11, 0x12, 0x14, 0x15, 0x15, 0x16];
        let kind = kinds[self.chance.below(kinds.len() as u64) as usize];
        let random = self.chance.below(1 << 32) as u32;
        match self.chance.below(4) {
            0 => from.id = random.to_be_bytes(),
            1 => to.id = random.to_be_bytes(),
            2 if kind == 0x15 => to.qpn[2] ^= random as u8 | 1,
            _ => from.host = self.other_host(from.host),
        }
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        for byte in &mut mad[8..16] {
            *byte = self.chance.below(256) as u8;
        }
        mad[17] = kind;
        mad[24..28].copy_from_slice(&from.id);
        mad[28..32].copy_from_slice(&to.id);
        match kind {
            0x15 => mad[32..35].copy_from_slice(&to.qpn),
            // The reason of a REJ, and which message it is about: the REP, or any.
            0x12 => mad[32..36].copy_from_slice(&[(random & 0xc0) as u8, 0, 0, 28]),
            _ => {}
        }
        self.send_mad(from.host, to.host, &mad);
        to.host
    }

    /// A message about a connection.
    fn manage(&mut self) {
        let (mut from, mut to) = self.ends();
        let mut mad = [0; 256];
        for byte in &mut mad[24..] {
            *byte = self.chance.below(256) as u8;
        }
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        for byte in &mut mad[8..16] {
            *byte = self.chance.below(256) as u8;
        }
        // MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR.
        let kinds = [
            0x11, 0x12, 0x12, 0x13, 0x14, 0x15, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a,
        ];
        mad[17] = kinds[self.chance.below(kinds.len() as u64) as usize];
        // Small ids are a good guess.
        for at in [24, 28] {
            let id = self.chance.below(1 << 12) as u32;
            mad[at..at + 4].copy_from_slice(&id.to_be_bytes());
        }
        let known = self.seen.iter().filter(|s| s.is_cm()).count();
        if self.reach == Reach::OnPath && known > 0 {
            let which = self.chance.below(known as u64) as usize;
            let seen = self.seen.iter().filter(|s| s.is_cm()).nth(which).unwrap();
            (from, to) = (ipv4(seen.from), ipv4(seen.to));
            mad[24..36].copy_from_slice(&seen.body[MAD + 24..MAD + 36]);
        }
        self.send_mad(from, to, &mad);
    }

    pub(crate) fn send_mad(&mut self, from: Ipv4Addr, to: Ipv4Addr, mad: &[u8]) {
        const QKEY: u32 = 0x8001_0000;
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::new(1), Psn::new(0));
        let ext = ExtHeaders {
            deth: Some(Deth::new(QKEY, Qpn::new(1))),
            ..ExtHeaders::default()
        };
        self.send(roce(from), roce(to), &bth, &ext, mad);
    }

    /// Which of the latest packets of connections to pretend to follow.
    fn recent(&mut self) -> Option<&Seen> {
        let recent = self.seen.iter().rev().filter(|s| !s.is_cm());
        let known = recent.take(Self::RECENT).count() as u64;
        let which = self.chance.below(known.max(1)) as usize;
        self.seen.iter().rev().filter(|s| !s.is_cm()).nth(which)
    }

    /// Where a packet goes.
    fn place(&mut self) -> Place {
        if self.reach != Reach::OffPath
            && let Some(seen) = self.recent()
        {
            let (from, to, qpn, psn) = (seen.from, seen.to, seen.qpn(), seen.psn());
            let mut place = Place {
                from,
                to,
                qpn,
                psn,
                reth: seen.reth(),
            };
            match self.reach {
                Reach::OneNumberOff => self.spoil(&mut place),
                _ => {
                    place.psn = psn
                        .wrapping_add(self.chance.below(8) as u32)
                        .wrapping_sub(2);
                }
            }
            return place;
        }
        let (from, to) = self.ends();
        let qpn = self.chance.below(1 << 24) as u32;
        Place {
            from: roce(from),
            to: roce(to),
            // Half of the guesses are of low numbers.
            qpn: if qpn.is_multiple_of(2) {
                qpn
            } else {
                qpn & 0xfff
            },
            psn: self.chance.below(1 << 24) as u32,
            reth: None,
        }
    }

    /// What comes next to a queue pair whose peer reaches memory at the other end, as far as is
    /// known.
    fn next_access(&mut self) -> Option<Place> {
        let known = self.seen.iter().filter(|s| s.reth().is_some()).count();
        let which = self.chance.below(known.clamp(1, 8) as u64) as usize;
        let mut all = self.seen.iter().rev();
        let seen = all.by_ref().filter(|s| s.reth().is_some()).nth(which)?;
        let is_before = |s: &&Seen| s.to == seen.to && s.qpn() == seen.qpn() && s.is_request();
        let last = self.seen.iter().rev().find(is_before)?;
        let mut place = Place {
            from: seen.from,
            to: seen.to,
            qpn: seen.qpn(),
            psn: last.psn(),
            reth: seen.reth(),
        };
        place.psn = place.psn.wrapping_add(1 + self.chance.below(3) as u32);
        Some(place)
    }

    /// Makes one number of a place wrong.
    fn spoil(&mut self, place: &mut Place) {
        match self.chance.below(4) {
            0 => place.from.set_ip(self.other_host(ipv4(place.from)).into()),
            1 => place.qpn ^= 1 << self.chance.below(24),
            // Far more than any window, either way.
            n => {
                let far = (1 << 20) + self.chance.below(1 << 20) as u32;
                place.psn = match n {
                    2 => place.psn.wrapping_add(far),
                    _ => place.psn.wrapping_sub(far),
                };
            }
        }
    }

    fn acknowledge(&mut self) {
        let place = self.place();
        // ACK; RNR NAK; NAKs for sequence, invalid request, access, operation.
        let syndromes = [0x00, 0x1f, 0x20, 0x2e, 0x60, 0x61, 0x62, 0x63];
        let syndrome = syndromes[self.chance.below(8) as usize];
        let ext = ExtHeaders {
            aeth: Some(Aeth::new(
                AethSyndrome::from_wire(syndrome),
                Msn::new(place.psn & 0xff_ffff),
            )),
            ..ExtHeaders::default()
        };
        let bth = place.bth(Opcode::RcAcknowledge);
        self.send(place.from, place.to, &bth, &ext, &[]);
    }

    /// A WRITE, or a READ, of memory whose key is a guess, or right but for one bit; or a message
    /// of nonsense where another number is wrong. A message with the right numbers would be carried
    /// out: RoCE cannot distinguish it from one of the peer.
    fn access(&mut self) {
        let place = match self.reach {
            Reach::OnPath => self.next_access(),
            _ => Some(self.place()),
        };
        let Some(place) = place else { return };
        let may_send = self.reach != Reach::OnPath;
        let opcode = match self.chance.below(if may_send { 4 } else { 3 }) {
            0 => Opcode::RcWriteOnly,
            1 | 2 => Opcode::RcReadRequest,
            _ => Opcode::RcSendOnly,
        };
        let payload: &[u8] = match opcode {
            Opcode::RcReadRequest => &[],
            _ => &[0xbd; 64],
        };
        let bits = [8, 32][self.chance.below(2) as usize];
        let mut reth = None;
        if opcode != Opcode::RcSendOnly {
            // Memory that is at the same place as that of the packet that this one follows.
            let (va, key) = match place.reth {
                Some((va, key)) => (va, key ^ 1 << self.chance.below(bits)),
                None => (
                    self.chance.below(1 << 47),
                    self.chance.below(1 << 32) as u32,
                ),
            };
            let len = match opcode {
                Opcode::RcReadRequest => READ_LEN,
                _ => payload.len(),
            };
            reth = Some(Reth::new(va, key, len as u32));
        }
        let ext = ExtHeaders {
            reth,
            ..ExtHeaders::default()
        };
        self.send(place.from, place.to, &place.bth(opcode), &ext, payload);
    }

    /// A packet that was seen, once more.
    fn replay(&mut self) {
        let known = self.seen.iter().filter(|s| s.is_whole).count();
        if known == 0 {
            return;
        }
        let which = self.chance.below(known as u64) as usize;
        let seen = self.seen.iter().filter(|s| s.is_whole).nth(which).unwrap();
        let packet = datagram(seen.from, seen.to, &seen.body);
        let _ = self.raw.send_to(&packet, &seen.to.into());
    }

    fn send(
        &mut self,
        from: SocketAddr,
        to: SocketAddr,
        bth: &Bth,
        ext: &ExtHeaders,
        payload: &[u8],
    ) {
        let mut body = emit_headers(bth, ext).to_vec();
        body.extend_from_slice(payload);
        let flow = IcrcFlow::new(from, to).expect("two addresses of IPv4");
        let icrc = flow.compute(&body, IP_ID).to_le_bytes();
        body.extend_from_slice(&icrc);
        let _ = self.raw.send_to(&datagram(from, to, &body), &to.into());
    }
}

/// Where a packet seems to come from and goes, and the memory of the one that it follows.
struct Place {
    from: SocketAddr,
    to: SocketAddr,
    qpn: u32,
    psn: u32,
    reth: Option<(u64, u32)>,
}

impl Place {
    fn bth(&self, opcode: Opcode) -> Bth {
        let psn = Psn::new(self.psn & 0xff_ffff);
        Bth::new(opcode, Qpn::new(self.qpn), psn)
    }
}

/// The kernel chooses one where it is zero.
const IP_ID: u16 = 1;

pub(crate) fn roce(host: Ipv4Addr) -> SocketAddr {
    SocketAddr::new(host.into(), ROCE_PORT)
}

fn ipv4(address: SocketAddr) -> Ipv4Addr {
    match address.ip() {
        IpAddr::V4(ip) => ip,
        IpAddr::V6(_) => unreachable!("the world has IPv4"),
    }
}

/// IPv4 and UDP headers before `body`; the kernel makes the header's checksum, and UDP's is not
/// used.
fn datagram(from: SocketAddr, to: SocketAddr, body: &[u8]) -> Vec<u8> {
    let len = 28 + body.len() as u16;
    let mut packet = vec![0x45, 0];
    packet.extend(len.to_be_bytes());
    packet.extend(IP_ID.to_be_bytes());
    packet.extend([0x40, 0, 64, UDP, 0, 0]);
    packet.extend(ipv4(from).octets());
    packet.extend(ipv4(to).octets());
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend((len - 20).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(body);
    packet
}

/// Says in an ARP answer to all that an address is the stranger's. Call it in its namespace.
pub(crate) fn claim(host: Ipv4Addr) {
    let mac = own_mac();
    let mac = mac.split(':').map(|byte| u8::from_str_radix(byte, 16));
    let mac: Vec<u8> = mac.collect::<Result<_, _>>().unwrap();
    let mut frame = vec![0xff; 6];
    frame.extend(&mac);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    frame.extend(&mac);
    frame.extend(host.octets());
    frame.extend([0xff; 6]);
    frame.extend(host.octets());
    let socket = Socket::new(Domain::PACKET, Type::RAW, None).unwrap();
    let name = std::ffi::CString::new("eth0").unwrap();
    // SAFETY: a string that ends with zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let mut to = link_address();
    to.sll_ifindex = index.cast_signed();
    // SAFETY: an open socket, and an address and bytes that outlive the call.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            size_of_val(&to) as libc::socklen_t,
        )
    };
    assert_eq!(
        sent,
        frame.len() as isize,
        "{}",
        std::io::Error::last_os_error()
    );
}

/// The link-layer address of the calling thread's namespace, as text. In `/sys` is that of the
/// namespace in which it was mounted.
pub(crate) fn own_mac() -> String {
    let out = Command::new("ip")
        .args(["-o", "link", "show", "dev", "eth0"])
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let after = text.split_once("link/ether ").expect("an Ethernet");
    after.1[..17].to_owned()
}

/// A link-layer address of no interface.
fn link_address() -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: 0x0806_u16.to_be(),
        sll_ifindex: 0,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0xff; 8],
    }
}

/// What the target has done with a host.
#[derive(Default)]
pub(crate) struct Reached {
    /// Addresses and keys of the host's memory.
    pub(crate) places: Vec<(u64, u32)>,
    /// The sender, queue pair and PSN of its last request.
    pub(crate) last: Option<(SocketAddr, u32, u32)>,
    /// PSN of the host's last acknowledgement.
    pub(crate) acknowledged: Option<u32>,
}

/// Sees what passes the switch.
pub(crate) struct Sniffer {
    socket: Socket,
    frame: Vec<u8>,
}

impl Sniffer {
    /// Call it in the switch's namespace.
    pub(crate) fn new() -> Self {
        let every_protocol = Protocol::from(i32::from(3u16.to_be()));
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(every_protocol)).unwrap();
        socket.set_nonblocking(true).unwrap();
        // The load fills an ordinary buffer within milliseconds.
        let room: libc::c_int = 256 << 20;
        // SAFETY: an open socket, and an integer that outlives the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                (&raw const room).cast(),
                size_of_val(&room) as libc::socklen_t,
            )
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        Self {
            socket,
            frame: vec![0; 1 << 16],
        }
    }

    /// The next packet of RoCE between the target and honest hosts.
    fn next(&mut self) -> Option<Seen> {
        while let Ok(len) = self.socket.read(&mut self.frame) {
            let frame = &self.frame[..len];
            let is_roce = len > HEADERS + 16
                && frame[12..15] == [8, 0, 0x45]
                && frame[23] == UDP
                && frame[36..38] == ROCE_PORT.to_be_bytes();
            if !is_roce {
                continue;
            }
            let ip = |at: usize| {
                let octets: [u8; 4] = frame[at..at + 4].try_into().unwrap();
                IpAddr::from(octets)
            };
            let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
            let seen = Seen {
                from: SocketAddr::new(ip(26), port(34)),
                to: SocketAddr::new(ip(30), port(36)),
                body: frame[HEADERS..].to_vec(),
                // Trains of packets that the kernel keeps as one are not repeated.
                is_whole: len <= 1514,
            };
            return Some(seen);
        }
        None
    }

    /// Forgets what has passed.
    pub(crate) fn skip(&mut self) {
        while self.next().is_some() {}
    }

    /// The sender, queue pair and PSN of the last SEND from a host to another one.
    pub(crate) fn last_request(
        &mut self,
        from: Ipv4Addr,
        to: Ipv4Addr,
    ) -> Option<(SocketAddr, u32, u32)> {
        let mut last = None;
        while let Some(seen) = self.next() {
            let is_send = matches!(seen.body[0], 0..=5 | 0x16 | 0x17);
            if is_send && ipv4(seen.from) == from && ipv4(seen.to) == to {
                last = Some((seen.from, seen.qpn(), seen.psn()));
            }
        }
        last
    }

    /// Follows what the target does with a host.
    pub(crate) fn follow(&mut self, host: Ipv4Addr, reached: &mut Reached) {
        while let Some(seen) = self.next() {
            let ends = (ipv4(seen.from), ipv4(seen.to));
            if ends == (TARGET, host) && seen.is_request() {
                reached.places.extend(seen.reth());
                reached.last = Some((seen.from, seen.qpn(), seen.psn()));
            } else if ends == (host, TARGET) && seen.body[0] == 0x11 {
                reached.acknowledged = Some(seen.psn());
            }
        }
    }

    /// Addresses and keys of a host's memory that has been reached.
    pub(crate) fn memory_at(&mut self, host: Ipv4Addr) -> Vec<(u64, u32)> {
        let mut places = Vec::new();
        while let Some(seen) = self.next() {
            if ipv4(seen.to) == host {
                places.extend(seen.reth());
            }
        }
        places.dedup();
        places.truncate(2);
        places
    }

    /// Whole packets of a host that have passed, but for messages of the connection manager.
    pub(crate) fn bodies_from(&mut self, host: Ipv4Addr) -> Vec<Vec<u8>> {
        let mut bodies = Vec::new();
        while let Some(seen) = self.next() {
            if ipv4(seen.from) == host && seen.is_whole && !seen.is_cm() {
                bodies.push(seen.body);
            }
        }
        bodies
    }

    /// The logins that have passed.
    pub(crate) fn logins(&mut self) -> Vec<Login> {
        let mut logins: Vec<Login> = Vec::new();
        let mut requests = Vec::new();
        while let Some(seen) = self.next() {
            if !seen.is_cm() {
                continue;
            }
            let mad = seen.body[MAD..MAD + 256].to_vec();
            match mad[17] {
                0x10 => requests.push((ipv4(seen.from), mad)),
                // Frames pass the switch's ports one after another, and are seen each time.
                0x13 if logins.iter().all(|l| l.rep[24..32] != mad[24..32]) => {
                    let to = ipv4(seen.to);
                    let req = requests
                        .iter()
                        .find(|(host, req)| *host == to && req[24..28] == mad[28..32]);
                    logins.extend(req.map(|(host, req)| Login {
                        host: *host,
                        req: req.clone(),
                        rep: mad.clone(),
                    }));
                }
                _ => {}
            }
        }
        logins
    }
}
