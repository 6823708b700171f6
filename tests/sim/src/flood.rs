//! An iSCSI peer that sends many pings but doesn't read the responses for some time. Memory that
//! the target uses for it must be limited ([`crate::memory`]).

use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::InitiatorConfig;
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Tsih};
use riser_test_peers::pdus;

use crate::initiator::{self, Dial, Dialed};
use crate::rival::connection::{Connection, Event};
use crate::stream::Stream;
use crate::target;

/// Its initiator number, which is not used by any other.
const NUMBER: usize = 41;

/// Maximum data length of a ping in bytes.
const DATA: u32 = 64 << 10;

/// Timeout for the login and for responses.
const PATIENCE: Duration = Duration::from_secs(30);

/// State of the connection.
#[derive(Debug)]
enum Stage {
    LoggingIn,
    /// Not reading until this time.
    Deaf {
        until: Instant,
    },
    /// Reading responses, then leaving.
    Reading {
        until: Instant,
    },
    Over,
}

/// A flooding peer, see the module documentation.
#[derive(Debug)]
pub struct Flood {
    connection: Connection,
    stage: Stage,
    pings: u32,
    left: u32,
    pause: Duration,
    until: Instant,
}

impl Flood {
    /// Connects a new peer that will send this number of pings.
    #[must_use]
    pub fn new(pings: u32, dialed: &Dialed, now: Instant, rng: &mut Rng) -> Self {
        let (ours, theirs) = Stream::pair();
        dialed.borrow_mut().push(Dial {
            from: initiator::address(NUMBER),
            to: target::tcp_address(0),
            stream: theirs,
        });
        let name = IscsiName::new("iqn.2026-01.org.example:flood").expect("a name");
        let config = InitiatorConfig {
            name,
            target: IscsiName::new(target::IQN).ok(),
            isid: Isid([0x80, 0, 0, 0, 9, 0]),
            tsih: Tsih(0),
            cid: Cid(0),
            cmd_sn: CmdSn(1),
            credentials: None,
            target_credentials: None,
            offer: Offer::default(),
            keys: vec![Key::InitialR2T],
        };
        Self {
            connection: Connection::new(ours, config, [8; 33], now),
            stage: Stage::LoggingIn,
            pings,
            left: pings,
            pause: [1, 100, 5_000].map(Duration::from_millis)[rng.usize(..3)],
            until: now + PATIENCE,
        }
    }

    /// Returns whether the peer has left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::LoggingIn => Some(self.until),
            Stage::Deaf { until } | Stage::Reading { until } => Some(until),
            Stage::Over => None,
        }
    }

    /// Performs pending work. Returns whether there was any.
    pub fn step(&mut self, now: Instant) -> bool {
        if self.is_over() {
            return false;
        }
        let mut worked = self.connection.step(now);
        while let Some(event) = self.connection.poll() {
            worked = true;
            match event {
                Event::Ready(..) => self.begin(now),
                Event::Pdu(..) => self.left = self.left.saturating_sub(1),
                // The target may have closed the connection because of the flood.
                Event::Ended | Event::Fault(_) => self.leave(),
            }
            if self.is_over() {
                return true;
            }
        }
        match self.stage {
            Stage::LoggingIn if self.until <= now => self.leave(),
            Stage::Deaf { until } if until <= now => {
                self.connection.is_deaf = false;
                let until = now + PATIENCE;
                self.stage = Stage::Reading { until };
            }
            Stage::Reading { until } if until <= now || self.left == 0 => self.leave(),
            _ => return worked,
        }
        true
    }

    fn begin(&mut self, now: Instant) {
        let data = vec![0x5a; self.connection.max_send.min(DATA) as usize];
        for tag in 0..self.pings {
            let ping = pdus::nop_out(tag, 1);
            self.connection.send(now, ping.header(), &data);
        }
        self.connection.is_deaf = true;
        let until = now + self.pause;
        self.stage = Stage::Deaf { until };
    }

    fn leave(&mut self) {
        self.connection.close();
        self.stage = Stage::Over;
    }
}
