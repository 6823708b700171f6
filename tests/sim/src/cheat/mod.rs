//! Cheating peers, with their own target and unit in addition to those of the honest initiators.
//!
//! They send arbitrary messages in any state ([`Mutator`]), don't send announced data, stop
//! reading, stay silent, register and invalidate memory, use foreign keys, acknowledge packets that
//! were not sent, and repeatedly log in with the same name. They continue until all honest
//! initiators have finished, and then keep their resources. A target that doesn't limit the
//! resources of each peer will therefore have none left for the others.
//!
//! Other cheating peers use the tested unit itself ([`Aim`]): they try to read data with the names
//! of honest initiators, delay the unit with commands without data, or forge packets of another
//! host. None of this may have any effect.
//!
//! [`Mutator`]: riser_tests::mutator::Mutator

mod forger;
mod rdma;
mod sniffer;
mod tcp;

use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::iscsi::pdu::{ScsiCommand, TaskAttr};
use riser_scsi::srp::TargetPortId;
use riser_test_peers::pdus;
use riser_transport::loopback::Fabric;
use serde::{Deserialize, Serialize};

use self::forger::Forger;
use self::rdma::RdmaCheat;
pub use self::sniffer::{Sniffer, is_cheat};
use self::tcp::TcpCheat;
use crate::initiator::Dialed;
use crate::plan::Protocol;
use crate::{initiator, target};

/// Name of the iSCSI target for cheating peers.
pub const IQN: &str = "iqn.2026-01.org.example:cheats";

/// Port of the SRP portals for cheating peers.
pub const SRP_PORT: u16 = 6555;

/// Durations of silence. The last one exceeds all timeouts.
const SILENCES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(200),
    Duration::from_secs(8),
    Duration::from_secs(200),
];

/// Minimum and maximum delay between two actions of a peer that continues, in microseconds.
const SELDOM: RangeInclusive<u64> = 50_000..=500_000;

/// The goal of a cheating peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aim {
    /// Sends arbitrary messages to the target for cheating peers.
    #[default]
    Own,
    /// Logs in at the tested target with the name of an initiator (or of a rival, for higher
    /// numbers) and reads. Its address has no access.
    Steal(usize),
    /// The same from an address that has access to another unit.
    StealBeside(usize),
    /// Reads from the tested target, where its address has access, but uses the SRP portal of
    /// another target, which must be rejected.
    Trespass,
    /// Has access to the tested unit, but never sends the data for its commands.
    Withhold,
    /// Forges packets of this initiator.
    Forge(usize),
}

impl Aim {
    /// Draws an aim for this protocol, so that all aims are used about equally often.
    fn draw(protocol: Protocol, rng: &mut Rng) -> Self {
        let victim = rng.usize(..4);
        match rng.u8(..6) {
            0 => Self::Steal(victim),
            1 => Self::StealBeside(victim),
            2 if protocol == Protocol::Srp => Self::Trespass,
            2 | 3 => Self::Forge(victim),
            _ => Self::Withhold,
        }
    }

    /// Returns whether this needs access rules that are different from other peers.
    fn needs_rules(self) -> bool {
        !matches!(self, Self::Own | Self::Forge(_))
    }

    /// Returns the LUN mapping at the tested target, or `None` without access.
    fn luns(self) -> Option<&'static str> {
        match self {
            Self::StealBeside(_) => Some("{ 0: c }"),
            Self::Trespass | Self::Withhold => Some("{ 0: d }"),
            Self::Own | Self::Steal(_) | Self::Forge(_) => None,
        }
    }

    /// Returns whether this only reads data without permission.
    fn is_theft(self) -> bool {
        matches!(self, Self::Steal(_) | Self::StealBeside(_) | Self::Trespass)
    }

    /// Returns whether this tries to join a session with multiple connections.
    #[must_use]
    pub fn joins(self, protocol: Protocol) -> bool {
        protocol == Protocol::Iscsi && matches!(self, Self::Steal(_) | Self::StealBeside(_))
    }

    /// Returns the initiator that this impersonates.
    fn victim(self) -> Option<usize> {
        match self {
            Self::Steal(victim) | Self::StealBeside(victim) | Self::Forge(victim) => Some(victim),
            _ => None,
        }
    }
}

/// Returns access rules of the tested target for cheating peers, if needed. No other rules may
/// include their addresses.
#[must_use]
pub fn rules(cheats: &[CheatPlan]) -> Option<String> {
    cheats.iter().find(|one| one.aim.needs_rules())?;
    let rule = |(index, one): (usize, &CheatPlan)| {
        let luns = one.aim.luns()?;
        let address = address(index);
        Some(format!("{{ address: {address}, luns: {luns} }}, "))
    };
    Some(cheats.iter().enumerate().filter_map(rule).collect())
}

/// The plan of a cheating peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheatPlan {
    /// Protocol of the peer.
    pub protocol: Protocol,
    /// Goal of the peer.
    pub aim: Aim,
    /// Never reads.
    pub deaf: bool,
    /// Acknowledges packets before they were received.
    pub hasty: bool,
    /// Continues from time to time after all messages until the other peers have finished.
    pub lasts: bool,
    /// Number of messages.
    pub messages: usize,
    /// Number of silences per 32 actions.
    pub silences: u8,
    /// Number of connections that are abandoned per 32 actions.
    pub departures: u8,
}

impl Default for CheatPlan {
    /// A peer that sends arbitrary messages.
    fn default() -> Self {
        Self {
            protocol: Protocol::Iscsi,
            aim: Aim::Own,
            deaf: false,
            hasty: false,
            lasts: false,
            messages: 20,
            silences: 0,
            departures: 0,
        }
    }
}

impl CheatPlan {
    /// Draws a cheating peer for a seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            protocol: [Protocol::Srp, Protocol::Iser, Protocol::Iscsi][rng.usize(..3)],
            messages: rng.usize(5..=80),
            silences: [0, 2, 8][rng.usize(..3)],
            departures: [0, 1, 4][rng.usize(..3)],
            ..Self::default()
        }
    }

    /// Draws further properties and peers for a seed, using another sequence of random numbers.
    pub fn extend(all: &mut Vec<Self>, rng: &mut Rng) {
        for _ in 0..[0, 0, 0, 1, 2][rng.usize(..5)] {
            let one = Self::draw(rng);
            let aim = Aim::draw(one.protocol, rng);
            all.push(Self { aim, ..one });
        }
        for one in all {
            one.lasts = true;
            one.deaf = one.aim == Aim::Own && rng.u8(..5) == 0;
            one.hasty = one.aim == Aim::Own && rng.u8(..3) == 0;
        }
    }
}

/// Returns the address of a cheating peer.
#[must_use]
pub fn address(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 2, 1 + index as u8))
}

/// Environment of a cheating peer.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// RDMA network.
    pub fabric: Fabric,
    /// Streams opened by the peer.
    pub dialed: Dialed,
    /// SRP port of the target for cheating peers.
    pub port: TargetPortId,
    /// SRP port of the tested target.
    pub honest: TargetPortId,
    /// Number of initiators and of rivals.
    pub hosts: (usize, usize),
    /// Eavesdropped packets.
    pub sniffer: Sniffer,
}

impl Surroundings {
    /// Returns the last byte of the victim's address, which is an initiator or a rival.
    fn host(&self, victim: usize) -> u8 {
        let (initiators, rivals) = self.hosts;
        let index = victim % (initiators + rivals).max(1);
        match index.checked_sub(initiators) {
            None => sniffer::host(initiator::address(index)),
            Some(rival) => 200 + rival as u8,
        }
    }
}

/// A cheating peer.
#[derive(Debug)]
pub enum Cheat {
    /// Over RDMA.
    Rdma(Box<RdmaCheat>),
    /// Over TCP.
    Tcp(Box<TcpCheat>),
    /// Not a participant of the connection.
    Forger(Box<Forger>),
}

impl Cheat {
    /// Creates a peer that is about to connect. The index must be unique.
    #[must_use]
    pub fn new((index, plan): (usize, CheatPlan), world: &Surroundings, rng: Rng) -> Self {
        match plan.protocol {
            _ if matches!(plan.aim, Aim::Forge(_)) => {
                Self::Forger(Box::new(Forger::new(plan, world, rng)))
            }
            Protocol::Iscsi => Self::Tcp(Box::new(TcpCheat::new(index, plan, world, rng))),
            _ => Self::Rdma(Box::new(RdmaCheat::new(index, plan, world, rng))),
        }
    }

    /// Performs pending work. Returns whether there was any.
    pub fn step(&mut self, now: Instant) -> bool {
        match self {
            Self::Rdma(cheat) => cheat.step(now),
            Self::Tcp(cheat) => cheat.step(now),
            Self::Forger(cheat) => cheat.step(now),
        }
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Rdma(cheat) => cheat.next_deadline(),
            Self::Tcp(cheat) => cheat.next_deadline(),
            Self::Forger(cheat) => cheat.next_deadline(),
        }
    }
}

/// Schedules the actions of a peer.
#[derive(Debug)]
struct Pace {
    plan: CheatPlan,
    rng: Rng,
    left: usize,
    next: Instant,
}

/// The next action.
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

    /// Returns the next action if it is due.
    fn act(&mut self, now: Instant) -> Option<Act> {
        if !self.is_active() || self.next > now {
            return None;
        }
        self.left = self.left.saturating_sub(1);
        // Actions are sent in bursts, and less often if all messages have been sent.
        let most = [1, 300, 10_000][self.rng.usize(..3)];
        let mut pause = self.rng.u64(..most);
        if self.left == 0 && self.plan.lasts {
            pause = self.rng.u64(SELDOM);
        }
        self.next = now + Duration::from_micros(pause);
        let (silences, mut departures) = (self.plan.silences, self.plan.departures);
        // Thieves try all ways in turn.
        if self.plan.aim.is_theft() {
            departures = departures.max(4);
        }
        Some(match self.rng.u8(..32) {
            n if n < silences => Act::Silence(SILENCES[self.rng.usize(..SILENCES.len())]),
            n if n < silences.saturating_add(departures) => Act::Departure,
            _ => Act::Message,
        })
    }

    /// Returns whether the peer may connect now. This is counted as an action if it could otherwise
    /// continue forever.
    fn may_dial(&mut self, now: Instant) -> bool {
        let is_free = self.left > 0 && self.plan.aim == Aim::Own;
        is_free || self.act(now).is_some()
    }

    /// Returns whether there are more actions.
    fn is_active(&self) -> bool {
        self.left > 0 || self.plan.lasts
    }

    fn next(&self) -> Option<Instant> {
        self.is_active().then_some(self.next)
    }
}

/// Names for logging in at an iSCSI target.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names {
    initiator: String,
    isid: [u8; 6],
    /// TSIH of a session to join, or zero for a new session.
    tsih: u16,
    /// CID of the connection.
    cid: u16,
}

impl Names {
    /// Returns the peer's own names.
    fn own(index: usize) -> Self {
        Self {
            initiator: format!("iqn.2026-01.org.example:cheat{index}"),
            isid: [0x80, 0, 0, 0, 2, index as u8],
            tsih: 0,
            cid: 0,
        }
    }

    /// Builds a Login Request with these names.
    fn login(&self, aim: Aim, more: &str) -> Vec<u8> {
        let target = match aim {
            Aim::Own => IQN,
            _ => target::IQN,
        };
        let more = format!("InitialR2T=Yes\0ImmediateData=No\0{more}");
        let mut login = pdus::login(self.isid, &self.initiator, target, &more);
        if self.tsih != 0 {
            // A connection that joins a session must not negotiate keys of the session.
            let text = format!("InitiatorName={}\0TargetName={target}\0", self.initiator);
            login[7] = text.len() as u8;
            (login[5], login[6]) = (0, (text.len() >> 8) as u8);
            login.truncate(48);
            login.extend_from_slice(text.as_bytes());
            login.resize(login.len().next_multiple_of(4), 0);
        }
        login[14..16].copy_from_slice(&self.tsih.to_be_bytes());
        login[20..22].copy_from_slice(&self.cid.to_be_bytes());
        login
    }
}

/// Usually sets the next CmdSN in a mutated PDU, because otherwise the target would only check the
/// header.
fn set_number(rng: &mut Rng, pdu: &mut [u8], number: &mut u32) {
    if let Some(field) = pdu.get_mut(24..28)
        && rng.u8(..4) > 0
    {
        field.copy_from_slice(&number.to_be_bytes());
        // If the target doesn't count this PDU, there is a gap which the next PDU may fill.
        *number += u32::from(rng.bool());
    }
}

/// A command to send.
#[derive(Clone, Copy, Debug)]
struct HostileCommand {
    lun: u16,
    cdb: [u8; 16],
    writes: bool,
    /// Data length in bytes.
    len: u32,
    /// Set for ORDERED commands.
    is_ordered: bool,
}

impl HostileCommand {
    /// Draws the next command for this aim.
    fn draw(aim: Aim, rng: &mut Rng) -> Self {
        match aim {
            Aim::Withhold => Self::withheld(rng),
            _ if aim.is_theft() => Self {
                // The shared unit, the private unit as seen by its owner, and units with other
                // LUNs.
                lun: [0, 0, 1, rng.u16(9..13)][rng.usize(..4)],
                ..Self::transfer(false, rng.u16(1..=16), rng)
            },
            _ => {
                let blocks = rng.u16(16..=512);
                Self::transfer(rng.bool(), blocks, rng)
            }
        }
    }

    /// Returns a READ or WRITE command.
    fn transfer(writes: bool, blocks: u16, rng: &mut Rng) -> Self {
        let mut cdb = [0; 16];
        let opcode = if writes { 0x2a } else { 0x28 };
        cdb[..10].copy_from_slice(&pdus::cdb10(opcode, rng.u32(..64), blocks));
        Self {
            lun: 0,
            cdb,
            writes,
            len: u32::from(blocks) * 512,
            is_ordered: false,
        }
    }

    /// Draws a command that would delay other commands if its data were sent. This never happens,
    /// so it must not have any effect.
    fn withheld(rng: &mut Rng) -> Self {
        let base = Self {
            is_ordered: rng.bool(),
            ..Self::transfer(true, rng.u16(1..=512), rng)
        };
        let mut cdb = [0; 16];
        let len = match rng.u8(..4) {
            0 => {
                // COMPARE AND WRITE of a block.
                (cdb[0], cdb[9], cdb[13]) = (0x89, rng.u8(..16), 1);
                1024
            }
            1 => {
                // PERSISTENT RESERVE OUT: REGISTER, or PREEMPT AND ABORT.
                (cdb[0], cdb[1], cdb[2], cdb[8]) = (0x5f, [0, 5][rng.usize(..2)], 1, 24);
                24
            }
            _ => return base,
        };
        Self { cdb, len, ..base }
    }

    /// Encodes the command as a PDU.
    fn pdu(self, number: u32) -> [u8; 48] {
        let (tag, len) = (number.wrapping_add(0x100), self.len);
        let pdu = pdus::scsi_command(tag, number, &self.cdb, self.writes, len);
        let mut lun = [0; 8];
        lun[..2].copy_from_slice(&self.lun.to_be_bytes());
        let attribute = match self.is_ordered {
            true => TaskAttr::Ordered,
            false => TaskAttr::Simple,
        };
        ScsiCommand {
            lun,
            attribute,
            ..pdu
        }
        .header()
    }
}
