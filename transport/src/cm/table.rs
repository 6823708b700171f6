//! The identifiers, their indices, timers and queues: what every part of the
//! machine stands on.

use std::time::{Duration, Instant};

use chacha20::rand_core::Rng;

use super::conn::{Conn, Pending};
use super::{Cm, CmState, IbCmError, IbCmEvent, IbCmEventKind, IbCmId, PeerAddr};
use crate::wire::cm_msg::{
    AdditionalInfo, CmAttribute, CmMessage, CmTimeout, CommId, PrivateData, RejMsg, RejOf,
    RejReason, ServiceId,
};
use crate::wire::mad::{Mad, TransactionId};

/// How soon a DREQ is repeated first; then twice as long, up to the connection's interval. Nobody needs
/// long to answer one, and Linux answers a repeated one only until its short timewait is over.
pub(super) const DREQ_INTERVAL: Duration = Duration::from_millis(250);

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
        (self.service_id.0 ^ service_id.0) & self.mask & mask == 0
    }
}

/// Which message a MAD of ours is.
pub(super) fn is_message(mad: &Mad, attribute: CmAttribute) -> bool {
    mad[16..18] == (attribute as u16).to_be_bytes()
}

impl Cm {
    /// An identifier nobody has, with our worker's number in its low bits.
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

    /// Make room for one more identifier, at the cost of a finished one that
    /// nobody waits for if need be.
    pub(super) fn make_room(&mut self) -> Result<(), IbCmError> {
        if self.id_count() < self.config.max_ids {
            return Ok(());
        }
        let finished = self
            .conns
            .iter()
            .filter(|(_, c)| c.is_orphan && c.state == CmState::Timewait);
        let oldest = finished.min_by_key(|(_, c)| c.deadline).map(|(id, _)| *id);
        self.free(oldest.ok_or(IbCmError::TooManyIds)?);
        Ok(())
    }

    pub(super) fn insert(&mut self, id: IbCmId, conn: Conn) {
        self.count_half_open(&conn, conn.state, true);
        let before = self.conns.insert(id, conn);
        assert!(before.is_none(), "a new identifier is new");
    }

    /// The connection of an id from a call of the user, who may have let go.
    pub(super) fn conn(&self, id: IbCmId) -> Result<&Conn, IbCmError> {
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
        if !state.is_half_open() {
            return;
        }
        let count = self.half_open.entry(conn.peer).or_insert(0);
        *count = if add { *count + 1 } else { *count - 1 };
        if *count == 0 {
            self.half_open.remove(&conn.peer);
        }
        if let Some(listener) = conn.listener.and_then(|id| self.listeners.get_mut(&id)) {
            listener.half_open = if add {
                listener.half_open + 1
            } else {
                listener.half_open.saturating_sub(1)
            };
        }
    }

    /// Change state, as the table of transitions allows.
    pub(super) fn become_state(&mut self, id: IbCmId, next: CmState) {
        let mut conn = self
            .conns
            .remove(&id)
            .expect("the identifier was just looked up");
        assert!(
            conn.state.may_become(next),
            "{:?} became {next:?}",
            conn.state
        );
        self.count_half_open(&conn, conn.state, false);
        self.count_half_open(&conn, next, true);
        conn.state = next;
        self.conns.insert(id, conn);
    }

    /// The identifier ends here.
    pub(super) fn free(&mut self, id: IbCmId) {
        self.arm(id, None);
        self.forget_remote(id);
        self.forget_qpn(id);
        let conn = self
            .conns
            .remove(&id)
            .expect("the identifier was just looked up");
        self.count_half_open(&conn, conn.state, false);
    }

    /// Learn the peer's id and queue pair.
    pub(super) fn learn_remote(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        if let Some(remote_id) = conn.remote_id {
            self.by_remote.insert((conn.peer, remote_id), id);
        }
        if let Some(qpn) = conn.remote_qpn {
            self.by_qpn.insert((conn.peer, qpn), id);
        }
    }

    pub(super) fn forget_remote(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        if let Some(remote_id) = conn.remote_id {
            let key = (conn.peer, remote_id);
            if self.by_remote.get(&key) == Some(&id) {
                self.by_remote.remove(&key);
            }
        }
    }

    fn forget_qpn(&mut self, id: IbCmId) {
        let conn = &self.conns[&id];
        if let Some(qpn) = conn.remote_qpn {
            let key = (conn.peer, qpn);
            if self.by_qpn.get(&key) == Some(&id) {
                self.by_qpn.remove(&key);
            }
        }
    }

    /// Set or clear the identifier's one timer.
    pub(super) fn arm(&mut self, id: IbCmId, deadline: Option<Instant>) {
        let before = std::mem::replace(&mut self.known(id).deadline, deadline);
        if let Some(before) = before {
            self.timers.remove(&(before, id));
        }
        if let Some(deadline) = deadline {
            self.timers.insert((deadline, id));
        }
    }

    /// Queue a MAD; a full queue loses it, as the network might.
    pub(super) fn send(&mut self, to: PeerAddr, mad: Mad) {
        if self.outbox.len() < self.config.max_outbox {
            self.outbox.push_back((to, mad));
        } else {
            self.counters.dropped += 1;
        }
    }

    /// Send a message of the connection that needs no answer, and keep it for
    /// when its question is repeated.
    pub(super) fn answer(&mut self, id: IbCmId, transaction: TransactionId, message: &CmMessage) {
        let mad = message.emit(transaction);
        let conn = self.known(id);
        conn.answer = Some(Box::new(mad));
        let peer = conn.peer;
        self.send(peer, mad);
    }

    /// Send the last answer again.
    pub(super) fn answer_again(&mut self, id: IbCmId) {
        self.counters.duplicates += 1;
        let conn = &self.conns[&id];
        if let Some(mad) = conn.answer.as_deref() {
            let (peer, mad) = (conn.peer, *mad);
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
        let conn = self.known(id);
        let interval = match message {
            CmMessage::Dreq(_) => conn.interval.min(DREQ_INTERVAL),
            _ => conn.interval,
        };
        conn.pending = Some(Box::new(Pending {
            mad,
            retries_left: conn.max_retries,
            interval,
        }));
        let peer = conn.peer;
        self.send(peer, mad);
        self.arm(id, Some(now + interval));
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
        self.answered(id);
        self.become_state(id, CmState::Timewait);
        // A new connection may use the peer's queue pair; its id stays known,
        // for messages that are repeated.
        self.forget_qpn(id);
        self.known(id).req = None;
        self.arm(id, Some(now + time));
    }

    /// Tell the user, unless the user has let go.
    pub(super) fn tell(&mut self, id: IbCmId, kind: IbCmEventKind) {
        if self.conns.get(&id).is_none_or(|conn| !conn.is_orphan) {
            self.events.push_back(IbCmEvent { id, kind });
        }
    }

    /// A peer's time, within what is configured.
    pub(super) fn interval(&self, time: CmTimeout) -> Duration {
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
