//! Closes sockets of users with whom no memory is shared, on a thread of its own.
//!
//! Closing a socket closes the descriptors in messages that were not read, and reading a message
//! without taking its descriptors closes these. Either takes as long as their sender wants: a TCP
//! socket may linger, and a file be of a file system that does not answer. Any local user can
//! connect to a listener, and bind the name of one. So no other thread closes a socket that leads to
//! such a user, and none reads from it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most sockets that are being closed before no further one is accepted or connected. Each thread
/// that looks at the same moment can add one, and a listener that is closed those that waited there.
const MAX_CLOSING: usize = 64;

/// The thread, and the sockets that it has not closed yet.
#[derive(Debug)]
struct Closer {
    queue: Sender<OwnedFd>,
    unclosed: Arc<AtomicUsize>,
}

/// The closer of this process, which is started when it is needed.
static CLOSER: Mutex<Option<Closer>> = Mutex::new(None);

impl Closer {
    fn start() -> io::Result<Self> {
        let (queue, sockets) = channel::<OwnedFd>();
        let unclosed = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&unclosed);
        let run = move || {
            for socket in sockets {
                drop(socket);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("riser-shm-close".into());
        thread.spawn(run)?;
        Ok(Self { queue, unclosed })
    }

    fn has_room(&self) -> bool {
        self.unclosed.load(Ordering::Relaxed) < MAX_CLOSING
    }

    fn close(&self, socket: OwnedFd) {
        self.unclosed.fetch_add(1, Ordering::Relaxed);
        self.queue
            .send(socket)
            .expect("its thread ends after this sender");
    }
}

/// Every change is whole, so poison is ignored.
fn lock() -> MutexGuard<'static, Option<Closer>> {
    CLOSER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that another socket could be closed. To be called before one is accepted or connected.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] while too many are being closed, and those of starting a thread.
pub(super) fn check_room() -> io::Result<()> {
    let mut closer = lock();
    if closer.is_none() {
        *closer = Some(Closer::start()?);
    }
    if closer.as_ref().is_some_and(Closer::has_room) {
        return Ok(());
    }
    let text = "sockets of other users are still being closed";
    Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
}

/// Closes a socket elsewhere, after [`check_room`] has started the thread.
pub(super) fn close(socket: OwnedFd) {
    if let Some(closer) = &*lock() {
        closer.close(socket);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

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
        let (slow, never_reads) = slow();
        closer.close(slow.into());
        let (quick, _) = std::os::unix::net::UnixStream::pair().unwrap();
        for _ in 1..MAX_CLOSING {
            assert!(closer.has_room());
            closer.close(quick.try_clone().unwrap().into());
        }
        // The first one is still being closed.
        assert!(!closer.has_room());
        drop(never_reads);
        eventually("all are closed", Duration::from_secs(20), || {
            closer.unclosed.load(Ordering::Relaxed) == 0
        });
        assert!(closer.has_room());
    }
}
