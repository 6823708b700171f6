//! Forks of a process that uses a device.
//!
//! The child has the parent's memory, and shares its sockets. The device still belongs to the
//! parent: in the child, nothing is sent or received for objects created by the parent, and
//! destroying them there has no effect on the parent, including its events and ports. A device that
//! is opened by the child is a separate device with the same address (`broker`).
//!
//! Threads are not copied. So no lock may be held by another thread during a fork, and the child's
//! device gets its own thread.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, RwLockWriteGuard};

use crate::engine::{ENGINES, Engine, Engines, State};
use crate::lock::{AT_ALL, LISTING, PORTS, SHIELDS, unpoisoned};
use crate::queue::{DESCRIPTORS, descriptor};

/// The locks that are held during a fork. The engines are stored with them, to ensure that the
/// guards stay valid.
struct ForkGuards {
    states: Vec<MutexGuard<'static, State>>,
    engines: Vec<Arc<Engine>>,
    list: MutexGuard<'static, Engines>,
    /// Lock of the event queues.
    queues: MutexGuard<'static, BTreeSet<c_int>>,
    /// Held while the list of devices is being created.
    _listing: MutexGuard<'static, ()>,
    /// Lock of identifiers that use all devices. A thread binds them to devices that return.
    _at_all: MutexGuard<'static, ()>,
    /// Lock of the open ports for management datagrams.
    _ports: MutexGuard<'static, ()>,
    /// Locks of individual objects.
    _shields: RwLockWriteGuard<'static, ()>,
}

// SAFETY: the locks are released by the forking thread, which exists in both processes.
unsafe impl Send for ForkGuards {}

/// Number of forks between this process and the process that has loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns a number that is different in the parent and in children of this process.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

static HELD: Mutex<Option<ForkGuards>> = Mutex::new(None);

/// Installs the handlers for `fork`.
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
            "cannot register fork handlers: forked processes will use their parent's device"
        );
    }
}

extern "C" fn prepare() {
    let at_all = unpoisoned(AT_ALL.lock());
    let ports = unpoisoned(PORTS.lock());
    let list = unpoisoned(ENGINES.lock());
    let engines: Vec<_> = list.iter().map(|(_, engine)| Arc::clone(engine)).collect();
    let states = engines.iter().map(|engine| {
        // SAFETY: the engine is stored with the guard, which is dropped first.
        let state: &'static Mutex<State> = unsafe { &*std::ptr::from_ref(engine.state()) };
        unpoisoned(state.lock())
    });
    let states = states.collect();
    let listing = unpoisoned(LISTING.lock());
    // A thread that holds the lock of a queue may be waiting for the lock of the descriptors.
    let shields = unpoisoned(SHIELDS.write());
    let held = ForkGuards {
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

/// Releases the locks, in the order of the fields of `ForkGuards`.
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
        // The descriptor numbers must stay in use, because their owners will close them later.
        for fd in all {
            replace(fd);
        }
        for fd in held.queues.iter() {
            replace(*fd);
        }
        // The child will open new engines. We leak the parent's, because dropping them would
        // release ports that are still in use.
        std::mem::forget(std::mem::take(&mut *held.list));
    }
    drop(held);
    release();
}

/// Replaces a descriptor with an eventfd of the child. Otherwise the child would keep a socket of
/// the parent open, or read the counter of an event queue, which the parent would then miss.
fn replace(fd: c_int) {
    // SAFETY: the descriptor belongs to the library.
    let is_nonblocking = unsafe { libc::fcntl(fd, libc::F_GETFL) } & libc::O_NONBLOCK;
    let own = descriptor().or_else(|_| {
        // The table is full. The child has no other threads that could use the number.
        // SAFETY: as above, and the number is reused immediately.
        unsafe { libc::close(fd) };
        descriptor()
    });
    let Ok(own) = own else {
        return;
    };
    // SAFETY: the descriptor belongs to the child.
    unsafe { libc::fcntl(own.as_raw_fd(), libc::F_SETFL, is_nonblocking) };
    if own.as_raw_fd() == fd {
        std::mem::forget(own);
        return;
    }
    // SAFETY: the number belongs to the library.
    unsafe { libc::dup3(own.as_raw_fd(), fd, libc::O_CLOEXEC) };
}
