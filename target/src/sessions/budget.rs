//! Limits for the number of sessions, in total and per address.
//!
//! With SLAAC, a host can choose the lower half of its IPv6 addresses, so we count by /64 network.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, PoisonError};

use riser_sync::{Mutex, MutexGuard};

use crate::srp::LoginLimits;

/// Limits for sessions and SRP logins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Maximum number of I_T nexuses.
    pub sessions: u32,
    /// Maximum number of I_T nexuses per address.
    pub per_address: u32,
    /// Limits for a login.
    pub login: LoginLimits,
}

impl SessionLimits {
    /// Returns only the limits for the number of sessions.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        Bounds {
            sessions: self.sessions,
            per_address: self.per_address,
        }
    }
}

/// Returns the address used for counting. For IPv6, this is the /64 network.
#[must_use]
pub fn counted_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// Limits for the number of sessions in a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum number of I_T nexuses, or of discovery sessions.
    pub sessions: u32,
    /// Maximum number per address.
    pub per_address: u32,
}

/// Counts the current sessions. The limits are passed by the caller, because they can change with
/// the configuration.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    addresses: HashMap<IpAddr, u32>,
}

/// The limit that prevents another session, using its name in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReachedBound {
    /// The total number of sessions.
    #[error("limits.max_sessions ({0}) is reached")]
    Sessions(u32),
    /// The number of sessions per address.
    #[error("limits.sessions_per_address ({bound}) is reached for {address}")]
    PerAddress {
        /// The limit.
        bound: u32,
        /// The address used for counting.
        address: IpAddr,
    },
}

/// A session in a budget, which is released on drop.
#[derive(Debug)]
pub struct Permit {
    budget: Budget,
    address: IpAddr,
}

impl Counts {
    fn has_room(&self, bounds: Bounds, address: IpAddr, replaced: Option<IpAddr>) -> bool {
        let less = |is_less: bool| u32::from(is_less);
        let (address, replaced) = (counted_address(address), replaced.map(counted_address));
        let there = self.addresses.get(&address).copied().unwrap_or(0);
        // The replaced session may have been closed by another worker after we looked it up.
        self.total.saturating_sub(less(replaced.is_some())) < bounds.sessions
            && there.saturating_sub(less(replaced == Some(address))) < bounds.per_address
    }
}

impl Budget {
    /// Returns a permit for another session from an address, if the limits allow it. If it replaces
    /// a session from the address `replaced`, that session is not counted.
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
        let address = counted_address(address);
        counts.total += 1;
        *counts.addresses.entry(address).or_default() += 1;
        let budget = self.clone();
        Some(Permit { budget, address })
    }

    /// Returns whether [`Budget::acquire`] would return a permit.
    #[must_use]
    pub fn has_room(&self, bounds: Bounds, address: IpAddr, replaced: Option<IpAddr>) -> bool {
        self.lock().has_room(bounds, address, replaced)
    }

    /// Returns the limit that prevents another session from an address, or `None` if it would be
    /// allowed.
    #[must_use]
    pub fn reached(&self, bounds: Bounds, address: IpAddr) -> Option<ReachedBound> {
        let counts = self.lock();
        let address = counted_address(address);
        let there = counts.addresses.get(&address).copied().unwrap_or(0);
        if there >= bounds.per_address {
            let bound = bounds.per_address;
            return Some(ReachedBound::PerAddress { bound, address });
        }
        (counts.total >= bounds.sessions).then_some(ReachedBound::Sessions(bounds.sessions))
    }

    /// Returns the maximum number of sessions from a single address.
    #[must_use]
    pub fn most_per_address(&self) -> u32 {
        self.lock().addresses.values().copied().max().unwrap_or(0)
    }

    /// Returns the current number of sessions.
    #[must_use]
    pub fn sessions(&self) -> u32 {
        self.lock().total
    }

    /// We can ignore poison, because a panic cannot leave the counts inconsistent.
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
    fn dropped_permit_makes_room() {
        let budget = Budget::default();
        let acquire = |host| budget.acquire(BOUNDS, address(host), None);
        let (one, two) = (acquire(1), acquire(1));
        assert!(one.is_some() && two.is_some());
        assert!(acquire(1).is_none(), "the bound of an address");
        let reached = |host| Some(budget.reached(BOUNDS, address(host))?.to_string());
        let text = "limits.sessions_per_address (2) is reached for 10.0.0.1";
        assert_eq!(reached(1).as_deref(), Some(text));
        assert_eq!((reached(2), budget.most_per_address()), (None, 2));
        let three = acquire(2);
        assert!(three.is_some());
        assert!(acquire(3).is_none(), "the bound of all");
        assert_eq!(
            reached(3).as_deref(),
            Some("limits.max_sessions (3) is reached")
        );
        drop(one);
        assert_eq!(budget.sessions(), 2);
        assert!(acquire(3).is_some());
        drop((two, three));
        assert_eq!(budget.sessions(), 0);
        assert!(budget.lock().addresses.is_empty());
    }

    #[test]
    fn replacing_session_needs_no_room() {
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
    fn replaced_session_may_already_be_closed() {
        let budget = Budget::default();
        let permit = budget.acquire(BOUNDS, address(1), Some(address(1)));
        assert!(permit.is_some());
        assert!(budget.has_room(BOUNDS, address(2), Some(address(2))));
    }

    #[test]
    fn ipv6_addresses_count_by_network() {
        let budget = Budget::default();
        let of = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]);
        let held: Vec<_> = (0..BOUNDS.per_address as u16)
            .map(|host| budget.acquire(BOUNDS, of(host), None).unwrap())
            .collect();
        assert!(budget.acquire(BOUNDS, of(99), None).is_none());
        drop(held);
    }
}
