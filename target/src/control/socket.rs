//! The admin API socket: a Unix socket that can only be used by its owner (mode 0600), or a socket
//! from the service manager.

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

/// Connection limits. Configurations can be long, and users may read responses interactively.
const LIMITS: Limits = Limits {
    connections: 128,
    request: Duration::from_secs(60),
    response: Duration::from_secs(60),
    idle: Duration::from_secs(60),
};

/// A socket path that is removed on drop.
#[derive(Debug)]
pub struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        // It is not an error if the file does not exist.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A server on the admin socket. When this is dropped, no more requests are handled.
#[derive(Debug)]
pub struct Admin {
    listener: UnixListener,
    bound: Option<Bound>,
    serving: Serving,
}

impl Admin {
    /// Handles requests on a socket. If we own the socket, it is removed on drop.
    ///
    /// # Errors
    /// Fails if the socket cannot be registered.
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

    /// Stops the server but keeps the socket open, so new connections have to wait.
    pub async fn shut_down(self) -> (UnixListener, Option<Bound>) {
        self.serving.shut_down().await;
        (self.listener, self.bound)
    }
}

/// Returns the socket from the service manager, if any. This is the first socket that was passed.
/// It is not closed on restart, and its permissions are controlled by the service manager.
///
/// # Errors
/// Fails if the descriptor is not a listening Unix socket.
pub fn inherited() -> io::Result<Option<UnixListener>> {
    ListenFd::from_env().take_unix_listener(0)
}

/// Origin of a socket that was not bound by this process.
#[derive(Debug)]
pub enum SocketOrigin {
    /// Bound to the expected path by the previous program in this process, so we should remove it.
    Ours(Bound),
    /// Bound to the expected path by the service manager.
    Inherited,
    /// Bound to a different path, or without a path.
    Elsewhere,
}

impl SocketOrigin {
    /// Returns the origin of a socket that should be bound to a path.
    ///
    /// # Errors
    /// Fails if it has no address.
    pub fn of(listener: &UnixListener, path: Option<&Path>) -> io::Result<Self> {
        let at = listener.local_addr()?;
        Ok(match (at.as_pathname(), path) {
            (Some(at), Some(path)) if at == path => Self::Inherited,
            // The kernel reports the path from the bind call, even if the file was renamed.
            (Some(at), Some(path)) if at == hidden(path) => Self::Ours(Bound(path.to_owned())),
            _ => Self::Elsewhere,
        })
    }
}

/// Listens on a path, and creates its directory if needed. If there is a socket without a listening
/// process, it is replaced.
///
/// # Errors
/// Returns `AddrInUse` if another daemon is listening, `AlreadyExists` if the path is not a socket,
/// or any file system error.
pub fn bind(path: &Path) -> io::Result<(UnixListener, Bound)> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    // We need to connect to find out if a daemon is listening.
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => {
            let why = "in use by another daemon";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        // This is the socket of a daemon that has exited.
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            use std::os::unix::fs::FileTypeExt;
            // Connecting to a regular file returns the same error, and the path could have been
            // mistyped.
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let why = "path exists and is not a socket";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
        }
        Err(e) => return Err(e),
    }
    let hidden = hidden(path);
    // A daemon with the same process ID could have been killed between the next two steps.
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

/// Returns a hidden path for the bind call, so that the socket only becomes visible once its mode
/// is set.
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
    fn socket_is_private_and_removed_on_exit() {
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
    fn stale_socket_is_replaced_but_not_file() {
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
