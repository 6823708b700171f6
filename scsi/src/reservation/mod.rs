//! Reservations of a logical unit: persistent reservations (SPC-4 5.13) and the older RESERVE and
//! RELEASE commands (SPC-2 5.5).
//!
//! Both are associated with an I_T nexus. A registration is stored with the port names, so it is
//! still valid if an initiator logs in again via the same ports. A reservation set with RESERVE is
//! released when the nexus is removed.
//!
//! If there are no reservations, a command only needs to check a single atomic.
//!
//! # Invariants
//! - Unless the type is "all registrants", a persistent reservation has a holder, which is
//!   registered.
//! - An "all registrants" reservation is released with the last registration.
//!
//! # Persistence through power loss (SPC-4 5.13.5)
//! APTPL applies to the entire unit, and is set by the last successful registration. If it is set,
//! each change must be saved before it takes effect, using the [`ReservationKeeper`] that was
//! passed when the LU was created. Because saving may block, such a change is a separate step
//! ([`BlockOp::ChangeReservations`](crate::step::BlockOp::ChangeReservations)), which the target
//! should not execute on the data path. APTPL is refused if there is no keeper.
//!
//! # Not implemented
//! SPEC_I_PT, ALL_TG_PT and REGISTER AND MOVE. These are refused, as reported in REPORT
//! CAPABILITIES. The number of registrations is limited to [`MAX_REGISTRANTS`], of which
//! an initiator device can use [`MAX_REGISTRANTS_PER_DEVICE`].

mod service_actions;

use std::fmt;
use std::io;
use std::sync::Arc;

use num_enum::{IntoPrimitive, TryFromPrimitive};
use serde::{Deserialize, Serialize};

use crate::config::Identity;
use crate::flags::CommandFlags;
use crate::nexus::{Nexus, NexusId, PortName, TargetPort};

/// Maximum number of registrations for an LU. The list must fit into a single READ KEYS or READ
/// FULL STATUS response.
pub(crate) const MAX_REGISTRANTS: usize = 256;

/// Maximum number of registrations of an LU for the ports of a single initiator device. A host has a
/// port for each path.
pub(crate) const MAX_REGISTRANTS_PER_DEVICE: usize = 64;

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
    /// Returns whether all registrants hold the reservation.
    pub(crate) fn is_of_all(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Returns whether registrants have the same access as the holder.
    fn favours_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// Returns whether reads are also denied for any other nexus.
    fn forbids_reads(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess
                | Self::ExclusiveAccessRegistrantsOnly
                | Self::ExclusiveAccessAllRegistrants
        )
    }
}

/// The ports of a registered I_T nexus. Only the names are used to compare them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ports {
    pub(crate) initiator: PortName,
    pub(crate) target: PortName,
    /// RELATIVE TARGET PORT IDENTIFIER when this was registered. It may be different after a
    /// configuration change.
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

/// A registration of an I_T nexus with a key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Registrant {
    pub(crate) ports: Ports,
    pub(crate) key: u64,
    /// Value of PRGENERATION before this key was set.
    #[serde(default)]
    generation: u32,
}

/// A persistent reservation of the LU.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct HeldReservation {
    pub(crate) kind: ReservationType,
    /// The registrant that created the reservation. Note that an "all registrants" reservation is
    /// held by all registrants.
    maker: Ports,
}

/// The reason why a PERSISTENT RESERVE OUT did not change anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReservationError {
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    InvalidRelease,
    /// The service action key must not be zero here.
    ZeroKey,
    /// INSUFFICIENT REGISTRATION RESOURCES (55h/04h): there are too many registrations.
    NoRoom,
    /// The change must persist through power loss but could not be saved.
    NotSaved,
    /// This LU is being replaced, and the new one would not see the change.
    Retired,
}

/// A service action of PERSISTENT RESERVE OUT (SPC-4 6.16.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// REGISTER, or REGISTER AND IGNORE EXISTING KEY if `ignore` is set.
    Register {
        ignore: bool,
        /// APTPL bit, to request persistence through power loss.
        persists: bool,
    },
    Reserve(ReservationType),
    Release(Option<ReservationType>),
    Clear,
    /// PREEMPT, or PREEMPT AND ABORT if `aborts` is set.
    Preempt {
        kind: ReservationType,
        aborts: bool,
    },
}

/// A PERSISTENT RESERVE OUT command with its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReservationChange {
    pub(crate) nexus: NexusId,
    pub(crate) action: Action,
    pub(crate) keys: Keys,
}

impl ReservationChange {
    /// Returns the nexus that sent the request.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.nexus
    }

    /// Returns whether this requests persistence through power loss.
    fn wants_persistence(&self) -> bool {
        matches!(self.action, Action::Register { persists: true, .. })
    }

    /// Returns whether commands from other nexuses should be aborted after this change.
    pub(crate) fn aborts(&self) -> bool {
        matches!(self.action, Action::Preempt { aborts: true, .. })
    }
}

/// The registrations and the persistent reservation of an LU, as saved for power loss.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedReservations {
    registrants: Vec<Registrant>,
    held: Option<HeldReservation>,
}

/// Storage used to save reservations of logical units across power loss.
pub trait ReservationKeeper: fmt::Debug + Send + Sync {
    /// Returns the saved state for the LU with these names.
    ///
    /// # Errors
    /// If the state cannot be read, in which case we don't know which nexus may use the LU.
    fn load(&self, unit: &Identity) -> io::Result<Option<SavedReservations>>;

    /// Replaces the saved state for an LU, or removes it if `state` is `None`. The new state must
    /// be durable when this returns. May block.
    ///
    /// # Errors
    /// If the state could not be made durable. Either the previous or the new state may have been
    /// kept.
    fn save(&self, unit: &Identity, state: Option<&SavedReservations>) -> io::Result<()>;
}

/// The nexuses for which commands are aborted by PREEMPT AND ABORT (SPC-4 5.13.11.2.6).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Preemption {
    /// The nexus that sent the command.
    pub(crate) by: NexusId,
    /// The ports of the preempted registrations.
    pub(crate) ports: Vec<Ports>,
}

/// Nexuses that should be notified of a change, for each unit attention.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notices {
    /// Ports to notify with RESERVATIONS PREEMPTED.
    pub(crate) reservations_preempted: Vec<Ports>,
    /// Ports to notify with RESERVATIONS RELEASED.
    pub(crate) reservations_released: Vec<Ports>,
    /// Ports to notify with REGISTRATIONS PREEMPTED.
    pub(crate) registrations_preempted: Vec<Ports>,
}

/// The keys from a PERSISTENT RESERVE OUT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Keys {
    /// RESERVATION KEY of the nexus that sent the command.
    pub(crate) own: u64,
    /// SERVICE ACTION RESERVATION KEY.
    pub(crate) action: u64,
}

/// All reservations and registrations of an LU.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reservations {
    pub(crate) registrants: Vec<Registrant>,
    pub(crate) held: Option<HeldReservation>,
    /// PRGENERATION: the number of times registrations have been changed.
    pub(crate) generation: u32,
    /// Set when persistence through power loss is active (PTPL_A).
    #[serde(default)]
    persists: bool,
    /// Set while a change is being saved. The registrations and the reservation will be replaced
    /// after that.
    #[serde(skip)]
    saving: bool,
    /// The nexus that has reserved the LU with RESERVE. Released when this nexus is removed.
    #[serde(skip)]
    reserved: Option<NexusId>,
}

/// The current registrations and reservations of an LU, used for status output.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registrations {
    /// PRGENERATION: the number of times registrations have been changed, modulo 2^32.
    pub generation: u32,
    /// TYPE of the persistent reservation, if set (SPC-4 table 40).
    pub kind: Option<u8>,
    /// Set when registrations persist through power loss (PTPL_A).
    pub persists: bool,
    /// The registrations, in the order in which they were created.
    pub registrants: Vec<Registration>,
    /// The nexus that has reserved the LU with RESERVE.
    pub reserved: Option<NexusId>,
}

/// A single registration, used for status output.
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
    /// Value of PRGENERATION before this key was set.
    pub generation: u32,
    /// Set for the registrant that has created the persistent reservation. If the type is "all
    /// registrants", all other registrants are holders too.
    pub has_reserved: bool,
}

impl Reservations {
    /// Returns whether any command may conflict.
    pub(crate) fn restricts(&self) -> bool {
        self.held.is_some() || self.reserved.is_some()
    }

    /// Updates the RELATIVE TARGET PORT IDENTIFIER of a port, which may have changed since it was
    /// registered.
    pub(crate) fn renumber_port(&mut self, port: &TargetPort) {
        for Registrant { ports, .. } in &mut self.registrants {
            if ports.target == port.name {
                ports.relative_id = port.relative_id;
            }
        }
    }

    /// Returns the reservations that don't depend on a nexus.
    pub(crate) fn lasting(&self) -> Self {
        Self {
            reserved: None,
            saving: false,
            ..self.clone()
        }
    }

    /// Restores the reservations that were saved before a power loss. PRGENERATION is initialized
    /// to zero (SPC-4 6.15.2).
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

    /// Returns the state that should be saved, or `None` if there is no need to save anything.
    pub(crate) fn saved(&self) -> Option<SavedReservations> {
        self.persists.then(|| SavedReservations {
            registrants: self.registrants.clone(),
            held: self.held.clone(),
        })
    }

    /// Returns whether persistence through power loss is active.
    pub(crate) fn is_persistent(&self) -> bool {
        self.persists
    }

    /// Disables persistence through power loss.
    pub(crate) fn stop_persisting(&mut self) {
        self.persists = false;
    }

    /// Returns whether a change must be handled as a separate step, because it either needs to be
    /// saved, has to wait for another change to be saved, or has to wait for commands to be
    /// aborted.
    pub(crate) fn is_step(&self, change: &ReservationChange) -> bool {
        self.persists || self.saving || change.wants_persistence() || change.aborts()
    }

    /// Returns a copy that can be changed and saved. No other change can be started until
    /// [`Reservations::end_saving`] is called.
    pub(crate) fn begin_saving(&mut self) -> Self {
        self.saving = true;
        self.clone()
    }

    /// Completes a change started with [`Reservations::begin_saving`], using the state that was
    /// saved.
    pub(crate) fn end_saving(&mut self, saved: Option<Self>) {
        self.saving = false;
        // If this is `None`, the change has failed, so we keep the previous state and allow the
        // next change.
        if let Some(saved) = saved {
            *self = Self {
                saving: false,
                // RESERVE and RELEASE are still possible while a change is being saved.
                reserved: self.reserved,
                ..saved
            };
        }
    }

    /// Returns the current state for status output.
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

    /// Returns whether a command with the given flags currently conflicts for a nexus.
    pub(crate) fn conflicts(
        &self,
        id: NexusId,
        nexus: Option<&Arc<Nexus>>,
        flags: CommandFlags,
    ) -> bool {
        // Check RESERVE first, because no nexus can be registered while it is active.
        if self.reserved.is_some() && flags.contains(CommandFlags::RESERVATIONS) {
            return true;
        }
        if self.reserved.is_some_and(|holder| holder != id) {
            return !flags.intersects(CommandFlags::UNDER_ATTENTION | CommandFlags::UNDER_RESERVE);
        }
        let Some(held) = &self.held else {
            return false;
        };
        // For an "all registrants" reservation, the registrant that created it may have been
        // removed since, so we can't just check for that. Only a nexus that is registered is a
        // holder.
        let registered = nexus.and_then(|nexus| self.registrant(nexus)).is_some();
        let holds = registered && nexus.is_some_and(|nexus| held.maker.is_of(nexus));
        if holds || (registered && held.kind.favours_registrants()) {
            return false;
        }
        // Without any of these flags, a command is allowed under all reservations: INQUIRY, REPORT
        // LUNS, PERSISTENT RESERVE IN etc. are needed to find out which initiator has reserved the
        // LU.
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

    /// Handles RESERVE. Returns `false` if there is a conflict.
    pub(crate) fn reserve_unit(&mut self, id: NexusId) -> bool {
        // The change currently being saved may be the first registration.
        let free = self.reserved.is_none_or(|holder| holder == id)
            && self.registrants.is_empty()
            && !self.saving;
        if free {
            self.reserved = Some(id);
        }
        free
    }

    /// Returns whether RELEASE conflicts. This is the case if any nexus is registered (SPC-2
    /// 5.5.1).
    pub(crate) fn forbids_release(&self) -> bool {
        !self.registrants.is_empty()
    }

    /// Handles RELEASE, or the removal of a nexus. This never changes a reservation of any other
    /// nexus.
    pub(crate) fn release_unit(&mut self, id: NexusId) {
        // It's not an error to send RELEASE if the LU is not reserved by this nexus.
        self.reserved = self.reserved.filter(|holder| *holder != id);
    }

    /// Releases a RESERVE when the LU is reset.
    pub(crate) fn reset(&mut self) {
        self.reserved = None;
    }

    /// Returns whether a nexus holds the persistent reservation.
    pub(crate) fn is_holder(&self, ports: &Ports) -> bool {
        self.held.as_ref().is_some_and(|held| {
            // As in `conflicts`: for an "all registrants" reservation, the nexus that created it
            // may no longer be registered.
            let registered = self.registrants.iter().any(|r| r.ports == *ports);
            registered && (held.kind.is_of_all() || held.maker == *ports)
        })
    }

    /// Returns the key to report in READ RESERVATION.
    pub(crate) fn held_key(&self) -> u64 {
        match &self.held {
            // An "all registrants" reservation can have multiple holders, so there is no single
            // key. We report zero, which can also be used in PREEMPT for this type.
            Some(held) if !held.kind.is_of_all() => self
                .registrants
                .iter()
                .find(|r| r.ports == held.maker)
                .map_or(0, |r| r.key),
            _ => 0,
        }
    }
}
