//! The session's interface for its owner.

use std::time::Instant;

use riser_scsi::lun::WireLun;

use super::SrpSession;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Down, Machine, SessionState, SubmitError, TaskManager};

impl Machine for SrpSession {
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        let id = self.core.submit(spec)?;
        self.pump(now);
        Ok(id)
    }

    fn close(&mut self, now: Instant) {
        self.tear_down(Down::Closed, true);
        self.on_member_down(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.core.next_deadline()
    }

    fn handle_timeout(&mut self, now: Instant) {
        if !self.core.take_due(now) {
            return;
        }
        if self.core.is_login_due(now) {
            self.connect(0, now);
        }
        if self.core.settle_at.is_some() {
            self.release_settled(now);
        }
        self.expire_connections(now);
        self.expire_ping(now);
        self.expire_functions(now);
        self.expire_requests(now);
        self.pump(now);
    }

    fn set_guarded(&mut self, is_guarded: bool) {
        self.core.is_guarded = is_guarded;
    }

    fn hold_requests(&mut self) {
        self.core.hold_requests();
    }

    fn release(&mut self, ends_old: bool, now: Instant) {
        if ends_old && !self.has_moved {
            self.core.settle_at = None;
        }
        self.core.on_checked();
        self.release_settled(now);
    }

    fn recover(&mut self, was_redirected: bool, now: Instant) {
        // No port knows the channels of another port.
        self.has_moved = was_redirected || self.redirect.is_some();
        self.core.recover(now);
    }

    fn is_settled(&self) -> bool {
        self.core.is_settled()
    }

    fn abandon_connection(&mut self, why: Down, last: bool, now: Instant) {
        if self.state() == SessionState::Live {
            self.tear_down(why, last);
            self.on_member_down(now);
        }
    }

    fn last_received(&self) -> Option<Instant> {
        Some(self.core.last_received)
    }

    fn expect_reset_report(&mut self, lun: Option<WireLun>) {
        self.core.expect_reset_report(lun);
    }
}
