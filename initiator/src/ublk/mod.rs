//! Linux's user-space block devices: a disk as `/dev/ublkbN`.
//!
//! The driver `ublk_drv` (Linux 6.4 or later) speaks to a server by commands in `io_uring`:
//!
//! ```text
//! /dev/ublk-control  add, set parameters, start, stop, delete, recover     control
//! /dev/ublkcN        fetch a request … commit its result and fetch again   queue
//! ```
//!
//! One thread has all requests of a device. It hands each to the disk as a task; whoever completes it
//! copies its bytes between the request and the disk's buffer, by `pread` and `pwrite` on `/dev/ublkcN`,
//! and gives the result back to the thread, which alone may commit it.
//!
//! # When the server dies
//! The device stays, and what is sent to it waits. [`UblkDevice::recover`] takes it over: requests that
//! the dead server had are given to the new one again. They may have been executed, or, worse, may be
//! under way to the target still, and must not land after newer ones: so whoever takes over logs in with
//! the initiator port of the dead server, which makes the target end the old session first.
//!
//! # Modules
//! - `sys`: what the kernel and we exchange. `control`: the commands of a device's life.
//! - `queue`: the thread.

mod control;
mod queue;
mod sys;

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use self::control::Control;
use self::queue::Queue;
use self::sys::State;
use crate::block::BlockDevice;

/// How long the device files may take to appear.
const APPEARS: Duration = Duration::from_secs(5);

/// Requests of a device at once.
const DEPTH: u16 = 128;

/// A disk of this process as a block device of the host.
#[derive(Debug)]
pub struct UblkDevice {
    control: Control,
    id: u32,
    queue: Queue,
}

impl UblkDevice {
    /// Makes `/dev/ublkbN` of a disk, with a number of its own or one that is free. It can be used when
    /// this returns.
    ///
    /// # Errors
    /// `NotFound`: the driver is not loaded. `AlreadyExists`: the number is taken. `PermissionDenied`.
    /// Whatever the driver says to what the disk is like.
    pub fn start<D: BlockDevice>(disk: Arc<D>, number: Option<u32>) -> io::Result<Self> {
        let mut control = Control::open()?;
        let largest = disk.geometry().max_transfer;
        let info = control.add(number, DEPTH, largest)?;
        let id = info.dev_id.get();
        let params = sys::Params::of(disk.geometry(), info.max_io_buf_bytes.get());
        let queue = control
            .set_params(id, &params)
            .and_then(|()| Queue::start(&channel(id)?, disk, info.queue_depth.get()));
        let queue = match queue {
            Ok(queue) => queue,
            Err(error) => {
                let _ = control.delete(id);
                return Err(error);
            }
        };
        match control.start(id) {
            Ok(()) => Ok(Self { control, id, queue }),
            Err(error) => {
                // The first error is the one to tell.
                let _ = Self { control, id, queue }.stop();
                Err(error)
            }
        }
    }

    /// Takes over the device of a server that has died. Requests that wait go on when this returns.
    ///
    /// # Errors
    /// As [`is_lost`] says it is none; whatever the driver says.
    pub fn recover<D: BlockDevice>(disk: Arc<D>, id: u32) -> io::Result<Self> {
        let mut control = Control::open()?;
        control.start_recovery(id)?;
        let depth = control.info(id)?.queue_depth.get();
        let queue = Queue::start(&channel(id)?, disk, depth)?;
        control.end_recovery(id)?;
        Ok(Self { control, id, queue })
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Takes the device away. Requests under way are answered first; whoever has it open gets errors
    /// from then on.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn stop(mut self) -> io::Result<()> {
        self.control.stop(self.id)?;
        self.queue.join()?;
        self.control.delete(self.id)
    }
}

/// The block device with a number.
#[must_use]
pub fn path(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

/// Whether the device's server has died, and the device waits for another one.
#[must_use]
pub fn is_lost(id: u32) -> bool {
    Control::open()
        .and_then(|mut control| control.info(id))
        .is_ok_and(|info| info.state() == Some(State::Quiesced))
}

/// Takes away the device of a server that has died. What waits in it fails.
///
/// # Errors
/// Whatever the driver says.
pub fn remove(id: u32) -> io::Result<()> {
    let mut control = Control::open()?;
    control.stop(id)?;
    control.delete(id)
}

/// Whether somebody has the device for himself: a mounted file system, a device mapper.
#[must_use]
pub fn is_in_use(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .is_err_and(|error| error == rustix::io::Errno::BUSY)
}

/// Opens the device's own file, which may take a moment to be there.
fn channel(id: u32) -> io::Result<File> {
    let until = Instant::now() + APPEARS;
    loop {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/dev/ublkc{id}"));
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {
                thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}
