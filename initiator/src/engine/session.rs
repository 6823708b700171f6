//! A session as its users see it: commands, workloads, its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use riser_scsi::lun::LunId;

use super::EngineError;
use super::client::Client;
use super::driver::{CHECK_LEN, Message, SessionGuard, Watch};
use super::io::{IoData, IoEnd, ScsiIo, Workload};
use super::oneshot::{Receiver, oneshot};
use super::status::SessionStatus;
use super::timer::Elapsed;
use crate::block::Buffer;
use crate::request::RequestError;
use crate::scsi::CachingPage;
use crate::unit::{Losses, Snapshot};
use crate::url::TargetUrl;

pub(super) struct SessionHandle {
    pub(super) guard: SessionGuard,
    pub(super) client: Client,
    pub(super) status: Arc<SessionStatus>,
    pub(super) url: TargetUrl,
}

/// A session with a target. Clones share it; the last one to go logs out.
#[derive(Clone)]
pub struct Session {
    pub(super) handle: Arc<SessionHandle>,
    pub(super) timeout: Duration,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("url", &self.handle.url.to_string())
            .field("link", &self.handle.status.link())
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Engine that the session belongs to.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.handle.client
    }

    /// The address that the session was made with.
    #[must_use]
    pub fn url(&self) -> &TargetUrl {
        &self.handle.url
    }

    /// The same session with another limit for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Longest duration of a call.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits for a data buffer of `len` bytes, within the session's limit.
    ///
    /// # Errors
    /// [`Elapsed`].
    pub async fn buffer(&self, len: usize) -> Result<Buffer, Elapsed> {
        let pool = self.client().buffers();
        match pool.try_take(len) {
            Some(buffer) => Ok(buffer),
            None => self.client().timeout(self.timeout, pool.take(len)).await,
        }
    }

    /// State of the session, and its history.
    #[must_use]
    pub fn status(&self) -> &SessionStatus {
        &self.handle.status
    }

    /// As [`Self::status`], for a watcher that goes on when the session is gone.
    #[must_use]
    pub fn watch(&self) -> Arc<SessionStatus> {
        self.handle.status.clone()
    }

    /// Sends a command. The engine holds its buffers until it has ended, whether or not the future
    /// is still there.
    pub fn submit(&self, io: ScsiIo) -> IoFuture {
        let (sender, receiver) = oneshot();
        let message = Message::Submit(self.handle.guard.key, Box::new(io), sender);
        // A closed mailbox drops the message, and with it the sender.
        drop(self.handle.client.0.mailbox.send(message));
        IoFuture(receiver)
    }

    /// The GUID of its initiator port, which a process that takes its place needs
    /// ([`ClientBuilder::guid`](super::ClientBuilder::guid)); of no meaning but for SRP.
    #[must_use]
    pub fn port_guid(&self) -> u64 {
        self.handle.client.0.port_guid()
    }

    /// Has a unit watched while `owner` lives, which was `unit` when it was found; see
    /// [`crate::unit`].
    pub(crate) async fn watch_unit(
        &self,
        lun: LunId,
        unit: Snapshot,
        caching: CachingPage,
        owner: Weak<Losses>,
    ) -> Result<(), Elapsed> {
        let config = &self.handle.client.0.config;
        // Before the disk is used. While the engine has not compared them, the one that was noted
        // counts. A session reports the cache of its first unit only.
        let status = &self.handle.status;
        let found = unit.cache.filter(|_| caching.write_cache);
        if status.report().cache.is_none() {
            status.set_cache(config.noted.filter(|_| config.recovers).or(found));
        }
        let watch = Watch {
            lun,
            unit,
            write_cache: caching.write_cache,
            has_fua: caching.has_fua,
            recovers: config.recovers,
            noted: config.noted,
            owner,
            buffer: self.buffer(CHECK_LEN).await?,
        };
        let message = Message::Watch(self.handle.guard.key, Box::new(watch));
        // A closed mailbox has no sessions.
        drop(self.handle.client.0.mailbox.send(message));
        Ok(())
    }

    /// Runs a workload on the engine's thread.
    ///
    /// # Errors
    /// [`EngineError::Gone`].
    pub fn run(&self, workload: Box<dyn Workload>) -> Result<(), EngineError> {
        self.handle
            .client
            .0
            .mailbox
            .send(Message::Work(self.handle.guard.key, workload))
            .map_err(|_| EngineError::Gone)
    }

    /// Logs out and waits until everything is released. Outstanding commands end with
    /// [`RequestError::Closed`]; later ones too.
    pub async fn close(&self) {
        self.close_settled().await;
    }

    /// As [`Self::close`]. Returns whether it is known that no command which changes a unit was
    /// outstanding, because the target may execute such a command later.
    pub async fn close_settled(&self) -> bool {
        let (sender, receiver) = oneshot();
        let message = Message::Close(self.handle.guard.key, Some(sender));
        let sent = self.handle.client.0.mailbox.send(message);
        sent.is_ok() && receiver.await.unwrap_or(false)
    }
}

/// The end of a command, to come. Dropping it abandons the wait; the command goes on.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct IoFuture(Receiver<IoEnd>);

impl Future for IoFuture {
    type Output = IoEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoEnd> {
        Pin::new(&mut self.0).poll(cx).map(|end| {
            end.unwrap_or(IoEnd {
                result: Err(RequestError::Closed),
                data: IoData::None,
            })
        })
    }
}
