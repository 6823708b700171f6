//! The ports of the RDMA CM that are used by the processes of an address.

use std::collections::HashMap;
use std::io;

use riser_transport::wire::cma::RdmaPortSpace;

/// First port and number of ports that are used if no specific port is requested.
const FIRST_EPHEMERAL: u16 = 32_768;
const EPHEMERALS: u16 = 28_232;

/// A port of the RDMA CM.
pub(crate) type Port = (RdmaPortSpace, u16);

/// A process that has allocated a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    slot: u8,
    listens: bool,
}

/// The allocated ports of all processes.
#[derive(Debug, Default)]
pub(super) struct PortTable {
    owners: HashMap<Port, Owner>,
}

impl PortTable {
    /// Allocates a port for the process in a slot, or any free port if `port` is 0. Identifiers of
    /// a process can share a port, so it may already have the port.
    ///
    /// # Errors
    /// Returns `EADDRINUSE` if another process has the port, or if no port is free.
    pub(super) fn allocate(&mut self, slot: u8, (space, port): Port) -> io::Result<u16> {
        let in_use = || io::Error::from(io::ErrorKind::AddrInUse);
        let port = match port {
            0 => self.free_port(space)?.ok_or_else(in_use)?,
            port => port,
        };
        let new = Owner {
            slot,
            listens: false,
        };
        let owner = self.owners.entry((space, port)).or_insert(new);
        match owner.slot == slot {
            true => Ok(port),
            false => Err(in_use()),
        }
    }

    /// Returns a random free port.
    fn free_port(&self, space: RdmaPortSpace) -> io::Result<Option<u16>> {
        let start = getrandom::u32().map_err(io::Error::other)? % u32::from(EPHEMERALS);
        let mut all = (0..u32::from(EPHEMERALS)).map(|i| {
            let offset = (start + i) % u32::from(EPHEMERALS);
            FIRST_EPHEMERAL + offset as u16
        });
        Ok(all.find(|port| !self.owners.contains_key(&(space, *port))))
    }

    /// Returns the slot of the process that has a port.
    pub(super) fn owner(&self, port: Port) -> Option<u8> {
        self.owners.get(&port).map(|owner| owner.slot)
    }

    /// Returns the slot of the process that is listening on a port.
    pub(super) fn listener(&self, port: Port) -> Option<u8> {
        let owner = self.owners.get(&port).filter(|owner| owner.listens);
        owner.map(|owner| owner.slot)
    }

    /// Records whether a process is listening on its port.
    pub(super) fn set_listening(&mut self, slot: u8, port: Port, listens: bool) {
        let owner = self.owners.get_mut(&port);
        if let Some(owner) = owner.filter(|owner| owner.slot == slot) {
            owner.listens = listens;
        }
    }

    /// Frees a port of a process.
    pub(super) fn release(&mut self, slot: u8, port: Port) {
        if self.owner(port) == Some(slot) {
            self.owners.remove(&port);
        }
    }

    /// Frees all ports of a process that has exited.
    pub(super) fn release_all(&mut self, slot: u8) {
        self.owners.retain(|_, owner| owner.slot != slot);
    }
}

#[cfg(test)]
mod tests {
    use RdmaPortSpace::{Tcp, Udp};

    use super::*;

    #[test]
    fn port_belongs_to_single_process() {
        let mut ports = PortTable::default();
        assert_eq!(ports.allocate(1, (Tcp, 4000)).unwrap(), 4000);
        assert_eq!(ports.allocate(1, (Tcp, 4000)).unwrap(), 4000);
        let error = ports.allocate(2, (Tcp, 4000)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(ports.allocate(2, (Udp, 4000)).unwrap(), 4000);
        // Other processes can neither free the port nor listen on it.
        ports.release(2, (Tcp, 4000));
        ports.set_listening(2, (Tcp, 4000), true);
        assert_eq!(ports.owner((Tcp, 4000)), Some(1));
        assert_eq!(ports.listener((Tcp, 4000)), None);
        ports.release(1, (Tcp, 4000));
        assert_eq!(ports.allocate(2, (Tcp, 4000)).unwrap(), 4000);
    }

    #[test]
    fn ephemeral_ports_are_unique() {
        let mut ports = PortTable::default();
        let all: Vec<u16> = (0..EPHEMERALS)
            .map(|i| ports.allocate((i % 2) as u8 + 1, (Tcp, 0)).unwrap())
            .collect();
        let unique: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(unique.len(), all.len());
        assert!(ports.allocate(1, (Tcp, 0)).is_err());
        ports.release_all(1);
        assert!(ports.allocate(2, (Tcp, 0)).is_ok());
    }

    #[test]
    fn exited_process_has_no_listeners() {
        let mut ports = PortTable::default();
        for slot in [1, 2] {
            let port = (Tcp, 4000 + u16::from(slot));
            ports.allocate(slot, port).unwrap();
            ports.set_listening(slot, port, true);
            assert_eq!(ports.listener(port), Some(slot));
        }
        ports.release_all(1);
        assert_eq!(ports.listener((Tcp, 4001)), None);
        assert_eq!(ports.listener((Tcp, 4002)), Some(2));
        ports.set_listening(2, (Tcp, 4002), false);
        assert_eq!(ports.listener((Tcp, 4002)), None);
    }
}
