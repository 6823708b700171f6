//! Accounts of a pool: the memory used by each initiator and each unit, and their guaranteed parts.
//!
//! The model and its invariant are described in [`super`]. This module does not use any addresses.
//! All numbers are bytes in whole blocks.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};

use rustc_hash::FxHashMap;
use slab::Slab;

use super::{Claim, MAX_BLOCK, Owner};

/// Key of an initiator, which is the same for all of its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct InitiatorKey(u64);

/// The part of the pool that a buffer is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Shared by all claims.
    Common,
    /// Guaranteed to the initiator of the owner.
    Initiator,
    /// Guaranteed to the unit, for commands that gather their data.
    Gathering,
    /// Guaranteed to the unit, for commands that have started.
    Started,
    /// The reserve, which is not counted by any account.
    Reserve,
}

/// The charge for a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Charge {
    pub(super) claim: Claim,
    pub(super) part: Part,
}

/// Account of an initiator or a unit.
#[derive(Debug, Default)]
struct Account {
    /// Bytes in data buffers.
    data: usize,
    /// Bytes charged to a unit's part for commands that gather their data.
    gathering: usize,
    /// Bytes charged to a unit's part for commands that have started.
    started: usize,
    /// Entries in the line.
    waits: u32,
    /// Owners of an initiator.
    owners: u32,
    /// Key of an initiator with a session.
    key: Option<InitiatorKey>,
    /// Set while the unit has a buffer from the reserve.
    has_reserve: bool,
}

impl Account {
    fn is_active(&self) -> bool {
        self.data > 0 || self.waits > 0
    }

    /// Returns the number of bytes charged to the unit's part.
    fn own(&self) -> usize {
        self.gathering + self.started
    }
}

/// Requests in the line that are before a request for the same unit's part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    /// Bytes reserved by the first of these requests.
    pub(super) reserved: usize,
    /// Set if a command is waiting that gathers its data.
    pub(super) gathers: bool,
}

/// Account of an owner.
#[derive(Debug)]
struct Holding {
    /// Index of its initiator's account.
    initiator: usize,
    /// Bytes in data buffers.
    data: usize,
    /// Bytes in descriptor tables.
    tables: usize,
    /// Entries in the line.
    waits: u32,
    /// Set if the owner has a session. In this case, the account is kept while it is idle.
    is_member: bool,
}

/// A part of the pool that is divided among initiators or units.
#[derive(Debug, Default)]
struct Area {
    /// Size in bytes, or 0 if isolation is not required.
    size: usize,
    /// Bytes in use.
    used: usize,
    /// Guaranteed part for each of them.
    part: usize,
}

impl Area {
    fn divide(&mut self, size: usize, among: usize) {
        (self.size, self.part) = match among {
            0 | 1 => (0, 0),
            n => (size, size / n),
        };
    }

    fn has_room(&self, need: usize) -> bool {
        self.used + need <= self.size
    }
}

/// All accounts of a pool.
#[derive(Debug)]
pub(super) struct Shares {
    len: usize,
    /// Size of the common part.
    common: usize,
    common_used: usize,
    of_initiators: Area,
    of_units: Area,
    initiators: Slab<Account>,
    by_key: FxHashMap<InitiatorKey, usize>,
    /// Converts names to keys. Names are chosen by peers, which must not be able to cause
    /// collisions.
    keys: RandomState,
    /// Unit accounts by number, after an account for commands without a unit.
    units: Vec<Account>,
    served_units: usize,
    /// Number of initiators that use memory or wait for it. The same for units below.
    active_initiators: usize,
    active_units: usize,
    /// The numbers are assigned by us, so a peer cannot cause collisions.
    owners: FxHashMap<Owner, Holding>,
}

/// Returns the index of a unit's account.
fn place(unit: Option<u32>) -> usize {
    unit.map_or(0, |unit| unit as usize + 1)
}

impl Shares {
    pub(super) fn new(len: usize) -> Self {
        Self {
            len,
            common: len,
            common_used: 0,
            of_initiators: Area::default(),
            of_units: Area::default(),
            initiators: Slab::new(),
            by_key: FxHashMap::default(),
            keys: RandomState::new(),
            units: vec![Account::default()],
            served_units: 1,
            active_initiators: 0,
            active_units: 0,
            owners: FxHashMap::default(),
        }
    }

    /// Divides the pool again after the number of initiators or units has changed.
    fn divide(&mut self) {
        // Use whole blocks, so that a pool which is too small to be divided only has a common part.
        let area = self.len / 4 / MAX_BLOCK * MAX_BLOCK;
        self.of_initiators.divide(area, self.initiators.len());
        self.of_units.divide(area, self.served_units);
        self.common = self.len - self.of_initiators.size - self.of_units.size;
    }

    pub(super) fn set_units(&mut self, count: usize) {
        self.served_units = count;
        self.divide();
    }

    /// Called when an owner has a session of this initiator.
    pub(super) fn add_member(&mut self, owner: Owner, name: &impl Hash) {
        let known = self.owners.get(&owner).map(|holding| holding.is_member);
        // A connection can only log in once.
        if known == Some(true) {
            return;
        }
        let key = InitiatorKey(self.keys.hash_one(name));
        let initiator = match self.by_key.get(&key) {
            Some(&initiator) => initiator,
            None => {
                let initiator = self.add_initiator(Some(key));
                self.by_key.insert(key, initiator);
                initiator
            }
        };
        match known {
            Some(_) => self.adopt(owner, initiator),
            None => _ = self.add_owner(owner, initiator, true),
        }
    }

    /// Moves the account of an owner without a session to the initiator of its session. Its first
    /// commands may be received with the last request of the login.
    fn adopt(&mut self, owner: Owner, initiator: usize) {
        let holding = self.owners.get_mut(&owner).expect("an owner is known");
        holding.is_member = true;
        let own = std::mem::replace(&mut holding.initiator, initiator);
        let own = self.initiators.remove(own);
        let account = &mut self.initiators[initiator];
        self.active_initiators -= usize::from(own.is_active() && account.is_active());
        account.data += own.data;
        account.waits += own.waits;
        account.owners += own.owners;
        self.divide();
    }

    /// Called when the session of an owner is closed.
    pub(super) fn remove_member(&mut self, owner: Owner) {
        if let Some(holding) = self.owners.get_mut(&owner) {
            holding.is_member = false;
            self.forget_idle(owner);
        }
    }

    fn add_initiator(&mut self, key: Option<InitiatorKey>) -> usize {
        let account = Account {
            key,
            ..Account::default()
        };
        let initiator = self.initiators.insert(account);
        self.divide();
        initiator
    }

    fn add_owner(&mut self, owner: Owner, initiator: usize, is_member: bool) -> &mut Holding {
        self.initiators[initiator].owners += 1;
        self.owners.entry(owner).or_insert(Holding {
            initiator,
            data: 0,
            tables: 0,
            waits: 0,
            is_member,
        })
    }

    /// Returns the account of an owner. Without a session, the owner is treated as an initiator.
    fn holding(&mut self, owner: Owner) -> &mut Holding {
        if !self.owners.contains_key(&owner) {
            let initiator = self.add_initiator(None);
            return self.add_owner(owner, initiator, false);
        }
        self.owners.get_mut(&owner).expect("it was looked up")
    }

    /// Removes the account of an owner if it does not use or want any memory and has no session.
    fn forget_idle(&mut self, owner: Owner) {
        let is_idle = |h: &Holding| !h.is_member && h.data + h.tables == 0 && h.waits == 0;
        let Some(holding) = self.owners.get(&owner).filter(|h| is_idle(h)) else {
            return;
        };
        let initiator = holding.initiator;
        self.owners.remove(&owner);
        let account = &mut self.initiators[initiator];
        account.owners -= 1;
        if account.owners == 0 {
            let account = self.initiators.remove(initiator);
            if let Some(key) = account.key {
                self.by_key.remove(&key);
            }
            self.divide();
        }
    }

    fn initiator(&self, owner: Owner) -> Option<&Account> {
        let holding = self.owners.get(&owner)?;
        self.initiators.get(holding.initiator)
    }

    fn unit(&self, unit: Option<u32>) -> Option<&Account> {
        // Commands without a unit do not wait for a disk.
        unit.and_then(|_| self.units.get(place(unit)))
    }

    #[inline]
    pub(super) fn has_common(&self, need: usize) -> bool {
        self.common_used + need <= self.common
    }

    pub(super) fn common(&self) -> usize {
        self.common
    }

    /// Returns whether the part of an owner's initiator has room for `need` bytes. All memory of an
    /// initiator counts against its part. A larger buffer is granted if it is the only one.
    pub(super) fn has_initiator_room(&self, owner: Owner, need: usize) -> bool {
        let held = self.initiator(owner).map_or(0, |a| a.data);
        let area = &self.of_initiators;
        (held == 0 || held + need <= area.part) && area.has_room(need)
    }

    /// Returns the guaranteed part of a unit if it has room for `need` bytes after the requests in
    /// the line.
    ///
    /// Commands that gather their data can use half of the part. Commands that have started can use
    /// all of it, but only the other half while a command that gathers its data is waiting.
    pub(super) fn unit_part(
        &self,
        unit: u32,
        need: usize,
        gathers: bool,
        ahead: Ahead,
    ) -> Option<Part> {
        let area = &self.of_units;
        let (gathering, started, data) = self
            .unit(Some(unit))
            .map_or((0, 0, 0), |a| (a.gathering, a.started, a.data));
        let (own, half) = (gathering + started, area.part / 2);
        let (part, held, most) = match (gathers, ahead.gathers) {
            (true, _) => (Part::Gathering, gathering, half),
            (false, true) => (Part::Started, started, half),
            (false, false) => (Part::Started, own, area.part),
        };
        let fits = match own + ahead.reserved {
            // If the unit has no other memory, a single buffer can be larger than the part.
            0 => need <= area.part || data == 0,
            _ => own + need <= area.part && held + ahead.reserved + need <= most,
        };
        (fits && area.has_room(need)).then_some(part)
    }

    /// Returns whether a unit's part has room for a buffer of `need` bytes after its other buffers
    /// are released.
    pub(super) fn can_hold(&self, unit: u32, need: usize) -> bool {
        let area = &self.of_units;
        let (own, data) = self.unit(Some(unit)).map_or((0, 0), |a| (a.own(), a.data));
        area.used - own + need <= area.size && (need <= area.part || data == own)
    }

    /// Returns whether a buffer of `need` bytes requires that a unit's part has no memory of
    /// started commands, and there are no commands with gathered data in the part that may be
    /// waiting for these.
    pub(super) fn excludes_started(&self, unit: u32, need: usize) -> bool {
        let gathering = self.unit(Some(unit)).map_or(0, |a| a.gathering);
        gathering == 0 && need > self.of_units.part / 2
    }

    /// Charges a buffer of `bytes`.
    pub(super) fn charge(&mut self, charge: Charge, bytes: usize) {
        let Charge { claim, part } = charge;
        let place = place(claim.unit);
        if self.units.len() <= place {
            self.units.resize_with(place + 1, Account::default);
        }
        if part == Part::Reserve {
            self.units[place].has_reserve = true;
            return;
        }
        if bytes == 0 {
            return;
        }
        // Use a single lookup if the owner is known, which is almost always the case.
        let holding = match self.owners.get_mut(&claim.owner) {
            Some(holding) => holding,
            None => self.holding(claim.owner),
        };
        holding.data += bytes;
        let initiator = holding.initiator;
        let account = &mut self.initiators[initiator];
        self.active_initiators += usize::from(!account.is_active());
        account.data += bytes;
        let own = |is_own: bool| if is_own { bytes } else { 0 };
        let account = &mut self.units[place];
        self.active_units += usize::from(!account.is_active());
        account.data += bytes;
        account.gathering += own(part == Part::Gathering);
        account.started += own(part == Part::Started);
        *self.used(part) += bytes;
    }

    /// Reverses [`Shares::charge`].
    pub(super) fn discharge(&mut self, charge: Charge, bytes: usize) {
        let Charge { claim, part } = charge;
        let account = &mut self.units[place(claim.unit)];
        if part == Part::Reserve {
            account.has_reserve = false;
            return;
        }
        if bytes == 0 {
            return;
        }
        let own = |is_own: bool| if is_own { bytes } else { 0 };
        account.data -= bytes;
        account.gathering -= own(part == Part::Gathering);
        account.started -= own(part == Part::Started);
        self.active_units -= usize::from(!account.is_active());
        *self.used(part) -= bytes;
        let holding = self.owners.get_mut(&claim.owner);
        let holding = holding.expect("an owner with memory has an account");
        holding.data -= bytes;
        let is_member = holding.is_member;
        let account = &mut self.initiators[holding.initiator];
        account.data -= bytes;
        self.active_initiators -= usize::from(!account.is_active());
        if !is_member {
            self.forget_idle(claim.owner);
        }
    }

    fn used(&mut self, part: Part) -> &mut usize {
        match part {
            Part::Common => &mut self.common_used,
            Part::Initiator => &mut self.of_initiators.used,
            Part::Gathering | Part::Started => &mut self.of_units.used,
            Part::Reserve => unreachable!("no account counts the reserve"),
        }
    }

    /// Returns the number of bytes in an owner's descriptor tables.
    pub(super) fn tables(&self, owner: Owner) -> usize {
        self.owners.get(&owner).map_or(0, |holding| holding.tables)
    }

    pub(super) fn add_table(&mut self, owner: Owner, bytes: usize) {
        self.holding(owner).tables += bytes;
    }

    pub(super) fn remove_table(&mut self, owner: Owner, bytes: usize) {
        if let Some(holding) = self.owners.get_mut(&owner) {
            holding.tables -= bytes;
            self.forget_idle(owner);
        }
    }

    /// Called when a claim is added to the line.
    pub(super) fn begin_wait(&mut self, claim: Claim) {
        let place = place(claim.unit);
        if self.units.len() <= place {
            self.units.resize_with(place + 1, Account::default);
        }
        let holding = self.holding(claim.owner);
        holding.waits += 1;
        let initiator = holding.initiator;
        let account = &mut self.initiators[initiator];
        self.active_initiators += usize::from(!account.is_active());
        account.waits += 1;
        let account = &mut self.units[place];
        self.active_units += usize::from(!account.is_active());
        account.waits += 1;
    }

    /// Called when a claim is removed from the line.
    pub(super) fn end_wait(&mut self, claim: Claim) {
        let account = &mut self.units[place(claim.unit)];
        account.waits -= 1;
        self.active_units -= usize::from(!account.is_active());
        let holding = self.owners.get_mut(&claim.owner);
        let holding = holding.expect("an owner that waits has an account");
        holding.waits -= 1;
        let account = &mut self.initiators[holding.initiator];
        account.waits -= 1;
        self.active_initiators -= usize::from(!account.is_active());
        self.forget_idle(claim.owner);
    }

    /// Returns whether an owner has an entry in the line.
    pub(super) fn waits(&self, owner: Owner) -> bool {
        self.owners.get(&owner).is_some_and(|h| h.waits > 0)
    }

    /// Returns whether the initiator and the unit of a claim will both be within their shares after
    /// allocating `need` bytes: the pool divided by the number of accounts that use or want memory.
    /// An account without memory is always within its share.
    pub(super) fn is_within_share(&self, claim: Claim, need: usize) -> bool {
        self.is_within(self.initiator(claim.owner), self.active_initiators, need)
            && self.is_within(self.unit(claim.unit), self.active_units, need)
    }

    /// Returns whether initiators should return memory to grant a claim of another initiator: it
    /// will be within its shares. Without guaranteed parts, only the share of the initiator counts,
    /// because the other initiators may have used up the share of the unit.
    pub(super) fn is_entitled(&self, claim: Claim, need: usize) -> bool {
        match self.of_initiators.size {
            0 => self.is_within(self.initiator(claim.owner), self.active_initiators, need),
            _ => self.is_within_share(claim, need),
        }
    }

    fn is_within(&self, account: Option<&Account>, active: usize, need: usize) -> bool {
        account.is_none_or(|a| a.data == 0 || a.data + need <= self.len / active.max(1))
    }

    /// Returns whether the initiator of an owner uses more than half of its share. If this is false
    /// for all initiators, they leave at least half of the pool.
    pub(super) fn is_beyond_half_share(&self, owner: Owner) -> bool {
        let most = self.len / (2 * self.active_initiators.max(1));
        self.initiator(owner).is_some_and(|a| a.data > most)
    }

    /// Returns whether two owners have the same initiator.
    pub(super) fn is_same_initiator(&self, one: Owner, other: Owner) -> bool {
        let initiator = |owner| self.owners.get(&owner).map(|holding| holding.initiator);
        one == other || initiator(one).is_some_and(|of_one| Some(of_one) == initiator(other))
    }

    pub(super) fn has_reserve(&self, unit: Option<u32>) -> bool {
        self.units.get(place(unit)).is_some_and(|u| u.has_reserve)
    }

    /// Returns whether no memory is charged, and there are only accounts for sessions.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.owners.values().all(|h| h.is_member)
            && self.active_initiators + self.active_units == 0
            && self.common_used + self.of_initiators.used + self.of_units.used == 0
    }

    /// Returns the guaranteed parts of an initiator and of a unit.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (usize, usize) {
        (self.of_initiators.part, self.of_units.part)
    }
}
