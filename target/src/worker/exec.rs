//! Carries out what connections ask for.

use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::Worker;
use super::blocks::BlockRequest;
use super::conns::{ConnKey, Connection};
use super::fabrics::{Fabric, Input};
use super::mail::Mail;
use super::work::{Owner, Work};
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
        // Only when the wait begins, since it looks at all connections.
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
        // Not for the backend: the change is saved in a state directory by calls that block.
        if let BlockOp::ChangeReservations(change) = op {
            return self.change_reservations(owner, unit, change);
        }
        let store = self.blocks.store_of(&self.catalog, unit);
        let request = BlockRequest { owner, store, op };
        self.blocks.submit(&mut self.ring, &self.conns, request);
    }

    pub(super) fn abort_block(&mut self, owner: Owner) {
        if self.abandon_change(owner) {
            return;
        }
        if self.blocks.abort(&mut self.ring, owner) {
            self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
        }
    }

    /// A block operation ended.
    pub(super) fn on_block_done(&mut self, owner: Owner, result: StepResult) {
        self.input(owner.conn, Input::BlockDone(owner.task, result));
    }

    /// Sends mail to a worker; to ourselves it is delivered at once.
    pub(super) fn post_mail(&mut self, worker: u16, mail: Mail) {
        // By way of the mailbox it would wait for another round.
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
        // Without a marker nothing would end the wait for it. The channel counts its receives and
        // chains besides, so it releases no memory that is in use.
        if link.hardware.has_lost_queues || !self.cut(device, cm, qp) {
            self.input(key, Input::Drained);
        }
    }

    /// Ends a connection whose completion queue has lost completions, so that it is not known what
    /// the device still uses, nor would a drain marker show it: the queues go before the buffers
    /// do.
    pub(super) fn end_overrun(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        let peer = conn.peer;
        let Some(link) = conn.fabric.rdma_mut() else {
            return;
        };
        let dev = &mut self.devices[link.device];
        // The peer hears of it while there is a queue pair to disconnect.
        let _ = dev.disconnect(link.cm);
        if link.hardware.destroy_queues(dev) {
            tracing::error!(%peer, "a completion queue overran, and its connection ends");
            self.input(key, Input::QueuesGone);
        }
    }

    /// Ends the connection of a chain that was taken in part. The chain ends when a marker behind
    /// its requests completes: until then the device may read or write the buffer. The chain has
    /// send-queue credit for the marker, since its own last request was not taken.
    pub(super) fn end_torn_chain(&mut self, key: ConnKey, marker: Work) {
        let Some(link) = self.conns.get(key).and_then(|conn| conn.fabric.rdma()) else {
            return;
        };
        let (device, qp) = (link.device, link.hardware.qp);
        if !self.post_empty_write(device, qp, marker) {
            // The buffer stays out of the pool until the device goes. Lost memory is the lesser
            // evil: given to another command, its data could go to the wrong initiator or disk.
            tracing::error!("the end of a chain cannot be known, so its buffer is not used again");
        }
        self.input(key, Input::Disconnected);
    }

    /// Notifies the connection manager that a connection has data, so it is established. The
    /// message that says so may have arrived meanwhile.
    pub(super) fn notify_established(&mut self, key: ConnKey) {
        if let Some(link) = self.conns.get(key).and_then(|c| c.fabric.rdma()) {
            let _ = self.devices[link.device].notify_established(link.cm);
        }
    }
}
