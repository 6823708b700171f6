//! The socket of the admin API: a Unix socket that only its owner may use (mode 0600), or one that
//! the service manager has made.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use listenfd::ListenFd;
pub use riser_admin_api::socket::default_path;

use super::api::{self, Requests};
use super::bounded::{Bounded, Limits};
use super::routes;
use super::serving::Serving;

/// Limits of connections. Configurations are long, and people may read answers as they come.
const LIMITS: Limits = Limits {
    connections: 128,
    request: Duration::from_secs(60),
    answer: Duration::from_secs(60),
    idle: Duration::from_secs(60),
};

/// A socket that is removed when it is dropped.
#[derive(Debug)]
pub struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A server at the admin socket. Once it is dropped it answers no further request.
#[derive(Debug)]
pub struct Admin {
    listener: UnixListener,
    bound: Option<Bound>,
    serving: Serving,
}

impl Admin {
    /// Answers what comes by a socket, which goes with this if it is ours.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn open(
        listener: UnixListener,
        bound: Option<Bound>,
        requests: Requests,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let socket = tokio::net::UnixListener::from_std(listener.try_clone()?)?;
        let router = routes::router(requests);
        let router = router.into_make_service_with_connect_info::<api::Peer>();
        let bounded = Bounded::new(socket, LIMITS);
        let serving =
            Serving::spawn(|end| axum::serve(bounded, router).with_graceful_shutdown(end));
        Ok(Self {
            listener,
            bound,
            serving,
        })
    }

    /// Ends it but not the socket: who connects waits.
    pub async fn end(self) -> (UnixListener, Option<Bound>) {
        self.serving.end().await;
        (self.listener, self.bound)
    }
}

/// The socket that a service manager listens at for us, if it does: the first that it has handed
/// over. It stays over restarts, and who may use it is the manager's to say.
///
/// # Errors
/// What was handed over is no listening Unix socket.
pub fn inherited() -> io::Result<Option<UnixListener>> {
    ListenFd::from_env().take_unix_listener(0)
}

/// Origin of a socket that this process did not bind.
#[derive(Debug)]
pub enum SocketOrigin {
    /// At its path, bound by the program that was in this process before: it is ours to remove.
    Ours(Bound),
    /// At its path, bound by the service manager.
    Given,
    /// At another path, or at none.
    Elsewhere,
}

impl SocketOrigin {
    /// Returns the origin of a socket that should be at a path.
    ///
    /// # Errors
    /// It has no address.
    pub fn of(listener: &UnixListener, path: Option<&Path>) -> io::Result<Self> {
        let at = listener.local_addr()?;
        Ok(match (at.as_pathname(), path) {
            (Some(at), Some(path)) if at == path => Self::Given,
            // The kernel keeps the name that it was bound by, and the rename does not change that.
            (Some(at), Some(path)) if at == hidden(path) => Self::Ours(Bound(path.to_owned())),
            _ => Self::Elsewhere,
        })
    }
}

/// Listens at a path, whose directory it makes if need be. A socket that no process listens at is
/// replaced.
///
/// # Errors
/// `AddrInUse` if another daemon listens there, `AlreadyExists` if the path is no socket; any error
/// of the file system.
pub fn bind(path: &Path) -> io::Result<(UnixListener, Bound)> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    // By connecting, since the file alone does not say whether a daemon listens at it.
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => {
            let why = "another daemon listens there";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        // A socket of a daemon that has ended.
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            use std::os::unix::fs::FileTypeExt;
            // A connection to a regular file is refused in the same way, and that may be one by a
            // mistyped path.
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let why = "there is a file of another kind";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
        }
        Err(e) => return Err(e),
    }
    let hidden = hidden(path);
    // A daemon with this process id may have been killed between the next two steps.
    let _ = std::fs::remove_file(&hidden);
    let listener = UnixListener::bind(&hidden)?;
    let ready = std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&hidden, path));
    if let Err(error) = ready {
        let _ = std::fs::remove_file(&hidden);
        return Err(error);
    }
    Ok((listener, Bound(path.to_owned())))
}

/// Hidden path at which a socket is bound, so that it gets its name only with its mode.
fn hidden(path: &Path) -> PathBuf {
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{}", std::process::id()));
    hidden.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("riserd-socket-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn only_its_owner_may_use_it_and_it_goes_with_its_daemon() {
        let dir = dir("mode");
        let path = dir.join("deep").join("admin.sock");
        let (listener, bound) = bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop((listener, bound));
        assert!(!path.exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_socket_left_behind_is_replaced_and_a_file_is_not() {
        let dir = dir("stale");
        let path = dir.join("admin.sock");
        let (listener, bound) = bind(&path).unwrap();
        drop(listener);
        std::mem::forget(bound);
        assert!(path.exists());
        drop(bind(&path).unwrap());
        std::fs::write(&path, "precious").unwrap();
        let error = bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
