//! Link socket events: new connections, first messages, wake-ups and disconnects.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

use riser_memory::shared::SharedMemory;
use rustix::event::epoll;
use tracing::{debug, info, warn};

use super::{
    BELLS, GREETING, KICK, LAST_ROUND, LISTENER, Links, MAX_GREETING, MAX_LINKS, REST, Slot, State,
};
use crate::nic::LinkPeer;
use crate::shm::hello::{self, Message};
use crate::shm::ring::{DATA, Rings, Side};

impl Links {
    /// Handles all readable sockets: new connections, first messages, wake-ups and disconnects.
    /// Packets written by a peer before disconnecting are passed to `take`. Returns the number of
    /// events.
    pub(in crate::shm) fn poll_sockets(
        &mut self,
        now: Instant,
        mut take: impl FnMut(LinkPeer, &[u8]),
    ) -> usize {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 32];
        let at_once = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ready = epoll::wait(&self.set, &mut events[..], Some(&at_once)).unwrap_or(0);
        for event in &events[..ready] {
            let data = event.data;
            match data.u64() {
                LISTENER => self.accept(now),
                KICK => {
                    let _ = rustix::io::read(&self.kick, &mut [0; 8]);
                }
                number => self.read_socket(number as u32, &mut take),
            }
        }
        ready
    }

    /// Accepts a single connection per call, so that connections are distributed between all
    /// workers sharing the listener.
    fn accept(&mut self, now: Instant) {
        let Some(listener) = self.listener.as_ref().filter(|_| self.is_attended) else {
            return;
        };
        let socket = match hello::accept(listener, &self.users) {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                if let Some(held_back) = self.lines.denials.allow_message(now) {
                    info!(%error, held_back, "rejected a connection");
                }
                self.counters.refused += 1;
                return;
            }
            // For example, there may be too many open files or sockets being closed. The listener
            // remains readable, and would keep waking the owner.
            Err(error) => {
                if let Some(held_back) = self.lines.rests.allow_message(now) {
                    warn!(%error, held_back, "cannot accept processes, retrying in a second");
                }
                self.rests_until = Some(now + REST);
                self.attend_or_warn();
                return;
            }
        };
        self.make_room();
        let until = now + GREETING;
        // The address is not known until we receive a HELLO.
        let added = self.add(socket, self.own, false, State::AwaitsHello { until });
        if let Err(error) = added {
            warn!(%error, "cannot add a link to the epoll set");
        }
    }

    /// Closes the oldest link waiting for a HELLO if there are too many of them.
    fn make_room(&mut self) {
        let greeting = |(at, slot): (usize, &Slot)| match slot.link.as_ref()?.state {
            State::AwaitsHello { until } => Some((until, at)),
            _ => None,
        };
        let all = || self.slots.iter().enumerate().filter_map(greeting);
        if all().count() >= MAX_GREETING
            && let Some((_, oldest)) = all().min()
        {
            self.counters.refused += 1;
            self.close_link(oldest);
        }
    }

    /// Handles available messages on the socket of a link.
    fn read_socket(&mut self, number: u32, take: &mut impl FnMut(LinkPeer, &[u8])) {
        let slot = number as usize % MAX_LINKS;
        for _ in 0..BELLS {
            let Some(link) = &self.slots[slot].link else {
                return;
            };
            // This event is for the previous link in this slot.
            if self.number(link.name) != Some(number) {
                return;
            }
            let outcome = match &link.state {
                State::AwaitsHello { .. } => self.greet(slot),
                State::AwaitsWelcome { .. } => self.take_welcome(slot),
                State::Up(_) => {
                    let mut bell = [0; 2];
                    match hello::receive(&link.socket, &mut bell) {
                        Message::Bytes(1) => Ok(true),
                        Message::None => Ok(false),
                        Message::Bytes(_) => Err(io::ErrorKind::InvalidData.into()),
                        Message::End => Err(io::ErrorKind::UnexpectedEof.into()),
                    }
                }
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    self.on_end(slot, &error, take);
                    return;
                }
            }
        }
    }

    fn on_end(&mut self, slot: usize, error: &io::Error, take: &mut impl FnMut(LinkPeer, &[u8])) {
        let link = self.slots[slot].link.as_ref().expect("it was read from");
        debug!(peer = %link.peer, %error, "link closed by the peer");
        if matches!(link.state, State::Up(_)) {
            // Don't lose packets sent by the peer before it disconnected.
            self.receive_from(slot, LAST_ROUND, take);
        } else {
            self.counters.refused += 1;
            // If it disconnects without sending anything, it was only checking which process is
            // listening.
            let is_silent = error.kind() == io::ErrorKind::UnexpectedEof && !link.is_outgoing;
            if !is_silent
                && let Some(held_back) = self.lines.greetings.allow_message(Instant::now())
            {
                info!(peer = %link.peer, %error, held_back, "cannot share memory with a process");
            }
        }
        self.close_link(slot);
    }

    /// Receives a HELLO and sends the response. This will return `false` if it is not available
    /// yet.
    fn greet(&mut self, slot: usize) -> io::Result<bool> {
        let link = self.slots[slot].link.as_mut().expect("the caller has it");
        let mut message = [0; 64];
        let len = match hello::receive(&link.socket, &mut message) {
            Message::Bytes(len) => len,
            Message::None => return Ok(false),
            Message::End => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        link.peer = hello::parse_hello(&message[..len], self.own)?;
        let (shared, file) = SharedMemory::create("riser-shm", DATA)?;
        hello::welcome(&link.socket, file.as_fd())?;
        link.state = State::Up(Box::new(Rings::new(shared, Side::Maker)));
        self.slots[slot].last = Some((link.name, link.peer));
        self.on_up(slot);
        Ok(true)
    }

    /// Receives a WELCOME. Returns `false` if it is not available yet.
    fn take_welcome(&mut self, slot: usize) -> io::Result<bool> {
        let link = self.slots[slot].link.as_mut().expect("the caller has it");
        let Some(memory) = hello::receive_welcome(&link.socket)? else {
            return Ok(false);
        };
        let shared = SharedMemory::map(&memory, DATA)?;
        let mut rings = Rings::new(shared, Side::Taker);
        if let State::AwaitsWelcome { waiting, .. } = &link.state {
            for packet in waiting {
                if rings.begin(packet.len()).map_err(io::Error::other)? {
                    rings.write(packet);
                }
            }
        }
        link.state = State::Up(Box::new(rings));
        self.on_up(slot);
        self.publish();
        Ok(true)
    }

    fn on_up(&mut self, slot: usize) {
        self.counters.up += 1;
        if let Some(link) = &self.slots[slot].link {
            // For incoming links, the login message contains more information than this.
            match link.is_outgoing {
                true => info!(own = %self.own, peer = %link.peer, "memory is shared"),
                false => debug!(own = %self.own, peer = %link.peer, "memory is shared"),
            }
        }
    }
}
