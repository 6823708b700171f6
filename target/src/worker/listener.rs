//! Listening sockets for iSCSI, which are passed between the server, its workers, and a new
//! program.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use riser_reactor::{Handle, simulated};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Maximum number of connections waiting to be accepted. They are stored in the kernel and don't
/// use pool memory or a table entry before they are accepted.
const BACKLOG: i32 = 256;

/// Listening socket to be passed to a worker or to a new program.
#[derive(Debug)]
pub struct TcpListener {
    pub(super) address: SocketAddr,
    pub(super) socket: Handle,
}

impl TcpListener {
    /// Binds a socket without listening.
    ///
    /// # Errors
    /// Returns errors from `socket(2)` and `bind(2)`.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = OwnedFd::from(bind(address)?).into();
        Ok(Self { address, socket })
    }

    /// Creates a listening socket for a simulation.
    #[must_use]
    pub fn simulated(listener: &simulated::Listener) -> Self {
        Self {
            address: listener.address(),
            socket: listener.clone().into(),
        }
    }

    /// Starts listening. Connections will wait until the socket is passed to a worker.
    ///
    /// # Errors
    /// Returns errors from `listen(2)`.
    pub fn listen(&self) -> io::Result<()> {
        self.fd()
            .map_or(Ok(()), |fd| SockRef::from(&fd).listen(BACKLOG))
    }

    /// Creates a listener from an existing socket.
    ///
    /// # Errors
    /// Returns an error if this is not a TCP socket.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let address = SockRef::from(&fd).local_addr()?.as_socket();
        let address = address.ok_or(io::ErrorKind::InvalidInput)?;
        let socket = fd.into();
        Ok(Self { address, socket })
    }

    /// Duplicates the socket.
    ///
    /// # Errors
    /// Returns errors from `fcntl(2)`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            address: self.address,
            socket: match self.socket.fd() {
                Some(fd) => fd.try_clone_to_owned()?.into(),
                None => self.socket.clone(),
            },
        })
    }

    /// Returns the local address and port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// Returns errors from `fcntl(2)`, or an error for a simulated socket.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        let fd = self.fd().ok_or(io::ErrorKind::Unsupported)?;
        fd.try_clone_to_owned()
    }

    /// Returns the descriptor, or `None` for a simulated socket.
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
    // Allow a restart of the daemon while there are old connections in TIME-WAIT.
    socket.set_reuse_address(true)?;
    // Each worker has a socket, and the kernel distributes the connections.
    socket.set_reuse_port(true)?;
    // IPv4 portals use separate sockets, which can have the same port.
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}
