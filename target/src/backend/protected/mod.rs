//! Files that store a tuple of protection information with each block.
//!
//! ```text
//!   | header, 64 KiB             |       | frame 0         | frame 1         | …
//!   | page 0 | intent bitmap ... | 0 ... | block 0 | tuple | block 1 | tuple | …
//!   0        4096                64 KiB
//! ```
//!
//! - `header`: [`Header`], the first page: version, block size and type of protection information.
//! - `layout`: [`Layout`], the frames: offsets, commands, results and buffers.
//! - `intent`: [`IntentLog`], the regions that may be torn by a crash.
//! - `recovery`: repairs torn frames.
//!
//! A tuple is inverted on the medium. A hole is therefore a block of zeroes with the tuple of a
//! deallocated block ([`Tuple::DEALLOCATED`](riser_scsi::protection::Tuple::DEALLOCATED)), so that
//! new files are sparse, and discarding or zeroing frames updates their tuples.
//!
//! A read or write transfers whole frames in a single operation: the list of its memory alternates
//! between blocks and tuples. Frames are not aligned to the blocks of any file system, so the page
//! cache is required. RAM disks and null devices have the same frames, without a header.

mod header;
mod intent;
mod layout;
mod recovery;

use std::io;
use std::path::Path;

use riser_config::Spec;
use riser_reactor::Handle;

use super::made::Made;
use super::sys;
pub(super) use header::{HEADER_LEN, PAGE};
pub use header::{Header, HeaderError};
pub(super) use intent::{Begin, BitmapPage, IntentLog, Intents};
pub use layout::Layout;
pub(super) use layout::inverted;
pub(super) use recovery::recover;

/// Reads and checks the header of an open and locked file, according to its configuration. A blank
/// file gets a header if `may_create` is set, which is recorded in `made`. Returns `None` if the
/// backend has no protection information.
///
/// # Errors
/// Returns I/O errors, or a [`HeaderError`] if the header does not match the configuration, so that
/// neither frames are served as blocks nor blocks as frames.
pub(super) fn open_header(
    spec: &Spec,
    path: &Path,
    file: &Handle,
    may_create: bool,
    made: &mut Option<Made>,
) -> io::Result<Result<Option<Header>, HeaderError>> {
    let mut page = [0; PAGE];
    let read = sys::read_at(file, &mut page, 0);
    let Some(protection) = spec.protection else {
        // A medium error is reported to initiators that read these blocks.
        return Ok(
            match read.is_ok_and(|len| len == PAGE && Header::is_present(&page)) {
                true => Err(HeaderError::Unexpected),
                false => Ok(None),
            },
        );
    };
    let len = read?;
    if !may_create || !is_blank(file)? {
        let header = Header::parse(&page[..len], spec.block_size);
        return Ok(header.map(Some));
    }
    let before = sys::file_size(file)?;
    let made = made.get_or_insert_with(|| Made {
        path: path.to_owned(),
        file: file.clone(),
        before: Some(before),
        has_new_header: false,
    });
    made.has_new_header = true;
    let header = Header::new(spec.block_size, Some(protection.protection_type));
    // Allocate the bitmap, so that a bit can be set while the file system is full.
    sys::write_at(file, &vec![0; HEADER_LEN as usize - PAGE], PAGE as u64)?;
    write_header(file, &header)?;
    Ok(Ok(Some(header)))
}

/// Returns whether a file has no data. If a crash has interrupted its creation, it may contain
/// zeroes, but no frame.
fn is_blank(file: &Handle) -> io::Result<bool> {
    if sys::file_size(file)? > HEADER_LEN {
        return Ok(false);
    }
    let mut bytes = vec![0; HEADER_LEN as usize];
    let len = sys::read_at(file, &mut bytes, 0)?;
    Ok(bytes[..len].iter().all(|byte| *byte == 0))
}

/// Reads the header of a file that was checked when it was opened.
///
/// # Errors
/// Returns I/O errors. `InvalidData` if it was changed.
pub(super) fn read_header(file: &Handle, block_size: u32) -> io::Result<Header> {
    let mut page = [0; PAGE];
    let len = sys::read_at(file, &mut page, 0)?;
    Header::parse(&page[..len], block_size)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes the first page durably. A crash preserves either the previous or the new header, because
/// a device does not split the sector that contains it.
pub(super) fn write_header(file: &Handle, header: &Header) -> io::Result<()> {
    sys::write_at(file, &header.encode(), 0)?;
    sys::sync_data(file)
}
