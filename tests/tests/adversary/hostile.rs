//! Sends almost valid messages of every protocol to a busy daemon: valid messages in which fields
//! are set to boundary values, or that are truncated, extended, duplicated, or sent in an invalid
//! state. They are sent by a host that is allowed to log in to its own target, using many
//! connections at the same time.
//!
//! We only count messages that were received: a SEND must be acknowledged by the target's queue
//! pair, and the data of a stream must be read by the target. If the target resets a stream, we
//! don't count any messages after the previous message that it may have responded to. For MADs we
//! use the counters in the daemon, and for other datagrams we use the drop counters in the kernel.
//!
//! `RISER_HOSTILE_MESSAGES` sets the number of messages per protocol (default 2 000), and
//! `RISER_HOSTILE_RATE` the number of messages per second (default unlimited). If
//! `RISER_HOSTILE_IS_TIMED=1` is set, there are enough rounds to compare the 99th percentile of
//! honest sessions ([`Rounds`](super::rounds::Rounds)).

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use riser_test_peers::pdus;
use riser_tests::load::Chance;
use riser_tests::mutator::Mutator;
use riser_tests::seeds;

use super::METRICS_PORT;
use super::forge::{Forger, Sniffer};
use super::host::{Connection, Host, PARALLEL, RESPONSE_TIMEOUT, State};
use super::net::{STRANGER, TARGET};

/// Target that the attacker is allowed to use.
pub(crate) const OTHER: &str = "iqn.2026-01.com.example:other";
/// Port of its SRP portal.
pub(crate) const OTHER_SRP: u16 = 6555;

/// Timeout for a response on a connection that was not affected by forged packets.
const UNSPOILT: Duration = Duration::from_millis(100);
/// Maximum number of messages on a connection, to ensure that we also test logins.
const PER_CONNECTION: u64 = 64;

/// Protocol to attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Srp,
    Iscsi,
    Iser,
    ConnectionManagement,
    DeviceManagement,
    Roce,
    /// Port used for metrics and the status page.
    Http,
}

impl Wire {
    pub(crate) const ALL: [Self; 7] = [
        Self::Srp,
        Self::Iscsi,
        Self::Iser,
        Self::ConnectionManagement,
        Self::DeviceManagement,
        Self::Roce,
        Self::Http,
    ];

    /// Returns true if we can't know from the protocol whether a message was received.
    pub(crate) fn is_of_datagrams(self) -> bool {
        matches!(
            self,
            Self::ConnectionManagement | Self::DeviceManagement | Self::Roce
        )
    }
}

/// Number of messages received, and how the target closed its connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) messages: u64,
    pub(crate) connections: u64,
    /// Number of connections that were closed or rejected by the target.
    pub(crate) ended: u64,
    /// Number of additional stream messages that were sent, but may not have been read.
    pub(crate) unproven: u64,
}

/// Sends this number of messages. This must be called in the attacker's namespace. The sniffer is
/// used to capture packets in its network.
pub(crate) fn attack(
    wire: Wire,
    (count, rate): (u64, u64),
    seed: u64,
    requests: &[Vec<u8>],
    sniffer: Sniffer,
) -> Tally {
    let pace = Pace::new(rate);
    let mutator = match wire {
        Wire::Srp => Mutator::of("from_initiator", seed, wire as u64),
        Wire::Iser => Mutator::of("message", seed, wire as u64),
        Wire::Iscsi => Mutator::of_pdus(seed, wire as u64),
        Wire::Http => Mutator::new(http_requests(), seed, wire as u64),
        Wire::ConnectionManagement => {
            let seeds = seeds::corpus("cm_message").into_iter().map(|(_, m)| m);
            Mutator::new(seeds.chain(requests.iter().cloned()), seed, wire as u64)
        }
        Wire::DeviceManagement => Mutator::of("dm_mad", seed, wire as u64),
        Wire::Roce => {
            let seeds = seeds::corpus("packet").into_iter().map(|(_, m)| m);
            Mutator::new(seeds, seed, wire as u64)
        }
    };
    match wire {
        Wire::Srp | Wire::Iser => over_rdma(mutator, wire, count, pace, requests),
        Wire::Iscsi | Wire::Http => over_tcp(mutator, wire, count, pace),
        Wire::ConnectionManagement | Wire::DeviceManagement => datagrams(mutator, count, pace),
        Wire::Roce => packets(mutator, count, pace, requests, sniffer),
    }
}

/// Limits the rate of messages.
struct Pace {
    /// Messages per second, or zero if there is no limit.
    rate: u64,
    begun: Instant,
    sent: u64,
}

impl Pace {
    fn new(rate: u64) -> Self {
        Self {
            rate,
            begun: Instant::now(),
            sent: 0,
        }
    }

    /// Returns the time until the next message can be sent.
    fn wait(&self) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let due = Duration::from_secs_f64(self.sent as f64 / self.rate as f64);
        due.saturating_sub(self.begun.elapsed())
    }

    fn is_due(&self) -> bool {
        self.wait().is_zero()
    }

    /// Must be called after sending a datagram: waits until the next one can be sent. From time to
    /// time, this also waits for the target, because datagrams dropped by a full socket buffer
    /// would not test anything.
    fn wait_after_datagram(&mut self) {
        self.sent += 1;
        let wait = match self.sent.is_multiple_of(32) {
            true => self.wait().max(Duration::from_millis(2)),
            false => Duration::ZERO,
        };
        std::thread::sleep(wait);
    }
}

/// Creates a Login Request for a new session.
fn login(chance: &mut Chance, more: &str) -> Vec<u8> {
    // A random ISID.
    let mut isid = [0x80; 6];
    isid[1..].fill_with(|| chance.below(256) as u8);
    let name = "iqn.2026-01.com.example:stranger";
    pdus::login(isid, name, OTHER, &format!("InitialR2T=No\0{more}"))
}

/// Requests sent by scrapers and browsers.
fn http_requests() -> Vec<Vec<u8>> {
    let paths = [
        "/metrics",
        "/readyz",
        "/healthz",
        "/",
        "/v1/live",
        "/v1/recent?since=0",
    ];
    let heads = [
        "Host: 10.11.0.1:9909\r\nConnection: keep-alive\r\n",
        "Host: 10.11.0.1:9909\r\nAccept-Encoding: gzip\r\nContent-Length: 4\r\n",
        "Host: 10.11.0.1:9909\r\nTransfer-Encoding: chunked\r\nUpgrade: h2c\r\n",
    ];
    let requests = paths.iter().flat_map(|path| {
        let request = |method, head| format!("{method} {path} HTTP/1.1\r\n{head}\r\n");
        heads.map(|head| request("GET", head).into_bytes())
    });
    let post = b"POST /metrics HTTP/1.1\r\nHost: 10.11.0.1:9909\r\nContent-Length: 4\r\n\r\nabcd";
    requests.chain([post.to_vec()]).collect()
}

/// A stream that we attack.
struct Stream {
    socket: TcpStream,
    /// Remaining data of a message if the send buffer was full.
    pending: Vec<u8>,
    /// Set during a login, because we need to wait for the response.
    logs_in: bool,
    left: u64,
    /// Number of messages that the target may not have read if it resets the stream. This includes
    /// all messages since the last response, and any before that if the response might not be for
    /// them.
    unproven: u64,
    latest: u64,
    since: Instant,
}

/// State of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// Open. Set to true if data was received from the target.
    Came(bool),
    /// The target has read everything and closed the stream.
    Closed,
    /// The target has closed the stream with unread data.
    Reset,
}

impl Stream {
    fn open(mutator: &mut Mutator, wire: Wire) -> Self {
        let port = match wire {
            Wire::Http => METRICS_PORT,
            _ => 3260,
        };
        let socket = loop {
            match TcpStream::connect((TARGET, port)) {
                // All ports are still in TIME_WAIT for previous streams.
                Err(e) if e.kind() == ErrorKind::AddrNotAvailable => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                socket => break socket.expect("the portal listens"),
            }
        };
        socket.set_nonblocking(true).unwrap();
        let mut stream = Self {
            socket,
            pending: Vec::new(),
            // Send some of the messages before or during the login.
            logs_in: wire == Wire::Iscsi && !mutator.one_in(4),
            // A server responds to the requests in order, and closes the stream after an invalid
            // request.
            left: if wire == Wire::Http {
                16
            } else {
                PER_CONNECTION
            },
            unproven: 0,
            latest: 0,
            since: Instant::now(),
        };
        if stream.logs_in {
            stream.pending = login(&mut mutator.chance, "");
        }
        stream
    }

    /// Receives data and sends any pending data.
    fn advance(&mut self, sink: &mut [u8]) -> Flow {
        let mut received = false;
        loop {
            match self.socket.read(sink) {
                Ok(0) => return Flow::Closed,
                Ok(_) => received = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Flow::Reset,
            }
        }
        if received {
            self.unproven = std::mem::take(&mut self.latest);
        }
        while !self.pending.is_empty() {
            match self.socket.write(&self.pending) {
                Ok(sent) => drop(self.pending.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Flow::Reset,
            }
        }
        Flow::Came(received)
    }
}

/// Messages are counted when a stream was closed, because we only know then if they were received.
fn over_tcp(mut mutator: Mutator, wire: Wire, count: u64, mut pace: Pace) -> Tally {
    let mut tally = Tally::default();
    let mut streams: Vec<_> = (0..PARALLEL)
        .map(|_| Stream::open(&mut mutator, wire))
        .collect();
    let mut sink = vec![0; 1 << 16];
    let unproven = |streams: &[Stream]| streams.iter().map(|s| s.unproven).sum::<u64>();
    while tally.messages - unproven(&streams) < count {
        for stream in &mut streams {
            let flow = stream.advance(&mut sink);
            let is_stuck = stream.since.elapsed() > RESPONSE_TIMEOUT;
            match flow {
                Flow::Came(received) if stream.logs_in && !is_stuck => stream.logs_in = !received,
                Flow::Came(_) if !stream.pending.is_empty() && !is_stuck => {}
                Flow::Came(_) if stream.left > 0 && !pace.is_due() => {}
                Flow::Came(_) if stream.left > 0 && !is_stuck => {
                    let messages = next_pdus(&mut mutator, wire);
                    let more = messages.len() as u64;
                    stream.left = stream.left.saturating_sub(more);
                    pace.sent += more;
                    tally.messages += more;
                    stream.unproven += more;
                    stream.latest = more;
                    stream.pending = messages.concat();
                    stream.since = Instant::now();
                }
                // Wait for the last response before we close the stream.
                Flow::Came(false) if wire == Wire::Http && !is_stuck => {}
                flow => {
                    let is_unread = flow != Flow::Closed;
                    tally.messages -= if is_unread { stream.unproven } else { 0 };
                    tally.ended += u64::from(!matches!(flow, Flow::Came(_)));
                    tally.connections += 1;
                    *stream = Stream::open(&mut mutator, wire);
                }
            }
        }
        // Wait for the target's response before we send the next messages.
        std::thread::sleep(Duration::from_micros(50));
    }
    tally.messages -= unproven(&streams);
    tally.unproven = pace.sent - tally.messages;
    tally
}

/// Returns either a message or the same message twice.
fn next_pdus(mutator: &mut Mutator, wire: Wire) -> Vec<Vec<u8>> {
    let mut message = mutator.message();
    // If the sequence numbers of a command are valid, more of it will be checked.
    if wire == Wire::Iscsi
        && let Some(numbers) = message.get_mut(24..28)
        && mutator.chance.below(2) == 0
    {
        numbers.copy_from_slice(&[0, 0, 0, 1 + mutator.chance.below(8) as u8]);
    }
    let repeats = 1 + usize::from(mutator.one_in(8));
    vec![message; repeats]
}

/// Returns the private data in the REQ of a login, after the RDMA CM header.
fn private_data(req: &[u8]) -> Vec<u8> {
    req[164 + 36..164 + 92].to_vec()
}

fn is_srp(req: &[u8]) -> bool {
    // The port number is at the end of the service ID.
    req[38..40] == OTHER_SRP.to_be_bytes()
}

/// Returns the private data used for an SRP login.
pub(crate) fn srp_login(requests: &[Vec<u8>]) -> Vec<u8> {
    private_data(request_of(requests, Wire::Srp))
}

fn request_of(requests: &[Vec<u8>], wire: Wire) -> &[u8] {
    let mut of_wire = requests
        .iter()
        .filter(|r| is_srp(r) != (wire == Wire::Iser));
    of_wire.next().expect("a login of that protocol was seen")
}

/// A connection that we attack.
struct Line {
    connection: Connection,
    logs_in: Login,
    /// Set if the connection request was modified.
    is_changed: bool,
    left: u64,
    /// Number of login messages, which should not be counted.
    valid: u64,
    since: Instant,
}

/// State of the iSER login on a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Login {
    Wanted,
    Sent,
    /// Completed, or not used.
    Over,
}

/// Attacks a protocol over RDMA.
struct Raid {
    wire: Wire,
    mutator: Mutator,
    pace: Pace,
    host: Host,
    port: u16,
    good: Vec<u8>,
}

impl Raid {
    /// Opens a connection and logs in using a separate name.
    fn open(&mut self, place: usize) -> Line {
        let mut data = self.good.clone();
        let mutator = &mut self.mutator;
        if self.wire == Wire::Srp {
            // Initiator port ID in SRP_LOGIN_REQ, in the format used with the RDMA CM.
            data[16..32].fill_with(|| mutator.chance.below(256) as u8);
        }
        let is_changed = mutator.one_in(4);
        if is_changed {
            mutator.change(&mut data);
            data.truncate(56);
        }
        let logs_in = match self.wire == Wire::Iser && !mutator.one_in(4) {
            true => Login::Wanted,
            false => Login::Over,
        };
        Line {
            connection: self.host.begin(place, self.port, data),
            logs_in,
            is_changed,
            left: PER_CONNECTION,
            valid: 0,
            since: Instant::now(),
        }
    }

    /// Sends the next messages on a connection. Returns false if it was closed.
    fn advance(&mut self, line: &mut Line) -> bool {
        let connection = &mut line.connection;
        let is_stuck = line.since.elapsed() > RESPONSE_TIMEOUT;
        match (connection.state, line.logs_in) {
            (State::Ended, _) => false,
            (State::Connecting, _) => !is_stuck,
            (State::Open, Login::Wanted) => {
                let login = login(&mut self.mutator.chance, "RDMAExtensions=Yes\0");
                let mut header = [0; 28];
                header[0] = 0x10;
                let message = [&header[..], &login].concat();
                self.host.send(connection, &message);
                (line.logs_in, line.valid, line.since) = (Login::Sent, 1, Instant::now());
                true
            }
            (State::Open, Login::Sent) => {
                if connection.received > 0 {
                    line.logs_in = Login::Over;
                }
                !is_stuck
            }
            // Send a single message at a time: if a message causes the connection to be closed, no
            // later message would be received.
            (State::Open, Login::Over) if connection.acknowledged < connection.sent => !is_stuck,
            (State::Open, Login::Over) if !self.pace.is_due() => true,
            (State::Open, Login::Over) => {
                let message = self.mutator.message();
                for _ in 0..1 + u64::from(self.mutator.one_in(8)) {
                    self.host.send(connection, &message);
                    self.pace.sent += 1;
                }
                line.since = Instant::now();
                line.left = line.left.saturating_sub(1);
                line.left > 0
            }
        }
    }
}

fn over_rdma(mutator: Mutator, wire: Wire, count: u64, pace: Pace, requests: &[Vec<u8>]) -> Tally {
    let mut raid = Raid {
        wire,
        mutator,
        pace,
        host: Host::new(),
        port: if wire == Wire::Iser { 3260 } else { OTHER_SRP },
        good: private_data(request_of(requests, wire)),
    };
    let mut tally = Tally::default();
    let mut lines: Vec<_> = (0..PARALLEL).map(|place| raid.open(place)).collect();
    while tally.messages < count {
        let mut connections: Vec<_> = lines.iter_mut().map(|l| &mut l.connection).collect();
        raid.host.drive(&mut connections);
        for (place, line) in lines.iter_mut().enumerate() {
            if raid.advance(line) {
                continue;
            }
            let next = raid.open(place);
            let over = std::mem::replace(line, next);
            // If there was a response to the connection request, it must have been received.
            let has_response = over.connection.state != State::Connecting;
            tally.messages += over.connection.acknowledged.saturating_sub(over.valid);
            tally.messages += u64::from(over.is_changed && has_response);
            tally.ended += u64::from(over.connection.state == State::Ended);
            tally.connections += 1;
            raid.host.close(over.connection);
        }
    }
    for line in lines {
        raid.host.close(line.connection);
    }
    tally
}

/// Sends MADs without a connection.
fn datagrams(mut mutator: Mutator, count: u64, mut pace: Pace) -> Tally {
    let mut forger = Forger::from_here();
    let mut tally = Tally::default();
    while tally.messages < count {
        let mut mad = mutator.message();
        if !mutator.one_in(32) {
            mad.resize(256, 0);
        }
        forger.send_own_mad(&mad);
        tally.messages += 1;
        pace.wait_after_datagram();
    }
    tally
}

/// Sends modified packets using the attacker's own connections. The ICRC is usually valid.
fn packets(
    mut mutator: Mutator,
    count: u64,
    mut pace: Pace,
    requests: &[Vec<u8>],
    mut sniffer: Sniffer,
) -> Tally {
    let mut forger = Forger::from_here();
    let mut host = Host::new();
    let mut tally = Tally::default();
    let login = private_data(request_of(requests, Wire::Roce));
    let mut open = host.connect(OTHER_SRP, login.clone());
    // TEST UNIT READY.
    let mut command = [0; 48];
    command[0] = 2;
    while tally.messages < count {
        if open.state != State::Open {
            tally.connections += 1;
            tally.ended += 1;
            let next = host.connect(OTHER_SRP, login.clone());
            host.close(std::mem::replace(&mut open, next));
            continue;
        }
        // Discard any packets that were forged earlier.
        sniffer.skip();
        host.send(&mut open, &command);
        let until = Instant::now() + UNSPOILT;
        while open.state == State::Open && open.received < open.sent && Instant::now() < until {
            host.drive(&mut [&mut open]);
        }
        if open.received < open.sent {
            open.state = State::Ended;
            continue;
        }
        // All packets captured since then are valid.
        let recent = sniffer.bodies_from(STRANGER);
        for _ in 0..PER_CONNECTION {
            let mut body = match recent.is_empty() || mutator.one_in(8) {
                true => mutator.valid(),
                false => recent[mutator.chance.below(recent.len() as u64) as usize].clone(),
            };
            for _ in 0..mutator.chance.below(3) {
                mutator.change(&mut body);
            }
            let is_sealed = !mutator.one_in(16);
            forger.send_own_packet(body, is_sealed);
            tally.messages += 1;
            pace.wait_after_datagram();
        }
    }
    host.close(open);
    tally
}
