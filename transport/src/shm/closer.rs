//! Closes sockets of users with whom no memory is shared, on a thread of its own, where the kernel
//! cannot refuse descriptors ([`refuses_descriptors`]).
//!
//! Closing a socket closes the descriptors in messages that were not read, and reading a message
//! without taking its descriptors closes these. Either takes as long as their sender wants. Any local
//! user can connect to a listener, and bind the name of one. So no other thread closes a socket that
//! leads to such a user, and none reads from it. That is all that can be done: a process does not end
//! before its threads have, and no thread ends that waits for a file system which does not answer.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};

use super::descriptors::refuses_descriptors;

/// Most sockets that are being closed before no further one is accepted or connected. Each thread
/// that looks at the same moment can add one, and a listener that is closed those that waited there.
const MAX_CLOSING: usize = 64;

/// Interval at which the end of closing is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// Sockets that are not closed yet.
#[derive(Debug, Default)]
struct Unclosed {
    count: usize,
    /// Whose the one is that is being closed, for an error.
    owner: Option<String>,
}

/// The thread, and the sockets that it has not closed yet.
#[derive(Debug)]
struct Closer {
    queue: Sender<OwnedFd>,
    unclosed: Arc<Mutex<Unclosed>>,
}

/// The closer of this process, which is started when it is needed.
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

    /// Checks that at most this many sockets are left.
    fn check(&self, most: usize) -> io::Result<()> {
        let unclosed = lock(&self.unclosed);
        if unclosed.count <= most {
            return Ok(());
        }
        let mut text = "sockets of other users are still being closed".to_owned();
        if let Some(owner) = &unclosed.owner {
            text += &format!(", now one of {owner}");
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

/// Every change is whole, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that another socket could be closed. To be called before one is accepted or connected.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] while too many are being closed, and those of starting a thread.
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

/// Closes a socket: elsewhere, if [`check_room`] has started the thread.
pub(super) fn close(socket: OwnedFd) {
    if let Some(closer) = &*lock(&CLOSER) {
        closer.close(socket);
    }
}

/// Waits for `patience` until no socket is being closed that other users might have sent something
/// slow to. `execve(2)` would wait for its end, however long that takes.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`]: some still are, which the text names.
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

    /// A connection whose closing waits for an hour, and its peer, which ends that.
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
    fn slow_sockets_fill_it_and_leave_it() {
        let closer = Closer::start().unwrap();
        closer.check(0).unwrap();
        let (slow, never_reads) = slow();
        closer.close(slow.into());
        let (quick, _) = std::os::unix::net::UnixStream::pair().unwrap();
        for _ in 1..MAX_CLOSING {
            closer.check(MAX_CLOSING - 1).unwrap();
            closer.close(quick.try_clone().unwrap().into());
        }
        // The first one is still being closed.
        for most in [MAX_CLOSING - 1, 0] {
            let error = closer.check(most).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        }
        drop(never_reads);
        let limit = Duration::from_secs(20);
        eventually("all are closed", limit, || closer.check(0).is_ok());
    }

    #[test]
    fn a_process_whose_socket_is_slow_to_close_is_named() {
        let closer = Closer::start().unwrap();
        let (first, second) = std::os::unix::net::UnixStream::pair().unwrap();
        let (slow, never_reads) = slow();
        // What the thread would close is what a message carries.
        send(&first, &slow);
        drop((first, slow));
        closer.close(second.into());
        let named = format!("now one of process {} of user", std::process::id());
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
