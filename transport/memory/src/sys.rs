//! System calls that move bytes between a descriptor and memory without a copy of ours.
//!
//! A [`SendPiece`] is bytes to send, a [`ReceivePiece`] room to receive into: each an ordinary
//! slice or a range of a mapping, borrowed until the call is over. The kernel stands where a device
//! does otherwise: it may write a mapping while others copy from it.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::MemSlice;

/// Piece of memory whose bytes are to be sent.
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
    /// A part of a range.
    ///
    /// # Panics
    /// If `part` is not within it.
    #[must_use]
    pub fn part(slice: &'a MemSlice, part: Range<usize>) -> Self {
        Self(part_of(slice, part), PhantomData)
    }

    /// Length of the piece in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The rest of `pieces` after their first `count` bytes; no piece of it is empty.
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

/// Room to receive into.
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
    /// A part of a range.
    ///
    /// # Panics
    /// If `part` is not within it.
    #[must_use]
    pub fn part(slice: &'a MemSlice, part: Range<usize>) -> Self {
        Self(part_of(slice, part), PhantomData)
    }
}

/// Sends what a socket has room for now and returns how many bytes that was. It neither waits nor
/// raises `SIGPIPE`.
///
/// # Errors
/// The errors of `sendmsg(2)`: `WouldBlock` where there is no room, `EMSGSIZE` for more than 1,024
/// pieces.
pub fn send(socket: BorrowedFd<'_>, pieces: &[SendPiece<'_>]) -> io::Result<usize> {
    let message = header(pieces.as_ptr().cast_mut().cast(), pieces.len());
    // A peer that is gone is an error of this connection, not a signal to the process.
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: every piece is bytes or a range of a mapping that is borrowed beyond the call, which
    // only reads them.
    checked(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) })
}

/// Receives what has arrived at a socket, into one piece after the other, and returns how many
/// bytes that was: 0 at the end of the stream. It does not wait.
///
/// # Errors
/// The errors of `recvmsg(2)`: `WouldBlock` where nothing has arrived.
pub fn receive(socket: BorrowedFd<'_>, pieces: &mut [ReceivePiece<'_>]) -> io::Result<usize> {
    let mut message = header(pieces.as_mut_ptr().cast(), pieces.len());
    // SAFETY: every piece is a slice that is borrowed exclusively, or a range of a mapping, to
    // which no Rust reference exists; they outlive the call.
    checked(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
}

/// Bytes that a socket has taken and its peer has not acknowledged (`SIOCOUTQ` of `tcp(7)`). A
/// socket of the domain `AF_UNIX` gives the memory that its unread bytes take, which is more.
///
/// # Errors
/// The errors of `ioctl(2)`.
pub fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer, which outlives it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    checked(result as isize)?;
    Ok(bytes.try_into().unwrap_or(0))
}

/// Time since the peer's host last acknowledged anything, if it owes an acknowledgement of data that
/// TCP has retransmitted. A host whose receive window is closed owes none.
///
/// # Errors
/// The errors of `getsockopt(2)`; the socket may not be one of TCP.
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
    // SAFETY: all-zero bytes are a valid structure of integers, which the kernel has filled.
    let info = unsafe { info.assume_init() };
    let owes = info.tcpi_unacked > 0 && info.tcpi_retransmits > 0;
    Ok(owes.then(|| Duration::from_millis(info.tcpi_last_ack_recv.into())))
}

/// Reads a part of a file into `room` and returns how many bytes that was.
///
/// # Errors
/// The errors of `pread(2)`.
pub fn read_at(file: BorrowedFd<'_>, room: &MemSlice, offset: u64) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the range is mapped and writable as long as the slice, and no Rust reference to it
    // exists.
    checked(unsafe { libc::pread(file.as_raw_fd(), room.ptr().cast(), room.len(), offset) })
}

/// Reads a part of a file into one piece after the other and returns how many bytes that was.
///
/// # Errors
/// The errors of `preadv(2)`: `EINVAL` for more than 1,024 pieces.
pub fn read_pieces_at(
    file: BorrowedFd<'_>,
    pieces: &mut [ReceivePiece<'_>],
    offset: u64,
) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is a slice that is borrowed exclusively, or a range of a mapping, to
    // which no Rust reference exists; they outlive the call. `repr(transparent)` makes the list one
    // of vectors.
    checked(unsafe { libc::preadv(file.as_raw_fd(), pieces.as_ptr().cast(), count, offset) })
}

/// Writes the pieces, in order, at `offset` of a file and returns how many bytes it took. If
/// `durable`, these are on the medium when the call returns.
///
/// # Errors
/// The errors of `pwritev2(2)`: `EINVAL` for more than 1,024 pieces.
pub fn write_pieces_at(
    file: BorrowedFd<'_>,
    pieces: &[SendPiece<'_>],
    offset: u64,
    durable: bool,
) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    let flags = if durable { libc::RWF_DSYNC } else { 0 };
    // SAFETY: every piece is bytes or a range of a mapping that is borrowed beyond the call, which
    // only reads them. `repr(transparent)` makes the list one of vectors.
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

/// Reads what a descriptor has at its own position, into one piece after the other, and returns how
/// many bytes that was.
///
/// # Errors
/// The errors of `readv(2)`: `WouldBlock` where a descriptor that does not block has nothing.
pub fn read_pieces(fd: BorrowedFd<'_>, pieces: &mut [ReceivePiece<'_>]) -> io::Result<usize> {
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is a slice that is borrowed exclusively, or a range of a mapping, to
    // which no Rust reference exists; they outlive the call. `repr(transparent)` makes the list one
    // of vectors.
    checked(unsafe { libc::readv(fd.as_raw_fd(), pieces.as_ptr().cast(), count) })
}

/// Writes the pieces, in order, to a descriptor at its own position and returns how many bytes it
/// took.
///
/// # Errors
/// The errors of `writev(2)`: `EINVAL` for more than 1,024 pieces.
pub fn write_pieces(fd: BorrowedFd<'_>, pieces: &[SendPiece<'_>]) -> io::Result<usize> {
    let count = pieces.len().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: every piece is bytes or a range of a mapping that is borrowed beyond the call, which
    // only reads them. `repr(transparent)` makes the list one of vectors.
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

/// The pieces are `repr(transparent)`, so a list of them is a list of vectors.
fn header(vectors: *mut libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all zeroes is a message header without address, vectors and control data.
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
    fn bytes_and_ranges_go_out_and_come_in_in_order() {
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
    fn a_socket_without_bytes_or_room_does_not_block() {
        let (a, b) = UnixStream::pair().unwrap();
        let error = receive(b.as_fd(), &mut [ReceivePiece::from(&mut [0; 4][..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let error = send(a.as_fd(), &[SendPiece::from(&b"late"[..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn bytes_are_unacknowledged_until_they_are_read() {
        let (a, mut b) = UnixStream::pair().unwrap();
        assert_eq!(unacknowledged(a.as_fd()).unwrap(), 0);
        send(a.as_fd(), &[SendPiece::from(&[7; 100][..])]).unwrap();
        assert!(unacknowledged(a.as_fd()).unwrap() >= 100);
        b.read_exact(&mut [0; 100]).unwrap();
        assert_eq!(unacknowledged(a.as_fd()).unwrap(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on files")]
    fn pieces_are_written_and_read_at_their_place_in_a_file() {
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
        // Short at the end of the file.
        assert_eq!(read_pieces_at(file.as_fd(), &mut pieces, 100).unwrap(), 19);
        assert_eq!(&head, b"head ");
        assert_eq!(room.slice(0..14).unwrap().to_vec(), b"from a mapping");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no such calls on sockets")]
    fn pieces_go_through_any_descriptor() {
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
    fn a_part_past_the_end_panics() {
        let memory = Memory::new(PAGE).unwrap();
        let _ = SendPiece::part(&memory.whole(), 0..PAGE + 1);
    }
}
