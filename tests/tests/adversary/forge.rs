//! Sends forged packets, based on values that an attacker could guess or has seen.

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
/// Size of the Ethernet, IPv4 and UDP headers of a captured frame.
const ETHERNET: usize = 14;
const HEADERS: usize = ETHERNET + 20 + 8;
/// Offset of a MAD in a datagram, after the BTH and DETH.
const MAD: usize = 12 + 8;
/// Size of the attacker's READ requests. This size is never used by honest hosts or the target.
const READ_LEN: usize = 61;

/// Type of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trick {
    /// Fragmentation needed and destination unreachable.
    Icmp,
    /// REQ messages sent on behalf of other hosts, using all login types.
    Requests,
    /// REJ, DREQ, RTU, SIDR_REQ and other messages for connections, using guessed or known IDs.
    ConnectionManagement,
    /// ACKs and NAKs.
    Acknowledgements,
    /// SENDs, WRITEs and READs with guessed keys, and replayed packets.
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

/// The attacker's knowledge, and the packets it can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It knows addresses, ports and formats.
    OffPath,
    /// It can see every packet, but each packet it sends has a single incorrect value: an address
    /// it doesn't own, a connection ID, a queue pair, or a sequence number that is out of range.
    OneNumberOff,
    /// It can see every packet and send any packet, except for commands on behalf of another host.
    OnPath,
}

impl Reach {
    pub(crate) const ALL: [Self; 3] = [Self::OffPath, Self::OneNumberOff, Self::OnPath];
}

/// MADs used by a host to connect: the REQ and the REP it received.
#[derive(Clone)]
pub(crate) struct Login {
    host: Ipv4Addr,
    pub(crate) req: Vec<u8>,
    rep: Vec<u8>,
}

/// One side of a connection, as identified in connection manager messages.
struct End {
    host: Ipv4Addr,
    id: [u8; 4],
    qpn: [u8; 3],
}

impl Login {
    /// Returns the host and the target in random order.
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

/// A captured packet.
struct Seen {
    from: SocketAddr,
    to: SocketAddr,
    /// Data after the UDP header.
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

    /// Returns the remote address and key of a WRITE or READ request.
    fn reth(&self) -> Option<(u64, u32)> {
        let has_one = matches!(self.body[0], 0x06 | 0x0a | 0x0b | 0x0c) && self.body.len() >= 28;
        has_one.then(|| {
            let va = u64::from_be_bytes(self.body[12..20].try_into().unwrap());
            let key = u32::from_be_bytes(self.body[20..24].try_into().unwrap());
            (va, key)
        })
    }

    /// Returns true if this is a full READ response with [`READ_LEN`] bytes.
    fn responds_to_stranger(&self) -> bool {
        let padded = READ_LEN.next_multiple_of(4);
        let pad = usize::from(self.body[1] >> 4 & 3);
        // Includes the BTH, AETH and ICRC in addition to the data.
        self.body[0] == 0x10 && self.body.len() == 12 + 4 + padded + 4 && pad == padded - READ_LEN
    }

    /// Returns true for a SEND, WRITE or READ request, with or without immediate data.
    fn is_request(&self) -> bool {
        matches!(self.body[0], 0..=0x0c | 0x16 | 0x17) && !self.is_cm()
    }

    fn psn(&self) -> u32 {
        u32::from_be_bytes([0, self.body[9], self.body[10], self.body[11]])
    }
}

/// Creates and sends forged packets.
pub(crate) struct Forger {
    reach: Reach,
    raw: Socket,
    icmp: Socket,
    chance: Chance,
    /// Last captured packets, limited to [`Self::KEPT`].
    seen: VecDeque<Seen>,
    /// REQs created for a login that anyone could try.
    requests: Vec<Vec<u8>>,
    /// Logins of the hosts that are currently active.
    logins: Vec<Login>,
    pub(crate) sent: u64,
    /// Number of our READ requests for which the response contained data.
    pub(crate) responses: u64,
}

impl Forger {
    const KEPT: usize = 512;
    /// Number of these packets with values that are still in use.
    const RECENT: usize = 32;

    /// Must be called in the attacker's namespace.
    pub(crate) fn new(seed: u64, reach: Reach, requests: Vec<Vec<u8>>, logins: Vec<Login>) -> Self {
        let raw = |protocol| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        Self {
            reach,
            // IPPROTO_RAW: we create the headers, including the source address.
            raw: raw(255).unwrap(),
            icmp: raw(i32::from(ICMP)).unwrap(),
            chance: Chance::new(seed, 0xadd),
            seen: VecDeque::new(),
            requests,
            logins,
            sent: 0,
            responses: 0,
        }
    }

    /// Creates a forger without any knowledge, for packets that are built by the caller. Must be
    /// called in the attacker's namespace.
    pub(crate) fn from_here() -> Self {
        Self::new(1, Reach::OffPath, Vec::new(), Vec::new())
    }

    /// Adds the logins of active hosts.
    pub(crate) fn know(&mut self, logins: Vec<Login>) {
        self.logins = logins;
    }

    /// Sends a message to queue pair 1 using the attacker's own address.
    pub(crate) fn send_own_mad(&mut self, mad: &[u8]) {
        self.send_mad(STRANGER, TARGET, mad);
    }

    /// Sends a packet using the attacker's own address. `body` contains all data after the UDP
    /// header, and its last bytes are reserved for the ICRC.
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
        // This is the maximum that fits in an Ethernet frame.
        body.truncate(1400);
        // If the packet is too short for a BTH, it has no ICRC.
        if is_sealed && body.len() >= 16 {
            body.truncate(body.len() - 4);
            let flow = IcrcFlow::new(from, to).expect("two addresses of IPv4");
            let icrc = flow.compute(&body, IP_ID).to_le_bytes();
            body.extend_from_slice(&icrc);
        }
        let _ = self.raw.send_to(&datagram(from, to, &body), &to.into());
    }

    /// Processes all packets captured by the sniffer since the last call.
    pub(crate) fn learn(&mut self, sniffer: &mut Sniffer) {
        while let Some(seen) = sniffer.next() {
            self.responses += u64::from(seen.responds_to_stranger());
            if self.seen.len() == Self::KEPT {
                self.seen.pop_front();
            }
            self.seen.push_back(seen);
        }
    }

    /// Returns the addresses of the target and an honest host in random order.
    fn ends(&mut self) -> (Ipv4Addr, Ipv4Addr) {
        let host = [HONEST, SECOND][self.chance.below(2) as usize];
        match self.chance.below(2) {
            0 => (host, TARGET),
            _ => (TARGET, host),
        }
    }

    /// Sends a forged packet.
    pub(crate) fn play(&mut self, trick: Trick) {
        match (trick, self.reach) {
            (Trick::Icmp, _) => self.send_icmp(),
            // This should be rare: the host rejects each REP for such a REQ, so that the target
            // would immediately accept the next one.
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

    /// Returns an address that doesn't belong to `host`.
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
        // Fragmentation needed with a random MTU; net, host, protocol and port unreachable.
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

    /// Sends the REQ of a normal login, but with the address, IDs and queue pair of another host.
    fn send_request(&mut self) {
        let template = self.chance.below(self.requests.len() as u64) as usize;
        let mut mad = self.requests[template].clone();
        let host = match self.chance.below(3) {
            0 => HONEST,
            1 => Ipv4Addr::new(10, 11, 0, 100 + self.chance.below(100) as u8),
            _ => STRANGER,
        };
        // Transaction ID, and the requester's ID, queue pair and first PSN. The addresses are also
        // part of the path and the RDMA CM header.
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

    /// Sends the REQ of an active host with its queue pair, as if this host had lost its
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

    /// Sends a message for a connection of an active host with a single incorrect value. Returns
    /// the destination.
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
            // The rejection reason, and the rejected message, which is either the REP or any
            // message.
            0x12 => mad[32..36].copy_from_slice(&[(random & 0xc0) as u8, 0, 0, 28]),
            _ => {}
        }
        self.send_mad(from.host, to.host, &mad);
        to.host
    }

    /// Sends a message for a connection.
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
        // Small IDs are a good guess.
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

    /// Returns one of the last captured packets, to be used as the predecessor of a forged packet.
    fn recent(&mut self) -> Option<&Seen> {
        let recent = self.seen.iter().rev().filter(|s| !s.is_cm());
        let known = recent.take(Self::RECENT).count() as u64;
        let which = self.chance.below(known.max(1)) as usize;
        self.seen.iter().rev().filter(|s| !s.is_cm()).nth(which)
    }

    /// Chooses the addresses and sequence number for a packet.
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
            // Half of the guesses are small numbers.
            qpn: if qpn.is_multiple_of(2) {
                qpn
            } else {
                qpn & 0xfff
            },
            psn: self.chance.below(1 << 24) as u32,
            reth: None,
        }
    }

    /// Returns the next packet for a queue pair if its peer accesses remote memory, if known.
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

    /// Changes one of the values so that it's incorrect.
    fn spoil(&mut self, place: &mut Place) {
        match self.chance.below(4) {
            0 => place.from.set_ip(self.other_host(ipv4(place.from)).into()),
            1 => place.qpn ^= 1 << self.chance.below(24),
            // Much larger than any window, in both directions.
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
        // ACK; RNR NAK; NAKs for sequence, invalid request, access and operation.
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

    /// Sends a WRITE or READ with a key that is guessed or has a single incorrect bit. If another
    /// value is incorrect, sends a message with random data instead. We must not send a message
    /// with all correct values: it would be executed, because RoCE can't detect that it's not from
    /// the peer.
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
            // Use the same address as in the previous packet.
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

    /// Sends a captured packet again.
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

/// Source and destination of a packet, and the memory used in its predecessor.
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

/// If this is zero, the kernel would choose a value.
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

/// Adds IPv4 and UDP headers to `body`. The kernel calculates the IP header checksum, and the UDP
/// checksum is not used.
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

/// Broadcasts an ARP reply that claims an address for the attacker. Must be called in its
/// namespace.
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
    // SAFETY: the string is terminated with a null byte.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let mut to = link_address();
    to.sll_ifindex = index.cast_signed();
    // SAFETY: the socket is open, and the address and data are valid during the call.
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

/// Returns the link-layer address in the namespace of the current thread as text. We can't use
/// `/sys`, because this shows the namespace in which it was mounted.
pub(crate) fn own_mac() -> String {
    let out = Command::new("ip")
        .args(["-o", "link", "show", "dev", "eth0"])
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let after = text.split_once("link/ether ").expect("an Ethernet");
    after.1[..17].to_owned()
}

/// Returns a link-layer address without an interface.
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

/// The target's accesses to a host.
#[derive(Default)]
pub(crate) struct Reached {
    /// Addresses and keys of the host's memory.
    pub(crate) places: Vec<(u64, u32)>,
    /// Source, queue pair and PSN of the last request.
    pub(crate) last: Option<(SocketAddr, u32, u32)>,
    /// PSN of the host's last acknowledgement.
    pub(crate) acknowledged: Option<u32>,
}

/// Captures all packets on the switch.
pub(crate) struct Sniffer {
    socket: Socket,
    frame: Vec<u8>,
}

impl Sniffer {
    /// Must be called in the switch namespace.
    pub(crate) fn new() -> Self {
        let every_protocol = Protocol::from(i32::from(3u16.to_be()));
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(every_protocol)).unwrap();
        socket.set_nonblocking(true).unwrap();
        // The load would fill a normal buffer within milliseconds.
        let room: libc::c_int = 256 << 20;
        // SAFETY: the socket is open, and the integer is valid during the call.
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

    /// Returns the next RoCE packet between the target and honest hosts.
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
                // Don't replay packet trains that the kernel handles as a single packet.
                is_whole: len <= 1514,
            };
            return Some(seen);
        }
        None
    }

    /// Discards all packets captured so far.
    pub(crate) fn skip(&mut self) {
        while self.next().is_some() {}
    }

    /// Returns the source, queue pair and PSN of the last SEND from one host to another.
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

    /// Updates the target's accesses to a host.
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

    /// Returns the addresses and keys of a host's memory that was accessed.
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

    /// Returns all full packets sent by a host, except for connection manager messages.
    pub(crate) fn bodies_from(&mut self, host: Ipv4Addr) -> Vec<Vec<u8>> {
        let mut bodies = Vec::new();
        while let Some(seen) = self.next() {
            if ipv4(seen.from) == host && seen.is_whole && !seen.is_cm() {
                bodies.push(seen.body);
            }
        }
        bodies
    }

    /// Returns all logins that were captured.
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
                // Each frame passes several switch ports and is captured on each of them.
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
