//! Layout of the fixed parts of information units. Values are not checked here.

use std::mem::size_of;

use zerocopy::big_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Opcode, SrpError};

macro_rules! raw {
    ($name:ident, $len:literal, $iu:literal { $($field:ident: $ty:ty),* $(,)? }) => {
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub(super) struct $name { $(pub(super) $field: $ty),* }

        const _: () = assert!(size_of::<$name>() == $len);

        impl $name {
            /// Returns the header at the start of `iu` and the remaining bytes.
            pub(super) fn split(iu: &[u8]) -> Result<(&Self, &[u8]), SrpError> {
                Self::ref_from_prefix(iu).map_err(|_| SrpError::Truncated {
                    field: $iu,
                    need: $len,
                    have: iu.len(),
                })
            }

            /// Writes the header to the start of `out` and returns the number of bytes.
            pub(super) fn write_to(&self, out: &mut [u8]) -> usize {
                out[..$len].copy_from_slice(self.as_bytes());
                $len
            }
        }
    };
}

raw!(RawLoginReq, 64, "SRP_LOGIN_REQ" {
    opcode: u8,
    reserved1: [u8; 7],
    tag: U64,
    req_it_iu_len: U32,
    reserved2: [u8; 4],
    req_buf_fmt: U16,
    req_flags: u8,
    reserved3: u8,
    imm_data_offset: U16,
    reserved4: [u8; 2],
    initiator_port_id: [u8; 16],
    target_port_id: [u8; 16],
});

raw!(RawLoginReqRdma, 56, "SRP_LOGIN_REQ (RDMA/CM form)" {
    tag: U64,
    req_buf_fmt: U16,
    req_flags: u8,
    opcode: u8,
    req_it_iu_len: U32,
    initiator_port_id: [u8; 16],
    target_port_id: [u8; 16],
    imm_data_offset: U16,
    reserved: [u8; 6],
});

raw!(RawLoginRsp, 52, "SRP_LOGIN_RSP" {
    opcode: u8,
    reserved1: [u8; 3],
    req_lim_delta: I32,
    tag: U64,
    max_it_iu_len: U32,
    max_ti_iu_len: U32,
    buf_fmt: U16,
    rsp_flags: u8,
    reserved2: [[u8; 5]; 5],
});

raw!(RawLoginRej, 32, "SRP_LOGIN_REJ" {
    opcode: u8,
    reserved1: [u8; 3],
    reason: U32,
    tag: U64,
    reserved2: [u8; 8],
    buf_fmt: U16,
    reserved3: [u8; 6],
});

raw!(RawCmd, 48, "SRP_CMD" {
    opcode: u8,
    sol_not: u8,
    reserved1: [u8; 3],
    buf_fmt: u8,
    data_out_desc_cnt: u8,
    data_in_desc_cnt: u8,
    tag: U64,
    reserved2: [u8; 4],
    lun: [u8; 8],
    reserved3: u8,
    task_attr: u8,
    reserved4: u8,
    add_cdb_len: u8,
    cdb: [u8; 16],
});

raw!(RawRsp, 36, "SRP_RSP" {
    opcode: u8,
    sol_not: u8,
    reserved1: [u8; 2],
    req_lim_delta: I32,
    tag: U64,
    reserved2: [u8; 2],
    flags: u8,
    status: u8,
    data_out_res_cnt: U32,
    data_in_res_cnt: U32,
    sense_data_len: U32,
    resp_data_len: U32,
});

raw!(RawTskMgmt, 48, "SRP_TSK_MGMT" {
    opcode: u8,
    sol_not: u8,
    reserved1: [u8; 6],
    tag: U64,
    reserved2: [u8; 4],
    lun: [u8; 8],
    reserved3: [u8; 2],
    tsk_mgmt_func: u8,
    reserved4: u8,
    task_tag: U64,
    reserved5: [u8; 8],
});

// SRP_I_LOGOUT, SRP_CRED_RSP and SRP_AER_RSP: a type and a tag.
raw!(RawTagOnly, 16, "information unit" {
    opcode: u8,
    reserved: [u8; 7],
    tag: U64,
});

// SRP_T_LOGOUT (a reason) and SRP_CRED_REQ (a request-limit delta): a type, a number and a tag.
raw!(RawNumbered, 16, "information unit" {
    opcode: u8,
    sol_not: u8,
    reserved: [u8; 2],
    number: U32,
    tag: U64,
});

raw!(RawAerReq, 36, "SRP_AER_REQ" {
    opcode: u8,
    sol_not: u8,
    reserved1: [u8; 2],
    req_lim_delta: I32,
    tag: U64,
    reserved2: [u8; 4],
    lun: [u8; 8],
    sense_data_len: U32,
    reserved3: [u8; 4],
});

/// Checks that an IU has the `expected` type.
pub(super) fn expect(byte: u8, expected: Opcode) -> Result<(), SrpError> {
    let found = Opcode::try_from(byte)?;
    if found == expected {
        Ok(())
    } else {
        Err(SrpError::UnexpectedOpcode(found))
    }
}

/// Used to parse the variable part of an IU. This keeps track of the offset from the start of the
/// IU, so that it can be included in errors, and never moves past the end.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    iu: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Starts at offset `at`. The caller must check that this is within `iu`.
    pub(super) fn new(iu: &'a [u8], at: usize) -> Self {
        debug_assert!(at <= iu.len());
        Self { iu, at }
    }

    /// Returns the offset from the start of the IU, in bytes.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Returns the next `len` bytes.
    pub(super) fn take_bytes(
        &mut self,
        field: &'static str,
        len: u64,
    ) -> Result<&'a [u8], SrpError> {
        // Use a saturating 64-bit addition: `len` was sent by the peer, and may be the product of a
        // count and a size, so this must not wrap around to a valid offset.
        let need = (self.at as u64).saturating_add(len);
        let short = SrpError::Truncated {
            field,
            need,
            have: self.iu.len(),
        };
        let end = usize::try_from(need).map_err(|_| short)?;
        let bytes = self.iu.get(self.at..end).ok_or(short)?;
        self.at = end;
        Ok(bytes)
    }

    /// Returns a view of the next struct with a fixed size.
    pub(super) fn view<T: FromBytes + KnownLayout + Immutable + Unaligned>(
        &mut self,
        field: &'static str,
    ) -> Result<&'a T, SrpError> {
        let bytes = self.take_bytes(field, size_of::<T>() as u64)?;
        Ok(T::ref_from_bytes(bytes).expect("slice has the size of the structure"))
    }
}
