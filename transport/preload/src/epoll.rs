//! `epoll`: the kernel's set for files, and beside it a list of the rsockets that were added.
//!
//! A thread that waits polls both: the set is readable when one of its files has an event. A bell in
//! the set wakes waiters when the list changes. An edge is reported once, until a call moves data in that
//! direction: then the program has seen it, and the next report may be one too many but none is missed.
//!
//! A TCP socket that may become an rsocket (see [`crate::fork`]) is in the kernel's set until then, and in the
//! list without an rsocket. The kernel knows whether it has reported one that is to be reported once.
//!
//! Copies of a descriptor have one set in the kernel, and one list here. Event loops make them before there is
//! a list, register by one and wait by another. So the kernel is asked when there is one, for all descriptors, and
//! once for each that is used later on: it knows whether a bell is in a set.
//!
//! The lists have a lock, which `fork` takes, so that a child finds it free. Closing a descriptor that is
//! neither a set, a bell nor an rsocket takes none: that is done by signal handlers, and between `fork` and `exec`.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{MutexGuard, Once};
use std::time::{Duration, Instant};

use libc::{epoll_event, pollfd, sigset_t, timespec};

use crate::fork_lock::ForkLock;
use crate::table::{Kind, MAX, Stage, is_own, kind, place, thread};
use crate::wait::{masked, of_timespec};
use crate::watch::LOOK;
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

/// The rsockets of a set.
struct Set {
    /// Descriptors of the set, of which there is one at least. Without `/proc`, copies that were made before the list
    /// are known from their first use on.
    descriptors: Vec<c_int>,
    interests: Vec<Interest>,
    bell: Bell,
    /// Changes so far, of which the bell wakes waiters.
    changes: u64,
    waiting: Vec<Waiter>,
    /// The process that has made it.
    process: c_int,
}

/// This process.
fn process() -> c_int {
    // SAFETY: the call cannot fail.
    unsafe { libc::getpid() }
}

/// A thread that waits for a set.
struct Waiter {
    thread: c_int,
    /// The descriptor by which it waits, which may be closed meanwhile.
    epoll: c_int,
    /// The changes that it knows.
    known: u64,
}

/// Whether this process has a thread.
fn is_alive(thread: c_int) -> bool {
    // SAFETY: the call takes any numbers, and sends no signal.
    unsafe { libc::syscall(libc::SYS_tgkill, process(), thread, 0) == 0 }
}

type Sets = Vec<Set>;

static SETS: ForkLock<Sets> = ForkLock::new(Vec::new());

/// Number of sets, so that programs without `epoll` take no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What a descriptor is to the sets: [`SET`], [`BELL`], [`OTHER`] or 0 where that is not known.
static PARTS: [AtomicU8; MAX] = [const { AtomicU8::new(0) }; MAX];
const SET: u8 = 1;
const BELL: u8 = 2;
const OTHER: u8 = 3;

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

extern "C" fn in_child() {
    // It has none of the threads.
    SETS.release(|sets| sets.iter_mut().for_each(|set| set.waiting.clear()));
}

/// The place of a descriptor's set among all. A copy that has come by another way is one more descriptor of its set from
/// its first use on.
fn find(sets: &mut Sets, epoll: c_int) -> Option<usize> {
    let part = place(&PARTS, epoll)?;
    match part.load(Ordering::Relaxed) {
        SET => sets.iter().position(|set| set.descriptors.contains(&epoll)),
        0 => {
            let found = sets.iter().position(|set| set.bell.hangs_in(epoll));
            part.store(found.map_or(OTHER, |_| SET), Ordering::Relaxed);
            sets[found?].descriptors.push(epoll);
            found
        }
        _ => None,
    }
}

/// A descriptor has a copy, which is a set as well if that one is.
pub(crate) fn share(fd: c_int, copy: c_int) {
    if part(fd) != SET || !is_own() {
        return;
    }
    let mut sets = sets();
    if let Some(at) = find(&mut sets, fd)
        && note(copy, SET)
    {
        sets[at].descriptors.push(copy);
    }
}

/// Has `fork` take the lock from now on.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handlers may be called at any time.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
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
        let mut event = Self::event();
        // SAFETY: the event is alive.
        match unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_ADD, self.0, &raw mut event) } {
            0 => Ok(()),
            _ => Err(crate::errno()),
        }
    }

    /// Whether it is in a set.
    fn hangs_in(&self, set: c_int) -> bool {
        let mut event = Self::event();
        // SAFETY: the event is alive. It is the one that the bell has there.
        unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_MOD, self.0, &raw mut event) == 0 }
    }

    /// The event of a bell that rings.
    fn event() -> epoll_event {
        epoll_event {
            events: libc::EPOLLIN as u32,
            u64: bell_data(),
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
        // Others may be copies of it.
        for part in PARTS
            .iter()
            .filter(|part| part.load(Ordering::Relaxed) == OTHER)
        {
            part.store(0, Ordering::Relaxed);
        }
        // Another thread may close one meanwhile. Either it finds the note afterwards, or the second look finds it closed.
        let is_copy = |fd: &c_int| {
            let is_noted = *fd != set && bell.hangs_in(*fd) && note(*fd, SET);
            let is_open = is_noted && bell.hangs_in(*fd);
            if is_noted && !is_open {
                note(*fd, 0);
            }
            is_open
        };
        let copies = open_descriptors().filter(is_copy);
        Ok(Self {
            descriptors: std::iter::once(set).chain(copies).collect(),
            interests: Vec::new(),
            bell,
            changes: 0,
            waiting: Vec::new(),
            process: process(),
        })
    }

    /// Whether its bell is among descriptors that are closed, and this process's to replace. In the
    /// kernel a child has the same set as its parent, whose bell stays there.
    fn loses_bell(&self, first: c_int, last: c_int) -> bool {
        (first..=last).contains(&self.bell.0) && self.process == process()
    }

    /// Wakes those who wait, for their lists are old.
    fn ring(&mut self) {
        self.changes += 1;
        let one = 1_u64;
        // SAFETY: the number is alive.
        unsafe { real::write(self.bell.0, (&raw const one).cast(), size_of_val(&one)) };
    }

    /// Notes that this thread waits by a descriptor, with a list of now.
    fn enter(&mut self, epoll: c_int) {
        self.leave(epoll);
        self.waiting.push(Waiter {
            thread: thread(),
            epoll,
            known: self.changes,
        });
    }

    /// Notes that this thread waits by a descriptor no longer.
    fn leave(&mut self, epoll: c_int) {
        let own = (thread(), epoll);
        self.waiting
            .retain(|waiter| (waiter.thread, waiter.epoll) != own);
    }

    /// Has the bell ring no longer, unless it has to wake a thread with an old list.
    fn calm(&mut self) {
        // One that was cancelled does not wait.
        let changes = self.changes;
        self.waiting
            .retain(|waiter| waiter.known == changes || is_alive(waiter.thread));
        if self.waiting.iter().any(|waiter| waiter.known != changes) {
            return;
        }
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
    for set in sets().iter_mut() {
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
    for set in sets().iter_mut() {
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
    for set in sets.iter_mut() {
        let epoll = set.descriptors[0];
        let is_it = |interest: &Interest| interest.fd == fd && interest.rsocket == NONE;
        let Some(at) = set.interests.iter().position(is_it) else {
            continue;
        };
        let interest = &mut set.interests[at];
        if interest.wanted & libc::EPOLLONESHOT as u32 != 0 && is_reported(epoll, fd) {
            interest.wanted &= MODES;
        }
        // SAFETY: no event is needed.
        let is_in_set =
            unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) == 0 };
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

/// Descriptors of this process, none without `/proc`.
fn open_descriptors() -> impl Iterator<Item = c_int> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
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
    let is_in = |fd: &c_int| (first..=last).contains(fd);
    let mut has_part = false;
    for fd in first..=last {
        match part(fd) {
            0 => {}
            OTHER => _ = note(fd, 0),
            _ => has_part = true,
        }
    }
    // A child of `vfork` closes no descriptor of its parent's.
    if !has_part || !is_own() {
        let result = call();
        // A copy of which another thread has made a set meanwhile.
        if result >= 0 && (first..=last).any(|fd| part(fd) == SET) && is_own() {
            sets().retain_mut(|set| {
                let bell = &set.bell;
                set.descriptors.retain(|fd| {
                    let is_left = !is_in(fd) || bell.hangs_in(*fd);
                    if !is_left {
                        note(*fd, 0);
                    }
                    is_left
                });
                !set.descriptors.is_empty()
            });
        }
        return result;
    }
    // The lock is held during the call: no other thread rings a bell whose number another file has
    // by now, or takes the closed set for a new one.
    let mut sets = sets();
    for set in sets.iter().filter(|set| set.loses_bell(first, last)) {
        set.bell.take_down(set.descriptors[0]);
    }
    let result = call();
    if result < 0 {
        for set in sets.iter().filter(|set| set.loses_bell(first, last)) {
            let _ = set.bell.hang(set.descriptors[0]);
        }
        return result;
    }
    for fd in first..=last {
        note(fd, 0);
    }
    for set in sets.iter_mut() {
        if is_in(&set.bell.0) {
            set.bell.lose();
        }
    }
    sets.retain_mut(|set| {
        set.descriptors.retain(|fd| !is_in(fd));
        !set.descriptors.is_empty()
    });
    for set in sets.iter_mut() {
        if !set.bell.is_lost() || set.process != process() {
            continue;
        }
        if let Ok(bell) = Bell::new(set.descriptors[0]) {
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
    let event = match (op, event) {
        (libc::EPOLL_CTL_DEL, _) => None,
        (_, None) => return Err(libc::EFAULT),
        (_, event) => event,
    };
    let set = match find(sets, epoll) {
        Some(at) => &mut sets[at],
        None if op == libc::EPOLL_CTL_ADD => sets.push_mut(Set::new(epoll)?),
        None => return Err(libc::ENOENT),
    };
    let is_it = |interest: &Interest| interest.fd == fd && interest.rsocket == n;
    let at = set.interests.iter().position(is_it);
    match (op, at, event) {
        // The kernel has taken it: one that had the number before is closed.
        (libc::EPOLL_CTL_ADD, Some(at), Some(event)) if n == NONE => {
            let interest = &mut set.interests[at];
            (interest.wanted, interest.data) = (event.events, event.u64);
        }
        (libc::EPOLL_CTL_ADD, Some(_), _) => return Err(libc::EEXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => set.interests.push(Interest {
            fd,
            rsocket: n,
            wanted: event.events,
            data: event.u64,
            reported: 0,
        }),
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None, _) => return Err(libc::ENOENT),
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            let interest = &mut set.interests[at];
            (interest.wanted, interest.data) = (event.events, event.u64);
            interest.reported = 0;
        }
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            set.interests.swap_remove(at);
        }
        _ => return Err(libc::EINVAL),
    }
    set.ring();
    Ok(())
}

/// The lists, with the place of a set's; `None` for a set that has never had one.
fn list_of(epoll: c_int) -> Option<(MutexGuard<'static, Sets>, usize)> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    // Without the lock for those that have none.
    if part(epoll) == OTHER {
        return None;
    }
    let mut sets = sets();
    let at = find(&mut sets, epoll)?;
    Some((sets, at))
}

fn has_list(epoll: c_int) -> bool {
    list_of(epoll).is_some()
}

/// What a thread that waits for a set polls: the set itself, then its rsockets that have something new
/// to say. `None` for a set that has never had one.
fn entries(epoll: c_int) -> Option<Vec<pollfd>> {
    let (mut sets, at) = list_of(epoll)?;
    let set = &mut sets[at];
    set.enter(epoll);
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

/// This thread waits by a descriptor no longer, whose set it may not be any more.
fn leave(sets: &mut Sets, epoll: c_int) {
    sets.iter_mut().for_each(|set| set.leave(epoll));
}

/// Takes the events of rsockets that have been polled.
fn collect(epoll: c_int, polled: &[pollfd], into: &mut [epoll_event]) -> usize {
    let mut sets = sets();
    leave(&mut sets, epoll);
    let Some(at) = find(&mut sets, epoll) else {
        return 0;
    };
    let set = &mut sets[at];
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

/// Takes the events of the kernel's set, without bells; `None` if only these have any.
fn take_files(epoll: c_int, into: &mut [epoll_event]) -> Option<usize> {
    if into.is_empty() {
        return Some(0);
    }
    // Under the lock, so that `settle` knows what was reported.
    let _sets = sets();
    wait_for_files(epoll, into, 0, std::ptr::null()).map(|n| n.max(0) as usize)
}

/// Waits for the kernel's set alone; `None` if only bells have an event. There are several where processes have the
/// set, each of which has given it one.
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
    let mut files = 0;
    for at in 0..came.len() {
        if { came[at].u64 } != bell_data() {
            came[files] = came[at];
            files += 1;
        }
    }
    if files == came.len() {
        return Some(n);
    }
    (files > 0).then_some(files as c_int)
}

/// Waits for the events of a set with rsockets.
fn wait(epoll: c_int, into: &mut [epoll_event], deadline: Option<Instant>) -> c_int {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |left| {
            c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        let Some(mut polled) = entries(epoll) else {
            // Another thread has closed it, or only another process has a list of it, and calms the bell.
            match wait_for_files(epoll, into, ms, std::ptr::null()) {
                Some(n) => return n,
                None if ms == 0 => return 0,
                None => {
                    std::thread::sleep(LOOK);
                    continue;
                }
            }
        };
        // SAFETY: the entries are alive.
        let result = unsafe { rdma::rpoll(polled.as_mut_ptr(), polled.len() as u64, ms) };
        if result < 0 {
            let errno = crate::errno();
            leave(&mut sets(), epoll);
            return fail(errno);
        }
        let of_rsockets = collect(epoll, &polled, into);
        let of_files = take_files(epoll, &mut into[of_rsockets..]);
        let n = of_rsockets + of_files.unwrap_or(0);
        if n > 0 || left == Some(Duration::ZERO) {
            return n as c_int;
        }
        if of_files.is_none() {
            // Another process's, which it calms.
            std::thread::sleep(LOOK);
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
        if !has_list(epoll)
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use riser_testkit::eventually;

    use super::*;

    /// Rings the bell of the test's own set.
    fn ring(epoll: c_int) {
        let is_own = |set: &&mut Set| set.descriptors.contains(&epoll);
        sets().iter_mut().find(is_own).unwrap().ring();
    }

    #[test]
    fn a_bell_rings_until_all_who_wait_know_of_a_change() {
        // SAFETY: the call may be made at any time.
        let epoll = unsafe { libc::epoll_create1(0) };
        crate::table::set(epoll, Kind::File);
        sets().push(Set::new(epoll).unwrap());
        let change = || ring(epoll);
        let rings = || {
            let mut event = Bell::event();
            // SAFETY: there is room for an event.
            unsafe { real::epoll_pwait(epoll, &raw mut event, 1, 0, std::ptr::null()) == 1 }
        };
        let wake = || collect(epoll, &[], &mut []);
        std::thread::scope(|scope| {
            let (wakes, woken) = mpsc::channel();
            let (waits, waiting) = mpsc::channel();
            let other = scope.spawn(move || {
                assert!(entries(epoll).is_some());
                waits.send(()).unwrap();
                woken.recv().unwrap();
                wake();
            });
            waiting.recv().unwrap();
            assert!(entries(epoll).is_some());
            change();
            wake();
            assert!(rings(), "the other has an old list");
            // This thread has a new one.
            assert!(entries(epoll).is_some());
            wakes.send(()).unwrap();
            other.join().unwrap();
            assert!(!rings());
        });
        // One that ends while it waits is not waited for.
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(entries(epoll).is_some()));
        });
        change();
        eventually("the thread is gone", Duration::from_secs(20), || {
            wake();
            !rings()
        });
        // SAFETY: the descriptor is the test's.
        assert_eq!(closing(epoll, epoll, || unsafe { real::close(epoll) }), 0);
    }

    #[test]
    fn a_thread_that_waits_by_a_descriptor_that_is_closed_is_not_waited_for() {
        // SAFETY: the calls may be made at any time.
        let [epoll, copy] = unsafe {
            let epoll = libc::epoll_create1(0);
            [epoll, libc::dup(epoll)]
        };
        for fd in [epoll, copy] {
            crate::table::set(fd, Kind::File);
        }
        sets().push(Set::new(epoll).unwrap());
        assert!(has_list(copy));
        assert!(entries(epoll).is_some());
        // SAFETY: the descriptors are the test's, here and below.
        let close = |fd| closing(fd, fd, || unsafe { real::close(fd) });
        assert_eq!(close(epoll), 0);
        ring(copy);
        // It returns, as its descriptor is closed.
        assert_eq!(collect(epoll, &[], &mut []), 0);
        assert!(entries(epoll).is_none());
        // Another that waits by the copy.
        let rings = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert!(entries(copy).is_some());
                collect(copy, &[], &mut []);
                let mut event = Bell::event();
                // SAFETY: there is room for an event.
                unsafe { real::epoll_pwait(copy, &raw mut event, 1, 0, std::ptr::null()) }
            });
            other.join().unwrap()
        });
        assert_eq!(rings, 0);
        assert_eq!(close(copy), 0);
    }

    #[test]
    fn a_copy_that_is_closed_while_a_list_begins() {
        // SAFETY: the calls may be made at any time.
        let (epoll, copy) = unsafe {
            let epoll = libc::epoll_create1(0);
            (epoll, libc::fcntl(epoll, libc::F_DUPFD, 700))
        };
        // The tables are this process's.
        crate::table::set(epoll, Kind::File);
        assert_eq!(copy, 700);
        let closed = closing(copy, copy, || {
            let mut sets = sets();
            let set = sets.push_mut(Set::new(epoll).unwrap());
            assert_eq!(set.descriptors, [epoll, copy]);
            // SAFETY: the descriptor is the test's.
            unsafe { real::close(copy) }
        });
        assert_eq!(closed, 0);
        assert_eq!(part(copy), 0);
        let with = |fd| {
            let sets = sets();
            sets.iter()
                .filter(|set| set.descriptors.contains(&fd))
                .count()
        };
        assert_eq!([epoll, copy].map(with), [1, 0]);
        // SAFETY: as above.
        assert_eq!(closing(epoll, epoll, || unsafe { real::close(epoll) }), 0);
        assert_eq!(with(epoll), 0);
    }
}
