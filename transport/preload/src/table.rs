//! Which descriptors are rsockets.
//!
//! The table is read at every call that takes a descriptor, also by signal handlers and between `fork`
//! and `exec`: so it is an array of atomic words, and no lock.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, Ordering};

use crate::watch::LOOK;
use crate::{rdma, real};

/// Descriptors that can be rsockets. Sockets with higher numbers stay ordinary ones.
pub(crate) const MAX: usize = 1 << 16;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file or a socket of the kernel's.
    File,
    /// An rsocket, by its number.
    Rsocket(c_int),
    /// A TCP socket that may become an rsocket: see [`crate::fork`].
    Forking(Stage),
}

/// How far a TCP socket is that may become an rsocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It has no connection.
    New,
    /// It listens.
    Listening,
    /// It has connected: the rsocket connects when the server is ready.
    Active,
    /// It was accepted: the rsocket is made by the process that uses it.
    Passive,
    /// A thread of this process, by its number, makes the rsocket. To a child, which has no such thread, the
    /// socket stays one of TCP.
    Settling(c_int),
    /// The same, and the peer may know of it: a handler that interrupts the thread cannot have the socket stay one of
    /// TCP any more.
    Offered(c_int),
    /// The rsocket takes the place of the socket. No thread closes the descriptor meanwhile: the number would be
    /// another file's, whose place the rsocket took. No child begins either.
    Replacing,
}

/// Kinds by descriptor: 0 for a file, a number above it for the rsocket before that, and below it for a
/// stage: from [`SETTLING`] downwards by process and thread.
static KINDS: [AtomicI64; MAX] = [const { AtomicI64::new(0) }; MAX];
const SETTLING: i64 = -6;

/// Beside a thread's number, which is lower: [`Stage::Offered`].
const OFFERED: c_int = 1 << 30;

/// Descriptors of each rsocket.
static USERS: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];

/// The process that the table is of, 0 before it has a socket.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// This thread.
pub(crate) fn thread() -> c_int {
    // SAFETY: the call cannot fail.
    unsafe { libc::gettid() }
}

/// Whether the table is this process's. A child of `vfork` has its parent's memory until it calls `exec`:
/// the descriptors that it closes are still open in the parent.
pub(crate) fn is_own() -> bool {
    // SAFETY: the call cannot fail.
    PROCESS.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// Makes the table this process's.
extern "C" fn own() {
    // SAFETY: the call cannot fail.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// The place of a descriptor in a table; `None` beyond it.
pub(crate) fn place<T>(table: &'static [T; MAX], fd: c_int) -> Option<&'static T> {
    table.get(usize::try_from(fd).ok()?)
}

fn decode(word: i64) -> Kind {
    match word {
        0 => Kind::File,
        -1 => Kind::Forking(Stage::New),
        -2 => Kind::Forking(Stage::Listening),
        -3 => Kind::Forking(Stage::Active),
        -4 => Kind::Forking(Stage::Passive),
        -5 => Kind::Forking(Stage::Replacing),
        1.. => Kind::Rsocket((word - 1) as c_int),
        _ => {
            let ids = SETTLING - word;
            let thread = ids as c_int;
            if ids >> 32 != i64::from(PROCESS.load(Ordering::Relaxed)) {
                Kind::File
            } else if thread & OFFERED != 0 {
                Kind::Forking(Stage::Offered(thread & !OFFERED))
            } else {
                Kind::Forking(Stage::Settling(thread))
            }
        }
    }
}

/// The word of a thread of this process.
fn by_thread(thread: c_int) -> i64 {
    let process = PROCESS.load(Ordering::Relaxed);
    SETTLING - (i64::from(process) << 32 | i64::from(thread))
}

fn encode(kind: Kind) -> i64 {
    match kind {
        Kind::File => 0,
        Kind::Forking(Stage::New) => -1,
        Kind::Forking(Stage::Listening) => -2,
        Kind::Forking(Stage::Active) => -3,
        Kind::Forking(Stage::Passive) => -4,
        Kind::Forking(Stage::Replacing) => -5,
        Kind::Forking(Stage::Settling(thread)) => by_thread(thread),
        Kind::Forking(Stage::Offered(thread)) => by_thread(thread | OFFERED),
        Kind::Rsocket(n) => i64::from(n) + 1,
    }
}

/// Kind of a descriptor.
pub(crate) fn kind(fd: c_int) -> Kind {
    place(&KINDS, fd).map_or(Kind::File, |word| decode(word.load(Ordering::Acquire)))
}

/// The rsocket that a descriptor is.
pub(crate) fn rsocket(fd: c_int) -> Option<c_int> {
    match kind(fd) {
        Kind::Rsocket(n) => Some(n),
        Kind::File | Kind::Forking(_) => None,
    }
}

/// Sets the kind of a descriptor, which is one more of an rsocket's; answers the kind before, and waits for it where
/// that is about to be an rsocket. A descriptor beyond the table stays a file: answers `None`.
pub(crate) fn set(fd: c_int, kind: Kind) -> Option<Kind> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        own();
        // SAFETY: the handler may be called at any time.
        unsafe { libc::pthread_atfork(None, None, Some(own)) };
    });
    let word = place(&KINDS, fd)?;
    if let Kind::Rsocket(n) = kind {
        place(&USERS, n)?.fetch_add(1, Ordering::AcqRel);
    }
    loop {
        let before = word.load(Ordering::Acquire);
        if before == encode(Kind::Forking(Stage::Replacing)) {
            std::thread::sleep(LOOK);
        } else if swap(word, before, encode(kind)) {
            return Some(decode(before));
        }
    }
}

fn swap(word: &AtomicI64, from: i64, to: i64) -> bool {
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
}

/// Changes the kind of a descriptor as [`set`] does, and answers whether it was of that kind before.
pub(crate) fn change(fd: c_int, from: Kind, to: Kind) -> bool {
    let is_changed = place(&KINDS, fd).is_some_and(|word| {
        // No other thread gives up its part before it can see it.
        if let Kind::Rsocket(n) = to
            && let Some(users) = place(&USERS, n)
        {
            users.fetch_add(1, Ordering::AcqRel);
        }
        swap(word, encode(from), encode(to))
    });
    if !is_changed {
        give_up(to);
    }
    is_changed
}

/// Gives up a descriptor's part in what it was. Answers the rsocket that has no other descriptor.
pub(crate) fn give_up(kind: Kind) -> Option<c_int> {
    let Kind::Rsocket(n) = kind else { return None };
    let before = place(&USERS, n)?.fetch_sub(1, Ordering::AcqRel);
    (before == 1).then_some(n)
}

/// A descriptor that keeps a number for an rsocket.
pub(crate) fn placeholder(closes_at_exec: bool) -> c_int {
    let flags = if closes_at_exec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: the path ends with a zero byte.
    unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | flags) }
}

/// Gives a program a descriptor for an rsocket. Closes the rsocket where that fails.
pub(crate) fn insert(n: c_int, closes_at_exec: bool) -> c_int {
    let fd = placeholder(closes_at_exec);
    if fd >= 0 && set(fd, Kind::Rsocket(n)).is_some() {
        return fd;
    }
    let errno = if fd < 0 { crate::errno() } else { libc::EMFILE };
    // SAFETY: both are ours.
    unsafe {
        if fd >= 0 {
            real::close(fd);
        }
        rdma::rclose(n);
    }
    crate::fail(errno)
}
