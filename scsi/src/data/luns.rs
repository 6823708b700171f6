//! REPORT LUNS data (SPC-4 6.33).

use nom::bytes::complete::take;
use nom::multi::many0;
use nom::number::complete::be_u64;
use nom::{IResult, Parser};

use super::field::{Field, be32};
use crate::lun::LunId;

/// Size of the header before the list, in bytes.
pub const HEADER_LEN: usize = 8;
/// Size of a LUN, in bytes.
pub const LUN_LEN: usize = 8;

/// LUN LIST LENGTH in bytes.
const LIST_LENGTH: Field<u32> = be32(0);

/// Creates the data for a list of LUNs.
pub(crate) fn encode(luns: &[LunId]) -> Vec<u8> {
    let mut data = vec![0; HEADER_LEN];
    LIST_LENGTH.set(&mut data, (LUN_LEN * luns.len()) as u32);
    data.extend(luns.iter().flat_map(|lun| lun.encode()));
    data
}

/// Returns the LUNs of all normal logical units that use a simple format, in order.
#[must_use]
pub fn parse(data: &[u8]) -> Vec<LunId> {
    let Ok((_, luns)) = list(data) else {
        return Vec::new();
    };
    // Skip any well-known LUNs and hierarchical addresses, because our initiator can't use these.
    let luns = luns.into_iter().map(u64::to_be_bytes);
    luns.filter_map(LunId::addressed).collect()
}

fn list(data: &[u8]) -> IResult<&[u8], Vec<u64>, ()> {
    let declared = LIST_LENGTH.get(data).unwrap_or(0) as usize;
    let (list, _) = take(HEADER_LEN)(data)?;
    many0(be_u64).parse(&list[..declared.min(list.len())])
}
