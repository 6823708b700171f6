//! GET LBA STATUS data (SBC-3 5.6.2).

use nom::bytes::complete::take;
use nom::multi::many0;
use nom::{IResult, Parser};

use super::field::{Field, be32, be64, bits};

/// Size of the header before the first descriptor, in bytes.
pub const HEADER_LEN: usize = 8;
/// Size of a descriptor, in bytes.
pub const DESCRIPTOR_LEN: usize = 16;

/// PARAMETER DATA LENGTH: number of bytes after this field.
const DATA_LENGTH: Field<u32> = be32(0);
/// LBA STATUS LOGICAL BLOCK ADDRESS in a descriptor.
const LBA: Field<u64> = be64(0);
/// NUMBER OF LOGICAL BLOCKS in a descriptor.
const BLOCKS: Field<u32> = be32(8);
/// PROVISIONING STATUS in a descriptor.
const STATUS: Field<u8> = bits(12, 3, 0);

/// PROVISIONING STATUS: mapped, or unknown.
pub const MAPPED: u8 = 0;
/// PROVISIONING STATUS: deallocated.
pub const DEALLOCATED: u8 = 1;

/// An LBA status descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LbaStatus {
    /// LBA of the first block.
    pub lba: u64,
    /// Number of blocks with the same status.
    pub blocks: u32,
    /// PROVISIONING STATUS: 0 mapped or unknown, 1 deallocated, 2 anchored.
    pub status: u8,
}

/// Creates the data with the given descriptors.
pub(crate) fn encode(runs: &[LbaStatus]) -> Vec<u8> {
    let mut data = vec![0; HEADER_LEN + DESCRIPTOR_LEN * runs.len()];
    let counted = (data.len() - 4) as u32;
    DATA_LENGTH.set(&mut data, counted);
    for (run, bytes) in runs
        .iter()
        .zip(data[HEADER_LEN..].chunks_mut(DESCRIPTOR_LEN))
    {
        LBA.set(bytes, run.lba);
        BLOCKS.set(bytes, run.blocks);
        STATUS.set(bytes, run.status);
    }
    data
}

/// Returns all complete descriptors, in order.
#[must_use]
pub fn parse(data: &[u8]) -> Vec<LbaStatus> {
    // The length starts after this field, and there are 4 reserved bytes before the first
    // descriptor.
    let declared = DATA_LENGTH.get(data).unwrap_or(0).saturating_sub(4) as usize;
    let list = data.get(HEADER_LEN..).unwrap_or_default();
    let parsed = many0(descriptor).parse(&list[..declared.min(list.len())]);
    parsed.map(|(_, runs)| runs).unwrap_or_default()
}

fn descriptor(data: &[u8]) -> IResult<&[u8], LbaStatus, ()> {
    let (rest, bytes) = take(DESCRIPTOR_LEN)(data)?;
    let run = LbaStatus {
        lba: LBA.get(bytes).unwrap_or_default(),
        blocks: BLOCKS.get(bytes).unwrap_or_default(),
        status: STATUS.get(bytes).unwrap_or_default(),
    };
    Ok((rest, run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_descriptors_roundtrip() {
        let runs = [(0, 8, MAPPED), (8, 0xffff_ffff, DEALLOCATED)];
        let runs = runs.map(|(lba, blocks, status)| LbaStatus {
            lba,
            blocks,
            status,
        });
        let data = encode(&runs);
        assert_eq!(data[..8], [0, 0, 0, 36, 0, 0, 0, 0]);
        assert_eq!(parse(&data), runs);
        assert_eq!(parse(&data[..39]), runs[..1]);
        assert_eq!(parse(&data[..7]), []);
    }
}
