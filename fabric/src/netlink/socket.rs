//! Socket of `NETLINK_RDMA`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recvfrom, sendto, socket,
};

/// Multicast group that receives the kernel's port-mapper requests (`RDMA_NL_GROUP_IWPM`), as a bit
/// of the socket's group mask.
pub const IWPM_GROUP: u32 = 1 << (2 - 1);

/// Multicast group that receives the kernel's local-service requests (`RDMA_NL_GROUP_LS`), as a bit
/// of the socket's group mask.
pub const LS_GROUP: u32 = 1 << (3 - 1);

/// Nonblocking socket of `NETLINK_RDMA`.
#[derive(Debug)]
pub struct RdmaNetlink {
    fd: OwnedFd,
    port: u32,
}

impl RdmaNetlink {
    /// Opens a socket that also receives messages for these multicast groups.
    ///
    /// # Errors
    /// Returns the errors of `socket(2)` and `bind(2)`: `EPROTONOSUPPORT` if the kernel lacks RDMA
    /// support, and `EPERM` if a group requires `CAP_NET_ADMIN`.
    pub fn open(groups: u32) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRDMA,
        )?;
        // The kernel assigns the port, because this process may have other netlink sockets.
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        let port = getsockname::<NetlinkAddr>(fd.as_raw_fd())?.pid();
        Ok(Self { fd, port })
    }

    /// Adopts a socket that a service manager opened and bound. It may use another protocol, over
    /// which programs can emulate the kernel.
    ///
    /// # Errors
    /// Returns the errors of `getsockname(2)` and `fcntl(2)`.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let port = getsockname::<NetlinkAddr>(fd.as_raw_fd())?.pid();
        Ok(Self { fd, port })
    }

    /// Returns the port of the socket, which is the sender of messages to the kernel.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Returns the file descriptor, for polling.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sends a message to the kernel.
    ///
    /// # Errors
    /// Returns the errors of `sendto(2)`.
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        self.send_to(0, message)
    }

    /// Sends a message to the socket with this port; port 0 is the kernel.
    ///
    /// # Errors
    /// Returns the errors of `sendto(2)`.
    pub fn send_to(&self, port: u32, message: &[u8]) -> io::Result<()> {
        let to = NetlinkAddr::new(port, 0);
        sendto(self.fd.as_raw_fd(), message, &to, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives a datagram from the kernel, or returns `None` if no datagram is available.
    /// Datagrams from other processes are discarded.
    ///
    /// # Errors
    /// Returns the errors of `recvfrom(2)`, such as `ENOBUFS` after messages were lost, and
    /// `EMSGSIZE` for a datagram that exceeds the buffer.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            match self.receive_from(buffer)? {
                Some((len, 0)) => return Ok(Some(&buffer[..len])),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Receives a datagram; returns its length and the port of its sender.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_from(&self, buffer: &mut [u8]) -> io::Result<Option<(usize, u32)>> {
        loop {
            match recvfrom::<NetlinkAddr>(self.fd.as_raw_fd(), buffer) {
                // A datagram that fills the buffer may have been truncated.
                Ok((len, _)) if len >= buffer.len() => {
                    return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
                }
                Ok((len, Some(from))) => return Ok(Some((len, from.pid()))),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(nix::errno::Errno::EAGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
