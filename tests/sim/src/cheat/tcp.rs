//! Cheating over TCP: malformed streams, promised data that never arrive, and responses left unread.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_tests::mutator::Mutator;

use super::{Act, CheatPlan, Pace, Surroundings, address, command, login, set_number};
use crate::initiator::{Dial, Dialed};
use crate::target;

static MESSAGES: LazyLock<Mutator> = LazyLock::new(|| Mutator::of_pdus(0, 0));

/// Time after which it connects again.
const AGAIN: Duration = Duration::from_millis(20);

/// A peer of iSCSI.
#[derive(Debug)]
pub struct TcpCheat {
    index: usize,
    pace: Pace,
    mutator: Mutator,
    dialed: Dialed,
    stream: Option<UnixStream>,
    /// What has not been written yet.
    leaving: Vec<u8>,
    /// The number of the next command, and its tag.
    number: u32,
    /// Until when it neither reads nor writes.
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
            stream: None,
            leaving: Vec::new(),
            number: 1,
            silent_until: now,
            dials_at: now,
            scratch: vec![0; 16 << 10],
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let next = match self.stream {
            // Until the target takes what there is, there is nothing to wait for here.
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
            return self.dials_at <= now && self.pace.left > 0 && self.dial();
        }
        let mut worked = self.write() | self.read(now);
        // Not while the target does not take what there is.
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
                let rng = &mut self.pace.rng;
                self.leaving = match rng.u8(..4) {
                    0 => {
                        self.number += 1;
                        command(rng, self.number - 1).to_vec()
                    }
                    _ => {
                        let mut pdu = self.mutator.message();
                        set_number(rng, &mut pdu, &mut self.number);
                        pdu
                    }
                };
                // A part of it, and the rest never.
                if self.pace.rng.u8(..16) == 0 {
                    let len = self.pace.rng.usize(..=self.leaving.len());
                    self.leaving.truncate(len);
                }
                self.write();
            }
        }
    }

    fn dial(&mut self) -> bool {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).expect("a socket");
        }
        self.dialed.borrow_mut().push(Dial {
            from: address(self.index),
            to: target::tcp_address(0),
            stream: theirs,
        });
        self.stream = Some(ours);
        self.number = 1;
        // Some begin with anything else.
        self.leaving = match self.pace.rng.u8(..6) {
            0 => self.mutator.message(),
            _ => login(self.index, ""),
        };
        true
    }

    fn leave(&mut self, now: Instant) {
        self.stream = None;
        self.leaving.clear();
        self.dials_at = now + AGAIN;
    }

    fn write(&mut self) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        match stream.write(&self.leaving) {
            Ok(len) => {
                self.leaving.drain(..len);
                len > 0
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            // The end shows when it reads.
            Err(_) => {
                self.leaving.clear();
                true
            }
        }
    }

    fn read(&mut self, now: Instant) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        match stream.read(&mut self.scratch) {
            Ok(0) => self.leave(now),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(_) => self.leave(now),
        }
        true
    }
}
