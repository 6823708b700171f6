//! Driving the device from an event loop: rounds, descriptors, asynchronous events.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use riser_rdma_core_sys::bindings::*;

use super::context::RdmaCoreDevice;
use super::objects::unpack;
use super::shared::{Object, Occurrence, push_newest};
use crate::verbs::*;

impl RdmaCoreDevice {
    /// Reads asynchronous events from the descriptor and passes them to all seats of this context.
    fn read_async_events(&mut self) {
        loop {
            let mut event = ibv_async_event::default();
            // SAFETY: the context is open and its descriptor is non-blocking.
            if unsafe { (self.core.verbs.ibv_get_async_event)(self.context, &raw mut event) } != 0 {
                return;
            }
            // Acknowledge the event immediately, because the library can't destroy the object of
            // the event until then. SAFETY: we have just received the event, and don't use it after
            // acknowledging it.
            unsafe {
                self.seat.report(Occurrence::of(&event));
                (self.core.verbs.ibv_ack_async_event)(&raw mut event);
            }
        }
    }

    /// Handles asynchronous events read by this or any other device in this process.
    fn reap_async_events(&mut self) -> usize {
        let mut occurrences = std::mem::take(&mut self.occurrences);
        self.seat.take_all(&mut occurrences);
        let count = occurrences.len();
        for occurrence in occurrences.drain(..) {
            if let Some(ours) = self.async_event(occurrence) {
                push_newest(&mut self.async_events, ours);
            }
        }
        self.occurrences = occurrences;
        count
    }

    /// Converts an event, or returns `None` if it is for a different device.
    fn async_event(&mut self, occurrence: Occurrence) -> Option<AsyncEvent> {
        // The object may have been destroyed since, or belong to a different device using the same
        // context. We must check both the handle and the address.
        let event = occurrence.event;
        match occurrence.to {
            Object::Queue { at, context } if event == IBV_EVENT_CQ_ERR => {
                let id = CqId(unpack(context));
                let is_ours = self.cqs.ptr(id).ok()? as usize == at;
                is_ours.then(|| self.cqs.fail(id))?;
                Some(AsyncEvent::CqError(id))
            }
            Object::Queue { at, context } => {
                let id = SrqId(unpack(context));
                let srq = self.srqs.get(id).ok()?;
                let is_limit = event == IBV_EVENT_SRQ_LIMIT_REACHED && srq.ptr as usize == at;
                is_limit.then_some(AsyncEvent::SrqLimitReached(id))
            }
            Object::Qp(number) => {
                let qp = *self.qpns.get(&number)?;
                Some(match event {
                    IBV_EVENT_QP_FATAL => AsyncEvent::QpFatal(qp),
                    IBV_EVENT_QP_REQ_ERR => AsyncEvent::QpReqError(qp),
                    IBV_EVENT_QP_ACCESS_ERR => AsyncEvent::QpAccessError(qp),
                    IBV_EVENT_COMM_EST => AsyncEvent::CommEstablished(qp),
                    IBV_EVENT_SQ_DRAINED => AsyncEvent::SqDrained(qp),
                    IBV_EVENT_PATH_MIG => AsyncEvent::PathMig(qp),
                    IBV_EVENT_PATH_MIG_ERR => AsyncEvent::PathMigError(qp),
                    IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::QpLastWqeReached(qp),
                    _ => return None,
                })
            }
            Object::Port(port) => Some(match event {
                IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port),
                IBV_EVENT_PORT_ERR => AsyncEvent::PortError(port),
                IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange(port),
                _ => return None,
            }),
            Object::Device if event == IBV_EVENT_DEVICE_FATAL => {
                self.gone = true;
                Some(AsyncEvent::DeviceFatal)
            }
            Object::Device => None,
        }
    }
}

impl RdmaCoreDevice {
    /// Returns whether completion events, connection events and asynchronous events are available.
    /// This is a single system call instead of three.
    pub(super) fn readable(&self) -> [bool; 3] {
        // SAFETY: all three objects are open while the device exists.
        let fds = unsafe {
            [
                (*self.cqs.channel).fd,
                (*self.connections.channel).fd,
                (*self.context).async_fd,
            ]
        };
        let mut polled = fds.map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: the call updates the three structures and does not block.
        let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        polled.map(|p| n > 0 && p.revents != 0)
    }
}

impl Provider for RdmaCoreDevice {
    fn progress(&mut self, now: Instant) -> usize {
        let mut count = match self.gone {
            // Completions cannot be used anymore.
            true => 0,
            false => self.cqs.poll_watched(),
        };
        if self.cqs.notices.must_look(now, count > 0) {
            let [completions, connections, events] = self.readable();
            if events {
                self.read_async_events();
            }
            if completions {
                count += self.cqs.reap_events();
            }
            if connections {
                count += self.connections.reap_events();
                if self.connections.is_removed() && !self.gone {
                    self.gone = true;
                    self.async_events.push_back(AsyncEvent::DeviceFatal);
                }
            }
        }
        // Events read by a different device are stored in our seat, which doesn't need a system
        // call to check.
        count + self.reap_async_events()
    }

    fn deadline(&self) -> Option<Instant> {
        // Everything else uses a descriptor to wake its owner.
        let is_waiting = self.connections.has_events()
            || !self.async_events.is_empty()
            || self.cqs.notices.has_fired();
        is_waiting.then(Instant::now)
    }

    fn event_fds(&self) -> EventFds<'_> {
        // SAFETY: all four objects are open while the device exists.
        let fds = unsafe {
            [
                (*self.cqs.channel).fd,
                (*self.connections.channel).fd,
                (*self.context).async_fd,
                self.seat.wake_fd(),
            ]
            .map(|fd| BorrowedFd::borrow_raw(fd))
        };
        EventFds::from(fds)
    }

    fn arm_fds(&mut self) -> bool {
        !self.gone && self.cqs.arm_watched()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_port_event_matches_port_state() {
        let changes = [
            (IBV_EVENT_PORT_ERR, AsyncEvent::PortError(1)),
            (IBV_EVENT_PORT_ACTIVE, AsyncEvent::PortActive(1)),
            (IBV_EVENT_PORT_ERR, AsyncEvent::PortError(1)),
        ];
        // Read the events separately, or all at once.
        for is_read in [true, false] {
            let mut device = RdmaCoreDevice::fake();
            for (event, _) in changes {
                let to = Object::Port(1);
                device.seat.report(Occurrence { event, to });
                if is_read {
                    device.reap_async_events();
                }
            }
            device.reap_async_events();
            let last = std::iter::from_fn(|| device.poll_async_event()).last();
            assert_eq!(last, Some(changes[2].1));
        }
    }
}
