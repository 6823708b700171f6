//! The table of mappings.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::is_same;

/// Largest number of mappings, as many as there are ports of an address.
pub const MAX_MAPPINGS: usize = 65_536;

/// An address of this host and the one that it is mapped to.
#[derive(Debug)]
pub struct Mapping<R> {
    /// The address that programs use. Its IP address may be unspecified: then it stands for all of
    /// the host's.
    pub local: SocketAddr,
    /// The address that the device uses. Its IP address is the local one.
    pub mapped: SocketAddr,
    /// Client of the kernel's whose mapping it is; none for one of this program's own.
    pub owner: Option<u8>,
    /// Number of listeners and connections that use it, one or more.
    pub(super) users: u32,
    /// Keeps the mapped port from other programs; none where the port is the device's to take.
    pub(super) _reservation: Option<R>,
}

impl<R> Mapping<R> {
    /// The address that a peer connects to when it wants to reach `local`.
    pub(super) fn mapped_of(&self, local: SocketAddr) -> SocketAddr {
        if self.mapped.ip().is_unspecified() {
            SocketAddr::new(local.ip(), self.mapped.port())
        } else {
            self.mapped
        }
    }
}

/// What stands in the way of a new mapping.
pub(super) enum Conflict {
    /// A mapping of the same address.
    Same,
    /// One of an address that includes it, or is included by it.
    Overlap,
}

/// Mappings by their local address.
#[derive(Debug)]
pub(super) struct Mappings<R> {
    by_local: HashMap<(IpAddr, u16), Mapping<R>>,
}

impl<R> Mappings<R> {
    pub(super) fn new() -> Self {
        Self {
            by_local: HashMap::new(),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Mapping<R>> {
        self.by_local.values()
    }

    pub(super) fn is_full(&self) -> bool {
        self.by_local.len() >= MAX_MAPPINGS
    }

    /// The mapping of exactly this address.
    pub(super) fn get_mut(&mut self, local: SocketAddr) -> Option<&mut Mapping<R>> {
        self.by_local.get_mut(&key(local))
    }

    /// The mapping that serves this address: its own, or that of all addresses of the host.
    pub(super) fn serving(&self, local: SocketAddr) -> Option<&Mapping<R>> {
        let own = self.by_local.get(&key(local));
        own.or_else(|| self.by_local.get(&key(unspecified(local))))
    }

    /// The mapping in whose way one of this address would be.
    pub(super) fn conflict(&self, local: SocketAddr) -> Option<Conflict> {
        if self.by_local.contains_key(&key(local)) {
            return Some(Conflict::Same);
        }
        let overlaps = match local.ip().is_unspecified() {
            true => self
                .iter()
                .any(|m| m.local.port() == local.port() && m.local.is_ipv4() == local.is_ipv4()),
            false => self.by_local.contains_key(&key(unspecified(local))),
        };
        overlaps.then_some(Conflict::Overlap)
    }

    /// Adds a mapping whose address is in the way of no other.
    pub(super) fn insert(&mut self, mapping: Mapping<R>) {
        self.by_local.insert(key(mapping.local), mapping);
    }

    /// Takes a user from the owner's mapping of exactly this address, and with the last the
    /// mapping; false if the owner has none.
    pub(super) fn release(&mut self, owner: Option<u8>, local: SocketAddr) -> bool {
        let mapping = self.by_local.get_mut(&key(local));
        let Some(mapping) = mapping.filter(|mapping| mapping.owner == owner) else {
            return false;
        };
        debug_assert!(is_same(mapping.local, local), "found by its address");
        mapping.users -= 1;
        if mapping.users == 0 {
            self.by_local.remove(&key(local));
        }
        true
    }
}

fn key(addr: SocketAddr) -> (IpAddr, u16) {
    (addr.ip(), addr.port())
}

/// The address that stands for all of the host's, of the same IP version, with the same port.
fn unspecified(addr: SocketAddr) -> SocketAddr {
    let ip = match addr {
        SocketAddr::V4(_) => IpAddr::from([0; 4]),
        SocketAddr::V6(_) => IpAddr::from([0_u16; 8]),
    };
    SocketAddr::new(ip, addr.port())
}
