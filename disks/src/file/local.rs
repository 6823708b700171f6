//! [`LocalFile`]: the file of a disk as used by its driver.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use riser_block::{BlockError, Command, CommandKind, Extent, ExtentKind};
use riser_file::{Failure, OpenFile, Storage};
use riser_reactor::Handle;

/// Max extents returned; if there are more, a smaller range is reported.
const MAX_EXTENTS: usize = 4096;

/// `BLKDISCARD` from `linux/fs.h`.
const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);

/// `FUSE_SUPER_MAGIC` in `linux/magic.h`.
const FUSE_SUPER_MAGIC: rustix::fs::FsWord = 0x6573_5546;

/// File or device of a disk.
#[derive(Debug)]
pub(super) struct LocalFile {
    pub(super) file: OpenFile,
    /// Logical block size in bytes.
    pub(super) block_size: u32,
    /// The file is on a FUSE file system, which may write asynchronously (sshfs does), and return
    /// the error to the next flush or close of the same descriptor.
    is_on_fuse: bool,
    /// Error number of the first failed flush. All flushes fail after this.
    flush_failure: Option<i32>,
}

impl LocalFile {
    pub(super) fn new(file: OpenFile, block_size: u32) -> Self {
        let system = file.handle.fd().map(rustix::fs::fstatfs);
        let is_fuse = |system: rustix::fs::StatFs| system.f_type == FUSE_SUPER_MAGIC;
        Self {
            is_on_fuse: file.device.is_none()
                && system.is_some_and(|found| found.is_ok_and(is_fuse)),
            file,
            block_size,
            flush_failure: None,
        }
    }
}

impl Storage for LocalFile {
    type Result = Result<Vec<Extent>, Self::Error>;
    /// Failure, and the first incomplete byte.
    type Error = (Failure, u64);
    type Extents = Vec<Extent>;

    fn result(&self, result: Result<Option<Vec<Extent>>, Self::Error>) -> Self::Result {
        result.map(Option::unwrap_or_default)
    }

    fn error(failure: Failure, offset: u64) -> Self::Error {
        (failure, offset)
    }

    fn file(&self) -> Option<&OpenFile> {
        Some(&self.file)
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn has_write_cache(&self) -> bool {
        true
    }

    fn keeps_write_errors(&self) -> bool {
        self.is_on_fuse
    }

    fn call(file: &Handle, op: &Command, block_size: u32) -> Result<Vec<Extent>, Self::Error> {
        let called = match (op.kind, file.fd()) {
            (CommandKind::Discard { .. }, Some(device)) => discard(device, op).map(|()| Vec::new()),
            _ => extents(file, op, block_size),
        };
        called.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            (Failure::Errno(errno), op.offset)
        })
    }

    fn unknown_extents(op: &Command) -> Vec<Extent> {
        let (len, kind) = (op.len, ExtentKind::Data);
        vec![Extent { len, kind }]
    }

    fn flush_failure(&self) -> Option<i32> {
        self.flush_failure
    }

    fn on_flush_failed(&mut self, errno: i32, _: Instant) {
        self.flush_failure.get_or_insert(errno);
    }
}

/// Discards a range on a device.
#[allow(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
fn discard(device: BorrowedFd<'_>, op: &Command) -> io::Result<()> {
    // SAFETY: the request expects a pointer to start and length (two 64-bit values), which are only
    // read.
    let request =
        unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([op.offset, op.len]) };
    // SAFETY: as above; the descriptor is borrowed for the call.
    unsafe { rustix::ioctl::ioctl(device, request)? };
    Ok(())
}

/// Returns the allocation status of a range, from its start.
fn extents(file: &Handle, op: &Command, block_size: u32) -> io::Result<Vec<Extent>> {
    let (mut at, end) = (op.offset, op.offset + op.len);
    let mut extents: Vec<Extent> = Vec::new();
    while at < end && extents.len() < MAX_EXTENTS {
        let (is_data, len) = riser_file::extent(file, at, end - at, block_size)?;
        let kind = match is_data {
            true => ExtentKind::Data,
            false => ExtentKind::Hole,
        };
        match extents.last_mut() {
            Some(last) if last.kind == kind => last.len += len,
            _ => extents.push(Extent { len, kind }),
        }
        at += len;
    }
    Ok(extents)
}

/// Converts the failure of an operation.
pub(super) fn block_error((failure, offset): (Failure, u64)) -> BlockError {
    let errno = match failure {
        Failure::Errno(errno) => errno,
        Failure::Truncated => {
            return BlockError::Io(format!("the file was truncated to {offset} bytes"));
        }
        Failure::Cancelled | Failure::Ring => libc::ECANCELED,
    };
    let text = || io::Error::from_raw_os_error(errno).to_string();
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => BlockError::NoSpace,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => BlockError::Unsupported,
        libc::EROFS | libc::EPERM | libc::EBADF => BlockError::ReadOnly,
        // Used by the block layer to report bad sectors and checksum errors.
        libc::ENODATA | libc::EILSEQ => BlockError::Medium(text()),
        libc::ETIMEDOUT => BlockError::TimedOut,
        _ => BlockError::Io(text()),
    }
}
