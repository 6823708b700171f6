//! Paths: opened, checked, lost, fenced, closed.

use std::time::{Duration, Instant};

use riser_state::become_state;

use super::types::{Assignment, Path, Proof, Stage};
use super::{Access, Found, Output, PathIndex, Paths, PortTag};
use crate::request::{Effect, RequestError};
use crate::scsi::Identity;
use crate::session::{ConnectError, Down, SessionEvent};

impl Paths {
    /// Makes a path's next session: through another portal where something is to be fenced and that
    /// can be done there, otherwise through its own.
    pub(super) fn open(&mut self, index: usize) {
        let path = &self.paths[index];
        let other = match path.own_next {
            true => None,
            false => self.fence(index),
        };
        let through = other.unwrap_or(index);
        let path = &mut self.paths[index];
        path.own_next = other.is_some();
        become_state(&mut path.stage, Stage::Opening { through });
        self.outputs.push_back(Output::Open {
            path: PathIndex(index as u8),
            through: PathIndex(through as u8),
            patience: path.patience,
        });
    }

    /// The live path by whose portal a lost one can be fenced, if anything waits for that.
    fn fence(&self, index: usize) -> Option<usize> {
        let path = &self.paths[index];
        let behind = Some(PathIndex(index as u8));
        let is_awaited = path.unfenced
            && (!path.ghosts.is_empty() || self.requests.iter().any(|(_, r)| r.behind == behind));
        if !is_awaited {
            return None;
        }
        let is_fit = |i: &usize| {
            let other = &self.paths[*i];
            *i != index && other.stage == Stage::Live && path.is_proved(other.port, false)
        };
        (0..self.paths.len()).find(is_fit)
    }

    /// Nothing of a lost session can be carried out any more.
    fn on_fenced(&mut self, index: usize) {
        let path = &mut self.paths[index];
        path.unfenced = false;
        path.settled_at = None;
        path.ghosts.clear();
    }

    /// A path has logged in by its own portal, and its unit is the same: the commands of a session
    /// that was lost are over, or are given time to end.
    fn fence_by_own_portal(&mut self, index: usize, now: Instant) {
        let path = &mut self.paths[index];
        if path.is_proved(path.port, true) {
            self.on_fenced(index);
        } else if path.unfenced {
            let at = *path
                .settled_at
                .get_or_insert(now + self.config.timing.settle);
            self.arm(at);
        }
    }

    /// Replaces a process that had the same initiator ports and ended without logging out: any
    /// command that changes the unit may have been outstanding on each of its paths. Reads wait for
    /// their ends as well.
    pub fn recover(&mut self, now: Instant) {
        let at = now + self.config.timing.settle;
        for path in &mut self.paths {
            path.unfenced = true;
            path.proof = Proof::Own;
            path.settled_at = Some(at);
            path.ghosts.push((None, Effect::Other));
        }
        self.arm(at);
    }

    /// A path's session is logged in, with that target port.
    pub fn handle_live(&mut self, path: PathIndex, port: Option<PortTag>) {
        let index = usize::from(path.0);
        let Stage::Opening { through } = self.paths[index].stage else {
            return;
        };
        if through == index {
            self.paths[index].port = port;
            become_state(&mut self.paths[index].stage, Stage::Checking);
            self.outputs.push_back(Output::Check(path));
        } else {
            // Another group than the lost session's has not heard of that session.
            if self.paths[index].is_proved(port, false) {
                self.on_fenced(index);
            }
            self.close_path(index);
        }
        self.pump();
    }

    fn close_path(&mut self, index: usize) {
        self.end_session(index);
        self.outputs
            .push_back(Output::Close(PathIndex(index as u8)));
    }

    /// The check of the unit on a path has ended.
    pub fn handle_checked(&mut self, path: PathIndex, found: Result<Found, Down>, now: Instant) {
        let index = usize::from(path.0);
        let is_live = match self.paths[index].stage {
            Stage::Checking => false,
            Stage::Live => true,
            _ => return,
        };
        let found = found.and_then(|found| match &self.unit {
            _ if found.unit.identity == Identity::default() => Err(Down::NoIdentity),
            Some(unit) => unit.compare(&found.unit).map(|()| found),
            None => Ok(found),
        });
        match found {
            Ok(found) => {
                // Only `riserd` offers the page, and it keeps SRP's promise.
                self.paths[index].is_trusted = found.unit.cache.is_some();
                self.unit.get_or_insert(found.unit);
                // A path that has been in use since is fenced by no later check.
                if !is_live {
                    self.fence_by_own_portal(index, now);
                }
                let path = &mut self.paths[index];
                if !is_live {
                    become_state(&mut path.stage, Stage::Live);
                }
                path.is_foreign = false;
                (path.is_decided, path.was_live) = (true, true);
                path.backoff = self.config.timing.backoff_min;
                path.patience = self.config.timing.login;
                path.recheck = found.access.map(|_| now + self.config.recheck);
                if let Some(at) = path.recheck {
                    self.arm(at);
                }
                self.set_access(index, found.access.unwrap_or(Access::Optimized), now);
                if !is_live {
                    self.hasten_fences(index, now);
                }
            }
            // A unit that is busy with other things is the same as before.
            Err(Down::UnitSilent) if is_live => {
                let at = now + self.config.recheck;
                self.paths[index].recheck = Some(at);
                self.arm(at);
            }
            Err(why) => {
                self.paths[index].why = Some(why);
                self.paths[index].is_foreign = why == Down::OtherUnit;
                self.close_path(index);
                if self.is_live.is_none() && why != Down::UnitSilent {
                    self.end(why);
                }
            }
        }
        self.tell();
        self.pump();
    }

    /// A path has become live: those that could be fenced by it need not wait for their own
    /// portals.
    fn hasten_fences(&mut self, live: usize, now: Instant) {
        for index in 0..self.paths.len() {
            if index == live || self.fence(index).is_none() {
                continue;
            }
            match self.paths[index].stage {
                Stage::Idle { .. } => {
                    let path = &mut self.paths[index];
                    path.own_next = false;
                    match (path.login_at.filter(|at| *at > now), &mut path.stage) {
                        (Some(at), Stage::Idle { until }) => {
                            *until = at.min(*until);
                            self.arm(at);
                        }
                        _ => self.open(index),
                    }
                }
                Stage::Opening { through } if through == index => {
                    self.paths[index].own_next = false;
                    self.close_path(index);
                }
                _ => {}
            }
        }
    }

    pub(super) fn set_access(&mut self, index: usize, access: Access, now: Instant) {
        let path = &mut self.paths[index];
        path.access = access;
        if access == Access::None {
            let at = now + self.config.recheck;
            path.recheck = Some(path.recheck.map_or(at, |t| t.min(at)));
            self.arm(at);
        }
        self.tell();
    }

    /// The unit does not want to be used on a path any more; perhaps on one that it did not want
    /// before.
    pub(super) fn on_refused(&mut self, index: usize, now: Instant) {
        self.set_access(index, Access::None, now);
        for (other, path) in self.paths.iter_mut().enumerate() {
            if other != index && path.recheck.is_some() {
                path.recheck = Some(now);
            }
        }
        self.arm(now);
    }

    /// A unit attention on a path says that the unit may be another one.
    pub fn handle_attention(&mut self, path: PathIndex) {
        let index = usize::from(path.0);
        if matches!(self.paths[index].stage, Stage::Live | Stage::Checking) {
            self.paths[index].recheck = None;
            self.outputs.push_back(Output::Check(path));
        }
    }

    /// The unit is no longer where a path leads. What else was sent there comes back, and the path
    /// is made again, and checked.
    pub(super) fn on_gone(&mut self, index: usize) {
        if self.paths[index].stage == Stage::Live {
            self.paths[index].why = Some(Down::NoIdentity);
            self.close_path(index);
        }
    }

    /// A path's session is over, or of no use any longer. Of one that was in use, commands may
    /// still be carried out at the target.
    pub(super) fn end_session(&mut self, index: usize) {
        let path = &mut self.paths[index];
        let was_live = path.stage == Stage::Live;
        if path.stage != Stage::Closing {
            become_state(&mut path.stage, Stage::Closing);
        }
        if !was_live {
            return;
        }
        path.proof = match path.proof {
            // What was lost with another session is still out.
            before if path.unfenced && before != Proof::At(path.port) => Proof::None,
            _ => Proof::At(path.port),
        };
        path.unfenced = true;
        // It begins again with the end of this session.
        path.settled_at = None;
        path.is_ending = true;
        path.losses += 1;
        path.recheck = None;
        self.tell();
    }

    /// A session that was in use is over. Where no login would show that its commands are, time has
    /// to.
    fn plan_settling(&mut self, index: usize, now: Instant) {
        let path = &mut self.paths[index];
        let is_provable = path.is_trusted || matches!(path.port, Some(PortTag::Group(_)));
        path.settled_at = match path.proof {
            Proof::At(_) if is_provable => None,
            _ => Some(now + self.config.timing.settle),
        };
        if let Some(at) = path.settled_at {
            self.arm(at);
        }
    }

    /// The target of a path's session demands this wait between its end and the next login.
    pub fn set_time2wait(&mut self, path: PathIndex, time2wait: Duration) {
        self.paths[usize::from(path.0)].time2wait = time2wait;
    }

    /// A path's session is over, and so are its requests.
    pub fn handle_closed(&mut self, path: PathIndex, why: Down, now: Instant) {
        let index = usize::from(path.0);
        self.end_session(index);
        let path = &mut self.paths[index];
        if why != Down::Closed {
            path.why = Some(why);
            path.is_foreign = false;
        }
        // A target with much to clean up before it answers a login would never be heard
        // otherwise.
        if why == Down::Connect(ConnectError::TimedOut) {
            path.patience = (path.patience * 2).min(self.config.timing.login_max);
        }
        if self.ending.is_some() {
            become_state(&mut path.stage, Stage::Over);
            self.finish();
            return;
        }
        if std::mem::take(&mut path.is_ending) {
            self.plan_settling(index, now);
        }
        let path = &mut self.paths[index];
        path.is_decided = true;
        let time2wait = std::mem::take(&mut path.time2wait);
        path.login_at = Some(now + time2wait).filter(|at| *at > now);
        let may_fence = !path.own_next && self.fence(index).is_some();
        let path = &mut self.paths[index];
        let until = match may_fence {
            true => now + time2wait,
            false => now + path.backoff.max(time2wait),
        };
        if may_fence && until <= now {
            self.open(index);
        } else {
            path.backoff = (path.backoff * 2).min(self.config.timing.backoff_max);
            become_state(&mut path.stage, Stage::Idle { until });
            self.arm(until);
        }
        self.tell();
        self.pump();
    }

    pub(super) fn expire_path(&mut self, index: usize, now: Instant) {
        match self.paths[index].settled_at {
            Some(at) if at <= now => self.on_fenced(index),
            Some(at) => self.arm(at),
            None => {}
        }
        match self.paths[index].stage {
            Stage::Idle { until } if until <= now => self.open(index),
            Stage::Idle { until } => self.arm(until),
            Stage::Live => match self.paths[index].recheck {
                Some(at) if at <= now => {
                    self.paths[index].recheck = None;
                    self.outputs
                        .push_back(Output::Check(PathIndex(index as u8)));
                }
                Some(at) => self.arm(at),
                None => {}
            },
            Stage::Opening { .. } | Stage::Checking | Stage::Closing | Stage::Over => {}
        }
    }

    /// Reports what has changed.
    fn tell(&mut self) {
        self.outputs.push_back(Output::Changed);
        let is_usable = self.paths.iter().any(Path::is_usable);
        let is_decided = self.paths.iter().all(|p| p.is_decided);
        let why = self.paths.iter().find_map(|p| p.why);
        let why = why.unwrap_or(Down::ConnectionLost);
        match self.is_live {
            _ if self.ending.is_some() => {}
            None if is_decided && is_usable => self.announce(true, SessionEvent::Live),
            None if is_decided => self.end(why),
            Some(false) if is_usable => self.announce(true, SessionEvent::Live),
            Some(true) if !is_usable => self.announce(false, SessionEvent::Reconnecting(why)),
            _ => {}
        }
    }

    fn announce(&mut self, is_live: bool, event: SessionEvent) {
        self.is_live = Some(is_live);
        self.outputs.push_back(Output::Event(event));
    }

    pub(super) fn end(&mut self, why: Down) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(why);
        for index in 0..self.paths.len() {
            match self.paths[index].stage {
                Stage::Idle { .. } => become_state(&mut self.paths[index].stage, Stage::Over),
                Stage::Opening { .. } | Stage::Checking | Stage::Live => self.close_path(index),
                Stage::Closing | Stage::Over => {}
            }
        }
        self.finish();
    }

    /// Ends the whole once every session is over, and so is every request that was handed to one:
    /// the end of a request that met the end of its session is reported behind that.
    pub(super) fn finish(&mut self) {
        let Some(why) = self.ending else {
            return;
        };
        let is_quiet = self.paths.iter().all(|p| p.stage == Stage::Over)
            && self
                .requests
                .iter()
                .all(|(_, r)| r.assignment == Assignment::Waiting);
        if !is_quiet {
            return;
        }
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.waiting.clear();
        let all: Vec<u32> = self
            .requests
            .iter()
            .map(|(index, _)| index as u32)
            .collect();
        for index in all {
            self.complete(index, Err(RequestError::Closed));
        }
        self.timer = None;
        self.outputs
            .push_back(Output::Event(SessionEvent::Closed(why)));
    }
}
