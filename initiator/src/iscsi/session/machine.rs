//! The session as its owner drives it.

use std::time::Instant;

use super::Session;
use super::types::ConnState;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Down, Machine, SubmitError};

impl Machine for Session {
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        if self.life.is_ending() || self.is_discovery() {
            return Err(SubmitError::Closed);
        }
        let id = self.requests.insert(spec).ok_or(SubmitError::Full)?;
        self.arm(spec.deadline);
        self.pump(now);
        Ok(id)
    }

    fn close(&mut self, now: Instant) {
        match self.conn {
            ConnState::LoggedIn => self.log_out(Down::Closed, true, now),
            ConnState::InLogout(_) => {
                self.life.tear_down(Down::Closed, true);
            }
            _ => self.tear_down(Down::Closed, true),
        }
        self.on_down(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.timer.is_none_or(|t| t > now) {
            return;
        }
        self.timer = None;
        if let Some(until) = self.life.next_login() {
            if until <= now {
                self.life.log_in_again();
                self.connect(now);
            } else {
                self.arm(until);
            }
        }
        self.expire_link(now);
        self.expire_ping(now);
        self.expire_tmf(now);
        self.expire_requests(now);
        self.pump(now);
    }

    fn set_guarded(&mut self, is_guarded: bool) {
        self.is_guarded = is_guarded;
    }

    fn hold(&mut self) {
        self.requests.hold();
    }

    fn release(&mut self, _ends_old: bool, now: Instant) {
        self.life.on_usable();
        self.requests.release();
        self.pump(now);
    }

    fn leave(&mut self, why: Down, last: bool, now: Instant) {
        if self.conn == ConnState::LoggedIn {
            self.log_out(why, last, now);
        }
    }

    fn last_heard(&self) -> Option<Instant> {
        Some(self.last_heard)
    }
}
