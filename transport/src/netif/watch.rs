//! An address of this host as it comes and goes.
//!
//! The kernel says over netlink (rtnetlink(7)) which interface gets or loses an address, and whose
//! link changes. Its notices are parsed, and interfaces are asked for by the socket of the watch:
//! that is of the network namespace in which the watch was made, which need not be the calling
//! thread's.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::{Addresses, link_flags};

/// Groups of notices: of links, of IPv4 addresses and of IPv6 addresses.
const GROUPS: u32 =
    (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;

/// Most notices that are taken at a time. Others may have nothing to do with the address.
const MAX_NOTICES: usize = 64;

/// Room for one notice. The kernel's longest are those of links; what is cut off of one is not
/// looked at.
const NOTICE: usize = 4096;

/// Headers of a message, of an address and of a link, and the alignment of what follows.
const MESSAGE_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ALIGNMENT: usize = 4;

/// State of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressState {
    /// An interface has it, and its link is up. Also the state of an address that no interface has
    /// had so far: it may be the host's by a route.
    Up,
    /// An interface has it, but that is down or has no carrier.
    Down,
    /// No interface has it any more.
    Absent,
    /// Nor is the interface there that had it last.
    Gone,
}

/// Follows an address of this host.
#[derive(Debug)]
pub struct AddressWatch {
    socket: OwnedFd,
    addr: IpAddr,
    /// Indices of the interfaces that have the address.
    holders: Vec<u32>,
    /// The one that had it last.
    last: Option<u32>,
    state: AddressState,
}

/// What a notice is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notice {
    /// An interface got or lost an address.
    Address {
        index: u32,
        addr: IpAddr,
        is_new: bool,
    },
    /// A link changed, or is gone.
    Link { index: u32 },
}

impl AddressWatch {
    /// Begins to follow an address.
    ///
    /// # Errors
    /// Those of a netlink socket, and of `getifaddrs(3)`.
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
        // After the socket has begun to listen, so that nothing is missed in between.
        watch.look()?;
        watch.judge();
        Ok(watch)
    }

    /// Readable when the kernel has notices.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// State of the address when notices were taken last.
    #[must_use]
    pub fn state(&self) -> AddressState {
        self.state
    }

    /// Takes the kernel's notices; returns whether the state has changed. Where there are none this
    /// is one system call.
    pub fn follow(&mut self) -> bool {
        let mut concerns = false;
        let mut bytes = [0; NOTICE];
        for _ in 0..MAX_NOTICES {
            match recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                Ok(len) => {
                    for notice in notices(&bytes[..len.min(NOTICE)]) {
                        concerns |= self.take(notice);
                    }
                }
                // Notices were lost. Of those that come later none is.
                Err(Errno::ENOBUFS) => concerns |= self.look().is_ok(),
                Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        concerns && {
            let before = self.state;
            self.judge();
            self.state != before
        }
    }

    /// Looks for the interfaces that have the address.
    fn look(&mut self) -> io::Result<()> {
        let all = Addresses::look()?;
        let with = |entry: &super::Entry<'_>| {
            // The loopback interface has the whole network.
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

    /// Takes a notice; returns whether the address is concerned.
    fn take(&mut self, notice: Notice) -> bool {
        match notice {
            // Addresses of the loopback interface may be there without having been given to it.
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

    /// Works out the state from the interfaces that have the address.
    fn judge(&mut self) {
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

/// The notices of a datagram, as far as they are of interest.
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
    // The index is at the same place of both headers.
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

/// The address of an interface among the attributes of a message.
fn address(mut attributes: &[u8]) -> Option<IpAddr> {
    const HEADER: usize = 4;
    let mut found = None;
    while let [a, b, c, d, ..] = *attributes {
        let (len, kind) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        let value = attributes.get(HEADER..len.into())?;
        let ip = <[u8; 4]>::try_from(value).map(IpAddr::from);
        let ip = ip.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from));
        match (kind, ip) {
            // Where there is another one, that is the peer's.
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

    /// A message of rtnetlink: its type, the rest of its header, and attributes.
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
    fn notices_name_interface_and_address() {
        // IFA_ADDRESS of a link between two hosts is the peer's; a label is 5 bytes long.
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
        // Bytes that are cut off end it, wherever that is.
        for len in 0..all.len() {
            assert!(notices(&all[..len]).count() < 3);
        }
        assert_eq!(notices(&[0; 64]).count(), 0);
    }

    #[test]
    fn an_address_of_the_loopback_interface_is_up_and_an_unknown_one_may_be_there_by_a_route() {
        for addr in ["127.0.0.1", "127.9.9.9", "203.0.113.77"] {
            let mut watch = AddressWatch::open(addr.parse().unwrap()).unwrap();
            assert_eq!(watch.state(), AddressState::Up, "{addr}");
            watch.follow();
            assert_eq!(watch.state(), AddressState::Up, "{addr}");
        }
    }
}
