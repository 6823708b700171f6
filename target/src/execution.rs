//! A SCSI command under way, the same for every transport: its unit and its place in the unit's task
//! set, the command's steps, and the data buffer.
//!
//! ```text
//!   register ──→ may start ──→ start ──→ Step ──→ the transport carries it out ──→ advance ──→ Step …
//!      └──→ waits, until another task's `leave` names it                               Respond
//!                                                                                         │
//!   finish: the buffer goes back, whoever waits is named  ←── leave: out of the task set ←┘
//! ```
//!
//! A transport's context for a request holds one [`Execution`] and adds what is its own: how data
//! travel, credit, the answer's form. Nothing here sends or posts.

use std::sync::Arc;
use std::time::Instant;

use arrayvec::ArrayVec;
use riser_scsi::access::NoData;
use riser_scsi::command::Command;
use riser_scsi::device::respond_absent;
use riser_scsi::kind::Kind;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::NexusId;
use riser_scsi::opcode::Opcode;
use riser_scsi::step::{
    DataIn, Expected, Request, Response, Status, Step, StepResult, TaskAttribute,
};
use riser_scsi::task::TaskKey;

use crate::pool::{Buffer, Pool};
use crate::srp::{TaskRef, Unit};
use crate::stats::{Account, CDB_TRACED, Course, Stage, Subject};

/// Whether a command may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// At once.
    Now,
    /// After others, which name it when they leave.
    Later,
    /// Never: the task set is full, and the answer TASK SET FULL.
    Full,
}

/// A command under way, of at most `CDB` bytes.
#[derive(Debug)]
pub struct Execution<const CDB: usize> {
    /// The unit, if there is such a one; a command keeps it, whatever becomes of the map.
    pub unit: Option<Arc<Unit>>,
    /// Task attribute.
    pub attribute: TaskAttribute,
    /// The CDB.
    pub cdb: ArrayVec<u8, CDB>,
    /// Lengths of the initiator's buffers.
    pub expected: Expected,
    /// The step that waits for a resource.
    pub step: Option<Step>,
    /// Its data.
    pub buffer: Option<Buffer>,
    /// Task management has ended it; it lingers until the devices let go.
    pub aborted: bool,
    /// Task-management functions that wait until it is gone.
    pub watchers: Vec<TaskRef>,
    /// How long it has been where.
    pub course: Course,
    /// The command of the logical unit.
    command: Option<Command>,
    /// Its key in the unit's task set, while it is there.
    key: Option<TaskKey>,
}

impl<const CDB: usize> Execution<CDB> {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self {
            unit: None,
            attribute: TaskAttribute::Simple,
            cdb: ArrayVec::new(),
            expected: Expected::default(),
            step: None,
            buffer: None,
            aborted: false,
            watchers: Vec::new(),
            course: Course::default(),
            command: None,
            key: None,
        }
    }

    /// Whether it is for a unit.
    #[must_use]
    pub fn is_of(&self, unit: &Arc<Unit>) -> bool {
        self.unit.as_ref().is_some_and(|own| Arc::ptr_eq(own, unit))
    }

    /// Takes in a command for a unit, which goes to an account, or for none. Its CDB is known, and so are
    /// its nexus and its tag there.
    pub fn take_in(
        &mut self,
        addressed: Option<(Arc<Unit>, Arc<Account>)>,
        nexus: NexusId,
        tag: u64,
        now: Instant,
    ) {
        self.unit = addressed.map(|(unit, account)| {
            let cdb = &self.cdb;
            let subject = || Subject {
                tag,
                nexus: nexus.0,
                cdb: cdb.iter().copied().take(CDB_TRACED).collect(),
            };
            self.course.begin(account, subject, now);
            unit
        });
    }

    /// Enters the unit's task set under a name. A command for no unit starts at once.
    pub fn register(&mut self, nexus: NexusId, name: TaskRef, now: Instant) -> Entry {
        self.course.classify(Kind::of(&self.cdb));
        self.course.enter(Stage::Scsi, now);
        let Some(unit) = &self.unit else {
            return Entry::Now;
        };
        let alone = Opcode::concurrency_of(&self.cdb);
        match unit.register(nexus, self.attribute, alone, name) {
            Ok((key, started)) => {
                self.key = Some(key);
                if started { Entry::Now } else { Entry::Later }
            }
            Err(_) => Entry::Full,
        }
    }

    /// Starts the command: its first step. BUSY where no buffer of the pool can ever hold its data.
    pub fn start(&mut self, nexus: NexusId, luns: &[LunId], pool: &Pool, now: Instant) -> Step {
        self.course.enter(Stage::Scsi, now);
        let request = Request {
            nexus,
            cdb: &self.cdb,
            expected: self.expected,
            attribute: self.attribute,
            luns,
        };
        let step = match &self.unit {
            Some(unit) => {
                let (command, step) = unit.lu.start(&request);
                self.command = Some(command);
                step
            }
            None => Step::Respond(respond_absent(&request)),
        };
        if self.buffer_len() as usize > pool.max_buffer() {
            return Step::Respond(self.status_only(Status::Busy));
        }
        step
    }

    /// Tells the command how its last step ended: the next one.
    ///
    /// # Panics
    /// If no command runs.
    pub fn advance(&mut self, result: StepResult, now: Instant) -> Step {
        self.course.enter(Stage::Scsi, now);
        let lu = &self.unit.as_ref().expect("commands have a unit").lu;
        let command = self.command.as_mut().expect("a command runs");
        match &mut self.buffer {
            Some(buffer) => command.advance(lu, result, buffer),
            None => command.advance(lu, result, &mut NoData),
        }
    }

    fn buffer_len(&self) -> u32 {
        self.command.as_ref().map_or(0, Command::buffer_len)
    }

    /// Makes sure of the command's data buffer, if it needs one; `false` without room in the pool.
    pub fn has_buffer(&mut self, pool: &mut Pool) -> bool {
        let len = self.buffer_len();
        if self.buffer.is_none() && len > 0 {
            self.buffer = pool.take(len);
        }
        self.buffer.is_some() || len == 0
    }

    /// Brings the data of a response into the buffer, where they are not there yet: how many bytes
    /// there are for the initiator. `None` without room in the pool.
    pub fn gather(&mut self, pool: &mut Pool, response: &Response, now: Instant) -> Option<u32> {
        let len = response.data_in.len().min(self.expected.data_in);
        if let DataIn::Inline(bytes) = &response.data_in
            && len > 0
        {
            if self.buffer.as_ref().is_none_or(|b| b.len() < len) {
                if let Some(short) = self.buffer.take() {
                    pool.release(short);
                }
                self.buffer = pool.take(len);
            }
            self.buffer.as_ref()?.write(0, &bytes[..len as usize]);
        }
        self.course.answer(response, len, now);
        Some(len)
    }

    /// A response that is a status alone.
    pub fn status_only(&self, status: Status) -> Response {
        Response::status_only(status, self.expected)
    }

    /// Has another name in the task set, where it is there: another channel carries it on.
    pub fn rename(&self, name: TaskRef) {
        if let (Some(key), Some(unit)) = (self.key, &self.unit) {
            unit.rename(key, name);
        }
    }

    /// Leaves the task set: tasks that may start now.
    #[must_use]
    pub fn leave(&mut self) -> Vec<TaskRef> {
        match (self.key.take(), &self.unit) {
            (Some(key), Some(unit)) => unit.remove(key),
            _ => Vec::new(),
        }
    }

    /// Gives everything back: functions that waited for its end.
    #[must_use]
    pub fn finish(&mut self, pool: &mut Pool) -> Vec<TaskRef> {
        debug_assert!(self.key.is_none(), "it has left its task set");
        if let Some(buffer) = self.buffer.take() {
            pool.release(buffer);
        }
        self.course.abandon();
        self.unit = None;
        self.command = None;
        self.step = None;
        self.aborted = false;
        std::mem::take(&mut self.watchers)
    }
}

impl<const CDB: usize> Default for Execution<CDB> {
    fn default() -> Self {
        Self::new()
    }
}
