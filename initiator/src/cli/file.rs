//! A disk as a file: the FUSE mount of an attachment, and of a file system on a disk.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::disk::Disk;
use super::exit::CliError;
use super::serve::Event;
use crate::block::{ByteDevice, task};
use crate::fuse::{FuseMount, FuseOptions};

/// Grace period for processes that have a detached file open.
const GRACE: Duration = Duration::from_secs(5);

/// Mounts a disk; an error comes with what may help.
pub(super) fn mount(
    device: &Arc<ByteDevice<Disk>>,
    options: FuseOptions,
    sender: mpsc::Sender<Event>,
) -> Result<FuseMount, CliError> {
    let path = options.path.clone();
    let ended = move || {
        // At shutdown the receiver may be gone.
        let _ = sender.send(Event::Ended);
    };
    FuseMount::new(device.clone(), options, ended).map_err(|e| {
        CliError::io(format!("cannot mount FUSE on {}", path.display()), e).help(
            "the path must exist and be yours, /dev/fuse must be there, and fusermount3 unless you are root",
        )
    })
}

/// Waits until the file is no longer open, but not for ever, and flushes.
pub(super) fn finish(mount: FuseMount, device: &ByteDevice<Disk>) -> Result<(), CliError> {
    let patience = Instant::now() + GRACE;
    while !mount.is_ended() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    if mount.is_ended() {
        let what = format!("the FUSE mount on {} ended badly", mount.path().display());
        return mount.wait().map_err(|e| CliError::io(what, e));
    }
    tracing::warn!("the file is still open in another process, which gets errors from now on");
    task::block_on(device.flush()).map_err(|e| CliError::block("cannot flush the disk", e))
}
