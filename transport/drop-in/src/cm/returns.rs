//! Identifiers at all devices, and devices that come back.
//!
//! An identifier that is bound to an address which stands for all devices is on a device again, and
//! listens there, when that was removed and has come back, as in Linux (`cma_add_one()`). No call of
//! the program has to do with that. So a thread waits for the address of such a device, as long as
//! there is such an identifier.

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

/// Time between two looks for an address, of which the kernel gives notice as well. Where the device
/// cannot be opened though its address is there, it doubles each time until that goes.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// The identifiers that are bound to all devices, of this process.
static IDS: Mutex<Own<Vec<Ref<Id>>>> = Mutex::new(Own::new(Vec::new()));

/// Indices of the devices that a thread of this process waits for.
static AWAITED: Mutex<Own<BTreeSet<usize>>> = Mutex::new(Own::new(BTreeSet::new()));

/// Something of the process that has made it. A child has none of it, nor the threads that go with it.
struct Own<T> {
    generation: u32,
    value: T,
}

impl<T: Default> Own<T> {
    /// Of the first process.
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

/// The right to change the devices of these identifiers. Its lock comes before all others, and the
/// process does not fork meanwhile.
pub(super) type Held = MutexGuard<'static, ()>;

/// Takes the lock.
pub(super) fn hold() -> Held {
    unpoisoned(AT_ALL.lock())
}

/// Takes the lock for a call about an identifier, if that is bound to all devices.
pub(super) fn hold_for(id: Ref<Id>) -> Option<Held> {
    let is_at_all = id.lock().any.is_some();
    is_at_all.then(hold)
}

/// Enters an identifier that is bound to all devices.
pub(super) fn enter(_: &Held, id: Ref<Id>) {
    id.lock().is_in_list = true;
    unpoisoned(IDS.lock()).get().push(id);
}

/// Forgets an identifier that is destroyed. Others do not wait for a device that opens for the sake of
/// those in the list.
pub(super) fn forget(id: Ref<Id>) {
    let is_in_list = id.lock().is_in_list;
    if is_in_list {
        let _held = hold();
        unpoisoned(IDS.lock()).get().retain(|other| *other != id);
    }
}

/// Waits for a device that was removed, for the sake of the identifiers at all devices. The device may
/// be locked.
pub(super) fn await_return(device: &'static Device) {
    if !unpoisoned(AWAITED.lock()).get().insert(device.index) {
        return;
    }
    let name = format!("return-{}", device.config.name);
    if let Err(error) = crate::thread::spawn(name, move || wait(device)) {
        unpoisoned(AWAITED.lock()).get().remove(&device.index);
        let name = &device.config.name;
        warn!(%error, "nothing will listen on {name} when it is back");
    }
}

/// The thread.
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
        // Without the lock, for which threads that fork or listen wait: this may take seconds.
        let opened = (is_there && is_wanted)
            .then(|| engine(device).ok())
            .flatten();
        {
            let _held = hold();
            let ids = unpoisoned(IDS.lock()).get().clone();
            // Before they are put on the device, which may be removed again at once.
            unpoisoned(AWAITED.lock()).get().remove(&device.index);
            if ids.is_empty() || opened.is_some_and(|engine| put_on(&ids, device, &engine)) {
                return;
            }
            if !unpoisoned(AWAITED.lock()).get().insert(device.index) {
                // Another thread has begun to wait.
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

/// Whether this host has an address.
fn is_there(addr: IpAddr) -> bool {
    UdpSocket::bind((addr, 0)).is_ok()
}

/// Puts identifiers on a device that is open; false where it is not any longer.
fn put_on(ids: &[Ref<Id>], device: &'static Device, engine: &Arc<Engine>) -> bool {
    let shared = shared_on(device, || Ok(Arc::clone(engine)));
    let Some(shared) = shared.ok().filter(|shared| !shared.context.is_removed()) else {
        return false;
    };
    for id in ids {
        if let Err(errno) = put_one_on(*id, shared) {
            let name = &device.config.name;
            warn!(
                "a listener is not on {name}, which is back: error {}",
                errno.0
            );
        }
    }
    true
}

fn put_one_on(id: Ref<Id>, shared: &'static Shared) -> Result<(), Errno> {
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
