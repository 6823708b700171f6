//! Limiters for the initiators of a target.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{IoLimits, Limiter};
use crate::config;

/// Maximum number of limiters kept for initiators without a session while they have debt.
pub const MAX_IDLE: usize = 1024;

/// Owner of a limiter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LimiterKey {
    /// Rule that sets the limits. The limits are not shared with an initiator at another address or
    /// without authentication, which must not use up the capacity granted by this rule.
    pub rule: config::RuleSubject,
    /// Name of the initiator, or its address if the rule does not match names.
    pub initiator: String,
    /// Limits.
    pub limits: IoLimits,
}

/// Limiters for initiators. All sessions of an initiator on a target share a limiter if the same
/// rule applies. An initiator with debt cannot get rid of it by logging in again.
#[derive(Debug, Default)]
pub struct Initiators(Mutex<HashMap<LimiterKey, Arc<Limiter>>>);

impl Initiators {
    /// Returns the limiter for an initiator.
    #[must_use]
    pub fn limiter(&self, key: LimiterKey) -> Arc<Limiter> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        let limiter = Arc::new(Limiter::new(&key.limits));
        all.insert(key, Arc::clone(&limiter));
        limiter
    }

    /// Returns the limiters used by sessions, with the initiator names.
    #[must_use]
    pub fn used(&self) -> Vec<(String, Arc<Limiter>)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let used = all
            .iter()
            .filter(|(_, limiter)| Arc::strong_count(limiter) > 1);
        let named = used.map(|(key, limiter)| (key.initiator.clone(), Arc::clone(limiter)));
        let mut named: Vec<_> = named.collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::Cost;

    fn key(initiator: &str) -> LimiterKey {
        LimiterKey {
            rule: (None, None, None),
            initiator: initiator.to_owned(),
            limits: IoLimits {
                iops: Some(1),
                ..IoLimits::default()
            },
        }
    }

    #[test]
    fn sessions_share_limiter_kept_while_indebted() {
        let table = Initiators::default();
        let one = table.limiter(key("one"));
        assert!(Arc::ptr_eq(&one, &table.limiter(key("one"))));
        assert!(!Arc::ptr_eq(&one, &table.limiter(key("two"))));
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
        let _ = table.limiter(key("three"));
        let again = table.limiter(key("one"));
        assert_eq!(Arc::as_ptr(&again), address);
        assert_eq!(table.used().len(), 1);
    }

    #[test]
    fn idle_limiters_are_bounded() {
        let table = Initiators::default();
        for n in 0..2 * MAX_IDLE {
            let limiter = table.limiter(key(&n.to_string()));
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

    #[test]
    fn rules_have_separate_limiters() {
        let table = Initiators::default();
        let by_name = table.limiter(key("one"));
        let by_address = table.limiter(LimiterKey {
            rule: (None, None, Some("192.0.2.0/24".parse().unwrap())),
            ..key("one")
        });
        assert!(!Arc::ptr_eq(&by_name, &by_address));
        let names: Vec<_> = table.used().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["one", "one"]);
    }
}
