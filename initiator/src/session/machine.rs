//! Interface of all protocols' machines for a session's owner.

use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use super::{Down, SubmitError};
use crate::request::{RequestId, RequestSpec};

/// State machine of a session: for SRP, iSCSI, or several paths to a unit. It does not perform any
/// I/O; its outputs are specific to the protocol.
///
/// Methods with a default implementation are for watched units and single targets. Paths implement
/// these themselves.
pub trait Machine {
    /// Submits a request.
    ///
    /// # Errors
    /// [`SubmitError`] if the request was not accepted.
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError>;

    /// Closes the session: logs out, disconnects, and completes all requests with
    /// [`RequestError::Closed`](crate::request::RequestError::Closed).
    fn close(&mut self, now: Instant);

    /// Returns the latest time for [`Self::handle_timeout`].
    fn next_deadline(&self) -> Option<Instant>;

    /// Handles expired timeouts.
    fn handle_timeout(&mut self, now: Instant);

    /// Sets whether a unit is watched: after each login, and after unit attentions that may
    /// indicate a different unit, only [`Retry::Probe`](crate::request::Retry::Probe) is started
    /// until [`Self::release`].
    fn set_guarded(&mut self, _is_guarded: bool) {}

    /// Called when the unit might be a different one: only probes are started until
    /// [`Self::release`].
    fn hold_requests(&mut self) {}

    /// Called when the unit is known to be unchanged. `ends_old` is set if its target terminates
    /// the commands of an old connection before it responds to the login that replaces it. iSCSI
    /// requires this of all targets (RFC 7143 clause 6.3.5). Commands of other targets are given
    /// time to complete.
    fn release(&mut self, _ends_old: bool, _now: Instant) {}

    /// Returns whether no command of the session that modifies the unit is outstanding at the
    /// target or may be executed there later.
    fn is_settled(&self) -> bool;

    /// Called when commands of an earlier process with the same initiator port may still be in
    /// flight: waiting requests are not started until these commands have had time to complete. A
    /// login may terminate them (RFC 7143 clause 6.3.5), but only in the portal group that received
    /// them, which is unknown. `was_redirected` is set if the earlier process's login was redirected
    /// to another port.
    fn recover(&mut self, _was_redirected: bool, _now: Instant) {}

    /// Called when the watched unit is unusable here: logs out and disconnects, then either closes
    /// the session or retries the login.
    fn abandon_connection(&mut self, _why: Down, _last: bool, _now: Instant) {}

    /// Returns the time of the target's last message, on the current or the last connection.
    fn last_received(&self) -> Option<Instant> {
        None
    }

    /// Called when another path has reset the unit or all units with task management. The next
    /// command may report this with a unit attention.
    fn expect_reset_report(&mut self, _lun: Option<WireLun>) {}

    /// Returns whether the unit may still report our own reset.
    #[cfg(test)]
    fn expects_reset_report(&self) -> bool {
        false
    }

    /// Returns the delay requested by the target between the end of its connection and the next
    /// login.
    fn time2wait(&self) -> Duration {
        Duration::ZERO
    }
}
