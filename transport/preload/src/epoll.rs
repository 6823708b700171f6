//! `epoll`: the kernel's set for files, and beside it a list of the rsockets that were added.
//!
//! A thread that waits polls both: the set is readable when one of its files has an event. A bell in
//! the set wakes waiters when the list changes. An edge is reported once, until a call moves data in that
//! direction: then the program has seen it, and the next report may be one too many but none is missed.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{epoll_event, pollfd, sigset_t, timespec};

use crate::table::{is_own, rsocket};
use crate::wait::{masked, of_timespec};
use crate::{fail, rdma, real};

/// Bits of `epoll_event` that are no events.
const MODES: u32 = (libc::EPOLLET | libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;

/// Events that are reported unasked.
const UNASKED: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// An rsocket in a set.
struct Interest {
    fd: c_int,
    rsocket: c_int,
    /// Events and modes that the program asks for.
    wanted: u32,
    data: u64,
    /// Edges that were reported and that no call has used since.
    reported: u32,
}

impl Interest {
    /// Events to wait for: none for one that has nothing new to say.
    fn events(&self) -> Option<u32> {
        let asked = self.wanted & !MODES;
        if self.wanted & libc::EPOLLET as u32 == 0 {
            return (asked != 0).then_some(asked);
        }
        let left = asked & !self.reported;
        (self.reported & UNASKED == 0 && left != 0).then_some(left)
    }

    /// Notes what is reported.
    fn report(&mut self, events: u32) {
        if self.wanted & libc::EPOLLONESHOT as u32 != 0 {
            self.wanted &= MODES;
        }
        self.reported |= events;
    }
}

/// The rsockets of an `epoll` descriptor.
struct Set {
    interests: Vec<Interest>,
    /// An eventfd in the kernel's set.
    bell: c_int,
}

static SETS: Mutex<BTreeMap<c_int, Set>> = Mutex::new(BTreeMap::new());

/// Number of sets, so that programs without `epoll` take no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn sets() -> MutexGuard<'static, BTreeMap<c_int, Set>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Data by which the bell is known: an address that no program has.
fn bell_data() -> u64 {
    (&raw const COUNT).addr() as u64
}

impl Set {
    /// A set with its bell.
    fn new(set: c_int) -> Option<Self> {
        // SAFETY: the event is alive.
        unsafe {
            let bell = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            let mut event = epoll_event {
                events: libc::EPOLLIN as u32,
                u64: bell_data(),
            };
            if bell < 0 || real::epoll_ctl(set, libc::EPOLL_CTL_ADD, bell, &raw mut event) < 0 {
                real::close(bell);
                return None;
            }
            COUNT.fetch_add(1, Ordering::Relaxed);
            Some(Self {
                interests: Vec::new(),
                bell,
            })
        }
    }

    fn ring(&self) {
        let one = 1_u64;
        // SAFETY: the number is alive.
        unsafe { real::write(self.bell, (&raw const one).cast(), size_of_val(&one)) };
    }

    fn calm(&self) {
        let mut count = 0_u64;
        // SAFETY: there is room for the count.
        unsafe { real::read(self.bell, (&raw mut count).cast(), size_of_val(&count)) };
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the descriptor is the set's.
        unsafe { real::close(self.bell) };
    }
}

/// A call is about to move data of an rsocket: edges in that direction are reported again.
pub(crate) fn touch(n: c_int, events: c_int) {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    for set in sets().values_mut() {
        let mut is_changed = false;
        for interest in set.interests.iter_mut().filter(|i| i.rsocket == n) {
            is_changed |= interest.reported & events as u32 != 0;
            interest.reported &= !(events as u32);
        }
        if is_changed {
            set.ring();
        }
    }
}

/// An rsocket is closed.
pub(crate) fn forget(n: c_int) {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    for set in sets().values_mut() {
        set.interests.retain(|interest| interest.rsocket != n);
    }
}

/// A descriptor is closed, which may be a set's.
pub(crate) fn forget_set(fd: c_int) {
    if COUNT.load(Ordering::Relaxed) > 0 && is_own() {
        sets().remove(&fd);
    }
}

/// `epoll_ctl(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let Some(n) = rsocket(fd) else {
        // SAFETY: the program's event.
        return unsafe { real::epoll_ctl(epoll, op, fd, event) };
    };
    // SAFETY: the program's event, or none.
    let event = unsafe { event.as_ref() };
    match change(epoll, op, (fd, n), event) {
        Ok(()) => 0,
        Err(errno) => fail(errno),
    }
}

/// Changes the list of a set.
fn change(
    epoll: c_int,
    op: c_int,
    (fd, n): (c_int, c_int),
    event: Option<&epoll_event>,
) -> Result<(), c_int> {
    let mut sets = sets();
    let at = sets.get(&epoll).and_then(|set| {
        set.interests
            .iter()
            .position(|i| i.fd == fd && i.rsocket == n)
    });
    let event = match (op, event) {
        (libc::EPOLL_CTL_DEL, _) => None,
        (_, None) => return Err(libc::EFAULT),
        (_, event) => event,
    };
    match (op, at, event) {
        (libc::EPOLL_CTL_ADD, Some(_), _) => return Err(libc::EEXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            let set = match sets.entry(epoll) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    // The kernel says why it is no set.
                    entry.insert(Set::new(epoll).ok_or_else(crate::errno)?)
                }
            };
            set.interests.push(Interest {
                fd,
                rsocket: n,
                wanted: event.events,
                data: event.u64,
                reported: 0,
            });
        }
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None, _) => return Err(libc::ENOENT),
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            let set = sets.get_mut(&epoll).ok_or(libc::ENOENT)?;
            let interest = &mut set.interests[at];
            (interest.wanted, interest.data) = (event.events, event.u64);
            interest.reported = 0;
        }
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            let set = sets.get_mut(&epoll).ok_or(libc::ENOENT)?;
            set.interests.swap_remove(at);
        }
        _ => return Err(libc::EINVAL),
    }
    if let Some(set) = sets.get(&epoll) {
        set.ring();
    }
    Ok(())
}

/// What a thread that waits for a set polls: the set itself, then its rsockets that have something new
/// to say. `None` for a set that has never had one.
fn entries(epoll: c_int) -> Option<Vec<pollfd>> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let sets = sets();
    let set = sets.get(&epoll)?;
    let own = pollfd {
        fd: epoll,
        events: libc::POLLIN,
        revents: 0,
    };
    let rsockets = set.interests.iter().filter_map(|interest| {
        Some(pollfd {
            fd: interest.rsocket,
            events: interest.events()? as i16,
            revents: 0,
        })
    });
    Some(std::iter::once(own).chain(rsockets).collect())
}

/// Takes the events of rsockets that have been polled.
fn collect(epoll: c_int, polled: &[pollfd], into: &mut [epoll_event]) -> usize {
    let mut sets = sets();
    let Some(set) = sets.get_mut(&epoll) else {
        return 0;
    };
    set.calm();
    let mut n = 0;
    for interest in &mut set.interests {
        let entry = polled.iter().find(|entry| entry.fd == interest.rsocket);
        let came = entry.map_or(0, |entry| u32::from(entry.revents as u16));
        let events = interest
            .events()
            .map_or(0, |asked| came & (asked | UNASKED));
        if events == 0 || n == into.len() {
            continue;
        }
        interest.report(events);
        into[n] = epoll_event {
            events,
            u64: interest.data,
        };
        n += 1;
    }
    // One that stays at the front would keep those behind it waiting.
    if n > 0 && !set.interests.is_empty() {
        set.interests.rotate_left(1);
    }
    n
}

/// Takes the events of the kernel's set, without the bell.
fn take_files(epoll: c_int, into: &mut [epoll_event]) -> usize {
    if into.is_empty() {
        return 0;
    }
    // SAFETY: there is room for as many events.
    let n = unsafe {
        let room = into.len() as c_int;
        real::epoll_pwait(epoll, into.as_mut_ptr(), room, 0, std::ptr::null())
    };
    let n = usize::try_from(n).unwrap_or(0);
    let Some(bell) = into[..n].iter().position(|e| { e.u64 } == bell_data()) else {
        return n;
    };
    into[bell..n].rotate_left(1);
    n - 1
}

/// Waits for the events of a set with rsockets.
fn wait(epoll: c_int, into: &mut [epoll_event], timeout: c_int) -> c_int {
    let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |left| {
            c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        let Some(mut polled) = entries(epoll) else {
            // Another thread has closed it.
            // SAFETY: there is room for as many events.
            return unsafe {
                let room = into.len() as c_int;
                real::epoll_pwait(epoll, into.as_mut_ptr(), room, ms, std::ptr::null())
            };
        };
        // SAFETY: the entries are alive.
        let result = unsafe { rdma::rpoll(polled.as_mut_ptr(), polled.len() as u64, ms) };
        if result < 0 {
            return result;
        }
        let of_rsockets = collect(epoll, &polled, into);
        let of_files = take_files(epoll, &mut into[of_rsockets..]);
        let n = of_rsockets + of_files;
        if n > 0 || left == Some(Duration::ZERO) {
            return n as c_int;
        }
    }
}

/// `epoll_pwait(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's events and its set of signals.
    unsafe {
        if events.is_null() || room <= 0 || entries(epoll).is_none() {
            return real::epoll_pwait(epoll, events, room, timeout, mask);
        }
        let into = std::slice::from_raw_parts_mut(events, room as usize);
        masked(mask, || wait(epoll, into, timeout))
    }
}

/// `epoll_wait(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's events.
    unsafe { epoll_pwait(epoll, events, room, timeout, std::ptr::null()) }
}

/// `epoll_pwait2(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's events, time and set of signals.
    unsafe {
        match of_timespec(timeout) {
            Some(timeout) => epoll_pwait(epoll, events, room, timeout, mask),
            None => fail(libc::EINVAL),
        }
    }
}
