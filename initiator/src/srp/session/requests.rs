//! Requests: taken, started, ended.

use std::time::Instant;

use super::types::Link;
use super::{ChannelIndex, Output, Session, SessionState, SubmitError};
#[cfg(doc)]
use crate::srp::channel::InitiatorChannel;
use crate::srp::channel::{CommandData, CommandIu, DataLen};
use crate::srp::request::{
    AttemptEnd, Request, RequestError, RequestId, RequestResult, RequestSpec, RequestState, Retry,
    Verdict, plan_verdict,
};

impl Session {
    /// Takes a request.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was taken.
    pub fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        if self.is_ending() {
            return Err(SubmitError::Closed);
        }
        if self.requests.len() >= self.config.max_requests {
            return Err(SubmitError::Full);
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        let index = self.requests.insert(Request {
            spec,
            seq,
            attempts: 0,
            replayed: false,
            state: RequestState::Queued,
        }) as u32;
        self.queue.push_back(index);
        self.arm(spec.deadline);
        self.pump(now);
        Ok(RequestId(index))
    }

    pub(super) fn is_ending(&self) -> bool {
        matches!(
            self.state,
            SessionState::Closed | SessionState::TearingDown { last: true, .. }
        )
    }

    pub(super) fn request(&self, index: u32) -> &Request {
        &self.requests[index as usize]
    }

    pub(super) fn request_mut(&mut self, index: u32) -> &mut Request {
        &mut self.requests[index as usize]
    }

    /// The request that has been submitted.
    ///
    /// # Panics
    /// If there is none of that id.
    #[must_use]
    pub fn spec(&self, request: RequestId) -> &RequestSpec {
        &self.request(request.0).spec
    }

    /// Starts what can be started.
    pub(super) fn pump(&mut self, now: Instant) {
        while let Some(&index) = self.queue.front() {
            let Some(channel) = self.pick_channel() else {
                return;
            };
            if self.replays > 0 && self.must_wait(index) {
                return;
            }
            self.queue.pop_front();
            self.start(index, channel, now);
        }
    }

    /// The live channel with the fewest commands that has room for one more.
    pub(super) fn pick_channel(&self) -> Option<u8> {
        let open = self
            .members
            .iter()
            .enumerate()
            .filter(|(_, m)| m.link == Link::Up && m.channel.can_start());
        let (index, _) = open.min_by_key(|(_, m)| m.channel.outstanding())?;
        Some(index as u8)
    }

    /// Whether an earlier request with an overlapping effect is outstanding.
    pub(super) fn must_wait(&self, index: u32) -> bool {
        let request = self.request(index);
        let effect = request.spec.effect;
        self.requests.iter().any(|(_, other)| {
            other.seq < request.seq
                && other.spec.lun == request.spec.lun
                && other.state != RequestState::Queued
                && effect.conflicts(other.spec.effect)
        })
    }

    pub(super) fn start(&mut self, index: u32, channel: u8, now: Instant) {
        let until = now + self.config.timing.attempt;
        let len = self.request(index).spec.len;
        let member = &mut self.members[usize::from(channel)];
        let tag = member
            .channel
            .reserve(index, len)
            .expect("the channel has room");
        let immediate = match (len, member.channel.agreed().and_then(|a| a.immediate)) {
            (DataLen::Out(len), Some(immediate)) => len > 0 && len <= immediate.max_len,
            _ => false,
        };
        let request = self.request_mut(index);
        request.attempts = request.attempts.saturating_add(1);
        request.state = RequestState::Started {
            channel,
            tag,
            until,
        };
        self.arm(until);
        self.outputs.push_back(Output::Start {
            request: RequestId(index),
            channel: ChannelIndex(channel),
            immediate,
        });
    }

    /// Writes the command of a started request and returns its header's length; `None` where the
    /// request is no longer to be sent, because its attempt has been given up meanwhile.
    ///
    /// # Panics
    /// As [`InitiatorChannel::emit_command`].
    pub fn emit_command(
        &self,
        request: RequestId,
        data: CommandData<'_>,
        out: &mut [u8],
    ) -> Option<usize> {
        let request = self.requests.get(request.0 as usize)?;
        let (RequestState::Started { channel, tag, .. } | RequestState::Aborting { channel, tag }) =
            request.state
        else {
            return None;
        };
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

    /// A request cannot be started, for good; nothing of it was sent.
    pub fn handle_start_failed(&mut self, request: RequestId, why: &'static str, now: Instant) {
        let state = self.requests.get(request.0 as usize).map(|r| &r.state);
        if let Some(
            &(RequestState::Started { channel, tag, .. } | RequestState::Aborting { channel, tag }),
        ) = state
        {
            self.members[usize::from(channel)].channel.cancel(tag);
            self.complete(request.0, Err(RequestError::NotStarted(why)));
            self.pump(now);
        }
    }

    /// The target can no longer reach the memory of a request's last attempt.
    pub fn handle_retired(&mut self, request: RequestId, now: Instant) {
        let Some(found) = self.requests.get_mut(request.0 as usize) else {
            return;
        };
        if let RequestState::Retiring { end, .. } = &found.state {
            let end = end.clone();
            self.settle(request.0, end, now);
            self.pump(now);
        }
    }

    /// Ends an attempt: its memory is to be taken back.
    pub(super) fn end_attempt(&mut self, index: u32, channel: u8, end: AttemptEnd) {
        self.request_mut(index).state = RequestState::Retiring { channel, end };
        self.outputs.push_back(Output::Retire {
            request: RequestId(index),
            channel: ChannelIndex(channel),
        });
    }

    /// Decides what becomes of a request whose attempt is over.
    pub(super) fn settle(&mut self, index: u32, end: AttemptEnd, now: Instant) {
        let max_attempts = self.config.max_attempts;
        let ending = self.is_ending();
        let request = self.request_mut(index);
        let in_time = now < request.spec.deadline;
        let may_repeat = request.attempts < max_attempts && in_time && !ending;
        match end {
            AttemptEnd::Answered(answer) => {
                let verdict = match request.spec.retry {
                    Retry::Standard if may_repeat => plan_verdict(&answer),
                    _ => Verdict::Report,
                };
                match verdict {
                    Verdict::Report => self.complete(index, Ok(answer)),
                    Verdict::Again => self.enqueue(index),
                    Verdict::Later => self.back_off(index, now),
                }
            }
            AttemptEnd::Refused(code) => self.complete(index, Err(RequestError::Refused(code))),
            AttemptEnd::Aborted => {
                if may_repeat && request.spec.effect.is_replayable() {
                    self.enqueue(index);
                } else {
                    self.complete(index, Err(RequestError::TimedOut));
                }
            }
            AttemptEnd::Lost if ending => self.complete(index, Err(RequestError::Closed)),
            AttemptEnd::Lost if !in_time => self.complete(index, Err(RequestError::TimedOut)),
            AttemptEnd::Lost => {
                if may_repeat && request.spec.effect.is_replayable() {
                    if !request.replayed {
                        request.replayed = true;
                        self.replays += 1;
                    }
                    self.enqueue(index);
                } else {
                    self.complete(index, Err(RequestError::ConnectionLost));
                }
            }
        }
    }

    /// Queues a request again, in the order of submission.
    pub(super) fn enqueue(&mut self, index: u32) {
        self.request_mut(index).state = RequestState::Queued;
        let seq = self.request(index).seq;
        let at = self
            .queue
            .partition_point(|&other| self.request(other).seq < seq);
        self.queue.insert(at, index);
    }

    pub(super) fn back_off(&mut self, index: u32, now: Instant) {
        let busy = self.config.timing.busy;
        let request = self.request_mut(index);
        let doublings = u32::from(request.attempts.saturating_sub(1)).min(7);
        let until = (now + busy * (1 << doublings)).min(request.spec.deadline);
        request.state = RequestState::Backoff { until };
        self.arm(until);
    }

    pub(super) fn complete(&mut self, index: u32, result: RequestResult) {
        let request = self.requests.remove(index as usize);
        if request.replayed {
            self.replays -= 1;
        }
        self.outputs
            .push_back(Output::Complete(RequestId(index), result));
    }
}
