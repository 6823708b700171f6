//! Events of the device, and of sessions.

use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;
use riser_scsi::sense::Sense;
use riser_transport::verbs::{AsyncEvent, Completion, CqId, Provider, RdmaCm, Verbs};

use super::inputs::Input;
use super::multipath::PathsLink;
use super::units::Watched;
use super::{BATCH, Driver, SessionGuard};
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoData, ScsiIo};
use crate::engine::rdma::{Device, Owner};
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::session::SessionEvent;

/// Longest duration of a ping, repetitions and reconnections included. A session that gets no
/// answer at all ends the connection before.
const PING: Duration = Duration::from_secs(60);

impl<E: Env> Driver<E> {
    /// Drives the device, and handles its events; whether there were any.
    pub(super) fn run_device(&mut self, now: Instant) -> bool {
        let Some(device) = &mut self.device else {
            return false;
        };
        let mut worked = device.provider.progress(now) > 0;
        // Every queue is polled in each round, so which of them has fired is of no interest.
        while device.provider.poll_cq_event().is_some() {}
        while let Some(device) = &mut self.device
            && let Some(event) = device.provider.poll_cm_event()
        {
            worked = true;
            if let Some(owner) = device.route(&event) {
                self.with_link(owner.session, now, |link, cx| {
                    link.handle_cm_event(owner.channel, event.kind, cx);
                });
            }
        }
        while let Some(device) = &mut self.device
            && let Some(event) = device.provider.poll_async_event()
        {
            worked = true;
            self.handle_async_event(event, now);
        }
        worked
    }

    /// Posts what the round asks of the device; whether a connection has ended with that.
    pub(super) fn flush_device(&mut self, now: Instant) -> bool {
        let broken = self.device.as_mut().map(Device::flush).unwrap_or_default();
        for owner in &broken {
            self.break_channel(*owner, now);
        }
        !broken.is_empty()
    }

    /// Handles the completions of every connection; whether there were any.
    pub(super) fn poll_completions(&mut self, now: Instant) -> bool {
        let (mut worked, mut at) = (false, 0);
        // What completes may end connections, so one may be left to the next round.
        while let Some(device) = &self.device
            && let Some(&(cq, owner)) = device.cqs().get(at)
        {
            worked |= self.poll_cq(cq, owner, now);
            at += 1;
        }
        worked
    }

    fn poll_cq(&mut self, cq: CqId, owner: Owner, now: Instant) -> bool {
        let Some(device) = &mut self.device else {
            return false;
        };
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = device.provider.poll_cq(cq, BATCH, &mut completions);
        for completion in completions.drain(..) {
            self.handle_completion(&completion, now);
        }
        self.completions = completions;
        match polled {
            Ok(n) => n > 0,
            Err(_) => {
                // Completions of the same batch may have ended the connection.
                if self.device.as_ref().and_then(|d| d.cq_owner(cq)).is_some() {
                    self.break_channel(owner, now);
                }
                true
            }
        }
    }

    fn handle_completion(&mut self, completion: &Completion, now: Instant) {
        let owner = self.device.as_ref().and_then(|d| d.owner(completion.qp));
        // It may have been released since they were polled.
        if let Some(owner) = owner {
            self.with_link(owner.session, now, |link, cx| {
                link.handle_completion(owner.channel, completion, cx);
            });
        }
    }

    /// A channel's connection is broken; of iSER, the session's.
    fn break_channel(&mut self, owner: Owner, now: Instant) {
        self.with_link(owner.session, now, |link, _| {
            link.handle_broken(owner.channel, now);
        });
    }

    fn handle_async_event(&mut self, event: AsyncEvent, now: Instant) {
        match event {
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => {
                if let Some(owner) = self.device.as_ref().and_then(|d| d.owner(qp)) {
                    self.break_channel(owner, now);
                }
            }
            AsyncEvent::CqError(cq) => {
                if let Some(owner) = self.device.as_ref().and_then(|d| d.cq_owner(cq)) {
                    self.break_channel(owner, now);
                }
            }
            AsyncEvent::DeviceFatal => {
                let cqs = self.device.iter().flat_map(Device::cqs);
                let all: Vec<Owner> = cqs.map(|(_, owner)| *owner).collect();
                for owner in all {
                    self.break_channel(owner, now);
                }
            }
            _ => {}
        }
    }

    /// Asks a target whether it is there, by way of the unit that is used.
    pub(super) fn ping(&mut self, index: usize, now: Instant) {
        self.ping_within(index, PING, Done::Ping, now);
    }

    /// Sends a ping that ends after this time at the latest.
    pub(super) fn ping_within(
        &mut self,
        index: usize,
        timeout: Duration,
        done: Done,
        now: Instant,
    ) {
        let session = &self.sessions[index];
        let watched = session.units.first().map(Watched::lun);
        let paths = session.paths.and_then(|(paths, _)| self.find(paths));
        let of_paths = paths.and_then(|paths| self.sessions[paths].link.paths());
        let lun = watched.or(of_paths.map(PathsLink::lun));
        let lun = lun.unwrap_or(LunId::new(0).expect("a number"));
        let io = ScsiIo::new(lun, Command::test_unit_ready(), IoData::None, timeout);
        let io = ScsiIo {
            retry: Retry::Probe,
            ..io
        };
        self.submit(index, Io::new(io, done, now), now);
    }

    /// A request is over.
    pub(super) fn complete(
        &mut self,
        index: usize,
        request: RequestId,
        result: RequestResult,
        now: Instant,
    ) {
        let io = self.sessions[index].ios[request.0 as usize].take();
        let io = io.expect("every request has its command");
        if self.is_unit_missing(index, &io, &result) && io.deadline > now {
            self.resubmit_after_check(index, io, now);
        } else {
            let result = self.sessions[index].account(&io, result);
            self.deliver(index, io, result);
        }
        self.refill(index, now);
        self.sessions[index].report_pending();
    }

    /// Submits commands that had no room before, as far as there is some. Of several commands that
    /// are over at once, or one that is over as soon as it begins, the first call sees to the room
    /// of all.
    fn refill(&mut self, index: usize, now: Instant) {
        if std::mem::replace(&mut self.sessions[index].is_refilling, true) {
            return;
        }
        while let Some(mut io) = self.sessions[index].overflow.pop_front() {
            self.sessions[index].mark_flush(&mut io);
            if let Some(io) = self.begin(index, io, now) {
                self.sessions[index].overflow.push_front(io);
                break;
            }
        }
        self.sessions[index].is_refilling = false;
    }

    /// Counts what a target has sent about a command that had ended, in the status that a user has:
    /// that of the paths, for a session that is one of them.
    fn note_stale(&mut self, index: usize) {
        let session = &self.sessions[index];
        let paths = session.paths.and_then(|(paths, _)| self.find(paths));
        let status = &self.sessions[paths.unwrap_or(index)].status;
        if status.count_stale() == 1 {
            let target = session.link.target().dst;
            tracing::warn!(%target, "the target answered a command that had already completed or been aborted; the answer was discarded");
        }
    }

    /// Handles an event of a session: for its units first, then for its status, for the paths that
    /// it is one of, and for its user.
    pub(super) fn handle_event(&mut self, index: usize, event: SessionEvent, now: Instant) {
        self.observe(index, &event, now);
        match event {
            SessionEvent::Stale => self.note_stale(index),
            SessionEvent::UnitReset(lun) => self.note_reset(index, lun),
            _ => {}
        }
        let session = &mut self.sessions[index];
        if let SessionEvent::Reconnecting(_) = event {
            session.status.set_pending(session.pending());
        }
        // A session with watched units is reported live when they are known to be the same.
        if !session.is_unchecked || !matches!(event, SessionEvent::Live) {
            session.status.on_event(&event, self.env.date());
        }
        if let Some((paths, path)) = session.paths {
            let time2wait = session.link.machine().time2wait();
            let input = match &event {
                SessionEvent::Live => Some(Input::Live(paths, path, session.link.port())),
                SessionEvent::Closed(why) => {
                    let heard = session.link.machine().last_heard();
                    Some(Input::Closed(paths, path, *why, heard))
                }
                SessionEvent::UnitEvent {
                    lun,
                    sense,
                    is_own_reset,
                } => Sense::parse(sense).map(|sense| match sense.is_deferred {
                    true => Input::Deferred(paths, *lun, sense),
                    false => Input::Attention(paths, path, sense.additional, *is_own_reset),
                }),
                SessionEvent::Reconnecting(_)
                | SessionEvent::UnitReset(_)
                | SessionEvent::Stale => None,
            };
            self.inputs.extend(input);
            if let SessionEvent::Closed(_) = event {
                self.set_time2wait(paths, path, time2wait);
            }
        }
        let session = &mut self.sessions[index];
        match event {
            SessionEvent::Live => {
                if let Some(reply) = session.reply.take() {
                    let key = self.key(index);
                    let mailbox = self.mailbox.clone();
                    reply.send(Ok(SessionGuard { key, mailbox }));
                }
            }
            SessionEvent::Closed(why) => {
                session.closed = true;
                if let Some(reply) = session.reply.take() {
                    reply.send(Err(why));
                }
                // The machine refuses them now.
                for io in std::mem::take(&mut session.overflow) {
                    self.submit(index, io, now);
                }
            }
            SessionEvent::Reconnecting(why) => {
                if let Some(held) = session.outages.admit(now) {
                    let more = match held {
                        0 => String::new(),
                        n => format!(" ({n} more since the last report)"),
                    };
                    match session.link.paths() {
                        Some(_) => tracing::warn!("no path is left, reconnecting: {why}{more}"),
                        None => {
                            let target = session.link.target().dst;
                            tracing::warn!(%target, "reconnecting: {why}{more}");
                        }
                    }
                }
            }
            SessionEvent::UnitEvent { .. } | SessionEvent::UnitReset(_) | SessionEvent::Stale => {}
        }
    }
}
