//! Management datagrams, as used by programs with libibumad.

use std::ffi::c_int;
use std::time::Duration;

/// Address of the other end of a datagram (`ib_mad_addr_t`), in network byte order except for
/// `pkey_index`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct MadAddr {
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) lid: u16,
    pub(crate) sl: u8,
    pub(crate) path_bits: u8,
    pub(crate) grh_present: u8,
    pub(crate) gid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) gid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) pkey_index: u16,
    pub(crate) reserved: [u8; 6],
}

/// A datagram with its address (`ib_user_mad_t`), followed by its bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UserMad {
    pub(crate) agent_id: u32,
    pub(crate) status: u32,
    pub(crate) timeout_ms: u32,
    pub(crate) retries: u32,
    pub(crate) length: u32,
    pub(crate) addr: MadAddr,
}

const _: () = assert!(size_of::<UserMad>() == 64);

/// A datagram for a program: either a response, or its own request with an error.
pub(crate) struct MadResponse {
    pub(crate) head: UserMad,
    /// A MAD, or the header of a MAD and the data of a multi-segment transfer.
    pub(crate) bytes: Vec<u8>,
}

impl MadResponse {
    pub(crate) fn new(head: UserMad, bytes: Vec<u8>) -> Self {
        Self { head, bytes }
    }

    #[cfg(test)]
    pub(crate) fn into_parts(self) -> (c_int, Vec<u8>) {
        (self.head.status.cast_signed(), self.bytes)
    }
}

impl UserMad {
    #[cfg(test)]
    pub(crate) fn with_timeout(timeout_ms: u32, retries: u32) -> Self {
        // SAFETY: it only contains integers.
        let zero: Self = unsafe { std::mem::zeroed() };
        Self {
            timeout_ms,
            retries,
            ..zero
        }
    }

    /// Returns the response timeout, or 0 if no response is expected.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.into())
    }

    /// Returns the number of retries.
    pub(crate) fn retries(&self) -> u32 {
        self.retries
    }

    pub(crate) fn set_status(&mut self, status: c_int) {
        self.status = status.unsigned_abs();
    }

    /// Sets the length, which is the size of the header plus this number of bytes.
    pub(crate) fn set_length(&mut self, bytes: usize) {
        self.length = (size_of::<Self>() + bytes) as u32;
    }
}
