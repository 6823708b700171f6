//! Messages that are almost right, of every protocol, to a daemon that has other work: valid ones
//! with fields at their boundaries, cut off, made longer, twice, or in the wrong state. They come
//! from a host that may log in, to a target of its own.
//!
//! `RISER_HOSTILE_MESSAGES` sets how many of each protocol (default 2 000).

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_tests::load::Chance;
use riser_tests::seeds;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, CmEventKind, CmId, ConnParam, CqId, Mr, PortSpace, Provider as _, QpCap, QpId,
    QpInitAttr, QpType, RdmaCm as _, RecvWr, SendOp, SendWr, Sge, Verbs as _, WcStatus, WrId,
};

use super::forge::{Forger, Sniffer};
use super::net::{STRANGER, TARGET};

/// The target that the stranger may log in to.
pub(crate) const OTHER: &str = "iqn.2026-01.com.example:other";
/// Port of its SRP portal.
pub(crate) const OTHER_SRP: u16 = 6555;

/// Time for an answer that decides what is sent next.
const ANSWER: Duration = Duration::from_secs(2);
/// Messages on a connection at most, so that logins have their turn.
const PER_CONNECTION: u64 = 16;

/// A protocol that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Srp,
    Iscsi,
    Iser,
    ConnectionManagement,
    Roce,
}

impl Wire {
    pub(crate) const ALL: [Self; 5] = [
        Self::Srp,
        Self::Iscsi,
        Self::Iser,
        Self::ConnectionManagement,
        Self::Roce,
    ];
}

/// Valid messages, and what is done to them.
struct Mutator {
    valid: Vec<Vec<u8>>,
    chance: Chance,
}

impl Mutator {
    fn new(valid: impl IntoIterator<Item = Vec<u8>>, seed: u64, wire: Wire) -> Self {
        let mutator = Self {
            valid: valid.into_iter().filter(|m| !m.is_empty()).collect(),
            chance: Chance::new(seed, wire as u64),
        };
        assert!(!mutator.valid.is_empty(), "{wire:?} has valid messages");
        mutator
    }

    fn of(seeds: &str, seed: u64, wire: Wire) -> Self {
        Self::new(seeds::corpus(seeds).into_iter().map(|(_, m)| m), seed, wire)
    }

    fn valid(&mut self) -> Vec<u8> {
        let at = self.chance.below(self.valid.len() as u64) as usize;
        self.valid[at].clone()
    }

    /// The next message.
    fn next(&mut self) -> Vec<u8> {
        let mut message = self.valid();
        for _ in 0..self.chance.below(4) {
            self.change(&mut message);
        }
        message
    }

    fn change(&mut self, message: &mut Vec<u8>) {
        if message.is_empty() {
            return;
        }
        let at = self.chance.below(message.len() as u64) as usize;
        match self.chance.below(12) {
            // A number of some width at its boundaries, or at those of what was sent.
            0..6 => {
                let width = 1 << self.chance.below(4);
                let at = at - at % width;
                let len = message.len() as u64;
                let ones = u64::MAX >> (64 - 8 * width);
                let values = [
                    0,
                    1,
                    ones,
                    ones - 1,
                    ones >> 1,
                    (ones >> 1) + 1,
                    len,
                    len + 1,
                    len - 1,
                ];
                let value = values[self.chance.below(9) as usize].to_be_bytes();
                if let Some(field) = message.get_mut(at..at + width) {
                    field.copy_from_slice(&value[8 - width..]);
                }
            }
            6 | 7 => message[at] ^= 1 << self.chance.below(8),
            8 => message.truncate(at),
            9 => message.extend(std::iter::repeat_n(0xa5, 1 + at % 300)),
            // The head of this one, and the tail of another.
            10 => {
                let other = self.valid();
                message.truncate(at);
                message.extend(other.into_iter().skip(at));
            }
            _ => message[0] = self.chance.below(256) as u8,
        }
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.chance.below(n) == 0
    }
}

/// What was sent, and how the target ended it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) messages: u64,
    /// Of these, those that the target's queue pairs have acknowledged: what follows the message
    /// that ends a connection is not.
    pub(crate) acknowledged: u64,
    pub(crate) connections: u64,
    /// Connections that the target has ended, or did not take.
    pub(crate) ended: u64,
}

/// Sends `count` messages. To be called in the stranger's namespace; the sniffer sees its network.
pub(crate) fn attack(
    wire: Wire,
    count: u64,
    seed: u64,
    requests: &[Vec<u8>],
    sniffer: Sniffer,
) -> Tally {
    match wire {
        Wire::Srp => over_rdma(
            Mutator::of("from_initiator", seed, wire),
            wire,
            count,
            requests,
        ),
        Wire::Iser => over_rdma(Mutator::of("message", seed, wire), wire, count, requests),
        Wire::Iscsi => over_tcp(Mutator::of("stream", seed, wire), count),
        Wire::ConnectionManagement => datagrams(seed, count, requests),
        Wire::Roce => packets(seed, count, requests, sniffer),
    }
}

/// A Login Request that leads to full-feature phase at once.
fn login(more: &str) -> ([u8; 48], Vec<u8>) {
    let mut bhs = [0; 48];
    (bhs[0], bhs[1]) = (0x43, 0x87);
    bhs[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 6]);
    let text = format!(
        "InitiatorName=iqn.2026-01.com.example:stranger\0SessionType=Normal\0TargetName={OTHER}\0\
         InitialR2T=No\0{more}"
    );
    let len = (text.len() as u32).to_be_bytes();
    bhs[5..8].copy_from_slice(&len[1..]);
    let mut data = text.into_bytes();
    data.resize(data.len().next_multiple_of(4), 0);
    (bhs, data)
}

fn over_tcp(mut mutator: Mutator, count: u64) -> Tally {
    let mut tally = Tally::default();
    while tally.messages < count {
        let mut socket = TcpStream::connect((TARGET, 3260)).expect("the portal listens");
        tally.connections += 1;
        socket.set_read_timeout(Some(ANSWER)).unwrap();
        socket.set_write_timeout(Some(ANSWER)).unwrap();
        let mut is_open = true;
        // Some of what is sent comes before the login, or in the middle of it.
        if !mutator.one_in(4) {
            let (bhs, data) = login("");
            is_open = socket.write_all(&[&bhs[..], &data].concat()).is_ok();
            let mut answer = [0; 48];
            is_open &= socket.read_exact(&mut answer).is_ok();
        }
        socket.set_nonblocking(true).unwrap();
        let mut sink = vec![0; 1 << 16];
        for _ in 0..PER_CONNECTION {
            if !is_open || tally.messages >= count {
                break;
            }
            let mut message = mutator.next();
            // Where the numbers of a command fit, more of it is looked at.
            if let Some(numbers) = message.get_mut(24..28)
                && mutator.chance.below(2) == 0
            {
                numbers.copy_from_slice(&[0, 0, 0, 1 + mutator.chance.below(8) as u8]);
            }
            let repeats = 1 + u64::from(mutator.one_in(8));
            for _ in 0..repeats {
                is_open &= send_all(&mut socket, &message, &mut sink);
                tally.messages += 1;
            }
            is_open &= drain(&mut socket, &mut sink);
        }
        tally.ended += u64::from(!is_open);
    }
    tally
}

/// Takes what has come; false at the end of the stream.
fn drain(socket: &mut TcpStream, sink: &mut [u8]) -> bool {
    loop {
        match socket.read(sink) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// Sends to a peer that may wait for what it sends to be taken; false if the stream has ended.
fn send_all(socket: &mut TcpStream, mut message: &[u8], sink: &mut [u8]) -> bool {
    let until = Instant::now() + ANSWER;
    while !message.is_empty() {
        match socket.write(message) {
            Ok(sent) => message = &message[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !drain(socket, sink) || Instant::now() > until {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(_) => return false,
        }
    }
    true
}

/// An initiator's device, with memory for its messages.
pub(crate) struct Host {
    dev: Roce,
    pd: riser_transport::verbs::PdId,
    memory: MemSlice,
    mr: Mr,
    sent: usize,
}

struct Connection {
    cm: CmId,
    qp: QpId,
    cq: CqId,
    is_open: bool,
    acknowledged: u64,
}

const SLOT: usize = 16 << 10;
const SLOTS: usize = 64;
const RECEIVES: usize = 64;

impl Host {
    /// Call it in the stranger's namespace.
    pub(crate) fn new() -> Self {
        let mut dev = Roce::open(&RoceConfig::new(IpAddr::V4(STRANGER))).unwrap();
        let pd = dev.alloc_pd().unwrap();
        let memory = Memory::new(SLOT * (SLOTS + RECEIVES)).unwrap().whole();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = dev.reg_mr(pd, &memory, access).unwrap();
        Self {
            dev,
            pd,
            memory,
            mr,
            sent: 0,
        }
    }

    fn drive(&mut self) {
        if self.dev.progress(Instant::now()) == 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Waits for an event of this connection, at most some time.
    fn event(&mut self, cm: CmId) -> Option<CmEventKind> {
        let until = Instant::now() + ANSWER;
        while Instant::now() < until {
            while let Some(event) = self.dev.poll_cm_event() {
                if event.id == cm {
                    return Some(event.kind);
                }
            }
            self.drive();
        }
        None
    }

    fn connect(&mut self, port: u16, private_data: Vec<u8>) -> Connection {
        let dev = &mut self.dev;
        let cm = dev.create_id(PortSpace::Tcp).unwrap();
        let cq = dev.create_cq(1024).unwrap();
        let to = SocketAddr::new(TARGET.into(), port);
        dev.resolve_addr(cm, None, to, ANSWER).unwrap();
        assert_eq!(self.event(cm), Some(CmEventKind::AddrResolved));
        self.dev.resolve_route(cm, ANSWER).unwrap();
        assert_eq!(self.event(cm), Some(CmEventKind::RouteResolved));
        let cap = QpCap::new(SLOTS as u32 * 2, RECEIVES as u32);
        let init = QpInitAttr::new(self.pd, cq, QpType::Rc, cap);
        let qp = self.dev.create_cm_qp(cm, &init).unwrap();
        let mut connection = Connection {
            cm,
            qp,
            cq,
            is_open: false,
            acknowledged: 0,
        };
        for slot in 0..RECEIVES {
            self.post_recv(&connection, slot);
        }
        let param = ConnParam {
            private_data,
            initiator_depth: 1,
            ..ConnParam::default()
        };
        self.dev.connect(cm, &param).unwrap();
        connection.is_open = matches!(self.event(cm), Some(CmEventKind::Established { .. }));
        connection
    }

    fn sge(&self, slot: usize, len: usize) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + (slot * SLOT) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }]
    }

    fn post_recv(&mut self, connection: &Connection, slot: usize) {
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &self.sge(SLOTS + slot, SLOT),
        };
        let _ = self.dev.post_recv(connection.qp, &[wr]);
    }

    /// Sends a message, once there is room for it.
    fn send(&mut self, connection: &mut Connection, message: &[u8]) {
        let message = &message[..message.len().min(SLOT)];
        let slot = self.sent % SLOTS;
        self.sent += 1;
        self.memory.write(slot * SLOT, message);
        let sge = self.sge(slot, message.len());
        let until = Instant::now() + ANSWER;
        while connection.is_open {
            let wr = SendWr::new(1 << 32, SendOp::Send, &sge);
            if self.dev.post_send(connection.qp, &[wr]).is_ok() {
                break;
            }
            connection.is_open = Instant::now() < until;
            self.poll(connection);
        }
        self.poll(connection);
    }

    /// Takes what has come; how many messages.
    fn poll(&mut self, connection: &mut Connection) -> usize {
        self.dev.progress(Instant::now());
        let (mut done, mut came) = (Vec::new(), 0);
        let _ = self.dev.poll_cq(connection.cq, 64, &mut done);
        for completion in done {
            if !completion.status.is_ok() {
                connection.is_open = false;
            } else if completion.opcode.is_recv() {
                came += 1;
                self.post_recv(connection, completion.wr_id.0 as usize);
            } else {
                connection.acknowledged += 1;
            }
        }
        while let Some(event) = self.dev.poll_cm_event() {
            if event.id == connection.cm && event.kind == CmEventKind::Disconnected {
                connection.is_open = false;
            }
        }
        came
    }

    /// Whether a request on a new connection is refused for what it wants to reach.
    pub(crate) fn is_refused(&mut self, port: u16, private_data: Vec<u8>, op: SendOp) -> bool {
        let connection = self.connect(port, private_data);
        assert!(connection.is_open, "a login that is right");
        let sge = self.sge(0, 64);
        let request = SendWr::new(7, op, &sge);
        self.dev.post_send(connection.qp, &[request]).unwrap();
        let until = Instant::now() + ANSWER;
        let mut done = Vec::new();
        while done.is_empty() && Instant::now() < until {
            self.drive();
            let _ = self.dev.poll_cq(connection.cq, 64, &mut done);
        }
        self.close(&connection);
        done.iter()
            .any(|c| c.wr_id == WrId(7) && c.status == WcStatus::RemAccessErr)
    }

    fn close(&mut self, connection: &Connection) {
        let _ = self.dev.disconnect(connection.cm);
        self.drive();
        let _ = self.dev.destroy_qp(connection.qp);
        let _ = self.dev.destroy_id(connection.cm);
        let _ = self.dev.destroy_cq(connection.cq);
    }
}

/// The private data of a login's REQ, behind the RDMA CM's header.
fn private_data(req: &[u8]) -> Vec<u8> {
    req[164 + 36..164 + 92].to_vec()
}

fn is_srp(req: &[u8]) -> bool {
    // The port number ends the service id.
    req[38..40] == OTHER_SRP.to_be_bytes()
}

/// The private data that an SRP login brings.
pub(crate) fn srp_login(requests: &[Vec<u8>]) -> Vec<u8> {
    private_data(request_of(requests, Wire::Srp))
}

fn request_of(requests: &[Vec<u8>], wire: Wire) -> &[u8] {
    let mut of_wire = requests
        .iter()
        .filter(|r| is_srp(r) != (wire == Wire::Iser));
    of_wire.next().expect("a login of that protocol was seen")
}

fn over_rdma(mut mutator: Mutator, wire: Wire, count: u64, requests: &[Vec<u8>]) -> Tally {
    let mut host = Host::new();
    let mut tally = Tally::default();
    let (port, good) = match wire {
        Wire::Iser => (3260, private_data(request_of(requests, wire))),
        _ => (OTHER_SRP, private_data(request_of(requests, wire))),
    };
    while tally.messages < count {
        let mut data = good.clone();
        if mutator.one_in(4) {
            mutator.change(&mut data);
            data.truncate(56);
            tally.messages += 1;
        }
        let mut connection = host.connect(port, data);
        tally.connections += 1;
        if wire == Wire::Iser && !mutator.one_in(4) {
            let (bhs, data) = login("RDMAExtensions=Yes\0");
            let mut header = [0; 28];
            header[0] = 0x10;
            host.send(&mut connection, &[&header[..], &bhs, &data].concat());
            let until = Instant::now() + ANSWER;
            while connection.is_open && host.poll(&mut connection) == 0 && Instant::now() < until {}
        }
        for _ in 0..PER_CONNECTION {
            if !connection.is_open || tally.messages >= count {
                break;
            }
            let message = mutator.next();
            for _ in 0..1 + u64::from(mutator.one_in(8)) {
                host.send(&mut connection, &message);
                tally.messages += 1;
            }
        }
        // What the last messages lead to.
        let until = Instant::now() + Duration::from_millis(20);
        while connection.is_open && Instant::now() < until {
            host.poll(&mut connection);
        }
        tally.acknowledged += connection.acknowledged;
        tally.ended += u64::from(!connection.is_open);
        host.close(&connection);
    }
    tally
}

/// Messages of the connection manager, without any connection behind them.
fn datagrams(seed: u64, count: u64, requests: &[Vec<u8>]) -> Tally {
    let seeds = seeds::corpus("cm_message").into_iter().map(|(_, m)| m);
    let valid = seeds.chain(requests.iter().cloned());
    let mut mutator = Mutator::new(valid, seed, Wire::ConnectionManagement);
    let mut forger = Forger::from_here();
    let mut tally = Tally::default();
    while tally.messages < count {
        let mut mad = mutator.next();
        if !mutator.one_in(32) {
            mad.resize(256, 0);
        }
        forger.send_own_mad(&mad);
        tally.messages += 1;
        pace(tally.messages);
    }
    tally
}

/// Packets of the stranger's own connections with changes, whose ICRC is right as a rule.
fn packets(seed: u64, count: u64, requests: &[Vec<u8>], mut sniffer: Sniffer) -> Tally {
    let seeds = seeds::corpus("packet").into_iter().map(|(_, m)| m);
    let mut mutator = Mutator::new(seeds, seed, Wire::Roce);
    let known = mutator.valid.len();
    let mut forger = Forger::from_here();
    let mut host = Host::new();
    let mut tally = Tally::default();
    let mut connection: Option<Connection> = None;
    // TEST UNIT READY.
    let mut command = [0; 48];
    command[0] = 2;
    while tally.messages < count {
        let open = match connection.take() {
            Some(open) if open.is_open => open,
            ended => {
                if let Some(ended) = ended {
                    host.close(&ended);
                    tally.ended += 1;
                }
                tally.connections += 1;
                host.connect(OTHER_SRP, private_data(request_of(requests, Wire::Roce)))
            }
        };
        let mut open = open;
        host.send(&mut open, &command);
        for _ in 0..20 {
            host.poll(&mut open);
        }
        // What has passed now is what a valid packet looks like.
        mutator.valid.truncate(known);
        mutator.valid.extend(sniffer.bodies_from(STRANGER));
        let recent = mutator.valid.len() > known;
        for _ in 0..PER_CONNECTION {
            let mut body = match recent && !mutator.one_in(8) {
                true => {
                    let newest = mutator.valid.len() - known;
                    let at = known + mutator.chance.below(newest as u64) as usize;
                    mutator.valid[at].clone()
                }
                false => mutator.valid(),
            };
            for _ in 0..mutator.chance.below(3) {
                mutator.change(&mut body);
            }
            let is_sealed = !mutator.one_in(16);
            forger.send_own_packet(body, is_sealed);
            tally.messages += 1;
            pace(tally.messages);
        }
        host.poll(&mut open);
        connection = Some(open);
    }
    if let Some(open) = connection {
        host.close(&open);
    }
    tally
}

/// Datagrams that a full socket drops would test nothing.
fn pace(sent: u64) {
    if sent.is_multiple_of(32) {
        std::thread::sleep(Duration::from_millis(2));
    }
}
