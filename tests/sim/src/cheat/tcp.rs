//! Cheating over TCP: malformed streams, promised data that never arrive, and responses left unread.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::iscsi::frame::Framer;
use riser_tests::mutator::Mutator;

use super::{
    Act, Aim, CheatPlan, HostileCommand, Names, Pace, Sniffer, Surroundings, address, set_number,
};
use crate::initiator::{Dial, Dialed};
use crate::stream::Stream;
use crate::target;

static MESSAGES: LazyLock<Mutator> = LazyLock::new(|| Mutator::of_pdus(0, 0));

/// Delay before it reconnects.
const AGAIN: Duration = Duration::from_millis(20);

/// MaxRecvDataSegmentLength of the peer in bytes.
const MAX_RECV: u32 = 1 << 20;

/// A cheating iSCSI peer.
#[derive(Debug)]
pub struct TcpCheat {
    index: usize,
    pace: Pace,
    mutator: Mutator,
    dialed: Dialed,
    sniffer: Sniffer,
    /// The initiator that it impersonates.
    victim: Option<u8>,
    stream: Option<UnixStream>,
    /// Parser for received data, if it is read.
    framer: Framer,
    /// Data that was not sent yet.
    leaving: Vec<u8>,
    /// CmdSN and tag of the next command.
    number: u32,
    /// It neither reads nor writes until this time.
    silent_until: Instant,
    dials_at: Instant,
    scratch: Vec<u8>,
}

impl TcpCheat {
    pub(super) fn new(index: usize, plan: CheatPlan, world: &Surroundings, mut rng: Rng) -> Self {
        let now = world.fabric.now();
        Self {
            index,
            mutator: MESSAGES.with_seed(rng.u64(..), 1),
            pace: Pace::new(plan, rng, now),
            dialed: world.dialed.clone(),
            sniffer: world.sniffer.clone(),
            victim: plan.aim.victim().map(|victim| world.host(victim)),
            stream: None,
            framer: Framer::new(MAX_RECV),
            leaving: Vec::new(),
            number: 1,
            silent_until: now,
            dials_at: now,
            scratch: vec![0; 16 << 10],
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let next = match self.stream {
            // We don't need a timer while the target doesn't accept more data.
            Some(_) => self.pace.next().filter(|_| self.leaving.is_empty()),
            None => self.pace.next().map(|next| next.max(self.dials_at)),
        };
        next.map(|next| next.max(self.silent_until))
    }

    pub(super) fn step(&mut self, now: Instant) -> bool {
        if self.silent_until > now {
            return false;
        }
        if self.stream.is_none() {
            return self.dials_at <= now && self.pace.may_dial(now) && self.dial(now);
        }
        let mut worked = self.write(now);
        if !self.pace.plan.deaf {
            worked |= self.read(now);
        }
        // Don't continue while the target doesn't accept more data.
        while self.stream.is_some()
            && self.leaving.is_empty()
            && self.silent_until <= now
            && let Some(act) = self.pace.act(now)
        {
            self.act(act, now);
            worked = true;
        }
        worked
    }

    fn act(&mut self, act: Act, now: Instant) {
        match act {
            Act::Silence(time) => self.silent_until = now + time,
            Act::Departure => self.leave(now),
            Act::Message => {
                let (rng, aim) = (&mut self.pace.rng, self.pace.plan.aim);
                let is_command = aim != Aim::Own || rng.u8(..4) == 0;
                self.leaving = match is_command {
                    true => {
                        let number = self.number;
                        self.number = number.wrapping_add(1);
                        HostileCommand::draw(aim, rng).pdu(number).to_vec()
                    }
                    false => {
                        let mut pdu = self.mutator.message();
                        set_number(rng, &mut pdu, &mut self.number);
                        pdu
                    }
                };
                // Only send part of the message.
                if aim == Aim::Own && self.pace.rng.u8(..16) == 0 {
                    let len = self.pace.rng.usize(..=self.leaving.len());
                    self.leaving.truncate(len);
                }
                self.write(now);
            }
        }
    }

    fn dial(&mut self, now: Instant) -> bool {
        // A thief may not have any names yet.
        let Some(names) = self.names() else {
            self.dials_at = now + AGAIN;
            return false;
        };
        let (ours, theirs) = Stream::with_plain_socket().expect("two sockets");
        self.dialed.borrow_mut().push(Dial {
            from: address(self.index),
            to: target::tcp_address(0),
            stream: theirs,
        });
        self.stream = Some(ours);
        self.number = 1;
        self.framer = Framer::new(MAX_RECV);
        let aim = self.pace.plan.aim;
        // Sometimes start with another message.
        self.leaving = match self.pace.rng.u8(..6) {
            0 if aim == Aim::Own => self.mutator.message(),
            _ => names.login(aim, ""),
        };
        true
    }

    /// Returns the names for its login.
    fn names(&mut self) -> Option<Names> {
        let Some(victim) = self.victim else {
            return Some(Names::own(self.index));
        };
        let mut names = self.sniffer.stolen(victim, |host| host.names.clone())?;
        // Reinstates the victim's session, or joins it or another session, either with a new
        // connection or by reinstating an existing one.
        let rng = &mut self.pace.rng;
        match rng.u8(..4) {
            0 => names.tsih = 0,
            1 => names.tsih = rng.u16(1..),
            _ => {}
        }
        names.cid = [0, 1, 77][rng.usize(..3)];
        Some(names)
    }

    fn leave(&mut self, now: Instant) {
        self.stream = None;
        self.leaving.clear();
        self.dials_at = now + AGAIN;
    }

    fn write(&mut self, now: Instant) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        match stream.write(&self.leaving) {
            Ok(len) => {
                self.leaving.drain(..len);
                len > 0
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            // If the peer reads, this will detect that the connection was closed.
            Err(_) => {
                self.leaving.clear();
                if self.pace.plan.deaf {
                    self.leave(now);
                }
                true
            }
        }
    }

    /// Parses received data: we need to know the next CmdSN and to respond to pings, because
    /// otherwise the target would close the connection soon.
    fn consume_bytes(&mut self, len: usize) {
        const LOGIN_RESPONSE: u8 = 0x23;
        const NOP_IN: u8 = 0x20;
        let mut bytes = &self.scratch[..len];
        while !bytes.is_empty()
            && let Ok((used, frame)) = self.framer.next(bytes)
        {
            bytes = &bytes[used..];
            let Some(bhs) = frame.map(|frame| *frame.bhs) else {
                continue;
            };
            match bhs[0] & 0x3f {
                LOGIN_RESPONSE => {
                    let next = bhs[28..32].try_into().expect("four bytes");
                    self.number = u32::from_be_bytes(next);
                }
                NOP_IN if bhs[20..24] != [0xff; 4] => {
                    let mut response = [0; 48];
                    // Immediate and final, with the target's TTT, but without an ITT.
                    (response[0], response[1]) = (0x40, 0x80);
                    response[8..16].copy_from_slice(&bhs[8..16]);
                    response[16..20].fill(0xff);
                    response[20..24].copy_from_slice(&bhs[20..24]);
                    response[24..28].copy_from_slice(&self.number.to_be_bytes());
                    self.leaving.extend_from_slice(&response);
                }
                _ => {}
            }
        }
    }

    fn read(&mut self, now: Instant) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        match stream.read(&mut self.scratch) {
            Ok(0) => self.leave(now),
            Ok(_) if self.pace.plan.aim == Aim::Own => {}
            Ok(len) => self.consume_bytes(len),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(_) => self.leave(now),
        }
        true
    }
}
