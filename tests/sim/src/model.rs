//! Model of the reservations and unit attentions that initiators may observe (SAM-6 5.14, SPC-5
//! 5.14).
//!
//! Only one PERSISTENT RESERVE OUT is in flight at a time, concurrently with commands for blocks.
//! Its effect depends on the current state, and if there is no response, we don't know if it was
//! executed. Therefore the model tracks all possible states of the unit, and each observation
//! excludes some of them. If no state remains, the unit is at fault.
//!
//! # Reservations
//! - The status of PERSISTENT RESERVE OUT and the data of PERSISTENT RESERVE IN must match one of
//!   the states. If no change was in flight at the same time, all other states are removed.
//! - If a read or write was executed, it must have been allowed by a state in effect while it was
//!   in flight. If it failed with RESERVATION CONFLICT, it must have been forbidden by one.
//! - After a power loss, the state depends on APTPL.
//!
//! # Unit attentions
//! For each cause, we know when it started and when it was completed. It must be reported to each
//! nexus once: a report requires a cause that was not reported before, and a command that starts
//! after the cause was completed may only succeed if it has been reported. Pending conditions of
//! the same kind are merged, and a reset replaces all pending conditions.

use std::cell::RefCell;
use std::collections::BTreeMap;

use riser_tests::history::Port;

use crate::reservations::{Action, Change, Notice, Reservations, Status};

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED, I_T NEXUS LOSS OCCURRED and similar conditions.
const RESET: (u8, u8) = (0x29, 0);

/// Conditions for reservations. Other conditions, which may be caused by an administrator or a
/// disk, are not checked.
const OF_RESERVATIONS: [(u8, u8); 3] = [
    crate::reservations::RESERVATIONS_PREEMPTED,
    crate::reservations::RESERVATIONS_RELEASED,
    crate::reservations::REGISTRATIONS_PREEMPTED,
];

/// The cause of a unit attention condition.
#[derive(Clone, Copy, Debug)]
struct Cause {
    kind: (u8, u8),
    begin: u64,
    /// Time after which the condition must be pending; `u64::MAX` if it doesn't need to be
    /// reported.
    end: u64,
    /// The condition doesn't need to be reported any more, because it may have been reported
    /// together with another one.
    is_excused: bool,
}

impl Cause {
    fn excuse(&mut self) {
        (self.end, self.is_excused) = (u64::MAX, true);
    }
}

/// State of a nexus.
#[derive(Debug, Default)]
struct Nexus {
    /// Login time, if it is logged in.
    since: Option<u64>,
    /// Causes that have not been reported.
    causes: Vec<Cause>,
    /// Time when the target has lost this nexus in a power loss.
    forgotten: Option<u64>,
}

impl Nexus {
    /// Called when an event starts that may cause a condition.
    fn raise(&mut self, kind: (u8, u8), begin: u64) {
        self.causes.push(Cause {
            kind,
            begin,
            end: u64::MAX,
            is_excused: false,
        });
    }

    /// Called when the event that started at `begin` has completed. The condition must be reported
    /// if the nexus was logged in before and it has not been reported yet.
    fn confirm(&mut self, kind: (u8, u8), begin: u64, now: u64) {
        if self.since.is_some_and(|since| since < begin) {
            let mut causes = self.causes.iter_mut();
            let cause = causes.find(|cause| cause.kind == kind && cause.begin == begin);
            let cause = cause.filter(|cause| !cause.is_excused);
            cause.into_iter().for_each(|cause| cause.end = now);
        }
    }

    /// Called if the event that started at `begin` did not happen.
    fn withdraw(&mut self, kind: (u8, u8), begin: u64) {
        self.causes
            .retain(|cause| cause.kind != kind || cause.begin != begin);
    }

    /// Makes all pending reports optional.
    fn excuse(&mut self) {
        self.causes.iter_mut().for_each(Cause::excuse);
    }
}

/// Identifies a change by its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeId(u64);

/// A change in flight.
#[derive(Debug)]
struct Underway {
    change: Change,
    begin: u64,
    /// Possible states before the change.
    before: Vec<Reservations>,
    /// Possible notifications for other nexuses.
    notices: Vec<Notice>,
    /// Set if the unit was removed while the change was in flight.
    is_torn: bool,
}

#[derive(Debug)]
struct State {
    clock: u64,
    /// Possible states of the unit over time, each with its start time.
    log: Vec<(u64, Vec<Reservations>)>,
    change: Option<Underway>,
    nexuses: BTreeMap<Port, Nexus>,
    /// Start times of resets in flight.
    resets: Vec<u64>,
    /// Events that may have aborted commands of other nexuses.
    endings: Vec<Ending>,
    /// Information that is only available if all initiators report to the model.
    knowledge: Knowledge,
}

/// Describes which information the model has.
#[derive(Clone, Copy, Debug)]
pub struct Knowledge {
    /// All resets of the unit are reported to the model.
    pub resets: bool,
    /// All reservations of the unit are reported to the model.
    pub reservations: bool,
    /// The target may fail to save reservations.
    pub fails_to_save: bool,
}

/// A task management function or PREEMPT AND ABORT that may abort commands of other nexuses.
#[derive(Clone, Copy, Debug)]
struct Ending {
    by: Port,
    resets: bool,
    begin: u64,
    /// Time when it was completed, or `u64::MAX` while it's in flight.
    end: u64,
}

/// Model of a unit.
#[derive(Debug)]
pub struct Model(RefCell<State>);

impl Model {
    /// Creates the model of a new unit.
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

    /// Returns a new timestamp for an event that starts now.
    pub fn begin(&self) -> u64 {
        self.0.borrow_mut().tick()
    }

    /// Called before a change of reservations is sent. Returns `None` if another change is in
    /// flight, so this one must not be sent.
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

    /// Returns whether there are too many possible states. Each change with unknown outcome doubles
    /// them, so reservations must be read before the next change.
    #[must_use]
    pub fn is_vague(&self) -> bool {
        self.0.borrow().possible().len() > 64
    }

    /// Returns a possible state of the unit.
    #[must_use]
    pub fn guess(&self) -> Reservations {
        self.0.borrow().possible()[0].clone()
    }

    /// Called when a change was completed.
    ///
    /// # Errors
    /// Returns an error if the status does not match any state.
    pub fn end_change(&self, id: ChangeId, status: Status) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        // If the power was lost while the response was in flight, another change may already have
        // been sent.
        let Some(change) = state.take_change(id) else {
            return Ok(());
        };
        let fails_to_save = state.knowledge.fails_to_save;
        state.end_ending(change.begin);
        let mut ends = Vec::new();
        for mut one in change.before.iter().cloned() {
            let is_to_be_saved = one.persists || change.change.persists;
            let is_unsaved = status == Status::Check && is_to_be_saved && fails_to_save;
            // Either the change was completed before the unit was removed, or persistent
            // reservations could not be saved.
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

    /// Called if the change was not executed.
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

    /// Called if a nexus may have lost the response to its change, so we don't know if it was
    /// executed.
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

    /// Called when reservations were read by a command that started at `begin`. `is_it` returns
    /// whether a state matches the response.
    ///
    /// # Errors
    /// Returns an error if there is no matching state.
    pub fn observe_states(
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

    /// Called when a read or write that started at `begin` was executed, or failed with RESERVATION
    /// CONFLICT.
    ///
    /// # Errors
    /// Returns an error if this does not match any state.
    pub fn check_access(
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

    /// Called when the target process was killed or its host has lost power.
    pub fn lose_power(&self) {
        let mut state = self.0.borrow_mut();
        state.change = None;
        state.lose_memory();
    }

    /// Called before workers stop serving the unit.
    pub fn begin_removal(&self) {
        self.0.borrow_mut().tick();
    }

    /// Called when the unit is no longer served. Reservations belong to its backend and are kept,
    /// but nexuses are removed. A pending change may take effect when the unit is served again.
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

    /// Called after a handover to a new target process: reservations are kept, but pending
    /// conditions may be lost together with the sessions.
    pub fn hand_over(&self) {
        let mut state = self.0.borrow_mut();
        state.tick();
        state.nexuses.values_mut().for_each(Nexus::excuse);
    }

    /// Called when a nexus has logged in. This may cause a condition.
    pub fn log_in(&self, port: Port) {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        // Functions from its previous session do not abort any more commands.
        let its = state.endings.iter_mut().filter(|one| one.by == port);
        its.for_each(|one| one.end = one.end.min(now));
        let State {
            nexuses, resets, ..
        } = &mut *state;
        // The order of its login and the resets in flight is unknown.
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

    /// Called when a nexus starts a function that aborts commands of other nexuses without
    /// resetting the unit. Returns an ID for [`Model::end_clear`].
    pub fn begin_clear(&self, by: Port) -> u64 {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        state.begin_ending(by, now, false);
        now
    }

    /// Called when a function that aborts commands was completed.
    pub fn end_clear(&self, begin: u64) {
        self.0.borrow_mut().end_ending(begin);
    }

    /// Called when a nexus starts to reset the unit. Returns an ID for [`Model::end_reset`].
    pub fn begin_reset(&self, by: Port) -> u64 {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        state.begin_ending(by, now, true);
        let nexuses = state.nexuses.values_mut();
        nexuses.for_each(|nexus| nexus.raise(RESET, now));
        state.resets.push(now);
        now
    }

    /// Called when a reset of the unit was completed. The nexus that has sent it doesn't need to
    /// receive a unit attention for this or for older conditions.
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

    /// Called when a command was completed with a unit attention.
    ///
    /// # Errors
    /// Returns an error if there is no cause that was not reported before.
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
                "port {} receives unit attention {code:02x?} without a cause",
                port.0
            ));
        }
        if let Some((at, _)) = first {
            nexus.causes.remove(at);
        }
        // This includes all conditions of the same kind that were pending when the command started.
        let is_over = |c: &Cause| c.end < begin && c.kind == kind;
        nexus.causes.retain(|cause| !is_over(cause));
        let may_be_over = |c: &&mut Cause| c.kind == kind || kind == RESET;
        let rest = nexus.causes.iter_mut().filter(may_be_over);
        rest.filter(|cause| cause.begin < now)
            .for_each(Cause::excuse);
        Ok(())
    }

    /// Called when a command was successful, if it was the only command of this nexus.
    ///
    /// # Errors
    /// Returns an error if the nexus should have received a unit attention.
    pub fn on_success(&self, port: Port, begin: u64) -> Result<(), String> {
        let state = self.0.borrow();
        let causes = state.nexuses.get(&port).map(|nexus| &nexus.causes);
        let mut causes = causes.into_iter().flatten();
        match causes.find(|cause| cause.end < begin) {
            None => Ok(()),
            Some(cause) => Err(format!("port {} has not heard of {cause:02x?}", port.0)),
        }
    }

    /// Called when a command was completed without status. This may have been a unit attention.
    pub fn on_silence(&self, port: Port) {
        let mut state = self.0.borrow_mut();
        state.nexuses.entry(port).or_default().excuse();
    }

    /// Called when a command that started at `begin` was completed with TASK ABORTED. If this can
    /// only be caused by a single reset, then the reset must be reported to the nexus, even if the
    /// initiator that has sent it is gone. The command may have consumed reports of older
    /// conditions.
    ///
    /// # Errors
    /// Returns an error if nothing could have aborted it.
    pub fn on_aborted(&self, port: Port, begin: u64) -> Result<(), String> {
        let mut state = self.0.borrow_mut();
        let now = state.tick();
        let by_others = state.endings.iter().filter(|one| one.by != port);
        let may_be: Vec<Ending> = by_others.filter(|one| one.end > begin).copied().collect();
        if may_be.is_empty() && state.knowledge.resets {
            let port = port.0;
            return Err(format!(
                "a command of port {port} is aborted without a pending function"
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

    /// Called when the session of a nexus was closed.
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

    /// Called after a power loss: removes all state that does not persist, and all pending
    /// conditions.
    fn lose_memory(&mut self) {
        let now = self.tick();
        let after = self.possible().iter();
        let after = after.map(Reservations::after_power_loss).collect();
        self.become_one_of(after);
        self.forget_nexuses(now);
    }

    /// Pending unit attentions and resets may be lost for all nexuses.
    fn forget_nexuses(&mut self, now: u64) {
        self.resets.clear();
        self.endings.clear();
        for nexus in self.nexuses.values_mut() {
            nexus.excuse();
            nexus.forgotten = Some(now);
        }
    }

    /// Removes a change if it is still in flight.
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

    /// Returns the states that were possible at any time since then.
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

    /// Executes a change.
    fn carry_out(model: &Model, change: Change) {
        let id = model.begin_change(change).unwrap();
        model.end_change(id, Status::Good).unwrap();
    }

    /// Creates a model with two nexuses which are registered with their numbers as keys, and which
    /// have received the unit attentions for their logins.
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
    fn cause_is_reported_once_before_success() {
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
    fn reset_replaces_pending_conditions() {
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
    fn login_during_reset_may_be_notified() {
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
    fn lost_response_may_have_been_report() {
        let model = registered();
        let reset = model.begin_reset(ONE);
        model.end_reset(ONE, reset);
        model.on_silence(TWO);
        model.on_success(TWO, model.begin()).unwrap();
    }

    #[test]
    fn task_aborted_proves_only_possible_reset() {
        let model = registered();
        let write = model.begin();
        model.on_aborted(TWO, write).unwrap_err();
        let reset = model.begin_reset(ONE);
        let clear = model.begin_clear(ONE);
        // This may have been caused by the other function, which is not reported.
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
        // It is completed at the next login.
        model.log_in(ONE);
        model.on_aborted(TWO, model.begin()).unwrap_err();
    }

    #[test]
    fn accesses_match_possible_states() {
        let model = registered();
        let before = model.begin();
        carry_out(&model, change(ONE, Action::Reserve, 1, 0));
        let after = model.begin();
        for conflict in [false, true] {
            model.check_access(TWO, before, true, conflict).unwrap();
        }
        model.check_access(TWO, after, true, true).unwrap();
        model.check_access(TWO, after, true, false).unwrap_err();
        model.check_access(TWO, after, false, true).unwrap_err();
        model.check_access(ONE, after, true, true).unwrap_err();
    }

    #[test]
    fn status_and_report_match_possible_states() {
        let model = registered();
        let id = model.begin_change(change(TWO, Action::Reserve, 1, 0));
        model.end_change(id.unwrap(), Status::Good).unwrap_err();
        let model = registered();
        model
            .begin_change(change(TWO, Action::Reserve, 2, 0))
            .unwrap();
        assert_eq!(model.begin_change(change(ONE, Action::Clear, 1, 0)), None);
        model.lose_change(TWO);
        // It may have been executed or not. When the result was seen, only one state is left.
        model
            .observe_states(model.begin(), |one| one.held.is_none())
            .unwrap();
        model
            .observe_states(model.begin(), |one| one.held.is_some())
            .unwrap_err();
    }

    #[test]
    fn persistent_reservations_survive_power_loss() {
        let model = registered();
        model.lose_power();
        model
            .observe_states(model.begin(), |one| !one.keys.is_empty())
            .unwrap_err();
        let persistent = Change {
            persists: true,
            ..change(ONE, Action::RegisterAndIgnore, 0, 1)
        };
        carry_out(&model, persistent);
        model.lose_power();
        model
            .observe_states(model.begin(), |one| one.keys.is_empty())
            .unwrap_err();
        model
            .observe_states(model.begin(), |one| one.generation == 0)
            .unwrap();
    }

    #[test]
    fn pending_resets_may_be_reported_together() {
        let model = Model::new(KNOWLEDGE);
        model.log_in(ONE);
        let read = model.begin();
        let reset = model.begin_reset(TWO);
        model.on_attention(ONE, read, RESET).unwrap();
        model.end_reset(TWO, reset);
        model.on_success(ONE, model.begin()).unwrap();
        // The next reset must be reported.
        let reset = model.begin_reset(TWO);
        model.end_reset(TWO, reset);
        model.on_success(ONE, model.begin()).unwrap_err();
    }

    #[test]
    fn changes_without_response_add_states() {
        let model = Model::new(KNOWLEDGE);
        // Each state has the last executed change and the number of executed changes: 66 states,
        // and the initial one.
        for key in 1..=11 {
            assert!(!model.is_vague());
            model
                .begin_change(change(TWO, Action::RegisterAndIgnore, 0, key))
                .unwrap();
            model.lose_change(TWO);
        }
        assert!(model.is_vague());
        let keys = |one: &Reservations| one.keys.is_empty();
        model.observe_states(model.begin(), keys).unwrap();
        assert!(!model.is_vague());
    }
}
