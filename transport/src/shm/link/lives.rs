//! What time and room do to links: those that end, and when the device accepts others.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use tracing::{info, warn};

use super::{LISTENER, Link, Links, watch};
use crate::netif::LocalAddresses;

/// Interval at which the addresses of links are looked for on this host.
const CHECK: Duration = Duration::from_secs(1);

impl Links {
    /// Next time at which [`Links::expire`] has something to do.
    pub(in crate::shm) fn deadline(&self) -> Option<Instant> {
        let greetings = self.all().filter_map(Link::until);
        let check = (!self.live.is_empty()).then_some(self.check_due);
        greetings.chain(self.rests_until).chain(check).min()
    }

    /// Ends links whose first message has not come in time, or whose addresses this host no longer
    /// has, and accepts again after a rest.
    pub(in crate::shm) fn expire(&mut self, now: Instant) {
        if self.rests_until.take_if(|until| *until <= now).is_some() {
            self.attend_or_warn();
        }
        for at in (0..self.live.len()).rev() {
            let slot = self.live[at];
            let link = self.slots[slot].link.as_ref();
            if let Some(link) = link.filter(|link| link.until().is_some_and(|until| until <= now)) {
                if let Some(held_back) = self.lines.greetings.pass(now) {
                    let what = match link.is_outgoing {
                        // All its workers may be full.
                        true => "the process that shares memory there does not answer",
                        false => "a process sends no first message",
                    };
                    info!(peer = %link.peer, held_back, "{what}");
                }
                self.counters.refused += 1;
                self.end(slot);
            }
        }
        if now >= self.check_due {
            self.check_due = now + CHECK;
            if !self.live.is_empty() {
                match LocalAddresses::look() {
                    Ok(all) => self.check_addresses(|addr| all.has(addr)),
                    // An error of a moment ends nothing.
                    Err(error) => warn!(%error, "the addresses of this host cannot be listed"),
                }
            }
        }
    }

    /// Ends links of addresses that this host no longer has: another host may have them by now, and
    /// access rules distinguish hosts by their addresses.
    pub(super) fn check_addresses(&mut self, is_local: impl Fn(IpAddr) -> bool) {
        let has_own = is_local(self.own);
        for at in (0..self.live.len()).rev() {
            let slot = self.live[at];
            let link = self.slots[slot].link.as_ref();
            if let Some(link) = link.filter(|link| !has_own || !is_local(link.peer)) {
                let (own, peer) = (self.own, link.peer);
                info!(%own, %peer, "a link ends, since this host no longer has its address");
                self.end(slot);
            }
        }
    }

    /// Watches the listener while there is room for a link, and leaves it otherwise: the connection
    /// goes to another worker, or waits in the kernel.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`.
    pub(super) fn attend(&mut self) -> io::Result<()> {
        let Some(listener) = &self.listener else {
            return Ok(());
        };
        let wanted = self.rests_until.is_none() && !self.free.is_empty();
        if wanted == self.is_attended {
            return Ok(());
        }
        if wanted {
            // A connection wakes all workers that share it and sleep, and one of them accepts it:
            // `EPOLLEXCLUSIVE` has no effect, since what workers wait for is the set.
            watch(&self.set, listener, LISTENER)?;
        } else {
            epoll::delete(&self.set, listener)?;
        }
        self.is_attended = wanted;
        Ok(())
    }

    /// [`Links::attend`], tried again with the next link that comes or ends.
    pub(super) fn attend_or_warn(&mut self) {
        if let Err(error) = self.attend() {
            warn!(%error, "the listener for other processes cannot be watched");
        }
    }
}
