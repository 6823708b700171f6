//! `riser attach --ublk`: a logical unit as a block device of the host.
//!
//! A device whose process was killed stays, and what is sent to it waits. Whoever attaches the same
//! address under the same number takes it over, as the same initiator: see [`ublk`].

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::args::UblkNumber;
use super::disk::{Address, Disk};
use super::exit::{CliError, Exit};
use super::serve::{Event, Ready};
use super::state::{Attachment, Export, StateDir};
use super::udev;
use crate::block::{BlockDevice, task};
use crate::ublk::{self, UblkDevice};

/// How long whoever has the device open may go on.
const GRACE: Duration = Duration::from_secs(5);

/// Where a logical unit is to show.
pub(super) enum Place {
    /// A new device.
    New {
        /// Its number, if it has to be that.
        number: Option<u32>,
        port: u64,
    },
    /// A device whose process was killed.
    Lost {
        number: u32,
        port: u64,
        /// What that process had written it down as.
        id: String,
        pid: u32,
    },
}

impl Place {
    /// Looks whether the number is of a device that waits.
    pub(super) fn find(number: UblkNumber, url: &Address) -> Result<Self, CliError> {
        let new = Self::New {
            number: number.0,
            port: RandomState::new().build_hasher().finish(),
        };
        let Some(number) = number.0.filter(|number| ublk::is_lost(*number)) else {
            return Ok(new);
        };
        let device = ublk::path(number);
        let shown = device.display();
        let ours = StateDir::open()
            .and_then(|dir| dir.find(&device.to_string_lossy()))
            .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
        let refused = |what: String| {
            Err(CliError::new(Exit::Busy, what).help("`riser detach` takes it away"))
        };
        match (ours, url) {
            (
                Some(Attachment {
                    id,
                    pid,
                    url: theirs,
                    export: Export::Ublk { port, .. },
                    ..
                }),
                Address::Target(_),
            ) if theirs == url.to_string() => Ok(Self::Lost {
                number,
                port,
                id,
                pid,
            }),
            (Some(attachment), Address::Target(_)) => {
                refused(format!("{shown} waits for {}", attachment.url))
            }
            (Some(_), Address::Memory { .. }) => {
                refused(format!("the contents of {shown} died with its process"))
            }
            (None, _) => refused(format!(
                "{shown} waits for a process that we know nothing of"
            )),
        }
    }

    /// What its initiator port follows from.
    pub(super) fn port(&self) -> u64 {
        match self {
            Self::New { port, .. } | Self::Lost { port, .. } => *port,
        }
    }
}

/// Serves a disk until a signal.
pub(super) fn serve(
    place: Place,
    url: &Address,
    disk: &Arc<Disk>,
    events: &mpsc::Receiver<Event>,
    ready: &mut Ready<'_>,
) -> Result<(), CliError> {
    let device = match &place {
        Place::New { number, .. } => UblkDevice::start(disk.clone(), *number),
        Place::Lost { number, .. } => UblkDevice::recover(disk.clone(), *number),
    };
    let device = device.map_err(cannot_start)?;
    let path = ublk::path(device.id());
    if let Place::Lost { id, pid, .. } = &place {
        tracing::info!(device = %path.display(), "taken over from process {pid}");
        // It is listed anew.
        let _ = StateDir::open().and_then(|dir| dir.forget(id));
    }
    let export = Export::Ublk {
        number: device.id(),
        device: path.clone(),
        port: place.port(),
        properties: udev::properties(url, disk),
    };
    let registration = ready.tell(url, disk, export)?;
    udev::announce(device.id());
    // Only a signal ends it.
    let _ = events.recv();
    let patience = Instant::now() + GRACE;
    while ublk::is_in_use(&path) && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(50));
    }
    let failed = |e| CliError::io(format!("cannot take {} away", path.display()), e);
    device.stop().map_err(failed)?;
    drop(registration);
    task::block_on(disk.flush()).map_err(|e| CliError::block("cannot flush the disk", e))
}

fn cannot_start(error: io::Error) -> CliError {
    let help = match error.kind() {
        io::ErrorKind::NotFound => "modprobe ublk_drv; it takes Linux 6.4 or later",
        io::ErrorKind::PermissionDenied => "it takes root",
        io::ErrorKind::AlreadyExists => "the number is taken; without one, a free one is",
        _ => "does `dmesg` say why?",
    };
    CliError::io("cannot make a block device", error).help(help)
}
