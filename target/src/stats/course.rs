//! The way of one command through its stages.

use std::sync::Arc;
use std::time::Instant;

use riser_scsi::kind::Kind;
use riser_scsi::step::{Response, Status};

use super::lun::{Account, Fault};
use super::trace::{Subject, Trace};
use super::{CLASSES, Stage};

/// A command that was answered, for its account.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) class: Kind,
    /// Nanoseconds by stage.
    pub(super) spent: [u64; Stage::ALL.len()],
    pub(super) bytes: u64,
    pub(super) fault: Option<Fault>,
}

/// Where a command is, since when, and how long it was elsewhere.
#[derive(Debug)]
pub struct Course {
    account: Option<Arc<Account>>,
    stage: Stage,
    /// When its present stage began; `None` for one that is traced, whose trace knows.
    since: Option<Instant>,
    /// Of the command that was last traced.
    trace: Option<Box<Trace>>,
    answered: bool,
    /// It is in an account.
    counted: bool,
    done: Done,
}

impl Default for Course {
    fn default() -> Self {
        Self {
            account: None,
            stage: Stage::FabricIn,
            since: None,
            trace: None,
            answered: false,
            counted: false,
            done: Done {
                class: CLASSES[0],
                spent: [0; Stage::ALL.len()],
                bytes: 0,
                fault: None,
            },
        }
    }
}

impl Course {
    /// A command has come.
    pub fn begin(
        &mut self,
        account: Arc<Account>,
        subject: impl FnOnce() -> Subject,
        now: Instant,
    ) {
        account.begin();
        self.stage = Stage::FabricIn;
        self.since = Some(now);
        if account.is_traced() {
            self.trace(&account, subject(), now);
        }
        self.account = Some(account);
        self.answered = false;
        self.counted = false;
        self.done.spent = [0; Stage::ALL.len()];
        self.done.bytes = 0;
        self.done.fault = None;
    }

    /// Somebody looks at commands to the unit.
    #[cold]
    fn trace(&mut self, account: &Account, subject: Subject, now: Instant) {
        let (lun, tracer) = (account.lun(), account.tracer());
        let place = (lun.target(), lun.lun());
        self.trace = tracer.and_then(|tracer| Trace::begin(tracer, place, subject, now));
        if self.trace.is_some() {
            self.since = None;
        }
    }

    /// What kind of command it is.
    pub fn classify(&mut self, class: Kind) {
        self.done.class = class;
    }

    /// Another connection is to carry it on.
    pub fn leave(&mut self) {
        if let Some(account) = self.account.take() {
            account.end(None);
        }
    }

    /// It is carried on here, and goes to this account, unless it was answered before and is only
    /// answered once more.
    pub fn join(&mut self, account: Option<Arc<Account>>) {
        self.account = account.filter(|_| !self.counted);
        if let Some(account) = &self.account {
            account.begin();
        }
    }

    /// The command is elsewhere from now on.
    #[inline]
    pub fn enter(&mut self, stage: Stage, now: Instant) {
        if self.stage != stage {
            self.pass(now);
            self.stage = stage;
        }
    }

    /// Most stages begin and end in one round.
    #[inline]
    fn pass(&mut self, now: Instant) {
        if self.since != Some(now) {
            self.lengthen(now);
        }
    }

    fn lengthen(&mut self, now: Instant) {
        match self.since {
            Some(since) => {
                self.since = Some(now);
                self.spend(since, now);
            }
            None if self.account.is_some() => self.step(now),
            None => {}
        }
    }

    fn spend(&mut self, since: Instant, now: Instant) {
        let passed = now.saturating_duration_since(since);
        let nanos = passed.as_secs() * 1_000_000_000 + u64::from(passed.subsec_nanos());
        self.done.spent[self.stage as usize] += nanos;
    }

    /// A command that is traced leaves its stage.
    #[cold]
    fn step(&mut self, now: Instant) {
        let Some(trace) = &mut self.trace else {
            return;
        };
        let since = trace.leave(self.stage, now);
        self.spend(since, now);
        // It leaves the last one when its answer has gone.
        if self.answered
            && let Some(trace) = self.trace.take()
        {
            trace.finish(&self.done, now);
        }
    }

    /// So many bytes are taken from the initiator.
    pub fn carry(&mut self, bytes: u32) {
        self.done.bytes += u64::from(bytes);
    }

    /// Its answer is known, with so many bytes of data; it is sent now.
    pub fn answer(&mut self, response: &Response, bytes: u32, now: Instant) {
        self.enter(Stage::FabricOut, now);
        if self.answered {
            // Another connection says it again.
            return;
        }
        self.done.bytes += u64::from(bytes);
        if !matches!(response.status, Status::Good | Status::ConditionMet) {
            self.done.fault = Some(Fault {
                class: self.done.class,
                status: response.status as u8,
                sense_key: sense_key(&response.sense),
            });
        }
        self.answered = true;
    }

    /// The answer has been sent: what follows does not affect the initiator.
    pub fn arrive(&mut self, now: Instant) {
        self.pass(now);
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
    }
}

/// The sense key, in either format of sense data (SPC-4 4.5).
fn sense_key(sense: &[u8]) -> Option<u8> {
    let at = match sense.first()? & 0x7f {
        0x70 | 0x71 => 2,
        _ => 1,
    };
    sense.get(at).map(|byte| byte & 0x0f)
}
