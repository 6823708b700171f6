//! The limiters of a target's initiators.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{IoLimits, Limiter};

/// Initiators without sessions whose limiters are kept, while they still owe.
pub const MAX_IDLE: usize = 1024;

/// An initiator's limiter by its name and limits: all its sessions at a target share it, over all
/// transports. One that has used more than its rate does not get rid of that by another login.
#[derive(Debug, Default)]
pub struct Initiators(Mutex<HashMap<(String, IoLimits), Arc<Limiter>>>);

impl Initiators {
    /// The limiter of an initiator.
    #[must_use]
    pub fn limiter(&self, initiator: &str, limits: &IoLimits) -> Arc<Limiter> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (initiator.to_owned(), *limits);
        if let Some(limiter) = all.get(&key) {
            return Arc::clone(limiter);
        }
        let now = Instant::now();
        let is_used = |limiter: &Arc<Limiter>| Arc::strong_count(limiter) > 1;
        all.retain(|_, limiter| is_used(limiter) || limiter.owes(now));
        let mut left = MAX_IDLE;
        all.retain(|_, limiter| {
            let is_kept = is_used(limiter) || left > 0;
            left -= usize::from(!is_used(limiter) && is_kept);
            is_kept
        });
        let limiter = Arc::new(Limiter::new(limits));
        all.insert(key, Arc::clone(&limiter));
        limiter
    }

    /// Those that sessions use, with their names.
    #[must_use]
    pub fn used(&self) -> Vec<(String, Arc<Limiter>)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let used = all
            .iter()
            .filter(|(_, limiter)| Arc::strong_count(limiter) > 1);
        let named = used.map(|((name, _), limiter)| (name.clone(), Arc::clone(limiter)));
        let mut named: Vec<_> = named.collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::Cost;

    #[test]
    fn sessions_of_an_initiator_share_a_limiter_which_outlives_them_while_it_owes() {
        let table = Initiators::default();
        let limits = IoLimits {
            iops: Some(1),
            ..IoLimits::default()
        };
        let one = table.limiter("one", &limits);
        assert!(Arc::ptr_eq(&one, &table.limiter("one", &limits)));
        assert!(!Arc::ptr_eq(&one, &table.limiter("two", &limits)));
        let cost = Cost {
            is_write: false,
            bytes: 0,
        };
        for _ in 0..100 {
            one.book(cost, Instant::now());
        }
        let address = Arc::as_ptr(&one);
        drop(one);
        assert_eq!(table.used().len(), 0);
        let _ = table.limiter("three", &limits);
        let again = table.limiter("one", &limits);
        assert_eq!(Arc::as_ptr(&again), address);
        assert_eq!(table.used().len(), 1);
    }

    #[test]
    fn names_that_come_and_go_do_not_pile_up() {
        let table = Initiators::default();
        let limits = IoLimits {
            iops: Some(1),
            ..IoLimits::default()
        };
        for n in 0..2 * MAX_IDLE {
            let limiter = table.limiter(&n.to_string(), &limits);
            let cost = Cost {
                is_write: true,
                bytes: 0,
            };
            for _ in 0..100 {
                limiter.book(cost, Instant::now());
            }
        }
        assert!(table.0.lock().unwrap().len() <= MAX_IDLE + 1);
    }
}
