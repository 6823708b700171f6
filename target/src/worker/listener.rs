//! Sockets that listen for iSCSI, between the server, its workers and the next program.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use riser_reactor::{Handle, simulated};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Connections that wait to be accepted. The kernel holds them; neither pool memory nor a place in
/// a table is taken for one before it is accepted.
const BACKLOG: i32 = 256;

/// A socket that listens, on its way to a worker or to the next program.
#[derive(Debug)]
pub struct TcpListener {
    pub(super) address: SocketAddr,
    pub(super) socket: Handle,
}

impl TcpListener {
    /// Binds a socket; it takes no connections yet.
    ///
    /// # Errors
    /// Those of `socket(2)` and `bind(2)`.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = OwnedFd::from(bind(address)?).into();
        Ok(Self { address, socket })
    }

    /// A socket of a simulation, which listens.
    #[must_use]
    pub fn simulated(listener: &simulated::Listener) -> Self {
        Self {
            address: listener.address(),
            socket: listener.clone().into(),
        }
    }

    /// Lets it take connections, which wait until a worker has it.
    ///
    /// # Errors
    /// Those of `listen(2)`.
    pub fn listen(&self) -> io::Result<()> {
        self.fd()
            .map_or(Ok(()), |fd| SockRef::from(&fd).listen(BACKLOG))
    }

    /// A socket that listens already, wherever it does.
    ///
    /// # Errors
    /// It is no socket of TCP.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let address = SockRef::from(&fd).local_addr()?.as_socket();
        let address = address.ok_or(io::ErrorKind::InvalidInput)?;
        let socket = fd.into();
        Ok(Self { address, socket })
    }

    /// The same socket once more.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            address: self.address,
            socket: match self.socket.fd() {
                Some(fd) => fd.try_clone_to_owned()?.into(),
                None => self.socket.clone(),
            },
        })
    }

    /// Address and port that it is bound to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Another descriptor of it.
    ///
    /// # Errors
    /// Those of `fcntl(2)`; it is a simulation's socket.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        let fd = self.fd().ok_or(io::ErrorKind::Unsupported)?;
        fd.try_clone_to_owned()
    }

    /// Its descriptor; none of a simulation's socket.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.fd()
    }
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    // Old connections in TIME-WAIT must not keep a daemon that was restarted from its address.
    socket.set_reuse_address(true)?;
    // Every worker listens; the kernel deals the connections out.
    socket.set_reuse_port(true)?;
    // Portals of IPv4 have sockets of their own, perhaps at the same port.
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}
