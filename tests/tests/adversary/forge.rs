//! Packets that pretend, from what a stranger can guess or has seen.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd as _;

use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, Deth, ExtHeaders, IcrcFlow, Msn, Opcode, Psn, Qpn, ROCE_PORT, Reth,
    emit_headers,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::load::Chance;
use super::net::{HONEST, LATER, SECOND, STRANGER, TARGET};

const UDP: u8 = 17;
const ICMP: u8 = 1;
/// Ethernet, IPv4 and UDP headers of a frame that was seen.
const ETHERNET: usize = 14;
const HEADERS: usize = ETHERNET + 20 + 8;
/// Where a MAD begins in a datagram: behind BTH and DETH.
const MAD: usize = 12 + 8;

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

    fn psn(&self) -> u32 {
        u32::from_be_bytes([0, self.body[9], self.body[10], self.body[11]])
    }
}

/// Forges packets. Off path it knows addresses, ports and formats; on path it sees every packet.
pub(crate) struct Forger {
    raw: Socket,
    icmp: Socket,
    chance: Chance,
    /// The latest packets, at most [`Self::KEPT`].
    seen: Vec<Seen>,
    /// REQs of its own making: those of a login that anybody could try.
    requests: Vec<Vec<u8>>,
    pub(crate) sent: u64,
}

impl Forger {
    const KEPT: usize = 512;

    /// Call it in the stranger's namespace.
    pub(crate) fn new(seed: u64, requests: Vec<Vec<u8>>) -> Self {
        let raw = |protocol| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        Self {
            // IPPROTO_RAW: headers are ours, source addresses too.
            raw: raw(255).unwrap(),
            icmp: raw(i32::from(ICMP)).unwrap(),
            chance: Chance::new(seed, 0xadd),
            seen: Vec::new(),
            requests,
            sent: 0,
        }
    }

    /// What the sniffer has seen since.
    pub(crate) fn learn(&mut self, sniffer: &mut Sniffer) {
        while let Some(seen) = sniffer.next() {
            if self.seen.len() < Self::KEPT {
                self.seen.push(seen);
            } else {
                let at = self.chance.below(Self::KEPT as u64) as usize;
                self.seen[at] = seen;
            }
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
    pub(crate) fn play(&mut self, trick: Trick, on_path: bool) {
        match trick {
            Trick::Icmp => self.send_icmp(),
            Trick::Requests => self.send_request(),
            Trick::ConnectionManagement => self.manage(on_path),
            Trick::Acknowledgements => self.acknowledge(on_path),
            Trick::Memory if on_path && self.chance.below(2) == 0 => self.replay(),
            Trick::Memory => self.access(on_path),
        }
        self.sent += 1;
    }

    fn send_icmp(&mut self) {
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

    /// A REQ as anybody's login has it, with another's address, ids and queue pair.
    fn send_request(&mut self) {
        let template = self.chance.below(self.requests.len() as u64) as usize;
        let mut mad = self.requests[template].clone();
        let host = match self.chance.below(3) {
            0 => HONEST,
            1 => Ipv4Addr::new(10, 11, 0, 100 + self.chance.below(100) as u8),
            _ => STRANGER,
        };
        // The transaction, the requester's id, queue pair and first PSN; the addresses stand in the path
        // and in the RDMA CM's header too.
        for range in [8..16, 24..28, 56..59, 72..75] {
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

    /// A message about a connection.
    fn manage(&mut self, on_path: bool) {
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
        if on_path && known > 0 {
            let which = self.chance.below(known as u64) as usize;
            let seen = self.seen.iter().filter(|s| s.is_cm()).nth(which).unwrap();
            (from, to) = (ipv4(seen.from), ipv4(seen.to));
            mad[24..36].copy_from_slice(&seen.body[MAD + 24..MAD + 36]);
        }
        self.send_mad(from, to, &mad);
    }

    fn send_mad(&mut self, from: Ipv4Addr, to: Ipv4Addr, mad: &[u8]) {
        const QKEY: u32 = 0x8001_0000;
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::new(1), Psn::new(0));
        let ext = ExtHeaders {
            deth: Some(Deth::new(QKEY, Qpn::new(1))),
            ..ExtHeaders::default()
        };
        self.send(roce(from), roce(to), &bth, &ext, mad);
    }

    /// A queue pair, and a sequence number at or near one that was seen.
    fn place(&mut self, on_path: bool) -> (SocketAddr, SocketAddr, Qpn, Psn) {
        let known = self.seen.iter().filter(|s| !s.is_cm()).count();
        if on_path && known > 0 {
            let which = self.chance.below(known as u64) as usize;
            let seen = self.seen.iter().filter(|s| !s.is_cm()).nth(which).unwrap();
            let near = self.chance.below(5) as u32;
            let psn = seen.psn().wrapping_add(near).wrapping_sub(2);
            return (
                seen.from,
                seen.to,
                Qpn::new(seen.qpn()),
                Psn::new(psn & 0xff_ffff),
            );
        }
        let (from, to) = self.ends();
        let qpn = self.chance.below(1 << 24) as u32;
        // Half of the guesses are of low numbers.
        let qpn = if qpn.is_multiple_of(2) {
            qpn
        } else {
            qpn & 0xfff
        };
        let psn = self.chance.below(1 << 24) as u32;
        (roce(from), roce(to), Qpn::new(qpn), Psn::new(psn))
    }

    fn acknowledge(&mut self, on_path: bool) {
        let (from, to, qpn, psn) = self.place(on_path);
        // ACK; RNR NAK; NAKs for sequence, invalid request, access, operation.
        let syndromes = [0x00, 0x1f, 0x20, 0x2e, 0x60, 0x61, 0x62, 0x63];
        let syndrome = syndromes[self.chance.below(8) as usize];
        let ext = ExtHeaders {
            aeth: Some(Aeth::new(
                AethSyndrome::from_wire(syndrome),
                Msn::new(psn.value()),
            )),
            ..ExtHeaders::default()
        };
        let bth = Bth::new(Opcode::RcAcknowledge, qpn, psn);
        self.send(from, to, &bth, &ext, &[]);
    }

    /// A WRITE, or a READ, of memory whose key is a guess; or a message of nonsense where even the queue
    /// pair is one. A message with the right number would be carried out: nothing in RoCE tells it from
    /// one of the peer.
    fn access(&mut self, on_path: bool) {
        let (from, to, qpn, psn) = self.place(on_path);
        let mut reth = None;
        let opcode = match self.chance.below(if on_path { 2 } else { 3 }) {
            0 => Opcode::RcWriteOnly,
            1 => Opcode::RcReadRequest,
            _ => Opcode::RcSendOnly,
        };
        let payload: &[u8] = match opcode {
            Opcode::RcReadRequest => &[],
            _ => &[0xbd; 64],
        };
        if opcode != Opcode::RcSendOnly {
            let va = self.chance.below(1 << 47);
            let rkey = self.chance.below(1 << 32) as u32;
            reth = Some(Reth::new(va, rkey, 64));
        }
        let ext = ExtHeaders {
            reth,
            ..ExtHeaders::default()
        };
        self.send(from, to, &Bth::new(opcode, qpn, psn), &ext, payload);
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

/// The kernel chooses one where it is zero.
const IP_ID: u16 = 1;

fn roce(host: Ipv4Addr) -> SocketAddr {
    SocketAddr::new(host.into(), ROCE_PORT)
}

fn ipv4(address: SocketAddr) -> Ipv4Addr {
    match address.ip() {
        IpAddr::V4(ip) => ip,
        IpAddr::V6(_) => unreachable!("the world has IPv4"),
    }
}

/// IPv4 and UDP headers before `body`; the kernel makes the header's checksum, and UDP's is not used.
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

    /// The REQs that have passed, as MADs.
    pub(crate) fn requests(&mut self) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while let Some(seen) = self.next() {
            if seen.is_cm() && seen.body[MAD + 17] == 0x10 {
                found.push(seen.body[MAD..MAD + 256].to_vec());
            }
        }
        found
    }
}
