//! Which descriptors are rsockets.
//!
//! The table is read at every call that takes a descriptor, also by signal handlers and between `fork`
//! and `exec`: so it is an array of atomic words, and no lock.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

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
    /// A thread of this process makes the rsocket. To a child, which has no such thread, the socket stays
    /// one of TCP.
    Settling,
}

/// Kinds by descriptor: 0 for a file, a number above it for the rsocket before that, and below it for a
/// stage, the last one with the process.
static KINDS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];

/// Descriptors of each rsocket.
static USERS: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];

/// The process that the table is of, 0 before it has a socket.
static PROCESS: AtomicI32 = AtomicI32::new(0);

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

/// The word of a descriptor that a thread of this process makes an rsocket.
fn settling() -> i32 {
    -4 - PROCESS.load(Ordering::Relaxed)
}

fn decode(word: i32) -> Kind {
    match word {
        0 => Kind::File,
        -1 => Kind::Forking(Stage::New),
        -2 => Kind::Forking(Stage::Listening),
        -3 => Kind::Forking(Stage::Active),
        -4 => Kind::Forking(Stage::Passive),
        1.. => Kind::Rsocket(word - 1),
        _ if word == settling() => Kind::Forking(Stage::Settling),
        _ => Kind::File,
    }
}

fn encode(kind: Kind) -> i32 {
    match kind {
        Kind::File => 0,
        Kind::Forking(Stage::New) => -1,
        Kind::Forking(Stage::Listening) => -2,
        Kind::Forking(Stage::Active) => -3,
        Kind::Forking(Stage::Passive) => -4,
        Kind::Forking(Stage::Settling) => settling(),
        Kind::Rsocket(n) => n + 1,
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

/// Sets the kind of a descriptor, which is one more of an rsocket's; answers the kind before. A
/// descriptor beyond the table stays a file: answers `None`.
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
    Some(decode(word.swap(encode(kind), Ordering::AcqRel)))
}

/// Begins to make an rsocket of a TCP socket. Answers whether no other thread has begun.
pub(crate) fn begin_settling(fd: c_int, stage: Stage) -> bool {
    let (from, to) = (Kind::Forking(stage), Kind::Forking(Stage::Settling));
    place(&KINDS, fd).is_some_and(|word| {
        let (from, to) = (encode(from), encode(to));
        word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Ends what [`begin_settling`] has begun. Answers whether the descriptor is still that of the socket, and
/// is of this kind now.
pub(crate) fn end_settling(fd: c_int, kind: Kind) -> bool {
    let from = encode(Kind::Forking(Stage::Settling));
    let is_changed = place(&KINDS, fd).is_some_and(|word| {
        // No other thread gives up its part before it can see it.
        if let Kind::Rsocket(n) = kind
            && let Some(users) = place(&USERS, n)
        {
            users.fetch_add(1, Ordering::AcqRel);
        }
        word.compare_exchange(from, encode(kind), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    if !is_changed {
        give_up(kind);
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
