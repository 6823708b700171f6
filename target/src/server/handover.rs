//! Handover state of a server, which is imported by the next server in this process, or in the
//! program that replaces it.
//!
//! A start with the same configuration opens the same files and devices, but without
//! - port numbers, which are known to initiators and used in registrations. They also determine the
//!   order in which portals were added;
//! - registrations, persistent reservations and mode pages of logical units;
//! - the contents of RAM disks;
//! - listening sockets for iSCSI. While these are open, new connections are queued instead of being
//!   refused.
//!
//! Sessions are not included. They are closed like in any shutdown, and initiators log in again.
//!
//! # Transfer
//! [`ServerState::export`] converts the state to a document ([`StateDocument`]) and open files, one
//! for each RAM disk. [`ServerState::import`] does the opposite. Files are written and read in
//! chunks which are then released, so that the contents of a RAM disk are never in memory twice.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use riser_reactor::{MailSender, Ring, RingConfig};
use riser_scsi::lu::UnitState;
use riser_transport::shm;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::ports::{self, AllPortIds, WrittenPort};
use super::{Server, ServerError};
use crate::backend::Ram;
use crate::fabric::Unit;
use crate::worker::TcpListener;
use crate::worker::mail::Mail;

/// Timeout for workers to duplicate their sockets.
const SOCKETS: Duration = Duration::from_secs(5);

/// Handover state of a server: see the module documentation.
#[derive(Debug, Default)]
pub struct ServerState {
    pub(super) ports: AllPortIds,
    /// Unit states by backend name.
    pub(super) units: BTreeMap<String, UnitState>,
    /// RAM disks by backend name.
    pub(super) rams: BTreeMap<String, Arc<Ram>>,
    sockets: Vec<TcpListener>,
}

/// The serialized part of the state.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StateDocument {
    ports: Vec<WrittenPort>,
    units: Vec<UnitDocument>,
    rams: Vec<RamDocument>,
}

#[derive(Debug, Serialize, Deserialize)]
struct UnitDocument {
    backend: String,
    /// Never set. Older versions used a separate unit for read-only LUNs, which was written after
    /// the main unit.
    read_only: bool,
    state: UnitState,
}

#[derive(Debug, Serialize, Deserialize)]
struct RamDocument {
    backend: String,
    /// File descriptor for the contents, as seen by the next program.
    content: RawFd,
    /// Generation of the contents. Not written by older versions.
    #[serde(default)]
    generation: Option<[u8; 16]>,
}

/// Files with the contents of RAM disks, by backend name.
#[derive(Debug, Default)]
pub struct RamFiles(BTreeMap<String, File>);

impl RamFiles {
    /// Returns the open files, each with the contents of a RAM disk.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.0.values()
    }
}

impl StateDocument {
    /// Returns true if this file descriptor belongs to a RAM disk.
    #[must_use]
    pub fn has_file(&self, fd: RawFd) -> bool {
        self.rams.iter().any(|ram| ram.content == fd)
    }
}

impl ServerState {
    /// Adds listening sockets for iSCSI, which are kept open by this value.
    pub fn add_sockets(&mut self, sockets: Vec<TcpListener>) {
        self.sockets.extend(sockets);
    }

    /// Returns the listening sockets for iSCSI. For each address, these are in worker order.
    #[must_use]
    pub fn sockets(&self) -> &[TcpListener] {
        &self.sockets
    }

    /// Duplicates the socket with index `n` for this address. All sockets that were not duplicated
    /// are closed on drop.
    ///
    /// # Errors
    /// Errors from `fcntl(2)`.
    pub fn socket(&self, at: SocketAddr, n: usize) -> io::Result<Option<TcpListener>> {
        let mut there = self.sockets.iter().filter(|s| s.address() == at);
        there.nth(n).map(TcpListener::try_clone).transpose()
    }

    /// Serializes the state, and moves the contents of RAM disks to `files`. The document contains
    /// their file descriptors.
    ///
    /// # Errors
    /// If there is no memory left. [`ServerState::restore`] can be used to undo this, both on
    /// success and on error.
    pub fn export(&self, files: &mut RamFiles) -> io::Result<StateDocument> {
        let mut document = StateDocument {
            ports: ports::write(&self.ports),
            ..StateDocument::default()
        };
        for (backend, state) in &self.units {
            document.units.push(UnitDocument {
                backend: backend.clone(),
                read_only: false,
                state: state.clone(),
            });
        }
        for (backend, ram) in &self.rams {
            let file = File::from(memfd_create("riserd-ram", MemfdFlags::CLOEXEC)?);
            document.rams.push(RamDocument {
                backend: backend.clone(),
                content: file.as_raw_fd(),
                generation: Some(ram.generation()),
            });
            // Add this to `files` first, so that after an error, we can restore the data that was
            // already moved.
            let file = files.0.entry(backend.clone()).or_insert(file);
            ram.write_to(file)?;
        }
        Ok(document)
    }

    /// Moves back the data that was moved by [`ServerState::export`].
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn restore(&self, files: RamFiles) -> io::Result<()> {
        for (backend, file) in files.0 {
            if let Some(ram) = self.rams.get(&backend) {
                ram.take_back(&file)?;
            }
        }
        Ok(())
    }

    /// Deserializes a state, using `file_of` to get the files for descriptors. It does not contain
    /// any sockets.
    ///
    /// # Errors
    /// If a file is missing or invalid.
    pub fn import(
        document: StateDocument,
        mut file_of: impl FnMut(RawFd) -> Option<File>,
    ) -> io::Result<Self> {
        let mut state = Self {
            ports: ports::read(document.ports),
            ..Self::default()
        };
        for unit in document.units {
            let units = &mut state.units;
            // Use the first entry: see `UnitDocument::read_only`.
            units.entry(unit.backend).or_insert(unit.state);
        }
        for RamDocument {
            backend,
            content,
            generation,
        } in document.rams
        {
            // If a RAM disk was empty, initiators would read zeros instead of their data.
            // Therefore, we fail instead of importing a part of the state.
            let file = file_of(content).ok_or(io::ErrorKind::NotFound)?;
            let ram = generation.map_or_else(Ram::default, Ram::of_generation);
            let ram = Arc::new(ram);
            ram.take_back(&file)?;
            state.rams.insert(backend, ram);
        }
        Ok(state)
    }
}

/// Objects that remain after a server has shut down: unit states, which are final after the last
/// command, and the contents of RAM disks.
#[derive(Debug)]
pub struct Handover {
    ports: AllPortIds,
    units: BTreeMap<String, Arc<Unit>>,
    /// States of removed units.
    removed: BTreeMap<String, UnitState>,
    rams: BTreeMap<String, Arc<Ram>>,
}

impl Handover {
    /// Returns the state for the next server, after this server has shut down.
    #[must_use]
    pub fn after_shutdown(self, sockets: Vec<TcpListener>) -> ServerState {
        let served = self.units.iter();
        let served = served.map(|(key, unit)| (key.clone(), unit.lu.export_state()));
        ServerState {
            ports: self.ports,
            units: self.removed.into_iter().chain(served).collect(),
            rams: self.rams,
            sockets,
        }
    }
}

impl Server {
    /// Shuts down the server like [`Server::shutdown`], and returns the state for the next server,
    /// including these sockets.
    ///
    /// # Errors
    /// Returns a [`ServerError`]. The server is stopped anyway, as for a failed shutdown.
    pub fn export_state(self, sockets: Vec<TcpListener>) -> Result<ServerState, ServerError> {
        let handover = self.hand_over();
        self.shutdown()?;
        Ok(handover.after_shutdown(sockets))
    }

    /// Returns objects to be kept during the shutdown, which drops everything else.
    #[must_use]
    pub fn hand_over(&self) -> Handover {
        Handover {
            ports: self.builder.ports().clone(),
            units: self.builder.units().clone(),
            removed: self.builder.removed_states().clone(),
            rams: self.builder.open_rams(),
        }
    }

    /// Duplicates the listening sockets for iSCSI. While the duplicates are open, new connections
    /// are queued.
    ///
    /// # Errors
    /// Returns a [`ServerError`] if a worker does not reply, or if there are too many file
    /// descriptors.
    pub fn duplicate_sockets(&self) -> Result<Vec<TcpListener>, ServerError> {
        // Use a single deadline for all workers, because we can't handle anything else while
        // waiting.
        let until = Instant::now() + SOCKETS;
        let mut sockets = Vec::new();
        for reply in self.request_sockets() {
            let left = until.saturating_duration_since(Instant::now());
            let reply = reply.recv_timeout(left);
            let reply = reply.map_err(|_| ServerError::Timeout("a worker"))?;
            sockets.extend(reply.map_err(ServerError::Duplicate)?);
        }
        Ok(sockets)
    }

    /// Requests duplicates of sockets from each worker, in worker order. The caller has to wait for
    /// the replies. If a worker has exited, its channel is closed.
    #[must_use]
    pub fn request_sockets(&self) -> Vec<Receiver<io::Result<Vec<TcpListener>>>> {
        let send_request = |sender: &MailSender<Mail>| {
            let (tx, rx) = channel();
            let _ = sender.send_blocking(Mail::Listeners(tx));
            rx
        };
        self.workers.senders.iter().map(send_request).collect()
    }

    /// Checks that the next server can start with the same configuration, before a shutdown that
    /// cannot be undone. This reads the secrets and looks up files.
    ///
    /// # Errors
    /// Returns the [`ServerError`] that the next server would encounter.
    pub fn check_successor(&self) -> Result<(), ServerError> {
        // Rings may have been disabled by the administrator since the start, or this process may no
        // longer have the required capability. A simulation does not use any rings.
        if self.network.is_none() {
            let small = RingConfig {
                capacity: 1,
                ..RingConfig::default()
            };
            drop(Ring::new(small)?);
        }
        // execve(2) would wait for the thread that closes these, and the server would not respond
        // until then.
        shm::check_closed(Duration::ZERO).map_err(ServerError::Unclosed)?;
        // The next program cannot open a device for an address that is not available on this host.
        let mut lost = self.observation.problems().not_served();
        if let (true, Some((subject, problem))) = (self.config.strict, lost.next()) {
            let why = format!("{subject}: {}", problem.why);
            return Err(ServerError::Strict(why));
        }
        self.builder.check_successor(&self.config)
    }
}
