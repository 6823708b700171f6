//! Binding and sharing of local ports.
//!
//! We use the same rules as Linux (`cma_check_port`). A port can only be used by a single
//! identifier, unless all of them allow sharing ([`CmOption::ReuseAddress`]), or they are bound to
//! different address families and restricted to them. A listener must not share its port. The port
//! of a received request is owned by the listener, not by the connection.

use std::net::{IpAddr, SocketAddr};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::Rng;

use super::calls::port_space;
use super::{CmAgent, Id};
use crate::nic::Device;
#[cfg(doc)]
use crate::verbs::CmOption;
use crate::verbs::{CmError, CmId};
use crate::wire::cma::RdmaPortSpace;

/// First ephemeral port.
const FIRST_EPHEMERAL: u16 = 32_768;
/// Number of ephemeral ports.
const EPHEMERALS: u16 = 28_232;

impl CmAgent {
    /// Sets the local address and port of an id.
    pub(super) fn bind(
        &mut self,
        device: &mut Device,
        id: CmId,
        addr: SocketAddr,
    ) -> Result<(), CmError> {
        let own = device.port.addr().ip();
        let ip = addr.ip().to_canonical();
        let entry = self.cm_id(id, "bind_addr")?;
        // The unspecified address matches all addresses of a host, including the device address.
        // For IPv6, this also includes IPv4 addresses.
        let takes =
            ip.is_ipv4() == own.is_ipv4() || ip.is_ipv6() && !entry.options.is_family_only(ip);
        if ip != own && !(ip.is_unspecified() && takes) {
            return Err(CmError::AddressNotAvailable);
        }
        let Some(space) = port_space(entry.space) else {
            entry.local = Some(SocketAddr::new(own, addr.port()));
            return Ok(());
        };
        let port = match addr.port() {
            0 => self.free_port(space, &mut device.random)?,
            port => {
                let shares = self.cm_id(id, "bind_addr")?.options.reuse;
                self.check_port(id, (space, port), ip, shares)?;
                port
            }
        };
        self.ports.entry((space, port)).or_default().push(id);
        let entry = self.cm_id(id, "bind_addr")?;
        entry.bound = Some(ip);
        entry.local = Some(SocketAddr::new(own, port));
        Ok(())
    }

    /// Returns a free port, starting the search at a random port.
    fn free_port(&self, space: RdmaPortSpace, random: &mut ChaCha20Rng) -> Result<u16, CmError> {
        let start = (random.next_u32() % u32::from(EPHEMERALS)) as u16;
        (0..EPHEMERALS)
            .map(|i| FIRST_EPHEMERAL + (start + i) % EPHEMERALS)
            .find(|&port| !self.ports.contains_key(&(space, port)))
            .ok_or(CmError::AddressInUse)
    }

    /// Checks whether an id can use a port in addition to its current owners.
    fn check_port(
        &self,
        id: CmId,
        port: (RdmaPortSpace, u16),
        ip: IpAddr,
        shares: bool,
    ) -> Result<(), CmError> {
        let only = self
            .ids
            .get(id)
            .is_ok_and(|entry| entry.options.is_family_only(ip));
        for &owner in self.ports.get(&port).into_iter().flatten() {
            let Ok(entry) = self.ids.get(owner) else {
                continue;
            };
            let Some(theirs) = entry.bound.filter(|_| owner != id) else {
                continue;
            };
            let apart =
                only && entry.options.is_family_only(theirs) && ip.is_ipv4() != theirs.is_ipv4();
            if apart || shares && entry.options.reuse {
                continue;
            }
            if ip.is_unspecified() || theirs.is_unspecified() {
                return Err(CmError::AddressNotAvailable);
            }
            if ip == theirs {
                return Err(CmError::AddressInUse);
            }
        }
        Ok(())
    }

    /// Verifies that an id does not share its port, as required for a listener.
    pub(super) fn check_sole_owner(&mut self, id: CmId) -> Result<(), CmError> {
        let entry = self.cm_id(id, "listen")?;
        let (Some(ip), Some(local)) = (entry.bound, entry.local) else {
            return Ok(());
        };
        let Some(space) = port_space(entry.space) else {
            return Ok(());
        };
        self.check_port(id, (space, local.port()), ip, false)
    }

    /// Releases the port of a destroyed id.
    pub(super) fn leave_port(&mut self, id: CmId, entry: &Id) {
        let (Some(space), Some(local), Some(_)) =
            (port_space(entry.space), entry.local, entry.bound)
        else {
            return;
        };
        let port = (space, local.port());
        if let Some(owners) = self.ports.get_mut(&port) {
            owners.retain(|owner| *owner != id);
            if owners.is_empty() {
                self.ports.remove(&port);
            }
        }
    }
}
