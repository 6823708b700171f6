//! A socket of `NETLINK_RDMA`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recvfrom, sendto, socket,
};

/// The group to which the kernel sends requests for a port mapper (`RDMA_NL_GROUP_IWPM`), as a bit
/// of the groups of a socket.
pub const IWPM_GROUP: u32 = 1 << (2 - 1);

/// The group to which the kernel sends requests for local services (`RDMA_NL_GROUP_LS`), as a bit
/// of the groups of a socket.
pub const LS_GROUP: u32 = 1 << (3 - 1);

/// Socket of `NETLINK_RDMA`. It does not block.
#[derive(Debug)]
pub struct RdmaNetlink {
    fd: OwnedFd,
    port: u32,
}

impl RdmaNetlink {
    /// Opens a socket that also receives what the kernel sends to these groups.
    ///
    /// # Errors
    /// Those of `socket(2)` and `bind(2)`: `EPROTONOSUPPORT` where the kernel has no RDMA, and
    /// `EPERM` without `CAP_NET_ADMIN` where a group needs it.
    pub fn open(groups: u32) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkRDMA,
        )?;
        // The kernel chooses the port: there may be other sockets of this process.
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        let port = getsockname::<NetlinkAddr>(fd.as_raw_fd())?.pid();
        Ok(Self { fd, port })
    }

    /// Takes over a socket that a service manager has opened and bound. It may also be of another
    /// protocol, by which programs talk to each other as if they were the kernel.
    ///
    /// # Errors
    /// Those of `getsockname(2)` and `fcntl(2)`.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let port = getsockname::<NetlinkAddr>(fd.as_raw_fd())?.pid();
        Ok(Self { fd, port })
    }

    /// Port of the socket, which messages to the kernel name as their sender.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Readable when there is a message.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sends a message to the kernel.
    ///
    /// # Errors
    /// Those of `sendto(2)`.
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        self.send_to(0, message)
    }

    /// Sends a message to the socket of a port, of which 0 is the kernel's.
    ///
    /// # Errors
    /// Those of `sendto(2)`.
    pub fn send_to(&self, port: u32, message: &[u8]) -> io::Result<()> {
        let to = NetlinkAddr::new(port, 0);
        sendto(self.fd.as_raw_fd(), message, &to, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives a datagram of the kernel; none if there is none at the time. Those of other
    /// processes are thrown away.
    ///
    /// # Errors
    /// Those of `recvfrom(2)`: `ENOBUFS` after messages were lost. `EMSGSIZE` for a datagram that
    /// is longer than the buffer.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            match self.receive_from(buffer)? {
                Some((len, 0)) => return Ok(Some(&buffer[..len])),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    /// Receives a datagram; answers its length and the port that has sent it.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_from(&self, buffer: &mut [u8]) -> io::Result<Option<(usize, u32)>> {
        loop {
            match recvfrom::<NetlinkAddr>(self.fd.as_raw_fd(), buffer) {
                // A datagram that fills the buffer may have been longer.
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
