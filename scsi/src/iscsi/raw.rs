//! Layout of the basic header segments. Values are not checked here.

use std::mem::size_of;

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::BHS_LEN;

macro_rules! bhs {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub(super) struct $name {
            pub(super) opcode: u8,
            pub(super) flags: u8,
            pub(super) byte2: u8,
            pub(super) byte3: u8,
            /// In 4-byte words.
            pub(super) total_ahs_length: u8,
            /// In bytes, without padding.
            pub(super) data_segment_length: [u8; 3],
            $(pub(super) $field: $ty),*
        }

        const _: () = assert!(size_of::<$name>() == BHS_LEN);

        impl $name {
            /// Returns this view of a header.
            pub(super) fn of(bhs: &[u8; BHS_LEN]) -> &Self {
                zerocopy::transmute_ref!(bhs)
            }

            /// Returns the wire format.
            #[allow(dead_code, reason = "the common header is only read")]
            pub(super) fn bytes(self) -> [u8; BHS_LEN] {
                zerocopy::transmute!(self)
            }
        }
    };
}

bhs! {
    /// Fields that are common to all headers.
    RawBhs { lun: [u8; 8], itt: U32, opcode_specific: [[u8; 4]; 7] }
}
bhs!(RawScsiCommand {
    lun: [u8; 8],
    itt: U32,
    expected_length: U32,
    cmd_sn: U32,
    exp_stat_sn: U32,
    cdb: [u8; 16],
});
bhs!(RawScsiResponse {
    reserved1: [u8; 8],
    itt: U32,
    snack_tag: U32,
    stat_sn: U32,
    exp_cmd_sn: U32,
    max_cmd_sn: U32,
    exp_data_sn: U32,
    bidi_residual: U32,
    residual: U32,
});
bhs!(RawTmfRequest {
    lun: [u8; 8],
    itt: U32,
    referenced_itt: U32,
    cmd_sn: U32,
    exp_stat_sn: U32,
    ref_cmd_sn: U32,
    exp_data_sn: U32,
    reserved: [u8; 8],
});
bhs! {
    /// Task management response, text response, logout response, NOP-In: a tag and sequence
    /// numbers.
    RawTargetCommon {
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        word36: U32,
        word40: U32,
        word44: U32,
    }
}
bhs! {
    /// NOP-Out, text request: a tag, a transfer tag and sequence numbers.
    RawInitiatorCommon {
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        cmd_sn: U32,
        exp_stat_sn: U32,
        word32: U32,
        word36: U32,
        word40: U32,
        word44: U32,
    }
}
bhs!(RawLoginRequest {
    isid: [u8; 6],
    tsih: U16,
    itt: U32,
    cid: U16,
    reserved1: [u8; 2],
    cmd_sn: U32,
    exp_stat_sn: U32,
    reserved2: [[u8; 8]; 2],
});
bhs!(RawLoginResponse {
    isid: [u8; 6],
    tsih: U16,
    itt: U32,
    reserved1: [u8; 4],
    stat_sn: U32,
    exp_cmd_sn: U32,
    max_cmd_sn: U32,
    status_class: u8,
    status_detail: u8,
    reserved2: [u8; 10],
});
bhs!(RawLogoutRequest {
    reserved1: [u8; 8],
    itt: U32,
    cid: U16,
    reserved2: [u8; 2],
    cmd_sn: U32,
    exp_stat_sn: U32,
    reserved3: [[u8; 8]; 2],
});
bhs!(RawAsyncMessage {
    lun: [u8; 8],
    itt: U32,
    reserved1: [u8; 4],
    stat_sn: U32,
    exp_cmd_sn: U32,
    max_cmd_sn: U32,
    async_event: u8,
    async_vcode: u8,
    parameter1: U16,
    parameter2: U16,
    parameter3: U16,
    reserved2: [u8; 4],
});
