//! A device's links: one for each pair of devices that share memory.
//!
//! A link has a name at each end, which has the form of an IP address and is never used for another
//! link: the names by which a [`Nic`](crate::roce::nic::Nic) knows its peers. A packet is attributed
//! to the link that it came over, so a peer cannot use the connections of another one. The peer's own
//! address comes from its HELLO and serves logs and access rules only.
//!
//! ```text
//!  accept ─▶ AwaitsHello ── HELLO ──▶ Up ──▶ gone: end of the socket, or a rule broken
//!  connect ─▶ AwaitsWelcome ─ WELCOME ─▶
//!                └── time is over ──▶ gone
//! ```
//!
//! # Bounds
//! [`MAX_LINKS`] links of [`DATA`](super::ring::DATA) bytes of memory each; [`MAX_GREETING`] of them
//! that were accepted and have not said hello, for [`GREETING`] each: the oldest gives its place to
//! the next one. A device without a free place leaves its listener to the others that have it.
//! [`MAX_WAITING`] packets wait for a WELCOME. Packets for which a ring has no room are lost, as in a
//! full socket, and repeated by their queue pairs: a peer that reads nothing delays no other one.
//! What processes can do wrong again and again is logged once in a while ([`quiet`]).

mod lives;
mod quiet;
mod sockets;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll};
use tracing::{debug, info};

use self::quiet::Lines;
use super::hello::{self, Listener, ShmUsers};
use super::ring::{Broken, Rings};
use crate::roce::batch::{Group, Piece, TxBatch};
use crate::roce::nic::LinkPeer;

/// Most links of a device.
pub const MAX_LINKS: usize = 64;

/// Most links that were accepted and have not said hello.
pub const MAX_GREETING: usize = 16;

/// Time that either side has for its first message.
pub const GREETING: Duration = Duration::from_secs(2);

/// Time for which no process is accepted after that has failed.
const REST: Duration = Duration::from_secs(1);

/// Packets that wait for a WELCOME: messages of the connection manager, which repeats them.
const MAX_WAITING: usize = 64;

/// Packets taken from one link in a round.
const ROUND: usize = 64;

/// Packets taken from a link whose peer has gone: all that fit the ring, unless they are tiny.
const LAST_ROUND: usize = 4096;

/// Messages read from a socket in a round.
const BELLS: usize = 16;

/// What the set of descriptors calls the listener, and the descriptor that makes it readable.
const LISTENER: u64 = u64::MAX;
const KICK: u64 = u64::MAX - 1;

/// Generations of a slot, of 28 bits together with its number. All ones would be the broadcast
/// address. A name is used again after that many links, when nothing of the first one is left.
const GENERATIONS: u32 = (1 << 28) / MAX_LINKS as u32 - 1;

/// Prefix of the names of links where addresses are of IPv6. It is one of the prefixes for local use
/// (RFC 4193); of IPv4, the names are of the reserved class E.
const V6_PREFIX: u128 = 0xfd52_6973_6572_0000 << 64;
const V4_PREFIX: u32 = 0xf000_0000;

/// Counters of the links of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Links that came up.
    pub up: u64,
    /// Peers refused: of other users, without a proper first message, or too many.
    pub refused: u64,
    /// Links that ended because the peer broke a rule of the rings.
    pub broken: u64,
    /// Packets lost because a ring was full or its link gone.
    pub dropped: u64,
    /// Wake-ups sent.
    pub bells: u64,
}

#[derive(Debug)]
enum State {
    AwaitsHello {
        until: Instant,
    },
    AwaitsWelcome {
        until: Instant,
        waiting: Vec<Vec<u8>>,
    },
    Up(Box<Rings>),
}

#[derive(Debug)]
struct Link {
    /// By which it is known here.
    name: IpAddr,
    /// Address of the peer's device.
    peer: IpAddr,
    /// This side has connected, so the link leads to the listener at that address.
    is_outgoing: bool,
    socket: OwnedFd,
    state: State,
}

impl Link {
    fn rings(&mut self) -> Option<&mut Rings> {
        match &mut self.state {
            State::Up(rings) => Some(rings),
            _ => None,
        }
    }

    /// As whom the device knows the peer. An answer to a datagram leads back by the link's name, or
    /// by the address that was asked, which a user who has asked expects.
    fn source(&self) -> LinkPeer {
        let datagrams = if self.is_outgoing {
            self.peer
        } else {
            self.name
        };
        LinkPeer {
            name: self.name,
            datagrams,
        }
    }

    fn until(&self) -> Option<Instant> {
        match self.state {
            State::AwaitsHello { until } | State::AwaitsWelcome { until, .. } => Some(until),
            State::Up(_) => None,
        }
    }
}

/// A place for a link.
#[derive(Debug, Default)]
struct Slot {
    link: Option<Link>,
    /// Name and peer's address of the link, or of the last one.
    last: Option<(IpAddr, IpAddr)>,
    /// Links that were here.
    generation: u32,
}

/// All links of a device.
#[derive(Debug)]
pub(super) struct Links {
    own: IpAddr,
    users: ShmUsers,
    listener: Option<Arc<Listener>>,
    /// The listener is in the set.
    is_attended: bool,
    /// It is not until then.
    rests_until: Option<Instant>,
    /// Time at which the addresses of links are looked for again.
    check_due: Instant,
    lines: Lines,
    /// Readable when a socket is, or after a kick.
    set: OwnedFd,
    kick: OwnedFd,
    slots: Vec<Slot>,
    /// Slots that have a link: each round looks at these only.
    live: Vec<usize>,
    /// Free slots, those that were used longest ago first.
    free: VecDeque<usize>,
    /// Names of links that have ended, for the device to learn.
    lost: Vec<IpAddr>,
    counters: LinkCounters,
}

impl Links {
    /// None yet, for the device at `own`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn new(
        own: IpAddr,
        users: ShmUsers,
        listener: Option<Arc<Listener>>,
    ) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let kick = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        watch(&set, &kick, KICK)?;
        let mut links = Self {
            own,
            users,
            listener,
            is_attended: false,
            rests_until: None,
            check_due: Instant::now(),
            lines: Lines::default(),
            set,
            kick,
            slots: (0..MAX_LINKS).map(|_| Slot::default()).collect(),
            live: Vec::with_capacity(MAX_LINKS),
            free: (0..MAX_LINKS).collect(),
            lost: Vec::new(),
            counters: LinkCounters::default(),
        };
        links.attend()?;
        Ok(links)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    pub(super) fn counters(&self) -> LinkCounters {
        self.counters
    }

    fn all(&self) -> impl Iterator<Item = &Link> {
        let live = self.live.iter();
        live.filter_map(|&slot| self.slots[slot].link.as_ref())
    }

    /// The number in a link's name.
    fn number(&self, name: IpAddr) -> Option<u32> {
        match name {
            IpAddr::V4(v4) if self.own.is_ipv4() => {
                let bits = u32::from(v4);
                (bits & V4_PREFIX == V4_PREFIX).then_some(bits & !V4_PREFIX)
            }
            IpAddr::V6(v6) if self.own.is_ipv6() => {
                let bits = u128::from(v6);
                (bits >> 64 == V6_PREFIX >> 64).then_some(bits as u32)
            }
            _ => None,
        }
    }

    fn by_name(&self, name: IpAddr) -> Option<usize> {
        let slot = self.number(name)? as usize % MAX_LINKS;
        let link = self.slots[slot].link.as_ref()?;
        (link.name == name).then_some(slot)
    }

    /// The address of the peer behind a name, also if its link has ended; another address is its
    /// own name.
    pub(super) fn peer_of(&self, name: IpAddr) -> IpAddr {
        let slot = self.number(name).map(|n| n as usize % MAX_LINKS);
        let known = slot.and_then(|slot| self.slots[slot].last);
        match known {
            Some((last, peer)) if last == name => peer,
            _ => name,
        }
    }

    /// The name of the link to the device that listens at `peer`, which is made if there is none.
    ///
    /// # Errors
    /// Those of [`hello::connect`], and [`io::ErrorKind::QuotaExceeded`] at the limit.
    pub(super) fn reach(&mut self, now: Instant, peer: IpAddr) -> io::Result<IpAddr> {
        let leads_there = |link: &&Link| link.is_outgoing && link.peer == peer;
        if let Some(link) = self.all().find(leads_there) {
            return Ok(link.name);
        }
        if self.free.is_empty() {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let connected = hello::connect(peer, self.own, &self.users);
        let socket = connected.inspect_err(|error| self.lines.unreached(now, peer, error))?;
        let state = State::AwaitsWelcome {
            until: now + GREETING,
            waiting: Vec::new(),
        };
        self.add(socket, peer, true, state)
    }

    /// Adds a link, for which there is a free slot.
    fn add(
        &mut self,
        socket: OwnedFd,
        peer: IpAddr,
        is_outgoing: bool,
        state: State,
    ) -> io::Result<IpAddr> {
        let slot = *self.free.front().expect("the caller has looked");
        let generation = (self.slots[slot].generation + 1) % GENERATIONS;
        let number = generation * MAX_LINKS as u32 + slot as u32;
        let name = match self.own {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(V4_PREFIX | number)),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(V6_PREFIX | u128::from(number))),
        };
        watch(&self.set, &socket, number.into())?;
        self.free.pop_front();
        self.live.push(slot);
        self.slots[slot] = Slot {
            generation,
            last: Some((name, peer)),
            link: Some(Link {
                name,
                peer,
                is_outgoing,
                socket,
                state,
            }),
        };
        self.attend_or_warn();
        Ok(name)
    }

    /// Ends a link.
    fn end(&mut self, slot: usize) {
        let Some(link) = self.slots[slot].link.take() else {
            return;
        };
        // It leaves the set when it is closed, but for a copy that another process might have.
        let _ = epoll::delete(&self.set, &link.socket);
        self.live.retain(|&other| other != slot);
        self.free.push_back(slot);
        self.lose(link.name);
        debug!(peer = %link.peer, name = %link.name, "a link has ended");
        self.attend_or_warn();
    }

    fn lose(&mut self, name: IpAddr) {
        if !self.lost.contains(&name) {
            self.lost.push(name);
        }
    }

    /// A link that has ended, or that something was sent to although it had.
    pub(super) fn poll_lost(&mut self) -> Option<IpAddr> {
        self.lost.pop()
    }

    /// Sends packets, each to the link that its destination names, or to the listener there.
    pub(super) fn send(&mut self, now: Instant, batch: &TxBatch, groups: &[Group]) {
        for group in groups {
            debug_assert_eq!(group.count, 1, "nothing cuts a train here");
            if !self.send_one(now, batch, group) {
                self.counters.dropped += 1;
            }
        }
    }

    fn send_one(&mut self, now: Instant, batch: &TxBatch, group: &Group) -> bool {
        let to = group.way.dst.ip();
        let slot = match self.by_name(to) {
            Some(slot) => slot,
            None if self.number(to).is_some() => {
                self.lose(to);
                return false;
            }
            // A datagram to an address.
            None => match self.reach(now, to).ok().and_then(|name| self.by_name(name)) {
                Some(slot) => slot,
                None => return false,
            },
        };
        let link = self.slots[slot].link.as_mut().expect("it was found");
        match &mut link.state {
            State::Up(rings) => match put(rings, batch, group) {
                Ok(fits) => fits,
                Err(broken) => {
                    self.on_broken(slot, broken);
                    false
                }
            },
            State::AwaitsWelcome { waiting, .. } if waiting.len() < MAX_WAITING => {
                waiting.extend(batch.copy_packets(group));
                true
            }
            _ => false,
        }
    }

    /// Lets the peers see what was sent to them.
    pub(super) fn publish(&mut self) {
        for &slot in &self.live {
            if let Some(link) = &mut self.slots[slot].link
                && link.rings().is_some_and(Rings::publish)
            {
                hello::ring_bell(&link.socket);
                self.counters.bells += 1;
            }
        }
    }

    /// Hands packets that have come to `take`, with the peer of their link; returns how many.
    pub(super) fn receive(&mut self, mut take: impl FnMut(LinkPeer, &[u8])) -> usize {
        let mut taken = 0;
        // From the last on, since one that ends leaves the list.
        for at in (0..self.live.len()).rev() {
            taken += self.receive_from(self.live[at], ROUND, &mut take);
        }
        taken
    }

    fn receive_from(
        &mut self,
        slot: usize,
        most: usize,
        take: &mut impl FnMut(LinkPeer, &[u8]),
    ) -> usize {
        let Some(link) = &mut self.slots[slot].link else {
            return 0;
        };
        let peer = link.source();
        let Some(rings) = link.rings() else {
            return 0;
        };
        for taken in 0..most {
            match rings.next() {
                Ok(Some(packet)) => take(peer, packet),
                Ok(None) => {
                    rings.release();
                    return taken;
                }
                Err(broken) => {
                    self.on_broken(slot, broken);
                    return taken + 1;
                }
            }
        }
        rings.release();
        most
    }

    fn on_broken(&mut self, slot: usize, broken: Broken) {
        if let Some(link) = &self.slots[slot].link
            && let Some(held_back) = self.lines.broken.pass(Instant::now())
        {
            info!(peer = %link.peer, %broken, held_back, "a peer breaks the rules of shared memory");
        }
        self.counters.broken += 1;
        self.end(slot);
    }

    /// Whether a packet waits.
    pub(super) fn has_input(&self) -> bool {
        self.all()
            .any(|link| matches!(&link.state, State::Up(rings) if rings.has_input()))
    }

    /// Asks all peers for wake-ups. Where a packet has come meanwhile, the set becomes readable.
    pub(super) fn sleep(&self) {
        let mut has_input = false;
        for link in self.all() {
            if let State::Up(rings) = &link.state {
                has_input |= rings.sleep();
            }
        }
        if has_input {
            // The counter is far from its limit, so this cannot fail.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    /// Stops asking for wake-ups.
    pub(super) fn wake(&self) {
        for link in self.all() {
            if let State::Up(rings) = &link.state {
                rings.wake();
            }
        }
    }
}

fn watch(set: &OwnedFd, fd: &impl AsFd, data: u64) -> io::Result<()> {
    let data = epoll::EventData::new_u64(data);
    Ok(epoll::add(set, fd, data, epoll::EventFlags::IN)?)
}

/// Puts a packet into a ring; false if there is no room.
fn put(rings: &mut Rings, batch: &TxBatch, group: &Group) -> Result<bool, Broken> {
    if !rings.begin(group.bytes)? {
        return Ok(false);
    }
    for piece in batch.pieces(group) {
        match piece {
            Piece::Bytes(range) => rings.write(batch.own(range)),
            Piece::Memory(slice) => rings.write_memory(slice),
        }
    }
    Ok(true)
}
