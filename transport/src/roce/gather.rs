//! ICRC computation over payload in place.

use riser_memory::MemSlice;

use crate::wire::Icrc;

/// Updates an ICRC with the bytes of a slice.
///
/// An application must not write to a buffer while the device is sending it; this is true for all
/// RDMA devices. If it does, only the checksum of this packet will be wrong.
pub fn update_icrc(icrc: &mut Icrc, slice: &MemSlice) {
    slice.for_each_chunk(|bytes| icrc.update(bytes));
}
