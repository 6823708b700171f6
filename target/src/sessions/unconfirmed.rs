//! The choice of a connection that gives way to a newer one, among those whose peers have proved
//! nothing yet.
//!
//! A connection request may bear a forged address. So what is kept for requests is bounded, and a
//! newer one always gets a place: the oldest request from the address with most of them gives way.

use std::collections::HashMap;
use std::net::IpAddr;

use super::budget::counted_address;

/// A connection that is not established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unconfirmed<T> {
    /// Address that its request seems to come from.
    pub address: IpAddr,
    /// Name of the connection in its table.
    pub what: T,
}

/// Of these, in the order of their requests, the one that gives way: the oldest of the address that
/// has most of them.
pub fn displaceable<T: Copy>(all: &[Unconfirmed<T>]) -> Option<T> {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for one in all {
        *counts.entry(counted_address(one.address)).or_default() += 1;
    }
    // A sender of forged requests from one address displaces its own. One that forges many
    // addresses has to send as many requests as there are places before it displaces another
    // host's.
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
    fn the_address_with_most_of_them_loses_its_oldest() {
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
