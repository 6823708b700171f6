//! Handles completions, connection events, timers, and mail.

use riser_memory::MemSlice;
use riser_scsi::step::StepResult;
use riser_transport::verbs::{AsyncEvent, CmEventKind, Completion, CqId, PollContext, VerbsError};

use super::blocks::BlockEnd;
use super::conns::{Conn, ConnKey, Connection};
use super::fabrics::{Fabric, Input, RecoveryInput};
use super::mail::Mail;
use super::reservations::NO_CHANNEL;
use super::work::Work;
use super::{GRACE, Phase, PollGroup, Report, Worker, WorkerError};
use crate::audit::Who;
use crate::config::Protocol;
use crate::warn_limited;

/// Maximum number of connection events per device and round. To create a connection, we have to
/// create many objects, and this should not delay commands of existing connections.
const CM_EVENTS: usize = 1;

/// Number of completed block operations to process together.
const TOGETHER: usize = 8;

impl Worker {
    /// Polls the devices and processes their events.
    pub(super) fn poll_devices(&mut self) -> usize {
        let mut work = 0;
        for device in 0..self.group.devices.len() {
            if !self.group.devices.is_open(device) {
                continue;
            }
            work += self.group.devices[device].progress(self.group.now);
            while let Some(packet) = self.group.devices[device].poll_forwarded() {
                // The kernel distributes packets for an address to the sockets of all workers, but
                // it doesn't know which worker has the queue pair.
                let worker = packet.worker as usize;
                self.group
                    .outbox
                    .send(worker, Mail::Forwarded { device, packet });
            }
            for _ in 0..CM_EVENTS {
                let Some(event) = self.group.devices[device].poll_cm_event() else {
                    break;
                };
                work += 1;
                self.on_cm_event(device, event.id, event.kind);
                self.group.drain_dirty();
            }
            while let Some(event) = self.group.devices[device].poll_async_event() {
                self.on_async_event(device, event);
            }
            while let Some(cq) = self.group.devices[device].poll_cq_event() {
                self.on_cq_event(device, cq);
            }
            // Do this last, because a removed device may still have events for its connections.
            self.check_removed(device);
        }
        work
    }

    fn on_cm_event(&mut self, device: usize, cm: riser_transport::verbs::CmId, kind: CmEventKind) {
        let key = self.group.conns.by_cm(device, cm);
        match (&kind, key) {
            (
                CmEventKind::ConnectRequest {
                    listener,
                    peer,
                    param,
                },
                _,
            ) => self.on_connect_request(device, cm, *listener, *peer, param),
            (CmEventKind::Established { .. }, Some(key)) => self.on_established(key),
            (
                CmEventKind::Disconnected
                | CmEventKind::ConnectError(_)
                | CmEventKind::Unreachable
                | CmEventKind::Rejected { .. }
                | CmEventKind::DeviceRemoval,
                Some(key),
            ) => self.on_closed(key, matches!(kind, CmEventKind::Disconnected)),
            // The channel was already released, so we can release its identifier as well.
            (CmEventKind::Disconnected | CmEventKind::TimewaitExit, None) => {
                self.on_disconnect_completed(device, cm);
            }
            (event, _) => tracing::debug!(?event, "connection event"),
        }
    }

    fn on_async_event(&mut self, device: usize, event: AsyncEvent) {
        match event {
            AsyncEvent::CqError(cq) => {
                match self.group.conns.by_cq(device, cq) {
                    Some(key) => self.group.end_overrun(key),
                    // This is an error for the queue pair used by the discovery agent.
                    None => tracing::error!(
                        addr = %self.group.devices.addr(device),
                        "a completion queue without a connection overran"
                    ),
                }
            }
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => {
                if let Some(key) = self.group.conns.by_qp(device, qp) {
                    warn_limited!(
                        self.complaints,
                        self.group.now,
                        ?key,
                        ?event,
                        "the connection failed"
                    );
                    self.group.input(key, Input::Disconnected);
                }
            }
            // The queue pair has received a packet before the last CM message, which may have been
            // lost. This shows that the peer has received our reply.
            AsyncEvent::CommEstablished(qp) => {
                if let Some(key) = self.group.conns.by_qp(device, qp) {
                    self.on_established(key);
                }
            }
            event => tracing::debug!(?event, "device event"),
        }
        self.group.drain_dirty();
    }

    fn on_established(&mut self, key: ConnKey) {
        match self.group.conns.get(key).map(|conn| &conn.fabric) {
            Some(Fabric::Srp(_)) => self.on_srp_established(key),
            Some(Fabric::Iser(_)) => self.on_iser_established(key),
            Some(Fabric::Tcp(_)) | None => {}
        }
    }

    /// Called when the CM has closed a connection. `by_peer` is set if this was requested by the
    /// initiator.
    fn on_closed(&mut self, key: ConnKey, by_peer: bool) {
        if let Some(conn) = self.group.conns.get_mut(key) {
            if let Some(link) = conn.fabric.rdma_mut() {
                link.is_closed = true;
            }
            if by_peer {
                conn.fabric.note_closed();
            }
        }
        self.group.input(key, Input::Disconnected);
    }

    fn on_cq_event(&mut self, device: usize, cq: CqId) {
        if let Some(key) = self.group.conns.by_cq(device, cq) {
            self.group.conns.mark_ready(key);
            return;
        }
        let (audit, now) = (&mut self.group.logins.audit, self.group.now);
        self.group
            .devices
            .poll_discovery(device, cq, now, |peer, portal, found| {
                let who = Who {
                    protocol: Protocol::Srp,
                    peer: peer.to_string(),
                    portal: portal.to_string(),
                    initiator: None,
                    user: None,
                    target: None,
                    nexus: None,
                };
                audit.discovery(now, &who, found);
            });
    }
}

impl PollGroup {
    /// Polls a batch of completions from each queue that is ready.
    pub(super) fn poll_ready(&mut self) -> usize {
        let mut work = 0;
        // Only process the connections that are ready now. If there are more completions, a
        // connection is added to the end of the list for the next round.
        for _ in 0..self.conns.ready() {
            let Some((key, device, cq)) = self.conns.next_ready() else {
                break;
            };
            work += self.poll_cq(key, device, cq);
        }
        work
    }

    /// Polls a batch of completions for a connection.
    fn poll_cq(&mut self, key: ConnKey, device: usize, cq: CqId) -> usize {
        let serial = self.conns.get(key).map(Conn::serial);
        let link = self.conns.get(key).and_then(|conn| conn.fabric.rdma());
        // These will not complete. `check_removed` or `end_overrun` has already closed the
        // connection.
        if self.devices[device].is_gone() || link.is_some_and(|l| l.hardware.has_lost_queues) {
            return 0;
        }
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = PollContext::Softirq.poll(&mut self.devices[device], cq, &mut completions);
        for completion in &completions {
            self.on_completion(key, completion);
        }
        self.completions = completions;
        // Do this once for all completions, so that work requests can be posted together.
        self.drain_dirty();
        // The connection may have been removed, and its key reused.
        if self.conns.get(key).map(Conn::serial) != serial {
            return 1;
        }
        match polled {
            Ok(n) => {
                if PollContext::Softirq.has_more(&mut self.devices[device], cq, n) {
                    self.conns.mark_ready(key);
                }
                n
            }
            Err(VerbsError::CqOverrun) => {
                self.end_overrun(key);
                self.drain_dirty();
                1
            }
            Err(error) => {
                tracing::error!(%error, "cannot poll a completion queue");
                1
            }
        }
    }

    fn on_completion(&mut self, key: ConnKey, completion: &Completion) {
        let Some(conn) = self.conns.get(key) else {
            return;
        };
        if !completion.status.is_ok() {
            tracing::debug!(
                peer = %conn.peer, status = ?completion.status,
                work = ?Work::of(completion.wr_id), "work failed"
            );
        }
        match conn.fabric {
            Fabric::Srp(_) => self.on_srp_completion(key, completion),
            Fabric::Iser(_) => self.on_iser_completion(key, completion),
            Fabric::Tcp(_) => unreachable!("it has no completion queue"),
        }
    }

    /// Passes the `len` bytes of a completed receive to `input`, which should forward them to the
    /// channel with this slot. It must not post the receive again.
    #[allow(
        unsafe_code,
        reason = "a message is looked at in place, in the receive ring"
    )]
    pub(super) fn with_received(
        &mut self,
        slot: MemSlice,
        len: usize,
        input: impl FnOnce(&mut Self, &[u8]),
    ) {
        let (memory, offset) = (slot.memory(), slot.offset());
        let len = len.min(slot.len());
        // SAFETY: the receive has completed, so the device will not write to this memory. It is
        // only posted again by an action, which is processed after this call. The channel itself
        // only reads from its receive ring.
        unsafe { memory.with_bytes(offset, len, |bytes| input(self, bytes)) };
    }

    /// Processes completions of the ring and completed block operations.
    pub(super) fn poll_blocks(&mut self) -> Result<usize, WorkerError> {
        let mut completions = std::mem::take(&mut self.ring_completions);
        completions.clear();
        let reaped = self.ring.reap(&mut completions)?;
        for completion in &mut completions {
            let is_block = self.blocks.handle_completion(&mut self.ring, completion);
            // The top byte of a token specifies the type of operation.
            if !is_block && !self.on_iscsi_completion(completion) {
                self.devices.on_watch(completion);
            }
        }
        self.ring_completions = completions;
        let mut work = reaped.completions;
        let mut ended = 0;
        while let Some(end) = self.blocks.poll_end(&mut self.ring) {
            work += 1;
            match end {
                BlockEnd::Flush => self.report_flush(),
                BlockEnd::Task(owner, result) => {
                    self.on_block_done(owner, result);
                    ended += 1;
                }
            }
            // We process several operations before sending the responses, but not all of them. This
            // allows the initiator to continue while we process the next operations.
            if ended % TOGETHER == 0 {
                self.drain_dirty();
            }
        }
        self.drain_dirty();
        work += self.poll_reservations();
        while let Some((owner, result)) = self.formats.poll_result() {
            work += 1;
            self.on_block_done(owner, result);
            self.drain_dirty();
        }
        // Do this last, when there is room in the driver because of completed operations.
        self.blocks.retry(&mut self.ring, &self.conns);
        Ok(work)
    }

    /// Handles mail for a connection.
    pub(super) fn handle_mail(&mut self, mail: Mail) {
        match mail {
            Mail::StartTask(task) => self.deliver(task.channel, Input::StartTask(task)),
            Mail::AbortTask { task, watcher } => match self.conns.by_serial(task.channel) {
                Some(key) => self.input(key, Input::AbortTask { task, watcher }),
                // A closed connection has no tasks.
                None => self.post_mail(watcher.worker, Mail::TaskGone(watcher)),
            },
            // This is for a change of reservations instead of a function of a connection.
            Mail::TaskGone(watcher) if watcher.channel == NO_CHANNEL => {
                if let Some(owner) = self.saver.on_preempted_gone(watcher) {
                    self.on_block_done(owner, StepResult::Reservations(Ok(())));
                }
            }
            Mail::TaskGone(watcher) => self.deliver(watcher.channel, Input::TaskGone(watcher)),
            Mail::Terminate { serial } => self.deliver(serial, Input::Terminate),
            Mail::LogOut { serial, until } => {
                if let Some(key) = self.conns.by_serial(serial) {
                    self.log_out(key, until);
                }
            }
            // It may have started waiting for a different connection.
            Mail::OthersGone { serial } => {
                if !self.shared.iscsi.is_waiting(self.channel_ref(serial)) {
                    self.deliver(serial, Input::OthersGone);
                }
            }
            Mail::TakeTurn { serial } => self.deliver(serial, Input::Turn),
            Mail::Detach { serial } => self.recover(serial, RecoveryInput::Detach),
            Mail::Lost { serial, cid } => self.recover(serial, RecoveryInput::Lost(cid)),
            Mail::Reassigned { to, moved } => {
                self.recover(to.channel, RecoveryInput::Reassigned(to, moved));
            }
            Mail::Reassign(reassign) => {
                self.recover(reassign.task.channel, RecoveryInput::Reassign(reassign));
            }
            Mail::Event { unit, attention } => {
                let is_srp = |conn: &Conn<Fabric>| matches!(conn.fabric, Fabric::Srp(_));
                for key in self.conns.keys(is_srp) {
                    self.input(key, Input::Event { unit, attention });
                }
            }
            Mail::Forwarded { .. }
            | Mail::Stage(..)
            | Mail::Unstage
            | Mail::Changed
            | Mail::Shutdown { .. }
            | Mail::Drain { .. }
            | Mail::Resume(_)
            | Mail::Flush(_)
            | Mail::OldestRequests(_)
            | Mail::Exit
            | Mail::Snapshot(_)
            | Mail::Ping(_)
            | Mail::Listeners(_) => unreachable!("{mail:?} is not for a connection"),
        }
    }

    /// Passes an input to a connection of this worker, if it still exists.
    fn deliver(&mut self, serial: u64, input: Input) {
        if let Some(key) = self.conns.by_serial(serial) {
            self.input(key, input);
        }
    }

    fn report_flush(&mut self) {
        if let Some((number, result)) = self.blocks.take_flush_result() {
            let _ = self.reports.send(Report::Flushed(number, result));
        }
    }
}

impl Worker {
    pub(super) fn poll_mail(&mut self) -> usize {
        let mut work = 0;
        while let Some(mail) = self.mailbox.poll_message() {
            work += 1;
            self.handle_mail(mail);
            self.group.drain_dirty();
            // The next round starts immediately and will process the remaining messages.
            if work == super::mail::MAILBOX {
                break;
            }
        }
        work
    }

    fn handle_mail(&mut self, mail: Mail) {
        match mail {
            Mail::Forwarded { device, packet } => {
                if let Some(dev) = self.group.devices.get_mut(device) {
                    dev.handle_forwarded(self.group.now, &packet);
                }
            }
            Mail::Stage(stage, reply) => {
                let (ring, devices) = (&mut self.group.ring, &mut self.group.devices);
                let result = self
                    .group
                    .portals
                    .stage(ring, devices, &self.group.catalog, *stage);
                // If the server has stopped waiting, it will release this.
                let _ = reply.send(result);
            }
            Mail::Unstage => self
                .group
                .portals
                .unstage(&mut self.group.ring, &mut self.group.devices),
            Mail::Changed => self.group.follow_catalog(),
            Mail::Shutdown { until } => self.begin_shutdown(until),
            Mail::Drain { until } => self.begin_drain(until),
            Mail::Resume(reply) => {
                self.resume();
                let _ = reply.send(());
            }
            Mail::Flush(number) => self.begin_flush(number),
            Mail::OldestRequests(reply) => {
                let _ = reply.send(self.group.blocks.oldest_requests());
            }
            Mail::Exit => self.exiting = true,
            Mail::Snapshot(reply) => {
                // The server may have stopped waiting.
                let _ = reply.send(self.snapshot());
            }
            Mail::Ping(reply) => {
                let _ = reply.send(());
            }
            Mail::Listeners(reply) => {
                let _ = reply.send(self.group.sockets.duplicate_listeners());
            }
            Mail::StartTask(_)
            | Mail::AbortTask { .. }
            | Mail::TaskGone(_)
            | Mail::Terminate { .. }
            | Mail::LogOut { .. }
            | Mail::OthersGone { .. }
            | Mail::TakeTurn { .. }
            | Mail::Detach { .. }
            | Mail::Lost { .. }
            | Mail::Reassigned { .. }
            | Mail::Reassign(_)
            | Mail::Event { .. } => self.group.handle_mail(mail),
        }
    }

    pub(super) fn poll_timers(&mut self) -> usize {
        let mut work = 0;
        while let Some(key) = self.group.conns.take_timer(self.group.now) {
            work += 1;
            self.group.input(key, Input::Timeout);
            self.group.drain_dirty();
        }
        while let Some((device, cm)) = self.group.disconnects.take_expired(self.group.now) {
            self.destroy_id(device, cm);
        }
        work
    }

    /// Distributes released pool memory to waiting channels in order. Returns the number of
    /// channels.
    pub(super) fn poll_pool(&mut self) -> usize {
        if !self.group.pool.take_change() {
            return 0;
        }
        let mut waiting = std::mem::take(&mut self.pool_line);
        self.group.conns.put_waiting(&self.group.pool, &mut waiting);
        for key in &waiting {
            self.group.input(*key, Input::Pool);
            self.group.drain_dirty();
        }
        let work = waiting.len();
        waiting.clear();
        self.pool_line = waiting;
        work
    }

    /// Updates the state of a drain or shutdown.
    pub(super) fn poll_phase(&mut self) {
        let (until, next) = match self.phase {
            Phase::Draining(until) => (until, Phase::Drained),
            Phase::Stopping(until) => (until, Phase::Quiet),
            Phase::Serving | Phase::Drained | Phase::Quiet => return,
        };
        if self.group.now >= until + GRACE {
            for key in self.group.conns.keys(|_| true) {
                self.group.input(key, Input::Cut);
            }
            self.group.drain_dirty();
        }
        // Wait for replies to disconnect requests if there is still time.
        let parting = !self.group.disconnects.is_empty() && self.group.now < until;
        // After a drain, the shutdown must not have to wait. Requests without a session may belong
        // to a removed backend.
        let is_busy = matches!(self.phase, Phase::Draining(_)) && self.group.blocks.has_requests();
        if self.group.conns.is_empty() && !parting && !is_busy {
            self.phase = next;
            let _ = self.group.reports.send(Report::Quiet(self.group.index));
        }
    }

    /// Starts to flush all backends.
    fn begin_flush(&mut self, number: u64) {
        let (ring, catalog) = (&mut self.group.ring, &self.group.catalog);
        self.group.blocks.begin_flush(ring, catalog, number);
        // If there are no writable backends, this is already complete.
        self.group.report_flush();
    }
}
