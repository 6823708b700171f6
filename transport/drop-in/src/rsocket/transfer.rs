//! Sending and receiving on a stream.

use std::ffi::{c_int, c_void};

use super::connection::AGAIN;
use super::link::Link;
use super::socket::{Inner, Socket};
use super::stream::State;
use crate::errno::Errno;

/// Bytes of the first write of a call, and most of any. The first one is short, so that it is under
/// way while the next ones are copied.
const PIECES: (usize, usize) = (2048, 65536);

/// The link of a stream socket that is connected, which it may become now.
fn link(inner: &mut Inner) -> Result<&mut Link, Errno> {
    if inner.kind.stream()?.outcome() == Err(AGAIN) {
        inner.progress();
    }
    let connection = inner.kind.stream()?;
    connection.outcome()?;
    Ok(connection.link())
}

/// Why nothing can be written.
fn why_not_writable(link: &mut Link) -> Result<(), Errno> {
    let stream = link.stream();
    match stream.state() {
        State::Failed(errno) => Err(Errno(errno)),
        _ if stream.is_write_open() => Ok(()),
        _ => Err(Errno(libc::ECONNRESET)),
    }
}

/// Sends bytes: all of them where the call may wait, and else as many as there is room for.
///
/// # Errors
/// `EAGAIN`, `ECONNRESET` for a direction that is closed, and why the stream has failed; only where
/// nothing was sent.
pub(super) fn send(socket: &Socket, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
    write(socket, bytes.len(), flags, |link, done, max| {
        Ok(link.send(&bytes[done..], max))
    })
}

/// Writes bytes into an iomap of the other end's.
///
/// # Errors
/// As [`send`], and `ENXIO` where nothing is mapped at the offset.
pub(super) fn send_direct(
    socket: &Socket,
    bytes: &[u8],
    offset: u64,
    flags: c_int,
) -> Result<usize, Errno> {
    write(socket, bytes.len(), flags, |link, done, max| {
        let offset = offset.checked_add(done as u64).ok_or(Errno::INVALID)?;
        link.send_direct(&bytes[done..], max, offset)
    })
}

fn write(
    socket: &Socket,
    length: usize,
    flags: c_int,
    mut piece: impl FnMut(&mut Link, usize, usize) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    let mut max = PIECES.0;
    let result = socket.attempt(flags, |inner| {
        let link = link(inner)?;
        // Once in a row: what comes may be no reason to go on, and come without end.
        let mut has_looked = false;
        loop {
            // The other end hears of iomaps before it gets data that may speak of them.
            let n = match link.announce_maps() {
                true if done == length => return Ok(()),
                true => piece(link, done, max)?,
                false => 0,
            };
            done += n;
            if n > 0 {
                max = (2 * max).min(PIECES.1);
                has_looked = false;
                continue;
            }
            why_not_writable(link)?;
            if has_looked || !link.progress() {
                return Err(AGAIN);
            }
            has_looked = true;
        }
    });
    if done > 0 {
        Ok(done)
    } else {
        result.map(|()| 0)
    }
}

/// Receives bytes: what there is, or with `MSG_WAITALL` as many as there is room for. 0 at the end
/// of the stream.
///
/// # Errors
/// `EAGAIN`, and why the stream has failed; only where nothing was received.
pub(super) fn receive(socket: &Socket, into: &mut [u8], flags: c_int) -> Result<usize, Errno> {
    let is_peek = flags & libc::MSG_PEEK != 0;
    let is_all = flags & libc::MSG_WAITALL != 0 && !is_peek;
    let mut done = 0;
    let result = socket.attempt(flags, |inner| {
        let link = link(inner)?;
        // As above.
        let mut has_looked = false;
        loop {
            let n = link.receive(&mut into[done..], is_peek);
            done += n;
            if done == into.len() || (done > 0 && !is_all) {
                return Ok(());
            }
            if n > 0 || !has_looked && link.progress() {
                has_looked = n == 0;
                continue;
            }
            let stream = link.stream();
            match stream.state() {
                State::Failed(errno) => return Err(Errno(errno)),
                _ if !stream.is_read_open() => return Ok(()),
                _ => return Err(AGAIN),
            }
        }
    });
    if done > 0 {
        Ok(done)
    } else {
        result.map(|()| 0)
    }
}

/// Maps a program's buffer for the other end.
///
/// # Errors
/// `ENOTCONN`, `ENOMEM` where the other end has no place left, and those of registering it.
///
/// # Safety
/// The program keeps the buffer until it unmaps it or closes the socket.
pub(super) unsafe fn map(
    socket: &Socket,
    buffer: (*mut c_void, usize),
    is_writable: bool,
    offset: u64,
) -> Result<(), Errno> {
    let inner = &mut *socket.lock();
    let link = inner.kind.stream()?.link_for_maps()?;
    let places = is_writable.then(|| link.stream().peer_iomaps());
    let pd = link.pd();
    // SAFETY: as the caller promises; the queue pair has its protection domain.
    unsafe { link.maps.add(pd, buffer, places, offset) }
}

/// Takes back what [`map`] has done. The other end's keys for the buffer are void from now on.
///
/// # Errors
/// `EINVAL` where the buffer is not mapped.
pub(super) fn unmap(socket: &Socket, buffer: *mut c_void, length: usize) -> Result<(), Errno> {
    let inner = &mut *socket.lock();
    let link = inner.kind.stream()?.link_for_maps()?;
    link.maps.remove(buffer, length)
}
