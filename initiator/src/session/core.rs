//! Common part of the SRP and iSCSI machines: the session's life cycle, its requests and timeouts,
//! and its events.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;
use riser_scsi::opcode::Opcode;
use riser_scsi::sense::{Sense, SenseKey};

use super::functions::TaskFunctions;
use super::{Lifecycle, SessionEvent, SessionState, SubmitError, Timing};
use crate::request::table::{AttemptOutcome, Disposition, Late, Limits, RequestState, Requests};
use crate::request::{
    CommandResponse, RequestError, RequestId, RequestResult, RequestSpec, Retry, may_change_unit,
};

/// Maximum number of successive functions for a late command: ABORT TASK, LOGICAL UNIT RESET and
/// TARGET WARM RESET.
const LADDER: u32 = 3;

/// Outputs common to the machines of both protocols.
pub(crate) trait SessionOutput {
    /// The request is complete.
    fn complete(request: RequestId, result: RequestResult) -> Self;

    /// An event for the session's user.
    fn event(event: SessionEvent) -> Self;
}

/// Next step for a timed-out request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expired {
    Nothing,
    /// Abort the request, which is outstanding on this channel.
    Abort(u8),
    /// The abort timed out, or the connection did not retire the memory: close the connection.
    Disconnect,
}

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED that a unit may report because of our own reset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResetReport {
    /// Logical unit that was reset, or all if `None`.
    lun: Option<WireLun>,
    /// Number of attempts started before the reset. If a later one is executed, no report will
    /// follow.
    starts: u64,
}

impl ResetReport {
    fn is_of(&self, lun: WireLun) -> bool {
        self.lun.is_none_or(|own| own == lun)
    }
}

/// Limits and timeouts of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreConfig {
    /// Number of channels, each with separate task management.
    pub(crate) channels: u8,
    /// Maximum number of accepted, incomplete requests.
    pub(crate) requests: usize,
    /// Maximum number of attempts per request.
    pub(crate) attempts: u8,
    pub(crate) timing: Timing,
    /// Time without a message from the target after which it is pinged.
    pub(crate) ping: Duration,
    /// Reconnect a broken connection.
    pub(crate) reconnect: bool,
}

/// See the documentation of the module. `T` identifies a started request at the target, and `O` is
/// the machine's output.
#[derive(Debug)]
pub(crate) struct Core<T, O> {
    pub(crate) life: Lifecycle,
    pub(crate) requests: Requests<T>,
    pub(crate) functions: TaskFunctions,
    pub(crate) outputs: VecDeque<O>,
    /// Hold requests after each login; see [`Machine::set_guarded`](super::Machine::set_guarded).
    pub(crate) is_guarded: bool,
    /// The unit is known to be unchanged; see [`Machine::release`](super::Machine::release).
    is_checked: bool,
    /// Until this time, commands of a lost connection or of a killed process may still modify the
    /// medium.
    pub(crate) settle_at: Option<Instant>,
    /// A reset of ours that the unit may still report on this connection.
    pub(crate) expected_report: Option<ResetReport>,
    pub(crate) last_received: Instant,
    /// Time without a message from the target after which it is pinged.
    pub(crate) ping: Duration,
    /// Time during which commands of a lost connection may still modify the medium.
    pub(crate) settle: Duration,
    /// Not later than the earliest deadline.
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
            last_received: now,
            ping: config.ping,
            settle: config.timing.settle,
            timer: None,
        }
    }

    /// Called when the target sent a message for a completed command.
    pub(crate) fn on_stale(&mut self) {
        self.outputs.push_back(O::event(SessionEvent::Stale));
    }

    /// Requests a timeout at `at` or earlier.
    pub(crate) fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
    }

    /// Returns the time of the next timeout.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    /// Returns whether a timeout is due. In this case, all deadlines must be checked and armed
    /// again.
    pub(crate) fn take_due(&mut self, now: Instant) -> bool {
        self.timer.take_if(|at| *at <= now).is_some()
    }

    /// Starts the next login if its wait has expired; returns whether it did.
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

    /// Returns the time at which a silent target is pinged.
    pub(crate) fn ping_at(&self) -> Instant {
        self.last_received + self.ping
    }

    /// Called when the login is complete: starts requests, unless the unit must be checked first.
    pub(crate) fn on_live(&mut self, now: Instant) {
        self.life.on_live(self.is_guarded);
        // A new nexus only reports its own beginning.
        self.expected_report = None;
        self.is_checked = !self.is_guarded;
        self.last_received = now;
        self.arm(now + self.ping);
        if self.is_guarded {
            self.requests.hold_requests();
        }
        self.outputs.push_back(O::event(SessionEvent::Live));
    }

    /// Only starts probes until [`Self::on_checked`].
    pub(crate) fn hold_requests(&mut self) {
        self.is_checked = false;
        self.requests.hold_requests();
    }

    /// Called when the unit is known to be unchanged.
    pub(crate) fn on_checked(&mut self) {
        self.is_checked = true;
        self.life.on_usable();
    }

    /// Only starts probes until `at`, because commands of a lost connection may still modify the
    /// medium.
    pub(crate) fn settle_until(&mut self, at: Instant) {
        self.settle_at = Some(at);
        self.requests.hold_requests();
        self.arm(at);
    }

    /// Takes over from a killed process, whose commands may still modify the medium.
    pub(crate) fn recover(&mut self, now: Instant) {
        self.is_checked = true;
        self.settle_until(now + self.settle);
    }

    /// Starts all requests if the unit is known and the commands of old connections have completed;
    /// returns whether this is the case.
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

    /// Called when all connections are closed: closes the session, or waits for the next login.
    pub(crate) fn on_disconnected(&mut self, now: Instant) {
        let event = self.life.on_disconnected(now);
        if self.life.state() == SessionState::Closed {
            let ended = self.requests.complete_all().into_iter();
            let complete = ended.map(|(request, result)| O::complete(request, result));
            self.outputs.extend(complete);
            self.timer = None;
        }
        if let Some(until) = self.life.next_login() {
            self.arm(until);
        }
        self.outputs.extend(event.map(O::event));
    }

    /// Queues a request.
    pub(crate) fn submit(&mut self, spec: RequestSpec) -> Result<RequestId, SubmitError> {
        if self.life.is_ending() {
            return Err(SubmitError::Closed);
        }
        let deadline = spec.deadline;
        let id = self.requests.insert(spec).ok_or(SubmitError::Full)?;
        self.arm(deadline);
        Ok(id)
    }

    /// Decides about a request whose attempt has finished.
    pub(crate) fn finish_attempt(&mut self, index: u32, end: AttemptOutcome, now: Instant) {
        match self
            .requests
            .finish_attempt(index, end, self.life.is_ending(), now)
        {
            Disposition::Over(result) => self.complete(index, result),
            Disposition::Queued => {}
            Disposition::Later(until) => self.arm(until),
        }
    }

    pub(crate) fn complete(&mut self, index: u32, result: RequestResult) {
        self.requests.remove(index);
        self.outputs
            .push_back(O::complete(RequestId(index), result));
    }

    /// Returns timed-out requests in order of submission.
    pub(crate) fn plan_late(&mut self, now: Instant) -> Vec<Late> {
        let (late, next) = self.requests.plan_late(now);
        if let Some(next) = next {
            self.arm(next);
        }
        late
    }

    /// Handles the timeout of a request.
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
            RequestState::Aborting { .. } | RequestState::Retiring { .. } => {
                return Expired::Disconnect;
            }
        }
        Expired::Nothing
    }

    /// Starts aborting a request on its own channel, after a reset on another channel.
    pub(super) fn sweep(&mut self, index: u32, channel: u8) {
        self.functions.begin_sweep();
        if self.requests.begin_abort(index).is_some() {
            let late = self.requests.at(index).late(index);
            self.functions.queue_abort(channel, late);
        }
    }

    /// Called when a channel was closed, so that the target cannot access the memory of its
    /// requests anymore. Returns whether any of them may have modified the medium.
    pub(crate) fn on_channel_closed(&mut self, channel: u8, now: Instant) -> bool {
        self.functions.clear(channel);
        let mut changes = false;
        for (index, end) in self.requests.of_channel(channel) {
            changes |= self.requests.at(index).spec.effect.is_change();
            self.finish_attempt(index, end, now);
        }
        changes
    }

    /// Returns whether sense data indicates that the watched unit may be a different one.
    pub(crate) fn may_be_another(&self, sense: Option<Sense>) -> bool {
        let may_change =
            |s: Sense| s.key == SenseKey::UnitAttention && may_change_unit(s.additional);
        self.is_guarded && sense.is_some_and(may_change)
    }

    /// Called when the unit has executed a command without a unit attention. If the command was
    /// sent after our reset, it would have reported the reset, so a later attention has another
    /// cause.
    pub(crate) fn on_executed(&mut self, index: u32, response: &CommandResponse) {
        if let Some(report) = self.expected_report
            && response.is_success()
            && self.requests.is_started_since(index, report.starts)
            && report.is_of(self.requests.at(index).spec.lun)
            && !Opcode::of(self.requests.at(index).spec.cdb.as_bytes()).is_free_of_attention()
        {
            self.expected_report = None;
        }
    }

    /// Called when task management of this session has reset a unit or all units.
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

    /// Reports the unit attention or deferred error of a response if the unit is watched.
    pub(crate) fn report_sense(&mut self, index: u32, response: &CommandResponse) {
        if let (true, Some(sense)) = (self.is_guarded, response.sense.clone()) {
            let lun = self.requests.at(index).spec.lun;
            self.report_unit_event(lun, sense);
        }
    }
}
