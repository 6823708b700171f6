//! How a loop drives the device: rounds, descriptors, asynchronous events.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use riser_rdma_core_sys::bindings::*;

use super::objects::{RdmaCoreDevice, unpack};
use super::shared::{Object, Occurrence};
use crate::verbs::*;

impl RdmaCoreDevice {
    /// Hands on to all seats at the context what its asynchronous event descriptor has.
    fn read_async_events(&mut self) {
        loop {
            let mut event = ibv_async_event::default();
            // SAFETY: the context is open and its descriptor does not block.
            if unsafe { (self.core.verbs.ibv_get_async_event)(self.context, &raw mut event) } != 0 {
                return;
            }
            // Acknowledged at once: until then the library keeps the object of the event alive,
            // and its destruction waits.
            // SAFETY: the event was just taken, and is acknowledged only then.
            unsafe {
                self.seat.report(Occurrence::of(&event));
                (self.core.verbs.ibv_ack_async_event)(&raw mut event);
            }
        }
    }

    /// Takes in what this device, or another of this process, has read of asynchronous events.
    fn reap_async_events(&mut self) -> usize {
        let mut occurrences = std::mem::take(&mut self.occurrences);
        self.seat.take_all(&mut occurrences);
        let count = occurrences.len();
        for occurrence in occurrences.drain(..) {
            if let Some(ours) = self.async_event(occurrence)
                // Each kind once, so that a device that repeats itself cannot make the queue
                // grow.
                && !self.async_events.contains(&ours)
            {
                self.async_events.push_back(ours);
            }
        }
        self.occurrences = occurrences;
        count
    }

    /// Our form of what happened, if it happened to us.
    fn async_event(&mut self, occurrence: Occurrence) -> Option<AsyncEvent> {
        // An event may be about an object that was destroyed since, or about another device of this
        // process at the same context: handle and address must both fit.
        let event = occurrence.event;
        match occurrence.to {
            Object::Queue { at, context } if event == IBV_EVENT_CQ_ERR => {
                // Remembered, so that polls report the loss: the library itself goes on to answer
                // them.
                let id = CqId(unpack(context));
                let cq = self.cqs.get_mut(id).ok()?;
                (cq.ptr as usize == at).then(|| cq.overrun = true)?;
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
    /// Returns whether there are completion events, connection events, asynchronous events: one
    /// system call where reading each would be three.
    pub(super) fn readable(&self) -> [bool; 3] {
        // SAFETY: all three objects are open as long as the device is.
        let fds = unsafe {
            [
                (*self.comp).fd,
                (*self.channel).fd,
                (*self.context).async_fd,
            ]
        };
        let mut polled = fds.map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: three structures, which the call fills; it does not wait.
        let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        polled.map(|p| n > 0 && p.revents != 0)
    }
}

impl Provider for RdmaCoreDevice {
    fn progress(&mut self, now: Instant) -> usize {
        let mut count = self.poll_watched();
        if self.notices.must_look(now, count > 0) {
            let [completions, connections, events] = self.readable();
            if events {
                self.read_async_events();
            }
            if completions {
                count += self.reap_cq_events();
            }
            if connections {
                count += self.reap_cm_events();
            }
        }
        // Events that another device has read come by the seat, which needs no system call to
        // look at.
        count + self.reap_async_events()
    }

    fn deadline(&self) -> Option<Instant> {
        // Everything else wakes its owner by a descriptor.
        let is_waiting =
            !self.cm_events.is_empty() || !self.async_events.is_empty() || self.notices.has_fired();
        is_waiting.then(Instant::now)
    }

    fn event_fds(&self) -> EventFds<'_> {
        // SAFETY: all four objects are open as long as the device is.
        let fds = unsafe {
            [
                (*self.comp).fd,
                (*self.channel).fd,
                (*self.context).async_fd,
                self.seat.wake_fd(),
            ]
            .map(|fd| BorrowedFd::borrow_raw(fd))
        };
        EventFds::from(fds)
    }

    fn arm_fds(&mut self) -> bool {
        self.arm_watched()
    }
}
