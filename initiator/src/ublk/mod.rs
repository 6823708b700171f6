//! Linux's user-space block devices: a disk as `/dev/ublkbN`.
//!
//! The driver `ublk_drv` (Linux 6.4 or later) speaks to a server by commands in `io_uring`:
//!
//! ```text
//! /dev/ublk-control  add, set parameters, start, stop, delete, recover     control
//! /dev/ublkcN        fetch a request … commit its result and fetch again   queue
//! ```
//!
//! One thread has all requests of a device: that of the disk, where it has one, so that no other
//! thread is woken between a request and the wire. It hands each to the disk as a task, whose bytes
//! are copied between the request and the disk's buffer by `pread` and `pwrite` on `/dev/ublkcN`,
//! and which gives its result back to the thread, which alone may commit it.
//!
//! # When the server dies
//! The device stays, and what is sent to it waits. [`UblkDevice::recover`] takes it over: requests
//! that the dead server had are given to the new one again. They may have been executed, or,
//! worse, may be under way to the target still, and must not land after newer ones: so the new
//! server logs in with the initiator port of the dead server, which makes the target end the old
//! session first.
//!
//! # Modules
//! - `sys`: what the kernel and we exchange. `control`: the commands of a device's life.
//! - `queue`: the service that has the requests. `commands`: its ring. `data`: what is in the
//!   device's file.

mod commands;
mod control;
mod data;
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

/// Longest time until the device files appear.
const APPEARS: Duration = Duration::from_secs(5);

/// Requests of a device at once.
const DEPTH: u16 = 128;

/// A disk of this process as a block device of the host.
///
/// A new device that is dropped goes away. One that was taken over stays, and waits for another
/// server.
#[derive(Debug)]
pub struct UblkDevice {
    control: Control,
    id: u32,
    /// Until it is stopped.
    queue: Option<Queue>,
    is_new: bool,
}

impl UblkDevice {
    /// Adds a device for a disk, with the number given or one that is free. `/dev/ublkbN` appears
    /// with [`Self::start`]. `on_end` is called once, when the device is served no longer, because
    /// it was stopped or because of an error that [`Self::stop`] returns: on the thread that serves
    /// it, which it must not hold up.
    ///
    /// # Errors
    /// `Unsupported`: the disk has blocks larger than a page. `NotFound`: the driver is not loaded.
    /// `AlreadyExists`: the number is taken. `PermissionDenied`. Any error of the driver for such a
    /// disk.
    pub fn add<D: BlockDevice>(
        disk: Arc<D>,
        number: Option<u32>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        sys::check(disk.geometry())?;
        let mut control = Control::open()?;
        let largest = disk.geometry().split_len();
        let info = control.add(number, DEPTH, largest)?;
        let id = info.dev_id.get();
        let params = sys::Params::of(disk.geometry(), info.max_io_buf_bytes.get());
        let queue = control
            .set_params(id, &params)
            .and_then(|()| Queue::start(&channel(id)?, disk, info.queue_depth.get(), on_end));
        match queue {
            Ok(queue) => Ok(Self {
                control,
                id,
                queue: Some(queue),
                is_new: true,
            }),
            Err(error) => {
                let _ = control.delete(id);
                Err(error)
            }
        }
    }

    /// Takes over the device of a server that has died, whose disk must be the same. Requests that
    /// wait go on with [`Self::start`]. `on_end` is that of [`Self::add`].
    ///
    /// # Errors
    /// The device is not lost (see [`is_lost`]); any error of the driver.
    pub fn recover<D: BlockDevice>(
        disk: Arc<D>,
        id: u32,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let mut control = Control::open()?;
        control.start_recovery(id)?;
        let depth = control.info(id)?.queue_depth.get();
        let queue = Some(Queue::start(&channel(id)?, disk, depth, on_end)?);
        Ok(Self {
            control,
            id,
            queue,
            is_new: false,
        })
    }

    /// Lets the device be used: it can be when this returns.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn start(&mut self) -> io::Result<()> {
        if self.is_new {
            self.control.start(self.id)
        } else {
            self.control.end_recovery(self.id)
        }
    }

    /// Number of the device.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Takes the device away. Requests under way are answered first; programs that have it open
    /// get errors from then on.
    ///
    /// # Errors
    /// Any error of the driver; that which has ended the service of the device, which is removed
    /// all the same.
    pub fn stop(mut self) -> io::Result<()> {
        self.take_away()
    }

    fn take_away(&mut self) -> io::Result<()> {
        let Some(queue) = self.queue.take() else {
            return Ok(());
        };
        self.control.stop(self.id)?;
        // The driver has ended what a service left that failed. The device would be in no list, so
        // it goes in any case.
        let ended = queue.join();
        self.control.delete(self.id)?;
        ended
    }
}

impl Drop for UblkDevice {
    fn drop(&mut self) {
        if self.is_new
            && let Err(error) = self.take_away()
        {
            tracing::warn!(%error, "cannot remove the block device {}", self.id);
        }
    }
}

/// The block device with a number.
#[must_use]
pub fn path(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

/// Returns whether there is a device with that number, in use or not.
#[must_use]
pub fn is_added(id: u32) -> bool {
    channel_path(id).exists()
}

fn channel_path(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// Returns whether the device's server has died, and the device waits for another one.
#[must_use]
pub fn is_lost(id: u32) -> bool {
    Control::open()
        .and_then(|mut control| control.info(id))
        .is_ok_and(|info| info.state() == Some(State::Quiesced))
}

/// Takes away the device of a server that has died. What waits in it fails.
///
/// # Errors
/// Any error of the driver.
pub fn remove(id: u32) -> io::Result<()> {
    let mut control = Control::open()?;
    control.stop(id)?;
    control.delete(id)
}

/// Returns whether the device is claimed exclusively: by a mounted file system, a device mapper.
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
            .open(channel_path(id));
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {
                thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}
