//! Access to the protection information of a store by the control plane: checks of all blocks, and
//! changes of the type.

use std::io;
use std::sync::PoisonError;

use riser_scsi::config::{Protection, ProtectionType};
use riser_scsi::protection::Tuple;

use super::protected::{self, Header, HeaderError, PAGE, inverted};
use super::store::Store;
use super::sys;

impl Store {
    /// Returns the protection information of each block, or `None` if it is not stored.
    #[must_use]
    pub fn protection(&self) -> Option<Protection> {
        // The value is replaced as a whole, so ignore poisoning.
        *self
            .protection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the type of protection information, durably if it is a file. The tuples of blocks do
    /// not change, so the blocks should be deallocated. Blocks if the file system does not respond.
    ///
    /// # Errors
    /// Returns I/O errors. `Unsupported` if the store has no protection information.
    pub fn set_protection_type(&self, protection_type: ProtectionType) -> io::Result<()> {
        let Some(protection) = self.protection() else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if let Some(file) = self.open_file() {
            let mut page = [0; PAGE];
            let len = sys::read_at(&file.handle, &mut page, 0)?;
            let invalid = |error: HeaderError| io::Error::new(io::ErrorKind::InvalidData, error);
            let header = Header::parse(&page[..len], self.geometry.block_size).map_err(invalid)?;
            let header = Header {
                protection_type,
                ..header
            };
            protected::write_header(&file.handle, &header)?;
        }
        let mut current = self
            .protection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Some(Protection {
            protection_type,
            ..protection
        });
        Ok(())
    }

    /// Reads a block of a file, and returns its tuple. If an initiator changes the block at the same
    /// time, the two may not match, so read it again before reporting this. Blocks if the file
    /// system does not respond.
    ///
    /// # Errors
    /// Returns I/O errors. `UnexpectedEof` if the file is shorter, and `Unsupported` if the store is
    /// not a file with protection information.
    ///
    /// # Panics
    /// Panics if the length of `block` is not the block size.
    pub fn read_block(&self, lba: u64, block: &mut [u8]) -> io::Result<Tuple> {
        let (Some(layout), Some(file)) = (self.layout, self.open_file()) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let size = self.geometry.block_size as usize;
        let mut frame = vec![0; layout.frame() as usize];
        let at = layout.medium_offset(lba * size as u64);
        if sys::read_at(&file.handle, &mut frame, at)? < frame.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        block.copy_from_slice(&frame[..size]);
        let tuple = frame[size..].try_into().expect("the rest is a tuple");
        Ok(Tuple::parse(inverted(tuple)))
    }
}
