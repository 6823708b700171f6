//! Command window of a session (RFC 7143 4.2.2.1), shared by all its connections.
//!
//! Commands for a session can be received on several connections, and by several workers. They must
//! be executed in CmdSN order: a connection executes the next command immediately. If it receives a
//! later command, it keeps this in a queue and adds an entry here, to be notified when it's next.
//!
//! ```text
//!                  next CmdSN → Now
//!   admit(number) ─┤ later, inside the window → Later: queued by its connection, entry added here
//!                  └ anything else → Never: ignored
//!   next_up() → connection with the next request
//! ```
//!
//! We don't admit the next command until the previous one is in the task set of its unit
//! ([`Window::on_carried_out`]). Otherwise, a command on another connection and worker could be
//! added first.
//!
//! With a single connection and a lossless stream there are no entries, because a CmdSN can then
//! only be the next one or an old one.
//!
//! This also contains an index of commands by tag, if other connections can refer to them to abort
//! a command or to claim a command from a lost connection ([`Tag`]).
//!
//! # Limits
//! The number of entries is limited by the command window plus [`MAX_AHEAD`], and the number of
//! tags by the contexts of all connections of the session.

use std::collections::HashMap;
use std::sync::PoisonError;

use riser_scsi::iscsi::login::SessionParams;
use riser_scsi::iscsi::{CmdSn, Itt};
use riser_sync::{Mutex, MutexGuard};

use crate::fabric::{ConnRef, TaskRef};

/// Number of context sets per connection, each with the size of the window: for active commands,
/// for responses being sent, and for queued responses. A response opens the window before it's
/// sent, but the initiator can't use the new slot before receiving the response, so this is
/// sufficient.
pub(super) const WINDOWS: u16 = 3;

/// Maximum number of immediate functions waiting for earlier commands, plus abandoned CmdSN values.
const MAX_AHEAD: usize = 64;

/// Admission result for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// This is the next request. All other requests must wait until [`Window::on_carried_out`].
    Now,
    /// Process it without waiting and without affecting the order.
    AtOnce,
    /// Queue the request until it's next.
    Later,
    /// Ignore the request, because it's outside the window, a duplicate, or exceeds a limit.
    Never,
}

/// Entry for a request received out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ahead {
    sn: CmdSn,
    /// Connection with the request, or `None` if it was abandoned by the initiator.
    whose: Option<ConnRef>,
    /// Immediate request. It doesn't use a CmdSN, but must wait for all previous commands.
    immediate: bool,
    /// ABORT TASK for the previous CmdSN. It doesn't have to wait for other commands.
    aborts: bool,
}

impl Ahead {
    fn of_command(sn: CmdSn, whose: Option<ConnRef>) -> Self {
        Self {
            sn,
            whose,
            immediate: false,
            aborts: false,
        }
    }

    fn of_function(sn: CmdSn, whose: ConnRef, aborts: bool) -> Self {
        Self {
            sn,
            whose: Some(whose),
            immediate: true,
            aborts,
        }
    }

    /// Returns true if this is next when `exp` is the next CmdSN.
    fn is_due(&self, exp: CmdSn) -> bool {
        self.sn == exp || (self.immediate && self.sn.is_before(exp))
    }
}

/// Command with a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Context on the connection with the allegiance.
    pub(super) task: TaskRef,
    /// The response was sent, but might not have been received.
    pub(super) responded: bool,
    /// Aborted by the initiator on another connection, so there will be no response.
    is_aborted: bool,
    /// The connection was logged out for recovery, so another connection can claim this command.
    pub(super) is_free: bool,
    /// Doesn't use a slot in the window.
    pub(super) immediate: bool,
}

/// Command window for a session.
#[derive(Debug)]
pub struct Window {
    commands: u16,
    /// Requests can be received out of order.
    unordered: bool,
    /// Commands can be reassigned. In this case, completed commands are kept until they are
    /// acknowledged.
    reassigns: bool,
    numbering: Mutex<Numbering>,
}

#[derive(Debug)]
struct Numbering {
    exp: CmdSn,
    /// An admitted request is being processed. All later requests must wait, regardless of their
    /// connection.
    is_taken: bool,
    /// Number of requests using a slot in the window.
    counted: u16,
    /// Number of completed requests that used a slot, with a response that wasn't sent yet.
    lingering: u16,
    ahead: Vec<Ahead>,
    /// Active commands by tag, if other connections can refer to them.
    tags: HashMap<Itt, Tag>,
}

impl Window {
    /// Creates a window with `commands` slots. The first CmdSN is `first`. If `unordered` is set,
    /// requests can be received out of order, because the session may have several connections or
    /// PDUs may be lost.
    #[must_use]
    pub fn new(commands: u16, first: CmdSn, unordered: bool) -> Self {
        Self {
            commands,
            unordered,
            reassigns: false,
            numbering: Mutex::new(Numbering {
                exp: first,
                is_taken: false,
                counted: 0,
                lingering: 0,
                ahead: Vec::new(),
                tags: HashMap::new(),
            }),
        }
    }

    /// Creates a window with `commands` slots, based on the negotiated parameters.
    #[must_use]
    pub fn of(params: &SessionParams, commands: u16, first: CmdSn) -> Self {
        let level = params.error_recovery_level;
        Self {
            reassigns: level > 1,
            ..Self::new(commands, first, params.max_connections > 1 || level > 0)
        }
    }

    /// Returns the maximum number of commands in flight for all connections.
    #[must_use]
    pub fn commands(&self) -> u16 {
        self.commands
    }

    /// Returns true if requests can be received out of order.
    pub(super) fn is_unordered(&self) -> bool {
        self.unordered
    }

    /// Returns the current ExpCmdSN and MaxCmdSN.
    pub(super) fn bounds(&self) -> (CmdSn, CmdSn) {
        let numbering = self.lock();
        let room = self.room(&numbering);
        let max = numbering.exp.0.wrapping_add(u32::from(room));
        (numbering.exp, CmdSn(max.wrapping_sub(1)))
    }

    /// Returns the number of free slots.
    fn room(&self, numbering: &Numbering) -> u16 {
        let used = numbering.counted.saturating_add(numbering.lingering);
        // If the initiator doesn't read a response, its context stays in use. We close the window
        // if there are many of these, so that there is always a context for a command.
        let contexts = WINDOWS.saturating_mul(self.commands).saturating_sub(used);
        contexts.min(self.commands.saturating_sub(numbering.counted))
    }

    /// Checks a request with a CmdSN. If this returns [`Admission::Now`], the request also has a
    /// slot in the window. This must be a single step, because the connections of a session may
    /// belong to different workers. The slot is released with [`Window::on_response`] or
    /// [`Window::on_gone`], and the next request is admitted after [`Window::on_carried_out`]. A
    /// function that refers to previous commands has priority.
    pub(super) fn admit(&self, sn: CmdSn, who: ConnRef) -> Admission {
        let mut numbering = self.lock();
        let room = u32::from(self.room(&numbering));
        let steps = sn.since(numbering.exp);
        // CmdSN can wrap, so an old value is far ahead of the next one and also outside the window.
        if steps >= room {
            return Admission::Never;
        }
        let is_known = |ahead: &&Ahead| ahead.sn == sn && !ahead.immediate;
        let known = numbering.ahead.iter().find(is_known).copied();
        // It could be next while no connection was notified yet.
        if known.is_some_and(|known| known.whose != Some(who)) {
            return Admission::Never;
        }
        if steps == 0 && !numbering.is_taken && !numbering.has_function_due() {
            numbering.exp = sn.next();
            // This isn't required with a single connection in order.
            numbering.is_taken = self.unordered;
            numbering.counted += 1;
            numbering
                .ahead
                .retain(|ahead| ahead.immediate || ahead.sn != sn);
            return Admission::Now;
        }
        if !self.unordered || known.is_some() {
            return Admission::Never;
        }
        numbering.queue_ahead(Ahead::of_command(sn, Some(who)))
    }

    /// Called when the last admitted command has a response or is in the task set of its unit, so
    /// the next request can be admitted.
    pub(super) fn on_carried_out(&self) {
        if self.unordered {
            self.lock().is_taken = false;
        }
    }

    /// Checks an immediate function. It refers to all commands before its CmdSN, so these must be
    /// received first.
    pub(super) fn admit_function(&self, sn: CmdSn, who: ConnRef) -> Admission {
        self.admit_immediate(Ahead::of_function(sn, who, false))
    }

    fn admit_immediate(&self, function: Ahead) -> Admission {
        let mut numbering = self.lock();
        let sn = function.sn;
        let steps = sn.since(numbering.exp);
        if !self.unordered || steps > u32::from(self.room(&numbering)) {
            return Admission::AtOnce;
        }
        if steps == 0 && !numbering.is_taken {
            numbering.is_taken = true;
            return Admission::Now;
        }
        numbering.queue_ahead(function)
    }

    /// Checks an immediate ABORT TASK for the command with CmdSN `of`. It only refers to this
    /// command and doesn't wait for any other. If this command was not received, its CmdSN is
    /// abandoned in the same step: the command may be lost, and nothing after it can be executed
    /// until its CmdSN is used (RFC 7143 11.5.1). Also returns the CmdSN that it must wait for.
    pub(super) fn admit_abort(&self, of: CmdSn, sn: CmdSn, who: ConnRef) -> (Admission, CmdSn) {
        if !of.is_before(sn) {
            return (self.admit_function(sn, who), sn);
        }
        if self.forgo(of, sn) {
            return (Admission::AtOnce, sn);
        }
        let abort = Ahead::of_function(of.next(), who, true);
        (self.admit_immediate(abort), abort.sn)
    }

    /// Returns the connection with the next request.
    pub(super) fn next_up(&self) -> Option<ConnRef> {
        if !self.unordered {
            return None;
        }
        let mut numbering = self.lock();
        loop {
            if numbering.is_taken {
                return None;
            }
            let exp = numbering.exp;
            // A function precedes the command with the same CmdSN.
            let due = numbering.ahead.iter().filter(|ahead| ahead.is_due(exp));
            let first = *due.max_by_key(|ahead| ahead.immediate)?;
            if first.whose.is_some() {
                return first.whose;
            }
            numbering.ahead.retain(|ahead| *ahead != first);
            numbering.exp = exp.next();
        }
    }

    /// Returns true if a queued immediate request is next. In this case, its entry is removed and
    /// other requests must wait until [`Window::on_carried_out`].
    pub(super) fn is_due(&self, sn: CmdSn, who: ConnRef) -> bool {
        let mut numbering = self.lock();
        if numbering.is_taken || numbering.exp.is_before(sn) {
            return false;
        }
        // There can be several functions with the same CmdSN, and we only remove one of them.
        let is_it = |a: &Ahead| a.immediate && a.sn == sn && a.whose == Some(who);
        if let Some(at) = numbering.ahead.iter().position(is_it) {
            numbering.ahead.remove(at);
        }
        numbering.is_taken = true;
        true
    }

    /// Abandons a command that wasn't received. Its CmdSN is considered received if it's inside the
    /// window and before `before` (RFC 7143 11.6.1). Returns true if it was abandoned now or
    /// earlier.
    pub(super) fn forgo(&self, sn: CmdSn, before: CmdSn) -> bool {
        let mut numbering = self.lock();
        let room = u32::from(self.room(&numbering));
        let inside = sn.since(numbering.exp) < room && sn.is_before(before);
        let mut ahead = numbering.ahead.iter();
        let known = ahead.find(|ahead| ahead.sn == sn && !ahead.immediate);
        if let Some(known) = known {
            return known.whose.is_none();
        }
        if !self.unordered || !inside {
            return false;
        }
        numbering.queue_ahead(Ahead::of_command(sn, None)) == Admission::Later
    }

    /// Removes a connection and its queued requests. If one of them is referenced by an abort, its
    /// CmdSN is abandoned, because it won't be sent again and the abort is waiting for it.
    pub(super) fn remove_connection(&self, who: ConnRef) {
        if !self.unordered {
            return;
        }
        let mut numbering = self.lock();
        let (own, mut others): (Vec<_>, Vec<_>) = std::mem::take(&mut numbering.ahead)
            .into_iter()
            .partition(|ahead| ahead.whose == Some(who));
        let is_aborted = |own: &Ahead| {
            let mut others = others.iter();
            !own.immediate && others.any(|other| other.aborts && other.sn == own.sn.next())
        };
        let aborted: Vec<_> = own.into_iter().filter(is_aborted).collect();
        let abandoned = aborted.iter().map(|own| Ahead::of_command(own.sn, None));
        others.extend(abandoned);
        numbering.ahead = others;
    }

    /// Called for the response to a request with a slot. The slot is released, but the context is
    /// still in use.
    pub(super) fn on_response(&self) {
        let mut numbering = self.lock();
        numbering.counted = numbering.counted.saturating_sub(1);
        numbering.lingering += 1;
    }

    /// Called when a request with a slot releases its context, either with or without a response.
    pub(super) fn on_gone(&self, had_response: bool) {
        let mut numbering = self.lock();
        let count = if had_response {
            &mut numbering.lingering
        } else {
            &mut numbering.counted
        };
        *count = count.saturating_sub(1);
    }

    /// Adds the tag of a command. This removes a completed command with the same tag, because an
    /// initiator that reuses the tag must have received the response.
    pub(super) fn insert_tag(&self, itt: Itt, task: TaskRef, immediate: bool) {
        if self.unordered {
            let tag = Tag {
                task,
                responded: false,
                is_aborted: false,
                is_free: false,
                immediate,
            };
            self.lock().tags.insert(itt, tag);
        }
    }

    /// Returns the active command with this tag on any connection.
    pub(super) fn tagged(&self, itt: Itt) -> Option<TaskRef> {
        let tag = self.tag(itt)?;
        (!tag.responded).then_some(tag.task)
    }

    /// Aborts the active command with this tag on any connection. The caller must notify its
    /// channel.
    pub(super) fn abort_tag(&self, itt: Itt) -> Option<TaskRef> {
        if !self.unordered {
            return None;
        }
        let mut numbering = self.lock();
        let tag = numbering.tags.get_mut(&itt).filter(|tag| !tag.responded)?;
        tag.is_aborted = true;
        Some(tag.task)
    }

    /// Returns true if a command was aborted with [`Window::abort_tag`].
    pub(super) fn is_aborted(&self, itt: Itt, task: TaskRef) -> bool {
        let tag = self.tag(itt).filter(|tag| tag.task == task);
        tag.is_some_and(|tag| tag.is_aborted)
    }

    /// Returns the command with this tag on any connection.
    pub(super) fn tag(&self, itt: Itt) -> Option<Tag> {
        if !self.unordered {
            return None;
        }
        self.lock().tags.get(&itt).copied()
    }

    /// Called when the response for a command is queued.
    pub(super) fn mark_tag_responded(&self, itt: Itt, task: TaskRef) {
        if !self.reassigns {
            return self.remove_tag(itt, task);
        }
        let mut numbering = self.lock();
        if let Some(tag) = numbering.tags.get_mut(&itt).filter(|tag| tag.task == task) {
            tag.responded = true;
        }
    }

    /// Removes a command.
    pub(super) fn remove_tag(&self, itt: Itt, task: TaskRef) {
        if self.unordered {
            let mut numbering = self.lock();
            if numbering.tags.get(&itt).is_some_and(|tag| tag.task == task) {
                numbering.tags.remove(&itt);
            }
        }
    }

    /// Called when a connection was logged out for recovery, so other connections can claim its
    /// commands.
    pub(super) fn free_tags(&self, of: ConnRef) {
        let mut numbering = self.lock();
        let tags = numbering.tags.values_mut();
        tags.filter(|tag| tag.task.conn() == of)
            .for_each(|tag| tag.is_free = true);
    }

    /// Claims a command for another connection, using the context `to`. Returns false if it's no
    /// longer available or not in the context `from`.
    pub(super) fn claim_tag(&self, itt: Itt, from: TaskRef, to: TaskRef) -> bool {
        let mut numbering = self.lock();
        let tag = numbering.tags.get_mut(&itt);
        let Some(tag) = tag.filter(|tag| tag.is_free && tag.task == from) else {
            return false;
        };
        (tag.task, tag.is_free) = (to, false);
        true
    }

    /// Ignore poisoning, because a panic elsewhere can't leave the state inconsistent.
    fn lock(&self) -> MutexGuard<'_, Numbering> {
        self.numbering
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Numbering {
    /// Returns true if an immediate request is next.
    fn has_function_due(&self) -> bool {
        let is_due = |a: &Ahead| a.immediate && a.is_due(self.exp);
        self.ahead.iter().any(is_due)
    }

    fn queue_ahead(&mut self, ahead: Ahead) -> Admission {
        let others = self
            .ahead
            .iter()
            .filter(|a| a.immediate || a.whose.is_none());
        // Queued commands are already limited by the window.
        let is_bounded = !ahead.immediate && ahead.whose.is_some();
        if !is_bounded && others.count() >= MAX_AHEAD {
            return Admission::Never;
        }
        self.ahead.push(ahead);
        Admission::Later
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use riser_sync::atomic::{AtomicU32, Ordering};
    use riser_sync::testing::explore;
    use riser_sync::{mpsc, thread};

    use super::*;

    const A: ConnRef = ConnRef {
        worker: 0,
        serial: 1,
    };
    const B: ConnRef = ConnRef {
        worker: 1,
        serial: 1,
    };

    /// Admits a request, and processes it immediately if this is allowed.
    fn admit(window: &Window, sn: CmdSn, who: ConnRef) -> Admission {
        let admission = window.admit(sn, who);
        if admission == Admission::Now {
            window.on_carried_out();
        }
        admission
    }

    /// Same for a queued function.
    fn is_due(window: &Window, sn: CmdSn, who: ConnRef) -> bool {
        let is_due = window.is_due(sn, who);
        if is_due {
            window.on_carried_out();
        }
        is_due
    }

    #[test]
    fn command_waits_for_previous_execution() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit(CmdSn(1), A), Admission::Now);
        assert_eq!(window.admit(CmdSn(2), B), Admission::Later);
        assert_eq!(window.admit_function(CmdSn(2), B), Admission::Later);
        assert!(!window.is_due(CmdSn(2), B));
        assert_eq!(window.admit(CmdSn(2), B), Admission::Never, "it is known");
        assert_eq!(window.next_up(), None);
        window.on_carried_out();
        assert_eq!(window.next_up(), Some(B));
        assert!(is_due(&window, CmdSn(2), B));
        assert_eq!(window.admit(CmdSn(2), B), Admission::Now);
        // Requests on a single connection are in order.
        let window = Window::new(8, CmdSn(1), false);
        for sn in 1..4 {
            assert_eq!(window.admit(CmdSn(sn), A), Admission::Now);
        }
    }

    /// Another worker could receive the command before the worker that has executed the previous
    /// one checks for the next request.
    #[test]
    fn abandoned_number_is_not_admitted() {
        let window = Window::new(8, CmdSn(1), true);
        let (admission, _) = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!(admission, Admission::AtOnce);
        assert_eq!(window.admit(CmdSn(1), A), Admission::Now);
        window.on_carried_out();
        assert_eq!(window.admit(CmdSn(2), B), Admission::Never, "it is aborted");
        assert_eq!(window.next_up(), None);
        assert_eq!(window.bounds().0, CmdSn(3));
        // Same if another connection has it queued.
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit(CmdSn(2), B), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        assert_eq!(window.admit(CmdSn(2), A), Admission::Never, "sent twice");
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Now);
    }

    /// If the abort was received a bit later, it would have abandoned the command.
    #[test]
    fn abort_does_not_wait_for_discarded_command() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        let abort = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!(abort, (Admission::Later, CmdSn(3)));
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        assert_eq!(window.next_up(), Some(B));
        // The connection is closed before it was notified.
        window.remove_connection(B);
        assert_eq!(window.next_up(), Some(A));
        assert!(is_due(&window, CmdSn(3), A));
        assert_eq!(window.bounds().0, CmdSn(3));
        // A function that affects several commands must wait until the CmdSN is received again.
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        assert_eq!(window.admit_function(CmdSn(3), A), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        window.remove_connection(B);
        assert_eq!(window.next_up(), None);
    }

    #[test]
    fn commands_take_their_turn() {
        let window = Window::new(8, CmdSn(10), true);
        assert_eq!(admit(&window, CmdSn(12), B), Admission::Later);
        assert_eq!(admit(&window, CmdSn(12), A), Admission::Never, "sent twice");
        assert_eq!(admit(&window, CmdSn(11), A), Admission::Later);
        assert_eq!(window.next_up(), None);
        assert_eq!(admit(&window, CmdSn(10), B), Admission::Now);
        assert_eq!(window.next_up(), Some(A));
        assert_eq!(admit(&window, CmdSn(11), A), Admission::Now);
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(12), B), Admission::Now);
        assert_eq!(window.next_up(), None);
        assert_eq!(window.bounds(), (CmdSn(13), CmdSn(17)));
        window.on_gone(false);
        assert_eq!(window.bounds(), (CmdSn(13), CmdSn(18)));
        assert_eq!(admit(&window, CmdSn(19), A), Admission::Never, "outside");
        assert_eq!(admit(&window, CmdSn(12), A), Admission::Never, "an old one");
    }

    #[test]
    fn window_closes_and_opens_across_wrap() {
        let window = Window::new(2, CmdSn(u32::MAX), false);
        for sn in [u32::MAX, 0] {
            assert_eq!(admit(&window, CmdSn(sn), A), Admission::Now);
        }
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(0)), "closed");
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Never);
        window.on_response();
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(1)));
        assert_eq!(
            admit(&window, CmdSn(2), A),
            Admission::Never,
            "in order only"
        );
        window.on_gone(true);
        window.on_gone(false);
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(2)));
    }

    /// The connections are on different workers, so a request can be admitted before the previous
    /// one has a context.
    #[test]
    fn connections_do_not_share_window_slot() {
        let window = Window::new(2, CmdSn(1), true);
        for sn in [1, 2] {
            assert_eq!(admit(&window, CmdSn(sn), A), Admission::Now);
        }
        assert_eq!(admit(&window, CmdSn(3), B), Admission::Never);
        assert_eq!(window.bounds(), (CmdSn(3), CmdSn(2)), "closed");
    }

    /// Releasing a slot twice would be a bug, but it must not make the window larger.
    #[test]
    fn window_never_exceeds_its_commands() {
        let window = Window::new(2, CmdSn(1), true);
        window.on_gone(false);
        window.on_gone(true);
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(2)));
    }

    #[test]
    fn function_waits_for_previous_commands() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit_function(CmdSn(1), A), Admission::Now);
        assert_eq!(
            window.admit(CmdSn(1), B),
            Admission::Later,
            "its turn lasts"
        );
        window.on_carried_out();
        assert_eq!(window.admit_function(CmdSn(2), A), Admission::Later);
        assert!(!window.is_due(CmdSn(2), A));
        assert_eq!(admit(&window, CmdSn(1), B), Admission::Now);
        assert_eq!(window.next_up(), Some(A));
        assert!(window.is_due(CmdSn(2), A));
        assert_eq!(
            window.admit(CmdSn(2), B),
            Admission::Later,
            "its turn lasts"
        );
        assert_eq!(window.next_up(), None);
        window.on_carried_out();
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Now);
        assert_eq!(window.next_up(), None);
    }

    /// Otherwise, a command received after the function would be aborted by it without a response.
    #[test]
    fn commands_do_not_overtake_due_function() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit_function(CmdSn(2), B), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        assert_eq!(admit(&window, CmdSn(2), A), Admission::Later);
        assert_eq!(window.next_up(), Some(B));
        assert!(is_due(&window, CmdSn(2), B));
        assert_eq!(window.next_up(), Some(A));
        assert_eq!(admit(&window, CmdSn(2), A), Admission::Now);
        assert_eq!(window.next_up(), None);
    }

    #[test]
    fn functions_with_same_number_each_get_turn() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit_function(CmdSn(2), A), Admission::Later);
        assert_eq!(window.admit_function(CmdSn(2), A), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), B), Admission::Now);
        for _ in 0..2 {
            assert_eq!(window.next_up(), Some(A));
            assert!(is_due(&window, CmdSn(2), A));
        }
        assert_eq!(window.next_up(), None);
    }

    #[test]
    fn abandoned_command_counts_as_received() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        assert!(!window.forgo(CmdSn(2), CmdSn(3)), "it has come");
        assert!(!window.forgo(CmdSn(3), CmdSn(3)), "not before the function");
        assert!(window.forgo(CmdSn(1), CmdSn(3)));
        assert_eq!(window.next_up(), Some(B));
        window.remove_connection(B);
        assert_eq!(window.next_up(), None);
        assert_eq!(window.bounds().0, CmdSn(2));
    }

    #[test]
    fn abort_waits_only_for_its_command() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        // A queued command is executed first.
        let (admission, sn) = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!((admission, sn), (Admission::Later, CmdSn(3)));
        // A missing command is abandoned, and is ignored if it's received later.
        let (admission, _) = window.admit_abort(CmdSn(1), CmdSn(4), A);
        assert_eq!(admission, Admission::AtOnce);
        assert!(window.forgo(CmdSn(1), CmdSn(4)));
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Never);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Now);
        assert_eq!(window.next_up(), Some(A));
        assert!(is_due(&window, CmdSn(3), A));
        // A running request and a lost request.
        assert_eq!(window.admit_abort(CmdSn(2), CmdSn(5), A).0, Admission::Now);
        window.on_carried_out();
        assert_eq!(
            window.admit_abort(CmdSn(1), CmdSn(5), A).0,
            Admission::AtOnce
        );
    }

    proptest! {
        /// Commands must be executed once and in order, regardless of which of the two connections
        /// receives them.
        #[test]
        fn commands_are_executed_in_turn(
            keys in proptest::collection::vec((any::<u16>(), any::<bool>()), 1..40),
            first: u32,
        ) {
            let window = Window::new(40, CmdSn(first), true);
            let sn = |at: usize| CmdSn(first).plus(at as u32);
            let mut order: Vec<usize> = (0..keys.len()).collect();
            order.sort_by_key(|at| keys[*at].0);
            let member = |at: usize| if keys[at].1 { A } else { B };
            let (mut kept, mut done) = (Vec::new(), Vec::new());
            for at in order {
                match admit(&window, sn(at), member(at)) {
                    Admission::Now => done.push(at),
                    Admission::Later => kept.push(at),
                    Admission::AtOnce | Admission::Never => prop_assert!(false, "{at} is inside the window"),
                }
                prop_assert_eq!(admit(&window, sn(at), A), Admission::Never, "sent twice");
                while let Some(whose) = window.next_up() {
                    let (exp, _) = window.bounds();
                    let next = kept.iter().position(|at| sn(*at) == exp);
                    let at = kept.swap_remove(next.expect("a connection keeps it"));
                    prop_assert_eq!(whose, member(at));
                    prop_assert_eq!(admit(&window, sn(at), whose), Admission::Now);
                    done.push(at);
                }
            }
            prop_assert!(kept.is_empty());
            prop_assert_eq!(done, (0..keys.len()).collect::<Vec<_>>());
        }
    }

    /// Size of the window shared by two workers.
    const PLACES: u32 = 2;

    /// State shared by both workers, in addition to the window.
    #[derive(Default)]
    struct Done {
        carried_out: Mutex<Vec<CmdSn>>,
        /// Number of commands with a slot. May not include a command that was just admitted.
        taken: AtomicU32,
        /// Number of completed commands. May include a command that is about to complete.
        responded: AtomicU32,
    }

    /// Connection on its own worker, using the window in the same way as `order`.
    struct Worker {
        me: ConnRef,
        window: Arc<Window>,
        done: Arc<Done>,
        /// Wakers for A and B.
        wakes: [mpsc::Sender<()>; 2],
        /// Commands that the initiator sends without checking the window.
        coming: VecDeque<CmdSn>,
        kept: Vec<CmdSn>,
        running: usize,
    }

    impl Worker {
        /// Receives commands, executes them in order, and sends the responses.
        fn run(mut self, woken: &mpsc::Receiver<()>) {
            while !self.coming.is_empty() || !self.kept.is_empty() || self.running > 0 {
                let has_received = self.receive();
                self.take_turns();
                if !has_received && !self.respond() {
                    let wake = woken.recv_timeout(Duration::from_secs(10));
                    wake.expect("lost turn or response");
                }
            }
        }

        /// Receives the next command. Returns false if there are no more. If a command is ignored,
        /// it's sent again later because it's outside the window until another command completes.
        fn receive(&mut self) -> bool {
            let Some(sn) = self.coming.front().copied() else {
                return false;
            };
            match self.window.admit(sn, self.me) {
                Admission::Now => self.carry_out(sn),
                Admission::Later => self.kept.push(sn),
                Admission::Never => return false,
                Admission::AtOnce => panic!("{sn:?} takes a turn"),
            }
            self.assert_fits(sn);
            self.coming.pop_front();
            true
        }

        fn carry_out(&mut self, sn: CmdSn) {
            let taken = 1 + self.done.taken.fetch_add(1, Ordering::SeqCst);
            assert!(taken <= PLACES, "{taken} commands in {PLACES} places");
            self.running += 1;
            self.done.carried_out.lock().unwrap().push(sn);
            self.window.on_carried_out();
        }

        fn take_turns(&mut self) {
            while let Some(whose) = self.window.next_up() {
                if whose != self.me {
                    return self.wake(whose);
                }
                let (exp, _) = self.window.bounds();
                let due = self.kept.iter().position(|sn| *sn == exp);
                let Some(at) = due.filter(|_| self.window.admit(exp, self.me) == Admission::Now)
                else {
                    return;
                };
                let sn = self.kept.swap_remove(at);
                self.carry_out(sn);
            }
        }

        /// Completes a command. Returns false if no command is active.
        fn respond(&mut self) -> bool {
            if self.running == 0 {
                return false;
            }
            self.running -= 1;
            self.done.taken.fetch_sub(1, Ordering::SeqCst);
            self.done.responded.fetch_add(1, Ordering::SeqCst);
            self.window.on_response();
            // The response contains MaxCmdSN, so the other connection can now send its next
            // command.
            let (_, max) = self.window.bounds();
            self.assert_fits(max);
            self.window.on_gone(true);
            self.wake(if self.me == A { B } else { A });
            true
        }

        /// Checks that a CmdSN is inside the window: one slot for each active command before it,
        /// and one for the command.
        fn assert_fits(&self, sn: CmdSn) {
            let last = PLACES + self.done.responded.load(Ordering::SeqCst);
            assert!(sn.0 <= last, "{sn:?} in a window to {last}");
        }

        /// Wakes a worker. There is nothing to do if its connection is closed.
        fn wake(&self, whose: ConnRef) {
            let _ = self.wakes[usize::from(whose.worker)].send(());
        }
    }

    #[test]
    fn interleavings_execute_commands_in_window_order() {
        explore(|| {
            let window = Arc::new(Window::new(PLACES as u16, CmdSn(1), true));
            let done = Arc::<Done>::default();
            let (to_a, of_a) = mpsc::channel();
            let (to_b, of_b) = mpsc::channel();
            // Two commands on one connection are followed by a command on the other, which may be
            // received before a slot is available.
            let commands = [[1, 2, 5], [3, 4, 6]].map(|numbers| numbers.map(CmdSn));
            let workers: Vec<_> = [(A, of_a), (B, of_b)]
                .into_iter()
                .zip(commands)
                .map(|((me, woken), commands)| {
                    let worker = Worker {
                        me,
                        window: Arc::clone(&window),
                        done: Arc::clone(&done),
                        wakes: [to_a.clone(), to_b.clone()],
                        coming: commands.into(),
                        kept: Vec::new(),
                        running: 0,
                    };
                    thread::spawn(move || worker.run(&woken))
                })
                .collect();
            workers.into_iter().for_each(|one| one.join().unwrap());
            let in_order: Vec<_> = (1..7).map(CmdSn).collect();
            assert_eq!(*done.carried_out.lock().unwrap(), in_order);
            assert_eq!(window.next_up(), None);
            assert_eq!(window.bounds(), (CmdSn(7), CmdSn(8)), "all places are free");
        });
    }

    #[test]
    fn early_requests_are_bounded() {
        let window = Window::new(200, CmdSn(0), true);
        let later = (1..200)
            .filter(|sn| window.admit_function(CmdSn(*sn), A) == Admission::Later)
            .count();
        assert_eq!(later, MAX_AHEAD);
    }
}
