//! Local ports: binding to them, and sharing them.
//!
//! The rules are those of Linux (`cma_check_port`). An owner of a port keeps others from binding to
//! it, unless each of them has said that it shares it ([`CmOption::ReuseAddress`]), or they are of two
//! families and stay to them. Who begins to listen must be alone. A port that a request came to
//! belongs to the listener, not to the connection.

use std::net::{IpAddr, SocketAddr};

use chacha20::rand_core::Rng;

use super::Id;
use super::calls::port_space;
use crate::roce::nic::Nic;
#[cfg(doc)]
use crate::verbs::CmOption;
use crate::verbs::{CmError, CmId};
use crate::wire::cma::RdmaPortSpace;

/// First of the ports that are given out where none was asked for.
const FIRST_EPHEMERAL: u16 = 32_768;
/// Number of these ports.
const EPHEMERALS: u16 = 28_232;

impl Nic {
    /// Gives an identifier its local address and port.
    pub(super) fn bind(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        let own = self.local_addr().ip();
        let ip = addr.ip().to_canonical();
        let entry = self.cm_id(id, "bind_addr")?;
        // The unspecified address stands for all of a host's, and so for the device's. That of IPv6
        // includes those of IPv4.
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
            0 => self.free_port(space)?,
            port => {
                let shares = self.cm_id(id, "bind_addr")?.options.reuse;
                self.check_port(id, (space, port), ip, shares)?;
                port
            }
        };
        self.cm.ports.entry((space, port)).or_default().push(id);
        let entry = self.cm_id(id, "bind_addr")?;
        entry.bound = Some(ip);
        entry.local = Some(SocketAddr::new(own, port));
        Ok(())
    }

    /// A free port, from a random one on.
    fn free_port(&mut self, space: RdmaPortSpace) -> Result<u16, CmError> {
        let start = (self.random().next_u32() % u32::from(EPHEMERALS)) as u16;
        (0..EPHEMERALS)
            .map(|i| FIRST_EPHEMERAL + (start + i) % EPHEMERALS)
            .find(|&port| !self.cm.ports.contains_key(&(space, port)))
            .ok_or(CmError::AddressInUse)
    }

    /// Checks that an identifier may own a port beside those that do.
    fn check_port(
        &self,
        id: CmId,
        port: (RdmaPortSpace, u16),
        ip: IpAddr,
        shares: bool,
    ) -> Result<(), CmError> {
        let only = self
            .cm
            .ids
            .get(id)
            .is_ok_and(|entry| entry.options.is_family_only(ip));
        for &owner in self.cm.ports.get(&port).into_iter().flatten() {
            let Ok(entry) = self.cm.ids.get(owner) else {
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

    /// Checks that an identifier shares its port with no other, as a listener must not.
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

    /// An identifier is gone, and with it its claim to its port.
    pub(super) fn leave_port(&mut self, id: CmId, entry: &Id) {
        let (Some(space), Some(local), Some(_)) =
            (port_space(entry.space), entry.local, entry.bound)
        else {
            return;
        };
        let port = (space, local.port());
        if let Some(owners) = self.cm.ports.get_mut(&port) {
            owners.retain(|owner| *owner != id);
            if owners.is_empty() {
                self.cm.ports.remove(&port);
            }
        }
    }
}
