//! Open devices of the server, and how all workers coordinate to close a device.
//!
//! A software NIC has a socket for each worker, all with the same address. Packets are distributed
//! to the workers based on the order in which these sockets were bound. If the last portal of a
//! device is removed, we can only close it when all workers have stopped using it, and only then
//! open it again for the same address. If a portal is added before that, the device is used again.
//!
//! ```text
//! wanted → unwanted: each worker closes its sessions, then reports that it is idle
//!    ↑        │
//!    └────────┤ wanted again: all workers are set to busy
//!             └→ all are idle → closing → closed by all workers → free
//! ```

use std::net::IpAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Device slots, using the same number on all workers.
#[derive(Debug, Default)]
pub struct DeviceSlots {
    slots: Mutex<Vec<Option<OpenDevice>>>,
    /// Notified when a slot is free.
    freed: Condvar,
}

/// Purpose of a device. There is only one device of each kind for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Device selected for an address by the configuration.
    Portal,
    /// Additional shared-memory device for initiators on this host.
    Shared,
}

/// Device in a slot.
#[derive(Debug)]
struct OpenDevice {
    addr: IpAddr,
    kind: DeviceKind,
    /// Number of workers using this device.
    holders: u16,
    /// Workers that have finished using it.
    idle: Vec<u16>,
    is_wanted: bool,
    is_closing: bool,
}

/// Slot for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSlot {
    /// The device is already open.
    Open {
        /// Slot number for all workers.
        slot: usize,
        /// Set if it was wanted before this call.
        was_wanted: bool,
    },
    /// A new device should be opened in this slot.
    New(usize),
}

impl OpenDevice {
    fn is_at(&self, addr: IpAddr, kind: DeviceKind) -> bool {
        self.addr == addr && self.kind == kind
    }
}

impl DeviceSlots {
    /// Returns the slot for the device at `addr` and marks it as wanted. If a device with this
    /// address is being closed, we have to wait for it. Returns `None` after a timeout of
    /// `patience`.
    pub fn take_slot(
        &self,
        addr: IpAddr,
        kind: DeviceKind,
        patience: Duration,
    ) -> Option<DeviceSlot> {
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

    /// Sets the number of workers using the device in a new slot.
    pub fn fill(&self, slot: usize, holders: u16) {
        if let Some(device) = &mut self.lock()[slot] {
            device.holders = holders;
        }
    }

    /// Releases a slot that is not needed.
    pub fn release(&self, slot: DeviceSlot) {
        match slot {
            DeviceSlot::New(slot) => self.lock()[slot] = None,
            DeviceSlot::Open { slot, was_wanted } => {
                if let Some(device) = &mut self.lock()[slot] {
                    device.is_wanted = was_wanted;
                }
            }
        }
    }

    /// Updates which devices are wanted.
    pub fn want(&self, is_wanted: impl Fn(IpAddr, DeviceKind) -> bool) {
        for device in self.lock().iter_mut().flatten() {
            device.is_wanted = is_wanted(device.addr, device.kind);
        }
    }

    /// Called when a worker has finished using a device. Returns true if the worker should close it
    /// now.
    pub(crate) fn is_over(&self, slot: usize, worker: u16) -> bool {
        let mut slots = self.lock();
        let Some(device) = slots.get_mut(slot).and_then(Option::as_mut) else {
            return false;
        };
        if device.is_wanted {
            return false;
        }
        // This is called by each worker in every round.
        if !device.idle.contains(&worker) {
            device.idle.push(worker);
        }
        // After this, `take_slot` has to wait instead of returning the device, because the workers will
        // start to close it.
        device.is_closing = device.idle.len() >= usize::from(device.holders);
        device.is_closing
    }

    /// Called when a worker has closed a device.
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

    /// Returns the addresses of devices that are open or being closed.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let slots = self.lock();
        slots.iter().flatten().map(|device| device.addr).collect()
    }

    /// Returns the addresses of wanted devices.
    #[must_use]
    pub fn wanted(&self) -> Vec<IpAddr> {
        let slots = self.lock();
        let wanted = slots.iter().flatten().filter(|device| device.is_wanted);
        wanted.map(|device| device.addr).collect()
    }

    /// Ignore poisoning, because the table is always updated in a single step.
    fn lock(&self) -> MutexGuard<'_, Vec<Option<OpenDevice>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the slot of the device at an address or a free slot. Returns `None` while the device is
/// being closed.
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
        // An idle worker may get new sessions, so it has to report this again.
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
    fn device_is_closed_together_and_slot_reused() {
        let slots = DeviceSlots::default();
        assert_eq!(
            slots.take_slot(addr(1), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(0))
        );
        slots.fill(0, 2);
        assert_eq!(
            slots.take_slot(addr(2), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(1))
        );
        slots.fill(1, 1);
        assert!(!slots.is_over(0, 0), "it is wanted");
        slots.want(|a, _| a == addr(2));
        assert!(!slots.is_over(0, 0));
        assert!(!slots.is_over(0, 0), "the other one still needs it");
        assert!(slots.is_over(0, 1));
        assert_eq!(
            slots.take_slot(addr(1), DeviceKind::Portal, Duration::ZERO),
            None,
            "it is being closed"
        );
        assert!(slots.is_over(0, 0));
        slots.closed(0);
        assert_eq!(slots.addresses(), [addr(1), addr(2)]);
        slots.closed(0);
        assert_eq!(
            slots.take_slot(addr(1), DeviceKind::Portal, Duration::ZERO),
            Some(DeviceSlot::New(0))
        );
    }

    #[test]
    fn device_wanted_again_stays_open() {
        let slots = DeviceSlots::default();
        slots.take_slot(addr(1), DeviceKind::Portal, Duration::ZERO);
        slots.fill(0, 2);
        slots.want(|_, _| false);
        assert!(!slots.is_over(0, 0));
        let taken = slots
            .take_slot(addr(1), DeviceKind::Portal, Duration::ZERO)
            .unwrap();
        let again = DeviceSlot::Open {
            slot: 0,
            was_wanted: false,
        };
        assert_eq!(taken, again);
        assert!(!slots.is_over(0, 0) && !slots.is_over(0, 1));
        // Release it because of an error in the caller.
        slots.release(taken);
        assert!(!slots.is_over(0, 1));
        assert!(slots.is_over(0, 0));
    }

    #[test]
    fn closing_device_is_awaited() {
        let slots = DeviceSlots::default();
        slots.take_slot(addr(1), DeviceKind::Portal, Duration::ZERO);
        slots.fill(0, 1);
        slots.want(|_, _| false);
        assert!(slots.is_over(0, 0));
        let taken = std::thread::scope(|scope| {
            let waiting = scope
                .spawn(|| slots.take_slot(addr(1), DeviceKind::Portal, Duration::from_secs(60)));
            slots.closed(0);
            waiting.join().unwrap()
        });
        assert_eq!(taken, Some(DeviceSlot::New(0)));
    }
}
