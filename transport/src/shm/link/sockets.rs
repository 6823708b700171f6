//! What comes over the sockets of links: connections, first messages, wake-ups, ends.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

use riser_memory::shared::SharedMemory;
use rustix::event::epoll;
use tracing::{debug, info, warn};

use super::{
    BELLS, GREETING, KICK, LAST_ROUND, LISTENER, Links, MAX_GREETING, MAX_LINKS, REST, Slot, State,
};
use crate::roce::nic::LinkPeer;
use crate::shm::hello::{self, Message};
use crate::shm::ring::{DATA, Rings, Side};

impl Links {
    /// Looks at the sockets that are readable: other processes that connect, first messages,
    /// wake-ups, ends. Packets that a peer has left before its end go to `take`. Returns how much
    /// there was.
    pub(in crate::shm) fn look(
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

    /// Accepts one process: each look takes one, so that workers that share a listener share what
    /// comes there.
    fn accept(&mut self, now: Instant) {
        let Some(listener) = self.listener.as_ref().filter(|_| self.is_attended) else {
            return;
        };
        let socket = match hello::accept(listener, &self.users) {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                if let Some(held_back) = self.lines.denials.pass(now) {
                    info!(%error, held_back, "a process is refused");
                }
                self.counters.refused += 1;
                return;
            }
            // Such as too many open files, or too many sockets that are being closed. The listener
            // stays readable, and would keep the owner from sleeping.
            Err(error) => {
                if let Some(held_back) = self.lines.rests.pass(now) {
                    warn!(%error, held_back, "no process can be accepted for a second");
                }
                self.rests_until = Some(now + REST);
                self.attend_or_warn();
                return;
            }
        };
        self.make_room();
        let until = now + GREETING;
        // Its address is known with its HELLO.
        let added = self.add(socket, self.own, false, State::AwaitsHello { until });
        if let Err(error) = added {
            warn!(%error, "a link cannot be watched");
        }
    }

    /// Gives the place of the oldest link that has not said hello to another one, if there are too
    /// many such.
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
            self.end(oldest);
        }
    }

    /// Reads what has come over the socket of a link.
    fn read_socket(&mut self, number: u32, take: &mut impl FnMut(LinkPeer, &[u8])) {
        let slot = number as usize % MAX_LINKS;
        for _ in 0..BELLS {
            let Some(link) = &self.slots[slot].link else {
                return;
            };
            // An event of the link that was here before.
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
        debug!(peer = %link.peer, %error, "the end of a link");
        if matches!(link.state, State::Up(_)) {
            // Packets that the peer sent before its end count.
            self.receive_from(slot, LAST_ROUND, take);
        } else {
            self.counters.refused += 1;
            // One that goes without a word has only looked who is here.
            let is_silent = error.kind() == io::ErrorKind::UnexpectedEof && !link.is_outgoing;
            if !is_silent && let Some(held_back) = self.lines.greetings.pass(Instant::now()) {
                info!(peer = %link.peer, %error, held_back, "no memory is shared with a process");
            }
        }
        self.end(slot);
    }

    /// Takes a HELLO and answers it; false while it has not come.
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

    /// Takes a WELCOME; false while it has not come.
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
            // Of what others begin, logins say more than this.
            match link.is_outgoing {
                true => info!(own = %self.own, peer = %link.peer, "memory is shared"),
                false => debug!(own = %self.own, peer = %link.peer, "memory is shared"),
            }
        }
    }
}
