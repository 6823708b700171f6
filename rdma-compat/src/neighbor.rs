//! Ethernet addresses of destinations (`ibv_resolve_eth_l2_from_gid`), as known by the kernel.
//!
//! The device does not need them, because it sends using a socket, but programs that build packets
//! for other devices do. We query the kernel via netlink (RFC 3549) for a route to the destination,
//! the neighbor, and the interface, which may be a VLAN.

use std::io;
use std::mem::zeroed;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use riser_rdma_core_sys::bindings::{ibv_ah_attr, ibv_context};
use riser_transport::netif::{interface_index, is_local};
use riser_transport::verbs::{Gid, Verbs as _};

use crate::context::context_of;
use crate::errno::{Errno, number};

/// Returned if a destination is not in a VLAN.
const NO_VLAN: u16 = 0xffff;

/// Timeout for resolving a neighbor, and interval between queries.
const PATIENCE: Duration = Duration::from_secs(3);
const INTERVAL: Duration = Duration::from_millis(10);

/// Attributes and states of `linux/rtnetlink.h`, `linux/neighbour.h` and `linux/if_link.h`.
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_USABLE: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80;
const IFLA_ADDRESS: u16 = 1;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_VLAN_ID: u16 = 1;

/// Size in bytes of a message header, and of the headers of routes, neighbors and interfaces that
/// follow it.
const HEADER: usize = 16;
const ROUTE: usize = 12;
const NEIGHBOUR: usize = 12;
const LINK: usize = 16;

/// Maximum number of bytes received from the kernel at a time.
const ROOM: usize = 32 << 10;

type Mac = [u8; 6];

/// `ibv_resolve_eth_l2_from_gid`: returns the MAC address and the VLAN of a destination.
pub(crate) unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    context: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut u8,
    vlan: *mut u16,
) -> std::ffi::c_int {
    // SAFETY: the program passes valid pointers, as required by the header.
    number(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above, and a GID is 16 bytes.
        let (attr, gid) = unsafe {
            let attr = attr.as_ref().ok_or(Errno::INVALID)?;
            (attr, Gid(attr.grh.dgid.raw))
        };
        if attr.is_global == 0 || mac.is_null() || vlan.is_null() {
            return Err(Errno::INVALID);
        }
        let from = {
            let nic = &context.lock().nic;
            nic.query_gid(attr.port_num, attr.grh.sgid_index.into())?
                .ip()
        };
        let to = gid.ip();
        let (found, tag) = resolve(from, to)?;
        // SAFETY: the program provides memory for both.
        unsafe {
            mac.cast::<Mac>().write_unaligned(found);
            vlan.write(tag);
        }
        Ok(())
    }))
}

fn resolve(from: IpAddr, to: IpAddr) -> io::Result<(Mac, u16)> {
    let kernel = Netlink::open()?;
    if to.is_multicast() {
        let index = interface_index(from).ok_or(io::ErrorKind::NotFound)?;
        return Ok((group_mac(to), kernel.interface(index)?.1));
    }
    if is_local(to)? {
        let index = interface_index(to).ok_or(io::ErrorKind::NotFound)?;
        return kernel.interface(index);
    }
    let (index, next) = kernel.route(to)?;
    let tag = kernel.interface(index)?.1;
    let start = Instant::now();
    loop {
        if let Some(mac) = kernel.neighbour(index, next)? {
            return Ok((mac, tag));
        }
        if start.elapsed() > PATIENCE {
            return Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH));
        }
        // The kernel only resolves a neighbor if something is sent to it. We use the port of the
        // discard service.
        UdpSocket::bind(SocketAddr::new(from, 0))?.send_to(&[0], SocketAddr::new(to, 9))?;
        std::thread::sleep(INTERVAL);
    }
}

/// Returns the MAC address of a multicast group (RFC 1112, section 6.4; RFC 2464, section 7).
fn group_mac(group: IpAddr) -> Mac {
    match group {
        IpAddr::V4(v4) => {
            let [_, b, c, d] = v4.octets();
            [0x01, 0x00, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(v6) => {
            let [.., a, b, c, d] = v6.octets();
            [0x33, 0x33, a, b, c, d]
        }
    }
}

/// A socket for querying the kernel's tables.
struct Netlink(OwnedFd);

impl Netlink {
    fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: the call creates a descriptor, or fails.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
        match fd {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: it is new and has no other owner.
            _ => Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) })),
        }
    }

    /// Returns the interface and the next hop for a destination.
    fn route(&self, to: IpAddr) -> io::Result<(u32, IpAddr)> {
        let dst = bytes_of(to);
        let mut body = vec![0; ROUTE];
        (body[0], body[1]) = (family(to), (dst.len() * 8) as u8);
        push(&mut body, RTA_DST, &dst);
        let messages = self.query_kernel(libc::RTM_GETROUTE, 0, &body)?;
        let message = messages.first().and_then(|message| message.get(ROUTE..));
        let message = message.ok_or(io::ErrorKind::NotFound)?;
        let index = find(message, RTA_OIF).and_then(word);
        let next = find(message, RTA_GATEWAY).and_then(address);
        Ok((index.ok_or(io::ErrorKind::NotFound)?, next.unwrap_or(to)))
    }

    /// Returns the MAC address of a neighbor, if it is known.
    fn neighbour(&self, index: u32, at: IpAddr) -> io::Result<Option<Mac>> {
        let mut body = vec![0; NEIGHBOUR];
        body[0] = family(at);
        let messages = self.query_kernel(libc::RTM_GETNEIGH, libc::NLM_F_DUMP, &body)?;
        Ok(messages
            .iter()
            .find_map(|message| neighbour(message, index, at)))
    }

    /// Returns the MAC address of an interface, or zeroes if there is no address, and its VLAN.
    fn interface(&self, index: u32) -> io::Result<(Mac, u16)> {
        let mut body = vec![0; LINK];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        let messages = self.query_kernel(libc::RTM_GETLINK, 0, &body)?;
        let message = messages.first().and_then(|message| message.get(LINK..));
        Ok(interface(message.ok_or(io::ErrorKind::NotFound)?))
    }

    /// Queries entries of a table. Returns messages without their headers.
    fn query_kernel(&self, kind: u16, flags: i32, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let flags = (libc::NLM_F_REQUEST | flags) as u16;
        let mut request = Vec::with_capacity(HEADER + body.len());
        request.extend(((HEADER + body.len()) as u32).to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(flags.to_ne_bytes());
        request.extend([0; 8]);
        request.extend(body);
        // SAFETY: all zeroes is a valid address. With the family, it is the address of the kernel.
        let mut kernel: libc::sockaddr_nl = unsafe { zeroed() };
        kernel.nl_family = libc::AF_NETLINK as u16;
        // SAFETY: the request and the address live until the end of the call.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                request.as_ptr().cast(),
                request.len(),
                0,
                (&raw const kernel).cast(),
                size_of::<libc::sockaddr_nl>() as libc::socklen_t,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let is_list = i32::from(flags) & libc::NLM_F_DUMP != 0;
        let mut all = Vec::new();
        let mut room = vec![0; ROOM];
        loop {
            // SAFETY: the buffer has this size.
            let got = unsafe { libc::recv(self.0.as_raw_fd(), room.as_mut_ptr().cast(), ROOM, 0) };
            let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
            let is_end = parse_messages(&room[..got], &mut all)?;
            if is_end || !is_list {
                return Ok(all);
            }
        }
    }
}

/// Reads the messages of a datagram. Returns whether it is the last datagram of the list.
fn parse_messages(mut datagram: &[u8], all: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    while datagram.len() >= HEADER {
        let len = word(&datagram[..4]).ok_or_else(malformed)? as usize;
        let message = datagram.get(HEADER..len).ok_or_else(malformed)?;
        match i32::from(half(&datagram[4..6]).ok_or_else(malformed)?) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let error = message.get(..4).and_then(word).ok_or_else(malformed)?;
                // This is negative, or 0 for an acknowledgement, which we did not request.
                return Err(io::Error::from_raw_os_error(-(error as i32)));
            }
            _ => all.push(message.to_vec()),
        }
        datagram = &datagram[len.next_multiple_of(4).min(datagram.len())..];
    }
    Ok(false)
}

/// Returns the MAC address in an entry of the neighbor table, if it matches the address.
fn neighbour(message: &[u8], index: u32, at: IpAddr) -> Option<Mac> {
    let is_there = word(message.get(4..8)?)? == index;
    let is_usable = half(message.get(8..10)?)? & NUD_USABLE != 0;
    let attributes = message.get(NEIGHBOUR..)?;
    let is_it = find(attributes, NDA_DST).and_then(address) == Some(at);
    let mac = find(attributes, NDA_LLADDR)?;
    (is_there && is_usable && is_it).then(|| mac.try_into().ok())?
}

/// Returns the MAC address and the VLAN in the attributes of an interface.
fn interface(attributes: &[u8]) -> (Mac, u16) {
    let mac = find(attributes, IFLA_ADDRESS).and_then(|mac| mac.try_into().ok());
    let info = find(attributes, IFLA_LINKINFO);
    let is_vlan = |info: &&[u8]| find(info, 1).is_some_and(|kind| kind.starts_with(b"vlan"));
    let data = info
        .filter(is_vlan)
        .and_then(|info| find(info, IFLA_INFO_DATA));
    let tag = data
        .and_then(|data| find(data, IFLA_VLAN_ID))
        .and_then(half);
    (mac.unwrap_or_default(), tag.unwrap_or(NO_VLAN))
}

/// Returns the value of an attribute.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    while attributes.len() >= 4 {
        let len = usize::from(half(&attributes[..2])?);
        let value = attributes.get(4..len)?;
        // The two upper bits are flags.
        if half(&attributes[2..4])? & 0x3fff == wanted {
            return Some(value);
        }
        attributes = &attributes[len.next_multiple_of(4).min(attributes.len())..];
    }
    None
}

fn push(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend(((4 + value.len()) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}

fn word(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

fn half(bytes: &[u8]) -> Option<u16> {
    bytes.try_into().ok().map(u16::from_ne_bytes)
}

fn family(addr: IpAddr) -> u8 {
    match addr {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn bytes_of(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        push(&mut bytes, kind, value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn invalid_lengths_do_not_panic() {
        let mac = [2, 0, 0, 0, 0, 9];
        let at = IpAddr::from([10, 0, 0, 7]);
        let mut entry = vec![libc::AF_INET as u8, 0, 0, 0];
        entry.extend(3u32.to_ne_bytes());
        entry.extend(2u16.to_ne_bytes());
        entry.extend([0, 1]);
        entry.extend(attribute(NDA_LLADDR, &mac));
        entry.extend(attribute(NDA_DST, &[10, 0, 0, 7]));
        assert_eq!(neighbour(&entry, 3, at), Some(mac));
        assert_eq!(neighbour(&entry, 4, at), None, "another interface");
        assert_eq!(neighbour(&entry, 3, IpAddr::from([10, 0, 0, 8])), None);
        entry[8] = 0x20;
        assert_eq!(neighbour(&entry, 3, at), None, "it does not respond");

        let mut info = attribute(1, b"vlan\0");
        info.extend(attribute(
            IFLA_INFO_DATA,
            &attribute(IFLA_VLAN_ID, &[42, 0]),
        ));
        let mut link = attribute(IFLA_ADDRESS, &mac);
        link.extend(attribute(IFLA_LINKINFO | 0x8000, &info));
        let tag = u16::from_ne_bytes([42, 0]);
        assert_eq!(interface(&link), (mac, tag));
        for end in 0..link.len() {
            interface(&link[..end]);
            neighbour(&entry[..end.min(entry.len())], 3, at);
            let _ = parse_messages(&link[..end], &mut Vec::new());
        }
        for wrong in [0u8, 1, 3, 255] {
            link[0] = wrong;
            interface(&link);
        }
    }

    #[test]
    fn empty_message_is_rejected() {
        let mut all = Vec::new();
        assert!(parse_messages(&[0; 32], &mut all).is_err());
        let mut error = 20u32.to_ne_bytes().to_vec();
        error.extend([2, 0, 0, 0]);
        error.extend([0; 8]);
        error.extend((-libc::ENODEV).to_ne_bytes());
        let refused = parse_messages(&error, &mut all).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENODEV));
    }
}
