//! Which devices the server has open, and how one is closed on all workers together.
//!
//! A software NIC has a socket per worker behind one address, and packets are steered by the order
//! in which these were bound. So a device whose last portal has gone is closed only when no worker
//! needs it any more, and opened again for the same address only after that; a portal that comes
//! back before takes the device as it is.
//!
//! ```text
//! wanted → unwanted: each worker ends its sessions, and says when it is idle
//!    ↑        │
//!    └────────┤ wanted again: no worker is idle
//!             └→ all are idle → closing → the last one has closed it → free
//! ```

use std::net::IpAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The slots of devices: the same number for all workers.
#[derive(Debug, Default)]
pub struct DeviceSlots {
    slots: Mutex<Vec<Option<OpenDevice>>>,
    /// A slot was freed.
    freed: Condvar,
}

/// What a device is for. An address has one of each kind at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The device that the configuration chooses for an address.
    Portal,
    /// Memory shared with initiators on this host, beside that.
    Shared,
}

/// The device in a slot.
#[derive(Debug)]
struct OpenDevice {
    addr: IpAddr,
    kind: DeviceKind,
    /// Workers that have it.
    holders: u16,
    /// Those that no longer need it, by number.
    idle: Vec<u16>,
    is_wanted: bool,
    is_closing: bool,
}

/// A slot for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSlot {
    /// The device is open there.
    Open {
        /// Slot of the device, on all workers.
        slot: usize,
        /// Whether it was wanted before.
        was_wanted: bool,
    },
    /// It is to be opened there.
    New(usize),
}

impl OpenDevice {
    fn is_at(&self, addr: IpAddr, kind: DeviceKind) -> bool {
        self.addr == addr && self.kind == kind
    }
}

impl DeviceSlots {
    /// A slot for the device at an address, which is wanted from now on. Waits while one at this
    /// address is being closed; `None` if that has not ended after `patience`.
    pub fn take(&self, addr: IpAddr, kind: DeviceKind, patience: Duration) -> Option<DeviceSlot> {
        let is_closing = |slots: &mut Vec<Option<OpenDevice>>| {
            let mut devices = slots.iter().flatten();
            devices.any(|device| device.is_at(addr, kind) && device.is_closing)
        };
        let waited = self
            .freed
            .wait_timeout_while(self.lock(), patience, is_closing);
        let (mut slots, _) = waited.unwrap_or_else(PoisonError::into_inner);
        take_from(&mut slots, addr, kind)
    }

    /// Notes the number of workers that get the device of a new slot.
    pub fn fill(&self, slot: usize, holders: u16) {
        if let Some(device) = &mut self.lock()[slot] {
            device.holders = holders;
        }
    }

    /// A slot is not needed after all.
    pub fn give_back(&self, slot: DeviceSlot) {
        match slot {
            DeviceSlot::New(slot) => self.lock()[slot] = None,
            DeviceSlot::Open { slot, was_wanted } => {
                if let Some(device) = &mut self.lock()[slot] {
                    device.is_wanted = was_wanted;
                }
            }
        }
    }

    /// Only devices at these addresses, of these kinds, are wanted from now on.
    pub fn want(&self, is_wanted: impl Fn(IpAddr, DeviceKind) -> bool) {
        for device in self.lock().iter_mut().flatten() {
            device.is_wanted = is_wanted(device.addr, device.kind);
        }
    }

    /// Notes that a worker no longer needs a device; returns whether it is to close it now.
    pub(crate) fn is_over(&self, slot: usize, worker: u16) -> bool {
        let mut slots = self.lock();
        let Some(device) = slots.get_mut(slot).and_then(Option::as_mut) else {
            return false;
        };
        if device.is_wanted {
            return false;
        }
        // A worker asks in every round.
        if !device.idle.contains(&worker) {
            device.idle.push(worker);
        }
        // From here on `take` waits rather than hand the device out, since workers begin to close
        // their parts of it.
        device.is_closing = device.idle.len() >= usize::from(device.holders);
        device.is_closing
    }

    /// A worker has closed a device.
    pub(super) fn closed(&self, slot: usize) {
        let mut slots = self.lock();
        if let Some(device) = &mut slots[slot] {
            device.holders -= 1;
            if device.holders == 0 {
                slots[slot] = None;
                self.freed.notify_all();
            }
        }
    }

    /// Devices that are open, or being closed.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let slots = self.lock();
        slots.iter().flatten().map(|device| device.addr).collect()
    }

    /// Devices that are wanted.
    #[must_use]
    pub fn wanted(&self) -> Vec<IpAddr> {
        let slots = self.lock();
        let wanted = slots.iter().flatten().filter(|device| device.is_wanted);
        wanted.map(|device| device.addr).collect()
    }

    /// Every change of the table is whole, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Vec<Option<OpenDevice>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the slot of the device at an address, or a free one; `None` while that device is being
/// closed.
fn take_from(
    slots: &mut Vec<Option<OpenDevice>>,
    addr: IpAddr,
    kind: DeviceKind,
) -> Option<DeviceSlot> {
    let mut open = slots.iter_mut().enumerate();
    let found = open.find_map(|(slot, device)| {
        let device = device.as_mut().filter(|device| device.is_at(addr, kind))?;
        Some((slot, device))
    });
    if let Some((slot, device)) = found {
        if device.is_closing {
            return None;
        }
        // Workers that were idle may get sessions again, and have to be idle once more.
        device.idle.clear();
        let was_wanted = std::mem::replace(&mut device.is_wanted, true);
        return Some(DeviceSlot::Open { slot, was_wanted });
    }
    let slot = slots.iter().position(Option::is_none);
    let slot = slot.unwrap_or(slots.len());
    if slot == slots.len() {
        slots.push(None);
    }
    slots[slot] = Some(OpenDevice {
        addr,
        kind,
        holders: 0,
        idle: Vec::new(),
        is_wanted: true,
        is_closing: false,
    });
    Some(DeviceSlot::New(slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(host: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, host])
    }

    #[test]
    fn a_device_is_closed_by_all_together_and_its_slot_is_used_again() {
        let slots = DeviceSlots::default();
        assert_eq!(
            slots.take(addr(1), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(0))
        );
        slots.fill(0, 2);
        assert_eq!(
            slots.take(addr(2), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(1))
        );
        slots.fill(1, 1);
        assert!(!slots.is_over(0, 0), "it is wanted");
        slots.want(|a, _| a == addr(2));
        assert!(!slots.is_over(0, 0));
        assert!(!slots.is_over(0, 0), "the other one still needs it");
        assert!(slots.is_over(0, 1));
        assert_eq!(
            slots.take(addr(1), DeviceKind::Portal, Duration::ZERO),
            None,
            "it is being closed"
        );
        assert!(slots.is_over(0, 0));
        slots.closed(0);
        assert_eq!(slots.addresses(), [addr(1), addr(2)]);
        slots.closed(0);
        assert_eq!(
            slots.take(addr(1), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(0))
        );
    }

    #[test]
    fn a_device_that_is_wanted_again_stays() {
        let slots = DeviceSlots::default();
        slots.take(addr(1), DeviceKind::Portal, Duration::ZERO);
        slots.fill(0, 2);
        slots.want(|_, _| false);
        assert!(!slots.is_over(0, 0));
        let taken = slots
            .take(addr(1), DeviceKind::Portal, Duration::ZERO)
            .unwrap();
        let again = DeviceSlot::Open {
            slot: 0,
            was_wanted: false,
        };
        assert_eq!(taken, again);
        assert!(!slots.is_over(0, 0) && !slots.is_over(0, 1));
        // What wanted it has failed.
        slots.give_back(taken);
        assert!(!slots.is_over(0, 1));
        assert!(slots.is_over(0, 0));
    }

    #[test]
    fn a_device_that_is_being_closed_is_waited_for() {
        let slots = DeviceSlots::default();
        slots.take(addr(1), DeviceKind::Portal, Duration::ZERO);
        slots.fill(0, 1);
        slots.want(|_, _| false);
        assert!(slots.is_over(0, 0));
        let taken = std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| slots.take(addr(1), DeviceKind::Portal, Duration::from_secs(60)));
            slots.closed(0);
            waiting.join().unwrap()
        });
        assert_eq!(taken, Some(DeviceSlot::New(0)));
    }
}
