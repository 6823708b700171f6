//! Carries out what channels ask for.

use std::cmp::Reverse;

use arrayvec::ArrayVec;
use riser_scsi::step::{BackendError, BlockOp, StepResult};
use riser_transport::verbs::{SendFlags, SendOp, WrId};

use super::mail::Mail;
use super::queue::{ChainSend, RECV_BATCH, Receive};
use super::{Stalled, Worker};
use crate::fabric::{TaskAction, TaskIdx, UnitIdx};
use crate::iser::{ChainIdx, RxIdx};
use crate::srp::{Action, Channel, RecvIdx, SendIu};

/// What a work request of ours was, in the top byte of its identifier; the context is in the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A receive.
    Recv(RecvIdx),
    /// The last request of a chain.
    Post(TaskIdx),
    /// One before the last: it completes only if it fails.
    Inner,
    /// The drain marker.
    Drain,
    /// A probe.
    Probe,
    /// A receive of an iSER connection.
    IserRecv(RxIdx),
    /// The last request of a chain of an iSER connection.
    IserPost(ChainIdx),
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
            Self::IserRecv(idx) => 6 << Self::KIND | u64::from(idx.0),
            Self::IserPost(idx) => 7 << Self::KIND | u64::from(idx.0),
        })
    }

    /// # Panics
    /// If the identifier is none of ours.
    pub(super) fn of(id: WrId) -> Self {
        match id.0 >> Self::KIND {
            1 => Self::Recv(RecvIdx(id.0 as u16)),
            2 => Self::Post(TaskIdx(id.0 as u16)),
            3 => Self::Inner,
            4 => Self::Drain,
            5 => Self::Probe,
            6 => Self::IserRecv(RxIdx(id.0 as u16)),
            7 => Self::IserPost(ChainIdx(id.0 as u16)),
            other => panic!("no work request of ours has kind {other}"),
        }
    }
}

/// Whose block operation it is: the session and its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// An SRP channel's.
    Srp(usize, TaskIdx),
    /// An iSCSI connection's.
    Iscsi(usize, TaskIdx),
    /// An iSER connection's.
    Iser(usize, TaskIdx),
}

impl Owner {
    const ISCSI: u64 = 1 << 62;
    const ISER: u64 = 1 << 61;

    /// The driver's name for the operation.
    pub(super) fn user(self) -> u64 {
        match self {
            Self::Srp(key, ioctx) => (key as u64) << 16 | u64::from(ioctx.0),
            Self::Iscsi(key, task) => Self::ISCSI | (key as u64) << 16 | u64::from(task.0),
            Self::Iser(key, task) => Self::ISER | (key as u64) << 16 | u64::from(task.0),
        }
    }

    /// Whose such a name is.
    pub(super) fn of(user: u64) -> Self {
        let key = ((user & !(Self::ISCSI | Self::ISER)) >> 16) as usize;
        let context = user as u16;
        match user & (Self::ISCSI | Self::ISER) {
            0 => Self::Srp(key, TaskIdx(context)),
            Self::ISCSI => Self::Iscsi(key, TaskIdx(context)),
            _ => Self::Iser(key, TaskIdx(context)),
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
            } else if let Some(key) = self.isers.dirty.pop_front() {
                self.pump_iser(key);
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
                Action::Post { task, send } => self.post(key, task, send),
                Action::Task(action) => {
                    self.carry_out_task(action, |task| Owner::Srp(key, task));
                }
                Action::NotifyEstablished => {
                    let dev = &mut self.devices[session.device];
                    // The message may have arrived meanwhile; then there is nothing to tell.
                    let _ = dev.notify_established(session.cm);
                }
                Action::Probe => {
                    let (device, qp) = (session.device, session.hardware.qp);
                    if !self.post_empty_write(device, qp, Work::Probe) {
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

    /// Carries out what a connection asks for a command or a function. `owner_of` names a context of
    /// the connection.
    pub(super) fn carry_out_task(
        &mut self,
        action: TaskAction,
        owner_of: impl Fn(TaskIdx) -> Owner,
    ) {
        match action {
            TaskAction::SubmitBlock { task, unit, op } => {
                self.carry_out_block(owner_of(task), unit, op);
            }
            TaskAction::AbortBlock(task) => self.abort_block(owner_of(task)),
            TaskAction::StartTask(task) => self.post_mail(task.worker, Mail::StartTask(task)),
            TaskAction::AbortTask { task, watcher } => {
                self.post_mail(task.worker, Mail::AbortTask { task, watcher });
            }
            TaskAction::TaskGone(watcher) => {
                self.post_mail(watcher.worker, Mail::TaskGone(watcher));
            }
            TaskAction::UnitEvent { unit, attention } => {
                for worker in 0..self.outbox.workers() {
                    self.post_mail(worker as u16, Mail::Event { unit, attention });
                }
            }
        }
    }

    /// Carries out a block operation of a unit's command.
    pub(super) fn carry_out_block(&mut self, owner: Owner, unit: UnitIdx, op: BlockOp) {
        if let BlockOp::ChangeReservations(change) = op {
            return self.change_reservations(owner, unit, change);
        }
        let store = self.store_of(unit);
        self.submit_or_stall(Stalled { owner, store, op });
    }

    fn store_of(&self, unit: UnitIdx) -> crate::backend::StoreId {
        self.stores[self.catalog.unit_stores[unit.0 as usize]]
            .expect("a backend stays attached while a unit has tasks")
    }

    fn post_receives(&mut self, key: usize, receives: &mut ArrayVec<RecvIdx, RECV_BATCH>) {
        let Some(session) = self.sessions.get(key) else {
            return;
        };
        let slots: ArrayVec<Receive, RECV_BATCH> = receives
            .iter()
            .map(|recv| (Work::Recv(*recv).id(), session.channel.receive_slot(*recv)))
            .collect();
        let (device, hardware) = (session.device, &session.hardware);
        let (qp, lkey) = (hardware.qp, hardware.receive_key);
        let taken = self.post_recvs(device, qp, lkey, &slots);
        for recv in receives.drain(..).skip(taken) {
            self.with_channel(key, |ch, cx| ch.handle_recv_flushed(cx, recv));
        }
    }

    /// Posts a chain: RDMA requests and a message, in one go.
    fn post(&mut self, key: usize, task: TaskIdx, send: Option<SendIu>) {
        let session = &self.sessions[key];
        let requests = session.channel.requests(task);
        let (pool, lkey) = (self.pool.memory(), session.hardware.pool_key);
        let built = self.chain.build(requests, pool, lkey);
        let slot = session.channel.send_slot(task);
        let send = send.map(|iu| ChainSend {
            bytes: slot
                .slice(0..iu.len as usize)
                .expect("the message lies in its slot"),
            lkey: session.hardware.send_key,
            op: SendOp::Send,
            flags: if iu.solicited {
                SendFlags::SOLICITED
            } else {
                SendFlags::empty()
            },
        });
        let (qp, id) = (session.hardware.qp, Work::Post(task).id());
        let is_posted = match built {
            Ok(()) => self
                .chain
                .post(&mut self.devices[session.device], qp, id, send.as_ref()),
            Err(error) => {
                tracing::debug!(%error, "a descriptor names no memory");
                false
            }
        };
        if !is_posted {
            self.with_channel(key, |ch, cx| ch.handle_post_done(cx, task, false));
        }
    }

    /// Hands a block operation to the driver, behind those of its backend that wait for room: one that
    /// hangs stops none of the others.
    fn submit_or_stall(&mut self, op: Stalled) {
        if self.stalled.contains_key(&op.store) || !self.submit_block(&op) {
            self.stalled.entry(op.store).or_default().push_back(op);
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
            Owner::Iser(key, task) => self.iser_slices(key, task, &mut slices),
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
        let stores: Vec<_> = self.stalled.keys().copied().collect();
        for store in stores {
            let mut queue = self.stalled.remove(&store).unwrap_or_default();
            while let Some(op) = queue.pop_front() {
                if !self.submit_block(&op) {
                    queue.push_front(op);
                    self.stalled.insert(store, queue);
                    break;
                }
            }
        }
    }

    pub(super) fn abort_block(&mut self, owner: Owner) {
        if self.abandon_change(owner) {
            return;
        }
        let mut queues = self.stalled.iter_mut();
        let waiting = queues.find_map(|(store, queue)| {
            let at = queue.iter().position(|s| s.owner == owner)?;
            queue.remove(at);
            Some((*store, queue.is_empty()))
        });
        let Some((store, is_empty)) = waiting else {
            return self.driver.cancel(&mut self.ring, owner.user());
        };
        if is_empty {
            self.stalled.remove(&store);
        }
        self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
    }

    /// A block operation ended.
    pub(super) fn on_block_done(&mut self, owner: Owner, result: StepResult) {
        match owner {
            Owner::Srp(key, ioctx) => {
                self.with_channel(key, |ch, cx| ch.handle_block_done(cx, ioctx, result));
            }
            Owner::Iscsi(key, task) => self.on_iscsi_block(key, task, result),
            Owner::Iser(key, task) => self.on_iser_block(key, task, result),
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
        if !self.cut(device, cm, qp) {
            self.with_channel(key, Channel::handle_drained);
        }
    }

    /// Sets a channel's timer, if it is earlier than the one that is set.
    pub(super) fn arm_timer(&mut self, key: usize) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        if let Some(at) = session.channel.deadline()
            && session.armed.set(at)
        {
            let serial = session.channel.config().serial;
            self.timers.push(Reverse((at, serial)));
        }
    }

    /// Notes whether a channel waits for pool memory, and makes room for one that begins to.
    fn note_pool_wait(&mut self, key: usize) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let waits = session.channel.waits_for_pool();
        let has_waited = std::mem::replace(&mut session.waits_for_pool, waits);
        if waits && !has_waited {
            self.relieve_pool();
        }
    }
}
