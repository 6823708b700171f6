//! Waiting for several sockets, and for files beside them.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::options::Defaults;
use super::socket::{Socket, calm, find, poll, poll_in, sleeper};
use crate::errno::Errno;

/// What a program waits for.
struct Waiting<'a> {
    fds: &'a mut [libc::pollfd],
    /// The sockets among them.
    sockets: Vec<Option<Arc<Socket>>>,
}

impl Waiting<'_> {
    /// Looks at all of them, without waiting; answers how many have an event.
    fn look(&mut self) -> Result<usize, Errno> {
        let mut files: Vec<libc::pollfd> = self.fds.to_vec();
        for (file, socket) in files.iter_mut().zip(&self.sockets) {
            if socket.is_some() {
                file.fd = -1;
            }
        }
        if self.sockets.iter().any(Option::is_none) {
            poll(&mut files, Some(Duration::ZERO))?;
        }
        for ((fd, file), socket) in self.fds.iter_mut().zip(&files).zip(&self.sockets) {
            fd.revents = match socket {
                Some(socket) => socket.lock().revents(fd.events),
                None => file.revents,
            };
        }
        Ok(self.fds.iter().filter(|fd| fd.revents != 0).count())
    }

    /// Sleeps until something happens to one of them.
    fn sleep(&mut self, left: Option<Duration>) -> Result<(), Errno> {
        let own = sleeper()?;
        let mut all = Vec::with_capacity(self.fds.len() + 1);
        for (fd, socket) in self.fds.iter().zip(&self.sockets) {
            match socket {
                Some(socket) => all.extend(socket.lock().begin_sleep(&own)),
                None => all.push(*fd),
            }
        }
        all.push(poll_in(own.as_raw_fd()));
        // A sleeper is listed before this look, so that no event passes it by.
        let result = match self.look() {
            Ok(0) => poll(&mut all, left).map(drop),
            Ok(_) => Ok(()),
            Err(errno) => Err(errno),
        };
        calm(&own);
        for socket in self.sockets.iter().flatten() {
            socket.lock().end_sleep(&own);
        }
        result
    }
}

/// `rpoll`: waits for at least one event; `None` waits without end.
///
/// # Errors
/// Those of `poll(2)`.
pub(super) fn wait(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize, Errno> {
    let start = Instant::now();
    let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
    let sockets = fds.iter().map(|fd| find(fd.fd)).collect();
    let mut waiting = Waiting { fds, sockets };
    loop {
        let n = waiting.look()?;
        let now = Instant::now();
        if n > 0 || deadline.is_some_and(|deadline| now >= deadline) {
            return Ok(n);
        }
        if now - start >= Defaults::get().polling {
            break;
        }
    }
    loop {
        for socket in waiting.sockets.iter().flatten() {
            socket.lock().arm();
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        waiting.sleep(left)?;
        let n = waiting.look()?;
        if n > 0 || left == Some(Duration::ZERO) {
            return Ok(n);
        }
    }
}

/// Sets of `select(2)`: what may be read, what may be written, what is exceptional.
pub(super) type Sets<'a> = [Option<&'a mut libc::fd_set>; 3];

/// `rselect`.
///
/// # Errors
/// `EINVAL` for more files than a set has, `EBADF` for one that does not exist, those of `poll(2)`.
pub(super) fn select(
    count: c_int,
    mut sets: Sets<'_>,
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
        return Err(Errno::INVALID);
    }
    const MEANING: [(i16, i16); 3] = [
        (libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
        (libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
        (libc::POLLPRI, libc::POLLPRI),
    ];
    let mut fds = Vec::new();
    for fd in 0..count {
        let mut events = 0;
        for (set, (asked, _)) in sets.iter().zip(MEANING) {
            // SAFETY: the set is alive, and the number is below its size.
            let has = |set: &&mut libc::fd_set| unsafe { libc::FD_ISSET(fd, *set) };
            if set.as_ref().is_some_and(has) {
                events |= asked;
            }
        }
        if events != 0 {
            fds.push(libc::pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    wait(&mut fds, timeout)?;
    if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        return Err(Errno(libc::EBADF));
    }
    let mut n = 0;
    for (set, (asked, answers)) in sets.iter_mut().zip(MEANING) {
        let Some(set) = set.as_deref_mut() else {
            continue;
        };
        // SAFETY: the set is alive, and the numbers are below its size.
        unsafe {
            libc::FD_ZERO(set);
            for fd in fds.iter().filter(|fd| fd.events & asked != 0) {
                if fd.revents & answers != 0 {
                    libc::FD_SET(fd.fd, set);
                    n += 1;
                }
            }
        }
    }
    Ok(n)
}
