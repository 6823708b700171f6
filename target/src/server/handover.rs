//! Handover state of a server: what the next one imports, in this process or in the program that
//! takes its place.
//!
//! A start from the same configuration finds files and devices again, but not
//! - the numbers of ports, which initiators know and registrations refer to, and which give the
//!   order in which portals were added;
//! - registrations, persistent reservations and modes of logical units;
//! - what is in RAM disks;
//! - the sockets that listen for iSCSI: while they stay open, connections wait that would be
//!   refused.
//!
//! Sessions are not part of it. They end, as in every shutdown, and initiators log in again.
//!
//! # How it travels
//! [`ServerState::export`] makes of it a document ([`StateDocument`]) and open files, one for each
//! RAM disk; [`ServerState::import`] the other way round. The files are emptied and filled chunk by
//! chunk, so that a RAM disk is never in memory twice.

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

/// Time limit for workers to give duplicates of their sockets.
const SOCKETS: Duration = Duration::from_secs(5);

/// Handover state of a server: see the module's header.
#[derive(Debug, Default)]
pub struct ServerState {
    pub(super) ports: AllPortIds,
    /// By the name of the backend, and whether the unit is read-only.
    pub(super) units: BTreeMap<String, UnitState>,
    /// By the name of the backend.
    pub(super) rams: BTreeMap<String, Arc<Ram>>,
    sockets: Vec<TcpListener>,
}

/// The part of the state that is written down.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StateDocument {
    ports: Vec<WrittenPort>,
    units: Vec<UnitDocument>,
    rams: Vec<RamDocument>,
}

#[derive(Debug, Serialize, Deserialize)]
struct UnitDocument {
    backend: String,
    /// Never set. Programs before had a unit of its own for read-only numbers, written after the
    /// other one, which counts.
    read_only: bool,
    state: UnitState,
}

#[derive(Debug, Serialize, Deserialize)]
struct RamDocument {
    backend: String,
    /// The descriptor of the file with its content, as the next program has it.
    content: RawFd,
    /// Of the content; programs before this one did not write it down.
    #[serde(default)]
    generation: Option<[u8; 16]>,
}

/// RAM disks in files, by the names of their backends.
#[derive(Debug, Default)]
pub struct RamFiles(BTreeMap<String, File>);

impl RamFiles {
    /// Open files, each with the content of one RAM disk.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.0.values()
    }
}

impl StateDocument {
    /// Returns true if a descriptor is that of a RAM disk.
    #[must_use]
    pub fn has_file(&self, fd: RawFd) -> bool {
        self.rams.iter().any(|ram| ram.content == fd)
    }
}

impl ServerState {
    /// Adds listening sockets of iSCSI, which this value keeps open.
    pub fn add_sockets(&mut self, sockets: Vec<TcpListener>) {
        self.sockets.extend(sockets);
    }

    /// Listening sockets of iSCSI, in the workers' order for each address.
    #[must_use]
    pub fn sockets(&self) -> &[TcpListener] {
        &self.sockets
    }

    /// Duplicates the `n`th of the sockets at an address. Those that are not duplicated close with
    /// this value.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn socket(&self, at: SocketAddr, n: usize) -> io::Result<Option<TcpListener>> {
        let mut there = self.sockets.iter().filter(|s| s.address() == at);
        there.nth(n).map(TcpListener::try_clone).transpose()
    }

    /// Writes the state down, and moves the content of RAM disks to `files`, whose descriptors the
    /// document names.
    ///
    /// # Errors
    /// There is no room. [`ServerState::restore`] undoes it, then as well as after a success.
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
            // In `files` before anything is moved: on an error, what was moved is found there and
            // taken back.
            let file = files.0.entry(backend.clone()).or_insert(file);
            ram.give_away(file)?;
        }
        Ok(document)
    }

    /// Takes back what [`ServerState::export`] has moved.
    ///
    /// # Errors
    /// What reading says.
    pub fn restore(&self, files: RamFiles) -> io::Result<()> {
        for (backend, file) in files.0 {
            if let Some(ram) = self.rams.get(&backend) {
                ram.take_back(&file)?;
            }
        }
        Ok(())
    }

    /// Reads a state that was written down, with the files that `file_of` gives for descriptors. It
    /// has no sockets.
    ///
    /// # Errors
    /// A file is missing, or is none of ours.
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
            // The first one counts: see `UnitDocument::read_only`.
            units.entry(unit.backend).or_insert(unit.state);
        }
        for RamDocument {
            backend,
            content,
            generation,
        } in document.rams
        {
            // Served empty, a RAM disk would give an initiator zeroes for what it has written; so
            // there is no state at all then, rather than a part of it.
            let file = file_of(content).ok_or(io::ErrorKind::NotFound)?;
            let ram = generation.map_or_else(Ram::default, Ram::of_generation);
            let ram = Arc::new(ram);
            ram.take_back(&file)?;
            state.rams.insert(backend, ram);
        }
        Ok(state)
    }
}

/// What a server that shuts down leaves: its states are those after the last command, and the
/// content of RAM disks outlives it.
#[derive(Debug)]
pub struct Handover {
    ports: AllPortIds,
    units: BTreeMap<String, Arc<Unit>>,
    /// States of units without a LUN.
    removed: BTreeMap<String, UnitState>,
    rams: BTreeMap<String, Arc<Ram>>,
}

impl Handover {
    /// The state for the next server, once this one has shut down.
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
    /// Shuts down as [`Server::shutdown`] does, and returns the state for the next server, with
    /// these sockets.
    ///
    /// # Errors
    /// [`ServerError`]. Nothing runs any more then, as after a shutdown that fails.
    pub fn export_state(self, sockets: Vec<TcpListener>) -> Result<ServerState, ServerError> {
        let handover = self.hand_over();
        self.shutdown()?;
        Ok(handover.after_shutdown(sockets))
    }

    /// What is to be handed over, to be held across the shutdown, which drops everything else.
    #[must_use]
    pub fn hand_over(&self) -> Handover {
        Handover {
            ports: self.builder.ports().clone(),
            units: self.builder.units().clone(),
            removed: self.builder.removed_states().clone(),
            rams: self.builder.open_rams(),
        }
    }

    /// Duplicates the sockets that listen for iSCSI. While the duplicates are open, connections
    /// that are not accepted wait.
    ///
    /// # Errors
    /// [`ServerError`]: a worker does not answer, or there are too many descriptors.
    pub fn duplicate_sockets(&self) -> Result<Vec<TcpListener>, ServerError> {
        // One time limit for all workers: nothing else is answered meanwhile.
        let until = Instant::now() + SOCKETS;
        let mut sockets = Vec::new();
        for answer in self.ask_for_sockets() {
            let left = until.saturating_duration_since(Instant::now());
            let answer = answer.recv_timeout(left);
            let answer = answer.map_err(|_| ServerError::Timeout("a worker"))?;
            sockets.extend(answer.map_err(ServerError::Duplicate)?);
        }
        Ok(sockets)
    }

    /// Asks each worker for duplicates of its sockets, in the workers' order; for callers that wait
    /// by themselves. A worker that is gone hangs up.
    #[must_use]
    pub fn ask_for_sockets(&self) -> Vec<Receiver<io::Result<Vec<TcpListener>>>> {
        let ask = |sender: &MailSender<Mail>| {
            let (tx, rx) = channel();
            let _ = sender.send_blocking(Mail::Listeners(tx));
            rx
        };
        self.senders.iter().map(ask).collect()
    }

    /// Checks that another server can serve the same, before a shutdown that could not be undone.
    /// Secrets are read, and files looked for.
    ///
    /// # Errors
    /// [`ServerError`]: why not.
    pub fn check_successor(&self) -> Result<(), ServerError> {
        // The administrator may have forbidden rings since the start, or this process may have
        // given up the capability that they need by now. Those of a simulation need none.
        if self.network.is_none() {
            let small = RingConfig {
                capacity: 1,
                ..RingConfig::default()
            };
            drop(Ring::new(small)?);
        }
        // execve(2) waits for the thread that closes them, and nothing would be served meanwhile.
        shm::check_closed(Duration::ZERO).map_err(ServerError::Unclosed)?;
        // The next program could not open a device at an address that the host does not have.
        let mut lost = self.observation.problems().not_served();
        if let (true, Some((subject, problem))) = (self.config.strict, lost.next()) {
            let (kind, name) = (subject.kind(), subject.name());
            let why = format!("{kind} {name}: {}", problem.why);
            return Err(ServerError::Strict(why));
        }
        self.builder.check_successor(&self.config)
    }
}
