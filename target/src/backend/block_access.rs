//! Access to the protection information of a store by the control plane: checks of all blocks, and
//! changes of the type.

use std::io;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use riser_scsi::config::{Protection, ProtectionFormat, ProtectionType};
use riser_scsi::step::BackendError;

use super::errno::from_errno;
use super::protected::{self, Header, inverted};
use super::store::Store;
use super::sys;

impl Store {
    /// Returns the current protection information of each block, or `None` if the store is formatted
    /// without protection.
    #[must_use]
    pub fn protection(&self) -> Option<Protection> {
        let protection = self.geometry.protection?;
        match self.protection_format() {
            ProtectionFormat::Fixed => Some(protection),
            ProtectionFormat::Changeable(current) => Some(Protection {
                protection_type: current?,
                ..protection
            }),
        }
    }

    pub(super) fn protection_format(&self) -> ProtectionFormat {
        *self.lock_protection_format()
    }

    fn lock_protection_format(&self) -> MutexGuard<'_, ProtectionFormat> {
        // The value is replaced as a whole, so ignore poisoning.
        self.protection_format
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the type of protection information of a file durably, or formats it without
    /// protection. The tuples of blocks do not change, so the blocks should be deallocated. Blocks
    /// if the file system does not respond.
    ///
    /// If this fails and the header cannot be restored, this is recorded as a failed flush.
    ///
    /// # Errors
    /// Returns I/O errors. `Unsupported` if the store is not a file with protection information.
    pub fn set_protection_type(&self, protection_type: Option<ProtectionType>) -> io::Result<()> {
        let _entry = self.list_thread();
        let (ProtectionFormat::Changeable(_), Some(file)) =
            (self.protection_format(), self.open_file())
        else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let previous = protected::read_header(&file.handle, self.geometry.block_size)?;
        let header = Header {
            protection_type,
            ..previous
        };
        let written = sys::write_at(&file.handle, &header.encode(), 0);
        // For example, the file system is full.
        if written.is_err()
            && let Ok(found) = protected::read_header(&file.handle, self.geometry.block_size)
            && found == previous
        {
            return written;
        }
        if let Err(error) = written.and_then(|()| sys::sync_data(&file.handle)) {
            // Blocks that are written with the current type may not match the new type, which
            // the next start would read from the file.
            if let Err(error) = protected::write_header(&file.handle, &previous) {
                tracing::error!(
                    backend = self.name(),
                    %error,
                    "cannot restore the protection type in the file: after a restart, blocks may fail \
                     their checks; clear the failed flush (riserd clear-flush-failure), and then format \
                     the unit again"
                );
                // Initiators must not consider their next writes as durable.
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.on_flush_failed(errno, Instant::now());
            }
            return Err(error);
        }
        *self.lock_protection_format() = ProtectionFormat::Changeable(protection_type);
        Ok(())
    }

    /// Same as [`Self::set_protection_type`], for FORMAT UNIT: an error is logged.
    pub(crate) fn format(
        &self,
        protection_type: Option<ProtectionType>,
    ) -> Result<(), BackendError> {
        self.set_protection_type(protection_type).map_err(|error| {
            tracing::error!(backend = self.name(), %error, "cannot change the protection type");
            let errno = error.raw_os_error();
            errno.map_or(BackendError::Internal, |errno| from_errno(errno, 0))
        })
    }

    /// Reads blocks of a file from its medium, each followed by its tuple, until `frames` is full.
    /// If an initiator changes a block at the same time, it may not match its tuple. Blocks if the
    /// file system does not respond.
    ///
    /// # Errors
    /// Returns I/O errors. `UnexpectedEof` if the file is shorter, and `Unsupported` if the store is
    /// not a file with protection information.
    pub(super) fn read_frames(&self, lba: u64, frames: &mut [u8]) -> io::Result<()> {
        let (Some(layout), Some(file)) = (self.layout, self.open_file()) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let at = layout.medium_offset(lba * u64::from(self.geometry.block_size));
        sys::drop_cached(&file.handle, at, frames.len() as u64);
        if sys::read_at(&file.handle, frames, at)? < frames.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for frame in frames.chunks_mut(layout.frame() as usize) {
            if let Some(tuple) = frame.last_chunk_mut() {
                *tuple = inverted(*tuple);
            }
        }
        Ok(())
    }
}
