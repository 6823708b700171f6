//! A SCSI command under way: its unit and its place in the unit's task set, its steps, and the data
//! buffer.
//!
//! ```text
//!   register ──────────────→ may start ──→ start ──→ Step ──→ carried out ──→ advance ──→ Step …
//!      │ with Data-Out         ↑  │                                                     Respond
//!      └→ brought → data_arrived  └→ waits, until another task's `leave` names it          │
//!                                                                                          │
//!   finish: the buffer goes back, waiters are returned     ←── leave: out of the task set ←┘
//! ```
//!
//! Data-Out comes before a command takes its place in the order: it waits for its initiator and for
//! memory without keeping others from their turn. The checks of the command run when it starts, so
//! they see what happened while its data were on their way.
//!
//! Where the unit or the initiator has limits ([`crate::qos`]), a command waits for them even
//! before that, with or without Data-Out.
//!
//! A fabric's context for a request holds one [`Execution`] and adds what is its own: how data
//! travel, credit, the form of the answer. Nothing here sends or posts.

use std::sync::Arc;
use std::time::Instant;

use arrayvec::ArrayVec;
use riser_scsi::access::NoData;
use riser_scsi::attention::Attention;
use riser_scsi::device_server::{Command, Request, respond_absent};
use riser_scsi::lun::LunId;
use riser_scsi::nexus::NexusId;
use riser_scsi::opcode::Opcode;
use riser_scsi::sense::{AdditionalSense, Sense, SenseFormat};
use riser_scsi::step::{
    DataIn, DataOut, Expected, Response, Status, Step, StepResult, TaskAttribute,
};
use riser_scsi::task::{NewTask, TaskKey};

use super::{AddressedUnit, StaleLun, TaskRef, TaskRefused, Toll, Unit, UnitIdx};
use crate::pool::{Buffer, Claim, Owner, Pool};
use crate::qos::{Cost, Limiter};
use crate::stats::{CDB_TRACED, CommandTimer, Stage, Throttle, TraceKey};

/// Maximum time for the data of one command, in data timeouts, as long as data of others come. All
/// pieces after the first have that together, since others may wait for the command.
pub const MAX_DATA_TIMEOUTS: u32 = 8;

/// Maximum length of a CDB that is kept, in bytes. No command of a unit is longer.
pub const MAX_CDB: usize = 32;

/// Length of a VPD page's header in bytes (SPC-4 7.8.1).
const VPD_HEADER: u32 = 4;

/// Outcome of a command's entry into its task set: when it may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// At once: no task holds it back, or there is no unit.
    Now,
    /// After others, which name it when they leave.
    Later,
    /// Never: the command completes with this status.
    Refused(Status),
    /// After its data or descriptors: [`Execution::data_arrived`] returns when.
    Gather,
    /// As [`Entry::Gather`], after [`Execution::pass_limits`].
    Limited,
}

/// Descriptors of a command's data, besides those that came with it and lie in its context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Some are to be fetched from the initiator, even if there is no Data-Out.
    pub external: bool,
    /// Some lie in the pool.
    pub pooled: bool,
}

/// Data or descriptors that a command gets from its initiator before it takes its place in the
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Early {
    /// None, or none are left to come.
    #[default]
    None,
    /// Its data, or descriptors of them, are to come.
    Awaited(Option<DataOut>),
    /// Its data have come, or could not.
    Arrived(StepResult),
}

/// A command under way.
#[derive(Debug)]
pub struct Execution {
    /// The unit, if there is one. A command keeps it when the map changes.
    pub unit: Option<Arc<Unit>>,
    /// The LUN that leads to it.
    lun: LunId,
    /// The LUN is read-only.
    read_only: bool,
    /// Present if the initiator may take the LUN for another unit: see [`LunMap`](super::LunMap).
    stale: Option<StaleLun>,
    /// The answer names the unit.
    names_unit: bool,
    /// Task attribute, from which its place in the order follows.
    pub attribute: TaskAttribute,
    /// CDB, cut off at [`MAX_CDB`] bytes.
    pub cdb: ArrayVec<u8, MAX_CDB>,
    /// Its row, looked up once.
    opcode: &'static Opcode,
    /// Lengths of the initiator's buffers.
    pub expected: Expected,
    /// The step that waits for a resource.
    pub step: Option<Step>,
    /// Data buffer, from the grant by the pool to the end of the command.
    pub buffer: Option<Buffer>,
    /// Task management has ended it, and a device still uses its buffer.
    pub aborted: bool,
    /// Task-management functions that wait until it is gone.
    pub watchers: Vec<TaskRef>,
    /// Times of its stages.
    pub timer: CommandTimer,
    early: Early,
    /// The command of the logical unit.
    command: Option<Command>,
    /// Its key in the unit's task set, while it is there.
    key: Option<TaskKey>,
    /// Another nexus had ended it when it left the task set.
    was_cleared: bool,
    /// Its name, where its answer had to wait when it left the task set: see [`Unit::note_left`].
    left: Option<TaskRef>,
    /// Its own nexus has ended it by name, which the task set does not know.
    is_renounced: bool,
    /// The initiator's limits, until it has paid.
    limiter: Option<Arc<Limiter>>,
    /// It waits for limits.
    limited: Option<LimitWait>,
}

/// A command's entry among those that wait for limits.
#[derive(Clone, Copy, Debug)]
struct LimitWait {
    nexus: NexusId,
    name: TaskRef,
    is_write: bool,
}

impl Execution {
    /// Makes the execution of an idle context.
    #[must_use]
    pub fn new() -> Self {
        Self {
            unit: None,
            lun: LunId::ZERO,
            read_only: false,
            stale: None,
            names_unit: false,
            attribute: TaskAttribute::Simple,
            cdb: ArrayVec::new(),
            opcode: Opcode::of(&[]),
            expected: Expected::default(),
            step: None,
            buffer: None,
            aborted: false,
            watchers: Vec::new(),
            timer: CommandTimer::default(),
            early: Early::None,
            command: None,
            key: None,
            was_cleared: false,
            left: None,
            is_renounced: false,
            limiter: None,
            limited: None,
        }
    }

    /// Whether it is for a unit.
    #[must_use]
    pub fn is_of(&self, unit: &Arc<Unit>) -> bool {
        self.unit.as_ref().is_some_and(|own| Arc::ptr_eq(own, unit))
    }

    /// Whether it is for one of these units.
    #[must_use]
    pub fn is_of_any(&self, units: &[Arc<Unit>]) -> bool {
        units.iter().any(|unit| self.is_of(unit))
    }

    /// Keeps the beginning of a CDB, at most [`MAX_CDB`] bytes.
    pub fn set_cdb(&mut self, cdb: &[u8], additional: &[u8]) {
        self.cdb.clear();
        for part in [cdb, additional] {
            let len = part.len().min(self.cdb.remaining_capacity());
            let taken = self.cdb.try_extend_from_slice(&part[..len]);
            taken.expect("no more than there is room for");
        }
    }

    /// Takes in a command, whose CDB is set already. `tag` is the initiator's.
    pub fn take_in(
        &mut self,
        addressed: Option<AddressedUnit>,
        nexus: NexusId,
        tag: u64,
        now: Instant,
    ) {
        self.opcode = Opcode::of(&self.cdb);
        // Before anything can refuse the command: its context has the kind of the previous one.
        self.timer.classify(self.opcode.kind);
        self.names_unit = false;
        let Some(addressed) = addressed else {
            self.lun = LunId::ZERO;
            self.read_only = false;
            self.limiter = None;
            self.stale = None;
            self.unit = None;
            return;
        };
        self.lun = addressed.lun;
        self.read_only = addressed.read_only;
        self.limiter = addressed.limiter;
        self.stale = addressed.stale;
        self.unit = Some(addressed.unit);
        let cdb = &self.cdb;
        let subject = || TraceKey {
            tag,
            nexus: nexus.0,
            cdb: cdb.iter().copied().take(CDB_TRACED).collect(),
        };
        self.timer.begin(addressed.account, subject, now);
    }

    /// Returns what the command has to pay before it goes on, once. `None` where nothing limits it,
    /// or where it is going to be refused: an initiator that may not write must not use up what
    /// others may.
    pub fn toll(&mut self, nexus: NexusId) -> Option<Toll> {
        let initiator = self.limiter.take();
        let unit = self.unit.as_ref()?;
        if self.stale.is_some() || (!unit.limits.is_active() && initiator.is_none()) {
            return None;
        }
        let block = unit.lu.config().block_size.bytes();
        let volume = self.opcode.volume(&self.cdb, block)?;
        if unit.lu.is_refused(&self.request(nexus, &[])) {
            return None;
        }
        // The transport's length may be less than the CDB's, and bounds what is sent.
        let bytes = match volume.is_sent {
            true => volume.bytes.min(self.expected.data_out.into()),
            false => volume.bytes,
        };
        let cost = Cost {
            is_write: volume.is_write,
            bytes,
        };
        let of_unit = Arc::clone(&unit.limits);
        Some(Toll::new(unit.index, cost, initiator, of_unit))
    }

    /// Ends the wait for limits. Its data come next, or [`Execution::data_arrived`] follows at
    /// once.
    pub fn pass_limits(&mut self, now: Instant) {
        self.timer.enter(Stage::Scsi, now);
        self.end_limited();
    }

    fn end_limited(&mut self) {
        if let (Some(limited), Some(unit)) = (self.limited.take(), &self.unit) {
            unit.end_limited(limited.nexus, limited.name, limited.is_write);
        }
    }

    /// Enters the unit's task set under a name. A command for no unit starts at once. `limited` is
    /// present if the command waits for limits first: to write or to read.
    pub fn register(
        &mut self,
        nexus: NexusId,
        name: TaskRef,
        descriptors: Descriptors,
        limited: Option<bool>,
        pool: &Pool,
        now: Instant,
    ) -> Entry {
        self.timer.enter(Stage::Scsi, now);
        let Some(unit) = &self.unit else {
            if descriptors.external {
                self.early = Early::Awaited(None);
                return Entry::Gather;
            }
            return Entry::Now;
        };
        // Data that no buffer of the pool can ever hold are not awaited: the command is refused
        // when it starts, as if it had none.
        let data = unit.lu.data_out(&self.request(nexus, &[]));
        let data = data.filter(|data| data.buffer_len as usize <= pool.max_buffer());
        let new = NewTask {
            attribute: self.attribute,
            footprint: self.opcode.footprint(&self.cdb),
            awaits_data: descriptors.external || data.is_some() || limited.is_some(),
        };
        let keeps_memory = data.is_some() || descriptors.external || descriptors.pooled;
        match unit.register(nexus, new, (name, self.lun), keeps_memory, limited) {
            Ok((key, started)) => {
                self.key = Some(key);
                match started {
                    // It takes its place in the order when its data have come, not here: it would
                    // keep others from their turn for as long as its initiator likes.
                    _ if new.awaits_data => {
                        self.early = Early::Awaited(data);
                        let waits = |is_write| LimitWait {
                            nexus,
                            name,
                            is_write,
                        };
                        self.limited = limited.map(waits);
                        if self.limited.is_none() {
                            return Entry::Gather;
                        }
                        self.timer.enter(Stage::Limits, now);
                        Entry::Limited
                    }
                    true => Entry::Now,
                    false => {
                        self.timer.enter(Stage::Order, now);
                        Entry::Later
                    }
                }
            }
            Err(TaskRefused::Full(reason)) => {
                if reason == Throttle::Limit {
                    self.timer.limit();
                }
                Entry::Refused(Status::TaskSetFull)
            }
            // INQUIRY and the like touch no medium, and find the unit.
            Err(TaskRefused::Busy) if self.opcode.is_free_of_attention() && !new.awaits_data => {
                Entry::Now
            }
            Err(TaskRefused::Busy) => Entry::Refused(Status::Busy),
        }
    }

    /// Whether it is not in the order yet: [`Execution::data_arrived`] is to come.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        matches!(self.early, Early::Awaited(_))
    }

    /// Whether commands of other initiators wait in the order of its unit for this command, which has
    /// its place there.
    #[must_use]
    pub fn holds_others(&self) -> bool {
        match (self.key, &self.unit) {
            (Some(key), Some(unit)) => unit.holds_others(key),
            _ => false,
        }
    }

    /// Returns the length of the Data-Out that comes before it takes its place in the order, in
    /// bytes.
    #[must_use]
    pub fn early_data(&self) -> Option<u32> {
        match self.early {
            Early::Awaited(Some(data)) => Some(data.len),
            _ => None,
        }
    }

    /// Its data or descriptors have come, or failed to. Returns whether it may start at once, and
    /// the other tasks that may.
    ///
    /// # Panics
    /// If it does not wait for that.
    #[must_use]
    pub fn data_arrived(&mut self, result: StepResult, now: Instant) -> (bool, Vec<TaskRef>) {
        assert!(self.is_gathering(), "data come once");
        self.timer.enter(Stage::Scsi, now);
        self.early = match self.early {
            // No data were to come: what the unit says at the start decides whether it takes any.
            Early::Awaited(None) if result == StepResult::Done => Early::None,
            _ => Early::Arrived(result),
        };
        match (self.key, &self.unit) {
            (Some(key), Some(unit)) => {
                let (may_start, others) = unit.data_arrived(key);
                if !may_start {
                    self.timer.enter(Stage::Order, now);
                }
                (may_start, others)
            }
            _ => (true, Vec::new()),
        }
    }

    fn request<'a>(&'a self, nexus: NexusId, luns: &'a [LunId]) -> Request<'a> {
        Request {
            nexus,
            cdb: &self.cdb,
            opcode: self.opcode,
            expected: self.expected,
            attribute: self.attribute,
            luns,
            read_only: self.read_only,
        }
    }

    /// Starts the command; returns its first step that is not done yet. A command whose data no
    /// buffer of the pool can ever hold is refused.
    pub fn start(&mut self, nexus: NexusId, luns: &[LunId], pool: &Pool, now: Instant) -> Step {
        self.timer.enter(Stage::Scsi, now);
        // Field by field, and not by `request`: the command is made where it stays.
        let request = Request {
            nexus,
            cdb: &self.cdb,
            opcode: self.opcode,
            expected: self.expected,
            attribute: self.attribute,
            luns,
            read_only: self.read_only,
        };
        let step = match &self.unit {
            Some(unit) if self.stale.is_some() && !self.opcode.is_free_of_attention() => {
                let sense = Attention::LunsChanged.sense();
                let format = unit.lu.sense_format();
                Step::Respond(Response::check_condition(&sense, format, self.expected))
            }
            Some(unit) => unit.lu.start_in(&request, &mut self.command),
            None => Step::Respond(respond_absent(&request)),
        };
        let early = std::mem::take(&mut self.early);
        match (step, early) {
            // The first step was done before the command took its place in the order.
            (Step::ReceiveData { .. }, Early::Arrived(result)) => self.advance(result, now),
            (Step::ReceiveData { .. } | Step::Block(_), _)
                if self.buffer_len() as usize > pool.max_buffer() =>
            {
                Step::Respond(self.too_large())
            }
            (step, _) => step,
        }
    }

    fn too_large(&self) -> Response {
        let sense = Sense::illegal(AdditionalSense::INSUFFICIENT_RESOURCES);
        let unit = self.unit.as_ref();
        let format = unit.map_or(SenseFormat::Fixed, |unit| unit.lu.sense_format());
        Response::check_condition(&sense, format, self.expected)
    }

    /// Takes the result of the last step; returns the next one.
    ///
    /// # Panics
    /// If no command runs.
    pub fn advance(&mut self, result: StepResult, now: Instant) -> Step {
        self.timer.enter(Stage::Scsi, now);
        let lu = &self.unit.as_ref().expect("commands have a unit").lu;
        let command = self.command.as_mut().expect("a command runs");
        match &mut self.buffer {
            Some(buffer) => command.advance(lu, result, buffer),
            None => command.advance(lu, result, &mut NoData),
        }
    }

    fn buffer_len(&self) -> u32 {
        match self.early {
            Early::Awaited(data) => data.map_or(0, |data| data.buffer_len),
            _ => self.command.as_ref().map_or(0, Command::buffer_len),
        }
    }

    /// Returns the unit that its memory is charged to.
    #[must_use]
    pub fn charged_unit(&self) -> Option<UnitIdx> {
        self.unit.as_ref().map(|unit| unit.index)
    }

    fn claim(&self, owner: Owner) -> Claim {
        let unit = self.charged_unit().map(|unit| unit.0);
        Claim { owner, unit }
    }

    /// Gets the command's data buffer, if it needs one; `false` without room in the pool.
    pub fn has_buffer(&mut self, pool: &mut Pool, owner: Owner) -> bool {
        let len = self.buffer_len();
        if self.buffer.is_none() && len > 0 {
            let claim = self.claim(owner);
            self.buffer = match self.is_gathering() {
                true => pool.grant_to_gather(claim, len),
                false => pool.grant(claim, len),
            };
        }
        self.buffer.is_some() || len == 0
    }

    /// Waits for the buffer that [`Execution::has_buffer`] or [`Execution::gather`] could not get.
    /// The step that needs it is in `step`.
    pub fn await_buffer(&mut self, pool: &mut Pool, owner: Owner, now: Instant) {
        self.timer.enter(Stage::Memory, now);
        let claim = self.claim(owner);
        if self.is_held_up() {
            pool.wait_started(claim, self.buffer_len());
        } else {
            pool.wait(claim);
        }
    }

    /// Takes a part of the pool's reserve, if the command has started and waits for memory: others
    /// may wait for its end and hold memory meanwhile. `false` if not, or while another command of
    /// the unit has one.
    pub fn take_reserve(&mut self, pool: &mut Pool, owner: Owner) -> bool {
        if self.is_held_up() {
            self.buffer = pool.grant_reserve(self.claim(owner), self.buffer_len());
            return self.buffer.is_some();
        }
        false
    }

    /// Whether it has started, is not answered yet, and waits for memory.
    fn is_held_up(&self) -> bool {
        let runs = matches!(
            self.step,
            Some(Step::ReceiveData { .. } | Step::SendData { .. } | Step::Block(_))
        );
        runs && self.buffer.is_none() && !self.is_gathering()
    }

    /// Brings the data of a response into the buffer, where they are not there yet; returns the
    /// number of bytes for the initiator. `None` without room in the pool.
    pub fn gather(
        &mut self,
        pool: &mut Pool,
        owner: Owner,
        response: &Response,
        now: Instant,
    ) -> Option<u32> {
        let len = response.data_in.len().min(self.expected.data_in);
        if let DataIn::Inline(bytes) = &response.data_in
            && len > 0
        {
            if self.buffer.as_ref().is_none_or(|b| b.len() < len) {
                if let Some(short) = self.buffer.take() {
                    pool.release(short);
                }
                self.buffer = pool.grant(self.claim(owner), len);
            }
            self.buffer.as_ref()?.write(0, &bytes[..len as usize]);
        }
        self.timer.answer(response, len, now);
        // A header alone names nothing.
        let has_page = response.status == Status::Good && len > VPD_HEADER;
        self.names_unit = has_page && self.opcode.asks_for_names(&self.cdb);
        Some(len)
    }

    /// The answer has been sent. Until then the initiator does not know the unit that the answer
    /// names, and commands that it has sent with this one may be for the unit before.
    pub fn arrive(&mut self, now: Instant) {
        self.timer.arrive(now);
        if let Some(stale) = self.stale.take().filter(|_| self.names_unit) {
            stale.clear();
        }
    }

    /// Returns a response that is a status alone.
    pub fn status_only(&self, status: Status) -> Response {
        Response::status_only(status, self.expected)
    }

    /// Renames it in the task set, if it is there: another connection carries it on.
    pub fn rename(&mut self, name: TaskRef) {
        if let (Some(key), Some(unit)) = (self.key, &self.unit) {
            unit.rename(key, name);
        }
        if let (Some(left), Some(unit)) = (&mut self.left, &self.unit) {
            unit.rename_left(*left, name);
            *left = name;
        }
    }

    /// Notes that it is about to leave the task set while its answer waits, so that functions of
    /// its nexus find it.
    pub fn note_left(&mut self, nexus: NexusId, name: TaskRef) {
        if let (None, Some(unit)) = (self.left, &self.unit) {
            unit.note_left(nexus, (name, self.lun));
            self.left = Some(name);
        }
    }

    /// Leaves the task set; returns the tasks that may start now.
    #[must_use]
    pub fn leave(&mut self) -> Vec<TaskRef> {
        self.end_limited();
        let (Some(key), Some(unit)) = (self.key.take(), &self.unit) else {
            return Vec::new();
        };
        let (was_cleared, started) = unit.remove(key);
        self.was_cleared = was_cleared;
        started
    }

    /// Notes that its own nexus ends it, and expects no status from then on, even if others end it
    /// too.
    pub fn renounce(&mut self) {
        self.is_renounced = true;
    }

    /// Whether another nexus has ended it, so that its initiator has to be answered. It may have
    /// left the task set before its connection is notified, or be ended by several.
    #[must_use]
    pub fn is_cleared(&self) -> bool {
        if self.is_renounced {
            return false;
        }
        match (self.key, self.left, &self.unit) {
            (Some(key), _, Some(unit)) => unit.is_cleared(key),
            (None, Some(name), Some(unit)) => self.was_cleared && !unit.is_left_ended(name),
            _ => self.was_cleared,
        }
    }

    /// Whether its own nexus has ended it since it left the task set.
    #[must_use]
    pub fn is_left_ended(&self) -> bool {
        match (self.left, &self.unit) {
            (Some(name), Some(unit)) => unit.is_left_ended(name),
            _ => false,
        }
    }

    /// Gives its data back, since it ends with a status alone and no device uses them. Returns the
    /// functions that waited for its end: they do not wait for the initiator to take the answer.
    #[must_use]
    pub fn interrupt(&mut self, pool: &mut Pool) -> Vec<TaskRef> {
        if let Some(buffer) = self.buffer.take() {
            pool.release(buffer);
        }
        self.early = Early::None;
        self.command = None;
        self.step = None;
        self.aborted = false;
        std::mem::take(&mut self.watchers)
    }

    /// Gives everything back; returns the functions that waited for its end.
    #[must_use]
    pub fn finish(&mut self, pool: &mut Pool) -> Vec<TaskRef> {
        debug_assert!(self.key.is_none(), "it has left its task set");
        if let Some(buffer) = self.buffer.take() {
            pool.release(buffer);
        }
        if let (Some(name), Some(unit)) = (self.left.take(), &self.unit) {
            unit.forget_left(name);
        }
        self.timer.abandon();
        self.limiter = None;
        self.unit = None;
        self.stale = None;
        self.early = Early::None;
        self.command = None;
        self.step = None;
        self.aborted = false;
        self.was_cleared = false;
        self.is_renounced = false;
        std::mem::take(&mut self.watchers)
    }
}

impl Default for Execution {
    fn default() -> Self {
        Self::new()
    }
}
