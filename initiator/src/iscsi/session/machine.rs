//! The session's interface for its owner.

use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use super::IscsiSession;
use super::types::ConnState;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Down, Machine, SubmitError, TaskManager};

impl Machine for IscsiSession {
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        if self.is_discovery() {
            return Err(SubmitError::Closed);
        }
        let id = self.core.submit(spec)?;
        self.pump(now);
        Ok(id)
    }

    fn close(&mut self, now: Instant) {
        match self.conn {
            ConnState::LoggedIn => self.log_out(Down::Closed, true, now),
            ConnState::InLogout(_) => {
                self.core.life.tear_down(Down::Closed, true);
            }
            _ => self.tear_down(Down::Closed, true),
        }
        self.on_down(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.core.next_deadline()
    }

    fn handle_timeout(&mut self, now: Instant) {
        if !self.core.take_due(now) {
            return;
        }
        if self.core.is_login_due(now) {
            self.connect(now);
        }
        if self.core.settle_at.is_some() {
            self.release_settled(now);
        }
        self.expire_connection(now);
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

    fn release(&mut self, _ends_old: bool, now: Instant) {
        self.core.on_checked();
        self.release_settled(now);
    }

    /// Waits in any case: after the call, no login proves anything about the earlier process.
    fn recover(&mut self, _was_redirected: bool, now: Instant) {
        self.core.recover(now);
    }

    fn is_settled(&self) -> bool {
        self.fence.is_clear() && self.core.is_settled()
    }

    fn abandon_connection(&mut self, why: Down, last: bool, now: Instant) {
        if self.conn == ConnState::LoggedIn {
            self.log_out(why, last, now);
        }
    }

    fn last_received(&self) -> Option<Instant> {
        Some(self.core.last_received)
    }

    fn expect_reset_report(&mut self, lun: Option<WireLun>) {
        self.core.expect_reset_report(lun);
    }

    #[cfg(test)]
    fn expects_reset_report(&self) -> bool {
        self.core.expected_report.is_some()
    }

    fn time2wait(&self) -> Duration {
        self.core.life.time2wait()
    }
}
