//! The service actions of PERSISTENT RESERVE OUT (SPC-4 5.13, 6.16.2).

use super::{
    Action, Held, Keys, MAX_REGISTRANTS, Notices, Ports, Registrant, ReservationChange,
    ReservationError, ReservationType, Reservations,
};
use crate::nexus::Nexus;

type Outcome = Result<Notices, ReservationError>;

impl Reservations {
    /// Carries out a change that a nexus asks for.
    pub(crate) fn change(&mut self, nexus: &Nexus, change: &ReservationChange) -> Outcome {
        // RESERVE may have come while the parameters were under way.
        if self.reserved.is_some() {
            return Err(ReservationError::Conflict);
        }
        let keys = change.keys;
        match change.action {
            Action::Register { ignore, persists } => {
                let was_registered = self.registrant(nexus).is_some();
                let notices = self.register(nexus, keys, ignore)?;
                // Only a registration that succeeded decides about persistence, so this comes after
                // the error. Where there is none to take away, nothing is done (SPC-4 5.13.7): a
                // host that is not registered must not switch off what the others rely on.
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

    /// The registration of a nexus that has proved to know its key.
    fn proved(&self, nexus: &Nexus, key: u64) -> Result<usize, ReservationError> {
        // One answer for a wrong key and for no registration: it must not say which of them it
        // was.
        self.registrant(nexus)
            .filter(|at| self.registrants[*at].key == key)
            .ok_or(ReservationError::Conflict)
    }

    /// REGISTER, and with `ignore` REGISTER AND IGNORE EXISTING KEY.
    fn register(&mut self, nexus: &Nexus, keys: Keys, ignore: bool) -> Outcome {
        // The key of a nexus that is not registered is zero (SPC-4 5.13).
        let at = self.registrant(nexus);
        let known = at.map_or(0, |at| self.registrants[at].key);
        if !ignore && known != keys.own {
            return Err(ReservationError::Conflict);
        }
        match (at, keys.action) {
            // Zero takes a registration away. Where there is none, nothing changes, PRGENERATION
            // included.
            (None, 0) => return Ok(Notices::default()),
            (None, key) => {
                // A registration outlives its nexus, and an iSCSI initiator chooses its own ISID,
                // so one that registers under ever new ports would fill the memory without this
                // bound.
                if self.registrants.len() == MAX_REGISTRANTS {
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

    /// Takes a registration away, and the reservation with it where it was the holder's.
    fn unregister(&mut self, at: usize) -> Notices {
        let removed = self.registrants.remove(at);
        let mut notices = Notices::default();
        let Some(held) = &self.held else {
            return notices;
        };
        // A reservation must not be left without a holder who could release it.
        let ends = if held.kind.is_of_all() {
            self.registrants.is_empty()
        } else {
            held.maker == removed.ports
        };
        if ends {
            // The other registrants shared this reservation and lose what it gave them, so they
            // are notified. A plain one was the holder's alone.
            if held.kind.favours_registrants() {
                notices.reservations_released = self.others(None);
            }
            self.held = None;
        }
        notices
    }

    /// The registrants but one.
    fn others(&self, but: Option<&Ports>) -> Vec<Ports> {
        let all = self.registrants.iter().map(|r| &r.ports);
        all.filter(|ports| Some(*ports) != but).cloned().collect()
    }

    /// RESERVE service action: the nexus becomes the holder.
    fn reserve(&mut self, nexus: &Nexus, keys: Keys, kind: ReservationType) -> Outcome {
        self.proved(nexus, keys.own)?;
        let ports = Ports::of(nexus);
        match &self.held {
            None => {
                self.held = Some(Held { kind, maker: ports });
                Ok(Notices::default())
            }
            // An initiator that did not see the first answer repeats the command. Another type is
            // a conflict: PREEMPT changes that.
            Some(held) if held.kind == kind && self.is_holder(&ports) => Ok(Notices::default()),
            Some(_) => Err(ReservationError::Conflict),
        }
    }

    /// RELEASE service action: the reservation ends, the registrations stay.
    fn release(&mut self, nexus: &Nexus, keys: Keys, kind: Option<ReservationType>) -> Outcome {
        self.proved(nexus, keys.own)?;
        let ports = Ports::of(nexus);
        // Who does not hold it has nothing to release, which is no error: it may have been
        // preempted a moment ago.
        let Some(held) = self.held.as_ref().filter(|_| self.is_holder(&ports)) else {
            return Ok(Notices::default());
        };
        // A holder that names another type does not know what it would give up.
        if kind != Some(held.kind) {
            return Err(ReservationError::InvalidRelease);
        }
        let mut notices = Notices::default();
        // As in `unregister`; the nexus that releases knows it already.
        if held.kind.favours_registrants() {
            notices.reservations_released = self.others(Some(&ports));
        }
        self.held = None;
        Ok(notices)
    }

    /// CLEAR service action: reservation and all registrations end.
    fn clear(&mut self, nexus: &Nexus, keys: Keys) -> Outcome {
        self.proved(nexus, keys.own)?;
        // Taken before the list is emptied: all of these lose their registration.
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
        // Whether the key names the holder of the reservation, which is then replaced; otherwise
        // only registrations are removed. Zero names the holders of one of all registrants.
        let takes = match &self.held {
            None => false,
            Some(_) if all => keys.action == 0,
            Some(_) => keys.action == self.held_key(),
        };
        // No registration has the key zero, so it could only be a mistake.
        if keys.action == 0 && !all {
            return Err(ReservationError::ZeroKey);
        }
        let meant = |r: &Registrant| {
            // Who takes the reservation stays registered.
            let spared = takes && r.ports == own;
            !spared && (r.key == keys.action || (takes && all))
        };
        let (gone, left): (Vec<_>, Vec<_>) = self.registrants.drain(..).partition(meant);
        self.registrants = left;
        // Nothing has changed so far: the list has been divided and is whole again.
        if gone.is_empty() && !takes {
            return Err(ReservationError::Conflict);
        }
        self.generation = self.generation.wrapping_add(1);
        // A nexus that removes its own registration by its key needs no notice of it.
        let mut notices = Notices {
            registrations_preempted: gone
                .into_iter()
                .map(|r| r.ports)
                .filter(|ports| *ports != own)
                .collect(),
            ..Notices::default()
        };
        if takes {
            let old = self.held.replace(Held {
                kind,
                maker: own.clone(),
            });
            // A change of the type is reported to all remaining registrants, for any pair of types.
            if old.is_some_and(|old| old.kind != kind) {
                notices.reservations_released = self.others(Some(&own));
            }
        } else if self.registrants.is_empty() {
            // The last registrant of all has preempted itself.
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
