//! User handle of a session: commands, workloads and shutdown.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use riser_block::oneshot::{Receiver, oneshot};
use riser_block::{Buffer, BufferPool};
use riser_scsi::lun::LunId;

use super::EngineError;
use super::client::Client;
use super::driver::{CHECK_LEN, Message, SessionGuard, Watch};
use super::io::{IoCompletion, IoData, ScsiIo, Workload};
use super::status::SessionStatus;
use super::timer::Elapsed;
use super::wakeup::Wakeup;
use crate::protection::ProtectionMode;
use crate::request::RequestError;
use crate::scsi::CachingPage;
use crate::unit::{Losses, Snapshot};
use crate::url::TargetUrl;

/// Minimum and maximum length of the pool for data with protection information, in bytes.
const PROTECTION_POOL: Range<usize> = 64 << 10..16 << 20;

/// Divisor for the length of this pool if the client's buffers are in use.
const SMALLEST_SHARE: usize = 8;

/// Returns the length of the pool for data with protection information, for this length of the
/// client's buffers.
fn protection_pool_len(buffers: usize) -> usize {
    (buffers / 4).clamp(PROTECTION_POOL.start, PROTECTION_POOL.end)
}

/// Returns whether at least half of the client's buffers would remain.
fn fits_protection(buffers: usize) -> bool {
    protection_pool_len(buffers) <= buffers / 2
}

pub(super) struct SessionHandle {
    pub(super) guard: SessionGuard,
    pub(super) client: Client,
    pub(super) status: Arc<SessionStatus>,
    pub(super) url: TargetUrl,
}

/// A session with a target. Clones share it; dropping the last one logs out.
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
    /// Returns the engine of the session.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.handle.client
    }

    /// Returns the address of the session.
    #[must_use]
    pub fn url(&self) -> &TargetUrl {
        &self.handle.url
    }

    /// Returns the session with a different timeout for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the timeout for each call.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits for a data buffer of `len` bytes, up to the session's timeout.
    ///
    /// # Errors
    /// [`Elapsed`].
    pub async fn buffer(&self, len: usize) -> Result<Buffer, Elapsed> {
        let pool = self.client().buffers();
        match pool.try_take(len) {
            Some(buffer) => Ok(buffer),
            None => {
                self.client()
                    .timeout(self.timeout, pool.take_buffer(len))
                    .await
            }
        }
    }

    /// Returns whether protection information of units is transferred.
    pub(crate) fn protection_mode(&self) -> ProtectionMode {
        self.handle.client.0.config.protection
    }

    /// Returns the client's pool for data with protection information. The first call, for the unit
    /// `lun`, takes its memory from the client's buffers. If these are in use, the pool is smaller
    /// than usual. Waits for the minimum, up to the session's timeout.
    pub(crate) async fn protection_pool(&self, lun: LunId) -> Result<BufferPool, Elapsed> {
        let shared = &self.handle.client.0;
        if let Some(pool) = shared.protection_pool.get() {
            return Ok(pool.clone());
        }
        let wanted = protection_pool_len(shared.pool.size());
        let min = (wanted / SMALLEST_SHARE).max(PROTECTION_POOL.start);
        let mut len = wanted;
        let part = loop {
            match shared.pool.try_take(len) {
                Some(part) => break part,
                None if len > min => len = (len / 2).max(min),
                None => match self.buffer(min).await {
                    Ok(part) => break part,
                    // A concurrent call may have reserved the last free buffers.
                    Err(elapsed) => return shared.protection_pool.get().cloned().ok_or(elapsed),
                },
            }
        };
        let pool = shared.protection_pool.get_or_init(|| {
            let reserved = part.len();
            if reserved < wanted {
                tracing::warn!(
                    target = %self.url(),
                    lun = lun.number(),
                    "reserved {reserved} instead of {wanted} bytes for protection information, because data buffers are in use"
                );
            }
            shared.pool.split(part)
        });
        Ok(pool.clone())
    }

    /// Returns whether the client's buffers are large enough for [`Self::protection_pool`].
    pub(crate) fn has_protection_memory(&self) -> bool {
        fits_protection(self.client().buffers().size())
    }

    /// Returns a random number.
    pub(crate) fn random(&self) -> u64 {
        self.handle.client.0.random()
    }

    /// Returns the state and history of the session.
    #[must_use]
    pub fn status(&self) -> &SessionStatus {
        &self.handle.status
    }

    /// Same as [`Self::status`], but remains valid after the session was dropped.
    #[must_use]
    pub fn watch(&self) -> Arc<SessionStatus> {
        self.handle.status.clone()
    }

    /// Submits a command. The engine owns its buffers until it completes, even if the future is
    /// dropped.
    pub fn submit(&self, io: ScsiIo) -> IoFuture {
        let (sender, receiver) = oneshot();
        let message = Message::Submit(self.handle.guard.key, Box::new(io), sender);
        // A closed mailbox drops the message and its sender.
        drop(self.handle.client.0.mailbox.send(message));
        IoFuture(receiver)
    }

    /// Returns the GUID of its initiator port, for a process that replaces this one
    /// ([`ClientBuilder::guid`](super::ClientBuilder::guid)). Only meaningful for SRP.
    #[must_use]
    pub fn port_guid(&self) -> u64 {
        self.handle.client.0.port_guid()
    }

    /// Watches a unit for changes while `owner` exists. `unit` is its state when it was discovered;
    /// see [`crate::unit`].
    pub(crate) async fn watch_unit(
        &self,
        lun: LunId,
        unit: Snapshot,
        caching: CachingPage,
        owner: Weak<Losses>,
    ) -> Result<(), Elapsed> {
        let config = &self.handle.client.0.config;
        // Set this before the disk is used. The recorded generation applies until the engine has
        // compared the two. A session only reports the cache of its first unit.
        let status = &self.handle.status;
        let found = unit.cache.filter(|_| caching.write_cache);
        if status.report().cache.is_none() {
            status.set_cache(config.noted.filter(|_| config.recovers).or(found));
        }
        // The next process must wait as well if this one is killed before its wait is over.
        let was_redirected = config.recovers && config.was_redirected;
        if was_redirected {
            status.set_redirected();
        }
        let watch = Watch {
            lun,
            unit,
            write_cache: caching.write_cache,
            has_fua: caching.has_fua,
            recovers: config.recovers,
            noted: config.noted,
            was_redirected,
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

    /// Returns a waker for a workload of this engine.
    pub(crate) fn wakeup(&self) -> Arc<Wakeup> {
        Arc::new(Wakeup::new(self.handle.client.0.mailbox.clone()))
    }

    /// Logs out and waits until all resources are released. Outstanding and later commands fail
    /// with [`RequestError::Closed`].
    pub async fn close(&self) {
        self.close_settled().await;
    }

    /// Same as [`Self::close`]. Returns true if no command that modifies a unit can be outstanding.
    /// Otherwise, the target may execute such a command later.
    pub async fn close_settled(&self) -> bool {
        let (sender, receiver) = oneshot();
        let message = Message::Close(self.handle.guard.key, Some(sender));
        let sent = self.handle.client.0.mailbox.send(message);
        sent.is_ok() && receiver.await.unwrap_or(false)
    }
}

/// Future for the completion of a command. Dropping it abandons the wait, but not the command.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct IoFuture(Receiver<IoCompletion>);

impl Future for IoFuture {
    type Output = IoCompletion;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoCompletion> {
        Pin::new(&mut self.0).poll(cx).map(|end| {
            end.unwrap_or(IoCompletion {
                result: Err(RequestError::Closed),
                data: IoData::None,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protection_uses_at_most_half() {
        for (buffers, len, fits) in [
            (64 << 10, 64 << 10, false),
            (124 << 10, 64 << 10, false),
            (128 << 10, 64 << 10, true),
            (8 << 20, 2 << 20, true),
            (1 << 30, 16 << 20, true),
        ] {
            assert_eq!(protection_pool_len(buffers), len);
            assert_eq!(fits_protection(buffers), fits, "{buffers}");
        }
    }
}
