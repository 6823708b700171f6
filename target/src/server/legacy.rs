//! What a server leaves to the one after it: in this process, or in the program that takes its place.
//!
//! A start from the same configuration finds files and devices again, but not
//! - the numbers of ports, which initiators know and registrations hold on to, and which tell in what
//!   order portals were added;
//! - registrations, persistent reservations and modes of logical units;
//! - what is in RAM disks;
//! - the sockets that listen for iSCSI: while they stay open, connections wait that would be refused.
//!
//! Sessions are not among it. They end, as in every shutdown, and initiators log in again.
//!
//! # How it travels
//! [`Legacy::pack`] makes of it a document ([`Written`]) and open files, one for each RAM disk;
//! [`Legacy::unpack`] the other way round. The files are emptied and filled chunk by chunk, so that a
//! RAM disk is never in memory twice.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use riser_scsi::lu::UnitState;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::ports::{self, AllPortIds, WrittenPort};
use super::{Server, ServerError};
use crate::backend::Ram;
use crate::worker::iscsi::TcpListener;
use crate::worker::mail::Mail;

/// How long workers may take to give duplicates of their sockets.
const SOCKETS: Duration = Duration::from_secs(5);

/// See the module's header.
#[derive(Debug, Default)]
pub struct Legacy {
    pub(super) ports: AllPortIds,
    /// By the name of the backend, and whether the unit is read-only.
    pub(super) units: BTreeMap<String, UnitState>,
    /// By the name of the backend.
    pub(super) rams: BTreeMap<String, Arc<Ram>>,
    sockets: Vec<TcpListener>,
}

/// What of it can be written down.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Written {
    ports: Vec<WrittenPort>,
    units: Vec<WrittenUnit>,
    rams: Vec<WrittenRam>,
}

#[derive(Debug, Serialize, Deserialize)]
struct WrittenUnit {
    backend: String,
    /// Never set. Programs before had a unit of its own for read-only numbers, written after the
    /// other one, which counts.
    read_only: bool,
    state: UnitState,
}

#[derive(Debug, Serialize, Deserialize)]
struct WrittenRam {
    backend: String,
    /// The file's descriptor.
    content: RawFd,
    /// Of the content; programs before this one did not write it down.
    #[serde(default)]
    generation: Option<[u8; 16]>,
}

/// RAM disks in files, by the names of their backends.
#[derive(Debug, Default)]
pub struct Packed(BTreeMap<String, File>);

impl Packed {
    /// The files.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.0.values()
    }
}

impl Written {
    /// Whether a descriptor is that of a RAM disk.
    #[must_use]
    pub fn has_file(&self, fd: RawFd) -> bool {
        self.rams.iter().any(|ram| ram.content == fd)
    }
}

impl Legacy {
    /// These sockets are left as well.
    pub fn add_sockets(&mut self, sockets: Vec<TcpListener>) {
        self.sockets.extend(sockets);
    }

    /// The sockets.
    #[must_use]
    pub fn sockets(&self) -> &[TcpListener] {
        &self.sockets
    }

    /// The `n`th of the sockets at an address, once more: those that nobody asks for close with this
    /// value.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn socket(&self, at: SocketAddr, n: usize) -> io::Result<Option<TcpListener>> {
        let mut there = self.sockets.iter().filter(|s| s.address() == at);
        there.nth(n).map(TcpListener::try_clone).transpose()
    }

    /// Writes it down, and moves what is in RAM disks to `packed`, whose descriptors the document names.
    ///
    /// # Errors
    /// There is no room. [`Legacy::take_back`] undoes it, then as well as after a success.
    pub fn pack(&self, packed: &mut Packed) -> io::Result<Written> {
        let mut written = Written {
            ports: ports::write(&self.ports),
            ..Written::default()
        };
        for (backend, state) in &self.units {
            written.units.push(WrittenUnit {
                backend: backend.clone(),
                read_only: false,
                state: state.clone(),
            });
        }
        for (backend, ram) in &self.rams {
            let file = File::from(memfd_create("riserd-ram", MemfdFlags::CLOEXEC)?);
            written.rams.push(WrittenRam {
                backend: backend.clone(),
                content: file.as_raw_fd(),
                generation: Some(ram.generation()),
            });
            let file = packed.0.entry(backend.clone()).or_insert(file);
            ram.give_away(file)?;
        }
        Ok(written)
    }

    /// Takes back what [`Legacy::pack`] has moved.
    ///
    /// # Errors
    /// What reading says.
    pub fn take_back(&self, packed: Packed) -> io::Result<()> {
        for (backend, file) in packed.0 {
            if let Some(ram) = self.rams.get(&backend) {
                ram.take_back(&file)?;
            }
        }
        Ok(())
    }

    /// The legacy that was written down, with the files that `file_of` gives for descriptors; without
    /// sockets.
    ///
    /// # Errors
    /// A file is missing, or is none of ours.
    pub fn unpack(
        written: Written,
        mut file_of: impl FnMut(RawFd) -> Option<File>,
    ) -> io::Result<Self> {
        let mut legacy = Self {
            ports: ports::read(written.ports),
            ..Self::default()
        };
        for unit in written.units {
            let units = &mut legacy.units;
            units.entry(unit.backend).or_insert(unit.state);
        }
        for WrittenRam {
            backend,
            content,
            generation,
        } in written.rams
        {
            let file = file_of(content).ok_or(io::ErrorKind::NotFound)?;
            let ram = generation.map_or_else(Ram::default, Ram::of_generation);
            let ram = Arc::new(ram);
            ram.take_back(&file)?;
            legacy.rams.insert(backend, ram);
        }
        Ok(legacy)
    }
}

impl Server {
    /// Shuts down as [`Server::shutdown`] does, and gives what the server after it is to have, these
    /// sockets among it.
    ///
    /// # Errors
    /// [`ServerError`]. Nothing runs any more then, as after a shutdown that fails.
    pub fn bequeath(self, sockets: Vec<TcpListener>) -> Result<Legacy, ServerError> {
        let (ports, units) = (self.builder.ports().clone(), self.builder.units().clone());
        let rams = self.builder.open_rams();
        self.shutdown()?;
        let states = units.iter();
        Ok(Legacy {
            ports,
            units: states
                .map(|(key, unit)| (key.clone(), unit.lu.export_state()))
                .collect(),
            rams,
            sockets,
        })
    }

    /// The sockets that listen for iSCSI, once more. While these are open, connections wait that nobody
    /// accepts.
    ///
    /// # Errors
    /// [`ServerError`]: a worker does not answer, or there are too many descriptors.
    pub fn duplicate_sockets(&self) -> Result<Vec<TcpListener>, ServerError> {
        let until = Instant::now() + SOCKETS;
        let mut sockets = Vec::new();
        for sender in &self.senders {
            let (tx, rx) = channel();
            // A worker that is gone hangs up.
            let _ = sender.send_blocking(Mail::Listeners(tx));
            let left = until.saturating_duration_since(Instant::now());
            let answer = rx.recv_timeout(left);
            let answer = answer.map_err(|_| ServerError::Timeout("a worker"))?;
            sockets.extend(answer.map_err(ServerError::Duplicate)?);
        }
        Ok(sockets)
    }

    /// Whether a server can follow that serves the same: what a shutdown and a start would find out
    /// too late. Secrets are read, and files looked for.
    ///
    /// # Errors
    /// [`ServerError`]: why not.
    pub fn check_successor(&self) -> Result<(), ServerError> {
        self.builder.check_successor(&self.config)
    }
}
