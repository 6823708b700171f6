//! Selects a connection to drop for a newer one, while the peers of both are not verified.
//!
//! The source address of a connection request can be forged. Therefore, the number of pending
//! requests is bounded, but a new request is always accepted: we drop the oldest request from the
//! address with the most requests.

use std::collections::HashMap;
use std::net::IpAddr;

use super::budget::counted_address;

/// A connection that is not established yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unconfirmed<T> {
    /// Source address of the request, which may be forged.
    pub address: IpAddr,
    /// Identifies the connection in its table.
    pub what: T,
}

/// Returns the connection to drop: the oldest from the address with the most connections. `all`
/// must be sorted by age.
pub fn displaceable<T: Copy>(all: &[Unconfirmed<T>]) -> Option<T> {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for one in all {
        *counts.entry(counted_address(one.address)).or_default() += 1;
    }
    // If forged requests use a single address, they will replace each other. With many addresses,
    // an attacker has to send as many requests as there are entries before the request of another
    // host is dropped.
    let most = counts.values().max()?;
    let victim = all
        .iter()
        .find(|one| counts[&counted_address(one.address)] == *most);
    victim.map(|one| one.what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busiest_address_loses_oldest_connection() {
        let hosts = [1, 2, 3, 2, 3];
        let of = |range: std::ops::Range<usize>| {
            let all = range.map(|what| Unconfirmed {
                address: IpAddr::from([10, 0, 0, hosts[what]]),
                what,
            });
            displaceable(&all.collect::<Vec<_>>())
        };
        assert_eq!(of(0..0), None);
        assert_eq!(of(0..3), Some(0), "one of each: the oldest");
        assert_eq!(of(0..5), Some(1), "two have two each");
        assert_eq!(of(2..5), Some(2));
    }
}
