//! An active SCSI command: its unit and position in the task set, its steps, and the data buffer.
//!
//! ```text
//!   register ──────────────→ may start ──→ start ──→ Step ──→ executed ──→ advance ──→ Step …
//!      │ with Data-Out         ↑  │                                                     Respond
//!      └→ data_arrived ────────┘  └→ waits, until another task leaves the task set        │
//!                                                                                         │
//!   finish: releases the buffer, returns watchers        ←── leave_task_set ←─────────────┘
//! ```
//!
//! A command receives its Data-Out before it is added to the order, so that it does not block other
//! commands while waiting for its initiator and for memory. It is validated when it starts, so any
//! change during the data transfer is taken into account.
//!
//! If the unit or the initiator has limits ([`crate::qos`]), a command waits for them before
//! receiving Data-Out.
//!
//! The request context of a fabric contains an [`Execution`], together with fabric-specific state:
//! data transfer, credits, and response format. This module does not send or post anything.

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

use super::{AddressedUnit, ExpectedUnit, TaskRef, TaskRefused, Toll, Unit, UnitIdx};
use crate::pool::{Buffer, Claim, Owner, Pool};
use crate::qos::{Cost, Limiter};
use crate::stats::{CDB_TRACED, CommandTimer, Stage, Throttle, TraceKey};

/// Maximum time for the data of a single command, in multiples of the data timeout, while other
/// data is received. This applies to the total time for all pieces after the first one, because
/// other commands may be waiting for this command.
pub const MAX_DATA_TIMEOUTS: u32 = 8;

/// Maximum CDB length to store, in bytes. Units do not support longer commands.
pub const MAX_CDB: usize = 32;

/// Length of a VPD page header in bytes (SPC-4 7.8.1).
const VPD_HEADER: u32 = 4;

/// Result of adding a command to its task set: when it may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Immediately: no other task blocks it, or there is no unit.
    Now,
    /// After other tasks. One of them will return this command when it leaves the task set.
    Later,
    /// Never: the command completes with this status.
    Refused(Status),
    /// After receiving its data or descriptors. [`Execution::data_arrived`] returns whether it may
    /// start then.
    Gather,
    /// Same as [`Entry::Gather`], after [`Execution::pass_limits`].
    Limited,
}

/// Data descriptors of a command, excluding descriptors stored in its context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Some descriptors must be read from the initiator, even if there is no Data-Out.
    pub external: bool,
    /// Some descriptors are stored in the pool.
    pub pooled: bool,
}

/// Data or descriptors that a command receives from its initiator before it is added to the order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Early {
    /// Not required, or not pending any more.
    #[default]
    None,
    /// Waiting for data or for its descriptors.
    Awaited(Option<DataOut>),
    /// The data was received, or failed to be received.
    Arrived(StepResult),
}

/// An active command.
#[derive(Debug)]
pub struct Execution {
    /// The unit, if any. This does not change if the LUN map is updated.
    pub unit: Option<Arc<Unit>>,
    /// LUN of the unit.
    lun: LunId,
    /// The LUN is read-only.
    read_only: bool,
    /// The initiator may expect a different unit at this LUN. See [`LunMap`](super::LunMap).
    is_stale: bool,
    /// The unit that the initiator expects, if the response may identify the unit.
    expected_unit: Option<ExpectedUnit>,
    /// Task attribute, which determines its position in the order.
    pub attribute: TaskAttribute,
    /// CDB, truncated to [`MAX_CDB`] bytes.
    pub cdb: ArrayVec<u8, MAX_CDB>,
    /// Opcode of the CDB, cached to avoid lookups.
    opcode: &'static Opcode,
    /// Length of the initiator's buffers.
    pub expected: Expected,
    /// Step waiting for a resource.
    pub step: Option<Step>,
    /// Data buffer, from its allocation until the command completes.
    pub buffer: Option<Buffer>,
    /// Aborted by a task management function, but a device is still using the buffer.
    pub aborted: bool,
    /// Task management functions waiting for this command to complete.
    pub watchers: Vec<TaskRef>,
    /// Measures the time spent in each stage.
    pub timer: CommandTimer,
    early: Early,
    /// The command on the logical unit.
    command: Option<Command>,
    /// Key in the task set of the unit, until the command leaves it.
    key: Option<TaskKey>,
    /// The command was aborted by another nexus before it left the task set.
    was_cleared: bool,
    /// Identifier of the command if it left the task set while its response was delayed. See
    /// [`Unit::note_left`].
    left: Option<TaskRef>,
    /// Aborted by its own nexus with a reference to the task, without notifying the task set.
    is_renounced: bool,
    /// Limits of the initiator, until the command was booked.
    limiter: Option<Arc<Limiter>>,
    /// The command is waiting for limits.
    limited: Option<LimitWait>,
}

/// Entry of a command waiting for limits.
#[derive(Clone, Copy, Debug)]
struct LimitWait {
    nexus: NexusId,
    name: TaskRef,
    is_write: bool,
}

impl Execution {
    /// Creates an idle execution context.
    #[must_use]
    pub fn new() -> Self {
        Self {
            unit: None,
            lun: LunId::ZERO,
            read_only: false,
            is_stale: false,
            expected_unit: None,
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

    /// Returns whether this command is for `unit`.
    #[must_use]
    pub fn is_of(&self, unit: &Arc<Unit>) -> bool {
        self.unit.as_ref().is_some_and(|own| Arc::ptr_eq(own, unit))
    }

    /// Returns whether this command is for any of these units.
    #[must_use]
    pub fn is_of_any(&self, units: &[Arc<Unit>]) -> bool {
        units.iter().any(|unit| self.is_of(unit))
    }

    /// Stores the CDB, truncated to [`MAX_CDB`] bytes.
    pub fn set_cdb(&mut self, cdb: &[u8], additional: &[u8]) {
        self.cdb.clear();
        for part in [cdb, additional]
            .into_iter()
            .filter(|part| !part.is_empty())
        {
            let len = part.len().min(self.cdb.remaining_capacity());
            let taken = self.cdb.try_extend_from_slice(&part[..len]);
            taken.expect("no more than there is room for");
        }
    }

    /// Initializes a command after its CDB was set. `tag` is the initiator's tag.
    pub fn take_in(
        &mut self,
        addressed: Option<AddressedUnit>,
        nexus: NexusId,
        tag: u64,
        now: Instant,
    ) {
        self.opcode = Opcode::of(&self.cdb);
        // Do this first, because the command may be refused at any point and its context still has
        // the kind of the previous command.
        self.timer.classify(self.opcode.kind);
        let Some(addressed) = addressed else {
            self.lun = LunId::ZERO;
            self.read_only = false;
            self.limiter = None;
            self.is_stale = false;
            self.expected_unit = None;
            self.unit = None;
            return;
        };
        self.lun = addressed.lun;
        self.read_only = addressed.read_only;
        self.limiter = addressed.limiter;
        self.is_stale = addressed.is_stale;
        self.expected_unit = addressed.expected_unit;
        self.unit = Some(addressed.unit);
        let cdb = &self.cdb;
        let subject = || TraceKey {
            tag,
            nexus: nexus.0,
            cdb: cdb.iter().copied().take(CDB_TRACED).collect(),
        };
        self.timer.start(addressed.account, subject, now);
    }

    /// Returns the limits that the command must wait for, only once. Returns `None` if there are no
    /// limits, or if the command will be refused: an initiator without write access must not use up
    /// the capacity for other initiators.
    pub fn toll(&mut self, nexus: NexusId) -> Option<Toll> {
        let initiator = self.limiter.take();
        let unit = self.unit.as_ref()?;
        if self.is_stale || (!unit.limits.is_active() && initiator.is_none()) {
            return None;
        }
        let block = unit.lu.config().block_size.bytes();
        let volume = self.opcode.volume(&self.cdb, block)?;
        if unit.lu.is_refused(&self.request(nexus, &[])) {
            return None;
        }
        // The transport length may be shorter than the CDB length, and limits the data to be sent.
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

    /// Called when the limits allow the command to continue. It receives its data next, or
    /// [`Execution::data_arrived`] is called immediately.
    pub fn pass_limits(&mut self, now: Instant) {
        self.timer.enter_stage(Stage::Scsi, now);
        self.end_limited();
    }

    fn end_limited(&mut self) {
        if let (Some(limited), Some(unit)) = (self.limited.take(), &self.unit) {
            unit.end_limited(limited.nexus, limited.name, limited.is_write);
        }
    }

    /// Adds the command to the task set of its unit. A command without a unit starts immediately.
    /// `limited` is set if the command must wait for limits first. It is true for a write and false
    /// for a read.
    pub fn register(
        &mut self,
        nexus: NexusId,
        name: TaskRef,
        descriptors: Descriptors,
        limited: Option<bool>,
        pool: &Pool,
        now: Instant,
    ) -> Entry {
        self.timer.enter_stage(Stage::Scsi, now);
        let Some(unit) = &self.unit else {
            if descriptors.external {
                self.early = Early::Awaited(None);
                return Entry::Gather;
            }
            return Entry::Now;
        };
        // We don't wait for data that exceeds the maximum buffer size of the pool. The command is
        // refused when it starts, in the same way as a command without data.
        let data = unit.lu.data_out(&self.request(nexus, &[]));
        let data = data.filter(|data| data.buffer_len as usize <= pool.max_buffer());
        let new = NewTask {
            attribute: self.opcode.task_attribute(self.attribute),
            footprint: self.opcode.footprint(&self.cdb),
            awaits_data: descriptors.external || data.is_some() || limited.is_some(),
        };
        let keeps_memory = data.is_some() || descriptors.external || descriptors.pooled;
        match unit.register(nexus, new, (name, self.lun), keeps_memory, limited) {
            Ok((key, started)) => {
                self.key = Some(key);
                match started {
                    // Don't add it to the order until its data was received, because it would block
                    // other commands for as long as its initiator chooses.
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
                        self.timer.enter_stage(Stage::Limits, now);
                        Entry::Limited
                    }
                    true => Entry::Now,
                    false => {
                        self.timer.enter_stage(Stage::Order, now);
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
            // Commands such as INQUIRY don't access the medium, and are used to discover the unit.
            Err(TaskRefused::Busy) if self.opcode.is_free_of_attention() && !new.awaits_data => {
                Entry::Now
            }
            Err(TaskRefused::Busy) => Entry::Refused(Status::Busy),
        }
    }

    /// Returns whether the command is not in the order yet, because [`Execution::data_arrived`] was
    /// not called.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        matches!(self.early, Early::Awaited(_))
    }

    /// Returns whether commands of other initiators are waiting for this command, due to its
    /// position in the order of the unit.
    #[must_use]
    pub fn holds_others(&self) -> bool {
        match (self.key, &self.unit) {
            (Some(key), Some(unit)) => unit.holds_others(key),
            _ => false,
        }
    }

    /// Returns the length of the Data-Out to be received before the command is added to the order,
    /// in bytes.
    #[must_use]
    pub fn early_data(&self) -> Option<u32> {
        match self.early {
            Early::Awaited(Some(data)) => Some(data.len),
            _ => None,
        }
    }

    /// Called when the data or descriptors were received or this failed. Returns whether the
    /// command may start immediately, and other tasks that may start.
    ///
    /// # Panics
    /// Panics if the command is not waiting for data or descriptors.
    #[must_use]
    pub fn data_arrived(&mut self, result: StepResult, now: Instant) -> (bool, Vec<TaskRef>) {
        assert!(self.is_gathering(), "data come once");
        self.timer.enter_stage(Stage::Scsi, now);
        self.early = match self.early {
            // No data was expected. The unit decides when the command starts whether it requires
            // data.
            Early::Awaited(None) if result == StepResult::Done => Early::None,
            _ => Early::Arrived(result),
        };
        match (self.key, &self.unit) {
            (Some(key), Some(unit)) => {
                let (may_start, others) = unit.data_arrived(key);
                if !may_start {
                    self.timer.enter_stage(Stage::Order, now);
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

    /// Starts the command, and returns its first step that is not done yet. A command is refused if
    /// its data exceeds the maximum buffer size of the pool.
    pub fn start(&mut self, nexus: NexusId, luns: &[LunId], pool: &Pool, now: Instant) -> Step {
        self.timer.enter_stage(Stage::Scsi, now);
        // Set each field instead of using `request`, so that the command is constructed in place.
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
            Some(unit) if self.is_stale && !self.opcode.is_free_of_attention() => {
                let sense = Attention::LunsChanged.sense();
                let format = unit.lu.sense_format();
                Step::Respond(Response::check_condition(&sense, format, self.expected))
            }
            Some(unit) => unit.lu.start_in(&request, &mut self.command),
            None => Step::Respond(respond_absent(&request)),
        };
        let early = std::mem::take(&mut self.early);
        match (step, early) {
            // The first step was completed before the command was added to the order.
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

    /// Processes the result of the last step, and returns the next step.
    ///
    /// # Panics
    /// Panics if there is no active command.
    pub fn advance(&mut self, result: StepResult, now: Instant) -> Step {
        self.timer.enter_stage(Stage::Scsi, now);
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

    /// Returns the unit charged for the memory.
    #[must_use]
    pub fn charged_unit(&self) -> Option<UnitIdx> {
        self.unit.as_ref().map(|unit| unit.index)
    }

    fn claim(&self, owner: Owner) -> Claim {
        let unit = self.charged_unit().map(|unit| unit.0);
        Claim { owner, unit }
    }

    /// Allocates the data buffer of the command if required. Returns `false` if no memory is
    /// available.
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

    /// Waits for a buffer that [`Execution::has_buffer`] or [`Execution::gather`] could not
    /// allocate. `step` contains the step that requires it.
    pub fn await_buffer(&mut self, pool: &mut Pool, owner: Owner, now: Instant) {
        self.timer.enter_stage(Stage::Memory, now);
        let claim = self.claim(owner);
        if self.is_held_up() {
            pool.wait_started(claim, self.buffer_len());
        } else {
            pool.wait(claim);
        }
    }

    /// Allocates memory from the pool's reserve if the command has started and is waiting for
    /// memory, because other commands may be waiting for it while using memory. Returns `false` if
    /// this is not the case, or while another command of the unit is using the reserve.
    pub fn take_reserve(&mut self, pool: &mut Pool, owner: Owner) -> bool {
        if self.is_held_up() {
            self.buffer = pool.grant_reserve(self.claim(owner), self.buffer_len());
            return self.buffer.is_some();
        }
        false
    }

    /// Returns whether the command has started, has no response yet, and is waiting for memory.
    fn is_held_up(&self) -> bool {
        let runs = matches!(
            self.step,
            Some(Step::ReceiveData { .. } | Step::SendData { .. } | Step::Block(_))
        );
        runs && self.buffer.is_none() && !self.is_gathering()
    }

    /// Copies the response data to the buffer, if it is not there already. Returns the number of
    /// bytes to send to the initiator, or `None` if no memory is available.
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
        self.timer.record_response(response, len, now);
        // A header without any data doesn't identify the unit.
        let has_page = response.status == Status::Good && len > VPD_HEADER;
        match &self.expected_unit {
            Some(expected) if has_page => expected.begin_identification(),
            _ => self.expected_unit = None,
        }
        Some(len)
    }

    /// Called when the response was sent or lost. Until it was sent, the initiator does not know the
    /// unit identified by the response, and other commands in flight may be intended for the
    /// previous unit.
    pub fn arrive(&mut self, now: Instant, was_sent: bool) {
        self.timer.arrive(now);
        if let Some(expected) = self.expected_unit.take().filter(|_| was_sent) {
            expected.complete_identification();
        }
    }

    /// Returns a response with this status, without data.
    pub fn status_only(&self, status: Status) -> Response {
        Response::status_only(status, self.expected)
    }

    /// Changes the identifier in the task set, because the command was reassigned to another
    /// connection.
    pub fn rename(&mut self, name: TaskRef) {
        if let (Some(key), Some(unit)) = (self.key, &self.unit) {
            unit.rename(key, name);
        }
        if let (Some(left), Some(unit)) = (&mut self.left, &self.unit) {
            unit.rename_left(*left, name);
            *left = name;
        }
    }

    /// Notes that the command is about to leave the task set while its response is delayed. This
    /// ensures that functions of the nexus still find it.
    pub fn note_left(&mut self, nexus: NexusId, name: TaskRef) {
        if let (None, Some(unit)) = (self.left, &self.unit) {
            unit.note_left(nexus, (name, self.lun));
            self.left = Some(name);
        }
    }

    /// Leaves the task set, and returns the tasks that may start now.
    #[must_use]
    pub fn leave_task_set(&mut self) -> Vec<TaskRef> {
        self.end_limited();
        let (Some(key), Some(unit)) = (self.key.take(), &self.unit) else {
            return Vec::new();
        };
        let (was_cleared, started) = unit.remove(key);
        self.was_cleared = was_cleared;
        started
    }

    /// Notes that the command was aborted by its own nexus, which does not expect a status
    /// afterwards, even if the command is aborted by other nexuses as well.
    pub fn renounce(&mut self) {
        self.is_renounced = true;
    }

    /// Returns whether the command was aborted by another nexus, so that a response is required. It
    /// may have left the task set before its connection is notified, and may be aborted by several
    /// nexuses.
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

    /// Returns whether the command was aborted by its own nexus after leaving the task set.
    #[must_use]
    pub fn is_left_ended(&self) -> bool {
        match (self.left, &self.unit) {
            (Some(name), Some(unit)) => unit.is_left_ended(name),
            _ => false,
        }
    }

    /// Releases the data of a command that completes with a status only, when no device is using
    /// the data. Returns the functions waiting for this command. They do not wait for the initiator
    /// to receive the response.
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

    /// Releases all resources, and returns the functions waiting for this command.
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
        self.expected_unit = None;
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
