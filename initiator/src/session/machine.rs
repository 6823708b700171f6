//! The calls of a session's owner that every protocol's machine takes.

use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use super::{Down, SubmitError};
use crate::request::{RequestId, RequestSpec};

/// A session's machine: SRP's, iSCSI's, or that of several paths to one unit. It does no I/O; its
/// outputs are its own protocol's.
///
/// The calls with a default are about watched units and single targets. Paths see to those by
/// themselves.
pub trait Machine {
    /// Takes a request.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was taken.
    fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError>;

    /// Ends the session: logs out, disconnects, and completes every request with
    /// [`RequestError::Closed`](crate::request::RequestError::Closed).
    fn close(&mut self, now: Instant);

    /// The time for [`Self::handle_timeout`], at the latest.
    fn next_deadline(&self) -> Option<Instant>;

    /// Does what is due.
    fn handle_timeout(&mut self, now: Instant);

    /// Sets whether a unit is watched: after each login, and after a unit attention that can mean
    /// another unit, nothing is started but [`Retry::Probe`](crate::request::Retry::Probe) until
    /// [`Self::release`].
    fn set_guarded(&mut self, _is_guarded: bool) {}

    /// The unit may be another one: nothing but probes is started before [`Self::release`].
    fn hold(&mut self) {}

    /// The unit is the one that it was. `ends_old` says that its target ends the commands of an old
    /// connection before it answers the login that takes its place, which iSCSI demands of every
    /// target (RFC 7143 clause 6.3.5). Those of another target are given time to end.
    fn release(&mut self, _ends_old: bool, _now: Instant) {}

    /// Returns whether no command of the session that changes the unit is outstanding at the target,
    /// nor may be executed there later.
    fn is_settled(&self) -> bool;

    /// Commands of an earlier process with the same initiator port may still be on their way at the
    /// target: nothing that waits is started before they have had time to end. A login may end
    /// them (RFC 7143 clause 6.3.5), but only at the portal group that they were sent to, which is not known.
    fn recover(&mut self, _now: Instant) {}

    /// The watched unit is of no use here: logs out and disconnects. Then it is the end, or another
    /// login is tried.
    fn leave(&mut self, _why: Down, _last: bool, _now: Instant) {}

    /// The time at which something of the target last arrived, on the connection that there is, or
    /// was last.
    fn last_heard(&self) -> Option<Instant> {
        None
    }

    /// Another path has reset the unit, or every unit, with task management. The next command may
    /// report that with a unit attention.
    fn expect_reset_report(&mut self, _lun: Option<WireLun>) {}

    /// Returns whether the unit may still report a reset of ours.
    #[cfg(test)]
    fn expects_reset_report(&self) -> bool {
        false
    }

    /// The wait that the target demands between the end of its connection and the next login.
    fn time2wait(&self) -> Duration {
        Duration::ZERO
    }
}
