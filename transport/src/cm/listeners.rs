//! Listeners and the half-open connections in their backlogs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use chacha20::rand_core::Rng;

use super::conn::{Conn, Holder, Unconfirmed};
use super::{CmState, IbCmId, PeerAddr};
use crate::wire::cm_msg::ServiceId;

/// Listener for a service ID or a range of service IDs.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) service_id: ServiceId,
    pub(super) mask: u64,
    pub(super) backlog: usize,
    /// Number of half-open connections, at most `backlog`.
    pub(super) half_open: usize,
}

impl Listener {
    fn accepts(&self, service_id: ServiceId) -> bool {
        (self.service_id.0 ^ service_id.0) & self.mask == 0
    }

    pub(super) fn overlaps(&self, service_id: ServiceId, mask: u64) -> bool {
        // The IDs must be equal in all bits set in both masks. For the other bits, there is always
        // an ID that matches both.
        (self.service_id.0 ^ service_id.0) & self.mask & mask == 0
    }
}

/// Listeners, and the entries of half-open connections in their backlogs.
#[derive(Debug)]
pub(super) struct Listeners {
    pub(super) by_id: BTreeMap<IbCmId, Listener>,
    /// Number of half-open connections by listener and peer.
    pub(super) half_open: BTreeMap<(IbCmId, PeerAddr), usize>,
    /// Half-open connections with an unconfirmed REP, oldest first for each limit.
    pub(super) unconfirmed: BTreeMap<(Holder, u64), IbCmId>,
    /// Number of REPs sent, used to determine the order.
    reps: u64,
    /// Number of backlog entries reserved per peer.
    share: usize,
}

impl Listeners {
    pub(super) fn new(share: usize) -> Self {
        Self {
            by_id: BTreeMap::new(),
            half_open: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            reps: 0,
            share,
        }
    }

    /// Returns the listener for a service ID.
    pub(super) fn find(&self, service_id: ServiceId) -> Option<IbCmId> {
        // There are only a few listeners, and each can use a range of service IDs, so we use a
        // linear search.
        self.by_id
            .iter()
            .find(|(_, listener)| listener.accepts(service_id))
            .map(|(id, _)| *id)
    }

    /// Returns a random service ID without a listener. As for a port number, it is not known to
    /// strangers, and not used again soon.
    pub(super) fn unused(&self, random: &mut impl Rng) -> ServiceId {
        loop {
            let id = ServiceId(ServiceId::ASSIGN.0 | random.next_u64() >> 8);
            if id != ServiceId::ASSIGN && self.find(id).is_none() {
                return id;
            }
        }
    }

    pub(super) fn has_room_for(&self, listener: IbCmId, from: PeerAddr) -> bool {
        // Check both limits: the backlog can be full even if the peer is within its share.
        let holders = [Holder::Peer(listener, from), Holder::Listener(listener)];
        !holders.into_iter().any(|holder| self.is_full(holder))
    }

    fn is_full(&self, holder: Holder) -> bool {
        let (Holder::Listener(id) | Holder::Peer(id, _)) = holder;
        let listener = &self.by_id[&id];
        let free = listener.backlog.saturating_sub(listener.half_open);
        match holder {
            Holder::Listener(_) => free == 0,
            // A peer can exceed its share if the same amount is still available, so that a host can
            // open many channels at once if the target is idle.
            Holder::Peer(_, addr) => {
                let count = self.half_open.get(&(id, addr)).copied().unwrap_or(0);
                count >= self.share && free <= self.share
            }
        }
    }

    /// Returns the half-open connection to be displaced by a new request if it has waited long
    /// enough: the oldest connection of the peer if it has used its share, or else of the listener.
    ///
    /// One connection is sufficient, since this releases an entry in the backlog and in the share.
    pub(super) fn oldest_unconfirmed(&self, listener: IbCmId, from: PeerAddr) -> Option<IbCmId> {
        let holders = [Holder::Peer(listener, from), Holder::Listener(listener)];
        let holder = holders.into_iter().find(|holder| self.is_full(*holder))?;
        let mut oldest = self.unconfirmed.range((holder, 0)..=(holder, u64::MAX));
        oldest.next().map(|(_, id)| *id)
    }

    /// Adds or removes a connection in this state.
    pub(super) fn count_half_open(&mut self, conn: &Conn, state: CmState, add: bool) {
        let Some(listener) = conn.listener.filter(|_| state.is_half_open()) else {
            return;
        };
        let by_one = |count: usize| if add { count + 1 } else { count - 1 };
        let count = self.half_open.entry((listener, conn.peer)).or_insert(0);
        *count = by_one(*count);
        if *count == 0 {
            self.half_open.remove(&(listener, conn.peer));
        }
        // The listener may already have been removed.
        if let Some(listener) = self.by_id.get_mut(&listener) {
            listener.half_open = by_one(listener.half_open);
        }
    }

    /// Called when a REP is sent: sets the time we will wait for the peer, based on its request and
    /// the `longest` lifetime of a half-open connection.
    pub(super) fn add_rep(&mut self, now: Instant, id: IbCmId, conn: &mut Conn, longest: Duration) {
        self.reps += 1;
        let number = self.reps;
        // Based on the interval and retry count requested by the peer, but limited to the lifetime
        // of a half-open connection. Otherwise a REQ could use an entry for minutes.
        let patience = conn.interval * (u32::from(conn.max_retries) + 1);
        let patience = patience.min(longest);
        conn.unconfirmed = Some(Unconfirmed {
            number,
            sent: now,
            until: now + patience,
            patience,
            renewals_left: conn.max_retries,
        });
        for holder in conn.holders() {
            self.unconfirmed.insert((holder, number), id);
        }
    }

    /// Called when a REP was confirmed, or its connection was closed.
    pub(super) fn remove_rep(&mut self, conn: &mut Conn) {
        if let Some(rep) = conn.unconfirmed.take() {
            for holder in conn.holders() {
                self.unconfirmed.remove(&(holder, rep.number));
            }
        }
    }
}
