//! Exports of NBD servers as disks: the client of the protocol in [`crate::nbd::client`] on a TCP
//! or Unix socket.
//!
//! - [`connect`]: connects and negotiates, within a time.
//! - [`NbdConfig`]: limits on that and on operations.
//! - [`NbdError`]: reasons why it failed.
//!
//! Replies of a round are received by few system calls: data of a large read go straight to their
//! buffer, small replies are taken in together and copied.
//!
//! Not here: TLS, several connections to one server, reconnection.

mod connect;
mod driver;
mod outgoing;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use thiserror::Error;

use self::connect::TimedStream;
use self::driver::NbdBackend;
use super::disk::{MAX_RANGE, Properties, ThreadDisk};
use crate::block::{Geometry, MAX_TRANSFER};
use crate::nbd::client::{HandshakeError, Negotiated, negotiate};
use crate::nbd::proto::flag;
use crate::nbd::{NbdServer, NbdUri};

/// Size that is asked for the socket's buffers, in bytes, so that the requests and replies of a
/// round fit. The kernel gives what its limit allows.
const SOCKET_BUFFER: usize = 1 << 20;

/// Limits on a connection.
#[derive(Clone, Copy, Debug)]
pub struct NbdConfig {
    /// Longest time for connection and negotiation together. The look-up of the host's name comes
    /// before, and takes the time that the resolver gives it.
    pub connect: Duration,
    /// Longest time for one operation. One that is late ends the connection.
    pub operation: Duration,
    /// Writes are refused here, even if the export takes them.
    pub read_only: bool,
    /// Memory for buffers, in bytes; that of the largest transfer at least.
    pub buffers: u64,
}

/// Reason why an export cannot be used.
#[derive(Debug, Error)]
pub enum NbdError {
    /// The host has no address.
    #[error("host `{host}` has no address: {source}")]
    Resolve {
        /// Name of the host.
        host: String,
        /// Error of the look-up.
        source: io::Error,
    },
    /// No connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The negotiation failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The size is not a number of blocks.
    #[error("the export has {size} bytes, which is not a whole number of blocks of {block} bytes")]
    Size {
        /// Size of the export in bytes.
        size: u64,
        /// Size of a block in bytes.
        block: u32,
    },
    /// The longest request is shorter than a block.
    #[error("the server takes at most {max} bytes at once, less than a block of {block} bytes")]
    MaxPayload {
        /// Longest read or write in bytes.
        max: u32,
        /// Size of a block in bytes.
        block: u32,
    },
    /// The disk's thread or memory could not be had.
    #[error("cannot start: {0}")]
    Start(#[source] io::Error),
}

impl NbdError {
    /// Returns whether the server did not answer in time.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        let (Self::Connect(error) | Self::Handshake(HandshakeError::Io(error))) = self else {
            return false;
        };
        error.kind() == io::ErrorKind::TimedOut
    }
}

/// Connects to an export.
///
/// # Errors
/// [`NbdError`].
pub fn connect(uri: &NbdUri, config: NbdConfig) -> Result<ThreadDisk, NbdError> {
    let until = Instant::now() + config.connect;
    let socket = open_socket(&uri.server, until)?;
    // Without these sizes it only takes more system calls.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
    if matches!(uri.server, NbdServer::Unix(_)) {
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER);
    }
    let mut stream = TimedStream::new(socket, until);
    let negotiated = negotiate(&mut stream, &uri.export)?;
    let socket = stream.into_socket().map_err(NbdError::Start)?;
    let geometry = geometry(&negotiated, config.read_only)?;
    let block = geometry.block_size;
    let properties = Properties {
        thread: "nbd-disk",
        description: match uri.export.as_str() {
            "" => "an NBD export".to_owned(),
            name => format!("the NBD export {name}"),
        },
        has_fua: negotiated.flags & flag::SEND_FUA != 0,
        buffers: config.buffers,
        geometry,
    };
    ThreadDisk::start(properties, move || {
        Ok(NbdBackend::new(
            socket,
            &negotiated,
            block,
            config.operation,
        ))
    })
    .map_err(NbdError::Start)
}

fn open_socket(server: &NbdServer, until: Instant) -> Result<OwnedFd, NbdError> {
    let (host, port) = match server {
        NbdServer::Unix(path) => {
            return connect_unix(path, until).map_err(NbdError::Connect);
        }
        NbdServer::Tcp { host, port } => (host, *port),
    };
    let resolve_error = |source| NbdError::Resolve {
        host: host.clone(),
        source,
    };
    let addresses = (host.as_str(), port).to_socket_addrs();
    let addresses: Vec<_> = addresses.map_err(resolve_error)?.collect();
    if addresses.is_empty() {
        return Err(resolve_error(io::ErrorKind::NotFound.into()));
    }
    let socket = connect_tcp(&addresses, until).map_err(NbdError::Connect)?;
    // Requests are collected here, and must not wait for more in the kernel.
    socket.set_nodelay(true).map_err(NbdError::Connect)?;
    Ok(socket.into())
}

/// Connects to the first address that answers. One that does not answer takes its part of the time
/// that is left, so that the others have theirs.
fn connect_tcp(addresses: &[SocketAddr], until: Instant) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::TimedOut.into();
    for (tried, address) in addresses.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        let part = left / (addresses.len() - tried) as u32;
        if part.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, part) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects to a server on this host. One whose queue is full is waited for until then.
fn connect_unix(path: &Path, until: Instant) -> io::Result<OwnedFd> {
    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let left = until.saturating_duration_since(Instant::now());
    // A time of 0 stands for no limit.
    let left = left.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
    match net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket),
        Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        Err(error) => Err(error.into()),
    }
}

/// Size and limits of an export as a block device.
fn geometry(negotiated: &Negotiated, read_only: bool) -> Result<Geometry, NbdError> {
    let has = |flag: u16| negotiated.flags & flag != 0;
    let block_size = negotiated.min_block.max(512);
    let size = negotiated.size;
    if size == 0 || !size.is_multiple_of(block_size.into()) {
        return Err(NbdError::Size {
            size,
            block: block_size,
        });
    }
    let most = negotiated.max_payload.min(MAX_TRANSFER);
    let max_transfer = most - most % block_size;
    if max_transfer == 0 {
        return Err(NbdError::MaxPayload {
            max: negotiated.max_payload,
            block: block_size,
        });
    }
    let range_if = |flag: u16| if has(flag) { MAX_RANGE } else { 0 };
    Ok(Geometry {
        block_size,
        physical_block_size: negotiated.preferred_block.unwrap_or(4096).max(block_size),
        capacity: size,
        max_transfer,
        optimal_transfer: max_transfer,
        max_discard: range_if(flag::SEND_TRIM),
        max_write_zeroes: range_if(flag::SEND_WRITE_ZEROES),
        reports_status: negotiated.allocation_context.is_some(),
        read_only: read_only || has(flag::READ_ONLY),
        volatile_cache: has(flag::SEND_FLUSH),
        flushes: has(flag::SEND_FLUSH),
        stable_writes: has(flag::SEND_FLUSH) || has(flag::SEND_FUA),
    })
}
