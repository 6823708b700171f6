//! Detection of a lost volatile cache for a unit with several paths.
//!
//! A recovered path does not indicate a loss if another path has reached the target throughout. An
//! outage of all paths is judged as a whole, and its loss is counted once.

use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use super::super::watched::warn_of_lost_cache;
use super::{Driver, Member, PathsLink};
use crate::engine::env::Env;
use crate::engine::io::{Done, SessionKey};
use crate::paths::PathIndex;
use crate::session::Down;
use crate::unit::Evidence;

/// Maximum number of remembered cache generations.
const GONE: usize = 16;

/// Maximum time that a recovered path waits for a response on another path.
const VOUCH: Duration = Duration::from_secs(15);

impl PathsLink {
    /// Returns the time of the unit's last message on any path.
    fn last_received(&self) -> Option<Instant> {
        self.members.iter().filter_map(|m| m.last_received).max()
    }

    fn is_in_use(&self) -> bool {
        self.members.iter().any(|m| m.is_in_use)
    }

    /// Returns the time between the unit's last message on any path and a login, and whether a
    /// connection was refused during this time.
    pub(super) fn outage(&self, login: Instant) -> (Option<Duration>, bool) {
        let last_received = self.last_received();
        let outage =
            last_received.map(|last_received| login.saturating_duration_since(last_received));
        (outage, self.refused > last_received)
    }

    /// Returns whether another path, in use from before the loss of this path until after its
    /// login, proves that the unit was available throughout. Also returns true for an outage of all
    /// paths whose cache loss was already counted.
    fn is_covered(&self, path: PathIndex) -> bool {
        let at = usize::from(path.0);
        let Member {
            last_received,
            login,
            ..
        } = self.members[at];
        let since = last_received.max(self.lost);
        let others = self.members.iter().enumerate().filter(|(i, _)| *i != at);
        let mut in_use = others.map(|(_, m)| m).filter(|m| m.is_in_use);
        match self.members[at].cache {
            // The first attention is not evidence for a cache that only other paths have used.
            None => in_use.next().is_some(),
            Some(_) => in_use.any(|m| m.login <= since && m.last_received >= login),
        }
    }

    /// Returns whether the check of a recovered path must wait for the pings on other paths. A path
    /// that was never in use does not need their proof.
    pub(super) fn awaits_others(&mut self, path: PathIndex) -> bool {
        let at = usize::from(path.0);
        let Member {
            is_in_use, cache, ..
        } = self.members[at];
        let mut others = self.members.iter().enumerate().filter(|(i, _)| *i != at);
        let awaits = !is_in_use && cache.is_some() && others.any(|(_, m)| m.pings > 0);
        self.members[at].is_waiting = awaits;
        awaits
    }

    /// Puts a path into use with the result of its check. Returns the generation of the cache if
    /// this may be lost.
    fn activate_path(&mut self, path: PathIndex) -> Option<Option<[u8; 16]>> {
        let is_covered = self.is_covered(path);
        // A path that was never in use is compared with the result of another path.
        let known = self.members.iter().find_map(|m| m.cache);
        let login = self.member(path).login;
        let outage = login.map(|login| self.outage(login));
        // Prefer the last generation of all paths: a recovered path may have found an older one
        // whose loss was already counted.
        let generation = self.generation.map(Some);
        let is_outdated = self.is_outdated(path);
        let member = self.member(path);
        let is = member.check.found().cache;
        let before = member.cache.replace(is);
        let was = generation.or(before).or(known);
        let mut evidence = std::mem::take(&mut member.evidence);
        if !member.is_in_use {
            tracing::info!(portal = %member.target.dst, "path is live");
            member.is_logged = false;
            member.last_received = member.last_received.max(login);
            if is_covered {
                evidence = Evidence::default();
            }
            (evidence.outage, evidence.refused) =
                outage.filter(|_| !is_covered).unwrap_or_default();
        }
        (member.is_in_use, member.is_held) = (true, false);
        let lost = was.filter(|was| evidence.is_cache_lost(*was, is));
        match is_outdated {
            // The last generation is still in use, and its loss must be counted later.
            true => lost.filter(|_| before != Some(is)).map(|_| None),
            false => lost,
        }
    }

    /// Returns whether the check of a path found a generation that another path found to be lost,
    /// for example if several machines serve the unit.
    fn is_outdated(&self, path: PathIndex) -> bool {
        let found = self.members[usize::from(path.0)].check.found().cache;
        found.is_some_and(|generation| self.gone.contains(&generation))
    }

    /// Returns whether an unused path has reported a loss that no path in use can refute. We cannot
    /// wait for the check of that path, because its connection may break before.
    fn is_loss_reported(&self) -> bool {
        let is_reported = |member: &Member| {
            let since = match member.cache {
                None => member.attended,
                Some(_) => member.last_received.max(self.lost),
            };
            let mut in_use = self.members.iter().filter(|m| m.is_in_use);
            !member.is_in_use
                && member.evidence.has_powered_on()
                && in_use.all(|other| other.login > since)
        };
        self.is_in_use() && self.generation.is_none() && self.members.iter().any(is_reported)
    }

    /// Called when a path in use is lost: discards the reports of unused paths that it refuted.
    fn clear_covered(&mut self) {
        for at in 0..self.members.len() {
            let Member {
                is_in_use, cache, ..
            } = self.members[at];
            if !is_in_use && cache.is_some() && self.is_covered(PathIndex(at as u8)) {
                self.members[at].evidence.clear();
            }
        }
    }

    /// Called when an outage starts, after the unit's last message at `last_received`: discards evidence
    /// collected before by paths that were never in use.
    fn clear_unused(&mut self, last_received: Instant) {
        let unused = self.members.iter_mut().filter(|m| m.cache.is_none());
        let old = unused.filter(|m| m.attended.is_none_or(|at| at <= last_received));
        old.for_each(|m| m.evidence.clear());
    }

    /// Called when the session of a path has closed, with the time of its last message. Returns
    /// whether the path was in use.
    pub(super) fn note_closed(
        &mut self,
        path: PathIndex,
        why: Down,
        last_received: Option<Instant>,
        now: Instant,
    ) -> bool {
        if self.member(path).is_in_use {
            let member = self.member(path);
            member.last_received = last_received.or(member.last_received);
            self.clear_covered();
        }
        let member = self.member(path);
        member.session = None;
        member.is_waiting = false;
        let was_in_use = std::mem::take(&mut member.is_in_use);
        member.is_held = true;
        let mut end = Evidence::default();
        end.on_down(why);
        if end.refused && member.cache.is_some() {
            self.refused = Some(now);
        }
        if let Some(last_received) = self
            .last_received()
            .filter(|_| was_in_use && !self.is_in_use())
        {
            self.clear_unused(last_received);
        }
        was_in_use
    }
}

impl<E: Env> Driver<E> {
    /// Updates the time of the target's last message for each path in use.
    pub(super) fn update_last_received(&mut self, key: SessionKey) {
        for at in 0..self.paths(key).map_or(0, |(_, link)| link.members.len()) {
            let session = self.member_in_use(key, at);
            let last_received =
                session.and_then(|i| self.sessions[i].link.machine().last_received());
            if let Some((_, link)) = self.paths(key) {
                link.members[at].last_received = link.members[at].last_received.max(last_received);
            }
        }
    }

    /// Called when a session has reset its unit. If it is one of several paths, each of the other
    /// paths may report the reset.
    pub(in super::super) fn note_reset(&mut self, index: usize, lun: Option<WireLun>) {
        let Some((paths, path)) = self.sessions[index].paths else {
            return;
        };
        for at in 0..self.paths(paths).map_or(0, |(_, link)| link.members.len()) {
            let session = self
                .paths(paths)
                .and_then(|(_, link)| link.members[at].session);
            if at != usize::from(path.0)
                && let Some(other) = session.and_then(|session| self.sessions.find(session))
            {
                self.sessions[other].link.machine().expect_reset_report(lun);
            }
        }
    }

    /// Called when a path has recovered: pings the target on the other paths to prove that it was
    /// available throughout. The check of the path waits for the pings, because a busy path may
    /// respond later than the check would complete. An unresponsive path is lost before this wait
    /// times out.
    pub(super) fn ping_others(&mut self, key: SessionKey, back: PathIndex, now: Instant) {
        for at in 0..self.paths(key).map_or(0, |(_, link)| link.members.len()) {
            let path = PathIndex(at as u8);
            if path != back
                && let Some(session) = self.member_in_use(key, at)
                && let Some((_, link)) = self.paths(key)
            {
                link.member(path).pings += 1;
                let done = Done::PathPing { paths: key, path };
                self.ping_within(session, VOUCH, done, now);
            }
        }
    }

    /// Called when a ping of [`Self::ping_others`] completed: starts the checks that waited for it.
    pub(super) fn handle_pinged(&mut self, key: SessionKey, path: PathIndex, now: Instant) {
        let Some((index, link)) = self.paths(key) else {
            return;
        };
        let pings = &mut link.member(path).pings;
        *pings = pings.saturating_sub(1);
        let paths = (0..link.members.len()).map(|at| PathIndex(at as u8));
        let mut ready: Vec<_> = paths.collect();
        ready.retain(|path| link.member(*path).is_waiting && !link.awaits_others(*path));
        for path in ready {
            self.send_next_query(index, path, now);
        }
        self.drain(index, now);
    }

    /// Counts a loss reported by unit attentions on a path in use. Waiting for the check of the
    /// unit would be too late, because an outstanding flush may complete before, and the path may
    /// be lost.
    pub(super) fn check_attentions(&mut self, key: SessionKey, path: PathIndex, now: Instant) {
        let Some((index, link)) = self.paths(key) else {
            return;
        };
        let member = link.member(path);
        if member.is_in_use {
            let evidence = std::mem::take(&mut member.evidence);
            let cache = member
                .cache
                .filter(|was| evidence.is_cache_lost(*was, *was));
            self.count_lost(index, cache, now);
        }
    }

    /// Called when a path is in use again: counts a loss of the cache found by its check.
    pub(super) fn finish_path_check(&mut self, index: usize, path: PathIndex, now: Instant) {
        let key = self.sessions.key(index);
        self.update_last_received(key);
        let Some(link) = self.sessions[index].link.paths_mut() else {
            return;
        };
        let lun = link.lun;
        let found = link.member(path).check.found();
        let (is, is_on, capacity) = (found.cache, found.write_cache, found.capacity);
        let is_outdated = link.is_outdated(path);
        let lost = link.activate_path(path);
        if !is_outdated {
            link.generation = is;
        }
        self.count_lost(index, lost, now);
        self.count_reported(index, now);
        // Only now, because the loss must be counted with the previous state.
        self.sessions[index].units.on_write_cache(lun, is_on);
        self.sessions[index].report_cache();
        self.sessions[index].report_growth(lun, capacity);
    }

    /// Counts a loss reported by a path that has not been in use since.
    pub(super) fn count_reported(&mut self, index: usize, now: Instant) {
        let link = self.sessions[index].link.paths_mut();
        if link.is_some_and(|link| link.is_loss_reported()) {
            self.count_lost(index, Some(None), now);
        }
    }

    /// Counts a potential loss of a unit's cache, once per generation.
    fn count_lost(&mut self, index: usize, lost: Option<Option<[u8; 16]>>, now: Instant) {
        let (Some(link), Some(lost)) = (self.sessions[index].link.paths_mut(), lost) else {
            return;
        };
        if let Some(generation) = lost {
            if link.gone.contains(&generation) {
                return;
            }
            link.gone.truncate(GONE - 1);
            link.gone.push_front(generation);
        }
        link.lost = Some(now);
        // All losses reported by other paths so far are covered by the next flush.
        let unused = link.members.iter_mut().filter(|m| !m.is_in_use);
        unused.for_each(|m| m.evidence.clear());
        warn_of_lost_cache(link.lun);
        self.sessions[index].on_cache_lost();
    }
}
