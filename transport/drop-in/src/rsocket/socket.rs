//! Sockets by their numbers, and how threads wait for them.
//!
//! A socket's lock protects all of it, and no thread holds it while it sleeps. A thread that sleeps
//! polls the descriptors on which something may happen, and one of its own: a thread that takes an
//! event from a descriptor wakes the other sleepers of that socket by theirs, since the event may have
//! been meant for them.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::connection::{AGAIN, Connection};
use super::datagram::Datagram;
use super::options::{Defaults, Options};
use crate::errno::Errno;
use crate::fork::generation;
use crate::lock::unpoisoned;

/// A socket. It belongs to the process that has made it: a child has its number, and closes it.
pub(super) struct Socket {
    inner: Mutex<Inner>,
    generation: u32,
}

/// What a socket's lock protects.
pub(super) struct Inner {
    pub(super) kind: Kind,
    /// Flags of `rfcntl`.
    pub(super) flags: c_int,
    sleepers: Vec<Sleeper>,
}

/// Kind of socket.
pub(super) enum Kind {
    /// `SOCK_STREAM`
    Stream(Connection),
    /// `SOCK_DGRAM`
    Datagram(Datagram),
}

impl Kind {
    /// The stream socket.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for another kind.
    pub(super) fn stream(&mut self) -> Result<&mut Connection, Errno> {
        match self {
            Self::Stream(connection) => Ok(connection),
            Self::Datagram(_) => Err(Errno::UNSUPPORTED),
        }
    }

    /// Its options, and whether sizes can still be set.
    pub(super) fn options(&mut self) -> (&mut Options, bool) {
        match self {
            Self::Stream(connection) => {
                let is_open = connection.is_open_to_sizes();
                (&mut connection.options, is_open)
            }
            Self::Datagram(datagram) => {
                let is_open = datagram.is_open_to_sizes();
                (&mut datagram.options, is_open)
            }
        }
    }
}

/// Descriptor by which a thread that sleeps is woken.
pub(super) type Sleeper = Arc<OwnedFd>;

thread_local! {
    static SLEEPER: Option<Sleeper> =
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok().map(Arc::new);
}

/// The calling thread's.
///
/// # Errors
/// `EMFILE` where there is none.
pub(super) fn sleeper() -> Result<Sleeper, Errno> {
    SLEEPER.with(Clone::clone).ok_or(Errno(libc::EMFILE))
}

/// Forgets that a thread was to be woken.
pub(super) fn calm(sleeper: &Sleeper) {
    let _ = rustix::io::read(sleeper, &mut [0; 8]);
}

static SOCKETS: RwLock<Option<HashMap<c_int, Arc<Socket>>>> = RwLock::new(None);

/// Gives a socket its number: that of a descriptor which it owns, so no other file has it.
pub(super) fn insert(number: c_int, kind: Kind) {
    let inner = Inner {
        kind,
        flags: libc::O_RDWR,
        sleepers: Vec::new(),
    };
    let socket = Arc::new(Socket {
        inner: Mutex::new(inner),
        generation: generation(),
    });
    let mut sockets = unpoisoned(SOCKETS.write());
    sockets
        .get_or_insert_with(HashMap::new)
        .insert(number, socket);
}

/// The socket with a number, of this process.
pub(super) fn find(number: c_int) -> Option<Arc<Socket>> {
    let sockets = unpoisoned(SOCKETS.read());
    let found = sockets.as_ref()?.get(&number).cloned();
    found.filter(|socket| !socket.is_inherited())
}

/// The socket that a program names.
///
/// # Errors
/// `EBADF` where there is none.
pub(super) fn get(number: c_int) -> Result<Arc<Socket>, Errno> {
    find(number).ok_or(Errno(libc::EBADF))
}

/// Takes a socket's number away, also from one of the parent's.
///
/// # Errors
/// `EBADF` where there is none.
pub(super) fn remove(number: c_int) -> Result<Arc<Socket>, Errno> {
    let mut sockets = unpoisoned(SOCKETS.write());
    let removed = sockets.as_mut().and_then(|s| s.remove(&number));
    removed.ok_or(Errno(libc::EBADF))
}

impl Socket {
    /// Takes the lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        unpoisoned(self.inner.lock())
    }

    /// It belongs to the process that this one was forked from.
    pub(super) fn is_inherited(&self) -> bool {
        self.generation != generation()
    }

    /// Tries once where the program's flags forbid to wait, and else as [`Self::wait`].
    ///
    /// # Errors
    /// Those of the attempt; `EINTR`.
    pub(super) fn attempt<T>(
        &self,
        flags: c_int,
        mut attempt: impl FnMut(&mut Inner) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut inner = self.lock();
        if flags & libc::MSG_DONTWAIT != 0 || inner.flags & libc::O_NONBLOCK != 0 {
            return attempt(&mut inner);
        }
        drop(inner);
        self.wait(None, attempt)
    }

    /// Tries until there is an outcome other than `EAGAIN`. Sleeps between the attempts, after
    /// having polled for a while.
    ///
    /// # Errors
    /// Those of the attempt, also `EAGAIN` at the deadline; `EINTR`.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut attempt: impl FnMut(&mut Inner) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut spin_until = None;
        loop {
            let result = attempt(&mut self.lock());
            if !matches!(result, Err(AGAIN)) {
                return result;
            }
            let now = Instant::now();
            if now >= *spin_until.get_or_insert_with(|| now + Defaults::get().polling) {
                break;
            }
        }
        loop {
            let mut inner = self.lock();
            inner.arm();
            // Something may have happened before it was armed.
            let result = attempt(&mut inner);
            if !matches!(result, Err(AGAIN)) {
                return result;
            }
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(AGAIN);
            }
            self.sleep(inner, left)?;
        }
    }

    /// Sleeps until something happens.
    fn sleep(&self, mut inner: MutexGuard<'_, Inner>, left: Option<Duration>) -> Result<(), Errno> {
        let own = sleeper()?;
        let mut fds = inner.begin_sleep(&own);
        drop(inner);
        fds.push(poll_in(own.as_raw_fd()));
        let result = poll(&mut fds, left);
        calm(&own);
        let mut inner = self.lock();
        inner.end_sleep(&own);
        result.map(drop)
    }
}

impl Inner {
    /// Asks for the next event to wake the sleepers.
    pub(super) fn arm(&mut self) {
        match &mut self.kind {
            Kind::Stream(connection) => connection.arm(),
            Kind::Datagram(datagram) => datagram.arm(),
        }
    }

    /// Adds a sleeper; answers what it has to poll.
    pub(super) fn begin_sleep(&mut self, sleeper: &Sleeper) -> Vec<libc::pollfd> {
        self.sleepers.push(sleeper.clone());
        match &mut self.kind {
            Kind::Stream(connection) => vec![poll_in(connection.event_fd())],
            Kind::Datagram(datagram) => datagram.event_fds().map(poll_in).collect(),
        }
    }

    /// Removes a sleeper that has woken, and takes the events.
    pub(super) fn end_sleep(&mut self, sleeper: &Sleeper) {
        if let Some(at) = self.sleepers.iter().position(|s| Arc::ptr_eq(s, sleeper)) {
            self.sleepers.swap_remove(at);
        }
        let is_taken = match &mut self.kind {
            Kind::Stream(connection) => connection.take_events(),
            Kind::Datagram(datagram) => datagram.take_events(),
        };
        if is_taken {
            self.wake();
        }
    }

    /// Events for `rpoll`.
    pub(super) fn revents(&mut self, events: i16) -> i16 {
        self.progress();
        match &mut self.kind {
            Kind::Stream(connection) => connection.revents(events),
            Kind::Datagram(datagram) => datagram.revents(events),
        }
    }

    /// Handles what has happened.
    pub(super) fn progress(&mut self) {
        let is_taken = match &mut self.kind {
            Kind::Stream(connection) => connection.progress(),
            // A datagram that was taken from the socket may be meant for a sleeper.
            Kind::Datagram(datagram) => datagram.progress(),
        };
        if is_taken {
            self.wake();
        }
    }

    /// Wakes all threads that sleep.
    pub(super) fn wake(&self) {
        for sleeper in &self.sleepers {
            let _ = rustix::io::write(sleeper, &1u64.to_ne_bytes());
        }
    }
}

/// An entry of `poll(2)` for a descriptor that becomes readable.
pub(super) fn poll_in(fd: c_int) -> libc::pollfd {
    libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }
}

/// `ppoll(2)`.
///
/// # Errors
/// Its errors.
pub(super) fn poll(fds: &mut [libc::pollfd], left: Option<Duration>) -> Result<usize, Errno> {
    let left = left.map(|left| libc::timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let timeout = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the entries and the time are alive.
    let n = unsafe {
        libc::ppoll(
            fds.as_mut_ptr(),
            fds.len() as libc::nfds_t,
            timeout,
            std::ptr::null(),
        )
    };
    usize::try_from(n).map_err(|_| Errno::last())
}
