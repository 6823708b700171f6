//! The ICRC of payload that stays where it is.

use riser_memory::MemSlice;

use crate::wire::Icrc;

/// Takes the bytes of a slice into an ICRC.
///
/// A program that writes a buffer while the device sends it breaks the contract of every RDMA
/// device; what it can spoil is the checksum of its own packet.
pub fn update_icrc(icrc: &mut Icrc, slice: &MemSlice) {
    slice.for_each_chunk(|bytes| icrc.update(bytes));
}
