//! Table of mappings.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::is_same;

/// Maximum number of mappings, equal to the number of ports of an address.
pub const MAX_MAPPINGS: usize = 65_536;

/// Mapping of a local address.
#[derive(Debug)]
pub struct Mapping<R> {
    /// Address used by programs. An unspecified IP address matches all addresses of the host.
    pub local: SocketAddr,
    /// Address used by the device, with the same IP address.
    pub mapped: SocketAddr,
    /// Kernel client that owns the mapping, or `None` for a mapping of this program.
    pub owner: Option<u8>,
    /// Number of listeners and connections that use the mapping, at least one.
    pub(super) users: u32,
    /// Reservation of the mapped port, unless the device reserves the port.
    pub(super) _reservation: Option<R>,
}

impl<R> Mapping<R> {
    /// Returns the address to which a peer must connect in order to reach `local`.
    pub(super) fn mapped_of(&self, local: SocketAddr) -> SocketAddr {
        if self.mapped.ip().is_unspecified() {
            SocketAddr::new(local.ip(), self.mapped.port())
        } else {
            self.mapped
        }
    }
}

/// Conflict of a new mapping with an existing one.
pub(super) enum Conflict {
    /// The addresses are equal.
    Same,
    /// One address includes the other.
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

    /// Returns the mapping of exactly this address.
    pub(super) fn get_mut(&mut self, local: SocketAddr) -> Option<&mut Mapping<R>> {
        self.by_local.get_mut(&key(local))
    }

    /// Returns the mapping for this address, or else the wildcard mapping.
    pub(super) fn serving(&self, local: SocketAddr) -> Option<&Mapping<R>> {
        let own = self.by_local.get(&key(local));
        own.or_else(|| self.by_local.get(&key(unspecified(local))))
    }

    /// Returns the conflict of a new mapping of this address.
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

    /// Adds a mapping without conflicts.
    pub(super) fn insert(&mut self, mapping: Mapping<R>) {
        self.by_local.insert(key(mapping.local), mapping);
    }

    /// Removes a user from the owner's mapping of exactly this address, and removes the mapping
    /// with its last user. Returns `false` if the owner has no such mapping.
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

/// Returns the wildcard address of the same IP version, with the same port.
fn unspecified(addr: SocketAddr) -> SocketAddr {
    let ip = match addr {
        SocketAddr::V4(_) => IpAddr::from([0; 4]),
        SocketAddr::V6(_) => IpAddr::from([0_u16; 8]),
    };
    SocketAddr::new(ip, addr.port())
}
