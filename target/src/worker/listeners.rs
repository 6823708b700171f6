//! Connection manager listeners for the devices of a worker.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use riser_transport::verbs::{CmError, CmId, PortSpace};

use super::device::{Device, Devices};
use crate::sessions::catalog::{Entrance, Serves};

/// Maximum number of pending connection requests for a listener.
const BACKLOG: u32 = 256;

/// Device listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listener {
    /// Port or service ID.
    pub(super) entrance: Entrance,
    /// Protocol for requests to this listener.
    pub(super) serves: Serves,
}

/// Listeners for all devices.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    all: BTreeMap<(usize, CmId), Listener>,
    /// Devices that are available again but have portals without a listener, and the time of the
    /// next attempt.
    refused: Vec<(usize, Instant)>,
}

impl Listeners {
    pub(super) fn get(&self, device: usize, cm: CmId) -> Option<Listener> {
        self.all.get(&(device, cm)).copied()
    }

    pub(super) fn insert(&mut self, device: usize, cm: CmId, listener: Listener) {
        self.all.insert((device, cm), listener);
    }

    /// Returns true if there is a listener for this device and port.
    pub(super) fn has(&self, device: usize, entrance: Entrance) -> bool {
        let mut all = self.all.iter();
        all.any(|((own, _), listener)| *own == device && listener.entrance == entrance)
    }

    /// Removes all listeners of a device that was closed or removed.
    pub(super) fn remove_device(&mut self, device: usize) {
        self.all.retain(|(own, _), _| *own != device);
        self.refused.retain(|(own, _)| *own != device);
    }

    /// Removes and returns all listeners. The caller has to destroy their identifiers.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (usize, CmId)> {
        std::mem::take(&mut self.all).into_keys()
    }

    /// Updates the listeners of a device. The ones no longer needed are removed, and `destroy` is
    /// called with their identifiers.
    pub(super) fn follow(
        &mut self,
        device: usize,
        entrances: &BTreeMap<Entrance, Serves>,
        mut destroy: impl FnMut(CmId),
    ) {
        self.all.retain(|(own, cm), listener| {
            if *own != device {
                return true;
            }
            let Some(serves) = entrances.get(&listener.entrance) else {
                destroy(*cm);
                return false;
            };
            listener.serves = *serves;
            true
        });
    }

    /// Returns the RDMA CM ports of all active devices. This doesn't include additional
    /// shared-memory devices, because they are only used by processes on this host.
    pub(super) fn ports(&self, devices: &Devices) -> Vec<SocketAddr> {
        let open = self
            .all
            .iter()
            .filter(|((own, _), _)| devices.is_open(*own) && devices.is_portal_device(*own));
        open.filter_map(|((device, _), listener)| match listener.entrance {
            Entrance::Port(port) => Some((devices.addr(*device), port).into()),
            Entrance::Service(_) => None,
        })
        .collect()
    }

    /// Adds a device with failed portals, to be tried again.
    pub(super) fn note_refused(&mut self, device: usize, again: Instant) {
        self.refused.push((device, again));
    }

    /// Returns true if there are failed portals for a device.
    pub(super) fn is_refused(&self, device: usize) -> bool {
        self.refused.iter().any(|(own, _)| *own == device)
    }

    /// Returns the time of the next attempt to listen.
    pub(super) fn next_try(&self) -> Option<Instant> {
        self.refused.iter().map(|(_, at)| *at).min()
    }

    /// Removes and returns a device if it is time to try its failed portals again.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<usize> {
        let at = self.refused.iter().position(|(_, at)| *at <= now)?;
        Some(self.refused.remove(at).0)
    }
}

/// Creates a listener for a device with address `addr`.
///
/// # Errors
/// Returns an error from the connection manager, for example if the address is in use.
pub(super) fn listen(
    dev: &mut (dyn Device + 'static),
    addr: std::net::IpAddr,
    entrance: Entrance,
) -> Result<CmId, CmError> {
    let space = match entrance {
        Entrance::Port(_) => PortSpace::Tcp,
        Entrance::Service(service_id) => PortSpace::Ib {
            service_id,
            mask: u64::MAX,
        },
    };
    let id = dev.create_id(space)?;
    let bound = match entrance {
        Entrance::Port(port) => dev.bind_addr(id, (addr, port).into()),
        Entrance::Service(_) => Ok(()),
    };
    if let Err(error) = bound.and_then(|()| dev.listen(id, BACKLOG)) {
        // The listener was not started.
        let _ = dev.destroy_id(id);
        return Err(error);
    }
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use riser_transport::shm::{Shm, ShmConfig};
    use riser_transport::verbs::Handle;

    use super::super::device::Opened;
    use super::super::device_slots::DeviceKind;
    use super::*;

    fn cm(number: u32) -> CmId {
        CmId(Handle::new(number, 1))
    }

    fn listener(port: u16) -> Listener {
        Listener {
            entrance: Entrance::Port(port),
            serves: Serves::Srp,
        }
    }

    #[test]
    fn listeners_follow_entrances_of_device() {
        let mut listeners = Listeners::default();
        listeners.insert(0, cm(1), listener(5000));
        listeners.insert(0, cm(2), listener(5001));
        listeners.insert(1, cm(1), listener(5001));
        let portal = SocketAddr::from(([10, 0, 0, 1], 5000));
        let entrances = BTreeMap::from([(Entrance::Port(5000), Serves::Iser(portal))]);
        let mut destroyed = Vec::new();
        listeners.follow(0, &entrances, |cm| destroyed.push(cm));
        assert_eq!(destroyed, [cm(2)]);
        let kept = listeners.get(0, cm(1)).unwrap();
        assert_eq!(kept.serves, Serves::Iser(portal));
        assert!(!listeners.has(0, Entrance::Port(5001)));
        assert!(listeners.has(1, Entrance::Port(5001)), "another device");
        listeners.remove_device(1);
        assert_eq!(listeners.take_all().collect::<Vec<_>>(), [(0, cm(1))]);
    }

    #[test]
    fn ports_belong_to_device_with_address() {
        let at = IpAddr::from([127, 3, 0, 2]);
        for (kind, is_listening) in [(DeviceKind::Shared, false), (DeviceKind::Portal, true)] {
            let device = Box::new(Shm::open(ShmConfig::new(at)).unwrap());
            let devices = Devices::new(vec![Opened::Shm { device, kind }]).unwrap();
            let mut listeners = Listeners::default();
            listeners.insert(0, cm(1), listener(5000));
            let ports = listeners.ports(&devices);
            assert_eq!(
                ports == [SocketAddr::new(at, 5000)],
                is_listening,
                "{ports:?}"
            );
            assert_eq!(ports.is_empty(), !is_listening);
        }
    }

    #[test]
    fn refused_portals_are_retried_when_due() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let mut listeners = Listeners::default();
        listeners.note_refused(0, later);
        listeners.note_refused(1, now);
        assert_eq!(listeners.next_try(), Some(now));
        assert_eq!(listeners.take_due(now), Some(1));
        assert_eq!(listeners.take_due(now), None);
        assert!(listeners.is_refused(0) && !listeners.is_refused(1));
        listeners.remove_device(0);
        assert_eq!(listeners.next_try(), None);
    }
}
