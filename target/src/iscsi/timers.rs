//! Timers of a connection: phases, pings, and the time for the initiator to move its data.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Ttt;

use super::datamover::Datamover;
use super::phase::Phase;
use super::task::{Task, TaskState};
use super::tasks::TaskTable;
use crate::fabric::{MAX_DATA_TIMEOUTS, ORDER_CHECK_INTERVAL, OWED, Pace, TaskIdx, Wait};

/// Login timeout.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Idle time before we send a ping to the initiator.
const PING_AFTER: Duration = Duration::from_secs(15);

/// Timeout for a ping response.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time without input from an initiator. Nothing is acknowledged during this time.
const SILENCE: Duration = PING_AFTER.saturating_add(PING_TIMEOUT);

/// Idle timeout for a discovery session, because most initiators send nothing after SendTargets.
const DISCOVERY_IDLE: Duration = Duration::from_secs(15);

/// Maximum duration of a discovery session.
pub(super) const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Times of a connection.
#[derive(Debug)]
pub(super) struct Timers {
    /// Deadline of the current phase.
    pub(super) phase: Option<Instant>,
    /// Time of the last input from the initiator.
    pub(super) last_input: Instant,
    /// Time when a ping was sent, until there is any input.
    ping: Option<Instant>,
    next_ping: u32,
    pub(super) pace: Pace,
    /// Timeout for data requested from the initiator.
    timeout: Duration,
    /// Time when solicited or immediate data was last received.
    pub(super) last_data: Instant,
    /// Time when the initiator last received data from us.
    pub(super) last_taken: Instant,
    /// Set while other initiators are waiting for memory and this one is using more than its share.
    owed: Option<Wait>,
    /// Set while other initiators are waiting for our commands in the order of a unit.
    held: Option<Wait>,
    /// Time of the next check for data timeouts.
    data: Option<Instant>,
}

impl Timers {
    /// Creates the timers of a connection in login phase.
    pub(super) fn new(now: Instant, timeout: Duration, commands: u16) -> Self {
        Self {
            phase: Some(now + LOGIN_TIMEOUT),
            last_input: now,
            ping: None,
            next_ping: 0,
            pace: Pace::new(commands.into()),
            timeout,
            last_data: now,
            last_taken: now,
            owed: None,
            held: None,
            data: None,
        }
    }

    /// Returns the next deadline in this phase.
    pub(super) fn deadline(&self, phase: Phase, is_discovery: bool) -> Option<Instant> {
        let idle = self.idle_deadline(phase, is_discovery);
        [self.phase, idle, self.data].into_iter().flatten().min()
    }

    fn idle_deadline(&self, phase: Phase, is_discovery: bool) -> Option<Instant> {
        match (phase, self.ping) {
            (Phase::FullFeature, _) if is_discovery => Some(self.last_input + DISCOVERY_IDLE),
            (Phase::FullFeature, None) => Some(self.last_input + PING_AFTER),
            (Phase::FullFeature, Some(sent)) => Some(sent + PING_TIMEOUT),
            _ => None,
        }
    }

    /// Returns true once if the deadline of the current phase has expired.
    pub(super) fn poll_phase(&mut self, now: Instant) -> bool {
        self.phase.take_if(|at| *at <= now).is_some()
    }

    /// Returns true if the initiator was idle for too long, so it must be pinged, or if it hasn't
    /// responded to a ping.
    pub(super) fn is_idle(&self, phase: Phase, is_discovery: bool, now: Instant) -> bool {
        let at = self.idle_deadline(phase, is_discovery);
        at.is_some_and(|at| at <= now)
    }

    /// Called for each PDU. It shows that the initiator is still connected, not only a ping
    /// response.
    pub(super) fn on_input(&mut self, now: Instant) {
        self.last_input = now;
        self.ping = None;
    }

    /// Returns true if a ping was sent, and nothing was received since.
    pub(super) fn is_pinging(&self) -> bool {
        self.ping.is_some()
    }

    /// Called before a ping is sent. Returns its tag.
    pub(super) fn start_ping(&mut self, now: Instant) -> Ttt {
        self.ping = Some(now);
        self.next_ping = (self.next_ping + 1) & 0x7fff_ffff;
        Ttt(self.next_ping)
    }

    /// Schedules the next check for data timeouts. The first check must be early enough to handle
    /// an initiator that exceeds its share of memory or delays other initiators.
    pub(super) fn watch_data(&mut self, now: Instant) {
        let look = now + self.timeout.min(ORDER_CHECK_INTERVAL);
        let deadline = self.data.get_or_insert(look);
        *deadline = look.min(*deadline);
    }

    /// Returns true if [`Timers::check_data`] must be called.
    pub(super) fn is_data_due(&self, now: Instant) -> bool {
        self.data.is_some_and(|at| at <= now)
    }

    /// Stops checking, because nothing is sent to the initiator any more.
    pub(super) fn stop_data(&mut self) {
        self.data = None;
    }

    /// Called when a data request was sent for a task.
    pub(super) fn note_requested(&self, now: Instant, task: &mut Task) {
        task.requested_at = now;
        // The timeout for each piece starts with its first request.
        if task.first_wait.since <= task.wait.since {
            task.first_wait = self.pace.start_wait(now);
        }
    }

    /// Checks for data timeouts, and schedules the next check. Returns true if there is a timeout.
    /// It occurs if we have received no data at all for this time, or if the data for a single
    /// command takes longer than [`MAX_DATA_TIMEOUTS`]. On a slow link, the data for a command can
    /// be queued behind other data, so we don't abort a command early if any data is received. The
    /// same rules apply to data that the initiator doesn't read while other commands need the
    /// buffer.
    ///
    /// When a command is split into pieces, it holds its place in the order from the second piece,
    /// and other commands may be waiting for it. The limit therefore applies to the total time for
    /// all subsequent pieces, even if the command moves to another connection. When a response is
    /// ready, other commands no longer have to wait, but the buffer is in use until the response is
    /// sent, or acknowledged at error recovery level 1. This can take the remaining time, but never
    /// less than the initiator's idle timeout. Time is added for data transferred since then: see
    /// [`Pace`](crate::fabric::Pace).
    ///
    /// If other initiators are waiting for memory (`is_owed`), an initiator that uses more than its
    /// share can only be idle for [`OWED`], which allows for several retransmissions of a TCP
    /// segment. It must not be too slow either: each command has a single data timeout plus the
    /// time required for the data at [`SLOWEST_AWAITED`](crate::fabric::SLOWEST_AWAITED). If other
    /// initiators are waiting for a command in the order of its unit, the limit is [`OWED`] plus
    /// this time for all its pieces.
    pub(super) fn check_data<D: Datamover>(
        &mut self,
        now: Instant,
        is_owed: bool,
        tasks: &TaskTable,
        mover: &D,
    ) -> bool {
        self.data = None;
        let begun = self.pace.start_wait(now);
        self.owed = is_owed.then(|| self.owed.unwrap_or(begun));
        let (held, is_in_order) = tasks.held_commands();
        self.held = held.then(|| self.held.unwrap_or(begun));
        let waiting = tasks.iter().filter(|(_, task)| task.waits_for_initiator());
        let due = waiting.map(|task| self.data_due(task, mover, is_owed));
        let Some(at) = due.min() else {
            return false;
        };
        if at > now {
            // This function isn't called when a command of another initiator starts to wait.
            let interval = match is_in_order {
                true => ORDER_CHECK_INTERVAL,
                false => OWED,
            };
            self.data = Some(at.min(now + interval));
        }
        at <= now
    }

    /// Returns when the data of a task times out.
    fn data_due<D: Datamover>(
        &self,
        (idx, task): (TaskIdx, &Task),
        mover: &D,
        is_owed: bool,
    ) -> Instant {
        let patience = match is_owed {
            true => self.timeout.min(OWED),
            false => self.timeout,
        };
        let waited = Duration::from_millis(task.waited.into());
        let left = (self.timeout * MAX_DATA_TIMEOUTS).saturating_sub(waited);
        let has_response = task.state == TaskState::Sent;
        let left = if has_response {
            left.max(SILENCE)
        } else {
            left
        };
        let due = self.pace.due(task.wait, left);
        // No other command is waiting for this one, except for its memory if the pool is low.
        if has_response && !(is_owed && mover.is_sending_data(idx)) {
            return due;
        }
        let last = match task.state {
            TaskState::Send | TaskState::Sent => self.last_taken,
            // A data request is queued behind other PDUs. Until it's sent, reading those is
            // progress.
            _ if mover.is_requesting(idx) => self.last_data.max(self.last_taken),
            _ => self.last_data.max(task.requested_at),
        };
        let due = due.min(last.max(task.wait.since) + patience);
        let start = match task.state {
            TaskState::Receive => task.wait.later(task.first_wait),
            _ => task.wait,
        };
        // Other initiators wait for the total time of all pieces.
        let ordered = task.ordered.filter(|_| !has_response).unwrap_or(start);
        let awaited = |begun: Wait, since: Option<Wait>, left| {
            since.map(|since| self.pace.due_awaited(begun.later(since), left))
        };
        let held = self.held.filter(|_| !task.exec.is_gathering());
        let awaited = [
            awaited(start, self.owed, self.timeout),
            awaited(ordered, held, self.timeout.min(OWED)),
        ];
        awaited.into_iter().flatten().fold(due, Instant::min)
    }
}
