//! Addresses and state of the only port.

use std::net::{IpAddr, SocketAddr};

use crate::nic::config::{NicConfig, PORT, Wire};
use crate::verbs::{AhAttr, Gid, Mtu, PKey, PortAttr, PortCapabilities, PortState, VerbsError};
use crate::wire::ROCE_PORT;

pub(in crate::nic) fn check_port(port: u8) -> Result<(), VerbsError> {
    if port == PORT {
        Ok(())
    } else {
        Err(VerbsError::InvalidPort(port))
    }
}

/// Verifies that an index is valid for a table with `len` entries.
fn check_index(port: u8, index: u16, len: usize) -> Result<(), VerbsError> {
    check_port(port)?;
    if usize::from(index) < len {
        Ok(())
    } else {
        Err(VerbsError::InvalidIndex(index))
    }
}

/// The port of a device.
#[derive(Debug)]
pub(crate) struct Port {
    /// Device addresses in GID table order.
    addrs: Box<[SocketAddr]>,
    state: PortState,
    capabilities: PortCapabilities,
    wire: Wire,
}

impl Port {
    /// Creates an active port with the addresses from the configuration.
    pub(in crate::nic) fn new(config: &NicConfig) -> Self {
        Self {
            addrs: config
                .addrs()
                .map(|addr| SocketAddr::new(addr, ROCE_PORT))
                .collect(),
            state: PortState::Active,
            capabilities: match config.wire {
                Wire::Network => PortCapabilities::COMMUNICATION_MANAGEMENT,
                Wire::Links | Wire::Streams => PortCapabilities::empty(),
            },
            wire: config.wire,
        }
    }

    /// Returns all addresses in GID table order, with the RoCEv2 port.
    #[inline]
    pub(crate) fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// Returns the first address with the RoCEv2 port.
    #[inline]
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// Returns the current state.
    pub(in crate::nic) fn state(&self) -> PortState {
        self.state
    }

    /// Changes the state. Returns whether it has changed.
    pub(in crate::nic) fn set_state(&mut self, state: PortState) -> bool {
        std::mem::replace(&mut self.state, state) != state
    }

    pub(in crate::nic) fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    /// Sets and clears capabilities. See [`Verbs::modify_port`](crate::verbs::Verbs::modify_port).
    pub(crate) fn modify(
        &mut self,
        port: u8,
        set: PortCapabilities,
        clear: PortCapabilities,
    ) -> Result<(), VerbsError> {
        check_port(port)?;
        if self.wire == Wire::Streams {
            return Err(VerbsError::Unsupported("port capabilities"));
        }
        if !PortCapabilities::OF_PROGRAMS.contains(set | clear) {
            return Err(VerbsError::InvalidParameter("port capabilities"));
        }
        self.capabilities = (self.capabilities | set) - clear;
        Ok(())
    }

    pub(in crate::nic) fn query(&self, port: u8, mtu: Mtu) -> Result<PortAttr, VerbsError> {
        check_port(port)?;
        Ok(PortAttr {
            state: self.state,
            max_mtu: mtu,
            active_mtu: mtu,
            max_msg_size: crate::rc::MAX_MESSAGE,
            gid_table_len: self.addrs.len() as u16,
            pkey_table_len: 1,
            capabilities: self.capabilities,
            addr: self.addr().ip(),
        })
    }

    pub(crate) fn query_gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError> {
        check_index(port, index, self.addrs.len())?;
        Ok(self.addrs[usize::from(index)].ip().into())
    }

    #[allow(clippy::unused_self, reason = "all ports have the same table")]
    pub(crate) fn query_pkey(&self, port: u8, index: u16) -> Result<PKey, VerbsError> {
        check_index(port, index, 1)?;
        Ok(PKey::DEFAULT)
    }

    /// Returns the IP address for an address vector if the device can send to this host.
    pub(in crate::nic) fn reachable(&self, attr: &AhAttr) -> Result<IpAddr, VerbsError> {
        check_index(attr.port, attr.sgid_index, self.addrs.len())?;
        let ip = attr.dgid.ip();
        let from = self.addrs[usize::from(attr.sgid_index)];
        // The address must be a unicast address of the same family.
        if ip.is_ipv4() != from.is_ipv4() || ip.is_unspecified() || ip.is_multicast() {
            return Err(VerbsError::InvalidParameter("destination address"));
        }
        Ok(ip)
    }

    /// Checks the address vector of an address handle.
    pub(in crate::nic) fn check_ah(&self, attr: &AhAttr) -> Result<(), VerbsError> {
        let ip = attr.dgid.ip();
        if ip.is_multicast() && self.has_groups_like(ip) {
            check_index(attr.port, attr.sgid_index, 1)?;
        } else {
            self.reachable(attr)?;
        }
        if attr.flow_label > 0x000f_ffff {
            return Err(VerbsError::InvalidParameter("flow label"));
        }
        Ok(())
    }

    /// Returns whether the wire of this device supports multicast groups of this address family.
    pub(in crate::nic) fn has_groups_like(&self, addr: IpAddr) -> bool {
        self.wire == Wire::Network && addr.is_ipv4() == self.addr().is_ipv4()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> Port {
        Port::new(&NicConfig {
            other_addrs: vec!["fd00::1".parse().unwrap()],
            ..NicConfig::new([10, 0, 0, 1].into(), [7; 32])
        })
    }

    fn ah(dst: &str, sgid_index: u16) -> AhAttr {
        AhAttr {
            sgid_index,
            ..AhAttr::new(Gid::from(dst.parse::<IpAddr>().unwrap()))
        }
    }

    #[test]
    fn destination_must_have_family_of_source() {
        let port = port();
        assert!(port.reachable(&ah("10.0.0.2", 0)).is_ok());
        assert!(port.reachable(&ah("fd00::2", 1)).is_ok());
        for (dst, source) in [
            ("fd00::2", 0),
            ("10.0.0.2", 1),
            ("10.0.0.2", 2),
            ("0.0.0.0", 0),
            ("239.1.2.3", 0),
        ] {
            assert!(port.reachable(&ah(dst, source)).is_err(), "{dst}");
        }
    }

    #[test]
    fn group_is_sent_from_first_address() {
        let port = port();
        assert!(port.check_ah(&ah("239.1.2.3", 0)).is_ok());
        assert!(port.check_ah(&ah("239.1.2.3", 1)).is_err());
        assert!(port.check_ah(&ah("ff15::1", 1)).is_err());
        let links = NicConfig {
            wire: Wire::Links,
            ..NicConfig::new([10, 0, 0, 1].into(), [7; 32])
        };
        assert!(Port::new(&links).check_ah(&ah("239.1.2.3", 0)).is_err());
    }
}
