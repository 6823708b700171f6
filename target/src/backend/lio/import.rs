//! [`import`]: creates a protected file from the files of LIO.

use std::ops::ControlFlow;
use std::path::Path;

use riser_scsi::config::ProtectionType;
use riser_scsi::protection::Tuple;

use super::error::ConversionError;
use super::files::{LioFiles, NewFile, Source, publish};
use super::verify::{Conversion, PIECE, Progress, Verifier, check_type};
use crate::backend::protected::{HEADER_LEN, Header, Layout, PAGE, inverted};

/// Creates a protected file with the blocks and tuples of a backstore of LIO. `watch` receives the
/// progress, and can stop the conversion.
///
/// # Errors
/// Returns a [`ConversionError`], after which the file does not exist. All blocks are verified
/// before [`ConversionError::Defects`] is returned.
pub fn import(
    from: &LioFiles,
    protection_type: ProtectionType,
    block_size: u32,
    disk: &Path,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Conversion, ConversionError> {
    check_type(Some(protection_type))?;
    let mut image = Source::open(&from.image)?;
    let tuples = Source::open(&from.protection)?;
    let blocks = count_blocks(&image, &tuples, block_size)?;
    let disk = NewFile::create(disk)?;
    let verifier = Verifier::new(protection_type, block_size, blocks, watch);
    let conversion = copy(&mut image, &tuples, &disk, verifier)?;
    let header = Header::new(block_size, Some(protection_type));
    // Allocate the bitmap as well, so that a bit can be set while the file system is full.
    let mut bytes = vec![0; HEADER_LEN as usize];
    bytes[..PAGE].copy_from_slice(&header.encode());
    disk.write(&bytes, 0)?;
    publish(vec![disk])?;
    Ok(conversion)
}

/// Returns the number of blocks. LIO does not use an incomplete block at the end of an image.
fn count_blocks(image: &Source, tuples: &Source, block_size: u32) -> Result<u64, ConversionError> {
    let blocks_of = |size: u32| image.len() / u64::from(size);
    let len_of = |size: u32| blocks_of(size) * Tuple::LEN as u64;
    if blocks_of(block_size) == 0 {
        return Err(ConversionError::Empty {
            path: image.path().to_owned(),
            block_size,
        });
    }
    if tuples.len() != len_of(block_size) {
        return Err(ConversionError::Size {
            path: tuples.path().to_owned(),
            len: tuples.len(),
            blocks: blocks_of(block_size),
            block_size,
            wanted: len_of(block_size),
            other: [512, 4096]
                .into_iter()
                .find(|size| tuples.len() == len_of(*size)),
        });
    }
    Ok(blocks_of(block_size))
}

/// Copies all blocks to frames.
fn copy(
    image: &mut Source,
    tuples: &Source,
    disk: &NewFile,
    mut verifier: Verifier<'_>,
) -> Result<Conversion, ConversionError> {
    let (blocks, block_size) = verifier.blocks();
    let (block, layout) = (u64::from(block_size), Layout::new(block_size));
    disk.set_len(layout.file_len(blocks * block))?;
    let (mut data, mut tags, mut frames) = (Vec::new(), Vec::new(), Vec::new());
    let mut lba = 0;
    while lba < blocks {
        let count = (PIECE / block).min(blocks - lba);
        let range = lba * block..(lba + count) * block;
        tags.resize(count as usize * Tuple::LEN, 0);
        tuples.read(&mut tags, lba * Tuple::LEN as u64)?;
        let has_data = image.has_data(&range)?;
        if has_data || tags.iter().any(|byte| *byte != u8::MAX) {
            data.clear();
            data.resize((count * block) as usize, 0);
            if has_data {
                image.read(&mut data, range.start)?;
            }
            frames.clear();
            let blocks = data.chunks_exact(block_size as usize);
            for ((block, tuple), lba) in blocks.zip(tags.as_chunks().0).zip(lba..) {
                verifier.check(lba, block, Tuple::parse(*tuple));
                frames.extend_from_slice(block);
                frames.extend_from_slice(&inverted(*tuple));
            }
            if !verifier.has_failed() {
                disk.write_sparse(&frames, layout.medium_offset(range.start))?;
            }
        } else {
            verifier.skip(count);
        }
        lba += count;
        verifier.report(lba)?;
    }
    verifier.finish(image.path())
}
