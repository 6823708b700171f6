//! Links of a device. Each pair of devices sharing memory uses a link.
//!
//! Each side uses a different name for a link. It has the format of an IP address, and is never
//! reused for a different link. This is how a [`Nic`](crate::nic::Nic) identifies its peers.
//! Packets are assigned to the link they are received on, so a peer cannot use the connections of
//! another peer. The peer's address from the HELLO is only used for logging and access rules.
//!
//! ```text
//!  accept ─▶ AwaitsHello ── HELLO ──▶ Up ──▶ closed: end of the socket, or invalid ring data
//!  connect ─▶ AwaitsWelcome ─ WELCOME ─▶
//!                └── timeout ──▶ closed
//! ```
//!
//! # Bounds
//! A device can have up to [`MAX_LINKS`] links, which use [`DATA`](super::ring::DATA) bytes of
//! memory each. Of these, up to [`MAX_GREETING`] accepted links can be waiting for a HELLO for up
//! to [`GREETING`]; if there are more, the oldest is closed. If a device doesn't have a free slot,
//! pending connections will be accepted by other devices sharing the listener. While waiting for a
//! WELCOME, up to [`MAX_WAITING`] packets are queued. If a ring is full, packets are dropped like
//! on a full socket and will be retransmitted by their queue pairs, so a peer that does not read
//! can't delay another peer. Log messages that can be triggered repeatedly by other processes are
//! rate-limited ([`quiet`]).

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
use crate::nic::LinkPeer;
use crate::nic::batch::{Group, Piece, TxBatch};

/// Max number of links per device.
pub const MAX_LINKS: usize = 64;

/// Max number of accepted links waiting for a HELLO.
pub const MAX_GREETING: usize = 16;

/// Timeout for the first message from either side.
pub const GREETING: Duration = Duration::from_secs(2);

/// How long to wait after accepting a connection has failed.
const REST: Duration = Duration::from_secs(1);

/// Max number of packets queued until a WELCOME is received. These are messages of the connection
/// manager, which will be retransmitted.
const MAX_WAITING: usize = 64;

/// Max number of packets received from a link in each round.
const ROUND: usize = 64;

/// Max number of packets received from a closed link, which is enough for a full ring unless the
/// packets are tiny.
const LAST_ROUND: usize = 4096;

/// Max number of messages read from a socket in each round.
const BELLS: usize = 16;

/// Event data used for the listener in the epoll set, and for the eventfd.
const LISTENER: u64 = u64::MAX;
const KICK: u64 = u64::MAX - 1;

/// Max generation of a slot. The generation and the slot index use 28 bits. If all bits were set,
/// the name would be the broadcast address. A name is reused after this number of links, when the
/// first link using it has long been closed.
const GENERATIONS: u32 = (1 << 28) / MAX_LINKS as u32 - 1;

/// Prefix of link names if device addresses are IPv6. This is a unique local address prefix (RFC
/// 4193). For IPv4, we use the reserved class E.
const V6_PREFIX: u128 = 0xfd52_6973_6572_0000 << 64;
const V4_PREFIX: u32 = 0xf000_0000;

/// Link counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Established links.
    pub up: u64,
    /// Rejected peers: wrong user, invalid first message, or too many links.
    pub refused: u64,
    /// Links closed because the peer has written invalid ring data.
    pub broken: u64,
    /// Packets dropped because a ring was full or the link was closed.
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
    /// Local name of this link.
    name: IpAddr,
    /// Device address of the peer.
    peer: IpAddr,
    /// Set if we have connected to the listener at the peer's address.
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

    /// Returns the name and address of the peer for use by the device. A datagram user can send a
    /// response using either the link name or, if it has sent a request first, the address of this
    /// request.
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

/// Slot for a link.
#[derive(Debug, Default)]
struct Slot {
    link: Option<Link>,
    /// Name and peer address of the current or previous link.
    last: Option<(IpAddr, IpAddr)>,
    /// Number of previous links in this slot.
    generation: u32,
}

/// All links of a device.
#[derive(Debug)]
pub(super) struct Links {
    own: IpAddr,
    users: ShmUsers,
    listener: Option<Arc<Listener>>,
    /// Set if the listener is in the epoll set.
    is_attended: bool,
    /// If set, the listener is ignored until this time.
    rests_until: Option<Instant>,
    /// When to check the addresses of links again.
    check_due: Instant,
    lines: Lines,
    /// Epoll set, which is readable if a socket is readable, or after a kick.
    set: OwnedFd,
    kick: OwnedFd,
    slots: Vec<Slot>,
    /// Slots with a link. We only iterate over these slots in each round.
    live: Vec<usize>,
    /// Free slots, least recently used first.
    free: VecDeque<usize>,
    /// Names of closed links that have not been reported to the device.
    lost: Vec<IpAddr>,
    counters: LinkCounters,
}

impl Links {
    /// Creates an empty set of links for the device at `own`.
    ///
    /// # Errors
    /// Returns an error if there are no more descriptors available.
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

    /// Returns the number used in the name of a link.
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

    /// Returns the peer address for a link name, even if the link is already closed. Any other
    /// address is returned unchanged.
    pub(super) fn peer_of(&self, name: IpAddr) -> IpAddr {
        let slot = self.number(name).map(|n| n as usize % MAX_LINKS);
        let known = slot.and_then(|slot| self.slots[slot].last);
        match known {
            Some((last, peer)) if last == name => peer,
            _ => name,
        }
    }

    /// Returns the name of the link to the device listening at `peer`. If there is no link, it is
    /// created.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] if there are too many links, and the errors of
    /// [`hello::connect`].
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

    /// Adds a link. There must be a free slot.
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

    /// Closes a link.
    fn close_link(&mut self, slot: usize) {
        let Some(link) = self.slots[slot].link.take() else {
            return;
        };
        // It would be removed from the set by closing it, unless another process has a copy.
        let _ = epoll::delete(&self.set, &link.socket);
        self.live.retain(|&other| other != slot);
        self.free.push_back(slot);
        self.lose(link.name);
        debug!(peer = %link.peer, name = %link.name, "link closed");
        self.attend_or_warn();
    }

    fn lose(&mut self, name: IpAddr) {
        if !self.lost.contains(&name) {
            self.lost.push(name);
        }
    }

    /// Returns the next closed link, including links that were used to send after they had been
    /// closed.
    pub(super) fn poll_lost(&mut self) -> Option<IpAddr> {
        self.lost.pop()
    }

    /// Sends packets to the link specified by their destination, or to the listener at this
    /// address.
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
            // This is a datagram sent to an address.
            None => match self.reach(now, to).ok().and_then(|name| self.by_name(name)) {
                Some(slot) => slot,
                None => return false,
            },
        };
        let link = self.slots[slot].link.as_mut().expect("it was found");
        match &mut link.state {
            State::Up(rings) => match write_packet(rings, batch, group) {
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

    /// Makes all sent packets visible to the peers.
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

    /// Passes all received packets to `take` together with the peer of their link. Returns the
    /// number of packets.
    pub(super) fn receive(&mut self, mut take: impl FnMut(LinkPeer, &[u8])) -> usize {
        let mut taken = 0;
        // Iterate in reverse order, because closing a link removes it from the list.
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
            && let Some(held_back) = self.lines.broken.allow_message(Instant::now())
        {
            info!(peer = %link.peer, %broken, held_back, "invalid data in shared memory");
        }
        self.counters.broken += 1;
        self.close_link(slot);
    }

    /// Returns whether there are packets available.
    pub(super) fn has_input(&self) -> bool {
        self.all()
            .any(|link| matches!(&link.state, State::Up(rings) if rings.has_input()))
    }

    /// Enables wake-ups for all peers. If a packet has been received in the meantime, the epoll set
    /// becomes readable.
    pub(super) fn sleep(&self) {
        let mut has_input = false;
        for link in self.all() {
            if let State::Up(rings) = &link.state {
                has_input |= rings.sleep();
            }
        }
        if has_input {
            // This cannot fail since the counter will never reach its maximum.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    /// Disables wake-ups.
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

/// Writes a packet to a ring. This will return `false` if the ring is full.
fn write_packet(rings: &mut Rings, batch: &TxBatch, group: &Group) -> Result<bool, Broken> {
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
