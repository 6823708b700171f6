//! NBD exports, using the client in [`riser_exports::nbd::client`] on a TCP or Unix socket.
//!
//! - [`connect`]: connects and negotiates, with a timeout.
//! - [`NbdConfig`]: timeouts and limits.
//! - [`NbdError`]: error when connecting.
//!
//! In each round, replies are received using few system calls: data for a large read is received
//! directly into its buffer, small replies are received together and then copied.
//!
//! Not supported: TLS, multiple connections to the same server, reconnect.

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

use riser_block::{Geometry, MAX_TRANSFER};
use riser_exports::nbd::client::{HandshakeError, Negotiated, negotiate};
use riser_exports::nbd::proto::flag;
use riser_exports::nbd::{NbdServer, NbdUri};
use thiserror::Error;

use self::connect::TimedStream;
use self::driver::NbdBackend;
use super::disk::{MAX_RANGE, Properties, ThreadDisk};

/// Socket buffer size to request, in bytes. It should be large enough for all requests and replies
/// in a round. The size can be limited by the kernel.
const SOCKET_BUFFER: usize = 1 << 20;

/// Connection limits.
#[derive(Clone, Copy, Debug)]
pub struct NbdConfig {
    /// Timeout for connect and negotiation. This doesn't include the host name lookup, which is
    /// done before and uses the resolver timeout.
    pub connect: Duration,
    /// Timeout for a single operation. If it expires, the connection is closed.
    pub operation: Duration,
    /// Reject writes, even if they are allowed by the export.
    pub read_only: bool,
    /// Buffer memory in bytes; should be enough for the largest transfer.
    pub buffers: u64,
}

/// Error when using an export.
#[derive(Debug, Error)]
pub enum NbdError {
    /// The host name can't be resolved.
    #[error("cannot resolve host `{host}`: {source}")]
    Resolve {
        /// Host name.
        host: String,
        /// Lookup error.
        source: io::Error,
    },
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// Negotiation failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The export is smaller than a block.
    #[error("the export has {size} bytes, less than a block of {block} bytes")]
    Size {
        /// Export size in bytes.
        size: u64,
        /// Block size in bytes.
        block: u32,
    },
    /// The max request size is smaller than a block.
    #[error("the server's request limit of {max} bytes is less than a block of {block} bytes")]
    MaxPayload {
        /// Max read or write size in bytes.
        max: u32,
        /// Block size in bytes.
        block: u32,
    },
    /// The disk thread or its memory could not be created.
    #[error("cannot start: {0}")]
    Start(#[source] io::Error),
}

impl NbdError {
    /// Returns whether the server failed to respond in time.
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
/// Returns [`NbdError`] if the export can't be used.
pub fn connect(uri: &NbdUri, config: NbdConfig) -> Result<ThreadDisk, NbdError> {
    let until = Instant::now() + config.connect;
    let socket = open_socket(&uri.server, until)?;
    // If this fails, we only need more system calls.
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
    // We collect requests before sending them, so the kernel should not delay them.
    socket.set_nodelay(true).map_err(NbdError::Connect)?;
    Ok(socket.into())
}

/// Connects to the first address that responds. The remaining time is divided by the number of
/// addresses, so that an unreachable address doesn't use all of it.
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

/// Connects to a local server. If its backlog is full, we retry until the deadline.
fn connect_unix(path: &Path, until: Instant) -> io::Result<OwnedFd> {
    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let left = until.saturating_duration_since(Instant::now());
    // A timeout of 0 means no limit.
    let left = left.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
    match net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket),
        Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the block device geometry for an export.
fn geometry(negotiated: &Negotiated, read_only: bool) -> Result<Geometry, NbdError> {
    let has = |flag: u16| negotiated.flags & flag != 0;
    let block_size = negotiated.min_block.max(512);
    // The kernel's client also rounds down. A partial block at the end can't be accessed.
    let size = negotiated.size - negotiated.size % u64::from(block_size);
    if size == 0 {
        return Err(NbdError::Size {
            size: negotiated.size,
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
