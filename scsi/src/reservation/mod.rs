//! Reservations of a logical unit: persistent ones (SPC-4 5.13) and the older ones of RESERVE and
//! RELEASE (SPC-2 5.5).
//!
//! Both belong to I_T nexuses. A registration outlives its nexus: who logs in again by the same
//! ports is registered still, so it is kept by the names of the ports. A reservation by RESERVE
//! ends with its nexus.
//!
//! At a unit without reservation a command looks at one atomic.
//!
//! # Invariants
//! - A reservation that is not one of all registrants has a holder who is registered.
//! - One of all registrants ends with the last registration.
//!
//! # Persistence through power loss (SPC-4 5.13.5)
//! The APTPL bit of the last registration that succeeded governs the whole unit. While it is one,
//! every change is saved before it takes effect, by the [`ReservationKeeper`] that the unit was
//! made with. A save blocks, so such a change is a step of its own
//! ([`BlockOp::ChangeReservations`](crate::step::BlockOp::ChangeReservations)) that the target
//! carries out away from its data path. A unit without a keeper refuses APTPL.
//!
//! # Not implemented
//! SPEC_I_PT, ALL_TG_PT and REGISTER AND MOVE; they are refused, as REPORT CAPABILITIES reports. At
//! most [`MAX_REGISTRANTS`] nexuses can be registered.

mod service_actions;

use std::fmt;
use std::io;
use std::sync::Arc;

use num_enum::{IntoPrimitive, TryFromPrimitive};
use serde::{Deserialize, Serialize};

use crate::config::Identity;
use crate::flags::CommandFlags;
use crate::nexus::{Nexus, NexusId, PortName};

/// Registrations of a unit at most: their list must fit one READ KEYS and READ FULL STATUS.
pub(crate) const MAX_REGISTRANTS: usize = 256;

/// TYPE of a persistent reservation (SPC-4 table 40).
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, TryFromPrimitive, IntoPrimitive,
)]
#[repr(u8)]
pub(crate) enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrantsOnly = 5,
    ExclusiveAccessRegistrantsOnly = 6,
    WriteExclusiveAllRegistrants = 7,
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    /// Whether every registrant holds the reservation.
    pub(crate) fn is_of_all(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Returns whether registrants may do what the holder may.
    fn favours_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Returns whether others may not even read.
    fn forbids_reads(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess
                | Self::ExclusiveAccessRegistrantsOnly
                | Self::ExclusiveAccessAllRegistrants
        )
    }
}

/// The ports of an I_T nexus that is registered. They are the same ports if their names are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ports {
    pub(crate) initiator: PortName,
    pub(crate) target: PortName,
    /// RELATIVE TARGET PORT IDENTIFIER at the time of the registration. Another configuration may
    /// give the port another one.
    pub(crate) relative_id: u16,
}

impl PartialEq for Ports {
    fn eq(&self, other: &Self) -> bool {
        self.initiator == other.initiator && self.target == other.target
    }
}

impl Eq for Ports {}

impl Ports {
    pub(crate) fn of(nexus: &Nexus) -> Self {
        Self {
            initiator: nexus.initiator.clone(),
            target: nexus.target.name.clone(),
            relative_id: nexus.target.relative_id,
        }
    }

    pub(crate) fn is_of(&self, nexus: &Nexus) -> bool {
        self.initiator == nexus.initiator && self.target == nexus.target.name
    }
}

/// Registration of an I_T nexus, with its key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Registrant {
    pub(crate) ports: Ports,
    pub(crate) key: u64,
    /// PRGENERATION before it got this key.
    #[serde(default)]
    generation: u32,
}

/// Persistent reservation of the unit, with its holder.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Held {
    pub(crate) kind: ReservationType,
    /// The registrant that made it. One of all registrants is held by every registrant.
    maker: Ports,
}

/// Reason for which a PERSISTENT RESERVE OUT changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservationError {
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    InvalidRelease,
    /// The service action key may not be zero here.
    ZeroKey,
    /// INSUFFICIENT REGISTRATION RESOURCES (55h/04h): the table is full.
    NoRoom,
    /// The change must persist through power loss and could not be saved.
    NotSaved,
    /// Another unit takes the place of this one, and would not know of the change.
    Retired,
}

/// A service action of PERSISTENT RESERVE OUT (SPC-4 6.16.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// REGISTER, and with `ignore` REGISTER AND IGNORE EXISTING KEY.
    Register {
        ignore: bool,
        /// APTPL bit: persistence through power loss is asked for.
        persists: bool,
    },
    Reserve(ReservationType),
    Release(Option<ReservationType>),
    Clear,
    /// PREEMPT, and with `aborts` PREEMPT AND ABORT.
    Preempt {
        kind: ReservationType,
        aborts: bool,
    },
}

/// A PERSISTENT RESERVE OUT with its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReservationChange {
    pub(crate) nexus: NexusId,
    pub(crate) action: Action,
    pub(crate) keys: Keys,
}

impl ReservationChange {
    /// The nexus that requests it.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// Returns whether it asks for persistence through power loss.
    fn wants_persistence(&self) -> bool {
        matches!(self.action, Action::Register { persists: true, .. })
    }

    /// Returns whether commands of others are to be aborted when it has taken effect.
    pub(crate) fn aborts(&self) -> bool {
        matches!(self.action, Action::Preempt { aborts: true, .. })
    }
}

/// Registrations and the persistent reservation of a unit, as they outlive a power loss.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedReservations {
    registrants: Vec<Registrant>,
    held: Option<Held>,
}

/// Keeps the reservations of logical units through power loss.
pub trait ReservationKeeper: fmt::Debug + Send + Sync {
    /// Returns what is kept of the unit with these names.
    ///
    /// # Errors
    /// It cannot be read, so it is not known who may use the unit.
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>>;

    /// Replaces what is kept of a unit; `None` removes it. What was passed is durable when this
    /// returns. Blocks.
    ///
    /// # Errors
    /// It could not be made durable; either state may be the one that is kept.
    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()>;
}

/// The nexuses whose commands a PREEMPT AND ABORT aborts (SPC-4 5.13.11.2.6).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Preemption {
    /// The nexus that preempted.
    pub(crate) by: NexusId,
    /// The ports of the nexuses that were registered.
    pub(crate) ports: Vec<Ports>,
}

/// Whom a change concerns, with the unit attention it means for them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notices {
    /// Ports that get RESERVATIONS PREEMPTED.
    pub(crate) reservations_preempted: Vec<Ports>,
    /// Ports that get RESERVATIONS RELEASED.
    pub(crate) reservations_released: Vec<Ports>,
    /// Ports that get REGISTRATIONS PREEMPTED.
    pub(crate) registrations_preempted: Vec<Ports>,
}

/// The keys of a PERSISTENT RESERVE OUT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Keys {
    /// RESERVATION KEY of the nexus itself.
    pub(crate) own: u64,
    /// SERVICE ACTION RESERVATION KEY.
    pub(crate) action: u64,
}

/// All reservations and registrations of a unit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reservations {
    pub(crate) registrants: Vec<Registrant>,
    pub(crate) held: Option<Held>,
    /// PRGENERATION: number of changes of registrations.
    pub(crate) generation: u32,
    /// Persistence through power loss is activated (PTPL_A).
    #[serde(default)]
    persists: bool,
    /// A change is being saved, which replaces registrations and reservation when it is.
    #[serde(skip)]
    saving: bool,
    /// The nexus that has it by RESERVE, which ends with the nexus.
    #[serde(skip)]
    reserved: Option<NexusId>,
}

/// Registrations and reservations of a unit, to be shown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registrations {
    /// PRGENERATION: how many changes of registrations there were, modulo 2^32.
    pub generation: u32,
    /// TYPE of the persistent reservation, if there is one (SPC-4 table 40).
    pub kind: Option<u8>,
    /// Registrations persist through power loss (PTPL_A).
    pub persists: bool,
    /// The registrations, oldest first.
    pub registrants: Vec<Registration>,
    /// The nexus that has the unit by RESERVE.
    pub reserved: Option<NexusId>,
}

/// A registration, to be shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registration {
    /// Name of the initiator port.
    pub initiator: PortName,
    /// Name of the target port.
    pub target: PortName,
    /// The target port's RELATIVE TARGET PORT IDENTIFIER.
    pub relative_id: u16,
    /// Reservation key of this registration.
    pub key: u64,
    /// PRGENERATION before it got this key.
    pub generation: u32,
    /// The persistent reservation was made by it. Of one of all registrants, every other
    /// registrant is a holder as well.
    pub has_reserved: bool,
}

impl Reservations {
    /// Returns whether a command may conflict.
    pub(crate) fn restricts(&self) -> bool {
        self.held.is_some() || self.reserved.is_some()
    }

    /// The reservations that do not end with the nexuses.
    pub(crate) fn lasting(&self) -> Self {
        Self {
            reserved: None,
            saving: false,
            ..self.clone()
        }
    }

    /// Reservations that were kept through a power loss. PRGENERATION begins at zero (SPC-4
    /// 6.15.2).
    pub(crate) fn restored(saved: SavedReservations) -> Self {
        let mut registrants = saved.registrants;
        for registrant in &mut registrants {
            registrant.generation = 0;
        }
        Self {
            registrants,
            held: saved.held,
            persists: true,
            ..Self::default()
        }
    }

    /// The state to keep through a power loss; `None` where nothing must be kept.
    pub(crate) fn saved(&self) -> Option<SavedReservations> {
        self.persists.then(|| SavedReservations {
            registrants: self.registrants.clone(),
            held: self.held.clone(),
        })
    }

    /// Whether persistence through power loss is activated.
    pub(crate) fn is_persistent(&self) -> bool {
        self.persists
    }

    /// Nothing keeps it through a power loss any longer.
    pub(crate) fn stop_persisting(&mut self) {
        self.persists = false;
    }

    /// Whether a change is a step of its own: it has to be saved, to wait for one that is being
    /// saved, or for commands that it aborts.
    pub(crate) fn is_step(&self, change: &ReservationChange) -> bool {
        self.persists || self.saving || change.wants_persistence() || change.aborts()
    }

    /// A copy to change and save. Until [`Reservations::end_saving`] no other change may begin.
    pub(crate) fn begin_saving(&mut self) -> Self {
        self.saving = true;
        self.clone()
    }

    /// The end of what [`Reservations::begin_saving`] began: a state that was saved takes effect.
    pub(crate) fn end_saving(&mut self, saved: Option<Self>) {
        self.saving = false;
        // Where the change failed, the state before it goes on, and the next change may begin.
        if let Some(saved) = saved {
            *self = Self {
                saving: false,
                // RESERVE and RELEASE go on meanwhile.
                reserved: self.reserved,
                ..saved
            };
        }
    }

    /// All of it, to be shown.
    pub(crate) fn shown(&self) -> Registrations {
        let maker = self.held.as_ref().map(|held| &held.maker);
        let shown = |registrant: &Registrant| Registration {
            initiator: registrant.ports.initiator.clone(),
            target: registrant.ports.target.clone(),
            relative_id: registrant.ports.relative_id,
            key: registrant.key,
            generation: registrant.generation,
            has_reserved: maker == Some(&registrant.ports),
        };
        Registrations {
            generation: self.generation,
            kind: self.held.as_ref().map(|held| held.kind.into()),
            persists: self.persists,
            registrants: self.registrants.iter().map(shown).collect(),
            reserved: self.reserved,
        }
    }

    /// Returns whether a nexus may not send a command with these flags now.
    pub(crate) fn conflicts(
        &self,
        id: NexusId,
        nexus: Option<&Arc<Nexus>>,
        flags: CommandFlags,
    ) -> bool {
        // RESERVE comes first: while a nexus has the unit by it, no nexus is registered.
        if self.reserved.is_some() && flags.contains(CommandFlags::RESERVATIONS) {
            return true;
        }
        if self.reserved.is_some_and(|holder| holder != id) {
            return !flags.intersects(CommandFlags::UNDER_ATTENTION | CommandFlags::UNDER_RESERVE);
        }
        let Some(held) = &self.held else {
            return false;
        };
        // The registrant that made a reservation of all registrants may have gone since, so to be
        // its maker is not enough: only who is registered holds it.
        let registered = nexus.and_then(|nexus| self.registrant(nexus)).is_some();
        let holds = registered && nexus.is_some_and(|nexus| held.maker.is_of(nexus));
        if holds || (registered && held.kind.favours_registrants()) {
            return false;
        }
        // What is in neither set is allowed under any reservation of others: INQUIRY, REPORT LUNS,
        // PERSISTENT RESERVE IN and the like, by which an initiator finds out who holds the unit.
        let forbidden = if held.kind.forbids_reads() {
            CommandFlags::CHANGES | CommandFlags::WRITES | CommandFlags::READS
        } else {
            CommandFlags::CHANGES | CommandFlags::WRITES
        };
        flags.intersects(forbidden)
    }

    fn registrant(&self, nexus: &Nexus) -> Option<usize> {
        let mut all = self.registrants.iter();
        all.position(|registrant| registrant.ports.is_of(nexus))
    }

    /// RESERVE. `false` where it conflicts.
    pub(crate) fn reserve_unit(&mut self, id: NexusId) -> bool {
        // What is being saved may be the first registration.
        let free = self.reserved.is_none_or(|holder| holder == id)
            && self.registrants.is_empty()
            && !self.saving;
        if free {
            self.reserved = Some(id);
        }
        free
    }

    /// Returns whether RELEASE conflicts, as it does while a nexus is registered (SPC-2 5.5.1).
    pub(crate) fn forbids_release(&self) -> bool {
        !self.registrants.is_empty()
    }

    /// RELEASE, or the end of a nexus: of what others have, nothing changes.
    pub(crate) fn release_unit(&mut self, id: NexusId) {
        // RELEASE from a nexus that does not hold the unit is no error, and changes nothing.
        self.reserved = self.reserved.filter(|holder| *holder != id);
    }

    /// A reset of the unit ends what RESERVE has made.
    pub(crate) fn reset(&mut self) {
        self.reserved = None;
    }

    /// Whether a nexus holds the persistent reservation.
    pub(crate) fn is_holder(&self, ports: &Ports) -> bool {
        self.held.as_ref().is_some_and(|held| {
            // As in `conflicts`: the maker of a reservation of all registrants need not be
            // registered any longer.
            let registered = self.registrants.iter().any(|r| r.ports == *ports);
            registered && (held.kind.is_of_all() || held.maker == *ports)
        })
    }

    /// The key that READ RESERVATION reports.
    pub(crate) fn held_key(&self) -> u64 {
        match &self.held {
            // A reservation of all registrants has several holders and so no key of its own: zero
            // is reported, and PREEMPT takes zero for it.
            Some(held) if !held.kind.is_of_all() => self
                .registrants
                .iter()
                .find(|r| r.ports == held.maker)
                .map_or(0, |r| r.key),
            _ => 0,
        }
    }
}
