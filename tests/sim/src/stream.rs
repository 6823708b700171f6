//! Streams between peers and the network.

use std::cell::Cell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

/// One end of a nonblocking stream.
///
/// Most streams are empty most of the time. To avoid system calls, an end is only read if the other
/// end has written to its socket or closed it.
#[derive(Debug)]
pub struct Stream {
    socket: UnixStream,
    /// Set if the other end may have sent or closed since the stream was found empty.
    is_pending: Rc<Cell<bool>>,
    /// Notifies the other end, or `None` if this is a plain socket.
    other: Option<Notifier>,
}

/// Sets the flag of the other end, including when this end is closed.
#[derive(Debug)]
struct Notifier(Rc<Cell<bool>>);

impl Notifier {
    fn notify(&self) {
        self.0.set(true);
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.notify();
    }
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Panics
    /// If there are too many open files.
    #[must_use]
    pub fn pair() -> (Self, Self) {
        let (a, b) = plain_pair().expect("two sockets");
        let pending = || Rc::new(Cell::new(true));
        let (of_a, of_b) = (pending(), pending());
        let end = |socket, own: &Rc<_>, other: &Rc<_>| Self {
            socket,
            is_pending: Rc::clone(own),
            other: Some(Notifier(Rc::clone(other))),
        };
        (end(a, &of_a, &of_b), end(b, &of_b, &of_a))
    }

    /// Creates a stream with a plain socket. The owner of the stream must be
    /// [notified](Self::note_activity) when the socket was used.
    ///
    /// # Errors
    /// If there are too many open files.
    pub fn with_plain_socket() -> io::Result<(UnixStream, Self)> {
        let (plain, socket) = plain_pair()?;
        let stream = Self {
            socket,
            is_pending: Rc::new(Cell::new(true)),
            other: None,
        };
        Ok((plain, stream))
    }

    /// Returns whether the other end is a plain socket.
    #[must_use]
    pub fn has_plain_socket(&self) -> bool {
        self.other.is_none()
    }

    /// Called when the other end may have been used.
    pub fn note_activity(&self) {
        self.is_pending.set(true);
    }

    /// Returns the socket of a stream with a plain socket at the other end.
    #[must_use]
    pub fn into_socket(self) -> UnixStream {
        debug_assert!(self.has_plain_socket());
        self.socket
    }

    /// Closes both directions.
    pub fn close(&self) {
        self.notify();
        // This fails if the other end is already closed.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn notify(&self) {
        if let Some(other) = &self.other {
            other.notify();
        }
    }
}

impl Read for Stream {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        if !self.is_pending.get() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let result = self.socket.read(data);
        if result
            .as_ref()
            .is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
        {
            self.is_pending.set(false);
        }
        result
    }
}

impl Write for Stream {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.notify();
        self.socket.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn plain_pair() -> io::Result<(UnixStream, UnixStream)> {
    let (a, b) = UnixStream::pair()?;
    a.set_nonblocking(true)?;
    b.set_nonblocking(true)?;
    Ok((a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_empty(stream: &mut Stream) -> bool {
        let result = stream.read(&mut [0; 8]);
        result.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    #[test]
    fn stream_is_read_after_changes() {
        let (mut a, mut b) = Stream::pair();
        assert!(is_empty(&mut a) && !a.is_pending.get());
        b.write_all(&[1; 12]).unwrap();
        assert_eq!(a.read(&mut [0; 8]).unwrap(), 8);
        assert_eq!(a.read(&mut [0; 8]).unwrap(), 4);
        assert!(is_empty(&mut a));
        drop(b);
        assert_eq!(a.read(&mut [0; 8]).unwrap(), 0);
        let (mut a, b) = Stream::pair();
        assert!(is_empty(&mut a));
        b.close();
        assert_eq!(a.read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn plain_socket_requires_notification() {
        let (mut plain, mut stream) = Stream::with_plain_socket().unwrap();
        assert!(stream.has_plain_socket() && is_empty(&mut stream));
        plain.write_all(&[1]).unwrap();
        assert!(is_empty(&mut stream));
        stream.note_activity();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 1);
    }
}
