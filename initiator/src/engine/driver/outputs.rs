//! What sessions ask for.

use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;
use riser_scsi::sense::Sense;
use riser_transport::verbs::Provider;

use super::link::{Link, srp};
use super::paths::Input;
use super::units::Watched;
use super::{CLOSING_PATIENCE, Driver, SessionGuard, SessionKey, new_io};
use crate::engine::conn::{Start, StartArgs};
use crate::engine::io::{Done, IoData, ScsiIo};
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::session::SessionEvent;
use crate::srp::session::{ChannelIndex, Output};

/// How long a ping may take, repetitions and reconnections included. A session that gets no answer at all
/// ends the connection before.
const PING: Duration = Duration::from_secs(60);

impl<P: Provider> Driver<P> {
    /// Carries out a session's outputs until there are none.
    pub(super) fn drain(&mut self, index: usize, now: Instant) {
        match self.sessions[index].link {
            Link::Srp(_) => self.drain_srp(index, now),
            Link::Tcp(_) => self.drain_tcp(index, now),
            Link::Iser(_) => self.drain_iser(index, now),
            Link::Paths(_) => self.drain_paths(index, now),
        }
    }

    fn drain_srp(&mut self, index: usize, now: Instant) {
        while let Some(output) = srp(&mut self.sessions, index).machine.poll_output() {
            match output {
                Output::Connect(channel) => self.resolve(index, channel, now),
                Output::Start {
                    request,
                    channel,
                    immediate,
                } => self.start(index, channel, request, immediate, now),
                Output::Retire { request, channel } => {
                    self.retire(index, channel, request, now);
                }
                Output::SendTskMgmt(channel, iu) => {
                    let session = srp(&mut self.sessions, index);
                    let conn = session.conns[usize::from(channel.0)].as_mut();
                    if !conn.is_some_and(|c| c.post_tsk_mgmt(&mut self.provider, &iu)) {
                        session.machine.handle_channel_error(channel, now);
                    }
                }
                Output::Ping => self.ping(index, now),
                Output::Answer(channel, iu) => self.answer(index, channel, &iu, now),
                Output::Disconnect(channel, logout) => {
                    self.begin_tear_down(index, channel, logout.as_ref().map(|l| &l[..]), now);
                }
                Output::Complete(request, result) => self.complete(index, request, result, now),
                Output::Event(event) => self.handle_event(index, event, now),
            }
        }
    }

    /// Asks a target whether it is there, by way of the unit that is used.
    fn ping(&mut self, index: usize, now: Instant) {
        let session = &self.sessions[index];
        let watched = session.units.first().map(Watched::lun);
        let paths = session.paths.and_then(|(paths, _)| self.find(paths));
        let of_paths = paths.and_then(|paths| match &self.sessions[paths].link {
            Link::Paths(link) => Some(link.lun()),
            _ => None,
        });
        let lun = watched.or(of_paths);
        let lun = lun.unwrap_or(LunId::new(0).expect("a number"));
        let io = ScsiIo::new(lun, Command::test_unit_ready(), IoData::None, PING);
        let io = ScsiIo {
            retry: Retry::Probe,
            ..io
        };
        self.submit(index, new_io(io, Done::Ping, now), now);
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
        let result = self.sessions[index].account(&io, result);
        self.deliver(index, io, result);
        self.refill(index, now);
        self.sessions[index].report_pending();
    }

    /// Submits commands that had no room before.
    pub(super) fn refill(&mut self, index: usize, now: Instant) {
        let session = &mut self.sessions[index];
        if let Some(io) = session.overflow.pop_front() {
            let rest = std::mem::take(&mut session.overflow);
            self.submit(index, io, now);
            // If it was put back, it goes before the rest.
            let session = &mut self.sessions[index];
            session.overflow.extend(rest);
        }
    }

    fn start(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
        now: Instant,
    ) {
        let outcome = self.try_start(index, channel, request, immediate);
        let machine = &mut srp(&mut self.sessions, index).machine;
        match outcome {
            Start::Sent | Start::Dropped => {}
            Start::Starved => machine.handle_no_room(request, now),
            Start::Impossible(why) => machine.handle_start_failed(request, why, now),
            Start::Broken => machine.handle_channel_error(channel, now),
        }
    }

    fn try_start(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
    ) -> Start {
        let running = &mut self.sessions[index];
        let io = running.ios.get(request.0 as usize).and_then(Option::as_ref);
        let Link::Srp(session) = &mut running.link else {
            return Start::Dropped;
        };
        let (Some(io), Some(conn)) = (io, session.conns[usize::from(channel.0)].as_mut()) else {
            return Start::Dropped;
        };
        io.io.data.slices(&mut self.scratch.slices);
        let args = StartArgs {
            session: &session.machine,
            channel,
            request,
            immediate,
            keys: &session.keys,
        };
        conn.start(&mut self.provider, &args, &mut self.scratch)
    }

    pub(super) fn retire(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        now: Instant,
    ) {
        let session = srp(&mut self.sessions, index);
        // Without a connection, its end tells the session.
        let Some(conn) = session.conns[usize::from(channel.0)].as_mut() else {
            return;
        };
        match conn.retire(&mut self.provider, request) {
            Some(true) => session.machine.handle_retired(request, now),
            Some(false) => {}
            None => session.machine.handle_channel_error(channel, now),
        }
    }

    pub(super) fn answer(&mut self, index: usize, channel: ChannelIndex, iu: &[u8], now: Instant) {
        let session = srp(&mut self.sessions, index);
        let (Some((from, slot)), Some(conn)) = (
            session.receiving.take(),
            session.conns[usize::from(channel.0)].as_mut(),
        ) else {
            return;
        };
        debug_assert_eq!(from, channel);
        if !conn.post_answer(&mut self.provider, slot, iu) {
            session.machine.handle_channel_error(channel, now);
        }
    }

    /// Closes a channel once its logout has been sent, or the answer to its request for a connection is
    /// here: a peer that has answered a request and hears that it is withdrawn may keep what it has made
    /// for it, as Linux's `ib_srpt` does until its port goes.
    pub(super) fn begin_tear_down(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        logout: Option<&[u8]>,
        now: Instant,
    ) {
        let session = srp(&mut self.sessions, index);
        if let Some(conn) = session.conns[usize::from(channel.0)].as_mut()
            && (conn.is_connecting
                || logout.is_some_and(|iu| conn.post_logout(&mut self.provider, iu)))
        {
            conn.closing_until = Some(now + CLOSING_PATIENCE);
            return;
        }
        self.release(index, channel, true, now);
        srp(&mut self.sessions, index)
            .machine
            .handle_channel_gone(channel, now);
    }

    pub(super) fn handle_event(&mut self, index: usize, event: SessionEvent, now: Instant) {
        self.observe(index, &event, now);
        let session = &mut self.sessions[index];
        if let SessionEvent::Reconnecting(_) = event {
            session.status.set_pending(session.pending());
        }
        if !session.is_unchecked || !matches!(event, SessionEvent::Live) {
            session.status.on_event(&event);
        }
        if let Some((paths, path)) = session.paths {
            match &event {
                SessionEvent::Live => {
                    let port = session.link.port();
                    self.inputs.push_back(Input::Live(paths, path, port));
                }
                SessionEvent::Closed(why) => {
                    let heard = session.link.last_heard();
                    self.inputs
                        .push_back(Input::Closed(paths, path, *why, heard));
                }
                SessionEvent::UnitEvent { sense, .. } => {
                    if let Some(sense) = Sense::parse(sense) {
                        let attention = sense.additional;
                        self.inputs
                            .push_back(Input::Attention(paths, path, attention));
                    }
                }
                SessionEvent::Reconnecting(_) => {}
            }
        }
        match event {
            SessionEvent::Live => {
                let key = SessionKey {
                    index,
                    serial: session.serial,
                };
                if let Some(reply) = session.reply.take() {
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
                tracing::warn!(target = %session.link.target().dst, "reconnecting: {why}");
            }
            SessionEvent::UnitEvent { .. } => {}
        }
    }
}
