//! Files that the processes of a user and their brokers use to find each other.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, ptr};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, open, openat, unlinkat};
use rustix::io::Errno as Os;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt,
};

/// Maximum number of connections that the broker has not accepted yet.
const BACKLOG: i32 = 64;

/// The files of an address: the socket of its broker, and a lock.
///
/// The lock is held while a process connects to the broker or starts it, and while a broker exits,
/// so that there is never more than one broker, and no process connects to a broker that exits.
#[derive(Debug)]
pub(super) struct Place {
    /// Their directory. It stays open, so that it cannot be replaced by another one.
    dir: OwnedFd,
    socket: PathBuf,
}

impl Place {
    /// Returns the files of an address in the network namespace of this thread. Their directory is
    /// created if necessary.
    ///
    /// # Errors
    /// Returns an error if there is no directory that only this user can access.
    pub(super) fn of(addr: IpAddr) -> io::Result<Self> {
        let (boot, namespace) = (boot_id(), network_namespace()?);
        let (dir, path) = user_dir()?;
        Ok(Self::at(
            dir,
            path.join(format!("{boot}-{namespace:x}-{addr}")),
        ))
    }

    /// Returns the files of the address whose broker has this socket.
    pub(super) fn at(dir: OwnedFd, socket: PathBuf) -> Self {
        Self { dir, socket }
    }

    /// Returns the directory of the files.
    pub(super) fn dir(&self) -> &OwnedFd {
        &self.dir
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
        let path = self.socket.with_added_extension("lock");
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = openat(&self.dir, file_name(&path), flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| with_path("open", &path, error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(Os::AGAIN) => Ok(None),
            Err(error) => Err(with_path("lock", &path, error)),
        }
    }

    /// Connects to the broker. Returns `None` if there is no broker.
    ///
    /// # Errors
    /// Returns errors of `connect(2)`, and `EACCES` if it belongs to another user.
    pub(super) fn connect(&self) -> io::Result<Option<OwnedFd>> {
        let connection = new_socket()?;
        match connect(&connection, &self.address()?) {
            Ok(()) if is_own(&connection) => Ok(Some(connection)),
            Ok(()) => {
                let why = "the broker of the address belongs to another user";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
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
        bind(&listener, &self.address()?)
            .map_err(|error| with_path("create", &self.socket, error))?;
        listen(&listener, BACKLOG)?;
        Ok(listener)
    }

    /// Removes the socket of the broker. The lock must be held.
    pub(super) fn remove(&self) {
        let _ = unlinkat(&self.dir, file_name(&self.socket), AtFlags::empty());
    }

    /// Returns the address of the socket in the open directory, which is also short enough for any
    /// directory. Without `/proc`, it is the path.
    fn address(&self) -> io::Result<SocketAddrUnix> {
        let dir = PathBuf::from(format!("/proc/thread-self/fd/{}", self.dir.as_raw_fd()));
        let path = match fs::metadata(&dir) {
            Ok(_) => dir.join(file_name(&self.socket)),
            Err(_) => self.socket.clone(),
        };
        SocketAddrUnix::new(&path).map_err(|error| with_path("use", &path, error))
    }
}

fn file_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// Adds the path to an error.
fn with_path(action: &str, path: &Path, error: Os) -> io::Error {
    let text = format!("cannot {action} {}: {error}", path.display());
    io::Error::new(io::Error::from(error).kind(), text)
}

/// Returns whether the peer of a connection is a process of this user.
fn is_own(connection: &OwnedFd) -> bool {
    let peer = sockopt::socket_peercred(connection);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Accepts a connection of a process of this user, if one is pending.
///
/// # Errors
/// Returns errors of `accept(2)`.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    loop {
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) if is_own(&connection) => return Ok(Some(connection)),
            Ok(_) => {}
            Err(Os::AGAIN | Os::CONNABORTED) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

fn new_socket() -> Result<OwnedFd, Os> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Returns a part of the ID of this boot, because hosts may share the directory, and have namespaces
/// with the same number. Without `/proc`, it is empty.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.chars()
        .filter(char::is_ascii_hexdigit)
        .take(16)
        .collect()
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

/// Returns the directory of this user, which only the user can access, and its path.
fn user_dir() -> io::Result<(OwnedFd, PathBuf)> {
    static PARENTS: OnceLock<(Option<PathBuf>, PathBuf)> = OnceLock::new();
    // The program may modify its environment later.
    let (runtime, temporary) = PARENTS.get_or_init(|| {
        // SAFETY: this only reads a value that was set by the kernel.
        if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
            // The environment belongs to another user.
            return (None, PathBuf::from("/tmp"));
        }
        let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        (runtime.filter(|dir| dir.is_absolute()), env::temp_dir())
    });
    let user = rustix::process::geteuid().as_raw();
    // `su` may preserve the variable of another user.
    let is_own = |dir: &&PathBuf| fs::metadata(dir).is_ok_and(|found| is_private(&found, user));
    let runtime = runtime.as_ref().filter(is_own);
    let mut refused = None;
    for parent in runtime.into_iter().chain([temporary]) {
        let path = parent.join(format!("riser-brokers-{user}"));
        match open_dir(&path, user) {
            Ok(dir) => return Ok((dir, path)),
            Err(error) => refused = Some((path, error)),
        }
    }
    let (dir, error) = refused.ok_or(Os::NOENT)?;
    let text = format!(
        "cannot use {}: {error} (set XDG_RUNTIME_DIR to a directory of this user)",
        dir.display()
    );
    Err(io::Error::new(error.kind(), text))
}

/// Opens a directory that can only be accessed by this user, and creates it if necessary.
fn open_dir(path: &Path, user: u32) -> io::Result<OwnedFd> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = File::from(open(path, flags, Mode::empty())?);
    if !is_private(&dir.metadata()?, user) {
        let why = "not a directory that is only accessible by this user";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(dir.into())
}

/// Returns whether this is a directory that can only be accessed by this user.
fn is_private(found: &Metadata, user: u32) -> bool {
    found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0
}

#[cfg(test)]
mod tests {
    use riser_testkit::skip::skip;

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
        let name = file_name(place.socket()).to_str().unwrap();
        assert_eq!(name.split('-').next().map(str::len), Some(16), "{name}");
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

    /// Acts as another user in the directory of root.
    fn as_other_user(act: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: these calls only change the credentials of this thread.
                unsafe {
                    assert_eq!(libc::syscall(libc::SYS_setresuid, -1, 65534, -1), 0);
                    libc::setfsuid(0);
                }
                act();
            });
        });
    }

    #[test]
    fn other_users_are_rejected() {
        if !rustix::process::geteuid().is_root() {
            return skip("other users", "requires root");
        }
        let place = Place::of([127, 98, 1, 3].into()).unwrap();
        let listener = place.listen().unwrap();
        as_other_user(|| {
            let connection = new_socket().unwrap();
            connect(&connection, &place.address().unwrap()).unwrap();
        });
        let own = place.connect().unwrap();
        assert!(own.is_some() && accept(&listener).unwrap().is_some());
        assert!(accept(&listener).unwrap().is_none());
        as_other_user(|| listen(&listener, BACKLOG).unwrap());
        let error = place.connect().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        place.remove();
    }

    #[test]
    fn long_directory_is_supported() {
        let parent = env::temp_dir().join(format!("riser-{:0100}", std::process::id()));
        let user = rustix::process::geteuid().as_raw();
        let dir = open_dir(&parent, user).unwrap();
        let place = Place::at(dir, parent.join("socket"));
        let _listener = place.listen().unwrap();
        assert!(place.connect().unwrap().is_some());
        fs::remove_dir_all(&parent).unwrap();
        let error = place.try_lock().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("socket.lock"), "{error}");
    }

    #[test]
    fn accessible_directory_is_rejected() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = env::temp_dir().join(format!("riser-place-{}", std::process::id()));
        let user = rustix::process::geteuid().as_raw();
        open_dir(&dir, user).unwrap();
        open_dir(&dir, user).unwrap();
        assert!(open_dir(&dir, user + 1).is_err());
        let link = dir.join("link");
        symlink(&dir, &link).unwrap();
        assert!(open_dir(&link, user).is_err());
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(open_dir(&dir, user).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
