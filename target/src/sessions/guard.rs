//! Membership of a connection in its session, for any fabric. It starts with a login and ends
//! exactly once.
//!
//! The session tables return a guard for each connection that they have added. The connection keeps
//! it, and passes it to [`SessionGuard::leave_session`] when its commands have completed. The last
//! guard of a session also releases its entries at the units and its permit.
//!
//! If a guard is dropped instead, the connection does not leave. This happens if a worker fails,
//! and the kernel may still be executing its writes. A new login of the same initiator will then
//! wait for the old connection until the daemon exits, because it must not be served before these
//! writes have completed.

use std::fmt;
use std::time::Instant;

use crate::fabric::ConnRef;

/// The way in which a connection leaves its session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Departure {
    /// Set if the connection was logged out. Not used by SRP, which cannot log out a single
    /// channel.
    pub logged_out: bool,
    /// Set to the current time if the initiator may log in again and continue to use its disks,
    /// because it did not log out itself.
    pub again: Option<Instant>,
}

/// The result of closing a connection.
#[derive(Debug, Default)]
pub struct Left {
    /// Channels that can stop waiting.
    pub notify: Vec<ConnRef>,
    /// Channels to terminate, because their session is closed or can never be established.
    pub terminate: Vec<ConnRef>,
}

/// A session in the table of its protocol.
pub(super) trait Session: Send {
    /// Called when a connection is closed and all of its resources are released.
    fn remove_channel(&self, channel: ConnRef, departure: Departure) -> Left;
}

/// Membership of a connection in its session, until it [leaves](Self::leave_session).
#[must_use = "the connection keeps its place in the session until it leaves"]
pub struct SessionGuard {
    session: Box<dyn Session>,
    channel: ConnRef,
}

impl SessionGuard {
    /// Creates a guard for a channel that was just added to a table.
    pub(super) fn new(session: impl Session + 'static, channel: ConnRef) -> Self {
        Self {
            session: Box::new(session),
            channel,
        }
    }

    /// Leaves the session. The caller must notify and terminate the returned channels, which may
    /// belong to other workers.
    #[must_use = "others wait for the end of this connection"]
    pub fn leave_session(self, departure: Departure) -> Left {
        self.session.remove_channel(self.channel, departure)
    }
}

impl fmt::Debug for SessionGuard {
    /// Omits the session, which contains a reference to the whole table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("SessionGuard");
        all.field("channel", &self.channel).finish_non_exhaustive()
    }
}
