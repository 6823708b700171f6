//! Session accounts: statistics for the commands sent to each unit.

use std::collections::HashMap;
use std::sync::Arc;

use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_scsi::opcode::Opcode;

use super::{ExpectedUnit, LunMap, Unit};
use crate::qos::Limiter;
use crate::stats::{Functions, SessionStats};

/// Accounts of a session, indexed by the position of the unit in the session's LUN map.
#[derive(Debug, Default)]
pub struct Accounts(Vec<Option<Arc<SessionStats>>>);

/// Unit addressed by a command, as seen by its session.
#[derive(Debug)]
pub struct AddressedUnit {
    /// Unit mapped to the LUN.
    pub unit: Arc<Unit>,
    /// LUN of the unit.
    pub lun: LunId,
    /// The LUN is read-only.
    pub read_only: bool,
    /// The initiator may expect a different unit at this LUN.
    pub is_stale: bool,
    /// The unit that the initiator expects, for commands that may change this.
    pub expected_unit: Option<ExpectedUnit>,
    /// Account for the command.
    pub account: Arc<SessionStats>,
    /// Limits of the initiator.
    pub limiter: Option<Arc<Limiter>>,
}

impl Accounts {
    /// Returns the unit addressed by a command. The account is created for the first command.
    pub fn addressed(
        &mut self,
        luns: &LunMap,
        lun: WireLun,
        cdb: &[u8],
        worker: u16,
    ) -> Option<AddressedUnit> {
        let place = luns.find(lun)?;
        let mapping = luns.mapping(place);
        let expected = luns.expected(place);
        let account = match self.0.get(place) {
            Some(Some(account)) => Arc::clone(account),
            _ => self.open_account(luns, place, worker),
        };
        Some(AddressedUnit {
            unit: Arc::clone(&mapping.unit),
            lun: luns.luns()[place],
            read_only: mapping.read_only,
            is_stale: expected.is_stale(),
            expected_unit: Opcode::requests_names(cdb).then(|| expected.clone()),
            account,
            limiter: luns.limiter().cloned(),
        })
    }

    #[cold]
    fn open_account(&mut self, luns: &LunMap, place: usize, worker: u16) -> Arc<SessionStats> {
        if self.0.len() <= place {
            self.0.resize(luns.luns().len(), None);
        }
        let stats = Arc::clone(&luns.mapping(place).stats);
        let account = Arc::new(SessionStats::new(stats, worker));
        self.0[place] = Some(Arc::clone(&account));
        account
    }

    /// Updates the accounts for a new LUN map. Several entries may use the same unit of the target,
    /// so accounts are matched by unit, in map order.
    pub fn follow(&mut self, luns: &LunMap) {
        let mut old: HashMap<_, Vec<_>> = HashMap::new();
        for account in self.0.drain(..).flatten().rev() {
            let accounts = old.entry(Arc::as_ptr(account.lun())).or_default();
            accounts.push(account);
        }
        let places = 0..luns.luns().len();
        self.0.extend(places.map(|place| {
            let stats = Arc::as_ptr(&luns.mapping(place).stats);
            old.get_mut(&stats)?.pop()
        }));
    }

    /// Adds the totals of a closed session to the totals of its initiator, which are kept by each
    /// unit.
    pub fn keep(&self, initiator: &str) {
        for account in self.iter() {
            account.lun().keep(initiator, account.share());
        }
    }

    /// Returns all existing accounts, in map order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<SessionStats>> {
        self.0.iter().flatten()
    }
}

/// Statistics of a connection: counters of its fabric, and counts common to all fabrics.
#[derive(Debug, Default)]
pub struct Statistics<C> {
    /// Counters of the fabric.
    pub counters: C,
    /// Number of task management functions by result.
    pub functions: Functions,
    /// Command statistics per unit.
    pub accounts: Accounts,
}

#[cfg(test)]
mod tests {
    use riser_scsi::lu::LogicalUnit;

    use super::*;
    use crate::fabric::{Mapping, UnitIdx};
    use crate::stats::LunStats;

    #[test]
    fn luns_of_unit_have_separate_accounts() {
        let lu = LogicalUnit::new(crate::fixture::unit_config(2048)).unwrap();
        let mapping = Mapping {
            unit: Arc::new(Unit::new(UnitIdx(0), Arc::new(lu), 3)),
            stats: Arc::new(LunStats::new("demo", 3, None)),
            read_only: false,
        };
        let map = |numbers: &[u32]| {
            let number = |n: &u32| (LunId::new(*n).unwrap(), mapping.clone());
            LunMap::new(numbers.iter().map(number))
        };
        let mut accounts = Accounts::default();
        let before = map(&[1, 2]);
        let account = |accounts: &mut Accounts, luns: &LunMap, number: u8| {
            let lun = [0, number, 0, 0, 0, 0, 0, 0];
            let addressed = accounts.addressed(luns, lun, &[], 0);
            addressed.unwrap().account
        };
        let two = [1, 2].map(|number| account(&mut accounts, &before, number));
        assert!(!Arc::ptr_eq(&two[0], &two[1]));
        let after = map(&[0, 1, 2]);
        accounts.follow(&after);
        let all = [0, 1, 2].map(|number| account(&mut accounts, &after, number));
        for account in &two {
            let mut all = all.iter();
            assert!(all.any(|other| Arc::ptr_eq(other, account)));
        }
    }
}
