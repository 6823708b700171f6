//! [`export`]: creates the files of LIO from a protected file.

use std::ops::ControlFlow;
use std::path::Path;

use riser_scsi::protection::Tuple;

use super::error::ConversionError;
use super::files::{LioFiles, NewFile, Source, publish};
use super::verify::{Conversion, PIECE, Progress, Verifier, check_type};
use crate::backend::protected::{HEADER_LEN, Header, HeaderError, Layout, PAGE, inverted};

/// Creates the files of a backstore of LIO with the blocks and tuples of a protected file. `watch`
/// receives the progress, and can stop the conversion.
///
/// # Errors
/// Returns a [`ConversionError`], after which the files do not exist. All blocks are verified before
/// [`ConversionError::Defects`] is returned.
pub fn export(
    disk: &Path,
    to: &LioFiles,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Conversion, ConversionError> {
    let mut disk = Source::open(disk)?;
    let header = read_header(&disk)?;
    let protection_type = check_type(header.protection_type)?;
    let layout = Layout::new(header.block_size);
    let blocks = layout.capacity(disk.len()) / u64::from(header.block_size);
    // In this order, because LIO only serves a disk whose image exists.
    let tuples = NewFile::create(&to.protection)?;
    let image = NewFile::create(&to.image)?;
    let verifier = Verifier::new(protection_type, header.block_size, blocks, watch);
    let conversion = copy(&mut disk, &image, &tuples, verifier)?;
    publish(vec![tuples, image])?;
    Ok(conversion)
}

/// Reads the header of a file without torn frames.
fn read_header(disk: &Source) -> Result<Header, ConversionError> {
    let path = disk.path().to_owned();
    if disk.len() < HEADER_LEN {
        return Err(ConversionError::Unprotected { path });
    }
    let mut bytes = vec![0; HEADER_LEN as usize];
    disk.read(&mut bytes, 0)?;
    let (page, bitmap) = bytes.split_at(PAGE);
    let header = match Header::parse(page, 512) {
        Err(HeaderError::BlockSize { found: 4096, .. }) => Header::parse(page, 4096),
        parsed => parsed,
    };
    let header = header.map_err(|source| match source {
        HeaderError::Missing => ConversionError::Unprotected { path: path.clone() },
        source => ConversionError::Header {
            path: path.clone(),
            source,
        },
    })?;
    match bitmap.iter().all(|byte| *byte == 0) {
        true => Ok(header),
        false => Err(ConversionError::Torn { path }),
    }
}

/// Copies all frames to blocks and tuples.
fn copy(
    disk: &mut Source,
    image: &NewFile,
    tuples: &NewFile,
    mut verifier: Verifier<'_>,
) -> Result<Conversion, ConversionError> {
    let (blocks, block_size) = verifier.blocks();
    let (block, layout) = (u64::from(block_size), Layout::new(block_size));
    image.set_len(blocks * block)?;
    let (mut frames, mut data, mut tags) = (Vec::new(), Vec::new(), Vec::new());
    let mut lba = 0;
    while lba < blocks {
        let count = (PIECE / block).min(blocks - lba);
        let start = layout.medium_offset(lba * block);
        let range = start..start + count * layout.frame();
        if disk.has_data(&range)? {
            frames.resize((count * layout.frame()) as usize, 0);
            disk.read(&mut frames, start)?;
            data.clear();
            tags.clear();
            let frames = frames.chunks_exact(layout.frame() as usize);
            for (frame, lba) in frames.zip(lba..) {
                let (block, tuple) = frame.split_last_chunk().expect("a frame has a tuple");
                let tuple = inverted(*tuple);
                verifier.check(lba, block, Tuple::parse(tuple));
                data.extend_from_slice(block);
                tags.extend_from_slice(&tuple);
            }
        } else {
            verifier.skip(count);
            data.clear();
            tags.clear();
            tags.resize(count as usize * Tuple::LEN, u8::MAX);
        }
        if !verifier.has_failed() {
            image.write_sparse(&data, lba * block)?;
            // A hole would be a tuple that does not match its block.
            tuples.write(&tags, lba * Tuple::LEN as u64)?;
        }
        lba += count;
        verifier.report(lba)?;
    }
    verifier.finish(disk.path())
}
