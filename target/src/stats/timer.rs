//! Times of one command's stages.

use std::sync::Arc;
use std::time::Instant;

use riser_scsi::opcode::Kind;
use riser_scsi::step::{Response, Status};

use super::lun::SessionStats;
use super::outcome::{Clock, Done, Fault, Throttle};
use super::trace::{Trace, TraceKey};
use super::{CLASSES, Stage};

/// The present stage of a command and, if the command is timed, the times of those before.
#[derive(Debug)]
pub struct CommandTimer {
    account: Option<Arc<SessionStats>>,
    stage: Stage,
    /// The beginning of its present stage, where it is timed; of the command, otherwise. `None`
    /// once it is over.
    since: Option<Instant>,
    /// Gives the time of each stage; without one, that is the time of the worker's round.
    clock: Option<Clock>,
    /// Of a command that is traced.
    trace: Option<Box<Trace>>,
    answered: bool,
    /// It is in an account.
    counted: bool,
    /// Limits turn it away.
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
            answered: false,
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
    /// Begins with a command that has come.
    pub fn begin(
        &mut self,
        account: Arc<SessionStats>,
        subject: impl FnOnce() -> TraceKey,
        now: Instant,
    ) {
        let is_sampled = account.begin();
        self.stage = Stage::FabricIn;
        self.since = Some(now);
        self.clock = None;
        self.trace = None;
        self.answered = false;
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

    /// Times each of its stages: it is in the sample, or commands to the unit are traced.
    #[cold]
    fn time(&mut self, account: &SessionStats, subject: Option<TraceKey>, now: Instant) {
        let lun = account.lun();
        self.clock = lun.clock();
        self.done.spent = Some(Default::default());
        let now = self.read(now);
        self.since = Some(now);
        let place = (lun.target(), lun.lun());
        self.trace = subject.zip(account.tracer()).and_then(|(subject, tracer)| {
            let trace = Trace::begin(tracer, place, subject, now)?;
            Some(Box::new(trace))
        });
    }

    /// The time, where the worker's round began at `now`.
    fn read(&self, now: Instant) -> Instant {
        self.clock.map_or(now, |clock| clock())
    }

    /// Sets the kind of the command.
    pub fn classify(&mut self, class: Kind) {
        self.done.class = class;
    }

    /// The status that follows is due to limits.
    pub fn limit(&mut self) {
        self.is_limited = true;
    }

    /// Leaves the command to another connection.
    pub fn leave(&mut self) {
        if let Some(account) = self.account.take() {
            account.end(None);
        }
    }

    /// Takes the command over from another connection, on this account. One that was answered
    /// there, and only has its answer repeated, stays on the other's.
    pub fn join(&mut self, account: Option<Arc<SessionStats>>) {
        // Counted at the other connection already, it would count as a second command here.
        self.account = account.filter(|_| !self.counted);
        if let Some(account) = &self.account {
            account.begin();
        }
    }

    /// Ends the present stage and enters another one; no effect if it is the same.
    #[inline]
    pub fn enter(&mut self, stage: Stage, now: Instant) {
        if self.stage != stage {
            if self.done.spent.is_some() {
                self.pass(now);
            }
            self.stage = stage;
        }
    }

    /// A command that is timed leaves its stage.
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
            trace.leave(self.stage, since);
        }
    }

    /// Counts data of a piece, in bytes.
    pub fn carry(&mut self, bytes: u32) {
        self.done.bytes += u64::from(bytes);
    }

    /// Takes the answer, with `bytes` of data; it is sent now.
    pub fn answer(&mut self, response: &Response, bytes: u32, now: Instant) {
        self.enter(Stage::FabricOut, now);
        if self.answered {
            // Another connection repeats it.
            return;
        }
        self.done.bytes += u64::from(bytes);
        // CONDITION MET is a success as well: that of PRE-FETCH.
        if !matches!(response.status, Status::Good | Status::ConditionMet) {
            let throttle = match self.is_limited {
                true => Throttle::Limit,
                false => Throttle::Queue,
            };
            let is_throttled = matches!(response.status, Status::TaskSetFull | Status::Busy);
            self.done.fault = Some(Fault {
                class: self.done.class,
                status: response.status as u8,
                sense_key: sense_key(&response.sense),
                throttle: is_throttled.then_some(throttle),
            });
        }
        self.answered = true;
    }

    /// The answer has been sent: what follows does not affect the initiator.
    pub fn arrive(&mut self, now: Instant) {
        if self.done.spent.is_some() {
            self.pass(now);
        } else if let Some(since) = self.since {
            self.done.took = nanos(since, now);
        }
        // A trace shows commands from beginning to end: those that were aborted have no answer to
        // show.
        if self.answered
            && let Some(trace) = self.trace.take()
        {
            trace.finish(&self.done);
        }
        self.end(self.answered);
    }

    /// It is over, without an answer if it has not arrived.
    pub fn abandon(&mut self) {
        self.end(false);
    }

    fn end(&mut self, answered: bool) {
        if let Some(account) = self.account.take() {
            account.end(answered.then_some(&self.done));
            self.counted = answered;
        }
        self.since = None;
        self.trace = None;
    }
}

fn nanos(since: Instant, now: Instant) -> u64 {
    let passed = now.saturating_duration_since(since);
    passed.as_secs() * 1_000_000_000 + u64::from(passed.subsec_nanos())
}

/// The sense key, in either format of sense data (SPC-4 4.5).
fn sense_key(sense: &[u8]) -> Option<u8> {
    let at = match sense.first()? & 0x7f {
        0x70 | 0x71 => 2,
        _ => 1,
    };
    sense.get(at).map(|byte| byte & 0x0f)
}
