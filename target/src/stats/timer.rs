//! Measures the time a command spends in each stage.

use std::sync::Arc;
use std::time::Instant;

use riser_scsi::opcode::Kind;
use riser_scsi::step::{Response, Status};

use super::lun::SessionStats;
use super::outcome::{Clock, Done, Fault, Throttle, failed_check};
use super::trace::{Trace, TraceKey};
use super::{CLASSES, Stage};

/// Current stage of a command and, for a timed command, the duration of previous stages.
#[derive(Debug)]
pub struct CommandTimer {
    account: Option<Arc<SessionStats>>,
    stage: Stage,
    /// Start time of the current stage for a timed command, or of the command otherwise. `None` if
    /// the command is complete.
    since: Option<Instant>,
    /// Clock for timed commands. If `None`, use the start time of the worker's round.
    clock: Option<Clock>,
    /// Set for a traced command.
    trace: Option<Box<Trace>>,
    responded: bool,
    /// The command was already counted.
    counted: bool,
    /// The command is refused because of limits.
    is_limited: bool,
    done: Done,
}

impl Default for CommandTimer {
    fn default() -> Self {
        Self {
            account: None,
            stage: Stage::FabricIn,
            since: None,
            clock: None,
            trace: None,
            responded: false,
            counted: false,
            is_limited: false,
            done: Done {
                class: CLASSES[0],
                took: 0,
                spent: None,
                bytes: 0,
                fault: None,
            },
        }
    }
}

impl CommandTimer {
    /// Starts timing a command that was just received.
    pub fn start(
        &mut self,
        account: Arc<SessionStats>,
        subject: impl FnOnce() -> TraceKey,
        now: Instant,
    ) {
        let is_sampled = account.count_started();
        self.stage = Stage::FabricIn;
        self.since = Some(now);
        self.clock = None;
        self.trace = None;
        self.responded = false;
        self.counted = false;
        self.is_limited = false;
        self.done.took = 0;
        self.done.spent = None;
        self.done.bytes = 0;
        self.done.fault = None;
        let is_traced = account.is_traced();
        if is_sampled || is_traced {
            self.time(&account, is_traced.then(subject), now);
        }
        self.account = Some(account);
    }

    /// Enables timing for all stages, because the command is in the sample or is traced.
    #[cold]
    fn time(&mut self, account: &SessionStats, subject: Option<TraceKey>, now: Instant) {
        let lun = account.lun();
        self.clock = lun.clock();
        self.done.spent = Some(Default::default());
        let now = self.read(now);
        self.since = Some(now);
        let place = (lun.target(), lun.lun());
        self.trace = subject.zip(account.tracer()).and_then(|(subject, tracer)| {
            let trace = Trace::start(tracer, place, subject, now)?;
            Some(Box::new(trace))
        });
    }

    /// Returns the current time. `now` is the start time of the worker's round.
    fn read(&self, now: Instant) -> Instant {
        self.clock.map_or(now, |clock| clock())
    }

    /// Sets the kind of command.
    pub fn classify(&mut self, class: Kind) {
        self.done.class = class;
    }

    /// Marks the command as refused because of limits. Call this before setting the response.
    pub fn limit(&mut self) {
        self.is_limited = true;
    }

    /// Stops counting the command for this connection, because it was reassigned to another one.
    pub fn stop_counting(&mut self) {
        if let Some(account) = self.account.take() {
            account.count_finished(None);
        }
    }

    /// Takes over a command that was reassigned to this connection. If it was already counted by
    /// the other connection, because only its response is sent again, it is not counted here.
    pub fn join(&mut self, account: Option<Arc<SessionStats>>) {
        // If it was already counted by the other connection, counting it here would add a second
        // command.
        self.account = account.filter(|_| !self.counted);
        if let Some(account) = &self.account {
            account.count_started();
        }
    }

    /// Enters another stage. This has no effect if it is the current one.
    #[inline]
    pub fn enter_stage(&mut self, stage: Stage, now: Instant) {
        if self.stage != stage {
            if self.done.spent.is_some() {
                self.pass(now);
            }
            self.stage = stage;
        }
    }

    /// Records the duration of the current stage of a timed command.
    #[cold]
    fn pass(&mut self, now: Instant) {
        let now = self.read(now);
        let Some(since) = self.since else {
            return;
        };
        self.since = Some(now);
        let passed = nanos(since, now);
        self.done.took += passed;
        if let Some(spent) = &mut self.done.spent {
            spent[self.stage as usize] += passed;
        }
        if let Some(trace) = &mut self.trace {
            trace.record_stage(self.stage, since);
        }
    }

    /// Counts data of a single piece, in bytes.
    pub fn carry(&mut self, bytes: u32) {
        self.done.bytes += u64::from(bytes);
    }

    /// Records the response, with `bytes` of data, which will be sent now.
    pub fn record_response(&mut self, response: &Response, bytes: u32, now: Instant) {
        self.enter_stage(Stage::FabricOut, now);
        if self.responded {
            // Another connection sends the response again.
            return;
        }
        self.done.bytes += u64::from(bytes);
        // CONDITION MET is also successful. It's the status of PRE-FETCH.
        if !matches!(response.status, Status::Good | Status::ConditionMet) {
            let sense = response.parsed_sense();
            let check = sense.as_ref().and_then(failed_check);
            if let (Some(account), Some(check)) = (&self.account, check) {
                let lba = sense.and_then(|sense| sense.information);
                account.lun().log_check(self.done.class, check, lba, now);
            }
            let throttle = match self.is_limited {
                true => Throttle::Limit,
                false => Throttle::Queue,
            };
            let is_throttled = matches!(response.status, Status::TaskSetFull | Status::Busy);
            self.done.fault = Some(Fault {
                class: self.done.class,
                status: response.status as u8,
                sense_key: sense_key(&response.sense),
                check,
                throttle: is_throttled.then_some(throttle),
            });
        }
        self.responded = true;
    }

    /// Called when the response was sent. The initiator is not affected by any subsequent stage.
    pub fn arrive(&mut self, now: Instant) {
        if self.done.spent.is_some() {
            self.pass(now);
        } else if let Some(since) = self.since {
            self.done.took = nanos(since, now);
        }
        // A trace contains complete commands only. Aborted commands don't have a response to be
        // traced.
        if self.responded
            && let Some(trace) = self.trace.take()
        {
            trace.finish(&self.done);
        }
        self.stop(self.responded);
    }

    /// Completes the command, without a response if none was sent before.
    pub fn abandon(&mut self) {
        self.stop(false);
    }

    fn stop(&mut self, responded: bool) {
        if let Some(account) = self.account.take() {
            account.count_finished(responded.then_some(&self.done));
            self.counted = responded;
        }
        self.since = None;
        self.trace = None;
    }
}

fn nanos(since: Instant, now: Instant) -> u64 {
    let passed = now.saturating_duration_since(since);
    passed.as_secs() * 1_000_000_000 + u64::from(passed.subsec_nanos())
}

/// Returns the sense key of sense data in either format (SPC-4 4.5).
fn sense_key(sense: &[u8]) -> Option<u8> {
    let at = match sense.first()? & 0x7f {
        0x70 | 0x71 => 2,
        _ => 1,
    };
    sense.get(at).map(|byte| byte & 0x0f)
}
