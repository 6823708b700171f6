//! IDs, timers and queues, used by all parts of the state machine.

use std::time::{Duration, Instant};

use chacha20::rand_core::Rng;
use riser_state::become_state;

use super::conn::{Conn, Pending};
use super::{Cm, CmState, IbCmError, IbCmEvent, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{
    AdditionalInfo, CmAttribute, CmMessage, CommId, PrivateData, RejMsg, RejOf, RejReason,
};
use crate::wire::mad::{Mad, TransactionId};

/// Initial interval for a DREQ, which is doubled up to the connection's interval. A peer doesn't
/// need long to respond, and Linux only responds to a duplicate until its short timewait is over.
pub(super) const DREQ_INTERVAL: Duration = Duration::from_millis(250);

/// Initial interval for a REP, which is doubled up to the connection's interval. This ensures that
/// all retransmissions to an unproven address are sent during the lifetime of a half-open
/// connection, even if the peer requests a longer timeout.
const REP_INTERVAL: Duration = Duration::from_millis(500);

/// Returns true if one of our MADs contains this message.
pub(super) fn is_message(mad: &Mad, attribute: CmAttribute) -> bool {
    mad[16..18] == (attribute as u16).to_be_bytes()
}

impl Cm {
    /// Returns an unused ID with our worker number in the low bits.
    pub(super) fn new_id(&mut self) -> IbCmId {
        loop {
            let random = self.random.next_u32();
            let id = IbCmId(CommId((random & !self.worker_mask) | self.worker_index));
            // Zero means "unknown" in messages. There are far more possible values than IDs in use.
            if id.0 != CommId(0)
                && !self.conns.contains_key(&id)
                && !self.listeners.by_id.contains_key(&id)
            {
                return id;
            }
        }
    }

    pub(super) fn new_transaction(&mut self) -> TransactionId {
        TransactionId(self.random.next_u64())
    }

    /// Makes space for a new ID, if required by removing an ID that was already released by its
    /// user.
    pub(super) fn make_room(&mut self) -> Result<(), IbCmError> {
        // We can only shorten timewait if there is no user. All other IDs are connections or still
        // need to report an event.
        if self.id_count() < self.config.max_ids {
            return Ok(());
        }
        let (_, oldest) = *self.finished.first().ok_or(IbCmError::TooManyIds)?;
        self.free(oldest);
        Ok(())
    }

    /// Called when the user has released the ID.
    pub(super) fn release(&mut self, id: IbCmId) {
        self.conn_mut(id).is_orphan = true;
        self.note_finished(id);
    }

    /// Stores an ID that can be removed when a new one is needed.
    fn note_finished(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        // In any other state, a released ID still has a message to resend.
        if let (true, CmState::Timewait, Some(at)) = (conn.is_orphan, conn.state, conn.deadline) {
            self.finished.insert((at, id));
        }
    }

    pub(super) fn insert(&mut self, id: IbCmId, conn: Conn) {
        // This counts the initial state. All state changes after this use `become_state`.
        self.listeners.count_half_open(&conn, conn.state, true);
        let before = self.conns.insert(id, conn);
        assert!(before.is_none(), "a new identifier is new");
    }

    /// Returns the connection for an ID passed by the user, unless it was already released.
    pub(super) fn conn(&self, id: IbCmId) -> Result<&Conn, IbCmError> {
        // A released ID is no longer valid for the user, even if it is still in timewait.
        self.conns
            .get(&id)
            .filter(|conn| !conn.is_orphan)
            .ok_or(IbCmError::NoSuchId)
    }

    /// Returns a connection that must exist.
    pub(super) fn conn_mut(&mut self, id: IbCmId) -> &mut Conn {
        self.conns.get_mut(&id).expect("identifier exists")
    }

    /// Changes the state, which must be a valid transition.
    pub(super) fn become_state(&mut self, id: IbCmId, next: CmState) {
        let mut conn = self.conns.remove(&id).expect("identifier exists");
        self.listeners.count_half_open(&conn, conn.state, false);
        self.listeners.count_half_open(&conn, next, true);
        if conn.state.is_connected() != next.is_connected() {
            self.changed.iter_mut().for_each(|all| all.push_back(id));
        }
        become_state(&mut conn.state, next);
        // The connection was confirmed or closed and can't be displaced anymore.
        if !next.is_half_open() {
            self.listeners.remove_rep(&mut conn);
        }
        // Only once per connection, regardless of changes between connected states.
        if next.is_connected() && !conn.is_proven {
            conn.is_proven = true;
            *self.proven.entry(conn.peer).or_insert(0) += 1;
        }
        self.conns.insert(id, conn);
    }

    /// Removes the ID.
    pub(super) fn free(&mut self, id: IbCmId) {
        // Remove the index entries first, since their keys are created from the connection.
        self.arm(id, None);
        let mut conn = self.conns.remove(&id).expect("identifier exists");
        self.peers.remove_claims(id, &conn);
        self.listeners.count_half_open(&conn, conn.state, false);
        if conn.state.is_connected() {
            self.changed.iter_mut().for_each(|all| all.push_back(id));
        }
        self.listeners.remove_rep(&mut conn);
        self.peers.remove_request(&conn);
        if conn.is_proven
            && let Some(count) = self.proven.get_mut(&conn.peer)
        {
            *count -= 1;
            if *count == 0 {
                self.proven.remove(&conn.peer);
            }
        }
    }

    /// Called when the peer has proved that it requested this connection: closes all other
    /// connections using the same communication ID or QP of its adapter, since they are unknown to
    /// the peer. Half-open connections may be newer, so they will be closed by their timeout.
    pub(super) fn end_superseded(&mut self, now: Instant, id: IbCmId) {
        for other in self.peers.claimants(&self.conns[&id]) {
            let state = self.conns[&other].state;
            if other != id && state.is_live() && !state.is_half_open() {
                self.on_stale(now, other);
            }
        }
    }

    /// Sets or clears the timer for an ID.
    pub(super) fn arm(&mut self, id: IbCmId, deadline: Option<Instant>) {
        let before = std::mem::replace(&mut self.conn_mut(id).deadline, deadline);
        // The timer is used as the key in both sets, so we need it to remove the ID.
        if let Some(before) = before {
            self.timers.remove(&(before, id));
            self.finished.remove(&(before, id));
        }
        if let Some(deadline) = deadline {
            self.timers.insert((deadline, id));
        }
    }

    /// Adds a MAD to the queue. If the queue is full, the MAD is dropped, as it could be by the
    /// network.
    pub(super) fn send(&mut self, to: PeerAddr, mad: Mad) {
        if self.outbox.len() < self.config.max_outbox {
            // The queue must not grow if a peer sends requests faster than we can send responses.
            self.outbox.push_back((to, mad));
        } else {
            self.counters.dropped += 1;
        }
    }

    /// Sends a message that doesn't need a response, and stores it to be sent again for a duplicate
    /// request.
    pub(super) fn send_response(
        &mut self,
        id: IbCmId,
        transaction: TransactionId,
        message: &CmMessage,
    ) {
        // UDP is not reliable, so we must send the same response for a duplicate request.
        let mad = message.emit(transaction);
        let conn = self.conn_mut(id);
        conn.last_response = Some(Box::new(mad));
        let peer = conn.route().peer;
        self.send(peer, mad);
    }

    /// Sends the last response again.
    pub(super) fn repeat_response(&mut self, id: IbCmId) {
        self.counters.duplicates += 1;
        let conn = &self.conns[&id];
        if let Some(mad) = conn.last_response.as_deref() {
            let (peer, mad) = (conn.route().peer, *mad);
            self.send(peer, mad);
        }
    }

    /// Sends a message repeatedly until there is a response.
    pub(super) fn send_request(
        &mut self,
        now: Instant,
        id: IbCmId,
        transaction: TransactionId,
        message: &CmMessage,
    ) {
        let mad = message.emit(transaction);
        let is_rep = matches!(message, CmMessage::Rep(_));
        // If the address is not proven, it may be forged and all retransmissions would be sent to
        // its owner.
        let most_retries = if is_rep && !self.proven.contains_key(&self.conns[&id].peer) {
            self.config.max_unproven_retries
        } else {
            u8::MAX
        };
        let conn = self.conn_mut(id);
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

    /// Waits for the peer until `at`, limited to the lifetime of a half-open connection.
    pub(super) fn wait_until(&mut self, id: IbCmId, at: Instant) {
        let rep = self.conns[&id].unconfirmed;
        // The lifetime of a half-open connection can be shorter than the next interval.
        self.arm(id, Some(rep.map_or(at, |rep| rep.until.min(at))));
    }

    /// Called when there was a response to the pending message.
    pub(super) fn clear_pending(&mut self, id: IbCmId) {
        self.conn_mut(id).pending = None;
        self.arm(id, None);
    }

    /// Closes the connection and waits until there are no more packets in the network.
    pub(super) fn enter_timewait(&mut self, now: Instant, id: IbCmId) {
        let time = self.conns[&id].timewait;
        self.enter_timewait_for(now, id, time);
    }

    pub(super) fn enter_timewait_for(&mut self, now: Instant, id: IbCmId, time: Duration) {
        // Stop all retransmissions, but keep the last response for a duplicate request.
        self.clear_pending(id);
        self.become_state(id, CmState::Timewait);
        // A new connection can now use the peer's ID and QP. The request must still be known, to
        // detect a duplicate.
        self.peers.remove_claims(id, &self.conns[&id]);
        self.conn_mut(id).req = None;
        self.arm(id, Some(now + time));
        self.note_finished(id);
    }

    /// Reports an event, unless the user has released the ID.
    pub(super) fn report(&mut self, id: IbCmId, kind: IbCmEventKind) {
        // The user doesn't know an ID after releasing it.
        if self.conns.get(&id).is_none_or(|conn| !conn.is_orphan) {
            self.events.push_back(IbCmEvent { id, kind });
        }
    }

    /// Rejects a message without a matching ID.
    pub(super) fn refuse(
        &mut self,
        to: PeerAddr,
        transaction: TransactionId,
        ids: (CommId, CommId),
        message: RejOf,
        reason: RejReason,
    ) {
        self.counters.refused += 1;
        // No state is stored. A duplicate will be checked and rejected again.
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
