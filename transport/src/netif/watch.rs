//! Watches an address of this host.
//!
//! The kernel uses netlink (rtnetlink(7)) to report if an address was added to or removed from an
//! interface, and if the link state has changed. The socket of the watch is also used to query
//! interfaces, because it belongs to the network namespace where the watch was created, which may
//! not be that of the current thread.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::{Addresses, link_flags};

/// Notification groups: links, IPv4 addresses and IPv6 addresses.
const GROUPS: u32 =
    (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;

/// Maximum number of notifications per call. They may not be related to our address.
const MAX_NOTICES: usize = 64;

/// Buffer size for a notification. Link notifications can exceed this, but we don't need the
/// truncated data.
const NOTICE: usize = 4096;

/// Size of the headers for a message, an address and a link, and alignment of the attributes.
const MESSAGE_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ALIGNMENT: usize = 4;

/// Address state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressState {
    /// The address is used by an interface, and its link is up. Also used if the address was never
    /// used by an interface, as it may be local due to a route.
    Up,
    /// The address is used by an interface, but it is down or has no carrier.
    Down,
    /// The address is not used by any interface anymore.
    Absent,
    /// The interface that used the address has been removed.
    Gone,
}

/// Watch for an address of this host.
#[derive(Debug)]
pub struct AddressWatch {
    socket: OwnedFd,
    addr: IpAddr,
    /// Indexes of the interfaces using the address.
    holders: Vec<u32>,
    /// Last interface that used the address.
    last: Option<u32>,
    state: AddressState,
}

/// Notification type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notice {
    /// An address was added to or removed from an interface.
    Address {
        index: u32,
        addr: IpAddr,
        is_new: bool,
    },
    /// A link was changed or removed.
    Link { index: u32 },
}

impl AddressWatch {
    /// Starts watching an address.
    ///
    /// # Errors
    /// Returns an error from the netlink socket or `getifaddrs(3)`.
    pub fn open(addr: IpAddr) -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRoute,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
        let mut watch = Self {
            socket,
            addr: addr.to_canonical(),
            holders: Vec::new(),
            last: None,
            state: AddressState::Up,
        };
        // This must be called after the socket is listening, so that no change is missed.
        watch.read_addresses()?;
        watch.update_state();
        Ok(watch)
    }

    /// Readable if there are notifications.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the state after processing the last notification.
    #[must_use]
    pub fn state(&self) -> AddressState {
        self.state
    }

    /// Processes notifications and returns true if the state has changed. If there are no
    /// notifications, this needs a single system call.
    pub fn follow(&mut self) -> bool {
        let mut concerns = false;
        let mut bytes = [0; NOTICE];
        for _ in 0..MAX_NOTICES {
            match recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                Ok(len) => {
                    for notice in notices(&bytes[..len.min(NOTICE)]) {
                        concerns |= self.handle_notice(notice);
                    }
                }
                // Some notifications were lost, but the following ones will be complete.
                Err(Errno::ENOBUFS) => concerns |= self.read_addresses().is_ok(),
                Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        concerns && {
            let before = self.state;
            self.update_state();
            self.state != before
        }
    }

    /// Finds the interfaces using the address.
    fn read_addresses(&mut self) -> io::Result<()> {
        let all = Addresses::query()?;
        let with = |entry: &super::Entry<'_>| {
            // The loopback interface uses all addresses of its network.
            let holds_all = entry.address.is_loopback() && entry.common_bits(self.addr).is_some();
            entry.address == self.addr || holds_all
        };
        let holders = all.iter().filter(with);
        self.holders = holders
            .filter_map(|entry| super::index_of(entry.name))
            .collect();
        self.note_last();
        Ok(())
    }

    fn note_last(&mut self) {
        self.last = self.holders.last().copied().or(self.last);
    }

    /// Processes a notification. Returns whether it is for our address.
    fn handle_notice(&mut self, notice: Notice) -> bool {
        match notice {
            // Addresses in the loopback network can be used without being assigned to the
            // interface.
            Notice::Address { addr, .. } if addr != self.addr || addr.is_loopback() => false,
            Notice::Address { index, is_new, .. } => {
                self.holders.retain(|holder| *holder != index);
                if is_new {
                    self.holders.push(index);
                }
                self.note_last();
                true
            }
            Notice::Link { index } => self.holders.contains(&index) || self.last == Some(index),
        }
    }

    /// Updates the state based on the interfaces using the address.
    fn update_state(&mut self) {
        const RUNNING: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        let flags = |index: &u32| link_flags(self.socket.as_fd(), *index);
        self.holders.retain(|index| flags(index).is_some());
        let mut running = self.holders.iter().filter_map(flags);
        self.state = match self.last {
            None => AddressState::Up,
            Some(_) if running.any(|flags| flags & RUNNING == RUNNING) => AddressState::Up,
            Some(_) if !self.holders.is_empty() => AddressState::Down,
            Some(last) if flags(&last).is_some() => AddressState::Absent,
            Some(_) => AddressState::Gone,
        };
    }
}

/// Iterates over all relevant notifications in a datagram.
fn notices(bytes: &[u8]) -> impl Iterator<Item = Notice> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let len = number(rest, 0)? as usize;
        let message = rest.get(..len).filter(|m| m.len() >= MESSAGE_HEADER)?;
        rest = rest
            .get(len.next_multiple_of(ALIGNMENT)..)
            .unwrap_or_default();
        let kind = u16::from_ne_bytes([message[4], message[5]]);
        Some(notice(kind, &message[MESSAGE_HEADER..]))
    })
    .flatten()
}

fn notice(kind: u16, body: &[u8]) -> Option<Notice> {
    // The index has the same offset in both headers.
    let index = number(body, 4)?;
    match kind {
        libc::RTM_NEWLINK | libc::RTM_DELLINK => Some(Notice::Link { index }),
        libc::RTM_NEWADDR | libc::RTM_DELADDR => Some(Notice::Address {
            index,
            addr: address(body.get(ADDRESS_HEADER..)?)?,
            is_new: kind == libc::RTM_NEWADDR,
        }),
        _ => None,
    }
}

/// Returns the interface address from the attributes of a message.
fn address(mut attributes: &[u8]) -> Option<IpAddr> {
    const HEADER: usize = 4;
    let mut found = None;
    while let [a, b, c, d, ..] = *attributes {
        let (len, kind) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        let value = attributes.get(HEADER..len.into())?;
        let ip = <[u8; 4]>::try_from(value).map(IpAddr::from);
        let ip = ip.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from));
        match (kind, ip) {
            // If there is a second address, it belongs to the peer.
            (libc::IFA_LOCAL, Ok(ip)) => return Some(ip),
            (libc::IFA_ADDRESS, Ok(ip)) => found = Some(ip),
            _ => {}
        }
        let next = usize::from(len).next_multiple_of(ALIGNMENT);
        attributes = attributes.get(next..).unwrap_or_default();
    }
    found
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an rtnetlink message: type, rest of the header, and attributes.
    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = (MESSAGE_HEADER + body.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn of_address(kind: u16, index: u32, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![2, 24, 0, 0];
        body.extend(index.to_ne_bytes());
        body.extend(attributes.concat());
        message(kind, &body)
    }

    #[test]
    fn notifications_contain_interface_and_address() {
        // For a point-to-point link, IFA_ADDRESS is the peer address. Labels are 5 bytes long.
        let new = of_address(
            20,
            7,
            &[
                attribute(1, &[10, 0, 0, 2]),
                attribute(3, b"eth0\0"),
                attribute(2, &[10, 0, 0, 1]),
            ],
        );
        let mut v6 = [0; 16];
        v6[0] = 0xfd;
        v6[15] = 1;
        let gone = of_address(21, 8, &[attribute(1, &v6)]);
        let mut link = vec![0, 0, 1, 0];
        link.extend(9u32.to_ne_bytes());
        let link = message(16, &link);
        let other = message(24, &[0; 12]);
        let all = [&new[..], &other, &gone, &link].concat();
        let expected = [
            Notice::Address {
                index: 7,
                addr: "10.0.0.1".parse().unwrap(),
                is_new: true,
            },
            Notice::Address {
                index: 8,
                addr: "fd00::1".parse().unwrap(),
                is_new: false,
            },
            Notice::Link { index: 9 },
        ];
        assert_eq!(notices(&all).collect::<Vec<_>>(), expected);
        // Truncated data must be ignored at any position.
        for len in 0..all.len() {
            assert!(notices(&all[..len]).count() < 3);
        }
        assert_eq!(notices(&[0; 64]).count(), 0);
    }

    #[test]
    fn loopback_and_unknown_addresses_are_up() {
        for addr in ["127.0.0.1", "127.9.9.9", "203.0.113.77"] {
            let mut watch = AddressWatch::open(addr.parse().unwrap()).unwrap();
            assert_eq!(watch.state(), AddressState::Up, "{addr}");
            watch.follow();
            assert_eq!(watch.state(), AddressState::Up, "{addr}");
        }
    }
}
