//! Paths: opened, checked, lost, fenced, closed.

use std::time::Instant;

use super::types::{Path, Place, Stage};
use super::{Access, Found, Output, PathIndex, Paths, PortTag};
use crate::request::RequestError;
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
        path.stage = Stage::Opening { through };
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
        let port = path.port.filter(|_| is_awaited)?;
        let is_fit = |i: &usize| {
            let other = &self.paths[*i];
            *i != index && other.stage == Stage::Live && other.port == Some(port)
        };
        (0..self.paths.len()).find(is_fit)
    }

    /// Nothing of a lost session can be carried out any more.
    fn on_fenced(&mut self, index: usize) {
        let path = &mut self.paths[index];
        path.unfenced = false;
        path.ghosts.clear();
    }

    /// A path's session is logged in, with that target port.
    pub fn handle_live(&mut self, path: PathIndex, port: Option<PortTag>) {
        let index = usize::from(path.0);
        let Stage::Opening { through } = self.paths[index].stage else {
            return;
        };
        if through == index {
            self.paths[index].port = port;
            self.paths[index].stage = Stage::Checking;
            self.outputs.push_back(Output::Check(path));
        } else {
            // Another group than the lost session's has not heard of that session.
            if port.is_some() && port == self.paths[index].port {
                self.on_fenced(index);
            }
            self.close_path(index);
        }
        self.pump();
    }

    fn close_path(&mut self, index: usize) {
        self.lose(index);
        self.paths[index].stage = Stage::Closing;
        self.outputs
            .push_back(Output::Close(PathIndex(index as u8)));
    }

    /// The unit has said on a path who it is, or not.
    pub fn handle_checked(&mut self, path: PathIndex, found: Result<Found, Down>, now: Instant) {
        let index = usize::from(path.0);
        let is_live = match self.paths[index].stage {
            Stage::Checking => false,
            Stage::Live => true,
            _ => return,
        };
        let found = found.and_then(|found| match &self.unit {
            _ if found.identity == Identity::default() => Err(Down::NoIdentity),
            Some(unit) if *unit != found.identity => Err(Down::OtherUnit),
            _ => Ok(found),
        });
        match found {
            Ok(found) => {
                self.unit.get_or_insert(found.identity);
                // The unit is where it was, and so is who took the place of the old session.
                self.on_fenced(index);
                let path = &mut self.paths[index];
                path.stage = Stage::Live;
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
                    self.hasten_fences(index);
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

    /// A path has become live: those that could be fenced by it need not wait for their own portals.
    fn hasten_fences(&mut self, live: usize) {
        for index in 0..self.paths.len() {
            if index == live || self.fence(index).is_none() {
                continue;
            }
            match self.paths[index].stage {
                Stage::Idle { .. } => {
                    self.paths[index].own_next = false;
                    self.open(index);
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

    /// The unit does not want to be used on a path any more; perhaps on one that it did not want before.
    pub(super) fn on_refused(&mut self, index: usize, now: Instant) {
        self.set_access(index, Access::None, now);
        for (other, path) in self.paths.iter_mut().enumerate() {
            if other != index && path.recheck.is_some() {
                path.recheck = Some(now);
            }
        }
        self.arm(now);
    }

    /// A path that was in use is of no more use.
    pub(super) fn lose(&mut self, index: usize) {
        let path = &mut self.paths[index];
        if path.stage != Stage::Live {
            return;
        }
        path.stage = Stage::Closing;
        path.unfenced = true;
        path.losses += 1;
        path.recheck = None;
        self.tell();
    }

    /// A path's session is over, and so are its requests.
    pub fn handle_closed(&mut self, path: PathIndex, why: Down, now: Instant) {
        let index = usize::from(path.0);
        self.lose(index);
        let path = &mut self.paths[index];
        if why != Down::Closed {
            path.why = Some(why);
            path.is_foreign = false;
        }
        if why == Down::Connect(ConnectError::TimedOut) {
            path.patience = (path.patience * 2).min(self.config.timing.login_max);
        }
        if self.ending.is_some() {
            path.stage = Stage::Over;
            self.finish();
            return;
        }
        path.is_decided = true;
        if !path.own_next && self.fence(index).is_some() {
            self.open(index);
        } else {
            let path = &mut self.paths[index];
            let until = now + path.backoff;
            path.backoff = (path.backoff * 2).min(self.config.timing.backoff_max);
            path.stage = Stage::Idle { until };
            self.arm(until);
        }
        self.tell();
        self.pump();
    }

    pub(super) fn expire_path(&mut self, index: usize, now: Instant) {
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

    /// Tells what has changed.
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

    /// Ends everything: closes the sessions, then completes every request with
    /// [`RequestError::Closed`].
    pub fn close(&mut self) {
        self.end(Down::Closed);
    }

    fn end(&mut self, why: Down) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(why);
        for index in 0..self.paths.len() {
            match self.paths[index].stage {
                Stage::Idle { .. } => self.paths[index].stage = Stage::Over,
                Stage::Opening { .. } | Stage::Checking | Stage::Live => self.close_path(index),
                Stage::Closing | Stage::Over => {}
            }
        }
        self.finish();
    }

    fn finish(&mut self) {
        let why = match self.ending {
            Some(why) if self.paths.iter().all(|p| p.stage == Stage::Over) => why,
            _ => return,
        };
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        debug_assert!(self.requests.iter().all(|(_, r)| r.place == Place::Waiting));
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
