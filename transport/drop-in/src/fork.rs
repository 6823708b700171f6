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
use std::sync::{Arc, Mutex, MutexGuard, Once, RwLockWriteGuard};

use crate::engine::{ENGINES, Engine, Engines, State};
use crate::lock::{AT_ALL, LISTING, PORTS, SHIELDS, unpoisoned};
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
    /// Of the open ports for management datagrams.
    _ports: MutexGuard<'static, ()>,
    /// Of single objects.
    _shields: RwLockWriteGuard<'static, ()>,
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
    let ports = unpoisoned(PORTS.lock());
    let list = unpoisoned(ENGINES.lock());
    let engines: Vec<_> = list.iter().map(|(_, engine)| Arc::clone(engine)).collect();
    let states = engines.iter().map(|engine| {
        // SAFETY: the engine is kept beside the guard, which is dropped first.
        let state: &'static Mutex<State> = unsafe { &*std::ptr::from_ref(engine.state()) };
        unpoisoned(state.lock())
    });
    let states = states.collect();
    let listing = unpoisoned(LISTING.lock());
    // A thread with the lock of a queue may wait for that of the descriptors.
    let shields = unpoisoned(SHIELDS.write());
    let held = Held {
        states,
        engines,
        list,
        queues: unpoisoned(DESCRIPTORS.lock()),
        _listing: listing,
        _at_all: at_all,
        _ports: ports,
        _shields: shields,
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
        let mut all: Vec<c_int> = Vec::new();
        for (engine, state) in held.engines.iter().zip(&mut held.states) {
            engine.inherit();
            state.forget_ports();
            let fds = state.descriptors().chain(engine.wake_fds());
            all.extend(fds.map(|fd| fd.as_raw_fd()));
        }
        // The numbers stay in use, because the objects that have them close them later.
        for fd in all {
            replace(fd);
        }
        for fd in held.queues.iter() {
            replace(*fd);
        }
        // What the child opens is new. The parent's is not closed: its ports are still in use.
        std::mem::forget(std::mem::take(&mut *held.list));
    }
    drop(held);
    release();
}

/// Gives a descriptor's number to an eventfd of the child: it must not keep a socket of the parent
/// open, nor read the count of a queue of events, which the parent would miss.
fn replace(fd: c_int) {
    // SAFETY: the descriptor is the library's.
    let is_nonblocking = unsafe { libc::fcntl(fd, libc::F_GETFL) } & libc::O_NONBLOCK;
    let own = descriptor().or_else(|_| {
        // The table is full. The child has no other thread that could take the number.
        // SAFETY: as above; the number is in use again at once.
        unsafe { libc::close(fd) };
        descriptor()
    });
    let Ok(own) = own else {
        return;
    };
    // SAFETY: the descriptor is the child's.
    unsafe { libc::fcntl(own.as_raw_fd(), libc::F_SETFL, is_nonblocking) };
    if own.as_raw_fd() == fd {
        std::mem::forget(own);
        return;
    }
    // SAFETY: the number is the library's.
    unsafe { libc::dup3(own.as_raw_fd(), fd, libc::O_CLOEXEC) };
}
