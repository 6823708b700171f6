//! Block operations and threads that hang: their disk, or its file system, does not respond.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::{Server, ServerError};
use crate::backend::{Cause, Failing, Store, oldest_thread};
use crate::worker::mail::{Mail, OldestRequest};

/// Age from which a block operation or a thread may delay a shutdown for too long.
const HANGING: Duration = Duration::from_secs(3);

/// Age from which a block operation is reported. This is before the initiator's command timeout,
/// which is 30 s on Linux, but long enough to avoid a report for each flush of a full cache, which
/// can take seconds on a slow disk.
const REPORTED: Duration = Duration::from_secs(20);

/// Timeout for a reply from a worker.
pub(super) const REPLY: Duration = Duration::from_secs(5);

/// Polling interval for callers that wait.
pub(super) const POLL: Duration = Duration::from_millis(1);

type Requests = Vec<OldestRequest>;

/// Detects hanging block operations. This never waits for a worker: replies are collected on the
/// next call.
#[derive(Debug, Default)]
pub(super) struct HangWatch {
    /// Pending replies.
    replies: Vec<Receiver<Requests>>,
    /// Received replies.
    received: Requests,
    /// Start times of the hanging operations, by backend.
    hanging: BTreeMap<String, Instant>,
}

impl HangWatch {
    /// Updates the hanging backends once all workers have replied, and then requests the oldest
    /// operations from each worker again.
    pub(super) fn update<'a>(
        &mut self,
        open: impl Iterator<Item = (&'a String, &'a Arc<Store>)>,
        send_requests: impl FnOnce() -> Vec<Receiver<Requests>>,
    ) {
        let received = &mut self.received;
        self.replies.retain(|reply| {
            let requests = reply.try_recv();
            let is_awaited = matches!(requests, Err(TryRecvError::Empty));
            received.extend(requests.into_iter().flatten());
            is_awaited
        });
        if !self.replies.is_empty() {
            return;
        }
        let hangs = |since: &Instant| since.elapsed() >= REPORTED;
        let mut oldest: BTreeMap<*const Store, Instant> = BTreeMap::new();
        for request in received.drain(..).filter(|request| hangs(&request.since)) {
            let since = oldest.entry(request.store.as_ptr());
            let since = since.or_insert(request.since);
            *since = request.since.min(*since);
        }
        let hanging = open.filter_map(|(name, store)| {
            let silent = store.silent_since().filter(hangs);
            let since = oldest.get(&Arc::as_ptr(store)).copied();
            Some((name.clone(), since.into_iter().chain(silent).min()?))
        });
        self.hanging = hanging.collect();
        self.replies = send_requests();
    }

    /// Returns the fault if a backend hangs.
    pub(super) fn fault(&self, backend: &str, store: &Store) -> Option<Failing> {
        let since = self.hanging.get(backend)?;
        let now = SystemTime::now();
        Some(Failing {
            since: now.checked_sub(since.elapsed()).unwrap_or(now),
            // Don't include the age, so that this is only logged once.
            why: format!(
                "{}: the file system or device does not respond; commands wait until it does",
                store.label()
            ),
            cause: Cause::Hanging,
        })
    }
}

/// A check for block operations that would delay a shutdown, and for threads that would delay an
/// upgrade.
#[derive(Debug)]
pub struct BlockCheck {
    /// Pending replies of workers.
    replies: Vec<Receiver<Requests>>,
    oldest: Option<OldestRequest>,
    until: Instant,
}

impl BlockCheck {
    /// Returns the result when all workers have replied: see [`Server::check_block_operations`].
    pub fn poll(&mut self, now: Instant) -> Option<Result<(), ServerError>> {
        self.poll_with(now, oldest_thread)
    }

    fn poll_with(
        &mut self,
        now: Instant,
        oldest_thread: impl FnOnce() -> Option<(String, Instant)>,
    ) -> Option<Result<(), ServerError>> {
        while let Some(reply) = self.replies.last() {
            let requests = match reply.try_recv() {
                Ok(requests) => requests,
                Err(TryRecvError::Empty) if now < self.until => return None,
                Err(_) => return Some(Err(ServerError::Timeout("a worker"))),
            };
            let age = |request: &OldestRequest| now.saturating_duration_since(request.since);
            let blocking = requests
                .into_iter()
                .filter(|request| age(request) >= HANGING);
            let oldest = self.oldest.take().into_iter().chain(blocking);
            self.oldest = oldest.min_by_key(|request| request.since);
            self.replies.pop();
        }
        let request = self.oldest.take();
        let request = request.map(|request| (request.backend, request.since));
        // execve(2) waits for all threads to exit, including threads of removed backends.
        let mut thread = oldest_thread();
        if request.is_none() && thread.is_some() && now < self.until {
            return None;
        }
        // Each of many responsive backends may have a thread in turn.
        thread.take_if(|(_, since)| now.saturating_duration_since(*since) < HANGING);
        let hanging = request
            .or(thread)
            .map(|(backend, since)| ServerError::Hanging {
                backend,
                seconds: now.saturating_duration_since(since).as_secs(),
            });
        Some(hanging.map_or(Ok(()), Err))
    }

    /// Returns the deadline for replies.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.until
    }
}

impl Server {
    /// Checks that no block operation and no thread hangs, which would delay a shutdown.
    ///
    /// # Errors
    /// [`ServerError::Hanging`] with the oldest operation, or otherwise the oldest thread, or
    /// [`ServerError::Timeout`] if a worker does not reply.
    pub fn check_block_operations(&self) -> Result<(), ServerError> {
        let mut check = self.begin_block_check(Instant::now());
        loop {
            if let Some(result) = check.poll(Instant::now()) {
                return result;
            }
            thread::sleep(POLL);
        }
    }

    /// Starts the same check. The caller has to poll it.
    #[must_use]
    pub fn begin_block_check(&self, now: Instant) -> BlockCheck {
        BlockCheck {
            replies: self.workers.send_to_all(Mail::OldestRequests),
            oldest: None,
            until: now + REPLY,
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_reactor::simulated::Threads;

    use super::*;
    use crate::backend::close;

    /// Otherwise, the next program would not start until the thread exits.
    #[test]
    fn hanging_thread_prevents_handover() {
        let start = Instant::now();
        let mut check = BlockCheck {
            replies: Vec::new(),
            oldest: None,
            until: start + REPLY,
        };
        let thread = |since| move || Some(("/disk".to_owned(), since));
        let result = check.poll_with(start, || None);
        assert!(matches!(result, Some(Ok(()))));
        assert!(check.poll_with(start, thread(start)).is_none());
        let result = check.poll_with(check.until, thread(start));
        let Some(Err(ServerError::Hanging { backend, seconds })) = result else {
            panic!("{result:?}");
        };
        assert_eq!((backend.as_str(), seconds), ("/disk", REPLY.as_secs()));
        // This thread is in the list of the process, maybe together with threads of other tests.
        let (threads, file) = (Threads::default(), ());
        close(&threads, "/closed".into(), file);
        assert!(check.poll(start).is_none());
        // One thread after another may have been listed for responsive backends.
        let result = check.poll_with(check.until, thread(check.until));
        assert!(matches!(result, Some(Ok(()))));
    }
}
