//! Requests: submission, starting, and completion.

use std::time::Instant;

use super::types::ConnState;
use super::{ChannelIndex, Output, SrpSession};
use crate::request::table::{AttemptOutcome, Request};
use crate::request::{DataLen, RequestError, RequestId, RequestSpec};
#[cfg(doc)]
use crate::srp::channel::InitiatorChannel;
use crate::srp::channel::{CommandData, CommandIu};

impl SrpSession {
    /// Returns the submitted request.
    ///
    /// # Panics
    /// Panics if there is no request with this ID.
    #[must_use]
    pub fn spec(&self, request: RequestId) -> &RequestSpec {
        &self.core.requests.at(request.0).spec
    }

    /// Starts requests while there is room.
    pub(super) fn pump(&mut self, now: Instant) {
        if !self.core.functions.may_start() {
            return;
        }
        while let (Some(index), Some(channel)) = (self.core.requests.next(), self.pick_channel()) {
            self.start_request(index, channel, now);
        }
    }

    /// Returns the live channel with the fewest commands and room for one more.
    pub(super) fn pick_channel(&self) -> Option<u8> {
        let open = self.members.iter().enumerate().filter(|(_, m)| {
            m.conn == ConnState::Established && !m.is_full && m.channel.can_start()
        });
        let (index, _) = open.min_by_key(|(_, m)| m.channel.outstanding())?;
        Some(index as u8)
    }

    pub(super) fn start_request(&mut self, index: u32, channel: u8, now: Instant) {
        let len = self.core.requests.at(index).spec.len;
        let member = &mut self.members[usize::from(channel)];
        let tag = member
            .channel
            .reserve(index, len)
            .expect("the channel has room");
        let immediate = match (len, member.channel.agreed().and_then(|a| a.immediate)) {
            (DataLen::Out(len @ 1..), Some(immediate)) => {
                // Call this for long writes, too, because they are included in the number of
                // outstanding writes.
                let carries_data = member.writes.carries_data(member.channel.writes());
                carries_data && len <= immediate.max_len
            }
            _ => false,
        };
        let until = self.core.requests.start_attempt(index, channel, tag, now);
        self.core.arm(until);
        self.core.outputs.push_back(Output::Start {
            request: RequestId(index),
            channel: ChannelIndex(channel),
            immediate,
        });
    }

    /// Encodes the command of a started request and returns the length of its header. Returns
    /// `None` if the request must not be sent anymore, because its attempt has finished.
    ///
    /// # Panics
    /// See [`InitiatorChannel::emit_command`].
    pub fn emit_command(
        &self,
        request: RequestId,
        data: CommandData<'_>,
        out: &mut [u8],
    ) -> Option<usize> {
        let request = self.core.requests.find(request.0)?;
        let (channel, tag) = request.place()?;
        let command = CommandIu {
            lun: request.spec.lun,
            attr: request.spec.attr,
            cdb: &request.spec.cdb,
            len: request.spec.len,
            data,
        };
        let channel = &self.members[usize::from(channel)].channel;
        Some(channel.emit_command(tag, &command, out))
    }

    /// Called when a request can never be started; nothing was sent.
    pub fn handle_start_failed(&mut self, request: RequestId, why: &'static str, now: Instant) {
        let place = self.core.requests.find(request.0).and_then(Request::place);
        if let Some((channel, tag)) = place {
            self.members[usize::from(channel)].channel.cancel(tag);
            self.core
                .complete(request.0, Err(RequestError::NotStarted(why)));
            self.pump(now);
        }
    }

    /// Called when the channel's connection has no room for a command; nothing was sent. The
    /// request returns to the queue, and the channel starts no request until the memory of another
    /// command is retired. It must not wait after the queue, because its abort or a reset would
    /// overtake it.
    pub fn handle_no_room(&mut self, request: RequestId, now: Instant) {
        let place = self.core.requests.find(request.0).and_then(Request::place);
        let Some((channel, tag)) = place else {
            return;
        };
        let member = &mut self.members[usize::from(channel)];
        member.channel.cancel(tag);
        member.is_full = member.channel.outstanding() > 0;
        let deadline = self.core.requests.at(request.0).spec.deadline;
        if !member.is_full {
            let why = "the connection has no space for the buffer";
            self.core
                .complete(request.0, Err(RequestError::NotStarted(why)));
        } else if deadline <= now {
            self.core.complete(request.0, Err(RequestError::TimedOut));
        } else {
            self.core.requests.requeue_unsent(request.0);
            self.core.arm(deadline);
        }
        self.pump(now);
    }

    /// Called when the target can no longer access the memory of a request's last attempt.
    pub fn handle_retired(&mut self, request: RequestId, now: Instant) {
        if let Some(end) = self.core.requests.retiring(request.0) {
            if let Some((channel, tag)) = self.core.requests.retiring_place(request.0) {
                let member = &mut self.members[usize::from(channel)];
                member.channel.retire(tag);
                member.is_full = false;
            }
            self.core.finish_attempt(request.0, end, now);
            self.pump(now);
        }
    }

    /// Resumes all commands, once the unit is known and the commands of old connections have
    /// completed.
    pub(super) fn release_settled(&mut self, now: Instant) {
        if self.core.release_settled(now) {
            self.has_moved = false;
            self.pump(now);
        }
    }

    /// Retires the memory of a completed attempt.
    pub(super) fn retire_attempt(
        &mut self,
        index: u32,
        channel: u8,
        end: AttemptOutcome,
        now: Instant,
    ) {
        let until = self.core.requests.retire_attempt(index, channel, end, now);
        self.core.arm(until);
        self.core.outputs.push_back(Output::Retire {
            request: RequestId(index),
            channel: ChannelIndex(channel),
        });
    }
}
