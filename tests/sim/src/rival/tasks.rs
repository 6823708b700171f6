//! Commands and functions of a rival, and their responses.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::SessionParams;
use riser_scsi::iscsi::pdu::{
    DataIn, DataOut, R2t, ScsiCommand, ScsiResponse, TaskAttr, TmfFunction, TmfRequest,
    TmfResponse, TmfStatus,
};
use riser_scsi::iscsi::{CmdSn, Ttt};
use riser_scsi::sense::{Sense, SenseKey};
use riser_test_peers::pdus;
use riser_tests::history::{BLOCK, FlushId, ReadId, WriteId};
use tracing::debug;

use super::{LATE, Rival};
use crate::coverage;
use crate::initiator::User;
use crate::model::ChangeId;
use crate::reservations::{Action, Change, Status};

pub(super) const GOOD: u8 = 0x00;
/// The unit is still executing commands of a previous session.
const BUSY: u8 = 0x08;
const CONFLICT: u8 = 0x18;
const TASK_SET_FULL: u8 = 0x28;
const TASK_ABORTED: u8 = 0x40;

/// LOGICAL UNIT NOT SUPPORTED.
const NOT_SUPPORTED: u8 = 0x25;

/// A command in the history.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A read, with its first block.
    Read(ReadId, u64),
    Write {
        id: WriteId,
        fua: bool,
    },
    /// COMPARE AND WRITE of a block. The data starts with the expected contents.
    Swap {
        id: WriteId,
        fua: bool,
    },
    Flush(FlushId),
    TestUnitReady,
    /// PERSISTENT RESERVE OUT. The last one unregisters.
    Change {
        id: ChangeId,
        is_last: bool,
    },
    /// PERSISTENT RESERVE IN, with its service action.
    Look(u8),
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Read(..) => "READ",
            Self::Swap { .. } => "COMPARE AND WRITE",
            Self::Write { .. } => "WRITE",
            Self::Flush(_) => "SYNCHRONIZE CACHE",
            Self::TestUnitReady => "TEST UNIT READY",
            Self::Change { .. } => "PERSISTENT RESERVE OUT",
            Self::Look(_) => "PERSISTENT RESERVE IN",
        }
    }
}

/// A command in flight.
pub(super) struct Task {
    kind: Kind,
    /// Start time in the model.
    begin: u64,
    pub(super) connection: usize,
    pub(super) cmd_sn: CmdSn,
    /// A function may or may not have aborted it, depending on the order of arrival.
    pub(super) is_doubtful: bool,
    /// It was reassigned from another connection, and some of its data may be sent again.
    pub(super) is_resumed: bool,
    /// It was reassigned from another connection, where it may have been completed.
    pub(super) was_moved: bool,
    /// Number of Data-In and R2T PDUs received.
    pub(super) units: u32,
    /// Data to write.
    data: Vec<u8>,
    /// Number of bytes to read.
    len: usize,
    received: Vec<u8>,
    /// Time when it is aborted.
    pub(super) late: Instant,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            connection,
            cmd_sn,
            ..
        } = self;
        write!(f, "{kind:?} of connection {connection} with {cmd_sn:?}")
    }
}

/// A function in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) function: TmfFunction,
    pub(super) connection: usize,
    pub(super) referenced: u32,
    cmd_sn: CmdSn,
    immediate: bool,
    /// Start time in the model, if it aborts commands of other nexuses.
    ends_others: Option<u64>,
}

impl Function {
    /// Returns whether it aborts all commands of the session, and not a single one.
    fn ends_many(&self) -> bool {
        use TmfFunction::{AbortTask, QueryTask, TaskReassign};
        !matches!(self.function, AbortTask | QueryTask | TaskReassign)
    }

    /// Returns whether it may abort this command.
    pub(super) fn may_end(&self, tag: u32) -> bool {
        let is_abort = self.function == TmfFunction::AbortTask;
        self.ends_many() || is_abort && self.referenced == tag
    }

    /// Returns its CmdSN, unless it's immediate.
    pub(super) fn number(&self) -> Option<CmdSn> {
        (!self.immediate).then_some(self.cmd_sn)
    }

    /// Creates a function that refers to a command without aborting it.
    pub(super) fn about(
        function: TmfFunction,
        connection: usize,
        referenced: u32,
        cmd_sn: CmdSn,
    ) -> Self {
        Self {
            function,
            connection,
            referenced,
            cmd_sn,
            immediate: true,
            ends_others: None,
        }
    }

    fn resets(&self) -> bool {
        resets(self.function)
    }
}

fn resets(function: TmfFunction) -> bool {
    matches!(
        function,
        TmfFunction::LogicalUnitReset | TmfFunction::TargetWarmReset
    )
}

/// A command that was aborted without a response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aborted {
    pub(super) connection: usize,
    by: usize,
    /// It was reassigned from a lost connection.
    was_moved: bool,
}

impl Task {
    /// Called when its session was lost.
    pub(super) fn lose(self, user: &User) {
        match self.kind {
            Kind::Read(id, _) => user.history.abandon_read(id),
            Kind::Write { id, .. } | Kind::Swap { id, .. } => user.history.lose(id),
            Kind::Flush(id) => user.history.fail_flush(id),
            Kind::TestUnitReady | Kind::Change { .. } | Kind::Look(_) => {}
        }
    }

    /// Called when it was aborted: it may have been executed, but has no further effect.
    pub(super) fn refuse(self, user: &User) {
        match self.kind {
            Kind::Write { id, .. } | Kind::Swap { id, .. } => user.history.refuse(id),
            _ => self.lose(user),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Returns whether it changes reservations.
    pub(super) fn changes(&self) -> bool {
        matches!(self.kind, Kind::Change { .. })
    }

    /// Called when it was completed with GOOD status.
    fn complete(self, user: &User) {
        match self.kind {
            Kind::Read(id, _) if self.received.len() == self.len => {
                user.check_result(user.history.end_read(id, &self.received));
            }
            Kind::Read(..) => {
                let got = self.received.len();
                user.check_result::<(), _>(Err(format!("GOOD for {got} of {} bytes", self.len)));
            }
            Kind::Write { id, fua } if fua || !user.is_cached => {
                user.check_result(user.history.acknowledge_durable(id));
            }
            Kind::Write { id, .. } => user.check_result(user.history.acknowledge(id)),
            Kind::Swap { id, fua } => {
                let (expected, is_durable) = (&self.data[..BLOCK], fua || !user.is_cached);
                user.check_result(user.history.acknowledge_swap(id, expected, is_durable));
            }
            Kind::Flush(id) => user.check_result(user.history.end_flush(id)),
            Kind::TestUnitReady | Kind::Change { .. } | Kind::Look(_) => {}
        }
    }

    /// Returns whether it writes blocks, or `None` if it doesn't access any.
    fn access(&self) -> Option<bool> {
        match self.kind {
            Kind::Read(..) => Some(false),
            Kind::Write { .. } | Kind::Swap { .. } => Some(true),
            _ => None,
        }
    }
}

impl Rival {
    /// Runs a random action.
    pub(super) fn do_something(&mut self, now: Instant) {
        if self.rng.u8(..) < self.plan.departures {
            return self.lose(now);
        }
        if self.plan.breaks > 0 && self.rng.u8(..) < self.plan.breaks {
            // Prefers a connection with a command that must be recovered.
            let busy = self.tasks.values().next_back().map(|task| task.connection);
            let at = busy.unwrap_or_else(|| self.pick_connection());
            return self.lose_connection(at, now);
        }
        let is_full = self.tasks.len() + self.orphans.len() >= self.plan.depth;
        if is_full || self.rng.u8(..32) < self.plan.functions {
            self.left -= 1;
            return self.manage_something(now);
        }
        let ready = self.connections.iter().all(super::Connection::is_ready);
        let next = self.connections.len();
        let most = self.params.map_or(1, |params| params.max_connections);
        if ready && next < self.plan.connections.min(most.into()) {
            return self.dial(next, now);
        }
        // The window is closed (RFC 7143 4.2.2.1) until a response is received.
        if self.max_cmd_sn.is_before(self.cmd_sn) {
            self.next_action = now + Duration::from_micros(self.rng.u64(..200_000));
            return;
        }
        self.left -= 1;
        if self.rng.u8(..32) < self.plan.reservations {
            return self.reserve_something(now);
        }
        if self.rng.u8(..32) < self.plan.swaps
            && let Some((block, expected)) = self.seen.take()
        {
            return self.swap(block, expected, now);
        }
        let len = self.rng.u64(1..=self.longest.min(self.blocks));
        let first = self.rng.u64(..=self.blocks - len);
        let blocks = first..first + len;
        match self.rng.u8(..16) {
            0 => self.flush(now),
            1 => self.zero(blocks, now),
            2 => self.submit(Kind::TestUnitReady, &[0; 6], Vec::new(), 0, now),
            3..10 => self.write(blocks, now),
            _ => self.read(&blocks, now),
        }
    }

    fn flush(&mut self, now: Instant) {
        let id = self.user.history.begin_flush(self.user.port);
        let cdb = pdus::cdb10(0x35, 0, 0);
        self.submit(Kind::Flush(id), &cdb, Vec::new(), 0, now);
    }

    fn read(&mut self, blocks: &Range<u64>, now: Instant) {
        let id = self.user.history.begin_read(self.user.port, blocks.clone());
        let count = blocks.end - blocks.start;
        let cdb = pdus::cdb10(0x28, blocks.start as u32, count as u16);
        self.submit(
            Kind::Read(id, blocks.start),
            &cdb,
            Vec::new(),
            count as usize * BLOCK,
            now,
        );
    }

    fn write(&mut self, blocks: Range<u64>, now: Instant) {
        let count = blocks.end - blocks.start;
        let fua = self.rng.u8(..6) == 0;
        let mut cdb = pdus::cdb10(0x2a, blocks.start as u32, count as u16);
        cdb[1] = u8::from(fua) << 3;
        let mut data = vec![0; count as usize * BLOCK];
        let (port, history) = (self.user.port, &self.user.history);
        let id = history.begin_write(port, blocks, &mut data);
        self.submit(Kind::Write { id, fua }, &cdb, data, 0, now);
    }

    /// Sends COMPARE AND WRITE of a block with its previously read contents.
    fn swap(&mut self, block: u64, expected: Vec<u8>, now: Instant) {
        let mut bytes = vec![0; BLOCK];
        let id = self
            .user
            .history
            .begin_swap(self.user.port, block, &mut bytes);
        let fua = self.rng.u8(..6) == 0;
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[13]) = (0x89, u8::from(fua) << 3, 1);
        cdb[2..10].copy_from_slice(&block.to_be_bytes());
        let data = [expected, bytes].concat();
        self.submit(Kind::Swap { id, fua }, &cdb, data, 0, now);
    }

    /// Sends WRITE SAME of zeros.
    fn zero(&mut self, blocks: Range<u64>, now: Instant) {
        let count = blocks.end - blocks.start;
        let cdb = pdus::cdb10(0x41, blocks.start as u32, count as u16);
        let id = self.user.history.begin_zero(self.user.port, blocks);
        self.submit(Kind::Write { id, fua: false }, &cdb, vec![0; BLOCK], 0, now);
    }

    /// Sends a command, with as much unsolicited data as possible.
    fn submit(&mut self, kind: Kind, cdb: &[u8], data: Vec<u8>, len: usize, now: Instant) {
        let params = self.params.expect("the session is up");
        let tag = self.take_tag();
        let connection = self.pick_connection();
        let out = &mut self.connections[connection];
        let at = leaves(&mut self.rng, now);
        let (immediate, unsolicited) = plan_data(&params, out.max_send, &data, &mut self.rng);
        let attribute = match self.rng.u8(..16) {
            0 => TaskAttr::Ordered,
            1 => TaskAttr::HeadOfQueue,
            _ => TaskAttr::Simple,
        };
        let writes = !data.is_empty();
        let expected = data.len().max(len) as u32;
        let command = ScsiCommand {
            is_final: unsolicited == immediate,
            attribute,
            exp_stat_sn: out.exp_stat_sn(),
            ..pdus::scsi_command(tag, self.cmd_sn.0, cdb, writes, expected)
        };
        out.send(at, command.header(), &data[..immediate]);
        // An immediate function aborts all commands received so far, which may include this command
        // if it's sent on another connection (RFC 7143 11.5.1). Other functions are executed before
        // this command.
        let may_end =
            |sent: &Function| sent.ends_many() && sent.immediate && sent.connection != connection;
        let is_doubtful = self.functions.values().any(may_end);
        let task = Task {
            is_doubtful,
            is_resumed: false,
            was_moved: false,
            units: 0,
            kind,
            begin: self.model.begin(),
            connection,
            cmd_sn: self.cmd_sn,
            data,
            len,
            received: Vec::new(),
            late: now + LATE,
        };
        debug!(port = self.user.port.0, tag, connection, "{kind:?} begins");
        self.cmd_sn = self.cmd_sn.next();
        self.tasks.insert(tag, task);
        self.send_data(tag, Ttt::NONE, immediate..unsolicited, now);
    }

    pub(super) fn pick_connection(&mut self) -> usize {
        let all = self.connections.iter().enumerate();
        let ready = all.filter(|(_, one)| one.is_ready()).map(|(at, _)| at);
        let ready: Vec<_> = ready.collect();
        ready[self.rng.usize(..ready.len())]
    }

    /// Sends data of a command as a single sequence.
    fn send_data(&mut self, tag: u32, ttt: Ttt, bytes: Range<usize>, now: Instant) {
        let task = &self.tasks[&tag];
        let out = &mut self.connections[task.connection];
        let pieces = bytes.clone().step_by(out.max_send as usize);
        for (sn, from) in pieces.enumerate() {
            let until = (from + out.max_send as usize).min(bytes.end);
            let header = DataOut {
                exp_stat_sn: out.exp_stat_sn(),
                ..pdus::data_out(tag, ttt, sn as u32, from as u32, until == bytes.end)
            };
            let at = leaves(&mut self.rng, now);
            let data = &task.data[from..until];
            match self.plan.spoils > 0 && self.rng.u8(..) < self.plan.spoils {
                true => out.send_spoilt(at, header.header(), data),
                false => out.send(at, header.header(), data),
            }
        }
    }

    pub(super) fn on_r2t(&mut self, at: usize, r2t: &R2t, now: Instant) {
        let bytes = r2t.offset as usize..(r2t.offset + r2t.len) as usize;
        let is_its = |task: &&mut Task| task.connection == at && bytes.end <= task.data.len();
        if let Some(task) = self.tasks.get_mut(&r2t.itt.0).filter(is_its) {
            task.units += 1;
            self.send_data(r2t.itt.0, r2t.ttt, bytes, now);
        } else if !self.is_from_before(at, r2t.itt.0) {
            self.fail(&format!("{r2t:?} for {:?}", self.tasks.get(&r2t.itt.0)));
        }
    }

    pub(super) fn on_data_in(&mut self, at: usize, header: &DataIn, data: &[u8], now: Instant) {
        let tag = header.itt.0;
        let offset = header.offset as usize;
        let is_next = |task: &&mut Task| {
            let received = task.received.len();
            let is_there = offset == received || task.is_resumed && offset < received;
            task.connection == at && is_there && offset + data.len() <= task.len
        };
        if let Some(task) = self.tasks.get_mut(&tag).filter(is_next) {
            task.received.truncate(offset);
            task.received.extend_from_slice(data);
            task.is_resumed = false;
            task.units = header.data_sn.wrapping_add(1);
            if header.acknowledge {
                self.acknowledge_data(at, header, now);
            }
        } else if !self.is_stale_response(at, tag) {
            self.fail(&format!("{header:?} for {:?}", self.tasks.get(&tag)));
        }
        if let Some(with) = header.status {
            self.on_status(at, tag, with.status, None);
        }
    }

    pub(super) fn on_response(&mut self, at: usize, response: &ScsiResponse, data: &[u8]) {
        let sense = match ScsiResponse::sense_of(data) {
            Ok(sense) => Sense::parse(sense),
            Err(error) => return self.fail(&format!("{error} in {response:?}")),
        };
        if response.response != 0 {
            self.fail(&format!("{response:?}"));
        }
        self.on_status(at, response.itt.0, response.status, sense);
    }

    /// Called when a command was completed.
    fn on_status(&mut self, at: usize, tag: u32, status: u8, sense: Option<Sense>) {
        match self.tasks.remove(&tag) {
            Some(task) if task.connection == at => {
                coverage::note(
                    "rival's command",
                    task.kind.name(),
                    &format!("{status:#04x}"),
                );
                debug!(
                    port = self.user.port.0,
                    tag, "{:?} ends: {status:#04x}", task.kind
                );
                self.check_response(&task, status, sense);
                if status == GOOD {
                    self.end_fence();
                }
                let is_last = matches!(task.kind, Kind::Change { is_last: true, .. });
                self.is_registered &= !(is_last && status == GOOD);
                if let (GOOD, Kind::Read(_, first)) = (status, task.kind) {
                    self.seen = task.received.get(..BLOCK).map(|b| (first, b.to_vec()));
                }
                let is_miscompared = sense.is_some_and(|sense| sense.key == SenseKey::Miscompare);
                match status {
                    _ if is_miscompared => self.refute(task),
                    GOOD => task.complete(&self.user),
                    // This doesn't imply that older commands have completed.
                    BUSY => task.lose(&self.user),
                    _ => task.refuse(&self.user),
                }
            }
            // It was in flight when the function was completed on another connection.
            None if self.is_stale_response(at, tag) => drop(self.aborted.remove(&tag)),
            other => self.fail(&format!(
                "status {status:#04x} on connection {at} for tag {tag}: {other:?}"
            )),
        }
    }

    /// Called when a comparison has failed because the block has other contents.
    fn refute(&self, task: Task) {
        match task.kind {
            Kind::Swap { id, .. } => self.user.check_result(self.user.history.refute(id)),
            _ => self.fail(&format!("MISCOMPARE of {task:?}")),
        }
    }

    /// Compares a response with the model.
    fn check_response(&self, task: &Task, status: u8, sense: Option<Sense>) {
        let (model, port) = (&self.model, self.user.port);
        let attention = sense.filter(|sense| sense.key == SenseKey::UnitAttention);
        if let Some(Sense { additional, .. }) = attention {
            let code = (additional.code, additional.qualifier);
            self.user
                .check_result(model.on_attention(port, task.begin, code));
        }
        // The window is a promise of the target.
        if status == TASK_SET_FULL && !self.is_limited {
            self.fail(&format!("the target lacks room for a command: {task:?}"));
        }
        if status == TASK_ABORTED {
            self.user.check_result(model.on_aborted(port, task.begin));
        }
        if status == GOOD && self.tasks.is_empty() && self.orphans.is_empty() {
            self.user.check_result(model.on_success(port, task.begin));
        }
        if let (GOOD | CONFLICT, Some(writes)) = (status, task.access()) {
            let result = model.check_access(port, task.begin, writes, status == CONFLICT);
            self.user.check_result(result);
        }
        match task.kind {
            Kind::Change { id, .. } => self.check_change(id, status, sense),
            Kind::Look(action) if status == GOOD => self.check_look(action, task),
            _ => {}
        }
    }

    fn check_change(&self, id: ChangeId, status: u8, sense: Option<Sense>) {
        let is_refused = sense.is_some_and(|sense| sense.key == SenseKey::IllegalRequest);
        let is_gone = sense.is_some_and(|sense| sense.additional.code == NOT_SUPPORTED);
        let status = match status {
            _ if is_gone && self.may_vanish => return self.model.cancel_change(id),
            GOOD => Status::Good,
            CONFLICT => Status::Conflict,
            _ if is_refused => Status::Check,
            TASK_ABORTED => return self.model.lose_change(self.user.port),
            _ => return self.model.cancel_change(id),
        };
        self.user.check_result(self.model.end_change(id, status));
    }

    fn check_look(&self, action: u8, task: &Task) {
        let seen = self
            .model
            .observe_states(task.begin, |one| one.is_reported(action, &task.received));
        if let Err(states) = seen {
            let data = &task.received;
            self.fail(&format!(
                "service action {action} reports {data:02x?}, not {states:?}"
            ));
        }
    }

    /// Changes or reads reservations.
    fn reserve_something(&mut self, now: Instant) {
        let port = self.user.port;
        let change = Change::draw(port, &self.model.guess(), &mut self.rng);
        let may_change = self.rng.u8(..3) > 0 && !self.model.is_vague();
        if may_change && let Some(id) = self.model.begin_change(change) {
            return self.change(change, (id, false), now);
        }
        let action = [0, 1, 3][self.rng.usize(..3)];
        self.look_at_reservations(action, now);
    }

    /// Sends PERSISTENT RESERVE IN.
    fn look_at_reservations(&mut self, action: u8, now: Instant) {
        let cdb = [0x5e, action, 0, 0, 0, 0, 0, 4, 0, 0];
        self.submit(Kind::Look(action), &cdb, Vec::new(), 1024, now);
    }

    /// Returns whether a command was aborted by a function on another connection, so that a
    /// response on this connection may arrive later.
    fn is_from_before(&self, at: usize, tag: u32) -> bool {
        let ended = self.aborted.get(&tag);
        ended.is_some_and(|ended| ended.connection == at && ended.by != at)
    }

    /// The same, or the command was completed on the lost connection before the function was
    /// executed. Then the function did not abort it, and TASK REASSIGN returns its response again.
    fn is_stale_response(&self, at: usize, tag: u32) -> bool {
        let ended = self.aborted.get(&tag);
        let is_repeated = ended.is_some_and(|ended| ended.connection == at && ended.was_moved);
        is_repeated || self.is_from_before(at, tag)
    }

    fn change(&mut self, change: Change, (id, is_last): (ChangeId, bool), now: Instant) {
        let cdb = [
            0x5f,
            change.action.code(),
            change.kind,
            0,
            0,
            0,
            0,
            0,
            24,
            0,
        ];
        debug!(port = self.user.port.0, "{change:?}");
        let list = change.parameters().to_vec();
        self.submit(Kind::Change { id, is_last }, &cdb, list, 0, now);
    }

    /// Unregisters, unless another change is in flight or the window is closed.
    pub(super) fn unregister(&mut self, now: Instant) -> bool {
        let change = Change {
            from: self.user.port,
            action: Action::RegisterAndIgnore,
            kind: 1,
            own: 0,
            key: 0,
            persists: false,
        };
        if self.max_cmd_sn.is_before(self.cmd_sn) {
            return false;
        }
        if self.model.is_vague() {
            const READ_KEYS: u8 = 0;
            self.look_at_reservations(READ_KEYS, now);
            return true;
        }
        let id = self.model.begin_change(change);
        if let Some(id) = id {
            self.change(change, (id, true), now);
        }
        id.is_some()
    }

    /// Sends a random function.
    fn manage_something(&mut self, now: Instant) {
        use TmfFunction::{
            AbortTask, AbortTaskSet, ClearTaskSet, LogicalUnitReset, NexusReset, TargetColdReset,
            TargetWarmReset,
        };
        let function = match self.rng.u8(..16) {
            0..8 => AbortTask,
            8..11 => AbortTaskSet,
            11 | 12 => ClearTaskSet,
            13 => LogicalUnitReset,
            14 => TargetWarmReset,
            _ => [NexusReset, TargetColdReset][self.rng.usize(..2)],
        };
        let tags: Vec<u32> = self.tasks.keys().copied().collect();
        let referenced = match function {
            AbortTask if !tags.is_empty() => tags[self.rng.usize(..tags.len())],
            // A command that was completed.
            AbortTask => self.next_tag,
            _ => u32::MAX,
        };
        let connection = self.pick_connection();
        let immediate = self.rng.bool();
        self.manage(function, referenced, (connection, immediate), now);
    }

    /// Aborts commands after their timeout, each on its own connection.
    pub(super) fn abort_late(&mut self, now: Instant) {
        let late = self.tasks.iter().filter(|(_, task)| task.late <= now);
        let late: Vec<_> = late.map(|(tag, task)| (*tag, task.connection)).collect();
        for (tag, connection) in late {
            self.tasks.get_mut(&tag).expect("it is there").late = now + LATE * 4;
            self.manage(TmfFunction::AbortTask, tag, (connection, true), now);
        }
    }

    fn manage(
        &mut self,
        function: TmfFunction,
        referenced: u32,
        (connection, immediate): (usize, bool),
        now: Instant,
    ) {
        if !immediate && self.max_cmd_sn.is_before(self.cmd_sn) {
            return;
        }
        let port = self.user.port;
        let ends_others = match function {
            TmfFunction::ClearTaskSet => Some(self.model.begin_clear(port)),
            function => resets(function).then(|| self.model.begin_reset(port)),
        };
        self.is_reset |= function == TmfFunction::NexusReset;
        let tag = self.take_tag();
        let ref_cmd_sn = self.tasks.get(&referenced).map(|task| task.cmd_sn);
        let request = TmfRequest {
            immediate,
            exp_stat_sn: self.connections[connection].exp_stat_sn(),
            // If the command does not exist, this is a CmdSN from long ago. A CmdSN in flight would
            // be treated as received, and its command would be ignored (RFC 7143 11.6.1).
            ref_cmd_sn: ref_cmd_sn.unwrap_or(CmdSn(self.cmd_sn.0.wrapping_sub(1 << 16))),
            ..pdus::tmf_request(tag, self.cmd_sn.0, function, referenced)
        };
        let sent = Function {
            function,
            connection,
            referenced,
            cmd_sn: self.cmd_sn,
            immediate,
            ends_others,
        };
        debug!(
            port = self.user.port.0,
            tag, connection, referenced, "{function:?} begins"
        );
        self.functions.insert(tag, sent);
        if !immediate {
            self.cmd_sn = self.cmd_sn.next();
        }
        let at = leaves(&mut self.rng, now);
        self.connections[connection].send(at, request.header(), &[]);
    }

    /// Called when a function was completed. Commands that it has aborted have no further effect.
    pub(super) fn on_function_end(&mut self, at: usize, response: TmfResponse, now: Instant) {
        use TmfFunction::{AbortTask, QueryTask, TargetColdReset, TaskReassign};
        let Some(sent) = self.functions.remove(&response.itt.0) else {
            return self.fail(&format!("{response:?} without a pending function"));
        };
        let (function, status) = (sent.function, response.status);
        coverage::note("rival's function", label(function), &format!("{status:?}"));
        debug!(
            port = self.user.port.0,
            tag = response.itt.0,
            "{function:?} ends: {status:?}"
        );
        if sent.connection != at {
            self.fail(&format!("{response:?} on connection {at} for {sent:?}"));
        }
        sent.ends_others
            .into_iter()
            .for_each(|begin| self.model.end_clear(begin));
        match (function, status) {
            (QueryTask | TaskReassign, status) => self.on_orphan(&sent, status, now),
            (AbortTask, TmfStatus::Complete) => self.end_by(sent, |tag, _| tag == sent.referenced),
            (AbortTask, TmfStatus::TaskDoesNotExist) => {
                let task = self.tasks.get(&sent.referenced);
                // It may have been aborted by another function in flight.
                let is_ended = |other: &Function| other.may_end(sent.referenced);
                let is_ending = self.functions.values().any(is_ended);
                if task.is_some_and(|task| task.is_doubtful && task.connection == at) {
                    return self.end_by(sent, |tag, _| tag == sent.referenced);
                }
                if !is_ending && task.is_some_and(|task| task.connection == at) {
                    self.fail(&format!(
                        "no response to {task:?}, which is unknown to the target"
                    ));
                }
            }
            (TargetColdReset, _) | (_, TmfStatus::Rejected) => {}
            (_, TmfStatus::LunDoesNotExist | TmfStatus::AuthorizationFailed) if self.may_vanish => {
            }
            (_, TmfStatus::Complete) => {
                if let (true, Some(begin)) = (sent.resets(), sent.ends_others) {
                    self.model.end_reset(self.user.port, begin);
                }
                self.end_by(sent, |_, task| task.cmd_sn.is_before(sent.cmd_sn));
                self.end_orphans_before(sent.cmd_sn);
            }
            (function, status) => self.fail(&format!("{status:?} to {function:?}")),
        }
    }

    /// Called when a function was rejected: it was not executed.
    pub(super) fn on_function_refused(&mut self, header: &[u8]) {
        let tag = header
            .get(16..20)
            .map(|tag| u32::from_be_bytes(tag.try_into().unwrap_or_default()));
        let Some(sent) = tag.and_then(|tag| self.functions.remove(&tag)) else {
            return self.fail("a reject without a pending function");
        };
        sent.ends_others
            .into_iter()
            .for_each(|begin| self.model.end_clear(begin));
    }

    /// Called when a function has aborted commands: these have no further effect.
    fn end_by(&mut self, function: Function, ends: impl Fn(u32, &Task) -> bool) {
        let ended: Vec<u32> = self
            .tasks
            .iter()
            .filter_map(|(tag, task)| ends(*tag, task).then_some(*tag))
            .collect();
        for tag in ended {
            let task = self.tasks.remove(&tag).expect("just found");
            let aborted = Aborted {
                connection: task.connection,
                by: function.connection,
                was_moved: task.was_moved,
            };
            self.aborted.insert(tag, aborted);
            self.model.on_silence(self.user.port);
            if let Kind::Change { .. } = task.kind {
                self.model.lose_change(self.user.port);
            }
            task.refuse(&self.user);
        }
    }
}

/// Returns the name of a function.
fn label(function: TmfFunction) -> &'static str {
    match function {
        TmfFunction::AbortTask => "ABORT TASK",
        TmfFunction::AbortTaskSet => "ABORT TASK SET",
        TmfFunction::ClearTaskSet => "CLEAR TASK SET",
        TmfFunction::LogicalUnitReset => "LOGICAL UNIT RESET",
        TmfFunction::TargetWarmReset => "TARGET WARM RESET",
        TmfFunction::NexusReset => "I_T NEXUS RESET",
        TmfFunction::TaskReassign => "TASK REASSIGN",
        TmfFunction::QueryTask => "QUERY TASK",
        _ => "another",
    }
}

/// Draws the time when a PDU is sent: usually immediately, sometimes after newer ones on other
/// connections.
fn leaves(rng: &mut fastrand::Rng, now: Instant) -> Instant {
    let most = [1, 1, 100, 3_000][rng.usize(..4)];
    now + Duration::from_micros(rng.u64(..most))
}

/// Returns the number of bytes in the command PDU, and the total number of unsolicited bytes (RFC
/// 7143 13.10, 13.11, 13.14).
fn plan_data(
    params: &SessionParams,
    max_send: u32,
    data: &[u8],
    rng: &mut fastrand::Rng,
) -> (usize, usize) {
    let first_burst = data.len().min(params.first_burst as usize);
    let most = match params.immediate_data {
        true => first_burst.min(max_send as usize),
        false => 0,
    };
    let immediate = [0, most, rng.usize(..=most)][rng.usize(..3)];
    match params.initial_r2t {
        true => (immediate, immediate),
        // Either the entire first burst, or only immediate data.
        false => (immediate, [immediate, first_burst][rng.usize(..2)]),
    }
}
