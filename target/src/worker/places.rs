//! Which devices the server has open, and how one is closed on all workers together.
//!
//! A software NIC has a socket per worker behind one address, and packets are steered by the order
//! in which these were bound. So a device whose last portal has gone is closed only when no worker
//! needs it any more, and opened again for the same address only after that; a portal that comes back
//! before takes the device as it is.
//!
//! ```text
//! wanted → unwanted: each worker ends its sessions, and says when it is idle
//!    ↑        │
//!    └────────┤ wanted again: nobody is idle
//!             └→ all are idle → closing → the last one has closed it → free
//! ```

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long workers may take to close a device that none of them needs.
const PATIENCE: Duration = Duration::from_secs(5);

/// The places of devices: the same number for all workers.
#[derive(Debug, Default)]
pub struct Places(Mutex<Vec<Option<Held>>>);

#[derive(Debug)]
struct Held {
    addr: IpAddr,
    /// Workers that have it.
    holders: u16,
    /// Those that need it no more, by number.
    idle: Vec<u16>,
    wanted: bool,
    closing: bool,
}

/// A place for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is open there.
    Open {
        /// The place.
        place: usize,
        /// Whether it was wanted before.
        was_wanted: bool,
    },
    /// It is to be opened there.
    New(usize),
}

impl Places {
    /// A place for the device at an address, which is wanted from now on. Waits while one at this
    /// address is being closed; `None` if that does not end.
    pub fn take(&self, addr: IpAddr) -> Option<Place> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(place) = self.try_take(addr) {
                return Some(place);
            }
            if Instant::now() > until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn try_take(&self, addr: IpAddr) -> Option<Place> {
        let mut places = self.lock();
        let here = |held: &Option<Held>| held.as_ref().is_some_and(|h| h.addr == addr);
        if let Some(place) = places.iter().position(here) {
            let held = places[place].as_mut().expect("just found");
            if held.closing {
                return None;
            }
            held.idle.clear();
            let was_wanted = std::mem::replace(&mut held.wanted, true);
            return Some(Place::Open { place, was_wanted });
        }
        let place = places.iter().position(Option::is_none);
        let place = place.unwrap_or(places.len());
        if place == places.len() {
            places.push(None);
        }
        places[place] = Some(Held {
            addr,
            holders: 0,
            idle: Vec::new(),
            wanted: true,
            closing: false,
        });
        Some(Place::New(place))
    }

    /// So many workers get the device of a new place.
    pub fn fill(&self, place: usize, holders: u16) {
        if let Some(held) = &mut self.lock()[place] {
            held.holders = holders;
        }
    }

    /// A place is not needed after all.
    pub fn give_back(&self, place: Place) {
        match place {
            Place::New(place) => self.lock()[place] = None,
            Place::Open { place, was_wanted } => {
                if let Some(held) = &mut self.lock()[place] {
                    held.wanted = was_wanted;
                }
            }
        }
    }

    /// Only devices at these addresses are wanted from now on.
    pub fn want(&self, is_wanted: impl Fn(IpAddr) -> bool) {
        for held in self.lock().iter_mut().flatten() {
            held.wanted = is_wanted(held.addr);
        }
    }

    /// A worker needs a device no more. Whether it is to close it now.
    pub(super) fn is_over(&self, place: usize, worker: u16) -> bool {
        let mut places = self.lock();
        let Some(held) = places.get_mut(place).and_then(Option::as_mut) else {
            return false;
        };
        if held.wanted {
            return false;
        }
        if !held.idle.contains(&worker) {
            held.idle.push(worker);
        }
        held.closing = held.idle.len() >= usize::from(held.holders);
        held.closing
    }

    /// A worker has closed a device.
    pub(super) fn closed(&self, place: usize) {
        let mut places = self.lock();
        if let Some(held) = &mut places[place] {
            held.holders -= 1;
            if held.holders == 0 {
                places[place] = None;
            }
        }
    }

    /// Devices that are open, or being closed.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.lock().iter().flatten().map(|held| held.addr).collect()
    }

    /// Every change of the table is whole, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Held>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(host: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, host])
    }

    #[test]
    fn a_device_is_closed_by_all_together_and_its_place_is_used_again() {
        let places = Places::default();
        assert_eq!(places.take(addr(1)), Some(Place::New(0)));
        places.fill(0, 2);
        assert_eq!(places.take(addr(2)), Some(Place::New(1)));
        places.fill(1, 1);
        assert!(!places.is_over(0, 0), "it is wanted");
        places.want(|a| a == addr(2));
        assert!(!places.is_over(0, 0));
        assert!(!places.is_over(0, 0), "the other one still needs it");
        assert!(places.is_over(0, 1));
        assert_eq!(places.try_take(addr(1)), None, "it is being closed");
        assert!(places.is_over(0, 0));
        places.closed(0);
        assert_eq!(places.addresses(), [addr(1), addr(2)]);
        places.closed(0);
        assert_eq!(places.take(addr(1)), Some(Place::New(0)));
    }

    #[test]
    fn a_device_that_is_wanted_again_stays() {
        let places = Places::default();
        places.take(addr(1));
        places.fill(0, 2);
        places.want(|_| false);
        assert!(!places.is_over(0, 0));
        let taken = places.take(addr(1)).unwrap();
        let again = Place::Open {
            place: 0,
            was_wanted: false,
        };
        assert_eq!(taken, again);
        assert!(!places.is_over(0, 0) && !places.is_over(0, 1));
        // What wanted it has failed.
        places.give_back(taken);
        assert!(!places.is_over(0, 1));
        assert!(places.is_over(0, 0));
    }
}
