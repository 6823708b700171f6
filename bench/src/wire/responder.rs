//! Responder: sends data and responses for commands.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use riser_block::poll_fds::wait_readable;
use riser_memory::{Memory, PAGE};
use riser_transport::nic::batch::{SendOutcome, TxBatch};
use riser_transport::roce::driver::Driver;
use riser_transport::wire::IcrcFlow;

use super::packets::{Kind, Message, Received, Sender, parse};
use super::{WireError, open};

/// Number of commands for which we first send all data, followed by all responses. This value is
/// the fastest for 4 KiB reads on loopback.
const GROUP: usize = 8;
/// Maximum number of datagrams or trains received in a round.
const RECEIVES: usize = 8;
/// Size of the memory used as the source of data. This is larger than the L1 and L2 caches of most
/// processors.
const MEMORY: usize = 2 << 20;
/// Maximum amount of data for a command.
pub(super) const MAX_REPLY: usize = 256 << 10;
/// Time without commands before the thread can sleep.
const IDLE: Duration = Duration::from_millis(5);
/// Maximum sleep before checking whether to stop.
const NAP: Duration = Duration::from_millis(20);

/// A responder and its socket.
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
    /// Opens a responder with an address of this host.
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
        // Random data which can't be in any other packet by chance.
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

    /// Processes commands until `stop` is set. This polls while commands are being received and
    /// sleeps otherwise.
    pub fn run(&mut self, stop: &AtomicBool) {
        let mut last = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            if self.run_once(now) {
                last = now;
            } else if now.saturating_duration_since(last) > IDLE && self.driver.arm() {
                wait_readable(&[self.driver.fd()], Some(NAP));
            }
        }
    }

    /// Processes all received commands. Returns whether there were any.
    fn run_once(&mut self, now: Instant) -> bool {
        let mut commands = std::mem::take(&mut self.commands);
        let local = self.driver.local_addr();
        let cookie = self.cookie;
        self.driver.receive(RECEIVES, |src, segment, bytes, _| {
            for (index, packet) in bytes.chunks(segment).enumerate() {
                commands.extend(
                    accept_command(packet, src, local, cookie, index as u16).map(|m| (src, m)),
                );
            }
        });
        let worked = !commands.is_empty();
        for run in commands.chunk_by(|a, b| a.0 == b.0) {
            self.send_responses(run, now);
        }
        commands.clear();
        self.commands = commands;
        worked
    }

    /// Processes commands from a requester. For each group, all data is sent before the responses,
    /// so that packets of the same length are adjacent.
    fn send_responses(&mut self, commands: &[(SocketAddr, Message)], now: Instant) {
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

/// Returns the command in a packet, if it should be processed.
fn accept_command(
    packet: &[u8],
    src: SocketAddr,
    local: SocketAddr,
    cookie: u64,
    index: u16,
) -> Option<Message> {
    let Received::Message(message) = parse(packet)? else {
        return None;
    };
    // Without a valid cookie, the source address may be spoofed, so we must not send more than we
    // received.
    let may_request = message.is(Kind::Command) && message.cookie.get() == cookie;
    if !may_request && !message.is(Kind::Hello) {
        return None;
    }
    if message.has_icrc() {
        IcrcFlow::new(src, local)?.check(packet, index).ok()?;
    }
    Some(message)
}
