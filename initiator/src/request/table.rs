//! Requests of a session: accepted, queued, started, completed, retried.
//!
//! [`Requests`] only makes decisions; its session handles channels and reports to its owner. `T`
//! identifies a started request at the target: a tag.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;
use riser_scsi::opcode::{Kind, Opcode};
use riser_state::{State, become_state};
use slab::Slab;

use super::{
    CommandResponse, DataLen, Effect, GOOD, RequestError, RequestId, RequestResult, RequestSpec,
    Retry, TASK_ABORTED, Verdict, plan_verdict,
};

/// Maximum number of retries for a request that fails without a SCSI reason, as on Linux
/// (`SD_MAX_RETRIES`).
const RETRIES: u8 = 5;

/// Result of a single attempt at a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttemptOutcome {
    Responded(CommandResponse),
    /// The target rejected the request itself.
    Refused(RequestError),
    /// The target failed to execute the request, for a reason unrelated to the request.
    Failed(RequestError),
    /// Aborted by task management.
    Aborted,
    Lost,
}

/// State of a request. It may complete in any state.
///
/// ```text
///            ┌────────────── Backoff ←──────────┐
///            ↓                                  │ the target is busy
/// submit → Queued → Started ────────────→ Retiring
///            ↑ ↑       │ └──→ Aborting ──────↑  │
///            │ └───────┴─────────┘ not sent,    │
///            │                     or lost      │
///            └──────────────────────────────────┘ again, at once
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestState<T> {
    /// Waiting for a channel with room.
    Queued,
    /// Sent, and waiting for the response until this time.
    Started { channel: u8, tag: T, until: Instant },
    /// Timed out; task management must abort it.
    Aborting { channel: u8, tag: T },
    /// The attempt has finished. Its memory must be retired by the connection until this time.
    Retiring {
        channel: u8,
        tag: Option<T>,
        end: AttemptOutcome,
        until: Instant,
    },
    /// Waiting before it is queued again.
    Backoff { until: Instant },
}

impl<T: Debug> State for RequestState<T> {
    fn may_become(&self, next: &Self) -> bool {
        use RequestState::{Aborting, Backoff, Queued, Retiring, Started};
        match self {
            Queued => matches!(next, Started { .. }),
            Started { .. } => matches!(next, Queued | Aborting { .. } | Retiring { .. }),
            Aborting { .. } => matches!(next, Queued | Retiring { .. }),
            Retiring { .. } => matches!(next, Queued | Backoff { .. }),
            Backoff { .. } => matches!(next, Queued),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Request<T> {
    pub(crate) spec: RequestSpec,
    /// Order of submission; also distinguishes a request from a later one with the same index.
    pub(crate) seq: u64,
    /// Number of attempts started, except attempts for which the target requested a wait.
    pub(crate) attempts: u8,
    /// Number of waits.
    waits: u8,
    /// Number of the last attempt in the order of all attempts of the session.
    started: u64,
    /// An attempt was lost with its connection or aborted by task management.
    pub(crate) replayed: bool,
    pub(crate) state: RequestState<T>,
}

impl<T: Copy> Request<T> {
    /// Returns whether a successful READ returned too few blocks. Parameter data may be shorter
    /// than its allocation length.
    fn is_short(&self, response: &CommandResponse) -> bool {
        match (self.spec.effect, self.spec.len) {
            (Effect::Read { .. }, DataLen::In(len)) => {
                response.status == GOOD
                    && response.transferred < len
                    && Opcode::of(self.spec.cdb.as_bytes()).kind == Kind::Read
            }
            _ => false,
        }
    }

    /// Identifies the current attempt; `index` is the request's index.
    pub(crate) fn late(&self, index: u32) -> Late {
        Late {
            seq: self.seq,
            index,
            started: self.started,
        }
    }

    /// Returns the channel and tag while the target has the request.
    pub(crate) fn place(&self) -> Option<(u8, T)> {
        match self.state {
            RequestState::Started { channel, tag, .. }
            | RequestState::Aborting { channel, tag } => Some((channel, tag)),
            _ => None,
        }
    }

    /// Restarts the timeout of an attempt that made progress. `attempt` is the timeout of an attempt.
    fn extend_timeout(&mut self, attempt: Duration, now: Instant) {
        let again = now + attempt;
        let last = self.spec.deadline + attempt;
        match &mut self.state {
            RequestState::Started { until, .. } => *until = again,
            RequestState::Retiring { until, .. } => *until = again.min(last.max(*until)),
            _ => {}
        }
    }
}

/// Result for a request whose attempt has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    /// Complete the request with this result.
    Over(RequestResult),
    /// The request was queued again.
    Queued,
    /// The request waits until this time.
    Later(Instant),
}

/// Limits for a session's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Maximum number of accepted, incomplete requests.
    pub(crate) requests: usize,
    /// Maximum number of attempts per request.
    pub(crate) attempts: u8,
    /// Timeout for the response to an attempt, and then for retiring its memory.
    pub(crate) attempt: Duration,
    /// Timeout for an abort after the request's deadline.
    pub(crate) abort: Duration,
    /// Delay before a retry if the target is busy; doubles with each attempt.
    pub(crate) busy: Duration,
}

/// A timed-out attempt. Attempts are handled in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Late {
    pub(crate) seq: u64,
    pub(crate) index: u32,
    /// Number of the attempt: the result of an earlier attempt does not apply to the current one.
    started: u64,
}

/// See the documentation of the module.
#[derive(Debug)]
pub(crate) struct Requests<T> {
    limits: Limits,
    slab: Slab<Request<T>>,
    /// Requests in state Queued, in order of submission. Bound: `limits.requests`.
    queue: VecDeque<u32>,
    /// Probes in state Queued, which are started first, in order of submission.
    probes: VecDeque<u32>,
    next_seq: u64,
    starts: u64,
    /// Only start commands that identify the unit.
    is_held: bool,
    /// Number of requests that may have been executed before. If this is not 0, the order of
    /// requests matters.
    replays: usize,
}

impl<T: Copy + Debug + PartialEq> Requests<T> {
    /// # Panics
    /// Panics if the maximum number of requests or attempts is 0.
    pub(crate) fn new(limits: Limits) -> Self {
        assert!(limits.requests > 0 && limits.attempts > 0);
        Self {
            limits,
            slab: Slab::with_capacity(limits.requests),
            queue: VecDeque::with_capacity(limits.requests),
            probes: VecDeque::new(),
            next_seq: 0,
            starts: 0,
            is_held: false,
            replays: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(crate) fn has_probe(&self) -> bool {
        let mut all = self.slab.iter();
        all.any(|(_, request)| request.spec.retry == Retry::Probe)
    }

    /// Returns whether any request modifies the unit.
    pub(crate) fn has_change(&self) -> bool {
        let mut all = self.slab.iter();
        all.any(|(_, request)| request.spec.effect.is_change())
    }

    pub(crate) fn find(&self, index: u32) -> Option<&Request<T>> {
        self.slab.get(index as usize)
    }

    pub(crate) fn at(&self, index: u32) -> &Request<T> {
        &self.slab[index as usize]
    }

    /// Queues a request; returns `None` if there is no room. Probes are always accepted: while
    /// requests are held, no room becomes free until the probe completes. The session limits the
    /// number of probes.
    pub(crate) fn insert(&mut self, spec: RequestSpec) -> Option<RequestId> {
        if self.slab.len() >= self.limits.requests && spec.retry != Retry::Probe {
            return None;
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        let index = self.slab.insert(Request {
            spec,
            seq,
            attempts: 0,
            waits: 0,
            started: 0,
            replayed: false,
            state: RequestState::Queued,
        }) as u32;
        self.queue_of(spec.retry).push_back(index);
        Some(RequestId(index))
    }

    fn queue_of(&mut self, retry: Retry) -> &mut VecDeque<u32> {
        match retry {
            Retry::Probe => &mut self.probes,
            Retry::Standard | Retry::Never => &mut self.queue,
        }
    }

    /// Returns the request to start next: either a probe, which has no effect, or the first request
    /// that need not wait for another one, without an earlier waiting request for the same unit.
    pub(crate) fn next(&self) -> Option<u32> {
        if !self.probes.is_empty() {
            return self.probes.front().copied();
        }
        if self.is_held {
            return None;
        }
        let mut queue = self.queue.iter().copied();
        if self.replays == 0 {
            return queue.next();
        }
        let mut waiting = Vec::new();
        queue.find(|index| {
            let lun = self.at(*index).spec.lun;
            let waits = waiting.contains(&lun) || self.must_wait(*index);
            if waits {
                waiting.push(lun);
            }
            !waits
        })
    }

    /// Returns whether an earlier request with an overlapping effect is outstanding.
    fn must_wait(&self, index: u32) -> bool {
        let request = self.at(index);
        let effect = request.spec.effect;
        self.slab.iter().any(|(_, other)| {
            other.seq < request.seq
                && other.spec.lun == request.spec.lun
                && other.state != RequestState::Queued
                && effect.conflicts(other.spec.effect)
        })
    }

    /// Only starts [`Retry::Probe`] until [`Self::release`].
    pub(crate) fn hold_requests(&mut self) {
        self.is_held = true;
    }

    /// Ends [`Self::hold_requests`]: allows starting all requests.
    pub(crate) fn release(&mut self) {
        self.is_held = false;
    }

    /// Called when a queued request is sent. Returns the time at which its attempt times out.
    pub(crate) fn start_attempt(
        &mut self,
        index: u32,
        channel: u8,
        tag: T,
        now: Instant,
    ) -> Instant {
        let until = now + self.limits.attempt;
        let queue = self.queue_of(self.at(index).spec.retry);
        let at = queue.iter().position(|&i| i == index);
        queue.remove(at.expect("a request of the queue"));
        let request = &mut self.slab[index as usize];
        request.attempts = request.attempts.saturating_add(1);
        request.started = self.starts;
        self.starts += 1;
        let started = RequestState::Started {
            channel,
            tag,
            until,
        };
        become_state(&mut request.state, started);
        until
    }

    /// Returns the number of attempts started.
    pub(crate) fn starts(&self) -> u64 {
        self.starts
    }

    /// Returns whether a request's last attempt was started after this number of attempts.
    pub(crate) fn is_started_since(&self, index: u32, starts: u64) -> bool {
        self.at(index).started >= starts
    }

    /// Returns a started request to its position in the queue, because it was not sent after all.
    pub(crate) fn requeue_unsent(&mut self, index: u32) {
        let request = &mut self.slab[index as usize];
        request.attempts = request.attempts.saturating_sub(1);
        self.enqueue(index);
    }

    /// Called when a started request must be aborted by task management; returns its channel and
    /// tag.
    pub(crate) fn begin_abort(&mut self, index: u32) -> Option<(u8, T)> {
        let request = &mut self.slab[index as usize];
        let RequestState::Started { channel, tag, .. } = request.state else {
            return None;
        };
        become_state(&mut request.state, RequestState::Aborting { channel, tag });
        Some((channel, tag))
    }

    /// Returns the tag of an attempt that is still waiting for its abort.
    pub(crate) fn aborting(&self, late: Late) -> Option<T> {
        let request = self.find(late.index)?;
        match request.state {
            RequestState::Aborting { tag, .. } if request.late(late.index) == late => Some(tag),
            _ => None,
        }
    }

    /// Called when an attempt is over: starts retiring its memory. Returns the time at which this times out.
    pub(crate) fn retire_attempt(
        &mut self,
        index: u32,
        channel: u8,
        end: AttemptOutcome,
        now: Instant,
    ) -> Instant {
        let until = now + self.limits.attempt;
        let request = &mut self.slab[index as usize];
        let tag = request.place().map(|(_, tag)| tag);
        let retiring = RequestState::Retiring {
            channel,
            tag,
            end,
            until,
        };
        become_state(&mut request.state, retiring);
        until
    }

    /// Called when data of a request was transferred: restarts the timeout, as in Linux
    /// (`iscsi_eh_cmd_timed_out`). This is bounded by the request's deadline for further data and
    /// the response ([`Self::plan_late`]), and by one additional attempt timeout for retiring the
    /// memory. Otherwise, a target that transfers a byte from time to time could keep the request
    /// forever.
    pub(crate) fn on_progress(&mut self, index: u32, now: Instant) {
        if let Some(request) = self.slab.get_mut(index as usize) {
            request.extend_timeout(self.limits.attempt, now);
        }
    }

    /// The same for all requests in transit.
    pub(crate) fn on_progress_where(&mut self, is: impl Fn(RequestId) -> bool, now: Instant) {
        for (index, request) in &mut self.slab {
            if is(RequestId(index as u32)) {
                request.extend_timeout(self.limits.attempt, now);
            }
        }
    }

    /// Returns the channel and tag of the attempt whose memory is being retired.
    pub(crate) fn retiring_place(&self, index: u32) -> Option<(u8, T)> {
        match self.find(index)?.state {
            RequestState::Retiring { channel, tag, .. } => Some((channel, tag?)),
            _ => None,
        }
    }

    /// Returns the result of the attempt whose memory is being retired.
    pub(crate) fn retiring(&self, index: u32) -> Option<AttemptOutcome> {
        match &self.find(index)?.state {
            RequestState::Retiring { end, .. } => Some(end.clone()),
            _ => None,
        }
    }

    /// Decides about a request whose attempt has finished. `ending` is set if the session is
    /// closing. In this case, a request that would be retried completes as closed, so that another
    /// path can retry it.
    pub(crate) fn finish_attempt(
        &mut self,
        index: u32,
        end: AttemptOutcome,
        ending: bool,
        now: Instant,
    ) -> Disposition {
        let request = &mut self.slab[index as usize];
        let in_time = now < request.spec.deadline;
        let may_repeat = request.attempts < self.limits.attempts && in_time;
        let may_replay = may_repeat && request.spec.effect.is_replayable();
        let may_retry =
            may_replay && request.attempts <= RETRIES && request.spec.retry != Retry::Never;
        match end {
            AttemptOutcome::Responded(response) => {
                let closed = ending.then_some(Disposition::Over(Err(RequestError::Closed)));
                // A command terminated by another nexus may have been executed, completely or
                // partially.
                let is_ended = response.status == TASK_ABORTED;
                if may_retry && request.is_short(&response) {
                    return closed
                        .or_else(|| self.back_off(index, now))
                        .unwrap_or(Disposition::Over(Ok(response)));
                }
                let verdict = match request.spec.retry {
                    _ if is_ended && !may_replay => Verdict::Report,
                    Retry::Standard | Retry::Probe => match plan_verdict(&response) {
                        Verdict::Wait if in_time => Verdict::Wait,
                        verdict if may_repeat => verdict,
                        _ => Verdict::Report,
                    },
                    Retry::Never => Verdict::Report,
                };
                match verdict {
                    Verdict::Report => Disposition::Over(Ok(response)),
                    _ if let Some(closed) = closed => closed,
                    Verdict::Again if is_ended => self.replay(index),
                    Verdict::Again => self.enqueue(index),
                    Verdict::Later | Verdict::Wait => {
                        if verdict == Verdict::Wait {
                            request.attempts = request.attempts.saturating_sub(1);
                        }
                        let waits = self.back_off(index, now);
                        // The response is more informative than a timeout.
                        waits.unwrap_or(Disposition::Over(Ok(response)))
                    }
                }
            }
            AttemptOutcome::Failed(_) if may_retry && ending => {
                Disposition::Over(Err(RequestError::Closed))
            }
            AttemptOutcome::Failed(error) if may_retry => {
                self.mark_replayed(index);
                self.back_off(index, now)
                    .unwrap_or(Disposition::Over(Err(error)))
            }
            AttemptOutcome::Refused(error) | AttemptOutcome::Failed(error) => {
                Disposition::Over(Err(error))
            }
            AttemptOutcome::Aborted if may_replay && ending => {
                Disposition::Over(Err(RequestError::Closed))
            }
            AttemptOutcome::Aborted if may_replay => self.replay(index),
            AttemptOutcome::Aborted => Disposition::Over(Err(RequestError::TimedOut)),
            AttemptOutcome::Lost if ending => Disposition::Over(Err(RequestError::Closed)),
            AttemptOutcome::Lost if !in_time => Disposition::Over(Err(RequestError::TimedOut)),
            AttemptOutcome::Lost if may_replay => self.replay(index),
            AttemptOutcome::Lost => Disposition::Over(Err(RequestError::ConnectionLost)),
        }
    }

    /// Queues a request again that may have been executed.
    fn replay(&mut self, index: u32) -> Disposition {
        self.mark_replayed(index);
        self.enqueue(index)
    }

    /// Marks a request to be sent again as possibly executed.
    fn mark_replayed(&mut self, index: u32) {
        let request = &mut self.slab[index as usize];
        if !request.replayed {
            request.replayed = true;
            self.replays += 1;
        }
    }

    /// Queues a request again, in order of submission.
    pub(crate) fn enqueue(&mut self, index: u32) -> Disposition {
        let request = &mut self.slab[index as usize];
        become_state(&mut request.state, RequestState::Queued);
        let Request { seq, spec, .. } = *self.at(index);
        let queue = match spec.retry {
            Retry::Probe => &self.probes,
            Retry::Standard | Retry::Never => &self.queue,
        };
        let at = queue.partition_point(|&other| self.at(other).seq < seq);
        self.queue_of(spec.retry).insert(at, index);
        Disposition::Queued
    }

    /// Defers a request; returns `None` if it would exceed its deadline.
    fn back_off(&mut self, index: u32, now: Instant) -> Option<Disposition> {
        let request = &mut self.slab[index as usize];
        let doublings = u32::from(request.waits).min(7);
        request.waits = request.waits.saturating_add(1);
        let until = now + self.limits.busy * (1 << doublings);
        if until >= request.spec.deadline {
            return None;
        }
        become_state(&mut request.state, RequestState::Backoff { until });
        Some(Disposition::Later(until))
    }

    /// Removes a completed request.
    pub(crate) fn remove(&mut self, index: u32) {
        let request = self.slab.remove(index as usize);
        if request.state == RequestState::Queued {
            self.queue_of(request.spec.retry).retain(|&i| i != index);
        }
        if request.replayed {
            self.replays -= 1;
        }
    }

    /// Returns timed-out requests in order of submission, and the time of the next timeout.
    pub(crate) fn plan_late(&self, now: Instant) -> (Vec<Late>, Option<Instant>) {
        let mut late = Vec::new();
        let mut next: Option<Instant> = None;
        for (index, request) in &self.slab {
            let at = match request.state {
                RequestState::Queued => request.spec.deadline,
                RequestState::Backoff { until } | RequestState::Started { until, .. } => {
                    until.min(request.spec.deadline)
                }
                // Retiring the memory may time out after the request's deadline, at which the
                // attempt is aborted.
                RequestState::Retiring { until, .. } => until,
                // Each function has a separate timeout, but many aborts may wait for each other.
                RequestState::Aborting { .. } => request.spec.deadline + self.limits.abort,
            };
            if at <= now {
                late.push(request.late(index as u32));
            } else {
                next = Some(next.map_or(at, |n| n.min(at)));
            }
        }
        late.sort_unstable();
        (late, next)
    }

    /// Returns the requests of a closed channel and the results of their attempts, in order of
    /// submission.
    pub(crate) fn of_channel(&self, here: u8) -> Vec<(u32, AttemptOutcome)> {
        let mut ended: Vec<(u64, u32, AttemptOutcome)> = self
            .slab
            .iter()
            .filter_map(|(index, request)| {
                let end = match &request.state {
                    RequestState::Started { channel, .. }
                    | RequestState::Aborting { channel, .. }
                        if *channel == here =>
                    {
                        AttemptOutcome::Lost
                    }
                    RequestState::Retiring { channel, end, .. } if *channel == here => end.clone(),
                    _ => return None,
                };
                Some((request.seq, index as u32, end))
            })
            .collect();
        ended.sort_by_key(|(seq, ..)| *seq);
        ended
            .into_iter()
            .map(|(_, index, end)| (index, end))
            .collect()
    }

    /// Returns the requests outstanding at the target for one logical unit or for all, in order of
    /// submission, with their channels and tags.
    pub(crate) fn outstanding(&self, lun: Option<WireLun>) -> Vec<(u32, u8, T)> {
        let mut found: Vec<(u64, u32, u8, T)> = self
            .slab
            .iter()
            .filter(|(_, request)| lun.is_none_or(|lun| request.spec.lun == lun))
            .filter_map(|(index, request)| {
                let (channel, tag) = request.place()?;
                Some((request.seq, index as u32, channel, tag))
            })
            .collect();
        found.sort_unstable_by_key(|(seq, ..)| *seq);
        found
            .into_iter()
            .map(|(_, index, channel, tag)| (index, channel, tag))
            .collect()
    }

    /// Starts aborting the outstanding commands for a unit that were sent before this one; returns
    /// them with their channels, in order of submission.
    pub(crate) fn abort_before(&mut self, index: u32) -> Vec<(u8, Late)> {
        let (started, lun) = (self.at(index).started, self.at(index).spec.lun);
        let is_earlier = |r: &Request<T>| r.started < started && r.spec.lun == lun;
        let mut earlier = Vec::new();
        for (index, request) in &mut self.slab {
            if let RequestState::Started { channel, tag, .. } = request.state
                && is_earlier(request)
            {
                become_state(&mut request.state, RequestState::Aborting { channel, tag });
                earlier.push((channel, request.late(index as u32)));
            }
        }
        earlier.sort_unstable_by_key(|(_, late)| *late);
        earlier
    }

    /// Removes all requests of a closed session; returns their results.
    pub(crate) fn complete_all(&mut self) -> Vec<(RequestId, RequestResult)> {
        let all = self.slab.iter().map(|(index, _)| RequestId(index as u32));
        let ended = all.map(|id| (id, Err(RequestError::Closed))).collect();
        self.slab.clear();
        self.queue.clear();
        self.probes.clear();
        self.replays = 0;
        ended
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::srp::TaskAttr;
    use riser_state::testing::{assert_all_taken, table};

    use super::super::{BUSY, Cdb, DataLen, Effect, GOOD};
    use super::*;
    use crate::scsi::{BlockRange, Command};

    const LIMITS: Limits = Limits {
        requests: 4,
        attempts: 4,
        attempt: Duration::from_secs(30),
        abort: Duration::from_secs(15),
        busy: Duration::from_millis(5),
    };

    fn states(now: Instant) -> [RequestState<u16>; 5] {
        let (channel, tag) = (0, 7);
        [
            RequestState::Queued,
            RequestState::Started {
                channel,
                tag,
                until: now,
            },
            RequestState::Aborting { channel, tag },
            RequestState::Retiring {
                channel,
                tag: Some(tag),
                end: AttemptOutcome::Aborted,
                until: now,
            },
            RequestState::Backoff { until: now },
        ]
    }

    /// Returns a request with a timeout of one minute.
    fn spec(now: Instant) -> RequestSpec {
        RequestSpec {
            lun: [0; 8],
            attr: TaskAttr::Simple,
            cdb: Cdb::new(&[0; 6]).unwrap(),
            len: DataLen::None,
            deadline: now + Duration::from_secs(60),
            retry: Retry::Standard,
            effect: Effect::None,
        }
    }

    /// Returns a table with a single, started request.
    fn started(now: Instant) -> (Requests<u16>, u32) {
        let mut requests = Requests::new(LIMITS);
        let RequestId(index) = requests.insert(spec(now)).unwrap();
        requests.start_attempt(index, 0, 7, now);
        (requests, index)
    }

    fn responded(status: u8) -> AttemptOutcome {
        AttemptOutcome::Responded(CommandResponse {
            status,
            sense: None,
            transferred: 0,
            overflow: 0,
        })
    }

    #[test]
    fn request_transitions_match_diagram() {
        let expected = "Queued: Started\n\
                        Started: Queued Aborting Retiring\n\
                        Aborting: Queued Retiring\n\
                        Retiring: Queued Backoff\n\
                        Backoff: Queued\n";
        assert_eq!(table(&states(Instant::now())), expected);
    }

    #[test]
    fn request_transition_coverage_is_complete() {
        let now = Instant::now();
        assert_all_taken(&states(now), || {
            // No room on the connection.
            let (mut requests, index) = started(now);
            requests.requeue_unsent(index);
            // Lost with the connection, before and during its abort.
            requests.start_attempt(index, 0, 8, now);
            let disposition = requests.finish_attempt(index, AttemptOutcome::Lost, false, now);
            assert_eq!(disposition, Disposition::Queued);
            requests.start_attempt(index, 0, 9, now);
            assert_eq!(requests.begin_abort(index), Some((0, 9)));
            requests.finish_attempt(index, AttemptOutcome::Lost, false, now);
            // Aborted.
            requests.start_attempt(index, 0, 10, now);
            requests.begin_abort(index);
            requests.retire_attempt(index, 0, AttemptOutcome::Aborted, now);
            requests.finish_attempt(index, AttemptOutcome::Aborted, false, now);
            // Busy, then executed.
            let (mut requests, index) = started(now);
            requests.retire_attempt(index, 0, responded(BUSY), now);
            let disposition = requests.finish_attempt(index, responded(BUSY), false, now);
            assert_eq!(disposition, Disposition::Later(now + LIMITS.busy));
            requests.enqueue(index);
            requests.start_attempt(index, 0, 11, now);
            requests.retire_attempt(index, 0, responded(GOOD), now);
            let disposition = requests.finish_attempt(index, responded(GOOD), false, now);
            assert!(
                matches!(disposition, Disposition::Over(Ok(_))),
                "{disposition:?}"
            );
        });
    }

    /// The connection breaks after the unit's response, while the request's memory is in use.
    #[test]
    fn repeatable_request_of_ending_session_is_closed() {
        let failed = AttemptOutcome::Failed(RequestError::TargetFailure(1));
        let ends = [responded(BUSY), responded(TASK_ABORTED), failed];
        for end in ends.into_iter().chain([AttemptOutcome::Aborted]) {
            let now = Instant::now();
            let (mut requests, index) = started(now);
            requests.retire_attempt(index, 0, end.clone(), now);
            let disposition = requests.finish_attempt(index, end.clone(), true, now);
            let closed = Disposition::Over(Err(RequestError::Closed));
            assert_eq!(disposition, closed, "{end:?}");
        }
    }

    /// This is bounded by its deadline, and later conditions are retried normally.
    #[test]
    fn busy_target_is_retried_until_deadline() {
        let now = Instant::now();
        let (mut requests, index) = started(now);
        for attempt in 0..300 {
            requests.retire_attempt(index, 0, responded(BUSY), now);
            let disposition = requests.finish_attempt(index, responded(BUSY), false, now);
            assert!(
                matches!(disposition, Disposition::Later(_)),
                "{attempt}: {disposition:?}"
            );
            requests.enqueue(index);
            requests.start_attempt(index, 0, 8, now);
        }
        requests.retire_attempt(index, 0, responded(TASK_ABORTED), now);
        let disposition = requests.finish_attempt(index, responded(TASK_ABORTED), false, now);
        assert_eq!(disposition, Disposition::Queued);
        requests.start_attempt(index, 0, 9, now);
        requests.retire_attempt(index, 0, responded(BUSY), now);
        let late = now + Duration::from_secs(61);
        let disposition = requests.finish_attempt(index, responded(BUSY), false, late);
        assert!(
            matches!(disposition, Disposition::Over(Ok(_))),
            "{disposition:?}"
        );
    }

    #[test]
    fn busy_unit_does_not_delay_others() {
        let now = Instant::now();
        let mut requests: Requests<u16> = Requests::new(LIMITS);
        let write = |lun: u8, seconds| RequestSpec {
            lun: [0, lun, 0, 0, 0, 0, 0, 0],
            deadline: now + Duration::from_secs(seconds),
            effect: Effect::Blocks { start: 0, end: 8 },
            ..spec(now)
        };
        // A write to unit 1 that may have been executed, and for which the unit requests a wait.
        let RequestId(first) = requests.insert(write(1, 600)).unwrap();
        requests.start_attempt(first, 0, 7, now);
        requests.retire_attempt(first, 0, AttemptOutcome::Lost, now);
        assert_eq!(
            requests.finish_attempt(first, AttemptOutcome::Lost, false, now),
            Disposition::Queued
        );
        requests.start_attempt(first, 0, 8, now);
        // Another write to the same blocks, and a write to unit 2.
        let RequestId(_) = requests.insert(write(1, 600)).unwrap();
        let RequestId(other) = requests.insert(write(2, 60)).unwrap();
        let mut at = now;
        while at < now + Duration::from_secs(60) {
            requests.retire_attempt(first, 0, responded(BUSY), at);
            let Disposition::Later(until) =
                requests.finish_attempt(first, responded(BUSY), false, at)
            else {
                break;
            };
            at = until;
            if requests.next() == Some(other) {
                return;
            }
            requests.enqueue(first);
            requests.start_attempt(first, 0, 9, at);
        }
        panic!("unit 2 has waited {:?}", at - now);
    }

    /// Settles the first attempt at a command that returns GOOD without data.
    fn finish_short(command: Command, retry: Retry) -> Disposition {
        let now = Instant::now();
        let mut requests: Requests<u16> = Requests::new(LIMITS);
        let spec = RequestSpec {
            cdb: command.cdb,
            len: command.len,
            effect: command.effect,
            retry,
            ..spec(now)
        };
        let RequestId(index) = requests.insert(spec).unwrap();
        requests.start_attempt(index, 0, 7, now);
        requests.retire_attempt(index, 0, responded(GOOD), now);
        requests.finish_attempt(index, responded(GOOD), false, now)
    }

    #[test]
    fn short_read_is_repeated() {
        let range = BlockRange { lba: 0, blocks: 8 };
        let disposition = finish_short(Command::read(range, 4096), Retry::Standard);
        assert!(
            matches!(disposition, Disposition::Later(_)),
            "{disposition:?}"
        );
    }

    /// Parameter data may be shorter than its allocation length.
    #[test]
    fn short_lba_status_is_complete() {
        let disposition = finish_short(Command::lba_status(0, 1032), Retry::Standard);
        assert!(
            matches!(disposition, Disposition::Over(Ok(_))),
            "{disposition:?}"
        );
    }

    #[test]
    fn command_without_retries_is_not_repeated() {
        let range = BlockRange { lba: 0, blocks: 8 };
        let disposition = finish_short(Command::read(range, 4096), Retry::Never);
        assert!(
            matches!(disposition, Disposition::Over(Ok(_))),
            "{disposition:?}"
        );
        let now = Instant::now();
        let (mut requests, index) = started(now);
        requests.slab[index as usize].spec.retry = Retry::Never;
        let failed = AttemptOutcome::Failed(RequestError::TargetFailure(1));
        requests.retire_attempt(index, 0, failed.clone(), now);
        let disposition = requests.finish_attempt(index, failed, false, now);
        assert!(
            matches!(disposition, Disposition::Over(Err(_))),
            "{disposition:?}"
        );
    }

    /// ASYMMETRIC ACCESS STATE TRANSITION (04h/0Ah) causes multipath to try another path
    /// (`paths::is_refused`), so a session must not retry it until the timeout.
    #[test]
    fn transitioning_path_leaves_time_for_others() {
        let now = Instant::now();
        let limits = Limits {
            attempts: 32,
            ..LIMITS
        };
        let mut requests: Requests<u16> = Requests::new(limits);
        let RequestId(index) = requests.insert(spec(now)).unwrap();
        let mut sense = vec![0; 18];
        (sense[0], sense[2], sense[7], sense[12], sense[13]) = (0x70, 2, 10, 4, 0x0a);
        let response = AttemptOutcome::Responded(CommandResponse {
            status: crate::request::CHECK_CONDITION,
            sense: Some(sense.into()),
            transferred: 0,
            overflow: 0,
        });
        let mut at = now;
        loop {
            requests.start_attempt(index, 0, 7, at);
            requests.retire_attempt(index, 0, response.clone(), at);
            match requests.finish_attempt(index, response.clone(), false, at) {
                Disposition::Later(until) => at = until,
                Disposition::Over(Ok(_)) => break,
                other => panic!("{other:?}"),
            }
            requests.enqueue(index);
        }
        assert!(
            at - now < Duration::from_secs(20),
            "another path is tried after {:?}",
            at - now
        );
    }

    #[test]
    #[should_panic(expected = "Retiring")]
    fn attempt_completes_once() {
        let now = Instant::now();
        let (mut requests, index) = started(now);
        requests.retire_attempt(index, 0, AttemptOutcome::Aborted, now);
        requests.retire_attempt(index, 0, AttemptOutcome::Aborted, now);
    }
}
