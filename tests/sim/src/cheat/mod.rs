//! Peers that cheat, at a target and a unit of their own beside the honest ones.
//!
//! They send any message in any state ([`Mutator`]), promise data and do not send them, do not read,
//! say nothing at all, announce memory and take it away, use keys that are not theirs, acknowledge
//! what was not sent, and log in over their own sessions. They go on for as long as honest
//! initiators have work, and keep then what they have, so that only a target which bounds what it
//! gives to each has something left for others.
//!
//! [`Mutator`]: riser_tests::mutator::Mutator

mod rdma;
mod tcp;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::srp::TargetPortId;
use riser_transport::loopback::Fabric;
use serde::{Deserialize, Serialize};

pub use self::rdma::Overheard;
use self::rdma::RdmaCheat;
use self::tcp::TcpCheat;
use crate::initiator::Dialed;
use crate::plan::Protocol;

/// Name of the iSCSI target that is theirs.
pub const IQN: &str = "iqn.2026-01.org.example:cheats";

/// Port of its SRP portals.
pub const SRP_PORT: u16 = 6555;

/// Times for which a peer says nothing. The last outlasts every patience.
const SILENCES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(200),
    Duration::from_secs(8),
    Duration::from_secs(200),
];

/// What a cheating peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheatPlan {
    /// Its protocol.
    pub protocol: Protocol,
    /// Messages that it sends.
    pub messages: usize,
    /// Of 32 actions, those that are silences.
    pub silences: u8,
    /// Of 32 actions, those that leave a connection without a word, for another one.
    pub departures: u8,
}

impl Default for CheatPlan {
    /// One that sends what it likes.
    fn default() -> Self {
        Self {
            protocol: Protocol::Iscsi,
            messages: 20,
            silences: 0,
            departures: 0,
        }
    }
}

impl CheatPlan {
    /// A cheating peer of a seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            protocol: [Protocol::Srp, Protocol::Iser, Protocol::Iscsi][rng.usize(..3)],
            messages: rng.usize(5..=80),
            silences: [0, 2, 8][rng.usize(..3)],
            departures: [0, 1, 4][rng.usize(..3)],
        }
    }
}

/// Address of a cheating peer.
#[must_use]
pub fn address(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 2, 1 + index as u8))
}

/// What a peer needs of the world.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The RDMA network.
    pub fabric: Fabric,
    /// Streams that it opens.
    pub dialed: Dialed,
    /// The SRP port of its target.
    pub port: TargetPortId,
    /// What it has seen of its own packets.
    pub overheard: Overheard,
}

/// A cheating peer.
#[derive(Debug)]
pub enum Cheat {
    /// Over RDMA.
    Rdma(Box<RdmaCheat>),
    /// Over TCP.
    Tcp(Box<TcpCheat>),
}

impl Cheat {
    /// A peer that is about to connect; the index distinguishes it from others.
    #[must_use]
    pub fn new((index, plan): (usize, CheatPlan), world: &Surroundings, rng: Rng) -> Self {
        match plan.protocol {
            Protocol::Iscsi => Self::Tcp(Box::new(TcpCheat::new(index, plan, world, rng))),
            _ => Self::Rdma(Box::new(RdmaCheat::new(index, plan, world, rng))),
        }
    }

    /// Does what there is to do; returns whether there was anything.
    pub fn step(&mut self, now: Instant) -> bool {
        match self {
            Self::Rdma(cheat) => cheat.step(now),
            Self::Tcp(cheat) => cheat.step(now),
        }
    }

    /// When the next thing happens by itself.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Rdma(cheat) => cheat.next_deadline(),
            Self::Tcp(cheat) => cheat.next_deadline(),
        }
    }
}

/// When it acts, and what is left to do.
#[derive(Debug)]
struct Pace {
    plan: CheatPlan,
    rng: Rng,
    left: usize,
    next: Instant,
}

/// What to do next.
enum Act {
    Message,
    Silence(Duration),
    Departure,
}

impl Pace {
    fn new(plan: CheatPlan, rng: Rng, now: Instant) -> Self {
        Self {
            plan,
            rng,
            left: plan.messages,
            next: now,
        }
    }

    /// The next thing to do, if it is time for it.
    fn act(&mut self, now: Instant) -> Option<Act> {
        if self.left == 0 || self.next > now {
            return None;
        }
        self.left -= 1;
        // Bursts, and pauses.
        let most = [1, 300, 10_000][self.rng.usize(..3)];
        self.next = now + Duration::from_micros(self.rng.u64(..most));
        let (silences, departures) = (self.plan.silences, self.plan.departures);
        Some(match self.rng.u8(..32) {
            n if n < silences => Act::Silence(SILENCES[self.rng.usize(..SILENCES.len())]),
            n if n < silences.saturating_add(departures) => Act::Departure,
            _ => Act::Message,
        })
    }

    fn next(&self) -> Option<Instant> {
        (self.left > 0).then_some(self.next)
    }
}

/// A Login Request with the name of a peer.
fn login(index: usize, more: &str) -> Vec<u8> {
    let name = format!("iqn.2026-01.org.example:cheat{index}");
    let isid = [0x80, 0, 0, 0, 2, index as u8];
    let more = format!("InitialR2T=Yes\0ImmediateData=No\0{more}");
    riser_test_peers::pdus::login(isid, &name, IQN, &more)
}

/// Gives a changed PDU the number of the next command as a rule, without which a target looks at its
/// header only.
fn set_number(rng: &mut Rng, pdu: &mut [u8], number: &mut u32) {
    if let Some(field) = pdu.get_mut(24..28)
        && rng.u8(..4) > 0
    {
        field.copy_from_slice(&number.to_be_bytes());
        // One that the target does not count makes a gap, which the next of another kind may fill.
        *number += u32::from(rng.bool());
    }
}

/// A WRITE of 16 to 512 blocks, whose data never come, or a READ, with the header of its PDU.
fn command(rng: &mut Rng, number: u32) -> [u8; 48] {
    let blocks = rng.u16(16..=512);
    let writes = rng.bool();
    let mut cdb = [0; 16];
    cdb[..10].copy_from_slice(&riser_test_peers::pdus::cdb10(
        if writes { 0x2a } else { 0x28 },
        rng.u32(..64),
        blocks,
    ));
    let len = u32::from(blocks) * 512;
    riser_test_peers::pdus::scsi_command(0x100 + number, number, &cdb, writes, len).header()
}
