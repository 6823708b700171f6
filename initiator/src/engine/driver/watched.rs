//! Watched units of a session, their caches and their checks.

use std::sync::Weak;
use std::time::Instant;

use riser_block::Buffer;
use riser_scsi::lun::{LunId, WireLun};
use riser_scsi::sense::{AdditionalSense, Sense};

use crate::engine::driver::inputs::{probe, probe_response};
use crate::engine::io::{Done, Io, IoCompletion, SessionKey};
use crate::request::RequestError;
use crate::scsi::Capacity;
use crate::session::{Down, SessionEvent};
use crate::unit::{
    Check, Evidence, Losses, Snapshot, WriteCache, is_cached, is_flush, update_cache_state,
};

/// A unit to watch.
pub(in crate::engine) struct Watch {
    pub(in crate::engine) lun: LunId,
    /// Identity of the unit when discovered by its user.
    pub(in crate::engine) unit: Snapshot,
    /// The unit has a volatile cache (WCE).
    pub(in crate::engine) write_cache: bool,
    /// The unit supports FUA (DPOFUA).
    pub(in crate::engine) has_fua: bool,
    /// An earlier process with the same initiator port was killed.
    pub(in crate::engine) recovers: bool,
    /// Generation of the unit's cache recorded by the earlier process, if any.
    pub(in crate::engine) noted: Option<[u8; 16]>,
    /// A login of the earlier process was redirected to another port.
    pub(in crate::engine) was_redirected: bool,
    /// Watch the unit while this exists; counts losses of its cache.
    pub(in crate::engine) owner: Weak<Losses>,
    /// Buffer for the unit's responses to a check, of [`CHECK_LEN`](super::CHECK_LEN) bytes.
    pub(in crate::engine) buffer: Buffer,
}

/// Logs that acknowledged writes to a unit may be lost.
pub(super) fn warn_of_lost_cache(lun: LunId) {
    tracing::warn!(
        lun = lun.number(),
        "the target may have lost its cache: the next flush after unflushed writes fails"
    );
}

/// A watched unit.
pub(in crate::engine::driver) struct Watched {
    pub(super) serial: u64,
    pub(super) lun: LunId,
    pub(super) unit: Snapshot,
    owner: Weak<Losses>,
    has_fua: bool,
    /// `None` while in use.
    pub(super) buffer: Option<Buffer>,
    pub(super) check: Check,
    pub(super) is_checking: bool,
    /// The last check failed or found a different unit.
    is_lost: bool,
    /// An event occurred after the first response, so we need to repeat the check.
    is_stale: bool,
    /// State of its volatile cache, if it has one.
    pub(super) cache: Option<WriteCache>,
}

impl Watched {
    pub(super) fn new(serial: u64, watch: Watch, cache: Option<WriteCache>) -> Self {
        Self {
            serial,
            lun: watch.lun,
            unit: watch.unit,
            owner: watch.owner,
            has_fua: watch.has_fua,
            buffer: Some(watch.buffer),
            check: Check::default(),
            is_checking: false,
            is_lost: false,
            is_stale: false,
            cache,
        }
    }

    /// Called when the target may have lost its volatile cache.
    fn on_cache_lost(&mut self) {
        if self.cache.as_mut().is_some_and(WriteCache::on_lost)
            && let Some(losses) = self.owner.upgrade()
        {
            losses.add();
        }
    }

    /// Starts a check; returns whether its first query must be sent.
    fn start_check(&mut self) -> bool {
        self.is_lost = false;
        self.is_stale = self.is_checking && self.check.invalidate();
        if std::mem::replace(&mut self.is_checking, true) {
            return false;
        }
        self.check = Check::default();
        true
    }

    /// Returns the next query of the check, or `None` while one is outstanding.
    pub(super) fn next_query(&mut self, session: SessionKey, now: Instant) -> Option<Io> {
        let buffer = self.buffer.take()?;
        let done = Done::Unit {
            session,
            unit: self.serial,
        };
        Some(probe(self.lun, self.check.command(), buffer, done, now))
    }

    /// Handles the response to a query, or its failure. Returns the result of the check, or `None`
    /// if there is another query.
    pub(super) fn handle_response(&mut self, completion: IoCompletion) -> Option<Result<(), Down>> {
        let mut has_response =
            matches!(&completion.result, Ok(response) if self.check.is_conclusive(response));
        let was_sent = !matches!(completion.result, Err(RequestError::NotSent));
        let (buffer, data) = probe_response(completion);
        self.buffer = buffer;
        if !was_sent {
            return None;
        }
        // An event occurred after the first query, so the responses might be from two different
        // units.
        if has_response && std::mem::take(&mut self.is_stale) {
            if self.check.restart() {
                return None;
            }
            has_response = false;
        }
        if has_response && self.check.process_response(&data) {
            return None;
        }
        self.is_checking = false;
        Some(match has_response {
            true => self.unit.compare(self.check.found()),
            false => Err(Down::UnitSilent),
        })
    }

    /// Called when the check found the unit unchanged, to update the state of its cache.
    pub(super) fn on_unchanged(&mut self, evidence: Evidence) {
        let found = self.check.found();
        let (generation, write_cache) = (found.cache, found.write_cache);
        if evidence.is_cache_lost(self.unit.cache, generation) {
            self.on_cache_lost();
            warn_of_lost_cache(self.lun);
        }
        self.unit.cache = generation;
        self.cache = update_cache_state(self.cache, write_cache);
    }

    /// Called when the unit is missing or was replaced.
    pub(super) fn on_lost(&mut self) {
        self.is_lost = true;
    }
}

/// Watched units of a session, which must remain unchanged.
#[derive(Default)]
pub(in crate::engine::driver) struct WatchedUnits {
    pub(super) units: Vec<Watched>,
    /// Evidence for lost caches since the units were last known to be unchanged.
    pub(super) evidence: Evidence,
    /// Time of the target's last message, while the units are not known to be unchanged.
    pub(super) last_received: Option<Instant>,
    /// Logged in, but not reported as live until the units are known to be unchanged.
    is_unchecked: bool,
    /// The connection is lost and not yet re-established.
    is_away: bool,
}

impl WatchedUnits {
    /// Returns the first unit, which is the one in use.
    pub(in crate::engine::driver) fn first(&self) -> Option<&Watched> {
        self.units.first()
    }

    /// Returns the logical unit of the first unit.
    pub(in crate::engine::driver) fn first_lun(&self) -> Option<LunId> {
        self.units.first().map(|unit| unit.lun)
    }

    /// Returns the number of units.
    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Returns whether a logical unit is watched.
    pub(super) fn contains(&self, lun: LunId) -> bool {
        self.find_lun(lun).is_some()
    }

    pub(super) fn push(&mut self, unit: Watched) {
        self.units.push(unit);
    }

    /// Returns the unit with this serial number.
    pub(super) fn find_mut(&mut self, serial: u64) -> Option<&mut Watched> {
        self.units.iter_mut().find(|unit| unit.serial == serial)
    }

    /// Returns the first watched unit with this number.
    pub(super) fn find_lun(&self, lun: LunId) -> Option<&Watched> {
        self.units.iter().find(|unit| unit.lun == lun)
    }

    /// Removes the units that are no longer in use.
    pub(super) fn remove_unused(&mut self) {
        self.units.retain(|unit| unit.owner.strong_count() > 0);
    }

    /// Returns whether the session is logged in, but not reported as live, because its units are
    /// not known to be unchanged.
    pub(in crate::engine::driver) fn is_unchecked(&self) -> bool {
        self.is_unchecked
    }

    /// Returns whether acknowledged writes may only be in the caches of the units.
    pub(super) fn has_unflushed_writes(&self) -> bool {
        let mut caches = self.units.iter().filter_map(|unit| unit.cache.as_ref());
        caches.any(|cache| !cache.is_settled())
    }

    /// Returns whether a unit reports generations of its cache.
    pub(super) fn has_generations(&self) -> bool {
        self.units.iter().any(|unit| unit.unit.cache.is_some())
    }

    /// Records the acknowledged writes for a flush that is being submitted.
    pub(in crate::engine::driver) fn mark_flush(&self, io: &mut Io) {
        if !self.units.is_empty() && is_flush(&io.io.command) {
            let mut units = self.units.iter().filter(|u| u.lun == io.io.lun);
            let cache = units.find_map(|u| u.cache.as_ref());
            io.mark = cache.map_or_else(Default::default, WriteCache::begin_flush);
        }
    }

    /// Tracks the write cache of a unit that has executed a command. Returns false for a flush that
    /// does not cover all writes acknowledged before it, because the cache was lost.
    pub(super) fn track_command(&mut self, io: &Io) -> bool {
        let mut is_kept = true;
        for unit in self.units.iter_mut().filter(|u| u.lun == io.io.lun) {
            let Some(cache) = &mut unit.cache else {
                continue;
            };
            if is_flush(&io.io.command) {
                is_kept &= cache.end_flush(io.mark);
            } else if is_cached(&io.io.command, unit.has_fua) {
                cache.on_written();
            }
        }
        is_kept
    }

    /// Called when a unit reports whether it has a volatile cache.
    pub(in crate::engine::driver) fn on_write_cache(&mut self, lun: LunId, is_on: Option<bool>) {
        for unit in self.units.iter_mut().filter(|u| u.lun == lun) {
            unit.cache = update_cache_state(unit.cache, is_on);
        }
    }

    /// Called when a target may have lost the caches of all units.
    pub(super) fn on_cache_lost(&mut self) {
        self.units.iter_mut().for_each(Watched::on_cache_lost);
    }

    /// Called for an event of the session's connection. `last_received` is the time of the target's
    /// last message. The units of paths are checked by `paths`.
    pub(super) fn on_connection_event(
        &mut self,
        event: &SessionEvent,
        has_paths: bool,
        last_received: Option<Instant>,
        now: Instant,
    ) {
        let is_checked_here = !self.is_empty() && !has_paths;
        match event {
            SessionEvent::UnitEvent { .. } | SessionEvent::UnitReset(_) | SessionEvent::Stale => {
                return;
            }
            SessionEvent::Live => (self.is_unchecked, self.is_away) = (is_checked_here, false),
            SessionEvent::Reconnecting(_) | SessionEvent::Closed(_) => {
                (self.is_unchecked, self.is_away) = (false, true);
            }
        }
        match event {
            SessionEvent::Live if is_checked_here => {
                let outage = self.last_received.map(|received| now - received);
                self.evidence.on_login(outage);
            }
            SessionEvent::Reconnecting(why) if is_checked_here => {
                // We have not checked anything since the first of several outages, so we use the
                // first one.
                self.last_received = self.last_received.or(last_received);
                self.evidence.on_down(*why);
            }
            _ => {}
        }
    }

    /// Called for a unit attention; returns whether it reports a power-on. We must count the loss
    /// immediately. Waiting for the check of the unit would be too late, because an outstanding
    /// flush might complete before.
    pub(super) fn on_attention(&mut self, attention: AdditionalSense, is_own_reset: bool) -> bool {
        self.evidence.on_attention(attention, is_own_reset);
        if !self.evidence.take_power_on() {
            return false;
        }
        // Otherwise, the generation found by the check is decisive.
        for unit in self.units.iter_mut().filter(|u| u.unit.cache.is_none()) {
            unit.on_cache_lost();
            warn_of_lost_cache(unit.lun);
        }
        true
    }

    /// Called when a unit reports a deferred error; returns whether acknowledged writes may be
    /// lost.
    pub(super) fn on_deferred_error(&mut self, lun: WireLun, sense: Sense) -> bool {
        if !sense.is_deferred_failure() {
            return false;
        }
        let (key, additional) = (sense.key, sense.additional);
        let lun = LunId::addressed(lun);
        tracing::warn!(
            lun = lun.map(LunId::number),
            "deferred error: {key}: {additional}; acknowledged writes may be lost, and a flush that covers them fails"
        );
        let units = self.units.iter_mut().filter(|u| Some(u.lun) == lun);
        units.for_each(Watched::on_cache_lost);
        true
    }

    /// Starts the checks of all units. Returns the serial numbers of units whose first query must be
    /// sent.
    pub(super) fn start_checks(&mut self) -> Vec<u64> {
        let units = self.units.iter_mut();
        units
            .filter_map(|unit| unit.start_check().then_some(unit.serial))
            .collect()
    }

    /// Returns whether the units are not known to be unchanged. A unit that did not respond is
    /// checked after the next login, with the evidence collected until then.
    pub(super) fn is_check_pending(&self) -> bool {
        let is_open = self.units.iter().any(|u| u.is_checking || u.is_lost);
        is_open || (self.is_away && !self.is_empty())
    }

    /// Called when all units are known to be unchanged. Returns whether the session can be reported
    /// as live now.
    pub(super) fn on_checked(&mut self) -> bool {
        (self.evidence, self.last_received) = Default::default();
        std::mem::take(&mut self.is_unchecked)
    }

    /// Returns the previous capacity of a unit if it was known.
    pub(super) fn known_capacity(&self, lun: LunId) -> Option<Capacity> {
        self.find_lun(lun).and_then(|unit| unit.unit.capacity)
    }
}
