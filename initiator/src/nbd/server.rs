//! Listens on a Unix socket, and has every client served by the disk's thread, or by one of its own
//! where that has none.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Export;
use super::budget::{Account, Budget};
use super::connection::Connection;
use super::outgoing::Shared;
use crate::block::{BlockDevice, ByteDevice, serve, task};

/// Clients that wait to be accepted.
const BACKLOG: i32 = 128;

/// Size that is asked for the sending side of a client's socket, in bytes, so that a reply of some
/// hundred kilobytes goes out at once.
const SEND_BUFFER: usize = 1 << 20;

/// Longest time for a client that is being disconnected to read its last replies.
const GRACE: Duration = Duration::from_secs(5);

/// Interval at which clients that are to leave are looked at.
const LOOK: Duration = Duration::from_millis(2);

/// A client that was accepted.
#[derive(Debug)]
struct Client {
    shared: Weak<Shared>,
    /// Gone with its connection, whose thread ends then.
    presence: Weak<()>,
    /// Its own, if it has one.
    thread: Option<JoinHandle<()>>,
}

impl Client {
    fn is_gone(&self) -> bool {
        self.presence.strong_count() == 0
    }

    /// Ends the connection, and waits until it is gone.
    fn end(self) {
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

/// An NBD server that is not running yet.
#[derive(Debug)]
pub struct Server<D> {
    listener: UnixListener,
    path: PathBuf,
    device: Arc<ByteDevice<D>>,
    budget: Arc<Budget>,
    export: Export,
}

impl<D: BlockDevice> Server<D> {
    /// Binds the socket, with access for its owner only. A socket there that no process listens on
    /// is replaced.
    ///
    /// # Errors
    /// Those of binding it, `AddrInUse` where a server listens or where there is another file.
    pub fn bind(
        path: &Path,
        device: Arc<ByteDevice<D>>,
        name: &str,
        description: &str,
    ) -> io::Result<Self> {
        if let Ok(meta) = path.symlink_metadata() {
            // A socket without a listener is left over from a process that was killed. To connect
            // is the only way to know.
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

    /// Starts to accept clients.
    ///
    /// # Errors
    /// Those of starting a thread.
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
                    tracing::error!(%error, "NBD server cannot wait for clients");
                    return;
                }
            }
            if !fds[0].revents().is_empty() {
                return;
            }
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if let Err(error) = self.serve(socket, clients) {
                        tracing::warn!(%error, "NBD client was turned away");
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Out of descriptors, as a rule: give those who have some time to leave.
                    tracing::warn!(%error, "NBD client cannot be accepted");
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
        // The kernel gives what its limit allows.
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

/// Listens on a socket that only its owner can connect to, from the moment it is there.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the file the mode that the socket has when it is bound, less the umask.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running NBD server.
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
    /// Number of clients at present.
    #[must_use]
    pub fn connections(&self) -> usize {
        let clients = lock(&self.clients);
        clients.iter().filter(|client| !client.is_gone()).count()
    }

    /// Stops accepting, answers what is in flight, closes every connection, flushes the disk and
    /// removes the socket.
    ///
    /// # Errors
    /// The flush failed.
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
        // Before the clients go: no other client shall find it and wait in vain.
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
            client.end();
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
    fn a_socket_is_its_owners_from_the_moment_it_is_there() {
        let path = std::env::temp_dir().join(format!("riser-nbd-mode-{}", std::process::id()));
        let listener = listen(&path).unwrap();
        let mode = path.metadata().unwrap().permissions().mode();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mode & 0o777, 0o600);
        drop(listener);
    }
}
