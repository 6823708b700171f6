//! FUSE mounts of disks, for attachments and for file systems on disks.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use riser_block::{ByteDevice, task};
use riser_exports::fuse::{FuseMount, FuseOptions};

use super::disk::Disk;
use super::exit::CliError;
use super::serve::Event;

/// Grace period for processes that have opened a detached file.
const GRACE: Duration = Duration::from_secs(5);

/// Mounts a disk. Errors include advice.
pub(super) fn mount(
    device: &Arc<ByteDevice<Disk>>,
    options: FuseOptions,
    sender: mpsc::Sender<Event>,
) -> Result<FuseMount, CliError> {
    let path = options.path.clone();
    let ended = move || {
        // The receiver may already be closed during shutdown.
        let _ = sender.send(Event::Ended);
    };
    FuseMount::new(device.clone(), options, ended).map_err(|e| {
        CliError::io(format!("cannot mount FUSE on {}", path.display()), e).help(
            "this requires an existing path owned by you, /dev/fuse, and fusermount3 unless you \
             are root",
        )
    })
}

/// Waits for a limited time until the file is not open, and flushes the disk.
pub(super) fn finish(mount: FuseMount, device: &ByteDevice<Disk>) -> Result<(), CliError> {
    let patience = Instant::now() + GRACE;
    while !mount.is_ended() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    if mount.is_ended() {
        let what = format!("the FUSE mount on {} failed", mount.path().display());
        return mount.wait().map_err(|e| CliError::io(what, e));
    }
    tracing::warn!("the file is still open in another process, whose I/O will fail");
    task::block_on(device.flush()).map_err(|e| CliError::block("cannot flush the disk", e))
}
