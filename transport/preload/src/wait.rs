//! `poll` and `select`.

use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use crate::table::rsocket;
use crate::{fail, rdma, real};

/// Milliseconds for a timeout, rounded up; -1 without end. `None` for a time that does not exist.
fn milliseconds(timeout: Option<(i64, i64)>, per_second: i64) -> Option<c_int> {
    let Some((seconds, parts)) = timeout else {
        return Some(-1);
    };
    if seconds < 0 || !(0..per_second).contains(&parts) {
        return None;
    }
    let nanos = parts * (1_000_000_000 / per_second);
    let whole = Duration::new(seconds as u64, nanos as u32);
    let ms = whole.as_nanos().div_ceil(1_000_000);
    Some(c_int::try_from(ms).unwrap_or(c_int::MAX))
}

/// Milliseconds of a program's `timespec`, or of none.
///
/// # Safety
/// The pointer is null, or the time is alive.
pub(crate) unsafe fn of_timespec(timeout: *const timespec) -> Option<c_int> {
    // SAFETY: as the caller promises.
    let timeout = unsafe { timeout.as_ref() };
    milliseconds(timeout.map(|t| (t.tv_sec, t.tv_nsec)), 1_000_000_000)
}

/// Calls with the signals blocked that a program gives for the time of a wait.
///
/// # Safety
/// The pointer is null, or the set is alive.
pub(crate) unsafe fn masked<T>(mask: *const sigset_t, call: impl FnOnce() -> T) -> T {
    // SAFETY: as the caller promises; all-zero bytes are a valid set.
    unsafe {
        if mask.is_null() {
            return call();
        }
        let mut before: sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut before);
        let result = call();
        let errno = crate::errno();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        fail(errno);
        result
    }
}

/// `rpoll` for a program's entries.
///
/// # Safety
/// The entries are alive.
unsafe fn rpoll(fds: &mut [pollfd], timeout: c_int) -> c_int {
    let translate = |entry: &pollfd| pollfd {
        fd: rsocket(entry.fd).unwrap_or(entry.fd),
        events: entry.events,
        revents: 0,
    };
    let mut ours: Vec<pollfd> = fds.iter().map(translate).collect();
    // SAFETY: the entries are alive.
    let result = unsafe { rdma::rpoll(ours.as_mut_ptr(), ours.len() as nfds_t, timeout) };
    if result >= 0 {
        for (entry, ours) in fds.iter_mut().zip(&ours) {
            entry.revents = ours.revents;
        }
    }
    result
}

/// A program's entries, if an rsocket is among them.
///
/// # Safety
/// The pointer is null or points to `count` entries.
unsafe fn with_rsockets<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    let count = usize::try_from(count).ok()?;
    if fds.is_null() || count == 0 {
        return None;
    }
    // SAFETY: as the caller promises.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count) };
    fds.iter()
        .any(|entry| rsocket(entry.fd).is_some())
        .then_some(fds)
}

/// `poll(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's entries.
    unsafe {
        match with_rsockets(fds, count) {
            Some(fds) => rpoll(fds, timeout),
            None => real::poll(fds, count, timeout),
        }
    }
}

/// `poll` of a program that was built with checks of its buffers.
#[unsafe(no_mangle)]
unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: size_t,
) -> c_int {
    // SAFETY: the program's entries; the C library ends one that has fewer.
    unsafe {
        if room / size_of::<pollfd>() < count as usize {
            return real::__poll_chk(fds, count, timeout, room);
        }
        poll(fds, count, timeout)
    }
}

/// `ppoll(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's entries, time and set.
    unsafe {
        let Some(ours) = with_rsockets(fds, count) else {
            return real::ppoll(fds, count, timeout, mask);
        };
        match of_timespec(timeout) {
            Some(timeout) => masked(mask, || rpoll(ours, timeout)),
            None => fail(libc::EINVAL),
        }
    }
}

/// `ppoll` of a program that was built with checks of its buffers.
#[unsafe(no_mangle)]
unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    // SAFETY: the program's entries; the C library ends one that has fewer.
    unsafe {
        if room / size_of::<pollfd>() < count as usize {
            return real::__ppoll_chk(fds, count, timeout, mask, room);
        }
        ppoll(fds, count, timeout, mask)
    }
}

/// Events that each set of `select` asks for, and those that put a descriptor into it.
const SETS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// Entries for the sets of a program.
///
/// # Safety
/// Each pointer is null, or the set is alive.
unsafe fn entries(count: c_int, sets: [*mut fd_set; 3]) -> Vec<pollfd> {
    let mut entries = Vec::new();
    for fd in 0..count.clamp(0, libc::FD_SETSIZE as c_int) {
        let mut events = 0;
        for (set, (asked, _)) in sets.iter().zip(SETS) {
            // SAFETY: as the caller promises; the number is below the size of a set.
            if !set.is_null() && unsafe { libc::FD_ISSET(fd, *set) } {
                events |= asked;
            }
        }
        if events != 0 {
            entries.push(pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    entries
}

/// `select` with rsockets.
///
/// # Safety
/// As for [`entries`], which has made them from the sets.
unsafe fn rselect(mut fds: Vec<pollfd>, sets: [*mut fd_set; 3], timeout: c_int) -> c_int {
    // SAFETY: the entries are alive.
    let result = unsafe { rpoll(&mut fds, timeout) };
    if result < 0 {
        return result;
    }
    if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return fail(libc::EBADF);
    }
    let mut n = 0;
    for (set, (asked, answers)) in sets.into_iter().zip(SETS) {
        if set.is_null() {
            continue;
        }
        // SAFETY: as the caller promises; the numbers are below the size of a set.
        unsafe {
            libc::FD_ZERO(set);
            for entry in fds.iter().filter(|e| e.events & asked != 0) {
                if entry.revents & answers != 0 {
                    libc::FD_SET(entry.fd, set);
                    n += 1;
                }
            }
        }
    }
    n
}

/// `select(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn select(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    exceptions: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let sets = [reads, writes, exceptions];
    // SAFETY: the program's sets and its time.
    unsafe {
        let fds = entries(count, sets);
        if fds.iter().all(|entry| rsocket(entry.fd).is_none()) {
            return real::select(count, reads, writes, exceptions, timeout);
        }
        let timeout = timeout.as_ref().map(|t| (t.tv_sec, t.tv_usec));
        match milliseconds(timeout, 1_000_000) {
            Some(timeout) => rselect(fds, sets, timeout),
            None => fail(libc::EINVAL),
        }
    }
}

/// `pselect(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn pselect(
    count: c_int,
    reads: *mut fd_set,
    writes: *mut fd_set,
    exceptions: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let sets = [reads, writes, exceptions];
    // SAFETY: the program's sets, time and signals.
    unsafe {
        let fds = entries(count, sets);
        if fds.iter().all(|entry| rsocket(entry.fd).is_none()) {
            return real::pselect(count, reads, writes, exceptions, timeout, mask);
        }
        match of_timespec(timeout) {
            Some(timeout) => masked(mask, || rselect(fds, sets, timeout)),
            None => fail(libc::EINVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up() {
        assert_eq!(milliseconds(None, 1_000_000), Some(-1));
        assert_eq!(milliseconds(Some((0, 0)), 1_000_000), Some(0));
        assert_eq!(milliseconds(Some((0, 1)), 1_000_000), Some(1));
        assert_eq!(milliseconds(Some((1, 1)), 1_000_000_000), Some(1001));
        assert_eq!(
            milliseconds(Some((i64::MAX, 0)), 1_000_000),
            Some(c_int::MAX)
        );
        assert_eq!(milliseconds(Some((-1, 0)), 1_000_000), None);
        assert_eq!(milliseconds(Some((0, 1_000_000)), 1_000_000), None);
    }
}
