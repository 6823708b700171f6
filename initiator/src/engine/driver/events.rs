//! Events of the device and of sessions.

use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;
use riser_scsi::sense::Sense;
use riser_transport::verbs::{Completion, CqId, Provider, RdmaCm, Verbs};

use super::inputs::Input;
use super::multipath::PathsLink;
use super::{BATCH, Driver, SessionGuard};
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoData, ScsiIo};
use crate::engine::rdma::{Device, Owner};
use crate::engine::status::SessionStatus;
use crate::paths::PortTag;
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::session::SessionEvent;

/// Timeout for a ping, including retries and reconnects. A session without any response breaks the
/// connection earlier.
const PING: Duration = Duration::from_secs(60);

impl<E: Env> Driver<E> {
    /// Drives the device and handles its events; returns whether there were any.
    pub(super) fn run_device(&mut self, now: Instant) -> bool {
        let Some(device) = &mut self.device else {
            return false;
        };
        let mut worked = device.provider.progress(now) > 0;
        // All queues are polled in each round, so it does not matter which of them fired.
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
            for owner in device.affected_owners(event) {
                self.break_channel(owner, now);
            }
        }
        worked
    }

    /// Posts the requests of the round; returns whether this broke a connection.
    pub(super) fn flush_device(&mut self, now: Instant) -> bool {
        let broken = self.device.as_mut().map(Device::flush).unwrap_or_default();
        for owner in &broken {
            self.break_channel(*owner, now);
        }
        !broken.is_empty()
    }

    /// Handles the completions of all connections; returns whether there were any.
    pub(super) fn poll_completions(&mut self, now: Instant) -> bool {
        let (mut worked, mut at) = (false, 0);
        // A completion may close connections, so a queue may be skipped until the next round.
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
                // Completions in the same batch may have closed the connection.
                if self.device.as_ref().and_then(|d| d.cq_owner(cq)).is_some() {
                    self.break_channel(owner, now);
                }
                true
            }
        }
    }

    fn handle_completion(&mut self, completion: &Completion, now: Instant) {
        let owner = self.device.as_ref().and_then(|d| d.owner(completion.qp));
        // The queue pair may have been released since polling.
        if let Some(owner) = owner {
            self.with_link(owner.session, now, |link, cx| {
                link.handle_completion(owner.channel, completion, cx);
            });
        }
    }

    /// Called when the connection of a channel is broken; for iSER, the session's connection.
    fn break_channel(&mut self, owner: Owner, now: Instant) {
        self.with_link(owner.session, now, |link, _| {
            link.handle_broken(owner.channel, now);
        });
    }

    /// Pings a target with a command for the unit in use.
    pub(super) fn ping(&mut self, index: usize, now: Instant) {
        self.ping_within(index, PING, Done::Ping, now);
    }

    /// Sends a ping with this timeout.
    pub(super) fn ping_within(
        &mut self,
        index: usize,
        timeout: Duration,
        done: Done,
        now: Instant,
    ) {
        let session = &self.sessions[index];
        let watched = session.units.first_lun();
        let paths = session
            .paths
            .and_then(|(paths, _)| self.sessions.find(paths));
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

    /// Called when a request completes.
    pub(super) fn complete(
        &mut self,
        index: usize,
        request: RequestId,
        result: RequestResult,
        now: Instant,
    ) {
        let io = self.sessions[index].commands.remove(request);
        if self.is_unit_missing(index, &io, &result) && io.deadline > now {
            self.resubmit_after_check(index, io, now);
        } else {
            let result = self.sessions[index].track_command(&io, result);
            self.deliver(index, io, result);
        }
        self.sessions[index].report_pending();
    }

    /// Returns the status visible to the user of a session: the status of the paths if the session
    /// is a path.
    fn user_status(&self, index: usize) -> &SessionStatus {
        let paths = self.sessions[index].paths;
        let paths = paths.and_then(|(paths, _)| self.sessions.find(paths));
        &self.sessions[paths.unwrap_or(index)].status
    }

    /// Counts a message of the target about a completed command.
    fn note_stale(&mut self, index: usize) {
        if self.user_status(index).count_stale() == 1 {
            let target = self.sessions[index].link.target().dst;
            tracing::warn!(
                %target,
                "discarded a response to a command that was already completed or aborted"
            );
        }
    }

    /// Handles an event of a session: first for its units, then for its status, for the paths it
    /// belongs to, and for its user.
    pub(super) fn handle_event(&mut self, index: usize, event: SessionEvent, now: Instant) {
        self.observe(index, &event, now);
        match event {
            SessionEvent::Stale => self.note_stale(index),
            SessionEvent::UnitReset(lun) => self.note_reset(index, lun),
            SessionEvent::Live => {
                let port = self.sessions[index].link.port();
                if port.as_ref().is_some_and(PortTag::is_redirected) {
                    self.user_status(index).set_redirected();
                }
            }
            _ => {}
        }
        let session = &mut self.sessions[index];
        if let SessionEvent::Reconnecting(_) = event {
            session.status.set_pending(session.pending());
        }
        // A session with watched units is reported as live only when they are known to be
        // unchanged.
        if !session.units.is_unchecked() || !matches!(event, SessionEvent::Live) {
            session.status.on_event(&event, self.env.date());
        }
        if let Some((paths, path)) = session.paths {
            let time2wait = session.link.machine().time2wait();
            let input = match &event {
                SessionEvent::Live => Some(Input::Live(paths, path, session.link.port())),
                SessionEvent::Closed(why) => {
                    let last_received = session.link.machine().last_received();
                    Some(Input::Closed(paths, path, *why, last_received))
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
                    let key = self.sessions.key(index);
                    let mailbox = self.mailbox.clone();
                    reply.send(Ok(SessionGuard { key, mailbox }));
                }
            }
            SessionEvent::Closed(why) => {
                session.closed = true;
                if let Some(reply) = session.reply.take() {
                    reply.send(Err(why));
                }
                // The machine rejects them now.
                for io in session.commands.remove_waiting() {
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
                        Some(_) => tracing::warn!("no usable path, reconnecting: {why}{more}"),
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
