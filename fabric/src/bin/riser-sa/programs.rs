//! Connections of local programs over the Unix socket.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use riser_fabric::acm::{Counters, MAX_MESSAGE, Service};
use riser_fabric::sa::administrator::Administrator;
use riser_fabric::sa::resolver::Resolver;
use tracing::{debug, warn};

/// Maximum number of connections. Beyond it, the oldest connection of the heaviest user is closed,
/// so that no user starves another.
const MAX_PROGRAMS: usize = 64;

/// Maximum number of consecutive accepts, so that existing programs and hosts are served in
/// between.
const IN_A_ROW: usize = 16;

/// Pause after an accept failed for lack of resources.
const REST: Duration = Duration::from_secs(1);

/// Length of a message header, in bytes. Two of them contain the message length.
const HEADER: usize = 16;
const OPERATION: usize = 1;
const LENGTH: usize = 6;

/// Listener and connections.
pub(super) struct Programs {
    listener: UnixListener,
    connected: Vec<Program>,
    /// End of the pause, if accepting is paused.
    rests: Option<Instant>,
    /// No connection was accepted since the failure was reported.
    has_failed: bool,
}

struct Program {
    stream: UnixStream,
    user: u32,
    /// Partially received message.
    bytes: Vec<u8>,
}

impl Programs {
    pub(super) fn new(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            connected: Vec::new(),
            rests: None,
            has_failed: false,
        })
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let streams = self.connected.iter().map(|program| program.stream.as_fd());
        let listener = self.rests.is_none().then(|| self.listener.as_fd());
        listener.into_iter().chain(streams)
    }

    /// Returns the time at which [`Self::turn`] should be called even if no socket is readable.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.rests
    }

    /// Closes the oldest connection of the user with the most connections; returns whether there
    /// was one.
    fn make_room(&mut self) -> bool {
        let of = |user| self.connected.iter().filter(|p| p.user == user).count();
        let oldest = (0..self.connected.len()).rev();
        let ended = oldest.max_by_key(|at| of(self.connected[*at].user));
        ended.map(|at| self.connected.remove(at)).is_some()
    }

    /// Pauses accepting, because the waiting connection would be reported repeatedly. If only this
    /// process ran out of descriptors, closes an old connection.
    fn rest(&mut self, now: Instant, error: &io::Error) {
        if error.raw_os_error() != Some(libc::EMFILE) || !self.make_room() {
            if !std::mem::replace(&mut self.has_failed, true) {
                warn!(%error, "cannot accept programs");
            }
            self.rests = Some(now + REST);
        }
    }

    /// Accepts connections and serves received requests.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        resolver: &Resolver,
        administrator: &Administrator,
        counters: &Counters,
    ) {
        self.rests = self.rests.filter(|until| now < *until);
        let most = if self.rests.is_none() { IN_A_ROW } else { 0 };
        for _ in 0..most {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => {
                    self.has_failed = false;
                    stream
                }
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        self.rest(now, &error);
                    }
                    break;
                }
            };
            let peer = getsockopt(&stream, PeerCredentials);
            let (Ok(peer), Ok(())) = (peer, stream.set_nonblocking(true)) else {
                continue;
            };
            if self.connected.len() == MAX_PROGRAMS {
                self.make_room();
            }
            self.connected.push(Program {
                stream,
                user: peer.uid(),
                bytes: Vec::new(),
            });
        }
        let service = Service {
            resolver,
            administrator,
            counters,
        };
        self.connected
            .retain_mut(|program| match program.turn(&service) {
                Ok(()) => true,
                Err(error) => {
                    debug!(%error, "program disconnected");
                    false
                }
            });
    }
}

impl Program {
    /// Responds to the received message once it is complete.
    ///
    /// # Errors
    /// Returns connection errors, which require closing the connection.
    fn turn(&mut self, service: &Service<'_>) -> io::Result<()> {
        let mut buffer = [0; MAX_MESSAGE];
        let room = MAX_MESSAGE - self.bytes.len();
        match self.stream.read(&mut buffer[..room]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => self.bytes.extend(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        let Some(header) = self.bytes.get(..HEADER) else {
            return Ok(());
        };
        let length = [header[LENGTH], header[LENGTH + 1]];
        // The length is in host byte order for RESOLVE, and in network byte order otherwise.
        let length = match header[OPERATION] & 0xf {
            1 => u16::from_ne_bytes(length),
            _ => u16::from_be_bytes(length),
        };
        let length = usize::from(length);
        if !(HEADER..=MAX_MESSAGE).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // A program must wait for its response before the next request.
        if self.bytes.len() > length {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if self.bytes.len() < length {
            return Ok(());
        }
        let response = service.respond_to(&self.bytes);
        self.bytes.clear();
        let response = response.ok_or(io::ErrorKind::InvalidData)?;
        // The program does not read its response.
        self.stream.write_all(&response)
    }
}
