//! Messages from other threads to the engine.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use riser_block::oneshot::Sender;
use riser_block::{Mailbox, Service};

use super::discovery::SearchResult;
use super::plan::Plan;
use super::watched::Watch;
use crate::engine::io::{IoCompletion, ScsiIo, SessionKey, Target, Workload};
use crate::engine::status::SessionStatus;
use crate::paths::PathIndex;
use crate::session::Down;

/// Parameters for opening a session.
pub(in crate::engine) struct Open {
    /// The target, or for paths, the target of the first path.
    pub(in crate::engine) target: Target,
    pub(in crate::engine) plan: Plan,
    pub(in crate::engine) status: Arc<SessionStatus>,
    pub(in crate::engine) user: User,
}

/// User of a session.
pub(in crate::engine) enum User {
    /// Receives the session when it is live, or the reason why it cannot become live.
    Caller(Reply),
    /// Another session with this path.
    Paths(SessionKey, PathIndex),
}

/// Closes its session when dropped, even before the user has received it.
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

/// A message from another thread to the engine.
pub(in crate::engine) enum Message {
    Open(Box<Open>),
    Submit(SessionKey, Box<ScsiIo>, Sender<IoCompletion>),
    Work(SessionKey, Box<dyn Workload>),
    Watch(SessionKey, Box<Watch>),
    Close(SessionKey, Option<Sender<bool>>),
    /// A disk's client to serve on the engine's thread.
    Host(Box<dyn Service>),
    /// A timer with this duration.
    Timer(Duration, Sender<()>),
    Discover {
        ip: IpAddr,
        /// Transaction number of the first query.
        transaction: u64,
        reply: Sender<SearchResult>,
    },
    Shutdown,
    /// Starts a round: the wake-up time of a workload has changed.
    Wake,
}
