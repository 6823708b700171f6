//! The session as its owner drives it.

use std::time::Instant;

use super::Session;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Down, Machine, SessionState, SubmitError};

impl Machine for Session {
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        if self.life.is_ending() {
            return Err(SubmitError::Closed);
        }
        let id = self.requests.insert(spec).ok_or(SubmitError::Full)?;
        self.arm(spec.deadline);
        self.pump(now);
        Ok(id)
    }

    fn close(&mut self, now: Instant) {
        self.tear_down(Down::Closed, true);
        self.on_member_down(now);
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
                self.connect(0, now);
            } else {
                self.arm(until);
            }
        }
        if self.settle_at.is_some() {
            self.release_settled(now);
        }
        self.expire_links(now);
        self.expire_ping(now);
        self.expire_tsk_mgmt(now);
        self.expire_requests(now);
        self.pump(now);
    }

    fn set_guarded(&mut self, is_guarded: bool) {
        self.is_guarded = is_guarded;
    }

    fn hold(&mut self) {
        self.is_checked = false;
        self.requests.hold();
    }

    fn release(&mut self, ends_old: bool, now: Instant) {
        if ends_old {
            self.settle_at = None;
        }
        self.is_checked = true;
        self.life.on_usable();
        self.release_settled(now);
    }

    fn recover(&mut self, now: Instant) {
        self.settle_at = Some(now + self.config.timing.settle);
        self.is_checked = true;
        self.requests.hold();
        self.release_settled(now);
    }

    fn leave(&mut self, why: Down, last: bool, now: Instant) {
        if self.state() == SessionState::Live {
            self.tear_down(why, last);
            self.on_member_down(now);
        }
    }

    fn last_heard(&self) -> Option<Instant> {
        Some(self.last_heard)
    }
}
