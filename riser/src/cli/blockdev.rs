//! `riser attach --ublk`: attaches a logical unit as a block device.
//!
//! If the process is killed, the device remains and its requests are queued. Attaching the same
//! address with the same number takes over the device using the same initiator port. This requires
//! that it's still the same disk. See [`ublk`].

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use riser_block::{BlockDevice, Geometry, task};
use riser_exports::ublk::{self, UblkDevice};

use super::address::Address;
use super::args::{ConnectOptions, UblkNumber};
use super::disk::Disk;
use super::exit::{CliError, Exit};
use super::port;
use super::serve::{Event, Ready};
use super::state::{Attachment, Export, StateDir};
use super::udev;

/// Interval for checking whether a device is still in use before it's removed.
const LOOK: Duration = Duration::from_millis(50);

/// Selects the device for a logical unit.
pub(super) enum DeviceChoice {
    /// Add a new device.
    New {
        /// Number of the device, or `None` to use any unused number.
        number: Option<u32>,
        port: u64,
    },
    /// Take over a device after its process was killed.
    Lost {
        number: u32,
        port: u64,
        /// Attachment recorded by the previous process.
        before: Box<Attachment>,
    },
}

impl DeviceChoice {
    /// Checks whether the device with this number is waiting for a process.
    pub(super) fn find(number: UblkNumber, url: &Address) -> Result<Self, CliError> {
        let new = Self::New {
            number: number.0,
            port: port::random(),
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
            Err(CliError::new(Exit::Busy, what).help("use `riser detach` to remove it"))
        };
        // The device has queued requests for its previous disk. These must never be sent to a
        // different disk, so the address must be the same.
        match (ours, url) {
            (
                Some(
                    before @ Attachment {
                        export: Export::Ublk { port, .. },
                        ..
                    },
                ),
                Address::Target(_),
            ) if before.url == url.to_string() => Ok(Self::Lost {
                number,
                port,
                before: Box::new(before),
            }),
            (Some(attachment), Address::Target(_) | Address::Nbd(_) | Address::File { .. }) => {
                refused(format!("{shown} is waiting for {}", attachment.url))
            }
            (Some(_), Address::Memory { .. }) => refused(format!(
                "the contents of {shown} were lost with its process"
            )),
            (None, _) => refused(format!("{shown} is waiting for an unknown process")),
        }
    }

    /// Configures the session to use the initiator port of the device, which is the same as for the
    /// killed process.
    pub(super) fn set_on(&self, link: &mut ConnectOptions) {
        link.port = Some(self.port());
        if let Self::Lost { before, .. } = self {
            link.recovers = true;
            link.noted = before.cache;
            link.was_redirected = before.was_redirected;
            if let Export::Ublk { guid, .. } = before.export {
                link.guid = guid;
            }
        }
    }

    /// Returns the number used to generate the initiator port.
    fn port(&self) -> u64 {
        match self {
            Self::New { port, .. } | Self::Lost { port, .. } => *port,
        }
    }
}

/// Serves a disk until a signal is received or an error occurs.
pub(super) fn serve(
    choice: DeviceChoice,
    url: &Address,
    disk: &Arc<Disk>,
    events: &mpsc::Receiver<Event>,
    sender: &mpsc::Sender<Event>,
    ready: &mut Ready<'_>,
) -> Result<(), CliError> {
    let properties = udev::properties(url, disk);
    let before = match &choice {
        DeviceChoice::New { .. } => None,
        DeviceChoice::Lost { before, .. } => {
            check_same(before, disk.geometry(), &properties)?;
            Some(&**before)
        }
    };
    let sender = sender.clone();
    let ended = move || {
        // The receiver may already be closed during shutdown.
        let _ = sender.send(Event::Ended);
    };
    let device = match &choice {
        DeviceChoice::New { number, .. } => UblkDevice::add(disk.clone(), *number, ended),
        DeviceChoice::Lost { number, .. } => UblkDevice::recover(disk.clone(), *number, ended),
    };
    let mut device = device.map_err(cannot_start)?;
    let path = ublk::path(device.id());
    let export = Export::Ublk {
        number: device.id(),
        device: path.clone(),
        port: choice.port(),
        guid: disk.port_guid(),
        properties,
    };
    // Add the attachment to the list before the device can be used. Otherwise it could never be
    // removed.
    let of = before.map(|before| before.id.as_str());
    ready.claim(url, disk, export.clone(), of)?;
    device.start().map_err(cannot_start)?;
    if let Some(Attachment { pid, .. }) = before {
        tracing::info!(device = %path.display(), "taken over from process {pid}");
    }
    ready.announce(export)?;
    udev::announce(device.id());
    let event = events.recv();
    ready.mark_detached();
    if event == Ok(Event::Signal) {
        wait_for_users(&path, events);
    }
    let failed = |e| match event {
        Ok(Event::Ended) => CliError::io(format!("cannot serve {}", path.display()), e),
        _ => CliError::io(format!("cannot remove {}", path.display()), e),
    };
    let stopped = device.stop().map_err(failed);
    // Always flush data written by users.
    let flushed = task::block_on(disk.flush());
    stopped.and(flushed.map_err(|e| CliError::block("cannot flush the disk", e)))
}

/// Waits until the device is not in use, or until another signal. Otherwise we could lose data that
/// a mounted file system has not written back.
fn wait_for_users(path: &Path, events: &mpsc::Receiver<Event>) {
    if ublk::is_in_use(path) {
        let shown = path.display();
        tracing::warn!("{shown} is in use; removing it when it is idle, or on a second signal");
    }
    while ublk::is_in_use(path) && events.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {}
}

/// Checks that a disk is the same as the previous disk of a device, because the kernel will send
/// requests that were intended for the previous disk.
fn check_same(
    before: &Attachment,
    now: &Geometry,
    properties: &BTreeMap<String, String>,
) -> Result<(), CliError> {
    let Export::Ublk {
        device,
        properties: old,
        ..
    } = &before.export
    else {
        return Ok(());
    };
    let differs = |what: &str, was: &dyn Display, is: &dyn Display| {
        let text = format!(
            "{} is waiting for another disk: its {what} was {was}, and that of {} is {is}",
            device.display(),
            before.url
        );
        Err(CliError::new(Exit::Refused, text).help("use `riser detach` to remove the device"))
    };
    for name in ["ID_SERIAL", "ID_WWN", "ID_SCSI_SERIAL"] {
        let (was, is) = (old.get(name), properties.get(name));
        if was != is {
            let shown = |value: Option<&String>| value.map_or("none", String::as_str).to_owned();
            return differs(name, &shown(was), &shown(is));
        }
    }
    if before.block_size != now.block_size {
        return differs("block size", &before.block_size, &now.block_size);
    }
    // The size of the device doesn't change. If the disk has grown, the additional space is not
    // used.
    if before.capacity > now.capacity {
        return differs("size in bytes", &before.capacity, &now.capacity);
    }
    if !before.read_only && now.read_only {
        return differs("access", &"read-write", &"read-only");
    }
    Ok(())
}

fn cannot_start(error: io::Error) -> CliError {
    let help = match error.kind() {
        io::ErrorKind::NotFound => "run `modprobe ublk_drv`; this requires Linux 6.4 or later",
        io::ErrorKind::PermissionDenied => "this requires root",
        io::ErrorKind::AlreadyExists => "the number is in use; omit it to use any unused number",
        _ => "check `dmesg` for the reason",
    };
    CliError::io("cannot create a block device", error).help(help)
}

#[cfg(test)]
mod tests {
    use riser_block::MemoryDevice;

    use super::super::state::Phase;
    use super::*;

    #[test]
    fn recovered_device_requires_same_disk() {
        let properties = |serial: &str| {
            let pair = ("ID_SERIAL".to_owned(), serial.to_owned());
            BTreeMap::from([pair, ("ID_PATH".to_owned(), serial.to_owned())])
        };
        let before = Attachment {
            id: "0".into(),
            url: "iscsi://host/iqn.2026-01.com.example:disk/0".into(),
            pid: 1,
            started: 1,
            since: 0,
            phase: Phase::Serving,
            failure: None,
            export: Export::Ublk {
                number: 3,
                device: "/dev/ublkb3".into(),
                port: 1,
                guid: None,
                properties: properties("one"),
            },
            capacity: 64 << 20,
            block_size: 512,
            read_only: false,
            device: None,
            protection: None,
            log: None,
            unit: None,
            link: None,
            paths: Vec::new(),
            cache: None,
            was_redirected: false,
        };
        let geometry = |capacity, block_size| {
            let disk = MemoryDevice::new(capacity, block_size).unwrap();
            disk.geometry().clone()
        };
        let check = |now: &Geometry, serial| check_same(&before, now, &properties(serial));
        let same = geometry(64 << 20, 512);
        assert!(check(&same, "one").is_ok());
        assert!(check(&geometry(128 << 20, 512), "one").is_ok());
        let mut read_only = same.clone();
        read_only.read_only = true;
        for (now, serial, what) in [
            (
                &same,
                "another",
                "its ID_SERIAL was one, and that of iscsi://",
            ),
            (
                &geometry(32 << 20, 512),
                "one",
                "its size in bytes was 67108864",
            ),
            (&geometry(64 << 20, 4096), "one", "its block size was 512"),
            (&read_only, "one", "its access was read-write"),
        ] {
            let refused = check(now, serial).unwrap_err();
            assert!(refused.what.contains(what), "{}", refused.what);
        }
    }
}
