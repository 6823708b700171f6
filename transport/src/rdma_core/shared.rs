//! State shared by the devices of a process that lie on one RDMA device.
//!
//! librdmacm opens each RDMA device once and hands all its users the same context. So two devices
//! of ours, at two addresses of one RDMA device, or of two threads, read asynchronous events from
//! one descriptor, and the reader of an event takes it from the others. Here each has a [`Seat`]:
//! the reader notifies all seats at the context, and wakes those that are not its own; each then
//! looks for itself whether the object is one of its own.
//!
//! The seats also know who is the last to leave, which is when a context whose device was unplugged
//! can be released: the kernel waits for that, and librdmacm keeps an idle context open.
//!
//! Bound: a seat holds each distinct occurrence once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_rdma_core_sys::bindings::*;

/// Subject of an asynchronous event. It outlives the event, and the object that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Occurrence {
    /// Kind of the event, as libibverbs numbers it.
    pub(super) event: ibv_event_type,
    /// Object that it happened to.
    pub(super) to: Object,
}

/// Kinds of subjects of asynchronous events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// A completion queue or shared receive queue: where the library has it, and the number that
    /// was given with it. Only both together name one object of one device.
    Queue {
        /// Address of the library's object.
        at: usize,
        /// Context that was given when it was made.
        context: u64,
    },
    /// The queue pair with this number, which is unique on the RDMA device.
    Qp(u32),
    /// A port of the device.
    Port(u8),
    /// The RDMA device as a whole.
    Device,
}

impl Occurrence {
    /// Reads an event.
    ///
    /// # Safety
    /// The event was taken from the library and is not acknowledged yet.
    pub(super) unsafe fn of(event: &ibv_async_event) -> Self {
        // SAFETY: the kind of event says which member of the union it carries, and an event holds
        // its object alive until it is acknowledged.
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

/// Events that wait for one device.
#[derive(Debug)]
struct Inbox {
    waiting: Mutex<VecDeque<Occurrence>>,
    /// Flag that there is an event, which is read without a lock.
    any: AtomicBool,
    /// Readable while something waits that another device has read.
    wake: OwnedFd,
}

impl Inbox {
    fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            waiting: Mutex::default(),
            any: AtomicBool::new(false),
            // SAFETY: the descriptor was just made and has no other owner.
            wake: unsafe { OwnedFd::from_raw_fd(fd) },
        })
    }

    fn put(&self, occurrence: Occurrence, wake: bool) {
        // A port that flaps, say, repeats one occurrence without end.
        let mut waiting = locked(&self.waiting);
        if !waiting.contains(&occurrence) {
            waiting.push_back(occurrence);
        }
        self.any.store(true, Ordering::Release);
        if wake {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes of memory of ours. A full counter is readable as it is.
            unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    fn take_all(&self, out: &mut Vec<Occurrence>) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut waiting = locked(&self.waiting);
        // Under the lock, so that an event that is put meanwhile raises it again.
        self.any.store(false, Ordering::Release);
        out.extend(waiting.drain(..));
        let mut count = [0u8; 8];
        // SAFETY: room for eight bytes. Without a wake there is nothing to read.
        unsafe {
            libc::read(
                self.wake.as_raw_fd(),
                count.as_mut_ptr().cast(),
                count.len(),
            )
        };
    }
}

/// All seats of this process, by the address of their context.
static SEATS: Mutex<Vec<(usize, Arc<Inbox>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of another thread leaves a list behind in which every entry is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device's place among those that share its context.
#[derive(Debug)]
pub(super) struct Seat {
    context: usize,
    inbox: Arc<Inbox>,
}

impl Seat {
    /// Takes a seat at the context with this address.
    ///
    /// # Errors
    /// The system gives no descriptor.
    pub(super) fn take(context: usize) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        locked(&SEATS).push((context, Arc::clone(&inbox)));
        Ok(Self { context, inbox })
    }

    /// Readable when another has read something that may be this one's.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.inbox.wake.as_raw_fd()
    }

    /// Hands what was read to all seats at the context.
    pub(super) fn report(&self, occurrence: Occurrence) {
        // Also to the reader's own inbox, so that all events are handled in one place; it needs
        // no wake.
        for (context, inbox) in locked(&SEATS).iter() {
            if *context == self.context {
                inbox.put(occurrence, !Arc::ptr_eq(inbox, &self.inbox));
            }
        }
    }

    /// Takes the events of this one.
    pub(super) fn take_all(&self, out: &mut Vec<Occurrence>) {
        self.inbox.take_all(out);
    }

    /// Leaves, and does `last` if no other seat is taken. No seat is taken meanwhile.
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

/// Lets the kernel's side of a context go, whose device is gone and on which nothing is left.
/// librdmacm goes on thinking it open, and closes it when it next looks for devices and finds
/// others; so the numbers of its descriptors stay taken, by descriptors of `/dev/null`.
///
/// # Safety
/// The context is open, its device was removed, and it has no user.
pub(super) unsafe fn close_context(context: *mut ibv_context) {
    // SAFETY: the path ends in NUL; the rest are plain system calls on descriptors that the context
    // owns, and the caller says that they have no other user.
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
        // SAFETY: one structure, which the call fills.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    fn taken(seat: &Seat) -> Vec<Occurrence> {
        let mut out = Vec::new();
        seat.take_all(&mut out);
        out
    }

    const DRAINED: Occurrence = Occurrence {
        event: IBV_EVENT_SQ_DRAINED,
        to: Object::Qp(17),
    };

    #[test]
    fn what_one_reads_all_at_the_context_hear() {
        let [a, b, other] = [0x1000, 0x1000, 0x2000].map(|c| Seat::take(c).unwrap());
        a.report(DRAINED);
        a.report(DRAINED);
        assert!(!readable(a.wake_fd()), "it is awake");
        assert!(readable(b.wake_fd()));
        assert_eq!(taken(&b), [DRAINED], "once");
        assert!(!readable(b.wake_fd()));
        assert_eq!(taken(&b), []);
        assert_eq!(taken(&a), [DRAINED]);
        assert!(!readable(other.wake_fd()));
        assert_eq!(taken(&other), []);
    }

    #[test]
    fn the_last_to_leave_is_told() {
        let [a, b] = [0x3000, 0x3000].map(|c| Seat::take(c).unwrap());
        let (mut first, mut second, mut again) = (false, false, false);
        a.leave(|| first = true);
        b.leave(|| second = true);
        b.leave(|| again = true);
        assert_eq!((first, second, again), (false, true, false));
    }

    #[test]
    fn a_context_that_was_let_go_keeps_its_numbers_but_not_its_files() {
        let mut pipe = [0; 2];
        // SAFETY: room for two descriptors.
        let made = unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
        assert_eq!(made, 0);
        let [command, events] = pipe;
        // SAFETY: the structure is numbers and pointers, for all of which zeros are a value.
        let mut context: ibv_context = unsafe { std::mem::zeroed() };
        (context.cmd_fd, context.async_fd) = (command, events);
        // SAFETY: both descriptors are this test's.
        unsafe { close_context(&raw mut context) };
        for fd in [command, events] {
            let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
            assert_eq!(name.to_str(), Some("/dev/null"));
            // SAFETY: the descriptor is this test's.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}
