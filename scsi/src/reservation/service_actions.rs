//! The service actions of PERSISTENT RESERVE OUT (SPC-4 5.13, 6.16.2).

use super::{
    Action, HeldReservation, Keys, MAX_REGISTRANTS, MAX_REGISTRANTS_PER_DEVICE, Notices, Ports,
    Registrant, ReservationChange, ReservationError, ReservationType, Reservations,
};
use crate::nexus::Nexus;

type Outcome = Result<Notices, ReservationError>;

impl Reservations {
    /// Executes a change that was requested by a nexus.
    pub(crate) fn change(&mut self, nexus: &Nexus, change: &ReservationChange) -> Outcome {
        // A RESERVE may have been received while we were waiting for the parameters.
        if self.reserved.is_some() {
            return Err(ReservationError::Conflict);
        }
        let keys = change.keys;
        match change.action {
            Action::Register { ignore, persists } => {
                let was_registered = self.registrant(nexus).is_some();
                let notices = self.register(nexus, keys, ignore)?;
                // Only update this after a successful registration. If there was no registration to
                // remove, we don't change it (SPC-4 5.13.7), because a host that is not registered
                // must not be able to disable a feature that other hosts rely on.
                if was_registered || keys.action != 0 {
                    self.persists = persists;
                }
                Ok(notices)
            }
            Action::Reserve(kind) => self.reserve(nexus, keys, kind),
            Action::Release(kind) => self.release(nexus, keys, kind),
            Action::Clear => self.clear(nexus, keys),
            Action::Preempt { kind, .. } => self.preempt(nexus, keys, kind),
        }
    }

    /// Returns the registration of a nexus, if the nexus has sent the correct key.
    fn proved(&self, nexus: &Nexus, key: u64) -> Result<usize, ReservationError> {
        // Use the same error for an invalid key and a missing registration, so that a nexus can't
        // use this to find out which it was.
        self.registrant(nexus)
            .filter(|at| self.registrants[*at].key == key)
            .ok_or(ReservationError::Conflict)
    }

    /// REGISTER, or REGISTER AND IGNORE EXISTING KEY if `ignore` is set.
    fn register(&mut self, nexus: &Nexus, keys: Keys, ignore: bool) -> Outcome {
        // If a nexus is not registered, use a key of zero (SPC-4 5.13).
        let at = self.registrant(nexus);
        let known = at.map_or(0, |at| self.registrants[at].key);
        if !ignore && known != keys.own {
            return Err(ReservationError::Conflict);
        }
        match (at, keys.action) {
            // Zero is used to remove a registration. If the nexus is not registered, nothing is
            // changed, including PRGENERATION.
            (None, 0) => return Ok(Notices::default()),
            (None, key) => {
                // A registration is still there after the nexus has been removed, and an iSCSI
                // initiator can use any ISID. Without limits, an initiator could register with
                // more and more ports until we run out of memory, or until no other initiator can
                // register.
                let device = nexus.initiator.device();
                let ports = self.registrants.iter().map(|known| &known.ports.initiator);
                let same = ports.filter(|port| port.device() == device).count();
                if self.registrants.len() >= MAX_REGISTRANTS || same >= MAX_REGISTRANTS_PER_DEVICE {
                    return Err(ReservationError::NoRoom);
                }
                self.registrants.push(Registrant {
                    ports: Ports::of(nexus),
                    key,
                    generation: self.generation,
                });
            }
            (Some(at), 0) => {
                self.generation = self.generation.wrapping_add(1);
                return Ok(self.unregister(at));
            }
            (Some(at), key) => {
                let registrant = &mut self.registrants[at];
                (registrant.key, registrant.generation) = (key, self.generation);
            }
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(Notices::default())
    }

    /// Removes a registration. This also releases the reservation if it was held by this
    /// registrant.
    fn unregister(&mut self, at: usize) -> Notices {
        let removed = self.registrants.remove(at);
        let mut notices = Notices::default();
        let Some(held) = &self.held else {
            return notices;
        };
        // There must always be a registered holder that can release the reservation.
        let ends = if held.kind.is_of_all() {
            self.registrants.is_empty()
        } else {
            held.maker == removed.ports
        };
        if ends {
            // With this type, the other registrants also had access and have now lost it, so we
            // need to notify them. For other types, only the holder had access.
            if held.kind.favours_registrants() {
                notices.reservations_released = self.others(None);
            }
            self.held = None;
        }
        notices
    }

    /// Returns all registrants except for the given one.
    fn others(&self, but: Option<&Ports>) -> Vec<Ports> {
        let all = self.registrants.iter().map(|r| &r.ports);
        all.filter(|ports| Some(*ports) != but).cloned().collect()
    }

    /// RESERVE service action: makes the nexus the holder.
    fn reserve(&mut self, nexus: &Nexus, keys: Keys, kind: ReservationType) -> Outcome {
        self.proved(nexus, keys.own)?;
        let ports = Ports::of(nexus);
        match &self.held {
            None => {
                self.held = Some(HeldReservation { kind, maker: ports });
                Ok(Notices::default())
            }
            // An initiator will retry the command if it didn't receive the first response. To use a
            // different type would be a conflict, because it needs PREEMPT to change this.
            Some(held) if held.kind == kind && self.is_holder(&ports) => Ok(Notices::default()),
            Some(_) => Err(ReservationError::Conflict),
        }
    }

    /// RELEASE service action: releases the reservation, but keeps the registrations.
    fn release(&mut self, nexus: &Nexus, keys: Keys, kind: Option<ReservationType>) -> Outcome {
        self.proved(nexus, keys.own)?;
        let ports = Ports::of(nexus);
        // If the nexus is not the holder, there is nothing to release. This is not an error,
        // because it may just have been preempted.
        let Some(held) = self.held.as_ref().filter(|_| self.is_holder(&ports)) else {
            return Ok(Notices::default());
        };
        // If the type is wrong, the holder doesn't know which reservation it is about to release.
        if kind != Some(held.kind) {
            return Err(ReservationError::InvalidRelease);
        }
        let mut notices = Notices::default();
        // As in `unregister`. There is no need to notify the nexus that has sent this.
        if held.kind.favours_registrants() {
            notices.reservations_released = self.others(Some(&ports));
        }
        self.held = None;
        Ok(notices)
    }

    /// CLEAR service action: removes the reservation and all registrations.
    fn clear(&mut self, nexus: &Nexus, keys: Keys) -> Outcome {
        self.proved(nexus, keys.own)?;
        // Create this before we clear the list, because all of these are about to lose their
        // registration.
        let notices = Notices {
            reservations_preempted: self.others(Some(&Ports::of(nexus))),
            ..Notices::default()
        };
        self.held = None;
        self.registrants.clear();
        self.generation = self.generation.wrapping_add(1);
        Ok(notices)
    }

    /// PREEMPT, and PREEMPT AND ABORT.
    fn preempt(&mut self, nexus: &Nexus, keys: Keys, kind: ReservationType) -> Outcome {
        self.proved(nexus, keys.own)?;
        let own = Ports::of(nexus);
        let all = self.held.as_ref().is_some_and(|held| held.kind.is_of_all());
        // Check whether this is the key of the reservation holder, in which case we replace it.
        // Otherwise, we only remove registrations. For an "all registrants" reservation, zero is
        // used for all holders.
        let takes = match &self.held {
            None => false,
            Some(_) if all => keys.action == 0,
            Some(_) => keys.action == self.held_key(),
        };
        // There can't be a registration with a key of zero, so this must be a mistake.
        if keys.action == 0 && !all {
            return Err(ReservationError::ZeroKey);
        }
        let meant = |r: &Registrant| {
            // The new holder stays registered.
            let spared = takes && r.ports == own;
            !spared && (r.key == keys.action || (takes && all))
        };
        let (gone, left): (Vec<_>, Vec<_>) = self.registrants.drain(..).partition(meant);
        self.registrants = left;
        // At this point nothing has changed, because both parts of the list have been put back.
        if gone.is_empty() && !takes {
            return Err(ReservationError::Conflict);
        }
        self.generation = self.generation.wrapping_add(1);
        // If a nexus has used its own key to remove itself, don't notify it.
        let mut notices = Notices {
            registrations_preempted: gone
                .into_iter()
                .map(|r| r.ports)
                .filter(|ports| *ports != own)
                .collect(),
            ..Notices::default()
        };
        if takes {
            let old = self.held.replace(HeldReservation {
                kind,
                maker: own.clone(),
            });
            // If the type is changed, notify all remaining registrants, for any combination of
            // types.
            if old.is_some_and(|old| old.kind != kind) {
                notices.reservations_released = self.others(Some(&own));
            }
        } else if self.registrants.is_empty() {
            // The last of all registrants has preempted itself.
            self.held = None;
        } else if let Some(held) = &self.held
            && !held.kind.is_of_all()
            && !self.registrants.iter().any(|r| r.ports == held.maker)
        {
            self.held = None;
        }
        Ok(notices)
    }
}
