//! Timeouts and capacity: when links are closed, and when new links are accepted.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use tracing::{info, warn};

use super::{LISTENER, Link, Links, watch};
use crate::netif::LocalAddresses;

/// How often to check that the addresses of links are still local.
const CHECK: Duration = Duration::from_secs(1);

impl Links {
    /// Returns the next time when [`Links::expire`] should be called.
    pub(in crate::shm) fn deadline(&self) -> Option<Instant> {
        let greetings = self.all().filter_map(Link::until);
        let check = (!self.live.is_empty()).then_some(self.check_due);
        greetings.chain(self.rests_until).chain(check).min()
    }

    /// Closes links if their first message has timed out or their addresses are no longer local.
    /// Starts accepting again after an error.
    pub(in crate::shm) fn expire(&mut self, now: Instant) {
        if self.rests_until.take_if(|until| *until <= now).is_some() {
            self.attend_or_warn();
        }
        for at in (0..self.live.len()).rev() {
            let slot = self.live[at];
            let link = self.slots[slot].link.as_ref();
            if let Some(link) = link.filter(|link| link.until().is_some_and(|until| until <= now)) {
                if let Some(held_back) = self.lines.greetings.allow_message(now) {
                    let what = match link.is_outgoing {
                        // This can also happen if all its workers are busy.
                        true => "timed out waiting for WELCOME",
                        false => "timed out waiting for HELLO",
                    };
                    info!(peer = %link.peer, held_back, "{what}");
                }
                self.counters.refused += 1;
                self.close_link(slot);
            }
        }
        if now >= self.check_due {
            self.check_due = now + CHECK;
            if !self.live.is_empty() {
                match LocalAddresses::query() {
                    Ok(all) => self.check_addresses(|addr| all.has(addr)),
                    // Don't close links due to a temporary error.
                    Err(error) => warn!(%error, "cannot list the addresses of this host"),
                }
            }
        }
    }

    /// Closes links if their addresses are no longer local, because access rules identify hosts by
    /// address, and the address could now be used by a different host.
    pub(super) fn check_addresses(&mut self, is_local: impl Fn(IpAddr) -> bool) {
        let has_own = is_local(self.own);
        for at in (0..self.live.len()).rev() {
            let slot = self.live[at];
            let link = self.slots[slot].link.as_ref();
            if let Some(link) = link.filter(|link| !has_own || !is_local(link.peer)) {
                let (own, peer) = (self.own, link.peer);
                info!(%own, %peer, "closing a link: its address was removed from this host");
                self.close_link(slot);
            }
        }
    }

    /// Adds the listener to the epoll set if there are free slots, or removes it. Connections will
    /// then be accepted by other workers, or wait in the kernel.
    ///
    /// # Errors
    /// Returns the errors of `epoll_ctl(2)`.
    pub(super) fn attend(&mut self) -> io::Result<()> {
        let Some(listener) = &self.listener else {
            return Ok(());
        };
        let wanted = self.rests_until.is_none() && !self.free.is_empty();
        if wanted == self.is_attended {
            return Ok(());
        }
        if wanted {
            // A new connection wakes all sleeping workers that share the listener, but only one of
            // them will accept it. `EPOLLEXCLUSIVE` has no effect because the workers wait on the
            // epoll set, not on the listener.
            watch(&self.set, listener, LISTENER)?;
        } else {
            epoll::delete(&self.set, listener)?;
        }
        self.is_attended = wanted;
        Ok(())
    }

    /// Calls [`Links::attend`]. If this fails, we will retry when the next link is added or closed.
    pub(super) fn attend_or_warn(&mut self) {
        if let Err(error) = self.attend() {
            warn!(%error, "cannot add the shared-memory listener to the epoll set");
        }
    }
}
