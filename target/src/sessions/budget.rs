//! Bounds on the number of sessions, in all and from one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};

use riser_sync::{Mutex, MutexGuard};

use crate::srp::LoginLimits;

/// Bounds on sessions, and on what a login of SRP may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// I_T nexuses at once.
    pub sessions: u32,
    /// I_T nexuses at once from one address.
    pub per_address: u32,
    /// Limits of a login.
    pub login: LoginLimits,
}

impl SessionLimits {
    /// Returns the bounds on sessions alone.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        Bounds {
            sessions: self.sessions,
            per_address: self.per_address,
        }
    }
}

/// Sessions that a budget admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// I_T nexuses, or discovery sessions, at once.
    pub sessions: u32,
    /// At once from one address.
    pub per_address: u32,
}

/// Sessions at present, against bounds that may change with the configuration.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    addresses: HashMap<IpAddr, u32>,
}

/// One session of a budget, which has it back when this is dropped.
#[derive(Debug)]
pub struct Permit {
    budget: Budget,
    address: IpAddr,
}

impl Counts {
    fn has_room(&self, bounds: Bounds, address: IpAddr, replaced: Option<IpAddr>) -> bool {
        let less = |is_less: bool| u32::from(is_less);
        let there = self.addresses.get(&address).copied().unwrap_or(0);
        // The replaced session may have ended on another worker since it was looked up.
        self.total.saturating_sub(less(replaced.is_some())) < bounds.sessions
            && there.saturating_sub(less(replaced == Some(address))) < bounds.per_address
    }
}

impl Budget {
    /// Returns a permit for another session from an address, if there is room for it. A session
    /// that replaces one from the address `replaced` needs no room beside that.
    #[must_use]
    pub fn acquire(
        &self,
        bounds: Bounds,
        address: IpAddr,
        replaced: Option<IpAddr>,
    ) -> Option<Permit> {
        let mut counts = self.lock();
        if !counts.has_room(bounds, address, replaced) {
            return None;
        }
        counts.total += 1;
        *counts.addresses.entry(address).or_default() += 1;
        let budget = self.clone();
        Some(Permit { budget, address })
    }

    /// Whether [`Budget::acquire`] would return a permit.
    #[must_use]
    pub fn has_room(&self, bounds: Bounds, address: IpAddr, replaced: Option<IpAddr>) -> bool {
        self.lock().has_room(bounds, address, replaced)
    }

    /// Returns the number of sessions at present.
    #[must_use]
    pub fn sessions(&self) -> u32 {
        self.lock().total
    }

    /// Every change of the counts is whole, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = self.budget.lock();
        counts.total -= 1;
        let there = counts.addresses.get_mut(&self.address);
        let there = there.expect("its session was counted there");
        *there -= 1;
        if *there == 0 {
            counts.addresses.remove(&self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        sessions: 3,
        per_address: 2,
    };

    fn address(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    #[test]
    fn a_permit_that_is_dropped_makes_room() {
        let budget = Budget::default();
        let acquire = |host| budget.acquire(BOUNDS, address(host), None);
        let (one, two) = (acquire(1), acquire(1));
        assert!(one.is_some() && two.is_some());
        assert!(acquire(1).is_none(), "the bound of an address");
        let three = acquire(2);
        assert!(three.is_some());
        assert!(acquire(3).is_none(), "the bound of all");
        drop(one);
        assert_eq!(budget.sessions(), 2);
        assert!(acquire(3).is_some());
        drop((two, three));
        assert_eq!(budget.sessions(), 0);
        assert!(budget.lock().addresses.is_empty());
    }

    #[test]
    fn a_session_that_replaces_another_needs_no_room_beside_it() {
        let budget = Budget::default();
        let held: Vec<_> = [1, 1, 2]
            .iter()
            .map(|host| budget.acquire(BOUNDS, address(*host), None).unwrap())
            .collect();
        let has_room = |host, replaced| {
            let replaced: Option<u8> = replaced;
            budget.has_room(BOUNDS, address(host), replaced.map(address))
        };
        assert!(!has_room(2, None));
        assert!(has_room(2, Some(1)) && has_room(1, Some(1)));
        assert!(!has_room(1, Some(2)), "that makes no room at its address");
        drop(held);
    }

    #[test]
    fn a_replaced_session_may_have_ended_meanwhile() {
        let budget = Budget::default();
        let permit = budget.acquire(BOUNDS, address(1), Some(address(1)));
        assert!(permit.is_some());
        assert!(budget.has_room(BOUNDS, address(2), Some(address(2))));
    }
}
