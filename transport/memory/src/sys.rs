//! System calls that transfer bytes between a descriptor and memory without an additional copy.
//!
//! A [`SendPiece`] contains bytes to send, and a [`ReceivePiece`] is a buffer to receive into. Both
//! are either an ordinary slice or a range of a mapping, borrowed during the call. In this case the
//! kernel acts like a device: it may write to a mapping while other threads copy from it.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::MemSlice;

/// A range of bytes to send.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct SendPiece<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> From<&'a [u8]> for SendPiece<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self(vector(bytes.as_ptr().cast_mut(), bytes.len()), PhantomData)
    }
}

impl<'a> From<&'a MemSlice> for SendPiece<'a> {
    fn from(slice: &'a MemSlice) -> Self {
        Self(vector(slice.ptr(), slice.len()), PhantomData)
    }
}

impl<'a> SendPiece<'a> {
    /// Creates a piece from a part of a range.
    ///
    /// # Panics
    /// Panics if `part` is out of bounds.
    #[must_use]
    pub fn part(slice: &'a MemSlice, part: Range<usize>) -> Self {
        Self(part_of(slice, part), PhantomData)
    }

    /// Returns the length of the piece in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Skips the first `count` bytes of `pieces`. The remaining pieces are not empty.
pub fn skip<'a>(
    pieces: impl IntoIterator<Item = SendPiece<'a>>,
    count: usize,
) -> impl Iterator<Item = SendPiece<'a>> {
    let mut left = count;
    pieces.into_iter().filter_map(move |SendPiece(all, of)| {
        let skipped = left.min(all.iov_len);
        left -= skipped;
        let start = all.iov_base.cast::<u8>().wrapping_add(skipped);
        let rest = SendPiece(vector(start, all.iov_len - skipped), of);
        (!rest.is_empty()).then_some(rest)
    })
}

/// A buffer to receive into.
#[repr(transparent)]
pub struct ReceivePiece<'a>(libc::iovec, PhantomData<&'a mut [u8]>);

impl<'a> From<&'a mut [u8]> for ReceivePiece<'a> {
    fn from(room: &'a mut [u8]) -> Self {
        Self(vector(room.as_mut_ptr(), room.len()), PhantomData)
    }
}

impl<'a> From<&'a MemSlice> for ReceivePiece<'a> {
    fn from(slice: &'a MemSlice) -> Self {
        Self(vector(slice.ptr(), slice.len()), PhantomData)
    }
}

impl<'a> ReceivePiece<'a> {
    /// Creates a piece from a part of a range.
    ///
    /// # Panics
    /// Panics if `part` is out of bounds.
    #[must_use]
    pub fn part(slice: &'a MemSlice, part: Range<usize>) -> Self {
        Self(part_of(slice, part), PhantomData)
    }
}

/// Sends as many bytes as the socket has room for, and returns their number. Does not block or
/// raise `SIGPIPE`.
///
/// # Errors
/// Returns errors of `sendmsg(2)`: `WouldBlock` if there is no room, `EMSGSIZE` for more than 1,024
/// pieces.
pub fn send(socket: BorrowedFd<'_>, pieces: &[SendPiece<'_>]) -> io::Result<usize> {
    let message = header(pieces.as_ptr().cast_mut().cast(), pieces.len());
    // If the peer has closed the connection, we want an error for this connection, not a signal.
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: every piece is a slice or a range of a mapping that is borrowed during the call, and
    // the call only reads it.
    checked(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// Receives available bytes from a socket into the pieces, in order, and returns their number,
/// which is 0 at the end of the stream. Does not block.
///
/// # Errors
/// Returns errors of `recvmsg(2)`: `WouldBlock` if no bytes are available.
pub fn receive(socket: BorrowedFd<'_>, pieces: &mut [ReceivePiece<'_>]) -> io::Result<usize> {
    let mut message = header(pieces.as_mut_ptr().cast(), pieces.len());
    // SAFETY: every piece is an exclusively borrowed slice, or a range of a mapping without Rust
    // references to it. They outlive the call.
    checked(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
}

/// Returns the number of bytes that were sent, but not yet acknowledged by the peer (`SIOCOUTQ` of
/// `tcp(7)`). For `AF_UNIX` sockets, this is the memory used by unread bytes, which is more.
///
/// # Errors
/// Returns errors of `ioctl(2)`.
pub fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer, which outlives it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    checked(result as isize)?;
    Ok(bytes.try_into().unwrap_or(0))
}

/// Returns the time since the last acknowledgement from the peer's host, if TCP has retransmitted
/// data and is waiting for its acknowledgement. Returns `None` if the peer's receive window is
/// closed.
///
/// # Errors
/// Returns errors of `getsockopt(2)`, for example if the socket does not use TCP.
pub fn peer_silence(socket: BorrowedFd<'_>) -> io::Result<Option<Duration>> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the call writes at most `len` bytes of the structure, which outlives it.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    checked(result as isize)?;
    // SAFETY: all zeroes is a valid structure of integers, and the kernel has initialized it.
    let info = unsafe { info.assume_init() };
    let owes = info.tcpi_unacked > 0 && info.tcpi_retransmits > 0;
    Ok(owes.then(|| Duration::from_millis(info.tcpi_last_ack_recv.into())))
}

/// Reads a part of a file into `room` and returns the number of bytes.
///
/// # Errors
/// Returns errors of `pread(2)`.
pub fn read_at(file: BorrowedFd<'_>, room: &MemSlice, offset: u64) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the range is mapped and writable while the slice exists, and there are no Rust
    // references to it.
    checked(unsafe { libc::pread(file.as_raw_fd(), room.ptr().cast(), room.len(), offset) })
}

/// Reads a part of a file into the pieces, in order, and returns the number of bytes.
///
/// # Errors
/// Returns errors of `preadv(2)`: `EINVAL` for more than 1,024 pieces.
pub fn read_pieces_at(
    file: BorrowedFd<'_>,
    pieces: &mut [ReceivePiece<'_>],
    offset: u64,
) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is an exclusively borrowed slice, or a range of a mapping without Rust
    // references to it. They outlive the call. Due to `repr(transparent)` the list is a list of
    // vectors.
    checked(unsafe { libc::preadv(file.as_raw_fd(), pieces.as_ptr().cast(), count, offset) })
}

/// Writes the pieces, in order, at `offset` of a file and returns the number of bytes written. If
/// `durable` is set, they are on stable storage when this returns.
///
/// # Errors
/// Returns errors of `pwritev2(2)`: `EINVAL` for more than 1,024 pieces.
pub fn write_pieces_at(
    file: BorrowedFd<'_>,
    pieces: &[SendPiece<'_>],
    offset: u64,
    durable: bool,
) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    let flags = if durable { libc::RWF_DSYNC } else { 0 };
    // SAFETY: every piece is a slice or a range of a mapping that is borrowed during the call, and
    // the call only reads it. Due to `repr(transparent)` the list is a list of vectors.
    checked(unsafe {
        libc::pwritev2(
            file.as_raw_fd(),
            pieces.as_ptr().cast(),
            count,
            offset,
            flags,
        )
    })
}

/// Reads from the current position of a descriptor into the pieces, in order, and returns the
/// number of bytes.
///
/// # Errors
/// Returns errors of `readv(2)`: `WouldBlock` if the descriptor is non-blocking and no bytes are
/// available.
pub fn read_pieces(fd: BorrowedFd<'_>, pieces: &mut [ReceivePiece<'_>]) -> io::Result<usize> {
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is an exclusively borrowed slice, or a range of a mapping without Rust
    // references to it. They outlive the call. Due to `repr(transparent)` the list is a list of
    // vectors.
    checked(unsafe { libc::readv(fd.as_raw_fd(), pieces.as_ptr().cast(), count) })
}

/// Writes the pieces, in order, at the current position of a descriptor and returns the number of
/// bytes written.
///
/// # Errors
/// Returns errors of `writev(2)`: `EINVAL` for more than 1,024 pieces.
pub fn write_pieces(fd: BorrowedFd<'_>, pieces: &[SendPiece<'_>]) -> io::Result<usize> {
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is a slice or a range of a mapping that is borrowed during the call, and
    // the call only reads it. Due to `repr(transparent)` the list is a list of vectors.
    checked(unsafe { libc::writev(fd.as_raw_fd(), pieces.as_ptr().cast(), count) })
}

fn vector(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

fn part_of(slice: &MemSlice, part: Range<usize>) -> libc::iovec {
    assert!(
        part.start <= part.end && part.end <= slice.len(),
        "part {part:?} beyond {}",
        slice.len()
    );
    vector(slice.ptr().wrapping_add(part.start), part.len())
}

/// Creates a message header for a list of pieces. They are `repr(transparent)`, so it is a list of
/// vectors.
fn header(vectors: *mut libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all zeroes is a message header without an address, vectors or control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = vectors;
    message.msg_iovlen = count as _;
    message
}

fn checked(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{Memory, PAGE};

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn pieces_are_sent_and_received_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let memory = Memory::new(PAGE).unwrap();
        memory.write(10, b"from a mapping");
        let range = memory.slice(10..24).unwrap();
        let pieces = [
            SendPiece::from(&b"head "[..]),
            SendPiece::part(&range, 5..14),
            SendPiece::from(&range),
        ];
        assert_eq!(send(a.as_fd(), &pieces).unwrap(), 5 + 9 + 14);
        let rest: Vec<_> = skip(pieces, 5 + 9 + 5).collect();
        assert_eq!(rest.len(), 1);
        assert_eq!(send(a.as_fd(), &rest).unwrap(), 9);

        let mut head = [0; 5];
        let room = memory.slice(100..200).unwrap();
        let tail = room.slice(50..100).unwrap();
        let mut pieces = [
            ReceivePiece::from(&mut head[..]),
            ReceivePiece::part(&room, 1..10),
            ReceivePiece::from(&tail),
        ];
        assert_eq!(receive(b.as_fd(), &mut pieces).unwrap(), 37);
        assert_eq!(&head, b"head ");
        assert_eq!(room.slice(1..10).unwrap().to_vec(), b"a mapping");
        assert_eq!(
            room.slice(50..73).unwrap().to_vec(),
            b"from a mappinga mapping"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn empty_or_closed_socket_does_not_block() {
        let (a, b) = UnixStream::pair().unwrap();
        let error = receive(b.as_fd(), &mut [ReceivePiece::from(&mut [0; 4][..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let error = send(a.as_fd(), &[SendPiece::from(&b"late"[..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn unread_bytes_are_unacknowledged() {
        let (a, mut b) = UnixStream::pair().unwrap();
        assert_eq!(unacknowledged(a.as_fd()).unwrap(), 0);
        send(a.as_fd(), &[SendPiece::from(&[7; 100][..])]).unwrap();
        assert!(unacknowledged(a.as_fd()).unwrap() >= 100);
        b.read_exact(&mut [0; 100]).unwrap();
        assert_eq!(unacknowledged(a.as_fd()).unwrap(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on files")]
    fn file_pieces_use_given_offset() {
        let path = std::env::temp_dir().join(format!("riser-pieces-{}", std::process::id()));
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true).create_new(true);
        let file = options.open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let memory = Memory::new(PAGE).unwrap();
        memory.write(10, b"from a mapping");
        let range = memory.slice(10..24).unwrap();
        let pieces = [SendPiece::from(&b"head "[..]), SendPiece::from(&range)];
        for durable in [false, true] {
            let written = write_pieces_at(file.as_fd(), &pieces, 100, durable);
            assert_eq!(written.unwrap(), 5 + 14);
        }
        let mut head = [0; 5];
        let room = memory.slice(100..200).unwrap();
        let mut pieces = [ReceivePiece::from(&mut head[..]), ReceivePiece::from(&room)];
        // Short read at the end of the file.
        assert_eq!(read_pieces_at(file.as_fd(), &mut pieces, 100).unwrap(), 19);
        assert_eq!(&head, b"head ");
        assert_eq!(room.slice(0..14).unwrap().to_vec(), b"from a mapping");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn pieces_work_with_any_descriptor() {
        let (a, b) = UnixStream::pair().unwrap();
        b.set_nonblocking(true).unwrap();
        let memory = Memory::new(PAGE).unwrap();
        memory.write(0, b"body");
        let body = memory.slice(0..4).unwrap();
        let pieces = [SendPiece::from(&b"head"[..]), SendPiece::from(&body)];
        assert_eq!(write_pieces(a.as_fd(), &pieces).unwrap(), 8);
        let room = memory.slice(100..200).unwrap();
        let mut head = [0; 6];
        let mut pieces = [ReceivePiece::from(&mut head[..]), ReceivePiece::from(&room)];
        assert_eq!(read_pieces(b.as_fd(), &mut pieces).unwrap(), 8);
        let nothing = read_pieces(b.as_fd(), &mut pieces).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(&head, b"headbo");
        assert_eq!(room.slice(0..2).unwrap().to_vec(), b"dy");
    }

    #[test]
    #[should_panic(expected = "beyond")]
    fn part_past_end_panics() {
        let memory = Memory::new(PAGE).unwrap();
        let _ = SendPiece::part(&memory.whole(), 0..PAGE + 1);
    }
}
