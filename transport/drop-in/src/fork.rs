//! Processes that begin as copies of one that uses a device.
//!
//! The child has the parent's memory, and shares its sockets. The device stays the parent's: in the
//! child nothing is sent or received for the objects that the parent has made, and destroying them
//! there changes nothing at the parent: neither its events nor its ports. A device that the child
//! opens is another one at the same address (`share`).
//!
//! Threads are not copied. So no lock is taken by another thread while the process forks, and the
//! child's device has a thread of its own.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};

use crate::engine::{ENGINES, Engine, Engines, State};
use crate::lock::{AT_ALL, LISTING, unpoisoned};
use crate::queue::{DESCRIPTORS, descriptor};

/// The locks that are held while the process forks. What they refer to lives as long as the engine
/// beside them.
struct Held {
    states: Vec<MutexGuard<'static, State>>,
    engines: Vec<Arc<Engine>>,
    list: MutexGuard<'static, Engines>,
    /// Of the queues of events.
    queues: MutexGuard<'static, BTreeSet<c_int>>,
    /// Of the list of devices while it is made.
    _listing: MutexGuard<'static, ()>,
    /// Of the identifiers at all devices. A thread puts them on devices that are back.
    _at_all: MutexGuard<'static, ()>,
}

// SAFETY: the thread that forks releases the locks: it goes on in both processes.
unsafe impl Send for Held {}

/// Forks between this process and the one that has loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that a process shares with neither its parent nor its children.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// Has the handlers called at each `fork` from now on.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(add_handlers);
}

fn add_handlers() {
    // SAFETY: the handlers may be called at any time.
    let error = unsafe { libc::pthread_atfork(Some(prepare), Some(release), Some(begin_child)) };
    if error != 0 {
        tracing::warn!(
            error,
            "processes that are forked use the device of their parent"
        );
    }
}

extern "C" fn prepare() {
    let at_all = unpoisoned(AT_ALL.lock());
    let list = unpoisoned(ENGINES.lock());
    let engines: Vec<_> = list.iter().map(|(_, engine)| Arc::clone(engine)).collect();
    let states = engines.iter().map(|engine| {
        // SAFETY: the engine is kept beside the guard, which is dropped first.
        let state: &'static Mutex<State> = unsafe { &*std::ptr::from_ref(engine.state()) };
        unpoisoned(state.lock())
    });
    let held = Held {
        states: states.collect(),
        engines,
        list,
        queues: unpoisoned(DESCRIPTORS.lock()),
        _listing: unpoisoned(LISTING.lock()),
        _at_all: at_all,
    };
    *unpoisoned(HELD.lock()) = Some(held);
}

/// Releases the locks, in the order that `Held` has its members in.
extern "C" fn release() {
    drop(unpoisoned(HELD.lock()).take());
}

extern "C" fn begin_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut held = unpoisoned(HELD.lock());
    if let Some(held) = held.as_mut() {
        // SAFETY: a path that ends with a zero byte.
        let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        for (engine, state) in held.engines.iter().zip(&mut held.states) {
            engine.inherit();
            state.forget_ports();
            let all = state.descriptors().chain(engine.wake_fds());
            for fd in all.map(|fd| fd.as_raw_fd()).collect::<Vec<c_int>>() {
                // The number stays in use, as the objects that have it close it some day.
                // SAFETY: the descriptor is the engine's, and means nothing from now on.
                unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) };
            }
        }
        // SAFETY: opened above.
        unsafe { libc::close(null) };
        for fd in held.queues.iter() {
            replace(*fd);
        }
        // What the child opens is new. The parent's is not closed: its ports are still in use.
        std::mem::forget(std::mem::take(&mut *held.list));
    }
    drop(held);
    release();
}

/// Gives a queue of events a descriptor of the child's own at its number. What the child takes from
/// the queue, the parent would miss.
fn replace(fd: c_int) {
    let Ok(own) = descriptor() else {
        return;
    };
    // SAFETY: the descriptor is the queue's.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(own.as_raw_fd(), libc::F_SETFL, flags & libc::O_NONBLOCK);
        libc::dup3(own.as_raw_fd(), fd, libc::O_CLOEXEC);
    }
}
