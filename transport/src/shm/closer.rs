//! Closes sockets of untrusted users on a separate thread, if the kernel cannot reject descriptors
//! ([`refuses_descriptors`]).
//!
//! Closing a socket also closes all descriptors in unread messages, and reading a message without
//! accepting its descriptors closes them as well. A malicious sender can make this block for as
//! long as they want. Any local user can connect to a listener, or bind to the name of a listener.
//! Therefore, no other thread must close a socket connected to an untrusted user, or read from it.
//! There is nothing more we can do: a process can't exit before all of its threads have, and a
//! thread blocked on a file system that doesn't respond never exits.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};

use super::descriptors::refuses_descriptors;

/// Max number of sockets being closed; if exceeded, we don't accept or connect to any more. Each
/// thread that checks this at the same time can add another one, and closing a listener adds its
/// pending connections.
const MAX_CLOSING: usize = 64;

/// How often to check whether a socket has been closed.
const LOOK: Duration = Duration::from_millis(20);

/// Sockets which have not been closed yet.
#[derive(Debug, Default)]
struct Unclosed {
    count: usize,
    /// Owner of the socket being closed, for use in an error message.
    owner: Option<String>,
}

/// The thread and its queue of sockets to close.
#[derive(Debug)]
struct Closer {
    queue: Sender<OwnedFd>,
    unclosed: Arc<Mutex<Unclosed>>,
}

/// Closer for this process. The thread is started when it is first needed.
static CLOSER: Mutex<Option<Closer>> = Mutex::new(None);

impl Closer {
    fn start() -> io::Result<Self> {
        let (queue, sockets) = channel::<OwnedFd>();
        let unclosed = Arc::new(Mutex::new(Unclosed::default()));
        let left = Arc::clone(&unclosed);
        let run = move || {
            for socket in sockets {
                let peer = getsockopt(&socket, sockopt::PeerCredentials);
                let owner = peer.map(|it| format!("process {} of user {}", it.pid(), it.uid()));
                lock(&left).owner = owner.ok();
                drop(socket);
                let mut left = lock(&left);
                left.owner = None;
                left.count -= 1;
            }
        };
        let thread = std::thread::Builder::new().name("riser-shm-close".into());
        thread.spawn(run)?;
        Ok(Self { queue, unclosed })
    }

    /// Returns an error if there are more than `most` sockets left to close.
    fn check(&self, most: usize) -> io::Result<()> {
        let unclosed = lock(&self.unclosed);
        if unclosed.count <= most {
            return Ok(());
        }
        let mut text = "sockets of other users are still being closed".to_owned();
        if let Some(owner) = &unclosed.owner {
            text += &format!(", currently one of {owner}");
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
    }

    fn close(&self, socket: OwnedFd) {
        lock(&self.unclosed).count += 1;
        self.queue
            .send(socket)
            .expect("its thread ends after this sender");
    }
}

/// Poison can be ignored because there are no partial updates.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks whether another socket could be closed. This must be called before accepting or
/// connecting a socket.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if too many sockets are being closed. This will also return
/// errors of starting the thread.
pub(super) fn check_room() -> io::Result<()> {
    if refuses_descriptors() {
        return Ok(());
    }
    let mut closer = lock(&CLOSER);
    if closer.is_none() {
        *closer = Some(Closer::start()?);
    }
    closer
        .as_ref()
        .map_or(Ok(()), |closer| closer.check(MAX_CLOSING - 1))
}

/// Closes a socket, using the thread if it has been started by [`check_room`].
pub(super) fn close(socket: OwnedFd) {
    if let Some(closer) = &*lock(&CLOSER) {
        closer.close(socket);
    }
}

/// Waits up to `patience` until there are no more sockets of other users being closed. Otherwise,
/// `execve(2)` would block until they are closed, no matter how long this takes.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] if there are still sockets being closed. The error message
/// contains their owner.
pub fn check_closed(patience: Duration) -> io::Result<()> {
    let until = Instant::now() + patience;
    loop {
        let closed = lock(&CLOSER)
            .as_ref()
            .map_or(Ok(()), |closer| closer.check(0));
        if closed.is_ok() || Instant::now() >= until {
            return closed;
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use riser_testkit::eventually;

    use super::*;

    /// Creates a connection that blocks for an hour when it is closed, and its peer, which can
    /// unblock it.
    fn slow() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (never_reads, _) = listener.accept().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.write(&[0; 65536]).is_ok() {}
        let linger = Some(Duration::from_secs(3600));
        socket2::SockRef::from(&full).set_linger(linger).unwrap();
        (full, never_reads)
    }

    #[test]
    fn slow_sockets_use_up_closer() {
        let closer = Closer::start().unwrap();
        closer.check(0).unwrap();
        let (slow, never_reads) = slow();
        closer.close(slow.into());
        let (quick, _) = std::os::unix::net::UnixStream::pair().unwrap();
        for _ in 1..MAX_CLOSING {
            closer.check(MAX_CLOSING - 1).unwrap();
            closer.close(quick.try_clone().unwrap().into());
        }
        // The first socket is still being closed.
        for most in [MAX_CLOSING - 1, 0] {
            let error = closer.check(most).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        }
        drop(never_reads);
        let limit = Duration::from_secs(20);
        eventually("all are closed", limit, || closer.check(0).is_ok());
    }

    #[test]
    fn error_names_owner_of_blocking_socket() {
        let closer = Closer::start().unwrap();
        let (first, second) = std::os::unix::net::UnixStream::pair().unwrap();
        let (slow, never_reads) = slow();
        // The thread blocks on the descriptor contained in a message.
        send(&first, &slow);
        drop((first, slow));
        closer.close(second.into());
        let named = format!("currently one of process {} of user", std::process::id());
        eventually("it is named", Duration::from_secs(20), || {
            let error = closer.check(0).map_err(|error| error.to_string());
            error.is_err_and(|text| text.contains(&named))
        });
        drop(never_reads);
    }

    fn send(over: &std::os::unix::net::UnixStream, what: &TcpStream) {
        use std::os::fd::AsFd as _;

        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [what.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [io::IoSlice::new(b"x")];
        rustix::net::sendmsg(over, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
    }
}
