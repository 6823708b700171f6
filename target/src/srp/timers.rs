//! Timers of a channel: phases, keepalive, and the time for the initiator to move its data.

use std::time::{Duration, Instant};

use super::ioctx::SendIoctx;
use super::requests::RequestTable;
use super::sender::Sender;
use crate::fabric::{MAX_DATA_TIMEOUTS, ORDER_CHECK_INTERVAL, OWED, Pace, Wait};

/// Maximum time between accepting a connection and its establishment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time that an established channel waits for commands of the session it replaces. A device
/// that needs more time is broken: we log out the initiator, which can then try again.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Time after which such a channel is started early, if the remaining commands are waiting for a
/// device that may hang. Units with such commands will reject commands of this channel.
const REINSTATEMENT: Duration = Duration::from_secs(2);

/// Idle time after which we check whether the initiator is still reachable. Without traffic, a
/// reliable connection does not detect that its peer has failed, and the session would stay open
/// forever.
pub const KEEPALIVE: Duration = Duration::from_secs(15);

/// Detects an initiator that is no longer reachable.
#[derive(Debug)]
pub(super) struct Keepalive {
    /// Time of the last message from the initiator.
    last_received: Instant,
    /// Time of the next check.
    at: Option<Instant>,
    /// Set while a probe is in flight.
    is_probing: bool,
}

impl Keepalive {
    /// Called when the connection is established.
    fn start(&mut self, now: Instant) {
        self.last_received = now;
        self.at = Some(now + KEEPALIVE);
    }

    /// Called when a message was received.
    pub(super) fn on_received(&mut self, now: Instant) {
        self.last_received = now;
    }

    /// Returns true if a probe must be sent.
    pub(super) fn poll_probe(&mut self, now: Instant) -> bool {
        if self.at.is_none_or(|at| at > now) {
            return false;
        }
        // To save time, the timer is not updated when a message is received. If there was one, set
        // the timer again here.
        let silent = now.saturating_duration_since(self.last_received);
        self.is_probing = silent >= KEEPALIVE;
        self.at = (!self.is_probing).then(|| self.last_received + KEEPALIVE);
        self.is_probing
    }

    /// Called when a probe has completed or failed.
    pub(super) fn on_probed(&mut self, now: Instant, ok: bool) {
        self.is_probing = false;
        if ok {
            self.start(now);
        }
    }

    /// Called when the queues were destroyed, so a probe will not complete.
    pub(super) fn forget_probe(&mut self) {
        self.is_probing = false;
    }

    /// Returns true while a probe is in flight.
    pub(super) fn is_probing(&self) -> bool {
        self.is_probing
    }
}

/// Times of a channel.
#[derive(Debug)]
pub(super) struct Timers {
    /// Deadline of the current state.
    pub(super) phase: Option<Instant>,
    /// Time at which to log out a channel that is still waiting for replaced sessions.
    join_until: Instant,
    pub(super) keepalive: Keepalive,
    pub(super) pace: Pace,
    /// Timeout for solicited data.
    data_timeout: Duration,
    /// Deadline for the next chain to complete.
    chains: Option<Instant>,
    /// A lower bound for the deadline of a command's pieces, not including the first.
    pieces: Option<Instant>,
    /// Maximum total time for the pieces of a command.
    pieces_timeout: Duration,
    /// Set if other initiators are waiting for memory and this channel uses more than its share.
    owed: Option<Wait>,
    /// Set if other initiators are waiting for commands of this channel in the order of their unit.
    held: Option<Wait>,
    /// Time of the next check for `owed` and `held`.
    awaited: Option<Instant>,
}

impl Timers {
    /// Creates the timers of a channel that was accepted now.
    pub(super) fn new(now: Instant, data_timeout: Duration, req_lim: u32) -> Self {
        Self {
            phase: Some(now + CONNECT_TIMEOUT),
            join_until: now,
            keepalive: Keepalive {
                last_received: now,
                at: None,
                is_probing: false,
            },
            pace: Pace::new(req_lim),
            data_timeout,
            chains: None,
            pieces: None,
            pieces_timeout: data_timeout * MAX_DATA_TIMEOUTS,
            owed: None,
            held: None,
            awaited: None,
        }
    }

    /// Returns the next deadline. `is_live` is set if the channel executes requests.
    pub(super) fn deadline(&self, is_live: bool) -> Option<Instant> {
        if !is_live {
            return self.phase;
        }
        let all = [
            self.phase,
            self.keepalive.at,
            self.chains,
            self.pieces,
            self.awaited,
        ];
        all.into_iter().flatten().min()
    }

    /// Returns true once if the deadline of the current state has expired.
    pub(super) fn poll_phase(&mut self, now: Instant) -> bool {
        self.phase.take_if(|at| *at <= now).is_some()
    }

    /// Called when the connection is established.
    pub(super) fn on_established(&mut self, now: Instant) {
        self.join_until = now + JOIN_TIMEOUT;
        self.phase = Some(now + REINSTATEMENT);
        self.keepalive.start(now);
    }

    /// Extends the wait for replaced sessions. Returns false if it has taken too long.
    pub(super) fn extend_join(&mut self, now: Instant) -> bool {
        let may_wait = now < self.join_until;
        if may_wait {
            self.phase = Some(self.join_until.min(now + REINSTATEMENT));
        }
        may_wait
    }

    /// Starts the timer for chains to complete. An initiator that does not receive its responses
    /// uses memory, and blocks any chain that is waiting for credit.
    pub(super) fn watch_chains(&mut self, now: Instant, sender: &Sender) {
        let delays_commands = sender.delays_commands();
        if sender.queue.is_idle() && !delays_commands {
            return;
        }
        // If no other command is waiting, a response has more time.
        let at = match delays_commands {
            true => now + self.data_timeout,
            false => now + self.pieces_timeout,
        };
        self.chains = Some(self.chains.map_or(at, |other| other.min(at)));
    }

    /// Called when a chain has completed and `moved` bytes were transferred. The queue is making
    /// progress, so the timer for the next chain is restarted by [`Timers::watch_chains`].
    pub(super) fn on_chain_done(&mut self, moved: u32) {
        self.chains = None;
        self.pace.on_moved(moved);
    }

    /// Starts the wait for a piece of data. After the first piece, the command is ordered in its
    /// unit, so other commands may have to wait for it. Therefore, all further pieces share a time
    /// limit, and the response gets the remaining time. Any data transferred in the meantime
    /// extends it: see [`Pace`](crate::fabric::Pace).
    pub(super) fn start_piece(&mut self, now: Instant, io: &mut SendIoctx) {
        io.began = Some(self.pace.start_wait(now));
        self.awaited.get_or_insert(now + OWED);
        if io.exec.is_gathering() {
            return;
        }
        io.wait = io.began;
        io.ordered = io.ordered.or(io.began);
        // For the first wait of a command, the full time is available. Most commands only wait
        // once.
        let due = match io.waited.is_zero() {
            true => Some(now + self.pieces_timeout),
            false => io.piece_due(self.pieces_timeout, &self.pace),
        };
        if self.pieces.is_none() || due < self.pieces {
            self.pieces = due;
        }
    }

    /// Ends the wait for a piece of data.
    pub(super) fn stop_piece(&self, now: Instant, io: &mut SendIoctx) {
        io.began = None;
        if let Some(wait) = io.wait.take() {
            io.waited += self.pace.waited(wait, now);
        }
    }

    /// Returns whether the time for the initiator to send or receive data has expired.
    pub(super) fn is_overdue(&mut self, now: Instant, requests: &RequestTable) -> bool {
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(self.pieces) {
            // The piece may have completed since.
            let time = self.pieces_timeout;
            let dues = requests
                .iter()
                .filter_map(|(_, io)| io.piece_due(time, &self.pace));
            self.pieces = dues.min();
        }
        is_over(self.chains) || is_over(self.pieces)
    }

    /// Called when an ordered command starts to wait for the initiator. We need to check regularly,
    /// because the channel is not notified if other initiators start to wait for it.
    pub(super) fn watch_order(&mut self, now: Instant) {
        let look = now + ORDER_CHECK_INTERVAL;
        self.awaited = Some(self.awaited.map_or(look, |at| at.min(look)));
    }

    /// Returns whether other initiators may have been waiting for too long for the memory or
    /// commands of this channel, so [`Timers::check_awaited`] must be called.
    pub(super) fn is_awaited_due(&self, now: Instant) -> bool {
        self.awaited.is_some_and(|at| at <= now)
    }

    /// Returns true if other initiators have been waiting for too long, like `check_data` in
    /// [`iscsi::Channel`](crate::iscsi::Channel). `is_owed` is set if they are waiting for memory
    /// and this channel uses more than its share.
    pub(super) fn check_awaited(
        &mut self,
        now: Instant,
        is_owed: bool,
        requests: &RequestTable,
    ) -> bool {
        let begun = self.pace.start_wait(now);
        self.owed = is_owed.then(|| self.owed.unwrap_or(begun));
        let is_in_order = |io: &SendIoctx| io.began.is_some() && !io.exec.is_gathering();
        let is_held = |io: &SendIoctx| is_in_order(io) && io.exec.holds_others();
        let held = requests.iter().any(|(_, io)| is_held(io));
        self.held = held.then(|| self.held.unwrap_or(begun));
        if is_owed && let Some(at) = &mut self.chains {
            *at = (*at).min(now + OWED);
        }
        let (owed, held, pace) = (self.owed, self.held, &self.pace);
        let due = |io: &SendIoctx| {
            let began = io.began?;
            let owed = owed.map(|since| pace.due_awaited(began.later(since), self.data_timeout));
            let held = held.filter(|_| is_in_order(io));
            // Other initiators wait for the total time of all pieces.
            let ordered = io.ordered.unwrap_or(began);
            let held = held.map(|since| pace.due_awaited(ordered.later(since), OWED));
            owed.into_iter().chain(held).min()
        };
        let due = requests.iter().filter_map(|(_, io)| due(io)).min();
        let look = if requests.iter().any(|(_, io)| is_in_order(io)) {
            Some(now + ORDER_CHECK_INTERVAL)
        } else {
            // The channel is not notified if it exceeds its share of memory while other initiators
            // are already waiting.
            let is_waiting = requests.iter().any(|(_, io)| io.began.is_some());
            (is_owed || is_waiting).then_some(now + OWED)
        };
        self.awaited = look.into_iter().chain(due).min();
        due.is_some_and(|at| at <= now)
    }
}
