//! Files that the processes of a user and their brokers use to find each other.

use std::fs::{self, DirBuilder};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, ptr};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno as Os;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

/// Maximum number of connections that the broker has not accepted yet.
const BACKLOG: i32 = 64;

/// The files of an address: the socket of its broker, and a lock.
///
/// The lock is held while a process connects to the broker or starts it, and while a broker exits,
/// so that there is never more than one broker, and no process connects to a broker that exits.
#[derive(Clone, Debug)]
pub(super) struct Place {
    socket: PathBuf,
    lock: PathBuf,
}

impl Place {
    /// Returns the files of an address in the network namespace of this thread. Their directory is
    /// created if necessary.
    ///
    /// # Errors
    /// Returns an error if there is no directory that only this user can access.
    pub(super) fn of(addr: IpAddr) -> io::Result<Self> {
        let namespace = network_namespace()?;
        let dir = user_dir()?;
        Ok(Self::at(dir.join(format!("{namespace}-{addr}"))))
    }

    /// Returns the files of the address whose broker has this socket.
    pub(super) fn at(socket: PathBuf) -> Self {
        let lock = socket.with_added_extension("lock");
        Self { socket, lock }
    }

    /// Returns the path of the broker's socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Acquires the lock. Returns `None` if another process holds it. It is released when all
    /// copies of the descriptor are closed.
    ///
    /// # Errors
    /// Returns errors of `open(2)` and `flock(2)`.
    pub(super) fn try_lock(&self) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = open(&self.lock, flags, Mode::RUSR | Mode::WUSR)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(Os::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Connects to the broker. Returns `None` if there is no broker.
    ///
    /// # Errors
    /// Returns errors of `connect(2)`.
    pub(super) fn connect(&self) -> io::Result<Option<OwnedFd>> {
        let connection = new_socket()?;
        match connect(&connection, &SocketAddrUnix::new(&self.socket)?) {
            Ok(()) => Ok(Some(connection)),
            Err(Os::NOENT | Os::CONNREFUSED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Creates the socket of the broker. The lock must be held.
    ///
    /// # Errors
    /// Returns errors of `bind(2)`.
    pub(super) fn listen(&self) -> io::Result<OwnedFd> {
        // It might be left from a broker that was killed.
        self.remove();
        let listener = new_socket()?;
        bind(&listener, &SocketAddrUnix::new(&self.socket)?)?;
        listen(&listener, BACKLOG)?;
        Ok(listener)
    }

    /// Removes the socket of the broker. The lock must be held.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.socket);
    }
}

/// Accepts a connection of a process. Returns `None` if there is none.
///
/// # Errors
/// Returns errors of `accept(2)`.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(connection) => Ok(Some(connection)),
        Err(Os::AGAIN | Os::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn new_socket() -> Result<OwnedFd, Os> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Returns a number that identifies the network namespace of this thread. Unlike the inode of
/// `/proc/self/ns/net`, it is never reused.
fn network_namespace() -> io::Result<u64> {
    let socket = new_socket()?;
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the option has this type.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            ptr::from_mut(&mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 {
        return Ok(cookie);
    }
    let error = io::Error::last_os_error();
    let text = format!("cannot identify the network namespace: {error} (requires Linux 5.14)");
    Err(io::Error::new(error.kind(), text))
}

/// Option of Linux 5.14 and later, from `asm-generic/socket.h`.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Returns the directory of this user, which only the user can access.
fn user_dir() -> io::Result<PathBuf> {
    static PARENTS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    // The program may modify its environment later.
    let parents = PARENTS.get_or_init(|| {
        let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let runtime = runtime.filter(|dir| dir.is_absolute());
        runtime.into_iter().chain([env::temp_dir()]).collect()
    });
    let user = rustix::process::geteuid().as_raw();
    let mut refused = None;
    for parent in parents {
        let dir = parent.join(format!("riser-brokers-{user}"));
        match own_dir(&dir, user) {
            Ok(()) => return Ok(dir),
            Err(error) => refused = Some((dir, error)),
        }
    }
    let (dir, error) = refused.ok_or(Os::NOENT)?;
    let text = format!(
        "cannot use {}: {error} (set XDG_RUNTIME_DIR to a directory of this user)",
        dir.display()
    );
    Err(io::Error::new(error.kind(), text))
}

/// Creates a directory that can only be accessed by this user. Also checks an existing directory.
fn own_dir(dir: &Path, user: u32) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let is = fs::symlink_metadata(dir)?;
    if !is.is_dir() || is.uid() != user || is.mode() & 0o077 != 0 {
        let why = "not a directory that is only accessible by this user";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_has_single_holder() {
        let place = Place::of([127, 98, 1, 1].into()).unwrap();
        let held = place.try_lock().unwrap().unwrap();
        assert!(place.try_lock().unwrap().is_none());
        let copy = held.try_clone().unwrap();
        drop(held);
        assert!(place.try_lock().unwrap().is_none());
        drop(copy);
        assert!(place.try_lock().unwrap().is_some());
    }

    #[test]
    fn socket_of_killed_broker_is_replaced() {
        let place = Place::of([127, 98, 1, 2].into()).unwrap();
        place.remove();
        assert!(place.connect().unwrap().is_none());
        drop(place.listen().unwrap());
        assert!(place.connect().unwrap().is_none());
        let listener = place.listen().unwrap();
        let connection = place.connect().unwrap();
        assert!(connection.is_some() && accept(&listener).unwrap().is_some());
        assert!(accept(&listener).unwrap().is_none());
        place.remove();
        assert!(place.connect().unwrap().is_none());
    }

    #[test]
    fn accessible_directory_is_rejected() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = env::temp_dir().join(format!("riser-place-{}", std::process::id()));
        let user = rustix::process::geteuid().as_raw();
        own_dir(&dir, user).unwrap();
        own_dir(&dir, user).unwrap();
        assert!(own_dir(&dir, user + 1).is_err());
        let link = dir.join("link");
        symlink(&dir, &link).unwrap();
        assert!(own_dir(&link, user).is_err());
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(own_dir(&dir, user).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
