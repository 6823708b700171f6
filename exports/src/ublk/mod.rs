//! Linux user-space block devices: exports a disk as `/dev/ublkbN`.
//!
//! The driver `ublk_drv` (Linux 6.4 or later) uses `io_uring` commands to communicate with a
//! server:
//!
//! ```text
//! /dev/ublk-control  add, set parameters, start, stop, delete, recover     control
//! /dev/ublkcN        fetch a request … commit its result and fetch again   queue
//! ```
//!
//! All requests for a device are handled by a single thread. We use the disk thread if there is
//! one, so that there is no thread switch between a request and the network. For each request we
//! spawn a task on the disk. The data is copied between the request and a disk buffer using `pread`
//! and `pwrite` on `/dev/ublkcN`, and the task returns the result to the thread, because no other
//! thread is allowed to commit it.
//!
//! # Server restart
//! If the server dies, the device remains and new requests are queued. [`UblkDevice::recover`]
//! takes over the device: requests that were sent to the dead server are sent again to the new
//! server. They may already have been executed or, even worse, may still be in flight to the
//! target, and must not be executed after newer requests. To ensure this, the new server logs in
//! using the same initiator port as the dead server, so the target has to close the old session
//! first.
//!
//! # Modules
//! - `sys`: kernel interface. `control`: commands to create and remove devices.
//! - `queue`: service that handles the requests. `commands`: ring used by it. `data`: device file
//!   contents.

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

use riser_block::BlockDevice;
use rustix::fs::OFlags;

use self::control::Control;
use self::queue::Queue;
use self::sys::State;

/// Max time to wait for the device files.
const APPEARS: Duration = Duration::from_secs(5);

/// Max number of requests per device.
const DEPTH: u16 = 128;

/// Block device on this host, backed by a disk in this process.
///
/// On drop, a new device will be removed. A recovered device is kept, and waits for a new server.
#[derive(Debug)]
pub struct UblkDevice {
    control: Control,
    id: u32,
    /// `None` after the queue has been stopped.
    queue: Option<Queue>,
    is_new: bool,
}

impl UblkDevice {
    /// Adds a device for a disk, using the given number or any free number. `/dev/ublkbN` will be
    /// visible after [`Self::start`]. `on_end` is called once when the device is closed, because it
    /// was stopped or because of an error, which is then returned by [`Self::stop`]. It is called
    /// on the thread that serves the device, and must not block.
    ///
    /// # Errors
    /// `Unsupported` if the disk block size exceeds the page size, `NotFound` if the driver is not
    /// loaded, `AlreadyExists` if the number is in use, `PermissionDenied`, or any other error from
    /// the driver.
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

    /// Takes over a device after its server died. The disk must be the same. Pending requests will
    /// resume on [`Self::start`]. See [`Self::add`] for `on_end`.
    ///
    /// # Errors
    /// Returns an error if the device is not lost (see [`is_lost`]), or any error from the driver.
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

    /// Starts the device. It can be used when this returns.
    ///
    /// # Errors
    /// Returns any error from the driver.
    pub fn start(&mut self) -> io::Result<()> {
        if self.is_new {
            self.control.start(self.id)
        } else {
            self.control.end_recovery(self.id)
        }
    }

    /// Device number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Removes the device. Requests in flight are completed first; if a program still has the
    /// device open, it will get errors.
    ///
    /// # Errors
    /// Returns any error from the driver, or the error that stopped the service. In this case, the
    /// device is still removed.
    pub fn stop(mut self) -> io::Result<()> {
        self.remove_device()
    }

    fn remove_device(&mut self) -> io::Result<()> {
        let Some(queue) = self.queue.take() else {
            return Ok(());
        };
        self.control.stop(self.id)?;
        // After a service error, the driver fails all remaining requests. The device isn't in any
        // list at this point, so we always need to remove it.
        let ended = queue.join();
        self.control.delete(self.id)?;
        ended
    }
}

impl Drop for UblkDevice {
    fn drop(&mut self) {
        if self.is_new
            && let Err(error) = self.remove_device()
        {
            tracing::warn!(%error, "cannot remove the block device {}", self.id);
        }
    }
}

/// Block device path for this number.
#[must_use]
pub fn path(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

/// Returns whether a device with this number exists, used or not.
#[must_use]
pub fn is_added(id: u32) -> bool {
    channel_path(id).exists()
}

fn channel_path(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// Returns whether the server for this device has died, and it is waiting for a new server.
#[must_use]
pub fn is_lost(id: u32) -> bool {
    Control::open()
        .and_then(|mut control| control.info(id))
        .is_ok_and(|info| info.state() == Some(State::Quiesced))
}

/// Removes a device after its server died. Pending requests will fail.
///
/// # Errors
/// Returns any error from the driver.
pub fn remove(id: u32) -> io::Result<()> {
    let mut control = Control::open()?;
    control.stop(id)?;
    control.delete(id)
}

/// Returns whether the device has been opened exclusively, for example by a mount or device mapper.
#[must_use]
pub fn is_in_use(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .is_err_and(|error| error == rustix::io::Errno::BUSY)
}

/// Opens the device file. It may not be available immediately.
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
