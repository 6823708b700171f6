//! What initiators may see of a unit's reservations and unit attentions (SAM-6 5.14, SPC-5 5.14).
//!
//! One PERSISTENT RESERVE OUT is under way at once, while commands for blocks go on. What its effect
//! is depends on the state that it meets, and whether it has one is not known when it has no answer:
//! so the model has all states that the unit may be in, and what is seen excludes some of them. If
//! none is left, the unit is at fault.
//!
//! # Reservations
//! - The status of a PERSISTENT RESERVE OUT, and what PERSISTENT RESERVE IN reports, is that of one
//!   of the states; if no change was under way meanwhile, the others are no longer possible.
//! - A read or a write that was carried out was allowed by a state in force between its begin and
//!   its end; one that met RESERVATION CONFLICT was forbidden by one.
//! - After a power loss the state is what APTPL demands.
//!
//! # Unit attentions
//! A cause is known by when it began and ended. A nexus is to hear of it once: a report must have a
//! cause that was not reported yet, and a command that begins after the end of a cause does not
//! succeed before it was reported. Conditions of one kind that wait together are one, and a reset
//! replaces those that wait.

use std::cell::RefCell;
use std::collections::BTreeMap;

use riser_tests::history::Port;

use crate::reservations::{Action, Change, Notice, Reservations, Status};

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED, I_T NEXUS LOSS OCCURRED and their kin.
const RESET: (u8, u8) = (0x29, 0);

/// Kinds about reservations. Others, which are not judged, may come from an administrator or a disk.
const OF_RESERVATIONS: [(u8, u8); 3] = [
    crate::reservations::RESERVATIONS_PREEMPTED,
    crate::reservations::RESERVATIONS_RELEASED,
    crate::reservations::REGISTRATIONS_PREEMPTED,
];

/// A reason for a unit attention condition.
#[derive(Clone, Copy, Debug)]
struct Cause {
    kind: (u8, u8),
    begin: u64,
    /// When it is certain to be there; `u64::MAX` if it need not be.
    end: u64,
    /// It need not be reported any more, as it may have been with another.
    is_excused: bool,
}

impl Cause {
    fn excuse(&mut self) {
        (self.end, self.is_excused) = (u64::MAX, true);
    }
}

/// What is known of a nexus.
#[derive(Debug, Default)]
struct Nexus {
    /// When it logged in, if it is.
    since: Option<u64>,
    /// Causes that were not reported.
    causes: Vec<Cause>,
    /// When the target has forgotten it with its power.
    forgotten: Option<u64>,
}

impl Nexus {
    /// Something begins that may be a reason for a condition.
    fn raise(&mut self, kind: (u8, u8), begin: u64) {
        self.causes.push(Cause {
            kind,
            begin,
            end: u64::MAX,
            is_excused: false,
        });
    }

    /// What began then is certain now: it is to be reported, if the nexus was there and has not
    /// heard of it.
    fn confirm(&mut self, kind: (u8, u8), begin: u64, now: u64) {
        if self.since.is_some_and(|since| since < begin) {
            let mut causes = self.causes.iter_mut();
            let cause = causes.find(|cause| cause.kind == kind && cause.begin == begin);
            let cause = cause.filter(|cause| !cause.is_excused);
            cause.into_iter().for_each(|cause| cause.end = now);
        }
    }

    /// What began then did not happen.
    fn withdraw(&mut self, kind: (u8, u8), begin: u64) {
        self.causes
            .retain(|cause| cause.kind != kind || cause.begin != begin);
    }

    /// What there is need not be reported any more.
    fn excuse(&mut self) {
        self.causes.iter_mut().for_each(Cause::excuse);
    }
}

/// A change that was begun, by the instant at which it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeId(u64);

/// A change that is under way.
#[derive(Debug)]
struct Underway {
    change: Change,
    begin: u64,
    /// The states that it may have met.
    before: Vec<Reservations>,
    /// What it may mean for others.
    notices: Vec<Notice>,
    /// The unit was removed meanwhile.
    is_torn: bool,
}

#[derive(Debug)]
struct State {
    clock: u64,
    /// The states that the unit may be in, and since when, with those before.
    log: Vec<(u64, Vec<Reservations>)>,
    change: Option<Underway>,
    nexuses: BTreeMap<Port, Nexus>,
    /// When resets began that are under way.
    resets: Vec<u64>,
    /// What may have ended commands of others.
    endings: Vec<Ending>,
    /// What comes from those alone who report it here.
    knowledge: Knowledge,
}

/// What the model knows.
#[derive(Clone, Copy, Debug)]
pub struct Knowledge {
    /// All resets of the unit.
    pub resets: bool,
    /// All reservations of the unit.
    pub reservations: bool,
    /// Nothing of them can be saved at a time.
    pub fails_to_save: bool,
}

/// A function, or a PREEMPT AND ABORT, that may end commands of other nexuses.
#[derive(Clone, Copy, Debug)]
struct Ending {
    by: Port,
    resets: bool,
    begin: u64,
    /// When it ends no more; `u64::MAX` before that is known.
    end: u64,
}

/// The model of a unit.
#[derive(Debug)]
pub struct Model(RefCell<State>);

impl Model {
    /// A new unit.
    #[must_use]
    pub fn new(knowledge: Knowledge) -> Self {
        Self(RefCell::new(State {
            clock: 0,
            log: vec![(0, vec![Reservations::default()])],
            change: None,
            nexuses: BTreeMap::new(),
            resets: Vec::new(),
            endings: Vec::new(),
            knowledge,
        }))
    }

    /// The present instant, at which something begins.
    pub fn begin(&self) -> u64 {
        self.0.borrow_mut().tick()
    }

    /// A change of reservations is about to be sent; `None` if it may not be, since another is under
    /// way.
    pub fn begin_change(&self, change: Change) -> Option<ChangeId> {
        let mut state = self.0.borrow_mut();
        if state.change.is_some() {
            return None;
        }
        let begin = state.tick();
        let before = state.possible().to_vec();
        let mut during = before.clone();
        let mut notices = Vec::new();
        for mut one in before.iter().cloned() {
            notices.extend(one.apply(&change).1);
            during.push(one);
        }
        notices.sort_unstable();
        notices.dedup();
        for (port, kind) in &notices {
            state.nexuses.entry(*port).or_default().raise(*kind, begin);
        }
        state.become_one_of(during);
        if change.action == Action::PreemptAndAbort {
            state.begin_ending(change.from, begin, false);
        }
        state.change = Some(Underway {
            change,
            begin,
            before,
            notices,
            is_torn: false,
        });
        Some(ChangeId(begin))
    }

    /// Returns true if too many states are possible. Each change with an unknown outcome doubles
    /// them, so reservations have to be read before the next one.
    #[must_use]
    pub fn is_vague(&self) -> bool {
        self.0.borrow().possible().len() > 64
    }

    /// A state that the unit may be in.
    #[must_use]
    pub fn guess(&self) -> Reservations {
        self.0.borrow().possible()[0].clone()
    }

    /// The change under way was answered.
    ///
    /// # Errors
    /// No state explains the status.
    pub fn end_change(&self, id: ChangeId, status: Status) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        // The answer may have been on its way when the power went, and another change be under way.
        let Some(change) = state.take_change(id) else {
            return Ok(());
        };
        let fails_to_save = state.knowledge.fails_to_save;
        state.end_ending(change.begin);
        let mut ends = Vec::new();
        for mut one in change.before.iter().cloned() {
            let is_to_be_saved = one.persists || change.change.persists;
            let is_unsaved = status == Status::Check && is_to_be_saved && fails_to_save;
            // It was answered before the unit forgot it; or what was to persist could not be saved.
            if change.is_torn || is_unsaved {
                ends.push((one.clone(), Vec::new()));
            }
            let (expected, notices) = one.apply(&change.change);
            if expected == status {
                ends.push((one, notices));
            }
        }
        if ends.is_empty() {
            return Err(format!("{status:?} to {change:?}"));
        }
        for notice in change.notices {
            let (port, kind) = notice;
            let nexus = state.nexuses.entry(port).or_default();
            let count = ends.iter().filter(|(_, all)| all.contains(&notice)).count();
            match count {
                0 => nexus.withdraw(kind, change.begin),
                all if all == ends.len() => nexus.confirm(kind, change.begin, now),
                _ => {}
            }
        }
        state.become_one_of(ends.into_iter().map(|(one, _)| one).collect());
        Ok(())
    }

    /// The change under way was not carried out.
    pub fn cancel_change(&self, id: ChangeId) {
        let mut state = self.0.borrow_mut();
        state.tick();
        if let Some(change) = state.take_change(id) {
            state.end_ending(change.begin);
            for (port, kind) in change.notices {
                let nexus = state.nexuses.entry(port).or_default();
                nexus.withdraw(kind, change.begin);
            }
            state.become_one_of(change.before);
        }
    }

    /// The change under way is over if it is of this nexus, and nobody knows whether it was carried
    /// out.
    pub fn lose_change(&self, from: Port) {
        let mut state = self.0.borrow_mut();
        state.tick();
        if state
            .change
            .take_if(|change| change.change.from == from)
            .is_some()
        {
            let possible = state.possible().to_vec();
            state.become_one_of(possible);
        }
    }

    /// Reservations were read by a command that began then; `is_it` says whether a state is what was
    /// reported.
    ///
    /// # Errors
    /// None is.
    pub fn see(
        &self,
        begin: u64,
        is_it: impl Fn(&Reservations) -> bool,
    ) -> Result<(), Vec<Reservations>> {
        let mut state = self.0.borrow_mut();
        if !state.in_force(begin).any(&is_it) {
            return Err(state.in_force(begin).cloned().collect());
        }
        let is_still = state.log.last().is_some_and(|(since, _)| *since < begin);
        if is_still && state.change.is_none() {
            let left = state.possible().iter().filter(|one| is_it(one));
            let left = left.cloned().collect();
            state.become_one_of(left);
        }
        Ok(())
    }

    /// A read or a write of a nexus that began then was carried out, or met a conflict.
    ///
    /// # Errors
    /// No state explains it.
    pub fn judge_access(
        &self,
        nexus: Port,
        begin: u64,
        writes: bool,
        conflict: bool,
    ) -> Result<(), String> {
        let state = self.0.borrow();
        let explains = |one: &Reservations| one.forbids(nexus, writes) == conflict;
        if !state.knowledge.reservations || state.in_force(begin).any(explains) {
            return Ok(());
        }
        let what = if writes { "a write" } else { "a read" };
        let end = if conflict {
            "met a conflict"
        } else {
            "was carried out"
        };
        let states: Vec<_> = state.in_force(begin).collect();
        Err(format!("{what} of port {} {end} with {states:?}", nexus.0))
    }

    /// The target has lost its process, or its power.
    pub fn lose_power(&self) {
        let mut state = self.0.borrow_mut();
        state.change = None;
        state.lose_memory();
    }

    /// Workers are about to stop serving the unit.
    pub fn begin_removal(&self) {
        self.0.borrow_mut().tick();
    }

    /// The unit is no longer served. Reservations belong to its backend and stay; the nexuses are
    /// forgotten. A pending change may take effect when the unit is served again.
    pub fn remove(&self) {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        state.forget_nexuses(now);
        let after = state.possible().to_vec();
        let Some(change) = &mut state.change else {
            return;
        };
        (change.before, change.is_torn) = (after.clone(), true);
        let change = change.change;
        let carried_out = after.iter().cloned().map(|mut one| {
            one.apply(&change);
            one
        });
        let possible = after.iter().cloned().chain(carried_out).collect();
        state.become_one_of(possible);
    }

    /// The target's process has handed over to the next one: reservations stay as they are, and what
    /// waited for nexuses may go with their sessions.
    pub fn hand_over(&self) {
        let mut state = self.0.borrow_mut();
        state.tick();
        state.nexuses.values_mut().for_each(Nexus::excuse);
    }

    /// A nexus has logged in. It may hear of that.
    pub fn log_in(&self, port: Port) {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        // What was under way in its old session ends nothing any more.
        let its = state.endings.iter_mut().filter(|one| one.by == port);
        its.for_each(|one| one.end = one.end.min(now));
        let State {
            nexuses, resets, ..
        } = &mut *state;
        // It is new to resets under way, which may come before or after its login.
        let nexus = nexuses.entry(port).or_insert_with(|| {
            let mut nexus = Nexus::default();
            resets.iter().for_each(|begin| nexus.raise(RESET, *begin));
            nexus
        });
        if let Some(forgotten) = nexus.forgotten.take() {
            nexus.causes.retain(|cause| cause.begin > forgotten);
        }
        nexus.raise(RESET, now);
        nexus.since = Some(now);
    }

    /// A function of a nexus begins that ends commands of others, and resets nothing; gives its
    /// name for [`Model::end_clear`].
    pub fn begin_clear(&self, by: Port) -> u64 {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        state.begin_ending(by, now, false);
        now
    }

    /// A function that ends commands of others was answered.
    pub fn end_clear(&self, begin: u64) {
        self.0.borrow_mut().end_ending(begin);
    }

    /// A function of a nexus begins that resets the unit; gives its name for [`Model::end_reset`].
    pub fn begin_reset(&self, by: Port) -> u64 {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        state.begin_ending(by, now, true);
        let nexuses = state.nexuses.values_mut();
        nexuses.for_each(|nexus| nexus.raise(RESET, now));
        state.resets.push(now);
        now
    }

    /// A function of a nexus that resets the unit is complete. The nexus itself need not hear of it,
    /// nor of what was there before.
    pub fn end_reset(&self, by: Port, begin: u64) {
        let mut state = self.0.borrow_mut();
        state.end_ending(begin);
        let now = state.clock;
        state.resets.retain(|reset| *reset != begin);
        for (port, nexus) in &mut state.nexuses {
            match *port == by {
                true => nexus.excuse(),
                false => nexus.confirm(RESET, begin, now),
            }
        }
    }

    /// A command of a nexus was answered with a unit attention.
    ///
    /// # Errors
    /// It has no cause that was not reported before.
    pub fn on_attention(&self, port: Port, begin: u64, code: (u8, u8)) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        let kind = if code.0 == RESET.0 { RESET } else { code };
        let is_known = match kind {
            RESET => state.knowledge.resets,
            kind => state.knowledge.reservations && OF_RESERVATIONS.contains(&kind),
        };
        let nexus = state.nexuses.entry(port).or_default();
        let causes = nexus.causes.iter().enumerate();
        let of_kind = causes.filter(|(_, cause)| cause.kind == kind);
        let first = of_kind.min_by_key(|(_, cause)| cause.end);
        if first.is_none() && is_known {
            return Err(format!(
                "port {} hears of {code:02x?} without a cause",
                port.0
            ));
        }
        if let Some((at, _)) = first {
            nexus.causes.remove(at);
        }
        // Those that were there when the command began were reported with it.
        let is_over = |c: &Cause| c.end < begin && c.kind == kind;
        nexus.causes.retain(|cause| !is_over(cause));
        let may_be_over = |c: &&mut Cause| c.kind == kind || kind == RESET;
        let rest = nexus.causes.iter_mut().filter(may_be_over);
        rest.filter(|cause| cause.begin < now)
            .for_each(Cause::excuse);
        Ok(())
    }

    /// A command of a nexus has succeeded, while no other of that nexus was under way.
    ///
    /// # Errors
    /// The nexus should have heard of something before.
    pub fn on_success(&self, port: Port, begin: u64) -> Result<(), String> {
        let state = self.0.borrow();
        let causes = state.nexuses.get(&port).map(|nexus| &nexus.causes);
        let mut causes = causes.into_iter().flatten();
        match causes.find(|cause| cause.end < begin) {
            None => Ok(()),
            Some(cause) => Err(format!("port {} has not heard of {cause:02x?}", port.0)),
        }
    }

    /// A command of a nexus ended without an answer, which may have been a unit attention.
    pub fn on_silence(&self, port: Port) {
        let mut state = self.0.borrow_mut();
        state.nexuses.entry(port).or_default().excuse();
    }

    /// A command of a nexus that began then was answered with TASK ABORTED. If nothing but one
    /// reset can have done that, the nexus is to hear of the reset, whether or not that one's own
    /// initiator is still there. The command itself may have taken reports of what was before.
    ///
    /// # Errors
    /// Nothing can have ended it.
    pub fn on_aborted(&self, port: Port, begin: u64) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        let by_others = state.endings.iter().filter(|one| one.by != port);
        let may_be: Vec<Ending> = by_others.filter(|one| one.end > begin).copied().collect();
        if may_be.is_empty() && state.knowledge.resets {
            let port = port.0;
            return Err(format!(
                "a command of port {port} is aborted, and no function was under way"
            ));
        }
        let nexus = state.nexuses.entry(port).or_default();
        let [
            Ending {
                resets: true,
                begin: reset,
                ..
            },
        ] = may_be[..]
        else {
            nexus.excuse();
            return Ok(());
        };
        let is_it = |cause: &&mut Cause| cause.kind != RESET || cause.begin != reset;
        nexus
            .causes
            .iter_mut()
            .filter(is_it)
            .for_each(Cause::excuse);
        nexus.confirm(RESET, reset, now);
        Ok(())
    }

    /// The session of a nexus is over.
    pub fn log_out(&self, port: Port) {
        let mut state = self.0.borrow_mut();
        let nexus = state.nexuses.entry(port).or_default();
        nexus.since = None;
        nexus.excuse();
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn begin_ending(&mut self, by: Port, begin: u64, resets: bool) {
        self.endings.push(Ending {
            by,
            resets,
            begin,
            end: u64::MAX,
        });
    }

    fn end_ending(&mut self, begin: u64) {
        let now = self.tick();
        let found = self.endings.iter_mut().find(|one| one.begin == begin);
        found.into_iter().for_each(|one| one.end = now);
    }

    /// What does not persist through a loss of power is gone, and nexuses need not hear of it.
    fn lose_memory(&mut self) {
        let now = self.tick();
        let after = self.possible().iter();
        let after = after.map(Reservations::after_power_loss).collect();
        self.become_one_of(after);
        self.forget_nexuses(now);
    }

    /// Unit attentions and pending resets of all nexuses may be lost.
    fn forget_nexuses(&mut self, now: u64) {
        self.resets.clear();
        self.endings.clear();
        for nexus in self.nexuses.values_mut() {
            nexus.excuse();
            nexus.forgotten = Some(now);
        }
    }

    /// Takes a change that is still under way.
    fn take_change(&mut self, id: ChangeId) -> Option<Underway> {
        self.change.take_if(|change| change.begin == id.0)
    }

    fn possible(&self) -> &[Reservations] {
        &self.log.last().expect("at least one").1
    }

    fn become_one_of(&mut self, mut states: Vec<Reservations>) {
        states.sort_unstable();
        states.dedup();
        self.log.push((self.clock, states));
    }

    /// The states that the unit may have been in since then.
    fn in_force(&self, begin: u64) -> impl Iterator<Item = &Reservations> {
        let later = self.log.partition_point(|(since, _)| *since <= begin);
        self.log[later.saturating_sub(1)..]
            .iter()
            .flat_map(|(_, states)| states)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reservations::REGISTRATIONS_PREEMPTED;

    const KNOWLEDGE: Knowledge = Knowledge {
        resets: true,
        reservations: true,
        fails_to_save: false,
    };
    const ONE: Port = Port(1);
    const TWO: Port = Port(2);

    fn change(from: Port, action: Action, own: u64, key: u64) -> Change {
        Change {
            from,
            action,
            kind: 1,
            own,
            key,
            persists: false,
        }
    }

    /// Carries a change out.
    fn carry_out(model: &Model, change: Change) {
        let id = model.begin_change(change).unwrap();
        model.end_change(id, Status::Good).unwrap();
    }

    /// Two nexuses with keys of their numbers, which know that they have logged in.
    fn registered() -> Model {
        let model = Model::new(KNOWLEDGE);
        for port in [ONE, TWO] {
            model.log_in(port);
            model.on_attention(port, model.begin(), RESET).unwrap();
            carry_out(&model, change(port, Action::Register, 0, port.0.into()));
        }
        model
    }

    #[test]
    fn a_cause_is_reported_once_before_the_next_success() {
        let model = registered();
        carry_out(&model, change(ONE, Action::Preempt, 1, 2));
        let begin = model.begin();
        model.on_success(ONE, begin).unwrap();
        model.on_success(TWO, begin).unwrap_err();
        model
            .on_attention(ONE, begin, REGISTRATIONS_PREEMPTED)
            .unwrap_err();
        model
            .on_attention(TWO, begin, REGISTRATIONS_PREEMPTED)
            .unwrap();
        model.on_success(TWO, model.begin()).unwrap();
        model
            .on_attention(TWO, model.begin(), REGISTRATIONS_PREEMPTED)
            .unwrap_err();
    }

    #[test]
    fn a_reset_is_reported_to_others_and_replaces_what_waits() {
        let model = registered();
        carry_out(&model, change(ONE, Action::Preempt, 1, 2));
        let reset = model.begin_reset(ONE);
        model.end_reset(ONE, reset);
        model.on_success(TWO, model.begin()).unwrap_err();
        model.on_attention(TWO, model.begin(), (0x29, 3)).unwrap();
        model.on_success(TWO, model.begin()).unwrap();
        model
            .on_attention(TWO, model.begin(), (0x29, 3))
            .unwrap_err();
    }

    #[test]
    fn a_login_amid_a_change_or_a_reset_may_hear_of_it() {
        let model = registered();
        model.lose_power();
        for (port, own) in [(ONE, 1), (TWO, 2)] {
            let register = change(port, Action::RegisterAndIgnore, 0, own);
            carry_out(&model, register);
        }
        model
            .begin_change(change(ONE, Action::Preempt, 1, 2))
            .unwrap();
        let reset = model.begin_reset(ONE);
        for port in [TWO, Port(3)] {
            model.log_in(port);
            for _ in 0..2 {
                model.on_attention(port, model.begin(), RESET).unwrap();
            }
            model.on_attention(port, model.begin(), RESET).unwrap_err();
        }
        model.end_reset(ONE, reset);
        let preempted = REGISTRATIONS_PREEMPTED;
        model.on_attention(TWO, model.begin(), preempted).unwrap();
        model
            .on_attention(TWO, model.begin(), preempted)
            .unwrap_err();
    }

    #[test]
    fn a_command_that_was_silent_may_have_taken_the_report() {
        let model = registered();
        let reset = model.begin_reset(ONE);
        model.end_reset(ONE, reset);
        model.on_silence(TWO);
        model.on_success(TWO, model.begin()).unwrap();
    }

    #[test]
    fn a_command_that_only_a_reset_can_have_ended_proves_it() {
        let model = registered();
        let write = model.begin();
        model.on_aborted(TWO, write).unwrap_err();
        let reset = model.begin_reset(ONE);
        let clear = model.begin_clear(ONE);
        // It may have been the other function, which nobody hears of.
        model.on_aborted(TWO, write).unwrap();
        model.on_success(TWO, model.begin()).unwrap();
        model.end_clear(clear);
        model.end_reset(ONE, reset);
        let write = model.begin();
        model.begin_reset(ONE);
        model.log_out(ONE);
        model.on_aborted(TWO, write).unwrap();
        model.on_success(TWO, model.begin()).unwrap_err();
        model.on_attention(TWO, model.begin(), RESET).unwrap();
        model.on_success(TWO, model.begin()).unwrap();
        // With the next login it is over.
        model.log_in(ONE);
        model.on_aborted(TWO, model.begin()).unwrap_err();
    }

    #[test]
    fn accesses_have_a_state_that_explains_them() {
        let model = registered();
        let before = model.begin();
        carry_out(&model, change(ONE, Action::Reserve, 1, 0));
        let after = model.begin();
        for conflict in [false, true] {
            model.judge_access(TWO, before, true, conflict).unwrap();
        }
        model.judge_access(TWO, after, true, true).unwrap();
        model.judge_access(TWO, after, true, false).unwrap_err();
        model.judge_access(TWO, after, false, true).unwrap_err();
        model.judge_access(ONE, after, true, true).unwrap_err();
    }

    #[test]
    fn a_status_and_a_report_have_a_state_that_explains_them() {
        let model = registered();
        let id = model.begin_change(change(TWO, Action::Reserve, 1, 0));
        model.end_change(id.unwrap(), Status::Good).unwrap_err();
        let model = registered();
        model
            .begin_change(change(TWO, Action::Reserve, 2, 0))
            .unwrap();
        assert_eq!(model.begin_change(change(ONE, Action::Clear, 1, 0)), None);
        model.lose_change(TWO);
        // It was carried out, or not; once that was seen, it is one of the two.
        model.see(model.begin(), |one| one.held.is_none()).unwrap();
        model
            .see(model.begin(), |one| one.held.is_some())
            .unwrap_err();
    }

    #[test]
    fn reservations_that_persist_are_there_after_a_power_loss() {
        let model = registered();
        model.lose_power();
        model
            .see(model.begin(), |one| !one.keys.is_empty())
            .unwrap_err();
        let persistent = Change {
            persists: true,
            ..change(ONE, Action::RegisterAndIgnore, 0, 1)
        };
        carry_out(&model, persistent);
        model.lose_power();
        model
            .see(model.begin(), |one| one.keys.is_empty())
            .unwrap_err();
        model.see(model.begin(), |one| one.generation == 0).unwrap();
    }

    #[test]
    fn a_reset_under_way_may_be_reported_with_another() {
        let model = Model::new(KNOWLEDGE);
        model.log_in(ONE);
        let read = model.begin();
        let reset = model.begin_reset(TWO);
        model.on_attention(ONE, read, RESET).unwrap();
        model.end_reset(TWO, reset);
        model.on_success(ONE, model.begin()).unwrap();
        // The next one is to be reported.
        let reset = model.begin_reset(TWO);
        model.end_reset(TWO, reset);
        model.on_success(ONE, model.begin()).unwrap_err();
    }

    #[test]
    fn changes_of_which_nobody_knows_the_end_make_states_possible() {
        let model = Model::new(KNOWLEDGE);
        // The last of those that were carried out, and their number: 66 and the state before.
        for key in 1..=11 {
            assert!(!model.is_vague());
            model
                .begin_change(change(TWO, Action::RegisterAndIgnore, 0, key))
                .unwrap();
            model.lose_change(TWO);
        }
        assert!(model.is_vague());
        let keys = |one: &Reservations| one.keys.is_empty();
        model.see(model.begin(), keys).unwrap();
        assert!(!model.is_vague());
    }
}
