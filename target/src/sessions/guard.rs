//! A connection's part in its session, of any fabric: entered with a login, left once.
//!
//! The tables of sessions return a guard for each connection that they have entered, which the
//! connection holds from then on and gives to [`SessionGuard::leave`] when its commands have ended.
//! With the last guard of a session go its entries at the units and its place in the budget.
//!
//! A guard that is only dropped leaves nothing: that is the end of a worker that failed, whose
//! writes the kernel may still carry out. A new login of the same initiator then goes on waiting
//! for the old connection, until the daemon has ended; it must not be served before those writes.

use std::fmt;
use std::time::Instant;

use crate::fabric::ConnRef;

/// Circumstances in which a connection leaves its session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Departure {
    /// The connection was logged out. SRP has no logout of one channel, and does not ask.
    pub logged_out: bool,
    /// Time at which the initiator may log in again and go on with its disks: it has not logged out
    /// by itself.
    pub again: Option<Instant>,
}

/// Consequences of the end of a connection.
#[derive(Debug, Default)]
pub struct Left {
    /// Channels that wait for no others any longer.
    pub notify: Vec<ConnRef>,
    /// Channels to terminate: their session ends with this one, or can never be established.
    pub terminate: Vec<ConnRef>,
}

/// A session in the table of its protocol.
pub(super) trait Session: Send {
    /// A connection is gone, and nothing of it is left.
    fn leave(&self, channel: ConnRef, departure: Departure) -> Left;
}

/// A connection's part in its session, which it keeps until it [leaves](Self::leave).
#[must_use = "the connection keeps its place in the session until it leaves"]
pub struct SessionGuard {
    session: Box<dyn Session>,
    channel: ConnRef,
}

impl SessionGuard {
    /// Guards the part of a channel that a table has just entered.
    pub(super) fn new(session: impl Session + 'static, channel: ConnRef) -> Self {
        Self {
            session: Box::new(session),
            channel,
        }
    }

    /// Leaves the session. The caller notifies and terminates the channels that this concerns, on
    /// any worker.
    #[must_use = "others wait for the end of this connection"]
    pub fn leave(self, departure: Departure) -> Left {
        self.session.leave(self.channel, departure)
    }
}

impl fmt::Debug for SessionGuard {
    /// Without the session, which refers to the table of all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("SessionGuard");
        all.field("channel", &self.channel).finish_non_exhaustive()
    }
}
