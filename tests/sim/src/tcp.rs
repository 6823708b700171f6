//! TCP between initiators and target. The initiator uses one end of a real socket pair, but the end
//! of the target is in memory.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{Listener, Peer};
use riser_transport::loopback::Blocked;

use crate::cheat::Sniffer;
use crate::initiator::Dial;
use crate::leaks::{self, Guard};
use crate::stream::Stream;

/// Latency of a byte.
const LATENCY: Duration = Duration::from_micros(30);

/// Maximum number of bytes in flight in one direction. The sender must wait if this is reached.
const WINDOW: usize = 64 << 10;

/// One direction of a connection.
#[derive(Debug, Default)]
struct Flow {
    segments: VecDeque<(Instant, Vec<u8>)>,
    /// Bytes in flight that have not been acknowledged.
    bytes: usize,
    /// Part of these bytes that has been received.
    unacknowledged: usize,
}

impl Flow {
    fn push(&mut self, at: Instant, bytes: Vec<u8>) {
        self.bytes += bytes.len();
        self.segments.push_back((at, bytes));
    }

    /// Acknowledges received bytes. Acknowledgements travel in the other direction.
    fn acknowledge(&mut self) {
        self.bytes -= std::mem::take(&mut self.unacknowledged);
    }

    /// Passes received data to `deliver`, which returns the number of bytes consumed.
    fn deliver(&mut self, now: Instant, mut deliver: impl FnMut(&[u8]) -> usize) -> usize {
        let mut delivered = 0;
        while let Some((at, bytes)) = self.segments.front_mut()
            && *at <= now
        {
            let taken = deliver(bytes);
            self.unacknowledged += taken;
            delivered += taken;
            bytes.drain(..taken);
            if !bytes.is_empty() {
                break;
            }
            self.segments.pop_front();
        }
        delivered
    }
}

#[derive(Debug)]
struct Connection {
    stream: Stream,
    /// Address of the initiator.
    from: IpAddr,
    /// Address of the target.
    to: SocketAddr,
    peer: Peer,
    to_target: Flow,
    to_initiator: Flow,
    /// Data sent by the target.
    sent: leaks::Stream,
    /// Set if the initiator has closed its end.
    is_ended: bool,
    /// Set if the initiator has lost the connection, but the target doesn't know this yet.
    is_orphan: bool,
}

/// Open directions of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ways {
    to_target: bool,
    to_initiator: bool,
}

impl Ways {
    const fn are_open(self) -> bool {
        self.to_target && self.to_initiator
    }
}

/// A network with long delays.
#[derive(Debug)]
pub(crate) struct Delays {
    pub(crate) random: Rng,
    /// Share of segments that are delayed.
    pub(crate) share: f64,
    /// Maximum delay of a segment and all following ones.
    pub(crate) most: Duration,
}

impl Delays {
    /// Draws the additional latency of a segment.
    fn draw(&mut self) -> Duration {
        match self.random.f64() < self.share {
            true => self.most.mul_f64(self.random.f64()),
            false => Duration::ZERO,
        }
    }
}

/// Listening sockets of the target, seen from the network.
pub type Listeners = Arc<Mutex<Vec<Listener>>>;

/// All TCP connections.
#[derive(Debug)]
pub struct Network {
    listeners: Listeners,
    connections: Vec<Connection>,
    /// Connections to a target that has disappeared, until its host sends a reset.
    vanished: Vec<Dial>,
    /// Addresses of initiators whose hosts are down.
    gone: Vec<IpAddr>,
    /// Disconnected addresses and directions.
    blocked: HashMap<IpAddr, Blocked>,
    /// Connection attempts to a disconnected address, until it is reachable.
    begun: Vec<Dial>,
    /// Set while the host of the target is up, even if the process is not running.
    is_host_up: bool,
    ports: u16,
    pub(crate) is_stalled: bool,
    pub(crate) is_narrow: bool,
    /// Initiators that were active since the last turn, or `None` if any of them may have been.
    active: Option<Vec<IpAddr>>,
    pub(crate) delays: Option<Delays>,
    arrived: ReceivedBytes,
    /// Buffer for reading from a stream.
    scratch: Vec<u8>,
    guard: Guard,
    /// Collects information that cheating peers could eavesdrop.
    sniffer: Option<Sniffer>,
}

/// Received bytes.
#[derive(Debug, Default)]
struct ReceivedBytes {
    count: u64,
    /// Hash of all bytes in order.
    trace: DefaultHasher,
}

impl ReceivedBytes {
    fn note(&mut self, bytes: &[u8]) {
        self.count += bytes.len() as u64;
        self.trace.write(bytes);
    }
}

impl Network {
    /// Creates a network for these listeners. Each connection is assigned to one of them, as with
    /// `SO_REUSEPORT`.
    #[must_use]
    pub fn new(listeners: Listeners, guard: Guard, sniffer: Option<Sniffer>) -> Self {
        Self {
            listeners,
            guard,
            sniffer,
            connections: Vec::new(),
            vanished: Vec::new(),
            gone: Vec::new(),
            blocked: HashMap::new(),
            begun: Vec::new(),
            is_host_up: true,
            ports: 40_000,
            is_stalled: false,
            is_narrow: false,
            active: None,
            delays: None,
            arrived: ReceivedBytes::default(),
            scratch: vec![0; WINDOW],
        }
    }

    /// Called when the target process has exited. Its host resets the connections, unless it is
    /// also down.
    pub fn end_target(&mut self, is_host_up: bool) {
        self.is_host_up &= is_host_up;
        for connection in std::mem::take(&mut self.connections) {
            connection.peer.break_off(libc::ECONNRESET);
            let Connection {
                stream, from, to, ..
            } = connection;
            if !is_host_up || !self.ways(from, to).to_initiator {
                self.vanished.push(Dial { from, to, stream });
            }
        }
    }

    /// Called when the host of the target is up. Previous connections are lost.
    pub fn start_target(&mut self) {
        self.is_host_up = true;
    }

    /// Returns the open directions between an initiator and the target.
    fn ways(&self, from: IpAddr, to: SocketAddr) -> Ways {
        ways(&self.blocked, from, to)
    }

    /// Called when an initiator connects.
    pub fn connect(&mut self, dial: Dial, rng: &mut Rng) {
        self.ports += 1;
        if !self.ways(dial.from, dial.to).are_open() {
            self.begun.push(dial);
            return;
        }
        let Dial { from, to, stream } = dial;
        let mut listeners = self.listeners.lock();
        let listeners = listeners
            .as_mut()
            .unwrap_or_else(|poisoned| poisoned.get_mut());
        listeners.retain(Listener::is_listening);
        let there = listeners.iter().filter(|l| l.address() == to);
        let there: Vec<_> = there.collect();
        if there.is_empty() {
            // There is no response while the host is down, and a reset if no socket is listening.
            if !self.is_host_up {
                self.vanished.push(Dial { from, to, stream });
            }
            return;
        }
        let listener = there[rng.usize(..there.len())];
        let peer = listener.connect(SocketAddr::new(from, self.ports));
        // The connection is refused if the backlog is full: the stream is closed.
        if let Some(peer) = peer {
            self.connections.push(Connection {
                stream,
                from,
                to,
                peer,
                to_target: Flow::default(),
                to_initiator: Flow::default(),
                sent: leaks::Stream::default(),
                is_ended: false,
                is_orphan: false,
            });
        }
    }

    /// Sets the disconnected addresses. Connection attempts to other addresses must be repeated.
    pub fn partition(&mut self, blocked: HashMap<IpAddr, Blocked>) {
        let waits = |dial: &Dial| !ways(&blocked, dial.from, dial.to).are_open();
        self.begun.retain(waits);
        self.blocked = blocked;
    }

    /// Called when the process of an initiator was killed. Data in flight is dropped (`SO_LINGER`).
    /// Its host resets the connections, unless the target is unreachable.
    pub fn kill(&mut self, address: IpAddr) {
        let its = self.connections.iter_mut().filter(|c| c.from == address);
        its.for_each(|connection| connection.is_orphan = true);
    }

    /// Called when the host of an initiator is down: it neither sends nor responds.
    pub fn vanish(&mut self, address: IpAddr) {
        self.kill(address);
        self.gone.push(address);
    }

    /// Called when the host of an initiator is up again. Its previous connections are lost.
    pub fn on_host_up(&mut self, address: IpAddr) {
        self.gone.retain(|gone| *gone != address);
    }

    /// Resets random connections.
    pub fn cut(&mut self, probability: f64, rng: &mut Rng) {
        self.connections.retain(|connection| {
            let is_cut = rng.f64() < probability;
            if is_cut {
                connection.peer.break_off(libc::ECONNRESET);
            }
            !is_cut
        });
    }

    /// Called when the initiator at this address was active (or any initiator): it may have sent
    /// data or closed its plain socket. Other streams are not read, to avoid system calls.
    pub fn note_activity(&mut self, of: Option<IpAddr>) {
        match (of, &mut self.active) {
            (Some(address), Some(active)) if !active.contains(&address) => active.push(address),
            (Some(_), _) => {}
            (None, active) => *active = None,
        }
    }

    /// Moves data. Returns whether there was any.
    pub fn turn(&mut self, now: Instant) -> bool {
        if self.is_stalled {
            return false;
        }
        let most = if self.is_narrow { 100 } else { usize::MAX };
        let active = self.active.replace(Vec::new());
        let (blocked, gone) = (&self.blocked, &self.gone);
        let (mut moved, scratch) = (0, &mut self.scratch);
        let before = self.vanished.len();
        if self.is_host_up {
            // It resets connections that retransmit.
            let is_silent = |dial: &Dial| !ways(blocked, dial.from, dial.to).are_open();
            self.vanished.retain(is_silent);
        }
        moved += before - self.vanished.len();
        self.connections.retain_mut(|connection| {
            let is_active = |active: &Vec<_>| active.contains(&connection.from);
            if active.as_ref().is_none_or(is_active) && connection.stream.has_plain_socket() {
                connection.stream.note_activity();
            }
            let ways = ways(blocked, connection.from, connection.to);
            if connection.is_orphan && ways.to_target && !gone.contains(&connection.from) {
                connection.peer.break_off(libc::ECONNRESET);
                moved += 1;
                return false;
            }
            let surroundings = Surroundings {
                ways,
                most,
                delays: &mut self.delays,
                arrived: &mut self.arrived,
                scratch,
                guard: &self.guard,
                sniffer: self.sniffer.as_ref(),
            };
            moved += connection.turn(now, surroundings);
            !connection.is_over(ways)
        });
        moved > 0
    }

    /// Returns the time when more data arrives.
    #[must_use]
    pub fn next_arrival(&self, now: Instant) -> Option<Instant> {
        if self.is_stalled {
            return None;
        }
        let flows = self.connections.iter().filter(|c| !c.is_orphan);
        let flows = flows.flat_map(|c| {
            let ways = self.ways(c.from, c.to);
            let to_target = ways.to_target.then_some(&c.to_target);
            [to_target, ways.to_initiator.then_some(&c.to_initiator)]
        });
        let flows = flows.flatten();
        let next = flows.filter_map(|flow| flow.segments.front().map(|(at, _)| *at));
        // Data that has already arrived is waiting for buffer space.
        next.filter(|at| *at > now).min()
    }

    /// Returns the number of bytes received.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.arrived.count
    }

    /// Returns a hash of all received bytes.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.arrived.trace.finish()
    }

    /// Returns the number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len() + self.vanished.len() + self.begun.len()
    }

    /// Returns whether there are no connections.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers = self.connections.iter().map(|one| one.from.to_string());
        let peers = peers.collect::<Vec<_>>().join(", ");
        let (begun, vanished) = (self.begun.len(), self.vanished.len());
        write!(
            f,
            "connections of {peers}, {begun} opened, {vanished} without a target"
        )
    }
}

/// Returns the open directions between an initiator and the target, with these disconnected
/// addresses.
fn ways(blocked: &HashMap<IpAddr, Blocked>, from: IpAddr, to: SocketAddr) -> Ways {
    let of = |at: IpAddr| blocked.get(&at).copied().unwrap_or_default();
    let (initiator, target) = (of(from), of(to.ip()));
    Ways {
        to_target: !initiator.outbound && !target.inbound,
        to_initiator: !target.outbound && !initiator.inbound,
    }
}

/// State of the network that is needed by a connection.
struct Surroundings<'a> {
    ways: Ways,
    /// Maximum number of bytes per read or write.
    most: usize,
    delays: &'a mut Option<Delays>,
    arrived: &'a mut ReceivedBytes,
    scratch: &'a mut [u8],
    guard: &'a Guard,
    sniffer: Option<&'a Sniffer>,
}

impl Connection {
    /// Moves data and returns the number of bytes. If one direction is blocked, both ends can still
    /// send until the window is full, because acknowledgements travel in the other direction.
    fn turn(&mut self, now: Instant, with: Surroundings<'_>) -> usize {
        if self.is_orphan {
            return 0;
        }
        let Surroundings {
            ways,
            most,
            delays,
            arrived,
            scratch,
            guard,
            sniffer,
        } = with;
        let mut moved = 0;
        let at = now + LATENCY;
        let mut late = || delays.as_mut().map_or(Duration::ZERO, Delays::draw);
        if ways.to_target {
            self.to_initiator.acknowledge();
        }
        if ways.to_initiator {
            self.to_target.acknowledge();
        }
        let room = WINDOW.saturating_sub(self.to_initiator.bytes).min(most);
        let bytes = self.peer.read_bytes(room);
        if !bytes.is_empty() {
            moved += bytes.len();
            self.sent.check_bytes(guard, self.from, &bytes);
            if let Some(sniffer) = sniffer {
                sniffer.record_stream(self.from, false, &bytes);
            }
            self.to_initiator.push(at + late(), bytes);
        }
        let room = WINDOW.saturating_sub(self.to_target.bytes).min(most);
        if room > 0 && !self.is_ended {
            match self.stream.read(&mut scratch[..room.min(WINDOW)]) {
                Ok(0) => {
                    self.is_ended = true;
                    moved += 1;
                }
                Ok(len) => {
                    moved += len;
                    self.to_target.push(at + late(), scratch[..len].to_vec());
                    if let Some(sniffer) = sniffer {
                        sniffer.record_stream(self.from, true, &scratch[..len]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.is_ended = true,
            }
        }
        let peer = &self.peer;
        if ways.to_target {
            moved += self.to_target.deliver(now, |bytes| {
                let taken = peer.deliver(&bytes[..bytes.len().min(most)]);
                arrived.note(&bytes[..taken]);
                taken
            });
            if self.is_ended && self.to_target.segments.is_empty() {
                peer.close();
            }
        }
        if ways.to_initiator {
            let stream = &mut self.stream;
            moved += self.to_initiator.deliver(now, |bytes| {
                let taken = match stream.write(&bytes[..bytes.len().min(most)]) {
                    Ok(taken) => taken,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                    // The initiator has disconnected, so no more data is delivered.
                    Err(_) => bytes.len(),
                };
                arrived.note(&bytes[..taken]);
                taken
            });
        }
        moved
    }

    /// Returns whether one end is closed and the other has received all data.
    fn is_over(&self, ways: Ways) -> bool {
        if self.is_orphan {
            return self.peer.is_shut();
        }
        let is_drained = ways.to_initiator && self.to_initiator.segments.is_empty();
        (self.peer.is_closed() && is_drained)
            || (self.is_ended && self.to_target.segments.is_empty() && self.peer.is_closed())
    }
}
