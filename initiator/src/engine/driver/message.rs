//! Messages of other threads to the engine.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::discovery::Found;
use super::plan::Plan;
use super::units::Watch;
use crate::block::Service;
use crate::engine::io::{IoEnd, ScsiIo, SessionKey, Target, Workload};
use crate::engine::oneshot::Sender;
use crate::engine::park::Mailbox;
use crate::engine::status::SessionStatus;
use crate::paths::PathIndex;
use crate::session::Down;

/// A session to make.
pub(in crate::engine) struct Open {
    /// The target; of paths, the first one's.
    pub(in crate::engine) target: Target,
    pub(in crate::engine) plan: Plan,
    pub(in crate::engine) status: Arc<SessionStatus>,
    pub(in crate::engine) user: User,
}

/// The user of a session.
pub(in crate::engine) enum User {
    /// Receives the session when it is live, or the reason why it never will be.
    Caller(Reply),
    /// Another session, which it is a path of.
    Paths(SessionKey, PathIndex),
}

/// Closes its session when it is dropped, even on its way to the session's user.
pub(in crate::engine) struct SessionGuard {
    pub(in crate::engine) key: SessionKey,
    pub(super) mailbox: Arc<Mailbox<Message>>,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        // A closed mailbox has no sessions.
        let _ = self.mailbox.send(Message::Close(self.key, None));
    }
}

pub(super) type Reply = Sender<Result<SessionGuard, Down>>;

/// A message of another thread to the engine.
pub(in crate::engine) enum Message {
    Open(Box<Open>),
    Submit(SessionKey, Box<ScsiIo>, Sender<IoEnd>),
    Work(SessionKey, Box<dyn Workload>),
    Watch(SessionKey, Box<Watch>),
    Close(SessionKey, Option<Sender<bool>>),
    /// A client of a disk to serve on the engine's thread.
    Host(Box<dyn Service>),
    /// A timer of that length.
    Timer(Duration, Sender<()>),
    Discover {
        ip: IpAddr,
        /// Number of the first question.
        transaction: u64,
        reply: Sender<Found>,
    },
    Shutdown,
}
