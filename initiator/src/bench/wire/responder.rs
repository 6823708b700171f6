//! The end that answers commands.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use riser_memory::{Memory, PAGE};
use riser_transport::roce::batch::{SendOutcome, TxBatch};
use riser_transport::roce::driver::Driver;
use riser_transport::wire::IcrcFlow;

use super::packets::{Kind, Message, Received, Sender, parse};
use super::{WireError, open};
use crate::poll_fds::wait_readable;

/// Commands whose data, and then responses, leave together: the number for which the packets of
/// 4 KiB reads are fastest on loopback.
const GROUP: usize = 8;
/// Datagrams or trains that one round takes.
const RECEIVES: usize = 8;
/// Memory that data are sent from: more than a processor's nearest caches have.
const MEMORY: usize = 2 << 20;
/// Longest data of a reply.
pub(super) const MAX_REPLY: usize = 256 << 10;
/// Time without a command after which the thread sleeps.
const IDLE: Duration = Duration::from_millis(5);
/// Longest sleep, after which the end is looked for.
const NAP: Duration = Duration::from_millis(20);

/// A responder at a socket.
#[derive(Debug)]
pub struct Responder {
    driver: Driver,
    batch: TxBatch,
    memory: Memory,
    cookie: u64,
    commands: Vec<(SocketAddr, Message)>,
    sender: Option<Sender>,
}

impl Responder {
    /// A responder at an address of this host.
    ///
    /// # Errors
    /// [`WireError::Open`].
    pub fn open(addr: IpAddr) -> Result<Self, WireError> {
        let driver = open(addr).map_err(|source| WireError::Open { addr, source })?;
        Self::new(driver)
    }

    pub(super) fn new(driver: Driver) -> Result<Self, WireError> {
        let failed = |error: std::io::Error| WireError::Thread(error.to_string());
        let memory = Memory::new(MEMORY).map_err(failed)?;
        // Something that no packet consists of by chance.
        let mut random = fastrand::Rng::with_seed(1);
        let mut page = [0; PAGE];
        for at in (0..MEMORY).step_by(PAGE) {
            random.fill(&mut page);
            memory.write(at, &page);
        }
        let mut cookie = [0; 8];
        getrandom::fill(&mut cookie).map_err(|e| WireError::Thread(e.to_string()))?;
        Ok(Self {
            batch: TxBatch::new(driver.max_segments()),
            driver,
            memory,
            cookie: u64::from_ne_bytes(cookie),
            commands: Vec::with_capacity(256),
            sender: None,
        })
    }

    /// Answers commands until `stop` is set. It polls while commands come, and sleeps otherwise.
    pub fn run(&mut self, stop: &AtomicBool) {
        let mut last = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            if self.turn(now) {
                last = now;
            } else if now.saturating_duration_since(last) > IDLE && self.driver.arm() {
                wait_readable(&[self.driver.fd()], Some(NAP));
            }
        }
    }

    /// Answers the commands that have come. Returns whether there were any.
    fn turn(&mut self, now: Instant) -> bool {
        let mut commands = std::mem::take(&mut self.commands);
        let local = self.driver.local_addr();
        let cookie = self.cookie;
        self.driver.receive(RECEIVES, |src, segment, bytes, _| {
            for (index, packet) in bytes.chunks(segment).enumerate() {
                commands.extend(take(packet, src, local, cookie, index as u16).map(|m| (src, m)));
            }
        });
        let worked = !commands.is_empty();
        for run in commands.chunk_by(|a, b| a.0 == b.0) {
            self.answer(run, now);
        }
        commands.clear();
        self.commands = commands;
        worked
    }

    /// Answers commands of one requester: the data of a group first, then its responses, so that
    /// packets of one length follow one another.
    fn answer(&mut self, commands: &[(SocketAddr, Message)], now: Instant) {
        let (src, first) = commands[0];
        let known = self.sender.take().filter(|sender| sender.peer() == src);
        let sender = known.or_else(|| Sender::new(self.driver.local_addr(), src));
        let Some(mut sender) = sender else { return };
        if first.is(Kind::Command) {
            sender.push_acknowledge(&mut self.batch);
        }
        for group in commands.chunks(GROUP) {
            for (_, command) in group {
                let len = (command.len.get() as usize).min(MAX_REPLY);
                if len == 0 || command.is(Kind::Hello) {
                    continue;
                }
                let slots = (MEMORY - MAX_REPLY) / PAGE;
                let at = command.seq.get() as usize * (len / PAGE).max(1) % slots * PAGE;
                let data = self.memory.slice(at..at + len).expect("within the memory");
                let mtu = usize::from(command.mtu.get()).clamp(256, PAGE);
                let va = u64::from(command.seq.get()) * len as u64;
                sender.push_data(&mut self.batch, &data, va, mtu, command.has_icrc());
            }
            for (_, command) in group {
                let mut response = command.response();
                response.cookie = self.cookie.into();
                sender.push_response(&mut self.batch, &response);
            }
            self.send(now);
        }
        self.sender = Some(sender);
    }

    fn send(&mut self, now: Instant) {
        while self.driver.send(now, &mut self.batch) == SendOutcome::Blocked {
            if self.driver.arm() {
                wait_readable(&[self.driver.fd()], Some(NAP));
            }
        }
    }
}

/// The command that a packet brings, if it is one to be answered.
fn take(
    packet: &[u8],
    src: SocketAddr,
    local: SocketAddr,
    cookie: u64,
    index: u16,
) -> Option<Message> {
    let Received::Message(message) = parse(packet)? else {
        return None;
    };
    // A requester that does not know the cookie may have another's address: it gets no more than it
    // sends.
    let may_ask = message.is(Kind::Command) && message.cookie.get() == cookie;
    if !may_ask && !message.is(Kind::Hello) {
        return None;
    }
    if message.has_icrc() {
        IcrcFlow::new(src, local)?.check(packet, index).ok()?;
    }
    Some(message)
}
