//! `epoll`: the kernel's set for files, and beside it a list of the rsockets that were added.
//!
//! A thread that waits polls both: the set is readable when one of its files has an event. A bell in
//! the set wakes waiters when the list changes. An edge is reported once, until a call moves data in that
//! direction: then the program has seen it, and the next report may be one too many but none is missed.
//!
//! A TCP socket that may become an rsocket (see [`crate::fork`]) is in the kernel's set until then, and in the
//! list without an rsocket. The kernel knows whether it has reported one that is to be reported once.
//!
//! The lists have a lock, which `fork` takes, so that a child finds it free. Closing a descriptor that is
//! neither a set, a bell nor an rsocket takes none: that is done by signal handlers, and between `fork` and `exec`.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{MutexGuard, Once};
use std::time::{Duration, Instant};

use libc::{epoll_event, pollfd, sigset_t, timespec};

use crate::fork_lock::ForkLock;
use crate::table::{Kind, MAX, Stage, is_own, kind, place};
use crate::wait::{masked, of_timespec};
use crate::{fail, rdma, real};

/// Bits of `epoll_event` that are no events.
const MODES: u32 = (libc::EPOLLET | libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;

/// Events that are reported unasked.
const UNASKED: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// The rsocket of a socket that has none yet.
const NONE: c_int = -1;

/// An rsocket in a set.
struct Interest {
    fd: c_int,
    /// [`NONE`] where the kernel's set has the descriptor.
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
        if self.rsocket == NONE {
            return None;
        }
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
    bell: Bell,
    /// The process that has made it.
    process: c_int,
}

/// This process.
fn process() -> c_int {
    // SAFETY: the call cannot fail.
    unsafe { libc::getpid() }
}

/// The sets, by their descriptors.
type Sets = BTreeMap<c_int, Set>;

static SETS: ForkLock<Sets> = ForkLock::new(BTreeMap::new());

/// Number of sets, so that programs without `epoll` take no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What a descriptor is to the sets: [`SET`], [`BELL`] or 0.
static PARTS: [AtomicU8; MAX] = [const { AtomicU8::new(0) }; MAX];
const SET: u8 = 1;
const BELL: u8 = 2;

fn part(fd: c_int) -> u8 {
    place(&PARTS, fd).map_or(0, |part| part.load(Ordering::Relaxed))
}

/// Notes what a descriptor is; false beyond the table.
fn note(fd: c_int, part: u8) -> bool {
    place(&PARTS, fd).is_some_and(|place| {
        place.store(part, Ordering::Relaxed);
        true
    })
}

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock()
}

/// Holds the lock of the sets.
#[cfg(test)]
pub(crate) fn hold_sets() -> impl Drop {
    sets()
}

extern "C" fn before_fork() {
    SETS.hold();
}

extern "C" fn after_fork() {
    SETS.release(|_| {});
}

/// Has `fork` take the lock from now on.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handlers may be called at any time.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

/// Data by which a bell is known: an address that no program has.
fn bell_data() -> u64 {
    (&raw const COUNT).addr() as u64
}

/// An eventfd in the kernel's set. Programs do not know of it, but may close it with all descriptors that
/// they do not know, or take its number for another file.
struct Bell(c_int);

impl Bell {
    /// A bell in a set. The kernel says why a descriptor is none.
    ///
    /// # Errors
    /// Those of `eventfd(2)` and `epoll_ctl(2)`.
    fn new(set: c_int) -> Result<Self, c_int> {
        // SAFETY: the calls take any numbers.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            if fd < 0 {
                return Err(crate::errno());
            }
            if !note(fd, BELL) {
                real::close(fd);
                return Err(libc::EMFILE);
            }
            let bell = Self(fd);
            bell.hang(set)?;
            Ok(bell)
        }
    }

    /// Puts it into a set.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`.
    fn hang(&self, set: c_int) -> Result<(), c_int> {
        let mut event = epoll_event {
            events: libc::EPOLLIN as u32,
            u64: bell_data(),
        };
        // SAFETY: the event is alive.
        match unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_ADD, self.0, &raw mut event) } {
            0 => Ok(()),
            _ => Err(crate::errno()),
        }
    }

    /// Takes it out of a set: closing it does not where a child has it as well.
    fn take_down(&self, set: c_int) {
        // SAFETY: no event is needed.
        unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_DEL, self.0, std::ptr::null_mut()) };
    }

    /// One whose descriptor is closed: it makes no sound.
    fn lose(&mut self) {
        self.0 = -1;
    }

    fn is_lost(&self) -> bool {
        self.0 < 0
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        if !self.is_lost() {
            note(self.0, 0);
            // SAFETY: the descriptor is the set's.
            unsafe { real::close(self.0) };
        }
    }
}

impl Set {
    /// A set with its bell.
    ///
    /// # Errors
    /// Those of [`Bell::new`]; `ENOSPC` for a descriptor beyond the table.
    fn new(set: c_int) -> Result<Self, c_int> {
        let bell = Bell::new(set)?;
        if !note(set, SET) {
            return Err(libc::ENOSPC);
        }
        COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            interests: Vec::new(),
            bell,
            process: process(),
        })
    }

    /// Whether its bell is among descriptors that are closed, and this process's to replace. In the
    /// kernel a child has the same set as its parent, whose bell stays there.
    fn loses_bell(&self, first: c_int, last: c_int) -> bool {
        (first..=last).contains(&self.bell.0) && self.process == process()
    }

    fn ring(&self) {
        let one = 1_u64;
        // SAFETY: the number is alive.
        unsafe { real::write(self.bell.0, (&raw const one).cast(), size_of_val(&one)) };
    }

    fn calm(&self) {
        let mut count = 0_u64;
        // SAFETY: there is room for the count.
        unsafe { real::read(self.bell.0, (&raw mut count).cast(), size_of_val(&count)) };
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::Relaxed);
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

/// A TCP socket becomes an rsocket, by two calls, of which the first one answers whether it does: the sets that the
/// kernel has it in have it in their lists from now on. Answers as that call.
pub(crate) fn settle(
    fd: c_int,
    n: c_int,
    begin: impl FnOnce() -> bool,
    replace: impl FnOnce(),
) -> bool {
    install();
    // The lock is held during the calls, so that the socket is always in the kernel's set or in the list for
    // a thread that changes a set meanwhile.
    let mut sets = sets();
    if !begin() {
        return false;
    }
    for (epoll, set) in sets.iter_mut() {
        let is_it = |interest: &Interest| interest.fd == fd && interest.rsocket == NONE;
        let Some(at) = set.interests.iter().position(is_it) else {
            continue;
        };
        let interest = &mut set.interests[at];
        if interest.wanted & libc::EPOLLONESHOT as u32 != 0 && is_reported(*epoll, fd) {
            interest.wanted &= MODES;
        }
        // SAFETY: no event is needed.
        let is_in_set =
            unsafe { real::epoll_ctl(*epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) == 0 };
        if is_in_set {
            interest.rsocket = n;
            set.ring();
        } else {
            // That of a socket which had the number before, and is closed.
            set.interests.swap_remove(at);
        }
    }
    replace();
    true
}

/// Whether the kernel has reported a descriptor that it reports once: then it waits for no event of it.
/// Without `/proc` it is taken for one that was not reported: one report too many does less harm than none.
fn is_reported(epoll: c_int, fd: c_int) -> bool {
    let mut is_reported = false;
    // The number may be there twice, also for a socket that is closed and has a copy.
    for line in fdinfo(epoll).lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["tfd:", number, "events:", events, ..] = words[..] else {
            continue;
        };
        if number.parse() == Ok(fd) {
            let Ok(events) = u32::from_str_radix(events, 16) else {
                return false;
            };
            if events & !(MODES | libc::EPOLLWAKEUP as u32) != 0 {
                return false;
            }
            is_reported = true;
        }
    }
    is_reported
}

/// What the kernel says of a descriptor of this process (`proc_pid_fdinfo(5)`), as far as it can be read. The
/// calls are the C library's: ours may take the lock.
fn fdinfo(fd: c_int) -> String {
    let path = format!("/proc/self/fdinfo/{fd}\0");
    let mut all = Vec::new();
    let mut piece = [0_u8; 1024];
    // SAFETY: the path ends with a zero byte, and there is room for as many bytes.
    unsafe {
        let file = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        while let n @ 1.. = real::read(file, piece.as_mut_ptr().cast(), piece.len()) {
            all.extend_from_slice(&piece[..n as usize]);
        }
        if file >= 0 {
            real::close(file);
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// Whether a descriptor is a bell, which is no descriptor to the program.
pub(crate) fn is_bell(fd: c_int) -> bool {
    part(fd) == BELL && is_own()
}

/// Makes a call that closes the descriptors `first..=last`, unless it returns a negative number: sets
/// among them are none any more, and sets whose bells are among them get new ones.
pub(crate) fn closing(first: c_int, last: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let last = last.min(MAX as c_int - 1);
    // A child of `vfork` closes no descriptor of its parent's.
    if COUNT.load(Ordering::Relaxed) == 0 || !is_own() || (first..=last).all(|fd| part(fd) == 0) {
        return call();
    }
    // The lock is held during the call: no other thread rings a bell whose number another file has
    // by now, or takes the closed set for a new one.
    let mut sets = sets();
    for (fd, set) in sets.iter().filter(|(_, set)| set.loses_bell(first, last)) {
        set.bell.take_down(*fd);
    }
    let result = call();
    if result < 0 {
        for (fd, set) in sets.iter().filter(|(_, set)| set.loses_bell(first, last)) {
            let _ = set.bell.hang(*fd);
        }
        return result;
    }
    for fd in first..=last {
        note(fd, 0);
    }
    for set in sets.values_mut() {
        if (first..=last).contains(&set.bell.0) {
            set.bell.lose();
        }
    }
    sets.retain(|fd, _| !(first..=last).contains(fd));
    for (fd, set) in sets.iter_mut() {
        if !set.bell.is_lost() || set.process != process() {
            continue;
        }
        if let Ok(bell) = Bell::new(*fd) {
            set.bell = bell;
        }
        // Those who wait poll the old one.
        set.ring();
    }
    result
}

/// `epoll_ctl(2)`
#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the program's event, or none.
    unsafe {
        if is_kernels(kind(fd)) {
            return real::epoll_ctl(epoll, op, fd, event);
        }
        install();
        // From the look at what the descriptor is, which `settle` changes.
        let mut sets = sets();
        let n = match kind(fd) {
            Kind::Rsocket(n) => n,
            now => {
                let result = real::epoll_ctl(epoll, op, fd, event);
                if result < 0 || is_kernels(now) {
                    return result;
                }
                NONE
            }
        };
        match change(&mut sets, epoll, op, (fd, n), event.as_ref()) {
            Ok(()) => 0,
            Err(errno) => {
                if n == NONE && op == libc::EPOLL_CTL_ADD {
                    real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut());
                }
                fail(errno)
            }
        }
    }
}

/// Whether the kernel's set alone has descriptors of a kind.
fn is_kernels(kind: Kind) -> bool {
    matches!(kind, Kind::File | Kind::Forking(Stage::Listening))
}

/// Changes the list of a set.
fn change(
    sets: &mut Sets,
    epoll: c_int,
    op: c_int,
    (fd, n): (c_int, c_int),
    event: Option<&epoll_event>,
) -> Result<(), c_int> {
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
        // The kernel has taken it: one that had the number before is closed.
        (libc::EPOLL_CTL_ADD, Some(at), Some(event)) if n == NONE => {
            let set = sets.get_mut(&epoll).ok_or(libc::ENOENT)?;
            let interest = &mut set.interests[at];
            (interest.wanted, interest.data) = (event.events, event.u64);
        }
        (libc::EPOLL_CTL_ADD, Some(_), _) => return Err(libc::EEXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            let set = match sets.entry(epoll) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => entry.insert(Set::new(epoll)?),
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
    // Under the lock, so that `settle` knows what was reported.
    let _sets = sets();
    wait_for_files(epoll, into, 0, std::ptr::null()).map_or(0, |n| n.max(0) as usize)
}

/// Waits for the kernel's set alone; `None` if only its bell has an event.
fn wait_for_files(
    epoll: c_int,
    into: &mut [epoll_event],
    ms: c_int,
    mask: *const sigset_t,
) -> Option<c_int> {
    // SAFETY: there is room for as many events, and the set of signals is the program's, or none.
    let n = unsafe {
        let room = into.len() as c_int;
        real::epoll_pwait(epoll, into.as_mut_ptr(), room, ms, mask)
    };
    let came = usize::try_from(n).map_or(0, |n| n.min(into.len()));
    let came = &mut into[..came];
    let Some(bell) = came.iter().position(|e| { e.u64 } == bell_data()) else {
        return Some(n);
    };
    came[bell..].rotate_left(1);
    (n > 1).then_some(n - 1)
}

/// Waits for the events of a set with rsockets.
fn wait(epoll: c_int, into: &mut [epoll_event], deadline: Option<Instant>) -> c_int {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |left| {
            c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        let Some(mut polled) = entries(epoll) else {
            // Another thread has closed it, or it is a copy: then only those that wait at the set calm its bell.
            match wait_for_files(epoll, into, ms, std::ptr::null()) {
                Some(n) => return n,
                None if ms == 0 => return 0,
                None => {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
            }
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
        if events.is_null() || room <= 0 {
            return real::epoll_pwait(epoll, events, room, timeout, mask);
        }
        let into = std::slice::from_raw_parts_mut(events, room as usize);
        let left = u64::try_from(timeout).ok().map(Duration::from_millis);
        let deadline = left.and_then(|left| Instant::now().checked_add(left));
        // The first rsocket of a set may come while this thread waits for files.
        if entries(epoll).is_none()
            && let Some(n) = wait_for_files(epoll, into, timeout, mask)
        {
            return n;
        }
        masked(mask, || wait(epoll, into, deadline))
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
