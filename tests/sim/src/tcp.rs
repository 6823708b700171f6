//! TCP between initiators, whose end is one of a pair of sockets of the host, and the target, whose
//! end is in memory.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{Listener, Peer};
use riser_transport::loopback::Blocked;

use crate::cheat::Overheard;
use crate::initiator::Dial;
use crate::leaks::{self, Guard};

/// Time of a byte on its way.
const LATENCY: Duration = Duration::from_micros(30);

/// Bytes on the way in one direction, at which the sender has to wait.
const WINDOW: usize = 64 << 10;

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    segments: VecDeque<(Instant, Vec<u8>)>,
    /// Bytes for which the sender has no acknowledgement.
    bytes: usize,
    /// Those of them that have arrived.
    unacknowledged: usize,
}

impl Flow {
    fn push(&mut self, at: Instant, bytes: Vec<u8>) {
        self.bytes += bytes.len();
        self.segments.push_back((at, bytes));
    }

    /// The sender gets acknowledgements, which come the other way.
    fn acknowledge(&mut self) {
        self.bytes -= std::mem::take(&mut self.unacknowledged);
    }

    /// Gives what has arrived to `deliver`, which returns how much of it was taken.
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
    stream: UnixStream,
    /// Address of the initiator.
    from: IpAddr,
    /// Address of the target.
    to: SocketAddr,
    peer: Peer,
    to_target: Flow,
    to_initiator: Flow,
    /// What the target has sent.
    sent: leaks::Stream,
    /// The initiator may have sent something since its stream was last found empty.
    may_have_sent: bool,
    /// The initiator's end is closed.
    is_ended: bool,
    /// The initiator has forgotten it, which the target does not know.
    is_orphan: bool,
}

/// Ways of a connection that are open.
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

/// A network that holds bytes for a long time.
#[derive(Debug)]
pub(crate) struct Delays {
    pub(crate) random: Rng,
    /// Segments that are held, as a share of all.
    pub(crate) share: f64,
    /// Longest time that one is held, and all behind it.
    pub(crate) most: Duration,
}

impl Delays {
    /// The time that a segment takes beyond its latency.
    fn draw(&mut self) -> Duration {
        match self.random.f64() < self.share {
            true => self.most.mul_f64(self.random.f64()),
            false => Duration::ZERO,
        }
    }
}

/// Sockets of the target that listen, from the network's side.
pub type Listeners = Arc<Mutex<Vec<Listener>>>;

/// All connections.
#[derive(Debug)]
pub struct Network {
    listeners: Listeners,
    connections: Vec<Connection>,
    /// Connections whose target has ended without a word that has reached them, until its host
    /// says so.
    vanished: Vec<Dial>,
    /// Addresses of initiators whose hosts are gone.
    gone: Vec<IpAddr>,
    /// Addresses that are cut off, and how.
    blocked: HashMap<IpAddr, Blocked>,
    /// Connections to such an address that were begun, until it can be reached.
    begun: Vec<Dial>,
    /// The target's host is there, whether or not its process is.
    is_host_up: bool,
    ports: u16,
    pub(crate) is_stalled: bool,
    pub(crate) is_narrow: bool,
    /// Initiators that have done something since the last turn; all of them, if that is not known.
    active: Option<Vec<IpAddr>>,
    pub(crate) delays: Option<Delays>,
    arrived: Arrived,
    /// Room for what is read from a stream.
    scratch: Vec<u8>,
    guard: Guard,
    /// Where peers hear what they must not know.
    overheard: Option<Overheard>,
}

/// Bytes that have arrived.
#[derive(Debug, Default)]
struct Arrived {
    count: u64,
    /// All of them, in their order.
    trace: DefaultHasher,
}

impl Arrived {
    fn note(&mut self, bytes: &[u8]) {
        self.count += bytes.len() as u64;
        self.trace.write(bytes);
    }
}

impl Network {
    /// A network to these listeners, of which a connection finds one, as with `SO_REUSEPORT`.
    #[must_use]
    pub fn new(listeners: Listeners, guard: Guard, overheard: Option<Overheard>) -> Self {
        Self {
            listeners,
            guard,
            overheard,
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
            arrived: Arrived::default(),
            scratch: vec![0; WINDOW],
        }
    }

    /// The target's process is gone. Its host ends the connections, unless it is gone as well.
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

    /// The target's host is there. It knows nothing of the connections from before.
    pub fn start_target(&mut self) {
        self.is_host_up = true;
    }

    /// Ways between an initiator and the target that are open.
    fn ways(&self, from: IpAddr, to: SocketAddr) -> Ways {
        ways(&self.blocked, from, to)
    }

    /// An initiator connects from an address.
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
            // Without a host there is no answer, and without a socket that listens, a refusal.
            if !self.is_host_up {
                self.vanished.push(Dial { from, to, stream });
            }
            return;
        }
        let listener = there[rng.usize(..there.len())];
        let peer = listener.connect(SocketAddr::new(from, self.ports));
        // Without room it is refused: the stream is closed.
        if let Some(peer) = peer {
            self.connections.push(Connection {
                stream,
                from,
                to,
                peer,
                to_target: Flow::default(),
                to_initiator: Flow::default(),
                sent: leaks::Stream::default(),
                may_have_sent: true,
                is_ended: false,
                is_orphan: false,
            });
        }
    }

    /// These addresses are cut off. What waited for others has to try again.
    pub fn partition(&mut self, blocked: HashMap<IpAddr, Blocked>) {
        let waits = |dial: &Dial| !ways(&blocked, dial.from, dial.to).are_open();
        self.begun.retain(waits);
        self.blocked = blocked;
    }

    /// The process of an initiator is gone, and what it had sent and has not arrived with it
    /// (`SO_LINGER`). Its host resets the connections, as far as anything reaches the target.
    pub fn kill(&mut self, address: IpAddr) {
        let its = self.connections.iter_mut().filter(|c| c.from == address);
        its.for_each(|connection| connection.is_orphan = true);
    }

    /// The host of an initiator is gone: nothing comes from it, and nothing is answered.
    pub fn vanish(&mut self, address: IpAddr) {
        self.kill(address);
        self.gone.push(address);
    }

    /// The host of an initiator is back, and knows nothing of its old connections.
    pub fn come_back(&mut self, address: IpAddr) {
        self.gone.retain(|gone| *gone != address);
    }

    /// Breaks connections.
    pub fn cut(&mut self, probability: f64, rng: &mut Rng) {
        self.connections.retain(|connection| {
            let is_cut = rng.f64() < probability;
            if is_cut {
                connection.peer.break_off(libc::ECONNRESET);
            }
            !is_cut
        });
    }

    /// An initiator at this address has done something, or one at any address: it may have sent
    /// something, or be gone. Nothing else is read from, since that takes a call of the system.
    pub fn note_activity(&mut self, of: Option<IpAddr>) {
        match (of, &mut self.active) {
            (Some(address), Some(active)) if !active.contains(&address) => active.push(address),
            (Some(_), _) => {}
            (None, active) => *active = None,
        }
    }

    /// Moves bytes; returns whether any moved.
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
            // It answers what they repeat.
            let is_silent = |dial: &Dial| !ways(blocked, dial.from, dial.to).are_open();
            self.vanished.retain(is_silent);
        }
        moved += before - self.vanished.len();
        self.connections.retain_mut(|connection| {
            let is_active = |active: &Vec<_>| active.contains(&connection.from);
            connection.may_have_sent |= active.as_ref().is_none_or(is_active);
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
                overheard: self.overheard.as_ref(),
            };
            moved += connection.turn(now, surroundings);
            !connection.is_over(ways)
        });
        moved > 0
    }

    /// When the next bytes arrive.
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
        // Those that have arrived wait for room.
        next.filter(|at| *at > now).min()
    }

    /// Returns the number of bytes that have arrived.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.arrived.count
    }

    /// Returns a number that stands for all bytes that have arrived.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.arrived.trace.finish()
    }

    /// Returns the number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len() + self.vanished.len() + self.begun.len()
    }

    /// Whether there is no connection.
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
            "connections of {peers}, {begun} begun, {vanished} without a target"
        )
    }
}

/// Ways between an initiator and the target that are open, given what is cut off.
fn ways(blocked: &HashMap<IpAddr, Blocked>, from: IpAddr, to: SocketAddr) -> Ways {
    let of = |at: IpAddr| blocked.get(&at).copied().unwrap_or_default();
    let (initiator, target) = (of(from), of(to.ip()));
    Ways {
        to_target: !initiator.outbound && !target.inbound,
        to_initiator: !target.outbound && !initiator.inbound,
    }
}

/// What a connection needs of the network.
struct Surroundings<'a> {
    ways: Ways,
    /// Bytes that sockets take and give at once.
    most: usize,
    delays: &'a mut Option<Delays>,
    arrived: &'a mut Arrived,
    scratch: &'a mut [u8],
    guard: &'a Guard,
    overheard: Option<&'a Overheard>,
}

impl Connection {
    /// Moves bytes; returns how many. Both ends may send while a way is blocked, until the window
    /// is full, since acknowledgements come the other way.
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
            overheard,
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
        let bytes = self.peer.take(room);
        if !bytes.is_empty() {
            moved += bytes.len();
            self.sent.look(guard, self.from, &bytes);
            if let Some(overheard) = overheard {
                overheard.hear_stream(self.from, false, &bytes);
            }
            self.to_initiator.push(at + late(), bytes);
        }
        let room = WINDOW.saturating_sub(self.to_target.bytes).min(most);
        if room > 0 && !self.is_ended && self.may_have_sent {
            match self.stream.read(&mut scratch[..room.min(WINDOW)]) {
                Ok(0) => {
                    self.is_ended = true;
                    moved += 1;
                }
                Ok(len) => {
                    moved += len;
                    self.to_target.push(at + late(), scratch[..len].to_vec());
                    if let Some(overheard) = overheard {
                        overheard.hear_stream(self.from, true, &scratch[..len]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.may_have_sent = false;
                }
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
                    // The initiator is gone, and nothing arrives any more.
                    Err(_) => bytes.len(),
                };
                arrived.note(&bytes[..taken]);
                taken
            });
        }
        moved
    }

    /// Whether one side is gone and the other has had everything.
    fn is_over(&self, ways: Ways) -> bool {
        if self.is_orphan {
            return self.peer.is_shut();
        }
        let is_drained = ways.to_initiator && self.to_initiator.segments.is_empty();
        (self.peer.is_closed() && is_drained)
            || (self.is_ended && self.to_target.segments.is_empty() && self.peer.is_closed())
    }
}
