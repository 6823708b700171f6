//! The ICRC of payload that stays where it is.

#![allow(
    unsafe_code,
    reason = "reads registered memory in place instead of copying every packet"
)]

use riser_memory::MemSlice;

use crate::wire::Icrc;

/// Takes the bytes of a slice into an ICRC.
///
/// A program that writes a buffer while the device sends it breaks the contract of every RDMA device;
/// what it can spoil here is the checksum of its own packet.
pub fn update_icrc(icrc: &mut Icrc, slice: &MemSlice) {
    // SAFETY: devices of this crate write memory on the thread that drives them, which is this one,
    // and buffers of posted sends are the device's until they complete.
    unsafe {
        slice
            .memory()
            .with_bytes(slice.offset(), slice.len(), |bytes| icrc.update(bytes));
    }
}
