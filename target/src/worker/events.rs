//! Completions, connection events, timers and mail into channels.

#![allow(
    unsafe_code,
    reason = "a received message is looked at in place, in the receive ring"
)]

use std::cmp::Reverse;
use std::net::IpAddr;

use riser_memory::MemSlice;
use riser_scsi::step::{BlockOp, StepResult};
use riser_transport::verbs::{AsyncEvent, CmEventKind, Completion, CqId, Notify, QpId, VerbsError};

use super::exec::{Owner, Work};
use super::mail::Mail;
use super::reservations::NO_CHANNEL;
use super::{CQ_BATCH, Endpoint, Flushing, GRACE, Phase, Report, Worker, WorkerError};
use crate::audit::Who;
use crate::config::Protocol;
use crate::iscsi::TakeOver;
use crate::iser::IserChannel;
use crate::pool;
use crate::srp::{Channel, RecvIdx};
use crate::warn_limited;

/// The driver's name for flushes of the worker itself.
const FLUSH: u64 = u64::MAX;

impl Worker {
    /// Drives the devices, and takes what they tell.
    pub(super) fn poll_devices(&mut self) -> usize {
        let mut work = 0;
        for device in 0..self.devices.len() {
            if !self.devices.is_open(device) {
                continue;
            }
            work += self.devices[device].progress(self.now);
            while let Some(packet) = self.devices[device].poll_misdirected() {
                let worker = packet.worker as usize;
                self.outbox.send(worker, Mail::Forwarded { device, packet });
            }
            while let Some(event) = self.devices[device].poll_cm_event() {
                work += 1;
                self.on_cm_event(device, event.id, event.kind);
                self.drain_dirty();
            }
            while let Some(event) = self.devices[device].poll_async_event() {
                self.on_async_event(device, event);
            }
            while let Some(cq) = self.devices[device].poll_cq_event() {
                self.on_cq_event(device, cq);
            }
            self.check_removed(device);
        }
        work
    }

    fn on_cm_event(&mut self, device: usize, cm: riser_transport::verbs::CmId, kind: CmEventKind) {
        let key = self.by_cm.get(&(device, cm)).copied();
        match (&kind, key) {
            (
                CmEventKind::ConnectRequest {
                    listener,
                    peer,
                    param,
                },
                _,
            ) => self.on_connect_request(device, cm, *listener, *peer, param),
            (CmEventKind::Established { .. }, Some(place)) => self.on_established(place),
            (
                CmEventKind::Disconnected
                | CmEventKind::ConnectError(_)
                | CmEventKind::Unreachable
                | CmEventKind::Rejected { .. }
                | CmEventKind::DeviceRemoval,
                Some(Endpoint::Srp(key)),
            ) => {
                let session = &mut self.sessions[key];
                session.is_closed = true;
                if matches!(kind, CmEventKind::Disconnected) {
                    session.channel.note_closed();
                }
                self.with_channel(key, Channel::handle_disconnected);
            }
            (
                CmEventKind::Disconnected
                | CmEventKind::ConnectError(_)
                | CmEventKind::Unreachable
                | CmEventKind::Rejected { .. }
                | CmEventKind::DeviceRemoval,
                Some(Endpoint::Iser(key)),
            ) => self.on_iser_closed(key, matches!(kind, CmEventKind::Disconnected)),
            (CmEventKind::Disconnected | CmEventKind::TimewaitExit, None) => {
                self.end_lingering(Some((device, cm)));
            }
            (event, _) => tracing::debug!(?event, "connection event"),
        }
    }

    fn on_async_event(&mut self, device: usize, event: AsyncEvent) {
        match event {
            AsyncEvent::CqError(cq) => {
                tracing::error!("a completion queue overran");
                if let Some(place) = self.by_cq.get(&(device, cq)).copied() {
                    self.on_failed(place);
                }
            }
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => {
                if let Some(place) = self.endpoint_of_qp(device, qp) {
                    warn_limited!(
                        self.complaints,
                        self.now,
                        ?place,
                        ?event,
                        "the connection failed"
                    );
                    self.on_failed(place);
                }
            }
            AsyncEvent::CommEstablished(qp) => {
                if let Some(place) = self.endpoint_of_qp(device, qp) {
                    self.on_established(place);
                }
            }
            event => tracing::debug!(?event, "device event"),
        }
        self.drain_dirty();
    }

    /// Rare events name the queue pair; looking for it is no loss.
    fn endpoint_of_qp(&self, device: usize, qp: QpId) -> Option<Endpoint> {
        let iser = || self.isers.with_qp(device, qp).map(Endpoint::Iser);
        self.sessions
            .iter()
            .find(|(_, s)| s.device == device && s.hardware.qp == qp)
            .map(|(key, _)| Endpoint::Srp(key))
            .or_else(iser)
    }

    fn on_established(&mut self, place: Endpoint) {
        match place {
            Endpoint::Srp(key) => self.on_srp_established(key),
            Endpoint::Iser(key) => self.on_iser_established(key),
        }
    }

    /// A connection is of no more use.
    fn on_failed(&mut self, place: Endpoint) {
        match place {
            Endpoint::Srp(key) => self.with_channel(key, Channel::handle_disconnected),
            Endpoint::Iser(key) => self.with_iser(key, IserChannel::handle_disconnected),
        }
    }

    fn on_cq_event(&mut self, device: usize, cq: CqId) {
        if let Some(place) = self.by_cq.get(&(device, cq)).copied() {
            self.make_ready(place);
        } else if let Some(agent) = &mut self.discovery[device] {
            let portal = self.devices.addr(device);
            let (audit, now) = (&mut self.audit, self.now);
            let mut tell = |peer: IpAddr, found| {
                let who = Who {
                    protocol: Protocol::Srp,
                    peer: peer.to_string(),
                    portal: portal.to_string(),
                    initiator: None,
                    target: None,
                    nexus: None,
                };
                audit.discovery(now, &who, found);
            };
            agent.poll(&mut self.devices[device], cq, &mut tell);
        }
    }

    fn make_ready(&mut self, place: Endpoint) {
        let is_new = match place {
            Endpoint::Srp(key) => !std::mem::replace(&mut self.sessions[key].is_ready, true),
            Endpoint::Iser(key) => self.isers.mark_ready(key),
        };
        if is_new {
            self.ready.push_back(place);
        }
    }

    /// Takes a batch from every completion queue that has something.
    pub(super) fn poll_ready(&mut self) -> usize {
        let mut work = 0;
        for _ in 0..self.ready.len() {
            let Some(place) = self.ready.pop_front() else {
                break;
            };
            work += self.poll_endpoint(place);
        }
        work
    }

    /// Device, completion queue and number of a connection, which is no longer marked as ready.
    fn take_ready(&mut self, place: Endpoint) -> Option<(usize, CqId, u64)> {
        match place {
            Endpoint::Srp(key) => {
                let session = self.sessions.get_mut(key)?;
                session.is_ready = false;
                let serial = session.channel.config().serial;
                Some((session.device, session.hardware.cq, serial))
            }
            Endpoint::Iser(key) => self.isers.take_ready(key),
        }
    }

    fn poll_endpoint(&mut self, place: Endpoint) -> usize {
        let Some((device, cq, serial)) = self.take_ready(place) else {
            return 0;
        };
        if self.devices[device].is_gone() {
            return 0;
        }
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.devices[device].poll_cq(cq, CQ_BATCH, &mut completions);
        for completion in &completions {
            match place {
                Endpoint::Srp(key) => self.on_completion(key, completion),
                Endpoint::Iser(key) => self.on_iser_completion(key, completion),
            }
            self.drain_dirty();
        }
        self.completions = completions;
        // The connection may be gone by now, and its place another's.
        let is_same = match place {
            Endpoint::Srp(key) => self.by_serial.get(&serial) == Some(&key),
            Endpoint::Iser(key) => self.isers.is_same(key, serial),
        };
        if !is_same {
            return 1;
        }
        match polled {
            Ok(n) => {
                let more = n == CQ_BATCH
                    || self.devices[device]
                        .req_notify_cq(cq, Notify::Next)
                        .unwrap_or(false);
                if more {
                    self.make_ready(place);
                }
                n
            }
            Err(VerbsError::CqOverrun) => {
                self.on_failed(place);
                self.drain_dirty();
                1
            }
            Err(error) => {
                tracing::error!(%error, "cannot poll a completion queue");
                1
            }
        }
    }

    fn on_completion(&mut self, key: usize, completion: &Completion) {
        let ok = completion.status.is_ok();
        if !ok && self.sessions.contains(key) {
            tracing::debug!(
                peer = %self.sessions[key].peer, status = ?completion.status,
                work = ?Work::of(completion.wr_id), "work failed"
            );
        }
        match Work::of(completion.wr_id) {
            Work::Recv(recv) if ok => self.on_message(key, recv, completion.byte_len as usize),
            Work::Recv(recv) => self.with_channel(key, |ch, cx| ch.handle_recv_flushed(cx, recv)),
            Work::Post(ioctx) => {
                self.with_channel(key, |ch, cx| ch.handle_post_done(cx, ioctx, ok));
            }
            Work::Inner => self.with_channel(key, Channel::handle_disconnected),
            Work::Probe => self.with_channel(key, |ch, cx| ch.handle_probed(cx, ok)),
            Work::Drain => {
                self.with_channel(key, Channel::handle_drained);
            }
            Work::IserRecv(_) | Work::IserPost(_) => {
                unreachable!("an SRP channel posts nothing of iSER's")
            }
        }
    }

    fn on_message(&mut self, key: usize, recv: RecvIdx, len: usize) {
        let Some(session) = self.sessions.get(key) else {
            return;
        };
        let slot = session.channel.receive_slot(recv);
        self.with_received(&slot, len, |worker, bytes| {
            worker.with_channel(key, |ch, cx| ch.handle_recv(cx, recv, bytes));
        });
    }

    /// Looks at the `len` bytes that a completed receive has left in its slot. `input` hands them to
    /// the channel that owns the slot, and must not post the receive again.
    pub(super) fn with_received(
        &mut self,
        slot: &MemSlice,
        len: usize,
        input: impl FnOnce(&mut Self, &[u8]),
    ) {
        let (memory, offset) = (slot.memory().clone(), slot.offset());
        let len = len.min(slot.len());
        // SAFETY: the receive has completed, so the device writes there no more, and it is posted
        // again only by an action, which is carried out after this call. The channel itself only
        // reads its receive ring.
        unsafe { memory.with_bytes(offset, len, |bytes| input(self, bytes)) };
    }

    /// Takes what the ring has finished, and the block operations that this ends.
    pub(super) fn poll_blocks(&mut self) -> Result<usize, WorkerError> {
        let mut completions = std::mem::take(&mut self.ring_completions);
        completions.clear();
        let reaped = self.ring.reap(&mut completions)?;
        for completion in &mut completions {
            if self.driver.owns(completion.token) {
                self.driver.handle_completion(&mut self.ring, completion);
            } else if !self.on_iscsi_completion(completion) {
                self.on_watch(completion);
            }
        }
        self.ring_completions = completions;
        let mut work = reaped.completions;
        while let Some(done) = self.driver.poll_done(&mut self.ring) {
            work += 1;
            if done.user == FLUSH {
                self.on_flushed(done.result);
            } else {
                self.on_block_done(Owner::of(done.user), done.result);
                self.drain_dirty();
            }
        }
        work += self.poll_reservations();
        if !self.stalled.is_empty() {
            self.retry_stalled();
        }
        Ok(work)
    }

    pub(super) fn poll_mail(&mut self) -> usize {
        let mut work = 0;
        while let Some(mail) = self.mailbox.poll_message() {
            work += 1;
            self.handle_mail(mail);
            self.drain_dirty();
            // The rest waits for the next round, which begins at once.
            if work == super::mail::MAILBOX {
                break;
            }
        }
        work
    }

    pub(super) fn handle_mail(&mut self, mut mail: Mail) {
        if let Some(serial) = mail.addressee()
            && !self.by_serial.contains_key(&serial)
            && (self.handle_iscsi_mail(serial, &mut mail) || self.handle_iser_mail(serial, &mail))
        {
            return;
        }
        match mail {
            Mail::Forwarded { device, packet } => {
                if let Some(dev) = self.devices.get_mut(device) {
                    dev.handle_forwarded(self.now, &packet);
                }
            }
            Mail::StartTask(task) => {
                if let Some(key) = self.by_serial.get(&task.channel).copied() {
                    self.with_channel(key, |ch, cx| ch.handle_task_start(cx, task));
                }
            }
            Mail::AbortTask { task, watcher } => match self.by_serial.get(&task.channel).copied() {
                Some(key) => {
                    self.with_channel(key, |ch, cx| ch.handle_abort(cx, task, watcher));
                }
                None => self.post_mail(watcher.worker, Mail::TaskGone(watcher)),
            },
            Mail::TaskGone(watcher) if watcher.channel == NO_CHANNEL => {
                self.on_preempted_gone(watcher);
            }
            Mail::TaskGone(watcher) => {
                if let Some(key) = self.by_serial.get(&watcher.channel).copied() {
                    self.with_channel(key, |ch, cx| ch.handle_task_gone(cx, watcher));
                }
            }
            Mail::Terminate { serial } => {
                if let Some(key) = self.by_serial.get(&serial).copied() {
                    self.with_channel(key, Channel::handle_terminate);
                }
            }
            Mail::LogOut { serial, until } => {
                if let Some(key) = self.by_serial.get(&serial).copied() {
                    self.log_out(key, until);
                }
            }
            Mail::OthersGone { serial } => {
                if let Some(key) = self.by_serial.get(&serial).copied() {
                    self.with_channel(key, Channel::handle_others_gone);
                }
            }
            // Of a connection that is gone.
            Mail::TakeTurn { .. }
            | Mail::Detach { .. }
            | Mail::Lost { .. }
            | Mail::Parcel { .. } => {}
            Mail::TakeOver(TakeOver { to, .. }) => {
                self.post_mail(to.worker, Mail::Parcel { to, parcel: None });
            }
            Mail::Event { unit, attention } => {
                let keys: Vec<usize> = self.sessions.iter().map(|(k, _)| k).collect();
                for key in keys {
                    self.with_channel(key, |ch, cx| ch.handle_event(cx, unit, attention));
                }
            }
            Mail::Stage(stage, reply) => {
                // Whoever asked may have given up, and lets go of it then.
                let _ = reply.send(self.stage(*stage));
            }
            Mail::Unstage => self.unstage(),
            Mail::Changed => self.follow_catalog(),
            Mail::Shutdown { until } => self.begin_shutdown(until),
            Mail::Flush => self.begin_flush(),
            Mail::Exit => self.exiting = true,
            Mail::Snapshot(reply) => {
                // Whoever asked may have given up.
                let _ = reply.send(self.snapshot());
            }
            Mail::Ping(reply) => {
                let _ = reply.send(());
            }
            Mail::Listeners(reply) => {
                let _ = reply.send(self.iscsi.duplicate_listeners());
            }
        }
    }

    pub(super) fn poll_timers(&mut self) -> usize {
        let mut work = 0;
        while let Some(Reverse((at, serial))) = self.timers.peek().copied() {
            if at > self.now {
                break;
            }
            self.timers.pop();
            work += 1;
            if let Some(key) = self.by_serial.get(&serial).copied() {
                if self.sessions[key].armed.fire(at) {
                    self.with_channel(key, Channel::handle_timeout);
                }
            } else {
                self.on_iscsi_timer(serial, at);
                self.on_iser_timer(serial, at);
            }
            self.drain_dirty();
        }
        if self.lingering.iter().any(|(_, _, at)| *at <= self.now) {
            self.end_lingering(None);
        }
        work
    }

    /// Gives pool memory that has come back to the channels that wait for it, by turns; returns their
    /// number.
    pub(super) fn poll_pool(&mut self) -> usize {
        if !self.pool.take_change() {
            return 0;
        }
        let mut waiting = std::mem::take(&mut self.pool_line);
        waiting.extend(self.pool.waiting());
        for pool::Owner(serial) in &waiting {
            self.resume_waiting(*serial);
            self.drain_dirty();
        }
        let work = waiting.len();
        waiting.clear();
        self.pool_line = waiting;
        work
    }

    /// A channel may get the pool memory that its commands wait for.
    fn resume_waiting(&mut self, serial: u64) {
        match self.by_serial.get(&serial).copied() {
            Some(key) => self.with_channel(key, Channel::handle_pool),
            None => {
                self.resume_iscsi(serial);
                self.resume_iser(serial);
            }
        }
    }

    /// Moves a shutdown on.
    pub(super) fn poll_phase(&mut self) {
        let Phase::Stopping(until) = self.phase else {
            return;
        };
        if self.now >= until + GRACE {
            let keys: Vec<usize> = self.sessions.iter().map(|(k, _)| k).collect();
            for key in keys {
                self.with_channel(key, Channel::handle_disconnected);
            }
            self.end_iscsi();
            self.end_iser();
            self.drain_dirty();
        }
        // Goodbyes get their answers while there is time.
        let parting = !self.lingering.is_empty() && self.now < until;
        let is_empty = self.sessions.is_empty() && self.iscsi.is_empty() && self.isers.is_empty();
        if is_empty && !parting {
            self.phase = Phase::Quiet;
            let _ = self.reports.send(Report::Quiet(self.index));
        }
    }

    /// Makes durable what was written, on every backend.
    fn begin_flush(&mut self) {
        let mut flushing = Flushing {
            left: 0,
            failed: None,
        };
        for (store, id) in self.catalog.stores.iter().zip(&self.stores) {
            let (Some(store), Some(id)) = (store, *id) else {
                continue;
            };
            if store.geometry().read_only {
                continue;
            }
            let op = BlockOp::Flush {
                offset: 0,
                len: store.capacity(),
            };
            match self.driver.submit(&mut self.ring, id, op, &[], FLUSH) {
                Ok(()) => flushing.left += 1,
                Err(error) => flushing.failed = Some(error.to_string()),
            }
        }
        self.flushing = Some(flushing);
        self.check_flushed();
    }

    fn on_flushed(&mut self, result: StepResult) {
        if let Some(flushing) = &mut self.flushing {
            flushing.left -= 1;
            if let StepResult::Failed(error) = result {
                flushing.failed = Some(format!("{error:?}"));
            }
        }
        self.check_flushed();
    }

    fn check_flushed(&mut self) {
        if self.flushing.as_ref().is_some_and(|f| f.left == 0)
            && let Some(flushing) = self.flushing.take()
        {
            let result = flushing.failed.map_or(Ok(()), Err);
            let _ = self.reports.send(Report::Flushed(result));
        }
    }
}
