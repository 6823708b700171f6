//! Control commands for creating, starting and removing devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use zerocopy::IntoBytes;

use super::sys::{ControlCmd, ControlOp, DevInfo, Params, feature};

/// Let the driver choose the device number.
const ANY: u32 = u32::MAX;

/// No queue: the command is for the whole device.
const NO_QUEUE: u16 = u16::MAX;

/// Features used for all devices.
const FEATURES: u64 = feature::USER_RECOVERY
    | feature::USER_RECOVERY_REISSUE
    | feature::CMD_IOCTL_ENCODE
    | feature::USER_COPY;

/// Driver control device.
pub(super) struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: File,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

impl Control {
    pub(super) fn open() -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/ublk-control")?;
        let ring = IoUring::builder().build(4)?;
        Ok(Self { ring, file })
    }

    /// Adds a device. It isn't visible to users yet.
    pub(super) fn add(
        &mut self,
        number: Option<u32>,
        depth: u16,
        largest: u32,
    ) -> io::Result<DevInfo> {
        let id = number.unwrap_or(ANY);
        let mut info = DevInfo {
            nr_hw_queues: 1.into(),
            queue_depth: depth.into(),
            max_io_buf_bytes: largest.into(),
            dev_id: id.into(),
            flags: FEATURES.into(),
            ..DevInfo::default()
        };
        self.call(ControlOp::Add, id, 0, Some(info.as_mut_bytes()))?;
        let lacks = FEATURES & !info.flags.get();
        if lacks != 0 {
            let _ = self.delete(info.dev_id.get());
            let text = format!("the kernel's ublk driver lacks features {lacks:#x}");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(info)
    }

    pub(super) fn set_params(&mut self, id: u32, params: &Params) -> io::Result<()> {
        let mut params = *params;
        self.call(ControlOp::SetParams, id, 0, Some(params.as_mut_bytes()))
    }

    /// Makes the device visible to users; returns when its queue has fetched all tags.
    pub(super) fn start(&mut self, id: u32) -> io::Result<()> {
        self.call(ControlOp::Start, id, u64::from(std::process::id()), None)
    }

    pub(super) fn stop(&mut self, id: u32) -> io::Result<()> {
        self.call(ControlOp::Stop, id, 0, None)
    }

    pub(super) fn delete(&mut self, id: u32) -> io::Result<()> {
        self.call(ControlOp::Delete, id, 0, None)
    }

    pub(super) fn info(&mut self, id: u32) -> io::Result<DevInfo> {
        let mut info = DevInfo::default();
        self.call(ControlOp::GetInfo, id, 0, Some(info.as_mut_bytes()))?;
        Ok(info)
    }

    /// Starts recovery; returns when the device has been released by the dead server.
    pub(super) fn start_recovery(&mut self, id: u32) -> io::Result<()> {
        self.call(ControlOp::StartRecovery, id, 0, None)
    }

    /// Completes recovery; returns when the queue of the new server has fetched all tags.
    pub(super) fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        let pid = u64::from(std::process::id());
        self.call(ControlOp::EndRecovery, id, pid, None)
    }

    /// Executes a command and waits for its completion. The driver will read or write the buffer.
    #[allow(unsafe_code, reason = "shows the kernel memory by its address")]
    fn call(
        &mut self,
        op: ControlOp,
        id: u32,
        data: u64,
        buffer: Option<&mut [u8]>,
    ) -> io::Result<()> {
        let (addr, len) = buffer.map_or((0, 0), |b| (b.as_mut_ptr() as u64, b.len()));
        let command = ControlCmd {
            dev_id: id.into(),
            queue_id: NO_QUEUE.into(),
            len: (len as u16).into(),
            addr: addr.into(),
            data: data.into(),
            ..ControlCmd::default()
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCmd>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), op as u32)
            .cmd(bytes)
            .build();
        // SAFETY: the command argument is copied into the entry; the buffer is borrowed until this
        // function returns, which is after the command has completed.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                // The command is still running, so we must keep the buffer.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, ?op, "cannot execute a command using io_uring");
                    std::process::abort();
                }
            }
            if let Some(end) = self.ring.completion().next() {
                return match end.result() {
                    error @ ..0 => Err(io::Error::from_raw_os_error(-error)),
                    _ => Ok(()),
                };
            }
        }
    }
}
