//! Identifiers on a single device.

use std::net::{IpAddr, SocketAddr};

use riser_transport::verbs::{CmOption, RdmaCm as _};

use super::{Id, Link, Shared};
use crate::devices::Device;
use crate::errno::Errno;
use crate::object::Ref;

/// Number of requests allowed in addition to the backlog set by the program. The backlog is the
/// number of requests that the program has not responded to. The device also counts requests with
/// responses that are not yet confirmed by their peers, and reserves a part for other peers
/// ([`CmConfig::max_half_open_per_peer`]).
///
/// [`CmConfig::max_half_open_per_peer`]: riser_transport::cm::CmConfig::max_half_open_per_peer
const BEYOND_BACKLOG: u32 = 128;

/// Returns whether an identifier bound to all devices should use this device. The unspecified IPv6
/// address includes IPv4, unless the program has restricted it to its family. Loopback addresses
/// include devices of both families.
pub(super) fn is_for(id: Ref<Id>, device: &Device, addr: IpAddr) -> bool {
    let state = id.lock();
    let only = state.options.iter().rev().find_map(|option| match option {
        CmOption::AddressFamilyOnly(only) => Some(*only),
        _ => None,
    });
    let is_any_family = addr.is_loopback() || (addr.is_ipv6() && only != Some(true));
    is_any_family || device.config.addr.is_ipv4() == addr.is_ipv4()
}

/// Binds an identifier that uses all devices to one of them. Returns the link and the port.
pub(super) fn bind_at(
    id: Ref<Id>,
    shared: &'static Shared,
    addr: SocketAddr,
) -> Result<(Link, u16), Errno> {
    let link = id.link_to(shared)?;
    let bind = |(context, device_id): Link| {
        let space = id.lock().space;
        let mut locked = context.lock();
        let port = locked.take_port(device_id, space, addr.port())?;
        let ip = match addr.ip() {
            ip if ip.is_unspecified() => ip,
            _ => context.device.config.addr,
        };
        locked.nic.bind_addr(device_id, SocketAddr::new(ip, port))?;
        Ok(port)
    };
    match bind(link) {
        Ok(port) => Ok((link, port)),
        Err(errno) => {
            id.lock().links.retain(|other| *other != link);
            id.destroy_link(link);
            Err(errno)
        }
    }
}

/// Listens on a device.
pub(super) fn listen_on((context, device_id): Link, backlog: u32) -> Result<(), Errno> {
    let mut locked = context.lock();
    locked.listen(device_id, backlog + BEYOND_BACKLOG)?;
    locked.transmit();
    Ok(())
}
