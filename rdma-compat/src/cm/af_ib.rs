//! Addresses passed by programs, including InfiniBand addresses (`AF_IB`), which consist of a GID
//! and a service ID instead of a port.
//!
//! On RoCE, a GID is an IP address, so such an address identifies the device that has this IP
//! address. The service ID contains the port space and the port, or is an arbitrary service ID of a
//! destination. The only difference on the wire is that the private data of a request has no
//! address header (Linux: `cma_user_data_offset`), so both programs must use such addresses.

use std::mem::zeroed;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use riser_rdma_core_sys::bindings::*;
use riser_transport::nic::rdma_cm::port_space;
use riser_transport::verbs::{Gid, PortSpace};
use riser_transport::wire::cm_msg::ServiceId;
use riser_transport::wire::cma::RdmaPortSpace;

use super::{address, write_address};
use crate::errno::Errno;

/// Address family of InfiniBand addresses.
pub(super) const AF_INFINIBAND: i32 = AF_IB as i32;

/// Bits of a service ID that contain the port space.
const SPACE_MASK: u64 = !0xffff;

/// A service ID, and a mask of the relevant bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) id: u64,
    pub(super) mask: u64,
}

impl Service {
    /// Returns the service ID of a port.
    pub(super) fn of(space: PortSpace, port: u16) -> Self {
        let id = match (space, port_space(space)) {
            (PortSpace::Ib { service_id, .. }, _) => service_id,
            (_, Some(space)) => space.service_id(port).0,
            (_, None) => 0,
        };
        Self { id, mask: !0 }
    }

    /// Returns the port that an identifier should use, or 0 for any port.
    pub(super) fn port(self) -> u16 {
        (self.id & self.mask & !SPACE_MASK) as u16
    }

    /// Returns the port space of an identifier that was created in `space` and uses this as its own
    /// service ID (Linux: `cma_select_ib_ps`).
    ///
    /// # Errors
    /// Returns `EPROTONOSUPPORT` if this port space is not allowed.
    pub(super) fn space(self, space: PortSpace) -> Result<PortSpace, Errno> {
        let all = [
            (PortSpace::IbIp, RdmaPortSpace::Ib),
            (PortSpace::Tcp, RdmaPortSpace::Tcp),
            (PortSpace::Udp, RdmaPortSpace::Udp),
        ];
        let mask = self.mask & SPACE_MASK;
        let mut fits = all.into_iter().filter(|(candidate, ports)| {
            let may = space == PortSpace::IbIp || space == *candidate;
            may && self.id & mask == ports.service_id(0).0 & mask
        });
        let (found, _) = fits.next().ok_or(Errno(libc::EPROTONOSUPPORT))?;
        Ok(found)
    }

    /// Returns the port space and port of a destination, or its bare service ID.
    pub(super) fn destination(self) -> (PortSpace, u16) {
        match RdmaPortSpace::of(ServiceId(self.id)) {
            Some((RdmaPortSpace::Tcp, port)) => (PortSpace::Tcp, port),
            Some((RdmaPortSpace::Udp, port)) => (PortSpace::Udp, port),
            Some((RdmaPortSpace::IpoIb, port)) => (PortSpace::IpoIb, port),
            Some((RdmaPortSpace::Ib, port)) => (PortSpace::IbIp, port),
            None => {
                let (service_id, mask) = (self.id, !0);
                (PortSpace::Ib { service_id, mask }, 0)
            }
        }
    }
}

/// An address passed by a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    /// The IP address and port.
    pub(super) socket: SocketAddr,
    /// Service ID, if it is an InfiniBand address.
    pub(super) service: Option<Service>,
}

impl Address {
    /// Reads an address. Returns `None` if the pointer is null.
    ///
    /// # Errors
    /// Returns `EAFNOSUPPORT` if it is neither an Internet nor an InfiniBand address.
    ///
    /// # Safety
    /// The pointer must be null, or the address must have the size of its family.
    pub(super) unsafe fn read(addr: *const sockaddr) -> Result<Option<Self>, Errno> {
        // SAFETY: guaranteed by the caller. All addresses start with the family.
        unsafe {
            if addr.is_null() || i32::from((*addr).sa_family) != AF_INFINIBAND {
                let socket = address(addr)?;
                return Ok(socket.map(|socket| Self {
                    socket,
                    service: None,
                }));
            }
            let ib = addr.cast::<sockaddr_ib>().read_unaligned();
            let gid = Gid(ib.sib_addr.ib_u.uib_addr8);
            let service = Service {
                id: u64::from_be(ib.sib_sid),
                mask: u64::from_be(ib.sib_sid_mask),
            };
            Ok(Some(Self {
                socket: SocketAddr::new(gid.ip(), (service.id & !SPACE_MASK) as u16),
                service: Some(service),
            }))
        }
    }
}

/// Creates an InfiniBand address.
pub(super) fn infiniband(ip: IpAddr, service: Service) -> sockaddr_ib {
    // The unspecified address is the zero GID in both families.
    let gid = match ip.is_unspecified() {
        true => Gid::from(IpAddr::from(Ipv6Addr::UNSPECIFIED)),
        false => Gid::from(ip),
    };
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut ib: sockaddr_ib = unsafe { zeroed() };
    ib.sib_family = AF_IB as u16;
    ib.sib_pkey = 0xffff_u16.to_be();
    ib.sib_addr.ib_u.uib_addr8 = gid.0;
    ib.sib_sid = service.id.to_be();
    ib.sib_sid_mask = service.mask.to_be();
    ib
}

/// Writes an address to a route.
///
/// # Safety
/// There must be enough space for an address of any family.
pub(super) unsafe fn write(place: *mut sockaddr, addr: SocketAddr, service: Option<Service>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match service {
            None => write_address(place, addr),
            Some(service) => place
                .cast::<sockaddr_ib>()
                .write_unaligned(infiniband(addr.ip(), service)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: u64 = 0x0106_0000;

    #[test]
    fn identifier_uses_port_space_of_service() {
        let space = |id, mask, created| Service { id, mask }.space(created).map_err(|e| e.0);
        for (created, own) in [
            (PortSpace::Tcp, Ok(PortSpace::Tcp)),
            (PortSpace::IbIp, Ok(PortSpace::Tcp)),
            (PortSpace::Udp, Err(libc::EPROTONOSUPPORT)),
            (PortSpace::IpoIb, Err(libc::EPROTONOSUPPORT)),
        ] {
            assert_eq!(space(TCP | 7, !0, created), own);
            // Bits that are not in the mask are ignored.
            assert_eq!(space(TCP | 7, SPACE_MASK, created), own);
        }
        assert_eq!(space(0, 0, PortSpace::Udp), Ok(PortSpace::Udp));
        assert_eq!(space(0, 0, PortSpace::IbIp), Ok(PortSpace::IbIp));
        let other = space(0x1000_0000_0000_0001, !0, PortSpace::IbIp);
        assert_eq!(other, Err(libc::EPROTONOSUPPORT));
        let port = |mask| Service { id: TCP | 7, mask }.port();
        assert_eq!((port(!0), port(SPACE_MASK)), (7, 0));
    }

    #[test]
    fn destination_can_be_bare_service_id() {
        let of = |id| Service { id, mask: 0 }.destination();
        assert_eq!(of(TCP | 7471), (PortSpace::Tcp, 7471));
        let service_id = 0x1000_0000_0000_0001;
        assert_eq!(
            of(service_id),
            (
                PortSpace::Ib {
                    service_id,
                    mask: !0
                },
                0
            )
        );
        let own = Service::of(PortSpace::Tcp, 7471);
        assert_eq!((own.id, own.mask), (TCP | 7471, !0));
        assert_eq!(Service::of(of(service_id).0, 0).id, service_id);
    }
}
