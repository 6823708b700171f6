//! Programs of the host that ask over the Unix socket.

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

/// Programs at once. When one more comes, the oldest of the user gives way who has the most: no user keeps
/// others from being answered.
const MAX_PROGRAMS: usize = 64;

/// Programs that are taken in a row: others, and hosts, wait no longer.
const IN_A_ROW: usize = 16;

/// Time for which none is taken after the system had nothing left for one more.
const REST: Duration = Duration::from_secs(1);

/// Bytes of a message's header, of which two have its length.
const HEADER: usize = 16;
const OPERATION: usize = 1;
const LENGTH: usize = 6;

/// The listener and the connections.
pub(super) struct Programs {
    listener: UnixListener,
    connected: Vec<Program>,
    /// Time until which none is taken.
    rests: Option<Instant>,
    /// None was taken since this was reported.
    has_failed: bool,
}

struct Program {
    stream: UnixStream,
    user: u32,
    /// What has arrived of its next message.
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

    /// Time at which [`Self::turn`] has something to do, be nothing readable.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.rests
    }

    /// Ends the oldest connection of the user with the most; returns whether there was one.
    fn make_room(&mut self) -> bool {
        let of = |user| self.connected.iter().filter(|p| p.user == user).count();
        let oldest = (0..self.connected.len()).rev();
        let ended = oldest.max_by_key(|at| of(self.connected[*at].user));
        ended.map(|at| self.connected.remove(at)).is_some()
    }

    /// Takes no connection for a while: the one that waits would be reported again and again. A
    /// descriptor that is missing to this process alone is that of an old connection.
    fn rest(&mut self, now: Instant, error: &io::Error) {
        if error.raw_os_error() != Some(libc::EMFILE) || !self.make_room() {
            if !std::mem::replace(&mut self.has_failed, true) {
                warn!(%error, "programs wait");
            }
            self.rests = Some(now + REST);
        }
    }

    /// Takes connections, and answers what has come.
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
                    debug!(%error, "a program is gone");
                    false
                }
            });
    }
}

impl Program {
    /// Answers the message that has come, if it is whole.
    ///
    /// # Errors
    /// Those of the connection, which then ends.
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
        // Of the operation RESOLVE in the host's byte order, else in that of the network.
        let length = match header[OPERATION] & 0xf {
            1 => u16::from_ne_bytes(length),
            _ => u16::from_be_bytes(length),
        };
        let length = usize::from(length);
        if !(HEADER..=MAX_MESSAGE).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // A program waits for its answer before it asks again.
        if self.bytes.len() > length {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if self.bytes.len() < length {
            return Ok(());
        }
        let answer = service.answer(&self.bytes);
        self.bytes.clear();
        let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
        // A program that takes no answer has asked in vain.
        self.stream.write_all(&answer)
    }
}
