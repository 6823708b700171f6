//! Carries out what channels ask for.

use std::cmp::Reverse;

use arrayvec::ArrayVec;
use riser_scsi::attention::Attention;
use riser_scsi::step::{BackendError, StepResult};
use riser_transport::rw::{Direction as RwDirection, LocalSegment, RemoteSegment, RwLimits};
use riser_transport::verbs::{
    QpAttr, QpState, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WrId,
};

use super::mail::Mail;
use super::{Stalled, Worker};
use crate::iscsi::TaskIdx;
use crate::srp::transfer::Direction;
use crate::srp::{Action, Channel, RecvIdx, SendIdx, SendIu, TaskRef, UnitIdx};

/// Receives posted in one call.
const RECV_BATCH: usize = 32;

/// What a work request of ours was, in the top byte of its identifier; the context is in the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A receive.
    Recv(RecvIdx),
    /// The last request of a chain.
    Post(SendIdx),
    /// One before the last: it completes only if it fails.
    Inner,
    /// The drain marker.
    Drain,
    /// A probe.
    Probe,
}

impl Work {
    const KIND: u64 = 56;

    pub(super) fn id(self) -> WrId {
        WrId(match self {
            Self::Recv(idx) => 1 << Self::KIND | u64::from(idx.0),
            Self::Post(idx) => 2 << Self::KIND | u64::from(idx.0),
            Self::Inner => 3 << Self::KIND,
            Self::Drain => 4 << Self::KIND,
            Self::Probe => 5 << Self::KIND,
        })
    }

    /// # Panics
    /// If the identifier is none of ours.
    pub(super) fn of(id: WrId) -> Self {
        match id.0 >> Self::KIND {
            1 => Self::Recv(RecvIdx(id.0 as u16)),
            2 => Self::Post(SendIdx(id.0 as u16)),
            3 => Self::Inner,
            4 => Self::Drain,
            5 => Self::Probe,
            other => panic!("no work request of ours has kind {other}"),
        }
    }
}

/// Whose block operation it is: the session and its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// An SRP channel's.
    Srp(usize, SendIdx),
    /// An iSCSI connection's.
    Iscsi(usize, TaskIdx),
}

impl Owner {
    const ISCSI: u64 = 1 << 62;

    /// The driver's name for the operation.
    fn user(self) -> u64 {
        match self {
            Self::Srp(key, ioctx) => (key as u64) << 16 | u64::from(ioctx.0),
            Self::Iscsi(key, task) => Self::ISCSI | (key as u64) << 16 | u64::from(task.0),
        }
    }

    /// Whose such a name is.
    pub(super) fn of(user: u64) -> Self {
        let key = ((user & !Self::ISCSI) >> 16) as usize;
        if user & Self::ISCSI == 0 {
            Self::Srp(key, SendIdx(user as u16))
        } else {
            Self::Iscsi(key, TaskIdx(user as u16))
        }
    }
}

impl Worker {
    /// Carries out the actions of every channel that may have some.
    pub(super) fn drain_dirty(&mut self) {
        loop {
            if let Some(key) = self.dirty.pop_front() {
                self.drain_actions(key);
            } else if let Some(key) = self.iscsi.dirty.pop_front() {
                self.pump_iscsi(key);
            } else {
                break;
            }
        }
    }

    /// Carries out the actions of one channel.
    pub(super) fn drain_actions(&mut self, key: usize) {
        let mut receives = ArrayVec::<RecvIdx, RECV_BATCH>::new();
        let mut released = false;
        while let Some(session) = self.sessions.get_mut(key) {
            let Some(action) = session.channel.poll_action() else {
                break;
            };
            match action {
                Action::PostRecv(recv) => {
                    receives.push(recv);
                    if receives.is_full() {
                        self.post_receives(key, &mut receives);
                    }
                }
                Action::Post { ioctx, rdma, send } => self.post(key, ioctx, rdma, send),
                Action::SubmitBlock { ioctx, unit, op } => {
                    let store = self.store_of(unit);
                    let owner = Owner::Srp(key, ioctx);
                    self.submit_or_stall(Stalled { owner, store, op });
                }
                Action::AbortBlock(ioctx) => self.abort_block(Owner::Srp(key, ioctx)),
                Action::StartTask(task) => self.tell(task, Mail::StartTask(task)),
                Action::AbortTask { task, watcher } => {
                    self.tell(task, Mail::AbortTask { task, watcher });
                }
                Action::TaskGone(watcher) => self.tell(watcher, Mail::TaskGone(watcher)),
                Action::Event { unit, attention } => self.tell_all(unit, attention),
                Action::NotifyEstablished => {
                    let dev = &mut self.devices[session.device];
                    // The message may have arrived meanwhile; then there is nothing to tell.
                    let _ = dev.notify_established(session.cm);
                }
                Action::Probe => {
                    if !self.post_empty_write(key, Work::Probe) {
                        self.with_channel(key, |ch, cx| ch.handle_probed(cx, false));
                    }
                }
                Action::Disconnect => self.disconnect(key),
                Action::Release => {
                    released = true;
                    break;
                }
            }
        }
        if released {
            self.release(key);
            return;
        }
        self.post_receives(key, &mut receives);
        self.arm_timer(key);
        self.note_pool_wait(key);
    }

    pub(super) fn store_of(&self, unit: UnitIdx) -> crate::backend::StoreId {
        self.stores[self.catalog.unit_stores[unit.0 as usize]]
            .expect("a backend stays attached while a unit has tasks")
    }

    fn post_receives(&mut self, key: usize, receives: &mut ArrayVec<RecvIdx, RECV_BATCH>) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let lkey = session.hardware.receive_key;
        let sges: ArrayVec<[Sge; 1], RECV_BATCH> = receives
            .iter()
            .map(|recv| {
                let slot = session.channel.receive_slot(*recv);
                [Sge {
                    addr: slot.addr(),
                    length: slot.len() as u32,
                    lkey,
                }]
            })
            .collect();
        let wrs: ArrayVec<RecvWr<'_>, RECV_BATCH> = receives
            .iter()
            .zip(&sges)
            .map(|(recv, sge)| RecvWr {
                wr_id: Work::Recv(*recv).id(),
                sges: sge,
            })
            .collect();
        if wrs.is_empty() {
            return;
        }
        let posted = self.devices[session.device].post_recv(session.hardware.qp, &wrs);
        if let Err(error) = posted {
            tracing::warn!(%error, "a receive was not taken");
            let failed: ArrayVec<RecvIdx, RECV_BATCH> =
                receives[error.index..].iter().copied().collect();
            receives.clear();
            for recv in failed {
                self.with_channel(key, |ch, cx| ch.handle_recv_flushed(cx, recv));
            }
        }
        receives.clear();
    }

    /// Posts a chain: RDMA requests and a message, in one go.
    fn post(&mut self, key: usize, ioctx: SendIdx, rdma: Option<Direction>, send: Option<SendIu>) {
        let session = &mut self.sessions[key];
        let (lkey, pool) = (session.hardware.pool_key, self.pool.memory());
        self.rw_local.clear();
        self.rw_remote.clear();
        if rdma.is_some() {
            let (local, remote) = (&mut self.rw_local, &mut self.rw_remote);
            session.channel.each_wr(ioctx, |wr| {
                let len: usize = wr.local.iter().map(ExactSizeIterator::len).sum();
                remote.push(RemoteSegment {
                    addr: wr.remote.addr,
                    rkey: wr.remote.rkey,
                    len: len as u32,
                });
                local.extend(wr.local.into_iter().map(|range| LocalSegment {
                    slice: pool.slice(range).expect("buffers lie in the pool"),
                    lkey,
                }));
            });
        }
        let config = session.channel.config();
        let limits = RwLimits {
            max_sge: config.max_sge as u32,
            max_message: u32::MAX,
            max_wrs: config.params.send_queue,
        };
        let direction = match rdma {
            Some(Direction::FromInitiator) => RwDirection::Read,
            Some(Direction::ToInitiator) | None => RwDirection::Write,
        };
        let planned = self
            .rw
            .plan(direction, &self.rw_local, 0, &self.rw_remote, limits);
        let id = Work::Post(ioctx).id();
        let outcome = match planned {
            Err(error) => {
                tracing::debug!(%error, "a descriptor names no memory");
                Err(())
            }
            Ok(_) => {
                let slot = session.channel.send_slot(ioctx);
                let sges = [Sge {
                    addr: slot.addr(),
                    length: send.map_or(0, |iu| iu.len),
                    lkey: session.hardware.send_key,
                }];
                let then = send.map(|iu| {
                    let mut flags = SendFlags::SIGNALED;
                    flags.set(SendFlags::SOLICITED, iu.solicited);
                    SendWr {
                        wr_id: id,
                        op: SendOp::Send,
                        sges: &sges,
                        flags,
                        ud: None,
                    }
                });
                let dev = &mut *self.devices[session.device];
                self.rw
                    .post(dev, session.hardware.qp, id, Work::Inner.id(), then)
                    .map_err(|error| tracing::warn!(%error, "a chain was not taken"))
            }
        };
        // The pool outlives every queue pair, so nothing needs to be held for its sake.
        self.rw.release();
        if outcome.is_err() {
            self.with_channel(key, |ch, cx| ch.handle_post_done(cx, ioctx, false));
        }
    }

    /// Hands a block operation to the driver, behind those that wait for room.
    pub(super) fn submit_or_stall(&mut self, op: Stalled) {
        if !self.stalled.is_empty() || !self.submit_block(&op) {
            self.stalled.push_back(op);
        }
    }

    /// Hands a block operation to the driver; `false` if it has no room.
    fn submit_block(&mut self, op: &Stalled) -> bool {
        let mut slices = std::mem::take(&mut self.slices);
        slices.clear();
        let is_there = match op.owner {
            Owner::Srp(key, ioctx) => self.sessions.get(key).is_some_and(|session| {
                slices.extend(session.channel.block_slices(ioctx, 0..u32::MAX));
                true
            }),
            Owner::Iscsi(key, task) => self.iscsi_slices(key, task, &mut slices),
        };
        let taken = !is_there
            || self
                .driver
                .submit(&mut self.ring, op.store, op.op, &slices, op.owner.user())
                .is_ok();
        slices.clear();
        self.slices = slices;
        taken
    }

    /// Hands over the block operations that waited for room.
    pub(super) fn retry_stalled(&mut self) {
        while let Some(op) = self.stalled.pop_front() {
            if !self.submit_block(&op) {
                self.stalled.push_front(op);
                break;
            }
        }
    }

    pub(super) fn abort_block(&mut self, owner: Owner) {
        let waiting = self.stalled.iter().position(|s| s.owner == owner);
        if let Some(at) = waiting {
            self.stalled.remove(at);
            self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
        } else {
            self.driver.cancel(&mut self.ring, owner.user());
        }
    }

    /// A block operation ended.
    pub(super) fn on_block_done(&mut self, owner: Owner, result: StepResult) {
        match owner {
            Owner::Srp(key, ioctx) => {
                self.with_channel(key, |ch, cx| ch.handle_block_done(cx, ioctx, result));
            }
            Owner::Iscsi(key, task) => self.on_iscsi_block(key, task, result),
        }
    }

    /// Tells a task's channel something, here or at another worker.
    pub(super) fn tell(&mut self, task: TaskRef, mail: Mail) {
        self.post_mail(task.worker, mail);
    }

    /// Tells all channels, here and at other workers, what happened to a unit.
    fn tell_all(&mut self, unit: UnitIdx, attention: Attention) {
        for worker in 0..self.outbox.workers() {
            self.post_mail(worker as u16, Mail::Event { unit, attention });
        }
    }

    /// Sends mail to a worker; to ourselves it is delivered at once.
    pub(super) fn post_mail(&mut self, worker: u16, mail: Mail) {
        if worker == self.index {
            self.handle_mail(mail);
        } else {
            self.outbox.send(usize::from(worker), mail);
        }
    }

    fn disconnect(&mut self, key: usize) {
        let session = &self.sessions[key];
        let (device, cm, qp) = (session.device, session.cm, session.hardware.qp);
        let dev = &mut self.devices[device];
        // Before the connection was tried, or after it is over, the CM has nothing to do.
        let _ = dev.disconnect(cm);
        let error = QpAttr {
            state: Some(QpState::Error),
            ..QpAttr::default()
        };
        // Already in error, as a rule.
        let _ = dev.modify_qp(qp, &error);
        if !self.post_empty_write(key, Work::Drain) {
            self.with_channel(key, Channel::handle_drained);
        }
    }

    /// Posts a signaled write of no bytes; whether it was taken.
    fn post_empty_write(&mut self, key: usize, work: Work) -> bool {
        let session = &self.sessions[key];
        let wr = SendWr {
            wr_id: work.id(),
            op: SendOp::Write(RemoteAddr {
                addr: 0,
                rkey: RKey(0),
            }),
            sges: &[],
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        self.devices[session.device]
            .post_send(session.hardware.qp, &[wr])
            .inspect_err(|error| tracing::warn!(%error, ?work, "a write was not taken"))
            .is_ok()
    }

    /// Sets a channel's timer, if it is earlier than the one that is set.
    pub(super) fn arm_timer(&mut self, key: usize) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        if let Some(at) = session.channel.deadline()
            && session.armed.is_none_or(|armed| at < armed)
        {
            session.armed = Some(at);
            let serial = session.channel.config().serial;
            self.timers.push(Reverse((at, serial)));
        }
    }

    fn note_pool_wait(&mut self, key: usize) {
        if let Some(session) = self.sessions.get_mut(key)
            && session.channel.waits_for_pool()
            && !std::mem::replace(&mut session.waits_for_pool, true)
        {
            if self.pool_waiters.is_empty() {
                self.pool_seen = self.pool.free();
            }
            self.pool_waiters.push_back(key);
        }
    }
}
