//! Identifiers that use all devices, and removed devices that return.
//!
//! Like in Linux (`cma_add_one()`), if an identifier is bound to an address that refers to all
//! devices, and a removed device returns, the identifier is bound to this device again, and listens
//! on it. This happens independently of calls of the program, so while there are such identifiers,
//! a thread waits for the address of the device.

use std::collections::BTreeSet;
use std::net::{IpAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use riser_transport::netif::AddressWatch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::warn;

use super::on_device::{bind_at, is_for, listen_on};
use super::{Id, Shared, shared_on};
use crate::devices::Device;
use crate::engine::Engine;
use crate::errno::Errno;
use crate::fork::generation;
use crate::lock::{AT_ALL, unpoisoned};
use crate::object::Ref;
use crate::open::engine;

/// Time between checks for an address. The kernel also notifies us of changes. If the device cannot
/// be opened although its address exists, the time doubles with each failure.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// The identifiers of this process that are bound to all devices.
static IDS: Mutex<Own<Vec<Ref<Id>>>> = Mutex::new(Own::new(Vec::new()));

/// Indices of the devices that a thread of this process is waiting for.
static AWAITED: Mutex<Own<BTreeSet<usize>>> = Mutex::new(Own::new(BTreeSet::new()));

/// A value that belongs to the process that has created it. A child process starts with an empty
/// value, because it has no such threads.
struct Own<T> {
    generation: u32,
    value: T,
}

impl<T: Default> Own<T> {
    /// Creates a value of the first process.
    const fn new(value: T) -> Self {
        Self {
            generation: 0,
            value,
        }
    }

    fn get(&mut self) -> &mut T {
        let generation = generation();
        if self.generation != generation {
            let value = T::default();
            *self = Self { generation, value };
        }
        &mut self.value
    }
}

/// Permission to change the devices of these identifiers. Its lock must be acquired before all
/// other locks, and the process can't fork while it is held.
pub(super) type DevicesGuard = MutexGuard<'static, ()>;

/// Acquires the lock.
pub(super) fn hold() -> DevicesGuard {
    unpoisoned(AT_ALL.lock())
}

/// Acquires the lock for a call that uses an identifier, if it is bound to all devices.
pub(super) fn hold_for(id: Ref<Id>) -> Option<DevicesGuard> {
    let is_at_all = id.lock().any.is_some();
    is_at_all.then(hold)
}

/// Registers an identifier that is bound to all devices.
pub(super) fn enter(_: &DevicesGuard, id: Ref<Id>) {
    id.lock().is_in_list = true;
    unpoisoned(IDS.lock()).get().push(id);
}

/// Removes an identifier that is being destroyed. If it is not in the list, this doesn't acquire
/// the lock, which may be held while a device is being opened.
pub(super) fn forget(id: Ref<Id>) {
    let is_in_list = id.lock().is_in_list;
    if is_in_list {
        let _held = hold();
        unpoisoned(IDS.lock()).get().retain(|other| *other != id);
    }
}

/// Waits for the return of a removed device, for identifiers that use all devices. The device may
/// be locked.
pub(super) fn await_return(device: &'static Device) {
    if !unpoisoned(AWAITED.lock()).get().insert(device.index) {
        return;
    }
    let name = format!("return-{}", device.config.name);
    if let Err(error) = crate::thread::spawn(name, move || wait(device)) {
        unpoisoned(AWAITED.lock()).get().remove(&device.index);
        let name = &device.config.name;
        warn!(%error, "cannot wait for device {name}: its listeners will not be restored");
    }
}

/// Entry point of the thread.
fn wait(device: &'static Device) {
    let addr = device.config.addr;
    let mut watch = AddressWatch::open(addr).ok();
    let mut pause = PAUSE;
    loop {
        let is_there = is_there(addr);
        let is_wanted = {
            let _held = hold();
            !unpoisoned(IDS.lock()).get().is_empty()
        };
        // This must be done without holding the lock, because threads that fork or listen wait for
        // it, and this may take seconds.
        let opened = (is_there && is_wanted)
            .then(|| engine(device).ok())
            .flatten();
        {
            let _held = hold();
            let ids = unpoisoned(IDS.lock()).get().clone();
            // This must be done before they are bound to the device, because it may be removed
            // again immediately.
            unpoisoned(AWAITED.lock()).get().remove(&device.index);
            if ids.is_empty()
                || opened.is_some_and(|engine| restore_listeners(&ids, device, &engine))
            {
                return;
            }
            if !unpoisoned(AWAITED.lock()).get().insert(device.index) {
                // Another thread has started to wait.
                return;
            }
        }
        pause = match is_there {
            true => (2 * pause).min(LONGEST_PAUSE),
            false => PAUSE,
        };
        let time = Timespec {
            tv_sec: pause.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        let fds = watch.as_ref().map(|watch| {
            let fd = watch.fd();
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        });
        let mut fds: Vec<_> = fds.into_iter().collect();
        let _ = poll(&mut fds, Some(&time));
        if let Some(watch) = &mut watch {
            watch.follow();
        }
    }
}

/// Returns whether this host has an address.
fn is_there(addr: IpAddr) -> bool {
    UdpSocket::bind((addr, 0)).is_ok()
}

/// Binds identifiers to an open device. Returns false if the device was removed again.
fn restore_listeners(ids: &[Ref<Id>], device: &'static Device, engine: &Arc<Engine>) -> bool {
    let shared = shared_on(device, || Ok(Arc::clone(engine)));
    let Some(shared) = shared.ok().filter(|shared| !shared.context.is_removed()) else {
        return false;
    };
    for id in ids {
        if let Err(errno) = restore_listener(*id, shared) {
            let name = &device.config.name;
            warn!("cannot restore a listener on {name}: error {}", errno.0);
        }
    }
    true
}

fn restore_listener(id: Ref<Id>, shared: &'static Shared) -> Result<(), Errno> {
    let device = shared.context.device;
    let (any, backlog) = {
        let state = id.lock();
        (state.any, state.backlog)
    };
    let links = id.links();
    let mut links = links.iter().map(|(context, _)| context);
    let is_on = links.any(|context| context.device.index == device.index && !context.is_removed());
    let Some(addr) = any.filter(|addr| !is_on && is_for(id, device, addr.ip())) else {
        return Ok(());
    };
    let (link, _) = bind_at(id, shared, addr)?;
    match backlog {
        Some(backlog) => listen_on(link, backlog),
        None => Ok(()),
    }
}
