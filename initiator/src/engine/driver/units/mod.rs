//! Units that must remain unchanged, for sessions that are not paths. We identify them after every
//! login and after unit attentions that may indicate a different unit. During this time, the
//! session holds all other commands. For paths, this is done in `paths`, but we track the state of
//! the write cache here for both.

use std::time::Instant;

use riser_scsi::lun::{LunId, WireLun};
use riser_scsi::sense::Sense;

use super::Driver;
use super::inputs::Input;
use super::session::EngineSession;
use super::watched::{Watch, Watched};
use crate::engine::env::Env;
use crate::engine::io::{Io, IoCompletion, SessionKey};
use crate::engine::status::{LinkState, Pending};
use crate::paths::PortTag;
use crate::request::{
    CommandResponse, RequestError, RequestResult, Retry, is_unit_missing, may_change_unit,
};
use crate::scsi::Capacity;
use crate::session::{Down, SessionEvent};
use crate::unit::{Snapshot, WriteCache};

/// Cache generation that no unit uses.
const LOST_GENERATION: [u8; 16] = [0xff; 16];

impl EngineSession {
    /// Tracks a unit's write cache; returns the result to report for the command.
    pub(super) fn track_command(&mut self, io: &Io, result: RequestResult) -> RequestResult {
        if !result.as_ref().is_ok_and(CommandResponse::is_success) || self.units.track_command(io) {
            return result;
        }
        self.report_cache();
        Err(RequestError::CacheLost)
    }

    /// Returns the work that would be lost with the session.
    pub(super) fn pending(&self) -> Pending {
        Pending {
            operations: self.commands.count_of_users(),
            unflushed: self.units.has_unflushed_writes(),
        }
    }

    /// Reports the potential losses while the target is unreachable, because they change with each
    /// command.
    pub(super) fn report_pending(&self) {
        if self.status.link() == LinkState::Reconnecting {
            self.status.set_pending(self.pending());
        }
    }

    /// Reports the generation of a unit's cache for a process that takes over. Until a flush has
    /// reported a loss, this is a different generation, to ensure that the first flush of that
    /// process will report the loss: either the previous generation, or [`LOST_GENERATION`] if the
    /// unit has no generations or did not change its generation.
    ///
    /// Note that another thread will write the report to a file. If the process is killed before
    /// that, the loss is only detected if the unit has generations.
    pub(super) fn report_cache(&self) {
        let Some(unit) = self.units.first() else {
            return;
        };
        let generation = self.generation(&unit.unit);
        // Without a volatile cache, there is nothing to lose.
        let generation = generation.filter(|_| unit.cache.is_some());
        if !unit.cache.is_some_and(|cache| cache.has_lost()) {
            self.status.set_cache(generation);
        } else if self.status.report().cache == generation {
            self.status.set_cache(Some(LOST_GENERATION));
        }
    }

    /// Returns the last known generation of a watched unit's cache.
    fn generation(&self, unit: &Snapshot) -> Option<[u8; 16]> {
        match self.link.paths() {
            Some(paths) => paths.generation,
            None => unit.cache,
        }
    }

    /// Reports a unit that has grown. Its users keep the original capacity.
    pub(super) fn report_growth(&self, lun: LunId, found: Option<Capacity>) {
        let (Some(known), Some(found)) = (self.units.known_capacity(lun), found) else {
            return;
        };
        let bytes = found.blocks * u64::from(found.block_size);
        if found.blocks > known.blocks && self.status.set_grown(bytes) {
            tracing::warn!(
                lun = lun.number(),
                "the logical unit has grown to {bytes} bytes: detach and attach it again to use the new size"
            );
        }
    }

    /// Called when a target may have lost the caches of all units.
    pub(super) fn on_cache_lost(&mut self) {
        self.units.on_cache_lost();
        self.report_cache();
    }

    /// Called when a unit reports a deferred error.
    pub(super) fn on_deferred_error(&mut self, lun: WireLun, sense: Sense) {
        if self.units.on_deferred_error(lun, sense) {
            self.report_cache();
        }
    }
}

/// Returns the cache state of a unit when a process takes over from a killed one. `found` is the
/// last known generation, which might have changed since the unit was first identified.
fn inherited(watch: &Watch, found: Option<[u8; 16]>) -> Option<WriteCache> {
    let mut cache = WriteCache::inherited();
    // Without a recorded generation, the cache may still have been lost since the unit was
    // identified.
    let known = watch.unit.cache.filter(|_| watch.write_cache);
    let noted = watch.noted.or(known);
    if noted.is_some() && noted != found {
        if cache.on_lost()
            && let Some(losses) = watch.owner.upgrade()
        {
            losses.add();
        }
        tracing::warn!(
            lun = watch.lun.number(),
            "the target may have lost its cache since this disk was served: the first flush fails"
        );
    }
    Some(cache).filter(|cache| watch.write_cache || cache.has_lost())
}

impl<E: Env> Driver<E> {
    pub(super) fn watch(&mut self, index: usize, watch: Watch, now: Instant) {
        let serial = self.sessions.assign_serial();
        let key = self.sessions.key(index);
        let session = &mut self.sessions[index];
        session.units.remove_unused();
        let found = session.generation(&watch.unit);
        // All watchers of a unit share the state of its cache.
        let cache = match session.units.find_lun(watch.lun) {
            Some(unit) => unit.cache.filter(|_| watch.write_cache),
            None if watch.recovers && session.units.is_empty() => inherited(&watch, found),
            None => Some(WriteCache::default()).filter(|_| watch.write_cache),
        };
        let (recovers, was_redirected) = (watch.recovers, watch.was_redirected);
        session.units.push(Watched::new(serial, watch, cache));
        session.report_cache();
        session.link.machine().set_guarded(true);
        // First watched unit. `riserd` has terminated all previous commands before its login
        // response, unless they were sent to another port.
        let port = session.link.port();
        let is_redirected = port.as_ref().is_some_and(PortTag::is_redirected);
        let is_proved = session.units.has_generations() && !is_redirected && !was_redirected;
        if recovers && session.units.len() == 1 && !is_proved {
            session.link.machine().recover(was_redirected, now);
        }
        // The unit might have changed during its discovery: unit attentions are not reported for
        // unwatched units, and INQUIRY does not report them.
        if session.link.paths().is_none() {
            session.link.machine().hold_requests();
            self.inputs.push_back(Input::Check(key));
        }
    }

    /// Tracks events of a session for its watched units. The checks start when no other call is
    /// being processed.
    pub(super) fn observe(&mut self, index: usize, event: &SessionEvent, now: Instant) {
        let key = self.sessions.key(index);
        let session = &mut self.sessions[index];
        let has_paths = session.link.paths().is_some();
        let last_received = session.link.machine().last_received();
        let units = &mut session.units;
        units.on_connection_event(event, has_paths, last_received, now);
        if units.is_empty() || has_paths {
            return;
        }
        match event {
            SessionEvent::Live => self.inputs.push_back(Input::Check(key)),
            SessionEvent::UnitEvent {
                lun,
                sense,
                is_own_reset,
            } => {
                let sense = Sense::parse(sense);
                if let Some(sense) = sense.filter(|sense| sense.is_deferred) {
                    session.on_deferred_error(*lun, sense);
                } else if let Some(sense) = sense {
                    if units.on_attention(sense.additional, *is_own_reset) {
                        session.report_cache();
                    }
                    if may_change_unit(sense.additional) {
                        self.inputs.push_back(Input::Check(key));
                    }
                }
            }
            SessionEvent::Reconnecting(_)
            | SessionEvent::Closed(_)
            | SessionEvent::UnitReset(_)
            | SessionEvent::Stale => {}
        }
    }

    /// Returns whether a user's command failed because the target no longer presents the watched
    /// unit. Paths try another path instead.
    pub(super) fn is_unit_missing(&self, index: usize, io: &Io, result: &RequestResult) -> bool {
        let session = &self.sessions[index];
        let is_candidate = io.io.retry == Retry::Standard && !io.is_resubmitted && !session.closed;
        is_candidate
            && result.as_ref().is_ok_and(is_unit_missing)
            && session.link.paths().is_none()
            && session.units.contains(io.io.lun)
    }

    /// Called before a retry of a command, to verify the session's units. If the unit is missing,
    /// the session is down, and commands will wait until the target presents the unit again.
    pub(super) fn resubmit_after_check(&mut self, index: usize, io: Io, now: Instant) {
        let key = self.sessions.key(index);
        self.sessions[index].link.machine().hold_requests();
        self.inputs.push_back(Input::Check(key));
        let io = Io {
            is_resubmitted: true,
            ..io
        };
        self.submit(index, io, now);
    }

    /// Starts to identify all watched units of a session.
    pub(super) fn check_units(&mut self, key: SessionKey, now: Instant) {
        let Some(index) = self.sessions.find(key) else {
            return;
        };
        let session = &mut self.sessions[index];
        session.units.remove_unused();
        if session.units.is_empty() {
            session.link.machine().set_guarded(false);
        }
        for unit in session.units.start_checks() {
            self.query_unit(index, unit, now);
        }
        self.release_checked(index, now);
    }

    fn query_unit(&mut self, index: usize, serial: u64, now: Instant) {
        let key = self.sessions.key(index);
        let unit = self.sessions[index].units.find_mut(serial);
        if let Some(io) = unit.and_then(|unit| unit.next_query(key, now)) {
            self.submit(index, io, now);
        }
    }

    /// Handles the response of a watched unit to a query, or its failure.
    pub(super) fn handle_unit_response(
        &mut self,
        key: SessionKey,
        serial: u64,
        completion: IoCompletion,
        now: Instant,
    ) {
        let Some(index) = self.sessions.find(key) else {
            return;
        };
        let Some(unit) = self.sessions[index].units.find_mut(serial) else {
            self.release_checked(index, now);
            return;
        };
        match unit.handle_response(completion) {
            None => self.query_unit(index, serial, now),
            Some(Ok(())) => self.on_unit_unchanged(index, serial, now),
            Some(Err(why)) => self.on_unit_lost(index, serial, why, now),
        }
    }

    fn on_unit_unchanged(&mut self, index: usize, serial: u64, now: Instant) {
        let session = &mut self.sessions[index];
        let evidence = session.units.evidence;
        let Some(unit) = session.units.find_mut(serial) else {
            return;
        };
        unit.on_unchanged(evidence);
        let (lun, capacity) = (unit.lun, unit.check.found().capacity);
        session.report_growth(lun, capacity);
        session.report_cache();
        self.release_checked(index, now);
    }

    /// Called when a unit is missing or was replaced: we must not send any commands to it. If this
    /// is permanent, the session will close.
    fn on_unit_lost(&mut self, index: usize, serial: u64, why: Down, now: Instant) {
        let session = &mut self.sessions[index];
        let portal = session.link.target().dst;
        let last = matches!(why, Down::OtherUnit | Down::Shrunk);
        if let Some(unit) = session.units.find_mut(serial) {
            unit.on_lost();
            if last {
                let (expected, found) = (&unit.unit, unit.check.found());
                let reason = format!("{why}: expected {expected}, found {found}");
                tracing::error!(target = %portal, lun = unit.lun.number(), "{reason}");
                let portal = portal.to_string();
                session.status.set_other_unit(portal, why, reason);
            }
        }
        self.with_link(index, now, |link, _| {
            link.machine().abandon_connection(why, last, now);
        });
    }

    /// Resumes a session once all units are known to be unchanged, without an event since that may
    /// indicate a different unit.
    fn release_checked(&mut self, index: usize, now: Instant) {
        let key = self.sessions.key(index);
        let is_again = |input: &Input| matches!(input, Input::Check(own) if *own == key);
        if self.inputs.iter().any(is_again) {
            return;
        }
        let session = &mut self.sessions[index];
        if session.units.is_check_pending() {
            return;
        }
        if session.units.on_checked() {
            let date = self.env.date();
            session.status.on_event(&SessionEvent::Live, date);
        }
        // Only `riserd` has this page, and it complies with SRP's guarantee.
        let ends_old = session.units.has_generations();
        self.with_link(index, now, |link, _| link.machine().release(ends_old, now));
    }
}

#[cfg(test)]
mod tests;
