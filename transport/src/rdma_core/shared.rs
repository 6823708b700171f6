//! State shared by all devices in a process that use the same RDMA device.
//!
//! librdmacm opens each RDMA device once and returns the same context to all its users. If two of
//! our devices use different addresses of an RDMA device, or are used by two threads, they read
//! asynchronous events from the same descriptor, and only one of them will get the event. To handle
//! this, each device has a [`Seat`]: if a device reads an event, it passes it to all seats of this
//! context and wakes up the other seats. Each of them then checks if the object is its own.
//!
//! This also tells us which seat is the last to be released. At this point, we can close the
//! context of an unplugged device: the kernel is waiting for this, but librdmacm keeps an unused
//! context open.
//!
//! Bound: a seat stores each distinct event only once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_rdma_core_sys::bindings::*;

/// Subject of an asynchronous event. It can outlive the event and the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Occurrence {
    /// Event type, as used by libibverbs.
    pub(super) event: ibv_event_type,
    /// Object of the event.
    pub(super) to: Object,
}

/// Type of object for an asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// CQ or SRQ. Both fields are needed to identify an object of a device.
    Queue {
        /// Address of the library object.
        at: usize,
        /// Context pointer set when it was created.
        context: u64,
    },
    /// QP number, which is unique on the RDMA device.
    Qp(u32),
    /// Device port.
    Port(u8),
    /// The entire RDMA device.
    Device,
}

impl Occurrence {
    /// Converts an event.
    ///
    /// # Safety
    /// The event must have been read from the library and not yet been acknowledged.
    pub(super) unsafe fn of(event: &ibv_async_event) -> Self {
        // SAFETY: the event type determines which union field is valid, and the object is valid
        // until the event is acknowledged.
        let to = unsafe {
            match event.event_type {
                IBV_EVENT_CQ_ERR => Object::Queue {
                    at: event.element.cq as usize,
                    context: (*event.element.cq).cq_context as u64,
                },
                IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Object::Queue {
                    at: event.element.srq as usize,
                    context: (*event.element.srq).srq_context as u64,
                },
                IBV_EVENT_QP_FATAL
                | IBV_EVENT_QP_REQ_ERR
                | IBV_EVENT_QP_ACCESS_ERR
                | IBV_EVENT_COMM_EST
                | IBV_EVENT_SQ_DRAINED
                | IBV_EVENT_PATH_MIG
                | IBV_EVENT_PATH_MIG_ERR
                | IBV_EVENT_QP_LAST_WQE_REACHED => Object::Qp((*event.element.qp).qp_num),
                IBV_EVENT_PORT_ACTIVE | IBV_EVENT_PORT_ERR | IBV_EVENT_GID_CHANGE => {
                    Object::Port(event.element.port_num as u8)
                }
                _ => Object::Device,
            }
        };
        Self {
            event: event.event_type,
            to,
        }
    }
}

/// Adds an event. Only the newest of several equal events is stored, because a flapping port could
/// generate an unlimited number of them, and the last event must match its state.
pub(super) fn push_newest<T: PartialEq>(events: &mut VecDeque<T>, event: T) {
    events.retain(|other| *other != event);
    events.push_back(event);
}

/// Pending events of a device.
#[derive(Debug)]
struct Inbox {
    waiting: Mutex<VecDeque<Occurrence>>,
    /// Set if there are events. This can be checked without locking the mutex.
    any: AtomicBool,
    /// Readable if there are events that were read by a different device.
    wake: OwnedFd,
}

impl Inbox {
    fn new() -> io::Result<Self> {
        // SAFETY: simple system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            waiting: Mutex::default(),
            any: AtomicBool::new(false),
            // SAFETY: the descriptor has just been created and is not owned by anything else.
            wake: unsafe { OwnedFd::from_raw_fd(fd) },
        })
    }

    fn push(&self, occurrence: Occurrence, wake: bool) {
        let mut waiting = locked(&self.waiting);
        push_newest(&mut waiting, occurrence);
        self.any.store(true, Ordering::Release);
        if wake {
            let one = 1u64.to_ne_bytes();
            // SAFETY: the pointer is valid for eight bytes. If the counter is at its maximum, the
            // descriptor is already readable.
            unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    fn take_all(&self, out: &mut Vec<Occurrence>) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut waiting = locked(&self.waiting);
        // Do this while holding the lock, so that an event added concurrently will set it again.
        self.any.store(false, Ordering::Release);
        out.extend(waiting.drain(..));
        let mut count = [0u8; 8];
        // SAFETY: there is space for eight bytes. If it wasn't woken, there is nothing to read.
        unsafe {
            libc::read(
                self.wake.as_raw_fd(),
                count.as_mut_ptr().cast(),
                count.len(),
            )
        };
    }
}

/// All seats of this process and the address of their context.
static SEATS: Mutex<Vec<(usize, Arc<Inbox>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // All entries of the list are still valid if another thread has panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seat of a device that may share its context.
#[derive(Debug)]
pub(super) struct Seat {
    context: usize,
    inbox: Arc<Inbox>,
}

impl Seat {
    /// Creates a seat for the context with this address.
    ///
    /// # Errors
    /// Returns an error if the system can't create a descriptor.
    pub(super) fn create(context: usize) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        locked(&SEATS).push((context, Arc::clone(&inbox)));
        Ok(Self { context, inbox })
    }

    /// Returns a descriptor which is readable if a different device has read an event that may be
    /// for this device.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.inbox.wake.as_raw_fd()
    }

    /// Passes an event to all seats of this context.
    pub(super) fn report(&self, occurrence: Occurrence) {
        // Include our own inbox, so that all events are handled in the same place. We don't need to
        // wake ourselves.
        for (context, inbox) in locked(&SEATS).iter() {
            if *context == self.context {
                inbox.push(occurrence, !Arc::ptr_eq(inbox, &self.inbox));
            }
        }
    }

    /// Removes and returns all pending events.
    pub(super) fn take_all(&self, out: &mut Vec<Occurrence>) {
        self.inbox.take_all(out);
    }

    /// Releases the seat, and calls `last` if there are no more seats. New seats cannot be created
    /// while it is running.
    pub(super) fn leave(&self, last: impl FnOnce()) {
        let mut seats = locked(&SEATS);
        let before = seats.len();
        seats.retain(|(_, inbox)| !Arc::ptr_eq(inbox, &self.inbox));
        if seats.len() < before && !seats.iter().any(|(context, _)| *context == self.context) {
            last();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave(|| {});
    }
}

/// Closes the kernel side of an unused context after its device has been removed. librdmacm still
/// assumes that it is open, and will close it when it next searches for devices and finds different
/// ones. Therefore, we must keep its descriptor numbers in use by replacing them with `/dev/null`.
///
/// # Safety
/// The context must be open and unused, and its device must have been removed.
pub(super) unsafe fn close_context(context: *mut ibv_context) {
    // SAFETY: the path is NUL-terminated. All system calls use descriptors owned by the context,
    // and the caller ensures that they are not used by anything else.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if null < 0 {
            return;
        }
        for fd in [(*context).cmd_fd, (*context).async_fd] {
            libc::dup3(null, fd, libc::O_CLOEXEC);
        }
        libc::close(null);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(fd: RawFd) -> bool {
        let mut poll = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the call updates a single structure.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    fn received(seat: &Seat) -> Vec<Occurrence> {
        let mut out = Vec::new();
        seat.take_all(&mut out);
        out
    }

    const DRAINED: Occurrence = Occurrence {
        event: IBV_EVENT_SQ_DRAINED,
        to: Object::Qp(17),
    };

    #[test]
    fn events_are_passed_to_all_seats() {
        let [a, b, other] = [0x1000, 0x1000, 0x2000].map(|c| Seat::create(c).unwrap());
        a.report(DRAINED);
        a.report(DRAINED);
        assert!(!readable(a.wake_fd()), "it is awake");
        assert!(readable(b.wake_fd()));
        assert_eq!(received(&b), [DRAINED], "once");
        assert!(!readable(b.wake_fd()));
        assert_eq!(received(&b), []);
        assert_eq!(received(&a), [DRAINED]);
        assert!(!readable(other.wake_fd()));
        assert_eq!(received(&other), []);
    }

    #[test]
    fn last_seat_runs_callback() {
        let [a, b] = [0x3000, 0x3000].map(|c| Seat::create(c).unwrap());
        let (mut first, mut second, mut again) = (false, false, false);
        a.leave(|| first = true);
        b.leave(|| second = true);
        b.leave(|| again = true);
        assert_eq!((first, second, again), (false, true, false));
    }

    #[test]
    fn closed_context_keeps_descriptor_numbers() {
        let mut pipe = [0; 2];
        // SAFETY: there is space for two descriptors.
        let made = unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
        assert_eq!(made, 0);
        let [command, events] = pipe;
        // SAFETY: all fields are numbers and pointers, for which zero is a valid value.
        let mut context: ibv_context = unsafe { std::mem::zeroed() };
        (context.cmd_fd, context.async_fd) = (command, events);
        // SAFETY: both descriptors are owned by this test.
        unsafe { close_context(&raw mut context) };
        for fd in [command, events] {
            let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
            assert_eq!(name.to_str(), Some("/dev/null"));
            // SAFETY: the descriptor is owned by this test.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}
