//! Executes the actions of connections.

use riser_scsi::step::{BackendError, BlockOp, StepResult};

use super::PollGroup;
use super::blocks::BlockRequest;
use super::conns::{ConnKey, Connection};
use super::fabrics::{Fabric, Input};
use super::mail::Mail;
use super::work::{Owner, Work};
use crate::fabric::{TaskAction, UnitIdx};

impl PollGroup {
    /// Executes the actions of all connections in the list.
    pub(super) fn drain_dirty(&mut self) {
        while let Some(key) = self.conns.next_dirty() {
            self.pump(key);
        }
    }

    /// Executes the actions of a connection.
    pub(super) fn pump(&mut self, key: ConnKey) {
        if std::mem::take(&mut self.has_entered) {
            // A session may already use units that are new for this worker.
            self.follow_catalog();
        }
        match self.conns.get(key).map(|conn| &conn.fabric) {
            Some(Fabric::Srp(_)) => self.pump_srp(key),
            Some(Fabric::Tcp(_)) => self.pump_tcp(key),
            Some(Fabric::Iser(_)) => self.pump_iser(key),
            None => return,
        }
        self.conns.arm(key);
        // Only call this when a new wait starts, because it checks all connections.
        if self.conns.begins_to_wait(key) {
            self.relieve_pool();
        }
    }

    /// Executes an action for a command or function.
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

    /// Executes a block operation for a command.
    pub(super) fn carry_out_block(&mut self, owner: Owner, unit: UnitIdx, op: BlockOp) {
        // This is not sent to the backend, because we have to save it in a state directory with
        // blocking calls.
        if let BlockOp::ChangeReservations(change) = op {
            return self.change_reservations(owner, unit, change);
        }
        if let BlockOp::ChangeProtection(change) = op {
            return self.change_protection(owner, unit, change);
        }
        let store = self.blocks.store_of(&self.catalog, unit);
        let request = BlockRequest { owner, store, op };
        self.blocks.submit(&mut self.ring, &self.conns, request);
    }

    pub(super) fn abort_block(&mut self, owner: Owner) {
        if self.saver.abandon(owner) || self.blocks.abort(&mut self.ring, owner) {
            self.on_block_done(owner, StepResult::Failed(BackendError::Aborted));
        }
    }

    /// Handles a completed block operation.
    pub(super) fn on_block_done(&mut self, owner: Owner, result: StepResult) {
        self.input(owner.conn, Input::BlockDone(owner.task, result));
    }

    /// Sends mail to a worker. If it is for this worker, it is delivered immediately.
    pub(super) fn post_mail(&mut self, worker: u16, mail: Mail) {
        // If we used the mailbox, this would be delayed to the next round.
        if worker == self.index {
            self.handle_mail(mail);
        } else {
            self.outbox.send(usize::from(worker), mail);
        }
    }

    /// Disconnects an RDMA connection and waits for the drain marker.
    pub(super) fn disconnect(&mut self, key: ConnKey) {
        let Some(link) = self.conns.get(key).and_then(|c| c.fabric.rdma()) else {
            return;
        };
        let (device, cm, qp) = (link.device, link.cm, link.hardware.qp);
        // iWARP adapters do not flush all requests: siw ignores those posted in the error state, and
        // READs if the peer has closed the connection. The buffers are unused when the queues are
        // destroyed.
        if link.hardware.sinks.is_some() {
            if !destroy_queues(self, key) {
                self.input(key, Input::Drained);
            }
            return;
        }
        // If there is no drain marker, nothing would complete this wait. The channel also counts
        // its receives and chains, so memory that is still in use will not be released.
        if link.hardware.has_lost_queues || !self.devices.cut(device, cm, qp) {
            self.input(key, Input::Drained);
        }
    }

    /// Closes a connection after a completion queue overrun. We don't know which buffers are still
    /// in use by the device, and a drain marker doesn't help either, so the queues have to be
    /// destroyed before releasing the buffers.
    pub(super) fn end_overrun(&mut self, key: ConnKey) {
        let Some(peer) = self.conns.get(key).map(|conn| conn.peer) else {
            return;
        };
        if destroy_queues(self, key) {
            tracing::error!(%peer, "a completion queue overran; closing its connection");
        }
    }

    /// Closes a connection if only a part of a chain was posted. The chain is complete when a
    /// marker after its requests completes. Until then, the device may read from or write to the
    /// buffer. There is a credit for the marker, because the last request of the chain was not
    /// posted.
    pub(super) fn end_torn_chain(&mut self, key: ConnKey, marker: Work) {
        let Some(link) = self.conns.get(key).and_then(|conn| conn.fabric.rdma()) else {
            return;
        };
        let (device, qp) = (link.device, link.hardware.qp);
        if !self.devices.post_empty_write(device, qp, marker) {
            // The buffer is only returned to the pool when the device is closed. Losing this memory
            // is better than using it for a different command, which could send the data to the
            // wrong initiator or disk.
            tracing::error!(
                "the completion of a chain is unknown, so its buffer will not be reused"
            );
        }
        self.input(key, Input::Disconnected);
    }

    /// Notifies the connection manager that a connection has received data and is therefore
    /// established. The corresponding CM message may already have been received.
    pub(super) fn notify_established(&mut self, key: ConnKey) {
        if let Some(link) = self.conns.get(key).and_then(|c| c.fabric.rdma()) {
            let _ = self.devices[link.device].notify_established(link.cm);
        }
    }
}

/// Disconnects an RDMA connection, destroys its queues and notifies its channel. Returns false if
/// they were already destroyed.
fn destroy_queues(group: &mut PollGroup, key: ConnKey) -> bool {
    let conn = group.conns.get_mut(key);
    let Some(link) = conn.and_then(|conn| conn.fabric.rdma_mut()) else {
        return false;
    };
    let dev = &mut group.devices[link.device];
    // Notify the peer while we still have the queue pair.
    let _ = dev.disconnect(link.cm);
    let is_destroyed = link.hardware.destroy_queues(dev);
    if is_destroyed {
        group.input(key, Input::QueuesGone);
    }
    is_destroyed
}

/// Deregisters the sinks of a chain that has completed or was not posted.
pub(super) fn release_sinks(group: &mut PollGroup, key: ConnKey, chain: Work) {
    let conn = group.conns.get_mut(key);
    if let Some(link) = conn.and_then(|conn| conn.fabric.rdma_mut()) {
        let dev = &mut group.devices[link.device];
        link.hardware.release_sinks(dev, chain.id());
    }
}
