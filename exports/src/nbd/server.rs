//! Listens on a Unix socket. Clients are handled by the disk thread if there is one, otherwise by a
//! new thread for each client.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_block::{BlockDevice, ByteDevice, serve, task};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Export;
use super::budget::{Account, Budget};
use super::connection::Connection;
use super::outgoing::Shared;

/// Max clients waiting for accept.
const BACKLOG: i32 = 128;

/// Send buffer size requested for client sockets in bytes. It should be large enough to send a
/// reply with hundreds of kilobytes at once.
const SEND_BUFFER: usize = 1 << 20;

/// Max time for a disconnecting client to read the remaining replies.
const GRACE: Duration = Duration::from_secs(5);

/// Poll interval for disconnecting clients.
const LOOK: Duration = Duration::from_millis(2);

/// Connected client.
#[derive(Debug)]
struct Client {
    shared: Weak<Shared>,
    /// Dropped with the connection; its thread exits after that.
    presence: Weak<()>,
    /// Client thread, if it has one.
    thread: Option<JoinHandle<()>>,
}

impl Client {
    fn is_gone(&self) -> bool {
        self.presence.strong_count() == 0
    }

    /// Closes the connection and waits until it is dropped.
    fn close_and_join(self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.hang_up();
        }
        let joined = self.thread.map(JoinHandle::join);
        if joined.is_some_and(|result| result.is_err()) {
            tracing::error!("an NBD connection's thread panicked");
        }
        while self.presence.strong_count() > 0 {
            thread::sleep(LOOK);
        }
    }
}

type Clients = Arc<Mutex<Vec<Client>>>;

/// NBD server, before it is started.
#[derive(Debug)]
pub struct Server<D> {
    listener: UnixListener,
    path: PathBuf,
    device: Arc<ByteDevice<D>>,
    budget: Arc<Budget>,
    export: Export,
}

impl<D: BlockDevice> Server<D> {
    /// Binds the socket; only the owner will have access. If there is an existing socket and no
    /// process is listening on it, it will be replaced.
    ///
    /// # Errors
    /// Returns an error from bind, or `AddrInUse` if there is already a server or a different file.
    pub fn bind(
        path: &Path,
        device: Arc<ByteDevice<D>>,
        name: &str,
        description: &str,
    ) -> io::Result<Self> {
        if let Ok(meta) = path.symlink_metadata() {
            // If nobody is listening, this socket is a leftover from a killed process. We need to
            // connect to find out.
            if !meta.file_type().is_socket() || UnixStream::connect(path).is_ok() {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            std::fs::remove_file(path)?;
        }
        let listener = listen(path)?;
        let geometry = device.geometry();
        let export = Export {
            name: name.to_owned(),
            description: description.to_owned(),
            size: geometry.capacity,
            preferred_block: geometry.physical_block_size.clamp(4096, 65536),
            read_only: geometry.read_only,
            can_trim: geometry.max_discard > 0,
        };
        Ok(Self {
            listener,
            path: path.to_owned(),
            budget: Arc::new(Budget::new(
                device.device().buffer_bytes(),
                geometry.block_size.into(),
            )),
            device,
            export,
        })
    }

    /// Starts accepting clients.
    ///
    /// # Errors
    /// Returns an error if a thread can't be started.
    pub fn start(self) -> io::Result<ServerHandle> {
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let clients = Clients::default();
        let device = self.device.clone();
        let path = self.path.clone();
        let (stopped, accepted) = (stop.clone(), clients.clone());
        let thread = thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || self.accept(&stopped, &accepted))?;
        let flush = Box::new(move || task::block_on(device.flush()).map_err(io::Error::other));
        Ok(ServerHandle {
            stop,
            clients,
            thread: Some(thread),
            path,
            flush,
        })
    }

    fn accept(&self, stop: &OwnedFd, clients: &Clients) {
        loop {
            let mut fds = [
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&self.listener, PollFlags::IN),
            ];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for NBD clients");
                    return;
                }
            }
            if !fds[0].revents().is_empty() {
                return;
            }
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if let Err(error) = self.serve(socket, clients) {
                        tracing::warn!(%error, "NBD client rejected");
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // We are probably out of descriptors: wait until some clients have
                    // disconnected.
                    tracing::warn!(%error, "cannot accept an NBD client");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn serve(&self, socket: UnixStream, clients: &Clients) -> io::Result<()> {
        let mut clients = lock(clients);
        clients.retain(|client| !client.is_gone());
        if clients.len() >= self.budget.connections() {
            return Err(io::Error::other("too many clients"));
        }
        // The size can be limited by the kernel.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
        let account = Account::new(self.budget.clone());
        let shared = Arc::new(Shared::new(socket, account)?);
        let presence = Arc::new(());
        let mut client = Client {
            shared: Arc::downgrade(&shared),
            presence: Arc::downgrade(&presence),
            thread: None,
        };
        let (device, export) = (self.device.clone(), self.export.clone());
        let connection = Connection::new(shared, device, export, presence);
        if let Err(mut connection) = self.device.device().host(Box::new(connection)) {
            let thread = thread::Builder::new().name("nbd-client".into());
            client.thread = Some(thread.spawn(move || serve(&mut *connection))?);
        }
        clients.push(client);
        Ok(())
    }
}

/// Creates a listening socket which is only accessible by its owner from the start.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // On Linux, the file is created with the socket's mode (minus umask) when it is bound.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Running NBD server.
pub struct ServerHandle {
    stop: Arc<OwnedFd>,
    clients: Clients,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    flush: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
}

impl std::fmt::Debug for ServerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerHandle")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl ServerHandle {
    /// Number of current clients.
    #[must_use]
    pub fn connections(&self) -> usize {
        let clients = lock(&self.clients);
        clients.iter().filter(|client| !client.is_gone()).count()
    }

    /// Stops accepting, completes requests in flight, closes all connections, flushes the disk and
    /// removes the socket.
    ///
    /// # Errors
    /// Returns an error if the flush failed.
    pub fn stop(mut self) -> io::Result<()> {
        self.shut_down();
        (self.flush)()
    }

    fn shut_down(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the NBD server's thread panicked");
        }
        // Must be removed before closing the clients: otherwise new clients could find the socket
        // and connect to it.
        let _ = std::fs::remove_file(&self.path);
        let clients = std::mem::take(&mut *lock(&self.clients));
        for client in &clients {
            if let Some(shared) = client.shared.upgrade() {
                shared.stop_reading();
            }
        }
        let patience = Instant::now() + GRACE;
        while Instant::now() < patience && !clients.iter().all(Client::is_gone) {
            thread::sleep(LOOK);
        }
        for client in clients {
            client.close_and_join();
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.shut_down();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn socket_is_created_private() {
        let path = std::env::temp_dir().join(format!("riser-nbd-mode-{}", std::process::id()));
        let listener = listen(&path).unwrap();
        let mode = path.metadata().unwrap().permissions().mode();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mode & 0o777, 0o600);
        drop(listener);
    }
}
