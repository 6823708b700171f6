//! CM messages in wire format, following the MAD header. These structs are only used as views: bit
//! fields sharing a word are split by the parsers.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::super::ids::U24;
use super::super::mad::MAD_BODY_LEN;

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub(super) struct $name { $($(#[$fdoc])* pub(super) $field: $ty,)* }

        const _: () = assert!(size_of::<$name>() == MAD_BODY_LEN);
    };
}

/// Path in a REQ.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct PathRaw {
    pub(super) local_lid: U16,
    pub(super) remote_lid: U16,
    pub(super) local_gid: [u8; 16],
    pub(super) remote_gid: [u8; 16],
    /// Flow label 20 bits, reserved 6, packet rate 6.
    pub(super) flow_rate: U32,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    /// Service level 4 bits, subnet local 1, reserved 3.
    pub(super) sl_local: u8,
    /// Local ACK timeout 5 bits, reserved 3.
    pub(super) ack_timeout: u8,
}

layout! {
    /// REQ in wire format (IBTA 12.6.5).
    ReqRaw {
        local_comm_id: U32,
        reserved4: u8,
        vendor_id: U24,
        service_id: U64,
        ca_guid: U64,
        reserved24: U32,
        qkey: U32,
        qpn: U24,
        responder_resources: u8,
        local_eecn: U24,
        initiator_depth: u8,
        remote_eecn: U24,
        /// Remote CM response timeout 5 bits, transport service 2, flow control 1.
        remote_timeout: u8,
        starting_psn: U24,
        /// Local CM response timeout 5 bits, retry count 3.
        local_timeout: u8,
        pkey: U16,
        /// Path MTU 4 bits, RDC exists 1, RNR retry count 3.
        mtu_rnr: u8,
        /// Max CM retries 4 bits, SRQ 1, extended transport type 3.
        retries_srq: u8,
        primary: PathRaw,
        alternate: PathRaw,
        private_data: [u8; 92],
    }
}

layout! {
    /// MRA in wire format (IBTA 12.6.6).
    MraRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        /// Message 2 bits, reserved 6.
        message: u8,
        /// Service timeout 5 bits, reserved 3.
        timeout: u8,
        private_data: [u8; 222],
    }
}

layout! {
    /// REJ in wire format (IBTA 12.6.7).
    RejRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        /// Message 2 bits, reserved 6.
        message: u8,
        /// Size of the additional information 7 bits, reserved 1.
        info_len: u8,
        reason: U16,
        info: [u8; 72],
        private_data: [u8; 148],
    }
}

layout! {
    /// REP in wire format (IBTA 12.6.8).
    RepRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        qkey: U32,
        qpn: U24,
        vendor_id_high: u8,
        eecn: U24,
        vendor_id_mid: u8,
        starting_psn: U24,
        vendor_id_low: u8,
        responder_resources: u8,
        initiator_depth: u8,
        /// Target ACK delay 5 bits, failover accepted 2, flow control 1.
        ack_delay: u8,
        /// RNR retry count 3 bits, SRQ 1, reserved 4.
        rnr_srq: u8,
        ca_guid: U64,
        private_data: [u8; 196],
    }
}

layout! {
    /// RTU and DREP, which share a common format (IBTA 12.6.9 and 12.6.11).
    PairRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        private_data: [u8; 224],
    }
}

layout! {
    /// DREQ in wire format (IBTA 12.6.10).
    DreqRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        remote_qpn: U24,
        reserved11: u8,
        private_data: [u8; 220],
    }
}

layout! {
    /// LAP in wire format (IBTA 12.8.1).
    LapRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        reserved8: U32,
        remote_qpn: U24,
        /// Remote CM response timeout 5 bits, reserved 3.
        remote_timeout: u8,
        reserved16: U32,
        local_lid: U16,
        remote_lid: U16,
        local_gid: [u8; 16],
        remote_gid: [u8; 16],
        /// Flow label 20 bits, reserved 4, traffic class 8.
        flow_class: U32,
        hop_limit: u8,
        /// Reserved 2 bits, packet rate 6.
        rate: u8,
        /// Service level 4 bits, subnet local 1, reserved 3.
        sl_local: u8,
        /// Local ACK timeout 5 bits, reserved 3.
        ack_timeout: u8,
        private_data: [u8; 168],
    }
}

layout! {
    /// APR in wire format (IBTA 12.8.2).
    AprRaw {
        local_comm_id: U32,
        remote_comm_id: U32,
        info_len: u8,
        status: u8,
        reserved10: U16,
        info: [u8; 72],
        private_data: [u8; 148],
    }
}

layout! {
    /// SIDR_REQ in wire format (IBTA 12.11.1).
    SidrReqRaw {
        request_id: U32,
        pkey: U16,
        reserved6: U16,
        service_id: U64,
        private_data: [u8; 216],
    }
}

layout! {
    /// SIDR_REP in wire format (IBTA 12.11.2).
    SidrRepRaw {
        request_id: U32,
        status: u8,
        info_len: u8,
        vendor_id_high: U16,
        qpn: U24,
        vendor_id_low: u8,
        service_id: U64,
        qkey: U32,
        info: [u8; 72],
        private_data: [u8; 136],
    }
}
