//! Carries out what connections ask for.

use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::conns::{ConnKey, Connection};
use super::fabrics::{Fabric, Input};
use super::mail::Mail;
use super::work::Owner;
use super::{Stalled, Worker};
use crate::fabric::{TaskAction, UnitIdx};

impl Worker {
    /// Carries out the actions of every connection that may have some.
    pub(super) fn drain_dirty(&mut self) {
        while let Some(key) = self.conns.next_dirty() {
            self.pump(key);
        }
    }

    /// Carries out the actions of one connection.
    pub(super) fn pump(&mut self, key: ConnKey) {
        if std::mem::take(&mut self.has_entered) {
            // A session may have units that this worker has not heard of.
            self.follow_catalog();
        }
        match self.conns.get(key).map(|conn| &conn.fabric) {
            Some(Fabric::Srp(_)) => self.pump_srp(key),
            Some(Fabric::Tcp(_)) => self.pump_tcp(key),
            Some(Fabric::Iser(_)) => self.pump_iser(key),
            None => return,
        }
        self.conns.arm(key);
        if self.conns.begins_to_wait(key) {
            self.relieve_pool();
        }
    }

    /// Carries out what a connection asks for a command or a function.
    pub(super) fn carry_out_task(&mut self, conn: ConnKey, action: TaskAction) {
        match action {
            TaskAction::SubmitBlock { task, unit, op } => {
                self.carry_out_block(Owner { conn, task }, unit, op);
            }
            TaskAction::AbortBlock(task) => self.abort_block(Owner { conn, task }),
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
        let conn = self.conns.get(op.owner.conn);
        let is_there = conn.is_some();
        if let Some(conn) = conn {
            conn.fabric.put_slices(op.owner.task, &mut slices);
        }
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
        self.input(owner.conn, Input::BlockDone(owner.task, result));
    }

    /// Sends mail to a worker; to ourselves it is delivered at once.
    pub(super) fn post_mail(&mut self, worker: u16, mail: Mail) {
        if worker == self.index {
            self.handle_mail(mail);
        } else {
            self.outbox.send(usize::from(worker), mail);
        }
    }

    /// Cuts a connection on RDMA, and has it wait for the drain marker.
    pub(super) fn disconnect(&mut self, key: ConnKey) {
        let Some(link) = self.conns.get(key).and_then(|c| c.fabric.rdma()) else {
            return;
        };
        let (device, cm, qp) = (link.device, link.cm, link.hardware.qp);
        if !self.cut(device, cm, qp) {
            self.input(key, Input::Drained);
        }
    }

    /// Notifies the connection manager that a connection has data, so it is established. The message
    /// that says so may have arrived meanwhile.
    pub(super) fn notify_established(&mut self, key: ConnKey) {
        if let Some(link) = self.conns.get(key).and_then(|c| c.fabric.rdma()) {
            let _ = self.devices[link.device].notify_established(link.cm);
        }
    }
}
