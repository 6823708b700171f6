//! Paths: opening, checking, loss, fencing, and closing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use riser_state::become_state;

use super::types::{Assignment, Path, Proof, Stage};
use super::{Access, Output, PathIndex, Paths, PortTag, UnitReport};
use crate::request::{Effect, RequestError};
use crate::scsi::Identity;
use crate::session::{ConnectError, Down, SessionEvent};

impl Paths {
    /// Opens the next session of a path: through another portal if the path must be fenced and this
    /// is possible there, otherwise through its own portal.
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

    /// Returns a live path whose portal can be used to fence a lost path, if any request is waiting
    /// for this. If no such portal provides a proof, returns a path in the same portal group: a
    /// login there starts the settle time.
    fn fence(&self, index: usize) -> Option<usize> {
        let path = &self.paths[index];
        if !path.unfenced || path.settled_at.is_some() || !self.is_awaited(index) {
            return None;
        }
        let is_live = |i: &usize| *i != index && self.paths[*i].stage == Stage::Live;
        let port = |i: usize| self.paths[i].port.as_ref();
        let mut live = (0..self.paths.len()).filter(is_live);
        live.clone()
            .find(|&i| path.is_proved(port(i), false))
            .or_else(|| live.find(|&i| path.is_in_group(port(i))))
    }

    /// Returns whether any request is waiting for the commands of a path's lost session.
    fn is_awaited(&self, index: usize) -> bool {
        let behind = Some(PathIndex(index as u8));
        !self.paths[index].ghosts.is_empty()
            || self.requests.iter().any(|(_, r)| r.behind == behind)
    }

    /// Called when no request of a lost session can be executed anymore.
    fn on_fenced(&mut self, index: usize) {
        let path = &mut self.paths[index];
        path.unfenced = false;
        path.settled_at = None;
        path.ghosts.clear();
    }

    /// Called when a path has logged in through its own portal, and its unit is unchanged: either
    /// the commands of the lost session have completed, or they are given time to complete.
    fn fence_by_own_portal(&mut self, index: usize, now: Instant) {
        let path = &self.paths[index];
        if path.is_proved(path.port.as_ref(), true) {
            self.on_fenced(index);
        } else if path.unfenced {
            let redirect = path.port.as_ref().and_then(PortTag::redirect);
            self.start_settling(index, redirect, now);
        }
    }

    /// Called when the commands of a lost session are given time to complete, unless this time has
    /// already started. `redirect` is the address to which the login was redirected, if any.
    fn start_settling(&mut self, index: usize, redirect: Option<SocketAddr>, now: Instant) {
        if self.paths[index].settled_at.is_some() {
            return;
        }
        let settle = self.config.timing.settle;
        self.paths[index].settled_at = Some(now + settle);
        self.arm(now + settle);
        if self.is_awaited(index) {
            let path = PathIndex(index as u8);
            self.outputs.push_back(Output::Settling {
                path,
                settle,
                redirect,
            });
        }
    }

    /// Takes over from a process with the same initiator ports that exited without logging out: on
    /// each of its paths, any command that modifies the unit may have been outstanding. Reads also
    /// wait for their completion. `was_redirected` is set if a login of the process was redirected:
    /// the other port does not know about our logins.
    pub fn recover(&mut self, was_redirected: bool, now: Instant) {
        let at = now + self.config.timing.settle;
        for path in &mut self.paths {
            path.unfenced = true;
            path.proof = match was_redirected {
                true => Proof::None,
                false => Proof::Own,
            };
            path.settled_at = Some(at);
            path.ghosts.push((None, Effect::Other));
        }
        self.arm(at);
    }

    /// Called when a path's session has logged in, with its target port.
    pub fn handle_live(&mut self, path: PathIndex, port: Option<PortTag>, now: Instant) {
        let index = usize::from(path.0);
        let Stage::Opening { through } = self.paths[index].stage else {
            return;
        };
        if through == index {
            self.paths[index].port = port;
            become_state(&mut self.paths[index].stage, Stage::Checking);
            self.outputs.push_back(Output::Check(path));
        } else {
            // If this is not the group of the lost session, it does not know that session.
            let path = &self.paths[index];
            if path.is_proved(port.as_ref(), false) {
                self.on_fenced(index);
            } else if path.is_in_group(port.as_ref()) {
                let redirect = port.as_ref().and_then(PortTag::redirect);
                self.start_settling(index, redirect, now);
            }
            self.close_path(index);
        }
        self.pump();
    }

    fn close_path(&mut self, index: usize) {
        self.on_session_closed(index);
        self.outputs
            .push_back(Output::Close(PathIndex(index as u8)));
    }

    /// Called when the check of the unit on a path has completed.
    pub fn handle_checked(
        &mut self,
        path: PathIndex,
        found: Result<UnitReport, Down>,
        now: Instant,
    ) {
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
                // Only `riserd` has this page, and it complies with SRP's guarantee.
                self.paths[index].is_trusted = found.unit.cache.is_some();
                self.unit.get_or_insert(found.unit);
                // A later check of a path in use does not fence it.
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
            // A busy unit is assumed to be unchanged.
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
                    self.close_paths(why);
                }
            }
        }
        self.report_changes();
        self.pump();
    }

    /// Called when a path is live: other paths that can be fenced through it need not wait for
    /// their own portals.
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
        self.report_changes();
    }

    /// Called when the unit does not allow access on a path anymore. It may allow access on another
    /// one now.
    pub(super) fn on_refused(&mut self, index: usize, now: Instant) {
        self.set_access(index, Access::None, now);
        for (other, path) in self.paths.iter_mut().enumerate() {
            if other != index && path.recheck.is_some() {
                path.recheck = Some(now);
            }
        }
        self.arm(now);
    }

    /// Called when a unit attention on a path indicates that the unit may be a different one.
    pub fn handle_attention(&mut self, path: PathIndex) {
        let index = usize::from(path.0);
        if matches!(self.paths[index].stage, Stage::Live | Stage::Checking) {
            self.paths[index].recheck = None;
            self.outputs.push_back(Output::Check(path));
        }
    }

    /// Called when a path no longer leads to the unit. All other requests on the path are returned,
    /// and the path is reopened and checked.
    pub(super) fn on_unit_missing(&mut self, index: usize) {
        if self.paths[index].stage == Stage::Live {
            self.paths[index].why = Some(Down::NoIdentity);
            self.close_path(index);
        }
    }

    /// Called when the session of a path has closed, or must be closed. If it was in use, its
    /// commands may still be executed by the target.
    pub(super) fn on_session_closed(&mut self, index: usize) {
        let path = &mut self.paths[index];
        let was_live = path.stage == Stage::Live;
        if path.stage != Stage::Closing {
            become_state(&mut path.stage, Stage::Closing);
        }
        if !was_live {
            return;
        }
        let last = Proof::At(path.port.clone());
        path.proof = match path.proof {
            _ if !path.unfenced || path.proof == last => last,
            // Commands lost with another session are still in flight.
            Proof::At(_) | Proof::Several => Proof::Several,
            Proof::Own | Proof::None => Proof::None,
        };
        path.unfenced = true;
        // The time restarts at the end of this session.
        path.settled_at = None;
        path.is_ending = true;
        path.losses += 1;
        path.recheck = None;
        self.report_changes();
    }

    /// Called when a session that was in use has closed. If no login can prove that its commands
    /// have completed, start the settle time. If several sessions were lost, the next login starts
    /// it.
    fn plan_settling(&mut self, index: usize, now: Instant) {
        let path = &self.paths[index];
        let is_provable = path.is_trusted || matches!(path.port, Some(PortTag::Group(..)));
        let needs_login = matches!(path.proof, Proof::At(_) | Proof::Several);
        if !is_provable || !needs_login {
            self.start_settling(index, None, now);
        }
    }

    /// Sets the wait before the next login, as requested by the target of a path's closed session.
    pub fn set_time2wait(&mut self, path: PathIndex, time2wait: Duration) {
        self.paths[usize::from(path.0)].time2wait = time2wait;
    }

    /// Called when the session of a path has closed and returned its requests.
    pub fn handle_closed(&mut self, path: PathIndex, why: Down, now: Instant) {
        let index = usize::from(path.0);
        self.on_session_closed(index);
        let path = &mut self.paths[index];
        if why != Down::Closed {
            path.why = Some(why);
            path.is_foreign = false;
        }
        // Otherwise, a target that needs a long cleanup before its login response would never be
        // reached.
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
        self.report_changes();
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

    /// Reports changes.
    fn report_changes(&mut self) {
        self.outputs.push_back(Output::Changed);
        let is_usable = self.paths.iter().any(Path::is_usable);
        let is_decided = self.paths.iter().all(|p| p.is_decided);
        let why = self.paths.iter().find_map(|p| p.why);
        let why = why.unwrap_or(Down::ConnectionLost);
        match self.is_live {
            _ if self.ending.is_some() => {}
            None if is_decided && is_usable => self.announce(true, SessionEvent::Live),
            None if is_decided => self.close_paths(why),
            Some(false) if is_usable => self.announce(true, SessionEvent::Live),
            Some(true) if !is_usable => self.announce(false, SessionEvent::Reconnecting(why)),
            _ => {}
        }
    }

    fn announce(&mut self, is_live: bool, event: SessionEvent) {
        self.is_live = Some(is_live);
        self.outputs.push_back(Output::Event(event));
    }

    pub(super) fn close_paths(&mut self, why: Down) {
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

    /// Closes the paths once all sessions have closed, and all requests passed to them have
    /// completed: a request that was passed to a closed session completes after the session's
    /// closing.
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
