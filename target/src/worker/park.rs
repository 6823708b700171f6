//! Where a worker sleeps: in its ring, which watches the devices' descriptors as well.

use std::sync::Arc;

use riser_reactor::{Handle, Next, RingError, SubmitError, Token};

use super::{Worker, WorkerError};

/// The top byte of the tokens of watched descriptors; the driver has another.
const WATCH: u64 = 2 << 56;

fn watch_token(device: usize) -> Token {
    Token(WATCH | device as u64)
}

impl Worker {
    /// Watches the descriptors of a device. Where the ring has no slot for that, it is watched as soon
    /// as there is one.
    pub(super) fn watch(&mut self, device: usize) -> Result<(), WorkerError> {
        for fd in self.devices[device].event_fds() {
            let fd = fd
                .try_clone_to_owned()
                .map_err(|e| WorkerError::Ring(RingError::Enter(e)))?;
            let handle = Handle::new(Arc::new(fd));
            let token = watch_token(device);
            match self.ring.submit_poll(&handle, libc::POLLIN, token) {
                Ok(()) => {}
                Err(SubmitError::Full) => {
                    self.unwatched.push(device);
                    return Ok(());
                }
                Err(error) => {
                    let error = std::io::Error::other(error);
                    return Err(WorkerError::Ring(RingError::Enter(error)));
                }
            }
        }
        Ok(())
    }

    /// Watches devices again whose watch has ended.
    pub(super) fn poll_watches(&mut self) -> Result<(), WorkerError> {
        let mut unwatched = std::mem::take(&mut self.unwatched);
        unwatched.dedup();
        for device in unwatched {
            // The descriptors of a device that is gone are always readable.
            if self.devices.is_open(device) {
                self.unwatch(device);
                self.watch(device)?;
            }
        }
        Ok(())
    }

    /// Watches a device no more. Whoever holds a descriptor of an RDMA device keeps the kernel from
    /// taking it away.
    pub(super) fn unwatch(&mut self, device: usize) {
        if let Err(error) = self.ring.cancel(watch_token(device)) {
            tracing::warn!(%error, "a device's descriptors stay open");
        }
    }

    /// A completion may say that a device has something, which the next round looks for in any case;
    /// watches it again where that ended.
    pub(super) fn on_watch(&mut self, completion: &riser_reactor::Completion) {
        let is_end = !completion.more && completion.result != -libc::ECANCELED;
        if completion.token.0 & (0xff << 56) == WATCH && is_end {
            self.unwatched.push((completion.token.0 & 0xffff) as usize);
        }
    }

    /// Sleeps, unless there was work a moment ago or something is due.
    pub(super) fn park(&mut self, worked: usize) -> Result<(), WorkerError> {
        let deadline = self.deadline();
        match self.spinner.plan(self.now, worked > 0, deadline) {
            Next::Poll => {}
            Next::Park(timeout) => {
                let is_watched = self.unwatched.is_empty();
                let is_due = self.conns.ready() > 0 || self.pool.has_change();
                if self.exiting || !is_watched || is_due || self.outbox.retry() > 0 {
                    return Ok(());
                }
                self.parks += 1;
                self.ring.park(timeout)?;
            }
        }
        Ok(())
    }
}
