//! Reference model for persistent reservations of a unit according to SPC-5 5.14.
//!
//! This doesn't use any code from the tested programs. A nexus is identified by the initiator's
//! port in the history, because there is only one target port.

use std::collections::BTreeMap;

use fastrand::Rng;
use riser_tests::history::Port;

/// Service actions of PERSISTENT RESERVE OUT (SPC-5 table 66).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// REGISTER.
    Register,
    /// RESERVE.
    Reserve,
    /// RELEASE.
    Release,
    /// CLEAR.
    Clear,
    /// PREEMPT.
    Preempt,
    /// PREEMPT AND ABORT.
    PreemptAndAbort,
    /// REGISTER AND IGNORE EXISTING KEY.
    RegisterAndIgnore,
}

impl Action {
    /// Returns the code of the service action.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Register => 0,
            Self::Reserve => 1,
            Self::Release => 2,
            Self::Clear => 3,
            Self::Preempt => 4,
            Self::PreemptAndAbort => 5,
            Self::RegisterAndIgnore => 6,
        }
    }
}

/// Reservation types (SPC-5 table 64): Write Exclusive and Exclusive Access, for the holder,
/// registrants only and all registrants.
pub const TYPES: [u8; 6] = [1, 3, 5, 6, 7, 8];

fn is_of_all(kind: u8) -> bool {
    matches!(kind, 7 | 8)
}

fn is_shared(kind: u8) -> bool {
    !matches!(kind, 1 | 3)
}

fn forbids_reads(kind: u8) -> bool {
    matches!(kind, 3 | 6 | 8)
}

/// A PERSISTENT RESERVE OUT command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Nexus that sends the command.
    pub from: Port,
    /// Service action.
    pub action: Action,
    /// Reservation type.
    pub kind: u8,
    /// RESERVATION KEY.
    pub own: u64,
    /// SERVICE ACTION RESERVATION KEY.
    pub key: u64,
    /// APTPL.
    pub persists: bool,
}

impl Change {
    /// Draws a change for a nexus, which is usually valid in this state. The key identifies its
    /// nexus.
    #[must_use]
    pub fn draw(from: Port, state: &Reservations, rng: &mut Rng) -> Self {
        use Action::{
            Clear, Preempt, PreemptAndAbort, Register, RegisterAndIgnore, Release, Reserve,
        };
        let known = state.keys.get(&from).copied();
        let action = match rng.u8(..16) {
            _ if known.is_none() && rng.u8(..4) > 0 => {
                [Register, RegisterAndIgnore][rng.usize(..2)]
            }
            0..4 => [Register, RegisterAndIgnore][rng.usize(..2)],
            4..8 => Reserve,
            8..11 => Release,
            11 => Clear,
            12 | 13 => Preempt,
            _ => PreemptAndAbort,
        };
        let any = |rng: &mut Rng| u64::from(from.0) << 8 | rng.u64(1..4);
        let others: Vec<u64> = state.keys.values().copied().collect();
        let key = match action {
            Register | RegisterAndIgnore if rng.u8(..4) > 0 => any(rng),
            Preempt | PreemptAndAbort if !others.is_empty() => others[rng.usize(..others.len())],
            _ => 0,
        };
        let kind = match state.held {
            Some((kind, _)) if rng.u8(..4) > 0 => kind,
            _ => TYPES[rng.usize(..TYPES.len())],
        };
        let own = match rng.u8(..16) {
            0 => any(rng),
            _ => known.unwrap_or(0),
        };
        let persists = rng.bool();
        Self {
            from,
            action,
            kind,
            own,
            key,
            persists,
        }
    }

    /// Returns the parameter list (SPC-5 table 67).
    #[must_use]
    pub fn parameters(&self) -> [u8; 24] {
        let mut list = [0; 24];
        list[..8].copy_from_slice(&self.own.to_be_bytes());
        list[8..16].copy_from_slice(&self.key.to_be_bytes());
        let registers = matches!(self.action, Action::Register | Action::RegisterAndIgnore);
        list[20] = u8::from(registers && self.persists);
        list
    }
}

/// Status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// GOOD.
    Good,
    /// CHECK CONDITION.
    Check,
    /// RESERVATION CONFLICT.
    Conflict,
}

/// A unit attention condition for another nexus, with ASC and ASCQ.
pub type Notice = (Port, (u8, u8));

/// RESERVATIONS PREEMPTED.
pub const RESERVATIONS_PREEMPTED: (u8, u8) = (0x2a, 0x03);
/// RESERVATIONS RELEASED.
pub const RESERVATIONS_RELEASED: (u8, u8) = (0x2a, 0x04);
/// REGISTRATIONS PREEMPTED.
pub const REGISTRATIONS_PREEMPTED: (u8, u8) = (0x2a, 0x05);

/// Registrations and reservation of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reservations {
    /// Keys by nexus.
    pub keys: BTreeMap<Port, u64>,
    /// Type of the reservation and its holder, which is unused for All Registrants types.
    pub held: Option<(u8, Port)>,
    /// PRGENERATION.
    pub generation: u32,
    /// PTPL_A.
    pub persists: bool,
}

impl Reservations {
    /// Returns the state after a power loss of the target.
    #[must_use]
    pub fn after_power_loss(&self) -> Self {
        match self.persists {
            true => Self {
                generation: 0,
                ..self.clone()
            },
            false => Self::default(),
        }
    }

    /// Returns whether a command conflicts with the reservation (SPC-5 table 63, SBC-4 table 13).
    #[must_use]
    pub fn forbids(&self, nexus: Port, writes: bool) -> bool {
        let Some((kind, _)) = self.held else {
            return false;
        };
        let is_registered = self.keys.contains_key(&nexus);
        let is_free = self.is_held_by(nexus) || is_registered && is_shared(kind);
        !is_free && (writes || forbids_reads(kind))
    }

    /// Returns whether a nexus is a reservation holder.
    #[must_use]
    pub fn is_held_by(&self, nexus: Port) -> bool {
        let is_registered = self.keys.contains_key(&nexus);
        self.held
            .is_some_and(|(kind, holder)| is_registered && (is_of_all(kind) || holder == nexus))
    }

    /// Returns the reservation key for READ RESERVATION: zero for All Registrants types.
    #[must_use]
    pub fn held_key(&self) -> u64 {
        match self.held {
            Some((kind, holder)) if !is_of_all(kind) => self.keys[&holder],
            _ => 0,
        }
    }

    /// Returns whether this state matches the data of PERSISTENT RESERVE IN: READ KEYS, READ
    /// RESERVATION or READ FULL STATUS (SPC-5 6.15.2, 6.15.3 and 6.15.5).
    #[must_use]
    pub fn is_reported(&self, action: u8, data: &[u8]) -> bool {
        let number = |at: usize| {
            data.get(at..at + 4)
                .map(|b| u32::from_be_bytes(b.try_into().unwrap_or_default()))
        };
        let (Some(generation), Some(len)) = (number(0), number(4)) else {
            return false;
        };
        let list = &data[8..];
        let key = |bytes: &[u8]| u64::from_be_bytes(bytes[..8].try_into().unwrap_or_default());
        let is_same = match action {
            0 => {
                let mut keys: Vec<_> = list.chunks_exact(8).map(key).collect();
                keys.sort_unstable();
                let mut expected: Vec<_> = self.keys.values().copied().collect();
                expected.sort_unstable();
                keys == expected
            }
            1 => match self.held {
                None => list.is_empty(),
                Some((kind, _)) => {
                    list.len() == 16 && key(list) == self.held_key() && list[13] == kind
                }
            },
            _ => {
                let mut seen = BTreeMap::new();
                let mut rest = list;
                while rest.len() >= 24 {
                    let holds = (rest[12] & 1 == 1).then_some(rest[13]);
                    // The upper bytes of a key identify the nexus.
                    seen.insert(Port((key(rest) >> 8) as u16), (key(rest), holds));
                    let more = u32::from_be_bytes(rest[20..24].try_into().unwrap_or_default());
                    rest = rest.get(24 + more as usize..).unwrap_or(&[]);
                }
                let kind = self.held.map(|(kind, _)| kind);
                let entry = |(nexus, key): (&Port, &u64)| {
                    let holds = kind.filter(|_| self.is_held_by(*nexus));
                    (*nexus, (*key, holds))
                };
                seen == self.keys.iter().map(entry).collect()
            }
        };
        is_same && generation == self.generation && list.len() == len as usize
    }

    /// Executes a change. Returns its status and notifications for other nexuses.
    pub fn apply(&mut self, change: &Change) -> (Status, Vec<Notice>) {
        let from = change.from;
        let known = self.keys.get(&from).copied();
        let is_ignored = change.action == Action::RegisterAndIgnore;
        if let Action::Register | Action::RegisterAndIgnore = change.action {
            if !is_ignored && known.unwrap_or(0) != change.own {
                return (Status::Conflict, Vec::new());
            }
            return (Status::Good, self.register(change));
        }
        if known != Some(change.own) {
            return (Status::Conflict, Vec::new());
        }
        match change.action {
            Action::Reserve => (self.reserve(change), Vec::new()),
            Action::Release => self.release(change),
            Action::Clear => {
                let notices = self.notices(from, RESERVATIONS_PREEMPTED);
                (self.held, self.keys) = (None, BTreeMap::new());
                self.generation += 1;
                (Status::Good, notices)
            }
            _ => self.preempt(change),
        }
    }

    /// Returns a condition for all registered nexuses except one.
    fn notices(&self, but: Port, code: (u8, u8)) -> Vec<Notice> {
        let others = self.keys.keys().filter(|nexus| **nexus != but);
        others.map(|nexus| (*nexus, code)).collect()
    }

    /// SPC-5 5.14.7 and 5.14.11.3.
    fn register(&mut self, change: &Change) -> Vec<Notice> {
        let from = change.from;
        if change.key == 0 && !self.keys.contains_key(&from) {
            return Vec::new();
        }
        self.generation += 1;
        self.persists = change.persists;
        if change.key != 0 {
            self.keys.insert(from, change.key);
            return Vec::new();
        }
        self.keys.remove(&from);
        let Some((kind, holder)) = self.held else {
            return Vec::new();
        };
        let ends = match is_of_all(kind) {
            true => self.keys.is_empty(),
            false => holder == from,
        };
        if !ends {
            return Vec::new();
        }
        self.held = None;
        match is_shared(kind) {
            true => self.notices(from, RESERVATIONS_RELEASED),
            false => Vec::new(),
        }
    }

    /// SPC-5 5.14.9.
    fn reserve(&mut self, change: &Change) -> Status {
        match self.held {
            None => self.held = Some((change.kind, change.from)),
            Some((kind, _)) if kind == change.kind && self.is_held_by(change.from) => {}
            Some(_) => return Status::Conflict,
        }
        Status::Good
    }

    /// SPC-5 5.14.11.2.
    fn release(&mut self, change: &Change) -> (Status, Vec<Notice>) {
        match self.held {
            Some((kind, _)) if self.is_held_by(change.from) => {
                if kind != change.kind {
                    return (Status::Check, Vec::new());
                }
                self.held = None;
                let notices = match is_shared(kind) {
                    true => self.notices(change.from, RESERVATIONS_RELEASED),
                    false => Vec::new(),
                };
                (Status::Good, notices)
            }
            _ => (Status::Good, Vec::new()),
        }
    }

    /// SPC-5 5.14.11.4 and 5.14.11.5.
    fn preempt(&mut self, change: &Change) -> (Status, Vec<Notice>) {
        let from = change.from;
        let of_all = self.held.is_some_and(|(kind, _)| is_of_all(kind));
        if change.key == 0 && !of_all {
            return (Status::Check, Vec::new());
        }
        let takes = self.held.is_some() && change.key == self.held_key();
        let is_meant = |nexus: Port, key: u64| match takes {
            true => nexus != from && (of_all || key == change.key),
            false => key == change.key,
        };
        let gone = self
            .keys
            .iter()
            .filter(|(nexus, key)| is_meant(**nexus, **key));
        let gone: Vec<Port> = gone.map(|(nexus, _)| *nexus).collect();
        if gone.is_empty() && !takes {
            return (Status::Conflict, Vec::new());
        }
        self.generation += 1;
        self.keys.retain(|nexus, _| !gone.contains(nexus));
        let others = gone.iter().filter(|nexus| **nexus != from);
        let mut notices: Vec<_> = others
            .map(|nexus| (*nexus, REGISTRATIONS_PREEMPTED))
            .collect();
        match self.held {
            Some((kind, _)) if takes => {
                self.held = Some((change.kind, from));
                if kind != change.kind {
                    notices.extend(self.notices(from, RESERVATIONS_RELEASED));
                }
            }
            Some(_) if of_all && self.keys.is_empty() => self.held = None,
            Some((_, holder)) if !of_all && !self.keys.contains_key(&holder) => self.held = None,
            _ => {}
        }
        (Status::Good, notices)
    }
}
