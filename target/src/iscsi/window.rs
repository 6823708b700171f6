//! A session's command numbers (RFC 7143 4.2.2.1), which all its connections share.
//!
//! Commands of one session may come on several connections, on several workers. They are carried
//! out in the order of their numbers: the connection that has the next one takes it; one that has a
//! later one keeps it and enters that here, and is notified when its turn has come.
//!
//! ```text
//!                  next number → Now
//!   admit(number) ─┤ later, inside the window → Later: kept by its connection, entered here
//!                  └ anything else → Never: passed over in silence
//!   next_up() → the connection that keeps what is next
//! ```
//!
//! The next number is not served before the command that was admitted has entered its unit's task
//! set ([`Window::on_carried_out`]): another connection, on another worker, would get its command
//! in first.
//!
//! A session of one connection over a lossless stream never enters anything: a number that is not
//! the next one is an old one then.
//!
//! Commands are named by their tags here too, where another connection may name them: to abort one,
//! or to take it over from a connection that is lost ([`Tag`]).
//!
//! # Bounds
//! What is entered is bounded by the command window and [`MAX_AHEAD`]; tags by the contexts of the
//! session's connections.

use std::collections::HashMap;
use std::sync::PoisonError;

use riser_scsi::iscsi::login::SessionParams;
use riser_scsi::iscsi::{CmdSn, Itt};
use riser_sync::{Mutex, MutexGuard};

use crate::fabric::{ConnRef, TaskRef};

/// Windows of contexts per connection: one for commands that run, one for those whose answers are
/// being sent, and one for those whose answers wait behind these. An answer opens the window before
/// it is sent, and the initiator learns of that no earlier than it arrives, so there are never
/// more.
pub(super) const WINDOWS: u16 = 3;

/// Immediate functions that wait for earlier commands, and numbers that were given up.
const MAX_AHEAD: usize = 64;

/// Decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Its turn has come: others wait until [`Window::on_carried_out`].
    Now,
    /// It waits for no turn, and takes none.
    AtOnce,
    /// Keep it until its turn has come.
    Later,
    /// Outside the window, known already, or beyond a bound: it is passed over.
    Never,
}

/// A number that came before its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ahead {
    sn: CmdSn,
    /// The connection that keeps the request; none where the initiator has given it up.
    whose: Option<ConnRef>,
    /// An immediate request, which takes no number: it waits for those before it.
    immediate: bool,
    /// It is ABORT TASK of the command before its number, and waits for nothing else.
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

    /// Whether it waits for nothing but its turn, where `exp` is the next number.
    fn is_due(&self, exp: CmdSn) -> bool {
        self.sn == exp || (self.immediate && self.sn.is_before(exp))
    }
}

/// A command, by its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Its context, on the connection that it is allegiant to.
    pub(super) task: TaskRef,
    /// Its answer was sent, though perhaps not received.
    pub(super) answered: bool,
    /// The initiator has ended it from another connection: it is not answered any more.
    is_aborted: bool,
    /// Its connection has been logged out for recovery: another one may have it.
    pub(super) is_free: bool,
    /// It takes no place of the window.
    pub(super) immediate: bool,
}

/// The numbers of a session.
#[derive(Debug)]
pub struct Window {
    commands: u16,
    /// Numbers may come out of order at all.
    unordered: bool,
    /// Commands outlive their connection: answered ones are known until they are
    /// acknowledged, then.
    reassigns: bool,
    numbering: Mutex<Numbering>,
}

#[derive(Debug)]
struct Numbering {
    exp: CmdSn,
    /// A request that was admitted is being carried out: those after it wait, on whichever
    /// connection.
    is_taken: bool,
    /// Requests that take a place of the window.
    counted: u16,
    /// Requests that took one and are answered, but whose answer is not yet sent.
    lingering: u16,
    ahead: Vec<Ahead>,
    /// Commands under way by their tags, where other connections may name them.
    tags: HashMap<Itt, Tag>,
}

impl Window {
    /// Of a session of `commands` at once, whose first one has the number `first`. With
    /// `unordered`, numbers may come out of order: the session may have several connections, or
    /// lose PDUs.
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

    /// Of a session of `commands` at once that has agreed on these.
    #[must_use]
    pub fn of(params: &SessionParams, commands: u16, first: CmdSn) -> Self {
        let level = params.error_recovery_level;
        Self {
            reassigns: level > 1,
            ..Self::new(commands, first, params.max_connections > 1 || level > 0)
        }
    }

    /// Commands at once, over all connections.
    #[must_use]
    pub fn commands(&self) -> u16 {
        self.commands
    }

    /// Whether numbers may come out of order.
    pub(super) fn is_unordered(&self) -> bool {
        self.unordered
    }

    /// ExpCmdSN and MaxCmdSN at present.
    pub(super) fn bounds(&self) -> (CmdSn, CmdSn) {
        let numbering = self.lock();
        let room = self.room(&numbering);
        let max = numbering.exp.0.wrapping_add(u32::from(room));
        (numbering.exp, CmdSn(max.wrapping_sub(1)))
    }

    /// Places that are free.
    fn room(&self, numbering: &Numbering) -> u16 {
        let used = numbering.counted.saturating_add(numbering.lingering);
        // An answer that the initiator does not take keeps its context. With many of these the
        // window closes, so that commands never lack one.
        let contexts = WINDOWS.saturating_mul(self.commands).saturating_sub(used);
        contexts.min(self.commands.saturating_sub(numbering.counted))
    }

    /// Looks at a request that takes a number. With [`Admission::Now`] it has taken a place of the
    /// window, in the same step: connections of one session may belong to different workers. The
    /// place is free again with [`Window::on_answered`] or [`Window::on_gone`]; the turn is the
    /// next one's with [`Window::on_carried_out`]. A function that concerns the commands before it
    /// goes first.
    pub(super) fn admit(&self, sn: CmdSn, who: ConnRef) -> Admission {
        let mut numbering = self.lock();
        let room = u32::from(self.room(&numbering));
        let steps = sn.since(numbering.exp);
        // Numbers wrap: an old one is far ahead of the next one, and outside as well.
        if steps >= room {
            return Admission::Never;
        }
        let is_known = |ahead: &&Ahead| ahead.sn == sn && !ahead.immediate;
        let known = numbering.ahead.iter().find(is_known).copied();
        // Its turn may have come, and have been given to nobody yet.
        if known.is_some_and(|known| known.whose != Some(who)) {
            return Admission::Never;
        }
        if steps == 0 && !numbering.is_taken && !numbering.has_function_due() {
            numbering.exp = sn.next();
            // With one connection in order nothing can come in between.
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
        numbering.enter(Ahead::of_command(sn, Some(who)))
    }

    /// The command that was admitted last is in its unit's task set, or answered: it is the next
    /// one's turn.
    pub(super) fn on_carried_out(&self) {
        if self.unordered {
            self.lock().is_taken = false;
        }
    }

    /// Looks at an immediate function: it concerns the commands before its number, so these must
    /// have come.
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
        numbering.enter(function)
    }

    /// Looks at an immediate ABORT TASK, with the number of its command. It concerns no other, so it
    /// waits for no other. A command that has not come is given up here, in the same step: it may be
    /// lost, and nothing after it is carried out before its number is used (RFC 7143 11.5.1).
    /// Returns the number that it waits for as well.
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

    /// The connection that keeps what is to be carried out next.
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
            // A function goes before the command that has the number it carries.
            let due = numbering.ahead.iter().filter(|ahead| ahead.is_due(exp));
            let first = *due.max_by_key(|ahead| ahead.immediate)?;
            if first.whose.is_some() {
                return first.whose;
            }
            numbering.ahead.retain(|ahead| *ahead != first);
            numbering.exp = exp.next();
        }
    }

    /// Whether a kept immediate request may be carried out; it is entered no longer then, and others
    /// wait until [`Window::on_carried_out`].
    pub(super) fn is_due(&self, sn: CmdSn, who: ConnRef) -> bool {
        let mut numbering = self.lock();
        if numbering.is_taken || numbering.exp.is_before(sn) {
            return false;
        }
        // One of them: several functions may carry the same number, and each has a turn.
        let is_it = |a: &Ahead| a.immediate && a.sn == sn && a.whose == Some(who);
        if let Some(at) = numbering.ahead.iter().position(is_it) {
            numbering.ahead.remove(at);
        }
        numbering.is_taken = true;
        true
    }

    /// The initiator gives a command up that has not come: its number counts as received, if it is
    /// inside the window and before `before` (RFC 7143 11.6.1). Returns whether it was given up, now
    /// or before.
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
        numbering.enter(Ahead::of_command(sn, None)) == Admission::Later
    }

    /// A connection is gone, and what it kept with it. A command that another one aborts is given
    /// up: it does not come once more, and the abort waits for its number.
    pub(super) fn forget(&self, who: ConnRef) {
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
        let given_up = aborted.iter().map(|own| Ahead::of_command(own.sn, None));
        others.extend(given_up);
        numbering.ahead = others;
    }

    /// A request that took a place is answered: its place is free, its context not yet.
    pub(super) fn on_answered(&self) {
        let mut numbering = self.lock();
        numbering.counted = numbering.counted.saturating_sub(1);
        numbering.lingering += 1;
    }

    /// A request that took a place holds no context any more: one that was answered, or was not.
    pub(super) fn on_gone(&self, was_answered: bool) {
        let mut numbering = self.lock();
        let count = if was_answered {
            &mut numbering.lingering
        } else {
            &mut numbering.counted
        };
        *count = count.saturating_sub(1);
    }

    /// Enters a command's tag. An answered command with the same tag is forgotten: an initiator
    /// that uses the tag again has its answer.
    pub(super) fn enter_tag(&self, itt: Itt, task: TaskRef, immediate: bool) {
        if self.unordered {
            let tag = Tag {
                task,
                answered: false,
                is_aborted: false,
                is_free: false,
                immediate,
            };
            self.lock().tags.insert(itt, tag);
        }
    }

    /// The unanswered command with a tag, on whichever connection.
    pub(super) fn tagged(&self, itt: Itt) -> Option<TaskRef> {
        let tag = self.tag(itt)?;
        (!tag.answered).then_some(tag.task)
    }

    /// Ends the unanswered command with a tag, on whichever connection, whose channel has yet to be
    /// notified.
    pub(super) fn abort_tag(&self, itt: Itt) -> Option<TaskRef> {
        if !self.unordered {
            return None;
        }
        let mut numbering = self.lock();
        let tag = numbering.tags.get_mut(&itt).filter(|tag| !tag.answered)?;
        tag.is_aborted = true;
        Some(tag.task)
    }

    /// Whether [`Window::abort_tag`] has ended a command.
    pub(super) fn is_aborted(&self, itt: Itt, task: TaskRef) -> bool {
        let tag = self.tag(itt).filter(|tag| tag.task == task);
        tag.is_some_and(|tag| tag.is_aborted)
    }

    /// The command with a tag, on whichever connection.
    pub(super) fn tag(&self, itt: Itt) -> Option<Tag> {
        if !self.unordered {
            return None;
        }
        self.lock().tags.get(&itt).copied()
    }

    /// A command is answered.
    pub(super) fn answer_tag(&self, itt: Itt, task: TaskRef) {
        if !self.reassigns {
            return self.remove_tag(itt, task);
        }
        let mut numbering = self.lock();
        if let Some(tag) = numbering.tags.get_mut(&itt).filter(|tag| tag.task == task) {
            tag.answered = true;
        }
    }

    /// A command is over.
    pub(super) fn remove_tag(&self, itt: Itt, task: TaskRef) {
        if self.unordered {
            let mut numbering = self.lock();
            if numbering.tags.get(&itt).is_some_and(|tag| tag.task == task) {
                numbering.tags.remove(&itt);
            }
        }
    }

    /// A connection is logged out for recovery: other connections may have its commands.
    pub(super) fn free_tags(&self, of: ConnRef) {
        let mut numbering = self.lock();
        let tags = numbering.tags.values_mut();
        tags.filter(|tag| tag.task.conn() == of)
            .for_each(|tag| tag.is_free = true);
    }

    /// A command that is free becomes that of another connection, in the context `to`; whether it
    /// still was free, and that of `from`.
    pub(super) fn claim_tag(&self, itt: Itt, from: TaskRef, to: TaskRef) -> bool {
        let mut numbering = self.lock();
        let tag = numbering.tags.get_mut(&itt);
        let Some(tag) = tag.filter(|tag| tag.is_free && tag.task == from) else {
            return false;
        };
        (tag.task, tag.is_free) = (to, false);
        true
    }

    /// A panic elsewhere cannot have left the numbers half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Numbering> {
        self.numbering
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Numbering {
    /// Whether an immediate request waits for nothing but its turn.
    fn has_function_due(&self) -> bool {
        let is_due = |a: &Ahead| a.immediate && a.is_due(self.exp);
        self.ahead.iter().any(is_due)
    }

    fn enter(&mut self, ahead: Ahead) -> Admission {
        let others = self
            .ahead
            .iter()
            .filter(|a| a.immediate || a.whose.is_none());
        // The window itself bounds the commands that are kept.
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

    /// A request is carried out at once, where it may be.
    fn admit(window: &Window, sn: CmdSn, who: ConnRef) -> Admission {
        let admission = window.admit(sn, who);
        if admission == Admission::Now {
            window.on_carried_out();
        }
        admission
    }

    /// Likewise a function that is kept.
    fn is_due(window: &Window, sn: CmdSn, who: ConnRef) -> bool {
        let is_due = window.is_due(sn, who);
        if is_due {
            window.on_carried_out();
        }
        is_due
    }

    #[test]
    fn a_command_waits_until_the_one_before_it_is_carried_out() {
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
        // Numbers of one connection come in their order.
        let window = Window::new(8, CmdSn(1), false);
        for sn in 1..4 {
            assert_eq!(window.admit(CmdSn(sn), A), Admission::Now);
        }
    }

    /// Another worker may receive the command before the one that has carried out the number before
    /// it looks at what is next.
    #[test]
    fn a_number_that_was_given_up_is_not_taken_any_more() {
        let window = Window::new(8, CmdSn(1), true);
        let (admission, _) = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!(admission, Admission::AtOnce);
        assert_eq!(window.admit(CmdSn(1), A), Admission::Now);
        window.on_carried_out();
        assert_eq!(window.admit(CmdSn(2), B), Admission::Never, "it is aborted");
        assert_eq!(window.next_up(), None);
        assert_eq!(window.bounds().0, CmdSn(3));
        // Nor one that another connection keeps.
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(window.admit(CmdSn(2), B), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        assert_eq!(window.admit(CmdSn(2), A), Admission::Never, "sent twice");
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Now);
    }

    /// It would have been given up, had the abort come a moment later.
    #[test]
    fn an_abort_does_not_wait_for_a_command_that_was_discarded() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        let abort = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!(abort, (Admission::Later, CmdSn(3)));
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        assert_eq!(window.next_up(), Some(B));
        // It ends before it hears of its turn.
        window.forget(B);
        assert_eq!(window.next_up(), Some(A));
        assert!(is_due(&window, CmdSn(3), A));
        assert_eq!(window.bounds().0, CmdSn(3));
        // A function for more than one command waits for the number to come again.
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        assert_eq!(window.admit_function(CmdSn(3), A), Admission::Later);
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Now);
        window.forget(B);
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
    fn the_window_closes_and_opens_across_the_wrap() {
        let window = Window::new(2, CmdSn(u32::MAX), false);
        for sn in [u32::MAX, 0] {
            assert_eq!(admit(&window, CmdSn(sn), A), Admission::Now);
        }
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(0)), "closed");
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Never);
        window.on_answered();
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

    /// Both are on workers of their own, so one may be admitted before the other has a context.
    #[test]
    fn two_connections_do_not_take_one_place() {
        let window = Window::new(2, CmdSn(1), true);
        for sn in [1, 2] {
            assert_eq!(admit(&window, CmdSn(sn), A), Admission::Now);
        }
        assert_eq!(admit(&window, CmdSn(3), B), Admission::Never);
        assert_eq!(window.bounds(), (CmdSn(3), CmdSn(2)), "closed");
    }

    /// Places that are given back twice would be a mistake of ours, which must not open the window.
    #[test]
    fn the_window_is_never_wider_than_its_commands() {
        let window = Window::new(2, CmdSn(1), true);
        window.on_gone(false);
        window.on_gone(true);
        assert_eq!(window.bounds(), (CmdSn(1), CmdSn(2)));
    }

    #[test]
    fn a_function_waits_for_the_commands_before_it() {
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

    /// A command that came after the function would be ended by it, and never answered.
    #[test]
    fn no_command_overtakes_a_function_that_is_due() {
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
    fn functions_of_the_same_number_have_a_turn_each() {
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
    fn a_command_that_is_given_up_counts_as_received() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        assert!(!window.forgo(CmdSn(2), CmdSn(3)), "it has come");
        assert!(!window.forgo(CmdSn(3), CmdSn(3)), "not before the function");
        assert!(window.forgo(CmdSn(1), CmdSn(3)));
        assert_eq!(window.next_up(), Some(B));
        window.forget(B);
        assert_eq!(window.next_up(), None);
        assert_eq!(window.bounds().0, CmdSn(2));
    }

    #[test]
    fn an_abort_waits_for_its_command_alone() {
        let window = Window::new(8, CmdSn(1), true);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Later);
        // One that is kept is carried out first.
        let (admission, sn) = window.admit_abort(CmdSn(2), CmdSn(4), A);
        assert_eq!((admission, sn), (Admission::Later, CmdSn(3)));
        // One that has not come is given up, and is passed over when it comes.
        let (admission, _) = window.admit_abort(CmdSn(1), CmdSn(4), A);
        assert_eq!(admission, Admission::AtOnce);
        assert!(window.forgo(CmdSn(1), CmdSn(4)));
        assert_eq!(window.next_up(), Some(B));
        assert_eq!(admit(&window, CmdSn(1), A), Admission::Never);
        assert_eq!(admit(&window, CmdSn(2), B), Admission::Now);
        assert_eq!(window.next_up(), Some(A));
        assert!(is_due(&window, CmdSn(3), A));
        // One that runs, beside one that is lost.
        assert_eq!(window.admit_abort(CmdSn(2), CmdSn(5), A).0, Admission::Now);
        window.on_carried_out();
        assert_eq!(
            window.admit_abort(CmdSn(1), CmdSn(5), A).0,
            Admission::AtOnce
        );
    }

    proptest! {
        /// However two connections bring the commands of a session, they are carried out once each
        /// and in order.
        #[test]
        fn every_command_has_its_turn(
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

    /// Commands of the window that two workers share.
    const PLACES: u32 = 2;

    /// What both workers have done, beside the window.
    #[derive(Default)]
    struct Done {
        carried_out: Mutex<Vec<CmdSn>>,
        /// Commands that have a place. One that has just been admitted may be missing.
        taken: AtomicU32,
        /// Answered commands. One that is about to be answered may be among them.
        answered: AtomicU32,
    }

    /// A connection on a worker of its own, as `order` makes it use the window.
    struct Worker {
        me: ConnRef,
        window: Arc<Window>,
        done: Arc<Done>,
        /// Wakes A, and B.
        wakes: [mpsc::Sender<()>; 2],
        /// Commands that the initiator sends, without a look at the window.
        coming: VecDeque<CmdSn>,
        kept: Vec<CmdSn>,
        running: usize,
    }

    impl Worker {
        /// Receives its commands, carries all out when it is their turn, and answers them.
        fn run(mut self, woken: &mpsc::Receiver<()>) {
            while !self.coming.is_empty() || !self.kept.is_empty() || self.running > 0 {
                let has_received = self.receive();
                self.take_turns();
                if !has_received && !self.answer() {
                    let wake = woken.recv_timeout(Duration::from_secs(10));
                    wake.expect("a turn or an answer is lost");
                }
            }
        }

        /// Receives the next command; false if there is none. One that is passed over is sent again
        /// later: it is outside the window until something is answered.
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

        /// Answers a command; false if none runs.
        fn answer(&mut self) -> bool {
            if self.running == 0 {
                return false;
            }
            self.running -= 1;
            self.done.taken.fetch_sub(1, Ordering::SeqCst);
            self.done.answered.fetch_add(1, Ordering::SeqCst);
            self.window.on_answered();
            // The answer carries MaxCmdSN, and may have the other connection's next command sent.
            let (_, max) = self.window.bounds();
            self.assert_fits(max);
            self.window.on_gone(true);
            self.wake(if self.me == A { B } else { A });
            true
        }

        /// Checks that a number is inside the window: a place for each command before it that is
        /// not answered, and one for it.
        fn assert_fits(&self, sn: CmdSn) {
            let last = PLACES + self.done.answered.load(Ordering::SeqCst);
            assert!(sn.0 <= last, "{sn:?} in a window to {last}");
        }

        /// Wakes a worker. One whose connection has ended has nothing to do.
        fn wake(&self, whose: ConnRef) {
            let _ = self.wakes[usize::from(whose.worker)].send(());
        }
    }

    #[test]
    fn interleavings_of_two_connections_carry_out_each_command_in_its_turn_and_its_place() {
        explore(|| {
            let window = Arc::new(Window::new(PLACES as u16, CmdSn(1), true));
            let done = Arc::<Done>::default();
            let (to_a, of_a) = mpsc::channel();
            let (to_b, of_b) = mpsc::channel();
            // Two of one connection are followed by one of the other, which may come before a place
            // is free.
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
    fn what_waits_is_bounded() {
        let window = Window::new(200, CmdSn(0), true);
        let later = (1..200)
            .filter(|sn| window.admit_function(CmdSn(*sn), A) == Admission::Later)
            .count();
        assert_eq!(later, MAX_AHEAD);
    }
}
