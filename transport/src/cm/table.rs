//! The identifiers, their indices, timers and queues: what every part of the
//! machine stands on.

use std::time::{Duration, Instant};

use chacha20::rand_core::Rng;
use riser_state::become_state;

use super::conn::{Conn, Holder, Pending, Unconfirmed};
use super::{Cm, CmState, IbCmError, IbCmEvent, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{
    AdditionalInfo, CmAttribute, CmMessage, CmTimeout, CommId, PrivateData, RejMsg, RejOf,
    RejReason, ServiceId,
};
use crate::wire::mad::{Mad, TransactionId};

/// Time to the first repetition of a DREQ; then twice as long, up to the connection's interval. No
/// peer needs long to answer one, and Linux answers a repeated one only until its short timewait is
/// over.
pub(super) const DREQ_INTERVAL: Duration = Duration::from_millis(250);

/// Time to the first repetition of a REP; then twice as long, up to the connection's interval. All
/// that an unproven address gets without asking again leave within the life of a half-open
/// connection, even if the peer promises to be slow.
const REP_INTERVAL: Duration = Duration::from_millis(500);

/// One service id, or a range of them.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) service_id: ServiceId,
    pub(super) mask: u64,
    pub(super) backlog: usize,
    /// Half-open identifiers that came from it; at most `backlog`.
    pub(super) half_open: usize,
}

impl Listener {
    pub(super) fn takes(&self, service_id: ServiceId) -> bool {
        (self.service_id.0 ^ service_id.0) & self.mask == 0
    }

    pub(super) fn overlaps(&self, service_id: ServiceId, mask: u64) -> bool {
        // Where both masks have a bit the ids must agree in it; elsewhere some id fits both.
        (self.service_id.0 ^ service_id.0) & self.mask & mask == 0
    }
}

/// Returns whether a MAD of ours is this message.
pub(super) fn is_message(mad: &Mad, attribute: CmAttribute) -> bool {
    mad[16..18] == (attribute as u16).to_be_bytes()
}

impl Cm {
    /// An unused identifier, with our worker's number in its low bits.
    pub(super) fn new_id(&mut self) -> IbCmId {
        loop {
            let random = self.random.next_u32();
            let id = IbCmId(CommId((random & !self.worker_mask) | self.worker_index));
            // Zero means "unknown" in messages. Ids are far fewer than numbers.
            if id.0 != CommId(0)
                && !self.conns.contains_key(&id)
                && !self.listeners.contains_key(&id)
            {
                return id;
            }
        }
    }

    pub(super) fn new_transaction(&mut self) -> TransactionId {
        TransactionId(self.random.next_u64())
    }

    /// Makes room for one more identifier, at the cost of a finished one that
    /// has no user if need be.
    pub(super) fn make_room(&mut self) -> Result<(), IbCmError> {
        // Only timewait without a user is cut short. Everything else is a connection, or its user
        // still expects an event.
        if self.id_count() < self.config.max_ids {
            return Ok(());
        }
        let (_, oldest) = *self.finished.first().ok_or(IbCmError::TooManyIds)?;
        self.free(oldest);
        Ok(())
    }

    /// The half-open connection whose place a new request may take: the oldest
    /// one of its peer, where that has its share, or of the listener. `None` if
    /// none has waited long enough.
    ///
    /// One is enough: it leaves its place in the backlog and in the share to
    /// the one that comes.
    pub(super) fn displaceable(
        &self,
        now: Instant,
        listener: IbCmId,
        from: PeerAddr,
    ) -> Option<IbCmId> {
        let holders = [Holder::Peer(listener, from), Holder::Listener(listener)];
        let holder = holders.into_iter().find(|holder| self.is_full(*holder))?;
        let mut oldest = self.unconfirmed.range((holder, 0)..=(holder, u64::MAX));
        let (_, &id) = oldest.next()?;
        let sent = self.conns[&id].unconfirmed.map(|rep| rep.sent)?;
        // A REP needs a round trip to be confirmed. Without this grace a flood of REQs would
        // displace each half-open connection before its RTU could arrive.
        (now >= sent + self.config.half_open_grace).then_some(id)
    }

    /// The user has released the identifier.
    pub(super) fn release(&mut self, id: IbCmId) {
        self.known(id).is_orphan = true;
        self.note_finished(id);
    }

    /// Remember an identifier that may go as soon as another is needed.
    fn note_finished(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        // A released identifier in any other state still has a message to repeat.
        if let (true, CmState::Timewait, Some(at)) = (conn.is_orphan, conn.state, conn.deadline) {
            self.finished.insert((at, id));
        }
    }

    pub(super) fn insert(&mut self, id: IbCmId, conn: Conn) {
        // Counted by its state where it enters; every change of state after that goes by
        // `become_state`.
        self.count_half_open(&conn, conn.state, true);
        let before = self.conns.insert(id, conn);
        assert!(before.is_none(), "a new identifier is new");
    }

    /// The connection of an id from a call of the user, who may have released it.
    pub(super) fn conn(&self, id: IbCmId) -> Result<&Conn, IbCmError> {
        // A released identifier is not the user's any longer, though it may still be in timewait.
        self.conns
            .get(&id)
            .filter(|conn| !conn.is_orphan)
            .ok_or(IbCmError::NoSuchId)
    }

    /// A connection that is known to exist.
    pub(super) fn known(&mut self, id: IbCmId) -> &mut Conn {
        self.conns
            .get_mut(&id)
            .expect("the identifier was just looked up")
    }

    fn count_half_open(&mut self, conn: &Conn, state: CmState, add: bool) {
        let Some(listener) = conn.listener.filter(|_| state.is_half_open()) else {
            return;
        };
        let by_one = |count: usize| if add { count + 1 } else { count - 1 };
        let count = self.half_open.entry((listener, conn.peer)).or_insert(0);
        *count = by_one(*count);
        if *count == 0 {
            self.half_open.remove(&(listener, conn.peer));
        }
        // It may be gone already.
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.half_open = by_one(listener.half_open);
        }
    }

    /// Change state, as the table of transitions allows.
    pub(super) fn become_state(&mut self, id: IbCmId, next: CmState) {
        let mut conn = self
            .conns
            .remove(&id)
            .expect("the identifier was just looked up");
        self.count_half_open(&conn, conn.state, false);
        self.count_half_open(&conn, next, true);
        become_state(&mut conn.state, next);
        // Confirmed or given up: it cannot be displaced any more.
        if !next.is_half_open() {
            self.forget_rep(&mut conn);
        }
        // Once in a connection's life, for all its changes between connected states.
        if next.is_connected() && !conn.is_proven {
            conn.is_proven = true;
            *self.proven.entry(conn.peer).or_insert(0) += 1;
        }
        self.conns.insert(id, conn);
    }

    /// The identifier ends here.
    pub(super) fn free(&mut self, id: IbCmId) {
        // The indices first: their keys are made from the record.
        self.arm(id, None);
        self.forget_claims(id);
        let mut conn = self
            .conns
            .remove(&id)
            .expect("the identifier was just looked up");
        self.count_half_open(&conn, conn.state, false);
        self.forget_rep(&mut conn);
        if let Some(identity) = conn.identity {
            self.by_req.remove(&(conn.peer, identity));
        }
        if conn.is_proven
            && let Some(count) = self.proven.get_mut(&conn.peer)
        {
            *count -= 1;
            if *count == 0 {
                self.proven.remove(&conn.peer);
            }
        }
    }

    /// A REP is sent: from now on the peer is waited for, as long as it wants to
    /// be asked, within limits.
    pub(super) fn note_rep(&mut self, now: Instant, id: IbCmId) {
        self.reps += 1;
        let (number, longest) = (self.reps, self.config.max_half_open);
        let conn = self.known(id);
        // As often, and at the interval, that the peer wants to be asked. Within the limit for
        // half-open connections, or a REQ could hold its place for minutes.
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

    /// The peer has repeated its REQ, so it still waits for the REP. It has as long as before from
    /// now on, as often as its REQ says that it asks: who repeats it without end is not waited
    /// for without end.
    pub(super) fn renew_rep(&mut self, now: Instant, id: IbCmId) {
        let Some(rep) = &mut self.known(id).unconfirmed else {
            return;
        };
        if let Some(left) = rep.renewals_left.checked_sub(1) {
            rep.renewals_left = left;
            rep.until = rep.until.max(now + rep.patience);
        }
    }

    fn forget_rep(&mut self, conn: &mut Conn) {
        if let Some(rep) = conn.unconfirmed.take() {
            for holder in conn.holders() {
                self.unconfirmed.remove(&(holder, rep.number));
            }
        }
    }

    /// Learn the peer's id and queue pair.
    pub(super) fn learn_remote(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        for (peer, guid, claim) in conn.claims() {
            self.claims.insert((peer, guid, claim, id));
        }
        if let Some(identity) = conn.identity {
            self.by_req.insert((conn.peer, identity), id);
        }
    }

    fn forget_claims(&mut self, id: IbCmId) {
        for (peer, guid, claim) in self.conns[&id].claims() {
            self.claims.remove(&(peer, guid, claim, id));
        }
    }

    /// The peer has proved that it made this connection. Others for which its
    /// adapter had the same communication id or queue pair, it has forgotten. The
    /// half-open ones among them may be newer: those end by themselves.
    pub(super) fn end_superseded(&mut self, now: Instant, id: IbCmId) {
        let mut stale = Vec::new();
        for (peer, guid, claim) in self.conns[&id].claims() {
            let with = |id| (peer, guid, claim, IbCmId(CommId(id)));
            let claimants = self.claims.range(with(0)..=with(u32::MAX));
            stale.extend(claimants.map(|(.., other)| *other));
        }
        for other in stale {
            let state = self.conns[&other].state;
            if other != id && state.is_live() && !state.is_half_open() {
                self.on_stale(now, other);
            }
        }
    }

    /// Set or clear the identifier's one timer.
    pub(super) fn arm(&mut self, id: IbCmId, deadline: Option<Instant>) {
        let before = std::mem::replace(&mut self.known(id).deadline, deadline);
        // Each identifier is listed under the time of its timer, so it leaves both sets by that.
        if let Some(before) = before {
            self.timers.remove(&(before, id));
            self.finished.remove(&(before, id));
        }
        if let Some(deadline) = deadline {
            self.timers.insert((deadline, id));
        }
    }

    /// Queue a MAD; a full queue loses it, as the network might.
    pub(super) fn send(&mut self, to: PeerAddr, mad: Mad) {
        if self.outbox.len() < self.config.max_outbox {
            // A peer that sends requests faster than we send answers must not make the queue
            // grow.
            self.outbox.push_back((to, mad));
        } else {
            self.counters.dropped += 1;
        }
    }

    /// Send a message of the connection that needs no answer, and keep it for
    /// when its question is repeated.
    pub(super) fn answer(&mut self, id: IbCmId, transaction: TransactionId, message: &CmMessage) {
        // UDP loses messages: a repeated question has to get the same answer as the first.
        let mad = message.emit(transaction);
        let conn = self.known(id);
        conn.answer = Some(Box::new(mad));
        let peer = conn.route().peer;
        self.send(peer, mad);
    }

    /// Send the last answer again.
    pub(super) fn answer_again(&mut self, id: IbCmId) {
        self.counters.duplicates += 1;
        let conn = &self.conns[&id];
        if let Some(mad) = conn.answer.as_deref() {
            let (peer, mad) = (conn.route().peer, *mad);
            self.send(peer, mad);
        }
    }

    /// Send a message again and again until it is answered.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        id: IbCmId,
        transaction: TransactionId,
        message: &CmMessage,
    ) {
        let mad = message.emit(transaction);
        let is_rep = matches!(message, CmMessage::Rep(_));
        // An address that has proved nothing may be made up, and its owner would get every
        // repetition.
        let most_retries = if is_rep && !self.proven.contains_key(&self.conns[&id].peer) {
            self.config.max_unproven_retries
        } else {
            u8::MAX
        };
        let conn = self.known(id);
        let interval = match message {
            CmMessage::Dreq(_) => conn.interval.min(DREQ_INTERVAL),
            CmMessage::Rep(_) => conn.interval.min(REP_INTERVAL),
            _ => conn.interval,
        };
        conn.pending = Some(Box::new(Pending {
            mad,
            retries_left: conn.max_retries.min(most_retries),
            interval,
        }));
        let peer = conn.route().peer;
        self.send(peer, mad);
        self.wait_until(id, now + interval);
    }

    /// Wait for the peer until `at`, but not beyond what a half-open connection has.
    pub(super) fn wait_until(&mut self, id: IbCmId, at: Instant) {
        let rep = self.conns[&id].unconfirmed;
        // The life of a half-open connection ends even if a repetition would be due later.
        self.arm(id, Some(rep.map_or(at, |rep| rep.until.min(at))));
    }

    /// The message under way was answered.
    pub(super) fn answered(&mut self, id: IbCmId) {
        self.known(id).pending = None;
        self.arm(id, None);
    }

    /// The connection is over: wait until nothing of it can be in the network.
    pub(super) fn enter_timewait(&mut self, now: Instant, id: IbCmId) {
        let time = self.conns[&id].timewait;
        self.enter_timewait_for(now, id, time);
    }

    pub(super) fn enter_timewait_for(&mut self, now: Instant, id: IbCmId, time: Duration) {
        // Nothing of it is repeated from here on. Its last answer stays, for a repeated question.
        self.answered(id);
        self.become_state(id, CmState::Timewait);
        // A new connection may use the peer's id and queue pair; the request
        // stays known, for when it is repeated.
        self.forget_claims(id);
        self.known(id).req = None;
        self.arm(id, Some(now + time));
        self.note_finished(id);
    }

    /// Notify the user, unless it has released the identifier.
    pub(super) fn report(&mut self, id: IbCmId, kind: IbCmEventKind) {
        // A user that has released an identifier has forgotten its name.
        if self.conns.get(&id).is_none_or(|conn| !conn.is_orphan) {
            self.events.push_back(IbCmEvent { id, kind });
        }
    }

    /// A peer's time, within what is configured.
    pub(super) fn interval(&self, time: CmTimeout) -> Duration {
        // The peer chooses this time. Too short, it would make us send without pause; too long,
        // it would keep our memory.
        time.duration()
            .clamp(self.config.min_interval, self.config.max_interval)
    }

    /// Refuse a message that belongs to no identifier of ours.
    pub(super) fn refuse(
        &mut self,
        to: PeerAddr,
        transaction: TransactionId,
        ids: (CommId, CommId),
        message: RejOf,
        reason: RejReason,
    ) {
        self.counters.refused += 1;
        // Nothing is kept for it. A question that is repeated is judged, and refused, again.
        let rej = CmMessage::Rej(RejMsg {
            local_comm_id: ids.0,
            remote_comm_id: ids.1,
            message,
            reason,
            info: AdditionalInfo::default(),
            private_data: PrivateData::default(),
        });
        self.send(to, rej.emit(transaction));
    }
}
