//! Peers that cheat, at a target and a unit of their own beside the honest ones.
//!
//! They send any message in any state ([`Mutator`]), promise data and do not send them, do not read,
//! say nothing at all, announce memory and take it away, use keys that are not theirs, acknowledge
//! what was not sent, and log in over their own sessions. They go on for as long as honest
//! initiators have work, and keep then what they have, so that only a target which bounds what it
//! gives to each has something left for others.
//!
//! Others are at the unit under judgement itself ([`Aim`]): they want the data of honest initiators
//! by the names of these, hold up its order with commands whose data never come, or forge packets
//! of a host that is there. None of that may have an effect.
//!
//! [`Mutator`]: riser_tests::mutator::Mutator

mod forger;
mod overheard;
mod rdma;
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
pub use self::overheard::{Overheard, is_cheat};
use self::rdma::RdmaCheat;
use self::tcp::TcpCheat;
use crate::initiator::Dialed;
use crate::plan::Protocol;
use crate::{initiator, target};

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

/// Shortest and longest wait between two actions of one that goes on, in microseconds.
const SELDOM: RangeInclusive<u64> = 50_000..=500_000;

/// Where a cheating peer goes, and what it wants there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aim {
    /// It sends what it likes to its own target.
    #[default]
    Own,
    /// It logs in at the target under judgement by the names of an initiator, or of a rival where
    /// the number is above those of the initiators, and reads. Its address may not log in there.
    Steal(usize),
    /// The same from an address that has a unit of its own there.
    StealBeside(usize),
    /// It reads at the target under judgement, where its address has rights, by the SRP portal of
    /// another target, which must not lead there.
    Trespass,
    /// It has rights at the unit under judgement, and sends commands whose data never come.
    Withhold,
    /// It forges packets of such an initiator.
    Forge(usize),
}

impl Aim {
    /// One that is drawn for a peer of this protocol, so that each is met about as often.
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

    /// Whether it needs access rules that distinguish it from others.
    fn needs_rules(self) -> bool {
        !matches!(self, Self::Own | Self::Forge(_))
    }

    /// The units that its address sees at the target under judgement, if it may log in.
    fn luns(self) -> Option<&'static str> {
        match self {
            Self::StealBeside(_) => Some("{ 0: c }"),
            Self::Trespass | Self::Withhold => Some("{ 0: d }"),
            Self::Own | Self::Steal(_) | Self::Forge(_) => None,
        }
    }

    /// Whether it only reads what it must not read.
    fn is_theft(self) -> bool {
        matches!(self, Self::Steal(_) | Self::StealBeside(_) | Self::Trespass)
    }

    /// Whether it tries to join a session of several connections.
    #[must_use]
    pub fn joins(self, protocol: Protocol) -> bool {
        protocol == Protocol::Iscsi && matches!(self, Self::Steal(_) | Self::StealBeside(_))
    }

    /// The one whose names it has.
    fn victim(self) -> Option<usize> {
        match self {
            Self::Steal(victim) | Self::StealBeside(victim) | Self::Forge(victim) => Some(victim),
            _ => None,
        }
    }
}

/// The rules of access of the target under judgement for cheating peers, if it needs some for them:
/// no other rule may name their addresses.
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

/// What a cheating peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheatPlan {
    /// Its protocol.
    pub protocol: Protocol,
    /// What it wants.
    pub aim: Aim,
    /// It takes nothing that is sent to it.
    pub deaf: bool,
    /// It acknowledges packets that it expects as soon as others come.
    pub hasty: bool,
    /// It goes on after its messages, now and then, as long as others have work.
    pub lasts: bool,
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
    /// A cheating peer of a seed.
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

    /// What peers of a seed do besides, of random numbers of their own, and more of them.
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
    /// That of the target under judgement.
    pub honest: TargetPortId,
    /// Initiators, which rivals follow.
    pub hosts: (usize, usize),
    /// What it has seen of packets.
    pub overheard: Overheard,
}

impl Surroundings {
    /// The last part of the address of a victim: that of an initiator, or of a rival.
    fn host(&self, victim: usize) -> u8 {
        let (initiators, rivals) = self.hosts;
        let index = victim % (initiators + rivals).max(1);
        match index.checked_sub(initiators) {
            None => overheard::host(initiator::address(index)),
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
    /// Beside the connections of others.
    Forger(Box<Forger>),
}

impl Cheat {
    /// A peer that is about to connect; the index distinguishes it from others.
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

    /// Does what there is to do; returns whether there was anything.
    pub fn step(&mut self, now: Instant) -> bool {
        match self {
            Self::Rdma(cheat) => cheat.step(now),
            Self::Tcp(cheat) => cheat.step(now),
            Self::Forger(cheat) => cheat.step(now),
        }
    }

    /// When the next thing happens by itself.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Rdma(cheat) => cheat.next_deadline(),
            Self::Tcp(cheat) => cheat.next_deadline(),
            Self::Forger(cheat) => cheat.next_deadline(),
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
        if !self.goes_on() || self.next > now {
            return None;
        }
        self.left = self.left.saturating_sub(1);
        // Bursts, and pauses; and less when it has done what others notice most.
        let most = [1, 300, 10_000][self.rng.usize(..3)];
        let mut pause = self.rng.u64(..most);
        if self.left == 0 && self.plan.lasts {
            pause = self.rng.u64(SELDOM);
        }
        self.next = now + Duration::from_micros(pause);
        let (silences, mut departures) = (self.plan.silences, self.plan.departures);
        // One that steals tries one way after the other.
        if self.plan.aim.is_theft() {
            departures = departures.max(4);
        }
        Some(match self.rng.u8(..32) {
            n if n < silences => Act::Silence(SILENCES[self.rng.usize(..SILENCES.len())]),
            n if n < silences.saturating_add(departures) => Act::Departure,
            _ => Act::Message,
        })
    }

    /// Whether it may connect now. That is an action where it may go on forever without another.
    fn may_dial(&mut self, now: Instant) -> bool {
        let is_free = self.left > 0 && self.plan.aim == Aim::Own;
        is_free || self.act(now).is_some()
    }

    /// Whether there is more to do.
    fn goes_on(&self) -> bool {
        self.left > 0 || self.plan.lasts
    }

    fn next(&self) -> Option<Instant> {
        self.goes_on().then_some(self.next)
    }
}

/// The names that a peer has at a target of iSCSI.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names {
    initiator: String,
    isid: [u8; 6],
    /// Number of the session that it joins; none for a session of its own.
    tsih: u16,
    /// Number of the connection.
    cid: u16,
}

impl Names {
    /// Names of its own.
    fn own(index: usize) -> Self {
        Self {
            initiator: format!("iqn.2026-01.org.example:cheat{index}"),
            isid: [0x80, 0, 0, 0, 2, index as u8],
            tsih: 0,
            cid: 0,
        }
    }

    /// A Login Request with them.
    fn login(&self, aim: Aim, more: &str) -> Vec<u8> {
        let target = match aim {
            Aim::Own => IQN,
            _ => target::IQN,
        };
        let more = format!("InitialR2T=Yes\0ImmediateData=No\0{more}");
        let mut login = pdus::login(self.isid, &self.initiator, target, &more);
        if self.tsih != 0 {
            // A connection that joins others must not say what holds for a whole session.
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

/// What a command asks for.
#[derive(Clone, Copy, Debug)]
struct Wish {
    lun: u16,
    cdb: [u8; 16],
    writes: bool,
    /// Bytes that it moves.
    len: u32,
    /// It is ORDERED.
    is_ordered: bool,
}

impl Wish {
    /// The next command of a peer with this aim.
    fn draw(aim: Aim, rng: &mut Rng) -> Self {
        match aim {
            Aim::Withhold => Self::withheld(rng),
            _ if aim.is_theft() => Self {
                // The unit that all see, the private one as its owner sees it, and those that
                // rules give other numbers.
                lun: [0, 0, 1, rng.u16(9..13)][rng.usize(..4)],
                ..Self::transfer(false, rng.u16(1..=16), rng)
            },
            _ => {
                let blocks = rng.u16(16..=512);
                Self::transfer(rng.bool(), blocks, rng)
            }
        }
    }

    /// A READ or WRITE.
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

    /// One that others would have to wait for if its data came, which they never do: nothing may
    /// change.
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

    /// As a PDU.
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
