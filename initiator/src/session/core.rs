//! The common part of the machines of SRP and iSCSI: a session's life, its requests and their
//! times, and what it reports.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;
use riser_scsi::opcode::Opcode;
use riser_scsi::sense::{Sense, SenseKey};

use super::functions::TaskFunctions;
use super::{Lifecycle, SessionEvent, SessionState, SubmitError, Timing};
use crate::request::table::{AttemptEnd, Late, Limits, RequestState, Requests, Settled};
use crate::request::{
    Answer, RequestError, RequestId, RequestResult, RequestSpec, Retry, may_change_unit,
};

/// Functions that a late command may take one after the other: ABORT TASK, LOGICAL UNIT RESET and
/// TARGET WARM RESET.
const LADDER: u32 = 3;

/// The outputs that the machines of both protocols have.
pub(crate) trait SessionOutput {
    /// The request is over.
    fn complete(request: RequestId, result: RequestResult) -> Self;

    /// An event for the session's user.
    fn event(event: SessionEvent) -> Self;
}

/// The next step with a request whose time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expired {
    Nothing,
    /// The target, which has it on that channel, is to be asked to abort it.
    Abort(u8),
    /// It is not aborted in time, or the connection does not give its memory back: the connection
    /// is to be left.
    Leave,
}

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED that a unit may report because of a reset of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResetReport {
    /// Logical unit that was reset; all if `None`.
    lun: Option<WireLun>,
    /// Number of attempts that had begun by then. If a later one is executed, no report will follow.
    starts: u64,
}

impl ResetReport {
    fn is_of(&self, lun: WireLun) -> bool {
        self.lun.is_none_or(|own| own == lun)
    }
}

/// Bounds and times of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreConfig {
    /// Channels, each with task management of its own.
    pub(crate) channels: u8,
    /// Requests taken and not completed.
    pub(crate) requests: usize,
    /// Attempts at one request.
    pub(crate) attempts: u8,
    pub(crate) timing: Timing,
    /// Silence of a target after which it is asked whether it is there.
    pub(crate) ping: Duration,
    /// A connection that broke is made again.
    pub(crate) reconnect: bool,
}

/// See the module's documentation. `T` names a started request to the target, `O` is the machine's
/// output.
#[derive(Debug)]
pub(crate) struct Core<T, O> {
    pub(crate) life: Lifecycle,
    pub(crate) requests: Requests<T>,
    pub(crate) functions: TaskFunctions,
    pub(crate) outputs: VecDeque<O>,
    /// Requests are held after each login; see
    /// [`Machine::set_guarded`](super::Machine::set_guarded).
    pub(crate) is_guarded: bool,
    /// The unit is known to be the same; see [`Machine::release`](super::Machine::release).
    is_checked: bool,
    /// Until then commands of a lost connection, or of a dead process, may still change the medium.
    pub(crate) settle_at: Option<Instant>,
    /// A reset of ours that the unit may still report on this connection.
    pub(crate) expected_report: Option<ResetReport>,
    pub(crate) last_heard: Instant,
    /// Silence of a target after which it is asked whether it is there.
    pub(crate) ping: Duration,
    /// Time in which commands of a lost connection may still change the medium.
    pub(crate) settle: Duration,
    /// Not after the earliest deadline of anything.
    timer: Option<Instant>,
}

impl<T: Copy + Debug + PartialEq, O: SessionOutput> Core<T, O> {
    pub(crate) fn new(config: CoreConfig, now: Instant) -> Self {
        Self {
            life: Lifecycle::new(config.timing, config.reconnect),
            requests: Requests::new(Limits {
                requests: config.requests,
                attempts: config.attempts,
                attempt: config.timing.attempt,
                abort: config.timing.tsk_mgmt * LADDER,
                busy: config.timing.busy,
            }),
            functions: TaskFunctions::new(config.channels, config.timing.tsk_mgmt),
            outputs: VecDeque::new(),
            is_guarded: false,
            is_checked: false,
            settle_at: None,
            expected_report: None,
            last_heard: now,
            ping: config.ping,
            settle: config.timing.settle,
            timer: None,
        }
    }

    /// The target has sent something about a command that had ended.
    pub(crate) fn on_stale(&mut self) {
        self.outputs.push_back(O::event(SessionEvent::Stale));
    }

    /// Asks for a timeout at that time, at the latest.
    pub(crate) fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
    }

    /// The time of the next timeout.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    /// Returns whether a timeout is due. Then every deadline is to be looked at, and armed again.
    pub(crate) fn take_due(&mut self, now: Instant) -> bool {
        self.timer.take_if(|at| *at <= now).is_some()
    }

    /// Returns whether the wait for the next login is over, which begins then.
    pub(crate) fn is_login_due(&mut self, now: Instant) -> bool {
        let Some(until) = self.life.next_login() else {
            return false;
        };
        if until > now {
            self.arm(until);
            return false;
        }
        self.life.log_in_again();
        true
    }

    /// The time at which a target that stays silent is asked whether it is there.
    pub(crate) fn ping_at(&self) -> Instant {
        self.last_heard + self.ping
    }

    /// The login is complete: requests flow, unless the unit is checked first.
    pub(crate) fn on_live(&mut self, now: Instant) {
        self.life.on_live(self.is_guarded);
        // A new nexus reports its own beginning only.
        self.expected_report = None;
        self.is_checked = !self.is_guarded;
        self.last_heard = now;
        self.arm(now + self.ping);
        if self.is_guarded {
            self.requests.hold();
        }
        self.outputs.push_back(O::event(SessionEvent::Live));
    }

    /// Nothing but probes is started before [`Self::on_checked`].
    pub(crate) fn hold(&mut self) {
        self.is_checked = false;
        self.requests.hold();
    }

    /// The unit is still the same.
    pub(crate) fn on_checked(&mut self) {
        self.is_checked = true;
        self.life.on_usable();
    }

    /// Nothing but probes is started before that time, until which commands of a lost connection may
    /// change the medium.
    pub(crate) fn settle_until(&mut self, at: Instant) {
        self.settle_at = Some(at);
        self.requests.hold();
        self.arm(at);
    }

    /// Takes the place of a process that was killed, whose commands may still change the medium.
    pub(crate) fn recover(&mut self, now: Instant) {
        self.is_checked = true;
        self.settle_until(now + self.settle);
    }

    /// Lets every request be started, once the unit is known and the commands of old connections
    /// are over; returns whether that is so.
    pub(crate) fn release_settled(&mut self, now: Instant) -> bool {
        match self.settle_at {
            _ if !self.is_checked => false,
            Some(at) if at > now => {
                self.arm(at);
                false
            }
            _ => {
                self.settle_at = None;
                self.requests.release();
                true
            }
        }
    }

    /// See [`Machine::is_settled`](super::Machine::is_settled).
    pub(crate) fn is_settled(&self) -> bool {
        self.settle_at.is_none() && !self.requests.has_change()
    }

    /// Every connection is closed: ends the session, or waits for the next login.
    pub(crate) fn on_disconnected(&mut self, now: Instant) {
        let event = self.life.on_disconnected(now);
        if self.life.state() == SessionState::Closed {
            let ended = self.requests.end_all().into_iter();
            let complete = ended.map(|(request, result)| O::complete(request, result));
            self.outputs.extend(complete);
            self.timer = None;
        }
        if let Some(until) = self.life.next_login() {
            self.arm(until);
        }
        self.outputs.extend(event.map(O::event));
    }

    /// Takes a request into the queue.
    pub(crate) fn submit(&mut self, spec: RequestSpec) -> Result<RequestId, SubmitError> {
        if self.life.is_ending() {
            return Err(SubmitError::Closed);
        }
        let deadline = spec.deadline;
        let id = self.requests.insert(spec).ok_or(SubmitError::Full)?;
        self.arm(deadline);
        Ok(id)
    }

    /// Decides about a request whose attempt is over.
    pub(crate) fn settle(&mut self, index: u32, end: AttemptEnd, now: Instant) {
        match self.requests.settle(index, end, self.life.is_ending(), now) {
            Settled::Over(result) => self.complete(index, result),
            Settled::Queued => {}
            Settled::Later(until) => self.arm(until),
        }
    }

    pub(crate) fn complete(&mut self, index: u32, result: RequestResult) {
        self.requests.remove(index);
        self.outputs
            .push_back(O::complete(RequestId(index), result));
    }

    /// Requests whose time has come, in the order of submission.
    pub(crate) fn plan_late(&mut self, now: Instant) -> Vec<Late> {
        let (late, next) = self.requests.plan_late(now);
        if let Some(next) = next {
            self.arm(next);
        }
        late
    }

    /// Handles the end of a request's time.
    pub(crate) fn expire(&mut self, late: Late, now: Instant) -> Expired {
        let request = self.requests.at(late.index);
        let overdue = request.spec.deadline <= now;
        match request.state {
            RequestState::Queued => {
                let error = match request.spec.retry {
                    Retry::Probe => RequestError::NotSent,
                    Retry::Standard | Retry::Never => RequestError::TimedOut,
                };
                self.complete(late.index, Err(error));
            }
            RequestState::Backoff { .. } if overdue => {
                self.complete(late.index, Err(RequestError::TimedOut));
            }
            RequestState::Backoff { .. } => drop(self.requests.enqueue(late.index)),
            RequestState::Started { channel, .. } => {
                self.requests.begin_abort(late.index);
                return Expired::Abort(channel);
            }
            RequestState::Aborting { .. } | RequestState::Retiring { .. } => return Expired::Leave,
        }
        Expired::Nothing
    }

    /// Begins to abort a request on its own channel, after a reset on another one.
    pub(super) fn sweep(&mut self, index: u32, channel: u8) {
        self.functions.begin_sweep();
        if self.requests.begin_abort(index).is_some() {
            let late = self.requests.at(index).late(index);
            self.functions.queue_abort(channel, late);
        }
    }

    /// A channel has gone, and with it the target's way to the memory of its requests. Returns
    /// whether one of them can have changed the medium.
    pub(crate) fn end_channel(&mut self, channel: u8, now: Instant) -> bool {
        self.functions.clear(channel);
        let mut changes = false;
        for (index, end) in self.requests.of_channel(channel) {
            changes |= self.requests.at(index).spec.effect.is_change();
            self.settle(index, end, now);
        }
        changes
    }

    /// Returns whether sense data report that the watched unit may be another one.
    pub(crate) fn may_be_another(&self, sense: Option<Sense>) -> bool {
        let may_change =
            |s: Sense| s.key == SenseKey::UnitAttention && may_change_unit(s.additional);
        self.is_guarded && sense.is_some_and(may_change)
    }

    /// The unit has executed a command without a unit attention. A command that was sent
    /// after a reset of ours would have reported it, so a later attention has another cause.
    pub(crate) fn on_executed(&mut self, index: u32, answer: &Answer) {
        if let Some(report) = self.expected_report
            && answer.is_success()
            && self.requests.is_started_since(index, report.starts)
            && report.is_of(self.requests.at(index).spec.lun)
            && !Opcode::of(self.requests.at(index).spec.cdb.as_bytes()).is_free_of_attention()
        {
            self.expected_report = None;
        }
    }

    /// Task management of this session has reset a unit, or every unit.
    pub(crate) fn on_own_reset(&mut self, lun: Option<WireLun>) {
        if self.is_guarded {
            self.expect_reset_report(lun);
            self.outputs
                .push_back(O::event(SessionEvent::UnitReset(lun)));
        }
    }

    /// See [`Machine::expect_reset_report`](super::Machine::expect_reset_report).
    pub(crate) fn expect_reset_report(&mut self, lun: Option<WireLun>) {
        let starts = self.requests.starts();
        self.expected_report = Some(ResetReport { lun, starts });
    }

    /// Reports an event of a unit to the session's user.
    pub(crate) fn report_unit_event(&mut self, lun: WireLun, sense: Box<[u8]>) {
        let is_reset = Sense::parse(&sense).is_some_and(|sense| {
            !sense.is_deferred
                && sense.key == SenseKey::UnitAttention
                && (sense.additional.code, sense.additional.qualifier) == (0x29, 0x00)
        });
        let report = self
            .expected_report
            .take_if(|report| is_reset && report.is_of(lun));
        self.outputs.push_back(O::event(SessionEvent::UnitEvent {
            lun,
            sense,
            is_own_reset: report.is_some(),
        }));
    }

    /// Reports the unit attention or deferred error of an answer, if the unit is watched.
    pub(crate) fn report_sense(&mut self, index: u32, answer: &Answer) {
        if let (true, Some(sense)) = (self.is_guarded, answer.sense.clone()) {
            let lun = self.requests.at(index).spec.lun;
            self.report_unit_event(lun, sense);
        }
    }
}
